"""RMBench recordings as a source of episodes: colours, actions, texts, broken files."""

import json
import pickle
import shutil
import sys

import numpy as np
import pytest

from conf.compose import compose
from data.build import main
from data.rmbench import RMBenchReader
from data.shards import ShardSet
from data.sources import Source
from memer.episode import Segment
from memer.errors import MemerError, SourceUnavailableError, UsageError
from tests.data.rmbench.recordings import (
    CAMERAS,
    OBJECT,
    picture,
    positions,
    write_annotations,
    write_recording,
    write_task,
    write_texts,
)

pytest.importorskip("h5py")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder that no test changes."""
    return write_task(tmp_path_factory.mktemp("rmbench") / "swap_blocks" / "demo_clean")


@pytest.fixture
def root(whole, tmp_path):
    """A copy to break."""
    return shutil.copytree(whole, tmp_path / "swap_blocks" / "demo_clean")


def test_it_is_a_source(whole):
    reader = RMBenchReader(whole)
    assert isinstance(reader, Source)
    assert reader.name == "rmbench_swap_blocks"
    assert reader.indices() == [0, 2]
    assert reader.camera_keys == CAMERAS
    assert reader.fps == pytest.approx(50 / 3)


def test_a_red_object_is_red(whole):
    episode = RMBenchReader(whole).episode(0)
    for camera in CAMERAS:
        frame = next(iter(episode.cameras[camera].frames([3])))
        assert frame.dtype == np.uint8
        assert frame.shape == (48, 64, 3)
        np.testing.assert_allclose(frame[24, 32], OBJECT[camera], atol=8)


def test_pictures_that_are_true_rgb_can_be_read_as_they_are(whole):
    episode = RMBenchReader(whole, swap_channels=False).episode(0)
    frame = next(iter(episode.cameras["head_camera"].frames([0])))
    np.testing.assert_allclose(frame[24, 32], OBJECT["head_camera"][::-1], atol=8)


def test_padded_pictures_of_any_length_are_the_right_frames(whole):
    frames = RMBenchReader(whole).episode(2).cameras["left_camera"]
    assert len(frames) == 16
    for index, frame in zip([0, 7, 15], frames.frames([0, 7, 15]), strict=True):
        difference = np.abs(frame.astype(int) - picture("left_camera", index))
        assert np.median(difference) <= 4
        assert difference.mean() < 6
    assert len(list(frames.frames())) == 16
    with pytest.raises(ValueError, match="ascending"):
        next(frames.frames([3, 3]))


def test_the_action_is_the_position_of_the_next_frame_and_the_last_one_stays(whole):
    episode = RMBenchReader(whole).episode(2)
    vector = positions(16, episode=2).astype(np.float32)
    assert (episode.state.dtype, episode.action.dtype) == (np.float32, np.float32)
    np.testing.assert_array_equal(episode.state, vector)
    np.testing.assert_array_equal(episode.action[:-1], vector[1:])
    np.testing.assert_array_equal(episode.action[-1], vector[-1])


def test_positions_come_from_the_parts_where_the_vector_is_absent(root):
    write_recording(root, 0, 20, **{"joint_action/vector": None})
    np.testing.assert_allclose(RMBenchReader(root).episode(0).state, positions(20), rtol=1e-6)


def test_frames_behind_the_last_entry_are_unannotated(whole):
    episode = RMBenchReader(whole).episode(0)
    assert episode.segments == (Segment(0, 8, "Pick."), Segment(8, 18, "Place."))
    assert episode.labels()[-2:] == [None, None]
    assert episode.metadata["unannotated_tail"] == 2


def test_an_episode_without_annotation_is_unlabelled_and_reported(root):
    write_annotations(root, {"episode_0": [["Pick.", 20]], "episode_7": [["Pick.", 3]]})
    reader = RMBenchReader(root)
    assert reader.episode(2).segments == ()
    report = reader.report()
    findings = {finding["code"]: finding["episodes"] for finding in report["findings"]}
    assert findings == {"episode_unannotated": [2], "recording_missing": [7]}
    (root / "language_annotation.json").unlink()
    assert RMBenchReader(root).episode(0).segments == ()


def test_instructions_seen_and_unseen(whole):
    assert RMBenchReader(whole).episode(2).instruction_at(0) == "seen 2 a"
    assert RMBenchReader(whole, instruction_number=1).episode(0).instruction_at(9) == "seen 0 b"
    episode = RMBenchReader(whole, instruction_set="unseen").episode(0)
    assert episode.instruction_at(0) == "unseen 0"
    assert episode.metadata["instructions"] == {"seen": ["seen 0 a", "seen 0 b"], "unseen": ["unseen 0"]}
    assert RMBenchReader(whole, instruction="swap").episode(0).instruction_at(0) == "swap"


def test_the_report_counts_what_the_episodes_hold(whole):
    report = RMBenchReader(whole).report()
    json.dumps(report)
    assert (report["episodes"], report["frames"], report["unannotated_tail_frames"]) == (2, 36, 4)
    assert report["segments"] == {"Pick.": 2, "Place.": 2}
    assert (report["errors"], report["warnings"]) == (0, 0)


def test_an_unpickled_reader_gives_the_same_episode(whole):
    reader = RMBenchReader(whole, camera_keys=["head_camera"])
    ours, theirs = reader.episode(0), pickle.loads(pickle.dumps(reader)).episode(0)
    assert ours.segments == theirs.segments
    for a, b in zip(
        ours.cameras["head_camera"].frames(), theirs.cameras["head_camera"].frames(), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_recordings_become_shards(whole, tmp_path):
    overrides = [
        "source=rmbench",
        f"source.root={whole}",
        f"out={tmp_path / 'out'}",
        "cameras.camera_keys=[head_camera]",
        "cameras.view_width=32",
        "cameras.view_height=32",
        "num_workers=0",
        "progress=false",
    ]
    main(compose("build", overrides))
    shards = ShardSet(tmp_path / "out")
    assert shards.episode_indices() == [0, 2]
    assert [s.label for s in shards.segments(0)] == ["Pick.", "Place."]
    frame = next(iter(shards.episode(0).cameras["head_camera"].frames([0])))
    np.testing.assert_allclose(frame[16, 16], OBJECT["head_camera"], atol=12)


# Broken files: one line with file, episode and field.


def test_a_truncated_file_costs_its_episode_alone(root, tmp_path):
    path = root / "data" / "episode0.hdf5"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    reader = RMBenchReader(root)
    with pytest.raises(MemerError, match=r"episode0\.hdf5: cannot be read as HDF5.*fetch the file again"):
        reader.episode(0)
    assert reader.episode(2).num_frames == 16
    assert [f["code"] for f in reader.report()["findings"]] == ["episode_unusable"]


def test_a_missing_episode_names_what_there_is(whole):
    with pytest.raises(UsageError, match=r"no data/episode1\.hdf5; 2 recordings, 0\.\.2"):
        RMBenchReader(whole).episode(1)


def test_a_broken_picture_names_camera_and_frame(root):
    write_recording(root, 0, 3, **{"observation/left_camera/rgb": np.array([b"\xff\xd8no", b"x", b"y"])})
    write_annotations(root, {"episode_0": [["Pick.", 3]]})
    frames = RMBenchReader(root).episode(0).cameras["left_camera"]
    with pytest.raises(MemerError, match=r"episode0\.hdf5: camera left_camera frame 1: .*cannot be decoded"):
        list(frames.frames([1]))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (
            {"observation/left_camera/rgb": np.array([b"x"] * 19)},
            "left_camera has 19 frames, joint_action 20",
        ),
        ({"observation/left_camera/rgb": None}, "no pictures of camera left_camera"),
        ({"joint_action/left_gripper": np.zeros(19)}, r"parts have \[20, 19, 20, 20\] frames"),
        ({"joint_action/right_arm": np.zeros((20, 6))}, "differs from left_arm"),
        (
            {"joint_action/vector": None, "joint_action/left_arm": None},
            "neither joint_action/vector nor all",
        ),
        ({"joint_action/vector": np.zeros(20)}, r"float64\[20\], must be numbers \[T, D\]"),
    ],
)
def test_wrong_data_sets_name_episode_and_field(root, changed, named):
    write_recording(root, 0, 20, **changed)
    with pytest.raises(MemerError, match=f"episode 0: .*{named}"):
        RMBenchReader(root).episode(0)


def test_a_sensor_that_is_not_finite_names_frame_and_dimension(root):
    vector = positions(20)
    vector[5, 3] = np.nan
    parts = {
        "joint_action/left_arm": vector[:, :6],
        "joint_action/vector": vector,
    }
    write_recording(root, 0, 20, **parts)
    with pytest.raises(MemerError, match="episode 0: joint_action/vector frame 5 dim 3 is nan"):
        RMBenchReader(root).episode(0)


def test_a_missing_instruction_names_the_way_out(root):
    (root / "instructions" / "episode0.json").unlink()
    with pytest.raises(MemerError, match=r"episode0\.json: no such file.*source\.instruction=TEXT"):
        RMBenchReader(root).episode(0)
    with pytest.raises(MemerError, match=r"episode2\.json: no unseen instruction number 3 \(1 there\)"):
        RMBenchReader(root, instruction_set="unseen", instruction_number=3).episode(2)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"instruction_set": "test"}, "source.instruction_set='test'"),
        ({"instruction_number": -1}, "source.instruction_number: -1"),
        ({"instruction_number": "x"}, "source.instruction_number: 'x', must be a whole number"),
        ({"groups": 3}, "source.groups=3, must be a list"),
        ({"groups": [3]}, "must be {text: TEXT, entries: N}"),
        ({"repeatable": "Pick."}, "source.repeatable='Pick.', must be a list"),
        ({"instruction": " "}, "source.instruction is empty"),
        ({"camera_keys": ["top"]}, "no camera 'top'; cameras: head_camera, left_camera, right_camera"),
        ({"camera_keys": []}, "source.camera_keys is empty"),
        ({"merge": "all"}, "source.merge='all'"),
        ({"merge": "grouped"}, "groups and merge=grouped go together"),
        ({"groups": [{"text": "a", "entries": 3}]}, "groups and merge=grouped go together"),
        ({"merge": "grouped", "groups": [{"text": "a", "entries": 0}]}, "must be at least 1"),
        ({"merge": "grouped", "groups": [{"text": "a"}]}, "must be {text: TEXT, entries: N}"),
        ({"merge": "adjacent_equal", "repeatable": ["a"]}, "source.repeatable goes with merge=none"),
    ],
)
def test_wrong_options_name_the_field(whole, changed, named):
    with pytest.raises(UsageError, match=named.replace("(", r"\(").replace("{", r"\{")):
        RMBenchReader(whole, **changed)


def test_a_folder_without_recordings_is_unavailable(tmp_path):
    with pytest.raises(SourceUnavailableError, match="no data/ there"):
        RMBenchReader(tmp_path)
    (tmp_path / "data").mkdir()
    with pytest.raises(SourceUnavailableError, match=r"no episodeN\.hdf5 there"):
        RMBenchReader(tmp_path)
    (tmp_path / "data" / "episode0.hdf5").write_bytes(b"nothing")
    write_texts(tmp_path, 0)
    with pytest.raises(MemerError, match="none of 1 recordings can be read as HDF5"):
        RMBenchReader(tmp_path)


def test_without_h5py_the_extra_is_named(whole, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(UsageError, match=r"needs h5py.*memer\[rmbench\]"):
        RMBenchReader(whole)
