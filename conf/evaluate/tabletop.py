"""The embedded benchmark as evaluations play it (`env.*`)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memer.contract import Contract
from memer.episode import Episode
from memer.errors import MemerError
from memer.settings import check_count
from memer.tabletop import CAMERA_KEYS, demonstrate, make_env
from memer.tabletop.env import TabletopEnv
from memer.tabletop.perturbations import FPS


def chosen_episodes(env: Mapping[str, Any]) -> list[int]:
    """Numbers of the episodes to play.

    Raises:
        UsageError: fewer than one, or a value of `env` that is no number.
    """
    for name, least in (("num_episodes", 1), ("first_episode", 0), ("seed", 0), ("frame_size", 1)):
        check_count(f"env.{name}", env[name], least=least)
    return list(range(env["first_episode"], env["first_episode"] + env["num_episodes"]))


def play(env: Mapping[str, Any], index: int) -> TabletopEnv:
    """The environment of one episode."""
    return make_env(
        env["task"],
        split=env["split"],
        index=index,
        seed=env["seed"],
        perturb=env["perturb"],
        perturb_kinds=env["perturb_kinds"],
        frame_size=env["frame_size"],
    )


def demonstrations(env: Mapping[str, Any], count: int) -> Iterator[Episode]:
    """Training demonstrations of the task, with small pictures: for statistics of their labels.

    Raises:
        UsageError: fewer than one.
    """
    check_count("num_demonstrations", count, least=1)
    for index in range(count):
        yield demonstrate(env["task"], split="train", index=index, seed=env["seed"], frame_size=16)


def played_dataset(env: Mapping[str, Any], contract: Contract, chosen: Sequence[int]) -> dict[str, Any]:
    """What was played, for the summary."""
    return {
        "name": f"tabletop_{env['task']}_{env['split']}",
        "camera_keys": list(contract.cameras.camera_keys),
        "requested": len(chosen),
        "evaluated": len(chosen),
        "skipped": [],
    }


def check_environment(contract: Contract, cfg: Mapping[str, Any], *, what: str) -> None:
    """Refuse a contract of another clock, or of cameras that the benchmark does not have.

    Raises:
        MemerError: naming both sides.
    """
    where = f"{what} and environment {cfg['env']['task']}"
    contract.check_same(contract.updated({"fps": float(FPS)}), what=where, allow=cfg["allow_mismatch"])
    missing = [key for key in contract.cameras.camera_keys if key not in CAMERA_KEYS]
    if missing:
        raise MemerError(
            f"contract mismatch, {where}: cameras.camera_keys: no camera {missing[0]!r}; "
            f"available: {', '.join(CAMERA_KEYS)}"
        )
