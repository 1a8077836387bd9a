"""One HDF5 recording of RMBench: joint positions and JPEG pictures.

The simulator keeps RGB pictures and hands them to an encoder that takes BGR, so that red and blue are
exchanged inside the JPEG data. A decoder that gives RGB (Pillow here) has to exchange them back once; the
pictures an evaluation shows were never encoded and are true RGB.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from data.lerobot.video import check_ascending
from memer.errors import MemerError, SourceUnavailableError, UsageError

VECTOR = "joint_action/vector"
#: Parts of VECTOR in its order.
PARTS = ("left_arm", "left_gripper", "right_arm", "right_gripper")


def h5py_module() -> Any:
    """The optional package h5py.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import h5py
    except ImportError:
        raise UsageError(
            "source=rmbench needs h5py, which is not installed; install the extra: pip install memer[rmbench]"
        ) from None
    return h5py


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The file for reading, closed at the end; no handle outlives it.

    Raises:
        SourceUnavailableError: no such file.
        MemerError: it is no whole HDF5 file.
    """
    module = h5py_module()
    if not path.exists():
        raise SourceUnavailableError(f"{path}: no such file; fetch it, or choose other episodes")
    try:
        handle = module.File(path, "r")
    except OSError as error:
        raise MemerError(f"{path}: cannot be read as HDF5 ({error}); fetch the file again") from None
    with handle:
        yield handle


@dataclass(frozen=True, slots=True)
class RecordedFrames:
    """The pictures of one camera in one episode (see memer.episode.FrameSource).

    Attributes:
        path: the HDF5 file.
        camera: its name there, e.g. head_camera.
        length: number of frames.
        swap_channels: whether red and blue are exchanged in the stored pictures.
    """

    path: Path
    camera: str
    length: int
    swap_channels: bool = True

    @property
    def prepared(self) -> bool:
        """Stored pictures still have the camera's size."""
        return False

    def __len__(self) -> int:
        return self.length

    def frames(self, indices: Sequence[int] | None = None) -> Iterator[NDArray[np.uint8]]:
        """Yield uint8[H, W, 3] RGB for strictly ascending `indices` (None: all)."""
        chosen = list(range(self.length)) if indices is None else check_ascending(indices, self.length)
        with opened(self.path) as handle:
            pictures = handle[picture_key(self.camera)]
            for index in chosen:
                yield self._decode(pictures, index)

    def _decode(self, pictures: Any, index: int) -> NDArray[np.uint8]:
        where = f"{self.path}: camera {self.camera} frame {index}"
        try:
            value = pictures[index]
            # Padding zeros behind the end marker do not disturb the decoder.
            data = value.tobytes() if isinstance(value, np.ndarray) else bytes(value)
            with Image.open(io.BytesIO(data)) as picture:
                pixels = np.asarray(picture.convert("RGB"))
        except OSError as error:
            raise MemerError(
                f"{where}: the picture cannot be decoded ({error}); fetch the file again"
            ) from None
        return np.ascontiguousarray(pixels[:, :, ::-1]) if self.swap_channels else pixels


def picture_key(camera: str) -> str:
    """Path of a camera's pictures inside the file."""
    return f"observation/{camera}/rgb"


def camera_names(handle: Any) -> list[str]:
    """Cameras that have pictures, head camera first, then by name."""
    group = handle.get("observation")
    names = [] if group is None else [str(name) for name in group if picture_key(str(name)) in handle]
    return sorted(names, key=lambda name: (name != "head_camera", name))


def read_positions(handle: Any, *, where: str) -> NDArray[np.float32]:
    """Joint positions, float32[T, D]: `vector`, or its parts side by side where it is absent.

    Args:
        handle: the open file.
        where: names file and episode in messages.

    Raises:
        MemerError: absent, of another shape, not finite, or at odds with its parts.
    """
    parts = [np.asarray(handle[f"joint_action/{name}"]) for name in PARTS if f"joint_action/{name}" in handle]
    joined = None
    if len(parts) == len(PARTS):
        lengths = [len(part) for part in parts]
        if len(set(lengths)) > 1:
            raise MemerError(f"{where}: joint_action parts have {lengths} frames; fetch the file again")
        joined = np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)
    if VECTOR in handle:
        vector = np.asarray(handle[VECTOR])
    elif joined is not None:
        vector = joined
    else:
        raise MemerError(f"{where}: neither {VECTOR} nor all of joint_action/{{{', '.join(PARTS)}}}")
    if vector.ndim != 2 or not np.issubdtype(vector.dtype, np.number):
        raise MemerError(f"{where}: {VECTOR} is {vector.dtype}{list(vector.shape)}, must be numbers [T, D]")
    if len(vector) == 0:
        raise MemerError(f"{where}: no frames")
    if joined is not None and (
        joined.shape != vector.shape or not np.allclose(joined, vector, atol=1e-5, equal_nan=True)
    ):
        raise MemerError(f"{where}: {VECTOR} differs from {', '.join(PARTS)} side by side")
    bad = np.argwhere(~np.isfinite(vector))
    if len(bad):
        frame, dim = (int(k) for k in bad[0])
        raise MemerError(
            f"{where}: {VECTOR} frame {frame} dim {dim} is {vector[frame, dim]}; leave the episode out"
        )
    return vector.astype(np.float32)
