"""What is peculiar to the settings of families with experts, drawn at random: ``EXPERTS``."""

from __future__ import annotations

from collections.abc import Callable

from tests.models.families.choices import (
    FULL,
    KINDS,
    LEFT_OUT,
    ORIGINAL,
    Pick,
    Settings,
    kinds_of,
    no_rope,
    partly,
    rope,
    width_of,
    window,
    without_rope,
)


def of_mixtral(pick: Pick, found: Settings) -> Settings:
    given = found.get("rope_scaling") or found.get("rope_parameters") or {"rope_type": "default"}
    if (
        found["hidden_size"] % (2 * found["num_attention_heads"])
        or given.get("rope_type") != "default"
    ):
        return {"sliding_window": pick(None, 3, 9)}
    return {"sliding_window": pick(None, 3, 9), "head_dim": pick(None, 6, 16)}


def of_qwen_moe(pick: Pick, found: Settings) -> Settings:
    layers = found["num_hidden_layers"]
    return {**window(pick, found), "decoder_sparse_step": pick(1, 1, 2),
            "mlp_only_layers": pick([], [0], [layers - 1])}  # fmt: skip


def of_gpt_oss(pick: Pick, found: Settings) -> Settings:
    return {"hidden_act": LEFT_OUT}


def of_deepseek(pick: Pick, found: Settings) -> Settings:
    changed = latent(pick, found)
    experts = changed["n_routed_experts"]
    groups = pick(1, 2)
    changed |= {"n_group": groups, "topk_group": pick(1, groups)}
    most = experts // groups * changed["topk_group"]
    return {**changed, "num_experts_per_tok": min(found["num_experts_per_tok"], most),
            "rope_interleave": pick(LEFT_OUT, True, False)}  # fmt: skip


def of_deepseek_v32(pick: Pick, found: Settings) -> Settings:
    layers = found["num_hidden_layers"]
    changed = {**of_deepseek(pick, found), "rope_interleave": LEFT_OUT, "layer_types": LEFT_OUT}
    listed = pick(LEFT_OUT, pick.many(layers, "dense", "sparse"))
    return {**changed, "q_lora_rank": pick(10, 16), "mlp_layer_types": listed, "index_topk": pick(3, 7, 64),
            "index_n_heads": pick(10, 16), "index_head_dim": pick(6, 9)}  # fmt: skip


def latent(pick: Pick, found: Settings) -> Settings:
    heads = found["num_attention_heads"]
    part = pick(4, 6)
    changed = rope(pick, found, ("default", "linear", "yarn"), part)
    return {
        **no_rope(), **changed, "num_key_value_heads": heads, "head_dim": LEFT_OUT, "mlp_bias": LEFT_OUT,
        "kv_lora_rank": pick(8, 12), "q_lora_rank": pick(None, 10, 16), "qk_nope_head_dim": pick(3, 6),
        "qk_rope_head_dim": part, "v_head_dim": pick(5, 9), "n_routed_experts": pick(4, 8),
        "n_shared_experts": pick(1, 2), "first_k_dense_replace": pick(0, 1, 2),
    }  # fmt: skip


def of_deepseek_v2(pick: Pick, found: Settings) -> Settings:
    changed = {**of_deepseek(pick, found), "rope_interleave": LEFT_OUT, "norm_topk_prob": False}
    changed |= {"qk_nope_head_dim": pick(4, 6)}  # transformers wants pairs in memory
    limited = changed["n_group"] > 1
    return {**changed, "topk_method": "group_limited_greedy" if limited else "greedy"}


def of_glm4_moe(pick: Pick, found: Settings) -> Settings:
    groups, experts = pick(1, 2), pick(4, 8)
    chosen = pick(1, groups)
    most = experts // groups * chosen
    return {**no_rope(), **partly(pick, without_rope(found), 0.5, KINDS), "n_routed_experts": experts,
            "n_group": groups, "topk_group": chosen, "n_shared_experts": pick(1, 2),
            "num_experts_per_tok": min(found["num_experts_per_tok"], most),
            "first_k_dense_replace": pick(0, 1, 2)}  # fmt: skip


