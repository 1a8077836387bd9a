"""The visual planner's view: the plan frames of all segments of an episode, as its world model learns them.

Frames come from memer.plan_windows, which the run time calls too. Source: MaP-WAM specification, section 7.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.views.base import FeatureReader, chosen_contract
from data.views.frames import FrameProvider
from data.views.plans import (
    canvas_bytes,
    canvas_stack,
    checked_segments,
    feature_key,
    no_canvases,
    segment_counts,
)
from memer.contract import Contract, plan_of
from memer.episode import Episode, Segment
from memer.errors import UsageError
from memer.plan_windows import episode_plan_indices, segment_plan_indices
from memer.sample import VisualPlannerSample


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSteps:
    """Samples of one episode.

    Attributes:
        steps: 0 alone for the whole episode, or the number of each segment from 0.
        weights: uses per epoch.
    """

    steps: tuple[int, ...]
    weights: tuple[float, ...]


class VisualPlannerView:
    """One sample per episode with all its segments; without memory, one per segment.

    Args:
        contract: with plan settings; `visual_plan=current_only` shows a segment nothing of its past.

    Raises:
        UsageError: no plan settings, or none of a visual plan.
    """

    sample_type: type = VisualPlannerSample

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.columns: tuple[str, ...] = ()
        self.plan = plan_of(contract)
        self.features: Mapping[str, FeatureReader] = {}
        if self.plan.visual_plan == "none":
            raise UsageError("contract.plan.visual_plan: none, so there is no visual planner to train")
        if self.plan.executor_context == "full_history":
            raise UsageError(
                "contract.plan.executor_context: full_history takes the visual plan's place, so there is no "
                "visual planner to train; use plan"
            )

    def targets(self, segments: Sequence[Segment], *, num_frames: int) -> tuple[Segment, ...]:
        """The segments, checked."""
        return checked_segments(segments, num_frames=num_frames)

    def steps(self, targets: tuple[Segment, ...]) -> PlanSteps:
        """The whole episode, or each segment."""
        count = 1 if self.plan.visual_plan == "memory" else len(targets)
        return PlanSteps(steps=tuple(range(count)), weights=(1.0,) * count)

    def sample(
        self,
        episode: Episode,
        t: int,
        *,
        targets: tuple[Segment, ...] | None = None,
        frames: FrameProvider | None = None,
        epoch: int = 0,
        repeat: int = 0,
    ) -> VisualPlannerSample:
        """The sample of the episode (t = 0), or of segment t from 0 on (`current_only`)."""
        if targets is None:
            targets = self.targets(episode.segments, num_frames=episode.num_frames)
        name = f"episode_{episode.episode_index:06d}"
        if self.plan.visual_plan == "memory":
            shown = targets
            indices = episode_plan_indices(shown, plan_frames=self.plan.plan_frames)
        else:
            shown = targets[t : t + 1]
            name = f"{name}_k{t + 1:03d}"
            indices = segment_plan_indices(shown[0].start, shown[0].end, plan_frames=self.plan.plan_frames)
        texts = tuple(segment.label for segment in shown)
        instruction = episode.instruction_at(indices[0])
        stored = self.features.get(episode.source)
        shows: dict[str, Any]
        if stored is None:
            shows = {"frames": canvas_stack(episode, indices, contract=self.contract, frames=frames)}
        else:
            shows = {
                "frames": no_canvases(self.plan),
                "latents": stored.latents(episode.episode_index, "clip", t),
                "text_features": stored.texts(texts),
                "instruction_features": stored.text(instruction),
            }
        return VisualPlannerSample(
            sample_id=name,
            source=episode.source,
            episode_index=episode.episode_index,
            texts=texts,
            instruction=instruction,
            **shows,
        )

    def feature_key(self) -> dict[str, Any]:
        """See PlanView."""
        return feature_key(self.plan, view="visual_planner")

    def clips(
        self, t: int, sample: VisualPlannerSample, targets: tuple[Segment, ...]
    ) -> dict[str, tuple[int, NDArray[np.uint8]]]:
        """The whole sample is one clip."""
        return {"clip": (t, sample.frames)}

    def words(self, sample: VisualPlannerSample) -> tuple[str, ...]:
        """Subtasks and instruction."""
        return (*sample.texts, sample.instruction)

    def histograms(self, plans: Iterable[tuple[tuple[Segment, ...], PlanSteps]]) -> dict[str, Any]:
        """Samples, segments per episode and text, their lengths, and how many are shorter than a plan."""
        listed = list(plans)
        short = sum(s.end - s.start < self.plan.plan_frames for targets, _ in listed for s in targets)
        return {
            "samples": sum(len(steps.steps) for _, steps in listed),
            "weighted_samples": round(sum(sum(steps.weights) for _, steps in listed), 3),
            **segment_counts(targets for targets, _ in listed),
            "shorter_than_plan": short,
        }

    @property
    def frame_bytes(self) -> int:
        """Bytes of one canvas."""
        return canvas_bytes(self.plan)

    def clip_bytes(self, clip_steps: int) -> int:
        """Nothing: samples share no more than the frames at the segments' borders."""
        return 0


@dataclass(frozen=True, kw_only=True)
class VisualPlannerViewConfig:
    """What a run chooses about its visual planner's view.

    Attributes:
        contract: the choices of conf/contract as plain values, `plan` among them.
    """

    contract: Mapping[str, Any]

    def bind(
        self, contract: Contract, *, sample_stride: int | None = None, plain: bool = False
    ) -> VisualPlannerView:
        """See ViewConfig; there is no stride and no noise."""
        return VisualPlannerView(chosen_contract(contract, self.contract))
