import math
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanTransformerBlock

from memer.errors import MemerError, UsageError
from models.mot import ExpertBlock, ExpertSize, MixtureOfTransformers, MoTLayer
from models.wap import WapModel, full_settings, tiny_settings
from models.wap_weights import (
    interpolate_experts,
    load_stock_video,
    meta_counts,
    resize,
    save_stock_video,
    stock_config,
    stock_video_state,
)
from tests.models.wap_samples import random_batch, small_model, small_settings


def size(**changes: int) -> ExpertSize:
    return ExpertSize(**{"hidden": 24, "ffn": 48, "num_layers": 2, "num_heads": 2, "head_dim": 12, **changes})


def test_full_sizes_have_the_published_numbers_of_parameters() -> None:
    counts = meta_counts(full_settings(action_dim=14, state_dim=14))
    assert counts == {
        "video": 4_999_787_712,
        "action": 1_020_900_366,
        "progress": 207_150_849,
        "conditions": 61_440 + 8_192,
    }
    assert sum(counts.values()) == 6_227_908_559


def test_tiny_sizes_have_the_specified_numbers_of_parameters() -> None:
    counts = meta_counts(tiny_settings(action_dim=14))
    assert (counts["video"], counts["action"], counts["progress"]) == (2_694_336, 984_878, 402_865)


@pytest.mark.parametrize("field", ["num_heads", "head_dim", "num_layers"])
def test_experts_that_cannot_share_an_attention_are_refused(field: str) -> None:
    experts = {"video": size(), "action": size(**{field: 18})}
    with pytest.raises(UsageError, match=rf"agree in {field}.*action 18"):
        MixtureOfTransformers(experts)
    if field != "num_layers":
        with pytest.raises(UsageError, match=field):
            MoTLayer(experts)


def test_a_block_has_the_stock_names_and_shapes() -> None:
    stock = WanTransformerBlock(24, 48, 2, cross_attn_norm=True)
    ours, theirs = ExpertBlock(size()).state_dict(), stock.state_dict()
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}


def test_the_video_expert_alone_is_the_stock_transformer() -> None:
    """Present frame alone, at time 0, with one text: the values that the stock blocks compute."""
    model = small_model(visual_plan="none", progress_condition=False)
    s = model.settings
    stock = WanTransformer3DModel(**stock_config(s)).eval()
    stock.load_state_dict(stock_video_state(model))
    batch = random_batch(s)
    context = torch.cat([batch.text_plan, model.state_in(batch.state).unsqueeze(1)], dim=1)
    values: list[torch.Tensor] = []
    for block in stock.blocks:
        block.attn1.to_v.register_forward_hook(lambda _m, _i, output: values.append(output))
    with torch.no_grad():
        stock(batch.z_clip[:, :, :1], torch.zeros(2), context)
        obs = model.prefill_obs(
            model.prefill_plan(None, batch.text_plan),
            batch.z_clip[:, :, :1],
            batch.text_plan,
            batch.state,
            None,
        )
    for (_, value), theirs in zip(obs.keys, values, strict=True):
        torch.testing.assert_close(value.flatten(2), theirs, atol=1e-6, rtol=1e-6)


def test_weights_move_to_diffusers_and_back(tmp_path: Path) -> None:
    model, other = small_model(seed=0), small_model(seed=1)
    save_stock_video(model, tmp_path)
    stock = WanTransformer3DModel.from_pretrained(tmp_path)
    assert {name for name, _ in stock.named_parameters()} == set(stock_video_state(model))
    load_stock_video(other, stock.state_dict())
    for name, tensor in stock_video_state(model).items():
        assert torch.equal(tensor, stock_video_state(other)[name]), name
    assert not torch.equal(model.action.proj_in.weight, other.action.proj_in.weight)


