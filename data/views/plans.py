"""What the views of plans share: settings, checked segments, stacks of canvases."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from data.views.frames import FrameCache, FrameProvider
from memer.contract import Contract, plan_of
from memer.episode import Episode, Segment
from memer.errors import MemerError
from memer.plan_settings import PlanSettings

PlanSource = Literal["real", "generated", "mixed"]


def checked_segments(segments: Sequence[Segment], *, num_frames: int) -> tuple[Segment, ...]:
    """The segments of an episode in order, if a plan can follow from them.

    Raises:
        MemerError: there is none, one has no text, or they overlap or leave the episode.
    """
    if not segments:
        raise MemerError("segments: none; label the episode, or choose others with episodes=[...]")
    end = 0
    for number, segment in enumerate(segments, start=1):
        if not segment.label.strip():
            raise MemerError(f"segments: number {number} [{segment.start}, {segment.end}) has no text")
        if segment.start < end or segment.end > num_frames:
            raise MemerError(
                f"segments: number {number} [{segment.start}, {segment.end}) overlaps its predecessor or "
                f"leaves the {num_frames} frames"
            )
        end = segment.end
    return tuple(segments)


def canvas_stack(
    episode: Episode,
    indices: Sequence[int],
    *,
    contract: Contract,
    frames: FrameProvider | None,
) -> NDArray[np.uint8]:
    """uint8[len(indices), H, W, 3], the canvases of raw frames in any order, repetitions allowed."""
    provider = FrameCache(max_bytes=0) if frames is None else frames
    found = provider.fetch(
        episode, sorted(set(indices)), layout=contract.cameras, canvas=plan_of(contract).canvas
    )
    return np.stack([found[k] for k in indices])


def shows_imagined(source: PlanSource, *, use: str) -> bool:
    """Whether a use of a sample shows an imagined plan: the same for the same name of the use."""
    if source == "mixed":
        return hashlib.sha256(use.encode()).digest()[0] % 2 == 1
    return source == "generated"


def no_canvases(plan: PlanSettings) -> NDArray[np.uint8]:
    """uint8[0, H, W, 3]: what a sample shows where it holds latents."""
    return np.zeros((0, plan.canvas.height, plan.canvas.width, 3), dtype=np.uint8)


def feature_key(plan: PlanSettings, *, view: str, **more: Any) -> dict[str, Any]:
    """What latents and embeddings depend on in every view of plans, as plain values; see PlanView."""
    key = {
        "view": view,
        "visual_plan": plan.visual_plan,
        "plan_frames": plan.plan_frames,
        "canvas": asdict(plan.canvas),
        "codec": asdict(plan.codec),
        "text": asdict(plan.text),
        **more,
    }
    plain: dict[str, Any] = json.loads(json.dumps(key))  # tuples become lists, as read back from a file
    return plain


def canvas_bytes(plan: PlanSettings) -> int:
    """Bytes of one canvas."""
    return 3 * plan.canvas.height * plan.canvas.width


def segment_counts(episodes: Iterable[Sequence[Segment]]) -> dict[str, Any]:
    """Episodes, segments per episode and per text, and their lengths in frames, as plain JSON values."""
    listed = [tuple(segments) for segments in episodes]
    lengths = [s.end - s.start for segments in listed for s in segments]
    per_episode = Counter(len(segments) for segments in listed)
    labels = Counter(s.label for segments in listed for s in segments)
    return {
        "episodes": len(listed),
        "segments": len(lengths),
        "segments_per_episode": {str(count): n for count, n in sorted(per_episode.items())},
        "segment_labels": dict(sorted(labels.items())),
        "segment_frames": {"least": min(lengths), "median": median(lengths), "greatest": max(lengths)}
        if lengths
        else {},
    }
