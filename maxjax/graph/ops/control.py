"""Ops that control a program: branches, loops, printing, devices.

If the condition is concrete, branches and loops run in Python; if it is traced, they become
``jax.lax.cond`` and ``jax.lax.while_loop``. The functions receive and return TensorValues.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ..tensor_type import TensorType
from ..value import TensorValue
from .lift import array, canonical


def cond(
    pred: Any,
    out_types: Iterable[TensorType] | None,
    then_fn: Callable[[], Any],
    else_fn: Callable[[], Any],
) -> list[TensorValue]:
    """The result of ``then_fn`` if the predicate holds, otherwise of ``else_fn``.

    Args:
        pred: predicate, one boolean.
        out_types: types of the results; None for functions without results.
        then_fn, else_fn: functions without arguments that return a tensor, several, or None. If the
            predicate is traced, both are traced.

    Raises:
        ValueError: the predicate is not one boolean.
        TypeError: a function returns other types than ``out_types``.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import TensorValue, ops
        >>> x = TensorValue(jnp.array(3.0))
        >>> y = ops.cond(x > 2.0, [x.type], lambda: x * 2.0, lambda: x)
        >>> float(y[0])
        6.0
    """
    flag = _as_boolean(pred, "cond")
    types = list(out_types or [])

    def branch(function: Callable[[], Any]) -> Callable[[], list[jax.Array]]:
        return lambda: _checked(_as_list(function()), types, "cond")

    if isinstance(flag, Tracer):
        results = jax.lax.cond(flag, branch(then_fn), branch(else_fn))
    else:
        results = branch(then_fn if flag else else_fn)()
    return [TensorValue(x) for x in results]


def while_loop(
    initial_values: Any, predicate: Callable[..., Any], body: Callable[..., Any]
) -> list[TensorValue]:
    """Applies ``body`` to its own results, beginning with ``initial_values``, while ``predicate`` holds.

    Args:
        initial_values: a tensor, or several.
        predicate: function from the values to one boolean.
        body: function from the values to as many values of the same types.

    A traced loop has no reverse-mode gradient, because its length is unknown.

    Raises:
        ValueError: there is no initial value, or the predicate does not return one boolean.
        TypeError: the body returns other types than it receives.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import TensorValue, ops
        >>> start = TensorValue(jnp.array(1))
        >>> [int(x) for x in ops.while_loop(start, lambda n: n < 100, lambda n: n * 3)]
        [243]
    """
    values = _as_list(initial_values)
    if not values:
        raise ValueError("while_loop needs at least one initial value")
    # Weak types are removed, because a body that computes with them would return other types.
    values = [jax.lax.convert_element_type(x, x.dtype) for x in values]
    types = [TensorValue(x).type for x in values]

    def condition(values: list[jax.Array]) -> jax.Array:
        return _as_boolean(predicate(*map(TensorValue, values)), "while_loop")

    def step(values: list[jax.Array]) -> list[jax.Array]:
        return _checked(_as_list(body(*map(TensorValue, values))), types, "while_loop")

    flag = condition(values)
    while isinstance(flag, Tracer) or flag:
        if isinstance(flag, Tracer):  # perhaps only now, if the body uses a traced value
            return [TensorValue(x) for x in jax.lax.while_loop(condition, step, values)]
        values = step(values)
        flag = condition(values)
    return [TensorValue(x) for x in values]


def side_stream(
    inputs: Sequence[Any],
    body_fn: Callable[..., Any],
    *,
    result_types: Sequence[TensorType],
    stream_id: int = 1,
) -> list[TensorValue]:
    """Calls a function and returns its results. There are no streams: XLA decides what runs in parallel.

    Args:
        inputs: arguments of the function, which receives them as TensorValues.
        body_fn: function that returns a tensor, or several.
        result_types: the types of the results.
        stream_id: ignored.

    Raises:
        TypeError: the results have other types than ``result_types``.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import DeviceRef
        >>> kind = TensorType("float32", [2], DeviceRef.CPU())
        >>> side_stream([jnp.ones(2)], lambda x: x + 1, result_types=[kind])[0].to_numpy()
        array([2., 2.], dtype=float32)
    """
    found = _as_list(body_fn(*(TensorValue(x) for x in inputs)))
    return [TensorValue(y) for y in _checked(found, list(result_types), "side_stream")]


def _as_boolean(x: Any, op: str) -> jax.Array:
    flag = array(x)
    if flag.dtype != jnp.bool_ or flag.shape != ():
        raise ValueError(
            f"{op}: the condition must be one boolean, not {flag.dtype} of shape {flag.shape}"
        )
    return flag


def _as_list(result: Any) -> list[jax.Array]:
    if result is None:
        return []
    return [array(x) for x in (result if isinstance(result, (list, tuple)) else [result])]


def _checked(results: list[jax.Array], types: list[TensorType], op: str) -> list[jax.Array]:
    found = [TensorValue(x).type for x in results]
    matches = len(found) == len(types) and all(
        have.shape == want.shape and canonical(have.dtype) == canonical(want.dtype)
        for have, want in zip(found, types, strict=True)
    )
    if not matches:
        raise TypeError(f"{op}: the results have types {found}, which should be {types}")
    return [jax.lax.convert_element_type(x, x.dtype) for x in results]


def print(value: Any, label: str = "debug_tensor") -> None:
    """Prints a tensor with a label, or a text; under ``jax.jit``, each time the program runs."""
    if isinstance(value, str):
        if isinstance(jnp.zeros(()), Tracer):
            jax.debug.callback(builtins.print, value)
        else:
            builtins.print(value)
        return
    (value if isinstance(value, TensorValue) else TensorValue(array(value))).print(label)


def transfer_to(x: Any, device: Any) -> Any:
    """The tensor on another device. Does nothing while tracing, where the compiler places arrays.

    Raises:
        ValueError: this process has no such device.
    """
    moved = TensorValue(array(x)).to(device)
    return moved if isinstance(x, TensorValue) else moved.value


def assert_same_device(*values: Any, **named_values: Any) -> None:
    """Does nothing if the tensors are on one device.

    Raises:
        ValueError: they are not; the message names the device of each.
    """
    tensors = {str(i): x for i, x in enumerate(values)} | named_values
    devices = {name: TensorValue(array(x)).device for name, x in tensors.items()}
    if len(set(devices.values())) > 1:
        where = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"the tensors must be on one device: {where}")
