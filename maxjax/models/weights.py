"""Facts about the weights of any model: their dtypes and shardings, and whether they are loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from ..dtype import DType
from ..errors import UserInputError


def main_dtype(found: Mapping[str, Any]) -> DType | None:
    """The float dtype of most values of a checkpoint or of a model's weights; None if none are floats."""
    sizes: dict[DType, int] = {}
    for data in found.values():
        if data.dtype.is_float():
            sizes[data.dtype] = sizes.get(data.dtype, 0) + math.prod(map(int, data.shape))
    return max(sizes, key=lambda dtype: sizes[dtype], default=None)


def shardings_of(model: Any) -> Iterator[Any]:
    """The Sharding of each weight; None for a weight that has none.

    Example:
        >>> import jax.numpy as jnp
        >>> len(next(shardings_of([jnp.ones(2)])).device_set)
        1
    """
    return (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(model))


def beside(model: Any) -> AbstractContextManager[Any]:
    """A context in which new arrays are on the device of a model, whatever JAX's default device is.

    For a model that is sharded over several devices, the context does nothing.

    Example:
        >>> import jax.numpy as jnp
        >>> with beside([jnp.ones(2)]):
        ...     jnp.ones(2).device
        CpuDevice(id=0)
    """
    where = next((w for w in shardings_of(model) if w is not None), None)
    if not isinstance(where, SingleDeviceSharding):
        return nullcontext()
    return jax.default_device(next(iter(where.device_set)))


def model_facts(model: Any) -> dict[str, Any]:
    """Facts about a model that several processes compare: settings, and the weights' shapes, dtypes and shardings.

    Values are left out, since each process holds other shards of them.

    Example:
        >>> import maxjax
        >>> from maxjax.models import Llama, LlamaConfig
        >>> model = Llama(LlamaConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2))
        >>> sorted(model_facts(model))
        ['mesh', 'model', 'weights']
    """
    weights, meshes = [], {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        sharding = getattr(leaf, "sharding", None)
        mesh, spec = getattr(sharding, "mesh", None), getattr(sharding, "spec", None)
        if mesh is not None:
            devices = [device.id for device in mesh.devices.flat]
            meshes[str(mesh)] = [str(mesh), str(mesh.axis_types), devices]
        name = jax.tree_util.keystr(path)
        weights.append([name, list(leaf.shape), str(leaf.dtype), str(spec)])
    settings = f"{type(model).__name__} {getattr(model, 'config', None)}"
    # The address of a function differs between processes.
    settings = re.sub(r" at 0x[0-9a-f]+", "", settings)
    return {"model": settings, "weights": weights, "mesh": list(meshes.values())}


def set_activations(model: Any, kind: str) -> None:
    """Sets the precision of the activations that CPU kernels multiply by a model's quantised weights.

    Args:
        model: a Module.
        kind: "int8" to round activations to 8 bits in groups of 32 numbers, "float" to keep them.
    """
    for holder in model._mx_definition()[1]:
        if holder.spec.packing is not None:
            holder.declare("activations", activations=kind)


def named_dtype(option: str, dtype: Any) -> DType:
    """The DType of what a user passed as ``option``, which error messages name.

    Raises:
        UserInputError: it is not a dtype.
    """
    try:
        return DType.of(dtype)
    except (TypeError, ValueError, KeyError) as error:
        raise UserInputError(f"{option}={dtype!r} is not a dtype: {error}") from None


def named_float(option: str, dtype: Any) -> DType:
    """The float DType of what a user passed as ``option``.

    Raises:
        UserInputError: it is not a float dtype.
    """
    found = named_dtype(option, dtype)
    if not found.is_float():
        raise UserInputError(f"{option} must be a float type, not {found.name}")
    return found


def check_loaded(model: Any) -> None:
    """Checks that a model's weights are loaded.

    Raises:
        UserInputError: a weight is still a placeholder.
    """
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model)):
        raise UserInputError(
            "the model's weights are not loaded: call model.load_state_dict(weights) first"
        )
