import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from memer.errors import MemerError, SourceUnavailableError, UsageError
from memer.merge import MERGE_INFO, alpha_name, main, merge_many, merge_weights
from memer.weights import INDEX_FILE, WeightFiles
from tests.memer.model_folders import (
    BUFFER,
    EMBEDDING,
    FLAG,
    FROZEN,
    MATRIX,
    MEASURE,
    NORM,
    read_model,
    same_bits,
    tensors,
    write_model,
)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    base = write_model(tmp_path / "base", tensors(0), config={"tie_word_embeddings": True})
    tuned = write_model(tmp_path / "tuned", tensors(1), shards=3, config={"tie_word_embeddings": True})
    return base, tuned


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_mix_is_made_in_float32_and_cast_once(tmp_path: Path, dtype: torch.dtype) -> None:
    old, new = tensors(0, dtype=dtype), tensors(1, dtype=dtype)
    base, tuned = write_model(tmp_path / "base", old), write_model(tmp_path / "tuned", new, shards=2)
    report = merge_weights(base, tuned, tmp_path / "out", alpha=0.8)
    merged = read_model(tmp_path / "out")
    for name in (EMBEDDING, NORM, MATRIX, "scalar"):
        assert torch.equal(
            merged[name], ((1 - 0.8) * old[name].float() + 0.8 * new[name].float()).to(dtype)
        ), name
    assert torch.equal(merged[FROZEN], old[FROZEN])
    assert torch.equal(merged[BUFFER], new[BUFFER])
    assert torch.equal(merged[FLAG], new[FLAG])
    assert merged["empty"].shape == (0, 24)
    assert (report.num_tensors, report.num_changed) == (8, 6)


def test_float64_is_not_narrowed(tmp_path: Path) -> None:
    old, new = {"w": torch.tensor([1.0, 1 / 3], dtype=torch.float64)}, {"w": torch.tensor([1 + 1e-12, 2 / 3])}
    new = {"w": torch.tensor([1 + 1e-12, 2 / 3], dtype=torch.float64)}
    merge_weights(
        write_model(tmp_path / "a", old), write_model(tmp_path / "b", new), tmp_path / "out", alpha=0.5
    )
    assert torch.equal(read_model(tmp_path / "out")["w"], 0.5 * old["w"] + 0.5 * new["w"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_alpha_0_and_1_give_the_inputs_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    old, new = tensors(0, dtype=dtype), tensors(1, dtype=dtype)
    for weights in (old, new):  # bits that arithmetic would not keep
        weights[NORM][:4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40], dtype=dtype)
    base, tuned = write_model(tmp_path / "base", old), write_model(tmp_path / "tuned", new, shards=3)
    merge_weights(base, tuned, tmp_path / "zero", alpha=0)
    merge_weights(base, tuned, tmp_path / "one", alpha=1)
    assert same_bits(read_model(tmp_path / "zero"), old)
    assert same_bits(read_model(tmp_path / "one"), new)


def test_equal_elements_keep_their_bytes_inside_a_changed_tensor(tmp_path: Path) -> None:
    old = {"w": torch.rand(4000, 3)}
    new = {"w": old["w"].clone()}
    new["w"][7] += 1
    plain = (1 - 0.8) * old["w"] + 0.8 * new["w"]
    untouched = torch.arange(4000) != 7
    assert not torch.equal(plain[untouched], old["w"][untouched])  # else this test shows nothing
    merge_weights(
        write_model(tmp_path / "a", old), write_model(tmp_path / "b", new), tmp_path / "out", alpha=0.8
    )
    assert torch.equal(read_model(tmp_path / "out")["w"][untouched], old["w"][untouched])


def test_several_alphas_in_one_pass_equal_single_merges(pair: tuple[Path, Path], tmp_path: Path) -> None:
    outs = {alpha: tmp_path / alpha_name(alpha) for alpha in (0, 0.25, 0.8, 1)}
    reports = merge_many(*pair, outs)
    for report in reports:
        single = merge_weights(*pair, tmp_path / f"single{report.alpha}", alpha=report.alpha)
        assert same_bits(read_model(report.out), read_model(single.out))


def test_rows_larger_and_smaller_than_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "memer.weights.CHUNK_ELEMENTS", 50
    )  # rows of 24: pieces of two; patch rows of 96: one each
    old, new = tensors(0), tensors(1)
    merge_weights(
        write_model(tmp_path / "a", old), write_model(tmp_path / "b", new), tmp_path / "out", alpha=0.3
    )
    merged = read_model(tmp_path / "out")
    assert torch.equal(merged[MATRIX], (0.7 * old[MATRIX].float() + 0.3 * new[MATRIX].float()).bfloat16())
    assert torch.equal(merged[FROZEN], old[FROZEN])


