"""The runs of ``max_recipes.py``: file and what is run of it, and how it is made and called."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

X = 16  # the width of most layers


def fill(add: Callable[[str, Callable[[Any], Any]], None]) -> None:
    """Gives every run to a function of its name and its recipe."""
    from scripts.max_recipes import draw, ids

    ones = lambda *shape: np.ones(shape, np.float32)

    # --- encoders of text
    def bert(k: Any) -> Any:
        hf = k.config(num_key_value_heads=2, type_vocab_size=2, pad_token_id=0, relative_attention_num_buckets=8,
                      hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
        return k.config(huggingface_config=hf, pool_embeddings=False)

    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.float32)
    add(
        "bert/graph.py BertModel",
        lambda k: (k.file.BertModel(bert(k)), (ids(2, 5), mask, ids(2, 5, below=3) - 2)),
    )
    add("mpnet/graph.py MPNetModel", lambda k: (k.file.MPNetModel(bert(k)), (ids(2, 5), mask)))

    def umt5(k: Any) -> Any:
        config = k.config(d_model=X, d_kv=8, d_ff=24, num_layers=2, num_heads=2, relative_attention_num_buckets=8,
                          relative_attention_max_distance=16, dropout_rate=0.0, layer_norm_epsilon=1e-6, is_gated_act=True,
                          dense_act_fn="gelu_new", feed_forward_proj="gated-gelu", use_cache=False, is_encoder_decoder=False,
                          is_decoder=False, pad_token_id=0)  # fmt: skip
        return k.file.UMT5EncoderModel(config, dtype=k.f32, device=k.cpu), (ids(2, 5), mask)

    add("umt5/umt5.py UMT5EncoderModel", umt5)

    def whisper(k: Any) -> Any:
        hf = k.config(
            d_model=X,
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
        return k.config(hidden_states_layers=[0, 1], return_hidden_states=True, hidden_state_index=-1, num_layers=2, model_type="x",
                        hidden_states_index=None, rope_scaling=None, output_hidden_states=True, **more)  # fmt: skip

    heads = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_size": X,
        "head_dim": 8,
        "scale": 0.35,
    }
    block = {"hidden_size": X, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "intermediate_size": 24, "rms_norm_eps": 1e-6,
             "scale": 0.35}  # fmt: skip

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
        with_rope(lambda k: k.file.EncoderAttention(**heads, **k.apart()), draw(1, 5, X), bias),
    )
    add(
        "qwen3/text_encoder/qwen3.py",
        lambda k: (k.file.Qwen3TextEncoderTransformer(text(k)), (ids(1, 5), bias)),
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
        return k.file.Qwen3AttentionNoCache(rope=rope(k), num_attention_heads=2, num_key_value_heads=1, hidden_size=X, head_dim=8,
                                            dtype=k.f32, devices=[k.cpu])  # fmt: skip

    add("qwen3_embedding/layers/attention.py", lambda k: (without_cache(k), (draw(5, X), offsets)))
    add("qwen3_embedding/layers/pooling.py", lambda k: (lambda x, at: k.file.normalize_embeddings(k.file.last_token_pool(x, at)),
                                                        (draw(5, X), offsets)))  # fmt: skip

    def embedding(k: Any) -> Any:
        attention = k.of("pipelines.architectures.qwen3_embedding.layers.attention")
        mlp = k.nn.MLP(k.f32, None, X, 24, [k.cpu])
        norms = [k.nn.RMSNorm(X, k.f32) for _ in range(3)]
        one = k.file.Qwen3EmbeddingTransformerBlock(
            attention.Qwen3AttentionNoCache(rope=rope(k), num_attention_heads=2, num_key_value_heads=1, hidden_size=X,
                                            head_dim=8, dtype=k.f32, devices=[k.cpu]), mlp, *norms[:2])  # fmt: skip
        model = k.file.Qwen3EmbeddingTransformer(X, 2, [one], norms[2], k.nn.Linear(X, 32, k.f32, k.cpu),
                                                 k.nn.Embedding(32, X, k.f32, k.cpu), rope(k))  # fmt: skip
        return model, (ids(5), offsets, np.array([1], np.int64))

    add("qwen3_embedding/layers/transformer.py", embedding)

    # --- encoders of images
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
    add("pixtral/vision_encoder/rotary_embedding_2d.py",
        lambda k: (k.file.RotaryEmbedding2D(X, 2, 10000.0, 4), (draw(1, 5, X), ids(5, below=12))))  # fmt: skip

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
    add("idefics3/vision_model/embeddings.py", lambda k: (
        Extra.call(k.file.Idefics3VisionEmbeddings(idefics(k), k.f32, k.cpu), lambda m, x: m(x, None)), (draw(2, 3, 8, 8),)))  # fmt: skip
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
        seen = k.config(num_key_value_heads=2, attention_bias=True, vision_use_head=False, mm_hidden_size=X, default_output_length=4,
                        position_embedding_size=8, pooling_kernel_size=2, standardize=False, num_channels=3,
                        rope_parameters={"rope_theta": 100.0}, global_head_dim=8)  # fmt: skip
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
    add(folder + "encoding.py", lambda k: (
        Extra.call(k.file.Gemma3VisionEncoder(vision(k)), lambda m, x: m(x, [])), (draw(2, 16, X),)))  # fmt: skip
    folder = "gemma4/vision_model/"
    places = (
        np.stack(np.meshgrid(np.arange(4), np.arange(4)), -1).reshape(1, 16, 2).astype(np.int32)
    )
    add(
        folder + "embedding.py",
        lambda k: (k.file.Gemma4VisionPatchEmbedder(vision(k), k.cpu), (draw(16, 12), places[0])),
    )
    add(
        folder + "projection.py",
        lambda k: (k.file.Gemma4MultiModalProjector(vision(k), k.cpu), (draw(8, X),)),
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
    add("gemma4/layers/rotary_embedding.py vision", lambda k: (
        lambda x, at: k.file.apply_multidimensional_rope(x, k.file.compute_vision_freqs_cis(at, 8, 2, 100.0, k.f32, k.cpu), 2),
        (draw(1, 16, 2, 8), places)))  # fmt: skip
    add("gemma4/layers/rotary_embedding.py", lambda k: (
        lambda x: k.file.ProportionalRotaryEmbedding(X, 2, 10000.0, 32, head_dim=8,
                                                     scaling_params=k.file.ProportionalScalingParams(0.5))(x),
        (draw(1, 5, 2, 8),)))  # fmt: skip
    add("gemma3/layers/rms_norm.py", lambda k: (k.file.Gemma3RMSNorm(X, k.f32), (draw(3, X),)))
    add("gemma3/layers/scaled_word_embedding.py", lambda k: (
        Extra.call(k.file.ScaledWordEmbedding(32, X, k.f32, [k.cpu], embed_scale=4.0), lambda m, x: m(x, [])), (ids(5),)))  # fmt: skip
    add("inkling/layers/vision.py", lambda k: (k.file.InklingVisionModel(k.config(
        temporal_patch_size=2, patch_size=4, num_channels=3, hidden_size=24, text_hidden_size=X, num_layers=2, n_layers=2,
        out_hidden_size=X, n_channels=3, decoder_dmodel=X, rms_norm_eps=1e-6, vision_encoder_type="hmlp"), k.f32, k.cpu),
        (draw(3, 2, 4, 4, 3),)))  # fmt: skip
    add("inkling/layers/attention.py log_scaling_tau", lambda k: (
        lambda at: k.file.log_scaling_tau(at, alpha=0.1, n_floor=8), (ids(5).astype(np.float32),)))  # fmt: skip

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
    add("kimik2_5/layers/vision/patch_embedding.py", lambda k: (
        k.file.PatchEmbedding(2, 3, X, 4, 4, 1, k.f32, k.cpu), (draw(16, 3, 2, 2), np.array([[1, 4, 4]], np.int64))))  # fmt: skip

    internvl = {"num_attention_heads": 2, "hidden_size": X, "head_dim": 8}
    add(
        "internvl/layers/attention.py",
        lambda k: (
            k.file.InternVLMultiheadAttention(**internvl, devices=[k.cpu]),
            (draw(2, 5, X),),
        ),
    )

    def intern(k: Any) -> Any:
        seen = k.config(num_key_value_heads=2, qk_normalization=True, qkv_bias=True, o_proj_has_bias=True, norm_type="rms_norm",
                        attention_bias=True, num_hidden_layers=1, initializer_factor=1.0)  # fmt: skip
        return k.config(
            vision_config=seen, llm_config=k.config(hidden_size=12), downsample_ratio=0.5
        )

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

    # --- decoders' parts
    gate = lambda k: {
        "devices": [k.cpu],
        "hidden_dim": X,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "dtype": k.f32,
    }
    for method in ("greedy", "group_limited_greedy"):
        add(f"deepseekV2/layers/moe_gate.py {method}", lambda k, method=method: (k.file.DeepSeekV2MoEGate(
            **gate(k), topk_method=method, n_group=4, topk_group=2, routed_scaling_factor=2.0), (draw(5, X),)))  # fmt: skip
    for fused in (False, True):
        add(f"deepseekV3/layers/moe_gate.py {fused}", lambda k, fused=fused: (k.file.DeepseekV3TopKRouter(
            2, 8, 2.5, "sigmoid", "noaux_tc", 4, 2, True, X, k.f32, k.f32, k.f32, [k.cpu], use_fused_kernel=fused), (draw(5, X),)))  # fmt: skip
    add(
        "deepseekV3_2/layers/mlp.py",
        lambda k: (k.file.DeepseekV3_2MLP(k.f32, None, X, 24, [k.cpu]), (draw(3, X),)),
    )
    add("deepseekV3_2/layers/rms_norm_fused.py", lambda k: (k.file.RMSNormFused(X), (draw(3, X),)))
    add(
        "deepseekV3_2/layers/rms_norm_fused.py residual",
        lambda k: (k.file.RMSNormFused(X), (draw(3, X), draw(3, X, seed=1))),
    )
    add(
        "deepseekV4/layers/rope.py",
        lambda k: (
            lambda x, f: k.file.apply_rope_tail(x, f, 4),
            (draw(5, 2, 8), draw(5, 4, seed=1)),
        ),
    )
    add("dflash2_qwen3_5/layers.py GroupedConv", lambda k: (
        k.file.DFlash2GroupedConv(X, taps=3, group_size=4, block_size=4, **k.apart()), (draw(8, X),)))  # fmt: skip
    add("dflash2_qwen3_5/layers.py CandidateSelector", lambda k: (
        k.file.DFlash2CandidateSelector(X, vocab_size=32, rank=4, top_k=3, **k.apart()),
        (ids(2, 4, 3), draw(2, 4, 3), draw(2, 4, X), ids(2))))  # fmt: skip
    add(
        "laguna/layers/moe_gate.py",
        lambda k: (
            k.file.LagunaTopKRouter(2, 8, True, X, k.f32, k.f32, k.f32, [k.cpu]),
            (draw(5, X),),
        ),
    )
    add("llama4/layers.py l2_norm", lambda k: (lambda x: k.file.l2_norm(x, 1e-6), (draw(5, X),)))
    add("llama4/layers.py gate", lambda k: (k.file.Llama4TextMoEGate(**gate(k)), (draw(5, X),)))
    add("qwen3/layers/moe.py", lambda k: (k.file.Qwen3MoEGate(**gate(k)), (draw(5, X),)))
    add("qwen3vl_moe/nn/moe.py", lambda k: (k.file.Qwen3VLMoEGate(**gate(k)), (draw(5, X),)))
    add("step3p5/layers/moe_gate.py", lambda k: (k.file.Step3p5MoEGate(**gate(k)), (draw(5, X),)))
    add("gpt_oss/layers/moe.py gate", lambda k: (k.file.GptOssMoEGate(**gate(k)), (draw(5, X),)))
    add(
        "gpt_oss/layers/moe.py activation",
        lambda k: (k.file.gptoss_glu_activation, (draw(5, X), draw(5, X, seed=1))),
    )
    add("hy_v3/layers/moe_gate.py", lambda k: (k.file.HYV3TopKRouter(
        2, 8, True, X, k.f32, k.f32, k.f32, [k.cpu]), (draw(5, X),)))  # fmt: skip
    add(
        "mimo_v2/layers/moe.py",
        lambda k: (k.file.MiMoV2Router(2, 8, True, X, k.f32, k.f32, k.f32, [k.cpu]), (draw(5, X),)),
    )
    add("nemotron_h/nemotron_h.py gate", lambda k: (k.file.NemotronHMoEGate(
        **gate(k), routed_scaling_factor=2.5, norm_topk_prob=True), (draw(5, X),)))  # fmt: skip
    add(
        "nemotron_h/nemotron_h.py mlp",
        lambda k: (k.file.NemotronHMLP(k.config(mlp_bias=False)), (draw(5, X),)),
    )
    add(
        "diffusion_gemma/diffusion_gemma.py gate",
        lambda k: (k.file.DiffusionGemmaMoEGate([k.cpu], X, 8, 2, k.f32), (draw(3, X),)),
    )
    add("diffusion_gemma/diffusion_gemma.py conditioning", lambda k: (
        k.file.DiffusionGemmaSelfConditioning(X, 24, 1e-6, k.f32, k.cpu), (draw(3, X), draw(3, X, seed=1))))  # fmt: skip
    add("glm5_next/layers/clamped_swiglu.py", lambda k: (
        lambda x, y: k.file.clamped_swiglu(x, y, 1.0) + k.file.clamped_swiglu_interleaved(k.ops.concat([x, y], -1), 1.0),
        (draw(3, X), draw(3, X, seed=1))))  # fmt: skip
    add("glm5_next/layers/hyper_connection.py", lambda k: (
        k.file.HyperConnection(hidden_size=X, hc_mult=2, dtype=k.f32), (draw(3, 2, X),)))  # fmt: skip
    add(
        "glm5_next/layers/mlp.py",
        lambda k: (
            k.file.Glm5NextMLP(k.f32, None, X, 24, [k.cpu], swiglu_limit=1.0),
            (draw(3, X),),
        ),
    )
    add("glm5_next/layers/token_parallel.py", lambda k: (
        lambda x: k.file.token_shard(x, 1, 2, k.ops.shape_to_tensor(x.shape)[0]), (draw(5, X),)))  # fmt: skip
    add("lfm2/lfm2.py mlp", lambda k: (k.file.LFM2MLP(k.config(
        block_auto_adjust_ff_dim=False, block_ff_dim=24, block_ffn_dim_multiplier=1.0, block_multiple_of=4),
        lambda **given: k.nn.Linear(dtype=k.f32, device=k.cpu, **{n: v for n, v in given.items() if n not in ("dtype", "device")})),
        (draw(3, X),)))  # fmt: skip
    add("deepseekV4/layers/dspark.py markov", lambda k: (
        k.file.DSparkMarkovHead(k.config(dspark_markov_rank=4, markov_rank=4), k.cpu), (ids(5), draw(32, 4))))  # fmt: skip

    for name in ("qwen_image", "flux2", "wan"):
        fill_diffusion(add, name)
    fill_diffusion_models(add)


def fill_diffusion(add: Any, name: str) -> None:
    """Layers that three families of diffusion models write alike."""
    from scripts.max_recipes import draw

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


def fill_diffusion_models(add: Any) -> None:
    """Transformers and autoencoders of diffusion models."""
    from scripts.max_recipes import draw, ids

    both = (
        draw(1, 6, X),
        draw(1, 4, X, seed=1),
        draw(1, X, seed=2),
        draw(10, 8, seed=3),
        draw(10, 8, seed=4),
    )
    add("qwen_image/layers/qwen_image_attention.py block", lambda k: Extra.of(
        k.file.QwenImageTransformerBlock(X, 2, 8, **k.apart()), lambda m, x, y, t, c, s: m(x, y, t, (c, s)), both))  # fmt: skip
    places = np.stack([np.zeros(6), *np.divmod(np.arange(6), 3)], -1).astype(np.float32)
    add(
        "qwen_image/layers/embeddings.py QwenImagePosEmbed",
        lambda k: (k.file.QwenImagePosEmbed(10000, (2, 2, 4)), (places,)),
    )
    add("qwen_image/qwen_image.py", lambda k: (k.file.QwenImageTransformer2DModel(k.config(
        patch_size=2, in_channels=X, out_channels=4, num_layers=1, attention_head_dim=8, joint_attention_dim=12,
        guidance_embeds=False, axes_dims_rope=(2, 2, 4), pooled_projection_dim=8, zero_cond_t=False, theta=10000, eps=1e-6)),
        (draw(1, 6, X), draw(1, 4, 12, seed=1), draw(1), places, places[:4])))  # fmt: skip
    add("flux2/layers/flux2_attention.py Flux2PosEmbed", lambda k: (k.file.Flux2PosEmbed(2000, (2, 2, 2, 2)), (
        np.concatenate([places, places[:, :1]], -1),)))  # fmt: skip
    add("flux2/layers/flux2_attention.py Flux2FeedForward", lambda k: (
        k.file.Flux2FeedForward(X, dtype=k.f32, devices=[k.cpu]), (draw(1, 6, X),)))  # fmt: skip
    turned = (draw(10, 8, seed=3), draw(10, 8, seed=4))
    add("flux2/layers/flux2_attention.py Flux2ParallelSelfAttention", lambda k: Extra.of(
        k.file.Flux2ParallelSelfAttention(X, 2, 8, dtype=k.f32, devices=[k.cpu]),
        lambda m, x, c, s: m(x, image_rotary_emb=(c, s)), (draw(1, 10, X), *turned)))  # fmt: skip
    add("flux2/layers/flux2_attention.py Flux2Attention", lambda k: Extra.of(
        k.file.Flux2Attention(X, 2, 8, added_kv_proj_dim=X, dtype=k.f32, devices=[k.cpu]),
        lambda m, x, y, c, s: m(x, y, image_rotary_emb=(c, s)), (draw(1, 6, X), draw(1, 4, X, seed=1), *turned)))  # fmt: skip
    add("flux2/flux2.py embeddings", lambda k: (k.file.Flux2TimestepGuidanceEmbeddings(
        in_channels=8, embedding_dim=X, **k.apart()), (draw(2), draw(2, seed=1))))  # fmt: skip
    add("flux2/components/cfg_combine.py", lambda k: (
        k.file.CfgCombineModule(k.f32, k.cpu), (draw(1, 6, X), draw(1, 6, X, seed=1), np.array([3.5], np.float32))))  # fmt: skip

    wan = lambda k, **more: k.config(patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4,
                                     text_dim=12, freq_dim=8, ffn_dim=24, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
                                     eps=1e-6, image_dim=None, added_kv_proj_dim=None, rope_max_seq_len=32, pos_embed_seq_len=None, **more)  # fmt: skip
    add("wan/wan_transformer.py block", lambda k: (
        k.file.WanTransformerBlock(X, 24, 2, 8, 12, True, 1e-6, **k.apart()),
        (draw(1, 6, X), draw(1, 4, X, seed=1), draw(1, 6, X, seed=2), draw(1, 6, 1, 8, seed=3), draw(1, 6, 1, 8, seed=4))))  # fmt: skip
    add("wan/wan_transformer.py pre", lambda k: (k.file.WanTransformerPreProcess(wan(k), **k.apart()),
                                                 (draw(1, 4, 1, 4, 4), draw(1), draw(1, 4, 12, seed=1))))  # fmt: skip

    vae = lambda k: k.apart()
    x3 = draw(1, 8, 2, 4, 4)
    file = "autoencoders/vae.py"
    add(f"{file} RMSNorm", lambda k: (k.file.RMSNorm(8, images=False, **vae(k)), (x3,)))
    add(
        f"{file} CausalConv3d", lambda k: (k.file.CausalConv3d(8, 4, 3, padding=1, **vae(k)), (x3,))
    )
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
    add(f"{flux} Decoder", lambda k: (k.file.Decoder(4, 3, ("UpDecoderBlock2D",) * 2, (8, X), 1, 4, use_post_quant_conv=False, **vae(k)),
                                      (draw(1, 4, 4, 4),)))  # fmt: skip


class Extra:
    """A layer that is called in another way than by its arrays alone.

    Args:
        layer: the Module, which has the weights.
        call: what is called instead of it.
    """

    def __init__(self, layer: Any, call: Callable[..., Any]):
        self.layer, self.run = layer, call

    def __call__(self, *values: Any) -> Any:
        return self.run(*values)

    def state_dict(self) -> Any:
        return self.layer.state_dict()

    @classmethod
    def call(cls, layer: Any, function: Callable[..., Any]) -> Extra:
        """A layer that `function(layer, *values)` calls."""
        return cls(layer, lambda *values: function(layer, *values))

    @classmethod
    def of(cls, layer: Any, function: Callable[..., Any], arrays: Any) -> tuple[Extra, Any]:
        """The same with its arrays."""
        return cls.call(layer, function), arrays


_ = SimpleNamespace
