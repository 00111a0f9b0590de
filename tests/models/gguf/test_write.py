"""Hugging Face's checkpoints as GGUF files: equal to the converter's, and back again.

Oracles: ``gguf_files``, which does what llama.cpp's converter does with whole arrays; transformers'
configurations; llama.cpp itself in test_gguf_write_llama_cpp.
"""

import json
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from maxjax.dtype import DType
from maxjax.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointMismatchError,
    UnsupportedModelError,
)
from maxjax.graph.quantization import QuantizationEncoding
from maxjax.graph.weights import WeightData, load_weights
from maxjax.models import Ernie45MoE, Ernie45MoEConfig
from maxjax.models.gguf import (
    ARCHITECTURES,
    Permuted,
    Plus,
    config_of,
    gguf_metadata,
    gguf_tensors,
    hf_tensors,
    pooling,
)
from maxjax.models.gguf.sources import read_box
from maxjax.models.gguf.table import GGUF_TABLES
from maxjax.models.gguf.tensors.read import EXACT_KEY
from maxjax.models.registry import all_families, gguf_model_types, gguf_of, of_model_type
from maxjax.storage.gguf.writer import plan_gguf
from maxjax.storage.parts import Part
from maxjax.storage.save.outgoing import outgoing
from tests.models.gguf import files
from tests.oracles.models import settings_of
from tests.oracles.recorded import recorded, transformers

gguf = pytest.importorskip("gguf")

BF16 = np.dtype(ml_dtypes.bfloat16)


def weights(arrays):
    return {name: WeightData.from_numpy(array, name) for name, array in arrays.items()}


def written(path, config, tensors, more=None, **options):
    """A GGUF file of a checkpoint."""
    made = gguf_tensors(config, tensors)
    metadata = gguf_metadata(config, made.tensors, **options) | made.metadata | (more or {})
    outgoings = [
        outgoing(n, np.ascontiguousarray(d.typed()), (e := d.quantization_encoding) and e.value)
        for n, d in made.tensors.items()
    ]
    path.write_bytes(b"".join(plan_gguf(metadata, outgoings).pieces()))
    return path


@pytest.fixture(scope="module", params=list(files.CASES))
def case(request, tmp_path_factory):
    """(case, model, config.json, tensors, path of the file that we wrote)."""
    directory = tmp_path_factory.mktemp("gguf")
    model = files.model(request.param)
    arrays = files.checkpoint(model, directory)
    config = json.loads((directory / "config.json").read_text())
    options = {"pooling": "mean"} if request.param == "bert" else {}
    path = written(directory / "model.gguf", config, weights(arrays), **options)
    return request.param, model, config, arrays, path


def kept(arrays):
    return {name: array for name, array in arrays.items() if not name.startswith("pooler.")}


def test_tensors_are_those_of_the_converter(case):
    name, model, _, arrays, path = case
    expected = dict(files.converted(name, model, arrays))
    _, found = files.read(path)
    assert sorted(found) == sorted(expected)
    for tensor, values in expected.items():
        rtol = 1e-6 if tensor == "rope_freqs.weight" else 0
        np.testing.assert_allclose(found[tensor], values, rtol=rtol, err_msg=tensor)


def test_metadata_is_that_of_the_converter(case, tmp_path):
    name, model, _, arrays, path = case
    theirs, _ = files.read(files.write(tmp_path / "m.gguf", name, model, arrays))
    ours, _ = files.read(path)
    left = {"general.name", "tokenizer.ggml.tokens", "tokenizer.ggml.model"}
    left |= {key for key in theirs if key.endswith("token_id")}
    for key in theirs.keys() - left:
        if not key.startswith("GGUF."):
            assert ours[key] == theirs[key], key


def test_back_again_tensors_are_equal(case):
    _, _, _, arrays, path = case
    found = hf_tensors(load_weights(path))
    assert sorted(found) == sorted(kept(arrays))
    for tensor, values in kept(arrays).items():
        assert found[tensor].dtype.np == values.dtype
        np.testing.assert_array_equal(found[tensor].data, values, err_msg=tensor)


UNSAID = {"initializer_range", "dtype", "_name_or_path", "transformers_version"}
UNSAID |= {"bos_token_id", "eos_token_id", "pad_token_id", "feed_forward_length"}


