"""The files of a feature directory and of one of imagined plans; one home for writers and readers.

    manifest.json                 written last: without it the directory holds no features
    episode_%06d.clip.npy         float[n, C, F, h, w], the latents of the clip of each step
    episode_%06d.plan.npy         the same per segment (executor with a visual plan)
    texts.json, texts.npy         the words, and float[n, M, T] in their order (unless left out)
    episode_%06d.frames.npy       uint8[K, N, H, W, 3], the imagined plan of each segment (`stage=plans`)

A visual planner's clip is a whole episode (or, without memory, a segment) from one encoding. An executor's
clips lie beside each other although they share frames: the latents of future frames depend on where the clip
starts, so no table of one latent per frame could replace them.
"""

from data.shards import ShardSet
from data.sources import json_hash

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
TEXTS_FILE = "texts.json"
TEXT_FEATURES_FILE = "texts.npy"

#: Number types in which features are stored; samples hold float32 always.
DTYPES = ("float32", "float16")


def latents_name(episode_index: int, kind: str) -> str:
    """File of one kind of latents (`clip` or `plan`) of an episode."""
    return f"episode_{episode_index:06d}.{kind}.npy"


def plan_frames_name(episode_index: int) -> str:
    """File of the imagined plans of an episode."""
    return f"episode_{episode_index:06d}.frames.npy"


def shards_hash(shards: ShardSet) -> str:
    """Names the content of shards, labels included."""
    files = [*shards.manifest["shards"], shards.manifest["index"]]
    return json_hash([file["sha256"] for file in files])
