"""Segments of demonstrations that nobody labelled: providers of cuts, and the segments between them.

Everything here looks at one episode, is deterministic, and measures times in seconds, so that the settings
fit data of any rate. Discovered segments say where they come from and never pretend to be dataset labels.
Source: MaP-WAM specification, section 17.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from memer.episode import Episode, FrameSource, Segment, normalize_label
from memer.errors import MemerError, UsageError
from memer.settings import require, require_counts, require_numbers
from memer.similarity import grid_features


class Cut(NamedTuple):
    """The first frame of a segment, and how sure its provider is, in 0..1."""

    frame: int
    score: float


class SegmentProvider(Protocol):
    """Says where an episode's segments begin."""

    kind: ClassVar[str]

    def cuts(self, episode: Episode) -> list[Cut]:
        """Inner boundaries, strictly ascending, none at frame 0."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """The segments of one episode and where they come from.

    Attributes:
        segments: they cover the whole episode.
        scores: per segment, that of the cut at its start; 1 for the first.
        provenance: method and settings, plain JSON values.
    """

    segments: tuple[Segment, ...]
    scores: tuple[float, ...]
    provenance: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: provenance, and [start, end, label, score] per segment."""
        rows = [
            [s.start, s.end, s.label, round(score, 4)]
            for s, score in zip(self.segments, self.scores, strict=True)
        ]
        return {**self.provenance, "segments": rows}


