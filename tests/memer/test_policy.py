import io

import numpy as np
import pytest
import torch
from PIL import Image

from memer.cameras import prepare_frame, stacked_frames
from memer.contract import CameraLayout
from memer.errors import MemerError, UsageError
from memer.keyframes import KeyframeRules
from memer.observations import resample
from memer.policy import Policy
from memer.rollout import rollout_offline
from tests.memer.planner_doubles import PicturePlanner, painted_episode, small_contract, without_timing

RULES = KeyframeRules.all_last()
#: Fields that a step record and a row of predictions.jsonl share.
SHARED = (
    "timestep",
    "instruction",
    "predicted_subtask",
    "current_subtask",
    "parse_ok",
    "parse_error",
    "predicted_keyframe_positions",
    "mapped_keyframe_indices",
    "invalid_keyframe_positions",
    "context_indices",
    "memory_indices_before",
    "memory_indices_after",
    "all_candidate_indices",
    "num_votes",
    "raw_text",
    "stale",
    "stale_steps",
)


def raw_views(episode):
    streams = {key: list(frames.frames()) for key, frames in episode.cameras.items()}
    return [{key: views[t] for key, views in streams.items()} for t in range(episode.num_frames)]


@pytest.mark.parametrize("form", ["none", "short", "long", "text", "image", "image_text"])
def test_stepping_through_an_episode_equals_the_rollout_row_by_row(form):
    contract, episode = small_contract(memory_form=form), painted_episode(3, 50)
    (rollout,) = rollout_offline(
        [episode], PicturePlanner(parse_failures=True), contract, RULES, full_trace=True
    )
    policy = Policy(PicturePlanner(parse_failures=True), contract)
    for t, views in enumerate(raw_views(episode)):
        record = policy.step(views, instruction=episode.instruction_at(t)).to_dict()
        assert {key: record[key] for key in SHARED} == {key: rollout.rows[t][key] for key in SHARED}
    assert any(row["memory_indices_before"] for row in rollout.rows) == ("image" in form)
    assert any(not row["parse_ok"] for row in rollout.rows)
    assert policy.session.memory.representatives() == rollout.representatives


