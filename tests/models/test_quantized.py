"""Quantised repositories of Hugging Face, opened and run without a dense copy.

The oracle is the same model with the dequantised weights, which ``tests/models/quantizers.py`` has from
the formats' definitions.
"""

import copy
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import maxjax
from maxjax.checkpoint import convert
from maxjax.errors import (
    CheckpointMismatchError,
    UnsupportedModelError,
    UserInputError,
)
from maxjax.models import build
from maxjax.nn.layer import LayerStack
from maxjax.nn.quantized import QuantizedLinear
from tests.models.decoders import call, chosen, ids_of
from tests.models.quantizers import (
    CASES,
    auto_round,
    gptq,
    mlx,
    repository,
    tensors_of,
    write,
)

# The cases of which each has something that no other has.
SOME = [
    "fp8 blocks", "pack-quantized 4 order", "gptq 4 order", "awq", "bitsandbytes nf4", "mlx 4", "compressed nvfp4",
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Case → (quantised directory, the same as floats, tensors of the first)."""
    known = {}

    def repository_of(name):
        if name not in known:
            known[name] = repository(CASES[name], tmp_path_factory.mktemp("repository"))
        return known[name]

    return repository_of


def loaded(directory, **options):
    return maxjax.load(directory, tokenizer=False, **options)[0]


def near(found, expected, tolerance=1e-5):
    expected = np.asarray(expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def raw(directory):
    """The bytes of each tensor of the directory's file."""
    data = (directory / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    return {
        name: (entry["dtype"], entry["shape"], data[8 + size :][slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_dequantised_model(name, made, tmp_path):
    directory, floats, tensors = made(name)
    model, dense = loaded(directory), loaded(floats)
    layers = [m for _, m in model.named_modules() if isinstance(m, QuantizedLinear)]
    assert len(layers) == 7 * 3 and isinstance(model.model.layers, LayerStack)
    assert list(model.raw_state_dict()) and set(model.raw_state_dict()) == set(tensors)
    ids = ids_of(2, 12)
    near(call(model, ids), call(dense, ids))
    # A save gives the very bytes, and the configuration.
    maxjax.save_pretrained(model, tmp_path / "saved")
    assert raw(tmp_path / "saved") == raw(directory)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config == json.loads((directory / "config.json").read_text())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SOME)
def test_layers_of_their_own_and_with_a_cache(name, made):
    directory, _, _ = made(name)
    model = loaded(directory)
    ids = ids_of(2, 10)
    expected = call(model, ids)
    prompts = [ids[0, :5].tolist(), ids[1, :3].tolist()]
    texts = [found.tokens for found in maxjax.generate(model, None, prompts, max_new_tokens=5)]
    assert chosen(model, prompts, texts, ids.shape[1]) == texts
    model.unstack()
    near(call(model, ids), expected)
    found = maxjax.generate(model, None, prompts, max_new_tokens=5)
    assert [one.tokens for one in found] == texts


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        ({"model": 2}, AxisType.Auto), ({"model": 8}, AxisType.Auto),
        ({"fsdp": 2, "model": 2}, AxisType.Explicit), ({"data": 2, "model": 2}, AxisType.Auto),
    ],
)  # fmt: skip
def test_a_mesh_gives_the_same(name, sizes, kind, made):
    directory, _, tensors = made(name)
    axes = (kind,) * len(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=axes)
    model = loaded(directory, mesh=mesh)
    ids = ids_of(2, 12)
    near(call(model, ids), call(loaded(directory), ids))
    for full, value in model.state_dict().items():
        assert np.asarray(value).astype(tensors[full].dtype).tobytes() == tensors[full].tobytes()
    # The numbers are split, so that a device holds its part.
    weights = model.raw_state_dict()
    largest = max(
        (w for n, w in weights.items() if ".mlp.up_proj." in n), key=lambda w: w.value.nbytes
    )
    assert "model" in jax.tree.leaves(tuple(largest.sharding.spec))


def test_what_a_plan_says_is_what_the_file_has(made):
    for name in SOME:
        directory, _, tensors = made(name)
        total = sum(array.nbytes for array in tensors.values())
        if name.startswith("bitsandbytes"):  # texts of settings are held in 256 bytes
            texts = [array.nbytes for key, array in tensors.items() if "quant_state" in key]
            total += 256 * len(texts) - sum(texts)
        if name.startswith("pack"):  # JAX holds shapes in 32 bits
            total -= sum(
                array.nbytes // 2 for key, array in tensors.items() if "weight_shape" in key
            )
        assert maxjax.plan(directory).total_bytes == total
        # The largest tensors are halved.
        half = maxjax.plan(directory, maxjax.make_mesh(model=2)).bytes_per_device
        assert total / 2 < half < 0.75 * total


def test_activations_of_another_dtype(made):
    directory, floats, tensors = made("gptq 4")
    model, dense = loaded(directory, dtype="bfloat16"), loaded(floats, dtype="bfloat16")
    weights = model.raw_state_dict()
    assert model.dtype.name == weights["model.norm.weight"].dtype.name == "bfloat16"
    assert weights["model.layers.0.mlp.up_proj.scales"].dtype.name == "float16"
    near(call(model, ids_of(2, 12)), call(dense, ids_of(2, 12)), 0.02)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SOME)
def test_no_dense_copy_of_the_model(name, made):
    """A program needs a few matrices in floats, not those of all layers, stacked or not."""
    directory, floats, _ = made(name)

    def bytes_of(place, stacked, run):
        model = loaded(place)
        model = model if stacked else model.unstack()
        program = jax.jit(run).lower(model, ids_of(1, 4)).compile()
        return program.memory_analysis().temp_size_in_bytes

    matrix = 4 * 128 * 192
    for stacked in (True, False):
        found, plain = (bytes_of(p, stacked, lambda m, i: m(i)) for p in (directory, floats))
        assert found < plain + 6 * matrix


# -- files of one writer


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_tables_of_mlx(key, tmp_path, caplog):
    """MLX quantises tables of embeddings too, and names layers with settings of their own."""
    case = mlx(own={"model.layers.0.mlp.up_proj": {"group_size": 32, "bits": 8}, "lm_head": False})
    (config, packed), (plain, floats) = tensors_of(case, num_hidden_layers=1)
    config[key] = config.pop("quantization_config")
    rng = np.random.default_rng(0)
    for name, one, shape in (
        ("model.layers.0.mlp.up_proj", mlx(8, 32), (192, 128)),
        ("model.embed_tokens", mlx(), (96, 128)),
    ):
        found, values = one.quantise(rng.normal(0, 0.1, shape), rng)
        packed.pop(f"{name}.weight")
        packed |= {f"{name}.{key}": value for key, value in found.items()}
        floats[f"{name}.weight"] = values.astype(np.float32)
    directory, ids = write(tmp_path / "q", config, packed), ids_of(2, 6)
    expected = call(loaded(write(tmp_path / "f", plain, floats)), ids)
    with caplog.at_level("INFO", "maxjax"):
        model = loaded(directory)
    assert "'model.embed_tokens.weight' is dequantised" in caplog.text
    near(call(model, ids), expected)
    near(call(loaded(directory, mesh=maxjax.make_mesh(model=2)), ids), expected)
    # Saved, the table is floats, and the file opens.
    maxjax.save_pretrained(model, tmp_path / "saved")
    saved = raw(tmp_path / "saved")
    assert (
        saved["model.embed_tokens.weight"][0] == "F32" and "model.embed_tokens.scales" not in saved
    )
    assert (
        saved["model.layers.0.mlp.up_proj.weight"]
        == raw(directory)["model.layers.0.mlp.up_proj.weight"]
    )
    near(call(loaded(tmp_path / "saved"), ids), expected)
    for to in ("w.gguf", "w.safetensors"):
        with pytest.raises((UnsupportedModelError, UserInputError), match="quantization_config"):
            convert(directory, tmp_path / to, dtype=None if "gguf" in to else "bfloat16")


def test_experts_of_mlx(tmp_path):
    """MLX holds a projection of all experts as one tensor, and may quantise the router with more bits."""
    settings = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 3,
        "num_experts_per_tok": 2, "moe_intermediate_size": 192, "norm_topk_prob": True, "head_dim": 32,
        "num_hidden_layers": 1,
    }  # fmt: skip
    front = "model.layers.0.mlp"
    case = mlx(own={
        f"{front}.gate": {"group_size": 32, "bits": 8}, f"{front}.switch_mlp.up_proj": {"bits": 8},
    })  # fmt: skip
    (config, packed), (plain, floats) = tensors_of(case, **settings)
    rng = np.random.default_rng(0)
    found, values = mlx(8, 32).quantise(floats[f"{front}.gate.weight"].astype(np.float64), rng)
    floats[f"{front}.gate.weight"] = values.astype(np.float32)
    packed |= {f"{front}.gate.{key}": value for key, value in found.items()}
    for i in range(3):
        name = f"{front}.experts.{i}.up_proj"
        found, values = mlx(8).quantise(rng.normal(0, 0.1, (192, 128)), rng)
        floats[f"{name}.weight"] = values.astype(np.float32)
        packed |= {f"{name}.{key}": value for key, value in found.items()}
    single = dict(packed)
    for name in [name for name in packed if ".experts.0." in name]:
        each = [packed.pop(name.replace("experts.0", f"experts.{i}")) for i in range(3)]
        packed[name.replace("experts.0", "switch_mlp")] = np.stack(each)
    directory, ids = write(tmp_path / "q", config, packed), ids_of(2, 6)
    expected = call(loaded(write(tmp_path / "f", plain, floats)), ids)
    model = loaded(directory)
    near(call(model, ids), expected)
    for name, value in model.state_dict().items():
        assert np.asarray(value).tobytes() == single[name].tobytes(), name
    near(call(loaded(directory, mesh=maxjax.make_mesh(expert=3)), ids), expected)
    maxjax.save_pretrained(model, tmp_path / "saved")
    near(call(loaded(tmp_path / "saved"), ids), expected)


