"""Votes in time and the clusters that they form; a frame that was voted for stands for each."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Vote:
    """A voted frame whose cluster may still change; `linked`: joined to its predecessor in any case."""

    frame: int
    count: int
    linked: bool = False


def vote_frame(vote: Vote) -> int:
    """The key by which votes are sorted."""
    return vote.frame


@dataclass(frozen=True, slots=True, order=True)
class Cluster:
    """One remembered event.

    Attributes:
        start: earliest voted raw frame.
        end: latest voted raw frame, inclusive.
        representative: lower median of the votes.
        vote_count: votes, repetitions counted.
    """

    start: int
    end: int
    representative: int
    vote_count: int

    @classmethod
    def of(cls, group: Sequence[Vote]) -> "Cluster":
        """The cluster of ascending votes.

        >>> Cluster.of([Vote(85, 1), Vote(90, 2), Vote(95, 1)])
        Cluster(start=85, end=95, representative=90, vote_count=4)
        """
        votes = sum(vote.count for vote in group)
        remaining = (votes - 1) // 2  # lower median: index of the sorted votes
        for vote in group:
            if remaining < vote.count:
                break
            remaining -= vote.count
        return cls(group[0].frame, group[-1].frame, vote.frame, votes)


def vote_groups(votes: Sequence[Vote], *, distance: int, max_span: int | None) -> list[list[Vote]]:
    """Ascending votes cut where the gap exceeds `distance` or the span its limit, greedily from the left.

    From the left, so that a cut never depends on later votes; freezing a prefix relies on it.

    >>> votes = [Vote(5, 1), Vote(9, 1), Vote(20, 3)]
    >>> [len(group) for group in vote_groups(votes, distance=4, max_span=None)]
    [2, 1]
    """
    groups: list[list[Vote]] = []
    for vote in votes:
        joins = bool(groups) and (vote.linked or vote.frame - groups[-1][-1].frame <= distance)
        if joins and max_span is not None:
            joins = vote.frame - groups[-1][0].frame <= max_span
        if joins:
            groups[-1].append(vote)
        else:
            groups.append([vote])
    return groups


def thin(group: Sequence[Vote]) -> Vote:
    """Give the most crowded inner vote of a group of at least three to its nearest neighbour.

    First and last frame of a cluster stay, so its extent and its neighbours do not change.

    Returns:
        The vote that is to be dropped.
    """
    gaps = [after.frame - before.frame for before, after in zip(group, group[2:], strict=False)]
    middle = (len(group) - 1) / 2
    inner = min(range(1, len(group) - 1), key=lambda i: (gaps[i - 1], abs(i - middle)))
    before, dropped, after = group[inner - 1 : inner + 2]
    nearest = before if dropped.frame - before.frame <= after.frame - dropped.frame else after
    nearest.count += dropped.count
    after.linked = True
    return dropped
