"""How a command starts: Hydra composes its config, mistakes become one line, every run leaves its record.

A composition root is a function of one plain dict:

    # train.py
    from conf.launch import hydra_root
    from conf.instantiate import instantiate

    @hydra_root("train")                     # conf/train.yaml
    def main(cfg: dict[str, Any]) -> int | None:
        trainer = instantiate(cfg["trainer"], where="trainer")
        out = Path(cfg["run_dir"])           # runs/<name>/<run id>, absolute, exists; set by hydra_root
        ...

    if __name__ == "__main__":
        main()                               # reads sys.argv, ends the process with the exit code

* `cfg` holds plain values only: interpolations resolved, no DictConfig or ListConfig anywhere.
* The root's YAML carries `name: TEXT`, `run_id: ${new_run_id:}` and, if it can be swept, `group: null` (the
  sweep's name; W&B groups by it); it uses no `${hydra:...}`. A command that writes elsewhere says
  `hydra_root("build", run_dir=False)`: no run folder, no `cfg["run_dir"]`, and none of the keys is needed.
* The working directory never changes. Relative paths in a config are relative to where the command was typed.
* `main(cfg)` with a dict calls the function directly (tests, other programs): no Hydra, no folder, no exit.
* Raise MemerError / UsageError / SourceUnavailableError for what the user can mend: one line, exit code
  1 / 2 / 3. An unknown override, a missing `???` value or a target outside the allow-list exits 2 in the same
  way, before any folder is made. Anything else is our bug: traceback, exit 1. Ctrl-C: exit 130.
  HYDRA_FULL_ERROR=1 shows the traceback of every error.
* An int that the function returns is the exit code; None or anything else means 0.
* `-m` goes to `conf.sweep`: one process and one folder per job.

The run folder gets `.hydra/` (Hydra's record, plus resolved.json and environment.json) and `status.json`:
`running`, then `ok`, `failed` or `interrupted`, with the exit code and the error's line. A folder whose
status is not `ok` is unfinished, whatever else lies in it.
"""

import contextlib
import functools
import json
import os
import platform
import re
import secrets
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from conf.instantiate import check_targets
from conf.suggest import close_names, did_you_mean
from memer.errors import MemerError, UsageError

#: The folder with the YAML files.
CONF_DIR = Path(__file__).resolve().parent

#: Where a run keeps its results, relative to the working directory.
RUN_DIR = "runs/${name}/${run_id}"

STATUS_FILE = "status.json"

#: Overrides that say where a job runs, not what it does; they do not belong to its description.
BOOKKEEPING_KEYS = ("name", "run_id", "group")

Root = Callable[[dict[str, Any]], Any]


def _job_description() -> str:
    """The overrides of the running command, joined: `${overrides:}` in a config, the W&B name of a run."""
    if not HydraConfig.initialized():
        return ""
    task = HydraConfig.get().overrides.task
    return ",".join(o for o in task if o.lstrip("+~").split("=", 1)[0] not in BOOKKEEPING_KEYS)


@functools.cache
def new_run_id() -> str:
    """Time of this process and three random digits: sorts by time, and two runs never share a folder."""
    return f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)[:3]}"


OmegaConf.register_new_resolver("overrides", _job_description, replace=True)
OmegaConf.register_new_resolver("new_run_id", new_run_id, replace=True)


def hydra_root(config_name: str, *, run_dir: bool = True, conf_dir: Path = CONF_DIR) -> Callable[[Root], Any]:
    """Make a function of a plain config dict a command; see the module's text.

    Args:
        config_name: name of the root YAML in `conf_dir`, without suffix.
        run_dir: whether the command works in `runs/<name>/<run id>/`.
        conf_dir: folder of the YAML files; another one is for tests.
    """

    def decorate(function: Root) -> Callable[..., Any]:
        @functools.wraps(function)
        def main(cfg: dict[str, Any] | None = None) -> Any:
            if cfg is not None:
                return function(cfg)
            sys.exit(_run_command(function, config_name=config_name, run_dir=run_dir, conf_dir=conf_dir))

        return main

    return decorate


