"""What an exported policy brings, checked against what is evaluated."""

from collections.abc import Mapping, Sequence
from typing import Any

from conf.compose import CONF_DIR
from conf.suggest import did_you_mean
from memer.artifact import load_policy
from memer.contract import Contract
from memer.errors import MemerError, UsageError
from memer.keyframes import KeyframeRules
from memer.policy import Policy
from memer.settings import field_names
from memer.windows import check_rate


def load_artifact(cfg: Mapping[str, Any]) -> Policy | None:
    """The exported planner of policy=DIR; None without one."""
    return None if cfg["policy"] is None else load_policy(cfg["policy"], device=cfg["device"])


def check_allowed(names: object) -> None:
    """Refuse an `allow_mismatch` that names no contract field: it would allow nothing, and nobody would know.

    Raises:
        UsageError: naming the first one, with close names.
    """
    if not isinstance(names, list | tuple):
        raise UsageError(f"allow_mismatch: {names!r}, must be a list such as [cameras.jpeg_quality,fps]")
    known = field_names(Contract)
    for name in map(str, names):
        # What lies below the statistics are features of the data, which no type knows.
        if name not in known and not name.startswith("statistics."):
            near = did_you_mean(name, known) or f"; fields are {', '.join(n for n in known if '.' not in n)}"
            raise UsageError(f"allow_mismatch: no contract field {name!r}{near}")


def policy_contract(policy: Policy, cfg: Mapping[str, Any]) -> Contract:
    """The artifact's contract, with overrides only where the user allows a mismatch by name."""
    contract = policy.contract.updated(cfg["contract"])
    check_rate(policy.contract, fps=contract.fps, subsample=contract.windows.frame_subsample)
    policy.contract.check_same(
        contract, what=f"{cfg['policy']} and this evaluation's contract.*", allow=cfg["allow_mismatch"]
    )
    return contract


def chosen_rules(given: str | None, contract: Contract, *, allow: Sequence[str]) -> KeyframeRules:
    """The rules asked for, else the shipped ones that the contract's hash names."""
    if given == "all_last":
        rules = KeyframeRules.all_last()
    elif given is not None:
        rules = KeyframeRules.from_file(given)
    else:
        shipped = [KeyframeRules.from_file(path) for path in sorted((CONF_DIR / "rules").glob("*.json"))]
        named = [rules for rules in shipped if rules.rules_hash == contract.rules_hash]
        if not named:
            raise UsageError(
                "keyframe_rules: the contract names no shipped rules; give keyframe_rules=FILE or all_last"
            )
        return named[0]
    if contract.rules_hash and rules.rules_hash != contract.rules_hash and "rules_hash" not in allow:
        raise MemerError(
            f"contract mismatch, keyframe_rules={given} and policy: rules_hash: {rules.rules_hash!r} against "
            f"{contract.rules_hash!r}; if meant, name the field in allow_mismatch=[rules_hash]"
        )
    return rules
