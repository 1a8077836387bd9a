"""Finding the files of an episode where the path template is wrong, as it is in public sets."""

from pathlib import Path

from data.lerobot.findings import Findings
from data.lerobot.meta import EpisodeEntry


class FileFinder:
    """Looks up tables and videos, first where the template says, then by the episode's own file name.

    Directory listings are read once; the object holds plain data and can be pickled.

    Args:
        root: folder of the data set.
        findings: takes what is found elsewhere, or in several places.
    """

    def __init__(self, root: Path, findings: Findings | None = None) -> None:
        self.root = root
        self.findings = findings if findings is not None else Findings()
        self._known: dict[str, str | None] = {}
        self._listing: dict[str, list[str]] | None = None

    def locate(self, entry: EpisodeEntry, camera: str | None) -> str | None:
        """Path relative to the root of an episode's table (camera None) or video; None if there is none.

        More than one file that could be meant is an error in `findings`, and counts as none.
        """
        place = entry.videos.get(camera) if camera is not None else None
        planned = entry.data_path if camera is None else place.path if place else None
        if planned is None:
            return None
        if planned not in self._known:
            self._known[planned] = self._search(planned, entry.index, camera)
        return self._known[planned]

    def _search(self, planned: str, episode: int, camera: str | None) -> str | None:
        if (self.root / planned).is_file():
            return planned
        name = f"episode_{episode:06d}" + Path(planned).suffix
        found = [
            path
            for path in self._files().get(name, [])
            if (path.startswith("data/") if camera is None else camera in Path(path).parts)
        ]
        if len(found) > 1:
            self.findings.error(
                "path_ambiguous",
                file=planned,
                episode=episode,
                camera=camera,
                value=f"missing, and {len(found)} files could be meant: {', '.join(found[:3])}",
                advice="keep one of them",
            )
            return None
        if found:
            self.findings.warning(
                "path_template",
                file=found[0],
                episode=episode,
                camera=camera,
                value=f"info.json says {planned}",
                advice="the one file of that episode is used",
            )
        return found[0] if found else None

    def _files(self) -> dict[str, list[str]]:
        """File name -> paths below data/ and videos/."""
        if self._listing is None:
            self._listing = {}
            for folder in ("data", "videos"):
                for path in sorted((self.root / folder).rglob("episode_*")):
                    self._listing.setdefault(path.name, []).append(str(path.relative_to(self.root)))
        return self._listing
