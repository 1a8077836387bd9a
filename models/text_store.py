"""Text embeddings on disk: what a large frozen encoder said once, whoever asks again.

A subtask's words are few and the encoder is as large as the models it serves. Each text is one file below
`$MEMER_CACHE/texts` (else `~/.cache/memer/texts`), named by the encoder, the sentence and the form of
the result. Where the encoder is a hub id, the folder may be copied to a machine that has none. Without a
place to write nothing is kept.
"""

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from memer.plan_settings import TextSettings

log = logging.getLogger(__name__)

#: Changes with the way in which a sentence becomes numbers (`models.text`).
FORMAT = 1

#: Folders of a pipeline that decide about embeddings.
PARTS = ("text_encoder", "tokenizer")


def cache_folder() -> Path:
    """Where memer keeps what can be made again."""
    chosen = os.environ.get("MEMER_CACHE")
    if chosen:
        return Path(chosen)
    try:
        return Path.home() / ".cache" / "memer"
    except RuntimeError:  # nobody's home, as in some containers
        return Path(tempfile.gettempdir()) / "memer"


class TextStore:
    """Embeddings of one encoder.

    Args:
        settings: `max_tokens`, `dim` and `model` belong to the name of every file.
        dtype: of the encoder's weights; its results differ by it.
    """

    def __init__(self, settings: TextSettings, *, dtype: str) -> None:
        self.settings = settings
        self._folder = cache_folder() / "texts"
        folder = Path(settings.model)
        encoder = _state(folder) if folder.is_dir() else settings.model
        self._key = [FORMAT, encoder, settings.max_tokens, settings.dim, dtype]

    def path(self, sentence: str) -> Path:
        """The file of a text inside its template."""
        name = hashlib.sha256(json.dumps([*self._key, sentence]).encode()).hexdigest()
        return self._folder / f"{name[:32]}.npy"

    def read(self, sentence: str) -> Tensor | None:
        """float32[n, T] of the n true tokens, None where it is not kept; a damaged file counts as none."""
        path = self.path(sentence)
        try:
            tokens = np.load(path, allow_pickle=False)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, EOFError) as error:
            log.warning("%s: cannot be read (%s), so the text is encoded again", path, error)
            return None
        if tokens.dtype != np.float32 or tokens.shape[1:] != (self.settings.dim,):
            log.warning("%s: %s%s, so the text is encoded again", path, tokens.dtype, tokens.shape)
            return None
        return torch.from_numpy(tokens)

    def write(self, sentence: str, tokens: Tensor) -> None:
        """Keep float32[n, T]; several processes may do so at once."""
        path = self.path(sentence)
        temporary: Path | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Everyone writes a file of his own; the last rename wins, and all hold the same numbers.
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as stream:
                temporary = Path(stream.name)
                np.save(stream, tokens.numpy(), allow_pickle=False)
            os.replace(temporary, path)
        except OSError as error:
            if temporary is not None:
                temporary.unlink(missing_ok=True)
            log.warning("%s: embeddings cannot be kept (%s); set MEMER_CACHE to a folder", path.parent, error)


def _state(folder: Path) -> list[list[object]]:
    """Names, sizes and times of the files that an encoder in a folder is read from."""
    parts = [folder / part for part in PARTS if (folder / part).is_dir()] or [folder]
    files = sorted(path for part in parts for path in part.rglob("*") if path.is_file())
    return [[str(p.relative_to(folder)), p.stat().st_size, p.stat().st_mtime_ns] for p in files]
