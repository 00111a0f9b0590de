"""StackSlice: one layer's slice of a stacked array, copied only where an array is needed.

A plain ``lax.scan`` over stacked weights copies each layer's weights out of the stack at every
step. The body of an inference loop holds StackSlices instead: ``kernels.matmul`` takes the stack
and the index without a copy, and every other function gets the slice as an array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from . import explicit


@jax.tree_util.register_pytree_with_keys_class
class StackSlice:
    """``stack[index]``, evaluated only where an array is needed.

    Args:
        stack: an array ``[n, ...]``; for a stack of stacks ``[n, m, ...]`` and so on.
        index: index of the slice, from 0: an int, or an integer array without axes, which may be traced;
            for a stack of stacks a tuple of them.

    It is a pytree with the leaves ``stack`` and ``index``, has the shape and dtype of the slice, and works in
    jnp functions, operators and indexing; ``jax.lax`` functions need ``jnp.asarray`` of it.

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
    def indices(self) -> tuple[Any, ...]:
        """The index as a tuple with an entry for each of the leading axes that it consumes."""
        return self.index if isinstance(self.index, tuple) else (self.index,)

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape of the slice."""
        return tuple(self.stack.shape[len(self.indices) :])

    @property
    def dtype(self) -> Any:
        """The dtype of the elements."""
        return self.stack.dtype

    @property
    def ndim(self) -> int:
        """The number of axes of the slice."""
        return self.stack.ndim - len(self.indices)

    @property
    def place(self) -> Any:
        """The index of the slice in :attr:`flat`. Negative ints are counted from the end, arrays are not.

        Raises:
            IndexError: an index is an int and outside the stack.
        """
        place: Any = 0
        for axis, index in enumerate(self.indices):
            count = self.stack.shape[axis]
            index = _from_start(index, count)
            place = index if axis == 0 else place * count + index
        return place

    @property
    def flat(self) -> Any:
        """The stack with its leading axes merged into one, which :attr:`place` indexes."""
        depth, sizes = len(self.indices), self.stack.shape
        if depth == 1:
            return self.stack
        return self.stack.reshape(math.prod(sizes[:depth]), *sizes[depth:])

    def inner(self, index: Any) -> StackSlice:
        """A slice of this slice, without a copy.

        Example:
            >>> import jax.numpy as jnp
            >>> w = StackSlice(jnp.arange(12.0).reshape(3, 2, 2), 1)
            >>> print(jnp.asarray(w.inner(0)))
            [4. 5.]
        """
        return StackSlice(self.stack, (*self.indices, index))

    def __jax_array__(self) -> jax.Array:
        mesh = explicit.mesh_of(self.stack)
        if mesh is None:
            return _cut(self.stack, self.indices)
        split = explicit.entries(self.stack)
        depth = len(self.indices)
        if not any(split[:depth]):
            return _cut(self.stack, self.indices)
        return explicit.automatic(_cut, mesh, split[depth:])(self.stack, self.indices)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.__jax_array__(), dtype=dtype, copy=copy)

    def __getitem__(self, key: Any) -> jax.Array:
        return self.__jax_array__()[key]

    def __getattr__(self, name: str) -> Any:
        # JAX, NumPy and `copy` test whether such attributes exist.
        if name.startswith("__") or name in self.__slots__:
            raise AttributeError(name)
        return getattr(self.__jax_array__(), name)

    def __repr__(self) -> str:
        return f"StackSlice({self.dtype}{list(self.shape)}, {self.index!r} of {self._counts()})"

    def _counts(self) -> Any:
        counts = tuple(self.stack.shape[: len(self.indices)])
        return counts if isinstance(self.index, tuple) else counts[0]

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


def _cut(stack: Any, indices: tuple[Any, ...]) -> jax.Array:
    known = tuple(_from_start(i, n) for i, n in zip(indices, stack.shape, strict=False))
    if _may_be_anywhere(stack, len(indices)):
        at = tuple(_beside(stack, i) if isinstance(i, int) else i for i in known)
        if not any(isinstance(i, Tracer) for i in at):
            return _one_program(stack, at)
    return _slice(stack, known)


def _slice(stack: Any, indices: tuple[Any, ...]) -> jax.Array:
    if len(indices) == 1:
        if isinstance(indices[0], int):
            return jax.lax.index_in_dim(stack, indices[0], keepdims=False)
        return layer_of(stack, indices[0])
    rest = stack.shape[len(indices) :]
    if all(isinstance(i, int) for i in indices):
        ends = [*(i + 1 for i in indices), *rest]
        return jax.lax.slice(stack, [*indices, *[0] * len(rest)], ends).reshape(rest)
    # One slice over all axes: a slice of a slice would copy the whole first slice.
    starts = [jnp.int32(i) for i in (*indices, *[0] * len(rest))]
    sizes = (*[1] * len(indices), *rest)
    return jax.lax.dynamic_slice(stack, starts, sizes, allow_negative_indices=False).reshape(rest)


# Cuts the slices of an array, of which each would otherwise have a compiled program of its own.
_one_program = jax.jit(_slice)


def _may_be_anywhere(stack: Any, depth: int) -> bool:
    """Whether a slice is cut as well by a program that gets the index as an argument.

    In the program of a tracer a constant index is better, and so it is where XLA would have to move other
    parts of the stack, from another kind of memory or between devices.
    """
    if isinstance(stack, Tracer) or not isinstance(stack, jax.Array):
        return False
    sharding = stack.sharding
    if not sharding.is_fully_addressable:
        return False
    if sharding.memory_kind != next(iter(sharding.device_set)).default_memory().kind:
        return False
    if isinstance(sharding, NamedSharding):
        return all(entry is None for entry in sharding.spec[:depth])
    return isinstance(sharding, SingleDeviceSharding)


def _beside(stack: jax.Array, index: int) -> jax.Array:
    """The index as an array on the devices of the stack, committed to them if the stack is."""
    sharding: Any = stack.sharding
    if not stack.committed:
        sharding = None
    elif isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.device_put(np.int32(index), sharding)


def layer_of(stack: jax.Array, index: Any) -> jax.Array:
    """``stack[index]`` for an integer scalar that may be traced, from 0 on; one past the end means the last."""
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False, allow_negative_indices=False)


def _from_start(index: Any, count: int) -> Any:
    """An index of a stack of ``count``, counted from the beginning if it is an int; an array as it is."""
    if not isinstance(index, (int, np.integer)):
        return index
    if not -count <= index < count:
        raise IndexError(f"index {index} is outside a stack of {count}")
    return int(index) % count


def places_of(places: Sequence[Any]) -> Any:
    """Indices in stacks, ints or integer scalars that may be traced, as int32 ``[n]``."""
    if all(isinstance(i, int) for i in places):
        return np.array(places, np.int32)
    return jnp.stack([jnp.int32(i) for i in places])


def slice_of(leaf: Any, index: Any) -> StackSlice:
    """``leaf[index]`` as a StackSlice, for a leaf that is an array or a StackSlice."""
    return leaf.inner(index) if type(leaf) is StackSlice else StackSlice(leaf, index)


def stack_of(leaf: Any) -> Any:
    """The stack of a leaf that is a StackSlice; any other leaf unchanged."""
    return leaf.stack if type(leaf) is StackSlice else leaf
