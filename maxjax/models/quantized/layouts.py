"""The layouts of quantised linear layers: which tensors a layer of each format has, and their shapes.

Where a format leaves a choice (the dtype of scales, or a scalar of shape ``[]`` or ``[1]``), the file's
tensors decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...dtype import DType
from ...nn.quantized import Exactly, Groups, QuantLayout, QuantTensor

# The (dtype, shape) of each tensor of one layer, by the part of its name after the layer's name.
Found = Mapping[str, tuple[DType, tuple[int, ...]]]
# (out, in, the layer's tensors) → the layout of its weight.
LayoutOf = Callable[[int, int, Found], QuantLayout]

FLOATS8 = (DType.float8_e4m3fn, DType.float8_e5m2)
SCALES = (DType.float32, DType.float16, DType.bfloat16)


def tensor(
    entries: Found,
    name: str,
    dtypes: DType | Sequence[DType],
    shapes: Sequence[tuple[tuple[int, ...], tuple[int | None, ...]]],
) -> QuantTensor:
    """A tensor of a layer, with the dtype and shape that it has in the file if the format allows them.

    Otherwise it has the first allowed dtype or shape, and loading reports the difference.

    Args:
        entries: tensors of the layer.
        name: name of the tensor.
        dtypes: possible dtypes.
        shapes: possible shapes, each with the axis of the weight that each of its axes runs along, or None.
    """
    possible = [dtypes] if isinstance(dtypes, DType) else list(dtypes)
    dtype, shape = entries.get(name, (possible[0], shapes[0][0]))
    axes = next((axes for one, axes in shapes if one == shape), None)
    if axes is None:
        shape, axes = shapes[0]
    return QuantTensor(name, dtype if dtype in possible else possible[0], shape, axes)


def group_indices(entries: Found, name: str, inner: int, group: int, ordered: bool) -> QuantTensor:
    """The tensor of each column's group; ``ordered`` as in :class:`Groups`."""
    found = tensor(entries, name, DType.int32, [((inner,), (1,))])
    # A FileForm checks all groups together, so no device holds only some.
    return replace(found, form=Groups(inner, group, ordered), is_whole=True)


def unused(entries: Found, *names: str) -> list[QuantTensor]:
    """Tensors of the file that a matmul does not need: scales of quantised activations."""
    return [
        QuantTensor(name, entries[name][0], entries[name][1], (None,) * len(entries[name][1]))
        for name in names
        if name in entries
    ]


