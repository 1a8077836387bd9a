"""The executor's view: from every step of a segment, the chunk of actions and progress that follows.

An episode's action[k] is the command given at frame k; it leads to frame k + 1. Source: MaP-WAM
specification, sections 8 (targets), 9 (labels) and 11 (classification).
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from data.views.base import FeatureReader, PlanReader, chosen_contract
from data.views.frames import FrameProvider
from data.views.plans import (
    PlanSource,
    canvas_bytes,
    canvas_stack,
    checked_segments,
    feature_key,
    no_canvases,
    segment_counts,
    shows_imagined,
)
from memer.contract import Contract, plan_of
from memer.episode import Episode, Segment
from memer.errors import MemerError, UsageError
from memer.plan_settings import TEMPORAL_RATIO
from memer.plan_windows import clip_indices, segment_plan_indices
from memer.progress import progress_labels
from memer.sample import ExecutorSample
from memer.settings import check_count, check_positive

Tail = Literal["pad", "continue"]
ProgressPad = Literal["mask", "one"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentTargets:
    """What the labels of one episode ask of an executor.

    Attributes:
        segments: in order.
        starts: their first frames.
        lasts: last frame whose commands are supervised, per segment.
    """

    segments: tuple[Segment, ...]
    starts: tuple[int, ...]
    lasts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSteps:
    """Samples of one episode.

    Attributes:
        steps: raw frames t, ascending.
        weights: uses per epoch, more at the start of a segment where that is asked for.
        labels: subtask of each step.
        valid: supervised actions of each step.
        finished: steps that count as finished.
        skipped_one_frame: segments without a command of their own.
    """

    steps: tuple[int, ...]
    weights: tuple[float, ...]
    labels: tuple[str, ...]
    valid: tuple[int, ...]
    finished: int
    skipped_one_frame: int


class ExecutorView:
    """One sample per segment [i, j] and step t in [i, j - 1]; classification takes t = j too.

    Args:
        contract: with plan settings.
        sample_stride: every how many raw frames a step becomes a sample, >= 1, from each segment's start.
        tail: commands behind the end of the segment are padded and masked (`pad`), or those that follow in
            the next segment, if it begins at once, with progress 1 (`continue`).
        progress_pad: progress behind the end is masked (`mask`), or supervised as 1 (`one`).
        gripper: dimensions of a delta action that hold an absolute command, kept by padding; negative ones
            count from the end.
        start_weight: uses per epoch of the first steps of a segment. There the pictures alone tell where to
            go; a few steps later the robot's own state shows it, and most samples teach nothing about seeing.
        start_steps: how many these are, in raw frames.
        plan_source: frames of the plan are those of the demonstration (`real`), what a world model imagined
            for it (`generated`, from `imagined`), or one of them at random (`mixed`). The first reference is
            real always.

    Attributes:
        imagined: source name -> plans that a world model made for its segments; `real` needs none.

    Raises:
        UsageError: a value or a switch of the plan that this view cannot serve.
    """

    sample_type: type = ExecutorSample

    def __init__(
        self,
        contract: Contract,
        *,
        sample_stride: int = 1,
        tail: Tail = "pad",
        progress_pad: ProgressPad = "mask",
        gripper: Sequence[int] = (-1,),
        start_weight: float = 1.0,
        start_steps: int = 4,
        plan_source: PlanSource = "real",
    ) -> None:
        self.contract = contract
        self.columns: tuple[str, ...] = ("state", "action")
        self.plan = plan_of(contract)
        self.features: Mapping[str, FeatureReader] = {}
        self.imagined: Mapping[str, PlanReader] = {}
        for name, value, accepted in (
            ("tail", tail, get_args(Tail)),
            ("progress_pad", progress_pad, get_args(ProgressPad)),
            ("plan_source", plan_source, get_args(PlanSource)),
        ):
            if value not in accepted:
                raise UsageError(f"view.{name}: {value!r}, must be {' or '.join(accepted)}")
        if type(sample_stride) is not int or sample_stride < 1:
            raise UsageError(f"view.sample_stride: {sample_stride!r}, must be a number >= 1")
        check_positive("view.start_weight", start_weight)
        check_count("view.start_steps", start_steps, least=0)
        if self.plan.executor_context == "full_history":
            raise UsageError(
                "contract.plan.executor_context: full_history is for latency measurements; samples hold a "
                "plan, use plan"
            )
        if self.plan.plan_encoding == "episodic":
            raise UsageError(
                "contract.plan.plan_encoding: episodic needs the latents of whole episodes; samples hold the "
                "frames of one segment, use self_contained"
            )
        if plan_source != "real" and self.plan.visual_plan == "none":
            raise UsageError(
                f"view.plan_source: {plan_source}, but contract.plan.visual_plan is none; leave it at real"
            )
        self.plan_source = plan_source
        self.sample_stride = sample_stride
        self.tail = tail
        self.progress_pad = progress_pad
        self.gripper = self._dimensions(gripper)
        self.start_weight = start_weight
        self.start_steps = start_steps

    def targets(self, segments: Sequence[Segment], *, num_frames: int) -> SegmentTargets:
        """The segments, checked, with the last supervised frame of each."""
        checked = checked_segments(segments, num_frames=num_frames)
        lasts: list[int] = []
        for segment, following in zip(reversed(checked), (None, *reversed(checked)), strict=False):
            touching = self.tail == "continue" and following is not None and following.start == segment.end
            lasts.append(lasts[-1] if touching else segment.end - 1)
        return SegmentTargets(
            segments=checked, starts=tuple(s.start for s in checked), lasts=tuple(reversed(lasts))
        )

    def steps(self, targets: SegmentTargets) -> ChunkSteps:
        """Every `sample_stride`-th step of every segment of two frames or more."""
        whole = self.plan.progress_mode == "classification"
        steps: list[int] = []
        weights: list[float] = []
        labels: list[str] = []
        valid: list[int] = []
        finished = skipped = 0
        for segment, last in zip(targets.segments, targets.lasts, strict=True):
            if segment.end - segment.start == 1:
                skipped += 1
                continue
            mine = range(segment.start, segment.end if whole else segment.end - 1, self.sample_stride)
            steps += mine
            first = segment.start + self.start_steps
            weights += [self.start_weight if t < first else 1.0 for t in mine]
            labels += [segment.label] * len(mine)
            valid += [min(self.plan.action_horizon, last - t) for t in mine]
            finished += sum(self._finished(segment, t) for t in mine)
        return ChunkSteps(
            steps=tuple(steps),
            weights=tuple(weights),
            labels=tuple(labels),
            valid=tuple(valid),
            finished=finished,
            skipped_one_frame=skipped,
        )

    def sample(
        self,
        episode: Episode,
        t: int,
        *,
        targets: SegmentTargets | None = None,
        frames: FrameProvider | None = None,
        epoch: int = 0,
        repeat: int = 0,
    ) -> ExecutorSample:
        """The chunk that starts at raw frame t.

        Raises:
            ValueError: t belongs to no segment.
            UsageError: imagined plans are asked for, and the source has none.
            MemerError: state or action hold a value that is not a number.
        """
        if targets is None:
            targets = self.targets(episode.segments, num_frames=episode.num_frames)
        number = bisect_right(targets.starts, t) - 1
        if number < 0 or t >= targets.segments[number].end:
            raise ValueError(f"episode {episode.episode_index} of {episode.source}: step {t} has no segment")
        plan, segment, last = self.plan, targets.segments[number], targets.lasts[number]
        labels = progress_labels(segment.start, segment.end)
        future = np.arange(t + 1, t + plan.action_horizon + 1)
        inside = future < segment.end
        valid = future <= last
        shown = clip_indices(t, last=last, horizon=plan.action_horizon, stride=plan.frame_stride)
        references = (
            []
            if plan.visual_plan == "none"
            else segment_plan_indices(segment.start, segment.end, plan_frames=plan.plan_frames)
        )
        stored = self.features.get(episode.source)
        shows: dict[str, Any]
        if stored is None:
            use = f"{episode.source}/{episode.episode_index}/{t}/{epoch}/{repeat}"
            imagines = shows_imagined(self.plan_source, use=use)
            real = references[:1] if imagines else references
            pictures = canvas_stack(episode, real + shown, contract=self.contract, frames=frames)
            shows = {"plan_frames": pictures[: len(real)], "clip_frames": pictures[len(real) :]}
            if imagines:
                shows["plan_frames"] = np.concatenate([pictures[:1], self._imagined(episode, number)])
        else:
            at = episode.episode_index
            shows = {
                "plan_frames": no_canvases(plan),
                "clip_frames": no_canvases(plan),
                "plan_latents": stored.latents(at, "plan", number) if references else None,
                "clip_latents": stored.latents(at, "clip", t),
                "text_features": stored.text(segment.label),
                "instruction_features": stored.text(episode.instruction_at(t)),
            }
        span = plan.frame_stride * TEMPORAL_RATIO
        firsts = t + plan.frame_stride + span * np.arange(plan.num_future_latents)
        return ExecutorSample(
            sample_id=f"episode_{episode.episode_index:06d}_t{t:06d}",
            source=episode.source,
            episode_index=episode.episode_index,
            step=t,
            text=segment.label,
            instruction=episode.instruction_at(t),
            state=_finite(episode.state[t : t + 1], episode, field="state", frame=t)[0],
            progress=float(labels[t - segment.start]),
            actions=self._actions(episode, future, last=last),
            action_valid=valid,
            progress_target=np.where(
                inside, labels[np.minimum(future, segment.end - 1) - segment.start], np.float32(1)
            ),
            latent_valid=firsts <= last,
            finished=self._finished(segment, t),
            progress_valid=np.ones_like(valid) if self.progress_pad == "one" else valid,
            **shows,
        )

    def feature_key(self) -> dict[str, Any]:
        """See PlanView."""
        return feature_key(
            self.plan,
            view="executor",
            action_horizon=self.plan.action_horizon,
            frame_stride=self.plan.frame_stride,
            tail=self.tail,
        )

    def clips(
        self, t: int, sample: ExecutorSample, targets: SegmentTargets
    ) -> dict[str, tuple[int, NDArray[np.uint8]]]:
        """The clip of each step, the plan once per segment."""
        clips = {"clip": (t, sample.clip_frames)}
        if len(sample.plan_frames):
            clips["plan"] = (bisect_right(targets.starts, t) - 1, sample.plan_frames)
        return clips

    def words(self, sample: ExecutorSample) -> tuple[str, ...]:
        """Subtask and instruction."""
        return (sample.text, sample.instruction)

    def histograms(self, plans: Iterable[tuple[SegmentTargets, ChunkSteps]]) -> dict[str, Any]:
        """Samples per subtask, segments and their lengths, what padding leaves, and what was left out."""
        listed = list(plans)
        labels = Counter(label for _, steps in listed for label in steps.labels)
        samples = sum(len(steps.steps) for _, steps in listed)
        valid = sum(sum(steps.valid) for _, steps in listed)
        return {
            "samples": samples,
            "weighted_samples": round(sum(sum(steps.weights) for _, steps in listed), 3),
            "labels": dict(sorted(labels.items())),
            "valid_actions": round(valid / (samples * self.plan.action_horizon), 4) if samples else 0.0,
            "finished": sum(steps.finished for _, steps in listed),
            "skipped_one_frame": sum(steps.skipped_one_frame for _, steps in listed),
            **segment_counts(targets.segments for targets, _ in listed),
        }

    @property
    def frame_bytes(self) -> int:
        """Bytes of one canvas."""
        return canvas_bytes(self.plan)

    def clip_bytes(self, clip_steps: int) -> int:
        """The steps' frames, what follows the last one, and the plan's frames."""
        frames = clip_steps * self.sample_stride + self.plan.action_horizon + 1 + self.plan.plan_frames
        return frames * self.frame_bytes

    def _dimensions(self, gripper: object) -> tuple[int, ...]:
        """The gripper's dimensions, if actions have them."""
        values = next(iter(self.contract.statistics.get("action", {}).values()), ())
        listed = gripper if isinstance(gripper, Sequence) and not isinstance(gripper, str) else [gripper]
        for number in listed:
            if type(number) is not int or (values and not -len(values) <= number < len(values)):
                raise UsageError(
                    f"view.gripper: {gripper!r}, must be a list of dimensions"
                    + (f" of the actions, {-len(values)}..{len(values) - 1}" if values else "")
                )
        return tuple(listed)

    def _imagined(self, episode: Episode, number: int) -> NDArray[np.uint8]:
        plans = self.imagined.get(episode.source)
        if plans is None:
            raise UsageError(
                f"view.plan_source: {self.plan_source}, but {episode.source} has no imagined plans; make "
                "them with python -m data.build stage=plans and set data.plans=DIR"
            )
        return plans.frames(episode.episode_index, number)

    def _finished(self, segment: Segment, t: int) -> bool:
        return segment.end - 1 - t < self.plan.finish_margin

    def _actions(self, episode: Episode, future: NDArray[np.int64], *, last: int) -> NDArray[np.float32]:
        """float32[h, A]: the command that leads to each future frame, behind `last` padding."""
        rows = np.minimum(future, last) - 1
        _finite(episode.action[rows[0] : rows[-1] + 1], episode, field="action", frame=int(rows[0]))
        actions: NDArray[np.float32] = episode.action[rows]
        padded = future > last
        if self.plan.action_mode == "delta" and padded.any():
            still = np.zeros_like(actions[0])
            for dimension in self.gripper:
                still[dimension] = actions[-1, dimension]
            actions[padded] = still
        return actions


