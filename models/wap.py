"""World-Action-Progress executor: a chunk of actions and the progress after each, under a cached visual plan.

`models.wap_tokens` says which tokens there are and who sees whom; here are the losses, the prefills and the
sampler. All of them are passes of one mixture over the groups that they need.

Letters in shapes: B batch, C channels, n future latents, h x w latent pixels, M text tokens, T their size,
D actions' size, D_s state's size.

Source: MaP-WAM (arXiv 2609.11561), specification sections 2, 8 and 11.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memer.errors import MemerError
from memer.flow import euler_times, integrate, interpolate, loss_weight, masked_mse, sample_time, to_velocity
from memer.plan_settings import LATENT_PATCH
from models.mot import Expert, MixtureOfTransformers, Stream
from models.wan import CausalWan, KeyValue, time_embedding
from models.wap_batch import Chunk, ObsCache, PlanCache, WapBatch, WapOutput, check_batch
from models.wap_settings import WapSettings, full_settings, tiny_settings
from models.wap_tokens import TIME_SCALE, VideoPart, attention_calls, line_stream, video_stream

__all__ = [
    "Chunk",
    "ObsCache",
    "PlanCache",
    "WapBatch",
    "WapModel",
    "WapOutput",
    "WapSettings",
    "full_settings",
    "tiny_settings",
]

Generators = torch.Generator | Sequence[torch.Generator] | None


class WapModel(nn.Module):
    """Three experts, video, action and progress, over shared attention.

    Args:
        settings: sizes and switches.
        checkpointing: keep only every layer's inputs for the backward pass.

    Raises:
        UsageError: the experts disagree in layers, heads or head_dim.
    """

    def __init__(self, settings: WapSettings, *, checkpointing: bool = False) -> None:
        super().__init__()
        s = self.settings = settings
        experts = {"video": s.video, "action": s.action, "progress": s.progress}
        self.mot = MixtureOfTransformers(experts, checkpointing=checkpointing)
        # The stock transformer without blocks: those live in the layers.
        self.video = CausalWan(
            patch_size=(1, LATENT_PATCH, LATENT_PATCH),
            num_attention_heads=s.video.num_heads,
            attention_head_dim=s.video.head_dim,
            in_channels=s.channels,
            out_channels=s.channels,
            text_dim=s.text_dim,
            freq_dim=s.freq_dim,
            ffn_dim=s.video.ffn,
            num_layers=0,
            eps=s.video.eps,
        )
        shared = {"text_dim": s.text_dim, "freq_dim": s.freq_dim}
        self.action = Expert(s.action, token_dim=s.action_dim, **shared)
        learned = s.progress_mode == "classification"
        self.progress = Expert(s.progress, token_dim=1, learned_token=learned, **shared)
        self.state_in = nn.Linear(s.state_dim, s.text_dim)
        self.progress_in = nn.Linear(1, s.text_dim) if s.progress_condition else None

    # -- training ---------------------------------------------------------------------

    def loss(
        self, batch: WapBatch, *, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Weighted sum of the flow losses of future, actions and progress (or the classifier's).

        Args:
            batch: B samples.
            generator: of flow times and noise.

        Returns:
            The loss, a scalar, and its parts by name, detached.

        Raises:
            MemerError: a shape of the batch does not fit the settings.
        """
        s = self.settings
        check_batch(batch, s)
        size, device = batch.actions.shape[0], batch.actions.device
        draw = functools.partial(sample_time, generator=generator, shift=s.shift, device=device)
        t_video, t_chunk = draw(size), draw(size)
        future = batch.z_clip[:, :, 1:]
        progress = (2 * batch.progress_target - 1).unsqueeze(2)
        noises = [_noise(data.shape, generator, device) for data in (future, batch.actions, progress)]
        noisy_future = interpolate(future, noises[0], t_video)
        noisy_actions = interpolate(batch.actions, noises[1], t_chunk)
        noisy_progress = interpolate(progress, noises[2], t_chunk)

        out = self(
            z_plan=batch.z_plan,
            z_obs=batch.z_clip[:, :, :1],
            text=self.context(batch.text_plan, batch.text_global),
            state=batch.state,
            progress=batch.progress,
            noisy_actions=noisy_actions,
            noisy_progress=noisy_progress,
            t_chunk=t_chunk,
            noisy_future=noisy_future,
            t_video=t_video,
        )
        assert out.video is not None
        weigh = functools.partial(loss_weight, kind=s.loss_weighting, shift=s.shift)
        parts = {
            "loss_video": masked_mse(
                to_velocity(out.video, noisy_future, t_video, kind=s.video_prediction),
                noises[0] - future,
                batch.latent_valid[:, None, :, None, None],
                weight=weigh(t_video),
            ),
            "loss_action": masked_mse(
                to_velocity(out.action, noisy_actions, t_chunk, kind=s.action_prediction),
                noises[1] - batch.actions,
                batch.action_valid,
                weight=weigh(t_chunk),
            ),
        }
        if s.progress_mode == "classification":
            label = batch.finished.to(out.progress.dtype)
            parts["loss_progress"] = F.binary_cross_entropy_with_logits(out.progress[:, 0, 0], label)
        else:
            parts["loss_progress"] = masked_mse(
                to_velocity(out.progress, noisy_progress, t_chunk, kind=s.progress_prediction),
                noises[2] - progress,
                batch.action_valid if batch.progress_valid is None else batch.progress_valid,
                weight=weigh(t_chunk),
            )
        weights = (s.lambda_video, s.lambda_action, s.lambda_progress)
        total = sum(w * part for w, part in zip(weights, parts.values(), strict=True))
        assert isinstance(total, Tensor)
        return total, {name: part.detach() for name, part in parts.items()}

    def forward(
        self,
        *,
        z_plan: Tensor | None,
        z_obs: Tensor,
        text: Tensor,
        state: Tensor,
        progress: Tensor | None,
        noisy_actions: Tensor,
        noisy_progress: Tensor,
        t_chunk: Tensor,
        noisy_future: Tensor | None = None,
        t_video: Tensor | None = None,
    ) -> WapOutput:
        """One joint pass over all groups.

        Args:
            z_plan: float32[B, C, 3, h, w], or the history [B, C, n, h, w] of executor_context=full_history.
            z_obs: float32[B, C, 1, h, w].
            text: float32[B, M, T] of `context`.
            state: float32[B, D_s].
            progress: float32[B] in [0, 1]; unused without progress_condition.
            noisy_actions: float32[B, horizon, D].
            noisy_progress: float32[B, horizon, 1] in [-1, 1] plus noise; unused in classification.
            t_chunk: float32[B] in [0, 1], of actions and progress.
            noisy_future: float32[B, C, n, h, w]; None leaves F out.
            t_video: float32[B], of the future.
        """
        context = self._condition(text, state, progress)
        visible = context.shape[1]
        parts = [] if z_plan is None else [VideoPart("P", z_plan, 0, text.shape[1])]
        start = self._start(0 if z_plan is None else z_plan.shape[2])
        parts.append(VideoPart("O", z_obs, start, visible))
        if noisy_future is not None:
            parts.append(VideoPart("F", noisy_future, start + 1, visible, t_video))
        video, stream, temb = video_stream(self.video, parts, context)
        t = t_chunk.unsqueeze(1)
        clean = self.settings.progress_mode == "classification"
        streams = {
            "video": stream,
            "action": self._chunk_stream("action", context, t=t),
            "progress": self._chunk_stream("progress", context, t=torch.zeros_like(t) if clean else t),
        }
        tokens = {
            "video": video,
            "action": self.action.embed(noisy_actions, batch=len(state)),
            "progress": self.progress.embed(noisy_progress, batch=len(state)),
        }
        calls = attention_calls(streams, self.settings)
        wanted = "AR" if noisy_future is None else "FAR"
        out, _, _ = self.mot(tokens, streams=streams, calls=calls, wanted=wanted)
        future = None
        if noisy_future is not None:
            temb = temb[:, -noisy_future.shape[2] :]
            future = self.video.head(out["video"], temb, grid=self.video.grid(z_obs))
        return WapOutput(future, self.action.proj_out(out["action"]), self.progress.proj_out(out["progress"]))

    # -- inference --------------------------------------------------------------------

    @torch.no_grad()
    def prefill_plan(self, z_plan: Tensor | None, text: Tensor) -> PlanCache:
        """Run P, once per segment.

        Args:
            z_plan: float32[B, C, 3, h, w]; None for visual_plan=none. For executor_context=full_history one
                latent per past frame; see also `extend_history`.
            text: float32[B, M, T] of `context`.
        """
        if z_plan is None:
            return PlanCache([], 0)
        parts = [VideoPart("P", z_plan, 0, text.shape[1])]
        return PlanCache(self._prefill(parts, text, {})["P"], z_plan.shape[2])

    @torch.no_grad()
    def extend_history(self, history: PlanCache, z_frames: Tensor, text: Tensor) -> PlanCache:
        """Append past frames to a history (executor_context=full_history); the given cache stays valid.

        Args:
            history: of `prefill_plan` or this.
            z_frames: float32[B, C, F, h, w], one latent per frame, each encoded alone.
            text: float32[B, M, T] of `context`.
        """
        parts = [VideoPart("P", z_frames, history.latents, text.shape[1])]
        new = self._prefill(parts, text, {"H": history.keys})["P"]
        keys = [
            (torch.cat((k, more_k), dim=1), torch.cat((v, more_v), dim=1))
            for (k, v), (more_k, more_v) in zip(history.keys, new, strict=True)
        ]
        return PlanCache(keys, history.latents + z_frames.shape[2])

    @torch.no_grad()
    def prefill_obs(
        self, plan: PlanCache, z_obs: Tensor, text: Tensor, state: Tensor, progress: Tensor | None
    ) -> ObsCache:
        """Run O, once per chunk.

        Args:
            plan: of `prefill_plan`; left unchanged.
            z_obs: float32[B, C, 1, h, w].
            text: float32[B, M, T] of `context`.
            state: float32[B, D_s], normalised.
            progress: float32[B] in [0, 1]; None without progress_condition.
        """
        context = self._condition(text, state, progress)
        parts = [VideoPart("O", z_obs, self._start(plan.latents), context.shape[1])]
        return ObsCache(self._prefill(parts, context, _cached(plan))["O"])

    def sample(
        self,
        plan: PlanCache,
        obs: ObsCache,
        text: Tensor,
        state: Tensor,
        progress: Tensor | None,
        *,
        steps: int = 10,
        generator: Generators = None,
    ) -> Chunk:
        """Denoise actions and progress under the caches, which stay as they are.

        Args:
            plan: of `prefill_plan`.
            obs: of `prefill_obs` for the same observation, text, state and progress.
            text: float32[B, M, T] of `context`.
            state: float32[B, D_s], normalised.
            progress: float32[B] in [0, 1]; None without progress_condition.
            steps: Euler steps.
            generator: of the noise; one per row of the batch makes every row independent of the others.
        """
        return self._sample(plan, obs, text, state, progress, steps=steps, generator=generator, future=False)

    def sample_joint(
        self,
        plan: PlanCache,
        obs: ObsCache,
        text: Tensor,
        state: Tensor,
        progress: Tensor | None,
        *,
        steps: int = 10,
        generator: Generators = None,
    ) -> Chunk:
        """As `sample`, and with the future that goes with it, for checks and pictures."""
        return self._sample(plan, obs, text, state, progress, steps=steps, generator=generator, future=True)

    @torch.no_grad()
    def finished(self, plan: PlanCache, obs: ObsCache, text: Tensor, state: Tensor) -> Tensor:
        """Probability that the segment is finished, float32[B] (progress_mode=classification).

        One pass of one token, no denoising.
        """
        if self.settings.progress_mode != "classification":
            raise ValueError("finished() needs progress_mode=classification; read the progress of sample()")
        context = self._condition(text, state, None)
        streams = {"progress": self._chunk_stream("progress", context, t=state.new_zeros(1, 1))}
        tokens = {"progress": self.progress.embed(None, batch=len(state))}
        cached = _cached(plan, obs)
        calls = attention_calls(streams, self.settings, cached=_tokens(cached))
        out, _, _ = self.mot(tokens, streams=streams, calls=calls, wanted="R", cached=cached)
        return self.progress.proj_out(out["progress"])[:, 0, 0].sigmoid()

    @torch.no_grad()
    def _sample(
        self,
        plan: PlanCache,
        obs: ObsCache,
        text: Tensor,
        state: Tensor,
        progress: Tensor | None,
        *,
        steps: int,
        generator: Generators,
        future: bool,
    ) -> Chunk:
        s, device, batch = self.settings, state.device, len(state)
        kinds = {"action": s.action_prediction}
        shapes: list[tuple[int, ...]] = [(batch, s.action_horizon, s.action_dim)]
        if s.progress_mode == "modality":
            kinds["progress"] = s.progress_prediction
            shapes.append((batch, s.action_horizon, 1))
        if future:
            kinds["video"] = s.video_prediction
            shapes.append((batch, s.channels, s.future_latents, s.latent_height, s.latent_width))
        names = tuple(kinds)
        noise = tuple(_noise(shape, generator, device) for shape in shapes)

        # What no Euler step changes: the times of all steps, the text's keys, the cached keys.
        context = self._condition(text, state, progress)
        times = euler_times(steps, shift=s.shift)
        t = torch.tensor([times[:-1]], device=device)
        streams = {name: self._chunk_stream(name, context, t=t) for name in names if name != "video"}
        if future:
            parts = [VideoPart("F", noise[-1], self._start(plan.latents) + 1, context.shape[1])]
            _, stream, _ = video_stream(self.video, parts, context)
            temb, rows = time_embedding(self.video.condition_embedder, TIME_SCALE * t)
            streams["video"] = replace(stream, time=rows)
        cached = _cached(plan, obs)
        calls = attention_calls(streams, s, cached=_tokens(cached))
        rooms = _rooms(cached, sum(x.shape[1] for x in noise)) if len(calls) == 1 else None
        texts: list[dict[str, KeyValue]] | None = None
        step = {time: i for i, time in enumerate(times)}

        def field(y: tuple[Tensor, ...], time: float) -> tuple[Tensor, ...]:
            nonlocal texts
            i = step[time]
            state_of = dict(zip(names, y, strict=True))
            out, _, texts = self.mot(
                {name: self._embed(name, x) for name, x in state_of.items()},
                streams={k: replace(stream, time=stream.time[:, i : i + 1]) for k, stream in streams.items()},
                calls=calls,
                wanted="FAR",
                cached=cached,
                texts=texts,
                rooms=rooms,
            )
            velocities = []
            for name, x in state_of.items():
                if name == "video":
                    prediction = self.video.head(out[name], temb[:, i : i + 1], grid=self.video.grid(x))
                else:
                    prediction = self._expert(name).proj_out(out[name])
                velocities.append(to_velocity(prediction, x, time, kind=kinds[name]))
            return tuple(velocities)

        sampled = dict(zip(names, integrate(field, noise, times), strict=True))
        scores = (sampled["progress"].squeeze(2) + 1) / 2 if "progress" in sampled else None
        return Chunk(sampled["action"], scores, sampled.get("video"))

    # -- parts ------------------------------------------------------------------------

    def context(self, text_plan: Tensor, text_global: Tensor | None = None) -> Tensor:
        """The text that the executor sees: [B, M, T], or [B, 2 M, T] with target_text=plan+global.

        Raises:
            MemerError: the global text is missing, or the number of tokens is not that of the settings.
        """
        s = self.settings
        texts = [text_plan]
        if s.target_text == "plan+global":
            if text_global is None:
                raise MemerError("text_global: missing, target_text=plan+global needs the task's instruction")
            texts.append(text_global)
        for text in texts:
            if text.shape[1:] != (s.text_tokens, s.text_dim):
                raise MemerError(
                    f"text: {tuple(text.shape[1:])} tokens and values, the executor was made for "
                    f"({s.text_tokens}, {s.text_dim}); take the contract's text settings"
                )
        return torch.cat(texts, dim=1) if len(texts) > 1 else text_plan

    def _condition(self, text: Tensor, state: Tensor, progress: Tensor | None) -> Tensor:
        """Text plus one token each for state and progress: [B, M + 1 or 2, T]."""
        tokens = [text, self.state_in(state).unsqueeze(1)]
        if self.progress_in is not None:
            if progress is None:
                raise ValueError(
                    "progress is missing; this executor is told its progress (progress_condition)"
                )
            tokens.append(self.progress_in(2 * progress.unsqueeze(1) - 1).unsqueeze(1))
        return torch.cat(tokens, dim=1)

    def _start(self, plan_latents: int) -> int:
        """Time position of the observation."""
        return plan_latents if self.settings.rope == "sequential" else 0

    def _expert(self, name: str) -> Expert:
        return self.action if name == "action" else self.progress

    def _embed(self, name: str, x: Tensor) -> Tensor:
        return self.video.embed(x) if name == "video" else self._expert(name).embed(x, batch=len(x))

    def _chunk_stream(self, name: str, context: Tensor, *, t: Tensor) -> Stream:
        s = self.settings
        group, length = ("A", s.action_horizon) if name == "action" else ("R", s.progress_tokens)
        return line_stream(self._expert(name), group, length, context, t=t, head_dim=s.video.head_dim)

    def _prefill(
        self, parts: Sequence[VideoPart], context: Tensor, cached: dict[str, list[KeyValue]]
    ) -> dict[str, list[KeyValue]]:
        """Keys and values of clean video tokens."""
        tokens, stream, _ = video_stream(self.video, parts, context)
        streams = {"video": stream}
        calls = attention_calls(streams, self.settings, cached=_tokens(cached))
        _, keys, _ = self.mot({"video": tokens}, streams=streams, calls=calls, wanted="", cached=cached)
        return keys


