"""Latency of a visual plan against the number of finished segments.

    python -m tests.bench.bench_planning [--points 0,8,16] [--size tiny|full] [--out runs/bench_planning]

Random weights; frames in, frames out. A call encodes the newest segment, brings the evidence up to date,
takes the Euler steps and decodes the 8 plan frames behind the real ones. Modes, by what of the evidence is
kept:

* `episode`: its keys and values for the whole episode; a call appends the newest segment.
* `call`: nothing between calls; all evidence is prefilled once per call.
* `off`: nothing at all; evidence and target run together in every Euler step.

The parts of `episode` are also timed alone (`planning_parts`); the language planner is not part of it. Points
that run out of memory, or would by `--limit-gib` (weights, keys and values), are recorded as `oom`.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from memer.flow import euler_times, integrate, to_velocity
from models.codec import CodecState, PatchCodec, VisualCodec, WanCodec
from models.cwm import CausalWorldModel, EvidenceCache
from models.cwm_layout import block_of
from models.masks import block_mask
from models.wan import TIME_SCALE, CausalWan, full_config, tiny_config
from tests.bench.report import emit
from tests.bench.sweep import Row, measure, median_and_p95, write

EXPERIMENT = "planning_latency"
PARTS = "planning_parts"
MODES = ("episode", "call", "off")


@dataclass(frozen=True, slots=True)
class Before:
    """An episode with x finished segments, the newest not yet encoded.

    Attributes:
        frames: of the newest segment, or the first frame: float[1, 3, 8 or 1, H, W].
        latents: of everything before it, None for x = 0.
        cache: of the same.
        encoder: stream after the same.
        decoder: stream after the same.
    """

    frames: Tensor
    latents: Tensor | None
    cache: EvidenceCache
    encoder: CodecState
    decoder: CodecState


class Planning:
    """The four parts of a plan, and a whole call in every mode."""

    def __init__(
        self,
        model: CausalWorldModel,
        codec: VisualCodec,
        *,
        canvas: tuple[int, int],
        text_tokens: int,
        steps: int,
        device: torch.device,
    ) -> None:
        self.model, self.codec, self.steps, self.device = model, codec, steps, device
        self.noise = torch.Generator(device).manual_seed(0)
        net = model.transformer
        size = (1, text_tokens, net.config.text_dim)
        self.text_global, self.text = (
            torch.randn(size, generator=self.noise, device=device, dtype=net.dtype) for _ in range(2)
        )
        self.canvas = canvas
        ratio = codec.spatial_ratio * net.config.patch_size[1]
        self.frame_tokens = (canvas[0] // ratio) * (canvas[1] // ratio)

    def frames(self, count: int) -> Tensor:
        """Random pictures in [-1, 1]."""
        shape = (1, 3, count, *self.canvas)
        return torch.rand(shape, generator=self.noise, device=self.device) * 2 - 1

    def before(self, finished: int) -> Before:
        """The state in which a call with that many finished segments finds the episode."""
        cache, latents = EvidenceCache(), None
        encoder, decoder = self.codec.enc_init(), self.codec.dec_init()
        for k in range(finished):
            z, encoder = self.codec.enc_step(encoder, self.frames(1 if k == 0 else 8))
            _, decoder = self.codec.dec_step(decoder, z)
            cache = self.model.append(cache, z, self.text_global)
            latents = z if latents is None else torch.cat((latents, z), dim=2)
        return Before(self.frames(8 if finished else 1), latents, cache, encoder, decoder)

    def decode(self, before: Before, newest: Tensor, plan: Tensor) -> Tensor:
        """The 8 plan frames, behind the real ones."""
        _, decoder = self.codec.dec_step(before.decoder, newest)
        return self.codec.dec_step(decoder, plan)[0]

    def sample(self, cache: EvidenceCache) -> Tensor:
        """The target's latents; the same noise in every call."""
        generator = torch.Generator(self.device).manual_seed(1)
        return self.model.sample(cache, self.text, steps=self.steps, generator=generator)

    @torch.no_grad()
    def call(self, before: Before, mode: str) -> Tensor:
        """A whole planning call: float[1, 3, 8, H, W]."""
        z, _ = self.codec.enc_step(before.encoder, before.frames)
        if mode == "episode":
            plan = self.sample(self.model.append(before.cache, z, self.text_global))
            return self.decode(before, z, plan)
        known = z if before.latents is None else torch.cat((before.latents, z), dim=2)
        if mode == "call":
            plan = self.sample(self.model.prefill(known, self.text_global))
        else:
            plan = self.sample_uncached(known)
        return self.decode(before, z, plan)

    def sample_uncached(self, known: Tensor) -> Tensor:
        """As `sample`, evidence and target in one block-causal pass per Euler step."""
        model, net, r = self.model, self.model.transformer, self.model.plan_latents
        count = known.shape[2]
        positions = torch.arange(count + r)
        blocks = block_of(positions, r)
        mask = block_mask(blocks, tokens_per_frame=self.frame_tokens).to(self.device)
        groups = [
            (slice(0, count * self.frame_tokens), net.embed_text(self.text_global)),
            (slice(count * self.frame_tokens, None), net.embed_text(self.text)),
        ]

        def field(x: Tensor, t: float) -> Tensor:
            times = torch.zeros(1, count + r, device=self.device)
            times[:, count:] = TIME_SCALE * t
            found, _ = net.predict(
                torch.cat((known, x), dim=2).to(net.dtype),
                times,
                text_groups=groups,
                positions=positions,
                mask=mask,
            )
            return to_velocity(found[:, :, count:].float(), x, t, kind=model.prediction)

        generator = torch.Generator(self.device).manual_seed(1)
        shape = (1, known.shape[1], r, *known.shape[3:])
        noise = torch.randn(shape, generator=generator, device=self.device)
        return integrate(field, noise, euler_times(self.steps, shift=model.shift))


