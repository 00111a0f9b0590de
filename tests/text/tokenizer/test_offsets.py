"""Where tokens are in the text: as transformers' fast tokenizers and the property that each token's text says."""

import json
import random

import numpy as np
import pytest

import maxjax
from maxjax.errors import UserInputError
from maxjax.models.gguf import gguf_tokenizer_metadata
from maxjax.text.tokenizer.tokenizer import gguf_tokenizer, load_tokenizer
from tests.models.gguf.tokenizer.tokenizer_files import TEXTS, byte_level, sentencepiece
from tests.oracles.recorded import FOLDER, recorded
from tests.oracles.sentences import ODD
from tests.text.tokenizer.test_files import FAST, oracle_of, pairs, put

_LETTERS = [
    *" \n\t\r  aAbBéÉİßﬁ１２①Åe\u0301\u00a0\u200b\u3000猫🐱👨‍👩‍👧🇫🇷.,'!?-▁<>[]#0x",
    "the ", " and", "ing", "<s>", "[MASK]", "</s>", "'s", "Paris", "<|end|>",
]  # fmt: skip


def drawn(count=60, seed=3):
    rng = random.Random(seed)
    return ["".join(rng.choices(_LETTERS, k=rng.randint(1, 30))) for _ in range(count)]


SOME = [*ODD, *TEXTS[40:], *drawn()]


@pytest.fixture(scope="module")
def directory(minilm, tmp_path_factory):
    """A function from a kind of tokenizer to a directory with its files."""

    def of(kind):
        folder = tmp_path_factory.mktemp("offsets")
        name, _, more = kind.partition(" ")
        if name == "minilm":
            return minilm
        if name == "bytes":
            return put(folder, tokenizer=byte_level(more), tokenizer_config=FAST)
        if name == "pieces":
            made = sentencepiece("prefix" in more, "metaspace" in more)
            return put(folder, tokenizer=made, tokenizer_config=FAST)
        source = byte_level("qwen2" if "Qwen" in name else "gpt2")
        return put(folder, **pairs(source), tokenizer_config={"tokenizer_class": name})

    return of


KINDS = [
    "minilm", "bytes gpt2", "bytes llama3", "pieces prefix", "pieces prefix metaspace",
    "Qwen2Tokenizer", "GPTNeoXTokenizer", "RobertaTokenizer",
]  # fmt: skip


def flat(found):
    """Offsets, words and texts of the tokens of each row, as one array of int32, -1 for None."""
    rows = []
    for offsets, words, sequences in found:
        columns = zip(offsets, words, sequences, strict=True)
        rows.append([[*o, -1 if w is None else w, -1 if s is None else s] for o, w, s in columns])
    return np.array([[len(row)] * 4 for row in rows] + [item for row in rows for item in row], np.int32)  # fmt: skip


def theirs(directory, *texts, **options):
    found = oracle_of(directory)(*texts, return_offsets_mapping=True, **options)
    rows = range(len(found["input_ids"]))
    offsets = found["offset_mapping"]
    return flat([(offsets[i], found.word_ids(i), found.sequence_ids(i)) for i in rows])


def ours(rows):
    return flat([(row.offsets, row.word_ids, row.sequence_ids) for row in rows])


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_are_those_of_transformers(directory, kind):
    folder = directory(kind)
    tokenizer = load_tokenizer(folder)
    expected = recorded(lambda: theirs(folder, SOME))
    np.testing.assert_array_equal(ours(tokenizer.tokens(SOME, offsets=True)), expected)
    plain = tokenizer.tokens(SOME)[-1]
    assert (plain.offsets, plain.sequence_ids, plain.word_ids) == (None, None, None)


