"""What is peculiar to the settings of each family of decoders, drawn at random: ``OWN``.

A function gets the settings that are drawn for all families alike, and returns those that are others.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.models.families.choices import (
    FULL,
    KINDS,
    LEFT_OUT,
    LINEAR,
    NEAR,
    ORIGINAL,
    Pick,
    Settings,
    both,
    kinds_of,
    longrope,
    no_rope,
    partly,
    window,
    without_rope,
)  # fmt: skip
from tests.models.families.expert_choices import EXPERTS


def of_llama(pick: Pick, found: Settings) -> Settings:
    return longrope(pick, found)


def of_mistral(pick: Pick, found: Settings) -> Settings:
    return {"sliding_window": pick(None, 3, 9, 40), **longrope(pick, found)}


def of_qwen(pick: Pick, found: Settings) -> Settings:
    return {**window(pick, found), **longrope(pick, found)}


def of_ministral3(pick: Pick, found: Settings) -> Settings:
    given: Settings = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, ORIGINAL: pick(8, 16),
                       "mscale": 1.0, "mscale_all_dim": 1.0,
                       "llama_4_scaling_beta": pick(0.1, 0.3)}  # fmt: skip
    without = dict.fromkeys(("rope_theta", "rope_scaling"), LEFT_OUT)
    return {**without, "rope_parameters": pick(given, LEFT_OUT), "sliding_window": pick(None, 5)}


def of_olmo3(pick: Pick, found: Settings) -> Settings:
    far = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, ORIGINAL: 32,
           "attention_factor": 1.2079441541679836}  # fmt: skip
    near = {"rope_type": "default", "rope_theta": pick(5e5, 1e4)}
    found = {**both(pick, far, near), "sliding_window": pick(3, 9)}
    if found["rope_theta"] is not LEFT_OUT:
        found["rope_theta"] = 5e5  # another one transformers gives to one of the kinds only
    return found


def of_phi3(pick: Pick, found: Settings) -> Settings:
    changed = partly(pick, without_rope(found), 1.0, ("default", "longrope"))
    return {**no_rope(), **changed, ORIGINAL: pick(16, 64), "sliding_window": pick(None, 3, 12)}


def of_smollm3(pick: Pick, found: Settings) -> Settings:
    layers = found["num_hidden_layers"]
    rotates = pick(
        {}, {"no_rope_layers": pick.many(layers, 0, 1)}, {"no_rope_layer_interval": pick(2, 3)}
    )
    kinds = found.get("layer_types", LEFT_OUT)
    used = pick.maybe() or kinds is not LEFT_OUT
    return {**rotates, "use_sliding_window": used, "sliding_window": pick(3, 6) if used else None}


def of_glm(pick: Pick, found: Settings) -> Settings:
    return {**no_rope(), **partly(pick, without_rope(found), 0.5, KINDS)}


def of_cohere2(pick: Pick, found: Settings) -> Settings:
    heads = found["num_attention_heads"]
    return {"hidden_size": heads * pick(4, 6), "head_dim": LEFT_OUT,
            "sliding_window_pattern": LEFT_OUT if "layer_types" in found else pick(LEFT_OUT, 2, 3)}  # fmt: skip


def of_exaone4(pick: Pick, found: Settings) -> Settings:
    layers = found["num_hidden_layers"]
    if pick.maybe():
        return {"sliding_window": None, "layer_types": [FULL] * layers}
    return {"sliding_window_pattern": pick(LEFT_OUT, 2, 4)}


def of_starcoder2(pick: Pick, found: Settings) -> Settings:
    return {"sliding_window": pick(None, 3, 12)}


def of_stablelm(pick: Pick, found: Settings) -> Settings:
    heads = found["num_attention_heads"]
    found = {**found, "hidden_size": heads * pick(8, 16)}
    changed = partly(pick, without_rope(found), 0.25, KINDS)
    return {**no_rope(), **changed, "hidden_size": found["hidden_size"],
            "qk_layernorm": pick.maybe(0.3)}  # fmt: skip


def delta(pick: Pick, found: Settings) -> Settings:
    heads = found["linear_num_key_heads"] * pick(1, 2, 3)
    # transformers wants a layer with attention.
    layers = pick(1, 2, 4, 5)
    kinds = {"layer_types": [*pick.many(layers - 1, LINEAR, LINEAR, FULL), FULL]}
    if layers >= 4:
        kinds = pick({}, kinds, {"full_attention_interval": 2})
    found = {**found, "head_dim": pick(8, 16)}
    changed = partly(pick, without_rope(found), 0.25, ("default",))
    return {
        **no_rope(),
        **changed,
        **kinds,
        "num_hidden_layers": layers,
        "linear_num_value_heads": heads,
        # GELU's small results are what two large ones leave, and the norms of queries and keys enlarge them.
        "hidden_act": pick("silu", "relu"),
        "head_dim": found["head_dim"],
    }


def of_qwen3_next(pick: Pick, found: Settings) -> Settings:
    return {
        **delta(pick, found),
        "decoder_sparse_step": pick(1, 2),
        "mlp_only_layers": pick([], [0]),
    }


def of_gemma2(pick: Pick, found: Settings) -> Settings:
    return {}


def of_gemma3(pick: Pick, found: Settings) -> Settings:
    far = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    near = {"rope_type": "default", "rope_theta": 1e4}
    ropes = both(pick, far, near, rope_local_base_freq=pick(1e4, 100.0))
    pattern = LEFT_OUT if "layer_types" in found else pick(LEFT_OUT, 2, 3)
    layers = (
        pick(found["num_hidden_layers"], 7) if pattern is LEFT_OUT else found["num_hidden_layers"]
    )
    if "layer_types" in found:
        layers = found["num_hidden_layers"]
    return {**ropes, "sliding_window_pattern": pattern, "num_hidden_layers": layers,
            "use_bidirectional_attention": False}  # fmt: skip


def sharing(pick: Pick, found: Settings) -> Settings:
    """Layers of which the last read keys and values of those before."""
    layers = pick(3, 4, 6)
    shared = pick(0, 1, layers - 2)
    kinds = [NEAR, FULL] + pick.many(layers - 3, NEAR, FULL) + [FULL]
    far = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    near = {"rope_type": "default", "rope_theta": 1e4}
    ropes = {**no_rope(), **pick({}, {"rope_parameters": {FULL: far, NEAR: near}})}
    return {
        **ropes, "num_hidden_layers": layers, "layer_types": kinds, "num_kv_shared_layers": shared,
        "vocab_size_per_layer_input": found["vocab_size"], "hidden_size_per_layer_input": pick(6, 8),
    }  # fmt: skip


def of_gemma3n(pick: Pick, found: Settings) -> Settings:
    changed = sharing(pick, found)
    layers, inputs = changed["num_hidden_layers"], pick(2, 3, 4)
    sparsity = pick(LEFT_OUT, [0.9, 0.5] + [0.0] * (layers - 2))
    return {**changed, "laurel_rank": pick(3, 8), "altup_num_inputs": inputs,
            "final_logit_softcapping": pick(LEFT_OUT, 5.0),
            "altup_active_idx": pick(0, 1), "activation_sparsity_pattern": sparsity,
            "intermediate_size": pick(33, [20, 33] + [40] * (layers - 2))}  # fmt: skip


def of_gemma4(pick: Pick, found: Settings) -> Settings:
    changed = sharing(pick, found)
    if not changed["num_kv_shared_layers"]:  # with both, transformers does not run
        changed["hidden_size_per_layer_input"] = pick(0, 6)
    ropes = changed.get("rope_parameters")
    if isinstance(ropes, dict):
        ropes[FULL] = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    same = pick.maybe()
    return {
        **changed, "global_head_dim": pick(8, 12, 16), "attention_k_eq_v": same,
        "num_global_key_value_heads": pick(1, found["num_key_value_heads"]) if same else None,
        "use_double_wide_mlp": pick.maybe(), "num_experts": LEFT_OUT, "moe_intermediate_size": LEFT_OUT,
    }  # fmt: skip


def of_gpt2(pick: Pick, found: Settings) -> Settings:
    heads = pick(1, 2, 3, 4)
    return {"n_head": heads, "n_embd": heads * pick(3, 4, 8), "n_layer": pick(1, 2, 3, 5),
            "n_positions": 96, "n_inner": pick(None, 33, 64), "layer_norm_epsilon": pick(1e-5, 1e-3),
            "activation_function": pick("gelu_new", "relu", "gelu"),
            "max_position_embeddings": LEFT_OUT}  # fmt: skip


def of_hunyuan(pick: Pick, found: Settings) -> Settings:
    width = pick(8, 16)
    given = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": pick(1000.0, 8.0), "factor": 1.0,
             "mscale": 1.0, "beta_fast": 32}  # fmt: skip
    return {**no_rope(), "head_dim": width, "rope_parameters": pick(LEFT_OUT, given)}


def nothing(pick: Pick, found: Settings) -> Settings:
    return {}


# With biases before the convolution, those of transformers see the padding on the left of shorter texts.
def of_lfm2(pick: Pick, found: Settings) -> Settings:
    kinds = kinds_of(pick, found, FULL, "conv", "conv")
    listed = [i for i, kind in enumerate(kinds) if kind == FULL]
    return {"layer_types": pick(kinds, LEFT_OUT), "full_attn_idxs": listed, "conv_bias": False,
            "conv_L_cache": pick(2, 3, 4), "block_auto_adjust_ff_dim": pick.maybe(),
            "block_multiple_of": pick(4, 16), "block_ffn_dim_multiplier": pick(1.0, 1.3),
            "norm_eps": pick(1e-5, 1e-3)}  # fmt: skip


def of_neox(pick: Pick, found: Settings) -> Settings:
    width = found["hidden_size"] // found["num_attention_heads"]
    share = pick(*(s for s in (0.25, 0.5, 1.0) if width * s % 2 == 0))
    return {**no_rope(), "rotary_pct": share, "rotary_emb_base": pick(10000, 25000)}


def of_opt(pick: Pick, found: Settings) -> Settings:
    return {"ffn_dim": pick(33, 64), "do_layer_norm_before": pick.maybe(), "max_position_embeddings": 96,
            "word_embed_proj_dim": pick(LEFT_OUT, None, 12, found["hidden_size"]),
            "_remove_final_layer_norm": pick.maybe(0.2), "enable_bias": pick.maybe(),
            "activation_function": pick("relu", "gelu")}  # fmt: skip


def of_apertus(pick: Pick, found: Settings) -> Settings:
    return {"hidden_act": "xielu"}


def of_phi(pick: Pick, found: Settings) -> Settings:
    heads = found["num_attention_heads"]
    found = {**found, "hidden_size": heads * pick(8, 20)}
    changed = partly(pick, without_rope(found), 0.5, KINDS)
    return {
        **no_rope(),
        **changed,
        "hidden_size": found["hidden_size"],
        "qk_layernorm": pick.maybe(0.3),
    }


def of_falcon(pick: Pick, found: Settings) -> Settings:
    heads = found["num_attention_heads"]
    kv = pick(*(n for n in (1, 2, 3, heads) if heads % n == 0))
    kind = pick(
        {
            "new_decoder_architecture": True,
            "num_kv_heads": kv,
            "num_ln_in_parallel_attn": pick(1, 2, None),
        },
        {"multi_query": True, "parallel_attn": True},
        {"multi_query": pick(True, False), "parallel_attn": False},
    )
    # transformers rounds the biases to bfloat16, which those of up to 8 heads are.
    alibi = heads <= 8 and pick.maybe(0.3)
    return {**kind, "bias": pick.maybe(), "ffn_hidden_size": pick(LEFT_OUT, 48), "alibi": alibi}


def mamba(pick: Pick, found: Settings) -> tuple[int, int, Settings]:
    """Heads of Mamba 2 and their width, and settings of two families."""
    heads, width = pick(4, 8), pick(4, 6)
    return heads, width, {
        "mamba_n_heads": heads, "mamba_n_groups": pick(1, 2, 4), "mamba_d_state": pick(5, 8),
        "mamba_d_conv": pick(2, 4), "mamba_conv_bias": pick.maybe(), "mamba_proj_bias": False,
    }  # fmt: skip


def of_granite_hybrid(pick: Pick, found: Settings) -> Settings:
    heads, _, more = mamba(pick, found)
    hidden, expand = pick(16, 32, 64), pick(1, 2, 3)
    experts = pick(0, found["num_local_experts"])
    return {**more, "hidden_size": hidden, "mamba_expand": expand, "num_local_experts": experts,
            "num_attention_heads": 4, "num_key_value_heads": pick(1, 2, 4),
            "mamba_d_head": pick("auto", expand * hidden // heads),
            "shared_intermediate_size": pick(12, 20), "position_embedding_type": pick(None, "rope"),
            "layer_types": kinds_of(pick, found, FULL, LINEAR, LINEAR)}  # fmt: skip


def of_mamba2(pick: Pick, found: Settings) -> Settings:
    heads, width, more = mamba(pick, found)
    return {"num_heads": heads, "head_dim": width, "n_groups": more["mamba_n_groups"],
            "expand": 2, "hidden_size": heads * width // 2, "state_size": more["mamba_d_state"],
            "conv_kernel": more["mamba_d_conv"], "use_conv_bias": pick.maybe(), "use_bias": False,
            "residual_in_fp32": pick.maybe(), "layer_norm_epsilon": pick(1e-5, 1e-3)}  # fmt: skip


def of_mamba1(pick: Pick, found: Settings) -> Settings:
    return {"hidden_size": pick(16, 24, 36), "expand": pick(1, 2, 3), "state_size": pick(5, 8, 16),
            "intermediate_size": pick(LEFT_OUT, LEFT_OUT, 40),
            "conv_kernel": pick(2, 4), "time_step_rank": pick(LEFT_OUT, "auto", 3, 7), "use_bias": False,
            "use_conv_bias": pick.maybe(), "residual_in_fp32": pick.maybe(),
            "layer_norm_epsilon": pick(1e-5, 1e-3)}  # fmt: skip


def of_jamba(pick: Pick, found: Settings) -> Settings:
    # transformers wants a layer with attention.
    most = found["num_hidden_layers"]
    every = [(p, int(pick.rng.integers(min(p, most)))) for p in (pick(1, 2, 3), pick(1, 2, 4))]
    names = [f"{kind}_layer_{what}" for kind in ("attn", "expert") for what in ("period", "offset")]
    found = dict(zip(names, [*every[0], *every[1]], strict=True))
    experts = pick(1, 4, 8)
    return {**found, "num_experts": experts, "num_experts_per_tok": min(experts, pick(1, 2, 3)),
            "mamba_expand": pick(1, 2, 3), "mamba_d_state": pick(5, 8, 16), "mamba_d_conv": pick(2, 4),
            "mamba_dt_rank": pick(LEFT_OUT, "auto", 3, 7), "mamba_conv_bias": pick.maybe(),
            "mamba_proj_bias": False}  # fmt: skip


def of_falcon_mamba(pick: Pick, found: Settings) -> Settings:
    return {**of_mamba1(pick, found), "mixer_rms_eps": pick(1e-6, 1e-3)}


def of_falcon_h1(pick: Pick, found: Settings) -> Settings:
    heads, width, more = mamba(pick, found)
    near = lambda count: [pick(0.3, 0.7, 1.0, 1.3) for _ in range(count)]
    names = ("key", "attention_in", "attention_out", "ssm_in", "ssm_out", "lm_head", "embedding")
    factors = dict(zip((f"{name}_multiplier" for name in names), near(7), strict=True))
    return {**more, **factors, "mamba_d_ssm": heads * width, "mamba_d_head": pick("auto", width),
            "mamba_rms_norm": pick.maybe(), "mamba_norm_before_gate": pick.maybe(),
            "projectors_bias": pick.maybe(), "ssm_multipliers": pick(LEFT_OUT, near(5)),
            "mlp_multipliers": pick(LEFT_OUT, near(2))}  # fmt: skip


def of_nemotron_h(pick: Pick, found: Settings) -> Settings:
    heads, width, more = mamba(pick, found)
    letters = "".join(pick.many(pick(1, 2, 4), "M", "M", "*", "-", "E")) + "*"
    groups = pick(1, 2)
    chosen = pick(1, groups)
    most = found["n_routed_experts"] // groups * chosen
    return {"moe_shared_expert_intermediate_size": pick(12, 20), "moe_latent_size": pick(None, 8, 12),
            "n_group": groups, "topk_group": chosen,
            "num_experts_per_tok": min(found["num_experts_per_tok"], most),
            "hybrid_override_pattern": letters, "num_hidden_layers": LEFT_OUT, "layers_block_type": LEFT_OUT,
            "mamba_num_heads": heads, "mamba_head_dim": width, "n_groups": more["mamba_n_groups"],
            "ssm_state_size": more["mamba_d_state"], "conv_kernel": more["mamba_d_conv"],
            "use_conv_bias": pick.maybe(), "use_bias": False, "mlp_hidden_act": pick("relu2", "silu"),
            "tie_word_embeddings": LEFT_OUT}  # fmt: skip


def of_kimi_linear(pick: Pick, found: Settings) -> Settings:
    layers, groups = found["num_hidden_layers"], pick(1, 2)
    chosen = pick(1, groups)
    experts = pick(4, 8)
    heads, width = pick(1, 2, 4), pick(6, 8)
    kinds = kinds_of(pick, found, FULL, LINEAR, LINEAR)
    kernel = pick(2, 4)
    nested = {"num_heads": heads, "head_dim": width, "short_conv_kernel_size": kernel,
              "full_attn_layers": [i + 1 for i, kind in enumerate(kinds) if kind == FULL],
              "kda_layers": [i + 1 for i, kind in enumerate(kinds) if kind == LINEAR]}  # fmt: skip
    plain = {"linear_num_heads": heads, "linear_head_dim": width, "linear_conv_kernel_dim": kernel,
             "layer_types": kinds}  # fmt: skip
    return {
        **pick({**plain}, {"linear_attn_config": nested, "layer_types": LEFT_OUT}), **no_rope(),
        "num_key_value_heads": found["num_attention_heads"], "head_dim": LEFT_OUT,
        "kv_lora_rank": pick(8, 12), "q_lora_rank": pick(None, 10, 16), "qk_nope_head_dim": pick(3, 6),
        "qk_rope_head_dim": pick(4, 6), "v_head_dim": pick(5, 9), "hidden_act": pick("silu", "relu"),
        "num_experts": experts, "n_shared_experts": pick(1, 2), "tie_word_embeddings": LEFT_OUT,
        "n_group": groups, "topk_group": chosen, "num_expert_group": LEFT_OUT,
        "num_experts_per_tok": min(pick(1, 2, 3), experts // groups * chosen),
        "mlp_layer_types": pick(LEFT_OUT, pick.many(layers, "dense", "sparse")),
    }  # fmt: skip


def of_gpt(pick: Pick, found: Settings) -> Settings:
    """GPT-J, CodeGen and StarCoder, whose settings have GPT-2's names."""
    heads = pick(1, 2, 3, 4)
    found = of_gpt2(pick, {}) | {"n_head": heads, "n_embd": heads * pick(4, 8, 16)}
    width = found["n_embd"] // heads
    return {**found, "rotary_dim": pick(*(n for n in (2, 4, 6, 16) if n <= width))}


