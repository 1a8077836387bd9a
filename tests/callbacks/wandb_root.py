"""A training command of a second that logs to W&B; the tests run it as a command."""

from pathlib import Path
from typing import Any

from callbacks.samples import SampleLog
from callbacks.summary import RunSummary
from callbacks.wandb_runs import WandbFiles
from conf.instantiate import instantiate
from conf.launch import hydra_root
from memer.folders import write_json
from tests.callbacks.small_fit import OneWeight, fit


@hydra_root("train", conf_dir=Path(__file__).parent / "wandb_conf")
def main(cfg: dict[str, Any]) -> None:
    folder = Path(cfg["run_dir"])
    loggers = [
        instantiate({**node, "run_dir": str(folder)}, where="logger") for node in cfg["logger"].values()
    ]
    write_json(folder / "merged/table.json", {"rows": [{"alpha": 0.5, "folder": "alpha_0.50", "score": 1.0}]})
    write_json(folder / "export/config.json", {"model_type": "none"})
    fit(
        folder,
        steps=6,
        model=OneWeight(fail_at=cfg["fail_at"]),
        logger=loggers,
        callbacks=[RunSummary(), WandbFiles(), SampleLog(count=2)],
    )


if __name__ == "__main__":
    main()