def test_back_again_the_configuration_builds_the_same_model(case):
    name, model, _, _, path = case
    again = settings_of(model.config_kind, config_of(load_weights(path))).settings
    original = model.config.settings
    unsaid = UNSAID | ({"tie_word_embeddings"} if name == "bert" else set())
    for key in original.keys() - unsaid:
        a, b = again[key], original[key]
        near = pytest.approx(b, rel=1e-6) if isinstance(b, float) else b
        assert a == near, key


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_narrow_types_come_back_bit_for_bit(case, kind, tmp_path):
    _, _, config, arrays, _ = case
    dtype = DType.of(kind).np
    narrow = {n: a.astype(dtype) for n, a in arrays.items()}
    path = written(tmp_path / "m.gguf", config, weights(narrow))
    stored = load_weights(path)
    for tensor, place in stored.items():
        wide = len(place.data().shape) < 2 or tensor.split(".")[-2] in (
            "ffn_gate_inp", "ffn_gate_inp_shexp", "position_embd", "token_types"
        )  # fmt: skip
        assert place.data().dtype.np == (np.float32 if wide else dtype), tensor
    found = hf_tensors(stored)
    for tensor, values in kept(narrow).items():
        again = np.asarray(found[tensor].data)
        assert again.dtype == dtype, tensor
        np.testing.assert_array_equal(again.view(np.uint16), values.view(np.uint16), tensor)
    assert config_of(stored)["torch_dtype"] == kind


GEMMA = {**files.TINY, **files.GEMMA, "model_type": "gemma", "num_hidden_layers": 1}
NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=["f32", "f16", "bf16"])
def test_norms_of_gemma_that_lose_bits_are_kept_beside(dtype, tmp_path):
    tiny = np.array([1e-30, -1e-9, 0.1, -0.0, 3.0, 2e-7, -1.0, np.inf], np.float32).astype(dtype)
    made = gguf_tensors(GEMMA, weights({NORM: tiny}))
    assert f"maxjax.exact.{NORM}" in made.metadata
    vector = made.tensors["blk.0.attn_norm.weight"]
    metadata = {"general.architecture": "gemma", "gemma.block_count": 1, **made.metadata}
    path = tmp_path / "m.gguf"

    def write(values):
        pieces = plan_gguf(metadata, [outgoing("blk.0.attn_norm.weight", values)]).pieces()
        path.write_bytes(b"".join(pieces))
        return hf_tensors(load_weights(path))[NORM]

    found = write(np.asarray(vector.data))
    assert found.dtype.np == np.dtype(dtype) and np.asarray(found.data).tobytes() == tiny.tobytes()
    part, _ = read_box(found_again := write(np.asarray(vector.data)), ((2, 5),))
    assert part.tobytes() == tiny[2:5].tobytes() and not found_again.is_loaded
    # Whoever changes the file's own values is believed.
    other = np.asarray(vector.data) * np.float32(2)
    expected = (other - np.float32(1)).astype(dtype)
    np.testing.assert_array_equal(write(other).data, expected)


def test_norms_of_gemma_that_lose_nothing_are_not(tmp_path):
    plain = np.array([0.0, 0.5, -0.25, 3.0], BF16)
    assert EXACT_KEY not in str(gguf_tensors(GEMMA, weights({NORM: plain})).metadata)


@pytest.mark.parametrize("value", [3, "x", [], np.ones(3, np.float32), np.ones(8, np.uint16)])
def test_values_beside_that_do_not_fit(value, tmp_path):
    metadata = {"general.architecture": "gemma", "gemma.block_count": 1, EXACT_KEY + NORM: value}
    one = outgoing("blk.0.attn_norm.weight", np.ones(8, np.float32))
    (tmp_path / "m.gguf").write_bytes(b"".join(plan_gguf(metadata, [one]).pieces()))
    with pytest.raises(CheckpointFormatError, match=r"m\.gguf: metadata key 'maxjax\.exact\."):
        hf_tensors(load_weights(tmp_path / "m.gguf"))


@pytest.mark.parametrize("value", [3, ["x"], ["x=F8"], "a=BF16", [1]])
def test_types_that_nobody_knows(value, tmp_path):
    metadata = {"general.architecture": "gemma", "gemma.block_count": 1, "maxjax.dtypes": value}
    one = outgoing("blk.0.attn_norm.weight", np.ones(8, np.float32))
    (tmp_path / "m.gguf").write_bytes(b"".join(plan_gguf(metadata, [one]).pieces()))
    with pytest.raises(CheckpointFormatError, match=r"m\.gguf: metadata key 'maxjax\.dtypes'"):
        hf_tensors(load_weights(tmp_path / "m.gguf"))


