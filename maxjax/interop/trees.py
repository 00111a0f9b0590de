"""Loads checkpoints into pytrees, such as the modules of equinox, and returns their arrays under a checkpoint's names.

The names of arrays are their paths: ``layers.0.weight`` in ``eqx.nn.MLP``, whose layers have torch's
names and shapes. This module does not import equinox.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from ..dtype import DType
from ..errors import CheckpointMismatchError, UserInputError, closest, some
from ..graph.weights import FileWeights, load_weights
from ..graph.weights.given import data_of
from ..models.family import tensors as checkpoint_tensors
from ..nn.layer import Module
from .layouts import AxisLayout
from .renaming import STACKED, TWO_OF_ONE_NAME, Renaming

T = TypeVar("T")


def load(
    tree: T, weights: Any, *, rename: Any = None, cast: bool = False, strict: bool = True
) -> T:
    """Returns a pytree like ``tree`` whose arrays are replaced by the values of a checkpoint.

    Args:
        tree: equinox module, or another pytree of arrays or ``jax.ShapeDtypeStruct``; it is not changed. Leaves
            that are not arrays are kept.
        weights: path of a checkpoint in any format, a Weights cursor, a maxjax Module, or arrays by name.
        rename: table from the checkpoint's names to paths, ``{"fc.*": "layers.*"}``, with layouts where the order
            of axes differs; None as a value ignores a tensor. See ``maxjax.interop.nnx.load``.
        cast: whether to convert between float widths; otherwise dtypes must be equal.
        strict: whether arrays without a tensor, and tensors without an array, are errors.

    Shapes may differ in axes of length 1: the bias of an equinox convolution is ``[O, 1, 1]``. Arrays of 64 bits
    are NumPy arrays in the result, unless ``jax_enable_x64`` is set.

    Raises:
        UserInputError: the paths of two arrays are the same text, since keys have dots.
        CheckpointMismatchError: names, shapes or dtypes do not fit; the message lists them.
        CheckpointError: a file cannot be read.

    Example:
        >>> import jax.numpy as jnp
        >>> tree = {"fc": {"weight": jnp.zeros((2, 3))}}
        >>> load(tree, {"weight": np.ones((2, 3), np.float32)}, rename={"*": "fc.*"})["fc"]["weight"].sum()
        Array(6., dtype=float32)
    """
    if isinstance(weights, (str, bytes, os.PathLike)):
        with load_weights(os.fsdecode(weights)) as opened:
            return load(tree, opened, rename=rename, cast=cast, strict=strict)
    path = weights._path if isinstance(weights, FileWeights) else None
    if isinstance(weights, FileWeights):
        named: Mapping[str, Any] = checkpoint_tensors(weights)
    else:
        named = weights.state_dict() if isinstance(weights, Module) else weights
    arrays = _arrays(tree)
    values, problems = {}, []
    origin: dict[str, str] = {}
    renaming = Renaming(rename)
    unexpected = []
    for name, value in named.items():
        for target, change, index in renaming.routes(name):
            if index is not None:
                raise NotImplementedError(STACKED.format(target))
            if target not in arrays:
                unexpected.append(target)
                continue
            if target in origin:
                problems.append(f"'{target}' is filled by both '{origin[target]}' and '{name}'")
            origin[target] = name
            found = _fitted(data_of(name, value), change, arrays[target], cast)
            if isinstance(found, str):
                problems.append(f"'{target}' {found}")
            else:
                values[target] = found
    missing = [name for name in arrays if name not in values]
    if strict and not problems:
        if missing:
            near = closest(missing[0], unexpected)
            hint = f", did you mean '{near}'?" if near else ""
            problems.append(f"{len(missing)} missing: {some(missing)}{hint}")
        if unexpected:
            problems.append(f"{len(unexpected)} unexpected: {some(unexpected)}")
    if problems:
        raise CheckpointMismatchError("; ".join(problems), path=path)

    def filled(path: Any, leaf: Any) -> Any:
        return values.get(_name(path), leaf)

    return jax.tree.map_with_path(filled, tree)


def tensors(tree: Any, *, rename: Any = None) -> dict[str, Any]:
    """Returns the arrays of a pytree under a checkpoint's names, for ``load_state_dict`` or for saving.

    Args:
        tree: pytree of arrays.
        rename: the table that :func:`load` takes; its layouts are inverted.

    Raises:
        UserInputError: the table, or a layout or function in it, has no inverse; or two arrays that differ get
            one name, or have one path.

    Example:
        >>> import jax.numpy as jnp
        >>> list(tensors({"fc": {"weight": jnp.zeros((2, 3))}}, rename={"*": "fc.*"}))
        ['weight']
    """
    renaming, found = Renaming(rename), {}
    names: dict[str, str] = {}
    for name, leaf in _arrays(tree).items():
        origin = renaming.origin(name)
        tensor = _back(name, leaf, origin.change)
        before = found.setdefault(origin.name, tensor)
        if before is not tensor and not np.array_equal(before, tensor):
            raise UserInputError(
                f"'{names[origin.name]}' and '{name}' are both '{origin.name}' in the checkpoint, and differ"
            )
        names[origin.name] = name
    return found


def _back(name: str, leaf: Any, change: Any) -> Any:
    """Converts an array to the checkpoint's tensor."""
    if change is None:
        return leaf
    if not isinstance(change, AxisLayout):
        if change.back is None:
            raise UserInputError(
                f"'{name}': its function has no inverse: give a pair (there, back)"
            )
        return change.back(leaf)
    bound = change.of(tuple(leaf.shape))
    if bound is None or change.part[1] > 1 or change.stacks is not None:
        raise UserInputError(
            f"'{name}': the layout {change.text!r} has no inverse for one array of shape {leaf.shape}"
        )
    return bound.back((leaf,), jax.numpy)


def _fitted(data: Any, change: Any, leaf: Any, cast: bool) -> Any:
    """The array that replaces a leaf, made from a tensor; or a text that says what does not fit."""
    shape, dtype = tuple(leaf.shape), DType.of(leaf.dtype)
    if data.dtype is not dtype:
        if not (cast and data.dtype.is_float() and dtype.is_float()):
            return f"is {dtype.name}, and the tensor {data.dtype.name}"
        data = data.astype(dtype)
    array = np.asarray(data)
    if isinstance(change, AxisLayout):
        bound = change.of(shape)
        if bound is None:
            return f"has shape {shape}, which the layout {change.text!r} does not fit"
        if why := bound.misfit(array.shape):
            return f"does not fit: {why}"
        array = bound.apply(array)
    elif change is not None:
        array = np.asarray(change.there(array)).astype(dtype.np, copy=False)
    if [n for n in array.shape if n != 1] != [n for n in shape if n != 1]:
        return f"has shape {shape}, and the tensor {array.shape}"
    array = array.reshape(shape).copy()
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        return array
    return jax.device_put(array, getattr(leaf, "sharding", None))


def _arrays(tree: Any) -> dict[str, Any]:
    """The arrays of a pytree by path."""
    found: dict[str, Any] = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        if isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
            if (name := _name(path)) in found:
                raise UserInputError(TWO_OF_ONE_NAME.format(name))
            found[name] = leaf
    return found


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
