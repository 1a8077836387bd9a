"""Features to samples: arrays in mapped files, checked against what the run asks for."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.features.directory import ArrayDirectory
from data.features.layout import TEXT_FEATURES_FILE, TEXTS_FILE, latents_name
from data.files import read_json
from memer.errors import MemerError, UsageError


class FeatureSet(ArrayDirectory):
    """A directory that `python -m data.build stage=features` wrote; see ArrayDirectory."""

    kind = "features"
    manifest_fields = ("key", "files", "episodes", "texts")

    def __init__(self, root: Path | str) -> None:
        super().__init__(root)
        self._rows: dict[tuple[int, str], dict[int, int]] = {
            (row["episode_index"], kind): {key: number for number, key in enumerate(keys)}
            for row in self.manifest["episodes"]
            for kind, keys in row["keys"].items()
        }
        self._numbers: dict[str, int] | None = None
        if self.manifest["texts"]:
            words = read_json(self.root / TEXTS_FILE, missing=self.again)
            self._numbers = {text: number for number, text in enumerate(words)}

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
        return np.array(self.array(latents_name(episode_index, kind))[row], dtype=np.float32)

    def text(self, text: str) -> NDArray[np.float32] | None:
        """float32[M, T] of a text; None where embeddings were left out."""
        if self._numbers is None:
            return None
        number = self._numbers.get(text)
        if number is None:
            raise MemerError(f"{self.root}: no embedding of {text!r}; {self.again}")
        return np.array(self.array(TEXT_FEATURES_FILE)[number], dtype=np.float32)

    def texts(self, texts: Sequence[str]) -> NDArray[np.float32] | None:
        """float32[len(texts), M, T] of one text or more; None where embeddings were left out."""
        found = [self.text(text) for text in texts]
        present = [row for row in found if row is not None]
        return np.stack(present) if present else None
