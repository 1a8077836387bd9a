"""Latents and text embeddings of a view's samples, computed once by the frozen codec and text encoder."""

from data.features.layout import shards_hash
from data.features.reader import FeatureSet
from data.features.writer import FeatureSettings, build_features

__all__ = ["FeatureSet", "FeatureSettings", "build_features", "shards_hash"]
