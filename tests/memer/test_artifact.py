import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from memer.artifact import (
    DEFAULT_PLANNER,
    PREPROCESSOR_FILE,
    PROVENANCE_FILE,
    REQUIRED_FILES,
    Provenance,
    check_complete,
    load_policy,
    seal_artifact,
    verify_artifact,
)
from memer.contract import CameraLayout, Contract
from memer.errors import MemerError, SourceUnavailableError
from memer.merge import merge_weights

CONTRACT = Contract(fps=15.0, cameras=CameraLayout(camera_keys=("base",)), min_pixels=1024, max_pixels=9216)


def model_folder(folder: Path, *, fill: float = 0.0) -> Path:
    folder.mkdir()
    for name in REQUIRED_FILES:
        (folder / name).write_text(json.dumps({"name": name}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    old_bounds = {"size": {"shortest_edge": 1, "longest_edge": 2}, "max_pixels": 2, "patch_size": 16}
    (folder / PREPROCESSOR_FILE).write_text(json.dumps(old_bounds))
    save_file({"w": torch.full((3,), fill)}, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    folder = model_folder(tmp_path / "export")
    seal_artifact(folder, contract=CONTRACT, base_name="Qwen/tiny", base_hash="00ff", alpha=0.8, step=7)
    return folder


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_provenance_says_where_it_came_from(artifact: Path) -> None:
    found = verify_artifact(artifact)
    assert (found.planner, found.base_name, found.base_hash) == (DEFAULT_PLANNER, "Qwen/tiny", "00ff")
    assert (found.alpha, found.step) == (0.8, 7)
    assert found.versions["torch"] == torch.__version__
    assert found.files.keys() == {path.name for path in artifact.iterdir()} - {PROVENANCE_FILE}
    assert Contract.load(artifact) == CONTRACT


def test_both_places_of_the_pixel_bounds_are_written(artifact: Path) -> None:
    values = json.loads((artifact / PREPROCESSOR_FILE).read_text())
    bounds = {"shortest_edge": 1024, "longest_edge": 9216}
    assert values == {"size": bounds, "max_pixels": 9216, "patch_size": 16}


def test_a_processor_config_with_the_right_bounds_keeps_its_bytes(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "export")
    text = '{"size":{"longest_edge":9216,  "shortest_edge":1024}}\r\n'
    (folder / PREPROCESSOR_FILE).write_bytes(text.encode())
    seal_artifact(folder, contract=CONTRACT, base_name="b", base_hash="", alpha=1, step=0)
    assert (folder / PREPROCESSOR_FILE).read_bytes() == text.encode()


@pytest.mark.parametrize(
    "name", [*REQUIRED_FILES, "chat_template.jinja", "contract.json", "model.safetensors"]
)
def test_a_deleted_file_is_named(artifact: Path, name: str) -> None:
    (artifact / name).unlink()
    with pytest.raises(MemerError, match=name):
        load_policy(artifact)


def test_a_changed_file_is_named(artifact: Path) -> None:
    path = artifact / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(MemerError, match=r"model\.safetensors: changed"):
        load_policy(artifact)
    path.write_bytes(data[:-1])
    with pytest.raises(MemerError, match=r"model\.safetensors: \d+ bytes"):
        load_policy(artifact)


def test_wrong_paths_are_unavailable_sources(artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailableError, match="nowhere"):
        load_policy(tmp_path / "nowhere")
    (artifact / PROVENANCE_FILE).unlink()
    with pytest.raises(SourceUnavailableError, match=PROVENANCE_FILE):
        load_policy(artifact)


@pytest.mark.parametrize(
    "planner", ["os:system", "models:QwenVLPlanner", "modelsx.planner:A", "models.planner"]
)
def test_only_planners_of_the_models_folder_are_imported(artifact: Path, planner: str) -> None:
    rewrite(artifact / PROVENANCE_FILE, planner=planner)
    with pytest.raises(MemerError, match=rf"{planner}.*only classes below models"):
        load_policy(artifact)


@pytest.mark.parametrize("planner", ["models.nothing_here:A", "models.planner:NothingHere"])
def test_a_planner_that_is_not_there_is_named(artifact: Path, planner: str) -> None:
    rewrite(artifact / PROVENANCE_FILE, planner=planner)
    with pytest.raises(SourceUnavailableError, match=planner):
        load_policy(artifact)


def test_other_versions_and_fields_are_refused(artifact: Path) -> None:
    path = artifact / PROVENANCE_FILE
    for changes, message in (
        ({"format_version": 2}, "format_version 2"),
        ({"format_version": 1, "x": 1}, "'x'"),
    ):
        rewrite(path, **changes)
        with pytest.raises(MemerError, match=message):
            Provenance.load(artifact)
    path.write_text("{")
    with pytest.raises(MemerError, match="not JSON"):
        Provenance.load(artifact)


def test_an_incomplete_model_folder_cannot_be_sealed(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "export")
    (folder / "chat_template.jinja").unlink()
    (folder / "video_preprocessor_config.json").unlink()
    with pytest.raises(MemerError, match=r"video_preprocessor_config\.json, chat_template\.jinja missing"):
        seal_artifact(folder, contract=CONTRACT, base_name="b", base_hash="", alpha=1, step=0)
    (folder / "video_preprocessor_config.json").write_text("{}")
    rewrite(folder / "tokenizer_config.json", chat_template="{{ messages }}")  # the third place for it
    check_complete(folder)


def test_the_merge_of_an_artifact_is_an_artifact(artifact: Path, tmp_path: Path) -> None:
    base = model_folder(tmp_path / "base", fill=1.0)
    report = merge_weights(base, artifact, tmp_path / "merged", alpha=0.25)
    found = verify_artifact(tmp_path / "merged")
    assert (found.alpha, found.step, found.base_name) == (0.25, 7, "Qwen/tiny")
    assert found.base_hash == report.base_hash
    assert Contract.load(tmp_path / "merged") == CONTRACT
