"""The labeler for demonstrations that nobody labelled: segments are discovered, and say so."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from memer.discover import ChangePoint, Events, SegmentProvider, Uniform, discover
from memer.episode import Episode
from memer.errors import UsageError

_PROVIDERS: dict[str, type] = {"uniform": Uniform, "events": Events, "change_point": ChangePoint}


@dataclass(slots=True, kw_only=True)
class DiscoverLabels:
    """Segments from what an episode shows; labels of the data set are kept unless asked otherwise.

    Method, settings, segments and scores go to `metadata.discovery` of every episode, applied or not.

    Args:
        method: `uniform`, `events` or `change_point`, see memer.discover.
        label: text of each segment, see memer.discover.discover.
        existing: of an episode with labels: `keep` them, or `replace` them by the discovered ones.
        uniform: settings of Uniform.
        events: settings of Events.
        change_point: settings of ChangePoint.

    Raises:
        UsageError: no such method, or settings that it does not take.
    """

    method: str = "events"
    label: str = "part {number}"
    existing: Literal["keep", "replace"] = "keep"
    uniform: Mapping[str, Any] = field(default_factory=dict)
    events: Mapping[str, Any] = field(default_factory=dict)
    change_point: Mapping[str, Any] = field(default_factory=dict)
    _provider: SegmentProvider = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.method not in _PROVIDERS:
            known = ", ".join(_PROVIDERS)
            raise UsageError(f"labels.method={self.method!r}, must be one of {known}")
        if self.existing not in ("keep", "replace"):
            raise UsageError(f"labels.existing={self.existing!r}, must be keep or replace")
        if not isinstance(self.label, str):
            raise UsageError(f"labels.label={self.label!r}, must be a text")
        try:
            self._provider = _PROVIDERS[self.method](**getattr(self, self.method))
        except TypeError as error:
            raise UsageError(f"labels.{self.method}: {error}") from None

    def __call__(self, episode: Episode) -> Episode:
        """The episode with discovered segments, or with its own ones."""
        found = discover(episode, self._provider, label=self.label)
        applied = self.existing == "replace" or not episode.segments
        metadata = {**episode.metadata, "discovery": {**found.to_dict(), "applied": applied}}
        if not applied:
            return replace(episode, metadata=metadata)
        metadata["label_source"] = f"discover:{self.method}"
        return replace(episode, segments=found.segments, metadata=metadata)
