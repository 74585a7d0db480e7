"""Images of any size, which the small model reads at whole cells by one rule."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from ragen_pl.models.build import build_small_vlm


@pytest.fixture(scope="module")
def bundle():
    return build_small_vlm(seed=3)


OWN_SIZES = {  # height and width, with those that are read
    (24, 48): (32, 48),
    (84, 84): (80, 80),
    (160, 210): (96, 128),
    (400, 600): (80, 128),
    (8, 8): (16, 16),
    (1, 1000): (16, 128),
    (1000, 1): (128, 16),
    (130, 127): (128, 128),
    (72, 40): (80, 48),  # a half is rounded up
}


@pytest.mark.parametrize(("size", "read"), OWN_SIZES.items())
def test_images_of_any_size_are_read_at_whole_cells(bundle, size, read):
    image = np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8)
    pixels = bundle.processor.image_processor([image, image])["pixel_values"]
    assert pixels.shape == (2, 3, *read) and torch.equal(pixels[0], pixels[1])
    cells = read[0] * read[1] // 16**2
    features = bundle.images.encode([image])
    assert features.counts == (cells,) and bundle.num_image_tokens(image) == cells


def test_a_scaled_image_shows_the_same_and_a_size_of_whole_cells_is_kept(bundle):
    halves = np.zeros((84, 84, 3), dtype=np.uint8)
    halves[:, 42:] = (200, 100, 50)
    (pixels,) = bundle.processor.image_processor([halves])["pixel_values"]
    assert pixels[:, :, :36].eq(0).all() and pixels[1, :, 44:].eq(100).all()
    for side in range(16, 129, 16):
        image = np.random.default_rng(side).integers(0, 256, (side, 48, 3), dtype=np.uint8)
        (pixels,) = bundle.processor.image_processor([image])["pixel_values"]
        assert np.array_equal(pixels.permute(1, 2, 0), image)


def test_images_of_changing_sizes_are_encoded_in_their_order(bundle):
    rng = np.random.default_rng(2)
    images = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in [*OWN_SIZES] * 2]
    features = bundle.images.encode(images)
    for image, own in zip(images, features.split(), strict=True):
        torch.testing.assert_close(own.tokens, bundle.images.encode([image]).tokens)


def test_the_limit_of_sizes_is_that_of_the_model_and_is_saved(tmp_path):
    small = build_small_vlm(vision={"patch_size": 8, "max_cells": 20, "width": 32})
    image = np.zeros((400, 100, 3), dtype=np.uint8)
    assert small.num_image_tokens(image) == 20 * 5
    small.save(tmp_path)
    processor = AutoProcessor.from_pretrained(tmp_path).image_processor
    assert processor([image])["pixel_values"].shape == (1, 3, 160, 40)


def test_gray_images_have_three_equal_channels(bundle):
    gray = Image.fromarray(np.arange(2000, dtype=np.uint8).reshape(40, 50))
    (pixels,) = bundle.processor.image_processor(gray)["pixel_values"]
    assert pixels.shape == (3, 48, 48) and torch.equal(pixels[0], pixels[2])


def test_images_without_pixels_are_refused(bundle):
    with pytest.raises(ValueError, match=r"\(0, 16, 3\).*expected one shape"):
        bundle.processor.image_processor([np.zeros((0, 16, 3), dtype=np.uint8)])
