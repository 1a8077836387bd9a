"""How well found segment boundaries agree with known ones.

Boundaries are frames inside an episode at which one segment ends or another begins; the episode's first start
and last end are no boundaries. Source: annotation specification, section on scores against known labels.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memer.episode import Segment
from memer.errors import MemerError
from memer.intervals import bootstrap_interval

#: Seconds by which a found boundary may miss a known one.
TOLERANCES_S = (0.25, 0.5, 1.0, 2.0)


def inner_boundaries(segments: Iterable[Segment]) -> list[int]:
    """Frames at which a segment begins or ends, ascending, without the first start and the last end.

    >>> inner_boundaries([Segment(0, 10, "a"), Segment(10, 20, "b"), Segment(25, 30, "c")])
    [10, 20, 25]
    """
    ordered = sorted(segments)
    if not ordered:
        return []
    starts = {segment.start for segment in ordered[1:]}
    return sorted(starts | {segment.end for segment in ordered[:-1]})


def match_boundaries(
    known: Sequence[int], found: Sequence[int], *, tolerance: float
) -> list[tuple[int, int]]:
    """Pair known and found boundaries one to one: as many pairs as possible, of least total distance.

    Args:
        known: frames, ascending.
        found: frames, ascending.
        tolerance: frames by which a pair may differ.

    Returns:
        (known, found) pairs, ascending.

    >>> match_boundaries([10, 20], [14, 19, 40], tolerance=5)
    [(10, 14), (20, 19)]
    """
    rows, columns = len(known), len(found)
    # best[i][j]: (-pairs, distance) of the first i known and j found ones; an optimal pairing never crosses.
    best = [[(0, 0)] * (columns + 1) for _ in range(rows + 1)]
    for i in range(1, rows + 1):
        for j in range(1, columns + 1):
            best[i][j] = min(best[i - 1][j], best[i][j - 1])
            distance = abs(known[i - 1] - found[j - 1])
            if distance <= tolerance:
                pairs, total = best[i - 1][j - 1]
                best[i][j] = min(best[i][j], (pairs - 1, total + distance))
    matched: list[tuple[int, int]] = []
    i, j = rows, columns
    while i and j:
        if best[i][j] == best[i - 1][j]:
            i -= 1
        elif best[i][j] == best[i][j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            matched.append((known[i], found[j]))
    return matched[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryScore:
    """Counts of one episode.

    Attributes:
        known: inner boundaries of the reference.
        found: inner boundaries to be judged.
        errors_s: tolerance in seconds -> found minus known of every matched pair, seconds.
    """

    known: int
    found: int
    errors_s: dict[float, tuple[float, ...]]

    def f1(self, tolerance: float) -> float:
        """2 matched / (known + found); 1 where neither has a boundary."""
        total = self.known + self.found
        return 2 * len(self.errors_s[tolerance]) / total if total else 1.0


def score_boundaries(
    known: Sequence[Segment],
    found: Sequence[Segment],
    *,
    fps: float,
    tolerances: Sequence[float] = TOLERANCES_S,
) -> BoundaryScore:
    """Compare the segments of one episode with its known ones; labels play no part.

    Args:
        known: reference segments.
        found: segments to be judged.
        fps: frames per second, for tolerances and errors.
        tolerances: seconds.
    """
    true, own = inner_boundaries(known), inner_boundaries(found)
    slack = 1e-9  # 0.2 s at 15 frames per second are 3 frames, whatever the product's rounding
    errors = {
        tolerance: tuple(
            (b - a) / fps for a, b in match_boundaries(true, own, tolerance=tolerance * fps + slack)
        )
        for tolerance in tolerances
    }
    return BoundaryScore(known=len(true), found=len(own), errors_s=errors)


def summarize_boundaries(
    scores: Sequence[BoundaryScore], *, resamples: int = 2000, seed: int = 0
) -> dict[str, Any]:
    """Means over episodes, flat and JSON-ready.

    Returns:
        Per tolerance T in seconds: `precision@T`, `recall@T` (sums over all episodes), `f1@T` (mean of the
        episodes) and `f1_ci@T` (its 95 % bootstrap interval over episodes, None for one episode); at the
        largest tolerance `abs_error_s` and `signed_error_s` of matched pairs; `boundary_ratio` found / known;
        `episodes`. None where nothing was counted.
    """
    if not scores:
        raise MemerError("boundary scores: no episode was compared")
    row: dict[str, Any] = {"episodes": len(scores)}
    known, found = sum(s.known for s in scores), sum(s.found for s in scores)
    row["boundary_ratio"] = found / known if known else None
    tolerances = list(scores[0].errors_s)
    for tolerance in tolerances:
        matched = sum(len(s.errors_s[tolerance]) for s in scores)
        each = [s.f1(tolerance) for s in scores]
        interval = bootstrap_interval(each, resamples=resamples, seed=seed)
        row[f"precision@{tolerance:g}"] = matched / found if found else None
        row[f"recall@{tolerance:g}"] = matched / known if known else None
        row[f"f1@{tolerance:g}"] = sum(each) / len(each)
        row[f"f1_ci@{tolerance:g}"] = None if interval is None else list(interval)
    errors = np.array([error for s in scores for error in s.errors_s[max(tolerances)]])
    row["abs_error_s"] = float(np.abs(errors).mean()) if len(errors) else None
    row["signed_error_s"] = float(errors.mean()) if len(errors) else None
    return row
