"""Any source to shards: parallel by episode, resumable, the same bytes whatever the number of processes.

Work happens in `OUT.partial`, which becomes `OUT` by one rename at the very end: a directory named OUT is
always complete. Killed at any time, the same command goes on from the finished episodes and shards.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.building import (
    Mode,
    Outcome,
    PlanMismatchError,
    chosen_episodes,
    finished,
    labelled_episode,
    locked,
    outcomes,
    remember_plan,
    unusable,
)
from data.files import read_json
from data.shards.joiner import ShardJoiner
from data.shards.layout import FORMAT_VERSION, INDEX_FILE, MANIFEST_FILE, PartEntry
from data.shards.pieces import FEATURES, piece_path, record_path, write_piece
from data.shards.statistics import Moments
from data.sources import Labeler, Source, inputs_description, json_hash
from memer.contract import CameraLayout, Contract
from memer.errors import MemerError, SourceUnavailableError, UsageError
from memer.folders import replacing, write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSettings:
    """How a build writes.

    Attributes:
        cameras: which cameras, in which order and slot size, JPEG quality.
        mode: `strict` fails on unlabelled frames and broken episodes and names them; `lenient` leaves
            broken and wholly unlabelled episodes out and counts them.
        max_frames_per_part: frames of one WebDataset sample; bounds the memory of a process.
        max_shard_bytes: a shard is closed before it would grow beyond this; a larger episode gets its own.
    """

    cameras: CameraLayout
    mode: Mode = "lenient"
    max_frames_per_part: int = 512
    max_shard_bytes: int = 256 * 1024**2

    def __post_init__(self) -> None:
        if self.mode not in ("strict", "lenient"):
            raise UsageError(f"mode: {self.mode!r}, must be strict or lenient")
        for name in ("max_frames_per_part", "max_shard_bytes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: {getattr(self, name)!r}, must be positive")


def build_shards(
    source: Source,
    *,
    out: Path | str,
    settings: BuildSettings,
    labeler: Labeler | None = None,
    labels: str = "native",
    episodes: Sequence[int] | None = None,
    num_workers: int = 0,
    inputs: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Write a source as shards.

    Args:
        source: the demonstrations.
        out: directory to make; must not exist, be empty, or be an unfinished build of the same inputs.
        settings: see BuildSettings.
        labeler: gives episodes their segments; None takes the source's own.
        labels: name of the label source for the manifest.
        episodes: numbers to write, in this order of ascending number; None for all.
        num_workers: processes besides this one; 0 does everything here.
        inputs: configuration that made source and labeler; hashed together with the files it names.
        progress: show a progress bar.

    Returns:
        The manifest.

    Raises:
        UsageError: unknown episodes or cameras; `out` holds something else.
        MemerError: content is wrong; nothing is left behind.
        SourceUnavailableError: files cannot be reached; what is finished stays for the next try.
    """
    out = Path(out)
    indices = chosen_episodes(source, episodes)
    unknown = [key for key in settings.cameras.camera_keys if key not in source.camera_keys]
    if unknown:
        raise UsageError(
            f"cameras.camera_keys: {unknown[0]!r} is no camera of {source.name}; available: "
            f"{', '.join(source.camera_keys) or 'none'}"
        )
    described = {
        "format": FORMAT_VERSION,
        "source": source.name,
        "labels": labels,
        "inputs": inputs_description(dict(inputs or {})),
        "episodes": indices,
        "settings": json.loads(json.dumps(asdict(settings))),
    }
    done = finished(out, described, manifest_file=MANIFEST_FILE)
    if done is not None:
        return done
    partial = out.with_name(out.name + ".partial")
    with locked(partial) as work:
        try:
            manifest = _build(
                source,
                work=work,
                described=described,
                settings=settings,
                labeler=labeler,
                indices=indices,
                num_workers=num_workers,
                progress=progress,
            )
        except (SourceUnavailableError, PlanMismatchError):
            raise
        except MemerError:
            # Wrong content stays wrong: the next try needs other inputs, so these pieces have no use.
            shutil.rmtree(partial, ignore_errors=True)
            raise
        shutil.rmtree(work)
        os.replace(partial, out)
    return manifest


