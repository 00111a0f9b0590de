"""Ops that control a program: branches, loops, printing, devices.

Where the condition is known the branch or loop is plain Python; while tracing it is
``jax.lax.cond`` or ``jax.lax.while_loop``. The functions get and give TensorValues.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable
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
        pred: one boolean.
        out_types: the types of the results; None for functions that give nothing.
        then_fn, else_fn: called without arguments; give a tensor, several, or None. While
            tracing both are traced.

    Raises:
        ValueError: the predicate is not one boolean.
        TypeError: a function gives other types than ``out_types``.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import TensorValue, ops
        >>> x = TensorValue(jnp.array(3.0))
        >>> y = ops.cond(x > 2.0, [x.type], lambda: x * 2.0, lambda: x)
        >>> float(y[0])
        6.0
    """
    flag = _truth(pred, "cond")
    types = list(out_types or [])

    def branch(function: Callable[[], Any]) -> Callable[[], list[jax.Array]]:
        return lambda: _checked(_listed(function()), types, "cond")

    if isinstance(flag, Tracer):
        results = jax.lax.cond(flag, branch(then_fn), branch(else_fn))
    else:
        results = branch(then_fn if flag else else_fn)()
    return [TensorValue(x) for x in results]


def while_loop(
    initial_values: Any, predicate: Callable[..., Any], body: Callable[..., Any]
) -> list[TensorValue]:
    """Calls ``body`` on its own results, from ``initial_values`` on, as long as ``predicate`` holds.

    Args:
        initial_values: a tensor, or several.
        predicate: gets the values and gives one boolean.
        body: gets the values and gives as many, of the same types.

    While tracing it has no reverse-mode gradient, as no loop of unknown length has in JAX.

    Raises:
        ValueError: no initial value, or the predicate gives something else.
        TypeError: the body gives other types than it got.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import TensorValue, ops
        >>> start = TensorValue(jnp.array(1))
        >>> [int(x) for x in ops.while_loop(start, lambda n: n < 100, lambda n: n * 3)]
        [243]
    """
    values = _listed(initial_values)
    if not values:
        raise ValueError("while_loop needs at least one initial value")
    # Without weak types: a body that computes with them gives others than it got.
    values = [jax.lax.convert_element_type(x, x.dtype) for x in values]
    types = [TensorValue(x).type for x in values]

    def go_on(values: list[jax.Array]) -> jax.Array:
        return _truth(predicate(*map(TensorValue, values)), "while_loop")

    def step(values: list[jax.Array]) -> list[jax.Array]:
        return _checked(_listed(body(*map(TensorValue, values))), types, "while_loop")

    flag = go_on(values)
    if isinstance(flag, Tracer):
        return [TensorValue(x) for x in jax.lax.while_loop(go_on, step, values)]
    while flag:
        values = step(values)
        flag = go_on(values)
    return [TensorValue(x) for x in values]


def _truth(x: Any, op: str) -> jax.Array:
    flag = array(x)
    if flag.dtype != jnp.bool_ or flag.shape != ():
        raise ValueError(
            f"{op}: the condition is one boolean, not {flag.dtype} of shape {flag.shape}"
        )
    return flag


def _listed(result: Any) -> list[jax.Array]:
    if result is None:
        return []
    return [array(x) for x in (result if isinstance(result, (list, tuple)) else [result])]


def _checked(results: list[jax.Array], types: list[TensorType], op: str) -> list[jax.Array]:
    found = [TensorValue(x).type for x in results]
    same = len(found) == len(types) and all(
        have.shape == want.shape and canonical(have.dtype) == canonical(want.dtype)
        for have, want in zip(found, types, strict=True)
    )
    if not same:
        raise TypeError(f"{op}: the results are {found}, and should be {types}")
    return [jax.lax.convert_element_type(x, x.dtype) for x in results]


def print(value: Any, label: str = "debug_tensor") -> None:
    """Prints a tensor with its label, or a text; under ``jax.jit`` each time the program runs."""
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
        RuntimeError: there is no such device.
    """
    moved = TensorValue(array(x)).to(device)
    return moved if isinstance(x, TensorValue) else moved.value


def assert_same_device(*values: Any, **named_values: Any) -> None:
    """Does nothing if the tensors are on one device.

    Raises:
        ValueError: they are not; the message says which is where.
    """
    tensors = {str(i): x for i, x in enumerate(values)} | named_values
    devices = {name: TensorValue(array(x)).device for name, x in tensors.items()}
    if len(set(devices.values())) > 1:
        where = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"the tensors must be on one device: {where}")
