"""Reading what a language planner wrote: in the form `segments` an answer is the instruction alone."""

import re
from collections.abc import Sequence

from memer.contract import PromptSettings
from memer.episode import label_key
from memer.prompts import PlannerAnswer, parse_answer, without_thoughts

_FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
#: Opening mark -> closing mark, of quotes around a whole answer.
_QUOTES = {'"': '"', "'": "'", "`": "`", "\u201c": "\u201d", "\u2018": "\u2019", "\u00ab": "\u00bb"}


def read_answer(
    text: str, prompt: PromptSettings, *, num_positions: int, subtasks: Sequence[str] = ()
) -> PlannerAnswer:
    """Read an answer of either form. Never raises.

    Args:
        text: what the model wrote.
        prompt: its form, and whether it is snapped.
        num_positions: images in the window of the request.
        subtasks: of the training data.
    """
    if prompt.form == "windows":
        return parse_answer(text, num_positions=num_positions)
    instruction = parse_instruction(text)
    if not instruction:
        return PlannerAnswer(ok=False, error="empty_text")
    if prompt.snap == "nearest" and subtasks:
        instruction = nearest_subtask(instruction, subtasks)
    return PlannerAnswer(ok=True, subtask=instruction)


def parse_instruction(text: str) -> str:
    """The instruction in what a model wrote: without thoughts, code fence, quotes and space around it.

    An unclosed thought leaves nothing, so that half a thought is never carried out. Never raises.

    >>> parse_instruction('<think>left twice</think>\\n"press the left button"\\n')
    'press the left button'
    >>> parse_instruction("```text\\npress the left button\\n```")
    'press the left button'
    """
    spoken = without_thoughts(text) if isinstance(text, str) else None
    if spoken is None:
        return ""
    fenced = _FENCED.search(spoken)
    if fenced:
        spoken = fenced[1]
    spoken = spoken.strip()
    while len(spoken) > 1 and _QUOTES.get(spoken[0]) == spoken[-1] and spoken[0] not in spoken[1:-1]:
        spoken = spoken[1:-1].strip()
    return spoken.strip("`").strip()


def nearest_subtask(text: str, subtasks: Sequence[str]) -> str:
    """The most similar subtask by edit distance; the first of equals. Case and spacing do not count.

    >>> nearest_subtask("press left buton", ["press the right button", "press the left button"])
    'press the left button'
    """
    key = label_key(text).casefold()
    return min(subtasks, key=lambda subtask: edit_distance(key, label_key(subtask).casefold()))


def edit_distance(a: str, b: str) -> int:
    """Characters to insert, delete or replace to turn one text into the other.

    >>> edit_distance("left", "lift"), edit_distance("", "abc"), edit_distance("abcd", "bcde")
    (1, 3, 2)
    """
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, start=1):
        diagonal, row[0] = row[0], i
        for j, right in enumerate(b, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (left != right))
    return row[-1]
