import json

import pytest

from memer.errors import MemerError
from memer.journal import RolloutJournal
from memer.keyframes import KeyframeRules
from memer.rollout import rollout_offline
from tests.memer.planner_doubles import PicturePlanner, painted_episode, small_contract, without_timing

SETTINGS = {"eval_stride": 1, "memory_source": "predicted", "keys": ("a", "b")}
INDICES = (4, 1, 0, 3)


def play(journal: RolloutJournal, stop_after: int | None = None, batch_size: int = 2) -> int:
    """Evaluate what is not finished; returns the number of planner questions."""
    todo = [index for index in INDICES if index not in journal.finished]
    planner = PicturePlanner(parse_failures=True)
    rollouts = rollout_offline(
        (painted_episode(index, 20 + 5 * index) for index in todo),
        planner,
        small_contract(),
        KeyframeRules.all_last(),
        batch_size=batch_size,
    )
    for count, rollout in enumerate(rollouts):
        if count == stop_after:
            break
        journal.append(rollout)
    return sum(planner.calls)


def results(journal: RolloutJournal, path) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    journal.write_predictions(path, order=INDICES)
    rows = [without_timing(json.loads(line)) for line in path.read_text().splitlines()]
    return rows, [journal.score(index).to_dict() for index in INDICES]


@pytest.fixture
def whole(tmp_path):
    journal = RolloutJournal(tmp_path / "whole", settings=SETTINGS)
    play(journal, batch_size=1)
    return results(journal, tmp_path / "whole.jsonl")


@pytest.mark.parametrize("stop_after", [0, 1, 3])
def test_a_stopped_evaluation_continues_to_the_same_results(tmp_path, whole, stop_after):
    play(RolloutJournal(tmp_path, settings=SETTINGS), stop_after=stop_after)
    journal = RolloutJournal(tmp_path, settings=SETTINGS)
    assert len(journal.finished) == stop_after
    asked = play(journal)
    assert asked == sum(20 + 5 * i for i in INDICES if i not in list(journal.finished)[:stop_after])
    assert results(journal, tmp_path / "predictions.jsonl") == whole


@pytest.mark.parametrize("file", ["rows.jsonl", "finished.jsonl"])
def test_half_written_lines_are_cut_off(tmp_path, whole, file):
    play(RolloutJournal(tmp_path, settings=SETTINGS), stop_after=2)
    with (tmp_path / "partial" / file).open("ab") as stream:
        stream.write(b'{"episode_index": 3, "start": 0, "e')
    journal = RolloutJournal(tmp_path, settings=SETTINGS)
    assert len(journal.finished) == 2
    play(journal)
    assert results(journal, tmp_path / "predictions.jsonl") == whole
    assert results(RolloutJournal(tmp_path, settings=SETTINGS), tmp_path / "predictions.jsonl") == whole


def test_rows_without_their_finished_line_do_not_count(tmp_path, whole):
    play(RolloutJournal(tmp_path, settings=SETTINGS), stop_after=2)
    path = tmp_path / "partial" / "finished.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0])
    journal = RolloutJournal(tmp_path, settings=SETTINGS)
    assert len(journal.finished) == 1
    play(journal)
    assert results(journal, tmp_path / "predictions.jsonl") == whole


def test_other_settings_are_refused(tmp_path):
    RolloutJournal(tmp_path, settings=SETTINGS)
    with pytest.raises(MemerError, match=r"eval_stride: 1 then, 5 now.*run_id"):
        RolloutJournal(tmp_path, settings={**SETTINGS, "eval_stride": 5})


def test_forgotten_episodes_are_played_again(tmp_path, whole):
    journal = RolloutJournal(tmp_path, settings=SETTINGS)
    play(journal)
    journal.forget([1, 99])
    again = RolloutJournal(tmp_path, settings=SETTINGS)
    assert sorted(again.finished) == [0, 3, 4]
    play(again)
    assert results(again, tmp_path / "predictions.jsonl") == whole


def test_removed_journal_leaves_nothing(tmp_path):
    journal = RolloutJournal(tmp_path / "run", settings=SETTINGS)
    play(journal)
    journal.remove()
    assert list((tmp_path / "run").iterdir()) == []
