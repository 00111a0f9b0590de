"""MAX's kernels for state space layers: ragged batches, with the states of sequences in rows of a pool.

A kernel reads the state of each sequence from its row of the pool, and stores the state after the last token there
(``BufferValue.store``). The recurrences run token after token; the layers of maxjax's own models compute long
sequences in chunks (``maxjax.nn.ssm``).

Shapes: N tokens of B sequences, C channels, K taps of a convolution, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...graph.buffer import BufferValue
from ...graph.rebinding import sized_as
from ...graph.value import TensorValue
from ..kernels.ragged import sequences
from ..ssm.delta import delta_step
from ..ssm.ssd import ssd_step

_NORM_EPS = 1e-6  # of the normalised queries and keys of the delta rule, as in MAX


def _array(x: Any) -> Any:
    return TensorValue(x).value


def _slots(slots: Any) -> Any:
    """The rows of the pool, ``[B]``, from ``[B]`` or ``[1, B]``."""
    return _array(slots).astype(jnp.int32).reshape(-1)


def _where(flags: Any, yes: Any, no: Any) -> Any:
    """``yes [B, …]`` for the sequences whose flag is set and ``no`` for the others; ``yes`` if there are no flags."""
    if flags is None or (flags := _array(flags)).shape[0] == 0:
        return yes
    flags = sized_as(
        flags, yes.shape[:1], f"there are {flags.shape[0]} flags for {yes.shape[0]} sequences"
    )
    return jnp.where(flags.reshape(-1, *(1,) * (yes.ndim - 1)), yes, no)


def _store(pool: BufferValue, slots: Any, old: Any, new: Any, update: Any) -> None:
    """Stores the new states ``[B, …]``, and the old ones of sequences whose flag in ``update`` is not set."""
    new = _where(update, new, old)
    pool.store(new.astype(pool.value.dtype), (slots,))


def _initial(pool: BufferValue, slots: Any, has_initial_state: Any) -> Any:
    """The states of the sequences, ``[B, …]`` in float32; zeros where the flag is given and not set."""
    return _where(has_initial_state, pool.value[slots].astype(jnp.float32), 0)


def _convolved(x: Any, weight: Any, states: Any, offsets: Any) -> tuple[Any, Any]:
    """A causal convolution of ``x [N, C]`` with ``weight [C, K]``, and the last inputs of each sequence.

    Args:
        states: the K - 1 inputs before the first token of each sequence, ``[B, C, K - 1]``.
    """
    taps, count = weight.shape[1], x.shape[0]
    offsets = offsets.astype(jnp.int32)
    rows, places = sequences(offsets, count)
    before = states[rows].swapaxes(1, 2)  # [N, K - 1, C]
    wide, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    tokens, total = jnp.arange(count), 0.0
    for back in range(taps):
        inside = (places >= back)[:, None]
        here = wide[jnp.maximum(tokens - back, 0)]
        # At place p, the input `back` tokens ago is number K - 1 + p - back of those before the sequence.
        at = jnp.clip(taps - 1 + places - back, 0, max(taps - 2, 0))
        earlier = jnp.take_along_axis(before, at[:, None, None], axis=1)[:, 0] if taps > 1 else here
        total = total + jnp.where(inside, here, earlier) * weight[None, :, taps - 1 - back]
    row = jnp.arange(states.shape[0])
    starts = offsets[row]
    lengths = offsets[row + 1] - starts
    number = (
        lengths[:, None] - (taps - 1) + jnp.arange(taps - 1)[None]
    )  # of each input that is kept, in its sequence
    new = wide[jnp.clip(starts[:, None] + number, 0, count - 1)].swapaxes(1, 2)  # [B, C, K - 1]
    place = jnp.broadcast_to(
        jnp.clip(number + taps - 1, 0, max(taps - 2, 0))[:, None], states.shape
    )
    old = jnp.take_along_axis(states, place, axis=2)
    return total, jnp.where((number >= 0)[:, None], new, old)


def causal_conv1d_varlen_fwd(
    x: Any,
    weight: Any,
    bias: Any,
    conv_states: BufferValue,
    query_start_loc: Any,
    cache_indices: Any,
    has_initial_state: Any,
    activation: str = "silu",
    channels_last: bool = False,
    use_residual: bool = False,
    update_state: Any = None,
) -> TensorValue:
    """A causal convolution of each channel that continues the inputs in a pool.

    Args:
        x: inputs ``[C, N]``, or ``[N, C]`` if ``channels_last``.
        weight: kernel ``[C, K]``; its last tap multiplies the token itself.
        bias: bias ``[C]``; empty for none.
        conv_states: pool of the last K - 1 inputs of sequences, ``[rows, C, K - 1]``.
        query_start_loc: offsets of the sequences ``[B + 1]``.
        cache_indices: row of each sequence in the pool, ``[B]`` or ``[1, B]``.
        has_initial_state: whether each sequence continues the inputs in its row; the others begin with zeros.
        activation: "silu" or "none".
        channels_last: whether the channels are the last axis of ``x`` and of the result.
        use_residual: whether ``x`` is added before the activation.
        update_state: whether each sequence's row is replaced; all are by default.

    Returns:
        An array of the shape and dtype of ``x``, computed in float32.

    Raises:
        ValueError: the activation is unknown.

    Example:
        >>> pool, ones = BufferValue(jnp.zeros((1, 1, 1))), jnp.ones((1, 2))
        >>> y = causal_conv1d_varlen_fwd(jnp.array([[1.0, 2.0, 3.0]]), ones, jnp.zeros(0), pool, jnp.array([0, 3]),
        ...                              jnp.array([0]), jnp.array([True]), activation="none")
        >>> y.to_numpy().tolist(), pool.value.item()
        ([[1.0, 3.0, 5.0]], 3.0)
    """
    if activation not in ("silu", "none"):
        raise ValueError(f'activation must be "silu" or "none", not {activation!r}')
    given, biases, slots = _array(x), _array(bias), _slots(cache_indices)
    tokens = given if channels_last else given.T
    states = _initial(conv_states, slots, has_initial_state)
    y, new = _convolved(tokens, _array(weight), states, _array(query_start_loc))
    _store(conv_states, slots, conv_states.value[slots].astype(jnp.float32), new, update_state)
    if biases.shape[0] != 0:
        y = y + biases.astype(jnp.float32)[None]
    if use_residual:
        y = y + tokens.astype(jnp.float32)
    y = (jax.nn.silu(y) if activation == "silu" else y).astype(given.dtype)
    return TensorValue(y if channels_last else y.T)


def gated_delta_conv1d_fwd(
    qkv_input_ragged: Any,
    conv_weight: Any,
    conv_state: BufferValue,
    slot_idx: Any,
    input_row_offsets: Any,
    *,
    write_state: bool = True,
) -> TensorValue:
    """The causal convolution before a gated delta rule: ``[N, C]`` → ``[N, C]`` in float32.

    Args:
        qkv_input_ragged: inputs ``[N, C]``.
        conv_weight: kernel ``[C, K]``; its last tap multiplies the token itself.
        conv_state: pool of the last K - 1 inputs of sequences, ``[rows, C, K - 1]``.
        slot_idx: row of each sequence in the pool, ``[B]``.
        input_row_offsets: offsets of the sequences ``[B + 1]``.
        write_state: whether the rows are replaced.
    """
    slots = _slots(slot_idx)
    states = _initial(conv_state, slots, None)
    y, new = _convolved(
        _array(qkv_input_ragged), _array(conv_weight), states, _array(input_row_offsets)
    )
    if write_state:
        _store(conv_state, slots, states, new, None)
    return TensorValue(y)


def _in_turn(step: Callable[..., tuple[Any, Any]], states: Any, rows: Any, inputs: Any) -> Any:
    """Runs a step for token after token, each with the state of its sequence.

    Args:
        step: function of arrays ``[1, …]`` of a token and of a state, which returns a result and the new state.
        states: states ``[B, …]``.
        rows: sequence of each token, ``[N]``.
        inputs: list of arrays ``[N, …]``.

    Returns:
        The last states, and the results ``[N, …]``.
    """

    def token(states: Any, at: Any) -> tuple[Any, Any]:
        row, values = at
        y, new = step(*(x[None] for x in values), states[row][None])
        return states.at[row].set(new[0], mode="drop"), y[0]

    return jax.lax.scan(token, states, (rows, inputs))


def gated_delta_recurrence_fwd(
    qkv_conv_output: Any,
    decay_per_token: Any,
    beta_per_token: Any,
    recurrent_state: BufferValue,
    slot_idx: Any,
    input_row_offsets: Any,
) -> TensorValue:
    """The gated delta rule over a ragged batch (S. Yang et al., arXiv:2412.06464); see ``maxjax.nn.ssm.delta``.

    Queries and keys are normalised to length 1, and queries are divided by √D.

    Args:
        qkv_conv_output: queries and keys of G heads and values of H heads, ``[N, 2 G D + H V]``; H is a multiple of G.
        decay_per_token: factors of the state ``[N, H]``.
        beta_per_token: shares of the correction ``[N, H]``.
        recurrent_state: pool of states ``[rows, H, D, V]``.
        slot_idx: row of each sequence in the pool, ``[B]``.
        input_row_offsets: offsets of the sequences ``[B + 1]``.

    Returns:
        ``[N, H V]`` in float32.
    """
    qkv, decay, beta = (
        _array(x).astype(jnp.float32) for x in (qkv_conv_output, decay_per_token, beta_per_token)
    )
    slots, (_, heads, width, values) = _slots(slot_idx), recurrent_state.value.shape
    count = qkv.shape[0]
    keys = (qkv.shape[1] - heads * values) // 2
    rows, _ = sequences(_array(input_row_offsets), count)

    def unit(x: Any) -> Any:
        x = x.reshape(count, keys // width, width)
        x = x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _NORM_EPS)
        return jnp.repeat(x, heads * width // keys, axis=1)

    q, k = unit(qkv[:, :keys]) / width**0.5, unit(qkv[:, keys : 2 * keys])
    v = qkv[:, 2 * keys :].reshape(count, heads, values)
    states = _initial(recurrent_state, slots, None)
    new, y = _in_turn(delta_step, states, rows, [q, k, v, jnp.log(decay), beta])
    _store(recurrent_state, slots, states, new, None)
    return TensorValue(y.reshape(count, heads * values))


def mamba2_ssd_chunk_scan_varlen_fwd_inplace(
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any,
    dt_bias: Any,
    ssm_pool: BufferValue,
    query_start_loc: Any,
    has_initial_state: Any,
    cache_indices: Any,
    update_state: Any = None,
) -> TensorValue:
    """The state space model of Mamba 2 over a ragged batch (arXiv:2405.21060); see ``maxjax.nn.ssm.ssd``.

    Args:
        x: inputs ``[N, H, P]``.
        dt: lengths of the time steps ``[N, H]``, before the bias and softplus.
        A: rates of decay ``[H]``, negative.
        B, C: input and output vectors of the state, ``[N, groups, S]``.
        D: factors ``[H]`` of the inputs that are added to the result; empty for none.
        dt_bias: bias ``[H]`` of the time steps; empty for neither bias nor softplus.
        ssm_pool: pool of states ``[rows, H, P, S]``.
        query_start_loc: offsets of the sequences ``[B + 1]``.
        has_initial_state: whether each sequence continues the state in its row; empty for all.
        cache_indices: row of each sequence in the pool, ``[B]`` or ``[1, B]``.
        update_state: whether each sequence's row is replaced; all are by default.

    Returns:
        ``[N, H, P]`` in the dtype of ``x``, computed in float32.
    """
    given, slots = _array(x), _slots(cache_indices)
    wide, steps, rates, b, c, skip, bias = (
        _array(one).astype(jnp.float32) for one in (given, dt, A, B, C, D, dt_bias)
    )
    if bias.shape[0] != 0:
        steps = jax.nn.softplus(steps + bias[None])
    rows, _ = sequences(_array(query_start_loc), given.shape[0])
    states = _initial(ssm_pool, slots, has_initial_state)
    inputs = [wide * steps[..., None], steps * rates[None], b, c]
    new, y = _in_turn(ssd_step, states, rows, inputs)
    _store(ssm_pool, slots, ssm_pool.value[slots].astype(jnp.float32), new, update_state)
    if skip.shape[0] != 0:
        y = y + wide * skip[None, :, None]
    return TensorValue(y.astype(given.dtype))
