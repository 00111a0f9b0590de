"""SentencePiece's models and ``tiktoken.model`` in classes of transformers, without a tokenizer.json.

The oracle is transformers' class, which reads the same files. It needs no package for them but a check for that:
it parses SentencePiece's models by protobuf, and lines of base64 are read here.
"""

import base64
import contextlib
import json
import random

import numpy as np
import pytest

import maxjax
from maxjax.errors import CheckpointFormatError, CheckpointLimitError, UnsupportedModelError
from maxjax.models.gguf.tokenizer.splits import KIMI
from maxjax.text.tokenizer.sentencepiece import _Model
from maxjax.text.tokenizer.tokenizer import load_tokenizer
from tests.models.gguf.tokenizer.tokenizer_files import byte_level
from tests.oracles.recorded import FOLDER, recorded, transformers
from tests.text.tokenizer.test_sentencepiece import field, piece

NAMES = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
FAIRSEQ = [("<unk>", 2), ("<s>", 3), ("</s>", 3)]
CODES = {"extra_special_tokens": ["ace_Latn", "eng_Latn", "fra_Latn"]}
# Class → name of the file, its first pieces with their types, the numbers of unk, bos, eos and pad, and settings.
CLASSES = {
    "Albert": (
        "spiece.model", [("<pad>", 3), ("<unk>", 2), ("[CLS]", 3), ("[SEP]", 3), ("[MASK]", 4)],
        (1, 2, 3, 0), [{}, {"do_lower_case": False, "keep_accents": True, "add_prefix_space": False}],
    ),
    "DebertaV2": (
        "spm.model", [("[PAD]", 3), ("[CLS]", 3), ("[SEP]", 3), ("[UNK]", 2)], (3, 1, 2, 0),
        [{}, {"do_lower_case": True, "split_by_punct": True, "add_prefix_space": False}],
    ),
    "Camembert": ("sentencepiece.bpe.model", FAIRSEQ, (0, 1, 2, -1), [{}, {"add_prefix_space": False}]),
    "MBart": ("sentencepiece.bpe.model", FAIRSEQ, (0, 1, 2, -1), [{}, {"src_lang": "de_DE"}]),
    "MBart50": ("sentencepiece.bpe.model", FAIRSEQ, (0, 1, 2, -1), [{}, {"src_lang": "gl_ES"}]),
    "T5": (
        "spiece.model", [("<pad>", 3), ("</s>", 3), ("<unk>", 2)], (2, -1, 1, 0), [{}, {"extra_ids": 3}],
    ),
    "Nllb": (
        "sentencepiece.bpe.model", FAIRSEQ, (0, 1, 2, -1),
        [CODES, CODES | {"src_lang": "fra_Latn", "legacy_behaviour": True}],
    ),
}  # fmt: skip
CASES = [(name, number) for name, (*_, each) in CLASSES.items() for number in range(len(each))]


def texts():
    rng = random.Random(1)
    letters = " \n\taAbc.é猫🐱ﬁ１▁<>0xThe,'"
    return [
        "", " ", "   ", "Hello the world", " a  b\tc\n", "Déjà-vu, naïve ①Ａ", "<mask>x <mask>", "a <mask> b",
        "[MASK] a [CLS]b[UNK]", "don't  stop", "''quoted`` THE", "</s>a<s>", "the<extra_id_0>a", "ends. ",
        "en_XX the fra_Latn", "<pad>",
        *("".join(rng.choices(letters, k=rng.randint(1, 24))) for _ in range(120)),
    ]  # fmt: skip


def written(directory, name, number=0, **more):
    """The files of a class: its first pieces, and the others and the table of the model that sentencepiece trained."""
    golden = np.load(FOLDER / "sentencepiece.npz")
    directory.mkdir(exist_ok=True)
    (directory / "whole").write_bytes(golden["model unigram"].tobytes())
    model = _Model(directory / "whole")
    file, first, (unknown, bos, eos, pad), settings = CLASSES[name]
    data = b"".join(piece(text.encode(), 0.0, kind) for text, kind in first)
    rest = zip(model.pieces, model.scores, model.types, strict=True)
    data += b"".join(piece(text.encode(), score) for text, score, kind in rest if kind == 1)
    data += piece("▁user".encode(), 0.0, 4)
    bos, pad = (one if one >= 0 else (1 << 64) - 1 for one in (bos, pad))
    data += field(
        2, field(3, 1) + field(40, unknown) + field(41, bos) + field(42, eos) + field(43, pad)
    )
    data += field(3, field(2, model.charsmap))
    (directory / "whole").unlink()
    (directory / file).write_bytes(data)
    config = {"tokenizer_class": f"{name}Tokenizer", **settings[number], **more}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@contextlib.contextmanager
