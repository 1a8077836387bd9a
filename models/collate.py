"""Planner samples to one packed batch: rows filled to a token budget, every distinct frame once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memer.errors import MemerError, UsageError
from memer.sample import FrameKey, PlannerSample
from models.prompt_encoder import EncodedSample, PromptEncoder


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PackedBatch:
    """What one training step takes.

    Attributes:
        input_ids: int64[R, L].
        position_ids: int64[4, R, L]; row 0 restarts at 0 with every sample, rows 1-3 are rotary positions.
        patches: uint8[P, ...], the distinct frames' patches, in the order of `frame_grids`.
        frame_grids: (rows, columns) of each distinct frame, patches.
        image_rows: int64[n], for every picture token of `input_ids` in row order its token among the frames'.
        target_index: int64[A], flat index into R * L of the token before each trained one.
        target_ids: int64[A], the trained ids.
        target_kinds: int64[A], STRUCTURE, LABEL, POSITIONS or END.
        cu_seq_lens: int32[S + 1], sample boundaries in the flattened rows.
        max_seq_len: longest sample, tokens.
        sample_ids: samples inside, in packing order.
        dropped_ids: samples longer than the limit, left out whole.
        num_tokens: tokens without padding.
        num_image_slots: pictures counted per occurrence.
    """

    input_ids: Tensor
    position_ids: Tensor
    patches: Tensor
    frame_grids: tuple[tuple[int, int], ...]
    image_rows: Tensor
    target_index: Tensor
    target_ids: Tensor
    target_kinds: Tensor
    cu_seq_lens: Tensor
    max_seq_len: int
    sample_ids: tuple[str, ...]
    dropped_ids: tuple[str, ...]
    num_tokens: int
    num_image_slots: int

    @property
    def num_frames(self) -> int:
        """Distinct frames, each encoded once."""
        return len(self.frame_grids)

    @property
    def num_targets(self) -> int:
        """Trained tokens."""
        return len(self.target_ids)

    def __repr__(self) -> str:
        rows, length = self.input_ids.shape
        return (
            f"PackedBatch({len(self.sample_ids)} samples in {rows} rows of {length} tokens, "
            f"{self.num_frames} frames, {self.num_targets} targets)"
        )

    def to(self, device: Any, **kwargs: Any) -> "PackedBatch":
        """A copy with every tensor on `device`."""
        return self._map(lambda tensor: tensor.to(device, **kwargs))

    def pin_memory(self) -> "PackedBatch":
        """A copy in page-locked memory."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, change: Callable[[Tensor], Tensor]) -> "PackedBatch":
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        return PackedBatch(**{n: change(v) if isinstance(v, Tensor) else v for n, v in values.items()})


