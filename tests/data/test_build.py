import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose
from data.build import main
from data.qwen_import import PublicSet
from data.shards import ShardSet
from memer.errors import MemerError, SourceUnavailableError, UsageError
from tests.fixtures.paint import BASE, FIRST, SECOND, WRIST, PaintSet

REPOSITORY = Path(__file__).parents[2]
CR5 = REPOSITORY.parent / "shared" / "data" / "cr5_banana" / "lerobot_data"
SLOTS = [f"cameras.camera_keys=[{BASE},{WRIST}]", "cameras.view_width=96", "cameras.view_height=54"]


@pytest.fixture(scope="module")
def paint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("paint") / "set"
    PaintSet(lengths=(31, 23, 40), cameras=(BASE, WRIST)).build(root)
    return root


def run(*overrides: str) -> None:
    main(compose("build", ["num_workers=0", "progress=false", *overrides]))


def lerobot(paint: Path, out: Path, *overrides: str) -> None:
    run("source=lerobot", f"source.root={paint}", f"out={out}", *SLOTS, *overrides)


def test_a_lerobot_set_becomes_shards_with_its_keyframe_report(
    paint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps([{"exact": FIRST, "select": "last"}, {"pattern": "never", "select": "last"}]))
    lerobot(paint, tmp_path / "out", f"view.rules={rules}")
    shards = ShardSet(tmp_path / "out")
    assert [shards.num_frames(k) for k in shards.episode_indices()] == [31, 23, 40]
    assert [s.label for s in shards.segments(1)] == [FIRST, SECOND]
    printed = capsys.readouterr().out
    assert "3 episodes, 94 frames (0 unlabelled), 188 images" in printed
    row = next(line for line in printed.splitlines() if line.startswith(FIRST))
    assert row.removeprefix(FIRST).split()[:3] == ["3", "3", "rules[0]"]
    assert "no rule, default none" in printed
    assert "rules that matched nothing: rules[1]" in printed


def test_episodes_can_be_chosen(paint: Path, tmp_path: Path) -> None:
    lerobot(paint, tmp_path / "out", "episodes=[2]")
    assert ShardSet(tmp_path / "out").episode_indices() == [2]


def test_the_tabletop_becomes_shards(tmp_path: Path) -> None:
    run(
        "source=tabletop",
        "source.task=object_search",
        "source.num_episodes=1",
        f"out={tmp_path / 'out'}",
        "cameras.camera_keys=[base,wrist]",
        "cameras.view_width=64",
        "cameras.view_height=64",
    )
    shards = ShardSet(tmp_path / "out")
    assert shards.fps == 15.0
    assert None not in shards.episode(0).labels()


