"""Every encoder against transformers: states of ragged rows, scores, positions, files, meshes."""

import jax
import numpy as np
import pytest
import safetensors.numpy

import maxjax
from maxjax.errors import CheckpointFormatError, UnsupportedModelError
from maxjax.graph.weights import load_weights
from maxjax.models import build, find_family
from maxjax.models.deberta_v2 import DebertaV2Config, DebertaV2Model
from maxjax.models.mpnet import MPNetConfig, MPNetModel
from maxjax.models.pooling import pool
from maxjax.nn.attention.both_ways import both_ways
from tests.oracles.models import OracleModel
from tests.oracles.recorded import torch

SMALL = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 37, "max_position_embeddings": 60,
}  # fmt: skip
_DISTIL = {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 37,
           "max_position_embeddings": 60}  # fmt: skip
_MODERN = {"pad_token_id": 0, "num_hidden_layers": 4, "local_attention": 8}
_DEBERTA = {"relative_attention": True, "max_relative_positions": -1, "norm_rel_ebd": "layer_norm",
            "position_biased_input": False, "pos_att_type": ["p2c", "c2p"]}  # fmt: skip
# The first of each kind is in the default set.
CASES = [
    ("roberta", "RobertaModel", "RobertaConfig", {"type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    ("roberta", "RobertaModel", "RobertaConfig", {"hidden_act": "gelu_new", "num_attention_heads": 2}),
    ("roberta", "RobertaModel", "RobertaConfig", {"pad_token_id": 5, "hidden_size": 24}),
    ("xlm-roberta", "XLMRobertaForSequenceClassification", "XLMRobertaConfig",
     {"type_vocab_size": 1, "num_labels": 1}),
    ("xlm-roberta", "XLMRobertaModel", "XLMRobertaConfig", {"layer_norm_eps": 1e-5}),
    ("xlm-roberta", "XLMRobertaForMaskedLM", "XLMRobertaConfig", {"pad_token_id": 0}),
    ("mpnet", "MPNetModel", "MPNetConfig", {}),
    ("mpnet", "MPNetForSequenceClassification", "MPNetConfig", {"num_labels": 3}),
    ("mpnet", "MPNetForMaskedLM", "MPNetConfig", {"hidden_act": "relu", "num_hidden_layers": 1}),
    ("distilbert", "DistilBertForSequenceClassification", "DistilBertConfig", _DISTIL | {"num_labels": 1}),
    ("distilbert", "DistilBertModel", "DistilBertConfig", _DISTIL | {"activation": "relu"}),
    ("distilbert", "DistilBertForMaskedLM", "DistilBertConfig", _DISTIL | {"sinusoidal_pos_embds": True}),
    ("modernbert", "ModernBertModel", "ModernBertConfig",
     _MODERN | {"attention_bias": True, "mlp_bias": True, "norm_bias": True}),
    ("modernbert", "ModernBertForSequenceClassification", "ModernBertConfig",
     _MODERN | {"classifier_pooling": "mean", "classifier_bias": True, "num_labels": 1}),
    ("modernbert", "ModernBertModel", "ModernBertConfig",
     _MODERN | {"local_attention": 6,
                "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]}),
    ("modernbert", "ModernBertForMaskedLM", "ModernBertConfig", _MODERN | {"local_attention": 40}),
    ("nomic_bert", "NomicBertModel", "NomicBertConfig", {}),
    ("nomic_bert", "NomicBertForSequenceClassification", "NomicBertConfig", {"num_labels": 1}),
    ("nomic_bert", "NomicBertForMaskedLM", "NomicBertConfig",
     {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}, "type_vocab_size": 1}),
    ("gte", "GteModel", "GteConfig", {"type_vocab_size": 0}),
    ("gte", "GteForSequenceClassification", "GteConfig", {"num_labels": 1}),
    ("gte", "GteForMaskedLM", "GteConfig",
     {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}}),
    ("jina", "JinaEmbeddingsV3Model", "JinaEmbeddingsV3Config", {}),
    ("jina", "JinaEmbeddingsV3ForSequenceClassification", "JinaEmbeddingsV3Config", {"num_labels": 1}),
    ("jina", "JinaEmbeddingsV3ForMaskedLM", "JinaEmbeddingsV3Config", {"hidden_act": "relu"}),
    ("camembert", "CamembertForSequenceClassification", "CamembertConfig", {"type_vocab_size": 1}),
    ("camembert", "CamembertForMaskedLM", "CamembertConfig", {"hidden_act": "relu"}),
    ("camembert", "CamembertModel", "CamembertConfig", {"layer_norm_eps": 1e-5}),
    ("electra", "ElectraForSequenceClassification", "ElectraConfig", {"embedding_size": 12, "num_labels": 1}),
    ("electra", "ElectraModel", "ElectraConfig", {"embedding_size": 32, "hidden_act": "relu"}),
    ("electra", "ElectraForPreTraining", "ElectraConfig", {"embedding_size": 40, "layer_norm_eps": 1e-5}),
    ("albert", "AlbertForSequenceClassification", "AlbertConfig",
     {"embedding_size": 12, "num_hidden_layers": 3, "num_hidden_groups": 2, "inner_group_num": 2}),
    ("albert", "AlbertModel", "AlbertConfig", {"embedding_size": 32, "num_hidden_layers": 3}),
    ("albert", "AlbertForMaskedLM", "AlbertConfig", {"embedding_size": 40, "hidden_act": "gelu"}),
    ("deberta", "DebertaV2ForSequenceClassification", "DebertaV2Config",
     _DEBERTA | {"position_buckets": 6, "share_att_key": True, "num_labels": 3}),
    ("deberta", "DebertaV2Model", "DebertaV2Config",
     _DEBERTA | {"position_biased_input": True, "type_vocab_size": 2, "norm_rel_ebd": "none"}),
    ("deberta", "DebertaV2ForMaskedLM", "DebertaV2Config",
     _DEBERTA | {"pos_att_type": ["p2c"], "position_buckets": 8, "max_relative_positions": 20}),
]  # fmt: skip
call = jax.jit(lambda model, *arrays, **named: model(*arrays, **named))


def drawn(rng, name, shape):
    """Values of a tensor; ones and zeros would hide a mistake."""
    is_norm = any(part in name.lower() for part in ("norm", "_ln", "emb_ln")) and name.endswith(
        "weight"
    )
    return 0.3 * rng.standard_normal(shape) + is_norm


def each():
    seen, found = set(), []
    for number, (name, *rest) in enumerate(CASES):
        marks = [pytest.mark.extra] if name in seen else []
        seen.add(name)
        found.append(pytest.param(*rest, marks=marks, id=f"{name}-{number}"))
    return pytest.mark.parametrize("kind, config, settings", found)


def oracle_of(kind, config, settings):
    settings = settings if "dim" in settings else SMALL | settings
    return OracleModel(kind, config, settings, draw=drawn, file="families.encoders")


def loaded(directory):
    weights = load_weights(directory)
    model = build(weights)
    model.load_state_dict(weights)
    return model


def inputs(model, lengths=(40, 27, 3)):
    rng = np.random.default_rng(0)
    pad = getattr(model.config, "pad_token_id", 1 if "MPNet" in type(model).__name__ else 0)
    mask = (np.arange(max(lengths))[None] < np.array(lengths)[:, None]).astype(np.int32)
    ids = rng.integers(6, 99, mask.shape)
    return np.where(mask, ids, pad).astype(np.int32), mask


def answer_of(ids, mask):
    def answer(model):
        base = getattr(model, model.base_model_prefix, model)
        arrays = {
            "input_ids": torch.tensor(ids).long(),
            "attention_mask": torch.tensor(mask).long(),
        }
        with torch.no_grad():
            states = base(**arrays).last_hidden_state.numpy()
            has_scores = "SequenceClassification" in type(model).__name__
            return [states, model(**arrays).logits.numpy() if has_scores else None]

    return answer


@pytest.mark.sampled(7)
@each()
def test_states_scores_and_files(tmp_path, kind, config, settings):
    oracle = oracle_of(kind, config, settings)
    oracle.save(tmp_path / "a")
    model = loaded(tmp_path / "a")
    ids, mask = inputs(model)
    states, logits = oracle.ask("states", answer_of(ids, mask))
    found = call(model, ids, mask).last_hidden_state
    real = mask.astype(bool)
    np.testing.assert_allclose(found[real], states[real], rtol=1e-4, atol=1e-4)
    if logits is not None:
        scores = jax.jit(lambda m, x, k: m.scores(pool(x, k, (m.head_pooling,))))(
            model, found, mask
        )
        np.testing.assert_allclose(scores, logits, rtol=1e-4, atol=1e-4)
    # Texts laid end to end in a row see themselves only, and count positions of their own.
    rows, seen, places = packed(ids, mask)
    beside = call(
        model, rows, seen, position_ids=model.position_ids(rows, places)
    ).last_hidden_state
    np.testing.assert_allclose(beside[0, : real.sum()], states[real], rtol=1e-4, atol=1e-4)
    maxjax.save_pretrained(model, tmp_path / "b")
    written = safetensors.numpy.load_file(tmp_path / "b" / "model.safetensors")
    # A head that the model does not have keeps its name in the file; the model's own may lose the prefix.
    name_of = model.family.names.model_name
    written = {name_of(name) or name: array for name, array in written.items()}
    read = {name_of(name) or name: array for name, array in oracle.tensors.items()}
    assert written.keys() == read.keys()
    for name, array in written.items():
        np.testing.assert_array_equal(array, read[name], err_msg=name)


def packed(ids, mask):
    """The texts of several rows end to end in one row, with what each token sees and its place."""
    parts = [row[:n] for row, n in zip(ids, mask.sum(1), strict=True)]
    numbers = np.concatenate([np.full(len(p), i) for i, p in enumerate(parts)])[None]
    places = np.concatenate([np.arange(len(p)) for p in parts])[None].astype(np.int32)
    return np.concatenate(parts)[None], numbers[:, :, None] == numbers[:, None, :], places


@pytest.mark.extra
@pytest.mark.oracle
@pytest.mark.parametrize("number", range(len(CASES)))
def test_meshes_and_what_transformers_opens(tmp_path, number):
    from tests.oracles.models import opened

    _, kind, config, settings = CASES[number]
    oracle = oracle_of(kind, config, settings)
    oracle.save(tmp_path / "a")
    model = loaded(tmp_path / "a")
    ids, mask = inputs(model, (40, 27, 3, 9))
    states, _ = answer_of(ids, mask)(oracle.live())
    real = mask.astype(bool)
    for axes in ({"model": 4}, {"data": 2, "model": 2, "fsdp": 2}):
        split, _ = maxjax.load(tmp_path / "a", mesh=maxjax.make_mesh(**axes), tokenizer=False)
        found = np.asarray(call(split, ids, mask).last_hidden_state)
        np.testing.assert_allclose(found[real], states[real], rtol=1e-4, atol=1e-4)
    if "MaskedLM" not in kind:
        maxjax.save_pretrained(model, tmp_path / "b")
        again, _ = answer_of(ids, mask)(opened(kind, tmp_path / "b"))
        np.testing.assert_allclose(again[real], states[real], rtol=1e-5, atol=1e-5)


def test_mpnets_mlps_are_split_over_a_mesh():
    config = MPNetConfig(64, 16, 32, num_hidden_layers=1, num_attention_heads=2)
    weights = MPNetModel(config).to(maxjax.make_mesh(model=2)).raw_state_dict()
    names = ("intermediate.dense.weight", "output.dense.weight")
    specs = [tuple(weights[f"encoder.layer.0.{name}"].sharding.spec) for name in names]
    assert specs == [("model", None), (None, "model")]


@pytest.mark.parametrize("length, window", [(4, 1), (40, 3), (21, 5)])
def test_windows_in_blocks_are_windows(length, window):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, length, 2, 4)).astype(np.float32) for _ in range(3))
    mask = np.arange(length)[None] < np.array([[length], [length - 2]])
    found = jax.jit(both_ways, static_argnums=4)(q, k, v, mask, window)
    far = np.abs(np.arange(length)[:, None] - np.arange(length)[None]) > window
    scores = np.einsum("bthd,bshd->bhts", q, k) / 2
    scores = np.where(far[None, None] | ~mask[:, None, None], -1e9, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)
    real = np.broadcast_to(mask[..., None, None], expected.shape)
    np.testing.assert_allclose(np.asarray(found)[real], expected[real], rtol=1e-4, atol=1e-5)


