"""Compare finished runs: one table with intervals as Markdown, CSV and a page with plots.

Every figure comes from the runs' own `summary.json`; nothing is measured here. Runs that are missing or
unfinished are named and left out, the others are compared all the same.
"""

import csv
import fnmatch
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import mean
from typing import Any

from memer.errors import MemerError, UsageError
from memer.folders import replacing
from memer.html import page, table
from memer.summary import RunSummary, flatten, read_summary
from memer.svg import PALETTE, IntervalRow, interval_chart, number

#: Shown first when nobody asks for particular figures; patterns, in this order.
PREFERRED = (
    "*success_rate",
    "export/success",
    "export/accuracy",
    "*normalized_accuracy",
    "*boundary_accuracy",
    "*keyframe_f1",
    "*memory_recall",
    "*expert_agreement",
    "*parse_failure_rate",
    "val/exact",
    "val/loss",
    "train/loss",
)
MAX_COLUMNS = 8
#: Config entries that tell runs apart without saying what they do.
_PLACES = ("name", "run_id", "group", "run_dir")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run, or several that differ in their seed only.

    Attributes:
        name: short and unique in the table.
        group: sweep, or the folder above the run.
        settings: dotted config entries in which the compared runs differ.
        metrics: figure -> number.
        ci: figure -> (low, high), where the run gave one.
        runs: number of runs behind the row.
    """

    name: str
    group: str
    settings: dict[str, str]
    metrics: dict[str, float]
    ci: dict[str, tuple[float, float]]
    runs: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The comparison.

    Attributes:
        columns: figures shown, in order.
        settings: config entries shown, in order.
        rows: by group, in the order given.
        over_seeds: runs that differ in their seed only, as one row each: mean, and (lowest, highest) in place
            of an interval; empty when no two runs do.
        refused: run folder -> why it is not in the table.
    """

    columns: tuple[str, ...]
    settings: tuple[str, ...]
    rows: tuple[Row, ...]
    over_seeds: tuple[Row, ...]
    refused: dict[str, str]

    @property
    def exit_code(self) -> int:
        """1 when a run was refused, else 0."""
        return int(bool(self.refused))

    def cells(self, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
        """(head, lines) as text."""
        grouped = len({row.group for row in rows}) > 1
        counted = any(row.runs > 1 for row in rows)
        settings = [name for name in self.settings if any(name in row.settings for row in rows)]
        head = ["group"] * grouped + ["run"] + [_column_name(name) for name in settings]
        head += ["runs"] * counted + list(self.columns)
        lines = []
        for row in rows:
            line = [row.group] * grouped + [row.name]
            line += [row.settings.get(name, "") for name in settings]
            line += [str(row.runs)] * counted
            lines.append(line + [_cell(row, column) for column in self.columns])
        return head, lines

    def markdown(self) -> str:
        """The table, what was left out, and how to read it."""
        parts = [_markdown(*self.cells(self.rows)), "", "[low, high]: 95 % interval over episodes or trials."]
        if self.over_seeds:
            parts += ["", "Runs that differ in their seed only: mean (lowest to highest).", ""]
            parts.append(_markdown(*self.cells(self.over_seeds)))
        parts += [""] * bool(self.refused) + [f"left out: {reason}" for reason in self.refused.values()]
        return "\n".join(parts) + "\n"

    def csv(self) -> str:
        """Every figure of every run, with its bounds as `<name>_low` and `<name>_high`."""
        names = list(dict.fromkeys(name for row in self.rows for name in row.metrics))
        bounded = {name for row in self.rows for name in row.ci}
        columns = [c for n in names for c in ([n, n + "_low", n + "_high"] if n in bounded else [n])]
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["group", "run", *self.settings, *columns])
        for row in self.rows:
            values: dict[str, float] = dict(row.metrics)
            for name, (low, high) in row.ci.items():
                values |= {name + "_low": low, name + "_high": high}
            settings = [row.settings.get(name, "") for name in self.settings]
            writer.writerow([row.group, row.name, *settings, *(values.get(c, "") for c in columns)])
        return stream.getvalue()

    def html(self, *, title: str = "Comparison") -> str:
        """A page with the tables and one plot per shown figure."""
        body = [f"<h1>{escape(title)}</h1>", _html(*self.cells(self.rows))]
        body += [f'<p class="bad">left out: {escape(reason)}</p>' for reason in self.refused.values()]
        if self.over_seeds:
            body += ["<h2>Over seeds: mean (lowest to highest)</h2>", _html(*self.cells(self.over_seeds))]
        body.append("<h2>Figures</h2>")
        groups = list(dict.fromkeys(row.group for row in self.rows))
        for rows, what in ((self.rows, ""), (self.over_seeds, ", over seeds: mean, lowest to highest")):
            for column in self.columns:
                lines = [
                    IntervalRow(
                        row.name if len(groups) == 1 else f"{row.group}/{row.name}",
                        row.metrics[column],
                        row.ci.get(column),
                        PALETTE[groups.index(row.group) % len(PALETTE)],
                    )
                    for row in rows
                    if column in row.metrics
                ]
                body.append(interval_chart(lines, title=column + what))
        return page(title, body)


