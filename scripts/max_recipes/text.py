"""Runs of encoders of text: file and what is run of it, and how it is made and called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from scripts.max_recipes.kit import Extra, Sized, X, add, draw, ids


def bert(k: Any) -> Any:
    hf = k.config(
        num_key_value_heads=2,
        type_vocab_size=2,
        pad_token_id=0,
        relative_attention_num_buckets=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return k.config(huggingface_config=hf, pool_embeddings=False)


def rows(array: np.ndarray) -> Sized:
    return Sized(array, ("batch_size", "seq_len"))


mask = rows(np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.float32))
add(
    "bert/graph.py BertModel",
    lambda k: (k.file.BertModel(bert(k)), (rows(ids(2, 5)), mask, rows(ids(2, 5, below=4) - 2))),
)
add(
    "mpnet/graph.py MPNetModel",
    lambda k: (k.file.MPNetModel(bert(k)), (rows(ids(2, 5)), mask)),
)


def umt5(k: Any) -> Any:
    config = k.config(
        d_model=X,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        dropout_rate=0.0,
        layer_norm_epsilon=1e-6,
        is_gated_act=True,
        dense_act_fn="gelu_new",
        feed_forward_proj="gated-gelu",
        use_cache=False,
        is_encoder_decoder=False,
        is_decoder=False,
        pad_token_id=0,
    )
    return k.file.UMT5EncoderModel(config, dtype=k.f32, device=k.cpu), (ids(2, 5), mask.array)


add("umt5/umt5.py UMT5EncoderModel", umt5)


def whisper(k: Any) -> Any:
    hf = k.config(
        d_model=X,
        n_heads=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=24,
        encoder_layers=2,
        num_mel_bins=4,
        max_source_positions=6,
    )
    return k.file.WhisperEncoder(hf, k.f32, k.cpu), (draw(2, 12, 4),)


add("whisper/encoder.py WhisperEncoder", whisper)


def rope(k: Any, n: int = 2, **more: Any) -> Any:
    return k.nn.RotaryEmbedding(X, n, 10000.0, 32, head_dim=8, interleaved=False, **more)


def text(k: Any, **more: Any) -> Any:
    return k.config(
        hidden_state_layers=[1, 2], output_seq_len=None, attention_multiplier=0.35, **more
    )


heads = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": X,
    "head_dim": 8,
    "scale": 0.35,
}
block = {
    "hidden_size": X,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "rms_norm_eps": 1e-6,
    "scale": 0.35,
}


def with_rope(make: Callable[[Any], Any], *arrays: Any) -> Callable[[Any], Any]:
    def of(k: Any) -> Any:
        layer, frequencies = make(k), rope(k)
        return Extra(layer, lambda x, *rest: layer(x, frequencies, *rest)), arrays

    return of


add(
    "mistral3/text_encoder/attention.py",
    with_rope(lambda k: k.file.EncoderAttention(**heads, **k.apart()), draw(5, X)),
)
add(
    "mistral3/text_encoder/mistral3.py block",
    with_rope(lambda k: k.file.EncoderTransformerBlock(**block, **k.apart()), draw(5, X)),
)
add(
    "mistral3/text_encoder/mistral3.py",
    lambda k: (k.file.Mistral3TextEncoderTransformer(text(k)), (ids(5),)),
)
bias = np.where(np.tri(5, dtype=bool), 0, -1e4).astype(np.float32)[None, None]
add(
    "qwen3/text_encoder/layers/attention.py",
    with_rope(lambda k: k.file.EncoderAttention(**heads, **k.apart()), draw(5, X), bias),
)
add(
    "qwen3/text_encoder/qwen3.py",
    lambda k: (k.file.Qwen3TextEncoderTransformer(text(k)), (ids(5), bias)),
)
add(
    "qwen2_5vl/encoder/layers/attention.py",
    with_rope(lambda k: k.file.Qwen25VLEncoderAttention(**heads, **k.apart()), draw(5, X)),
)
add(
    "qwen2_5vl/encoder/qwen25vl.py",
    lambda k: (k.file.Qwen25VLTextEncoderTransformer(text(k)), (draw(5, X),)),
)
add("qwen2_5vl/encoder/model.py", lambda k: (k.file._EmbedOnly(32, X, **k.apart()), (ids(5),)))

offsets = np.array([0, 3, 5], np.uint32)


def without_cache(k: Any) -> Any:
    return k.file.Qwen3AttentionNoCache(
        rope=rope(k),
        num_attention_heads=2,
        num_key_value_heads=1,
        hidden_size=X,
        head_dim=8,
        dtype=k.f32,
        devices=[k.cpu],
    )


add("qwen3_embedding/layers/attention.py", lambda k: (without_cache(k), (draw(5, X), offsets)))
add(
    "qwen3_embedding/layers/pooling.py",
    lambda k: (
        lambda x, at: k.file.normalize_embeddings(k.file.last_token_pool(x, at)),
        (draw(5, X), offsets),
    ),
)


def embedding(k: Any) -> Any:
    attention = k.of("pipelines.architectures.qwen3_embedding.layers.attention")
    mlp = k.nn.MLP(k.f32, None, X, 24, [k.cpu])
    norms = [k.nn.RMSNorm(X, k.f32) for _ in range(3)]
    one = k.file.Qwen3EmbeddingTransformerBlock(
        attention.Qwen3AttentionNoCache(
            rope=rope(k),
            num_attention_heads=2,
            num_key_value_heads=1,
            hidden_size=X,
            head_dim=8,
            dtype=k.f32,
            devices=[k.cpu],
        ),
        mlp,
        *norms[:2],
    )
    model = k.file.Qwen3EmbeddingTransformer(
        X,
        2,
        [one],
        norms[2],
        k.nn.Linear(X, 32, k.f32, k.cpu),
        k.nn.Embedding(32, X, k.f32, k.cpu),
        rope(k),
    )
    return model, (ids(5), offsets, np.array([1], np.int64))


add("qwen3_embedding/layers/transformer.py", embedding)
