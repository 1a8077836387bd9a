"""A config composed by Hydra, as plain resolved values, and its errors as one line."""

import contextlib
import functools
import os
import re
import secrets
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from conf.instantiate import check_targets
from conf.suggest import close_names, did_you_mean
from memer.errors import UsageError

#: The folder with the YAML files.
CONF_DIR = Path(__file__).resolve().parent

#: Overrides that say where a job runs, not what it does; they do not belong to its description.
BOOKKEEPING_KEYS = ("name", "run_id", "group")


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
        return f"unknown override {key!r}{known_hint}; {command_name()} --cfg job prints every key"
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


def command_name() -> str:
    """The running command as it is typed, for messages."""
    return f"python {os.path.relpath(sys.argv[0])}" if sys.argv[0].endswith(".py") else sys.argv[0]
