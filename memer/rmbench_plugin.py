"""RMBench plug-in: the three functions that its harness calls, around a plan-following policy.

`policy/MemerMap/deploy_policy.py` in the benchmark's folder needs one line:

    from memer.rmbench_plugin import eval, get_model, reset_model  # noqa: F401

and `deploy_policy.yml` beside it names the exported parts (conf/rmbench/deploy_policy.yml is an example). The
harness calls `get_model` once, `reset_model` before every episode, then `eval` until success or the limit.

Source: RMBench's policy interface (script/eval_policy.py); runtime specification, section 14.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from memer.contract import plan_of
from memer.errors import MemerError, SourceUnavailableError, UsageError
from memer.executors.base import ChunkRequest
from memer.executors.table import TablePlanner
from memer.plan_parts import (
    joint_contract,
    load_parts,
    possible_calibration,
    similarity_of,
    without_visual,
)
from memer.plan_policy import MapWamPolicy
from memer.progress import UpdateRule
from memer.rollout import episode_seed

log = logging.getLogger(__name__)

__all__ = ["RmbenchPolicy", "eval", "get_model", "reset_model"]

#: Left arm, its gripper, right arm, its gripper.
QPOS_DIM = 14
#: Keys of the harness itself.
HARNESS_KEYS = (
    "policy_name",
    "task_name",
    "task_config",
    "ckpt_setting",
    "seed",
    "instruction_type",
    "expert_data_num",
    "left_arm_dim",
    "right_arm_dim",
)
#: Faults of a service: the robot holds still and the benchmark goes on. All others are bugs or wrong settings
#: and stop it.
INFRASTRUCTURE = (SourceUnavailableError, ConnectionError, TimeoutError)


class TaskEnv(Protocol):
    """What the plug-in uses of the benchmark's environment."""

    eval_success: bool
    take_action_cnt: int
    step_lim: int

    def get_obs(self) -> Mapping[str, Any]:
        """Cameras and joint positions now."""
        ...

    def get_instruction(self) -> str:
        """Text of the task in this episode."""
        ...

    def take_action(self, action: NDArray[np.float64], action_type: str = "qpos") -> None:
        """Execute one action; silently nothing after success and at the step limit."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSettings:
    """Our own keys of deploy_policy.yml.

    Attributes:
        language: exported language planner, or a table of `TablePlanner.save` (*.json).
        executor: exported executor.
        visual: exported world model; null where the executor was trained without a visual plan.
        device: where the models run.
        steps: Euler steps.
        temperature: of the executor's noise, see `memer.plan_parts.load_parts`.
        replan: actions executed of every chunk.
        tau: threshold of the progress gate.
        window: executed actions in its mean.
        calibration: `alignment`, `none`, or `auto`: alignment where it is possible.
        similarity: what alignment compares frames by, see `memer.similarity.make_similarity`.
        update_rule: see `memer.progress.align_progress`.
        max_segment_steps: ends a segment by force; null: never.
        check_every: actions between two questions to an executor that classifies progress.
        strict: infrastructure faults stop the benchmark, too.
        log: file to which one JSON line per episode is added; null: none.
    """

    language: str
    executor: str
    visual: str | None = None
    device: str = "cuda"
    steps: int = 10
    temperature: float = 1.0
    replan: int = 24
    tau: float = 0.95
    window: int = 8
    calibration: str = "auto"
    similarity: str = "rgb_mae"
    update_rule: UpdateRule = "average_nearest2"
    max_segment_steps: int | None = None
    check_every: int = 8
    strict: bool = False
    log: str | None = None


@dataclass(slots=True)
class RmbenchPolicy:
    """What `get_model` gives: the policy, and the state of the episode that the harness plays.

    A fault of the infrastructure ends the policy's part of an episode: the robot holds still up to the step
    limit and the outcome is noted as `fault`, because the harness knows success and failure only.

    Attributes:
        policy: plans and acts.
        seed: of its noise; every episode gets its own from it.
        strict: see PluginSettings.
        log: see PluginSettings.
        episode: number of the episode, -1 before the first.
    """

    policy: MapWamPolicy
    seed: int = 0
    strict: bool = False
    log: Path | None = None
    episode: int = -1
    _started: bool = field(default=False, init=False)
    _noted: bool = field(default=True, init=False)
    _request: ChunkRequest | None = field(default=None, init=False)
    _seen: int = field(default=-1, init=False)
    _fault: str | None = field(default=None, init=False)

    def reset(self) -> None:
        """A new episode begins; one that the harness broke off is noted as such."""
        if not self._noted:
            self._note("aborted", steps=max(0, self._seen))
        self.episode += 1
        self._started = self._noted = False
        self._request, self._fault = None, None
        self._seen = -1

    def run_chunk(self, env: TaskEnv, observation: Mapping[str, Any]) -> None:
        """Execute one chunk: at least one action, at most `replan`, fewer where the gate fires.

        Args:
            env: the benchmark's environment.
            observation: of `env.get_obs()` now.

        Raises:
            MemerError: an observation lacks a key or has another shape, or a part failed.
        """
        if self.episode < 0:
            self.reset()
        if env.eval_success or env.take_action_cnt >= env.step_lim:
            return
        if self._seen != env.take_action_cnt:
            self._see(env, observation)
        while True:
            before = env.take_action_cnt
            env.take_action(self._action(observation), action_type="qpos")
            if env.eval_success or env.take_action_cnt >= env.step_lim:
                outcome = "success" if env.eval_success else "timeout"
                self._note(outcome if self._fault is None else "fault", steps=env.take_action_cnt)
                return
            if env.take_action_cnt == before:
                raise MemerError(
                    f"episode {self.episode}: the environment took no action at step {before} of "
                    f"{env.step_lim}; its step count does not grow"
                )
            observation = env.get_obs()
            self._see(env, observation)
            if self._request is not None or self._fault is not None:
                return  # the next call begins with a new chunk

    def _see(self, env: TaskEnv, observation: Mapping[str, Any]) -> None:
        """Show the policy an observation, once."""
        if self._fault is None:
            try:
                if not self._started:
                    # Only now does the harness' environment know the episode's instruction.
                    self.policy.reset(env.get_instruction(), seed=episode_seed(self.seed, self.episode))
                    self._started = True
                self._request = self.policy.observe(policy_observation(observation, self.policy))
            except INFRASTRUCTURE as error:
                self._fail(error)
        self._seen = env.take_action_cnt

    def _action(self, observation: Mapping[str, Any]) -> NDArray[np.float64]:
        """The next action of the policy; the present joint positions after a fault."""
        if self._fault is None and self._request is not None:
            request, self._request = self._request, None
            try:
                chunk = self.policy.executor.act(request.canvas, request.state, request.progress)
                self.policy.take(chunk)
            except INFRASTRUCTURE as error:
                self._fail(error)
        if self._fault is not None:
            return joint_positions(observation)
        action = self.policy.next_action().astype(np.float64)
        if action.shape != (QPOS_DIM,):
            raise MemerError(f"the executor gives {action.shape[0]} numbers, RMBench takes {QPOS_DIM}")
        return action

    def _fail(self, error: Exception) -> None:
        if self.strict:
            raise error
        self._fault = " ".join(f"{type(error).__name__}: {error}".split())
        log.warning("episode %d: %s; the robot holds still", self.episode, self._fault)

    def _note(self, outcome: str, *, steps: int) -> None:
        """Add the episode's line to the log."""
        self._noted = True
        if self.log is None:
            return
        line = {
            "episode": self.episode,
            "instruction": self.policy.instruction if self._started else None,
            "outcome": outcome,
            "steps": steps,
            "fault": self._fault,
            "segments": [
                {"text": s.text, "start": s.start, "end": s.end, "ended_by": s.ended_by}
                for s in (self.policy.segments if self._started else ())
            ],
        }
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")


