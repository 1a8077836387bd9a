"""Reading of `meta/`: info.json, the task table and the list of episodes, of v3.x, v2.1 and v2.0.

Decisions are made by what is present, never by the minor version. Facts: spec of the format, sections 1-4, 8.
"""

import json
import math
import os.path
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from memer.errors import MemerError, SourceUnavailableError


@dataclass(frozen=True, slots=True)
class Feature:
    """One entry of info.json's `features`.

    Attributes:
        dtype: numpy name, `string`, `image`, `video` or `language`.
        shape: as declared; pictures may be [H, W, 3] or [3, H, W].
        names: names of the components, flat; empty if not given.
        depth: a quantised depth video, not RGB.
    """

    dtype: str
    shape: tuple[int, ...]
    names: tuple[str, ...] = ()
    depth: bool = False

    @property
    def is_camera(self) -> bool:
        """Whether the feature is a picture."""
        return self.dtype in ("video", "image")

    @property
    def picture_size(self) -> tuple[int, int] | None:
        """(height, width) as declared, or None."""
        if len(self.shape) != 3:
            return None
        first = self.names[0].lower() if self.names else ""
        channels_first = first.startswith("c") or (self.shape[0] in (1, 3) and self.shape[2] not in (1, 3))
        return (self.shape[1], self.shape[2]) if channels_first else (self.shape[0], self.shape[1])


@dataclass(frozen=True, slots=True)
class VideoPlace:
    """Where one camera of one episode lies.

    Attributes:
        path: relative to the root.
        from_s: time of the first frame on the file's clock, seconds; NaN if not stated.
    """

    path: str
    from_s: float


@dataclass(frozen=True, slots=True)
class EpisodeEntry:
    """One listed episode.

    Attributes:
        index: the source's number.
        length: number of rows it should have, None if not stated.
        tasks: instructions listed for it.
        data_path: table, relative to the root; None if the template could not be filled.
        videos: camera key -> place.
        extra: other columns of meta/episodes that label sources need.
    """

    index: int
    length: int | None
    tasks: tuple[str, ...]
    data_path: str | None
    videos: Mapping[str, VideoPlace]
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Info:
    """info.json, checked.

    Attributes:
        version: `codebase_version` as written.
        major: 2 or 3.
        fps: frames per second.
        features: in the order of the file.
        chunks_size: files (v3) or episodes (v2) per chunk.
        data_path: template.
        video_path: template or None.
        raw: everything as read.
    """

    version: str
    major: int
    fps: float
    features: Mapping[str, Feature]
    chunks_size: int
    data_path: str
    video_path: str | None
    raw: Mapping[str, Any]


