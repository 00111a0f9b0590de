"""The tokenizer against transformers, and every way its files can be broken."""

import copy
import json
import multiprocessing
import pickle
import shutil
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest

import maxjax
from maxjax.errors import (
    CheckpointAccessError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointMissingError,
    UserInputError,
)
from maxjax.storage.hub import find_model
from maxjax.text.stream import TextStream
from maxjax.text.tokenizer.tokenizer import load_tokenizer
from tests.oracles.recorded import recorded, transformers
from tests.oracles.sentences import ODD, sentences


@pytest.fixture(scope="module")
def tokenizer(minilm):
    return load_tokenizer(minilm)


FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
WORDS = 2600


@pytest.fixture(scope="module")
def fewer(minilm, tmp_path_factory):
    """MiniLM's tokenizer files with its first words alone, which are read faster."""
    folder = tmp_path_factory.mktemp("fewer")
    for name in FILES:
        shutil.copy(minilm / name, folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    vocab = {word: number for word, number in model["vocab"].items() if number < WORDS}
    change(folder / "tokenizer.json", model=model | {"vocab": vocab})
    return folder


@pytest.fixture
def directory(fewer, tmp_path):
    """A copy of those that a test may break."""
    for name in FILES:
        shutil.copy(fewer / name, tmp_path)
    return tmp_path


@pytest.fixture
def whole(minilm, tmp_path):
    """A copy of MiniLM's own."""
    for name in FILES:
        shutil.copy(minilm / name, tmp_path)
    return tmp_path


def flat(rows):
    """Rows of numbers as one array, each after its length."""
    return np.array([number for row in rows for number in (len(row), *row)], np.int32)


def change(file, **fields):
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, **fields}))


# --- what it does ---------------------------------------------------------------------------


@pytest.mark.parametrize("max_length", [None, 256, 7])
def test_as_transformers_has_it(minilm, tokenizer, max_length):
    texts = sentences(60, longest=300)

    def rows():
        oracle = transformers.AutoTokenizer.from_pretrained(minilm)
        found = oracle(texts, truncation=max_length is not None, max_length=max_length)
        return [flat(found["input_ids"]), flat(found["token_type_ids"])]

    expected, found = recorded(rows), tokenizer.tokens(texts, max_length=max_length)
    np.testing.assert_array_equal(flat([row.ids for row in found]), expected[0])
    np.testing.assert_array_equal(flat([row.type_ids for row in found]), expected[1])


def test_a_batch_is_int32_and_padded_to_the_longest(minilm, tokenizer):
    def rows():
        oracle = transformers.AutoTokenizer.from_pretrained(minilm)
        found = oracle(ODD, padding=True, return_tensors="np")
        return {name: found[name].astype(np.int32) for name in found}

    expected = recorded(rows)
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


# --- copies ---------------------------------------------------------------------------------

SENTENCES = ["Hello, world!", "a " * 300, "", "naïve café", "[MASK] x [SEP]", "🙂 don't"]


