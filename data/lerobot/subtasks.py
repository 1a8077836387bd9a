"""Subtask labels that a data set carries itself, in all the forms that occur.

Each form gives one label or None per frame, and an id per frame where the form has spans of its own. A
missing label is never invented. Source: spec of the format, section 7.
"""

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.lerobot.findings import Findings
from data.lerobot.language import PERSISTENT, LanguageRow, normalize_cell
from data.lerobot.meta import EpisodeEntry, Info, as_whole, read_jsonl, read_parquet, text_table
from data.lerobot.tables import EpisodeRows
from data.spans import Span, resolve_spans
from memer.episode import Segment, normalize_label, segments_from_labels
from memer.errors import UsageError

#: String columns that `native` looks for, in this order (simple_subgoal, grounded_subgoal: RoboMME).
STRING_COLUMNS = ("subtask", "simple_subgoal", "grounded_subgoal")
SARM_PREFIXES = ("", "sparse_", "dense_")


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels of one episode from one source.

    Attributes:
        source: the form they came from.
        labels: one label or None per frame.
        ids: one number per frame that also separates equal neighbours, or None.
    """

    source: str
    labels: list[str | None]
    ids: list[int] | None = None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Runs of equal labels."""
        return segments_from_labels(self.labels, self.ids)


def one_spelling(texts: Iterable[str | None]) -> list[str | None]:
    """Normalise whitespace, None for blank or "None", and give equal texts (after NFC) their first spelling.

    >>> one_spelling(["a  b", "None", None, " a b"])
    ['a b', None, None, 'a b']
    """
    first: dict[str, str] = {}
    result: list[str | None] = []
    for text in texts:
        label = normalize_label(text or "")
        if not label or label == "None":
            result.append(None)
        else:
            result.append(first.setdefault(unicodedata.normalize("NFC", label), label))
    return result


