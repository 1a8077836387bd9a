"""Model directories as streams of tensors: headers are read, bytes are fetched where they lie.

A safetensors file is 8 bytes (little-endian length of the header), a JSON header {name: {dtype, shape,
data_offsets}}, then the tensors' bytes in order. Reading that form here, with `pread` and small buffers
keeps the resident memory bounded whatever the size of the model; mapped files would count in full.

Source: https://github.com/huggingface/safetensors#format; names of the files as transformers
and diffusers write them.
"""

import hashlib
import json
import math
import os
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from memer.errors import MemerError, SourceUnavailableError
from memer.folders import read_json

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
#: Names of weight files without suffix, as transformers and as diffusers write them.
_STEMS = ("model", "diffusion_pytorch_model")
HEAD_KEY = "lm_head.weight"
EMBEDDING_SUFFIX = "embed_tokens.weight"

#: safetensors dtype -> torch dtype; quantised forms are absent because they cannot be interpolated.
TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")

#: Elements handled at once; the buffers of one worker then fit a core's own cache.
CHUNK_ELEMENTS = 1 << 18

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies.

    Attributes:
        name: key of the tensor.
        dtype: safetensors name, e.g. `BF16`.
        shape: dimensions.
        file: the safetensors file.
        offset: of the first byte in that file.
        num_bytes: length.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        """Product of the dimensions, 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return TORCH_DTYPES[self.dtype].itemsize


def read_header(path: Path) -> list[TensorEntry]:
    """Entries of one safetensors file in the order of their bytes.

    Raises:
        MemerError: the file is cut short or is no safetensors file, or holds a dtype that cannot be handled.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length)) if 8 + length <= size else None
    except FileNotFoundError:
        raise SourceUnavailableError(f"{path}: no such weight file") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise MemerError(f"{path}: not a safetensors file ({error})") from None
    if not isinstance(header, dict):
        raise MemerError(f"{path}: cut short, {size} bytes do not hold the header; copy the file again")
    entries = []
    for name, value in header.items():
        if name == "__metadata__":
            continue
        begin, end = value["data_offsets"]
        if value["dtype"] not in TORCH_DTYPES:
            raise MemerError(
                f"{path}: {name}: dtype {value['dtype']} is not supported, use a model stored as "
                f"{', '.join(FLOAT_DTYPES)}"
            )
        entry = TensorEntry(
            name=name,
            dtype=value["dtype"],
            shape=tuple(value["shape"]),
            file=path,
            offset=8 + length + begin,
            num_bytes=end - begin,
        )
        if entry.num_bytes != entry.num_elements * entry.itemsize or entry.offset + entry.num_bytes > size:
            raise MemerError(
                f"{path}: {name}: bytes {begin}..{end} do not fit; the file is cut short or damaged"
            )
        entries.append(entry)
    return sorted(entries, key=lambda entry: entry.offset)


