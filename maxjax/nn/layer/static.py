"""Static attributes of a Module: frozen at assignment, compared by content.

Attributes that are neither Weights nor Modules become part of the treedef, so they must
compare by content and must not hide arrays, which would be missing from leaves, gradients and saved checkpoints.
They are constants, frozen copies, or instances of dataclasses and namespaces, which are compared by their
fields whenever JAX takes the Module apart. Any other object that compares by identity is refused.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import hashlib
import inspect
import logging
import types
from collections import Counter
from collections.abc import Callable, Hashable
from functools import cached_property, lru_cache, partial
from operator import is_
from typing import Any, NamedTuple

import jax
import numpy as np

from ...graph.weight.weight import Weight
from .contents import HELD_BY, hidden_in, hidden_refusal, is_tracked, pytree_array
from .frozen import FrozenDict, FrozenList
from .hooks import Layer

_SCALARS = (bool, int, str, bytes, type(None), type(...))
# The largest NumPy array, in bytes, that may be a constant of a Module.
CONSTANT_BYTES = 1 << 20


class Live(tuple):
    """The key of a value that can change in place, which is compared again whenever JAX takes the Module apart."""

    __slots__ = ()


def freeze(value: Any, where: str) -> tuple[Any, Hashable]:
    """The value that a static attribute holds, and a hashable key by which its content is compared.

    Lists, dicts and arrays become frozen copies. An instance of a dataclass and a namespace are held themselves;
    if they can change, their key is a :class:`Live`.

    Args:
        where: ``Class.attribute``, for messages.

    Raises:
        TypeError: the value is or contains a Weight, a Module or a JAX array, also inside a pytree, object or
            function; it is a NumPy array of more than 1 MiB; or it compares by identity and can change.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value, (kind, value)
    if kind is float or kind is complex:
        return value, (kind, repr(value))  # repr distinguishes -0.0 from 0.0, and nan equals itself
    if (fields := _fields(kind)) is not None:
        return _freeze_fields(value, where, fields)
    if isinstance(value, np.generic):  # compare bytes: -0.0 differs from 0.0, and nan equals itself
        return value, (kind, str(value.dtype), value.tobytes())
    if isinstance(value, np.ndarray):
        return _freeze_array(value, where)
    if isinstance(value, jax.Array):
        raise TypeError(_array_refusal(where, "is an array"))
    if is_tracked(value):
        raise TypeError(
            f"{where} holds a {kind.__name__} inside a container, where it would not be found. {HELD_BY}"
        )
    if isinstance(value, (list, tuple)):
        return _freeze_sequence(value, where)
    if isinstance(value, (dict, types.MappingProxyType)):
        return _freeze_dict(value, where)
    if isinstance(value, (set, frozenset)):
        keys = _keys_of_constants(value, where, *value)
        return frozenset(value), (frozenset, frozenset(keys))
    if isinstance(value, slice):
        return value, (kind, *_keys_of_constants(value, where, value.start, value.stop, value.step))
    if isinstance(value, partial):
        parts = value.func, *value.args, *value.keywords.values()
        names = tuple(value.keywords)
        return value, (kind, names, *_keys_of_constants(value, where, *parts))
    if isinstance(owner := getattr(value, "__self__", None), Layer):
        raise TypeError(
            f"{where} is a method of a Module, which a treedef cannot hold without its weights: "
            "keep the name of the method, or a plain function"
        )
    if isinstance(value, _METHODS) and not isinstance(owner, _OWNERS):
        function = getattr(value, "__func__", value.__name__)
        return value, (kind, *_keys_of_constants(value, where, function, owner))
    return _freeze_whole(value, where)


# Methods of objects; what is a method of a module or None is a function.
_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
_OWNERS = (types.ModuleType, type(None))


def _array_refusal(where: str, what: str) -> str:
    return (
        f"{where} {what}. A Module holds arrays in Weights: "
        f"{where} = Weight(name, dtype, shape, device), then .value = array; "
        "or pass it to __call__ as an argument"
    )


