"""Models and other pytrees as named arrays, as an orbax checkpoint stores them.

A model is stored as its state dict, with the names, shapes and dtypes of Hugging Face, even if its
layers are stacked. A leaf of any other pytree is named by its key path, joined by dots; a Module
in it, for example the moments of an optimiser, again by its state dict. Values are not copied where
JAX can use their memory as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from ...errors import UserInputError
from ...nn.layer import Module
from ...storage.orbax.maxjax_metadata import Extras
from .arrays import check_names, is_key, module_arrays, own_value, storable

# Types of leaves that are not arrays: they are also written exactly, as text in the metadata.
PLAIN = (bool, int, float, complex, str, bytes)
# The name of the leaf in a tree that is a single leaf.
ONLY = "value"


@dataclass(slots=True)
class Item(Extras):
    """One tree of a checkpoint, with the leaves that orbax cannot store.

    Attributes:
        arrays: name → jax.Array, or a NumPy array for a value that only this process holds.
        nested: the tree that orbax is given: dicts with text as keys.
    """

    arrays: dict[str, Any] = field(default_factory=dict)
    nested: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Size of the arrays on the disk in bytes, for all processes."""
        return sum(math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in self.arrays.values())

    @property
    def names(self) -> list[str]:
        """The names of all leaves."""
        return [*self.arrays, *self.plain, *self.empty]

    def add(self, title: str, path: tuple[str, ...], value: Any, shown: Any) -> None:
        """Add a leaf; ``shown`` is the value that orbax is given, None for nothing."""
        name = ".".join(path)
        if name in self.arrays or name in self.plain or name in self.empty:
            raise UserInputError(
                f"{title}: two leaves would both be called '{name}', since the parts of a name are "
                "joined by dots: rename one"
            )
        if isinstance(value, PLAIN):
            self.plain[name] = value
        elif 0 in value.shape:
            self.empty[name] = str(np.dtype(value.dtype)), list(value.shape)
            shown = None
        else:
            self.arrays[name] = value
        if shown is None:
            return
        *outer, last = path
        place = self.nested
        for key in outer:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise UserInputError(f"{title}: '{name}' is inside another leaf: rename one")
        if last in place:
            raise UserInputError(f"{title}: '{name}' is both a leaf and a branch: rename one")
        place[last] = shown


def model_item(model: Module) -> Item:
    """The weights of a model as an Item.

    Raises:
        UserInputError: a weight has no value, or a dtype that orbax cannot store.
    """
    item = Item()
    for name, value, weight in module_arrays("model", model, holes=False):
        item.add("model", (name,), value, value)
        if weight.quantization_encoding is not None:
            item.encodings[name] = weight.quantization_encoding.value
    check_names("model", item.arrays)
    return item


def tree_item(title: str, tree: Any, *, copy: bool) -> Item:
    """A pytree as an Item.

    Args:
        title: name of the tree, for errors.
        tree: the pytree.
        copy: whether NumPy arrays are copied, because their owner may change them.

    Raises:
        UserInputError: a leaf cannot be saved; two leaves have the same name.
    """
    item = Item()
    _add(item, title, (), tree, copy)
    check_names(title, item.names)
    return item


def _add(item: Item, title: str, way: tuple[str, ...], tree: Any, copy: bool) -> None:
    """Add the leaves of a tree, or of one that a Module holds in place of a weight; ``way`` leads to it."""
    for keys, leaf in leaves(tree):
        path = (*way, *keys)
        if isinstance(leaf, Module):
            for name, value, weight in module_arrays(f"{title}: {'.'.join(path)}", leaf):
                inner = (*path, name)
                if not hasattr(value, "dtype") or is_key(value):
                    _add(item, title, inner, value, copy)
                    continue
                item.add(title, inner, value, value)
                if weight.quantization_encoding is not None and value.dtype == np.uint8:
                    item.encodings[".".join(inner)] = weight.quantization_encoding.value
            continue
        path = path or (ONLY,)
        value, shown = _leaf(title, ".".join(path), leaf, copy)
        item.add(title, path, value, shown)
        if is_key(leaf):
            item.keys[".".join(path)] = str(jax.random.key_impl(leaf))


def leaves(tree: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The leaves of a pytree with their key paths; a Module counts as one leaf.

    Example:
        >>> list(leaves({"a": [1, 2], "b": None}))
        [(('a', '0'), 1), (('a', '1'), 2)]
    """
    flat, _ = jax.tree.flatten_with_path(tree, is_leaf=is_module)
    for path, leaf in flat:
        yield tuple(key_text(key) for key in path), leaf


def is_module(value: Any) -> bool:
    """Whether a value is a Module."""
    return isinstance(value, Module)


def key_text(key: Any) -> str:
    """One key of a key path, as text."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def plain_value(leaf: Any) -> Any:
    """A number or text as a value of Python's own type, not of a subclass such as an IntEnum or a Completion."""
    kind = next(kind for kind in PLAIN if isinstance(leaf, kind))
    # The type's own method: a subclass may have another.
    return leaf if type(leaf) is kind else getattr(kind, f"__{kind.__name__}__")(leaf)


def _leaf(title: str, name: str, leaf: Any, copy: bool) -> tuple[Any, Any]:
    """A leaf's value for the Item, and the value that orbax is given."""
    if isinstance(leaf, np.generic):
        leaf = np.asarray(leaf)
    if isinstance(leaf, (jax.Array, np.ndarray)) and not isinstance(leaf, Tracer):
        if is_key(leaf):
            data = own_value(jax.random.key_data(leaf))
            return data, leaf if isinstance(data, jax.Array) else data
        value = np.array(leaf, order="C") if copy and isinstance(leaf, np.ndarray) else leaf
        value = own_value(storable(title, name, value))
        return value, value
    if isinstance(leaf, PLAIN):
        leaf = plain_value(leaf)
        fits = isinstance(leaf, int) and -(1 << 63) <= leaf < 1 << 63
        return leaf, leaf if fits or isinstance(leaf, (float, str)) else None
    what = "it has no value" if isinstance(leaf, jax.ShapeDtypeStruct) else type(leaf).__name__
    raise UserInputError(
        f"{title}: the leaf '{name}' cannot be saved ({what}): leaves are arrays, numbers and text"
    )