class PlannerCollator:
    """Encodes and packs; holds no model, so it runs in data workers.

    Args:
        encoder: of the base model, under the contract.
        max_length: tokens; a longer sample is left out whole and named, never cut.
        pack_tokens: token budget of a row; 0 puts every sample into a row of its own.
        single_row: all samples in one row, for attention kernels that take sample boundaries.
    """

    #: What it takes.
    sample_type = PlannerSample

    def __init__(
        self,
        encoder: PromptEncoder,
        *,
        max_length: int = 8192,
        pack_tokens: int = 8192,
        single_row: bool = False,
    ) -> None:
        if max_length < 1 or pack_tokens < 0:
            raise UsageError(
                f"max_length: {max_length!r}, pack_tokens: {pack_tokens!r}; must be >= 1 and >= 0"
            )
        self.encoder = encoder
        self.max_length = max_length
        self.pack_tokens = pack_tokens
        self.single_row = single_row

    def __call__(self, samples: Sequence[PlannerSample]) -> PackedBatch:
        """Pack a batch.

        Raises:
            MemerError: no sample of the batch is short enough, so nothing would be learned from it.
        """
        kept: list[tuple[PlannerSample, EncodedSample]] = []
        dropped: list[tuple[str, int]] = []
        for sample in samples:
            encoded = self.encoder.encode_sample(sample)
            if len(encoded) > self.max_length:
                dropped.append((sample.sample_id, len(encoded)))
            else:
                kept.append((sample, encoded))
        if not kept:
            named = ", ".join(f"{name} has {length}" for name, length in dropped[:3])
            raise MemerError(
                f"batch without supervised tokens: every sample exceeds max_length={self.max_length} tokens "
                f"({named}); raise max_length or show fewer or smaller pictures"
            )
        rows = self._rows([len(encoded) for _, encoded in kept])
        order = [index for row in rows for index in row]
        frames = _Frames(self.encoder)
        for index in order:
            frames.add(*kept[index])

        length = max(sum(len(kept[index][1]) for index in row) for row in rows)
        input_ids = np.full((len(rows), length), self.encoder.pad_id, dtype=np.int64)
        position_ids = np.zeros((4, len(rows), length), dtype=np.int64)
        image_rows, target_index, target_ids, target_kinds, lengths = [], [], [], [], []
        for r, row in enumerate(rows):
            at = 0
            for index in row:
                encoded = kept[index][1]
                span = slice(at, at + len(encoded))
                input_ids[r, span] = encoded.input_ids
                position_ids[0, r, span] = np.arange(len(encoded))
                position_ids[1:, r, span] = encoded.positions
                image_rows += [frames.tokens(key) for key in encoded.image_keys]
                trained = np.flatnonzero(encoded.kinds >= 0)
                target_index.append(r * length + at + trained - 1)
                target_ids.append(encoded.labels[trained])
                target_kinds.append(encoded.kinds[trained])
                lengths.append(len(encoded))
                at += len(encoded)
            # Padding continues the last sample: nothing sees it, and rows of one sample need no mask.
            after = int(position_ids[0, r, at - 1]) + 1
            position_ids[:, r, at:] = np.arange(after, after + length - at)
            if at < length:
                lengths[-1] += length - at
        return PackedBatch(
            input_ids=torch.from_numpy(input_ids),
            position_ids=torch.from_numpy(position_ids),
            patches=torch.from_numpy(frames.patches()),
            frame_grids=tuple(frames.grids),
            image_rows=torch.from_numpy(_joined(image_rows)),
            target_index=torch.from_numpy(_joined(target_index)),
            target_ids=torch.from_numpy(_joined(target_ids)),
            target_kinds=torch.from_numpy(_joined(target_kinds)),
            cu_seq_lens=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)),
            max_seq_len=max(lengths),
            sample_ids=tuple(kept[index][0].sample_id for index in order),
            dropped_ids=tuple(name for name, _ in dropped),
            num_tokens=sum(len(encoded) for _, encoded in kept),
            num_image_slots=sum(len(encoded.image_keys) for _, encoded in kept),
        )

    def _rows(self, lengths: Sequence[int]) -> list[list[int]]:
        """Indices per row: longest first, each into the first row with room."""
        if self.single_row:
            return [list(range(len(lengths)))]
        rows: list[list[int]] = []
        room: list[int] = []
        for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
            place = next((r for r, free in enumerate(room) if lengths[index] <= free), None)
            if place is None:
                rows.append([])
                room.append(self.pack_tokens)
                place = len(rows) - 1
            rows[place].append(index)
            room[place] -= lengths[index]
        return rows


class _Frames:
    """The distinct frames of a batch and where their tokens lie."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self._geometry = encoder.geometry
        self._patches: list[np.ndarray[Any, Any]] = []
        self._tokens: dict[FrameKey, np.ndarray[Any, Any]] = {}
        self._grid: dict[FrameKey, tuple[int, int]] = {}
        self._count = 0
        self.grids: list[tuple[int, int]] = []

    def add(self, sample: PlannerSample, encoded: EncodedSample) -> None:
        for key, grid in zip(encoded.image_keys, encoded.image_grids, strict=True):
            if key in self._tokens:
                if self._grid[key] != grid:
                    raise MemerError(
                        f"frame {key}: two sizes in one batch, but a frame is encoded once for all samples"
                    )
                continue
            self._grid[key] = grid
            self._patches.append(self._geometry.patches(sample.question.frames[key]))
            self.grids.append(grid)
            count = grid[0] * grid[1] // self._geometry.merge_size**2
            self._tokens[key] = np.arange(self._count, self._count + count)
            self._count += count

    def tokens(self, key: FrameKey) -> "np.ndarray[Any, Any]":
        return self._tokens[key]

    def patches(self) -> "np.ndarray[Any, Any]":
        if not self._patches:
            return np.zeros((0, 3 * self._geometry.patch_size**2), dtype=np.uint8)
        return np.concatenate(self._patches)


def _joined(parts: Sequence["np.ndarray[Any, Any]"]) -> "np.ndarray[Any, Any]":
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
