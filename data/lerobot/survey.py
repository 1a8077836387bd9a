"""Checks of a data set as a whole: its listing, its columns, the videos that episodes share."""

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from data.lerobot.address import FileEpisodes
from data.lerobot.findings import Findings
from data.lerobot.language import EVENTS, PERSISTENT
from data.lerobot.meta import EpisodeEntry, Info
from data.lerobot.tables import column_names
from data.lerobot.video import video_table
from memer.errors import MemerError


def check_listing(
    listed: Sequence[EpisodeEntry], *, absent: Sequence[int], info: Info, findings: Findings
) -> None:
    """Compare the list of episodes with the files that are there and with the counters of info.json."""
    entries = {entry.index: entry for entry in listed}
    for number in sorted(n for n, count in Counter(e.index for e in listed).items() if count > 1):
        findings.error("episode_twice", episode=number, value="listed twice", advice="repair meta/episodes")
    if absent:
        shown = ", ".join(map(str, absent[:5])) + (", ..." if len(absent) > 5 else "")
        value = f"{len(absent)} of {len(entries)} listed episodes have no table: {shown}"
        findings.warning("episodes_absent", value=value, advice="a partial copy is read as far as it goes")
    counters = {
        "total_episodes": len(entries),
        "total_frames": sum(entry.length or 0 for entry in entries.values()),
    }
    for key, counted in counters.items():
        stated = info.raw.get(key)
        if stated is not None and stated != counted:
            value = f"{key} {stated}, listed {counted}"
            findings.warning("counter", file="meta/info.json", value=value, advice="not used")
    if sorted(entries) != list(range(len(entries))):
        value = "episode_index does not count 0..N-1"
        findings.warning("episode_numbers", value=value, advice="original numbers are kept")


def check_columns(
    root: Path, paths: Collection[str], *, info: Info, strict: bool, findings: Findings
) -> None:
    """Compare declared features with the columns of every table.

    A language column that only some tables have is read where it is, and an error in strict mode.
    """
    declared = {name for name, feature in info.features.items() if feature.dtype != "video"}
    lacking: dict[str, list[str]] = {}
    undeclared: dict[str, list[str]] = {}
    for path in sorted(paths):
        try:
            columns = set(column_names(root / path))
        except MemerError:
            continue  # the episode's own check names the file
        for name in declared - columns:
            lacking.setdefault(name, []).append(path)
        for name in columns - set(info.features):
            undeclared.setdefault(name, []).append(path)
    language = findings.error if strict else findings.warning
    for name, files in sorted(lacking.items()):
        value = f"{name} declared, but absent in {len(files)} of {len(paths)} tables"
        if name in (PERSISTENT, EVENTS) and len(files) < len(paths):
            language("language_partial", file=files[0], value=value, advice="annotate all episodes")
        else:
            findings.warning("column_missing", file=files[0], value=value, advice="treated as absent there")
    for name, files in sorted(undeclared.items()):
        value = f"{name} in {len(files)} of {len(paths)} tables, not declared in info.json"
        if name not in (PERSISTENT, EVENTS):
            findings.warning("column_undeclared", file=files[0], value=value, advice="read if it is needed")
            continue
        language("column_undeclared", file=files[0], value=value, advice="declare it")
        if len(files) < len(paths):
            language("language_partial", file=files[0], value=value, advice="annotate all episodes")


def check_totals(root: Path, files: FileEpisodes, cameras: Collection[str], findings: Findings) -> None:
    """Warn of shared files that hold another number of pictures than their episodes have rows."""
    for (camera, path), listed in files.items():
        if camera not in cameras or len(listed) < 2 or not (root / path).is_file():
            continue
        try:
            pictures = len(video_table(root / path))
        except MemerError:
            continue  # the episodes' own checks name the file
        rows = sum(length for _, _, length in listed)
        if pictures != rows:
            value = f"{pictures} pictures for {rows} rows of {len(listed)} episodes"
            advice = "one of its episodes does not fit; every start is taken from its own offset"
            findings.warning("video_total", file=path, camera=camera, value=value, advice=advice)
