"""Tokens that stand beside a tokenizer's own file, and tokenizers without one: as transformers."""

import json
import shutil

import numpy as np
import pytest

import maxjax
from maxjax.checkpoint import convert
from maxjax.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointMissingError,
    UnsupportedModelError,
)
from maxjax.models.gguf import tokenizer_json
from maxjax.storage.hub import find_model
from maxjax.text.stream import TextStream
from maxjax.text.tokenizer.tokenizer import load_tokenizer
from tests.models.gguf.tokenizer.tokenizer_files import TEXTS, WORDS, byte_level, sentencepiece
from tests.oracles.models import ask_of
from tests.oracles.recorded import recorded, transformers

FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
SOME = [
    "<think>a</think>",
    " <think> a",
    "a <x> b<x>b",
    "<mask>x <mask>",
    "<|end|><y>",
    "thinks <user>",
    "[NEW][SEP]",
]

STREAMED = 12  # the first of the texts, those with added tokens; ../test_stream.py has all


def put(directory, **files):
    for name, content in files.items():
        end = "txt" if isinstance(content, str) else "json"
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        (directory / f"{name}.{end}").write_text(text, "utf-8", newline="")
    return directory


def oracle_of(directory):
    """transformers' tokenizer of it."""
    return transformers.AutoTokenizer.from_pretrained(directory)


def flags(token):
    return [token.content, token.lstrip, token.rstrip, token.single_word, token.normalized]


NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def facts_of(directory, texts):
    """What transformers says of a tokenizer's files."""
    oracle = oracle_of(directory)
    rows = oracle(list(texts))["input_ids"]
    return {
        "ids": np.array([i for row in rows for i in row], np.int32),
        "lengths": np.array([len(row) for row in rows], np.int32),
        "texts": [
            [oracle.decode(row, skip_special_tokens=skip) for skip in (True, False)] for row in rows
        ],
        "added": {i: flags(token) for i, token in oracle.added_tokens_decoder.items()},
        "named": {name: getattr(oracle, name) for name in NAMED},
        "eos": [] if oracle.eos_token is None else [oracle.eos_token_id],
        "size": max(oracle.get_vocab().values()) + 1,
    }


def assert_as_transformers(directory, texts=(*SOME, *TEXTS)):
    """Ids, text, added tokens with their flags, special tokens."""
    facts, found = recorded(lambda: facts_of(directory, texts)), load_tokenizer(directory)
    rows = [row.tolist() for row in np.split(facts["ids"], np.cumsum(facts["lengths"])[:-1])]
    assert [row.ids for row in found.tokens(texts)] == rows
    for number, (ids, expected) in enumerate(zip(rows, facts["texts"], strict=True)):
        for skip, text in zip((True, False), expected, strict=True):
            assert found.decode(ids, skip_special=skip) == text
            if number < STREAMED:
                assert streamed(found, ids, skip) == text
    added = found._backend.get_added_tokens_decoder()
    assert {i: flags(token) for i, token in added.items()} == facts["added"]
    assert {n: found.special_tokens.get(n) for n in NAMED} == facts["named"]
    assert list(found.eos_ids) == facts["eos"]
    assert found.vocab_size == facts["size"]
    return found


def streamed(tokenizer, ids, skip):
    stream = TextStream(tokenizer, skip_special=skip)
    return "".join(stream.push(i) for i in ids) + stream.flush()


def written(tokenizer, directory):
    directory.mkdir()
    for name, text in tokenizer.files().items():
        (directory / name).write_text(text, "utf-8")
    return directory


def entry(content, special=False, **flags):
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"content": content, "special": special, **usual, **flags}


# --- added tokens -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt2():
    return byte_level("gpt2")


