"""Annotation entries as segments: levels, merging, and the errors that ask for a decision."""

import pytest

from data.rmbench.annotations import MergeRule, load_annotations, parse_entries
from memer.episode import Segment
from memer.errors import MemerError, UsageError

LEFT = "Press the left button one time."
MIDDLE = "Press the middle button one time."
CONFIRM = "Press the confirm button."


def segments(rule, *entries, num_frames=100):
    parsed = parse_entries([list(entry) for entry in entries], where="file: episode 3")
    return rule.segments(parsed, num_frames=num_frames, where="file: episode 3")


def test_subtasks_are_kept_one_by_one():
    found = segments(MergeRule(), ("a", 3), ("b", 1), ("a", 6))
    assert found == (Segment(0, 3, "a"), Segment(3, 4, "b"), Segment(4, 10, "a"))


def test_the_annotation_may_fill_the_episode_but_not_exceed_it():
    assert segments(MergeRule(), ("a", 60), ("b", 40))[-1].end == 100
    with pytest.raises(MemerError, match="episode 3: the annotation names 101 frames, the episode has 100"):
        segments(MergeRule(), ("a", 60), ("b", 41))


def test_a_repeated_text_asks_for_a_decision():
    with pytest.raises(UsageError) as caught:
        segments(MergeRule(), ("x", 2), ("grasp", 3), ("grasp", 4), ("y", 1))
    message = str(caught.value)
    assert "\n" not in message
    for part in ("episode 3: entries 1..2", "'grasp'", "merge=adjacent_equal", "merge=grouped", "repeatable"):
        assert part in message


def test_a_text_declared_repeatable_keeps_its_segments_apart():
    found = segments(MergeRule(repeatable=(LEFT,)), (LEFT, 3), (LEFT, 4), (CONFIRM, 2))
    assert found == (Segment(0, 3, LEFT), Segment(3, 7, LEFT), Segment(7, 9, CONFIRM))


def test_more_than_one_confirm_proves_primitives_whatever_is_declared():
    rule = MergeRule(repeatable=(LEFT, CONFIRM))
    with pytest.raises(UsageError, match=r"entries 1\.\.3 all say 'Press the confirm button\.'.*primitives"):
        segments(rule, (LEFT, 3), (CONFIRM, 2), (CONFIRM, 2), (CONFIRM, 2))


def test_primitives_of_one_text_are_joined():
    rule = MergeRule(merge="adjacent_equal")
    found = segments(rule, ("put it in", 3), ("Put it  in", 4), ("try", 2), ("put it in", 5))
    assert found == (Segment(0, 7, "put it in"), Segment(7, 9, "try"), Segment(9, 14, "put it in"))


def test_joining_counted_presses_is_refused():
    with pytest.raises(UsageError, match=r"entries 0\.\.5 .*one time.*merge=grouped"):
        segments(MergeRule(merge="adjacent_equal"), *[(LEFT, 3)] * 6, (CONFIRM, 1))


def test_groups_cut_repeated_presses_and_join_the_rest():
    rule = MergeRule(merge="grouped", groups={LEFT: 3, MIDDLE: 3})
    found = segments(rule, *[(LEFT, 2)] * 6, *[(MIDDLE, 1)] * 3, *[(CONFIRM, 4)] * 3)
    assert found == (
        Segment(0, 6, LEFT),
        Segment(6, 12, LEFT),
        Segment(12, 15, MIDDLE),
        Segment(15, 27, CONFIRM),
    )


def test_a_group_that_is_not_full_is_an_error():
    rule = MergeRule(merge="grouped", groups={LEFT: 3})
    with pytest.raises(MemerError, match=r"entries 0\.\.3: 4 times .* not a multiple of source\.groups=3"):
        segments(rule, *[(LEFT, 2)] * 4)


def test_a_counted_text_without_a_group_is_refused():
    rule = MergeRule(merge="grouped", groups={LEFT: 3})
    with pytest.raises(UsageError, match=r"entries 3\.\.5 .*source\.groups"):
        segments(rule, *[(LEFT, 2)] * 3, *[(MIDDLE, 1)] * 3)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"a": 3}, "holds a dict"),
        ([["a", 3], ["b"]], r"entry 1: \['b'\], must be \[text, frames\]"),
        ([["", 3]], "entry 0: text '' is empty"),
        ([[7, 3]], "entry 0: text 7 is empty or no text"),
        ([["a", 0]], "entry 0: 0 frames"),
        ([["a", 2.5]], r"entry 0: 2\.5 frames"),
        ([["a", True]], "entry 0: True frames"),
    ],
)
def test_wrong_entries_are_named(value, named):
    with pytest.raises(MemerError, match=f"file: episode 3.*{named}"):
        parse_entries(value, where="file: episode 3")


def test_the_file_is_an_object_of_episodes(tmp_path):
    assert load_annotations(tmp_path) is None
    path = tmp_path / "language_annotation.json"
    path.write_text('{"episode_12": [["a", 1]], "episode_3": []}', encoding="utf-8")
    assert load_annotations(tmp_path) == {12: [["a", 1]], 3: []}
    path.write_text('{"episode12": []}', encoding="utf-8")
    with pytest.raises(MemerError, match="key 'episode12', must be episode_N"):
        load_annotations(tmp_path)
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(MemerError, match="holds a list"):
        load_annotations(tmp_path)
