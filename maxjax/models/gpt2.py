"""GPT-2. Attributes are named as in Hugging Face's checkpoints.

It has learned positions, LayerNorm, biases everywhere, and linear layers whose weights are stored
``[in, out]``.

Source: A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.

Shapes: B sequences, T tokens, H heads of width D, hidden size E.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ..dtype import DType, promote
from ..errors import UnsupportedModelError, UserInputError
from ..graph.device import DeviceRef
from ..graph.placement.arrays import replicate_last_axis
from ..graph.placement.specs import Split, split_over
from ..graph.placement.strategy import Segment, ShardingStrategy
from ..graph.weight.weight import Weight
from ..kernels import explicit
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.kv_cache.cache import KVCache
from ..nn.layer import LayerList, Module
from ..nn.linear import add_bias
from ..nn.low_rank import LowRank
from ..nn.norm import LayerNorm
from .config import setting
from .decoder.aliases import alias
from .decoder.attention import Cached, DecoderAttention, Step, resharded
from .decoder.config import DecoderConfig, check_activation, own
from .decoder.model import Decoder, DecoderModel, make
from .decoder.rope import Rope
from .family import Family

# Beginnings of tensor names in files of the model without its head, which omit "transformer.".
_PARTS = ("wte.", "wpe.", "h.", "ln_f.")


@dataclass(frozen=True)
class GPT2Config(DecoderConfig):
    """The settings of a GPT-2, with Hugging Face's defaults for missing keys.

    Attributes:
        intermediate_size: inner features of the MLP; ``4 · hidden_size`` by default.
        scale_attn_weights: whether scores are divided by ``√head_dim``.
        scale_attn_by_inverse_layer_idx: whether scores of layer i are also divided by i + 1.

    Example:
        >>> config = GPT2Config.from_dict({"n_embd": 8, "n_head": 2, "n_layer": 3})
        >>> config.intermediate_size, config.max_position_embeddings, config.tie_word_embeddings
        (32, 1024, True)
    """

    model_type = "gpt2"

    vocab_size: int = setting(default=50257, minimum=1, held="axis")
    hidden_size: int = setting("n_embd", default=768, minimum=1, held="axis", also=("hidden_size",))
    intermediate_size: int | None = setting("n_inner", default=None, minimum=1, held="axis")  # type: ignore[assignment]
    num_layers: int = setting(
        "n_layer", default=12, minimum=1, maximum=1000, held="layers", also=("num_hidden_layers",)
    )
    num_heads: int = setting(
        "n_head", default=12, minimum=1, held="axis", also=("num_attention_heads",)
    )
    num_kv_heads: int | None = own(None)
    head_dim: int | None = own(None)
    max_position_embeddings: int = setting(
        "n_positions", default=1024, minimum=1, held="axis", also=("max_position_embeddings",)
    )
    rms_norm_eps: float = setting("layer_norm_epsilon", default=1e-5)
    hidden_act: str = setting("activation_function", default="gelu_new")
    tie_word_embeddings: bool = setting(default=True)
    attention_bias: bool = own(True)
    mlp_bias: bool = own(True)
    sliding_window: int | None = own(None)
    rope: Rope | None = own(None)  # type: ignore[assignment]
    scale_attn_weights: bool = setting(default=True)
    scale_attn_by_inverse_layer_idx: bool = setting(default=False)

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"'n_embd' {self.hidden_size} is not a multiple of 'n_head' {self.num_heads}"
            )
        check_activation("activation_function", self.hidden_act)
        if self.intermediate_size is None:
            object.__setattr__(self, "intermediate_size", 4 * self.hidden_size)
        super().__post_init__()

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """No RoPE.

        Raises:
            UnsupportedModelError: the model has cross-attention to an encoder.
        """
        if raw.get("add_cross_attention"):
            raise UnsupportedModelError("'add_cross_attention' of a GPT-2 is not supported")
        return {"rope": None}


class TransposedLinear(LowRank):
    """A linear layer whose weight is stored ``[in, out]``: ``x @ weight + bias``.

    The weight keeps the layout of the files. On a CPU, compared with the kernel for ``[out, in]``,
    one row takes 1.5 times as long in float32 (transposing at each call would take 20 times as
    long), and nearly 30 times as long in bfloat16, which XLA widens first: there float32 is faster.

    Attributes:
        weight: Weight ``[in_dim, out_dim]``.
        bias: Weight ``[out_dim]``.

    Example:
        >>> layer = TransposedLinear(3, 2, DType.float32)
        >>> _ = layer.load_state_dict({"weight": jnp.ones((3, 2)), "bias": jnp.zeros(2)})
        >>> print(layer(jnp.ones((1, 3))))
        [[3. 3.]]
    """

    out_axis = 1

    def __init__(self, in_dim: int, out_dim: int, dtype: DType):
        super().__init__()
        self.weight = Weight("weight", dtype, (in_dim, out_dim), DeviceRef.CPU())
        self.bias = Weight("bias", dtype, (out_dim,), DeviceRef.CPU())

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., in_dim]`` → ``[..., out_dim]``, summed in float32 and rounded to the dtype of ``x``."""
        weight = jnp.asarray(self.weight)
        mesh = explicit.mesh_of(x, weight)
        run = _product
        if mesh is not None:
            spec = [*explicit.entries(x)[:-1], explicit.entries(weight)[1]]
            run = explicit.automatic(_product, mesh, spec)
        return self.updated(add_bias(run(x, weight), self.bias), x)

    def initializer(self, name: str) -> Any:
        """A normal distribution with standard deviation 0.02 for the weight, zeros for the bias."""
        init = jax.nn.initializers
        own = init.zeros if name == "bias" else init.normal(0.02)
        return super().initializer(name) or own


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = promote(DType.of(x.dtype), promote(DType.of(weight.dtype), DType.float32)).np
    common = promote(DType.of(x.dtype), DType.of(weight.dtype)).np
    contraction = (((x.ndim - 1,), (0,)), ((), ()))
    y = jax.lax.dot_general(
        x.astype(common), weight.astype(common), contraction, preferred_element_type=wide
    )
    return y.astype(x.dtype)


