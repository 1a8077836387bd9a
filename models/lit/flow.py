"""What the trainings of the world model and of the executor share: noise, codec, checks, checkpoints.

Everything in the transformers trains; the visual codec and the text encoder are frozen, run inside the step
and are no part of the module's weights. Noise and flow times come from a generator seeded by (seed, rank,
number of the batch), so that a run that was killed goes on to the same weights.
"""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Generic, TypeVar

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from memer.canvas import to_signed
from memer.contract import Contract, plan_of
from memer.errors import MemerError, UsageError
from memer.plan_settings import CodecSettings, PlanSettings
from memer.settings import check_count
from models.codec import VisualCodec, make_codec
from models.collate_plans import Batch
from models.lit.window import check_step
from models.optim import OptimSettings, make_optimizer
from models.text import TextEncoder, make_text_encoder

log = logging.getLogger(__name__)

BatchT = TypeVar("BatchT", bound=Batch)

STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "DeepSpeedStrategy", "FSDPStrategy")
PRECISIONS = ("32-true", "bf16-mixed")
#: Strategies under which a rank holds a part of each gradient only.
_SHARDED = ("DeepSpeedStrategy", "FSDPStrategy")
#: Streams of random numbers that never meet.
TRAINING, VALIDATION, SAMPLING = range(3)

VALIDATION_LOG: dict[str, Any] = {"on_step": False, "on_epoch": True, "sync_dist": True}


class Frozen:
    """Codec and text encoder, loaded at the first use; not a module, so nobody trains or saves them."""

    def __init__(self, plan: PlanSettings) -> None:
        self._plan = plan
        self._device: torch.device | None = None
        self._codec: VisualCodec | None = None
        self._looked = False
        self._texts: TextEncoder | None = None

    def latents(self, frames: Tensor) -> Tensor:
        """Encode clips without gradients.

        Args:
            frames: uint8[B, 1 + 4 * m, H, W, 3].

        Returns:
            float32[B, C, 1 + m, h, w].
        """
        codec = self.codec(frames.device)
        with torch.no_grad():
            signed = to_signed(frames).transpose(1, 2)
            if not self._looked and self._plan.codec.kind == "patch":
                warn_unless_normalised(signed, self._plan.codec)
            self._looked = True
            return codec.encode(signed).float()

    def codec(self, device: torch.device) -> VisualCodec:
        """The codec on a device."""
        if self._codec is None or self._device != device:
            self._codec, self._device = make_codec(self._plan.codec, device=device), device
        return self._codec

    def embeddings(self, texts: Sequence[str], *, device: torch.device) -> Tensor:
        """float32[B, M, T] of texts; equal texts are encoded once."""
        if self._texts is None:
            self._texts = make_text_encoder(self._plan.text, device=device)
        with torch.no_grad():
            return self._texts.encode(texts).to(device=device, dtype=torch.float32)


def warn_unless_normalised(frames: Tensor, codec: CodecSettings) -> bool:
    """Warn where a patch codec's latents are far from mean 0 and deviation 1.

    Training then runs, and hardly sees what moves.

    Args:
        frames: float[B, 3, F, H, W] in [-1, 1].
        codec: settings that are to fit.

    Returns:
        Whether they fit.
    """
    std, mean = (value.tolist() for value in torch.std_mean(frames, dim=(0, 2, 3, 4)))
    pairs = zip(mean, std, codec.mean, codec.std, strict=True)
    if all(abs(m - cm) < 0.6 * cs and 0.3 * cs < s < 3 * cs for m, s, cm, cs in pairs):
        return True
    means = ",".join(f"{value:.2f}" for value in mean)
    # A colour that never changes would be divided by next to nothing.
    stds = ",".join(f"{max(value, 0.05):.2f}" for value in std)
    log.warning(
        "the frames of the first batch have mean %s and deviation %s per colour, the codec was told %s and "
        "%s; set contract.plan.codec.mean=[%s] and contract.plan.codec.std=[%s] for all parts of a policy",
        means,
        stds,
        list(codec.mean),
        list(codec.std),
        means,
        stds,
    )
    return False


