"""World model and executor as the parts of a plan-following policy: caches, streams, noise, units.

Both hold the state of one episode and nothing else between calls. Codec and text encoder are those of the
contract, so that run time and training take the same path.

Source: MaP-WAM specification, section 10 (Algorithm 1).
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memer.canvas import to_pixels, to_signed
from memer.contract import Contract, plan_of
from memer.errors import MemerError
from memer.executors.base import ActionChunk, ChunkRequest, Pixels
from memer.settings import check_count
from models.codec import CodecState, make_codec
from models.collate_plans import normalizers
from models.cwm import CausalWorldModel, EvidenceCache
from models.cwm_files import load_world_model
from models.text import make_text_encoder
from models.wap import WapModel
from models.wap_cache import PlanCache
from models.wap_files import load_executor


class _ModelPart(ABC):
    """Codec, text encoder, device and noise that both parts need."""

    def __init__(self, model: torch.nn.Module, contract: Contract, *, steps: int) -> None:
        check_count("steps", steps, least=1)
        self.contract = contract
        self.plan_settings = plan_of(contract)
        self.steps = steps
        self.device = next(model.parameters()).device
        self.codec = make_codec(self.plan_settings.codec, device=self.device)
        self._texts = make_text_encoder(self.plan_settings.text, device=self.device)
        self._generator = torch.Generator(device=self.device)

    def fork(self) -> Self:
        """Another stream around the same model, before its first reset."""
        other = copy.copy(self)
        other._generator = torch.Generator(device=self.device)
        other._clear()
        return other

    @abstractmethod
    def _clear(self) -> None:
        """Forget the episode."""

    def _clip(self, frames: Pixels) -> Tensor:
        """uint8[T, H, W, 3] as float32[1, 3, T, H, W] in [-1, 1] on the device."""
        return to_signed(frames).transpose(0, 1).unsqueeze(0).to(self.device)

    def _text(self, text: str) -> Tensor:
        """float32[1, M, T]."""
        return self._texts.encode([text]).to(device=self.device, dtype=torch.float32)


class ModelVisualPlanner(_ModelPart):
    """A `VisualPlanner` around a causal world model.

    With `visual_plan: memory` the evidence cache, the encoder's and the decoder's stream grow by the real
    frames of every finished segment and live until the reset; a generated plan is decoded on a copy of the
    decoder's state and leaves none of them changed. With `current_only` every plan starts from the present
    observation alone.

    Args:
        model: in eval mode, on its device.
        contract: what it was trained with.
        steps: Euler steps per plan.
    """

    def __init__(self, model: CausalWorldModel, contract: Contract, *, steps: int = 10) -> None:
        super().__init__(model, contract, steps=steps)
        if model.visual_plan != self.plan_settings.visual_plan:
            raise MemerError(
                f"world model: visual_plan {model.visual_plan!r}, its contract says "
                f"{self.plan_settings.visual_plan!r}"
            )
        self.model = model
        self._remembers = model.visual_plan == "memory"
        self._clear()

    @classmethod
    def from_artifact(cls, path: Path | str, device: str = "cpu") -> "ModelVisualPlanner":
        """Load an exported world model."""
        model, contract = load_world_model(path, device=device)
        return cls(model, contract)

    def _clear(self) -> None:
        self.evidence = EvidenceCache()
        self.encoder: CodecState = self.codec.enc_init()
        self.decoder: CodecState = self.codec.dec_init()
        #: float32[1, C, r, h, w] of the last plan, for an executor that takes latents as they are.
        self.latents: Tensor | None = None
        self._global: Tensor | None = None

    @torch.no_grad()
    def reset(self, instruction: str, canvas: Pixels, *, seed: int) -> None:
        """Forget everything and take the first frame as evidence."""
        self._clear()
        self._generator.manual_seed(seed)
        self._global = self._text(instruction)
        if self._remembers:
            z, self.encoder = self.codec.enc_step(self.encoder, self._clip(canvas[None]))
            _, self.decoder = self.codec.dec_step(self.decoder, z)
            self.evidence = self.model.append(self.evidence, z, self._global)

    @torch.no_grad()
    def plan(self, text: str, canvas: Pixels) -> Pixels:
        """uint8[N, H, W, 3] generated frames; evidence and streams stay as they are."""
        encoded, instruction = self._text(text), self._instruction
        evidence, decoder = self.evidence, self.decoder
        if not self._remembers:
            z, _ = self.codec.enc_step(self.codec.enc_init(), self._clip(canvas[None]))
            _, decoder = self.codec.dec_step(self.codec.dec_init(), z)
            both = self.model.target_text == "plan+global"
            evidence_text = torch.cat((encoded, instruction), dim=1) if both else encoded
            evidence = self.model.append(EvidenceCache(), z, evidence_text)
        self.latents = self.model.sample(
            evidence,
            encoded,
            steps=self.steps,
            generator=self._generator,
            text_global=instruction,
        )
        frames, _ = self.codec.dec_step(decoder, self.latents)
        return to_pixels(frames[0].transpose(0, 1).clamp(-1, 1))

    @torch.no_grad()
    def write_back(self, frames: Pixels, text: str) -> None:
        """Append the real frames uint8[N, H, W, 3] of a finished segment."""
        if not self._remembers:
            return
        z, self.encoder = self.codec.enc_step(self.encoder, self._clip(frames))
        _, self.decoder = self.codec.dec_step(self.decoder, z)
        self.evidence = self.model.append(self.evidence, z, self._instruction)

    @property
    def _instruction(self) -> Tensor:
        if self._global is None:
            raise MemerError("visual planner: reset(instruction, canvas) comes before a plan")
        return self._global


class ModelExecutor(_ModelPart):
    """An `Executor` around a World-Action-Progress model.

    The plan is cached per segment, the observation per chunk; the future is not imagined. With
    `executor_context: full_history` every observed frame is cached instead of a plan.

    Args:
        model: in eval mode, on its device.
        contract: what it was trained with, with statistics.
        steps: Euler steps per chunk.
        temperature: see `WapModel.sample`.
    """

    def __init__(
        self, model: WapModel, contract: Contract, *, steps: int = 10, temperature: float = 1.0
    ) -> None:
        super().__init__(model, contract, steps=steps)
        self.model, self.temperature = model, temperature
        self.states, self.actions = normalizers(contract)
        self._classifies = self.plan_settings.progress_mode == "classification"
        self._told = self.plan_settings.progress_condition
        self._keeps_history = self.plan_settings.executor_context == "full_history"
        self._clear()

    @classmethod
    def from_artifact(cls, path: Path | str, device: str = "cpu") -> "ModelExecutor":
        """Load an exported executor."""
        model, contract = load_executor(path, device=device)
        return cls(model, contract)

    def _clear(self) -> None:
        self.prefix: PlanCache | None = None
        self._context: Tensor | None = None
        self._global: Tensor | None = None
        self._unread: list[Pixels] = []
        self._latents: Tensor | None = None

    def reset(self, instruction: str, *, seed: int) -> None:
        """Forget everything."""
        self._clear()
        self._generator.manual_seed(seed)
        self._global = self._text(instruction)

    def observe(self, canvas: Pixels) -> None:
        """Take every observation, in order; only `full_history` keeps them."""
        if self._keeps_history:
            self._unread.append(canvas)

    def follow(self, latents: Tensor) -> None:
        """float32[1, C, r, h, w] of the next segment's plan; only `plan_encoding: episodic` takes it."""
        self._latents = latents

    @torch.no_grad()
    def start_segment(self, references: Pixels | None, text: str) -> None:
        """Cache the plan that all chunks of the segment share."""
        if self._global is None:
            raise MemerError("executor: reset(instruction) comes before a segment")
        self._context = self.model.context(self._text(text), self._global)
        if self._keeps_history:
            return
        if (references is None) != (self.plan_settings.visual_plan == "none"):
            raise MemerError(
                f"executor: visual_plan {self.plan_settings.visual_plan!r}, but "
                f"{'no plan' if references is None else 'a plan'} was given"
            )
        if references is None:
            z_plan = None
        elif self.plan_settings.plan_encoding == "episodic":
            if self._latents is None:
                raise MemerError("executor: plan_encoding=episodic needs follow(latents) before a segment")
            z_plan = self._latents
        else:
            z_plan = self.codec.encode(self._clip(references))
        self.prefix = self.model.prefill_plan(z_plan, self._context)

    def act(self, canvas: Pixels, state: NDArray[np.float32], progress: float) -> ActionChunk:
        """Sample a chunk; progress is left unclipped, and zero where it is classified instead."""
        return self.act_many([self], [ChunkRequest(canvas, state, progress)])[0]

    @torch.no_grad()
    def act_many(
        self, streams: Sequence["ModelExecutor"], requests: Sequence[ChunkRequest]
    ) -> list[ActionChunk]:
        """As `act` of every stream, each with its noise; those with caches of one length share a pass."""
        inputs = [stream._inputs(r.state, r.progress) for stream, r in zip(streams, requests, strict=True)]
        prefixes = [stream._prefix(given[0]) for stream, given in zip(streams, inputs, strict=True)]
        groups: dict[int, list[int]] = {}
        for row, prefix in enumerate(prefixes):
            groups.setdefault(prefix.latents, []).append(row)
        chunks: dict[int, ActionChunk] = {}
        for rows in groups.values():
            alone = len(rows) == 1
            prefix = prefixes[rows[0]] if alone else PlanCache.join([prefixes[row] for row in rows])
            text, state = (torch.cat([inputs[row][k] for row in rows]) for k in (0, 1))
            progress = torch.cat([inputs[row][2] for row in rows]) if self._told else None
            z = self.codec.encode(torch.cat([self._clip(requests[row].canvas[None]) for row in rows]))
            observed = self.model.prefill_obs(prefix, z, text, state, progress)
            chunk = self.model.sample(
                prefix,
                observed,
                text,
                state,
                progress,
                steps=self.steps,
                temperature=self.temperature,
                generator=[streams[row]._generator for row in rows],
            )
            actions = self.actions.denormalize(chunk.actions).float().cpu().numpy()
            scores = actions[..., 0] * 0 if chunk.progress is None else chunk.progress.float().cpu().numpy()
            chunks |= {row: ActionChunk(*pair) for row, *pair in zip(rows, actions, scores, strict=True)}
        return [chunks[row] for row in range(len(requests))]

    @torch.no_grad()
    def finished(self, canvas: Pixels, state: NDArray[np.float32]) -> float:
        """Probability that the segment is finished."""
        if not self._classifies:
            raise MemerError("executor: it predicts progress and does not classify it; see progress_mode")
        context, proprioception, _ = self._inputs(state, 0.0)
        prefix = self._prefix(context)
        z = self.codec.encode(self._clip(canvas[None]))
        observed = self.model.prefill_obs(prefix, z, context, proprioception, None)
        return float(self.model.finished(prefix, observed, context, proprioception)[0])

    def _inputs(self, state: NDArray[np.float32], progress: float) -> tuple[Tensor, Tensor, Tensor]:
        """(text, normalised state, progress) as batches of one."""
        if self._context is None:
            raise MemerError("executor: start_segment comes before actions")
        normalised = torch.from_numpy(self.states.normalize(state))[None].to(self.device)
        return self._context, normalised, normalised.new_tensor([progress])

    def _prefix(self, context: Tensor) -> PlanCache:
        """The plan's cache, or the history's up to the frame before the present one."""
        if not self._keeps_history:
            assert self.prefix is not None, "start_segment made it"
            return self.prefix
        past, self._unread = self._unread[:-1], self._unread[-1:]
        if self.prefix is None:
            self.prefix = self.model.prefill_plan(None, context)
        if past:
            # Each frame alone, so that no latent depends on how many frames lie between two chunks.
            latents = torch.cat([self.codec.encode(self._clip(frame[None])) for frame in past], dim=2)
            if self.prefix.latents:
                self.prefix = self.model.extend_history(self.prefix, latents, context)
            else:
                self.prefix = self.model.prefill_plan(latents, context)
        return self.prefix
