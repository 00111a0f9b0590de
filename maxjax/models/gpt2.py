"""GPT-2. Attributes are named as in Hugging Face's checkpoints.

Learned positions, LayerNorm, biases everywhere, and maps whose weights are stored ``[in, out]``.

Source: A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.

Shapes: B sequences, T tokens, H heads, width D, hidden size E, n positions.
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
from ..graph.placement.arrays import last_axis_whole
from ..graph.placement.specs import Split, split_over
from ..graph.placement.strategy import Segment, ShardingStrategy
from ..graph.weight.weight import Weight
from ..kernels import explicit
from ..nn.activation import ACTIVATIONS, activation
from ..nn.embedding import Embedding
from ..nn.kv_cache.cache import KVCache
from ..nn.layer import LayerList, Module
from ..nn.linear import add_bias
from ..nn.norm import LayerNorm
from .config import setting
from .decoder.attention import Cached, DecoderAttention, Step, placed
from .decoder.config import DecoderConfig, own
from .decoder.model import Decoder, DecoderModel, make
from .decoder.rope import Rope
from .family import Family

# What newer files may call a setting, and what GPT-2's call it.
_SPELLINGS = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}  # fmt: skip
# Parts of the whole, where a file of the bare model leaves out what comes before them.
_PARTS = ("wte.", "wpe.", "h.", "ln_f.")


@dataclass(frozen=True)
class GPT2Config(DecoderConfig):
    """The settings of a GPT-2, with Hugging Face's defaults for what files leave out.

    Attributes:
        intermediate_size: ``4 · hidden_size`` where it is not said.
        scale_attn_weights: Whether scores are divided by ``√head_dim``.
        scale_attn_by_inverse_layer_idx: Whether those of layer i are divided by i + 1 as well.

    Example:
        >>> config = GPT2Config.from_dict({"n_embd": 8, "n_head": 2, "n_layer": 3})
        >>> config.intermediate_size, config.max_position_embeddings, config.tie_word_embeddings
        (32, 1024, True)
    """

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
        if self.hidden_act not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(
                f"'activation_function' is {self.hidden_act[:80]!r}, which is none of {known}"
            )
        if self.intermediate_size is None:
            object.__setattr__(self, "intermediate_size", 4 * self.hidden_size)
        super().__post_init__()

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Both spellings of counts, and no rope.

        Raises:
            UnsupportedModelError: It looks at the states of an encoder too.
        """
        if raw.get("add_cross_attention"):
            raise UnsupportedModelError("'add_cross_attention': a GPT-2 with an encoder")
        other = {own: raw.get(name) for name, own in _SPELLINGS.items() if raw.get(own) is None}
        return {**other, "rope": None}


