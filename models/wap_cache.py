"""Keys and values that the executor keeps: of a plan or a history per segment, of an observation per chunk.

Caches are values: passed in and returned, never kept in a module. A history may own spare memory behind its
keys, in which later frames, the observation and the chunk are written, so that nothing as long as the history
is copied per chunk.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from models.wan import KeyValue


class PlanCache(NamedTuple):
    """Keys and values of P.

    Attributes:
        keys: per layer [B, S, heads, head_dim], without gradient.
        latents: number of latent frames in it.
        space: per layer the memory whose first rows are `keys`; None where there is nothing behind them. Only
            the newest of several caches that share it may be extended.
    """

    keys: list[KeyValue]
    latents: int
    space: list[KeyValue] | None = None

    @classmethod
    def join(cls, caches: "Sequence[PlanCache]") -> "PlanCache":
        """One batch of plans of equal length, for several episodes in lockstep."""
        if len({cache.latents for cache in caches}) != 1:
            raise ValueError(f"caches of {[cache.latents for cache in caches]} latents cannot share a batch")
        layers = zip(*(cache.keys for cache in caches), strict=True)
        keys = [(torch.cat([k for k, _ in kvs]), torch.cat([v for _, v in kvs])) for kvs in layers]
        return cls(keys, caches[0].latents)

    @property
    def tokens(self) -> int:
        """Number of tokens in it."""
        return self.keys[0][0].shape[1] if self.keys else 0

    @property
    def num_bytes(self) -> int:
        """Memory of keys and values, bytes."""
        return num_bytes(self.keys)

    def room(self, tokens: int) -> list[KeyValue] | None:
        """Per layer, the keys and values and `tokens` further rows of the space; None if it is too small."""
        end = self.tokens + tokens
        if self.space is None or self.space[0][0].shape[1] < end:
            return None
        return [(k[:, :end], v[:, :end]) for k, v in self.space]

    def extended(self, new: Sequence[KeyValue], *, latents: int, spare: int) -> "PlanCache":
        """This cache and new keys behind it; copied only where the space is used up, to twice the length.

        Args:
            new: per layer.
            latents: number of new latent frames.
            spare: least number of rows that stay free for observation and chunk.
        """
        start, end = self.tokens, self.tokens + new[0][0].shape[1]
        space = self.space
        if space is None or space[0][0].shape[1] < end + spare:
            space = [(_longer(k, 2 * end + spare), _longer(v, 2 * end + spare)) for k, v in self.keys or new]
        for (k, v), (new_k, new_v) in zip(space, new, strict=True):
            k[:, start:end] = new_k
            v[:, start:end] = new_v
        keys = [(k[:, :end], v[:, :end]) for k, v in space]
        return PlanCache(keys, self.latents + latents, space)


class ObsCache(NamedTuple):
    """Keys and values of O per layer; valid for one observation, state and progress."""

    keys: list[KeyValue]

    @property
    def num_bytes(self) -> int:
        """Memory of keys and values, bytes."""
        return num_bytes(self.keys)


Cached = Mapping[str, Sequence[KeyValue]]


def cached_groups(plan: PlanCache, obs: ObsCache | None = None) -> dict[str, Sequence[KeyValue]]:
    """Caches by group, in the order of the attention."""
    groups: dict[str, Sequence[KeyValue]] = {"P": plan.keys} if plan.latents else {}
    return groups if obs is None else {**groups, "O": obs.keys}


def token_counts(cached: Cached) -> dict[str, int]:
    """Number of tokens of every cached group."""
    return {name: keys[0][0].shape[1] for name, keys in cached.items()}


def chunk_rooms(plan: PlanCache, obs: ObsCache, *, new_tokens: int) -> list[KeyValue]:
    """Per layer, the keys and values of P and O with room for new tokens behind them."""
    tokens = obs.keys[0][0].shape[1]
    rooms = plan.room(tokens + new_tokens)
    if rooms is None:
        layers = zip(*cached_groups(plan, obs).values(), strict=True)
        return [
            (_joined([k for k, _ in kvs], new_tokens), _joined([v for _, v in kvs], new_tokens))
            for kvs in layers
        ]
    rows = slice(plan.tokens, plan.tokens + tokens)
    for (k, v), (obs_k, obs_v) in zip(rooms, obs.keys, strict=True):
        k[:, rows] = obs_k
        v[:, rows] = obs_v
    return rooms


def num_bytes(keys: Sequence[KeyValue]) -> int:
    """Memory of keys and values, bytes."""
    return sum(part.numel() * part.element_size() for kv in keys for part in kv)


def _joined(parts: Sequence[Tensor], new_tokens: int) -> Tensor:
    batch, _, *heads = parts[0].shape
    return torch.cat([*parts, parts[0].new_empty(batch, new_tokens, *heads)], dim=1)


def _longer(x: Tensor, length: int) -> Tensor:
    """x in the first rows of memory for `length` rows."""
    batch, tokens, *heads = x.shape
    y = x.new_empty(batch, length, *heads)
    y[:, :tokens] = x
    return y
