"""Every form of subtask labels gives the same segments, on the episode's clock, by key, never by guess."""

import json
import unicodedata

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.lerobot import LeRobotReader
from data.lerobot.language import normalize_cell
from memer.errors import MemerError, UsageError
from tests.data.lerobot.test_identity import identities
from tests.fixtures.paint import (
    FIRST,
    PERSISTENT_TYPE,
    SECOND,
    WRIST,
    PaintSet,
    language_row,
)


def spans(episode):
    return [(segment.start, segment.end, segment.label) for segment in episode.segments]


def finding(reader, code):
    return next((f for f in reader.report()["findings"] if f["code"] == code), None)


FORMS = ["subtask_index", "language", "column", "sarm", "robocoin"]
NAMES = {"column": "column:simple_subgoal", "sarm": "sarm:sparse"}


@pytest.mark.parametrize(
    ("form", "version"),
    [
        (form, version)
        for form in FORMS
        for version in ("v3.0", "v2.1")
        if (form, version) != ("sarm", "v2.1")
    ],
)
def test_segments_of_every_episode_start_on_the_episodes_own_clock(tmp_path, form, version):
    """C01: three episodes in one mp4, the label changes at frame 9 of each."""
    root = PaintSet(lengths=(31, 23, 40), labels=form, version=version).build(tmp_path / "paint")
    reader = LeRobotReader(root)
    for episode, length in zip(reader.episodes(), (31, 23, 40), strict=True):
        assert spans(episode) == [(0, 9, FIRST), (9, length, SECOND)]
        assert episode.segments[0].end - 1 == 8  # the "last" keyframe of the first segment
        assert identities(episode)[1][8] == (episode.episode_index, 8, 1)
        assert episode.metadata["label_source"] == NAMES.get(form, form)
    assert reader.report()["label_sources"] == {NAMES.get(form, form): 3}
    named = LeRobotReader(root, label_source=NAMES.get(form, form))
    assert [spans(e) for e in named.episodes()] == [spans(e) for e in reader.episodes()]


def test_a_form_that_is_not_there_gives_no_labels_and_an_unknown_one_is_refused(tmp_path):
    root = PaintSet(labels="subtask_index").build(tmp_path / "paint")
    for form in ("none", "language", "sarm:dense", "robocoin", "column:nothing"):
        assert LeRobotReader(root, label_source=form).episode(0).segments == ()
    with pytest.raises(UsageError, match=r"label_source='subtask'; known: native"):
        LeRobotReader(root, label_source="subtask")


def test_labels_by_key_and_unknown_keys_are_unlabelled(tmp_path):
    """C21: table in the order 2, 0, 1; -1 and 9 are no labels."""
    numbers = [2] * 5 + [-1] * 3 + [0] * 4 + [9] * 2 + [1] * 6

    def rows(_, columns):
        return {**columns, "subtask_index": pa.array(numbers, pa.int64())}

    paint = PaintSet(lengths=(20,), edit_rows=rows)
    root = paint.build(tmp_path / "paint")
    names = ["open the drawer", "take the cup", "close the drawer"]
    order = [2, 0, 1]
    paint.write_names(
        root / "meta/subtasks.parquet", "subtask_index", "subtask", order, [names[i] for i in order]
    )
    reader = LeRobotReader(root)
    assert spans(reader.episode(0)) == [(0, 5, names[2]), (8, 12, names[0]), (14, 20, names[1])]
    assert finding(reader, "subtask_table")["first"][0]["value"] == "rows in the order [2, 0, 1]"
    assert "[9]" in finding(reader, "subtask_unknown")["first"][0]["value"]
    assert finding(reader, "frames_unlabelled")["first"][0]["value"] == "5 of 20 frames"


def test_unicode_labels_are_one_segment_whatever_their_normal_form(tmp_path):
    composed = unicodedata.normalize("NFC", "tasse à café")
    decomposed = unicodedata.normalize("NFD", composed)
    assert composed != decomposed

    def label(_, frame):
        return "把勺子放回碗里" if frame < 4 else composed if frame % 2 else f"  {decomposed} "

    for form in ("column", "subtask_index"):
        paint = PaintSet(lengths=(10,), labels=form, label_at=label)
        segments = LeRobotReader(paint.build(tmp_path / form)).episode(0).segments
        assert [(s.start, s.end) for s in segments] == [(0, 4), (4, 10)]
        assert segments[0].label == "把勺子放回碗里"
        assert segments[1].label == decomposed  # the spelling met first is kept
        assert "\\" not in json.dumps({"a": segments[0].label}, ensure_ascii=False)


