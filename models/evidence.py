"""What a causal world model keeps of an episode: keys and values of the finished blocks, as a value."""

from dataclasses import dataclass

from models.wan_layer import KeyValue


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceCache:
    """What the finished blocks leave behind; a value, never changed in place.

    Attributes:
        layers: keys and values per transformer block, [B, num_latents * n, heads, head_dim]; empty at first.
        num_latents: latent frames inside: 0, or 1 + r * (finished segments).
        shape: [B, C, h, w] of the latents.
    """

    layers: tuple[KeyValue, ...] = ()
    num_latents: int = 0
    shape: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def num_bytes(self) -> int:
        """Memory of keys and values."""
        return sum(k.nbytes + v.nbytes for k, v in self.layers)
