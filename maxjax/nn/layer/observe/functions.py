"""``captured`` and ``patched`` make pure functions that observe the model in their first argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ....errors import UserInputError
from ..calls import Wish, observe
from ..walk import check_module
from .captures import Captures
from .frames import CallerFunction, Observation, Patch, Taps, marked_places, next_level
from .places import Place, natural, places, unseen


def captured(function: Callable[..., Any], *patterns: str) -> Callable[..., Any]:
    """Makes a function that also returns activations: ``(model, *args)`` → ``(result, captures)``.

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

    def run(model: Any, *args: Any, **kwargs: Any) -> tuple[Any, Captures]:
        check_module(model, "captured")
        found = [places(model, pattern, "captured") for pattern in patterns]
        plan = capture_plan(found, next_level())
        wish = Wish(plan, "", ())
        result, frame = observe(model, [wish], lambda copy: function(copy, *args, **kwargs))
        check_passed(found, plan, frame, "captured")
        return result, Captures.of(frame.taps(), plan.level)

    return run


def patched(function: Callable[..., Any], patches: Mapping[str, Any]) -> Callable[..., Any]:
    """Makes a function that replaces activations of the model: ``(model, *args)`` → result.

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
    given = checked_patches(patches, "patched")
    fit: set[Any] = set()

    def run(model: Any, *args: Any, **kwargs: Any) -> Any:
        check_module(model, "patched")
        found = [places(model, pattern, "patched") for pattern in given]
        plan, values = patch_plan(given, found, next_level())
        call = lambda model, args, kwargs, values: observe(
            model, [Wish(plan, "", values)], lambda copy: function(copy, *args, **kwargs)
        )
        check_first(call, (model, args, kwargs, values), plan, fit)
        result, frame = call(model, args, kwargs, values)
        check_passed(found, plan, frame, "patched")
        return result

    return run


# --- plans --------------------------------------------------------------------------------------


def capture_plan(found: Sequence[Sequence[Place]], level: int) -> Observation:
    """The plan that captures the values at places."""
    return Observation(frozenset(place for group in found for place in group), (), level)


def checked_patches(patches: Any, what: str) -> dict[str, Any]:
    """The patches, with functions wrapped as CallerFunction and numbers as arrays.

    Raises:
        UserInputError: ``patches`` is not a mapping or is empty, or a value is neither arrays nor a function.
    """
    if not isinstance(patches, Mapping) or not patches:
        raise UserInputError(
            f"{what} takes a mapping from patterns to values or functions, such as "
            f"{{'layers.3.mlp': 0.0}}, not {patches!r:.60}"
        )
    return {pattern: _value_or_function(pattern, new, what) for pattern, new in patches.items()}


def _value_or_function(pattern: Any, new: Any, what: str) -> Any:
    if callable(new) and not isinstance(new, jax.Array):
        count = _required(new)
        if count > 2:
            raise UserInputError(
                f"{what}: the function for '{pattern}' has {count} required parameters: it is called with the "
                "value, or with the value and the number of the layer"
            )
        return CallerFunction(new, count == 2)
    if isinstance(new, (bool, int, float, complex)):
        return jnp.asarray(new)  # the array's weak type marks it as a Python number
    if any(not hasattr(leaf, "dtype") for leaf in jax.tree.leaves(new)) or not jax.tree.leaves(new):
        raise UserInputError(
            f"{what}: '{pattern}' is given a {type(new).__name__}: a patch is an array (or a tree of "
            "arrays), a number, or a function of the value"
        )
    return jax.tree.map(jnp.asarray, new)


def _required(function: Callable[..., Any]) -> int:
    """The number of positional parameters without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some functions in C have no signature
        return 1
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in plain and p.default is inspect.Parameter.empty for p in parameters)


def patch_plan(
    given: Mapping[str, Any], found: Sequence[Sequence[Place]], level: int
) -> tuple[Observation, tuple[Any, ...]]:
    """The plan of patches, and the value of each patch; None for a function."""
    patches, values = [], []
    for (pattern, new), group in zip(given.items(), found, strict=True):
        function = new if isinstance(new, CallerFunction) else None
        order = tuple(sorted(group, key=lambda place: natural(place[0])))
        patches.append(Patch(str(pattern), function, order))
        values.append(None if function is not None else new)
    return Observation(frozenset(), tuple(patches), level), tuple(values)


def check_first(call: Callable[..., Any], operands: Any, plan: Observation, fit: set[Any]) -> None:
    """Traces a call that is about to run eagerly, so that a patch that does not fit raises before anything runs.

    Args:
        fit: keys of calls that were checked before; this function adds to the set.
    """
    leaves, tree = jax.tree.flatten(operands)
    is_array = [isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves]
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        return  # the call is already being traced, so nothing runs before the check
    arrays = [leaf for leaf, is_one in zip(leaves, is_array, strict=True) if is_one]
    key = (tree, plan, tuple((a.shape, str(a.dtype)) for a in arrays))
    try:
        if key in fit:
            return
    except TypeError:
        return

    def traced(arrays: Any) -> Any:
        given = iter(arrays)
        pairs = zip(leaves, is_array, strict=True)
        call(*jax.tree.unflatten(tree, [next(given) if one else leaf for leaf, one in pairs]))

    try:
        jax.eval_shape(traced, arrays)
    except UserInputError as error:
        if str(error).startswith("patch '"):
            raise
    except Exception:
        pass
    fit.add(key)


def check_passed(
    found: Sequence[Sequence[Place]],
    plan: Observation,
    frame: Any,
    what: str,
    *,
    strict: bool = True,
) -> None:
    """Raises an error if none of a pattern's places was captured or patched."""
    taps = frame.taps()
    seen, passed = marked_places(taps, plan, "seen"), passed_places(taps, plan)
    for group in found:
        if error := unseen(group, passed, seen, what, strict=strict):
            raise error


def passed_places(found: Taps, plan: Observation) -> set[Place]:
    """The places that were captured or patched."""
    return marked_places(found, plan, "patched") | Captures.of(found, plan.level).places


def _check_function(function: Any, what: str) -> None:
    if not callable(function) or hasattr(function, "_mx_definition"):
        raise UserInputError(
            f"maxjax.{what} takes a function of the model, such as lambda m, x: m(x), not "
            f"{type(function).__name__}"
        )
