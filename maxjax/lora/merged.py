"""``merge`` adds LoRA weights to the base weights, and ``unmerge`` subtracts them again."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ..engine.isolation import isolated
from ..engine.quantize.shards import encode_array
from ..errors import UserInputError
from ..graph.placement.device_major import DeviceMajor
from ..graph.weight.weight import Weight
from ..kernels import QuantArray
from ..models.weights import check_loaded
from ..nn.layer import Module
from ..nn.layer.stack.rearranged import set_static
from ..nn.layer.walk import Walk, check_module
from ..nn.low_rank import norms, ratios, summed
from ..storage.blocks import ENCODERS
from .model import adapted, copy_of, remove
from .targets import TargetLayer

M = TypeVar("M", bound=Module)


def merge(model: M, *, keep: bool = False, requantize: bool = False) -> M:
    """Returns a new model whose weights are ``W + scale · B @ A``, rounded once.

    With DoRA each row of the sum is scaled so that its norm is the trained magnitude.
    Without ``keep`` the result is a model without LoRA, for ``save_pretrained``, ``quantize`` and fast inference.

    Args:
        model: a loaded model with LoRA weights; it is not changed.
        keep: whether to keep A and B, unused, for :func:`unmerge`.
        requantize: whether to dequantise quantised base weights, add the update and quantise the sum,
            which rounds the weights once more; otherwise quantised base weights raise an error.

    Raises:
        UserInputError: there are no LoRA weights, they are merged already, the model is not loaded, a base weight
            is tied to another layer's, or it is quantised and ``requantize`` is not set.
        NotImplementedError: a quantised base weight has a type that maxjax cannot encode; a layer has a
            ``clip_weight``, which would clip the update too; or ``keep`` is set and the LoRA weights are DoRA's:
            :func:`unmerge` could not restore the norms of the rows.

    Example:
        >>> import maxjax
        >>> from maxjax import nn
        >>> model = maxjax.init(nn.Sequential([nn.Linear(4, 8)]), jax.random.key(0))
        >>> tuned = maxjax.lora.add(model, rank=2, key=jax.random.key(1))
        >>> list(maxjax.lora.merge(tuned).raw_state_dict())
        ['0.weight']
    """
    check_module(model, "lora.merge")
    check_loaded(model)
    if any(one.layer.lora.merged for one in adapted(model)):
        raise UserInputError(
            "the LoRA weights are in the model's weights already: lora.unmerge(model) takes them out"
        )
    if keep and any(one.layer.lora.dora for one in adapted(model)):
        raise NotImplementedError(
            "merge(keep=True) of DoRA (dora=True) is not supported: the norms of the base weight's rows are not kept, "
            "so it could not be taken out again; keep the model that you merge"
        )
    new = _changed(model, 1.0, requantize)
    return new if keep else remove(new)


def unmerge(model: M) -> M:
    """Returns a new model that undoes ``merge(model, keep=True)``, up to the rounding of the base weights.

    Args:
        model: a model with merged LoRA weights; it is not changed.

    Raises:
        UserInputError: the model has no LoRA weights, they are not merged, or base weights are quantised.
    """
    check_module(model, "lora.unmerge")
    if not all(one.layer.lora.merged for one in adapted(model)):
        raise UserInputError("the LoRA weights are not merged: there is nothing to take out")
    return _changed(model, -1.0, False)


@isolated()
def _changed(model: M, sign: float, requantize: bool) -> M:
    new = copy_of(model)
    _check_tied(new)
    for one in adapted(new):
        layer, lora = one.layer, one.layer.lora
        _add(one, sign * lora.scale, requantize)
        set_static(layer, "lora", dataclasses.replace(lora, merged=sign > 0))
    return new


def _check_tied(model: Module) -> None:
    """Checks that no base weight is tied to another layer's: merging would change that layer too."""
    walk = Walk(model, stacked=True)
    places: dict[int, list[str]] = {}
    for one in walk.references:
        places.setdefault(id(walk.holder(one.weight)), []).append(one.name)
    for one in adapted(model):
        names = places[id(walk.holder(one.base))]
        if len(names) > 1:
            raise UserInputError(
                f"'{names[0]}' and '{names[1]}' are one tied weight: merging the LoRA update of "
                "one would change the other too. maxjax.lora.save keeps the adapter separate"
            )


def _add(target: TargetLayer, scale: float, requantize: bool) -> None:
    layer, base = target.layer, target.base
    if not isinstance(layer.weight, Weight):
        raise NotImplementedError(
            f"the base weight of '{target.names[0]}' is stored as the several tensors of a quantised format, "
            "which are not quantised again here: keep the LoRA weights apart (maxjax.lora.save), or load them for the "
            "model of floats that this one was made of, and merge them there"
        )
    if getattr(layer, "clip_weight", None) is not None:
        raise NotImplementedError(
            f"merge of a layer with clip_weight is not supported, as it would clip the update too: '{target.names[0]}'"
        )
    holders = [
        w if w.home is None else w.home[0]
        for w in (base, layer.lora_A, layer.lora_B, layer.lora_magnitude_vector)
        if w is not None
    ]
    base_holder, parts = holders[0], [holder.array() for holder in holders[1:]]
    packing, leaf = base_holder.spec.packing, base_holder.array()
    if packing is not None:
        if not requantize:
            raise UserInputError(
                f"the base weight of '{target.names[0]}' is quantised ({packing.value}), and merging would round it "
                "again: load the model with dtype='float32' before tuning, keep the adapter apart "
                "(maxjax.lora.save), or pass requantize=True"
            )
        if packing.value not in ENCODERS:
            raise NotImplementedError(
                f"weights of type {packing.value} are not quantised again here: '{target.names[0]}'"
            )
    floats = leaf if packing is None else QuantArray(leaf, packing.value).__jax_array__()
    depth = len(base_holder.spec.spans)
    found = _sum(scale, layer.out_axis, base_holder.spec.layout, depth, floats, *parts)
    if packing is None:
        base_holder.put(jax.device_put(found, leaf.sharding))
    else:
        base_holder.put(encode_array(target.names, found, packing.value, None).blocks)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _sum(
    scale: float,
    out_axis: int,
    layout: DeviceMajor | None,
    depth: int,
    base: Any,
    a: Any,
    b: Any,
    magnitudes: Any = None,
) -> jax.Array:
    """``base + scale · b @ a``, times DoRA's factors if ``magnitudes`` are given, in the dtype of ``base``.

    The arrays have ``depth`` leading axes, those of stacked layers.
    """
    restore, arrange = (
        (lambda array: array,) * 2 if layout is None else (layout.restore, layout.arrange)
    )
    for _ in range(depth):
        restore, arrange = jax.vmap(restore), jax.vmap(arrange)
    found = summed(restore(base), a, b, scale, out_axis)
    if magnitudes is not None:
        factors = ratios(magnitudes, norms(found, out_axis))
        found = found * jnp.expand_dims(factors, -1 if out_axis == 0 else -2)
    return arrange(found.astype(base.dtype))
