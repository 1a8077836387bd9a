"""Demonstrations of the embedded benchmark as a source of episodes; nothing is stored, all is generated."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from memer.episode import Episode, segments_from_labels
from memer.errors import MemerError, UsageError
from memer.tabletop import CAMERA_KEYS, demonstrate, demonstration_steps
from memer.tabletop.perturbations import FPS, USUAL, check_kinds
from memer.tabletop.tasks import SPLITS, world_class


@dataclass(frozen=True, slots=True, kw_only=True)
class TabletopSource:
    """Scripted demonstrations of one task.

    Attributes:
        task: one of memer.tabletop.TASKS.
        split: train, val or test; the episodes of different splits never coincide.
        num_episodes: episode numbers run from 0.
        seed: of the whole set.
        perturb: chance per second that something happens, 0..1; the demonstrator goes on from there.
        perturb_kinds: what may happen: freeze, slip, displace, drift. A drifting arm leaves its course, and
            the recorded commands lead it back: a policy that is to stay on course must have seen it.
        frame_size: edge of both square views, px.
    """

    task: str
    split: str = "train"
    num_episodes: int
    seed: int = 0
    perturb: float = 0.0
    perturb_kinds: Sequence[str] = USUAL
    frame_size: int = 128

    fps: ClassVar[float] = float(FPS)
    camera_keys: ClassVar[tuple[str, ...]] = CAMERA_KEYS

    def __post_init__(self) -> None:
        world_class(self.task)
        if self.split not in SPLITS:
            raise UsageError(f"source.split: {self.split!r}, must be one of {', '.join(SPLITS)}")
        if self.num_episodes < 1:
            raise UsageError(f"source.num_episodes: {self.num_episodes!r}, must be at least 1")
        if self.seed < 0:
            raise UsageError(f"source.seed: {self.seed!r}, must not be negative")
        if not 0.0 <= self.perturb <= 1.0:
            raise UsageError(f"source.perturb: {self.perturb!r}, a chance per second, must lie in 0..1")
        check_kinds("source.perturb_kinds", self.perturb_kinds)
        if self.frame_size < 16:
            raise UsageError(f"source.frame_size: {self.frame_size!r}, must be at least 16 px")

    @property
    def name(self) -> str:
        """Name of the data set."""
        return f"tabletop_{self.task}_{self.split}"

    def indices(self) -> list[int]:
        """Episode numbers."""
        return list(range(self.num_episodes))

    def episode(self, index: int) -> Episode:
        """Generate one demonstration with its frames."""
        if not 0 <= index < self.num_episodes:
            raise MemerError(
                f"{self.name}: no episode {index}; there are 0..{self.num_episodes - 1}, "
                f"raise source.num_episodes={self.num_episodes}"
            )
        return demonstrate(**self._choice(index), frame_size=self.frame_size, source=self.name)

    def report(self) -> dict[str, Any]:
        """Counts over all episodes, from a run without pictures: frames, segments per label, successes."""
        frames = successes = 0
        segments: Counter[str] = Counter()
        perturbations: Counter[str] = Counter()
        for index in self.indices():
            labels: list[str | None] = []
            segment_ids: list[int] = []
            step = None
            for step in demonstration_steps(**self._choice(index)):
                labels.append(step.subtask)
                segment_ids.append(step.segment_id)
            assert step is not None, "a demonstration has at least one step"
            frames += len(labels)
            segments.update(segment.label for segment in segments_from_labels(labels, segment_ids))
            perturbations.update(kind for _, kind in step.world.perturbations.events)
            successes += bool(step.world.measures()["success"])
        return {
            "episodes": self.num_episodes,
            "frames": frames,
            "successes": successes,
            "segments": dict(sorted(segments.items())),
            "perturbations": dict(sorted(perturbations.items())),
        }

    def _choice(self, index: int) -> dict[str, Any]:
        """What names one demonstration, with or without its pictures."""
        return {
            "task": self.task,
            "split": self.split,
            "index": index,
            "seed": self.seed,
            "perturb": self.perturb,
            "perturb_kinds": self.perturb_kinds,
        }
