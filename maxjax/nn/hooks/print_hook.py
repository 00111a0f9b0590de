"""PrintHook: prints the inputs and outputs of every layer."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections import Counter
from typing import Any

from jax.core import Tracer

from ...graph.kind import is_tensor_value
from ..layer import hooks
from ..layer.hooks import Layer, add_layer_hook
from ..layer.walk import recursive_named_layers

_LOG = logging.getLogger("maxjax")


@dataclasses.dataclass
class _Known:
    """A layer, its name, and how often it was called."""

    layer: weakref.ref[Layer]
    name: str
    calls: int = 0


class PrintHook:
    """Prints the input and output arrays of each layer, under names like ``model.layers.0-output``.

    Args:
        export_path: MAX's option to write values to files; it is not supported and logs a warning.
        filter: name or names of the layers to print, or a predicate of a name; None or an empty list prints all.

    The constructor installs the hook, which stays until :meth:`remove`; that removes only this hook.
    Under ``jax.jit`` it prints once, while tracing, and shows types instead of values. TensorValues, as in a Graph, are
    printed each time the program runs. A layer without a name is labelled with its class, the second layer of that
    class with ``Linear2``. The second call of a layer is labelled ``name(2)``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from maxjax import nn
        >>> layer = nn.Linear(2, 1)
        >>> _ = layer.load_state_dict({"weight": jnp.array([[2.0, 1.0]])})
        >>> hook = nn.hooks.PrintHook()
        >>> hook.name_layers(layer)
        >>> y = layer(jnp.array([1.0, 3.0]))
        model-input_0 = [1. 3.]
        model-output = [5.]
        >>> hook.summarize()
        Printed 2 tensors for step 0.
        >>> hook.remove()
    """

    def __init__(self, export_path: str | None = None, filter: Any = None):
        if export_path is not None:
            _LOG.warning("PrintHook: export_path is not supported; values are printed")
        # Keyed by id, because a class of layers may define __eq__. The references are weak, because a layer of a traced
        # program holds tracers. Named layers are kept alive in a list: a stack makes its layers on demand.
        self._known: dict[int, _Known] = {}
        self._named: list[Layer] = []
        self._unnamed: Counter[str] = Counter()
        self._filter = ([filter] if isinstance(filter, str) else filter) or None
        self._step = 0
        self._printed: dict[int, int] = {}
        add_layer_hook(self)

    def name_layers(self, model: Layer) -> None:
        """Names every layer below ``model`` by its path, with "model" at the root.

        Raises:
            TypeError: ``model`` is not a layer.
        """
        if not isinstance(model, Layer):
            raise TypeError(f"name_layers takes a Layer or Module, not a {type(model).__name__}")
        for name, layer in recursive_named_layers(model, "model"):  # type: ignore[arg-type]
            self.add_layer(layer, name)

    def add_layer(self, layer: Layer, name: str) -> None:
        """Gives one layer a name."""
        self._known[id(layer)] = _Known(weakref.ref(layer), name)
        self._named.append(layer)

    def step(self) -> None:
        """Begins the next step of the count that :meth:`summarize` prints."""
        self._step += 1

    def summarize(self) -> None:
        """Prints how many arrays were printed in each step."""
        for step, count in self._printed.items():
            print(f"Printed {count} tensors for step {step}.")
        if not self._printed:
            print("No tensors printed.")

    def _is_selected(self, name: str) -> bool:
        if self._filter is None:
            return True
        return bool(self._filter(name)) if callable(self._filter) else name in self._filter

    def _known_as(self, layer: Layer) -> _Known:
        known = self._known.get(id(layer))
        if known is not None and known.layer() is layer:
            return known
        kind = type(layer).__name__
        self._unnamed[kind] += 1
        count = self._unnamed[kind]
        known = _Known(weakref.ref(layer), kind if count == 1 else f"{kind}{count}")
        self._known[id(layer)] = known
        return known

    def __call__(self, layer: Layer, args: tuple, kwargs: dict, outputs: Any) -> None:
        known = self._known_as(layer)
        known.calls += 1
        if not self._is_selected(known.name):
            return
        label = known.name if known.calls == 1 else f"{known.name}({known.calls})"
        for key, value in [*enumerate(args), *kwargs.items()]:
            self._show(f"{label}-input_{key}", value)
        self._show(f"{label}-output", outputs)

    def _show(self, label: str, value: Any) -> None:
        if isinstance(value, (list, tuple)):
            names = getattr(value, "_fields", range(len(value)))
            for name, part in zip(names, value, strict=True):
                self._show(f"{label}_{name}", part)
            return
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                self._show(f"{label}_{field.name}", getattr(value, field.name))
            return
        self._printed[self._step] = self._printed.get(self._step, 0) + 1
        if is_tensor_value(value):
            value.print(label)  # type: ignore[attr-defined]
        elif isinstance(value, Tracer):
            print(f"{label}: {value.aval}")
        else:
            print(f"{label} = {value}")

    def remove(self) -> None:
        """Removes this hook."""
        hooks.remove(self)
