"""Every YAML that is shipped composes, resolves, and names things that exist."""

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

from conf.compose import CONF_DIR, compose
from conf.grid import plan_sweep
from conf.instantiate import check_arguments, locate, targets
from memer.errors import UsageError

REPO = CONF_DIR.parent

#: What a user has to say besides; a value of the right kind is enough here.
TRAIN = ["data.train.demos.root=SHARDS", "view.rules=all_last"]
BUILD = [
    "source=tabletop",
    "out=DIR",
    "cameras.camera_keys=[base]",
    "cameras.view_width=8",
    "cameras.view_height=8",
]
EVAL = {"offline": ["data.root=SHARDS"], "closed_loop": [], "map_wam": [], "compare": ["runs=[A]"]}
GIVEN = {
    "planner=constant": ["planner.subtask=wait"],
    "source=lerobot": ["source.root=DIR"],
    "source=rmbench": ["source.root=DIR"],
    "source=tabletop": ["source.task=object_search", "source.num_episodes=2"],
    "labels=file": ["labels.path=FILE"],
    "labels=gripper": [],
}


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))


def train_words(experiment: str) -> list[str]:
    """Plan-following models have no keyframes, and so no rules for them."""
    return TRAIN[:1] if experiment.startswith("map_") else TRAIN


def cases() -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = [("train", TRAIN)]
    found += [("train", [f"experiment={name}", *train_words(name)]) for name in options("experiment")]
    found += [
        ("train", [f"view={name}", *train_words("map_" * (name != "planner"))]) for name in options("view")
    ]
    for group in ("contract", "model", "lora", "trainer", "logger", "scorer"):
        found += [("train", [f"{group}={name}", *TRAIN]) for name in options(group)]
    found += [("describe", [f"experiment={name}"]) for name in options("experiment")]
    found += [("eval", [f"eval={name}", *more]) for name, more in EVAL.items()]
    found += [("eval", ["eval=closed_loop", f"planner={name}"]) for name in options("planner")]
    found += [("build", [*BUILD[1:], f"source={name}"]) for name in options("source")]
    found += [("build", [*BUILD, f"labels={name}"]) for name in options("labels")]
    found += [("build", [*BUILD, "format=qwen", "view.rules=all_last"])]
    found += [
        ("features", ["root=SHARDS", "out=DIR", f"view={view}"]) for view in ("visual_planner", "executor")
    ]
    found.append(("plans", ["root=SHARDS", "out=DIR", "visual=EXPORT"]))
    return [(root, [*words, *(o for w in words for o in GIVEN.get(w, []))]) for root, words in found]


def check_all(config: dict[str, Any]) -> None:
    """Every target exists and takes the arguments that the config gives it."""
    for place, node in targets(config):
        target = locate(node["_target_"], where=place)
        check_arguments(target, {k: v for k, v in node.items() if k[0] != "_"}, where=place)


@pytest.mark.parametrize(
    ("root", "overrides"), cases(), ids=lambda v: v if isinstance(v, str) else "-".join(v)
)
def test_it_composes_and_names_what_exists(root: str, overrides: list[str]) -> None:
    check_all(compose(root, overrides))


@pytest.mark.parametrize("name", options("sweep"))
def test_every_sweep_gives_different_jobs(name: str) -> None:
    sweep = plan_sweep([f"sweep={name}", *train_words(name)], config_name="train")
    assert len(sweep.jobs) > 1
    assert sweep.name == name
    seen: list[Any] = []
    for job in sweep.jobs:
        check_all(dict(job.config))
        told = {k: v for k, v in job.config.items() if k != "run_id"}
        assert told not in seen
        seen.append(told)
        assert job.config["group"] == name


def test_the_six_memory_forms_are_swept() -> None:
    sweep = plan_sweep(["sweep=memory_forms", *TRAIN], config_name="train")
    forms = ["none", "short", "long", "text", "image", "image_text"]
    assert [job.name for job in sweep.jobs] == forms
    assert [job.config["contract"]["memory_form"] for job in sweep.jobs] == forms


def test_the_ablations_of_the_executor_are_swept() -> None:
    sweep = plan_sweep(["sweep=map_executor", *train_words("map_executor")], config_name="train")
    plans = {job.name: job.config["contract"]["plan"] for job in sweep.jobs}
    assert [plan["progress_condition"] for plan in plans.values()] == [True, False, True, True]
    assert plans["map_classification"]["progress_mode"] == "classification"
    assert [plan["visual_plan"] for plan in plans.values()] == ["memory", "memory", "memory", "none"]


def test_every_file_below_conf_is_reached() -> None:
    """A YAML that no case above composes would rot unseen."""
    reached = {w.replace("=", "/") + ".yaml" for _, words in cases() for w in words if w.count("=") == 1}
    groups = {path.relative_to(CONF_DIR).as_posix() for path in CONF_DIR.glob("*/*.yaml")}
    # Parts of a default list are composed with their root.
    parts = {"callbacks", "data", "view", "sweep", "eval"}
    left = {path for path in groups - reached if path.split("/")[0] not in parts}
    assert not left, f"add these to cases(): {sorted(left)}"
    known = {"train.yaml", "eval.yaml", "build.yaml", "describe.yaml", "features.yaml", "plans.yaml"}
    assert {path.name for path in CONF_DIR.glob("*.yaml")} == known


def test_a_typo_in_any_part_is_refused() -> None:
    config = compose("train", ["experiment=memer_tabletop", *TRAIN])
    for key in ("max_step", "trainer.precison", "contract.windows.frame_subsampel", "callbacks.merge.alpha"):
        with pytest.raises(UsageError, match="unknown override"):
            compose("train", [f"{key}=1", *TRAIN])
    assert config["max_steps"]


def test_configs_hold_no_code() -> None:
    for path in CONF_DIR.rglob("*.yaml"):
        text = path.read_text()
        assert "${eval" not in text, path
        assert "${hydra:" not in text, f"{path}: resolved before there is a run"


def test_experiments_are_short_and_say_how_to_run_them() -> None:
    for name in options("experiment"):
        lines = (CONF_DIR / "experiment" / f"{name}.yaml").read_text().splitlines()
        assert lines[0] == "# @package _global_"
        assert any(line.startswith("# Run:") and f"experiment={name}" in line for line in lines), name
        assert sum(not line.startswith("#") for line in lines) <= 25, f"{name}: differences only"


def test_the_roots_are_commands_without_work_at_import() -> None:
    """Only a guarded main() call: everything else at the top would run in every importing process."""
    for path in (REPO / "train.py", REPO / "eval.py", REPO / "data/build.py", REPO / "models/describe.py"):
        tree = ast.parse(path.read_text())
        calls = [n for n in tree.body if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)]
        assert not calls, path
        assert any(isinstance(n, ast.If) and "__main__" in ast.unparse(n.test) for n in tree.body), path


def test_allowed_targets_have_signatures() -> None:
    config = compose("train", ["experiment=memer_tabletop", *TRAIN])
    names = [node["_target_"] for _, node in targets(config)]
    assert len(names) > 8
    for name in names:
        assert inspect.signature(locate(name)).parameters is not None
    assert Path(CONF_DIR).is_dir()
