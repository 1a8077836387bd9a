"""Forms that public data sets have and no documentation describes; all must be read."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.lerobot import LeRobotReader
from memer.errors import MemerError, SourceUnavailableError, UsageError
from tests.data.lerobot.test_identity import assert_identity
from tests.fixtures.paint import ACTION_DIM, BASE, FIRST, SECOND, WRIST, PaintSet, png, write_jsonl


def codes(reader):
    return {finding["code"] for finding in reader.report()["findings"]}


def with_info(**changes):
    return lambda info: {**info, **changes}


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
@pytest.mark.parametrize("index_column", ["named", "__index_level_0__"])
@pytest.mark.parametrize("pandas_metadata", [True, False])
def test_both_spellings_of_the_index_column(tmp_path, version, index_column, pandas_metadata):
    paint = PaintSet(version=version, index_column=index_column, pandas_metadata=pandas_metadata)
    episode = LeRobotReader(paint.build(tmp_path / "paint")).episode(1)
    assert episode.instruction_at(0) == "serve the rice"
    assert [(s.start, s.end, s.label) for s in episode.segments] == [(0, 9, FIRST), (9, 23, SECOND)]


def test_float_fps_unknown_keys_and_codec_that_is_not_true(tmp_path):
    paint = PaintSet(codec="mpeg4", edit_info=with_info(fps=12.0, total_videos=6, note={"a": [1]}))
    reader = LeRobotReader(paint.build(tmp_path / "paint"))
    assert reader.fps == 12.0
    assert_identity(reader)


@pytest.mark.parametrize(
    "template",
    [
        "data/chunk-{episode_index:03d}/episode_{episode_index:06d}.parquet",
        "data/chunk-{chunk_index:03d}/episode_{episode_index:06d}.parquet",
    ],
)
def test_path_templates_that_do_not_fit_the_files(tmp_path, template):
    video = template.replace("data/", "videos/").replace("/episode_", "/{video_key}/episode_")
    video = video.replace(".parquet", ".mp4")
    paint = PaintSet(version="v2.1", edit_info=with_info(data_path=template, video_path=video))
    reader = LeRobotReader(paint.build(tmp_path / "paint"))
    assert reader.indices() == [0, 1, 2]
    assert_identity(reader)
    assert ("path_template" in codes(reader)) == ("chunk-{episode_index" in template)


def test_two_files_that_could_be_meant_are_an_error_of_that_episode(tmp_path):
    template = "data/chunk-{episode_index:03d}/episode_{episode_index:06d}.parquet"
    root = PaintSet(version="v2.1", edit_info=with_info(data_path=template)).build(tmp_path / "paint")
    copy = root / "data/chunk-777/episode_000001.parquet"
    copy.parent.mkdir()
    copy.write_bytes((root / "data/chunk-000/episode_000001.parquet").read_bytes())
    reader = LeRobotReader(root)
    assert reader.indices() == [0, 2]
    found = next(f for f in reader.report()["findings"] if f["code"] == "path_ambiguous")
    assert found["episodes"] == [1]


def test_a_path_never_leaves_the_root(tmp_path):
    paint = PaintSet(version="v2.1", edit_info=with_info(data_path="../elsewhere/{episode_index}.parquet"))
    with pytest.raises(MemerError, match="leaves the data set"):
        LeRobotReader(paint.build(tmp_path / "paint"))


def test_v2_without_bookkeeping_columns_and_with_doubles(tmp_path):
    def strip(position, columns):
        length = len(columns["timestamp"])
        states = columns["observation.state"].to_pylist()
        actions = columns["action"].to_pylist()
        kept = {
            "observation.state": pa.array(states, pa.list_(pa.float64())),
            "action": pa.array(actions, pa.list_(pa.float32())),
            "timestamp": pa.array(np.arange(length) / 12, pa.float64()),
        }
        return kept if position else {**kept, "episode_index": columns["episode_index"]}

    reader = LeRobotReader(PaintSet(version="v2.0", labels="none", edit_rows=strip).build(tmp_path / "paint"))
    assert reader.indices() == [0, 1, 2]
    assert reader.episode(2).instruction_at(5) == "serve the rice"
    assert reader.episode(2).state.shape == (40, 3)
    assert reader.episode(2).action.dtype == np.float32
    assert_identity(reader)


def test_the_rows_task_wins_over_flags_in_the_episode_list(tmp_path):
    def flag(_, entry):
        return {**entry, "tasks": ["success"]}

    for version in ("v2.1", "v3.0"):
        root = PaintSet(version=version, edit_entry=flag).build(tmp_path / version)
        assert LeRobotReader(root).episode(0).instruction_at(0) == "serve the rice"
        assert LeRobotReader(root, instruction=" wash  up ").episode(0).instruction_at(0) == "wash up"


def test_tasks_are_found_by_value_not_by_row(tmp_path):
    paint = PaintSet(edit_rows=lambda _, c: {**c, "task_index": pa.array([7] * len(c["task_index"]))})
    root = paint.build(tmp_path / "paint")
    paint.write_names(root / "meta/tasks.parquet", "task_index", "task", [9, 7, 0], ["nine", "seven", "zero"])
    reader = LeRobotReader(root)
    assert reader.episode(0).instruction_at(0) == "seven"
    assert "task_table" in codes(reader)


def test_other_names_of_state_action_and_cameras(tmp_path):
    paint = PaintSet(
        state_key="state", action_key="actions", cameras=("image", "wrist_image"), version="v2.1"
    )
    reader = LeRobotReader(paint.build(tmp_path / "paint"))
    assert reader.camera_keys == ("image", "wrist_image")
    assert_identity(reader)
    paint = PaintSet(state_key="joints", action_key="command")
    root = paint.build(tmp_path / "other")
    episode = LeRobotReader(root, state_key="joints", action_key="command").episode(1)
    assert episode.state[4].tolist() == [1.0, 4.0, 0.5]
    blind = LeRobotReader(root)
    assert blind.episode(1).state.shape == (23, 0)
    assert "feature_missing" in codes(blind)
    with pytest.raises(UsageError, match=r"state_key='arm' is no feature; features: joints, command"):
        LeRobotReader(root, state_key="arm")


def test_shape_with_channels_first_and_nested_names(tmp_path):
    def features(declared):
        declared[BASE] |= {"shape": [3, 54, 96], "names": ["channels", "height", "width"]}
        declared[WRIST] |= {"shape": [480, 640, 3]}
        declared["action"]["names"] = [["dx", "gripper"]]
        return declared

    reader = LeRobotReader(PaintSet(edit_features=features).build(tmp_path / "paint"))
    sizes = [f for f in reader.report()["findings"] if f["code"] == "picture_size"]
    assert {finding["first"][0]["camera"] for finding in sizes} == {WRIST}
    assert reader.episode(0).metadata["action_names"] == ["dx", "gripper"]
    assert next(reader.episode(0).cameras[WRIST].frames()).shape == (54, 96, 3)


@pytest.mark.parametrize(
    "spelling",
    [
        {"info": {"is_depth_map": True}},
        {"info": {"video.is_depth_map": True}},
        {"video_info": {"video.is_depth_map": True}, "info": None},
    ],
)
def test_depth_is_listed_and_left_out(tmp_path, spelling):
    def features(declared):
        declared[WRIST] = {**declared[WRIST], **spelling}
        return declared

    root = PaintSet(edit_features=features).build(tmp_path / "paint")
    reader = LeRobotReader(root)
    assert reader.camera_keys == (BASE,)
    assert reader.report()["depth_cameras"] == [WRIST]
    with pytest.raises(UsageError, match="depth map"):
        LeRobotReader(root, camera_keys=[WRIST])


def test_a_camera_without_any_file_is_left_out_with_a_warning(tmp_path):
    def features(declared):
        return {**declared, "observation.images.top": {**declared[BASE]}}

    for version in ("v2.1", "v3.0"):
        reader = LeRobotReader(PaintSet(version=version, edit_features=features).build(tmp_path / version))
        assert reader.camera_keys == (BASE, WRIST)
        assert "camera_absent" in codes(reader)
        assert reader.indices() == [0, 1, 2]


def test_to_timestamp_is_never_trusted(tmp_path):
    def edit(position, entry):
        return {k: (v - 1 / 12 if k.endswith("/to_timestamp") else v) for k, v in entry.items()}

    assert_identity(LeRobotReader(PaintSet(edit_entry=edit).build(tmp_path / "paint"), mode="strict"))


def test_dataset_from_index_is_never_a_row_number(tmp_path):
    def edit(position, entry):
        return {**entry, "dataset_from_index": 5000 + position, "dataset_to_index": 5001 + position}

    reader = LeRobotReader(
        PaintSet(edit_entry=edit, row_groups="file").build(tmp_path / "paint"), mode="strict"
    )
    assert [reader.episode(i).num_frames for i in reader.indices()] == [31, 23, 40]


def test_image_features_as_files_below_the_root(tmp_path):
    paint = PaintSet(image_cameras=(WRIST,), version="v2.1")

    def paths(position, columns):
        cells = []
        for k, picture in enumerate(paint.pictures(position, WRIST)):
            path = f"images/{WRIST}/{position}/{k:06d}.png"
            target = tmp_path / "paint" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(png(picture))
            cells.append({"bytes": None, "path": path})
        return {**columns, WRIST: pa.array(cells, pa.struct({"bytes": pa.binary(), "path": pa.string()}))}

    paint.edit_rows = paths
    root = paint.build(tmp_path / "paint")
    assert_identity(LeRobotReader(root))
    (root / f"images/{WRIST}/1/000004.png").unlink()
    broken = LeRobotReader(root).episode(1).cameras[WRIST]
    with pytest.raises(MemerError, match=r"episode 1 camera observation.images.wrist frame 4"):
        list(broken.frames())


def test_metadata_in_several_files_and_out_of_order(tmp_path):
    root = PaintSet().build(tmp_path / "paint")
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.slice(1), path)
    later = root / "meta/episodes/chunk-001/file-000.parquet"
    later.parent.mkdir()
    pq.write_table(table.slice(0, 1), later)
    reader = LeRobotReader(root)
    assert reader.indices() == [0, 1, 2]
    assert_identity(reader)


@pytest.mark.parametrize(
    ("info", "error", "match"),
    [
        ({"codebase_version": "v1.6"}, MemerError, r"codebase_version 'v1.6'"),
        ({"codebase_version": "v4.0"}, MemerError, r"codebase_version 'v4.0'"),
        ({"fps": 0}, MemerError, r"fps is 0"),
        ({"fps": "30"}, MemerError, r"fps is '30'"),
        ({"features": []}, MemerError, r"features holds list"),
        ({"data_path": "data/{nothing}.parquet"}, MemerError, r"path template"),
        ({"features": {"x": {"shape": [1]}}}, MemerError, r"feature 'x' has no dtype"),
        (
            {"features": {"x": {"dtype": "int8", "shape": ["a"]}}},
            MemerError,
            r"feature 'x' has shape \['a'\]",
        ),
    ],
)
def test_info_that_cannot_be_used(tmp_path, info, error, match):
    with pytest.raises(error, match=match):
        LeRobotReader(PaintSet(edit_info=with_info(**info)).build(tmp_path / "paint"))


def test_no_data_set_there(tmp_path):
    with pytest.raises(SourceUnavailableError, match="no LeRobot data set"):
        LeRobotReader(tmp_path / "nowhere")
    PaintSet().build(tmp_path / "outer" / "paint")
    with pytest.raises(SourceUnavailableError, match=r"did you mean .*outer/paint"):
        LeRobotReader(tmp_path / "outer")


def test_info_with_a_key_missing_or_no_json(tmp_path):
    root = PaintSet().build(tmp_path / "paint")
    info = json.loads((root / "meta/info.json").read_text())
    for key in ("codebase_version", "fps", "features"):
        (root / "meta/info.json").write_text(json.dumps({k: v for k, v in info.items() if k != key}))
        with pytest.raises(MemerError, match=f"key '{key}' is missing"):
            LeRobotReader(root)
    (root / "meta/info.json").write_text("{")
    with pytest.raises(MemerError, match=r"info.json: cannot be read as JSON"):
        LeRobotReader(root)


def test_jsonl_with_a_broken_line_names_the_line(tmp_path):
    root = PaintSet(version="v2.1").build(tmp_path / "paint")
    write_jsonl(root / "meta/tasks.jsonl", [{"task_index": 0, "task": "x"}])
    path = root / "meta/episodes.jsonl"
    good = path.read_text()
    path.write_text(good + '{"episode_index": "x", "length": 3}\n')
    with pytest.raises(MemerError, match=r"episode_index is 'x', must be a whole number"):
        LeRobotReader(root)
    path.write_text(good)
    with (root / "meta/episodes.jsonl").open("a") as stream:
        stream.write("{oops\n")
    with pytest.raises(MemerError, match=r"episodes.jsonl: line 4 is not JSON"):
        LeRobotReader(root)


def test_action_of_one_component_as_a_scalar_column(tmp_path):
    def scalar(_, columns):
        return {**columns, "action": pa.array(range(len(columns["timestamp"])), pa.float64())}

    def features(declared):
        declared["action"] |= {"shape": [1], "names": None}
        return declared

    assert ACTION_DIM != 1
    reader = LeRobotReader(PaintSet(edit_rows=scalar, edit_features=features).build(tmp_path / "paint"))
    assert reader.episode(0).action.tolist() == [[float(k)] for k in range(31)]
