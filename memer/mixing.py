"""The arithmetic of a merge, one piece of one tensor at a time, in buffers that are reused."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from memer.adapter import Adapter
from memer.weights import FLOAT_DTYPES, Bytes, ContentHash, TensorEntry, as_bytes, as_tensor

#: read(name, first byte, into) of a model directory.
Read = Callable[[str, int, Bytes], None]


@dataclass(frozen=True, slots=True)
class MergeRecord:
    """What the pieces told on their way; threads write to it, each to its own keys."""

    base: ContentHash = field(default_factory=ContentHash)
    tuned: ContentHash = field(default_factory=ContentHash)
    changed: set[str] = field(default_factory=set)


class _Buffers:
    """Byte buffers that grow to the largest piece and are then reused."""

    def __init__(self) -> None:
        self._held: dict[str, Bytes] = {}

    def bytes(self, name: str, size: int) -> Bytes:
        held = self._held.get(name)
        if held is None or len(held) < size:
            held = self._held[name] = np.empty(size, np.uint8)
        return held[:size]

    def floats(self, name: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(self.bytes(name, count * dtype.itemsize)).view(dtype)


class LinearMerge:
    """Pieces of (1 - alpha) * base + alpha * tuned, for every alpha from one reading."""

    def __init__(
        self,
        alphas: Sequence[float],
        read_base: Read,
        read_tuned: Read,
        record: MergeRecord,
    ) -> None:
        self._alphas = alphas
        self._read_base, self._read_tuned = read_base, read_tuned
        self._record = record
        self._buffers = _Buffers()

    def __call__(self, entry: TensorEntry, first: int, count: int) -> list[Bytes]:
        """The piece of every output; see `memer.weight_writer.Produce`."""
        size, itemsize = count * entry.itemsize, entry.itemsize
        base = self._buffers.bytes("base", size)
        tuned = self._buffers.bytes("tuned", size)
        self._read_base(entry.name, first * itemsize, base)
        self._read_tuned(entry.name, first * itemsize, tuned)
        self._record.base.add(entry.name, first, zlib.crc32(base.data))
        if _same(base, tuned):
            self._record.tuned.add(entry.name, first, self._record.base.piece(entry.name, first))
            return [tuned] * len(self._alphas)
        self._record.tuned.add(entry.name, first, zlib.crc32(tuned.data))
        self._record.changed.add(entry.name)
        return [self._mix(alpha, base, tuned, entry.dtype, f"out{k}") for k, alpha in enumerate(self._alphas)]

    def _mix(self, alpha: float, base: Bytes, tuned: Bytes, dtype: str, name: str) -> Bytes:
        if alpha == 0:
            return base
        if alpha == 1 or dtype not in FLOAT_DTYPES:
            return tuned
        old, new = as_tensor(base, dtype), as_tensor(tuned, dtype)
        wide = torch.float64 if dtype == "F64" else torch.float32
        mixed = self._buffers.floats("mixed", len(old), wide)
        share = self._buffers.floats("share", len(old), wide)
        mixed.copy_(old).mul_(1 - alpha)
        share.copy_(new).mul_(alpha)
        mixed.add_(share)
        if old.dtype == wide:  # narrower forms round (1 - alpha) x + alpha x back to x by themselves
            torch.where(old == new, old, mixed, out=mixed)
        out = self._buffers.bytes(name, len(base))
        as_tensor(out, dtype).copy_(mixed)
        return out


class AdapterMerge:
    """Pieces of base + alpha * scale * B @ A; whole trained tensors are interpolated."""

    def __init__(
        self,
        alphas: Sequence[float],
        read_base: Read,
        adapter: Adapter,
        record: MergeRecord,
    ) -> None:
        self._alphas = alphas
        self._read_base = read_base
        self._adapter = adapter
        self._record = record
        self._buffers = _Buffers()
        self._linear = LinearMerge(alphas, read_base, self._read_replaced, record)

    def __call__(self, entry: TensorEntry, first: int, count: int) -> list[Bytes]:
        """The piece of every output; see `memer.weight_writer.Produce`."""
        if entry.name in self._adapter.replaced:
            return self._linear(entry, first, count)
        base = self._buffers.bytes("base", count * entry.itemsize)
        self._read_base(entry.name, first * entry.itemsize, base)
        self._record.base.add(entry.name, first, zlib.crc32(base.data))
        update = self._adapter.updates.get(entry.name)
        if update is None:
            return [base] * len(self._alphas)
        self._record.changed.add(entry.name)
        columns = entry.shape[1]
        delta = update.rows(first // columns, count // columns).reshape(-1)
        outs = []
        for k, alpha in enumerate(self._alphas):
            if alpha == 0:
                outs.append(base)
                continue
            wide = torch.float64 if entry.dtype == "F64" else torch.float32
            mixed = self._buffers.floats("mixed", count, wide)
            torch.mul(delta, alpha * update.scale, out=mixed)
            mixed.add_(as_tensor(base, entry.dtype))
            out = self._buffers.bytes(f"out{k}", len(base))
            as_tensor(out, entry.dtype).copy_(mixed)
            outs.append(out)
        return outs

    def _read_replaced(self, name: str, first_byte: int, into: Bytes) -> None:
        whole = as_bytes(self._adapter.replaced[name])
        into[:] = whole[first_byte : first_byte + len(into)]


def _same(one: Bytes, other: Bytes) -> bool:
    whole = len(one) // 8 * 8
    return bool((one[:whole].view(np.uint64) == other[:whole].view(np.uint64)).all()) and bool(
        (one[whole:] == other[whole:]).all()
    )
