import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data.shards import BuildSettings, ShardSet, build_shards
from memer.cameras import stacked_frames
from memer.errors import MemerError, SourceUnavailableError, UsageError
from tests.data.synthetic import LAYOUT, SyntheticSource, identities

LENGTHS = {1: 12, 2: 7, 3: 15, 4: 9, 5: 11, 6: 8}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    settings = BuildSettings(cameras=LAYOUT, max_frames_per_part=5, max_shard_bytes=60_000)
    build_shards(SyntheticSource(LENGTHS), out=tmp_path / "set", settings=settings, progress=False)
    return tmp_path / "set"


def read_all(shards: ShardSet) -> bool:
    """Whether every picture is the one that was asked for."""
    for index in shards.episode_indices():
        for k, frame in enumerate(stacked_frames(shards.episode(index), LAYOUT)):
            if identities(frame) != [(index, k, 0), (index, k, 1)]:
                return False
    return True


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_after_the_parent_has_read(root: Path, method: str) -> None:
    shards = ShardSet(root)
    assert read_all(shards)
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        assert pool.map(read_all, [shards, shards, shards, shards]) == [True] * 4
    assert read_all(shards)


def test_a_forked_child_opens_its_own_files(root: Path) -> None:
    shards = ShardSet(root)
    list(shards.episode(1).cameras["base"].frames([0]))
    parents = set(shards.files._handles.values())
    assert parents
    pid = os.fork()
    if pid == 0:
        fine = read_all(shards) and shards.files._owner == os.getpid()
        os._exit(0 if fine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert read_all(shards)  # the child closed its copies only


def test_nothing_open_is_pickled(root: Path) -> None:
    shards = ShardSet(root)
    assert read_all(shards)
    copy = pickle.loads(pickle.dumps(shards))
    assert copy.files._handles == {}
    assert read_all(copy)


def test_a_subset_gives_the_same_as_the_full_set(root: Path) -> None:
    full = ShardSet(root)
    build_shards(
        SyntheticSource(LENGTHS),
        out=root.parent / "subset",
        settings=BuildSettings(cameras=LAYOUT),
        episodes=[4, 1],
        progress=False,
    )
    subset = ShardSet(root.parent / "subset")
    assert subset.episode_indices() == [1, 4]
    for index in (1, 4):
        for key in LAYOUT.camera_keys:
            ours, theirs = (s.episode(index).cameras[key] for s in (subset, full))
            assert [ours.jpeg(k) for k in range(len(ours))] == [theirs.jpeg(k) for k in range(len(theirs))]


def test_sparse_frames_are_those_of_the_full_pass(root: Path) -> None:
    camera = ShardSet(root).episode(3).cameras["wrist"]
    every = list(camera.frames())
    assert all(
        np.array_equal(a, every[k]) for k, a in zip([0, 4, 5, 14], camera.frames([0, 4, 5, 14]), strict=True)
    )


def test_no_negative_or_late_frame(root: Path) -> None:
    camera = ShardSet(root).episode(2).cameras["base"]
    for index in (-1, 7):
        with pytest.raises(IndexError, match="of 7"):
            list(camera.frames([index]))


def test_a_truncated_shard_is_named_at_opening(root: Path) -> None:
    shard = root / "shard-000001.tar"
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(MemerError, match=r"shard-000001\.tar: \d+ bytes, \d+ in the manifest"):
        ShardSet(root)


def test_a_missing_shard_is_named_at_opening(root: Path) -> None:
    (root / "shard-000000.tar").unlink()
    with pytest.raises(MemerError, match=r"shard-000000\.tar: missing"):
        ShardSet(root)


def test_one_altered_byte_is_found_by_verify(root: Path) -> None:
    assert len(list(ShardSet(root).verify())) == len(ShardSet(root).manifest["shards"]) + 1
    shard = root / "shard-000001.tar"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(MemerError, match=r"shard-000001\.tar: content differs"):
        list(ShardSet(root).verify())


def test_a_spoilt_picture_names_episode_camera_and_frame(root: Path) -> None:
    shards = ShardSet(root)
    camera = shards.episode(1).cameras["base"]
    shard = root / shards.manifest["shards"][int(camera.shards[3])]["name"]
    content = bytearray(shard.read_bytes())
    start = int(camera.offsets[3])
    content[start : start + int(camera.sizes[3])] = bytes(int(camera.sizes[3]))
    shard.write_bytes(content)
    with pytest.raises(MemerError, match="episode 1, camera base, frame 3"):
        list(camera.frames())


def test_wrong_paths_and_numbers(root: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailableError, match=r"manifest\.json: not found; make it with"):
        ShardSet(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no episode 9; present: 1, 2, 3"):
        ShardSet(root).episode(9)


def test_statistics_of_chosen_episodes(root: Path) -> None:
    states = np.concatenate([SyntheticSource(LENGTHS).episode(k).state for k in (2, 6)]).astype(np.float64)
    moments = ShardSet(root).statistics([2, 6])["state"]
    assert moments.count == 15
    assert moments.mean == pytest.approx(states.mean(axis=0))
    assert moments.std == pytest.approx(states.std(axis=0))


@pytest.mark.slow
def test_the_verify_command(root: Path) -> None:
    command = [sys.executable, "-m", "data.shards", "verify", str(root)]
    repository = Path(__file__).parents[3]
    good = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert good.returncode == 0
    assert "62 frames" in good.stdout
    os.truncate(root / "shard-000000.tar", 100)
    bad = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert bad.returncode == 1
    assert bad.stderr.startswith("error: ")
    assert bad.stderr.count("\n") == 1
