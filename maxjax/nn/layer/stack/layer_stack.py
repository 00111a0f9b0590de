"""LayerStack: n equal layers with stacked weights and one compiled body.

XLA inlines a jitted layer at each call, so compile time grows with depth. A
LayerStack keeps the weights of one name in all layers as one array ``[n, ...]`` and runs
one body over it (``scanning.py``). Its layers remain usable: ``stack[3]`` is a Module
whose Weights are views, and names in state dicts remain ``layers.3.weight``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ....graph.weight.epoch import structure_changed
from ....graph.weight.running import RUNNING
from ....graph.weight.spec import Span
from ....graph.weight.stacked import StackedWeight
from ....graph.weight.weight import Weight, outside_traces
from .. import hooks
from ..call_stack import run
from ..definition import build
from ..layer_list import LayerList, in_turn
from ..module import Module
from ..observe.frames import marks_of
from ..walk import Walk
from .per_layer import PerLayer, StackPattern, definition_of, pattern_of
from .scanning import ScanOptions, loop, policy, scan


class LayerStack(LayerList, is_stack=True):
    """Equal layers, or a repeating pattern of layers, compiled once.

    Args:
        layers: Modules of equal structure: the same classes, attributes, and shapes and dtypes of
            weights. They become views of the stack and can no longer be changed separately. Stacking
            goes weight by weight, and temporarily needs memory for one weight of all layers.
        period: number of layers in the repeating pattern; detected by default. The layers that remain
            at the end must follow the pattern, and run individually.
        first: number of layers at the front that are not part of the pattern.

    Layers, names, ties, state dict and hooks are those of a LayerList. A weight that is
    the same object in all layers stays a single weight. In the pytree each weight of the pattern is
    one leaf ``[repeats, ...]``, at a path like ``layers.*.weight``.

    Raises:
        ValueError: the layers differ (the message names the difference), or only some of them share a weight.
        TypeError: an item is not a Module.
        NotImplementedError: a layer holds a LayerStack other than an ExpertStack.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from maxjax import init, nn
        >>> from maxjax.graph import DeviceRef
        >>> layers = nn.LayerList(nn.Linear(4, 4, "float32", DeviceRef.CPU()) for _ in range(8))
        >>> stack = init(layers.stack(), jax.random.key(0))
        >>> [leaf.shape for leaf in jax.tree.leaves(stack)], stack[3].weight.shape
        ([(8, 4, 4)], [Dim(4), Dim(4)])
        >>> stack.scan(jnp.ones((2, 4))).shape
        (2, 4)
    """

    _layout: StackPattern
    _list_class: type[LayerList]
    _mx_is_stack = True

    def __init__(
        self,
        layers: Iterable[Module] = (),
        *,
        period: int | None = None,
        first: int = 0,
        list_class: type[LayerList] = LayerList,
    ):
        Module.__init__(self)
        Module.__setattr__(self, "_list_class", list_class)
        found = list(layers)
        definitions = [definition_of(i, layer) for i, layer in enumerate(found)]
        layout = pattern_of(found, definitions, period, first)
        self._arrange(found, layout)

    def _arrange(self, layers: list[Module], layout: StackPattern) -> None:
        """Adds the layers and stacks those that repeat."""
        seen: dict[int, str] = {}
        plans = [
            _stacks([layers[i] for i in layout.members(slot)], layout.span(slot), seen)
            for slot in range(layout.slots)
        ]
        groups = [(layout.span(k), group) for k, plan in enumerate(plans) for group in plan.weights]
        # Weight by weight, to save memory: the layers' own values are dropped after their stack is made.
        stacks: list[StackedWeight] = []
        try:
            for span, group in groups:
                with outside_traces(*(holder.leaf for holder in group)):
                    stacks.append(StackedWeight.of(group, span))
                stacks[-1].adopt(group)
        except BaseException:  # JAX may fail to stack values: then no layer is changed
            for stack in stacks:
                stack.dissolve()
            raise
        for slot, plan in enumerate(plans):
            for i in layout.members(slot):
                mark(layers[i], plan.shared, True)
        self._hold(layers, stacks, layout)

    def _hold(
        self, layers: list[Module], stacks: list[StackedWeight], layout: StackPattern
    ) -> None:
        """Adds the given layers, which start with layer 0, and the stacks; representatives become children."""
        vars(self).update(_mx_made=dict(enumerate(layers)), _mx_stacks=tuple(stacks))
        self._mx_children.clear()
        for i in layout.order():
            name = str(i) if layout.slot_of(i) is None else layout.span(layout.slot_of(i)).pattern
            self._mx_children[name] = layers[i]
        Module.__setattr__(self, "_layout", layout)
        structure_changed()

    def unstack(self) -> LayerList:
        """A LayerList of these layers, each with its own weights, whose values do not change.

        Unstacking goes weight by weight, and temporarily needs memory for one weight of all layers.
        """
        layers = self.layers
        for stack in self._mx_stacks:
            stack.refuse_in_stack("an arrangement")
        dissolved: list[StackedWeight] = []
        try:
            for stack in self._mx_stacks:
                with outside_traces(stack.leaf):
                    stack.dissolve()
                dissolved.append(stack)
        except BaseException:  # for example, not enough memory: then nothing is changed
            for stack in dissolved:
                stack.restore()
            raise
        for layer in layers:
            mark(layer, set(), False)
        # This object remains as a stack without stacked layers, which runs its layers one by one.
        layout = StackPattern(len(layers), len(layers), 1, 0)
        self._arrange(layers, layout)
        return self._list_class(layers)

    def stack(self, *, period: int | None = None, first: int = 0) -> LayerStack:
        """Returns this stack. To stack in another way, call :meth:`unstack` first."""
        if not self._layout.slots:  # it was unstacked
            return LayerStack(self.layers, period=period, first=first, list_class=self._list_class)
        fits = period in (None, self._layout.period) and first == self._layout.first
        if not fits and (period, first) != (None, 0):
            raise ValueError(f"the layers are stacked already, as {self._layout}: unstack() first")
        return self

    # -- the layers

    def _layer(self, i: int) -> Module:
        made = vars(self).setdefault("_mx_made", {})
        if i not in made:
            slot = self._layout.slot_of(i)
            if slot is None:
                made[i] = self._mx_children[str(i)]
            else:
                span = self._layout.span(slot)
                layer, steps = self._mx_children[span.pattern], (i - span.start) // span.step
                made.setdefault(i, self._replica(layer, i, steps) if steps else layer)
        return made[i]

    def _replica(self, layer: Module, number: int, steps: int) -> Module:
        """A copy of ``layer``, the first of equal layers, for another number: that many ``steps`` later in the arrays.

        Modules that the model also holds in other places (``_mx_elsewhere``) are reused.
        """
        elsewhere = vars(self).get("_mx_elsewhere", {})
        definition, holders = layer._mx_definition()
        walk = Walk(layer, stacked=True)
        given = {}
        for i, (module, path) in enumerate(zip(walk.modules, walk.paths, strict=True)):
            other = elsewhere.get((number, path)) if module._mx_in_stack else module
            if other is not None:
                given[i] = other
        # The axis of this stack's layers in the arrays: behind those of the stacks that this one is in.
        own = next(iter(self._mx_stacks), None)
        axis = 0 if own is None else len((own.home or (own,))[0].spec.spans) - len(own.spec.spans)

        def later(holder: Weight) -> Weight:
            """What the other layer has instead of a Weight, or of the stack of an inner layer, of the first one."""
            if holder.home is None:
                return holder
            stack, first = holder.home
            start = first + steps * math.prod(stack.spec.lead[axis + 1 :])
            return stack.inner(start) if isinstance(holder, StackedWeight) else stack.view(start)

        values = [{name: vars(m)[name] for name in m._mx_statics} for m in walk.modules]
        keys = [dict(module._mx_statics) for module in walk.modules]
        made = build(definition, [later(holder) for holder in holders], values, keys, given)
        for i, (module, new) in enumerate(zip(walk.modules, made, strict=True)):
            if i not in given:
                marks = marks_of(layer, module, number)
                vars(new).update(_mx_in_stack=True, _mx_marks=marks)
        return made[0]

    @property
    def layers(self) -> list[Any]:
        """The layers as a plain list (a new one each time)."""
        return [self._layer(i) for i in range(len(self))]

    def _mx_layers(self) -> dict[str, Module]:
        return {str(i): layer for i, layer in enumerate(self.layers)}

    def __getitem__(self, i: int | slice) -> Any:
        try:
            found = range(len(self))[i]
        except IndexError:
            raise IndexError(f"there is no layer {i}: there are {len(self)}") from None
        return self._layer(found) if isinstance(found, int) else [self._layer(k) for k in found]

    def __getattr__(self, name: str) -> Any:
        if name.isdecimal() and int(name) < len(self):
            return self._layer(int(name))
        return super().__getattr__(name)

    def __len__(self) -> int:
        return self._layout.count

    def _renew(self, layers: list[Any]) -> None:
        raise TypeError("the layers of a LayerStack cannot be changed: unstack() first")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.isdecimal() or isinstance(value, (Module, Weight)):
            raise TypeError(f"{type(self).__name__}.{name} cannot be set: unstack() first")
        super().__setattr__(name, value)

    def replace_module(self, name: str, module: Module) -> None:
        """Raises an error: the layers must stay equal."""
        self._renew([])

    def per_layer(self, values: Iterable[Any]) -> PerLayer:
        """A PerLayer with one value for each layer, a pytree of arrays, as an argument of :meth:`scan`.

        Layers at different positions of the pattern may have values of different shapes.

        Raises:
            ValueError: the number of values is not that of layers, or values of equal layers differ in type.
        """
        return PerLayer.of(list(values), self._layout)

    # -- running them

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layers in order, as a LayerList does: each is called with the result of the layer before."""
        if len(args) == 1 and not kwargs:
            return self.scan(args[0])
        return in_turn(self.layers, args, kwargs)

    def scan(
        self,
        carry: Any,
        *xs: Any,
        index: str | None = None,
        call: Callable[..., Any] | None = None,
        remat: Any = None,
        unroll: int | bool = 1,
        **shared: Any,
    ) -> Any:
        """Runs all layers: ``carry = layer(carry, *x, **shared)``, compiled as one loop.

        Args:
            carry: value that is passed from layer to layer: an array or a pytree of arrays, with the
                same shapes and dtypes after each layer.
            xs: values for each layer, such as a cache: pytrees of arrays ``[n, ...]``, a list
                of n pytrees, or the result of :meth:`per_layer`.
            index: name of a keyword argument in which each layer gets its index.
            call: function that runs a layer: ``call(layer, carry, *x, **shared)`` in place of
                ``layer(carry, *x, **shared)``. It must be hashable, such as a function of a module.
            remat: rematerialisation under differentiation: True recomputes everything inside a
                layer instead of storing it; otherwise a policy of ``jax.checkpoint_policies``
                or its name. None stores everything.
            unroll: number of unrolled steps of the loop (``jax.lax.scan``).
            shared: keyword arguments that are the same for all layers. Values that are not
                arrays (a flag, a name) are constants.

        Returns:
            The last carry. If the layers return ``(carry, *outputs)``, so does this method, with
            each output as a pytree of arrays ``[n, ...]``. Outputs are a PerLayer instead if an
            item of ``xs`` is one, or if layers return different shapes.

        Raises:
            TypeError: a layer returns neither a carry with the type of its argument nor a tuple that
                begins with one.
            ValueError: an item of ``xs`` is not for n layers, or a weight has no value.

        While hooks are installed, the layers run one by one, so that hooks see each of them. Otherwise
        the loop is a jitted function: anything that a layer reads besides its arguments, weights and
        attributes (such as a global variable) keeps the value of the first trace.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from maxjax import init, nn
            >>> from maxjax.graph import DeviceRef
            >>> class Block(nn.Module):
            ...     def __init__(self):
            ...         super().__init__()
            ...         self.up = nn.Linear(4, 4, "float32", DeviceRef.CPU())
            ...     def __call__(self, h, cache, scale):
            ...         return h + scale * self.up(h), cache + h
            >>> layers = init(nn.LayerList(Block() for _ in range(6)).stack(), jax.random.key(0))
            >>> h, caches = layers.scan(jnp.ones(4), jnp.zeros((6, 4)), scale=0.1)
            >>> caches.shape
            (6, 4)
        """
        if not isinstance(unroll, (int, bool)) or unroll < 0:
            raise ValueError(f"unroll is a number of steps or a bool, not {unroll!r}")
        plan = ScanOptions(
            self._layout, index, call, policy(remat) if remat else None, unroll, type(unroll)
        )
        running = RUNNING.modules
        if running and running[-1] is self:  # called by __call__
            return _run(self, plan, carry, xs, shared)
        return run(self, _run, (plan, carry, xs, shared), {})


