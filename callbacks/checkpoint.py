"""Checkpoints for an exact resume: the newest few, and which of them a restarted run goes on from."""

import logging
import pickle
import re
import zipfile
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from memer.errors import MemerError, UsageError

log = logging.getLogger(__name__)

CHECKPOINT_FOLDER = "checkpoints"
_NAME = re.compile(r"step_(\d+)\.ckpt")


class NewestCheckpoints(ModelCheckpoint):
    """Saves trainable weights, optimizer, schedule and loader position every few optimizer steps.

    A file appears under its name only when complete, so a kill while saving leaves the older ones.

    Args:
        run_dir: checkpoints go to `run_dir/checkpoints`.
        every_n_steps: optimizer steps, >= 1; a kill costs at most these.
        keep: newest checkpoints kept, >= 1.
    """

    def __init__(self, *, run_dir: Path | str, every_n_steps: int, keep: int = 2) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("keep", keep)):
            if value < 1:
                raise UsageError(f"NewestCheckpoints.{name}: {value!r}, must be >= 1")
        super().__init__(
            dirpath=Path(run_dir) / CHECKPOINT_FOLDER,
            filename="step_{step:08.0f}",
            auto_insert_metric_name=False,
            monitor="step",
            mode="max",
            save_top_k=keep,
            every_n_train_steps=every_n_steps,
        )


def newest_checkpoint(run_dir: Path | str) -> Path | None:
    """The checkpoint with the most steps that can be read; None where there is none at all.

    A distributed strategy's checkpoint is a folder and is taken as it is.

    Raises:
        MemerError: there are checkpoints and none can be read.
    """
    folder = Path(run_dir) / CHECKPOINT_FOLDER
    found = [(int(m[1]), path) for path in folder.glob("step_*.ckpt") if (m := _NAME.fullmatch(path.name))]
    for _, path in sorted(found, reverse=True):
        if path.is_dir() or _readable(path):
            return path
        log.warning("%s cannot be read, an older checkpoint is tried", path)
    if found:
        raise MemerError(f"{folder}: none of {len(found)} checkpoints can be read; start another run_id")
    return None


def _readable(path: Path) -> bool:
    try:
        torch.load(path, map_location="meta", weights_only=True)
    except (
        OSError,
        RuntimeError,
        EOFError,
        ValueError,
        KeyError,
        pickle.UnpicklingError,
        zipfile.BadZipFile,
    ):
        return False
    return True