def test_foreign_weights_are_refused_whole() -> None:
    model = small_model()
    before = {name: tensor.clone() for name, tensor in stock_video_state(model).items()}
    state = {name: tensor + 1 for name, tensor in before.items()}
    with pytest.raises(MemerError, match=r"lack proj_out\.weight"):
        load_stock_video(model, {k: v for k, v in state.items() if k != "proj_out.weight"})
    with pytest.raises(MemerError, match=r"hold blocks\.2\.x"):
        load_stock_video(model, {**state, "blocks.2.x": torch.zeros(1)})
    with pytest.raises(MemerError, match=r"proj_out.weight has shape \(1,\)"):
        load_stock_video(model, {**state, "proj_out.weight": torch.zeros(1)})
    assert all(torch.equal(before[name], tensor) for name, tensor in stock_video_state(model).items())


def test_narrow_experts_are_the_video_expert_resized() -> None:
    model = small_model()
    inputs = model.action.proj_in.weight.clone()
    interpolate_experts(model)
    assert torch.equal(model.action.proj_in.weight, inputs)
    video, action = (model.mot.layers[1].experts[name] for name in ("video", "action"))
    # q: 24 -> 24 from inputs of 24 to inputs of 16; first and last columns stay, scaled
    scale = math.sqrt(24 / 16)
    given, made = video.attn1.to_q.weight, action.attn1.to_q.weight
    torch.testing.assert_close(made[:, 0], given[:, 0] * scale)
    torch.testing.assert_close(made[:, -1], given[:, -1] * scale)
    # column 1 of 16 lies at 1 * 23 / 15 of the video's columns
    at = 23 / 15
    expected = given[:, 1] * (2 - at) + given[:, 2] * (at - 1)
    torch.testing.assert_close(made[:, 1], expected * scale)
    # the norm over all heads keeps its size: equal, and not scaled
    assert torch.equal(action.attn1.norm_q.weight, video.attn1.norm_q.weight)
    # an output layer shrinks in its first axis alone: no scale
    torch.testing.assert_close(action.attn1.to_out[0].weight[0], video.attn1.to_out[0].weight[0])
    embedder = model.progress.condition_embedder.time_proj.weight
    torch.testing.assert_close(
        embedder[0, 0], model.video.condition_embedder.time_proj.weight[0, 0] * math.sqrt(24 / 8)
    )


def test_resizing_agrees_with_the_library_in_two_axes() -> None:
    source = torch.randn(7, 9)
    expected = torch.nn.functional.interpolate(
        source[None, None], size=(3, 4), mode="bilinear", align_corners=True
    )[0, 0]
    torch.testing.assert_close(resize(source, (3, 4)), expected * math.sqrt(9 / 4))


def test_checkpointing_changes_no_gradient() -> None:
    settings = small_settings()
    batch = random_batch(settings)
    gradients = []
    for checkpointing in (False, True):
        model = WapModel(settings, checkpointing=checkpointing)
        model.load_state_dict(small_model(settings).state_dict())
        loss, _ = model.loss(batch, generator=torch.Generator().manual_seed(0))
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_a_layer_is_entered_through_forward_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP and ZeRO-3 gather a layer's weights in its forward: outside of it they must not be touched."""
    model = small_model()
    batch = random_batch(model.settings)
    inside: list[bool] = []
    for layer in model.mot.layers:
        layer.register_forward_pre_hook(lambda *_: inside.append(True))
        layer.register_forward_hook(lambda *_: inside.clear())
        for module in layer.modules():
            if module is not layer:
                module.register_forward_pre_hook(_assert_inside(inside))
    model.loss(batch, generator=torch.Generator().manual_seed(0))
    inputs = (batch.text_plan, batch.state, batch.progress)
    plan = model.prefill_plan(batch.z_plan, batch.text_plan)
    obs = model.prefill_obs(plan, batch.z_clip[:, :, :1], *inputs)
    model.sample(plan, obs, *inputs, steps=2)


def _assert_inside(inside: list[bool]):
    def check(*_: object) -> None:
        assert inside

    return check
