"""Segments from `language_annotation.json`: entries [text, frames] per episode, and how they are merged.

The files of the benchmark list whole subtasks in some tasks and single primitives in others, under the same
form. Nothing is guessed: entries are taken one by one, and a repeated text that nobody vouched for is an
error that names the ways out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args

from data.files import read_json
from memer.episode import Segment, label_key
from memer.errors import MemerError, UsageError

ANNOTATION_FILE = "language_annotation.json"

Merge = Literal["none", "adjacent_equal", "grouped"]

#: A text of which an episode has one subtask at most; a second entry proves that entries are primitives.
_ONCE = "press the confirm button"
#: A text of which every repetition is a subtask of its own, so that equal neighbours must stay apart.
_COUNTED = "one time"


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the file: `frames` frames carry `text`."""

    text: str
    frames: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRule:
    """How entries become segments.

    Attributes:
        merge: `none` keeps each entry; `adjacent_equal` joins neighbours of equal text (wrong where a subtask
            is repeated, as in press_button); `grouped` cuts a run of equal text into segments of a fixed
            number of entries for the texts in `groups`, and treats other texts as `adjacent_equal`.
        repeatable: texts of which neighbouring entries are subtasks of their own (merge=none).
        groups: text -> entries per segment (merge=grouped).

    Raises:
        UsageError: an unknown merge, options that another merge needs, a number below 1.
    """

    merge: Merge = "none"
    repeatable: tuple[str, ...] = ()
    groups: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.merge not in get_args(Merge):
            raise UsageError(f"source.merge={self.merge!r}, must be one of {', '.join(get_args(Merge))}")
        if self.repeatable and self.merge != "none":
            raise UsageError(f"source.repeatable goes with merge=none, not with merge={self.merge}")
        if bool(self.groups) != (self.merge == "grouped"):
            raise UsageError(
                f"source.groups={dict(self.groups)} with merge={self.merge}: "
                "groups and merge=grouped go together"
            )
        for text, size in self.groups.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise UsageError(
                    f"source.groups: {size!r} entries per segment of {text!r}, must be at least 1"
                )

    def segments(self, entries: Sequence[Entry], *, num_frames: int, where: str) -> tuple[Segment, ...]:
        """Segments in order from frame 0; frames after the last entry stay unannotated.

        Args:
            entries: of one episode, in order.
            num_frames: length T of the episode.
            where: names file and episode in messages.

        Raises:
            MemerError: the entries name more frames than there are, or do not fill their groups.
            UsageError: a repeated text needs a decision.
        """
        total = sum(entry.frames for entry in entries)
        if total > num_frames:
            raise MemerError(
                f"{where}: the annotation names {total} frames, the episode has {num_frames}; "
                "file and recording do not belong together"
            )
        segments: list[Segment] = []
        start = number = 0
        for key, run_iterator in groupby(entries, key=lambda entry: _key(entry.text)):
            run = list(run_iterator)
            size = self._entries_per_segment(key, run, first=number, where=where)
            for at in range(0, len(run), size):
                group = run[at : at + size]
                end = start + sum(entry.frames for entry in group)
                segments.append(Segment(start, end, group[0].text))
                start = end
            number += len(run)
        return tuple(segments)

    def _entries_per_segment(self, key: str, run: Sequence[Entry], *, first: int, where: str) -> int:
        if len(run) == 1 and self.merge != "grouped":
            return 1
        named = f"{where}: entries {first}..{first + len(run) - 1} all say {run[0].text!r}"
        grouped_advice = (
            "source.merge=grouped with source.groups=[{text: ..., entries: N}] for repeated subtasks"
        )
        if self.merge == "none":
            if _ONCE in key:
                raise UsageError(
                    f"{named}, which an episode does once: the file lists primitives; set {grouped_advice}"
                )
            if key not in {_key(text) for text in self.repeatable}:
                raise UsageError(
                    f"{named}; if they are primitives of one subtask set source.merge=adjacent_equal, or "
                    f"{grouped_advice}; if each is a subtask of its own add the text to source.repeatable"
                )
            return 1
        if self.merge == "adjacent_equal":
            if _COUNTED in key:
                raise UsageError(
                    f"{named}, where repetitions are subtasks of their own; set {grouped_advice}"
                )
            return len(run)
        size = {_key(text): size for text, size in self.groups.items()}.get(key)
        if size is None:
            if _COUNTED in key and len(run) > 1:
                raise UsageError(
                    f"{named}, where repetitions are subtasks; name its entries in source.groups"
                )
            return len(run)
        if len(run) % size:
            raise MemerError(
                f"{where}: entries {first}..{first + len(run) - 1}: {len(run)} times {run[0].text!r}, not a "
                f"multiple of source.groups={size}; correct the number"
            )
        return size


def load_annotations(root: Path) -> dict[int, Any] | None:
    """Episode number -> its entries as written; None without the file.

    Raises:
        MemerError: the file is no object of `episode_N`.
    """
    path = root / ANNOTATION_FILE
    if not path.exists():
        return None
    value = read_json(path, missing="")
    if not isinstance(value, dict):
        raise MemerError(f"{path}: holds a {type(value).__name__}, must be an object of episode_N: entries")
    found: dict[int, Any] = {}
    for key, entries in value.items():
        number = key.removeprefix("episode_")
        if not key.startswith("episode_") or not number.isdecimal():
            raise MemerError(f"{path}: key {key!r}, must be episode_N")
        found[int(number)] = entries
    return found


def parse_entries(value: Any, *, where: str) -> list[Entry]:
    """Entries of one episode, checked.

    Args:
        value: as read, a list of [text, frames].
        where: names file and episode in messages.

    Raises:
        MemerError: an entry of another form, an empty text, or less than one frame.
    """
    if not isinstance(value, list):
        raise MemerError(f"{where}: holds a {type(value).__name__}, must be a list of [text, frames]")
    entries: list[Entry] = []
    for number, item in enumerate(value):
        if not isinstance(item, list | tuple) or len(item) != 2:
            raise MemerError(f"{where} entry {number}: {item!r}, must be [text, frames]")
        text, frames = item
        if not isinstance(text, str) or not text.strip():
            raise MemerError(f"{where} entry {number}: text {text!r} is empty or no text; name the subtask")
        if not isinstance(frames, int) or isinstance(frames, bool) or frames < 1:
            raise MemerError(f"{where} entry {number}: {frames!r} frames, must be a whole number from 1 on")
        entries.append(Entry(text, frames))
    return entries


def _key(text: str) -> str:
    return label_key(text).casefold()
