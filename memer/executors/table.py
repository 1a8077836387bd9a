"""A language planner that looks the next subtask up."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from memer.episode import Episode
from memer.errors import MemerError
from memer.executors.base import Pixels
from memer.folders import read_json, write_json

Table = Mapping[tuple[str, tuple[str, ...]], str]


class TablePlanner:
    """(instruction, finished subtasks) -> subtask, as in the demonstrations.

    Where no demonstration went that way, the last subtask is named again.

    Args:
        table: (instruction, finished texts) -> next text.
    """

    def __init__(self, table: Table) -> None:
        self.table = dict(table)

    @classmethod
    def from_episodes(cls, episodes: Iterable[Episode]) -> "TablePlanner":
        """Read the table from labelled episodes; the first one wins where two differ.

        Raises:
            MemerError: no episode has segments.
        """
        table: dict[tuple[str, tuple[str, ...]], str] = {}
        for episode in episodes:
            texts = [segment.label for segment in episode.segments]
            for k, text in enumerate(texts):
                table.setdefault((episode.instruction_at(0), tuple(texts[:k])), text)
        if not table:
            raise MemerError("language=table: the demonstrations have no segments")
        return cls(table)

    @classmethod
    def load(cls, path: Path | str) -> "TablePlanner":
        """Read what `save` wrote.

        Raises:
            SourceUnavailableError: no such file.
            MemerError: another form.
        """
        rows = read_json(Path(path)).get("table")
        try:
            return cls({(str(task), tuple(map(str, done))): str(text) for task, done, text in rows or ()})
        except (TypeError, ValueError) as error:
            raise MemerError(
                f"{path}: table must hold [instruction, [finished, ...], next] ({error})"
            ) from None

    def save(self, path: Path | str) -> Path:
        """Write the table as JSON."""
        rows = [[task, list(done), text] for (task, done), text in sorted(self.table.items())]
        write_json(Path(path), {"table": rows})
        return Path(path)

    def next(self, instruction: str, done: Sequence[str], images: Sequence[Pixels]) -> str:
        """The demonstrated text.

        Raises:
            MemerError: the instruction was never demonstrated.
        """
        text = self.table.get((instruction, tuple(done)))
        if text is None and not done:
            raise MemerError(
                f"language planner: no demonstration of {json.dumps(instruction)} in the table; take more "
                "demonstrations, or another language planner"
            )
        return done[-1] if text is None else text
