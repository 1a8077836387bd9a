"""Decoding of video cameras: one forward pass per request, every frame decoded and converted once.

Handles live inside one generator of one process: nothing open is ever pickled, cached or carried over a fork.
What is cached per process is plain data, the presentation times of a file's pictures.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import av
import numpy as np
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray

from memer.errors import MemerError


@dataclass(slots=True)
class DecodeCounter:
    """What this process has decoded; tests and benchmarks read it.

    Attributes:
        opened: containers opened for decoding.
        seeks: jumps to a key frame.
        decoded: pictures that came out of a decoder.
        converted: pictures converted to RGB.
    """

    opened: int = 0
    seeks: int = 0
    decoded: int = 0
    converted: int = 0

    def reset(self) -> None:
        """Start counting again."""
        self.opened = self.seeks = self.decoded = self.converted = 0


decode_counter = DecodeCounter()


@dataclass(frozen=True, slots=True)
class VideoTable:
    """The pictures of one video file in presentation order.

    Attributes:
        pts: int64[F], ascending, in units of `time_base`.
        time_base: seconds per unit.
        fps: average rate the stream states, 0.0 if it states none.
        size: (height, width), px.
    """

    pts: NDArray[np.int64]
    time_base: float
    fps: float
    size: tuple[int, int]

    def __len__(self) -> int:
        return len(self.pts)

    @property
    def times(self) -> NDArray[np.float64]:
        """float64[F], seconds from the start of the file's clock."""
        return np.multiply(self.pts, self.time_base, dtype=np.float64)


_TABLES: OrderedDict[tuple[str, int, int], VideoTable] = OrderedDict()
_MAX_TABLES = 64


def video_table(path: Path) -> VideoTable:
    """The presentation times of a file's pictures, read without decoding; cached per process.

    Raises:
        MemerError: the file is missing, is no video or has pictures without a time.
    """
    try:
        stat = path.stat()
    except OSError:
        raise MemerError(f"{path}: video file missing") from None
    key = (str(path), stat.st_mtime_ns, stat.st_size)
    if key in _TABLES:
        _TABLES.move_to_end(key)
        return _TABLES[key]
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise MemerError(f"{path}: no video stream")
            stream = container.streams.video[0]
            pts = [packet.pts for packet in container.demux(stream) if packet.size and not packet.is_discard]
            time_base = float(stream.time_base or 0)
            fps = float(stream.average_rate or 0)
            size = (int(stream.height), int(stream.width))
    except (av.FFmpegError, OSError) as error:
        raise MemerError(f"{path}: cannot be read as video ({error})") from None
    if not pts or time_base <= 0 or any(value is None for value in pts):
        raise MemerError(f"{path}: no pictures, or pictures without a time")
    table = VideoTable(np.sort(np.asarray(pts, dtype=np.int64)), time_base, fps, size)
    _TABLES[key] = table
    while len(_TABLES) > _MAX_TABLES:
        _TABLES.popitem(last=False)
    return table


def decode_pictures(path: Path, positions: Sequence[int], *, threads: int = 1) -> Iterator[NDArray[np.uint8]]:
    """Decode pictures by their position in presentation order, in one forward pass.

    The pass starts at the key frame at or before the first position; pictures in between are decoded, as they
    must be, but not converted.

    Args:
        path: video file.
        positions: strictly ascending positions in the file.
        threads: decoder threads.

    Yields:
        uint8[H, W, 3], RGB, one per position.

    Raises:
        MemerError: the file is unreadable or ends before a position.
    """
    if not len(positions):
        return
    table = video_table(path)
    if positions[-1] >= len(table):
        raise MemerError(f"{path}: picture {positions[-1]} asked for, the file has {len(table)}")
    targets = [int(table.pts[position]) for position in positions]
    reformatter = VideoReformatter()
    done = 0
    try:
        # A file without a usable index may seek to behind the target; it is then read from its start.
        for seek in (True, False) if positions[0] > 0 else (False,):
            for picture in _pictures_from(path, targets[0] if seek else None, threads):
                if picture.pts is None or picture.pts < targets[done]:
                    continue
                if picture.pts > targets[done]:
                    break
                decode_counter.converted += 1
                done += 1
                yield np.asarray(reformatter.reformat(picture, format="rgb24").to_ndarray(), dtype=np.uint8)
                if done == len(targets):
                    return
            if done:
                break
    except av.FFmpegError as error:
        raise MemerError(f"{path}: decoding failed before picture {positions[done]} ({error})") from None
    raise MemerError(f"{path}: picture {positions[done]} cannot be decoded")


def _pictures_from(path: Path, pts: int | None, threads: int) -> Iterator[av.VideoFrame]:
    """Decoded pictures in order, from the key frame at or before `pts` (None: from the start)."""
    with av.open(str(path)) as container:
        decode_counter.opened += 1
        stream = container.streams.video[0]
        stream.codec_context.thread_count = threads
        if pts is not None:
            container.seek(pts, stream=stream, backward=True)
            decode_counter.seeks += 1
        for picture in container.decode(stream):
            decode_counter.decoded += 1
            yield picture


@dataclass(frozen=True, slots=True)
class VideoFrames:
    """The frames of one camera in one episode, as positions in a video file (see memer.episode.FrameSource).

    Attributes:
        path: video file.
        start: position of frame 0 in the file.
        length: number of frames.
        positions: position of every frame, only where they do not simply follow `start`.
        threads: decoder threads.
    """

    path: Path
    start: int
    length: int
    positions: tuple[int, ...] | None = None
    threads: int = 1

    @property
    def prepared(self) -> bool:
        """Video frames still have the camera's size."""
        return False

    def __len__(self) -> int:
        return self.length

    def frames(self, indices: Sequence[int] | None = None) -> Iterator[NDArray[np.uint8]]:
        """Yield uint8[H, W, 3] RGB for strictly ascending `indices` (None: all)."""
        chosen = list(range(self.length)) if indices is None else check_ascending(indices, self.length)
        positions = [self.start + k if self.positions is None else self.positions[k] for k in chosen]
        return decode_pictures(self.path, positions, threads=self.threads)


def check_ascending(indices: Sequence[int], length: int) -> list[int]:
    """`indices` as a list of int, refused unless strictly ascending inside [0, length)."""
    chosen = [int(k) for k in indices]
    if any(b <= a for a, b in pairwise(chosen)):
        raise ValueError(f"frame indices must be strictly ascending: {chosen}")
    if chosen and not 0 <= chosen[0] <= chosen[-1] < length:
        raise ValueError(f"frame indices {chosen[0]}..{chosen[-1]} leave the {length} frames")
    return chosen
