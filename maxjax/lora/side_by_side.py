"""Several adapters of one model side by side: each row of a call uses one of them, or none.

In each layer A of all adapters are the rows of one ``[n · r, in]``, and B the columns of one ``[out, n · r]``: an
update of the rank of all together. Between the two products, each row of the input keeps the r numbers of its own
adapter, and the others become zero (``LowRank.scaled``). So layers compute it as they compute any update: in
stacks, on meshes and over quantised weights; and another adapter in a place is another value, not another program.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..dtype import DType
from ..engine.isolation import isolated
from ..errors import CheckpointMismatchError, UserInputError, some
from ..graph.device import DeviceRef
from ..graph.weight.weight import Weight
from ..models.weights import check_loaded
from ..nn.layer import Module
from ..nn.layer.stack.rearranged import add_shared_weight
from ..nn.layer.walk import check_module
from ..nn.low_rank import Adapter, LowRank, trained_names
from ..storage.hub import checkpoint_path
from .files import check_layers, opened
from .model import adapted, attached
from .targets import targets


class LayerUpdate(NamedTuple):
    """The update of one layer, arrays of NumPy: A ``[r, in]``, and B ``[out, r]``, which has the scale in it."""

    a: np.ndarray
    b: np.ndarray

    @property
    def rank(self) -> int:
        """The rank of the update."""
        return len(self.a)


Updates = Mapping[str, LayerUpdate]


@isolated()
def updates_of(model: Module, adapter: str | os.PathLike[str] | Module) -> Updates:
    """The updates of an adapter by the names of the model's layers.

    Args:
        model: the base model.
        adapter: path of a directory that PEFT or :func:`maxjax.lora.save` wrote, or its name on the hub; or the
            model with LoRA weights.

    Raises:
        UserInputError: the adapter has more than LoRA weights (DoRA, trained biases or modules), or values that are
            not finite; or the model with LoRA weights is of other layers.
        NotImplementedError: it has LoRA weights of experts.
        CheckpointError, UnsupportedModelError: as for :func:`maxjax.lora.load`.
    """
    layers, dtype = {name: one for one in targets(model) for name in one.names}, _dtype_of(model)
    if isinstance(adapter, Module):
        found, settings = _of_module(adapter), _settings_of(adapter)
        wrong = UserInputError
    elif isinstance(adapter, (str, os.PathLike)):
        found, settings, where = _of_files(model, Path(checkpoint_path(adapter)), layers)
        wrong = lambda problem: CheckpointMismatchError(problem, path=where)
    else:
        raise UserInputError(
            "an adapter is the path of its directory, its name on the hub or a model with LoRA weights, not "
            f"{type(adapter).__name__}"
        )
    for name, one in settings.items():
        if one.dora or one.merged:
            what = "is one of DoRA" if one.dora else "is merged into its weights"
            raise UserInputError(
                f"the LoRA update of '{name}' {what}, and of several adapters it must be apart from the weights: "
                "maxjax.lora.load and merge give a model with this adapter alone"
            )
    updates = {}
    for name, one in settings.items():
        if name not in layers:
            raise wrong(f"'{name}' is no linear layer or embedding of this {type(model).__name__}")
        if layers[name].in_mixture == "expert":
            raise NotImplementedError(
                f"LoRA weights of experts are not supported, and there are some for '{name}'"
            )
        layer: LowRank = layers[name].layer
        for attr, axes in layer.update_axes(one).items():
            shape, array = layer.base_shape, found[name][attr]
            expected = tuple(one.rank if axis is None else shape[axis] for axis in axes)
            if array.shape != expected:
                raise wrong(
                    f"{attr} of '{name}' has shape {list(array.shape)}, expected {list(expected)}"
                )
        with np.errstate(over="ignore"):
            a, b = found[name]["lora_A"], found[name]["lora_B"] * np.float32(one.scale)
            a, b = a.astype(dtype.np), b.astype(dtype.np)
        # Rows with other adapters multiply them by zero.
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise wrong(
                f"the LoRA weights of '{name}' have values that are not finite in {dtype.name}"
            )
        updates[name] = LayerUpdate(a, b)
    return updates


def _of_module(model: Module) -> dict[str, dict[str, np.ndarray]]:
    """The LoRA weights of a model's layers as float32 arrays, by the layer's name and the attribute."""
    check_module(model, "Engine.add_adapter")
    check_loaded(model)
    layers = adapted(model)
    if names := trained_names(model):
        raise UserInputError(_also_trained("the adapter", names))
    weights = model.raw_state_dict()
    return {
        name: {attr: np.asarray(weights[f"{name}.{part}"].value, np.float32) for attr, part in one.parts.items()}
        for one in layers
        for name in one.names
    }  # fmt: skip


def _settings_of(model: Module) -> dict[str, Adapter]:
    return {name: one.layer.lora for one in adapted(model) for name in one.names}


def _of_files(
    model: Module, directory: Path, layers: Mapping[str, Any]
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Adapter], str]:
    """The same for the files of an adapter, the settings of each layer, and the file's path."""
    with opened(model, directory) as adapter:
        names = {
            name: {attr: layers[name].layer.update_names[attr] for attr in layers[name].layer.update_axes(one)}
            for name, one in adapter.adapters.items()
            if name in layers
        }  # fmt: skip
        check_layers(adapter, {name: parts.values() for name, parts in names.items()})
        if trained := [*adapter.base.replaced, *adapter.base.biases]:
            raise UserInputError(_also_trained(adapter.path, trained))
        read = lambda name: np.asarray(adapter.values[name].data).astype(np.float32)
        found = {
            name: {attr: read(f"{name}.{part}") for attr, part in parts.items()}
            for name, parts in names.items()
        }
        return found, adapter.adapters, adapter.path


