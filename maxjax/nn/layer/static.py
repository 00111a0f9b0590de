"""Floor 4. Static attributes of a Module: frozen at assignment, compared by content.

What a Module holds besides Weights and Modules becomes part of its treedef, so it must
not change behind JAX's back and must compare by what it says. Neighbours:
``definition.py`` puts the keys into treedefs; ``module.py`` calls :func:`freeze`.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

from ...graph.weight import Weight, WeightTranspose
from .hooks import Layer

_SCALARS = (bool, int, str, bytes, type(None))


class FrozenList(list):
    """A list kept as a static attribute: it cannot be changed, only assigned anew."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "a static attribute of a Module cannot be changed in place: assign a new one, "
            "for example module.sizes = [*module.sizes, 3]"
        )

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = extend = insert = pop = remove = clear = sort = reverse = _refuse  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (FrozenList, (list(self),))


class FrozenDict(dict):
    """A dict kept as a static attribute: it cannot be changed, only assigned anew."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "a static attribute of a Module cannot be changed in place: assign a new one, "
            "for example module.options = {**module.options, 'key': 3}"
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = pop = popitem = clear = setdefault = _refuse  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (FrozenDict, (dict(self),))


def freeze(value: Any, where: str) -> tuple[Any, Hashable]:
    """The frozen copy of a static attribute, and the key its content is compared by.

    Args:
        where: ``Class.attribute``, for messages.

    Raises:
        TypeError: It is or holds an array, a Weight or a Module.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value, (kind, value)
    if kind is float or kind is complex:
        return value, (kind, repr(value))  # repr tells -0.0 from 0.0, and nan equals itself
    if isinstance(value, (jax.Array, np.ndarray)):
        raise TypeError(
            f"{where} is an array. A Module holds arrays in Weights: "
            f"{where} = Weight(name, dtype, shape, device), then .value = array; "
            "or pass it to __call__ as an argument"
        )
    if isinstance(value, (Layer, Weight, WeightTranspose)) and _is_tracked(value):
        raise TypeError(
            f"{where} holds a {kind.__name__} inside a container, where it would not be found. "
            f"Use LayerList([...]) for modules, and one attribute for each Weight"
        )
    if getattr(kind, "_maxjax_frozen", False):
        return _freeze_fields(value, _fields(value), where)
    if kind in _FREEZERS:
        return _FREEZERS[kind](value, where)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _freeze_fields(value, _fields(value), where)
    return _freeze_other(value, where)


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
    # Order is part of it: a module may iterate over the dict.
    keys = (dict, *((type(k), k, key) for k, (_, key) in items.items()))
    return FrozenDict({k: v for k, (v, _) in items.items()}), keys


def _freeze_set(value: Any, where: str) -> tuple[Any, Hashable]:
    keys = frozenset(freeze(v, where)[1] for v in value)
    return frozenset(value), (frozenset, keys)


def _freeze_partial(value: functools.partial, where: str) -> tuple[Any, Hashable]:
    _, args = freeze(tuple(value.args), where)
    _, keywords = freeze(dict(value.keywords), where)
    _, func = freeze(value.func, where)
    return value, (functools.partial, func, args, keywords)


def _freeze_namespace(value: types.SimpleNamespace, where: str) -> tuple[Any, Hashable]:
    return _freeze_fields(value, dict(vars(value)), where)


def _freeze_fields(value: Any, fields: dict[str, Any], where: str) -> tuple[Any, Hashable]:
    """A frozen copy of an object that is its fields (dataclass, namespace)."""
    frozen = {name: freeze(v, f"{where}.{name}") for name, v in fields.items()}
    base = type(value).__mro__[1] if getattr(type(value), "_maxjax_frozen", False) else type(value)
    clone = _bare(base)
    if hasattr(value, "__dict__"):
        clone.__dict__.update(vars(value))  # what is no field, too
    for name, (v, _) in frozen.items():
        object.__setattr__(clone, name, v)
    return clone, (base, *((name, key) for name, (_, key) in frozen.items()))


@functools.cache
def _frozen_class(cls: type) -> type:
    """A subclass of ``cls`` that looks like it and whose fields cannot be assigned."""

    def refuse(self: Any, name: str, *value: Any) -> None:
        raise TypeError(
            f"a static attribute of a Module cannot be changed in place ({cls.__name__}.{name}): "
            "assign a new one, for example with dataclasses.replace"
        )

    def reduce(self: Any, protocol: Any) -> Any:
        return (_refreeze, (cls, _fields(self)))

    def new(_: type, *args: Any, **kwargs: Any) -> Any:
        return cls(*args, **kwargs)  # so that dataclasses.replace gives one that can be changed

    body = {
        "__slots__": (), "__module__": cls.__module__, "__qualname__": cls.__qualname__,
        "__new__": new, "__setattr__": refuse, "__delattr__": refuse, "__reduce_ex__": reduce,
        "_maxjax_frozen": True,
    }  # fmt: skip
    if cls.__eq__ is not object.__eq__:
        # dataclass __eq__ compares classes, and the copy must equal what it was made from.
        body["__eq__"] = lambda self, other: (
            isinstance(other, cls) and _fields(self) == _fields(other)
        )
        body["__hash__"] = cls.__hash__
    return type(cls.__name__, (cls,), body)


def _bare(cls: Any) -> Any:
    """A frozen object of the class without its fields."""
    return cls.__new__(_frozen_class(cls))


def _field_names(value: Any) -> list[str]:
    if dataclasses.is_dataclass(value):
        return [f.name for f in dataclasses.fields(value)]
    return list(vars(value))


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in _field_names(value)}


def _refreeze(cls: type, fields: dict[str, Any]) -> Any:
    clone = _bare(cls)
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
    try:
        hash(value)
        return value, (type(value), value)
    except TypeError:
        return value, (type(value), _Identity(value))


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
    functools.partial: _freeze_partial, types.SimpleNamespace: _freeze_namespace,
}  # fmt: skip