def _run(stack: LayerStack, plan: ScanOptions, carry: Any, xs: Any, shared: Any) -> Any:
    one_by_one = hooks.token() is not None or not stack._layout.slots
    return (loop if one_by_one else scan)(stack, plan, carry, xs, shared)


class _Group(NamedTuple):
    shared: set[int]
    weights: list[list[Weight]]


def _stacks(layers: Sequence[Module], span: Span, seen: dict[int, str]) -> _Group:
    """The ids of objects that all layers share, and the groups of Weights, each of which forms one stack."""
    walks = [Walk(layer, stacked=True) for layer in layers]
    shared = set[int]()
    for same in zip(*(walk.modules for walk in walks), strict=True):
        if len(layers) > 1 and all(module is same[0] for module in same):
            shared.add(id(same[0]))
    weights: list[list[Weight]] = []
    names = layers[0]._mx_definition()[0].names
    for name, *group in zip(names, *(layer._mx_definition()[1] for layer in layers), strict=True):
        if len(group) > 1 and all(weight is group[0] for weight in group):
            shared.add(id(group[0]))
            continue
        for i, weight in enumerate(group):
            full = span.name(f"{span.pattern}.{name}", i)
            if id(weight) in seen:
                raise ValueError(f"'{seen[id(weight)]}' and '{full}' are one tied weight: layers that share a weight "
                                 "with some of the others cannot be stacked")  # fmt: skip
            seen[id(weight)] = full
        weights.append(group)
    return _Group(shared, weights)


def mark(layer: Module, shared: set[int], in_stack: bool) -> None:
    """Records whether a layer is in a stack, in all of its Modules that are not ``shared`` by all layers."""
    walk = Walk(layer, stacked=True)
    for module, inner in zip(walk.modules, walk.in_stack, strict=True):
        if id(module) not in shared and not inner:  # Modules of an inner stack remain in that stack
            vars(module)["_mx_in_stack"] = in_stack
