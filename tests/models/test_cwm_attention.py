"""FlexAttention in the world model's training pass: same mask, same outputs, refused on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from memer.errors import UsageError
from memer.folders import read_json
from models.cwm_files import WORLD_MODEL_FILE
from models.cwm_layout import Layout, _shared_mask, all_targets_layout, one_target_layout
from models.flex import attend_flex
from models.masks import TILE
from models.wan_layer import attend
from tests.models.plan_samples import fit, memories, world_module
from tests.models.small_cwm import C, H, N, W, batch, make_model, seeded, watched

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

CPU = torch.device("cpu")

LAYOUTS = {
    "all": all_targets_layout(3, 2),
    "all of one": all_targets_layout(1, 1),
    "one each": one_target_layout(torch.tensor([0, 2, 1]), 2),
}


def densified(mask: BlockMask) -> Tensor:
    """bool[B, S, S] as the kernel reads it: full tiles whole, partial ones by the rule, all others not."""
    batch, _, size, _ = mask.shape
    b, q, k = torch.arange(batch)[:, None, None], torch.arange(size)[:, None], torch.arange(size)
    asked = mask.mask_mod(
        b.expand(batch, size, size), torch.tensor(0), q.expand(size, size), k.expand(size, size)
    )
    dense = torch.zeros(batch, size, size, dtype=torch.bool)
    for counts, columns, full in (
        (mask.kv_num_blocks, mask.kv_indices, False),
        (mask.full_kv_num_blocks, mask.full_kv_indices, True),
    ):
        for row, line in ((r, n) for r in range(batch) for n in range(size // TILE)):
            for column in columns[row, 0, line, : counts[row, 0, line]].tolist():
                tile = (row, slice(line * TILE, (line + 1) * TILE), slice(column * TILE, (column + 1) * TILE))
                dense[tile] = True if full else asked.expand_as(dense)[tile]
    return dense


@pytest.mark.parametrize("tokens_per_frame", [N, 50, 128])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_block_mask_is_the_dense_mask(layout: Layout, tokens_per_frame: int) -> None:
    expected = layout.mask(tokens_per_frame, CPU)
    mask = layout.mask(tokens_per_frame, CPU, attention="flex")
    count, found = expected.shape[-1], densified(mask)
    assert mask.shape[-1] == count + -count % TILE
    assert torch.equal(found[:, :count, :count], expected.expand_as(found[:, :count, :count]))
    assert found[:, count:, count:].all()  # padding sees itself
    assert not found[:, :count, count:].any()
    assert not found[:, count:, :count].any()


def test_tiles_that_nobody_sees_are_skipped() -> None:
    mask = all_targets_layout(8, 2).mask(TILE, CPU, attention="flex")
    dense = all_targets_layout(8, 2).mask(1, CPU)  # one frame is one tile
    assert int(mask.kv_num_blocks.sum()) == 0
    assert int(mask.full_kv_num_blocks.sum()) == int(dense.sum()) < dense.numel() / 2


def test_the_block_mask_is_built_once_and_training_may_keep_it() -> None:
    layout = all_targets_layout(3, 2)
    _shared_mask.cache_clear()
    with torch.inference_mode():  # as validation does
        mask = layout.mask(N, CPU, attention="flex")
        dense = layout.mask(N, CPU)
    assert layout.mask(N, CPU, attention="flex") is mask
    kept = [dense, *mask.as_tuple(), *(cell.cell_contents for cell in mask.mask_mod.__closure__)]
    assert not any(x.is_inference() for x in kept if isinstance(x, Tensor))


# -- outputs -----------------------------------------------------------------------------------------------


@torch.no_grad()
def both(b: dict[str, Tensor], **kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens after the last block and the loss, by SDPA and by FlexAttention."""
    found = []
    for attention in ("sdpa", "flex"):
        model = watched(attention=attention, **kwargs)
        loss, figures = model.loss(**b, generator=seeded())
        found.append([model.transformer.passes[-1][1][0], loss, figures["clean_mse"]])
    return found[0], found[1]


