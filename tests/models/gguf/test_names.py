"""The tables of names against gguf's own, the layouts one by one, and what is refused."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxjax.errors import (
    CheckpointFormatError,
    CheckpointMismatchError,
    UnsupportedModelError,
    UserInputError,
)
from maxjax.graph.weights import WeightData
from maxjax.models.gguf import (
    ARCHITECTURES,
    Expert,
    Layout,
    Matrix,
    Permuted,
    Plus,
    Transposed,
    hf_names,
)
from maxjax.models.gguf.config.read import MODELS
from maxjax.models.gguf.metadata import Settings
from maxjax.models.gguf.names import NO_SUFFIX
from maxjax.models.glm4 import GLM4_GGUF
from maxjax.models.qwen3_next import QWEN3_5_GGUF, QWEN3_NEXT_GGUF

gguf = pytest.importorskip("gguf")

LAYERS = 3
# In gguf's lists, and no weights of the Hugging Face model of that name.
LEFT_OUT = {
    "llama": {"rope_freqs", "blk.*.attn_rot_embd"},
    "qwen2": {"rope_freqs"},
    "qwen3": {"rope_freqs"},
    # Of other models of the kind: learned positions, a last norm, and heads, which are left out.
    "nomic-bert": {"output_norm", "position_embd"},
    "jina-bert-v3": {"output_norm"},
    "modern-bert": {"cls", "cls.norm", "cls.output"},
    # Of files whose queries, keys and values are apart; refused.
    "phi3": {
        "rope_factors_long",
        "rope_factors_short",
        "blk.*.attn_q",
        "blk.*.attn_k",
        "blk.*.attn_v",
    },
    # Of experts, which no published Ministral 3 has.
    "mistral3": {
        "rope_freqs",
        "blk.*.attn_rot_embd",
        "blk.*.ffn_gate_inp",
        *(f"blk.*.ffn_{part}_exps" for part in ("gate", "up", "down")),
    },
    "exaone4": {"rope_freqs"},
    "gemma4": {"rope_freqs"},
    "starcoder2": {"rope_freqs", "blk.*.attn_rot_embd"},
    "stablelm": {"rope_freqs"},
    "smollm3": {"rope_freqs", "blk.*.attn_rot_embd"},
    # Of learned positions, of norms of queries and keys, and of scales of quantised activations; refused.
    "mpt": {"position_embd", "blk.*.attn_q_norm", "blk.*.attn_k_norm", "blk.*.ffn"},
    # Of the first ChatGLMs, and of GLM-4.5's draft layer; refused.
    "chatglm": {"rope_freqs", "blk.*.attn_qkv"},
    "glm4": {"rope_freqs", "blk.*.attn_qkv"}
    | {
        f"blk.*.nextn.{part}"
        for part in (
            "eh_proj",
            "embed_tokens",
            "enorm",
            "hnorm",
            "shared_head_head",
            "shared_head_norm",
        )
    },
    # Of keys and values without latent vectors, which no published DeepSeek 2 has.
    "deepseek2": {"rope_freqs", "blk.*.attn_rot_embd", "blk.*.attn_k", "blk.*.attn_v"},
    "qwen3vl": {"rope_freqs"},
    # Of MLPs, which a model with experts does not have.
    "nemotron_h_moe": {"blk.*.ffn_down", "blk.*.ffn_up"},
    # Of files whose queries, keys and values are one tensor; refused.
    "phimoe": {"rope_factors_long", "rope_factors_short", "blk.*.attn_qkv"},
    # Of files whose queries, keys and values are one tensor, and of a norm that llama.cpp does not read.
    "phi2": {"blk.*.attn_qkv", "blk.*.ffn_norm"},
    # Of a gate that there is none of.
    "apertus": {"rope_freqs", "blk.*.attn_rot_embd", "blk.*.ffn_gate"},
    # Of an embedding model.
    "lfm2": {"dense_2"},
    "llama4": {"rope_freqs", "blk.*.attn_rot_embd"},
    "hunyuan-moe": {"rope_freqs"},
    "nemotron": {"rope_freqs", "blk.*.attn_rot_embd"},
    "arcee": {"rope_freqs", "blk.*.attn_rot_embd"},
    # Of Granite MoEs with a shared expert; refused.
    "granitemoe": {f"blk.*.ffn_{part}_shexp" for part in ("gate", "up", "down")},
    # Fused attention is split before names are looked up; the norm is of other models.
    "bert": {"output_norm", "blk.*.attn_qkv"},
}


def metadata(architecture, **more):
    counts = {"block_count": LAYERS, "attention.head_count": 4, "attention.head_count_kv": 2}
    return {f"{architecture}.{key}": value for key, value in {**counts, **more}.items()}


def names(architecture, tensors, **more):
    return hf_names(architecture, tensors, metadata(architecture, **more))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_tensor_of_the_architecture_is_known(architecture):
    arch = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
    listed = {gguf.TENSOR_NAMES[kind].format(bid="*") for kind in gguf.MODEL_TENSORS[arch]}
    missing = listed - set(ARCHITECTURES[architecture]) - LEFT_OUT.get(architecture, set())
    assert not missing
    # Whatever gguf adds: the list of what is left out is no wider than it must be.
    assert LEFT_OUT.get(architecture, set()) <= listed - set(ARCHITECTURES[architecture])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_gguf_maps_our_names_back(architecture, layer):
    arch = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
    table = gguf.get_tensor_name_map(arch, LAYERS)
    listed = {gguf.TENSOR_NAMES[kind].format(bid=layer) for kind in gguf.MODEL_TENSORS[arch]}
    left = {name.replace("*", str(layer)) for name in LEFT_OUT.get(architecture, set())}
    only = {
        key.replace("*", str(layer)): rules[0].only
        for key, rules in ARCHITECTURES[architecture].items()
    }
    left |= {f"blk.{layer}.ffn_gate_up_exps"}  # or gate and up apart
    suffixes = {name: only[name] or "weight" for name in sorted(listed - left)}
    stored = [name if kind == NO_SUFFIX else f"{name}.{kind}" for name, kind in suffixes.items()]
    found = names(architecture, stored, expert_count=2)
    assert {source.tensor for source in found.values()} == set(stored)
    for name, source in found.items():
        own = ("granitemoe", "granitehybrid", "nemotron_h_moe")
        if architecture in own and ".experts." in name:
            continue  # gguf's converter cuts or joins these tensors itself
        if architecture == "bert" and source.tensor.startswith("cls"):
            continue  # gguf has the names of XLM-RoBERTa's head
        # gguf names the experts of a layer together.
        together = name.replace("experts.0.", "experts.").replace("experts.1.", "experts.")
        together = (
            together.replace("model.layers", "layers")
            if re.search(r"sparse_moe.exp|feed_forward.experts.\d+.w", name)
            else together
        )
        together = together.replace("block_sparse_moe.experts", "feed_forward.experts")
        together = together.replace(".moe.experts", ".experts")  # Gemma 4's
        if architecture == "granitemoe" and ".experts." in name:
            continue  # a checkpoint has them together
        # The converter's names.
        if architecture == "bloom":
            together = together.removeprefix("transformer.")
        together = re.sub("(e_score_correction)_bias$", r"\1.bias", together)
        together = re.sub("dt_bias$", "dt_proj.bias", together)
        given = table.get_name(together, try_suffixes=(".weight", ".bias"))
        stem = source.tensor.removesuffix(".weight").removesuffix(".bias")
        assert given is not None, name
        assert given.removesuffix(".weight").removesuffix(".bias") == stem, name


def test_the_tables_of_names_and_of_settings_are_of_the_same_architectures():
    assert list(ARCHITECTURES) == list(MODELS)


def test_llamas_queries_and_keys_have_their_own_heads():
    found = names("llama", ["blk.0.attn_q.weight", "blk.0.attn_k.bias", "blk.0.attn_v.weight"])
    start = "model.layers.0.self_attn."
    assert found[start + "q_proj.weight"].layout == Permuted(4)
    assert found[start + "k_proj.bias"].layout == Permuted(2)
    assert found[start + "v_proj.weight"].layout.apply(np.arange(3)).tolist() == [0, 1, 2]


def test_without_a_count_keys_have_the_heads_of_queries():
    found = hf_names(
        "llama", ["blk.0.attn_k.weight"], {"llama.block_count": 1, "llama.attention.head_count": 8}
    )
    assert found["model.layers.0.self_attn.k_proj.weight"].layout == Permuted(8)


def test_counts_may_be_lists_of_equal_ones():
    found = names("llama", ["blk.0.attn_q.weight"], **{"attention.head_count": np.array([8, 8, 8])})
    assert next(iter(found.values())).layout == Permuted(8)


def test_old_mixtrals_have_their_experts_one_by_one():
    found = names(
        "llama", [f"blk.1.ffn_{x}.3.weight" for x in ("gate", "up", "down")], expert_count=4
    )
    start = "model.layers.1.block_sparse_moe.experts.3."
    assert {name: source.tensor for name, source in found.items()} == {
        start + "w1.weight": "blk.1.ffn_gate.3.weight",
        start + "w3.weight": "blk.1.ffn_up.3.weight",
        start + "w2.weight": "blk.1.ffn_down.3.weight",
    }


def test_what_rope_has_is_left_out():
    assert names("llama", ["rope_freqs.weight", "blk.2.attn_rot_embd.weight"]) == {}
    with pytest.raises(CheckpointMismatchError, match="rope_freqs"):
        names("bert", ["rope_freqs.weight"])


def test_biases_of_gpt2_are_not_turned_over():
    found = names("gpt2", ["blk.0.attn_qkv.weight", "blk.0.attn_qkv.bias"])
    weight, bias = (source.layout for source in found.values())
    assert weight == Transposed() and bias.by_rows


# --- what is refused ---------------------------------------------------------------------------


def test_an_unknown_architecture_lists_the_known():
    with pytest.raises(UnsupportedModelError, match=r"m\.gguf: .*'mamba\?'.*llama.*bert") as info:
        hf_names("mamba?", [], {}, path="m.gguf")
    assert isinstance(info.value, NotImplementedError)


@pytest.mark.parametrize(
    "tensor",
    [
        "blk.0.attn_q", "blk.0.attn_q.scale", "blk.3.attn_q.weight", "blk.00.attn_q.weight",
        "blk.-1.attn_q.weight", "blk.x.attn_q.weight", "attn_q.weight", "blk.0.token_embd.weight",
        "blk.0.nothing.weight", "output", "", "weight", ".weight", "blk.0..weight", "blk.*.attn_q.weight",
        "a\nb.weight", "blk.0.ffn_gate.9.weight", "blk.0.ffn_gate.#.weight", "blk.٣.attn_q.weight",
        "blk.0.attn_q_norm.weight", "blk.99999999999999999999.attn_q.weight", "cls.output.weight",
        "blk.0.attn_q.0.weight", "token_embd.0.weight",
    ],
)  # fmt: skip
def test_an_unknown_tensor_is_named(tensor):
    with pytest.raises(CheckpointMismatchError, match="a llama model does not have") as info:
        names("llama", ["output.weight", tensor], expert_count=4)
    assert "output.weight" not in str(info.value).replace(tensor or "-", "") and "\n" not in str(
        info.value
    )


def test_many_unknown_tensors_are_counted():
    with pytest.raises(CheckpointMismatchError, match=r"f0\.weight.*and 90 more"):
        names("llama", [f"f{i}.weight" for i in range(100)])


def test_a_tensor_that_is_there_twice():
    both = ["blk.0.ffn_gate.1.weight", "blk.0.ffn_gate_exps.weight"]
    with pytest.raises(CheckpointFormatError, match="ffn_gate.1.weight' and 'blk.0.ffn_gate_exps"):
        names("llama", both, expert_count=2)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"block_count": None}, "'llama.block_count' is missing"),
        ({"block_count": "3"}, "'llama.block_count' has the wrong type"),
        ({"block_count": True}, "wrong type"),
        ({"block_count": 0}, "out of range"),
        ({"block_count": 2**31}, "out of range"),
        ({"attention.head_count": -4}, "out of range"),
        ({"attention.head_count": 4.0}, "wrong type"),
        ({"attention.head_count": []}, "wrong type"),
        ({"expert_count": 2**32}, r"out of range \(expected 1 to 1024"),
        ({}, "'llama.expert_count' is missing"),
    ],
)
def test_counts_that_cannot_be(more, says):
    with pytest.raises(CheckpointFormatError, match=says):
        names("llama", ["blk.0.attn_q.weight", "blk.0.ffn_gate_exps.weight"], **more)


def test_layers_with_different_heads():
    with pytest.raises(UnsupportedModelError, match="head_count"):
        names("llama", ["blk.0.attn_q.weight"], **{"attention.head_count": [4, 4, 2]})


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        ("blk.0.attn_q.weight", (12, 8)),
        ("blk.0.attn_k.bias", (5,)),
        ("blk.0.attn_q.weight", ()),
        ("blk.0.ffn_gate_exps.weight", (3, 8, 8)),
        ("blk.0.ffn_gate_exps.weight", (4,)),
        ("blk.0.ffn_gate_up_exps.weight", (4, 7, 8)),
    ],
)
def test_shapes_that_do_not_go_with_their_layout(tensor, shape):
    with pytest.raises(CheckpointFormatError) as info:
        names("llama", {tensor: shape}, expert_count=4)
    assert info.value.tensor == tensor and info.value.found is not None


# --- layouts -----------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 3))
def test_permuted_undoes_what_the_converter_does(heads, pairs, width):
    count = heads * pairs * 2
    values = np.arange(count * width, dtype=np.float32).reshape(count, width)
    stored = values.reshape(heads, 2, pairs, width).swapaxes(1, 2).reshape(count, width)
    layout = Permuted(heads)
    np.testing.assert_array_equal(layout.apply(stored), values)
    np.testing.assert_array_equal(stored[layout.rows(count)], values)
    assert sorted(layout.rows(count)) == list(range(count))


def test_rows_of_packed_blocks_are_moved_whole():
    packed = np.random.default_rng(0).integers(0, 256, (8, 34), np.uint8)  # rows of Q8_0
    values = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
    moved = Permuted(2).apply(packed)
    assert moved.dtype == np.uint8
    np.testing.assert_array_equal(
        gguf.dequantize(moved, gguf.GGMLQuantizationType.Q8_0), Permuted(2).apply(values)
    )
    stack = packed.reshape(4, 2, 34)
    np.testing.assert_array_equal(Expert(3, 4).apply(stack), packed[Expert(3, 4).rows(2)])


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_experts_are_parts_of_the_stack(count, parts, rows, width):
    each = np.arange(count * parts * rows * width).reshape(count, parts, rows, width)
    stored = each.reshape(count, parts * rows, width)
    for index in range(count):
        for part in range(parts):
            layout = Expert(index, count, part, parts)
            assert layout.shape(stored.shape) == (rows, width)
            np.testing.assert_array_equal(layout.apply(stored), each[index, part])
            flat = stored.reshape(-1, width)
            np.testing.assert_array_equal(flat[layout.rows(rows)], each[index, part])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, "bfloat16"])
def test_plus_keeps_the_type_and_rounds_once(dtype):
    import ml_dtypes

    dtype = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    stored = np.array([0.75, 1.0, 1.0078125, 2.5], dtype)
    found = Plus(-1.0).apply(stored)
    assert found.dtype == dtype
    assert found.astype(np.float64).tolist() == [-0.25, 0.0, 0.0078125, 1.5]
    assert not Plus(-1.0).keeps_values and Plus(-1.0).rows(3).tolist() == [0, 1, 2]


def test_values_are_needed_where_values_change():
    for layout in (Plus(-1.0), Transposed()):
        with pytest.raises(UserInputError, match="dequantise"):
            layout.apply(np.zeros((2, 34), np.uint8))
    with pytest.raises(UserInputError, match="does not map rows"):
        Transposed().rows(3)


def test_no_change_is_none():
    values = np.arange(6).reshape(2, 3)
    assert Layout().apply(values) is values and Layout().rows(2).tolist() == [0, 1]
    with pytest.raises(CheckpointFormatError):
        Transposed().shape((3,))
    with pytest.raises(CheckpointFormatError):
        Matrix().apply(values)


@pytest.mark.parametrize("sections", [[1, 1, 0, 0], [0, 0, 0, 0], None])
def test_multimodal_glm4_has_pairs_in_halves(sections):
    """The inverse of ``Glm4Model.normal_to_neox`` of llama.cpp's converter."""
    heads, kv, width, turned = 4, 2, 8, 4
    keys = {"attention.head_count": heads, "attention.head_count_kv": kv, "embedding_length": heads * width,
            "rope.dimension_count": turned, "rope.dimension_sections": sections}  # fmt: skip
    metadata = Settings({f"glm4.{k}": v for k, v in keys.items() if v is not None}, "glm4.")

    def neox(values, count):
        each = values.reshape(count, width, *values.shape[1:])
        front = each[:, :turned]
        halves = np.concatenate([front[:, 0::2], front[:, 1::2]], 1)
        return np.concatenate([halves, each[:, turned:]], 1).reshape(values.shape)

    rng = np.random.default_rng(0)
    shapes = {"q_proj.weight": (heads * width, 3), "k_proj.weight": (kv * width, 3), "k_proj.bias": (kv * width,),
              "v_proj.weight": (kv * width, 3)}  # fmt: skip
    values = {
        f"model.layers.0.self_attn.{n}": rng.standard_normal(s).astype(np.float32)
        for n, s in shapes.items()
    }
    stored = {
        n: neox(v, heads if "q_proj" in n else kv)
        if sections and any(sections) and "v_proj" not in n
        else v
        for n, v in values.items()
    }
    found = GLM4_GGUF.join(metadata, {n: WeightData.from_numpy(v, n) for n, v in stored.items()})
    for name, value in values.items():
        np.testing.assert_array_equal(np.asarray(found[name].data), value)
    for wrong in ({"rope.dimension_sections": 5}, {"rope.dimension_count": 2 * width}):
        given = {**metadata.metadata, **{f"glm4.{key}": value for key, value in wrong.items()}}
        if "rope.dimension_sections" in wrong or any(sections or ()):
            with pytest.raises(CheckpointFormatError, match="glm4.rope.dimension_"):
                GLM4_GGUF.join(Settings(given, "glm4."), {})