COPIES = {
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "pickle_2": lambda t: pickle.loads(pickle.dumps(t, protocol=2)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def same(one, other):
    """Everything that a tokenizer does and says."""
    for text in SENTENCES:
        for special in (True, False):
            ids = one.encode(text, special=special)
            assert other.encode(text, special=special) == ids
            for skip in (True, False):
                assert other.decode(ids, skip_special=skip) == one.decode(ids, skip_special=skip)
    assert other.tokens(SENTENCES, max_length=9) == one.tokens(SENTENCES, max_length=9)
    for a, b in zip(one.batch(SENTENCES), other.batch(SENTENCES), strict=True):
        np.testing.assert_array_equal(a, b)
    assert other.files() == one.files() and repr(other) == repr(one)
    names = "pad_id max_length vocab_size chat_templates special_tokens eos_ids bos_id cleans_up"
    for name in (*names.split(), "chat_template"):
        assert getattr(other, name) == getattr(one, name), name


@pytest.mark.sampled
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", ["minilm", "tiny", "settings"])
def test_a_copy_is_the_same(directory, kind, way):
    if kind == "settings":
        change(
            directory / "tokenizer_config.json", clean_up_tokenization_spaces=True,
            split_special_tokens=True, extra_special_tokens=["<think>"],
            chat_template="{{ messages }}",
        )  # fmt: skip
    path = find_model("tiny") if kind == "tiny" else directory
    before = load_tokenizer(path)
    after = COPIES[way](before)
    same(before, after)
    same(before, COPIES[way](after))


def test_a_copy_of_a_tokenizer_of_a_gguf_file(tmp_path):
    from maxjax.checkpoint import convert

    convert(find_model("tiny"), tmp_path / "m.gguf")
    before = maxjax.load(tmp_path / "m.gguf")[1]
    for way in COPIES.values():
        same(before, way(before))


@pytest.mark.parametrize("way", COPIES)
def test_copies_do_not_disturb_each_other(tokenizer, way):
    """A shallow copy shares what is set for the time of a call, and so the lock."""
    copied, text = COPIES[way](tokenizer), " ".join(["word"] * 50)
    run = lambda i: len(
        (tokenizer, copied)[i % 2].tokens([text], max_length=10 if i % 2 else None)[0].ids
    )
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, range(200))) == [52, 10] * 100


def test_a_spawned_process_takes_it_along(tokenizer):
    texts = ["Hello, world!", "a b c"]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(tokenizer.tokens, texts).result() == tokenizer.tokens(texts)


@pytest.mark.oracle
def test_workers_of_a_torch_data_loader(tokenizer):
    """It takes it along to its own processes, as the spawned one above."""
    from torch.utils.data import DataLoader

    loader = DataLoader(
        SENTENCES, batch_size=3, num_workers=1, collate_fn=tokenizer.tokens,
        multiprocessing_context="spawn",
    )  # fmt: skip
    assert [row for batch in loader for row in batch] == tokenizer.tokens(SENTENCES)


# --- settings of decoding and encoding ------------------------------------------------------

SPACED = [
    "I am . You are ? No ! a , b",
    "it ' s n't 'm 's 've 're",
    "do not",
    " '",
    "x '  ' y",
    "can n't",
    ". ? ' ' n 't",
]


