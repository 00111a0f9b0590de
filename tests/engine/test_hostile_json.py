"""JSON beside good weights that is broken or hostile: one clear error, and nothing of it is run."""

import json
import os
import shutil
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

import maxjax
from maxjax.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointLimitError,
    CheckpointMismatchError,
    CheckpointTruncatedError,
    CheckpointUnsafeError,
    UnsupportedModelError,
)
from maxjax.models import BertConfig, BertModel
from maxjax.storage.limits import Limits
from tests.storage.watch import watched

FORMAT, LIMIT, UNSAFE = CheckpointFormatError, CheckpointLimitError, CheckpointUnsafeError
CONFIG = {
    "architectures": ["BertModel"], "model_type": "bert", "vocab_size": 2000, "hidden_size": 4,
    "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
    "max_position_embeddings": 16,
}  # fmt: skip
POOLING, SENTENCE = "1_Pooling/config.json", "sentence_bert_config.json"
FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
         "modules.json", POOLING, SENTENCE]  # fmt: skip
PAYLOAD = "import pathlib\npathlib.Path(__file__ + '.ran').touch()\n"


@pytest.fixture(scope="module")
def original(minilm, tmp_path_factory):
    """A directory as of MiniLM with a tiny model and few words; loaded once: all is imported then."""
    directory = tmp_path_factory.mktemp("original")
    for name in FILES:
        (directory / name).parent.mkdir(exist_ok=True)
        if (minilm / name).exists():
            shutil.copy(minilm / name, directory / name)
    assert {name for name in FILES if not (directory / name).exists()} <= {"config.json"}
    (directory / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {word: i for word, i in vocab.items() if i < 2000}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    rng = np.random.default_rng(0)
    weights = BertModel(BertConfig.from_dict(CONFIG)).raw_state_dict()
    values = {
        name: rng.standard_normal([int(d) for d in weight.shape]).astype(np.float32)
        for name, weight in weights.items()
    }
    save_file(values, directory / "model.safetensors")
    maxjax.load(directory)
    return directory


@pytest.fixture
def small(original, tmp_path):
    return shutil.copytree(original, tmp_path / "small")


def change(file, **fields):
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def assert_harmless(acts, directory):
    """Nothing written, started or imported; what Python reads of its modules and compiles of annotations is its own."""
    own = ("import", "marshal.loads", "compile", "exec")
    assert not [act for act in acts if not act.startswith(own) or str(directory) in act]
    assert not list(directory.rglob("*.ran")) and not list(directory.rglob("*.pyc"))
    files = [str(getattr(module, "__file__", None)) for module in list(sys.modules.values())]
    assert not [file for file in files if file.startswith(str(directory))]


def refused(directory, kinds, name=None):
    """The error of `maxjax.load`, which does nothing else; `name` is the file it must tell."""
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    with watched() as acts, pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
        maxjax.load(directory)
    error, message = caught.value, str(caught.value)
    assert isinstance(error, kinds), repr(error)
    assert "\n" not in message and message.isprintable() and len(message) < 4000
    assert name is None or error.path == str(directory / name)
    assert_harmless(acts, directory)
    assert before is None or set(os.listdir("/proc/self/fd")) <= before
    return error


def loads(directory):
    with watched() as acts:
        model, tokenizer = maxjax.load(directory)
    assert_harmless(acts, directory)
    return model, tokenizer


# --- any of the files -------------------------------------------------------------------------

BROKEN = {
    "empty": (b"", CheckpointTruncatedError),
    "cut": (b'{"a": [1, 2', CheckpointTruncatedError),
    "deep": (b"[" * 1_000_000, LIMIT),
    "deep_closed": (b"[" * 100_000 + b"]" * 100_000, LIMIT),
    "deep_objects": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, LIMIT),
    "deep_mixed": (b'{"a":[' * 100 + b"]}" * 100, LIMIT),
    "digits": (b'{"a": ' + b"9" * 1_000_000 + b"}", LIMIT),
    "twice": (b'{"a": 1, "a": 1}', FORMAT),
    "twice_below": (b'{"a": {"b": [{"c": 1, "c": 2}]}}', FORMAT),
    "twice_escaped": (b'{"a": 1, "\\u0061": 2}', FORMAT),
    "surrogate": (b'{"a": "\\ud800"}', FORMAT),
    "surrogate_in_a_key": (b'{"\\udfff": 1}', FORMAT),
    "surrogate_bytes": (b'{"a": "\xed\xa0\x80"}', FORMAT),
    "bad_utf8": (b'{"a": "\xff"}', FORMAT),
    "utf16": ("{}".encode("utf-16"), FORMAT),
    "mark": (b"\xef\xbb\xbf{}", FORMAT),
    "nul_bytes": (bytes(5000), FORMAT),
    "control": (b'{"a": "\x01"}', FORMAT),
    "comment": (b'{"a": 1} // b', FORMAT),
    "quotes": (b"{'a': 1}", FORMAT),
    "comma": (b'{"a": 1,}', FORMAT),
    "two_values": (b"{}{}", FORMAT),
    "null": (b"null", FORMAT),
    "number": (b"3", FORMAT),
    "text": (b'"{}"', FORMAT),
    "true": (b"true", FORMAT),
    "numbers": (b"[1, 2]", FORMAT),
    "html": (b"<!DOCTYPE html><html></html>", FORMAT),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\nsize 1\n", FORMAT),
    "gzip": (b"\x1f\x8b\x08" + bytes(30), FORMAT),
    "pickle": (b"cposix\nsystem\n(S'touch x.ran'\ntR.", UNSAFE),
    "python": (b"__import__('os').system('touch x.ran')", FORMAT),
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("name", FILES)
def test_broken_files(small, name, case):
    content, error = BROKEN[case]
    (small / name).write_bytes(content)
    refused(small, error, name)


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file(small, name):
    file = small / name
    for make in (os.mkfifo, os.mkdir):
        file.unlink()
        make(file)
        refused(small, FORMAT, name)
        file.rmdir() if file.is_dir() else file.unlink()
        file.symlink_to("/dev/zero")
        refused(small, FORMAT, name)


@pytest.mark.parametrize("name", FILES)
def test_too_long(small, name):
    """Refused by its size, before a byte of it is read."""
    option = "json_bytes" if name == "tokenizer.json" else "config_bytes"
    os.truncate(small / name, getattr(Limits(), option) + 1)
    assert option in refused(small, LIMIT, name).hint


@pytest.mark.sampled(2)
@pytest.mark.parametrize("piece", ["\0", " ", "9", "[", "[],", "{},"])
def test_a_hundred_megabytes(small, piece):
    """Lists of lists would take twenty times their bytes as objects of Python."""
    content = b"[" * (len(piece) > 1) + piece.encode() * (100_000_000 // len(piece))
    (small / "config.json").write_bytes(content)
    refused(small, (FORMAT, LIMIT, CheckpointTruncatedError), "config.json")


@pytest.mark.parametrize("name", ["tokenizer.json", "modules.json"])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "nan"])
def test_numbers_that_are_none(small, name, number):
    (small / name).write_text(f'[{{"a": {number}}}]')
    refused(small, FORMAT, name)