# --- configurations -------------------------------------------------------------------------

NOMIC = {
    "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "vocab_size": 99, "n_embd": 32,
    "n_head": 4, "n_layer": 2, "n_inner": 48, "n_positions": 8192, "activation_function": "swiglu",
    "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False, "rotary_scaling_factor": None, "max_trained_positions": 2048,
    "prenorm": False, "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False,
    "type_vocab_size": 2, "use_rms_norm": False,
}  # fmt: skip
GTE = SMALL | {
    "architectures": ["NewModel"], "model_type": "new", "max_position_embeddings": 8192,
    "rope_theta": 20000, "rope_scaling": {"type": "ntk", "factor": 8.0}, "type_vocab_size": 1,
    "position_embedding_type": "rope", "layer_norm_type": "layer_norm", "pack_qkv": True,
}  # fmt: skip
JINA = SMALL | {
    "architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "type_vocab_size": 1,
    "position_embedding_type": "rotary", "rotary_emb_base": 20000.0, "lora_adaptations": ["a"],
    "max_position_embeddings": 8194,
}  # fmt: skip


def read(raw):
    family = find_family(raw)
    return family, family.config.from_dict(raw, path="config.json")


def test_published_configurations(caplog):
    _, nomic = read(NOMIC)
    assert (nomic.hidden_size, nomic.max_length, nomic.rope_parameters.theta, nomic.hidden_act) == (
        32, 8192, 1000.0, "silu"
    )  # fmt: skip
    _, longer = read(NOMIC | {"rotary_scaling_factor": 2})
    assert longer.rope_parameters.scaling.max_position_embeddings == 2048
    family, gte = read(GTE)
    # The rule of GTE's own code: another base, and all frequencies divided.
    expected = 1 / (20000 * 8) ** (np.arange(0, 8, 2) / 8) / 8 ** (2 / 8)
    at = np.array([[1.0]], np.float32)
    cos, sin = gte.rope_parameters.cos_sin(jax.numpy.asarray(at), jax.numpy.asarray([1]), 8)
    np.testing.assert_allclose(np.arctan2(sin, cos)[0, 0], expected, rtol=1e-5)
    assert family.make(gte, [], jax.numpy.float32, jax.numpy.float32).max_length == 8192
    family, jina = read(JINA)
    assert (family.config.__name__, jina.max_length, jina.rope_parameters.theta) == (
        "JinaV3Config",
        8192,
        20000.0,
    )
    assert "task" in caplog.text
    name = "roberta.encoder.layers.0.mixer.Wqkv.parametrizations.weight.original"
    assert family.names.model_name(name) == "encoder.layers.0.mixer.Wqkv.weight"
    assert family.names.model_name(name.replace("original", "0.lora_A")) is None
    plain = {key: value for key, value in JINA.items() if key != "position_embedding_type"}
    assert find_family(plain).model_type == "xlm-roberta"


