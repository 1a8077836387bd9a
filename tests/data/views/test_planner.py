import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.lerobot import LeRobotReader
from data.shards import BuildSettings, ShardSet, build_shards
from data.views.augment import MemoryAugmentation
from data.views.frames import FrameCache
from data.views.planner import PlannerView, PlannerViewConfig, plan_histograms
from memer.contract import CameraLayout, Contract, WindowSettings
from memer.episode import Episode, Segment
from memer.errors import MemerError, UsageError
from memer.keyframes import KeyframeRules
from tests.data.synthetic import LAYOUT, SyntheticSource, identities

SHARED = Path(__file__).parents[4] / "shared"
GOLDEN = SHARED / "golden" / "memer_export_cr5_v3.jsonl"
CR5 = SHARED / "data" / "cr5_banana_v3"


def make_view(
    *, memory_form: str = "image", windows: dict[str, int] | None = None, **kwargs: Any
) -> PlannerView:
    contract = Contract(
        fps=10.0,
        cameras=LAYOUT,
        windows=WindowSettings(**(windows or {})),
        memory_form=memory_form,  # type: ignore[arg-type]
    )
    return PlannerView(contract, rules=kwargs.pop("rules", KeyframeRules.all_last()), **kwargs)


def episode_of(length: int, **kwargs: Any) -> Episode:
    return SyntheticSource({3: length}, **kwargs).episode(3)


def with_keyframes(frames: Sequence[int], length: int) -> list[Segment]:
    """Segments whose last frames are `frames`; the rest of the episode is one more segment without a rule."""
    cuts = [0, *(k + 1 for k in frames)]
    return [Segment(a, b, f"event {a}") for a, b in pairwise(cuts)] + [Segment(cuts[-1], length, "rest")]


EVENTS = KeyframeRules.from_value({"rules": [{"pattern": "^event", "select": "last"}]})


@pytest.mark.skipif(not GOLDEN.exists(), reason="golden records absent: ../shared/golden")
def test_agrees_with_the_public_exporter_record_by_record(tmp_path: Path) -> None:
    layout = CameraLayout(camera_keys=("observation.images.wrist",), view_width=64, view_height=36)
    source = LeRobotReader(CR5, camera_keys=layout.camera_keys)
    build_shards(source, out=tmp_path / "cr5", settings=BuildSettings(cameras=layout), progress=False)
    shards = ShardSet(tmp_path / "cr5")
    view = PlannerView(shards.contract, rules=KeyframeRules.all_last())
    cache = FrameCache(max_bytes=10**9)
    ours = []
    for index in shards.episode_indices():
        episode = shards.episode(index)
        targets = view.targets(episode.segments, num_frames=episode.num_frames)
        for t in view.steps(targets).steps:
            sample = view.sample(episode, t, targets=targets, frames=cache)
            ours.append(
                {
                    "episode": index,
                    "t": t,
                    "memory": [k for _, _, k in sample.question.memory_keys],
                    "context": [k for _, _, k in sample.question.recent_keys],
                    "subtask": sample.subtask,
                    "positions": list(sample.positions),
                }
            )
    assert ours == [json.loads(line) for line in GOLDEN.read_text().splitlines()]
    assert cache.decoded == len(ours)  # each frame once


@pytest.mark.parametrize(
    ("t", "memory", "positions", "target"),
    [
        (0, [], [], 10),
        (7, [], [], 17),
        (120, [30, 60], [3], 130),
        (122, [27, 57], [2], 132),
        (130, [30, 60], [1], 140),
        (131, [26, 56, 91], [], 141),
        (140, [30, 60, 95], [8], 150),
        (175, [30, 60, 95], [1], 185),
        (176, [26, 56, 91, 136], [], 186),
    ],
)
def test_the_worked_table(t: int, memory: list[int], positions: list[int], target: int) -> None:
    segments = with_keyframes([30, 60, 95, 140], 200)
    view = make_view(rules=EVENTS)
    targets = view.targets(segments, num_frames=200)
    assert targets.keyframes == (30, 60, 95, 140)
    assert view.split(targets, t) == (memory, positions)
    label = next(s.label for s in segments if s.start <= target < s.end)
    assert targets.labels[t] == label


@pytest.mark.parametrize(("t", "window"), [(0, [0]), (3, [3]), (7, [3, 7]), (19, [3, 7, 11, 15, 19])])
def test_early_windows_are_short_and_never_wrap(t: int, window: list[int]) -> None:
    view = make_view(windows={"frame_subsample": 4, "recent_frames_length": 6})
    sample = view.sample(episode_of(20), t)
    assert [k for _, _, k in sample.question.recent_keys] == window
    for key, frame in sample.question.frames.items():
        assert identities(frame) == [(3, key[2], 0), (3, key[2], 1)]


