"""Reading and checking of one episode: one code serves a read and the report, so they cannot disagree."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data.lerobot.address import Addressing
from data.lerobot.findings import Findings
from data.lerobot.images import ImageFrames
from data.lerobot.language import EVENTS, PERSISTENT, normalize_cell, row_faults
from data.lerobot.meta import EpisodeEntry, Info
from data.lerobot.subtasks import Labels, SubtaskReader
from data.lerobot.tables import EpisodeRows, RowReader, VectorError, vectors
from data.lerobot.video import video_table
from memer.episode import FrameSource, normalize_label
from memer.errors import MemerError

_KEYS = ("episode_index", "frame_index", "index", "timestamp", "task_index", "task")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEpisode:
    """What one episode's files hold, before it becomes a memer.episode.Episode.

    Attributes:
        state: float32[T, S].
        action: float32[T, A].
        cameras: camera key -> frames.
        instruction: text, empty if none was found.
        labels: native labels, or None.
        clock_deviation_s: largest deviation of the row clock from frame_index / fps.
    """

    state: NDArray[np.float32]
    action: NDArray[np.float32]
    cameras: Mapping[str, FrameSource]
    instruction: str
    labels: Labels | None
    clock_deviation_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspector:
    """Loads episodes and says what is wrong with them.

    Attributes:
        root: folder of the data set.
        info: its info.json.
        tasks: task_index -> instruction.
        mode: `strict` makes the forms that are read anyway into errors.
        state_key: column, or None if the set has none.
        action_key: column, or None.
        camera_keys: cameras that are read.
        instruction: text that replaces the data set's own.
        subtasks: reader of native labels.
        addressing: finder of pictures.
        locate: finds an existing file: (entry, camera or None) -> path relative to the root, or None.
        rows: reader of rows.
    """

    root: Path
    info: Info
    tasks: Mapping[int, str]
    mode: Literal["lenient", "strict"]
    state_key: str | None
    action_key: str | None
    camera_keys: tuple[str, ...]
    instruction: str | None
    subtasks: SubtaskReader
    addressing: Addressing
    locate: Callable[[EpisodeEntry, str | None], str | None]
    rows: RowReader

    def load(self, entry: EpisodeEntry, *, findings: Findings, deep: bool = False) -> LoadedEpisode | None:
        """One episode; None with errors in `findings` if it cannot be used.

        Args:
            entry: the episode.
            findings: takes what is wrong.
            deep: also read what only the report needs (every language cell).
        """
        before = len(findings.errors)
        path = self.locate(entry, None)
        if path is None:
            findings.error(
                "table_missing", file=entry.data_path, episode=entry.index, advice="fetch the file"
            )
            return None
        wanted = [*_KEYS, *self.subtasks.columns, *([PERSISTENT, EVENTS] if deep else [])]
        wanted += [key for key in (self.state_key, self.action_key) if key]
        try:
            rows = self.rows.read(self.root / path, entry.index, columns=wanted)
        except MemerError as error:
            text = str(error).removeprefix(f"{self.root / path}: ")
            findings.error(
                "table_unreadable", file=path, episode=entry.index, value=text, advice="fetch it again"
            )
            return None
        try:
            loaded = self._loaded(entry, path, rows, findings=findings, deep=deep)
        except MemerError as error:  # a column that does not hold what its name says
            advice = "write the column again"
            findings.error("column_type", file=path, episode=entry.index, value=str(error), advice=advice)
            return None
        return None if len(findings.errors) > before else loaded

    def _loaded(
        self, entry: EpisodeEntry, path: str, rows: EpisodeRows, *, findings: Findings, deep: bool
    ) -> LoadedEpisode | None:
        if not self._check_rows(entry, path, rows, findings):
            return None
        length = len(rows)
        clock = rows.numbers("timestamp")
        grid = np.arange(length) / self.info.fps
        timestamps = grid if clock is None or not np.isfinite(clock).all() else clock
        deviation = self._check_clock(entry, path, clock, grid, findings)
        state = self._vectors(entry, path, rows, self.state_key, findings)
        action = self._vectors(entry, path, rows, self.action_key, findings)
        cameras = self._cameras(entry, path, rows, timestamps, findings)
        labels = self.subtasks.read(entry, rows, timestamps=timestamps, findings=findings)
        if deep:
            self._check_language(entry, path, rows, findings)
        text = self._instruction(entry, path, rows, findings)
        if state is None or action is None:
            return None
        return LoadedEpisode(
            state=state,
            action=action,
            cameras=cameras,
            instruction=text,
            labels=labels,
            clock_deviation_s=deviation,
        )

    def _check_rows(self, entry: EpisodeEntry, path: str, rows: EpisodeRows, findings: Findings) -> bool:
        """Whether the rows are the episode, whole and in order."""
        where = {"file": path, "episode": entry.index}
        length = len(rows)
        if length == 0 and entry.length:
            value = f"no rows of this episode, {entry.length} listed"
            findings.error("row_count", value=value, advice="meta/episodes points at the wrong file", **where)
            return False
        if length == 0:
            findings.error("zero_length", value="no rows", advice="leave the episode out", **where)
            return False
        if entry.length is not None and length != entry.length:
            value = f"{length} rows, {entry.length} listed"
            findings.error(
                "row_count", value=value, advice="rows are missing or doubled; convert again", **where
            )
            return False
        if not rows.contiguous:
            findings.error(
                "rows_apart", value="rows of other episodes in between", advice="sort the table", **where
            )
            return False
        frames = rows.integers("frame_index")
        if frames is not None and not np.array_equal(frames, np.arange(length)):
            k = int(np.flatnonzero(frames != np.arange(length))[0])
            value = f"frame_index {int(frames[k])} in row {k}"
            findings.error("frame_index", frame=k, value=value, advice="rows must count 0..n-1", **where)
            return False
        numbers = rows.integers("index")
        if numbers is not None and not (np.diff(numbers) == 1).all():
            k = int(np.flatnonzero(np.diff(numbers) != 1)[0]) + 1
            findings.warning(
                "index_gap", frame=k, value=f"index {int(numbers[k])} after {int(numbers[k - 1])}", **where
            )
        if length == 1:
            findings.warning("one_frame", value="one frame", advice="too short to learn from", **where)
        return True

    def _check_clock(
        self,
        entry: EpisodeEntry,
        path: str,
        clock: NDArray[np.float64] | None,
        grid: NDArray[np.float64],
        findings: Findings,
    ) -> float:
        if clock is None:
            return 0.0
        where = {"file": path, "episode": entry.index}
        if not np.isfinite(clock).all():
            k = int(np.flatnonzero(~np.isfinite(clock))[0])
            findings.error(
                "clock_order", frame=k, value=f"timestamp {clock[k]}", advice="write it again", **where
            )
            return 0.0
        if (np.diff(clock) <= 0).any():
            k = int(np.flatnonzero(np.diff(clock) <= 0)[0]) + 1
            value = f"timestamp {clock[k]:.4f} s after {clock[k - 1]:.4f} s"
            findings.error("clock_order", frame=k, value=value, advice="timestamps must increase", **where)
        deviation = np.abs(clock - grid)
        largest = float(deviation.max())
        # float32 stores seconds: its rounding is no fault of the data
        if largest > max(1e-4, float(np.spacing(np.float32(grid[-1])))):
            value = f"row clock up to {largest:.3f} s off frame_index / fps"
            advice = "frames are counted, not timed"
            findings.warning(
                "clock_drift", frame=int(deviation.argmax()), value=value, advice=advice, **where
            )
        return largest

    def _vectors(
        self, entry: EpisodeEntry, path: str, rows: EpisodeRows, key: str | None, findings: Findings
    ) -> NDArray[np.float32] | None:
        if key is None:
            return np.zeros((len(rows), 0), dtype=np.float32)
        where = {"file": path, "episode": entry.index}
        if key not in rows.table.column_names:
            findings.error("column_missing", value=f"no column {key!r}", advice="name another key", **where)
            return None
        shape = self.info.features[key].shape if key in self.info.features else ()
        try:
            array = vectors(rows.table.column(key), width=int(np.prod(shape)) if shape else None)
        except VectorError as fault:
            value = f"{key}: {fault.value}"
            findings.error(
                "vector_form", frame=fault.frame, value=value, advice="write the row again", **where
            )
            return None
        if not np.isfinite(array).all():
            k, i = (int(n) for n in np.argwhere(~np.isfinite(array))[0])
            value = f"{key}[{i}] is {array[k, i]}"
            findings.error(
                "not_finite", frame=k, value=value, advice="leave the episode out or repair it", **where
            )
        return array

    def _cameras(
        self,
        entry: EpisodeEntry,
        path: str,
        rows: EpisodeRows,
        timestamps: NDArray[np.float64],
        findings: Findings,
    ) -> dict[str, FrameSource]:
        cameras: dict[str, FrameSource] = {}
        for key in self.camera_keys:
            where = {"episode": entry.index, "camera": key}
            feature = self.info.features[key]
            if feature.dtype == "image":
                if key not in rows.present:
                    findings.error("column_missing", file=path, value="no picture column", **where)
                    continue
                cameras[key] = ImageFrames(self.root, path, entry.index, key, len(rows))
                continue
            found = self.locate(entry, key)
            if found is None:
                place = entry.videos.get(key)
                advice = "fetch the file, or leave the camera out with source.camera_keys=[...]"
                findings.error("video_missing", file=place.path if place else None, advice=advice, **where)
                continue
            frames = self.addressing.find(entry, key, found, timestamps=timestamps, findings=findings)
            if frames is None:
                continue
            cameras[key] = frames
            size = video_table(frames.path).size
            if feature.picture_size not in (None, size):
                value = f"{size[1]}x{size[0]} px, declared shape {list(feature.shape)}"
                findings.warning(
                    "picture_size", file=found, value=value, advice="the picture is believed", **where
                )
        return cameras

    def _instruction(self, entry: EpisodeEntry, path: str, rows: EpisodeRows, findings: Findings) -> str:
        """Given text, else the rows' task, else the `task` column, else the episode's first listed task."""
        if self.instruction is not None:
            return normalize_label(self.instruction)
        where = {"file": path, "episode": entry.index}
        numbers = rows.integers("task_index")
        texts: list[str | None] | None
        if numbers is not None and self.tasks:
            if len(set(numbers.tolist())) > 1:
                k = int(np.flatnonzero(numbers != numbers[0])[0])
                value = f"{len(set(numbers.tolist()))} tasks in one episode"
                findings.warning(
                    "task_changes", frame=k, value=value, advice="the first row's is used", **where
                )
            if int(numbers[0]) not in self.tasks:
                value = f"task_index {int(numbers[0])} not in the table of tasks"
                findings.error(
                    "task_unknown", frame=0, value=value, advice="give source.instruction=TEXT", **where
                )
                return ""
            text: str | None = self.tasks[int(numbers[0])]
        elif (texts := rows.texts("task")) is not None:
            text = texts[0]
        else:
            text = entry.tasks[0] if entry.tasks else None
        if not normalize_label(text or ""):
            value = "the episode's task is empty" if text is not None else "the episode names no task"
            findings.error("task_empty", value=value, advice="give source.instruction=TEXT", **where)
        return normalize_label(text or "")

    def _check_language(self, entry: EpisodeEntry, path: str, rows: EpisodeRows, findings: Findings) -> None:
        """Rules of the language columns; what can be read anyway is an error in strict mode only."""
        report = findings.error if self.mode == "strict" else findings.warning
        for column in (PERSISTENT, EVENTS):
            if column not in rows.table.column_names:
                continue
            where = {"file": path, "episode": entry.index}
            cells = rows.table.column(column)
            if cells.null_count:
                k = next(i for i in range(len(cells)) if not cells[i].is_valid)
                if not pa.types.is_null(cells.type):
                    report(
                        "language_null",
                        frame=k,
                        value=f"{column} is null",
                        advice="write [] instead",
                        **where,
                    )
            persistent = column == PERSISTENT
            first = None
            for k, cell in enumerate(cells.to_pylist()):
                if cell is None or (persistent and cell == first):
                    continue
                try:
                    items = normalize_cell(cell)
                except ValueError as error:
                    report("language_type", frame=k, value=f"{column}: {error}", **where)
                    continue
                if persistent and first is not None:
                    findings.error(
                        "language_differs",
                        frame=k,
                        value="the persistent list is not the same on all rows",
                        advice="annotate the episode again",
                        **where,
                    )
                    break
                first = cell if persistent else None
                for code, value in row_faults(items, persistent=persistent):
                    report(code, frame=k, value=f"{column}: {value}", **where)
