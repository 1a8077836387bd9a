"""Windows: the worked tables of the method, their edge cases, and parity with the public exporter."""

import json
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memer.contract import CameraLayout, Contract, WindowSettings
from memer.errors import UsageError
from memer.keyframes import KeyframeRules
from memer.windows import (
    align,
    bucket_last_indices,
    build_question,
    check_rate,
    count_dropped,
    even_indices,
    recent_indices,
    split_keyframes,
    subsample_for_rate,
    subtask_history,
    target_index,
)

SHARED = Path(__file__).parents[3] / "shared"
GT = [30, 60, 95, 140]
DEFAULTS = {"subsample": 5, "length": 8, "memory_length": 8}


def grid(first: int, last: int) -> list[int]:
    return list(range(first, last + 1, 5))


@pytest.mark.parametrize(
    ("t", "context", "memory", "positions", "target"),
    [
        (0, [0], [], [], 10),
        (7, [2, 7], [], [], 17),
        (120, grid(85, 120), [30, 60], [3], 130),
        (122, grid(87, 122), [27, 57], [2], 132),
        (130, grid(95, 130), [30, 60], [1], 140),
        (131, grid(96, 131), [26, 56, 91], [], 141),
        (140, grid(105, 140), [30, 60, 95], [8], 150),
        (175, grid(140, 175), [30, 60, 95], [1], 185),
        (176, grid(141, 176), [26, 56, 91, 136], [], 186),
    ],
)
def test_worked_table(t, context, memory, positions, target):
    assert recent_indices(t, subsample=5, length=8) == context
    assert split_keyframes(GT, t, **DEFAULTS) == (memory, positions)
    assert target_index(t, 200, settings=WindowSettings()) == target


@pytest.mark.parametrize(("t", "window"), [(0, [0]), (3, [3]), (7, [3, 7]), (19, [3, 7, 11, 15, 19])])
def test_short_window_at_the_start_never_wraps(t, window):
    assert recent_indices(t, subsample=4, length=6) == window


@given(st.integers(0, 5000), st.integers(1, 20), st.integers(1, 40))
def test_window_is_the_tail_of_the_grid(t, s, n):
    assert recent_indices(t, subsample=s, length=n) == list(range(t % s, t + 1, s))[-n:]


def test_memory_before_the_grid_is_dropped_and_counted():
    shown = {t: split_keyframes([0, 2], t, **DEFAULTS)[0] for t in (60, 62, 63)}
    assert shown == {60: [0], 62: [2], 63: []}
    assert [count_dropped([0, 2], t, subsample=5) for t in (60, 62, 63)] == [0, 1, 2]


@pytest.mark.parametrize("k", range(4, 12))
def test_handover_from_output_to_input_is_gapless(k):
    for t in range(k, k + 90):
        memory, positions = split_keyframes([k], t, **DEFAULTS)
        assert (len(positions), len(memory)) == ((1, 0) if t <= k + 35 else (0, 1)), t
        if memory:
            assert k - 4 <= memory[0] <= k


def test_keyframe_just_before_the_window_is_memory_not_candidate():
    t = 100  # window 65..100
    for k in range(61, 65):
        assert split_keyframes([k], t, **DEFAULTS) == ([60], [])
    assert split_keyframes([65], t, **DEFAULTS) == ([], [1])


def test_current_frame_position_only_at_the_keyframe_itself():
    last = [split_keyframes([95], t, **DEFAULTS)[1] for t in range(94, 102)]
    assert last == [[], [8], [7], [7], [7], [7], [7], [6]]


def test_keyframes_of_one_cell_collapse_and_future_ones_do_not_show():
    assert split_keyframes([86, 88, 89, 101], 100, **DEFAULTS) == ([], [5])
    assert split_keyframes([10, 12, 14], 100, **DEFAULTS) == ([10], [])


def test_memory_keeps_the_last_m_and_zero_shows_none():
    keyframes = list(range(0, 100, 10))
    assert split_keyframes(keyframes, 150, subsample=5, length=8, memory_length=3)[0] == [70, 80, 90]
    assert split_keyframes(keyframes, 150, subsample=5, length=8, memory_length=0)[0] == []


def test_align_rounds_down_also_below_the_anchor():
    assert [align(k, anchor=7, subsample=5) for k in (2, 6, 7, 11, 12)] == [2, 2, 7, 7, 12]