@pytest.mark.parametrize("kind", ["minilm", "RobertaTokenizer", "pieces prefix"])
def test_offsets_of_pairs_are_those_of_transformers(directory, kind):
    folder = directory(kind)
    first, second = SOME[: len(SOME) // 2], SOME[len(SOME) // 2 :][: len(SOME) // 2]
    options = {"truncation": True, "max_length": 30}
    expected = recorded(lambda: theirs(folder, first, second, **options))
    both = list(zip(first, second, strict=True))
    found = load_tokenizer(folder).pairs(both, max_length=30, offsets=True)
    np.testing.assert_array_equal(ours(found), expected)


@pytest.mark.parametrize("kind", ["minilm", "RobertaTokenizer"])
@pytest.mark.parametrize("is_pair", [False, True])
def test_windows_are_those_of_transformers(directory, kind, is_pair):
    folder = directory(kind)
    tokenizer = load_tokenizer(folder)
    texts = [(text[:1], text) for text in SOME] if is_pair else SOME
    options = {
        "truncation": "only_second" if is_pair else True,
        "max_length": 17,
        "stride": 5,
        "return_overflowing_tokens": True,
    }
    columns = [[a for a, _ in texts], [b for _, b in texts]] if is_pair else [texts]
    expected = recorded(lambda: theirs(folder, *columns, **options))
    found = tokenizer.windows(texts, max_length=17, stride=5)
    assert len(found) == len(texts) and max(map(len, found)) > 3
    np.testing.assert_array_equal(ours([row for rows in found for row in rows]), expected)
    assert max(len(row.ids) for rows in found for row in rows) == 17
    assert tokenizer.windows([], max_length=17) == []


def test_windows_without_room_are_refused(directory):
    tokenizer = load_tokenizer(directory("minilm"))
    with pytest.raises(UserInputError, match="stride must be from 0 to 4, not 5"):
        tokenizer.windows(["a"], max_length=7, stride=5)
    with pytest.raises(UserInputError, match="pair 1 has 6 tokens; at most 4 leave room"):
        tokenizer.windows([("a", "b"), ("a b c d e f", "b")], max_length=10, stride=2)
    with pytest.raises(
        TypeError, match=r"list of texts or of pairs .* put a single text in brackets"
    ):
        tokenizer.windows("abc", max_length=10)
    with pytest.raises(TypeError, match=r"texts\[1\] is a str, not a pair of texts"):
        tokenizer.windows([("a", "b"), "ab"], max_length=10)


@pytest.mark.parametrize("kind", ["minilm", "bytes gpt2", "bytes llama3", "pieces prefix"])
def test_offsets_of_gguf_tokenizers_are_those_of_their_origin(directory, kind):
    folder = directory(kind)
    document = json.loads((folder / "tokenizer.json").read_text())
    metadata = gguf_tokenizer_metadata(document, keep_json=False)
    listed = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in metadata.items()}
    found, origin = gguf_tokenizer(listed), load_tokenizer(folder)
    for a, b in zip(
        found.tokens(SOME, offsets=True), origin.tokens(SOME, offsets=True), strict=True
    ):
        assert (a.ids, a.offsets) == (b.ids, b.offsets)


@pytest.mark.parametrize("kind", ["unigram", "bytes", "spaces", "no prefix", "llama", "gemma"])
def test_offsets_of_sentencepiece_models(tmp_path, kind):
    """Each token of ASCII letters is at its own letters, and no text but spaces is between two tokens."""
    with np.load(FOLDER / "sentencepiece.npz") as golden:
        (tmp_path / "tokenizer.model").write_bytes(golden[f"model {kind}"].tobytes())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    tokenizer = maxjax.load_tokenizer(tmp_path)
    named = {i: token for token, i in tokenizer._backend.get_vocab().items()}
    seen = 0
    for text in SOME:
        row = tokenizer.tokens([text], offsets=True)[0]
        assert row.offsets is not None and row.sequence_ids is not None
        end = 0
        for i, (start, stop), sequence in zip(row.ids, row.offsets, row.sequence_ids, strict=True):
            if sequence is None:
                assert (start, stop) == (0, 0)
                continue
            if start >= end:
                assert not text[end:start].strip("▁ \u3000\u00a0\u200b\u0301\r\n\t")
            end = max(end, stop)
            word = named[i].replace("▁", " ").lstrip(" ")
            if word.isascii() and word.isalpha() and text[start:stop].isascii():
                assert text[start:stop].lstrip(" \n\t\r") == word
                seen += 1
        assert not text[end:].strip("▁ \u3000\u00a0\u200b\u0301\r\n\t")
    assert seen > 300


def test_a_tokenizer_that_is_called_names_offsets(directory):
    with pytest.raises(TypeError, match="offsets=True"):
        load_tokenizer(directory("bytes gpt2"))("a", return_offsets_mapping=True)
