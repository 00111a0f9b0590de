"""The heads of encoders against transformers: masked words, tokens, answers and texts; their files, in every form."""

import json

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import maxjax
from maxjax.errors import CheckpointFormatError, CheckpointMismatchError, UserInputError
from maxjax.models import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    DistilBertConfig,
    DistilBertForQuestionAnswering,
    DistilBertForSequenceClassification,
    EncoderConfig,
    GteConfig,
    GteForSequenceClassification,
    Llama,
    LlamaConfig,
    NomicBertConfig,
    NomicBertForMaskedLM,
    NomicBertForSequenceClassification,
    RobertaConfig,
    all_families,
)
from maxjax.models.deberta_v2 import DebertaV3ForMaskedLM
from maxjax.models.gguf.config.read import read_classifier
from maxjax.models.gguf.metadata import settings as gguf_settings
from tests.oracles.models import OracleModel, opened
from tests.oracles.recorded import torch

WEIGHTS = "model.safetensors"
SMALL = {
    "vocab_size": 41, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 21, "max_position_embeddings": 20,
}  # fmt: skip
DISTIL = {
    "vocab_size": 41,
    "dim": 16,
    "n_layers": 1,
    "n_heads": 2,
    "hidden_dim": 21,
    "max_position_embeddings": 20,
}
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
# Settings of each family, and what they are for a head of masked words in a second case.
FAMILIES = {
    "Bert": (SMALL, {"hidden_act": "relu"}),
    "Roberta": (SMALL | {"type_vocab_size": 1}, {"hidden_act": "relu"}),
    "XLMRoberta": (SMALL | {"pad_token_id": 1}, {}),
    "Camembert": (SMALL, {}),
    "Electra": (SMALL | {"embedding_size": 8}, {"hidden_act": "relu"}),
    "DistilBert": (DISTIL, {"activation": "relu"}),
    "MPNet": (SMALL, {}),
    "Albert": (SMALL | {"embedding_size": 8}, {"hidden_act": "relu"}),
    "DebertaV2": (SMALL | DEBERTA, {"hidden_act": "relu"}),
    "ModernBert": (
        SMALL | {"pad_token_id": 0, "local_attention": 4},
        {"norm_bias": True, "classifier_bias": True, "classifier_activation": "relu", "decoder_bias": False},
    ),
    "NomicBert": (SMALL, {}),
    "Gte": (SMALL, {}),
    "JinaEmbeddingsV3": (SMALL, {}),
}  # fmt: skip
TASKS = {
    "MaskedLM": "fill-mask", "TokenClassification": "tag", "QuestionAnswering": "answer",
    "SequenceClassification": "classify",
}  # fmt: skip
NO_ANSWERS = ("NomicBert", "Gte")
CASES = [
    (family, head, settings | ({"num_labels": 3} if "Classification" in head else {}))
    for family, (settings, _) in FAMILIES.items()
    for head in TASKS
    if head != "QuestionAnswering" or family not in NO_ANSWERS
]
CASES += [
    (family, "MaskedLM", settings | other | {"tie_word_embeddings": False})
    for family, (settings, other) in FAMILIES.items()
]
CASES += [("Electra", "PreTraining", FAMILIES["Electra"][0]), ("Bert", "PreTraining", SMALL),
          ("Albert", "PreTraining", FAMILIES["Albert"][0]),
          ("DebertaV2", "MaskedLM", FAMILIES["DebertaV2"][0] | {"legacy": False}),
          ("ModernBert", "SequenceClassification",
           FAMILIES["ModernBert"][0] | {"classifier_pooling": "mean"})]  # fmt: skip
call = jax.jit(lambda model, *arrays: model(*arrays))


def each():
    """All cases; in the default set is a head for masked words of each family, and one of each of the others."""
    found, seen = [], set()
    for number, (family, head, settings) in enumerate(CASES):
        usual = family if head == "MaskedLM" else head
        marks = [pytest.mark.extra] if usual in seen else []
        seen.add(usual)
        found.append(
            pytest.param(family, head, settings, marks=marks, id=f"{family}-{head}-{number}")
        )
    return pytest.mark.parametrize("family, head, settings", found)


def drawn(rng, name, shape):
    """Values of a tensor; ones and zeros would hide a mistake."""
    is_norm = any(part in name.lower() for part in ("norm", "_ln")) and name.endswith("weight")
    return 0.2 * rng.standard_normal(shape) + is_norm


def oracle_of(family, head, settings):
    return OracleModel(
        f"{family}For{head}", f"{family}Config", settings, draw=drawn, file="families.heads"
    )


def inputs(model):
    rng, lengths = np.random.default_rng(0), np.array([9, 5])
    pad = getattr(model.config, "pad_token_id", 1 if "MPNet" in type(model).__name__ else 0)
    mask = (np.arange(9)[None] < lengths[:, None]).astype(np.int32)
    ids = rng.integers(6, 41, mask.shape)
    return np.where(mask, ids, pad).astype(np.int32), mask


def logits_of(ids, mask):
    def answer(model):
        with torch.no_grad():
            out = model(
                input_ids=torch.tensor(ids).long(), attention_mask=torch.tensor(mask).long()
            )
        names = ("start_logits", "end_logits", "prediction_logits", "logits")
        return [getattr(out, name).numpy() for name in names if hasattr(out, name)]

    return answer


