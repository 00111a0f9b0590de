"""Which tensor gets which type: llama.cpp's mixtures, spelled out for models as it documents them.

The tables below are written by hand from `llama_tensor_get_type` of llama.cpp's llama-quant.cpp:
`use_more_bits` of 32 layers is true for layers 0 to 3, 28 to 31, and 6, 9, 12, ..., 27 between.
"""

import pytest

from maxjax.models.gguf.tensors.types import MIXTURES, Traits, encodings

MORE_OF_32 = {0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31}


@pytest.mark.parametrize(
    ("name", "shape", "wanted", "found"),
    [
        ("token_embd.weight", (1000, 256), "Q4_K", "Q4_K"),
        ("output.weight", (1000, 512), "Q5_K", "Q5_K"),
        ("blk.0.ffn_down.weight", (64, 96), "Q4_K", "Q8_0"),
        ("blk.0.ffn_down.weight", (64, 96), "Q4_0", "Q4_0"),
        ("blk.0.ffn_down.weight", (64, 40), "Q4_K", None),
        ("blk.0.ffn_down_exps.weight", (8, 64, 256), "Q4_K", "Q4_K"),
        ("blk.0.attn_q.bias", (256,), "Q8_0", None),
        ("blk.0.attn_norm.weight", (256,), "Q8_0", None),
        ("blk.0.ffn_gate_inp.weight", (8, 256), "Q8_0", None),
        ("blk.0.ffn_gate_inp_shexp.weight", (1, 256), "Q8_0", None),
        ("position_embd.weight", (1024, 256), "Q8_0", None),
        ("token_types.weight", (2, 256), "Q8_0", None),
    ],
)
def test_types_alone(name, shape, wanted, found):
    assert encodings({name: shape}, wanted.lower(), Traits(1))[name] == found


def llama(layers=32, experts=0, hidden=256, intermediate=512, tied=False) -> dict:
    """The shapes of a model in the order of a file."""
    shapes = {"token_embd.weight": (1000, hidden)}
    for i in range(layers):
        up = (experts, intermediate, hidden) if experts else (intermediate, hidden)
        down = (experts, hidden, intermediate) if experts else (hidden, intermediate)
        end = "_exps" if experts else ""
        shapes |= {
            f"blk.{i}.attn_norm.weight": (hidden,),
            f"blk.{i}.attn_q.weight": (hidden, hidden),
            f"blk.{i}.attn_k.weight": (64, hidden),
            f"blk.{i}.attn_v.weight": (64, hidden),
            f"blk.{i}.attn_output.weight": (hidden, hidden),
            f"blk.{i}.ffn_gate{end}.weight": up,
            f"blk.{i}.ffn_up{end}.weight": up,
            f"blk.{i}.ffn_down{end}.weight": down,
        }
        if experts:
            shapes[f"blk.{i}.ffn_gate_inp.weight"] = (experts, hidden)
    shapes["output_norm.weight"] = (hidden,)
    return shapes if tied else {**shapes, "output.weight": (1000, hidden)}


