"""Byte-pair tokenizers out of GGUF metadata against those that the metadata was made of.

The whole tokenizer.json that a file may hold is left out: all is rebuilt.
"""

import copy
import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxjax.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointLimitError,
    UnsupportedModelError,
)
from maxjax.models.gguf import gguf_tokenizer_metadata, tokenizer_json
from maxjax.models.gguf.tokenizer.read import end_ids, special_tokens
from maxjax.models.gguf.tokenizer.splits import SPLITTINGS, pre_name
from maxjax.storage.gguf.writer import plan_gguf
from tests.models.gguf import llama_cpp
from tests.oracles.recorded import recorded, transformers

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")
files = pytest.importorskip("tests.models.gguf.tokenizer.tokenizer_files")

KEY = "tokenizer.ggml."
ODD = [
    *files.TEXTS, "<|begin|>hi<|end|> there", "a<user>b <user> <user>", "<s>x</s> y", "</s>", "<unk>", "<0x41>",
    "🙂" * 40, "ΆΈ Ὄ K Å ﬁ",
    "👩‍👩‍👧‍👦 zwj", "\u0000\u0001 ctrl", "e\u0301 decomposed", "  ▁ literal ▁▁ ", "1 2  3   4    5", "x\u00a0y\u2003z",
    "'S 'RE don’t", "ǅ ǆ ﬁ Ⅷ ½", "שלום عربى हिन्दी ไทย", "\r\n\r\n\t\n ", "https://a.b/c?d=e&f#g", "∑∫√≈≠", "\ufeffbom",
]  # fmt: skip
DECOMPOSED = "e\u0301 decomposed"


def built(metadata):
    return tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(metadata)))


def through(data, settings=None, **more):
    return gguf_tokenizer_metadata(data, settings, keep_json=False, **more)


def same(ours, oracle, texts=ODD):
    oracle.no_padding()
    for text in texts:
        for special in (True, False):
            a, b = (t.encode(text, add_special_tokens=special) for t in (ours, oracle))
            assert a.ids == b.ids, text
            assert a.tokens == b.tokens, text
        for skip in (True, False):
            assert ours.decode(b.ids, skip) == oracle.decode(b.ids, skip), text


# --- GPT-2's ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", files.BYTE_LEVEL)
def test_byte_level_comes_back(name):
    data = files.byte_level(name)
    metadata = through(data, {"bos_token": "<|begin|>", "eos_token": "<|end|>"})
    made = tokenizer_json(metadata)
    if made["normalizer"]:  # Qwen's compose, which GGUF does not say
        data["normalizer"] = {"type": "NFC"}
    oracle = tokenizers.Tokenizer.from_str(json.dumps(data))
    same(built(metadata), oracle)
    assert made["model"]["vocab"].items() >= data["model"]["vocab"].items()


def test_each_name_that_is_written_is_read_as_the_same():
    for pattern, ignores, name in files.BYTE_LEVEL.values():
        splitting = SPLITTINGS[name]
        data = {"normalizer": splitting.normalizer, "pre_tokenizer": splitting.pre_tokenizer}
        assert pre_name(data, {"ignore_merges": splitting.ignore_merges}, None) == name
        assert splitting.ignore_merges is ignores, pattern


@pytest.mark.parametrize("name", SPLITTINGS)
def test_each_way_of_splitting_runs_and_loses_nothing(name):
    metadata = through(files.byte_level("gpt2")) | {KEY + "pre": name}
    ours = built(metadata)
    for text in ODD:
        whole = ours.normalizer.normalize_str(text) if ours.normalizer else text
        assert ours.decode(ours.encode(text, add_special_tokens=False).ids, False) == whole


def test_digits_and_marks_as_deepseek_falcon_and_old_files_cut_them():
    cut = lambda name, text: [
        piece
        for piece, _ in tokenizers.pre_tokenizers.Sequence(
            [_loaded(SPLITTINGS[name].pre_tokenizer)]
        ).pre_tokenize_str(text)
    ]
    assert cut("deepseek-v3", "a12345 漢字x") == ["a", "123", "45", "Ġ", "æ¼¢åŃĹ", "x"]
    assert cut("kimi-k2", "漢字x's 1234") == ["æ¼¢åŃĹ", "x's", "Ġ", "123", "4"]
    assert cut("falcon", "a12345, b") == ["a", "123", "45", ",", "Ġb"]
    assert cut("smollm", "a12") == ["a", "1", "2"]
    assert cut("deepseek-coder", "ab 12\n!") == ["ab", "Ġ", "1", "2", "Ċ", "!"]
    assert cut("default", "`x`$y") == ["`", "x", "`", "$", "y"]