def compose(config_name: str, overrides: Sequence[str] = (), *, conf_dir: Path = CONF_DIR) -> dict[str, Any]:
    """Compose and resolve a config as the command would, without running anything.

    Raises:
        UsageError: an override or file does not fit, a mandatory value is missing, a target is not allowed.
    """
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(conf_dir), version_base="1.3"):
            composed = hydra.compose(config_name, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(explain(error, config_name, overrides, conf_dir=conf_dir)) from error
    return plain_config(composed)


def plain_config(config: DictConfig) -> dict[str, Any]:
    """A composed config as plain resolved values.

    Raises:
        UsageError: a value is missing (`???`) or an interpolation leads nowhere; names the key.
    """
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        key = str(error.full_key or "a value")
        raise UsageError(f"{key} is missing; give it as {key}=VALUE") from error
    except OmegaConfBaseException as error:
        raise UsageError(f"{error.full_key or 'config'}: {str(error).splitlines()[0]}") from error
    assert isinstance(values, dict)
    plain = {str(key): value for key, value in values.items()}
    check_targets(plain)
    return plain


def _run_command(function: Root, *, config_name: str, run_dir: bool, conf_dir: Path) -> int:
    """Parse sys.argv, run once or as a sweep, and return the exit code."""
    arguments = sys.argv[1:]
    show_all = os.environ.get("HYDRA_FULL_ERROR") == "1"
    try:
        if is_multirun(arguments):
            from conf.sweep import run_sweep  # the sweep needs this module

            if not run_dir:
                raise UsageError(
                    "-m: this command has no run folders and cannot be swept; run it once per value"
                )
            return run_sweep(arguments, config_name=config_name, conf_dir=conf_dir)
        for argument in arguments:
            if argument.startswith("sweep="):
                raise UsageError(f"{argument} is a sweep and needs -m: {_command_name()} -m {argument}")
        return _run_once(function, config_name=config_name, run_dir=run_dir, conf_dir=conf_dir)
    except MemerError as error:
        if show_all:
            traceback.print_exc()
        print(_one_line(error), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run_once(function: Root, *, config_name: str, run_dir: bool, conf_dir: Path) -> int:
    parsed = get_args_parser().parse_args()
    if not any((parsed.cfg, parsed.info, parsed.help, parsed.hydra_help, parsed.shell_completion)):
        # Composed once before Hydra does it, so that a mistyped command leaves no folder behind.
        compose(parsed.config_name or config_name, parsed.overrides, conf_dir=conf_dir)
    outcome: list[int] = []
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")

    def task(config: DictConfig) -> None:
        sys.argv = argv  # a trainer that starts its own processes repeats the command as it was typed
        _restore_environment("HYDRA_FULL_ERROR", full_error)
        if not run_dir:
            outcome.append(_guarded(lambda: function(plain_config(config)))[0])
            return
        folder = Path(HydraConfig.get().runtime.output_dir)
        with _status(folder) as report:
            code, error = _guarded(lambda: function(_recorded(config, folder)))
            report(code, error)
        outcome.append(code)

    functools.update_wrapper(task, function)
    if run_dir:
        settings = [f"hydra.run.dir={RUN_DIR}", "hydra.job.chdir=false"]
    else:
        settings = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=stdout"]
    # Hydra then raises its errors instead of printing them; the task puts the user's own value back.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv = [argv[0], *_with_settings(argv[1:], settings)]
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir), config_name=config_name)(task)()
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(explain(error, config_name, parsed.overrides, conf_dir=conf_dir)) from error
    except SystemExit as stop:  # --help, --cfg and the argument parser's own complaints
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.argv = argv
        _restore_environment("HYDRA_FULL_ERROR", full_error)
    return outcome[0] if outcome else 0


def _guarded(call: Callable[[], Any]) -> tuple[int, str]:
    """(exit code, the error's last line or nothing) of a root; prints what went wrong."""
    code, line = 1, ""
    try:
        result = call()
        code = result if type(result) is int else 0
    except MemerError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            traceback.print_exc()
        code, line = error.exit_code, _one_line(error)
        print(line, file=sys.stderr)
    except KeyboardInterrupt:
        code, line = 130, "interrupted"
        print(line, file=sys.stderr)
    except SystemExit as stop:
        # Lightning turns Ctrl-C into exit code 1.
        interrupted = isinstance(stop.__context__, KeyboardInterrupt)
        code = 130 if interrupted else stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        line = "interrupted" if interrupted else "" if isinstance(stop.code, int) else str(stop.code or "")
    except Exception as error:
        traceback.print_exc()
        line = " ".join(traceback.format_exception_only(error)[-1].split())
    finally:
        _finish_wandb(code)
    return code, line


def _finish_wandb(code: int) -> None:
    """Close this process's W&B run with the exit code, so that the next job never writes into it."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and getattr(wandb, "run", None) is not None:
        wandb.finish(exit_code=code)


def _recorded(config: DictConfig, folder: Path) -> dict[str, Any]:
    """The plain config for the root, and its record beside Hydra's own."""
    cfg = plain_config(config)
    if is_rank_zero():
        record = folder / ".hydra"
        record.mkdir(parents=True, exist_ok=True)
        write_json(record / "resolved.json", cfg)
        write_json(record / "environment.json", environment())
        print(f"run folder: {os.path.relpath(folder)}", file=sys.stderr)
    cfg["run_dir"] = str(folder)
    return cfg


