"""Signatures: the arguments and results of an exported program, without its classes.

A program takes and gives flat lists of arrays. A Signature says which tuples, lists and
dicts the lists are, and an array of which type each leaf is; Arguments turns the arguments
of a call into the list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ...graph.symbolic import naming, to_size
from ...graph.value import TensorValue, unwrap

LEAF = "leaf"
Path = tuple[Any, ...]


class Kind(NamedTuple):
    """Element type and shape of an array. A text is a named size, or arithmetic over names."""

    dtype: str
    shape: tuple[int | str, ...]

    @classmethod
    def of(cls, array: Any) -> Kind:
        """Of anything with a dtype and a shape."""
        shape = tuple(n if isinstance(n, int) else str(n) for n in array.shape)
        return cls(str(array.dtype), shape)

    @classmethod
    def read(cls, data: Any) -> Kind:
        """Of what a header has; ValueError for anything else."""
        dtype, shape = field(data, "dtype", str), field(data, "shape", list)
        if not all(type(n) is str or (type(n) is int and n >= 0) for n in shape):
            raise ValueError(f"{shape!r:.80} is no shape")
        return cls(dtype, tuple(shape))

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class Signature(NamedTuple):
    """Arguments or results.

    Attributes:
        tree: None, "leaf", or {"tuple": [...]}, {"list": [...]}, {"dict": [[key, ...], ...]}.
        kinds: One for each leaf, in order.

    Example:
        >>> pair = Signature({"dict": [["x", "leaf"], ["y", None]]}, (Kind("int32", ("n",)),))
        >>> print(pair, pair.restore([3]))
        {'x': int32[n], 'y': None} {'x': 3, 'y': None}
    """

    tree: Any
    kinds: tuple[Kind, ...]

    def restore(self, leaves: Iterable[Any]) -> Any:
        """Tuples, lists and dicts around ``leaves``."""
        return _restore(self.tree, iter(leaves))

    def __str__(self) -> str:
        return show(self.tree, self.kinds)

    def json(self) -> dict[str, Any]:
        return {"tree": self.tree, "leaves": [kind._asdict() for kind in self.kinds]}

    @classmethod
    def read(cls, data: Any) -> Signature:
        """Of what a header has; ValueError for anything else."""
        kinds = tuple(map(Kind.read, field(data, "leaves", list)))
        if _count(data.get("tree")) != len(kinds):
            raise ValueError("a tree has another number of leaves than it should")
        return cls(data.get("tree"), kinds)


def field(data: Any, name: str, kind: type) -> Any:
    """A value of a JSON object; ValueError where it is not there or of another type."""
    value: Any = data.get(name) if isinstance(data, dict) else None
    if type(value) is not kind or (kind is int and value < 0):
        raise ValueError(f"'{name}' is {value!r:.80}")
    return value


def texts(data: Any) -> tuple[str, ...]:
    """A list of texts; ValueError for anything else."""
    if not isinstance(data, list) or not all(isinstance(text, str) for text in data):
        raise ValueError(f"{data!r:.80} is no list of names")
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
    if isinstance(value, (tuple, list)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return kind, list(range(len(keys))), children
    if isinstance(value, dict) or (keys and not isinstance(keys[0], _NUMBERED)):
        return "dict", list(map(_name, keys)), children
    return "tuple", list(range(len(keys))), children


_NUMBERED = (jax.tree_util.SequenceKey, jax.tree_util.FlattenedIndexKey)


def _name(key: Any) -> Any:
    return key.name if hasattr(key, "name") else getattr(key, "key", str(key))


def describe(value: Any, leaves: list[Any]) -> Any:
    """The tree of a Signature for a pytree, whose leaves are put at the end of ``leaves``.

    Raises:
        TypeError: A key is neither text nor an integer.
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
        raise TypeError(f"a key of a dict must be a text or an integer here, not {wrong[0]!r}")
    if len(set(map(type, keys))) > 1:
        raise TypeError(f"the keys of a dict must be of one type here: {keys!r:.80}")
    return {kind: [list(pair) for pair in zip(keys, inner, strict=True)]}


def opened(tree: Any) -> tuple[str | None, list[Any], list[Any]]:
    """One level of a Signature's tree, as :func:`level` has it; ValueError for what is none."""
    if tree is None or tree == LEAF:
        return tree, [], []
    kind, inner = next(iter(tree.items())) if isinstance(tree, dict) and tree else ("", None)
    if not isinstance(inner, list) or kind not in ("tuple", "list", "dict") or len(tree) > 1:
        raise ValueError(f"{tree!r:.80} is no tree")
    if kind != "dict":
        return kind, list(range(len(inner))), inner
    pairs = all(isinstance(p, list) and len(p) == 2 and type(p[0]) in (str, int) for p in inner)
    if not pairs or len({type(key) for key, _ in inner}) > 1:
        raise ValueError(f"{tree!r:.80} is no tree")
    return kind, [key for key, _ in inner], [child for _, child in inner]


def _count(tree: Any) -> int:
    kind, keys, children = opened(tree)
    if len(set(keys)) != len(keys):
        raise ValueError(f"{tree!r:.80} has a key twice")
    return 1 if kind == LEAF else sum(map(_count, children))


def _restore(tree: Any, leaves: Iterator[Any]) -> Any:
    kind, keys, children = opened(tree)
    if kind == LEAF:
        return next(leaves)
    inner = [_restore(child, leaves) for child in children]
    if kind == "dict":
        return dict(zip(keys, inner, strict=True))
    return None if kind is None else tuple(inner) if kind == "tuple" else inner


