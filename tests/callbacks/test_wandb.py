"""W&B offline: one run per job with its own end, everything in local files as well."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memer.errors import SourceUnavailableError, UsageError

REPO = Path(__file__).parents[2]
ROOT = REPO / "tests/callbacks/wandb_root.py"

pytest.importorskip("wandb", reason="the optional package wandb is not installed")


def run_root(folder: Path, *arguments: str, code: int = 0) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPO), "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = subprocess.run(
        [sys.executable, str(ROOT), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == code, done.stdout + done.stderr


def records(run: Path) -> list[Any]:
    """Records of an offline run file: LevelDB's log form, 7 bytes of header, then blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    (path,) = run.glob("*.wandb")
    content, at, block, whole = path.read_bytes(), 7, 32768, b""
    found = []
    while at + 7 <= len(content):
        if block - at % block < 7:  # no room for a piece's header: padding
            at += block - at % block
            continue
        size, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole record, or its last piece
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            found.append(record)
            whole = b""
    return found


def name(item: Any) -> str:
    """Key of an entry; of a table or picture the first part."""
    return str(item.key or item.nested_key[0])


def offline_runs(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*"))


@pytest.mark.slow
def test_three_jobs_are_three_runs_of_one_group_and_the_middle_one_failed(tmp_path: Path) -> None:
    run_root(tmp_path, "-m", "fail_at=-1,2,99", "name=sweep", code=1)
    told = {}
    for job in ("fail_at-1", "fail_at2", "fail_at99"):
        folder = tmp_path / "runs/sweep" / job
        (run,) = offline_runs(folder)
        found = records(run)
        (first,) = [r.run for r in found if r.HasField("run")][:1]
        (end,) = [r.exit.exit_code for r in found if r.HasField("exit")]
        told[job] = (first.run_group, first.display_name, end)
        assert (folder / "metrics.csv").exists()
        config = {u.key: json.loads(u.value_json) for u in first.config.update}
        assert config["optim.lr"] == 0.1  # flat
    assert told == {
        "fail_at-1": ("sweep", "fail_at=-1", 0),
        "fail_at2": ("sweep", "fail_at=2", 1),
        "fail_at99": ("sweep", "fail_at=99", 0),
    }
    logged = {name(h) for r in records(run) if r.HasField("history") for h in r.history.item}
    assert {"train/loss", "trainer/global_step", "samples", "merge"} <= logged
    summary = json.loads((folder / "summary.json").read_text())["metrics"]
    kept: dict[str, Any] = {}
    for record in records(run):
        if record.HasField("summary"):
            kept |= {name(u): json.loads(u.value_json) for u in record.summary.update}
    assert {figure: kept.get(figure) for figure in summary} == pytest.approx(summary)
    artifacts = {r.artifact.type: r.artifact for r in records(run) if r.HasField("artifact")}
    assert [entry.path for entry in artifacts["model"].manifest.contents] == ["config.json"]


def test_a_resumed_run_gets_its_own_id_and_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logged to step 52, resumed from 40: the second part is a run of its own and starts where it likes."""
    import wandb

    from callbacks.wandb_runs import wandb_logger

    monkeypatch.setenv("WANDB_SILENT", "true")
    for steps in (range(50, 53), range(40, 43)):
        logger = wandb_logger(run_dir=tmp_path, mode="offline", group="sweep")
        for step in steps:
            logger.log_metrics({"loss": float(step)}, step=step)
        wandb.finish()
    wandb.teardown()  # ends the process that writes the files: on a busy machine finish() is ahead of it
    first, second = json.loads((tmp_path / "wandb_runs.json").read_text())["ids"]
    links, losses = {}, {}
    for run in offline_runs(tmp_path):
        found = records(run)
        header = next(r.run for r in found if r.HasField("run"))
        config = {u.key: json.loads(u.value_json) for u in header.config.update}
        links[header.run_id] = config["resumed_from"]
        items = [h for r in found if r.HasField("history") for h in r.history.item if name(h) == "loss"]
        losses[header.run_id] = [json.loads(item.value_json) for item in items]
    assert links == {first: None, second: first}
    assert losses == {first: [50, 51, 52], second: [40, 41, 42]}


def test_without_the_package_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from callbacks.wandb_runs import wandb_logger

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"pip install 'memer\[wandb\]'"):
        wandb_logger(run_dir=tmp_path)


def test_a_run_that_cannot_start_is_an_unavailable_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    from callbacks.wandb_runs import wandb_logger

    def refuse(**settings: Any) -> None:
        raise wandb.errors.AuthenticationError("no key")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(SourceUnavailableError, match=r"no key.*WANDB_MODE=offline"):
        wandb_logger(run_dir=tmp_path)
    assert not (tmp_path / "wandb_runs.json").exists()
