"""Reading the public form back: any `train.json` with its pictures, ours or the public exporter's."""

import json
import mmap
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memer.cameras import decode_jpeg
from memer.errors import MemerError, SourceUnavailableError
from memer.prompts import parse_answer
from memer.sample import FrameKey, PlannerQuestion, PlannerSample

_MARK = "<image>"
#: Strings as a whole, so that braces inside them do not count.
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)
_FRAME = re.compile(r"episode_(\d+)/frame_(\d+)\.\w+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicRecord:
    """One checked record.

    Attributes:
        id: `episode_%06d_t%06d` in the public data.
        images: paths relative to the folder of train.json, memory first.
        num_memory: how many of them are memory images.
        system: text of the system turn, empty without one.
        human: the human turn, with one mark per picture.
        instruction: the task.
        subtask: label of the answer.
        positions: 1-indexed window positions of the answer.
        episode_index: None when neither metadata nor paths tell it.
        step: raw frame t, likewise.
    """

    id: str
    images: tuple[str, ...]
    num_memory: int
    system: str
    human: str
    instruction: str
    subtask: str
    positions: tuple[int, ...]
    episode_index: int | None
    step: int | None


class PublicSet:
    """A `train.json`, indexed in one pass and read record by record.

    Args:
        path: the file or its folder.
        name: data set name given to the samples.

    Raises:
        SourceUnavailableError: no such file.
        MemerError: not a list of objects.
    """

    def __init__(self, path: Path | str, *, name: str = "public") -> None:
        self.path = Path(path) / "train.json" if Path(path).is_dir() else Path(path)
        self.name = name
        try:
            with (
                self.path.open("rb") as stream,
                mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as text,
            ):
                self._spans = self._index(text)
        except OSError as error:
            raise SourceUnavailableError(f"{self.path}: cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise MemerError(f"{self.path}: not a list of records ({error})") from None

    def __len__(self) -> int:
        return len(self._spans)

    def __iter__(self) -> Iterator[PublicRecord]:
        for number in range(len(self)):
            yield self.record(number)

    def record(self, number: int) -> PublicRecord:
        """One record, checked.

        Raises:
            MemerError: names the record, the field and the value.
        """
        start, end = self._spans[number]
        with self.path.open("rb") as stream:
            stream.seek(start)
            content = stream.read(end - start)
        where = f"{self.path}: record {number}"
        try:
            values = json.loads(content)
        except ValueError as error:
            raise MemerError(f"{where}: not JSON ({error})") from None
        return _checked(values, where=where)

    def sample(self, number: int) -> PlannerSample:
        """One record as a training sample, its pictures decoded."""
        record = self.record(number)
        keys = [self._key(record, path) for path in record.images]
        memory, recent = keys[: record.num_memory], keys[record.num_memory :]
        frames = {key: self._picture(path) for key, path in zip(keys, record.images, strict=True)}
        return PlannerSample(
            sample_id=record.id,
            source=self.name,
            episode_index=-1 if record.episode_index is None else record.episode_index,
            step=recent[-1][2] if record.step is None else record.step,
            question=PlannerQuestion(
                instruction=record.instruction,
                memory_keys=tuple(memory),
                recent_keys=tuple(recent),
                frames=frames,
            ),
            subtask=record.subtask,
            positions=record.positions,
        )

    def system_text(self) -> str:
        """The system text, which a contract for this data must use word for word.

        Raises:
            MemerError: the records differ in it.
        """
        texts = {record.system for record in self}
        if len(texts) != 1:
            raise MemerError(f"{self.path}: {len(texts)} different system texts; train on one form at a time")
        return texts.pop()

    def _index(self, text: mmap.mmap) -> list[tuple[int, int]]:
        spans: list[tuple[int, int]] = []
        depth = start = 0
        for token in _TOKENS.finditer(text):
            sign = token.group()
            if sign in (b"[", b"{"):
                if depth == 0 and sign != b"[":
                    raise ValueError("does not start with [")
                if depth == 1:
                    if sign != b"{":
                        raise ValueError(f"byte {token.start()}: record is no object")
                    start = token.start()
                depth += 1
            elif sign in (b"]", b"}"):
                depth -= 1
                if depth == 1:
                    spans.append((start, token.end()))
        if depth != 0 or not spans:
            raise ValueError("cut off or empty")
        return spans

    def _key(self, record: PublicRecord, path: str) -> FrameKey:
        found = _FRAME.search(path)
        if found is None:
            raise MemerError(
                f"{self.path}: {record.id}: picture {path!r} is not named episode_N/frame_N; rename it"
            )
        return self.name, int(found.group(1)), int(found.group(2))

    def _picture(self, path: str) -> NDArray[np.uint8]:
        file = (self.path.parent / path).resolve()
        if self.path.parent.resolve() not in file.parents:
            raise MemerError(f"{self.path}: picture {path!r} lies outside the data set")
        try:
            return decode_jpeg(file.read_bytes(), where=str(file))
        except OSError as error:
            raise SourceUnavailableError(f"{file}: cannot be read ({error.strerror})") from None


def _checked(values: dict[str, Any], *, where: str) -> PublicRecord:
    images = values.get("image")
    if not isinstance(images, list) or not images or not all(isinstance(path, str) for path in images):
        raise MemerError(f"{where}: image is {images!r}, must be a list of paths")
    turns: dict[str, str] = {}
    conversations = values.get("conversations")
    for turn in conversations if isinstance(conversations, list) else []:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str) or turn.get("from") in turns:
            raise MemerError(f"{where}: conversations hold {turn!r}, must be from and value, each role once")
        turns[str(turn.get("from"))] = turn["value"]
    if not {"human", "gpt"} <= turns.keys() <= {"system", "human", "gpt"}:
        raise MemerError(f"{where}: roles {sorted(turns)}, must be human and gpt, with or without system")
    human = turns["human"]
    if human.count(_MARK) != len(images):
        raise MemerError(f"{where}: {human.count(_MARK)} marks {_MARK} for {len(images)} pictures")
    metadata = values.get("metadata") or {}
    num_memory = _num_memory(human)
    if "memory_indices" in metadata and len(metadata["memory_indices"]) != num_memory:
        raise MemerError(
            f"{where}: {len(metadata['memory_indices'])} memory_indices, "
            f"{num_memory} memory pictures in the text"
        )
    answer = parse_answer(turns["gpt"], num_positions=len(images) - num_memory)
    if not answer.ok or answer.subtask is None:
        raise MemerError(f"{where}: answer {turns['gpt']!r} cannot be read ({answer.error})")
    if answer.dropped:
        raise MemerError(f"{where}: positions {list(answer.dropped)} lie outside the window")
    place = _FRAME.search(images[-1])
    episode, step = (int(place.group(1)), int(place.group(2))) if place else (None, None)
    return PublicRecord(
        id=str(values.get("id", "")),
        images=tuple(images),
        num_memory=num_memory,
        system=turns.get("system", ""),
        human=human,
        instruction=str(metadata.get("instruction") or _instruction(human)),
        subtask=answer.subtask,
        positions=tuple(answer.positions),
        episode_index=metadata.get("episode_index", episode),
        step=metadata.get("timestep", step),
    )


def _num_memory(human: str) -> int:
    """Pictures before the last text that stands between pictures; none if pictures come in one row."""
    between: Sequence[str] = human.split(_MARK)[1:-1]
    return next((k + 1 for k in reversed(range(len(between))) if between[k].strip()), 0)


def _instruction(human: str) -> str:
    for line in human.splitlines():
        if line.startswith("Task:"):
            return line.removeprefix("Task:").strip()
    return ""
