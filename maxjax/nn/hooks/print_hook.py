"""PrintHook: prints the inputs and outputs of every layer."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from jax.core import Tracer

from ..layer import hooks
from ..layer.hooks import Layer, add_layer_hook
from ..layer.module import recursive_named_layers

_LOG = logging.getLogger("maxjax")


class PrintHook:
    """Prints the input and output arrays of each layer, under names like ``model.layers.0-output``.

    Args:
        export_path: MAX's option to write values to files; not supported, and gives a warning.
        filter: names of layers to print, or a function of a layer's name; None prints all.

    The hook installs itself and stays until :meth:`remove`, which removes only this hook.
    Under ``jax.jit`` it prints once, while tracing, and shows types instead of values.
    The second call of a layer is called ``name(2)``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from maxjax import nn
        >>> layer = nn.LayerNorm(2, devices=[None], dtype="float32")
        >>> _ = layer.load_state_dict({"weight": jnp.ones(2), "bias": jnp.zeros(2)})
        >>> hook = nn.hooks.PrintHook()
        >>> hook.name_layers(layer)
        >>> y = layer(jnp.array([1.0, 3.0]))
        model-input_0 = [1. 3.]
        model-output = [-0.999995  0.999995]
        >>> hook.remove()
    """

    def __init__(self, export_path: str | None = None, filter: Any = None):
        if export_path is not None:
            _LOG.warning("PrintHook: export_path is not supported; values are printed")
        self._names: dict[int, str] = {}
        self._layers: list[Layer] = []  # keeps ids from being reused
        self._calls: dict[str, int] = {}
        self._filter = filter
        add_layer_hook(self)

    def name_layers(self, model: Layer) -> None:
        """Names every layer below ``model`` by its path, with "model" at the root."""
        for name, layer in recursive_named_layers(model, "model"):  # type: ignore[arg-type]
            self._names[id(layer)] = name
            self._layers.append(layer)

    def _is_selected(self, name: str) -> bool:
        if self._filter is None:
            return True
        return bool(self._filter(name)) if callable(self._filter) else name in self._filter

    def __call__(self, layer: Layer, args: tuple, kwargs: dict, outputs: Any) -> None:
        name = self._names.get(id(layer), type(layer).__name__)
        self._calls[name] = count = self._calls.get(name, 0) + 1
        label = name if count == 1 else f"{name}({count})"
        if not self._is_selected(name):
            return
        for key, value in [*enumerate(args), *kwargs.items()]:
            _show(f"{label}-input_{key}", value)
        _show(f"{label}-output", outputs)

    def remove(self) -> None:
        """Removes this hook."""
        hooks.remove(self)


def _show(label: str, value: Any) -> None:
    if isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", range(len(value)))
        for name, part in zip(names, value, strict=True):
            _show(f"{label}_{name}", part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _show(f"{label}_{field.name}", getattr(value, field.name))
    elif isinstance(value, Tracer):
        print(f"{label}: {value.aval}")
    else:
        print(f"{label} = {value}")
