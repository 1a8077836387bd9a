"""Frozen text encoders: texts to embeddings [B, M, T] with zeros behind the true end.

The zeros stay visible to the transformer, as Wan was trained, so M belongs to the model and is the same in
training and at run time.

Source: MaP-WAM (arXiv 2609.11561); Wan 2.2's UMT5 convention.
"""

import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, UMT5EncoderModel

from memer.errors import MemerError
from memer.plan_settings import TextSettings
from models.pretrained import load_part
from models.text_store import TextStore


class TextEncoder(Protocol):
    """Texts to float32[B, M, T] on the CPU; the same text always gives the same bits."""

    settings: TextSettings

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Embeddings in the order of the texts."""


class _CachingEncoder(ABC):
    """Encodes every text once; a training set has a few hundred different ones."""

    def __init__(self, settings: TextSettings) -> None:
        self.settings = settings
        self._known: dict[str, Tensor] = {}

    def encode(self, texts: Sequence[str]) -> Tensor:
        """See TextEncoder."""
        if not texts:
            return torch.zeros(0, self.settings.max_tokens, self.settings.dim)
        for text in texts:
            if text not in self._known:
                self._known[text] = self._encode(self.settings.template.format(text=text))
        return torch.stack([self._known[text] for text in texts])

    @abstractmethod
    def _encode(self, sentence: str) -> Tensor:
        """float32[M, T] of a text inside its template."""


class HashedText(_CachingEncoder):
    """Every word gets a fixed pseudo-random vector, as does every place in the sentence; no weights.

    A token is the sum of both, of variance 1: with words alone "red onto blue" would equal "blue onto red".
    Texts of more than M words go on at the first token again, their vectors added up, so no word is lost.
    """

    def _encode(self, sentence: str) -> Tensor:
        size, dim = self.settings.max_tokens, self.settings.dim
        tokens = np.zeros((size, dim), dtype=np.float32)
        for place, word in enumerate(re.findall(r"\w+|[^\w\s]", sentence.lower())):
            tokens[place % size] += _vector(f"word {word}", dim) + _vector(f"place {place}", dim)
        return torch.from_numpy(tokens) / math.sqrt(2)


def _vector(name: str, dim: int) -> np.ndarray:
    """float32[dim], standard normal, decided by the name alone."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(dim, dtype=np.float32)


class Umt5Text(_CachingEncoder):
    """The UMT5 encoder of Wan, frozen.

    Embeddings are kept on disk (`models.text_store`). The encoder, 5.7 billion parameters, is loaded for the
    first text that is not there, so a robot that is told known subtasks needs none. The empty text is asked
    for at once: an encoder that is needed and missing shows before any work.

    Args:
        settings: `model` names a folder with `text_encoder` and `tokenizer` in it, one with both at once, or
            a pipeline's hub id.
        device: of the encoder; the results are on the CPU.
        dtype: of the encoder.

    Raises:
        SourceUnavailableError: nothing there.
        MemerError: the encoder's width differs from the settings.
    """

    def __init__(
        self,
        settings: TextSettings,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(settings)
        self._device, self._dtype = device, dtype
        self.store = TextStore(settings, dtype=str(dtype))
        self.encode([""])

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer beside the encoder."""
        return load_part(AutoTokenizer, self.settings.model, part="tokenizer")

    @cached_property
    def encoder(self) -> Any:
        """The encoder on its device."""
        settings = self.settings
        encoder = load_part(UMT5EncoderModel, settings.model, part="text_encoder", dtype=self._dtype)
        if encoder.config.d_model != settings.dim:
            raise MemerError(
                f"text encoder {settings.model}: embeddings of {encoder.config.d_model} numbers, the "
                f"contract says text.dim={settings.dim}"
            )
        return encoder.to(self._device).eval().requires_grad_(False)

    def _encode(self, sentence: str) -> Tensor:
        tokens = self.store.read(sentence)
        if tokens is None:
            tokens = self._computed(sentence)
            self.store.write(sentence, tokens)
        missing = self.settings.max_tokens - len(tokens)
        return torch.nn.functional.pad(tokens, (0, 0, 0, missing))

    @torch.no_grad()
    def _computed(self, sentence: str) -> Tensor:
        """float32[n, T] of the n true tokens."""
        size = self.settings.max_tokens
        ids = self.tokenizer(sentence)["input_ids"]
        if len(ids) > size:
            raise MemerError(f"text of {len(ids)} tokens, text.max_tokens={size} allows fewer: {sentence!r}")
        # Padded to M as in Wan's pipelines, so that the numeric path does not depend on the length.
        padded = torch.zeros(1, size, dtype=torch.long)
        padded[0, : len(ids)] = torch.tensor(ids)
        device = self.encoder.device
        seen = torch.arange(size)[None] < len(ids)
        with torch.autocast(device.type, enabled=False):
            states = self.encoder(padded.to(device), attention_mask=seen.long().to(device)).last_hidden_state
        return states[0, : len(ids)].float().cpu()  # type: ignore[no-any-return]


def make_text_encoder(settings: TextSettings, *, device: torch.device | str = "cpu") -> TextEncoder:
    """The encoder that the settings name."""
    return HashedText(settings) if settings.kind == "hashed" else Umt5Text(settings, device=device)
