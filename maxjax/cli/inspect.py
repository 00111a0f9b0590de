"""``maxjax inspect`` lists the content of a checkpoint, ``maxjax verify`` checks that it is intact."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

from ..columns import Table
from ..rendering.row import short
from .terminal import warn

# Lists of metadata with more items are counted by `inspect`, not shown.
_SHOWN_ITEMS = 16


def inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        nargs="+",
        help="a file, a directory, an index, the parts of a checkpoint, or tiny",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document")


def inspect(options: argparse.Namespace) -> Iterable[str | Table]:
    """Lists every tensor: name, dtype, shape, bytes, file; and the totals of each dtype."""
    from ..storage.hub import checkpoint_path
    from ..storage.open import open_checkpoint

    found = [checkpoint_path(path) for path in options.path]
    paths = found if len(found) > 1 else found[0]
    table = open_checkpoint(paths, verify=False)  # headers only
    try:
        files = [{"path": os.fspath(file.path), "bytes": file.size} for file in table.files]
        tensors = [
            {
                "name": entry.name,
                "dtype": entry.encoding or entry.dtype.name,
                "shape": _logical(entry),
                "bytes": entry.nbytes,
                "file": files[entry.file]["path"],
            }
            for entry in table.entries.values()
        ]
        document = {
            "format": table.format,
            "metadata": {key: _plain(value) for key, value in table.metadata.items()},
            "files": files,
            "tensors": tensors,
            "totals": _totals(tensors),
        }
    finally:
        table.close()
    return [json.dumps(document, indent=1)] if options.json else _inspect_table(document)


def _logical(entry: Any) -> list[int]:
    """The shape of a tensor in elements, also if it is quantised."""
    if entry.encoding is None:
        return list(entry.shape)
    from ..graph.quantization import QuantizationEncoding

    return list(QuantizationEncoding(entry.encoding).logical_shape(entry.shape))


def _plain(value: Any) -> Any:
    """A value of metadata for JSON; a long list, such as a vocabulary, is counted, not shown."""
    if hasattr(value, "tolist"):
        if value.size > _SHOWN_ITEMS:  # counted as it lies: it may have millions of numbers
            return {"items": value.size, "first": value[:3].tolist()}
        return value.tolist()
    if not isinstance(value, list):
        return value
    if len(value) > _SHOWN_ITEMS:
        return {"items": len(value), "first": [_plain(item) for item in value[:3]]}
    return [_plain(item) for item in value]


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['items']:,} items: {', '.join(map(str, value['first']))[:40]} …"
    return short(value)


verify_arguments = inspect_arguments


def verify(options: argparse.Namespace) -> Iterable[str]:
    """Reads every tensor and checks all checksums; the exit code is 1 if one is wrong.

    The structure is checked in every format. Checksums come from PyTorch's and NumPy's archives,
    from the maxjax_digests.json that maxjax writes, and from the file names of Hugging Face's
    cache. The headers of safetensors files are also read by the safetensors library. Of an orbax
    checkpoint all trees are read, such as the state of an optimizer.
    """
    from dataclasses import asdict

    from ..storage.hub import checkpoint_path
    from ..storage.open import open_checkpoint, orbax_checkpoint
    from ..storage.orbax.paths import orbax_items
    from ..storage.verify import Verified, second_reading
    from ..storage.verify import verify as verify_table

    given = [checkpoint_path(path) for path in options.path]
    paths = given if len(given) > 1 else given[0]
    is_orbax = isinstance(paths, str) and orbax_checkpoint(paths) is not None
    format, counts, others = "", [], None
    for path in orbax_items(given[0]).values() if is_orbax else [paths]:
        with open_checkpoint(path) as table:
            format = table.format
            counts.append(asdict(verify_table(table)).values())
            others = second_reading(table) if format == "safetensors" else None
    found = Verified(*map(sum, zip(*counts, strict=True)))
    for line in others or ():
        warn(f"{line}: other programs may not open it")
    if options.json:
        return [json.dumps({"sound": True, "format": format} | asdict(found), indent=1)]
    sums = f"{found.checksums:,} checksums agree" if found.checksums else "it has no checksums"
    if found.blobs:
        sums += f"; the SHA-256 of {found.blobs} files is their name in the cache"
    if others == []:
        sums += "; the safetensors library lists the same tensors"
    return [
        f"sound: {format}, {found.tensors:,} tensors, {found.nbytes:,} bytes, {_files(found.files)}; {sums}"
    ]


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def _totals(tensors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The number of tensors, values and bytes for each dtype, and last for all."""
    keys = ("tensors", "values", "bytes")
    totals: dict[str, dict[str, Any]] = {}
    every: dict[str, Any] = {"dtype": "all"} | dict.fromkeys(keys, 0)
    for tensor in tensors:
        dtype = tensor["dtype"]
        row = totals.setdefault(dtype, {"dtype": dtype} | dict.fromkeys(keys, 0))
        for key, number in zip(keys, (1, math.prod(tensor["shape"]), tensor["bytes"]), strict=True):
            row[key] += number
            every[key] += number
    return [*totals.values(), every]


def _inspect_table(document: dict[str, Any]) -> Iterator[str | Table]:
    if document["metadata"]:
        rows = [[key, _cell(value)] for key, value in document["metadata"].items()]
        yield Table([["metadata", "value"], *rows])
        yield ""
    yield Table(
        [["name", "dtype", "shape", "bytes", "file"]]
        + [
            [
                tensor["name"],
                tensor["dtype"],
                "x".join(map(str, tensor["shape"])) or "scalar",
                f"{tensor['bytes']:,}",
                os.path.basename(tensor["file"]),
            ]
            for tensor in document["tensors"]
        ],
        right={3},
    )
    yield ""
    yield Table(
        [["dtype", "tensors", "values", "bytes"]]
        + [
            [row["dtype"], *(f"{row[key]:,}" for key in ("tensors", "values", "bytes"))]
            for row in document["totals"]
        ],
        right={1, 2, 3},
    )
