"""The sweep over history lengths with the tiny model: its rows, not its times."""

import csv
import json
from pathlib import Path

import pytest

from tests.bench.bench_executor import main, step_operations
from tests.models.wap_samples import small_settings


def test_the_sweep_is_complete_and_counts_its_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--points 0,40,20,60 --runs 1 --warmup 0 --steps 1 --batches= --latent 2 --limit-gib 0.01549"
    main([*options.split(), "--out", str(tmp_path), "--device", "cpu"])
    with (tmp_path / "executor_latency.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert set(rows[0]) >= {
        "experiment", "mode", "x", "median_ms", "p95_ms", "peak_bytes", "tokens", "status",
    }  # fmt: skip
    tokens = {
        mode: [int(r["tokens"]) for r in sorted(rows, key=lambda r: int(r["x"])) if r["mode"] == mode]
        for mode in ("plan cached", "plan uncached", "full_history cached", "full_history uncached")
    }
    assert tokens["plan cached"] == tokens["plan uncached"] == [3 + 1 + 16 + 16] * 4
    assert tokens["full_history cached"] == tokens["full_history uncached"] == [33, 53, 73, 93]
    assert all((row["status"] == "ok") == (row["median_ms"] != "") for row in rows)
    assert {row["status"] for row in rows if row["x"] == "60" and "full" in row["mode"]} == {"oom"}
    assert {row["status"] for row in rows if "plan" in row["mode"]} == {"ok"}
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sum(line["bench"] == "executor" for line in lines) == 16
    assert (tmp_path / "executor_latency.svg").read_text(encoding="utf-8").startswith("<svg")


def test_operations_of_a_step_by_hand() -> None:
    """Widths 16 and 8, 24 channels, 2 layers, 8 + 8 tokens, 16 tokens of prefix, 7 of text."""
    settings = small_settings()

    def expert(hidden: int, ffn: int, tokens: int, token_dim: int, keys: int) -> int:
        layer = (4 + 2) * hidden * 24 + 2 * hidden * ffn + 2 * 24 * (keys + 7)
        return tokens * (2 * layer + 2 * token_dim * hidden)

    chunk = expert(16, 32, 8, 3, 32) + expert(8, 16, 8, 1, 32)
    assert step_operations(settings, future=False) == chunk
    assert step_operations(settings, future=True) == chunk + expert(24, 48, 8, 24, 24)