def same(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@each()
def test_logits_and_files_are_those_of_transformers(tmp_path, family, head, settings):
    oracle = oracle_of(family, head, settings)
    oracle.save(tmp_path / "a")
    model, _ = maxjax.load(tmp_path / "a", tokenizer=False)
    ids, mask = inputs(model)
    expected = oracle.ask("logits", logits_of(ids, mask))
    out = call(model, ids, mask)
    found = [one for one in (out.start_logits, out.end_logits, out.logits) if one is not None]
    assert len(found) == len(expected) and all(one.dtype == jnp.float32 for one in found)
    real = np.ones(2, bool) if head == "SequenceClassification" else mask.astype(bool)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        same(np.asarray(one)[real], other[real])
    usual = "detect" if family == "Electra" else "fill-mask"
    assert model.task == TASKS.get(head, usual)
    maxjax.save_pretrained(model, tmp_path / "b")
    written = safetensors.numpy.load_file(tmp_path / "b" / WEIGHTS)
    assert written.keys() == oracle.tensors.keys()
    for name, array in written.items():
        # Beside a decoder with a weight and a bias of its own, transformers has another bias without an effect.
        twin = f"{name.removesuffix('bias')}decoder.bias"
        name = twin if name.endswith(".bias") and twin in oracle.tensors else name
        assert array.tobytes() == oracle.tensors[name].tobytes(), name
    configs = [json.loads((tmp_path / one / "config.json").read_text()) for one in "ab"]
    assert configs[0] == configs[1]


@pytest.mark.extra
@pytest.mark.oracle
@each()
def test_transformers_opens_what_is_saved(tmp_path, family, head, settings):
    """Of models that were loaded, on one device and on meshes, and of models that were made in code."""
    oracle, kind = oracle_of(family, head, settings), f"{family}For{head}"
    oracle.save(tmp_path / "a")
    model, _ = maxjax.load(tmp_path / "a", tokenizer=False)
    ids, mask = inputs(model)
    expected = logits_of(ids, mask)(oracle.live())
    real = np.ones(2, bool) if head == "SequenceClassification" else mask.astype(bool)
    for axes in ({"model": 2}, {"data": 2, "model": 2, "fsdp": 2}):
        split, _ = maxjax.load(tmp_path / "a", mesh=maxjax.make_mesh(**axes), tokenizer=False)
        out = call(split, ids, mask)
        found = [one for one in (out.start_logits, out.end_logits, out.logits) if one is not None]
        for one, other in zip(found, expected, strict=True):
            same(np.asarray(one)[real], other[real])
    maxjax.save_pretrained(split, tmp_path / "b")
    again, told = opened(kind, tmp_path / "b", output_loading_info=True)
    assert not any(told.values())
    for one, other in zip(logits_of(ids, mask)(again), expected, strict=True):
        same(one[real], other[real])
    if head == "PreTraining" and family != "Electra":
        return  # what is made in code has no head for the order of sentences
    made = maxjax.init(type(model)(model.config), jax.random.key(0))
    maxjax.save_pretrained(made, tmp_path / "c")
    theirs, told = opened(kind, tmp_path / "c", output_loading_info=True)
    assert not any(told.values())
    out = call(made, ids, mask)
    found = [one for one in (out.start_logits, out.end_logits, out.logits) if one is not None]
    for one, other in zip(found, logits_of(ids, mask)(theirs), strict=True):
        same(np.asarray(one)[real], other[real])
    assert maxjax.load(tmp_path / "c", tokenizer=False)[0].config == made.config


CONFIG = BertConfig(64, 32, 48, num_hidden_layers=1, num_attention_heads=2)
KINDS = {
    "fill-mask": BertForMaskedLM, "tag": BertForTokenClassification, "answer": BertForQuestionAnswering,
    "classify": BertForSequenceClassification,
}  # fmt: skip
IDS = np.arange(6, 20, dtype=np.int32).reshape(2, 7)
MASK = np.array([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0]], np.int32)


def made(kind=BertForMaskedLM, config=CONFIG, **options):
    """A model whose values show which is where: ones and zeros would not."""
    model = maxjax.init(kind(config, **options), jax.random.key(0))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + 0.2 * rng.standard_normal(x.shape).astype(x.dtype), model)


def logits(model):
    """What the model's head computes, as a dict of arrays."""
    out = call(model, IDS, MASK)
    names = ("logits", "start_logits", "end_logits")
    return {name: np.asarray(one) for name in names if (one := getattr(out, name)) is not None}


@pytest.mark.parametrize("task", KINDS)
def test_each_head_has_its_outputs_and_the_states_of_the_body(task):
    model = made(KINDS[task])
    shapes = {name: one.shape for name, one in logits(model).items()}
    expected = {
        "fill-mask": {"logits": (2, 7, 64)}, "tag": {"logits": (2, 7, 2)}, "classify": {"logits": (2, 2)},
        "answer": {"start_logits": (2, 7), "end_logits": (2, 7)},
    }  # fmt: skip
    assert (shapes, model.task) == (expected[task], task)
    body = BertModel(CONFIG, pooler=model.pooler is not None)
    names = body.raw_state_dict()
    body.load_state_dict({n: w.value for n, w in model.raw_state_dict().items() if n in names})
    assert body.task is None and logits(body) == {}
    np.testing.assert_array_equal(
        call(model, IDS, MASK).last_hidden_state, call(body, IDS, MASK).last_hidden_state
    )


