"""What plan, executor and run time of a plan-following policy must share: the `plan` part of the contract.

Source: MaP-WAM specification, sections 3 (canvas), 4 (codec), 5 (text), 8 (executor) and 11 (switches).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Any, Literal

from memer.errors import UsageError
from memer.settings import build, require, require_counts, require_numbers

#: Latent frames compress 4 RGB frames in every codec.
TEMPORAL_RATIO = 4

#: The models' spatial patch, latent pixels: a latent row or column must hold a whole number of them.
LATENT_PATCH = 2

#: The sentence that the large text encoder was trained to follow.
VIDEO_TEMPLATE = "A video recorded from a robot's point of view executing the following instruction: {text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasRegion:
    """Where one camera's view lies on the canvas, px."""

    camera: str
    y: int
    x: int
    height: int
    width: int

    def __post_init__(self) -> None:
        require(bool(self.camera), self, "camera", "a camera key")
        require_counts(self, y=0, x=0, height=1, width=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasLayout:
    """The one RGB image that holds all camera views of a time step; pixels outside every region are black.

    Attributes:
        height: px.
        width: px.
        regions: one per camera, inside the canvas, not overlapping.
    """

    height: int
    width: int
    regions: tuple[CanvasRegion, ...]

    def __post_init__(self) -> None:
        regions = tuple(
            region if isinstance(region, CanvasRegion) else build(CanvasRegion, region, where="canvas region")
            for region in self.regions
        )
        object.__setattr__(self, "regions", regions)
        require_counts(self, height=1, width=1)
        cameras = [region.camera for region in regions]
        different = bool(cameras) and len(set(cameras)) == len(cameras)
        require(different, self, "regions", "a non-empty list of regions of different cameras")
        for number, region in enumerate(regions):
            if region.y + region.height > self.height or region.x + region.width > self.width:
                raise UsageError(
                    f"CanvasLayout.regions: {region.camera} reaches row {region.y + region.height}, column "
                    f"{region.x + region.width}, the canvas has {self.height} x {self.width} px"
                )
            for other in regions[:number]:
                if _overlap(region, other):
                    raise UsageError(f"CanvasLayout.regions: {other.camera} and {region.camera} overlap")

    @property
    def cameras(self) -> tuple[str, ...]:
        """Camera keys in the order of the regions."""
        return tuple(region.camera for region in self.regions)


def _overlap(a: CanvasRegion, b: CanvasRegion) -> bool:
    return a.y < b.y + b.height and b.y < a.y + a.height and a.x < b.x + b.width and b.x < a.x + a.width


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSettings:
    """The frozen visual codec.

    Attributes:
        kind: `patch` rearranges pixels without loss; `wan` is the Wan video autoencoder.
        spatial_ratio: s, canvas px per latent px.
        channels: C; a patch codec has 3 * 4 * s * s.
        weights: hub id or folder of the autoencoder; empty for `patch`.
        mean: per colour, of frames in [-1, 1]; a patch codec subtracts it. Latents of mean 0 and deviation 1
            stand to the noise of flow matching as the published ones do, and a network sees in them what
            moves rather than the table. An autoencoder brings its own.
        std: per colour; a patch codec divides by it.
    """

    kind: Literal["patch", "wan"] = "patch"
    spatial_ratio: int = 4
    channels: int = 192
    weights: str = ""
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)

    def __post_init__(self) -> None:
        require(self.kind in ("patch", "wan"), self, "kind", "patch or wan")
        require_counts(self, spatial_ratio=1, channels=1)
        for name in ("mean", "std"):
            object.__setattr__(self, name, self._per_color(name))
        require(min(self.std) > 0, self, "std", "three positive numbers")
        if self.kind == "patch":
            expected = 3 * TEMPORAL_RATIO * self.spatial_ratio**2
            require(
                self.channels == expected,
                self,
                "channels",
                f"3 * {TEMPORAL_RATIO} * spatial_ratio^2 = {expected} for a patch codec",
            )
            require(not self.weights, self, "weights", "empty, a patch codec has none")
        else:
            require(bool(self.weights), self, "weights", "a hub id or folder, a wan codec has weights")
            neutral = self.mean == (0.0,) * 3 and self.std == (1.0,) * 3
            require(neutral, self, "mean", "0 and std 1, an autoencoder's own ones stand in its config")

    def _per_color(self, name: str) -> tuple[float, ...]:
        values = getattr(self, name)
        fine = isinstance(values, Sequence) and len(values) == 3
        fine = fine and all(type(v) in (int, float) and math.isfinite(v) for v in values)
        require(fine, self, name, "three numbers, one per colour")
        return tuple(float(v) for v in values)

    @property
    def temporal_ratio(self) -> int:
        """RGB frames per latent frame."""
        return TEMPORAL_RATIO


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """The frozen text encoder.

    Attributes:
        kind: `hashed` gives every token a fixed pseudo-random vector; `umt5` is UMT5-XXL.
        template: sentence around the text, with `{text}` in it; see VIDEO_TEMPLATE.
        max_tokens: M, tokens per text; part of the model, because padding stays visible.
        dim: T, size of a token's embedding.
        model: hub id or folder of the encoder; empty for `hashed`.
    """

    kind: Literal["hashed", "umt5"] = "hashed"
    template: str = "{text}"
    max_tokens: int = 8
    dim: int = 32
    model: str = ""

    def __post_init__(self) -> None:
        require(self.kind in ("hashed", "umt5"), self, "kind", "hashed or umt5")
        require(
            _fields(self.template) == {"text"},
            self,
            "template",
            "a sentence with {text} in it and no other field",
        )
        require_counts(self, max_tokens=1, dim=1)
        if self.kind == "hashed":
            require(not self.model, self, "model", "empty, the hashed encoder has none")
        else:
            require(bool(self.model), self, "model", "a hub id or folder, the umt5 encoder has weights")


