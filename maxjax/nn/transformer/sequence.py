"""Functions that call several layers: one for each device's tensor, or one layer after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ...graph import ops
from ...graph.buffer import BufferValue
from ...graph.value import TensorValue


def forward_sharded_layers(layers: Sequence[Callable[[Any], Any]], xs: Sequence[Any]) -> list[Any]:
    """The result of each layer for the tensor of its device.

    Raises:
        ValueError: the numbers of layers and tensors differ.

    Example:
        >>> forward_sharded_layers([lambda x: x + 1, lambda x: x * 2], [1, 5])
        [2, 10]
    """
    if len(layers) != len(xs):
        raise ValueError(
            f"there are {len(layers)} layers and {len(xs)} tensors: one layer needs one tensor"
        )
    return [layer(x) for layer, x in zip(layers, xs, strict=True)]


def forward_sequential_layers(
    layers: Sequence[Any],
    *,
    inputs_for_layer: Callable[[int, list[TensorValue]], Sequence[Any]],
    initial_hidden_states: list[TensorValue],
    on_layer_output: Callable[[int, list[TensorValue]], None] | None = None,
    subgraph_layer_groups: Sequence[Sequence[int]] | None = None,
    name_for_subgraph: Callable[[int], str] = "transformer_block_{}".format,
    weight_prefix_for_layer: Callable[[int], str] | None = None,
    layer_ids: Sequence[int] | None = None,
) -> list[TensorValue]:
    """The hidden states after all layers; groups of equal layers are traced once, as subgraphs.

    Args:
        layers: the layers, in order.
        inputs_for_layer: function of a layer's id and the hidden states that returns the layer's arguments.
        initial_hidden_states: hidden states before the first layer.
        on_layer_output: function that is called with a layer's id and its results.
        subgraph_layer_groups: ids of the layers of each subgraph; other layers are called directly, and so are
            layers with a buffer among their arguments, which a subgraph cannot write to.
        name_for_subgraph: function of a group's index that returns the name of its subgraph.
        weight_prefix_for_layer: function of a layer's id that returns the prefix of its weights' names;
            needed for subgraphs.
        layer_ids: id of each layer; by default its index.

    Raises:
        ValueError: there are groups without ``weight_prefix_for_layer``, or a group has an unknown id.
    """
    ids = list(range(len(layers)) if layer_ids is None else layer_ids)
    groups = {layer: i for i, group in enumerate(subgraph_layer_groups or ()) for layer in group}
    if groups and weight_prefix_for_layer is None:
        raise ValueError("subgraphs need weight_prefix_for_layer")
    if unknown := sorted(set(groups) - set(ids)):
        raise ValueError(
            f"subgraph_layer_groups names layer {unknown[0]}, and the layers are {ids}"
        )
    subgraphs: dict[int, Any] = {}
    h = initial_hidden_states
    for number, layer in zip(ids, layers, strict=True):
        values = inputs_for_layer(number, h)
        leaves = jax.tree.leaves(values, is_leaf=lambda x: isinstance(x, TensorValue))
        writes = any(isinstance(leaf, BufferValue) for leaf in leaves)
        if number not in groups or weight_prefix_for_layer is None or writes:
            result = layer(*values)
            h = list(result) if isinstance(result, list | tuple) else [result]
        else:
            group, prefix = groups[number], weight_prefix_for_layer(number)
            if group not in subgraphs:
                subgraphs[group] = layer.build_subgraph(
                    name_for_subgraph(group), values, weight_prefix=prefix
                )
            h = ops.call(subgraphs[group], *leaves, prefix=prefix)
        if on_layer_output is not None:
            on_layer_output(number, h)
    return h
