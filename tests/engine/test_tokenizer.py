"""The tokenizer against transformers, and every way its files can be broken."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from maxjax.engine.tokenizer import load_tokenizer
from maxjax.errors import (
    CheckpointAccessError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointMissingError,
    UserInputError,
)
from tests.oracles.sentences import ODD, sentences


@pytest.fixture(scope="module")
def tokenizer(minilm):
    return load_tokenizer(minilm)


@pytest.fixture
def directory(minilm, tmp_path):
    """A copy of MiniLM's tokenizer files that a test may break."""
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(minilm / name, tmp_path)
    return tmp_path


def change(file, **fields):
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, **fields}))


# --- what it does ---------------------------------------------------------------------------


@pytest.mark.parametrize("max_length", [None, 256, 7])
def test_as_transformers_has_it(minilm, tokenizer, max_length):
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(minilm)
    texts = sentences(60, longest=300)
    expected = oracle(texts, truncation=max_length is not None, max_length=max_length)
    found = tokenizer.tokens(texts, max_length=max_length)
    assert [row.ids for row in found] == expected["input_ids"]
    assert [row.type_ids for row in found] == expected["token_type_ids"]


def test_a_batch_is_int32_and_padded_to_the_longest(minilm, tokenizer):
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(minilm)
    expected = oracle(ODD, padding=True, return_tensors="np")
    batch = tokenizer.batch(ODD)
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        found = getattr(batch, name)
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, expected[name])


def test_truncation_is_not_remembered(tokenizer):
    text = "one two three four five six seven"
    assert len(tokenizer.encode(text)) == 9
    short = tokenizer.tokens([text], max_length=5)[0].ids
    assert len(short) == 5 and short[-1] == tokenizer.encode("")[-1]  # the closing [SEP] is kept
    assert len(tokenizer.encode(text)) == 9


def test_truncation_in_one_thread_does_not_reach_another(tokenizer):
    text = " ".join(["word"] * 50)
    run = lambda i: len(tokenizer.tokens([text], max_length=10 if i % 2 else None)[0].ids)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, range(200))) == [52, 10] * 100


def test_padding_and_truncation_in_the_file_are_not_applied(directory):
    file = json.loads((directory / "tokenizer.json").read_text())
    assert file["truncation"]["max_length"] == 128 and file["padding"]["strategy"] == {"Fixed": 128}
    assert len(load_tokenizer(directory).encode("a " * 200)) == 202
    assert len(load_tokenizer(directory).encode("a")) == 3


def test_decode(tokenizer):
    ids = tokenizer.encode("Hello, world!")
    assert tokenizer.decode(ids) == "hello, world!"
    assert tokenizer.decode(np.array(ids), skip_special=False) == "[CLS] hello, world! [SEP]"


def test_pad_makes_masked_places(tokenizer):
    batch = tokenizer.pad(tokenizer.tokens(["a", "a b"]), length=6, count=3)
    assert batch.input_ids.shape == (3, 6)
    np.testing.assert_array_equal(batch.attention_mask.sum(1), [3, 4, 0])
    assert (batch.input_ids[batch.attention_mask == 0] == tokenizer.pad_id).all()


def test_attributes(tokenizer):
    assert (tokenizer.pad_id, tokenizer.max_length, tokenizer.vocab_size) == (0, 512, 30522)


def test_no_texts(tokenizer):
    assert tokenizer.tokens([]) == []
    assert tokenizer.batch([]).input_ids.shape == (0, 0)


# --- the files ------------------------------------------------------------------------------


def test_none_when_the_directory_has_none(tmp_path):
    assert load_tokenizer(tmp_path) is None


def test_a_file_stands_for_its_directory(directory):
    assert load_tokenizer(directory / "tokenizer.json").vocab_size == 30522


def test_a_directory_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointMissingError, match="nowhere"):
        load_tokenizer(tmp_path / "nowhere")


def test_the_padding_token_comes_from_the_first_file_that_names_one(directory):
    """As in transformers: the map, unless tokenizer_config.json lists all its tokens itself."""
    assert load_tokenizer(directory).pad_id == 0
    change(directory / "tokenizer_config.json", pad_token={"content": "[MASK]", "lstrip": False})
    assert load_tokenizer(directory).pad_id == 0
    change(directory / "tokenizer_config.json", added_tokens_decoder={})
    assert load_tokenizer(directory).pad_id == 103
    change(directory / "tokenizer_config.json", pad_token=None)
    change(directory / "special_tokens_map.json", pad_token="[UNK]")
    assert load_tokenizer(directory).pad_id == 100
    (directory / "special_tokens_map.json").unlink()
    change(directory / "tokenizer.json", padding={
        "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 7, "pad_type_id": 0, "pad_token": "x",
    })  # fmt: skip
    assert load_tokenizer(directory).pad_id == 7
    change(directory / "tokenizer.json", padding=None)
    assert load_tokenizer(directory).pad_id == 0


