"""Objects from plain config nodes: `_target_` names what to call, the other keys are its arguments.

A node is the plain dict that `conf.launch.hydra_root` hands to a command, so what reaches a class is a dict,
list or scalar, never an object of the config library. Only targets below `ALLOWED_PREFIXES` are called.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import partial
from typing import Any

from conf.suggest import did_you_mean
from memer.errors import MemerError, UsageError

#: Where a `_target_` may live: our packages and the two trainers' libraries.
ALLOWED_PREFIXES = ("memer.", "data.", "models.", "callbacks.", "conf.", "lightning.", "torch.")

#: Keys of a node that are no arguments; `_convert_` is accepted without effect, as nodes are plain already.
_SPECIAL_KEYS = frozenset({"_target_", "_partial_", "_args_", "_recursive_", "_convert_"})


def instantiate(node: Any, *, where: str = "config", **extra: Any) -> Any:
    """Call what `node` names, its nested nodes first.

    Args:
        node: plain value. A dict with `_target_` becomes the result of the call, or a `functools.partial`
            with `_partial_: true`; `_args_` are positional arguments; `_recursive_: false` hands nested nodes
            over as dicts. Other dicts and lists keep their form, with nested nodes called. None stays None.
        where: dotted place of the node in the config, for messages.
        extra: arguments known at run time only; they win over those of the node.

    Raises:
        UsageError: the target is not allowed, does not exist, or does not take an argument of the node; or a
            described value (a dataclass) refuses its fields.
    """
    if isinstance(node, Mapping):
        recursive = node.get("_recursive_", True)
        values = {
            key: instantiate(value, where=f"{where}.{key}") if recursive else value
            for key, value in node.items()
            if key not in _SPECIAL_KEYS
        }
        if "_target_" not in node:
            if extra:
                raise UsageError(f"{where}: no _target_ there to pass {', '.join(extra)} to")
            return values
        target = locate(node["_target_"], where=where)
        positional = [instantiate(value, where=f"{where}._args_") for value in node.get("_args_", ())]
        check_arguments(target, {**values, **extra}, where=where)
        if node.get("_partial_", False):
            return partial(target, *positional, **{**values, **extra})
        return _call(target, positional, {**values, **extra}, where=where)
    if isinstance(node, list | tuple):
        return [instantiate(value, where=f"{where}[{k}]") for k, value in enumerate(node)]
    return node


def _call(target: Callable[..., Any], positional: list[Any], values: dict[str, Any], *, where: str) -> Any:
    try:
        return target(*positional, **values)
    except MemerError as error:
        raise type(error)(f"{where}: {error}") from error
    except (TypeError, ValueError) as error:
        # A dataclass only checks its fields, so it complains about the config; others may have a bug.
        if is_dataclass(target):
            raise UsageError(f"{where}: {error}") from error
        raise


def locate(target: Any, *, where: str = "config") -> Callable[..., Any]:
    """The class or function that a dotted path names.

    Raises:
        UsageError: not below ALLOWED_PREFIXES, or nothing there; close names are suggested.
    """
    if not isinstance(target, str) or not target.startswith(ALLOWED_PREFIXES):
        raise UsageError(
            f"{where}: _target_ {target!r} is not allowed; allowed are names below "
            + ", ".join(prefix.rstrip(".") for prefix in ALLOWED_PREFIXES)
        )
    parts = target.split(".")
    found: Any = None
    for cut in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:cut])
        try:
            found = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and (module_name + ".").startswith(error.name + "."):
                continue
            raise UsageError(f"{where}: _target_ {target} needs the package {error.name!r}") from error
        rest = parts[cut:]
        break
    else:
        raise UsageError(f"{where}: _target_ {target}: no module {parts[0]!r}")
    for name in rest:
        if not hasattr(found, name):
            raise UsageError(
                f"{where}: _target_ {target}: no {name!r} in {module_name}{did_you_mean(name, dir(found))}"
            )
        found = getattr(found, name)
    if not callable(found):
        raise UsageError(f"{where}: _target_ {target} cannot be called")
    return found  # type: ignore[no-any-return]


def check_arguments(target: Callable[..., Any], values: Mapping[str, Any], *, where: str) -> None:
    """Refuse argument names that `target` does not take, before anything is built.

    Raises:
        UsageError: names the argument and what would be accepted.
    """
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # builtins without a signature
        return
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    accepted = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for name in values:
        if name not in accepted:
            raise UsageError(
                f"{where}: {getattr(target, '__name__', target)} takes no {name!r}"
                f"{did_you_mean(name, accepted)}; it takes {', '.join(accepted) or 'nothing'}"
            )


def targets(node: Any, *, where: str = "config") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every node with a `_target_` at any depth, as (dotted place, node)."""
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield where, dict(node)
        for key, value in node.items():
            yield from targets(value, where=f"{where}.{key}")
    elif isinstance(node, list | tuple):
        for k, value in enumerate(node):
            yield from targets(value, where=f"{where}[{k}]")


def check_targets(config: Any, *, where: str = "config") -> None:
    """Refuse a config that names a target outside ALLOWED_PREFIXES; nothing is imported or called."""
    for place, node in targets(config, where=where):
        target = node["_target_"]
        if not isinstance(target, str) or not target.startswith(ALLOWED_PREFIXES):
            raise UsageError(
                f"{place}: _target_ {target!r} is not allowed; allowed are names below "
                + ", ".join(prefix.rstrip(".") for prefix in ALLOWED_PREFIXES)
            )
