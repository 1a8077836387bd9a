"""`report.html` of a run: curves, figures, episodes worst first, sample prompts; one file, no links.

Everything is read from the run folder, so a report can be made again at any time:

    python -m memer.report RUN_FOLDER [RUN_FOLDER ...]

It shows what it finds: metrics.csv (curves), summary.json (figures), samples/ (prompts), merged/ (alphas),
and for every folder with predictions.jsonl (or chunks.jsonl) the episodes of that rollout.
"""

import argparse
import csv
import fnmatch
import json
import math
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from memer.errors import MemerError, SourceUnavailableError, run_command
from memer.folders import read_json, replacing
from memer.html import key, page, picture, table
from memer.map_report import episode_section, heading, read_chunks
from memer.map_results import CHUNKS_FILE
from memer.results import worst_first
from memer.summary import flatten, is_number
from memer.svg import Point, line_chart, number
from memer.timeline import episode_picture, episode_pictures, label_colors, shown_steps

REPORT_FILE = "report.html"

#: Title -> columns of metrics.csv in one chart; what fits nowhere gets a chart of its own, folded away.
CHARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Loss", ("train/loss", "val/loss")),
    ("Loss by part of answer", ("*/loss_label", "*/loss_positions")),
    ("Share of right answers", ("train/accuracy", "val/exact*", "val/*accuracy")),
    ("Learning rate", ("train/lr*", "lr*")),
    ("Gradient norm", ("train/grad_norm",)),
    ("Throughput", ("*_per_s",)),
    ("Time per batch, ms", ("*batch_ms", "*data_ms")),
)
#: Columns of episodes.json worth showing, where present.
EPISODE_COLUMNS = (
    "outcome",
    "timesteps",
    "steps",
    "normalized_accuracy",
    "boundary_accuracy",
    "keyframe_f1",
    "memory_recall",
    "parse_failures",
)

#: Columns of a plan-following episode that hold lists.
PLAN_COLUMNS = ("plan", "gate_delays")


