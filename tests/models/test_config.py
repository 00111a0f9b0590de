"""ModelConfig.from_dict and read_object: what a configuration may be, and what it may not."""

import dataclasses
import json

import pytest

from maxjax.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointMissingError,
    UnsupportedModelError,
)
from maxjax.models import all_families
from maxjax.models.bert import BertConfig
from maxjax.models.cohere import Cohere2Config
from maxjax.models.config import ModelConfig, config_field, read_object
from maxjax.models.deberta_v2 import DebertaV2Config
from maxjax.models.deepseek import DeepseekV2Config
from maxjax.models.ernie4_5 import Ernie45Config
from maxjax.models.ernie4_5_moe import Ernie45MoEConfig
from maxjax.models.gemma4 import Gemma4Config
from maxjax.models.glm4_moe import GLM4MoEConfig
from maxjax.models.gpt2 import GPT2Config
from maxjax.models.gpt_neo import GPTNeoConfig
from maxjax.models.gptj import GPTJConfig
from maxjax.models.gte import GteConfig
from maxjax.models.hunyuan import HunyuanMoEConfig
from maxjax.models.lfm2 import LFM2MoEConfig
from maxjax.models.llama import LlamaConfig, MistralConfig, SeedOSSConfig
from maxjax.models.minimax_m2 import MiniMaxM2Config
from maxjax.models.ministral3 import Ministral3Config
from maxjax.models.modernbert import ModernBertConfig
from maxjax.models.parts.rotary import QueryScaling, Rope
from maxjax.models.qwen3_next import Qwen35MoEConfig


@dataclasses.dataclass(frozen=True)
class Config(ModelConfig):
    size: int = config_field(minimum=1)
    layers: int = config_field(key="num_hidden_layers", minimum=1, maximum=100)
    eps: float = config_field(1e-5, key="layer_norm_eps")
    act: str = config_field("gelu")
    flag: bool = config_field(False)
    window: int | None = config_field(None)

    def __post_init__(self):
        if self.size % self.layers:
            raise ValueError("'size' is not a multiple of 'num_hidden_layers'")


GOOD = {"size": 8, "num_hidden_layers": 2}


def test_declared_keys_are_taken_and_others_left():
    raw = {**GOOD, "layer_norm_eps": 1, "flag": True, "window": 7, "dropout": 0.1, "x": {"y": []}}
    assert Config.from_dict(raw) == Config(8, 2, 1.0, "gelu", True, 7)
    assert isinstance(Config.from_dict(raw).eps, float)


def test_null_is_absent():
    assert Config.from_dict({**GOOD, "act": None, "window": None}) == Config(8, 2)
    with pytest.raises(CheckpointFormatError, match="'size' is missing"):
        Config.from_dict({**GOOD, "size": None})


@pytest.mark.parametrize("key", ["size", "num_hidden_layers"])
def test_missing_keys_are_named_as_in_the_file(key):
    raw = {name: value for name, value in GOOD.items() if name != key}
    with pytest.raises(CheckpointFormatError, match=f"c.json: '{key}' is missing"):
        Config.from_dict(raw, path="c.json")


@pytest.mark.parametrize(
    "key, value",
    [
        ("size", "8"), ("size", 8.0), ("size", True), ("size", [8]), ("size", {}),
        ("size", 0), ("size", -8), ("size", 2**40), ("size", 10**400), ("num_hidden_layers", 101),
        ("layer_norm_eps", "1e-5"), ("layer_norm_eps", float("inf")), ("layer_norm_eps", -1.0),
        ("layer_norm_eps", float("nan")), ("layer_norm_eps", 10**400), ("layer_norm_eps", True),
        ("act", 3), ("act", ["gelu"]), ("flag", 1), ("flag", "true"), ("window", "none"),
        ("num_hidden_layers", 3),
    ],
)  # fmt: skip
def test_wrong_values_name_the_key(key, value):
    with pytest.raises(CheckpointFormatError, match=f"'{key}'") as caught:
        Config.from_dict({**GOOD, key: value}, path="c.json")
    assert caught.value.path == "c.json" and len(str(caught.value)) < 400


