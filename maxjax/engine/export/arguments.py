"""Arguments of a call of an exported program, as the flat list of arrays that the program takes.

``Binder`` finds the arrays of a model by the names of its weights, reads and converts them, and stacks them where
the program has a stack. ``Arguments`` checks all arguments and flattens them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ...dtype import native
from ...errors import CheckpointError, CheckpointMismatchError, UserInputError, closest
from ...graph.device import DeviceRef
from ...graph.kind import as_array
from ...graph.operands import fitting
from ...graph.symbolic import naming, to_dim, to_size
from ...graph.weight.weight import Weight
from ...graph.weights import FileWeights, WeightData
from ...graph.weights.same import same_content
from ...nn.layer import Module
from ...nn.layer.load.fit import Fit, fit, is_on_device
from ...nn.layer.load.stacks import read
from ...rendering.row import short
from .signature import (
    LEAF,
    ArrayKind,
    ModelWeights,
    Signature,
    Unquoted,
    WeightEntry,
    describe,
    level,
    model_text,
    names_in,
    weights_of,
)

Path = tuple[Any, ...]
ModelArrays = Mapping[str, Any] | FileWeights | Module


# --- models ---------------------------------------------------------------------------------


class Binder:
    """Makes the arrays that a program takes for a model from values by name.

    Args:
        weights: the model's weights.
        avals: types of the arrays.

    Attributes:
        types: shapes and dtypes of the weights by name, each a ``jax.ShapeDtypeStruct``.
    """

    def __init__(self, weights: ModelWeights, avals: Sequence[Any]):
        self._weights = weights
        self._avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        self.types = weights.by_name(self._avals)
        self._known = [n for name, e in weights.weights.items() for n in (name, *e.aliases)]

    def identity(self, arrays: ModelArrays) -> tuple[Any, list[Any]]:
        """What identifies these values: what they are in, and the objects."""
        if isinstance(arrays, FileWeights):
            return arrays.name, [arrays._family]
        if isinstance(arrays, Module):
            return jax.tree.structure(arrays), jax.tree.leaves(arrays)
        if not isinstance(arrays, Mapping):
            raise TypeError(
                "weights come as a mapping from names to arrays, as model.state_dict(), as a Module or as a cursor of "
                f"load_weights, not {type(arrays).__name__}"
            )
        found = [_array(arrays.get(name)) for name in self._known]
        return None, [_ABSENT if value is None else value for value in found]

    def values(self, arrays: ModelArrays, what: str) -> list[Any]:
        """The arrays that the program takes: checked, read, and put on the device.

        Args:
            what: what has the weights, for messages.

        Raises:
            ValueError: weights are missing, or have another shape or dtype; the message lists all of them.
        """
        traced = any(isinstance(value, Tracer) for value in self.identity(arrays)[1])
        # Inside another trace, arrays that are not traced are computed now and only once.
        with contextlib.nullcontext() if traced else jax.ensure_compile_time_eval():
            if isinstance(arrays, Module):
                weights, leaves = weights_of(arrays)
                if weights.leaves == self._weights.leaves and all(map(_is, leaves, self._avals)):
                    return leaves
                arrays = _by_name(weights, leaves)
            if not isinstance(arrays, FileWeights):
                return _place(self._weights, self._fits(arrays, what))
            try:
                return _place(self._weights, self._fits(dict(arrays._named_data()), what))
            except CheckpointError:
                raise
            except ValueError as error:
                raise CheckpointMismatchError(str(error), path=arrays._path) from None

    def _fits(self, source: Mapping[str, Any], what: str) -> dict[str, Fit | jax.Array]:
        """A Fit for each weight, or the array if it is right as it is; or one error that lists all that do not fit."""
        fits: dict[str, Fit | jax.Array] = {}
        missing = []
        problems: list[str] = []
        for name in (name for leaf in self._weights.leaves for name in names_in(leaf)):
            entry = self._weights.weights[name]
            given = {key: _array(source.get(key)) for key in (name, *entry.aliases)}
            given = {key: value for key, value in given.items() if value is not None}
            if not given:
                missing.append(name)
                continue
            value, declared = next(iter(given.values())), self.types[name]
            found = value if _is(value, declared) else _fit(name, entry, declared, value)
            if isinstance(found, str):
                problems.append(found)
            else:
                fits[name] = found
            problems += _different(given)
        if missing:
            problems.append(f"Missing required weights: {', '.join(missing)}")
            others = [str(key) for key in source if key not in self._known]
            if like := closest(missing[0], others):
                problems.append(f"For '{missing[0]}', did you mean '{like}'?")
        if problems:
            raise ValueError(f"the weights do not fit {what}: {'; '.join(problems)}")
        return fits


_ABSENT = object()


def _is(array: Any, kind: jax.ShapeDtypeStruct) -> bool:
    """Whether a value is an array of this type."""
    is_array = isinstance(array, jax.Array) and array.dtype == kind.dtype
    return is_array and array.shape == kind.shape


def _by_name(weights: ModelWeights, leaves: Sequence[Any]) -> dict[str, Any]:
    """The values of a Module's weights by all their names, without those that have no value."""
    values = weights.by_name(leaves)
    return {
        name: values[owner]
        for owner, entry in weights.weights.items()
        for name in (owner, *entry.aliases)
        if not isinstance(values[owner], jax.ShapeDtypeStruct)
    }


