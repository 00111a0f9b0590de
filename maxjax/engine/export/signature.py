"""Signatures: the arguments and results of an exported program, without its classes.

A program takes and returns flat lists of arrays, whose shapes and dtypes ``jax.export`` stores. A
Signature describes the tuples, lists and dicts around them. ``jax.export`` could store those too,
but neither dicts with integer keys nor the order of a dict's keys. ModelWeights describes the arrays
of a model by the names of its state dict.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...graph.operators import Operators
from ...nn.layer import Module
from ...rendering.row import counted

LEAF = "leaf"


class ArrayKind(NamedTuple):
    """The dtype and shape of an array. A string in a shape is a named size, or arithmetic over names."""

    dtype: str
    shape: tuple[int | str, ...]

    @classmethod
    def of(cls, array: Any, dtype: str = "") -> ArrayKind:
        """The kind of anything with a dtype and a shape."""
        shape = tuple(n if isinstance(n, int) else str(n) for n in array.shape)
        return cls(dtype or str(array.dtype), shape)

    def __repr__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class WeightEntry(NamedTuple):
    """A weight's entry in the header: its declared dtype, and its other names if it is tied."""

    dtype: str
    aliases: tuple[str, ...]

    @classmethod
    def read(cls, data: Any) -> WeightEntry:
        """Reads an entry of parsed JSON; ValueError for anything else."""
        return cls(field(data, "dtype", str), texts(data.get("aliases")))


class ModelWeights(NamedTuple):
    """The weights of a model by the names of its state dict, and the arrays that hold them in a program.

    Outside of the program each layer's weight has its own name, whether the layers are stacked or not.

    Attributes:
        weights: entries by name, in the order of a state dict.
        leaves: for each array, the name of its weight, or the names of the weights that are stacked in it.

    Example:
        >>> entries = {name: WeightEntry("float32", ()) for name in ("0.w", "head", "1.w")}
        >>> table = ModelWeights(entries, ("head", ("0.w", "1.w")))
        >>> table.by_name([ArrayKind("float32", (5,)), ArrayKind("float32", (2, 3))])
        {'0.w': float32[3], 'head': float32[5], '1.w': float32[3]}
    """

    weights: dict[str, WeightEntry]
    leaves: tuple[str | tuple[str, ...], ...]

    def json(self) -> dict[str, Any]:
        """The fields as :meth:`read` reads them."""
        weights = {name: entry._asdict() for name, entry in self.weights.items()}
        return {"weights": weights, "leaves": self.leaves}

    @classmethod
    def read(cls, data: Any) -> ModelWeights:
        """Reads the fields from parsed JSON; ValueError for anything else."""
        entries = field(data, "weights", dict).items()
        leaves = field(data, "leaves", list)
        found = cls(
            {name: WeightEntry.read(entry) for name, entry in entries},
            tuple(leaf if isinstance(leaf, str) else texts(leaf) for leaf in leaves),
        )
        used = [name for leaf in found.leaves for name in names_in(leaf)]
        if sorted(used) != sorted(found.weights) or () in found.leaves:
            raise ValueError("'leaves' has other names than 'weights'")
        return found

    def by_name(self, arrays: Iterable[Any]) -> dict[str, Any]:
        """The value of each weight, from the arrays of the program or their types."""
        found: dict[str, Any] = {}
        for leaf, array in zip(self.leaves, arrays, strict=True):
            names = names_in(leaf)
            values = [array] if isinstance(leaf, str) else _layers(array, len(names))
            found.update(zip(names, values, strict=True))
        return {name: found[name] for name in self.weights}


class Unquoted(str):
    """A string whose repr has no quotes."""

    __repr__ = str.__str__


def model_text(weights: ModelWeights, leaves: Any) -> Unquoted:
    """A model in a description of arguments or results."""
    return Unquoted(f"model({counted(len(weights.weights), 'weight')})")


def names_in(leaf: str | tuple[str, ...]) -> tuple[str, ...]:
    """The names of the weights in one of ``ModelWeights.leaves``."""
    return (leaf,) if isinstance(leaf, str) else leaf


def _layers(array: Any, count: int) -> list[Any]:
    """The layers of a stacked array, or of its type."""
    if isinstance(array, jax.Array):
        return list(jnp.unstack(array))
    if isinstance(array, ArrayKind):
        return [ArrayKind(array.dtype, array.shape[1:])] * count
    if isinstance(array, jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(array.shape[1:], array.dtype)] * count
    return [array] * count