def of_llama4(pick: Pick, found: Settings) -> Settings:
    layers = found["num_hidden_layers"]
    rotates = pick(
        {}, {"no_rope_layers": pick.many(layers, 0, 1, 1)}, {"no_rope_layer_interval": 2}
    )
    sparse = pick({}, {"interleave_moe_layer_step": 2}, {"moe_layers": [layers - 1]})
    return {**rotates, **sparse, "attention_chunk_size": pick(5, 8, 64), "intermediate_size_mlp": pick(20, 48),
            "layer_types": LEFT_OUT, "num_experts_per_tok": pick(1, 2),
            "attention_bias": LEFT_OUT}  # fmt: skip


def of_minimax(pick: Pick, found: Settings) -> Settings:
    changed = rope(pick, found, ("default",))
    return {**no_rope(), **changed, "rotary_dim": pick(4, width_of(found))}


def of_ernie_moe(pick: Pick, found: Settings) -> Settings:
    layers = found["num_hidden_layers"]
    return {"moe_num_shared_experts": pick(0, 1, 2), "moe_layer_start_index": pick(0, 1, 2),
            "moe_layer_end_index": pick(-1, layers - 1, layers), "moe_layer_interval": pick(1, 2)}  # fmt: skip


def of_glm4_moe_lite(pick: Pick, found: Settings) -> Settings:
    layers = found["num_hidden_layers"]
    listed = pick(LEFT_OUT, pick.many(layers, "dense", "sparse"))
    return {
        **of_deepseek(pick, found),
        "first_k_dense_replace": LEFT_OUT,
        "mlp_layer_types": listed,
    }


def of_lfm2_moe(pick: Pick, found: Settings) -> Settings:
    return {"layer_types": kinds_of(pick, found, FULL, "conv", "conv"), "conv_bias": False,
            "conv_L_cache": pick(2, 3, 4), "norm_eps": pick(1e-5, 1e-3), "num_dense_layers": pick(0, 1, 2),
            "use_expert_bias": pick.maybe()}  # fmt: skip


def of_phimoe(pick: Pick, found: Settings) -> Settings:
    changed = rope(pick, found, ("default", "longrope"))
    given = changed.get("rope_scaling", changed.get("rope_parameters", {}))
    if "long_factor" in given:
        scale = pick(1.0, 1.243)
        given |= {"short_mscale": scale, "long_mscale": scale, ORIGINAL: pick(16, 64)}
    return {**no_rope(), **changed, "num_experts_per_tok": 2,
            "sliding_window": pick(None, 3, 9), "router_jitter_noise": 0.01}  # fmt: skip


def of_cohere2_moe(pick: Pick, found: Settings) -> Settings:
    layers = found["num_hidden_layers"]
    dense = {
        "first_k_dense_replace": min(layers, pick(0, 1, 2)),
        "prefix_dense_sliding_window_pattern": pick(1, 2),
        "sliding_window_pattern": pick(LEFT_OUT, 2, 3),
    }
    listed = {"mlp_layer_types": pick.many(layers, "dense", "sparse")}
    norms = pick({"rms_norm_eps": None}, {"rms_norm_eps": pick(1e-5, 1e-3)})
    given = rope(pick, found, KINDS)
    if "rope_scaling" in given:  # transformers ignores it
        scaling = {"rope_type": given["rope_scaling"].get("type")} | given.pop("rope_scaling")
        given["rope_parameters"] = scaling | {"rope_theta": given.pop("rope_theta")}
    return {**no_rope(), **given, **pick(dense, dense, listed), **norms,
            "num_shared_experts": pick(0, 1, 2),
            "prefix_dense_intermediate_size": pick(LEFT_OUT, 20, 48),
            "shared_expert_combination_strategy": pick("average", "sum"),
            "expert_selection_fn": pick("softmax", "sigmoid")}  # fmt: skip


EXPERTS: dict[str, Callable[[Pick, Settings], Settings]] = {
    "mixtral": of_mixtral,
    "qwen2_moe": of_qwen_moe,
    "qwen3_moe": of_qwen_moe,
    "gpt_oss": of_gpt_oss,
    "deepseek_v2": of_deepseek_v2,
    "deepseek_v3": of_deepseek,
    "kimi_k2": of_deepseek,
    "deepseek_v32": of_deepseek_v32,
    "glm4_moe": of_glm4_moe,
    "llama4_text": of_llama4,
    "minimax_m2": of_minimax,
    "ernie4_5_moe": of_ernie_moe,
    "glm4_moe_lite": of_glm4_moe_lite,
    "lfm2_moe": of_lfm2_moe,
    "phimoe": of_phimoe,
    "cohere2_moe": of_cohere2_moe,
}
