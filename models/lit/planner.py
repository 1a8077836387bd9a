"""Training of the MemER planner: a thin LightningModule around a Qwen vision-language model.

Loss: cross entropy summed over the answer tokens of the whole accumulation window and all ranks, divided by
their number. The micro-batches contribute plain sums; the gradient is divided once, before clipping.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import functional as F

from memer.contract import Contract
from memer.errors import MemerError, UsageError
from memer.planners.base import PlannerRequest
from memer.sample import PlannerSample
from models.collate import PackedBatch, PlannerCollator
from models.lit.window import NUM_KINDS, AnswerWindow, DroppedSamples, check_step, window_figures
from models.lora import LoraSettings, inject_lora, lora_seed, save_adapter
from models.optim import OptimSettings, make_optimizer
from models.planner import QwenVLPlanner
from models.prompt_encoder import LABEL, POSITIONS, PromptEncoder
from models.qwen_vl import (
    Attention,
    available_attention,
    base_fingerprint,
    check_packing,
    encode_frames,
    freeze_tower,
    language_hidden,
    load_base,
    load_config,
    load_encoder,
)

STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "DeepSpeedStrategy")
PRECISIONS = ("32-true", "64-true", "bf16-mixed")


class PlannerModule(pl.LightningModule):
    """Fine-tunes the language model; the whole visual tower stays frozen and runs without gradients.

    Args:
        base: local folder or hub id of the base model.
        contract: of the data; bound to the base's model family on loading.
        optim: optimizer and schedule.
        lora: adapter settings; None trains the whole language model.
        attention: implementation; flash falls back to sdpa with a notice.
        activation_checkpointing: recompute layer by layer in the backward pass; saves memory, costs time.
        max_length: tokens; longer samples are left out and counted.
        pack_tokens: token budget of a packed row; 0 = one sample per row.
        max_dropped_share: of samples left out, above which training stops.
        seed: of the adapter's initial values and of dropout.
    """

    def __init__(
        self,
        base: str,
        *,
        contract: Contract | Mapping[str, Any],
        optim: OptimSettings | Mapping[str, Any],
        lora: LoraSettings | Mapping[str, Any] | None = None,
        attention: Attention = "sdpa",
        activation_checkpointing: bool = False,
        max_length: int = 8192,
        pack_tokens: int = 8192,
        max_dropped_share: float = 0.05,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.base = str(base)
        self.contract = contract if isinstance(contract, Contract) else Contract.from_dict(contract)
        self.optim = optim if isinstance(optim, OptimSettings) else OptimSettings(**optim)
        self.lora = LoraSettings(**lora) if isinstance(lora, Mapping) else lora
        self.attention: Attention = attention
        self.activation_checkpointing = activation_checkpointing
        self.max_length = max_length
        self.pack_tokens = pack_tokens
        self.max_dropped_share = max_dropped_share
        self.seed = seed
        self.strict_loading = (
            False  # checkpoints hold trainable tensors; on_load_checkpoint is strict about those
        )
        self.model: Any = None
        self.adapted: list[str] = []
        self._encoder: PromptEncoder | None = None
        self._fingerprint = ""
        self._window = AnswerWindow()
        self._grad_norm: Tensor | None = None
        self._dropped = DroppedSamples()
        self._remember_settings()

    def configure_model(self) -> None:
        """Load the base, freeze, adapt; does nothing the second time.

        Raises:
            SourceUnavailableError: the base is not there.
            UsageError: it is no vision-language model.
            MemerError: it does not fit the contract.
        """
        if self.model is not None:
            return
        self.make_encoder()
        self._fingerprint = base_fingerprint(self.base)
        self.model = load_base(self.base, attention=self.attention).model
        self.model.config.text_config.use_cache = False
        if self.lora is not None:
            self.adapted = inject_lora(self.model, self.lora, seed=self.seed)
        freeze_tower(self.model)
        if self.activation_checkpointing:
            self.model.model.language_model.activation_checkpointing_enable({"use_reentrant": False})
        self.train()

    def train(self, mode: bool = True) -> "PlannerModule":
        """Switch mode; the frozen tower stays in eval mode."""
        super().train(mode)
        if self.model is not None:
            self.model.model.visual.eval()
        return self

    def make_encoder(self) -> PromptEncoder:
        """The prompt encoder for this base and contract; binds the contract to the model family."""
        if self._encoder is not None:
            return self._encoder
        self.contract = replace(
            self.contract, model_family=self.contract.model_family or load_config(self.base).model_type
        )
        self._remember_settings()
        self._encoder = load_encoder(self.base, self.contract)
        return self._encoder

    def make_collator(self) -> PlannerCollator:
        """The collate function for this model's data.

        Raises:
            UsageError: packing was asked for and the model's layers would leak between samples.
        """
        flash = "flash" in available_attention(self.attention)
        if self.pack_tokens or flash:
            check_packing(load_config(self.base))
        return PlannerCollator(
            self.make_encoder(), max_length=self.max_length, pack_tokens=self.pack_tokens, single_row=flash
        )

    def trainable(self) -> dict[str, Tensor]:
        """Trainable parameters by name; a tied head counts once, as the embedding."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def answer_losses(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Cross entropy of every trained token, and whether it is the most likely one.

        Logits exist only at the positions that predict trained tokens.

        Returns:
            float32[A] with gradient and bool[A].
        """
        if batch.num_targets == 0:
            raise MemerError(f"batch without supervised tokens: samples {', '.join(batch.sample_ids[:3])}")
        features: list[Tensor] = []
        if batch.num_frames:
            geometry = self.make_encoder().geometry
            levels = encode_frames(self.model, batch.patches, grids=batch.frame_grids, geometry=geometry)
            features = [level.index_select(0, batch.image_rows) for level in levels]
        boundaries: dict[str, Any] = {}
        if "flash" in self.model.config.text_config._attn_implementation and len(batch.input_ids) == 1:
            for side in ("q", "k"):
                boundaries[f"cu_seq_lens_{side}"] = batch.cu_seq_lens
                boundaries[f"max_length_{side}"] = batch.max_seq_len
        hidden = language_hidden(
            self.model, batch.input_ids, position_ids=batch.position_ids, features=features, **boundaries
        )
        logits = self.model.lm_head(hidden.flatten(0, 1).index_select(0, batch.target_index)).float()
        losses = F.cross_entropy(logits, batch.target_ids, reduction="none")
        return losses, logits.detach().argmax(-1) == batch.target_ids

    def setup(self, stage: str) -> None:
        """Refuse precisions that lose small updates, and strategies that shard what is frozen."""
        strategy = type(self.trainer.strategy).__name__
        if stage == "fit" and strategy not in STRATEGIES:
            raise UsageError(
                f"trainer.strategy: {strategy}, must be one device, ddp or deepspeed; frozen and trained "
                "weights would share sharding units"
            )
        if stage == "fit" and str(self.trainer.precision) not in PRECISIONS:
            raise UsageError(
                f"trainer.precision: {self.trainer.precision!r}, must be one of {', '.join(PRECISIONS)}; "
                "weights kept in 16 bits lose small updates"
            )
        if stage == "fit" and self._normalizes_early and self.trainer.accumulate_grad_batches > 1:
            raise UsageError(
                "trainer.accumulate_grad_batches: must be 1 under DeepSpeed, whose gradients cannot be "
                "weighted by tokens afterwards; raise the batch size instead"
            )

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        """Sum of the answer tokens' losses; divided by their number before the optimizer steps."""
        if self.lora is not None and self.lora.dropout:
            batch_number = self.trainer.global_step * self.trainer.accumulate_grad_batches + self._window.size
            lora_seed(self.seed, rank=self.global_rank, batch=batch_number)
        self._dropped.count(batch, max_length=self.max_length, max_share=self.max_dropped_share)
        losses, hits = self.answer_losses(batch)
        self._window.add(losses, hits, kinds=batch.target_kinds, sample_ids=batch.sample_ids)
        for name, value in (
            ("frames_encoded", batch.num_frames),
            ("image_slots", batch.num_image_slots),
            ("tokens", batch.num_tokens),
            ("dropped_samples", self._dropped.dropped),
        ):
            self.log(f"train/{name}", float(value), batch_size=1)
        if self._normalizes_early:
            total = self._sum_over_ranks(losses.new_tensor(float(len(losses))))
            return losses.sum() * (self.trainer.world_size / total)
        return losses.sum()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Turn the window's summed gradient into the mean over its answer tokens, and check it.

        Raises:
            MemerError: loss or gradient is not finite, or exactly zero; the weights are untouched.
        """
        sample_ids = self._window.sample_ids
        sums = self._window.close(self._sum_over_ranks)
        if self._normalizes_early:
            self._log_figures(window_figures(sums.tolist()))
            return
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        # Lightning has divided every micro-batch by the window's length, and DDP averaged over ranks.
        windows = self.trainer.accumulate_grad_batches * self.trainer.world_size
        torch._foreach_mul_(grads, windows / sums[1].sum())
        norm = self._grad_norm = torch.nn.utils.get_total_norm(grads)
        *flat, grad_norm = torch.cat([sums.flatten(), norm.to(sums).view(1)]).tolist()  # the one sync
        figures = window_figures([flat[i : i + NUM_KINDS] for i in range(0, len(flat), NUM_KINDS)])
        check_step(
            loss=figures["loss"],
            grad_norm=grad_norm,
            step=self.trainer.global_step,
            sample_ids=sample_ids,
        )
        self._log_figures(figures | {"grad_norm": grad_norm})

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the norm that was just measured; Lightning's own way refuses fused optimizers."""
        if not gradient_clip_val:
            return
        if str(gradient_clip_algorithm or "norm").rpartition(".")[2].lower() != "norm":
            raise UsageError(f"trainer.gradient_clip_algorithm: {gradient_clip_algorithm!r}, must be norm")
        assert self._grad_norm is not None
        trained = [p for p in self.parameters() if p.grad is not None]
        torch.nn.utils.clip_grads_with_norm_(trained, gradient_clip_val, self._grad_norm)

    def validation_step(self, batch: PackedBatch, batch_idx: int) -> None:
        """Loss, and the share of samples whose greedy answer would be right to the last token."""
        losses, hits = self.answer_losses(batch)
        sample = torch.searchsorted(batch.cu_seq_lens.long(), batch.target_index, right=True) - 1
        measures = {"exact": None, "exact_label": LABEL, "exact_positions": POSITIONS}
        if self.contract.prompt.form == "segments":
            measures = {"exact": None}  # the answer is the label alone
        for name, kinds in measures.items():
            chosen = torch.ones_like(hits) if kinds is None else batch.target_kinds == kinds
            wrong = torch.zeros(len(batch.cu_seq_lens) - 1, device=hits.device)
            wrong.index_add_(0, sample, (chosen & ~hits).float())
            self.log(f"val/{name}", (wrong == 0).float().mean(), batch_size=len(wrong), **_VALIDATION)
        self.log("val/loss", losses.mean(), batch_size=len(losses), **_VALIDATION)
        for name, kinds in (("label", LABEL), ("positions", POSITIONS)):
            chosen = batch.target_kinds == kinds
            count = int(chosen.sum())
            if count:
                self.log(f"val/loss_{name}", losses[chosen].mean(), batch_size=count, **_VALIDATION)

    def answer_samples(self, samples: Sequence[PlannerSample]) -> list[str]:
        """The model's own greedy answers to some questions, as text; training goes on as before."""
        mode = self.training
        planner = QwenVLPlanner(self.model, encoder=self.make_encoder(), contract=self.contract)
        try:
            results = planner.plan(
                [
                    PlannerRequest(session=str(k), request_id=0, step=sample.step, question=sample.question)
                    for k, sample in enumerate(samples)
                ]
            )
        finally:
            self.train(mode)
        return [result.raw_text for result in results]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW over trainable parameters, cosine schedule per optimizer step."""
        optimizer, schedule = make_optimizer(self.named_parameters(), self.optim)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep trainable tensors only, and what the rest must be joined with."""
        names = self.trainable()
        checkpoint["state_dict"] = {n: t for n, t in checkpoint["state_dict"].items() if n in names}
        checkpoint["memer"] = {
            "contract": self.contract.to_dict(),
            "base": self.base,
            "base_fingerprint": self._fingerprint,
            "num_seen": self._dropped.seen,
            "num_dropped": self._dropped.dropped,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse weights that do not belong to this model.

        Raises:
            MemerError: another base, another contract, or trainable tensors missing or unknown, with counts.
        """
        self.configure_model()
        expected, found = set(self.trainable()), set(checkpoint["state_dict"])
        if expected != found:
            missing, extra = sorted(expected - found), sorted(found - expected)
            parts = [f"first missing {missing[0]}"] if missing else []
            parts += [f"first unknown {extra[0]}"] if extra else []
            raise MemerError(
                f"checkpoint: {len(expected & found)} of {len(expected)} trainable tensors match; "
                f"{', '.join(parts)}; was it written with other LoRA or freezing settings?"
            )
        ours = checkpoint.get("memer", {})
        if ours.get("base_fingerprint") != self._fingerprint:
            raise MemerError(
                f"checkpoint: trained from {ours.get('base')!r}, whose weights are not those of "
                f"{self.base!r}; frozen tensors would not fit"
            )
        Contract.from_dict(ours["contract"], where="checkpoint").check_same(
            self.contract, what="checkpoint against run"
        )
        self._dropped = DroppedSamples(seen=ours["num_seen"], dropped=ours["num_dropped"])

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights; with `strict=False` only missing trainable tensors are reported, not frozen ones."""
        result = super().load_state_dict(state_dict, strict=strict, assign=assign)
        expected = self.trainable()
        result.missing_keys[:] = [name for name in result.missing_keys if name in expected]
        return result

    def save_tuned(self, out: Path | str) -> Path:
        """Write the adapter of a LoRA run into an existing folder, in the form that PEFT reads.

        Raises:
            UsageError: whole weights were trained; `trainable` has them.
        """
        if self.lora is None:
            raise UsageError("save_tuned: no adapter was trained (lora is null); use callbacks.tuned")
        weights = {name.removeprefix("model."): tensor for name, tensor in self.trainable().items()}
        name = self._fingerprint if Path(self.base).is_dir() else self.base
        save_adapter(Path(out), settings=self.lora, weights=weights, modules=self.adapted, base=name)
        return Path(out)

    @property
    def _normalizes_early(self) -> bool:
        """Whether the gradient is out of reach before the step, so that the loss itself is divided."""
        return type(self.trainer.strategy).__name__ == "DeepSpeedStrategy"

    def _sum_over_ranks(self, tensor: Tensor) -> Tensor:
        summed: Tensor = self.trainer.strategy.reduce(tensor, reduce_op="sum")
        return summed

    def _log_figures(self, figures: dict[str, float]) -> None:
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        for name, value in (figures | {"lr": rate}).items():
            self.log(f"train/{name}", value, prog_bar=name == "loss", batch_size=1)

    def _remember_settings(self) -> None:
        """Put the arguments into the checkpoint as plain JSON values, readable with weights_only=True."""
        values = {
            "base": self.base,
            "contract": self.contract.to_dict(),
            "optim": asdict(self.optim),
            "lora": None if self.lora is None else asdict(self.lora),
            "attention": self.attention,
            "activation_checkpointing": self.activation_checkpointing,
            "max_length": self.max_length,
            "pack_tokens": self.pack_tokens,
            "max_dropped_share": self.max_dropped_share,
            "seed": self.seed,
        }
        self.save_hyperparameters(json.loads(json.dumps(values)), logger=False)


_VALIDATION: dict[str, Any] = {"on_step": False, "on_epoch": True, "sync_dist": True}