@pytest.mark.parametrize("blank", ["", "   ", "None", None])
def test_blank_texts_are_unlabelled(tmp_path, blank):
    def rows(_, columns):
        return {**columns, "simple_subgoal": pa.array(["grasp"] * 4 + [blank] * 3 + ["grasp"] * 3)}

    paint = PaintSet(lengths=(10,), labels="column", edit_rows=rows)
    assert spans(LeRobotReader(paint.build(tmp_path / "p")).episode(0)) == [(0, 4, "grasp"), (7, 10, "grasp")]


@pytest.mark.parametrize("task", ["", "  "])
def test_an_empty_task_is_an_error_with_a_way_out(tmp_path, task):
    root = PaintSet(task=task).build(tmp_path / "paint")
    with pytest.raises(MemerError, match=r"task_empty.*episode 0.*source.instruction=TEXT"):
        LeRobotReader(root).episode(0)
    assert LeRobotReader(root, instruction="serve").episode(0).instruction_at(0) == "serve"


def test_declared_but_absent_subtask_index_is_absent(tmp_path):
    def rows(_, columns):
        return {k: v for k, v in columns.items() if k != "subtask_index"}

    reader = LeRobotReader(PaintSet(edit_rows=rows).build(tmp_path / "paint"))
    assert reader.episode(0).segments == ()
    assert "subtask_index declared" in finding(reader, "column_missing")["first"][0]["value"]


def test_subtask_index_without_its_table_is_unlabelled(tmp_path):
    root = PaintSet().build(tmp_path / "paint")
    (root / "meta/subtasks.parquet").unlink()
    reader = LeRobotReader(root)
    assert reader.episode(1).segments == ()
    assert finding(reader, "subtask_table")["episodes"] == [0, 1, 2]


def test_numbers_stored_as_doubles_or_lists_of_one(tmp_path):
    """pandas writes doubles where a number is missing."""

    def rows(position, columns):
        numbers = [0.0] * 5 + [float("nan")] * 3 + [1.0] * 4
        frames = pa.array([[k] for k in range(12)], pa.list_(pa.int64()))
        return {**columns, "subtask_index": pa.array(numbers), "frame_index": frames}

    reader = LeRobotReader(PaintSet(lengths=(12,), edit_rows=rows).build(tmp_path / "paint"))
    assert [(s.start, s.end) for s in reader.episode(0).segments] == [(0, 5), (8, 12)]


def test_frames_without_a_label_are_errors_where_all_are_required(tmp_path):
    def rows(position, columns):
        cells = [-1 if position == 1 and k < 3 else 0 for k in range(len(columns["timestamp"]))]
        return {**columns, "subtask_index": pa.array(cells)}

    root = PaintSet(edit_rows=rows).build(tmp_path / "paint")
    assert LeRobotReader(root, require_labels=True).indices() == [0, 1, 2]
    assert LeRobotReader(root, mode="strict").indices() == [0, 1, 2]
    with pytest.raises(MemerError, match=r"1 x frames_unlabelled, episodes 1: .* 3 of 23 frames"):
        LeRobotReader(root, mode="strict", require_labels=True).indices()


def test_two_sources_that_differ_are_reported_with_counts(tmp_path):
    def rows(_, columns):
        other = [FIRST] * 12 + [SECOND] * (len(columns["timestamp"]) - 12)
        return {**columns, "subtask": pa.array(other)}

    def features(declared):
        return {**declared, "subtask": {"dtype": "string", "shape": [1], "names": None}}

    root = PaintSet(edit_rows=rows, edit_features=features).build(tmp_path / "paint")
    reader = LeRobotReader(root)
    assert spans(reader.episode(1))[0] == (0, 9, FIRST)
    found = finding(reader, "labels_differ")
    assert found["count"] == 3
    assert found["first"][0]["value"] == "subtask_index and column:subtask differ on 3 frames"
    assert spans(LeRobotReader(root, label_source="column:subtask").episode(1))[0] == (0, 12, FIRST)


