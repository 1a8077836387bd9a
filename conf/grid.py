"""The grid of a sweep: which jobs a command line with `-m` asks for.

A sweep file `conf/sweep/NAME.yaml` has the keys `overrides`, a list that holds for every job unless the
command line says otherwise; `grid`, key -> list of values, whose product gives the jobs; and `share`, names
of folders that a job takes over from a finished one before it starts, e.g. [checkpoints] where the grid
changes nothing that happens before the end of training, so that one training serves all jobs. A grid key
named on the command line replaces that axis; `key=a,b` adds one. The sweep is called after its file, or
`name=NAME`; the job after its values.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf

from conf.compose import BOOKKEEPING_KEYS, CONF_DIR, compose
from conf.suggest import did_you_mean
from memer.errors import UsageError

DEVICES_MESSAGE = (
    "-m with more than one device is refused ({found}): the trainer starts its own processes by repeating "
    "the command. What works: a sweep of one-device jobs (trainer.devices=1); torchrun or SLURM, where the "
    "processes exist already; or one command per job without -m"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of a sweep.

    Attributes:
        name: short, its folder's name.
        overrides: what the job does, as typed on a command line.
        config: composed and resolved, with name, run_id and group.
    """

    name: str
    overrides: tuple[str, ...]
    config: Mapping[str, Any] = field(repr=False)

    @property
    def folder(self) -> Path:
        """Run folder, relative to the working directory."""
        return Path("runs") / str(self.config["name"]) / str(self.config["run_id"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A planned sweep.

    Attributes:
        name: also the W&B group.
        jobs: in order.
        share: folders of a finished job that the jobs after it start with.
    """

    name: str
    jobs: tuple[Job, ...]
    share: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Folder of the sweep's jobs, relative to the working directory."""
        return Path("runs") / self.name


def plan_sweep(overrides: Sequence[str], *, config_name: str, conf_dir: Path = CONF_DIR) -> Sweep:
    """The jobs that a command line asks for, each composed and checked; nothing is run.

    Raises:
        UsageError: unknown sweep or override, nothing to vary, or more than one device per job.
    """
    overrides = [o for o in overrides if not o.startswith("hydra.mode=")]
    chosen = [o.split("=", 1)[1] for o in overrides if o.startswith("sweep=")]
    typed = _parse([o for o in overrides if not o.startswith("sweep=")])
    named = {o.key_or_group: o for o in typed}
    fixed: list[str] = []
    axes: dict[str, list[str]] = {}
    share: list[str] = []
    for sweep_name in chosen:
        settings = _read_sweep(sweep_name, conf_dir)
        share += settings["share"]
        fixed += [o.input_line or "" for o in _parse(settings["overrides"]) if o.key_or_group not in named]
        for key, values in settings["grid"].items():
            if key.lstrip("+") not in named:
                axes[key] = [_literal(value) for value in values]
    for override in typed:
        key = override.get_key_element()
        if override.is_sweep_override():
            if not override.is_discrete_sweep():
                raise UsageError(f"{override.input_line}: only lists of values can be swept")
            axes[key] = [str(value) for value in override.sweep_string_iterator()]
        elif override.key_or_group != "name":
            fixed.append(override.input_line or "")
    if not axes:
        raise UsageError("-m: nothing to sweep; give sweep=NAME or a list of values, key=a,b")
    combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    name = str(named["name"].value()) if "name" in named else "-".join(chosen) or _ad_hoc_name(axes, fixed)
    names = _job_names(combinations)
    jobs = []
    for job_name, values in zip(names, combinations, strict=True):
        own = (*fixed, *(f"{key}={value}" for key, value in values.items()))
        config = compose(config_name, [*own, *bookkeeping(name, job_name)], conf_dir=conf_dir)
        _refuse_devices(config)
        jobs.append(Job(name=job_name, overrides=own, config=config))
    return Sweep(name=name, jobs=tuple(jobs), share=tuple(share))


def bookkeeping(sweep: str, job: str) -> list[str]:
    """Overrides that put a job into its folder."""
    values = {"name": sweep, "run_id": job, "group": sweep}
    return [f"{key}={_literal(values[key])}" for key in BOOKKEEPING_KEYS]


def _refuse_devices(config: Mapping[str, Any]) -> None:
    trainer = config.get("trainer")
    if not isinstance(trainer, Mapping):
        return
    devices, nodes = trainer.get("devices", 1), trainer.get("num_nodes", 1)
    count = _count_devices(devices, str(trainer.get("accelerator", "auto")))
    if count > 1 or (isinstance(nodes, int) and nodes > 1):
        found = f"trainer.devices={devices}" if count > 1 else f"trainer.num_nodes={nodes}"
        raise UsageError(DEVICES_MESSAGE.format(found=found))


def _count_devices(devices: Any, accelerator: str) -> int:
    """How many devices Lightning would take."""
    if isinstance(devices, list | tuple):
        return len(devices)
    text = str(devices).strip()
    if text in ("auto", "-1"):
        if accelerator not in ("auto", "gpu", "cuda"):
            return 1
        import torch  # seconds to import, and only needed here

        return max(1, torch.cuda.device_count())
    if "," in text:
        return len([part for part in text.split(",") if part.strip()])
    return int(text) if text.isdigit() else 1


def _read_sweep(name: str, conf_dir: Path) -> dict[str, Any]:
    path = conf_dir / "sweep" / f"{name}.yaml"
    if not path.is_file():
        known = sorted(p.stem for p in path.parent.glob("*.yaml"))
        raise UsageError(
            f"sweep={name} does not exist{did_you_mean(name, known)}; there are: {', '.join(known)}"
        )
    settings = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(settings, dict) or not set(settings) <= {"overrides", "grid", "share"}:
        raise UsageError(f"{path}: a sweep has the keys overrides, grid and share only")
    grid = settings.get("grid")
    if not isinstance(grid, dict) or not all(isinstance(v, list) and v for v in grid.values()):
        raise UsageError(f"{path}: grid must map keys to non-empty lists of values")
    return {"overrides": settings.get("overrides") or [], "grid": grid, "share": settings.get("share") or []}


def _parse(overrides: Sequence[str]) -> list[Override]:
    try:
        return list(OverridesParser.create().parse_overrides(list(overrides)))
    except HydraException as error:
        raise UsageError(str(error).splitlines()[0]) from error


def _literal(value: Any) -> str:
    """A plain value in Hydra's override grammar.

    >>> _literal([0.8, None, "two words"])
    "[0.8,null,'two words']"
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return "[" + ",".join(_literal(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_literal(item)}" for key, item in value.items()) + "}"
    text = str(value)
    if re.fullmatch(r"[A-Za-z_][\w./-]*", text) and text.lower() not in (
        "null",
        "true",
        "false",
        "nan",
        "inf",
    ):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _job_names(combinations: Sequence[Mapping[str, str]]) -> list[str]:
    """Short folder names: words as they are, other values behind the last part of their key.

    >>> _job_names([{"view.form": "none", "seed": "0"}, {"view.form": "long", "seed": "0"}])
    ['none-seed0', 'long-seed0']
    """
    names = []
    for values in combinations:
        parts = []
        for key, value in values.items():
            word = re.sub(r"[^\w.-]+", "_", value.rsplit("/", 1)[-1]).strip("_.")
            plain = re.fullmatch(r"[A-Za-z_]\w*", value) and value not in ("null", "true", "false")
            parts.append(word if plain else key.lstrip("+").rsplit(".", 1)[-1] + word)
        names.append("-".join(parts)[:80])
    if len(set(names)) < len(names):
        return [f"{k:03d}-{name}"[:80] for k, name in enumerate(names)]
    return names


def _ad_hoc_name(axes: Mapping[str, Sequence[str]], fixed: Sequence[str]) -> str:
    """The swept keys and a few digits of the whole command: the same command finds its folder again."""
    digits = hashlib.sha256(json.dumps([axes, sorted(fixed)]).encode()).hexdigest()[:6]
    return "-".join([*(key.lstrip("+").rsplit(".", 1)[-1].replace("/", "_") for key in axes), digits])
