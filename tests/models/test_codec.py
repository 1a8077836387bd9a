"""One contract for every codec, then what is special about each."""

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan

from memer.errors import MemerError, SourceUnavailableError
from memer.plan_settings import CodecSettings
from models.codec import PatchCodec, VisualCodec, WanCodec, make_codec, plan_psnr

SIZE = 32


def tiny_vae() -> AutoencoderKLWan:
    """Random weights, built as Wan2.2's: residual, patches of 2, ratios 4 and 16."""
    torch.manual_seed(0)
    return AutoencoderKLWan(
        base_dim=8,
        decoder_base_dim=12,
        z_dim=6,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        latents_mean=[0.1 * k for k in range(6)],
        latents_std=[0.5 + 0.1 * k for k in range(6)],
    )


@pytest.fixture(scope="module")
def wan() -> WanCodec:
    return WanCodec(tiny_vae())


@pytest.fixture(params=["patch", "patch s=2", "wan"])
def codec(request: pytest.FixtureRequest, wan: WanCodec) -> VisualCodec:
    return {"patch": PatchCodec(4), "patch s=2": PatchCodec(2), "wan": wan}[request.param]


def clip(frames: int, *, batch: int = 1, seed: int = 1) -> torch.Tensor:
    noise = torch.Generator().manual_seed(seed)
    return torch.rand(batch, 3, frames, SIZE, SIZE, generator=noise) * 2 - 1


@pytest.mark.parametrize(("frames", "latents"), [(1, 1), (5, 2), (9, 3), (17, 5)])
def test_shapes(codec: VisualCodec, frames: int, latents: int) -> None:
    z = codec.encode(clip(frames, batch=2))
    side = SIZE // codec.spatial_ratio
    assert z.shape == (2, codec.channels, latents, side, side)
    assert z.dtype == torch.float32
    x = codec.decode(z)
    assert x.shape == (2, 3, frames, SIZE, SIZE)
    assert x.abs().max() <= 1