def test_a_token_of_the_settings_alone_is_one_token(tmp_path, gpt2):
    size = len(gpt2["model"]["vocab"]) + 1
    decoder = {str(size): entry("<think>"), str(size + 1): entry("</think>", True)}
    put(tmp_path, tokenizer=gpt2, tokenizer_config=FAST | {"added_tokens_decoder": decoder})
    found = load_tokenizer(tmp_path)
    ids = found.encode("<think>a</think>", special=False)
    assert (ids[0], ids[-1]) == (size, size + 1) and len(ids) == 3
    assert (
        found.decode(ids) == "<think>a" and found.decode(ids, skip_special=False)[-8:] == "</think>"
    )
    assert_as_transformers(tmp_path)


N = 501  # tokens of the vocabulary of `gpt2` and <user>; others may follow
CASES = {
    "flags": {"tokenizer_config": {"added_tokens_decoder": {
        "0": entry("<|begin|>", True), str(N): entry("<think>", lstrip=True, rstrip=True),
        str(N + 1): entry("<x>", single_word=True), str(N + 2): entry("<y>", True, normalized=True)}}},
    "flags_win_over_the_file's": {"tokenizer_config": {"added_tokens_decoder": {
        "500": entry("<user>", True, lstrip=True), "1": entry("<|end|>")}}},
    "named_are_special": {"tokenizer_config": {
        "eos_token": "<y>", "added_tokens_decoder": {str(N): entry("<y>"), "1": entry("<|end|>")}}},
    "named_alone": {"tokenizer_config": {"eos_token": "<|end|>", "pad_token": "<pad>", "bos_token": "<x>"}},
    "named_in_the_vocabulary": {"tokenizer_config": {"eos_token": "the", "added_tokens_decoder": {}}},
    "extra": {"tokenizer_config": {"extra_special_tokens": ["<x>", "<think>"]}},
    "additional": {"tokenizer_config": {"additional_special_tokens": ["<y>", "<x>"], "eos_token": "<x>"}},
    "of_the_model": {"tokenizer_config": {"think_token": "<think>", "extra_special_tokens": {"mask_it": "<mask>"}}},
    "map": {"special_tokens_map": {
        "eos_token": {"content": "<x>", "lstrip": True, "rstrip": False, "single_word": False, "normalized": False},
        "additional_special_tokens": ["<think>"]}},
    "map_wins": {"tokenizer_config": {"eos_token": "<x>"}, "special_tokens_map": {"eos_token": "<y>"}},
    "map_loses_to_the_decoder": {
        "tokenizer_config": {"eos_token": "<x>", "added_tokens_decoder": {str(N): entry("<x>")}},
        "special_tokens_map": {"eos_token": "<y>"}},
    "list": {"added_tokens": {"<think>": N, "<x>": N + 1}},
    "list_with_special": {"added_tokens": {"<x>": N + 1, "<y>": N}, "special_tokens_map": {"eos_token": "<y>"}},
    "list_is_old": {"added_tokens": {"<x>": N}, "tokenizer_config": {"added_tokens_decoder": {}}},
    "other_number_in_the_vocabulary": {"tokenizer_config": {"added_tokens_decoder": {
        str(N + 5): entry("<|end|>", True), "7": entry("<user>")}}},
    "number_of_another": {"tokenizer_config": {"added_tokens_decoder": {"300": entry("<think>")}}},
    "empty": {"tokenizer_config": {"added_tokens_decoder": {str(N): entry("")}}},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["gpt2", "sentencepiece"])
def test_files_beside_it(tmp_path, gpt2, kind, case):
    files = {name: dict(content) for name, content in CASES[case].items()}
    files["tokenizer_config"] = FAST | files.get("tokenizer_config", {})
    document = gpt2 if kind == "gpt2" else sentencepiece()
    if kind != "gpt2":  # whose tokens have other numbers
        shift = len(document["model"]["vocab"]) - N
        text = json.dumps(files).replace('"500"', '"2"')
        for mark, other in {"<user>": "</s>", "<|begin|>": "<unk>", "<|end|>": "<s>"}.items():
            text = text.replace(mark, other)
        for number in range(N + 5, N - 1, -1):
            text = text.replace(f'"{number}"', f'"{number + shift}"').replace(
                f": {number}", f": {number + shift}"
            )
        files = json.loads(text)
    assert_as_transformers(put(tmp_path, tokenizer=document, **files))


