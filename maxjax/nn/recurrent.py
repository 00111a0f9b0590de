"""Recurrent layers, LSTM and GRU: single steps, and whole sequences under ``lax.scan``.

State is an argument and a result. Weights have torch's names, shapes and order of gates, so that torch's state
dicts load without renaming.

Sources: S. Hochreiter and J. Schmidhuber, Neural Computation 9 (1997); K. Cho et al., arXiv:1406.1078.

Shapes: batch B, T steps, I input features, H hidden features, L layers, D directions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..dtype import DType, promote
from ..elsewhere import either
from ..graph.device import DeviceRef
from ..graph.kind import on_arrays
from ..graph.weight.weight import Weight
from ..kernels import matmul
from ..kernels.operation import varying_with
from .layer import Module
from .product import add_bias

# The hidden state ``[B, H]``, and for an LSTM the cell state.
State = tuple[jax.Array, ...]


class _Recurrent(Module):
    """Base class of all recurrent layers: it makes the weights of a step and computes the step."""

    gates: ClassVar[int]
    states: ClassVar[int]
    hidden_size: int
    has_bias: bool

    def _make(self, end: str, inputs: int, dtype: Any, device: DeviceRef) -> None:
        rows = self.gates * self.hidden_size
        shapes = {f"weight_ih{end}": (rows, inputs), f"weight_hh{end}": (rows, self.hidden_size)}
        if self.has_bias:
            shapes |= {f"bias_ih{end}": (rows,), f"bias_hh{end}": (rows,)}
        for name, shape in shapes.items():
            setattr(self, name, Weight(name, dtype, shape, device))

    def _gates(self, x: jax.Array, end: str) -> jax.Array:
        """The part of the gates that comes from inputs ("ih…") or hidden states ("hh…"), ``[..., gates · H]``."""
        y = matmul(x, getattr(self, f"weight_{end}"))
        return add_bias(y, getattr(self, f"bias_{end}")) if self.has_bias else y

    def _step(self, from_x: jax.Array, state: State, end: str) -> State:
        raise NotImplementedError

    def _start(self, x: jax.Array, state: Any, shape: tuple[int, ...]) -> State:
        """The given state, checked and as a tuple, or zeros."""
        if state is None:
            return tuple(jnp.zeros(shape, x.dtype) for _ in range(self.states))
        given = state if self.states > 1 else (state,)
        found = tuple(jnp.asarray(one) for one in given)
        if len(found) != self.states or any(one.shape != shape for one in found):
            raise ValueError(
                f"the state of {type(self).__name__} is {self.states} array(s) of shape {shape}, not "
                f"{[one.shape for one in found]}"
            )
        return found

    def _checked(self, x: Any, ndim: int, inputs: int) -> jax.Array:
        array = jnp.asarray(x)
        if array.ndim != ndim or array.shape[-1] != inputs:
            shape = f"[{'B, ' if ndim == 2 else 'B, T, '}{inputs}]"
            raise ValueError(f"{type(self).__name__} takes {shape}, not {array.shape}")
        return array

    def initializer(self, name: str) -> Any:
        """Uniform in ±1/√H, as in torch."""
        bound = 1 / math.sqrt(self.hidden_size)
        return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


def _alike(from_x: jax.Array, state: State) -> tuple[jax.Array, State]:
    """The gates and the state in the dtype that holds all of them, which a step keeps, as a scan requires."""
    dtype = reduce(promote, (DType.of(one.dtype) for one in (from_x, *state))).np
    return from_x.astype(dtype), tuple(one.astype(dtype) for one in state)


class _LSTM(_Recurrent):
    gates, states = 4, 2

    def _step(self, from_x: jax.Array, state: State, end: str) -> State:
        h, c = state
        i, f, g, o = jnp.split(from_x + self._gates(h, f"hh{end}"), 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c


class _GRU(_Recurrent):
    gates, states = 3, 1

    def _step(self, from_x: jax.Array, state: State, end: str) -> State:
        (h,) = state
        r, z, n = jnp.split(from_x, 3, axis=-1)
        hr, hz, hn = jnp.split(self._gates(h, f"hh{end}"), 3, axis=-1)
        r, z = jax.nn.sigmoid(r + hr), jax.nn.sigmoid(z + hz)
        return ((1 - z) * jnp.tanh(n + r * hn) + z * h,)


class _Cell(_Recurrent):
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        dtype: Any = DType.float32,
        device: DeviceRef | None = None,
        has_bias: bool | None = None,
        *,
        bias: bool | None = None,
    ):
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.has_bias = either(True, has_bias=has_bias, bias=bias)
        self._make("", input_size, dtype, device or DeviceRef.CPU())

    @on_arrays
    def __call__(self, x: Any, state: Any = None) -> Any:
        """One step.

        Args:
            x: inputs ``[B, I]``.
            state: state that the previous step returned; None means zeros.

        Returns:
            The new state: ``(h, c)`` of an LSTMCell, ``h`` of a GRUCell, each ``[B, H]``.

        Raises:
            ValueError: an argument has the wrong shape.
        """
        array = self._checked(x, 2, self.input_size)
        start = self._start(array, state, (array.shape[0], self.hidden_size))
        new = self._step(*_alike(self._gates(array, "ih"), start), "")
        return new if self.states > 1 else new[0]


class LSTMCell(_LSTM, _Cell):
    """One step of an LSTM.

    Args:
        input_size, hidden_size: numbers I and H of input and hidden features.
        dtype: dtype of the weights.
        device: device that the weights are declared on; None means the CPU.
        has_bias, bias: two names of one argument: whether there are biases. By default there are.

    Attributes:
        weight_ih, weight_hh: Weights ``[4 H, I]`` and ``[4 H, H]``; input, forget, cell and output gate.
        bias_ih, bias_hh: Weights ``[4 H]``, if ``has_bias``.

    Example:
        >>> import maxjax
        >>> cell = maxjax.init(LSTMCell(3, 5), jax.random.key(0))
        >>> h, c = cell(jnp.ones((2, 3)))
        >>> h, c = cell(jnp.ones((2, 3)), (h, c))
        >>> h.shape, c.shape
        ((2, 5), (2, 5))
    """


class GRUCell(_GRU, _Cell):
    """One step of a GRU. The arguments are those of LSTMCell.

    Attributes:
        weight_ih, weight_hh: Weights ``[3 H, I]`` and ``[3 H, H]``; reset, update and new gate.
        bias_ih, bias_hh: Weights ``[3 H]``, if ``has_bias``.

    Example:
        >>> import maxjax
        >>> cell = maxjax.init(GRUCell(3, 5), jax.random.key(0))
        >>> cell(jnp.ones((2, 3)), jnp.zeros((2, 5))).shape
        (2, 5)
    """


class _Sequence(_Recurrent):
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        dtype: Any = DType.float32,
        device: DeviceRef | None = None,
        has_bias: bool | None = None,
        bidirectional: bool = False,
        *,
        bias: bool | None = None,
    ):
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"num_layers must be positive, not {num_layers}")
        self.input_size, self.hidden_size = input_size, hidden_size
        self.has_bias = either(True, has_bias=has_bias, bias=bias)
        self.num_layers, self.bidirectional = num_layers, bidirectional
        for number in range(num_layers):
            inputs = hidden_size * len(self._ends(0)) if number else input_size
            for end in self._ends(number):
                self._make(end, inputs, dtype, device or DeviceRef.CPU())

    def _ends(self, number: int) -> Sequence[str]:
        """The suffix of the names of a layer's weights, for each direction."""
        forward = f"_l{number}"
        return (forward, f"{forward}_reverse") if self.bidirectional else (forward,)

    @on_arrays
    def __call__(self, x: Any, state: Any = None) -> tuple[jax.Array, Any]:
        """Runs all steps of a batch of sequences.

        Args:
            x: inputs ``[B, T, I]``.
            state: state that the call for the preceding steps returned; None means zeros.

        Returns:
            The hidden states of the last layer ``[B, T, D H]``, and the state after the last step: ``(h, c)`` of an
            LSTM, ``h`` of a GRU, each ``[L D, B, H]``.

        Raises:
            ValueError: an argument has the wrong shape.
        """
        y = self._checked(x, 3, self.input_size)
        every = [end for number in range(self.num_layers) for end in self._ends(number)]
        start = self._start(y, state, (len(every), y.shape[0], self.hidden_size))
        last: list[State] = []
        for number in range(self.num_layers):
            outputs = []
            for end in self._ends(number):
                own = tuple(one[len(last)] for one in start)
                h, final = self._run(y, own, end)
                outputs.append(h)
                last.append(final)
            y = jnp.concatenate(outputs, -1)
        states = tuple(jnp.stack(one) for one in zip(*last, strict=True))
        return y, states if self.states > 1 else states[0]

    def _run(self, x: jax.Array, state: State, end: str) -> tuple[jax.Array, State]:
        """One layer in one direction: its hidden states ``[B, T, H]``, and the last state."""
        # One matmul for the inputs of all steps.
        from_x = self._gates(x, f"ih{end}").swapaxes(0, 1)
        from_x, state = _alike(from_x, varying_with(state, from_x))

        def step(state: State, now: jax.Array) -> tuple[State, jax.Array]:
            new = self._step(now, state, end)
            return new, new[0]

        final, h = jax.lax.scan(step, state, from_x, reverse=end.endswith("_reverse"))
        return h.swapaxes(0, 1), final