class FlowModule(pl.LightningModule, Generic[BatchT], ABC):
    """A thin LightningModule around a model that is trained by flow matching.

    Args:
        contract: of the data, with plan settings.
        optim: optimizer and schedule.
        activation_checkpointing: recompute layer by layer in the backward pass; saves memory, costs time.
        max_sampled: validation samples per rank that are generated in full, each time, over all batches.
        sample_steps: Euler steps of these.
        seed: of initial values, noise and flow times.
    """

    #: Attributes that rebuild the module from a checkpoint, besides those of this class.
    own_settings: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        contract: Contract | Mapping[str, Any],
        optim: OptimSettings | Mapping[str, Any],
        activation_checkpointing: bool = False,
        max_sampled: int = 16,
        sample_steps: int = 10,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_count("max_sampled", max_sampled, least=0)
        check_count("sample_steps", sample_steps, least=1)
        self.contract = contract if isinstance(contract, Contract) else Contract.from_dict(contract)
        self.plan = plan_of(self.contract)
        self.optim = optim if isinstance(optim, OptimSettings) else OptimSettings(**optim)
        self.activation_checkpointing = activation_checkpointing
        self.max_sampled = max_sampled
        self.sample_steps = sample_steps
        self.seed = seed
        self.frozen = Frozen(self.plan)
        self.model: Any = None
        self._sample_ids: tuple[str, ...] = ()
        self._loss: Tensor | None = None
        self._shapes: dict[str, torch.Size] = {}

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model with its initial weights; called once, with torch's random numbers seeded."""

    @abstractmethod
    def losses(self, batch: BatchT, *, generator: torch.Generator) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The loss of a batch, and figures by name."""

    @abstractmethod
    def generate(self, batch: BatchT, count: int, *, generator: torch.Generator) -> None:
        """Generate for the first `count` samples of a validation batch and log how far off it is."""

    @abstractmethod
    def make_collator(self) -> Callable[[Any], BatchT]:
        """The collate function for this model's data."""

    def initial_weights(self) -> Mapping[str, Tensor]:
        """The state that training began with, made again from seed and base, on the CPU."""
        return {f"model.{name}": tensor for name, tensor in self._initial_model().state_dict().items()}

    def configure_model(self) -> None:
        """Build the model; does nothing the second time."""
        if self.model is not None:
            return
        self.model = self._initial_model()
        self._shapes = {name: tensor.shape for name, tensor in self.state_dict().items()}
        self.train()

    def _initial_model(self) -> nn.Module:
        # On the CPU also inside a strategy's own context, so that the same seed gives the same weights.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(self.seed)
            return self.build_model()

    def setup(self, stage: str) -> None:
        """Refuse precisions that lose small updates, and strategies that were never thought through."""
        if stage != "fit":
            return
        strategy = type(self.trainer.strategy).__name__
        if strategy not in STRATEGIES:
            raise UsageError(f"trainer.strategy: {strategy}, must be one device, ddp, deepspeed or fsdp")
        if str(self.trainer.precision) not in PRECISIONS:
            raise UsageError(
                f"trainer.precision: {self.trainer.precision!r}, must be one of {', '.join(PRECISIONS)}; "
                "weights kept in 16 bits lose small updates"
            )

    def training_step(self, batch: BatchT, batch_idx: int) -> Tensor:
        """The loss under noise that only seed, rank and the number of the batch decide."""
        number = self.trainer.fit_loop.epoch_loop.batch_progress.total.processed
        loss, figures = self.losses(batch, generator=self.generator(TRAINING, number))
        self._sample_ids += batch.sample_ids
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=len(batch))
        for name, value in figures.items():
            self.log(f"train/{name}", value.detach(), batch_size=len(batch))
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Stop before the weights change.

        Raises:
            MemerError: loss or gradient is not finite, or exactly zero; names the samples.
        """
        assert self._loss is not None
        loss, sample_ids = self._loss, self._sample_ids
        self._loss, self._sample_ids = None, ()
        norm = loss.new_ones(())
        if type(self.trainer.strategy).__name__ not in _SHARDED:
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
            self.log("train/grad_norm", norm, batch_size=1)
        value, grad_norm = torch.stack([loss.float(), norm.to(loss).float()]).tolist()  # the one sync
        check_step(loss=value, grad_norm=grad_norm, step=self.trainer.global_step + 1, sample_ids=sample_ids)
        self.log("train/lr", self.trainer.optimizers[0].param_groups[0]["lr"], batch_size=1)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """As the trainer says; sharded gradients are clipped by the wrapper that knows all of them."""
        strategy: Any = self.trainer.strategy
        if type(strategy).__name__ == "FSDPStrategy":
            if gradient_clip_val:
                strategy.model.clip_grad_norm_(gradient_clip_val)
            return
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def validation_step(self, batch: BatchT, batch_idx: int) -> None:
        """The loss under the same noise every time, and some generated results."""
        loss, figures = self.losses(batch, generator=self.generator(VALIDATION, batch_idx))
        for name, value in {"loss": loss, **figures}.items():
            self.log(f"val/{name}", value, batch_size=len(batch), **VALIDATION_LOG)
        count = min(len(batch), self.due(batch_idx, batches=int(self.trainer.num_val_batches[0])))
        if count:
            self.generate(batch, count, generator=self.generator(SAMPLING, batch_idx))

    def due(self, batch_idx: int, *, batches: int) -> int:
        """Samples to generate in one of the validation batches: `max_sampled` in all, spread evenly."""
        first, last = (self.max_sampled * k // batches for k in (batch_idx, batch_idx + 1))
        return last - first

    def generator(self, stream: int, number: int) -> torch.Generator:
        """Random numbers that seed, rank, stream and number decide."""
        words = np.random.SeedSequence([self.seed, self.global_rank, stream, number]).generate_state(2)
        generator = torch.Generator(device=self.device)
        return generator.manual_seed(int(words[0]) | (int(words[1] >> 1) << 32))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW, cosine schedule per optimizer step."""
        optimizer, schedule = make_optimizer(self.named_parameters(), self.optim)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write the contract beside the weights."""
        checkpoint["memer"] = {"contract": self.contract.to_dict()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse weights that do not belong to this model.

        Raises:
            MemerError: another contract, other settings of the model, or tensors missing, unknown or of
                another shape, with counts.
        """
        self.configure_model()
        ours, found = self._shapes, checkpoint["state_dict"]
        fitting = [n for n, shape in ours.items() if n in found and found[n].shape == shape]
        wrong = sorted((ours.keys() | found.keys()) - set(fitting))
        if wrong:
            raise MemerError(
                f"checkpoint: {len(fitting)} of {len(ours)} tensors match, first that does not: {wrong[0]}; "
                "was it written by a model of another size or kind?"
            )
        theirs = Contract.from_dict(checkpoint["memer"]["contract"], where="checkpoint")
        theirs.check_same(self.contract, what="checkpoint against run")
        # What weights mean may differ where their shapes do not, e.g. the kind of prediction.
        before = checkpoint.get("hyper_parameters", {})
        for name in self.own_settings:
            if name not in before or name.endswith("base"):
                continue
            differ = _differing(name, before[name], self.hparams[name])
            if differ:
                field, old, new = differ
                raise MemerError(
                    f"checkpoint: {field}: {old!r} before, {new!r} now; restore it, or start another run_id"
                )

    def remember_settings(self) -> None:
        """Put the arguments into the checkpoint as plain JSON values, readable with weights_only=True."""
        names = ("activation_checkpointing", "max_sampled", "sample_steps", "seed", *self.own_settings)
        values = {
            "contract": self.contract.to_dict(),
            "optim": asdict(self.optim),
            **{name: getattr(self, name) for name in names},
        }
        self.save_hyperparameters(json.loads(json.dumps(values)), logger=False)


def _differing(name: str, old: Any, new: Any) -> tuple[str, Any, Any] | None:
    """(dotted name, old, new) of the first value that differs, None where none does."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        pairs = ((f"{name}.{key}", old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys()))
        return next((found for pair in pairs if (found := _differing(*pair))), None)
    return None if old == new else (name, old, new)
