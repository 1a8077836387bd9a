"""A look at what the model is asked and answers: sample prompts with their pictures, locally and in W&B.

    run_dir/samples/step_00000500.json     texts, the answer to learn, the model's own answer
    run_dir/samples/step_00000500/*.jpg    the pictures as the model sees them

The samples stay the same over the run, so that answers can be compared. Samples of plans are strips of
frames, see `callbacks.plan_samples`.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
from PIL import Image

from callbacks.plan_samples import DrawsPlans, plan_record
from callbacks.wandb_runs import wandb_run
from memer.contract import Contract
from memer.errors import UsageError
from memer.folders import replacing, write_json
from memer.instructions import read_answer
from memer.prompts import answer_text, system_text, user_text
from memer.sample import PlannerSample

log = logging.getLogger(__name__)


@runtime_checkable
class GivesExamples(Protocol):
    """A data module that can show some of its samples."""

    contract: Contract

    def example_samples(self, count: int) -> list[Any]:
        """The same `count` samples at every call, spread over the data."""
        ...


@runtime_checkable
class AnswersSamples(Protocol):
    """A model that can be asked in the middle of training, and goes on as if it had not been."""

    def answer_samples(self, samples: Sequence[PlannerSample]) -> list[str]:
        """Its answers as text."""
        ...


class SampleLog(pl.Callback):
    """Writes sample prompts at the first step and after every validation.

    Args:
        count: prompts; 0 writes none.
        every_n_validations: of the validations that are followed by a look.
        run_dir: where to write; None is the trainer's default root.
    """

    def __init__(
        self, *, count: int = 4, every_n_validations: int = 1, run_dir: Path | str | None = None
    ) -> None:
        for name, value, least in (("count", count, 0), ("every_n_validations", every_n_validations, 1)):
            if value < least:
                raise UsageError(f"SampleLog.{name}: {value!r}, must be >= {least}")
        self.count = count
        self.every_n_validations = every_n_validations
        self.run_dir = run_dir
        self._samples: list[Any] = []
        self._validations = 0
        self._last_step = -1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Choose the samples and write them once before training changes anything."""
        self._last_step, self._validations = -1, 0
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not self.count or not trainer.is_global_zero:
            return
        if not isinstance(data, GivesExamples):
            log.warning("no sample prompts: %s has no example_samples", type(data).__name__)
            return
        self._samples = data.example_samples(self.count)
        self._write(trainer, pl_module, data.contract)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ask again."""
        if trainer.sanity_checking or not self._samples:
            return
        self._validations += 1
        if self._validations % self.every_n_validations == 0:
            self._write(trainer, pl_module, trainer.datamodule.contract)  # type: ignore[attr-defined]

    def _write(self, trainer: pl.Trainer, pl_module: pl.LightningModule, contract: Contract) -> None:
        step = trainer.global_step
        if step == self._last_step:
            return
        self._last_step = step
        folder = Path(self.run_dir or trainer.default_root_dir) / "samples"
        name = f"step_{step:08d}"
        records = [
            sample_record(sample, contract, predicted=answer, folder=folder, stem=f"{name}/{k}")
            if isinstance(sample, PlannerSample)
            else plan_record(sample, drawn=answer, folder=folder, stem=f"{name}/{k}")
            for k, (sample, answer) in enumerate(zip(self._samples, self._answers(pl_module), strict=True))
        ]
        write_json(folder / f"{name}.json", {"step": step, "samples": records})
        run = wandb_run(trainer)
        if run is not None:
            _to_wandb(run, records, folder, step)

    def _answers(self, module: pl.LightningModule) -> Sequence[Any]:
        """What the model gives for the samples, None where it is not asked."""
        if isinstance(module, AnswersSamples):
            return module.answer_samples(self._samples)
        if isinstance(module, DrawsPlans):
            return module.draw_plans(self._samples)
        return [None] * len(self._samples)


def sample_record(
    sample: PlannerSample, contract: Contract, *, predicted: str | None, folder: Path, stem: str
) -> dict[str, Any]:
    """One prompt as plain values; its pictures are written to `folder`/`stem`_NN.jpg.

    Returns:
        sample_id, text, images (file, caption), answer, and with an answer of the model predicted, parse_ok
        and right (subtask and positions equal).
    """
    question, prompt = sample.question, contract.prompt
    images = []
    memory = len(question.memory_keys)
    for k, key in enumerate(question.image_keys):
        path = folder / f"{stem}_{k:02d}.jpg"
        with replacing(path) as temporary:
            Image.fromarray(question.frames[key]).save(temporary, format="JPEG", quality=90)
        place = f"memory {k + 1}" if k < memory else f"recent {k - memory + 1}"
        caption = f"{place}: frame {key[2]}"
        images.append({"file": path.relative_to(folder).as_posix(), "caption": caption})
    system = system_text(prompt)
    text = user_text(question, prompt)
    record: dict[str, Any] = {
        "sample_id": f"{sample.source}/{sample.sample_id}",
        "text": f"{system}\n\n{text}" if system else text,
        "images": images,
        "answer": answer_text(sample.subtask, sample.positions, prompt),
        "predicted": predicted,
    }
    if predicted is not None:
        parsed = read_answer(
            predicted, prompt, num_positions=len(question.recent_keys), subtasks=contract.subtasks
        )
        record["parse_ok"] = parsed.ok
        record["right"] = (
            parsed.ok
            and parsed.subtask == sample.subtask
            and (
                prompt.form == "segments"
                or not prompt.answer_positions
                or set(parsed.positions) == set(sample.positions)
            )
        )
    return record


def _to_wandb(run: Any, records: Sequence[dict[str, Any]], folder: Path, step: int) -> None:
    import wandb

    table = wandb.Table(columns=["sample", "pictures", "prompt", "asked for", "answered", "right"])
    for record in records:
        strip = contact_strip([folder / image["file"] for image in record["images"]])
        caption = " | ".join(image["caption"] for image in record["images"])
        table.add_data(
            record["sample_id"],
            wandb.Image(strip, caption=caption),
            record["text"],
            record["answer"],
            record["predicted"],
            record.get("right"),
        )
    run.log({"samples": table, "trainer/global_step": step})


def contact_strip(paths: Sequence[Path]) -> Image.Image:
    """Pictures of one size side by side."""
    pictures = []
    for path in paths:
        with Image.open(path) as file:
            pictures.append(file.convert("RGB"))
    width, height = max(p.width for p in pictures), max(p.height for p in pictures)
    strip = Image.new("RGB", (len(pictures) * (width + 2) - 2, height))
    for k, image in enumerate(pictures):
        strip.paste(image, (k * (width + 2), 0))
    return strip
