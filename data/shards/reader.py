"""Shards to episodes: any frame by its byte offset, without unpacking or duplicates."""

import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.files import read_manifest
from data.shards.layout import FORMAT_VERSION, INDEX_FILE, MANIFEST_FILE, PartEntry
from data.shards.statistics import Moments
from data.shards.writer import combined_statistics
from memer.cameras import decode_jpeg
from memer.contract import Contract
from memer.episode import Episode, InstructionSpan, Segment
from memer.errors import MemerError, SourceUnavailableError, UsageError


class ShardFiles:
    """Positioned reads from the tars of one directory; each process opens its own handles, none is inherited.

    Args:
        folder: the shard directory.
        names: file name per shard number.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder = folder
        self._names = tuple(names)
        self._handles: dict[int, int] = {}
        self._owner = os.getpid()

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """`size` bytes at `offset`.

        Raises:
            SourceUnavailableError: the file cannot be opened.
            MemerError: it ends before.
        """
        if self._owner != os.getpid():
            # A forked child closes its copies and opens files of its own.
            self.close()
            self._owner = os.getpid()
        handle = self._handles.get(shard)
        if handle is None:
            handle = self._handles[shard] = self._open(shard)
        content = os.pread(handle, size, offset)
        if len(content) != size:
            raise MemerError(
                f"{self._folder / self._names[shard]}: ends at byte {offset + len(content)}, {offset + size} "
                "expected; build the shards again"
            )
        return content

    def close(self) -> None:
        """Close every handle of this process."""
        for handle in self._handles.values():
            os.close(handle)
        self._handles = {}

    def _open(self, shard: int) -> int:
        path = self._folder / self._names[shard]
        try:
            return os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise SourceUnavailableError(f"{path}: cannot be opened ({error.strerror})") from None

    def __getstate__(self) -> dict[str, Any]:
        return {"_folder": self._folder, "_names": self._names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._folder, self._names = state["_folder"], state["_names"]
        self._handles = {}
        self._owner = os.getpid()


@dataclass(frozen=True, slots=True, eq=False)
class ShardFrames:
    """One camera of one episode in shards: frames of their slot's size, decoded when asked for.

    Attributes:
        files: where the bytes come from.
        shards: int32[T], shard number per frame.
        offsets: int64[T], byte offset of each JPEG.
        sizes: int32[T], bytes of each JPEG.
        where: names episode and camera in errors.
    """

    files: ShardFiles
    shards: NDArray[np.int32]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int32]
    where: str

    @property
    def prepared(self) -> bool:
        """Always: the writer resized and coded them."""
        return True

    def __len__(self) -> int:
        return len(self.offsets)

    def jpeg(self, index: int) -> bytes:
        """The stored bytes of one frame."""
        if not 0 <= index < len(self.offsets):
            raise IndexError(f"{self.where}: frame {index} of {len(self.offsets)}")
        return self.files.read(int(self.shards[index]), int(self.offsets[index]), int(self.sizes[index]))

    def frames(self, indices: Sequence[int] | None = None) -> Iterator[NDArray[np.uint8]]:
        """Yield uint8[H, W, 3] for `indices` (None: all)."""
        for index in range(len(self)) if indices is None else indices:
            yield decode_jpeg(self.jpeg(index), where=f"{self.where}, frame {index}")


class ShardSet:
    """A directory that `python -m data.build` wrote. Cheap to open, picklable, safe over fork and spawn.

    Args:
        root: the directory.
        name: data set name given to the episodes; the source's own when None. Mixtures need different names.

    Raises:
        SourceUnavailableError: no such directory, or no manifest in it.
        MemerError: a shard is missing, cut off or of another size, or a file is of another version.
    """

    def __init__(self, root: Path | str, *, name: str | None = None) -> None:
        self.root = Path(root)
        self.manifest = read_manifest(
            self.root / MANIFEST_FILE,
            format_version=FORMAT_VERSION,
            kind="shards",
            fields=("source", "episodes", "shards", "index"),
            missing="make it with python -m data.build ... out=DIR",
        )
        self.name = name or str(self.manifest["source"])
        self.contract = Contract.load(self.root)
        self._check_sizes()
        self.parts = self._read_index()
        self._parts_of: dict[int, list[PartEntry]] = {}
        for entry in self.parts:
            self._parts_of.setdefault(entry.episode_index, []).append(entry)
        self._rows = {row["episode_index"]: row for row in self.manifest["episodes"]}
        self.files = ShardFiles(self.root, [shard["name"] for shard in self.manifest["shards"]])

    @property
    def fps(self) -> float:
        """Frames per second."""
        return self.contract.fps

    @property
    def camera_keys(self) -> tuple[str, ...]:
        """Cameras, in the order of the stack."""
        return self.contract.cameras.camera_keys

    def episode_indices(self) -> list[int]:
        """The source's numbers of the stored episodes, ascending."""
        return sorted(self._parts_of)

    def indices(self) -> list[int]:
        """The same as `episode_indices`: a shard set is itself a Source."""
        return self.episode_indices()

    def num_frames(self, index: int) -> int:
        """Frames of an episode, without reading it."""
        return int(self._row(index)["num_frames"])

    def segments(self, index: int) -> tuple[Segment, ...]:
        """Segments of an episode, without reading it."""
        return tuple(Segment(start, end, label) for start, end, label in self._row(index)["segments"])

    def episode(self, index: int) -> Episode:
        """One episode; its frames are decoded when asked for.

        Raises:
            UsageError: no such episode here.
        """
        self._row(index)
        entries = self._parts_of[index]
        first = json.loads(self.files.read(entries[0].shard, *entries[0].json_at))
        return Episode(
            source=self.name,
            episode_index=index,
            fps=float(first["fps"]),
            cameras={key: self._camera(index, key, c) for c, key in enumerate(first["camera_keys"])},
            state=self._rows_of(entries, "state_at"),
            action=self._rows_of(entries, "action_at"),
            instructions=tuple(InstructionSpan(**span) for span in first["instructions"]),
            segments=tuple(Segment(**segment) for segment in first["segments"]),
            metadata=first["metadata"],
        )

    def statistics(self, episodes: Iterable[int] | None = None) -> dict[str, Moments]:
        """Moments of state and action over the given episodes (None: all)."""
        chosen = None if episodes is None else set(episodes)
        return combined_statistics(
            [e for e in self.parts if chosen is None or e.episode_index in chosen], what=self.name
        )

    def report(self) -> dict[str, Any]:
        """Findings of the source that these shards were made from."""
        return dict(self.manifest["source_report"])

    def close(self) -> None:
        """Close this process's file handles; later reads open them again."""
        self.files.close()

    def verify(self) -> Iterator[str]:
        """Read every shard, yield the names of the good ones.

        Raises:
            MemerError: the first file whose SHA-256 differs from the manifest.
        """
        files = [*self.manifest["shards"], {"name": INDEX_FILE, **self.manifest["index"]}]
        for listed in files:
            path = self.root / listed["name"]
            digest = hashlib.sha256()
            with path.open("rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
            if digest.hexdigest() != listed["sha256"]:
                raise MemerError(
                    f"{path}: content differs from the manifest's SHA-256; build the shards again"
                )
            yield listed["name"]

    def _row(self, index: int) -> dict[str, Any]:
        if index not in self._rows:
            raise UsageError(
                f"{self.root}: no episode {index}; present: {_first_few(self.episode_indices())}"
            )
        row: dict[str, Any] = self._rows[index]
        return row

    def _check_sizes(self) -> None:
        for shard in [*self.manifest["shards"], {"name": INDEX_FILE, **self.manifest["index"]}]:
            path = self.root / shard["name"]
            try:
                size = path.stat().st_size
            except OSError:
                raise MemerError(f"{path}: missing; build the shards again") from None
            if size != shard["bytes"]:
                raise MemerError(
                    f"{path}: {size} bytes, {shard['bytes']} in the manifest; build the shards again"
                )

    def _read_index(self) -> tuple[PartEntry, ...]:
        path = self.root / INDEX_FILE
        try:
            rows = path.read_text(encoding="utf-8").splitlines()
            return tuple(PartEntry.from_dict(json.loads(row)) for row in rows)
        except (ValueError, TypeError) as error:
            raise MemerError(f"{path}: cannot be read ({error}); build the shards again") from None

    def _camera(self, index: int, key: str, camera: int) -> ShardFrames:
        entries, step = self._parts_of[index], len(self.camera_keys)
        return ShardFrames(
            self.files,
            np.concatenate([np.full(e.end - e.start, e.shard, np.int32) for e in entries]),
            np.concatenate([np.asarray(e.frame_offsets[camera::step], np.int64) for e in entries]),
            np.concatenate([np.asarray(e.frame_sizes[camera::step], np.int32) for e in entries]),
            f"{self.root}: episode {index}, camera {key}",
        )

    def _rows_of(self, entries: Sequence[PartEntry], place: str) -> NDArray[np.float32]:
        arrays = [
            np.load(io.BytesIO(self.files.read(e.shard, *getattr(e, place))), allow_pickle=False)
            for e in entries
        ]
        return np.concatenate(arrays).astype(np.float32, copy=False)


def _first_few(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:10])) + (", ..." if len(numbers) > 10 else "")
