"""Pieces to shards, in the order of episodes."""

import hashlib
import os
import tarfile
from pathlib import Path
from typing import Any, BinaryIO

from data.files import read_json
from data.shards.layout import PartEntry, shard_name
from data.shards.pieces import piece_path, record_path
from memer.errors import MemerError
from memer.folders import write_json


class ShardJoiner:
    """Appends pieces to `shard-%06d.tar` files and remembers what lies where.

    Where a shard ends depends only on the sizes of the pieces in their order, never on time or processes. A
    closed shard leaves `shard-%06d.tar.json` in the work folder, from which the next start goes on; an open
    one is redone.

    Attributes:
        entries: parts joined so far, in order.
        episodes: {episode_index, num_frames, labelled_frames, images, parts} per joined episode.
        shards: {name, bytes, sha256, frames, parts} per closed shard.
        joined: episodes in closed shards when this object was made.
    """

    def __init__(self, folder: Path, *, work: Path, max_bytes: int) -> None:
        self._folder = folder
        self._work = work
        self._max_bytes = max_bytes
        self._stream: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._position = 0
        self._first_entry = 0
        self._first_episode = 0
        self._pieces: list[int] = []
        self.entries: list[PartEntry] = []
        self.episodes: list[dict[str, Any]] = []
        self.shards: list[dict[str, Any]] = []
        self._restore()
        self.joined = frozenset(row["episode_index"] for row in self.episodes)

    @property
    def num_frames(self) -> int:
        """Frames joined so far."""
        return sum(row["num_frames"] for row in self.episodes)

    def add(self, record: dict[str, Any]) -> None:
        """Append one piece; its record is what `write_piece` returned."""
        if self._stream is not None and self._position + record["bytes"] > self._max_bytes:
            self.finish()
        if self._stream is None:
            self._open()
        assert self._stream is not None
        piece = piece_path(self._work / "pieces", record["episode_index"])
        start, remaining = self._position, int(record["bytes"])
        with piece.open("rb") as reader:
            while remaining:
                block = reader.read(min(remaining, 1 << 20))
                if not block:
                    raise MemerError(f"{piece}: shorter than recorded; run the same command again")
                self._append(block)
                remaining -= len(block)
        number = len(self.shards)
        self.entries += [PartEntry.from_dict(p).moved(shard=number, by=start) for p in record["parts"]]
        row = {name: record[name] for name in ("episode_index", "num_frames", "labelled_frames", "images")}
        self.episodes.append({**row, "parts": len(record["parts"]), "segments": record["segments"]})
        self._pieces.append(record["episode_index"])

    def finish(self) -> None:
        """Close the open shard, if any, and forget its pieces."""
        if self._stream is None:
            return
        # An archive ends with two zero blocks and fills its last record, as tar itself does it.
        end = self._position + 2 * tarfile.BLOCKSIZE
        self._append(b"\0" * (-(-end // tarfile.RECORDSIZE) * tarfile.RECORDSIZE - self._position))
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        self._stream = None
        name = shard_name(len(self.shards))
        os.replace(self._folder / (name + ".tmp"), self._folder / name)
        entries = self.entries[self._first_entry :]
        shard = {
            "name": name,
            "bytes": self._position,
            "sha256": self._digest.hexdigest(),
            "frames": sum(entry.end - entry.start for entry in entries),
            "parts": len(entries),
        }
        state = {
            "shard": shard,
            "entries": [entry.to_dict() for entry in entries],
            "episodes": self.episodes[self._first_episode :],
        }
        write_json(self._work / f"{name}.json", state, durable=True)
        self.shards.append(shard)
        for index in self._pieces:
            piece_path(self._work / "pieces", index).unlink(missing_ok=True)
            record_path(self._work / "pieces", index).unlink(missing_ok=True)
        self._pieces = []

    def _open(self) -> None:
        self._stream = (self._folder / (shard_name(len(self.shards)) + ".tmp")).open("wb")
        self._digest = hashlib.sha256()
        self._position = 0
        self._first_entry = len(self.entries)
        self._first_episode = len(self.episodes)

    def _append(self, block: bytes) -> None:
        assert self._stream is not None
        self._stream.write(block)
        self._digest.update(block)
        self._position += len(block)

    def _restore(self) -> None:
        while True:
            name = shard_name(len(self.shards))
            state_path = self._work / f"{name}.json"
            if not state_path.exists():
                return
            state = read_json(state_path, missing="")
            self.shards.append(state["shard"])
            self.entries += [PartEntry.from_dict(values) for values in state["entries"]]
            self.episodes += state["episodes"]
