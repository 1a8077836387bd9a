"""One JSON line per benchmark: what was measured, of which revision, with which sizes."""

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall times of equal runs, seconds."""

    median_s: float
    p95_s: float
    runs: int


def time_runs(fn: Callable[[], object], *, warmup: int, runs: int) -> Timing:
    """Run `fn` `warmup` times unmeasured, then `runs` times measured."""
    for _ in range(warmup):
        fn()
    seconds: list[float] = []
    for _ in range(runs):
        start = time.perf_counter()
        fn()
        seconds.append(time.perf_counter() - start)
    seconds.sort()
    p95 = seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))]
    return Timing(statistics.median(seconds), p95, runs)


def emit(name: str, **fields: Any) -> None:
    """Print one JSON line; revision and platform are added, floats rounded to six digits."""
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    line = {"bench": name, "revision": revision or "unknown", "platform": platform.platform(), **fields}
    rounded = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in line.items()}
    print(json.dumps(rounded), flush=True)
