"""Checked settings: what every dataclass of the contract is built and verified with."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

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
