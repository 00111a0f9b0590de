"""Reads the tensors of a checkpoint as the arrays of a flax nnx module.

Each device reads its own shard of a tensor that is on disk in its declared shape. Other tensors, such as
quantised ones, are made on the host first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from ...dtype import DType, misfit
from ...errors import CheckpointMismatchError
from ...graph.placement.arrays import put
from ...graph.weights import WeightData
from ...graph.weights.device_reads import Destination, Source, read_destinations
from ...graph.weights.given import host_or_jax
from ..layouts import BoundLayout
from ..renaming import Function
from .variables import TargetVariable


@dataclass
class Filling:
    """One Variable and the tensors from which its array is made; these fit the Variable.

    Attributes:
        target: the Variable.
        change: conversion of the tensors; None: no conversion.
        sources: (name, data) of the tensor, or of each layer's tensor if layers are stacked. The
            data's dtype is the Variable's, or an integer dtype whose values are still to be checked.
    """

    target: TargetVariable
    change: BoundLayout | Function | None
    sources: list[tuple[str, WeightData]] = field(default_factory=list)

    def held(self) -> jax.Array | None:
        """The array, if it is a JAX array already: it is immutable, so no copy is needed. Else None."""
        _, data = self.sources[0]
        value = host_or_jax(data) if self.change is None and data.is_loaded else None
        is_array = isinstance(value, jax.Array) and value.dtype == self.target.dtype
        return value if is_array else None

    def destination(self) -> Destination:
        """How the array is read: its shape, sharding, sources and conversion."""
        target, bound = self.target, self.change
        bound = bound if isinstance(bound, BoundLayout) else None
        return Destination(
            target.name,
            target.shape,
            np.dtype(target.dtype),
            [self._source(number) for number in range(len(self.sources))],
            target.sharding,
            axis=None if bound is None else bound.layout.stacks,
            order=bound,
            convert=self._converted,
        )

    def _source(self, number: int) -> Source:
        """A tensor that is read in boxes; or if it cannot be, a function that makes all of it."""
        _, data = self.sources[number]
        in_boxes = data.is_as_stored and data.decodes is None and data.dtype.np.itemsize
        if in_boxes and not isinstance(self.change, Function):
            return data
        return partial(self._whole, number)

    def _whole(self, number: int) -> np.ndarray:
        """The complete array, or that of one layer."""
        (name, data), change = self.sources[number], self.change
        value = host_or_jax(data)
        if isinstance(change, Function):
            value = self._called(change, name, value)
        value = self._converted(number, np.asarray(value))
        return change.apply(value) if isinstance(change, BoundLayout) else value

    def _called(self, change: Function, name: str, value: Any) -> Any:
        value = change.there(value)
        shape = tuple(getattr(value, "shape", ()))
        if shape != self.target.shape:
            raise CheckpointMismatchError(
                f"the table's function makes an array of another shape than '{self.target.name}'",
                tensor=name,
                expected=list(self.target.shape),
                found=list(shape),
            )
        return value

    def _converted(self, number: int, array: np.ndarray) -> np.ndarray:
        """The values, converted to the Variable's dtype.

        Raises:
            CheckpointMismatchError: an integer is outside the dtype's range.
        """
        dtype = np.dtype(self.target.dtype)
        if array.dtype == dtype:
            return array
        if (found := misfit(array, dtype)) is not None:
            raise CheckpointMismatchError(
                f"holds {found}, which do not fit {dtype}", tensor=self.sources[number][0]
            )
        data = WeightData(array, self.target.name, DType.of(array.dtype), array.shape)
        return data.astype(DType.of(dtype)).data


def arrays(fillings: Sequence[Filling]) -> list[jax.Array]:
    """Reads all arrays; the module is not changed.

    Raises:
        CheckpointError: a file cannot be read.
        OutOfMemoryError: the host or a device cannot hold an array.
    """
    with jax.ensure_compile_time_eval():  # concrete arrays, even inside a trace
        held = [one.held() for one in fillings]
        both = list(zip(fillings, held, strict=True))
        read = read_destinations(one.destination() for one, array in both if array is None)
        return [
            next(read) if array is None else put(array, one.target.sharding, one.target.name)
            for one, array in both
        ]