class GPT2Attention(DecoderAttention):
    """Self-attention with one linear layer for queries, keys and values.

    Attributes:
        c_attn: linear layer of queries, keys and values side by side, weight ``[E, 3 H D]``.
        c_proj: output projection.
    """

    def __init__(self, config: GPT2Config, number: int, dtype: DType):
        super().__init__(config, False, dtype)
        self.scale = config.width**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= number + 1
        self.rope = "none"

    def make_projections(self, config: DecoderConfig, dtype: DType) -> None:
        """Makes ``c_attn`` and ``c_proj``."""
        self.c_attn = TransposedLinear(config.hidden_size, 3 * config.hidden_size, dtype)
        self.c_proj = TransposedLinear(config.hidden_size, config.hidden_size, dtype)

    @property
    def o_proj(self) -> TransposedLinear:
        """``c_proj`` under its name in other decoders."""
        return self.c_proj

    def head_axes(self) -> tuple[str, ...]:
        """:meth:`DecoderAttention.head_axes`, from the columns of ``c_attn``, which hold the heads."""
        return split_over(self.c_attn.weight, 1)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the weights between heads."""
        heads = Segment.head_aware(self.num_heads, self.head_dim)
        return {
            "c_attn.weight": Split(ShardingStrategy.segmented(1, 1, [heads] * 3)),
            "c_attn.bias": Split(ShardingStrategy.segmented(1, 0, [heads] * 3)),
            "c_proj.weight": Split(ShardingStrategy.segmented(1, 0, [heads])),
            "c_proj.bias": Split(ShardingStrategy.replicate(1)),
        }

    def project(self, x: jax.Array) -> list[jax.Array]:
        """``[..., E]`` → queries, keys and values ``[..., H, D]`` each."""
        weight = self.c_attn.weight
        y = self.c_attn(x)  # [..., 3 H D]
        # The weight's shards do not end where queries and keys do, so the result, which is small,
        # is gathered on every device.
        y = resharded(replicate_last_axis(y, weight, 1), -1, ())
        return [
            resharded(a.reshape(*a.shape[:-1], self.num_heads, -1), -2, split_over(weight, 1))
            for a in jnp.split(y, 3, axis=-1)
        ]


class GPT2MLP(Module):
    """``c_proj(activation(c_fc(x)))``."""

    def __init__(self, config: GPT2Config, dtype: DType):
        super().__init__()
        assert config.intermediate_size is not None
        self.activation_function = config.hidden_act
        self.c_fc = TransposedLinear(config.hidden_size, config.intermediate_size, dtype)
        self.c_proj = TransposedLinear(config.intermediate_size, config.hidden_size, dtype)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return {
            "c_fc.weight": Split(ShardingStrategy.columnwise(1)),
            "c_fc.bias": Split(ShardingStrategy.rowwise(1)),
            "c_proj.weight": Split(ShardingStrategy.rowwise(1)),
            "c_proj.bias": Split(ShardingStrategy.replicate(1)),
        }

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., E]`` → the same shape."""
        return self.c_proj(activation(self.activation_function)(self.c_fc(x)))


def _norm(config: GPT2Config, dtype: DType) -> LayerNorm:
    return LayerNorm(config.hidden_size, [DeviceRef.CPU()], dtype, config.rms_norm_eps)


class GPT2Block(Module):
    """``h = x + attn(ln_1(x))``, then ``h + mlp(ln_2(h))``."""

    _mx_carries = True

    def __init__(self, config: GPT2Config, number: int, dtype: DType):
        super().__init__()
        self.ln_1 = _norm(config, dtype)
        self.attn = GPT2Attention(config, number, dtype)
        self.ln_2 = _norm(config, dtype)
        self.mlp = GPT2MLP(config, dtype)

    def __call__(
        self, carry: tuple[jax.Array, Cached], step: Step, layer: Any
    ) -> tuple[jax.Array, Cached]:
        """(Hidden states ``[B, T, E]`` or ``[B, E]``, the cache) → the same."""
        x, cached = carry
        y, cached = self.attn(self.ln_1(x), step, cached, layer)
        x = x + y
        return x + self.mlp(self.ln_2(x)), cached


