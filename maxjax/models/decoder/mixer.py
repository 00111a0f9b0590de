"""Layers that mix tokens by a recurrent state instead of attention, with and without a cache.

Shapes: B sequences, T tokens, hidden size E.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ...dtype import DType
from ...graph.device import DeviceRef
from ...graph.placement.arrays import is_manual, on_mesh
from ...graph.placement.specs import axis_of, batch_axes, mesh_of, spec_of
from ...graph.weight.weight import Weight
from ...kernels import explicit
from ...nn.kv_cache.kinds import Place, States
from ...nn.kv_cache.recurrent import Recurrent
from ...nn.layer import Module
from .attention import Cached, Step
from .norm import unit_rms


class GatedNorm(Module):
    """An RMSNorm over groups of features with a gate: ``norm(x · silu(gate))`` or ``norm(x) · silu(gate)``.

    Args:
        width: number of features.
        dtype: dtype of the weights.
        epsilon: number added to the mean square.
        groups: number of groups of features.
        gate_first: whether x is gated before it is normalised, and not after.
    """

    def __init__(
        self, width: int, dtype: DType, epsilon: float, groups: int = 1, gate_first: bool = False
    ):
        super().__init__()
        self.groups, self.epsilon, self.gate_first = groups, epsilon, gate_first
        self.weight = Weight("weight", dtype, (width,), DeviceRef.CPU())

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        """``[..., width]`` → the same shape, in float32."""
        weight = jnp.asarray(self.weight)
        return gated_norm(x, gate, weight, self.epsilon, self.groups, self.gate_first)


def gated_norm(
    x: jax.Array, gate: jax.Array, weight: jax.Array, epsilon: float, groups: int = 1,
    gate_first: bool = False,
) -> jax.Array:  # fmt: skip
    """A :class:`GatedNorm` with the weight ``[width]``: ``[..., width]`` → the same shape, in float32."""
    x, gate = x.astype(jnp.float32), jax.nn.silu(gate.astype(jnp.float32))
    x = x * gate if gate_first else x
    y = unit_rms(x.reshape(*x.shape[:-1], groups, -1), epsilon)
    y = y.reshape(x.shape) * weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    return y if gate_first else y * gate


def recurrence(
    by_heads: Callable[..., Any], step: Callable[..., Any], chunks: Callable[..., Any],
    operands: Sequence[jax.Array], state: jax.Array,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Runs a recurrence over tokens: results ``[B, T, H, ...]``, and the state ``[B, H, ...]`` after them.

    Args:
        by_heads: function that runs it, as :meth:`RecurrentMixer.by_heads`.
        step, chunks: the recurrence for one token, whose axis of tokens is left out, and for several.
        operands: inputs ``[B, T, H, ...]``.
        state: state before the tokens.
    """
    count = len(operands)
    if operands[0].shape[1] != 1:
        axes = [2] * count + [1]
        return by_heads(chunks, (*operands, state), axes, [(4, 2), (4, 1)])
    now = (*(a[:, 0] for a in operands), state)
    y, state = by_heads(step, now, [1] * (count + 1), [(3, 1), (4, 1)])
    return y[:, None], state


