"""The language planner's view: after each finished segment, which subtask comes next.

The question is made by memer.plan_windows, which the run time calls too. Source: MaP-WAM specification,
section 6.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data.views.base import chosen_contract
from data.views.frames import FrameCache, FrameProvider
from data.views.plans import checked_segments, segment_counts
from memer.contract import Contract, plan_of
from memer.episode import Episode, Segment
from memer.errors import UsageError
from memer.plan_windows import DONE_TEXT, finished_indices, head_layout, next_subtask_question
from memer.sample import PlannerSample


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionSteps:
    """Samples of one episode.

    Attributes:
        steps: number of finished segments, 0 .. K - 1, and K where the end is asked for too.
        weights: uses per epoch.
        answers: text to learn, per step.
    """

    steps: tuple[int, ...]
    weights: tuple[float, ...]
    answers: tuple[str, ...]


class LanguagePlannerView:
    """One question per episode and segment.

    Args:
        contract: with plan settings, whose head camera is shown, and the prompt form `segments`.
        emit_done: ask once more after the last segment; the answer is DONE_TEXT.

    Raises:
        UsageError: no plan settings, or another prompt form.
    """

    sample_type: type = PlannerSample

    def __init__(self, contract: Contract, *, emit_done: bool = False) -> None:
        if contract.prompt.form != "segments":
            raise UsageError(
                f"contract.prompt.form: {contract.prompt.form!r}, must be segments for the language planner"
            )
        self.contract = contract
        self.columns: tuple[str, ...] = ()
        self.plan = plan_of(contract)
        self.emit_done = emit_done
        self._layout = head_layout(contract)

    def targets(self, segments: Sequence[Segment], *, num_frames: int) -> tuple[Segment, ...]:
        """The segments, checked."""
        return checked_segments(segments, num_frames=num_frames)

    def steps(self, targets: tuple[Segment, ...]) -> QuestionSteps:
        """One per segment."""
        answers = tuple(segment.label for segment in targets) + ((DONE_TEXT,) if self.emit_done else ())
        return QuestionSteps(steps=tuple(range(len(answers))), weights=(1.0,) * len(answers), answers=answers)

    def sample(
        self,
        episode: Episode,
        t: int,
        *,
        targets: tuple[Segment, ...] | None = None,
        frames: FrameProvider | None = None,
        epoch: int = 0,
        repeat: int = 0,
    ) -> PlannerSample:
        """The question after t finished segments; `step` is the frame at which it is asked."""
        if targets is None:
            targets = self.targets(episode.segments, num_frames=episode.num_frames)
        numbers = finished_indices(targets, t)
        provider = FrameCache(max_bytes=0) if frames is None else frames
        found = provider.fetch(episode, sorted(set(numbers)), layout=self._layout)
        step = targets[t].start if t < len(targets) else targets[-1].end - 1
        question = next_subtask_question(
            instruction=episode.instruction_at(step),
            done=[segment.label for segment in targets[:t]],
            images=[found[k] for k in numbers],
            source=episode.source,
            episode_index=episode.episode_index,
            numbers=numbers,
        )
        return PlannerSample(
            sample_id=f"episode_{episode.episode_index:06d}_k{t + 1:03d}",
            source=episode.source,
            episode_index=episode.episode_index,
            step=step,
            question=question,
            subtask=targets[t].label if t < len(targets) else DONE_TEXT,
            positions=(),
        )

    def histograms(self, plans: Iterable[tuple[tuple[Segment, ...], QuestionSteps]]) -> dict[str, Any]:
        """Samples, answers, images per question, and segments as `segment_counts` counts them."""
        listed = list(plans)
        labels = Counter(answer for _, steps in listed for answer in steps.answers)
        images = Counter(step + 1 for _, steps in listed for step in steps.steps)
        return {
            "samples": sum(len(steps.steps) for _, steps in listed),
            "weighted_samples": round(sum(sum(steps.weights) for _, steps in listed), 3),
            "labels": dict(sorted(labels.items())),
            "images": {str(count): n for count, n in sorted(images.items())},
            **segment_counts(targets for targets, _ in listed),
        }

    @property
    def frame_bytes(self) -> int:
        """Bytes of one head view."""
        width, height = self._layout.stacked_size
        return 3 * width * height

    def clip_bytes(self, clip_steps: int) -> int:
        """One picture per finished segment."""
        return (1 + clip_steps) * self.frame_bytes


@dataclass(frozen=True, kw_only=True)
class LanguagePlannerViewConfig:
    """What a run chooses about its language planner's view.

    Attributes:
        contract: the choices of conf/contract as plain values, `plan` and `prompt` among them.
        emit_done: see LanguagePlannerView.
    """

    contract: Mapping[str, Any]
    emit_done: bool = False

    def bind(
        self, contract: Contract, *, sample_stride: int | None = None, plain: bool = False
    ) -> LanguagePlannerView:
        """See ViewConfig; there is no stride and no noise."""
        return LanguagePlannerView(chosen_contract(contract, self.contract), emit_done=self.emit_done)
