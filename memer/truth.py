"""What is true about a labelled episode at each evaluated step: targets, true memory, keyframe events."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memer.contract import WindowSettings
from memer.episode import Episode
from memer.windows import align, recent_indices, split_keyframes, target_index


@dataclass(frozen=True, slots=True)
class Truth:
    """What is true about one episode at one stride, whatever the planner says.

    Attributes:
        labels: one label per raw frame, None where unlabelled.
        keyframes: raw frames that the rules mark, ascending.
        windows: the windows that are shown (`Contract.shown_windows`).
        eval_stride: raw frames between evaluated steps.
    """

    labels: Sequence[str | None]
    keyframes: tuple[int, ...]
    windows: WindowSettings
    eval_stride: int = 1

    @classmethod
    def of(
        cls, episode: Episode, keyframes: Iterable[int], *, windows: WindowSettings, eval_stride: int
    ) -> "Truth":
        """The truth of an episode whose keyframes the rules have selected."""
        return cls(episode.labels(), tuple(sorted(set(keyframes))), windows, eval_stride)

    @property
    def steps(self) -> range:
        """Evaluated raw frames."""
        return range(0, len(self.labels), self.eval_stride)

    def target_step(self, t: int) -> int:
        """Raw frame whose label is the target at `t`."""
        return target_index(t, len(self.labels), settings=self.windows)

    def target(self, t: int) -> str | None:
        """Label to name at `t`, None where unlabelled."""
        return self.labels[self.target_step(t)]

    def context(self, t: int) -> list[int]:
        """The window at `t`."""
        return recent_indices(
            t, subsample=self.windows.frame_subsample, length=self.windows.recent_frames_length
        )

    def split(self, t: int) -> tuple[list[int], list[int]]:
        """(memory frames, positions) that training shows and asks for at `t`."""
        memory, positions = split_keyframes(
            self.keyframes,
            t,
            subsample=self.windows.frame_subsample,
            length=self.windows.recent_frames_length,
            memory_length=self.windows.keyframes_length,
        )
        return list(memory), list(positions)

    def nominations(self, t: int) -> list[tuple[int, int]]:
        """(voted frame, keyframe behind the vote) of a perfect planner at `t`."""
        start = self.context(t)[0]
        inside = self.keyframes[bisect_left(self.keyframes, start) : bisect_right(self.keyframes, t)]
        return [(align(k, anchor=start, subsample=self.windows.frame_subsample), k) for k in inside]

    def events(self) -> tuple[list[tuple[int, int]], int]:
        """Keyframes grouped as a perfect planner's votes group them, and how many are never nominated.

        Returns:
            ([(first keyframe, last keyframe) per group], number of keyframes in no evaluated window). At
            stride 1 keyframes join when they lie at most D + s - 1 frames apart.
        """
        votes = sorted({pair for t in self.steps for pair in self.nominations(t)})
        groups: list[list[int]] = []
        previous = None
        for vote, keyframe in votes:
            if previous is None or vote - previous > self.windows.merge_frames:
                groups.append([])
            groups[-1].append(keyframe)
            previous = vote
        missed = len(set(self.keyframes) - {keyframe for _, keyframe in votes})
        return [(min(group), max(group)) for group in groups], missed

    def changes(self) -> list[int]:
        """Raw frames at which the target becomes another label; unlabelled frames in between do not count."""
        found, running = [], None
        for t in range(len(self.labels)):
            target = self.target(t)
            if target is None:
                continue
            if running is not None and target != running:
                found.append(t)
            running = target
        return found
