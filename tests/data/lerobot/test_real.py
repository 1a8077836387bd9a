"""The real robot episodes beside the project: partial copies, one with a drifting row clock."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.labels import FileLabels, GripperLabels
from data.lerobot import LeRobotReader, decode_counter
from memer.errors import MemerError

SHARED = Path(__file__).parents[4] / "shared" / "data"
CR5, G1, CR5_V3 = SHARED / "cr5_banana" / "lerobot_data", SHARED / "g1_bottle", SHARED / "cr5_banana_v3"

# number -> frames, close, open, largest deviation of the row clock in seconds (measured, spec section 13)
CR5_EPISODES = {
    28: (176, 76, 135, 1.600),
    51: (193, 85, 161, 0.402),
    68: (204, 81, 165, 0.115),
    70: (181, 77, 148, 0.314),
    71: (181, 74, 146, 0.130),
    72: (183, 72, 149, 0.281),
    73: (181, 64, 143, 0.286),
    75: (184, 74, 149, 0.573),
}
NAMES = ("pick up the banana", "carry the banana to the plate", "release the banana and retreat")


def need(root):
    if not root.is_dir():
        pytest.skip(f"{root} is not there: real episodes lie beside the checkout")
    return root


@pytest.mark.parametrize("mode", ["lenient", "strict"])
def test_cr5_is_partial_and_drifts_and_is_read_whole(mode):
    reader = LeRobotReader(need(CR5), mode=mode)
    assert reader.indices() == list(CR5_EPISODES)
    report = reader.report()
    assert (report["episodes"]["listed"], report["episodes"]["absent"], report["frames"]) == (81, 73, 1483)
    assert report["errors"] == 0
    drift = next(f for f in report["findings"] if f["code"] == "clock_drift")
    assert drift["episodes"] == list(CR5_EPISODES)
    assert report["largest_clock_deviation_s"] == pytest.approx(1.600, abs=5e-4)
    for number, (frames, _, _, deviation) in CR5_EPISODES.items():
        episode = reader.episode(number)
        assert (episode.num_frames, episode.state.shape[1], episode.action.shape[1]) == (frames, 6, 7)
        assert episode.metadata["clock_deviation_s"] == pytest.approx(deviation, abs=6e-4)
        assert episode.instruction_at(0) == "put the banana on the plate"
        assert episode.segments == ()
    with pytest.raises(MemerError, match="episode 0 is listed but its table is absent"):
        reader.episode(0)


def test_cr5_gripper_labels_are_the_true_segments():
    labeler = GripperLabels(names=NAMES, channel="gripper")
    reader = LeRobotReader(need(CR5), mode="strict")
    for number, (frames, close, release, _) in CR5_EPISODES.items():
        segments = labeler(reader.episode(number)).segments
        assert [(s.start, s.end) for s in segments] == [(0, close), (close, release), (release, frames)]


def test_cr5_v3_is_the_same_set_with_native_labels():
    """The public writer's own tree: one mp4 and one table for all episodes."""
    reader = LeRobotReader(need(CR5_V3), mode="strict", require_labels=True)
    assert reader.indices() == list(range(8))
    assert reader.report()["label_sources"] == {"subtask_index": 8}
    assert reader.report()["findings"] == []
    old = LeRobotReader(need(CR5), camera_keys=["observation.images.top"])
    for index, (number, (frames, close, release, _)) in enumerate(CR5_EPISODES.items()):
        episode, original = reader.episode(index), old.episode(number)
        spans = [(s.start, s.end, s.label) for s in episode.segments]
        bounds = [(0, close), (close, release), (release, frames)]
        assert spans == [(*b, name) for b, name in zip(bounds, NAMES, strict=True)]
        assert np.array_equal(episode.action, original.action)
        assert np.array_equal(episode.state, original.state)


def test_cr5_v3_pictures_are_those_of_the_source():
    """The second tree is a smaller copy: its frames are nearest to the source frames of equal number.

    Where the arm rests, neighbouring frames are equal up to coding noise: so a share of frames is asked for.
    """
    new, old = LeRobotReader(need(CR5_V3)), LeRobotReader(need(CR5))

    def small(frames):
        return [
            np.asarray(Image.fromarray(p).resize((160, 90), Image.BOX), np.float32) for p in frames.frames()
        ]

    ours = small(new.episode(1).cameras["observation.images.wrist"])
    theirs = small(old.episode(51).cameras["observation.images.top"])
    nearest = [
        min(range(max(0, k - 3), min(193, k + 4)), key=lambda j: np.abs(ours[k] - theirs[j]).mean())
        for k in range(193)
    ]
    assert sum(j == k for k, j in enumerate(nearest)) >= 0.85 * 193


def test_decoding_cr5_costs_one_decode_per_frame():
    reader = LeRobotReader(need(CR5))
    episode = reader.episode(70)
    decode_counter.reset()
    frames = list(episode.cameras["observation.images.top"].frames())
    assert (len(frames), decode_counter.decoded, decode_counter.converted) == (181, 181, 181)
    assert frames[0].shape == (480, 640, 3)


def test_g1_with_labels_from_a_file(tmp_path):
    reader = LeRobotReader(need(G1), mode="strict")
    lengths = {29: 221, 30: 277, 31: 267, 59: 280, 82: 260, 99: 265}
    assert reader.indices() == list(lengths)
    assert reader.report()["frames"] == 1570
    assert [finding["code"] for finding in reader.report()["findings"]] == ["episodes_absent"]
    episode = reader.episode(59)
    assert episode.state.shape == (280, 26)
    assert episode.metadata["state_names"][0] == "kLeftShoulderPitch"
    assert len(episode.metadata["action_names"]) == 26
    path = tmp_path / "labels.csv"
    rows = [
        f"{n},0,{t // 2},reach for the bottle\n{n},{t // 2},{t},lift the bottle" for n, t in lengths.items()
    ]
    path.write_text("episode,start,end,label\n" + "\n".join(rows) + "\n")
    labeler = FileLabels(path=str(path))
    assert labeler.episodes == list(lengths)
    for episode in reader.episodes():
        half = episode.num_frames // 2
        assert episode.num_frames == lengths[episode.episode_index]
        assert labeler(episode).labels() == ["reach for the bottle"] * half + ["lift the bottle"] * (
            episode.num_frames - half
        )