@pytest.mark.parametrize("value", [True, False, None, "absent"])
@pytest.mark.parametrize("cleanup", [True, False])
def test_clean_up_tokenization_spaces(directory, value, cleanup):
    change(
        directory / "tokenizer.json",
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": cleanup},
    )
    more = {} if value == "absent" else {"clean_up_tokenization_spaces": value}
    change(directory / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", **more)
    found = load_tokenizer(directory)
    rows = [found.encode(text) for text in SPACED]

    def decoded():
        oracle = transformers.AutoTokenizer.from_pretrained(directory)
        both = [
            [oracle.decode(i, skip_special_tokens=skip) for i in rows] for skip in (True, False)
        ]
        return [flat(rows), *both]

    asked, *texts = recorded(decoded)
    np.testing.assert_array_equal(flat(rows), asked)
    for skip, every in zip((True, False), texts, strict=True):
        for ids, expected in zip(rows, every, strict=True):
            assert found.decode(ids, skip_special=skip) == expected
            stream = TextStream(found, skip_special=skip)
            assert "".join([*map(stream.push, ids), stream.flush()]) == expected
    ids = found.encode(SPACED[0], special=False)
    assert found.decode(ids).endswith("a, b" if cleanup or value is True else "a , b")


@pytest.mark.parametrize("forced", [True, False])
def test_spaces_of_byte_pairs_are_meant(tmp_path, forced):
    shutil.copytree(find_model("tiny"), tmp_path / "tiny")
    name = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    change(
        tmp_path / "tiny" / "tokenizer_config.json",
        clean_up_tokenization_spaces=True,
        **{name: forced},
    )
    found = load_tokenizer(tmp_path / "tiny")
    ids = found.encode("one , two .")

    def decoded():
        return [ids, transformers.AutoTokenizer.from_pretrained(tmp_path / "tiny").decode(ids)]

    assert found.decode(ids) == ("one, two." if forced else "one , two .")
    assert recorded(decoded) == [ids, found.decode(ids)]
    stream = TextStream(found)
    assert "".join([*map(stream.push, ids), stream.flush()]) == found.decode(ids)


def test_a_model_that_takes_no_token_types(directory):
    """Its tokenizer gives none: it was trained with type 0."""
    assert 1 in load_tokenizer(directory).pairs([("a", "b")])[0].type_ids
    change(directory / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask"])
    found = copy.copy(load_tokenizer(directory)).pairs([("a", "b")])[0]
    assert found.type_ids == [0] * len(found.ids)


_PAIR = ("the cat", "sat on it")


@pytest.mark.parametrize("model_type", ["bert", "distilbert", "electra", "nomic_bert", "mpnet"])
def test_token_types_are_those_of_the_class_as_in_transformers(directory, model_type):
    """Without model_input_names, the class says whether there are token types; without it, the model's type."""
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    file = directory / "tokenizer_config.json"
    content = json.loads(file.read_text())
    for key in ("tokenizer_class", "model_input_names", "backend"):
        content.pop(key, None)
    plain = ["input_ids", "attention_mask"]
    cases = [
        *({"tokenizer_class": f"{name}Tokenizer"} for name in ("Bert", "Electra", "DistilBert", "MPNet", "Unknown")),
        {"tokenizer_class": "BertTokenizerFast"},
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"tokenizer_class": "TokenizersBackend"},
        {"tokenizer_class": "BertTokenizer", "model_input_names": plain},
        {"tokenizer_class": "TokenizersBackend", "model_input_names": [*plain, "token_type_ids"]},
        {},
        None,
    ]  # fmt: skip

    def given(case):
        file.unlink(missing_ok=True)
        if case is not None:
            file.write_text(json.dumps(content | case))

    def theirs():
        found = []
        for case in cases:
            given(case)
            row = transformers.AutoTokenizer.from_pretrained(directory)(*_PAIR)
            found.append(max(row.get("token_type_ids", [0])))
        return found

    for case, largest in zip(cases, recorded(theirs), strict=True):
        given(case)
        found = load_tokenizer(directory)
        assert max(found.pairs([_PAIR])[0].type_ids) == largest, case
        for name, text in found.files().items():
            (directory / name).write_text(text)
        again = pickle.loads(pickle.dumps(load_tokenizer(directory)))
        assert again.pairs([_PAIR]) == found.pairs([_PAIR]), case


def test_token_types_of_tokenizer_json_alone(directory, tmp_path_factory):
    """Without a class and a model's type, tokenizer.json decides, and written files say so."""
    for name in FILES[1:]:
        (directory / name).unlink()
    found = load_tokenizer(directory)
    assert 1 in found.pairs([_PAIR])[0].type_ids
    other = tmp_path_factory.mktemp("written")
    for name, text in found.files().items():
        (other / name).write_text(text)
    assert load_tokenizer(other).pairs([_PAIR]) == found.pairs([_PAIR])


def test_split_special_tokens(whole):
    change(whole / "tokenizer_config.json", split_special_tokens=True)
    found = load_tokenizer(whole)
    theirs = lambda: transformers.AutoTokenizer.from_pretrained(whole)("a [MASK] b")
    assert found.encode("a [MASK] b") == recorded(lambda: theirs()["input_ids"])
    assert len(found.encode("a [MASK] b")) == 7


# --- the files ------------------------------------------------------------------------------


def test_the_digest_covers_how_special_tokens_are_read(whole, tokenizer):
    change(whole / "tokenizer_config.json", split_special_tokens=True)
    split = load_tokenizer(whole)
    assert split.encode("[SEP]") != tokenizer.encode("[SEP]") and split.digest != tokenizer.digest


def test_none_when_the_directory_has_none(tmp_path):
    assert load_tokenizer(tmp_path) is None


def test_a_file_stands_for_its_directory(directory):
    assert load_tokenizer(directory / "tokenizer.json").vocab_size == WORDS


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


@pytest.mark.parametrize("texts, says", [
    ("one text", r"put a single text in brackets"),
    (b"bytes", r"texts must be a list of str, not bytes"),
    (None, r"texts must be a list of str, not NoneType"),
    (np.array("one text"), r"texts must be a list of str, not ndarray"),
    ({"text": "a"}, r"texts must be a list of str, not dict: pass its text, or a tuple"),
    ([b"bytes"], r"texts\[0\] is a bytes, not a str"),
    (["a", None], r"texts\[1\] is a NoneType, not a str"),
    ([3], r"texts\[0\] is a int, not a str"),
    ([["a"]], r"texts\[0\] is a list, not a str"),
    (["a", {"text": "a"}], r"texts\[1\] is a dict, not a str: pass its text, or a tuple"),
])  # fmt: skip
def test_what_is_not_a_list_of_str(tokenizer, texts, says):
    with pytest.raises(TypeError, match=says):
        tokenizer.tokens(texts)


@pytest.mark.parametrize("pairs, says", [
    ("ab", r"pairs must be a list of pairs of texts, .* not str"),
    (None, r"pairs must be a list of pairs of texts, .* not NoneType"),
    ({"ab": "cd"}, r"pairs must be a list of pairs of texts, .* not dict"),
    (["ab"], r"pairs\[0\] is a str, not a pair of texts"),
    ([("a", "b", "c")], r"pairs\[0\] has 3 items: it must be a pair of texts"),
    ([["a"]], r"pairs\[0\] has 1 items: it must be a pair of texts"),
    ([("a", "b"), None], r"pairs\[1\] is a NoneType, not a pair of texts"),
    ([("a", "b"), {"text": "a", "text_pair": "b"}], r"pairs\[1\] is a dict, not a pair .*\(text, text_pair\)"),
    ([("a", "b"), ("a", None)], r"pairs\[1\]\[1\] is a NoneType, not a str"),
])  # fmt: skip
def test_what_is_not_a_list_of_pairs(tokenizer, pairs, says):
    with pytest.raises(TypeError, match=says):
        tokenizer.pairs(pairs)


def test_pairs_of_other_types(tokenizer):
    [want] = tokenizer.pairs([("a", "b")])
    for pair in (["a", "b"], iter("ab"), np.array(["a", "b"])):
        assert tokenizer.pairs([pair]) == [want]


def test_text_that_is_no_unicode(tokenizer):
    with pytest.raises(UserInputError, match=r"texts\[1\].*surrogate"):
        tokenizer.tokens(["fine", "bad \ud800"])


@pytest.mark.parametrize("max_length", [0, 1, 2, -1])
def test_no_room_for_a_token(tokenizer, max_length):
    with pytest.raises(UserInputError, match="max_length"):
        tokenizer.tokens(["a"], max_length=max_length)


def test_clip_decodes_the_ends_of_words_to_spaces(tmp_path):
    """As CLIPTokenizer of transformers."""
    letters = sorted("helowrd!',")
    vocab = {text: i for i, text in enumerate([*letters, *(c + "</w>" for c in letters)])}
    merges = [("h", "e"), ("he", "l"), ("hel", "l"), ("hell", "o</w>")]
    vocab |= {"".join(pair): len(vocab) + i for i, pair in enumerate(merges)}
    vocab |= {name: len(vocab) + i for i, name in enumerate(("<|startoftext|>", "<|endoftext|>"))}
    texts = ["hello world", "  hello,  world! ", "hello's", "", "d"]

    def answer():
        theirs = transformers.CLIPTokenizer(vocab=vocab, merges=merges)
        rows = [theirs.encode(text) for text in texts]
        return [
            theirs.backend_tokenizer.to_str(), rows,
            [[theirs.decode(row, skip_special_tokens=s) for s in (True, False)] for row in rows],
        ]  # fmt: skip

    document, rows, expected = recorded(answer)
    (tmp_path / "tokenizer.json").write_text(document)
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.encode(text) for text in texts] == rows
    found = [[tokenizer.decode(row, skip_special=s) for s in (True, False)] for row in rows]
    assert found == expected and found[0][0] == "hello world"
    assert "</w>" in tokenizer.files()["tokenizer.json"]
