"""What a run leaves beside its results: status, versions, git state."""

import contextlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from memer.folders import write_json

STATUS_FILE = "status.json"


@contextlib.contextmanager
def keep_status(folder: Path) -> Iterator[Callable[[int, str], None]]:
    """Keep `status.json` of a run folder; the given function reports the end."""
    started = time.time()
    values: dict[str, Any] = {
        "status": "running",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "pid": os.getpid(),
    }

    def write() -> None:
        if is_rank_zero():
            write_json(folder / STATUS_FILE, values)

    def report(code: int, error: str) -> None:
        values["status"] = {0: "ok", 130: "interrupted"}.get(code, "failed")
        values.update(exit_code=code, error=error, seconds=round(time.time() - started, 3))

    write()
    try:
        yield report
    finally:
        write()


def is_rank_zero() -> bool:
    """Whether this process is the first of its job (torchrun, SLURM, Lightning's own children)."""
    ranks = (os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
    return next((rank for rank in ranks if rank is not None), "0") == "0"


def environment() -> dict[str, Any]:
    """Versions, platform and git state of this process."""
    versions = {}
    for package in (
        "torch",
        "lightning",
        "transformers",
        "peft",
        "hydra-core",
        "numpy",
        "pillow",
        "webdataset",
    ):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "git_revision": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def _git(*arguments: str) -> str | None:
    try:
        found = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
