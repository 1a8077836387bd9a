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
from torch import Tensor
from torch.nn import functional as F

from memer.flow import euler_times, integrate, interpolate, loss_weight, masked_mse, sample_time, to_velocity
from models.wan import TIME_SCALE, KeyValue, time_embedding
from models.wap_batch import Chunk, WapBatch, WapOutput, check_batch, check_plan
from models.wap_cache import ObsCache, PlanCache, cached_groups, chunk_rooms, token_counts
from models.wap_network import WapNetwork
from models.wap_settings import WapSettings, full_settings, tiny_settings
from models.wap_tokens import VideoPart, attention_calls, video_stream

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

#: Past frames that go through the network at once.
_HISTORY_PIECE = 16

Generators = torch.Generator | Sequence[torch.Generator] | None


class WapModel(WapNetwork):
    """The executor: losses, prefills and sampler over its network."""

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
        z_plan, told = batch.z_plan, batch.progress
        noises = [_noise(data.shape, generator, device) for data in (future, batch.actions, progress)]
        noisy_future = interpolate(future, noises[0], t_video)
        noisy_actions = interpolate(batch.actions, noises[1], t_chunk)
        noisy_progress = interpolate(progress, noises[2], t_chunk)
        if self.training and s.plan_noise and z_plan is not None:
            z_plan = z_plan + s.plan_noise * _noise(z_plan.shape, generator, device)
        if self.training and s.condition_jitter:
            told = (told + s.condition_jitter * _noise(told.shape, generator, device)).clamp(0, 1)
        action_valid = batch.action_valid.unsqueeze(2)
        if batch.dim_valid is not None:
            action_valid = action_valid & batch.dim_valid.unsqueeze(1)

        out = self(
            z_plan=z_plan,
            z_obs=batch.z_clip[:, :, :1],
            text=self.context(batch.text_plan, batch.text_global),
            state=batch.state,
            progress=told,
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
                action_valid,
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

    # -- inference --------------------------------------------------------------------

    @torch.no_grad()
    def prefill_plan(self, z_plan: Tensor | None, text: Tensor) -> PlanCache:
        """Run P, once per segment.

        Args:
            z_plan: float32[B, C, 3, h, w]; None for visual_plan=none. For executor_context=full_history one
                latent per past frame; see also `extend_history`.
            text: float32[B, M, T] of `context`.

        Raises:
            MemerError: the plan is missing, unexpected, or of another length or size.
        """
        check_plan(z_plan, self.settings, batch=len(text))
        if z_plan is None:
            return PlanCache([], 0)
        if self.settings.executor_context == "full_history":
            return self.extend_history(PlanCache([], 0), z_plan, text)
        parts = [VideoPart("P", z_plan, 0, text.shape[1])]
        return PlanCache(self.prefill(parts, text, {})["P"], z_plan.shape[2])

    @torch.no_grad()
    def extend_history(self, history: PlanCache, z_frames: Tensor, text: Tensor) -> PlanCache:
        """Append past frames to a history (executor_context=full_history).

        Long pieces go through the network in short ones, so that no mask is as long as the history squared.
        The given cache stays valid, but only the newest may be extended.

        Args:
            history: of `prefill_plan` or this.
            z_frames: float32[B, C, F, h, w], one latent per frame, each encoded alone.
            text: float32[B, M, T] of `context`.
        """
        s = self.settings
        spare = s.frame_tokens + s.action_horizon + s.progress_tokens
        if not z_frames.shape[2]:
            return history
        for piece in z_frames.split(_HISTORY_PIECE, dim=2):
            parts = [VideoPart("P", piece, history.latents, text.shape[1])]
            cached = {"H": history.keys} if history.latents else {}
            room = history.room(s.frame_tokens * piece.shape[2])
            new = self.prefill(parts, text, cached, rooms=room)["P"]
            history = history.extended(new, latents=piece.shape[2], spare=spare)
        return history

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
        context = self.condition(text, state, progress)
        parts = [VideoPart("O", z_obs, self.start(plan.latents), context.shape[1])]
        rooms = plan.room(self.settings.frame_tokens)
        return ObsCache(self.prefill(parts, context, cached_groups(plan), rooms=rooms)["O"])

    def sample(
        self,
        plan: PlanCache,
        obs: ObsCache,
        text: Tensor,
        state: Tensor,
        progress: Tensor | None,
        *,
        steps: int = 10,
        temperature: float = 1.0,
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
            temperature: deviation of the noise that a chunk starts from. Below 1 chunks stay nearer to the
                middle of what demonstrations did there: less various, more precise.
            generator: of the noise; one per row of the batch makes every row independent of the others.
        """
        return self._sample(
            plan,
            obs,
            text,
            state,
            progress,
            steps=steps,
            temperature=temperature,
            generator=generator,
            future=False,
        )

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
        return self._sample(
            plan, obs, text, state, progress, steps=steps, temperature=1.0, generator=generator, future=True
        )

    @torch.no_grad()
    def finished(self, plan: PlanCache, obs: ObsCache, text: Tensor, state: Tensor) -> Tensor:
        """Probability that the segment is finished, float32[B] (progress_mode=classification).

        One pass of one token, no denoising.
        """
        if self.settings.progress_mode != "classification":
            raise ValueError("finished() needs progress_mode=classification; read the progress of sample()")
        context = self.condition(text, state, None)
        streams = {"progress": self.chunk_stream("progress", context, t=state.new_zeros(1, 1))}
        tokens = {"progress": self.progress.embed(None, batch=len(state))}
        cached = cached_groups(plan, obs)
        calls = attention_calls(streams, self.settings, cached=token_counts(cached))
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
        temperature: float,
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
        noise = tuple(temperature * _noise(shape, generator, device) for shape in shapes)

        # What no Euler step changes: the times of all steps, the text's keys, the cached keys.
        context = self.condition(text, state, progress)
        times = euler_times(steps, shift=s.shift)
        t = torch.tensor([times[:-1]], device=device)
        streams = {name: self.chunk_stream(name, context, t=t) for name in names if name != "video"}
        if future:
            parts = [VideoPart("F", noise[-1], self.start(plan.latents) + 1, context.shape[1])]
            _, stream, _ = video_stream(self.video, parts, context)
            temb, rows = time_embedding(self.video.condition_embedder, TIME_SCALE * t)
            streams["video"] = replace(stream, time=rows)
        cached = cached_groups(plan, obs)
        calls = attention_calls(streams, s, cached=token_counts(cached))
        new_tokens = sum(x.shape[1] for x in noise)
        rooms = chunk_rooms(plan, obs, new_tokens=new_tokens) if len(calls) == 1 else None
        texts: list[dict[str, KeyValue]] | None = None
        step = {time: i for i, time in enumerate(times)}

        def field(y: tuple[Tensor, ...], time: float) -> tuple[Tensor, ...]:
            nonlocal texts
            i = step[time]
            state_of = dict(zip(names, y, strict=True))
            out, _, texts = self.mot(
                {name: self.embed(name, x) for name, x in state_of.items()},
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
                    prediction = self.expert(name).proj_out(out[name])
                velocities.append(to_velocity(prediction.float(), x, time, kind=kinds[name]))
            return tuple(velocities)

        sampled = dict(zip(names, integrate(field, noise, times), strict=True))
        scores = (sampled["progress"].squeeze(2) + 1) / 2 if "progress" in sampled else None
        return Chunk(sampled["action"], scores, sampled.get("video"))


def _noise(shape: Sequence[int], generator: Generators, device: torch.device) -> Tensor:
    """Standard normal numbers; with several generators, each draws one row of the batch."""
    if isinstance(generator, Sequence):
        if len(generator) != shape[0]:
            raise ValueError(f"{len(generator)} generators for a batch of {shape[0]}")
        return torch.cat([_noise((1, *shape[1:]), one, device) for one in generator])
    drawn_on = generator.device if generator is not None else device
    return torch.randn(*shape, generator=generator, device=drawn_on).to(device)
