"""RMBenchReader: the demonstrations of one RMBench task as episodes."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data.files import read_json
from data.lerobot.findings import Findings
from data.rmbench.annotations import ANNOTATION_FILE, MergeRule, load_annotations, parse_entries
from data.rmbench.recording import RecordedFrames, camera_names, opened, picture_key, read_positions
from memer.episode import Episode, InstructionSpan, Segment
from memer.errors import MemerError, SourceUnavailableError, UsageError
from memer.settings import check_count

#: The simulation runs at 250 Hz and every 15th step is kept. Primitives add one frame at their start and end,
#: so the clock is nominal: address by frame, never by seconds.
FPS = 250.0 / 15.0

_EPISODE = re.compile(r"episode(\d+)\.hdf5")


class RMBenchReader:
    """Reads a folder `<task>/demo_clean` of RMBench.

    State at frame t is `joint_action/vector[t]`, the joint positions (left arm 6, left gripper, right arm 6,
    right gripper). The files hold no action stream: the action at t is `vector[t + 1]`, the absolute position
    whose command leads from frame t to frame t + 1; the last frame has none and repeats its own position,
    which asks the robot to stay.

    Nothing is decoded until frames are asked for, no handle stays open, and the object can be pickled.

    Args:
        root: folder that holds `data/`, `instructions/` and `language_annotation.json`.
        camera_keys: cameras to read, in this order (None: all that any episode has).
        instruction_set: `seen` or `unseen` texts of `instructions/episodeN.json`.
        instruction_number: which of them.
        instruction: text that replaces the files' ones.
        merge: how annotation entries become segments; see MergeRule.
        repeatable: texts that may repeat in a row (merge=none).
        groups: rows {text, entries} of merge=grouped.
        swap_channels: exchange red and blue of the stored pictures, as the benchmark's own files need.
        name: name of the source (None: `rmbench_<task>`).

    Raises:
        SourceUnavailableError: no recordings at `root`.
        UsageError: an option or camera that does not exist, or h5py is not installed.
    """

    fps = FPS

    def __init__(
        self,
        root: Path | str,
        *,
        camera_keys: Sequence[str] | None = None,
        instruction_set: Literal["seen", "unseen"] = "seen",
        instruction_number: int = 0,
        instruction: str | None = None,
        merge: Literal["none", "adjacent_equal", "grouped"] = "none",
        repeatable: Sequence[str] = (),
        groups: Sequence[Mapping[str, Any]] = (),
        swap_channels: bool = True,
        name: str | None = None,
    ) -> None:
        if instruction_set not in ("seen", "unseen"):
            raise UsageError(f"source.instruction_set={instruction_set!r}, must be seen or unseen")
        check_count("source.instruction_number", instruction_number, least=0)
        if instruction is not None and not str(instruction).strip():
            raise UsageError("source.instruction is empty; leave it out to take the data set's texts")
        self.root = Path(root)
        self.instruction_set: Literal["seen", "unseen"] = instruction_set
        self.instruction_number = instruction_number
        self.instruction = None if instruction is None else str(instruction)
        for option, value in (("repeatable", repeatable), ("groups", groups)):
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise UsageError(f"source.{option}={value!r}, must be a list")
        self.rule = MergeRule(merge=merge, repeatable=tuple(repeatable), groups=_group_sizes(groups))
        self.swap_channels = swap_channels
        task = self.root.resolve()
        self.name = name or f"rmbench_{task.parent.name if task.name.startswith('demo') else task.name}"
        self._recordings = _recordings(self.root)
        self._annotations = load_annotations(self.root)
        self.camera_keys = self._choose_cameras(camera_keys)

    def _choose_cameras(self, wanted: Sequence[str] | None) -> tuple[str, ...]:
        if wanted is not None and not wanted:
            raise UsageError("source.camera_keys is empty; leave it out to read all cameras")
        present: list[str] = []
        broken = 0
        for path in self._recordings.values():
            try:
                with opened(path) as handle:
                    present += [name for name in camera_names(handle) if name not in present]
            except UsageError:
                raise
            except MemerError:
                broken += 1  # reported when the episode is read
            if wanted is not None and set(wanted) <= set(present):
                break
        if broken == len(self._recordings):
            raise MemerError(
                f"{self.root}: none of {broken} recordings can be read as HDF5; fetch them again"
            )
        for key in wanted or ():
            if key not in present:
                raise UsageError(f"{self.root}: no camera {key!r}; cameras: {', '.join(present) or 'none'}")
        return tuple(wanted or present)

    def indices(self) -> list[int]:
        """Numbers of the episodes that have a recording, ascending."""
        return list(self._recordings)

    def episode(self, index: int) -> Episode:
        """One episode by its number.

        Raises:
            UsageError: there is no such recording, or its annotation needs a decision (`merge`).
            MemerError: a file is broken; the message names it.
        """
        path = self._recordings.get(index)
        if path is None:
            numbers = list(self._recordings)
            raise UsageError(
                f"{self.root}: no data/episode{index}.hdf5; {len(numbers)} recordings, "
                f"{numbers[0]}..{numbers[-1]}"
            )
        where = f"{path}: episode {index}"
        with opened(path) as handle:
            state = read_positions(handle, where=where)
            cameras = {}
            for key in self.camera_keys:
                pictures = handle.get(picture_key(key))
                if pictures is None:
                    raise MemerError(f"{where}: no pictures of camera {key} ({picture_key(key)})")
                if len(pictures) != len(state):
                    raise MemerError(
                        f"{where}: camera {key} has {len(pictures)} frames, joint_action {len(state)}; "
                        "fetch the file again"
                    )
                cameras[key] = RecordedFrames(path, key, len(state), self.swap_channels)
        text, texts = self._instruction(index)
        segments = self._segments(index, len(state))
        return Episode(
            source=self.name,
            episode_index=index,
            fps=FPS,
            cameras=cameras,
            state=state,
            action=np.concatenate([state[1:], state[-1:]]),
            instructions=(InstructionSpan(0, text),),
            segments=segments,
            metadata={
                "instructions": texts,
                "unannotated_tail": len(state) - (segments[-1].end if segments else 0),
            },
        )

    def _segments(self, index: int, num_frames: int) -> tuple[Segment, ...]:
        if self._annotations is None or index not in self._annotations:
            return ()
        where = f"{self.root / ANNOTATION_FILE}: episode {index}"
        entries = parse_entries(self._annotations[index], where=where)
        return self.rule.segments(entries, num_frames=num_frames, where=where)

    def _instruction(self, index: int) -> tuple[str, dict[str, list[str]]]:
        """The text in force, and all texts of the file."""
        path = self.root / "instructions" / f"episode{index}.json"
        if not path.exists():
            if self.instruction is None:
                raise MemerError(
                    f"{path}: no such file; fetch it, or give one text with source.instruction=TEXT"
                )
            return self.instruction, {}
        value = read_json(path, missing="")
        texts = {
            key: [str(text) for text in value[key]]
            for key in ("seen", "unseen")
            if isinstance(value, dict) and isinstance(value.get(key), list)
        }
        if self.instruction is not None:
            return self.instruction, texts
        chosen = texts.get(self.instruction_set, [])
        if self.instruction_number >= len(chosen) or not chosen[self.instruction_number].strip():
            raise MemerError(
                f"{path}: no {self.instruction_set} instruction number {self.instruction_number} "
                f"({len(chosen)} there); choose another source.instruction_set or instruction_number"
            )
        return chosen[self.instruction_number], texts

    def report(self) -> dict[str, Any]:
        """Counts over all episodes and what is wrong with them, as plain JSON values; decodes no picture."""
        findings = Findings()
        frames = tail = 0
        segments: Counter[str] = Counter()
        for index in self.indices():
            try:
                episode = self.episode(index)
            except MemerError as error:
                findings.error("episode_unusable", episode=index, value=str(error))
                continue
            frames += episode.num_frames
            segments.update(segment.label for segment in episode.segments)
            if episode.segments:
                tail += episode.metadata["unannotated_tail"]
            else:
                advice = "labels=file names segments, or it is left out"
                findings.warning("episode_unannotated", episode=index, advice=advice)
        for index in sorted(set(self._annotations or ()) - set(self._recordings)):
            findings.warning("recording_missing", episode=index, value="annotated, but no data file")
        return {
            "name": self.name,
            "root": str(self.root),
            "cameras": list(self.camera_keys),
            "merge": self.rule.merge,
            "episodes": len(self._recordings),
            "frames": frames,
            "unannotated_tail_frames": tail,
            "segments": dict(sorted(segments.items())),
            "errors": len(findings.errors),
            "warnings": len(findings.items) - len(findings.errors),
            "findings": findings.to_list(),
        }


def _recordings(root: Path) -> dict[int, Path]:
    """Episode number -> file, ascending."""
    folder = root / "data"
    if not folder.is_dir():
        raise SourceUnavailableError(f"{root}: no data/ there; name the folder .../<task>/demo_clean")
    found = {
        int(match[1]): path
        for path in folder.iterdir()
        if (match := _EPISODE.fullmatch(path.name)) is not None
    }
    if not found:
        raise SourceUnavailableError(f"{folder}: no episodeN.hdf5 there; fetch the recordings")
    return dict(sorted(found.items()))


def _group_sizes(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for row in rows:
        if not isinstance(row, Mapping) or set(row) != {"text", "entries"}:
            raise UsageError(f"source.groups: {row}, must be {{text: TEXT, entries: N}}")
        sizes[str(row["text"])] = row["entries"]
    return sizes