def test_target_is_held_at_the_last_frame_and_refuses_foreign_frames():
    settings = WindowSettings(prediction_horizon=0)
    assert target_index(3, 4, settings=settings) == 3
    assert target_index(0, 4, settings=WindowSettings()) == 3
    with pytest.raises(ValueError, match="4"):
        target_index(4, 4, settings=settings)


@pytest.mark.parametrize(
    ("n", "count", "expected"),
    [
        (16, 3, [0, 7, 15]),
        (16, 5, [0, 3, 7, 11, 15]),
        (48, 5, [0, 11, 23, 35, 47]),
        (16, 1, [15]),
        (2, 5, [0, 1]),
        (1, 3, [0]),
        (0, 4, []),
    ],
)
def test_even_indices(n, count, expected):
    assert even_indices(n, count) == expected


def test_even_indices_is_exact_where_floats_fail():
    assert even_indices(31, 23)[11] == 15


@pytest.mark.parametrize("count", [0, -1, True, 2.0, "3", None])
def test_even_indices_refuses_bad_counts(count):
    with pytest.raises(ValueError, match="count"):
        even_indices(5, count)


@given(st.integers(1, 400), st.integers(1, 32))
def test_even_indices_are_distinct_and_end_at_the_newest(n, count):
    chosen = even_indices(n, count)
    assert chosen[-1] == n - 1
    assert len(set(chosen)) == len(chosen) == min(n, count)
    assert chosen == sorted(chosen)
    if count > 1:
        assert chosen[0] == 0


@pytest.mark.parametrize(
    ("length", "local"),
    [
        (1, [0] * 8),
        (3, [0, 0, 1, 1, 1, 2, 2, 2]),
        (8, list(range(8))),
        (10, [1, 2, 3, 4, 6, 7, 8, 9]),
        (116, [14, 28, 43, 57, 72, 86, 101, 115]),
    ],
)
def test_bucket_last_indices(length, local):
    assert bucket_last_indices(50, 50 + length) == [50 + k for k in local]


@given(st.integers(0, 1000), st.integers(1, 300), st.integers(1, 16))
def test_buckets_stay_inside_their_segment(start, length, buckets):
    chosen = bucket_last_indices(start, start + length, buckets)
    assert len(chosen) == buckets
    assert chosen == sorted(chosen)
    assert start <= chosen[0] <= chosen[-1] == start + length - 1
    if length >= buckets:
        assert len(set(chosen)) == buckets


@pytest.mark.parametrize(("start", "end"), [(3, 3), (4, 3), (-1, 2)])
def test_buckets_refuse_empty_segments(start, end):
    with pytest.raises(ValueError, match="segment"):
        bucket_last_indices(start, end)


def test_history_collapses_runs_and_leaves_the_running_one_out():
    labels = ["a", "a", None, "a", "b", "b", "a"]
    assert subtask_history(labels, running="a", length=16) == ("a", "b")
    assert subtask_history(labels, running="c", length=16) == ("a", "b", "a")
    assert subtask_history(labels, running="c", length=2) == ("b", "a")
    assert subtask_history(labels, running="c", length=0) == ()
    assert subtask_history([], running=None, length=16) == ()


def make_contract(**changes) -> Contract:
    return Contract(fps=15.0, cameras=CameraLayout(camera_keys=("base",)), **changes)


def ask(contract: Contract, memory: list[int], t: int = 122):
    return build_question(
        t,
        contract=contract,
        memory_indices=memory,
        frame=lambda k: np.full((2, 2, 3), k, dtype=np.uint8),
        source="demo",
        episode_index=4,
        instruction="clear the shelf",
        history=("a", "b"),
    )


@pytest.mark.parametrize(
    ("form", "window", "history"),
    [
        ("none", [122], ()),
        ("short", grid(87, 122), ()),
        ("long", grid(2, 122), ()),
        ("text", grid(87, 122), ("a", "b")),
        ("image", grid(87, 122), ()),
        ("image_text", grid(87, 122), ("a", "b")),
    ],
)
def test_question_shows_what_the_memory_form_shows(form, window, history):
    memory = [27, 57] if "image" in form else []
    question = ask(make_contract(memory_form=form), memory)
    assert [key[2] for key in question.memory_keys] == memory
    assert [key[2] for key in question.recent_keys] == window
    assert question.history == history
    assert set(question.frames) == set(question.image_keys)
    assert all(key[:2] == ("demo", 4) for key in question.image_keys)
    assert all((question.frames[key] == key[2]).all() for key in question.image_keys)


