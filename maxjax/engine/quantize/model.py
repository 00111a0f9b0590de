"""``quantize``: makes a quantised model from a loaded one, on its devices, and a report of the errors."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import jax
import numpy as np

from ...columns import columns
from ...dtype import DType
from ...errors import UserInputError, printable, releasing
from ...graph.placement.arrays import platform_of
from ...graph.quantization import QuantizationEncoding
from ...graph.shape import Shape
from ...kernels.packed_product import ACTIVATIONS
from ...models.gguf.config.families import has_architecture
from ...models.gguf.tensors.write import gguf_places
from ...models.weights import check_loaded, set_activations, shardings_of
from ...nn.layer import Module
from ...nn.layer.stack.rearranged import unstack_unequal
from ...nn.layer.walk import check_module
from ...progress import task
from ...rendering.rendered import plain_table
from .choice import Patterns, chosen_types
from .importance import Importance
from .shards import Encoded, encode_array

M = TypeVar("M", bound=Module)
_WORST = 3


class Quantized(NamedTuple, Generic[M]):
    """A quantised model, and the report of its sizes and errors."""

    model: M
    report: QuantizationReport


def quantize(
    model: M,
    to: str | None = "q4_k",
    *,
    patterns: Patterns | None = None,
    importance: Mapping[str, Any] | None = None,
    activations: Literal["int8", "float"] | None = None,
) -> Quantized[M]:
    """Returns a new model with quantised weights, and a report; the given model is not changed.

    The result is equal to a model that was loaded from a file with these blocks: it generates, is
    saved, stacked and sharded as before, with the same names. Weights of linear layers, experts and
    embedding tables are quantised, norms and biases never. A tied head is quantised once, together
    with the embedding table. Each device encodes its own shard, so shardings do not change.

    Args:
        model: a Module whose weights are loaded, as floats.
        to: quantisation type: "q8_0", "q6_k", "q5_k", "q4_k", "q4_0" or "mxfp4"; or one of
            llama.cpp's mixtures of these, such as "q4_k_m", which need a model with a
            configuration. Rows that cannot be divided into complete blocks of the type get Q8_0, or
            stay floats. None quantises only the weights that ``patterns`` name.
        patterns: types, or None for floats, by glob patterns over the checkpoint's names, which
            override ``to``: a mapping or pairs; the first pattern that matches is used.
        importance: importance matrix from :func:`maxjax.calibrate` or a file
            (:func:`~maxjax.engine.quantize.importance.load_importance`): for each weight the mean squares
            of its inputs, ``[in]``, which weight the errors. Weights that it lacks are quantised
            without.
        activations: how kernels for CPUs multiply with quantised weights, as for ``maxjax.load``: None
            is "int8" for a model on CPUs.

    Returns:
        The model and the report, a table of bytes and errors.

    Raises:
        UserInputError: ``model`` is no Module; weights are not loaded, or are quantised already; a pattern
            matches no weight; ``patterns`` or ``importance`` is of another type; a device's part of a row
            cannot be divided into complete blocks; a value is not finite.
        NotImplementedError: weights cannot stay quantised in memory as this type, or are on devices
            of several processes.
        TypeError: ``to`` or a type of ``patterns`` is neither a str nor None.

    If layers of a stack get different types, as in most mixtures, they are unstacked.

    Example:
        >>> import maxjax
        >>> from maxjax import nn
        >>> from maxjax.graph import DeviceRef
        >>> layers = nn.Sequential([nn.Linear(64, 32, "float32", DeviceRef.CPU()) for _ in range(1)])
        >>> layers = maxjax.init(layers, jax.random.key(0))
        >>> model, report = maxjax.quantize(layers, "q8_0")
        >>> model.raw_state_dict(), report.bytes_before, report.bytes_after  # doctest: +NORMALIZE_WHITESPACE
        ({'0.weight': Weight(0.weight, DType.uint8, [Dim(32), Dim(68)], cpu:0, QuantizationEncoding.Q8_0,
         loaded)}, 8192, 2176)
    """
    if activations not in (None, *ACTIVATIONS):
        raise UserInputError(f"activations must be 'int8' or 'float', not {activations!r}")
    check_module(model, "quantize")
    check_loaded(model)
    types, kept = chosen_types(model, to, patterns)
    checked = _checked(model, types, importance)
    new = jax.tree.map(lambda leaf: leaf, model)
    new = unstack_unequal(new, types)
    rows: dict[str, WeightReport] = {}
    done = set[int]()
    holders: list[tuple[str, Any]] = []
    for name, weight in new.raw_state_dict().items():
        home = weight.home
        holder: Any = weight if home is None else home[0]
        if name in types and id(holder) not in done:
            done.add(id(holder))
            holders.append((name, holder))
    sizes = [holder.leaf.nbytes for _, holder in holders]
    with releasing(), task(f"quantizing {type(model).__name__}", sum(sizes)) as shown:
        for (name, holder), nbytes in zip(holders, sizes, strict=True):
            rows |= _quantise(new, name, holder, types[name], checked)
            shown.add(nbytes)
    sharding = next((where for where in shardings_of(new) if where is not None), None)
    set_activations(new, activations or ("int8" if platform_of(sharding) == "cpu" else "float"))
    ordered = tuple(rows[name] for name in types)
    nbytes = lambda m: sum(leaf.nbytes for leaf in jax.tree.leaves(m))
    others = nbytes(new) - sum(row.bytes_after for row in ordered)
    return Quantized(new, QuantizationReport(ordered, kept, others))


def _checked(
    model: Module, types: Mapping[str, str], importance: Mapping[str, Any] | None
) -> dict[str, np.ndarray]:
    """The importance of the weights that are quantised, as float32."""
    if importance is not None and not isinstance(importance, Mapping):
        raise UserInputError(
            "importance is what maxjax.calibrate returns, or maps names to mean squares, not "
            f"{type(importance).__name__}"
        )
    found = {}
    weights = model.raw_state_dict()
    if isinstance(importance, Importance):
        config, places = getattr(model, "hf_config", None), {}
        if config is not None and has_architecture(config):
            places = gguf_places(config, types)
        names = dict.fromkeys(types, ("", -1))
        importance = importance.of_checkpoint(
            names | {name: (place.tensor, place.expert) for name, place in places.items()}
        )
    for name in types:
        if importance is None or name not in importance:
            continue
        size = int(weights[name].logical_shape[-1])
        try:
            given = np.asarray(importance[name], np.float32)
        except (TypeError, ValueError):
            raise UserInputError(
                f"the importance of weight '{name}' must be {size} numbers, not "
                f"{type(importance[name]).__name__}"
            ) from None
        if given.shape != (size,) or not np.isfinite(given).all() or (given < 0).any():
            raise UserInputError(
                f"the importance of weight '{name}' must be {size} numbers, not negative; got "
                + (
                    f"shape {list(given.shape)}"
                    if given.shape != (size,)
                    else "some that are, or are not finite"
                )
            )
        found[name] = given
    return found


def _quantise(
    model: Module, name: str, holder: Any, kind: str, importance: Mapping[str, np.ndarray]
) -> dict[str, WeightReport]:
    """Quantises a Weight, or all Weights of a stack; the rows of the report by name."""
    leaf = holder.leaf
    if not getattr(leaf, "is_fully_addressable", True):
        raise NotImplementedError(
            f"weight '{name}' is on devices of several processes: quantise the checkpoint with maxjax convert "
            "--quantize, and load that"
        )
    if not holder.spec.spans:
        names = [name]
    else:
        by_number = {
            w.home[1]: n
            for n, w in model.raw_state_dict().items()
            if w.home is not None and w.home[0] is holder
        }
        names = [by_number[number] for number in range(holder.spec.count)]
    found = encode_array(names, leaf, kind, _stacked_importance(holder, names, importance))
    rows = dict(_reports(holder, names, kind, found, leaf.dtype.itemsize))
    encoding = QuantizationEncoding(kind)
    dims = encoding.packed_shape([int(size) for size in holder.spec.dims])
    holder.change(dtype=DType.uint8, dims=tuple(Shape(dims)), encoding=encoding)
    holder.loaded_shape = holder.source = None
    holder.put(found.blocks)
    return rows


def _stacked_importance(
    holder: Any, names: list[str], importance: Mapping[str, np.ndarray]
) -> np.ndarray | None:
    """The importance with the leading axes of the leaf, ``[..., in]``; ones for weights without it."""
    if not any(name in importance for name in names):
        return None
    size = next(len(importance[name]) for name in names if name in importance)
    each = [importance.get(name, np.ones(size, np.float32)) for name in names]
    # A device-major layout has a further axis, which splits only the rows.
    inner = (1,) * (holder.spec.layout is not None)
    return np.stack(each).reshape(*holder.spec.lead, *inner, size)


def _reports(holder: Any, names: list[str], kind: str, found: Encoded, itemsize: int) -> Any:
    """The name and the report of each Weight of a holder."""
    shape = found.errors.shape[len(holder.spec.lead) :]
    errors, squares = (a.reshape(-1, *shape) for a in (found.errors, found.squares))
    values = math.prod(map(int, holder.spec.logical_shape))
    nbytes = math.prod(found.blocks.shape) // len(names)
    for name, wrong, norm in zip(names, errors, squares, strict=True):
        if holder.spec.layout is not None:
            wrong, norm = (
                np.asarray(holder.spec.layout.restore(a[..., None]))[..., 0] for a in (wrong, norm)
            )
        wrong, norm = wrong.reshape(-1), norm.reshape(-1)
        relative = np.sqrt(np.divide(wrong, norm, out=np.zeros_like(wrong), where=norm > 0))
        worst = np.argsort(-relative, kind="stable")[:_WORST]
        total = float(norm.sum())
        yield name, WeightReport(
            name, kind, values * itemsize, nbytes,
            math.sqrt(float(wrong.sum()) / total) if total else 0.0,
            tuple((int(row), float(relative[row])) for row in worst),
        )  # fmt: skip


_HEAD = ("weight", "type", "before", "after", "error", "worst rows")


@dataclass(frozen=True)
class WeightReport:
    """A weight that was quantised.

    Attributes:
        name: name in the checkpoint.
        type: type of the blocks, "Q4_K" for example.
        bytes_before, bytes_after: size of its values.
        error: relative root mean square error: the norm of the difference over that of the weight.
        worst_rows: pairs of a row and its relative error, for the rows with the largest errors, the worst first.
    """

    name: str
    type: str
    bytes_before: int
    bytes_after: int
    error: float
    worst_rows: tuple[tuple[int, float], ...]


@dataclass(frozen=True, repr=False)
class QuantizationReport:
    """What :func:`maxjax.quantize` did. It prints as a table, and is shown as one in a notebook.

    Attributes:
        rows: the weights that were quantised.
        kept: reason by name, for each weight of a linear layer or embedding table that was not quantised.
        bytes_kept: bytes of all weights that were not quantised.

    Example:
        >>> row = WeightReport("lm_head.weight", "Q8_0", 4096, 1088, 0.0042, ((3, 0.005),))
        >>> print(QuantizationReport((row,), {}, 128))
        weight          type  before  after    error  worst rows
        lm_head.weight  Q8_0   4,096  1,088  0.00420  3 (0.00500)
        1 weight: 4,096 → 1,088 bytes; 128 bytes of others
    """

    rows: tuple[WeightReport, ...]
    kept: dict[str, str]
    bytes_kept: int

    @property
    def bytes_before(self) -> int:
        """The bytes of the quantised weights before quantisation."""
        return sum(row.bytes_before for row in self.rows)

    @property
    def bytes_after(self) -> int:
        """The bytes of the quantised weights now."""
        return sum(row.bytes_after for row in self.rows)

    def __getitem__(self, name: str) -> WeightReport:
        """The row of a weight."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def _cells(self) -> list[Sequence[str]]:
        return [
            (row.name, row.type, f"{row.bytes_before:,}", f"{row.bytes_after:,}",
             f"{row.error:.5f}", ", ".join(f"{i} ({e:.5f})" for i, e in row.worst_rows))
            for row in self.rows
        ]  # fmt: skip

    def _summary(self) -> list[str]:
        many = "1 weight" if len(self.rows) == 1 else f"{len(self.rows):,} weights"
        lines = [
            f"{many}: {self.bytes_before:,} → {self.bytes_after:,} bytes; "
            f"{self.bytes_kept:,} bytes of others"
        ]
        return lines + [f"not quantised: {printable(n)}: {why}" for n, why in self.kept.items()]

    def __repr__(self) -> str:
        return f"QuantizationReport({self._summary()[0]})"

    def __str__(self) -> str:
        table = columns([_HEAD, *self._cells()], right={2, 3, 4})
        return "\n".join([*table, *self._summary()])

    def _repr_html_(self) -> str:
        summary = "".join(f"<div>{html.escape(line)}</div>" for line in self._summary())
        return plain_table([_HEAD, *self._cells()]) + summary
