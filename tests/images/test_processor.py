"""Image processors against transformers' processors on Pillow, whose results they equal."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from maxjax.errors import CheckpointFormatError, UserInputError
from maxjax.images import ImageProcessor, decode
from tests.images.oracle import digest, transformers_inputs
from tests.images.pictures import PICTURES, encoded, hopper, photograph
from tests.oracles.recorded import recorded

ROOT = Path(__file__).resolve().parents[2]


def assert_equal_pixels(name, settings, images):
    """One by one: without padding, pictures of different sizes are no batch."""
    processor = ImageProcessor.of({"image_processor_type": name, **settings})
    expected = recorded(
        lambda: [digest(transformers_inputs(name, settings, [i])["pixel_values"]) for i in images]
    )
    for image, pixels in zip(images, expected, strict=True):
        found = processor(image)
        assert digest(found.pixels) == pixels
        assert found.sizes.tolist() == [list(image.shape[:2])] and found.tiles.tolist() == [1]


SMALL = {
    "CLIP": {"size": {"shortest_edge": 28}, "crop_size": {"height": 20, "width": 24}},
    "Bit": {"size": {"shortest_edge": 33}, "crop_size": 28},
    "Siglip": {"size": {"height": 24, "width": 20}},
    "ViT": {"size": 28},
    "DeiT": {"size": {"height": 40, "width": 40}, "crop_size": {"height": 28, "width": 28}},
}
IMAGES = [PICTURES[name] for name in ("portrait", "landscape", "page", "dot")]


@pytest.mark.parametrize("name", SMALL)
def test_simple_kinds_equal_transformers(name):
    assert_equal_pixels(f"{name}ImageProcessor", SMALL[name], IMAGES)


@pytest.mark.parametrize("resample", range(6))
def test_every_filter_equals_transformers(resample):
    settings = {"size": {"height": 21, "width": 30}, "resample": resample}
    assert_equal_pixels("ViTImageProcessor", settings, IMAGES[:2])


STEPS = {
    "longest edge": {"size": {"shortest_edge": 30, "longest_edge": 40}, "do_center_crop": False},
    "edge as it is": {"size": {"shortest_edge": 61, "longest_edge": 300}, "do_center_crop": False},
    "largest sides": {"size": {"max_height": 26, "max_width": 31}, "do_center_crop": False},
    "crop beyond": {"do_resize": False, "crop_size": {"height": 101, "width": 70}},
    "no resize": {"do_resize": False, "do_center_crop": False},
    "not normalized": {"size": {"shortest_edge": 20}, "crop_size": 20, "do_normalize": False},
    "factor": {"size": {"shortest_edge": 20}, "crop_size": 20, "rescale_factor": 1 / 127.5},
    "one mean": {"size": {"shortest_edge": 20}, "crop_size": 20, "image_mean": [0.5, 0.4, 0.1]},
    "padded": {"do_resize": False, "do_center_crop": False, "do_pad": True, "pad_size": {"height": 120, "width": 115}},
}  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
def test_every_step_equals_transformers(step):
    assert_equal_pixels("CLIPImageProcessor", STEPS[step], IMAGES[:2])


def test_pictures_of_several_sizes_are_padded_to_the_largest():
    settings = {"size": {"shortest_edge": 20}, "do_center_crop": False, "do_pad": True}
    images = IMAGES[:3]
    expected = recorded(
        lambda: digest(transformers_inputs("CLIPImageProcessor", settings, images)["pixel_values"])
    )
    processor = ImageProcessor.of({"image_processor_type": "CLIPImageProcessor", **settings})
    found = processor(images)
    assert digest(found.pixels) == expected
    assert found.sizes.tolist() == [list(image.shape[:2]) for image in images]
    assert found.tiles.tolist() == [1, 1, 1]


@pytest.mark.oracle
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("size", [None, {"height": 384, "width": 384}, {"shortest_edge": 336}])
def test_published_sizes_equal_transformers(name, size):
    settings = {} if size is None else {"size": size}
    images = [*PICTURES.values(), decode(hopper())]
    assert_equal_pixels(f"{name}ImageProcessor", settings, images)


# --- DINOv3, which transformers has on torchvision alone ----------------------------------


def test_dinov3_resizes_in_floats():
    """As torch.nn.functional.interpolate does it, which torchvision calls."""
    settings = {
        "image_processor_type": "DINOv3ViTImageProcessorFast",
        "size": {"height": 24, "width": 32},
    }
    found = ImageProcessor.of(settings)(PICTURES["landscape"]).pixels[0]
    mean, deviation = (
        np.array(v).reshape(3, 1, 1) for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    )
    pixels = PICTURES["landscape"].transpose(2, 0, 1).astype(np.float64) / 255
    down, across = _triangle(pixels.shape[1], 24), _triangle(pixels.shape[2], 32)
    expected = (np.einsum("ih,chw,jw->cij", down, pixels, across) - mean) / deviation
    np.testing.assert_allclose(found, expected, atol=2e-6)


def _triangle(size, new):
    """The matrix of a bilinear filter that is widened to the step between new pixels."""
    step = size / new
    centers = (np.arange(new)[:, None] + 0.5) * step - 0.5
    weights = np.maximum(0, 1 - np.abs(np.arange(size)[None, :] - centers) / max(step, 1))
    return weights / weights.sum(axis=1, keepdims=True)


# --- files --------------------------------------------------------------------------------


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_old_and_new_spellings_are_the_same(tmp_path):
    old = {"feature_extractor_type": "CLIPFeatureExtractor", "size": 30, "crop_size": 28}
    new = {
        "image_processor_type": "CLIPImageProcessorFast", "processor_class": "CLIPProcessor",
        "size": {"shortest_edge": 30, "longest_edge": None, "height": None, "width": None},
        "crop_size": {"height": 28, "width": 28, "shortest_edge": None}, "do_convert_rgb": True,
        "data_format": "channels_first", "device": None, "disable_grouping": None, "pad_size": None,
        "default_to_square": False, "return_tensors": None, "do_pad": None, "do_flip_channel_order": False,
        "_valid_processor_keys": ["images", "size"], "use_fast": True,
    }  # fmt: skip
    first = ImageProcessor.of(old)
    assert first.kind == "clip" and first.settings == ImageProcessor.of(new).settings
    nested = write(tmp_path, processor_config={"image_processor": new}, preprocessor_config=old)
    found = ImageProcessor.in_folder(nested)
    assert found is not None and found.to_dict() == new


def test_a_file_without_a_class_has_that_of_the_model(tmp_path):
    settings = {"do_resize": True, "size": 224}
    write(tmp_path, preprocessor_config=settings, config={"model_type": "vit"})
    found = ImageProcessor.in_folder(tmp_path)
    assert found is not None and found.kind == "vit" and found.to_dict() == settings


@pytest.mark.parametrize("is_nested", [False, True])
def test_its_files_make_the_same_processor(is_nested, tmp_path):
    settings = {"image_processor_type": "Gemma3ImageProcessor", "size": 28, "do_pan_and_scan": None}
    outer = {"processor_class": "Gemma3Processor", "image_seq_length": 3}
    files: dict = {"processor_config.json": outer}
    if is_nested:
        outer["image_processor"] = settings
    else:
        files["preprocessor_config.json"] = settings
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    first = ImageProcessor.in_folder(tmp_path)
    assert first is not None
    assert {name: json.loads(text) for name, text in first.files().items()} == files
    again = tmp_path / "again"
    again.mkdir()
    for name, text in first.files().items():
        (again / name).write_text(text)
    second = ImageProcessor.in_folder(again)
    assert second is not None and second.settings == first.settings
    assert second(IMAGES[0]).counts.tolist() == first(IMAGES[0]).counts.tolist() == [3]


def test_a_folder_without_settings_has_no_processor(tmp_path):
    assert ImageProcessor.in_folder(tmp_path) is None
    write(
        tmp_path, processor_config={"processor_class": "LlavaProcessor", "image_token": "<image>"}
    )
    assert ImageProcessor.in_folder(tmp_path) is None


def test_what_was_read_cannot_be_changed_through_its_copy():
    processor = ImageProcessor.of(
        {"image_processor_type": "ViTImageProcessor", "image_mean": [0, 0, 0]}
    )
    processor.to_dict()["image_mean"].clear()
    assert processor.to_dict()["image_mean"] == [0, 0, 0]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "image_processor_type"),
        ({"image_processor_type": "SamImageProcessor"}, "'SamImageProcessor' is not supported"),
        ({"do_flip_channel_order": True}, "do_flip_channel_order"),
        ({"do_thumbnail": 5}, "do_thumbnail"),
        ({"data_format": "channels_last"}, "data_format"),
        ({"do_resize": "yes"}, "do_resize"),
        ({"size": {"height": 3}}, "size"),
        ({"size": {"height": 3, "width": 0}}, "size"),
        ({"size": 2**40}, "size"),
        ({"size": [3, 4, 5]}, "size"),
        ({"resample": 6}, "resample"),
        ({"image_mean": [0.5, 0.5]}, "image_mean"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std"),
        ({"rescale_factor": "1/255"}, "rescale_factor"),
        ({"crop_size": "large"}, "crop_size"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_key(settings, says):
    name = (
        {}
        if not settings or "image_processor_type" in settings
        else {"image_processor_type": "CLIPImageProcessor"}
    )
    with pytest.raises(UserInputError, match=says):
        ImageProcessor.of({**name, **settings})


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text("[1]")
    with pytest.raises(CheckpointFormatError, match=r"preprocessor_config\.json"):
        ImageProcessor.in_folder(tmp_path)


def test_pictures_that_do_not_fit_together_are_refused():
    settings = {"image_processor_type": "ViTImageProcessor", "do_resize": False}
    with pytest.raises(UserInputError, match="different sizes"):
        ImageProcessor.of(settings)(IMAGES[:2])
    pads = {**settings, "do_pad": True, "pad_size": {"height": 50, "width": 500}}
    with pytest.raises(UserInputError, match="pad_size"):
        ImageProcessor.of(pads)(IMAGES[:1])
    with pytest.raises(UserInputError, match="at least one"):
        ImageProcessor.of(settings)([])


def test_settings_that_make_a_huge_picture_are_refused():
    processor = ImageProcessor.of({"image_processor_type": "ViTImageProcessor", "size": 1_000_000})
    with pytest.raises(UserInputError, match="image_pixels=N"):
        processor(IMAGES[0])


# --- memory -------------------------------------------------------------------------------

PEAK = """
import sys, re
from pathlib import Path
import numpy as np
from maxjax.images import ImageProcessor
processor = ImageProcessor.of({"image_processor_type": sys.argv[1]})
processor(np.zeros((9, 9, 3), np.uint8))
def kilobytes(key):
    return int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
processor(sys.argv[3])
Path("/proc/self/clear_refs").write_text("5")
before = kilobytes("VmRSS")
processor(sys.argv[2])
print((kilobytes("VmHWM") - before) * 1024)
"""


@pytest.mark.extra
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="reads Linux's figures")
@pytest.mark.parametrize("format", ["JPEG", "PNG"])
@pytest.mark.parametrize("kind", ["CLIPImageProcessor", "DINOv3ViTImageProcessor"])
def test_a_large_photograph_takes_little_more_than_its_pixels(kind, format, tmp_path):
    height, width = 4000, 6000
    for name, picture in (("large", photograph(height, width)), ("small", photograph(99, 99))):
        (tmp_path / name).write_bytes(encoded(picture, format))
    files = [str(tmp_path / name) for name in ("large", "small")]
    done = subprocess.run(
        [sys.executable, "-c", PEAK, kind, *files], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2.2 * height * width * 3
