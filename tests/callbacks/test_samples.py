"""Sample prompts as files: what the model is asked, with its pictures, and what it says."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from callbacks.samples import SampleLog, contact_strip, sample_record
from memer.errors import UsageError
from memer.prompts import answer_text
from tests.callbacks.small_fit import CONTRACT, OneWeight, fit, make_sample


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
