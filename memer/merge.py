"""Merge a fine-tuned model with its base: theta = (1 - alpha) * base + alpha * tuned, streamed.

Long fine-tuning on expert data costs robustness to stalls and retries; mixing the base back in restores part
of it. The arithmetic is float32 with one cast at the end (float64 for float64 tensors): sums in bfloat16
would round a fifth of the weights wrongly. Equal elements keep their bytes, alpha 0 gives the base and alpha
1 the tuned model bit for bit, integers and booleans come from the tuned model, norms and biases are mixed
too.

    python -m memer.merge --base A --tuned B --alpha 0.8 --out C
    python -m memer.merge --base A --tuned B --alpha 0.6 --alpha 0.8 --out C    # C/alpha_0.60, C/alpha_0.80

`tuned` may be a folder with a LoRA adapter: its updates are then scaled by alpha, the same thing and exact.

Source: MemER merges with alpha = 0.8 (arXiv 2510.20328); model averaging as in WiSE-FT (arXiv 2109.01903).
"""

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memer.adapter import Adapter
from memer.artifact import (
    DEFAULT_PLANNER,
    PROVENANCE_FILE,
    Provenance,
    is_complete,
    package_versions,
    seal_artifact,
)
from memer.contract import CONTRACT_FILE, Contract
from memer.errors import MemerError, UsageError, run_command
from memer.folders import copy_files, new_folders, side_files
from memer.mixing import AdapterMerge, LinearMerge, MergeRecord
from memer.weight_writer import Produce, write_weights
from memer.weights import EMBEDDING_SUFFIX, HEAD_KEY, WeightFiles

MERGE_INFO = "merge_info.json"
RULE = "(1 - alpha) * base + alpha * tuned, float32, cast once; equal elements and alpha 0, 1 are copied"
ADAPTER_RULE = "base + alpha * scale * B @ A, float32, cast once"
#: State-space parameters (Qwen3.5) that are not plain weights: interpolated, but worth a look.
_FLAGGED = (".A_log", ".dt_bias")

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """What one merge did.

    Attributes:
        out: the directory written.
        alpha: share of the tuned model.
        num_tensors: tensors written.
        num_changed: tensors that differ between the inputs; the rest was copied.
        num_bytes: bytes of all tensors.
        flagged: interpolated tensors of an unusual kind.
        base_hash: content hash of the base, see `memer.weights.ContentHash`.
        tuned_hash: the same of the tuned model; of an adapter the SHA-256 over its files.
        seconds: wall time of the whole call, all alphas together.
    """

    out: Path
    alpha: float
    num_tensors: int
    num_changed: int
    num_bytes: int
    flagged: tuple[str, ...]
    base_hash: str
    tuned_hash: str
    seconds: float


def merge_weights(
    base: Path | str, tuned: Path | str, out: Path | str, *, alpha: float, progress: Progress | None = None
) -> MergeReport:
    """Write the merge of two model directories.

    Args:
        base: the model that was fine-tuned.
        tuned: the same model after training, or a LoRA adapter of it.
        out: new directory; it appears only when complete.
        alpha: share of `tuned`, in [0, 1].
        progress: called with (bytes done, bytes in all).

    Raises:
        UsageError: alpha outside [0, 1].
        SourceUnavailableError: an input does not exist.
        MemerError: keys, shapes, dtypes, ties or vocabularies differ, a file is damaged, `out` is not empty.
    """
    return merge_many(base, tuned, {alpha: Path(out)}, progress=progress)[0]


