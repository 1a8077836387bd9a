"""Adapters merged into their base."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from memer.errors import MemerError
from memer.merge import merge_weights
from tests.memer.model_folders import (
    MATRIX,
    read_model,
    same_bits,
    tensors,
    write_model,
)


def write_adapter(
    folder: Path, updates: dict[str, tuple[torch.Tensor, torch.Tensor]], **settings: object
) -> Path:
    folder.mkdir(parents=True)
    weights = {}
    for module, (up, down) in updates.items():
        weights[f"base_model.model.{module}.lora_A.weight"] = down.clone()
        weights[f"base_model.model.{module}.lora_B.weight"] = up.clone()
    save_file(weights, str(folder / "adapter_model.safetensors"))
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 6} | settings))
    return folder


MODULE = MATRIX.removesuffix(".weight")


@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_is_scaled_by_alpha(tmp_path: Path, rslora: bool) -> None:
    old = tensors(0)
    up, down = torch.randn(33, 4), torch.randn(4, 24)
    scale = 6 / (4**0.5 if rslora else 4)
    base = write_model(tmp_path / "base", old)
    adapter = write_adapter(tmp_path / "adapter", {MODULE: (up, down)}, use_rslora=rslora)
    merged = {a: merge_weights(base, adapter, tmp_path / f"out{a}", alpha=a) for a in (0, 0.3, 1)}
    for alpha, report in merged.items():
        weights = read_model(report.out)
        exact = old[MATRIX].double() + alpha * scale * (up.double() @ down.double())
        expected = exact.float().bfloat16()
        # float32 arithmetic may land on the other side of a tie of the last cast: one step of bfloat16.
        torch.testing.assert_close(weights[MATRIX], expected, rtol=2**-7, atol=1e-6)
        assert (weights[MATRIX] != expected).double().mean() < 0.01, alpha
        assert same_bits(
            {n: t for n, t in weights.items() if n != MATRIX}, {n: old[n] for n in old if n != MATRIX}
        )
    assert merged[0.3].num_changed == 1


def test_scaling_an_adapter_equals_interpolating_its_merge_with_the_base(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", tensors(0, dtype=torch.float32))
    adapter = write_adapter(tmp_path / "adapter", {MODULE: (torch.randn(33, 4), torch.randn(4, 24))})
    merge_weights(base, adapter, tmp_path / "whole", alpha=1)
    merge_weights(base, tmp_path / "whole", tmp_path / "interpolated", alpha=0.35)
    merge_weights(base, adapter, tmp_path / "scaled", alpha=0.35)
    torch.testing.assert_close(
        read_model(tmp_path / "scaled"), read_model(tmp_path / "interpolated"), atol=2e-6, rtol=1e-6
    )


def test_adapters_that_do_not_fit_are_refused_with_counts(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", tensors(0))
    pair = (torch.randn(33, 4), torch.randn(4, 24))
    cases = {
        "text": (
            {"model.layers.0.mlp.up_proj": pair},
            {},
            r"0 tensors of the adapter fit.*1 do not.*model\.layers\.0",
        ),
        "inner": (
            {MODULE: pair, "inner." + MODULE: pair},
            {},
            r"1 tensors of the adapter fit.*1 do not.*inner",
        ),
        "shape": ({MODULE: (pair[0][:-1], pair[1])}, {}, r"1 do not"),
        "dora": ({MODULE: pair}, {"use_dora": True}, "use_dora"),
    }
    for name, (updates, settings, message) in cases.items():
        with pytest.raises(MemerError, match=message):
            merge_weights(
                base, write_adapter(tmp_path / name, updates, **settings), tmp_path / "out", alpha=0.5
            )
