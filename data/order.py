"""The order of training samples: exact epochs, deterministic, cheap to decode, blind to workers and ranks.

Training is one endless stream of samples. Epoch e takes the next n_e places of it and fills them with a
permutation of its samples, so every sample comes once per epoch (or as often as its weight says). Batch i is
places [i*B, (i+1)*B); batches may straddle epochs, none is ever partial.

Lanes make decoding cheap. Batch i belongs to lane i mod L. The epoch's clips (runs of consecutive steps of
one episode) are shuffled, dealt to the lanes, and within a lane shuffled in chunks of a few clips. A loader
worker that serves every W-th batch serves the same lanes all the time when W divides L, and the frames of an
open chunk stay in its cache. The order itself depends on seed, epoch, batch size and lanes, never on workers
or ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from memer.errors import UsageError

_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSettings:
    """Numbers of the training order.

    Attributes:
        batch_size: B, samples per batch and rank.
        lanes: L; make it a multiple of workers x ranks.
        clip_steps: steps of one episode that stay together in a chunk at most.
        chunk_clips: clips whose steps are shuffled together.
        seed: with the epoch it decides everything.
    """

    batch_size: int
    lanes: int = 8
    clip_steps: int = 64
    chunk_clips: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "lanes", "clip_steps", "chunk_clips"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: {getattr(self, name)!r}, must be >= 1")


class TrainOrder:
    """Which sample stands at which place of the endless stream.

    Args:
        groups: int[n], number of the episode of each sample; those of one episode are neighbours, in time.
        weights: float[n], uses per epoch of each sample, >= 0; fractions alternate between epochs.
        settings: see OrderSettings.

    Raises:
        UsageError: there is nothing to draw from.
    """

    def __init__(
        self, *, groups: Sequence[int] | NDArray[np.int64], weights: Sequence[float], settings: OrderSettings
    ) -> None:
        self.settings = settings
        self._weights = np.asarray(weights, dtype=np.float64)
        if not len(self._weights) or self._weights.sum() <= 0:
            raise UsageError("no training samples: no step can be used, or every weight is 0")
        # Spread phases let fractional weights alternate, and keep the epochs' lengths nearly equal.
        self._phases = np.minimum((np.arange(len(self._weights)) * _GOLDEN) % 1.0, 1 - 1e-9)
        self._clips = self._clip_numbers(np.asarray(groups, dtype=np.int64))
        self._starts = [0]
        self._open: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def uses(self, epoch: int) -> NDArray[np.int64]:
        """int64[n], how often each sample is used in `epoch`."""
        before = np.floor(self._weights * epoch + self._phases)
        return np.asarray(np.floor(self._weights * (epoch + 1) + self._phases) - before, dtype=np.int64)

    def epoch_start(self, epoch: int) -> int:
        """First place of an epoch."""
        while len(self._starts) <= epoch:
            self._starts.append(self._starts[-1] + int(self.uses(len(self._starts) - 1).sum()))
        return self._starts[epoch]

    def epoch_of(self, place: int) -> int:
        """The epoch that a place belongs to; epochs may be empty when all weights are small."""
        epoch = int(np.searchsorted(self._starts, place, side="right")) - 1
        while self.epoch_start(epoch + 1) <= place:
            epoch += 1
        return epoch

    def batch(self, number: int) -> list[tuple[int, int, int]]:
        """The samples of one batch as (sample, epoch, use within the epoch)."""
        size = self.settings.batch_size
        chosen: list[tuple[int, int, int]] = []
        place, end = number * size, (number + 1) * size
        while place < end:
            epoch = self.epoch_of(place)
            samples, repeats = self._epoch(epoch)
            first = self.epoch_start(epoch)
            stop = min(end, first + len(samples))
            for at in range(place - first, stop - first):
                chosen.append((int(samples[at]), epoch, int(repeats[at])))
            place = stop
        return chosen

    def _clip_numbers(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        """Clip of each sample; shorter on small data, so that every lane can mix chunk_clips of them."""
        settings = self.settings
        share = len(groups) // (settings.lanes * settings.chunk_clips)
        length = max(1, min(settings.clip_steps, share))
        first = np.flatnonzero(np.diff(groups, prepend=groups[:1] - 1))
        within = np.arange(len(groups)) - np.repeat(first, np.diff(np.append(first, len(groups))))
        starts = (within % length) == 0
        return np.cumsum(starts) - 1

    def _epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if epoch not in self._open:
            for old in [e for e in self._open if e < epoch - 1]:
                del self._open[old]
            self._open[epoch] = self._make_epoch(epoch)
        return self._open[epoch]

    def _make_epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        settings = self.settings
        random = np.random.default_rng([settings.seed, epoch])
        uses = self.uses(epoch)
        order = random.permutation(int(self._clips[-1]) + 1)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        by_clip = np.argsort(rank[self._clips], kind="stable")
        samples = np.repeat(by_clip, uses[by_clip])
        repeats = _counts_within(samples)
        places = self.epoch_start(epoch) + np.arange(len(samples))
        lane_of_place = (places // settings.batch_size) % settings.lanes
        arranged_samples, arranged_repeats = np.empty_like(samples), np.empty_like(repeats)
        taken = 0
        for lane in range(settings.lanes):
            targets = np.flatnonzero(lane_of_place == lane)
            share = np.arange(taken, taken + len(targets))
            taken += len(targets)
            clips = self._clips[samples[share]]
            clip_at = np.cumsum(np.diff(clips, prepend=clips[:1]) != 0)
            # Sorting by (chunk, random) shuffles inside each chunk.
            mixed = np.lexsort((random.random(len(share)), clip_at // settings.chunk_clips))
            arranged_samples[targets] = samples[share[mixed]]
            arranged_repeats[targets] = repeats[share[mixed]]
        return arranged_samples, arranged_repeats


def _counts_within(samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, 2, ... along each run of equal neighbours."""
    if not len(samples):
        return samples.copy()
    first = np.flatnonzero(np.diff(samples, prepend=samples[:1] - 1))
    return np.arange(len(samples)) - np.repeat(first, np.diff(np.append(first, len(samples))))


def validation_batches(num_samples: int, *, batch_size: int, world_size: int, lanes: int) -> list[range]:
    """Every sample exactly once, the same number of batches on every rank.

    Each rank gets ceil(n / (B * R)) batches, or n // R if that is less (then batches hold one more than B at
    most). Batch sizes differ by one at most. Batches are listed so that every `lanes`-th one continues the
    same stretch of the data; rank r takes batches r, r + R, ...

    Raises:
        UsageError: fewer samples than ranks.

    >>> [list(b) for b in validation_batches(5, batch_size=2, world_size=2, lanes=1)]
    [[0, 1], [2], [3], [4]]
    """
    if num_samples < world_size:
        raise UsageError(
            f"{num_samples} validation samples for {world_size} ranks: give more episodes or a smaller stride"
        )
    per_rank = min(-(-num_samples // (batch_size * world_size)), num_samples // world_size)
    count = per_rank * world_size
    cuts = [(i * num_samples + count - 1) // count for i in range(count + 1)]
    batches = [range(a, b) for a, b in pairwise(cuts)]
    rows = -(-count // lanes)
    return [
        batches[lane * rows + row]
        for row in range(rows)
        for lane in range(lanes)
        if lane * rows + row < count
    ]
