"""Keyframe rules: matching, selection, the shipped files, and every malformed file as a one-line error."""

import json
import logging
import pickle
from pathlib import Path

import pytest

from memer.episode import Segment, label_key, segments_from_labels
from memer.errors import MemerError, SourceUnavailableError, UsageError
from memer.keyframes import KeyframeRules

SHIPPED = Path(__file__).parents[2] / "conf" / "rules"


def rules(*listed: dict, **extra) -> KeyframeRules:
    return KeyframeRules.from_value({"rules": list(listed), **extra})


@pytest.mark.parametrize(
    ("select", "frames"), [("first", [2]), ("last", [5]), ("both", [2, 5]), ("none", [])]
)
def test_select_of_a_segment(select, frames):
    chosen = rules({"exact": "b", "select": select})
    assert chosen.select(["a", "a", "b", "b", "b", "b", "a"]) == frames


def test_a_one_frame_segment_gives_one_index_for_both():
    assert rules({"exact": "b", "select": "both"}).select(["a", "b", "a"]) == [1]


def test_default_select_is_none_and_so_is_a_rule_without_select():
    labels = ["a", "a", "b"]
    assert rules({"exact": "a"}).select(labels) == []
    assert rules({"exact": "a", "select": "last"}).select(labels) == [1]
    assert rules({"exact": "a", "select": "last"}, default_select="first").select(labels) == [1, 2]


def test_first_match_wins_in_file_order():
    specific, general = {"exact": "take cup", "select": "first"}, {"pattern": "take", "select": "last"}
    labels = ["take cup", "take cup", "take jar", "take jar"]
    assert rules(specific, general).select(labels) == [0, 3]
    assert rules(general, specific).select(labels) == [1, 3]


def test_patterns_search_and_case_is_ignored_unless_asked():
    labels = ["Please Wipe the lid", "x"]
    assert rules({"pattern": "wipe", "select": "last"}).select(labels) == [0]
    assert rules({"pattern": "wipe", "select": "last", "ignore_case": False}).select(labels) == []
    assert rules({"exact": "X", "select": "last"}).select(labels) == [1]
    assert rules({"label": "X", "select": "last", "ignore_case": False}).select(labels) == []


def test_unlabelled_frames_end_a_segment_and_belong_to_none():
    assert KeyframeRules.all_last().select(["A", "A", None, "A", None, None]) == [1, 3]
    assert KeyframeRules.all_last().select([None, None]) == []
    assert KeyframeRules.all_last().select([]) == []


def test_segment_ids_split_equal_neighbours():
    labels = ["scoop"] * 6
    assert KeyframeRules.all_last().select(labels) == [5]
    assert KeyframeRules.all_last().select(labels, segment_ids=[0, 0, 0, 1, 1, 1]) == [2, 5]


def test_spans_of_a_source_are_kept():
    spans = [Segment(0, 7, "a"), Segment(7, 8, "a"), Segment(10, 17, "b"), Segment(17, 26, "a")]
    assert KeyframeRules.all_last().select_segments(spans) == [6, 7, 16, 25]


def test_two_spellings_of_one_label_make_one_segment_and_match_one_rule():
    composed, decomposed = "tasse \u00e0 caf\u00e9", "tasse a\u0300 cafe\u0301"
    assert composed != decomposed
    assert label_key(composed) == label_key(decomposed)
    labels = [composed, composed, decomposed, decomposed, "b"]
    assert segments_from_labels(labels) == (Segment(0, 4, composed), Segment(4, 5, "b"))
    for written in (composed, decomposed):
        assert rules({"exact": written, "select": "last"}).select(labels) == [3]
        assert rules({"pattern": "caf\u00e9$", "select": "first"}).select([decomposed, written]) == [0]


@pytest.mark.parametrize("label", ["\u628a\u52fa\u5b50\u653e\u56de\u7897\u91cc", "take the CUP", "a.b"])
def test_exact_is_not_a_pattern(label):
    assert rules({"exact": label, "select": "last"}).select([label, label, "axb"]) == [1]


