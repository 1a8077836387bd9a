"""Keys and values of a batch that is about to be continued, without copying them at every token."""

from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer


class RoomyLayer(DynamicLayer):
    """A layer that reserves room for the tokens to come when it sees the prompt.

    Args:
        room: tokens that may follow; more than that are refused.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self._length = 0
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [B, heads, new, head_dim] and return everything so far."""
        new = key_states.shape[-2]
        if self._buffers is None:
            self.lazy_initialization(key_states, value_states)
            shape = (*key_states.shape[:2], new + self.room, key_states.shape[3])
            self._buffers = (key_states.new_empty(shape), value_states.new_empty(shape))
        first, self._length = self._length, self._length + new
        self.keys, self.values = (
            self._append(buffer, states, first)
            for buffer, states in zip(self._buffers, (key_states, value_states), strict=True)
        )
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows named by int64 `indices`."""
        if self._buffers is not None:
            keys, values = (buffer[indices] for buffer in self._buffers)
            self._buffers = (keys, values)
            self.keys, self.values = keys[:, :, : self._length], values[:, :, : self._length]

    def _append(self, buffer: Tensor, states: Tensor, first: int) -> Tensor:
        if self._length > buffer.shape[-2]:
            raise ValueError(f"cache: {self._length} tokens, room for {buffer.shape[-2]}")
        buffer[:, :, first : self._length] = states
        return buffer[:, :, : self._length]


def roomy_cache(config: PreTrainedConfig, *, room: int) -> Cache:
    """A cache that holds a prompt and `room` tokens; the library's own for linear attention."""
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        return DynamicCache(config=config)
    return Cache(layers=[RoomyLayer(room) for _ in range(config.num_hidden_layers)])