@pytest.mark.sampled(36)
@pytest.mark.parametrize("seed", range(60))
def test_altered_bytes(small, seed):
    """Whatever the bytes are, it loads or one of our errors names a file."""
    rng = np.random.default_rng(seed)
    name = FILES[seed % len(FILES)]
    content = bytearray((small / name).read_bytes())
    for at in rng.integers(0, len(content), 1 + seed % 3):
        content[at] = rng.choice(list(b'{}[]",:0-\\\0\xff e') + [int(rng.integers(256))])
    (small / name).write_bytes(content)
    try:
        loads(small)
    except (CheckpointError, UnsupportedModelError) as error:
        assert "\n" not in str(error)


# --- config.json ------------------------------------------------------------------------------

HUGE = 10**4000


SIZES = [
    "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size",
    "max_position_embeddings",
]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize(
    "value", ["4", -1, 0, 1.5, True, [], {}, HUGE, -HUGE, 2**63, 2**31, float("nan"), float("inf"), 1e308]
)  # fmt: skip
@pytest.mark.parametrize("key", SIZES)
def test_sizes(small, key, value):
    change(small / "config.json", **{key: value})
    refused(small, (FORMAT, CheckpointMismatchError))


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size"])
def test_sizes_that_the_weights_do_not_have(small, key):
    """The largest that a configuration may name: nothing of that size is ever made."""
    change(small / "config.json", **{key: 2**31 - 1})
    refused(small, (FORMAT, CheckpointMismatchError))


