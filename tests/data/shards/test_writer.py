import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import webdataset

from data.building import locked
from data.shards import BuildSettings, ShardSet, build_shards
from memer.cameras import stacked_frames
from memer.errors import MemerError, UsageError
from tests.data.synthetic import CAMERAS, LAYOUT, SyntheticSource, identities

SETTINGS = BuildSettings(cameras=LAYOUT, max_frames_per_part=10, max_shard_bytes=60_000)
LENGTHS = {0: 23, 2: 9, 5: 31, 7: 20, 11: 10, 12: 1}


def build(source: SyntheticSource, out: Path, **kwargs: object) -> dict[str, object]:
    arguments = {"settings": SETTINGS, "progress": False, **kwargs}
    return build_shards(source, out=out, **arguments)  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_episodes_come_back_as_they_were(tmp_path: Path) -> None:
    source = SyntheticSource(LENGTHS)
    manifest = build(source, tmp_path / "out")
    shards = ShardSet(tmp_path / "out")
    assert shards.episode_indices() == [0, 2, 5, 7, 11, 12]
    assert manifest["num_frames"] == sum(LENGTHS.values())
    assert len(manifest["shards"]) > 1  # type: ignore[arg-type]
    for index in shards.episode_indices():
        stored, raw = shards.episode(index), source.fresh().episode(index)
        assert np.array_equal(stored.state, raw.state)
        assert np.array_equal(stored.action, raw.action)
        assert stored.state.dtype == np.float32
        assert (stored.segments, stored.instructions, stored.metadata, stored.fps) == (
            raw.segments,
            raw.instructions,
            raw.metadata,
            raw.fps,
        )
        assert shards.segments(index) == raw.segments
        live = list(stacked_frames(raw, LAYOUT))
        read = list(stacked_frames(stored, LAYOUT))
        assert len(read) == LENGTHS[index]
        assert all(np.array_equal(a, b) for a, b in zip(live, read, strict=True))
        assert [identities(frame) for frame in read] == [
            [(index, k, 0), (index, k, 1)] for k in range(LENGTHS[index])
        ]


def test_every_source_frame_is_decoded_once(tmp_path: Path) -> None:
    source = SyntheticSource(LENGTHS)
    build(source, tmp_path / "out")
    for index, length in LENGTHS.items():
        for key in CAMERAS:
            assert source.frames[index, key].asked == list(range(length))


def test_bytes_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    build(SyntheticSource(LENGTHS), tmp_path / "alone")
    build(SyntheticSource(LENGTHS), tmp_path / "pair", num_workers=2)
    assert contents(tmp_path / "alone") == contents(tmp_path / "pair")


def test_plain_webdataset_and_tar_read_the_shards(tmp_path: Path) -> None:
    build(SyntheticSource(LENGTHS), tmp_path / "out")
    shards = ShardSet(tmp_path / "out")
    seen = []
    for shard in shards.manifest["shards"]:
        path = tmp_path / "out" / shard["name"]
        for sample in webdataset.WebDataset(str(path), shardshuffle=False).decode("rgb8"):
            part = sample["json"]
            seen.append((part["episode_index"], part["start"], part["end"]))
            assert sample["state.npy"].shape == (part["end"] - part["start"], 3)
            picture = sample[f"{part['start']:06d}.cam1.jpg"]
            assert identities(np.concatenate([picture, picture]))[0] == (
                part["episode_index"],
                part["start"],
                1,
            )
        with tarfile.open(path) as tar:
            for member in tar.getmembers():
                assert member.mtime == 0
                if member.name.endswith("json"):
                    entry = next(e for e in shards.parts if f"{e.key}.json" == member.name)
                    assert entry.json_at == (member.offset_data, member.size)
    assert seen == [(e.episode_index, e.start, e.end) for e in shards.parts]
    assert max(e.end - e.start for e in shards.parts) == 10