def of_codegen(pick: Pick, found: Settings) -> Settings:
    heads = pick(4, 8)
    return {
        **of_gpt(pick, found),
        "n_head": heads,
        "n_embd": heads * pick(4, 8),
        "rotary_dim": pick(2, 4),
    }


def of_bigcode(pick: Pick, found: Settings) -> Settings:
    return {**of_gpt(pick, found), "rotary_dim": LEFT_OUT, "multi_query": pick.maybe()}


def of_gpt_neo(pick: Pick, found: Settings) -> Settings:
    heads = pick(1, 2, 4)
    types = pick([[["global", "local"], 2]], [[["local"], 1], [["global"], 2]], [[["global"], 3]])
    return {"num_heads": heads, "hidden_size": heads * pick(4, 8), "window_size": pick(3, 9, 256),
            "num_layers": sum(len(kinds) * count for kinds, count in types), "attention_types": types,
            "intermediate_size": pick(None, 33), "activation_function": pick("gelu_new", "relu"),
            "layer_norm_epsilon": pick(1e-5, 1e-3), "max_position_embeddings": 96}  # fmt: skip


def of_bloom(pick: Pick, found: Settings) -> Settings:
    heads = pick(1, 2, 3, 4, 6, 8, 12, 16)
    return {"n_head": heads, "hidden_size": heads * pick(2, 4, 8), "n_layer": pick(1, 2, 3, 5),
            "layer_norm_epsilon": pick(1e-5, 1e-3), "max_position_embeddings": LEFT_OUT,
            "apply_residual_connection_post_layernorm": pick(LEFT_OUT, False, True)}  # fmt: skip


