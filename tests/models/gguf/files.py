"""Small random models as transformers writes them, and GGUF files of them as llama.cpp's converter makes them.

What the converter does to values is written here as reshapes and sums over whole tensors, not as
the maps of rows that `maxjax.models.gguf` has; names come from gguf's own tables.
"""

import re
from pathlib import Path

import gguf
import numpy as np

from tests.oracles.models import OracleModel

TINY = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 128,
    "rms_norm_eps": 3e-6, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": False, "attn_implementation": "eager",
}  # fmt: skip
GEMMA = {"head_dim": 16, "tie_word_embeddings": True}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
    "beta_fast": 16.0, "beta_slow": 2.0, "rope_theta": 20000.0,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}

# Case → (GGUF's architecture, transformers' class, settings).
CASES = {
    "llama": ("llama", "Llama", {}),
    "llama-tied": ("llama", "Llama", {"tie_word_embeddings": True, "head_dim": 16}),
    "llama-bias": ("llama", "Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("llama", "Llama", {"rope_parameters": LLAMA3, "head_dim": 32}),
    "llama-linear": ("llama", "Llama", {"rope_parameters": LINEAR}),
    "llama-yarn": ("llama", "Llama", {"rope_parameters": YARN}),
    "mistral": ("llama", "Mistral", {"sliding_window": 5}),
    "mixtral": ("llama", "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    "qwen2": ("qwen2", "Qwen2", {"tie_word_embeddings": True}),
    "qwen2moe": (
        "qwen2moe",
        "Qwen2Moe",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "qwen3": ("qwen3", "Qwen3", {"head_dim": 16}),
    "qwen3moe": (
        "qwen3moe",
        "Qwen3Moe",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "head_dim": 16, "norm_topk_prob": True,
        },
    ),
    "gemma": ("gemma", "Gemma", GEMMA),
    "gemma2": (
        "gemma2",
        "Gemma2",
        {
            **GEMMA, "sliding_window": 5, "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0,
        },
    ),
    "gemma3": (
        "gemma3",
        "Gemma3",
        {**GEMMA, "sliding_window": 5, "query_pre_attn_scalar": 16, "num_hidden_layers": 7},
    ),
    "gemma3-linear": (
        "gemma3",
        "Gemma3",
        {
            **GEMMA, "sliding_window": 5, "query_pre_attn_scalar": 16, "num_hidden_layers": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gpt2": ("gpt2", "GPT2", {}),
    "bert": ("bert", "Bert", {}),
}  # fmt: skip


def model(case: str, seed: int = 0):
    """A random model of transformers; norms and biases are random too."""
    _, family, settings = CASES[case]
    name = {"Gemma3": "Gemma3TextConfig"}.get(family, f"{family}Config")
    kind = {"GPT2": "GPT2LMHeadModel", "Bert": "BertModel"}.get(family, f"{family}ForCausalLM")
    settings = {**TINY, **settings}
    if family == "GPT2":
        settings = {
            "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128,
            "n_inner": 48, "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager",
        }  # fmt: skip
    if family == "Bert":
        settings = {
            key: settings[key] for key in TINY if key not in ("rms_norm_eps", "num_key_value_heads")
        }
        settings |= {"type_vocab_size": 3, "layer_norm_eps": 3e-6}
    draw = drawn_of_gemma if family.startswith("Gemma") else drawn
    return OracleModel(kind, name, settings, draw=draw, seed=seed)


def drawn(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Values of a tensor; ones in norms would hide a mistake."""
    return 0.2 * rng.standard_normal(shape) + (len(shape) == 1 and name.endswith("weight"))


def drawn_of_gemma(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The same where 1 is added to the weights of norms."""
    return drawn(rng, name, shape) - (len(shape) == 1)


def checkpoint(made: OracleModel, directory: Path) -> dict[str, np.ndarray]:
    """Its tensors by the names that Hugging Face's files have them under."""
    made.save(directory)
    return dict(made.tensors)


# --- what the converter does -----------------------------------------------------------------


def converted(
    case: str, made, tensors: dict[str, np.ndarray], fused: bool = False, squeezed: bool = False
):
    """(GGUF name, values) of each tensor of the file.

    `fused` experts have gate and up in one tensor, as newer converters can write them; `squeezed`
    matrices of one row are vectors, as older ones did.
    """
    architecture, config = CASES[case][0], made.config
    arch = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors = {k: v for k, v in tensors.items() if not re.search(r"^pooler|position_ids", k)}
    for name, values in _stacked(tensors, fused).items():
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if fused and "gate_up" in name:  # newer converters only
            layer = int(name.split(".")[2])
            new = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.FFN_GATE_UP_EXP].format(bid=layer) + ".weight"
        assert new is not None, name
        values = _changed(architecture, config, name, values)
        yield new, values.reshape(-1) if squeezed and values.shape[0] == 1 else values
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", llama3_freqs(config)


def _stacked(tensors: dict[str, np.ndarray], fused: bool) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)(\..*)", name)
        if match is None:
            found[name] = values
        else:
            start = match[1].replace("block_sparse_moe.experts", "feed_forward.experts")
            start = start.removeprefix("model.") if "feed_forward" in start else start
            stacks.setdefault(start + match[3], {})[int(match[2])] = values
    for name, each in stacks.items():
        found[name] = np.stack([each[i] for i in range(len(each))])
    if fused:
        for name in [key for key in found if key.endswith("experts.gate_proj.weight")]:
            other = name.replace("gate_proj", "up_proj")
            both = np.concatenate([found.pop(name), found.pop(other)], axis=1)
            found[name.replace("gate_proj.weight", "gate_up_proj.weight")] = both
    return found


def _changed(architecture: str, config, name: str, values: np.ndarray) -> np.ndarray:
    if architecture == "llama" and re.search(r"[qk]_proj\.", name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        shape = (heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return values.reshape(shape).swapaxes(1, 2).reshape(values.shape)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return values + np.float32(1)
    if architecture == "gpt2" and re.search(r"(c_attn|c_proj|c_fc)\.weight", name):
        return values.transpose(1, 0)
    return values


def llama3_freqs(config) -> np.ndarray:
    """As `generate_extra_tensors` of the converter: pair by pair."""
    rope = config.rope_parameters
    dim = config.head_dim
    old, factors = 8192, []
    for i in range(0, dim, 2):
        wave = 2 * np.pi * rope["rope_theta"] ** (i / dim)
        if wave < old / rope["high_freq_factor"]:
            factors.append(1)
        elif wave > old / rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            smooth = old / wave - rope["low_freq_factor"]
            smooth /= rope["high_freq_factor"] - rope["low_freq_factor"]
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def parameters(writer: gguf.GGUFWriter, architecture: str, config) -> None:
    """The metadata, as `set_gguf_parameters` of the converter's classes writes it."""
    get = lambda *keys: next(
        (getattr(config, k) for k in keys if getattr(config, k, None) is not None), None
    )
    writer.add_name("test")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(get("max_position_embeddings", "n_positions"))
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(get("intermediate_size", "n_inner"))
    writer.add_head_count(config.num_attention_heads)
    for value, add in (
        (get("num_key_value_heads"), writer.add_head_count_kv),
        (get("rms_norm_eps"), writer.add_layer_norm_rms_eps),
        (get("layer_norm_eps", "layer_norm_epsilon"), writer.add_layer_norm_eps),
        (get("num_local_experts", "num_experts"), writer.add_expert_count),
        (get("num_experts_per_tok"), writer.add_expert_used_count),
        (get("moe_intermediate_size"), writer.add_expert_feed_forward_length),
        (get("shared_expert_intermediate_size"), writer.add_expert_shared_feed_forward_length),
        (get("head_dim"), writer.add_key_length),
        (get("head_dim"), writer.add_value_length),
        (get("attn_logit_softcapping"), writer.add_attn_logit_softcapping),
        (get("final_logit_softcapping"), writer.add_final_logit_softcapping),
        (get("sliding_window") or None, writer.add_sliding_window),
        (get("bos_token_id"), writer.add_bos_token_id),
        (get("eos_token_id"), writer.add_eos_token_id),
        (get("pad_token_id"), writer.add_pad_token_id),
    ):
        if value is not None:
            add(value)
    if architecture == "llama":
        writer.add_vocab_size(config.vocab_size)
        width = get("head_dim") or config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(width)
    if architecture == "bert":
        writer.add_causal_attention(False)
        writer.add_pooling_type(gguf.PoolingType.MEAN)
    # transformers looks for the vocabulary's size here, where there is no vocab_size.
    writer.add_tokenizer_model("none")
    writer.add_token_list([f"<{i}>" for i in range(config.vocab_size)])
    _rope(writer, get("rope_parameters") or {})


def _rope(writer: gguf.GGUFWriter, rope: dict) -> None:
    rope = rope.get("full_attention", rope)
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


# --- files -----------------------------------------------------------------------------------


def joined(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors with one for the queries, keys and values of a layer, as newer converters can write them."""
    found = {}
    for name, values in stored.items():
        if ".attn_q." in name:
            parts = [values, *(stored[name.replace("_q.", f"_{one}.")] for one in "kv")]
            found[name.replace("_q.", "_qkv.")] = np.concatenate(parts)
        elif ".attn_k." not in name and ".attn_v." not in name:
            found[name] = values
    return found


def write(
    path: Path, case: str, made, tensors: dict[str, np.ndarray], qkv: bool = False, **options
) -> Path:
    """A GGUF file of the model; with `qkv`, as `joined`."""
    architecture = CASES[case][0]
    writer = gguf.GGUFWriter(path, architecture)
    parameters(writer, architecture, made.config)
    stored = dict(converted(case, made, tensors, **options))
    for name, values in (joined(stored) if qkv else stored).items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """(metadata, tensors) as gguf's own reader finds them; all tensors are F32."""
    reader = gguf.GGUFReader(path)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    return metadata, {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
