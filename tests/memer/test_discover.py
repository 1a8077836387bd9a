"""Segment discovery: each provider on episodes whose segments are known by construction."""

from itertools import combinations, pairwise

import numpy as np
import pytest

from memer.boundaries import score_boundaries
from memer.discover import ChangePoint, Cut, Events, Uniform, change_points, discover, keep_apart, transitions
from memer.episode import ArrayFrames, Episode, InstructionSpan, Segment
from memer.errors import MemerError, UsageError
from memer.tabletop import demonstrate


def make(
    steps: int = 60,
    *,
    positions: np.ndarray | None = None,
    grip: np.ndarray | None = None,
    frames: np.ndarray | None = None,
) -> Episode:
    """One episode at 10 frames per second; state is [x, y, grip], action [dx, grip]."""
    path = np.zeros((steps, 2)) if positions is None else positions
    closed = np.zeros(steps) if grip is None else grip
    pictures = np.zeros((steps, 8, 8, 3), np.uint8) if frames is None else frames
    return Episode(
        source="s",
        episode_index=4,
        fps=10.0,
        cameras={"base": ArrayFrames(pictures)},
        state=np.column_stack([path, closed]).astype(np.float32),
        action=np.column_stack([np.zeros(steps), closed]).astype(np.float32),
        instructions=(InstructionSpan(0, "tidy up"), InstructionSpan(steps // 2, "go home")),
        segments=(),
    )


def moves(*stretches: tuple[int, float]) -> np.ndarray:
    """Positions [T, 2] of (frames, step per frame) stretches, back and forth along one line."""
    steps = np.concatenate([np.full(count, step) for count, step in stretches])
    return np.column_stack([np.cumsum(steps), np.zeros(len(steps))])


def frames_of(cuts: list[Cut]) -> list[int]:
    return [cut.frame for cut in cuts]


def test_uniform_parts_cover_the_episode():
    found = discover(make(10), Uniform(count=4))
    assert [(s.start, s.end) for s in found.segments] == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert len(discover(make(3), Uniform(count=8)).segments) == 3
    assert len(discover(make(3), Uniform(count=1)).segments) == 1


def test_labels_number_count_and_instruct():
    found = discover(make(10), Uniform(count=2), label="{instruction}: {number} of {count}")
    assert [s.label for s in found.segments] == ["tidy up: 1 of 2", "go home: 2 of 2"]
    with pytest.raises(UsageError, match=r"fields are \{number\}"):
        discover(make(10), Uniform(count=2), label="{name}")
    with pytest.raises(UsageError, match="empty text"):
        discover(make(10), Uniform(count=2), label=" ")


def test_provenance_says_method_settings_and_scores():
    found = discover(make(10), Uniform(count=2)).to_dict()
    assert found["method"] == "uniform"
    assert found["settings"] == {"count": 2}
    assert found["segments"] == [[0, 5, "part 1", 1.0], [5, 10, "part 2", 1.0]]


def test_the_gripper_cuts_at_its_first_new_value():
    grip = np.repeat([0.0, 0.04, 0.0], 20)  # metres: the threshold is the middle of the range
    found = Events(pauses=False).cuts(make(60, grip=grip))
    assert found == [Cut(20, 0.5), Cut(40, 0.5)]
    assert Events(pauses=False, threshold=0.5).cuts(make(60, grip=grip)) == []
    assert Events(pauses=False).cuts(make(60)) == []


def test_a_pause_cuts_where_the_robot_sets_out_again():
    episode = make(65, positions=moves((20, 1.0), (5, 0.0), (20, -1.0), (5, 0.0), (15, 1.0)))
    assert frames_of(Events(gripper=False).cuts(episode)) == [25, 50]


def test_slow_motion_is_no_pause_and_rest_at_the_ends_parts_nothing():
    slow = make(65, positions=moves((20, 1.0), (5, 0.5), (40, 1.0)))
    assert Events(gripper=False).cuts(slow) == []
    rest = make(60, positions=moves((10, 0.0), (40, 1.0), (10, 0.0)))
    assert frames_of(Events(gripper=False).cuts(rest)) == []
    assert Events(gripper=False).cuts(make(60)) == []


def test_gripper_and_pause_close_together_are_one_event():
    grip = np.concatenate([np.zeros(22), np.ones(43)])
    positions = moves((20, 1.0), (5, 0.0), (40, -1.0))
    assert frames_of(Events().cuts(make(65, positions=positions, grip=grip))) == [25]


def test_the_gripper_channel_is_no_motion():
    jumps = np.concatenate([np.zeros(30), np.ones(30)])
    positions = moves((25, 1.0), (10, 0.0), (25, 1.0))
    assert frames_of(Events(gripper=False).cuts(make(60, positions=positions, grip=jumps))) == [35]


def coloured(*stretches: tuple[int, int], noise: float = 4.0) -> np.ndarray:
    """Noisy pictures of (frames, grey level) stretches."""
    rng = np.random.default_rng(0)
    levels = np.concatenate([np.full(count, level) for count, level in stretches])
    pictures = levels[:, None, None, None] + rng.normal(0, noise, (len(levels), 8, 8, 3))
    return pictures.clip(0, 255).astype(np.uint8)


def test_change_points_lie_where_the_picture_changes():
    episode = make(60, frames=coloured((15, 40), (25, 200), (20, 90)))
    cuts = ChangePoint().cuts(episode)
    assert frames_of(cuts) == [15, 40]
    assert all(cut.score > 0.9 for cut in cuts)


def test_noise_alone_gives_no_change_points():
    assert ChangePoint().cuts(make(60, frames=coloured((60, 120), noise=10.0))) == []
    assert ChangePoint().cuts(make(60)) == []


def test_a_higher_penalty_never_gives_more_cuts():
    rows = np.random.default_rng(1).normal(size=(80, 3)).cumsum(axis=0)
    counts = [len(change_points(rows, penalty=p, least=3)) for p in (0.001, 0.01, 0.05, 0.2, 0.9)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] == 0


def test_the_dynamic_program_finds_the_least_cost_of_all_cuts():
    rows = np.random.default_rng(2).normal(size=(11, 2)).cumsum(axis=0)

    def total(cuts: tuple[int, ...], penalty: float) -> float:
        edges = [0, *cuts, len(rows)]
        parts = [rows[a:b] for a, b in pairwise(edges)]
        return sum(((p - p.mean(0)) ** 2).sum() for p in parts) + penalty * len(cuts)

    whole = total((), 0.0)
    for share in (0.003, 0.02, 0.1):
        options = [
            cuts
            for count in range(6)
            for cuts in combinations(range(2, 10), count)
            if all(b - a >= 2 for a, b in pairwise(cuts))
        ]
        best = min(options, key=lambda cuts: total(cuts, share * whole))
        assert tuple(frames_of(change_points(rows, penalty=share, least=2))) == best


def test_long_episodes_are_looked_at_every_few_frames():
    episode = make(60, frames=coloured((15, 40), (25, 200), (20, 90)))
    cuts = frames_of(ChangePoint(max_pictures=20).cuts(episode))
    np.testing.assert_allclose(cuts, [15, 40], atol=3)


def test_transitions_ignore_short_excursions():
    closed = np.array([0, 0, 0, 1, 0, 0, 1, 1, 1], dtype=bool)
    assert transitions(closed) == [3, 4, 6]
    assert transitions(closed, least=2) == [6]


def test_the_surer_of_two_close_cuts_stays():
    cuts = [Cut(10, 0.2), Cut(12, 0.8), Cut(30, 0.1), Cut(1, 1.0), Cut(59, 1.0)]
    assert frames_of(keep_apart(cuts, num_frames=60, least=5)) == [12, 30]


@pytest.mark.parametrize(
    ("provider", "message"),
    [
        (lambda: Uniform(count=0), r"Uniform.count: 0, must be an integer >= 1"),
        (lambda: Events(gripper=False, pauses=False), r"Events.gripper: False, must be true where pauses"),
        (lambda: Events(quiet=1.5), r"Events.quiet: 1.5"),
        (lambda: Events(quiet="x"), r"Events.quiet: 'x', must be a number"),
        (lambda: Events(channel="x"), r"Events.channel: 'x', must be the number of a channel"),
        (lambda: Events(threshold="x"), r"Events.threshold: 'x', must be a number"),
        (lambda: Events(ignore=["x"]), r"Events.ignore: \['x'\], must be a list of channels"),
        (lambda: ChangePoint(penalty=0.0), r"ChangePoint.penalty: 0.0"),
        (lambda: ChangePoint(grid=1000), r"ChangePoint.grid: 1000, must be at most 64"),
        (lambda: ChangePoint(cameras="base"), r"ChangePoint.cameras: 'base', must be a list"),
    ],
)
def test_bad_settings_are_refused(provider, message):
    with pytest.raises(UsageError, match=message):
        provider()


def test_what_an_episode_lacks_is_named():
    with pytest.raises(UsageError, match="episode 4 of s: action has 2 components, channel=5"):
        Events(channel=5).cuts(make())
    with pytest.raises(UsageError, match="leaves none of the 3 components"):
        Events(gripper=False, ignore=[0, 1, 2]).cuts(make())
    with pytest.raises(MemerError, match="no camera 'wrist'; available: base"):
        ChangePoint(cameras=["wrist"]).cuts(make())


def test_pauses_find_the_subtasks_of_a_benchmark_task():
    episode = demonstrate("counting_scoops", split="val", index=0, frame_size=32)
    found = discover(episode, Events(gripper=False))
    assert score_boundaries(episode.segments, found.segments, fps=episode.fps).f1(0.5) > 0.8
    covered = [(segment.start, segment.end) for segment in found.segments]
    assert covered[0][0] == 0
    assert covered[-1][1] == episode.num_frames
    assert all(isinstance(segment, Segment) for segment in found.segments)