def test_frames_without_inference_enter_the_store():
    contract, episode = small_contract(), painted_episode(1, 60)
    (rollout,) = rollout_offline([episode], PicturePlanner(), contract, RULES, eval_stride=4)
    policy = Policy(PicturePlanner(), contract)
    for t, views in enumerate(raw_views(episode)):
        policy.session.instruction = episode.instruction_at(t)
        policy.observe(views)
        if t % 4 == 0:
            record = policy.infer().to_dict()
            row = rollout.rows[t // 4]
            assert {key: record[key] for key in SHARED if key in row} == {
                key: row[key] for key in SHARED if key in row
            }


@pytest.mark.parametrize("stop", [0, 1, 17])
def test_an_episode_after_a_stopped_one_equals_the_episode_alone(stop):
    """C16."""
    contract = small_contract(memory_form="image_text")
    a, b = (raw_views(painted_episode(index, 40)) for index in (0, 1))

    def play_b(policy: Policy) -> list[dict[str, object]]:
        policy.reset(instruction="task B", seed=5)
        return [without_timing(policy.step(views).to_dict()) for views in b]

    used = Policy(PicturePlanner(parse_failures=True), contract, "task A", memory_source="shuffled")
    for views in a[:stop]:
        used.step(views)
    fresh = Policy(PicturePlanner(parse_failures=True), contract, memory_source="shuffled")
    assert play_b(used) == play_b(fresh)
    shown = used.planner.questions["policy"]
    pictures = {prepare_frame(views, contract.cameras).tobytes() for views in b}
    assert {f.tobytes() for request in shown for f in request.question.frames.values()} <= pictures


def test_predict_from_history_infers_at_every_observation():
    contract, views = small_contract(), raw_views(painted_episode(0, 20))
    policy = Policy(PicturePlanner(), contract, "do it")
    records = policy.predict_from_history(views)
    assert [record.timestep for record in records] == list(range(20))
    assert policy.predict_from_history(views) == records
    assert [r.timestep for r in policy.predict_from_history(views[:2], reset=False)] == [20, 21]


def test_state_moves_to_another_process():
    contract, views = small_contract(), raw_views(painted_episode(0, 40))
    whole = Policy(PicturePlanner(), contract, "do it")
    expected = [whole.step(v).to_dict() for v in views]
    first = Policy(PicturePlanner(), contract, "do it")
    rows = [first.step(v).to_dict() for v in views[:15]]
    second = Policy(PicturePlanner(), contract)
    second.load_state_dict(first.state_dict())
    assert rows + [second.step(v).to_dict() for v in views[15:]] == expected


def test_every_form_of_an_observation_gives_the_same_frame():
    layout = CameraLayout(camera_keys=("top",), view_width=8, view_height=6)
    contract = small_contract(cameras=layout)
    array = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, format="PNG")
    forms = [
        array,
        {"top": array, "unused": array[:2]},
        array[:, :, ::-1][:, :, ::-1],
        Image.fromarray(array),
        torch.from_numpy(array),
        array.astype(np.float32) / 255,
        buffer.getvalue(),
        {"bytes": buffer.getvalue()},
        {"top": {"bytes": buffer.getvalue()}},
        np.concatenate([array, array[..., :1]], axis=2),
    ]
    expected = prepare_frame({"top": array}, layout)
    for form in forms:
        policy = Policy(PicturePlanner(), contract, "do it")
        policy.observe(form)
        assert np.array_equal(policy.session.frame(0), expected)


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        ({"top": np.zeros((4, 4, 3), np.uint8)}, "camera side is missing; available: top"),
        (np.zeros((4, 4, 3), np.uint8), "the layout stacks top, side"),
        ({"top": b"no picture", "side": b""}, "camera top.*cannot be decoded"),
        ({"top": np.full((4, 4, 3), 7.0), "side": np.zeros((4, 4, 3))}, "camera top.*0..1"),
        ({"top": "frame.png", "side": "frame.png"}, "str, must be an array"),
    ],
)
def test_an_observation_that_does_not_fit_is_named(observation, message):
    policy = Policy(PicturePlanner(), small_contract(), "do it")
    with pytest.raises(MemerError, match=message):
        policy.observe(observation)


def test_ground_truth_memory_needs_labels():
    with pytest.raises(UsageError, match="eval=offline"):
        Policy(PicturePlanner(), small_contract(), memory_source="gt")


def test_planner_hears_of_start_and_end():
    events = []

    class Listening(PicturePlanner):
        def start_episode(self, session, *, instruction, seed=None):
            events.append(("start", session, instruction, seed))

        def end_episode(self, session):
            events.append(("end", session))

    policy = Policy(Listening(), small_contract(), "one", seed=1, name="robot")
    views = raw_views(painted_episode(0, 3))
    policy.reset()
    policy.step(views[0])
    policy.step(views[1])
    policy.reset("two", seed=2)
    policy.step(views[2])
    assert events == [("start", "robot", "one", 1), ("end", "robot"), ("start", "robot", "two", 2)]


def test_resample_puts_a_30_hz_camera_on_a_10_hz_clock():
    times = [(k / 30, k) for k in range(10)]
    assert list(resample(times, fps=10.0)) == [(0, 0), (1, 3), (2, 6), (3, 9)]
    with pytest.raises(MemerError, match="must not fall"):
        list(resample([(0.0, 1), (0.2, 2), (0.1, 3)], fps=10.0))


def test_prepared_frames_pass_unchanged():
    contract, episode = small_contract(), painted_episode(0, 5)
    policy = Policy(PicturePlanner(), contract, "do it")
    for t, frame in enumerate(stacked_frames(episode, contract.cameras)):
        policy.observe(frame, prepared=True)
        assert np.array_equal(policy.session.frame(t), frame)
