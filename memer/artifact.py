"""The exported folder: model files that any server loads, the contract, and where all of it came from.

export/
  model*.safetensors config.json generation_config.json tokenizer*, chat template
  preprocessor_config.json video_preprocessor_config.json     as in the base, but for the pixel bounds
  contract.json        what the planner was trained with
  merge_info.json      how base and tuned weights were mixed
  provenance.json      planner class, base, alpha, step, code revision, versions, hashes of all other files
"""

import importlib
import json
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from memer.contract import Contract
from memer.devices import checked_device
from memer.errors import MemerError, SourceUnavailableError
from memer.folders import file_hash, read_json
from memer.policy import Policy

PROVENANCE_FILE = "provenance.json"
PROVENANCE_VERSION = 1
DEFAULT_PLANNER = "models.planner:QwenVLPlanner"
#: Loads a planner whose prompts have the form `segments`.
LANGUAGE_PLANNER = "models.map_language:QwenLanguagePlanner"
PREPROCESSOR_FILE = "preprocessor_config.json"

#: Without one of these the folder would load only in part, or with values that training did not use.
REQUIRED_FILES = (
    "config.json",
    "generation_config.json",
    PREPROCESSOR_FILE,
    "video_preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
#: memer may not import its siblings; what an artifact names is imported only from the models folder.
_PLANNER_NAME = re.compile(r"models(\.[A-Za-z_]\w*)+:[A-Za-z_]\w*")
_PACKAGES = ("torch", "transformers", "safetensors", "tokenizers", "peft", "lightning", "numpy", "pillow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where an exported folder came from.

    Attributes:
        planner: `module:class`, the class has `from_artifact(path, device)`.
        base_name: hub id or folder name of the base model.
        base_hash: content hash of its weights, see `memer.weights.ContentHash`.
        alpha: share of the tuned weights.
        step: optimizer steps behind the tuned weights.
        revision: git revision of the code, `-dirty` when files were changed, empty outside a repository.
        versions: package -> version.
        files: file name -> {bytes, sha256} of everything else in the folder.
        format_version: of this record.
    """

    planner: str
    base_name: str
    base_hash: str
    alpha: float
    step: int
    revision: str
    versions: Mapping[str, str]
    files: Mapping[str, Mapping[str, Any]]
    format_version: int = PROVENANCE_VERSION

    @classmethod
    def load(cls, folder: Path | str) -> Self:
        """Read `provenance.json`.

        Raises:
            SourceUnavailableError: no such folder, or it is no exported one.
            MemerError: damaged or of another version.
        """
        folder = Path(folder)
        path = folder / PROVENANCE_FILE
        if not folder.is_dir():
            raise SourceUnavailableError(f"{folder}: no such folder; give the export/ folder of a run")
        if not path.is_file():
            raise SourceUnavailableError(f"{path}: no such file; give the export/ folder of a run")
        values = read_json(path)
        if values.get("format_version") != PROVENANCE_VERSION:
            raise MemerError(
                f"{path}: format_version {values.get('format_version')!r}, "
                f"this program reads {PROVENANCE_VERSION}"
            )
        known = {field.name for field in fields(cls)}
        wrong = sorted(known ^ values.keys())
        if wrong:
            raise MemerError(f"{path}: field {wrong[0]!r} is {'missing' if wrong[0] in known else 'unknown'}")
        return cls(**values)


def missing_files(folder: Path) -> list[str]:
    """Names of the processor, tokenizer and config files that a model folder lacks."""
    missing = [name for name in REQUIRED_FILES if not (folder / name).is_file()]
    settings = folder / "tokenizer_config.json"
    inside = settings.is_file() and "chat_template" in read_json(settings)
    if not inside and not any((folder / name).is_file() for name in _TEMPLATE_FILES):
        missing.append(_TEMPLATE_FILES[0])
    return missing


def is_complete(folder: Path) -> bool:
    """Whether a model folder can become an artifact."""
    return not missing_files(folder)


def check_complete(folder: Path) -> None:
    """Refuse a model folder from which no complete artifact can be made.

    Raises:
        MemerError: naming the files it lacks.
    """
    if missing := missing_files(folder):
        raise MemerError(
            f"{folder}: {', '.join(missing)} missing; take them from the base model's original files"
        )


def seal_artifact(
    folder: Path,
    *,
    contract: Contract,
    base_name: str,
    base_hash: str,
    alpha: float,
    step: int,
    planner: str = DEFAULT_PLANNER,
) -> Provenance:
    """Turn a model folder into an artifact: pixel bounds, contract, and last the provenance with all hashes.

    Call it on a folder that nobody reads yet (`memer.folders.new_folders`).

    Raises:
        MemerError: a processor or tokenizer file is missing.
    """
    check_complete(folder)
    set_pixel_bounds(folder / PREPROCESSOR_FILE, contract)
    contract.save(folder)
    return write_provenance(
        folder, planner=planner, base_name=base_name, base_hash=base_hash, alpha=alpha, step=step
    )


def write_provenance(
    folder: Path, *, planner: str, base_name: str, base_hash: str, alpha: float, step: int
) -> Provenance:
    """Record where a finished folder came from, with the hash of every file in it; see `Provenance`."""
    provenance = Provenance(
        planner=planner,
        base_name=base_name,
        base_hash=base_hash,
        alpha=alpha,
        step=step,
        revision=git_revision(),
        versions=package_versions(),
        files={
            str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": file_hash(path)}
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name != PROVENANCE_FILE
        },
    )
    (folder / PROVENANCE_FILE).write_text(json.dumps(asdict(provenance), indent=2) + "\n", encoding="utf-8")
    return provenance


def set_pixel_bounds(path: Path, contract: Contract) -> None:
    """Write the contract's area bounds into an image processor's config; nothing else changes.

    Two places can hold them: `size`, and in files of transformers 4 also `min_pixels` and `max_pixels`.
    """
    values = read_json(path)
    changed = dict(values)
    changed["size"] = {"shortest_edge": contract.min_pixels, "longest_edge": contract.max_pixels}
    for name, bound in (("min_pixels", contract.min_pixels), ("max_pixels", contract.max_pixels)):
        if name in values:
            changed[name] = bound
    if changed != values:
        path.write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def verify_artifact(folder: Path | str) -> Provenance:
    """Check that every file is there and is the one that was exported.

    Raises:
        SourceUnavailableError: no such folder, or no exported one.
        MemerError: naming the file that is missing or was changed.
    """
    folder = Path(folder)
    provenance = Provenance.load(folder)
    for name, known in provenance.files.items():
        path = folder / name
        if not path.is_file():
            raise MemerError(
                f"{path}: missing, though {PROVENANCE_FILE} lists it; export or copy the folder again"
            )
        size = path.stat().st_size
        if size != known["bytes"]:
            raise MemerError(f"{path}: {size} bytes, {known['bytes']} were exported; export or copy it again")
    for name, known in provenance.files.items():
        if file_hash(folder / name) != known["sha256"]:
            raise MemerError(f"{folder / name}: changed since the export; export or copy the folder again")
    return provenance


def load_part(path: Path | str, device: str = "cpu") -> Any:
    """Load what an exported folder holds: an object of the class that its provenance names.

    Args:
        path: the folder that the export wrote.
        device: where it runs, e.g. `cuda`.

    Raises:
        UsageError: no such device.
        SourceUnavailableError: no such folder, no exported one, its code is not importable, or this machine
            lacks the device.
        MemerError: a file is missing or was changed, or the class is not one of ours.
    """
    provenance = verify_artifact(path)
    checked_device(device)
    if not _PLANNER_NAME.fullmatch(provenance.planner):
        raise MemerError(
            f"{Path(path) / PROVENANCE_FILE}: planner {provenance.planner!r}, only classes below models. "
            "are loaded"
        )
    module, _, name = provenance.planner.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise SourceUnavailableError(
            f"{Path(path) / PROVENANCE_FILE}: planner {provenance.planner!r} cannot be imported ({error}); "
            "run from the repository root"
        ) from None
    return kind.from_artifact(Path(path), device)


def load_policy(path: Path | str, device: str = "cpu") -> Policy:
    """Load an exported planner as a policy with `observe`, `infer` and `reset`; see `load_part`."""
    planner = load_part(path, device)
    return Policy(planner, Contract.load(path))


def git_revision() -> str:
    """Revision of the repository that holds this code, empty outside one."""
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout.strip()


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide what a model gives."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