@pytest.mark.parametrize(
    "raw, error, named",
    [
        (NOMIC | {"prenorm": True}, UnsupportedModelError, "prenorm"),
        (NOMIC | {"num_experts": 8}, UnsupportedModelError, "num_experts"),
        (NOMIC | {"moe_every_n_layers": 2}, UnsupportedModelError, "moe_every_n_layers"),
        (NOMIC | {"activation_function": "gelu"}, UnsupportedModelError, "activation_function"),
        (NOMIC | {"n_head": 5}, CheckpointFormatError, "multiple"),
        (GTE | {"logn_attention_scale": True}, UnsupportedModelError, "logn_attention_scale"),
        (GTE | {"rope_scaling": {"type": "ntk", "factor": "8"}}, CheckpointFormatError, "factor"),
        (GTE | {"rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 0.5}}, UnsupportedModelError,
         "mixed_b"),
        (SMALL | {"model_type": "mpnet", "relative_attention_num_buckets": 16}, UnsupportedModelError,
         "relative_attention_num_buckets"),
        (SMALL | {"model_type": "roberta", "position_embedding_type": "relative_key"},
         UnsupportedModelError, "relative_key"),
        (SMALL | {"model_type": "roberta", "is_decoder": True}, UnsupportedModelError, "is_decoder"),
        (SMALL | {"model_type": "modernbert", "layer_types": ["full_attention"]}, CheckpointFormatError,
         "layer_types"),
        (SMALL | {"model_type": "modernbert", "global_attn_every_n_layers": 0}, CheckpointFormatError,
         "global_attn_every_n_layers"),
        (SMALL | {"model_type": "modernbert", "classifier_pooling": "max"}, CheckpointFormatError,
         "classifier_pooling"),
        (SMALL | {"model_type": "modernbert", "rope_parameters": [1]}, CheckpointFormatError,
         "rope_parameters"),
        (SMALL | {"model_type": "modernbert", "hidden_activation": "sine"}, CheckpointFormatError, "sine"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(raw, error, named):
    with pytest.raises(error, match=named):
        read(raw)


def test_the_pooler_of_deberta_has_the_activation_of_its_configuration():
    settings = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    settings |= {"num_attention_heads": 2, "relative_attention": True, "pos_att_type": "c2p"}
    for name in ("tanh", "gelu"):
        config = DebertaV2Config.from_dict(settings | {"pooler_hidden_act": name})
        assert DebertaV2Model(config, pooler=True).pooler.act == name
    with pytest.raises(CheckpointFormatError, match="pooler_hidden_act"):
        DebertaV2Config.from_dict(settings | {"pooler_hidden_act": "nothing"})