def test_pictures_are_the_named_frames_in_prompt_order() -> None:
    sample = make_view().sample(episode_of(90), 77)
    assert [k for _, _, k in sample.question.image_keys] == [27, 42, 47, 52, 57, 62, 67, 72, 77]
    assert sample.question.instruction == "tidy up again"
    assert sample.sample_id == "episode_000003_t000077"
    assert (sample.subtask, sample.positions) == ("subtask 2", (4,))
    for key in sample.question.image_keys:
        assert identities(sample.question.frames[key]) == [(3, key[2], 0), (3, key[2], 1)]


def test_a_sample_depends_on_nothing_but_its_arguments() -> None:
    view, episode = make_view(), episode_of(90)
    cache = FrameCache(max_bytes=10**9)
    for t in (80, 3, 55):
        view.sample(episode, t, frames=cache)
    again, alone = view.sample(episode, 61, frames=cache), make_view().sample(episode_of(90), 61)
    assert again.question.image_keys == alone.question.image_keys
    for key in again.question.image_keys:
        assert np.array_equal(again.question.frames[key], alone.question.frames[key])


def test_unlabelled_targets_are_skipped_and_counted_but_still_shown() -> None:
    episode = episode_of(30, gaps=(3,))
    view = make_view(windows={"prediction_horizon": 0})
    targets = view.targets(episode.segments, num_frames=30)
    plan = view.steps(targets)
    assert plan.steps == (*range(10), *range(20, 30))
    assert plan.skipped_unlabelled == 10
    assert (3, 14) in {key[1:] for key in view.sample(episode, 24).question.recent_keys}
    with pytest.raises(ValueError, match="step 14 has no target label"):
        view.sample(episode, 14)


def test_stride_and_weights() -> None:
    view = make_view(
        rules=EVENTS,
        sample_stride=10,
        transition_weight=3.0,
        transition_before=2,
        transition_after=2,
        answer_weight=2.0,
    )
    targets = view.targets(with_keyframes([100], 200), num_frames=200)
    plan = view.steps(targets)
    assert plan.steps == tuple(range(0, 200, 10))
    weights = dict(zip(plan.steps, plan.weights, strict=True))
    # The target changes at t = 91 (label of t + 10); two subsampled steps are 10 frames.
    assert [t for t in plan.steps if weights[t] == 3.0] == [90, 100]
    # Frame 100 is in the window of t = 100..135; the larger weight counts.
    assert [t for t in plan.steps if weights[t] == 2.0] == [110, 120, 130]


def test_keyframes_before_the_grid_are_counted() -> None:
    view = make_view(rules=EVENTS)
    targets = view.targets(with_keyframes([0, 2], 64), num_frames=64)
    assert view.split(targets, 63)[0] == []
    assert view.split(targets, 62)[0] == [2]
    assert view.split(targets, 60)[0] == [0]
    plan = view.steps(targets)
    assert plan.dropped_keyframes == sum((t % 5 > 0) + (t % 5 > 2 and t >= 2) for t in range(64))


@pytest.mark.parametrize(
    ("form", "recent", "memory", "history"),
    [
        ("none", [80], [], ()),
        ("short", [45, 50, 55, 60, 65, 70, 75, 80], [], ()),
        ("long", list(range(0, 81, 5)), [], ()),
        ("text", [45, 50, 55, 60, 65, 70, 75, 80], [], ("subtask 0", "subtask 1")),
        ("image", [45, 50, 55, 60, 65, 70, 75, 80], [25], ()),
        ("image_text", [45, 50, 55, 60, 65, 70, 75, 80], [25], ("subtask 0", "subtask 1")),
    ],
)
def test_memory_forms_change_only_what_is_shown(
    form: str, recent: list[int], memory: list[int], history: tuple[str, ...]
) -> None:
    sample = make_view(memory_form=form).sample(episode_of(90), 80)
    question = sample.question
    assert [k for _, _, k in question.recent_keys] == recent
    assert [k for _, _, k in question.memory_keys] == memory
    assert question.history == history
    assert sample.subtask == "subtask 2"
    assert len(question.frames) == len(set(recent + memory))


def test_history_does_not_tell_that_a_change_is_due() -> None:
    view = make_view(memory_form="text")
    episode = episode_of(90)
    targets = view.targets(episode.segments, num_frames=90)
    assert (targets.labels[49], targets.labels[50]) == ("subtask 1", "subtask 2")
    assert view.sample(episode, 50).question.history == ("subtask 0",)  # subtask 1 is still running
    assert view.sample(episode, 51).question.history == ("subtask 0", "subtask 1")


