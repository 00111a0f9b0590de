"""What quantising costs: the perplexity of a model for every encoding that its weights can be stored in.

    python scripts/bench_perplexity.py [--quick]                      # the tiny model
    python scripts/bench_perplexity.py --model DIR --text FILE        # another one

Each matrix whose rows are complete blocks is quantised and dequantised, and the model computes in
float32, so that the figures show the encodings alone and no kernel. The text for the tiny model is 200
stories of the kind it was trained on, drawn from another seed. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for scripts.tiny_text

import maxjax
from maxjax.dtype import DType
from maxjax.storage.blocks import ENCODERS, LAYOUTS, decode, encode
from scripts.tiny_text import stories

FLOATS = {"F32": DType.float32, "BF16": DType.bfloat16, "F16": DType.float16}


def rounded(name: str, values: np.ndarray) -> np.ndarray | None:
    """Float32 values quantised and dequantised; None if blocks of the encoding do not divide the rows."""
    if name in FLOATS:
        return values.astype(FLOATS[name].np).astype(np.float32)
    if values.shape[-1] % LAYOUTS[name].elements:
        return None
    return decode(name, encode(name, values))


def bits(name: str) -> float:
    """Bits per weight in an encoding."""
    if name in FLOATS:
        return FLOATS[name].np.itemsize * 8
    return LAYOUTS[name].nbytes * 8 / LAYOUTS[name].elements


def rows(model: Any, tokenizer: Any, text: str, names: list[str], **options: int) -> Iterator[Any]:
    """A row of the table for each encoding that all matrices of the model can be stored in."""
    values = {name: np.asarray(weight) for name, weight in model.state_dict().items()}
    matrices = {name: array for name, array in values.items() if array.ndim > 1}
    first = None
    for name in names:
        changed = {key: rounded(name, array) for key, array in matrices.items()}
        if any(array is None for array in changed.values()):
            print(f"{name} does not divide the rows of the model", file=sys.stderr)
            continue
        model.load_state_dict(values | changed)
        found = maxjax.perplexity(model, tokenizer, text, **options)
        first = first or found.perplexity
        yield [
            name, f"{bits(name):.4g}", f"{found.perplexity:.4f}",
            f"{found.perplexity / first - 1:+.2%}", f"{found.bits_per_byte:.4f}",
        ]  # fmt: skip


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--text", type=Path, help="a file; by default stories of the tiny model")
    parser.add_argument("--context", type=int)
    parser.add_argument("--stride", type=int)
    parser.add_argument("--quick", action="store_true", help="few types and little text")
    options = parser.parse_args()
    names = ["F32", "Q4_0"] if options.quick else [*FLOATS, *sorted(ENCODERS, key=bits)[::-1]]
    text = options.text.read_text() if options.text else stories(0, 10 if options.quick else 200)
    model, tokenizer = maxjax.load(options.model, dtype="float32")
    sizes = {"context": options.context, "stride": options.stride}
    print("| type | bits per weight | perplexity | change | bits per byte |")
    print("|---|---|---|---|---|")
    for row in rows(model, tokenizer, text, names, **sizes):
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
