"""QuantLayout: the tensors that a quantised weight is stored as, and how to compute the weight from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...graph.placement.specs import PartOf
from .formats import FORMATS
from .forms import Exactly, QuantState


@dataclasses.dataclass(frozen=True)
class QuantTensor:
    """One of the tensors of a quantised weight.

    Attributes:
        name: name in the file, after the name of the layer.
        dtype: element type in the file.
        shape: shape in the file.
        axes: for each axis, the axis of the weight ``[out, in]`` that it runs along; None for an
            axis that a mesh does not split.
        form: what a file holds in its place; None: the tensor itself.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    axes: tuple[int | None, ...]
    form: Exactly | QuantState | None = None

    @property
    def has_bits(self) -> bool:
        """Whether its elements are floats of 8 bits."""
        return self.dtype.is_float() and self.dtype.size_in_bits == 8

    @property
    def attribute(self) -> str:
        """The attribute of a QuantizedLinear that holds it; ``weight`` is the dequantised one.

        Example:
            >>> QuantTensor("weight.absmax", DType.uint8, (4,), (0,)).attribute
            'weight_absmax'
        """
        return "codes" if self.name == "weight" else self.name.replace(".", "_")


@dataclasses.dataclass(frozen=True)
class QuantLayout:
    """The layout of a quantised weight ``[out_dim, in_dim]``.

    Attributes:
        format: name of the format, a key of ``formats.FORMATS``.
        out_dim, in_dim: shape of the weight.
        tensors: the tensors that it is stored as; the first has the numbers, integers or floats of
            8 bits.
        options: settings of the format that are not seen in the tensors, as (name, value).

    Example:
        >>> import jax.numpy as jnp
        >>> tensors = (QuantTensor("weight", DType.int8, (2, 3), (0, 1)),
        ...            QuantTensor("weight_scale", DType.float32, (2, 1), (0, None)))
        >>> layout = QuantLayout("scaled", 2, 3, tensors)
        >>> layout.dequantise({"weight": jnp.ones((2, 3), jnp.int8), "weight_scale": jnp.full((2, 1), 0.5)})[0]
        Array([0.5, 0.5, 0.5], dtype=float32)
    """

    format: str
    out_dim: int
    in_dim: int
    tensors: tuple[QuantTensor, ...]
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weight."""
        return self.out_dim, self.in_dim

    def dequantise(self, tensors: Mapping[str, jax.Array]) -> jax.Array:
        """The weight in float32 ``[out_dim, in_dim]``, from its tensors by name.

        Args:
            tensors: the tensors; floats of 8 bits may also be their bits, uint8.
        """
        found = dict(tensors)
        for one in self.tensors:
            if one.has_bits and found[one.name].dtype == jnp.uint8:
                found[one.name] = jax.lax.bitcast_convert_type(found[one.name], one.dtype.np)
        return FORMATS[self.format](found, self.shape, **dict(self.options))

    def split(self, axis: int, entries: Mapping[str, Sequence[tuple[str, ...]]]) -> tuple[str, ...]:
        """The mesh axes that an axis of the weight is split over.

        Args:
            entries: for each tensor, the mesh axes that each of its axes is split over.
        """
        for one in self.tensors:
            for along, names in zip(one.axes, entries[one.name], strict=False):
                if along == axis and names:
                    return names
        return ()

    def rules(self) -> dict[str, PartOf]:
        """The sharding rule of each tensor, by the attribute that holds it."""
        return {one.attribute: PartOf("weight", self.shape, one.axes) for one in self.tensors}
