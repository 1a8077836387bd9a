"""The public form: `train.json` (one list of records) with `media/episode_%06d/frame_%06d.jpg` beside it.

Records are written episode by episode and joined; nothing is held for the whole set. Only frames that a kept
sample shows are decoded and written, each once, as the JPEG of the stacked picture. Pictures are reused while
the data and the camera layout stay the same; then only the records are written again. Field by field the form
is that of the public exporter, so its trainer reads ours and ours reads its data (data.qwen_import).
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from data.building import (
    PLAN_FILE,
    WORK_FOLDER,
    Mode,
    Outcome,
    PlanMismatchError,
    chosen_episodes,
    existing_manifest,
    labelled_episode,
    locked,
    mismatch,
    outcomes,
    unusable,
)
from data.files import read_json
from data.sources import Labeler, Source, inputs_description, json_hash
from data.views.planner import PlannerView, PlannerViewConfig, plan_histograms
from memer.cameras import encode_jpeg, stacked_frames
from memer.contract import CameraLayout, Contract
from memer.episode import Episode
from memer.errors import MemerError, SourceUnavailableError, UsageError
from memer.folders import replacing, write_json
from memer.plan_settings import CanvasLayout
from memer.prompts import answer_text, system_text, user_text
from memer.sample import PlannerSample

TRAIN_FILE = "train.json"
MANIFEST_FILE = "export.json"
MEDIA_FOLDER = "media"


def frame_path(episode_index: int, frame: int) -> str:
    """Path of a picture, relative to the folder of train.json."""
    return f"{MEDIA_FOLDER}/episode_{episode_index:06d}/frame_{frame:06d}.jpg"


def record_of(sample: PlannerSample, *, contract: Contract, repo_id: str) -> dict[str, Any]:
    """One record of the public form; pictures in prompt order, memory first.

    Args:
        sample: question and answer; its frames are not looked at.
        contract: words, answer style, camera keys.
        repo_id: name of the data set in the metadata.
    """
    prompt, question = contract.prompt, sample.question
    system = system_text(prompt)
    turns = [] if system is None else [{"from": "system", "value": system}]
    turns += [
        {"from": "human", "value": user_text(question, prompt)},
        {"from": "gpt", "value": answer_text(sample.subtask, sample.positions, prompt)},
    ]
    answer: dict[str, Any] = {"current_subtask": sample.subtask}
    if prompt.answer_positions:
        answer["keyframe_positions"] = list(sample.positions)
    return {
        "id": sample.sample_id,
        "image": [frame_path(episode, frame) for _, episode, frame in question.image_keys],
        "conversations": turns,
        "metadata": {
            "repo_id": repo_id,
            "episode_index": sample.episode_index,
            "timestep": sample.step,
            "camera_keys": list(contract.cameras.camera_keys),
            "memory_indices": [frame for _, _, frame in question.memory_keys],
            "context_indices": [frame for _, _, frame in question.recent_keys],
            "system_prompt": prompt.system_text,
            "instruction": question.instruction,
            "answer": answer,
        },
    }


def export_qwen(
    source: Source,
    *,
    out: Path | str,
    cameras: CameraLayout,
    view: PlannerViewConfig,
    labeler: Labeler | None = None,
    episodes: Sequence[int] | None = None,
    mode: Mode = "lenient",
    num_workers: int = 0,
    repo_id: str | None = None,
    inputs: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Write a source in the public form.

    Args:
        source: the demonstrations.
        out: directory to make, to go on with, or to write new records into when only the view changed.
        cameras: layout of the stacked picture.
        view: rules, windows, words, stride; weights and noise do not apply, every chosen step is one record.
        labeler: gives episodes their segments; None takes the source's own.
        episodes: numbers to write; None for all.
        mode: strict or lenient, as for shards.
        num_workers: processes besides this one.
        repo_id: `metadata.repo_id`; None takes the source's name.
        inputs: configuration that made source and labeler.
        progress: show a progress bar.

    Returns:
        The manifest written as export.json: counts, histograms, hashes.

    Raises:
        UsageError: unknown episodes or cameras; `out` holds something else.
        MemerError: content is wrong; nothing is left behind.
        SourceUnavailableError: files cannot be reached; what is finished stays for the next try.
    """
    out = Path(out)
    indices = chosen_episodes(source, episodes)
    bound = view.bind(Contract(fps=source.fps, cameras=cameras), plain=True)
    media = {
        "source": source.name,
        "inputs": inputs_description(dict(inputs or {})),
        "cameras": json.loads(json.dumps(asdict(cameras))),
    }
    records = {
        "episodes": indices,
        "mode": mode,
        "repo_id": repo_id or source.name,
        "sample_stride": bound.sample_stride,
        "contract": bound.contract.to_dict(),
    }
    described = {"media": media, "records": records}
    old = existing_manifest(out, manifest_file=MANIFEST_FILE)
    if old is not None:
        if json_hash(old["inputs"]) == json_hash(described) and not (out / WORK_FOLDER).exists():
            return old  # a work folder would mean that new records were being written when it was stopped
        if json_hash(old["inputs"]["media"]) != json_hash(media):
            raise UsageError(mismatch(out, old["inputs"]["media"], media))
    folder = out.with_name(out.name + ".partial") if old is None else out
    with locked(folder) as work:
        try:
            _remember(work, described)
            task = _RecordTask(source, labeler, bound, folder, work, mode, repo_id or source.name)
            manifest = _export(task, indices, described=described, num_workers=num_workers, progress=progress)
        except (SourceUnavailableError, PlanMismatchError):
            raise
        except MemerError:
            # An export that was good before stays as it was.
            shutil.rmtree(work if old is not None else folder, ignore_errors=True)
            raise
        if old is not None:
            _remove_unused(folder, work)
        shutil.rmtree(work)
        if folder != out:
            os.replace(folder, out)
    return manifest


