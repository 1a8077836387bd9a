"""A world model of a few thousand weights, batches for it, and eyes inside."""

from typing import Any

import torch
from torch import Tensor

from models.cwm import CausalWorldModel, EvidenceCache
from models.wan import CausalWan, tiny_config

C, H, W, M, T = 8, 4, 4, 3, 32
N = 4  # tokens per latent frame


def make_model(*, plan_frames: int = 8, **kwargs: Any) -> CausalWorldModel:
    torch.manual_seed(0)
    config = {**tiny_config(channels=C), "num_layers": 2, "ffn_dim": 96, "num_attention_heads": 3}
    return CausalWorldModel(CausalWan(**config), plan_frames=plan_frames, **kwargs)


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def batch(num: int = 3, *, size: int = 2, r: int = 2) -> dict[str, Tensor]:
    return {
        "latents": noise(size, C, 1 + r * num, H, W),
        "num_segments": torch.full((size,), num),
        "text_global": noise(size, M, T, seed=2),
        "text_plan": noise(size, num, M, T, seed=3),
    }


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Watched(CausalWan):
    """Keeps what goes in and out of each pass."""

    def run(self, tokens: Tensor, time: Tensor, **kwargs: Any) -> Any:
        self.passes = [*getattr(self, "passes", []), (tokens, super().run(tokens, time, **kwargs))]
        return self.passes[-1][1]


def watched(**kwargs: Any) -> CausalWorldModel:
    model = make_model(**kwargs)
    model.transformer.__class__ = Watched
    return model


def frame_tokens(x: Tensor, first: int, last: int) -> Tensor:
    return x[:, first * N : last * N]


def by_block(model: CausalWorldModel, b: dict[str, Tensor]) -> EvidenceCache:
    cache = model.append(EvidenceCache(), b["latents"][:, :, :1], b["text_global"])
    for k in range(b["text_plan"].shape[1] - 1):
        cache = model.append(cache, b["latents"][:, :, 1 + 2 * k : 3 + 2 * k], b["text_global"])
    return cache


def states(model: CausalWorldModel, b: dict[str, Tensor]) -> Tensor:
    """Tokens after the last block of the training pass [clean 0..2 | noisy 1..3]."""
    with torch.no_grad():
        model.loss(**b, generator=seeded())
    return model.transformer.passes[-1][1][0]
