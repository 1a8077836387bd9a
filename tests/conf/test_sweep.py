"""A sweep from outside: folders, failures, continuation, refusals."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conf.grid import plan_sweep
from conf.sweep import describe_failure, first_difference
from memer.errors import UsageError
from tests.conf.test_launch import REPO, ROOT, run_root

FAKE_CONF = ROOT.parent / "conf"


def status(folder: Path) -> str:
    return str(json.loads((folder / "status.json").read_text())["status"])


def test_failing_and_killed_jobs_harm_nobody_and_a_second_start_continues(tmp_path: Path) -> None:
    done = run_root(tmp_path, "-m", "sweep=four")
    sweep = tmp_path / "runs/four"
    assert done.returncode == 1
    assert [status(sweep / name) for name in ("ok", "bug", "fine")] == ["ok", "failed", "ok"]
    assert status(sweep / "killed") == "running"  # it could not say more
    # At once: the failure is told before the next job is; at the end: a table with all four.
    told = done.stderr.splitlines()
    bug_line = next(k for k, line in enumerate(told) if "bug: failed" in line)
    fine_line = next(k for k, line in enumerate(told) if "fine: ok" in line)
    assert bug_line < fine_line
    assert "ValueError: boom in the middle" in told[bug_line]
    assert "runs/four/bug/job.log" in told[bug_line]
    table = done.stdout.splitlines()
    assert [line.split()[0] for line in table] == ["job", "ok", "bug", "fine", "killed"]
    assert "SIGKILL" in table[4]
    assert "memory" in table[4]
    assert "Traceback" in (sweep / "bug/job.log").read_text()

    configs = [json.loads((sweep / name / "job.json").read_text())["config"] for name in ("ok", "fine")]
    assert [c["group"] for c in configs] == ["four", "four"]
    assert [c["trainer"]["max_steps"] for c in configs] == [7, 7]

    (tmp_path / "marks/heal").touch()
    again = run_root(tmp_path, "-m", "sweep=four")
    assert again.returncode == 1
    started = (tmp_path / "marks/runs.txt").read_text().split()
    assert started == ["ok", "bug", "fine", "killed", "bug", "killed"]
    assert status(sweep / "killed") == "ok"
    states = {
        name: job["state"] for name, job in json.loads((sweep / "sweep.json").read_text())["jobs"].items()
    }
    assert states == {"ok": "done before", "bug": "failed", "fine": "done before", "killed": "ok"}


def test_jobs_take_over_what_the_sweep_shares(tmp_path: Path) -> None:
    assert run_root(tmp_path, "-m", "sweep=shared").returncode == 1
    found = {
        p.parent.parent.name: p.read_text() for p in tmp_path.glob("runs/shared/*/checkpoints/last.ckpt")
    }
    # A failed job gives nothing on; the first finished one serves all after it.
    assert found == {
        "bug": "trained by bug",
        "ok": "trained by ok",
        "fine": "trained by ok",
        "five": "trained by ok",
    }
    # Begun with its own: it keeps that.
    run_root(tmp_path, "-m", "sweep=shared")
    assert (tmp_path / "runs/shared/bug/checkpoints/last.ckpt").read_text() == "trained by bug"


def test_comma_lists_make_a_grid_and_all_done_is_code_0(tmp_path: Path) -> None:
    done = run_root(tmp_path, "-m", "model.num_layers=1,2", "outcome=ok,fine")
    assert done.returncode == 0, done.stderr
    (sweep,) = (tmp_path / "runs").iterdir()
    assert sweep.name.startswith("num_layers-outcome-")
    names = {p.name for p in sweep.iterdir() if p.is_dir()}
    assert names == {"num_layers1-ok", "num_layers1-fine", "num_layers2-ok", "num_layers2-fine"}
    assert run_root(tmp_path, "-m", "model.num_layers=1,2", "outcome=ok,fine").returncode == 0
    assert len((tmp_path / "marks/runs.txt").read_text().split()) == 4


def test_other_settings_never_pass_for_done(tmp_path: Path) -> None:
    assert run_root(tmp_path, "-m", "outcome=ok", "name=mine", "model.num_layers=1,2").returncode == 0
    other = run_root(tmp_path, "-m", "outcome=ok", "name=mine", "model.num_layers=1,2", "model.sizes=[9]")
    assert other.returncode == 2
    assert "model.sizes: [1, 2] against [9] now" in other.stderr
    assert "name=NAME" in other.stderr


def test_an_unfinished_job_of_other_settings_is_set_aside(tmp_path: Path) -> None:
    run_root(tmp_path, "-m", "outcome=bug", "name=mine", "model.num_layers=1,2")
    other = run_root(tmp_path, "-m", "outcome=ok", "name=mine", "model.num_layers=1,2")
    assert other.returncode == 0, other.stderr
    assert status(tmp_path / "runs/mine/num_layers1") == "ok"
    assert status(tmp_path / "runs/mine/num_layers1.old1") == "failed"


def test_a_stopped_sweep_stops_its_job_and_continues(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT), "-m", "name=mine", "outcome=fine,slow,ok"]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    for _ in range(300):
        if (tmp_path / "marks/started").exists():
            break
        time.sleep(0.1)
    # A second sweep meanwhile leaves the running job alone and takes what is free.
    other = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert other.returncode == 1
    assert re.search(r"slow +busy", other.stdout)
    assert status(tmp_path / "runs/mine/ok") == "ok"
    process.send_signal(signal.SIGTERM)
    table = process.communicate(timeout=30)[0]
    assert process.returncode == 130
    assert re.search(r"slow +stopped", table)
    assert re.search(r"ok +not started", table)
    (tmp_path / "marks/heal").touch()
    last = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert last.returncode == 0, last.stderr
    assert (tmp_path / "marks/runs.txt").read_text().split() == ["fine", "slow", "ok", "slow"]


@pytest.mark.parametrize("devices", ["2", "[0,1]", "'0,1'"])
def test_more_than_one_device_is_refused(devices: str) -> None:
    with pytest.raises(UsageError, match=r"(?s)more than one device.*torchrun or SLURM.*without -m"):
        plan_sweep(["outcome=ok,fine", f"trainer.devices={devices}"], config_name="train", conf_dir=FAKE_CONF)


def test_more_than_one_node_is_refused() -> None:
    with pytest.raises(UsageError, match="num_nodes=2"):
        plan_sweep(["outcome=ok,fine", "+trainer.num_nodes=2"], config_name="train", conf_dir=FAKE_CONF)


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["sweep=fuor"], "did you mean 'four'"),
        (["outcome=ok"], "nothing to sweep"),
        (["outcome=ok,fine", "trainer.max_step=2"], "'trainer.max_steps'"),
        (["outcome=ok,fine", "model=big"], "model.path is missing"),
    ],
)
def test_a_bad_sweep_is_refused_before_any_job(overrides: list[str], part: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan_sweep(overrides, config_name="train", conf_dir=FAKE_CONF)
    assert part in str(caught.value)


def test_the_command_line_wins_over_the_sweep_file() -> None:
    sweep = plan_sweep(
        ["sweep=four", "outcome=fine", "trainer.max_steps=1", "model.num_layers=1,2"],
        config_name="train",
        conf_dir=FAKE_CONF,
    )
    assert [job.name for job in sweep.jobs] == ["num_layers1", "num_layers2"]
    assert {job.config["outcome"] for job in sweep.jobs} == {"fine"}
    assert {job.config["trainer"]["max_steps"] for job in sweep.jobs} == {1}


@pytest.mark.parametrize(
    ("code", "log", "expected"),
    [
        (-9, "anything", "SIGKILL"),
        (-15, "", "SIGTERM"),
        (
            1,
            "Traceback\n  x\ntorch.OutOfMemoryError: CUDA out of memory\nwandb: bye",
            "torch.OutOfMemoryError",
        ),
        (3, "step 1\rstep 2\nerror: no file", "error: no file"),
        (7, "only words\n\n", "only words"),
        (7, "", "no output"),
    ],
)
def test_the_reason_is_the_errors_last_line(code: int, log: str, expected: str) -> None:
    assert expected in describe_failure(code, log)


def test_the_first_difference_names_key_and_values() -> None:
    assert first_difference({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}) == "a.c: 2 against 3 now"
    assert first_difference({"a": 1}, {"a": 1, "n": 2}) == "n: None against 2 now"
    assert first_difference({"a": [1]}, {"a": [1]}) == ""
