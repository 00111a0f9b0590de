"""Static attributes of a Module: frozen at assignment, compared by content.

Attributes that are neither Weights nor Modules become part of the treedef, so they must
compare by content and must not hide arrays, which would be missing from leaves, gradients and saved checkpoints.
They are constants, frozen copies, or instances of dataclasses and namespaces, which are compared by their
fields whenever JAX takes the Module apart.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import hashlib
import logging
import types
from collections import Counter, UserDict, UserList, deque
from collections.abc import Hashable, Iterator
from operator import is_
from typing import Any

import jax
import numpy as np

from ...graph.dim import Dim
from ...graph.value import TensorValue
from ...graph.weight.transpose import WeightTranspose
from ...graph.weight.weight import Weight
from .hooks import Layer

_SCALARS = (bool, int, str, bytes, type(None))
# The largest NumPy array, in bytes, that may be a constant of a Module.
CONSTANT_BYTES = 1 << 20


class FrozenList(list):
    """A list that is a static attribute: it cannot be changed, but the attribute can be assigned again."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "a static attribute of a Module cannot be changed in place: assign a new one, "
            "for example module.sizes = [*module.sizes, 3]"
            + (MIXED if any(map(is_item, args)) else "")
        )

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = extend = insert = pop = remove = clear = sort = reverse = _refuse  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (FrozenList, (list(self),))


class FrozenDict(dict):
    """A dict that is a static attribute: it cannot be changed, but the attribute can be assigned again.

    Attributes:
        default: function that returns the value of a key that is missing, as in a defaultdict; or None.
    """

    default: Any = None

    def __missing__(self, key: Any) -> Any:
        if self.default is None:
            raise KeyError(key)
        return freeze(self.default(), "a value")[0]

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "a static attribute of a Module cannot be changed in place: assign a new one, "
            "for example module.options = {**module.options, 'key': 3}"
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = pop = popitem = clear = setdefault = _refuse  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (FrozenDict, (dict(self),), vars(self) or None)


# JAX's functions take them as they take lists and dicts, and return those.
_plain_list: Any = lambda _, items: list(items)
_plain_dict: Any = lambda names, items: dict(zip(names, items, strict=True))
jax.tree_util.register_pytree_node(FrozenList, lambda held: (tuple(held), None), _plain_list)
jax.tree_util.register_pytree_node(
    FrozenDict, lambda held: (tuple(held.values()), tuple(held)), _plain_dict
)


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
    if isinstance(value, np.ndarray):
        return _freeze_array(value, where)
    if isinstance(value, np.generic):  # compare bytes: -0.0 differs from 0.0, and nan equals itself
        return value, (kind, str(value.dtype), value.tobytes())
    if isinstance(value, Dim):  # immutable; its class determines what it is made of
        return value, (kind, value)
    if isinstance(value, jax.Array):
        raise TypeError(_array_refusal(where, "is an array"))
    if isinstance(value, (Layer, Weight, WeightTranspose)) and _is_tracked(value):
        raise TypeError(
            f"{where} holds a {kind.__name__} inside a container, where it would not be found. {_HELD_BY}"
        )
    if kind in _FREEZERS:
        return _FREEZERS[kind](value, where)
    if _has_fields(value):
        if hidden := _pytree_array(value):
            raise TypeError(_hidden_refusal(where, kind, hidden))
        return _freeze_fields(value, where)
    return _freeze_other(value, where)


def _freeze_parts(value: Any, parts: Any, where: str, *head: Hashable) -> tuple[Any, Hashable]:
    """A value that is held itself, and its key, made of those of its parts; a Live one if a part can change."""
    parts = list(parts)
    pairs = [freeze(part, where) for part in parts]
    keys = (*head, *(key for _, key in pairs))
    can_change = any(held is not part for (held, _), part in zip(pairs, parts, strict=True))
    return value, Live(keys) if can_change else _key(keys)