def test_noise_is_off_by_default_and_repeatable() -> None:
    episode = episode_of(300)
    segments = with_keyframes([20, 60, 100, 140, 180], 300)
    episode = Episode(**{**{n: getattr(episode, n) for n in episode.__slots__}, "segments": tuple(segments)})
    noisy = make_view(rules=EVENTS, augmentation=MemoryAugmentation(jitter=4, drop=0.3, false_keyframe=0.5))
    still = make_view(rules=EVENTS, augmentation=MemoryAugmentation())
    plain = make_view(rules=EVENTS).sample(episode, 250)
    assert still.sample(episode, 250).question.image_keys == plain.question.image_keys

    def memory(epoch: int, repeat: int = 0) -> tuple[int, ...]:
        sample = noisy.sample(episode, 250, epoch=epoch, repeat=repeat)
        assert (sample.subtask, sample.positions) == (plain.subtask, plain.positions)
        assert sample.question.recent_keys == plain.question.recent_keys
        return tuple(k for _, _, k in sample.question.memory_keys)

    assert memory(3) == memory(3)
    drawn = [memory(epoch) for epoch in range(16)]
    assert len(set(drawn)) > 8
    assert memory(3) != memory(3, repeat=1) or memory(4) != memory(4, repeat=1)
    exact = [k for _, _, k in plain.question.memory_keys]
    assert all(0 <= k < 215 for frames in drawn for k in frames)
    near = [k for frames in drawn for k in frames if any(abs(k - e) <= 4 for e in exact)]
    assert len(near) > 0.6 * sum(map(len, drawn))


def test_augmentation_values_are_checked() -> None:
    with pytest.raises(UsageError, match=r"augmentation\.drop: 1\.5"):
        MemoryAugmentation(drop=1.5)


def test_histograms() -> None:
    view = make_view(rules=EVENTS)
    targets = view.targets(with_keyframes([50], 100), num_frames=100)
    counted = plan_histograms([(targets, view.steps(targets))])
    assert counted["samples"] == 100
    assert counted["labels"] == {"event 0": 41, "rest": 59}
    assert counted["positions"]["none"] == 100 - 36
    assert counted["positions"]["8"] == 1
    assert counted["memory_images"] == {"0": 86, "1": 14}


def test_choices_of_a_run_meet_the_contract_of_the_data() -> None:
    data = Contract(fps=12.0, cameras=LAYOUT)
    config = PlannerViewConfig(
        contract={"memory_form": "text", "windows": {"frame_subsample": 3}, "prompt": {"system_text": None}},
        rules="all_last",
        sample_stride=2,
        transition_weight=2.0,
        transition_before=4,
        transition_after=4,
        answer_weight=1.0,
        augmentation=None,
    )
    view = config.bind(data)
    assert (view.contract.fps, view.contract.memory_form) == (12.0, "text")
    assert view.contract.windows.frame_subsample == 3
    assert view.contract.prompt == data.prompt
    assert view.contract.rules_hash == KeyframeRules.all_last().rules_hash
    plain = config.bind(data, plain=True, sample_stride=7)
    assert (plain.transition_weight, plain.sample_stride) == (1.0, 7)


@pytest.mark.parametrize(
    ("choices", "error", "message"),
    [
        ({"fps": 5}, UsageError, "contract.fps: fixed by the data"),
        ({"window": {}}, MemerError, "unknown field 'window'"),
    ],
)
def test_choices_that_do_not_fit_are_refused(
    choices: dict[str, Any], error: type[Exception], message: str
) -> None:
    config = PlannerViewConfig(
        contract=choices,
        rules="all_last",
        sample_stride=1,
        transition_weight=1.0,
        transition_before=4,
        transition_after=4,
        answer_weight=1.0,
        augmentation=None,
    )
    with pytest.raises(error, match=message):
        config.bind(Contract(fps=10.0, cameras=LAYOUT))


def test_rules_that_differ_from_the_contract_are_refused() -> None:
    contract = make_view().contract
    with pytest.raises(UsageError, match=r"view\.rules: hash"):
        PlannerView(contract, rules=EVENTS)


def test_the_cache_is_bounded_and_shared_frames_cannot_be_changed() -> None:
    episode = episode_of(60)
    size = 96 * 54 * 2 * 3
    cache = FrameCache(max_bytes=10 * size)
    view = make_view(windows={"frame_subsample": 1})
    for t in range(60):
        sample = view.sample(episode, t, frames=cache)
        assert cache.num_bytes <= 10 * size
    with pytest.raises(ValueError, match="read-only"):
        next(iter(sample.question.frames.values()))[0, 0, 0] = 1