def of_mpt(pick: Pick, found: Settings) -> Settings:
    heads = pick(1, 2, 3, 4, 6, 8, 12, 16)
    of_attention = {"clip_qkv": pick(None, 0.7, 3.0), "softmax_scale": pick(None, 0.2, 0.6)}
    return {"n_heads": heads, "d_model": heads * pick(2, 4, 8), "n_layers": pick(1, 2, 3, 5),
            "layer_norm_epsilon": pick(1e-5, 1e-3), "max_seq_len": 96, "logit_scale": LEFT_OUT,
            "max_position_embeddings": LEFT_OUT, "attn_config": pick(LEFT_OUT, of_attention)}  # fmt: skip


# A tied table would be scaled for the logits, and with it the hidden states beside what layers add.
def of_olmo(pick: Pick, found: Settings) -> Settings:
    return {"tie_word_embeddings": False, "rms_norm_eps": LEFT_OUT}


def of_nemotron(pick: Pick, found: Settings) -> Settings:
    changed = partly(pick, without_rope({**found, "head_dim": pick(8, 16)}), 0.5, ("default",))
    changed = {**no_rope(), **changed, "head_dim": pick(8, 16), "norm_eps": pick(1e-5, 1e-3)}
    kv = found.get("num_key_value_heads", found["num_attention_heads"])
    return {**changed, "hidden_act": pick("relu2", "relu", "gelu"), "num_key_value_heads": kv}