def without_packages():
    """Lets transformers read the files without the packages sentencepiece and tiktoken."""
    import importlib

    module = importlib.import_module("transformers.convert_slow_tokenizer")
    converter, before = module.TikTokenConverter, module.requires_backends
    load = converter.__dict__["load_tiktoken_bpe"]

    def read(path):
        with open(path, "rb") as file:
            pairs = [line.split() for line in file.read().splitlines() if line]
        return {base64.b64decode(token): int(rank) for token, rank in pairs}

    module.requires_backends = lambda *names: None
    converter.load_tiktoken_bpe = staticmethod(read)
    try:
        yield module
    finally:
        module.requires_backends, converter.load_tiktoken_bpe = before, load


def flags(token):
    one = [
        token.content,
        token.lstrip,
        token.rstrip,
        token.single_word,
        token.normalized,
        token.special,
    ]
    return [one[0], *map(bool, one[1:])]


def facts_of(directory, kind):
    """What transformers' class says of the files."""
    with without_packages():
        oracle = getattr(transformers, kind).from_pretrained(str(directory))
    rows = oracle(texts())["input_ids"]
    return {
        "ids": np.array([i for row in rows for i in row], np.int32),
        "lengths": np.array([len(row) for row in rows], np.int32),
        "texts": [
            [oracle.decode(row, skip_special_tokens=s) for s in (True, False)] for row in rows
        ],
        "pair": oracle("the", "end")["input_ids"],
        "added": {str(i): flags(token) for i, token in oracle.added_tokens_decoder.items()},
        "named": {name: getattr(oracle, name) for name in NAMES},
        "size": len(oracle),
    }


def assert_same(directory, facts):
    found = load_tokenizer(directory)
    rows = [row.tolist() for row in np.split(facts["ids"], np.cumsum(facts["lengths"])[:-1])]
    assert [row.ids for row in found.tokens(texts())] == rows
    for ids, expected in zip(rows, facts["texts"], strict=True):
        assert [found.decode(ids, skip_special=skip) for skip in (True, False)] == expected
    [pair] = found.pairs([("the", "end")])
    assert pair.ids == list(facts["pair"])
    added = found._backend.get_added_tokens_decoder()
    assert {str(i): flags(token) for i, token in added.items()} == facts["added"]
    assert {name: found.special_tokens.get(name) for name in NAMES} == facts["named"]
    assert found.vocab_size == facts["size"]
    return found


@pytest.mark.parametrize(("name", "number"), CASES)
def test_classes_of_sentencepiece(tmp_path, name, number):
    directory = written(tmp_path / "a", name, number)
    facts = recorded(lambda: facts_of(directory, f"{name}Tokenizer"))
    found = assert_same(directory, facts)
    # Saved, it is the same tokenizer.
    (tmp_path / "b").mkdir()
    for file, text in found.files().items():
        (tmp_path / "b" / file).write_text(text, "utf-8")
    again = load_tokenizer(tmp_path / "b")
    assert [again.encode(text) for text in texts()] == [found.encode(text) for text in texts()]


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("albert", "Albert"), ("camembert", "Camembert"), ("deberta-v2", "DebertaV2")],
)
def test_the_model_names_the_class(tmp_path, model_type, name):
    """As DeBERTa V3 is published: with ``spm.model`` and no name of a class."""
    directory = written(tmp_path, name)
    expected = load_tokenizer(directory).encode("the end")
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert load_tokenizer(directory).encode("the end") == expected


def test_mt5_is_read_as_t5(tmp_path):
    directory = written(tmp_path, "T5")
    config = {"tokenizer_class": "MT5Tokenizer", "extra_ids": 2}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    found = load_tokenizer(directory)
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config | {"tokenizer_class": "T5Tokenizer"})
    )
    assert found.encode("the<extra_id_0>") == load_tokenizer(directory).encode("the<extra_id_0>")


@pytest.mark.parametrize(("name", "what"), [("Albert", "\\[CLS\\]"), ("T5", "</s>")])
def test_a_file_without_the_special_tokens_of_its_class(tmp_path, name, what):
    directory = written(tmp_path, name)
    (file,) = directory.glob("*.model")
    file.write_bytes(piece(b"<unk>", 0.0, 2) + piece(b"a", -1.0))
    with pytest.raises(CheckpointFormatError, match=f"'{what}' is not in the vocabulary"):
        load_tokenizer(directory)


@pytest.mark.parametrize(
    ("name", "more"), [("Nllb", {"src_lang": "xyz_Latn"}), ("MBart", {"src_lang": "gl_ES"})]
)
def test_a_language_that_no_file_lists(tmp_path, name, more):
    """transformers takes the unknown token in its place."""
    with pytest.raises(UnsupportedModelError, match=more["src_lang"]):
        load_tokenizer(written(tmp_path, name, 0, **more))


