"""Progress within a segment: labels, the gate that ends a segment, alignment of progress with the plan.

Source: MaP-WAM specification, section 9.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from memer.canvas import crop
from memer.errors import MemerError
from memer.plan_settings import CanvasRegion
from memer.settings import check_count, check_share, require_counts
from memer.similarity import PlanSimilarity, RgbMae

UpdateRule = Literal["average_nearest2", "global_argmin", "soft"]

#: A mean that lies above the threshold by no more than this equals it: single-precision rounding must not end
#: a segment.
_TIE = 1e-6


def progress_labels(start: int, end: int) -> NDArray[np.float32]:
    """float32[end - start] from 0 to 1 over the frames of the segment [start, end); a single frame is 1.

    Raises:
        ValueError: the segment is empty or negative.

    >>> progress_labels(10, 15).tolist(), progress_labels(3, 4).tolist()
    ([0.0, 0.25, 0.5, 0.75, 1.0], [1.0])
    """
    if not 0 <= start < end:
        raise ValueError(f"[{start}, {end}): must be a segment of at least one frame")
    length = end - start
    if length == 1:
        return np.ones(1, dtype=np.float32)
    return (np.arange(length) / (length - 1)).astype(np.float32)


@dataclass(slots=True)
class ProgressGate:
    """Ends a segment when the mean of the last predicted progress values exceeds a threshold.

    Args:
        tau: threshold, 0..1; the mean must lie strictly above it.
        window: W, values in the mean; fewer never fire.

    Only values of executed actions belong here, raw as predicted, and only of the running segment.
    """

    tau: float = 0.95
    window: int = 8
    _scores: deque[float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_share(f"{type(self).__name__}.tau", self.tau)
        require_counts(self, window=1)
        self._scores = deque(maxlen=self.window)

    @property
    def score(self) -> float | None:
        """The mean that is compared, None before there are enough values."""
        if len(self._scores) < self.window:
            return None
        return math.fsum(self._scores) / self.window

    def add(self, score: float) -> bool:
        """Take the progress predicted for one executed action; True where the segment is over.

        Raises:
            MemerError: the value is not finite.
        """
        value = float(score)
        if not math.isfinite(value):
            raise MemerError(f"predicted progress is {value}, must be a finite number; check the executor")
        self._scores.append(value)
        mean = self.score
        return mean is not None and mean > self.tau + _TIE

    def reset(self) -> None:
        """Forget the values; to be called at the start of every segment."""
        self._scores.clear()


def shortest_for_gate(window: int, tau: float) -> int:
    """Frames that a segment needs at least, so that perfect predictions within it fire the gate.

    L > 1 + (W - 1) / (2 (1 - tau)): the mean of the last W labels is 1 - (W - 1) / (2 (L - 1)).

    >>> [shortest_for_gate(window, 0.95) for window in (2, 4, 8)]
    [12, 32, 72]
    """
    if window == 1:
        return 1
    # Exact in decimals: with floats 1 - 0.95 the bound 71 comes out below 71.
    bound = 1 + Fraction(window - 1) / (2 * (1 - Fraction(str(tau))))
    return math.floor(bound) + 1


def gate_window(shortest_segment: int, tau: float, largest: int = 8) -> int:
    """The largest W <= `largest` with which the gate can end the shortest segment of the training data.

    Args:
        shortest_segment: frames, >= 1.
        tau: threshold of the gate.
        largest: bound on W.

    Raises:
        UsageError: a value out of its bounds.

    >>> [gate_window(length, 0.95) for length in (5, 12, 32, 71, 72, 500)]
    [1, 2, 4, 7, 8, 8]
    """
    check_count("shortest_segment", shortest_segment, least=1)
    check_count("window", largest, least=1)
    check_share("tau", tau)
    return max(w for w in range(1, largest + 1) if w == 1 or shortest_segment >= shortest_for_gate(w, tau))


def align_progress(
    progress: float,
    references: NDArray[np.uint8],
    frame: NDArray[np.uint8],
    *,
    similarity: PlanSimilarity | None = None,
    rule: UpdateRule = "average_nearest2",
    regions: Sequence[CanvasRegion] = (),
    reach: int = 2,
    temperature: float = 0.1,
) -> float:
    """Correct the progress by the plan's frame that looks most like the present one.

    Args:
        progress: p, clipped to 0..1.
        references: uint8[n + 1, H, W, 3]: the observation at the segment's start, then n plan frames; number
            m stands for progress m / n.
        frame: uint8[H, W, 3], the present canvas.
        similarity: what decides; mean absolute RGB difference when None.
        rule: `average_nearest2` takes the better m* of the two references around p (on a tie the one nearer
            to p, then the earlier) and gives (p + m*/n) / 2; `global_argmin` gives m*/n of the best of all
            (ties as before); `soft` averages p with the mean of m/n over `reach` references on either side,
            weighted by softmax(-distance / (temperature * mean distance)).
        regions: compare only these parts of the canvas, pixel by pixel alike; empty: the whole.
        reach: of `soft`, references on either side of p.
        temperature: of `soft`.

    Returns:
        The corrected progress, 0..1.

    Raises:
        ValueError: fewer than two references, or shapes differ.
    """
    if len(references) < 2 or references.shape[1:] != frame.shape:
        raise ValueError(
            f"references {references.shape}, frame {frame.shape}: must be at least two pictures of one size"
        )
    n = len(references) - 1
    p = min(max(float(progress), 0.0), 1.0)
    below = min(math.floor(n * p), n - 1)
    if rule == "average_nearest2":
        candidates = [below, below + 1]
    elif rule == "global_argmin":
        candidates = list(range(n + 1))
    elif rule == "soft":
        candidates = list(range(max(0, below + 1 - reach), min(n, below + reach) + 1))
    else:
        raise ValueError(f"rule: {rule!r}, must be average_nearest2, global_argmin or soft")
    distances = _distances(references[candidates], frame, similarity or RgbMae(), regions)
    if rule == "soft":
        logits = -distances / max(temperature * float(distances.mean()), 1e-12)
        weights = np.exp(logits - logits.max())
        estimate = float(weights @ np.array(candidates) / weights.sum()) / n
    else:
        order = zip(distances, (abs(m / n - p) for m in candidates), candidates, strict=True)
        estimate = min(order)[2] / n
    return estimate if rule == "global_argmin" else (p + estimate) / 2


def _distances(
    references: NDArray[np.uint8],
    frame: NDArray[np.uint8],
    similarity: PlanSimilarity,
    regions: Sequence[CanvasRegion],
) -> NDArray[np.float64]:
    if not regions:
        return similarity.distance(references, frame)
    areas = np.array([region.height * region.width for region in regions], dtype=np.float64)
    parts = zip(crop(references, regions), crop(frame, regions), strict=True)
    each = np.stack([similarity.distance(cut, present) for cut, present in parts])
    mean: NDArray[np.float64] = areas @ each / areas.sum()
    return mean