def test_what_is_not_kept_is_told(tmp_path, gpt2, caplog):
    decoder = {"300": entry("<think>"), "7": entry("<user>")}
    put(tmp_path, tokenizer=gpt2, tokenizer_config={"added_tokens_decoder": decoder})
    load_tokenizer(tmp_path)
    assert "'<think>' (300)" in caplog.text and "'<user>' (7)" in caplog.text
    caplog.clear()
    put(tmp_path, tokenizer_config={"added_tokens_decoder": {str(N): entry("<think>")}})
    load_tokenizer(tmp_path)
    assert not caplog.text


@pytest.mark.parametrize("place", ["tokenizer_config", "added_tokens", "tokenizer"])
def test_a_number_behind_a_gap_is_kept(tmp_path, gpt2, place):
    """The package that runs it would number them without gaps, whatever the file says."""
    document = json.loads(json.dumps(gpt2))
    if place == "tokenizer":
        document["added_tokens"].append({"id": 700, **entry("<think>", True)})
        files = {}
    elif place == "added_tokens":
        files = {place: {"<think>": 700}}
    else:
        files = {place: {"added_tokens_decoder": {"700": entry("<think>")}, "eos_token": "<new>"}}
    found = load_tokenizer(put(tmp_path, tokenizer=document, **files))
    assert (
        found.encode("a<think>b")[1] == 700 and found.decode([700], skip_special=False) == "<think>"
    )
    assert found.vocab_size == (701 if place != "tokenizer_config" else 702)
    assert found.encode("<user>") == [500] and found.encode("the") == load_tokenizer(
        tmp_path
    ).encode("the")
    again = load_tokenizer(written(found, tmp_path / "b"))
    assert again.encode("a<think>b the") == found.encode("a<think>b the")
    # Now transformers keeps it too.
    number = lambda: oracle_of(tmp_path / "b").convert_tokens_to_ids("<think>")
    assert ask_of(tmp_path / "b", "number of <think>", number) == 700


def test_no_number_is_given_twice(tmp_path, gpt2):
    """A vocabulary with a gap: what is added behind it does not take the last one's number."""
    document = json.loads(json.dumps(gpt2))
    vocab = document["model"]["vocab"]
    last = max(vocab, key=vocab.__getitem__)
    vocab[last] += 2
    document["added_tokens"] = [t for t in document["added_tokens"] if t["id"] < 2]
    put(tmp_path, tokenizer=document, tokenizer_config={"extra_special_tokens": ["<x>", "<y>"]})
    found = load_tokenizer(tmp_path)
    assert found.encode("<x><y>") == [vocab[last] + 1, vocab[last] + 2]
    assert found._backend.id_to_token(vocab[last]) == last


@pytest.fixture
def tiny(tmp_path):
    """The tiny model with its last token in the settings alone, as <think>, which ends answers."""
    directory = shutil.copytree(find_model("tiny"), tmp_path / "tiny")
    (directory / "maxjax_digests.json").unlink(missing_ok=True)
    change = lambda name, **new: put(
        directory, **{name: {**json.loads((directory / f"{name}.json").read_text()), **new}}
    )
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    last = next(text for text, number in model["vocab"].items() if number == LAST)
    del model["vocab"][last]
    model["merges"] = [pair for pair in model["merges"] if "".join(pair).replace(" ", "") != last]
    change("tokenizer", model=model)
    change("tokenizer_config", eos_token="<think>",
           added_tokens_decoder={str(LAST): entry("<think>")})  # fmt: skip
    put(directory, generation_config={})
    change("config", eos_token_id=None)
    return directory


LAST = 703


