"""What models make of demonstrations once: latents, text embeddings, imagined plans."""

from data.features.layout import shards_hash
from data.features.plans import ImaginedPlans, build_plans
from data.features.reader import FeatureSet
from data.features.writer import FeatureSettings, build_features

__all__ = [
    "FeatureSet",
    "FeatureSettings",
    "ImaginedPlans",
    "build_features",
    "build_plans",
    "shards_hash",
]
