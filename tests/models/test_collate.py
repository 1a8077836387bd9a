import dataclasses
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from memer.contract import CameraLayout
from memer.errors import MemerError
from models.collate import PackedBatch, PlannerCollator
from models.prompt_encoder import IGNORED, PromptEncoder
from models.qwen_vl import LoadedBase, encode_frames, language_hidden
from tests.models.reference import single_logits
from tests.models.samples import mixed_samples, sample, tiny_contract

TOLERANCE = 2e-5


@pytest.fixture
def plain(base) -> Any:
    """The model as the library loads it, without our changes to the tower."""
    return AutoModelForImageTextToText.from_pretrained(base).eval()


@torch.no_grad()
def packed_logits(
    loaded: LoadedBase, encoder: PromptEncoder, batch: PackedBatch, *, position_ids: Tensor | None = None
) -> Tensor:
    levels = encode_frames(loaded.model, batch.patches, grids=batch.frame_grids, geometry=encoder.geometry)
    hidden = language_hidden(
        loaded.model,
        batch.input_ids,
        position_ids=batch.position_ids if position_ids is None else position_ids,
        features=[level[batch.image_rows] for level in levels],
    )
    return loaded.model.lm_head(hidden).flatten(0, 1)


@torch.no_grad()
def separate_logits(plain: Any, encoder: PromptEncoder, batch: PackedBatch) -> Iterator[tuple[slice, Tensor]]:
    made = {made.sample_id: made for made in mixed_samples()}
    for name, start in zip(batch.sample_ids, batch.cu_seq_lens.tolist(), strict=False):
        encoded = encoder.encode_sample(made[name])
        expected = single_logits(plain, encoder, made[name].question, encoded)
        yield slice(start, start + len(encoded)), expected


@pytest.mark.parametrize("pack_tokens", [0, 250, 8192])
@pytest.mark.parametrize("use_cache", [True, False])
def test_packed_equals_separate(
    loaded, plain, encoder: PromptEncoder, pack_tokens: int, use_cache: bool
) -> None:
    loaded.model.config.text_config.use_cache = use_cache
    batch = PlannerCollator(encoder, pack_tokens=pack_tokens)(mixed_samples())
    assert (len(batch.input_ids) == 1) == (pack_tokens == 8192)
    logits = packed_logits(loaded, encoder, batch)
    for span, expected in separate_logits(plain, encoder, batch):
        torch.testing.assert_close(logits[span], expected, atol=TOLERANCE, rtol=0)


def test_packing_check_sees_contamination(loaded, plain, encoder: PromptEncoder) -> None:
    """Without row 0 the library sees one long sample: the comparison above has to notice."""
    batch = PlannerCollator(encoder)(mixed_samples())
    logits = packed_logits(loaded, encoder, batch, position_ids=batch.position_ids[1:])
    errors = [(logits[span] - own).abs().max() for span, own in separate_logits(plain, encoder, batch)]
    assert errors[0] < TOLERANCE, "the first sample has nothing before it"
    assert max(errors) > 100 * TOLERANCE


def test_features_without_deepstack_are_not_the_pixels(loaded, plain, encoder: PromptEncoder) -> None:
    batch = PlannerCollator(encoder)(mixed_samples()[:1])
    with torch.no_grad():
        levels = encode_frames(
            loaded.model, batch.patches, grids=batch.frame_grids, geometry=encoder.geometry
        )
        assert len(levels) == 4
        hidden = language_hidden(
            loaded.model,
            batch.input_ids,
            position_ids=batch.position_ids,
            features=[levels[0][batch.image_rows]],
        )
        logits = loaded.model.lm_head(hidden)[0]
    ((_, expected),) = separate_logits(plain, encoder, batch)
    assert (logits - expected).abs().max() > 100 * TOLERANCE


