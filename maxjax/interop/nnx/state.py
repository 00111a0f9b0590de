"""Converts maxjax Modules to flax nnx States and nnx modules, which share the Module's buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ...dtype import DType
from ...errors import CheckpointMismatchError, UserInputError, some
from ...nn.layer import Module


class Packed(nnx.Variable):
    """A weight that is not a float: quantised blocks (``encoding`` names their encoding) or integers.

    It is not an nnx.Param, so that nnx.grad does not differentiate with respect to it.
    """


def to_state(model: Module, *, unstack: bool = False) -> nnx.State:
    """Returns the values of a Module as an nnx State, nested by the parts of their names.

    Args:
        model: Module to convert; weights without values become ``jax.ShapeDtypeStruct``.
        unstack: whether each layer of a LayerStack gets its own arrays, which are copies, under
            the names of the state dict. Otherwise a stack is one array ``[n, ...]``, under
            ``layers.*.weight``.

    Returns:
        A State with the Module's own arrays, not copies, whose elements are in the order in which the
        Module stores them. A tied weight is in the State once, under its owner's name. Floats are
        nnx.Param, other weights are :class:`Packed`.

    Raises:
        UserInputError: a weight's name is a prefix of another's.
        ValueError: ``unstack`` is set, and a weight has no value.

    Example:
        >>> import jax, maxjax
        >>> from maxjax import nn
        >>> from maxjax.graph import DeviceRef
        >>> model = maxjax.init(nn.Linear(2, 3, "float32", DeviceRef.CPU()), jax.random.key(0))
        >>> state = to_state(model)
        >>> state["weight"].get_value() is model.weight.value
        True
    """
    names, leaves, weights = _parts(model)
    encodings = {name: _encoding(weight) for name, weight in zip(names, weights, strict=True)}
    values = dict(zip(names, leaves, strict=True))
    if unstack:
        values = model.state_dict(auto_initialize=False)
        own = model.raw_state_dict()
        encodings = {name: _encoding(own[name]) for name in values}
    flat: dict[Any, Any] = {
        tuple(name.split(".")): _variable(value, encodings[name]) for name, value in values.items()
    }
    for path in flat:
        if outer := next((path[:n] for n in range(1, len(path)) if path[:n] in flat), None):
            raise UserInputError(f"'{'.'.join(outer)}' is a weight, and '{'.'.join(path)}' is inside it: "
                                 "a State cannot hold both")  # fmt: skip
    return nnx.from_flat_state(flat)


def from_state(model: Module, state: Any) -> Module:
    """Makes a Module with the structure of ``model`` and the arrays of a State, which are not copied.

    Args:
        model: Module with the structure; it needs no values, and is not changed.
        state: State from :func:`to_state`, or a tree of the same structure with other values
            (gradients, a trained State). If it was made with ``unstack=True`` the layers are
            stacked again, which copies them.

    Raises:
        CheckpointMismatchError: names, shapes or dtypes differ from the Module's.

    Example:
        >>> import maxjax
        >>> from maxjax import nn
        >>> from maxjax.graph import DeviceRef
        >>> model = maxjax.init(nn.Linear(2, 3, "float32", DeviceRef.CPU()), jax.random.key(0))
        >>> double = jax.tree.map(lambda x: x + x, to_state(model))
        >>> bool((from_state(model, double).weight == model.weight * 2).all())
        True
    """
    names, leaves, _ = _parts(model)
    values = {name: _value(one) for name, one in _flat(state)}
    treedef = jax.tree.structure(model)
    if set(values) == set(names):
        _check(names, leaves, values)
        return jax.tree.unflatten(treedef, [values[name] for name in names])
    own = set(model.raw_state_dict())
    if set(values) != own:
        lacking, beyond = sorted(set(names) - set(values)), sorted(set(values) - set(names))
        raise CheckpointMismatchError(
            f"the State does not belong to this {type(model).__name__}: "
            f"missing {some(lacking) or 'nothing'}; unexpected {some(beyond) or 'nothing'}"
        )
    new = jax.tree.unflatten(treedef, list(map(_placeholder, leaves)))
    try:
        Module.load_state_dict(new, values)
    except ValueError as error:
        raise CheckpointMismatchError(str(error).removesuffix(".")) from None
    return new


class _Wrapped(nnx.Module):
    """The nnx module that :func:`as_nnx` returns."""

    def __init__(self, model: Module):
        self.weights = nnx.data(nnx.to_pure_dict(to_state(model), lambda one: one))
        self.structure = nnx.static(jax.tree.structure(model))
        self.names = nnx.static(tuple(_parts(model)[0]))

    @property
    def model(self) -> Module:
        """The maxjax Module with the current values."""
        flat = dict(_flat(self.weights))
        return jax.tree.unflatten(self.structure, [_value(flat[name]) for name in self.names])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the Module with its current values."""
        return self.model(*args, **kwargs)


def as_nnx(model: Module) -> Any:
    """Makes an nnx module that calls a maxjax Module and shares its weights, as nnx.Params.

    The result works with ``nnx.jit``, ``nnx.grad`` and ``nnx.Optimizer``. Its attribute ``model`` is
    the maxjax Module with the current values. Its attribute ``weights`` holds the weights, nested as
    in ``to_state``.

    Example:
        >>> import maxjax
        >>> from maxjax import nn
        >>> from maxjax.graph import DeviceRef
        >>> linear = maxjax.init(nn.Linear(2, 3, "float32", DeviceRef.CPU()), jax.random.key(0))
        >>> wrapped = as_nnx(linear)
        >>> grads = nnx.grad(lambda m, x: m(x).sum())(wrapped, jnp.ones(2))
        >>> grads["weights"]["weight"].shape
        (3, 2)
    """
    return _Wrapped(model)


def _parts(model: Module) -> tuple[list[str], list[Any], list[Any]]:
    """Names, leaves and Weights of a Module, in the order of its leaves."""
    if not isinstance(model, Module):
        raise UserInputError(f"expected a maxjax Module, not {type(model).__name__}")
    definition, weights = model._mx_definition()
    return list(definition.names), jax.tree.leaves(model), list(weights)


def _encoding(weight: Any) -> str | None:
    encoding = weight.spec.encoding
    return None if encoding is None else encoding.value


def _variable(value: Any, encoding: str | None) -> nnx.Variable:
    if encoding is not None:
        return Packed(value, encoding=encoding)
    return nnx.Param(value) if jnp.issubdtype(value.dtype, jnp.floating) else Packed(value)


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(name, Variable or array) for each leaf of a State or of nested mappings."""
    if isinstance(tree, Mapping) or isinstance(tree, nnx.State):
        for key, one in tree.items():
            yield from _flat(one, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree


def _value(one: Any) -> Any:
    return one.get_value() if isinstance(one, nnx.Variable) else one


def _placeholder(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


def _check(names: list[str], leaves: list[Any], values: Mapping[str, Any]) -> None:
    wrong = [
        f"'{name}' is {_described(values[name])} and must be {_described(leaf)}"
        for name, leaf in zip(names, leaves, strict=True)
        if _described(values[name]) != _described(leaf)
    ]
    if wrong:
        raise CheckpointMismatchError(f"the State does not fit the Module: {some(wrong)}")


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{DType.of(value.dtype)} {list(shape)}"
