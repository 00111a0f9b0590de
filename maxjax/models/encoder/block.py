"""The parts of an encoder: embeddings, MLP, layer.

Shapes: B sequences, T tokens, hidden size E.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ...graph.device import DeviceRef
from ...graph.placement.specs import Split
from ...graph.placement.strategy import Segment, ShardingStrategy
from ...nn.activation import ACTIVATIONS
from ...nn.embedding import Embedding
from ...nn.layer import Module
from ...nn.linear import linear_rules, linears
from ...nn.norm import LayerNorm
from .attention import EncoderAttention, TokenInputs, Types


class EncoderEmbeddings(Module):
    """The sum of the embeddings of tokens and, where there are tables, of positions and token types.

    Args:
        config: settings of the encoder.
        types: dtypes.
        positions, token_types: number of rows of each of these tables; 0: there is no such table.
        has_norm: whether the sum is normalised here.
        size: length of the embeddings; the hidden size by default.
    """

    def __init__(
        self,
        config: Any,
        types: Types,
        *,
        positions: int = 0,
        token_types: int = 0,
        has_norm: bool = True,
        size: int | None = None,
    ):
        super().__init__()
        width: int = size or config.hidden_size

        def table(rows: int) -> Embedding | None:
            return Embedding(rows, width, types.dtype, DeviceRef.CPU()) if rows else None

        self.word_embeddings = table(config.vocab_size)
        self.position_embeddings = table(positions)
        self.token_type_embeddings = table(token_types)
        self.dtype = types.reduce
        self.LayerNorm = types.norm(config, size=width) if has_norm else None

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the small tables of positions and token types; the table of tokens has its own rule."""
        replicated = ShardingStrategy.replicate(1)
        return {f"{name}_embeddings.weight": replicated for name in ("position", "token_type")}

    def __call__(self, input_ids: Any, token_type_ids: Any, position_ids: Any) -> jax.Array:
        assert self.word_embeddings is not None
        tokens = self.word_embeddings(input_ids)  # [B, T, E]
        dtype, total = self.dtype.np, tokens
        if self.token_type_embeddings is not None:
            types = self.token_type_embeddings(token_type_ids)  # [B, T, E]
            total = total.astype(dtype) + types.astype(dtype)
        if self.position_embeddings is not None:
            positions = self.position_embeddings(position_ids)  # [1 or B, T, E]
            total = total.astype(dtype) + jnp.broadcast_to(positions.astype(dtype), tokens.shape)
        if self.LayerNorm is not None:
            total = self.LayerNorm(total)
        return total.astype(tokens.dtype)


class EncoderMLP(Module):
    """``down(act(up(x)))``, or gated ``down(act(gate(x)) · up(x))``.

    Args:
        config: settings of the encoder.
        types: dtypes.
        has_bias, down_bias: whether the linear layers before the activation have biases, and whether the
            last one has (by default as ``has_bias``).

    Attributes:
        names: attribute names of the linear layers: ``up, down`` or ``gate, up, down``.
        halves: for two names, the meaning of the halves of the first layer's result: "gate up" or
            "up gate" in a gated MLP; "" in an MLP without a gate.
    """

    names: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj", "down_proj")
    halves: ClassVar[str] = ""

    def __init__(
        self,
        config: Any,
        types: Types,
        *,
        has_bias: bool = True,
        down_bias: bool | None = None,
    ):
        super().__init__()
        *inputs, down = self.names
        size, inner = config.hidden_size, config.intermediate_size
        self.hidden_act, self.inner = config.hidden_act, inner
        for name in inputs:
            setattr(self, name, types.linear(size, inner * (2 if self.halves else 1), has_bias))
        setattr(self, down, types.linear(inner, size, has_bias if down_bias is None else down_bias))

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        *inputs, down = self.names
        segments = [Segment.even(self.inner)] * (2 if self.halves else 1)
        rows = Split(ShardingStrategy.segmented(1, 0, segments))
        rules = linear_rules(down, ShardingStrategy.columnwise(1))
        for name in inputs:
            rules |= {f"{name}.weight": rows, f"{name}.bias": rows}
        return rules

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., E]`` → the same shape."""
        *inputs, down = self.names
        found = [y.astype(x.dtype) for y in linears([getattr(self, name) for name in inputs], x)]
        if self.halves:
            found = jnp.split(found[0], 2, axis=-1)
            found = found if self.halves == "gate up" else found[::-1]
        inner = ACTIVATIONS[self.hidden_act](found[0])
        return getattr(self, down)(inner * found[1] if len(found) == 2 else inner).astype(x.dtype)


def plus(norm: LayerNorm, x: jax.Array, y: jax.Array) -> jax.Array:
    """``norm(x + y)``, where the sum is not rounded before the norm."""
    dtype = norm.compute_dtype.np
    return norm(x.astype(dtype) + y.astype(dtype)).astype(x.dtype)


class EncoderLayer(Module):
    """``h = norm(x + attention(x))``, then ``norm(h + mlp(h))``: norms after the sums, as in BERT.

    A family passes the parts, and sets ``names`` to the names that its files have for them.

    Attributes:
        names: attribute names of the attention, its norm, the MLP and its norm.
    """

    names: ClassVar[tuple[str, str, str, str]] = (
        "self_attn", "post_attention_layernorm", "mlp", "post_mlp_layernorm"
    )  # fmt: skip

    def __init__(self, config: Any, types: Types, attention: EncoderAttention, mlp: EncoderMLP):
        super().__init__()
        parts = (attention, types.norm(config), mlp, types.norm(config))
        for name, part in zip(self.names, parts, strict=True):
            setattr(self, name, part)

    def __call__(self, x: jax.Array, tokens: TokenInputs) -> jax.Array:
        """Hidden states ``[B, T, E]`` → the same shape."""
        attention, attention_norm, mlp, mlp_norm = (getattr(self, name) for name in self.names)
        x = plus(attention_norm, x, attention(x, tokens))
        return plus(mlp_norm, x, mlp(x))
