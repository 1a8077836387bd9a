"""Sample prompts as files: what the model is asked, with its pictures, and what it says."""

import json
import logging
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
from PIL import Image

from callbacks.plan_samples import plan_record
from callbacks.samples import SampleLog, contact_strip, sample_record
from memer.errors import UsageError
from memer.prompts import answer_text
from tests.callbacks.small_fit import CONTRACT, OneWeight, fit, make_sample
from tests.models.plan_samples import SampleData, chunk, memories, memory, world_module
from tests.models.plan_samples import fit as fit_plans


def test_prompts_are_written_at_the_start_and_after_validation(tmp_path: Path) -> None:
    fit(tmp_path, callbacks=[SampleLog(count=2)])
    files = sorted(p.name for p in (tmp_path / "samples").glob("*.json"))
    assert files == ["step_00000000.json", "step_00000005.json", "step_00000010.json"]
    values = json.loads((tmp_path / "samples/step_00000005.json").read_text())
    first, second = values["samples"]
    assert first["sample_id"] == "set/episode_000003_t000000"
    assert first["text"].startswith(CONTRACT.prompt.system_text)
    assert first["text"].count("<image>") == len(first["images"]) == 3
    assert [i["caption"] for i in first["images"]] == [
        "memory 1: frame 0",
        "recent 1: frame 5",
        "recent 2: frame 10",
    ]
    assert (first["right"], second["right"]) == (True, False)
    assert (second["predicted"], second["parse_ok"]) == ("no idea", False)
    with Image.open(tmp_path / "samples" / second["images"][2]["file"]) as image:
        assert image.size == (16, 8)
        assert np.abs(np.asarray(image).astype(int) - 20).max() <= 2  # the frame with number 20


def test_every_second_validation_and_none(tmp_path: Path) -> None:
    fit(tmp_path / "a", callbacks=[SampleLog(count=1, every_n_validations=2)])
    assert len(list((tmp_path / "a/samples").glob("*.json"))) == 2
    fit(tmp_path / "b", callbacks=[SampleLog(count=0)])
    assert not (tmp_path / "b/samples").exists()
    with pytest.raises(UsageError, match="count: -1"):
        SampleLog(count=-1)


def test_a_model_that_cannot_be_asked_is_not(tmp_path: Path) -> None:
    record = sample_record(make_sample(0), CONTRACT, predicted=None, folder=tmp_path, stem="x")
    assert record["predicted"] is None
    assert "right" not in record


def test_wrong_positions_are_wrong_only_where_they_are_asked_for(tmp_path: Path) -> None:
    sample = make_sample(0)
    text = answer_text(sample.subtask, (1,), CONTRACT.prompt)
    record = sample_record(sample, CONTRACT, predicted=text, folder=tmp_path, stem="x")
    assert (record["parse_ok"], record["right"]) == (True, False)
    silent = CONTRACT.updated({"prompt": {"answer_positions": False}})
    assert sample_record(sample, silent, predicted=text, folder=tmp_path, stem="x")["right"] is True


def test_data_without_examples_train_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr("tests.callbacks.small_fit.Data.example_samples")
    with caplog.at_level(logging.WARNING):
        assert fit(tmp_path, callbacks=[SampleLog()], model=OneWeight()).global_step == 12
    assert "no sample prompts: Data" in caplog.text


def test_a_strip_holds_all_pictures(tmp_path: Path) -> None:
    paths = []
    for k, width in enumerate((4, 6)):
        paths.append(tmp_path / f"{k}.png")
        Image.new("RGB", (width, 5), (k * 200, 0, 0)).save(paths[-1])
    assert contact_strip(paths).size == (14, 5)


def test_plans_are_strips_of_real_and_drawn_frames(tmp_path: Path) -> None:
    module = world_module()
    fit_plans(module, memories(3), steps=1, callbacks=[], limit_val_batches=0)
    drawn = module.draw_plans([memory(4, segments=2)])[0]
    assert (drawn.shape, drawn.dtype) == ((8, 8, 8, 3), np.uint8)
    record = plan_record(memory(4, segments=2), drawn=drawn, folder=tmp_path, stem="step/0")
    assert record["sample_id"] == "made/episode_000004"
    assert record["text"].splitlines() == ["Task: press them all", "1. press button 0", "2. press button 1"]
    assert record["predicted"] is None
    captions = [image["caption"] for image in record["images"]]
    assert captions[1:] == ["real plan of the last segment", "plan that the model makes"]
    with Image.open(tmp_path / record["images"][2]["file"]) as image:
        pixels = np.asarray(image)
    assert pixels.shape == (64, 8 * 64 + 7 * 2, 3)  # tiny frames are magnified
    assert (pixels[::8, 66:130:8] == drawn[1]).all()


def test_an_executors_samples_show_plan_and_future(tmp_path: Path) -> None:
    record = plan_record(chunk(3), drawn=None, folder=tmp_path, stem="0")
    assert [image["caption"] for image in record["images"]] == ["plan", "present and future"]
    assert "Progress: 0.25" in record["text"]
    alone = plan_record(chunk(3, plan_frames=0), drawn=None, folder=tmp_path, stem="1")
    assert [image["caption"] for image in alone["images"]] == ["present and future"]


def test_a_world_models_run_leaves_strips(tmp_path: Path) -> None:
    module = world_module()
    data = SampleData(module.make_collator(), memories(3))
    data.contract = module.contract  # type: ignore[attr-defined]
    data.example_samples = lambda count: memories(count)  # type: ignore[attr-defined]
    pl.Trainer(
        accelerator="cpu",
        max_steps=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[SampleLog(count=2)],
    ).fit(module, data)
    values = json.loads((tmp_path / "samples/step_00000000.json").read_text())
    assert [len(record["images"]) for record in values["samples"]] == [3, 3]