def _loaded(pre_tokenizer):
    data = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}
    data["pre_tokenizer"] = pre_tokenizer
    return tokenizers.Tokenizer.from_str(json.dumps(data)).pre_tokenizer


def test_a_text_begins_as_the_file_says_or_as_its_kind_does():
    metadata = through(files.byte_level("gpt2"), {"bos_token": "<|begin|>", "eos_token": "<|end|>"})
    around = lambda **more: built(metadata | {KEY + k: v for k, v in more.items()}).encode("").ids
    assert around() == []
    assert around(add_bos_token=True) == [0]
    assert around(add_bos_token=True, add_eos_token=True) == [0, 1]
    del metadata[KEY + "add_bos_token"]
    assert around(pre="llama-bpe") == [0] and around(pre="gpt-2") == []
    assert around(pre="llama-bpe", bos_token_id=None) == []


def test_a_way_of_splitting_that_is_unknown_is_named():
    metadata = through(files.byte_level("gpt2")) | {KEY + "pre": "newest-one"}
    with pytest.raises(UnsupportedModelError, match="m.gguf: .*'newest-one'.*llama-bpe"):
        tokenizer_json(metadata, path="m.gguf")


def test_files_that_name_no_way_of_splitting():
    metadata = through(files.byte_level("gpt2"))
    del metadata[KEY + "pre"]
    assert tokenizer_json(metadata)["pre_tokenizer"] == SPLITTINGS["default"].pre_tokenizer
    metadata["general.architecture"] = "gpt2"
    assert tokenizer_json(metadata)["pre_tokenizer"] == SPLITTINGS["gpt-2"].pre_tokenizer


def test_what_fills_the_table_is_no_token():
    metadata = through(files.byte_level("gpt2"), vocab_size=510)
    assert len(metadata[KEY + "tokens"]) == 510
    assert built(metadata).get_vocab_size() == 501


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_empty_tokens_are_none(kind):
    """llama.cpp gives each a name of its own, so that a file may have several."""
    data = files.byte_level("gpt2") if kind == "gpt2" else files.sentencepiece(True)
    metadata = through(data) if kind == "gpt2" else through(data, LLAMA)
    size, plain = len(metadata[KEY + "tokens"]), built(metadata)
    for key, value in (("tokens", ""), ("token_type", 1), ("scores", 0.0)):
        if KEY + key in metadata:
            metadata[KEY + key] = [*metadata[KEY + key], value, value]
    metadata[KEY + "token_type"] = [*map(int, metadata[KEY + "token_type"])]
    if kind == "llama":
        metadata[KEY + "scores"] = [*map(float, metadata[KEY + "scores"])]
    found = built(metadata)
    assert found.get_vocab_size() == plain.get_vocab_size()
    assert (
        found.encode("ab c").ids == plain.encode("ab c").ids
        and found.decode([size, size + 1]) == ""
    )


def test_ends_of_turns_are_control_tokens_whatever_the_file_says():
    metadata = through(files.byte_level("gpt2"), None, config={"eos_token_id": 1})
    metadata[KEY + "tokens"] = [*metadata[KEY + "tokens"], "<|im_end|>"]
    metadata[KEY + "token_type"] = [*metadata[KEY + "token_type"].tolist(), 1]
    assert built(metadata).encode("a<|im_end|>").ids[-1] == 501
    del metadata[KEY + "eos_token_id"]
    assert end_ids(metadata) == (1, 501)  # of which the first is "<|end|>"
    more = metadata | {KEY + "tokens": [*metadata[KEY + "tokens"], "<|return|>", "<|call|>"]}
    assert end_ids(more) == (501, 502, 503)
    metadata[KEY + "eos_token_id"] = 1
    metadata[KEY + "eot_token_id"] = 501
    assert end_ids(metadata) == (1, 501)
    assert special_tokens(metadata) == {"eos_token": "<|end|>"}
    metadata[KEY + "eos_token_id"] = 502
    with pytest.raises(CheckpointFormatError, match="eos_token_id' is out of range"):
        end_ids(metadata)


