"""``captured`` and ``patched`` make pure functions that observe the model in their first argument."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from ....errors import UserInputError
from ..definition import marked, unmarked
from ..walk import check_module
from .captures import Captures
from .frames import OBSERVING, Frame, next_level, opened
from .patches import PatchError, checked_patches
from .plans import ObserverPlan, Taps, check, plan_of


def captured(function: Callable[..., Any], *patterns: str) -> Callable[..., Any]:
    """Make a function that also returns activations: ``(model, *args)`` → ``(result, captures)``.

    The result is that of ``function(model, *args, **kwargs)``. The new function is pure: it works under ``jit``,
    ``vmap`` and ``scan``, and with ``jax.grad(..., has_aux=True)``. The model and programs that were
    compiled before do not change.

    Args:
        function: function whose first argument is a Module, such as ``lambda m, ids: m(ids)``.
        patterns: values to record, by the names of modules below that Module:
            ``"layers.3.mlp"``. ``*`` matches anything in one part of a name, ``**`` any number of
            parts, and the beginning of a name may be omitted (``"layers.*"`` for
            ``model.layers.*``). A name alone means the module's output; a site after a colon means
            another value: ``:input`` (the first argument), ``:inputs`` (all positional arguments), or a
            value that the module names with :func:`maxjax.nn.tap`. Attention has
            ``:weights`` (probabilities after softmax, ``[B, H, T, S]``) and ``:heads`` (each head's
            output before the projection, ``[B, T, H, D]``). Decoder layers take and return hidden
            states and a cache: their input and output here are the hidden states, so ``"layers.*"``
            is the residual stream after each layer.

    Returns:
        The function; its second result is a :class:`Captures`.

    Raises:
        UserInputError: no pattern is given. Calls of the new function raise it if a pattern matches no module
            or names a site that the module does not have, or if a module did not run or ran in a
            transformation inside ``function``.

    If attention weights are captured, attention is computed by its definition instead of by the
    fast kernel; the results are equal up to rounding. In a stack, this affects all layers of the loop.

    Example:
        >>> import jax, jax.numpy as jnp, maxjax
        >>> from maxjax.models import Llama, LlamaConfig
        >>> model = Llama(LlamaConfig(100, 8, 16, num_hidden_layers=3, num_attention_heads=2))
        >>> model = maxjax.init(model, jax.random.key(0))
        >>> run = jax.jit(maxjax.captured(lambda m, ids: m(ids), "layers.*.mlp"))
        >>> logits, found = run(model, jnp.ones((2, 5), jnp.int32))
        >>> found["layers.1.mlp"].shape, found["layers.*.mlp"].shape
        ((2, 5, 8), (3, 2, 5, 8))
    """
    _check_function(function, "captured")
    if not patterns:
        raise UserInputError("captured: name at least one place, such as 'layers.*.mlp'")
    run = _observed(function, "captured", [(pattern, None) for pattern in patterns])

    def with_captures(model: Any, *args: Any, **kwargs: Any) -> tuple[Any, Captures]:
        result, plan, taps = run(model, args, kwargs)
        return result, Captures.of(taps, plan.level)

    return with_captures


def patched(function: Callable[..., Any], patches: Mapping[str, Any]) -> Callable[..., Any]:
    """Make a function that replaces activations of the model: ``(model, *args)`` → result.

    Args:
        function: function whose first argument is a Module, such as ``lambda m, ids: m(ids)``.
        patches: map from patterns, as for :func:`captured`, to new values or functions. A
            value has the shape and dtype of the value that it replaces, or an additional leading axis with
            one value for each match of the pattern; a Python number fills the shape. A function
            takes the old value and returns the new one. If it has two required parameters, the second is
            the index of the layer: a traced integer in a stack, None if the name contains no
            index. If patterns overlap, later patches receive the results of earlier ones; captures
            record the patched value.

    Raises:
        UserInputError: ``patches`` is empty or not a mapping. Calls of the new function raise it, before anything
            runs, if a pattern matches nothing or a new value has another shape or dtype.

    Example:
        >>> import jax, jax.numpy as jnp, maxjax
        >>> from maxjax.models import Llama, LlamaConfig
        >>> model = Llama(LlamaConfig(100, 8, 16, num_hidden_layers=3, num_attention_heads=2))
        >>> model = maxjax.init(model, jax.random.key(0))
        >>> without = maxjax.patched(lambda m, ids: m(ids), {"layers.1.mlp": 0.0})
        >>> without(model, jnp.ones((2, 5), jnp.int32)).shape
        (2, 5, 100)
    """
    _check_function(function, "patched")
    run = _observed(function, "patched", checked_patches(patches, "patched").items())
    return lambda model, *args, **kwargs: run(model, args, kwargs)[0]


def _check_function(function: Any, caller: str) -> None:
    if not callable(function) or hasattr(function, "_mx_definition"):
        raise UserInputError(
            f"maxjax.{caller} takes a function of the model, such as lambda m, x: m(x), not "
            f"{type(function).__name__}"
        )


def _observed(
    function: Callable[..., Any], caller: str, patterns: Collection[tuple[Any, Any]]
) -> Callable[..., tuple[Any, ObserverPlan, Taps]]:
    """Make a function of (model, args, kwargs) that returns the result, the plan, and what it has recorded."""
    checked: set[Any] = set()

    def run(model: Any, args: tuple, kwargs: dict) -> tuple[Any, ObserverPlan, Taps]:
        check_module(model, caller)
        plan, values = plan_of(model, caller, patterns, next_level())
        result, taps = observe(model, {plan: values}, function, args, kwargs, checked)
        check(plan, taps, must_run=True)
        return result, plan, taps

    return run


# --- one observed call -----------------------------------------------------------------------------


def plans_of(observers: Sequence[Any], module: Any) -> dict[ObserverPlan, tuple[Any, ...]]:
    """Return the plan of each observer of a Module that is about to run, outermost first, with its patches' values."""
    level = next_level()
    return dict(one.plan(module, level + i) for i, one in enumerate(observers))


