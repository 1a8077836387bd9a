"""The language columns, normalised to one form whatever types a shard was written with.

Source: spec of the format, section 6; upstream's writer infers types per shard, so all of them occur.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

PERSISTENT = "language_persistent"
EVENTS = "language_events"
PERSISTENT_STYLES = ("subtask", "plan", "memory", "motion", "task_aug")
EVENT_STYLES = ("interjection", "vqa", "trace", None)
CAMERA_STYLES = ("vqa", "trace")


@dataclass(frozen=True, slots=True)
class LanguageRow:
    """One row of a language column.

    Attributes:
        role: speaker.
        content: text, or None for a pure tool call.
        style: what kind of row; None for a tool call.
        time_s: float32 seconds from the start of the episode; None in the event column.
        camera: camera key, vqa and trace only.
        tool_calls: objects, or None.
    """

    role: str
    content: str | None
    style: str | None
    time_s: float | None
    camera: str | None
    tool_calls: tuple[Any, ...] | None


def normalize_cell(cell: Any) -> tuple[LanguageRow, ...]:
    """The rows of one cell; a null cell is an empty list.

    Raises:
        ValueError: the cell is no list of row objects.
    """
    if cell is None:
        return ()
    if isinstance(cell, str):
        cell = json.loads(cell)
    if not isinstance(cell, list):
        raise ValueError(f"{type(cell).__name__} instead of a list of rows")
    return tuple(_row(item) for item in cell)


def _row(item: Any) -> LanguageRow:
    if isinstance(item, str):
        item = json.loads(item)
    if not isinstance(item, dict):
        raise ValueError(f"a row is {type(item).__name__}, not an object")
    time_s = item.get("timestamp")
    return LanguageRow(
        role=str(item.get("role") or ""),
        content=None if item.get("content") is None else str(item["content"]),
        style=item.get("style"),
        time_s=None if time_s is None else float(np.float32(time_s)),
        camera=item.get("camera"),
        tool_calls=_tool_calls(item.get("tool_calls")),
    )


def _tool_calls(value: Any) -> tuple[Any, ...] | None:
    """Objects out of a list of structs, a list of JSON texts, or one JSON text for the whole list."""
    if isinstance(value, str):
        value = json.loads(value)
    if value is None:
        return None
    if not isinstance(value, list):
        raise ValueError(f"tool_calls is {type(value).__name__}, not a list")
    return tuple(json.loads(call) if isinstance(call, str) else call for call in value) or None


def row_faults(rows: Iterable[LanguageRow], *, persistent: bool) -> list[tuple[str, str]]:
    """(code, value) of every rule that the rows of one cell break."""
    faults: list[tuple[str, str]] = []
    styles = PERSISTENT_STYLES if persistent else EVENT_STYLES
    seen: set[tuple[str | None, float | None]] = set()
    for row in rows:
        if row.style not in styles:
            faults.append(("language_style", f"style {row.style!r}"))
        if (row.camera is not None) != (row.style in CAMERA_STYLES):
            faults.append(("language_camera", f"style {row.style!r} with camera {row.camera!r}"))
        if row.content is None and row.tool_calls is None:
            faults.append(("language_type", f"style {row.style!r} without content and tool_calls"))
        if row.style is None and row.tool_calls is None:
            faults.append(("language_type", "style null without tool_calls"))
        if not persistent:
            continue
        if row.time_s is None or not math.isfinite(row.time_s):
            faults.append(("language_type", f"style {row.style!r} with timestamp {row.time_s!r}"))
        elif row.style != "task_aug":
            if (row.style, row.time_s) in seen:
                faults.append(("language_duplicate", f"style {row.style!r} twice at {row.time_s:g} s"))
            seen.add((row.style, row.time_s))
    return faults