def of_arcee(pick: Pick, found: Settings) -> Settings:
    return {"hidden_act": pick("relu2", "relu2", "gelu")}


def of_helium(pick: Pick, found: Settings) -> Settings:
    # transformers' output projection is as wide as the hidden states.
    return {"hidden_size": found["num_attention_heads"] * found["head_dim"]}


def of_modernbert_decoder(pick: Pick, found: Settings) -> Settings:
    far = {"rope_type": "linear", "rope_theta": 1.6e5, "factor": 2.0}
    near = {"rope_type": "default", "rope_theta": pick(1e4, 100.0)}
    ropes = pick({}, {"rope_parameters": {FULL: far, NEAR: near}},
                 {"global_rope_theta": 1e3, "local_rope_theta": pick(1e4, 50.0)})  # fmt: skip
    every = LEFT_OUT if "layer_types" in found else pick(LEFT_OUT, 2)
    window = pick(
        {"local_attention": pick(8, 15, 40), "sliding_window": LEFT_OUT},
        {"sliding_window": pick(6, 9)},
    )
    return {**no_rope(), **ropes, **window, "global_attn_every_n_layers": every,
            "hidden_activation": pick("gelu", "silu"), "classifier_activation": pick("gelu", "relu"),
            "norm_eps": pick(1e-5, 1e-3), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
            **{f"{one}_bias": pick.maybe() for one in ("norm", "classifier", "decoder")}}  # fmt: skip


