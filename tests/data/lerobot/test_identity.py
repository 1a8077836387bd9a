"""Every picture that is asked for is the picture that comes, decoded once, in every process."""

import multiprocessing
import pickle

import numpy as np
import pytest

from data.lerobot import LeRobotReader, decode_counter
from tests.fixtures.paint import BASE, WRIST, PaintSet, read_identity


def identities(episode):
    """Camera number -> identities of all its pictures."""
    return {
        number: [read_identity(picture) for picture in frames.frames()]
        for number, frames in enumerate(episode.cameras.values())
    }


def assert_identity(reader):
    for episode in reader.episodes():
        for camera, seen in identities(episode).items():
            assert seen == [(episode.episode_index, k, camera) for k in range(episode.num_frames)]


@pytest.mark.parametrize("version", ["v3.0", "v3.1", "v2.1", "v2.0"])
@pytest.mark.parametrize(
    ("codec", "gop"), [("libx264", 12), ("libx264", 250), ("mpeg4", 12), ("libsvtav1", 2)]
)
def test_identity_in_all_versions_and_codecs(tmp_path, version, codec, gop):
    reader = LeRobotReader(PaintSet(version=version, codec=codec, gop=gop).build(tmp_path / "paint"))
    assert reader.indices() == [0, 1, 2]
    assert_identity(reader)


def test_every_camera_has_its_own_file_and_offset(tmp_path):
    paint = PaintSet(
        lengths=(13, 22, 17, 9),
        numbers=(3, 7, 8, 20),
        data_groups=[[0, 1], [2, 3]],
        video_groups={BASE: [[0], [1, 2, 3]], WRIST: [[0, 1, 2], [3]]},
    )
    reader = LeRobotReader(paint.build(tmp_path / "paint"))
    assert reader.indices() == [3, 7, 8, 20]
    assert_identity(reader)


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
@pytest.mark.parametrize("clock", ["shifted", "drift"])
def test_identity_when_the_row_clock_is_wrong(tmp_path, clock, version):
    reader = LeRobotReader(PaintSet(clock=clock, version=version).build(tmp_path / "paint"))
    assert_identity(reader)
    drift = [f for f in reader.report()["findings"] if f["code"] == "clock_drift"]
    assert drift[0]["count"] == 3
    largest = {"shifted": 1 / 12, "drift": 0.03 + 39 / 12 * 0.09}[clock]
    assert reader.report()["largest_clock_deviation_s"] == pytest.approx(largest, abs=1e-5)


def test_strict_mode_also_reads_a_drifting_clock(tmp_path):
    reader = LeRobotReader(PaintSet(clock="drift").build(tmp_path / "paint"), mode="strict")
    assert_identity(reader)


def test_image_cameras_work_like_video_cameras(tmp_path):
    for row_groups in ("episode", "file"):
        paint = PaintSet(image_cameras=(WRIST,), row_groups=row_groups)
        reader = LeRobotReader(paint.build(tmp_path / row_groups))
        assert reader.camera_keys == (BASE, WRIST)
        assert_identity(reader)


def test_state_and_action_belong_to_the_same_frames(tmp_path):
    for row_groups in ("episode", "file"):
        reader = LeRobotReader(PaintSet(row_groups=row_groups).build(tmp_path / row_groups))
        for episode in reader.episodes():
            steps = np.arange(episode.num_frames)
            assert episode.state.dtype == np.float32
            assert np.array_equal(episode.state[:, 0], np.full(len(steps), episode.episode_index))
            assert np.array_equal(episode.state[:, 1], steps)
            assert np.array_equal(episode.action[:, 0], episode.episode_index - steps / 4)


@pytest.mark.parametrize("image_cameras", [(), (BASE, WRIST)])
def test_sparse_and_full_passes_give_identical_bytes(tmp_path, image_cameras):
    reader = LeRobotReader(PaintSet(image_cameras=image_cameras).build(tmp_path / "paint"))
    frames = reader.episode(1).cameras[WRIST]
    full = [picture.tobytes() for picture in frames.frames()]
    chosen = [0, 1, 7, 8, 22]
    assert [picture.tobytes() for picture in frames.frames(chosen)] == [full[k] for k in chosen]
    for k in (22, 5, 13):
        assert next(frames.frames([k])).tobytes() == full[k]
    assert list(frames.frames([])) == []
    for wrong in ([3, 3], [5, 4], [-1, 2], [22, 23]):
        with pytest.raises(ValueError, match="frame indices"):
            list(frames.frames(wrong))


