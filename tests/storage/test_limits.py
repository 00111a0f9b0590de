"""Limits: every hint names an argument that is there, and what it names takes effect."""

import inspect
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import maxjax
from maxjax import Limits
from maxjax.checkpoint import convert, restore
from maxjax.cli.application import main
from maxjax.errors import CheckpointLimitError, CheckpointMissingError, UserInputError
from maxjax.interop import nnx
from maxjax.storage.limits import allowing, in_force
from tests.storage.corpus import D16, A, file_bytes
from tests.storage.gguf import corpus as gguf_corpus
from tests.storage.gguf.corpus import INFOS
from tests.storage.gguf.corpus import gguf as build
from tests.storage.nobody import printed_by_nobody
from tests.storage.numpy.corpus import Item, npy, one, pack
from tests.storage.orbax.corpus import quiet
from tests.storage.pytorch import corpus as pytorch_corpus

SHARED = file_bytes({"a": A, "b": A}, D16)
DEEP = gguf_corpus.pair("x.n", gguf_corpus.ARRAY, gguf_corpus.nested(3))
STRINGS = gguf_corpus.pair(
    "x.s", gguf_corpus.ARRAY, gguf_corpus.array(gguf_corpus.STRING, 5, 5 * gguf_corpus.text("x"))
)
ALIGN = gguf_corpus.pair(
    "general.alignment", gguf_corpus.U32, gguf_corpus.number(gguf_corpus.U32, 64)
)


