"""Cameras stored as encoded pictures in the table (features of dtype `image`)."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from data.lerobot.meta import inside
from data.lerobot.tables import iterate_cells
from data.lerobot.video import check_ascending, decode_counter
from memer.errors import MemerError


@dataclass(frozen=True, slots=True)
class ImageFrames:
    """The frames of one image camera in one episode (see memer.episode.FrameSource).

    Attributes:
        root: folder of the data set.
        table: parquet file, relative to the root.
        episode: the source's number.
        camera: column name.
        length: number of frames.
    """

    root: Path
    table: str
    episode: int
    camera: str
    length: int

    @property
    def prepared(self) -> bool:
        """Stored pictures still have the camera's size."""
        return False

    def __len__(self) -> int:
        return self.length

    def frames(self, indices: Sequence[int] | None = None) -> Iterator[NDArray[np.uint8]]:
        """Yield uint8[H, W, 3] RGB for strictly ascending `indices` (None: all)."""
        chosen = list(range(self.length)) if indices is None else check_ascending(indices, self.length)
        wanted = iter(chosen)
        target = next(wanted, None)
        cells = iterate_cells(self.root / self.table, self.episode, column=self.camera)
        for k, cell in enumerate(cells):
            if target is None:
                return
            if k == target:
                yield self._picture(cell, k)
                target = next(wanted, None)
        if target is not None:
            raise MemerError(
                f"{self.root / self.table}: episode {self.episode} camera {self.camera}: "
                f"no picture for frame {target}"
            )

    def _picture(self, cell: Any, frame: int) -> NDArray[np.uint8]:
        where = f"{self.root / self.table}: episode {self.episode} camera {self.camera} frame {frame}"
        value = cell if isinstance(cell, dict) else {"bytes": cell}
        try:
            if value.get("bytes") is not None:
                source: Any = io.BytesIO(value["bytes"])
            elif value.get("path"):
                source = self.root / inside(self.root, str(value["path"]))
            else:
                raise MemerError(f"{where}: neither bytes nor a path")
            with Image.open(source) as picture:
                decode_counter.decoded += 1
                decode_counter.converted += 1
                return np.asarray(picture.convert("RGB"))
        except (OSError, TypeError) as error:
            raise MemerError(f"{where}: the picture cannot be decoded ({error})") from None