def test_norms_of_gemma_in_bfloat16_are_exact_from_the_bound_on():
    """Every bfloat16 value of 2^-16 to 2^7, and 0: the bound that the docstring gives."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    bits = bits[bits & 0x7F80 != 0x7F80].view(BF16)  # no NaN, no infinity
    size = np.abs(bits.astype(np.float64))
    values = bits[((size >= 2.0**-16) & (size <= 128)) | (bits.view(np.uint16) == 0)]
    stored = Plus(-1.0).back().apply(values.astype(np.float32))
    again = Plus(-1.0).apply(stored).astype(BF16)
    np.testing.assert_array_equal(again.view(np.uint16), values.view(np.uint16))
    assert len(values) > 5000


def test_packed_blocks_stay_as_they_are(tmp_path):
    """A GGUF file of ours → Hugging Face's names → a GGUF file: the same bytes."""
    config = {**files.TINY, "model_type": "llama", "hidden_size": 256, "intermediate_size": 256}
    rng = np.random.default_rng(0)
    arrays = {}
    for name, rows in (
        ("model.embed_tokens", 64), ("lm_head", 64), ("model.layers.0.self_attn.q_proj", 256),
        ("model.layers.0.self_attn.k_proj", 128), ("model.layers.0.mlp.up_proj", 256),
    ):  # fmt: skip
        values = rng.standard_normal((rows, 256)).astype(np.float32)
        arrays[f"{name}.weight"] = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    config["num_hidden_layers"] = 1
    tensors = {
        n: WeightData(a, n, DType.uint8, a.shape, QuantizationEncoding("Q8_0"))
        for n, a in arrays.items()
    }
    first = written(tmp_path / "a.gguf", config, tensors)
    found = hf_tensors(load_weights(first))
    for name, packed in arrays.items():
        assert found[name].quantization_encoding == QuantizationEncoding("Q8_0")
        np.testing.assert_array_equal(found[name].data, packed)
    second = written(tmp_path / "b.gguf", config_of(load_weights(first)), found)
    _, a = files.read(first)
    _, b = files.read(second)
    assert a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
    assert load_weights(first).metadata["general.file_type"] == 7


def test_parts_of_tensors_are_those_of_the_whole(case):
    """Any box, from files read in parts: permuted, transposed, stacked, shifted, widened."""
    _, _, config, arrays, path = case
    lazy = hf_tensors(load_weights(path))  # not in memory
    made = gguf_tensors(config, lazy).tensors
    rng = np.random.default_rng(1)
    for name, data in made.items():
        whole = np.asarray(gguf_tensors(config, weights(arrays)).tensors[name].typed())
        box = tuple(tuple(sorted(rng.integers(0, size + 1, 2))) for size in map(int, data.shape))
        expected = whole[tuple(slice(*span) for span in box)]
        array, _ = read_box(data, box)
        np.testing.assert_allclose(array, expected, rtol=0, atol=1e-7, err_msg=name)
        if data.source is not None:
            memory = np.empty(expected.nbytes, np.uint8)
            data.source.read_parts([Part(name, box, memory)])
            again = memory.view(expected.dtype).reshape(expected.shape)
            np.testing.assert_array_equal(again, array)


def test_experts_are_read_one_by_one():
    """A row of one expert reads no other."""
    config = {
        "model_type": "mixtral", "vocab_size": 8, "hidden_size": 4, "intermediate_size": 6,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "num_local_experts": 3, "num_experts_per_tok": 1,
    }  # fmt: skip
    asked = []

    class Watched:
        def dtype_and_shape(self, name):
            return np.dtype(np.float32), (6, 4)

        def read_parts(self, parts):
            asked.extend((part.name, part.region) for part in parts)
            for part in parts:
                part.memory[:] = 0
            return sum(part.memory.nbytes for part in parts)

    names = [f"model.layers.0.block_sparse_moe.experts.{i}.w1.weight" for i in range(3)]
    tensors = {n: WeightData.lazy(Watched(), n, DType.float32, (6, 4)) for n in names}
    data = gguf_tensors(config, tensors).tensors["blk.0.ffn_gate_exps.weight"]
    assert tuple(map(int, data.shape)) == (3, 6, 4) and asked == []
    read_box(data, ((1, 2), (2, 3), (0, 4)))
    assert asked == [(names[1], ((2, 3), (0, 4)))]


