"""Samples of the visual planner and the executor as batches: what their views give, stacked and normalised.

Pictures stay uint8 and texts stay words here: the frozen codec and text encoder belong to the model and run
on its device. Where a feature shard brings latents and embeddings, those are stacked instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memer.contract import Contract, plan_of
from memer.errors import MemerError
from memer.normalize import Normalizer
from memer.plan_settings import LATENT_PATCH, PlanSettings
from memer.sample import ExecutorSample, VisualPlannerSample


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Batch:
    """What all batches share.

    Attributes:
        sample_ids: `source/sample_id` of every sample, for messages.
        num_frames: pictures in the batch.
        num_tokens: tokens of the model, padding left out.
    """

    sample_ids: tuple[str, ...]
    num_frames: int
    num_tokens: int

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} samples, {self.num_frames} frames)"

    def to(self, device: Any, **kwargs: Any) -> Self:
        """A copy with every tensor on `device`."""
        return self._map(lambda tensor: tensor.to(device, **kwargs))

    def pin_memory(self) -> Self:
        """A copy in page-locked memory."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        return type(self)(**{n: change(v) if isinstance(v, Tensor) else v for n, v in values.items()})


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class VisualPlannerBatch(Batch):
    """Sparse visual memories of episodes of different length; the padding repeats the last frame.

    Attributes:
        frames: uint8[B, 1 + N * K, H, W, 3]; None with latents.
        latents: float32[B, C, 1 + K * N / 4, h, w]; None with frames.
        num_segments: int64[B], true number of segments; those behind are padding.
        texts: per sample the subtasks of K segments, padded with the empty text.
        instructions: one per sample.
        text_features: float32[B, K, M, T], embeddings of `texts`; None where they were not computed ahead.
        instruction_features: float32[B, M, T]; the same.
    """

    frames: Tensor | None
    latents: Tensor | None
    num_segments: Tensor
    texts: tuple[tuple[str, ...], ...]
    instructions: tuple[str, ...]
    text_features: Tensor | None
    instruction_features: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ExecutorBatch(Batch):
    """Action chunks; h is the horizon, n the number of future latents.

    Attributes:
        plan_frames: uint8[B, 1 + N, H, W, 3]; None with latents, and without a visual plan.
        plan_latents: float32[B, C, 1 + N / 4, h', w'].
        clip_frames: uint8[B, 1 + 4 * n, H, W, 3]; None with latents.
        clip_latents: float32[B, C, 1 + n, h', w'].
        texts: subtask of each sample.
        instructions: one per sample.
        text_features: float32[B, M, T], embeddings of `texts`; None where they were not computed ahead.
        instruction_features: float32[B, M, T]; the same.
        state: float32[B, S], normalised.
        progress: float32[B] in 0..1.
        actions: float32[B, h, A], normalised.
        action_valid: bool[B, h], True = supervised.
        progress_target: float32[B, h] in 0..1.
        progress_valid: bool[B, h], True = supervised.
        latent_valid: bool[B, n], True = supervised.
        finished: float32[B], 1 = the segment is finished.
    """

    plan_frames: Tensor | None
    plan_latents: Tensor | None
    clip_frames: Tensor | None
    clip_latents: Tensor | None
    texts: tuple[str, ...]
    instructions: tuple[str, ...]
    text_features: Tensor | None
    instruction_features: Tensor | None
    state: Tensor
    progress: Tensor
    actions: Tensor
    action_valid: Tensor
    progress_target: Tensor
    progress_valid: Tensor
    latent_valid: Tensor
    finished: Tensor


class VisualPlannerCollator:
    """Pads and stacks the memories of episodes.

    Args:
        plan: settings of the contract.
    """

    #: What it takes.
    sample_type = VisualPlannerSample

    def __init__(self, plan: PlanSettings) -> None:
        self.plan = plan

    def __call__(self, samples: Sequence[VisualPlannerSample]) -> VisualPlannerBatch:
        """Stack a batch.

        Raises:
            MemerError: a sample without a segment, or frames that do not fit its segments.
        """
        most = max(len(sample.texts) for sample in samples)
        encoded = samples[0].latents is not None
        per_segment = self.plan.plan_frames // (4 if encoded else 1)
        pictures = []
        for sample in samples:
            name, count = f"{sample.source}/{sample.sample_id}", len(sample.texts)
            if count == 0:
                raise MemerError(f"{name}: no segment to plan")
            # Time first for both forms, so that they are padded alike.
            found = sample.frames if sample.latents is None else sample.latents.swapaxes(0, 1)
            if len(found) != 1 + per_segment * count:
                what = "latents" if encoded else "frames"
                raise MemerError(
                    f"{name}: {len(found)} {what} for {count} segments, must be 1 + {per_segment} * {count}"
                )
            missing = per_segment * (most - count)
            pictures.append(np.concatenate([found, np.repeat(found[-1:], missing, axis=0)]))
        stacked = torch.from_numpy(np.stack(pictures))
        return VisualPlannerBatch(
            sample_ids=_names(samples),
            num_frames=sum(1 + self.plan.plan_frames * len(sample.texts) for sample in samples),
            # Clean evidence of all segments but the last, then every segment as a target.
            num_tokens=sum(self.plan.plan_latents * (2 * len(sample.texts) - 1) + 1 for sample in samples)
            * frame_tokens(self.plan),
            frames=None if encoded else stacked,
            latents=stacked.transpose(1, 2).contiguous() if encoded else None,
            num_segments=torch.tensor([len(sample.texts) for sample in samples]),
            texts=tuple(sample.texts + ("",) * (most - len(sample.texts)) for sample in samples),
            instructions=tuple(sample.instruction for sample in samples),
            text_features=_stacked([_padded(sample.text_features, most) for sample in samples]),
            instruction_features=_stacked([sample.instruction_features for sample in samples]),
        )


