"""The planner's own answers at validation, generated and not only predicted token by token.

val/answer_exact    share of answers that are the demonstrated subtask
val/edit_distance   characters between answer and subtask, mean
"""

from collections.abc import Sequence

import lightning.pytorch as pl

from callbacks.samples import AnswersSamples, GivesExamples
from memer.contract import Contract
from memer.episode import label_key
from memer.errors import UsageError
from memer.instructions import edit_distance, read_answer
from memer.sample import PlannerSample


class AnswerScores(pl.Callback):
    """Asks validation questions, the same ones every time, and compares the answers.

    Every rank asks all of them, so that the figures need no exchange.

    Args:
        count: questions, spread over the validation data; all of them where there are fewer.
    """

    def __init__(self, *, count: int = 64) -> None:
        if count < 1:
            raise UsageError(f"AnswerScores.count: {count!r}, must be >= 1")
        self.count = count
        self._samples: list[PlannerSample] = []

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ask and log."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        if trainer.sanity_checking or not isinstance(pl_module, AnswersSamples):
            return
        if not self._samples:
            if not isinstance(data, GivesExamples):
                raise UsageError(f"AnswerScores: {type(data).__name__} has no example_samples to ask")
            self._samples = data.example_samples(self.count)
        answers = pl_module.answer_samples(self._samples)
        for name, value in answer_scores(answers, self._samples, data.contract).items():
            pl_module.log(f"val/{name}", value, on_step=False, on_epoch=True, batch_size=len(self._samples))


def answer_scores(
    answers: Sequence[str], samples: Sequence[PlannerSample], contract: Contract
) -> dict[str, float]:
    """Exact match and mean edit distance of answers, read and snapped as at run time."""
    exact = distance = 0
    for answer, sample in zip(answers, samples, strict=True):
        read = read_answer(
            answer,
            contract.prompt,
            num_positions=len(sample.question.recent_keys),
            subtasks=contract.subtasks,
        )
        said, wanted = label_key(read.subtask or ""), label_key(sample.subtask)
        exact += said == wanted
        distance += edit_distance(said, wanted)
    return {"answer_exact": exact / len(samples), "edit_distance": distance / len(samples)}
