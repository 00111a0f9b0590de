"""Floor 4. Filling a lazy Module with random values, and splitting what is trained from the rest."""

from __future__ import annotations

import fnmatch
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ..graph.weight import Weight
from .layer.module import Module

Initializer = Callable[..., jax.Array]
M = TypeVar("M", bound=Module)


def init(
    model: M, key: jax.Array, *, initializer: Callable[[str], Initializer | None] | None = None
) -> M:
    """Gives every weight that has no value one, in a single compiled program.

    Each weight is born on the sharding it was placed on (``Module.to``), drawn from a key
    made of ``key`` and its name: adding a layer does not change the others' values.

    Args:
        model: Changed in place and returned. Weights that have a value keep it.
        key: From ``jax.random.key``.
        initializer: For a weight's full name, a function of (key, shape, dtype) such as
            those of ``jax.nn.initializers``, or None for the layer's own choice
            (``Module.initializer``): matrices by their fan-in, norms one, biases zero.

    Raises:
        ValueError: A lazy weight has symbolic dimensions.
        TypeError: A lazy weight's integer type has no initializer.

    Example:
        >>> import jax
        >>> from maxjax import init, nn
        >>> from maxjax.graph import DeviceRef
        >>> model = init(nn.Linear(3, 2, "float32", DeviceRef.CPU()), jax.random.key(0))
        >>> model.weight.value.shape
        (2, 3)
    """
    plan: dict[str, tuple[Weight, Initializer]] = {}
    for name, weight in _owners(model):
        if weight[0]._is_lazy:
            plan[name] = (weight[0], _choose(name, *weight, initializer))
    shapes = {name: weight._leaf for name, (weight, _) in plan.items()}
    for name, shape in shapes.items():
        if shape is None:
            raise ValueError(
                f"weight '{name}' has symbolic dimensions {plan[name][0].shape!r}: load a value"
            )

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        return {name: fn(jax.random.fold_in(key, zlib.crc32(name.encode())), shapes[name].shape, shapes[name].dtype)
                for name, (_, fn) in plan.items()}  # fmt: skip

    where = {name: weight._sharding for name, (weight, _) in plan.items()}
    values = jax.jit(draw, out_shardings=where)(key)
    for name, value in values.items():
        weight = plan[name][0]
        weight._put(value)
        weight._source = None
        weight._finalise(name)
    return model


def _owners(model: Module) -> list[tuple[str, tuple[Weight, Module]]]:
    """Every weight below with its full name and the layer that owns it."""
    weights = model.raw_state_dict()
    owner = {}
    for _, module in model.named_modules():
        for weight in module._mx_weights.values():
            owner.setdefault(id(weight), module)
    return [(name, (weight, owner[id(weight)])) for name, weight in weights.items()]


def _choose(name: str, weight: Weight, layer: Module, initializer: Any) -> Initializer:
    chosen = initializer(name) if initializer is not None else None
    chosen = chosen or layer.initializer(weight._local_name)
    if chosen is not None:
        return chosen
    if not weight.dtype.is_float():
        raise TypeError(
            f"weight '{name}' is {weight.dtype}: random integers mean nothing; "
            "load a value, or pass an initializer"
        )
    if name.rsplit(".", 1)[-1] == "bias":
        return jax.nn.initializers.zeros
    if weight.rank < 2:
        return jax.nn.initializers.ones
    return linear_weight


def linear_weight(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """A normal matrix ``[out, in]`` of variance 1/in (LeCun et al., "Efficient BackProp", 1998)."""
    fan_in_last = jax.nn.initializers.lecun_normal(in_axis=-1, out_axis=-2)
    return fan_in_last(key, tuple(shape), dtype)


def partition(
    model: M, trainable: str | Sequence[str] | Callable[[str, Any], bool] | None = None
) -> tuple[M, M]:
    """Splits a Module into the weights to differentiate and the rest.

    Args:
        trainable: Name patterns as of the shell (``"layers.*.bias"``), or a function of
            (full name, value); None takes every weight of a floating type.

    Returns:
        Two Modules of the same kind, each with None where the other has the value:
        ``merge`` puts them together. Nothing is copied.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from maxjax import init, merge, nn, partition
        >>> from maxjax.graph import DeviceRef
        >>> model = init(nn.Linear(3, 2, "float32", DeviceRef.CPU(), has_bias=True), jax.random.key(0))
        >>> bias, rest = partition(model, "bias")
        >>> grads = jax.grad(lambda b: merge(b, rest)(jnp.ones(3)).sum())(bias)
        >>> [leaf.shape for leaf in jax.tree.leaves(grads)]
        [(2,)]
    """
    patterns = (trainable,) if isinstance(trainable, str) else trainable

    def chosen(name: str, value: Any) -> bool:
        if patterns is None:
            return jnp.issubdtype(value.dtype, jnp.floating)
        if callable(patterns):
            return bool(patterns(name, value))
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    flags = jax.tree.map_with_path(
        lambda path, v: chosen(jax.tree_util.keystr(path, simple=True), v), model
    )
    ours = jax.tree.map(lambda flag, v: v if flag else None, flags, model)
    theirs = jax.tree.map(lambda flag, v: None if flag else v, flags, model)
    return ours, theirs


def merge(first: M, second: M) -> M:
    """Puts together what :func:`partition` split.

    Raises:
        ValueError: Both halves, or neither, have a value for the same weight.
    """

    def pick(path: Any, a: Any, b: Any) -> Any:
        if (a is None) == (b is None):
            name = jax.tree_util.keystr(path, simple=True)
            raise ValueError(
                f"{'neither' if a is None else 'each'} half has a value for weight '{name}'"
            )
        return b if a is None else a

    return jax.tree.map_with_path(pick, first, second, is_leaf=lambda v: v is None)
