"""``replace``: a new model that shares all arrays with a model except the values of some weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from ...errors import UserInputError, closest, some
from ...graph.kind import as_array
from ...graph.operands import from_numpy
from ...graph.placement.arrays import put
from ...graph.weight.running import names_below
from ...kernels import QuantArray, explicit
from .definition import cache_of, flatten, unflatten
from .walk import Walk, check_module

M = TypeVar("M")


def replace(model: M, values: Mapping[str, Any]) -> M:
    """Returns a new model in which some weights have other values; the given one is not changed.

    All other arrays are shared between the two. It works under ``jax.jit`` and ``jax.grad`` too, with
    traced values, and the new model has the same treedef.

    Args:
        model: Module.
        values: new values by names of the state dict. The name of a weight in a stack of layers
            (``"model.layers.3.mlp.down_proj.weight"``) replaces that layer's slice; ``*`` instead of the
            index replaces the weights of all layers, by an array ``[L, ...]``. A tied weight may be given
            under any of its names. The value of a quantised weight is its packed bytes, as in the state
            dict, or a ``QuantArray`` of the same type.

    Raises:
        UserInputError: a name is unknown, two names are the same weight, a value has another shape or dtype
            than the weight, or a single layer is replaced in a stack without values.

    Example:
        >>> import jax, jax.numpy as jnp, maxjax
        >>> from maxjax.models import Llama, LlamaConfig
        >>> model = Llama(LlamaConfig(100, 8, 16, num_hidden_layers=3, num_attention_heads=2))
        >>> model = maxjax.init(model, jax.random.key(0))
        >>> name = "model.layers.1.mlp.down_proj.weight"
        >>> other = maxjax.replace(model, {name: jnp.zeros((8, 16))})
        >>> [bool(m.state_dict()[name].any()) for m in (model, other)]
        [True, False]
    """
    check_module(model, "replace")
    if not isinstance(values, Mapping):
        raise UserInputError(
            f"maxjax.replace takes a mapping from names to arrays, not {type(values).__name__}"
        )
    leaves, treedef = flatten(model)
    cache = cache_of(model)
    walk = Walk(model, stacked=True)
    index = {id(holder): i for i, holder in enumerate(cache.weights)}
    whole = {n: i for i, n in enumerate(cache.definition.names) if len(cache.weights[i].spec.lead)}
    # All names of tied weights, including those that are not in the state dict.
    weights = names_below(model).weights
    problems: list[str] = []
    new: dict[int, dict[int | None, tuple[str, Any]]] = {}  # leaf → number in it → (name, value)
    for name, value in values.items():
        weight = weights.get(name)
        if weight is not None:
            holder, number = walk.slot(weight)
        elif name in whole:
            holder, number = cache.weights[whole[name]], None
        else:
            problems.append(_unknown(name, [*weights, *whole], len(weights)))
            continue
        at = new.setdefault(index[id(holder)], {})
        if number in at or (at and None in (number, *at)):
            problems.append(f"'{at[next(iter(at))][0]}' and '{name}' are the same weight")
        value, problem = _fitted(name, holder, number is None and name in whole, value)
        at[number] = name, value
        problems += [problem] if problem else []
    for i, at in new.items():
        if None not in at and type(leaves[i]) is jax.ShapeDtypeStruct:
            name = next(iter(at.values()))[0]
            problems.append(f"'{name}' is in a stack that has no values yet: load it first")
    if problems:
        raise UserInputError(f"replace: {some(problems, 5)}")
    result = list(leaves)
    for i, at in new.items():
        result[i] = _put(cache.weights[i], leaves[i], at)
    return unflatten(treedef, result)


def _unknown(name: Any, names: list[str], count: int) -> str:
    like = closest(str(name), names)
    hint = f" (did you mean '{like}'?)" if like else f"; it has {count} weights, see state_dict()"
    return f"the model has no weight '{name}'{hint}"


def _fitted(name: str, holder: Any, is_whole: bool, value: Any) -> tuple[Any, str | None]:
    """The value as an array in logical order, and a description of the problem with it, or None."""
    value = from_numpy(value) if isinstance(value, np.ndarray) else as_array(value)
    packing = holder.spec.packing
    if isinstance(value, QuantArray):
        if packing is None or value.encoding != packing.value:
            return (
                value,
                f"'{name}' is {_kind(holder)}, and the value is packed as {value.encoding}",
            )
        value = value.blocks
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return value, f"the value of '{name}' is a {type(value).__name__}, not an array"
    shape = (*(holder.spec.lead if is_whole else ()), *map(int, holder.spec.dims))
    dtype = jax.dtypes.canonicalize_dtype(holder.spec.dtype.np)
    if tuple(value.shape) == shape and value.dtype == dtype:
        return value, None
    expected, found = f"{dtype}{list(shape)}", f"{value.dtype}{list(value.shape)}"
    if packing is not None:
        expected += f" (blocks of {packing.value})"
    return value, f"'{name}' is {expected}, and the value {found}"


def _kind(holder: Any) -> str:
    packing = holder.spec.packing
    return f"packed as {packing.value}" if packing is not None else holder.spec.dtype.name


def _put(holder: Any, leaf: Any, at: Mapping[int | None, tuple[str, Any]]) -> Any:
    """The new leaf of a weight or of a stack of weights."""
    if None in at:
        value = jnp.asarray(at[None][1])
        return put(holder.spec.arranged(value), holder.spec.leaf_sharding)
    arranged = holder.spec.layer.arranged
    rows = jnp.stack([arranged(jnp.asarray(value)) for _, value in at.values()])
    places = np.unravel_index(np.array(list(at), np.int32), holder.spec.lead)
    places = tuple(map(np.int32, places))
    mesh = explicit.mesh_of(leaf)
    if mesh is None:
        return put(jnp.asarray(leaf).at[places].set(rows), holder.spec.leaf_sharding)
    # Each row has the sharding of its layer.
    of_layer = explicit.entries(leaf)[len(holder.spec.lead) :]
    rows = put(
        rows, NamedSharding(holder.spec.leaf_sharding.mesh, explicit.spec_of([(), *of_layer]))
    )
    change = lambda leaf, rows: leaf.at[places].set(rows)
    return explicit.automatic(change, mesh, explicit.entries(leaf))(leaf, rows)
