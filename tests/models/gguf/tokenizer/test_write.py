"""Tokenizers on their way into a GGUF file: what is written, and that it comes back.

That llama.cpp finds the same tokens is in test_gguf_write_llama_cpp.
"""

import copy
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxjax.errors import CheckpointError, CheckpointFormatError, CheckpointMismatchError
from maxjax.graph.weights import load_weights
from maxjax.models.gguf import chat_template, gguf_tokenizer_metadata, tokenizer_json
from maxjax.models.gguf.tokenizer.read import end_ids
from maxjax.storage.gguf.writer import plan_gguf
from maxjax.text.tokenizer.tokenizer import gguf_tokenizer

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")
files = pytest.importorskip("tests.models.gguf.tokenizer.tokenizer_files")

KEY = "tokenizer.ggml."
TYPES = gguf.TokenType


@pytest.fixture(scope="module")
def gpt2():
    return files.byte_level("gpt2")


@pytest.fixture(scope="module")
def llama():
    return files.sentencepiece()


def through(path, metadata):
    """The metadata as it is read out of a file."""
    path.write_bytes(
        b"".join(plan_gguf({"general.architecture": "llama", **metadata}, []).pieces())
    )
    return load_weights(path).metadata


# --- BERT's -------------------------------------------------------------------------------------


def test_berts_comes_back_without_its_json(minilm, tmp_path):
    data = json.loads((minilm / "tokenizer.json").read_text())
    settings = json.loads((minilm / "tokenizer_config.json").read_text())
    metadata = gguf_tokenizer_metadata(data, settings, keep_json=False)
    made = tokenizer_json(through(tmp_path / "m.gguf", metadata))
    assert made["model"]["vocab"] == data["model"]["vocab"]
    for key in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        assert made[key] == data[key], key
    specials = lambda tokens: {(t["id"], t["content"], t["special"]) for t in tokens}
    assert specials(made["added_tokens"]) == specials(data["added_tokens"])


def test_berts_is_what_the_converter_writes(minilm, tmp_path):
    """gguf's own search for special tokens; tokens as in test_gguf_tokenizer."""
    data = json.loads((minilm / "tokenizer.json").read_text())
    settings = json.loads((minilm / "tokenizer_config.json").read_text())
    found = gguf_tokenizer_metadata(data, settings)
    tokens = found[KEY + "tokens"]
    assert len(tokens) == 30522 and tokens[2000:2003] == ["▁to", "▁was", "▁he"]
    pieces = [t for t in data["model"]["vocab"] if t.startswith("##")]
    assert "##" + tokens[data["model"]["vocab"][pieces[5]]] == pieces[5]
    ids = gguf.SpecialVocab(minilm, n_vocab=len(tokens)).special_token_ids
    names = {"unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask", "bos": "bos"}
    assert names.keys() <= ids.keys()
    for key, name in names.items():
        assert found[f"{KEY}{name}_token_id"] == ids[key]
    control = {i for i, kind in enumerate(found[KEY + "token_type"]) if kind == TYPES.CONTROL}
    assert control == {0, 100, 101, 102, 103}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"normalizer": None}, "BERT's normalizer"),
        ({"normalizer": {"type": "Lowercase"}}, "BERT's normalizer"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "BERT's normalizer"),
        ({"normalizer": {"type": "BertNormalizer", "clean_text": False}}, "'clean_text'"),
        (
            {"model": {"type": "Unigram", "vocab": []}, "normalizer": {"type": "Lowercase"}},
            "Lowercase",
        ),
        ({"model": {"type": "WordLevel", "vocab": {}}}, "type 'WordLevel'"),
        ({"model": {"vocab": {}}}, "type None"),
    ],
)
def test_kinds_that_llama_cpp_has_not(minilm, change, says):
    data = json.loads((minilm / "tokenizer.json").read_text())
    with pytest.raises(NotImplementedError, match=says):
        gguf_tokenizer_metadata({**data, **change})


# --- GPT-2's ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", files.BYTE_LEVEL)
def test_the_way_of_splitting_has_a_name(name):
    data = files.byte_level(name)
    found = gguf_tokenizer_metadata(data)
    assert (found[KEY + "model"], found[KEY + "pre"]) == ("gpt2", files.BYTE_LEVEL[name][2])
    assert found[KEY + "merges"] == [
        " ".join(pair) if isinstance(pair, list) else pair for pair in data["model"]["merges"]
    ]
    vocab = data["model"]["vocab"]
    assert all(found[KEY + "tokens"][index] == text for text, index in vocab.items())