def policy_observation(observation: Mapping[str, Any], policy: MapWamPolicy) -> dict[str, Any]:
    """What the policy sees of a benchmark's observation: true RGB views and the joint positions.

    Raises:
        MemerError: a camera or the joint positions are missing.
    """
    cameras = dict.fromkeys((*policy.plan.canvas.cameras, policy.plan.head_camera))
    images = {key: _entry(observation, "observation", key, "rgb") for key in cameras}
    return {"images": images, "state": joint_positions(observation).astype(np.float32)}


def joint_positions(observation: Mapping[str, Any]) -> NDArray[np.float64]:
    """float64[14]: left arm, gripper, right arm, gripper.

    Raises:
        MemerError: missing, or of another length.
    """
    vector = np.asarray(_entry(observation, "joint_action", "vector"), dtype=np.float64)
    if vector.shape != (QPOS_DIM,):
        raise MemerError(f"observation.joint_action.vector: shape {list(vector.shape)}, must be [{QPOS_DIM}]")
    return vector


def _entry(observation: Mapping[str, Any], *keys: str) -> Any:
    """A nested entry; a missing key is an error, never zeros."""
    value: Any = observation
    for depth, key in enumerate(keys):
        if not isinstance(value, Mapping) or key not in value:
            there = ", ".join(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
            raise MemerError(f"observation.{'.'.join(keys[: depth + 1])}: missing; there is {there}")
        value = value[key]
    return value


def make_policy(settings: PluginSettings) -> MapWamPolicy:
    """The policy of exported parts.

    Raises:
        UsageError: settings that do not fit the parts.
        SourceUnavailableError: a folder is not there.
        MemerError: parts that were not made for each other, or damaged ones.
    """
    folders = {"executor": settings.executor}
    if settings.visual is not None:
        folders["visual"] = settings.visual
    from_table = settings.language.endswith(".json")
    if not from_table:
        folders["language"] = settings.language
    parts = load_parts(
        folders, device=settings.device, steps=settings.steps, temperature=settings.temperature
    )
    contract = joint_contract(folders)
    if settings.visual is None:
        contract = without_visual(contract, trained=True)
    chosen = settings.calibration
    return MapWamPolicy(
        TablePlanner.load(settings.language) if from_table else parts["language"],
        parts.get("visual"),
        parts["executor"],
        contract,
        replan=settings.replan,
        tau=settings.tau,
        window=settings.window,
        calibration=possible_calibration(plan_of(contract)) if chosen == "auto" else chosen,  # type: ignore[arg-type]
        similarity=similarity_of(settings.similarity, parts),
        update_rule=settings.update_rule,
        max_segment_steps=settings.max_segment_steps,
        check_every=settings.check_every,
    )


def get_model(usr_args: Mapping[str, Any]) -> RmbenchPolicy:
    """Load the policy; the harness calls it once.

    Args:
        usr_args: deploy_policy.yml with the harness' additions: its own keys and those of PluginSettings.

    Raises:
        UsageError: an unknown key, or one that is missing.
    """
    own = {key: value for key, value in usr_args.items() if key not in HARNESS_KEYS}
    known = {f.name: f for f in fields(PluginSettings)}
    for key in own:
        if key not in known:
            raise UsageError(
                f"deploy_policy.yml: unknown key {key!r}; ours are {', '.join(known)}, the harness' "
                f"{', '.join(HARNESS_KEYS)}"
            )
    for key in ("language", "executor"):
        if not own.get(key):
            raise UsageError(f"deploy_policy.yml: {key} is missing; give an exported folder")
    settings = PluginSettings(**own)
    return RmbenchPolicy(
        make_policy(settings),
        seed=int(usr_args.get("seed") or 0),
        strict=settings.strict,
        log=None if settings.log is None else Path(settings.log),
    )


def eval(TASK_ENV: TaskEnv, model: RmbenchPolicy, observation: Mapping[str, Any]) -> None:
    """Execute one chunk of actions; the harness calls it until success or the step limit.

    Args:
        TASK_ENV: the benchmark's environment (its spelling).
        model: of `get_model`.
        observation: of `TASK_ENV.get_obs()` now.
    """
    model.run_chunk(TASK_ENV, observation)


def reset_model(model: RmbenchPolicy) -> None:
    """Forget the last episode; the harness calls it before every episode."""
    model.reset()
