"""Runs of parts of decoders: file and what is run of it, and how it is made and called."""

from __future__ import annotations

from scripts.max_recipes.kit import Extra, X, add, draw, ids

gate = lambda k: {
    "devices": [k.cpu],
    "hidden_dim": X,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "dtype": k.f32,
}
for method in ("greedy", "group_limited_greedy"):
    add(
        f"deepseekV2/layers/moe_gate.py {method}",
        lambda k, method=method: (
            k.file.DeepSeekV2MoEGate(
                **gate(k), topk_method=method, n_group=4, topk_group=2, routed_scaling_factor=2.0
            ),
            (draw(5, X),),
        ),
    )
for fused in (False, True):
    add(
        f"deepseekV3/layers/moe_gate.py {fused}",
        lambda k, fused=fused: (
            k.file.DeepseekV3TopKRouter(
                2,
                8,
                2.5,
                "sigmoid",
                "noaux_tc",
                4,
                2,
                True,
                X,
                k.f32,
                k.f32,
                k.f32,
                [k.cpu],
                use_fused_kernel=fused,
            ),
            (draw(5, X),),
        ),
    )
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
        (draw(1, 5, 2, 8), draw(5, 2, 2, seed=1)),
    ),
)
add(
    "dflash2_qwen3_5/layers.py GroupedConv",
    lambda k: (
        k.file.DFlash2GroupedConv(X, taps=3, group_size=4, block_size=4, **k.apart()),
        (draw(8, X),),
    ),
)
add(
    "dflash2_qwen3_5/layers.py CandidateSelector",
    lambda k: (
        k.file.DFlash2CandidateSelector(X, vocab_size=32, rank=4, top_k=3, **k.apart()),
        (ids(2, 4, 3), draw(2, 4, 3), draw(2, 4, X), ids(2)),
    ),
)
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
add(
    "hy_v3/layers/moe_gate.py",
    lambda k: (k.file.HYV3TopKRouter(**gate(k), routed_scaling_factor=2.5), (draw(5, X),)),
)
add(
    "mimo_v2/layers/moe.py",
    lambda k: (k.file.MiMoV2Router(**gate(k)), (draw(5, X),)),
)
add(
    "nemotron_h/nemotron_h.py gate",
    lambda k: (
        k.file.NemotronHMoEGate(**gate(k), routed_scaling_factor=2.5, norm_topk_prob=True),
        (draw(5, X),),
    ),
)
add(
    "nemotron_h/nemotron_h.py mlp",
    lambda k: (k.file.NemotronHMLP(k.config(mlp_bias=False)), (draw(5, X),)),
)
add(
    "diffusion_gemma/diffusion_gemma.py gate",
    lambda k: (k.file.DiffusionGemmaMoEGate([k.cpu], X, 8, 2, k.f32), (draw(3, X),)),
)
add(
    "diffusion_gemma/diffusion_gemma.py conditioning",
    lambda k: (
        k.file.DiffusionGemmaSelfConditioning(X, 24, 1e-6, k.f32, k.cpu),
        (draw(3, X), draw(3, X, seed=1)),
    ),
)
add(
    "glm5_next/layers/clamped_swiglu.py",
    lambda k: (
        lambda x, y: (
            k.file.clamped_swiglu(x, y, 1.0)
            + k.file.clamped_swiglu_interleaved(k.ops.concat([x, y], -1), 1.0)
        ),
        (draw(3, X), draw(3, X, seed=1)),
    ),
)
add(
    "glm5_next/layers/hyper_connection.py",
    lambda k: Extra.of(
        k.file.HyperConnection(hidden_size=X, hc_mult=2, dtype=k.f32),
        lambda m, streams, weight, y: (
            *vars(mixing := m(streams, weight)).values(),
            m.write_back(streams, y, mixing),
        ),
        (draw(3, 2, X), draw(X, seed=1), draw(3, X, seed=2)),
    ),
)
add(
    "glm5_next/layers/mlp.py",
    lambda k: (
        k.file.Glm5NextMLP(k.f32, None, X, 24, [k.cpu], swiglu_limit=1.0),
        (draw(3, X),),
    ),
)
add(
    "glm5_next/layers/token_parallel.py",
    lambda k: (
        lambda x: k.file.token_shard(x, 1, 2, k.ops.shape_to_tensor(x.shape)[0]),
        (draw(5, X),),
    ),
)
add(
    "lfm2/lfm2.py mlp",
    lambda k: (
        k.file.LFM2MLP(
            k.config(
                block_auto_adjust_ff_dim=False,
                block_ff_dim=24,
                block_ffn_dim_multiplier=1.0,
                block_multiple_of=4,
            ),
            lambda **given: k.nn.Linear(
                dtype=k.f32,
                device=k.cpu,
                **{n: v for n, v in given.items() if n not in ("dtype", "device")},
            ),
        ),
        (draw(3, X),),
    ),
)
add(
    "deepseekV4/layers/dspark.py markov",
    lambda k: (
        k.file.DSparkMarkovHead(k.config(dspark_markov_rank=4, markov_rank=4), k.cpu),
        (ids(5), draw(4, 32)),
    ),
)
add(
    "deepseekV3_2/layers/moe_gate.py",
    lambda k: (
        k.file.DeepseekV3_2TopKRouter(
            2, 8, 2.5, "sigmoid", "noaux_tc", 4, 2, True, X, k.f32, k.f32, k.f32, [k.cpu]
        ),
        (draw(5, X),),
    ),
)
positions = (ids(3, 5, below=15),)
add(
    "qwen3_5/layers/text_rotary.py",
    lambda k: (
        k.file.Qwen3_5TextRotaryEmbedding(X, 2, 1e4, 32, [3, 3, 2], 16).freqs_cis_position_ids,
        positions,
    ),
)
add(
    "qwen3vl_moe/nn/text_rotary.py",
    lambda k: (
        k.file.Qwen3VLTextRotaryEmbedding(
            X, 2, 1e4, 32, k.f32, [3, 3, 2], 16
        ).freqs_cis_position_ids,
        positions,
    ),
)
