from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from data.views.frames import FrameCache
from data.views.visual_planner import VisualPlannerView, VisualPlannerViewConfig
from memer.canvas import paint_canvas
from memer.contract import Contract
from memer.episode import ArrayFrames, Episode, Segment
from memer.errors import MemerError, UsageError
from memer.windows import bucket_last_indices
from tests.data.plans import episode_with, plan_contract, plan_values, shown
from tests.data.synthetic import LAYOUT


def samples_of(episode: Episode, **choices: Any) -> list[Any]:
    view = VisualPlannerView(plan_contract(**choices))
    targets = view.targets(episode.segments, num_frames=episode.num_frames)
    return [view.sample(episode, t, targets=targets) for t in view.steps(targets).steps]


def test_one_sample_holds_the_first_frame_and_the_buckets_of_every_segment() -> None:
    episode = episode_with([13, 14, 40], 45, first=3)
    (sample,) = samples_of(episode)
    frames = [shown(canvas) for canvas in sample.frames]
    # By hand from the rule of section 3: G_0 is frame 0, though the first segment starts later.
    assert frames == [
        (3, k) for k in [0, 4, 5, 6, 7, 9, 10, 11, 12, *[13] * 8, 17, 20, 23, 26, 30, 33, 36, 39]
    ]
    assert sample.texts == ("task 0", "task 1", "task 0")
    assert (sample.source, sample.episode_index, sample.instruction) == ("synthetic", 3, "tidy up")
    assert sample.frames.shape == (25, 112, 96, 3)


def test_without_memory_each_segment_stands_alone_from_its_first_frame() -> None:
    episode = episode_with([10, 30], 30)
    one, two = samples_of(episode, visual_plan="current_only")
    assert [shown(canvas)[1] for canvas in one.frames] == [0, *bucket_last_indices(0, 10)]
    assert [shown(canvas)[1] for canvas in two.frames] == [10, *bucket_last_indices(10, 30)]
    assert (one.texts, two.texts) == (("task 0",), ("task 1",))
    assert one.sample_id != two.sample_id
    assert two.instruction == episode.instruction_at(10)


def test_other_numbers_of_plan_frames() -> None:
    (sample,) = samples_of(episode_with([8], 8), plan_frames=4)
    assert [shown(canvas)[1] for canvas in sample.frames] == [0, 1, 3, 5, 7]


def test_a_training_canvas_equals_a_live_one() -> None:
    episode = episode_with([16], 16)
    contract = plan_contract()
    assert contract.plan is not None
    (sample,) = samples_of(episode)
    live = {key: next(iter(source.frames([15]))) for key, source in episode.cameras.items()}
    painted = paint_canvas(live, canvas=contract.plan.canvas, cameras=LAYOUT)
    assert (sample.frames[-1] == painted).all()


def test_frames_of_another_type_are_named() -> None:
    episode = episode_with([16], 16)
    broken = ArrayFrames(np.full((16, 54, 96, 3), 300, np.int16))
    with pytest.raises(MemerError, match="episode 3 of synthetic: frames: picture of int16: must be uint8"):
        samples_of(replace(episode, cameras={**episode.cameras, "base": broken}))


def test_a_cache_that_drew_otherwise_is_refused() -> None:
    episode = episode_with([16], 16)
    cache = FrameCache(max_bytes=1 << 20)
    cache.fetch(episode, [0], layout=LAYOUT)
    with pytest.raises(ValueError, match="another cache"):
        VisualPlannerView(plan_contract()).sample(episode, 0, frames=cache)


def test_histograms_count_segments_and_those_shorter_than_a_plan() -> None:
    view = VisualPlannerView(plan_contract())
    plans = []
    for cuts in ([10, 13], [20]):
        targets = view.targets(episode_with(cuts, 20).segments, num_frames=20)
        plans.append((targets, view.steps(targets)))
    assert view.histograms(plans) == {
        "samples": 2,
        "weighted_samples": 2.0,
        "episodes": 2,
        "segments": 3,
        "segments_per_episode": {"1": 1, "2": 1},
        "segment_labels": {"task 0": 2, "task 1": 1},
        "segment_frames": {"least": 3, "median": 10, "greatest": 20},
        "shorter_than_plan": 1,
    }


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ((), "segments: none"),
        ((Segment(0, 3, " "),), r"number 1 \[0, 3\) has no text"),
        ((Segment(0, 3, "a"), Segment(2, 5, "b")), r"number 2 \[2, 5\) overlaps"),
        ((Segment(0, 9, "a"),), "leaves the 8 frames"),
    ],
)
def test_labels_that_no_plan_follows_from_are_refused(segments: tuple[Segment, ...], message: str) -> None:
    with pytest.raises(MemerError, match=message):
        VisualPlannerView(plan_contract()).targets(segments, num_frames=8)


def test_what_a_run_chooses_is_checked() -> None:
    data = Contract(fps=10.0, cameras=LAYOUT)
    bound = VisualPlannerViewConfig(contract=plan_values(visual_plan="current_only")).bind(data)
    assert bound.contract.plan is not None
    assert bound.contract.plan.visual_plan == "current_only"
    for values, message in (
        (plan_values(visual_plan="none"), "no visual planner to train"),
        (plan_values(executor_context="full_history"), "full_history takes the visual plan's place"),
        ({}, "contract.plan: missing"),
        ({"fps": 3}, "contract.fps: fixed by the data"),
    ):
        with pytest.raises(UsageError, match=message):
            VisualPlannerViewConfig(contract=values).bind(data)
    narrow = replace(data, cameras=replace(LAYOUT, camera_keys=("base",)))
    with pytest.raises(UsageError, match=r"no camera 'wrist'; cameras\.camera_keys: base"):
        VisualPlannerViewConfig(contract=plan_values()).bind(narrow)
