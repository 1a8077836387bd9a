"""What every build has in common: one lock, one description of its inputs, episodes in parallel, in order.

A build works in `OUT.partial` and renames at the very end. Its inputs are described by plain values, kept
beside the work, so that a second start goes on and a start with other inputs is refused.
"""

import fcntl
import multiprocessing
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from data.files import read_json
from data.sources import Labeler, Source, json_hash
from memer.episode import Episode
from memer.errors import MemerError, SourceUnavailableError, UsageError
from memer.folders import write_json

#: Folder of unfinished work inside the directory being made.
WORK_FOLDER = ".work"
PLAN_FILE = "plan.json"

Mode = Literal["strict", "lenient"]

#: Of one episode: its record, or the reason why it cannot be used.
Outcome = dict[str, Any] | str


class PlanMismatchError(UsageError):
    """The directory belongs to a build of other inputs and must not be touched."""


class EpisodeTask(Protocol):
    """What is done with each episode; pickled once per worker process, where handles are opened."""

    def run(self, index: int, *, look_only: bool) -> Outcome:
        """Do the work, or only look whether the episode could be used (then {} says yes)."""
        ...


def chosen_episodes(source: Source, episodes: Sequence[int] | None) -> list[int]:
    """Numbers to build, ascending.

    Raises:
        MemerError: the source has no episode.
        UsageError: the selection is empty or names an absent episode.
    """
    present = sorted(source.indices())
    if not present:
        raise MemerError(f"{source.name}: no episode present; check the source's folder and files")
    if episodes is None:
        return present
    missing = sorted(set(episodes) - set(present))
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UsageError(
            f"episodes: {missing[0]}{others} not present in {source.name}; present: {_ranges(present)}"
        )
    if not episodes:
        raise UsageError("episodes: an empty list; leave it out to take all")
    return sorted(set(episodes))


def labelled_episode(source: Source, labeler: Labeler | None, index: int, *, mode: Mode) -> Episode | str:
    """One episode with its segments, or the reason why it cannot be used; no frame is decoded.

    Raises:
        SourceUnavailableError: files cannot be reached; the build stops and can go on later.
        UsageError: the labeler was asked for something that does not exist.
    """
    try:
        episode = source.episode(index)
        if labeler is not None:
            episode = labeler(episode)
    except (SourceUnavailableError, UsageError):
        raise
    except MemerError as error:
        return str(error)
    gap = sum(label is None for label in episode.labels())
    if gap == episode.num_frames:
        return "unlabelled"
    if gap and mode == "strict":
        return f"{gap} of {episode.num_frames} frames unlabelled"
    return episode


def outcomes(
    task: EpisodeTask, indices: Sequence[int], *, num_workers: int, strict: bool
) -> Iterator[tuple[int, Outcome]]:
    """Outcomes in the order of `indices`; a strict build only looks after its first failure.

    Raises:
        SourceUnavailableError: a worker process died.
    """
    failed = False
    if num_workers <= 0:
        for index in indices:
            outcome = task.run(index, look_only=failed)
            failed = failed or (strict and isinstance(outcome, str))
            yield index, outcome
        return
    # Workers come from a fresh server process: no decoder, lock or thread of this one leaks over (as with a
    # fork), and the imports are done once for all workers (unlike with spawn).
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["data.shards.pieces"])
    with ProcessPoolExecutor(
        num_workers, mp_context=context, initializer=_receive_task, initargs=(task,)
    ) as pool:
        waiting: deque[tuple[int, Future[Outcome]]] = deque()
        remaining = deque(indices)
        try:
            while remaining or waiting:
                while remaining and len(waiting) < 4 * num_workers:
                    index = remaining.popleft()
                    waiting.append((index, pool.submit(_run_task, index, failed)))
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


_task: EpisodeTask | None = None


def _receive_task(task: EpisodeTask) -> None:
    global _task
    _task = task


def _run_task(index: int, look_only: bool) -> Outcome:
    assert _task is not None, "the pool's initializer sets the task"
    return _task.run(index, look_only=look_only)


def unusable(skipped: Mapping[int, str], name: str) -> str:
    """One line that names the episodes and reasons."""
    shown = "; ".join(f"episode {index}: {reason}" for index, reason in sorted(skipped.items())[:20])
    more = f"; and {len(skipped) - 20} more" if len(skipped) > 20 else ""
    return f"{name}: {len(skipped)} episodes cannot be used: {shown}{more}"


@contextmanager
def locked(partial: Path) -> Iterator[Path]:
    """Hold a build directory and give its work folder; a second build there is refused."""
    work = partial / WORK_FOLDER
    try:
        work.mkdir(parents=True, exist_ok=True)
        stream = (work / "lock").open("w")
    except OSError as error:
        raise UsageError(f"{partial}: cannot be written ({error.strerror}); choose another out=DIR") from None
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{partial}: another build is writing there; wait for it") from None
        yield work


def finished(out: Path, described: Mapping[str, Any], *, manifest_file: str) -> dict[str, Any] | None:
    """The manifest when `out` is this very build, finished; None when there is nothing yet.

    Raises:
        UsageError: `out` holds something else; nothing was touched.
    """
    manifest = existing_manifest(out, manifest_file=manifest_file)
    if manifest is not None and manifest.get("input_hash") != json_hash(described):
        raise UsageError(mismatch(out, manifest.get("inputs", {}), described))
    return manifest


def existing_manifest(out: Path, *, manifest_file: str) -> dict[str, Any] | None:
    """The manifest in `out`, None when there is nothing yet.

    Raises:
        UsageError: `out` is a file, or a folder of something else.
    """
    if not out.exists():
        return None
    if not out.is_dir():
        raise UsageError(f"{out}: is a file; choose another out=DIR")
    if not any(out.iterdir()):
        return None
    if not (out / manifest_file).exists():
        raise UsageError(f"{out}: not empty and without {manifest_file}; choose another out=DIR")
    manifest: dict[str, Any] = read_json(out / manifest_file, missing="")
    return manifest


def remember_plan(work: Path, described: Mapping[str, Any]) -> None:
    """Keep the inputs at the first start, compare them at each further one.

    Raises:
        PlanMismatchError: the work is that of other inputs.
    """
    plan = work / PLAN_FILE
    if plan.exists():
        old = read_json(plan, missing="")
        if json_hash(old) != json_hash(described):
            raise PlanMismatchError(mismatch(work.parent, old, described))
    else:
        write_json(plan, described, durable=True)


def mismatch(where: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """One line that names the first differing inputs and the way out."""
    listed = differences(old, new, names=("there", "asked"))
    return f"{where}: made from other inputs ({listed}); choose another out=DIR or remove {where}"


def differences(old: Mapping[str, Any], new: Mapping[str, Any], *, names: tuple[str, str]) -> str:
    """The first differing fields of plain values with both values; empty where they are equal.

    >>> differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, names=("before", "now"))
    'a.c: 2 before, 3 now'
    """
    before, after = _flatten(old), _flatten(new)
    found = [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
    listed = "; ".join(f"{n}: {before.get(n)!r} {names[0]}, {after.get(n)!r} {names[1]}" for n in found[:3])
    return listed + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def _flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(values, Mapping):
        return {
            key: leaf
            for name, value in values.items()
            for key, leaf in _flatten(value, f"{prefix}{name}.").items()
        }
    return {prefix[:-1]: values}


def _ranges(numbers: Sequence[int]) -> str:
    """`0-4, 7` for ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
