"""A composition root that ends as it is told; the tests run it as a command."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from conf.launch import hydra_root
from memer.errors import MemerError, SourceUnavailableError


@hydra_root("train", conf_dir=Path(__file__).parent / "conf")
def main(cfg: dict[str, Any]) -> int | None:
    marks = Path("marks")
    marks.mkdir(exist_ok=True)
    with (marks / "runs.txt").open("a") as file:
        file.write(f"{cfg['outcome']}\n")
    print(json.dumps(cfg))
    checkpoint = Path(cfg["run_dir"]) / "checkpoints/last.ckpt"
    if not checkpoint.exists():
        checkpoint.parent.mkdir(exist_ok=True)
        checkpoint.write_text(f"trained by {cfg['outcome']}")
    match cfg["outcome"]:
        case "bug":
            raise ValueError("boom in the middle")
        case "content":
            raise MemerError("episode 3:\n  no label")
        case "source":
            raise SourceUnavailableError("no such folder")
        case "interrupt":
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        case "killed":
            if not (marks / "heal").exists():
                os.kill(os.getpid(), signal.SIGKILL)
        case "slow":
            if not (marks / "heal").exists():
                (marks / "started").touch()
                time.sleep(60)
        case "five":
            return 5
    return None


if __name__ == "__main__":
    main()
