"""Figures of world models and executors: exact counts, tokens per group, memory that follows the strategy."""

from typing import Any

import pytest

from conf.compose import compose
from memer.errors import SourceUnavailableError
from models.describe import describe
from models.lit.cwm import WorldModelModule
from models.lit.wap import ExecutorModule
from tests.models.plan_exports import plan_contract


def described(*overrides: str) -> dict[str, Any]:
    return describe(compose("describe", list(overrides)))


def test_the_executor_has_the_published_sizes() -> None:
    found = described("experiment=map_wap_wan22_5b")
    counts = found["parameters"]
    assert (counts["video"], counts["action"], counts["progress"]) == (
        4_999_787_712,
        1_020_900_366,
        207_150_849,
    )
    assert counts["conditions"] == 61_440 + 8_192
    assert counts["total"] == counts["trainable"] == 6_227_908_559
    shapes = found["shapes"]
    assert shapes["training_tokens"] == 784
    assert shapes["text_tokens_of_others"] == 130
    assert shapes["latent_frame"] == [48, 24, 20]
    assert found["base"] == "Wan-AI/Wan2.2-TI2V-5B-Diffusers"


def test_the_world_model_has_the_published_size() -> None:
    found = described("experiment=map_cwm_wan22_5b")
    assert found["parameters"]["total"] == 4_999_787_712
    assert found["shapes"]["training_tokens_16_segments"] == 7_560


def test_the_tiny_sizes_are_those_of_the_specification_and_of_the_run() -> None:
    found = described("experiment=map_wap_tabletop")
    counts = found["parameters"]
    assert (counts["video"], counts["action"], counts["progress"]) == (2_694_336, 984_878, 402_865)
    assert found["shapes"]["training_tokens"] == 112
    small = described("experiment=map_wap_tabletop", "dimensions.action=4", "dimensions.state=4")
    config = compose("train", ["experiment=map_wap_tabletop", "data.train.demos.root=X"])
    contract = plan_contract().updated(config["contract"])
    for experiment, kind in (("map_wap_tabletop", ExecutorModule), ("map_cwm_tabletop", WorldModelModule)):
        node = compose("train", [f"experiment={experiment}", "data.train.demos.root=X"])["model"]["module"]
        module = kind(contract=contract, **_plain(node))
        module.configure_model()
        total = sum(p.numel() for p in module.parameters())
        told = small if kind is ExecutorModule else described("experiment=map_cwm_tabletop")
        assert told["parameters"]["total"] == total


def _plain(node: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a config node, nested nodes as mappings."""
    return {
        key: {k: v for k, v in value.items() if k != "_target_"} if isinstance(value, dict) else value
        for key, value in node.items()
        if key != "_target_"
    }


def test_the_switches_of_the_paper_change_the_groups() -> None:
    def shapes(*overrides: str) -> dict[str, Any]:
        found: dict[str, Any] = described("experiment=map_wap_wan22_5b", *overrides)["shapes"]
        return found

    assert shapes("contract.plan.visual_plan=none")["plan_tokens"] == 0
    assert shapes("contract.plan.progress_mode=classification")["progress_tokens"] == 1
    assert shapes("contract.plan.progress_condition=false")["text_tokens_of_others"] == 129


@pytest.mark.parametrize(("experiment", "gib"), [("map_wap_wan22_5b", 93), ("map_cwm_wan22_5b", 75)])
def test_memory_is_that_of_the_specification_and_is_split(experiment: str, gib: float) -> None:
    words = [f"experiment={experiment}", "trainer.devices=1"]
    one = described(*words, "trainer.strategy=auto")["memory_per_device"]
    assert one["sum_without_activations_gib"] == pytest.approx(gib, rel=0.01)
    eight = described(f"experiment={experiment}")["memory_per_device"]
    assert eight["devices"] == 8
    for part in ("weights_gib", "gradients_gib", "adamw_moments_gib"):
        assert eight[part] == pytest.approx(one[part] / 8, rel=0.01)


def test_shards_that_are_not_there_are_one_line(tmp_path: Any) -> None:
    with pytest.raises(SourceUnavailableError, match="no contract there"):
        described("experiment=map_wap_tabletop", f"data.train.demos.root={tmp_path}")
