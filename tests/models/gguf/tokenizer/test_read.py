"""BERT's tokenizer out of a GGUF file against the one that the file was made of; chat templates."""

import json

import numpy as np
import pytest

from maxjax.errors import CheckpointFormatError, UserInputError
from maxjax.models.gguf import chat_template, tokenizer_json
from tests.oracles.sentences import sentences

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")

TEXTS = [
    *sentences(60), "", " ", "Ünïcödé ÉCLAIR", "naïve CAFÉ", "漢字かな", "don't [MASK] me [SEP]", "a" * 200,
    "tab\tnew\nline\x00\x07", "▁under ##score", "1,234.5 $€", "🙂 emoji", "İstanbul ΑΣ", "[unused5] x",
]  # fmt: skip


def stored(tokens, control):
    """(tokens, types) as `BertModel.set_vocab` of the converter writes them."""
    found, types = [], []
    for token in tokens:
        special = token in control
        types.append(gguf.TokenType.CONTROL if special else gguf.TokenType.NORMAL)
        if special:
            found.append(token)
        else:
            found.append(token[2:] if token.startswith("##") else "\u2581" + token)
    return found, [int(kind) for kind in types]


def metadata(tokens, control=("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), **more):
    marked, types = stored(tokens, control)
    found = {"model": "bert", "tokens": marked, "token_type": types, **more}
    return {f"tokenizer.ggml.{k}": v for k, v in found.items() if v is not None}


def loaded(data, **options):
    return tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(data, **options)))


def same(ours, theirs, texts=TEXTS):
    theirs.no_padding()
    theirs.no_truncation()
    for text in texts:
        for special in (True, False):
            a, b = (t.encode(text, add_special_tokens=special) for t in (ours, theirs))
            assert (a.ids, a.type_ids, a.offsets) == (b.ids, b.type_ids, b.offsets), text
        assert ours.decode(a.ids) == theirs.decode(a.ids)
    a, b = (t.encode("one two", "three") for t in (ours, theirs))
    assert (a.ids, a.type_ids, a.special_tokens_mask) == (b.ids, b.type_ids, b.special_tokens_mask)


@pytest.fixture(scope="module")
def original(minilm):
    return tokenizers.Tokenizer.from_file(str(minilm / "tokenizer.json"))


def vocabulary(tokenizer):
    vocab = tokenizer.get_vocab()
    return sorted(vocab, key=lambda token: vocab[token])