def weights_of(model: Module) -> tuple[ModelWeights, list[Any]]:
    """The weights of a model, and its leaves, in which a stack of stacks has one leading axis: that of its names."""
    definition, holders = model._mx_definition()
    by_name, aliases = model._mx_names()
    known = {id(weight): name for name, weight in by_name.items()}
    others: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        others.setdefault(name, []).append(alias)
    found: dict[str, WeightEntry] = {}
    leaves: list[str | tuple[str, ...]] = []
    arrays = jax.tree.leaves(model, is_leaf=lambda value: value is not model)
    for i, (full, holder) in enumerate(zip(definition.names, holders, strict=True)):
        pairs = zip(holder.weights, holder.spec.names(full), strict=True)
        names = [known.get(id(weight), name) for weight, name in pairs]
        is_stack = bool(holder.spec.spans)
        leaves.append(tuple(names) if is_stack else names[0])
        arrays[i] = _flat(arrays[i], len(holder.spec.spans), len(names))
        dtype = declared(holder, arrays[i])
        for name in names:
            found[name] = WeightEntry(dtype, tuple(others.get(name, ())))
    order = [name for name in by_name if name in found]
    return ModelWeights({name: found[name] for name in [*order, *found]}, tuple(leaves)), arrays


def _flat(array: Any, levels: int, count: int) -> Any:
    """An array, or its type, with one leading axis in place of several."""
    if levels < 2 or not hasattr(array, "shape"):
        return array
    shape = (count, *array.shape[levels:])
    if isinstance(array, jax.Array):
        return array.reshape(shape)
    return jax.ShapeDtypeStruct(shape, array.dtype)


def declared(declaration: Any, found: Any) -> str:
    """The name of the dtype; for integers that JAX narrowed to 32 bits, the 64-bit dtype that files have."""
    name = str(getattr(found, "dtype", ""))
    if name not in ("int32", "uint32"):
        return name
    dtype = DType.of(declaration.dtype)
    return dtype.name if jax.dtypes.canonicalize_dtype(dtype.np) == found.dtype else name


class Signature(NamedTuple):
    """The containers of arguments or results, as a file's header stores them.

    Attributes:
        tree: None, "leaf", or {"tuple": [...]}, {"list": [...]}, {"dict": [[key, ...], ...]}; or {"model": …} with
            ModelWeights, of which a header has the fields.
        dtypes: declared dtype of each leaf, in order. In the program, JAX may have made 64-bit
            integers narrower.

    Example:
        >>> pair = Signature({"dict": [["x", "leaf"], ["y", None]]}, ("int64",))
        >>> pair.restore([3])
        {'x': 3, 'y': None}
    """

    tree: Any
    dtypes: tuple[str, ...]

    @classmethod
    def read(cls, data: Any) -> Signature:
        """Reads a signature of parsed JSON; ValueError for anything else."""
        tree = _changed(data.get("tree"), ModelWeights.read)
        found = cls(tree, texts(field(data, "dtypes", list)))
        leaves = iter(found.dtypes)
        _restore(found.tree, leaves, lambda weights, own: None)
        if next(leaves, None) is not None:
            raise ValueError(_OTHER_NUMBER)
        return found

    def json(self) -> dict[str, Any]:
        """The fields as :meth:`read` reads them."""
        return {"tree": _changed(self.tree, ModelWeights.json), "dtypes": self.dtypes}

    def restore(self, leaves: Iterable[Any], model: Restored = ModelWeights.by_name) -> Any:
        """Tuples, lists and dicts around ``leaves``.

        Args:
            model: function of ModelWeights and of its leaves, whose result stands for the model.
        """
        return _restore(self.tree, iter(leaves), model)

    def models(self, leaves: Iterable[Any]) -> list[tuple[ModelWeights, list[Any]]]:
        """The weights of each model among the arguments or results, with its leaves."""
        found: list[tuple[ModelWeights, list[Any]]] = []
        self.restore(leaves, lambda weights, own: found.append((weights, own)))
        return found

    def show(self, avals: Iterable[Any]) -> str:
        """The containers in Python's notation, around the types of these arrays."""
        return repr(self.restore(map(ArrayKind.of, avals, self.dtypes), model_text))


Restored = Callable[[ModelWeights, list[Any]], Any]
_OTHER_NUMBER = "a tree has the wrong number of leaves"


