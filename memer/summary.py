"""`summary.json`: the figures of a run under flat names, with their intervals, in one place.

The file of a rollout (spec names) and of a training run have one form: `metrics` maps a name to a number or
null, `ci` maps a name to [low, high] or null, other sections describe. A file of plain `name: number` pairs
is read too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memer.errors import MemerError, SourceUnavailableError
from memer.folders import read_json, write_json

SUMMARY_FILE = "summary.json"
STATUS_FILE = "status.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a finished run says about itself.

    Attributes:
        folder: where it was read.
        metrics: flat name -> number; null and non-numbers are left out.
        ci: flat name -> (low, high), 95 %.
        config: resolved config of the command, empty where none was kept.
        group: sweep it belongs to, empty for a single run.
    """

    folder: Path
    metrics: dict[str, float]
    ci: dict[str, tuple[float, float]]
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    group: str = ""


def update_summary(
    folder: Path | str,
    *,
    metrics: Mapping[str, float | None],
    ci: Mapping[str, Sequence[float] | None] | None = None,
    **sections: Any,
) -> Path:
    """Add figures to the summary of a run folder; what was there under other names stays.

    Args:
        folder: run folder; exists.
        metrics: flat name -> number; NaN and infinities are written as null.
        ci: flat name -> (low, high).
        sections: further top-level entries, replaced as a whole.
    """
    path = Path(folder) / SUMMARY_FILE
    values: dict[str, Any] = read_json(path) if path.exists() else {}
    known = values.setdefault("metrics", {})
    known.update({name: _finite(value) for name, value in metrics.items()})
    intervals = values.setdefault("ci", {})
    intervals.update(
        {name: None if pair is None else [float(b) for b in pair] for name, pair in (ci or {}).items()}
    )
    values.update(sections)
    write_json(path, values)
    return path


def read_summary(folder: Path | str) -> RunSummary:
    """Read a finished run.

    Raises:
        SourceUnavailableError: no such folder, or no summary in it.
        MemerError: the run is not finished, or its summary is no JSON object.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise SourceUnavailableError(f"{folder}: no such run folder")
    status_path = folder / STATUS_FILE
    if status_path.exists():
        status = read_json(status_path)
        if status.get("status") != "ok":
            reason = f" ({status['error']})" if status.get("error") else ""
            raise MemerError(f"{folder}: run is not finished, its status is {status.get('status')!r}{reason}")
    path = folder / SUMMARY_FILE
    if not path.exists():
        raise SourceUnavailableError(f"{path}: missing; the run did not reach its end")
    values = read_json(path)
    metrics = values.get("metrics")
    numbers = metrics if isinstance(metrics, Mapping) else values
    intervals = values.get("ci")
    record = folder / ".hydra" / "resolved.json"
    config = read_json(record) if record.exists() else {}
    return RunSummary(
        folder=folder,
        metrics={name: float(v) for name, v in flatten(numbers).items() if is_number(v)},
        ci={name: (float(v[0]), float(v[1])) for name, v in _pairs(intervals)},
        config=config,
        group=str(config.get("group") or ""),
    )


def flatten(values: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted names.

    >>> flatten({"a": {"b": 1, "c": [2]}, "d": None})
    {'a.b': 1, 'a.c': [2], 'd': None}
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, prefix=f"{prefix}{name}."))
        else:
            flat[prefix + str(name)] = value
    return flat


def is_number(value: Any) -> bool:
    """Whether a value is a finite number; truth values are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _pairs(intervals: Any) -> list[tuple[str, Sequence[float]]]:
    if not isinstance(intervals, Mapping):
        return []
    found = flatten(intervals).items()
    return [(n, v) for n, v in found if isinstance(v, list) and len(v) == 2 and all(map(is_number, v))]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