class Conv1D(Module):
    """A linear map whose weight is stored ``[in, out]``: ``x @ weight + bias``.

    The weight stays as files have it. On a CPU one row takes half as long again as with the kernel
    for ``[out, in]`` in float32 (turned over at each call, twenty times), and in bfloat16, which
    XLA widens first, nearly thirty times: there float32 is the faster type.

    Attributes:
        weight: Weight ``[in_dim, out_dim]``.
        bias: Weight ``[out_dim]``.

    Example:
        >>> layer = Conv1D(3, 2, DType.float32)
        >>> _ = layer.load_state_dict({"weight": jnp.ones((3, 2)), "bias": jnp.zeros(2)})
        >>> print(layer(jnp.ones((1, 3))))
        [[3. 3.]]
    """

    def __init__(self, in_dim: int, out_dim: int, dtype: DType):
        super().__init__()
        self.weight = Weight("weight", dtype, (in_dim, out_dim), DeviceRef.CPU())
        self.bias = Weight("bias", dtype, (out_dim,), DeviceRef.CPU())

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., in_dim]`` → ``[..., out_dim]``, summed in float32 and rounded to the type of ``x``."""
        weight = jnp.asarray(self.weight)
        mesh = explicit.mesh_of(x, weight)
        run = _product
        if mesh is not None:
            wanted = [*explicit.entries(x)[:-1], explicit.entries(weight)[1]]
            run = explicit.automatic(_product, mesh, wanted)
        return add_bias(run(x, weight), self.bias)

    def initializer(self, name: str) -> Any:
        """Weights normal with standard deviation 0.02, bias zero."""
        init = jax.nn.initializers
        return init.zeros if name == "bias" else init.normal(0.02)


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = promote(DType.of(x.dtype), promote(DType.of(weight.dtype), DType.float32)).np
    common = promote(DType.of(x.dtype), DType.of(weight.dtype)).np
    contraction = (((x.ndim - 1,), (0,)), ((), ()))
    y = jax.lax.dot_general(
        x.astype(common), weight.astype(common), contraction, preferred_element_type=wide
    )
    return y.astype(x.dtype)


class GPT2Attention(DecoderAttention):
    """Self-attention with one map for queries, keys and values.

    Attributes:
        c_attn: Queries, keys and values side by side, ``[E, 3 H D]``.
        c_proj: What comes after the attention.
    """

    def __init__(self, config: GPT2Config, number: int, dtype: DType):
        super().__init__(config, False, dtype)
        self.scale = config.width**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= number + 1
        self.rope = "none"

    def make_projections(self, config: DecoderConfig, dtype: DType) -> None:
        """The two maps."""
        self.c_attn = Conv1D(config.hidden_size, 3 * config.hidden_size, dtype)
        self.c_proj = Conv1D(config.hidden_size, config.hidden_size, dtype)

    @property
    def o_proj(self) -> Conv1D:
        """``c_proj``, by the name that other decoders have for it."""
        return self.c_proj

    def head_axes(self) -> tuple[str, ...]:
        """As of every decoder; the weight of ``c_attn`` has its heads along its columns."""
        return self._axes_of(self.c_attn.weight, 1)

    def sharding_rules(self) -> dict[str, Any]:
        """By whole heads."""
        heads = Segment.head_aware(self.num_heads, self.head_dim)
        return {
            "c_attn.weight": Split(ShardingStrategy.segmented(1, 1, [heads] * 3)),
            "c_attn.bias": Split(ShardingStrategy.segmented(1, 0, [heads] * 3)),
            "c_proj.weight": Split(ShardingStrategy.segmented(1, 0, [heads])),
            "c_proj.bias": Split(ShardingStrategy.replicate(1)),
        }

    def project(self, x: jax.Array) -> list[jax.Array]:
        """Queries, keys and values ``[..., H, D]`` each."""
        weight = self.c_attn.weight
        y = self.c_attn(x)  # [..., 3 H D]
        # Parts of the weight on the devices do not end where queries and keys do: what they give
        # is little, and goes to all of them.
        y = placed(last_axis_whole(y, weight, 1), -1, ())
        return [
            placed(a.reshape(*a.shape[:-1], self.num_heads, -1), -2, split_over(weight, 1))
            for a in jnp.split(y, 3, axis=-1)
        ]


class GPT2MLP(Module):
    """``c_proj(activation(c_fc(x)))``."""

    def __init__(self, config: GPT2Config, dtype: DType):
        super().__init__()
        assert config.intermediate_size is not None
        self.activation_function = config.hidden_act
        self.c_fc = Conv1D(config.hidden_size, config.intermediate_size, dtype)
        self.c_proj = Conv1D(config.intermediate_size, config.hidden_size, dtype)

    def sharding_rules(self) -> dict[str, Any]:
        """What is between the maps is split."""
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

    def __init__(self, config: GPT2Config, number: int, dtype: DType):
        super().__init__()
        self.ln_1 = _norm(config, dtype)
        self.attn = GPT2Attention(config, number, dtype)
        self.ln_2 = _norm(config, dtype)
        self.mlp = GPT2MLP(config, dtype)

    def __call__(
        self, carry: tuple[jax.Array, Cached], step: Step, layer: Any
    ) -> tuple[jax.Array, Cached]:
        """(``[B, T, E]`` or ``[B, E]``, the cache) → the same."""
        x, cached = carry
        y, cached = self.attn(self.ln_1(x), step, cached, layer)
        x = x + y
        return x + self.mlp(self.ln_2(x)), cached


def _also(name: str) -> Any:
    """An attribute of GPT-2's by the name that other decoders have for it."""
    return property(lambda self: getattr(self, name), lambda self, v: setattr(self, name, v))


