"""Planners by name, as the commands build them (`planner=NAME`, conf/planner/*.yaml)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from memer.contract import Contract
from memer.episode import Episode
from memer.errors import UsageError
from memer.keyframes import KeyframeRules
from memer.planners.base import Planner
from memer.planners.baselines import ConstantPlanner, majority_planner
from memer.planners.oracle import ExpertPlanner, OraclePlanner
from memer.planners.wrappers import NoisyPlanner, NoMemory, NoPositions


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerContext:
    """What a command knows when it builds its planner.

    Attributes:
        contract: of the evaluation.
        rules: keyframes; for oracles only.
        closed_loop: whether an environment is played.
        model: the exported planner, None without policy=DIR.
        demonstrations: labelled episodes for label statistics; read when asked for.
    """

    contract: Contract
    rules: KeyframeRules
    closed_loop: bool
    model: Planner | None
    demonstrations: Callable[[], Iterable[Episode]]


def artifact(*, context: PlannerContext) -> Planner:
    """The exported planner of policy=DIR."""
    if context.model is None:
        raise UsageError("planner=artifact needs policy=DIR, a folder that callbacks/export wrote")
    return context.model


def oracle(*, context: PlannerContext, lookahead: int | None = None) -> Planner:
    """Knows the labels, or in closed loop asks the expert; `lookahead` in frames, None: the horizon."""
    if context.closed_loop:
        return ExpertPlanner(context.contract, context.rules, lookahead=lookahead)
    return OraclePlanner(context.contract, context.rules)


def noisy_oracle(
    *,
    context: PlannerContext,
    wrong_label: float,
    missed_position: float,
    false_position: float,
    parse_failure: float,
    seed: int,
) -> Planner:
    """The oracle with seeded faults; shares in 0..1."""
    labels = {segment.label for episode in context.demonstrations() for segment in episode.segments}
    return NoisyPlanner(
        oracle(context=context),
        labels=sorted(labels),
        wrong_label=wrong_label,
        missed_position=missed_position,
        false_position=false_position,
        parse_failure=parse_failure,
        seed=seed,
    )


def constant(*, context: PlannerContext, subtask: str, positions: Sequence[int] = ()) -> Planner:
    """The same answer at every step."""
    return ConstantPlanner(subtask, positions=positions)


def majority(*, context: PlannerContext) -> Planner:
    """The label that covers most frames of the demonstrations."""
    return majority_planner(context.demonstrations())


def no_positions(*, context: PlannerContext, of: Literal["artifact", "oracle"] = "artifact") -> Planner:
    """Another planner without its nominations."""
    return NoPositions(_inner(of, context=context))


def no_memory(*, context: PlannerContext) -> Planner:
    """The exported planner without memory images and history: the same weights."""
    return NoMemory(artifact(context=context))


def _inner(name: str, *, context: PlannerContext) -> Planner:
    if name not in ("artifact", "oracle"):
        raise UsageError(f"planner.of: {name!r}, must be artifact or oracle")
    return artifact(context=context) if name == "artifact" else oracle(context=context)
