"""Features to samples: arrays in mapped files, checked against what the run asks for."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.building import differences
from data.features.layout import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    TEXT_FEATURES_FILE,
    TEXTS_FILE,
    latents_name,
)
from data.files import read_json, read_manifest
from memer.errors import MemerError, UsageError

#: Mapped files kept open per process.
_OPEN_FILES = 128

_AGAIN = "make them again with python -m data.build stage=features"


class FeatureSet:
    """A directory that `python -m data.build stage=features` wrote. Picklable, safe over fork and spawn.

    Args:
        root: the directory.

    Raises:
        SourceUnavailableError: no such directory, or no manifest in it.
        MemerError: a file is missing or of another size, or the form is of another version.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.manifest = read_manifest(
            self.root / MANIFEST_FILE,
            format_version=FORMAT_VERSION,
            kind="features",
            fields=("key", "files", "episodes", "texts"),
            missing=_AGAIN,
        )
        for name, size in self.manifest["files"].items():
            path = self.root / name
            found = path.stat().st_size if path.exists() else None
            if found != size:
                raise MemerError(f"{path}: {found} bytes, {size} in the manifest; {_AGAIN}")
        self._rows: dict[tuple[int, str], dict[int, int]] = {
            (row["episode_index"], kind): {key: number for number, key in enumerate(keys)}
            for row in self.manifest["episodes"]
            for kind, keys in row["keys"].items()
        }
        self._numbers: dict[str, int] | None = None
        if self.manifest["texts"]:
            words = read_json(self.root / TEXTS_FILE, missing=_AGAIN)
            self._numbers = {text: number for number, text in enumerate(words)}
        self._open: OrderedDict[str, NDArray[Any]] = OrderedDict()

    def check(self, key: Mapping[str, Any], *, episodes: Iterable[int]) -> None:
        """Refuse features of something else.

        Args:
            key: what the view's latents and embeddings depend on.
            episodes: that will be asked for.

        Raises:
            MemerError: naming the differing fields, or the first missing episode.
        """
        # Features of another view differ in many fields; the view alone says what is wrong.
        ours, theirs = dict(self.manifest["key"]), dict(key)
        if ours["view"] != theirs["view"]:
            ours, theirs = {"view": ours["view"]}, {"view": theirs["view"]}
        listed = differences(ours, theirs, names=("there", "in this run"))
        if listed:
            raise MemerError(f"{self.root}: features of something else ({listed}); {_AGAIN}")
        present = {row["episode_index"] for row in self.manifest["episodes"]}
        missing = sorted(set(episodes) - present)
        if missing:
            raise MemerError(f"{self.root}: no features of episode {missing[0]}; {_AGAIN}")

    def latents(self, episode_index: int, kind: str, key: int) -> NDArray[np.float32]:
        """float32[C, F, h, w] of one clip.

        Args:
            episode_index: the source's number.
            kind: `clip` or `plan`.
            key: step of the clip, or number of the plan's segment.

        Raises:
            UsageError: the step was left out when the features were made.
        """
        row = self._rows[episode_index, kind].get(key)
        if row is None:
            raise UsageError(
                f"{self.root}: episode {episode_index} has no {kind} latents of {key}; make features with "
                "view.sample_stride=1, or train and validate with theirs"
            )
        return np.array(self._array(latents_name(episode_index, kind))[row], dtype=np.float32)

    def text(self, text: str) -> NDArray[np.float32] | None:
        """float32[M, T] of a text; None where embeddings were left out."""
        if self._numbers is None:
            return None
        number = self._numbers.get(text)
        if number is None:
            raise MemerError(f"{self.root}: no embedding of {text!r}; {_AGAIN}")
        return np.array(self._array(TEXT_FEATURES_FILE)[number], dtype=np.float32)

    def texts(self, texts: Sequence[str]) -> NDArray[np.float32] | None:
        """float32[len(texts), M, T] of one text or more; None where embeddings were left out."""
        found = [self.text(text) for text in texts]
        present = [row for row in found if row is not None]
        return np.stack(present) if present else None

    def close(self) -> None:
        """Unmap every file of this process."""
        self._open.clear()

    def _array(self, name: str) -> NDArray[Any]:
        found = self._open.get(name)
        if found is None:
            try:
                found = np.load(self.root / name, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError) as error:
                raise MemerError(f"{self.root / name}: cannot be read ({error}); {_AGAIN}") from None
            self._open[name] = found
            if len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)
        self._open.move_to_end(name)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}
