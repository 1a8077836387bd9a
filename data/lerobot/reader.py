"""LeRobotReader: a LeRobot data set, v3.x, v2.1 or v2.0, as episodes."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from data.lerobot.address import Addressing, episodes_by_file
from data.lerobot.files import FileFinder
from data.lerobot.findings import Findings
from data.lerobot.inspect import Inspector, LoadedEpisode
from data.lerobot.meta import EpisodeEntry, Info, load_episodes, load_info, load_tasks
from data.lerobot.subtasks import SubtaskReader
from data.lerobot.survey import check_columns, check_listing, check_totals
from data.lerobot.tables import RowReader
from memer.episode import Episode, InstructionSpan
from memer.errors import MemerError, UsageError

_STATE_KEYS = ("observation.state", "state")
_ACTION_KEYS = ("action", "actions")


class LeRobotReader:
    """Reads a LeRobot data set without needing lerobot.

    Nothing is decoded until frames are asked for, no handle stays open, and the object can be pickled and
    carried over a fork. `episode(i)` reads one episode alone; `indices()`, `episodes()` and `report()` check
    all of them once.

    Args:
        root: folder that holds `meta/`.
        mode: `lenient` drops broken episodes and goes on; `strict` raises, listing all faults of one kind.
        state_key: feature with the robot's state (None: observation.state or state).
        action_key: feature with the action (None: action or actions).
        camera_keys: cameras to read, in this order (None: all that have files).
        label_source: `native` (the first form that is there), one form by name (`subtask_index`, `language`,
            `column:NAME`, `sarm`, `sarm:sparse`, `sarm:dense`, `robocoin`), or `none`.
        instruction: text that replaces the data set's tasks.
        episodes: numbers to read (None: all that are present).
        name: name of the source (None: the folder's).
        require_labels: episodes without a label are dropped (lenient) or errors (strict).
        decode_threads: threads per video decoder.

    Raises:
        SourceUnavailableError: no data set at `root`.
        UsageError: a key, camera or episode that does not exist.
        MemerError: meta/ cannot be used.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        mode: Literal["lenient", "strict"] = "lenient",
        state_key: str | None = None,
        action_key: str | None = None,
        camera_keys: Sequence[str] | None = None,
        label_source: str = "native",
        instruction: str | None = None,
        episodes: Sequence[int] | None = None,
        name: str | None = None,
        require_labels: bool = False,
        decode_threads: int = 1,
    ) -> None:
        if mode not in ("lenient", "strict"):
            raise UsageError(f"mode={mode!r}, must be lenient or strict")
        if instruction is not None and not instruction.strip():
            raise UsageError("instruction is empty; leave it out to take the data set's tasks")
        self.root = Path(root)
        self.mode: Literal["lenient", "strict"] = mode
        self.label_source = label_source
        self.require_labels = require_labels
        self.info: Info = load_info(self.root)
        self.name = name or self.root.resolve().name
        self.fps = float(self.info.fps)
        self._findings = Findings()  # of the set as a whole
        self._checked: Findings | None = None
        self._usable: tuple[int, ...] = ()
        self._label_sources: dict[str, int] = {}
        self._clock_deviation_s = 0.0
        self._tasks, task_order = load_tasks(self.root, self.info.major)
        if task_order != list(range(len(task_order))):
            self._findings.warning(
                "task_table", value=f"task_index in the order {task_order[:8]}", advice="read by value"
            )
        self._files = FileFinder(self.root, self._findings)
        self._entries = self._present(load_episodes(self.root, self.info), episodes)
        self.camera_keys = self._choose_cameras(camera_keys)
        state_key = self._choose_key("state_key", state_key, _STATE_KEYS)
        action_key = self._choose_key("action_key", action_key, _ACTION_KEYS)
        self._inspector = Inspector(
            root=self.root,
            info=self.info,
            tasks=self._tasks,
            mode=mode,
            state_key=state_key,
            action_key=action_key,
            camera_keys=self.camera_keys,
            instruction=instruction,
            subtasks=SubtaskReader(self.root, self.info, source=label_source, findings=self._findings),
            addressing=Addressing(
                root=self.root,
                fps=self.fps,
                mode=mode,
                files=episodes_by_file(self._listed),
                threads=decode_threads,
            ),
            locate=self._files.locate,
            rows=RowReader(),
        )

    def _present(self, listed: list[EpisodeEntry], chosen: Sequence[int] | None) -> dict[int, EpisodeEntry]:
        """Entries whose table exists, by number; the rest is counted as absent."""
        self._listed = listed
        entries = {entry.index: entry for entry in listed}
        present = {n: entry for n, entry in entries.items() if self._files.locate(entry, None) is not None}
        self._absent = tuple(n for n in entries if n not in present)
        check_listing(listed, absent=self._absent, info=self.info, findings=self._findings)
        if not present:
            raise MemerError(f"{self.root}: no episode present, {len(entries)} listed; fetch data/")
        if chosen is not None:
            unknown = [n for n in chosen if n not in present]
            if unknown:
                raise UsageError(
                    f"{self.root}: episodes={unknown} are not present; present: {_shown(present)}"
                )
            present = {n: entry for n, entry in present.items() if n in set(chosen)}
        return present

    def _choose_cameras(self, wanted: Sequence[str] | None) -> tuple[str, ...]:
        cameras = {key: f for key, f in self.info.features.items() if f.is_camera}
        colour = [key for key, feature in cameras.items() if not feature.depth]
        if wanted is not None:
            for key in wanted:
                if key not in cameras:
                    raise UsageError(f"{self.root}: no camera {key!r}; cameras: {', '.join(colour)}")
                if cameras[key].depth:
                    raise UsageError(f"{self.root}: camera {key!r} is a depth map and cannot be read as RGB")
            return tuple(wanted)
        kept: list[str] = []
        for key in colour:
            if cameras[key].dtype == "video" and not any(
                self._files.locate(entry, key) is not None for entry in self._entries.values()
            ):
                self._findings.warning(
                    "camera_absent",
                    camera=key,
                    value="declared, but no episode has a file",
                    advice="left out",
                )
            else:
                kept.append(key)
        return tuple(kept)

    def _choose_key(self, option: str, wanted: str | None, defaults: Sequence[str]) -> str | None:
        if wanted is not None:
            if wanted not in self.info.features:
                raise UsageError(
                    f"{self.root}: {option}={wanted!r} is no feature; features: "
                    f"{', '.join(self.info.features)}"
                )
            return wanted
        found = next((key for key in defaults if key in self.info.features), None)
        if found is None:
            value = f"none of {', '.join(defaults)} is a feature"
            self._findings.warning(
                "feature_missing", value=value, advice=f"zero columns; {option} names another"
            )
        return found

    def indices(self) -> list[int]:
        """Numbers of the usable episodes, ascending; strict mode raises if any present one is broken."""
        findings = self._check()
        if self.mode == "strict":
            findings.raise_first_class(where=str(self.root))
        if any(finding.code == "no_labels" for finding in findings.items):
            Findings([f for f in findings.items if f.code == "no_labels"]).raise_first_class(
                where=str(self.root)
            )
        if not self._usable:
            findings.raise_first_class(where=f"{self.root}: no usable episode")
            raise MemerError(f"{self.root}: no usable episode")
        return list(self._usable)

    def episodes(self) -> Iterator[Episode]:
        """The usable episodes, ascending, each read when it is asked for."""
        for index in self.indices():
            yield self.episode(index)

    def episode(self, index: int) -> Episode:
        """One episode by the source's own number.

        Raises:
            UsageError: the number is not listed, or was not chosen.
            MemerError: its files are absent or broken; the message lists the faults of the first kind.
        """
        entry = self._entries.get(index)
        if entry is None:
            if index in self._absent:
                raise MemerError(
                    f"{self.root}: episode {index} is listed but its table is absent; fetch the file"
                )
            raise UsageError(f"{self.root}: no episode {index}; present: {_shown(self._entries)}")
        findings = Findings()
        loaded = self._inspector.load(entry, findings=findings)
        if loaded is None:
            findings.raise_first_class(where=str(self.root))
            raise MemerError(f"{self.root}: episode {index} cannot be read")
        return self._episode(entry, loaded)

    def _episode(self, entry: EpisodeEntry, loaded: LoadedEpisode) -> Episode:
        def names(key: str | None) -> list[str]:
            return list(self.info.features[key].names) if key is not None else []

        return Episode(
            source=self.name,
            episode_index=entry.index,
            fps=self.fps,
            cameras=loaded.cameras,
            state=loaded.state,
            action=loaded.action,
            instructions=(InstructionSpan(0, loaded.instruction),),
            segments=loaded.labels.segments if loaded.labels else (),
            metadata={
                "clock_deviation_s": loaded.clock_deviation_s,
                "label_source": loaded.labels.source if loaded.labels else None,
                "state_names": names(self._inspector.state_key),
                "action_names": names(self._inspector.action_key),
            },
        )

    def _check(self) -> Findings:
        """All findings; every present episode is inspected once, the result travels with pickling."""
        if self._checked is not None:
            return self._checked
        findings = Findings()
        paths = {path for e in self._entries.values() if (path := self._files.locate(e, None))}
        strict = self.mode == "strict"
        check_columns(self.root, paths, info=self.info, strict=strict, findings=findings)
        check_totals(self.root, self._inspector.addressing.files, self.camera_keys, findings)
        usable: list[int] = []
        self._label_sources = {}
        bar = tqdm(
            self._entries.values(), desc=f"check {self.name}", unit="episode", disable=None, leave=False
        )
        for entry in bar:
            loaded = self._inspector.load(entry, findings=findings, deep=True)
            if loaded is None:
                continue
            self._clock_deviation_s = max(self._clock_deviation_s, loaded.clock_deviation_s)
            if self._check_labels(entry, loaded, findings):
                usable.append(entry.index)
        findings = Findings(self._findings.items + findings.items)  # late: files are located while reading
        broken = set(findings.broken_episodes())
        self._usable = tuple(n for n in usable if n not in broken)
        if self.require_labels and not self._label_sources:
            advice = "give labels=file or labels=gripper, or another label_source"
            findings.error(
                "no_labels",
                value=f"no labelled frame in any episode (label_source={self.label_source})",
                advice=advice,
            )
        if len(self._label_sources) > 1:
            counts = ", ".join(f"{name} in {count}" for name, count in self._label_sources.items())
            findings.warning("label_sources", value=counts, advice="label_source chooses one")
        self._checked = findings
        return findings

    def _check_labels(self, entry: EpisodeEntry, loaded: LoadedEpisode, findings: Findings) -> bool:
        """Count the labels; whether the episode may be used."""
        labels = loaded.labels
        if labels is not None and any(label is not None for label in labels.labels):
            self._label_sources[labels.source] = self._label_sources.get(labels.source, 0) + 1
            missing = [k for k, label in enumerate(labels.labels) if label is None]
            if missing:
                strict = self.require_labels and self.mode == "strict"
                (findings.error if strict else findings.warning)(
                    "frames_unlabelled",
                    episode=entry.index,
                    frame=missing[0],
                    value=f"{len(missing)} of {len(labels.labels)} frames",
                    advice="they give no training target",
                )
            return True
        if not self.require_labels:
            if labels is not None:
                findings.warning(
                    "episode_unlabelled", episode=entry.index, value=f"no label from {labels.source}"
                )
            return True
        add = findings.error if self.mode == "strict" else findings.warning
        add(
            "episode_unlabelled",
            episode=entry.index,
            value="no label",
            advice="label it, or read in lenient mode to skip it",
        )
        return False

    def report(self) -> dict[str, Any]:
        """The whole check as plain JSON values: counts, label source, findings by code."""
        findings = self._check()
        usable = set(self._usable)
        return {
            "name": self.name,
            "root": str(self.root),
            "version": self.info.version,
            "fps": self.fps,
            "mode": self.mode,
            "cameras": list(self.camera_keys),
            "depth_cameras": [k for k, f in self.info.features.items() if f.is_camera and f.depth],
            "label_sources": dict(self._label_sources),
            "episodes": {
                "listed": len(self._entries) + len(self._absent),
                "present": len(self._entries),
                "absent": len(self._absent),
                "usable": len(usable),
                "dropped": [n for n in self._entries if n not in usable],
            },
            "frames": sum(self._entries[n].length or 0 for n in usable),
            "largest_clock_deviation_s": round(self._clock_deviation_s, 6),
            "errors": len(findings.errors),
            "warnings": len(findings.items) - len(findings.errors),
            "findings": findings.to_list(),
        }

    def report_lines(self) -> list[str]:
        """The report as lines for people."""
        report = self.report()
        counts = report["episodes"]
        head = (
            f"{self.name}: LeRobot {self.info.version}, {counts['usable']} usable of "
            f"{counts['present']} present of {counts['listed']} listed episodes, "
            f"{report['frames']} frames at {self.fps:g} fps, "
            f"cameras {', '.join(self.camera_keys) or 'none'}"
        )
        sources = ", ".join(f"{name} ({count})" for name, count in self._label_sources.items()) or "none"
        return [head, f"labels: {sources}", *self._check().lines()]


def _shown(numbers: Any) -> str:
    ordered = sorted(numbers)
    return ", ".join(map(str, ordered[:12])) + (", ..." if len(ordered) > 12 else "")
