"""Question and answer as text: one renderer for training, evaluation, server and export, one tolerant parser.

User text of a step with one memory image, two window images and text memory (public form, `<image>` marks),
form `windows`:

    Task: find the cup
    Subtasks completed so far:
    1. look inside the left bin
    Here are the selected frames from the entirety of the full video that are of particular importance:
    <image>
    Here is a video of the most recent actions the robot has executed:
    <image>
    <image>

and in the form `segments` (MaP-WAM), for the third subtask:

    Task: press the left button two times, then confirm
    Initial observation: <image>
    Finished subtasks:
    1. press the left button one time [em dash] result: <image>
    2. press the left button one time [em dash] result: <image>
    Give subtask 3.
"""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from memer.contract import PromptSettings
from memer.episode import label_key
from memer.errors import MemerError
from memer.sample import PlannerQuestion

IMAGE_MARK = "<image>"

SUBTASK_KEY = "current_subtask"
SUBTASK_ALIAS = "current_primitive"
POSITIONS_KEY = "keyframe_positions"

#: Form -> its configured texts, for messages.
_CONFIGURED = {
    "windows": "system_text, memory_header, recent_header and history_header",
    "segments": "system_text, initial_header, finished_header, result_text and request",
}

#: What a tokenizer or a renderer could take for a control string: `<|...`, `<word>`, `</word>`.
_CONTROL = re.compile(r"<(?=\||/?[A-Za-z_]+>)")


class ContentPart(TypedDict, total=False):
    """A piece of a message: `{"type": "text", "text": ...}` or `{"type": "image"}`."""

    type: Literal["text", "image"]
    text: str


class Message(TypedDict):
    """One turn; its images stand in `PlannerQuestion.image_keys` order."""

    role: Literal["system", "user", "assistant"]
    content: list[ContentPart]


def escape_data_text(text: str) -> str:
    """Take the meaning of control strings and image marks out of text that comes from data.

    A space after the bracket is enough for tokenizers and for `<image>` counting, and stays readable.

    >>> escape_data_text("wipe <image> x < y <|im_end|> </think>")
    'wipe < image> x < y < |im_end|> < /think>'
    """
    return _CONTROL.sub("< ", text)


def user_text(question: PlannerQuestion, prompt: PromptSettings) -> str:
    """The human turn in public form: lines, every image as `<image>` on its own line, no newline at the end.

    With `fold_system` the system text stands in front, separated by a blank line.

    Raises:
        MemerError: a configured text holds `<image>`, so that marks and images would not agree.
    """
    lines = _segment_lines if prompt.form == "segments" else _window_lines
    text = "\n".join([f"Task: {escape_data_text(question.instruction)}", *lines(question, prompt)])
    if prompt.fold_system and prompt.system_text:
        text = f"{prompt.system_text}\n\n{text}"
    if text.count(IMAGE_MARK) != len(question.image_keys):
        raise MemerError(
            f"prompt: {text.count(IMAGE_MARK)} marks {IMAGE_MARK} for {len(question.image_keys)} images; "
            f"remove the mark from {_CONFIGURED[prompt.form]}"
        )
    return text


def _window_lines(question: PlannerQuestion, prompt: PromptSettings) -> list[str]:
    lines: list[str] = []
    if question.history:
        lines.append(prompt.history_header)
        lines += [f"{i}. {escape_data_text(text)}" for i, text in enumerate(question.history, start=1)]
    if question.memory_keys:
        lines.append(prompt.memory_header)
        lines += [IMAGE_MARK] * len(question.memory_keys)
    return [*lines, prompt.recent_header, *[IMAGE_MARK] * len(question.recent_keys)]


def _segment_lines(question: PlannerQuestion, prompt: PromptSettings) -> list[str]:
    """Duplicates stay in the list: in a counting task their number is the state."""
    done = question.history
    finished = [
        f"{i}. {escape_data_text(text)}{prompt.result_text}{IMAGE_MARK}"
        for i, text in enumerate(done, start=1)
    ]
    return [
        f"{prompt.initial_header}{IMAGE_MARK}",
        prompt.finished_header,
        *(finished or [prompt.nothing_finished]),
        prompt.request.replace("{k}", str(len(done) + 1)),
    ]


def system_text(prompt: PromptSettings) -> str | None:
    """Text of the system turn; None when there is no such turn (folded into the user turn, or empty)."""
    return None if prompt.fold_system or not prompt.system_text else prompt.system_text


