"""The leaves to restore: each with the tensors that it is read from, and its sharding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ...graph.weights.device_reads import Destination


@dataclass(eq=False)
class LeafTarget(Destination):
    """One leaf of an example: a Destination whose sources are tensors of the checkpoint.

    Attributes:
        example: the leaf.
        names: name of the tensor, or of those of the layers that are stacked in the leaf.
        declared: 64-bit dtype of the weight, if JAX holds the leaf in 32 bits.
        finish: function that the restored array is passed through, or None.
    """

    example: Any = None
    names: Sequence[str] = ()
    declared: Any = None
    finish: Callable[[Any], Any] | None = None

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of each tensor, in logical order."""
        shape = self.shape if self.axis is None else self.shape[self.levels :]
        return shape if self.layout is None else (math.prod(shape[:2]), *shape[2:])

    def array(self) -> Any:
        """The leaf: an array of the example's kind."""
        if not isinstance(self.example, (np.ndarray, np.generic)):
            value = super().array()
            return value if self.finish is None else self.finish(value)
        (value,) = self.pieces.values()
        return value if isinstance(self.example, np.ndarray) else value[()]


def of_leaf(name: str, leaf: Any, like: Any = None, finish: Any = None) -> LeafTarget:
    """The target for a leaf that is an array.

    Args:
        like: what is stored of the leaf, if not itself.
    """
    held = leaf if like is None else like
    return LeafTarget(
        name,
        tuple(held.shape),
        np.dtype(held.dtype),
        [],
        sharding_of(held),
        example=leaf,
        names=[name],
        finish=finish,
    )


def of_holder(prefix: str, name: str, holder: Any, leaf: Any) -> LeafTarget:
    """The target for a leaf of a Module: a Weight's, or that of a stack of several layers."""
    stored, target = holder.stored, of_leaf(prefix + name, leaf)
    target.names = [prefix + one for one in stored.names(name)]
    target.name, target.layout = target.names[0], stored.layout
    target.axis, target.levels = (0, len(stored.spans)) if stored.spans else (None, 1)
    if target.sharding is None and type(leaf) is jax.ShapeDtypeStruct:
        target.sharding = stored.leaf_sharding
    declared = stored.dtype.np
    if declared != leaf.dtype and jax.dtypes.canonicalize_dtype(declared) == leaf.dtype:
        target.declared = declared
    return target


def sharding_of(leaf: Any) -> Any:
    """The sharding of a leaf; None if JAX chose the device."""
    if isinstance(leaf, jax.Array) and not getattr(leaf, "committed", True):
        return None
    return getattr(leaf, "sharding", None)
