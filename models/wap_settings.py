"""Settings of the World-Action-Progress executor: sizes, prediction kinds and switches.

Source: MaP-WAM specification, sections 8 (executor), 11 (switches), 15 and 16 (defaults, sizes).
"""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from memer.errors import UsageError
from memer.flow import Prediction, Weighting
from memer.plan_settings import LATENT_PATCH, PlanSettings
from memer.settings import build, require, require_counts, require_numbers
from models.mot import ExpertSize

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "video_prediction": get_args(Prediction),
    "action_prediction": get_args(Prediction),
    "progress_prediction": get_args(Prediction),
    "loss_weighting": get_args(Weighting),
    "visual_plan": ("memory", "current_only", "none"),
    "progress_mode": ("modality", "classification"),
    "executor_context": ("plan", "full_history"),
    "target_text": ("plan", "plan+global"),
    "rope": ("sequential", "shared"),
    "action_progress": ("joint", "separate"),
    "attention": ("grouped", "masked"),
}


#: Fields that have arguments of their own in `from_plan`.
_SIZES = ("video", "action", "progress", "freq_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class WapSettings:
    """Everything that fixes the executor's parameters and what its tokens mean.

    Attributes:
        video: expert of plan, observation and future; its hidden width equals heads * head_dim.
        action: expert of the actions.
        progress: expert of the progress.
        channels: C of a latent.
        latent_height: rows of a latent frame, a multiple of the patch (2).
        latent_width: columns of a latent frame, a multiple of the patch.
        text_dim: T, size of a text token.
        text_tokens: M, tokens per text; part of the model, because padding stays visible.
        freq_dim: Q, size of the sinusoid of a flow time.
        action_dim: D.
        state_dim: D_s.
        action_horizon: h, actions per chunk.
        future_latents: latent frames imagined beside the actions.
        plan_latents: latent frames of P: start frame and plan, or those of the plan alone (`episodic`).
        video_prediction: what the video expert's head gives; `data` where a token is wider than the expert.
        action_prediction: the same of the action expert.
        progress_prediction: the same of the progress expert.
        shift: s of the flow times, in training and sampling.
        loss_weighting: weight of a sample's flow losses by its time, see `memer.flow.loss_weight`.
        plan_noise: deviation of noise on the plan's latents in training, because run time draws plans;
            0 = off.
        condition_jitter: deviation of noise on p_t in training, because at run time the executor is told its
            own prediction; 0 = off.
        lambda_video: weight of the future's loss.
        lambda_action: weight of the actions' loss.
        lambda_progress: weight of the progress' loss.
        visual_plan: see PlanSettings; `none` leaves P empty.
        progress_mode: `modality` denoises progress beside the actions; `classification` reads "segment
            finished" off one learned token.
        progress_condition: tokens that may see p_t get it as a text token.
        executor_context: `full_history` puts one latent per past frame in the plan's place.
        target_text: `plan+global` appends the task's instruction to the segment's text.
        rope: time positions; `sequential` P, O, F in one row, `shared` restarts O at 0.
        action_progress: `joint` lets actions and progress see each other.
        attention: `grouped` one unmasked call per group in training; `masked` one call with a mask (equal).
    """

    video: ExpertSize
    action: ExpertSize
    progress: ExpertSize
    channels: int
    latent_height: int
    latent_width: int
    text_dim: int
    text_tokens: int
    freq_dim: int
    action_dim: int
    state_dim: int
    action_horizon: int
    future_latents: int
    plan_latents: int = 3
    video_prediction: Prediction = "velocity"
    action_prediction: Prediction = "velocity"
    progress_prediction: Prediction = "velocity"
    shift: float = 5.0
    loss_weighting: Weighting = "none"
    plan_noise: float = 0.0
    condition_jitter: float = 0.0
    lambda_video: float = 1.0
    lambda_action: float = 1.0
    lambda_progress: float = 1.0
    visual_plan: Literal["memory", "current_only", "none"] = "memory"
    progress_mode: Literal["modality", "classification"] = "modality"
    progress_condition: bool = True
    executor_context: Literal["plan", "full_history"] = "plan"
    target_text: Literal["plan", "plan+global"] = "plan"
    rope: Literal["sequential", "shared"] = "sequential"
    action_progress: Literal["joint", "separate"] = "joint"
    attention: Literal["grouped", "masked"] = "grouped"

    def __post_init__(self) -> None:
        for name, accepted in _CHOICES.items():
            require(getattr(self, name) in accepted, self, name, " or ".join(accepted))
        require_counts(
            self,
            channels=1,
            text_dim=1,
            text_tokens=1,
            freq_dim=2,
            action_dim=1,
            state_dim=1,
            action_horizon=1,
            future_latents=1,
            plan_latents=1,
        )
        for name in ("latent_height", "latent_width"):
            value = getattr(self, name)
            require(
                value > 0 and value % LATENT_PATCH == 0, self, name, f"a positive multiple of {LATENT_PATCH}"
            )
        weights = ("lambda_video", "lambda_action", "lambda_progress", "plan_noise", "condition_jitter")
        require_numbers(self, "shift", *weights)
        require(self.shift > 0, self, "shift", "positive")
        for name in weights:
            require(getattr(self, name) >= 0, self, name, "zero or more")
        if self.video.hidden != self.video.attention_dim:
            raise UsageError(
                f"WapSettings.video: hidden {self.video.hidden}, must be num_heads * head_dim = "
                f"{self.video.attention_dim}, as in the pretrained video model"
            )
        if self.progress_mode == "classification" and self.progress_condition:
            raise UsageError(
                "WapSettings.progress_condition: true, but progress_mode=classification predicts no progress "
                "that could be the next condition; set progress_condition=false"
            )
        if self.executor_context == "full_history" and self.visual_plan != "memory":
            raise UsageError(
                f"WapSettings.executor_context: full_history replaces the visual plan, visual_plan="
                f"{self.visual_plan} would change nothing; leave visual_plan=memory"
            )
        if self.video_prediction == "velocity" and self.token_dim > self.video.hidden:
            warnings.warn(
                f"WapSettings.video_prediction: velocity, but a video token has {self.token_dim} values and "
                f"the expert {self.video.hidden}: the noise cannot pass; use video_prediction=data",
                stacklevel=2,
            )

    @property
    def token_dim(self) -> int:
        """Values of one video token: channels times patch area."""
        return self.channels * LATENT_PATCH**2

    @property
    def frame_tokens(self) -> int:
        """Video tokens per latent frame."""
        return self.latent_height * self.latent_width // LATENT_PATCH**2

    @property
    def context_tokens(self) -> int:
        """Text tokens before those of state and progress."""
        return self.text_tokens * (2 if self.target_text == "plan+global" else 1)

    @property
    def has_plan(self) -> bool:
        """P holds a plan: neither empty nor a history."""
        return self.visual_plan != "none" and self.executor_context == "plan"

    @property
    def progress_tokens(self) -> int:
        """Tokens of R: one per action, or the classifier's one."""
        return self.action_horizon if self.progress_mode == "modality" else 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `from_dict` reads them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str = "wap settings") -> "WapSettings":
        """Read plain values; unknown and missing fields are errors by name."""
        kwargs: dict[str, Any] = dict(values)
        for name in ("video", "action", "progress"):
            if name in kwargs and not isinstance(kwargs[name], ExpertSize):
                kwargs[name] = build(ExpertSize, kwargs[name], where=f"{where}: {name}")
        return build(cls, kwargs, where=where)

    @classmethod
    def from_plan(
        cls,
        plan: PlanSettings,
        *,
        action_dim: int,
        state_dim: int,
        video: ExpertSize,
        action: ExpertSize,
        progress: ExpertSize,
        freq_dim: int,
        **options: Any,
    ) -> "WapSettings":
        """Settings whose shapes and switches are those of the contract; `options` are this class' others.

        Raises:
            UsageError: an option that the contract fixes, or that does not exist.
        """
        fixed = contract_fields(plan, action_dim=action_dim, state_dim=state_dim)
        for name in options:
            if name in fixed or name not in cls.__dataclass_fields__:
                why = "fixed by the contract's plan" if name in fixed else "unknown"
                free = sorted(set(cls.__dataclass_fields__) - set(fixed) - set(_SIZES))
                raise UsageError(f"settings.{name}: {why}; there are: {', '.join(free)}")
        return cls(
            video=video,
            action=action,
            progress=progress,
            freq_dim=freq_dim,
            **fixed,
            **options,
        )


