"""Comparison of runs from their summaries alone."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from memer.compare import compare, expand
from memer.errors import MemerError, UsageError
from memer.summary import read_summary, update_summary


def make_run(
    folder: Path,
    metrics: dict[str, Any],
    *,
    ci: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    status: str = "ok",
) -> Path:
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra/resolved.json").write_text(json.dumps(config or {}))
    (folder / "status.json").write_text(json.dumps({"status": status, "error": "ValueError: boom"}))
    update_summary(folder, metrics=metrics, ci=ci or {})
    return folder


def config(form: str, seed: int = 0) -> dict[str, Any]:
    return {
        "name": "forms",
        "run_id": f"{form}-{seed}",
        "group": "forms",
        "seed": seed,
        "contract": {"memory_form": form, "fps": 15},
        "planner": {"_target_": f"memer.planners.{form}_planner"},
    }


def test_a_table_with_intervals_in_every_form(tmp_path: Path) -> None:
    for form, value in (("none", 0.4), ("image", 0.9)):
        make_run(
            tmp_path / "forms" / form,
            {"success_rate": value, "other": 7, "parse_failure_rate": None},
            ci={"success_rate": [value - 0.1, value + 0.05]},
            config=config(form),
        )
    table = compare([tmp_path / "forms"], tmp_path / "out")
    assert table.exit_code == 0
    # What differs is shown; what is equal, and what only names the place, is not.
    assert table.settings == ("contract.memory_form",)
    assert [row.group for row in table.rows] == ["forms", "forms"]
    markdown = (tmp_path / "out/comparison.md").read_text()
    assert "0.9 [0.8, 0.95]" in markdown
    assert "other" not in markdown
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out/comparison.csv").read_text())))
    by_run = {row["run"]: row for row in rows}
    assert by_run["image"]["contract.memory_form"] == "image"
    assert float(by_run["none"]["success_rate_low"]) == pytest.approx(0.3)
    assert float(by_run["none"]["other"]) == 7
    page = (tmp_path / "out/report.html").read_text()
    assert "<svg" in page
    assert "0.9 [0.8, 0.95]" in page


def test_missing_and_unfinished_runs_are_named_and_the_rest_compared(tmp_path: Path) -> None:
    good = make_run(tmp_path / "good", {"success_rate": 0.5})
    failed = make_run(tmp_path / "failed", {"success_rate": 0.7}, status="failed")
    killed = make_run(tmp_path / "killed", {"success_rate": 0.7}, status="running")
    empty = make_run(tmp_path / "empty", {})
    (empty / "summary.json").unlink()
    broken = make_run(tmp_path / "broken", {})
    (broken / "summary.json").write_text('{"metrics": {"success_rate": 0.')
    table = compare([good, failed, killed, empty, broken, tmp_path / "nowhere"])
    assert table.exit_code == 1
    assert [row.name for row in table.rows] == ["good"]
    assert set(table.refused) == {
        str(tmp_path / n) for n in ("failed", "killed", "empty", "broken", "nowhere")
    }
    for folder, reason in table.refused.items():
        assert folder in reason
    assert "ValueError: boom" in table.refused[str(failed)]
    assert "'running'" in table.refused[str(killed)]
    assert "left out" in table.markdown()
    with pytest.raises(MemerError, match=r"no run to compare.*failed.*nowhere"):
        compare([failed, tmp_path / "nowhere"])


def test_runs_that_differ_in_the_seed_only_are_summed_up(tmp_path: Path) -> None:
    values = {("none", 0): 0.2, ("none", 1): 0.4, ("image", 0): 0.8, ("image", 1): 1.0}
    for (form, seed), value in values.items():
        make_run(tmp_path / f"{form}-{seed}", {"success_rate": value}, config=config(form, seed))
    table = compare([tmp_path])
    merged = {row.settings["contract.memory_form"]: row for row in table.over_seeds}
    assert merged["none"].metrics["success_rate"] == pytest.approx(0.3)
    assert merged["image"].ci["success_rate"] == (0.8, 1.0)
    assert [row.runs for row in table.over_seeds] == [2, 2]
    assert "0.3 (0.2 to 0.4)" in table.markdown()


def test_runs_of_different_settings_are_never_summed_up(tmp_path: Path) -> None:
    for form in ("none", "image"):
        make_run(tmp_path / form, {"success_rate": 0.5}, config=config(form))
    assert compare([tmp_path]).over_seeds == ()


def test_groups_keep_together_and_are_shown(tmp_path: Path) -> None:
    for sweep, form in (("a", "none"), ("b", "none"), ("a", "image")):
        make_run(tmp_path / sweep / form, {"success_rate": 0.5}, config={**config(form), "group": sweep})
    table = compare([tmp_path / "a/none", tmp_path / "b", tmp_path / "a/image"])
    assert [(row.group, row.name) for row in table.rows] == [
        ("a", "a/none"),
        ("a", "a/image"),
        ("b", "b/none"),
    ]
    assert table.markdown().startswith("| group")


def test_folders_and_patterns_stand_for_their_runs(tmp_path: Path) -> None:
    for name in ("one", "two", "two.old1"):
        make_run(tmp_path / "sweep" / name, {"x": 1.0})
    both = [tmp_path / "sweep/one", tmp_path / "sweep/two"]
    assert expand([tmp_path / "sweep"]) == both
    assert expand([str(tmp_path / "sweep/*"), tmp_path / "sweep/one"]) == both
    with pytest.raises(UsageError, match="no folder fits"):
        expand([str(tmp_path / "nope*")])
    with pytest.raises(UsageError, match="no run named"):
        expand([])


def test_asked_figures_are_shown_or_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "a", {"train/loss": 1.0, "val/loss": 2.0, "z": 3.0})
    assert compare([tmp_path / "a"], metrics=["z", "*loss"]).columns == ("z", "train/loss", "val/loss")
    with pytest.raises(UsageError, match=r"'accuracy'.*train/loss"):
        compare([tmp_path / "a"], metrics=["accuracy"])


def test_a_summary_grows_and_never_holds_nan(tmp_path: Path) -> None:
    update_summary(tmp_path, metrics={"a": 1.0, "b": float("nan")}, runtime={"seconds": 3})
    update_summary(tmp_path, metrics={"a": 2.0, "c": 4}, ci={"c": (3, 5)})
    raw = json.loads((tmp_path / "summary.json").read_text())
    assert raw["metrics"] == {"a": 2.0, "b": None, "c": 4}
    assert raw["runtime"] == {"seconds": 3}
    summary = read_summary(tmp_path)
    assert summary.metrics == {"a": 2.0, "c": 4.0}
    assert summary.ci == {"c": (3.0, 5.0)}


def test_a_flat_summary_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"loss": 0.5, "name": "x", "ok": true, "deep": {"er": 2}}')
    assert read_summary(tmp_path).metrics == {"loss": 0.5, "deep.er": 2.0}
