"""The planner view: (episode, step) to one question and its answer, as MemER trains it.

Windows, memory, targets and history come from memer.windows, which the rollout calls too. Changing anything
here never rebuilds shards.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data.views.augment import MemoryAugmentation
from data.views.base import chosen_contract
from data.views.frames import FrameCache, FrameProvider
from memer.contract import Contract
from memer.episode import Episode, Segment, labels_from_segments
from memer.errors import UsageError
from memer.keyframes import KeyframeRules
from memer.sample import PlannerSample
from memer.settings import check_positive
from memer.windows import (
    build_question,
    count_dropped,
    recent_indices,
    split_keyframes,
    subtask_history,
    target_index,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTargets:
    """What the labels of one episode ask of a planner; needs no frames.

    Attributes:
        keyframes: raw frames that the rules mark, ascending.
        labels: target label per step, None where the target frame is unlabelled.
    """

    keyframes: tuple[int, ...]
    labels: tuple[str | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The steps of one episode that become samples.

    Attributes:
        steps: ascending.
        weights: how often each step is used per epoch on average, >= 0.
        positions: answer positions per step.
        num_memory: memory images per step.
        skipped_unlabelled: steps left out because their target has no label.
        dropped_keyframes: (step, keyframe) pairs that the grid of the step cannot show.
    """

    steps: tuple[int, ...]
    weights: tuple[float, ...]
    positions: tuple[tuple[int, ...], ...]
    num_memory: tuple[int, ...]
    skipped_unlabelled: int
    dropped_keyframes: int


