"""Sums over an accumulation window: what the loss is divided by, what is logged, what stops the run."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memer.errors import MemerError
from models.collate import PackedBatch
from models.prompt_encoder import LABEL, POSITIONS

log = logging.getLogger(__name__)

NUM_KINDS = 4
#: Dropped samples are judged once this many were seen.
_SEEN_BEFORE_JUDGING = 200


class AnswerWindow:
    """Losses of the answer tokens since the last optimizer step, by kind of token.

    Attributes:
        size: micro-batches inside.
        sample_ids: samples inside, of this rank.
    """

    def __init__(self) -> None:
        self.size = 0
        self.sample_ids: list[str] = []
        self._sums: Tensor | None = None

    def add(self, losses: Tensor, hits: Tensor, *, kinds: Tensor, sample_ids: Sequence[str]) -> None:
        """Take in a micro-batch.

        Args:
            losses: float32[A], cross entropies.
            hits: bool[A], True = the most likely token is the right one.
            kinds: int64[A], what each token belongs to.
            sample_ids: for messages.
        """
        values = torch.stack([losses.detach(), torch.ones_like(losses), hits.to(losses)])
        sums = values.new_zeros(3, NUM_KINDS).index_add_(1, kinds, values)
        self._sums = sums if self._sums is None else self._sums + sums
        self.sample_ids += sample_ids
        self.size += 1

    def close(self, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """float32[3, NUM_KINDS]: summed losses, tokens and hits of all ranks; the window starts anew.

        Args:
            reduce: sums a tensor over ranks.
        """
        assert self._sums is not None, "an optimizer step without a micro-batch"
        sums = reduce(self._sums)
        self.__init__()  # type: ignore[misc]
        return sums


def window_figures(sums: Sequence[Sequence[float]]) -> dict[str, float]:
    """Means per answer token, as a whole and for the label's and the positions' tokens."""
    losses, counts, hits = sums
    total = sum(counts)
    figures = {"loss": sum(losses) / total, "accuracy": sum(hits) / total, "answer_tokens": total}
    for name, kind in (("label", LABEL), ("positions", POSITIONS)):
        if counts[kind]:
            figures[f"loss_{name}"] = losses[kind] / counts[kind]
    return figures


def check_step(*, loss: float, grad_norm: float, step: int, sample_ids: Sequence[str]) -> None:
    """Stop before the weights change.

    Raises:
        MemerError: loss or gradient norm is not finite, or exactly zero.
    """
    if not math.isfinite(loss):
        fault = f"loss is {loss}"
    elif not math.isfinite(grad_norm):
        fault = f"gradient norm is {grad_norm}"
    elif loss == 0:
        fault = "loss is exactly 0"
    elif grad_norm == 0:
        fault = "gradient norm is exactly 0"
    else:
        return
    more = " ..." if len(sample_ids) > 4 else ""
    raise MemerError(
        f"step {step}: {fault}; samples {', '.join(sample_ids[:4])}{more}; "
        "lower the learning rate or look at these samples"
    )


@dataclass(slots=True, kw_only=True)
class DroppedSamples:
    """Counts samples that were too long for the model.

    Attributes:
        seen: samples of all batches so far, of this rank.
        dropped: of those, left out.
    """

    seen: int = 0
    dropped: int = 0

    def count(self, batch: PackedBatch, *, max_length: int, max_share: float) -> None:
        """Take in a batch; samples that were left out are named in the log.

        Raises:
            MemerError: more than `max_share` of the samples were left out.
        """
        self.seen += len(batch.dropped_ids) + len(batch.sample_ids)
        self.dropped += len(batch.dropped_ids)
        if not batch.dropped_ids:
            return
        named = ", ".join(batch.dropped_ids)
        log.warning("left out %d samples above max_length=%d: %s", len(batch.dropped_ids), max_length, named)
        if self.seen >= _SEEN_BEFORE_JUDGING and self.dropped / self.seen > max_share:
            raise MemerError(
                f"{self.dropped} of {self.seen} samples exceed max_length={max_length}, above "
                f"max_dropped_share={max_share}; raise max_length or show fewer or smaller pictures"
            )
