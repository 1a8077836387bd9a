"""Directories of arrays per episode, made beside shards: resumable when written, mapped when read.

Work happens in `OUT.partial`, which becomes `OUT` by one rename at the very end. Killed at any time, the same
command goes on from the finished episodes.
"""

import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from data.building import differences, finished, locked, remember_plan
from data.features.layout import FORMAT_VERSION, MANIFEST_FILE
from data.files import read_json, read_manifest
from data.sources import json_hash
from memer.errors import MemerError
from memer.folders import replacing, write_json

#: What was made of one episode, as plain JSON values; `files` maps the names of its files to their bytes.
Row = dict[str, Any]

#: Mapped files kept open per process.
_OPEN_FILES = 128


def build_directory(
    out: Path,
    *,
    described: Mapping[str, Any],
    episode: Callable[[Path, int], Row],
    finish: Callable[[Path, Sequence[Row]], Mapping[str, Any]],
    desc: str,
    progress: bool,
) -> dict[str, Any]:
    """Make one directory, episode by episode.

    Args:
        out: directory to make; must not exist, be empty, or be an unfinished build of the same inputs.
        described: all inputs as plain values, `episodes` (numbers) among them.
        episode: (folder, number) -> writes the files of an episode and says which.
        finish: (folder, rows) -> writes what belongs to all episodes; what it returns goes into the manifest
            besides `described`, `files` among it.
        desc: for the progress bar.
        progress: show one.

    Returns:
        The manifest.

    Raises:
        UsageError: `out` holds something else.
    """
    manifest = finished(out, described, manifest_file=MANIFEST_FILE)
    if manifest is not None:
        return manifest
    partial = out.with_name(out.name + ".partial")
    with locked(partial) as work:
        # There is one if a build was killed between its manifest and the rename.
        if (partial / MANIFEST_FILE).exists():
            manifest = finished(partial, described, manifest_file=MANIFEST_FILE)
        if manifest is None:
            remember_plan(work, described)
            indices = tqdm(described["episodes"], unit="episode", desc=desc, disable=not progress)
            rows = [_recorded(partial, work, index, episode) for index in indices]
            manifest = {
                **described,
                "inputs": dict(described),
                "input_hash": json_hash(described),
                **finish(partial, rows),
            }
            write_json(partial / MANIFEST_FILE, manifest, durable=True)
        shutil.rmtree(work)
        if out.exists():
            out.rmdir()  # empty, as `finished` saw
        os.replace(partial, out)
    return manifest


def _recorded(partial: Path, work: Path, index: int, episode: Callable[[Path, int], Row]) -> Row:
    """What was made of an episode, now or before the build was stopped."""
    record = work / f"episode_{index:06d}.json"
    if record.exists():
        known: Row = read_json(record, missing="")
        return known
    made = episode(partial, index)
    write_json(record, made, durable=True)
    return made


def save_array(path: Path, array: NDArray[Any]) -> int:
    """Write a .npy beside, flush it to the disk, rename; returns its bytes."""
    with replacing(path, durable=True) as temporary, temporary.open("wb") as stream:
        np.save(stream, array, allow_pickle=False)
    return path.stat().st_size


class ArrayDirectory:
    """What `build_directory` made. Picklable, safe over fork and spawn.

    Args:
        root: the directory.

    Raises:
        SourceUnavailableError: no such directory, or no manifest in it.
        MemerError: a file is missing or of another size, or the form is of another version.
    """

    #: What it holds, for messages.
    kind: ClassVar[str]
    #: Names that its manifest must have.
    manifest_fields: ClassVar[tuple[str, ...]]

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.again = f"make them again with python -m data.build stage={self.kind}"
        self.manifest = read_manifest(
            self.root / MANIFEST_FILE,
            format_version=FORMAT_VERSION,
            kind=self.kind,
            fields=self.manifest_fields,
            missing=self.again,
        )
        for name, size in self.manifest["files"].items():
            path = self.root / name
            found = path.stat().st_size if path.exists() else None
            if found != size:
                raise MemerError(f"{path}: {found} bytes, {size} in the manifest; {self.again}")
        self._open: OrderedDict[str, NDArray[Any]] = OrderedDict()

    def check(self, key: Mapping[str, Any], *, episodes: Iterable[int]) -> None:
        """Refuse arrays of something else.

        Args:
            key: what the arrays depend on in this run.
            episodes: that will be asked for.

        Raises:
            MemerError: naming the differing fields, or the first missing episode.
        """
        # Arrays of another view differ in many fields; the view alone says what is wrong.
        ours, theirs = dict(self.manifest["key"]), dict(key)
        if ours["view"] != theirs["view"]:
            ours, theirs = {"view": ours["view"]}, {"view": theirs["view"]}
        listed = differences(ours, theirs, names=("there", "in this run"))
        if listed:
            raise MemerError(f"{self.root}: {self.kind} of something else ({listed}); {self.again}")
        present = {row["episode_index"] for row in self.manifest["episodes"]}
        missing = sorted(set(episodes) - present)
        if missing:
            raise MemerError(f"{self.root}: no {self.kind} of episode {missing[0]}; {self.again}")

    def close(self) -> None:
        """Unmap every file of this process."""
        self._open.clear()

    def array(self, name: str) -> NDArray[Any]:
        """A file of the directory, mapped read-only.

        Raises:
            MemerError: it cannot be read.
        """
        found = self._open.get(name)
        if found is None:
            try:
                found = np.load(self.root / name, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError) as error:
                raise MemerError(f"{self.root / name}: cannot be read ({error}); {self.again}") from None
            self._open[name] = found
            if len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)
        self._open.move_to_end(name)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}