def test_types_and_special_tokens(gpt2):
    settings = {
        "bos_token": "<|begin|>", "eos_token": {"content": "<|end|>", "special": True},
        "pad_token": "nowhere", "unk_token": None,
    }  # fmt: skip
    config = {"pad_token_id": 5, "eos_token_id": 9, "bos_token_id": 10**6}
    found = gguf_tokenizer_metadata(gpt2, settings, config, vocab_size=512)
    ids = {key: value for key, value in found.items() if key.endswith("_id")}
    assert ids == {
        KEY + "bos_token_id": 0, KEY + "eos_token_id": 1, KEY + "padding_token_id": 5
    }  # fmt: skip
    types = found[KEY + "token_type"]
    assert types.dtype == np.int32 and len(types) == len(found[KEY + "tokens"]) == 512
    assert [types[i] for i in (0, 1, 2, 500, 501, 511)] == [
        TYPES.CONTROL, TYPES.CONTROL, TYPES.NORMAL, TYPES.USER_DEFINED, TYPES.UNUSED, TYPES.UNUSED
    ]  # fmt: skip
    assert found[KEY + "tokens"][500:502] == ["<user>", "[PAD501]"]
    assert "bos_token_id" not in str(gguf_tokenizer_metadata(gpt2, None, {"bos_token_id": 10**6}))