def marked_by(model: Any, plans: Iterable[ObserverPlan]) -> Any:
    """Return a copy of a Module that is marked with these plans."""
    for plan in plans:
        model = marked(model, plan, plan.root)
    return model


def observe(
    model: Any, plans: Mapping[ObserverPlan, tuple[Any, ...]], function: Callable[..., Any], args: tuple,
    kwargs: dict, checked: set[Any],
) -> tuple[Any, Taps]:  # fmt: skip
    """Return the result of ``function(model, *args, **kwargs)`` for a marked copy, and what it has recorded.

    Args:
        plans: plans that observe the Module, each with the values of its patches.
        checked: keys of calls whose patches fit; this function adds to the set.

    Raises:
        PatchError: a patch does not fit the value at its place. Nothing has run then.
    """

    def call(model: Any, args: tuple, kwargs: dict, values: Sequence[Any]) -> tuple[Any, Taps]:
        own = dict(zip(plans, values, strict=True))
        outer = OBSERVING.frames[-1] if OBSERVING.frames else Frame({})
        with opened(Frame({**outer.patches, **own}, outer.loop)) as frame:
            result = function(marked_by(model, plans), *args, **kwargs)
        outer.add(frame.taps)
        for plan in plans:
            result = unmarked(result, plan)
        return result, frame.taps

    operands = model, args, kwargs, list(plans.values())
    if any(plan.is_patch for plan in plans):
        _check_patches(call, operands, tuple(plans), checked)
    return call(*operands)


def _check_patches(
    call: Callable[..., Any], operands: Any, plans: tuple[ObserverPlan, ...], checked: set[Any]
) -> None:
    """Trace a call that is about to run eagerly, so that a patch that does not fit raises before anything runs."""
    leaves, tree = jax.tree.flatten(operands)
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        return  # the call is already being traced, so nothing runs before the check
    arrays = {i: a for i, a in enumerate(leaves) if isinstance(a, (jax.Array, np.ndarray))}
    key = (tree, plans, *((i, a.shape, str(a.dtype)) for i, a in arrays.items()))
    try:
        if key in checked:
            return
    except TypeError:  # an argument is not hashable
        return

    def traced(arrays: dict[int, Any]) -> None:
        call(*jax.tree.unflatten(tree, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]))

    try:
        jax.eval_shape(traced, arrays)
    except PatchError:
        raise
    except Exception:
        pass  # the call itself raises it again
    checked.add(key)
