"""Offline rollout: lockstep that computes nothing twice, against batch 1 with every frame encoded anew.

    python -m tests.bench.bench_rollout [--episodes 24] [--runs 3] [--training-steps 100]

All ways answer the same questions with the same weights: true memory, so that every prompt carries memory
images whatever the model says. The model is trained for a moment, so that its answers are what planners
write; `--training-steps 0` measures noise. The texts must be equal character by character. The naive way is
the same code that forgets everything before every question; the library's own `generate` runs once besides,
for its answers and, being slower still, for a second ratio. Times are CPU seconds on one thread, so that
other work on the machine shifts neither side.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.views.planner import PlannerView
from memer.contract import CameraLayout, Contract, PromptSettings
from memer.episode import Episode
from memer.keyframes import KeyframeRules
from memer.planners.base import PlannerRequest, PlannerResult
from memer.planners.wrappers import Wrapper
from memer.prompts import parse_answer
from memer.rollout import rollout_offline
from memer.tabletop import demonstrate
from models.lit.planner import PlannerModule
from models.optim import OptimSettings, learning_rate_factor
from models.planner import QwenVLPlanner
from models.prompt_encoder import PromptEncoder
from models.tiny import make_tiny_base, planner_corpus
from tests.bench.report import emit
from tests.models.reference import single_answer

#: Tokens of an answer; about what a trained model writes.
ANSWER_TOKENS = 24
TRAINING_EPISODES, TRAINING_BATCH = 12, 16
RULES = KeyframeRules.from_value([{"pattern": "^look inside the .* bin$", "select": "last"}])


class Forgetful(Wrapper):
    """Drops everything kept before every question: frames, prompt tokens, answers."""

    def plan(self, requests: Sequence[PlannerRequest]) -> list[PlannerResult]:
        for request in requests:
            self.planner.start_episode(request.session, instruction="")
        return self.planner.plan(requests)


class Library(Wrapper):
    """The library's image processor and `generate`, one question after the other."""

    planner: QwenVLPlanner

    def plan(self, requests: Sequence[PlannerRequest]) -> list[PlannerResult]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: PlannerRequest) -> PlannerResult:
        encoder, model = self.planner.encoder, self.planner.model
        text = single_answer(model, encoder, request.question, max_new_tokens=ANSWER_TOKENS)
        answer = parse_answer(text, num_positions=len(request.question.recent_keys))
        if not answer.ok:
            return PlannerResult(status="parse_error", raw_text=text, error=answer.error)
        positions = tuple(answer.positions)
        return PlannerResult(status="ok", subtask=answer.subtask, positions=positions, raw_text=text)


def trained_model(base: Path, contract: Contract, *, steps: int) -> tuple[Any, PromptEncoder]:
    """A tiny model that answers in the right form, mostly rightly, and its encoder."""
    view = PlannerView(contract, rules=RULES, sample_stride=10)
    settings = OptimSettings(total_steps=max(steps, 1), learning_rate=2e-3, warmup_ratio=0.1)
    module = PlannerModule(str(base), contract=view.contract, optim=settings, pack_tokens=0)
    module.configure_model()
    samples = []
    for index in range(TRAINING_EPISODES if steps else 0):
        episode = demonstrate("object_search", split="train", index=index, frame_size=128)
        targets = view.targets(episode.segments, num_frames=episode.num_frames)
        samples += [view.sample(episode, t, targets=targets) for t in view.steps(targets).steps]
    collate, rng = module.make_collator(), np.random.default_rng(0)
    optimizer = torch.optim.AdamW(module.trainable().values(), lr=settings.learning_rate, betas=(0.9, 0.98))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * learning_rate_factor(step, settings=settings)
        chosen = rng.choice(len(samples), TRAINING_BATCH, replace=False)
        module.answer_losses(collate([samples[i] for i in chosen]))[0].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return module.model.eval(), module.make_encoder()


