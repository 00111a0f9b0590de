"""``add`` returns a model with LoRA weights, and ``remove`` one without them.

Both return a new Module, which shares unchanged arrays with the given one; that one is not changed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding

from ..dtype import DType
from ..elsewhere import unknown_argument
from ..engine.isolation import isolated
from ..errors import UserInputError, checked_integer, one_of
from ..graph.placement.specs import names_in, spec_of
from ..graph.weight.weight import Weight
from ..models.weights import check_loaded, named_dtype
from ..nn.init import init
from ..nn.layer import Module
from ..nn.layer.stack.rearranged import add_weight, remove_weight, set_static, unstack_unequal
from ..nn.layer.walk import Walk, check_module
from ..nn.low_rank import Adapter, forget_trained
from .targets import TargetLayer, chosen, targets

M = TypeVar("M", bound=Module)

# PEFT's values of the setting "bias".
BIASES = ("none", "lora_only", "all")


@isolated()
def add(
    model: M,
    patterns: str | Iterable[str] | None = None,
    *,
    rank: int = 8,
    alpha: float | None = None,
    rslora: bool = False,
    dora: bool = False,
    bias: str = "none",
    dtype: Any = "float32",
    key: jax.Array | None = None,
    **unknown: Any,
) -> M:
    """Returns a new model with LoRA weights A and B: linear layers compute ``x @ W.T + scale · (x @ A.T) @ B.T``.

    Embedding tables that a pattern names look up rows of ``W + scale · (B @ A).T``. An output layer that is tied to
    the table keeps the base weight, as in PEFT.

    The base weights and their sharding do not change. They may be quantised: then gradients flow to
    A and B only (QLoRA). In a LayerStack A and B are stacked, and on a mesh they are split like the
    base weight. The new weights are named ``<layer>.lora_A.weight`` and ``<layer>.lora_B.weight``
    (for a table, ``<layer>.lora_embedding_A`` and ``<layer>.lora_embedding_B``), so that
    ``maxjax.partition(model, "*.lora_*")`` separates the trained weights from the rest.

    Args:
        model: any Module; it is not changed, and shares its arrays with the result.
        patterns: glob patterns (``"layers.*.q_proj"``) or endings (``"q_proj"``) of the names of
            linear layers and embedding tables; None means all linear layers except those of a
            head and those in mixtures of experts.
        rank: r, the rank of the updates.
        alpha: numerator of the scale of the updates, ``alpha / r``; None means r, so a scale of 1.
        rslora: whether the scale is ``alpha / √r`` instead.
        dora: whether to train the norm of each row of ``W + scale · B @ A`` too (DoRA, PEFT's ``use_dora``), as
            ``<layer>.lora_magnitude_vector``. Every call then computes the norms of these sums; call
            :func:`merge` before inference.
        bias: biases that are trained, which :func:`save` writes too: "none", "lora_only" (those of the
            layers with LoRA weights) or "all". Their names stay ``<layer>.bias``, so a call of
            ``maxjax.partition`` that is to select them must name them.
        dtype: dtype of A and B. The update is added in the wider of this dtype and that of the layer's result.
        key: random key. A is uniform in ±1/√in and B is zero (for a table, A is zero and B normal), so that the
            result computes the same as the model. Without a key the new weights are placeholders, which a load
            or, except for DoRA's magnitudes, ``maxjax.init`` fills.

    Raises:
        UserInputError: a pattern names no layer, an argument is not valid, the model has LoRA weights
            already, or a ``key`` is given and the model is not loaded.
        TypeError: an argument is unknown; the message suggests the right name if it can.
        NotImplementedError: a pattern names experts or layers of other kinds, or ``dora`` is set for a layer with
            ``clip_weight``.

    Example:
        >>> import maxjax
        >>> from maxjax import nn
        >>> layers = nn.Sequential([nn.Linear(4, 8), nn.Linear(8, 2)])
        >>> model = maxjax.lora.add(maxjax.init(layers, jax.random.key(0)), "0", rank=2, key=jax.random.key(1))
        >>> sorted(model.raw_state_dict())
        ['0.lora_A.weight', '0.lora_B.weight', '0.weight', '1.weight']
    """
    for name in unknown:
        raise unknown_argument(add, name, "maxjax.lora")
    rank = checked_integer("rank", rank)
    alpha = float(rank) if alpha is None else alpha
    is_number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
    if not is_number or not abs(alpha) <= sys.float_info.max:
        raise UserInputError(f"alpha must be a number, not {alpha!r}")
    one_of("bias", bias, BIASES)
    kind = update_dtype(dtype)
    check_module(model, "lora.add")
    names = chosen(model, patterns)
    if key is not None:
        check_loaded(model)
    adapter = Adapter(rank, float(alpha), bool(rslora), bool(dora), bias=bias)
    new = attached(model, dict.fromkeys(names, adapter), kind)
    if key is None:
        return new
    if dora:
        _set_magnitudes(new, model)
    return init(new, key)


def update_dtype(dtype: Any) -> DType:
    """The dtype of A and B that a user named.

    Raises:
        UserInputError: it is not a float of 16 bits or more.
    """
    found = named_dtype("dtype", dtype)
    if not found.is_float() or found.size_in_bits < 16:
        raise UserInputError(f"dtype must be a float of 16 bits or more, not {found.name}")
    return found


def attached(model: M, adapters: Mapping[str, Adapter], dtype: DType) -> M:
    """A new model with LoRA weights, which are placeholders, for the layers that ``adapters`` names.

    Layer stacks are unstacked if their layers get different settings.

    Raises:
        UserInputError: the model has LoRA weights already.
        NotImplementedError: ``adapters`` names experts.
    """
    if any(one.layer.lora_A is not None for one in targets(model)):
        raise UserInputError(
            "the model has LoRA weights already, and there is one adapter at a time: maxjax.lora.merge(model) puts "
            "them into its weights, maxjax.lora.remove(model) drops them"
        )
    new = copy_of(model)
    kinds: dict[str, Adapter | None] = {}
    for one in targets(new):
        for name, weight in zip(one.names, one.base_names, strict=True):
            kinds[weight] = adapters.get(name)
            if one.in_mixture == "expert" and name in adapters:
                raise NotImplementedError(
                    f"LoRA weights of experts are not supported, and there are some for '{name}'"
                )
    new = unstack_unequal(new, kinds)
    for one in targets(new):
        if (adapter := adapters.get(one.names[0])) is not None:
            _attach(new, one, adapter, dtype)
    return new


def _attach(model: Module, target: TargetLayer, adapter: Adapter, dtype: DType) -> None:
    layer, base = target.layer, target.base
    shape = layer.base_shape
    if adapter.dora and getattr(layer, "clip_weight", None) is not None:
        raise NotImplementedError(
            f"DoRA (dora=True) of a layer with clip_weight is not supported: '{target.names[0]}'"
        )
    set_static(layer, "lora", adapter)
    for attr, axes in layer.update_axes(adapter).items():
        dims = tuple(adapter.rank if axis is None else shape[axis] for axis in axes)
        weight = Weight(f"{target.front}{layer.update_names[attr]}", dtype, dims, base.device)
        where = layer.weight.sharding
        if isinstance(where, NamedSharding):
            over = [names_in(entry) for entry in where.spec] + [()] * len(shape)
            spec = spec_of([() if axis is None else over[axis] for axis in axes])
            where = NamedSharding(where.mesh, spec, memory_kind=where.memory_kind)
        if where is not None:
            weight.change(sharding=where, why="as the base weight")
            weight.put(weight.spec.blank())
        add_weight(model, layer, attr, weight, base)


def _set_magnitudes(new: Module, model: Module) -> None:
    """Sets DoRA's magnitudes to the norms of the base weights, so that the update changes nothing.

    Args:
        new: the model with DoRA's weights.
        model: the same model without them.
    """
    wanted = {name for one in adapted(new) for name in one.names}
    values = {
        f"{name}.lora_magnitude_vector".removeprefix("."): one.layer.magnitudes()
        for one in targets(model, Walk(model))
        for name in one.names
        if name in wanted
    }
    new.load_state_dict(values, strict=False, cast=True)


def remove(model: M) -> M:
    """Returns a new model without the LoRA weights; the base weights do not change.

    Trained biases (``bias`` of :func:`add`) and other trained weights keep their values.

    Raises:
        UserInputError: the model has no LoRA weights.

    Example:
        >>> import maxjax
        >>> from maxjax import nn
        >>> model = maxjax.lora.add(nn.Sequential([nn.Linear(4, 8)]), rank=2)
        >>> list(maxjax.lora.remove(model).raw_state_dict())
        ['0.weight']
    """
    check_module(model, "lora.remove")
    adapted(model)
    new = copy_of(model)
    for one in adapted(new):
        for attr in one.parts:
            remove_weight(new, one.layer, attr)
        set_static(one.layer, "lora", None)
    forget_trained(new)
    return new


def adapted(model: Module) -> list[TargetLayer]:
    """The layers of a model that have LoRA weights.

    Raises:
        UserInputError: the model has no LoRA weights.
    """
    found = [one for one in targets(model) if one.layer.lora_A is not None]
    if not found:
        raise UserInputError(
            f"{type(model).__name__} has no LoRA weights: maxjax.lora.add or maxjax.lora.load gives it some"
        )
    return found


def copy_of(model: M) -> M:
    """A new tree of Modules around the same arrays.

    Raises:
        UserInputError: some weights are still to be read from a checkpoint.
    """
    if any(weight.source is not None for weight in model.raw_state_dict().values()):
        check_loaded(model)
    return jax.tree.map(lambda leaf: leaf, model)
