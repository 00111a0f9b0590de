"""Family tables and PretrainedModel: from the names of a checkpoint to those of a model."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from maxjax.dtype import DType
from maxjax.errors import (
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointMissingError,
    UnsupportedModelError,
    UserInputError,
)
from maxjax.graph.weights import load_weights
from maxjax.models import (
    BertConfig,
    BertModel,
    Family,
    Llama,
    LlamaConfig,
    build,
    find_family,
)
from maxjax.models.bert import BERT
from maxjax.models.names import Drop, Names
from maxjax.models.parts import LanguageModelConfig, constant
from maxjax.models.pooling import Pooling

SIZES = {
    "vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip
CONFIG = {"architectures": ["BertModel"], "model_type": "bert", **SIZES}


def values(config=CONFIG, dtype=np.float32, pooler=True):
    """Random weights by their plain names."""
    rng = np.random.default_rng(0)
    model = BertModel(BertConfig.from_dict(config), "float32", pooler=pooler)
    return {
        name: rng.standard_normal([int(d) for d in weight.shape]).astype(dtype)
        for name, weight in model.raw_state_dict().items()
    }


def checkpoint(directory, tensors, config=CONFIG):
    save_file(tensors, directory / "model.safetensors")
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return directory


states = jax.jit(lambda model, ids: model(ids).last_hidden_state)


def run(model):
    return np.asarray(states(model, np.arange(6, dtype=np.int32).reshape(2, 3)))


# --- names ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", ["module.{}", "_orig_mod.module.{}"])
def test_names_of_a_wrapped_model(tmp_path, wrapped):
    plain = values()
    inner = {name.replace("layer.0.", "layer.0._orig_mod."): a for name, a in plain.items()}
    checkpoint(tmp_path, {wrapped.format(name): array for name, array in inner.items()})
    weights = load_weights(tmp_path)
    model = build(weights)
    model.load_state_dict(weights)
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(array, plain[name])


@pytest.mark.parametrize(
    "tensor, name",
    [
        ("embeddings.word_embeddings.weight",) * 2,
        ("bert.embeddings.word_embeddings.weight", "embeddings.word_embeddings.weight"),
        ("bert.bert.x", "bert.x"),
        ("bert.encoder.layer.0.output.LayerNorm.gamma", "encoder.layer.0.output.LayerNorm.weight"),
        ("embeddings.LayerNorm.beta", "embeddings.LayerNorm.bias"),
        ("gamma", "gamma"),
        ("embeddings.position_ids", None),
        ("bert.embeddings.position_ids", None),
        ("cls.predictions.decoder.weight", None),
        ("classifier.bias", None),
        ("cls", "cls"),
        ("embeddings.position_idsX", "embeddings.position_idsX"),
        ("embeddingsXposition_ids", "embeddingsXposition_ids"),
    ],
)
def test_names(tensor, name):
    assert BERT.names.model_name(tensor) == name


def test_two_tensors_for_one_weight_are_refused():
    with pytest.raises(CheckpointFormatError, match="'bert.x.weight' and 'x.weight'"):
        BERT.read({"bert.x.weight": 1, "x.weight": 2})


# --- loading --------------------------------------------------------------------------------


def test_prefixes_old_names_heads_and_counters_load_as_the_plain_file_does(tmp_path):
    plain = values()
    model = BertModel(BertConfig.from_dict(CONFIG))
    model.load_state_dict(plain)
    dressed = {
        "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma"): value
        for name, value in plain.items()
    }
    dressed["bert.embeddings.position_ids"] = np.arange(16)[None]
    dressed["cls.predictions.bias"] = np.ones(20, np.float32)
    weights = load_weights(checkpoint(tmp_path, dressed))
    other = build(weights)
    assert other.load_state_dict(weights) == ((), ())
    np.testing.assert_array_equal(run(other), run(model))
    assert list(other.state_dict()) == list(plain)


def test_what_does_not_fit_names_file_and_tensor(tmp_path):
    tensors = values()
    tensors["encoder.layer.0.output.dense.weight"] = np.ones((8, 11), np.float32)
    tensors["extra.weight"] = tensors.pop("pooler.dense.bias")
    weights = load_weights(checkpoint(tmp_path, tensors))
    with pytest.raises(CheckpointMismatchError) as caught:
        build(weights).load_state_dict(weights)
    for fact in ("encoder.layer.0.output.dense.weight", "11", "pooler.dense.bias", "extra.weight"):
        assert fact in str(caught.value)
    assert str(tmp_path) in caught.value.path


def test_a_plain_mapping_that_does_not_fit_is_a_value_error():
    with pytest.raises(ValueError, match="pooler.dense.bias"):
        BertModel(BertConfig.from_dict(CONFIG)).load_state_dict(values(pooler=False))


# --- build ----------------------------------------------------------------------------------


def test_build_is_lazy_and_finds_the_config_beside_the_weights(tmp_path):
    weights = load_weights(checkpoint(tmp_path, values()))
    for config in (None, CONFIG, tmp_path / "config.json", str(tmp_path / "config.json")):
        model = build(weights, config)
        assert all(weight.value is None for weight in model.raw_state_dict().values())
    in_file = load_weights(tmp_path / "model.safetensors")
    assert list(build(in_file).raw_state_dict()) == list(model.raw_state_dict())


def test_the_pooler_is_built_when_it_is_there(tmp_path):
    weights = load_weights(checkpoint(tmp_path, values(pooler=False)))
    model = build(weights)
    assert model.pooler is None
    model.load_state_dict(weights)
    found = jax.eval_shape(lambda m: m(np.zeros((1, 2), np.int32)), model)
    assert found.pooler_output is None


def test_dtypes_are_those_of_the_headers(tmp_path):
    tensors = values(dtype=np.float16)
    tensors["embeddings.LayerNorm.weight"] = np.ones(8, np.float32)
    weights = load_weights(checkpoint(tmp_path, tensors))
    model = build(weights)
    found = {name: weight.dtype for name, weight in model.raw_state_dict().items()}
    assert found.pop("embeddings.LayerNorm.weight") is DType.float32
    assert set(found.values()) == {DType.float16}
    model.load_state_dict(weights)
    assert model(np.zeros((1, 2), np.int32)).last_hidden_state.dtype == np.float16


def test_a_dtype_that_is_asked_for(tmp_path):
    weights = load_weights(checkpoint(tmp_path, values()))
    model = build(weights, dtype="bfloat16")
    found = {name: weight.dtype for name, weight in model.raw_state_dict().items()}
    norms = {name for name in found if "LayerNorm" in name}
    assert {found[name] for name in norms} == {DType.float32}
    assert {found[name] for name in found.keys() - norms} == {DType.bfloat16}
    with pytest.raises(CheckpointMismatchError, match="cast=True"):
        model.load_state_dict(weights)
    model.load_state_dict(weights, cast=True)
    pure = build(weights, dtype="bfloat16", reduce_dtype="bfloat16")
    assert {weight.dtype for weight in pure.raw_state_dict().values()} == {DType.bfloat16}


def test_integers_in_place_of_a_weight_do_not_fit(tmp_path):
    tensors = values()
    tensors["pooler.dense.weight"] = np.ones((8, 8), np.int32)
    weights = load_weights(checkpoint(tmp_path, tensors))
    with pytest.raises(CheckpointMismatchError, match="pooler.dense.weight"):
        build(weights).load_state_dict(weights)


# --- declarations ---------------------------------------------------------------------------


def test_a_family_of_a_class_has_its_names_and_another_like_it_has_its_files():
    class Mine(Llama):
        pass

    @dataclasses.dataclass(frozen=True)
    class MineConfig(LlamaConfig):
        model_type = "mine"
        attention_bias: bool = constant(True)

    family = Family.of(Mine, MineConfig, names=Names(Drop("extra.*")))
    assert family.architectures == ("MineForCausalLM", "MineModel")
    other = family.like(Llama, LlamaConfig, "Other", tied=("a", "b"))
    assert (other.model_type, other.architectures, other.tied) == ("llama", ("Other",), ("a", "b"))
    assert other.names.model_name("extra.weight") is None and other.make == Llama.of_checkpoint

    config = MineConfig.from_dict({**SIZES, "attention_bias": False})  # the file has no say
    assert config.attention_bias and type(family.make(config, (), DType.float32, None)) is Mine
    with pytest.raises(UserInputError, match="LanguageModelConfig has no model_type"):
        Family.of(Mine, LanguageModelConfig)


# --- which family ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["BertForMultipleChoice"]},
        {"architectures": ["BertModel"], "model_type": "bert"},
        {"model_type": "bert"},
        {"architectures": [], "model_type": "bert"},
        {"architectures": None, "model_type": "bert"},
    ],
)
def test_known_families(config):
    assert find_family(config) is BERT


@pytest.mark.parametrize(
    "config, named",
    [
        ({"architectures": ["XLNetLMHeadModel"], "model_type": "xlnet"}, "XLNetLMHeadModel"),
        ({"architectures": ["JinaBertModel"], "model_type": "bert"}, "JinaBertModel"),
        ({"model_type": "xlnet"}, "xlnet"),
    ],
)
def test_unknown_ones_are_named_in_a_short_message(config, named):
    with pytest.raises(UnsupportedModelError, match=named) as caught:
        find_family(config, path="some/config.json")
    said = str(caught.value)
    assert "some/config.json" in said and "families()" in said and "docs/families.md" in said
    assert len(said) <= 300
    if named == "JinaBertModel":
        assert "The nearest is 'bert' (BertModel)" in said
    assert isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize(
    "name, nearest",
    [
        ("qwen4_omni_moe", "'qwen3_moe' (qwen3_moe)"),
        ("Qwen4OmniMoeForConditionalGeneration", "'qwen3_moe' (Qwen3MoeForCausalLM)"),
        ("Qwen2ForTokenClassification", "'qwen2' (Qwen2ForCausalLM)"),
        ("Gemma4ForTokenClassification", "'gemma4_text' (Gemma4ForCausalLM)"),
        ("DeepseekV4ForCausalLM", "'deepseek_v3' (DeepseekV3ForCausalLM)"),
        ("glm_moe_dsa", "'glm4_moe' (glm4_moe)"),
        ("GPTSw3ForCausalLM", "'gpt2' (GPT2LMHeadModel)"),
        ("LamaForCausalLM", "'llama' (LlamaForCausalLM)"),
        ("T5ForConditionalGeneration", None),
        ("PixtralForConditionalGeneration", None),
        ("ForCausalLM", None),
    ],
)
def test_the_nearest_family_is_of_the_same_name_and_kind(name, nearest):
    key = "model_type" if name.islower() else "architectures"
    with pytest.raises(UnsupportedModelError) as caught:
        find_family({key: name if name.islower() else [name]})
    said = str(caught.value)
    assert f"The nearest is {nearest}." in said if nearest else "nearest" not in said


@pytest.mark.parametrize(
    "config", [{}, {"architectures": "BertModel"}, {"architectures": [3]}, {"model_type": 3}]
)
def test_configurations_that_do_not_say(config):
    with pytest.raises(CheckpointFormatError, match="architectures|model_type"):
        find_family(config)


@pytest.mark.parametrize(
    "change, error",
    [
        ({"num_attention_heads": 3}, CheckpointFormatError),
        ({"hidden_act": "glu"}, CheckpointFormatError),
        ({"position_embedding_type": "relative_key"}, UnsupportedModelError),
        ({"is_decoder": True}, UnsupportedModelError),
        ({"vocab_size": None}, CheckpointFormatError),
    ],
)
def test_settings_that_bert_does_not_take(tmp_path, change, error):
    weights = load_weights(checkpoint(tmp_path, values(), {**CONFIG, **change}))
    with pytest.raises(error, match=next(iter(change))):
        build(weights)


def test_no_config(tmp_path):
    weights = load_weights(checkpoint(tmp_path, values(), config=None))
    with pytest.raises(CheckpointMissingError, match="config.json"):
        build(weights)


def test_a_head_that_is_not_loaded_is_named(tmp_path, caplog):
    head = {
        "classifier.weight": np.ones((3, 8), np.float32),
        "classifier.bias": np.ones(3, np.float32),
    }
    more = {"bert.embeddings.position_ids": np.arange(16)[None]}
    with load_weights(checkpoint(tmp_path, {**values(), **head, **more})) as weights:
        build(weights).load_state_dict(weights)
    [record] = caplog.records
    assert "no such head: classifier.bias, classifier.weight" in record.getMessage()
    assert "position_ids" not in record.getMessage()


def test_a_program_runs_on_when_settings_change_that_no_call_reads(tmp_path):
    with load_weights(checkpoint(tmp_path, values())) as weights:
        model = build(weights)
        model.load_state_dict(weights)
    ids = np.ones((1, 3), np.int32)
    program = model.compile(ids)
    before = np.asarray(program(ids).last_hidden_state)
    model.pooling = Pooling(normalize=True)
    np.testing.assert_array_equal(program(ids).last_hidden_state, before)
    model.other = 1
    with pytest.raises(ValueError, match="attributes of BertModel"):
        program(ids)
