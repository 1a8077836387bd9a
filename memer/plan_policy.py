"""MaP-WAM at run time: plan a segment, carry it out chunk by chunk, remember it, plan the next.

    reset(instruction)
    step(observation) -> action        one call per control step; the environment owns the loop

Inside a segment every observation after an executed action enters the buffer and the predicted progress of
that action enters the gate. When the gate fires, the rest of the chunk is dropped, 8 real frames of the
buffer become the record of the segment, and the same observation opens the next one (Algorithm 1,
arXiv 2609.11561).
"""

import copy
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from memer.cameras import prepare_frame
from memer.canvas import paint_canvas
from memer.contract import Contract
from memer.errors import MemerError, UsageError
from memer.executors.base import (
    ActionChunk,
    ChunkRequest,
    Executor,
    GivesLatents,
    LanguagePlanner,
    Pixels,
    SeesEveryFrame,
    TakesLatents,
    VisualPlanner,
)
from memer.plan_records import ChunkLog, SegmentEnd, SegmentLog, SegmentMemory
from memer.plan_settings import PlanSettings
from memer.progress import ProgressGate, UpdateRule, align_progress
from memer.settings import check_count
from memer.similarity import PlanSimilarity
from memer.windows import bucket_last_indices

#: A segment is over when a classifying executor says so with more than this probability.
FINISHED = 0.5

Part = TypeVar("Part")