def count_blocks(count: int, size: int) -> int:
    return -(-count // size)


SINGLE = [((), ()), ((1,), (None,)), ((1, 1), (None, None))]


def _scale_shapes(
    out: int, inner: int, strategy: str, block: tuple[int, int] | None
) -> list[tuple[tuple[int, ...], tuple[int | None, ...]]]:
    """The possible shapes of a weight's scales: one for the tensor, for each row, or for each block."""
    if strategy == "tensor":
        return SINGLE
    if strategy == "channel":
        return [((out, 1), (0, None)), ((out,), (0,))]
    assert block is not None
    return [((count_blocks(out, block[0]), count_blocks(inner, block[1])), (0, 1))]


def scaled(
    out: int,
    inner: int,
    entries: Found,
    *,
    dtypes: Sequence[DType],
    strategy: str,
    scale: str = "weight_scale",
    block: tuple[int, int] | None = None,
    asymmetric: bool = False,
    ignored: Sequence[str] = (),
) -> QuantLayout:
    """The layout of ``weight · scale``.

    Args:
        dtypes: possible dtypes of the weight.
        strategy: unit that has one scale: "tensor", "channel" or "block".
        scale: name of the scales.
        block: shape of a block.
        asymmetric: whether zero points are required.
        ignored: names of tensors that are loaded but not used.
    """
    shapes = _scale_shapes(out, inner, strategy, block)
    tensors = [
        tensor(entries, "weight", dtypes, [((out, inner), (0, 1))]),
        tensor(entries, scale, (*SCALES, DType.float8_e8m0fnu), shapes),
    ]
    if asymmetric or "weight_zero_point" in entries:
        tensors.append(tensor(entries, "weight_zero_point", [*dtypes, DType.int8], shapes))
    options: list[tuple[str, Any]] = [("scale", scale)]
    if block is not None:
        options.append(("block", block))
    return QuantLayout("scaled", out, inner, (*tensors, *unused(entries, *ignored)), tuple(options))


def packed(
    out: int,
    inner: int,
    entries: Found,
    *,
    bits: int,
    group: int | None,
    asymmetric: bool,
    ordered: bool,
    ignored: Sequence[str] = (),
) -> QuantLayout:
    """The layout of ``pack-quantized``.

    Args:
        group: number of columns in a group; None: all.
        asymmetric: whether there are zero points.
        ordered: whether the file must have ``weight_g_idx``, the group of each column.
    """
    ordered = ordered or "weight_g_idx" in entries
    group = inner if group is None else group
    words, groups = 32 // bits, count_blocks(inner, group)
    # With ``weight_g_idx``, the columns of a group are not consecutive.
    along = None if ordered or groups == 1 else 1
    tensors = [
        tensor(
            entries, "weight_packed", DType.int32, [((out, count_blocks(inner, words)), (0, 1))]
        ),
        tensor(entries, "weight_scale", SCALES, [((out, groups), (0, along))]),
        replace(
            tensor(entries, "weight_shape", (DType.int64, DType.int32), [((2,), (None,))]),
            form=Exactly((out, inner)),
        ),
    ]
    if asymmetric:
        shape = (count_blocks(out, words), groups)
        tensors.append(tensor(entries, "weight_zero_point", DType.int32, [(shape, (0, along))]))
    if ordered:
        tensors.append(group_indices(entries, "weight_g_idx", inner, group, ordered))
    options = (("bits", bits), ("group", group))
    return QuantLayout(
        "pack_quantized", out, inner, (*tensors, *unused(entries, *ignored)), options
    )


def nvfp4(
    out: int,
    inner: int,
    entries: Found,
    *,
    second: str,
    weight: str = "weight",
    divides: bool = False,
    ignored: Sequence[str] = (),
) -> QuantLayout:
    """The layout of NVFP4: E2M1 numbers in blocks of 16 columns, with a scale in e4m3 each.

    Args:
        second: name of the scale of all blocks.
        weight: name of the numbers, two in a byte.
        divides: whether blocks' scales are divided by ``second``, and not multiplied by it.
        ignored: names of tensors that are loaded but not used.
    """
    blocks = count_blocks(inner, 16)
    tensors = [
        tensor(entries, weight, DType.uint8, [((out, count_blocks(inner, 2)), (0, 1))]),
        tensor(
            entries, "weight_scale", DType.float8_e4m3fn,
            [((out, blocks), (0, 1 if blocks > 1 else None))],
        ),
        tensor(entries, second, DType.float32, SINGLE),
    ]  # fmt: skip
    options = (("weight", weight), ("second", second), ("divides", divides))
    return QuantLayout("nvfp4", out, inner, (*tensors, *unused(entries, *ignored)), options)


def bitnet(
    out: int, inner: int, entries: Found, *, online: bool = False, divides: bool = False
) -> QuantLayout:
    """The layout of ``bitnet``: packed numbers of two bits, or floats, which a scale or a mean follows.

    Args:
        online: whether the weights are floats that each call rounds.
        divides: whether weights are divided by the scale, and not multiplied by it.
    """
    options: dict[str, Any] = {"activations": "int8 of each token"}
    whole = [((out, inner), (0, 1))]
    if online:
        weight = tensor(entries, "weight", SCALES, whole)
        return QuantLayout("ternary", out, inner, (weight,), **options)
    if "weight" in entries and entries["weight"][0] in SCALES:
        weight = tensor(entries, "weight", SCALES, whole)
    else:
        # A byte holds rows of each quarter, so a mesh cannot split them.
        weight = tensor(
            entries, "weight", DType.uint8, [((count_blocks(out, 4), inner), (None, 1))]
        )
    scale = tensor(entries, "weight_scale", SCALES, SINGLE)
    options["options"] = (("divides", divides),)
    return QuantLayout("bitnet", out, inner, (weight, scale), **options)
