"""The tiles of vision-language models against transformers' processors on Pillow, whose results they equal."""

import numpy as np
import pytest

from maxjax.errors import UserInputError
from maxjax.images import ImageProcessor, decode
from maxjax.images.kinds import pan_and_scan, qwen2_vl_size
from maxjax.images.settings import ImageSettings
from tests.images.oracle import digest, transformers_inputs
from tests.images.pictures import PICTURES, hopper, photograph
from tests.oracles.recorded import recorded

# What processor_config.json must have where the counts of tokens need it.
OUTER = {"patch_size": 16, "num_image_tokens": 9}
IMAGES = [
    *(PICTURES[name] for name in ("portrait", "landscape", "page", "dot")),
    photograph(25, 150, 4),
]
SCAN = {
    "do_pan_and_scan": True,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
GRID = [[48 * rows, 48 * columns] for rows in range(1, 4) for columns in range(1, 4)]

CASES = {
    "gemma3": ("Gemma3", {"size": {"height": 28, "width": 28}}),
    "gemma3 scanned": ("Gemma3", {"size": {"height": 28, "width": 28}, **SCAN, "pan_and_scan_min_crop_size": 20}),
    "llava": ("Llava", {"size": {"shortest_edge": 30}, "crop_size": {"height": 28, "width": 28}}),
    "llava padded": ("Llava", {"do_pad": True, "size": {"shortest_edge": 30}, "crop_size": 30}),
    "llava_next": ("LlavaNext", {
        "size": {"shortest_edge": 48}, "crop_size": {"height": 48, "width": 48},
        "image_grid_pinpoints": [[48, 96], [96, 48], [96, 96], [144, 48], [48, 144]]}),
    "llava_onevision": ("LlavaOnevision", {"size": {"height": 48, "width": 48}, "image_grid_pinpoints": GRID}),
    "idefics3": ("Idefics3", {"size": {"longest_edge": 120}, "max_image_size": {"longest_edge": 30}}),
    "idefics3 whole": ("Idefics3", {"do_image_splitting": False, "max_image_size": {"longest_edge": 30}}),
    "idefics3 as it is": ("Idefics3", {"do_resize": False, "max_image_size": {"longest_edge": 64}}),
    "smolvlm": ("SmolVLM", {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}}),
    "pixtral": ("Pixtral", {"size": {"longest_edge": 100}, "patch_size": {"height": 14, "width": 14}}),
    "qwen2_vl": ("Qwen2VL", {"min_pixels": 28 * 28 * 4, "max_pixels": 28 * 28 * 12}),
    "qwen3_vl": ("Qwen2VL", {
        "patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 16384}, "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3}),
}  # fmt: skip
NESTED = ("LlavaNext", "LlavaOnevision", "Idefics3", "SmolVLM")


def expected_inputs(stem, settings, images):
    """Of each picture the digest of its pixels, its size or grid as the model gets it, and its number of tiles."""
    found = []
    for image in images:
        inputs = transformers_inputs(f"{stem}ImageProcessor", settings, [image])
        pixels = inputs["pixel_values"][0] if stem in NESTED else inputs["pixel_values"]
        sizes, grids = inputs.get("image_sizes"), inputs.get("image_grid_thw")
        found.append(
            {
                "pixels": digest(pixels),
                "size": None if sizes is None else sizes[0].tolist(),
                "grid": None if grids is None else grids[0].tolist(),
                "tiles": len(pixels),
            }
        )
    return found


def assert_equal_tiles(stem, settings, images):
    processor = ImageProcessor.of(
        {"image_processor_type": f"{stem}ImageProcessor", **settings},
        OUTER if "Llava" in stem else {},
    )
    expected = recorded(lambda: expected_inputs(stem, settings, images))
    for image, one in zip(images, expected, strict=True):
        found = processor(image)
        assert digest(found.pixels) == one["pixels"], image.shape
        assert found.tiles.tolist() == [one["tiles"]]
        assert found.sizes.tolist() == [one["size"] or list(image.shape[:2])]
        assert found.grids.tolist() == [one["grid"] or [0, 0, 0]]


@pytest.mark.parametrize("case", CASES)
def test_tiles_equal_transformers(case):
    assert_equal_tiles(*CASES[case], IMAGES)


PUBLISHED = {
    "gemma3": ("Gemma3", {"size": {"height": 896, "width": 896}, **SCAN, "pan_and_scan_min_crop_size": 256}),
    "llava_next": ("LlavaNext", {"size": {"shortest_edge": 336}, "crop_size": 336}),
    "llava_onevision": ("LlavaOnevision", {}),
    "smolvlm": ("SmolVLM", {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}),
    "mistral3": ("Pixtral", {"size": {"longest_edge": 1540}, "patch_size": 14}),
    "qwen2_vl": ("Qwen2VL", {"min_pixels": 3136, "max_pixels": 12_845_056}),
}  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize("case", PUBLISHED)
def test_published_settings_equal_transformers(case):
    stem, settings = PUBLISHED[case]
    images = [*PICTURES.values(), decode(hopper()), photograph(777, 1234)]
    if stem == "Qwen2VL":
        images = [image for image in images if max(image.shape) <= 200 * min(image.shape[:2])]
    assert_equal_tiles(stem, settings, images)


