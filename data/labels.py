"""Labelers: where an episode's subtask segments come from.

A labeler is a picklable callable, episode in, episode out (data.sources.Labeler). `NativeLabels` keeps what
the source read, `FileLabels` takes a user's JSON or CSV file, `GripperLabels` cuts at the transitions of one
channel.
"""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data.spans import OverlapPolicy, Span, resolve_spans
from memer.discover import transitions
from memer.episode import Episode, Segment, normalize_label
from memer.errors import MemerError, SourceUnavailableError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLabels:
    """Keeps the segments that the source itself carries."""

    def __call__(self, episode: Episode) -> Episode:
        """The episode as it is."""
        return episode


@dataclass(slots=True, kw_only=True)
class FileLabels:
    """Segments from a user's file: rows or objects with `episode, start, end, label`.

    Frames are counted from the start of the episode, ranges are half-open. JSON files hold a list of objects,
    or an object with such a list under `segments`; CSV files have a header line. Episodes that the
    file does not name stay unlabelled.

    Args:
        path: the file, `.json`, `.jsonl` or `.csv`.
        overlap: who owns a frame in two ranges: the `later` one, the `earlier` one, or `error`.

    Raises:
        SourceUnavailableError: no such file.
        MemerError: it cannot be read; the message names the row.
    """

    path: str
    overlap: OverlapPolicy = "error"
    _spans: dict[int, list[Span]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.overlap not in ("later", "earlier", "error"):
            raise UsageError(f"labels.overlap={self.overlap!r}, must be later, earlier or error")
        self._spans = {}
        for where, row in _read_rows(Path(self.path)):
            numbers: list[int] = []
            for key in ("episode", "start", "end"):
                numbers.append(_whole(row.get(key), f"{where}: {key}"))
            label = normalize_label(str(row.get("label") or ""))
            if not label:
                raise MemerError(f"{where}: label is empty; every row needs episode, start, end, label")
            if numbers[1] < 0 or numbers[2] < numbers[1]:
                raise MemerError(
                    f"{where}: range [{numbers[1]}, {numbers[2]}) is negative; frames, half-open"
                )
            self._spans.setdefault(numbers[0], []).append(Span(numbers[1], numbers[2], label))

    @property
    def episodes(self) -> list[int]:
        """Numbers of the episodes that the file names, ascending."""
        return sorted(self._spans)

    def __call__(self, episode: Episode) -> Episode:
        """The episode with the file's segments; what the overlap policy settled goes to `metadata`."""
        where = f"{self.path}: episode {episode.episode_index}"
        spans = self._spans.get(episode.episode_index, [])
        for span in spans:
            if span.end > episode.num_frames:
                raise MemerError(
                    f"{where}: {span.label!r} ends at frame {span.end}, the episode has "
                    f"{episode.num_frames}; ends are half-open frame numbers of the episode"
                )
        resolved = resolve_spans(spans, num_frames=episode.num_frames, overlap=self.overlap, where=where)
        metadata = {**episode.metadata, "label_source": "file", "label_spans": resolved.to_dict()}
        return replace(episode, segments=resolved.segments, metadata=metadata)


def _read_rows(path: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    """(where, row) of every row of a label file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise SourceUnavailableError(f"{path}: no such label file; labels.path names it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise MemerError(f"{path}: cannot be read ({error})") from None
    if path.suffix == ".csv":
        reader = csv.DictReader(io.StringIO(text), skipinitialspace=True)
        missing = [
            key for key in ("episode", "start", "end", "label") if key not in (reader.fieldnames or ())
        ]
        if missing:
            raise MemerError(
                f"{path}: header lacks {', '.join(missing)}; found {reader.fieldnames or 'no header'}"
            )
        for row in reader:
            yield f"{path}: line {reader.line_num}", row
        return
    try:
        if path.suffix == ".jsonl":
            rows: Any = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            rows = json.loads(text)
    except ValueError as error:
        raise MemerError(f"{path}: not JSON ({error})") from None
    if isinstance(rows, dict):
        rows = rows.get("segments")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise MemerError(f"{path}: must hold a list of objects with episode, start, end, label")
    for number, row in enumerate(rows, start=1):
        yield f"{path}: entry {number}", row


def _whole(value: Any, where: str) -> int:
    """A whole number given as a number or as text, refused otherwise."""
    if isinstance(value, str) and value.strip().lstrip("-").isdigit():
        return int(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and value == int(value):
        return int(value)
    raise MemerError(f"{where} is {value!r}, must be a whole number")


@dataclass(frozen=True, slots=True, kw_only=True)
class GripperLabels:
    """Segments between the transitions of one channel: n names need exactly n - 1 transitions.

    Args:
        names: label of each segment, in order.
        feature: `action` or `state`.
        channel: number (negative counts from the end) or component name.
        threshold: the channel is closed above it, in the channel's units.
        min_frames: shorter excursions across the threshold are ignored.

    A transition belongs to the first frame with the new value.
    """

    names: Sequence[str]
    feature: Literal["action", "state"] = "action"
    channel: int | str = -1
    threshold: float = 0.5
    min_frames: int = 1

    def __post_init__(self) -> None:
        if self.feature not in ("action", "state"):
            raise UsageError(f"labels.feature={self.feature!r}, must be action or state")
        names = tuple(normalize_label(str(name)) for name in self.names)
        if not names or not all(names):
            raise UsageError(f"labels.names={list(self.names)!r}, must be a list of segment labels")
        if self.min_frames < 1:
            raise UsageError(f"labels.min_frames={self.min_frames}, must be >= 1")
        object.__setattr__(self, "names", names)

    def __call__(self, episode: Episode) -> Episode:
        """The episode with one segment per name.

        Raises:
            MemerError: another number of transitions.
            UsageError: no such channel.
        """
        where = f"episode {episode.episode_index} of {episode.source}"
        closed = self._values(episode, where) > self.threshold
        edges = transitions(closed, least=self.min_frames)
        if len(edges) != len(self.names) - 1:
            found = ", ".join(map(str, edges)) or "none"
            raise MemerError(
                f"{where}: {self.feature}[{self.channel}] crosses {self.threshold:g} {len(edges)} times "
                f"(frames {found}), {len(self.names)} names need {len(self.names) - 1}; "
                "set labels.names, labels.channel or labels.min_frames, or leave the episode out"
            )
        spans = pairwise([0, *edges, episode.num_frames])
        segments = tuple(
            Segment(start, end, name) for (start, end), name in zip(spans, self.names, strict=True)
        )
        return replace(episode, segments=segments, metadata={**episode.metadata, "label_source": "gripper"})

    def _values(self, episode: Episode, where: str) -> np.ndarray:
        array = episode.action if self.feature == "action" else episode.state
        names = list(episode.metadata.get(f"{self.feature}_names") or ())
        channel = self.channel
        if isinstance(channel, str):
            if channel not in names:
                raise UsageError(f"{where}: {self.feature} has no component {channel!r}; components: {names}")
            channel = names.index(channel)
        if not -array.shape[1] <= channel < array.shape[1]:
            raise UsageError(f"{where}: {self.feature} has {array.shape[1]} components, channel={channel}")
        return array[:, channel]
