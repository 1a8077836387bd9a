"""The functional transformer against the stock one, checkpoints, positions."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file

from memer.errors import UsageError
from models.cwm import CausalWorldModel
from models.wan import (
    CausalWan,
    RopeTables,
    full_config,
    rope_1d,
    rope_rows,
    rotate,
    time_embedding,
    tiny_config,
)
from models.wan_files import load_transformer


def small_config() -> dict:
    return {**tiny_config(channels=8), "num_layers": 2, "ffn_dim": 96, "num_attention_heads": 3}


@pytest.fixture
def model() -> CausalWan:
    torch.manual_seed(0)
    return CausalWan(**small_config()).eval()


def inputs(frames: int = 5, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(1)
    latents = torch.randn(batch, 8, frames, 4, 6, generator=noise)
    t = torch.rand(batch, frames, generator=noise) * 1000
    return latents, t, torch.randn(batch, 8, 32, generator=noise)


@torch.no_grad()
def functional(model: CausalWan, latents: torch.Tensor, t: torch.Tensor, text: torch.Tensor, **kwargs):
    groups = [(slice(None), model.embed_text(text))]
    return model.predict(latents, t, text_groups=groups, positions=torch.arange(latents.shape[2]), **kwargs)[
        0
    ]


@pytest.mark.parametrize("full_mask", [False, True])
def test_equals_the_stock_forward(model: CausalWan, full_mask: bool) -> None:
    """One time per latent frame is the stock model's one per token, embedded once per frame."""
    latents, t, text = inputs()
    with torch.no_grad():
        stock = model(latents, t.repeat_interleave(6, dim=1), text).sample
    mask = torch.ones(30, 30, dtype=torch.bool) if full_mask else None
    assert torch.equal(functional(model, latents, t, text, mask=mask), stock)


def test_equals_the_stock_forward_with_one_time_per_clip(model: CausalWan) -> None:
    latents, t, text = inputs()
    with torch.no_grad():
        stock = model(latents, t[:, 0], text).sample
    assert torch.equal(functional(model, latents, t[:, :1], text), stock)


def test_equals_the_stock_forward_in_bfloat16(model: CausalWan, tmp_path: Path) -> None:
    """As loaded for inference: the fp32 modules stay fp32."""
    model.save_stock(tmp_path)
    loaded = CausalWan.from_pretrained(tmp_path, torch_dtype=torch.bfloat16).eval()
    assert loaded.blocks[0].scale_shift_table.dtype == torch.float32
    latents, t, text = inputs()
    latents, text = latents.bfloat16(), text.bfloat16()
    with torch.no_grad():
        stock = loaded(latents, t.repeat_interleave(6, dim=1), text).sample
    assert torch.equal(functional(loaded, latents, t, text), stock)


def test_gradients_equal_the_stock_ones(model: CausalWan) -> None:
    latents, t, text = inputs()
    stock = torch.autograd.grad(
        model(latents, t.repeat_interleave(6, dim=1), text).sample.square().mean(), list(model.parameters())
    )
    groups = [(slice(None), model.embed_text(text))]
    for checkpointing in (False, True):
        model.gradient_checkpointing = checkpointing
        ours, _ = model.predict(latents, t, text_groups=groups, positions=torch.arange(5))
        grads = torch.autograd.grad(ours.square().mean(), list(model.parameters()), retain_graph=True)
        for ours_grad, stock_grad in zip(grads, stock, strict=True):
            torch.testing.assert_close(ours_grad, stock_grad, rtol=1e-4, atol=1e-7)


def test_texts_by_group(model: CausalWan) -> None:
    """Runs with their own text in one group equal one group per run; the order of the tokens is kept."""
    latents, t, text = inputs()
    other = model.embed_text(torch.flip(text, dims=[0]))
    text = model.embed_text(text)
    with torch.no_grad():
        apart = [(slice(0, 6), text), (slice(6, 18), text), (slice(18, 30), other)]
        joined = [(slice(0, 6), text), (slice(6, 30), torch.stack((text, other), dim=1))]
        a, b, c = (
            model.predict(latents, t, text_groups=g, positions=torch.arange(5))[0]
            for g in (apart, joined, [(slice(None), text)])
        )
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert not torch.allclose(a, c, atol=1e-3)


@pytest.mark.parametrize("tokens", [[slice(0, 6)], [slice(0, 6), slice(7, 30)]])
def test_texts_must_cover_all_tokens(model: CausalWan, tokens: list[slice]) -> None:
    latents, t, text = inputs()
    groups = [(part, model.embed_text(text)) for part in tokens]
    with pytest.raises(ValueError, match="text groups"):
        model.predict(latents, t, text_groups=groups, positions=torch.arange(5))


