"""Episode shards: WebDataset tars that hold each frame once, a manifest, and an index for exact access."""

from data.shards.reader import ShardFrames, ShardSet
from data.shards.statistics import Moments
from data.shards.writer import BuildSettings, build_shards

__all__ = ["BuildSettings", "Moments", "ShardFrames", "ShardSet", "build_shards"]
