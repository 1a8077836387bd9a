"""Keys and values of a batch that is about to be continued, without copying them at every token."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer


class RoomyLayer(DynamicLayer):
    """A layer that reserves room for the tokens to come, and may start with keys and values known before.

    Args:
        room: tokens that may follow the first ones before everything is copied into a larger buffer.
        known: per row [2, heads, n, head_dim], keys and values of its first tokens, None without; they end at
            the same column, and the columns before the shorter ones hold zeros.
    """

    def __init__(self, *, room: int, known: Sequence[Tensor | None] = ()) -> None:
        super().__init__()
        self.room = room
        self._known = known
        self._length = max((states.shape[2] for states in known if states is not None), default=0)
        self._buffers: tuple[Tensor, Tensor] | None = None

    def get_seq_length(self) -> int:
        """Columns so far, the known ones included before the first update."""
        return self._length

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [B, heads, new, head_dim] and return everything so far."""
        first, self._length = self._length, self._length + key_states.shape[-2]
        if self._buffers is None:
            self.lazy_initialization(key_states, value_states)
            keys, values = (self._begin(k, states) for k, states in enumerate((key_states, value_states)))
            self._buffers, self._known = (keys, values), ()
        elif self._length > self._buffers[0].shape[2]:
            keys, values = (self._longer(buffer[:, :, :first]) for buffer in self._buffers)
            self._buffers = (keys, values)
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, first : self._length] = states
        return self._show()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows named by int64 `indices`."""
        if self._buffers is not None:
            keys, values = (buffer[indices] for buffer in self._buffers)
            self._buffers = (keys, values)
            self._show()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest columns; `tokens_to_remove` counts them as a negative number."""
        self._length += tokens_to_remove
        self._show()

    def _begin(self, which: int, states: Tensor) -> Tensor:
        """A buffer of `which` (0 keys, 1 values) with the known columns in it."""
        rows, heads, new, head_dim = states.shape
        width = self._length - new
        buffer = states.new_empty(rows, heads, self._length + self.room, head_dim)
        buffer[:, :, :width] = 0  # masked columns are multiplied by 0, which does not undo a NaN
        for row, known in enumerate(self._known):
            if known is not None:
                buffer[row, :, width - known.shape[2] : width] = known[which]
        return buffer

    def _longer(self, filled: Tensor) -> Tensor:
        rows, heads, _, head_dim = filled.shape
        room = filled.new_empty(rows, heads, self._length - filled.shape[2] + self.room, head_dim)
        return torch.cat([filled, room], dim=2)

    def _show(self) -> tuple[Tensor, Tensor]:
        assert self._buffers is not None
        keys, values = (buffer[:, :, : self._length] for buffer in self._buffers)
        self.keys, self.values = keys, values
        return keys, values


def can_go_back(config: PreTrainedConfig) -> bool:
    """Whether single tokens can be left out or kept afterwards; a recurrent state holds them all in one."""
    return "linear_attention" not in (getattr(config, "layer_types", None) or ())


def roomy_cache(config: PreTrainedConfig, *, room: int, known: Sequence[Sequence[Tensor]]) -> Cache:
    """A cache with room for tokens that follow; the library's own where `can_go_back` is False.

    Args:
        config: of the language model.
        room: see RoomyLayer.
        known: per row and layer, see RoomyLayer; a row without known tokens is empty.
    """
    if not can_go_back(config):
        return DynamicCache(config=config)
    layers = range(config.num_hidden_layers)
    return Cache(
        layers=[
            RoomyLayer(room=room, known=[row[layer] if row else None for row in known]) for layer in layers
        ]
    )


def keep_rows(cache: Cache, rows: Tensor) -> None:
    """Keep the rows named by int64 `rows`; the library's recurrent layers know reordering alone."""
    layers: list[Any] = cache.layers
    for layer in layers:
        if hasattr(layer, "batch_select_indices"):
            layer.batch_select_indices(rows)
        else:
            layer.reorder_cache(rows)


def row_states(cache: Cache, row: int, *, columns: slice) -> list[Tensor]:
    """Copies of one row's keys and values, one [2, heads, n, head_dim] per layer."""
    layers: list[Any] = cache.layers
    return [torch.stack([layer.keys[row, :, columns], layer.values[row, :, columns]]) for layer in layers]