def _build(
    source: Source,
    *,
    work: Path,
    described: dict[str, Any],
    settings: BuildSettings,
    labeler: Labeler | None,
    indices: Sequence[int],
    num_workers: int,
    progress: bool,
) -> dict[str, Any]:
    partial = work.parent
    # Killed between the manifest and the rename: only the rename is left.
    done = finished(partial, described, manifest_file=MANIFEST_FILE) if _has_manifest(partial) else None
    if done is not None:
        return done
    remember_plan(work, described)
    (work / "pieces").mkdir(exist_ok=True)
    joiner = ShardJoiner(partial, work=work, max_bytes=settings.max_shard_bytes)
    task = _PieceTask(source, labeler, settings, work / "pieces")
    todo = [index for index in indices if index not in joiner.joined]
    skipped: dict[int, str] = {}
    before = len(indices) - len(todo)
    with tqdm(total=len(indices), initial=before, unit="episode", desc="build", disable=not progress) as bar:
        strict = settings.mode == "strict"
        for index, outcome in outcomes(task, todo, num_workers=num_workers, strict=strict):
            if isinstance(outcome, str):
                skipped[index] = outcome
            elif outcome:
                joiner.add(outcome)
                bar.set_postfix(frames=joiner.num_frames, refresh=False)
            bar.update()
    if skipped and strict:
        raise MemerError(f"{unusable(skipped, source.name)}; mode=lenient leaves them out")
    joiner.finish()
    if not joiner.entries:
        raise MemerError(f"no usable episode: {unusable(skipped, source.name)}")
    return _write_manifest(source, partial, joiner, described=described, settings=settings, skipped=skipped)


def _has_manifest(partial: Path) -> bool:
    return (partial / MANIFEST_FILE).exists()


@dataclass(frozen=True, slots=True)
class _PieceTask:
    """Writes the piece of one episode, unless it is there already."""

    source: Source
    labeler: Labeler | None
    settings: BuildSettings
    pieces: Path

    def run(self, index: int, *, look_only: bool) -> Outcome:
        """The piece's record, or the reason why the episode cannot be used."""
        if piece_path(self.pieces, index).exists() and record_path(self.pieces, index).exists():
            record: dict[str, Any] = read_json(record_path(self.pieces, index), missing="")
            return record
        episode = labelled_episode(self.source, self.labeler, index, mode=self.settings.mode)
        if isinstance(episode, str):
            return episode
        if look_only:
            return {}
        try:
            return write_piece(
                episode,
                layout=self.settings.cameras,
                max_frames=self.settings.max_frames_per_part,
                folder=self.pieces,
            )
        except (SourceUnavailableError, UsageError):
            raise
        except MemerError as error:
            return str(error)


def _write_manifest(
    source: Source,
    partial: Path,
    joiner: ShardJoiner,
    *,
    described: dict[str, Any],
    settings: BuildSettings,
    skipped: Mapping[int, str],
) -> dict[str, Any]:
    statistics = combined_statistics(joiner.entries, what=source.name)
    contract = Contract(
        fps=source.fps,
        cameras=settings.cameras,
        statistics={name: moments.contract_entry() for name, moments in statistics.items()},
    )
    rows = "".join(
        json.dumps(entry.to_dict(), ensure_ascii=False, separators=(",", ":")) + "\n"
        for entry in joiner.entries
    )
    manifest = {
        "format": FORMAT_VERSION,
        "source": source.name,
        "labels": described["labels"],
        "input_hash": json_hash(described),
        "inputs": described,
        "num_episodes": len(joiner.episodes),
        "num_frames": joiner.num_frames,
        "num_labelled_frames": sum(row["labelled_frames"] for row in joiner.episodes),
        "num_images": sum(row["images"] for row in joiner.episodes),
        "num_parts": len(joiner.entries),
        "episodes": joiner.episodes,
        "skipped": {str(index): reason for index, reason in sorted(skipped.items())},
        "shards": joiner.shards,
        "index": {
            "bytes": len(rows.encode("utf-8")),
            "sha256": hashlib.sha256(rows.encode("utf-8")).hexdigest(),
        },
        "statistics": {name: moments.to_dict() for name, moments in statistics.items()},
        "contract": contract.to_dict(),
        "source_report": source.report(),
    }
    with replacing(partial / INDEX_FILE, durable=True) as temporary:
        temporary.write_bytes(rows.encode("utf-8"))
    contract.save(partial)
    write_json(partial / MANIFEST_FILE, manifest, durable=True)
    return manifest


def combined_statistics(entries: Sequence[PartEntry], *, what: str) -> dict[str, Moments]:
    """State and action moments of the parts together, in their order."""
    return {
        name: Moments.combine(
            (Moments.from_dict(e.statistics[name]) for e in entries), what=f"{what}: {name}"
        )
        for name in FEATURES
    }