def test_added_tokens_end_answers(tiny):
    model, tokenizer = maxjax.load(tiny)
    assert tokenizer.encode("1<think>2")[1] == LAST
    assert model.generation.eos_ids == tokenizer.eos_ids == (LAST,)
    prompt = "<think>1 + 1<think>"
    first = maxjax.generate(model, tokenizer, prompt, max_new_tokens=3, chat=False)
    again = maxjax.generate(model, None, [tokenizer.encode(prompt)], max_new_tokens=3)
    assert list(first.tokens) == list(again[0].tokens)


def test_added_tokens_in_a_chat_template(tiny):
    _, tokenizer = maxjax.load(tiny)
    text = maxjax.apply_chat_template(tokenizer, [{"role": "assistant", "content": "<think>1"}])
    tokenizer.chat_templates["default"] = "{{ eos_token }}{{ messages[0].content }}"
    again = maxjax.apply_chat_template(tokenizer, [{"role": "user", "content": "1"}])
    assert again == "<think>1" and tokenizer.encode(text)[0] == tokenizer.encode(again)[0] == LAST


def test_tokens_of_the_model_itself_in_a_chat_template(tmp_path, gpt2):
    """transformers gives templates those too, by the names that they have in the files."""
    template = "{{ image_token }}{{ mask_it }}{{ eos_token }}{{ messages[0].content }}"
    settings = {
        "image_token": "<x>",
        "extra_special_tokens": {"mask_it": "<y>"},
        "additional_special_tokens": ["<z>"],
        "eos_token": "<|end|>",
    }
    put(tmp_path, tokenizer=gpt2, tokenizer_config=FAST | settings | {"chat_template": template})
    found = load_tokenizer(tmp_path)
    for one in (found, load_tokenizer(written(found, tmp_path / "again"))):
        text = maxjax.apply_chat_template(one, [{"role": "user", "content": "a"}])
        assert text == "<x><y><|end|>a"
        assert one.decode(one.encode("<z>")) == ""


def test_added_tokens_are_saved(tiny, tmp_path):
    model, tokenizer = maxjax.load(tiny)
    maxjax.save_pretrained(model, tmp_path / "b", tokenizer=tokenizer)
    _, again = maxjax.load(tmp_path / "b")
    assert again.encode("1<think>2") == tokenizer.encode("1<think>2") and again.eos_ids == (LAST,)
    convert(tiny, tmp_path / "c")
    assert load_tokenizer(tmp_path / "c").encode("<think>") == [LAST]


def test_added_tokens_go_into_gguf_and_back(tiny, tmp_path):
    convert(tiny, tmp_path / "m.gguf")
    _, tokenizer = maxjax.load(tmp_path / "m.gguf")
    assert tokenizer.encode("1<think>2") == load_tokenizer(tiny).encode("1<think>2")
    with maxjax.load_weights(tmp_path / "m.gguf") as weights:
        metadata = dict(weights.metadata)
    assert metadata["tokenizer.ggml.tokens"][LAST] == "<think>"
    assert metadata["tokenizer.ggml.eos_token_id"] == LAST
    assert metadata["tokenizer.ggml.token_type"][LAST] == 3  # named in the settings: control
    del metadata["tokenizer.huggingface.json"]
    made = tokenizer_json(metadata)
    assert {t["id"]: t["content"] for t in made["added_tokens"]}[LAST] == "<think>"
    convert(tmp_path / "m.gguf", tmp_path / "back")
    assert load_tokenizer(tmp_path / "back").encode("1<think>2")[1] == LAST


def test_older_files_go_into_gguf(tiny, tmp_path):
    document = json.loads((tiny / "tokenizer.json").read_text())
    before = load_tokenizer(tiny)
    (tiny / "tokenizer.json").unlink()
    settings = json.loads((tiny / "tokenizer_config.json").read_text())
    put(tiny, **pairs(document), tokenizer_config={**settings, "tokenizer_class": "GPT2Tokenizer"})
    convert(tiny, tmp_path / "m.gguf")
    _, tokenizer = maxjax.load(tmp_path / "m.gguf")
    read = load_tokenizer(tiny)
    assert [tokenizer.encode(t) for t in TEXTS] == [read.encode(t) for t in TEXTS]
    assert read.encode("<think>") == before.encode("<think>") == [LAST]