def test_states_alone_cost_what_they_cost_without_the_head():
    states = lambda m: m(IDS, MASK).last_hidden_state
    costs = [
        jax.jit(states).lower(kind(CONFIG)).compile().cost_analysis()["flops"]
        for kind in (lambda config: BertModel(config, pooler=False), BertForMaskedLM)
    ]
    assert costs[0] == costs[1]


@pytest.mark.parametrize("name", ["mean", "cls"])
def test_a_text_of_a_row_is_pooled_alone(name):
    class Pooled(BertForSequenceClassification):
        head_pooling = name

    model = made(Pooled, pooler=False)
    alone = call(model, IDS[1:, :3]).logits
    same(call(model, IDS, MASK).logits[1:], alone)
    seen = (MASK[:, None, :] * MASK[:, :, None]).astype(bool)
    same(call(model, IDS, seen).logits[1:], alone)


def test_decoders_say_what_their_head_is_for():
    model = Llama(LlamaConfig(64, 16, 24, num_hidden_layers=1, num_attention_heads=2))
    assert model.task is None
    model.make_score(3, maxjax.DType.float32)
    assert model.task == "classify" and model.id2label == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}
    names = ("bad", "so-so", "good")
    model.hf_config = {"id2label": dict(enumerate(names)), "problem_type": "regression"}
    assert (tuple(model.id2label.values()), model.problem_type) == (names, "regression")


def test_labels_are_kept_and_written(tmp_path):
    config = BertConfig(
        64, 32, 48, num_hidden_layers=1, num_attention_heads=2, labels=("O", "B-PER", "I-PER"),
        problem_type="single_label_classification",
    )  # fmt: skip
    assert (config.num_labels, config.label2id["I-PER"]) == (3, 2)
    model = made(BertForTokenClassification, config)
    assert model.classifier.weight.shape == [3, 32]
    maxjax.save_pretrained(model, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["id2label"] == {"0": "O", "1": "B-PER", "2": "I-PER"}
    assert raw["label2id"] == {"O": 0, "B-PER": 1, "I-PER": 2}
    again, _ = maxjax.load(tmp_path, tokenizer=False)
    assert again.config == config and again.id2label == {0: "O", 1: "B-PER", 2: "I-PER"}
    assert again.problem_type == "single_label_classification"
    # Programs depend on the number of labels alone.
    other = made(BertForTokenClassification, BertConfig(
        64, 32, 48, num_hidden_layers=1, num_attention_heads=2, labels=("a", "b", "c"),
    ))  # fmt: skip
    assert jax.tree.structure(other) == jax.tree.structure(model)


@pytest.mark.parametrize(
    "listed, expected",
    [
        ({"1": "b", "0": "a"}, {0: "a", 1: "b"}),
        ({"1": "b", "2": "a"}, {0: "LABEL_0", 1: "LABEL_1"}),
        (None, {0: "LABEL_0", 1: "LABEL_1"}),
    ],
)
def test_names_of_labels_in_files(listed, expected):
    raw = {
        "vocab_size": 9, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1,
        "id2label": listed,
    }  # fmt: skip
    assert BertConfig.from_dict(raw).id2label == expected


@pytest.mark.parametrize(
    "labels, error, message",
    [
        (
            {"id2label": {"0": "a", "1": "b"}},
            CheckpointMismatchError,
            "'id2label' does not have .*expected 3 labels, found 2",
        ),
        (
            {"id2label": {str(i): "a" for i in range(4)}},
            CheckpointMismatchError,
            "'id2label' .*found 4",
        ),
        (
            {"id2label": None, "num_labels": 4},
            CheckpointMismatchError,
            "'num_labels' does not have .*found 4",
        ),
        (
            {"id2label": None},
            CheckpointMismatchError,
            "without 'id2label' and 'num_labels'.*found 2",
        ),
        (
            {"id2label": ["a", "b", "c"]},
            CheckpointFormatError,
            "'id2label' has the wrong type .*found list",
        ),
        ({"id2label": None, "num_labels": 3}, None, ""),
    ],
)
@pytest.mark.parametrize(
    "kind", ["BertForTokenClassification", "RobertaForSequenceClassification", "Llama"]
)
def test_labels_that_the_head_does_not_have_are_rejected(tmp_path, kind, labels, error, message):
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "Llama":
        model = Llama(LlamaConfig(64, 32, 48, **sizes))
        model.make_score(3, maxjax.DType.float32)
    else:
        config = BertConfig if "Bert" in kind else RobertaConfig
        model = getattr(maxjax.models, kind)(config(64, 32, 48, **sizes, num_labels=3))
    maxjax.save_pretrained(maxjax.init(model, jax.random.key(0)), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | labels))
    if error is None:
        assert len(maxjax.load(tmp_path, tokenizer=False)[0].id2label) == 3
    else:
        with pytest.raises(error, match=f"config.json: {message}"):
            maxjax.load(tmp_path, tokenizer=False)