def _array(value: Any) -> Any:
    """The array in a mapping's value; None if there is none, as in a Weight that is not filled."""
    if isinstance(value, Weight) and value.is_missing:
        return None
    return as_array(value)


def _fit(name: str, entry: WeightEntry, declared: jax.ShapeDtypeStruct, value: Any) -> Fit | str:
    """The Fit of a value, as in ``load_state_dict`` but also for traced arrays, or the problem."""
    dtype, shape = declared.dtype, _at(declared.shape, getattr(value, "shape", ()))
    if isinstance(value, (np.ndarray, np.generic)):
        value = native(np.asarray(value))
    if isinstance(value, (jax.Array, np.ndarray)):
        try:
            value = WeightData(value, name, value.dtype, value.shape)
        except (TypeError, ValueError) as error:
            return f"the value of weight '{name}': {error}"
    weight = Weight(name.rpartition(".")[2], dtype, shape, DeviceRef.CPU())
    # 64-bit integers are cast where JAX uses 32 bits, if the model declared 64.
    wide = str(getattr(value, "dtype", "")).rpartition(".")[2] == entry.dtype != str(dtype)
    found = fit(name, weight, value, override=False, alignment=1, cast=wide)
    if isinstance(found, Fit) and tuple(map(int, found.dims)) != shape:  # bytes may be packed
        actual = tuple(map(int, found.dims))
        return f"weight '{name}' had different shape (expected={shape}, actual={actual})"
    return found if isinstance(found, Fit) else found.rstrip(".")


def _at(shape: Sequence[Any], given: Sequence[Any]) -> tuple[Any, ...]:
    """A shape with the sizes of a value in place of named ones, which are compared when all arguments are known."""
    if len(shape) != len(given):
        return tuple(map(to_dim, shape))
    pairs = zip(shape, given, strict=True)
    return tuple(size if isinstance(size, int) else actual for size, actual in pairs)


def _different(given: Mapping[str, Any]) -> Iterator[str]:
    """A problem for each name of a tied weight whose value differs from the first one's."""
    (owner, first), *others = given.items()
    for key, other in others:
        traced = isinstance(first, Tracer) or isinstance(other, Tracer)
        if first is not other and (traced or not same_content(first, other)):
            yield f"'{owner}' and '{key}' are one tied weight, but their values differ"


def _place(weights: ModelWeights, fits: Mapping[str, Fit | jax.Array]) -> list[Any]:
    """Reads and converts the values and puts them on the device; one array for each leaf."""
    stacked: dict[int, tuple[None, list[Fit]]] = {}
    single: list[Fit] = []
    for i, leaf in enumerate(weights.leaves):
        group = [fits[name] for name in names_in(leaf)]
        left = [one for one in group if isinstance(one, Fit)]
        if isinstance(leaf, str) or len(left) < len(group) or any(map(is_on_device, left)):
            single += left
        else:
            stacked[i] = None, left
    arrays, stacks = map(iter, read(single, list(stacked.values())))
    values = []
    for i, leaf in enumerate(weights.leaves):
        if i in stacked:
            values.append(next(stacks))
            continue
        group = [fits[name] for name in names_in(leaf)]
        found = [next(arrays) if isinstance(one, Fit) else one for one in group]
        values.append(found[0] if isinstance(leaf, str) else jnp.stack(found))
    return values


# --- all arguments --------------------------------------------------------------------------


class _ModelPlace:
    """A model among the arguments, in their tree: the Binder of its arrays."""

    def __init__(self, weights: ModelWeights, avals: Sequence[Any]):
        self.binder = Binder(weights, avals)


