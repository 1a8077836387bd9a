"""The report page, read back: what it shows, in which order, and that nothing outside the file is needed."""

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from memer.errors import MemerError, SourceUnavailableError
from memer.report import main, read_curves, write_report
from memer.svg import IntervalRow, interval_chart, line_chart, thin, ticks
from memer.timeline import label_colors, label_spans, shown_steps

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """Checks that tags close in order, and collects pictures, addresses and headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.addresses: list[str] = []
        self.headings: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [
            v or "" for n, v in attrs if n in ("src", "href", "srcset", "action", "xlink:href")
        ]
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] in ("h1", "h2", "h3"):
            self.headings.append(data)


def row(
    episode: int, t: int, *, said: str | None, true: str | None, memory: tuple[int, ...] = ()
) -> dict[str, Any]:
    return {
        "episode_index": episode,
        "timestep": t,
        "instruction": "find <b>it</b>",
        "predicted_subtask": said,
        "target_subtask": true,
        "normalized_correct": None if true is None else said == true,
        "parse_error": None if said else "no JSON",
        "mapped_keyframe_indices": [t] if t == 10 else [],
        "memory_indices_before": list(memory),
    }


def save_picture(path: Path, color: tuple[int, int, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (40, 30), color).save(path, quality=95)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "forms" / "image"
    folder.mkdir(parents=True)
    (folder / "status.json").write_text(json.dumps({"status": "ok", "command": ["train.py", "a=<b>"]}))
    (folder / "metrics.csv").write_text(
        "step,epoch,train/loss,val/loss,odd\n0,0,4.0,,1\n10,0,2.0,3.0,\n20,1,0.01,nan,2\n"
    )
    summary = {
        "metrics": {"success_rate": 0.25, "plain": 3.5},
        "ci": {"success_rate": [0.125, 0.5]},
        "contract": {"fps": 10},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    good = [row(1, t, said="look", true="look") for t in range(0, 30, 10)]
    bad = [row(2, 0, said="look", true="look"), row(2, 10, said=None, true="take")]
    bad += [
        row(2, 20, said="look", true="take", memory=(10,)),
        row(2, 30, said="take", true=None, memory=(10,)),
    ]
    (folder / "predictions.jsonl").write_text("".join(json.dumps(r) + "\n" for r in good + bad))
    episodes = [
        {"episode_index": 1, "outcome": "success", "steps": 30, "representatives": []},
        {"episode_index": 2, "outcome": "failure", "steps": 40, "representatives": [10]},
    ]
    (folder / "episodes.json").write_text(json.dumps(episodes))
    for frame, color in ((0, (250, 0, 0)), (10, (0, 250, 0)), (20, (0, 0, 250))):
        save_picture(folder / f"frames/episode_000002/frame_{frame:06d}.jpg", color)
    return folder


def test_the_page_is_whole_and_needs_nothing_else(run: Path) -> None:
    path = write_report(run)
    text = path.read_text()
    page = Page(text)
    assert path == run / "report.html"
    assert all(address.startswith("data:image/jpeg;base64,") for address in page.addresses)
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert "<b>it</b>" not in text  # text from data is text
    assert "a=&lt;b&gt;" in text


def test_worst_episodes_come_first_with_their_memory(run: Path) -> None:
    text = write_report(run).read_text()
    page = Page(text)
    assert [h for h in page.headings if h.startswith("Episode ")] == [
        "Episode 2: failure after 40 steps",
        "Episode 1: success after 30 steps",
    ]
    colors = []
    for address in page.addresses:
        with Image.open(io.BytesIO(base64.b64decode(address.split(",", 1)[1]))) as image:
            colors.append(max(range(3), key=image.convert("RGB").getpixel((5, 5)).__getitem__))
    # Marked: frame 10 without memory (green), then frame 20 (blue) with frame 10 as its memory (green).
    assert colors == [1, 1, 2]
    assert "memory 10" in text
    assert "now 20" in text
    assert "true is take" in text
    assert "no answer (no JSON)" in text


def test_figures_carry_their_intervals(run: Path) -> None:
    text = write_report(run).read_text()
    assert re.search(r"success_rate</td><td>0\.25</td><td>\[0\.125, 0\.5\]", text)
    assert "3.5" in text


def test_curves_leave_out_what_is_not_there(run: Path) -> None:
    curves = read_curves(run / "metrics.csv")
    assert curves["train/loss"] == [(0, 4.0), (10, 2.0), (20, 0.01)]
    assert [x for x, _ in curves["odd"]] == [0, 20]
    assert thin(curves["val/loss"]) == [(10, 3.0)]
    assert "Loss (log scale)" in write_report(run).read_text()
    (run / "metrics.csv").write_text("step,train/loss\n0,four\n")
    with pytest.raises(MemerError, match=r"metrics\.csv.*four"):
        write_report(run)


def test_sample_prompts_show_their_pictures(run: Path) -> None:
    save_picture(run / "samples/step_000005/0.jpg", (9, 9, 9))
    sample = {
        "sample_id": "episode_000004_t000008",
        "text": "Task: <image>",
        "images": [{"file": "step_000005/0.jpg", "caption": "now"}],
        "answer": '{"current_subtask": "x"}',
        "predicted": "rubbish",
    }
    (run / "samples/step_000005.json").write_text(json.dumps({"step": 5, "samples": [sample]}))
    text = write_report(run).read_text()
    assert "Task: &lt;image&gt;" in text
    assert "rubbish" in text
    assert "episode_000004_t000008, step 5" in text
    assert len(Page(text).addresses) == 4


def test_merges_show_their_scores_and_the_choice(run: Path) -> None:
    rows = [{"alpha": a, "folder": f"alpha_{a:.2f}", "success": s} for a, s in ((0.5, 0.25), (1.0, None))]
    (run / "merged").mkdir()
    (run / "merged/table.json").write_text(json.dumps({"best": 0.5, "rows": rows}))
    text = write_report(run).read_text()
    assert re.search(r"0\.5 \(chosen\)</td><td>0\.25</td></tr><tr><td>1</td><td></td>", text)


def test_rollouts_below_the_run_are_shown(run: Path) -> None:
    target = run / "rollout/alpha_0.80"
    target.mkdir(parents=True)
    for name in ("predictions.jsonl", "episodes.json", "summary.json"):
        (target / name).write_text((run / name).read_text())
    headings = Page(write_report(run).read_text()).headings
    assert "Rollout: rollout/alpha_0.80" in headings


def test_an_empty_run_folder_gives_a_page_and_a_missing_one_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    Page(write_report(tmp_path / "empty").read_text())
    with pytest.raises(SourceUnavailableError, match="nowhere"):
        write_report(tmp_path / "nowhere")
    assert main([str(tmp_path / "nowhere")]) == 3
    assert "error: " in capsys.readouterr().err


def test_a_damaged_row_is_named(run: Path) -> None:
    with (run / "predictions.jsonl").open("a") as file:
        file.write('{"episode_index": 2, "timest')
    with pytest.raises(MemerError, match=r"predictions\.jsonl: line 8"):
        write_report(run)


def test_spans_join_equal_neighbours_and_mark_what_is_missing() -> None:
    rows = [row(0, 0, said="a", true="a"), row(0, 5, said="a", true=None), row(0, 10, said=None, true="b")]
    colors = label_colors(rows)
    assert set(colors) == {"a", "b"}
    assert [(s.start, s.end, s.label) for s in label_spans(rows, "predicted_subtask", colors, end=15)] == [
        (0, 10, "a"),
        (10, 15, "no answer"),
    ]
    assert [s.label for s in label_spans(rows, "target_subtask", colors, end=15)] == ["a", "unlabelled", "b"]


def test_steps_without_all_their_pictures_are_not_shown(tmp_path: Path) -> None:
    rows = [row(0, t, said="a", true="a", memory=(0,) if t else ()) for t in (0, 10, 20)]
    for frame in (0, 20):
        save_picture(tmp_path / f"episode_000000/frame_{frame:06d}.jpg", (1, 2, 3))
    assert [r["timestep"] for r in shown_steps(rows, tmp_path)] == [0, 20]
    (tmp_path / "episode_000000/frame_000000.jpg").unlink()
    assert shown_steps(rows, tmp_path) == []


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.2, 8.9), (1e-6, 3e-6), (0.0, 48123.0), (5.0, 5.0)])
def test_ticks_are_few_and_inside(low: float, high: float) -> None:
    marks = ticks(low, high)
    assert 1 <= len(marks) <= 11
    assert all(low - 1e-9 <= mark <= high + 1e-9 for mark in marks)
    assert marks == sorted(set(marks))


def test_thinning_keeps_the_mean_and_the_ends_in_range() -> None:
    points = [(float(k), float(k % 7)) for k in range(5000)] + [(9e9, float("nan"))]
    thinned = thin(points, limit=100)
    assert len(thinned) == 100
    assert sum(y for _, y in thinned) / 100 == pytest.approx(sum(k % 7 for k in range(5000)) / 5000)


def test_charts_survive_single_and_equal_points() -> None:
    for series in ({"a": [(3.0, 2.0)]}, {"a": [(1.0, 2.0), (2.0, 2.0)]}, {"a": [(0.0, 0.0), (1.0, 0.0)]}):
        chart = line_chart(series, title="t")
        Page(chart)
        assert "nan" not in chart
    assert line_chart({"a": [(1.0, float("inf"))]}, title="t") == ""
    assert interval_chart([], title="t") == ""
    Page(interval_chart([IntervalRow("a", 5.0, None), IntervalRow("b", 5.0, (5.0, 5.0))], title="t"))