def test_stock_checkpoints_round_trip(tmp_path: Path) -> None:
    torch.manual_seed(2)
    stock = WanTransformer3DModel(**small_config())
    stock.save_pretrained(tmp_path / "stock")
    ours = CausalWan.from_pretrained(tmp_path / "stock")
    ours.save_stock(tmp_path / "ours")
    back = WanTransformer3DModel.from_pretrained(tmp_path / "ours")
    for name, value in stock.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
        assert torch.equal(back.state_dict()[name], value)
    files = [tmp_path / side / "diffusion_pytorch_model.safetensors" for side in ("stock", "ours")]
    assert load_file(files[0]).keys() == load_file(files[1]).keys()
    configs = [json.loads((tmp_path / side / "config.json").read_text()) for side in ("stock", "ours")]
    for config in configs:
        config.pop("_name_or_path", None)
    assert configs[0] == configs[1]


def test_a_stock_checkpoint_gives_the_stock_forward_under_a_full_mask(tmp_path: Path) -> None:
    """Saved by the library and loaded by ours: the same bits as the model that was saved."""
    torch.manual_seed(2)
    stock = WanTransformer3DModel(**small_config()).eval()
    stock.save_pretrained(tmp_path)
    latents, t, text = inputs()
    with torch.no_grad():
        expected = stock(latents, t.repeat_interleave(6, dim=1), text).sample
    ours = CausalWorldModel(load_transformer(tmp_path)).transformer
    mask = torch.ones(30, 30, dtype=torch.bool)
    assert torch.equal(functional(ours, latents, t, text, mask=mask), expected)


@pytest.mark.parametrize("field", [{"added_kv_proj_dim": 96}, {"image_dim": 16}])
def test_image_to_video_models_are_refused(field: dict) -> None:
    with pytest.raises(UsageError, match=next(iter(field))):
        CausalWan(**small_config(), **field)


def test_parameter_counts() -> None:
    with torch.device("meta"):
        full, tiny = CausalWan(**full_config()), CausalWan(**tiny_config())
    assert sum(p.numel() for p in full.parameters()) == 4_999_787_712
    assert sum(p.numel() for p in tiny.parameters()) == 2_694_336
    assert (full.token_size, full.hidden) == (192, 3072)
    assert (tiny.token_size, tiny.hidden) == (768, 192)


def test_rope_rows_are_the_stock_rows_at_their_positions(model: CausalWan) -> None:
    latents, _, _ = inputs(frames=9)
    cos, sin = model.rope(latents)
    ours_cos, ours_sin = rope_rows(model.rope_tables, torch.tensor([7, 2]), 2, 3)
    for row, position in enumerate((7, 2)):
        tokens, stock = slice(row * 6, row * 6 + 6), slice(position * 6, position * 6 + 6)
        assert torch.equal(ours_cos[:, tokens], cos[:, stock, :, 0::2])
        assert torch.equal(ours_sin[:, tokens], sin[:, stock, :, 1::2])


def test_rope_rows_beyond_the_stock_table() -> None:
    """The stock module raises from 1025 frames on; rows that both have are the same."""
    tables = RopeTables(32)
    far, _ = rope_rows(tables, torch.tensor([3, 1700]), 2, 2)
    near, _ = rope_rows(tables, torch.tensor([3, 1023]), 2, 2)
    assert torch.equal(far[:, :4], near[:, :4])
    expected = torch.cos(torch.tensor(1700.0, dtype=torch.float64) / 10_000 ** (2 / 12)).float()
    assert far[0, 4, 0, 1] == expected


def test_positions_of_their_own_per_sample() -> None:
    tables = RopeTables(32)
    both, _ = rope_rows(tables, torch.tensor([[0, 1], [0, 5]]), 2, 2)
    assert torch.equal(both[1:], rope_rows(tables, torch.tensor([0, 5]), 2, 2)[0])
    with pytest.raises(ValueError, match="count from 0"):
        rope_rows(tables, torch.tensor([-1]), 2, 2)


def test_rope_on_a_line_uses_all_channels() -> None:
    cos, sin = rope_1d(RopeTables(32), torch.arange(4))
    assert cos.shape == sin.shape == (1, 4, 1, 16)
    frequencies = 10_000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    assert torch.equal(sin[0, 3, 0], torch.sin(3 * frequencies).float())


def test_products_of_rotated_vectors_depend_on_the_distance() -> None:
    x = torch.randn(1, 1, 1, 32, generator=torch.Generator().manual_seed(3))
    y = torch.randn(1, 1, 1, 32, generator=torch.Generator().manual_seed(4))

    def product(a: int, b: int) -> torch.Tensor:
        at = [rope_1d(RopeTables(32), torch.tensor([p])) for p in (a, b)]
        return (rotate(x, at[0]) * rotate(y, at[1])).sum()

    torch.testing.assert_close(product(2, 5), product(12, 15), rtol=0, atol=1e-5)
    assert abs(product(2, 5) - product(2, 9)) > 1e-2


def test_times_keep_their_digits_under_autocast(model: CausalWan) -> None:
    t = torch.tensor([[871.25, 872.0]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = time_embedding(model.condition_embedder, t)
    for found, expected in zip(inside, time_embedding(model.condition_embedder, t), strict=True):
        assert torch.equal(found, expected)
