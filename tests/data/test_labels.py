"""Labelers and their policies on small episodes in memory."""

import json
import pickle

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from data.labels import FileLabels, GripperLabels, NativeLabels
from data.spans import Span, resolve_spans
from memer.episode import ArrayFrames, Episode, InstructionSpan, Segment, labels_from_segments
from memer.errors import MemerError, SourceUnavailableError, UsageError


def episode(index=0, *, gripper=None, length=12, segments=()):
    action = np.zeros((length, 2), dtype=np.float32)
    if gripper is not None:
        action[:, 1] = gripper
    return Episode(
        source="desk",
        episode_index=index,
        fps=10,
        cameras={"base": ArrayFrames(np.zeros((length, 4, 4, 3), dtype=np.uint8))},
        state=np.zeros((length, 3), dtype=np.float32),
        action=action,
        instructions=(InstructionSpan(0, "tidy up"),),
        segments=segments,
        metadata={"action_names": ["lift", "gripper"]},
    )


C09 = [Span(0, 7, "a"), Span(7, 7, "b"), Span(7, 8, "c"), Span(10, 19, "d"), Span(17, 26, "e")]


@pytest.mark.parametrize("given", [C09, C09[::-1]])
@pytest.mark.parametrize(("overlap", "last"), [("later", [6, 7, 16, 25]), ("earlier", [6, 7, 18, 25])])
def test_gaps_overlaps_disorder_and_one_frame_segments(given, overlap, last):
    """C09, both orders, both owners."""
    found = resolve_spans(given, num_frames=26, overlap=overlap)
    assert (found.empty, found.one_frame, found.clipped) == (1, 1, 0)
    assert found.gap_frames == (8, 9)
    assert found.overlap_frames == (17, 18)
    assert [segment.end - 1 for segment in found.segments] == last
    assert labels_from_segments(found.segments, 26)[7:11] == ["c", None, None, "d"]


def test_overlap_as_an_error_names_both_ranges():
    with pytest.raises(MemerError, match=r"frame 17 lies in \[10, 19\) 'd' and in \[17, 26\) 'e'"):
        resolve_spans(C09, num_frames=26, overlap="error")


def test_ranges_outside_the_episode_are_cut_and_counted():
    found = resolve_spans([Span(-3, 2, "a"), Span(4, 99, "b"), Span(20, 30, "c")], num_frames=6)
    assert found.segments == (Segment(0, 2, "a"), Segment(4, 6, "b"))
    assert found.clipped == 3


def test_equal_neighbours_stay_two_segments_and_an_enclosing_range_is_split():
    assert len(resolve_spans([Span(0, 2, "a"), Span(2, 4, "a")], num_frames=4).segments) == 2
    split = resolve_spans([Span(0, 9, "a"), Span(3, 5, "b")], num_frames=9).segments
    assert [(s.start, s.end, s.label) for s in split] == [(0, 3, "a"), (3, 5, "b"), (5, 9, "a")]


ROWS = [
    {"episode": 3, "start": 4, "end": 12, "label": "  put  it down "},
    {"episode": 3, "start": 0, "end": 4, "label": "take it"},
    {"episode": 8, "start": 0, "end": 5, "label": "take it"},
]


def write_labels(folder, kind):
    path = folder / f"labels.{kind}"
    if kind == "csv":
        lines = ["episode, start, end, label"]
        lines += [f'{r["episode"]}, {r["start"]}, {r["end"]}, "{r["label"]}"' for r in ROWS]
        path.write_text("\n".join(lines))
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps(row) for row in ROWS))
    else:
        path.write_text(json.dumps(ROWS))
    return path


