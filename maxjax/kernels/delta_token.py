"""One decode step of a layer with the gated delta rule, from its projections to its gated norm.

The work for one token is small. XLA for CPUs divides it into some thirty operations, copies the states of
all layers, and computes the decay again for every element of the state. The kernel reads and writes
each state once, in place in the stack of all layers.

Shapes: L layers, B sequences, G key heads, H value heads, key width Dk, value width Dv,
C = 2 G Dk + H Dv channels, K taps of the convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .operation import Operation, by_rows, has_static_shapes, types_of
from .product import FLOATS

# Names of the axes of the operands; "b", the sequences, is the only one that may be split.
_AXES = ("bc", "bhv", "bh", "bh", "ct", "h", "h", "v", "lbtc", "lbhkv", "", "b")
_CONV, _DELTA, _LAYER = 8, 9, 10


class Delta(NamedTuple):
    """The static arguments.

    Attributes:
        key_heads: number of key heads, G.
        epsilon: number that the norm adds to the mean square.
    """

    key_heads: int
    epsilon: float


def operation(definition: Callable[..., Any]) -> Operation:
    """The Operation with this definition in jnp: ``(Delta, *operands)`` → results.

    Operands: inputs of the convolution ``[B, C]``, queries before keys before values; gates
    ``[B, H, Dv]``; logits of beta and of the decay ``[B, H]`` each; weights of the convolution ``[C, K]``,
    ``A_log`` and ``dt_bias`` ``[H]``, weight of the norm ``[Dv]``; the stacks of states, float32
    ``[L, B, K - 1, C]`` and ``[L, B, H, Dk, Dv]``; the layer's index; whether a row has a token, int32
    ``[B]``. The operands before the stacks are float32, float16 or bfloat16 (:func:`has_kernel`).

    Results: ``[B, H, Dv]`` in the dtype of the inputs, zeros for rows without a token, and the stacks
    with the states of the layer replaced, in place where they are donated.

    ``nn/ssm/delta.py`` has the definition.
    """
    rules = by_rows(_AXES, (1, _CONV, _DELTA), _DELTA)
    return Operation("maxjax_delta", _types, definition, {"cpu": _kernel}, *rules)


def has_kernel(floats: Sequence[Any], states: Sequence[Any]) -> bool:
    """Whether the operation supports these dtypes of operands and states; shapes must not be symbolic."""
    right = all(a.dtype in FLOATS for a in floats) and all(a.dtype == jnp.float32 for a in states)
    return right and has_static_shapes(*floats, *states)


def _types(_: Delta, x: Any, gate: Any, *rest: Any) -> list[Any]:
    y = x.update(shape=gate.shape, weak_type=False)
    return [y, *rest[_CONV - 2 : _LAYER - 2]]


def _kernel(static: Delta, *operands: Any) -> Any:
    results = _types(static, *types_of(operands))
    call = jax.ffi.ffi_call("maxjax_delta", results, input_output_aliases={_CONV: 1, _DELTA: 2})
    heads, epsilon = np.int64(static.key_heads), np.float32(static.epsilon)
    return call(*operands, key_heads=heads, epsilon=epsilon)