class MapWamPolicy:
    """Algorithm 1 as a state machine that the environment drives.

    Args:
        language: names subtasks.
        visual: imagines them; None exactly where the executor reads no visual plan (`visual_plan: none`, or
            `executor_context: full_history`).
        executor: carries them out.
        contract: cameras and plan; `contract.plan` must be there.
        replan: actions executed of every chunk, 1..action_horizon.
        tau: progress above which a segment is finished.
        window: executed actions whose predicted progress the gate averages.
        calibration: `alignment` moves progress towards the more similar plan frame before every chunk.
        similarity: what alignment compares frames by; None: mean absolute RGB difference.
        update_rule: see `memer.progress.align_progress`.
        max_segment_steps: actions after which a segment is ended by force; None: never.
        check_every: executed actions between two questions to an executor that classifies progress.

    Raises:
        UsageError: settings that do not fit the contract's plan.
    """

    def __init__(
        self,
        language: LanguagePlanner,
        visual: VisualPlanner | None,
        executor: Executor,
        contract: Contract,
        *,
        replan: int = 24,
        tau: float = 0.95,
        window: int = 8,
        calibration: Literal["alignment", "none"] = "alignment",
        similarity: PlanSimilarity | None = None,
        update_rule: UpdateRule = "average_nearest2",
        max_segment_steps: int | None = None,
        check_every: int = 8,
    ) -> None:
        if contract.plan is None:
            raise UsageError("MapWamPolicy: the contract has no plan settings; train or export with them")
        self.plan: PlanSettings = contract.plan
        _check(self.plan, visual, replan=replan, calibration=calibration, check_every=check_every)
        if max_segment_steps is not None:
            check_count("max_segment_steps", max_segment_steps, least=1, note=", or null")
        if update_rule not in get_args(UpdateRule):
            raise UsageError(f"update_rule: {update_rule!r}, must be {' or '.join(get_args(UpdateRule))}")
        self._follows_latents = self.plan.plan_encoding == "episodic"
        if self._follows_latents:
            _hand_over(visual, executor, check_only=True)
        self.language, self.visual, self.executor = language, visual, executor
        self.contract = contract
        self.replan, self.calibration = replan, calibration
        self._similarity, self._update_rule = similarity, update_rule
        self.max_segment_steps, self.check_every = max_segment_steps, check_every
        self._gate = ProgressGate(tau, window)
        self._classifies = self.plan.progress_mode == "classification"
        self.reset("")

    def reset(self, instruction: str, seed: int = 0) -> None:
        """Start a new episode; nothing of the last one remains.

        Args:
            instruction: of the whole task.
            seed: of the planners' and the executor's noise.
        """
        self.instruction, self.seed = instruction, seed
        self.records: list[SegmentMemory] = []
        self.segments: list[SegmentLog] = []
        self.chunks: list[ChunkLog] = []
        self.steps = 0
        self.progress = 0.0
        self._first_head: Pixels | None = None
        self._buffer: list[Pixels] = []
        self._references: Pixels | None = None
        self._chunk: ActionChunk | None = None
        self._gate.reset()
        self._must_ask = False
        self._before_alignment = 0.0

    def step(self, observation: Mapping[str, Any]) -> NDArray[np.float32]:
        """The action to execute now.

        Args:
            observation: `images` by camera key (uint8[H, W, 3], RGB) and `state` float32[S], after the action
                that the last call returned; the first one of the episode after a reset.

        Returns:
            float32[A], the robot's units.

        Raises:
            MemerError: the observation does not fit the contract, or the executor gave no usable action.
        """
        request = self.observe(observation)
        if request is not None:
            started = time.perf_counter()
            chunk = self.executor.act(request.canvas, request.state, request.progress)
            self.take(chunk, act_ms=1e3 * (time.perf_counter() - started))
        return self.next_action()

    def observe(self, observation: Mapping[str, Any]) -> ChunkRequest | None:
        """First half of `step`: take an observation in.

        Returns:
            What the executor is to answer (`take`) before `next_action`; None while a chunk lasts. Several
            episodes may so share one call of the model.
        """
        views = observation["images"]
        state = _checked_state(observation["state"], self.steps)
        canvas = paint_canvas(views, canvas=self.plan.canvas, cameras=self.contract.cameras)
        if not self._buffer:
            self._begin(canvas, views)
        if isinstance(self.executor, SeesEveryFrame):
            self.executor.observe(canvas)
        if self._chunk is not None:
            self._after_action(canvas, state, views)
        if self._chunk is not None and self.chunks[-1].executed < self.replan:
            return None
        if self._must_ask and self._is_finished(canvas, state):
            self._close_segment(canvas, views, "classified")
        self._before_alignment = self.progress
        if self.calibration == "alignment" and self._references is not None:
            self.progress = align_progress(
                self.progress,
                self._references,
                canvas,
                similarity=self._similarity,
                rule=self._update_rule,
            )
        return ChunkRequest(canvas, state, self.progress)

    def take(self, chunk: ActionChunk, *, act_ms: float = 0.0) -> None:
        """Second half: the executor's answer to the last request.

        Raises:
            MemerError: too short, or an action is not finite.
        """
        self._chunk = _checked_chunk(chunk, replan=self.replan, step=self.steps)
        segment = self.segments[-1]
        self.chunks.append(
            ChunkLog(
                segment=segment.index,
                text=segment.text,
                step=self.steps,
                progress_before=self._before_alignment,
                progress=self.progress,
                act_ms=act_ms,
            )
        )

    def next_action(self) -> NDArray[np.float32]:
        """float32[A] of the chunk in force.

        Raises:
            MemerError: no chunk was taken for the last request.
        """
        if self._chunk is None or self.chunks[-1].executed >= self.replan:
            raise MemerError("policy: no chunk; observe, and answer its request, before the next action")
        log = self.chunks[-1]
        action = np.array(self._chunk.actions[log.executed], dtype=np.float32)
        log.executed += 1
        self.steps += 1
        return action

    def fork(self) -> "MapWamPolicy":
        """The same policy for another stream of observations: models are shared, states are not."""
        other = copy.copy(self)
        other.language, other.executor = _forked(self.language), _forked(self.executor)
        other.visual = None if self.visual is None else _forked(self.visual)
        other._gate = ProgressGate(self._gate.tau, self._gate.window)
        other.reset("")
        return other

    # What an observation does.

    def _begin(self, canvas: Pixels, views: Mapping[str, Any]) -> None:
        self._first_head = head_view(views, self.contract)
        if self.visual is not None:
            self.visual.reset(self.instruction, canvas, seed=self.seed)
        self.executor.reset(self.instruction, seed=self.seed)
        self._open_segment(canvas)

    def _after_action(self, canvas: Pixels, state: NDArray[np.float32], views: Mapping[str, Any]) -> None:
        """Count the executed action; leave the segment where the gate or the limit says so."""
        assert self._chunk is not None, "an action was executed, so there was a chunk"
        self._buffer.append(canvas)
        log = self.chunks[-1]
        raw = float(self._chunk.progress[log.executed - 1])
        log.predicted.append(raw)
        self.progress = min(1.0, max(0.0, raw))
        done = len(self._buffer) - 1
        ended: SegmentEnd | None = None
        self._must_ask = self._classifies  # again before the next chunk, unless it is answered here
        if self._classifies:
            if done % self.check_every == 0:
                self._must_ask = False
                ended = "classified" if self._is_finished(canvas, state) else None
        else:
            ended = "gate" if self._gate.add(raw) else None
            log.score = self._gate.score
        if ended is None and done == self.max_segment_steps:
            ended = "limit"
        if ended is not None:
            self._close_segment(canvas, views, ended)

    def _is_finished(self, canvas: Pixels, state: NDArray[np.float32]) -> bool:
        probability = float(self.executor.finished(canvas, state))
        self.chunks[-1].score = probability
        return probability > FINISHED

    def _close_segment(self, canvas: Pixels, views: Mapping[str, Any], ended_by: SegmentEnd) -> None:
        """Write real frames of the segment into memory; its last observation opens the next one."""
        kept = bucket_last_indices(0, len(self._buffer), self.plan.plan_frames)
        frames = np.stack([self._buffer[index] for index in kept])
        log = self.segments[-1]
        log.end, log.ended_by, log.frames = self.steps, ended_by, frames
        log.kept = [log.start + index for index in kept]
        if self.visual is not None:
            self.visual.write_back(frames, log.text)
        self.records.append(SegmentMemory(log.text, frames, head_view(views, self.contract)))
        self._open_segment(canvas)

    def _open_segment(self, canvas: Pixels) -> None:
        assert self._first_head is not None, "the episode has begun"
        self._buffer = [canvas]
        self._chunk = None
        self._must_ask = False  # a segment without an executed action is never finished
        self._gate.reset()
        self.progress = 0.0
        done = [record.text for record in self.records]
        images = [self._first_head, *(record.head for record in self.records)]
        started = time.perf_counter()
        text = self.language.next(self.instruction, done, images)
        named = time.perf_counter()
        plan = None if self.visual is None else self.visual.plan(text, canvas)
        imagined = time.perf_counter()
        if plan is None:
            self._references = None
        else:
            expected = (self.plan.plan_frames, *canvas.shape)
            if plan.shape != expected or plan.dtype != np.uint8:
                raise MemerError(
                    f"visual plan of segment {len(done) + 1}: {plan.dtype}{list(plan.shape)}, must be "
                    f"uint8{list(expected)}"
                )
            self._references = np.concatenate([canvas[None], plan])
        if self._follows_latents:
            _hand_over(self.visual, self.executor)
        self.executor.start_segment(self._references, text)
        cached = time.perf_counter()
        self.segments.append(
            SegmentLog(
                index=len(done) + 1,
                text=text,
                start=self.steps,
                plan=plan,
                language_ms=1e3 * (named - started),
                visual_ms=1e3 * (imagined - named),
                prefill_ms=1e3 * (cached - imagined),
            )
        )