def test_special_tokens_of_phi_3_take_spaces_behind_them_along():
    """The file does not say it, so that llama.cpp looks at the name of the model."""
    metadata = through(files.byte_level("gpt2"), None, config={"eos_token_id": 1})
    metadata[KEY + "tokens"] = [*metadata[KEY + "tokens"], "<|user|>", "<|endoftext|>"]
    metadata[KEY + "token_type"] = [*metadata[KEY + "token_type"].tolist(), 3, 3]
    user, end = (len(metadata[KEY + "tokens"]) - n for n in (2, 1))
    plain = built(metadata).encode("<|user|>\n\na").ids
    found = built(metadata | {"general.name": "Phi-3 mini"})
    assert found.encode("<|user|>\n\na").ids == [user, plain[-1]] and len(plain) > 2
    assert found.encode("<|endoftext|>\na").ids == [end, *built(metadata).encode("\na").ids]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("modern-bert", "gpt-2"), ("roberta-bpe", "gpt-2"), ("jina-v5-nano", "llama-bpe"),
        ("f2llmv2", "qwen2"), ("solar-open", "stablelm2"), ("joyai-llm", "deepseek-v3"),
        ("kanana2", "gpt-4o"),
    ],
)  # fmt: skip
def test_names_of_one_way_of_splitting(name, other):
    metadata = through(files.byte_level("gpt2"), None, config={"eos_token_id": 1})
    del metadata[KEY + "add_bos_token"]
    found = [tokenizer_json(metadata | {KEY + "pre": one}) for one in (name, other)]
    assert found[0] == found[1]


# --- Llama's ------------------------------------------------------------------------------------

LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def llama_oracle(data):
    """The original; with the decoder of Llama's, which the made-up file lacks."""
    data = copy.deepcopy(data)
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    steps = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]  # fmt: skip
    first = {"type": "Prepend", "prepend": "▁"}
    has_prefix = first in data["normalizer"]["normalizers"]
    data["decoder"] = {"type": "Sequence", "decoders": [*steps, strip] if has_prefix else steps}
    return tokenizers.Tokenizer.from_str(json.dumps(data))


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_comes_back(prefix):
    data = files.sentencepiece(prefix)
    same(built(through(data, LLAMA)), llama_oracle(data))


def trained(text_count=400, size=700, seed=0):
    """BPE with bytes for what it has not, with the one merge of each token that training found."""
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    made.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, show_progress=False, special_tokens=special, max_token_length=12
    )
    lines = [line for line in files.corpus(text_count) if line.isascii()]
    random.Random(seed).shuffle(lines)
    words = [" " + word for line in lines for word in line.split()]
    made.train_from_iterator(words, trainer)
    data = json.loads(made.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["id"] < 3]
    return data


def test_a_trained_one_comes_back_for_the_words_it_was_trained_on():
    data = trained()
    ours, oracle = built(through(data, LLAMA)), llama_oracle(data)
    texts = [text for text in ODD if text == " ".join(text.split())]
    assert len(texts) > 20
    for text in texts:
        assert (
            ours.encode(text, add_special_tokens=False).ids
            == oracle.encode(text, add_special_tokens=False).ids
        ), text


def test_merges_are_those_of_transformers():
    metadata = through(files.sentencepiece(), LLAMA)
    tokens, types = metadata[KEY + "tokens"], metadata[KEY + "token_type"]
    draw = random.Random(3)
    scores = [-float(draw.randrange(200)) for _ in tokens]  # many are equal
    metadata[KEY + "scores"] = scores
    skip = {t for t, kind in zip(tokens, types, strict=True) if kind in (2, 3, 6)}
    vocab = {token: index for index, token in enumerate(tokens)}
    by_token = dict(zip(tokens, scores, strict=True))

    def merges():
        generate = transformers.tokenization_utils_base.generate_merges
        return [list(pair) for pair in generate(vocab, by_token, skip)]

    ours = tokenizer_json(metadata)["model"]["merges"]
    assert len(ours) > 400 and ours == recorded(merges)