def test_encodes_as_the_original_through_a_file(minilm, original, tmp_path):
    """Written with gguf's own writer and its own search for special tokens."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "bert")
    tokens, types = stored(vocabulary(original), {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"})
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    gguf.SpecialVocab(minilm, n_vocab=len(tokens)).add_to_gguf(writer, quiet=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    data = {key: field.contents() for key, field in reader.fields.items()}
    made = tokenizer_json(data)
    assert made["normalizer"]["lowercase"] is True
    ours = tokenizers.Tokenizer.from_str(json.dumps(made))
    assert ours.get_vocab() == original.get_vocab()
    same(ours, original)


def test_without_ids_and_types_they_lie_where_bert_has_them(original):
    data = metadata(vocabulary(original), token_type=None)
    same(loaded(data), original)


def test_the_spelling_of_bert_is_left(original):
    data = metadata(vocabulary(original))
    data["tokenizer.ggml.tokens"] = vocabulary(original)
    same(loaded(data), original)


def test_old_keys_of_the_special_tokens(original):
    data = metadata(vocabulary(original), cls_token_id=101, eos_token_id=102)
    same(loaded(data), original)


CASED = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "Paris",
    "paris",
    "##é",
    "e",
    "é",
    "##s",
    "É",
]


@pytest.mark.parametrize("lowercase", [True, False])
def test_case_and_accents(lowercase):
    words = CASED if not lowercase else [t for t in CASED if t not in ("Paris", "É")]
    oracle = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({t: i for i, t in enumerate(words)}, unk_token="[UNK]")
    )
    oracle.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    oracle.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    ids = {"unknown_token_id": 1, "bos_token_id": 2, "seperator_token_id": 3}
    ours = loaded(metadata(words, **ids))
    for text in ("Paris paris PARIS", "é É e E", "parisé", "Pariss"):
        expected = oracle.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == expected, text
    said = tokenizer_json(metadata(words, **ids, **{"normalizer.lowercase": not lowercase}))
    assert said["normalizer"]["lowercase"] is not lowercase
    said = tokenizer_json(metadata(words, **ids, **{"normalizer.strip_accents": True}))
    assert said["normalizer"]["strip_accents"] is True


def test_places_kept_free_are_no_upper_case_words():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "[PAD5]", "[Reserved]"]
    ids = {"unknown_token_id": 1, "bos_token_id": 2, "seperator_token_id": 3}
    assert tokenizer_json(metadata(words, **ids))["normalizer"]["lowercase"] is True


@pytest.mark.parametrize("kind", ["plamo2", "rwkv", "none"])
def test_other_tokenizers_are_named(kind):
    with pytest.raises(NotImplementedError, match=f"m.gguf: the tokenizer '{kind}'"):
        tokenizer_json({"tokenizer.ggml.model": kind}, path="m.gguf")


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a"]
IDS = {"unknown_token_id": 1, "bos_token_id": 2, "seperator_token_id": 3}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": None}, "tokenizer.ggml.model' is missing"),
        ({"model": 3}, "tokenizer.ggml.model' has the wrong type"),
        ({"tokens": None}, "tokens' is missing"),
        ({"tokens": ["[PAD]", 3]}, "expected a list of str, found 3 at 1"),
        ({"tokens": "abc"}, "tokens' has the wrong type"),
        ({"tokens": ["▁a", "▁b", "▁a", "▁c", "▁d"]}, "twice"),
        ({"tokens": []}, "another length"),
        ({"token_type": [3, 3]}, "another length"),
        ({"token_type": ["a"]}, "wrong type"),
        ({"unknown_token_id": None}, "unknown_token_id' is missing"),
        ({"unknown_token_id": 5}, "unknown_token_id' is out of range"),
        ({"bos_token_id": -1}, "bos_token_id' is out of range"),
        ({"seperator_token_id": 2**63}, "seperator_token_id' is out of range"),
        ({"cls_token_id": "x"}, "cls_token_id' has the wrong type"),
        ({"normalizer.lowercase": 1}, "lowercase' has the wrong type"),
    ],
)
def test_keys_that_are_missing_or_wrong(change, says):
    assert loaded(metadata(WORDS, **IDS)).encode("a").ids == [2, 4, 3]
    data = metadata(WORDS, **IDS) | {f"tokenizer.ggml.{k}": v for k, v in change.items()}
    with pytest.raises(CheckpointFormatError, match=says):
        tokenizer_json(data)


def test_types_may_be_an_array():
    data = metadata(WORDS, **IDS)
    data["tokenizer.ggml.token_type"] = np.array(data["tokenizer.ggml.token_type"], np.int32)
    assert loaded(data).encode("a").ids == [2, 4, 3]


# --- chat templates ----------------------------------------------------------------------------


def test_templates_as_gguf_writes_them(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    templates = {"default": "{{ a }}", "tool_use": "{{ b }}", "rag": "{{ c }}"}
    writer.add_chat_template([{"name": k, "template": v} for k, v in templates.items()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    data = {key: field.contents() for key, field in reader.fields.items()}
    assert chat_template(data) == "{{ a }}"
    assert {name: chat_template(data, name) for name in templates} == templates
    with pytest.raises(UserInputError, match="'other': the file has (tool_use, rag|rag, tool_use)"):
        chat_template(data, "other")


def test_no_template():
    assert chat_template({}) is None
    with pytest.raises(UserInputError, match="no template with a name"):
        chat_template({}, "rag")
    with pytest.raises(CheckpointFormatError, match="tokenizer.chat_template' has the wrong type"):
        chat_template({"tokenizer.chat_template": 3}, path="m.gguf")
