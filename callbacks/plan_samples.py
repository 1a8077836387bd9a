"""A look at plans: real frames of a sample as a strip, and what the model makes in their place."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from memer.folders import replacing
from memer.sample import ExecutorSample, VisualPlannerSample

PlanSample = VisualPlannerSample | ExecutorSample

#: Smallest edge of a frame in a strip, px: tiny frames are magnified.
_LEAST_EDGE = 64


@runtime_checkable
class DrawsPlans(Protocol):
    """A model that can be asked for a plan in the middle of training, and goes on as if it had not been."""

    def draw_plans(self, samples: Sequence[VisualPlannerSample]) -> list[NDArray[np.uint8] | None]:
        """uint8[N, H, W, 3] per sample: its plan of the last segment, from all that precedes it.

        None where the model cannot be asked now.
        """
        ...


def plan_record(
    sample: PlanSample, *, drawn: NDArray[np.uint8] | None, folder: Path, stem: str
) -> dict[str, Any]:
    """One sample as plain values; its strips are written to `folder`/`stem`_NN.png.

    Args:
        sample: with frames; one that has latents alone gets no pictures.
        drawn: uint8[N, H, W, 3], the model's plan of the last segment of a visual planner's sample.
        folder: of the samples.
        stem: of the files.

    Returns:
        The keys of `callbacks.samples.sample_record`; `predicted` is None, pictures are the answer.
    """
    rows: list[tuple[str, NDArray[np.uint8]]]
    if isinstance(sample, VisualPlannerSample):
        text = "\n".join(
            [f"Task: {sample.instruction}", *(f"{k + 1}. {t}" for k, t in enumerate(sample.texts))]
        )
        rows = [("first frame and the plan frames of every segment", sample.frames)]
        if drawn is not None:
            rows.append(("real plan of the last segment", sample.frames[-len(drawn) :]))
            rows.append(("plan that the model makes", drawn))
        answer = sample.texts[-1]
    else:
        text = f"Task: {sample.instruction}\nSubtask: {sample.text}\nProgress: {sample.progress:.2f}"
        rows = [("plan", sample.plan_frames), ("present and future", sample.clip_frames)]
        answer = np.array2string(sample.actions[0], precision=3)
    images = []
    for k, (caption, frames) in enumerate(rows):
        if not len(frames):
            continue
        path = folder / f"{stem}_{k:02d}.png"
        with replacing(path) as temporary:
            strip(frames).save(temporary, format="PNG")
        images.append({"file": path.relative_to(folder).as_posix(), "caption": caption})
    return {
        "sample_id": f"{sample.source}/{sample.sample_id}",
        "text": text,
        "images": images,
        "answer": answer,
        "predicted": None,
    }


def strip(frames: NDArray[np.uint8]) -> Image.Image:
    """Frames uint8[N, H, W, 3] side by side with a gap, tiny ones magnified."""
    factor = -(-_LEAST_EDGE // min(frames.shape[1:3]))
    large = frames.repeat(factor, axis=1).repeat(factor, axis=2)
    gap = np.full((large.shape[1], 2, 3), 255, np.uint8)
    parts = [part for frame in large for part in (frame, gap)][:-1]
    return Image.fromarray(np.concatenate(parts, axis=1))