# --- files ----------------------------------------------------------------------------------


def _as(change, tied=True):
    def write(folder):
        model = made(config=BertConfig(
            64, 32, 48, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=tied
        ))  # fmt: skip
        maxjax.save_pretrained(model, folder)
        found = change(safetensors.numpy.load_file(folder / WEIGHTS))
        safetensors.numpy.save_file(found, folder / WEIGHTS, {"format": "pt"})
        (folder / "maxjax_digests.json").unlink()
        return model, found

    return write


TABLE, BIAS = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"
DECODER = "cls.predictions.decoder"


def _old(found):
    ends = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, old in ends.items():
        found = {name.replace(new, old): one for name, one in found.items()}
    return found


def _without_bias(found):
    return {name if name != BIAS else f"{DECODER}.bias": one for name, one in found.items()}


FORMS = {
    "as transformers writes it": _as(dict),
    "without the prefix": _as(lambda found: {n.removeprefix("bert."): a for n, a in found.items()}),
    "old names": _as(_old),
    "the decoder too": _as(lambda found: found | {f"{DECODER}.weight": found[TABLE]}),
    "all of the decoder": _as(
        lambda found: found | {f"{DECODER}.weight": found[TABLE], f"{DECODER}.bias": found[BIAS]}
    ),
    "the decoder's bias alone": _as(_without_bias),
    "wrapped": _as(lambda found: {f"module.{n}": a for n, a in found.items()}),
    "the decoder too, wrapped": _as(
        lambda found: {f"module.{n}": a for n, a in (found | {f"{DECODER}.weight": found[TABLE]}).items()}
    ),
    "a decoder of its own": _as(dict, tied=False),
    "a decoder of its own with one bias": _as(
        lambda found: {n: a for n, a in found.items() if n != f"{DECODER}.bias"}, tied=False
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_is_saved_in_its_form(tmp_path, form):
    model, before = FORMS[form](tmp_path / "a")
    again, _ = maxjax.load(tmp_path / "a", tokenizer=False)
    np.testing.assert_array_equal(logits(again)["logits"], logits(model)["logits"])
    # The source may be gone: it holds nothing but the model.
    (tmp_path / "a" / WEIGHTS).unlink()
    maxjax.save_pretrained(again, tmp_path / "b")
    after = safetensors.numpy.load_file(tmp_path / "b" / WEIGHTS)
    before = {name.removeprefix("module."): array for name, array in before.items()}
    assert after.keys() == before.keys()
    for name, array in before.items():
        assert after[name].tobytes() == array.tobytes(), name
    # After a training, copies have the new values too.
    more = jax.tree.map(lambda x: 2 * x, again)
    maxjax.save_pretrained(more, tmp_path / "c")
    after = safetensors.numpy.load_file(tmp_path / "c" / WEIGHTS)
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], 2 * array, err_msg=name)


@pytest.mark.parametrize("task", KINDS)
def test_a_saved_head_is_found_again(tmp_path, task):
    model = made(KINDS[task])
    maxjax.save_pretrained(model, tmp_path / "a")
    maxjax.checkpoint.save(tmp_path / "steps", model)
    names = safetensors.numpy.load_file(tmp_path / "a" / WEIGHTS)
    assert sum(name.startswith("bert.") for name in names) > 10
    for folder in ("a", "steps"):
        again, _ = maxjax.load(tmp_path / folder, tokenizer=False)
        assert type(again) is KINDS[task]
        for name, one in logits(model).items():
            np.testing.assert_array_equal(logits(again)[name], one)


def test_a_file_without_the_head_is_the_body(tmp_path, caplog):
    maxjax.save_pretrained(made(BertModel, pooler=False), tmp_path / "a")
    raw = json.loads((tmp_path / "a" / "config.json").read_text())
    for task, kind in KINDS.items():
        text = json.dumps(raw | {"architectures": [kind.__name__]})
        (tmp_path / "a" / "config.json").write_text(text)
        model, _ = maxjax.load(tmp_path / "a", tokenizer=False)
        assert (type(model), model.task) == (BertModel, None), task
        head = {"fill-mask": "cls.predictions.*", "answer": "qa_outputs.*"}.get(
            task, "classifier.*"
        )
        assert (
            f"no tensors of the head of {kind.__name__} ({head}): opened as BertModel"
            in caplog.text
        )
    caplog.clear()
    (tmp_path / "a" / "config.json").write_text(json.dumps(raw))
    assert type(maxjax.load(tmp_path / "a", tokenizer=False)[0]) is BertModel
    assert not caplog.records
    found = safetensors.numpy.load_file(tmp_path / "a" / WEIGHTS)
    found["qa_outputs.weight"] = np.ones((2, 32), np.float32)
    safetensors.numpy.save_file(found, tmp_path / "a" / WEIGHTS, {"format": "pt"})
    (tmp_path / "a" / "maxjax_digests.json").unlink()
    (tmp_path / "a" / "config.json").write_text(
        json.dumps(raw | {"architectures": ["BertForQuestionAnswering"]})
    )
    with pytest.raises(CheckpointMismatchError, match="qa_outputs.bias"):
        maxjax.load(tmp_path / "a", tokenizer=False)


