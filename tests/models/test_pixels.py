import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor

from memer.contract import CameraLayout
from memer.errors import MemerError
from models.pixels import PixelGeometry, normalized
from models.prompt_encoder import PromptEncoder
from tests.models.samples import tiny_contract

MEMER = PixelGeometry(min_pixels=50_176, max_pixels=115_200)
BASE_DEFAULT = PixelGeometry(min_pixels=65_536, max_pixels=16_777_216)


@pytest.mark.parametrize(
    ("geometry", "width", "height", "resized", "tokens"),
    [
        (MEMER, 320, 360, (320, 352), 110),
        (MEMER, 320, 180, (320, 192), 60),
        (MEMER, 320, 540, (256, 416), 104),
        (MEMER, 640, 480, (384, 288), 108),
        (MEMER, 1280, 720, (448, 224), 98),
        (BASE_DEFAULT, 320, 540, (320, 544), 170),
        (BASE_DEFAULT, 64, 64, (256, 256), 64),
        (PixelGeometry(min_pixels=1_024, max_pixels=9_216), 64, 64, (64, 64), 4),
        (PixelGeometry(min_pixels=1_024, max_pixels=115_200), 224, 224, (224, 224), 49),
    ],
)
def test_sizes_and_tokens_of_the_specification(
    geometry: PixelGeometry, width: int, height: int, resized: tuple[int, int], tokens: int
) -> None:
    assert geometry.resized((height, width)) == resized[::-1]
    assert geometry.num_tokens((height, width)) == tokens


@pytest.mark.parametrize("bounds", [(50_176, 115_200), (1_024, 9_216), (65_536, 16_777_216)])
def test_grid_and_pixels_equal_the_image_processor(base, bounds: tuple[int, int]) -> None:
    processor = AutoImageProcessor.from_pretrained(base)
    geometry = PixelGeometry(min_pixels=bounds[0], max_pixels=bounds[1])
    rng = np.random.default_rng(0)
    for height, width in [(360, 320), (37, 53), (64, 64), (33, 400), (301, 75), (128, 64), (5, 150)]:
        picture = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        size = {"shortest_edge": bounds[0], "longest_edge": bounds[1]}
        theirs = processor(images=[picture], size=size, return_tensors="pt")
        rows, columns = geometry.grid((height, width))
        assert theirs["image_grid_thw"].tolist() == [[1, rows, columns]], (height, width)
        ours = normalized(torch.from_numpy(geometry.patches(picture)), geometry)
        copies = theirs["pixel_values"].view(len(ours), 3, 2, 256)
        torch.testing.assert_close(
            ours.view(len(ours), 3, 1, 256).expand_as(copies), copies, atol=1e-6, rtol=0
        )


def test_absurd_aspect_ratio_is_refused() -> None:
    with pytest.raises(MemerError, match="2 x 500"):
        MEMER.resized((500, 2))


@pytest.mark.parametrize("fault", ["ignored budget", "factor 28"])
def test_a_processor_with_another_grid_is_refused(base, encoder: PromptEncoder, fault: str) -> None:
    """The two-camera picture hides an ignored budget; the three-camera one shows it."""
    contract = tiny_contract(
        cameras=CameraLayout(camera_keys=("a", "b", "c"), view_width=320, view_height=180),
        min_pixels=50_176,
        max_pixels=115_200,
    )
    processor = AutoImageProcessor.from_pretrained(base)
    PromptEncoder(encoder.tokenizer, processor, contract)  # the control: this one is fine

    class Ignoring:
        def __getattr__(self, name: str):
            return getattr(processor, name)

        def __call__(self, images, size, return_tensors):
            if fault == "factor 28":
                return processor(images=images, size=size, patch_size=14, return_tensors=return_tensors)
            default = {"shortest_edge": 65_536, "longest_edge": 16_777_216}
            return processor(images=images, size=default, return_tensors=return_tensors)

    with pytest.raises(MemerError, match="320 x 540 px"):
        PromptEncoder(encoder.tokenizer, Ignoring(), contract)


def test_a_processor_with_other_pixels_is_refused(base, encoder: PromptEncoder) -> None:
    processor = AutoImageProcessor.from_pretrained(base, do_rescale=False)
    with pytest.raises(MemerError, match="pixels differ"):
        PromptEncoder(encoder.tokenizer, processor, encoder.contract)