def contract_fields(plan: PlanSettings, *, action_dim: int, state_dim: int) -> dict[str, Any]:
    """The fields of WapSettings that the contract fixes, by its plan and the dimensions of its statistics."""
    return {
        "channels": plan.codec.channels,
        "latent_height": plan.latent_height,
        "latent_width": plan.latent_width,
        "text_dim": plan.text.dim,
        "text_tokens": plan.text.max_tokens,
        "action_dim": action_dim,
        "state_dim": state_dim,
        "action_horizon": plan.action_horizon,
        "future_latents": plan.num_future_latents,
        "plan_latents": plan.plan_latents + (plan.plan_encoding == "self_contained"),
        "visual_plan": plan.visual_plan,
        "progress_mode": plan.progress_mode,
        "progress_condition": plan.progress_condition,
        "executor_context": plan.executor_context,
        "target_text": plan.target_text,
    }


def tiny_settings(*, action_dim: int = 4, state_dim: int = 4, **changes: Any) -> WapSettings:
    """A model for two CPU cores: canvas 32 x 32 by the patch codec, 16 tokens of 768 values per latent frame.

    >>> tiny_settings().frame_tokens, tiny_settings().token_dim
    (16, 768)
    """
    attention = {"num_layers": 4, "num_heads": 6, "head_dim": 32}
    settings = WapSettings(
        video=ExpertSize(hidden=192, ffn=576, **attention),
        action=ExpertSize(hidden=96, ffn=384, **attention),
        progress=ExpertSize(hidden=48, ffn=192, **attention),
        channels=192,
        latent_height=8,
        latent_width=8,
        text_dim=32,
        text_tokens=8,
        freq_dim=64,
        action_dim=action_dim,
        state_dim=state_dim,
        action_horizon=16,
        future_latents=1,
        video_prediction="data",
    )
    return replace(settings, **changes)


def full_settings(*, action_dim: int = 14, state_dim: int = 14, **changes: Any) -> WapSettings:
    """The published sizes on Wan2.2-TI2V-5B: canvas 384 x 320, 120 tokens of 192 values per latent frame.

    >>> full_settings().frame_tokens, full_settings().token_dim
    (120, 192)
    """
    attention = {"num_layers": 30, "num_heads": 24, "head_dim": 128}
    settings = WapSettings(
        video=ExpertSize(hidden=3072, ffn=14336, **attention),
        action=ExpertSize(hidden=1024, ffn=4096, **attention),
        progress=ExpertSize(hidden=256, ffn=1024, **attention),
        channels=48,
        latent_height=24,
        latent_width=20,
        text_dim=4096,
        text_tokens=128,
        freq_dim=256,
        action_dim=action_dim,
        state_dim=state_dim,
        action_horizon=32,
        future_latents=2,
    )
    return replace(settings, **changes)
