"""``from_torch``: copies the weights of a torch module in memory, or of a state dict, into a maxjax Module.

This module does not import torch; it uses only the methods of the tensors that are passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, overload

import jax

from ..errors import UserInputError
from ..graph.weights.given import data_of, host_or_jax
from ..models import PretrainedModel, build
from ..models.weights import named_dtype
from ..nn.layer import Module
from .layouts import AxisLayout
from .renaming import STACKED, Renaming

M = TypeVar("M", bound=Module)


@overload
def from_torch(
    source: Any, model: M, *, rename: Any = None, cast: bool = False, strict: bool = True
) -> M: ...
@overload
def from_torch(
    source: Any, model: None = None, *, config: Any = None, dtype: Any = None, mesh: Any = None
) -> PretrainedModel: ...
def from_torch(
    source: Any,
    model: Any = None,
    *,
    config: Any = None,
    dtype: Any = None,
    mesh: Any = None,
    rename: Any = None,
    cast: bool = False,
    strict: bool = True,
) -> Any:
    """Copies the weights of a torch module into a maxjax Module, in place, by name; returns the Module.

    Tensors may have any dtype, and may be transposed, tied, on a GPU, or require gradients.

    Args:
        source: torch module, or its ``state_dict()``: tensors, or other arrays, by name.
        model: Module to load into, which is changed and returned. None: the model is built from the
            config of a transformers module, or from ``config``.
        config: only without ``model``: content of a ``config.json``, if ``source`` has no config.
        dtype: only without ``model``: float dtype of the weights; None keeps each tensor's dtype.
        mesh: only without ``model``: mesh over which the weights are sharded.
        rename: only with ``model``: table from names in ``source`` to the model's names,
            ``{"fc.*": "layers.*"}``, with layouts if the order of axes differs, as for
            ``maxjax.interop.nnx.load``; or a function of a name. None as a value ignores a tensor.
        cast: only with ``model``: whether to convert between float widths; otherwise dtypes must be equal.
        strict: only with ``model``: whether missing tensors, and tensors that match no weight, are errors.

    Returns:
        The Module with the weights: ``model``, or the model that was built.

    Raises:
        UserInputError: there is neither a model nor a config, arguments do not fit together, or a value is
            not an array.
        UnsupportedModelError: the config names a model that maxjax does not have.
        ValueError: names, shapes or dtypes do not match; the message lists all differences.

    Example:
        >>> import numpy as np
        >>> from maxjax import from_torch, nn
        >>> state = {"fc.weight": np.ones((2, 3), np.float32)}  # torch.nn.Linear(3, 2, bias=False).state_dict()
        >>> from_torch(state, nn.Linear(3, 2), rename={"fc.*": "*"}).weight.value.shape
        (2, 3)
    """
    source = _inside(source)
    state = source.state_dict() if callable(getattr(source, "state_dict", None)) else source
    if not isinstance(state, Mapping):
        raise UserInputError(
            f"from_torch takes a torch module or a state dict, not a {type(source).__name__}"
        )
    if model is None:
        if rename is not None or cast or not strict:
            raise UserInputError(
                "rename, cast and strict are for a model that is given: from_torch(source, model)"
            )
        return _pretrained(source, state, config, dtype, mesh)
    if not isinstance(model, Module):
        raise UserInputError(f"the model to fill is a maxjax Module, not a {type(model).__name__}")
    if config is not None or dtype is not None or mesh is not None:
        raise UserInputError(
            "config, dtype and mesh are for a model that is made here: the given one has its own"
        )
    values = state if rename is None else _renamed(state, model, Renaming(rename))
    model.load_state_dict(values, cast=cast, strict=strict)
    return model


# Classes of PyTorch that wrap a model → their attribute with the model.
_HOLDERS = {
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
}


def _inside(source: Any) -> Any:
    """The module inside wrappers such as that of torch.compile."""
    while holder := _HOLDERS.get(type(source).__name__):
        source = getattr(source, holder)
    return source


def _pretrained(source: Any, state: Mapping[str, Any], config: Any, dtype: Any, mesh: Any) -> Any:
    """Builds the model for a transformers module and loads the values."""
    if config is None:
        own = getattr(source, "config", None)
        if not callable(getattr(own, "to_dict", None)):
            raise UserInputError(
                f"cannot tell which model a {type(source).__name__} is: pass the Module to fill, "
                "from_torch(source, model), or config="
            )
        config = {**own.to_dict(), "architectures": [type(source).__name__]}  # type: ignore[union-attr]
    values = {name: data_of(name, value) for name, value in state.items()}
    kind = None if dtype is None else named_dtype("dtype", dtype)
    if kind is not None and not kind.is_float():
        raise UserInputError(f"dtype must be a float type, not {kind.name}")
    model = build(values, config, kind, stacked=False)
    if callable(getattr(model, "stack_for", None)):
        model.stack_for(mesh)  # type: ignore[attr-defined]
    if mesh is not None:
        model.to(mesh)
    model.load_state_dict(values, cast=dtype is not None)
    return model


def _renamed(state: Mapping[str, Any], model: Module, renaming: Renaming) -> dict[str, Any]:
    """The tensors under the names of the model's weights, converted by the table's layouts."""
    weights, found = model.raw_state_dict(), {}
    origin: dict[str, str] = {}
    for name, value in state.items():
        for target, change, index in renaming.routes(name):
            if index is not None:
                raise NotImplementedError(STACKED.format(target))
            if target in found:
                raise UserInputError(
                    f"'{origin[target]}' and '{name}' are both renamed to '{target}'"
                )
            origin[target], found[target] = name, value
            if change is None or target not in weights:
                continue
            array = host_or_jax(data_of(name, value))
            if isinstance(change, AxisLayout):
                bound = change.of(tuple(map(int, weights[target].shape)))
                if bound is None:
                    raise UserInputError(
                        f"the layout {change.text!r} does not fit the weight '{target}'"
                    )
                if why := bound.misfit(array.shape):
                    raise UserInputError(f"'{name}' does not fit '{target}': {why}")
                found[target] = bound.apply(array)
            else:
                # Of 64 bits JAX has none by default: their dtype is checked as that of other tensors.
                narrow = jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype
                found[target] = change.there(array if narrow else jax.numpy.asarray(array))
    return found
