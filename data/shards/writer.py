"""Any source to shards: parallel by episode, resumable, the same bytes whatever the number of processes.

Work happens in `OUT.partial`, which becomes `OUT` by one rename at the very end: a directory named OUT is
always complete. Killed at any time, the same command goes on from the finished episodes and shards.
"""

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from data.shards.joiner import ShardJoiner
from data.shards.layout import (
    FORMAT_VERSION,
    INDEX_FILE,
    MANIFEST_FILE,
    PartEntry,
    read_json,
    write_json_atomically,
    write_text_atomically,
)
from data.shards.pieces import FEATURES, piece_path, record_path, write_piece
from data.shards.statistics import Moments
from data.sources import Labeler, Source, inputs_description, json_hash
from memer.contract import CameraLayout, Contract
from memer.errors import MemerError, SourceUnavailableError, UsageError

WORK_FOLDER = ".work"
PLAN_FILE = "plan.json"

Mode = Literal["strict", "lenient"]


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
    indices = _chosen_episodes(source, episodes)
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
    done = _finished_manifest(out, described)
    if done is not None:
        return done
    partial = out.with_name(out.name + ".partial")
    with _locked(partial):
        try:
            manifest = _build(
                source,
                partial=partial,
                described=described,
                settings=settings,
                labeler=labeler,
                indices=indices,
                num_workers=num_workers,
                progress=progress,
            )
        except SourceUnavailableError:
            raise
        except _PlanMismatchError as error:
            raise UsageError(str(error)) from None
        except MemerError:
            # Wrong content stays wrong: the next try needs other inputs, so these pieces have no use.
            shutil.rmtree(partial, ignore_errors=True)
            raise
        if (partial / WORK_FOLDER).exists():
            shutil.rmtree(partial / WORK_FOLDER)
        os.replace(partial, out)
    return manifest


class _PlanMismatchError(MemerError):
    pass


def _chosen_episodes(source: Source, episodes: Sequence[int] | None) -> list[int]:
    present = sorted(source.indices())
    if not present:
        raise MemerError(f"{source.name}: no episode present; check source.root and its files")
    if episodes is None:
        return present
    missing = sorted(set(episodes) - set(present))
    if missing:
        raise UsageError(
            f"episodes: {missing[0]} is not present in {source.name}"
            + (f" (nor {len(missing) - 1} others)" if len(missing) > 1 else "")
            + f"; present: {_ranges(present)}"
        )
    if not episodes:
        raise UsageError("episodes: an empty list; leave it out to take all")
    return sorted(set(episodes))


def _ranges(numbers: Sequence[int]) -> str:
    """`0-4, 7` for ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _finished_manifest(out: Path, described: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest when `out` is this very build, finished; None when there is nothing yet."""
    if not out.exists():
        return None
    if not out.is_dir():
        raise UsageError(f"{out}: is a file; choose another out=DIR")
    if not any(out.iterdir()):
        return None
    if not (out / MANIFEST_FILE).exists():
        raise UsageError(f"{out}: not empty and no shard directory; choose another out=DIR")
    manifest: dict[str, Any] = read_json(out / MANIFEST_FILE, missing="")
    if manifest.get("input_hash") != json_hash(described):
        raise UsageError(_mismatch(out, manifest.get("inputs", {}), described))
    return manifest