def _remember(work: Path, described: Mapping[str, Any]) -> None:
    """Keep what the work is for: other records start over, other pictures are refused."""
    plan = work / PLAN_FILE
    if plan.exists():
        old = read_json(plan, missing="")
        if json_hash(old["media"]) != json_hash(described["media"]):
            raise PlanMismatchError(mismatch(work.parent, old["media"], described["media"]))
        if json_hash(old) != json_hash(described):
            shutil.rmtree(work / "records", ignore_errors=True)
    write_json(plan, described, durable=True)
    (work / "records").mkdir(exist_ok=True)


@dataclass(frozen=True, slots=True)
class _RecordTask:
    """Writes pictures and records of one episode, unless they are there already."""

    source: Source
    labeler: Labeler | None
    view: PlannerView
    folder: Path
    work: Path
    mode: Mode
    repo_id: str

    def run(self, index: int, *, look_only: bool) -> Outcome:
        """Counts of the episode, or the reason why it cannot be used."""
        summary = self.work / "records" / f"episode_{index:06d}.json"
        if summary.exists():
            known: dict[str, Any] = read_json(summary, missing="")
            return known
        episode = labelled_episode(self.source, self.labeler, index, mode=self.mode)
        if isinstance(episode, str):
            return episode
        if look_only:
            return {}
        try:
            return self._write(episode, summary)
        except (SourceUnavailableError, UsageError):
            raise
        except MemerError as error:
            return str(error)

    def _write(self, episode: Episode, summary: Path) -> dict[str, Any]:
        view = self.view
        targets = view.targets(episode.segments, num_frames=episode.num_frames)
        plan = view.steps(targets)
        shown: set[int] = set()
        lines: list[str] = []
        for t in plan.steps:
            sample = view.sample(episode, t, targets=targets, frames=_NoFrames())
            record = record_of(sample, contract=view.contract, repo_id=self.repo_id)
            shown.update(frame for _, _, frame in sample.question.image_keys)
            lines.append(json.dumps(record, ensure_ascii=False))
        wanted = sorted(shown)
        missing = [k for k in wanted if not (self.folder / frame_path(episode.episode_index, k)).exists()]
        if missing:
            (self.folder / frame_path(episode.episode_index, 0)).parent.mkdir(parents=True, exist_ok=True)
            # The stack is coded once here, not per view as in shards: that is the public form.
            layout = replace(view.contract.cameras, jpeg_round_trip=False)
            for k, frame in zip(missing, stacked_frames(episode, layout, missing), strict=True):
                path = self.folder / frame_path(episode.episode_index, k)
                with replacing(path) as temporary:
                    temporary.write_bytes(encode_jpeg(frame, layout))
        text = "".join(line + "\n" for line in lines)
        with replacing(summary.with_suffix(".jsonl"), durable=True) as temporary:
            temporary.write_bytes(text.encode("utf-8"))
        counts = {
            "episode_index": episode.episode_index,
            "records": len(lines),
            "frames": wanted,
            "decoded": len(missing),
            "histograms": plan_histograms([(targets, plan)]),
        }
        write_json(summary, counts, durable=True)
        return counts


