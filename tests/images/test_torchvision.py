"""Image processors against transformers' processors on torchvision, as scripts/torchvision_peers.py recorded them.

torchvision resizes the other side first, and rounds in between: these pictures differ by at most one of the 256
levels. (Noise differs by up to 12 after a bicubic filter, which overshoots.) DINOv3's are not rounded.
"""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from maxjax.images import ImageProcessor, decode
from tests.images.pictures import hopper, page

FILE = Path(__file__).with_name("torchvision.npz")
SIZE = {"height": 48, "width": 40}
CASES = {
    "clip": ("CLIP", {"size": {"shortest_edge": 48}, "crop_size": {"height": 40, "width": 40}}),
    "bit": ("Bit", {"size": {"shortest_edge": 50}, "crop_size": {"height": 42, "width": 42}}),
    "siglip": ("Siglip", {"size": SIZE}),
    "vit": ("ViT", {"size": SIZE}),
    "deit": ("DeiT", {"size": {"height": 50, "width": 50}, "crop_size": {"height": 44, "width": 44}}),
    "dinov3_vit": ("DINOv3ViT", {"size": SIZE}),
    "gemma3": ("Gemma3", {"size": SIZE}),
    "llava": ("Llava", {"size": {"shortest_edge": 44}, "crop_size": {"height": 44, "width": 44}}),
    "llava_next": ("LlavaNext", {
        "size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32},
        "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]}),
    "llava_onevision": ("LlavaOnevision", {
        "size": {"height": 32, "width": 32}, "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]}),
    "idefics3": ("Idefics3", {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}}),
    "pixtral": ("Pixtral", {"size": {"longest_edge": 64}, "patch_size": {"height": 16, "width": 16}}),
    "qwen2_vl": ("Qwen2VL", {"size": {"shortest_edge": 784, "longest_edge": 784 * 4}}),
}  # fmt: skip


@cache
def picture(name):
    return decode(hopper()) if name == "photograph" else page()


def processor(case):
    stem, settings = CASES[case]
    outer = {"patch_size": 16, "num_image_tokens": 4} if "Llava" in stem else {}
    return ImageProcessor.of({"image_processor_type": f"{stem}ImageProcessor", **settings}, outer)


def levels(pixels, made):
    """The levels from 0 to 255 of normalized pixels."""
    shape = (3, 1, 1)
    if made.kind == "qwen2_vl":  # the values of a patch: colours, then the rest
        pixels, shape = pixels.reshape(len(pixels), 3, -1), (3, 1)
    mean, deviation = (
        np.array(v).reshape(shape) for v in (made.settings.image_mean, made.settings.image_std)
    )
    return (pixels.astype(np.float64) * deviation + mean) / made.settings.rescale_factor


@pytest.mark.parametrize("name", ["photograph", "page"])
@pytest.mark.parametrize("case", CASES)
def test_resized_pictures_are_within_one_level_of_torchvision(case, name):
    made = processor(case)
    with np.load(FILE) as kept:
        expected = kept[f"{case}/{name}"].astype(np.float64)
    found = levels(made(picture(name)).pixels, made)
    assert found.shape == expected.shape
    # What is kept of DINOv3 is in float16.
    np.testing.assert_allclose(
        found, expected, rtol=0, atol=0.1 if made.kind == "dinov3_vit" else 1.001
    )
