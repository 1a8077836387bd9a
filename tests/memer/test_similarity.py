"""Plan similarities: order of distances, scale, what a configuration may name."""

import numpy as np
import pytest
import torch

from memer.errors import UsageError
from memer.progress import align_progress
from memer.similarity import FeatureCosine, LatentMse, PlanSimilarity, RgbMae, grid_features, make_similarity


def square(column: int) -> np.ndarray:
    """A red square on grey at a column, 32 x 32 px."""
    picture = np.full((32, 32, 3), 120, dtype=np.uint8)
    picture[12:20, column : column + 8] = (220, 30, 30)
    return picture


def pooled(clips: torch.Tensor) -> torch.Tensor:
    """Stands in for a codec: 4 x 4 px means of clips of one frame."""
    assert clips.shape[1:3] == (3, 1)
    return torch.nn.functional.avg_pool2d(clips[:, :, 0], 4)[:, :, None]


@pytest.mark.parametrize("similarity", [RgbMae(), LatentMse(pooled), FeatureCosine()])
def test_the_same_picture_is_nearest_and_distance_grows(similarity: PlanSimilarity):
    references = np.stack([square(0), square(4), square(8), square(20)])
    distances = similarity.distance(references, square(0))
    assert distances.dtype == np.float64
    assert distances[0] == pytest.approx(0, abs=1e-9)
    assert distances[0] < distances[1] < distances[2]
    assert distances[3] >= distances[2] - 1e-9


@pytest.mark.parametrize("kind", ["rgb_mae", "latent_mse", "feature_cosine"])
def test_every_kind_aligns_progress(kind):
    references = np.stack([square(3 * m) for m in range(9)])
    similarity = make_similarity(kind, encode=pooled)
    aligned = align_progress(0.30, references, square(9), similarity=similarity)
    assert aligned == pytest.approx((0.30 + 3 / 8) / 2)


def test_distances_in_grey_levels():
    black, white = np.zeros((2, 4, 4, 3), np.uint8), np.full((4, 4, 3), 255, np.uint8)
    assert RgbMae().distance(black, white).tolist() == [255.0, 255.0]


def test_features_without_length_do_not_divide_by_zero():
    zeros = FeatureCosine(features=lambda frames: np.zeros((len(frames), 3)))
    assert zeros.distance(np.stack([square(0), square(8)]), square(0)).tolist() == [0.0, 0.0]


def test_grid_features_are_means_of_cells():
    features = grid_features(np.stack([square(0), square(8)]), grid=4)
    assert features.shape == (2, 48)
    assert features[0, :3] == pytest.approx([120 / 127.5 - 1] * 3, abs=1e-6)
    assert grid_features(np.zeros((0, 8, 8, 3), np.uint8)).shape == (0, 192)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("learned", "not built; choose rgb_mae"),
        ("latent_mse", "needs a visual codec"),
        ("ssim", "similarity='ssim', must be rgb_mae"),
    ],
)
def test_what_cannot_be_had_is_refused(kind, message):
    with pytest.raises(UsageError, match=message):
        make_similarity(kind)
