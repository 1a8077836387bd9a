"""The causal world model: imagines the next segment as latent frames, from the real frames of finished ones.

A Wan transformer with block-causal attention. Block 0 is the episode's first frame, block k the latents of
segment k. Finished blocks are clean, see the global instruction alone and never the plan that is asked for,
so their keys and values are computed once and kept. The target is noisy and sees its own text.

Letters in shapes: B batch, C channels, h x w latent pixels, K segments, r latent frames per segment, M text
tokens of size T, n tokens per latent frame.

Source: MaP-WAM (arXiv 2609.11561), causal world model.
"""

import warnings
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from memer.errors import UsageError
from memer.flow import (
    SHIFT,
    Prediction,
    Weighting,
    euler_times,
    integrate,
    interpolate,
    loss_weight,
    masked_mse,
    sample_time,
    to_velocity,
    velocity,
)
from memer.plan_settings import TEMPORAL_RATIO
from models.cwm_layout import Layout, all_targets_layout, block_of, one_target_layout
from models.evidence import EvidenceCache
from models.masks import Attention, block_mask
from models.wan import TIME_SCALE, CausalWan, Rope, TextGroup, rope_rows, time_embedding

#: Share of noise that evidence gets at most where `history_noise_prob` is set.
HISTORY_NOISE = 0.5


