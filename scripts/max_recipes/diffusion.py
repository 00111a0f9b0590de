"""Runs of diffusion models: file and what is run of it, and how it is made and called."""

from __future__ import annotations

import numpy as np

from scripts.max_recipes.kit import Extra, X, add, draw


def alike(name: str) -> None:
    """Layers that three families of diffusion models write alike."""
    file = "wan/embeddings.py" if name == "wan" else f"{name}/layers/embeddings.py"
    add(f"{file} Timesteps", lambda k: (k.file.Timesteps(8, True, 0.0), (draw(3) * 100,)))
    add(
        f"{file} TimestepEmbedding",
        lambda k: (k.file.TimestepEmbedding(8, X, **k.apart()), (draw(3, 8),)),
    )
    if name != "wan":
        norms = f"{name}/layers/normalizations.py"
        add(
            f"{norms} AdaLayerNormContinuous",
            lambda k: (
                k.file.AdaLayerNormContinuous(X, 12, **k.apart()),
                (draw(2, 5, X), draw(2, 12)),
            ),
        )


for _name in ("qwen_image", "flux2", "wan"):
    alike(_name)

# --- transformers and autoencoders

both = (
    draw(1, 6, X),
    draw(1, 4, X, seed=1),
    draw(1, X, seed=2),
    draw(10, 4, seed=3),
    draw(10, 4, seed=4),
)
add(
    "qwen_image/layers/qwen_image_attention.py block",
    lambda k: Extra.of(
        k.file.QwenImageTransformerBlock(X, 2, 8, **k.apart()),
        lambda m, x, y, t, c, s: m(x, y, t, (c, s)),
        both,
    ),
)
places = np.stack([np.zeros(6), *np.divmod(np.arange(6), 3)], -1).astype(np.float32)
add(
    "qwen_image/layers/embeddings.py QwenImagePosEmbed",
    lambda k: (k.file.QwenImagePosEmbed(10000, (2, 2, 4)), (places,)),
)
add(
    "qwen_image/qwen_image.py",
    lambda k: (
        k.file.QwenImageTransformer2DModel(
            k.config(
                patch_size=2,
                in_channels=X,
                out_channels=4,
                num_layers=1,
                attention_head_dim=8,
                joint_attention_dim=12,
                guidance_embeds=False,
                axes_dims_rope=(2, 2, 4),
                pooled_projection_dim=8,
                zero_cond_t=False,
                theta=10000,
                eps=1e-6,
            )
        ),
        (
            draw(1, 6, X),
            draw(1, 4, 12, seed=1),
            draw(1),
            places[None].astype(np.int64),
            places[None, :4].astype(np.int64),
        ),
    ),
)
add(
    "flux2/layers/flux2_attention.py Flux2PosEmbed",
    lambda k: (
        k.file.Flux2PosEmbed(2000, (2, 2, 2, 2)),
        (np.concatenate([places, places[:, :1]], -1),),
    ),
)
add(
    "flux2/layers/flux2_attention.py Flux2FeedForward",
    lambda k: (k.file.Flux2FeedForward(X, dtype=k.f32, devices=[k.cpu]), (draw(1, 6, X),)),
)
turned = (draw(10, 8, seed=3), draw(10, 8, seed=4))
add(
    "flux2/layers/flux2_attention.py Flux2ParallelSelfAttention",
    lambda k: Extra.of(
        k.file.Flux2ParallelSelfAttention(X, 2, 8, dtype=k.f32, devices=[k.cpu]),
        lambda m, x, c, s: m(x, image_rotary_emb=(c, s)),
        (draw(1, 10, X), *turned),
    ),
)
add(
    "flux2/layers/flux2_attention.py Flux2Attention",
    lambda k: Extra.of(
        k.file.Flux2Attention(X, 2, 8, added_kv_proj_dim=X, dtype=k.f32, devices=[k.cpu]),
        lambda m, x, y, c, s: m(x, y, image_rotary_emb=(c, s)),
        (draw(1, 6, X), draw(1, 4, X, seed=1), *turned),
    ),
)
add(
    "flux2/flux2.py embeddings",
    lambda k: (
        k.file.Flux2TimestepGuidanceEmbeddings(in_channels=8, embedding_dim=X, **k.apart()),
        (draw(2), draw(2, seed=1)),
    ),
)
add(
    "flux2/components/cfg_combine.py",
    lambda k: (
        k.file.CfgCombineModule(k.f32, k.cpu),
        (draw(1, 6, X), draw(1, 6, X, seed=1), np.array([3.5], np.float32)),
    ),
)

wan = lambda k, **more: k.config(
    patch_size=(1, 2, 2),
    num_attention_heads=2,
    attention_head_dim=8,
    in_channels=4,
    out_channels=4,
    text_dim=12,
    freq_dim=8,
    ffn_dim=24,
    num_layers=2,
    cross_attn_norm=True,
    qk_norm="rms_norm_across_heads",
    eps=1e-6,
    image_dim=None,
    added_kv_proj_dim=None,
    rope_max_seq_len=32,
    pos_embed_seq_len=None,
    **more,
)
add(
    "wan/wan_transformer.py block",
    lambda k: (
        k.file.WanTransformerBlock(X, 24, 2, 8, 12, True, 1e-6, **k.apart()),
        (
            draw(1, 6, X),
            draw(1, 4, 12, seed=1),
            draw(1, 6, X, seed=2),
            draw(6, 8, seed=3),
            draw(6, 8, seed=4),
        ),
    ),
)
add(
    "wan/wan_transformer.py pre",
    lambda k: (
        k.file.WanTransformerPreProcess(wan(k), **k.apart()),
        (draw(1, 4, 1, 4, 4), draw(1), draw(1, 4, 12, seed=1)),
    ),
)

vae = lambda k: k.apart()
x3 = draw(1, 8, 2, 4, 4)
file = "autoencoders/vae.py"
add(f"{file} RMSNorm", lambda k: (k.file.RMSNorm(8, images=False, **vae(k)), (x3,)))
add(f"{file} CausalConv3d", lambda k: (k.file.CausalConv3d(8, 4, 3, padding=1, **vae(k)), (x3,)))
add(f"{file} MidBlockCached", lambda k: (k.file.MidBlockCached(8, **vae(k)), (x3,)))
add(f"{file} Upsample2d", lambda k: (k.file.Upsample2d(), (draw(2, 8, 4, 4),)))
flux = "autoencoders/vae_flux2.py"
add(
    f"{flux} Encoder",
    lambda k: (
        k.file.Encoder(3, 4, ("DownEncoderBlock2D",) * 2, (8, X), 1, 4, **vae(k)),
        (draw(1, 3, 8, 8),),
    ),
)
add(
    f"{flux} Decoder",
    lambda k: (
        k.file.Decoder(
            4, 3, ("UpDecoderBlock2D",) * 2, (8, X), 1, 4, use_post_quant_conv=False, **vae(k)
        ),
        (draw(1, 4, 4, 4),),
    ),
)
add(
    "flux2/components/denoise_predict.py",
    lambda k: (
        k.file.EulerStepModule(k.f32, k.cpu),
        (draw(1, 4, X), draw(1, 4, X, seed=1), draw(1, seed=2)),
    ),
)
