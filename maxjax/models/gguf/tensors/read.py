"""The tensors of a GGUF file by the names of Hugging Face's checkpoints.

The tensors are lazy. To read a part of a tensor, only the rows of that part are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from ....dtype import DType
from ....errors import CheckpointFormatError, shown
from ....graph.weights import GGUFWeights, WeightData
from ..config.read import answers_yes_or_no, hf_config
from ..metadata import MAX_LAYERS, Settings, settings
from ..mmproj import vision_tensors, whole_config
from ..names import ARCHITECTURES, CLASSIFIER, DIVISORS, Table, hf_names
from ..pieces import computed, rows
from ..sources import Exact, relaid
from ..table import GGUF_TABLES, GGUFTable

DTYPES_KEY = "maxjax.dtypes"
"""Metadata key that lists the tensors widened to float32: "name=BF16", with Hugging Face's names."""
EXACT_KEY = "maxjax.exact."
"""Metadata key prefix, before Hugging Face's name, of exact values where the file's tensor lost bits."""
# Upper bound of numbers in the metadata; the largest float32 is 3.4e38.
_LARGE = 1e38
# Name of a layer's queries, keys and values in one tensor.
_FUSED = "attn_qkv"
_LAYER = re.compile(r"\Ablk\.[0-9]+\.")
NARROW = {"BF16": DType.bfloat16, "F16": DType.float16}


def config_of(weights: GGUFWeights, part: GGUFWeights | None = None) -> dict[str, Any]:
    """The content of a ``config.json`` for the model of a GGUF file.

    Args:
        weights: the file.
        part: its ``mmproj`` file, with which it is a vision-language model.

    Raises:
        UnsupportedModelError, CheckpointFormatError: as for ``hf_config``.
    """
    shapes = {
        name: tuple(map(int, data.logical_shape)) for name, data in _tensors_in(weights).items()
    }
    divisors = {name: np.asarray(weights[name].data().data) for name in DIVISORS if name in shapes}
    found = hf_config(weights.metadata, shapes, divisors=divisors, path=weights._path)
    return found if part is None else whole_config(found, weights, part)


def hf_tensors(weights: GGUFWeights) -> dict[str, WeightData]:
    """The tensors of a GGUF file, by the names and in the layouts of Hugging Face's checkpoints.

    Values stay quantised if the layout only reorders rows. Norms and other small tensors that
    maxjax widened when it wrote the file get their original dtype. Those of its ``mmproj`` file are among them.

    Raises:
        UnsupportedModelError, CheckpointMismatchError, CheckpointFormatError: as for ``hf_names``.
    """
    in_file = _tensors_in(weights)
    architecture = weights.metadata.get("general.architecture", "")
    shapes = {name: tuple(map(int, data.logical_shape)) for name, data in in_file.items()}
    names = hf_names(str(architecture), shapes, weights.metadata, path=weights._path)
    found = relaid(in_file, names)
    table = GGUF_TABLES.get(str(architecture))
    if table is not None:
        found |= _numbers(weights, table)
    narrower = _narrower(weights)
    for name in found:
        dtype = narrower.get(name)
        dtype = dtype if dtype and found[name].dtype is DType.float32 else None
        if (key := EXACT_KEY + name) in weights.metadata:
            original = _original(weights, key, found[name], dtype)
            source = Exact(found[name], original, names[name].layout)
            found[name] = WeightData.lazy(source, name, DType.of(original.dtype), original.shape)
        elif dtype is not None:
            found[name] = found[name].astype(dtype)
    if table is not None and table.join is not None:
        found = dict(table.join(settings(weights.metadata, path=weights._path), found))
    part = weights._mmproj
    return found if part is None else found | vision_tensors(part)


def _numbers(weights: GGUFWeights, table: GGUFTable) -> dict[str, WeightData]:
    """The tensors with a single number in each layer, whose numbers the metadata lists."""
    given, found = Settings(weights.metadata, "", weights._path), {}
    for key, (name, shape) in table.numbers.items():
        layers = settings(weights.metadata).count("block_count", maximum=MAX_LAYERS)
        values = given.items(key, float)
        if len(values) != layers or not all(abs(value) < _LARGE for value in values):
            expected = f"{layers} finite numbers, one for each layer"
            raise given.wrong(key, expected, f"{len(values)}", "does not fit", is_text=True)
        for i, value in enumerate(values):
            full = table.layer.replace("*", str(i)) + name
            found[full] = WeightData.from_numpy(np.full(shape, value, np.float32), full)
    return found