class CausalWorldModel(nn.Module):
    """Flow matching over segments of latent frames.

    Args:
        transformer: its own weights are all that is trained.
        plan_frames: N, frames per segment, a multiple of 4.
        prediction: what the transformer's output means: the velocity, or the clean latents. `velocity` needs
            tokens that are not larger than the hidden size, or noise cannot pass.
        shift: of training and sampling times towards noise.
        target_text: the target sees the text of its `plan`, or `plan+global`.
        visual_plan: `memory` plans from all finished segments; `current_only` from one frame, the observation
            at the segment's start, as a common world model does. A clip is then [start, segment], K = 1.
        targets: train on `all_targets` of an episode in one pass, or on `one_target` drawn per episode.
        weighting: of the loss by time.
        history_noise_prob: probability per finished block of being shown with noise, at most half. 0 = off.
        text_drop: probability per target of being trained without its text, for guidance. 0 = off.
        attention: of the masked training pass: `sdpa`, or `flex` (CUDA). No part of what the weights mean.

    Source: MaP-WAM specification, sections 2 and 7.
    """

    def __init__(
        self,
        transformer: CausalWan,
        *,
        plan_frames: int = 8,
        prediction: Prediction = "velocity",
        shift: float = SHIFT,
        target_text: Literal["plan", "plan+global"] = "plan",
        visual_plan: Literal["memory", "current_only"] = "memory",
        targets: Literal["all_targets", "one_target"] = "all_targets",
        weighting: Weighting = "none",
        history_noise_prob: float = 0.0,
        text_drop: float = 0.0,
        attention: Attention = "sdpa",
    ) -> None:
        super().__init__()
        for name, value, accepted in (
            ("prediction", prediction, get_args(Prediction)),
            ("target_text", target_text, ("plan", "plan+global")),
            ("visual_plan", visual_plan, ("memory", "current_only")),
            ("targets", targets, ("all_targets", "one_target")),
            ("weighting", weighting, get_args(Weighting)),
            ("attention", attention, get_args(Attention)),
        ):
            if value not in accepted:
                raise UsageError(f"world model: {name}={value!r}, must be {' or '.join(accepted)}")
        if plan_frames < TEMPORAL_RATIO or plan_frames % TEMPORAL_RATIO:
            raise UsageError(
                f"world model: plan_frames={plan_frames}, must be a multiple of {TEMPORAL_RATIO}"
            )
        for name, share in (("history_noise_prob", history_noise_prob), ("text_drop", text_drop)):
            if not 0 <= share <= 1:
                raise UsageError(f"world model: {name}={share}, must be in 0..1")
        if prediction == "velocity" and transformer.token_size > transformer.hidden:
            warnings.warn(
                f"world model: tokens of {transformer.token_size} numbers in {transformer.hidden} channels "
                "cannot carry the noise that prediction=velocity asks for; take prediction=data",
                stacklevel=2,
            )
        self.transformer = transformer
        self.plan_latents = plan_frames // TEMPORAL_RATIO
        self.prediction: Prediction = prediction
        self.shift = shift
        self.target_text = target_text
        self.visual_plan = visual_plan
        self.targets = targets
        self.weighting: Weighting = weighting
        self.history_noise_prob = history_noise_prob
        self.text_drop = text_drop
        self.attention: Attention = attention

    # -- training ----------------------------------------------------------------------------------------

    def loss(
        self,
        latents: Tensor,
        num_segments: Tensor,
        text_global: Tensor,
        text_plan: Tensor,
        *,
        generator: torch.Generator,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Flow-matching loss of the targets of a batch; real frames are the evidence (teacher forcing).

        Args:
            latents: float[B, C, 1 + r K, h, w], one encode of [G_0, G_1 .. G_K]; behind an episode's last
                segment anything finite.
            num_segments: int64[B] in 1..K.
            text_global: float[B, M, T].
            text_plan: float[B, K, M, T].
            generator: of noise and times.

        Returns:
            The mean squared error of the velocity, float32, and figures: `clean_mse` of the clean latents
            that the output stands for.

        Raises:
            ValueError: sizes that do not belong together.
        """
        num, r = self._check(latents, num_segments, text_plan), self.plan_latents
        noise, times = self.draw(latents, generator=generator)
        texts, text_targets = self._texts(text_global, text_plan, generator=generator)
        evidence = self._evidence(latents, generator=generator)
        frames = torch.arange(r * num, device=latents.device)  # of the targets, G_0 not counted
        if self.targets == "one_target":
            u = torch.rand(num_segments.shape, generator=generator, device=generator.device)
            chosen = (u.to(num_segments.device) * num_segments).long().clamp(max=num - 1)
            frames = r * chosen[:, None] + frames[:r]
            text_targets = text_targets[torch.arange(len(chosen), device=chosen.device), chosen].unsqueeze(1)
            layout = one_target_layout(chosen.cpu(), r)
        else:
            frames = frames.expand(latents.shape[0], -1)
            layout = all_targets_layout(num, r)
        segment = frames // r
        t = times.gather(1, segment)
        data, noise = (_pick(x, frames) for x in (latents[:, :, 1:].float(), noise))
        x_t = interpolate(data, noise, t.unsqueeze(1))
        clean = evidence[:, :, : layout.num_clean]
        found = self._outputs(clean, x_t, t, (texts, text_targets), layout)
        return self._compare(found, data, noise, x_t, t, segment < num_segments[:, None])

    def draw(self, latents: Tensor, *, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Noise like the latents of all segments and one time per segment.

        Returns:
            float32[B, C, r K, h, w] and float32[B, K] in (0, 1).
        """
        b, c, frames, h, w = latents.shape
        shape = (b, c, frames - 1, h, w)
        noise = torch.randn(shape, generator=generator, device=generator.device).to(latents.device)
        count = (frames - 1) // self.plan_latents
        return noise, sample_time((b, count), generator=generator, shift=self.shift, device=latents.device)

    def _check(self, latents: Tensor, num_segments: Tensor, text_plan: Tensor) -> int:
        """K of a batch whose sizes belong together."""
        r, extra = self.plan_latents, latents.shape[2] - 1
        num = extra // r
        if latents.dim() != 5 or num < 1 or extra != r * num:
            raise ValueError(
                f"latents of shape {tuple(latents.shape)}: must be [B, C, 1 + {r} K, h, w], K >= 1"
            )
        if text_plan.shape[:2] != (latents.shape[0], num):
            raise ValueError(
                f"text_plan of shape {tuple(text_plan.shape)} for {len(latents)} episodes of {num} segments"
            )
        if num_segments.shape != latents.shape[:1]:
            raise ValueError(
                f"num_segments of shape {tuple(num_segments.shape)}: must be [{latents.shape[0]}]"
            )
        if self.visual_plan == "current_only" and num != 1:
            raise ValueError(f"{num} segments: current_only trains on clips of one, [start, segment]")
        return num

    def _texts(
        self, text_global: Tensor, text_plan: Tensor, *, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Texts of the evidence [B, M', T] and of the targets [B, K, M', T]."""
        if self.text_drop and generator is not None:
            drop = torch.rand(text_plan.shape[:2], generator=generator, device=generator.device)
            keep = (drop >= self.text_drop).to(text_plan.device)
            text_plan = text_plan * keep[..., None, None]
        if self.target_text == "plan+global":
            text_plan = torch.cat((text_plan, text_global.unsqueeze(1).expand_as(text_plan)), dim=2)
        return (text_plan[:, 0] if self.visual_plan == "current_only" else text_global), text_plan

    def _evidence(self, latents: Tensor, *, generator: torch.Generator) -> Tensor:
        """The clean latents as the targets see them: some blocks get noise where that option is on."""
        if not self.history_noise_prob:
            return latents
        r, (b, _, frames, _, _) = self.plan_latents, latents.shape
        draws = torch.rand(2, b, 1 + (frames - 1) // r, generator=generator, device=generator.device)
        level = torch.where(draws[0] < self.history_noise_prob, draws[1] * HISTORY_NOISE, 0.0)
        level = torch.cat((level[:, :1], level[:, 1:].repeat_interleave(r, dim=1)), dim=1)
        noise = torch.randn(latents.shape, generator=generator, device=generator.device)
        return interpolate(latents, noise.to(latents.device), level.unsqueeze(1).to(latents.device))

    def _outputs(
        self, clean: Tensor, x_t: Tensor, times: Tensor, texts: tuple[Tensor, Tensor], layout: Layout
    ) -> Tensor:
        """The output for the targets [B, C, F, h, w] behind clean evidence, in one masked pass."""
        net = self.transformer
        grid = net.grid(clean)
        tokens = net.embed(torch.cat((clean.float(), x_t), dim=2).to(net.dtype))
        count = clean.shape[2] * grid[0] * grid[1]
        t = torch.cat((times.new_zeros(clean.shape[0], clean.shape[2]), times * TIME_SCALE), dim=1)
        temb, time = time_embedding(net.condition_embedder, t)
        rope = rope_rows(net.rope_tables, layout.positions, *grid, device=tokens.device)
        text_groups = [
            (slice(0, count), net.embed_text(texts[0].to(net.dtype))),
            (slice(count, None), net.embed_text(texts[1].to(net.dtype))),
        ]
        mask = layout.mask(grid[0] * grid[1], tokens.device, attention=self.attention)
        tokens, _ = net.run(tokens, time, rope=rope, text_groups=text_groups, mask=mask)
        return net.head(tokens[:, count:], temb[:, clean.shape[2] :], grid=grid)

    def _compare(
        self, found: Tensor, data: Tensor, noise: Tensor, x_t: Tensor, times: Tensor, valid: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and figures; times and valid are per latent frame [B, F]."""
        times, valid = times.unsqueeze(1), valid.unsqueeze(1)
        v = to_velocity(found.float(), x_t, times, kind=self.prediction)
        weight = None
        if self.weighting != "none":
            weight = loss_weight(times, kind=self.weighting, shift=self.shift)
        loss = masked_mse(v, velocity(data, noise), valid, weight=weight)
        clean = x_t - times[..., None, None] * v.detach()
        return loss, {"clean_mse": masked_mse(clean, data, valid)}

    # -- planning ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def append(self, cache: EvidenceCache, z_block: Tensor, text: Tensor) -> EvidenceCache:
        """Add the real latents of the first frame, then of one finished segment after another.

        Args:
            cache: left as it is.
            z_block: float[B, C, 1, h, w] for an empty cache, float[B, C, r, h, w] later.
            text: float[B, M, T], the global instruction (`current_only`: the text of the plan).

        Raises:
            ValueError: a block of another length.
        """
        expected = self.plan_latents if cache.num_latents else 1
        if z_block.shape[2] != expected:
            raise ValueError(f"a block of {z_block.shape[2]} latents, must have {expected}")
        return self._extend(cache, z_block, text, mask=None)

    @torch.no_grad()
    def prefill(self, latents: Tensor, text: Tensor) -> EvidenceCache:
        """The cache of float[B, C, 1 + r k, h, w] in one masked pass: equal to appending block by block."""
        count = latents.shape[2]
        if count < 1 or (count - 1) % self.plan_latents:
            raise ValueError(f"evidence of {count} latents, must have 1 + {self.plan_latents} k")
        gh, gw = self.transformer.grid(latents)
        mask = block_mask(block_of(torch.arange(count), self.plan_latents), tokens_per_frame=gh * gw).to(
            latents.device
        )
        return self._extend(EvidenceCache(), latents, text, mask=mask)

    @torch.no_grad()
    def sample(
        self,
        cache: EvidenceCache,
        text: Tensor,
        *,
        steps: int = 10,
        generator: torch.Generator,
        text_global: Tensor | None = None,
        guidance: float = 1.0,
    ) -> Tensor:
        """Imagine the next segment. The cache stays as it is.

        Args:
            cache: of everything before the segment.
            text: float[B, M, T] of the segment.
            steps: Euler steps.
            generator: of the noise.
            text_global: float[B, M, T], needed for target_text=plan+global alone.
            guidance: 1 = off; else the velocity without the plan's text is left behind by this factor.

        Returns:
            float32[B, C, r, h, w].

        Raises:
            ValueError: an empty cache, or guidance of a model that was trained without `text_drop`.
        """
        if not cache.num_latents:
            raise ValueError("the cache is empty: append the first frame before sampling")
        if guidance != 1 and not self.text_drop:
            raise ValueError(f"guidance={guidance} needs a model trained with text_drop, this one has 0")
        b, c, h, w = cache.shape
        net, r, device = self.transformer, self.plan_latents, text.device
        grid = (h // net.config.patch_size[1], w // net.config.patch_size[2])
        positions = torch.arange(cache.num_latents, cache.num_latents + r)
        rope = rope_rows(net.rope_tables, positions, *grid, device=device)
        contexts = [self._target_context(text, text_global)]
        if guidance != 1:
            contexts.append(self._target_context(torch.zeros_like(text), text_global))

        def field(x: Tensor, t: float) -> Tensor:
            found = [
                to_velocity(self._denoise(x, t, cache, groups, rope, grid), x, t, kind=self.prediction)
                for groups in contexts
            ]
            return found[0] if guidance == 1 else found[1] + guidance * (found[0] - found[1])

        noise = torch.randn((b, c, r, h, w), generator=generator, device=generator.device).to(device)
        return integrate(field, noise, euler_times(steps, shift=self.shift))

    def _target_context(self, text: Tensor, text_global: Tensor | None) -> list[TextGroup]:
        if self.target_text == "plan+global":
            if text_global is None:
                raise ValueError("target_text=plan+global: sample needs text_global")
            text = torch.cat((text, text_global), dim=1)
        return [(slice(None), self.transformer.embed_text(text.to(self.transformer.dtype)))]

    def _denoise(
        self,
        x: Tensor,
        t: float,
        cache: EvidenceCache,
        text_groups: Sequence[TextGroup],
        rope: Rope,
        grid: tuple[int, int],
    ) -> Tensor:
        """The output for the target alone, every token of which sees the whole cache."""
        net = self.transformer
        temb, time = time_embedding(net.condition_embedder, x.new_full((x.shape[0], 1), t * TIME_SCALE))
        tokens, _ = net.run(
            net.embed(x.to(net.dtype)), time, rope=rope, text_groups=text_groups, cache=cache.layers
        )
        return net.head(tokens, temb, grid=grid).float()

    def _extend(self, cache: EvidenceCache, z: Tensor, text: Tensor, *, mask: Tensor | None) -> EvidenceCache:
        net, (b, c, count, h, w) = self.transformer, z.shape
        if cache.num_latents and cache.shape != (b, c, h, w):
            raise ValueError(f"latents of shape {tuple(z.shape)} behind a cache of {cache.shape}")
        if self.visual_plan == "current_only" and cache.num_latents + count > 1:
            raise ValueError("current_only keeps no evidence: start every segment from an empty cache")
        rope = rope_rows(
            net.rope_tables,
            torch.arange(cache.num_latents, cache.num_latents + count),
            *net.grid(z),
            device=z.device,
        )
        _, time = time_embedding(net.condition_embedder, torch.zeros(b, 1, device=z.device))
        _, new = net.run(
            net.embed(z.to(net.dtype)),
            time,
            rope=rope,
            text_groups=[(slice(None), net.embed_text(text.to(net.dtype)))],
            mask=mask,
            cache=cache.layers or None,
        )
        if cache.layers:
            new = [
                (torch.cat((old_k, k), dim=1), torch.cat((old_v, v), dim=1))
                for (old_k, old_v), (k, v) in zip(cache.layers, new, strict=True)
            ]
        return EvidenceCache(layers=tuple(new), num_latents=cache.num_latents + count, shape=(b, c, h, w))


def _pick(x: Tensor, frames: Tensor) -> Tensor:
    """Latent frames int64[B, F] of x [B, C, any, h, w]: [B, C, F, h, w]."""
    return x.gather(2, frames[:, None, :, None, None].expand(-1, x.shape[1], -1, *x.shape[3:]))
