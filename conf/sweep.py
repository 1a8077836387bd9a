"""Sweeps: `-m` runs one process and one folder per job, `runs/<sweep>/<job>/`.

    python train.py -m sweep=memory_forms            # a checked-in grid, conf/sweep/memory_forms.yaml
    python train.py -m seed=0,1 optim.lr=1e-4,3e-4   # Hydra's comma lists make a grid of their own

`conf.grid` says which jobs that gives and what they are called.

* Every job is composed before the first one starts: a typo costs no training.
* A job's output goes to `job.log` in its folder. One that fails is reported at once with the last line of its
  error and the path of its log, and again in the closing table; the others run. The exit code is 0 only if
  all are done.
* A process per job gives its memory back, so a job that runs out of it does not doom the next.
* The same command again skips what is done (`status.json` says `ok`) and starts the rest in its old folder,
  where training resumes from its last checkpoint. Two terminals may run one sweep: each takes what is free.
* `share: [checkpoints]` in a sweep file lets one training serve all jobs, see `conf.grid`.
* More than one device per job is refused.
"""

import fcntl
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from hydra._internal.utils import get_args_parser

from conf.compose import CONF_DIR
from conf.grid import Job, Sweep, bookkeeping, plan_sweep
from conf.record import STATUS_FILE
from memer.errors import UsageError
from memer.folders import write_json

JOB_FILE = "job.json"
LOG_FILE = "job.log"
SWEEP_FILE = "sweep.json"

#: Seconds that a job has to stop by itself after an interrupt.
GRACE_S = 60.0


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How a job ended: `ok`, `done before`, `failed`, `stopped`, `busy` elsewhere or `not started`."""

    state: str = "not started"
    seconds: float = 0.0
    detail: str = ""


def run_sweep(arguments: Sequence[str], *, config_name: str, conf_dir: Path = CONF_DIR) -> int:
    """Run what is left of a sweep, one job after the other.

    Args:
        arguments: the command line behind the program, with `-m`.
        config_name: root YAML.
        conf_dir: folder of the YAML files.

    Returns:
        0 when every job is done, 130 when interrupted, else 1.
    """
    parsed = get_args_parser().parse_args(list(arguments))
    config_name = parsed.config_name or config_name
    sweep = plan_sweep(parsed.overrides, config_name=config_name, conf_dir=conf_dir)
    flags = [a for a in arguments if a not in parsed.overrides and a not in ("-m", "--multirun")]
    command = [sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1], *flags]
    outcomes = {job.name: Outcome() for job in sweep.jobs}
    for job in sweep.jobs:
        if _prepare(job):
            outcomes[job.name] = Outcome(state="done before")
    sweep.folder.mkdir(parents=True, exist_ok=True)
    _say(f"sweep {sweep.name}: {len(sweep.jobs)} jobs in {sweep.folder}")
    interrupted = False
    with _terminate_as_interrupt():
        for number, job in enumerate(sweep.jobs, start=1):
            place = f"[{number}/{len(sweep.jobs)}] {job.name}"
            if outcomes[job.name].state == "done before":
                _say(f"{place}: done before")
                continue
            _share(sweep, job)
            outcome = _run_job(job, [*command, *job.overrides, *bookkeeping(sweep.name, job.name)], place)
            outcomes[job.name] = outcome
            _record(sweep, outcomes)
            _say(f"{place}: {outcome.state}, {_clock(outcome.seconds)}" + _detail(outcome, job))
            if outcome.state == "stopped":
                interrupted = True
                break
    _record(sweep, outcomes)
    print(closing_table(sweep, outcomes))
    if interrupted:
        _say("stopped; the same command continues here")
        return 130
    return 0 if all(o.state in ("ok", "done before") for o in outcomes.values()) else 1


def closing_table(sweep: Sweep, outcomes: Mapping[str, Outcome]) -> str:
    """Every job with its end, as text."""
    rows = [("job", "state", "time", "what happened")]
    for job in sweep.jobs:
        outcome = outcomes[job.name]
        rows.append((job.name, outcome.state, _clock(outcome.seconds), _detail(outcome, job).lstrip(": ")))
    widths = [max(len(row[k]) for row in rows) for k in range(3)]
    lines = ["  ".join([*(row[k].ljust(widths[k]) for k in range(3)), row[3]]).rstrip() for row in rows]
    return "\n".join(lines)


def _share(sweep: Sweep, job: Job) -> None:
    """Give a job what it takes over from a finished one, unless it has begun with its own."""
    donor = next((other for other in sweep.jobs if other is not job and _is_done(other.folder)), None)
    for name in sweep.share if donor is not None else ():
        assert donor is not None
        source, target = donor.folder / name, job.folder / name
        if not source.is_dir() or target.exists():
            continue
        hidden = target.with_name(f".{name}.partial")
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, hidden, copy_function=_link_or_copy)
        hidden.rename(target)
        _say(f"{job.folder}: {name} taken over from {donor.name}")


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _run_job(job: Job, command: Sequence[str], place: str) -> Outcome:
    job.folder.mkdir(parents=True, exist_ok=True)
    started = time.time()
    log = job.folder / LOG_FILE
    with _lock(job.folder) as lock:
        if lock is None:
            return Outcome(state="busy", detail="another process works in this folder")
        if _is_done(job.folder):  # by another terminal, meanwhile
            return Outcome(state="done before")
        write_json(job.folder / JOB_FILE, {"overrides": job.overrides, "config": job.config})
        with log.open("ab") as output:
            begin = output.tell()
            # The child inherits the lock: it stays taken as long as the job lives, whatever becomes of us.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[lock],
            )
            stopped = not _wait(process, log, place, started)
    seconds = time.time() - started
    text = _tail(log, begin)
    if stopped or process.returncode == 130:
        return Outcome(state="stopped", seconds=seconds, detail="interrupted")
    if process.returncode == 0 and _is_done(job.folder):
        return Outcome(state="ok", seconds=seconds)
    return Outcome(state="failed", seconds=seconds, detail=describe_failure(process.returncode, text))


def _wait(process: subprocess.Popen[bytes], log: Path, place: str, started: float) -> bool:
    """Wait for a job while showing its last line; False when we were interrupted meanwhile."""
    show = sys.stderr.isatty()
    try:
        while True:
            try:
                process.wait(timeout=0.5)
                return True
            except subprocess.TimeoutExpired:
                if show:
                    last = next(reversed(_tail(log, 0, size=400).splitlines()), "")
                    line = f"{place}  {_clock(time.time() - started)}  {last}"
                    sys.stderr.write(
                        "\r\033[K" + line[: os.get_terminal_size(sys.stderr.fileno()).columns - 1]
                    )
                    sys.stderr.flush()
    except KeyboardInterrupt as stop:
        if stop.args:  # a terminal sends Ctrl-C to the job as well; SIGTERM reaches only us
            process.terminate()
        try:
            process.wait(timeout=GRACE_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()
        return False
    finally:
        if show:
            sys.stderr.write("\r\033[K")


def describe_failure(code: int, log_text: str) -> str:
    """One line for a job that ended with `code`: the signal, or the last error in its log."""
    if code < 0:
        name = signal.Signals(-code).name
        memory = "; the system does that when memory runs out" if -code == signal.SIGKILL else ""
        return f"killed by {name}{memory}"
    lines = [line.strip() for line in re.split(r"[\r\n]+", log_text) if line.strip()]
    error = re.compile(r"(error: |([A-Za-z_]\w*\.)*[A-Za-z_]\w*(Error|Exception|Exit|Interrupt)\b)")
    last = next((line for line in reversed(lines) if error.match(line)), lines[-1] if lines else "no output")
    return f"exit code {code}: {last[:300]}"


def _prepare(job: Job) -> bool:
    """Whether the job is done already; a folder of other settings is refused if done, else set aside."""
    try:
        before = json.loads((job.folder / JOB_FILE).read_text(encoding="utf-8"))["config"]
    except (OSError, ValueError, KeyError):
        before = None
    now = json.loads(json.dumps(job.config, default=str))
    done = _is_done(job.folder)
    if before is None:
        if done:
            raise UsageError(f"{job.folder} holds a run that is no job of a sweep; choose another name=NAME")
        return False
    if before == now:
        return done
    difference = first_difference(before, now)
    if done:
        raise UsageError(
            f"{job.folder} is done, but with other settings ({difference}); choose another name=NAME or "
            "remove the folder"
        )
    with _lock(job.folder) as lock:
        if lock is None:
            raise UsageError(
                f"{job.folder} is in use with other settings ({difference}); choose another name=NAME"
            )
        numbered = (job.folder.with_name(f"{job.name}.old{k}") for k in itertools.count(1))
        aside = next(path for path in numbered if not path.exists())
        job.folder.rename(aside)
    _say(f"{job.folder}: unfinished, and of other settings ({difference}); set aside as {aside.name}")
    return False


@contextmanager
def _lock(folder: Path) -> Iterator[int | None]:
    """Hold the folder's lock: its file descriptor, or None while another process holds it."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield lock.fileno()


