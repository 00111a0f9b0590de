"""Image processors of transformers that run on Pillow alone, and digests of what they give."""

import hashlib
import importlib

import numpy as np
from PIL import Image

# Of the classes whose files have other names than the class.
MODULES = {"LlavaNext": "llava_next", "LlavaOnevision": "llava_onevision", "Qwen2VL": "qwen2_vl"}


def digest(array):
    """The dtype, shape and bits of an array, which are small to keep."""
    found = np.ascontiguousarray(array)
    return f"{found.dtype}{list(found.shape)} {hashlib.sha256(found.tobytes()).hexdigest()}"


def transformers_inputs(name, settings, images, **options):
    """What transformers' processor on Pillow gives for pictures: a dict of arrays."""
    stem = name.removesuffix("ImageProcessor")
    module = MODULES.get(stem, stem.lower())
    path = f"transformers.models.{module}.image_processing_pil_{module}"
    processor = getattr(importlib.import_module(path), f"{name}Pil")(**settings)
    found = processor([Image.fromarray(image) for image in images], return_tensors="np", **options)
    return {key: np.asarray(value) for key, value in found.items()}