def compare(
    runs: Sequence[Path | str],
    out: Path | str | None = None,
    *,
    metrics: Sequence[str] | None = None,
    title: str = "Comparison",
) -> Table:
    """Read runs, and write `comparison.md`, `comparison.csv` and `report.html` into `out`.

    Args:
        runs: run folders; a folder that holds runs (a sweep's) stands for all of them; `*` works.
        out: folder of the results, made if missing; None writes nothing.
        metrics: figures to show, with `*`; None shows the usual ones. The CSV always has all.
        title: of the page.

    Returns:
        The table; `exit_code` is 1 when a run was refused.

    Raises:
        UsageError: no run was named, or a pattern fits no figure.
        MemerError: none of the runs can be compared.
    """
    refused: dict[str, str] = {}
    summaries: list[RunSummary] = []
    for folder in expand(runs):
        try:
            summaries.append(read_summary(folder))
        except MemerError as error:
            refused[str(folder)] = str(error)
    if not summaries:
        raise MemerError("no run to compare: " + "; ".join(refused.values()))
    result = make_table(summaries, refused=refused, metrics=metrics)
    if out is not None:
        out = Path(out)
        for name, text in (
            ("comparison.md", result.markdown()),
            ("comparison.csv", result.csv()),
            ("report.html", result.html(title=title)),
        ):
            with replacing(out / name) as temporary:
                temporary.write_text(text, encoding="utf-8")
    return result


def expand(runs: Sequence[Path | str]) -> list[Path]:
    """Run folders behind paths and patterns, each once; what is not there stays as it was named.

    A folder without a run's files stands for the run folders directly in it; folders that a sweep set aside
    (`NAME.oldK`) are no runs.

    Raises:
        UsageError: nothing was named, or a pattern fits no folder.
    """
    found: list[Path] = []
    for name in map(str, runs):
        if any(c in name for c in "*?["):
            base = Path(name[: 1 if name.startswith("/") else 0] or ".")
            matches = sorted(p for p in base.glob(name.lstrip("/")) if p.is_dir())
            if not matches:
                raise UsageError(f"{name}: no folder fits this pattern")
        else:
            matches = [Path(name)]
        for match in matches:
            children = [] if _is_run(match) else sorted(p for p in match.glob("*") if _is_run(p))
            found += [p for p in children or [match] if not p.suffix.startswith(".old")]
    if not found:
        raise UsageError("compare: no run named; give runs=[FOLDER,FOLDER,...]")
    return list(dict.fromkeys(found))