def _key(*parts: Any) -> tuple[Any, ...]:
    return Live(parts) if any(type(part) is Live for part in parts) else parts


def _freeze_array(value: np.ndarray, where: str) -> tuple[Any, Hashable]:
    """A read-only copy of an array, which is compared by dtype, shape and a digest of its bytes."""
    what = ""
    if type(value) not in (np.ndarray, np.memmap):
        what = f"is a {type(value).__name__}, which cannot be a constant"
    elif value.dtype.hasobject:
        what = "is an array of Python objects"
    elif value.nbytes > CONSTANT_BYTES:
        what = (
            f"is an array of {value.nbytes:,} bytes, and a constant has at most {CONSTANT_BYTES:,}"
        )
    if what:
        raise TypeError(_array_refusal(where, what))
    held = value
    if value.flags.writeable or value.base is not None or type(value) is not np.ndarray:
        held = np.array(value, order="C", subok=False)
        held.flags.writeable = False
    digest = hashlib.sha256(held.tobytes()).digest()
    return held, (np.ndarray, str(held.dtype), held.shape, digest)


def _freeze_sequence(value: list | tuple, where: str) -> tuple[Any, Hashable]:
    pairs = [freeze(item, where) for item in value]
    items, keys = [held for held, _ in pairs], [key for _, key in pairs]
    if isinstance(value, list):
        return FrozenList(items), _key(list, *keys)
    is_same = all(map(is_, items, value))
    return value if is_same else tuple.__new__(type(value), items), _key(type(value), *keys)


def _freeze_dict(value: Any, where: str) -> tuple[Any, Hashable]:
    pairs = {name: freeze(item, where) for name, item in value.items()}
    held = FrozenDict({name: item for name, (item, _) in pairs.items()})
    factory = int if isinstance(value, Counter) else getattr(value, "default_factory", None)
    default = getattr(value, "default", None) if factory is None else _Default(factory)
    if isinstance(default, _Default):
        held.default = default
    # The key includes the order: a module may iterate over the dict.
    items = (_key(freeze(name, where)[1], key) for name, (_, key) in pairs.items())
    return held, _key(dict, freeze(held.default, where)[1], *items)


@dataclasses.dataclass(frozen=True)
class _Default:
    """Makes the frozen value of a key that is missing in a dict."""

    factory: Callable[[], Any]

    def __call__(self) -> Any:
        return freeze(self.factory(), "a value")[0]


def _keys_of_constants(value: Any, where: str, *parts: Any) -> list[Hashable]:
    """The keys of the parts of a value, which must be constants."""
    pairs = [freeze(part, where) for part in parts]
    for (held, key), part in zip(pairs, parts, strict=True):
        if held is not part or type(key) is Live:
            kind, what = type(value).__name__, type(part).__name__
            raise TypeError(
                f"{where} is a {kind} of a {what}, which can change: use constants, such as a tuple for a list"
            )
    return [key for _, key in pairs]


class _Fields(NamedTuple):
    """What is known of a dataclass or of SimpleNamespace.

    Attributes:
        names: fields of the dataclass.
        computed: attributes that are values of a cached_property.
        unread: fields that no call reads.
        frozen: whether fields cannot be assigned.
    """

    names: list[str]
    computed: set[str]
    unread: frozenset[str]
    frozen: bool


@lru_cache(maxsize=4096)
def _fields(kind: type) -> _Fields | None:
    """What is known of the fields of a class; None if its objects are not made of fields."""
    if kind is types.SimpleNamespace:
        return _Fields([], set(), frozenset(), False)
    if not dataclasses.is_dataclass(kind) or issubclass(kind, (Layer, Weight)):
        return None
    known = {name: inspect.getattr_static(kind, name) for name in dir(kind)}
    # A derived class may have a property in place of a field, which is computed and may raise any error.
    fields = [field.name for field in dataclasses.fields(kind)]
    names = [name for name in fields if not isinstance(known.get(name), property)]
    computed = {name for name, one in known.items() if isinstance(one, cached_property)}
    # A subclass without the decorator can have other attributes, which can be assigned.
    params = vars(kind).get("__dataclass_params__")
    unread = getattr(kind, "_mx_unread", frozenset())
    return _Fields(names, computed, unread, params is not None and params.frozen)


