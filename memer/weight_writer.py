"""Writing model weights piece by piece, at their final place, in the safetensors form."""

import json
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from memer.weights import INDEX_FILE, TORCH_DTYPES, WEIGHTS_FILE, Bytes, TensorEntry, WeightFiles, chunks

#: (entry, first element, number of elements) -> the bytes for every output folder, valid until the next call.
Produce = Callable[[TensorEntry, int, int], Sequence[Bytes]]


def write_weights(
    folders: Sequence[Path],
    *,
    like: WeightFiles,
    make_produce: Callable[[], Produce],
    drop: Collection[str] = (),
    dtypes: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Write one model's weights into every folder, with the shards and the tensor order of `like`.

    Tensors are cut into whole rows of their first dimension, about `CHUNK_ELEMENTS` at a time, and written at
    their final place by a few threads, so that nothing but these pieces is ever in memory.

    Args:
        folders: existing directories.
        like: names, shapes and the division into files.
        make_produce: called once per thread; its result owns that thread's buffers.
        drop: tensors to leave out.
        dtypes: tensor name -> safetensors dtype where it differs from `like`.
        progress: called with (bytes done, bytes in all) of one output.

    Returns:
        Bytes of the tensors of one output.
    """
    dtypes = dtypes or {}
    local = threading.local()
    num_threads = torch.get_num_threads()
    total, done, lock = 0, 0, threading.Lock()

    def start_thread() -> None:
        torch.set_num_threads(
            1
        )  # the pool is the parallelism; kernels inside it must not start pools of their own
        local.produce = make_produce()

    with ExitStack() as stack:
        tasks: list[tuple[TensorEntry, int, int, int, list[int]]] = []
        weight_map: dict[str, str] = {}
        for file, entries in like.shards.items():
            kept = [entry for entry in entries if entry.name not in drop]
            if not kept:
                continue
            header, offsets, end = _plan_file(kept, dtypes)
            handles = []
            for folder in folders:
                stream = stack.enter_context((folder / file).open("wb", buffering=0))
                stream.write(header)
                os.ftruncate(stream.fileno(), len(header) + end)
                handles.append(stream.fileno())
            for entry, offset in zip(kept, offsets, strict=True):
                itemsize = TORCH_DTYPES[dtypes.get(entry.name, entry.dtype)].itemsize
                weight_map[entry.name] = file
                for first, count in chunks(entry):
                    tasks.append((entry, first, count, len(header) + offset + first * itemsize, handles))
            total += end

        def run(task: tuple[TensorEntry, int, int, int, list[int]]) -> None:
            nonlocal done
            entry, first, count, position, handles = task
            for handle, data in zip(handles, local.produce(entry, first, count), strict=True):
                write_exactly(handle, data, position)
                size = len(data)
            with lock:
                done += size
                if progress:
                    progress(done, total)

        workers = min(4, os.cpu_count() or 1)
        try:
            with ThreadPoolExecutor(workers, "weights", initializer=start_thread) as pool:
                futures = [pool.submit(run, task) for task in tasks]
                try:
                    for future in futures:
                        future.result()
                except BaseException:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise
        finally:
            torch.set_num_threads(num_threads)
    for folder in folders:
        if set(weight_map.values()) != {WEIGHTS_FILE}:
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total


def write_exactly(handle: int, data: Bytes, offset: int) -> None:
    """Write all of `data` at `offset`."""
    view, done = data.data, 0
    while done < len(view):
        done += os.pwrite(handle, view[done:], offset + done)


def _plan_file(entries: Sequence[TensorEntry], dtypes: Mapping[str, str]) -> tuple[bytes, list[int], int]:
    """Header bytes, the offset of each tensor behind the header, and their total length."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, position = [], 0
    for entry in entries:
        dtype = dtypes.get(entry.name, entry.dtype)
        size = entry.num_elements * TORCH_DTYPES[dtype].itemsize
        header[entry.name] = {
            "dtype": dtype,
            "shape": list(entry.shape),
            "data_offsets": [position, position + size],
        }
        offsets.append(position)
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned to 8 bytes
    return len(text).to_bytes(8, "little") + text, offsets, position
