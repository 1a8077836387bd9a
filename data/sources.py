"""What a source of demonstrations offers, and how the inputs of a build are named by one hash."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from memer.episode import Episode
from memer.errors import SourceUnavailableError

#: Bytes read from both ends of a large input file for its fingerprint.
_PROBE_BYTES = 64 * 1024


@runtime_checkable
class Source(Protocol):
    """A set of demonstrations. Sources are pickled into worker processes, which open their own handles."""

    @property
    def name(self) -> str:
        """Name of the data set."""
        ...

    @property
    def fps(self) -> float:
        """Frames per second of the clock frame_index / fps."""
        ...

    @property
    def camera_keys(self) -> tuple[str, ...]:
        """Cameras that the episodes offer."""
        ...

    def indices(self) -> list[int]:
        """The source's own numbers of the episodes that are present, ascending."""
        ...

    def episode(self, index: int) -> Episode:
        """One episode; frames are decoded when asked for."""
        ...

    def report(self) -> dict[str, Any]:
        """Findings about the source as plain JSON values."""
        ...


class Labeler(Protocol):
    """Gives an episode its segments (`labels=native | file | gripper | discover`)."""

    def __call__(self, episode: Episode) -> Episode:
        """The episode with segments; without any where this labeler knows none."""
        ...


def inputs_description(values: Any) -> Any:
    """`values` as plain JSON, each string that names a file or folder followed by its fingerprint.

    A rebuild in a started directory compares these descriptions, so that a changed label file or data set is
    noticed although its path is the same.
    """
    if isinstance(values, Mapping):
        return {str(key): inputs_description(value) for key, value in sorted(values.items())}
    if isinstance(values, str):
        path = Path(values)
        try:
            is_path = bool(values) and ("/" in values or path.suffix != "") and path.exists()
        except OSError:
            is_path = False
        return {"path": values, "fingerprint": path_fingerprint(path)} if is_path else values
    if isinstance(values, Sequence):
        return [inputs_description(value) for value in values]
    if isinstance(values, Path):
        return inputs_description(str(values))
    if values is None or isinstance(values, bool | int | float):
        return values
    return str(values)


def path_fingerprint(path: Path) -> str:
    """SHA-256 over names, sizes, and the first and last 64 KiB of each file, whatever its times."""
    digest = hashlib.sha256()
    try:
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        for file in files:
            size = file.stat().st_size
            digest.update(f"{file.relative_to(path).as_posix()}\0{size}\0".encode())
            with file.open("rb") as stream:
                digest.update(stream.read(_PROBE_BYTES))
                if size > _PROBE_BYTES:
                    stream.seek(max(_PROBE_BYTES, size - _PROBE_BYTES))
                    digest.update(stream.read(_PROBE_BYTES))
    except OSError as error:
        raise SourceUnavailableError(f"{path}: cannot be read ({error.strerror})") from None
    return digest.hexdigest()


def json_hash(values: Any) -> str:
    """SHA-256 of the canonical JSON text of plain values."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
