"""Restoring a pytree from a checkpoint, with the structure and shardings of an example.

Names, shapes and dtypes are compared before anything is read, and one error lists all that
differs; then each device reads its own part, with the sharding of the example's leaf.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ...dtype import DType, misfit
from ...errors import CheckpointMismatchError, closest, some
from ...graph.placement.arrays import sharding_of
from ...graph.weights import WeightData
from ...graph.weights.device_reads import Destination, read_destinations
from ...nn.layer import Module
from ...progress import reading
from .arrays import is_key, is_per_layer
from .open import Saved
from .tree import ONLY, PLAIN, is_module, key_text, plain_value


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

    def fitting(self, number: int, array: np.ndarray) -> np.ndarray:
        """The integers in the leaf's dtype.

        Raises:
            CheckpointMismatchError: one does not fit.
        """
        if array.dtype == self.dtype:
            return array
        if (found := misfit(array, self.dtype)) is not None:
            raise CheckpointMismatchError(
                f"holds {found}, which do not fit {self.dtype}", tensor=self.names[number]
            )
        return array.astype(self.dtype)

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
        like: array that is stored for the leaf, if not the leaf itself (the data of a random key).
    """
    held = leaf if like is None else like
    dtype = own = np.dtype(held.dtype).newbyteorder("=")
    if not isinstance(held, (np.ndarray, np.generic)):  # JAX has no 64 bits by default
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    target = LeafTarget(
        name,
        tuple(held.shape),
        dtype,
        [],
        sharding_of(held),
        example=leaf,
        names=[name],
        finish=finish,
    )
    if dtype != own:
        target.declared = own
    if dtype.kind in "iu":
        target.convert, target.elementwise = target.fitting, True
    return target


def of_holder(prefix: str, name: str, holder: Any, leaf: Any) -> LeafTarget:
    """The target for a leaf of a Module: a Weight's, or that of a stack of several layers."""
    target = of_leaf(prefix + name, leaf)
    if not is_per_layer(holder, leaf):
        return target
    target.names = [prefix + one for one in holder.spec.names(name)]
    target.name, target.layout = target.names[0], holder.spec.layout
    target.axis, target.levels = (0, len(holder.spec.spans)) if holder.spec.spans else (None, 1)
    if target.sharding is None and type(leaf) is jax.ShapeDtypeStruct:
        target.sharding = _sharding(holder, leaf)
    declared = holder.spec.dtype.np
    if declared != leaf.dtype and jax.dtypes.canonicalize_dtype(declared) == leaf.dtype:
        target.declared = declared
    return target


def _sharding(holder: Any, leaf: Any) -> Any:
    """The sharding of a Weight's leaf; one of another shape (Adafactor's, a row of the weight) is replicated."""
    where, wanted = holder.spec.leaf_sharding, holder.spec.blank()
    if not isinstance(where, NamedSharding) or tuple(wanted.shape) == tuple(leaf.shape):
        return where
    return where.update(spec=PartitionSpec())


# --- a model


def model_problems(saved: Saved, model: Module) -> list[str]:
    """Differences in quantisation encodings, which :meth:`Module.load_state_dict` does not check."""
    problems = []
    for name, weight in model.raw_state_dict().items():
        wanted = weight.quantization_encoding
        found = saved.encodings.get(name)
        if wanted is None or not wanted.is_gguf or name not in saved.names:
            continue
        if saved.is_ours and found != wanted.value:
            there = "not quantised" if found is None else f"as {found}"
            problems.append(
                f"'{name}' is quantised as {wanted.value} in the model and {there} in the checkpoint"
            )
    return problems


# --- any other tree


