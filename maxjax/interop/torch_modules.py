"""``from_torch``: the weights of a live torch module, or of a state dict, in a maxjax Module.

torch itself is not imported: its tensors come with it.
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
from .renaming import Renaming

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
    """Copies the weights of a torch module into a maxjax Module, by name.

    Values are copied, in any dtype, also of tensors that are transposed, tied, on a GPU, or that require gradients.

    Args:
        source: torch module, or its ``state_dict()``: tensors, or other arrays, by name.
        model: Module to load into, which is changed and returned. None builds the model from the
            config of a transformers module.
        config: without a model: content of a ``config.json``, if ``source`` has no config.
        dtype: without a model: float dtype of its weights; None keeps each tensor's.
        mesh: without a model: mesh over which its weights are sharded.
        rename: table of names, if those of the model differ: ``{"fc.*": "layers.*"}``, with layouts
            if the axis order differs, as for ``maxjax.interop.nnx.load``; or a function of a name.
            None as a value ignores a tensor.
        cast: whether to convert between float widths; otherwise dtypes must be equal.
        strict: whether missing tensors, and tensors that match no weight, are errors.

    Raises:
        UserInputError: there is neither a model nor a config, or arguments do not go together; a value is not an array.
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


# Classes of PyTorch that hold a model → their attribute with it.
_HOLDERS = {
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
}


def _inside(source: Any) -> Any:
    """The module that torch.compile and the like have wrapped."""
    while holder := _HOLDERS.get(type(source).__name__):
        source = getattr(source, holder)
    return source


def _pretrained(source: Any, state: Mapping[str, Any], config: Any, dtype: Any, mesh: Any) -> Any:
    """The model of a module of transformers."""
    if config is None:
        own = getattr(source, "config", None)
        if not callable(getattr(own, "to_dict", None)):
            raise UserInputError(
                f"what model a {type(source).__name__} is, is not known: pass the Module to fill, "
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
    """The tensors by the names of the model's weights."""
    weights, found = model.raw_state_dict(), {}
    origin: dict[str, str] = {}
    for name, value in state.items():
        for target, change, _ in renaming.routes(name):
            if target in found:
                raise UserInputError(
                    f"'{origin[target]}' and '{name}' are both renamed to '{target}'"
                )
            origin[target], found[target] = name, value
            if change is None or target not in weights:
                continue
            array = host_or_jax(value)
            if isinstance(change, AxisLayout):
                bound = change.of(tuple(map(int, weights[target].shape)))
                if bound is None:
                    raise UserInputError(
                        f"the layout {change.text!r} does not fit the weight '{target}'"
                    )
                found[target] = bound.apply(array)
            else:
                found[target] = change.there(jax.numpy.asarray(array))
    return found