class SubtaskReader:
    """Finds and reads the subtask labels of episodes.

    Args:
        root: folder of the data set.
        info: its info.json.
        source: `native`, one form by name, or `none`.
        findings: takes what is wrong with the tables of names.

    Raises:
        UsageError: no such form.
    """

    def __init__(self, root: Path, info: Info, *, source: str, findings: Findings) -> None:
        self.source = source
        self._info = info
        forms = (
            "native",
            "none",
            "subtask_index",
            "language",
            "sarm",
            "sarm:sparse",
            "sarm:dense",
            "robocoin",
        )
        if source not in forms and not source.startswith("column:"):
            raise UsageError(f"label_source={source!r}; known: {', '.join(forms)}, column:NAME")
        strings = [name for name in STRING_COLUMNS if name in info.features]
        self._columns = [source.removeprefix("column:")] if source.startswith("column:") else strings
        self._subtasks = (
            self._load_subtasks(root, findings) if source in ("native", "subtask_index") else None
        )
        path = root / "annotations" / "subtask_annotations.jsonl"
        self._robocoin: dict[int, str] | None = None
        if source in ("native", "robocoin") and path.is_file():
            rows = [row for row in read_jsonl(path) if "subtask_index" in row and "subtask" in row]
            where = f"{path}: subtask_index"
            self._robocoin = {as_whole(r["subtask_index"], where): str(r["subtask"]) for r in rows}

    def _load_subtasks(self, root: Path, findings: Findings) -> dict[int, str] | None:
        path = root / "meta" / "subtasks.parquet"
        if not path.is_file():
            return None
        table = read_parquet(path)
        names = text_table(table, key="subtask_index", text="subtask", where=path)
        if list(names) != list(range(len(names))):
            findings.warning(
                "subtask_table",
                file="meta/subtasks.parquet",
                value=f"rows in the order {list(names)[:8]}",
                advice="read by value; readers by position take wrong labels",
            )
        spellings = one_spelling(names[key] for key in sorted(names))
        return {key: label for key, label in zip(sorted(names), spellings, strict=True) if label is not None}

    @property
    def columns(self) -> list[str]:
        """Table columns that labels may need."""
        if self.source == "none":
            return []
        return ["subtask_index", "subtask_annotation", PERSISTENT, *self._columns]

    def read(
        self, entry: EpisodeEntry, rows: EpisodeRows, *, timestamps: NDArray[np.float64], findings: Findings
    ) -> Labels | None:
        """The labels of one episode from the first form that labels a frame; None if no form is present.

        Args:
            entry: the episode.
            rows: its table.
            timestamps: float64[T], row clock in seconds; language rows are placed on it.
            findings: takes disagreements between forms, and labels without a text.
        """
        if self.source == "none":
            return None
        found: list[Labels] = []
        if self.source in ("native", "subtask_index"):
            found += self._from_index(entry, rows, findings)
        if self.source in ("native", "language"):
            found += self._from_language(entry, rows, timestamps, findings)
        for column in self._columns if self.source == "native" or self.source.startswith("column:") else []:
            texts = rows.texts(column)
            if texts is not None:
                found.append(Labels(f"column:{column}", one_spelling(texts)))
        if self.source == "native" or self.source.startswith("sarm"):
            found += self._from_sarm(entry, len(rows), findings)
        if self.source in ("native", "robocoin"):
            found += self._from_robocoin(entry, rows, findings)
        if not found:
            return None
        labelled = [labels for labels in found if any(label is not None for label in labels.labels)]
        chosen = (labelled or found)[0]
        for other in labelled:
            pairs = zip(chosen.labels, other.labels, strict=True)
            differing = [k for k, (a, b) in enumerate(pairs) if a is not None and b is not None and a != b]
            grounded = other.source == "column:grounded_subgoal"  # differs by design: it adds coordinates
            if differing and not grounded:
                findings.warning(
                    "labels_differ",
                    episode=entry.index,
                    frame=differing[0],
                    value=f"{chosen.source} and {other.source} differ on {len(differing)} frames",
                    advice=f"{chosen.source} is used; label_source chooses",
                )
        return chosen

    def _from_index(self, entry: EpisodeEntry, rows: EpisodeRows, findings: Findings) -> list[Labels]:
        numbers = rows.integers("subtask_index")
        if numbers is None:
            return []
        if self._subtasks is None:
            findings.warning(
                "subtask_table",
                episode=entry.index,
                value="subtask_index without meta/subtasks.parquet",
                advice="the numbers have no texts; treated as unlabelled",
            )
            return []
        unknown = sorted({int(n) for n in numbers if n >= 0 and int(n) not in self._subtasks})
        if unknown:
            first = int(np.flatnonzero(np.isin(numbers, unknown))[0])
            findings.warning(
                "subtask_unknown",
                episode=entry.index,
                frame=first,
                value=f"subtask_index {unknown} not in meta/subtasks.parquet",
                advice="treated as unlabelled",
            )
        return [Labels("subtask_index", [self._subtasks.get(int(n)) for n in numbers])]

    def _from_language(
        self, entry: EpisodeEntry, rows: EpisodeRows, timestamps: NDArray[np.float64], findings: Findings
    ) -> list[Labels]:
        if PERSISTENT not in rows.table.column_names:
            return []
        column = rows.table.column(PERSISTENT)
        cell: Any = None
        for k in range(len(column)):  # the list is repeated on every row; a null cell says nothing
            if column[k].is_valid:
                cell = column[k].as_py()
                break
        try:
            items = normalize_cell(cell)
        except ValueError as error:
            findings.error(
                "language_type", episode=entry.index, value=str(error), advice="write the column again"
            )
            return []
        subtasks = sorted((r for r in items if r.style == "subtask" and r.time_s is not None), key=_time)
        labels: list[str | None] = [None] * len(rows)
        ids = [-1] * len(rows)
        clock = timestamps.astype(np.float32)
        texts = one_spelling(row.content for row in subtasks)
        for number, (row, text) in enumerate(zip(subtasks, texts, strict=True)):
            start = int(np.searchsorted(clock, np.float32(_time(row))))
            off_frame = start == len(clock) or clock[start] != np.float32(_time(row))
            if off_frame:
                findings.warning(
                    "language_time",
                    episode=entry.index,
                    value=f"subtask at {_time(row):g} s lies on no frame",
                    advice="takes effect at the first frame after it"
                    if start < len(clock)
                    else "never takes effect",
                )
            if number == 0 and start > 0:
                findings.warning(
                    "language_late_start",
                    episode=entry.index,
                    value=f"first subtask at frame {start}",
                    advice="earlier frames are unlabelled",
                )
            labels[start:] = [text] * (len(labels) - start)
            ids[start:] = [number] * (len(ids) - start)
        return [Labels("language", labels, ids)]

    def _from_sarm(self, entry: EpisodeEntry, num_frames: int, findings: Findings) -> list[Labels]:
        wanted = {"sarm:sparse": ("sparse_",), "sarm:dense": ("dense_",)}.get(self.source, SARM_PREFIXES)
        for prefix in wanted:
            names = entry.extra.get(f"{prefix}subtask_names")
            if names is None and f"{prefix}subtask_names" not in entry.extra:
                continue
            source = f"sarm:{prefix.rstrip('_')}" if prefix else "sarm"
            if not names:
                if prefix == wanted[-1] or not any(entry.extra.get(f"{p}subtask_names") for p in wanted):
                    return [Labels(source, [None] * num_frames)]
                continue
            starts, ends = (self._sarm_frames(entry.extra, prefix, edge) for edge in ("start", "end"))
            if starts is None or ends is None or not len(names) == len(starts) == len(ends):
                findings.warning(
                    "sarm_columns",
                    episode=entry.index,
                    value=f"{prefix}subtask_names has {len(names)} entries without matching frames",
                    advice="treated as unlabelled",
                )
                return [Labels(source, [None] * num_frames)]
            texts = one_spelling(str(name) for name in names)
            spans = [Span(a, b, t) for a, b, t in zip(starts, ends, texts, strict=True) if t is not None]
            resolved = resolve_spans(spans, num_frames=num_frames)
            labels: list[str | None] = [None] * num_frames
            ids = [-1] * num_frames
            for number, segment in enumerate(resolved.segments):
                labels[segment.start : segment.end] = [segment.label] * (segment.end - segment.start)
                ids[segment.start : segment.end] = [number] * (segment.end - segment.start)
            if resolved.overlap_frames:
                findings.warning(
                    "label_overlap",
                    episode=entry.index,
                    frame=resolved.overlap_frames[0],
                    value=f"{len(resolved.overlap_frames)} frames in two spans of {source}",
                    advice="the later span wins",
                )
            return [Labels(source, labels, ids)]
        return []

    def _sarm_frames(self, extra: Mapping[str, Any], prefix: str, edge: str) -> list[int] | None:
        frames = extra.get(f"{prefix}subtask_{edge}_frames")
        if frames is not None:
            return [int(k) for k in frames]
        times = extra.get(f"{prefix}subtask_{edge}_times")
        return None if times is None else [int(float(t) * self._info.fps) for t in times]

    def _from_robocoin(self, entry: EpisodeEntry, rows: EpisodeRows, findings: Findings) -> list[Labels]:
        if self._robocoin is None or "subtask_annotation" not in rows.table.column_names:
            return []
        cells: Sequence[Any] = rows.table.column("subtask_annotation").to_pylist()
        names = self._robocoin
        valid = [[int(n) for n in (cell or ()) if n is not None and int(n) in names] for cell in cells]
        several = [k for k, numbers in enumerate(valid) if len(set(numbers)) > 1]
        if several:
            findings.warning(
                "label_several",
                episode=entry.index,
                frame=several[0],
                value=f"{len(several)} frames with several subtasks",
                advice="the first entry is used",
            )
        return [Labels("robocoin", one_spelling(names[n[0]] if n else None for n in valid))]


def _time(row: LanguageRow) -> float:
    assert row.time_s is not None
    return row.time_s
