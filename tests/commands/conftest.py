"""Commands as a user types them: subprocesses in an empty folder, with this checkout's code."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

Command = Callable[..., subprocess.CompletedProcess[str]]


def command_environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "offline",
        "HF_HUB_OFFLINE": "1",
    }


def command_line(*words: str) -> list[str]:
    """`train.py a=b` or `-m data.build a=b` as a process of this interpreter."""
    first, *rest = words
    program = [first, rest.pop(0)] if first == "-m" else [str(ROOT / first)]
    return [sys.executable, *program, *rest]


def run_in(folder: Path, *words: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command_line(*words),
        cwd=folder,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def check(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert result.returncode == 0, f"{result.args}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result


def kill_after_a_checkpoint(words: list[str], folder: Path, *, cwd: Path) -> None:
    """Start a training and end it, as a power cut would, once its run `folder` holds a checkpoint."""
    process = subprocess.Popen(
        command_line(*words),
        cwd=cwd,
        env=command_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 180
    while not list(folder.glob("checkpoints/step_*.ckpt")):
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()


SLOT = ["cameras.view_width=32", "cameras.view_height=32"]
RULES = str(ROOT / "conf" / "rules" / "object_search.json")
#: The demo's training, short.
SHORT = [
    "experiment=memer_tabletop",
    f"view.rules={RULES}",
    "scorer=none",
    "data.batch_size=4",
    "trainer.limit_val_batches=1",
    "callbacks.samples.count=1",
]


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six training and two validation demonstrations of object search."""
    folder = tmp_path_factory.mktemp("tabletop")
    for split, count in (("train", 6), ("val", 2)):
        check(
            run_in(
                folder,
                "-m",
                "data.build",
                "source=tabletop",
                "source.task=object_search",
                f"source.split={split}",
                f"source.num_episodes={count}",
                "cameras.camera_keys=[base,wrist]",
                *SLOT,
                f"out={split}",
                "num_workers=0",
            )
        )
    return folder
