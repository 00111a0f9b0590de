"""Runs of encoders of images: file and what is run of it, and how it is made and called."""

from __future__ import annotations

from typing import Any

import numpy as np

from scripts.max_recipes.kit import Extra, Sized, X, add, draw, ids

offsets = np.array([0, 3, 5], np.uint32)

llava = {"hidden_size": X, "vision_hidden_size": 12}
add(
    "pixtral/llava/llava_projector.py",
    lambda k: (k.file.LlavaMultiModalConnector(**llava, **k.apart()), (draw(3, 12),)),
)
add(
    "pixtral/vision_encoder/attention_utils.py",
    lambda k: (k.file.rotate_half, (draw(3, 2, 8),)),
)


def pixtral_attention(k: Any) -> Any:
    file = k.of("pipelines.architectures.pixtral.vision_encoder.attention")
    return file.Attention(2, X, 8, k.f32, k.cpu)


around = (draw(5, 8, seed=1), draw(5, 8, seed=2))
pixels = (draw(1, 5, X), np.zeros((1, 1, 5, 5), np.float32), *around)
add(
    "pixtral/vision_encoder/attention.py",
    lambda k: Extra.of(pixtral_attention(k), lambda m, x, a, c, s: m(x, a, (c, s)), pixels),
)


def pixtral_model(k: Any) -> Any:
    norms = [k.nn.RMSNorm(X, k.f32, 1e-5) for _ in range(2)]
    one = k.file.TransformerBlock(pixtral_attention(k), k.file.MLP(X, 24, k.f32, k.cpu), *norms)
    return Extra.of(
        k.file.Transformer(2, [one], k.f32), lambda m, x, a, c, s: m(x, a, (c, s)), pixels
    )


add("pixtral/vision_encoder/transformer.py", pixtral_model)
add(
    "pixtral/vision_encoder/rotary_embedding_2d.py",
    lambda k: (
        k.file.RotaryEmbedding2D(X, 2, 10000.0, 4),
        (Sized.on_gpu(draw(1, 5, X)), Sized.on_gpu(ids(5, below=12))),
    ),
)


def idefics(k: Any, **more: Any) -> Any:
    return k.config(
        scale_factor=2,
        text_config_hidden_size=12,
        num_key_value_heads=2,
        image_size=8,
        patch_size=2,
        **more,
    )


add(
    "idefics3/vision_model/connector.py",
    lambda k: (k.file.Idefics3Connector(idefics(k), k.f32, k.cpu), (draw(1, 16, X),)),
)
add(
    "idefics3/vision_model/embeddings.py",
    lambda k: (
        Extra.call(
            k.file.Idefics3VisionEmbeddings(idefics(k), k.f32, k.cpu), lambda m, x: m(x, None)
        ),
        (draw(2, 3, 8, 8),),
    ),
)
add(
    "idefics3/vision_model/encoder.py",
    lambda k: (k.file.Idefics3VisionMLP(X, 24, k.f32, k.cpu), (draw(2, 3, X),)),
)
add(
    "idefics3/vision_model/attention.py",
    lambda k: (k.file.Idefics3VisionAttention(X, 2, [k.cpu], k.f32), (draw(2, 3, X),)),
)
add(
    "idefics3/vision_model/idefics3_vision.py",
    lambda k: (k.file.Idefics3VisionModel(idefics(k), k.f32, k.cpu), (draw(2, 3, 8, 8),)),
)


def vision(k: Any, **more: Any) -> Any:
    seen = k.config(
        hidden_act="tanh",
        num_key_value_heads=2,
        attention_bias=True,
        vision_use_head=False,
        mm_hidden_size=X,
        default_output_length=4,
        position_embedding_size=8,
        pooling_kernel_size=2,
        standardize=False,
        num_channels=3,
        rope_parameters={"rope_theta": 100.0},
        global_head_dim=8,
    )
    words = k.config(hidden_size=12)
    return k.config(
        vision_config=seen,
        text_config=words,
        mm_tokens_per_image=4,
        num_key_value_heads=2,
        **more,
    )


