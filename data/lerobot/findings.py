"""What is wrong with a data set, in a form that names the place: findings, counted by code."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from memer.errors import MemerError
from memer.folders import write_json

Severity = Literal["error", "warning"]
SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault.

    Attributes:
        severity: `error` costs the episode (or the data set); a `warning` is read anyway.
        code: short stable name of the kind of fault.
        file: path relative to the root, or None.
        episode: the source's episode number, or None for the whole set.
        camera: camera key, or None.
        frame: frame index in the episode, or None.
        value: the offending value, as text.
        advice: the way out.
    """

    severity: Severity
    code: str
    value: str = ""
    advice: str = ""
    file: str | None = None
    episode: int | None = None
    camera: str | None = None
    frame: int | None = None

    def line(self) -> str:
        """One line for people."""
        places = (("episode", self.episode), ("camera", self.camera), ("frame", self.frame))
        where = [f"{name} {value}" for name, value in places if value is not None]
        where += [self.file] if self.file else []
        text = f"{self.severity} {self.code}" + (f" ({', '.join(where)})" if where else "")
        return text + (f": {self.value}" if self.value else "") + (f"; {self.advice}" if self.advice else "")


@dataclass(slots=True)
class Findings:
    """A list of findings that can be grouped, printed and raised."""

    items: list[Finding] = field(default_factory=list)

    def error(self, code: str, **fields: Any) -> None:
        """Add an error."""
        self.items.append(Finding(severity="error", code=code, **fields))

    def warning(self, code: str, **fields: Any) -> None:
        """Add a warning."""
        self.items.append(Finding(severity="warning", code=code, **fields))

    def extend(self, others: Iterable[Finding]) -> None:
        """Add what another list found."""
        self.items.extend(others)

    @property
    def errors(self) -> list[Finding]:
        """The errors alone, in the order found."""
        return [finding for finding in self.items if finding.severity == "error"]

    def broken_episodes(self) -> list[int]:
        """Numbers of the episodes that an error names, ascending."""
        return sorted({f.episode for f in self.errors if f.episode is not None})

    def grouped(self) -> dict[tuple[str, str], list[Finding]]:
        """(severity, code) -> findings, errors first, otherwise in the order found."""
        groups: dict[tuple[str, str], list[Finding]] = {}
        for finding in sorted(self.items, key=lambda f: f.severity != "error"):
            groups.setdefault((finding.severity, finding.code), []).append(finding)
        return groups

    def lines(self) -> list[str]:
        """Lines for people: equal codes counted, the first five shown."""
        lines: list[str] = []
        for (severity, code), found in self.grouped().items():
            lines += [finding.line() for finding in found[:SHOWN]]
            if len(found) > SHOWN:
                lines.append(f"{severity} {code}: {len(found)} in all, the first {SHOWN} shown")
        return lines

    def to_list(self) -> list[dict[str, Any]]:
        """Plain JSON values: one object per code with its count, episodes and first five findings."""
        return [
            {
                "severity": severity,
                "code": code,
                "count": len(found),
                "episodes": sorted({f.episode for f in found if f.episode is not None}),
                "first": [asdict(finding) for finding in found[:SHOWN]],
            }
            for (severity, code), found in self.grouped().items()
        ]

    def raise_first_class(self, *, where: str) -> None:
        """Raise one MemerError that lists every finding of the first error's code; nothing without errors."""
        errors = self.errors
        if not errors:
            return
        same = [finding for finding in errors if finding.code == errors[0].code]
        episodes = sorted({f.episode for f in same if f.episode is not None})
        named = f", episodes {', '.join(map(str, episodes))}" if episodes else ""
        shown = " | ".join(finding.line() for finding in same[:SHOWN])
        raise MemerError(f"{where}: {len(same)} x {errors[0].code}{named}: {shown}")


def write_report(report: dict[str, Any], path: Path | str) -> None:
    """Write a report as JSON, beside first, then renamed."""
    write_json(Path(path), report)