def first_difference(before: Any, now: Any, key: str = "") -> str:
    """Dotted key and both values where two configs first differ, empty when they are equal."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in [*before, *(n for n in now if n not in before)]:
            if found := first_difference(before.get(name), now.get(name), f"{key}.{name}".lstrip(".")):
                return found
        return ""
    return "" if before == now else f"{key}: {before!r} against {now!r} now"


def _is_done(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / STATUS_FILE).read_text(encoding="utf-8"))["status"] == "ok")
    except (OSError, ValueError, KeyError):
        return False


def _record(sweep: Sweep, outcomes: Mapping[str, Outcome]) -> None:
    jobs = {
        job.name: {
            "folder": str(job.folder),
            "overrides": job.overrides,
            "state": outcomes[job.name].state,
            "seconds": round(outcomes[job.name].seconds, 3),
            "detail": outcomes[job.name].detail,
        }
        for job in sweep.jobs
    }
    write_json(sweep.folder / SWEEP_FILE, {"sweep": sweep.name, "jobs": jobs})


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    def handler(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _tail(path: Path, begin: int, *, size: int = 20_000) -> str:
    """The end of a log, not reaching before byte `begin`."""
    with path.open("rb") as file:
        file.seek(max(begin, path.stat().st_size - size))
        return file.read().decode("utf-8", errors="replace").replace("\r", "\n").rstrip()


def _detail(outcome: Outcome, job: Job) -> str:
    return f": {outcome.detail} (log: {job.folder / LOG_FILE})" if outcome.detail else ""


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _say(text: str, file: TextIO | None = None) -> None:
    print(text, file=file or sys.stderr, flush=True)