def bench_contract(slot: int) -> Contract:
    """The embedded benchmark's layout with square slots of `slot` px."""
    return Contract(
        fps=15.0,
        cameras=CameraLayout(camera_keys=("base", "wrist"), view_width=slot, view_height=slot),
        prompt=PromptSettings(
            system_text="Name the subtask to execute now and the positions of frames to keep, as JSON.",
            memory_header="Selected frames:",
            recent_header="Recent frames:",
        ),
        min_pixels=1_024,
        max_pixels=2 * slot * slot,
    )


def run(
    planner: QwenVLPlanner | Forgetful | Library,
    episodes: Sequence[Episode],
    contract: Contract,
    *,
    batch: int,
    stride: int,
) -> tuple[float, dict[int, list[str]]]:
    """(CPU seconds, texts per episode)."""
    start = time.process_time()
    rollouts = rollout_offline(
        episodes,
        planner,
        contract,
        RULES,
        eval_stride=stride,
        batch_size=batch,
        memory_source="gt",
    )
    texts = {r.episode_index: [row["raw_text"] for row in r.rows] for r in rollouts}
    return time.process_time() - start, texts


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=24)
    parser.add_argument("--stride", type=int, default=10, help="raw frames between steps")
    parser.add_argument("--slot", type=int, default=64, help="edge of a view, px")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--training-steps", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    contract = bench_contract(arguments.slot)
    episodes = [
        demonstrate("object_search", split="val", index=index, frame_size=128)
        for index in range(arguments.episodes)
    ]
    labels = sorted({segment.label for episode in episodes for segment in episode.segments})
    instructions = sorted({span.text for episode in episodes for span in episode.instructions})
    with tempfile.TemporaryDirectory() as folder:
        corpus = planner_corpus(subtasks=labels, instructions=instructions, prompt=contract.prompt)
        base = make_tiny_base(
            Path(folder) / "base",
            corpus=corpus,
            min_pixels=contract.min_pixels,
            max_pixels=contract.max_pixels,
        )
        model, encoder = trained_model(base, contract, steps=arguments.training_steps)

        def planner() -> QwenVLPlanner:
            return QwenVLPlanner(model, encoder=encoder, contract=contract, max_new_tokens=ANSWER_TOKENS)

        run(planner(), episodes[:2], contract, batch=2, stride=arguments.stride * 4)  # warm-up
        fast, slow, equal = [], [], True
        for _ in range(arguments.runs):
            lockstep = planner()
            seconds, texts = run(lockstep, episodes, contract, batch=len(episodes), stride=arguments.stride)
            fast.append(seconds)
            naive = planner()
            seconds, expected = run(Forgetful(naive), episodes, contract, batch=1, stride=arguments.stride)
            slow.append(seconds)
            equal = equal and texts == expected
        library_s, reference = run(Library(planner()), episodes, contract, batch=1, stride=arguments.stride)
    steps = sum(len(rows) for rows in expected.values())
    fast.sort()
    slow.sort()
    emit(
        "rollout",
        sizes={
            "episodes": len(episodes),
            "steps": steps,
            "batch": len(episodes),
            "stacked_px": list(contract.cameras.stacked_size),
            "answer_tokens": ANSWER_TOKENS,
            "training_steps": arguments.training_steps,
            "threads": torch.get_num_threads(),
        },
        warmup=1,
        runs=arguments.runs,
        median_s=fast[len(fast) // 2],
        p95_s=fast[-1],
        naive_median_s=slow[len(slow) // 2],
        ratio=slow[len(slow) // 2] / fast[len(fast) // 2],
        steps_per_s=steps / fast[len(fast) // 2],
        naive_steps_per_s=steps / slow[len(slow) // 2],
        library_s=library_s,
        library_ratio=library_s / fast[len(fast) // 2],
        identical_answers=equal and texts == reference,
        different_answers=len({text for rows in texts.values() for text in rows}),
        frames_encoded=lockstep.frames_encoded,
        naive_frames_encoded=naive.frames_encoded,
    )


if __name__ == "__main__":
    main()