def make_table(
    summaries: Sequence[RunSummary],
    *,
    refused: Mapping[str, str] | None = None,
    metrics: Sequence[str] | None = None,
) -> Table:
    """The comparison of summaries that were read."""
    configs = [_settings(s.config) for s in summaries]
    differing = _differing(configs)
    groups = [s.group or s.folder.resolve().parent.name for s in summaries]
    names = _short_names([s.folder for s in summaries])
    rows = [
        Row(
            name=name,
            group=group,
            settings={key: config[key] for key in differing if key in config},
            metrics=summary.metrics,
            ci=summary.ci,
        )
        for name, group, config, summary in zip(names, groups, configs, summaries, strict=True)
    ]
    order = list(dict.fromkeys(groups))
    rows.sort(key=lambda row: order.index(row.group))
    known = list(dict.fromkeys(name for row in rows for name in row.metrics))
    return Table(
        columns=tuple(_columns(known, metrics)),
        settings=tuple(differing),
        rows=tuple(rows),
        over_seeds=tuple(_over_seeds(rows)),
        refused=dict(refused or {}),
    )


def _columns(known: Sequence[str], wanted: Sequence[str] | None) -> list[str]:
    chosen: dict[str, None] = {}
    for pattern in PREFERRED if wanted is None else wanted:
        matches = fnmatch.filter(known, pattern)
        if not matches and wanted is not None:
            raise UsageError(
                f"metrics: {pattern!r} fits no figure of these runs; there are {', '.join(known)}"
            )
        chosen.update(dict.fromkeys(matches))
    if wanted is None:
        chosen.update(dict.fromkeys(() if chosen else known))
        return list(chosen)[:MAX_COLUMNS]
    return list(chosen)


def _settings(config: Mapping[str, Any]) -> dict[str, str]:
    flat = flatten({key: value for key, value in config.items() if key not in _PLACES})
    return {
        key: ""
        if value is None
        else str(value).rsplit(".", 1)[-1]
        if key.endswith("_target_")
        else str(value)
        for key, value in flat.items()
    }


def _column_name(setting: str) -> str:
    """Last part of a dotted entry; the class behind an entry is called after the entry."""
    return setting.removesuffix("._target_").rsplit(".", 1)[-1]


def _differing(configs: Sequence[Mapping[str, str]]) -> list[str]:
    """Entries that all runs have with different values; of those that change together, the first."""
    found: list[str] = []
    seen: set[tuple[int, ...]] = set()
    for key in dict.fromkeys(key for config in configs for key in config):
        values = tuple(config.get(key) for config in configs)
        pattern = tuple(values.index(value) for value in values)  # which runs are alike
        if None not in values and len(set(values)) > 1 and pattern not in seen:
            seen.add(pattern)
            found.append(key)
    return found[:6]


def _over_seeds(rows: Sequence[Row]) -> list[Row]:
    families: dict[tuple[str, tuple[tuple[str, str], ...]], list[Row]] = {}
    for row in rows:
        rest = tuple((key, v) for key, v in row.settings.items() if key.rsplit(".", 1)[-1] != "seed")
        families.setdefault((row.group, rest), []).append(row)
    if all(len({row.settings.get("seed") for row in family}) < 2 for family in families.values()):
        return []
    merged = []
    for (group, rest), family in families.items():
        shared = [n for n in family[0].metrics if all(n in row.metrics for row in family)]
        values = {n: [row.metrics[n] for row in family] for n in shared}
        merged.append(
            Row(
                name=", ".join(v for _, v in rest) or "all",
                group=group,
                settings=dict(rest),
                metrics={n: mean(v) for n, v in values.items()},
                ci={n: (min(v), max(v)) for n, v in values.items()},
                runs=len(family),
            )
        )
    return merged


def _short_names(folders: Iterable[Path]) -> list[str]:
    """The last parts of the paths that tell the runs apart."""
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-count:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return ["/".join(p) for p in parts]


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("summary.json", "status.json", "job.json", ".hydra"))


def _cell(row: Row, column: str) -> str:
    if column not in row.metrics:
        return "-"
    text = number(row.metrics[column])
    if column not in row.ci:
        return text
    low, high = row.ci[column]
    return (
        f"{text} ({number(low)} to {number(high)})"
        if row.runs > 1
        else f"{text} [{number(low)}, {number(high)}]"
    )


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[k]) for line in [head, *lines]) for k in range(len(head))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in [head, rule, *lines]
    )


def _html(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return table(head, lines)