def _fields(template: str) -> set[str | None]:
    """Names in braces; {None} where the braces do not fit."""
    try:
        return {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    except ValueError:
        return {None}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Everything that a visual plan's makers and followers agree on.

    Attributes:
        canvas: the image that plan and executor see.
        codec: see CodecSettings.
        text: see TextSettings.
        plan_frames: N, frames per finished segment, a multiple of 4.
        action_horizon: h, actions per chunk; h = 4 * frame_stride * m with m >= 1.
        frame_stride: steps between the future frames that the executor imagines.
        action_mode: what padding after a segment means: `delta` no motion, `absolute` the last one again.
        action_norm: `zscore` by mean and deviation, `minmax` to [-1, 1].
        action_clamp: bound of normalised values, > 0.
        visual_plan: `memory` a plan from all finished segments; `current_only` from the observation at the
            segment's start alone; `none` language alone.
        progress_mode: `modality` predicts progress beside every action; `classification` asks whether the
            segment is finished.
        progress_condition: the executor is told its progress; always False in `classification`.
        executor_context: what the executor reads besides the present: the `plan`, or the `full_history`.
        target_text: text that a plan's target and the executor see: that of the `plan`, or `plan+global`.
        plan_encoding: `self_contained` encodes start frame and plan frames anew; `episodic` takes the world
            model's latents.
        head_camera: camera that the language planner sees; the first region's when empty.
        finish_margin: m, the last steps of a segment that count as finished (`classification`); at least
            the number of actions between two checks, or the window can be jumped over.
    """

    canvas: CanvasLayout
    codec: CodecSettings = field(default_factory=CodecSettings)
    text: TextSettings = field(default_factory=TextSettings)
    plan_frames: int = 8
    action_horizon: int = 16
    frame_stride: int = 4
    action_mode: Literal["delta", "absolute"] = "delta"
    action_norm: Literal["zscore", "minmax"] = "zscore"
    action_clamp: float = 5.0
    visual_plan: Literal["memory", "current_only", "none"] = "memory"
    progress_mode: Literal["modality", "classification"] = "modality"
    progress_condition: bool = True
    executor_context: Literal["plan", "full_history"] = "plan"
    target_text: Literal["plan", "plan+global"] = "plan"
    plan_encoding: Literal["self_contained", "episodic"] = "self_contained"
    head_camera: str = ""
    finish_margin: int = 8

    def __post_init__(self) -> None:
        require_counts(self, plan_frames=1, action_horizon=1, frame_stride=1, finish_margin=1)
        for name, accepted in (
            ("action_mode", ("delta", "absolute")),
            ("action_norm", ("zscore", "minmax")),
            ("visual_plan", ("memory", "current_only", "none")),
            ("progress_mode", ("modality", "classification")),
            ("executor_context", ("plan", "full_history")),
            ("target_text", ("plan", "plan+global")),
            ("plan_encoding", ("self_contained", "episodic")),
        ):
            require(getattr(self, name) in accepted, self, name, " or ".join(accepted))
        require(type(self.progress_condition) is bool, self, "progress_condition", "true or false")
        require_numbers(self, "action_clamp")
        require(self.action_clamp > 0, self, "action_clamp", "positive")
        require(
            self.plan_frames % TEMPORAL_RATIO == 0, self, "plan_frames", f"a multiple of {TEMPORAL_RATIO}"
        )
        span = TEMPORAL_RATIO * self.frame_stride
        require(
            self.action_horizon % span == 0,
            self,
            "action_horizon",
            f"a multiple of {TEMPORAL_RATIO} * frame_stride = {span}",
        )
        step = self.codec.spatial_ratio * LATENT_PATCH
        if self.canvas.height % step or self.canvas.width % step:
            raise UsageError(
                f"PlanSettings.canvas: {self.canvas.height} x {self.canvas.width} px, height and width must "
                f"be multiples of codec.spatial_ratio * {LATENT_PATCH} = {step}"
            )
        if self.progress_mode == "classification":
            # The switch forces the condition off, so that no reader has to know both fields.
            object.__setattr__(self, "progress_condition", False)
        if not self.head_camera:
            object.__setattr__(self, "head_camera", self.canvas.cameras[0])
        self._check_switches()

    def _check_switches(self) -> None:
        """Refuse combinations in which one switch takes away what another one sets (section 11)."""
        if self.executor_context == "full_history" and self.visual_plan != "memory":
            raise UsageError(
                f"PlanSettings.executor_context: full_history replaces the visual plan, visual_plan="
                f"{self.visual_plan} would change nothing; leave visual_plan=memory"
            )
        if self.plan_encoding == "episodic" and (
            self.visual_plan == "none" or self.executor_context == "full_history"
        ):
            raise UsageError(
                "PlanSettings.plan_encoding: episodic, but the executor reads no visual plan "
                f"(visual_plan={self.visual_plan}, executor_context={self.executor_context}); "
                "leave plan_encoding=self_contained"
            )

    @property
    def latent_height(self) -> int:
        """Rows of a latent frame."""
        return self.canvas.height // self.codec.spatial_ratio

    @property
    def latent_width(self) -> int:
        """Columns of a latent frame."""
        return self.canvas.width // self.codec.spatial_ratio

    @property
    def plan_latents(self) -> int:
        """r, latent frames of one finished segment."""
        return self.plan_frames // TEMPORAL_RATIO

    @property
    def num_future_latents(self) -> int:
        """Latent frames that the executor imagines."""
        return self.action_horizon // (TEMPORAL_RATIO * self.frame_stride)

    @property
    def clip_frames(self) -> int:
        """RGB frames of an executor clip: the present one and the future ones."""
        return 1 + self.action_horizon // self.frame_stride

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str = "plan") -> "PlanSettings":
        """Read plain values; unknown and missing fields are errors by name."""
        nested = {"canvas": CanvasLayout, "codec": CodecSettings, "text": TextSettings}
        kwargs: dict[str, Any] = dict(values)
        for name, kind in nested.items():
            if name in kwargs:
                kwargs[name] = build(kind, kwargs[name], where=f"{where}: {name}")
        return build(cls, kwargs, where=where)
