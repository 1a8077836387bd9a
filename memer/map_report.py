"""Played episodes of a plan-following policy as pictures: segments, progress, plans beside what happened."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from memer.errors import MemerError
from memer.html import key, picture
from memer.plan_log import strip_path
from memer.svg import INK, MUTED, PALETTE, WRONG, Scale, Span, draw_line, draw_text, span_bar, svg

WIDTH, MARGIN, CURVE_HEIGHT = 1040, 110, 96
#: Strips of one episode at most; an executor that replans all the time would fill the page.
MAX_STRIPS = 10
#: Strips are made of small pictures and may be wide.
STRIP_WIDTH = 900

Row = Mapping[str, Any]


def episode_section(row: Row, chunks: Sequence[Row], frames: Path, *, tau: float | None = None) -> str:
    """One episode: time line, legend, strips.

    Args:
        row: of episodes.json.
        chunks: its rows of chunks.jsonl, in time order.
        frames: folder of the strips.
        tau: threshold of the gate, drawn where given.
    """
    colors = text_colors(row["plan"])
    parts = [timeline(row, chunks, colors=colors, tau=tau), key(colors.items())]
    shown: list[str] = []
    for number, segment in enumerate(row["plan"], start=1):
        path = strip_path(frames, row["episode_index"], number)
        if path.exists() and len(shown) < MAX_STRIPS:
            end = "running" if segment["end"] is None else f"to {segment['end']}, {segment['ended_by']}"
            caption = f"{number}: {segment['text']} (from {segment['start']} {end})"
            shown.append(picture(path, caption=caption, width=STRIP_WIDTH))
    if shown:
        parts.append(
            '<p class="muted">Per segment: plan frames above, the real frames that were kept below.</p>'
        )
        parts.append(f'<div class="thumbs">{"".join(shown)}</div>')
    return "".join(parts)


def text_colors(segments: Sequence[Row]) -> dict[str, str]:
    """A colour per language plan, in the order of appearance."""
    names = dict.fromkeys(segment["text"] for segment in segments)
    return {name: PALETTE[k % len(PALETTE)] for k, name in enumerate(names)}


def timeline(row: Row, chunks: Sequence[Row], *, colors: Mapping[str, str], tau: float | None = None) -> str:
    """Segments as bars and the predicted progress as a curve, as SVG.

    A hollow dot is the progress that the executed actions left, a filled one what alignment made of it.
    """
    end = max(1, row["steps"])
    scale = Scale(0, end, MARGIN, WIDTH - 30)
    top = 44
    bottom = top + CURVE_HEIGHT

    def level(progress: float) -> float:
        return bottom - CURVE_HEIGHT * min(1.05, max(-0.05, progress))

    spans = [
        Span(s["start"], end if s["end"] is None else s["end"], s["text"], colors[s["text"]])
        for s in row["plan"]
    ]
    parts = [draw_text(MARGIN - 8, 31, "language plan", anchor="end", color=MUTED)]
    parts += span_bar(spans, scale=scale, y=16, height=22)
    parts.append(draw_text(MARGIN - 8, top + CURVE_HEIGHT / 2, "progress", anchor="end", color=MUTED))
    for value in (0.0, 1.0):
        parts.append(draw_line(scale(0), level(value), scale(end), level(value), "#dddddd"))
    if tau is not None:
        y = level(tau)
        parts.append(
            f'<line x1="{scale(0):.1f}" y1="{y:.1f}" x2="{scale(end):.1f}" y2="{y:.1f}" '
            f'stroke="{WRONG}" stroke-dasharray="4 4"/>'
        )
    for segment in row["plan"]:
        x = scale(segment["start"])
        parts.append(draw_line(x, top, x, bottom, "#bbbbbb"))
    for points in _curves(chunks):
        path = " ".join(f"{scale(step):.1f},{level(value):.1f}" for step, value in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.2"/>')
    for chunk in chunks:
        x, before, after = scale(chunk["timestep"]), chunk["progress_before"], chunk["progress"]
        parts.append(draw_line(x, level(before), x, level(after), PALETTE[1]))
        parts.append(
            f'<circle cx="{x:.1f}" cy="{level(before):.1f}" r="2.4" fill="#ffffff" stroke="{PALETTE[1]}"/>'
        )
        parts.append(
            f'<circle cx="{x:.1f}" cy="{level(after):.1f}" r="2.4" fill="{PALETTE[1]}">'
            f"<title>step {chunk['timestep']}: {before:.3f} to {after:.3f}</title></circle>"
        )
    step = next(s for s in (1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 10**9) if end / s <= 10)
    for value in range(0, end + 1, step):
        parts.append(draw_text(scale(value), bottom + 16, str(value), anchor="middle", color=MUTED))
    return svg(parts, width=WIDTH, height=bottom + 24, label=f"episode {row['episode_index']}")


def _curves(chunks: Sequence[Row]) -> list[list[tuple[float, float]]]:
    """Per segment the (step, predicted progress) of its executed actions."""
    curves: dict[int, list[tuple[float, float]]] = {}
    for chunk in chunks:
        points = curves.setdefault(chunk["segment"], [(chunk["timestep"], 0.0)])
        points += [(chunk["timestep"] + n, value) for n, value in enumerate(chunk["predicted"], start=1)]
    return list(curves.values())


def read_chunks(path: Path, episodes: set[int]) -> dict[int, list[dict[str, Any]]]:
    """Chunks of some episodes; the others are not kept in memory.

    Raises:
        MemerError: a line that is no chunk.
    """
    found: dict[int, list[dict[str, Any]]] = {}
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                chunk = json.loads(line)
                if chunk["episode_index"] in episodes:
                    found.setdefault(chunk["episode_index"], []).append(chunk)
            except (ValueError, KeyError, TypeError) as error:
                raise MemerError(f"{path}: line {number} is no action chunk ({error})") from None
    return found


def heading(row: Row) -> str:
    """Number, outcome and figures of an episode."""
    text = f"Episode {row['episode_index']}: {row['outcome']} after {row['steps']} steps"
    text += f", {row['segments']} segments"
    if row["gate_delay_mean"] is not None:
        text += f", left {row['gate_delay_mean']:+.1f} steps after their ends on average"
    return f"<h3>{escape(text)}</h3>"
