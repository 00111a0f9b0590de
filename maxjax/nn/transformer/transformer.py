"""TransformerBlock, attention and a feed-forward network with residual connections, and Transformer, a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...absent import absent as _absent
from ...dtype import DType
from ...graph import ops
from ...graph.device import DeviceRef
from ...graph.value import TensorValue
from ..kv_cache.paged import PagedCacheValues, over_pages
from ..layer import LayerList, Module
from .outputs import LogitsPostprocessMixin as LogitsPostprocessMixin
from .outputs import ReturnHiddenStates as ReturnHiddenStates
from .outputs import ReturnLogits as ReturnLogits
from .outputs import captures_by_device as captures_by_device
from .outputs import extract_hs as extract_hs
from .outputs import fuse_captured_hidden_states as fuse_captured_hidden_states
from .outputs import logits_postprocess as logits_postprocess
from .sequence import forward_sequential_layers as forward_sequential_layers
from .sequence import forward_sharded_layers as forward_sharded_layers


class TransformerBlock(Module):
    """``h = x + m · attention(norm(x))``, then ``h + m · mlp(norm(h))``.

    Called as in MAX, with a layer index before ``x`` and a paged cache after it, it passes both to the attention.

    Args (in MAX's order):
        attention: layer that is called with the normalised input and the block's further arguments.
        mlp: layer that is called with one argument.
        attention_norm, mlp_norm: layers that are applied before ``attention`` and before ``mlp``.
        residual_multiplier: factor m (used by Granite).

    Attributes:
        self_attn, mlp, input_layernorm, post_attention_layernorm: four layers, under their
            names in Hugging Face's checkpoints.

    Example:
        >>> from maxjax.nn.identity import Identity
        >>> block = TransformerBlock(*[Identity()] * 4, residual_multiplier=0.5)
        >>> block(4.0)  # 4 + 0.5 · 4 = 6, then 6 + 0.5 · 6
        9.0
    """

    def __init__(
        self,
        attention: Any,
        mlp: Any,
        attention_norm: Any,
        mlp_norm: Any,
        residual_multiplier: float = 1.0,
    ):
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = attention_norm
        self.post_attention_layernorm = mlp_norm
        self.residual_multiplier = residual_multiplier

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``x [..., T, E]`` → the same shape; further arguments are passed to the attention.

        Over a paged cache, it takes ``(layer_idx, x [tokens, E], kv_collection, freqs_cis, input_row_offsets)``.
        """
        at = 1 if over_pages(args, kwargs) else 0
        x = args[at] if len(args) > at else kwargs["x"]
        normed = self.input_layernorm(x)
        if len(args) > at:
            args = (*args[:at], normed, *args[at + 1 :])
        else:
            kwargs = kwargs | {"x": normed}
        h = x + self._scaled(self.self_attn(*args, **kwargs))
        return h + self._scaled(self.mlp(self.post_attention_layernorm(h)))

    def _scaled(self, y: Any) -> Any:
        return y if self.residual_multiplier == 1.0 else y * self.residual_multiplier


class Transformer(LogitsPostprocessMixin, Module):
    """A decoder of ragged batches over a paged cache: embedding, blocks, norm and head. Arguments in MAX's order.

    Args:
        dim, n_heads: numbers of features and heads, which are only stored as attributes.
        layers: blocks, called as a TransformerBlock over a paged cache.
        norm, output, embedding: final norm, output layer, and embedding table.
        kv_params: settings of the cache.
        rope: rotary embedding, whose table is passed to every block.
        return_logits, return_hidden_states: settings of :func:`logits_postprocess`.
        embedding_multiplier: factor of the embeddings.
        logits_scaling: number by which logits are divided.
        target_layer_ids: indices of the layers whose hidden states ``ReturnHiddenStates.SELECTED_LAYERS`` returns,
            in the order of the layers.

    Attributes:
        layers, norm, lm_head, embed_tokens: the layers, under their names in Hugging Face's checkpoints.

    Raises:
        ValueError: an index in ``target_layer_ids`` is out of range.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        layers: Sequence[Any],
        norm: Any,
        output: Any,
        embedding: Any,
        kv_params: Any,
        rope: Any,
        return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN,
        return_hidden_states: ReturnHiddenStates = ReturnHiddenStates.NONE,
        embedding_multiplier: float = 1.0,
        logits_scaling: float = 1.0,
        target_layer_ids: Sequence[int] | None = None,
    ):
        super().__init__()
        if wrong := [i for i in target_layer_ids or () if not 0 <= i < len(layers)]:
            raise ValueError(f"target_layer_ids {wrong}: there are {len(layers)} layers")
        self.dim, self.n_heads, self.kv_params, self.rope = dim, n_heads, kv_params, rope
        self.layers = LayerList(layers)
        self.norm = norm
        self.lm_head = output
        self.embed_tokens = embedding
        self.return_logits, self.return_hidden_states = return_logits, return_hidden_states
        self.embedding_multiplier, self.logits_scaling = embedding_multiplier, logits_scaling
        self.target_layer_ids = list(target_layer_ids) if target_layer_ids else None

    def __call__(
        self,
        tokens: Any,
        kv_collection: PagedCacheValues,
        return_n_logits: Any,
        input_row_offsets: Any,
        hidden_states: Any = None,
    ) -> tuple[TensorValue, ...]:
        """Token ids ``[tokens]`` of B sequences → logits, and hidden states, as from :func:`logits_postprocess`.

        Args:
            kv_collection: cache, in which the keys and values of the tokens are stored.
            return_n_logits: number of tokens of each sequence with logits, ``[1]``, for ``ReturnLogits.VARIABLE``.
            input_row_offsets: offsets ``[B + 1]``: where each sequence begins, and where the last one ends.
            hidden_states: argument of MAX's draft models, ignored.
        """
        h = self.embed_tokens(tokens)
        if self.embedding_multiplier != 1.0:
            h = h * float(self.embedding_multiplier)
        return self._process_hidden_states(h, kv_collection, return_n_logits, input_row_offsets)

    def _process_hidden_states(
        self, h: Any, kv_collection: PagedCacheValues, return_n_logits: Any, input_row_offsets: Any
    ) -> tuple[TensorValue, ...]:
        table = self.rope.freqs_cis
        wanted = self.return_hidden_states == ReturnHiddenStates.SELECTED_LAYERS
        chosen = set(self.target_layer_ids or ()) if wanted else set()
        captured: list[list[TensorValue]] = []
        for i, layer in enumerate(self.layers):
            number = ops.constant(i, DType.uint32, DeviceRef.CPU())
            h = layer(
                number, h, kv_collection, freqs_cis=table, input_row_offsets=input_row_offsets
            )
            if i in chosen:
                captured.append([h])
        return self._postprocess_logits(h, input_row_offsets, return_n_logits, captured or None)


__getattr__ = _absent(__name__)