def head_view(views: Mapping[str, Any], contract: Contract) -> Pixels:
    """The head camera's view, uint8[h, w, 3], as the language planner's training sees it.

    Raises:
        MemerError: that camera is missing.
    """
    assert contract.plan is not None, "a contract with plan settings"
    layout = replace(contract.cameras, camera_keys=(contract.plan.head_camera,))
    return prepare_frame(views, layout)


def _check(
    plan: PlanSettings, visual: VisualPlanner | None, *, replan: int, calibration: str, check_every: int
) -> None:
    check_count("replan", replan, least=1, most=plan.action_horizon, note=", the action horizon")
    if calibration not in ("alignment", "none"):
        raise UsageError(f"calibration: {calibration!r}, must be alignment or none")
    blind = plan.visual_plan == "none" or plan.executor_context == "full_history"
    if (visual is None) != blind:
        there = "there is none" if visual is None else "one was given"
        way_out = "give one" if visual is None else "use visual=none"
        raise UsageError(
            f"visual planner: {there}, but the contract says visual_plan {plan.visual_plan!r}, "
            f"executor_context {plan.executor_context!r}; {way_out}"
        )
    if calibration == "alignment":
        why = (
            "there is no visual plan"
            if visual is None
            else "progress is classified"
            if plan.progress_mode == "classification"
            else ""
        )
        if why:
            raise UsageError(f"calibration: alignment is impossible, {why}; use calibration=none")
    check_count("check_every", check_every, least=1)
    if plan.progress_mode == "classification" and plan.finish_margin < check_every:
        raise UsageError(
            f"check_every: {check_every} jumps over the {plan.finish_margin} frames (finish_margin) that "
            f"training calls finished; use at most {plan.finish_margin}"
        )


def _checked_state(state: Any, step: int) -> NDArray[np.float32]:
    values = np.asarray(state, dtype=np.float32)
    if values.ndim != 1:
        raise MemerError(f"step {step}: state of shape {list(values.shape)}, must be one vector")
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        raise MemerError(f"step {step}: state[{wrong[0]}] is {values[wrong[0]]}, must be finite")
    return values


def _checked_chunk(chunk: ActionChunk, *, replan: int, step: int) -> ActionChunk:
    if chunk.actions.ndim != 2 or len(chunk.actions) < replan or len(chunk.progress) < replan:
        raise MemerError(
            f"step {step}: a chunk of {len(chunk.actions)} actions and {len(chunk.progress)} values of "
            f"progress, replan={replan} needs at least that many"
        )
    if not np.isfinite(chunk.actions).all():
        raise MemerError(f"step {step}: the executor gave an action that is not finite; check its weights")
    return chunk


def _forked(part: Part) -> Part:
    """Another stream of a part; one that does not say how keeps no state."""
    fork = getattr(part, "fork", None)
    return part if fork is None else fork()


def _hand_over(visual: object, executor: object, *, check_only: bool = False) -> None:
    """Give the executor the latents of the last plan.

    Raises:
        UsageError: one of the two does not work on latents.
    """
    if not isinstance(visual, GivesLatents) or not isinstance(executor, TakesLatents):
        raise UsageError(
            "plan_encoding: episodic, the executor follows the world model's latents; both must be models"
        )
    if not check_only:
        executor.follow(visual.latents)