def test_output_has_the_tuned_shards_an_index_and_pt_metadata(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    merge_weights(*pair, tmp_path / "out", alpha=0.8)
    index = json.loads((tmp_path / "out" / INDEX_FILE).read_text())
    weights = read_model(tmp_path / "out")
    assert index["weight_map"] == json.loads((pair[1] / INDEX_FILE).read_text())["weight_map"]
    assert index["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in weights.values())
    with safe_open(str(tmp_path / "out" / "model-00001-of-00003.safetensors"), "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_slice(EMBEDDING)[3:5].shape == (2, 24)


def test_record_names_inputs_by_a_hash_of_their_content(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", tensors(0))
    tuned = write_model(tmp_path / "tuned", tensors(1))
    resharded = write_model(tmp_path / "resharded", tensors(1), shards=4)
    report = merge_weights(base, tuned, tmp_path / "out", alpha=0.8)
    assert report.base_hash == WeightFiles.open(base).content_hash() != report.tuned_hash
    assert report.tuned_hash == WeightFiles.open(tuned).content_hash()
    assert report.tuned_hash == WeightFiles.open(resharded).content_hash()
    info = json.loads((tmp_path / "out" / MERGE_INFO).read_text())
    assert info["alpha"] == 0.8
    assert info["base"] == {"name": "base", "content_hash": report.base_hash}
    assert info["tuned"]["content_hash"] == report.tuned_hash
    assert "float32" in info["rule"]
    assert info["versions"]["torch"] == torch.__version__
    assert str(tmp_path) not in json.dumps(info)


def test_content_hash_sees_one_changed_bit(tmp_path: Path) -> None:
    weights = tensors(0)
    first = WeightFiles.open(write_model(tmp_path / "a", weights)).content_hash()
    weights[MATRIX].view(torch.int16)[5, 5] ^= 1
    assert WeightFiles.open(write_model(tmp_path / "b", weights)).content_hash() != first


def test_other_files_come_from_tuned_and_what_it_lacks_from_the_base(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    base, tuned = pair
    (base / "tokenizer.json").write_bytes(b"base\r\n")
    (base / "preprocessor_config.json").write_text("base")
    (tuned / "preprocessor_config.json").write_text("tuned")
    (tuned / "optimizer.pt").write_text("state")
    (tuned / "provenance.json").write_text("of the tuned folder")
    (tuned / "checkpoints").mkdir()
    merge_weights(base, tuned, tmp_path / "out", alpha=0.8)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b"base\r\n"
    assert (tmp_path / "out" / "preprocessor_config.json").read_text() == "tuned"
    present = {path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".safetensors"}
    assert present == {"config.json", "tokenizer.json", "preprocessor_config.json", INDEX_FILE, MERGE_INFO}


def change_key(weights: dict[str, torch.Tensor]) -> None:
    weights["net." + NORM] = weights.pop(NORM)


def change_shape(weights: dict[str, torch.Tensor]) -> None:
    weights[MATRIX] = weights[MATRIX][:-1].contiguous()


def change_dtype(weights: dict[str, torch.Tensor]) -> None:
    weights[MATRIX] = weights[MATRIX].float()


def change_vocabulary(weights: dict[str, torch.Tensor]) -> None:
    weights[EMBEDDING] = torch.zeros(128, 24, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_key, ["1 tensors missing", f"({NORM})", "1 tensors extra", f"net.{NORM}", "7 agree in name"]),
        (change_shape, ["shape", MATRIX, "(33, 24) in base, (32, 24) in tuned"]),
        (change_dtype, ["dtype", MATRIX, "BF16 in base, F32 in tuned"]),
        (change_vocabulary, ["vocabulary of 128", "97"]),
    ],
)
def test_inputs_that_do_not_match_are_refused_before_writing(
    tmp_path: Path, change, words: list[str]
) -> None:
    new = tensors(1)
    change(new)
    base, tuned = write_model(tmp_path / "base", tensors(0)), write_model(tmp_path / "tuned", new)
    with pytest.raises(MemerError) as error:
        merge_weights(base, tuned, tmp_path / "out", alpha=0.8)
    for word in [*words, str(tuned)]:
        assert word in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "tuned"]


def test_wrapped_keys_are_counted(tmp_path: Path) -> None:
    for prefix in ("net.", "_orig_mod."):
        new = {prefix + name: tensor for name, tensor in tensors(1).items()}
        base = write_model(tmp_path / f"base{prefix}", tensors(0))
        with pytest.raises(MemerError, match=r"8 tensors missing .* 8 tensors extra .* 0 agree"):
            merge_weights(base, write_model(tmp_path / prefix, new), tmp_path / "out", alpha=0.8)


def test_a_tied_head_counts_as_absent(tmp_path: Path) -> None:
    tied = {"tie_word_embeddings": True}
    new = tensors(1)
    base = write_model(tmp_path / "base", tensors(0), config=tied)
    tuned = write_model(tmp_path / "tuned", new | {"lm_head.weight": new[EMBEDDING].clone()}, config=tied)
    merge_weights(base, tuned, tmp_path / "out", alpha=0.8)
    assert read_model(tmp_path / "out").keys() == tensors(0).keys()
    wrong = write_model(tmp_path / "wrong", new | {"lm_head.weight": new[EMBEDDING] + 1}, config=tied)
    with pytest.raises(MemerError, match=r"lm_head.weight.*differ"):
        merge_weights(base, wrong, tmp_path / "never", alpha=0.8)


def test_tied_with_untied_is_refused(tmp_path: Path) -> None:
    new = tensors(1)
    base = write_model(tmp_path / "base", tensors(0), config={"tie_word_embeddings": True})
    untied = write_model(
        tmp_path / "untied",
        new | {"lm_head.weight": new[EMBEDDING].clone()},
        config={"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}},
    )
    for one, other in ((base, untied), (untied, base)):
        with pytest.raises(MemerError, match="tie_word_embeddings"):
            merge_weights(one, other, tmp_path / "out", alpha=0.8)


def test_an_untied_head_is_mixed(tmp_path: Path) -> None:
    untied = {"tie_word_embeddings": False}
    old = tensors(0) | {"lm_head.weight": torch.zeros(97, 24, dtype=torch.bfloat16)}
    new = tensors(1) | {"lm_head.weight": torch.ones(97, 24, dtype=torch.bfloat16)}
    base, tuned = (write_model(tmp_path / n, w, config=untied) for n, w in (("base", old), ("tuned", new)))
    merge_weights(base, tuned, tmp_path / "out", alpha=0.25)
    assert torch.all(read_model(tmp_path / "out")["lm_head.weight"] == 0.25)


def test_missing_and_damaged_inputs_are_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = pair
    with pytest.raises(SourceUnavailableError, match="nowhere"):
        merge_weights(tmp_path / "nowhere", tuned, tmp_path / "out", alpha=0.8)
    (tmp_path / "bare").mkdir()
    with pytest.raises(MemerError, match=r"bare.*no model\.safetensors"):
        merge_weights(base, tmp_path / "bare", tmp_path / "out", alpha=0.8)
    shard = tuned / "model-00002-of-00003.safetensors"
    whole = shard.read_bytes()
    for kept in (4, 20, len(whole) - 1):
        shard.write_bytes(whole[:kept])
        with pytest.raises(MemerError, match=r"model-00002.*cut short"):
            merge_weights(base, tuned, tmp_path / "out", alpha=0.8)
    shard.unlink()
    with pytest.raises(SourceUnavailableError, match="model-00002"):
        merge_weights(base, tuned, tmp_path / "out", alpha=0.8)
    assert not (tmp_path / "out").exists()


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    weights = {"w": torch.ones(4, 4).to(torch.float8_e4m3fn)}
    model = write_model(tmp_path / "fp8", weights)
    with pytest.raises(MemerError, match=r"w: dtype F8_E4M3"):
        merge_weights(model, model, tmp_path / "out", alpha=0.5)


@pytest.mark.parametrize("alpha", [-0.1, 1.01, float("nan")])
def test_alpha_outside_the_unit_interval_is_refused(
    pair: tuple[Path, Path], tmp_path: Path, alpha: float
) -> None:
    with pytest.raises(UsageError, match="between 0"):
        merge_weights(*pair, tmp_path / "out", alpha=alpha)


def test_an_existing_output_is_kept(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("mine")
    with pytest.raises(MemerError, match="exists already"):
        merge_weights(*pair, tmp_path / "out", alpha=0.8)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]
    with pytest.raises(MemerError, match="exists already"):
        merge_weights(*pair, pair[0], alpha=0.8)


def test_nothing_is_left_when_writing_fails(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(done: int, total: int) -> None:
        if done > total // 2:
            raise OSError("disk full")

    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="disk full"):
        merge_weights(*pair, tmp_path / "out", alpha=0.8, progress=fail)
    assert sorted(tmp_path.iterdir()) == before


def test_a_killed_run_is_swept_up_by_the_next(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "half").write_text("x")
    merge_weights(*pair, tmp_path / "out", alpha=0.8)
    assert not (tmp_path / ".out.partial").exists()
    assert not (tmp_path / "out" / "half").exists()


def test_command_writes_one_folder_or_one_per_alpha(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--base", str(pair[0]), "--tuned", str(pair[1])]
    assert main([*given, "--alpha", "0.8", "--out", str(tmp_path / "one")]) == 0
    assert main([*given, "--alpha", "0.8", "--alpha", "0.125", "--out", str(tmp_path / "many")]) == 0
    assert sorted(path.name for path in (tmp_path / "many").iterdir()) == ["alpha_0.125", "alpha_0.80"]
    assert same_bits(read_model(tmp_path / "one"), read_model(tmp_path / "many" / "alpha_0.80"))
    capsys.readouterr()
    assert main([*given, "--alpha", "1.5", "--out", str(tmp_path / "bad")]) == 2
    assert (
        main(["--base", str(tmp_path / "gone"), *given[2:], "--alpha", "1", "--out", str(tmp_path / "bad")])
        == 3
    )
    assert main([*given, "--alpha", "0.8", "--out", str(tmp_path / "one")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("error: ") for line in lines)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure peak memory")
def test_memory_is_bounded_whatever_the_size(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)

    def weights() -> dict[str, torch.Tensor]:
        shapes = {f"layers.{k}.weight": (512, 512) for k in range(8)} | {EMBEDDING: (40_000, 256)}
        return {n: torch.from_numpy(generator.random(shape, np.float32)) for n, shape in shapes.items()}

    base = write_model(tmp_path / "base", weights(), shards=6)
    tuned = write_model(tmp_path / "tuned", weights(), shards=6)
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(base), str(tuned), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert WeightFiles.open(tmp_path / "out").num_bytes > 49e6
    assert int(run.stdout) < 30e6  # less than the embedding alone, 41 MB