def _cached(plan: PlanCache, obs: ObsCache | None = None) -> dict[str, list[KeyValue]]:
    groups = {"P": plan.keys} if plan.latents else {}
    return groups if obs is None else {**groups, "O": obs.keys}


def _tokens(cached: dict[str, list[KeyValue]]) -> dict[str, int]:
    """Number of tokens of every cached group."""
    return {name: keys[0][0].shape[1] for name, keys in cached.items()}


def _rooms(cached: dict[str, list[KeyValue]], new_tokens: int) -> list[KeyValue]:
    """Per layer, the cached keys and values in order with room for new tokens behind them."""

    def join(parts: Sequence[Tensor]) -> Tensor:
        batch, _, *heads = parts[0].shape
        return torch.cat([*parts, parts[0].new_empty(batch, new_tokens, *heads)], dim=1)

    layers = zip(*cached.values(), strict=True)
    return [(join([k for k, _ in kvs]), join([v for _, v in kvs])) for kvs in layers]


def _noise(shape: Sequence[int], generator: Generators, device: torch.device) -> Tensor:
    """Standard normal numbers; with several generators, each draws one row of the batch."""
    if isinstance(generator, Sequence):
        if len(generator) != shape[0]:
            raise ValueError(f"{len(generator)} generators for a batch of {shape[0]}")
        return torch.cat([_noise((1, *shape[1:]), one, device) for one in generator])
    drawn_on = generator.device if generator is not None else device
    return torch.randn(*shape, generator=generator, device=drawn_on).to(device)
