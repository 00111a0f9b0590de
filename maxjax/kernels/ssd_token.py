"""One decode step of Mamba 2's recurrence, with the states updated in place in the stack of all layers.

XLA for CPUs copies a layer's states out of the stack, reads them three times and writes them twice, on one
thread. The kernel reads and writes each state once.

Shapes: L layers, B sequences, H heads of width P, G groups of heads, state size N.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .operation import Operation, by_rows, has_static_shapes, types_of

# Names of the axes of the operands; "b", the sequences, is the only one that may be split.
_AXES = ("bhp", "bh", "bgn", "bgn", "lbhpn", "", "b")
_STATE = 4


def operation(definition: Callable[..., Any]) -> Operation:
    """The Operation with this definition in jnp: ``(None, *operands)`` → results.

    Operands: inputs times the length of their time step ``[B, H, P]``, logarithm of the decay ``[B, H]``,
    Mamba's B and C (where inputs are written, and what is read) ``[B, G, N]`` each, the stack of states
    ``[L, B, H, P, N]``, all float32; the layer's index; whether a row has a token, int32 ``[B]``.

    Results: ``[B, H, P]``, zeros for rows without a token, and the stack with the states of the layer
    replaced, in place where it is donated.

    ``nn/ssm/ssd.py`` has the definition.
    """
    rules = by_rows(_AXES, (0, _STATE), _STATE)
    return Operation("maxjax_ssd", _types, definition, {"cpu": _kernel}, *rules)


def has_kernel(state: Any) -> bool:
    """Whether the operation supports a stack of states: it must be float32, and its shape not symbolic."""
    return state.dtype == jnp.float32 and has_static_shapes(state)


def _types(_: None, x: Any, *rest: Any) -> list[Any]:
    return [x.update(weak_type=False), rest[_STATE - 1]]


def _kernel(_: None, *operands: Any) -> Any:
    results = types_of((operands[0], operands[_STATE]))
    return jax.ffi.ffi_call("maxjax_ssd", results, input_output_aliases={_STATE: 1})(*operands)
