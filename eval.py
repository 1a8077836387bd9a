"""Score a policy: `python eval.py eval=offline|closed_loop|map_wam|compare ...` (conf/eval.yaml)."""

import logging
from typing import Any

from conf.evaluate.closed_loop import evaluate_closed_loop
from conf.evaluate.handover import check_allowed
from conf.evaluate.map_wam import evaluate_map_wam
from conf.evaluate.offline import evaluate_offline
from conf.launch import hydra_root
from memer.compare import compare
from memer.errors import UsageError


class FirstFew(logging.Filter):
    """Lets the first records through: a planner that is lost draws the same warning in every episode.

    Args:
        count: records let through, at least 1; the last of them says that it is.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.left = count

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to show `record`."""
        self.left -= 1
        if self.left == 0:
            record.msg, record.args = f"{record.getMessage()} (further ones are not shown)", ()
        return self.left >= 0


@hydra_root("eval")
def main(cfg: dict[str, Any]) -> int | None:
    """Dispatch on the mode."""
    logging.getLogger("memer.memory").addFilter(FirstFew(3))
    check_allowed(cfg["allow_mismatch"])
    if cfg["mode"] == "offline":
        return evaluate_offline(cfg)
    if cfg["mode"] == "closed_loop":
        return evaluate_closed_loop(cfg)
    if cfg["mode"] == "map_wam":
        return evaluate_map_wam(cfg)
    if cfg["mode"] == "compare":
        table = compare(cfg["runs"], cfg["run_dir"], metrics=cfg["metrics"])
        print(table.markdown())
        return table.exit_code
    raise UsageError(f"eval={cfg['mode']}: unknown; there are offline, closed_loop, map_wam and compare")


if __name__ == "__main__":
    main()