def test_tables_and_defaults_are_of_the_same_architectures():
    written = {*map(gguf_of, gguf_model_types())}
    variants = {one.architecture for name in written for one in GGUF_TABLES[name].variants}
    assert written | variants == set(ARCHITECTURES)


# Kimi K2 has no class of its own there.
@pytest.mark.parametrize("kind", [kind for kind in gguf_model_types() if kind != "kimi_k2"])
def test_defaults_are_those_of_transformers(kind):
    ours = next(of_model_type(kind)).config.defaults()

    def defaults():
        made = transformers.CONFIG_MAPPING[kind]()
        if kind == "gemma4_text":  # of whose layers some have other heads
            made.allow_global_per_layer_attribute_access = True
        names = [*ours, "hidden_activation"]
        found = {name: getattr(made, name) for name in names if hasattr(made, name)}
        return json.dumps(found, default=str, sort_keys=True)

    oracle = SimpleNamespace(**json.loads(recorded(defaults)))
    for key, value in ours.items():
        if key in ("rope_theta", "rope_local_base_freq", "sliding_window"):
            continue  # transformers 5 holds these otherwise
        if kind == "deepseek_v2" and getattr(oracle, key, value) is None:
            continue  # which stands for one group, and for no number of experts
        if key == "num_ln_in_parallel_attn" and getattr(oracle, key) is None:
            continue  # which stands for two
        if key == "moe_layer_end_index" and value == -1:
            continue  # the last layer, whose number transformers has
        if key == "position_embedding_type" and value == "nope":
            continue  # which is null there
        if key == "hidden_act" and kind.startswith("gemma"):
            key = "hidden_activation"
        there = getattr(oracle, key, value)
        value = list(value) if isinstance(value, tuple) and isinstance(there, list) else value
        assert there == value or (there is None and not value), key


def test_heads_of_keys_are_the_converters():
    config = {**files.TINY, "model_type": "llama", "num_hidden_layers": 1}
    values = np.arange(16 * 32, dtype=np.float32).reshape(16, 32)
    name = "model.layers.0.self_attn.k_proj.weight"
    found = gguf_tensors(config, weights({name: values})).tensors["blk.0.attn_k.weight"]
    np.testing.assert_array_equal(Permuted(2).apply(np.asarray(found.data)), values)


def test_other_spellings_of_names():
    config = {"model_type": "bert", **files.TINY, "num_hidden_layers": 1}
    names = {
        "bert.embeddings.LayerNorm.gamma": "token_embd_norm.weight",
        "bert.encoder.layer.0.output.LayerNorm.beta": "blk.0.layer_output_norm.bias",
    }
    left = ["bert.embeddings.position_ids", "bert.pooler.dense.weight", "cls.predictions.bias"]
    vector = np.ones(32, np.float32)
    made = gguf_tensors(config, weights(dict.fromkeys([*names, *left], vector)))
    assert sorted(made.tensors) == sorted(names.values()) and sorted(made.left_out) == sorted(left)
    config = {"model_type": "gpt2", "vocab_size": 8, "n_embd": 4, "n_layer": 1, "n_head": 2}
    names = {"h.0.ln_1.weight": vector, "h.0.attn.bias": np.ones((1, 1, 2, 2), np.float32)}
    made = gguf_tensors(config, weights(names))
    assert list(made.tensors) == ["blk.0.attn_norm.weight"] and made.left_out == ("h.0.attn.bias",)