@pytest.mark.parametrize("memory", [[57, 27], [27, 27], [122], [-5, 3], list(range(9))])
def test_question_refuses_an_impossible_memory(memory):
    with pytest.raises(ValueError, match="memory_indices"):
        ask(make_contract(), memory)


def test_no_memory_image_enters_a_question_of_a_form_without_them():
    with pytest.raises(ValueError, match="at most 0"):
        ask(make_contract(memory_form="text"), [27])


def test_question_reads_every_image_once():
    read: list[int] = []
    build_question(
        122,
        contract=make_contract(memory_mode="compat"),
        memory_indices=[27, 90],
        frame=lambda k: (read.append(k), np.zeros((2, 2, 3), np.uint8))[1],
        source="demo",
        episode_index=0,
        instruction="x",
    )
    assert sorted(read) == sorted([27, 90, *grid(87, 122)])


def test_rate_helpers():
    assert subsample_for_rate(30.0, target_hz=3.0) == 10
    assert subsample_for_rate(10.0, target_hz=8.0) == 1
    for fps, target in ((0.0, 2.0), (10.0, 0.0), (10.0, 20.0)):
        with pytest.raises(UsageError):
            subsample_for_rate(fps, target_hz=target)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_rate(make_contract(), fps=17.0) == pytest.approx(17 / 15)
        assert check_rate(make_contract(), fps=30.0, subsample=10) == 1.0
    with pytest.warns(UserWarning, match="feed frames at 15 fps"):
        check_rate(make_contract(), fps=30.0)
    with pytest.warns(UserWarning, match="training sampled 3"):
        check_rate(make_contract(), fps=11.0)


def test_a_window_argument_below_its_bound_is_named():
    with pytest.raises(ValueError, match="subsample"):
        recent_indices(3, subsample=0, length=2)
    with pytest.raises(ValueError, match="t: -1"):
        recent_indices(-1, subsample=5, length=2)
    with pytest.raises(ValueError, match="memory_length"):
        split_keyframes([], 3, subsample=5, length=2, memory_length=-1)


def test_parity_with_the_public_exporter_on_real_episodes():
    golden = SHARED / "golden" / "memer_export_cr5_v3.jsonl"
    data = SHARED / "data" / "cr5_banana_v3"
    if not golden.is_file() or not data.is_dir():
        pytest.skip(f"{SHARED} is not there: golden records and real episodes lie beside the checkout")
    parquet = pytest.importorskip("pyarrow.parquet")
    names = {
        row["subtask_index"]: row["subtask"]
        for row in parquet.read_table(data / "meta" / "subtasks.parquet").to_pylist()
    }
    labels: dict[int, list[str | None]] = {}
    columns = ["episode_index", "frame_index", "subtask_index"]
    for file in sorted((data / "data").rglob("*.parquet")):
        for row in parquet.read_table(file, columns=columns).to_pylist():
            episode = labels.setdefault(row["episode_index"], [])
            assert row["frame_index"] == len(episode)
            episode.append(names.get(row["subtask_index"]))
    settings = WindowSettings()
    keyframes = {episode: KeyframeRules.all_last().select(labels[episode]) for episode in labels}
    seen = 0
    for line in golden.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        episode, t = record["episode"], record["t"]
        memory, positions = split_keyframes(keyframes[episode], t, **DEFAULTS)
        target = target_index(t, len(labels[episode]), settings=settings)
        assert memory == record["memory"]
        assert recent_indices(t, subsample=5, length=8) == record["context"]
        assert positions == record["positions"]
        assert labels[episode][target] == record["subtask"]
        seen += 1
    assert seen == sum(len(episode) for episode in labels.values()) == 1483


def test_split_equals_the_definition_on_random_episodes():
    rng = random.Random(0)
    for _ in range(300):
        s, n, m = rng.randint(1, 7), rng.randint(1, 9), rng.randint(0, 4)
        t = rng.randint(0, 120)
        keyframes = sorted(rng.sample(range(130), rng.randint(0, 12)))
        context = list(range(t % s, t + 1, s))[-n:]
        # Cell by cell: a keyframe belongs to the grid member that it follows by less than s frames.
        covered = [g for g in range(t % s, t + 1, s) if any(g <= k < g + s and k <= t for k in keyframes)]
        positions = [i for i, g in enumerate(context, start=1) if g in covered]
        memory = [g for g in covered if g < context[0]]
        expected = (memory[-m:] if m else [], positions)
        assert split_keyframes(keyframes, t, subsample=s, length=n, memory_length=m) == expected
