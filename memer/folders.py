"""Folders that are handed on: what is in them, its hashes, and writing them so that none is half there."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memer.errors import MemerError, SourceUnavailableError


def combined_hash(hashes: Mapping[str, str]) -> str:
    """One SHA-256 for several files: of the lines `HASH  NAME` in the order of the names."""
    lines = "".join(f"{hashes[name]}  {name}\n" for name in sorted(hashes))
    return hashlib.sha256(lines.encode()).hexdigest()


def file_hash(path: Path) -> str:
    """SHA-256 of a file, read in small pieces."""
    digest, buffer = hashlib.sha256(), bytearray(1 << 20)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; damage is named."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SourceUnavailableError(f"{path}: no such file") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise MemerError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise MemerError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a name beside `path` to write to; it takes the place of `path` unless writing fails.

    Args:
        path: what readers see whole, the old or the new; missing folders are made.
        durable: flush to the disk before the rename, for what a later run must be able to trust.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    yield temporary
    if durable:
        with temporary.open("r+b") as stream:
            os.fsync(stream.fileno())
    os.replace(temporary, path)


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    """Indented UTF-8 JSON, written as `replacing` says."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    with replacing(path, durable=durable) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def new_folders(outs: Sequence[Path], *, replace: bool = False) -> Iterator[list[Path]]:
    """Yield a hidden sibling for every folder to be written; all appear at the end, none after a failure.

    Args:
        outs: the folders.
        replace: existing ones give way once the new ones are whole; without it they are errors.

    Raises:
        MemerError: a target exists and is not empty.
    """
    for out in outs:
        occupied = out.is_symlink() or out.is_file() or (out.is_dir() and any(out.iterdir()))
        if occupied and not (replace and out.is_dir()):
            raise MemerError(f"{out}: exists already and is not empty; remove it or name another folder")
    hidden = [out.parent / f".{out.name}.partial" for out in outs]
    try:
        for folder in hidden:
            shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed
            folder.mkdir(parents=True)
        yield hidden
        for folder, out in zip(hidden, outs, strict=True):
            old = out.parent / f".{out.name}.old"
            shutil.rmtree(old, ignore_errors=True)
            if out.is_dir():
                os.replace(out, old)
            os.replace(folder, out)
            shutil.rmtree(old, ignore_errors=True)
    finally:
        for folder in hidden:
            shutil.rmtree(folder, ignore_errors=True)


#: Folders and files of training state and other weight forms; never part of a model that is handed on.
_WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".index.json",
    ".tmp",
)
_OWN_FILES = ("provenance.json", "merge_info.json")


def side_files(root: Path) -> dict[str, Path]:
    """Name -> path of everything in a model directory that is not weights: configs, tokenizer, processors.

    What describes that very directory (provenance, merge record) is left out, as are hidden files.
    """
    found = {
        path.name: path
        for path in sorted(root.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and not path.name.endswith(_WEIGHT_SUFFIXES)
        and path.name not in _OWN_FILES
    }
    templates = root / "additional_chat_templates"
    if templates.is_dir():
        found |= {f"{templates.name}/{path.name}": path for path in sorted(templates.glob("*.jinja"))}
    return found


def copy_files(files: Mapping[str, Path], folder: Path) -> None:
    """Copy files under their names, byte for byte."""
    for name, path in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / name)