def _mismatch(where: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    before, after = _flatten(old), _flatten(new)
    names = [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
    listed = "; ".join(f"{n}: {before.get(n)!r} there, {after.get(n)!r} asked" for n in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{where}: made from other inputs ({listed}{more}); choose another out=DIR or remove {where}"


def _flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(values, Mapping):
        return {
            k: v for name, value in values.items() for k, v in _flatten(value, f"{prefix}{name}.").items()
        }
    return {prefix[:-1]: values}


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Hold the build directory; a second build of the same `out` is refused."""
    try:
        (partial / WORK_FOLDER / "pieces").mkdir(parents=True, exist_ok=True)
        stream = (partial / WORK_FOLDER / "lock").open("w")
    except OSError as error:
        raise UsageError(f"{partial}: cannot be written ({error.strerror}); choose another out=DIR") from None
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{partial}: another build is writing there; wait for it") from None
        yield


def _build(
    source: Source,
    *,
    partial: Path,
    described: dict[str, Any],
    settings: BuildSettings,
    labeler: Labeler | None,
    indices: Sequence[int],
    num_workers: int,
    progress: bool,
) -> dict[str, Any]:
    work = partial / WORK_FOLDER
    _check_plan(partial, described)
    if (partial / MANIFEST_FILE).exists():  # killed between the manifest and the rename
        manifest: dict[str, Any] = read_json(partial / MANIFEST_FILE, missing="")
        return manifest
    joiner = ShardJoiner(partial, work=work, max_bytes=settings.max_shard_bytes)
    task = _EpisodeTask(source, labeler, settings, work / "pieces")
    todo = [index for index in indices if index not in joiner.joined]
    skipped: dict[int, str] = {}
    bar = tqdm(
        total=len(indices),
        initial=len(indices) - len(todo),
        unit="episode",
        desc="build",
        disable=not progress,
    )
    with bar:
        for index, outcome in _outcomes(
            task, todo, num_workers=num_workers, strict=settings.mode == "strict"
        ):
            if isinstance(outcome, str):
                skipped[index] = outcome
            elif outcome:
                joiner.add(outcome)
                bar.set_postfix(frames=joiner.num_frames, refresh=False)
            bar.update()
    if skipped and settings.mode == "strict":
        raise MemerError(f"{_listed(skipped, source.name)}; mode=lenient leaves them out")
    joiner.finish()
    if not joiner.entries:
        raise MemerError(f"no usable episode: {_listed(skipped, source.name)}")
    return _write_manifest(source, partial, joiner, described=described, settings=settings, skipped=skipped)


def _listed(skipped: Mapping[int, str], name: str) -> str:
    shown = "; ".join(f"episode {index}: {reason}" for index, reason in sorted(skipped.items())[:20])
    more = f"; and {len(skipped) - 20} more" if len(skipped) > 20 else ""
    return f"{name}: {len(skipped)} episodes cannot be used: {shown}{more}"


def _check_plan(partial: Path, described: dict[str, Any]) -> None:
    """Remember the inputs at the first start, compare them at each further one."""
    plan = partial / WORK_FOLDER / PLAN_FILE
    known = plan if plan.exists() else partial / MANIFEST_FILE
    if known.exists():
        values = read_json(known, missing="")
        old = values if known == plan else values["inputs"]
        if json_hash(old) != json_hash(described):
            raise _PlanMismatchError(_mismatch(partial, old, described))
    elif any(partial.glob("shard-*.tar")):
        raise _PlanMismatchError(f"{partial}: not a build of memer; remove it or choose another out=DIR")
    if not plan.exists():
        write_json_atomically(plan, described)


@dataclass(frozen=True, slots=True)
class _EpisodeTask:
    """What a worker process needs to know; the source opens its own handles there."""

    source: Source
    labeler: Labeler | None
    settings: BuildSettings
    pieces: Path

    def run(self, index: int, *, look_only: bool) -> dict[str, Any] | str:
        """The piece's record, or the reason why the episode cannot be used; {} when only looking and fine."""
        if piece_path(self.pieces, index).exists() and record_path(self.pieces, index).exists():
            record: dict[str, Any] = read_json(record_path(self.pieces, index), missing="")
            return record
        try:
            episode = self.source.episode(index)
            if self.labeler is not None:
                episode = self.labeler(episode)
            gap = sum(label is None for label in episode.labels())
            if gap == episode.num_frames:
                return "unlabelled"
            if gap and self.settings.mode == "strict":
                return f"{gap} of {episode.num_frames} frames unlabelled"
            if look_only:
                return {}
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


def _outcomes(
    task: _EpisodeTask, indices: Sequence[int], *, num_workers: int, strict: bool
) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Outcomes in the order of `indices`; a strict build decodes nothing more after its first failure."""
    failed = False
    if num_workers <= 0:
        for index in indices:
            outcome = task.run(index, look_only=failed)
            failed = failed or (strict and isinstance(outcome, str))
            yield index, outcome
        return
    context = multiprocessing.get_context("spawn")  # decoders and locks of this process must not leak over
    with ProcessPoolExecutor(num_workers, mp_context=context) as pool:
        waiting: deque[tuple[int, Future[dict[str, Any] | str]]] = deque()
        remaining = deque(indices)
        try:
            while remaining or waiting:
                while remaining and len(waiting) < 4 * num_workers:
                    index = remaining.popleft()
                    waiting.append((index, pool.submit(task.run, index, look_only=failed)))
                index, future = waiting.popleft()
                outcome = future.result()
                failed = failed or (strict and isinstance(outcome, str))
                yield index, outcome
        except BrokenProcessPool:
            raise SourceUnavailableError(
                f"a worker process died near episode {index} (out of memory?); run the same command again "
                "to go on, with a smaller num_workers if it happens again"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


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
    write_text_atomically(partial / INDEX_FILE, rows)
    contract.save(partial)
    write_json_atomically(partial / MANIFEST_FILE, manifest)
    return manifest


def combined_statistics(entries: Sequence[PartEntry], *, what: str) -> dict[str, Moments]:
    """State and action moments of the parts together, in their order."""
    return {
        name: Moments.combine(
            (Moments.from_dict(e.statistics[name]) for e in entries), what=f"{what}: {name}"
        )
        for name in FEATURES
    }
