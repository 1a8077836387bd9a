"""Writes recordings in the benchmark's exact layout."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

CAMERAS = ("head_camera", "left_camera", "right_camera")
#: Colour of the object that every picture shows in its middle, as the simulator sees it.
OBJECT = {"head_camera": (220, 20, 30), "left_camera": (20, 30, 220), "right_camera": (30, 200, 40)}


def picture(camera: str, frame: int, *, height: int = 48, width: int = 64) -> NDArray[np.uint8]:
    """True RGB: the object on grey; a light column at the left edge grows with the frame number."""
    pixels = np.full((height, width, 3), 128, dtype=np.uint8)
    pixels[height // 4 : 3 * height // 4, width // 4 : 3 * width // 4] = OBJECT[camera]
    pixels[: 2 * frame, : width // 8] = 255
    return pixels


def encode_as_bgr(rgb: NDArray[np.uint8]) -> bytes:
    """What an encoder that takes BGR makes of an RGB array."""
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(rgb[:, :, ::-1])).save(buffer, format="JPEG", quality=95)
    return buffer.getvalue()


def positions(num_frames: int, *, episode: int = 0) -> NDArray[np.float64]:
    """[T, 14], every value another one."""
    return episode * 100.0 + np.arange(num_frames)[:, None] + np.arange(14)[None] / 100.0


def write_recording(root: Path, episode: int, num_frames: int, **changed: Any) -> Path:
    """`data/episodeN.hdf5`; `changed` replaces data sets by path, None leaves them out."""
    import h5py

    vector = positions(num_frames, episode=episode)
    values: dict[str, Any] = {
        "joint_action/left_arm": vector[:, :6],
        "joint_action/left_gripper": vector[:, 6],
        "joint_action/right_arm": vector[:, 7:13],
        "joint_action/right_gripper": vector[:, 13],
        "joint_action/vector": vector,
        "endpose/left_endpose": np.zeros((num_frames, 7)),
    }
    for camera in CAMERAS:
        coded = [encode_as_bgr(picture(camera, k)) for k in range(num_frames)]
        values[f"observation/{camera}/rgb"] = np.array(coded, dtype=f"S{max(map(len, coded)) + 5}")
        values[f"observation/{camera}/intrinsic_cv"] = np.zeros((num_frames, 3, 3))
    path = root / "data" / f"episode{episode}.hdf5"
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as handle:
        for key, value in {**values, **changed}.items():
            if value is not None:
                handle.create_dataset(key, data=value)
    return path


def write_texts(root: Path, episode: int) -> None:
    """`instructions/episodeN.json`."""
    path = root / "instructions" / f"episode{episode}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = {"seen": [f"seen {episode} a", f"seen {episode} b"], "unseen": [f"unseen {episode}"]}
    path.write_text(json.dumps(texts), encoding="utf-8")


def write_annotations(root: Path, episodes: dict[str, Any]) -> None:
    """`language_annotation.json`."""
    (root / "language_annotation.json").write_text(json.dumps(episodes), encoding="utf-8")


def write_task(root: Path, *, lengths: tuple[int, ...] = (20, 16), numbers: tuple[int, ...] = (0, 2)) -> Path:
    """A whole folder: two subtasks per episode, then two frames that nobody annotated."""
    for episode, length in zip(numbers, lengths, strict=True):
        write_recording(root, episode, length)
        write_texts(root, episode)
    write_annotations(
        root,
        {f"episode_{e}": [["Pick.", 8], ["Place.", n - 10]] for e, n in zip(numbers, lengths, strict=True)},
    )
    return root
