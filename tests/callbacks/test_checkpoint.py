from pathlib import Path

import pytest
import torch

from callbacks.checkpoint import NewestCheckpoints, newest_checkpoint
from memer.errors import MemerError, UsageError


def write(folder: Path, step: int) -> Path:
    path = folder / "checkpoints" / f"step_{step:08d}.ckpt"
    path.parent.mkdir(exist_ok=True)
    torch.save({"step": step, "state_dict": {"w": torch.arange(4.0)}}, path)
    return path


def test_a_fresh_run_has_no_checkpoint(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None


def test_the_newest_by_steps_is_taken(tmp_path: Path) -> None:
    newest = write(tmp_path, 1000)
    write(tmp_path, 900)
    (tmp_path / "checkpoints" / "notes.txt").write_text("mine")
    assert newest_checkpoint(tmp_path) == newest


def test_a_damaged_one_is_passed_over_and_only_damaged_ones_are_an_error(tmp_path: Path) -> None:
    older = write(tmp_path, 5)
    newer = write(tmp_path, 10)
    newer.write_bytes(newer.read_bytes()[:200])
    assert newest_checkpoint(tmp_path) == older
    older.write_bytes(b"")
    with pytest.raises(MemerError, match="none of 2 checkpoints can be read"):
        newest_checkpoint(tmp_path)


def test_objects_in_a_checkpoint_make_it_unreadable(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    torch.save({"settings": Path("/somewhere")}, path)
    with pytest.raises(MemerError, match="none of 1"):
        newest_checkpoint(tmp_path)


@pytest.mark.parametrize("values", [{"every_n_steps": 0}, {"every_n_steps": 5, "keep": 0}])
def test_bad_numbers_are_named(tmp_path: Path, values: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="must be >= 1"):
        NewestCheckpoints(run_dir=tmp_path, **values)
