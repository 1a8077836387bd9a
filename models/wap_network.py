"""The executor's network: three experts, their embedders, and the joint pass over all groups.

Letters in shapes: B batch, C channels, n future latents, h x w latent pixels, M text tokens, T their size,
D actions' size, D_s state's size.

Source: MaP-WAM (arXiv 2609.11561), specification sections 8 and 11.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from memer.errors import MemerError
from memer.plan_settings import LATENT_PATCH
from models.mot import Expert, MixtureOfTransformers, Stream
from models.wan import CausalWan, KeyValue
from models.wap_batch import WapOutput
from models.wap_cache import Cached, token_counts
from models.wap_settings import WapSettings
from models.wap_tokens import VideoPart, attention_calls, line_stream, video_stream


class WapNetwork(nn.Module):
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
        context = self.condition(text, state, progress)
        visible = context.shape[1]
        parts = [] if z_plan is None else [VideoPart("P", z_plan, 0, text.shape[1])]
        start = self.start(0 if z_plan is None else z_plan.shape[2])
        parts.append(VideoPart("O", z_obs, start, visible))
        if noisy_future is not None:
            parts.append(VideoPart("F", noisy_future, start + 1, visible, t_video))
        video, stream, temb = video_stream(self.video, parts, context)
        t = t_chunk.unsqueeze(1)
        clean = self.settings.progress_mode == "classification"
        streams = {
            "video": stream,
            "action": self.chunk_stream("action", context, t=t),
            "progress": self.chunk_stream("progress", context, t=torch.zeros_like(t) if clean else t),
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

    def condition(self, text: Tensor, state: Tensor, progress: Tensor | None) -> Tensor:
        """Text plus one token each for state and progress: [B, M + 1 or 2, T]."""
        dtype = self.state_in.weight.dtype
        tokens = [text.to(dtype), self.state_in(state.to(dtype)).unsqueeze(1)]
        if self.progress_in is not None:
            if progress is None:
                raise ValueError(
                    "progress is missing; this executor is told its progress (progress_condition)"
                )
            tokens.append(self.progress_in((2 * progress.unsqueeze(1) - 1).to(dtype)).unsqueeze(1))
        return torch.cat(tokens, dim=1)

    def start(self, plan_latents: int) -> int:
        """Time position of the observation."""
        return plan_latents if self.settings.rope == "sequential" else 0

    def expert(self, name: str) -> Expert:
        """A narrow expert by name."""
        return self.action if name == "action" else self.progress

    def embed(self, name: str, x: Tensor) -> Tensor:
        """Noisy values of a group to tokens of its expert."""
        if name == "video":
            return self.video.embed(x.to(self.video.patch_embedding.weight.dtype))
        return self.expert(name).embed(x, batch=len(x))

    def chunk_stream(self, name: str, context: Tensor, *, t: Tensor) -> Stream:
        """Stream of A ("action") or R ("progress") at flow times t [B or 1, R]."""
        s = self.settings
        group, length = ("A", s.action_horizon) if name == "action" else ("R", s.progress_tokens)
        return line_stream(self.expert(name), group, length, context, t=t, head_dim=s.video.head_dim)

    def prefill(
        self,
        parts: Sequence[VideoPart],
        context: Tensor,
        cached: Cached,
        *,
        rooms: Sequence[KeyValue] | None = None,
    ) -> dict[str, list[KeyValue]]:
        """Keys and values of clean video tokens."""
        tokens, stream, _ = video_stream(self.video, parts, context)
        streams = {"video": stream}
        calls = attention_calls(streams, self.settings, cached=token_counts(cached))
        _, keys, _ = self.mot(
            {"video": tokens}, streams=streams, calls=calls, wanted="", cached=cached, rooms=rooms
        )
        return keys
