"""Models with LoRA weights: made from models, and made to models again.

Every function gives a new Module that shares the arrays that stay; the given one is not changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding

from ..dtype import DType
from ..errors import UserInputError
from ..graph.placement.specs import names_in, spec_of
from ..graph.weight.weight import Weight
from ..models.weights import check_loaded, named_dtype
from ..nn.init import init
from ..nn.layer import Module
from ..nn.layer.stack.rearranged import add_weight, remove_weight, set_static, unstack_unequal
from ..nn.layer.walk import Walk
from ..nn.low_rank import Adapter
from .targets import TargetLayer, chosen, targets

M = TypeVar("M", bound=Module)

# PEFT's values of the setting "bias".
BIASES = ("none", "lora_only", "all")


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
) -> M:
    """Adds LoRA weights A and B: linear layers compute ``x @ W.T + scale · (x @ A.T) @ B.T``.

    Embedding tables that a pattern names look up rows of ``W + scale · (B @ A).T``. A head that is tied to the table
    does not change, as in PEFT.

    The base weights and their sharding do not change. They may be quantised: then gradients flow to
    A and B only (QLoRA). In a LayerStack A and B are stacked, and on a mesh they are split like the
    base weight. The new weights are named ``<layer>.lora_A.weight`` and ``<layer>.lora_B.weight``
    (of a table, ``lora_embedding_A`` and ``lora_embedding_B``), so that
    ``maxjax.partition(model, "*.lora_*")`` separates what is trained.

    Args:
        model: any Module; it is not changed, and shares its arrays with the result.
        patterns: glob patterns (``"layers.*.q_proj"``) or endings (``"q_proj"``) of the names of
            linear layers and embedding tables; None means all linear layers except a language model's
            head and those in mixtures of experts.
        rank: r, the rank of the updates.
        alpha: the scale of the updates is ``alpha / r``; None means r, so a scale of 1.
        rslora: whether the scale is ``alpha / √r``.
        dora: whether to train the norm of each row of the sum too (DoRA, PEFT's ``use_dora``), as
            ``<layer>.lora_magnitude_vector``. Every call computes the norms of the base weights with their
            updates; :func:`merge` for inference.
        bias: the biases that :func:`save` writes too, because they are trained: "none", "lora_only" (those of the
            layers with LoRA weights) or "all". They stay weights of the model, as ``<layer>.bias``; so
            ``maxjax.partition`` needs their names.
        dtype: dtype of A and B. Their products are added in the wider of it and the result's.
        key: random key; A is uniform in ±1/√in, B zero (of a table, A zero and B normal), so that the
            result computes the same as the model. Without a key, the new weights are placeholders, for a load
            or a plan, and A and B for ``maxjax.init``.

    Raises:
        UserInputError: a pattern names no such layer, an option cannot be used, the model has LoRA weights
            already, or a ``key`` is given and the model is not loaded.
        NotImplementedError: a pattern names experts or layers of other kinds; or DoRA is for a layer with
            ``clip_weight``.

    Example:
        >>> import maxjax
        >>> from maxjax import nn
        >>> layers = nn.Sequential([nn.Linear(4, 8), nn.Linear(8, 2)])
        >>> model = maxjax.lora.add(maxjax.init(layers, jax.random.key(0)), "0", rank=2, key=jax.random.key(1))
        >>> sorted(model.raw_state_dict())
        ['0.lora_A.weight', '0.lora_B.weight', '0.weight', '1.weight']
    """
    if type(rank) is not int or rank < 1:
        raise UserInputError(f"rank must be a positive integer, not {rank!r}")
    alpha = float(rank) if alpha is None else alpha
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise UserInputError(f"alpha must be a number, not {alpha!r}")
    if bias not in BIASES:
        raise UserInputError(f"bias must be one of {', '.join(map(repr, BIASES))}, not {bias!r}")
    kind = named_dtype("dtype", dtype)
    if not kind.is_float() or kind.size_in_bits < 16:
        raise UserInputError(f"dtype must be a float of 16 bits or more, not {kind.name}")
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


def attached(model: M, adapters: Mapping[str, Adapter], dtype: DType) -> M:
    """A new model with updates of these settings, by names of layers, which have no values yet.

    Stacks of which some layers get others than the rest are unstacked.

    Raises:
        UserInputError: the model has LoRA weights already.
    """
    if has_lora(model):
        raise UserInputError(
            "the model has LoRA weights already, and there is one adapter at a time: maxjax.lora.merge(model) puts "
            "them into its weights, maxjax.lora.remove(model) drops them"
        )
    new = copy_of(model)
    kinds = {
        weight: adapters.get(name)
        for one in targets(new)
        for name, weight in zip(one.names, one.base_names, strict=True)
    }
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
            weight.stored.settle(where, "as the base weight", None, None)
        add_weight(model, layer, attr, weight, base)


def _set_magnitudes(new: Module, model: Module) -> None:
    """Sets DoRA's magnitudes to the norms of the base weights, so that the update changes nothing.

    Args:
        new: model with DoRA's weights.
        model: the same without them.
    """
    wanted = {name for one in adapted(new) for name in one.names}
    walk = Walk(model)
    layers = {
        name: one.layer for one in targets(model, walk) for name in one.names if name in wanted
    }
    values = {
        f"{name}.lora_magnitude_vector".removeprefix("."): layer.magnitudes()
        for name, layer in layers.items()
    }
    new.load_state_dict(values, strict=False, cast=True)


def remove(model: M) -> M:
    """Removes the LoRA weights: returns a new model with the unchanged base weights.

    Biases that were trained with them (``bias="all"``) stay as they are.

    Raises:
        UserInputError: the model has no LoRA weights.

    Example:
        >>> import maxjax
        >>> from maxjax import nn
        >>> model = maxjax.lora.add(nn.Sequential([nn.Linear(4, 8)]), rank=2)
        >>> list(maxjax.lora.remove(model).raw_state_dict())
        ['0.weight']
    """
    adapted(model)
    new = copy_of(model)
    for one in adapted(new):
        for attr in one.parts:
            remove_weight(new, one.layer, attr)
        set_static(one.layer, "lora", None)
    return new


def has_lora(model: Module) -> bool:
    """Whether a model has LoRA weights, merged or not."""
    return any(one.layer.lora_A is not None for one in targets(model))


def adapted(model: Module) -> list[TargetLayer]:
    """The layers of a model that have LoRA weights.

    Raises:
        UserInputError: there are none.
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
        UserInputError: weights are to be read from a checkpoint, and have not been.
    """
    if any(weight.stored.source is not None for weight in model.raw_state_dict().values()):
        check_loaded(model)
    return jax.tree.map(lambda leaf: leaf, model)