def load_info(root: Path) -> Info:
    """Read and check `meta/info.json`.

    Raises:
        SourceUnavailableError: there is no data set at `root`.
        MemerError: unreadable, a key missing, fps not positive, or a version this reader does not know.
    """
    path = root / "meta" / "info.json"
    if not path.is_file():
        found = sorted(root.glob("*/meta/info.json")) if root.is_dir() else []
        hint = (
            f"; did you mean {found[0].parent.parent}?"
            if found
            else "; source.root names the folder that holds meta/"
        )
        raise SourceUnavailableError(f"{path}: no LeRobot data set there{hint}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MemerError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(raw, dict):
        raise MemerError(f"{path}: holds {type(raw).__name__}, not an object")
    for key in ("codebase_version", "fps", "features"):
        if key not in raw:
            raise MemerError(f"{path}: key {key!r} is missing")
    version = str(raw["codebase_version"])
    major_text = version.removeprefix("v").split(".")[0]
    if major_text not in ("2", "3"):
        raise MemerError(f"{path}: codebase_version {version!r}; this reader knows v2.0, v2.1 and v3.x")
    fps = raw["fps"]
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not (math.isfinite(fps) and fps > 0):
        raise MemerError(f"{path}: fps is {fps!r}, must be a positive number")
    if not isinstance(raw["features"], dict):
        raise MemerError(f"{path}: features holds {type(raw['features']).__name__}, not an object")
    features = {name: _feature(path, name, entry) for name, entry in raw["features"].items()}
    major = int(major_text)
    default_data, default_video = _DEFAULT_PATHS[major]
    return Info(
        version=version,
        major=major,
        fps=fps,
        features=features,
        chunks_size=max(1, as_whole(raw.get("chunks_size") or 1000, f"{path}: chunks_size")),
        data_path=raw.get("data_path") or default_data,
        video_path=raw.get("video_path", default_video),
        raw=raw,
    )


_DEFAULT_PATHS = {
    2: (
        "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    ),
    3: (
        "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    ),
}


def _feature(path: Path, name: str, entry: Any) -> Feature:
    if not isinstance(entry, dict) or "dtype" not in entry:
        raise MemerError(f"{path}: feature {name!r} has no dtype")
    details: dict[str, Any] = {}
    for key in ("video_info", "info"):
        details |= entry[key] if isinstance(entry.get(key), dict) else {}
    depth = any(details.get(key) for key in ("is_depth_map", "video.is_depth_map"))
    shape = entry.get("shape") or ()
    sizes = shape if isinstance(shape, list | tuple) else (shape,)
    if not all(isinstance(size, int) for size in sizes):
        raise MemerError(f"{path}: feature {name!r} has shape {shape!r}, must be a list of whole numbers")
    return Feature(
        dtype=str(entry["dtype"]),
        shape=tuple(sizes),
        names=tuple(_flat_names(entry.get("names"))),
        depth=bool(depth),
    )


def _flat_names(names: Any) -> Iterator[str]:
    """Component names out of a list, a nested list, an object of lists, or nothing."""
    if isinstance(names, str):
        yield names
    elif isinstance(names, Mapping):
        lists = [value for value in names.values() if isinstance(value, list)]
        yield from _flat_names(lists if lists else list(names))
    elif isinstance(names, list | tuple):
        for name in names:
            yield from _flat_names(name)


def as_whole(value: Any, where: str) -> int:
    """A whole number as int, refused otherwise with `where` in front."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:
        raise MemerError(f"{where} is {value!r}, must be a whole number")
    return int(value)


def read_parquet(path: Path) -> pa.Table:
    """A whole small parquet file, its faults as one line."""
    try:
        return pq.ParquetFile(path).read()
    except FileNotFoundError:
        raise MemerError(f"{path}: missing") from None
    except (pa.ArrowException, OSError) as error:
        raise MemerError(f"{path}: cannot be read as parquet ({str(error).splitlines()[0]})") from None


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON-lines file; blank lines are skipped."""
    rows: list[dict[str, Any]] = []
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MemerError(f"{path}: missing") from None
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise MemerError(f"{path}: line {number} is not JSON ({error})") from None
        if not isinstance(row, dict):
            raise MemerError(f"{path}: line {number} is not an object")
        rows.append(row)
    return rows


def text_table(table: pa.Table, *, key: str, text: str, where: Path) -> dict[int, str]:
    """Integer key -> text, by the value of the key column, whatever the text column is called.

    The text column is the pandas index if the file names one, else `text`, else the only string column.
    """
    if key not in table.column_names:
        raise MemerError(f"{where}: no column {key!r}; found {', '.join(table.column_names)}")
    pandas = json.loads((table.schema.metadata or {}).get(b"pandas", b"{}"))
    named = [name for name in pandas.get("index_columns", []) if isinstance(name, str)]
    strings = [f.name for f in table.schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
    candidates = [n for n in named if n in strings] or [n for n in (text,) if n in strings] or strings
    if len(candidates) != 1:
        raise MemerError(
            f"{where}: which column holds the {text}? found {', '.join(strings) or 'no string column'}"
        )
    keys, texts = table.column(key).to_pylist(), table.column(candidates[0]).to_pylist()
    return {int(k): t for k, t in zip(keys, texts, strict=True) if k is not None and t is not None}


def load_tasks(root: Path, major: int) -> tuple[dict[int, str], list[int]]:
    """task_index -> instruction, and the indices in file order; empty if there is no table."""
    if major >= 3:
        path = root / "meta" / "tasks.parquet"
        if not path.is_file():
            return {}, []
        table = read_parquet(path)
        tasks = text_table(table, key="task_index", text="task", where=path)
        return tasks, [int(k) for k in table.column("task_index").to_pylist() if k is not None]
    path = root / "meta" / "tasks.jsonl"
    if not path.is_file():
        return {}, []
    rows = [row for row in read_jsonl(path) if "task_index" in row]
    numbers = [as_whole(row["task_index"], f"{path}: task_index") for row in rows]
    return {number: str(row.get("task", "")) for number, row in zip(numbers, rows, strict=True)}, numbers


def load_episodes(root: Path, info: Info) -> list[EpisodeEntry]:
    """The listed episodes, ascending by number (duplicates kept, for the report)."""
    cameras = [key for key, feature in info.features.items() if feature.dtype == "video"]
    entries = _episodes_v3(root, info, cameras) if info.major >= 3 else _episodes_v2(root, info, cameras)
    return sorted(entries, key=lambda entry: entry.index)


def _episodes_v2(root: Path, info: Info, cameras: list[str]) -> Iterator[EpisodeEntry]:
    for row in read_jsonl(root / "meta" / "episodes.jsonl"):
        where = f"{root / 'meta/episodes.jsonl'}: episode_index"
        index = as_whole(row.get("episode_index"), where)
        numbers = _numbers(info, index, chunk=index // info.chunks_size, file=0)
        videos = {
            key: VideoPlace(fill(info.video_path, numbers, root, key), 0.0)
            for key in (cameras if info.video_path else [])
        }
        length = row.get("length")
        yield EpisodeEntry(
            index=index,
            length=None if length is None else as_whole(length, f"{where} {index}: length"),
            tasks=tuple(str(task) for task in row.get("tasks") or () if task is not None),
            data_path=fill(info.data_path, numbers, root, ""),
            videos=videos,
        )


def _episodes_v3(root: Path, info: Info, cameras: list[str]) -> Iterator[EpisodeEntry]:
    files = sorted((root / "meta" / "episodes").rglob("*.parquet"))
    if not files:
        raise MemerError(f"{root / 'meta/episodes'}: no parquet file lists the episodes")
    for path in files:
        try:
            file = pq.ParquetFile(path)
            columns = [name for name in file.schema_arrow.names if not name.startswith("stats/")]
            rows = file.read(columns=columns).to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise MemerError(f"{path}: cannot be read as parquet ({str(error).splitlines()[0]})") from None
        for row in rows:
            if row.get("episode_index") is None:
                raise MemerError(f"{path}: a row without episode_index")
            index = as_whole(row["episode_index"], f"{path}: episode_index")
            numbers = _numbers(
                info, index, chunk=row.get("data/chunk_index"), file=row.get("data/file_index")
            )
            videos = {}
            for key in cameras if info.video_path else []:
                chunk, number = row.get(f"videos/{key}/chunk_index"), row.get(f"videos/{key}/file_index")
                if chunk is None or number is None:
                    continue
                place = fill(info.video_path, _numbers(info, index, chunk=chunk, file=number), root, key)
                start = row.get(f"videos/{key}/from_timestamp")
                videos[key] = VideoPlace(place, math.nan if start is None else float(start))
            known = ("episode_index", "length", "tasks")
            yield EpisodeEntry(
                index=index,
                length=None if row.get("length") is None else as_whole(row["length"], f"{path}: length"),
                tasks=tuple(str(task) for task in row.get("tasks") or () if task is not None),
                data_path=fill(info.data_path, numbers, root, ""),
                videos=videos,
                extra={k: v for k, v in row.items() if "/" not in k and k not in known},
            )


def _numbers(info: Info, index: int, *, chunk: int | None, file: int | None) -> dict[str, int]:
    return {
        "chunk_index": index // info.chunks_size if chunk is None else int(chunk),
        "file_index": 0 if file is None else int(file),
        "episode_chunk": index // info.chunks_size,
        "episode_index": index,
    }


def fill(template: str | None, numbers: Mapping[str, int], root: Path, video_key: str) -> str:
    """A path template filled with every name that sets use, refused if it leaves the root."""
    try:
        path = str(template).format(video_key=video_key, **numbers)
    except (KeyError, IndexError, ValueError) as error:
        raise MemerError(
            f"{root / 'meta/info.json'}: path template {template!r} cannot be filled ({error})"
        ) from None
    return inside(root, path)


def inside(root: Path, path: str) -> str:
    """`path` relative to `root`, refused if it leaves it (links are not followed: hub caches use them)."""
    normal = os.path.normpath(path)
    if os.path.isabs(normal) or normal.split(os.sep)[0] == "..":
        raise MemerError(f"{root}: path {path!r} leaves the data set's folder")
    return normal
