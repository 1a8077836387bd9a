"""Cameras: any picture to RGB, slots, JPEG coding, stacking, and equality of stored and live frames."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from memer.cameras import (
    as_rgb,
    decode_jpeg,
    encode_jpeg,
    layout_from_file,
    prepare_frame,
    prepare_view,
    stack_views,
    stacked_frames,
)
from memer.contract import CameraLayout
from memer.episode import ArrayFrames, Episode, InstructionSpan
from memer.errors import MemerError, SourceUnavailableError


def layout(*keys: str, **changes) -> CameraLayout:
    sizes = {"view_width": 32, "view_height": 18}
    return CameraLayout(camera_keys=keys or ("wrist", "base"), **{**sizes, **changes})


def flat(height: int, width: int, colour: tuple[int, int, int]) -> np.ndarray:
    return np.full((height, width, 3), colour, dtype=np.uint8)


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


RED, BLUE = (200, 20, 20), (20, 20, 200)


def test_gray_alpha_and_channel_order():
    gray = np.arange(12, dtype=np.uint8).reshape(3, 4)
    picture = noise(5, 7)
    alpha = np.dstack([picture, np.full((5, 7), 9, np.uint8)])
    assert (as_rgb(gray) == gray[:, :, None]).all()
    assert (as_rgb(gray[:, :, None]) == gray[:, :, None]).all()
    assert (as_rgb(np.dstack([gray, gray + 1])) == gray[:, :, None]).all()
    assert (as_rgb(alpha) == picture).all()
    assert (as_rgb(np.moveaxis(picture, 2, 0)) == picture).all()
    assert (as_rgb(picture) == picture).all()
    assert as_rgb(picture).flags["C_CONTIGUOUS"]


def test_pil_pictures_of_every_8_bit_mode():
    picture = noise(5, 7)
    for mode in ("RGB", "RGBA", "L", "LA", "P"):
        image = Image.fromarray(picture).convert(mode)
        assert as_rgb(image).shape == (5, 7, 3)
    assert (as_rgb(Image.fromarray(picture)) == picture).all()
    with pytest.raises(ValueError, match="mode"):
        as_rgb(Image.new("I;16", (4, 4)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_floats_in_0_to_1_give_the_bytes_they_came_from(dtype):
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    assert (as_rgb((levels / 255).astype(dtype))[:, :, 0] == levels).all()


@pytest.mark.parametrize(
    "wrong",
    [
        np.full((4, 4, 3), 2.0),
        np.full((4, 4, 3), -1.0),
        np.full((4, 4, 3), np.nan),
        np.zeros((4, 4, 3), np.uint16),
        np.zeros((4, 4, 3), bool),
        np.zeros((4,), np.uint8),
        np.zeros((2, 4, 4, 3), np.uint8),
        np.zeros((5, 6, 7), np.uint8),
        np.zeros((0, 4, 3), np.uint8),
    ],
)
def test_other_pictures_are_refused(wrong):
    with pytest.raises(ValueError, match="picture"):
        as_rgb(wrong)


def test_every_view_gets_its_own_slot():
    views = {"wrist": flat(90, 160, RED), "base": flat(48, 30, BLUE)}
    stacked = stack_views(views, layout())
    assert stacked.shape == (36, 32, 3)
    assert (stacked[:18] == RED).all()
    assert (stacked[18:] == BLUE).all()


def test_order_comes_from_the_layout_and_other_cameras_are_ignored():
    views = {"wrist": flat(18, 32, RED), "base": flat(18, 32, BLUE), "extra": flat(1, 1, RED)}
    assert (stack_views(views, layout("base", "wrist"))[0, 0] == BLUE).all()
    assert (stack_views(views, layout("wrist", "base"))[0, 0] == RED).all()


def test_one_camera_is_resized_too():
    assert stack_views({"wrist": flat(90, 160, RED)}, layout("wrist")).shape == (18, 32, 3)


def test_slot_sized_views_are_only_concatenated():
    wrist, base = noise(18, 32, 1), noise(18, 32, 2)
    stacked = stack_views({"wrist": wrist, "base": base}, layout())
    assert (stacked == np.concatenate([wrist, base])).all()


def test_letterbox_keeps_the_shape_on_black():
    boxed = prepare_view(flat(18, 18, RED), layout(fit="letterbox"))
    assert boxed.shape == (18, 32, 3)
    assert (boxed[:, 7:25] == RED).all()
    assert (boxed[:, :7] == 0).all()
    assert (boxed[:, 25:] == 0).all()
    tall = prepare_view(flat(18, 64, RED), layout(fit="letterbox"))
    assert (tall[4:13] == RED).all()
    assert (tall[:4] == 0).all()
    assert prepare_view(flat(1, 500, RED), layout(fit="letterbox")).shape == (18, 32, 3)


def test_stretch_fills_the_slot():
    assert (prepare_view(flat(18, 18, RED), layout()) == RED).all()


def test_public_mode_pads_left_aligned_and_resizes_once():
    public = layout(stack_mode="public")
    views = {"wrist": flat(36, 64, RED), "base": flat(36, 32, BLUE)}
    stacked = stack_views(views, public)
    assert stacked.shape == (36, 32, 3)
    assert (stacked[4:14, 4:28] == RED).all()
    assert (stacked[22:32, 2:12] == BLUE).all()
    assert (stacked[22:32, 20:] == 0).all()
    whole = np.zeros((72, 64, 3), np.uint8)
    whole[:36], whole[36:, :32] = RED, BLUE
    assert (stacked == np.asarray(Image.fromarray(whole).resize((32, 36), Image.Resampling.BICUBIC))).all()


def test_public_mode_leaves_a_single_camera_alone():
    picture = noise(50, 70)
    assert (stack_views({"wrist": picture}, layout("wrist", stack_mode="public")) == picture).all()


def test_modes_agree_away_from_the_seam():
    views = {"wrist": flat(36, 64, RED), "base": flat(36, 64, BLUE)}
    ours, public = stack_views(views, layout()), stack_views(views, layout(stack_mode="public"))
    assert (ours[:14] == public[:14]).all()
    assert (ours[22:] == public[22:]).all()


def test_a_missing_camera_lists_those_that_exist():
    for call in (stack_views, prepare_frame):
        with pytest.raises(MemerError, match="no camera 'base'; available: top, wrist"):
            call({"wrist": flat(4, 4, RED), "top": flat(4, 4, RED)}, layout())


def test_jpeg_coding_is_repeatable_and_follows_the_quality():
    picture = noise(18, 32)
    assert encode_jpeg(picture, layout()) == encode_jpeg(picture, layout())
    assert len(encode_jpeg(picture, layout(jpeg_quality=30))) < len(encode_jpeg(picture, layout()))
    with Image.open(io.BytesIO(encode_jpeg(picture, layout()))) as image:
        assert (image.format, image.size, image.mode) == ("JPEG", (32, 18), "RGB")


def test_a_broken_jpeg_is_named():
    data = encode_jpeg(noise(64, 64), layout())
    for broken in (data[: len(data) // 2], b"", b"no picture"):
        with pytest.raises(MemerError, match="frame 7 of episode 2"):
            decode_jpeg(broken, where="frame 7 of episode 2")


def test_every_view_is_coded_once_before_stacking():
    views = {"wrist": noise(18, 32, 1), "base": noise(18, 32, 2)}
    coded = [decode_jpeg(encode_jpeg(views[key], layout())) for key in ("wrist", "base")]
    frame = prepare_frame(views, layout())
    assert (frame == np.concatenate(coded)).all()
    assert not (frame == np.concatenate(list(views.values()))).all()
    plain = prepare_frame(views, layout(jpeg_round_trip=False))
    assert (plain == np.concatenate(list(views.values()))).all()


def episode(cameras: dict[str, ArrayFrames], length: int) -> Episode:
    return Episode(
        source="demo",
        episode_index=5,
        fps=15.0,
        cameras=cameras,
        state=np.zeros((length, 2), np.float32),
        action=np.zeros((length, 2), np.float32),
        instructions=(InstructionSpan(0, "x"),),
        segments=(),
    )


@pytest.mark.parametrize("mode", ["per_view", "public"])
@pytest.mark.parametrize("keys", [("wrist",), ("wrist", "base")])
def test_stored_and_live_frames_are_equal_bit_for_bit(mode, keys):
    chosen = layout(*keys, stack_mode=mode)
    raw = {key: np.stack([noise(40, 60, seed=10 * i + k) for k in range(4)]) for i, key in enumerate(keys)}
    stored = {
        key: np.stack([decode_jpeg(encode_jpeg(prepare_view(view, chosen), chosen)) for view in views])
        for key, views in raw.items()
    }
    live = [prepare_frame({key: raw[key][k] for key in keys}, chosen) for k in range(4)]
    from_raw = stacked_frames(episode({key: ArrayFrames(raw[key]) for key in keys}, 4), chosen)
    from_shards = stacked_frames(
        episode({key: ArrayFrames(stored[key], prepared=True) for key in keys}, 4), chosen
    )
    policy = [prepare_frame({key: stored[key][k] for key in keys}, chosen, prepared=True) for k in range(4)]
    assert len(live) == 4
    for one, two, three, four in zip(live, from_raw, from_shards, policy, strict=True):
        assert (one == two).all()
        assert (one == three).all()
        assert (one == four).all()


class CountingFrames(ArrayFrames):
    """Counts passes and frames."""

    passes = 0
    read = 0

    def frames(self, indices=None):
        type(self).passes += 1
        for view in super().frames(indices):
            type(self).read += 1
            yield view


def test_an_episode_is_read_in_one_pass_and_only_where_asked():
    CountingFrames.passes = CountingFrames.read = 0
    views = np.stack([flat(18, 32, (k, k, k)) for k in range(0, 200, 10)])
    read = list(stacked_frames(episode({"wrist": CountingFrames(views)}, 20), layout("wrist"), [3, 7, 19]))
    assert [int(frame.mean().round()) for frame in read] == [30, 70, 190]
    assert (CountingFrames.passes, CountingFrames.read) == (1, 3)


def test_episode_faults_are_named():
    views = np.stack([flat(18, 32, RED)] * 3)
    one = episode({"wrist": ArrayFrames(views)}, 3)
    with pytest.raises(MemerError, match=r"episode 5 of demo: no camera 'base'; available: wrist"):
        list(stacked_frames(one, layout()))
    with pytest.raises(ValueError, match="ascending"):
        list(stacked_frames(one, layout("wrist"), [2, 1]))

    class Short(ArrayFrames):
        def frames(self, indices=None):
            yield self.array[0]

    with pytest.raises(MemerError, match="camera wrist ends before frame 1"):
        list(stacked_frames(episode({"wrist": Short(views)}, 3), layout("wrist")))


def test_prepared_views_of_another_layout_are_refused():
    views = {"wrist": flat(18, 32, RED), "base": flat(20, 32, RED)}
    with pytest.raises(MemerError, match=r"camera base: prepared view of 32x20 px.*32x18"):
        prepare_frame(views, layout(), prepared=True)
    stored = episode({"wrist": ArrayFrames(flat(9, 16, RED)[None], prepared=True)}, 1)
    with pytest.raises(MemerError, match="build the shards again"):
        list(stacked_frames(stored, layout("wrist")))


def test_layout_file(tmp_path):
    path = tmp_path / "panda.json"
    keys = ["observation.images.wrist_left", "observation.images.exterior_1_left"]
    path.write_text(json.dumps({"camera_keys": keys, "notes": "wrist above exterior"}))
    panda = layout_from_file(path)
    assert panda.camera_keys == tuple(keys)
    assert panda.stacked_size == (320, 360)
    path.write_text(json.dumps({"camera_keys": keys, "view_width": 64, "view_height": 48}))
    assert layout_from_file(path, fit="letterbox") == CameraLayout(
        camera_keys=tuple(keys), view_width=64, view_height=48, fit="letterbox"
    )


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"camera_keys": []},
        {"camera_keys": "wrist"},
        {"camera_keys": ["wrist", 3]},
        {"camera_keys": ["wrist", "wrist"]},
        {"camera_keys": ["wrist"], "view_width": 0},
        {"camera_keys": ["wrist"], "view_width": 320.0},
        {"camera_keys": ["wrist"], "view_height": True},
        {"camera_keys": ["wrist"], "width": 320},
        ["wrist"],
        None,
    ],
)
def test_any_other_layout_file_is_an_error(value, tmp_path):
    path = tmp_path / "layout.json"
    path.write_text(json.dumps(value))
    with pytest.raises(MemerError) as caught:
        layout_from_file(path)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 1


def test_a_layout_file_that_cannot_be_read(tmp_path):
    with pytest.raises(SourceUnavailableError, match=r"none\.json"):
        layout_from_file(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(MemerError, match="not a JSON file"):
        layout_from_file(tmp_path / "bad.json")