def test_the_tokens_around_a_text():
    data, settings = files.byte_level("llama3"), {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    flags = lambda found: (found[KEY + "add_bos_token"], found[KEY + "add_eos_token"])
    assert flags(gguf_tokenizer_metadata(data, settings)) == (True, False)
    assert flags(gguf_tokenizer_metadata(data)) == (True, False)
    said = {**settings, "add_bos_token": False, "add_eos_token": True}
    assert flags(gguf_tokenizer_metadata(data, said)) == (True, False)  # as transformers and load
    inner = data["post_processor"]
    data["post_processor"] = {"type": "Sequence", "processors": [{"type": "ByteLevel"}, inner]}
    assert flags(gguf_tokenizer_metadata(data, settings)) == (True, False)


def around(data, before=(), after=(), kind="TemplateProcessing"):
    """The tokenizer with other special tokens around a text."""
    ids = {item["content"]: item["id"] for item in data["added_tokens"]}
    if kind != "TemplateProcessing":
        pairs = {"cls": [*before, ids[before[0]]], "sep": [*after, ids[after[0]]]}
        rest = {"trim_offsets": True, "add_prefix_space": False} if "Ro" in kind else {}
        return {**data, "post_processor": {"type": kind, **pairs, **rest}}
    mark = lambda text: {"SpecialToken": {"id": text, "type_id": 0}}
    single = [*map(mark, before), {"Sequence": {"id": "A", "type_id": 0}}, *map(mark, after)]
    special = {t: {"id": t, "ids": [ids[t]], "tokens": [t]} for t in (*before, *after)}
    return {**data, "post_processor": {
        "type": kind, "single": single, "pair": [*single, *single], "special_tokens": special}}  # fmt: skip


BEGIN, END, USER = "<|begin|>", "<|end|>", "<user>"


@pytest.mark.parametrize(
    ("before", "after", "settings", "kind"),
    [
        ([BEGIN], [END], {"bos_token": BEGIN, "eos_token": END}, "TemplateProcessing"),
        ([], [USER], {"eos_token": END}, "TemplateProcessing"),  # Qwen3-Embedding
        ([USER], [END], {"bos_token": BEGIN, "eos_token": END}, "TemplateProcessing"),
        ([BEGIN], [END], {"cls_token": BEGIN, "sep_token": END}, "TemplateProcessing"),  # ModernBERT
        ([BEGIN], [END], {"cls_token": BEGIN, "sep_token": END}, "RobertaProcessing"),
        ([BEGIN], [END], {"cls_token": BEGIN, "sep_token": END}, "BertProcessing"),
        ([], [], {"bos_token": BEGIN, "eos_token": END, "add_bos_token": True}, "TemplateProcessing"),
        ([BEGIN], [], {"bos_token": BEGIN, "add_bos_token": False}, "TemplateProcessing"),
    ],
)  # fmt: skip
def test_the_tokens_around_a_text_are_those_of_the_directory(before, after, settings, kind):
    data = around(files.byte_level("llama3"), before, after, kind)
    found = gguf_tokenizer(gguf_tokenizer_metadata(data, settings, keep_json=False))
    wanted = tokenizers.Tokenizer.from_str(json.dumps(data))
    for text in ("", "the word"):
        assert found.encode(text) == wanted.encode(text).ids


def test_the_token_after_a_text_is_eos_and_the_other_eot_as_gguf_has_it(tmp_path):
    data = around(files.byte_level("llama3"), [], [USER])
    settings = {"eos_token": END, "pad_token": USER}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    oracle = gguf.SpecialVocab(tmp_path, n_vocab=501).special_token_ids
    found = gguf_tokenizer_metadata(data, settings)
    assert oracle == {"eos": 500, "pad": 500, "eot": 1}
    assert [found[f"{KEY}{name}_token_id"] for name in ("eos", "padding", "eot")] == [500, 500, 1]


def test_more_than_one_token_before_a_text_is_told_of(caplog):
    data = around(files.byte_level("llama3"), [BEGIN, USER])
    assert gguf_tokenizer_metadata(data)[KEY + "bos_token_id"] == 0
    assert "texts begin with 2 special tokens" in caplog.text


def test_all_tokens_that_end_an_answer_are_written(caplog):
    data, settings = files.byte_level("llama3"), {"eos_token": END}
    found = gguf_tokenizer_metadata(data, settings, ends=[1, 300, 500])
    assert [found[f"{KEY}{name}_token_id"] for name in ("eos", "eot", "eom")] == [1, 300, 500]
    assert set(end_ids(found)) == {1, 300, 500} and not caplog.text
    more = gguf_tokenizer_metadata(data, settings, ends=[1, 300, 301, 500, 10**6])
    assert set(end_ids(more)) == {1, 300, 301} and "end an answer: [500]" in caplog.text
    # Those that llama.cpp knows by their texts need no key.
    data["added_tokens"][-1]["content"] = "<|im_end|>"
    caplog.clear()
    found = gguf_tokenizer_metadata(data, settings, ends=[1, 300, 301, 500])
    assert set(end_ids(found)) == {1, 300, 301, 500} and not caplog.text
    assert KEY + "eot_token_id" not in gguf_tokenizer_metadata(data, settings, ends=[1, 500])


def test_special_tokens_are_those_that_gguf_finds(tmp_path):
    """gguf's SpecialVocab, out of the same files."""
    data, settings = files.byte_level("llama3"), {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    config = {"pad_token_id": 7, "eos_token_id": [3, 4]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps(config))
    oracle = gguf.SpecialVocab(tmp_path, load_merges=True, n_vocab=501)
    found = gguf_tokenizer_metadata(data, settings, config)
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    assert {names[key]: index for key, index in oracle.special_token_ids.items()} == {
        name: found[f"{KEY}{name}_token_id"] for name in names.values()
    }
    assert oracle.merges == found[KEY + "merges"]
    assert oracle.add_special_token == {"bos": found[KEY + "add_bos_token"]}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "normalizer 'Lowercase'"),
        ({"pre_tokenizer": None}, "without a pre-tokenizer"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre-tokenizer Whitespace"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "ByteLevel"),
        ({"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}}, "ByteLevel"),
    ],
)
def test_ways_of_splitting_without_a_name(gpt2, change, says):
    with pytest.raises(NotImplementedError, match=says):
        gguf_tokenizer_metadata({**gpt2, **change})


def test_another_pattern_has_no_name():
    data = files.byte_level("qwen2")
    data["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] += "|x"
    with pytest.raises(NotImplementedError, match="the pre-tokenizer"):
        gguf_tokenizer_metadata(data)
    data = files.byte_level("qwen2")
    data["model"]["ignore_merges"] = True
    with pytest.raises(NotImplementedError, match="ignore_merges=True"):
        gguf_tokenizer_metadata(data)
    data = files.byte_level("qwen2")
    data["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "MergedWithNext"
    with pytest.raises(NotImplementedError, match="the pre-tokenizer"):
        gguf_tokenizer_metadata(data)


# --- Llama's ------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("metaspace", [True, False])
def test_llamas(prefix, metaspace):
    data = files.sentencepiece(prefix, metaspace)
    found = gguf_tokenizer_metadata(data, {"unk_token": "<unk>"})
    assert found[KEY + "model"] == "llama" and found[KEY + "add_space_prefix"] is prefix
    types, tokens = found[KEY + "token_type"], found[KEY + "tokens"]
    assert [TYPES(kind).name for kind in types[:4]] == ["UNKNOWN", "CONTROL", "CONTROL", "BYTE"]
    assert sum(kind == TYPES.BYTE for kind in types) == 256 and tokens[258] == "<0xFF>"
    scores = found[KEY + "scores"]
    assert scores.dtype == np.float32
    made = [left + right for left, right in data["model"]["merges"]]
    ranked = [scores[tokens.index(text)] for text in dict.fromkeys(made)]
    assert len(ranked) > 300 and ranked == sorted(ranked, reverse=True)
    assert max(scores[i] for i, t in enumerate(tokens) if t not in made) < min(ranked)


def test_pieces_of_the_users_are_looked_for_in_the_text(llama):
    data = copy.deepcopy(llama)
    data["added_tokens"].append({"id": 700, "content": "▁▁x", "special": False})
    found = gguf_tokenizer_metadata(data)
    assert found[KEY + "tokens"][700] == "  x"
    assert found[KEY + "token_type"][700] == TYPES.USER_DEFINED


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"normalizer": None}, "does not replace spaces"),
        ({"normalizer": {"type": "NFKC"}}, "normalizer 'NFKC'"),
        ({"normalizer": {"type": "Prepend", "prepend": "_"}}, "normalizer 'Prepend'"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre-tokenizer 'Whitespace'"),
        ({"pre_tokenizer": {"type": "Metaspace", "replacement": "_"}}, "pre-tokenizer 'Metaspace'"),
    ],
)
def test_llamas_that_llama_cpp_has_not(llama, change, says):
    with pytest.raises(NotImplementedError, match=says):
        gguf_tokenizer_metadata({**llama, **change})


def test_a_step_whose_setting_is_no_text(gpt2):
    split = {"type": "Split", "pattern": {"Regex": "a"}, "behavior": ["Isolated"]}
    steps = [split, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]
    data = {**gpt2, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    with pytest.raises(NotImplementedError, match="in a GGUF file"):
        gguf_tokenizer_metadata(data)
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": ["always"]}
    model = {"type": "Unigram", "vocab": [["a", 0.0]]}
    found = gguf_tokenizer_metadata({"model": model, "pre_tokenizer": space})
    assert found[KEY + "add_space_prefix"] is True


# --- all kinds ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_whole_file_comes_back(name, request, tmp_path):
    data = request.getfixturevalue(name)
    found = through(tmp_path / "m.gguf", gguf_tokenizer_metadata(data))
    assert tokenizer_json(found) == data
    made = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(found)))
    oracle = tokenizers.Tokenizer.from_str(json.dumps(data))
    for text in files.TEXTS:
        assert made.encode(text).ids == oracle.encode(text).ids
    without = gguf_tokenizer_metadata(data, keep_json=False)
    assert "tokenizer.huggingface.json" not in without


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1, "a": 2}', "3", "\udcff", "{" * 10**5])
def test_a_kept_file_that_is_none(text):
    data = {KEY + "model": "gpt2", "tokenizer.huggingface.json": text}
    with pytest.raises(CheckpointError, match=r"m\.gguf.*tokenizer.huggingface.json"):
        tokenizer_json(data, path="m.gguf")