TASK_LABELS = {
    "object_search": {
        "look inside the left bin": "last",
        "Look inside the middle bin": "last",
        "take the duck from the left bin and place it in the white bin": "none",
        "take the duck from the left bin and place in the white bin": "none",
        "something else": "none",
    },
    "counting_scoops": {
        "place a scoop of peanuts in the green bowl": "last",
        "pick up the scooper": "none",
        "reset scooper position": "none",
        "drop the scooper": "none",
    },
    "dust_and_replace": {
        "take bear off bottom shelf": "last",
        "take car off top shelf": "last",
        "take car off middle shelf": "none",
        "pick up duster": "last",
        "dust bottom shelf": "last",
        "place the bear on the bottom shelf": "last",
        "reset duster": "none",
        "put down duster": "none",
    },
}


@pytest.mark.parametrize("task", TASK_LABELS)
def test_shipped_rules_of_the_three_tasks(task):
    shipped = KeyframeRules.from_file(SHIPPED / f"{task}.json")
    assert shipped.default_select == "none"
    assert {label: shipped.match(label)[1] for label in TASK_LABELS[task]} == TASK_LABELS[task]
    unmatched = {label for label in TASK_LABELS[task] if shipped.match(label)[0] is None}
    assert unmatched == {"something else", "take car off middle shelf"} & set(TASK_LABELS[task])


def test_shipped_all_last_is_the_word_all_last():
    from_file = KeyframeRules.from_file(SHIPPED / "all_last.json")
    assert from_file == KeyframeRules.all_last() == KeyframeRules.from_value("all_last")
    assert from_file.rules_hash == KeyframeRules.all_last().rules_hash
    assert from_file.select(["a", "a", "b"]) == [1, 2]


def test_every_shipped_rule_file_is_read():
    files = sorted(SHIPPED.glob("*.json"))
    assert len(files) >= 4
    assert len({KeyframeRules.from_file(file).rules_hash for file in files}) == len(files)


def test_yaml_bare_list_and_json_give_the_same_rules(tmp_path):
    listed = [{"pattern": "^dust", "select": "last"}]
    forms = {
        "a.json": json.dumps({"rules": listed}),
        "b.json": json.dumps(listed),
        "c.yaml": "default_select: none\nrules:\n  - {pattern: ^dust, select: last, ignore_case: true}\n",
        "d.yml": "- {pattern: ^dust, select: last}\n",
    }
    read = []
    for name, text in forms.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        read.append(KeyframeRules.from_file(tmp_path / name))
    assert len({one.rules_hash for one in read}) == 1
    assert all(one == read[0] for one in read)


def test_hash_follows_order_select_and_default():
    a, b = {"exact": "a", "select": "last"}, {"exact": "b", "select": "last"}
    different = [
        rules(a, b),
        rules(b, a),
        rules(a),
        rules({**a, "select": "first"}),
        rules({**a, "ignore_case": False}),
        rules({"pattern": "a", "select": "last"}),
        rules(a, default_select="last"),
    ]
    assert len({one.rules_hash for one in different}) == len(different)
    assert rules({"label": "a", "select": "last"}).rules_hash == rules(a).rules_hash