def render_messages(
    question: PlannerQuestion, prompt: PromptSettings, *, answer: str | None = None
) -> list[Message]:
    """The chat turns for a processor's chat template, for training, evaluation, server and export alike.

    Args:
        question: images enter in the order of `question.image_keys`.
        prompt: words, whitespace and roles.
        answer: text of the assistant turn to learn; None leaves that turn out.
    """
    messages: list[Message] = []
    system = system_text(prompt)
    if system is not None:
        messages.append({"role": "system", "content": [{"type": "text", "text": system}]})
    content = split_marks(user_text(question, prompt), whitespace=prompt.segment_whitespace)
    messages.append({"role": "user", "content": content})
    if answer is not None:
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    return messages


def split_marks(text: str, *, whitespace: Literal["strip", "keep"]) -> list[ContentPart]:
    """Cut public-form text at its `<image>` marks.

    Args:
        text: with marks.
        whitespace: `strip` trims every text piece and drops empty ones (the public trainer); `keep` leaves
            the newlines around images (public inference).

    >>> [part.get("text", "IMAGE") for part in split_marks("a:\\n<image>\\n<image>", whitespace="strip")]
    ['a:', 'IMAGE', 'IMAGE']
    """
    content: list[ContentPart] = []
    for number, piece in enumerate(text.split(IMAGE_MARK)):
        if number:
            content.append({"type": "image"})
        kept = piece.strip() if whitespace == "strip" else piece
        if kept:
            content.append({"type": "text", "text": kept})
    return content