def test_configurations_are_frozen_and_hashable():
    config = Config.from_dict(GOOD)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.size = 3
    assert hash(config) == hash(Config(8, 2))


@pytest.mark.parametrize(
    ("config", "old", "new"),
    [
        (LlamaConfig, "num_layers", "num_hidden_layers"),
        (LlamaConfig, "num_heads", "num_attention_heads"),
        (LlamaConfig, "num_kv_heads", "num_key_value_heads"),
        (GPT2Config, "num_hidden_layers", "n_layer"),
        (GPT2Config, "hidden_size", "n_embd"),
        (BertConfig, "n_head", "num_attention_heads"),
        (LlamaConfig, "rope_parameter", "rope_parameters"),
    ],
)
def test_an_unknown_keyword_is_refused_with_its_name_here(config, old, new):
    message = f"{config.__name__}.*'{old}': did you mean {new}=.$"
    with pytest.raises(TypeError, match=message):
        config(100, 8, 16, **{old: 2})
    with pytest.raises(TypeError, match=message):
        dataclasses.replace(config(100, 8, 16, 2, 2), **{old: 2})


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[1, 2]", b"null", b'{"a": 1} x', b'{"a": 1, "a": 2}', b"\xff\xfe{}",
        b"[" * 100_000, b'{"a": ' + b"9" * 10_000 + b"}", b"<html></html>", b'{"a": "\xff"}',
    ],
)  # fmt: skip
def test_what_is_not_an_object_of_json_is_refused(tmp_path, content):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_object(file)
    assert caught.value.path == str(file) and len(str(caught.value)) < 600


def test_files_that_are_not_there_or_are_no_files(tmp_path):
    with pytest.raises(CheckpointMissingError):
        read_object(tmp_path / "nothing.json")
    with pytest.raises(CheckpointFormatError):
        read_object(tmp_path)


def test_infinity_is_let_through_where_nobody_looks(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"time_step_limit": [0.0, Infinity], "size": 8, "num_hidden_layers": 2}')
    assert Config.from_dict(read_object(file)) == Config(8, 2)
    file.write_text(json.dumps({**GOOD, "layer_norm_eps": float("nan")}))
    with pytest.raises(CheckpointFormatError, match="layer_norm_eps"):
        Config.from_dict(read_object(file))


