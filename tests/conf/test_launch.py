"""What a user meets when a command starts or ends, seen from outside."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conf.launch import hydra_root
from conf.suggest import close_names
from tests.conf.fake import root

REPO = Path(__file__).parents[2]
ROOT = REPO / "tests/conf/fake/root.py"


def run_root(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPO), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def only_run(folder: Path) -> Path:
    (found,) = (folder / "runs/fake").iterdir()
    return found


def test_a_run_works_in_its_folder_and_leaves_a_record(tmp_path: Path) -> None:
    done = run_root(tmp_path, "trainer.max_steps=5")
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    cfg = json.loads(done.stdout.splitlines()[0])
    assert cfg["run_dir"] == str(run)
    assert cfg["trainer"]["max_steps"] == 5
    assert cfg["model"]["sizes"] == [1, 2]
    status = json.loads((run / "status.json").read_text())
    assert (status["status"], status["exit_code"]) == ("ok", 0)
    resolved = json.loads((run / ".hydra/resolved.json").read_text())
    assert resolved["run_id"] == run.name
    assert "git_revision" in json.loads((run / ".hydra/environment.json").read_text())
    assert "trainer.max_steps=5" in (run / ".hydra/overrides.yaml").read_text()


@pytest.mark.parametrize(
    ("outcome", "code", "line"),
    [
        ("content", 1, "error: episode 3: no label"),
        ("source", 3, "error: no such folder"),
        ("interrupt", 130, "interrupted"),
        ("five", 5, ""),
    ],
)
def test_user_errors_are_one_line_with_their_code(tmp_path: Path, outcome: str, code: int, line: str) -> None:
    done = run_root(tmp_path, f"outcome={outcome}")
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert [text for text in done.stderr.splitlines() if not text.startswith("run folder")] == (
        [line] if line else []
    )
    status = json.loads((only_run(tmp_path) / "status.json").read_text())
    assert status["status"] == ("interrupted" if code == 130 else "failed")
    assert status["error"] == line


def test_a_bug_keeps_its_traceback(tmp_path: Path) -> None:
    done = run_root(tmp_path, "outcome=bug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "root.py" in done.stderr
    status = json.loads((only_run(tmp_path) / "status.json").read_text())
    assert status["error"] == "ValueError: boom in the middle"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["trainer.max_step=4"], ["trainer.max_step'", "'trainer.max_steps'"]),
        (["max_steps=4"], ["max_steps'", "'trainer.max_steps'"]),
        (["model=bigg"], ["model=bigg", "'big'", "small"]),
        (["modle=big"], ["modle", "'model'"]),
        (["model=big"], ["model.path is missing", "model.path=VALUE"]),
        (["outcome=${nothing}"], ["outcome", "nothing"]),
        (["model.sizes=["], ["["]),
        (["outcome=ok,bug"], ["outcome=ok,bug", "--multirun"]),
        (["+net._target_=os.system"], ["net", "os.system", "not allowed"]),
        (["sweep=four"], ["-m sweep=four"]),
    ],
)
def test_a_mistyped_command_is_refused_and_leaves_nothing(
    tmp_path: Path, arguments: list[str], parts: list[str]
) -> None:
    done = run_root(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    for part in parts:
        assert part in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_whole_error_is_there_on_demand(tmp_path: Path) -> None:
    done = run_root(tmp_path, "outcome=content", HYDRA_FULL_ERROR="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_the_config_can_be_printed_without_running(tmp_path: Path) -> None:
    done = run_root(tmp_path, "--cfg", "job", "model=big")
    assert done.returncode == 0
    assert "num_layers: 4" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_write_no_status(tmp_path: Path) -> None:
    done = run_root(tmp_path, "run_id=shared", RANK="1")
    assert done.returncode == 0
    assert not (tmp_path / "runs/fake/shared/status.json").exists()


def test_a_root_called_with_a_dict_is_the_plain_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert root.main({"outcome": "five", "run_dir": str(tmp_path)}) == 5
    assert not (tmp_path / "runs").exists()


def test_a_root_without_run_folder_writes_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[dict[str, object]] = []

    @hydra_root("train", run_dir=False, conf_dir=ROOT.parent / "conf")
    def main(cfg: dict[str, object]) -> None:
        seen.append(cfg)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["root.py", "outcome=fine"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    assert seen[0]["outcome"] == "fine"
    assert "run_dir" not in seen[0]
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(sys, "argv", ["root.py", "-m", "outcome=a,b"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "cannot be swept" in capsys.readouterr().err


def test_close_names_prefer_the_whole_key_over_its_last_part() -> None:
    known = ["trainer.max_steps", "optim.max_steps", "trainer.max_epochs"]
    assert close_names("trainer.max_step", known)[0] == "trainer.max_steps"
