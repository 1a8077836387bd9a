"""Plan settings: derived sizes, forced values, refused combinations (MaP-WAM specification, section 11)."""

from typing import Any

import pytest

from memer.errors import UsageError
from memer.plan_settings import CanvasLayout, CanvasRegion, CodecSettings, PlanSettings, TextSettings

HEAD = CanvasRegion(camera="head", y=0, x=0, height=256, width=320)
LEFT = CanvasRegion(camera="left", y=256, x=0, height=128, width=160)
RIGHT = CanvasRegion(camera="right", y=256, x=160, height=128, width=160)
FULL = CanvasLayout(height=384, width=320, regions=(HEAD, LEFT, RIGHT))


def make(**changes: Any) -> PlanSettings:
    return PlanSettings(**{"canvas": FULL, **changes})


def test_sizes_of_the_full_configuration():
    codec = CodecSettings(kind="wan", spatial_ratio=16, channels=48, weights="wan")
    plan = make(codec=codec, action_horizon=32)
    assert (plan.latent_height, plan.latent_width) == (24, 20)
    assert (plan.plan_latents, plan.num_future_latents, plan.clip_frames) == (2, 2, 9)


def test_sizes_of_the_tiny_configuration():
    region = CanvasRegion(camera="base", y=0, x=0, height=32, width=32)
    plan = make(canvas=CanvasLayout(height=32, width=32, regions=(region,)))
    assert (plan.latent_height, plan.latent_width) == (8, 8)
    assert (plan.plan_latents, plan.num_future_latents, plan.clip_frames) == (2, 1, 5)


def test_the_first_region_is_the_planners_view():
    assert make().head_camera == "head"
    assert make(head_camera="left").head_camera == "left"


def test_classification_needs_no_condition():
    assert make().progress_condition
    assert not make(progress_mode="classification").progress_condition


@pytest.mark.parametrize(
    "changes",
    [
        {"visual_plan": "none"},
        {"visual_plan": "current_only"},
        {"progress_mode": "classification"},
        {"progress_condition": False},
        {"executor_context": "full_history"},
        {"plan_encoding": "episodic"},
        {"visual_plan": "current_only", "plan_encoding": "episodic"},
        {"target_text": "plan+global"},
    ],
)
def test_every_row_of_the_ablations_is_a_valid_plan(changes):
    make(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plan_frames": 6}, "PlanSettings.plan_frames: 6, must be a multiple of 4"),
        ({"action_horizon": 24}, "action_horizon: 24, must be a multiple of 4 . frame_stride = 16"),
        ({"action_horizon": 0}, "action_horizon: 0, must be an integer >= 1"),
        ({"visual_plan": "dream"}, "visual_plan: 'dream', must be memory or current_only or none"),
        (
            {"visual_plan": "none", "executor_context": "full_history"},
            "full_history replaces the visual plan",
        ),
        ({"visual_plan": "none", "plan_encoding": "episodic"}, "the executor reads no visual plan"),
        ({"executor_context": "full_history", "plan_encoding": "episodic"}, "reads no visual plan"),
        ({"action_clamp": 0.0}, "action_clamp: 0.0, must be positive"),
        ({"progress_condition": "no"}, "progress_condition: 'no', must be true or false"),
        ({"finish_margin": 0}, "finish_margin: 0"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        make(**changes)


def test_the_canvas_must_fit_codec_and_patch():
    head = CanvasRegion(camera="head", y=0, x=0, height=240, width=320)
    codec = CodecSettings(kind="wan", spatial_ratio=16, channels=48, weights="wan")
    with pytest.raises(UsageError, match=r"240 x 320 px, height and width must be multiples of .* = 32"):
        make(canvas=CanvasLayout(height=240, width=320, regions=(head,)), codec=codec)


def test_regions_lie_inside_apart_and_belong_to_different_cameras():
    with pytest.raises(UsageError, match="right reaches row 384, column 320, the canvas has 300 x 320"):
        CanvasLayout(height=300, width=320, regions=(HEAD, RIGHT))
    moved = CanvasRegion(camera="left", y=255, x=0, height=8, width=8)
    with pytest.raises(UsageError, match="head and left overlap"):
        CanvasLayout(height=384, width=320, regions=(HEAD, moved))
    with pytest.raises(UsageError, match="different cameras"):
        CanvasLayout(height=384, width=320, regions=(LEFT, LEFT))
    with pytest.raises(UsageError, match="non-empty"):
        CanvasLayout(height=384, width=320, regions=())


def test_codec_and_text_are_checked():
    assert CodecSettings().temporal_ratio == 4
    with pytest.raises(UsageError, match=r"channels: 192, must be .* = 48 for a patch codec"):
        CodecSettings(spatial_ratio=2)
    with pytest.raises(UsageError, match="weights: 'wan', must be empty"):
        CodecSettings(weights="wan")
    with pytest.raises(UsageError, match=r"template: 'a video', must be a sentence with \{text\}"):
        TextSettings(template="a video")


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (CodecSettings, {"kind": "wan", "channels": 48}, "weights: '', must be a hub id or folder"),
        (CodecSettings, {"mean": [0.1, 0.2]}, r"mean: \[0.1, 0.2\], must be three numbers"),
        (CodecSettings, {"mean": [0.1, 0.2, float("nan")]}, "mean: .* must be three numbers"),
        (CodecSettings, {"std": [0.1, 0.2, 0]}, "std: .* must be three positive numbers"),
        (
            CodecSettings,
            {"kind": "wan", "channels": 48, "weights": "w", "std": [0.1, 0.2, 0.3]},
            "mean: .* must be 0 and std 1, an autoencoder's own ones",
        ),
        (TextSettings, {"kind": "umt5"}, "model: '', must be a hub id or folder"),
        (TextSettings, {"template": "do {what}: {text}"}, "template: .* and no other field"),
        (TextSettings, {"template": "do {text"}, "template: .* and no other field"),
    ],
)
def test_what_only_shows_at_first_use_is_refused_at_once(kind, values, message):
    with pytest.raises(UsageError, match=message):
        kind(**values)


@pytest.mark.parametrize("clamp", ["x", float("nan"), True])
def test_the_clamp_is_a_number(clamp):
    with pytest.raises(UsageError, match=r"action_clamp: .*must be a number"):
        make(action_clamp=clamp)