def test_the_file_that_modelopt_writes_beside_the_configuration(tmp_path):
    """``hf_quant_config.json``, and scales of a cache in FP8, which have no effect."""
    (config, packed), (plain, floats) = tensors_of(CASES["modelopt nvfp4"], num_hidden_layers=1)
    del config["quantization_config"]
    packed["model.layers.0.self_attn.k_proj.k_scale"] = np.float32(2)
    directory, ids = write(tmp_path / "q", config, packed), ids_of(2, 6)
    beside = {
        "producer": {"name": "modelopt", "version": "0.35.0"},
        "quantization": {
            "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
            "exclude_modules": ["lm_head"],
        },
    }  # fmt: skip
    (directory / "hf_quant_config.json").write_text(json.dumps(beside))
    expected = call(loaded(write(tmp_path / "f", plain, floats)), ids)
    model = loaded(directory)
    near(call(model, ids), expected)
    assert maxjax.plan(directory).total_bytes == sum(
        array.nbytes for name, array in packed.items() if "k_scale" not in name
    )
    maxjax.save_pretrained(model, tmp_path / "saved")
    near(call(loaded(tmp_path / "saved"), ids), expected)
    convert(directory, tmp_path / "copy")
    near(call(loaded(tmp_path / "copy"), ids), expected)