def unread_fields(kind: type) -> frozenset[str]:
    """The fields of a dataclass that no call reads, by which models are therefore not compared (``_mx_unread``)."""
    fields = _fields(kind)
    return frozenset() if fields is None else fields.unread


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of an instance of a dataclass and all its other attributes, or the attributes of a namespace."""
    fields = _fields(type(value))
    assert fields is not None
    found = {name: getattr(value, name) for name in fields.names if hasattr(value, name)}
    found.update(getattr(value, "__dict__", {}))
    for name in fields.computed & found.keys():
        del found[name]
    return found


def _freeze_fields(value: Any, where: str, fields: _Fields) -> tuple[Any, Hashable]:
    """An object that consists of fields (dataclass, namespace), which is held itself."""
    if hidden := pytree_array(value):
        raise TypeError(hidden_refusal(where, type(value), hidden))
    keys: list[Hashable] = [type(value)]
    is_frozen = fields.frozen
    for name, part in fields_of(value).items():
        if name not in fields.unread:
            held, key = freeze(part, f"{where}.{name}")
            keys += (name, key)
            is_frozen = is_frozen and held is part and type(key) is not Live
    return value, tuple(keys) if is_frozen else Live(keys)


def unshared(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of a static value in which objects that can change are copies; constants are the same objects.

    Args:
        memo: the copies that were made, by the ids of the originals.
    """
    if id(value) in memo:
        return memo[id(value)]
    new = value
    if _fields(type(value)) is not None:
        new = memo[id(value)] = copy.copy(value)
        for name, part in fields_of(value).items():
            object.__setattr__(new, name, unshared(part, memo))
    elif isinstance(value, list):
        new = copy.copy(value)
        list.__setitem__(new, slice(None), [unshared(part, memo) for part in value])
    elif isinstance(value, dict):
        new = copy.copy(value)
        dict.update(new, {name: unshared(part, memo) for name, part in value.items()})
    elif isinstance(value, tuple):
        new = tuple.__new__(type(value), [unshared(part, memo) for part in value])
    elif isinstance(value, set) or (isinstance(value, np.ndarray) and value.flags.writeable):
        new = value.copy()
    return new


# --- values that are compared as a whole ---------------------------------------------------------


def _freeze_whole(value: Any, where: str) -> tuple[Any, Hashable]:
    """A function, another constant, or a value that is compared by the ``==`` of its class."""
    kind = type(value)
    if isinstance(value, _CONSTANTS):
        return value, (kind, value)
    if hidden := hidden_in(value):
        raise TypeError(hidden_refusal(where, kind, hidden))
    # Functions that JAX, NumPy or functools has made of other functions are objects of their classes.
    library = kind.__module__.partition(".")[0]
    is_function = callable(value) and library in ("jax", "jaxlib", "numpy", "functools")
    is_constant = is_function or isinstance(value, _FUNCTIONS) or kind.__eq__ is not object.__eq__
    try:
        is_constant = is_constant and hash(value) is not None
    except Exception:  # a __hash__ of whatever class it is
        is_constant = False
    if not is_constant:
        raise TypeError(
            f"{where} is a {kind.__name__}, which can change and compares by identity: a compiled function "
            "would go on with its old attributes. Make its class a dataclass (import dataclasses; "
            "@dataclasses.dataclass), whose fields are compared, or a Module; or pass it to __call__ as an argument"
        )
    return value, (kind, value)


# They cannot change, or have no effect on results. JAX has one Mesh and one PartitionSpec of each content.
_CONSTANTS = (
    type, enum.Enum, np.dtype, types.ModuleType, types.BuiltinFunctionType, types.MethodDescriptorType,
    types.WrapperDescriptorType, logging.Logger, jax.Device, jax.sharding.Mesh, jax.sharding.PartitionSpec,
)  # fmt: skip
_FUNCTIONS = (types.FunctionType, property, classmethod, staticmethod)
