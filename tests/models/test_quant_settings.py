"""``quantization_config``: what settings say of a layer, and which are refused."""

import pytest

from maxjax.dtype import DType
from maxjax.errors import CheckpointFormatError, CheckpointLimitError, UnsupportedModelError
from maxjax.models.quantized import Quantization
from tests.models.quantizers import compressed, compressed_scaled, gptq


def test_groups_of_layers_with_settings_of_their_own(tmp_path):
    case = compressed_scaled("float", "channel")
    four = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    group = {"targets": ["re:.*down_proj$"], "weights": four, "format": "pack-quantized"}
    groups = {**case.config["config_groups"], "group_1": group}
    config = {**case.config, "config_groups": groups}
    layout_for = Quantization.of({"quantization_config": config}).layout_for
    found = {
        name: layout_for(f"model.layers.0.mlp.{name}")(64, 64, {}).format
        for name in ("up_proj", "down_proj")
    }
    assert found == {"up_proj": "scaled", "down_proj": "pack_quantized"}


def test_the_most_special_target_of_a_layer_holds():
    """As in compressed-tensors: names, patterns by the alphabet, classes; also names in a multimodal model."""
    groups = {}
    for i, target in enumerate(
        [
            "Linear",
            "re:.*proj",
            "re:.*down",
            r"re:model\.language_model\.layers\.1\.",
            "model.layers.0.up_proj",
        ]
    ):
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8 * (i + 1)}
        groups[f"group_{i}"] = {"targets": [target], "weights": weights}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
    }
    layout_for = Quantization.of({"quantization_config": config}).layout_for
    names = [
        "lm_head",
        "layers.0.gate_proj",
        "layers.0.down_proj",
        "layers.1.mixer",
        "layers.0.up_proj",
    ]
    found = [dict(layout_for(f"model.{n}" if "." in n else n)(64, 64, {}).options) for n in names]
    assert [one["group"] for one in found] == [8, 16, 24, 32, 40]


def test_settings_that_the_file_of_a_layer_shows():
    """Zero points of a symmetric weight, an order of columns, and older spellings."""

    def of(weights, form, own):
        config = compressed(weights, form)
        found = Quantization.of({"quantization_config": config}).layout_for("x")(64, 64, own)
        return [(one.name, one.shape) for one in found.tensors], dict(found.options)

    rows = {"num_bits": 8, "type": "int", "group_size": -1}
    tensors, _ = of(rows, "int-quantized", {"weight_zero_point": (DType.int8, (64, 1))})
    assert tensors[1:] == [("weight_scale", (64, 1)), ("weight_zero_point", (64, 1))]
    blocks = {"num_bits": 8, "type": "int", "strategy": "block", "block_structure": "16x32"}
    assert of(blocks, "int-quantized", {})[1]["block"] == (16, 32)
    four = {"num_bits": 4, "type": "int", "group_size": 16}
    # Of weights that a matmul with int8 activations uses, 4 bits are not packed.
    assert of(four, "int-quantized", {})[0] == [("weight", (64, 64)), ("weight_scale", (64, 4))]
    order = ("weight_g_idx", (64,))
    assert order not in of(four, "pack-quantized", {})[0]
    assert order in of(four, "pack-quantized", {"weight_g_idx": (DType.int32, (64,))})[0]
    for said in (True, "dynamic", "group"):
        assert order in of({**four, "actorder": said}, "pack-quantized", {})[0]


