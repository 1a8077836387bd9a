"""How alike a plan's frames and the present one are.

Source: MaP-WAM specification, sections 9 (mean absolute RGB difference) and 17 (further options).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from memer.canvas import to_signed
from memer.errors import UsageError

#: float32[B, 3, 1 + 4 m, H, W] in [-1, 1] -> latents [B, ...], as a visual codec encodes.
Encode = Callable[[torch.Tensor], torch.Tensor]

#: uint8[N, H, W, 3] -> [N, D].
Features = Callable[[NDArray[np.uint8]], NDArray[np.floating]]


class PlanSimilarity(Protocol):
    """Distances between pictures, in any unit; smaller is more alike."""

    def distance(self, references: NDArray[np.uint8], frame: NDArray[np.uint8]) -> NDArray[np.float64]:
        """float64[M] of uint8[M, H, W, 3] references against one frame uint8[H, W, 3]."""
        ...


@dataclass(frozen=True, slots=True)
class RgbMae:
    """Mean absolute RGB difference, in grey levels 0..255."""

    def distance(self, references: NDArray[np.uint8], frame: NDArray[np.uint8]) -> NDArray[np.float64]:
        """See PlanSimilarity."""
        difference = np.abs(references.astype(np.int16) - frame.astype(np.int16))
        mean: NDArray[np.float64] = difference.mean(axis=(1, 2, 3), dtype=np.float64)
        return mean


@dataclass(frozen=True, slots=True)
class LatentMse:
    """Mean squared difference of a codec's latents, every picture encoded alone.

    Args:
        encode: the codec's `encode`; single frames are clips of one frame to it.
    """

    encode: Encode

    def distance(self, references: NDArray[np.uint8], frame: NDArray[np.uint8]) -> NDArray[np.float64]:
        """See PlanSimilarity."""
        pictures = to_signed(np.concatenate([references, frame[None]]))
        with torch.no_grad():
            latents = self.encode(pictures.unsqueeze(2)).float().flatten(1)
        return (latents[:-1] - latents[-1]).square().mean(dim=1).double().cpu().numpy()


def grid_features(frames: NDArray[np.uint8], *, grid: int = 8) -> NDArray[np.float32]:
    """Mean colours on a coarse grid: float32[N, grid * grid * 3] in [-1, 1] of uint8[N, H, W, 3].

    A description that needs no network; blind to what is smaller than a cell.
    """
    size = (grid, grid)
    small = [np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BOX)) for frame in frames]
    cells = np.stack(small) if small else np.zeros((0, grid, grid, 3), np.uint8)
    return (cells.reshape(len(frames), grid * grid * 3) / 127.5 - 1.0).astype(np.float32)


@dataclass(frozen=True, slots=True)
class FeatureCosine:
    """1 - cosine of the features of both pictures.

    Args:
        features: a frozen feature extractor; mean colours on a grid by default.
    """

    features: Features = grid_features

    def distance(self, references: NDArray[np.uint8], frame: NDArray[np.uint8]) -> NDArray[np.float64]:
        """See PlanSimilarity; two pictures without any feature are alike (0)."""
        vectors = self.features(np.concatenate([references, frame[None]])).astype(np.float64)
        ours, present = vectors[:-1], vectors[-1]
        lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(present)
        same = (ours == present).all(axis=1)
        cosine: NDArray[np.float64] = np.divide(
            ours @ present, lengths, out=same.astype(np.float64), where=lengths > 0
        )
        return 1.0 - cosine


def make_similarity(
    kind: str = "rgb_mae", *, encode: Encode | None = None, features: Features = grid_features
) -> PlanSimilarity:
    """The similarity that a configuration names.

    Args:
        kind: `rgb_mae`, `latent_mse` or `feature_cosine`.
        encode: needed by `latent_mse`, see LatentMse.
        features: of `feature_cosine`, see FeatureCosine.

    Raises:
        UsageError: an unknown kind, `learned` (which is not built), or `latent_mse` without an encoder.
    """
    if kind == "rgb_mae":
        return RgbMae()
    if kind == "latent_mse":
        if encode is None:
            raise UsageError("similarity=latent_mse: needs a visual codec to encode with")
        return LatentMse(encode)
    if kind == "feature_cosine":
        return FeatureCosine(features)
    if kind == "learned":
        raise UsageError("similarity=learned: not built; choose rgb_mae, latent_mse or feature_cosine")
    raise UsageError(f"similarity={kind!r}, must be rgb_mae, latent_mse or feature_cosine")
