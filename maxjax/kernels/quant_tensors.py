"""QuantTensors: a weight as the tensors of a quantised format, which ``kernels.matmul`` takes in place of an array."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from .formats import QuantLayout


@jax.tree_util.register_pytree_with_keys_class
class QuantTensors:
    """A weight ``[out, in]``, or a stack of such weights, that stays quantised in memory.

    Args:
        layout: the format, and the tensors of one weight.
        tensors: the tensors by name, arrays or StackSlices, with the same leading axes each. They may be one
            device's shards.

    Attributes:
        shape: shape of the weights.
        dtype: float32, the dtype of the dequantised weights.

    It is a pytree of the tensors. jnp functions accept it and dequantise it to a float32 array.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.dtype import DType
        >>> from maxjax.kernels import matmul
        >>> from maxjax.kernels.formats import QuantTensor
        >>> layout = QuantLayout("scaled", 2, 3, (QuantTensor("weight", DType.int8, (2, 3), (0, 1)),
        ...                                       QuantTensor("weight_scale", DType.float32, (2, 1), (0, None))))
        >>> w = QuantTensors(layout, {"weight": jnp.ones((2, 3), jnp.int8), "weight_scale": jnp.full((2, 1), 0.5)})
        >>> w.shape, print(matmul(jnp.ones((1, 3)), w))
        [[1.5 1.5]]
        ((2, 3), None)
    """

    __slots__ = ("layout", "tensors")

    dtype = np.dtype(np.float32)

    def __init__(self, layout: QuantLayout, tensors: Mapping[str, Any]):
        self.layout, self.tensors = layout, dict(tensors)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self._lead, *self.layout.of_part(self.tensors).shape)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self._lead) + 2

    @property
    def _lead(self) -> tuple[int, ...]:
        first = self.layout.tensors[0]
        shape = self.tensors[first.name].shape
        return tuple(shape[: len(shape) - len(first.axes)])

    def each(self, run: Callable[[Any], Any]) -> QuantTensors:
        """Apply a function to each tensor."""
        return QuantTensors(self.layout, {name: run(a) for name, a in self.tensors.items()})

    def undivided(self, along: int, parts: int) -> QuantTensors:
        """The same weight, whose tensors are not split along an axis where equal parts of it would cut their blocks."""
        declared = list(self.layout.tensors)
        for i, axis in self._cut(along, parts):
            axes = list(declared[i].axes)
            axes[axis] = None
            declared[i] = dataclasses.replace(declared[i], axes=tuple(axes))
        layout = dataclasses.replace(self.layout, tensors=tuple(declared))
        return QuantTensors(layout, self.tensors)

    def part(self, along: int, parts: int, number: Any) -> QuantTensors:
        """The weight of one of equal parts along an axis, which has its part of each tensor but :meth:`undivided` ones.

        Where the parts cut blocks, the result has smaller blocks.

        Args:
            number: index of the part, which may be computed.
        """
        if not (cut := self._cut(along, parts)):
            return self
        tensors, declared = dict(self.tensors), list(self.layout.tensors)
        size, block = self.layout.shape[along], self.layout.block(along)
        new = math.gcd(block, size // parts)
        count, ratio = size // parts // new, block // new
        for i, axis in cut:
            one, array = declared[i], jax.numpy.asarray(tensors[declared[i].name])
            place = array.ndim - len(one.axes) + axis
            # The blocks in which the part lies, at most: from the first to the last of its smaller ones.
            some = min((count + ratio - 2) // ratio + 1, array.shape[place])
            first = jax.numpy.minimum(number * count // ratio, array.shape[place] - some)
            array = jax.lax.dynamic_slice_in_dim(array, first, some, place)
            array = jax.numpy.repeat(array, ratio, place)
            start = number * count - first * ratio
            tensors[one.name] = jax.lax.dynamic_slice_in_dim(array, start, count, place)
            shape = (*one.shape[:axis], size // new, *one.shape[axis + 1 :])
            declared[i] = dataclasses.replace(one, shape=shape)
        layout = self.layout.with_block(along, new)
        return QuantTensors(dataclasses.replace(layout, tensors=tuple(declared)), tensors)

    def _cut(self, along: int, parts: int) -> list[tuple[int, int]]:
        """The tensors whose blocks equal parts along an axis would cut, by their indices, and the axis of each."""
        size, block = self.layout.shape[along], self.layout.block(along)
        if block == size or size // parts % block == 0:
            return []
        return [
            (i, one.axes.index(along))
            for i, one in enumerate(self.layout.tensors)
            if i and along in one.axes and one.shape[one.axes.index(along)] == -(-size // block)
        ]

    def __jax_array__(self) -> jax.Array:
        arrays = {name: jax.numpy.asarray(a) for name, a in self.tensors.items()}
        run = self.layout.of_part(arrays).dequantise
        for _ in self._lead:
            run = jax.vmap(run)
        return run(arrays)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.__jax_array__(), dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        return f"QuantTensors({self.layout.format}, {list(self.layout.shape)})"

    def tree_flatten_with_keys(self) -> Any:
        names = tuple(self.tensors)
        keys = [jax.tree_util.DictKey(name) for name in names]
        return tuple(zip(keys, self.tensors.values(), strict=True)), (self.layout, names)

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> QuantTensors:
        layout, names = static
        return cls(layout, dict(zip(names, children, strict=True)))