OWN: dict[str, Callable[[Pick, Settings], Settings]] = {
    **EXPERTS,
    "llama": of_llama,
    "mistral": of_mistral,
    "qwen2": of_qwen,
    "qwen3": of_qwen,
    "ministral3": of_ministral3,
    "olmo2": nothing,
    "olmo3": of_olmo3,
    "phi3": of_phi3,
    "smollm3": of_smollm3,
    "granite": nothing,
    "glm": of_glm,
    "glm4": of_glm,
    "cohere": nothing,
    "cohere2": of_cohere2,
    "modernbert-decoder": of_modernbert_decoder,
    "bitnet": nothing,
    "seed_oss": nothing,
    "exaone4": of_exaone4,
    "starcoder2": of_starcoder2,
    "stablelm": of_stablelm,
    "ernie4_5": nothing,
    "hunyuan_v1_dense": of_hunyuan,
    "lfm2": of_lfm2,
    "qwen3_next": of_qwen3_next,
    "qwen3_5_text": delta,
    "qwen3_5_moe_text": delta,
    "olmoe": nothing,
    "granitemoe": nothing,
    "gemma": nothing,
    "gemma2": of_gemma2,
    "gemma3_text": of_gemma3,
    "gemma3n_text": of_gemma3n,
    "gemma4_text": of_gemma4,
    "gpt2": of_gpt2,
    "hunyuan_v1_moe": of_hunyuan,
    "granitemoehybrid": of_granite_hybrid,
    "mamba": of_mamba1,
    "jamba": of_jamba,
    "falcon_mamba": of_falcon_mamba,
    "mamba2": of_mamba2,
    "gpt_neox": of_neox,
    "falcon": of_falcon,
    "opt": of_opt,
    "apertus": of_apertus,
    "phi": of_phi,
    "falcon_h1": of_falcon_h1,
    "nemotron_h": of_nemotron_h,
    "kimi_linear": of_kimi_linear,
    "gpt_neo": of_gpt_neo,
    "gptj": of_gpt,
    "codegen": of_codegen,
    "gpt_bigcode": of_bigcode,
    "bloom": of_bloom,
    "mpt": of_mpt,
    "olmo": of_olmo,
    "nemotron": of_nemotron,
    "arcee": of_arcee,
    "helium": of_helium,
}