# name: embedding, head, q, k, v, output of attention, gate and up, down; a pair is (one, other) with the
# layers of the first.
FIRST_2, FIRST_4 = {0, 1}, {0, 1, 2, 3}
DENSE = {
    "q2_k": ("Q2_K", "Q6_K", "Q2_K", "Q2_K", "Q3_K", "Q3_K", "Q2_K", "Q3_K"),
    "q2_k_s": ("Q2_K", "Q6_K", "Q2_K", "Q2_K", "Q2_K", "Q2_K", "Q2_K", ("Q4_K", "Q2_K", FIRST_4)),
    "q3_k_s": ("Q3_K", "Q6_K", *["Q3_K"] * 6),
    "q3_k_m": ("Q3_K", "Q6_K", "Q3_K", "Q3_K", ("Q5_K", "Q4_K", FIRST_2), "Q4_K", "Q3_K",
               ("Q5_K", "Q4_K", FIRST_2)),
    "q3_k_l": ("Q3_K", "Q6_K", "Q3_K", "Q3_K", "Q5_K", "Q5_K", "Q3_K", "Q5_K"),
    "q4_k_s": ("Q4_K", "Q6_K", "Q4_K", "Q4_K", ("Q5_K", "Q4_K", FIRST_4), "Q4_K", "Q4_K",
               ("Q5_K", "Q4_K", FIRST_4)),
    "q4_k_m": ("Q4_K", "Q6_K", "Q4_K", "Q4_K", ("Q6_K", "Q4_K", MORE_OF_32), "Q4_K", "Q4_K",
               ("Q6_K", "Q4_K", MORE_OF_32)),
    "q5_k_s": ("Q5_K", "Q6_K", *["Q5_K"] * 6),
    "q5_k_m": ("Q5_K", "Q6_K", "Q5_K", "Q5_K", ("Q6_K", "Q5_K", MORE_OF_32), "Q5_K", "Q5_K",
               ("Q6_K", "Q5_K", MORE_OF_32)),
    "q6_k": ("Q6_K",) * 8,
    "q8_0": ("Q8_0",) * 8,
    "q4_0": ("Q4_0",) * 8,
}  # fmt: skip
# With 8 experts keys and values have Q8_0, and the output of the attention Q5_K in some mixtures.
EXPERTS = {
    "q2_k": ("Q2_K", "Q6_K", "Q2_K", "Q8_0", "Q8_0", "Q5_K", "Q2_K", "Q3_K"),
    "q3_k_s": ("Q3_K", "Q6_K", "Q3_K", "Q8_0", "Q8_0", "Q5_K", "Q3_K", "Q3_K"),
    "q3_k_m": ("Q3_K", "Q6_K", "Q3_K", "Q8_0", "Q8_0", "Q5_K", "Q3_K", ("Q5_K", "Q4_K", FIRST_2)),
    "q3_k_l": ("Q3_K", "Q6_K", "Q3_K", "Q8_0", "Q8_0", "Q3_K", "Q3_K", "Q5_K"),
    "q4_k_s": ("Q4_K", "Q6_K", "Q4_K", "Q8_0", "Q8_0", "Q5_K", "Q4_K", ("Q5_K", "Q4_K", FIRST_4)),
    "q4_k_m": ("Q4_K", "Q6_K", "Q4_K", "Q8_0", "Q8_0", "Q5_K", "Q4_K",
               ("Q6_K", "Q4_K", MORE_OF_32)),
    "q5_k_m": ("Q5_K", "Q6_K", "Q5_K", "Q8_0", "Q8_0", "Q5_K", "Q5_K",
               ("Q6_K", "Q5_K", MORE_OF_32)),
    "q6_k": ("Q6_K", "Q6_K", "Q6_K", "Q8_0", "Q8_0", "Q6_K", "Q6_K", "Q6_K"),
    "mxfp4_moe": ("Q8_0", "Q8_0", "Q8_0", "Q8_0", "Q8_0", "Q8_0", "MXFP4", "MXFP4"),
}  # fmt: skip


def expected(row, layers: int) -> dict:
    embedding, head, *rest = row
    found = {"token_embd.weight": embedding, "output.weight": head}
    kinds = zip(
        ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"), rest, strict=True
    )
    for kind, one in kinds:
        for i in range(layers):
            name = one if isinstance(one, str) else one[0] if i in one[2] else one[1]
            found[f"blk.{i}.{kind}.weight"] = name
            if kind == "ffn_up":
                found[f"blk.{i}.ffn_gate.weight"] = name
    return found


@pytest.mark.parametrize("mixture", DENSE)
def test_a_model_of_32_layers(mixture):
    shapes = llama()
    found = encodings(shapes, mixture, Traits(32))
    assert found.keys() == shapes.keys()
    assert {k: v for k, v in found.items() if v} == expected(DENSE[mixture], 32)