@pytest.mark.parametrize(
    "value, expected", [(128, 128), (int(1e30), None), (1e30, None), (None, None), (64.0, 64)]
)
def test_the_longest_sequence(directory, value, expected):
    change(directory / "tokenizer_config.json", model_max_length=value)
    assert load_tokenizer(directory).max_length == expected


@pytest.mark.parametrize("value", ["128", [128], {}, True, 0, -1])
def test_a_length_that_is_none(directory, value):
    change(directory / "tokenizer_config.json", model_max_length=value)
    with pytest.raises(CheckpointFormatError, match="model_max_length") as caught:
        load_tokenizer(directory)
    assert caught.value.path.endswith("tokenizer_config.json")


@pytest.mark.parametrize("value", [3, ["[PAD]"], {"content": 3}])
def test_a_padding_token_that_is_none(directory, value):
    change(directory / "special_tokens_map.json", pad_token=value)
    change(directory / "tokenizer_config.json", pad_token=None)
    with pytest.raises(CheckpointFormatError, match="pad_token"):
        load_tokenizer(directory)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
)
@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[1, 2]", b"null", b"3", b'{"a": 1, "a": 2}', b"\xff\xfe", b"\x89PNG",
        b"[" * 50_000, b'{"a":' * 50_000, b'{"version": ' + b"9" * 10_000 + b"}",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
    ],
)  # fmt: skip
def test_broken_files_are_named(directory, name, content):
    (directory / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(directory)
    assert caught.value.path == str(directory / name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 800


@pytest.mark.parametrize(
    "fields",
    [
        {"model": None}, {"model": {"type": "Nonsense"}}, {"model": []}, {"version": "99.0"},
        {"normalizer": {"type": "Nonsense"}}, {"added_tokens": [{"id": -1}]}, {"added_tokens": 3},
        {"model": {"type": "WordPiece", "vocab": {"a": "b"}}}, {"post_processor": "x"},
        {"truncation": {"max_length": -5}},
    ],
)  # fmt: skip
def test_json_that_is_no_tokenizer(directory, fields):
    change(directory / "tokenizer.json", **fields)
    with pytest.raises(CheckpointFormatError, match="not a tokenizer") as caught:
        load_tokenizer(directory)
    assert caught.value.path.endswith("tokenizer.json")


@pytest.mark.parametrize("seed", range(40))
def test_cut_and_altered_files_never_raise_anything_else(directory, seed):
    rng = np.random.default_rng(seed)
    file = directory / "tokenizer.json"
    content = bytearray(file.read_bytes())
    if seed % 2:
        del content[int(rng.integers(len(content))) :]
    else:
        for at in rng.integers(0, 4000, 3):
            content[at] = int(rng.integers(256))
    file.write_bytes(bytes(content))
    try:
        load_tokenizer(directory)
    except CheckpointError as error:
        assert error.path == str(file)


def test_a_directory_in_place_of_a_file(directory):
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.json").mkdir()
    with pytest.raises(CheckpointFormatError, match="directory"):
        load_tokenizer(directory)


def test_a_file_that_may_not_be_read(directory, monkeypatch):
    import os

    real = os.open

    def refuse(path, *args, **kwargs):  # root may read everything
        if str(path).endswith("tokenizer.json"):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointAccessError, match="tokenizer.json"):
        load_tokenizer(directory)


# --- the texts ------------------------------------------------------------------------------


@pytest.mark.parametrize("texts", ["one text", b"bytes", [b"bytes"], ["a", None], [3], [["a"]]])
def test_what_is_not_a_list_of_str(tokenizer, texts):
    with pytest.raises(TypeError, match="text"):
        tokenizer.tokens(texts)


def test_text_that_is_no_unicode(tokenizer):
    with pytest.raises(UserInputError, match=r"texts\[1\].*surrogate"):
        tokenizer.tokens(["fine", "bad \ud800"])


@pytest.mark.parametrize("max_length", [0, 1, 2, -1])
def test_no_room_for_a_token(tokenizer, max_length):
    with pytest.raises(UserInputError, match="max_length"):
        tokenizer.tokens(["a"], max_length=max_length)
