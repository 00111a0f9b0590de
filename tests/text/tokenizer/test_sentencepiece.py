"""SentencePiece's models and tekken.json without tokenizer.json, against sentencepiece's own tokens."""

import base64
import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import maxjax
from maxjax.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointLimitError,
    UnsupportedModelError,
)
from maxjax.models.gguf import gguf_tokenizer_metadata, tokenizer_json
from maxjax.models.gguf.tokenizer.bpe import cuts
from maxjax.text.tokenizer.files import backend_of
from tests.oracles.recorded import FOLDER

KINDS = ("unigram", "bytes", "spaces", "no prefix", "llama", "gemma")


@pytest.fixture(scope="module")
def golden():
    found = np.load(FOLDER / "sentencepiece.npz")
    return {
        name: found[name].tobytes()
        if name.startswith("model")
        else json.loads(found[name].tobytes())
        for name in found.files
    }


def texts():
    import random

    rng = random.Random(0)
    letters = " \n\taAbc.é猫🐱ﬁ１▁<>0x"
    return SOME + ["".join(rng.choices(letters, k=rng.randint(1, 24))) for _ in range(120)]


SOME = [
    "", " ", "   ", "\n", "\r\nx\r\n", " leading", "trailing  ", "  two  spaces  ", "a\tb\n\nc",
    "🐱🐶 👨‍👩‍👧", "ﬁne １ ①Ａ　b", "naïve café e\u0301", "x\u200by\ufeff", "猫が座った。", "Привет, мир!",
    "a" * 40, "▁under", "end▁", "\x01\x02", "\u2028x", "don't  stop", "1234 5",
]  # fmt: skip


def put(directory, model, **settings):
    (directory / "tokenizer.model").write_bytes(model)
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_sentencepiece(tmp_path, golden, kind):
    tokenizer = maxjax.load_tokenizer(put(tmp_path, golden[f"model {kind}"]))
    rows = [row.ids for row in tokenizer.tokens(texts(), special=False)]
    wrong = [t for t, a, b in zip(texts(), rows, golden[f"ids {kind}"], strict=True) if a != b]
    assert not wrong
    for row, said in zip(rows, golden[f"said {kind}"], strict=True):
        if said is not None:  # sentencepiece leaves out all spaces at the beginning
            found = tokenizer.decode(row, skip_special=False)
            assert found.lstrip(" ") == said.lstrip(" ")


def test_xlm_roberta_numbers_tokens_as_fairseq(tmp_path, golden):
    (tmp_path / "sentencepiece.bpe.model").write_bytes(golden["model unigram"])
    (tmp_path / "config.json").write_text('{"model_type": "xlm-roberta"}')
    tokenizer = maxjax.load_tokenizer(tmp_path)
    [row] = tokenizer.tokens(["the end"])
    own = golden["ids unigram"]
    assert (row.ids[0], row.ids[-1], tokenizer.pad_id) == (0, 2, 1)
    [pair] = tokenizer.pairs([("the", "end")])
    assert pair.ids.count(2) == 3 and set(pair.type_ids) == {0}
    for ids, text in zip(own, texts(), strict=True):
        assert tokenizer.encode(text, special=False) == [i + 1 if i else 3 for i in ids]
    assert tokenizer.special_tokens["mask_token"] == "<mask>"
    (tmp_path / "config.json").unlink()
    plain = maxjax.load_tokenizer(put(tmp_path, golden["model unigram"]))
    assert tokenizer.vocab_size == 2 + plain.vocab_size


@pytest.mark.parametrize(
    ("config", "settings", "count"),
    [
        ({"model_type": "t5"}, {}, 100),
        ({"model_type": "mt5"}, {"extra_ids": 3}, 3),
        ({}, {"tokenizer_class": "T5Tokenizer"}, 100),
        ({}, {"tokenizer_class": "T5Tokenizer", "extra_ids": 0}, 0),
        ({}, {"tokenizer_class": "T5Tokenizer", "additional_special_tokens": ["<extra_id_0>", "<extra_id_1>"]}, 100),
    ],
)  # fmt: skip
def test_the_sentinels_of_t5_have_the_ids_of_transformers(tmp_path, config, settings, count):
    """As T5Converter of transformers 5.24: after the tokens of the file, the first with the highest id."""
    model = piece(b"<pad>", 0.0, 3) + piece(b"</s>", 0.0, 3) + piece(b"<unk>", 0.0, 2)
    model += b"".join(piece(text.encode(), -2.0) for text in ("▁", "▁the", "a"))
    model += field(2, field(3, 1) + field(40, 2) + field(42, 1) + field(43, 0))
    (tmp_path / "spiece.model").write_bytes(model)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = maxjax.load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 6 + count
    if count:
        ids = [5 + count - i for i in (0, 1, count - 1)]
        for i, number in zip((0, 1, count - 1), ids, strict=True):
            assert tokenizer.encode(f"the<extra_id_{i}>", special=False) == [4, number]
        assert tokenizer.decode([4, ids[0], 5]) == "thea"
        assert tokenizer.decode([4, ids[0]], skip_special=False) == "the<extra_id_0>"


