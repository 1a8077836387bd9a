"""Offline rollout: lockstep with every frame encoded once, against batch 1 with every frame encoded anew.

Run: python -m tests.bench.bench_rollout

Both ways answer the same questions with the same weights: true memory, so that every prompt carries memory
images whatever the untrained model says. The model's texts must be equal character by character.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from memer.contract import CameraLayout, Contract, PromptSettings
from memer.episode import Episode
from memer.keyframes import KeyframeRules
from memer.planners.base import PlannerRequest, PlannerResult
from memer.planners.wrappers import Wrapper
from memer.rollout import rollout_offline
from memer.tabletop import demonstrate
from models.planner import QwenVLPlanner
from models.qwen_vl import load_base, load_encoder
from models.tiny import make_tiny_base, planner_corpus
from tests.bench.report import emit

#: Tokens of an answer; about what a trained model writes.
ANSWER_TOKENS = 24
RULES = KeyframeRules.from_value([{"pattern": "^look inside the .* bin$", "select": "last"}])


class Forgetful(Wrapper):
    """Drops every feature before every question, so that all frames are encoded anew."""

    def plan(self, requests: Sequence[PlannerRequest]) -> list[PlannerResult]:
        for request in requests:
            self.planner.start_episode(request.session, instruction="")
        return self.planner.plan(requests)


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
    planner: QwenVLPlanner | Forgetful,
    episodes: Sequence[Episode],
    contract: Contract,
    *,
    batch: int,
    stride: int,
) -> tuple[float, dict[int, list[str]]]:
    """(seconds, texts per episode)."""
    start = time.perf_counter()
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
    return time.perf_counter() - start, texts


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=24)
    parser.add_argument("--stride", type=int, default=10, help="raw frames between steps")
    parser.add_argument("--slot", type=int, default=64, help="edge of a view, px")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
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
        model, encoder = load_base(base).model, load_encoder(base, contract)

        def planner() -> QwenVLPlanner:
            return QwenVLPlanner(model, encoder=encoder, contract=contract, max_new_tokens=ANSWER_TOKENS)

        run(planner(), episodes[:2], contract, batch=2, stride=arguments.stride * 4)  # warm-up
        fast, slow = [], []
        for _ in range(arguments.runs):
            lockstep = planner()
            seconds, texts = run(lockstep, episodes, contract, batch=len(episodes), stride=arguments.stride)
            fast.append(seconds)
            naive = planner()
            seconds, expected = run(Forgetful(naive), episodes, contract, batch=1, stride=arguments.stride)
            slow.append(seconds)
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
        identical_answers=texts == expected,
        frames_encoded=lockstep.frames_encoded,
        naive_frames_encoded=naive.frames_encoded,
    )


if __name__ == "__main__":
    main()
