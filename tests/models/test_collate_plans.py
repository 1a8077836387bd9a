"""Batches of visual planner and executor: padding, units, features, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from memer.canvas import to_signed
from memer.errors import MemerError
from models.codec import PatchCodec
from models.collate_plans import ExecutorCollator, VisualPlannerCollator, normalizers
from tests.models.plan_samples import chunk, chunks, contract, memory


def test_episodes_of_different_length_are_padded_with_their_last_frame() -> None:
    short, long = memory(0, segments=1), memory(1, segments=3)
    plan = contract().plan
    assert plan is not None
    batch = VisualPlannerCollator(plan)([short, long])
    assert batch.frames is not None
    assert batch.frames.shape == (2, 25, 8, 8, 3)
    assert batch.frames.dtype == torch.uint8
    assert batch.num_segments.tolist() == [1, 3]
    assert torch.equal(batch.frames[0, :9], torch.from_numpy(short.frames))
    assert (batch.frames[0, 9:] == batch.frames[0, 8]).all()
    assert batch.texts[0] == (short.texts[0], "", "")
    assert batch.num_frames == 9 + 25
    # 4 tokens per latent frame; G_0 and one target, then G_0..G_2 and three targets.
    assert batch.num_tokens == 4 * (1 + 2 + 1 + 4 + 6)
    assert len(batch) == 2


def test_latents_are_padded_as_frames_are() -> None:
    plan = contract().plan
    assert plan is not None
    codec = PatchCodec(2)

    def encoded(sample):
        clip = to_signed(sample.frames).transpose(0, 1).unsqueeze(0)
        empty = np.zeros((0, 8, 8, 3), np.uint8)
        texts = np.ones((len(sample.texts), 8, 32), np.float32)
        return replace(
            sample,
            frames=empty,
            latents=codec.encode(clip)[0].numpy(),
            text_features=texts,
            instruction_features=texts[0],
        )

    batch = VisualPlannerCollator(plan)([encoded(memory(0, segments=1)), encoded(memory(1, segments=2))])
    assert batch.frames is None
    assert batch.latents is not None
    assert batch.latents.shape == (2, 48, 5, 4, 4)
    assert torch.equal(batch.latents[0, :, 3], batch.latents[0, :, 2])
    assert batch.text_features is not None
    assert batch.text_features.shape == (2, 2, 8, 32)
    assert (batch.text_features[0, 1] == 0).all()


def test_frames_that_do_not_fit_their_segments_are_refused() -> None:
    plan = contract().plan
    assert plan is not None
    wrong = replace(memory(3, segments=2), texts=("one",))
    with pytest.raises(MemerError, match=r"made/episode_000003: 17 frames for 1 segments"):
        VisualPlannerCollator(plan)([wrong])
    with pytest.raises(MemerError, match="no segment"):
        VisualPlannerCollator(plan)([replace(wrong, texts=())])


def test_actions_and_states_come_normalised() -> None:
    made = contract()
    samples = chunks(3)
    batch = ExecutorCollator(made)(samples)
    states, actions = normalizers(made)
    expected = (samples[1].actions[0, 0] - 0.5) / 2.0
    assert batch.actions[1, 0, 0] == pytest.approx(expected)
    # The second channel hardly moves in the statistics: its scale is floored, its values are bounded.
    assert batch.actions[..., 1].abs().max() <= made.plan.action_clamp
    assert torch.equal(batch.state[2], torch.from_numpy(states.normalize(samples[2].state)))
    assert batch.finished.tolist() == [1.0, 0.0, 0.0]
    assert batch.num_tokens == 3 * (4 * (3 + 1 + 2) + 2 * 8)
    back = actions.denormalize(batch.actions)[..., 0]
    assert torch.allclose(back[0], torch.from_numpy(samples[0].actions[:, 0]), atol=1e-5)


def test_progress_may_be_supervised_where_actions_are_not() -> None:
    everywhere = replace(chunk(3), progress_valid=np.ones(8, dtype=bool))
    batch = ExecutorCollator(contract())([everywhere, replace(chunk(3), progress_valid=None)])
    assert batch.progress_valid[0].all()
    assert torch.equal(batch.progress_valid[1], batch.action_valid[1])
    assert not batch.action_valid.all()


def test_no_plan_frames_are_no_plan() -> None:
    batch = ExecutorCollator(contract(visual_plan="none"))(chunks(2, plan_frames=0))
    assert batch.plan_frames is None
    assert batch.clip_frames is not None


def test_statistics_and_plan_settings_must_be_there() -> None:
    with pytest.raises(MemerError, match="'state' is missing"):
        ExecutorCollator(replace(contract(), statistics={}))
    with pytest.raises(MemerError, match=r"contract\.plan: missing"):
        ExecutorCollator(replace(contract(), plan=None))


def test_samples_with_and_without_features_do_not_mix() -> None:
    latents = np.zeros((48, 3, 4, 4), np.float32)
    encoded = replace(chunk(1), clip_latents=latents, clip_frames=np.zeros((0, 8, 8, 3), np.uint8))
    with pytest.raises(MemerError, match="some samples have features"):
        ExecutorCollator(contract())([chunk(0), encoded])


def test_a_batch_moves_as_a_whole() -> None:
    batch = ExecutorCollator(contract())(chunks(2)).to("meta")
    assert batch.actions.device.type == batch.state.device.type == "meta"
    assert batch.sample_ids[0] == "made/episode_000000_t000000"
