"""Generated answers at validation, by a real trainer."""

from collections.abc import Sequence

import lightning.pytorch as pl
import pytest

from callbacks.answers import AnswerScores
from memer.errors import UsageError
from memer.prompts import answer_text
from memer.sample import PlannerSample
from tests.callbacks.small_fit import CONTRACT, Data, OneWeight


class Answering(OneWeight):
    """Right about every second question; asked how often."""

    asked = 0

    def answer_samples(self, samples: Sequence[PlannerSample]) -> list[str]:
        self.asked += 1
        right = answer_text(samples[0].subtask, (), CONTRACT.prompt)
        return [right if k % 2 else right.replace("left", "lift") for k, _ in enumerate(samples)]


class Silent(OneWeight):
    answer_samples = None


def trainer(count: int = 4) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        max_steps=4,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[AnswerScores(count=count)],
    )


def test_every_validation_asks_the_same_questions_and_logs_scores() -> None:
    module, run = Answering(), trainer()
    run.fit(module, datamodule=Data())
    assert module.asked == 2
    assert float(run.callback_metrics["val/answer_exact"]) == pytest.approx(0.5)
    assert float(run.callback_metrics["val/edit_distance"]) == pytest.approx(0.5)


def test_a_model_that_answers_nothing_is_left_alone() -> None:
    run = trainer()
    run.fit(Silent(), datamodule=Data())
    assert "val/answer_exact" not in run.callback_metrics


def test_an_impossible_count_is_named() -> None:
    with pytest.raises(UsageError, match=r"AnswerScores\.count: 0"):
        AnswerScores(count=0)
