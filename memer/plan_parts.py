"""Exported parts put together to one policy: language planner, world model, executor."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from memer.artifact import load_part
from memer.contract import Contract, plan_of
from memer.errors import MemerError, UsageError
from memer.plan_settings import PlanSettings
from memer.settings import check_count
from memer.similarity import PlanSimilarity, make_similarity

#: Contract fields that two parts must agree on; the others concern one of them alone.
SHARED_FIELDS = ("fps", "cameras", "plan.canvas", "plan.plan_frames", "plan.head_camera")
#: What a part is asked to do.
METHODS = {"language": "next", "visual": "plan", "executor": "act"}
#: Whose contract the policy takes, first those that come first.
ORDER = ("executor", "visual", "language")


def load_parts(
    folders: Mapping[str, Path | str],
    *,
    device: str = "cpu",
    steps: int | None = None,
    temperature: float | None = None,
) -> dict[str, Any]:
    """Load exported parts.

    Args:
        folders: `language`, `visual`, `executor` -> exported folder.
        device: where they run.
        steps: Euler steps of world model and executor; None keeps theirs.
        temperature: deviation of the noise that the executor's chunks start from; None keeps its own.

    Raises:
        UsageError: fewer steps than one, a negative temperature.
        SourceUnavailableError: no such folder, or no exported one.
        MemerError: damaged, or another part than its role asks for.
    """
    if steps is not None:
        check_count("steps", steps, least=1)
    if temperature is not None:
        check_temperature(temperature)
    parts = {name: load_part(folder, device=device) for name, folder in folders.items()}
    for name, part in parts.items():
        if not hasattr(part, METHODS[name]):
            raise MemerError(
                f"{name}={folders[name]}: is a {type(part).__name__}, which cannot {METHODS[name]}()"
            )
    for name in ("visual", "executor"):
        if name in parts and steps is not None:
            parts[name].steps = steps
    if "executor" in parts and temperature is not None:
        parts["executor"].temperature = float(temperature)
    return parts


def check_temperature(value: object) -> None:
    """Raise a UsageError unless a value is a deviation."""
    if type(value) not in (int, float) or not 0 <= value < math.inf:  # type: ignore[operator]
        raise UsageError(f"temperature: {value!r}, must be a number from 0 on")


def joint_contract(folders: Mapping[str, Path | str], *, allow: Sequence[str] = ()) -> Contract:
    """One contract for a policy of these parts: the executor's, with the kind of plan that there is.

    Args:
        folders: as `load_parts`, at least one.
        allow: contract fields that may differ.

    Raises:
        MemerError: parts that were not made for each other, by field.
    """
    contracts = {name: Contract.load(folders[name]) for name in ORDER if name in folders}
    for name, contract in contracts.items():
        if contract.plan is None:
            raise MemerError(
                f"{name} {folders[name]}: its contract has no plan settings; this is no part of MaP-WAM"
            )
    first, *others = contracts
    joint = contracts[first]
    for name in others:
        apart = joint.differences(contracts[name])
        free = [f for f in apart if not any(f == s or f.startswith(s + ".") for s in SHARED_FIELDS)]
        joint.check_same(contracts[name], what=f"{first} and {name}", allow=[*free, *allow])
    plan = plan_of(joint)
    if "visual" in contracts and plan.visual_plan != "none":
        kind = plan_of(contracts["visual"]).visual_plan
        return replace(joint, plan=replace(plan, visual_plan=kind))
    return joint


def without_visual(contract: Contract, *, trained: bool) -> Contract:
    """The contract of a policy without visual planner.

    Args:
        contract: of the other parts.
        trained: whether the executor is a model, which must have been trained without a visual plan.

    Raises:
        MemerError: the executor needs a plan.
    """
    plan = plan_of(contract)
    if plan.executor_context == "full_history":
        return contract
    if trained and plan.visual_plan != "none":
        raise MemerError(f"visual=none: the executor was trained with visual_plan {plan.visual_plan!r}")
    return replace(contract, plan=replace(plan, visual_plan="none"))


def similarity_of(kind: str, parts: Mapping[str, Any]) -> PlanSimilarity:
    """What alignment compares frames by; `latent_mse` encodes with the codec of a loaded part.

    Args:
        kind: see `memer.similarity.make_similarity`.
        parts: of `load_parts`.

    Raises:
        UsageError: an unknown kind, or `latent_mse` without a part that has a codec.
    """
    part = parts.get("executor") or parts.get("visual")
    encode = None if part is None else lambda pictures: part.codec.encode(pictures.to(part.device))
    return make_similarity(kind, encode=encode)


def possible_calibration(plan: PlanSettings) -> Literal["alignment", "none"]:
    """`alignment` where there are a plan and a progress to align."""
    possible = (
        plan.visual_plan != "none" and plan.progress_mode == "modality" and plan.executor_context == "plan"
    )
    return "alignment" if possible else "none"
