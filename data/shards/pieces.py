"""One episode as tar members: the piece that worker processes write and the writer joins into shards.

A piece is a tar without the end-of-archive blocks counted, so that joining pieces is copying bytes.
"""

import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from webdataset import TarWriter

from data.shards.layout import TAR_BLOCK, PartEntry, padded, part_key
from data.shards.statistics import Moments
from memer.cameras import encode_jpeg, prepare_view
from memer.contract import CameraLayout
from memer.episode import Episode
from memer.errors import MemerError
from memer.folders import replacing, write_json

FEATURES = ("state", "action")


def write_piece(episode: Episode, *, layout: CameraLayout, max_frames: int, folder: Path) -> dict[str, Any]:
    """Write `episode_%06d.tar` and, last, `episode_%06d.json` into `folder`.

    Every source frame is decoded once, in one forward pass per camera; only JPEG bytes of one part are held.

    Args:
        episode: what to write.
        layout: cameras in order, slot size and JPEG quality.
        max_frames: frames per part at most.
        folder: holds the pieces of a build.

    Returns:
        The record that the json file holds: counts, segments, bytes, and the parts with offsets in the piece.

    Raises:
        MemerError: a camera is missing or ends early, or state or action hold non-finite values.
    """
    check_episode(episode, layout)
    target = piece_path(folder, episode.episode_index)
    entries: list[PartEntry] = []
    position = 0
    frames = _prepared_frames(episode, layout)
    starts = range(0, episode.num_frames, max_frames)
    # Times, owners and modes are fixed: the same episode gives the same bytes anywhere.
    with (
        replacing(target, durable=True) as temporary,
        temporary.open("wb") as stream,
        TarWriter(
            stream, user="memer", group="memer", mtime=0, encoder=False, format=tarfile.USTAR_FORMAT
        ) as tar,
    ):
        for part, start in enumerate(starts):
            end = min(start + max_frames, episode.num_frames)
            sample = _part_sample(
                episode, layout, frames=frames, part=part, num_parts=len(starts), start=start, end=end
            )
            entry, position = _entry(sample, episode, part=part, start=start, end=end, at=position)
            entries.append(entry)
            tar.write(sample)
    record = {
        "episode_index": episode.episode_index,
        "num_frames": episode.num_frames,
        "labelled_frames": sum(s.end - s.start for s in episode.segments),
        "images": episode.num_frames * len(layout.camera_keys),
        "segments": [[s.start, s.end, s.label] for s in episode.segments],
        "bytes": position,
        "parts": [entry.to_dict() for entry in entries],
    }
    write_json(record_path(folder, episode.episode_index), record, durable=True)
    return record


def piece_path(folder: Path, episode_index: int) -> Path:
    """Where a piece lies."""
    return folder / f"episode_{episode_index:06d}.tar"


def record_path(folder: Path, episode_index: int) -> Path:
    """Where the record of a piece lies; it exists only when the piece is complete."""
    return folder / f"episode_{episode_index:06d}.json"


def check_episode(episode: Episode, layout: CameraLayout) -> None:
    """Refuse what must not be written.

    Raises:
        MemerError: naming episode and camera, or field, frame and value.
    """
    where = f"episode {episode.episode_index} of {episode.source}"
    for key in layout.camera_keys:
        if key not in episode.cameras:
            raise MemerError(f"{where}: no camera {key!r}; available: {', '.join(sorted(episode.cameras))}")
    for name in FEATURES:
        rows = getattr(episode, name)
        bad = np.argwhere(~np.isfinite(rows))
        if len(bad):
            frame = int(bad[0][0])
            raise MemerError(f"{where}: {name} at frame {frame} is {rows[tuple(bad[0])]}; repair the table")


def _prepared_frames(episode: Episode, layout: CameraLayout) -> Iterator[list[bytes]]:
    """JPEGs of all cameras, frame by frame; cameras are read in step, each once."""
    sources = [episode.cameras[key] for key in layout.camera_keys]
    readers = [source.frames() for source in sources]
    for frame in range(episode.num_frames):
        images: list[bytes] = []
        for key, source, reader in zip(layout.camera_keys, sources, readers, strict=True):
            view = next(reader, None)
            if view is None:
                raise MemerError(
                    f"episode {episode.episode_index} of {episode.source}: camera {key} ends after {frame} "
                    f"of {episode.num_frames} frames; leave the episode out or repair its video"
                )
            images.append(encode_jpeg(view if source.prepared else prepare_view(view, layout), layout))
        yield images


def _part_sample(
    episode: Episode,
    layout: CameraLayout,
    *,
    frames: Iterator[list[bytes]],
    part: int,
    num_parts: int,
    start: int,
    end: int,
) -> dict[str, Any]:
    description = {
        "source": episode.source,
        "episode_index": episode.episode_index,
        "part": part,
        "num_parts": num_parts,
        "start": start,
        "end": end,
        "num_frames": episode.num_frames,
        "fps": episode.fps,
        "camera_keys": list(layout.camera_keys),
        "instructions": [asdict(span) for span in episode.instructions],
        "segments": [asdict(segment) for segment in episode.segments],
        "metadata": episode.metadata,
    }
    sample: dict[str, Any] = {
        "__key__": part_key(episode.episode_index, part),
        "json": json.dumps(description, ensure_ascii=False, allow_nan=False).encode("utf-8"),
    }
    for name in FEATURES:
        sample[f"{name}.npy"] = _npy_bytes(np.asarray(getattr(episode, name)[start:end], dtype=np.float32))
    for frame in range(start, end):
        for camera, image in enumerate(next(frames)):
            sample[frame_member(frame, camera)] = image
    return sample


def frame_member(frame: int, camera: int) -> str:
    """Name of a frame's JPEG behind the key."""
    return f"{frame:06d}.cam{camera}.jpg"


def _entry(
    sample: Mapping[str, Any], episode: Episode, *, part: int, start: int, end: int, at: int
) -> tuple[PartEntry, int]:
    """Where TarWriter puts the members: sorted by name, one header block each, contents padded."""
    places: dict[str, tuple[int, int]] = {}
    for name in sorted(name for name in sample if name != "__key__"):
        size = len(sample[name])
        places[name] = (at + TAR_BLOCK, size)
        at += TAR_BLOCK + padded(size)
    num_cameras = sum(1 for name in places if name.startswith(f"{start:06d}.cam"))
    members = [places[frame_member(k, c)] for k in range(start, end) for c in range(num_cameras)]
    entry = PartEntry(
        key=sample["__key__"],
        shard=-1,
        episode_index=episode.episode_index,
        part=part,
        start=start,
        end=end,
        json_at=places["json"],
        state_at=places["state.npy"],
        action_at=places["action.npy"],
        frame_offsets=tuple(offset for offset, _ in members),
        frame_sizes=tuple(size for _, size in members),
        statistics={name: Moments.of(getattr(episode, name)[start:end]).to_dict() for name in FEATURES},
    )
    return entry, at


def _npy_bytes(array: NDArray[np.float32]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()