def merge_many(
    base: Path | str,
    tuned: Path | str,
    outs: Mapping[float, Path],
    *,
    finish: Callable[[Path, MergeReport], None] | None = None,
    replace: bool = False,
    progress: Progress | None = None,
) -> list[MergeReport]:
    """Merge once per alpha, reading, comparing and hashing the inputs a single time.

    Args:
        base: the model that was fine-tuned.
        tuned: the same model after training, or a LoRA adapter of it.
        outs: alpha -> new directory.
        finish: called per output with its still hidden folder, to add files before it appears; by default a
            tuned folder with a contract gives a sealed artifact again.
        replace: existing outputs give way once the new ones are whole.
        progress: called with (bytes done, bytes in all).
    """
    started = time.monotonic()
    for alpha in outs:
        if not 0 <= alpha <= 1:
            raise UsageError(f"alpha: {alpha!r}, must be between 0 (base) and 1 (tuned)")
    if not outs or len(set(outs.values())) < len(outs):
        raise UsageError(f"out: {[str(out) for out in outs.values()]}, needs one folder per alpha")
    before = WeightFiles.open(base)
    adapter = Adapter.load(tuned, base=before) if Adapter.is_adapter(tuned) else None
    after = before if adapter else WeightFiles.open(tuned)
    drop = check_mergeable(before, after)
    needed = len(outs) * after.num_bytes
    parent = _existing_parent(next(iter(outs.values())))
    if shutil.disk_usage(parent).free < needed:
        raise MemerError(
            f"{parent}: {needed / 1e9:.1f} GB are needed, less is free; make room or name another disk"
        )

    record = MergeRecord()
    alphas = list(outs)
    with (
        new_folders(list(outs.values()), replace=replace) as folders,
        before.reader() as read_before,
        after.reader() as read_after,
    ):

        def make_produce() -> Produce:
            if adapter:
                return AdapterMerge(alphas, read_before, adapter, record)
            return LinearMerge(alphas, read_before, read_after, record)

        size = write_weights(folders, like=after, make_produce=make_produce, drop=drop, progress=progress)
        base_hash = record.base.digest(before, skip=drop)
        tuned_hash = adapter.content_hash() if adapter else record.tuned.digest(after, skip=drop)
        reports = []
        for alpha, folder in zip(alphas, folders, strict=True):
            report = MergeReport(
                out=outs[alpha],
                alpha=alpha,
                num_tensors=len(after.entries.keys() - drop),
                num_changed=len(record.changed),
                num_bytes=size,
                flagged=tuple(sorted(name for name in record.changed if name.endswith(_FLAGGED))),
                base_hash=base_hash,
                tuned_hash=tuned_hash,
                seconds=time.monotonic() - started,
            )
            files = side_files(before.root)
            if not adapter:
                files |= side_files(after.root)
            copy_files(files, folder)
            info = merge_info(report, adapter=adapter is not None, base=before.root, tuned=Path(tuned))
            (folder / MERGE_INFO).write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
            if finish:
                finish(folder, report)
            elif (Path(tuned) / CONTRACT_FILE).is_file() and is_complete(folder):
                _seal_like(folder, report, base=before.root, tuned=Path(tuned))
            reports.append(report)
    return reports


def check_mergeable(base: WeightFiles, tuned: WeightFiles) -> set[str]:
    """Compare keys, shapes, dtypes, ties and vocabularies.

    Returns:
        Tensors to leave out: a stored head that is tied to the embedding.

    Raises:
        MemerError: with every kind of difference counted and its first cases named.
    """
    rows = base.vocabulary_size(), tuned.vocabulary_size()
    if None not in rows and rows[0] != rows[1]:
        raise MemerError(
            f"{tuned.root}: vocabulary of {rows[1]} rows, the base {base.root} has {rows[0]}; they must be "
            "equal, rows are never cut or added"
        )
    if base.is_tied() != tuned.is_tied():
        tied, untied = (base, tuned) if base.is_tied() else (tuned, base)
        raise MemerError(
            f"{tied.root} ties {HEAD_KEY} to the embedding, {untied.root} does not; "
            "train and merge with one tie_word_embeddings (top level of config.json)"
        )
    drop: set[str] = set()
    if base.is_tied():
        for files in (base, tuned):
            if HEAD_KEY in files.entries:
                _check_tied_head(files)
                drop.add(HEAD_KEY)
    ours, theirs = base.entries.keys() - drop, tuned.entries.keys() - drop
    problems = []
    for what, names in (("missing", ours - theirs), ("extra", theirs - ours)):
        if names:
            problems.append(f"{len(names)} tensors {what} ({_some(names)})")
    both = sorted(ours & theirs)
    shapes = {n: (base.entries[n].shape, tuned.entries[n].shape) for n in both}
    dtypes = {n: (base.entries[n].dtype, tuned.entries[n].dtype) for n in both}
    for what, pairs in (("shape", shapes), ("dtype", dtypes)):
        wrong = [f"{n}: {a} in base, {b} in tuned" for n, (a, b) in pairs.items() if a != b]
        if wrong:
            problems.append(f"{len(wrong)} tensors of another {what} ({_some(wrong)})")
    if problems:
        raise MemerError(
            f"{tuned.root} does not match the base {base.root}: "
            + "; ".join(problems)
            + f"; {len(both)} agree in name"
        )
    return drop