@pytest.mark.parametrize(
    "name, content",
    [
        ("tokenizer_config", {"added_tokens_decoder": []}),
        ("tokenizer_config", {"added_tokens_decoder": {"x": entry("<x>")}}),
        ("tokenizer_config", {"added_tokens_decoder": {"-1": entry("<x>")}}),
        ("tokenizer_config", {"added_tokens_decoder": {"9" * 12: entry("<x>")}}),
        ("tokenizer_config", {"added_tokens_decoder": {"5": "<x>", "6": 3}}),
        ("tokenizer_config", {"added_tokens_decoder": {"5": {"content": 3}}}),
        ("tokenizer_config", {"added_tokens_decoder": {"5": entry("<x>", lstrip=3)}}),
        ("tokenizer_config", {"extra_special_tokens": 3}),
        ("tokenizer_config", {"additional_special_tokens": [3]}),
        ("tokenizer_config", {"eos_token": ["<x>"]}),
        ("special_tokens_map", {"eos_token": 3}),
        ("special_tokens_map", {"additional_special_tokens": {"a": 3}}),
        ("added_tokens", {"<x>": "5x"}),
        ("added_tokens", {"<x>": -5}),
        ("added_tokens", {"<x>": 2**31}),
        ("added_tokens", {"<x>": True}),
    ],
)
def test_what_is_no_token(tmp_path, gpt2, name, content):
    with pytest.raises(CheckpointFormatError) as caught:
        load_tokenizer(put(tmp_path, tokenizer=gpt2, **{name: content}))
    assert caught.value.path == str(tmp_path / f"{name}.json")


# --- without a tokenizer.json -------------------------------------------------------------------


def pairs(document):
    """The older files of a tokenizer of GPT-2's kind."""
    merges = "\n".join(" ".join(pair) for pair in document["model"]["merges"])
    return {"vocab": document["model"]["vocab"], "merges": f"#version: 0.2\n{merges}\n"}