@pytest.mark.parametrize("kind", ["csv", "json", "jsonl"])
def test_labels_from_a_file(tmp_path, kind):
    labeler = FileLabels(path=str(write_labels(tmp_path, kind)))
    labeler = pickle.loads(pickle.dumps(labeler))
    labelled = labeler(episode(3))
    assert labelled.segments == (Segment(0, 4, "take it"), Segment(4, 12, "put it down"))
    assert labelled.metadata["label_spans"]["gap_frames"] == []
    assert labeler(episode(8)).labels() == ["take it"] * 5 + [None] * 7
    assert labeler(episode(5)).segments == ()
    assert labeler.episodes == [3, 8]


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        (
            "a.csv",
            "episode,start,end\n1,2,3\n",
            r"a.csv: header lacks label; found \['episode', 'start', 'end'\]",
        ),
        (
            "a.csv",
            "episode,start,end,label\n1,x,3,go\n",
            r"a.csv: line 2: start is 'x', must be a whole number",
        ),
        ("a.csv", "episode,start,end,label\n1,5,3,go\n", r"line 2: range \[5, 3\)"),
        ("a.csv", "episode,start,end,label\n1,-5,3,go\n", r"line 2: range \[-5, 3\)"),
        ("a.csv", "episode,start,end,label\n1,0,3, \n", r"line 2: label is empty"),
        ("a.json", "[{]", r"a.json: not JSON"),
        ("a.json", '{"a": 1}', r"a.json: must hold a list of objects"),
        ("a.json", '[{"episode": true, "start": 0, "end": 1, "label": "x"}]', r"entry 1: episode is True"),
        ("a.json", '[{"episode": 1, "start": 0.5, "end": 1, "label": "x"}]', r"entry 1: start is 0.5"),
    ],
)
def test_label_files_with_mistakes_name_the_place(tmp_path, name, text, match):
    (tmp_path / name).write_text(text)
    with pytest.raises(MemerError, match=match):
        FileLabels(path=str(tmp_path / name))


def test_a_label_file_that_is_not_there_and_ranges_past_the_end(tmp_path):
    with pytest.raises(SourceUnavailableError, match="no such label file"):
        FileLabels(path=str(tmp_path / "none.csv"))
    path = tmp_path / "a.csv"
    path.write_text("episode,start,end,label\n0,0,13,go\n")
    with pytest.raises(MemerError, match="'go' ends at frame 13, the episode has 12"):
        FileLabels(path=str(path))(episode(0))


def test_gripper_transitions_belong_to_the_first_frame_with_the_new_value():
    labeler = GripperLabels(names=["reach", "carry", "release"])
    signal = [0] * 4 + [1] * 5 + [0] * 3
    expected = (Segment(0, 4, "reach"), Segment(4, 9, "carry"), Segment(9, 12, "release"))
    assert labeler(episode(gripper=signal)).segments == expected
    assert (
        GripperLabels(names=["reach", "carry", "release"], channel="gripper")(
            episode(gripper=signal)
        ).segments
        == expected
    )


def test_gripper_excursions_can_be_ignored():
    signal = [0] * 4 + [1, 0] + [1] * 3 + [0] * 3
    names = ["reach", "carry", "release"]
    with pytest.raises(MemerError, match=r"crosses 0.5 4 times \(frames 4, 5, 6, 9\), 3 names need 2"):
        GripperLabels(names=names)(episode(7, gripper=signal))
    segments = GripperLabels(names=names, min_frames=2)(episode(gripper=signal)).segments
    assert [(s.start, s.end) for s in segments] == [(0, 6), (6, 9), (9, 12)]


def test_gripper_mistakes():
    with pytest.raises(MemerError, match=r"episode 7 of desk: .* crosses 0.5 0 times"):
        GripperLabels(names=["a", "b"])(episode(7, gripper=[0] * 12))
    with pytest.raises(UsageError, match=r"no component 'hand'; components: \['lift', 'gripper'\]"):
        GripperLabels(names=["a"], channel="hand")(episode())
    with pytest.raises(UsageError, match="action has 2 components, channel=5"):
        GripperLabels(names=["a"], channel=5)(episode())
    for wrong in ({"names": []}, {"names": ["a", " "]}, {"names": ["a"], "feature": "force"}):
        with pytest.raises(UsageError):
            GripperLabels(**wrong)


def test_native_labels_are_kept_as_they_are():
    given = episode(segments=(Segment(2, 9, "go"),))
    assert NativeLabels()(given) is given


@pytest.mark.parametrize(
    ("name", "kind"), [("native", NativeLabels), ("gripper", GripperLabels), ("file", FileLabels)]
)
def test_the_config_group_builds_its_labeler(tmp_path, name, kind):
    config = OmegaConf.load(f"conf/labels/{name}.yaml")
    if name == "file":
        config.path = str(write_labels(tmp_path, "csv"))
    labeler = instantiate(config, _convert_="all")
    assert isinstance(labeler, kind)
    fields = {f for f in kind.__dataclass_fields__ if not f.startswith("_")}
    assert {key for key in config if key != "_target_"} == fields
