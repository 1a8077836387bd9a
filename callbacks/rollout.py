"""Scores of an exported model by rollout, for choosing among merges (see callbacks.merge.Scorer)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from memer.artifact import load_policy
from memer.closed_loop import COUNTED, ClosedLoopEpisode, rollout_closed_loop
from memer.episode import Episode
from memer.errors import MemerError, UsageError
from memer.keyframes import KeyframeRules
from memer.rollout import rollout_offline
from memer.tabletop import make_controller, make_env


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoopScorer:
    """Plays episodes of the embedded benchmark.

    Attributes:
        task: of memer.tabletop.
        num_episodes: of the split, from the first on; the same ones for every model.
        split: `val` leaves the test episodes for the evaluation.
        seed: of the set of episodes.
        perturb: chance per second of a perturbation.
        frame_size: edge of both views before they go into their slots, px; as in training.
        planner_stride: frames between two questions.
        batch_size: episodes in lockstep.
        device: where the model runs.
    """

    task: str
    num_episodes: int
    split: str = "val"
    seed: int = 0
    perturb: float = 0.0
    frame_size: int = 128
    planner_stride: int = 5
    batch_size: int = 50
    device: str = "cpu"

    def __call__(self, artifact: Path) -> Mapping[str, float]:
        """`success` rate, means of the task's other measures, and the number of `episodes` behind them."""
        policy = load_policy(artifact, device=self.device)
        episodes = (
            ClosedLoopEpisode(
                index,
                make_env(
                    self.task,
                    split=self.split,
                    index=index,
                    seed=self.seed,
                    perturb=self.perturb,
                    frame_size=self.frame_size,
                ),
                make_controller(self.task),
            )
            for index in range(self.num_episodes)
        )
        finished = rollout_closed_loop(
            episodes,
            policy.planner,
            policy.contract,
            planner_stride=self.planner_stride,
            batch_size=self.batch_size,
            seed=self.seed,
            reference=False,
        )
        counted = [e.extra for e in finished if e.extra["outcome"] in COUNTED]
        if not counted:
            raise MemerError(f"{artifact}: no episode of {self.task} could be played to its end")
        names = [n for n, v in counted[0]["measures"].items() if isinstance(v, bool | int | float)]
        means = {n: sum(float(e["measures"][n]) for e in counted) / len(counted) for n in names}
        return {**means, "episodes": float(len(counted))}


class GivesEpisodes(Protocol):
    """A set of labelled episodes, e.g. shards."""

    def episode_indices(self) -> list[int]:
        """Numbers of the episodes."""
        ...

    def episode(self, index: int) -> Episode:
        """One of them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineScorer:
    """Replays labelled episodes with memory feedback.

    Attributes:
        data: the episodes.
        rules: keyframe rules, a file or `all_last`.
        episodes: numbers, None for all.
        eval_stride: raw frames between evaluated steps.
        batch_size: episodes in lockstep.
        device: where the model runs.
    """

    data: GivesEpisodes
    rules: str
    episodes: tuple[int, ...] | None = None
    eval_stride: int = 5
    batch_size: int = 8
    device: str = "cpu"

    def __call__(self, artifact: Path) -> Mapping[str, float]:
        """`accuracy`: share of steps with the right subtask, parse failures counted as wrong."""
        policy = load_policy(artifact, device=self.device)
        rules = KeyframeRules.all_last() if self.rules == "all_last" else KeyframeRules.from_file(self.rules)
        numbers: Iterable[int] = self.data.episode_indices() if self.episodes is None else self.episodes
        finished = rollout_offline(
            (self.data.episode(number) for number in numbers),
            policy.planner,
            policy.contract,
            rules,
            eval_stride=self.eval_stride,
            batch_size=self.batch_size,
        )
        right = [bool(row["normalized_correct"]) for episode in finished for row in episode.rows]
        if not right:
            raise UsageError("OfflineScorer.episodes: no labelled step to score")
        return {"accuracy": sum(right) / len(right)}
