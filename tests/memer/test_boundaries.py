"""Boundary scores: what counts, how pairs are made, summaries."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memer.boundaries import inner_boundaries, match_boundaries, score_boundaries, summarize_boundaries
from memer.episode import Segment
from memer.errors import MemerError


def parts(*edges: int) -> list[Segment]:
    return [Segment(a, b, "x") for a, b in itertools.pairwise(edges)]


def test_the_ends_of_an_episode_are_no_boundaries():
    assert inner_boundaries(parts(0, 10, 30, 50)) == [10, 30]
    assert inner_boundaries(parts(0, 50)) == inner_boundaries([]) == []


def test_a_gap_has_two_boundaries():
    assert inner_boundaries([Segment(30, 40, "b"), Segment(5, 20, "a")]) == [20, 30]


def test_as_many_pairs_as_possible_come_before_short_distances():
    # Pairing 10 with 12 alone would be nearer, but leaves 20 without a partner.
    assert match_boundaries([10, 14], [12, 20], tolerance=6) == [(10, 12), (14, 20)]
    assert match_boundaries([10], [6, 11, 13], tolerance=5) == [(10, 11)]
    assert match_boundaries([10], [16], tolerance=5) == []


frames = st.lists(st.integers(0, 30), unique=True, max_size=5).map(sorted)


@given(frames, frames, st.integers(0, 12))
def test_matching_equals_the_best_of_all_pairings(known, found, tolerance):
    best = (0, 0)
    few, many = (known, found) if len(known) <= len(found) else (found, known)
    for chosen in itertools.permutations(many, len(few)):
        distances = [abs(a - b) for a, b in zip(few, chosen, strict=True) if abs(a - b) <= tolerance]
        best = min(best, (-len(distances), sum(distances)))
    pairs = match_boundaries(known, found, tolerance=tolerance)
    assert (-len(pairs), sum(abs(a - b) for a, b in pairs)) == best
    assert len({a for a, _ in pairs}) == len({b for _, b in pairs}) == len(pairs)


def test_scores_count_seconds_one_to_one():
    score = score_boundaries(parts(0, 30, 60, 90), parts(0, 33, 55, 58, 90), fps=10.0)
    assert (score.known, score.found) == (2, 3)
    assert score.errors_s[0.25] == pytest.approx((-0.2,))
    assert score.errors_s[0.5] == pytest.approx((0.3, -0.2))
    assert score.f1(0.5) == pytest.approx(2 * 2 / 5)


def test_a_distance_of_exactly_the_tolerance_counts():
    for fps in (7.0, 10.0, 15.0, 29.97):
        score = score_boundaries(parts(0, 50, 99), parts(0, 53, 99), fps=fps, tolerances=[3 / fps])
        assert len(score.errors_s[3 / fps]) == 1


def test_an_episode_without_boundaries_is_right_when_none_is_found():
    assert score_boundaries(parts(0, 50), parts(0, 50), fps=10.0).f1(0.25) == 1.0
    assert score_boundaries(parts(0, 50), parts(0, 20, 50), fps=10.0).f1(0.25) == 0.0


def test_the_summary_sums_counts_and_averages_f1_over_episodes():
    scores = [
        score_boundaries(parts(0, 30, 60), parts(0, 32, 60), fps=10.0),
        score_boundaries(parts(0, 30, 60), parts(0, 45, 50, 60), fps=10.0),
    ]
    row = summarize_boundaries(scores)
    assert row["episodes"] == 2
    assert row["boundary_ratio"] == pytest.approx(1.5)
    assert (row["precision@0.25"], row["recall@0.25"]) == (pytest.approx(1 / 3), pytest.approx(1 / 2))
    assert row["f1@0.25"] == pytest.approx((1 + 0) / 2)
    assert row["f1_ci@0.25"] == [0.0, 1.0]
    assert row["f1@2"] == pytest.approx((1 + 2 / 3) / 2)
    assert row["abs_error_s"] == pytest.approx((0.2 + 1.5) / 2)
    with pytest.raises(MemerError, match="no episode"):
        summarize_boundaries([])
