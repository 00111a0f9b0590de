"""Runs a LayerStack: one body under ``lax.scan``, traced once for each structure and types of arguments.

The body has two forms. Without differentiation its weights are StackSlices: the whole stack is an operand, and a
kernel reads the slice that it needs. Under differentiation the weights are scanned inputs, because the
cotangent of a slice of a closed-over array would be as large as the stack at every step. A
``custom_jvp`` chooses the form, also if a jitted function is differentiated from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ....graph.kind import KIND, as_array
from ....graph.weight.weight import Weight
from ....kernels import StackSlice, explicit
from ....kernels.operation import varying_with
from ..definition import Definition, Variant, unflatten
from ..observe import loops
from ..observe.patches import unwrapped
from ..observe.plans import Taps, joined
from .per_layer import PerLayer, StackPattern


class ScanOptions(NamedTuple):
    """The options of a run: the arguments of ``LayerStack.scan`` that are not arrays."""

    layout: StackPattern
    index: str | None
    call: Callable[..., Any] | None
    remat: Any
    unroll: int | bool
    unroll_type: type  # 1 == True, but they mean different things


class _Static(NamedTuple):
    """The static arguments of one trace of the loop; with the types of the arrays, its cache key."""

    definition: Definition
    plan: ScanOptions
    tree: Any
    constants: tuple[tuple[int, type, str | None, Any], ...]
    keep: bool
    kind: int  # of values (graph/kind.py)


def scan(
    stack: Any, plan: ScanOptions, carry: Any, xs: Sequence[Any], shared: Mapping[str, Any]
) -> Any:
    """Runs the stack as one loop; see ``LayerStack.scan``."""
    definition, holders = stack._mx_definition()
    arrays = [holder.array() for holder in holders]
    carry, xs, shared = _present((_plain(carry), xs, dict(shared)))
    values = tuple(_per_layer(x, plan.layout) for x in xs)
    leaves, tree = jax.tree.flatten(shared)
    dynamic = [leaf for leaf in leaves if _is_array(leaf)]
    constants = tuple(
        (i, type(v), repr(v) if isinstance(v, float) else None, v)  # 0.0 equals -0.0
        for i, v in enumerate(leaves)
        if not _is_array(v)
    )
    keep = any(isinstance(x, PerLayer) for x in xs)
    static = _Static(definition, plan, tree, constants, keep, KIND.now)
    try:
        hash(static)
    except TypeError as error:
        names = ", ".join(shared)
        raise TypeError(
            f"keyword arguments of scan ({names}) must be arrays or hashable: {error}"
        ) from None
    carry = jax.tree.map(jnp.asarray, carry)
    operands = (arrays, carry, values, dynamic, loops.patches_of(stack))
    if loops.holds_functions(stack):
        # A function may close over tracers, also over those that are differentiated, which a
        # ``custom_jvp`` would not see.
        carry, outputs, taps = _run_plain(static, *operands)
    else:
        carry, outputs, taps = _run(static, *operands)
    loops.hand_on(taps)
    return (carry, *outputs) if outputs else carry


def loop(
    stack: Any, plan: ScanOptions, carry: Any, xs: Sequence[Any], shared: Mapping[str, Any]
) -> Any:
    """Runs the layers one by one, so that hooks see each call."""
    layout = plan.layout
    carry = _plain(carry)
    values = [_per_layer(x, layout) for x in xs]
    collected = []
    for i, layer in enumerate(stack.layers):
        x = [value[i] for value in values]
        carry, outputs = _call(layer, shared, plan, jnp.int32(i), carry, x)
        collected.append(outputs)
    _check_outputs(collected)
    keep = any(isinstance(x, PerLayer) for x in xs)
    outputs = _gather([PerLayer.of(list(y), layout) for y in zip(*collected, strict=True)], keep)
    return (carry, *outputs) if outputs else carry


def _plain(carry: Any) -> Any:
    """The carry with arrays instead of Weights, so that all layers get arrays."""
    return jax.tree.map(
        lambda v: as_array(v) if isinstance(v, Weight) else v,
        carry,
        is_leaf=lambda v: isinstance(v, Weight),
    )


def _present(tree: Any) -> Any:
    """The tree with Weights and Modules of current values, which inside a Graph are its tracers."""

    def present(value: Any) -> Any:
        if isinstance(value, Weight):
            return jax.tree.unflatten(jax.tree.structure(value), [value.array()])
        if not hasattr(value, "_mx_definition"):
            return value
        definition, holders = value._mx_definition()
        return unflatten(Variant(definition), [holder.array() for holder in holders])

    return jax.tree.map(
        present, tree, is_leaf=lambda v: isinstance(v, Weight) or hasattr(v, "_mx_definition")
    )


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def _per_layer(x: Any, layout: StackPattern) -> PerLayer:
    if isinstance(x, PerLayer):
        if x.layout != layout:
            raise ValueError(f"a PerLayer for {x.layout} does not fit a stack of {layout}")
        return x
    if isinstance(x, list):
        return PerLayer.of(x, layout)
    for path, leaf in jax.tree.leaves_with_path(x):
        if np.ndim(leaf) < 1 or np.shape(leaf)[0] != layout.count:
            where = jax.tree_util.keystr(path)
            raise ValueError(f"values for each layer need a leading axis of {layout.count} layers; "
                             f"x{where} has shape {tuple(np.shape(leaf))}")  # fmt: skip
    return PerLayer.split(jax.tree.map(jnp.asarray, x), layout)


def _gather(outputs: Sequence[PerLayer], keep: bool) -> tuple[Any, ...]:
    return tuple(outputs if keep else (y.merged() for y in outputs))


# -- the loop itself


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _either(static: _Static, *operands: Any) -> Any:
    return _loop(True, static, *operands)


@_either.defjvp
def _(static: _Static, primals: Any, tangents: Any) -> Any:
    return jax.jvp(partial(_loop, False, static), primals, tangents)


def _loop(
    sliced: bool, static: _Static, arrays: Any, carry: Any, xs: tuple[PerLayer, ...], dynamic: Any,
    patches: Any,
) -> Any:  # fmt: skip
    """Runs the layers; returns the last carry, the outputs, and the values that observers have recorded."""
    plan, layout = static.plan, static.plan.layout
    stack = unflatten(Variant(static.definition), arrays)
    plans = loops.active_plans(stack, patches)
    # Inside shard_map, the carry must vary over the mesh axes of xs and operands; over those of weights, layers sum.
    carry = varying_with(carry, xs, dynamic)
    shared = _merged(static, dynamic)

    def step(body: _Body, leaves: Any, i: Any, carry: Any, x: Any) -> Any:
        """The carry after a layer, its outputs, and the values that observers have recorded in it."""
        layer = unflatten(Variant(body.definition), leaves)
        if not plans:
            return *_call(layer, shared, plan, i, carry, x), {}
        with loops.frame_of_layer(layer, plans, body.members, i) as frame:
            carry, outputs = _call(layer, shared, plan, i, carry, x)
        return carry, outputs, frame.taps

    run = step
    if plan.remat is not None and not sliced:
        saved = None if plan.remat is True else plan.remat
        run = jax.checkpoint(step, policy=saved, prevent_cse=False, static_argnums=0)
    bodies = [
        _Body(stack._mx_children[layout.span(slot).pattern], layout.members(slot))
        for slot in range(layout.slots)
    ]
    collected: dict[int, Any] = {}
    taps: list[Taps] = []

    def single(i: int, carry: Any) -> Any:
        body = _Body(stack._mx_children[str(i)])
        x = tuple(value[i] for value in xs)
        carry, collected[i], tapped = run(body, body.leaves, jnp.int32(i), carry, x)
        taps.append(tapped)
        return carry

    def repeat(state: Any, at: Any) -> Any:
        # The carry counts the index: as a scanned input it would make compilation a tenth longer.
        (k, carry, buffers), (scanned, inputs) = state, at
        outputs, written = [], []
        for slot, body in enumerate(bodies):
            weights = body.at(k, None if sliced else scanned[slot])
            i = k * layout.period + (layout.first + slot)
            carry, y, tapped = run(body, weights, i, carry, inputs[slot])
            outputs.append(y)
            written.append(loops.write(buffers[slot], tapped, i))
        return (k + 1, carry, written), outputs

    for i in range(layout.first):
        carry = single(i, carry)
    slots = [tuple(value.slots[slot] for value in xs) for slot in range(layout.slots)]
    scanned = None if sliced else [body.stacks for body in bodies]
    buffers: list[Taps] = [{}] * layout.slots
    if plans:
        # The shapes of the values that a layer records are known only after a trace.
        first = jax.tree.map(lambda a: a[0], slots), jax.tree.map(lambda a: a[0], scanned)
        for slot, body in enumerate(bodies):
            weights = body.at(jnp.int32(0), None if sliced else first[1][slot])
            of_body = partial(run, body)
            shapes = jax.eval_shape(of_body, weights, jnp.int32(0), carry, first[0][slot])
            buffers[slot] = loops.empty_buffers(shapes[2], body.members, carry)
    start = (jnp.int32(0), carry, buffers)
    (_, carry, buffers), outputs = jax.lax.scan(
        repeat, start, (scanned, slots), length=layout.repeats, unroll=plan.unroll
    )
    taps += map(loops.finished, buffers)
    for i in range(layout.end, layout.count):
        carry = single(i, carry)
    _check_outputs([*outputs, *collected.values()])
    rest = [collected[i] for i in sorted(collected)]
    ys = [
        PerLayer([slot[m] for slot in outputs], [own[m] for own in rest], layout)
        for m in range(len(outputs[0]))
    ]
    return carry, _gather(ys, static.keep), joined(*taps)


_run: Any = jax.jit(_either, static_argnums=0)
_run_plain: Any = jax.jit(partial(_loop, False), static_argnums=0)


def _merged(static: _Static, dynamic: Sequence[Any]) -> Any:
    """The keyword arguments that all layers get, from those that are constants and those that are arrays."""
    constants = {i: value for i, _, _, value in static.constants}
    arrays = iter(dynamic)
    count = len(constants) + len(dynamic)
    leaves = [constants[i] if i in constants else next(arrays) for i in range(count)]
    return jax.tree.unflatten(static.tree, leaves)


class _Body:
    """The layer that represents all layers at one position of the pattern, and the sources of its weights.

    Attributes:
        members: indices of these layers; () for a layer that runs alone.
    """

    def __init__(self, layer: Any, members: Sequence[int] = ()):
        self.members = members
        self.definition, self.holders = layer._mx_definition()
        self.homes = [w.home for w in self.holders]
        self.stacks = [home[0].leaf for home in self.homes if home is not None]
        self.leaves = [w.leaf for w in self.holders]

    def at(self, k: Any, scanned: Sequence[Any] | None) -> list[Any]:
        """The leaves of layer ``k``: slices of the stacks, or the scanned inputs."""
        own = iter([StackSlice(stack, k) for stack in self.stacks] if scanned is None else scanned)
        return [
            leaf if home is None else next(own)
            for leaf, home in zip(self.leaves, self.homes, strict=True)
        ]


def _call(
    layer: Any, shared: Mapping[str, Any], plan: ScanOptions, i: Any, carry: Any, x: Sequence[Any]
) -> tuple[Any, tuple[Any, ...]]:
    numbered = {} if plan.index is None else {plan.index: i}
    call = layer if plan.call is None else partial(plan.call, layer)
    return _split(call(carry, *x, **shared, **numbered), carry)


def _split(result: Any, carry: Any) -> tuple[Any, tuple[Any, ...]]:
    """Splits the result of a layer into (carry, outputs)."""
    expected = jax.tree.structure(unwrapped(carry))
    outputs: tuple[Any, ...] = ()
    kept = result
    if jax.tree.structure(unwrapped(result)) != expected:
        if not isinstance(result, (tuple, list)) or not result:
            raise TypeError(_not_carry(result, carry))
        kept, outputs = result[0], tuple(result[1:])
        if jax.tree.structure(unwrapped(kept)) != expected:
            raise TypeError(_not_carry(result, carry))
    pairs = list(
        zip(jax.tree.leaves(unwrapped(kept)), jax.tree.leaves(unwrapped(carry)), strict=True)
    )
    for new, old in pairs:
        if jnp.shape(new) != jnp.shape(old) or jnp.result_type(new) != jnp.result_type(old):
            raise TypeError(
                f"a layer of the stack got a carry of {_kind(old)} and returns one of {_kind(new)}; "
                "all layers of a stack must have the same"
            )
    leaves = [_sharded_as(jnp.asarray(new), old) for new, old in pairs]
    carry = jax.tree.unflatten(jax.tree.structure(carry), leaves)
    return carry, jax.tree.map(jnp.asarray, outputs)


def _sharded_as(new: jax.Array, old: Any) -> jax.Array:
    """A carry as the layer got it: on a mesh with Explicit axes its type, which must not change, has its sharding."""
    wanted = None if explicit.mesh_of(old) is None else jax.typeof(old).sharding
    if wanted is None or jax.typeof(new).sharding == wanted:
        return new
    return jax.sharding.reshard(new, wanted)


def _kind(array: Any) -> str:
    return f"{jnp.result_type(array)}{list(jnp.shape(array))}"


def _not_carry(result: Any, carry: Any) -> str:
    found, expected = (str(jax.tree.structure(unwrapped(tree))) for tree in (result, carry))
    return (
        f"a layer of a stack returns its carry, or a tuple that begins with it: {expected} "
        f"(or ({expected}, outputs...)), not {found}"
    )


def _check_outputs(outputs: Sequence[tuple[Any, ...]]) -> None:
    counts = {len(y) for y in outputs}
    if len(counts) > 1:
        raise TypeError(
            f"the layers of a stack return different numbers of outputs: {sorted(counts)}"
        )


_POLICIES = (
    "everything_saveable", "nothing_saveable", "dots_saveable", "checkpoint_dots",
    "dots_with_no_batch_dims_saveable", "checkpoint_dots_with_no_batch_dims",
)  # fmt: skip


def policy(remat: Any) -> Any:
    """The policy for ``jax.checkpoint`` from its name; True and functions are returned unchanged.

    Raises:
        ValueError: there is no policy of that name.
    """
    if remat is True or callable(remat):
        return remat
    if remat not in _POLICIES:
        raise ValueError(
            f"remat={remat!r} is not a policy of jax.checkpoint_policies: pass True, a function, or one of "
            f"{', '.join(_POLICIES)}"
        )
    return getattr(jax.checkpoint_policies, remat)