class PlannerView:
    """Samples of a planner from labelled episodes.

    Args:
        contract: windows, memory form, camera layout; its rules hash is set here or must agree.
        rules: which frames are keyframes.
        sample_stride: every how many raw frames a step becomes a sample, >= 1, from frame 0.
        transition_weight: uses per epoch of a step near a change of the target label.
        transition_before: how near before the change, in subsampled steps.
        transition_after: how near from the change on; there the answer has to be found anew while the robot
            still does what it did.
        answer_weight: uses per epoch of a step whose answer names a position. The larger weight counts.
        augmentation: noise on memory images, off when None.
    """

    sample_type: type = PlannerSample

    def __init__(
        self,
        contract: Contract,
        *,
        rules: KeyframeRules,
        sample_stride: int = 1,
        transition_weight: float = 1.0,
        transition_before: int = 4,
        transition_after: int = 4,
        answer_weight: float = 1.0,
        augmentation: MemoryAugmentation | None = None,
    ) -> None:
        for name, value in (("transition_weight", transition_weight), ("answer_weight", answer_weight)):
            check_positive(f"view.{name}", value)
        for name, reach, least in (
            ("sample_stride", sample_stride, 1),
            ("transition_before", transition_before, 0),
            ("transition_after", transition_after, 0),
        ):
            if reach < least:
                raise UsageError(f"view.{name}: {reach!r}, must be >= {least}")
        if contract.rules_hash not in ("", rules.rules_hash):
            raise UsageError(
                f"view.rules: hash {rules.rules_hash[:12]} differs from {contract.rules_hash[:12]} of the "
                "contract; use the rules that the contract was made with"
            )
        self.contract = replace(contract, rules_hash=rules.rules_hash)
        self.columns: tuple[str, ...] = ()
        self.rules = rules
        self.sample_stride = sample_stride
        self.transition_weight = transition_weight
        self.transition_before = transition_before
        self.transition_after = transition_after
        self.answer_weight = answer_weight
        self.augmentation = augmentation

    def targets(self, segments: Sequence[Segment], *, num_frames: int) -> EpisodeTargets:
        """Keyframes and target labels of an episode."""
        labels = labels_from_segments(segments, num_frames)
        windows = self.contract.shown_windows
        return EpisodeTargets(
            keyframes=tuple(self.rules.select_segments(segments)),
            labels=tuple(labels[target_index(t, num_frames, settings=windows)] for t in range(num_frames)),
        )

    def steps(self, targets: EpisodeTargets) -> StepPlan:
        """Choose and weigh the steps of an episode; unlabelled targets are skipped and counted."""
        near = self._near_change(targets.labels)
        chosen: list[int] = []
        weights: list[float] = []
        positions: list[tuple[int, ...]] = []
        memory_counts: list[int] = []
        skipped = dropped = 0
        for t in range(0, len(targets.labels), self.sample_stride):
            if targets.labels[t] is None:
                skipped += 1
                continue
            memory, kept = self.split(targets, t)
            dropped += count_dropped(
                targets.keyframes, t, subsample=self.contract.shown_windows.frame_subsample
            )
            chosen.append(t)
            weights.append(
                max(
                    1.0,
                    self.transition_weight if t in near else 1.0,
                    self.answer_weight if kept else 1.0,
                )
            )
            positions.append(tuple(kept))
            memory_counts.append(len(memory))
        return StepPlan(
            steps=tuple(chosen),
            weights=tuple(weights),
            positions=tuple(positions),
            num_memory=tuple(memory_counts),
            skipped_unlabelled=skipped,
            dropped_keyframes=dropped,
        )

    def split(self, targets: EpisodeTargets, t: int) -> tuple[list[int], list[int]]:
        """(memory frames, positions) at step t, without noise."""
        windows = self.contract.shown_windows
        return split_keyframes(
            targets.keyframes,
            t,
            subsample=windows.frame_subsample,
            length=windows.recent_frames_length,
            memory_length=windows.keyframes_length,
        )

    def sample(
        self,
        episode: Episode,
        t: int,
        *,
        targets: EpisodeTargets | None = None,
        frames: FrameProvider | None = None,
        epoch: int = 0,
        repeat: int = 0,
    ) -> PlannerSample:
        """The sample of step t: the same for the same arguments, on any machine and in any order.

        Args:
            episode: frames and labels.
            t: raw frame.
            targets: from `targets` for this episode, computed when None.
            frames: gives stacked frames, and may keep them between calls; None decodes each time.
            epoch: with `repeat` it seeds the noise; nothing else depends on it.
            repeat: number of this use of the step within its epoch.

        Raises:
            ValueError: the target of t is unlabelled.
        """
        if targets is None:
            targets = self.targets(episode.segments, num_frames=episode.num_frames)
        subtask = targets.labels[t]
        if subtask is None:
            raise ValueError(
                f"episode {episode.episode_index} of {episode.source}: step {t} has no target label"
            )
        sample_id = f"episode_{episode.episode_index:06d}_t{t:06d}"
        memory, positions = self.split(targets, t)
        windows = self.contract.shown_windows
        context = recent_indices(t, subsample=windows.frame_subsample, length=windows.recent_frames_length)
        if self.augmentation is not None and windows.keyframes_length:
            memory = self.augmentation.apply(
                memory,
                before=context[0],
                limit=windows.keyframes_length,
                name=f"{episode.source}/{sample_id}/{epoch}/{repeat}",
            )
        cache = FrameCache(max_bytes=0) if frames is None else frames
        shown = cache.fetch(episode, memory + context, layout=self.contract.cameras)
        question = build_question(
            t,
            contract=self.contract,
            memory_indices=memory,
            frame=shown.__getitem__,
            source=episode.source,
            episode_index=episode.episode_index,
            instruction=episode.instruction_at(t),
            history=self._history(targets, t) if self.contract.shows_history else (),
        )
        return PlannerSample(
            sample_id=sample_id,
            source=episode.source,
            episode_index=episode.episode_index,
            step=t,
            question=question,
            subtask=subtask,
            positions=tuple(positions),
        )

    def histograms(self, plans: Iterable[tuple[EpisodeTargets, StepPlan]]) -> dict[str, Any]:
        """See `plan_histograms`."""
        return plan_histograms(plans)

    @property
    def frame_bytes(self) -> int:
        """Bytes of one stacked frame."""
        width, height = self.contract.cameras.stacked_size
        return 3 * width * height

    def clip_bytes(self, clip_steps: int) -> int:
        """The steps' windows and the memory on each phase of the grid."""
        windows = self.contract.shown_windows
        grid = math.gcd(self.sample_stride, windows.frame_subsample)
        frames = (clip_steps * self.sample_stride + windows.span_frames) // grid
        phases = min(clip_steps, windows.frame_subsample // grid)
        return (frames + windows.keyframes_length * phases) * self.frame_bytes

    def _history(self, targets: EpisodeTargets, t: int) -> tuple[str, ...]:
        # The rollout's earlier answers lie one stride apart; at stride 1 this is every earlier step.
        earlier = [targets.labels[k] for k in range(t % self.sample_stride, t, self.sample_stride)]
        running = next((label for label in reversed(earlier) if label is not None), None)
        return subtask_history(earlier, running=running, length=self.contract.history_length)

    def _near_change(self, labels: Sequence[str | None]) -> set[int]:
        subsample = self.contract.shown_windows.frame_subsample
        before, after = self.transition_before * subsample, self.transition_after * subsample
        near: set[int] = set()
        for k in range(1, len(labels)):
            if labels[k] != labels[k - 1]:
                near.update(range(k - before, k + after))
        return near


def plan_histograms(plans: Iterable[tuple[EpisodeTargets, StepPlan]]) -> dict[str, Any]:
    """Counts to look at before training: labels, positions, memory images, and what was left out.

    Returns:
        Plain JSON values: `samples`, `weighted_samples`, `labels`, `positions` (position -> count, "none" for
        an empty answer), `memory_images`, `skipped_unlabelled`, `dropped_keyframes`.
    """
    labels: Counter[str] = Counter()
    positions: Counter[int] = Counter()
    memory: Counter[int] = Counter()
    empty = skipped = dropped = samples = 0
    weighted = 0.0
    for targets, plan in plans:
        samples += len(plan.steps)
        weighted += sum(plan.weights)
        skipped += plan.skipped_unlabelled
        dropped += plan.dropped_keyframes
        labels.update(str(targets.labels[t]) for t in plan.steps)
        memory.update(plan.num_memory)
        for kept in plan.positions:
            positions.update(kept)
            empty += not kept
    return {
        "samples": samples,
        "weighted_samples": round(weighted, 3),
        "labels": dict(sorted(labels.items())),
        "positions": {"none": empty, **{str(p): n for p, n in sorted(positions.items())}},
        "memory_images": {str(count): n for count, n in sorted(memory.items())},
        "skipped_unlabelled": skipped,
        "dropped_keyframes": dropped,
    }


@dataclass(frozen=True, kw_only=True)
class PlannerViewConfig:
    """What a run chooses about its planner view (conf/view); the data's contract joins at `bind`.

    Attributes:
        contract: the choices of conf/contract as plain values: windows, prompt, pixel bounds, memory form and
            mode, history length. Fields that are null keep their standard value.
        rules: a rule file or `all_last`; there is no silent default.
        sample_stride: see PlannerView, as the fields below.
        transition_weight: uses per epoch near label changes.
        transition_before: subsampled steps.
        transition_after: subsampled steps.
        answer_weight: uses per epoch of non-empty answers.
        augmentation: noise on memory images or None.
    """

    contract: Mapping[str, Any]
    rules: str
    sample_stride: int
    transition_weight: float
    transition_before: int
    transition_after: int
    answer_weight: float
    augmentation: MemoryAugmentation | None

    def bind(
        self, contract: Contract, *, sample_stride: int | None = None, plain: bool = False
    ) -> PlannerView:
        """The view over data of `contract`.

        Args:
            contract: of the shards: fps, cameras and statistics are taken from it.
            sample_stride: another stride, for validation.
            plain: every chosen step once, without noise, for validation.
        """
        return PlannerView(
            chosen_contract(contract, self.contract),
            rules=rules_from(self.rules),
            sample_stride=self.sample_stride if sample_stride is None else sample_stride,
            transition_weight=1.0 if plain else self.transition_weight,
            transition_before=self.transition_before,
            transition_after=self.transition_after,
            answer_weight=1.0 if plain else self.answer_weight,
            augmentation=None if plain else self.augmentation,
        )


def rules_from(value: str | Path) -> KeyframeRules:
    """Keyframe rules from `all_last` or a file."""
    if str(value) == "all_last":
        return KeyframeRules.all_last()
    return KeyframeRules.from_file(value)
