"""The planning benchmark: its modes give the same plan, its table is complete, full memory is a row."""

import csv
from pathlib import Path

import pytest
import torch

from tests.bench.bench_planning import MODES, build, main


@pytest.mark.parametrize("finished", [0, 1, 3])
def test_every_mode_gives_the_same_plan(finished: int) -> None:
    planning = build("tiny", steps=2, device=torch.device("cpu"))
    before = planning.before(finished)
    plans = [planning.call(before, mode) for mode in MODES]
    assert plans[0].shape == (1, 3, 8, 32, 32)
    for plan in plans[1:]:
        torch.testing.assert_close(plan, plans[0], rtol=0, atol=1e-4)


def test_the_table_is_complete(tmp_path: Path) -> None:
    """With the second point beyond the limit: a row without figures, no crash."""
    tiny = ["--points", "0,2", "--steps", "1", "--warmup", "0", "--runs", "1", "--device", "cpu"]
    main([*tiny, "--limit-gib", str((2_694_336 * 4 + 2 * 16 * 6144) / 2**30), "--out", str(tmp_path)])
    for name, modes in (
        ("planning_latency", list(MODES)),
        ("planning_parts", ["encode", "append", "sample", "decode"]),
    ):
        with (tmp_path / f"{name}.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert [(row["x"], row["mode"]) for row in rows] == [(x, mode) for x in "02" for mode in modes]
        assert {row["status"] for row in rows if row["x"] == "0"} == {"ok"}
        assert {(row["status"], row["median_ms"]) for row in rows if row["x"] == "2"} == {("oom", "")}
        assert [row["tokens"] for row in rows[:: len(modes)]] == ["48", "112"]
        assert (tmp_path / f"{name}.svg").read_text(encoding="utf-8").startswith("<svg")