class WeightFiles:
    """The weight files of one model directory: every tensor by name, read in pieces.

    Attributes:
        root: the directory.
        shards: file name -> entries in file order.
        entries: tensor name -> entry.
    """

    def __init__(self, root: Path, shards: Mapping[str, list[TensorEntry]]) -> None:
        self.root = root
        self.shards = dict(shards)
        self.entries: dict[str, TensorEntry] = {}
        for file, entries in self.shards.items():
            for entry in entries:
                if entry.name in self.entries:
                    raise MemerError(
                        f"{root}: {entry.name} is in {self.entries[entry.name].file.name} and in {file}"
                    )
                self.entries[entry.name] = entry

    @classmethod
    def open(cls, root: Path | str) -> Self:
        """Read the headers of a model directory.

        Raises:
            SourceUnavailableError: no such directory, or a shard that the index names is missing.
            MemerError: no safetensors in it, or a damaged file.
        """
        root = Path(root)
        if not root.is_dir():
            raise SourceUnavailableError(f"{root}: no such model directory")
        names = next((found for stem in _STEMS if (found := _weight_files(root, stem))), [])
        if not names:
            raise MemerError(f"{root}: no {WEIGHTS_FILE} nor {INDEX_FILE}; only safetensors models are read")
        return cls(root, {name: read_header(root / name) for name in names})

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.num_bytes for entry in self.entries.values())

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor."""
        entry = self.entries[name]
        data = np.empty(entry.num_bytes, np.uint8)
        with entry.file.open("rb", buffering=0) as stream:
            read_exactly(stream.fileno(), data, entry.offset, where=entry)
        return as_tensor(data, entry.dtype).reshape(entry.shape)

    @contextmanager
    def reader(self) -> Iterator[Callable[[str, int, Bytes], None]]:
        """Yield read(name, first_byte, into), usable from several threads at once."""
        with ExitStack() as stack:
            handles = {
                self.root / file: stack.enter_context((self.root / file).open("rb", buffering=0)).fileno()
                for file in self.shards
            }

            def read(name: str, first_byte: int, into: Bytes) -> None:
                entry = self.entries[name]
                read_exactly(handles[entry.file], into, entry.offset + first_byte, where=entry)

            yield read

    def is_tied(self) -> bool:
        """Whether the output head is the embedding; only the top-level flag of config.json decides.

        Without a config or a flag the absence of the head decides.
        """
        flag = self.config().get("tie_word_embeddings")
        return HEAD_KEY not in self.entries if flag is None else bool(flag)

    def config(self) -> dict[str, Any]:
        """config.json, empty when absent."""
        path = self.root / "config.json"
        return read_json(path) if path.is_file() else {}

    def vocabulary_size(self) -> int | None:
        """Rows of the embedding, None for a model without one."""
        for name, entry in self.entries.items():
            if name.endswith(EMBEDDING_SUFFIX):
                return entry.shape[0]
        return None

    def content_hash(self, *, skip: Collection[str] = ()) -> str:
        """Hash of the tensors, see `ContentHash`; reads everything once."""
        content, buffer = ContentHash(), np.empty(0, np.uint8)
        with self.reader() as read:
            for entry in self.entries.values():
                if entry.name in skip:
                    continue
                for first, count in chunks(entry):
                    size = count * entry.itemsize
                    if len(buffer) < size:
                        buffer = np.empty(size, np.uint8)
                    read(entry.name, first * entry.itemsize, buffer[:size])
                    content.add(entry.name, first, zlib.crc32(buffer[:size].data))
        return content.digest(self, skip=skip)


def _weight_files(root: Path, stem: str) -> list[str]:
    """The one file, those that an index names, or all of that stem."""
    single, index = f"{stem}.safetensors", root / f"{stem}.safetensors.index.json"
    if (root / single).is_file():
        return [single]
    if index.is_file():
        return sorted(set(read_json(index).get("weight_map", {}).values()))
    return sorted(path.name for path in root.glob(f"{stem}*.safetensors"))


def chunks(entry: TensorEntry) -> Iterator[tuple[int, int]]:
    """(first element, number of elements) of whole-row pieces of a tensor."""
    if entry.num_elements == 0:
        return
    rows = entry.shape[0] if entry.shape else 1
    row = entry.num_elements // rows
    step = max(1, CHUNK_ELEMENTS // row) * row
    for first in range(0, entry.num_elements, step):
        yield first, min(step, entry.num_elements - first)


class ContentHash:
    """Names what tensors hold, however they are divided into files.

    SHA-256 of one line `name dtype shape crc crc ...` per tensor in the order of the names; crc is the
    CRC-32 of each piece that `chunks` gives. It is some three times as fast as SHA-256 over the bytes, and
    the pieces may come in any order from several threads, so a merge gets it while reading. It finds changes
    and damage, not forgery.
    """

    def __init__(self) -> None:
        self._pieces: dict[tuple[str, int], int] = {}

    def add(self, name: str, first: int, crc: int) -> None:
        """Take the checksum of the piece that starts at element `first`."""
        self._pieces[name, first] = crc

    def piece(self, name: str, first: int) -> int:
        """The checksum of a piece that was added."""
        return self._pieces[name, first]

    def digest(self, files: WeightFiles, *, skip: Collection[str] = ()) -> str:
        """Hexadecimal hash; every piece of every tensor must have been added."""
        digest = hashlib.sha256()
        for name, entry in sorted(files.entries.items()):
            if name not in skip:
                crcs = "".join(f" {self._pieces[name, first]:08x}" for first, _ in chunks(entry))
                digest.update(f"{name} {entry.dtype} {list(entry.shape)}{crcs}\n".encode())
        return digest.hexdigest()


def read_exactly(handle: int, into: Bytes, offset: int, *, where: TensorEntry) -> None:
    """Fill `into` from an open file at `offset`."""
    view, done = into.data, 0
    while done < len(view):
        count = os.preadv(handle, [view[done:]], offset + done)
        if count == 0:
            raise MemerError(
                f"{where.file}: {where.name}: the file ends too early; was it changed meanwhile?"
            )
        done += count


def as_tensor(data: Bytes, dtype: str) -> torch.Tensor:
    """View bytes as a flat tensor; no copy."""
    return torch.from_numpy(data).view(TORCH_DTYPES[dtype])


def as_bytes(tensor: torch.Tensor) -> Bytes:
    """View a CPU tensor as bytes; copies only when it is not contiguous."""
    array: Bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return array