def show(tree: Any, kinds: Iterable[Any]) -> str:
    """The tree in Python's notation, with one of ``kinds`` for each leaf."""
    left = iter(kinds)
    kind, keys, children = opened(tree)
    if kind == LEAF:
        return str(next(left))
    inner = [show(child, left) for child in children]
    if kind == "dict":
        return "{" + ", ".join(f"{k!r}: {v}" for k, v in zip(keys, inner, strict=True)) + "}"
    if kind == "tuple":
        return f"({', '.join(inner)}{',' * (len(inner) == 1)})"
    return "None" if kind is None else f"[{', '.join(inner)}]"


# --- arguments ------------------------------------------------------------------------------


class Arguments:
    """From the arguments of a call to the flat list that the program takes, checked."""

    def __init__(self, name: str, signature: Signature, types: Sequence[Any]):
        self.name, self.signature = name, signature
        self.dtypes = [kind.dtype for kind in types]
        plain = self.signature.restore(range(len(types)))
        places, self._plain = jax.tree.flatten(plain)
        self._places = None if places == list(range(len(types))) else places
        dims = [dim for kind in self.signature.kinds for dim in kind.shape]
        self._derived = any(isinstance(dim, str) and not dim.isidentifier() for dim in dims)

    def __call__(self, args: Path) -> list[Any]:
        leaves, tree = jax.tree.flatten(args)
        if tree != self._plain:  # other containers may do as well
            leaves = list(self._arrange(self.signature.tree, args, (), args))
        elif self._places is not None:
            given = dict(zip(self._places, leaves, strict=True))
            leaves = [given[i] for i in range(len(given))]
        sizes: dict[str, Any] = {}
        for i, (leaf, kind) in enumerate(zip(leaves, self.signature.kinds, strict=True)):
            if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
                raise self._wrong(i, leaf, sizes)
            same = leaf.dtype == self.dtypes[i]
            if not (same or str(leaf.dtype) == kind.dtype) or not _same(leaf.shape, kind, sizes):
                raise self._wrong(i, leaf, sizes)
            if not same:
                leaves[i] = leaf.astype(self.dtypes[i])
        if self._derived:
            self._check_derived(leaves, sizes)
        return leaves

    def _arrange(self, tree: Any, value: Any, path: Path, args: Path) -> Iterator[Any]:
        kind, keys, children = level(value)
        wanted, names, inner = opened(tree)
        if kind != wanted or set(keys) != set(names):
            raise ValueError(self._differ(path, args))
        if kind == LEAF:
            yield children[0]
            return
        given = dict(zip(keys, children, strict=True))
        for name, child in zip(names, inner, strict=True):
            yield from self._arrange(child, given[name], (*path, name), args)

    def _differ(self, path: Path, args: Path) -> str:
        leaves: list[Any] = []
        try:
            found = show(describe(args, leaves), map(_described, leaves))
        except TypeError as error:
            found = f"what they are: {error}"
        where = f"{_where(path)} differs" if path else "there are more or fewer"
        return (
            f"{self.name} takes the arguments {cut(str(self.signature))}, not {cut(found)}: {where}"
        )

    def _wrong(self, i: int, leaf: Any, sizes: Mapping[str, Any]) -> ValueError:
        kind = self.signature.kinds[i]
        words = re.findall(r"\w+", str(kind))
        known = ", ".join(f"{name}={size}" for name, size in sizes.items() if name in words)
        more = f" with {known}" if known else ""
        named = any(isinstance(dim, str) for dim in kind.shape)
        least = "; named sizes are 1 or more" if named and 0 in getattr(leaf, "shape", ()) else ""
        where = _where(list(_paths(self.signature.tree))[i])
        return ValueError(
            f"{self.name}: {where} must be {kind}{more}, not {_described(leaf)}{least}"
        )

    def _check_derived(self, leaves: Sequence[Any], sizes: Mapping[str, Any]) -> None:
        """Sizes that are arithmetic over names, where those are known; jax.export has the rest."""
        for i, (leaf, kind) in enumerate(zip(leaves, self.signature.kinds, strict=True)):
            for size, dim in zip(leaf.shape, kind.shape, strict=True):
                try:
                    with naming(sizes):
                        wanted = to_size(dim)
                except (ValueError, NotImplementedError):
                    continue
                if size != wanted:
                    raise self._wrong(i, leaf, sizes)


def _same(shape: Path, kind: Kind, sizes: dict[str, Any]) -> bool:
    """Whether an array's shape is of that kind; names that are new get their sizes."""
    if shape == kind.shape:
        return True
    if len(shape) != len(kind.shape):
        return False
    for size, dim in zip(shape, kind.shape, strict=True):
        if isinstance(dim, int):
            wanted = dim
        elif dim.isidentifier():
            wanted = sizes.setdefault(dim, size)
        else:
            continue
        if size != wanted or (isinstance(size, int) and size < 1 and isinstance(dim, str)):
            return False
    return True


def _paths(tree: Any, path: Path = ()) -> Iterator[Path]:
    """The keys that lead to each leaf."""
    kind, keys, children = opened(tree)
    if kind == LEAF:
        yield path
    for key, child in zip(keys, children, strict=True):
        yield from _paths(child, (*path, key))


def _where(path: Path) -> str:
    return f"argument {path[0]}{''.join(f'[{key!r}]' for key in path[1:])}"


def _described(leaf: Any) -> str:
    is_array = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    return str(Kind.of(leaf)) if is_array else type(leaf).__name__


def cut(text: str, limit: int = 300) -> str:
    """A text that may be long, for a message."""
    return text if len(text) <= limit else f"{text[:limit]}…"
