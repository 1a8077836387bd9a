"""Train one model: `python train.py experiment=NAME ...`, `python train.py -m sweep=NAME`.

Wires what the config names (data, model, callbacks, logger, trainer), goes on from the newest checkpoint of
the run folder if there is one, and fits; merging, export and summary are callbacks of the fit.
"""

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException

from callbacks.checkpoint import newest_checkpoint
from conf.instantiate import instantiate
from conf.launch import hydra_root
from memer.contract import Contract
from memer.errors import UsageError
from memer.folders import write_json
from models.tiny import make_tiny_base, planner_corpus

log = logging.getLogger(__name__)

#: Remarks of the trainer on what is meant here: validation streams know their length, the tower stays in eval
#: mode, the newest checkpoint is looked for in a folder of the run's own.
_EXPECTED_REMARKS = (
    r"Your `IterableDataset` has `__len__` defined",
    r"Found \d+ module\(s\) in eval mode",
    r"`isinstance\(treespec, LeafSpec\)`",
    r"The '(train|val)_dataloader' does not have many workers",
    r"Checkpoint directory .* exists and is not empty",
)


@hydra_root("train")
def main(cfg: dict[str, Any]) -> None:
    """Run one training; see conf/train.yaml."""
    run_dir = Path(cfg["run_dir"])
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for remark in _EXPECTED_REMARKS:
        warnings.filterwarnings("ignore", message=remark)
    pl.seed_everything(cfg["seed"], workers=True, verbose=False)
    checkpoint = newest_checkpoint(run_dir)
    data = instantiate(cfg["data"], where="data")
    contract: Contract = data.contract
    described = data.describe()
    write_json(run_dir / "data.json", described)
    log.info("training data: %s samples of %s", described["train"]["samples"], described["sources"])

    model = dict(cfg["model"]["module"])
    if cfg["model"].get("tiny_base") is not None:
        model["base"] = str(make_base(run_dir / "base", cfg["model"]["tiny_base"], data, contract))
    module = instantiate(model, where="model.module", contract=contract)
    data.bind(module.make_collator())
    module.contract.save(run_dir)

    parts = {
        group: [with_run_dir(node, run_dir, where=name) for name, node in cfg[group].items() if node]
        for group in ("callbacks", "logger")
    }
    try:
        trainer = instantiate(cfg["trainer"], where="trainer", default_root_dir=str(run_dir), **parts)
    except MisconfigurationException as error:
        raise UsageError(f"trainer: {error}; without a GPU use trainer=cpu and a tiny experiment") from error
    if checkpoint is not None:
        log.info("going on from %s", checkpoint)
    trainer.fit(module, datamodule=data, ckpt_path=None if checkpoint is None else str(checkpoint))
    if trainer.interrupted:
        raise KeyboardInterrupt


def make_base(out: Path, settings: dict[str, Any], data: Any, contract: Contract) -> Path:
    """A tiny base for this run's words; the same settings and data give the same bytes."""
    corpus = planner_corpus(
        subtasks=data.subtasks(),
        instructions=data.instructions(),
        prompt=contract.prompt,
        num_positions=contract.shown_windows.recent_frames_length,
    )
    return make_tiny_base(
        out,
        corpus=corpus,
        size=instantiate(settings["size"], where="model.tiny_base.size"),
        seed=settings["seed"],
        min_pixels=contract.min_pixels,
        max_pixels=contract.max_pixels,
    )


def with_run_dir(node: dict[str, Any], run_dir: Path, *, where: str) -> Any:
    """Instantiate a callback or logger; one that takes a run folder and names none gets this run's."""
    extra = {"run_dir": str(run_dir)} if node.get("run_dir", "absent") is None else {}
    return instantiate(node, where=where, **extra)


if __name__ == "__main__":
    main()