def test_a_tied_head_is_left_out():
    config = {**files.TINY, "model_type": "llama", "num_hidden_layers": 1}
    table, norm = np.ones((64, 32), np.float32), np.ones(32, np.float32)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    arrays = dict.fromkeys(names, table) | {"model.layers.0.input_layernorm.weight": norm}
    assert "output.weight" in gguf_tensors(config, weights(arrays)).tensors
    made = gguf_tensors({**config, "tie_word_embeddings": True}, weights(arrays))
    assert "output.weight" not in made.tensors and made.left_out == ("lm_head.weight",)


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_checkpoint_that_is_not_whole(kind, tmp_path):
    arrays = files.checkpoint(files.model(kind), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for gone in [name for name in arrays if ".1." in name][::5]:
        rest = {name: array for name, array in arrays.items() if name != gone}
        with pytest.raises(CheckpointMismatchError, match="layer [01] lacks"):
            gguf_tensors(config, weights(rest))
    with pytest.raises(CheckpointMismatchError, match="layers 2 to 4 are missing"):
        gguf_tensors({**config, "num_hidden_layers": 5}, weights(arrays))
    for strange in ("model.layers.0.self_attn.qkv.weight", "x", "model.layers.2.mlp.up_proj.weight",
                    "model.layers.0.self_attn.q_proj.scale", "model.layers.0.0.0"):  # fmt: skip
        extra = {**arrays, strange: arrays["model.norm.weight"]}
        with pytest.raises(CheckpointMismatchError, match="does not have") as info:
            gguf_tensors(config, weights(extra))
        assert strange in str(info.value)


def test_experts_that_are_not_alike(tmp_path):
    arrays = files.checkpoint(files.model("mixtral"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    name = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
    arrays[name] = arrays[name].astype(np.float16)
    with pytest.raises(CheckpointMismatchError, match=r"ffn_gate_exps.*experts\.2\.w1"):
        gguf_tensors(config, weights(arrays))


REFUSED = [
    ("llama", {"hidden_act": "gelu"}, "'hidden_act' gelu"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ("llama", {"rope_scaling": {"type": "su"}}, "'su'"),
    ("llama", {"partial_rotary_factor": 0.5}, "'partial_rotary_factor' 0.5"),
    ("llama", {"rope_parameters": {**files.YARN, "attention_factor": 3.0}}, "attention_factor"),
    ("llama", {"rope_parameters": {**files.YARN, "mscale": 3.0, "mscale_all_dim": 1.0}}, "mscale"),
    ("llama", {"layer_types": ["sliding_attention"] * 2}, "'layer_types' with 'sliding_attention'"),
    ("qwen2", {"use_sliding_window": True}, "'use_sliding_window' True"),
    ("qwen2moe", {"norm_topk_prob": True}, "'norm_topk_prob' True"),
    ("qwen3moe", {"norm_topk_prob": False}, "'norm_topk_prob' False"),
    ("qwen3moe", {"mlp_only_layers": [0]}, "'mlp_only_layers'"),
    ("gemma2", {"attn_logit_softcapping": None}, "without 'attn_logit_softcapping'"),
    ("gemma2", {"query_pre_attn_scalar": 99}, "'query_pre_attn_scalar' 99"),
    ("gemma2", {"hidden_activation": "relu"}, "relu"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "'scale_attn_by_inverse_layer_idx'"),
    ("gpt2", {"activation_function": "relu"}, "'activation_function' relu"),
    ("bert", {"position_embedding_type": "relative_key"}, "'position_embedding_type'"),
    ("bert", {"is_decoder": True}, "'is_decoder'"),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(config.json, tensors) of a case, made once."""
    made = {}

    def get(case):
        if case not in made:
            directory = tmp_path_factory.mktemp("checkpoint")
            arrays = files.checkpoint(files.model(case), directory)
            config = json.loads((directory / "config.json").read_text())
            made[case] = config, gguf_tensors(config, weights(arrays)).tensors
        return made[case]

    return get


@pytest.mark.parametrize(("case_", "change", "says"), REFUSED)
def test_what_no_gguf_file_says_is_refused(checkpoints, case_, change, says):
    config, tensors = checkpoints(case_)
    gguf_metadata(config, tensors)
    if "rope_scaling" in change:
        config = {key: value for key, value in config.items() if key != "rope_parameters"}
    with pytest.raises(UnsupportedModelError, match=says):
        gguf_metadata({**config, **change}, tensors)


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_layers_that_are_all_alike_need_no_list(checkpoints, kind):
    config, tensors = checkpoints("mistral")
    found = gguf_metadata({**config, "layer_types": [kind] * 2}, tensors)
    assert found == gguf_metadata(config, tensors)


@pytest.mark.parametrize(
    ("case_", "change", "says"),
    [
        ("llama", {"vocab_size": 65}, "'vocab_size' .*expected 65, found 64"),
        ("llama", {"tie_word_embeddings": True}, "'tie_word_embeddings'"),
        ("llama", {"attention_bias": True}, "'attention_bias'"),
    ],
)
def test_a_configuration_of_another_model(checkpoints, case_, change, says):
    config, tensors = checkpoints(case_)
    with pytest.raises(CheckpointMismatchError, match=says):
        gguf_metadata({**config, **change}, tensors)


@pytest.mark.parametrize("value", [None, "4", 0, -1, True, 2**40, 1.5, []])
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_settings_that_are_missing_or_wrong(checkpoints, key, value):
    config, tensors = checkpoints("llama")
    for call in (gguf_metadata, gguf_tensors):
        with pytest.raises(CheckpointFormatError, match=key):
            call({**config, key: value}, tensors, path="config.json")


@pytest.mark.parametrize("kind", ["rwkv", None, 3, []])
def test_architectures_without_a_table(kind):
    with pytest.raises(UnsupportedModelError, match="model_type .*llama, mistral"):
        gguf_tensors({"model_type": kind}, {})


def test_whatever_rope_says_only_our_errors_leave(checkpoints):
    config, tensors = checkpoints("llama")
    values = [None, 3, "x", [], {}, True, -1.0, {"rope_type": 3}]
    for rope in [*values, {"rope_type": "llama3", "factor": "x"}, {"rope_type": "longrope"},
                 {"rope_type": "yarn", "factor": "x"}, {"rope_type": "linear", "factor": []},
                 {"full_attention": 3}, {"rope_type": "longrope", "attention_factor": 1.0}]:  # fmt: skip
        try:
            gguf_metadata({**config, "rope_parameters": rope}, tensors)
        except (CheckpointError, UnsupportedModelError) as error:
            assert "\n" not in str(error)


# --- the rest ----------------------------------------------------------------------------------


def test_pooling_is_written(checkpoints):
    config, tensors = checkpoints("bert")
    for kind in ("mean", "cls", "last"):
        assert pooling(gguf_metadata(config, tensors, pooling=kind)) == kind
    assert pooling(gguf_metadata(config, tensors)) is None
    with pytest.raises(ValueError, match="pooling must be one of 'mean', .*, not 'max'"):
        gguf_metadata(config, tensors, pooling="max")


def test_the_kind_of_file(checkpoints):
    config, tensors = checkpoints("llama")
    types = gguf.LlamaFileType
    for encoding, kind in (
        (None, types.ALL_F32), ("Q8_0", types.MOSTLY_Q8_0), ("Q4_0", types.MOSTLY_Q4_0),
        ("Q4_K", types.MOSTLY_Q4_K_M), ("Q6_K", types.MOSTLY_Q6_K), ("Q5_K", types.MOSTLY_Q5_K_M),
    ):  # fmt: skip
        found = gguf_metadata(config, tensors, encoding=encoding)
        assert found["general.file_type"] == kind
        assert ("general.quantization_version" in found) == (encoding is not None)
    assert list(found)[0] == "general.architecture"
    found = gguf_metadata(config, tensors, dtype=DType.bfloat16)
    assert found["general.file_type"] == types.MOSTLY_BF16


def test_the_least_sum_of_experts_shares_of_ernie_is_the_usual_one():
    config = {
        "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "vocab_size": 64,
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8, "moe_norm_min": 1e-12,
    }  # fmt: skip
    model = Ernie45MoE(Ernie45MoEConfig.from_dict(config))
    shapes = {n: tuple(map(int, one.shape)) for n, one in model.raw_state_dict().items()}
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    tensors = gguf_tensors(config, weights(arrays)).tensors
    gguf_metadata(config, tensors)
    with pytest.raises(UnsupportedModelError, match="'moe_norm_min' 0.01 in a GGUF file"):
        gguf_metadata({**config, "moe_norm_min": 0.01}, tensors)


@pytest.mark.parametrize(
    ("kind", "usual"), [("nomic_bert", "silu"), ("jina_embeddings_v3", "gelu")]
)
def test_the_activation_of_an_encoder_is_llama_cpps(kind, usual):
    family = next(one for one in all_families() if one.model_type == kind)
    config = {
        "architectures": list(family.architectures[:1]), "model_type": kind, "vocab_size": 64,
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "max_position_embeddings": 32, "type_vocab_size": 2, "layer_norm_eps": 1e-5,
    }  # fmt: skip
    settings = family.config.from_dict(config)
    made = family.make(settings, (), DType.float32, DType.float32)
    shapes = {n: tuple(map(int, one.shape)) for n, one in made.raw_state_dict().items()}
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    tensors = gguf_tensors(config, weights(arrays)).tensors
    assert gguf_metadata({**config, "hidden_act": usual}, tensors) == gguf_metadata(config, tensors)
    with pytest.raises(UnsupportedModelError, match="'hidden_act' relu in a GGUF file"):
        gguf_metadata({**config, "hidden_act": "relu"}, tensors)