def test_settings_of_single_layers_of_auto_round(tmp_path):
    (config, packed), (plain, floats) = tensors_of(CASES["auto-round gptq"], num_hidden_layers=1)
    name, rng = "model.layers.0.mlp.up_proj", np.random.default_rng(0)
    found, values = auto_round("auto_round:auto_gptq", 8, 64).quantise(
        rng.normal(size=(192, 128)), rng
    )
    packed |= {f"{name}.{key}": value for key, value in found.items()}
    floats[f"{name}.weight"] = values.astype(np.float32)
    config["quantization_config"] = settings = copy.deepcopy(config["quantization_config"])
    settings["extra_config"][name] = {"bits": 8, "group_size": 64}
    directory, ids = write(tmp_path / "q", config, packed), ids_of(2, 6)
    near(call(loaded(directory), ids), call(loaded(write(tmp_path / "f", plain, floats)), ids))
    settings["extra_config"][name] = {"bits": 16}
    with pytest.raises(UnsupportedModelError, match=f"'{name}', which has 16 bits"):
        loaded(write(tmp_path / "whole", config, packed))


# -- which layers are quantised


def test_the_file_says_which_layers_are_quantised(tmp_path):
    (config, packed), _ = tensors_of(CASES["awq"], num_hidden_layers=1)
    name = "model.layers.0.self_attn.k_proj"
    for key in [key for key in packed if key.startswith(name)]:
        del packed[key]
    packed[f"{name}.weight"] = np.ones((64, 128), np.float32)
    model = build(maxjax.load_weights(write(tmp_path, config, packed)), stacked=False)
    attention = model.model.layers[0].self_attn
    assert type(attention.k_proj).__name__ == "Linear"
    assert isinstance(attention.q_proj, QuantizedLinear)
    assert type(model.lm_head).__name__ == "ColumnParallelLinear"