CLASSES = {
    "GPT2Tokenizer": {}, "GPT2TokenizerFast": {"add_prefix_space": True},
    "CodeGenTokenizer": {"eos_token": "<|end|>"}, "GPTNeoXTokenizer": {"pad_token": "<|begin|>"},
    "Qwen2Tokenizer": {"eos_token": "<|end|>", "pad_token": "<|end|>", "clean_up_tokenization_spaces": True},
    "Qwen2TokenizerFast": {"additional_special_tokens": ["<x>"], "add_bos_token": False},
    "RobertaTokenizer": {}, "BartTokenizer": {"add_prefix_space": True},
    "GPT2Tokenizer+": {"add_bos_token": True, "bos_token": "<|begin|>"},
    "GPT2Tokenizer++": {"add_bos_token": True, "add_eos_token": True, "eos_token": "<|end|>"},
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_vocab_and_merges(tmp_path, gpt2, name):
    settings = {"tokenizer_class": name.rstrip("+"), **CLASSES[name]}
    decoder = {"500": entry("<think>"), "501": entry("<y>", True)}
    put(tmp_path, **pairs(byte_level("qwen2") if "Qwen" in name else gpt2))
    assert_as_transformers(put(tmp_path, tokenizer_config=settings))
    settings["added_tokens_decoder"] = decoder
    found = assert_as_transformers(put(tmp_path, tokenizer_config=settings))
    # What is written has all of it in one file.
    again = load_tokenizer(written(found, tmp_path / "b"))
    assert [again.encode(t) for t in (*SOME, *TEXTS)] == [found.encode(t) for t in (*SOME, *TEXTS)]
    assert again.eos_ids == found.eos_ids


@pytest.mark.parametrize("model_type", ["gpt2", "qwen2", "qwen3", "gpt_neox", "roberta"])
def test_the_class_by_the_model(tmp_path, gpt2, model_type):
    put(tmp_path, **pairs(gpt2), config={"model_type": model_type})
    assert_as_transformers(tmp_path)


def test_added_tokens_without_a_tokenizer_json(tmp_path, gpt2):
    """As Qwen's first checkpoints have them: the vocabulary, and the rest with its numbers."""
    files = pairs(gpt2)
    put(tmp_path, **files, added_tokens={"<|endoftext|>": 500, "<think>": 501},
        tokenizer_config={"tokenizer_class": "Qwen2Tokenizer"})  # fmt: skip
    found = assert_as_transformers(tmp_path)
    assert found.encode("<think>") == [501] and found.eos_ids == (500,)


@pytest.mark.parametrize(
    "name", ["BertTokenizer", "DistilBertTokenizerFast", "ElectraTokenizer", None]
)
@pytest.mark.parametrize(
    "more",
    [{}, {"do_lower_case": False}, {"strip_accents": False, "tokenize_chinese_chars": False}],
)
def test_a_list_of_words(tmp_path, name, more):
    letters = sorted({letter for word in WORDS for letter in word.strip()})
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*marks, *letters, *dict.fromkeys(w.lower() for w in WORDS if len(w.strip()) > 1)]
    words += [f"##{letter}" for letter in "aeiouknst" + "a"]  # one of them twice
    settings = {"tokenizer_class": name, **more} if name else more
    put(
        tmp_path, vocab="\r\n".join(words), config={"model_type": "bert"}, tokenizer_config=settings
    )
    found = assert_as_transformers(tmp_path)
    assert found.tokens(["a b"])[0].ids[0] == found._backend.token_to_id("[CLS]")


def test_minilm_by_its_words(minilm, tmp_path):
    for name in ("vocab.txt", "tokenizer_config.json", "special_tokens_map.json", "config.json"):
        shutil.copy(minilm / name, tmp_path)
    whole, found = load_tokenizer(minilm), load_tokenizer(tmp_path)
    assert [found.encode(t) for t in TEXTS] == [whole.encode(t) for t in TEXTS]
    assert (found.pad_id, found.vocab_size, found.max_length) == (0, 30522, 512)


@pytest.mark.parametrize(
    "settings, said",
    [({"tokenizer_class": "WhisperTokenizer"}, "WhisperTokenizer"), ({}, "not name its class"), (FAST, "PreTrained"),
     ({"tokenizer_class": "BertTokenizer"}, "BertTokenizer"), ({"tokenizer_class": ["x"]}, "x")],
)  # fmt: skip
def test_a_class_that_is_not_known(tmp_path, gpt2, settings, said):
    put(tmp_path, **pairs(gpt2), tokenizer_config=settings)
    with pytest.raises(UnsupportedModelError, match=said) as caught:
        load_tokenizer(tmp_path)
    assert "tokenizer.json" in str(caught.value) and "tokenizer=False" in str(caught.value)


@pytest.mark.parametrize("name", ["vocab.bpe", "qwen.tiktoken"])
def test_a_format_that_is_not_read_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"\n\x05\n\x01a")
    with pytest.raises(UnsupportedModelError, match=name):
        load_tokenizer(tmp_path)
    shutil.copytree(find_model("tiny"), tmp_path / "tiny")
    (tmp_path / "tiny" / "tokenizer.json").unlink()
    (tmp_path / name).rename(tmp_path / "tiny" / name)
    with pytest.raises(UnsupportedModelError, match=r"tokenizer=False"):
        maxjax.load(tmp_path / "tiny")
    assert maxjax.load(tmp_path / "tiny", tokenizer=False)[1] is None


