"""Broken sets: the report names exactly the episode; strict fails, lenient goes on."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.lerobot import LeRobotReader
from memer.errors import MemerError, UsageError
from tests.data.lerobot.test_identity import assert_identity, identities
from tests.fixtures.paint import BASE, WRIST, PaintSet, corrupt_tail

REPOSITORY = Path(__file__).parents[3]


def errors(reader):
    """code -> episodes, of the errors."""
    found = reader.report()["findings"]
    return {f["code"]: f["episodes"] for f in found if f["severity"] == "error"}


def finding(reader, code):
    return next((f for f in reader.report()["findings"] if f["code"] == code), None)


def assert_only(root, code, episodes, *, kept, match=None, lenient_code=None):
    """Exactly `code` names exactly `episodes`; strict fails naming them, lenient reads the rest truly."""
    lenient = LeRobotReader(root)
    assert errors(lenient) == {code: episodes}
    assert lenient.indices() == kept
    assert lenient.report()["episodes"]["dropped"] == episodes
    assert_identity(lenient)
    named = ", ".join(map(str, episodes))
    with pytest.raises(MemerError, match=rf"{len(episodes)} x {code}, episodes {named}: ") as caught:
        LeRobotReader(root, mode="strict").indices()
    assert "\n" not in str(caught.value)
    if match:
        assert match in str(caught.value)
    with pytest.raises(MemerError, match=rf"{code}.*episode {episodes[0]}"):
        lenient.episode(episodes[0])


def test_an_episode_at_the_roll_over_that_points_at_the_previous_file(tmp_path):
    """C20, first set."""

    def edit(position, entry):
        return {**entry, "data/file_index": 0} if position == 2 else entry

    paint = PaintSet(lengths=(12, 9, 14, 8), data_groups=[[0, 1], [2, 3]], edit_entry=edit)
    root = paint.build(tmp_path / "paint")
    assert_only(root, "row_count", [2], kept=[0, 1, 3], match="no rows of this episode, 14 listed")


def short(camera_to_cut, episode, count, *, keep_times):
    """Drop the last `count` pictures of one episode from its file; times close up or leave a hole."""

    def edit(camera, group, pictures):
        if camera != camera_to_cut or episode not in group:
            return pictures, None
        lengths = (31, 23, 40)
        end = sum(lengths[i] for i in group if i <= episode)
        kept = [k for k in range(len(pictures)) if not end - count <= k < end]
        return [pictures[k] for k in kept], kept if keep_times else None

    return edit


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_an_mp4_three_frames_short(tmp_path, version):
    """C20, second set."""
    groups = {WRIST: [[0], [1], [2]]}
    paint = PaintSet(version=version, video_groups=groups, video_edit=short(WRIST, 1, 3, keep_times=False))
    root = paint.build(tmp_path / "paint")
    assert_only(root, "video_short", [1], kept=[0, 2], match="20 pictures for 23 rows")
    first = finding(LeRobotReader(root), "video_short")["first"][0]
    assert (first["camera"], first["file"] is not None) == (WRIST, True)
    assert LeRobotReader(root, camera_keys=[BASE], mode="strict").indices() == [0, 1, 2]


def test_a_shared_mp4_with_a_hole_names_the_episode_of_the_hole(tmp_path):
    root = PaintSet(video_edit=short(WRIST, 1, 3, keep_times=True)).build(tmp_path / "paint")
    assert_only(root, "video_short", [1], kept=[0, 2])
    assert finding(LeRobotReader(root), "video_total")["first"][0]["value"].startswith(
        "91 pictures for 94 rows"
    )


def test_a_shared_mp4_cut_off_at_the_end(tmp_path):
    root = PaintSet(video_edit=short(BASE, 2, 3, keep_times=False)).build(tmp_path / "paint")
    assert_only(root, "video_short", [2], kept=[0, 1])


def test_one_row_doubled(tmp_path):
    """C20, third set."""

    def double(position, columns):
        if position != 1:
            return columns
        rows = pa.table(columns).take([*range(8), 7, *range(8, 23)])
        return {name: rows.column(name).combine_chunks() for name in rows.column_names}

    root = PaintSet(edit_rows=double).build(tmp_path / "paint")
    assert_only(root, "row_count", [1], kept=[0, 2], match="24 rows, 23 listed")


def edit_one(position, **changes):
    """Change columns of one episode: name -> function of the list of cells."""

    def edit(at, columns):
        if at != position:
            return columns
        return {
            name: pa.array(changes[name](values.to_pylist()), values.type) if name in changes else values
            for name, values in columns.items()
        }

    return edit


def replaced(k, value):
    return lambda cells: [value if i == k else cell for i, cell in enumerate(cells)]


CELLS = {
    "not_finite": ({"action": replaced(6, [1.0, float("nan")])}, "frame 6", "action[1] is nan"),
    "not_finite state": ({"observation.state": replaced(3, [1.0, float("inf"), 0.0])}, "frame 3", "is inf"),
    "frame_index": ({"frame_index": replaced(5, 4)}, "frame 5", "frame_index 4 in row 5"),
    "clock_order": ({"timestamp": replaced(9, 0.1)}, "frame 9", "timestamp 0.1000 s after"),
    "clock_order nan": ({"timestamp": replaced(9, float("nan"))}, "frame 9", "nan"),
    "task_unknown": ({"task_index": lambda cells: [4] * len(cells)}, "frame 0", "task_index 4"),
}


@pytest.mark.parametrize("case", CELLS)
def test_a_bad_cell_names_episode_frame_and_value(tmp_path, case):
    changes, frame, value = CELLS[case]
    root = PaintSet(edit_rows=edit_one(1, **changes)).build(tmp_path / "p")
    assert_only(root, case.split()[0], [1], kept=[0, 2], match=value)
    assert f"frame {finding(LeRobotReader(root), case.split()[0])['first'][0]['frame']}" == frame


def test_a_list_length_unlike_the_shape(tmp_path):
    def edit(position, columns):
        cells = columns["action"].to_pylist()
        if position == 2:
            cells[11] = [1.0, 0.0, 0.0]
        return {**columns, "action": pa.array(cells, pa.list_(pa.float32()))}

    root = PaintSet(edit_rows=edit).build(tmp_path / "paint")
    assert_only(root, "vector_form", [2], kept=[0, 1], match="action: 3 values, declared 2")


def test_a_column_that_does_not_hold_what_its_name_says(tmp_path):
    def edit(position, columns):
        length = len(columns["timestamp"])
        wrong = {
            0: {"timestamp": pa.array(["soon"] * length)},
            1: {"task_index": pa.array([0.5] * length)},
            2: {"action": pa.array(["go"] * length)},
        }
        return {**columns, **wrong[position]}

    root = PaintSet(lengths=(8, 8, 8), version="v2.1", edit_rows=edit).build(tmp_path / "paint")
    reader = LeRobotReader(root)
    assert errors(reader) == {"column_type": [0, 1], "vector_form": [2]}
    with pytest.raises(
        MemerError, match="column timestamp is stored as string, must hold one number per row"
    ):
        reader.episode(0)


def test_a_start_that_is_not_stated_is_not_guessed(tmp_path):
    def edit(position, entry):
        return {**entry, f"videos/{WRIST}/from_timestamp": None} if position == 1 else entry

    root = PaintSet(edit_entry=edit).build(tmp_path / "shared")
    assert_only(root, "video_start", [1], kept=[0, 2])
    alone = PaintSet(edit_entry=edit, video_groups={WRIST: [[0], [1], [2]]}).build(tmp_path / "alone")
    assert_identity(LeRobotReader(alone, mode="strict"))


def test_pictures_damaged_in_the_middle_of_a_file_name_the_file(tmp_path):
    root = PaintSet(lengths=(60,), version="v2.1").build(tmp_path / "paint")
    path = root / f"videos/chunk-000/{BASE}/episode_000000.mp4"
    data = bytearray(path.read_bytes())
    start = data.index(b"mdat") + 400
    data[start : start + 3000] = bytes(3000)
    path.write_bytes(bytes(data))
    episode = LeRobotReader(root).episode(0)
    with pytest.raises(MemerError, match=rf"{path.name}: .*picture \d+"):
        list(episode.cameras[BASE].frames())


def test_rows_of_other_episodes_in_between(tmp_path):
    root = PaintSet(lengths=(10, 10, 10), row_groups="file").build(tmp_path / "paint")
    path = root / "data/chunk-000/file-000.parquet"
    order = [*range(9), 10, 9, *range(11, 30)]
    pq.write_table(pq.read_table(path).take(order), path)
    assert_only(root, "rows_apart", [0, 1], kept=[2])


def test_an_episode_listed_twice(tmp_path):
    root = PaintSet().build(tmp_path / "paint")
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    pq.write_table(pa.concat_tables([table, table.slice(1, 1)]), path)
    reader = LeRobotReader(root)
    assert errors(reader) == {"episode_twice": [1]}
    assert reader.indices() == [0, 2]


def test_listed_episodes_without_files_are_absent_not_broken(tmp_path):
    root = PaintSet(lengths=(8,) * 9, version="v2.1").build(tmp_path / "paint")
    for number in (0, 2, 3, 4, 5, 6, 8):
        (root / f"data/chunk-000/episode_{number:06d}.parquet").unlink()
    for mode in ("lenient", "strict"):
        reader = LeRobotReader(root, mode=mode)
        assert reader.indices() == [1, 7]
        found = finding(reader, "episodes_absent")
        assert found["severity"] == "warning"
        assert found["first"][0]["value"] == "7 of 9 listed episodes have no table: 0, 2, 3, 4, 5, ..."
    with pytest.raises(MemerError, match="episode 3 is listed but its table is absent"):
        reader.episode(3)
    with pytest.raises(UsageError, match="no episode 44; present: 1, 7"):
        reader.episode(44)
    with pytest.raises(UsageError, match=r"episodes=\[3\] are not present"):
        LeRobotReader(root, episodes=[3])


def test_an_empty_instruction_is_refused(tmp_path):
    with pytest.raises(UsageError, match="instruction is empty"):
        LeRobotReader(PaintSet().build(tmp_path / "paint"), instruction="  ")


def test_no_episode_present(tmp_path):
    root = PaintSet(version="v2.1").build(tmp_path / "paint")
    for path in root.rglob("episode_*.parquet"):
        path.unlink()
    with pytest.raises(MemerError, match="no episode present, 3 listed"):
        LeRobotReader(root)


def test_a_missing_mp4_costs_its_episode(tmp_path):
    root = PaintSet(version="v2.1").build(tmp_path / "paint")
    (root / f"videos/chunk-000/{WRIST}/episode_000002.mp4").unlink()
    assert_only(root, "video_missing", [2], kept=[0, 1])


def test_an_mp4_that_was_cut_off_or_is_none(tmp_path):
    root = PaintSet(version="v2.1").build(tmp_path / "paint")
    corrupt_tail(root / f"videos/chunk-000/{BASE}/episode_000000.mp4")
    (root / f"videos/chunk-000/{WRIST}/episode_000001.mp4").write_text("not a video")
    assert_only(root, "video_unreadable", [0, 1], kept=[2])


def test_a_table_that_was_cut_off(tmp_path):
    root = PaintSet(version="v2.1").build(tmp_path / "paint")
    corrupt_tail(root / "data/chunk-000/episode_000001.parquet")
    assert_only(root, "table_unreadable", [1], kept=[0, 2])


def test_more_pictures_than_rows_in_a_file_of_one_episode(tmp_path):
    def longer(camera, group, pictures):
        return (pictures + pictures[:2] if camera == BASE and group == [0] else pictures), None

    root = PaintSet(version="v2.1", video_edit=longer).build(tmp_path / "paint")
    lenient = LeRobotReader(root)
    assert lenient.indices() == [0, 1, 2]
    assert finding(lenient, "video_long")["severity"] == "warning"
    assert_identity(lenient)
    with pytest.raises(MemerError, match=r"1 x video_long, episodes 0"):
        LeRobotReader(root, mode="strict").indices()


def test_time_matching_only_where_counting_is_impossible_and_only_lenient(tmp_path):
    """The next episode claims to start two pictures early, but every row still has its own picture."""

    def edit(position, entry):
        key = f"videos/{WRIST}/from_timestamp"
        return {**entry, key: entry[key] - 2 / 12} if position == 2 else entry

    root = PaintSet(edit_entry=edit).build(tmp_path / "paint")
    lenient = LeRobotReader(root)
    assert finding(lenient, "video_by_time")["episodes"] == [1]
    assert identities(lenient.episode(1))[1] == [(1, k, 1) for k in range(23)]
    with pytest.raises(MemerError, match=r"1 x video_short, episodes 1"):
        LeRobotReader(root, mode="strict").indices()


def test_pictures_off_the_grid_are_counted_and_reported(tmp_path):
    def jitter(camera, group, pictures):
        return pictures, [2 * k + (k % 3 == 1) for k in range(len(pictures))]

    def slow(position, entry):
        return {k: v * 2 if k.endswith("from_timestamp") else v for k, v in entry.items()}

    root = PaintSet(video_edit=jitter, edit_entry=slow).build(tmp_path / "paint")
    reader = LeRobotReader(root)
    assert {"pts_grid", "stream_rate"} <= {f["code"] for f in reader.report()["findings"]}
    assert_identity(reader)


def test_one_frame_and_zero_length_episodes(tmp_path):
    root = PaintSet(lengths=(1, 8), labels="none").build(tmp_path / "paint")
    reader = LeRobotReader(root)
    assert reader.indices() == [0, 1]
    assert finding(reader, "one_frame")["episodes"] == [0]
    assert_identity(reader)

    def zero(position, entry):
        return {**entry, "length": 0} if position == 0 else entry

    def nothing(position, columns):
        return {k: v.slice(0, 0) for k, v in columns.items()} if position == 0 else columns

    root = PaintSet(lengths=(3, 8), labels="none", version="v2.1", edit_entry=zero, edit_rows=nothing)
    assert errors(LeRobotReader(root.build(tmp_path / "zero"))) == {"zero_length": [0]}


def test_counters_and_columns_that_disagree_are_warnings(tmp_path):
    def rows(_, columns):
        return {**columns, "force": pa.array(np.zeros(len(columns["timestamp"])))}

    def features(declared):
        return {**declared, "gaze": {"dtype": "float32", "shape": [2], "names": None}}

    paint = PaintSet(edit_rows=rows, edit_features=features, edit_info=lambda i: {**i, "total_episodes": 9})
    reader = LeRobotReader(paint.build(tmp_path / "paint"), mode="strict")
    assert reader.indices() == [0, 1, 2]
    found = {f["code"]: f["first"][0]["value"] for f in reader.report()["findings"]}
    assert found["counter"] == "total_episodes 9, listed 3"
    assert found["column_missing"] == "gaze declared, but absent in 1 of 1 tables"
    assert found["column_undeclared"] == "force in 1 of 1 tables, not declared in info.json"


def test_strict_lists_all_findings_of_the_first_class(tmp_path):
    def edit(position, columns):
        change = edit_one(position, action=replaced(position, [float("nan"), 0.0]))
        return change(position, columns) if position != 1 else columns

    root = PaintSet(lengths=(8,) * 8, edit_rows=edit).build(tmp_path / "paint")
    with pytest.raises(MemerError, match=r"7 x not_finite, episodes 0, 2, 3, 4, 5, 6, 7") as caught:
        list(LeRobotReader(root, mode="strict").episodes())
    assert str(caught.value).count("not_finite (episode") == 5
    assert LeRobotReader(root).indices() == [1]


def test_every_episode_broken_is_an_error_also_in_lenient_mode(tmp_path):
    def edit(position, columns):
        return edit_one(position, action=replaced(0, [float("nan"), 0.0]))(position, columns)

    with pytest.raises(MemerError, match=r"no usable episode.*3 x not_finite"):
        LeRobotReader(PaintSet(edit_rows=edit).build(tmp_path / "paint")).indices()


def test_findings_are_counted_and_the_first_five_shown(tmp_path):
    root = PaintSet(lengths=(8,) * 8, clock="drift").build(tmp_path / "paint")
    lines = LeRobotReader(root).report_lines()
    assert sum("warning clock_drift (episode" in line for line in lines) == 5
    assert "warning clock_drift: 8 in all, the first 5 shown" in lines


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 0, "3 usable of 3 present of 3 listed episodes, 94 frames at 12 fps"),
        (["--mode", "strict", "--require-labels"], 0, "labels: subtask_index (3)"),
        (["--label-source", "nonsense"], 2, "label_source='nonsense'"),
    ],
)
def test_command(tmp_path, arguments, code, text):
    root = PaintSet().build(tmp_path / "paint")
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", "data.lerobot", str(root), "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, text in done.stdout + done.stderr) == (code, True), done.stderr
    assert out.exists() == (code == 0)
    assert "Traceback" not in done.stderr
    if code == 0:
        assert json.loads(out.read_text())["episodes"]["usable"] == 3


def test_command_exit_codes_for_faults_and_absence(tmp_path):
    root = PaintSet(edit_rows=edit_one(1, action=replaced(6, [1.0, float("nan")]))).build(tmp_path / "paint")
    for path, code in ((root, 1), (tmp_path / "nothing", 3)):
        done = subprocess.run(
            [sys.executable, "-m", "data.lerobot", str(path)], cwd=REPOSITORY, capture_output=True, text=True
        )
        assert done.returncode == code
        assert "Traceback" not in done.stderr
