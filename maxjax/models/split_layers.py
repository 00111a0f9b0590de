"""Rows of a table of names for layers that are one in a model and several in transformers' modules, or the other way.

Files have the layers as the model has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from ..errors import CheckpointFormatError, some
from ..graph.weights import WeightData
from .gguf.pieces import rows
from .names import NameRow

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@dataclass(frozen=True)
class _SplitLayers(NameRow):
    """A row for layers whose rows are those of several layers, one after another, equally many of each.

    Attributes:
        layers: ending of the one layer's name → endings of the names of the several layers, in order.
        written: whether tensors are written as transformers' modules have them.
    """

    layers: Mapping[str, tuple[str, ...]]
    written: bool = False

    def of_modules(self) -> Self:
        """See :class:`NameRow`."""
        return replace(self, written=True)

    def place(self, layer: str) -> tuple[str, int, int] | None:
        """(Name of the one layer, index, number of layers) of one of several layers; None for any other layer."""
        for one, parts in self.layers.items():
            for index, part in enumerate(parts):
                if _ends(layer, part):
                    return layer.removesuffix(part) + one, index, len(parts)
        return None

    def _names_of_parts(self, name: str) -> list[str]:
        """The names of the tensors of the several layers for a tensor of the one; that name alone for any other."""
        layer, _, kind = name.rpartition(".")
        for one, parts in self.layers.items():
            if _ends(layer, one):
                return [f"{layer.removesuffix(one)}{part}.{kind}" for part in parts]
        return [name]

    def _joined(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors, with one for several layers; nothing is read. Tensors of some of them stay as they are."""
        groups: dict[str, list[str | None]] = {}
        for name in tensors:
            layer, _, kind = name.rpartition(".")
            if (place := self.place(layer)) is not None:
                whole, index, count = place
                groups.setdefault(f"{whole}.{kind}", [None] * count)[index] = name
        found = dict(tensors)
        for whole, names in groups.items():
            if whole not in tensors and None not in names:
                found[whole] = _join(whole, [found.pop(name) for name in names if name is not None])
        return found

    def _divided(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse of :meth:`_joined`."""
        found: dict[str, Any] = {}
        for name, value in tensors.items():
            names = self._names_of_parts(name)
            parts = [value] if names == [name] else parts_of(value, names)
            found |= zip(names, parts, strict=True)
        return found


class SplitLayers(_SplitLayers):
    """Linear layers that are one in a model, and several in transformers' modules.

    Example:
        >>> row = SplitLayers({"mlp.up_gate_proj": ("mlp.up_proj", "mlp.gate_proj")}).of_modules()
        >>> halves = row.fuse({"mlp.up_gate_proj.bias": jnp.arange(4)})
        >>> {name: one.tolist() for name, one in halves.items()}
        {'mlp.up_proj.bias': [0, 1], 'mlp.gate_proj.bias': [2, 3]}
        >>> row.split(halves)["mlp.up_gate_proj.bias"].tolist()
        [0, 1, 2, 3]
    """

    def split(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """See :class:`NameRow`."""
        return self._joined(tensors)

    def fuse(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """See :class:`NameRow`."""
        return self._divided(tensors) if self.written else tensors

    def fused_names(self, name: str) -> list[str]:
        """See :class:`NameRow`."""
        return self._names_of_parts(name) if self.written else [name]


class JoinedLayers(_SplitLayers):
    """Layers that are several in a model, and one in transformers' modules: the inverse of :class:`SplitLayers`."""

    def split(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """See :class:`NameRow`."""
        return self._divided(tensors)

    def fuse(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """See :class:`NameRow`."""
        return self._joined(tensors) if self.written else tensors

    def fused_names(self, name: str) -> list[str]:
        """See :class:`NameRow`."""
        layer, _, kind = name.rpartition(".")
        place = self.place(layer) if self.written else None
        return [name] if place is None else [f"{place[0]}.{kind}"]


def _ends(layer: str, ending: str) -> bool:
    return layer == ending or layer.endswith(f".{ending}")


def _join(name: str, each: Sequence[Any]) -> Any:
    if not all(isinstance(one, WeightData) for one in each):
        return jnp.concatenate(each)
    total = sum(int(one.logical_shape[0]) for one in each)
    return rows(name, each, np.arange(total))


def parts_of(value: Any, names: Sequence[str]) -> list[Any]:
    """The equal parts of a tensor's rows, with these names; nothing is read.

    Raises:
        CheckpointFormatError: the number of rows is no multiple of the number of names.
    """
    shape = tuple(map(int, value.shape))
    if not shape or shape[0] % len(names):
        raise CheckpointFormatError(
            f"not the rows of {len(names)} layers", expected=f"rows for {some(names)}", found=shape
        )
    spans = np.split(np.arange(shape[0]), len(names))
    if not isinstance(value, WeightData):
        return [value[span[0] : span[-1] + 1] for span in spans]
    return [rows(name, [value], span) for name, span in zip(names, spans, strict=True)]
