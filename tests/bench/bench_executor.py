"""Executor latency and memory per chunk against the length of the history; what omitting the future saves.

    python -m tests.bench.bench_executor [--points 0,400,1700] [--size tiny|full] [--out runs/bench_executor]

Random weights; latents in, actions out. Modes:

* `plan cached`: the plan's keys are kept for the segment; per chunk O and the Euler steps.
* `plan uncached`: the plan is prefilled in every chunk.
* `full_history cached`: one latent per past frame; per chunk the frames of the last chunk are appended, then
  O and the Euler steps.
* `full_history uncached`: the whole history is prefilled in every chunk (once, not at every Euler step).

The plan executor keeps nothing of the history: its points repeat the same work, so their spread shows how
quiet the machine is. `--limit-gib` records points whose weights and keys would not fit as `oom` and skips
them. On a CPU the tiny model's frames are smaller than in training (`--latent 4`: 4 tokens each), because the
uncached history costs the square of its tokens.
"""

import argparse
import functools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from models.mot import ExpertSize
from models.wap import PlanCache, WapModel, WapSettings, full_settings, tiny_settings
from tests.bench.report import emit
from tests.bench.sweep import Row, measure, measure_in_turn, median_and_p95, write

EXPERIMENT = "executor_latency"


class Inputs:
    """Random latents, text, state and progress of one size."""

    def __init__(
        self, settings: WapSettings, *, batch: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.settings, self.batch, self.device, self.dtype = settings, batch, device, dtype
        self.text = self.normal(batch, settings.text_tokens, settings.text_dim)
        self.state = self.normal(batch, settings.state_dim)
        self.progress = torch.full((batch,), 0.5, device=device, dtype=dtype)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def latents(self, frames: int) -> torch.Tensor:
        s = self.settings
        return self.normal(self.batch, s.channels, frames, s.latent_height, s.latent_width)

    def chunk(self, model: WapModel, plan: PlanCache, observation: torch.Tensor, *, steps: int) -> None:
        inputs = (self.text, self.state, self.progress)
        obs = model.prefill_obs(plan, observation, *inputs)
        model.sample(plan, obs, *inputs, steps=steps)


class Sweep:
    """Measures every mode at every point; one JSON line and one row each."""

    def __init__(self, args: argparse.Namespace, settings: WapSettings, device: torch.device) -> None:
        self.args, self.settings, self.device = args, settings, device
        dtype = torch.bfloat16 if args.size == "full" else torch.float32
        self.plan_model = build(settings, device, dtype)
        self.history_model = share(self.plan_model, replace(settings, executor_context="full_history"))
        self.inputs = Inputs(settings, batch=1, device=device, dtype=dtype)
        self.observation = self.inputs.latents(1)
        self.weight_bytes = sum(p.numel() * p.element_size() for p in self.plan_model.parameters())
        self.token_bytes = 2 * settings.video.num_layers * settings.video.attention_dim * dtype.itemsize
        self.rows: list[Row] = []

    def plan(self) -> None:
        """Both plan modes, all points in turn."""
        model, inputs, points = self.plan_model, self.inputs, self.args.points
        latents = inputs.latents(self.settings.plan_latents)
        kept = model.prefill_plan(latents, inputs.text)

        def cached() -> None:
            inputs.chunk(model, kept, self.observation, steps=self.args.steps)

        def uncached() -> None:
            plan = model.prefill_plan(latents, inputs.text)
            inputs.chunk(model, plan, self.observation, steps=self.args.steps)

        calls = [call for _ in points for call in (cached, uncached)]
        figures = measure_in_turn(calls, device=self.device, warmup=self.args.warmup, runs=self.args.runs)
        places = [(mode, x) for x in points for mode in ("plan cached", "plan uncached")]
        for (mode, x), figure in zip(places, figures, strict=True):
            self.record(mode, x, self.settings.plan_latents, figure)

    def history(self) -> None:
        """Both full-history modes, point by point; the kept history grows with the points."""
        model, inputs, args = self.history_model, self.inputs, self.args
        past = inputs.latents(max(args.points))
        history = PlanCache([], 0)
        for x in args.points:
            base = max(0, x - args.replan)
            if self.fits(x):
                history = model.extend_history(history, past[:, :, history.latents : base], inputs.text)

            def cached(x: int = x, base: int = base, before: PlanCache = history) -> None:
                now = model.extend_history(before, past[:, :, base:x], inputs.text)
                inputs.chunk(model, now, self.observation, steps=args.steps)

            def uncached(x: int = x) -> None:
                now = model.prefill_plan(past[:, :, :x], inputs.text)
                inputs.chunk(model, now, self.observation, steps=args.steps)

            for mode, fn in (("full_history cached", cached), ("full_history uncached", uncached)):
                figure = None
                if self.fits(x):
                    try:
                        figure = measure(
                            fn, device=self.device, warmup=args.warmup, runs=args.runs, budget_s=args.budget_s
                        )
                    except (torch.OutOfMemoryError, MemoryError):
                        if self.device.type == "cuda":
                            torch.cuda.empty_cache()
                self.record(mode, x, x, figure)

    def fits(self, frames: int) -> bool:
        """Weights and keys are within --limit-gib."""
        needed = self.weight_bytes + self.token_bytes * frames * self.settings.frame_tokens
        return self.args.limit_gib is None or needed <= self.args.limit_gib * 2**30

    def record(self, mode: str, x: int, frames: int, figure: tuple[list[float], int | None] | None) -> None:
        """Add a row; without a figure, the point was out of memory."""
        s, args = self.settings, self.args
        prefix = frames * s.frame_tokens
        row = Row(
            experiment=EXPERIMENT,
            mode=mode,
            x=x,
            median_ms=None,
            p95_ms=None,
            peak_bytes=None,
            tokens=prefix + s.frame_tokens + s.action_horizon + s.progress_tokens,
            status="oom",
        )
        if figure is not None:
            seconds, peak = figure
            median_ms, p95_ms = median_and_p95(seconds)
            row = replace(row, median_ms=median_ms, p95_ms=p95_ms, peak_bytes=peak, status="ok")
        self.rows.append(row)
        emit(
            "executor",
            **asdict(row),
            cache_bytes=self.token_bytes * prefix,
            weight_bytes=self.weight_bytes,
            runs=0 if figure is None else len(figure[0]),
            size=args.size,
            steps=args.steps,
            replan=args.replan,
            tokens_per_frame=s.frame_tokens,
            threads=torch.get_num_threads(),
            device=self.device.type,
        )


def build(settings: WapSettings, device: torch.device, dtype: torch.dtype) -> WapModel:
    torch.manual_seed(0)
    with device:
        return WapModel(settings).eval().to(dtype)


def share(model: WapModel, settings: WapSettings) -> WapModel:
    """The same weights under other settings."""
    with torch.device("meta"):
        other = WapModel(settings)
    other.load_state_dict(model.state_dict(), assign=True)
    return other.eval()


def future(args: argparse.Namespace, settings: WapSettings, device: torch.device, *, size: str) -> None:
    """Time of the Euler steps with and without the future against what token counts predict."""
    dtype = torch.bfloat16 if size == "full" else torch.float32
    model = build(settings, device, dtype)
    predicted = 1 - step_operations(settings, future=False) / step_operations(settings, future=True)
    for batch in args.batches:
        inputs = Inputs(settings, batch=batch, device=device, dtype=dtype)
        given = (inputs.text, inputs.state, inputs.progress)
        plan = model.prefill_plan(inputs.latents(settings.plan_latents), inputs.text)
        obs = model.prefill_obs(plan, inputs.latents(1), *given)
        calls = [
            functools.partial(sample, plan, obs, *given, steps=args.steps)
            for sample in (model.sample_joint, model.sample)
        ]
        figures = measure_in_turn(calls, device=device, warmup=args.warmup, runs=args.runs)
        with_future, without = (median_and_p95(seconds)[0] for seconds, _ in figures)
        saved = 1 - without / with_future
        emit(
            "executor_future",
            size=size,
            hidden=[settings.video.hidden, settings.action.hidden, settings.progress.hidden],
            layers=settings.video.num_layers,
            batch=batch,
            with_future_ms=with_future,
            without_ms=without,
            saved=saved,
            predicted_by_tokens=predicted,
            measured_over_predicted=saved / predicted,
            within_10_percent=abs(saved / predicted - 1) <= 0.1,
            runs=args.runs,
            steps=args.steps,
            threads=torch.get_num_threads(),
            device=device.type,
        )


def medium_settings() -> WapSettings:
    """The tiny tokens with a quarter of the full widths in two layers: the products outweigh the rest."""
    attention = {"num_layers": 2, "num_heads": 6, "head_dim": 128}
    return tiny_settings(
        video=ExpertSize(hidden=768, ffn=3584, **attention),
        action=ExpertSize(hidden=256, ffn=1024, **attention),
        progress=ExpertSize(hidden=64, ffn=256, **attention),
    )


def step_operations(settings: WapSettings, *, future: bool) -> float:
    """Multiplications of an Euler step by token counts: linear layers and attention of every token."""
    s = settings
    prefix = (s.plan_latents * s.has_plan + 1) * s.frame_tokens
    text = s.context_tokens + 1 + s.progress_condition
    chunk = s.action_horizon + s.progress_tokens
    groups = [
        (s.action, s.action_horizon, s.action_dim, prefix + chunk),
        (s.progress, s.progress_tokens, 1, prefix + chunk),
    ]
    if future:
        tokens = s.future_latents * s.frame_tokens
        groups.append((s.video, tokens, s.token_dim, prefix + tokens))
    total = 0.0
    for size, tokens, token_dim, keys in groups:
        layer = 6 * size.hidden * size.attention_dim + 2 * size.hidden * size.ffn  # q k v o, q o of the text
        layer += 2 * size.attention_dim * (keys + text)
        total += tokens * (size.num_layers * layer + 2 * token_dim * size.hidden)
    return total


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--points", type=_numbers, default=list(range(0, 1701, 100)), help="history frames")
    parser.add_argument("--size", choices=("tiny", "full"), default="tiny")
    parser.add_argument(
        "--latent", type=int, default=4, help="latent rows and columns of a tiny frame (8 in training)"
    )
    parser.add_argument("--batches", type=_numbers, default=[1, 16], help="of the check of the future")
    parser.add_argument("--steps", type=int, default=10, help="Euler steps")
    parser.add_argument("--replan", type=int, default=12, help="frames between two chunks")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument(
        "--budget-s", type=float, default=3.0, help="time after which a point is not repeated"
    )
    parser.add_argument(
        "--limit-gib", type=float, default=None, help="memory above which a point counts as oom"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_executor"))
    args = parser.parse_args(argv)
    args.points = sorted(set(args.points))
    device = torch.device(args.device)
    tiny = tiny_settings(latent_height=args.latent, latent_width=args.latent)
    settings = tiny if args.size == "tiny" else full_settings()
    sweep = Sweep(args, settings, device)
    sweep.plan()
    sweep.history()
    rows = sweep.rows
    title = f"ms per chunk, {args.size}, {settings.frame_tokens} tokens per frame"
    write(rows, args.out, name=EXPERIMENT, title=title, x_label="history frames")
    flat = [row.median_ms for row in rows if row.mode == "plan cached" and row.median_ms is not None]
    if flat:
        middle = statistics.median(flat)
        emit(
            "executor_flatness",
            mode="plan cached",
            median_ms=middle,
            largest_deviation=max(abs(ms / middle - 1) for ms in flat),
            last_over_first=flat[-1] / flat[0],
        )
    sizes = (
        {"full": settings} if args.size == "full" else {"tiny": tiny_settings(), "medium": medium_settings()}
    )
    for size, chosen in sizes.items():
        future(args, chosen, device, size=size)


if __name__ == "__main__":
    main()