HUGE = 10**9


@pytest.mark.parametrize(
    ("table", "keys"),
    [
        (GLM4_GGUF, {"attention.head_count": HUGE, "rope.dimension_sections": [1]}),
        (GLM4_GGUF, {"attention.key_length": HUGE, "rope.dimension_sections": [1]}),
        (QWEN3_NEXT_GGUF, {"ssm.state_size": HUGE}),
        (QWEN3_5_GGUF, {"ssm.time_step_rank": HUGE, "ssm.inner_size": HUGE}),
    ],
)
def test_sizes_are_compared_with_the_tensors_before_rows_are_reordered(table, keys):
    usual = {"attention.head_count": 2, "embedding_length": 8, "block_count": 1, "ssm.group_count": 1,
             "ssm.time_step_rank": 1, "ssm.inner_size": 4, "ssm.state_size": 2}  # fmt: skip
    names = ("self_attn.q_proj.weight", "linear_attn.in_proj_qkv.weight")
    tensors = {n: WeightData.from_numpy(np.zeros((8, 8), np.float32), n) for n in names}
    table.join(Settings(usual, ""), tensors)
    with pytest.raises(CheckpointMismatchError, match=r"does not fit .* \d+ rows"):
        table.join(Settings({**usual, **keys}, ""), tensors)