def build(size: str, *, steps: int, device: torch.device) -> Planning:
    """The tiny or the full planner with random weights."""
    torch.manual_seed(0)
    if size == "tiny":
        model = CausalWorldModel(CausalWan(**tiny_config()), prediction="data")
        codec: VisualCodec = PatchCodec(4)
        canvas, text_tokens = (32, 32), 8
    else:
        with device:
            model = CausalWorldModel(CausalWan(**full_config())).to(torch.bfloat16)
            codec = WanCodec(AutoencoderKLWan(**full_autoencoder()).to(torch.bfloat16))
        canvas, text_tokens = (384, 320), 128
    return Planning(
        model.to(device).eval(), codec, canvas=canvas, text_tokens=text_tokens, steps=steps, device=device
    )


def full_autoencoder() -> dict:
    """Arguments of Wan2.2's autoencoder; its normalisation does not matter here."""
    return {
        "base_dim": 160,
        "decoder_base_dim": 256,
        "z_dim": 48,
        "dim_mult": [1, 2, 4, 4],
        "temperal_downsample": [False, True, True],
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
        "latents_mean": [0.0] * 48,
        "latents_std": [1.0] * 48,
    }


class Sweep:
    """Measures every mode at every point; one JSON line and one row each."""

    def __init__(self, planning: Planning, args: argparse.Namespace) -> None:
        self.planning, self.args = planning, args
        net = planning.model.transformer
        self.weight_bytes = sum(p.numel() * p.element_size() for p in net.parameters())
        width = net.config.num_layers * net.hidden
        self.token_bytes = 2 * width * net.dtype.itemsize
        self.rows: list[Row] = []

    def run(self) -> list[Row]:
        """All points."""
        for x in self.args.points:
            before = self.attempt(lambda x=x: self.planning.before(x)) if self.fits(x) else None
            for mode in MODES:
                self.point(
                    EXPERIMENT, mode, x, before, lambda b, mode=mode: lambda: self.planning.call(b, mode)
                )
            for part, make in self.parts().items():
                self.point(PARTS, part, x, before, make)
        return self.rows

    def parts(self) -> dict[str, Callable[[Before], Callable[[], object]]]:
        """Each part of a call in mode `episode`, alone: a function that prepares it and gives the call."""
        p = self.planning

        def newest(before: Before) -> Tensor:
            return p.codec.enc_step(before.encoder, before.frames)[0]

        def append(before: Before) -> Callable[[], object]:
            z = newest(before)
            return lambda: p.model.append(before.cache, z, p.text_global)

        def sample(before: Before) -> Callable[[], object]:
            cache = p.model.append(before.cache, newest(before), p.text_global)
            return lambda: p.sample(cache)

        def decode(before: Before) -> Callable[[], object]:
            z = newest(before)
            plan = torch.zeros_like(z[:, :, :1]).repeat(1, 1, p.model.plan_latents, 1, 1)
            return lambda: p.decode(before, z, plan)

        return {"encode": lambda b: lambda: newest(b), "append": append, "sample": sample, "decode": decode}

    def point(
        self,
        experiment: str,
        mode: str,
        x: int,
        before: Before | None,
        make: Callable[[Before], Callable[[], object]],
    ) -> None:
        """Measure one point; without a state before it, it was out of memory."""
        args, r = self.args, self.planning.model.plan_latents
        figure = None
        if before is not None:
            figure = self.attempt(
                lambda: measure(
                    make(before),
                    device=self.planning.device,
                    warmup=args.warmup,
                    runs=args.runs,
                    budget_s=args.budget_s,
                )
            )
        row = Row(
            experiment=experiment,
            mode=mode,
            x=x,
            median_ms=None,
            p95_ms=None,
            peak_bytes=None,
            tokens=(1 + r * x + r) * self.planning.frame_tokens,
            status="oom",
        )
        if figure is not None:
            median_ms, p95_ms = median_and_p95(figure[0])
            row = replace(row, median_ms=median_ms, p95_ms=p95_ms, peak_bytes=figure[1], status="ok")
        self.rows.append(row)
        emit(
            "planning",
            **asdict(row),
            cache_bytes=self.cache_bytes(x),
            weight_bytes=self.weight_bytes,
            runs=0 if figure is None else len(figure[0]),
            size=args.size,
            steps=args.steps,
            tokens_per_frame=self.planning.frame_tokens,
            threads=torch.get_num_threads(),
            device=self.planning.device.type,
        )

    def attempt(self, fn: Callable[[], object]):
        """What `fn` gives, None when memory ran out."""
        try:
            return fn()
        except (torch.OutOfMemoryError, MemoryError):
            if self.planning.device.type == "cuda":
                torch.cuda.empty_cache()
            return None

    def cache_bytes(self, x: int) -> int:
        """Keys and values of the evidence with x finished segments."""
        return self.token_bytes * (1 + self.planning.model.plan_latents * x) * self.planning.frame_tokens

    def fits(self, x: int) -> bool:
        """Weights, keys and values are within --limit-gib."""
        limit = self.args.limit_gib
        return limit is None or self.weight_bytes + self.cache_bytes(x) <= limit * 2**30


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument(
        "--points", type=lambda text: [int(p) for p in text.split(",")], default=list(range(17))
    )
    made.add_argument("--size", choices=("tiny", "full"), default="tiny")
    made.add_argument("--steps", type=int, default=10, help="Euler steps")
    made.add_argument("--warmup", type=int, default=3)
    made.add_argument("--runs", type=int, default=10)
    made.add_argument("--budget-s", type=float, default=20.0, help="time after which a point is not repeated")
    made.add_argument(
        "--limit-gib", type=float, default=None, help="memory above which a point counts as oom"
    )
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--out", type=Path, default=Path("runs/bench_planning"))
    return made


def main(arguments: list[str] | None = None) -> None:
    """See the module's text."""
    args = parser().parse_args(arguments)
    args.points = sorted(set(args.points))
    planning = build(args.size, steps=args.steps, device=torch.device(args.device))
    rows = Sweep(planning, args).run()
    title = f"ms per plan, {args.size}, {planning.frame_tokens} tokens per frame"
    for name in (EXPERIMENT, PARTS):
        chosen = [row for row in rows if row.experiment == name]
        write(chosen, args.out, name=name, title=title, x_label="finished segments")


if __name__ == "__main__":
    main()