def test_without_a_tokenizer_the_file_says_so():
    found = gguf_tokenizer_metadata(None, None, {"bos_token_id": 3, "pad_token_id": None})
    assert found == {KEY + "model": "none", KEY + "bos_token_id": 3}


def test_chat_templates(gpt2, tmp_path):
    one = gguf_tokenizer_metadata(gpt2, {"chat_template": "a"})
    assert chat_template(one) == "a" and chat_template(gguf_tokenizer_metadata(gpt2)) is None
    assert chat_template(gguf_tokenizer_metadata(gpt2, {}, chat_template="b")) == "b"
    texts = {"default": "d", "tool_use": "t", "rag": "r"}
    several = {"chat_template": [{"name": k, "template": v} for k, v in texts.items()]}
    found = through(tmp_path / "m.gguf", gguf_tokenizer_metadata(gpt2, several))
    assert {name: chat_template(found, name) for name in texts} == texts
    writer = gguf.GGUFWriter(tmp_path / "w.gguf", "llama")
    writer.add_chat_template(several["chat_template"])
    theirs = {k: v.value for k, v in writer.kv_data[0].items() if "chat" in k}
    ours = {k: v for k, v in found.items() if "chat" in k}
    assert {k: sorted(v) for k, v in ours.items()} == {k: sorted(v) for k, v in theirs.items()}


