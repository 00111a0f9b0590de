"""QuantArray: weights that stay quantised in memory, in ggml's blocks.

``kernels.matmul`` and ``kernels.embed`` accept it in place of an array.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..rendering.rendered import Rendered, card, guarded
from ..rendering.row import bytes_text, counted
from .blocks import decode, decoder_of
from .explicit import Division
from .packed_product import ACTIVATIONS
from .stack_slice import StackSlice


@jax.tree_util.register_pytree_with_keys_class
class QuantArray(Rendered):
    """Quantised weights: their blocks and their encoding.

    Args:
        blocks: uint8 ``[..., n * bytes of a block]``, an array or a StackSlice; the last axis
            holds n complete blocks.
        encoding: "Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL" or
            "IQ4_XS".
        activations: "int8" if CPU kernels may quantise the activations that are multiplied by these
            weights, which is faster; "float" if not.
        division: how a mesh with Auto axes divides a weight ``[out, in]``, if that is known. XLA for TPUs needs
            it to multiply by each device's part.

    Attributes:
        shape: shape of the weights.
        dtype: float32, the dtype of the dequantised weights.

    Raises:
        NotImplementedError: the encoding is not one of those above.
        ValueError: ``activations`` is neither "int8" nor "float".

    It is a pytree with the leaf ``blocks``. jnp functions accept it and dequantise it to a float32
    array; gradients with respect to it are not supported.

    Example:
        >>> import numpy as np
        >>> w = QuantArray(np.zeros((3, 2 * 34), np.uint8), "Q8_0")
        >>> w
        QuantArray(Q8_0, [3, 64])
        >>> import jax.numpy as jnp
        >>> from maxjax.kernels import matmul
        >>> matmul(jnp.ones((2, 64)), w).shape
        (2, 3)
    """

    __slots__ = ("blocks", "encoding", "activations", "division")

    dtype = np.dtype(np.float32)

    def __init__(
        self,
        blocks: Any,
        encoding: str,
        activations: str = "float",
        division: Division | None = None,
    ):
        decoder_of(encoding)
        if activations not in ACTIVATIONS:
            raise ValueError(
                f"activations must be {' or '.join(map(repr, ACTIVATIONS))}, not {activations!r}"
            )
        self.blocks, self.encoding = blocks, encoding
        self.activations, self.division = activations, division

    @property
    def shape(self) -> tuple[Any, ...]:
        *rows, nbytes = self.blocks.shape
        layout = decoder_of(self.encoding)
        return (*rows, nbytes // layout.nbytes * layout.elements)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.blocks.ndim

    def __jax_array__(self) -> jax.Array:
        blocks = self.blocks
        return decode(
            self.encoding, blocks.__jax_array__() if isinstance(blocks, StackSlice) else blocks
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.__jax_array__(), dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        return guarded(self, lambda: f"QuantArray({self.encoding}, {self._sizes()})")

    def _sizes(self) -> Any:
        # A transformation may have put any object in the place of the blocks.
        held = hasattr(self.blocks, "shape")
        return list(self.shape) if held else f"blocks of type {type(self.blocks).__name__}"

    def _mx_html(self) -> str:
        facts = {"type": f"{self.encoding}{self._sizes()}"}
        if hasattr(self.blocks, "shape"):
            count, nbytes = math.prod(self.shape), math.prod(self.blocks.shape)
            each = f"{8 * nbytes / max(count, 1):.4g} bits each"
            facts["size"] = f"{counted(count, 'weight')}, {each}, {bytes_text(nbytes)}"
            facts["blocks"] = f"{self.blocks.dtype}{list(self.blocks.shape)}"
        facts["activations"] = self.activations
        return card("QuantArray", facts)

    def each(self, run: Callable[[Any], Any]) -> QuantArray:
        """Apply a function to the blocks."""
        return self.around(run(self.blocks))

    def around(self, blocks: Any) -> QuantArray:
        """A QuantArray like this one with other blocks, which are not checked."""
        return self.tree_unflatten((self.encoding, self.activations, self.division), (blocks,))

    def tree_flatten_with_keys(self) -> Any:
        key = jax.tree_util.GetAttrKey("blocks")
        return ((key, self.blocks),), (self.encoding, self.activations, self.division)

    @classmethod
    def tree_unflatten(cls, static: tuple[str, str, Any], children: Any) -> QuantArray:
        new = object.__new__(cls)  # unchecked: a transformation may put any object into the leaf
        (new.blocks,), (new.encoding, new.activations, new.division) = children, static
        return new