@contextlib.contextmanager
def _status(folder: Path) -> Iterator[Callable[[int, str], None]]:
    """Keep `status.json` of a run folder; the given function reports the end."""
    started = time.time()
    values: dict[str, Any] = {
        "status": "running",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "pid": os.getpid(),
    }

    def write() -> None:
        if is_rank_zero():
            write_json(folder / STATUS_FILE, values)

    def report(code: int, error: str) -> None:
        values["status"] = {0: "ok", 130: "interrupted"}.get(code, "failed")
        values.update(exit_code=code, error=error, seconds=round(time.time() - started, 3))

    write()
    try:
        yield report
    finally:
        write()


def is_multirun(arguments: Sequence[str]) -> bool:
    """Whether the command line asks for several jobs."""
    return any(a in ("-m", "--multirun", "hydra.mode=MULTIRUN") for a in arguments)


def is_rank_zero() -> bool:
    """Whether this process is the first of its job (torchrun, SLURM, Lightning's own children)."""
    ranks = (os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
    return next((rank for rank in ranks if rank is not None), "0") == "0"


def environment() -> dict[str, Any]:
    """Versions, platform and git state of this process."""
    versions = {}
    for package in (
        "torch",
        "lightning",
        "transformers",
        "peft",
        "hydra-core",
        "numpy",
        "pillow",
        "webdataset",
    ):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "git_revision": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def _git(*arguments: str) -> str | None:
    try:
        found = subprocess.run(
            ["git", *arguments], cwd=CONF_DIR, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def write_json(path: Path, values: Any) -> None:
    """Write JSON beside, then rename."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(values, indent=2, default=str) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _restore_environment(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _with_settings(arguments: Sequence[str], settings: Sequence[str]) -> list[str]:
    """Put `settings` in front of the first override: what the user says comes later and wins."""
    first = next((k for k, a in enumerate(arguments) if "=" in a and not a.startswith("-")), len(arguments))
    return [*arguments[:first], *settings, *arguments[first:]]


def _one_line(error: MemerError) -> str:
    return "error: " + " ".join(str(error).split())


def _command_name() -> str:
    return f"python {os.path.relpath(sys.argv[0])}" if sys.argv[0].endswith(".py") else sys.argv[0]


def explain(
    error: Exception, config_name: str, overrides: Sequence[str], *, conf_dir: Path = CONF_DIR
) -> str:
    """One line for an error of the config library, with close names for what was mistyped."""
    text = " ".join(str(error).split())
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        options = list(error.options or ())
        listed = f"; there are: {', '.join(options)}" if options else ""
        what = f"{group}={option}" if group else f"config {option}"
        return f"{what} does not exist{did_you_mean(option, options)}{listed}"
    if match := re.search(r"Could not (?:override|delete from config\.?) '?([\w./@-]+)'?", text):
        key = match.group(1)
        known = known_keys(config_name, [o for o in overrides if _key(o) != key], conf_dir=conf_dir)
        found = close_names(key, known)
        known_hint = did_you_mean(key, known) if found else ""
        return f"unknown override {key!r}{known_hint}; {_command_name()} --cfg job prints every key"
    cause = error.__cause__
    detail = f": {str(cause).splitlines()[0]}" if isinstance(cause, OmegaConfBaseException) else ""
    return text.split(" See https://hydra.cc")[0] + detail


def _key(override: str) -> str:
    return override.lstrip("+~").split("=", 1)[0]


def known_keys(config_name: str, overrides: Sequence[str], *, conf_dir: Path = CONF_DIR) -> set[str]:
    """Dotted keys of the config composed from the overrides that fit, and the names of config groups."""
    GlobalHydra.instance().clear()
    composed: Any = {}
    for attempt in (list(overrides), []):
        with (
            contextlib.suppress(HydraException, OmegaConfBaseException),
            hydra.initialize_config_dir(str(conf_dir), version_base="1.3"),
        ):
            composed = hydra.compose(config_name, overrides=attempt)
            break
    keys = {str(p.relative_to(conf_dir)) for p in conf_dir.rglob("*") if p.is_dir() and any(p.glob("*.yaml"))}

    def walk(node: Any, prefix: str) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                keys.add(f"{prefix}{key}")
                walk(value, f"{prefix}{key}.")

    walk(OmegaConf.to_container(composed, resolve=False) if composed else {}, "")
    return keys
