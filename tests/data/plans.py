"""Plan settings over the paint-coded demonstrations of tests.data.synthetic."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from memer.contract import Contract, PromptSettings
from memer.episode import Episode, Segment
from memer.plan_settings import CanvasLayout, CanvasRegion, PlanSettings
from tests.data.synthetic import LAYOUT, SyntheticSource
from tests.fixtures.paint import read_identity

#: The wrist lies above the base, unlike in the stack of the camera layout; no view is resized.
CANVAS = CanvasLayout(
    height=112,
    width=96,
    regions=(
        CanvasRegion(camera="wrist", y=0, x=0, height=54, width=96),
        CanvasRegion(camera="base", y=56, x=0, height=54, width=96),
    ),
)


def plan_values(**choices: Any) -> dict[str, Any]:
    """Plain values of conf/contract, as a view config takes them."""
    regions = [{name: getattr(r, name) for name in r.__slots__} for r in CANVAS.regions]
    canvas = {"height": CANVAS.height, "width": CANVAS.width, "regions": regions}
    return {"plan": {"canvas": canvas, **choices}, "prompt": {"form": "segments"}}


def plan_contract(**choices: Any) -> Contract:
    """A contract of the synthetic data with plan settings."""
    return Contract(
        fps=10.0,
        cameras=LAYOUT,
        prompt=PromptSettings(form="segments"),
        plan=PlanSettings(canvas=CANVAS, **choices),
        statistics={"state": {"mean": (0.0,) * 3}, "action": {"mean": (0.0,) * 2}},
    )


def episode_with(cuts: Sequence[int], length: int, *, index: int = 3, first: int = 0) -> Episode:
    """An episode whose segments end before each of `cuts`; their texts repeat after two."""
    starts = [first, *cuts[:-1]]
    segments = tuple(
        Segment(a, b, f"task {k % 2}") for k, (a, b) in enumerate(zip(starts, cuts, strict=True))
    )
    return replace(SyntheticSource({index: length}).episode(index), segments=segments)


def shown(canvas: np.ndarray) -> tuple[int, int]:
    """(episode, frame) of a canvas, checked to be the same in both views."""
    assert canvas.dtype == np.uint8
    wrist, base = (read_identity(canvas[y : y + 54]) for y in (0, 56))
    assert (wrist[2], base[2]) == (1, 0)
    assert wrist[:2] == base[:2]
    return wrist[0], wrist[1]