def test_merges_in_the_file_are_taken():
    data = trained()
    metadata = through(data, LLAMA)
    pairs = data["model"]["merges"]
    metadata[KEY + "merges"] = [p if isinstance(p, str) else " ".join(p) for p in pairs]
    same(built(metadata), llama_oracle(data), [t for t in ODD if "<" not in t])


def test_gemma_4s_kind_is_llamas_with_merges_and_no_usual_ids():
    data = files.sentencepiece(False)
    metadata = through(data, LLAMA) | {KEY + "model": "gemma4"}
    metadata[KEY + "merges"] = [" ".join(pair) for pair in data["model"]["merges"]]
    del metadata[KEY + "add_space_prefix"], metadata[KEY + "scores"]
    metadata |= {KEY + f"{name}_token_id": i for i, name in enumerate(("unknown", "bos"))}
    same(built(metadata), llama_oracle(data), [t for t in ODD if "<" not in t])
    del metadata[KEY + "bos_token_id"]
    assert tokenizer_json(metadata)["post_processor"] is None
    del metadata[KEY + "merges"]
    with pytest.raises(CheckpointFormatError, match="merges' is missing"):
        tokenizer_json(metadata)


def test_gemmas_merges_are_in_the_order_of_its_tokens():
    metadata = through(files.sentencepiece(False), LLAMA) | {"general.architecture": "gemma2"}
    metadata[KEY + "scores"] = np.zeros(len(metadata[KEY + "tokens"]), np.float32)
    data = files.sentencepiece(False)
    same(built(metadata), llama_oracle(data), [t for t in ODD if "<" not in t])


def test_runs_of_spaces_that_were_added_are_found_by_merges():
    tokens = ["<unk>", "<s>", "</s>", "▁", "  ", "   ", "a", "▁a", "b", " <x>"]
    metadata = {
        KEY + "model": "llama", KEY + "tokens": tokens, KEY + "scores": [0.0] * 4 + [-1.0, -2.0, 0.0, -3.0, 0.0, 0.0],
        KEY + "token_type": [2, 3, 3, 1, 4, 4, 1, 1, 1, 4], KEY + "add_space_prefix": False,
        KEY + "add_bos_token": False,
    }  # fmt: skip
    ours = built(metadata)
    assert ours.encode("a  b").ids == [6, 4, 8]
    assert ours.encode("a   b a").ids == [6, 5, 8, 7]
    assert ours.encode("a <x>").ids == [6, 9]
    assert ours.decode([6, 5, 8, 9]) == "a   b <x>"


def test_no_merge_makes_or_uses_a_special_token():
    tokens = ["<unk>", "<s>", "</s>", "<", "s", ">", "s>", "<0x41>", "<0", "x41>", "</", "</s>s"]
    metadata = {
        KEY + "model": "llama", KEY + "tokens": tokens, KEY + "scores": [0.0] * len(tokens),
        KEY + "token_type": [2, 3, 3, 1, 1, 1, 1, 6, 1, 1, 1, 1],
    }  # fmt: skip
    assert tokenizer_json(metadata)["model"]["merges"] == [["s", ">"]]


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"scores": None}, CheckpointFormatError, "scores' is missing"),
        ({"scores": [0.0]}, CheckpointFormatError, "another length"),
        ({"scores": "abc"}, CheckpointFormatError, "wrong type"),
        ({"scores": [float("nan")] * 4}, CheckpointFormatError, "finite"),
        ({"tokens": []}, CheckpointFormatError, "another length"),
        ({"tokens": [], "token_type": []}, CheckpointFormatError, "is empty"),
        ({"tokens": ["a", "a", "b", "c"]}, CheckpointFormatError, "twice"),
        ({"tokens": ["<unk>", "<s>", "</s>", "a" * 600]}, CheckpointLimitError, "at most 512"),
        ({"token_type": [1]}, CheckpointFormatError, "another length"),
        ({"bos_token_id": 4}, CheckpointFormatError, "out of range"),
        ({"unknown_token_id": -1}, CheckpointFormatError, "out of range"),
        ({"add_bos_token": 1}, CheckpointFormatError, "wrong type"),
        ({"add_space_prefix": "x"}, CheckpointFormatError, "wrong type"),
        ({"merges": ["a b"]}, CheckpointFormatError, "wrong merge"),
        ({"merges": ["ab"]}, CheckpointFormatError, "wrong merge"),
        ({"model": "gpt2"}, CheckpointFormatError, "merges' is missing"),
        ({"model": "gpt2", "merges": ["a"]}, CheckpointFormatError, "wrong merge"),
        ({"model": "gpt2", "merges": 3}, CheckpointFormatError, "wrong type"),
        ({"model": "gpt2", "pre": 3}, CheckpointFormatError, "wrong type"),
        ({"model": "t5", "scores": [0.0]}, CheckpointFormatError, "scores"),
        ({"model": "plamo2"}, UnsupportedModelError, "plamo2"),
    ],
)
def test_keys_that_are_missing_or_wrong(change, error, says):
    data = {
        KEY + "model": "llama", KEY + "tokens": ["<unk>", "<s>", "</s>", "a"],
        KEY + "scores": [0.0] * 4, KEY + "token_type": [2, 3, 3, 1],
    }  # fmt: skip
    assert built(data).encode("a").tokens[0] == "<s>"
    with pytest.raises(error, match=says) as info:
        tokenizer_json(data | {KEY + k: v for k, v in change.items()}, path="m.gguf")
    assert str(info.value).startswith("m.gguf: ")