class GPT2Transformer(DecoderModel):
    """Embeddings of tokens and positions, layers and final norm: ``transformer`` in Hugging Face's files.

    Attributes:
        wte, wpe: embedding tables of tokens and of positions.
        h: the layers.
        ln_f: the last norm.
    """

    embed_tokens, layers, norm = alias("wte"), alias("h"), alias("ln_f")

    def __init__(self, config: GPT2Config, dtype: DType, layer_class: Any):
        super(DecoderModel, self).__init__()
        size, cpu = config.hidden_size, DeviceRef.CPU()
        self.dtype, self.max_length = dtype, config.max_position_embeddings
        self.wte = Embedding(config.vocab_size, size, dtype, cpu)
        self.wpe = Embedding(self.max_length, size, dtype, cpu)
        self.h: Any = LayerList(layer_class(config, i, dtype) for i in range(config.num_layers))
        self.ln_f = _norm(config, dtype)

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the table of positions, which is small."""
        return {"wpe.weight": Split(ShardingStrategy.replicate(1))}

    def embed(self, ids: jax.Array, step: Step) -> jax.Array:
        """Token plus position embeddings. Beyond the learned positions, the last one is used."""
        positions = step.positions(1 if ids.ndim == 1 else ids.shape[1])  # [B or 1, T]
        positions = positions[:, 0] if ids.ndim == 1 else positions
        # NaN here would reach other tokens, because attention multiplies masked values by zero.
        learned = self.wpe(jnp.minimum(positions, self.max_length - 1))
        return self.wte(ids).astype(self.dtype.np) + learned.astype(self.dtype.np)

    def __call__(
        self, ids: jax.Array, step: Step, cached: Cached, at: jax.Array | None = None
    ) -> tuple[jax.Array, Cached]:
        """As :class:`DecoderModel`; states of tokens beyond the learned positions are NaN."""
        x, cached = super().__call__(ids, step, cached, at)
        fits = step.positions(1 if ids.ndim == 1 else ids.shape[1]) < self.max_length  # [B or 1, T]
        if at is not None and ids.ndim == 2:
            fits = jnp.broadcast_to(fits, ids.shape)
            fits = jnp.take_along_axis(fits, at[:, None], axis=1)
        fits = fits[..., None] if x.ndim == 3 else fits
        return jnp.where(fits, x, jnp.nan), cached


class GPT2(Decoder):
    """A GPT-2 language model.

    ``model`` and ``model.layers`` are ``transformer`` and ``transformer.h`` under their names in
    other decoders. A sequence longer than ``max_length`` is refused outside of ``jax.jit``, where
    lengths are known; inside it, logits of tokens beyond are NaN.

    Example:
        >>> model = GPT2(GPT2Config(100, 8, num_layers=2, num_heads=2))
        >>> list(model.raw_state_dict())[:4]
        ['transformer.wte.weight', 'transformer.wpe.weight', 'transformer.ln_f.weight',
         'transformer.ln_f.bias']
    """

    layer_class: ClassVar[Any] = GPT2Block
    model_class: ClassVar[Any] = GPT2Transformer
    model = alias("transformer")

    def __call__(
        self, ids: Any, cache: KVCache | None = None, *, lengths: Any = None, last: bool = False
    ) -> Any:
        """As a call of :class:`Decoder`.

        Raises:
            UserInputError: as for Decoder, or a token is beyond the last learned position.
        """
        shape = getattr(ids, "shape", ())
        if cache is None and lengths is None and len(shape) == 2:
            self._check_length(int(shape[1]))
        return super().__call__(ids, cache, lengths=lengths, last=last)

    def _step(
        self, starts: jax.Array, counts: jax.Array | None, length: int, cache: KVCache | None
    ) -> Step:
        after = starts + (length if counts is None else counts)
        if not isinstance(after, Tracer) and after.is_fully_addressable:
            self._check_length(int(after.max()))
        return super()._step(starts, counts, length, cache)

    def _check_length(self, length: int) -> None:
        if length > self.max_length:
            raise UserInputError(
                f"a text of {length} tokens is longer than the {self.max_length} positions "
                "that this GPT-2 has learned"
            )


GPT2_FAMILY = GPT2.family = Family(
    model_type=GPT2Config.model_type,
    architectures=("GPT2LMHeadModel", "GPT2Model"),
    config=GPT2Config,
    make=make(GPT2),
    # Attention masks that old files hold.
    ignored=("*.attn.bias", "*.attn.masked_bias"),
    bare=("transformer.", _PARTS),
    tied=("lm_head.weight", "transformer.wte.weight"),
)
