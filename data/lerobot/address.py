"""Which pictures of a camera's file are the frames of an episode.

Frame k is picture j0 + k, j0 being the picture nearest to the episode's start on the file's clock: counting
stays right where row clocks drift or are shifted. Times are compared only where the counts cannot fit, and
only in lenient mode. Source: spec of the format, section 9, rules 3 to 5.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data.lerobot.findings import Findings
from data.lerobot.meta import EpisodeEntry
from data.lerobot.video import VideoFrames, VideoTable, video_table
from memer.errors import MemerError

#: (camera key, path) -> (start seconds, episode, length) of every listed episode in that file, by start.
FileEpisodes = Mapping[tuple[str, str], Sequence[tuple[float, int, int]]]


def episodes_by_file(entries: Sequence[EpisodeEntry]) -> FileEpisodes:
    """Group the listed episodes by camera and video file."""
    files: dict[tuple[str, str], list[tuple[float, int, int]]] = {}
    for entry in entries:
        for camera, place in entry.videos.items():
            files.setdefault((camera, place.path), []).append((place.from_s, entry.index, entry.length or 0))
    return {key: sorted(listed) for key, listed in files.items()}


def nearest(times: NDArray[np.float64], time_s: float) -> int:
    """Position of the time nearest to `time_s`; the earlier one on a tie.

    >>> nearest(np.array([0.0, 0.1, 0.2]), 0.12)
    1
    """
    right = int(np.searchsorted(times, time_s))
    if right == 0:
        return 0
    if right == len(times):
        return right - 1
    return right if times[right] - time_s < time_s - times[right - 1] else right - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Addressing:
    """Settings of the search.

    Attributes:
        root: folder of the data set.
        fps: the data set's rate.
        mode: `strict` refuses what `lenient` can still match.
        files: see `episodes_by_file`.
        threads: decoder threads of the frames that are found.
    """

    root: Path
    fps: float
    mode: Literal["lenient", "strict"]
    files: FileEpisodes
    threads: int = 1

    def find(
        self,
        entry: EpisodeEntry,
        camera: str,
        path: str,
        *,
        timestamps: NDArray[np.float64],
        findings: Findings,
    ) -> VideoFrames | None:
        """The frames of one camera; None with an error in `findings` if they cannot be had.

        Args:
            entry: the episode.
            camera: camera key.
            path: the file as it was found, relative to the root.
            timestamps: float64[T], row clock in seconds, only used where counting is impossible.
            findings: takes what is wrong.
        """
        length = len(timestamps)
        place = entry.videos[camera]
        where = {"file": path, "episode": entry.index, "camera": camera}
        try:
            table = video_table(self.root / path)
        except MemerError as error:
            missing = not (self.root / path).is_file()
            code = "video_missing" if missing else "video_unreadable"
            text = str(error).removeprefix(f"{self.root / path}: ")
            findings.error(
                code, value=text, advice="fetch or re-encode the file, or leave the camera out", **where
            )
            return None
        listed = self.files.get((camera, place.path), ())
        if math.isnan(place.from_s) and len(listed) > 1:
            findings.error("video_start", value="no from_timestamp", advice="repair meta/episodes", **where)
            return None
        from_s = 0.0 if math.isnan(place.from_s) else place.from_s
        start = nearest(table.times, from_s)
        following = [other for other, index, _ in listed if other > from_s and index != entry.index]
        stop = nearest(table.times, following[0]) if following else len(table)
        alone = len(listed) <= 1
        positions: tuple[int, ...] | None = None
        if len(table) < length or (alone and start + length > len(table)):
            value = f"{len(table) - start} pictures for {length} rows"
            findings.error(
                "video_short",
                value=value,
                advice="the table and the video disagree; record or convert again",
                **where,
            )
            return None
        if start + length > stop:
            positions = self._by_time(table, from_s, timestamps)
            value = f"{max(0, stop - start)} pictures for {length} rows"
            if positions is None or self.mode == "strict":
                findings.error(
                    "video_short",
                    value=value,
                    advice="the table and the video disagree; record or convert again",
                    **where,
                )
                return None
            findings.warning(
                "video_by_time", value=value, advice="frames were matched by time, not by number", **where
            )
        elif alone and len(table) != length:
            value = f"{len(table)} pictures for {length} rows"
            if self.mode == "strict":
                findings.error(
                    "video_long", value=value, advice="cut the video, or read in lenient mode", **where
                )
                return None
            findings.warning("video_long", value=value, advice=f"the first {length} are used", **where)
        self._check_clock(table, start, length, from_s, findings, where)
        return VideoFrames(self.root / path, start, length, positions, self.threads)

    def _by_time(
        self, table: VideoTable, from_s: float, timestamps: NDArray[np.float64]
    ) -> tuple[int, ...] | None:
        """Nearest picture of every row, each used once, all within tolerance; else None."""
        times = table.times
        tolerance = max(1e-4, 0.5 / self.fps)
        found = [nearest(times, from_s + float(t)) for t in timestamps]
        near = all(
            abs(float(times[j]) - from_s - float(t)) <= tolerance
            for j, t in zip(found, timestamps, strict=True)
        )
        ascending = all(a < b for a, b in pairwise(found))
        return tuple(found) if near and ascending else None

    def _check_clock(
        self,
        table: VideoTable,
        start: int,
        length: int,
        from_s: float,
        findings: Findings,
        where: dict[str, object],
    ) -> None:
        if table.fps and abs(table.fps - self.fps) > 1e-2 * self.fps:
            findings.warning(
                "stream_rate",
                value=f"{table.fps:g} against fps {self.fps:g}",
                advice="frames are counted, not timed",
                **where,
            )
        pictures = table.times[start : start + length]
        off_grid = float(np.abs(pictures - pictures[0] - np.arange(len(pictures)) / self.fps).max())
        if max(off_grid, abs(float(pictures[0]) - from_s)) > max(1e-4, 2 * table.time_base):
            value = (
                f"start off by {abs(float(pictures[0]) - from_s):.4f} s, spacing by up to {off_grid:.4f} s"
            )
            findings.warning("pts_grid", value=value, advice="frames are counted, not timed", **where)