@pytest.mark.parametrize("targets", ["all_targets", "one_target"])
@pytest.mark.parametrize("lengths", [[3, 3], [1, 3], [2, 1]])
def test_flex_gives_what_sdpa_gives(targets: str, lengths: list[int]) -> None:
    """Also for episodes of different length in one batch."""
    b = {**batch(), "num_segments": torch.tensor(lengths)}
    sdpa, flex = both(b, targets=targets)
    for expected, found in zip(sdpa, flex, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_flex_over_several_tiles() -> None:
    """16 tokens per latent frame, 11 frames: 176 of 256 tokens."""
    b = batch()
    b["latents"] = torch.randn(2, C, 7, 2 * H, 2 * W, generator=seeded())
    sdpa, flex = both(b)
    assert sdpa[0].shape[1] == 176
    for expected, found in zip(sdpa, flex, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_flex_computes_in_the_type_of_autocast() -> None:
    """Norms leave float32 beside the projections' bfloat16; autocast casts them for SDPA, not for this."""
    layout = all_targets_layout(3, 2)
    q, k, v = (torch.randn(2, 11 * N, 3, 32, generator=seeded(s)) for s in range(3))
    mask = layout.mask(N, CPU, attention="flex")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = attend(q, k, v.bfloat16(), layout.mask(N, CPU))
        assert attend_flex(q, k, v.bfloat16(), mask).dtype == torch.bfloat16
        found = attend(q, k, v.bfloat16(), mask)
        assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: FlexAttention has no backward pass on the CPU"
)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("targets", ["all_targets", "one_target"])
def test_gradients_are_those_of_sdpa(targets: str, checkpointing: bool) -> None:
    b = {name: value.cuda() for name, value in {**batch(), "num_segments": torch.tensor([1, 3])}.items()}
    grads = []
    for attention in ("sdpa", "flex"):
        model = make_model(attention=attention, targets=targets).cuda()
        if checkpointing:
            model.transformer.enable_gradient_checkpointing()
        with torch.inference_mode():  # validation comes first
            model.loss(**b, generator=seeded())
        loss, _ = model.loss(**b, generator=seeded())
        loss.backward()
        grads.append([loss.detach(), *(p.grad for p in model.parameters())])
    for expected, found in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


# -- settings ----------------------------------------------------------------------------------------------


def test_flex_training_on_the_cpu_is_refused_before_anything_is_built() -> None:
    module = world_module(attention="flex")
    with pytest.raises(
        UsageError, match=r"no backward pass on cpu; .*model\.module\.attention=sdpa"
    ) as error:
        fit(module, memories())
    assert "\n" not in str(error.value)
    assert module.model is None
    model = make_model(attention="flex")
    with pytest.raises(NotImplementedError, match="backward on CPU"):  # else the refusal is out of date
        model.loss(**batch(), generator=seeded())


def test_other_names_and_places_are_refused() -> None:
    with pytest.raises(UsageError, match="attention='flash', must be sdpa or flex"):
        world_module(attention="flash").configure_model()
    with pytest.raises(UsageError, match=r"method\.attention: unknown"):
        world_module(method={"attention": "flex"})


def test_weights_move_freely_between_both(tmp_path: Path) -> None:
    made = {name: world_module(attention=name) for name in ("sdpa", "flex")}
    for name, module in made.items():
        module.configure_model()
        assert module.model.attention == name
        module.save_model(tmp_path / name, module.state_dict())
        module.check_saved(tmp_path / name, module.state_dict())
    for name, other in (("sdpa", "flex"), ("flex", "sdpa")):
        checkpoint: dict[str, Any] = {
            "state_dict": made[name].state_dict(),
            "hyper_parameters": dict(made[name].hparams),
        }
        made[name].on_save_checkpoint(checkpoint)
        made[other].on_load_checkpoint(checkpoint)
        assert "attention" not in str(read_json(tmp_path / name / WORLD_MODEL_FILE))