def test_labels_from_a_file(paint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = tmp_path / "labels.json"
    rows = [{"episode": episode, "start": 2, "end": 9, "label": "wipe"} for episode in (1, 8)]
    labels.write_text(json.dumps(rows))
    lerobot(paint, tmp_path / "out", "labels=file", f"labels.path={labels}")
    assert "warning: labels name 1 episodes that set lacks, first 8" in capsys.readouterr().out
    manifest = ShardSet(tmp_path / "out").manifest
    assert (manifest["labels"], manifest["num_episodes"], manifest["num_labelled_frames"]) == ("file", 1, 7)
    assert manifest["skipped"] == {"0": "unlabelled", "2": "unlabelled"}
    with pytest.raises(MemerError, match="episode 0: unlabelled; episode 1: 16 of 23 frames unlabelled"):
        lerobot(paint, tmp_path / "strict", "labels=file", f"labels.path={labels}", "mode=strict")
    assert not (tmp_path / "strict").exists()


def test_the_public_form(paint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lerobot(paint, tmp_path / "out", "format=qwen", "view.rules=all_last", "view.sample_stride=2")
    assert len(PublicSet(tmp_path / "out")) == 16 + 12 + 20
    printed = capsys.readouterr().out
    pictures = len(list((tmp_path / "out" / "media").rglob("*.jpg")))
    assert f"48 records, {pictures} pictures" in printed
    assert f"labels: {SECOND}: 48" in printed  # the target lies 10 frames ahead, the boundary is at 9


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["source.root=/nowhere"], SourceUnavailableError, "/nowhere"),
        (["cameras.camera_keys=[top]"], UsageError, "no camera 'top'"),
        (["episodes=[7]"], UsageError, "episodes: 7 not present"),
        (["format=parquet"], UsageError, "format: 'parquet'"),
        (["format=qwen"], UsageError, r"view\.rules: missing"),
        (["view.rules=nowhere.json"], SourceUnavailableError, "nowhere.json"),
        (["labels=file", "labels.path=nowhere.csv"], SourceUnavailableError, "nowhere.csv"),
        (["cameras.jpeg_quality=99"], UsageError, "jpeg_quality: 99"),
        (["mode=careful"], UsageError, "careful"),
    ],
)
def test_mistakes_are_named_before_anything_is_written(
    paint: Path, tmp_path: Path, overrides: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        lerobot(paint, tmp_path / "out", *overrides)
    assert list(tmp_path.iterdir()) == []


def test_a_rule_with_a_typo_is_named_before_anything_is_written(paint: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.json"
    rules.write_text('[{"pattern": "a", "selct": "last"}]')
    with pytest.raises(MemerError, match=r"rules\[0\]: unknown key 'selct'"):
        lerobot(paint, tmp_path / "out", f"view.rules={rules}")
    assert [p.name for p in tmp_path.iterdir()] == ["rules.json"]


@pytest.mark.parametrize("missing", ["out", "source.root", "cameras.camera_keys", "source"])
def test_what_must_be_given_is_named(missing: str) -> None:
    given = ["source=lerobot", "source.root=R", "out=O", *SLOTS]
    overrides = [o for o in given if not o.startswith(missing + "=")]
    if missing == "source":
        overrides.remove("source.root=R")
    with pytest.raises(UsageError, match=missing.split(".")[-1]):
        compose("build", overrides)


def test_a_video_that_is_too_short_is_named_or_left_out(paint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    PaintSet(lengths=(31, 23), cameras=(BASE, WRIST), version="v2.1").build(broken)
    video = next(broken.rglob(f"*{WRIST}/episode_000001.mp4"))
    other = tmp_path / "short"
    PaintSet(lengths=(31, 20), cameras=(BASE, WRIST), version="v2.1").build(other)
    shutil.copy(next(other.rglob(f"*{WRIST}/episode_000001.mp4")), video)
    shutil.rmtree(other)
    lerobot(broken, tmp_path / "lenient")
    assert ShardSet(tmp_path / "lenient").episode_indices() == [0]
    with pytest.raises(MemerError, match="episode 1"):
        lerobot(broken, tmp_path / "strict", "mode=strict")
    assert not (tmp_path / "strict").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not CR5.exists(), reason="real episodes absent: ../shared/data/cr5_banana")
def test_the_command_on_real_episodes(tmp_path: Path) -> None:
    def command(*overrides: str) -> Any:
        return subprocess.run(
            [sys.executable, "-m", "data.build", *overrides],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )

    given = [
        "source=lerobot",
        f"source.root={CR5}",
        "labels=gripper",
        "episodes=[28,70]",
        f"out={tmp_path / 'out'}",
        "num_workers=1",
        "cameras.camera_keys=[observation.images.top]",
        "cameras.view_width=64",
        "cameras.view_height=48",
    ]
    made = command(*given)
    assert made.returncode == 0, made.stderr
    shards = ShardSet(tmp_path / "out")
    assert [(s.start, s.end) for s in shards.segments(28)] == [(0, 76), (76, 135), (135, 176)]
    assert [(s.start, s.end) for s in shards.segments(70)] == [(0, 77), (77, 148), (148, 181)]
    assert "episode" in json.dumps(shards.manifest["source_report"])
    for overrides, code in (
        ([*given, "sample_stride=3"], 2),
        ([*given, "max_frames_per_part=7"], 2),
        ([o.replace(str(CR5), "/nowhere") for o in given], 3),
    ):
        failed = command(*overrides)
        assert failed.returncode == code
        assert failed.stderr.count("\n") == 1
        assert failed.stderr.startswith("error: ")
