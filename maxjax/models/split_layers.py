"""``SplitLayers``: a row of a table of names for linear layers that transformers' modules split into several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..graph.weights import WeightData
from .gguf.pieces import rows
from .names import Row

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@dataclass(frozen=True)
class SplitLayers(Row):
    """Linear layers that a model has as one, as its files do, and transformers' modules as several.

    The rows of the one layer are those of the others, one after another, equally many of each.

    Attributes:
        layers: ending of the one layer's name → endings of the names of the others, in order.
        written: whether tensors are written for the several layers.

    Example:
        >>> row = SplitLayers({"mlp.up_gate_proj": ("mlp.up_proj", "mlp.gate_proj")}).of_modules()
        >>> halves = row.fuse({"mlp.up_gate_proj.bias": jnp.arange(4)})
        >>> {name: one.tolist() for name, one in halves.items()}
        {'mlp.up_proj.bias': [0, 1], 'mlp.gate_proj.bias': [2, 3]}
        >>> row.split(halves)["mlp.up_gate_proj.bias"].tolist()
        [0, 1, 2, 3]
    """

    layers: Mapping[str, tuple[str, ...]]
    written: bool = False

    def of_modules(self) -> SplitLayers:
        """See :class:`Row`."""
        return replace(self, written=True)

    def place(self, layer: str) -> tuple[str, int, int] | None:
        """(Name of the one layer, index of the part, number of parts) of a layer that is a part; None for any other."""
        for one, parts in self.layers.items():
            for index, part in enumerate(parts):
                if _ends(layer, part):
                    return layer.removesuffix(part) + one, index, len(parts)
        return None

    def split(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """The tensors of a file, with those of the parts of a layer joined to one; nothing is read."""
        groups: dict[str, list[str | None]] = {}
        for name in tensors:
            layer, _, kind = name.rpartition(".")
            if (place := self.place(layer)) is not None:
                whole, index, count = place
                groups.setdefault(f"{whole}.{kind}", [None] * count)[index] = name
        found = dict(tensors)
        for whole, names in groups.items():
            if whole in tensors or None in names:
                continue  # what does not fit is told by its name
            found[whole] = _joined(whole, [found.pop(name) for name in names if name is not None])
        return found

    def fused_names(self, name: str) -> list[str]:
        """See :class:`Row`."""
        layer, _, kind = name.rpartition(".")
        for one, parts in self.layers.items():
            if self.written and _ends(layer, one):
                return [f"{layer.removesuffix(one)}{part}.{kind}" for part in parts]
        return [name]

    def fuse(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inverse of :meth:`split`."""
        found: dict[str, Any] = {}
        for name, value in tensors.items():
            names = self.fused_names(name)
            found |= (
                {name: value}
                if names == [name]
                else dict(zip(names, parts_of(value, names), strict=True))
            )
        return found


def _ends(layer: str, ending: str) -> bool:
    return layer == ending or layer.endswith(f".{ending}")


def _joined(name: str, each: list[Any]) -> Any:
    if not all(isinstance(one, WeightData) for one in each):
        return jnp.concatenate(each)
    total = sum(int(one.logical_shape[0]) for one in each)
    return rows(name, each, np.arange(total))


def parts_of(value: Any, names: Iterable[str]) -> list[Any]:
    """The equal parts of a tensor's rows, with these names."""
    names = list(names)
    spans = np.split(np.arange(int(value.shape[0])), len(names))
    if not isinstance(value, WeightData):
        return [value[span[0] : span[-1] + 1] for span in spans]
    return [rows(name, [value], span) for name, span in zip(names, spans, strict=True)]