def _also_trained(adapter: str, names: Iterable[str]) -> str:
    return (
        f"{adapter} also has trained weights of the model, {some(list(names), 2)}: of several adapters each has LoRA "
        "weights alone. maxjax.lora.load gives a model with this one"
    )


class SideBySide:
    """A model with several adapters.

    Args:
        model: the base model, which is not changed; arrays are shared.
        adapters: for each place, the updates of an adapter; None for an empty place.
        rank: the largest rank that an update in a place may have.
        layers: names of the layers that have updates of any adapter, now or later.

    Attributes:
        model: the model with LoRA weights, for calls with the rows of the last :meth:`set_rows`.
    """

    @isolated()
    def __init__(
        self, model: Any, adapters: list[Updates | None], rank: int, layers: Iterable[str]
    ):
        own, total = set(layers), rank * len(adapters)
        # Equal layers stay equal, whichever of them have updates.
        chosen = [one for one in targets(model) if not own.isdisjoint(one.names)]
        together = Adapter(total, float(total), adapters=len(adapters))
        dtype = _dtype_of(model)
        new = attached(model, {name: together for one in chosen for name in one.names}, dtype)
        rows = lambda: Weight("lora_rows", DType.int32, ("rows",), DeviceRef.CPU())
        self._rows, self._last_rows = rows(), rows()
        values = {}
        for one in adapted(new):
            # The head may be called with fewer rows than the layers before it: those of the last tokens.
            of_head = one.layer is getattr(new, "lm_head", None)
            weight = self._last_rows if of_head else self._rows
            add_shared_weight(new, one.layer, "lora_rows", weight, one.base)
            parts = one.parts
            for name in one.names:
                given = [None if u is None else u.get(name) for u in adapters]
                a, b = _joined(one.layer, given, rank, dtype)
                values |= {f"{name}.{parts['lora_A']}": a, f"{name}.{parts['lora_B']}": b}
        Module.load_state_dict(new, values, strict=False)
        self.model = new

    def set_rows(self, rows: np.ndarray, last: np.ndarray) -> None:
        """Sets which adapter each row uses.

        Args:
            rows: the place of each row's adapter, int32 ``[rows]``; -1 for none.
            last: the same for the rows whose logits are returned.
        """
        self._rows.put(rows)
        self._last_rows.put(last)


def _dtype_of(model: Any) -> DType:
    """The dtype of A and B: that of the model's activations."""
    dtype = DType.of(model.dtype)
    return dtype if dtype.is_float() and dtype.size_in_bits >= 16 else DType.float32


def _joined(
    layer: LowRank, updates: list[LayerUpdate | None], rank: int, dtype: DType
) -> tuple[np.ndarray, np.ndarray]:
    """A and B of a layer's updates side by side, with zeros where there is none."""
    shape, total = layer.base_shape, rank * len(updates)
    a = np.zeros((total, shape[1 - layer.out_axis]), dtype.np)
    b = np.zeros((shape[layer.out_axis], total), dtype.np)
    for place, one in enumerate(updates):
        if one is not None:
            part = slice(place * rank, place * rank + one.rank)
            a[part], b[:, part] = one.a, one.b
    return a, b