def test_too_many_sentinels_of_t5_are_refused(tmp_path, golden):
    settings = {"tokenizer_class": "T5Tokenizer", "extra_ids": 10**12}
    with pytest.raises(CheckpointLimitError, match="too many tokens"):
        maxjax.load_tokenizer(put(tmp_path, golden["model unigram"], **settings))


def test_special_tokens_and_prefixes(tmp_path, golden):
    tokenizer = maxjax.load_tokenizer(put(tmp_path, golden["model llama"]))
    assert tokenizer.encode("a")[0] == tokenizer.bos_id == 1
    assert tokenizer.encode("a</s>")[-1] == 2 == tokenizer.eos_ids[0]
    closed = maxjax.load_tokenizer(
        put(tmp_path, golden["model llama"], add_bos_token=False, add_eos_token=True)
    )
    assert closed.encode("a") == [*tokenizer.encode("a", special=False), 2]
    first = maxjax.load_tokenizer(put(tmp_path, golden["model llama"], legacy=False))
    assert first.encode("</s>a", special=False)[1:] != tokenizer.encode("</s>a", special=False)[1:]


@pytest.mark.parametrize("kind", ["unigram", "bytes", "spaces"])
def test_unigram_to_and_from_gguf(tmp_path, golden, kind):
    tokenizer = maxjax.load_tokenizer(put(tmp_path, golden[f"model {kind}"]))
    document = json.loads(tokenizer.files()["tokenizer.json"])
    metadata = gguf_tokenizer_metadata(document, keep_json=False)
    assert metadata["tokenizer.ggml.model"] == "t5"
    listed = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in metadata.items()}
    again = backend_of(json.dumps(tokenizer_json(listed)), None)
    for text, ids in zip(texts(), golden[f"ids {kind}"], strict=True):
        assert again.encode(text, add_special_tokens=False).ids == ids


def varint(n):
    return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def piece(text, score=0.0, kind=1):
    return field(1, field(1, text) + field(2, score) + field(3, kind))


GOOD = piece(b"<unk>", 0.0, 2) + piece(b"a", -1.0) + piece("▁".encode(), -2.0)


@pytest.mark.parametrize("legacy", [True, False])
def test_merged_pieces_of_normalised_texts(tmp_path, golden, legacy):
    model = golden["model unigram"] + field(
        2, field(3, 2)
    )  # the kind of the model alone is another
    tokenizer = maxjax.load_tokenizer(put(tmp_path, model, legacy=legacy))
    plain = tokenizer.encode("fi 1 the end", special=False)
    assert plain == [3, 30, 18, 3, 55, 3, 9, 22, 5, 3, 5, 11, 15]  # SentencePiece's own
    assert tokenizer.encode("  ﬁ １　 the\nend ", special=False) == plain
    assert tokenizer.decode(plain) == "fi 1 the end"
    assert tokenizer.encode(" ", special=False) == []


@pytest.mark.parametrize("kind", [1, 2])
def test_special_tokens_are_those_of_the_file(tmp_path, kind):
    names = [b"[UNK]", b"<BOS>", b"<EOS>", b"[PAD]"]
    pieces = b"".join(piece(text, 0.0, 3 if i else 2) for i, text in enumerate(names))
    model = pieces + piece(b"a", -1.0) + piece("▁".encode(), -2.0)
    model += field(2, field(3, kind) + field(43, 3))  # whose default is no padding
    tokenizer = maxjax.load_tokenizer(put(tmp_path, model))
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (1, (2,), 3)
    assert tokenizer.special_tokens["unk_token"] == "[UNK]"
    assert maxjax.load_tokenizer(put(tmp_path, GOOD)).bos_id is None  # the token 1 is "a"


@pytest.mark.parametrize(
    "content, error, named",
    [
        (b"", CheckpointFormatError, "SentencePiece"),
        (b"\n", CheckpointFormatError, "does not end"),
        (b"\n\xff\xff\xff\x7f", CheckpointFormatError, "longer"),
        (GOOD + b"\x80" * 20, CheckpointFormatError, "does not end"),
        (GOOD + piece(b"a"), CheckpointFormatError, "twice"),
        (GOOD + piece(b"\xff"), CheckpointFormatError, "UTF-8"),
        (GOOD + piece(b"b", 0.0, 9), CheckpointFormatError, "type"),
        (GOOD + piece(b"b", float("nan")), CheckpointFormatError, "finite"),
        (GOOD + field(2, field(3, 3)), UnsupportedModelError, "words"),
        (GOOD + field(2, field(3, 1) + field(24, 1)), UnsupportedModelError, "ends"),
        (GOOD + field(2, 5), CheckpointFormatError, "message"),
        (GOOD + field(3, field(2, b"x" * (1 << 21))), CheckpointFormatError, "too long"),
        (b"IQ== 0\nIg== 2\n", CheckpointFormatError, "line 2 is not a token"),
        (b"PK\x03\x04", CheckpointFormatError, "SentencePiece"),
    ],
)
def test_bad_models(tmp_path, content, error, named):
    with pytest.raises(error, match=named) as caught:
        maxjax.load_tokenizer(put(tmp_path, content))
    assert "tokenizer.model" in str(caught.value)