def test_configurations_of_other_writers():
    """AutoFP8 names scales otherwise, MiniMax the floats, GPTQModel the form of a file, old transformers no method."""
    of = lambda config: Quantization.of({"quantization_config": config}).layout_for("x")
    fp8 = of({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]})
    own = {"weight": (DType.float8_e4m3fn, (64, 32)), "weight_scale": (DType.float32, ()),
           "input_scale": (DType.float32, ())}  # fmt: skip
    found = fp8(64, 32, own)
    assert [(one.name, one.shape) for one in found.tensors[1:]] == [
        ("weight_scale", ()),
        ("input_scale", ()),
    ]
    minimax = of({"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [64, 32]})
    assert minimax(64, 64, {}).tensors[1].shape == (1, 2)
    rows = fp8(64, 32, {**own, "weight_scale": (DType.float32, (64, 1))})
    assert rows.tensors[1].shape == (64, 1)
    gptq = of({"quant_method": "gptq", "bits": 4, "group_size": 32, "format": "gptq_v2"})
    assert dict(gptq(64, 32, {}).options)["offset"] == 0
    assert of({"load_in_8bit": True})(64, 32, {}).format == "bitsandbytes8"


EIGHT = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


def weights_of(**changes):
    return compressed({**EIGHT, **changes}, "float-quantized")


@pytest.mark.parametrize(
    ("config", "error", "what"),
    [
        ({"quant_method": "hqq"}, UnsupportedModelError, r"quant_method 'hqq'\); supported are fp8,"),
        ({"bits": 4}, UnsupportedModelError, "quant_method"),
        ([1], CheckpointFormatError, "not an object"),
        ({**gptq().config, "bits": 3}, UnsupportedModelError, r"'gptq'\) with bits 3 \(supported: 4, 8, 2"),
        ({**gptq().config, "bits": "4"}, UnsupportedModelError, "bits '4'"),
        ({**gptq().config, "group_size": 0}, CheckpointFormatError, "'group_size'"),
        ({**gptq().config, "group_size": "a"}, CheckpointFormatError, "'group_size'.*wrong type"),
        ({**gptq().config, "checkpoint_format": "marlin"}, UnsupportedModelError, "marlin"),
        ({**gptq().config, "dynamic": {"+:.*": {"bits": 3}}}, UnsupportedModelError, "bits 3"),
        ({**gptq().config, "dynamic": {"+:(": {}}}, CheckpointFormatError, r"the pattern '\('"),
        ({**gptq().config, "dynamic": {"-:(?:.{99}){9999}": {}}}, CheckpointLimitError, "'dynamic'.*too many parts"),
        ({**gptq().config, "rotation": "hadamard"}, UnsupportedModelError, "rotation 'hadamard'"),
        ({**gptq().config, "is_marlin_format": True}, UnsupportedModelError, "is_marlin_format"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, UnsupportedModelError, "version 'gemv'"),
        ({"quant_method": "awq", "bits": 8}, UnsupportedModelError, "bits 8"),
        ({"quant_method": "awq", "checkpoint_format": "gemv"}, UnsupportedModelError, "checkpoint_format 'gemv'"),
        ({"quant_method": "awq", "backend": "llm-awq"}, UnsupportedModelError, "backend 'llm-awq'"),
        ({"quant_method": "bitsandbytes"}, UnsupportedModelError, "neither load_in_4bit"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"},
         UnsupportedModelError, "bnb_4bit_quant_storage 'bfloat16'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, CheckpointFormatError, "two positive"),
        ({"quant_method": "fp8", "weight_block_size": [128, -1]}, CheckpointFormatError, "two positive"),
        ({"quant_method": "fp8", "weight_block_size": "9" * 5000 + "x1"}, CheckpointFormatError, "two positive"),
        ({"quant_method": "fp8", "activation_scheme": 3}, UnsupportedModelError, "activation_scheme 3"),
        ({"quant_method": "compressed-tensors"}, UnsupportedModelError, "no config_groups"),
        ({**weights_of(), "format": "mxfp4-pack-quantized"}, UnsupportedModelError, "mxfp4-pack"),
        ({**weights_of(), "format": "nvfp4-pack-quantized"}, UnsupportedModelError, "num_bits 8"),
        ({"group_size": 64, "bits": 3}, UnsupportedModelError, "'mlx'.* with bits 3"),
        ({"group_size": 32, "bits": 4, "mode": "mxfp4"}, UnsupportedModelError, "mode 'mxfp4'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, UnsupportedModelError, "W4A8_AWQ"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:fp8"}, UnsupportedModelError,
         "packing_format 'auto_round:fp8'"),
        ({"quant_method": "auto-round", "data_type": "mx_fp"}, UnsupportedModelError, "mx_fp"),
        ({"quant_method": "auto-round", "bits": 3}, UnsupportedModelError, "bits 3"),
        ({**weights_of(), "sparsity_config": {"format": "sparse-24-bitmask"}},
         UnsupportedModelError, "sparse-24"),
        (weights_of(num_bits=4), UnsupportedModelError, "num_bits 4"),
        (weights_of(type="int"), UnsupportedModelError, "type 'int'"),
        (weights_of(strategy="token"), UnsupportedModelError, "strategy 'token'"),
        ({**weights_of(), "config_groups": {"a": {"targets": [r"re:(.)\1"], "weights": EIGHT}}},
         CheckpointFormatError, r"config\.json.*'targets' has the pattern .* back references are not supported"),
        (weights_of(strategy="group"), CheckpointFormatError, "'group_size'"),
        (weights_of(strategy="block"), UnsupportedModelError, "block_structure"),
    ],
)  # fmt: skip
def test_a_method_that_is_not_supported_is_named(config, error, what):
    with pytest.raises(error, match=what):
        Quantization.of({"quantization_config": config}, path="config.json")


def test_a_scheme_of_a_cache_in_fp8_changes_nothing():
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    layouts = [
        Quantization.of({"quantization_config": one}).layout_for("model.layers.0.up_proj")(
            64, 64, {}
        )
        for one in (weights_of(), {**weights_of(), "kv_cache_scheme": scheme})
    ]
    assert layouts[0] == layouts[1]
