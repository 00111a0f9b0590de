"""Reads ``quantization_config`` of a ``config.json``: which layers of a checkpoint are quantised, and how.

A checkpoint's tensors decide which linear layers are quantised: those that it does not hold as plain
floats, and those whose floats each call rounds. ``methods.py`` is the table of supported methods;
``layouts.py`` describes the tensors of a layer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from ...dtype import DType
from ...errors import CheckpointFormatError, UnsupportedModelError, shown
from ...graph.weights import WeightData
from ...nn.layer import ExpertStack, Module
from ...nn.linear import ColumnParallelLinear, Linear
from ...nn.quantized import QuantizedLinear, QuantLayout
from ...nn.stacked_linear import StackedLinear
from ..config import quantization_settings
from .layouts import Found, LayoutOf
from .methods import BLOCKS, METHODS, rounds_floats
from .methods import with_blocks as with_blocks
from .settings import KEY as KEY
from .settings import QuantSettings
from .tables import dense_tables as dense_tables

_FLOATS = (DType.float16, DType.bfloat16, DType.float32, DType.float64)
_LINEAR = (Linear, ColumnParallelLinear, StackedLinear)


@dataclass(frozen=True)
class Quantization:
    """The settings of a ``quantization_config``.

    Attributes:
        method: value of ``quant_method``.
        layout_for: function from the name of a layer to the function that makes its layout.
        settings: the object itself.
    """

    method: str
    layout_for: Callable[[str], LayoutOf]
    settings: QuantSettings

    @classmethod
    def of(
        cls, config: Mapping[str, Any], *, path: str | os.PathLike[str] | None = None
    ) -> Quantization | None:
        """Reads the settings of a configuration; None if its model is not quantised.

        Raises:
            UnsupportedModelError: the format is not supported; the message names it.
            CheckpointFormatError: a value has the wrong type.

        Example:
            >>> Quantization.of({"quantization_config": {"quant_method": "fp8"}}).method
            'fp8'
            >>> Quantization.of({"hidden_size": 8}) is None
            True
        """
        raw = quantization_settings(config)
        if raw is None:
            return None
        if not isinstance(raw, Mapping):
            raise CheckpointFormatError(f"'{KEY}' is not an object", path=path)
        settings = QuantSettings(raw, path=path)
        method = raw.get("quant_method")
        if method is None and (raw.get("load_in_4bit") or raw.get("load_in_8bit")):
            method = "bitsandbytes"  # as written by old versions of transformers
        if not isinstance(method, str) or method not in METHODS:
            raise UnsupportedModelError(
                (f"{os.fspath(path)}: " if path is not None else "")
                + f"'{KEY}' (quant_method {shown(method)}); supported are {', '.join(METHODS)}"
            )
        return cls(method, METHODS[method](settings), settings)

    def apply(self, model: Module, found: Mapping[str, WeightData], dtype: DType) -> set[str]:
        """Replaces the quantised linear layers of a lazy model by QuantizedLinears.

        Args:
            model: the model, whose layers are not stacked.
            found: tensors of the checkpoint by the model's names.
            dtype: dtype of biases.

        Returns:
            The names of the tensors that make up the quantised weights.

        Raises:
            UnsupportedModelError: no linear layer of the model is quantised.
        """
        stacks = _unstacked(model)
        modules = {prefix.removesuffix("."): module for prefix, module in model.named_modules()}
        linear: dict[str, Any] = {
            name: m for name, m in modules.items() if type(m) in _LINEAR and hasattr(m, "weight")
        }
        layers: dict[str, dict[str, Any]] = {}
        for name, data in found.items():
            if data.is_packed:
                continue  # blocks, which plain linear layers compute with
            layer, rest = _split(name, linear)
            layers.setdefault(layer, {})[rest] = data.dtype, tuple(int(n) for n in data.shape)
        layouts: dict[str, QuantLayout] = {}
        rounds = rounds_floats(self.settings)
        for name, module in linear.items():
            entries = layers.get(name, {})
            if is_quantised(entries) or (entries and rounds(name)):
                out_dim, in_dim = (int(n) for n in module.weight.shape)
                layouts[name] = self.layout_for(name)(out_dim, in_dim, entries)
        used = {f"{name}.{one.name}" for name, layout in layouts.items() for one in layout.tensors}
        # Where experts are equal, the first one stands for all.
        stacks = {n: experts for n, experts in stacks.items() if _are_equal(layouts, n, experts)}
        left_out = {
            layer
            for name in stacks
            for layer in layouts
            if layer.startswith(f"{name}.") and not layer.startswith(f"{name}.0.")
        }
        for name, layout in layouts.items():
            if name in left_out:
                continue
            module = linear[name]
            parent, _, attribute = name.rpartition(".")
            # AutoGPTQ wrote biases of zeros for layers without a bias.
            has_bias = module.bias is not None or "bias" in layers[name]
            new = QuantizedLinear(layout, module.weight.device, has_bias=has_bias, dtype=dtype)
            setattr(modules[parent], attribute, new)
        for experts in stacks.values():
            experts.restack()
        if not used and self.method not in BLOCKS:
            raise self.settings.refused("no quantised linear layer in this model")
        return used


def _unstacked(model: Module) -> dict[str, ExpertStack]:
    """Unstack all experts, and return them by full name."""
    found = {
        prefix.removesuffix("."): module
        for prefix, module in model.named_modules()
        if isinstance(module, ExpertStack)
    }
    for experts in found.values():
        experts.unstack()
    return found


def _are_equal(layouts: Mapping[str, QuantLayout], name: str, experts: Any) -> bool:
    """Whether the experts below ``name`` are all quantised with the same layouts, or none is quantised."""
    each: dict[str, dict[str, QuantLayout]] = {}
    for layer, layout in layouts.items():
        if layer.startswith(f"{name}."):
            number, _, rest = layer[len(name) + 1 :].partition(".")
            each.setdefault(number, {})[rest] = layout
    return len(each) in (0, len(experts)) and all(one == each["0"] for one in each.values())


def _split(name: str, layers: Container[str]) -> tuple[str, str]:
    """(Layer, rest of the name) of a tensor; the layer is "" if the tensor belongs to none of ``layers``."""
    at = name.rfind(".")
    while at > 0:
        if name[:at] in layers:
            return name[:at], name[at + 1 :]
        at = name.rfind(".", 0, at)
    return "", name


def unquantised(found: Mapping[str, WeightData]) -> dict[str, WeightData]:
    """The tensors of a quantised checkpoint that are plain float weights and biases."""
    return {
        name: data
        for name, data in found.items()
        if name.endswith((".weight", ".bias")) and data.dtype in _FLOATS
    }


# Suffixes of tensors of quantised linear layers, in any format.
_TENSORS = (
    ".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".SCB", ".weight.absmax", ".scales",
)  # fmt: skip


def check_has_settings(
    model: Module,
    found: Mapping[str, WeightData],
    config: Mapping[str, Any],
    *,
    path: str | os.PathLike[str] | None = None,
) -> None:
    """Checks that a checkpoint without a ``quantization_config`` has no quantised layers.

    Raises:
        UnsupportedModelError: it has a tensor of a quantised layer, which the model does not have.
    """
    names = [name for name in found if name.endswith(_TENSORS)]
    known = model.raw_state_dict() if names else {}
    if (name := next((name for name in names if name not in known), None)) is not None:
        where = "its 'compression_config'" if "compression_config" in config else (
            "the content of the writer's own file (quantize_config.json, hf_quant_config.json)"
        )  # fmt: skip
        raise UnsupportedModelError(
            (f"{os.fspath(path)}: " if path is not None else "")
            + f"the tensor '{name}' is that of a quantised layer, but there is no '{KEY}', which says "
            f"how it is quantised. If its quant_method is supported, enter {where} under this name"
        )


def is_quantised(entries: Found) -> bool:
    """Whether a layer's tensors are not those of a plain linear layer.

    Example:
        >>> is_quantised({"weight": (DType.bfloat16, (2, 2)), "bias": (DType.bfloat16, (2,))})
        False
        >>> is_quantised({"qweight": (DType.int32, (2, 2))})
        True
    """
    names = set(entries) - {"bias"}
    return bool(names) and not (names == {"weight"} and entries["weight"][0] in _FLOATS)