def test_a_subset_gives_the_same_bytes_as_the_full_set(tmp_path):
    root = PaintSet(lengths=(20, 8, 11, 9, 15, 6), video_groups={WRIST: [[0, 1, 2], [3, 4, 5]]}).build(
        tmp_path / "p"
    )
    full, part = LeRobotReader(root), LeRobotReader(root, episodes=[1, 4])
    assert part.indices() == [1, 4]
    for index in (1, 4):
        a, b = full.episode(index), part.episode(index)
        assert a.segments == b.segments
        assert np.array_equal(a.state, b.state)
        for key in full.camera_keys:
            pairs = zip(a.cameras[key].frames(), b.cameras[key].frames(), strict=True)
            assert all(x.tobytes() == y.tobytes() for x, y in pairs)


def test_one_decode_and_one_conversion_per_frame(tmp_path):
    """A pass starts at the key frame before, so a file's first episode costs exactly its frames."""
    reader = LeRobotReader(PaintSet(lengths=(24, 36, 12), gop=12).build(tmp_path / "paint"))
    for episode in reader.episodes():
        for frames in episode.cameras.values():
            decode_counter.reset()
            count = sum(1 for _ in frames.frames())
            assert count == episode.num_frames
            assert decode_counter.converted == count
            assert (
                decode_counter.decoded == count
            )  # key frames every 12 pictures: every episode starts on one
            assert decode_counter.opened == 1


def test_an_episode_between_key_frames_decodes_at_most_one_group_more(tmp_path):
    reader = LeRobotReader(PaintSet(lengths=(31, 23, 40), gop=12).build(tmp_path / "paint"))
    decode_counter.reset()
    sum(1 for _ in reader.episode(1).cameras[BASE].frames())
    assert decode_counter.converted == 23
    assert 23 <= decode_counter.decoded < 23 + 12


def test_sparse_request_converts_only_what_was_asked_for(tmp_path):
    reader = LeRobotReader(PaintSet(lengths=(60,)).build(tmp_path / "paint"))
    decode_counter.reset()
    list(reader.episode(0).cameras[BASE].frames([4, 9, 14]))
    assert decode_counter.converted == 3
    assert decode_counter.decoded == 15


def test_checking_and_reading_an_episode_decodes_nothing_and_frames_come_lazily(tmp_path):
    reader = LeRobotReader(PaintSet(lengths=(200, 100)).build(tmp_path / "paint"))
    decode_counter.reset()
    reader.report()
    episode = reader.episode(0)
    assert (decode_counter.opened, decode_counter.decoded) == (0, 0)
    frames = episode.cameras[BASE].frames()
    next(frames)
    assert decode_counter.decoded <= 2
    frames.close()


def check_all(reader, queue):
    """Read everything in a worker; its own counter starts at what it inherited."""
    try:
        before = decode_counter.opened
        assert_identity(reader)
        queue.put(("fine", decode_counter.opened - before))
    except BaseException as error:
        queue.put((repr(error), 0))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_open_their_own_decoders(tmp_path, method):
    """C30: the parent has read, and is in the middle of a pass, when the workers start."""
    reader = LeRobotReader(PaintSet().build(tmp_path / "paint"))
    pending = reader.episode(1).cameras[BASE].frames()
    assert read_identity(next(pending)) == (1, 0, 0)
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    workers = [context.Process(target=check_all, args=(reader, queue)) for _ in range(4)]
    for worker in workers:
        worker.start()
    results = [queue.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join(timeout=60)
    assert results == [("fine", 6)] * 4
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert [read_identity(picture)[1] for picture in pending] == list(range(1, 23))


def test_episodes_and_reader_survive_pickling(tmp_path):
    reader = LeRobotReader(PaintSet().build(tmp_path / "paint"))
    reader.indices()
    copy = pickle.loads(pickle.dumps(reader))
    assert copy.report() == reader.report()
    episode = pickle.loads(pickle.dumps(copy.episode(2)))
    assert [read_identity(p) for p in episode.cameras[WRIST].frames()] == [(2, k, 1) for k in range(40)]


def test_cameras_are_chosen_and_ordered(tmp_path):
    root = PaintSet().build(tmp_path / "paint")
    reader = LeRobotReader(root, camera_keys=[WRIST, BASE])
    assert reader.camera_keys == (WRIST, BASE)
    assert list(reader.episode(0).cameras) == [WRIST, BASE]
    assert list(LeRobotReader(root, camera_keys=[WRIST]).episode(0).cameras) == [WRIST]