@pytest.mark.parametrize("mixture", EXPERTS)
def test_a_model_of_8_experts(mixture):
    found = encodings(llama(experts=8), mixture, Traits(32, experts=8, heads_per_kv=4))
    short = {k.replace("_exps", ""): v for k, v in found.items() if v}
    assert short == expected(EXPERTS[mixture], 32)


def test_a_model_of_many_experts_has_the_rules_of_a_dense_one():
    many = encodings(llama(experts=64), "q4_k_m", Traits(32, experts=64))
    assert {k.replace("_exps", ""): v for k, v in many.items() if v} == expected(
        DENSE["q4_k_m"], 32
    )


def test_a_tied_head_gives_the_embedding_table_its_type():
    found = encodings(llama(tied=True), "q4_k_m", Traits(32))
    assert found["token_embd.weight"] == "Q6_K"
    assert encodings(llama(tied=True), "q4_k", Traits(32))["token_embd.weight"] == "Q4_K"
    assert encodings(llama(tied=True), "q8_0", Traits(32))["token_embd.weight"] == "Q8_0"


def test_values_shared_by_many_heads():
    found = encodings(llama(), "q2_k", Traits(32, heads_per_kv=4))
    assert {v for k, v in found.items() if "attn_v" in k} == {"Q4_K"}
    found = encodings(llama(80), "q4_k_m", Traits(80, heads_per_kv=8, is_70b=True))
    assert {v for k, v in found.items() if "attn_v" in k} == {"Q6_K", "Q5_K"}
    assert {v for k, v in found.items() if "attn_q." in k} == {"Q4_K"}


@pytest.mark.parametrize(
    "mixture, up, down",
    [("q2_k", "Q4_0", "Q4_0"), ("q3_k_s", "Q4_0", "Q4_0"), ("q4_k_s", "Q5_0", "Q5_1"),
     ("q4_k_m", "Q5_0", "Q8_0"), ("q5_k_s", "Q5_1", "Q5_1"), ("q6_k", "Q8_0", "Q8_0")],
)  # fmt: skip
def test_rows_that_are_no_whole_blocks(mixture, up, down):
    """Of 96 values, which take blocks of 32; rows of 40 take none."""
    found = encodings(llama(hidden=96, intermediate=96), mixture, Traits(32))
    assert found["blk.0.ffn_up.weight"] == up and found["blk.0.ffn_down.weight"] == down
    assert found["output.weight"] == "Q8_0"
    found = encodings(llama(hidden=40, intermediate=40), mixture, Traits(32))
    assert set(found.values()) == {None}


def test_queries_keys_and_values_in_one_matrix():
    found = encodings({"blk.0.attn_qkv.weight": (768, 256)}, "q4_k_m", Traits(1))
    assert found == {"blk.0.attn_qkv.weight": "Q6_K"}


def test_traits_of_metadata():
    metadata = {
        "general.architecture": "llama", "llama.block_count": 80, "llama.attention.head_count": 64,
        "llama.attention.head_count_kv": 8, "llama.expert_count": 0,
    }  # fmt: skip
    assert Traits.of_metadata(metadata) == Traits(80, 0, 8, True)
    metadata["llama.attention.head_count_kv"] = 64
    assert Traits.of_metadata(metadata) == Traits(80, 0, 1, False)
    one = {"general.architecture": "gpt2", "gpt2.block_count": 12, "gpt2.attention.head_count": 12}
    assert Traits.of_metadata(one) == Traits(12)


def test_file_types_are_those_of_llama_cpp():
    import gguf

    known = {member.name.removeprefix("MOSTLY_").lower(): member for member in gguf.LlamaFileType}
    for name, mixture in MIXTURES.items():
        if name in known:
            assert mixture.file_type == known[name], name