def _key(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    return Live(keys) if any(type(key) is Live for key in keys) else keys


_HELD_BY = (
    "Hold Modules in a list, tuple or LayerList (for a dict: module.xs = list(d.values()); "
    "module.names = list(d)), and each Weight in an attribute of its own"
)
MIXED = (
    "; a list holds Modules or plain data, not both: give the Modules a list of their own, "
    "for example module.layers = [layer]"
)


def is_item(value: Any) -> bool:
    """Whether a list with this value is a list of Modules: the value is a Module, or a shard of a Weight."""
    if isinstance(value, Weight):
        return value.shard_idx is not None
    return isinstance(value, Layer) and _is_tracked(value)


def holds_items(value: list | tuple) -> bool | None:
    """Whether a list or tuple holds Modules, also in nested lists; None if it is not known.

    It is not known for an empty list, to which Modules may be appended later.
    """
    if not value:
        return None if type(value) is list else False
    found = [holds_items(item) if type(item) in (list, tuple) else is_item(item) for item in value]
    return True if True in found else False if False in found else None


def _array_refusal(where: str, what: str) -> str:
    return (
        f"{where} {what}. A Module holds arrays in Weights: "
        f"{where} = Weight(name, dtype, shape, device), then .value = array; "
        "or pass it to __call__ as an argument"
    )


def _freeze_array(value: np.ndarray, where: str) -> tuple[Any, Hashable]:
    """A read-only copy of an array, which is compared by dtype, shape and a digest of its bytes."""
    if type(value) not in (np.ndarray, np.memmap):
        raise TypeError(
            _array_refusal(where, f"is a {type(value).__name__}, which cannot be a constant")
        )
    if value.dtype.hasobject:
        raise TypeError(_array_refusal(where, "is an array of Python objects"))
    if value.nbytes > CONSTANT_BYTES:
        what = (
            f"is an array of {value.nbytes:,} bytes, and a constant has at most {CONSTANT_BYTES:,}"
        )
        raise TypeError(_array_refusal(where, what))
    held = value
    if value.flags.writeable or value.base is not None or type(value) is not np.ndarray:
        held = np.array(value, order="C", subok=False)
        held.flags.writeable = False
    digest = hashlib.sha256(held.tobytes()).digest()
    return held, (np.ndarray, str(held.dtype), held.shape, digest)


def _is_tracked(value: Any) -> bool:
    return not isinstance(value, Layer) or hasattr(type(value), "raw_state_dict")


def _freeze_sequence(value: Any, where: str) -> tuple[Any, Hashable]:
    if type(value) is tuple:
        return _freeze_tuple(value, where)
    pairs = [freeze(v, where) for v in value]
    return FrozenList(v for v, _ in pairs), _key((list, *(key for _, key in pairs)))


def _freeze_tuple(value: tuple[Any, ...], where: str) -> tuple[Any, Hashable]:
    pairs = [freeze(v, where) for v in value]
    keys = _key((tuple, *(key for _, key in pairs)))
    held = tuple(v for v, _ in pairs)
    return value if all(map(is_, held, value)) else held, keys


def _freeze_dict(value: dict, where: str) -> tuple[Any, Hashable]:
    items = {k: freeze(v, where) for k, v in value.items()}
    # The key includes the order: a module may iterate over the dict.
    keys = tuple((freeze(k, where)[1], key) for k, (_, key) in items.items())
    frozen = FrozenDict({k: v for k, (v, _) in items.items()})
    default = getattr(
        value, "default" if isinstance(value, FrozenDict) else "default_factory", None
    )
    if isinstance(value, Counter):
        default = int
    if default is not None:
        frozen.default, keys = default, (*keys, freeze(default, where)[1])
    is_live = any(type(key) is Live for _, key in items.values())
    return frozen, Live((dict, *keys)) if is_live else (dict, *keys)


def _freeze_proxy(value: types.MappingProxyType, where: str) -> tuple[Any, Hashable]:
    return value, Live((types.MappingProxyType, freeze(dict(value), where)[1]))


def _freeze_set(value: Any, where: str) -> tuple[Any, Hashable]:
    keys = frozenset(freeze(v, where)[1] for v in value)
    kind = Live if any(type(key) is Live for key in keys) else tuple
    return frozenset(value), kind((frozenset, keys))


def _freeze_partial(value: functools.partial, where: str) -> tuple[Any, Hashable]:
    names = tuple(value.keywords)
    parts = (value.func, *value.args, *value.keywords.values())
    return _freeze_parts(value, parts, where, functools.partial, len(value.args), names)


def _freeze_slice(value: slice, where: str) -> tuple[Any, Hashable]:
    return _freeze_parts(value, (value.start, value.stop, value.step), where, slice)


def _freeze_fields(value: Any, where: str) -> tuple[Any, Hashable]:
    """An object that consists of fields (dataclass, namespace), which is held itself."""
    kind, unread = type(value), unread_fields(type(value))
    fields = {name: v for name, v in fields_of(value).items() if name not in unread}
    pairs = {name: freeze(v, f"{where}.{name}") for name, v in fields.items()}
    keys = (kind, *((name, key) for name, (_, key) in pairs.items()))
    is_constant = _is_frozen(kind) and all(
        held is fields[name] and type(key) is not Live for name, (held, key) in pairs.items()
    )
    return value, keys if is_constant else Live(keys)


def _has_fields(value: Any) -> bool:
    kind = type(value)
    return kind is types.SimpleNamespace or dataclasses.is_dataclass(kind)


def _is_frozen(kind: Any) -> bool:
    # A subclass without the decorator can have other attributes, which can be assigned.
    return "__dataclass_params__" in vars(kind) and kind.__dataclass_params__.frozen


def unread_fields(kind: type) -> frozenset[str]:
    """The fields of a dataclass that no call reads, by which models are therefore not compared (``_mx_unread``)."""
    return getattr(kind, "_mx_unread", _NONE) if dataclasses.is_dataclass(kind) else _NONE


_NONE: frozenset[str] = frozenset()


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of an instance of a dataclass and all its other attributes, or the attributes of a namespace."""
    found = dict(getattr(value, "__dict__", {}))
    if dataclasses.is_dataclass(value):
        fields = [f.name for f in dataclasses.fields(value)]
        # Values computed from the fields, which a cached_property keeps, are no attributes of their own.
        cached = {
            n for n in found if isinstance(getattr(type(value), n, None), functools.cached_property)
        }
        # A derived class may have a property in place of a field, which is computed and may raise any error.
        computed = {n for n in fields if isinstance(getattr(type(value), n, None), property)}
        own = {
            n: getattr(value, n)
            for n in fields
            if n in found or (n not in computed and hasattr(value, n))
        }
        found = {**own, **{n: v for n, v in found.items() if n not in own and n not in cached}}
    return found


def unshared(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of a static value in which objects that can change are copies; constants are the same objects.

    Args:
        memo: the copies that were made, by the ids of the originals.
    """
    if id(value) in memo:
        return memo[id(value)]
    new = value
    if _has_fields(value):
        new = memo[id(value)] = copy.copy(value)
        for name, held in fields_of(value).items():
            object.__setattr__(new, name, unshared(held, memo))
    elif isinstance(value, list):
        new = copy.copy(value)
        list.__setitem__(new, slice(None), [unshared(held, memo) for held in value])
    elif isinstance(value, dict):
        new = copy.copy(value)
        dict.update(new, {name: unshared(held, memo) for name, held in value.items()})
    elif isinstance(value, tuple):
        items = [unshared(held, memo) for held in value]
        new = tuple.__new__(type(value), items)
    elif isinstance(value, functools.partial):
        args = [unshared(held, memo) for held in value.args]
        given = {name: unshared(held, memo) for name, held in value.keywords.items()}
        new = functools.partial(value.func, *args, **given)
    elif isinstance(value, types.MappingProxyType):
        new = types.MappingProxyType(unshared(dict(value), memo))
    elif isinstance(value, set) or (isinstance(value, np.ndarray) and value.flags.writeable):
        new = value.copy()
    return new


def _freeze_other(value: Any, where: str) -> tuple[Any, Hashable]:
    if isinstance(value, types.MethodType) and isinstance(value.__self__, Layer):
        raise TypeError(
            f"{where} is a method of a Module, which a treedef cannot hold without its weights: "
            "keep the name of the method, or a plain function"
        )
    if isinstance(value, (list, dict, set)):
        plain = next(kind for kind in (list, dict, set) if isinstance(value, kind))
        return _FREEZERS[plain](value, where)
    if isinstance(value, tuple):  # namedtuples keep their class
        return _freeze_parts(value, value, where, type(value))
    if isinstance(value, types.MethodType):
        return _freeze_parts(value, (value.__self__,), where, types.MethodType, value.__func__)
    if hidden := _hidden(value):
        raise TypeError(_hidden_refusal(where, type(value), hidden))
    if not _is_constant(value):
        raise TypeError(
            f"{where} is a {type(value).__name__}, which can change and compares by identity: a compiled function "
            "would go on with its old attributes. Make its class a dataclass (import dataclasses; "
            "@dataclasses.dataclass), whose fields are compared, or a Module; or pass it to __call__ as an argument"
        )
    return value, (type(value), value)


def _is_constant(value: Any) -> bool:
    """Whether an object cannot change, or compares by a content of its own."""
    kind = type(value)
    if kind.__hash__ is None:
        return False
    if isinstance(value, _CONSTANTS) or kind.__eq__ is not object.__eq__:
        return True
    if kind.__module__.partition(".")[0] in _CONSTANT_LIBRARIES:
        return True
    return not hasattr(value, "__dict__") and not any(
        vars(base).get("__slots__") for base in kind.__mro__
    )


_CONSTANTS = (
    type, enum.Enum, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, np.ufunc,
    property, classmethod, staticmethod, logging.Logger,
)  # fmt: skip
# Their objects are functions, devices, meshes and such.
_CONSTANT_LIBRARIES = frozenset(
    {"maxjax", "jax", "jaxlib", "numpy", "functools", "builtins", "typing"}
)


# The maximum number of values in an object that are searched for arrays; the search of larger objects stops there.
_MOST_SEARCHED = 20_000
_NEVER_SEARCHED = (
    type, enum.Enum, types.ModuleType, types.BuiltinFunctionType, str, bytes, int, float, complex, np.generic, np.dtype,
    np.ndarray, jax.sharding.Mesh, jax.sharding.Sharding, jax.Device, jax.ShapeDtypeStruct,
)  # fmt: skip


def _hidden(root: Any) -> str | None:
    """Describes the first array, Weight or Module inside an object; None if there is none.

    NumPy arrays in plain objects are constants and are allowed. Arrays of JAX or of another
    library, Weights, Modules, and all arrays of a registered pytree are not allowed.
    """
    if isinstance(root, (TensorValue, *_NEVER_SEARCHED)):
        return None  # code written for MAX stores TensorValues that it created during a call
    seen: dict[int, Any] = {}
    queue = [root]
    for value in queue:  # grows while it runs
        if (found := _array_like(value)) is not None:
            return found
        if isinstance(value, (Weight, Layer)) and _is_tracked(value):
            return f"a {type(value).__name__}"
        if (found := _pytree_array(value)) is not None:
            return found
        for inner in _inside(value):
            if id(inner) not in seen and not isinstance(inner, _NEVER_SEARCHED):
                seen[id(inner)] = inner
                queue.append(inner)
        if len(queue) > _MOST_SEARCHED:
            return None
    return None


def _array_like(value: Any) -> str | None:
    kind = type(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return None
    if (
        isinstance(value, jax.Array)
        or hasattr(kind, "__jax_array__")
        or hasattr(kind, "__dlpack__")
    ):
        return f"a {kind.__name__}"
    return None


def _pytree_array(value: Any) -> str | None:
    """The first array in a pytree that is not a plain container."""
    if isinstance(value, (list, tuple, dict, type(None))) or jax.tree_util.all_leaves([value]):
        return None
    for leaf in jax.tree.leaves(value):
        if isinstance(leaf, (np.ndarray, jax.ShapeDtypeStruct)) or _array_like(leaf) is not None:
            return f"a {type(leaf).__name__}"
    return None


def _inside(value: Any) -> Iterator[Any]:
    """The values inside a value: items, attributes, and variables in a function's closure."""
    if isinstance(value, types.FunctionType):
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # an empty cell
                pass
    if isinstance(value, types.MethodType):
        yield value.__self__
        yield value.__func__
    if isinstance(value, (dict, UserDict, types.MappingProxyType)):
        yield from value.values()
    elif isinstance(value, _CONTAINERS):
        yield from value
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield from attributes.values()
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if (inner := getattr(value, name, None)) is not None:
                yield inner


_CONTAINERS = (list, tuple, set, frozenset, deque, UserList)


def _hidden_refusal(where: str, kind: type, hidden: str) -> str:
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


_FREEZERS = {
    list: _freeze_sequence, FrozenList: _freeze_sequence, tuple: _freeze_sequence,
    dict: _freeze_dict, FrozenDict: _freeze_dict, set: _freeze_set, frozenset: _freeze_set,
    slice: _freeze_slice, functools.partial: _freeze_partial, types.SimpleNamespace: _freeze_fields,
    types.MappingProxyType: _freeze_proxy,
}  # fmt: skip
