"""Records what transformers' image processors on torchvision give: `PYTHON scripts/torchvision_peers.py`.

torchvision needs a version of torch of its own, so PYTHON is that of an environment of its own:

    python -m venv peers
    peers/bin/pip install -e . torch==2.14.1 torchvision==0.29.1 transformers==5.24.0 pillow matplotlib

For each of the cases of tests/images/test_torchvision.py it writes the levels of the resized pictures, before they
are normalized, into tests/images/torchvision.npz, and prints how far maxjax is from them.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from maxjax.images import ImageProcessor  # noqa: E402
from tests.images.oracle import MODULES  # noqa: E402
from tests.images.test_torchvision import CASES, FILE, levels, picture, processor  # noqa: E402


def theirs(stem: str, settings: dict, pixels: np.ndarray) -> np.ndarray:
    """The pixels that transformers' processor on torchvision gives for a picture."""
    import torch

    name = MODULES.get(stem, "dinov3_vit" if stem == "DINOv3ViT" else stem.lower())
    file = importlib.import_module(f"transformers.models.{name}.image_processing_{name}")
    made = getattr(file, f"{stem}ImageProcessor")(**settings)
    found = made(torch.from_numpy(pixels.transpose(2, 0, 1).copy()), return_tensors="np")
    found = np.asarray(found["pixel_values"])
    return found[0] if found.ndim == 5 else found


def main() -> None:
    """Write the file."""
    kept = {}
    for case, (stem, settings) in CASES.items():
        made: ImageProcessor = processor(case)
        for name in ("photograph", "page"):
            pixels = picture(name)
            found = levels(theirs(stem, settings, pixels), made)
            ours = levels(made(pixels).pixels, made)
            apart = np.abs(found - ours)
            print(
                f"{case:16} {name:12} {list(found.shape)} at most {apart.max():.2f} levels apart, "
                f"mean {apart.mean():.3f}"
            )
            kept[f"{case}/{name}"] = (
                found.astype(np.float16) if stem == "DINOv3ViT" else np.rint(found).astype(np.uint8)
            )
    np.savez_compressed(FILE, **kept)
    print(FILE.relative_to(ROOT), FILE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