folder = "gemma3multimodal/vision_model/"
add(
    folder + "attention.py",
    lambda k: (k.file.Gemma3VisionAttention(vision(k), 0, k.cpu), (draw(2, 16, X),)),
)
add(
    folder + "embedding.py",
    lambda k: (k.file.Gemma3VisionEmbeddings(vision(k), k.cpu), (draw(2, 3, 8, 8),)),
)
add(
    folder + "projection.py",
    lambda k: (k.file.Gemma3MultiModalProjector(vision(k), k.cpu), (draw(2, 16, X),)),
)
add(
    folder + "projection.py mlp",
    lambda k: (k.file.Gemma3VisionMLP(vision(k), k.cpu), (draw(2, 16, X),)),
)
add(
    folder + "encoding.py",
    lambda k: (
        Extra.call(k.file.Gemma3VisionEncoder(vision(k)), lambda m, x: m([x], [None])),
        (draw(2, 16, X),),
    ),
)
folder = "gemma4/vision_model/"
places = np.stack(np.meshgrid(np.arange(4), np.arange(4)), -1).reshape(1, 16, 2).astype(np.int32)
add(
    folder + "embedding.py",
    lambda k: (k.file.Gemma4VisionPatchEmbedder(vision(k), k.cpu), (draw(16, 12), places[0])),
)
add(
    folder + "projection.py",
    lambda k: (k.file.Gemma4MultiModalProjector(vision(k), k.cpu), (draw(1, 280 * 280, X),)),
)
add(
    folder + "pooling.py",
    lambda k: (
        k.file.Gemma4VisionPooler(X, 2),
        (draw(16, X), ids(4, 4, below=15, dtype=np.int32)),
    ),
)
add("gemma4/layers/rms_norm.py", lambda k: (k.file.Gemma4RMSNorm(X, k.f32), (draw(3, X),)))
add(
    "gemma4/layers/rms_norm.py plain",
    lambda k: (k.file.Gemma4RMSNorm(X, k.f32, with_weight=False), (draw(3, X),)),
)
add(
    "gemma4/layers/multimodal_embedder.py",
    lambda k: (k.file.Gemma4MultimodalEmbedder(X, 12, **k.apart()), (draw(3, X),)),
)
add(
    "gemma4/layers/moe.py",
    lambda k: (k.file.Gemma4MoEGate([k.cpu], X, 8, 2, k.f32), (draw(3, X),)),
)
add(
    "gemma4/layers/rotary_embedding.py vision",
    lambda k: (
        lambda x, at: k.file.apply_multidimensional_rope(
            x, k.file.compute_vision_freqs_cis(at, 8, 2, 100.0, k.f32, k.cpu), 2
        ),
        (draw(16, 2, 8), places[0]),
    ),
)
add(
    "gemma4/layers/rotary_embedding.py",
    lambda k: (
        lambda x: k.file.ProportionalRotaryEmbedding(
            X, 2, 10000.0, 32, head_dim=8, scaling_params=k.file.ProportionalScalingParams(0.5)
        )(x),
        (draw(1, 5, 2, 8),),
    ),
)
add("gemma3/layers/rms_norm.py", lambda k: (k.file.Gemma3RMSNorm(X, k.f32), (draw(3, X),)))
add(
    "gemma3/layers/scaled_word_embedding.py",
    lambda k: (
        Extra.call(
            k.file.ScaledWordEmbedding(31, X, k.f32, k.two, embed_scale=4.0),
            lambda m, x: m(x, k.signals()),
        ),
        (ids(5),),
    ),
)
add(
    "inkling/layers/vision.py",
    lambda k: (
        k.file.InklingVisionModel(
            k.config(
                temporal_patch_size=2,
                patch_size=4,
                num_channels=3,
                hidden_size=24,
                text_hidden_size=X,
                num_layers=2,
                n_layers=2,
                out_hidden_size=X,
                n_channels=3,
                decoder_dmodel=X,
                rms_norm_eps=1e-6,
                vision_encoder_type="hmlp",
                use_vision_norm=True,
            ),
            k.f32,
            k.cpu,
        ),
        (draw(3, 2, 4, 4, 3),),
    ),
)
add(
    "inkling/layers/attention.py log_scaling_tau",
    lambda k: (
        lambda at: k.file.log_scaling_tau(at, alpha=0.1, n_floor=8),
        (ids(5).astype(np.float32),),
    ),
)

