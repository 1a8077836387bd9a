"""Small JSON files, read with errors that name them and the way out."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memer.errors import MemerError, SourceUnavailableError


def read_manifest(
    path: Path, *, format_version: int, kind: str, fields: Sequence[str], missing: str
) -> dict[str, Any]:
    """Read what a build wrote last, which describes all of it.

    Args:
        path: the file.
        format_version: the only one that is accepted.
        kind: what is described, for messages.
        fields: names that must be there.
        missing: the way out, for messages.

    Raises:
        SourceUnavailableError: the file is missing.
        MemerError: it is not JSON, of another version, or describes something else.
    """
    values = read_json(path, missing=missing)
    found = values.get("format") if isinstance(values, dict) else None
    if found != format_version:
        raise MemerError(f"{path}: format {found!r}, this program reads {format_version}; {missing}")
    absent = [name for name in fields if name not in values]
    if absent:
        raise MemerError(f"{path}: no {absent[0]!r}, so this describes no {kind}; {missing}")
    manifest: dict[str, Any] = values
    return manifest


def read_json(path: Path, *, missing: str) -> Any:
    """Read a JSON file.

    Raises:
        SourceUnavailableError: the file is missing; the message ends with `missing`.
        MemerError: it is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise SourceUnavailableError(f"{path}: not found; {missing}") from None
    except OSError as error:
        raise SourceUnavailableError(f"{path}: cannot be read ({error.strerror})") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise MemerError(f"{path}: not JSON ({error}); make it again") from None