def _check_tied_head(files: WeightFiles) -> None:
    embeddings = [name for name in files.entries if name.endswith(EMBEDDING_SUFFIX)]
    if embeddings and not torch.equal(files.read(HEAD_KEY), files.read(embeddings[0])):
        raise MemerError(
            f"{files.root}: config.json ties {HEAD_KEY} to {embeddings[0]}, but the stored tensors differ; "
            "correct tie_word_embeddings or drop the stored head"
        )


def _some(names: Sequence[str] | set[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (", ..." if len(names) > 3 else "")


def merge_info(report: MergeReport, *, adapter: bool, base: Path, tuned: Path) -> dict[str, Any]:
    """The record that goes into the merged directory; folders by name only, hashes say what they held."""
    return {
        "alpha": report.alpha,
        "rule": ADAPTER_RULE if adapter else RULE,
        "base": {"name": base.resolve().name, "content_hash": report.base_hash},
        "tuned": {"name": tuned.resolve().name, "content_hash": report.tuned_hash, "adapter": adapter},
        "tensors": {
            "written": report.num_tensors,
            "changed": report.num_changed,
            "flagged": list(report.flagged),
        },
        "versions": package_versions(),
    }


def _seal_like(folder: Path, report: MergeReport, *, base: Path, tuned: Path) -> None:
    """Make the merge of an artifact an artifact, so that it can be loaded as a policy."""
    known = Provenance.load(tuned) if (tuned / PROVENANCE_FILE).is_file() else None
    seal_artifact(
        folder,
        contract=Contract.load(tuned),
        base_name=known.base_name if known else base.resolve().name,
        base_hash=report.base_hash,
        alpha=report.alpha,
        step=known.step if known else 0,
        planner=known.planner if known else DEFAULT_PLANNER,
    )


def alpha_name(alpha: float) -> str:
    """Folder name of one alpha: two digits, more where they are needed.

    >>> alpha_name(0.8), alpha_name(0.125)
    ('alpha_0.80', 'alpha_0.125')
    """
    short = f"{alpha:.2f}"
    return f"alpha_{short if float(short) == alpha else repr(float(alpha))}"


def _existing_parent(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _print_progress(done: int, total: int, *, every: int = 1 << 28) -> None:
    if done == total or done // every != (done - (1 << 20)) // every:
        print(f"\rmerging {done / 1e9:6.2f} of {total / 1e9:.2f} GB", end="", file=sys.stderr, flush=True)
    if done == total:
        print(file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m memer.merge", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--base", required=True, type=Path, help="model directory before training")
    parser.add_argument(
        "--tuned", required=True, type=Path, help="model directory or LoRA adapter after training"
    )
    parser.add_argument(
        "--alpha",
        required=True,
        type=float,
        action="append",
        help="share of the tuned model, 0..1; given several times: one folder alpha_0.80 each under --out",
    )
    parser.add_argument("--out", required=True, type=Path, help="new directory")
    given = parser.parse_args(arguments)

    def command() -> None:
        if any(math.isnan(alpha) for alpha in given.alpha) or len(set(given.alpha)) < len(given.alpha):
            raise UsageError(f"--alpha: {given.alpha}, needs different numbers between 0 and 1")
        single = len(given.alpha) == 1
        outs = {alpha: given.out if single else given.out / alpha_name(alpha) for alpha in given.alpha}
        progress = _print_progress if sys.stderr.isatty() else None
        for report in merge_many(given.base, given.tuned, outs, progress=progress):
            print(
                f"{report.out}: alpha {report.alpha:g}, {report.num_tensors} tensors, "
                f"{report.num_changed} changed, {report.num_bytes / 1e9:.2f} GB, {report.seconds:.1f} s"
            )

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