def test_every_distinct_frame_is_in_the_batch_once(encoder: PromptEncoder) -> None:
    samples = mixed_samples()
    batch = PlannerCollator(encoder)(samples)
    slots = [key for made in samples for key in made.question.image_keys]
    assert batch.num_image_slots == len(slots)
    assert batch.num_frames == len(set(slots)) < len(slots)
    assert len(batch.patches) == sum(rows * columns for rows, columns in batch.frame_grids)
    picture_tokens = (batch.input_ids == encoder.image_id).sum()
    assert len(batch.image_rows) == picture_tokens
    assert batch.image_rows.max() + 1 == sum(rows * columns // 4 for rows, columns in batch.frame_grids)


def test_one_frame_in_two_sizes_is_an_error(encoder: PromptEncoder) -> None:
    with pytest.raises(MemerError, match=r"frame .*two sizes"):
        PlannerCollator(encoder)([sample(step=60), sample(step=65, height=64)])


@pytest.mark.parametrize("pack_tokens", [0, 250, 8192])
def test_targets_are_the_answers(encoder: PromptEncoder, pack_tokens: int) -> None:
    samples = {made.sample_id: made for made in mixed_samples()}
    batch = PlannerCollator(encoder, pack_tokens=pack_tokens)(list(samples.values()))
    assert sorted(batch.sample_ids) == sorted(samples)
    flat = batch.input_ids.flatten()
    assert torch.equal(flat[batch.target_index + 1], batch.target_ids)
    taken = 0
    for name in batch.sample_ids:
        encoded = encoder.encode_sample(samples[name])
        expected = encoded.labels[encoded.labels != IGNORED].tolist()
        assert batch.target_ids[taken : taken + len(expected)].tolist() == expected
        taken += len(expected)
    assert taken == batch.num_targets
    assert batch.num_tokens == sum(len(encoder.encode_sample(made)) for made in samples.values())


def test_rows_stay_within_the_budget_unless_one_sample_is_longer(encoder: PromptEncoder) -> None:
    samples = [sample(episode=i, recent=1 + i % 4, memory=i % 3) for i in range(20)]
    lengths = {made.sample_id: len(encoder.encode_sample(made)) for made in samples}
    longest = max(lengths.values())
    batch = PlannerCollator(encoder, pack_tokens=2 * longest)(samples)
    assert batch.input_ids.shape[1] <= 2 * longest
    assert len(batch.input_ids) <= 12
    single = PlannerCollator(encoder, pack_tokens=10)(samples)
    assert single.input_ids.shape == (20, longest)


def test_single_row_holds_all_samples_with_their_boundaries(encoder: PromptEncoder) -> None:
    batch = PlannerCollator(encoder, pack_tokens=10, single_row=True)(mixed_samples())
    assert batch.input_ids.shape == (1, batch.num_tokens)
    starts = batch.cu_seq_lens[:-1].long()
    assert (batch.position_ids[0, 0, starts] == 0).all()
    assert (batch.input_ids[0, starts] == encoder.turn_start_id).all()
    assert batch.cu_seq_lens.dtype == torch.int32
    assert batch.max_seq_len == torch.diff(batch.cu_seq_lens).max()


def test_too_long_samples_are_left_out_whole_and_named(encoder: PromptEncoder) -> None:
    long, short = sample(episode=8, recent=4, memory=4), sample(episode=9, recent=1, memory=0)
    limit = len(encoder.encode_sample(long)) - 1
    batch = PlannerCollator(encoder, max_length=limit)([long, short])
    assert batch.dropped_ids == ("episode_000008_t000060",)
    assert batch.sample_ids == ("episode_000009_t000060",)
    alone = PlannerCollator(encoder)([short])
    assert torch.equal(batch.input_ids, alone.input_ids)
    assert torch.equal(batch.target_ids, alone.target_ids)


def test_pictures_alone_can_exceed_the_limit(base, encoder: PromptEncoder) -> None:
    """16 pictures of 60 tokens are 960 before any text; nothing of them is cut off."""
    contract = tiny_contract(
        cameras=CameraLayout(camera_keys=("base",), view_width=320, view_height=180),
        min_pixels=50_176,
        max_pixels=115_200,
    )
    wide = PromptEncoder(encoder.tokenizer, encoder.image_processor, contract)
    full = sample(episode=1, step=99, recent=8, memory=8, height=180, width=320)
    one = sample(episode=2, step=99, recent=1, memory=0, height=180, width=320)
    batch = PlannerCollator(wide, max_length=900)([full, one])
    assert (batch.dropped_ids, batch.sample_ids) == ((full.sample_id,), (one.sample_id,))
    assert (batch.input_ids == wide.image_id).sum() == 60
    assert batch.num_targets > 5


def test_a_batch_with_nothing_to_learn_is_an_error(encoder: PromptEncoder) -> None:
    with pytest.raises(MemerError, match=r"episode_000000_t000060 has \d+"):
        PlannerCollator(encoder, max_length=20)([sample()])


def test_batch_travels_between_processes_and_devices(encoder: PromptEncoder) -> None:
    batch = PlannerCollator(encoder)(mixed_samples())
    back = pickle.loads(pickle.dumps(batch))
    elsewhere = batch.to("meta")
    for field in dataclasses.fields(PackedBatch):
        ours, theirs = getattr(batch, field.name), getattr(back, field.name)
        if isinstance(ours, Tensor):
            assert torch.equal(ours, theirs)
            assert getattr(elsewhere, field.name).is_meta
        else:
            assert ours == theirs == getattr(elsewhere, field.name)
