"""StackSlice: one layer's slice of a stacked array, copied only where an array is needed.

A plain ``lax.scan`` over stacked weights copies each layer's weights out of the stack at every
step. The body of an inference loop holds StackSlices instead: ``kernels.matmul`` takes the stack
and the index without a copy, and every other function gets the slice as an array.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_pytree_with_keys_class
class StackSlice:
    """``stack[index]``, evaluated only where an array is needed.

    Args:
        stack: an array ``[n, ...]``.
        index: index of the slice, from 0: an int, or an integer scalar that may be traced.

    It is a pytree of the two, has the shape and dtype of the slice, and works in jnp functions,
    operators and indexing; ``jax.lax`` functions need ``jnp.asarray`` of it.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.kernels import StackSlice, matmul
        >>> w = StackSlice(jnp.arange(12.0).reshape(3, 2, 2), 1)
        >>> w.shape, float(jnp.sum(w))
        ((2, 2), 22.0)
        >>> print(matmul(jnp.ones(2), w))
        [ 9. 13.]
    """

    __slots__ = ("stack", "index")

    # Makes NumPy arrays on the left of an operator defer to this class.
    __array_priority__ = 1000

    def __init__(self, stack: Any, index: Any):
        self.stack, self.index = stack, index

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape of the slice."""
        return tuple(self.stack.shape[1:])

    @property
    def dtype(self) -> Any:
        """The dtype of the elements."""
        return self.stack.dtype

    @property
    def ndim(self) -> int:
        """The number of axes of the slice."""
        return self.stack.ndim - 1

    @property
    def place(self) -> Any:
        """The index, counted from the beginning of the stack if it is known.

        Raises:
            IndexError: the index is known and outside the stack.
        """
        count = self.stack.shape[0]
        if not isinstance(self.index, int):
            return self.index
        if not -count <= self.index < count:
            raise IndexError(f"index {self.index} is outside a stack of {count}")
        return self.index % count

    def __jax_array__(self) -> jax.Array:
        if isinstance(self.index, int):
            return jax.lax.index_in_dim(self.stack, self.place, keepdims=False)
        return jax.lax.dynamic_index_in_dim(
            self.stack, self.index, keepdims=False, allow_negative_indices=False
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.__jax_array__(), dtype=dtype, copy=copy)

    def __getitem__(self, key: Any) -> jax.Array:
        return self.__jax_array__()[key]

    def __getattr__(self, name: str) -> Any:
        # JAX, NumPy and copying test for the presence of such attributes.
        if name.startswith("__") or name in self.__slots__:
            raise AttributeError(name)
        return getattr(self.__jax_array__(), name)

    def __repr__(self) -> str:
        return (
            f"StackSlice({self.dtype}{list(self.shape)}, {self.index!r} of {self.stack.shape[0]})"
        )

    def tree_flatten_with_keys(self) -> Any:
        keys = (jax.tree_util.GetAttrKey("stack"), jax.tree_util.GetAttrKey("index"))
        return tuple(zip(keys, (self.stack, self.index), strict=True)), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> StackSlice:
        return cls(*children)


_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
_COMPARE, _UNARY = "lt le gt ge eq ne".split(), "neg pos abs invert".split()
_OTHERS = "iter len bool float int index complex round divmod rdivmod".split()


def _forward(name: str) -> Any:
    def method(self: StackSlice, *operands: Any) -> Any:
        arrays = [jnp.asarray(x) if isinstance(x, StackSlice) else x for x in operands]
        return getattr(self.__jax_array__(), name)(*arrays)

    return method


for _name in [*_BINARY, *(f"r{name}" for name in _BINARY), *_COMPARE, *_UNARY, *_OTHERS]:
    setattr(StackSlice, f"__{_name}__", _forward(f"__{_name}__"))
StackSlice.__hash__ = object.__hash__  # type: ignore[method-assign]


def stack_of(leaf: Any) -> Any:
    """The stack of a leaf that is a StackSlice; any other leaf unchanged."""
    return leaf.stack if type(leaf) is StackSlice else leaf
