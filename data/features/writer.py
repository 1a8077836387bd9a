"""Features of shards: episode by episode, resumable, complete or absent (see data.features.directory).

Codec and text encoder come as objects: data knows no models.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from data.building import chosen_episodes
from data.features.directory import Row, build_directory, save_array
from data.features.layout import (
    DTYPES,
    FORMAT_VERSION,
    TEXT_FEATURES_FILE,
    TEXTS_FILE,
    latents_name,
    shards_hash,
)
from data.shards import ShardSet
from data.views.base import PlanView
from data.views.frames import FrameCache
from memer.canvas import to_signed
from memer.devices import checked_device
from memer.errors import MemerError, UsageError
from memer.folders import write_json


class Codec(Protocol):
    """The frozen visual codec, as far as features need it."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """float32[B, 3, 1 + 4 m, H, W] in [-1, 1] to float32[B, C, 1 + m, h, w]."""
        ...

    def fingerprint(self) -> str:
        """Differs between codecs with different latents."""
        ...


class TextEncoder(Protocol):
    """The frozen text encoder, as far as features need it."""

    def encode(self, texts: Sequence[str]) -> torch.Tensor:
        """float32[len(texts), M, T]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSettings:
    """How features are computed and stored.

    Attributes:
        dtype: float32, or float16 for half the size.
        batch_size: clips encoded together.
        cache_bytes: decoded frames kept at most.
        device: where the clips are put for the codec.
    """

    dtype: str = "float32"
    batch_size: int = 8
    cache_bytes: int = 1024**3
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype: {self.dtype!r}, must be {' or '.join(DTYPES)}")
        if self.batch_size < 1:
            raise UsageError(f"batch_size: {self.batch_size!r}, must be >= 1")
        checked_device(self.device)


def build_features(
    shards: ShardSet,
    *,
    out: Path | str,
    view: PlanView,
    codec: Codec,
    text_encoder: TextEncoder | None,
    settings: FeatureSettings,
    episodes: Sequence[int] | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Write the features of a view's samples.

    Args:
        shards: the demonstrations.
        out: directory to make; must not exist, be empty, or be an unfinished build of the same inputs.
        view: which clips and texts there are.
        codec: clips to latents.
        text_encoder: texts to embeddings; None leaves them out, samples then hold words alone.
        settings: see FeatureSettings.
        episodes: numbers; None for all.
        progress: show a progress bar.

    Returns:
        The manifest.

    Raises:
        UsageError: unknown episodes; `out` holds something else.
        MemerError: the codec returns something else than the contract says; finished episodes stay.
    """
    out = Path(out)
    indices = chosen_episodes(shards, episodes)
    key = {"shards": shards_hash(shards), **view.feature_key()}
    described = {
        "format": FORMAT_VERSION,
        "key": key,
        "codec": codec.fingerprint(),
        "texts": text_encoder is not None,
        "dtype": settings.dtype,
        "episodes": indices,
        "sample_stride": getattr(view, "sample_stride", 1),
    }
    task = _Episodes(shards, view, codec, settings)
    return build_directory(
        out,
        described=described,
        episode=task.run,
        finish=partial(_finish, text_encoder=text_encoder, dtype=settings.dtype),
        desc="features",
        progress=progress,
    )


@dataclass(frozen=True, slots=True)
class _Episodes:
    """Writes the latents of one episode."""

    shards: ShardSet
    view: PlanView
    codec: Codec
    settings: FeatureSettings

    def run(self, folder: Path, index: int) -> Row:
        """The episode's record: keys of its latents, its texts, the sizes of its files."""
        episode = self.shards.episode(index)
        try:
            targets = self.view.targets(episode.segments, num_frames=episode.num_frames)
        except MemerError as error:
            raise type(error)(f"episode {index} of {self.shards.root}: {error}") from None
        where = f"episode {index} of {self.shards.root}"
        frames = FrameCache(max_bytes=self.settings.cache_bytes)
        kinds: dict[str, _Clips] = {}
        texts: set[str] = set()
        for t in self.view.steps(targets).steps:
            sample = self.view.sample(episode, t, targets=targets, frames=frames)
            for kind, (number, pictures) in self.view.clips(t, sample, targets).items():
                kinds.setdefault(kind, _Clips()).add(number, pictures)
                if len(kinds[kind].waiting) >= self.settings.batch_size:
                    self._encode(kinds[kind], where=where)
            texts.update(self.view.words(sample))
        files = {}
        for kind, clips in kinds.items():
            self._encode(clips, where=where)
            name = latents_name(index, kind)
            files[name] = save_array(folder / name, np.concatenate(clips.latents))
        return {
            "episode_index": index,
            "keys": {kind: clips.numbers for kind, clips in kinds.items()},
            "texts": sorted(texts),
            "files": files,
        }

    def _encode(self, clips: "_Clips", *, where: str) -> None:
        """Encode what waits; frames of a long episode would not fit into memory as clips."""
        if not clips.waiting:
            return
        batch, plan = np.stack(clips.waiting), self.view.plan
        clips.waiting.clear()
        with torch.inference_mode():
            video = to_signed(batch).transpose(1, 2).to(self.settings.device)
            latents = self.codec.encode(video).float().cpu().numpy()
        expected = (
            len(batch),
            plan.codec.channels,
            1 + (batch.shape[1] - 1) // plan.codec.temporal_ratio,
            plan.latent_height,
            plan.latent_width,
        )
        if latents.shape != expected:
            raise MemerError(
                f"{where}: the codec gives latents {latents.shape}, contract.plan says {expected}"
            )
        if not np.isfinite(latents).all():
            raise MemerError(f"{where}: the codec gives latents that are not finite")
        clips.latents.append(latents.astype(self.settings.dtype))


@dataclass(slots=True)
class _Clips:
    """Clips of one kind and one episode: which there are, those that wait, and what they became."""

    numbers: list[int] = field(default_factory=list)
    waiting: list[NDArray[np.uint8]] = field(default_factory=list)
    latents: list[NDArray[Any]] = field(default_factory=list)
    _known: set[int] = field(default_factory=set)

    def add(self, number: int, pictures: NDArray[np.uint8]) -> None:
        """Take a clip that was not there yet."""
        if number not in self._known:
            self._known.add(number)
            self.numbers.append(number)
            self.waiting.append(pictures)


def _finish(
    folder: Path, rows: Sequence[Row], *, text_encoder: TextEncoder | None, dtype: str
) -> dict[str, Any]:
    files = {name: size for row in rows for name, size in row["files"].items()}
    if text_encoder is not None:
        texts = sorted({text for row in rows for text in row["texts"]})
        embedded = torch.cat([text_encoder.encode([text]) for text in texts]).float().cpu().numpy()
        files[TEXT_FEATURES_FILE] = save_array(folder / TEXT_FEATURES_FILE, embedded.astype(dtype))
        write_json(folder / TEXTS_FILE, texts, durable=True)
        files[TEXTS_FILE] = (folder / TEXTS_FILE).stat().st_size
    return {
        "episodes": [{"episode_index": row["episode_index"], "keys": row["keys"]} for row in rows],
        "files": files,
    }