DECODER = {
    "num_key_value_heads": 2,
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize(
    ("config", "settings", "error"),
    [
        (GPTNeoConfig, {"attention_types": 5}, CheckpointFormatError),
        (DebertaV2Config, {"pos_att_type": 5, "relative_attention": True}, CheckpointFormatError),
        (ModernBertConfig, {"rope_scaling": 5}, CheckpointFormatError),
        (MiniMaxM2Config, {"scoring_func": "softmax"}, UnsupportedModelError),
        (MiniMaxM2Config, {"use_qk_norm": False}, UnsupportedModelError),
    ],
)
def test_settings_of_families_that_are_wrong_or_not_supported(config, settings, error):
    with pytest.raises(error, match=next(iter(settings))):
        config.from_dict(DECODER | settings)


def test_null_is_absent_in_families_too():
    null = ModernBertConfig.from_dict(DECODER | {"global_rope_theta": None})
    assert null.rope_parameters == ModernBertConfig.from_dict(DECODER).rope_parameters
    ntk = {"rope_scaling": {"type": "ntk", "factor": 2.0}}
    assert GteConfig.from_dict(DECODER | ntk | {"rope_theta": None}) == GteConfig.from_dict(
        DECODER | ntk
    )


@pytest.mark.parametrize("layers", [6, 12, 30])
@pytest.mark.parametrize("width", [4, 8])
def test_sizes_of_single_layers_as_transformers_writes_them(layers, width):
    """With zeros before short numbers; what all layers share is not there."""
    full = range(5, layers, 6)
    sizes = {} if width == 8 else {f"{i:0{len(str(full[-1]))}}": {"head_dim": width} for i in full}
    settings = {"head_dim": 8, "num_hidden_layers": layers, "per_layer_config": sizes, "num_key_value_heads": 2,
                "hidden_size_per_layer_input": 0}  # fmt: skip
    found = Gemma4Config.from_dict(DECODER | settings)
    assert found.global_head_dim == width
    assert [i for i in range(layers) if found.window(i) is None] == list(full)
    with pytest.raises(UnsupportedModelError, match="per_layer_config"):
        MistralConfig.from_dict(DECODER | {"per_layer_config": {"0": {"sliding_window": 4}}})
    MistralConfig.from_dict(DECODER | {"per_layer_config": {}})


@pytest.mark.parametrize(
    "model_type, key, value, said",
    [
        ("smollm3", "no_rope_layers", [], "is an empty list"),
        ("gemma3n_text", "activation_sparsity_pattern", [], "is an empty list"),
        ("qwen3_moe", "mlp_only_layers", [0, 3], "has the layer 3: there are 3, counted from 0"),
        ("qwen2_moe", "mlp_only_layers", [7], "has the layer 7"),
        ("qwen3_next", "mlp_only_layers", [7], "has the layer 7"),
        ("llama4_text", "moe_layers", [-1], "has the layer -1"),
        ("llama4_text", "moe_layers", [1000], "has the layer 1000"),
        ("llama4_text", "no_rope_layers", {}, "is not a list of numbers"),
        ("llama4_text", "no_rope_layers", [1], "1 entries say which of 3 layers"),
        ("qwen3_moe", "mlp_only_layers", [], None),
        ("qwen3_moe", "mlp_only_layers", [0, 2], None),
        ("llama4_text", "no_rope_layers", [], None),
        ("llama4_text", "moe_layers", [], None),
    ],
)
def test_lists_of_layers_that_do_not_fit_the_layers_are_rejected(model_type, key, value, said):
    kind = next(one.config for one in all_families() if one.model_type == model_type)
    raw = {**DECODER, "num_hidden_layers": 3, key: value}
    if said is None:
        kind.from_dict(raw)
        return
    with pytest.raises(CheckpointFormatError, match=f"'{key}'") as caught:
        kind.from_dict(raw)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "model_type, settings",
    [
        ("deberta-v2", {"relative_attention": True, "conv_kernel_size": 3}),
        ("mpt", {"expansion_ratio": 2}),
        ("apertus", {"hidden_act": "relu"}),
        ("apertus", {"qk_norm": False}),
        ("gemma4_text", {"use_bidirectional_attention": "all"}),
        ("minimax_m2", {"scoring_func": "softmax"}),
        ("minimax_m2", {"use_qk_norm": False}),
        ("mistral", {"per_layer_config": {"0": {"sliding_window": 4}}}),
        ("mixtral", {"is_causal": False}),
        ("mistral", {"rope_parameters": {"a": {"rope_type": "default"}}}),
        ("mistral", {"quantization_config": {"quant_method": "gptq"}}),
        ("modernbert", {"layer_types": ["chunked_attention"]}),
    ],
)
def test_an_error_about_an_unsupported_setting_has_the_path_and_the_key(model_type, settings):
    kind = next(one.config for one in all_families() if one.model_type == model_type)
    raw = {**DECODER, "model_type": model_type, **settings}
    with pytest.raises(UnsupportedModelError, match=r"\Aa/config\.json: ") as caught:
        kind.from_dict(raw, path="a/config.json")
    key = list(settings)[-1]
    said = str(caught.value)
    assert f"'{key}'" in said and said.count("a/config.json") == 1
    assert "supported" in said or "cannot be" in said
    with pytest.raises(UnsupportedModelError, match=r"\A(?!a/config)"):
        kind.from_dict(raw)


