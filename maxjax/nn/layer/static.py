"""Static attributes of a Module: frozen at assignment, compared by content.

Attributes that are neither Weights nor Modules become part of the treedef, so they must be
immutable, must compare by content, and must not hide arrays, which would be missing from leaves,
gradients and saved checkpoints.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import types
from collections import Counter, UserDict, UserList, deque
from collections.abc import Hashable, Iterator
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


def freeze(value: Any, where: str) -> tuple[Any, Hashable]:
    """The frozen copy of a static attribute, and a hashable key by which its content is compared.

    Args:
        where: ``Class.attribute``, for messages.

    Raises:
        TypeError: the value is or contains a Weight, a Module or a JAX array, also inside a pytree, object or
            function; or it is a NumPy array of more than 1 MiB.
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
    if getattr(kind, "_maxjax_frozen", False):
        return _freeze_fields(value, where)
    if kind in _FREEZERS:
        return _FREEZERS[kind](value, where)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if hidden := _pytree_array(value):
            raise TypeError(_hidden_refusal(where, kind, hidden))
        return _freeze_fields(value, where)
    return _freeze_other(value, where)


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
    copy = np.array(value, order="C", subok=False)
    copy.flags.writeable = False
    digest = hashlib.sha256(copy.tobytes()).digest()
    return copy, (np.ndarray, str(copy.dtype), copy.shape, digest)


def _is_tracked(value: Any) -> bool:
    return not isinstance(value, Layer) or hasattr(type(value), "raw_state_dict")


def _freeze_sequence(value: Any, where: str) -> tuple[Any, Hashable]:
    pairs = [freeze(v, where) for v in value]
    keys = (type(value) if type(value) is not FrozenList else list, *(key for _, key in pairs))
    if isinstance(value, list):
        return FrozenList(v for v, _ in pairs), keys
    return tuple(v for v, _ in pairs), keys


def _freeze_dict(value: dict, where: str) -> tuple[Any, Hashable]:
    items = {k: freeze(v, where) for k, v in value.items()}
    # The key includes the order: a module may iterate over the dict.
    keys = (dict, *((type(k), k, key) for k, (_, key) in items.items()))
    frozen = FrozenDict({k: v for k, (v, _) in items.items()})
    default = getattr(
        value, "default" if isinstance(value, FrozenDict) else "default_factory", None
    )
    if isinstance(value, Counter):
        default = int
    if default is not None:
        frozen.default, keys = default, (*keys, freeze(default, where)[1])
    return frozen, keys


def _freeze_set(value: Any, where: str) -> tuple[Any, Hashable]:
    keys = frozenset(freeze(v, where)[1] for v in value)
    return frozenset(value), (frozenset, keys)


def _freeze_partial(value: functools.partial, where: str) -> tuple[Any, Hashable]:
    _, args = freeze(tuple(value.args), where)
    _, keywords = freeze(dict(value.keywords), where)
    _, func = freeze(value.func, where)
    return value, (functools.partial, func, args, keywords)


def _freeze_slice(value: slice, where: str) -> tuple[Any, Hashable]:
    return value, (slice, freeze((value.start, value.stop, value.step), where)[1])


def _freeze_fields(value: Any, where: str) -> tuple[Any, Hashable]:
    """A frozen copy of an object that consists of fields (dataclass, namespace)."""
    frozen = {name: freeze(v, f"{where}.{name}") for name, v in _fields(value).items()}
    base = type(value).__mro__[1] if getattr(type(value), "_maxjax_frozen", False) else type(value)
    clone = _refreeze(base, {name: v for name, (v, _) in frozen.items()})
    if hasattr(value, "__dict__"):  # it may have attributes that are not fields
        clone.__dict__.update({**vars(value), **vars(clone)})
    return clone, (base, *((name, key) for name, (_, key) in frozen.items()))


@functools.cache
def _frozen_class(cls: type) -> type:
    """A subclass of ``cls`` with the same name, whose fields cannot be assigned."""

    def refuse(self: Any, name: str, *value: Any) -> None:
        raise TypeError(
            f"a static attribute of a Module cannot be changed in place ({cls.__name__}.{name}): "
            "assign a new one, for example with dataclasses.replace"
        )

    def reduce(self: Any, protocol: Any) -> Any:
        return (_refreeze, (cls, _fields(self)))

    def new(_: type, *args: Any, **kwargs: Any) -> Any:
        return cls(*args, **kwargs)  # so that dataclasses.replace returns a mutable object

    body = {
        "__slots__": (), "__module__": cls.__module__, "__qualname__": cls.__qualname__,
        "__new__": new, "__setattr__": refuse, "__delattr__": refuse, "__reduce_ex__": reduce,
        "_maxjax_frozen": True,
    }  # fmt: skip
    if cls.__eq__ is not object.__eq__:
        # A dataclass __eq__ compares classes, and the copy must equal the original.
        body["__eq__"] = lambda self, other: (
            isinstance(other, cls) and _compared(self) == _compared(other)
        )
        body["__hash__"] = cls.__hash__
    return type(cls.__name__, (cls,), body)


def _fields(value: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(value):
        return dict(vars(value))
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}


def _compared(value: Any) -> dict[str, Any]:
    """The fields that ``==`` compares: a dataclass may leave some out (``compare=False``)."""
    left_out: set[str] = set()
    if dataclasses.is_dataclass(value):
        left_out = {f.name for f in dataclasses.fields(value) if not f.compare}
    return {name: at for name, at in _fields(value).items() if name not in left_out}


def _refreeze(cls: Any, fields: dict[str, Any]) -> Any:
    """A frozen object of the class with these fields."""
    clone = cls.__new__(_frozen_class(cls))
    for name, v in fields.items():
        object.__setattr__(clone, name, v)
    return clone


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
        keys = tuple(freeze(v, where)[1] for v in value)
        return value, (type(value), keys)
    if hidden := _hidden(value):
        raise TypeError(_hidden_refusal(where, type(value), hidden))
    try:
        hash(value)
        return value, (type(value), value)
    except TypeError:
        return value, (type(value), _Identity(value))


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


class _Identity:
    """Compares an unhashable object by identity and keeps it alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


_FREEZERS = {
    list: _freeze_sequence, FrozenList: _freeze_sequence, tuple: _freeze_sequence,
    dict: _freeze_dict, FrozenDict: _freeze_dict, set: _freeze_set, frozenset: _freeze_set,
    slice: _freeze_slice, functools.partial: _freeze_partial, types.SimpleNamespace: _freeze_fields,
}  # fmt: skip