class GPT2Transformer(DecoderModel):
    """Embeddings of words and positions, layers, norm: what Hugging Face's files call ``transformer``.

    Attributes:
        wte, wpe: Tables of words and of positions.
        h: The layers.
        ln_f: The last norm.
    """

    embed_tokens, layers, norm = _also("wte"), _also("h"), _also("ln_f")

    def __init__(self, config: GPT2Config, dtype: DType, layer_class: Any):
        super(DecoderModel, self).__init__()
        size, cpu = config.hidden_size, DeviceRef.CPU()
        self.dtype, self.max_length = dtype, config.max_position_embeddings
        self.wte = Embedding(config.vocab_size, size, dtype, cpu)
        self.wpe = Embedding(self.max_length, size, dtype, cpu)
        self.h: Any = LayerList(layer_class(config, i, dtype) for i in range(config.num_layers))
        self.ln_f = _norm(config, dtype)

    def sharding_rules(self) -> dict[str, Any]:
        """Positions are few: every device has all."""
        return {"wpe.weight": Split(ShardingStrategy.replicate(1))}

    def embed(self, ids: jax.Array, step: Step) -> jax.Array:
        """As of :class:`DecoderModel`, with positions. Of one that is not learned: the last one's."""
        positions = step.positions(1 if ids.ndim == 1 else ids.shape[1])  # [B or 1, T]
        positions = positions[:, 0] if ids.ndim == 1 else positions
        # NaN here would reach other tokens: attention multiplies by zero what is not to be seen.
        where = self.wpe(jnp.minimum(positions, self.max_length - 1))
        return self.wte(ids).astype(self.dtype.np) + where.astype(self.dtype.np)

    def __call__(
        self, ids: jax.Array, step: Step, cached: Cached, at: jax.Array | None = None
    ) -> tuple[jax.Array, Cached]:
        """As of :class:`DecoderModel`; of tokens at positions that are not learned it is NaN."""
        x, cached = super().__call__(ids, step, cached, at)
        fits = step.positions(1 if ids.ndim == 1 else ids.shape[1]) < self.max_length  # [B or 1, T]
        if at is not None and ids.ndim == 2:
            fits = jnp.broadcast_to(fits, ids.shape)
            fits = jnp.take_along_axis(fits, at[:, None], axis=1)
        fits = fits[..., None] if x.ndim == 3 else fits
        return jnp.where(fits, x, jnp.nan), cached


class GPT2(Decoder):
    """A GPT-2.

    ``model`` and ``model.layers`` are ``transformer`` and ``transformer.h``, as other code calls
    them. A text longer than ``max_length`` is refused where the numbers are known, outside of
    ``jax.jit``; inside it, logits of tokens beyond are NaN.

    Example:
        >>> model = GPT2(GPT2Config(100, 8, num_layers=2, num_heads=2))
        >>> list(model.raw_state_dict())[:4]
        ['transformer.wte.weight', 'transformer.wpe.weight', 'transformer.ln_f.weight',
         'transformer.ln_f.bias']
    """

    layer_class: ClassVar[Any] = GPT2Block
    model_class: ClassVar[Any] = GPT2Transformer
    model = _also("transformer")

    def __call__(
        self, ids: Any, cache: KVCache | None = None, *, lengths: Any = None, last: bool = False
    ) -> Any:
        """As of :class:`Decoder`.

        Raises:
            UserInputError: As of Decoder; or a token would come after the last learned position.
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
    model_type="gpt2",
    architectures=("GPT2LMHeadModel", "GPT2Model"),
    config=GPT2Config,
    make=make(GPT2),
    # Masks, which old files hold.
    ignored=("*.attn.bias", "*.attn.masked_bias"),
    bare=("transformer.", _PARTS),
    tied=("lm_head.weight", "transformer.wte.weight"),
)