def test_biases_of_layers_that_have_none(tmp_path):
    """AutoGPTQ wrote them of every quantised layer."""
    (config, packed), (plain, floats) = tensors_of(gptq(), num_hidden_layers=2)
    rng = np.random.default_rng(0)
    for name in [name.removesuffix(".qweight") for name in packed if name.endswith(".qweight")]:
        bias = rng.normal(size=len(floats[f"{name}.weight"])).astype(np.float16)
        packed[f"{name}.bias"], floats[f"{name}.bias"] = bias, bias.astype(np.float32)
    plain |= {"attention_bias": True, "mlp_bias": True}
    directory, ids = write(tmp_path / "q", config, packed), ids_of(2, 6)
    expected = call(loaded(write(tmp_path / "f", plain, floats)), ids)
    model = loaded(directory)
    near(call(model, ids), expected)
    near(call(model.to(maxjax.make_mesh(model=2)), ids), expected)
    maxjax.save_pretrained(model, tmp_path / "saved")
    assert raw(tmp_path / "saved") == raw(directory)


def test_settings_of_single_layers_of_gptq(tmp_path):
    """The first pattern that matches holds; what one leaves out must not be quantised."""
    (config, packed), (plain, floats) = tensors_of(gptq(), num_hidden_layers=1)
    name, rng = "model.layers.0.mlp.up_proj", np.random.default_rng(0)
    found, values = gptq(8, 64, desc_act=True).quantise(rng.normal(size=(192, 128)), rng)
    packed |= {f"{name}.{key}": value for key, value in found.items()}
    floats[f"{name}.weight"] = values.astype(np.float32)
    dynamic = {
        "-:.*norm": {}, "lm_head": {}, r"+:model\.language_model\..*\.up_proj": {
            "bits": 8, "group_size": 64, "desc_act": True,
        }, ".*up_proj": {"bits": 2},
    }  # fmt: skip
    quantised = {**config["quantization_config"], "dynamic": dynamic}
    directory = write(tmp_path / "q", {**config, "quantization_config": quantised}, packed)
    ids = ids_of(2, 6)
    near(call(loaded(directory), ids), call(loaded(write(tmp_path / "f", plain, floats)), ids))
    dynamic = {"-:.*up_proj": {}}
    quantised = {**config["quantization_config"], "dynamic": dynamic}
    directory = write(tmp_path / "left", {**config, "quantization_config": quantised}, packed)
    with pytest.raises(UnsupportedModelError, match=f"'{name}', which 'dynamic' leaves out"):
        loaded(directory)


