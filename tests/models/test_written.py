"""config.json of models that were made in code: complete, in Hugging Face's keys, and read as the same settings."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import maxjax
from maxjax.errors import UserInputError
from maxjax.models import Llama, LlamaConfig, Mamba2Config, MambaConfig, find_family
from maxjax.models.bert import BertConfig, BertForSequenceClassification, BertModel
from maxjax.models.find import text_of
from maxjax.models.llama4 import Llama4Config
from maxjax.models.modernbert_decoder import ModernBertDecoder, ModernBertDecoderConfig
from maxjax.models.parts import LanguageModelConfig
from maxjax.models.parts.aliases import Alias
from maxjax.models.registry import all_families
from maxjax.models.written import config_of, written
from tests.models.decoders import SMALL
from tests.models.families import draws
from tests.models.families.cases import every
from tests.models.test_encoders import CASES as ENCODERS
from tests.models.test_encoders import each, oracle_of
from tests.oracles.models import opened
from tests.oracles.recorded import transformers

# Spellings of RoPE that transformers reads and no longer writes, and keys that other releases have.
OLDER = {
    "rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "rotary_pct", "rotary_emb_base",
    "global_rope_theta", "local_rope_theta", "sliding_window_pattern", "head_dim", "position_embedding_type",
    "share_att_key", "position_buckets", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "global_head_dim",
    "num_global_key_value_heads",
}  # fmt: skip
# Without an effect there: Mamba has no positions, and no layer of Qwen 3.5's experts has this MLP.
BESIDE = {(kind, "max_position_embeddings") for kind in ("mamba", "falcon_mamba", "mamba2")}
BESIDE |= {("qwen3_5_moe_text", "intermediate_size")}
FIRST = list({case.family: case for case in reversed(every())}.values())
EACH = pytest.mark.parametrize("case", FIRST, ids=[case.family for case in FIRST])


def same_settings(raw, known):
    """Asserts that what is written for a file's settings is read as these, and has no unknown key."""
    config = find_family(raw).config.from_dict(text_of(raw, None))
    found = json.loads(json.dumps(written(config)))
    assert type(config).from_dict(found) == config
    kind = type(config).model_type
    assert {key for key in found.keys() - known - OLDER if (kind, key) not in BESIDE} == set()


@EACH
def test_settings_of_a_decoder_come_back(case):
    told = case.model().config
    raw = {"architectures": [case.kind], **json.loads(json.dumps(told.settings))}
    same_settings(raw, {*vars(told)})


def test_every_family_of_decoders_is_among_them():
    families = {
        one.model_type for one in all_families() if issubclass(one.config, LanguageModelConfig)
    }
    assert families - {case.family for case in FIRST} == {
        "kimi_k2"
    }  # a DeepSeek V3 by another name


@each()
def test_settings_of_an_encoder_come_back(kind, config, settings):
    told = oracle_of(kind, config, settings).config
    same_settings({**told.settings, "architectures": [kind]}, {*vars(told)})


@pytest.mark.parametrize("name", draws.names())
def test_settings_of_the_defaults_come_back(name):
    """Of a class of ours with nothing but sizes, as a user writes it."""
    family = next(one for one in all_families() if one.model_type == name)
    sizes = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_kv_shared_layers": 0,
        "rotary_dim": 4,
    }
    # GPT-2, for example, has n_embd.
    aliases = {key: getattr(family.config, key, None) for key in sizes}
    spelled = {key: one.name if isinstance(one, Alias) else key for key, one in aliases.items()}
    sizes = {spelled[key]: value for key, value in sizes.items()}
    fields = {
        one.name for one in dataclasses.fields(family.config) if not one.metadata.get("constant")
    }
    config = family.config(**{key: value for key, value in sizes.items() if key in fields})
    assert family.config.from_dict(json.loads(json.dumps(written(config)))) == config


