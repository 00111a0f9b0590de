"""``maxjax.look``: the values of weights and arrays, as statistics, a histogram and an image.

No ``repr`` reads a device, but this function does: a program computes the statistics where the array is,
and only its results are copied to the host (``statistics.py``).
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, Sharding

from ..columns import columns
from ..dtype import native
from ..errors import UserInputError, some
from ..graph import compile_cache
from ..graph.kind import as_array
from ..graph.operators import Operators
from ..graph.placement.rows import DELETED, TRACED, array_row, state_of
from ..graph.placement.strategy import ShardingStrategy
from ..graph.weight.stacked import StackedWeight
from ..graph.weight.weight import Weight
from ..graph.weights import FileWeights, WeightData
from ..kernels import QuantArray, StackSlice
from ..nn.layer import Module
from ..rendering.picture import bars, histogram, image, number, png_url, small_histogram
from ..rendering.rendered import boxed, card, table
from ..rendering.row import counted, short
from .drawings import ShardingDrawing, draw_sharding
from .isolation import isolated
from .statistics import Statistics, fetched, measured

# The statistics that are shown, by their titles.
_SHOWN = {name: name for name in ("min", "mean", "max", "std", "zeros")} | {
    "NaN": "nan",
    "Inf": "inf",
}
_HEAD = ("name", "type", *_SHOWN, "")
_MOST_LINES, _MOST_ROWS = 60, 300
_NO_VALUE = "no value yet: load_state_dict() or maxjax.init() gives one"


@dataclass(frozen=True)
class ArrayLook:
    """A summary of the values of one array.

    Attributes:
        name: name of the weight; "" if it has none.
        type: dtype or encoding, and shape.
        statistics: its statistics; None if there is no value.
        note: the reason why there are no statistics.
        layers: names of the layers, if the array is a stack, whose statistics are those of each layer.
    """

    name: str
    type: str
    statistics: Statistics | None
    note: str = ""
    layers: tuple[str, ...] = ()

    def __repr__(self) -> str:
        title, found = short(self._title(), 160), self.statistics
        if found is None:
            return f"{title}: {self.note}"
        if self.layers:
            table = [_HEAD[:1] + _HEAD[2:], *([cells[0], *cells[2:]] for cells in self._lines())]
            return "\n".join([title, *(f"  {line}" for line in columns(table, right=range(1, 8)))])
        marks = f"  {number(found.min)} │{bars(found.counts.tolist())}│ {number(found.max)}"
        facts = ", ".join(f"{name} {value}" for name, value in self._facts().items())
        return "\n".join([title, f"  {facts}", marks])

    def _repr_html_(self) -> str:
        title, found = self._title(), self.statistics
        if found is None:
            return card(title, {"value": self.note})
        if self.layers:
            rows = [[*cells[:1], *cells[2:9]] for cells in self._lines()]
            pictures = [
                small_histogram(one) for one in found.counts.reshape(len(rows), -1).tolist()
            ]
            return boxed(
                f"<b>{html.escape(short(title, 200))}</b>"
                f"{table([_HEAD[0], *_HEAD[2:]], rows[:_MOST_ROWS], pictures)}"
            )
        drawing = histogram(found.counts.tolist(), number(found.min), number(found.max))
        flow = "display:flex;flex-wrap:wrap;gap:4px 24px;align-items:flex-end"
        both = f'<div style="{flow}">{drawing}{self._picture()}</div>'
        return card(title, self._facts(), both, in_line=True)

    def _title(self) -> str:
        count = f"{counted(len(self.layers), 'layer')} × " if self.layers else ""
        return f"{self.name} {count}{self.type}".strip()

    def _facts(self) -> dict[str, str]:
        found = self.statistics
        assert found is not None
        facts = {title: number(getattr(found, name)) for title, name in _SHOWN.items()}
        return {"values": f"{found.size:,}", **facts}

    def _picture(self) -> str:
        found = self.statistics
        if found is None or found.image is None or not found.image.size:
            return ""
        pixels = found.image
        largest = float(np.nanmax(np.where(np.isfinite(pixels), np.abs(pixels), 0), initial=0.0))
        signed = found.signed and bool(np.nanmin(pixels, initial=0.0) < 0)
        rows, columns_ = pixels.shape
        scale = max(192 / max(rows, columns_), 1.0)
        wide, high = columns_ * scale, max(rows * scale, 12.0)
        what = "the values" if found.signed else "mean magnitude of each block of values"
        least = -largest if signed else 0.0
        limits = f"{number(least)} to {number(largest)}"
        picture = image(png_url(pixels, least, largest, signed), wide, high)
        return f"<div>{picture}<div><s>{what}, {limits}</s></div></div>"

    def _lines(self) -> list[tuple[str, ...]]:
        """The cells of a table: a line, or one for each layer."""
        found = self.statistics
        if found is None:
            return [(self.name, self.type, *[""] * 7, self.note)]
        lines = self.layers or (self.name,)
        each = [np.asarray(getattr(found, name)).reshape(-1) for name in _SHOWN.values()]
        counts = found.counts.reshape(len(lines), -1)
        return [
            (name, self.type, *(number(values[i]) for values in each), bars(_halved(counts[i])))
            for i, name in enumerate(lines)
        ]


@dataclass(frozen=True)
class TreeLook(Mapping[str, ArrayLook]):
    """Summaries of the values of all weights of a Module, or of all arrays of a pytree, by name.

    Attributes:
        title: class and number of arrays of what was looked at.
        looks: the summaries by name; a stack of layers has one.
    """

    title: str
    looks: Mapping[str, ArrayLook]

    def __getitem__(self, name: str) -> ArrayLook:
        return self.looks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.looks)

    def __len__(self) -> int:
        return len(self.looks)

    def _lines(self) -> list[tuple[str, ...]]:
        return [line for one in self.looks.values() for line in one._lines()]

    def _warnings(self) -> list[str]:
        found = []
        for what, name in {"NaN": "nan", "infinite values": "inf"}.items():
            held = [
                key
                for key, one in self.looks.items()
                if one.statistics is not None and np.any(np.asarray(getattr(one.statistics, name)))
            ]
            if held:
                found.append(f"{what} in {some(held, 3, short)}")
        return found

    def __repr__(self) -> str:
        rows = self._lines()
        shown = [
            (short(name, 60), short(kind, 40), *rest) for name, kind, *rest in rows[:_MOST_LINES]
        ]
        more = [f"  … and {len(rows) - len(shown):,} more"] if len(rows) > len(shown) else []
        warnings = [f"  {text}" for text in self._warnings()]
        lines = (f"  {line}" for line in columns([_HEAD, *shown], right=range(2, 9)))
        return "\n".join([self.title, *lines, *more, *warnings])

    def _repr_html_(self) -> str:
        rows, pictures = [], []
        for one in self.looks.values():
            lines = one._lines()
            found = one.statistics
            rows += [line[:9] for line in lines]
            if found is None:
                pictures.append(f"<s>{html.escape(one.note)}</s>")
            else:
                counts = found.counts.reshape(len(lines), -1)
                pictures += [small_histogram(_halved(one)) for one in counts]
        left = len(rows) - _MOST_ROWS
        more = f"<div><s>… and {left:,} more</s></div>" if left > 0 else ""
        warnings = "".join(
            f'<div style="color:#c44">{html.escape(w)}</div>' for w in self._warnings()
        )
        body = table(_HEAD, rows[:_MOST_ROWS], pictures[:_MOST_ROWS])
        return boxed(f"<b>{html.escape(short(self.title, 200))}</b>{warnings}{body}{more}")


@isolated()
def look(what: Any, name: str = "") -> ArrayLook | TreeLook | ShardingDrawing:
    """Shows the values of arrays: statistics, a histogram, an image.

    They are computed where the array is, on one device or a mesh, and only the results are copied.
    Several processes call it together.

    Args:
        what: a Weight, an array, a WeightData or a cursor of a checkpoint (which is then read), a
            QuantArray; a Module or another pytree with arrays, for a table; or a Sharding, mesh or
            ShardingStrategy, for :func:`maxjax.draw_sharding`.
        name: name to show for a single array; by default its own, if it has one.

    Returns:
        An object that shows itself as text or, in a notebook, with pictures, and has the numbers as
        attributes. For a stack of layers, each layer has its own numbers.

    Raises:
        UserInputError: the value is traced, or was donated or deleted.
        TypeError: ``what`` holds no arrays.

    Example:
        >>> import jax.numpy as jnp, maxjax
        >>> seen = maxjax.look(jnp.array([[0.0, 1.0], [2.0, jnp.nan]]))
        >>> seen.statistics.mean, seen.statistics.nan
        (1.0, 1)
        >>> seen
        float32[2, 2]
          values 4, min 0, mean 1, max 2, std 0.8165, zeros 1, NaN 1, Inf 0
          0 │█               █              █│ 2
    """
    if isinstance(what, (Sharding, Mesh, AbstractMesh, ShardingStrategy)):
        return draw_sharding(what)
    compile_cache.enable()
    found = _Found()
    if isinstance(what, Module):
        definition, holders = what._mx_definition()
        for title, holder in zip(definition.names, holders, strict=True):
            found.add(title, holder)
        kind = type(what).__name__
        return found.tree(f"{kind}: {counted(len(found.shown), 'array')}")
    if isinstance(what, FileWeights):
        what = what.data() if what.exists() else {str(n): one for n, one in what.items()}
    if _is_array(what):
        found.add(name or str(getattr(what, "name", "") or ""), what, alone=True)
        return next(iter(found.looks().values()))
    if isinstance(what, (str, bytes)) or jax.tree_util.all_leaves([what], is_leaf=_is_array):
        raise TypeError(
            "look() takes a Weight, an array, a Module or a tree of arrays, or a Sharding, not "
            f"{type(what).__name__}"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(what, is_leaf=_is_array):
        if _is_array(leaf):
            found.add(jax.tree_util.keystr(path, simple=True, separator="."), leaf)
    if not found.shown:
        raise TypeError(f"there are no arrays in the {type(what).__name__}")
    return found.tree(f"{type(what).__name__}: {counted(len(found.shown), 'array')}")


def _is_array(what: Any) -> bool:
    kinds = (
        Operators,
        Weight,
        WeightData,
        FileWeights,
        QuantArray,
        StackSlice,
        jax.Array,
        np.ndarray,
    )
    return isinstance(what, (*kinds, np.generic, jax.ShapeDtypeStruct))


class _Found:
    """The arrays to summarise. All programs are dispatched before the first result is waited for."""

    def __init__(self) -> None:
        self.shown: dict[str, tuple[str, Any, str, tuple[str, ...], int, tuple[int, ...]]] = {}

    def add(self, name: str, what: Any, alone: bool = False) -> None:
        """Dispatches the statistics of an array; one that cannot be measured raises only if ``alone``."""
        held, kind, note, layers = _value(what, name)
        lead, shape = (len(what.spec.lead) if layers else 0), tuple(getattr(held, "shape", ()))
        pending = None
        if held is not None and not note:
            if 0 in shape:
                note = "there are no values in it"
            else:
                try:
                    pending = measured(held, lead)
                except UserInputError as error:
                    if alone:
                        raise
                    note = str(error)
        self.shown[name] = kind, pending, note, layers, lead, shape

    def looks(self) -> dict[str, ArrayLook]:
        """The results."""
        return {
            name: ArrayLook(
                name, kind, None if pending is None else fetched(pending, shape, lead), note, layers
            )
            for name, (kind, pending, note, layers, lead, shape) in self.shown.items()
        }

    def tree(self, title: str) -> TreeLook:
        """The results as a table."""
        return TreeLook(title, self.looks())


def _value(what: Any, name: str) -> tuple[Any, str, str, tuple[str, ...]]:
    """The array to measure, its type, the reason if there are no values, and the names of layers."""
    if isinstance(what, WeightData):
        if what.is_loaded and isinstance(what.data, jax.ShapeDtypeStruct):
            return None, _type_of(what), _NO_VALUE, ()
        data = what.astype("float32") if what.is_packed else what
        return data.typed(), _type_of(what), "", ()
    if isinstance(what, FileWeights):
        return _value(what.data(), name)
    if not isinstance(what, Weight):
        if isinstance(what, (np.ndarray, np.generic)):
            if what.dtype.kind in "OUSMm" or what.dtype.names is not None:
                return None, f"{what.dtype}{list(what.shape)}", "its values are no numbers", ()
            what = native(np.asarray(what))
        array = what if isinstance(what, np.ndarray) else as_array(what)
        if isinstance(array, QuantArray):
            _check(array.blocks, name)
            return array, f"{array.encoding}{list(array.shape)}", "", ()
        kind = array_row("", array).row.type_text
        if isinstance(array, jax.ShapeDtypeStruct):
            return array, kind, _NO_VALUE, ()
        _check(array, name)
        return array, kind, "", ()
    if _is_another(what):  # a pytree with the model's structure may hold other arrays
        return _value(what.leaf, name)
    sizes = [*map(str, what.spec.logical_shape)]
    encoding = what.spec.packing
    dtype = getattr(what.leaf, "dtype", what.spec.dtype.name)
    kind = f"{dtype if encoding is None else encoding.value}[{', '.join(sizes)}]"
    if isinstance(what, StackedWeight):
        leaf = what.leaf
        if state_of(leaf).foreign:
            return None, kind, f"{type(leaf).__name__} in its place", ()
        if what.is_lazy:
            return None, kind, _NO_VALUE, ()
        _check(leaf, name)
        return what.operand(), kind, "", tuple(what.spec.names(name))
    if what.is_lazy:
        if what.source is not None:
            data, _, note, _ = _value(what.source, name)
            return data, kind, note, ()
        return None, kind, _NO_VALUE, ()
    if state_of(what.leaf).foreign:
        return None, kind, f"{type(what.leaf).__name__} in its place", ()
    _check(what.leaf, name)
    return (what.operand() if encoding is not None else what.stored_value()), kind, "", ()


def _is_another(weight: Any) -> bool:
    """Whether the leaf is an array of another shape or dtype than the Weight or the stack declares."""
    leaf, blank = weight.leaf, weight.spec.blank()
    if blank is None or not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return False
    return leaf.shape != blank.shape or (
        weight.spec.packing is not None and leaf.dtype != blank.dtype
    )


def _type_of(data: WeightData) -> str:
    encoding = data.quantization_encoding
    kind = encoding.value if encoding is not None and data.is_packed else data.dtype.name
    return f"{kind}[{', '.join(map(str, data.logical_shape))}]"


def _check(leaf: Any, name: str) -> None:
    """Raises UserInputError for an array that is traced or deleted."""
    note = state_of(leaf).note
    called = f"'{name}'" if name else "the array"
    if note == TRACED:
        raise UserInputError(
            f"{called} is traced and has no values: look() is for use outside of jax.jit and jax.grad"
        )
    if note == DELETED:
        raise UserInputError(
            f"the memory of {called} was freed: it was donated to a jitted function, or deleted"
        )


def _halved(counts: np.ndarray) -> list[int]:
    """The counts of half as many bins, for a table."""
    return counts.reshape(-1, 2).sum(-1).tolist()
