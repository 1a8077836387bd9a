import numpy as np
import pytest

from memer.contract import Contract
from memer.errors import MemerError
from memer.keyframes import KeyframeRules
from memer.planners.baselines import ConstantPlanner, majority_planner
from memer.planners.oracle import OraclePlanner
from memer.planners.wrappers import NoisyPlanner, NoMemory, NoPositions
from memer.rollout import rollout_offline
from tests.memer.planner_doubles import PicturePlanner, painted_episode, small_contract, without_timing

RULES = KeyframeRules.all_last()


def rows_of(planner, *, contract: Contract | None = None, lengths=(40, 30), **settings):
    contract = contract or small_contract(memory_form="image_text")
    episodes = [painted_episode(index, length) for index, length in enumerate(lengths)]
    rollouts = rollout_offline(episodes, planner, contract, RULES, **settings)
    return {r.episode_index: [without_timing(row) for row in r.rows] for r in rollouts}


def test_constant_says_one_thing():
    rows = rows_of(ConstantPlanner("wait"))[0]
    assert {row["predicted_subtask"] for row in rows} == {"wait"}
    assert not any(row["mapped_keyframe_indices"] for row in rows)


def test_majority_counts_frames_not_segments():
    labels = [["short"] * 2 + [None] + ["short"] * 2 + ["long"] * 5, ["long"] + ["short"] * 2]
    episodes = [painted_episode(i, len(names), labels=names) for i, names in enumerate(labels)]
    assert majority_planner(episodes).subtask == "long"  # 6 to 6: the smaller text wins
    assert majority_planner(episodes[:1] + episodes).subtask == "long"
    assert majority_planner(episodes + episodes[1:]).subtask == "short"
    with pytest.raises(MemerError, match="no labels"):
        majority_planner([painted_episode(0, 3, labels=[None] * 3)])


def test_no_positions_keeps_the_subtask_only():
    contract = small_contract()
    oracle = rows_of(OraclePlanner(contract, RULES), contract=contract)
    bare = rows_of(NoPositions(OraclePlanner(contract, RULES)), contract=contract)
    for index in oracle:
        assert [r["predicted_subtask"] for r in bare[index]] == [
            r["predicted_subtask"] for r in oracle[index]
        ]
        assert not any(r["mapped_keyframe_indices"] or r["memory_indices_before"] for r in bare[index])
    assert any(r["mapped_keyframe_indices"] for r in oracle[0])


def test_no_memory_shows_the_window_alone():
    inner = PicturePlanner()
    rows_of(NoMemory(inner))
    requests = [request for asked in inner.questions.values() for request in asked]
    assert requests
    for request in requests:
        assert request.question.memory_keys == ()
        assert request.question.history == ()
        assert set(request.question.frames) == set(request.question.recent_keys)


def test_no_memory_answers_like_memory_source_none():
    contract = small_contract()
    without = rows_of(NoMemory(PicturePlanner()), contract=contract)
    none = rows_of(PicturePlanner(), contract=contract, memory_source="none")
    for index, rows in without.items():
        assert [r["predicted_subtask"] for r in rows] == [r["predicted_subtask"] for r in none[index]]


def test_noisy_oracle_is_seeded_and_free_of_batch_and_order():
    contract = small_contract()

    def noisy(seed: int) -> NoisyPlanner:
        labels = [f"subtask {k}" for k in range(4)]
        return NoisyPlanner(
            OraclePlanner(contract, RULES), labels=labels, parse_failure=0.1, false_position=0.2, seed=seed
        )

    first = rows_of(noisy(1), contract=contract)
    assert rows_of(noisy(1), contract=contract, batch_size=2) == first
    assert rows_of(noisy(2), contract=contract) != first
    assert rows_of(noisy(1), contract=contract, seed=9) != first


def test_noise_has_the_asked_rates():
    contract = small_contract()
    planner = NoisyPlanner(
        OraclePlanner(contract, RULES),
        labels=[f"subtask {k}" for k in range(4)],
        wrong_label=0.3,
        missed_position=0.2,
        false_position=0.0,
        parse_failure=0.1,
    )
    rows = rows_of(planner, contract=contract, lengths=(1500,))[0]
    parsed = [row for row in rows if row["parse_ok"]]
    assert 1 - len(parsed) / len(rows) == pytest.approx(0.1, abs=0.04)
    wrong = np.mean([not row["raw_correct"] for row in parsed])
    assert wrong == pytest.approx(0.3, abs=0.05)
    wanted = sum(len(row["target_keyframe_positions"]) for row in parsed)
    kept = sum(len(row["predicted_keyframe_positions"]) for row in parsed)
    assert kept / wanted == pytest.approx(0.8, abs=0.05)


def test_oracle_names_the_nearest_label_where_none_is():
    contract = small_contract()
    labels = [None] * 5 + ["a"] * 5 + [None] * 10 + ["b"] * 5
    episode = painted_episode(0, 25, labels=labels)
    (rollout,) = rollout_offline([episode], OraclePlanner(contract, RULES), contract, RULES)
    said = [row["predicted_subtask"] for row in rollout.rows]
    assert said == ["a"] * 17 + ["b"] * 8  # the target lies 3 frames ahead
