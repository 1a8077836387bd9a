"""Episodic memory: nominations are votes, a 1-D clustering in time turns them into a few frames to show.

The voted frames of one cluster (neighbours at most D raw frames apart) stand for one event; its lower median,
always a frame that was voted for, represents it.

    votes      85 90 90 95 95 . . . . . . . . 140 145      D = 25
    clusters  [85 ......... 95]               [140 145]
    shown            90                        140         at most M, all older than the window
"""

import logging
import operator
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from memer.clusters import Cluster, Vote, thin, vote_frame, vote_groups
from memer.contract import Contract

logger = logging.getLogger(__name__)

#: Distinct open frames that `for_contract` keeps at most; normal episodes stay far below.
MAX_OPEN_FRAMES = 512

MEMORY_STATE_VERSION = 1


class EpisodicMemory:
    """Votes of one episode, their clusters and what is visible of them.

    The work per step depends on the open votes only: `freeze` turns clusters that cannot change any more into
    their representative, with exactly the result of clustering all votes again.

    Args:
        merge_distance: D, RAW frames (d * s); votes at most this far apart join one cluster, >= 0.
        memory_length: M, frames shown at most, >= 0; 0 shows none in both modes.
        mode: `strict` shows the last M representatives older than the window (filter, then cap); `compat`
            takes the last M representatives and hides those that are window members (cap, then membership),
            as the public code does.
        max_cluster_span: raw frames from the first to the last vote of a cluster at most; None: no limit.
        span_warning: raw frames; an open cluster that spans more is logged once per episode; None: never.
        max_open_frames: distinct open frames kept at most; beyond it the inside of the longest cluster is
            thinned, the nearest kept frame takes over the votes, and the log says so; None: no limit.

    Raises:
        ValueError: an argument is out of its bounds.

    >>> memory = EpisodicMemory(merge_distance=25, memory_length=8)
    >>> memory.add([140, 140, 145, 145, 90])
    >>> memory.visible([150, 155, 160]), memory.visible([120, 125, 130])
    ([90, 140], [90])
    """

    def __init__(
        self,
        *,
        merge_distance: int,
        memory_length: int,
        mode: Literal["strict", "compat"] = "strict",
        max_cluster_span: int | None = None,
        span_warning: int | None = None,
        max_open_frames: int | None = None,
    ) -> None:
        if mode not in ("strict", "compat"):
            raise ValueError(f"mode: {mode!r}, must be strict or compat")
        self.merge_distance = _bounded(merge_distance, 0, "merge_distance")
        self.memory_length = _bounded(memory_length, 0, "memory_length")
        self.mode = mode
        self.max_cluster_span = (
            None if max_cluster_span is None else _bounded(max_cluster_span, 0, "max_cluster_span")
        )
        self.span_warning = None if span_warning is None else _bounded(span_warning, 0, "span_warning")
        self.max_open_frames = (
            None if max_open_frames is None else _bounded(max_open_frames, 1, "max_open_frames")
        )
        self.reset()

    @classmethod
    def for_contract(
        cls,
        contract: Contract,
        *,
        max_cluster_span: int | None = None,
        max_open_frames: int | None = MAX_OPEN_FRAMES,
    ) -> "EpisodicMemory":
        """The memory that a contract asks for, with the warning at 4 * N * s raw frames.

        Args:
            contract: windows, memory form and mode.
            max_cluster_span: SUBSAMPLED steps, like the contract's merge_distance; None: no limit.
            max_open_frames: see the class.
        """
        windows = contract.shown_windows
        s, n = windows.frame_subsample, windows.recent_frames_length
        return cls(
            merge_distance=windows.merge_frames,
            memory_length=windows.keyframes_length,
            mode=contract.memory_mode,
            max_cluster_span=None if max_cluster_span is None else max_cluster_span * s,
            span_warning=4 * n * s,
            max_open_frames=max_open_frames,
        )

    def reset(self) -> None:
        """Forget everything; a new episode begins."""
        self._votes: list[Vote] = []
        self._frozen: list[Cluster] = []
        self._open: list[Cluster] | None = []
        self._frozen_before = 0
        self._num_votes = 0
        self._num_thinned = 0
        self._warned_span = False
        self._warned_thinned = False

    def add(self, indices: Iterable[int], *, t: int | None = None) -> None:
        """Count one vote for every value given; repetitions count, `map_positions` removed unwanted ones.

        Args:
            indices: voted raw frames, in any order.
            t: step that the votes belong to; later frames are refused when it is given.

        Raises:
            ValueError: a vote is negative, after t, or older than what `freeze` closed; nothing is added.
        """
        values = sorted(operator.index(value) for value in indices)
        if not values:
            return
        if values[0] < self._frozen_before:
            raise ValueError(
                f"vote {values[0]}, must be a frame >= {self._frozen_before} (frozen before that)"
            )
        if t is not None and values[-1] > t:
            raise ValueError(f"vote {values[-1]}, must not lie after the step {t} that nominates it")
        for value in values:
            self._insert(value)
        self._num_votes += len(values)
        self._open = None
        if self.max_open_frames is not None and len(self._votes) > self.max_open_frames:
            self._thin(self.max_open_frames)
        if self.span_warning is not None and not self._warned_span:
            self._warn_span(self.span_warning)

    def freeze(self, before: int) -> None:
        """Close the clusters that votes >= `before` cannot reach; their votes are dropped, not their result.

        The caller promises that no vote below `before` follows: at step t with no older request under way
        that is t - (N-1)*s, clipped at 0 (`freeze_bound`).
        """
        self._frozen_before = max(self._frozen_before, before)
        clusters = self._open_clusters()
        closed = 0
        while closed < len(clusters) and clusters[closed].end < self._frozen_before - self.merge_distance:
            closed += 1
        if closed:
            end = clusters[closed - 1].end
            self._frozen.extend(clusters[:closed])
            self._open = clusters[closed:]
            self._votes = self._votes[bisect_left(self._votes, end + 1, key=vote_frame) :]

    def clusters(self) -> list[Cluster]:
        """All clusters in time order, frozen ones first."""
        return self._frozen + self._open_clusters()

    def representatives(self) -> list[int]:
        """The representative of every cluster, ascending; also of those too old to be shown."""
        return [cluster.representative for cluster in self.clusters()]

    def visible(self, context_indices: Sequence[int]) -> list[int]:
        """Memory frames to show with this window, ascending.

        Args:
            context_indices: the recent window, ascending raw frames, not empty.
        """
        if not context_indices:
            raise ValueError("context_indices is empty; the window holds at least the current frame")
        if self.memory_length == 0:
            return []
        # Representatives ascend, so the last M below a bound lie among the open ones and the last M frozen.
        latest = self._frozen[-self.memory_length :] + self._open_clusters()
        shown = [cluster.representative for cluster in latest]
        if self.mode == "compat":
            window = set(context_indices)
            return [k for k in shown[-self.memory_length :] if k not in window]
        return [k for k in shown if k < context_indices[0]][-self.memory_length :]

    def open_votes(self) -> list[int]:
        """Votes of the clusters that may still change, ascending, repetitions included."""
        return [vote.frame for vote in self._votes for _ in range(vote.count)]

    def needed_frames(self) -> list[int]:
        """Raw frames whose images may still be shown, ascending; every other image may be dropped.

        Open votes (any of them may become a representative) and the last M frozen representatives; none when
        M = 0. The recent window is the caller's own.
        """
        if self.memory_length == 0:
            return []
        frozen = [cluster.representative for cluster in self._frozen[-self.memory_length :]]
        return frozen + [vote.frame for vote in self._votes]

    @property
    def num_votes(self) -> int:
        """Votes so far, repetitions counted."""
        return self._num_votes

    @property
    def num_thinned(self) -> int:
        """Open frames given up because of `max_open_frames`."""
        return self._num_thinned

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values from which `load_state_dict` restores the identical state."""
        return {
            "version": MEMORY_STATE_VERSION,
            "settings": self._settings(),
            "votes": [[vote.frame, vote.count, int(vote.linked)] for vote in self._votes],
            "frozen": [[c.start, c.end, c.representative, c.vote_count] for c in self._frozen],
            "frozen_before": self._frozen_before,
            "num_votes": self._num_votes,
            "num_thinned": self._num_thinned,
            "warned": [self._warned_span, self._warned_thinned],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave.

        Raises:
            ValueError: another version, or a memory with other settings; the message shows both.
        """
        if state.get("version") != MEMORY_STATE_VERSION:
            raise ValueError(
                f"memory state version {state.get('version')!r}, this program reads {MEMORY_STATE_VERSION}"
            )
        if state["settings"] != self._settings():
            raise ValueError(
                f"memory state made with {state['settings']}, this memory has {self._settings()}"
            )
        self._votes = [Vote(frame, count, bool(linked)) for frame, count, linked in state["votes"]]
        self._frozen = [Cluster(*values) for values in state["frozen"]]
        self._frozen_before = state["frozen_before"]
        self._num_votes = state["num_votes"]
        self._num_thinned = state["num_thinned"]
        self._warned_span, self._warned_thinned = state["warned"]
        self._open = None

    def _settings(self) -> dict[str, Any]:
        return {
            "merge_distance": self.merge_distance,
            "memory_length": self.memory_length,
            "mode": self.mode,
            "max_cluster_span": self.max_cluster_span,
            "span_warning": self.span_warning,
            "max_open_frames": self.max_open_frames,
        }

    def _insert(self, value: int) -> None:
        at = bisect_left(self._votes, value, key=vote_frame)
        if at < len(self._votes) and self._votes[at].frame == value:
            self._votes[at].count += 1
            return
        # Between two frames that thinning joined there were votes on the way: this one belongs to them too.
        inside = at < len(self._votes) and self._votes[at].linked
        self._votes.insert(at, Vote(value, 1, inside))

    def _groups(self) -> list[list[Vote]]:
        return vote_groups(self._votes, distance=self.merge_distance, max_span=self.max_cluster_span)

    def _open_clusters(self) -> list[Cluster]:
        if self._open is None:
            self._open = [Cluster.of(group) for group in self._groups()]
        return self._open

    def _thin(self, limit: int) -> None:
        """Drop inner frames of the longest cluster until `limit` remain, the most crowded first."""
        while len(self._votes) > limit:
            longest = max(self._groups(), key=len)
            if len(longest) < 3:
                return  # clusters of one or two frames: their number is bounded by the window
            dropped = thin(longest)
            del self._votes[bisect_left(self._votes, dropped.frame, key=vote_frame)]
            self._num_thinned += 1
            if not self._warned_thinned:
                self._warned_thinned = True
                logger.warning(
                    "memory: more than %d open frames; thinning the cluster %d..%d (votes are too dense)",
                    limit,
                    longest[0].frame,
                    longest[-1].frame,
                )

    def _warn_span(self, limit: int) -> None:
        for cluster in self._open_clusters():
            if cluster.end - cluster.start > limit:
                self._warned_span = True
                logger.warning(
                    "memory: one cluster spans frames %d..%d (more than %d): votes chain together and show a "
                    "single frame; consider max_cluster_span",
                    cluster.start,
                    cluster.end,
                    limit,
                )
                return