class Arguments:
    """Checks the arguments of a call and flattens them to the list that the program takes."""

    def __init__(self, name: str, signature: Signature, avals: Sequence[Any]):
        self.name = name
        self.kinds = list(map(ArrayKind.of, avals, signature.dtypes))
        self.dtypes = [aval.dtype for aval in avals]
        self._shown = signature.show(avals)
        # A leaf of the tree is an array's position, or a model.
        numbers = range(len(avals))
        self._plain = signature.restore(
            numbers, lambda weights, at: _ModelPlace(weights, [avals[i] for i in at])
        )
        flat = signature.restore(numbers, lambda weights, at: at)
        paths, tree = jax.tree_util.tree_flatten_with_path(flat)
        self._tree = None if signature.models(numbers) else tree
        self._paths = {i: path for path, i in paths}
        dims = [dim for kind in self.kinds for dim in kind.shape]
        self._derived = any(isinstance(dim, str) and not dim.isidentifier() for dim in dims)

    def __call__(self, args: Path) -> list[Any]:
        leaves, tree = (None, None) if self._tree is None else jax.tree.flatten(args)
        if leaves is None or tree != self._tree:  # other containers may fit as well
            leaves = jax.tree.leaves(self._arrange(self._plain, args, (), args))
        given = dict(zip(self._paths, leaves, strict=True))
        leaves = [given[i] for i in range(len(given))]
        sizes: dict[str, Any] = {}
        for i, (leaf, kind) in enumerate(zip(leaves, self.kinds, strict=True)):
            if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
                raise self._wrong(i, leaf, sizes)
            same = leaf.dtype == self.dtypes[i]
            if not (same or str(leaf.dtype) == kind.dtype) or not _same(leaf.shape, kind, sizes):
                raise self._wrong(i, leaf, sizes)
            if not same:
                leaf = leaf if isinstance(leaf, jax.Array) else fitting(np.asarray(leaf))
                leaves[i] = leaf.astype(self.dtypes[i])
        if self._derived:
            self._check_derived(leaves, sizes)
        return leaves

    def _arrange(self, plain: Any, value: Any, path: Path, args: Path) -> Any:
        """The leaves of ``value`` in the containers of ``plain``; ValueError if they do not fit."""
        if isinstance(plain, _ModelPlace):
            if not isinstance(value, (Mapping, FileWeights, Module)):
                raise UserInputError(self._differ(path, args))
            return plain.binder.values(value, f"{_argument(path)} of the exported {self.name}")
        expected, names, inner = level(plain)
        kind, keys, children = level(value)
        if kind != expected or set(keys) != set(names):
            raise UserInputError(self._differ(path, args))
        if kind == LEAF:
            return children[0]
        given = dict(zip(keys, children, strict=True))
        pairs = zip(names, inner, strict=True)
        found = {n: self._arrange(child, given[n], (*path, n), args) for n, child in pairs}
        return found if kind == "dict" else None if kind is None else type(plain)(found.values())

    def _differ(self, path: Path, args: Path) -> str:
        leaves: list[Any] = []
        try:
            tree = describe(args, leaves)
            found = repr(Signature(tree, ()).restore(map(_described, leaves), model_text))
        except TypeError as error:
            found = f"what they are: {error}"
        where = f"{_argument(path)} differs" if path else "there are more or fewer"
        return f"{self.name} takes the arguments {short(self._shown, 300)}, not {short(found, 300)}: {where}"

    def _wrong(self, i: int, leaf: Any, sizes: Mapping[str, Any]) -> ValueError:
        kind = self.kinds[i]
        words = re.findall(r"\w+", repr(kind))
        known = ", ".join(f"{name}={size}" for name, size in sizes.items() if name in words)
        more = f" with {known}" if known else ""
        named = any(isinstance(dim, str) for dim in kind.shape)
        least = "; named sizes are 1 or more" if named and 0 in getattr(leaf, "shape", ()) else ""
        first, *keys = self._paths[i]
        return UserInputError(
            f"{self.name}: argument {first.idx}{jax.tree_util.keystr(tuple(keys))} must be "
            f"{kind}{more}, not {_described(leaf)}{least}"
        )

    def _check_derived(self, leaves: Sequence[Any], sizes: dict[str, Any]) -> None:
        """Checks sizes that are arithmetic over known names; jax.export checks the others."""
        for i, (leaf, kind) in enumerate(zip(leaves, self.kinds, strict=True)):
            for size, dim in zip(leaf.shape, kind.shape, strict=True):
                try:
                    with naming(sizes):
                        expected = to_size(dim)
                except (ValueError, NotImplementedError):
                    continue
                if size != expected:
                    raise self._wrong(i, leaf, sizes)


def _same(shape: Path, kind: ArrayKind, sizes: dict[str, Any]) -> bool:
    """Whether a shape matches ``kind``; new names are added to ``sizes``."""
    if len(shape) != len(kind.shape):
        return False
    for size, dim in zip(shape, kind.shape, strict=True):
        if isinstance(dim, int):
            expected = dim
        elif dim.isidentifier():
            expected = sizes.setdefault(dim, size)
        else:
            continue
        if size != expected or (isinstance(size, int) and size < 1 and isinstance(dim, str)):
            return False
    return True


def _argument(path: Path) -> str:
    """An argument's place, for messages."""
    return f"argument {path[0]}" + "".join(f"[{key!r}]" for key in path[1:])


def _described(leaf: Any) -> ArrayKind | Unquoted:
    is_array = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    return ArrayKind.of(leaf) if is_array else Unquoted(type(leaf).__name__)