def test_a_model_made_in_code_is_saved_and_loaded(tmp_path):
    config = LlamaConfig(
        96, 16, 24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    model = maxjax.init(Llama(config), jax.random.key(0))
    maxjax.save_pretrained(model, tmp_path)
    again, _ = maxjax.load(tmp_path)
    assert type(again) is Llama and again.config == model.config
    theirs = model.raw_state_dict()
    for name, weight in again.raw_state_dict().items():
        np.testing.assert_array_equal(weight.value, theirs[name].value)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLM"] and raw["dtype"] == "float32"
    assert raw["eos_token_id"] is None  # transformers' default would be 2


def test_its_steps_are_loaded_as_well(tmp_path):
    model = maxjax.init(
        Llama(LlamaConfig(96, 16, 24, num_hidden_layers=2, num_attention_heads=4)),
        jax.random.key(0),
    )
    maxjax.checkpoint.save(tmp_path, model)
    assert maxjax.load(tmp_path)[0].config == model.config


@pytest.mark.parametrize("head", [True, False])
def test_labels_of_a_classifier(tmp_path, head):
    config = BertConfig(99, 16, 24, num_hidden_layers=1, num_attention_heads=2, num_labels=3)
    kind = BertForSequenceClassification if head else BertModel
    model = maxjax.init(kind(config), jax.random.key(0))
    maxjax.save_pretrained(model, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == ["BertForSequenceClassification" if head else "BertModel"]
    assert raw["id2label"] == {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}
    again, _ = maxjax.load(tmp_path)
    assert type(again) is kind and again.task == ("classify" if head else None)
    assert again.config == config


def test_a_decoder_with_a_classification_head(tmp_path):
    model = Llama(LlamaConfig(96, 16, 24, num_hidden_layers=2, num_attention_heads=4))
    model.make_score(5, maxjax.DType.float32)
    maxjax.save_pretrained(maxjax.init(model, jax.random.key(0)), tmp_path)
    again, _ = maxjax.load(tmp_path)
    assert again.score.weight.shape == [5, 16] and again.lm_head is None


@pytest.mark.parametrize(
    "model, says",
    [
        (
            lambda: Llama(dataclasses.replace(SETTINGS, attention_out_bias=True)),
            "says attention_out_bias=",
        ),
        (
            lambda: Llama(Mine(96, 16, 24, num_hidden_layers=2, num_attention_heads=4)),
            "for a Llama: expected a LlamaConfig .* got a Mine",
        ),
    ],
)  # fmt: skip
def test_what_no_file_can_say_is_refused_before_anything_is_saved(tmp_path, model, says):
    model = maxjax.init(model(), jax.random.key(0))
    with pytest.raises(UserInputError, match=says):
        maxjax.save_pretrained(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    maxjax.save_pretrained(model, tmp_path / "new", config={"model_type": "mine"})
    maxjax.checkpoint.save(tmp_path / "steps", model)


SETTINGS = LlamaConfig(96, 16, 24, num_hidden_layers=2, num_attention_heads=4)


@dataclasses.dataclass(frozen=True)
class Mine(LlamaConfig):
    more: int = 3


def test_a_registered_family_of_ones_own_writes_its_keys():
    config = maxjax.models.Olmo2Config(96, 16, 24, num_hidden_layers=2, num_attention_heads=4)
    mine = dataclasses.make_dataclass(
        "Own", [("depth", int, maxjax.models.config.config_field(4, key="my_depth"))],
        bases=(type(config),), namespace={"model_type": "own"}, frozen=True,
    )  # fmt: skip
    family = maxjax.models.Family.of(type("Own", (maxjax.models.Olmo2,), {}), mine)
    model = type("Own", (maxjax.models.Olmo2,), {"family": family})(
        mine(96, 16, 24, num_hidden_layers=2, num_attention_heads=4, depth=7)
    )
    found = config_of(model)
    assert (found["model_type"], found["my_depth"], found["architectures"]) == (
        "own",
        7,
        ["OwnForCausalLM"],
    )


def test_keys_have_the_types_that_transformers_reads():
    """Integers where it refuses null and fractions, and no multiple of the hidden size that it has by default."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2}
    decoder = ModernBertDecoder(ModernBertDecoderConfig(96, 16, 24, **sizes))
    found = config_of(decoder, {"pad_token_id": None, "bos_token_id": 3})
    assert (found["pad_token_id"], found["bos_token_id"], found["eos_token_id"]) == (-1, 3, None)
    assert type(written(Llama4Config(96, 16, 24, **sizes))["floor_scale"]) is int
    assert written(Mamba2Config(hidden_size=16, num_heads=24, head_dim=2))["expand"] == 3
    assert written(MambaConfig(hidden_size=16, intermediate_size=48))["expand"] == 3
    assert "pad_token_id" not in config_of(
        BertModel(BertConfig(96, 16, 24, **sizes)), {"pad_token_id": None}
    )


@pytest.mark.extra
@pytest.mark.oracle
@pytest.mark.parametrize("case", every(), ids=str)
def test_transformers_reads_the_settings_that_are_written(case):
    """Also its classes whose keys have types, and which check that keys agree."""
    settings = case.settings if case.is_whole else {**SMALL, **case.settings}
    kind = getattr(transformers, case.config)
    told = kind.from_dict(json.loads(json.dumps(settings)))
    raw = {"architectures": [case.kind], **json.loads(told.to_json_string(use_diff=False))}
    family = find_family(raw)
    config = family.config.from_dict(text_of(raw, None))
    found = kind.from_dict(json.loads(json.dumps({**config.special, **written(config)})))
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings"):
        assert getattr(found, key, None) == getattr(told, key, None)


@pytest.mark.extra
@pytest.mark.oracle
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", draws.names())
def test_transformers_opens_what_is_written(tmp_path, name, seed):
    """Tensors, settings and logits of a drawn configuration, which a model of ours has."""
    from scripts.random_decoders import generator

    drawn = draws.draw(name, generator(name, seed))
    theirs = drawn.case.model(tmp_path / "theirs", seed)
    model, _ = maxjax.load(tmp_path / "theirs")
    model.hf_config = None  # as if it had been made in code
    opens(model, tmp_path / "ours", theirs, drawn.case.kind)


@pytest.mark.extra
@pytest.mark.oracle
@pytest.mark.parametrize("name, kind, config, settings", ENCODERS, ids=lambda v: str(v)[:20])
def test_transformers_opens_an_encoder(tmp_path, name, kind, config, settings):
    theirs = oracle_of(kind, config, settings)
    theirs.save(tmp_path / "theirs")
    model, _ = maxjax.load(tmp_path / "theirs")
    model.hf_config = None
    opens(model, tmp_path / "ours", theirs, kind)


def opens(model, folder, theirs, kind):
    """Asserts that transformers computes the same of a saved model, and that maxjax loads it."""
    import torch

    maxjax.save_pretrained(model, folder)
    assert maxjax.load(folder)[0].config == model.config
    raw = json.loads((folder / "config.json").read_text())
    kind = raw["architectures"][0] if hasattr(transformers, raw["architectures"][0]) else kind
    found, told = opened(kind, folder, output_loading_info=True)
    lacks = {key for key in told["missing_keys"] if "pooler" not in key}
    assert not lacks and not told["unexpected_keys"] and not told["mismatched_keys"]
    ids = torch.arange(12)[None] % model.config.vocab_size
    with torch.no_grad():
        pair = [one(ids, output_hidden_states=True) for one in (found, theirs.live())]
    for a, b in zip(*(one.hidden_states for one in pair), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-4 * max(1.0, float(b.abs().max())))