def _finite(rows: NDArray[np.float32], episode: Episode, *, field: str, frame: int) -> NDArray[np.float32]:
    if not np.isfinite(rows).all():
        at = tuple(int(k) for k in np.argwhere(~np.isfinite(rows))[0])
        raise MemerError(
            f"episode {episode.episode_index} of {episode.source}: {field} at frame {frame + at[0]} is "
            f"{rows[at]}; repair the table"
        )
    return rows


@dataclass(frozen=True, kw_only=True)
class ExecutorViewConfig:
    """What a run chooses about its executor's view; fields as in ExecutorView.

    Attributes:
        contract: the choices of conf/contract as plain values, `plan` among them.
        sample_stride: raw frames between samples.
        tail: pad or continue.
        progress_pad: mask or one.
        gripper: dimensions of delta actions that padding holds.
        start_weight: uses per epoch of a segment's first steps.
        start_steps: raw frames.
        plan_source: real, generated or mixed.
    """

    contract: Mapping[str, Any]
    sample_stride: int = 1
    tail: Tail = "pad"
    progress_pad: ProgressPad = "mask"
    gripper: Sequence[int] = (-1,)
    start_weight: float = 1.0
    start_steps: int = 4
    plan_source: PlanSource = "real"

    def bind(
        self, contract: Contract, *, sample_stride: int | None = None, plain: bool = False
    ) -> ExecutorView:
        """See ViewConfig; `plain` shows real plans, so that figures of all plan sources compare."""
        return ExecutorView(
            chosen_contract(contract, self.contract),
            sample_stride=self.sample_stride if sample_stride is None else sample_stride,
            tail=self.tail,
            progress_pad=self.progress_pad,
            gripper=self.gripper,
            start_weight=self.start_weight,
            start_steps=self.start_steps,
            plan_source="real" if plain else self.plan_source,
        )