HALF = Rope(part=0.5, interleaved=True)


@pytest.mark.parametrize(
    ("config", "settings", "found"),
    [
        (HunyuanMoEConfig, {"num_experts": 8, "num_experts_per_tok": 4}, {"moe_topk": 4}),
        (Ernie45MoEConfig, {"num_experts": 8, "num_experts_per_tok": 4}, {"moe_num_experts": 8, "moe_k": 4}),
        (GLM4MoEConfig, {"num_local_experts": 8}, {"n_routed_experts": 8}),
        (DeepseekV2Config, {"num_experts": 8}, {"n_routed_experts": 8}),
        (GPTJConfig, {"rotary_dim": 2},
         {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "rope": HALF, "rotary_dim": 2}),
        (GPTNeoConfig, {"attention_layers": ["local", "global"], "attention_types": [[["global", "local"], 12]]},
         {"attention_layers": ("local", "global")}),
        (Ernie45Config, {"head_dim": None}, {"head_dim": 4}),
        (SeedOSSConfig, {"head_dim": None}, {"head_dim": 4}),
        (SeedOSSConfig, {}, {"head_dim": 128}),
        (Ministral3Config, {"rope_parameters": {"rope_type": "default"}}, {"rope_parameters": Rope(1e4)}),
        (Ernie45Config, {}, {"head_dim": 128}),
        (Cohere2Config, {"layer_types": ["full_attention"] * 2, "sliding_window_pattern": None},
         {"num_hidden_layers": 2}),
    ],
)  # fmt: skip
def test_names_and_defaults_of_transformers(config, settings, found):
    made = config.from_dict(DECODER | settings)
    assert {name: getattr(made, name) for name in found} == found


def test_the_mlp_of_an_lfm2_with_experts_has_a_default_of_its_own():
    sizes = {key: value for key, value in DECODER.items() if key != "intermediate_size"}
    kinds = {"layer_types": ["conv", "full_attention"]}
    assert LFM2MoEConfig.from_dict(sizes | kinds).intermediate_size == 7168


@pytest.mark.parametrize("config", [DeepseekV2Config, LFM2MoEConfig, Gemma4Config, Qwen35MoEConfig])
def test_settings_that_nobody_reads_are_told_in_every_family(config, caplog):
    kinds = {"layer_types": ["conv", "full_attention"]} if config is LFM2MoEConfig else {}
    config.from_dict(DECODER | kinds | {"clip_qkv": 8.0, "hidden_size_per_layer_input": 0})
    assert "clip_qkv" in caplog.text


@pytest.mark.parametrize("beta", [0, 0.5, -0.5, "0.5"])
def test_the_scaling_of_a_ministral_3s_queries(beta):
    rope = {"rope_type": "default", "rope_theta": 1e6, "original_max_position_embeddings": 16}
    raw = DECODER | {"rope_parameters": rope | {"llama_4_scaling_beta": beta}}
    if beta in (0, 0.5):
        assert Ministral3Config.from_dict(raw).query_scaling == QueryScaling(float(beta), 16.0)
        return
    with pytest.raises(
        CheckpointFormatError, match="'llama_4_scaling_beta' in 'rope_parameters' needs"
    ):
        Ministral3Config.from_dict(raw)


def test_listed_kinds_of_mlps_are_those_of_the_layers():
    listed = ("sparse", "dense", "sparse")
    seen = 0
    for family in all_families():
        fields = {field.name for field in dataclasses.fields(family.config)}
        if "mlp_layer_types" in fields and "num_hidden_layers" in fields:
            config = object.__new__(family.config)
            for name, value in {
                "mlp_layer_types": listed,
                "first_k_dense_replace": 0,
                "num_experts": 4,
            }.items():
                object.__setattr__(config, name, value)
            assert [config.is_sparse(i) for i in range(3)] == [True, False, True], family.model_type
            seen += 1
    assert seen > 3
