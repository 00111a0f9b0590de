"""The loop over layers, and how their weights are split over a mesh."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ...graph.placement.arrays import platform_of
from ...graph.placement.mesh import axis_of
from ...graph.placement.split import COLUMNS, REPLICATED, ROWS, Segment, Split
from ...nn.layer import LayerList, LayerStack, Module
from .cache import LayerCache

C = TypeVar("C", bound=LayerCache)
# JAX's platforms that are GPUs.
_GPUS = ("gpu", "cuda", "rocm")
# The longest repeating pattern of layers that ``pattern`` finds.
_LONGEST_PERIOD = 32


def run_layers(layers: Any, x: Any, cache: C, *args: Any) -> tuple[Any, C]:
    """Run all layers in order: ``x, cache = layer(x, cache, *args)`` for each.

    Layers that are stacked (a LayerStack) are compiled once and run as a loop. Features of the call, as those of
    pictures, are put in place of their tokens before the first layer.

    Args:
        layers: a LayerList or a LayerStack.
        x: hidden states, an array or a pytree of arrays.
        cache: the cache of the model's call.
        args: further arguments of every layer: pytrees of arrays, and hashable constants.

    Returns:
        The hidden states after the last layer, and the cache.
    """
    if (features := cache.context.features) is not None:
        x = features.put(x)
    carry, rest = (x, cache.states), cache.at(0, {})
    if isinstance(layers, LayerStack):
        x, states = layers.scan(carry, index="number", call=_run_layer, rest=rest, args=args)
        return x, cache.at(0, states)
    for i, layer in enumerate(layers):
        # The barrier hides the number from XLA, which would otherwise compile each layer's
        # kernels anew, and could turn writes to one layer of the cache into copies.
        number = jax.lax.optimization_barrier(jnp.int32(i))
        carry = _run_layer(layer, carry, rest, args, number)
    return carry[0], cache.at(0, carry[1])


def _run_layer(layer: Module, carry: Any, rest: Any, args: Any, number: Any) -> tuple[Any, Any]:
    x, states = carry
    x, cache = layer(x, rest.at(number, states), *args)
    if rest.context.features is not None:
        x = rest.context.features.added(x, number)
    return x, cache.states


def split_heads_over_mesh(
    outputs: Mapping[str, int], inputs: Mapping[str, int], head_dim: int
) -> dict[str, Any]:
    """Return sharding rules that split linear layers between heads, over the mesh axis ``model``.

    Args:
        outputs: attribute of each Linear whose outputs are heads (queries, keys, values) → number of heads.
        inputs: attribute of each Linear whose inputs are heads (the output projection) → number of heads.
        head_dim: width of a head.

    Example:
        >>> rules = split_heads_over_mesh({"q_proj": 4}, {"o_proj": 4}, 8)
        >>> {name: (split.axis, split.segments) for name, split in rules.items()}
        {'q_proj': (0, (Segment(size=32, num_heads=4),)), 'o_proj': (1, (Segment(size=32, num_heads=4),))}
    """
    return {
        name: Split(axis, (Segment.head_aware(count, head_dim),))
        for axis, layers in enumerate((outputs, inputs))
        for name, count in layers.items()
    }


def split_features_over_mesh(outputs: Sequence[str], inputs: Sequence[str]) -> dict[str, Any]:
    """Return sharding rules that split the inner features of an MLP over the mesh axis ``model``.

    Args:
        outputs: attributes of the Linears whose outputs are inner features (gate, up).
        inputs: attributes of the Linears whose inputs are inner features (down).

    Example:
        >>> {name: split.axis for name, split in split_features_over_mesh(["up_proj"], ["down_proj"]).items()}
        {'up_proj': 0, 'down_proj': 1}
    """
    return dict.fromkeys(outputs, ROWS) | dict.fromkeys(inputs, COLUMNS)


def replicate_over_mesh(*names: str) -> dict[str, Any]:
    """Return sharding rules by which every device holds these layers completely, such as a router or a small table."""
    return dict.fromkeys(names, REPLICATED)


def is_faster_separate(place: Any) -> bool:
    """Return whether layers with weights of their own are faster than a loop over stacked ones: on GPUs without fsdp.

    ``LanguageModel.stack_for`` says why.

    Args:
        place: mesh, Sharding or device; None for the default device.
    """
    fsdp = axis_of(place, "fsdp") if isinstance(place, Mesh) else None
    gathered = fsdp is not None and place.shape[fsdp] > 1
    return platform_of(place) in _GPUS and not gathered


def kind_of(layer: Module) -> Hashable:
    """Return the structure, settings, shapes and dtypes of a layer; layers with equal ones can be stacked."""
    leaves, structure = jax.tree.flatten(layer)
    return structure, tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves)


def pattern(kinds: Sequence[Hashable]) -> tuple[int, int]:
    """(Number of leading layers outside the pattern, length of the repeating pattern) of these kinds of layers.

    The result is the one with the fewest layer bodies to compile.

    Example:
        >>> pattern("fffssss"), pattern("ssfssfs")
        ((3, 1), (0, 3))
    """
    count = len(kinds)
    best = (count, count - 1, 1)
    for period in range(1, min(_LONGEST_PERIOD, count) + 1):
        first = count - period
        while first > 0 and kinds[first - 1] == kinds[first - 1 + period]:
            first -= 1
        bodies = first + period + (count - first) % period
        if bodies < best[0]:
            best = (bodies, first, period)
    return best[1:]


def stack_layers(model: Module) -> None:
    """Stack the layers of each LayerList in a model, in place, so that equal layers are compiled once."""
    for module, name, layers in _lists(model, LayerList):
        first, period = pattern([kind_of(layer) for layer in layers])
        setattr(module, name, layers.stack(period=period, first=first))


def unstack_layers(model: Module) -> None:
    """Give each layer of each LayerStack in a model its own weights again, in place."""
    for module, name, layers in _lists(model, LayerStack):
        setattr(module, name, layers.unstack())


def _lists(model: Module, kind: type) -> list[tuple[Module, str, Any]]:
    """The lists of several layers in a model: the module that holds each, and its name there."""
    modules = [module for _, module in model.named_modules()]
    children: list[Any] = [(m, name, child) for m in modules for name, child in m.sublayers.items()]
    return [found for found in children if type(found[2]) is kind and len(found[2]) > 1]