def language_set(root, rows_of, *, lengths=(20, 20), cell_type=PERSISTENT_TYPE, convert=None, **kwargs):
    """A set whose persistent cells are `rows_of(position)`, one list per row; None leaves the columns out."""

    def edit(position, columns):
        cells = rows_of(position)
        if cells is None:
            return {k: v for k, v in columns.items() if not k.startswith("language_")}
        array = pa.array(cells, cell_type)
        return {**columns, "language_persistent": convert(array) if convert else array}

    return PaintSet(lengths=lengths, labels="language", edit_rows=edit, **kwargs).build(root / "paint")


def test_language_rows_take_effect_on_or_after_their_time_in_float32(tmp_path):
    """0.1 + 0.2 style times differ from float32(k / fps) only by rounding."""
    times = [0.0, 4 / 12, float(np.float32(9 / 12)), 10.4 / 12]
    rows = [language_row(text, t) for text, t in zip(("a", "b", None, "c"), times, strict=True)]
    rows.append({**language_row("the plan", 0.0, style="plan")})
    reader = LeRobotReader(language_set(tmp_path, lambda _: [rows] * 20))
    assert spans(reader.episode(0)) == [(0, 4, "a"), (4, 9, "b"), (11, 20, "c")]
    late = finding(reader, "language_time")
    assert late["count"] == 2
    assert "no frame" in late["first"][0]["value"]


def test_equal_neighbouring_language_spans_stay_two_segments(tmp_path):
    rows = [language_row("scoop", 0.0), language_row("scoop", 6 / 12)]
    reader = LeRobotReader(language_set(tmp_path, lambda _: [rows] * 20))
    assert spans(reader.episode(1)) == [(0, 6, "scoop"), (6, 20, "scoop")]


def test_a_first_subtask_after_the_first_frame_leaves_a_gap(tmp_path):
    rows = [language_row("scoop", 3 / 12)]
    reader = LeRobotReader(language_set(tmp_path, lambda _: [rows] * 20))
    assert spans(reader.episode(0)) == [(3, 20, "scoop")]
    assert finding(reader, "language_late_start")["episodes"] == [0, 1]


def test_language_on_a_shifted_row_clock(tmp_path):
    root = PaintSet(labels="language", clock="shifted").build(tmp_path / "paint")
    assert [spans(e)[0] for e in LeRobotReader(root).episodes()] == [(0, 9, FIRST)] * 3


_CALL = {"type": "function", "function": {"name": "say", "arguments": {"text": "done"}}}
_STRUCT = {"role": pa.string(), "content": pa.string(), "style": pa.string()}


def json_calls(array):
    """The same cells with tool_calls as list<json>, which pyarrow cannot build from Python values."""
    rows = array.flatten()
    calls = rows.field("tool_calls")
    texts = pa.ExtensionArray.from_storage(pa.json_(), calls.flatten())
    mask = pa.array([not cell.is_valid for cell in calls])
    children = [rows.field(i) for i in range(rows.type.num_fields)]
    names = [rows.type.field(i).name for i in range(rows.type.num_fields)]
    place = names.index("tool_calls")
    children[place] = pa.ListArray.from_arrays(calls.offsets, texts, mask=mask)
    return pa.ListArray.from_arrays(array.offsets, pa.StructArray.from_arrays(children, names))


def _typed(tool_calls, timestamp, camera):
    fields = {**_STRUCT, "timestamp": timestamp, "camera": camera, "tool_calls": tool_calls}
    return pa.list_(pa.struct(fields))


_CALL_STRUCT = pa.struct(
    {
        "type": pa.string(),
        "function": pa.struct({"name": pa.string(), "arguments": pa.struct({"text": pa.string()})}),
    }
)
LANGUAGE_TYPES = {
    "double times, null camera": (_typed(pa.list_(pa.string()), pa.float64(), pa.null()), None),
    "all null calls": (_typed(pa.null(), pa.float32(), pa.null()), None),
    "calls as structs": (_typed(pa.list_(_CALL_STRUCT), pa.float32(), pa.string()), [_CALL]),
    "calls as texts": (_typed(pa.list_(pa.string()), pa.float32(), pa.string()), [json.dumps(_CALL)]),
    "calls as one text": (_typed(pa.string(), pa.float32(), pa.string()), json.dumps([_CALL])),
    "calls as json": (_typed(pa.list_(pa.string()), pa.float64(), pa.string()), [json.dumps(_CALL)]),
}