def _original(weights: GGUFWeights, key: str, data: WeightData, narrow: DType | None) -> np.ndarray:
    """The exact values of a changed tensor, from the metadata, which holds values or 16-bit patterns."""
    value, shape = weights.metadata[key], tuple(map(int, data.shape))
    dtype = data.dtype if narrow is None else narrow
    kind = np.dtype(np.uint16) if narrow else dtype.np
    if not isinstance(value, np.ndarray) or (value.dtype, value.shape) != (kind, shape):
        found = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else shown(value)
        given = Settings(weights.metadata, "", weights._path)
        raise given.wrong(key, f"{kind} {shape}", found, "does not fit its tensor", is_text=True)
    return value.view(dtype.np)


def _narrower(weights: GGUFWeights) -> dict[str, DType]:
    """The original dtypes of tensors that were widened when the file was written."""
    given = Settings(weights.metadata, "", weights._path)
    found = {}
    for item in given.items(DTYPES_KEY, str, []):
        name, _, kind = item.rpartition("=")
        if kind not in NARROW:
            raise given.wrong(DTYPES_KEY, "names with =BF16 or =F16", item, "has an unknown type")
        found[name] = NARROW[kind]
    return found


def _tensors_in(weights: GGUFWeights) -> dict[str, WeightData]:
    """The tensors of the file, by the names of its architecture.

    In every architecture, weights are multiplied by the scale that is beside them, one tensor of queries, keys
    and values becomes three, and a head of two answers becomes one of one number.
    """
    table = ARCHITECTURES.get(str(weights.metadata.get("general.architecture")), {})
    scaled = _one_label(weights, _scaled(weights, table))
    if f"blk.*.{_FUSED}" in table or "blk.*.attn_q" not in table:
        return scaled
    found = {}
    for name, data in scaled.items():
        front, fused, suffix = name.rpartition(f".{_FUSED}.")
        if fused:
            found |= _split(weights, data, front, suffix)
        else:
            found[name] = data
    return found


def _scaled(weights: GGUFWeights, table: Table) -> dict[str, WeightData]:
    """The tensors, multiplied by their scales: a number (as of NVFP4), or one for each expert.

    The scales of activations, by which llama.cpp chooses how to compute, are left out.
    """
    found = {name: place.data() for name, place in weights.items()}
    for name in [name for name in found if name.endswith((".scale", ".input_scale"))]:
        stem, _, kind = name.rpartition(".")
        weight = f"{stem}.weight"
        rules = table.get(_LAYER.sub("blk.*.", stem), ())
        if weight not in found or any(rule.only == kind for rule in rules):
            continue
        scale, data = found.pop(name), found[weight]
        if kind != "scale":
            continue
        shape = tuple(map(int, data.logical_shape))
        counts = ((), (1,), *([shape[:1]] if len(shape) == 3 else []))
        if (size := tuple(map(int, scale.logical_shape))) not in counts:
            raise CheckpointFormatError(
                "not one number, or one for each expert", path=weights._path, tensor=name,
                expected=f"shape [1] of a weight {list(shape)}", found=f"shape {list(size)}",
            )  # fmt: skip

        def change(values: np.ndarray, by: np.ndarray) -> np.ndarray:
            return values * by.reshape(-1, *[1] * (values.ndim - 1))

        found[weight] = computed(weight, [data, scale], change, shape)
    return found


def _one_label(weights: GGUFWeights, found: dict[str, WeightData]) -> dict[str, WeightData]:
    """The tensors, with the first row of a head of two answers minus the second, as ``hf_config`` counts them."""
    if not answers_yes_or_no(settings(weights.metadata, path=weights._path)):
        return found
    for kind in ("weight", "bias"):
        data = found.get(name := f"{CLASSIFIER}.{kind}")
        if data is not None and data.logical_shape[0] == 2:
            shape = (1, *map(int, data.logical_shape[1:]))
            found[name] = computed(name, [data], lambda rows: rows[:1] - rows[1:], shape)
    return found


def _split(
    weights: GGUFWeights, data: WeightData, front: str, suffix: str
) -> Iterator[tuple[str, WeightData]]:
    """The names and tensors of a layer's queries, keys and values, which are rows of one tensor."""
    given = settings(weights.metadata, path=weights._path)
    heads = given.count("attention.head_count")
    keys = given.some("attention.head_count_kv", heads)
    shape = tuple(map(int, data.logical_shape))
    width, rest = divmod(shape[0] if shape else 0, heads + 2 * keys)
    if rest or not width:
        raise CheckpointFormatError(
            "not the rows of queries, keys and values", path=weights._path, tensor=data.name,
            expected=f"rows for {heads} + {keys} + {keys} heads", found=f"shape {list(shape)}",
        )  # fmt: skip
    start = 0
    for part, count in (("attn_q", heads), ("attn_k", keys), ("attn_v", keys)):
        name = f"{front}.{part}.{suffix}"
        yield name, rows(name, [data], start + np.arange(count * width))
        start += count * width
