"""Signatures: the arguments and results of an exported program, without its classes.

A program takes and returns flat lists of arrays, whose shapes and dtypes ``jax.export`` stores. A
Signature describes the tuples, lists and dicts around them. ``jax.export`` could store those too,
but neither dicts with integer keys nor the order of a dict's keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ...errors import UserInputError
from ...graph.operands import fitting
from ...graph.symbolic import naming, to_size
from ...graph.value import TensorValue, unwrap

LEAF = "leaf"
Path = tuple[Any, ...]


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


class Signature(NamedTuple):
    """The containers of arguments or results, as a file's header stores them.

    Attributes:
        tree: None, "leaf", or {"tuple": [...]}, {"list": [...]}, {"dict": [[key, ...], ...]}.
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
        found = cls(data.get("tree"), texts(field(data, "dtypes", list)))
        leaves = iter(found.dtypes)
        _restore(found.tree, leaves)
        if next(leaves, None) is not None:
            raise ValueError(_OTHER_NUMBER)
        return found

    def restore(self, leaves: Iterable[Any]) -> Any:
        """Tuples, lists and dicts around ``leaves``."""
        return _restore(self.tree, iter(leaves))

    def show(self, avals: Iterable[Any]) -> str:
        """The containers in Python's notation, around the types of these arrays."""
        return repr(self.restore(map(ArrayKind.of, avals, self.dtypes)))


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
    if isinstance(value, TensorValue):
        return LEAF, [], [unwrap(value)]
    found, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda v: v is not value)
    if len(found) == 1 and not found[0][0]:
        return LEAF, [], [value]
    keys, children = [path[0] for path, _ in found], [child for _, child in found]
    if isinstance(value, dict) or (
        not isinstance(value, (tuple, list)) and keys and not isinstance(keys[0], _NUMBERED)
    ):
        return "dict", list(map(_name, keys)), children
    return "list" if isinstance(value, list) else "tuple", list(range(len(keys))), children


_NUMBERED = (jax.tree_util.SequenceKey, jax.tree_util.FlattenedIndexKey)


def _name(key: Any) -> Any:
    return key.name if hasattr(key, "name") else getattr(key, "key", str(key))


def describe(value: Any, leaves: list[Any]) -> Any:
    """The tree of a Signature for a pytree, whose leaves are appended to ``leaves``.

    Raises:
        TypeError: a key is neither a string nor an integer, or a dict has keys of both types.
    """
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


def _restore(tree: Any, leaves: Iterator[Any]) -> Any:
    """Containers around the next leaves; ValueError for a tree that :func:`describe` does not return."""
    if tree is None:
        return None
    if tree == LEAF:
        for leaf in leaves:
            return leaf
        raise ValueError(_OTHER_NUMBER)
    kind, inner = next(iter(tree.items())) if isinstance(tree, dict) and tree else ("", None)
    if not isinstance(inner, list) or kind not in ("tuple", "list", "dict") or len(tree) > 1:
        raise ValueError(f"{tree!r:.80} is not a valid tree")
    if kind != "dict":
        children = [_restore(child, leaves) for child in inner]
        return tuple(children) if kind == "tuple" else children
    pairs = all(isinstance(p, list) and len(p) == 2 and type(p[0]) in (str, int) for p in inner)
    if not pairs or len({type(key) for key, _ in inner}) > 1:
        raise ValueError(f"{tree!r:.80} is not a valid tree")
    found = {key: _restore(child, leaves) for key, child in inner}
    if len(found) != len(inner):
        raise ValueError(f"{tree!r:.80} has a key twice")
    return found


# --- arguments ------------------------------------------------------------------------------


class Arguments:
    """Checks the arguments of a call and flattens them to the list that the program takes."""

    def __init__(self, name: str, signature: Signature, avals: Sequence[Any]):
        self.name = name
        self.kinds = list(map(ArrayKind.of, avals, signature.dtypes))
        self.dtypes = [aval.dtype for aval in avals]
        self._shown = signature.show(avals)
        self._plain = signature.restore(range(len(avals)))
        paths, self._tree = jax.tree_util.tree_flatten_with_path(self._plain)
        self._paths = {i: path for path, i in paths}
        dims = [dim for kind in self.kinds for dim in kind.shape]
        self._derived = any(isinstance(dim, str) and not dim.isidentifier() for dim in dims)

    def __call__(self, args: Path) -> list[Any]:
        leaves, tree = jax.tree.flatten(args)
        if tree != self._tree:  # other containers may fit as well
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
            found = repr(_restore(tree, map(_described, leaves)))
        except TypeError as error:
            found = f"what they are: {error}"
        keys = "".join(f"[{key!r}]" for key in path[1:])
        where = f"argument {path[0]}{keys} differs" if path else "there are more or fewer"
        return f"{self.name} takes the arguments {cut(self._shown)}, not {cut(found)}: {where}"

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


class _Text(str):
    """A string whose repr has no quotes."""

    __repr__ = str.__str__


def _described(leaf: Any) -> _Text:
    is_array = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    return _Text(ArrayKind.of(leaf) if is_array else type(leaf).__name__)


def cut(text: str, limit: int = 300) -> str:
    """A text for a message, cut to ``limit`` characters."""
    return text if len(text) <= limit else f"{text[:limit]}…"
