"""Weights & Biases: one run per process, grouped by sweep, with the same figures as the local files.

`wandb` is imported only where a run is made or written to, so a base installation works without it. Offline
works by `WANDB_MODE=offline` or `logger.wandb.mode=offline`. A process that continues a run gets a W&B run of
its own, linked to the one before by `resumed_from`: steps may only grow within a run, and offline parts of
one id would overwrite each other. `conf.launch` finishes the run with the command's exit code.
"""

import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import WandbLogger

from memer.errors import SourceUnavailableError, UsageError
from memer.folders import read_json, write_json
from memer.summary import flatten

log = logging.getLogger(__name__)

#: Ids of the W&B runs of one run folder, oldest first.
IDS_FILE = "wandb_runs.json"


def wandb_logger(
    *,
    run_dir: Path | str,
    project: str = "memer",
    group: str | None = None,
    name: str | None = None,
    tags: list[str] | None = None,
    mode: str | None = None,
) -> WandbLogger:
    """A logger whose run has started.

    Args:
        run_dir: run folder; its resolved config becomes the run's flat config.
        project: W&B project.
        group: sweep, None for a single run.
        name: shown name, usually the command's overrides; empty: the run folder.
        tags: free words.
        mode: online, offline, disabled; None: what WANDB_MODE says.

    Raises:
        UsageError: the package is not installed.
        SourceUnavailableError: the run could not be started, e.g. without a login.
    """
    try:
        import wandb
    except ModuleNotFoundError:
        raise UsageError("logger=wandb: the package wandb is missing; pip install 'memer[wandb]'") from None
    run_dir = Path(run_dir)
    before = _read(run_dir / IDS_FILE).get("ids", [])
    own_id = secrets.token_hex(5)
    config = flatten(_read(run_dir / ".hydra" / "resolved.json"))
    config |= {"run_dir": str(run_dir), "resumed_from": before[-1] if before else None}
    logger = WandbLogger(
        name=name or "/".join(run_dir.resolve().parts[-2:]),
        save_dir=run_dir,
        id=own_id,
        project=project,
        group=group,
        tags=tags,
        mode=mode,
        config=config,
    )
    try:
        started = logger.experiment  # on the first rank only
    except wandb.errors.Error as error:
        text = " ".join(str(error).split())
        raise SourceUnavailableError(f"logger=wandb: {text}; log in, or set WANDB_MODE=offline") from error
    if getattr(started, "id", None) == own_id:
        write_json(run_dir / IDS_FILE, {"ids": [*before, own_id]})
    return logger


def wandb_run(trainer: pl.Trainer) -> Any | None:
    """The W&B run of a trainer, None without one or on other ranks."""
    if not trainer.is_global_zero:
        return None
    return next((lg.experiment for lg in trainer.loggers if isinstance(lg, WandbLogger)), None)


class WandbFiles(pl.Callback):
    """Puts into the W&B run at the end of a fit: the merge table, and the export as an artifact.

    Args:
        artifact: upload the exported model (its size counts against the W&B storage).
        run_dir: run folder; None is the trainer's default root.
    """

    def __init__(self, *, artifact: bool = True, run_dir: Path | str | None = None) -> None:
        self.artifact = artifact
        self.run_dir = run_dir

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """After merging and exporting, whichever order the callbacks have."""
        run = wandb_run(trainer) if stage == "fit" else None
        if run is None:
            return
        import wandb

        folder = Path(self.run_dir or trainer.default_root_dir)
        table = merge_table(folder)
        if table is not None:
            columns, rows = table
            run.log({"merge": wandb.Table(columns=list(columns), data=rows)})
        export = folder / "export"
        if self.artifact and export.is_dir():
            artifact = wandb.Artifact(
                f"{run.id}-export", type="model", metadata=_read(export / "provenance.json")
            )
            artifact.add_dir(str(export))
            run.log_artifact(artifact)


def merge_table(folder: Path) -> tuple[list[str], list[list[Any]]] | None:
    """(columns, rows) of merged/table.json of a run folder, None without one."""
    values = _read(folder / "merged" / "table.json")
    if not values.get("rows"):
        return None
    columns = list(dict.fromkeys(name for row in values["rows"] for name in row))
    rows = [
        [*(row.get(name) for name in columns), row.get("alpha") == values.get("best")]
        for row in values["rows"]
    ]
    return [*columns, "best"], rows


def to_summary(run: Any, metrics: Mapping[str, float]) -> None:
    """Write figures into the W&B run's summary under the names of summary.json."""
    run.summary.update(dict(metrics))


def _read(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file."""
    return read_json(path) if path.exists() else {}