def freeze_bound(t: int, *, subsample: int, length: int) -> int:
    """The oldest frame that steps t, t+1, ... can still vote for: t - (N-1)*s, at least 0.

    >>> freeze_bound(100, subsample=5, length=8), freeze_bound(7, subsample=5, length=8)
    (65, 0)
    """
    return max(0, t - (length - 1) * subsample)


def map_positions(
    positions: Iterable[int], context_indices: Sequence[int], *, unique_votes: bool = True
) -> tuple[list[int], list[int]]:
    """Positions of an answer to raw frames: position p in 1..len(window) names context_indices[p - 1].

    Args:
        positions: 1-indexed, as answered.
        context_indices: the window of the request.
        unique_votes: count a repeated position once (compat: every time).

    Returns:
        (voted raw frames in answer order, invalid positions in answer order).

    >>> map_positions([2, 2, 0, 9], [10, 15, 20])
    ([15], [0, 9])
    """
    mapped: list[int] = []
    invalid: list[int] = []
    for position in positions:
        if 1 <= position <= len(context_indices):
            mapped.append(context_indices[position - 1])
        else:
            invalid.append(position)
    return (list(dict.fromkeys(mapped)) if unique_votes else mapped), invalid


def _bounded(value: int, least: int, name: str) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{name}: {value!r}, must be an integer >= {least}")
    return value
