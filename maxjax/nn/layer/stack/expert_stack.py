"""ExpertStack: the experts of a layer, whose weights of one name are one array ``[experts, ...]``.

A mixture can then select experts by index without copying them, and the number of arrays in a model does not
depend on the number of experts.
"""

from __future__ import annotations

from typing import Any

from ....graph.weight.stacked import StackedWeight
from ..layer_list import LayerList
from ..module import Module
from .layer_stack import LayerStack, mark
from .per_layer import StackPattern


class ExpertStack(LayerStack):
    """``count`` equal experts with stacked weights, of which a mixture runs some for each token.

    Args:
        expert: the first expert; the others are made on demand.
        count: number of experts.

    ``experts[3].up_proj.weight`` is a view, and state dicts have the names of a list of experts.
    A LayerStack of layers that hold ExpertStacks has arrays ``[layers, experts, ...]``.

    Example:
        >>> import jax
        >>> from maxjax import nn
        >>> from maxjax.graph import DeviceRef
        >>> from maxjax.nn.layer import ExpertStack
        >>> experts = ExpertStack(nn.Linear(4, 3, "float32", DeviceRef.CPU()), 8)
        >>> jax.tree.leaves(experts)[0].shape, list(experts.raw_state_dict())[7]
        ((8, 3, 4), '7.weight')
    """

    _mx_nests = True

    def __init__(self, expert: Module, count: int):
        Module.__init__(self)
        Module.__setattr__(self, "_list_class", LayerList)
        self._stack_equal(expert, count)

    def _stack_equal(self, expert: Module, count: int) -> None:
        """Hold ``count`` stacked experts that are equal to the given first one."""
        layout = StackPattern(count, 0, 1, count)
        held = expert._mx_definition()[1]
        stacks = [StackedWeight(weight, layout.span(0)) for weight in held]
        for stack, weight in zip(stacks, held, strict=True):
            stack.adopt([weight])
        mark(expert, set(), True)
        self._hold([expert], stacks, layout)

    @property
    def is_stacked(self) -> bool:
        """Whether the weights are stacked; after ``unstack`` each expert has its own weights."""
        return self._layout.slots > 0

    def unstack(self) -> Any:
        """Give each expert its own weights, whose values do not change; returns this object."""
        super().unstack()
        return self

    def restack(self) -> None:
        """Stack experts that were unstacked, and of which only the first was changed since; they have no values."""
        self._stack_equal(self[0], len(self))

    def holder(self, name: str) -> Any:
        """The StackedWeight with the values of all experts' weights of a name.

        If the layer is in a LayerStack, it is this layer's part of that stack's StackedWeight.

        Raises:
            KeyError: the experts have no weight of that name, or were unstacked.
        """
        definition, holders = self._mx_definition()
        full = f"{self._layout.span(0).pattern}.{name}"
        return dict(zip(definition.names, holders, strict=True))[full]
