"""Progress: labels, gate and alignment (MaP-WAM specification, section 9)."""

import numpy as np
import pytest

from memer.errors import MemerError, UsageError
from memer.plan_settings import CanvasRegion
from memer.progress import ProgressGate, align_progress, gate_window, progress_labels, shortest_for_gate


def grey(*levels: int) -> np.ndarray:
    """One picture per level."""
    return np.stack([np.full((4, 4, 3), level, dtype=np.uint8) for level in levels])


def test_labels_run_from_0_to_1():
    for length in (2, 3, 8, 116):
        labels = progress_labels(7, 7 + length)
        assert labels.dtype == np.float32
        assert (labels[0], labels[-1], len(labels)) == (0.0, 1.0, length)
        np.testing.assert_allclose(labels, [n / (length - 1) for n in range(length)], atol=1e-7)


def test_a_segment_of_one_frame_is_finished():
    assert progress_labels(5, 6).tolist() == [1.0]


@pytest.mark.parametrize(("start", "end"), [(3, 3), (4, 3), (-1, 2)])
def test_empty_segments_have_no_labels(start, end):
    with pytest.raises(ValueError, match="at least one frame"):
        progress_labels(start, end)


def fires(length: int, window: int, tau: float = 0.95) -> bool:
    """Whether perfect predictions for the executed actions of a segment fire the gate in time."""
    gate = ProgressGate(tau=tau, window=window)
    return any(gate.add(p) for p in progress_labels(0, length)[1:])


@pytest.mark.parametrize(("window", "bound"), [(2, 11), (4, 31), (8, 71)])
def test_the_gate_fires_within_a_segment_only_above_the_bound(window, bound):
    assert shortest_for_gate(window, 0.95) == bound + 1
    assert not fires(bound, window)
    assert fires(bound + 1, window)


@pytest.mark.parametrize("tau", [0.8, 0.9, 0.95, 0.99])
def test_the_automatic_window_always_fires_and_a_larger_one_does_not(tau):
    for shortest in (2, 3, 7, 12, 31, 32, 60, 71, 72, 200, 400):
        window = gate_window(shortest, tau)
        assert fires(shortest, window, tau), (shortest, window)
        assert window == 8 or not fires(shortest, window + 1, tau), (shortest, window)


def test_a_window_of_one_works_for_every_segment():
    assert gate_window(1, 0.95) == gate_window(2, 0.999) == 1
    assert gate_window(10_000, 0.95, largest=4) == 4
    with pytest.raises(UsageError, match="shortest_segment: 0"):
        gate_window(0, 0.95)


def test_the_gate_needs_a_full_window_strictly_above_the_threshold():
    gate = ProgressGate(tau=0.95, window=3)
    assert [gate.add(1.0) for _ in range(3)] == [False, False, True]
    gate.reset()
    assert gate.score is None
    assert [gate.add(0.95) for _ in range(10)] == [False] * 10  # equal is not above, also after rounding
    assert gate.score == pytest.approx(0.95)


def test_the_gate_looks_at_the_last_values_only():
    gate = ProgressGate(tau=0.5, window=2)
    assert [gate.add(p) for p in (0.0, 0.4, 0.7, 0.9, 0.0)] == [False, False, True, True, False]


def test_values_of_an_earlier_segment_never_count():
    gate = ProgressGate(tau=0.9, window=4)
    for _ in range(4):
        gate.add(1.0)
    gate.reset()
    assert [gate.add(1.0) for _ in range(4)] == [False, False, False, True]


def test_bad_gates_and_values_are_refused():
    with pytest.raises(UsageError, match=r"ProgressGate.tau: 1.0"):
        ProgressGate(tau=1.0)
    with pytest.raises(UsageError, match=r"ProgressGate.window: 0"):
        ProgressGate(window=0)
    with pytest.raises(MemerError, match="predicted progress is nan"):
        ProgressGate().add(float("nan"))


def test_the_example_of_the_specification():
    # p = 0.30: candidates 2/8 and 3/8; the second looks like the present.
    references = grey(0, 10, 20, 30, 40, 50, 60, 70, 80)
    assert align_progress(0.30, references, grey(33)[0]) == pytest.approx(0.3375)
    assert align_progress(0.30, references, grey(12)[0]) == pytest.approx(0.275)


def test_only_the_two_nearest_references_take_part():
    references = grey(0, 10, 20, 30, 40, 50, 60, 70, 80)
    assert align_progress(0.30, references, grey(80)[0]) == pytest.approx((0.30 + 3 / 8) / 2)
    assert align_progress(0.30, references, grey(80)[0], rule="global_argmin") == 1.0


@pytest.mark.parametrize(
    ("progress", "chosen"),
    [(0.30, 2 / 8), (0.35, 3 / 8), (0.3125, 2 / 8), (0.0, 0.0), (1.0, 1.0), (1.7, 1.0), (-0.4, 0.0)],
)
def test_ties_go_to_the_nearer_then_to_the_earlier_reference(progress, chosen):
    same = grey(*[50] * 9)
    p = min(max(progress, 0.0), 1.0)
    assert align_progress(progress, same, grey(50)[0]) == pytest.approx((p + chosen) / 2)


def test_differences_of_pixels_do_not_wrap_around():
    references = grey(250, 10)
    assert align_progress(0.5, references, grey(0)[0]) == pytest.approx(0.75)


def test_alignment_may_look_at_regions_only():
    references, frame = grey(0, 100), grey(0)[0].copy()
    frame[:2] = 100  # the upper half looks like the end, the lower one like the start
    upper = CanvasRegion(camera="base", y=0, x=0, height=2, width=4)
    lower = CanvasRegion(camera="wrist", y=2, x=0, height=2, width=4)
    assert align_progress(0.5, references, frame, regions=[upper]) == pytest.approx(0.75)
    assert align_progress(0.5, references, frame, regions=[lower]) == pytest.approx(0.25)
    assert align_progress(0.5, references, frame, regions=[upper, lower]) == pytest.approx(0.25)  # a tie


def test_the_soft_rule_lies_between_the_references():
    references = grey(0, 10, 20, 30, 40, 50, 60, 70, 80)
    aligned = align_progress(0.30, references, grey(30)[0], rule="soft")
    assert 0.30 < aligned < (0.30 + 3.5 / 8) / 2
    sharp = align_progress(0.30, references, grey(30)[0], rule="soft", temperature=1e-3)
    assert sharp == pytest.approx((0.30 + 3 / 8) / 2)
    assert align_progress(0.5, grey(7, 7, 7), grey(7)[0], rule="soft") == pytest.approx(0.5)


def test_pictures_that_cannot_be_compared_are_refused():
    with pytest.raises(ValueError, match="of one size"):
        align_progress(0.5, grey(1, 2), np.zeros((5, 4, 3), dtype=np.uint8))
    with pytest.raises(ValueError, match="at least two"):
        align_progress(0.5, grey(1), grey(1)[0])
    with pytest.raises(ValueError, match="rule: 'best'"):
        align_progress(0.5, grey(1, 2), grey(1)[0], rule="best")  # type: ignore[arg-type]