@pytest.mark.parametrize("groups", [[[0, 1]], [[0], [1]]])
@pytest.mark.parametrize("form", LANGUAGE_TYPES)
def test_language_columns_of_every_type_found_on_disk(tmp_path, form, groups):
    """Types are inferred per shard upstream, so a second shard may differ."""
    kind, calls = LANGUAGE_TYPES[form]
    rows = [{**language_row("scoop", 0.0), "tool_calls": calls}, language_row("tip", 0.5)]
    convert = json_calls if form == "calls as json" else None
    root = language_set(tmp_path, lambda _: [rows] * 20, cell_type=kind, convert=convert, data_groups=groups)
    if len(groups) == 2:
        path = root / "data/chunk-000/file-001.parquet"
        table = pq.read_table(path).drop(["language_persistent"])
        plain = pa.array([[language_row("scoop", 0.0), language_row("tip", 0.5)]] * 20, PERSISTENT_TYPE)
        pq.write_table(table.append_column("language_persistent", plain), path)
    reader = LeRobotReader(root, mode="strict")
    assert [spans(e) for e in reader.episodes()] == [[(0, 6, "scoop"), (6, 20, "tip")]] * 2


def test_json_extension_cells_are_normalised():
    for calls in ([_CALL], [json.dumps(_CALL)], json.dumps([_CALL])):
        row = normalize_cell([{**language_row("x", 0.1), "tool_calls": calls}])[0]
        assert row.tool_calls == (_CALL,)
        assert row.time_s == float(np.float32(0.1))
    assert normalize_cell(None) == normalize_cell([]) == ()


def test_events_column_without_events_and_null_cells(tmp_path):
    def edit(position, columns):
        cells = columns["language_persistent"].to_pylist()
        cells[0] = None
        length = len(cells)
        return {
            **columns,
            "language_persistent": pa.array(cells, PERSISTENT_TYPE),
            "language_events": pa.array([[]] * length, pa.list_(pa.null())),
        }

    root = PaintSet(labels="language", edit_rows=edit).build(tmp_path / "paint")
    reader = LeRobotReader(root)
    assert [spans(e)[0] for e in reader.episodes()] == [(0, 9, FIRST)] * 3
    assert finding(reader, "language_null")["severity"] == "warning"
    with pytest.raises(MemerError, match=r"3 x language_null, episodes 0, 1, 2"):
        LeRobotReader(root, mode="strict").indices()


def test_language_columns_in_some_shards_only(tmp_path):
    rows = [language_row("scoop", 0.0)]
    root = language_set(tmp_path, lambda i: None if i else [rows] * 20, data_groups=[[0], [1]])
    reader = LeRobotReader(root)
    assert [len(e.segments) for e in reader.episodes()] == [1, 0]
    assert finding(reader, "language_partial")["severity"] == "warning"
    with pytest.raises(MemerError, match="language_partial"):
        LeRobotReader(root, mode="strict").indices()


def test_a_persistent_list_that_differs_within_an_episode_costs_the_episode(tmp_path):
    good, bad = [language_row("scoop", 0.0)], [language_row("tip", 0.0)]
    root = language_set(tmp_path, lambda i: [good] * 12 + [bad if i else good] * 8)
    reader = LeRobotReader(root)
    assert reader.indices() == [0]
    assert finding(reader, "language_differs")["first"][0]["frame"] == 12


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([language_row("x", 0.0, style="mood")], "language_style"),
        ([{**language_row("x", 0.0), "camera": "front"}], "language_camera"),
        ([language_row("x", 0.0), language_row("y", 0.0)], "language_duplicate"),
        ([language_row(None, 0.0)], "language_type"),
    ],
)
def test_language_rules_are_errors_in_strict_mode(tmp_path, rows, code):
    root = language_set(tmp_path, lambda _: [rows] * 20)
    assert finding(LeRobotReader(root), code)["severity"] == "warning"
    with pytest.raises(MemerError, match=code):
        LeRobotReader(root, mode="strict").indices()