def test_a_quantised_head(tmp_path):
    (config, packed), (plain, floats) = tensors_of(CASES["gptq 4"], num_hidden_layers=1)
    rng = np.random.default_rng(0)
    del packed["lm_head.weight"]
    found, values = CASES["gptq 4"].quantise(rng.normal(size=(96, 128)), rng)
    packed |= {f"lm_head.{key}": value for key, value in found.items()}
    floats["lm_head.weight"] = values.astype(np.float32)
    model = loaded(write(tmp_path / "q", config, packed))
    dense = loaded(write(tmp_path / "f", plain, floats))
    assert isinstance(model.lm_head, QuantizedLinear)
    near(call(model, ids_of(2, 6)), call(dense, ids_of(2, 6)))
    split = loaded(tmp_path / "q", mesh=maxjax.make_mesh(model=2))
    assert split.lm_head.weight.split_over(0) == ("model",)
    near(call(split, ids_of(2, 6)), call(dense, ids_of(2, 6)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["fp8 blocks", "gptq 4 order", "modelopt nvfp4"])
def test_experts(name, tmp_path):
    """Stacked experts, of which those that no token chose are left out."""
    settings = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 6,
        "num_experts_per_tok": 2, "moe_intermediate_size": 192, "norm_topk_prob": True, "head_dim": 32,
        "num_hidden_layers": 2,
    }  # fmt: skip
    directory, floats, tensors = repository(CASES[name], tmp_path, **settings)
    model, dense = loaded(directory), loaded(floats)
    # One leaf for each tensor of a projection of all layers and experts, and none more.
    names = {key.split(".", 2)[2] for key in tensors if key.startswith("model.layers.0.")}
    kinds = {re.sub(r"experts\.\d", "experts", name) for name in names}
    assert len(jax.tree.leaves(model)) == len(kinds) + 3
    ids = ids_of(2, 6)
    expected = np.asarray(call(dense, ids))
    near(call(model, ids), expected)
    for full, value in model.state_dict().items():
        assert np.asarray(value).tobytes() == tensors[full].tobytes()
    prompts = [[1, 2, 3], [4, 5, 6]]
    texts = [one.tokens for one in maxjax.generate(model, None, prompts, max_new_tokens=3)]
    assert chosen(dense, prompts, texts) == texts
    for sizes in ({"expert": 2, "model": 2}, {"model": 8}):
        near(call(loaded(directory, mesh=maxjax.make_mesh(**sizes)), ids), expected)
    near(call(loaded(directory).unstack(), ids), expected)


def test_experts_of_which_one_is_not_quantised(tmp_path):
    settings = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 3,
        "num_experts_per_tok": 2, "moe_intermediate_size": 192, "norm_topk_prob": True,
        "head_dim": 32, "num_hidden_layers": 1,
    }  # fmt: skip
    (config, packed), (plain, floats) = tensors_of(CASES["awq"], **settings)
    name = "model.layers.0.mlp.experts.1.up_proj"
    packed = {key: value for key, value in packed.items() if not key.startswith(name)}
    packed[f"{name}.weight"] = floats[f"{name}.weight"]
    model = loaded(write(tmp_path / "q", config, packed))
    assert set(model.raw_state_dict()) == set(packed)
    ids = ids_of(2, 6)
    near(call(model, ids), call(loaded(write(tmp_path / "f", plain, floats)), ids))


# -- what is refused


def changed(case, directory, change, **settings):
    (config, packed), _ = tensors_of(CASES[case], num_hidden_layers=1, **settings)
    change(config, packed)
    return write(directory, config, packed)