class RecurrentMixer(Module):
    """Mixes tokens by named recurrent states, which ``config.states(number)`` lists under ``group``.

    Subclasses define :meth:`kept` and :meth:`mix`. Padding and rows without a token do not change the
    states.

    Args:
        config: settings of the decoder.

    Attributes:
        group: name of the cache group that has the states.
        kind: the states of one layer.
    """

    group: ClassVar[str] = "recurrent"
    _mx_carries = True

    def __init__(self, config: Any):
        super().__init__()
        self.kind = self.kept(config)

    @classmethod
    def kept(cls, config: Any) -> States:
        """The states of one layer of a model with these settings."""
        raise NotImplementedError(f"{cls.__name__} does not define kept")

    def mix(
        self, x: jax.Array, states: dict[str, jax.Array] | None, counts: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Hidden states ``[B, T, E]`` → the same shape, and the states after the real tokens.

        Args:
            x: hidden states.
            states: states ``[B, ...]`` before these tokens, by name; None: there are no tokens before.
            counts: number of real tokens in each row, ``[B]``; the rest is padding. None: all are real.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define mix")

    def mix_in_place(
        self, x: jax.Array, states: Recurrent, number: Any, counts: jax.Array | None
    ) -> tuple[jax.Array, Recurrent] | None:
        """:meth:`mix` for one token ``[B, 1, E]``, which updates the stacked states of all layers in place.

        Returns None if that is not possible; then :meth:`mix` is used.

        Args:
            x, counts: as for :meth:`mix`.
            states: the states of all layers.
            number: index of this layer among them.
        """
        return None

    def cache_place(self, batch: int) -> Place:
        """The sharding of the states of ``batch`` sequences: rows over the batch axes, channels over ``model``."""
        where = [weight.sharding for weight in self.raw_state_dict().values()]
        mesh = mesh_of(where)
        if mesh is None:
            return Place(next((one for one in where if one is not None), None))
        model, rows = axis_of(mesh, "model"), batch_axes(mesh, batch)
        over = () if model is None or model in rows else (model,)
        return Place(NamedSharding(mesh, spec_of([(), rows])), over=over)

    def by_heads(
        self, run: Callable[..., Any], operands: Sequence[jax.Array], axes: Sequence[int],
        out: Sequence[tuple[int, int]],
    ) -> Any:  # fmt: skip
        """Calls ``run`` with the operands; on a mesh, each device calls it for its own sequences and heads.

        If XLA sharded a recurrence over tokens itself, it would exchange shards at every step.

        Args:
            run: a function of arrays whose sequences and heads do not depend on each other.
            operands: arrays ``[B, ...]``.
            axes: index of the axis of heads in each operand.
            out: (number of axes, index of the axis of heads) of each result.
        """
        batch, heads = operands[0].shape[0], operands[0].shape[axes[0]]
        mesh, over = self._split(batch, heads)
        if mesh is None:
            return run(*operands)
        rows = batch_axes(mesh, batch)

        def spec(rank: int, axis: int) -> PartitionSpec:
            return spec_of([rows, *(over if i == axis else () for i in range(1, rank))])

        specs = [spec(a.ndim, axis) for a, axis in zip(operands, axes, strict=True)]
        found = tuple(spec(*one) for one in out)
        return on_mesh(run, mesh, specs, found, check_vma=False)(*operands)

    def parts(self, batch: int, heads: int) -> int:
        """The number of devices over which :meth:`by_heads` splits the heads."""
        mesh, over = self._split(batch, heads)
        return 1 if mesh is None else math.prod(mesh.shape[name] for name in over)

    def _split(self, batch: int, heads: int) -> tuple[Any, tuple[str, ...]]:
        """The mesh that a recurrence runs on (or None), and the mesh axes that split the heads."""
        mesh = mesh_of([weight.sharding for weight in self.raw_state_dict().values()])
        if mesh is None or any(map(is_manual, mesh.axis_names)):
            return None, ()
        model = axis_of(mesh, "model")
        if model is None or model in batch_axes(mesh, batch) or heads % mesh.shape[model]:
            return mesh, ()
        return mesh, (model,)

    def __call__(
        self, x: jax.Array, step: Step, cached: Cached, layer: Any
    ) -> tuple[jax.Array, Cached]:
        """Hidden states ``[B, T, E]``, or ``[B, E]`` for one token per sequence → the same shape.

        The arguments and the result are as for ``DecoderAttention.__call__``.
        """
        before = cached.get(self.group) if cached else None
        number = layer if before is None else step.number(self.group, layer)
        mesh = explicit.mesh_of(x, *jax.tree.leaves(self))
        if mesh is None:
            y, after = _mixed(self, x, step.counts, before, number)
            after = self._placed(after, x.shape[0])
        else:
            wanted = [explicit.entries(a) for a in (x, *jax.tree.leaves(before))]
            run = lambda *given: jax.tree.leaves(_mixed(*given))
            run = explicit.automatic(run, mesh, wanted)
            y, *arrays = run(self, x, step.counts, before, number)
            after = jax.tree.unflatten(jax.tree.structure(before), arrays)
        return y, cached if after is None else {**cached, self.group: after}

    def _placed(self, states: Recurrent | None, batch: int) -> Recurrent | None:
        """The states with the cache's sharding, which XLA would otherwise be free to change."""
        place = self.cache_place(batch)
        mesh = mesh_of([place.sharding])
        if states is None or mesh is None or any(map(is_manual, mesh.axis_names)):
            return states
        keep = jax.lax.with_sharding_constraint
        return Recurrent(
            {
                one.name: keep(states.arrays[one.name], self.kind.sharding(one, place))
                for one in self.kind.each
            }
        )


def _mixed(
    mixer: RecurrentMixer, x: jax.Array, counts: Any, before: Recurrent | None, number: Any
) -> tuple[jax.Array, Recurrent | None]:
    tokens = x[:, None] if x.ndim == 2 else x
    if before is not None and tokens.shape[1] == 1:
        found = mixer.mix_in_place(tokens, before, number, counts)
        if found is not None:
            return found[0].astype(x.dtype).reshape(x.shape), found[1]
    y, new = mixer.mix(tokens, None if before is None else before.at(number), counts)
    y = y.astype(x.dtype).reshape(x.shape)
    if before is None:
        return y, None
    return y, before.replaced(number, new, None if counts is None else counts > 0)
