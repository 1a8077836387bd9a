"""The rule that keeps the rest simple: memer imports no sibling and no framework; siblings meet in memer."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).parents[1]
OURS = ("memer", "data", "models", "callbacks", "conf")

#: Folder or file -> packages that it may import besides the standard library. The longest match decides.
MAY_IMPORT: dict[str, set[str]] = {
    "memer": {"memer", "torch", "numpy", "PIL", "safetensors", "yaml"},
    "memer/tabletop": {"memer", "numpy", "PIL", "gymnasium"},
    "data": {
        "memer",
        "data",
        "torch",
        "numpy",
        "PIL",
        "lightning",
        "webdataset",
        "av",
        "h5py",
        "pyarrow",
        "tqdm",
        "yaml",
    },
    "models": {
        "memer",
        "models",
        "torch",
        "numpy",
        "PIL",
        "lightning",
        "transformers",
        "tokenizers",
        "peft",
        "diffusers",
        "safetensors",
        "huggingface_hub",
    },
    "callbacks": {
        "memer",
        "callbacks",
        "torch",
        "numpy",
        "PIL",
        "lightning",
        "huggingface_hub",
        "transformers",
        "wandb",
    },
    "conf": {"memer", "conf", "hydra", "omegaconf", "torch"},
    # Composition roots: they wire, so they may name everything.
    "train.py": {*OURS, "torch", "numpy", "lightning", "tqdm"},
    "eval.py": {*OURS, "torch", "numpy", "tqdm"},
    "data/build.py": {"memer", "data", "conf", "torch", "numpy", "tqdm"},
    "models/describe.py": {"memer", "models", "conf", "torch", "transformers", "lightning"},
    "models/describe_plans.py": {"memer", "models", "conf", "torch"},  # the other half of that command
    "conf/evaluate": {*OURS, "torch", "numpy", "tqdm"},
    "conf/demo.py": {*OURS, "torch", "numpy", "tqdm"},
}


def rule_for(path: Path) -> set[str]:
    relative = path.relative_to(REPO).as_posix()
    matches = [key for key in MAY_IMPORT if relative == key or relative.startswith(key + "/")]
    return MAY_IMPORT[max(matches, key=len)]


def source_files() -> list[Path]:
    files = [path for package in OURS for path in (REPO / package).rglob("*.py")]
    return sorted(files + list(REPO.glob("*.py")))


def imported_roots(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, first part of the name) of every import at any depth; '.' for a relative one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." if node.level else str(node.module).split(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "__import__",
            "importlib.import_module",
        ):
            name = node.args[0] if node.args else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value.split(".")[0]


def violations(path: Path, text: str) -> list[str]:
    allowed = rule_for(path) | sys.stdlib_module_names | {"__future__"}
    where = path.relative_to(REPO)
    return [
        f"{where}:{line} imports {'relatively' if root == '.' else root}"
        for line, root in imported_roots(ast.parse(text))
        if root not in allowed
    ]


@pytest.mark.parametrize("package", [*OURS, "roots"])
def test_every_import_is_allowed(package: str) -> None:
    files = [
        path
        for path in source_files()
        if (path.parent == REPO if package == "roots" else path.relative_to(REPO).parts[0] == package)
    ]
    assert files
    found = [text for path in files for text in violations(path, path.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("memer/x.py", "import lightning.pytorch as pl"),
        ("memer/x.py", "def f():\n    from data.shards import ShardSet"),
        ("memer/x.py", "from . import windows"),
        ("memer/x.py", "import importlib\nimportlib.import_module('transformers')"),
        ("memer/x.py", "import gymnasium"),
        ("memer/tabletop/x.py", "import torch"),
        ("data/x.py", "import models"),
        ("data/x.py", "import hydra"),
        ("models/lit/x.py", "if True:\n    import callbacks.merge"),
        ("callbacks/x.py", "from data import shards"),
        ("conf/x.py", "import transformers"),
    ],
)
def test_a_hidden_import_is_found(file: str, text: str) -> None:
    assert violations(REPO / file, text)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("memer/tabletop/x.py", "import gymnasium"),
        ("data/build.py", "from conf.launch import hydra_root"),
        ("callbacks/x.py", "def f():\n    import wandb"),
        ("memer/x.py", "import math, memer.windows"),
    ],
)
def test_an_allowed_import_is_not(file: str, text: str) -> None:
    assert not violations(REPO / file, text)


#: Import name -> distribution, where they differ.
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml", "hydra": "hydra-core"}


def project_table() -> dict:
    return tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def declared(lines: list[str]) -> dict[str, Requirement]:
    found = [Requirement(line) for line in lines]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def third_party_imports() -> dict[str, str]:
    """Distribution -> a file that imports it."""
    found: dict[str, str] = {}
    for path in source_files():
        for line, root in imported_roots(ast.parse(path.read_text(encoding="utf-8"))):
            if root not in sys.stdlib_module_names and root not in OURS:
                name = canonicalize_name(DISTRIBUTIONS.get(root, root))
                found.setdefault(name, f"{path.relative_to(REPO)}:{line}")
    return found


def test_every_imported_package_is_declared() -> None:
    """A package that arrives only through another one may vanish with it."""
    project = project_table()
    extras = project["optional-dependencies"]
    known = declared(project["dependencies"]) | declared(
        [line for name, lines in extras.items() if name != "dev" for line in lines]
    )
    imported = third_party_imports()
    assert {"torch", "pillow", "hydra-core"} <= set(imported)
    missing = {name: where for name, where in imported.items() if name not in known}
    assert not missing, "\n".join(f"{where} imports {name}" for name, where in missing.items())


def test_the_lock_satisfies_what_is_declared() -> None:
    lines = (REPO / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==", 1) for line in lines if "==" in line and not line.startswith("#"))
    pinned = {canonicalize_name(name): version.split()[0] for name, version in pinned.items()}
    requirements = declared(project_table()["dependencies"])
    absent = sorted(set(requirements) - set(pinned))
    assert not absent, f"not in requirements.lock: {absent}"
    for name, requirement in requirements.items():
        assert requirement.specifier.contains(pinned[name]), f"{requirement} against {pinned[name]}"


def modules_after(statement: str) -> set[str]:
    """Top-level names in sys.modules of a fresh interpreter after a statement."""
    code = f"import sys\n{statement}\nprint(' '.join(sorted({{n.split('.')[0] for n in sys.modules}})))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


HEAVY = {
    "lightning",
    "pytorch_lightning",
    "hydra",
    "omegaconf",
    "transformers",
    "peft",
    "webdataset",
    "wandb",
}


def modules_below(package: str) -> list[str]:
    paths = sorted((REPO / package).rglob("*.py"))
    names = [".".join(path.relative_to(REPO).with_suffix("").parts) for path in paths]
    return [name.removesuffix(".__init__") for name in names if not name.endswith(".__main__")]


def test_memer_loads_no_framework() -> None:
    """Every module of memer in one fresh process."""
    loaded = modules_after("import " + ", ".join(modules_below("memer")))
    assert "torch" in loaded
    unwanted = HEAVY | {"data", "models", "callbacks", "conf", "av", "pyarrow", "matplotlib"}
    assert loaded & unwanted == set()


def test_a_robot_starts_without_the_benchmark() -> None:
    """What a policy needs: neither the simulator nor a trainer."""
    loaded = modules_after("import memer.policy, memer.artifact, memer.memory, memer.prompts")
    assert loaded & (HEAVY | {"gymnasium", "matplotlib"}) == set()


def test_the_packages_themselves_load_nothing() -> None:
    loaded = modules_after("import memer, data, models, callbacks, conf")
    assert loaded & (HEAVY | {"torch", "numpy"}) == set()


def test_data_needs_no_model_library() -> None:
    """All of data but its Lightning part, which brings in torchmetrics and with it whatever is installed."""
    names = [name for name in modules_below("data") if name not in ("data.build", "data.datamodule")]
    loaded = modules_after("import " + ", ".join(names))
    assert (
        loaded & {"lightning", "transformers", "peft", "hydra", "omegaconf", "models", "callbacks"} == set()
    )


def test_callbacks_do_without_wandb() -> None:
    """The optional package is imported only where a run is made."""
    loaded = modules_after("import callbacks.wandb_runs, callbacks.samples, callbacks.summary")
    assert "wandb" not in loaded
