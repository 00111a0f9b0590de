"""Recurrent: the states of layers whose size does not depend on the length of a sequence.

Examples are the state of a linear attention (gated delta rule) or a state space model, and the last
inputs of a causal convolution. They cannot be rewound, because the effect of a token cannot be undone.

Shapes: L layers, batch B.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...graph.placement.rows import total
from ...kernels import explicit
from ...kernels.stack_slice import layer_of
from ...rendering.rendered import Rendered, summary
from ...rendering.row import Row, bytes_text


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Recurrent(Rendered):
    """The named states of L layers.

    Attributes:
        arrays: arrays ``[L, B, ...]`` by name; they are zeros before the first token.

    Example:
        >>> state = Recurrent({"conv": jnp.zeros((2, 3, 4, 8))})
        >>> new = {"conv": jnp.ones((3, 4, 8))}
        >>> state = state.replaced(1, new, jnp.array([True, False, True]))
        >>> state.layers, state.at(1)["conv"][:, 0, 0].tolist()
        (2, [1.0, 0.0, 1.0])
    """

    arrays: Mapping[str, jax.Array]

    def _mx_row(self) -> Row:
        return total("Recurrent", self.arrays)

    def _mx_title(self, row: Row) -> str:
        shapes = (f"{name} {list(np.shape(a))}" for name, a in self.arrays.items())
        return f"Recurrent({', '.join([*shapes, bytes_text(row.nbytes), *row.notes])})"

    def __repr__(self) -> str:
        return summary(self)

    @property
    def layers(self) -> int:
        """Number L of layers."""
        return next(iter(self.arrays.values())).shape[0]

    def at(self, layer: Any) -> dict[str, jax.Array]:
        """The states of one layer, by name: arrays ``[B, ...]``."""
        return {name: layer_of(a, layer) for name, a in self.arrays.items()}

    def replaced(self, layer: Any, new: Mapping[str, jax.Array], rows: Any = None) -> Recurrent:
        """A copy with states of one layer replaced.

        Args:
            layer: index of the layer.
            new: new states ``[B, ...]`` by name, of some or all names; they are rounded to the dtypes of
                ``arrays``.
            rows: sequences that had a token, bools ``[B]``; the others keep their state. None means all.
        """
        found = dict(self.arrays)
        for name, value in new.items():
            array = self.arrays[name]
            value = value.astype(array.dtype)
            if rows is not None:
                old = layer_of(array, layer)
                value = jnp.where(rows.reshape(-1, *(1,) * (value.ndim - 1)), value, old)
            start = (layer, *(jnp.int32(0),) * (array.ndim - 1))
            found[name] = jax.lax.dynamic_update_slice(
                array, value[None], start, allow_negative_indices=False
            )
        return Recurrent(found)

    def grown(self, capacity: int) -> Recurrent:
        """These states themselves: their size does not depend on the capacity."""
        return self

    def holds(self, stored: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """Whether sequences of ``stored`` tokens still have the state after their first ``kept``; bools ``[B]``."""
        return (kept == stored) | (kept == 0)

    def rewound(self, kept: np.ndarray) -> Recurrent:
        """A copy with zeros for the sequences of which no token is kept."""
        if (kept > 0).all():
            return self
        emptied = (_emptied(a.sharding, a.ndim)(a, kept > 0) for a in self.arrays.values())
        return Recurrent(dict(zip(self.arrays, emptied, strict=True)))


@functools.lru_cache(maxsize=128)
def _emptied(where: Any, rank: int) -> Any:
    """A jitted program that keeps some rows of ``[L, B, ...]`` and sets the others to zeros."""

    def run(array: jax.Array, kept: jax.Array) -> jax.Array:
        kept = jnp.asarray(kept).reshape(1, -1, *(1,) * (rank - 2))
        keep = lambda array, kept: jnp.where(kept, array, jnp.zeros_like(array))
        keep = explicit.automatic(keep, explicit.mesh_of(array), explicit.entries(array))
        return keep(array, kept)

    return jax.jit(run, out_shardings=where)