def field(data: Any, name: str, kind: type) -> Any:
    """A value of a JSON object; ValueError if it is missing or of another type."""
    value: Any = data.get(name) if isinstance(data, dict) else None
    if type(value) is not kind or (kind is int and value < 0):
        raise ValueError(f"'{name}' is {value!r:.80}")
    return value


def texts(data: Any) -> tuple[str, ...]:
    """A list of strings as a tuple; ValueError for anything else."""
    if not isinstance(data, list) or not all(isinstance(text, str) for text in data):
        raise ValueError(f"{data!r:.80} is not a list of strings")
    return tuple(data)


# --- trees ----------------------------------------------------------------------------------


def level(value: Any) -> tuple[str | None, list[Any], list[Any]]:
    """One level of a pytree: (None, "leaf", "tuple", "list" or "dict"; its keys; its children).

    A registered class counts as a dict of its fields, or as a tuple where they have no names.
    """
    if value is None:
        return None, [], []
    if isinstance(value, Operators):
        return LEAF, [], [value.__jax_array__()]
    found, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda v: v is not value)
    if len(found) == 1 and not found[0][0]:
        return LEAF, [], [value]
    keys, children = [path[0] for path, _ in found], [child for _, child in found]
    if isinstance(value, dict) or (
        not isinstance(value, (tuple, list)) and keys and not isinstance(keys[0], _NUMBERED)
    ):
        return "dict", list(map(_name, keys)), children
    return "list" if isinstance(value, list) else "tuple", list(range(len(keys))), children


_MODEL = "model"
_NUMBERED = (jax.tree_util.SequenceKey, jax.tree_util.FlattenedIndexKey)


def _name(key: Any) -> Any:
    return key.name if hasattr(key, "name") else getattr(key, "key", str(key))


def describe(value: Any, leaves: list[Any]) -> Any:
    """The tree of a Signature for a pytree, whose leaves are appended to ``leaves``.

    Raises:
        TypeError: a key is neither a string nor an integer, or a dict has keys of both types.
    """
    if isinstance(value, Module):
        weights, arrays = weights_of(value)
        leaves += arrays
        return {_MODEL: weights}
    kind, keys, children = level(value)
    if kind == LEAF:
        leaves += children
    if kind is None or kind == LEAF:
        return kind
    inner = [describe(child, leaves) for child in children]
    if kind != "dict":
        return {kind: inner}
    if wrong := [key for key in keys if type(key) not in (str, int)]:
        raise TypeError(f"a key of a dict must be a string or an integer here, not {wrong[0]!r}")
    if len(set(map(type, keys))) > 1:
        raise TypeError(f"the keys of a dict must be of one type here: {keys!r:.80}")
    return {kind: [list(pair) for pair in zip(keys, inner, strict=True)]}


def _changed(tree: Any, change: Callable[[Any], Any]) -> Any:
    """A tree, in its own form or as parsed JSON, with each model's weights changed."""
    if isinstance(tree, list):
        return [_changed(child, change) for child in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        kind: change(inner) if kind == _MODEL else _changed(inner, change)
        for kind, inner in tree.items()
    }


def _restore(tree: Any, leaves: Iterator[Any], model: Restored) -> Any:
    """Containers around the next leaves; ValueError for a tree that :func:`describe` does not return."""
    if tree is None:
        return None
    if tree == LEAF:
        return _take(leaves, 1)[0]
    kind, inner = next(iter(tree.items())) if isinstance(tree, dict) and tree else ("", None)
    if isinstance(inner, ModelWeights) and len(tree) == 1:
        return model(inner, _take(leaves, len(inner.leaves)))
    if not isinstance(inner, list) or kind not in ("tuple", "list", "dict") or len(tree) > 1:
        raise ValueError(f"{tree!r:.80} is not a valid tree")
    if kind != "dict":
        children = [_restore(child, leaves, model) for child in inner]
        return tuple(children) if kind == "tuple" else children
    pairs = all(isinstance(p, list) and len(p) == 2 and type(p[0]) in (str, int) for p in inner)
    if not pairs or len({type(key) for key, _ in inner}) > 1:
        raise ValueError(f"{tree!r:.80} is not a valid tree")
    found = {key: _restore(child, leaves, model) for key, child in inner}
    if len(found) != len(inner):
        raise ValueError(f"{tree!r:.80} has a key twice")
    return found


def _take(leaves: Iterator[Any], count: int) -> list[Any]:
    found = list(itertools.islice(leaves, count))
    if len(found) < count:
        raise ValueError(_OTHER_NUMBER)
    return found
