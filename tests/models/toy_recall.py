"""A task that cannot be solved from the present: a coloured square is covered, and must be uncovered again.

Eight colours, four corners, 32 x 32 px. Segment 1 slides a cover over the square, segment 2 slides it away,
so the plan of segment 2 needs the first frame. Longer episodes repeat both.
"""

import itertools

import torch
from torch import Tensor

from memer.plan_settings import TextSettings
from models.codec import PatchCodec
from models.text import HashedText

SIZE, SIDE = 32, 10
COLORS = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=3)))
CORNERS = ((3, 3), (3, 19), (19, 3), (19, 19))
BACKGROUND, COVER = -0.2, 0.3
INSTRUCTION, TEXTS = "cover and uncover the square", ("cover the square", "uncover the square")


def episode(color: int, corner: int, *, segments: int = 2) -> Tensor:
    """float32[3, 1 + 8 * segments, 32, 32] in [-1, 1]; the cover comes from the left edge of the square."""
    y, x = CORNERS[corner]
    frames = [0] + [k if segment % 2 == 0 else 8 - k for segment in range(segments) for k in range(1, 9)]
    clip = torch.full((3, len(frames), SIZE, SIZE), BACKGROUND)
    for number, covered in enumerate(frames):
        clip[:, number, y : y + SIDE, x : x + SIDE] = COLORS[color][:, None, None]
        clip[:, number, y : y + SIDE, x : x + round(covered * SIDE / 8)] = COVER
    return clip


def colors_found(plan: Tensor, corners: Tensor) -> Tensor:
    """int64[B]: the colour nearest to the last frame's square in plans float32[B, 3, 8, 32, 32]."""
    found = []
    for clip, corner in zip(plan, corners.tolist(), strict=True):
        y, x = CORNERS[corner]
        mean = clip[:, -1, y + 2 : y + SIDE - 2, x + 2 : x + SIDE - 2].mean(dim=(1, 2))
        found.append((COLORS - mean).abs().sum(dim=1).argmin())
    return torch.stack(found)


class ToyRecall:
    """Batches of latents and texts.

    Args:
        segments: K of every episode.
        spatial_ratio: of the patch codec.
    """

    def __init__(self, *, segments: int = 2, spatial_ratio: int = 4) -> None:
        self.codec = PatchCodec(spatial_ratio)
        self.segments = segments
        encoder = HashedText(TextSettings())
        self.text_global = encoder.encode([INSTRUCTION])
        self.texts = encoder.encode([TEXTS[k % 2] for k in range(segments)])
        pairs = itertools.product(range(len(COLORS)), range(len(CORNERS)))
        self.pairs = torch.tensor(list(pairs))
        self.clips = torch.stack([episode(c, p, segments=segments) for c, p in self.pairs.tolist()])
        self.latents = self.codec.encode(self.clips)

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Arguments of CausalWorldModel.loss for episodes int64[B] out of 32."""
        size = len(rows)
        return (
            self.latents[rows],
            torch.full((size,), self.segments),
            self.text_global.expand(size, -1, -1),
            self.texts.expand(size, -1, -1, -1),
        )
