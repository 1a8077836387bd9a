from dataclasses import dataclass

import numpy as np
import pytest

from memer.episode import Episode
from memer.errors import UsageError
from memer.keyframes import KeyframeRules
from memer.planners.oracle import OraclePlanner
from memer.rollout import rollout_offline
from tests.memer.planner_doubles import PicturePlanner, painted_episode, small_contract, without_timing

RULES = KeyframeRules.all_last()
LENGTHS = (31, 50, 7, 44, 23)


def episodes() -> list[Episode]:
    return [painted_episode(index, length) for index, length in enumerate(LENGTHS)]


def run(batch_size=1, order=None, planner=None, contract=None, **settings):
    chosen = episodes() if order is None else [episodes()[i] for i in order]
    contract = contract or small_contract(memory_form="image_text")
    rollouts = rollout_offline(
        chosen,
        planner or PicturePlanner(parse_failures=True),
        contract,
        RULES,
        batch_size=batch_size,
        **settings,
    )
    return {
        r.episode_index: ([without_timing(row) for row in r.rows], r.representatives, r.score)
        for r in rollouts
    }


@pytest.mark.parametrize("memory_source", ["predicted", "gt", "none", "shuffled"])
@pytest.mark.parametrize("stride", [1, 4])
def test_lockstep_equals_one_by_one(memory_source, stride):
    alone = run(memory_source=memory_source, eval_stride=stride)
    assert sorted(alone) == list(range(5))
    for size in (2, 3, 8):
        assert run(size, memory_source=memory_source, eval_stride=stride) == alone
    assert run(3, order=[4, 2, 0, 3, 1], memory_source=memory_source, eval_stride=stride) == alone


def test_lanes_stay_full_while_episodes_wait():
    planner = PicturePlanner()
    run(2, planner=planner)
    assert sum(planner.calls) == sum(LENGTHS)
    assert len(planner.calls) < sum(LENGTHS) * 0.6


def test_a_changed_picture_of_one_episode_reaches_no_other():
    expected = run(3)

    def changed():
        for episode in episodes():
            if episode.episode_index == 1:
                episode.cameras["top"].array[20] ^= 255
            yield episode

    contract = small_contract(memory_form="image_text")
    found = {
        r.episode_index: [without_timing(row) for row in r.rows]
        for r in rollout_offline(
            changed(), PicturePlanner(parse_failures=True), contract, RULES, batch_size=3
        )
    }
    assert found[1] != expected[1][0]
    assert found[1][:20] == expected[1][0][:20]
    assert all(found[index] == expected[index][0] for index in (0, 2, 3, 4))


def test_memory_feeds_back():
    rows = run()[1][0]
    seen: set[int] = set()
    for row in rows:
        assert set(row["memory_indices_before"]) <= seen
        seen.update(row["mapped_keyframe_indices"])
    assert any(row["memory_indices_before"] for row in rows)


def test_memory_sources_show_what_they_say():
    contract = small_contract()
    gt = run(contract=contract, memory_source="gt")[1][0]
    # Segments end at 6, 13, 20, 27, 34. At t = 40 the window is 31, ..., 40 and the grid 1 + 3k: the ends
    # before it lie at 4, 13, 19, 25, and M = 3.
    assert gt[40]["memory_indices_before"] == [13, 19, 25]
    none = run(contract=contract, memory_source="none")[1][0]
    assert not any(row["memory_indices_before"] for row in none)
    # Without memory the answers depend on the window alone, so both runs nominate alike at the start.
    assert none[5]["mapped_keyframe_indices"] == gt[5]["mapped_keyframe_indices"]


def test_instruction_in_force_is_asked():
    planner = PicturePlanner()
    rows = run(planner=planner)[0][0]
    asked = [request.question.instruction for request in planner.questions["painted/0"]]
    assert asked == ["first task of 0"] * 15 + ["second of 0"] * 16
    assert [row["instruction"] for row in rows] == asked


def test_every_frame_is_decoded_once_and_in_order():
    @dataclass
    class Counting:
        inner: object
        asked: list[int]
        prepared: bool = False

        def __len__(self):
            return len(self.inner)

        def frames(self, indices=None):
            for index, frame in zip(indices, self.inner.frames(indices), strict=True):
                self.asked.append(index)
                yield frame

    episode = painted_episode(0, 40)
    asked: list[int] = []
    cameras = {"top": Counting(episode.cameras["top"], asked), "side": episode.cameras["side"]}
    watched = Episode(
        **{
            name: cameras if name == "cameras" else getattr(episode, name)
            for name in Episode.__dataclass_fields__
        }
    )
    contract = small_contract()
    for stride, expected in ((1, range(40)), (3, range(0, 40, 3)), (6, range(0, 40, 3))):
        asked.clear()
        list(rollout_offline([watched], PicturePlanner(), contract, RULES, eval_stride=stride))
        assert asked == [k for k in expected if k <= (39 // stride) * stride]


def test_only_new_votes_are_written_unless_traced():
    row = run()[1][0][-1]
    assert "all_candidate_indices" not in row
    traced = run(full_trace=True)[1][0]
    assert any(len(row["all_candidate_indices"]) > len(row["mapped_keyframe_indices"]) for row in traced)


def test_unlabelled_target_has_no_verdict():
    contract = small_contract()
    labels = ["a"] * 10 + [None] * 10 + ["b"] * 10
    episode = painted_episode(0, 30, labels=labels)
    (rollout,) = rollout_offline([episode], OraclePlanner(contract, RULES), contract, RULES)
    row = rollout.rows[12]
    assert (row["target_subtask"], row["raw_correct"], row["normalized_correct"]) == (None, None, None)
    assert row["target_timestep"] == 15
    assert rollout.score.unlabelled == 10


def test_numbers_below_one_are_refused():
    contract = small_contract()
    for settings in ({"eval_stride": 0}, {"batch_size": 0}):
        with pytest.raises(UsageError, match="must be at least 1"):
            list(rollout_offline([], PicturePlanner(), contract, RULES, **settings))


def test_episodes_are_opened_only_when_a_lane_is_free():
    opened = []

    def stream():
        for episode in episodes():
            opened.append(episode.episode_index)
            yield episode

    rollouts = rollout_offline(stream(), PicturePlanner(), small_contract(), RULES, batch_size=2)
    assert next(rollouts).episode_index == 0
    assert opened == [0, 1]
    assert np.all([r.score is not None for r in rollouts])