class _NoFrames:
    """Stands in for a frame cache where only indices and words matter."""

    _EMPTY: NDArray[np.uint8] = np.zeros((0, 0, 3), dtype=np.uint8)

    def fetch(
        self,
        episode: Episode,
        indices: Sequence[int],
        *,
        layout: CameraLayout,
        canvas: CanvasLayout | None = None,
    ) -> dict[int, NDArray[np.uint8]]:
        """Nothing is decoded."""
        return dict.fromkeys(indices, self._EMPTY)


def _export(
    task: _RecordTask,
    indices: Sequence[int],
    *,
    described: Mapping[str, Any],
    num_workers: int,
    progress: bool,
) -> dict[str, Any]:
    skipped: dict[int, str] = {}
    written: list[dict[str, Any]] = []
    strict = task.mode == "strict"
    with tqdm(total=len(indices), unit="episode", desc="export", disable=not progress) as bar:
        for index, outcome in outcomes(task, indices, num_workers=num_workers, strict=strict):
            if isinstance(outcome, str):
                skipped[index] = outcome
            elif outcome:
                written.append(outcome)
            bar.update()
    if skipped and strict:
        raise MemerError(f"{unusable(skipped, task.source.name)}; mode=lenient leaves them out")
    total = sum(counts["records"] for counts in written)
    if not total:
        reasons = unusable(skipped, task.source.name) if skipped else "no step has a labelled target"
        raise MemerError(f"no record to write: {reasons}")
    _join(task.folder / TRAIN_FILE, _lines(task.work, written))
    manifest = {
        "input_hash": json_hash(described),
        "inputs": described,
        "num_records": total,
        "num_pictures": sum(len(counts["frames"]) for counts in written),
        "num_decoded": sum(counts["decoded"] for counts in written),
        "skipped": {str(index): reason for index, reason in sorted(skipped.items())},
        "histograms": _added([counts["histograms"] for counts in written]),
        "episodes": [{"episode_index": c["episode_index"], "records": c["records"]} for c in written],
        "source_report": task.source.report(),
    }
    write_json(task.folder / MANIFEST_FILE, manifest, durable=True)
    return manifest


def _lines(work: Path, written: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for counts in written:
        path = work / "records" / f"episode_{counts['episode_index']:06d}.jsonl"
        with path.open(encoding="utf-8") as stream:
            for line in stream:
                yield line.rstrip("\n")


def _join(path: Path, lines: Iterator[str]) -> None:
    """One JSON list, a record per line, written beside and renamed."""
    with (
        replacing(path, durable=True) as temporary,
        temporary.open("w", encoding="utf-8", newline="\n") as stream,
    ):
        stream.write("[")
        for number, line in enumerate(lines):
            stream.write((",\n" if number else "\n") + line)
        stream.write("\n]\n")


def _remove_unused(folder: Path, work: Path) -> None:
    """Pictures that no record of the new train.json shows."""
    used: set[Path] = set()
    for summary in (work / "records").glob("episode_*.json"):
        counts = read_json(summary, missing="")
        used.update(folder / frame_path(counts["episode_index"], k) for k in counts["frames"])
    for picture in (folder / MEDIA_FOLDER).rglob("*.jpg"):
        if picture not in used:
            picture.unlink()


def _added(histograms: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for histogram in histograms:
        for name, value in histogram.items():
            if isinstance(value, Mapping):
                counts = total.setdefault(name, Counter())
                counts.update(value)
            else:
                total[name] = total.get(name, 0) + value
    # Numbers in their order ("none" first), labels by name.
    return {
        name: dict(sorted(value.items(), key=lambda item: (item[0].isdigit(), item[0].zfill(9))))
        if isinstance(value, Counter)
        else value
        for name, value in total.items()
    }
