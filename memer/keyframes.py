"""Keyframe rules: which frames of a labelled demonstration are worth remembering.

The rules are supervision for offline use only; no model and no running policy ever sees them.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml  # type: ignore[import-untyped]  # ships no types

from memer.episode import Segment, label_key, segments_from_labels
from memer.errors import MemerError, SourceUnavailableError, UsageError

logger = logging.getLogger(__name__)

Select = Literal["first", "last", "both", "none"]
SELECTS: tuple[str, ...] = get_args(Select)

#: Asks for the last frame of every segment; there is no silent default.
ALL_LAST = "all_last"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyframeRule:
    """One rule: which labels it matches and what it selects of their segments.

    Attributes:
        kind: `pattern` searches the label with a regular expression, `exact` compares the whole label.
        text: the expression or the label.
        select: first frame, last frame, both, or none of each matching segment.
        ignore_case: compare without case.
    """

    kind: Literal["pattern", "exact"]
    text: str
    select: Select = "none"
    ignore_case: bool = True

    def matches(self, label: str) -> bool:
        """Whether the rule speaks about `label`; both are compared in NFC with whitespace normalised."""
        key = label_key(label)
        if self.kind == "pattern":
            return re.search(self.text, key, re.IGNORECASE if self.ignore_case else 0) is not None
        wanted = label_key(self.text)
        return key.casefold() == wanted.casefold() if self.ignore_case else key == wanted

    def __str__(self) -> str:
        return f"{self.kind} {self.text!r} -> {self.select}"


@dataclass(frozen=True, kw_only=True)
class KeyframeRules:
    """An ordered list of rules; the first that matches a label wins.

    Attributes:
        rules: in file order.
        default_select: for labels that no rule matches.
    """

    rules: tuple[KeyframeRule, ...] = ()
    default_select: Select = "none"
    _selects: dict[str, tuple[int | None, Select]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def all_last(cls) -> "KeyframeRules":
        """The last frame of every segment."""
        return cls(default_select="last")

    @classmethod
    def from_file(cls, path: Path | str, *, default_select: Select | None = None) -> "KeyframeRules":
        """Read a JSON or YAML file.

        Args:
            path: `{"default_select": S, "rules": [...]}` or a bare list of rules.
            default_select: the configuration's; a value in the file wins; the log says so when they differ.

        Raises:
            SourceUnavailableError: no such file.
            MemerError: anything the form does not allow; names file, rule and value.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise SourceUnavailableError(
                f"{path}: cannot read the keyframe rules ({error.strerror or error}); give an existing "
                f"file or rules: {ALL_LAST}"
            ) from None
        except UnicodeDecodeError:
            raise MemerError(f"{path}: not UTF-8 text") from None
        try:
            if path.suffix.lower() in (".yaml", ".yml"):
                value = yaml.safe_load(text)
            else:
                value = json.loads(text, object_pairs_hook=_refuse_repeated_keys)
        except (json.JSONDecodeError, yaml.YAMLError, ValueError, RecursionError) as error:
            raise MemerError(f"{path}: cannot be parsed ({' '.join(str(error).split())})") from None
        return cls.from_value(value, default_select=default_select, where=str(path))

    @classmethod
    def from_value(
        cls,
        value: Mapping[str, Any] | Sequence[Any] | str | None,
        *,
        default_select: Select | None = None,
        where: str = "rules",
    ) -> "KeyframeRules":
        """Build rules from plain values: an object, a bare list of rules, or the word `all_last`.

        Raises:
            UsageError: None, or another word; nothing is assumed silently.
            MemerError: the value has another form; names the rule.
        """
        if default_select is not None:
            _check_select(default_select, where=f"{where}: default_select of the configuration")
        if value is None:
            raise UsageError(f"{where}: no keyframe rules given; name a rule file or say {ALL_LAST}")
        if isinstance(value, str):
            if value != ALL_LAST:
                raise UsageError(f"{where}: {value!r}, must be a rule file, a list of rules or {ALL_LAST}")
            return cls.all_last()
        listed: Any = value
        chosen: Select = default_select if default_select is not None else "none"
        if isinstance(value, Mapping):
            unknown = sorted(str(k) for k in value if k not in ("default_select", "rules"))
            if unknown:
                raise MemerError(f"{where}: unknown key {unknown[0]!r}; known: default_select, rules")
            listed = value.get("rules", [])
            if "default_select" in value:
                in_file = _check_select(value["default_select"], where=f"{where}: default_select")
                if default_select is not None and default_select != in_file:
                    logger.warning(
                        "%s: default_select %r of the file is used, not %r of the configuration",
                        where,
                        in_file,
                        default_select,
                    )
                chosen = in_file
            elif "rules" not in value:
                raise MemerError(f"{where}: an empty object; give rules or default_select")
        if not isinstance(listed, Sequence) or isinstance(listed, str | bytes):
            raise MemerError(f"{where}: {_short(listed)}, must be an object or a list of rules")
        rules = tuple(_build_rule(rule, where=f"{where}: rules[{i}]") for i, rule in enumerate(listed))
        return cls(rules=rules, default_select=chosen)

    @property
    def rules_hash(self) -> str:
        """SHA-256 of the canonical form: the same for JSON, YAML and a spelled-out default."""
        canonical = {"default_select": self.default_select, "rules": [asdict(rule) for rule in self.rules]}
        text = json.dumps(canonical, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def match(self, label: str) -> tuple[int | None, Select]:
        """(number of the first rule that matches, what it selects); (None, default) without a match."""
        found = self._selects.get(label)
        if found is None:
            number = next((i for i, rule in enumerate(self.rules) if rule.matches(label)), None)
            found = number, (self.default_select if number is None else self.rules[number].select)
            self._selects[label] = found
        return found

    def select(self, labels: Sequence[str | None], *, segment_ids: Sequence[int] | None = None) -> list[int]:
        """Keyframes of an episode given as one label per frame; None is unlabelled.

        Args:
            labels: one per frame; runs of equal labels are segments.
            segment_ids: optional id per frame that splits runs of equal labels (two scoops in a row).

        Returns:
            Raw frames, ascending, without duplicates.

        >>> KeyframeRules.all_last().select(["a", "a", None, "a", "b"])
        [1, 3, 4]
        """
        return self.select_segments(segments_from_labels(labels, segment_ids))

    def select_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Keyframes of an episode whose spans are given; neighbours with one label stay separate.

        >>> KeyframeRules.all_last().select_segments([Segment(0, 4, "scoop"), Segment(4, 9, "scoop")])
        [3, 8]
        """
        chosen: set[int] = set()
        for segment in segments:
            chosen.update(_frames(segment, self.match(segment.label)[1]))
        return sorted(chosen)

    def report(self, segments_per_episode: Iterable[Sequence[Segment]]) -> dict[str, Any]:
        """Count what the rules do to a data set, and warn about labels that no rule matches.

        Returns:
            Plain JSON values: `labels` (label -> segments, frames, selected, rule, select), `selected` in
            all, `unmatched` labels, `unused` rules, `episodes_without_keyframes` counted, `default_select`.
        """
        labels: dict[str, dict[str, Any]] = {}
        used: set[int] = set()
        total = without = 0
        for segments in segments_per_episode:
            in_episode = 0
            for segment in segments:
                number, select = self.match(segment.label)
                if number is not None:
                    used.add(number)
                row = labels.setdefault(
                    segment.label,
                    {
                        "segments": 0,
                        "frames": 0,
                        "selected": 0,
                        "rule": None if number is None else f"rules[{number}] {self.rules[number]}",
                        "select": select,
                    },
                )
                selected = len(_frames(segment, select))
                row["segments"] += 1
                row["frames"] += segment.end - segment.start
                row["selected"] += selected
                in_episode += selected
            total += in_episode
            without += not in_episode
        unmatched = sorted(label for label, row in labels.items() if row["rule"] is None)
        if unmatched and self.rules:
            logger.warning(
                "%d labels match no keyframe rule and get %r: %s",
                len(unmatched),
                self.default_select,
                ", ".join(repr(label) for label in unmatched[:10]) + (", ..." if len(unmatched) > 10 else ""),
            )
        return {
            "labels": dict(sorted(labels.items())),
            "selected": total,
            "unmatched": unmatched,
            "unused": [f"rules[{i}] {rule}" for i, rule in enumerate(self.rules) if i not in used],
            "episodes_without_keyframes": without,
            "default_select": self.default_select,
        }


def _frames(segment: Segment, select: Select) -> set[int]:
    first, last = segment.start, segment.end - 1
    return {"first": {first}, "last": {last}, "both": {first, last}, "none": set()}[select]


def _build_rule(value: Any, *, where: str) -> KeyframeRule:
    if not isinstance(value, Mapping):
        raise MemerError(f"{where}: {_short(value)}, must be an object")
    unknown = sorted(str(k) for k in value if k not in ("pattern", "exact", "label", "select", "ignore_case"))
    if unknown:
        raise MemerError(
            f"{where}: unknown key {unknown[0]!r}; known: pattern, exact, label, select, ignore_case"
        )
    given = [name for name in ("pattern", "exact", "label") if name in value]
    if len(given) != 1:
        raise MemerError(f"{where}: has {' and '.join(given) or 'none'} of pattern, exact, label; give one")
    text = value[given[0]]
    if not isinstance(text, str) or not text.strip():
        raise MemerError(f"{where}: {given[0]} {_short(text)}, must be a non-empty text")
    ignore_case = value.get("ignore_case", True)
    if not isinstance(ignore_case, bool):
        raise MemerError(f"{where}: ignore_case {_short(ignore_case)}, must be true or false")
    if given[0] == "pattern":
        try:
            re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise MemerError(f"{where}: pattern {text!r} is no regular expression ({error})") from None
    return KeyframeRule(
        kind="pattern" if given[0] == "pattern" else "exact",
        text=text,
        select=_check_select(value.get("select", "none"), where=f"{where}: select"),
        ignore_case=ignore_case,
    )


def _check_select(value: Any, *, where: str) -> Select:
    if not isinstance(value, str) or value not in SELECTS:
        raise MemerError(f"{where}: {_short(value)}, must be one of {', '.join(SELECTS)}")
    return value  # type: ignore[return-value]  # membership was checked


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} is given twice in one object")
    return built


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
