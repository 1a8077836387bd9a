"""Checked settings: what every dataclass of the contract is built and verified with."""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, TypeVar, get_args, get_type_hints

from memer.errors import MemerError, UsageError

T = TypeVar("T")


def require(condition: bool, owner: object, name: str, accepted: str) -> None:
    """Raise a UsageError that names class, field, value and what would be accepted."""
    if not condition:
        raise UsageError(f"{type(owner).__name__}.{name}: {getattr(owner, name)!r}, must be {accepted}")


def require_counts(owner: object, **least: int) -> None:
    """Raise a UsageError unless every named field is an integer of at least the given value."""
    for name, bound in least.items():
        value = getattr(owner, name)
        require(type(value) is int and value >= bound, owner, name, f"an integer >= {bound}")


def require_numbers(owner: object, *names: str) -> None:
    """Raise a UsageError unless every named field is a finite number."""
    for name in names:
        value = getattr(owner, name)
        require(type(value) in (int, float) and math.isfinite(value), owner, name, "a number")


def check_count(name: str, value: object, *, least: int, most: int | None = None, note: str = "") -> None:
    """Raise a UsageError unless a value that a user gives by name is a whole number within bounds.

    Args:
        name: as the user writes it.
        value: what was given.
        least: smallest accepted.
        most: largest accepted, None without bound.
        note: what follows the accepted values in the message.

    >>> check_count("replan", 3, least=1, most=16)
    """
    if type(value) is not int or value < least or (most is not None and value > most):
        accepted = f"at least {least}" if most is None else f"in {least}..{most}"
        kind = "" if type(value) is int else "a whole number "
        raise UsageError(f"{name}: {value!r}, must be {kind}{accepted}{note}")


def check_share(name: str, value: object) -> None:
    """Raise a UsageError unless a value that a user gives by name is a number between 0 and 1, both excluded.

    >>> check_share("tau", 0.95)
    """
    if type(value) not in (int, float) or not 0 < value < 1:  # type: ignore[operator]
        raise UsageError(f"{name}: {value!r}, must be a number between 0 and 1")


def check_positive(name: str, value: object) -> None:
    """Raise a UsageError unless a value that a user gives by name is a number above 0.

    >>> check_positive("view.start_weight", 8)
    """
    if type(value) not in (int, float) or not value > 0:  # type: ignore[operator]
        raise UsageError(f"{name}: {value!r}, must be positive")


def build(kind: type[T], values: object, *, where: str) -> T:
    """`kind` from plain values; an unknown or missing field is an error by name."""
    if not isinstance(values, Mapping):
        raise MemerError(f"{where}: {values!r}, must be a group of fields")
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - known)
    if unknown:
        raise MemerError(f"{where}: unknown field {unknown[0]!r}; known: {', '.join(sorted(known))}")
    try:
        return kind(**values)
    except TypeError as error:  # a field without default is missing; the class names it
        raise MemerError(f"{where}: {error}") from None


def field_names(kind: type, prefix: str = "") -> list[str]:
    """Dotted names of the fields of a dataclass and of the dataclasses in it, groups first.

    >>> from memer.contract import Contract
    >>> [name for name in field_names(Contract) if name.startswith("windows")][:2]
    ['windows', 'windows.frame_subsample']
    """
    names: list[str] = []
    for name, hint in get_type_hints(kind).items():
        names.append(prefix + name)
        for part in get_args(hint) if isinstance(hint, UnionType) else (hint,):
            if is_dataclass(part):
                names += field_names(part, f"{prefix}{name}.")  # type: ignore[arg-type]
    return names


def merge(old: object, new: object) -> Any:
    """`new` over `old`: groups merge field by field, at any depth; None keeps the old value.

    >>> merge({"a": {"b": 1, "c": 2}}, {"a": {"b": 5, "c": None}})
    {'a': {'b': 5, 'c': 2}}
    """
    if new is None:
        return old
    if not isinstance(new, Mapping):
        return new
    base = old if isinstance(old, Mapping) else {}
    merged = dict(base)
    for name, value in new.items():
        if value is not None:
            merged[name] = merge(base.get(name), value)
    return merged