class LSTM(_LSTM, _Sequence):
    """LSTM layers over sequences.

    Args:
        input_size, hidden_size: numbers I and H of input and hidden features.
        num_layers: number L of layers; each takes the hidden states of the layer before.
        dtype: dtype of the weights.
        device: device that the weights are declared on; None means the CPU.
        has_bias, bias: two names of one argument: whether there are biases. By default there are.
        bidirectional: whether each layer also runs backwards; the results of both directions are concatenated.

    The weights have torch's names: ``weight_ih_l0``, ``weight_ih_l0_reverse`` and so on.

    Example:
        >>> import maxjax
        >>> lstm = maxjax.init(LSTM(3, 5, num_layers=2), jax.random.key(0))
        >>> y, (h, c) = lstm(jnp.ones((2, 7, 3)))
        >>> y.shape, h.shape
        ((2, 7, 5), (2, 2, 5))
    """


class GRU(_GRU, _Sequence):
    """GRU layers over sequences. The arguments are those of LSTM.

    Example:
        >>> import maxjax
        >>> gru = maxjax.init(GRU(3, 5, bidirectional=True), jax.random.key(0))
        >>> y, h = gru(jnp.ones((2, 7, 3)))
        >>> y.shape, h.shape
        ((2, 7, 10), (2, 2, 5))
    """