@pytest.mark.parametrize("stop_at", [2, 5, 12])
def test_an_interrupted_build_goes_on_and_gives_the_same_bytes(tmp_path: Path, stop_at: int) -> None:
    build(SyntheticSource(LENGTHS), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        build(SyntheticSource(LENGTHS, stop_at=stop_at), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    again = SyntheticSource(LENGTHS)
    build(again, tmp_path / "out")
    assert again.read == [index for index in LENGTHS if index >= stop_at]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.slow
def test_killed_at_any_time_the_same_command_finishes(tmp_path: Path) -> None:
    lengths = dict.fromkeys(range(12), 40)
    code = (
        "from tests.data.shards.test_writer import SETTINGS, SyntheticSource, build\n"
        "from pathlib import Path\n"
        f"build(SyntheticSource({lengths}), Path(r'{tmp_path / 'out'}'), num_workers=0)\n"
    )
    build(SyntheticSource(lengths), tmp_path / "whole")
    for seconds in (0.05, 0.15, 0.3, 0.5):
        process = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[3])
        pieces = tmp_path / "out.partial" / ".work"
        deadline = time.monotonic() + 60
        while not pieces.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(seconds)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        if (tmp_path / "out").exists():
            break
    build(SyntheticSource(lengths), tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_the_same_command_again_reads_nothing(tmp_path: Path) -> None:
    first = build(SyntheticSource(LENGTHS), tmp_path / "out")
    source = SyntheticSource(LENGTHS)
    assert build(source, tmp_path / "out") == first
    assert source.read == []


def test_other_inputs_in_the_same_directory_are_refused(tmp_path: Path) -> None:
    build(SyntheticSource(LENGTHS), tmp_path / "out")
    before = contents(tmp_path)
    other = BuildSettings(cameras=LAYOUT, max_frames_per_part=11, max_shard_bytes=60_000)
    with pytest.raises(UsageError, match=r"max_frames_per_part: 10 there, 11 asked.*out=DIR"):
        build(SyntheticSource(LENGTHS), tmp_path / "out", settings=other)
    assert contents(tmp_path) == before


def test_other_inputs_on_unfinished_work_are_refused_and_the_work_stays(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        build(SyntheticSource(LENGTHS, stop_at=7), tmp_path / "out")
    with pytest.raises(UsageError, match=r"out\.partial: made from other inputs"):
        build(SyntheticSource(LENGTHS), tmp_path / "out", labels="gripper")
    again = SyntheticSource(LENGTHS)
    build(again, tmp_path / "out")
    assert again.read == [7, 11, 12]


def test_a_changed_input_file_is_noticed(tmp_path: Path) -> None:
    labels = tmp_path / "labels.json"
    labels.write_text("[1]")
    build(SyntheticSource({0: 9}), tmp_path / "out", inputs={"labels": {"path": str(labels)}})
    labels.write_text("[2]")
    with pytest.raises(UsageError, match=r"inputs\.labels\.path\.fingerprint"):
        build(SyntheticSource({0: 9}), tmp_path / "out", inputs={"labels": {"path": str(labels)}})


@pytest.mark.parametrize("num_workers", [0, 2])
def test_strict_names_every_unlabelled_episode_and_leaves_nothing(tmp_path: Path, num_workers: int) -> None:
    source = SyntheticSource(dict.fromkeys(range(1, 6), 9), unlabelled=(3, 4))
    strict = BuildSettings(cameras=LAYOUT, mode="strict")
    with pytest.raises(MemerError) as caught:
        build(source, tmp_path / "out", settings=strict, num_workers=num_workers)
    text = str(caught.value)
    assert "episode 3: unlabelled; episode 4: unlabelled; mode=lenient" in text
    assert "2 episodes" in text
    assert list(tmp_path.iterdir()) == []


def test_strict_names_gaps_and_lenient_keeps_them_unlabelled(tmp_path: Path) -> None:
    source = SyntheticSource({0: 9, 1: 9}, gaps=(1,))
    with pytest.raises(MemerError, match="episode 1: 3 of 9 frames unlabelled"):
        build(source, tmp_path / "out", settings=BuildSettings(cameras=LAYOUT, mode="strict"))
    build(source.fresh(), tmp_path / "out")
    assert (
        ShardSet(tmp_path / "out").episode(1).labels() == ["subtask 0"] * 3 + [None] * 3 + ["subtask 2"] * 3
    )


def test_lenient_counts_what_it_leaves_out(tmp_path: Path) -> None:
    source = SyntheticSource({0: 9, 1: 9, 2: 9}, unlabelled=(1,), short={2: 6})
    manifest = build(source, tmp_path / "out")
    assert manifest["num_episodes"] == 1
    skipped: dict[str, str] = manifest["skipped"]  # type: ignore[assignment]
    assert skipped["1"] == "unlabelled"
    assert "camera wrist ends after 6 of 9 frames" in skipped["2"]


def test_a_set_without_any_label_fails_in_lenient_mode_too(tmp_path: Path) -> None:
    with pytest.raises(MemerError, match="no usable episode"):
        build(SyntheticSource({0: 9, 1: 9}, unlabelled=(0, 1)), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"episodes": [2, 9]}, r"episodes: 9 not present in synthetic; present: 0, 2, 5"),
        ({"episodes": []}, "empty list"),
        ({"settings": BuildSettings(cameras=LAYOUT.__class__(camera_keys=("top",)))}, "'top' is no camera"),
    ],
)
def test_what_does_not_exist_is_a_usage_error(
    tmp_path: Path, kwargs: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        build(SyntheticSource(LENGTHS), tmp_path / "out", **kwargs)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_source_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MemerError, match="no episode present"):
        build(SyntheticSource({}), tmp_path / "out")


def test_foreign_files_are_never_touched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("precious")
    with pytest.raises(UsageError, match="not empty"):
        build(SyntheticSource({0: 9}), tmp_path / "out")
    with pytest.raises(UsageError, match="is a file"):
        build(SyntheticSource({0: 9}), tmp_path / "out" / "thesis.txt")
    assert (tmp_path / "out" / "thesis.txt").read_text() == "precious"


def test_an_empty_directory_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    build(SyntheticSource({0: 9}), tmp_path / "out")
    assert ShardSet(tmp_path / "out").episode_indices() == [0]


def test_two_builds_of_one_directory_do_not_mix(tmp_path: Path) -> None:
    with locked(tmp_path / "out.partial"), pytest.raises(UsageError, match="another build"):
        build(SyntheticSource({0: 9}), tmp_path / "out")


def test_values_that_are_no_numbers_name_field_and_frame(tmp_path: Path) -> None:
    source = SyntheticSource({0: 9}, shift=float("nan"))
    with pytest.raises(MemerError, match="state at frame 0 is nan"):
        build(source, tmp_path / "out", settings=BuildSettings(cameras=LAYOUT, mode="strict"))


def test_manifest_and_contract_say_what_was_made(tmp_path: Path) -> None:
    manifest = build(SyntheticSource({0: 9, 1: 12}), tmp_path / "out", labels="file")
    written = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert written == manifest
    assert (written["labels"], written["num_images"], written["source_report"]) == (
        "file",
        42,
        {"episodes": 2},
    )
    contract = ShardSet(tmp_path / "out").contract
    assert (contract.fps, contract.cameras) == (10.0, LAYOUT)
    states = np.concatenate([SyntheticSource({0: 9, 1: 12}).episode(k).state for k in (0, 1)])
    assert contract.statistics["state"]["std"] == pytest.approx(states.astype(np.float64).std(axis=0))