def test_more_tokens_than_rows(gpt2):
    with pytest.raises(CheckpointMismatchError, match="at most 500, found 501"):
        gguf_tokenizer_metadata(gpt2, vocab_size=500)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": 3}, "'model'"),
        ({"added_tokens": {}}, "'added_tokens'"),
        ({"added_tokens": [3]}, "'added_tokens'"),
        ({"added_tokens": [{"id": 9}]}, "'content'"),
        ({"added_tokens": [{"content": "new", "id": 3}]}, "two for 3"),
        ({"added_tokens": [{"content": "new", "id": 10**8}]}, "numbers that fit"),
        ({"added_tokens": [{"content": "a", "id": 3}]}, "number [0-9]+ for 'a'"),
        ({"vocab": []}, "'vocab'"),
        ({"vocab": {"a": "b"}}, "a number for each token"),
        ({"vocab": {"a": -1}}, "a number for each token"),
        ({"vocab": {"a": 2**40}}, "a number for each token"),
        ({"vocab": {"a": True}}, "a number for each token"),
        ({"merges": None}, "'merges'"),
        ({"merges": ["a b c"]}, "pairs of tokens"),
        ({"merges": [["a"]]}, "pairs of tokens"),
        ({"merges": [[1, 2]]}, "pairs of tokens"),
    ],
)
def test_files_that_are_no_tokenizer(gpt2, change, says):
    data = copy.deepcopy(gpt2)
    for key, value in change.items():
        (data["model"] if key in data["model"] else data)[key] = value
    with pytest.raises(CheckpointFormatError, match=says) as info:
        gguf_tokenizer_metadata(data, path="tokenizer.json")
    assert str(info.value).startswith("tokenizer.json: ")


ANY = st.none() | st.booleans() | st.integers(-2, 9) | st.text(max_size=4)
ANY |= st.lists(ANY, max_size=3) | st.dictionaries(
    st.sampled_from(["type", "pattern", "single", "processors", "normalizers", "content", "id"]),
    ANY,
    max_size=3,
)


@given(
    st.sampled_from(["gpt2", "llama", "bert"]),
    st.dictionaries(
        st.sampled_from(
            ["normalizer", "pre_tokenizer", "post_processor", "added_tokens", "model.vocab",
             "model.merges", "model.type", "model.unk_token", "model.continuing_subword_prefix"]
        ), ANY, max_size=2,
    ),
    st.dictionaries(
        st.sampled_from(["bos_token", "eos_token", "add_bos_token", "chat_template"]), ANY, max_size=2
    ),
)  # fmt: skip
def test_whatever_a_file_says_only_our_errors_leave(kind, change, settings):
    data = {
        "gpt2": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
                 "pre_tokenizer": {"type": "ByteLevel"}},
        "llama": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "byte_fallback": True},
                  "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}},
        "bert": {"model": {"type": "WordPiece", "vocab": {"a": 0}},
                 "normalizer": {"type": "BertNormalizer"},
                 "pre_tokenizer": {"type": "BertPreTokenizer"}},
    }[kind]  # fmt: skip
    for key, value in change.items():
        where, _, name = key.rpartition(".")
        (data[where] if where else data)[name] = value
    try:
        found = gguf_tokenizer_metadata(data, settings, {"bos_token_id": 0})
        b"".join(plan_gguf(found, []).pieces())
    except (CheckpointError, NotImplementedError) as error:
        assert "\n" not in str(error)


def test_ids_beyond_the_vocabulary_are_left_out():
    """As transformers' defaults are for a small model without a tokenizer."""
    config = {"bos_token_id": 3, "eos_token_id": [151329, 4], "pad_token_id": 99}
    found = gguf_tokenizer_metadata(None, config=config, vocab_size=99)
    assert found == {f"{KEY}model": "none", f"{KEY}bos_token_id": 3}