# --- tiktoken.model -----------------------------------------------------------------------------


def kimi(directory, added=(0, 1, 4), **settings):
    """The ranks of a byte-level BPE, and special tokens behind them."""
    vocab = byte_level("gpt2")["model"]["vocab"]
    from maxjax.text.stream_decoders import byte_letters

    letters = byte_letters()
    tokens = [
        text for text in sorted(vocab, key=vocab.__getitem__) if all(c in letters for c in text)
    ]
    tokens = sorted(dict.fromkeys([*sorted(letters), *tokens]), key=lambda text: len(text) > 1)
    lines = (base64.b64encode(bytes(letters[c] for c in text)) for text in tokens)
    directory.mkdir(exist_ok=True)
    (directory / "tiktoken.model").write_bytes(
        b"".join(line + b" %d\n" % rank for rank, line in enumerate(lines))
    )
    names = ["[BOS]", "[EOS]", "", "", "<|im_end|>"]
    decoder = {
        str(len(tokens) + i): {"content": names[i], "special": True, "normalized": False}
        for i in added
    }
    config = {
        "added_tokens_decoder": decoder,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        **settings,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_tiktoken_as_transformers(tmp_path):
    """With Llama 3's expression; ids between special tokens have placeholders."""
    directory = kimi(tmp_path, tokenizer_class="PreTrainedTokenizerFast")
    facts = recorded(lambda: facts_of(directory, "PreTrainedTokenizerFast"))
    found = assert_same(directory, facts)
    assert found.decode([found.vocab_size - 2], skip_special=False) == (
        f"<|reserved_token_{found.vocab_size - 2}|>"
    )


def test_tiktoken_in_a_file_of_the_name_of_sentencepiece(tmp_path):
    """As Llama 3's own files."""
    directory = kimi(tmp_path)
    expected = [load_tokenizer(directory).encode(text) for text in texts()]
    (directory / "tiktoken.model").rename(directory / "tokenizer.model")
    assert [load_tokenizer(directory).encode(text) for text in texts()] == expected


def test_tiktoken_of_kimi(tmp_path):
    """Kimi's own expression, by which Chinese characters are words of their own."""

    def tokens():
        with without_packages() as module:
            path = str(tmp_path / "tiktoken.model")
            oracle = module.TikTokenConverter(vocab_file=path, pattern=KIMI).converted()
            return [oracle.encode(text).ids for text in texts()]

    plain = load_tokenizer(kimi(tmp_path, added=()))
    expected = recorded(lambda: json.dumps(tokens()))
    found = load_tokenizer(kimi(tmp_path, added=(), tokenizer_class="TikTokenTokenizer"))
    assert [found.encode(text, special=False) for text in texts()] == json.loads(expected)
    steps = [one._backend.pre_tokenizer.pre_tokenize_str("a猫b") for one in (found, plain)]
    assert [len(one) for one in steps] == [3, 1]
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k2"}')
    named = load_tokenizer(kimi(tmp_path, added=()))
    assert [named.encode(text, special=False) for text in texts()] == json.loads(expected)


@pytest.mark.parametrize(
    ("data", "error", "what"),
    [
        (b"YQ== 0\nYg== 2\n", CheckpointFormatError, "line 2 is not"),
        (b"YQ== 0\n?? 1\n", CheckpointFormatError, "line 2 is not"),
        (b"YQ== 0\nYQ== 1\n", CheckpointFormatError, "line 2 is there twice"),
        (b"YQ== 0\nYg==\n", CheckpointFormatError, "line 2 is not"),
        (b"YQ== 0\n" + base64.b64encode(b"a" * 999) + b" 1\n", CheckpointFormatError, "line 2 is not"),
        (b"\n", CheckpointFormatError, "no tokens"),
        (b"\n" * (1 << 21), CheckpointLimitError, "too many tokens"),
        (b"a" * (25 << 20), CheckpointLimitError, "too long"),
    ],
)  # fmt: skip
def test_tiktoken_files_that_are_wrong(tmp_path, data, error, what):
    (tmp_path / "tiktoken.model").write_bytes(data)
    with pytest.raises(error, match=what):
        maxjax.load_tokenizer(tmp_path)


def test_a_number_far_behind_the_tokens_of_tiktoken(tmp_path):
    kimi(tmp_path)
    decoder = {"999999999": {"content": "<far>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    with pytest.raises(CheckpointLimitError, match="too many added tokens"):
        maxjax.load_tokenizer(tmp_path)
