"""Drawing large and shrinking."""

import numpy as np
import pytest

from memer.tabletop import make_world
from memer.tabletop.painting import Canvas, oversampling, shrink


def test_shrinking_is_the_mean_of_squares():
    pixels = np.random.default_rng(0).integers(0, 256, (12, 12, 3)).astype(np.uint8)
    small = shrink(pixels, 3)
    assert (small.shape, small.dtype) == ((4, 4, 3), np.uint8)
    expected = pixels[3:6, 9:12].reshape(-1, 3).mean(axis=0)
    np.testing.assert_allclose(small[1, 3], expected, atol=0.5)
    np.testing.assert_array_equal(shrink(pixels, 1), pixels)
    np.testing.assert_array_equal(shrink(Canvas.filled(8, (7, 255, 1)).pixels, 4), [[(7, 255, 1)] * 2] * 2)


@pytest.mark.parametrize(("size", "factor"), [(16, 8), (32, 4), (48, 3), (127, 2), (128, 1), (300, 1)])
def test_small_pictures_are_drawn_larger(size, factor):
    assert oversampling(size) == factor


@pytest.mark.parametrize("task", ["press_button", "swap_blocks", "observe_and_pick_up"])
def test_a_small_picture_shows_motion_below_a_pixel(task):
    world = make_world(task)
    before = world.paint(32)["base"]
    world.gripper[2] += 0.02
    assert not np.array_equal(world.paint(32)["base"], before)
