"""The canvas: regions, the same pixels live and from shards, conversions."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from memer.cameras import code_view
from memer.canvas import canvases, paint_canvas, to_pixels, to_signed
from memer.contract import CameraLayout
from memer.episode import ArrayFrames, Episode, InstructionSpan
from memer.errors import MemerError
from memer.plan_settings import CanvasLayout, CanvasRegion

CAMERAS = CameraLayout(camera_keys=("wrist", "base"), view_width=24, view_height=16)
CANVAS = CanvasLayout(
    height=32,
    width=32,
    regions=(
        CanvasRegion(camera="base", y=0, x=0, height=16, width=32),
        CanvasRegion(camera="wrist", y=16, x=8, height=8, width=12),
    ),
)


def clip(frames: int, seed: int = 0) -> np.ndarray:
    """Smooth random pictures, so that JPEG and resizing change but do not destroy them."""
    coarse = np.random.default_rng(seed).integers(0, 256, (frames, 4, 5, 3), dtype=np.uint8)
    return coarse.repeat(9, axis=1).repeat(9, axis=2)


def make_episode(views: dict[str, np.ndarray], *, prepared: bool = False) -> Episode:
    steps = len(next(iter(views.values())))
    return Episode(
        source="s",
        episode_index=3,
        fps=10.0,
        cameras={key: ArrayFrames(array, prepared=prepared) for key, array in views.items()},
        state=np.zeros((steps, 2), dtype=np.float32),
        action=np.zeros((steps, 2), dtype=np.float32),
        instructions=(InstructionSpan(0, "do it"),),
        segments=(),
    )


def test_a_canvas_from_shards_equals_the_live_one_bit_for_bit():
    raw = {"base": clip(6), "wrist": clip(6, seed=1)}
    stored = {
        key: np.stack([code_view(view, CAMERAS, key=key) for view in views]) for key, views in raw.items()
    }
    live = canvases(make_episode(raw), range(6), canvas=CANVAS, cameras=CAMERAS)
    shards = canvases(make_episode(stored, prepared=True), range(6), canvas=CANVAS, cameras=CAMERAS)
    for k in range(6):
        single = paint_canvas({key: views[k] for key, views in raw.items()}, canvas=CANVAS, cameras=CAMERAS)
        from_parts = paint_canvas(
            {key: views[k] for key, views in stored.items()}, canvas=CANVAS, cameras=CAMERAS, prepared=True
        )
        assert np.array_equal(live[k], shards[k])
        assert np.array_equal(live[k], single)
        assert np.array_equal(live[k], from_parts)


def test_views_lie_in_their_regions_on_black():
    views = {"base": np.full((30, 40, 3), 200, np.uint8), "wrist": np.full((30, 40, 3), 90, np.uint8)}
    canvas = paint_canvas(views, canvas=CANVAS, cameras=CAMERAS)
    assert canvas.shape == (32, 32, 3)
    assert set(canvas[:16].ravel()) == {200}
    assert set(canvas[16:24, 8:20].ravel()) == {90}
    canvas[:16], canvas[16:24, 8:20] = 0, 0
    assert not canvas.any()


def test_a_view_of_the_regions_size_is_not_filtered():
    cameras = replace(CAMERAS, view_width=32, view_height=16)
    view = clip(1)[0]
    canvas = paint_canvas({"base": view, "wrist": view}, canvas=CANVAS, cameras=cameras)
    assert np.array_equal(canvas[:16], code_view(view, cameras, key="base"))


def test_shrinking_is_antialiased():
    stripes = np.zeros((16, 24, 3), np.uint8)
    stripes[:, ::2] = 255
    canvas = paint_canvas(
        {"base": stripes, "wrist": stripes}, canvas=CANVAS, cameras=replace(CAMERAS, jpeg_round_trip=False)
    )
    inner = canvas[17:23, 10:18].astype(int)
    assert abs(inner - 127).max() < 40  # picking every second pixel would give 0 or 255


def test_frames_may_repeat_and_come_in_any_order():
    episode = make_episode({"base": clip(6), "wrist": clip(6, seed=1)})
    assert sorted(canvases(episode, [5, 2, 2, 0], canvas=CANVAS, cameras=CAMERAS)) == [0, 2, 5]
    assert canvases(episode, [], canvas=CANVAS, cameras=CAMERAS) == {}


def test_what_is_missing_is_named():
    view = clip(1)[0]
    with pytest.raises(MemerError, match="no camera 'wrist'; available: base"):
        paint_canvas({"base": view}, canvas=CANVAS, cameras=CAMERAS)
    with pytest.raises(
        MemerError, match=r"camera base: prepared view of 45x36 px, the layout asks for 24x16"
    ):
        paint_canvas({"base": view, "wrist": view}, canvas=CANVAS, cameras=CAMERAS, prepared=True)
    episode = make_episode({"base": clip(6), "wrist": clip(6)})
    with pytest.raises(MemerError, match="episode 3 of s: frame 6, the episode has 6"):
        canvases(episode, [0, 6], canvas=CANVAS, cameras=CAMERAS)


def test_signed_values_and_pixels_are_inverse():
    pixels = np.arange(256, dtype=np.uint8).repeat(3).reshape(1, 16, 16, 3)
    signed = to_signed(pixels)
    assert (signed.shape, signed.dtype) == ((1, 3, 16, 16), torch.float32)
    assert (signed.min().item(), signed.max().item()) == (-1.0, 1.0)
    assert np.array_equal(to_pixels(signed), pixels)
    assert torch.equal(to_signed(torch.from_numpy(pixels)), signed)
    assert torch.equal(signed[0, 0], signed[0, 2])


def test_other_numbers_are_refused():
    with pytest.raises(ValueError, match="must be uint8"):
        to_signed(np.zeros((4, 4, 3), np.float32))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="channels last"):
        to_signed(np.zeros((3, 4, 4), np.uint8))
    with pytest.raises(ValueError, match="must be floats"):
        to_pixels(torch.zeros(3, 4, 4, dtype=torch.uint8))
    for value in (1.2, float("nan")):
        with pytest.raises(ValueError, match=r"must be in -1..1"):
            to_pixels(torch.full((3, 4, 4), value))