def write_report(
    folder: Path | str, *, title: str | None = None, episodes: int = 8, steps: int = 4, prompts: int = 6
) -> Path:
    """Make `report.html` of a run folder from what lies in it.

    Args:
        folder: run folder.
        title: heading; None: the folder's last two names.
        episodes: time lines per rollout, worst first.
        steps: moments per episode that are shown with pictures.
        prompts: sample prompts, the newest.

    Raises:
        SourceUnavailableError: no such folder.
        MemerError: a file of the run cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise SourceUnavailableError(f"{folder}: no such run folder")
    body = [_heading(folder, title or "/".join(folder.resolve().parts[-2:])), *_figures(folder)]
    body += _curves(folder / "metrics.csv")
    body += _merges(folder)
    body += _prompts(folder / "samples", count=prompts)
    for rollout in rollout_folders(folder):
        body += _rollout(folder, rollout, episodes=episodes, steps=steps)
    for rollout in rollout_folders(folder, file=CHUNKS_FILE):
        body += _plans(folder, rollout, episodes=episodes)
    path = folder / REPORT_FILE
    with replacing(path) as temporary:
        temporary.write_text(page(title or folder.name, body), encoding="utf-8")
    return path


def rollout_folders(folder: Path, *, file: str = "predictions.jsonl") -> list[Path]:
    """The run itself and folders up to three levels below that hold a finished rollout."""
    found = [folder] if (folder / file).exists() else []
    for depth in ("*", "*/*", "*/*/*"):
        found += sorted(path.parent for path in folder.glob(f"{depth}/{file}"))
    return found


def _heading(folder: Path, title: str) -> str:
    parts = [f"<h1>{escape(title)}</h1>"]
    facts = []
    if (folder / "status.json").exists():
        status = read_json(folder / "status.json")
        state = status.get("status")
        facts += [] if state == "running" else [str(state)]  # a run writes its own report before its end
        facts.append(f"started {status.get('started')}")
        if is_number(status.get("seconds")):
            facts.append(f"{status['seconds'] / 60:.1f} min")
        if status.get("command"):
            parts.append(f"<pre>{escape(' '.join(map(str, status['command'])))}</pre>")
    if (folder / ".hydra" / "environment.json").exists():
        environment = read_json(folder / ".hydra" / "environment.json")
        revision = str(environment.get("git_revision") or "unknown")[:12]
        facts += [f"revision {revision}{' with changes' if environment.get('git_dirty') else ''}"]
        facts += [f"{name} {version}" for name, version in (environment.get("versions") or {}).items()]
    parts.insert(1, f'<p class="muted">{escape(", ".join(facts))}</p>')
    return "".join(parts)


def _figures(folder: Path) -> list[str]:
    """Every figure of summary.json, those with an interval in front."""
    if not (folder / "summary.json").exists():
        return []
    summary = read_json(folder / "summary.json")
    numbers = summary.get("metrics") if isinstance(summary.get("metrics"), Mapping) else summary
    flat = {n: v for n, v in flatten(numbers or {}).items() if is_number(v)}
    ci = flatten(summary.get("ci") or {})
    rows = {True: [], False: []}  # type: dict[bool, list[list[str]]]
    for name, value in flat.items():
        bounds = ci.get(name)
        interval = f"[{number(bounds[0])}, {number(bounds[1])}]" if isinstance(bounds, list) else ""
        rows[bool(interval)].append([name, number(value), interval])
    head = ["figure", "value", "95 % interval"]
    main = [row for row in rows[True] if not row[0].endswith("_macro")] or rows[False]
    rest = [row for row in rows[True] + rows[False] if row not in main]
    parts = ["<h2>Figures</h2>", table(head, main)]
    latency = summary.get("latency_ms")
    if isinstance(latency, Mapping) and latency:
        names = ["p50", "p90", "p95", "p99", "mean", "max"]
        lines = [[part, *(number(v[n]) for n in names)] for part, v in latency.items() if v]
        parts.append("<h3>Time per question, ms</h3>" + table(["part", *names], lines))
    if rest:
        parts.append(f"<details><summary>{len(rest)} more figures</summary>{table(head, rest)}</details>")
    return parts


def read_curves(path: Path) -> dict[str, list[Point]]:
    """Columns of metrics.csv as (step, value) pairs; empty cells are left out.

    Where a resumed run did steps again (a later `part`), the curve shows the later values.
    """
    parts: dict[int, list[tuple[float, dict[str, str]]]] = {}
    curves: dict[str, list[Point]] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row.get("step"):
                    parts.setdefault(int(row.get("part") or 1), []).append((float(row["step"]), row))
        starts = {part: min(step for step, _ in rows) for part, rows in parts.items()}
        for part, rows in sorted(parts.items()):
            end = min((start for later, start in starts.items() if later > part), default=math.inf)
            for step, row in rows:
                for name, cell in row.items():
                    if name not in ("step", "part", "epoch") and cell and step < end:
                        curves.setdefault(name, []).append((step, float(cell)))
    except (ValueError, TypeError, UnicodeDecodeError) as error:
        raise MemerError(f"{path}: not a table of numbers ({error})") from None
    return curves


def _curves(path: Path) -> list[str]:
    if not path.exists():
        return []
    curves = read_curves(path)
    # Lightning logs a value per step and again per epoch; the step's is the finer one.
    left = {n: p for n, p in curves.items() if not (n.endswith("_epoch") and n[:-6] + "_step" in curves)}
    charts = []
    for title, patterns in CHARTS:
        names = [n for pattern in patterns for n in fnmatch.filter(left, pattern)]
        names = list(dict.fromkeys(names))
        charts.append(line_chart({n: left.pop(n) for n in names}, title=title))
    others = [line_chart({name: points}, title=name) for name, points in sorted(left.items())]
    parts = ["<h2>Training</h2>", f'<div class="charts">{"".join(charts)}</div>'] if any(charts) else []
    if any(others):
        parts.append(
            f"<details><summary>{len(others)} more curves</summary>"
            f'<div class="charts">{"".join(others)}</div></details>'
        )
    return parts


def _merges(folder: Path) -> list[str]:
    """The merged models of a training run and their scores, the chosen one marked."""
    path = folder / "merged" / "table.json"
    if not path.exists():
        return []
    values = read_json(path)
    rows = values.get("rows") or []
    names = [n for n in dict.fromkeys(n for row in rows for n in row) if n not in ("folder", "alpha")]
    lines = []
    for row in rows:
        alpha = number(row["alpha"]) + (" (chosen)" if row["alpha"] == values.get("best") else "")
        lines.append([alpha, *(number(row[n]) if is_number(row.get(n)) else "" for n in names)])
    return ["<h2>Merged models</h2>", table(["alpha", *names], lines)]


def _prompts(folder: Path, *, count: int) -> list[str]:
    """Sample prompts as `callbacks.samples` writes them, newest first."""
    records: list[tuple[str, dict[str, Any]]] = []
    for path in sorted(folder.glob("step_*.json"), reverse=True):
        values = read_json(path)
        records += [(f"step {values.get('step')}", record) for record in values.get("samples", [])]
        if len(records) >= count:
            break
    parts = ["<h2>Sample prompts</h2>"] if records else []
    for moment, record in records[:count]:
        pictures = "".join(picture(folder / p["file"], caption=p["caption"]) for p in record["images"])
        lines = [f"asked for: {record['answer']}"]
        if record.get("predicted") is not None:
            lines.append(f"answered:  {record['predicted']}")
        parts.append(
            f"<details open><summary>{escape(record['sample_id'] + ', ' + moment)}</summary>"
            f"<pre>{escape(record['text'])}</pre>"
            f'<div class="thumbs">{pictures}</div><pre>{escape(chr(10).join(lines))}</pre></details>'
        )
    return parts


def _rollout(folder: Path, rollout: Path, *, episodes: int, steps: int) -> list[str]:
    listed = json.loads((rollout / "episodes.json").read_text(encoding="utf-8"))
    order = worst_first(listed)
    by_index = {row["episode_index"]: row for row in listed}
    summary = read_json(rollout / "summary.json") if (rollout / "summary.json").exists() else {}
    name = "" if rollout == folder else f": {rollout.relative_to(folder)}"
    parts = [f"<h2>Rollout{escape(name)}</h2>"]
    if rollout != folder:
        parts += _figures(rollout)[1:]
    parts.append(_label_table(rollout))
    frames = rollout / "frames"
    # Worst first, but an episode without pictures gives way to one that has some.
    pictured = [i for i in order if (frames / f"episode_{i:06d}").is_dir()]
    chosen = sorted([*pictured, *(i for i in order if i not in set(pictured))][:episodes], key=order.index)
    rows = _rows_of(rollout / "predictions.jsonl", set(chosen))
    if rows:
        parts.append(f"<h3>Episodes, worst first ({len(rows)} of {len(order)})</h3>")
    fps = (summary.get("contract") or {}).get("fps")
    for index in chosen:
        if not rows.get(index):
            continue
        marked = shown_steps(rows[index], frames, count=steps)
        colors = label_colors(rows[index])
        instructions = dict.fromkeys(row["instruction"] for row in rows[index])
        parts.append(
            f"<h3>Episode {index}: {escape(_verdict(by_index[index]))}</h3>"
            f'<p class="muted">{escape(" / ".join(instructions))}</p>'
        )
        parts.append(
            episode_picture(
                rows[index],
                colors=colors,
                marked=marked,
                representatives=by_index[index].get("representatives") or (),
                fps=fps,
            )
        )
        parts += [key(colors.items()), episode_pictures(marked, frames)]
    lines = [[str(index), *_episode_cells(by_index[index], listed)] for index in order]
    head = ["episode", *_episode_columns(listed)]
    parts.append(f"<details><summary>all {len(order)} episodes</summary>{table(head, lines)}</details>")
    return parts


def _plans(folder: Path, rollout: Path, *, episodes: int) -> list[str]:
    """Episodes of a plan-following policy, worst first, those with pictures before the others."""
    listed = json.loads((rollout / "episodes.json").read_text(encoding="utf-8"))
    by_index = {row["episode_index"]: row for row in listed}
    summary = read_json(rollout / "summary.json") if (rollout / "summary.json").exists() else {}
    frames = rollout / "frames"
    order = worst_first(listed)
    pictured = [index for index in order if (frames / f"episode_{index:06d}").is_dir()]
    chosen = sorted([*pictured, *(i for i in order if i not in set(pictured))][:episodes], key=order.index)
    chunks = read_chunks(rollout / CHUNKS_FILE, set(chosen))
    name = "" if rollout == folder else f": {rollout.relative_to(folder)}"
    parts = [f"<h2>Plans and progress{escape(name)}</h2>"]
    if rollout != folder:
        parts += _figures(rollout)[1:]
    parts.append(f"<h3>Episodes, worst first ({len(chosen)} of {len(order)})</h3>")
    for index in chosen:
        parts.append(heading(by_index[index]))
        parts.append(episode_section(by_index[index], chunks.get(index, []), frames, tau=summary.get("tau")))
    head = ["episode", *_episode_columns(listed, without=PLAN_COLUMNS)]
    lines = [[str(index), *_episode_cells(by_index[index], listed, without=PLAN_COLUMNS)] for index in order]
    parts.append(f"<details><summary>all {len(order)} episodes</summary>{table(head, lines)}</details>")
    return parts


def _label_table(rollout: Path) -> str:
    path = rollout / "label_metrics.json"
    if not path.exists():
        return ""
    values = read_json(path)
    lines = []
    for label, row in (values.get("labels") or {}).items():
        heard = (values.get("confusion") or {}).get(label, {})
        wrong = sorted(((n, text) for text, n in heard.items() if text != label), reverse=True)[:3]
        mistaken = ", ".join(f"{text or 'no answer'} ({n})" for n, text in wrong)
        lines.append([label, str(row["support"]), number(row["normalized_accuracy"]), mistaken])
    return table(["true subtask", "steps", "accuracy", "most often taken for"], lines, text_columns=(3,))


def _rows_of(path: Path, episodes: set[int]) -> dict[int, list[dict[str, Any]]]:
    """Rows of some episodes; the others are not kept in memory."""
    rows: dict[int, list[dict[str, Any]]] = {}
    with path.open(encoding="utf-8") as file:
        for number_, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                if row["episode_index"] in episodes:
                    rows.setdefault(row["episode_index"], []).append(row)
            except (ValueError, KeyError, TypeError) as error:
                raise MemerError(f"{path}: line {number_} is no row of a rollout ({error})") from None
    return rows


def _verdict(row: Mapping[str, Any]) -> str:
    if "outcome" in row:
        return f"{row['outcome']} after {row.get('steps', '?')} steps"
    accuracy = row.get("normalized_accuracy")
    return "no labelled step" if accuracy is None else f"accuracy {number(accuracy)}"


def _episode_columns(listed: Sequence[Mapping[str, Any]], *, without: Sequence[str] = ()) -> list[str]:
    known = list(dict.fromkeys(name for row in listed for name in row))
    first = [name for name in EPISODE_COLUMNS if name in known]
    if "outcome" not in known:
        return first
    rest = [name for name in known if name not in (*first, *without, "episode_index", "representatives")]
    return first + rest


def _episode_cells(
    row: Mapping[str, Any], listed: Sequence[Mapping[str, Any]], *, without: Sequence[str] = ()
) -> list[str]:
    cells = []
    for name in _episode_columns(listed, without=without):
        value = row.get(name)
        cells.append("" if value is None else number(value) if is_number(value) else str(value))
    return cells


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the reports of run folders again."""
    parser = argparse.ArgumentParser(prog="python -m memer.report", description=main.__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="run folders")
    parser.add_argument("--episodes", type=int, default=8, help="time lines per rollout, worst first")
    parser.add_argument("--steps", type=int, default=4, help="moments per episode shown with pictures")
    options = parser.parse_args(arguments)

    def command() -> None:
        for folder in options.folders:
            print(write_report(folder, episodes=options.episodes, steps=options.steps))

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