def written(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def pickled(value: bytes, data: dict[str, bytes] = pytorch_corpus.DATA) -> Callable[[Path], object]:
    return written(pytorch_corpus.zipped(pytorch_corpus.members(value, data)))


def nested(*keys: str) -> bytes:
    """Dicts inside one another, with a tensor in the innermost."""
    value = pytorch_corpus.A
    for key in reversed(keys):
        value = pytorch_corpus.dict_of(**{key: value})
    return value


LONG = pytorch_corpus.dict_of(n=b"](" + b"".join(map(pytorch_corpus.number, range(500))) + b"e")
REPEATED = pytorch_corpus.tensor((20, 1 << 20), (0, 1), numel=1 << 20)
REPEATS = pytorch_corpus.dict_of(**{str(i): REPEATED for i in range(20)})


def index(path: Path) -> None:
    safetensors.numpy.save_file({"a": np.ones(2, np.int16)}, path.parent / "one.safetensors")
    content = {"metadata": {"big": int("7" * 1000)}, "weight_map": {"a": "one.safetensors"}}
    path.write_text(json.dumps(content))


def stacked(path: Path) -> None:
    with quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as saver:
        saver.save(path, {"a": np.ones(2, np.float32)})


# Field → the file, what makes it, and a value that is too little for it.
CASES: dict[str, tuple[str, Callable[[Path], object], int]] = {
    "header_bytes": ("m.safetensors", written(file_bytes({"a": A}, D16)), 20),
    "json_bytes": ("m.safetensors.index.json", index, 30),
    "config_bytes": ("step", stacked, 20),
    "json_depth": ("m.safetensors", written(file_bytes({"a": {**A, "x": [[[]]]}}, D16)), 4),
    "json_values": ("m.safetensors", written(file_bytes({"a": A}, D16)), 1),
    "json_digits": ("m.safetensors.index.json", index, 999),
    "tensors": ("m.npz", written(pack(Item("a.npy", npy()), Item("b.npy", npy()))), 1),
    "name_bytes": ("m.safetensors", written(file_bytes({"long-name": A}, D16)), 8),
    "tensor_bytes": ("m.npz", written(one(npy())), 47),
    "metadata_keys": ("m.gguf", written(gguf_corpus.GOOD), 1),
    "array_items": ("m.gguf", written(build([STRINGS], INFOS, gguf_corpus.D64)), 4),
    "array_depth": ("m.gguf", written(build([DEEP], INFOS, gguf_corpus.D64)), 2),
    "alignment_bytes": (
        "m.gguf", written(build([ALIGN], INFOS[:1], gguf_corpus.D32, align=64)), 32,
    ),
    "member_ratio": ("m.npz", written(one(npy(np.zeros(2**20, "f4")), method=8)), 100),
    "npy_header_bytes": ("m.npz", written(one(npy())), 100),
    "pickle_bytes": ("m.pt", pickled(nested("a")), 100),
    "pickle_instructions": ("m.pt", pickled(LONG), 100),
    "pickle_items": ("m.pt", pickled(LONG), 100),
    "pickle_depth": ("m.pt", pickled(nested("a", "b", "c")), 2),
    "storage_bytes": ("m.pt", pickled(nested("a")), 47),
    "expansion": ("m.pt", pickled(REPEATS, {"data/0": bytes(4 << 20)}), 1),
    "shared_bytes": ("m.safetensors", written(SHARED), 0),
}  # fmt: skip


def test_every_limit_has_a_case():
    of_pictures = {"image_pixels"}  # tests/images/test_decode.py
    assert CASES.keys() | of_pictures == {field.name for field in fields(Limits)}


@pytest.mark.parametrize("option", CASES)
def test_what_the_hint_names_takes_effect(option, tmp_path):
    name, make, tight = CASES[option]
    path = tmp_path / name
    make(path)
    with pytest.raises(CheckpointLimitError) as caught:
        maxjax.load_weights(path, limits=Limits(**{option: tight}))
    hint = re.search(r"limits=maxjax\.Limits\((\w+)=N\), or --limit (\w+)=N", str(caught.value))
    assert hint is not None and hint[1] == hint[2] == option, caught.value
    raised = max(getattr(Limits(), option), 10_000)
    with maxjax.load_weights(path, limits=Limits(**{option: raised})) as weights:
        assert list(weights.items()) or name == "m.pt"


@pytest.mark.parametrize("option", ["tensors", "name_bytes", "pickle_bytes"])
def test_the_command_line_raises_and_lowers_them(option, tmp_path, capsys):
    name, make, tight = CASES[option]
    path = tmp_path / name
    make(path)
    assert main(["inspect", str(path), "--limit", f"{option}={tight}"]) == 1
    assert f"--limit {option}=N" in capsys.readouterr().err
    assert main(["inspect", str(path), "--limit", f"{option}=100000"]) == 0
    assert in_force() == Limits()


@pytest.mark.parametrize("setting", ["tensor=5", "tensors", "tensors=-1", "tensors=1e6"])
def test_a_limit_that_is_none_is_wrong_usage(setting, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["inspect", "m.npz", "--limit", setting])
    assert stop.value.code == 2
    assert "tensors" in capsys.readouterr().err


@pytest.mark.parametrize("limits", [{"tensors": 5}, 5, "tensors=5"])
def test_limits_are_limits(limits):
    with pytest.raises(UserInputError, match=r"maxjax\.Limits"):
        maxjax.load_weights("m.npz", limits=limits)


@pytest.mark.parametrize("value", [-1, 2**63, 1e6, True, None])
def test_a_limit_is_a_whole_number_that_can_be_addressed(value):
    with pytest.raises(UserInputError, match="tensors"):
        Limits(tensors=value)


def test_what_nothing_can_address_is_not_said_to_be_a_matter_of_limits(tmp_path):
    """A tensor of more than 2^63 bytes: its error names no value to raise."""
    path = tmp_path / "m.npz"
    path.write_bytes(one(npy(np.zeros(0, "f4"), shape=f"(0, {2**70})")))
    with pytest.raises(CheckpointLimitError, match=r"2\^63 - 1 can be addressed") as caught:
        maxjax.load_weights(path)
    assert "limits=" not in str(caught.value)


@pytest.mark.parametrize(
    "function",
    [
        maxjax.load, maxjax.load_weights, maxjax.load_tokenizer, maxjax.load_exported, maxjax.plan,
        convert, restore, nnx.load,
    ],
    ids=lambda function: f"{function.__module__}.{function.__name__}",
)  # fmt: skip
def test_what_opens_files_takes_limits(function):
    assert "limits" in inspect.signature(function).parameters


def test_they_hold_for_all_files_of_a_model(tmp_path):
    """The configuration and the tokenizer are not opened by the function that takes them."""
    model, tokenizer = maxjax.load("tiny")
    path = maxjax.save_pretrained(model, tmp_path / "m", tokenizer=tokenizer)
    config = path / "config.json"
    extra = {"extra": [[[[[[[[]]]]]]]]}
    config.write_text(json.dumps(json.loads(config.read_text()) | extra))
    tight = Limits(json_depth=6)
    weights = maxjax.load_weights(path, limits=tight)
    with pytest.raises(CheckpointLimitError, match=r"config\.json.*Limits\(json_depth"):
        maxjax.build(weights)
    with pytest.raises(CheckpointLimitError, match=r"config\.json.*Limits\(json_depth"):
        maxjax.load(path, limits=tight)
    with pytest.raises(CheckpointLimitError, match=r"config\.json.*Limits\(json_depth"):
        maxjax.plan(path, limits=tight)
    with pytest.raises(CheckpointLimitError, match=r"config\.json.*Limits\(json_depth"):
        convert(path, tmp_path / "other", limits=tight)
    with pytest.raises(CheckpointLimitError, match=r"tokenizer.*json.*Limits\(json_bytes"):
        maxjax.load_tokenizer(path, limits=Limits(json_bytes=100))
    with pytest.raises(CheckpointLimitError, match=r"tokenizer.*json.*Limits\(json_bytes"):
        maxjax.load(path, limits=Limits(json_bytes=5000))
    assert maxjax.load(path, limits=Limits(json_depth=30))[1] is not None


def test_they_hold_for_a_step_of_orbax(tmp_path):
    model, _ = maxjax.load("tiny")
    maxjax.checkpoint.save(tmp_path, model)
    with pytest.raises(CheckpointLimitError, match=r"Limits\(tensors"):
        restore(tmp_path, model, limits=Limits(tensors=3))
    with pytest.raises(CheckpointLimitError, match=r"Limits\(tensors"):
        maxjax.load(tmp_path, limits=Limits(tensors=3))
    assert restore(tmp_path, model, limits=Limits(tensors=10**6)) == {}


def test_they_are_those_of_one_block():
    with allowing(Limits(tensors=3)), pytest.raises(ZeroDivisionError):
        with allowing(None):
            assert in_force().tensors == 3
        with allowing(Limits(tensors=4)):
            assert in_force().tensors == 4
            1 / 0
    assert in_force() == Limits()


@pytest.mark.extra
def test_a_file_of_200_001_tensors(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(
        file_bytes(
            {
                f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
                for i in range(200_001)
            },
            b"",
        )  # fmt: skip
    )
    with pytest.raises(CheckpointLimitError, match=r"Limits\(tensors=N\)"):
        maxjax.load_weights(path)
    with maxjax.load_weights(path, limits=Limits(tensors=200_001)) as weights:
        assert len(list(weights.items())) == 200_001


def test_a_size_that_nothing_can_address_is_not_said_to_be_a_matter_of_a_limit(tmp_path):
    entry = {"dtype": "F32", "shape": [1 << 62], "data_offsets": [0, 1 << 64]}
    (tmp_path / "m.safetensors").write_bytes(file_bytes({"a": entry}, b""))
    with pytest.raises(CheckpointLimitError, match="No value of tensor_bytes allows it"):
        maxjax.load_weights(tmp_path)


@pytest.mark.parametrize("link", ["../blobs/gone", "itself"])
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
             "special_tokens_map.json", "modules.json", "config.json", "maxjax_digests.json"],
)  # fmt: skip
def test_a_link_that_leads_nowhere_is_not_an_absent_file(name, link, tmp_path):
    shutil.copytree(Path(maxjax.__file__).parent / "tiny", tmp_path / "m")
    path = tmp_path / "m" / name
    path.unlink(missing_ok=True)
    path.symlink_to(name if link == "itself" else link)
    with pytest.raises(CheckpointMissingError) as caught:
        maxjax.load(tmp_path / "m")
    assert caught.value.path == str(path) and (name if link == "itself" else link) in str(
        caught.value
    )


def test_a_directory_without_permission_is_not_called_empty(tmp_path):
    """In a child that is nobody: root may read everything."""
    closed = tmp_path / "closed"
    shutil.copytree(Path(maxjax.__file__).parent / "tiny", closed)
    closed.chmod(0)
    imports = """
import maxjax
from maxjax.errors import CheckpointAccessError
maxjax.load(maxjax.__path__[0] + "/tiny")
maxjax.plan(maxjax.__path__[0] + "/tiny")
"""
    code = f"""
for call in (maxjax.load, maxjax.load_tokenizer, maxjax.load_weights, maxjax.plan):
    try:
        call({str(closed)!r})
    except CheckpointAccessError as error:
        print(call.__name__, error)
"""
    try:
        said = printed_by_nobody(tmp_path, imports, code)
    finally:
        closed.chmod(0o700)
    assert [line.split()[0] for line in said] == ["load", "load_tokenizer", "load_weights", "plan"]