def test_a_cut_or_changed_model_is_an_error_or_another_model(tmp_path, golden):
    rng = np.random.default_rng(0)
    for number in range(150):
        data = bytearray(golden["model llama"])
        if number % 2:
            del data[int(rng.integers(len(data))) :]
        for at in rng.integers(0, len(data), 3) if data else ():
            data[at] = int(rng.integers(256))
        try:
            maxjax.load_tokenizer(put(tmp_path, bytes(data)))
        except (CheckpointError, UnsupportedModelError):
            pass


def test_other_classes_are_named(tmp_path, golden):
    with pytest.raises(UnsupportedModelError, match="BigBird"):
        maxjax.load_tokenizer(
            put(tmp_path, golden["model unigram"], tokenizer_class="BigBirdTokenizer")
        )


def grid(size):
    """Tokens of which each is made of others in as many ways as it has letters."""
    found = ["a" * i + "b" * j for i in range(size) for j in range(size)]
    return found[1:]


@pytest.mark.parametrize("kind", ["gguf", "sentencepiece", "tekken"])
def test_merges_are_counted_while_they_are_made(tmp_path, kind):
    texts = grid(90)  # 200 are 8 million merges
    with pytest.raises(CheckpointLimitError, match="begin with other tokens.*at most"):
        if kind == "gguf":
            key = "tokenizer.ggml."
            tokenizer_json(
                {key + "model": "llama", key + "tokens": texts, key + "scores": [0.0] * len(texts)}
            )
        elif kind == "sentencepiece":
            pieces = b"".join(piece(text.encode(), -1.0) for text in ["<unk>", *texts])
            maxjax.load_tokenizer(put(tmp_path, pieces + field(2, field(3, 2))))
        else:
            tokens = [bytes([i]) for i in range(256)] + [t.encode() for t in texts if len(t) > 1]
            vocab = [
                {"rank": i, "token_bytes": base64.b64encode(t).decode()}
                for i, t in enumerate(tokens)
            ]
            (tmp_path / "tekken.json").write_text(
                json.dumps(tekken(vocab=vocab, config={"pattern": _PATTERN}))
            )
            maxjax.load_tokenizer(tmp_path)


@settings(deadline=None)
@given(st.lists(st.text("abc", min_size=1, max_size=5), unique=True))
def test_pairs_are_all_of_the_ways_to_cut_a_token_into_two(texts):
    every = [
        (t, t[:i], t[i:]) for t in texts for i in range(1, len(t)) if {t[:i], t[i:]} <= {*texts}
    ]
    assert sorted(cuts(texts, None)) == sorted(every)
    as_bytes = [tuple(part.encode() for part in row) for row in every]
    assert sorted(cuts([t.encode() for t in texts], None)) == sorted(as_bytes)


# --- tekken ---------------------------------------------------------------------------------

_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def tekken(**changes):
    tokens = [bytes([b]) for b in range(256)] + [b"th", b"the", b" the", b"ing", b"in", b"\xe7\x8c"]
    vocab = [
        {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None}
        for i, t in enumerate(tokens)
    ]
    special = [{"rank": i, "token_str": t, "is_control": True}
               for i, t in enumerate(["<unk>", "<s>", "</s>", "[INST]"])]  # fmt: skip
    config = {"pattern": _PATTERN, "default_vocab_size": 10 + len(tokens) - 1,
              "default_num_special_tokens": 10, "version": "v11"}  # fmt: skip
    return {"config": config, "vocab": vocab, "special_tokens": special} | changes


def test_tekken(tmp_path):
    (tmp_path / "tekken.json").write_text(json.dumps(tekken()))
    tokenizer = maxjax.load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 10 + 256 + 5  # what the vocabulary is padded with is left out
    the = 10 + 256 + 2
    assert tokenizer.encode("a the") == [1, 10 + ord("a"), the]
    assert tokenizer.encode("[INST]<SPECIAL_7>", special=False) == [3, 7]
    for text in ["", "the thing\n\n", "猫 🐱", "\x00\xff", "  a  "]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"config": None}, "config"),
        ({"config": {"pattern": 3}}, "pattern"),
        ({"config": {"pattern": _PATTERN, "default_vocab_size": -1}}, "default_vocab_size"),
        ({"special_tokens": [{"rank": 1, "token_str": "a"}]}, "ranks"),
        ({"special_tokens": [{"rank": 0, "token_str": 3}]}, "token_str"),
        ({"vocab": [{"rank": 0, "token_bytes": "%"}]}, "base64"),
        ({"vocab": [{"rank": 1, "token_bytes": "YQ=="}]}, "rank"),
        (
            {"vocab": [{"rank": 0, "token_bytes": "YQ=="}, {"rank": 1, "token_bytes": "YQ=="}]},
            "twice",
        ),
        ({"config": {"pattern": "(a+)+$"}}, "expression that is refused"),
        ({"vocab": 3}, "vocab"),
    ],
)
def test_bad_tekken(tmp_path, changes, named):
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(**changes)))
    with pytest.raises(CheckpointError, match=named):
        maxjax.load_tokenizer(tmp_path)
