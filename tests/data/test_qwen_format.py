import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data.lerobot import LeRobotReader
from data.qwen_format import export_qwen
from data.qwen_import import PublicSet
from data.views.planner import PlannerViewConfig
from memer.cameras import prepare_frame
from memer.contract import DEFAULT_SYSTEM_TEXT, CameraLayout
from memer.errors import MemerError, SourceUnavailableError, UsageError
from tests.data.synthetic import CAMERAS, LAYOUT, SyntheticSource, identities
from tests.fixtures.paint import paint_picture

SHARED = Path(__file__).parents[3] / "shared"
GOLDEN = SHARED / "golden" / "memer_export_cr5_v3.jsonl"
LENGTHS = {0: 90, 4: 40}


def view(**choices: Any) -> PlannerViewConfig:
    values: dict[str, Any] = {
        "contract": {},
        "rules": "all_last",
        "sample_stride": 1,
        "transition_weight": 1.0,
        "transition_before": 4,
        "transition_after": 4,
        "answer_weight": 1.0,
        "augmentation": None,
    }
    return PlannerViewConfig(**{**values, **choices})


def export(source: SyntheticSource, out: Path, **choices: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {"cameras": LAYOUT, "view": view(), "progress": False}
    return export_qwen(source, out=out, **{**arguments, **choices})


def records(out: Path) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads((out / "train.json").read_text(encoding="utf-8"))
    return loaded


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.skipif(not GOLDEN.exists(), reason="golden records absent: ../shared/golden")
def test_agrees_with_the_public_exporter_record_by_record(tmp_path: Path) -> None:
    layout = CameraLayout(camera_keys=("observation.images.wrist",), view_width=64, view_height=36)
    source = LeRobotReader(SHARED / "data" / "cr5_banana_v3", camera_keys=layout.camera_keys)
    export_qwen(source, out=tmp_path / "out", cameras=layout, view=view(), progress=False)
    ours = [
        {
            "episode": record["metadata"]["episode_index"],
            "t": record["metadata"]["timestep"],
            "memory": record["metadata"]["memory_indices"],
            "context": record["metadata"]["context_indices"],
            "subtask": record["metadata"]["answer"]["current_subtask"],
            "positions": record["metadata"]["answer"]["keyframe_positions"],
        }
        for record in records(tmp_path / "out")
    ]
    assert ours == [json.loads(line) for line in GOLDEN.read_text().splitlines()]


def test_the_form_of_a_record(tmp_path: Path) -> None:
    export(SyntheticSource(LENGTHS), tmp_path / "out", repo_id="me/tidy")
    record = next(r for r in records(tmp_path / "out") if r["id"] == "episode_000000_t000077")
    shown = [27, 42, 47, 52, 57, 62, 67, 72, 77]
    assert record["image"] == [f"media/episode_000000/frame_{k:06d}.jpg" for k in shown]
    system, human, gpt = record["conversations"]
    assert (system["from"], human["from"], gpt["from"]) == ("system", "human", "gpt")
    assert system["value"] == DEFAULT_SYSTEM_TEXT
    lines = human["value"].split("\n")
    assert lines[0] == "Task: tidy up again"
    assert [k for k, line in enumerate(lines) if line == "<image>"] == [2, *range(4, 12)]
    assert len(lines) == 12
    assert gpt["value"] == '{"current_subtask": "subtask 2", "keyframe_positions": [4]}'
    assert record["metadata"] == {
        "repo_id": "me/tidy",
        "episode_index": 0,
        "timestep": 77,
        "camera_keys": list(CAMERAS),
        "memory_indices": [27],
        "context_indices": shown[1:],
        "system_prompt": DEFAULT_SYSTEM_TEXT,
        "instruction": "tidy up again",
        "answer": {"current_subtask": "subtask 2", "keyframe_positions": [4]},
    }


def test_pictures_are_the_stack_coded_once(tmp_path: Path) -> None:
    export(SyntheticSource(LENGTHS), tmp_path / "out")
    path = tmp_path / "out" / "media" / "episode_000004" / "frame_000033.jpg"
    with Image.open(path) as image:
        assert image.format == "JPEG"
        picture = np.array(image)
    assert identities(picture) == [(4, 33, 0), (4, 33, 1)]
    views = {key: paint_picture(4, 33, camera) for camera, key in enumerate(CAMERAS)}
    raw = prepare_frame(views, replace(LAYOUT, jpeg_round_trip=False))
    buffer = BytesIO()
    Image.fromarray(raw).save(buffer, format="JPEG", quality=90)
    assert path.read_bytes() == buffer.getvalue()


def test_only_shown_frames_are_decoded_and_written(tmp_path: Path) -> None:
    source = SyntheticSource(LENGTHS)
    manifest = export(source, tmp_path / "out", view=view(sample_stride=30))
    shown = {path for record in records(tmp_path / "out") for path in record["image"]}
    written = {
        str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out" / "media").rglob("*") if p.is_file()
    }
    assert written == shown
    assert len(records(tmp_path / "out")) == manifest["num_records"] == 3 + 2
    for (_, camera), frames in source.frames.items():
        assert camera in CAMERAS
        assert frames.asked == sorted(set(frames.asked))
    asked = sum(len(frames.asked) for (_, camera), frames in source.frames.items() if camera == "base")
    assert asked == len(shown)


def test_folded_system_text_leaves_no_system_turn(tmp_path: Path) -> None:
    folded = view(contract={"prompt": {"fold_system": True}})
    export(SyntheticSource(LENGTHS), tmp_path / "out", view=folded)
    for record in records(tmp_path / "out"):
        human, gpt = record["conversations"]
        assert (human["from"], gpt["from"]) == ("human", "gpt")
        assert human["value"].startswith(DEFAULT_SYSTEM_TEXT + "\n\nTask: ")


def test_the_output_does_not_depend_on_processes_or_interruptions(tmp_path: Path) -> None:
    export(SyntheticSource(LENGTHS), tmp_path / "whole")
    export(SyntheticSource(LENGTHS), tmp_path / "pair", num_workers=2)
    with pytest.raises(KeyboardInterrupt):
        export(SyntheticSource(LENGTHS, stop_at=4), tmp_path / "stopped")
    assert not (tmp_path / "stopped").exists()
    export(SyntheticSource(LENGTHS), tmp_path / "stopped")
    assert contents(tmp_path / "pair") == contents(tmp_path / "whole")
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


def test_new_records_reuse_the_pictures(tmp_path: Path) -> None:
    export(SyntheticSource(LENGTHS), tmp_path / "out", view=view(sample_stride=20))
    again = SyntheticSource(LENGTHS)
    manifest = export(again, tmp_path / "out", view=view(sample_stride=10))
    fresh = export(SyntheticSource(LENGTHS), tmp_path / "fresh", view=view(sample_stride=10))
    assert 0 < manifest["num_decoded"] < fresh["num_decoded"]
    ours, theirs = contents(tmp_path / "out"), contents(tmp_path / "fresh")
    assert ours.keys() == theirs.keys()
    assert all(ours[name] == theirs[name] for name in ours if name != "export.json")
    fewer = export(SyntheticSource(LENGTHS), tmp_path / "out", view=view(sample_stride=45))
    assert fewer["num_decoded"] == 0
    shown = {path for record in records(tmp_path / "out") for path in record["image"]}
    assert {name for name in contents(tmp_path / "out") if name.endswith(".jpg")} == shown


def test_pictures_of_another_layout_are_never_reused(tmp_path: Path) -> None:
    export(SyntheticSource({0: 9}), tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(UsageError, match=r"cameras\.view_width: 96 there, 48 asked"):
        export(SyntheticSource({0: 9}), tmp_path / "out", cameras=replace(LAYOUT, view_width=48))
    assert contents(tmp_path / "out") == before


def test_faults_leave_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(MemerError, match="episode 1: unlabelled"):
        export(SyntheticSource({0: 9, 1: 9}, unlabelled=(1,)), tmp_path / "out", mode="strict")
    with pytest.raises(MemerError, match="no record to write"):
        export(SyntheticSource({0: 9}, unlabelled=(0,)), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_our_export_is_read_back(tmp_path: Path) -> None:
    export(SyntheticSource(LENGTHS), tmp_path / "out")
    public = PublicSet(tmp_path / "out", name="tidy")
    assert len(public) == 130
    assert public.system_text() == DEFAULT_SYSTEM_TEXT
    sample = public.sample(77)
    assert (sample.sample_id, sample.step, sample.subtask) == ("episode_000000_t000077", 77, "subtask 2")
    assert sample.positions == (4,)
    assert [k for _, _, k in sample.question.memory_keys] == [27]
    assert sample.question.instruction == "tidy up again"
    for key, frame in sample.question.frames.items():
        assert key[0] == "tidy"
        assert identities(frame) == [(0, key[2], 0), (0, key[2], 1)]


def public_record(**changes: Any) -> dict[str, Any]:
    """A record as the public exporter writes it, without metadata."""
    record = {
        "id": "episode_000000_t000007",
        "image": [f"media/episode_000000/frame_{k:06d}.jpg" for k in (1, 2, 7)],
        "conversations": [
            {"from": "system", "value": 'say {"a": [1'},
            {"from": "human", "value": "Task: wipe\nBefore:\n<image>\nNow:\n<image>\n<image>"},
            {"from": "gpt", "value": '{"current_subtask": "wipe left", "keyframe_positions": [2]}'},
        ],
    }
    return {**record, **changes}


def test_foreign_files_without_metadata_are_read(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    path.write_text(json.dumps([public_record(), public_record(id="b")], indent=4))
    first, second = PublicSet(path)
    assert (first.num_memory, first.instruction, first.positions) == (1, "wipe", (2,))
    assert (first.episode_index, first.step, second.id) == (0, 7, "b")
    assert first.system == 'say {"a": [1'


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": ["media/episode_000000/frame_000001.jpg"]}, "record 0: 3 marks <image> for 1 pictures"),
        ({"image": []}, "record 0: image is"),
        ({"conversations": [{"from": "human", "value": "x"}]}, "record 0: roles"),
        ({"metadata": {"memory_indices": []}}, "0 memory_indices, 1 memory pictures"),
        (
            {
                "conversations": [
                    public_record()["conversations"][1],
                    {"from": "gpt", "value": '{"current_subtask": "x", "keyframe_positions": [3]}'},
                ]
            },
            r"positions \[3\] lie outside",
        ),
    ],
)
def test_broken_records_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "train.json").write_text(json.dumps([public_record(**changes)]))
    with pytest.raises(MemerError, match=message):
        list(PublicSet(tmp_path))


@pytest.mark.parametrize("text", ["", "[]", "{}", '[{"id": 1}', "[1]"])
def test_files_that_are_no_list_of_records(tmp_path: Path, text: str) -> None:
    (tmp_path / "train.json").write_text(text)
    with pytest.raises(MemerError, match=r"train\.json"):
        PublicSet(tmp_path)


def test_a_missing_file_or_picture_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailableError, match="cannot be read"):
        PublicSet(tmp_path)
    (tmp_path / "train.json").write_text(json.dumps([public_record()]))
    with pytest.raises(SourceUnavailableError, match=r"frame_000001\.jpg"):
        PublicSet(tmp_path).sample(0)
    outside = public_record(image=[f"../media/episode_0/frame_{k}.jpg" for k in range(3)])
    (tmp_path / "train.json").write_text(json.dumps([outside]))
    with pytest.raises(MemerError, match="outside the data set"):
        PublicSet(tmp_path).sample(0)
