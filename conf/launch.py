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

import functools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from conf.compose import CONF_DIR, command_name, compose, explain, plain_config
from conf.record import environment, is_rank_zero, keep_status
from memer.errors import MemerError, UsageError
from memer.folders import write_json

#: Where a run keeps its results, relative to the working directory.
RUN_DIR = "runs/${name}/${run_id}"

Root = Callable[[dict[str, Any]], Any]


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
                raise UsageError(f"{argument} is a sweep and needs -m: {command_name()} -m {argument}")
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
        with keep_status(folder) as report:
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


def is_multirun(arguments: Sequence[str]) -> bool:
    """Whether the command line asks for several jobs."""
    return any(a in ("-m", "--multirun", "hydra.mode=MULTIRUN") for a in arguments)


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
