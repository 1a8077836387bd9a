"""Sweeps of the efficiency experiments: timed points, peak memory, a CSV and a plot.

Source: MaP-WAM specification, section 12.
"""

import csv
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from memer.svg import line_chart

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured point.

    Attributes:
        experiment: name of the sweep.
        mode: what was kept between calls.
        x: history frames or finished segments.
        median_ms: wall time.
        p95_ms: wall time.
        peak_bytes: most memory while the point ran, weights included.
        tokens: that the attention of the point sees.
        status: `ok`, or `oom` with no other figures.
    """

    experiment: str
    mode: str
    x: int
    median_ms: float | None
    p95_ms: float | None
    peak_bytes: int | None
    tokens: int
    status: Literal["ok", "oom"] = "ok"


class PeakMemory:
    """Most memory since the start: allocated by PyTorch on a GPU, else resident pages of the process (Linux).

    Resident pages hold the interpreter and whatever the allocator has not given back, so differences between
    points count, not the absolute value.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif _CLEAR_REFS.exists():
            _CLEAR_REFS.write_text("5", encoding="ascii")  # the high-water mark starts at the present size

    def read(self) -> int | None:
        """Bytes; None where the system does not tell."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if not _STATUS.exists():
            return None
        for line in _STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
        return None


def timed(fn: Callable[[], object], device: torch.device) -> float:
    """Wall time of one call, seconds, with the device's queue empty before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    fn()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def measure(
    fn: Callable[[], object], *, device: torch.device, warmup: int, runs: int, budget_s: float
) -> tuple[list[float], int | None]:
    """Seconds of up to `runs` calls and the peak memory; a call that takes long is repeated less often.

    Args:
        fn: what is measured.
        device: whose queue and memory count.
        warmup: calls before, left out of the seconds; fewer where the budget is spent.
        runs: measured calls, at least one.
        budget_s: no further call once this time is spent.
    """
    memory = PeakMemory(device)
    seconds = [timed(fn, device)]
    while len(seconds) < warmup + runs and sum(seconds) < budget_s:
        seconds.append(timed(fn, device))
    return seconds[min(warmup, len(seconds) - 1) :], memory.read()


def measure_in_turn(
    calls: Sequence[Callable[[], object]], *, device: torch.device, warmup: int, runs: int
) -> list[tuple[list[float], int | None]]:
    """As `measure`, but one call of each per round, so that a busy spell of the machine meets all of them."""
    out: list[tuple[list[float], int | None]] = [([], None) for _ in calls]
    for run in range(warmup + runs):
        for i, fn in enumerate(calls):
            memory = PeakMemory(device)
            taken = timed(fn, device)
            seconds, peak = out[i]
            now = memory.read()
            if run >= warmup:
                seconds.append(taken)
            out[i] = (seconds, now if peak is None else max(peak, now or 0))
    return out


def median_and_p95(seconds: Sequence[float]) -> tuple[float, float]:
    """Of wall times, milliseconds."""
    ordered = sorted(seconds)
    return 1e3 * statistics.median(ordered), 1e3 * ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def write(rows: Sequence[Row], folder: Path, *, name: str, title: str, x_label: str) -> None:
    """`NAME.csv` with every row and `NAME.svg` with a curve of the median per mode."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, fieldnames=list(asdict(rows[0])))
        table.writeheader()
        table.writerows(asdict(row) for row in rows)
    curves = {
        mode: [(float(r.x), r.median_ms) for r in rows if r.mode == mode and r.median_ms is not None]
        for mode in dict.fromkeys(row.mode for row in rows)
    }
    picture = line_chart(curves, title=title, x_label=x_label, width=640, height=360)
    (folder / f"{name}.svg").write_text(picture, encoding="utf-8")
