"""What a value contains: Modules in lists and tuples, and arrays, Weights and Modules that a Module would not see."""

from __future__ import annotations

import contextlib
import itertools
import types
import weakref
from collections import UserDict, UserList, deque
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ...graph.weight.weight import Weight
from .hooks import Layer

HELD_BY = (
    "Hold Modules in a list, tuple or LayerList (for a dict: module.xs = list(d.values()); "
    "module.names = list(d)), and each Weight in an attribute of its own"
)
MIXED = (
    "; a list holds Modules or plain data, not both: give the Modules a list of their own, "
    "for example module.layers = [layer]"
)


def is_item(value: Any) -> bool:
    """Whether a list with this value is a list of Modules: the value is a Module, or a shard of a Weight."""
    return is_tracked(value) and not (isinstance(value, Weight) and value.shard_idx is None)


def is_tracked(value: Any) -> bool:
    """Whether it is a Weight or a Module; other Layers have no weights."""
    return isinstance(value, Weight) or (
        isinstance(value, Layer) and hasattr(type(value), "raw_state_dict")
    )


def holds_items(value: list | tuple) -> bool | None:
    """Whether a list or tuple holds Modules, also in nested lists; None if it is not known.

    It is not known for an empty list, to which Modules may be appended later.
    """
    if not value:
        return None if type(value) is list else False
    found = [holds_items(item) if type(item) in (list, tuple) else is_item(item) for item in value]
    return True if True in found else False if False in found else None


# The maximum number of values in an object that are searched for arrays; the search of larger objects stops there.
_MOST_SEARCHED = 20_000


# Functions without arrays, which are not searched again: an object that can change is compared often.
_SEARCHED: weakref.WeakSet[Any] = weakref.WeakSet()


def hidden_in(root: Any) -> str | None:
    """Describes the first array, Weight or Module inside an object; None if there is none.

    NumPy arrays in plain objects are constants and are allowed. Arrays of JAX or of another
    library, Weights, Modules, and all arrays of a registered pytree are not allowed.
    """
    is_function = callable(root) and type(root).__hash__ is object.__hash__
    if is_function and root in _SEARCHED:
        return None
    seen, queue = {id(root): root}, [root]
    for value in itertools.islice(queue, _MOST_SEARCHED):  # it grows meanwhile
        if isinstance(value, (np.ndarray, np.generic)):
            continue
        if is_tracked(value) or _is_array(value):
            return f"a {type(value).__name__}"
        if found := pytree_array(value):
            return found
        more = {id(inner): inner for inner in _inside(value) if id(inner) not in seen}
        seen.update(more)
        queue += more.values()
    if is_function:
        with contextlib.suppress(TypeError):  # it has no weak references
            _SEARCHED.add(root)
    return None


def _is_array(value: Any) -> bool:
    kind = type(value)
    return hasattr(kind, "__jax_array__") or hasattr(kind, "__dlpack__")


def pytree_array(value: Any) -> str | None:
    """The first array in a pytree that is not a plain container."""
    if isinstance(value, (list, tuple, dict, type(None))) or jax.tree_util.all_leaves([value]):
        return None
    kinds = (np.ndarray, jax.Array, jax.ShapeDtypeStruct)
    found = (leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, kinds) or _is_array(leaf))
    return next((f"a {type(leaf).__name__}" for leaf in found), None)


def _inside(value: Any) -> Iterator[Any]:
    """The values inside a value: items, attributes, and variables in a function's closure."""
    if isinstance(value, (type, types.ModuleType)):
        return
    if isinstance(value, types.CellType):
        with contextlib.suppress(ValueError):  # it is empty
            yield value.cell_contents
    elif isinstance(value, types.FunctionType):
        yield from (value.__closure__, value.__defaults__, value.__kwdefaults__)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, (dict, UserDict, types.MappingProxyType)):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque, UserList)):
        yield from value
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(value, name, None)


def hidden_refusal(where: str, kind: type, hidden: str) -> str:
    library = kind.__module__.partition(".")[0]
    help = {
        "flax": "For a flax nnx module write a Module with Weights and take its arrays over "
        "(maxjax.interop.nnx.from_state, to_state, as_nnx), or pass it to __call__ as an argument",
        "equinox": "Write a Module with Weights in its place, or pass it to __call__ as an argument",
    }.get(
        library,
        "Hold arrays in Weights and layers as Modules, or pass it to __call__ as an argument",
    )
    return (
        f"{where} is a {kind.__name__} and holds {hidden}, which the Module would not see: it would be missing "
        f"from leaves, gradients, state dicts and saves. {help}"
    )