def discover(episode: Episode, provider: SegmentProvider, *, label: str = "part {number}") -> Discovery:
    """Cut an episode into segments.

    Args:
        episode: labels that it has are not looked at.
        provider: where to cut.
        label: text of each segment; `{number}` counts from 1, `{count}` is the number of segments,
            `{instruction}` the instruction in force at its start.

    Raises:
        UsageError: `label` has another field, or gives an empty text.
    """
    cuts = provider.cuts(episode)
    edges = [0, *(cut.frame for cut in cuts), episode.num_frames]
    segments = []
    for number, (start, end) in enumerate(pairwise(edges), start=1):
        try:
            text = label.format(
                number=number, count=len(edges) - 1, instruction=episode.instruction_at(start)
            )
        except (KeyError, IndexError, ValueError) as error:
            raise UsageError(
                f"label {label!r}: {error!r}; fields are {{number}}, {{count}}, {{instruction}}"
            ) from None
        if not normalize_label(text):
            raise UsageError(f"label {label!r}: gives an empty text")
        segments.append(Segment(start, end, normalize_label(text)))
    settings = asdict(provider) if hasattr(provider, "__dataclass_fields__") else {}  # type: ignore[call-overload]
    return Discovery(
        segments=tuple(segments),
        scores=(1.0, *(cut.score for cut in cuts)),
        provenance={"method": provider.kind, "settings": settings},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """Equal parts.

    Args:
        count: n, segments; fewer where an episode has fewer frames.
    """

    kind: ClassVar[str] = "uniform"

    count: int

    def __post_init__(self) -> None:
        require_counts(self, count=1)

    def cuts(self, episode: Episode) -> list[Cut]:
        """See SegmentProvider."""
        parts = min(self.count, episode.num_frames)
        return [Cut(k * episode.num_frames // parts, 1.0) for k in range(1, parts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Cuts where the gripper changes and where the robot sets out again after standing still.

    Args:
        gripper: cut at transitions of one channel.
        pauses: cut at velocity minima: where a slow stretch ends.
        feature: `action` or `state`, of the gripper channel.
        channel: number of the gripper channel; negative counts from the end.
        threshold: the gripper is closed above it, in the channel's units; None: the middle of its range.
        ignore: channels of `state` that are no motion (the gripper); negative counts from the end.
        quiet: a stretch is slow below this share of the fast speed (the 90th percentile).
        smooth_s: seconds over which the speed is averaged.
        pause_s: shorter slow stretches are no pause.
        least_s: segments are at least this long; of cuts that are closer the surer one stays.
    """

    kind: ClassVar[str] = "events"

    gripper: bool = True
    pauses: bool = True
    feature: Literal["action", "state"] = "action"
    channel: int = -1
    threshold: float | None = None
    ignore: Sequence[int] = (-1,)
    quiet: float = 0.15
    smooth_s: float = 0.1
    pause_s: float = 0.1
    least_s: float = 1.0

    def __post_init__(self) -> None:
        listed = isinstance(self.ignore, Sequence) and all(type(channel) is int for channel in self.ignore)
        require(listed, self, "ignore", "a list of channels")
        object.__setattr__(self, "ignore", tuple(self.ignore))
        require(type(self.channel) is int, self, "channel", "the number of a channel")
        require_numbers(self, "quiet", "smooth_s", "pause_s", "least_s")
        if self.threshold is not None:
            require_numbers(self, "threshold")
        require(self.gripper or self.pauses, self, "gripper", "true where pauses is false")
        require(self.feature in ("action", "state"), self, "feature", "action or state")
        require(0 < self.quiet < 1, self, "quiet", "a share between 0 and 1")
        for name in ("smooth_s", "pause_s", "least_s"):
            require(getattr(self, name) >= 0, self, name, "seconds, not negative")

    def cuts(self, episode: Episode) -> list[Cut]:
        """See SegmentProvider; gripper cuts have score 0.5, pauses 0.5 to 1 by their stillness.

        Near each other they are one event, and the end of the pause is the cleaner cut: a gripper closes
        within its subtask, the robot sets out with the next one.
        """
        found: list[Cut] = []
        if self.gripper:
            found += [Cut(frame, 0.5) for frame in self._transitions(episode)]
        if self.pauses:
            found += self._pauses(episode)
        return keep_apart(found, num_frames=episode.num_frames, least=_frames(self.least_s, episode.fps))

    def _transitions(self, episode: Episode) -> list[int]:
        values = episode.action if self.feature == "action" else episode.state
        if not -values.shape[1] <= self.channel < values.shape[1]:
            raise UsageError(
                f"episode {episode.episode_index} of {episode.source}: {self.feature} has {values.shape[1]} "
                f"components, channel={self.channel}"
            )
        channel = values[:, self.channel]
        middle = (float(channel.min()) + float(channel.max())) / 2
        return transitions(channel > (middle if self.threshold is None else self.threshold))

    def _pauses(self, episode: Episode) -> list[Cut]:
        width = episode.state.shape[1]
        ignored = {channel % width for channel in self.ignore if -width <= channel < width}
        moving = [channel for channel in range(width) if channel not in ignored]
        if not moving:
            raise UsageError(
                f"episode {episode.episode_index} of {episode.source}: ignore={list(self.ignore)} leaves "
                f"none of the {width} components of state; set pauses=false, or ignore fewer"
            )
        speed = _speed(episode.state[:, moving], smooth=_frames(self.smooth_s, episode.fps))
        fast = float(np.quantile(speed, 0.9))
        if fast <= 0:
            return []
        slow = speed < self.quiet * fast
        edges = [0, *transitions(slow), len(slow)]
        cuts = []
        for start, end in pairwise(edges):
            inside = start > 0 and end < len(slow)  # standing still at the ends of an episode parts nothing
            if inside and slow[start] and end - start >= _frames(self.pause_s, episode.fps):
                cuts.append(Cut(end, 1.0 - 0.5 * float(speed[start:end].mean()) / fast))
        return cuts


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePoint:
    """Cuts between stretches that look alike: each costs its squared feature distance to its mean.

    Args:
        cameras: camera keys; empty: all of the episode.
        penalty: a cut must explain at least this share of the features' total variation.
        grid: cells per side of the mean colours that describe a picture.
        least_s: segments are at least this long.
        max_pictures: longer episodes are looked at every few frames, so that time stays quadratic in this.
    """

    kind: ClassVar[str] = "change_point"

    cameras: Sequence[str] = ()
    penalty: float = 0.04
    grid: int = 8
    least_s: float = 1.0
    max_pictures: int = 1000

    def __post_init__(self) -> None:
        listed = isinstance(self.cameras, Sequence) and not isinstance(self.cameras, str)
        require(listed, self, "cameras", "a list of camera keys")
        object.__setattr__(self, "cameras", tuple(self.cameras))
        require_numbers(self, "penalty", "least_s")
        require(0 < self.penalty < 1, self, "penalty", "a share between 0 and 1")
        require_counts(self, grid=1, max_pictures=2)
        require(self.grid <= 64, self, "grid", "at most 64 cells per side")
        require(self.least_s >= 0, self, "least_s", "seconds, not negative")

    def cuts(self, episode: Episode) -> list[Cut]:
        """See SegmentProvider; the score is the share of the remaining variation that the cut explains."""
        where = f"episode {episode.episode_index} of {episode.source}"
        keys = self.cameras or tuple(episode.cameras)
        missing = [key for key in keys if key not in episode.cameras]
        if missing or not keys:
            name = repr(missing[0]) if missing else "at all"
            raise MemerError(f"{where}: no camera {name}; available: {', '.join(episode.cameras) or 'none'}")
        stride = -(-episode.num_frames // self.max_pictures)
        indices = range(0, episode.num_frames, stride)
        parts = [self._features(episode.cameras[key], indices, f"{where}: camera {key}") for key in keys]
        least = -(-_frames(self.least_s, episode.fps) // stride)
        places = change_points(np.concatenate(parts, axis=1), penalty=self.penalty, least=least)
        return [Cut(place * stride, score) for place, score in places]

    def _features(self, source: FrameSource, indices: Sequence[int], where: str) -> NDArray[np.float32]:
        rows = [grid_features(frame[None], grid=self.grid) for frame in source.frames(indices)]
        if len(rows) != len(indices):
            raise MemerError(f"{where} ends early; check its video")
        return np.concatenate(rows)


def change_points(features: NDArray[np.floating], *, penalty: float, least: int = 1) -> list[Cut]:
    """The cuts with the least total cost, by dynamic programming over all places.

    A stretch costs the squared distances of its rows to their mean, a cut `penalty` times the cost of the
    whole uncut.

    Args:
        features: [T, D].
        penalty: share of the uncut cost, > 0.
        least: rows of a stretch at least.

    Returns:
        Ascending; the score is the share of the cost of the two neighbouring stretches joined that the cut
        takes away.

    >>> rows = np.repeat([[0.0], [1.0], [0.0]], 5, axis=0)
    >>> [cut.frame for cut in change_points(rows, penalty=0.05)]
    [5, 10]
    """
    x = features.astype(np.float64) - features.mean(axis=0, dtype=np.float64)
    length, least = len(x), max(1, least)
    squares = np.concatenate([[0.0], np.cumsum((x**2).sum(axis=1))])
    sums = np.concatenate([np.zeros((1, x.shape[1])), np.cumsum(x, axis=0)])
    products: NDArray[np.float64] = sums @ sums.T
    norms = np.diagonal(products)

    def cost(starts: NDArray[np.intp], end: int) -> NDArray[np.float64]:
        spread = (norms[end] + norms[starts] - 2 * products[starts, end]) / (end - starts)
        rest: NDArray[np.float64] = np.maximum(squares[end] - squares[starts] - spread, 0.0)
        return rest

    whole = float(cost(np.array([0]), length)[0])
    if whole <= 1e-12 * max(1.0, float(squares[-1])) or length < 2 * least:
        return []
    price = penalty * whole
    best = np.full(length + 1, np.inf)
    best[0] = -price  # the first stretch needs no cut
    before = np.zeros(length + 1, dtype=np.intp)
    for end in range(least, length + 1):
        starts = np.arange(0, end - least + 1)
        totals = best[starts] + cost(starts, end) + price
        before[end] = int(totals.argmin())
        best[end] = totals[before[end]]
    edges = [length]
    while edges[-1] > 0:
        edges.append(int(before[edges[-1]]))
    edges.reverse()
    cuts = []
    for left, frame, right in zip(edges, edges[1:], edges[2:], strict=False):
        joined = float(cost(np.array([left]), right)[0])
        apart = float(cost(np.array([left]), frame)[0] + cost(np.array([frame]), right)[0])
        cuts.append(Cut(frame, 1.0 - apart / joined if joined > 0 else 0.0))
    return cuts


def transitions(closed: NDArray[np.bool_], *, least: int = 1) -> list[int]:
    """First frames with a new value; excursions shorter than `least` frames are ignored.

    >>> transitions(np.array([0, 0, 1, 1, 0, 1], dtype=bool))
    [2, 4, 5]
    >>> transitions(np.array([0, 0, 1, 1, 0, 1], dtype=bool), least=2)
    [2]
    """
    edges = [0, *(int(k) + 1 for k in np.flatnonzero(closed[1:] != closed[:-1])), len(closed)]
    kept: list[int] = []
    for start, end in pairwise(edges):
        if kept and (end - start < least or closed[start] == closed[kept[-1]]):
            continue
        kept.append(start)
    return kept[1:]


def keep_apart(cuts: Sequence[Cut], *, num_frames: int, least: int) -> list[Cut]:
    """Cuts at least `least` frames from the ends and from each other; the surer, then the earlier one stays.

    >>> keep_apart([Cut(5, 0.5), Cut(7, 0.9), Cut(19, 1.0)], num_frames=20, least=3)
    [Cut(frame=7, score=0.9)]
    """
    kept: list[Cut] = []
    for cut in sorted(cuts, key=lambda cut: (-cut.score, cut.frame)):
        inside = max(least, 1) <= cut.frame <= num_frames - max(least, 1)
        if inside and all(abs(cut.frame - other.frame) >= max(least, 1) for other in kept):
            kept.append(cut)
    return sorted(kept)


def _frames(seconds: float, fps: float) -> int:
    """Seconds as a whole number of frames, at least 1."""
    return max(1, round(seconds * fps))


def _speed(positions: NDArray[np.floating], *, smooth: int) -> NDArray[np.float64]:
    """float64[T]: length of the step that leads to each frame, each channel in units of its deviation.

    Averaged over `smooth` frames.
    The first frame takes the step after it, so that an episode does not seem to begin with a rest.
    """
    if len(positions) < 2:
        return np.zeros(len(positions))
    scale = positions.std(axis=0, dtype=np.float64)
    steps = np.diff(positions.astype(np.float64), axis=0) / np.where(scale > 1e-6, scale, np.inf)
    lengths = np.linalg.norm(steps, axis=1)
    speed: NDArray[np.float64] = np.concatenate([lengths[:1], lengths])
    if smooth > 1:
        padded = np.pad(speed, (smooth // 2, (smooth - 1) // 2), mode="edge")
        speed = np.convolve(padded, np.full(smooth, 1.0 / smooth), mode="valid")
    return speed