@dataclass(slots=True)
class Fitting:
    """The comparison of an example with a tree of a checkpoint, and the restoring from it.

    Attributes:
        saved: the tree of the checkpoint.
        cast: whether dtypes may be converted.
        strict: whether names that are only on one side are problems.
        problems: all that differs.
        values: values of leaves that are not read, by the number of the leaf.
        targets: leaves that are read, by the number of the leaf.
        used: names of the checkpoint that the example asks for.
        numbers: the numbers of the next leaves and trees.
        trees: treedef and numbers of the parts of each tree and Module in the example, by its number;
            a tree comes after its parts.
        top: number of the example itself.
    """

    saved: Saved
    cast: bool
    strict: bool
    problems: list[str] = field(default_factory=list)
    values: dict[int, Any] = field(default_factory=dict)
    targets: dict[int, LeafTarget] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    trees: dict[int, tuple[Any, list[int]]] = field(default_factory=dict)
    top: int = 0

    def compare(self, example: Any) -> None:
        """Compare an example with the checkpoint; nothing is read."""
        self.top = self._tree((), example)
        unexpected = sorted(self.saved.names - self.used)
        if self.strict and unexpected:
            self.problems.append(f"nothing in the example is called {some(unexpected)}")

    def _tree(self, way: tuple[str, ...], tree: Any) -> int:
        """Compare a tree to which the keys ``way`` lead; the result is its number."""
        flat, treedef = jax.tree.flatten_with_path(tree, is_leaf=is_module)
        numbers = []
        for keys, leaf in flat:
            path = (*way, *map(key_text, keys))
            if isinstance(leaf, Module):
                numbers.append(self._module(path, leaf))
            else:
                numbers.append(self._leaf(".".join(path or (ONLY,)), leaf))
        return self._joined(treedef, numbers)

    def _module(self, way: tuple[str, ...], module: Module) -> int:
        definition, holders = module._mx_definition()
        children, treedef = jax.tree.flatten(module, is_leaf=lambda one: one is not module)
        prefix = ".".join((*way, ""))
        numbers = []
        for name, holder, leaf in zip(definition.names, holders, children, strict=True):
            if not hasattr(leaf, "dtype") or is_key(leaf):
                numbers.append(self._tree((*way, name), leaf))
                continue
            number = next(self.numbers)
            numbers.append(number)
            self._fit(number, of_holder(prefix, name, holder, leaf))
        return self._joined(treedef, numbers)

    def _joined(self, treedef: Any, numbers: list[int]) -> int:
        """The number of the tree of these leaves and trees."""
        number = next(self.numbers)
        self.trees[number] = (treedef, numbers)
        return number

    def _leaf(self, name: str, leaf: Any) -> int:
        number = next(self.numbers)
        if isinstance(leaf, PLAIN) and not isinstance(leaf, np.generic):
            self.values[number] = self._plain(name, leaf)
        elif is_key(leaf):
            self._fit(number, self._random_key(name, leaf))
        elif hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
            self._fit(number, of_leaf(name, leaf))
        else:
            self.problems.append(f"the example's '{name}' is a {type(leaf).__name__}, not an array")
        return number

    def _plain(self, name: str, leaf: Any) -> Any:
        """The value of a leaf that is a number or text."""
        saved = self.saved
        if name in saved.plain:
            self.used.add(name)
            value = saved.plain[name]
        elif name in saved.table.entries:
            self.used.add(name)
            if saved.table.entries[name].shape != ():
                shape = list(saved.table.entries[name].shape)
                self.problems.append(
                    f"'{name}' is {type(leaf).__name__}, in the checkpoint {shape}"
                )
                return leaf
            value = saved.table.read(name)[()].item()
        else:
            return self._missing(name, leaf)
        wanted = type(plain_value(leaf))
        if type(value) is not wanted:
            kinds = wanted.__name__, type(value).__name__
            self.problems.append(f"'{name}' is of type {kinds[0]}, in the checkpoint {kinds[1]}")
        return value

    def _missing(self, name: str, leaf: Any) -> Any:
        if self.strict:
            like = closest(name, self.saved.names)
            more = f" (did you mean '{like}'?)" if like else ""
            self.problems.append(f"'{name}' is not in the checkpoint{more}")
        return leaf

    def _random_key(self, name: str, leaf: Any) -> LeafTarget:
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        impl, sharding = _impl(leaf), sharding_of(leaf)
        found = self.saved.keys.get(name)
        if found is not None and found != impl:
            self.problems.append(f"'{name}' is a random key of {impl}, in the checkpoint {found}")

        def finish(value: Any) -> Any:
            key = jax.random.wrap_key_data(value, impl=impl)
            return key if sharding is None else jax.device_put(key, sharding)

        return of_leaf(name, leaf, data, finish)

    def _fit(self, number: int, target: LeafTarget) -> None:
        """Compare a target with the checkpoint's tensors of its names."""
        saved, before = self.saved, len(self.problems)
        there = saved.table.entries
        lost = [name for name in target.names if name not in there]
        for name in target.names:
            self.used.add(name)
            entry = there.get(name)
            if entry is None:
                self._missing(name, None)
                continue
            if entry.shape != target.tensor_shape:
                shapes = list(target.tensor_shape), list(entry.shape)
                self.problems.append(
                    f"'{name}' has shape {shapes[0]}, in the checkpoint {shapes[1]}"
                )
            elif not self._converts(entry.dtype.np, target):
                types = DType.of(target.dtype), entry.dtype
                self.problems.append(
                    f"'{name}' is {types[0]}, in the checkpoint {types[1]}{_hint(*types)}"
                )
        if len({there[name].dtype for name in target.names if name in there}) > 1:
            self.problems.append(
                f"the layers of '{target.names[0]}' differ in dtype in the checkpoint"
            )
        where = sharding_of(target.example) if target.sharding is None else target.sharding
        try:
            if where is not None:
                where.shard_shape(tuple(target.example.shape))
        except ValueError:
            shape = list(target.example.shape)
            self.problems.append(
                f"'{target.name}' of shape {shape} cannot be split evenly by {where}"
            )
        if lost or len(self.problems) > before:
            self.values[number] = target.example
            return
        target.sources = found = [saved.weights[name].data() for name in target.names]
        for data in found:
            data.quantization_encoding = None  # blocks are restored as plain bytes
        self.targets[number] = target

    def _converts(self, found: Any, target: LeafTarget) -> bool:
        if found in (target.dtype, target.declared):
            return True
        return self.cast and _same_kind(DType.of(found), DType.of(target.dtype))

    @property
    def nbytes(self) -> int:
        """The bytes to read."""
        found = (data for target in self.targets.values() for data in target.sources)
        return sum(data.unread_bytes for data in found if isinstance(data, WeightData))

    def read(self) -> Any:
        """Read the tree.

        Raises:
            CheckpointError: a file cannot be read.
            OutOfMemoryError: the host or a device cannot hold the tree.
        """
        reading(self.nbytes)
        leaves = read_destinations(self.targets.values())
        self.values.update(zip(self.targets, leaves, strict=True))
        for number, (treedef, numbers) in self.trees.items():
            self.values[number] = jax.tree.unflatten(treedef, [self.values[n] for n in numbers])
        return self.values[self.top]


def _impl(leaf: Any) -> str:
    """The random number generator of a key, or of a ShapeDtypeStruct for one."""
    if isinstance(leaf, jax.Array):
        return str(jax.random.key_impl(leaf))
    return str(leaf.dtype._impl.name)


def _same_kind(a: DType, b: DType) -> bool:
    return a.is_float() and b.is_float() or a.is_integral() and b.is_integral()


def _hint(a: DType, b: DType) -> str:
    return " (cast=True converts it)" if _same_kind(a, b) else ""


def mismatch(directory: str, problems: Sequence[str]) -> CheckpointMismatchError:
    """One error for all problems."""
    text = problems[0] if len(problems) == 1 else f"{len(problems)} problems: " + some(problems, 10)
    return CheckpointMismatchError(text, path=os.fspath(directory))
