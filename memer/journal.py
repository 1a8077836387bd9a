"""What a rollout has finished, on disk: append-only, so that a stopped evaluation continues where it was.

    partial/
      settings.json      what is evaluated; a continuation with other settings is refused
      rows.jsonl         rows of finished episodes, one episode in one piece
      finished.jsonl     one line per finished episode: where its rows lie, its counts

An episode counts once its line in finished.jsonl is complete; rows behind the last counted byte are cut off.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from memer.errors import MemerError
from memer.folders import replacing, write_json
from memer.metrics import EpisodeScore
from memer.rollout import EpisodeRollout

PARTIAL = "partial"


class RolloutJournal:
    """Finished episodes of one run folder.

    Args:
        folder: run folder; `partial/` is made in it.
        settings: plain JSON values that decide the answers.

    Raises:
        MemerError: the folder holds episodes of other settings.
    """

    def __init__(self, folder: Path | str, *, settings: Mapping[str, Any]) -> None:
        self.folder = Path(folder) / PARTIAL
        self.folder.mkdir(parents=True, exist_ok=True)
        self._rows_path = self.folder / "rows.jsonl"
        self._finished_path = self.folder / "finished.jsonl"
        self._check_settings(json.loads(json.dumps(settings)))
        self.finished: dict[int, dict[str, Any]] = {}
        self._read_finished()
        self._end = max((entry["end"] for entry in self.finished.values()), default=0)
        with self._rows_path.open("ab") as stream:
            stream.truncate(self._end)

    def append(self, rollout: EpisodeRollout) -> None:
        """Store one finished episode; it counts from the moment this returns."""
        body = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rollout.rows).encode()
        entry = {
            "episode_index": rollout.episode_index,
            "start": self._end,
            "end": self._end + len(body),
            "representatives": rollout.representatives,
            "score": None if rollout.score is None else rollout.score.to_dict(),
            "extra": rollout.extra,
        }
        _append(self._rows_path, body)
        _append(self._finished_path, (json.dumps(entry, ensure_ascii=False) + "\n").encode())
        self._end += len(body)
        self.finished[rollout.episode_index] = entry

    def forget(self, episodes: Iterable[int]) -> None:
        """Play these again: their lines are taken out."""
        gone = set(episodes) & self.finished.keys()
        if gone:
            kept = [entry for index, entry in self.finished.items() if index not in gone]
            text = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in kept)
            with replacing(self._finished_path) as temporary:
                temporary.write_text(text, encoding="utf-8")
            self.finished = {entry["episode_index"]: entry for entry in kept}

    def score(self, episode_index: int) -> EpisodeScore:
        """Counts of a finished episode."""
        return EpisodeScore(**self.finished[episode_index]["score"])

    def rows(self, episode_index: int) -> Iterator[dict[str, Any]]:
        """Rows of a finished episode, in time order."""
        entry = self.finished[episode_index]
        with self._rows_path.open("rb") as stream:
            stream.seek(entry["start"])
            for line in stream.read(entry["end"] - entry["start"]).splitlines():
                yield json.loads(line)

    def write_predictions(self, path: Path, *, order: Iterable[int]) -> None:
        """All rows in the given order of episodes, whatever order they finished in; beside, then renamed."""
        with (
            replacing(path) as temporary,
            self._rows_path.open("rb") as source,
            temporary.open("wb") as target,
        ):
            for index in order:
                entry = self.finished[index]
                source.seek(entry["start"])
                target.write(source.read(entry["end"] - entry["start"]))

    def remove(self) -> None:
        """Delete `partial/` once the results are written."""
        shutil.rmtree(self.folder)

    def _check_settings(self, settings: dict[str, Any]) -> None:
        path = self.folder / "settings.json"
        if not path.exists():
            write_json(path, settings)
            return
        started = json.loads(path.read_text(encoding="utf-8"))
        different = sorted(
            name for name in started.keys() | settings.keys() if started.get(name) != settings.get(name)
        )
        if different:
            name = different[0]
            raise MemerError(
                f"{self.folder}: an unfinished evaluation with other settings ({name}: "
                f"{_short(started.get(name))} then, {_short(settings.get(name))} now); "
                "finish it, delete the folder, or use another run_id"
            )

    def _read_finished(self) -> None:
        """Read the complete lines; a line that a kill cut off is dropped from the file too."""
        if not self._finished_path.exists():
            return
        content = self._finished_path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        for line in whole.splitlines():
            entry = json.loads(line)
            self.finished[entry["episode_index"]] = entry
        if len(whole) != len(content):
            with self._finished_path.open("ab") as stream:
                stream.truncate(len(whole))


def _append(path: Path, content: bytes) -> None:
    with path.open("ab") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