ANY = st.none() | st.booleans() | st.integers(-2, 9) | st.text(max_size=4) | st.floats()
ANY |= st.lists(st.text(max_size=3) | st.integers(-1, 7) | st.floats(), max_size=5)


@given(
    st.dictionaries(
        st.sampled_from(
            ["model", "pre", "tokens", "scores", "token_type", "merges", "bos_token_id",
             "unknown_token_id", "add_bos_token", "add_space_prefix"]
        ), ANY | st.sampled_from(["gpt2", "llama", "gpt-2"]), max_size=3,
    )
)  # fmt: skip
def test_whatever_a_file_says_only_our_errors_leave(change):
    data = {
        KEY + "model": "llama", KEY + "tokens": ["<unk>", "<s>", "</s>", "a"],
        KEY + "scores": [0.0] * 4, KEY + "token_type": [2, 3, 3, 1],
    }  # fmt: skip
    try:
        json.dumps(tokenizer_json(data | {KEY + k: v for k, v in change.items()}))
    except (CheckpointError, UnsupportedModelError):
        pass


# --- llama.cpp ----------------------------------------------------------------------------------


def on_llama_cpp(path, metadata, texts):
    """Our tokens and llama.cpp's of texts that have no special token in them."""
    path.write_bytes(
        b"".join(plan_gguf({"general.architecture": "llama", **metadata}, []).pieces())
    )
    ours = built(metadata)
    texts = [text for text in texts if "<" not in text and "\u0000" not in text]
    found = llama_cpp.tokens(path, texts)
    for text, ids in zip(texts, found, strict=True):
        assert ids == ours.encode(text, add_special_tokens=False).ids, text


needs_llama_cpp = pytest.mark.skipif(not llama_cpp.available(), reason="there is no llama.cpp")


@needs_llama_cpp
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("kind", ["all", "trained"])
def test_sentencepiece_is_as_in_llama_cpp(kind, prefix, tmp_path):
    data = files.sentencepiece(prefix) if kind == "all" else trained()
    on_llama_cpp(tmp_path / "m.gguf", through(data, LLAMA), ODD)


# llama.cpp's own pattern takes other letters for these, or it takes Han for no letters.
CASES = ("tekken", "gpt-4o", "llama4", "minimax-m2")


@needs_llama_cpp
@pytest.mark.parametrize("name", [n for n in SPLITTINGS if n not in CASES and n != "qwen35"])
def test_ways_of_splitting_are_as_in_llama_cpp(name, tmp_path):
    texts = [text for text in ODD if text != DECOMPOSED]
    metadata = through(files.byte_level("gpt2")) | {KEY + "pre": name}
    on_llama_cpp(tmp_path / "m.gguf", metadata, texts)