def test_a_file_with_another_head_lacks_the_one_that_it_names(tmp_path):
    maxjax.save_pretrained(made(BertForQuestionAnswering), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    for task in ("fill-mask", "tag", "classify"):
        text = json.dumps(raw | {"architectures": [KINDS[task].__name__]})
        (tmp_path / "config.json").write_text(text)
        missing = "cls.predictions.decoder.bias" if task == "fill-mask" else "classifier.bias"
        with pytest.raises(CheckpointMismatchError, match=f"[Mm]issing.*{missing}"):
            maxjax.load(tmp_path, tokenizer=False)


POOLED = {
    BertForSequenceClassification: CONFIG,
    AlbertForSequenceClassification: AlbertConfig(
        64, 32, 48, num_hidden_layers=1, num_attention_heads=2
    ),
    DebertaV2ForSequenceClassification: DebertaV2Config(
        64, 32, 48, num_hidden_layers=1, num_attention_heads=2, pos_att_type=("c2p",)
    ),
    NomicBertForSequenceClassification: NomicBertConfig(
        64, 32, 48, num_hidden_layers=1, num_attention_heads=2
    ),
    GteForSequenceClassification: GteConfig(
        64, 32, 48, num_hidden_layers=1, num_attention_heads=2
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", POOLED, ids=lambda kind: kind.__name__)
def test_a_head_for_texts_without_its_pooler_is_rejected(tmp_path, kind):
    maxjax.save_pretrained(made(kind, POOLED[kind], pooler=True), tmp_path)
    found = safetensors.numpy.load_file(tmp_path / WEIGHTS)
    rest = {name: one for name, one in found.items() if "pooler." not in name}
    assert len(found) - len(rest) == 2
    safetensors.numpy.save_file(rest, tmp_path / WEIGHTS, {"format": "pt"})
    (tmp_path / "maxjax_digests.json").unlink()
    with pytest.raises(CheckpointMismatchError, match=r"[Mm]issing.*pooler\.(dense\.)?weight"):
        maxjax.load(tmp_path, tokenizer=False)


def test_a_head_that_the_config_does_not_name_is_loaded_as_the_warning_says(tmp_path, caplog):
    maxjax.save_pretrained(made(BertForQuestionAnswering), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    named = raw.pop("architectures")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert type(maxjax.load(tmp_path, tokenizer=False)[0]) is BertModel
    said = 'To load it, write "architectures": ["BertForQuestionAnswering"] in config.json'
    assert named == ["BertForQuestionAnswering"] and caplog.text.count(said) == 1
    caplog.clear()
    (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": ["BertModel"]}))
    assert type(maxjax.load(tmp_path, tokenizer=False)[0]) is BertModel
    assert "no such head: qa_outputs" in caplog.text and "To load it" not in caplog.text


def test_a_part_of_the_head_that_does_not_run_is_named_and_kept(tmp_path, caplog):
    model = made()
    maxjax.save_pretrained(model, tmp_path / "a")
    found = safetensors.numpy.load_file(tmp_path / "a" / WEIGHTS)
    found["cls.seq_relationship.bias"] = np.ones(2, np.float32)
    safetensors.numpy.save_file(found, tmp_path / "a" / WEIGHTS, {"format": "pt"})
    (tmp_path / "a" / "maxjax_digests.json").unlink()
    again, _ = maxjax.load(tmp_path / "a", tokenizer=False)
    assert "cls.seq_relationship.bias" in caplog.text
    np.testing.assert_array_equal(logits(again)["logits"], logits(model)["logits"])
    maxjax.save_pretrained(again, tmp_path / "b")
    assert safetensors.numpy.load_file(tmp_path / "b" / WEIGHTS).keys() == found.keys()


def test_a_head_keeps_the_name_of_its_file():
    model = made()
    for name in ("BertForPreTraining", "BertForMaskedLM"):
        model.hf_config = {"architectures": [name]}
        assert model.hf_config == {"architectures": [name]}
    model.hf_config = {"architectures": ["Mine"]}
    assert model.hf_config == {"architectures": ["BertForMaskedLM"]}


def test_a_gguf_file_has_the_body_alone(tmp_path, caplog):
    maxjax.save_pretrained(made(), tmp_path / "a")
    maxjax.checkpoint.convert(tmp_path / "a", tmp_path / "a.gguf")
    assert "cls.predictions.bias" in caplog.text
    model, _ = maxjax.load(tmp_path / "a.gguf", tokenizer=False)
    assert type(model) is BertModel


def test_a_gguf_file_has_the_head_for_texts_with_its_pooler(tmp_path):
    model = made(BertForSequenceClassification)
    maxjax.save_pretrained(model, tmp_path / "a")
    maxjax.checkpoint.convert(tmp_path / "a", tmp_path / "a.gguf")
    again, _ = maxjax.load(tmp_path / "a.gguf", tokenizer=False)
    np.testing.assert_array_equal(logits(again)["logits"], logits(model)["logits"])
    maxjax.checkpoint.convert(tmp_path / "a.gguf", tmp_path / "b")
    before, after = (safetensors.numpy.load_file(tmp_path / one / WEIGHTS) for one in "ab")
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)


@pytest.mark.parametrize("labels", [("no", "yes, è", "LABEL_0"), ("score",), ()])
def test_a_gguf_file_has_the_names_of_the_labels(tmp_path, labels):
    config = BertConfig(
        64, 32, 48, num_hidden_layers=1, num_attention_heads=2, num_labels=len(labels) or 4, labels=labels
    )  # fmt: skip
    model = made(BertForSequenceClassification, config)
    maxjax.save_pretrained(model, tmp_path / "a")
    maxjax.checkpoint.convert(tmp_path / "a", tmp_path / "a.gguf")
    key = gguf.Keys.Classifier.OUTPUT_LABELS.format(arch="bert")
    written = gguf.GGUFReader(tmp_path / "a.gguf").fields[key].contents()
    assert written == (list(labels) or ["LABEL_0", "LABEL_1", "LABEL_2", "LABEL_3"])
    again, _ = maxjax.load(tmp_path / "a.gguf", tokenizer=False)
    assert again.id2label == model.id2label and again.config.labels == labels
    maxjax.checkpoint.convert(tmp_path / "a.gguf", tmp_path / "b")
    raw = [json.loads((tmp_path / one / "config.json").read_text()) for one in "ab"]
    assert [raw[1][name] for name in ("id2label", "label2id")] == [
        raw[0][name] for name in ("id2label", "label2id")
    ]


def test_a_gguf_file_with_a_head_for_texts_and_no_pooler_is_rejected(tmp_path):
    """llama.cpp's converter leaves the pooler of a BERT out: scores without it are not the model's."""
    maxjax.save_pretrained(made(BertForSequenceClassification), tmp_path / "a")
    maxjax.checkpoint.convert(tmp_path / "a", tmp_path / "a.gguf")
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", "bert")
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture", "maxjax.")):
            kinds = field.types
            of_items = kinds[-1] if kinds[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kinds[0], of_items)
    kept = [one for one in reader.tensors if one.name not in ("cls.weight", "cls.bias")]
    assert len(reader.tensors) - len(kept) == 2
    for one in kept:
        writer.add_tensor(one.name, np.array(one.data), raw_dtype=one.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointMismatchError, match=r"b\.gguf: .*[Mm]issing.*pooler\.dense"):
        maxjax.load(tmp_path / "b.gguf", tokenizer=False)


def test_a_gguf_file_with_more_names_than_labels_is_rejected():
    given = {"general.architecture": "bert", "bert.classifier.output_labels": ["a", "b", "c"]}
    found = lambda rows: read_classifier(
        "BertForSequenceClassification", gguf_settings(given), {"cls.output.weight": (rows, 8)}
    )
    assert found(3)["id2label"] == {"0": "a", "1": "b", "2": "c"}
    with pytest.raises(CheckpointFormatError, match="output_labels.*expected 2 names, found 3"):
        found(2)


def test_the_head_of_nomic_without_biases(tmp_path):
    """As in the published files, unlike what transformers makes."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2}
    model = made(NomicBertForMaskedLM, NomicBertConfig(64, 32, 48, **sizes))
    zero = {
        name: jnp.zeros_like(weight.value)
        for name, weight in model.raw_state_dict().items()
        if name in ("cls.predictions.transform.dense.bias", "cls.predictions.decoder.bias")
    }
    assert len(zero) == 2
    model = maxjax.replace(model, zero)
    maxjax.save_pretrained(model, tmp_path / "a")
    found = safetensors.numpy.load_file(tmp_path / "a" / WEIGHTS)
    del found["cls.predictions.transform.dense.bias"], found["cls.predictions.bias"]
    safetensors.numpy.save_file(found, tmp_path / "a" / WEIGHTS, {"format": "pt"})
    (tmp_path / "a" / "maxjax_digests.json").unlink()
    again, _ = maxjax.load(tmp_path / "a", tokenizer=False)
    np.testing.assert_array_equal(logits(again)["logits"], logits(model)["logits"])
    maxjax.save_pretrained(again, tmp_path / "b")
    assert safetensors.numpy.load_file(tmp_path / "b" / WEIGHTS).keys() == found.keys()


def test_the_heads_of_deberta_are_told_apart_by_a_setting():
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2}
    new = DebertaV2Config(9, 4, 4, **sizes, legacy=False)
    assert "lm_predictions.lm_head.dense.weight" in DebertaV3ForMaskedLM(new).raw_state_dict()
    with pytest.raises(UserInputError, match="legacy=False"):
        DebertaV3ForMaskedLM(DebertaV2Config(9, 4, 4, **sizes))


# --- training, meshes, dtypes -------------------------------------------------------------------


@pytest.mark.parametrize("task", KINDS)
def test_gradients_reach_every_weight(task):
    loss = lambda m: sum(jnp.sum(one**2) for one in jax.tree.leaves(m(IDS, MASK)[2:]))
    found = jax.jit(jax.grad(loss))(made(KINDS[task])).raw_state_dict()
    largest = {name: float(jnp.abs(weight.value).max()) for name, weight in found.items()}
    # A key's bias has none but rounding errors: softmax does not see it.
    assert {name for name, one in largest.items() if one < 1e-4} <= {
        "encoder.layer.0.attention.self.key.bias"
    }


def test_the_table_learns_from_the_decoder_too():
    model = made()
    word = 40  # in no text: its row has a gradient as an output alone
    loss = lambda m: jnp.sum(jax.nn.log_softmax(m(IDS, MASK).logits)[..., word])
    gradient = jax.jit(jax.grad(loss))(model).embeddings.word_embeddings.weight.value
    assert word not in IDS and float(jnp.abs(gradient[word]).max()) > 1e-3


def test_a_head_is_tuned_with_lora(tmp_path):
    model = made()
    layers = maxjax.lora.add(model, ["*.query", "transform.dense"], rank=2, key=jax.random.key(1))
    np.testing.assert_array_equal(logits(layers)["logits"], logits(model)["logits"])
    tuned = jax.tree.map(lambda x: x + 0.01, layers)
    merged = maxjax.lora.merge(tuned)
    np.testing.assert_allclose(logits(merged)["logits"], logits(tuned)["logits"], atol=1e-4)
    maxjax.save_pretrained(merged, tmp_path)
    again, _ = maxjax.load(tmp_path, tokenizer=False)
    np.testing.assert_array_equal(logits(again)["logits"], logits(merged)["logits"])


ADAPTERS = {
    "fill-mask": (None, None, "bert.encoder"), "tag": ("TOKEN_CLS", "classifier", "bert.encoder"),
    "answer": ("QUESTION_ANS", "qa_outputs", "bert.encoder"), "classify": ("SEQ_CLS", "classifier", "bert.encoder"),
    None: ("FEATURE_EXTRACTION", None, "encoder"),
}  # fmt: skip


@pytest.mark.parametrize("task", ADAPTERS)
def test_adapters_have_the_names_and_the_head_of_peft(tmp_path, task):
    kind, head, front = ADAPTERS[task]
    model = made({**KINDS, None: BertModel}[task])
    layers = maxjax.lora.add(model, rank=2, key=jax.random.key(1))
    tuned = jax.tree.map(lambda x: x + 0.01, layers)
    maxjax.lora.save(tmp_path, tuned)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (settings["task_type"], settings["modules_to_save"]) == (kind, head and [head])
    found = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    of_head = {name for name in found if head is not None and f".{head}." in name}
    assert of_head == (
        {f"base_model.model.{head}.{n}" for n in ("weight", "bias")} if head else set()
    )
    layer = f"base_model.model.{front}.layer.0.attention.self.query.lora_A.weight"
    assert layer in found and not any("cls." in name for name in found)
    base = jax.tree.map(lambda x: x, maxjax.lora.remove(tuned))
    again = maxjax.lora.load(base, tmp_path)
    for name, weight in again.raw_state_dict().items():
        np.testing.assert_array_equal(
            weight.value, tuned.raw_state_dict()[name].value, err_msg=name
        )


def trained(model, patterns):
    """The model with other values in its LoRA weights and in those whose names match the patterns."""
    trained, rest = maxjax.partition(model, ["*.lora_*", *patterns])
    return maxjax.merge(jax.tree.map(lambda x: x + 0.01, trained), rest)


DISTILBERT = DistilBertConfig(64, 32, 48, n_layers=2, n_heads=2)
# Model, the layers with LoRA weights, other weights that are trained, and modules_to_save.
TRAINED = {
    "nothing else": (BertForSequenceClassification, CONFIG, "query", [], ["classifier"]),
    "pooler": (BertForSequenceClassification, CONFIG, "query", ["pooler.*"], ["classifier", "bert.pooler.dense"]),
    "a name within another": (DistilBertForSequenceClassification, DISTILBERT, "q_lin", [], ["classifier"]),
    "both": (DistilBertForSequenceClassification, DISTILBERT, "q_lin", ["*classifier.*"], ["classifier"]),
    "table": (BertForTokenClassification, CONFIG, "query", ["*.position_embeddings.weight"],
              ["classifier", "bert.embeddings.position_embeddings"]),
    "norms": (DistilBertForQuestionAnswering, DISTILBERT, "q_lin", ["*layer.*.sa_layer_norm.*"],
              ["qa_outputs", *(f"distilbert.transformer.layer.{i}.sa_layer_norm" for i in (0, 1))]),
    "biases": (BertForSequenceClassification, CONFIG, "query", ["*.bias"], ["classifier"]),
}  # fmt: skip


@pytest.mark.parametrize("case", TRAINED)
def test_trained_modules_are_saved_with_an_adapter_and_loaded(tmp_path, case):
    kind, config, layers, patterns, modules = TRAINED[case]
    base = made(kind, config)
    tuned = trained(maxjax.lora.add(base, layers, rank=2, key=jax.random.key(1)), patterns)
    maxjax.lora.save(tmp_path / "a", tuned)
    settings = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert settings["modules_to_save"] == modules
    assert settings["bias"] == ("all" if case == "biases" else "none")
    again = maxjax.lora.load(base, tmp_path / "a")
    maxjax.lora.save(tmp_path / "b", again)
    files = [tmp_path / one / "adapter_model.safetensors" for one in "ab"]
    first, second = map(safetensors.numpy.load_file, files)
    assert first.keys() == second.keys()
    if "DistilBertForSequence" in kind.__name__:
        assert "base_model.model.pre_classifier.weight" in first
    twice = maxjax.lora.load(base, tmp_path / "b")
    for name, weight in tuned.raw_state_dict().items():
        for one in (again, twice):
            value = one.raw_state_dict()[name].value
            np.testing.assert_array_equal(value, weight.value, err_msg=name)
    assert not any(one._mx_trained for _, one in maxjax.lora.remove(twice).named_modules())


@pytest.mark.parametrize(
    ("kind", "layers", "patterns", "named"),
    [
        (BertForSequenceClassification, ["pooler.dense"], ["pooler.*"], "pooler.dense.weight.*LoRA weights too"),
        (BertForSequenceClassification, ["query"], ["*query.weight"], "query.weight.*LoRA weights too"),
        (BertForMaskedLM, ["query"], ["*word_embeddings.weight"], "word_embeddings.weight.*one weight"),
    ],
)  # fmt: skip
def test_a_trained_weight_that_an_adapter_cannot_hold_is_named(
    tmp_path, kind, layers, patterns, named
):
    model = maxjax.lora.add(made(kind), layers, rank=2, key=jax.random.key(1))
    with pytest.raises(UserInputError, match=f"cannot hold the trained weight '.*{named}"):
        maxjax.lora.save(tmp_path / "a", trained(model, patterns))
    assert not (tmp_path / "a").exists()


def test_a_quantised_head_is_not_written_into_an_adapter(tmp_path):
    """PEFT has no such blocks; without its task it leaves the head as it is."""
    base, _ = maxjax.quantize(made(BertForSequenceClassification), "q8_0")
    tuned = trained(maxjax.lora.add(base, "query", rank=2, key=jax.random.key(1)), ["*r.bias"])
    maxjax.lora.save(tmp_path, tuned)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (settings["task_type"], settings["modules_to_save"]) == (None, None)
    found = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    assert {one.dtype for one in found.values()} == {np.dtype("float32")}
    again = maxjax.lora.load(base, tmp_path)
    np.testing.assert_array_equal(again.classifier.bias.value, tuned.classifier.bias.value)
    np.testing.assert_array_equal(logits(again)["logits"], logits(tuned)["logits"])


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("case", TRAINED)
def test_peft_opens_an_adapter_with_trained_modules(tmp_path, case):
    kind, config, layers, patterns, _ = TRAINED[case]
    base = made(kind, config)
    tuned = trained(maxjax.lora.add(base, layers, rank=2, key=jax.random.key(1)), patterns)
    peft_agrees(base, tuned, tmp_path)


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("task", ["tag", "classify", "answer", "fill-mask"])
def test_peft_opens_an_adapter(tmp_path, task):
    layers = maxjax.lora.add(made(KINDS[task]), rank=2, key=jax.random.key(1))
    tuned = jax.tree.map(lambda x: x + 0.01, layers)
    peft_agrees(maxjax.lora.remove(tuned), tuned, tmp_path)


def peft_agrees(base, tuned, folder):
    """Checks that PEFT computes with the saved adapter what the tuned model computes here."""
    import peft

    maxjax.save_pretrained(base, folder / "base")
    maxjax.lora.save(folder / "adapter", tuned)
    theirs = opened(type(base).__name__, folder / "base")
    found = logits_of(IDS, MASK)(peft.PeftModel.from_pretrained(theirs, folder / "adapter").eval())
    for one, other in zip(found, logits(tuned).values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("axes", [{"model": 2}, {"fsdp": 2}, {"data": 2, "model": 2, "fsdp": 2}])
def test_logits_on_meshes(axes):
    model = made()
    split = model.to(maxjax.make_mesh(**axes))
    np.testing.assert_allclose(logits(split)["logits"], logits(model)["logits"], atol=1e-5)
    spec = tuple(split.embeddings.word_embeddings.weight.sharding.spec)
    assert spec == ("model" if "model" in axes else None, "fsdp" if "fsdp" in axes else None)


def test_other_dtypes_and_quantised_weights(tmp_path):
    model = made()
    maxjax.save_pretrained(model, tmp_path)
    expected = logits(model)["logits"]
    narrow, _ = maxjax.load(tmp_path, dtype="bfloat16", tokenizer=False)
    found = logits(narrow)["logits"]
    assert found.dtype == np.float32 and narrow.cls.predictions.decoder.weight.dtype == "bfloat16"
    np.testing.assert_allclose(found, expected, atol=0.05 * np.abs(expected).max())
    small = maxjax.quantize(model, "q8_0").model
    assert small.embeddings.word_embeddings.weight.quantization_encoding is not None
    found = logits(small)["logits"]
    np.testing.assert_allclose(found, expected, atol=0.05 * np.abs(expected).max())


def test_every_encoder_has_the_heads():
    bodies = {one.model_type for one in all_families() if issubclass(one.config, EncoderConfig)}
    kinds = {(one.model_type, one.make.__self__.task) for one in all_families()}
    without = {(name, "answer") for name in ("nomic_bert", "gte")}
    assert {(name, task) for name in bodies for task in KINDS} - kinds == without