def test_several_pictures_follow_each_other():
    """Tiles of all pictures in one array, and patches of all pictures one after another."""
    for case in ("idefics3", "qwen2_vl"):
        stem, settings = CASES[case]
        processor = ImageProcessor.of({"image_processor_type": f"{stem}ImageProcessor", **settings})
        together, alone = processor(IMAGES[:3]), [processor(image) for image in IMAGES[:3]]
        for name in ("pixels", "sizes", "tiles", "layouts", "grids", "counts"):
            parts = [getattr(one, name) for one in alone]
            np.testing.assert_array_equal(getattr(together, name), np.concatenate(parts))


def test_pixtral_pads_pictures_of_several_sizes():
    stem, settings = CASES["pixtral"]
    images = IMAGES[:3]
    processor = ImageProcessor.of({"image_processor_type": f"{stem}ImageProcessor", **settings})
    found = processor(images)
    expected = recorded(lambda: [
        digest(value) for value in transformers_inputs(f"{stem}ImageProcessor", settings, images).values()
    ])  # fmt: skip
    assert [digest(found.pixels), digest(found.sizes)] == expected


def test_onevision_makes_one_tile_of_each_of_several_pictures():
    stem, settings = CASES["llava_onevision"]
    processor = ImageProcessor.of(
        {"image_processor_type": f"{stem}ImageProcessor", **settings}, OUTER
    )
    images = IMAGES[:2]
    found = processor(images)

    def nested():
        from transformers.models.llava_onevision import image_processing_pil_llava_onevision as file

        made = file.LlavaOnevisionImageProcessorPil(**settings)
        pixels = made([[image.transpose(2, 0, 1) for image in images]], return_tensors="np")[
            "pixel_values"
        ]
        return digest(pixels[:, 0])

    assert digest(found.pixels) == recorded(nested)
    assert found.tiles.tolist() == [1, 1] and found.counts.tolist() == [10, 10]
    np.testing.assert_array_equal(processor(images[0], of=2).pixels, found.pixels[:1])
    assert processor(images[0]).tiles.tolist() != [1]


@pytest.mark.parametrize(
    ("height", "width", "layout"),
    [
        (100, 119, (0, 0)),
        (100, 130, (1, 2)),
        (100, 1000, (1, 4)),
        (130, 100, (2, 1)),
        (30, 300, (0, 0)),
    ],
)
def test_long_pictures_are_scanned(height, width, layout):
    settings = ImageSettings(do_pan_and_scan=True, pan_and_scan_min_crop_size=50)
    assert pan_and_scan(height, width, settings) == layout


def test_sizes_of_qwen_stay_within_the_bounds():
    rng = np.random.default_rng(0)
    settings = ImageSettings(size={"shortest_edge": 3136, "longest_edge": 100_352}, patch_size=14)
    for height, width in rng.integers(20, 2000, (200, 2)).tolist():
        new = qwen2_vl_size(height, width, settings)
        assert new[0] % 28 == new[1] % 28 == 0 and 3136 <= new[0] * new[1] <= 100_352
    with pytest.raises(UserInputError, match="200 times"):
        qwen2_vl_size(30, 9000, settings)


@pytest.mark.parametrize(
    ("stem", "settings", "says"),
    [
        ("Qwen2VL", {"size": {"height": 28, "width": 28}}, "shortest_edge"),
        ("Qwen2VL", {"do_resize": False}, "28 divides"),
        ("Qwen2VL", {"do_center_crop": True}, "do_center_crop"),
        ("Pixtral", {"size": {"shortest_edge": 28}}, "longest_edge"),
        ("Pixtral", {"patch_size": {"height": 14, "width": 16}}, "patch_size"),
        ("Idefics3", {"size": {"shortest_edge": 28}}, "longest_edge"),
        ("Idefics3", {"max_image_size": 364}, "max_image_size"),
        ("LlavaNext", {"image_grid_pinpoints": [[336]]}, "image_grid_pinpoints"),
        ("LlavaNext", {"image_grid_pinpoints": []}, "image_grid_pinpoints"),
        ("ViT", {"size": {"longest_edge": 28}}, "longest_edge"),
        ("Gemma3", {"do_center_crop": True}, "do_center_crop"),
    ],
)
def test_settings_that_a_kind_does_not_have_are_refused(stem, settings, says):
    with pytest.raises(UserInputError, match=says):
        ImageProcessor.of({"image_processor_type": f"{stem}ImageProcessor", **settings}, OUTER)(
            IMAGES[0]
        )