@pytest.mark.parametrize(
    ("case", "key", "value", "what"),
    [
        ("fp8 blocks", "weight_scale_inv", None, "Missing required weights: .*q_proj.weight_scale_inv"),
        ("fp8 blocks", "weight_scale_inv", np.ones((4, 3), np.float32), r"expected=\(4, 2\), actual=\(4, 3\)"),
        ("fp8 blocks", "weight", np.ones((128, 128), np.int8), r"expected=DType.float8_e4m3fn, actual=DType.int8"),
        ("gptq 4 order", "g_idx", None, "Missing required weights: .*q_proj.g_idx"),
        ("gptq 4", "g_idx", np.arange(128, dtype=np.int32)[::-1] // 32, "q_proj.g_idx' has groups .*desc_act"),
        ("gptq 4 order", "g_idx", np.full(128, 4, np.int32), "q_proj.g_idx' has the group 4 .* 0 to 3"),
        ("gptq 4 order", "scales", None, "Missing required weights: .*q_proj.scales"),
        ("gptq 4 order", "qweight", np.ones((8, 128), np.int32), r"expected=\(16, 128\), actual=\(8, 128\)"),
        ("awq", "qzeros", np.ones((4, 16), np.int8), "expected=DType.int32, actual=DType.int8"),
        ("awq", "more", np.ones(3, np.int32), "Unexpected keys in state_dict: .*q_proj.more"),
        ("bitsandbytes int8", "weight_format", np.ones((), np.uint8), r"must be \[0\], not \[1\]"),
        ("pack-quantized 4", "weight_shape", np.array([128, 64]), r"must be \[128, 128\], not \[128, 64\]"),
        ("bitsandbytes nf4", "weight", np.ones((64, 1), np.uint8), r"expected=\(8192, 1\), actual=\(64, 1\)"),
        ("bitsandbytes nf4", "weight.quant_state.bitsandbytes__nf4",
         np.frombuffer(b'{"quant_type": "nf4", "blocksize": 32}', np.uint8), "blocksize 64, not 32"),
    ],
)  # fmt: skip
def test_a_tensor_that_is_wrong_is_named(case, key, value, what, tmp_path):
    def change(config, packed):
        packed.pop(f"model.layers.0.self_attn.q_proj.{key}", None)
        if value is not None:
            packed[f"model.layers.0.self_attn.q_proj.{key}"] = value

    directory = changed(case, tmp_path, change)
    with pytest.raises(CheckpointMismatchError, match=what) as error:
        loaded(directory)
    assert str(tmp_path) in str(error.value)


def test_other_models_are_refused(tmp_path):
    def gpt2(config, packed):
        config |= {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 128}

    with pytest.raises(UnsupportedModelError, match="quant_method 'awq'"):
        loaded(changed("awq", tmp_path / "gpt2", gpt2))

    def plain(config, packed):
        for name in [name for name in packed if "layers.0." in name and "norm" not in name]:
            del packed[name]
        packed["model.layers.0.mlp.up_proj.weight"] = np.ones((192, 128), np.float32)

    with pytest.raises(UnsupportedModelError, match="no quantised linear layer"):
        loaded(changed("awq", tmp_path / "plain", plain))

    def gpt_oss(config, packed):
        config |= {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
        config["quantization_config"] = {"quant_method": "mxfp4"}

    with pytest.raises(UnsupportedModelError, match="mxfp4.*which is not an expert"):
        loaded(changed("awq", tmp_path / "gpt_oss", gpt_oss))


def test_a_quantised_checkpoint_whose_configuration_does_not_say_so(tmp_path):
    def quiet(config, packed):
        del config["quantization_config"]

    with pytest.raises(UnsupportedModelError, match=r"'model.*qweight'.*quantize_config.json"):
        loaded(changed("awq", tmp_path / "quiet", quiet))

    def renamed(config, packed):
        config["compression_config"] = config.pop("quantization_config")

    with pytest.raises(UnsupportedModelError, match="enter its 'compression_config'"):
        loaded(changed("int-quantized channel", tmp_path / "renamed", renamed))


def test_no_other_dtype_in_a_file(made, tmp_path):
    directory, _, _ = made("awq")
    with pytest.raises(UserInputError, match="quantization_config"):
        convert(directory, tmp_path / "w.safetensors", dtype="bfloat16")
    with pytest.raises(UnsupportedModelError, match="'awq'.: .*cannot be written as GGUF"):
        convert(directory, tmp_path / "w.gguf")
    with pytest.raises(UnsupportedModelError, match="cannot be .*quantised again"):
        maxjax.quantize(loaded(directory), "q8_0")
    with pytest.raises(UserInputError, match="quantization_config"):
        maxjax.save_pretrained(loaded(directory), tmp_path / "saved", dtype="bfloat16")


def test_other_formats_hold_the_same_tensors(made, tmp_path):
    """orbax, and a copy as safetensors: nothing changes."""
    directory, _, tensors = made("pack-quantized 4")
    convert(directory, tmp_path / "copy")
    assert raw(tmp_path / "copy") == raw(directory)
    convert(directory, tmp_path / "steps", to="orbax")
    ids = ids_of(2, 6)
    expected = call(loaded(directory), ids)
    near(call(loaded(tmp_path / "steps"), ids), expected)
    model = loaded(directory)
    maxjax.checkpoint.save(tmp_path / "own", model, step=1)
    fresh = build(maxjax.load_weights(directory))
    maxjax.checkpoint.restore(tmp_path / "own", fresh)
    near(call(fresh, ids), expected)


def test_a_function_of_jax_keeps_what_a_file_holds(made):
    """A model that came out of a jitted function has the texts of bitsandbytes too."""
    directory, _, tensors = made("bitsandbytes nf4")
    model = jax.jit(lambda m: jax.tree.map(jnp.copy, m))(loaded(directory))
    for name, value in model.state_dict().items():
        assert np.asarray(value).tobytes() == tensors[name].tobytes()


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("bitsandbytes nf4", AxisType.Auto),
        ("bitsandbytes fp4", AxisType.Explicit),
        pytest.param("bitsandbytes nf4", AxisType.Explicit, marks=pytest.mark.extra),
        pytest.param("bitsandbytes fp4", AxisType.Auto, marks=pytest.mark.extra),
    ],
)
def test_flat_tensors_of_bitsandbytes_are_matrices_in_memory(case, kind, tmp_path):
    """Devices hold parts of them, and files and state dicts have them as they were."""
    directory, _, tensors = repository(CASES[case], tmp_path, intermediate_size=256)
    ids = ids_of(2, 6)
    expected = call(loaded(directory), ids)
    mesh = jax.make_mesh((2,), ("model",), axis_types=(kind,))
    model = loaded(directory, mesh=mesh)
    near(call(model, ids), expected)
    weights, name = model.raw_state_dict(), "model.layers.1.mlp.{}_proj.{}"
    up, down = (weights[name.format(one, "weight")] for one in ("up", "down"))
    assert up.shape == [256, 64] and down.shape == [128, 128]
    assert tuple(up.sharding.spec)[0] == "model"
    if case == "bitsandbytes fp4":  # blocks of scales would be in several parts
        assert tuple(down.sharding.spec) == (None, "model")
        assert tuple(weights[name.format("down", "weight.absmax")].sharding.spec) == (None, "model")
    state = model.state_dict()
    for full, value in state.items():
        assert np.asarray(value).tobytes() == tensors[full].tobytes()
        assert value.shape == tensors[full].shape
    maxjax.save_pretrained(model, tmp_path / "saved")
    assert raw(tmp_path / "saved") == raw(directory)
    maxjax.checkpoint.save(tmp_path / "own", model, step=1)
    fresh = build(maxjax.load_weights(directory))
    maxjax.checkpoint.restore(tmp_path / "own", fresh)
    near(call(fresh, ids), expected)
    fresh = build(maxjax.load_weights(directory)).to(mesh)
    fresh.load_state_dict(state)
    near(call(fresh, ids), expected)
