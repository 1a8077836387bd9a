"""Frozen parts of a published pipeline: one folder or hub id per part, or a pipeline with the part inside."""

from pathlib import Path
from typing import Any

from memer.errors import SourceUnavailableError
from models.progress import no_progress_bars


def load_part(kind: Any, name: str, *, part: str, **kwargs: Any) -> Any:
    """`kind.from_pretrained` of a folder or hub id.

    Args:
        kind: class with `from_pretrained`.
        name: a folder that holds the part itself or, below it, a folder `part`; or `OWNER/NAME` of a pipeline
            on the hub.
        part: folder of the part inside a pipeline, such as `vae`.
        kwargs: for `from_pretrained`.

    Raises:
        SourceUnavailableError: nothing there.
    """
    path = Path(name)
    if path.is_dir():
        inside = (path / part).is_dir()
    elif path.is_absolute() or name.startswith(".") or name.count("/") != 1:
        raise SourceUnavailableError(f"{part} {name!r}: no such folder; give a folder or a hub id OWNER/NAME")
    else:
        inside = True
    try:
        with no_progress_bars():
            return kind.from_pretrained(name, **({"subfolder": part} if inside else {}), **kwargs)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise SourceUnavailableError(
            f"{part} {name!r}: {kind.__name__} cannot be loaded ({reason})"
        ) from error