@pytest.mark.parametrize("value", ["BertModel", 3, [], [3], [None], {}, [["BertModel"]], True])
def test_architectures(small, value):
    change(small / "config.json", architectures=value, model_type=["bert"])
    refused(small, (FORMAT, UnsupportedModelError))


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_act": "os.system"}, {"hidden_act": 3}, {"hidden_act": ["gelu"]},
        {"layer_norm_eps": "1e-5"}, {"layer_norm_eps": HUGE}, {"layer_norm_eps": -1},
        {"layer_norm_eps": float("nan")}, {"position_embedding_type": {"a": 1}},
        {"architectures": ["__import__('os').system('touch x.ran')"], "model_type": "x"},
        {"architectures": ["../../x.BertModel"], "model_type": None},
        {"architectures": ["\x1b[2J\n\u202e" * 1000], "model_type": "x" * 100_000},
        {"architectures": ["X"] * 100_000, "model_type": "x"},
    ],
    ids=range(12),
)  # fmt: skip
def test_settings(small, fields):
    change(small / "config.json", **fields)
    refused(small, (FORMAT, UnsupportedModelError))


@pytest.mark.parametrize("value", [HUGE, -HUGE, float("nan"), "x" * 100_000, [[1] * 1000] * 100])
def test_what_nobody_looks_at(small, value):
    for name in ("config.json", "tokenizer_config.json"):
        change(small / name, torch_dtype=value, _name_or_path=value, anything=value)
    loads(small)


@pytest.mark.parametrize("number", ["0." + "9" * 1_000_000, "1e" + "9" * 1_000_000, "1e400"])
def test_numbers_with_many_digits(small, number):
    text = (small / "config.json").read_text()
    (small / "config.json").write_text(f'{text[:-1]}, "anything": {number}}}')
    loads(small)
    changed = text.replace('"hidden_size": 4', f'"hidden_size": {number}')
    (small / "config.json").write_text(changed)
    refused(small, FORMAT, "config.json")


# --- code beside the weights ------------------------------------------------------------------


def evil(directory):
    """Files that would leave a trace if anything ran them."""
    for name in ("modeling_x.py", "tokenization_x.py", "configuration_x.py", "__init__.py",
                 "conftest.py", "sitecustomize.py", "tokenizers.py", "1_Pooling/__init__.py"):  # fmt: skip
        (directory / name).write_text(PAYLOAD)


AUTO_MAP = {
    "AutoConfig": "configuration_x.X", "AutoModel": "modeling_x.BertModel",
    "AutoTokenizer": ["tokenization_x.X", None], "AutoModelForCausalLM": "a/b--modeling_x.X",
}  # fmt: skip


def test_no_code_of_the_directory_is_run(small, original, monkeypatch):
    evil(small)
    more = {
        "auto_map": AUTO_MAP,
        "trust_remote_code": True,
        "custom_pipelines": {"x": {"impl": "x.X"}},
    }
    change(small / "config.json", **more)
    change(small / "tokenizer_config.json", tokenizer_class="X", **more)
    monkeypatch.chdir(small)
    for path in (small, "."):
        with watched() as acts:
            model, tokenizer = maxjax.load(path)
        assert_harmless(acts, small)
        assert type(model) is BertModel
        assert tokenizer.encode("a word") == maxjax.load(original)[1].encode("a word")


def test_an_architecture_of_the_directory_is_unknown(small):
    evil(small)
    change(small / "config.json", auto_map=AUTO_MAP, architectures=["X"], model_type="x")
    refused(small, UnsupportedModelError)


