"""Plans that a world model imagined for the segments of demonstrations, to train an executor on.

An executor that has seen real plans alone meets imagined ones at run time for the first time. The world model
is asked as the policy asks it: the evidence of segment k is the real frames of the segments before.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.building import chosen_episodes
from data.features.directory import ArrayDirectory, Row, build_directory, save_array
from data.features.layout import FORMAT_VERSION, plan_frames_name, shards_hash
from data.shards import ShardSet
from data.views.plans import canvas_stack, checked_segments
from memer.contract import Contract, plan_of
from memer.errors import MemerError
from memer.executors.base import VisualPlanner
from memer.plan_settings import PlanSettings
from memer.plan_windows import episode_plan_indices


def build_plans(
    shards: ShardSet,
    *,
    out: Path | str,
    planner: VisualPlanner,
    name: str,
    contract: Contract,
    episodes: Sequence[int] | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Let a world model imagine every segment of every episode, once.

    Args:
        shards: the demonstrations.
        out: directory to make; must not exist, be empty, or be an unfinished build of the same inputs.
        planner: the world model; its noise is seeded by the number of the episode.
        name: content hash or other name that tells this world model from others.
        contract: the world model's.
        episodes: numbers; None for all.
        progress: show a progress bar.

    Returns:
        The manifest.

    Raises:
        UsageError: unknown episodes; `out` holds something else.
        MemerError: shards that the world model was not made for; an episode without segments; plans of
            another shape than the contract says.
    """
    for field, (ours, theirs) in shards.contract.differences(contract).items():
        if field.split(".")[0] in ("fps", "cameras"):
            raise MemerError(
                f"{shards.root}: {field} {ours!r}, the world model was trained with {theirs!r}; take one "
                "that was trained on such shards"
            )
    described = {
        "format": FORMAT_VERSION,
        "key": {"shards": shards_hash(shards), **plans_key(plan_of(contract))},
        "world_model": name,
        "episodes": chosen_episodes(shards, episodes),
    }
    return build_directory(
        Path(out),
        described=described,
        episode=_Imagining(shards, planner, contract).run,
        finish=_finish,
        desc="plans",
        progress=progress,
    )


def plans_key(plan: PlanSettings) -> dict[str, Any]:
    """What imagined plans depend on besides shards and world model, as plain values."""
    key = {"view": "plans", "plan_frames": plan.plan_frames, "canvas": asdict(plan.canvas)}
    plain: dict[str, Any] = json.loads(json.dumps(key))
    return plain


class ImaginedPlans(ArrayDirectory):
    """A directory that `python -m data.build stage=plans` wrote; see ArrayDirectory."""

    kind = "plans"
    manifest_fields = ("key", "files", "episodes", "world_model")

    def frames(self, episode_index: int, number: int) -> NDArray[np.uint8]:
        """uint8[N, H, W, 3], the plan of a segment, from 0 on."""
        return np.array(self.array(plan_frames_name(episode_index))[number])


@dataclass(frozen=True, slots=True)
class _Imagining:
    """Writes the plans of one episode."""

    shards: ShardSet
    planner: VisualPlanner
    contract: Contract

    def run(self, folder: Path, index: int) -> Row:
        where = f"episode {index} of {self.shards.root}"
        episode, count = self.shards.episode(index), plan_of(self.contract).plan_frames
        try:
            segments = checked_segments(episode.segments, num_frames=episode.num_frames)
        except MemerError as error:
            raise type(error)(f"{where}: {error}") from None
        starts = [segment.start for segment in segments]
        shown = episode_plan_indices(segments, plan_frames=count) + starts
        canvases = canvas_stack(episode, shown, contract=self.contract, frames=None)
        records, present = canvases[1 : -len(starts)], canvases[-len(starts) :]
        self.planner.reset(episode.instruction_at(0), canvases[0], seed=index)
        plans = []
        for number, segment in enumerate(segments):
            plan = self.planner.plan(segment.label, present[number])
            if plan.dtype != np.uint8 or plan.shape != (count, *canvases.shape[1:]):
                raise MemerError(
                    f"{where}: the world model gives {plan.dtype}{list(plan.shape)} for segment "
                    f"{number + 1}, must be uint8{[count, *canvases.shape[1:]]}"
                )
            plans.append(plan)
            self.planner.write_back(records[count * number : count * (number + 1)], segment.label)
        name = plan_frames_name(index)
        return {"episode_index": index, "files": {name: save_array(folder / name, np.stack(plans))}}


def _finish(folder: Path, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "episodes": [{"episode_index": row["episode_index"]} for row in rows],
        "files": {name: size for row in rows for name, size in row["files"].items()},
    }