@pytest.mark.parametrize("steps", [[1, 4, 4, 4, 4], [1, 8, 8], [1, 4, 12], [1, 16]])
def test_a_stream_equals_the_whole_clip(codec: VisualCodec, steps: list[int]) -> None:
    x = clip(17)
    state, pieces = codec.enc_init(), []
    for part in x.split(steps, dim=2):
        z, state = codec.enc_step(state, part)
        pieces.append(z)
    z = torch.cat(pieces, dim=2)
    torch.testing.assert_close(z, codec.encode(x), rtol=0, atol=1e-6)
    state, pieces = codec.dec_init(), []
    for part in z.split([1 if n == 1 else n // 4 for n in steps], dim=2):
        frames, state = codec.dec_step(state, part)
        pieces.append(frames)
    assert [piece.shape[2] for piece in pieces] == steps
    torch.testing.assert_close(torch.cat(pieces, dim=2), codec.decode(z), rtol=0, atol=1e-6)


def test_latents_do_not_depend_on_later_frames(codec: VisualCodec) -> None:
    x = clip(17)
    z = codec.encode(x)
    for latents in (1, 2, 3):
        frames = 1 + 4 * (latents - 1)
        changed = torch.cat((x[:, :, :frames], clip(17 - frames, seed=2)), dim=2)
        assert torch.equal(codec.encode(changed)[:, :, :latents], z[:, :, :latents])
        assert torch.equal(codec.encode(x[:, :, :frames]), z[:, :, :latents])
        assert not torch.equal(codec.encode(changed)[:, :, latents:], z[:, :, latents:])


@pytest.mark.parametrize("frames", [0, 2, 3, 4, 8, 12])
def test_a_clip_of_another_length_is_refused(codec: VisualCodec, frames: int) -> None:
    with pytest.raises(ValueError, match=f"{frames} frames"):
        codec.encode(clip(frames))


@pytest.mark.parametrize("frames", [5, 8, 9])
def test_a_stream_starts_with_one_frame(codec: VisualCodec, frames: int) -> None:
    with pytest.raises(ValueError, match="starts with 1 frame"):
        codec.enc_step(codec.enc_init(), clip(frames))


@pytest.mark.parametrize("frames", [0, 1, 7, 9])
def test_a_stream_goes_on_by_multiples_of_four(codec: VisualCodec, frames: int) -> None:
    _, state = codec.enc_step(codec.enc_init(), clip(1))
    with pytest.raises(ValueError, match="multiple of 4"):
        codec.enc_step(state, clip(frames))


def test_states_are_values(codec: VisualCodec) -> None:
    """Two continuations from one kept state: the first leaves no trace in the second."""
    x = clip(17)
    _, kept = codec.enc_step(codec.enc_init(), x[:, :, :1])
    _, kept = codec.enc_step(kept, x[:, :, 1:9])
    other, _ = codec.enc_step(kept, clip(8, seed=3))
    z, _ = codec.enc_step(kept, x[:, :, 9:])
    assert torch.equal(z, codec.encode(x)[:, :, 3:])
    assert not torch.equal(z, other)
    latents = codec.encode(x)
    _, kept = codec.dec_step(codec.dec_init(), latents[:, :, :1])
    codec.dec_step(kept, other)  # a generated plan, thrown away
    frames, _ = codec.dec_step(kept, latents[:, :, 1:])
    torch.testing.assert_close(frames, codec.decode(latents)[:, :, 1:], rtol=0, atol=1e-6)


def test_bad_frames_are_named(codec: VisualCodec) -> None:
    with pytest.raises(ValueError, match="uint8"):
        codec.encode(torch.zeros(1, 3, 1, SIZE, SIZE, dtype=torch.uint8))
    with pytest.raises(ValueError, match="multiples of"):
        codec.encode(torch.zeros(1, 3, 1, SIZE, SIZE + 1))
    with pytest.raises(ValueError, match="latents of shape"):
        codec.decode(torch.zeros(1, codec.channels + 1, 1, 2, 2))


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_patches_lose_nothing(ratio: int) -> None:
    x = clip(9, batch=2)
    assert torch.equal(PatchCodec(ratio).decode(PatchCodec(ratio).encode(x)), x)


def test_patches_lie_where_the_formula_says() -> None:
    x, s = clip(5), 4
    z = PatchCodec(s).encode(x)
    c, tau, y, dx, row, column = 2, 1, 3, 0, 5, 6
    channel = ((c * 4 + tau) * s + y) * s + dx
    assert z[0, channel, 1, row, column] == x[0, c, 1 + tau, s * row + y, s * column + dx]
    assert z[0, channel, 0, row, column] == x[0, c, 0, s * row + y, s * column + dx]


def test_normalised_patches_have_mean_0_and_deviation_1_per_colour() -> None:
    x = clip(9) * torch.tensor([0.2, 0.5, 0.1])[:, None, None, None] + 0.3
    mean, std = ([f(x[:, c]).item() for c in range(3)] for f in (torch.mean, torch.std))
    z = PatchCodec(4, mean=mean, std=std).encode(x).unflatten(1, (3, -1))
    # The first frame counts four times, so the figures are nearly those of the clip.
    torch.testing.assert_close(z.mean((0, 2, 3, 4, 5)), torch.zeros(3), rtol=0, atol=0.05)
    torch.testing.assert_close(z.std((0, 2, 3, 4, 5)), torch.ones(3), rtol=0, atol=0.05)


def test_normalised_patches_give_every_byte_back() -> None:
    noise = torch.Generator().manual_seed(1)
    frames = torch.randint(0, 256, (1, 3, 9, SIZE, SIZE), generator=noise, dtype=torch.uint8)
    x = frames.float() / 127.5 - 1
    codec = PatchCodec(4, mean=(0.4, 0.3, 0.1), std=(0.25, 0.3, 0.35))
    back = codec.decode(codec.encode(x))
    assert torch.equal(((back + 1) * 127.5).round().to(torch.uint8), frames)


def test_generated_patches_are_clamped() -> None:
    assert PatchCodec(4).decode(torch.full((1, 192, 1, 8, 8), 7.0)).max() == 1


def test_wan_equals_the_library(wan: WanCodec) -> None:
    x = clip(9)
    mean, std = (
        torch.tensor(wan.vae.config[k]).view(1, -1, 1, 1, 1) for k in ("latents_mean", "latents_std")
    )
    with torch.no_grad():
        z = (wan.vae.encode(x).latent_dist.mode() - mean) / std
        frames = wan.vae.decode(z * std + mean).sample
    torch.testing.assert_close(wan.encode(x), z, rtol=0, atol=1e-5)
    torch.testing.assert_close(wan.decode(z), frames, rtol=0, atol=1e-5)


def test_wan_takes_the_same_path_under_autocast(wan: WanCodec) -> None:
    x = clip(5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = wan.encode(x)
    assert torch.equal(inside, wan.encode(x))


def test_fingerprints_tell_codecs_apart(wan: WanCodec) -> None:
    other = tiny_vae()
    with torch.no_grad():
        next(other.parameters()).view(-1)[0] += 1
    found = {PatchCodec(2).fingerprint(), PatchCodec(4).fingerprint(), wan.fingerprint()}
    found |= {WanCodec(other).fingerprint(), PatchCodec(4, mean=(0.1, 0, 0)).fingerprint()}
    assert len(found | {PatchCodec(4, std=(0.5, 1, 1)).fingerprint()}) == 6
    assert WanCodec(tiny_vae()).fingerprint() == wan.fingerprint()


@pytest.mark.parametrize("inside", ["", "vae"])
def test_made_from_settings(tmp_path: Path, wan: WanCodec, inside: str) -> None:
    wan.vae.save_pretrained(tmp_path / inside)
    settings = CodecSettings(kind="wan", spatial_ratio=16, channels=6, weights=str(tmp_path))
    assert make_codec(settings).fingerprint() == wan.fingerprint()
    assert isinstance(make_codec(CodecSettings()), PatchCodec)
    colours = {"mean": (0.4, 0.3, 0.1), "std": (0.25, 0.25, 0.25)}
    made = make_codec(CodecSettings(**colours))
    assert made.fingerprint() == PatchCodec(4, **colours).fingerprint()
    with pytest.raises(MemerError, match="channels is 6, the contract says 48"):
        make_codec(CodecSettings(kind="wan", spatial_ratio=16, channels=48, weights=str(tmp_path)))
    with pytest.raises(SourceUnavailableError, match="no such folder"):
        make_codec(CodecSettings(kind="wan", spatial_ratio=16, channels=6, weights=str(tmp_path / "no")))


def test_psnr_of_known_errors() -> None:
    truth = torch.zeros(2, 3, 8, 4, 4)
    psnr = plan_psnr(truth + 0.2, truth)
    assert psnr.shape == (2, 8)
    torch.testing.assert_close(psnr, torch.full((2, 8), 20.0))
    assert plan_psnr(truth, truth).max() == 100