def test_default_of_the_file_wins_and_the_log_says_so(tmp_path, caplog):
    path = tmp_path / "r.json"
    path.write_text('{"default_select": "last", "rules": []}')
    with caplog.at_level(logging.WARNING):
        assert KeyframeRules.from_file(path, default_select="first").default_select == "last"
    assert "'last' of the file is used, not 'first'" in caplog.text
    caplog.clear()
    assert KeyframeRules.from_file(path, default_select="last").default_select == "last"
    path.write_text("[]")
    assert KeyframeRules.from_file(path, default_select="first").default_select == "first"
    assert KeyframeRules.from_file(path).default_select == "none"
    assert not caplog.text


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ([{"patern": "^a"}], r"rules\[0\]: unknown key 'patern'"),
        ([{"exact": "a"}, {"exact": "b", "selct": "last"}], r"rules\[1\]: unknown key 'selct'"),
        ([{"exact": "a", "select": "lst"}], r"rules\[0\]: select: 'lst'"),
        ([{"exact": "a", "select": ["last"]}], r"rules\[0\]: select"),
        ([{"pattern": "(a"}], r"rules\[0\]: pattern '\(a' is no regular expression"),
        ([{"pattern": "a", "exact": "a"}], r"rules\[0\]: has pattern and exact"),
        ([{"select": "last"}], r"rules\[0\]: has none of"),
        ([{"exact": "a", "ignore_case": "no"}], r"rules\[0\]: ignore_case 'no'"),
        ([{"exact": 3}], r"rules\[0\]: exact 3"),
        ([{"pattern": ""}], r"rules\[0\]: pattern ''"),
        (["last"], r"rules\[0\]: 'last', must be an object"),
        ({"rules": {"exact": "a"}}, r"must be an object or a list"),
        ({"rules": "last"}, r"must be an object or a list"),
        ({"rules": [], "default": "last"}, r"unknown key 'default'"),
        ({"default_select": "always"}, r"default_select: 'always'"),
        ({}, r"an empty object"),
        (7, r"must be an object or a list"),
    ],
)
def test_malformed_rules_name_the_file_and_the_rule(value, named, tmp_path):
    path = tmp_path / "typo.json"
    path.write_text(json.dumps(value), encoding="utf-8")
    with pytest.raises(MemerError, match=named) as caught:
        KeyframeRules.from_file(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", "{"),
        ("a.json", '[{"exact": "a", "exact": "b"}]'),
        ("a.yaml", "a: [\n"),
        ("a.json", "\xff\xfe"),
    ],
)
def test_an_unreadable_file_is_one_line(name, text, tmp_path):
    path = tmp_path / name
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(MemerError) as caught:
        KeyframeRules.from_file(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_is_assumed_without_rules(tmp_path):
    with pytest.raises(UsageError, match="all_last"):
        KeyframeRules.from_value(None)
    with pytest.raises(UsageError, match="all_lsat"):
        KeyframeRules.from_value("all_lsat")
    with pytest.raises(SourceUnavailableError, match=r"missing\.json"):
        KeyframeRules.from_file(tmp_path / "missing.json")


def test_report_counts_per_label_and_warns_about_labels_without_rule(caplog):
    chosen = rules(
        {"pattern": "^look", "select": "last"}, {"exact": "rest"}, {"exact": "never there", "select": "both"}
    )
    episodes = [
        [Segment(0, 4, "look left"), Segment(4, 6, "rest"), Segment(6, 9, "look left")],
        [Segment(0, 5, "wave")],
    ]
    with caplog.at_level(logging.WARNING):
        report = chosen.report(episodes)
    assert report["labels"]["look left"] == {
        "segments": 2,
        "frames": 7,
        "selected": 2,
        "rule": "rules[0] pattern '^look' -> last",
        "select": "last",
    }
    assert report["labels"]["rest"]["selected"] == 0
    assert report["labels"]["wave"]["rule"] is None
    assert report["unmatched"] == ["wave"]
    assert report["unused"] == ["rules[2] exact 'never there' -> both"]
    assert (report["selected"], report["episodes_without_keyframes"]) == (2, 1)
    assert "'wave'" in caplog.text
    json.dumps(report)


def test_all_last_does_not_warn_about_labels(caplog):
    KeyframeRules.all_last().report([[Segment(0, 5, "wave")]])
    assert not caplog.text


def test_rules_travel_to_worker_processes():
    chosen = rules({"pattern": "^look", "select": "last"})
    chosen.select(["look", "x"])
    assert pickle.loads(pickle.dumps(chosen)) == chosen