def test_sarm_frames_are_clamped_and_null_means_not_annotated(tmp_path):
    """C03: episode 3 has a null list, episode 4 an empty one; exactly they are reported."""

    def edit(position, entry):
        if position == 3:
            return {**entry, **{k: None for k in entry if k.startswith("sparse_")}}
        if position == 4:
            return {**entry, **{k: [] for k in entry if k.startswith("sparse_")}}
        ends = entry["sparse_subtask_end_frames"]
        return {**entry, "sparse_subtask_end_frames": [*ends[:-1], ends[-1] + 7]}

    root = PaintSet(lengths=(12, 13, 14, 15, 16), labels="sarm", edit_entry=edit).build(tmp_path / "paint")
    reader = LeRobotReader(root)
    assert [len(e.segments) for e in reader.episodes()] == [2, 2, 2, 0, 0]
    assert spans(reader.episode(0))[-1] == (9, 12, SECOND)
    assert finding(reader, "episode_unlabelled")["episodes"] == [3, 4]
    lenient = LeRobotReader(root, require_labels=True)
    assert lenient.indices() == [0, 1, 2]
    assert lenient.report()["episodes"]["dropped"] == [3, 4]
    with pytest.raises(MemerError, match=r"2 x episode_unlabelled, episodes 3, 4"):
        LeRobotReader(root, require_labels=True, mode="strict").indices()


def test_sarm_dense_and_times_without_frames(tmp_path):
    def edit(_, entry):
        kept = {k: v for k, v in entry.items() if not k.startswith("sparse_")}
        dense = {"names": ["a", "b"], "start_times": [0, 1], "end_times": [1, 2]}
        return {**kept, **{f"dense_subtask_{k}": v for k, v in dense.items()}}

    root = PaintSet(lengths=(22,), labels="sarm", edit_entry=edit).build(tmp_path / "paint")
    for form in ("native", "sarm", "sarm:dense"):
        assert spans(LeRobotReader(root, label_source=form).episode(0)) == [(0, 12, "a"), (12, 22, "b")]
    assert LeRobotReader(root, label_source="sarm:sparse").episode(0).segments == ()


def test_robocoin_takes_the_first_valid_entry_and_reports_several(tmp_path):
    def rows(_, columns):
        cells = [[-1, 1, 0, -1, -1]] * 3 + [[0, -1, -1, -1, -1]] * 4 + [[-1] * 5] * 3
        return {**columns, "subtask_annotation": pa.array(cells, pa.list_(pa.int32(), 5))}

    paint = PaintSet(lengths=(10,), labels="robocoin", version="v2.1", edit_rows=rows)
    reader = LeRobotReader(paint.build(tmp_path / "paint"))
    assert spans(reader.episode(0)) == [(0, 3, SECOND), (3, 7, FIRST)]
    assert finding(reader, "label_several")["first"][0]["value"] == "3 frames with several subtasks"


def test_no_labelled_episode_at_all_is_always_an_error_where_labels_are_required(tmp_path):
    root = PaintSet(labels="none").build(tmp_path / "paint")
    assert LeRobotReader(root).indices() == [0, 1, 2]
    for mode in ("lenient", "strict"):
        with pytest.raises(MemerError, match=r"no_labels|episode_unlabelled"):
            LeRobotReader(root, require_labels=True, mode=mode).indices()


def test_grounded_subgoals_are_chosen_by_name(tmp_path):
    def rows(_, columns):
        texts = columns["simple_subgoal"].to_pylist()
        return {**columns, "grounded_subgoal": pa.array([f"{text} at (3, 4)" for text in texts])}

    def features(declared):
        return {**declared, "grounded_subgoal": {"dtype": "string", "shape": [1], "names": None}}

    root = PaintSet(labels="column", edit_rows=rows, edit_features=features).build(tmp_path / "paint")
    assert spans(LeRobotReader(root).episode(1))[0] == (0, 9, FIRST)
    grounded = LeRobotReader(root, label_source="column:grounded_subgoal", camera_keys=[WRIST])
    assert spans(grounded.episode(1))[0] == (0, 9, f"{FIRST} at (3, 4)")
