"""``maxjax convert``: writes a checkpoint in another format, dtype or number of files.

A progress bar is shown on stderr if that is a terminal.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable

from .options import float_type, quantization, size


def convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument(
        "source", metavar="SRC", help="a file, a directory, an index, org/name on the hub, or tiny"
    )
    parser.add_argument(
        "destination", metavar="DST", help="a .safetensors or .gguf file, or a directory"
    )
    parser.add_argument("--to", choices=["safetensors", "gguf", "orbax"],
                        help="format (default: by the suffix of DST, or safetensors)")  # fmt: skip
    parser.add_argument(
        "--dtype", type=float_type, metavar="TYPE", help="convert floats: bf16, f16, f32, …"
    )
    parser.add_argument("--quantize", type=quantization, metavar="TYPE",
                        help="GGUF: quantise linear layers and embedding tables: q8_0, q4_0, q4_k, …, "
                        "or one of llama.cpp's mixtures: q4_k_m, q5_k_m, q3_k_m, …")  # fmt: skip
    parser.add_argument("--importance", metavar="FILE",
                        help="with --quantize: an importance matrix (llama-imatrix, maxjax.calibrate)")  # fmt: skip
    parser.add_argument("--max-shard-size", type=size, default="5GB", metavar="SIZE",
                        help="maximum size of a safetensors file (default 5GB)")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true",
                        help="replace DST; SRC itself only if no precision is lost")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON document")


def convert(options: argparse.Namespace) -> Iterable[str]:
    """Converts SRC to DST, piece by piece. An existing DST stays until the new one is complete."""
    ending = os.path.splitext(options.destination)[1].lower()
    if options.quantize and (options.to or ending.removeprefix(".")) != "gguf":
        options.error("--quantize is for GGUF files: name one, such as model.gguf")
    if options.importance and not options.quantize:
        options.error("--importance is for --quantize: say what to quantise to")
    from ..checkpoint.conversion.run import convert as convert_checkpoint

    found = convert_checkpoint(
        options.source,
        options.destination,
        to=options.to,
        dtype=options.dtype,
        quantize=options.quantize,
        importance=options.importance,
        max_shard_size=options.max_shard_size,
        overwrite=options.overwrite,
    )
    if options.json:
        document = {"path": str(found.path), "format": found.format, "tensors": found.tensors,
                    "bytes": found.nbytes, "packed": found.packed}  # fmt: skip
        return [json.dumps(document, indent=1)]
    packed = ""
    if found.packed and found.format == "safetensors":
        packed = (f"; {found.packed} of them stay quantised blocks, which only maxjax opens "
                  "in safetensors (--dtype bf16 dequantises them)")  # fmt: skip
    return [
        f"wrote {found.path}: {found.format}, {found.tensors:,} tensors, {found.nbytes:,} bytes{packed}"
    ]