folder = "kimik2_5/layers/vision/"
add(
    folder + "mlp.py",
    lambda k: (k.file.MLP2((X, 24, X), **k.apart(), has_bias=True), (draw(3, X),)),
)
add(
    folder + "patch_merger.py",
    lambda k: (k.file.PatchMergerMLP(k.f32, k.cpu, X, 12, (2, 2)), (draw(3, 4, X),)),
)
add(
    folder + "rotary_embedding.py",
    lambda k: (k.file.Rope2DPosEmbRepeated(8, 4, 4, 10000.0, k.cpu), (ids(5, below=15),)),
)
attention = (draw(5, X), offsets, np.array(3, np.uint32))
add(
    folder + "attention.py",
    lambda k: (k.file.Attention(2, X, k.f32, k.cpu), (*attention, draw(5, 4, 2, seed=3))),
)
add(
    folder + "encoder.py",
    lambda k: (
        k.file.Encoder(2, X, 24, 2, 4, 4, 10000.0, k.f32, k.cpu),
        (*attention, ids(5, below=15)),
    ),
)
add(
    "kimik2_5/layers/vision/patch_embedding.py",
    # The grids are constants: the sizes of what is computed follow from them.
    lambda k: Extra.of(
        k.file.PatchEmbedding(2, 3, X, 3, 5, 4, k.f32, k.cpu),
        lambda m, x: m(x, k.ops.constant(np.array([[1, 4, 4], [2, 2, 3]]), k.dtype.int64, k.cpu)),
        (draw(28, 3, 2, 2),),
    ),
)

internvl = {"num_attention_heads": 2, "hidden_size": X, "head_dim": 8}
add(
    "internvl/layers/attention.py",
    lambda k: (
        k.file.InternVLMultiheadAttention(**internvl, devices=[k.cpu]),
        (draw(2, 5, X),),
    ),
)


def intern(k: Any) -> Any:
    seen = k.config(
        num_key_value_heads=2,
        qk_normalization=True,
        qkv_bias=True,
        o_proj_has_bias=True,
        norm_type="rms_norm",
        attention_bias=True,
        num_hidden_layers=1,
        initializer_factor=1.0,
    )
    return k.config(vision_config=seen, llm_config=k.config(hidden_size=12), downsample_ratio=0.5)


add(
    "internvl/internvl.py embeddings",
    lambda k: (k.file.InternVisionEmbeddings(intern(k), k.cpu), (draw(1, 4, 4, 3, 2, 2),)),
)
add(
    "internvl/internvl.py mlp",
    lambda k: (k.file.InternVLVisionMLP(X, 24, k.f32, k.cpu), (draw(2, 3, X),)),
)
add(
    "internvl/internvl.py mlp1",
    lambda k: (k.file.InternVLMLP1(intern(k), k.cpu), (draw(2, 64),)),
)
windows = (draw(5, X), draw(5, 8, seed=1), draw(5, 8, seed=2), offsets, np.array([3], np.uint32))


def windowed(k: Any, parts: int) -> Any:
    """Attention in windows, also of the heads of two devices, whose results are summed."""
    layer = k.file.DistributedVisionWindowAttention(k.f32, X, 2, 8, devices=k.two)
    if parts > 1:
        layer.sharding_strategy = k.graph.ShardingStrategy.tensor_parallel(parts)

    def call(m: Any, x: Any, cos: Any, sin: Any, rows: Any, longest: Any) -> Any:
        if parts == 1:
            return m(x, (cos, sin), rows, longest)
        return k.summed(m, lambda one, to: one(to(x), (to(cos), to(sin)), to(rows), longest))

    return Extra.of(layer, call, windows)


for count in (1, 2):
    add(f"qwen2_5vl/nn/vision_attention.py {count}", lambda k, count=count: windowed(k, count))
