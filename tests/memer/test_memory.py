"""Episodic memory: clustering, both modes, freezing, the oracle self-test, bounds, state, public parity."""

import json
import logging
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memer.clusters import Cluster
from memer.contract import CameraLayout, Contract, WindowSettings
from memer.memory import EpisodicMemory, freeze_bound, map_positions
from memer.windows import recent_indices, split_keyframes

GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "memer_memory_compat.jsonl"


def memory(**changes) -> EpisodicMemory:
    return EpisodicMemory(**{"merge_distance": 25, "memory_length": 8, **changes})


def voted(*votes: int, **changes) -> EpisodicMemory:
    filled = memory(**changes)
    filled.add(votes)
    return filled


def definition(votes: list[int], *, d: int, span: int | None = None) -> list[Cluster]:
    """The clusters written down from the specification, every vote again."""
    groups: list[list[int]] = []
    for vote in sorted(votes):
        if groups and vote - groups[-1][-1] <= d and (span is None or vote - groups[-1][0] <= span):
            groups[-1].append(vote)
        else:
            groups.append([vote])
    return [Cluster(g[0], g[-1], g[(len(g) - 1) // 2], len(g)) for g in groups]


@pytest.mark.parametrize(
    ("votes", "representatives"),
    [
        ([90, 90, 95, 95], [90]),
        ([140, 145, 145], [145]),
        ([140, 140, 145, 145], [140]),
        ([100, 125], [100]),
        ([100, 126], [100, 126]),
        ([145, 140, 145], [145]),
        ([], []),
    ],
)
def test_worked_examples(votes, representatives):
    assert voted(*votes).representatives() == representatives


def test_votes_of_later_steps_count_again():
    counted = voted(10, 20)
    assert counted.representatives() == [10]
    counted.add([20])
    assert counted.clusters() == [Cluster(10, 20, 20, 3)]
    assert counted.num_votes == 3


def test_strict_filters_then_caps():
    held = voted(0, 50, 100, 150, 200, memory_length=2)
    assert held.visible([160, 165, 170]) == [100, 150]
    assert held.visible([150, 155]) == [50, 100]
    assert held.visible([201]) == [150, 200]
    assert held.visible([0]) == []


def test_compat_caps_then_hides_window_members():
    held = voted(0, 50, 100, 150, 200, memory_length=2, mode="compat")
    assert held.visible([200, 205, 210]) == [150]
    assert held.visible([199, 204, 209]) == [150, 200]  # on another phase: shown although inside the window


def test_no_memory_means_none_in_both_modes():
    for mode in ("strict", "compat"):
        held = voted(0, 50, memory_length=0, mode=mode)
        assert held.visible([100, 105]) == []
        assert held.needed_frames() == []


def test_public_parity_in_compat_mode():
    if not GOLDEN.is_file():
        pytest.skip(f"{GOLDEN} is not there: golden records lie beside the checkout")
    steps = 0
    for line in GOLDEN.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        held = EpisodicMemory(
            merge_distance=record["merge_distance"], memory_length=record["memory_length"], mode="compat"
        )
        for step in record["steps"]:
            assert held.visible(step["context"]) == step["visible_before"]
            held.add(step["votes"])
            steps += 1
        assert held.visible(record["steps"][-1]["context"]) == record["visible_after"]
    assert steps > 1000


def oracle(k: int, frames: int, *, stride: int = 1, **changes) -> tuple[EpisodicMemory, list[int], list[int]]:
    """A perfect planner over one episode: (memory, nominating steps, steps that show any memory)."""
    held, nominated, shown = memory(**changes), [], []
    for t in range(0, frames, stride):
        context = recent_indices(t, subsample=5, length=8)
        held.freeze(freeze_bound(t, subsample=5, length=8))
        if held.visible(context):
            shown.append(t)
        positions = split_keyframes([k], t, subsample=5, length=8, memory_length=8)[1]
        if positions:
            nominated.append(t)
        held.add(map_positions(positions, context)[0], t=t)
    return held, nominated, shown


@pytest.mark.parametrize("k", [4, 7, 60, 63])  # windows are short before t = 35: their start says little
def test_oracle_nominates_36_steps_and_leaves_k_minus_2(k):
    held, nominated, shown = oracle(k, 200)
    assert nominated == list(range(k, k + 36))
    assert held.num_votes == 36
    assert held.representatives() == [k - 2]
    assert [t for t in shown if t >= 36] == list(range(max(36, k + 34), 200))
    assert split_keyframes([k], k + 35, subsample=5, length=8, memory_length=8)[0] == []
    assert len(split_keyframes([k], k + 36, subsample=5, length=8, memory_length=8)[0]) == 1


def test_oracle_votes_are_spread_over_the_cell():
    votes = Counter()
    for t in range(200):
        context = recent_indices(t, subsample=5, length=8)
        positions = split_keyframes([60], t, subsample=5, length=8, memory_length=8)[1]
        votes.update(map_positions(positions, context)[0])
    assert votes == {56: 7, 57: 7, 58: 7, 59: 7, 60: 8}


@pytest.mark.parametrize(("k", "votes", "representative"), [(0, 8, 0), (1, 15, 1), (2, 22, 1), (3, 29, 2)])
def test_oracle_at_the_first_frames(k, votes, representative):
    held, nominated, _ = oracle(k, 200)
    assert (held.num_votes, len(nominated), held.representatives()) == (votes, votes, [representative])


def test_oracle_keyframe_at_the_last_frame_gets_one_vote():
    held, nominated, _ = oracle(99, 100)
    assert (nominated, held.representatives()) == ([99], [99])


@pytest.mark.parametrize("k", range(60, 75))
def test_oracle_at_larger_strides_votes_for_one_frame(k):
    for stride, counts in ((5, {8} if k % 5 == 0 else {7}), (15, {2, 3})):
        held, _, _ = oracle(k, 200, stride=stride)
        (cluster,) = held.clusters()
        assert cluster.vote_count in counts
        assert cluster.start == cluster.end
        assert cluster.start == (k if k % 5 == 0 else k - k % 5)


@pytest.mark.parametrize(("gap", "clusters"), [(1, 1), (29, 1), (30, 2), (31, 2)])
def test_two_keyframes_merge_below_d_plus_s(gap, clusters):
    held = memory()
    for t in range(250):
        context = recent_indices(t, subsample=5, length=8)
        positions = split_keyframes([80, 80 + gap], t, subsample=5, length=8, memory_length=8)[1]
        held.add(map_positions(positions, context)[0], t=t)
    assert len(held.clusters()) == clusters


def test_compat_shows_most_steps_that_training_never_showed():
    held, inside = memory(mode="compat"), 0
    for t in range(200):
        context = recent_indices(t, subsample=5, length=8)
        inside += any(k >= context[0] for k in held.visible(context)) and 60 < t <= 95
        positions = split_keyframes([60], t, subsample=5, length=8, memory_length=8)[1]
        held.add(map_positions(positions, context)[0], t=t)
    assert inside == 28


@st.composite
def rollouts(draw):
    """(settings, steps): windows of a whole episode with random votes inside them."""
    s = draw(st.integers(1, 4))
    n = draw(st.integers(1, 5))
    stride = draw(st.integers(1, 3))
    rng = random.Random(draw(st.integers(0, 2**32)))
    rate = draw(st.sampled_from([0.05, 0.3, 0.9]))
    steps = []
    for t in range(0, draw(st.integers(1, 160)), stride):
        context = recent_indices(t, subsample=s, length=n)
        votes = [k for k in context if rng.random() < rate] if rng.random() < 0.5 else []
        steps.append((t, context, votes * rng.choice([1, 1, 2])))
    chosen = {
        "merge_distance": draw(st.integers(0, 4)) * s,
        "memory_length": draw(st.integers(0, 3)),
        "mode": draw(st.sampled_from(["strict", "compat"])),
        "max_cluster_span": draw(st.sampled_from([None, 0, 3, 10])),
    }
    return s, n, chosen, steps


@settings(max_examples=150, deadline=None)
@given(rollouts())
def test_freezing_equals_clustering_everything_again(rollout):
    s, n, chosen, steps = rollout
    frozen = EpisodicMemory(**chosen)
    votes: list[int] = []
    mode, m = chosen["mode"], chosen["memory_length"]
    for t, context, added in steps:
        frozen.freeze(freeze_bound(t, subsample=s, length=n))
        clusters = definition(votes, d=chosen["merge_distance"], span=chosen["max_cluster_span"])
        assert frozen.clusters() == clusters
        representatives = [cluster.representative for cluster in clusters]
        if m == 0:
            visible = []
        elif mode == "strict":
            visible = [k for k in representatives if k < context[0]][-m:]
        else:
            visible = [k for k in representatives[-m:] if k not in context]
        assert frozen.visible(context) == visible
        assert set(visible) <= set(frozen.needed_frames())
        frozen.add(added, t=t)
        votes += added
    assert frozen.num_votes == len(votes)


@settings(max_examples=60, deadline=None)
@given(rollouts(), st.sampled_from([None, 3, 8]), st.integers(0, 100))
def test_state_and_replay_restore_the_identical_memory(rollout, cap, cut):
    s, n, chosen, steps = rollout
    straight = EpisodicMemory(**chosen, max_open_frames=cap)
    log: list[tuple[int, list[int]]] = []
    for number, (t, _, added) in enumerate(steps):
        straight.freeze(freeze_bound(t, subsample=s, length=n))
        straight.add(added, t=t)
        log.append((t, added))
        if number == cut:
            state = json.loads(json.dumps(straight.state_dict()))
            straight = EpisodicMemory(**chosen, max_open_frames=cap)
            straight.load_state_dict(state)
    replayed = EpisodicMemory(**chosen, max_open_frames=cap)
    for t, added in log:
        replayed.freeze(freeze_bound(t, subsample=s, length=n))
        replayed.add(added, t=t)
    assert replayed.state_dict() == straight.state_dict()
    assert replayed.clusters() == straight.clusters()


def test_state_of_other_settings_or_versions_is_refused():
    state = voted(3).state_dict()
    with pytest.raises(ValueError, match="merge_distance"):
        memory(merge_distance=10).load_state_dict(state)
    with pytest.raises(ValueError, match="version 99"):
        memory().load_state_dict({**state, "version": 99})


def test_reset_forgets_everything():
    held = voted(3, 40, 90)
    held.freeze(80)
    held.reset()
    assert held.state_dict() == memory().state_dict()
    held.add([0])
    assert held.representatives() == [0]


def test_frozen_clusters_keep_only_their_representative():
    held = voted(0, 2, 4, 40, 42, 100, 104, memory_length=1, merge_distance=5)
    held.freeze(95)
    assert held.open_votes() == [100, 104]
    assert held.representatives() == [2, 40, 100]
    assert held.needed_frames() == [40, 100, 104]


def test_freezing_waits_while_a_vote_can_still_join():
    held = voted(10, merge_distance=5)
    held.freeze(15)
    assert held.open_votes() == [10]  # a vote for 15 would still join
    held.freeze(16)
    assert held.open_votes() == []
    assert held.representatives() == [10]


def test_votes_outside_the_episode_or_the_bound_are_refused_whole():
    held = voted(50)
    for bad, named in (([60, -1], "-1"), ([60, 71], "71")):
        with pytest.raises(ValueError, match=named):
            held.add(bad, t=70)
    held.freeze(40)
    with pytest.raises(ValueError, match="39"):
        held.add([60, 39])
    assert held.num_votes == 1
    assert held.representatives() == [50]


def test_an_empty_window_and_bad_settings_are_refused():
    with pytest.raises(ValueError, match="context_indices"):
        memory().visible([])
    for wrong in ({"mode": "loose"}, {"merge_distance": -1}, {"memory_length": True}, {"max_open_frames": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            memory(**wrong)


def test_single_linkage_chains_and_the_span_limit_cuts_them():
    dense = range(0, 600, 20)
    assert voted(*dense).representatives() == [280]
    cut = voted(*dense, max_cluster_span=100).clusters()
    assert [(c.start, c.end) for c in cut] == [(i, i + 100) for i in range(0, 600, 120)]


def test_a_long_open_cluster_is_reported_once_per_episode(caplog):
    held = memory(span_warning=160)
    with caplog.at_level(logging.WARNING):
        for k in range(0, 161, 20):
            held.add([k])
        assert not caplog.text
        held.add([180])
        held.add([200])
    assert len(caplog.records) == 1
    assert "0..180" in caplog.text
    held.reset()
    held.add([0])
    held.add(range(0, 400, 20))
    assert len(caplog.records) == 2


def test_open_frames_stay_below_the_hard_cap(caplog):
    held, exact = memory(max_open_frames=40), memory()
    with caplog.at_level(logging.WARNING):
        for t in range(5000):
            context = recent_indices(t, subsample=5, length=8)
            held.freeze(freeze_bound(t, subsample=5, length=8))
            held.add([context[-1]], t=t)
            exact.add([context[-1]], t=t)
            assert len(held.needed_frames()) <= 40
    assert "thinning" in caplog.text
    (thinned,), (true,) = held.clusters(), exact.clusters()
    assert (thinned.start, thinned.end, thinned.vote_count) == (true.start, true.end, true.vote_count)
    assert abs(thinned.representative - true.representative) <= 5000 / 40
    assert thinned.representative in held.needed_frames()
    assert held.num_thinned == 4960


def test_a_vote_between_thinned_frames_still_belongs_to_the_cluster():
    held = memory(max_open_frames=3, merge_distance=10)
    held.add(range(0, 100, 10))
    assert len(held.needed_frames()) == 3
    held.add([45])
    assert [(c.start, c.end) for c in held.clusters()] == [(0, 90)]


def test_what_is_visible_is_always_stored():
    rng = random.Random(3)
    held, stored = memory(max_open_frames=30, memory_length=2), set()
    for t in range(1500):
        context = recent_indices(t, subsample=5, length=8)
        held.freeze(freeze_bound(t, subsample=5, length=8))
        assert set(held.visible(context)) <= stored
        if rng.random() < 0.95 or t % 400 < 300:
            held.add([rng.choice(context)], t=t)
        stored = (stored | set(range(t - 35, t + 1))) & (
            set(held.needed_frames()) | set(range(t - 35, t + 1))
        )
        assert len(stored) <= 36 + 30 + 2


def test_work_per_step_does_not_grow_with_the_episode():
    held = memory(merge_distance=5)
    for t in range(20_000):
        held.freeze(freeze_bound(t, subsample=5, length=8))
        if t % 50 == 0:
            held.add([t], t=t)
    assert len(held.open_votes()) <= 2
    assert len(held.needed_frames()) <= 10
    assert held.representatives() == list(range(0, 20_000, 50))


def test_memory_of_a_contract():
    cameras = CameraLayout(camera_keys=("base",))
    windows = WindowSettings(frame_subsample=4, merge_distance=3, keyframes_length=6)
    contract = Contract(fps=15.0, cameras=cameras, windows=windows, memory_mode="compat")
    made = EpisodicMemory.for_contract(contract, max_cluster_span=10)
    assert (made.merge_distance, made.memory_length, made.mode) == (12, 6, "compat")
    assert (made.max_cluster_span, made.span_warning) == (40, 128)
    assert made.max_open_frames is not None
    textual = Contract(fps=15.0, cameras=cameras, windows=windows, memory_form="text")
    assert EpisodicMemory.for_contract(textual).memory_length == 0


def test_positions_name_window_frames_once_per_answer():
    window = [10, 15, 20]
    assert map_positions([3, 1], window) == ([20, 10], [])
    assert map_positions([0, -3, 4, 99], window) == ([], [0, -3, 4, 99])
    assert map_positions([2, 2, 2], window) == ([15], [])
    assert map_positions([2, 2, 2], window, unique_votes=False) == ([15, 15, 15], [])
    assert map_positions([6], [3, 7]) == ([], [6])