class ExecutorCollator:
    """Stacks action chunks and normalises states and actions with the contract's statistics.

    Args:
        contract: with plan settings and statistics.

    Raises:
        MemerError: statistics are missing.
    """

    #: What it takes.
    sample_type = ExecutorSample

    def __init__(self, contract: Contract) -> None:
        self.plan = plan_of(contract)
        self.states, self.actions = normalizers(contract)

    def __call__(self, samples: Sequence[ExecutorSample]) -> ExecutorBatch:
        """Stack a batch."""
        plan_frames = _stacked([None if s.plan_latents is not None else s.plan_frames for s in samples])
        if plan_frames is not None and plan_frames.shape[1] == 0:
            plan_frames = None  # no visual plan
        clip_frames = _stacked([None if s.clip_latents is not None else s.clip_frames for s in samples])
        valid = _array([s.action_valid for s in samples])
        supervised = [s.action_valid if s.progress_valid is None else s.progress_valid for s in samples]
        return ExecutorBatch(
            sample_ids=_names(samples),
            num_frames=sum(len(s.plan_frames) + len(s.clip_frames) for s in samples),
            num_tokens=len(samples) * self._tokens(with_plan=self.plan.visual_plan != "none"),
            plan_frames=plan_frames,
            plan_latents=_stacked([s.plan_latents for s in samples]),
            clip_frames=clip_frames,
            clip_latents=_stacked([s.clip_latents for s in samples]),
            texts=tuple(s.text for s in samples),
            instructions=tuple(s.instruction for s in samples),
            text_features=_stacked([s.text_features for s in samples]),
            instruction_features=_stacked([s.instruction_features for s in samples]),
            state=self.states.normalize(_array([s.state for s in samples])),
            progress=torch.tensor([s.progress for s in samples], dtype=torch.float32),
            actions=self.actions.normalize(_array([s.actions for s in samples])),
            action_valid=valid,
            progress_target=_array([s.progress_target for s in samples]),
            progress_valid=_array(supervised),
            latent_valid=_array([s.latent_valid for s in samples]),
            finished=torch.tensor([float(s.finished) for s in samples]),
        )

    def _tokens(self, *, with_plan: bool) -> int:
        """Tokens of one sample: plan, present, future, actions and progress."""
        plan = self.plan
        latents = (1 + plan.plan_latents) * with_plan + 1 + plan.num_future_latents
        progress = plan.action_horizon if plan.progress_mode == "modality" else 1
        return latents * frame_tokens(plan) + plan.action_horizon + progress


def frame_tokens(plan: PlanSettings) -> int:
    """Tokens of one latent frame."""
    return plan.latent_height * plan.latent_width // LATENT_PATCH**2


def normalizers(contract: Contract) -> tuple[Normalizer, Normalizer]:
    """Those of states and of actions; states have no outliers that would need clamping less.

    Raises:
        MemerError: the contract has no plan settings or no statistics of a feature.
    """
    plan = plan_of(contract)
    for feature in ("state", "action"):
        if feature not in contract.statistics:
            raise MemerError(
                f"contract.statistics: {feature!r} is missing; they come from the training shards, "
                "see python -m data.build"
            )
    state, action = (
        Normalizer.from_statistics(
            contract.statistics[feature], mode=plan.action_norm, clamp=plan.action_clamp, feature=feature
        )
        for feature in ("state", "action")
    )
    return state, action


def _names(samples: Sequence[VisualPlannerSample] | Sequence[ExecutorSample]) -> tuple[str, ...]:
    return tuple(f"{sample.source}/{sample.sample_id}" for sample in samples)


def _array(values: Sequence[NDArray[Any]]) -> Tensor:
    return torch.from_numpy(np.stack(values))


def _stacked(values: Sequence[NDArray[Any] | None]) -> Tensor | None:
    """None where no sample has it; samples with and without cannot be stacked."""
    present = [value for value in values if value is not None]
    if present and len(present) < len(values):
        raise MemerError("batch: some samples have features computed ahead and others have not")
    return _array(present) if present else None


def _padded(values: NDArray[np.float32] | None, count: int) -> NDArray[np.float32] | None:
    """Zero rows up to `count`."""
    if values is None:
        return None
    return np.concatenate([values, np.zeros((count - len(values), *values.shape[1:]), values.dtype)])