@pytest.mark.parametrize("kind", ["modeling_x.X", "os.system", "x", "", ".", "builtins.exec"])
def test_modules_of_the_directory_are_not_imported(small, kind):
    evil(small)
    modules = json.loads((small / "modules.json").read_text())
    modules.append({"idx": 3, "name": "3", "path": "3_X", "type": kind})
    (small / "modules.json").write_text(json.dumps(modules))
    model, tokenizer = loads(small)
    with pytest.raises(NotImplementedError):
        maxjax.embed(model, tokenizer, ["a"])
    assert not list(small.rglob("*.ran"))


def test_too_many_modules(small):
    modules = json.loads((small / "modules.json").read_text())
    (small / "modules.json").write_text(json.dumps(modules[:1] * 101))
    refused(small, LIMIT, "modules.json")


# --- paths ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    "path", ["..", "../other", "/etc", "a/../../b", "C:\\x", "a\\..\\b", "file:///etc", "a\0b"]
)
def test_paths_that_lead_out(small, number, path):
    modules = json.loads((small / "modules.json").read_text())
    modules[number]["path"] = path
    (small / "modules.json").write_text(json.dumps(modules))
    assert refused(small, UNSAFE, "modules.json").found == path


@pytest.mark.parametrize("path", ["nowhere", "x" * 300, "x/" * 3000, "model.safetensors", "\n"])
def test_paths_that_lead_nowhere(small, path):
    modules = json.loads((small / "modules.json").read_text())
    modules[1]["path"] = path
    (small / "modules.json").write_text(json.dumps(modules))
    refused(small, CheckpointError)


def test_paths_in_other_files_are_not_followed(small, original):
    """What names files for Hugging Face's own loaders means nothing here."""
    outside = small.parent / "outside"
    shutil.copytree(original, outside)
    (outside / "tokenizer.json").write_text("{")
    tokenizer = "../outside/tokenizer.json"
    change(small / "tokenizer_config.json", vocab_file=tokenizer, tokenizer_file=tokenizer)
    weights = "../outside/model.safetensors"
    change(small / "config.json", _name_or_path="../outside", transformers_weights=weights)
    os.rename(outside / "model.safetensors", outside / "gone")
    loads(small)


# --- tokenizer files --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"model": None}, {"model": {"type": "WordPiece", "vocab": "/etc/passwd"}},
        {"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}, {"added_tokens": {"a": 1}},
        {"added_tokens": [{"id": 2**63, "content": "x"}]}, {"version": HUGE},
        {"model": {"type": "WordPiece", "vocab": {"a": -1}}}, {"normalizer": {"type": "x"}},
        {"model": {"type": "Unigram", "unk_id": 10**9, "vocab": [["a", 0.0]]}},
        {"post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "Z"}}]}},
    ],
    ids=range(10),
)  # fmt: skip
def test_tokenizers(small, fields):
    change(small / "tokenizer.json", **fields)
    refused(small, (FORMAT, LIMIT), "tokenizer.json")


def test_an_expression_that_is_none(small):
    """It is tried out in a process of maxjax's own."""
    split = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}
    change(small / "tokenizer.json", pre_tokenizer=split)
    with pytest.raises((FORMAT, LIMIT), match="tokenizer.json"):
        maxjax.load(small)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("token", [3, [], True, {"content": 3}, {"content": []}])
def test_padding_tokens(small, name, token):
    if name != "tokenizer_config.json":  # which goes first
        (small / "tokenizer_config.json").unlink()
    change(small / name, pad_token=token)
    refused(small, FORMAT, name)


@pytest.mark.parametrize("value", ["512", -1, 0, [], {}, True, float("nan"), float("inf"), -HUGE])
def test_lengths(small, value):
    change(small / "tokenizer_config.json", model_max_length=value)
    refused(small, FORMAT, "tokenizer_config.json")


@pytest.mark.parametrize("value", [10**30, HUGE, 1e308])
def test_no_limit_on_the_length(small, value):
    change(small / "tokenizer_config.json", model_max_length=value)
    assert loads(small)[1].max_length is None