def test_half_a_pair(tmp_path, gpt2):
    put(tmp_path, **pairs(gpt2), tokenizer_config={"tokenizer_class": "GPT2Tokenizer"})
    (tmp_path / "merges.txt").rename(tmp_path / "away")
    with pytest.raises(CheckpointMissingError, match=r"merges\.txt"):
        load_tokenizer(tmp_path)
    (tmp_path / "away").rename(tmp_path / "merges.txt")
    (tmp_path / "vocab.json").unlink()
    with pytest.raises(CheckpointMissingError, match=r"vocab\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "name, content",
    [("merges.txt", "a"), ("merges.txt", "a b c"), ("merges.txt", "zz yy"), ("merges.txt", "\n"),
     ("merges.txt", b"\xff"), ("vocab.json", "[]"), ("vocab.json", '{"a": -1}'), ("vocab.json", '{"a": "b"}'),
     ("vocab.json", "{"), ("vocab.json", '{"a": 1e5}')],
)  # fmt: skip
def test_broken_pairs(tmp_path, gpt2, name, content):
    put(tmp_path, **pairs(gpt2), tokenizer_config={"tokenizer_class": "GPT2Tokenizer"})
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.path == str(tmp_path / name)


LEFT = {"max_length": 2, "stride": 0, "strategy": "LongestFirst", "direction": "Left"}


@pytest.mark.parametrize(
    ("truncation", "settings", "is_left"),
    [
        (None, {"truncation_side": "left"}, True),
        (LEFT, {}, True),
        (LEFT, {"truncation_side": "right"}, False),
        (None, {}, False),
    ],
)
def test_the_side_that_is_truncated(tmp_path, gpt2, truncation, settings, is_left):
    """As in transformers: what tokenizer_config.json says, else tokenizer.json, else the end."""
    put(tmp_path, tokenizer=gpt2 | {"truncation": truncation}, tokenizer_config=FAST | settings)
    found = load_tokenizer(tmp_path)
    ids = found.encode(TEXTS[0])
    expected = ids[-3:] if is_left else ids[:3]
    for one in (found, load_tokenizer(written(found, tmp_path / "again"))):
        assert one.tokens([TEXTS[0]], max_length=3)[0].ids == expected != ids


def test_what_is_written_counts_more_than_what_lies_there(tmp_path, gpt2):
    """As in a directory that another model was saved in before."""
    one, other = tmp_path / "a", tmp_path / "b"
    put(one if one.mkdir() is None else one, tokenizer=gpt2, special_tokens_map={"eos_token": "<y>"},
        tokenizer_config={"eos_token": "<x>"})  # fmt: skip
    before = load_tokenizer(one)
    put(written(before, other), added_tokens={"<old>": N + 9})
    again = load_tokenizer(other)
    assert again.files() == before.files() and again.eos_ids == before.eos_ids
    assert "<old>" not in again._backend.get_vocab()
    assert ask_of(other, "eos_token", lambda: oracle_of(other).eos_token) == "<y>"


@pytest.mark.parametrize(
    "change", [{"do_lower_case": False}, {"strip_accents": False}, {"tokenize_chinese_chars": False}, {}],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["BertTokenizer", "PreTrainedTokenizerFast"])
def test_settings_of_berts_normaliser_beside_its_tokenizer(minilm, tmp_path, kind, change):
    for name in ("tokenizer.json", "vocab.txt", "config.json"):
        if (minilm / name).exists():
            (tmp_path / name).write_bytes((minilm / name).read_bytes())
    settings = json.loads((minilm / "tokenizer_config.json").read_text())
    settings = {
        k: v for k, v in settings.items() if k not in ("strip_accents", "tokenize_chinese_chars")
    }
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(settings | {"tokenizer_class": kind} | change)
    )
    text = "H\u00e9llo W\u00f6rld \u4f60\u597d caf\u00e9"
    theirs = lambda: transformers.AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"]
    assert load_tokenizer(tmp_path).encode(text) == recorded(theirs)
