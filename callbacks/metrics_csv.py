"""`metrics.csv`: every logged value in one local file that survives kills and resumes.

One row per call of the trainer, with the columns `step`, `part` and the names that were ever logged. `part`
counts the starts of the run: after a resume, steps that are done again appear a second time under the next
part, and nothing that was written before is lost.
"""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from memer.folders import replacing

METRICS_FILE = "metrics.csv"
FIRST_COLUMNS = ("step", "part")


class MetricsCsv(Logger):
    """The default logger.

    Args:
        run_dir: folder of the file.
    """

    def __init__(self, *, run_dir: Path | str) -> None:
        super().__init__()
        self.path = Path(run_dir) / METRICS_FILE
        self._columns: list[str] = []
        self._part = 0

    @property
    def name(self) -> str:
        """Name of the run's parent folder."""
        return self.path.resolve().parent.parent.name

    @property
    def version(self) -> str:
        """Name of the run folder."""
        return self.path.resolve().parent.name

    @property
    def save_dir(self) -> str:
        """The run folder."""
        return str(self.path.parent)

    @property
    @rank_zero_experiment
    def experiment(self) -> "MetricsCsv":
        """This logger itself; it has no other object behind it."""
        return self

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The config is kept beside the run already."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append one row; it is on disk when this returns."""
        if not self._part:
            self._open()
        row = {name: _number(value) for name, value in metrics.items()}
        row.pop("epoch", None)
        new = [name for name in row if name not in self._columns]
        if new:
            self._add_columns(new)
        row |= {"step": step, "part": self._part}
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns, lineterminator="\n").writerow(row)

    def _open(self) -> None:
        """Continue an existing file; a row that a kill cut off is dropped."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows: list[dict[str, str]] = []
        if self.path.exists():
            content = self.path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1].decode("utf-8")
            reader = csv.DictReader(whole.splitlines())
            rows, self._columns = list(reader), list(reader.fieldnames or ())
        self._part = 1 + max((int(row.get("part") or 0) for row in rows), default=0)
        self._rewrite(rows, [*self._columns, *(c for c in FIRST_COLUMNS if c not in self._columns)])

    def _add_columns(self, names: list[str]) -> None:
        with self.path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        self._rewrite(rows, [*self._columns, *names])

    def _rewrite(self, rows: list[dict[str, str]], columns: list[str]) -> None:
        self._columns = columns
        with (
            replacing(self.path) as temporary,
            temporary.open("w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.DictWriter(file, columns, lineterminator="\n", restval="")
            writer.writeheader()
            writer.writerows(rows)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
