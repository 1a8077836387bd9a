"""Noise on memory images: training memory is exact, deployed memory is voted."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memer.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAugmentation:
    """Changes which memory images a sample shows; the answer stays. Everything is off at 0.

    Attributes:
        jitter: each memory frame moves by up to this many raw frames, either way.
        drop: probability that a memory frame is left out.
        false_keyframe: probability that one frame nobody marked is added.
        seed: with the sample's name, epoch and use it decides everything.
    """

    jitter: int = 0
    drop: float = 0.0
    false_keyframe: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.jitter < 0:
            raise UsageError(f"augmentation.jitter: {self.jitter!r}, must be >= 0 raw frames")
        for name in ("drop", "false_keyframe"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"augmentation.{name}: {getattr(self, name)!r}, must be a probability")

    def apply(self, memory: Sequence[int], *, before: int, limit: int, name: str) -> list[int]:
        """Memory frames with noise.

        Args:
            memory: ascending raw frames.
            before: first frame of the window; every result lies before it.
            limit: frames at most, the last ones are kept.
            name: sample, epoch and use.

        Returns:
            Ascending raw frames without duplicates.
        """
        if before <= 0:
            return list(memory)
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        random = np.random.default_rng(int.from_bytes(digest[:16], "little"))
        noisy: set[int] = set()
        for k in memory:
            moved = k + int(random.integers(-self.jitter, self.jitter + 1))
            if random.random() >= self.drop:
                noisy.add(min(max(moved, 0), before - 1))
        if random.random() < self.false_keyframe:
            noisy.add(int(random.integers(before)))
        return sorted(noisy)[-limit:]