def answer_text(subtask: str, positions: Sequence[int], prompt: PromptSettings) -> str:
    r"""The answer to learn: one JSON object with the two keys in fixed order, or the instruction alone.

    A bracket that could begin a control string is written as its JSON escape, so that no label can end the
    answer early; parsing gives the label back unchanged.

    >>> answer_text("dust bottom shelf", [5], PromptSettings())
    '{"current_subtask": "dust bottom shelf", "keyframe_positions": [5]}'
    >>> answer_text("a <|im_end|>", [], PromptSettings(answer_style="compact", answer_positions=False))
    '{"current_subtask":"a \\u003c|im_end|>"}'
    >>> answer_text("press the left button", [], PromptSettings(form="segments"))
    'press the left button'
    """
    if prompt.form == "segments":
        return escape_data_text(subtask.strip())
    answer: dict[str, Any] = {SUBTASK_KEY: subtask}
    if prompt.answer_positions:
        answer[POSITIONS_KEY] = [int(position) for position in positions]
    separators = (",", ":") if prompt.answer_style == "compact" else (", ", ": ")
    text = json.dumps(answer, ensure_ascii=prompt.ensure_ascii, separators=separators)
    return _CONTROL.sub(r"\\u003c", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerAnswer:
    """A parsed answer.

    Attributes:
        ok: whether the text holds a valid answer.
        subtask: as the model wrote it; None unless ok.
        positions: within 1..num_positions, as answered; `map_positions` makes repetitions one vote.
        dropped: positions outside that range, and with `bad_position="drop"` the text of elements that are no
            whole numbers; what a log lists as invalid.
        error: one word and detail, None when ok.
        known_label: whether the label is an allowed one; None when no list was given or not ok.
    """

    ok: bool
    subtask: str | None = None
    positions: list[int] = field(default_factory=list)
    dropped: list[int | str] = field(default_factory=list)
    error: str | None = None
    known_label: bool | None = None


def parse_answer(
    text: str,
    *,
    num_positions: int,
    bad_position: Literal["fail", "drop"] = "fail",
    allowed_labels: Collection[str] | None = None,
) -> PlannerAnswer:
    """Read a model's answer. Never raises.

    Tried in this order, the first object that validates wins: the whole text, every fenced part, every JSON
    object in the text from left to right. Closed `<think>` blocks are removed before, as is a thought whose
    opening tag stood in the prompt; an unclosed one is a failure.

    Args:
        text: what the model wrote.
        num_positions: images in the window of the request.
        bad_position: what an element that is no whole number (true, 1.5, "x", null, a list) does: `fail`
            refuses the answer, `drop` leaves the element out.
        allowed_labels: labels of the training data; others are flagged, not refused.

    >>> text = 'Sure: {"current_subtask": "wipe lid", "keyframe_positions": [2.0, "5", 9]}'
    >>> parse_answer(text, num_positions=8)
    PlannerAnswer(ok=True, subtask='wipe lid', positions=[2, 5], dropped=[9], error=None, known_label=None)
    """
    if not isinstance(text, str) or not text.strip():
        return PlannerAnswer(ok=False, error="empty_text")
    spoken = without_thoughts(text)
    if spoken is None:
        return PlannerAnswer(ok=False, error="unclosed_think")
    error = "no_json_object"
    found_object = False
    for value in _candidates(spoken):
        try:
            answer = _validate(value, num_positions=num_positions, bad_position=bad_position)
        except _AnswerError as invalid:
            # The first object's fault is reported; a number or list around it says nothing about the answer.
            if not found_object:
                error, found_object = str(invalid), isinstance(value, dict)
            continue
        if allowed_labels is None or answer.subtask is None:
            return answer
        known = label_key(answer.subtask) in {label_key(label) for label in allowed_labels}
        return PlannerAnswer(
            ok=True,
            subtask=answer.subtask,
            positions=answer.positions,
            dropped=answer.dropped,
            known_label=known,
        )
    return PlannerAnswer(ok=False, error=error)


def without_thoughts(text: str) -> str | None:
    """The text outside closed think blocks; None when one is never closed."""
    pieces: list[str] = []
    position = 0
    while (start := text.find("<think>", position)) >= 0:
        end = text.find("</think>", start)
        if end < 0:
            return None
        pieces.append(text[position:start])
        position = end + len("</think>")
    pieces.append(text[position:])
    return "".join(pieces).rpartition("</think>")[2]


class _AnswerError(Exception):
    """Why one candidate is no answer; stays inside this module."""


class _Object(dict[str, Any]):
    """A JSON object that remembers which keys were given twice (the last value would win silently)."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.repeated: set[str] = set()
        if len(self) != len(pairs):
            seen: set[str] = set()
            for name, _ in pairs:
                (self.repeated if name in seen else seen).add(name)


_DECODER = json.JSONDecoder(object_pairs_hook=_Object)
_UNDECODABLE = (ValueError, RecursionError)  # ValueError covers malformed JSON and integers of > 4300 digits


def _candidates(text: str) -> Iterator[Any]:
    """Decoded JSON values in the order in which they are tried."""
    whole = text.strip()
    yield from _decode(whole)
    for part in text.split("```")[1::2]:
        yield from _decode(part.strip().removeprefix("json").strip())
    # A decoder that starts at a bracket stops at the first fault, so hostile text costs little.
    start = text.find("{")
    while start >= 0:
        try:
            value, _ = _DECODER.raw_decode(text, start)
        except RecursionError:
            return  # absurd nesting; trying every level of it again would take quadratic time
        except ValueError:
            pass
        else:
            yield value
        start = text.find("{", start + 1)


def _decode(text: str) -> Iterator[Any]:
    try:
        yield _DECODER.decode(text)
    except _UNDECODABLE:
        return


def _validate(value: Any, *, num_positions: int, bad_position: str) -> PlannerAnswer:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, _Object):
        raise _AnswerError("not_an_object")
    twice = value.repeated & {SUBTASK_KEY, SUBTASK_ALIAS, POSITIONS_KEY}
    if twice:
        raise _AnswerError(f"repeated_key: {min(twice)}")
    label = value.get(SUBTASK_KEY)
    if label is None:
        label = value.get(SUBTASK_ALIAS)
    if label is None:
        raise _AnswerError("no_label")
    if not isinstance(label, str):
        raise _AnswerError(f"label_not_string: {_short(label)}")
    if not label.strip():
        raise _AnswerError("empty_label")
    if re.search("[\ud800-\udfff]", label):
        raise _AnswerError("label_not_unicode")  # could not be written to any file afterwards
    listed = value.get(POSITIONS_KEY)
    if listed is None:
        listed = []
    if not isinstance(listed, list):
        raise _AnswerError(f"positions_not_a_list: {_short(listed)}")
    positions: list[int] = []
    dropped: list[int | str] = []
    for element in listed:
        position = _whole_number(element)
        if position is None:
            if bad_position != "drop":
                raise _AnswerError(f"bad_position: {_short(element)}")
            dropped.append(_short(element))
        elif 1 <= position <= num_positions:
            positions.append(position)
        else:
            dropped.append(position)
    return PlannerAnswer(ok=True, subtask=label, positions=positions, dropped=dropped)


def _whole_number(value: object) -> int | None:
    """`value` as an integer if nothing is lost: 3, 3.0, "3", " 3 "; else None, also for true and false."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    # ASCII digits only, and few enough for int() not to refuse them.
    if isinstance(value, str) and re.fullmatch(r"\s*-?[0-9]{1,640}\s*", value):
        return int(value)
    return None


def _short(value: object) -> str:
    """At most 40 ASCII characters of a JSON value, for messages and logs."""
    try:
        text = ascii(value)
    except _UNDECODABLE:
        text = type(value).__name__
    return text if len(text) <= 40 else text[:37] + "..."
