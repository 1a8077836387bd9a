import copy

import numpy as np
import pytest

from memer.canvas import canvases
from memer.contract import CameraLayout, Contract
from memer.errors import MemerError
from memer.executors.oracles import (
    ExecutorOracle,
    LanguageOracle,
    VisualOracle,
    expert_script,
)
from memer.executors.table import TablePlanner
from memer.plan_settings import CanvasLayout, CanvasRegion, PlanSettings
from memer.tabletop import demonstrate
from memer.tabletop.tasks import make_world
from memer.windows import bucket_last_indices

SIZE = 32
CANVAS = CanvasLayout(
    height=SIZE, width=SIZE, regions=(CanvasRegion(camera="base", y=0, x=0, height=SIZE, width=SIZE),)
)


def contract(**switches) -> Contract:
    layout = CameraLayout(camera_keys=("base",), view_width=SIZE, view_height=SIZE)
    return Contract(fps=15.0, cameras=layout, plan=PlanSettings(canvas=CANVAS, **switches))


CONTRACT = contract()
NOTHING = np.zeros((SIZE, SIZE, 3), np.uint8)
STATE = np.zeros(4, np.float32)


@pytest.mark.parametrize("task", ["press_button", "counting_scoops", "object_search"])
def test_the_script_is_what_a_demonstration_is_annotated_with(task):
    episode = demonstrate(task, split="val", index=3, frame_size=16)
    world = make_world(task, split="val", index=3)
    assert [text for _, text in expert_script(world)] == [s.label for s in episode.segments]
    assert world.step_count == 0


def test_the_language_oracle_counts():
    planner, world = LanguageOracle(CONTRACT), make_world("press_button", split="val", index=0)
    planner.bind_world(world)
    texts = [text for _, text in expert_script(world)]
    said = [planner.next("", texts[:k], []) for k in range(len(texts) + 1)]
    assert said == [*texts, texts[-1]]
    with pytest.raises(MemerError, match="no world"):
        LanguageOracle(CONTRACT).next("", [], [])


def test_the_visual_oracle_shows_the_frames_of_the_segment_to_come():
    """The demonstration of the same episode at another speed shows the same, within a few frames' motion."""
    world = make_world("press_button", split="val", index=0)
    planner = VisualOracle(CONTRACT, frame_size=SIZE)
    planner.bind_world(world)
    planner.reset("", NOTHING, seed=0)
    before = copy.deepcopy(world.__dict__)
    plan = planner.plan(expert_script(world)[0][1], NOTHING)
    assert plan.shape == (8, SIZE, SIZE, 3)
    assert world.step_count == before["step_count"]
    assert world.presses == []
    episode = demonstrate("press_button", split="val", index=0, frame_size=SIZE)
    chosen = bucket_last_indices(episode.segments[0].start, episode.segments[0].end)
    real = canvases(episode, chosen, canvas=CANVAS, cameras=CONTRACT.cameras)
    difference = np.abs(plan.astype(int) - np.stack([real[k] for k in chosen]).astype(int)).mean(
        axis=(1, 2, 3)
    )
    moved = np.abs(real[chosen[3]].astype(int) - real[chosen[0]].astype(int)).mean()
    assert difference.max() < 0.5 * moved


def test_the_executor_oracle_carries_the_segment_out_with_true_progress():
    world = make_world("press_button", split="val", index=0)
    oracle = ExecutorOracle(CONTRACT)
    oracle.bind_world(world)
    oracle.reset("", seed=0)
    script = expert_script(world)
    oracle.start_segment(None, script[0][1])
    progress = []
    while world.expert_segment() == script[0]:
        chunk = oracle.act(NOTHING, STATE, 0.0)
        assert chunk.actions.shape == (16, 4)
        assert (np.diff(chunk.progress) >= 0).all()
        for action, score in zip(chunk.actions[:12], chunk.progress, strict=False):
            world.step(action)
            progress.append(float(score))
            if world.expert_segment() != script[0]:
                break
    assert world.presses == ["left"]
    # The last frame of the segment is one step before the expert turns to the next one.
    assert progress[-2:] == [1.0, 1.0]
    length = len(progress) - 1
    assert progress[:-1] == pytest.approx([(n + 1) / length for n in range(length)], abs=1e-6)


def test_the_executor_oracle_classifies_the_last_steps():
    world = make_world("press_button", split="val", index=0)
    oracle = ExecutorOracle(contract(progress_mode="classification", finish_margin=8))
    oracle.bind_world(world)
    oracle.reset("", seed=0)
    script = expert_script(world)
    oracle.start_segment(None, script[0][1])
    said = []
    while world.expert_segment() == script[0]:
        said.append(oracle.finished(NOTHING, STATE))
        world.step(oracle.act(NOTHING, STATE, 0.0).actions[0])
    assert said == [0.0] * (len(said) - 8) + [1.0] * 8


def test_the_table_holds_what_was_demonstrated():
    episodes = [demonstrate("press_button", split="train", index=k, frame_size=16) for k in range(6)]
    table = TablePlanner.from_episodes(episodes)
    for episode in episodes:
        texts = [segment.label for segment in episode.segments]
        instruction = episode.instruction_at(0)
        assert [table.next(instruction, texts[:k], []) for k in range(len(texts))] == texts
        assert table.next(instruction, texts, []) == texts[-1]  # nobody went on: the last one again
    with pytest.raises(MemerError, match='no demonstration of "sing"'):
        table.next("sing", [], [])
    with pytest.raises(MemerError, match="no segments"):
        TablePlanner.from_episodes([])
