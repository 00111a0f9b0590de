"""Every function and command that takes a path refuses URLs and an empty path, and makes nothing."""

import inspect
import os
import types
from pathlib import Path

import jax
import pytest

import maxjax
from maxjax import nn
from maxjax.cli.application import main
from maxjax.errors import UserInputError
from maxjax.interop import trees
from maxjax.models.config import read_object
from maxjax.paths import local_path

URLS = [
    "gs://bucket/run",
    "s3://b/k.safetensors",
    Path("az://b/k"),
    "file:///m",
    "hf://org/name",
    "",
]
# Parameters that say where something came from, for messages; nothing is opened there.
SHOWN = ("from_dict", "find_family", "is_tied")


def layer() -> nn.Module:
    return maxjax.init(nn.Sequential([nn.Linear(4, 8)]), jax.random.key(0))


def adapted() -> nn.Module:
    return maxjax.lora.add(layer(), rank=2, key=jax.random.key(1))


CALLS = {
    "maxjax.Conversation.save": lambda p: maxjax.Conversation(*maxjax.load("tiny")).save(p),
    "maxjax.build": lambda p: maxjax.build({}, p),
    "maxjax.checkpoint.CheckpointManager": maxjax.checkpoint.CheckpointManager,
    "maxjax.checkpoint.convert": lambda p: maxjax.checkpoint.convert("tiny", p),
    "maxjax.checkpoint.repair": maxjax.checkpoint.repair,
    "maxjax.checkpoint.restore": lambda p: maxjax.checkpoint.restore(p, None, x=0),
    "maxjax.checkpoint.save": lambda p: maxjax.checkpoint.save(p, layer()),
    "maxjax.checkpoint.save_async": lambda p: maxjax.checkpoint.save_async(p, layer()),
    "maxjax.checkpoint.save_pretrained": lambda p: maxjax.save_pretrained(layer(), p),
    "maxjax.export": lambda p: maxjax.export(layer(), jax.ShapeDtypeStruct((1, 4), "float32"), p),
    "maxjax.load": maxjax.load,
    "maxjax.load_exported": maxjax.load_exported,
    "maxjax.load_tokenizer": maxjax.load_tokenizer,
    "maxjax.load_weights": maxjax.load_weights,
    "maxjax.lora.load": lambda p: maxjax.lora.load(layer(), p),
    "maxjax.lora.save": lambda p: maxjax.lora.save(p, adapted()),
    "maxjax.models.config_beside": maxjax.models.config_beside,
    "maxjax.models.read_object": read_object,
    # Arguments that are more than a path, and second paths.
    "plan": maxjax.plan,
    "trees.load": lambda p: trees.load({}, p),
    "load_weights of a list": lambda p: maxjax.load_weights([p]),
    "convert from": lambda p: maxjax.checkpoint.convert(p, "new"),
    "convert with an importance matrix": lambda p: maxjax.checkpoint.convert(
        "tiny", "new.gguf", quantize="q4_k", importance=p
    ),
    "load with a config": lambda p: maxjax.load("tiny", config=p),
    "load with a cache": lambda p: maxjax.load("org/name", cache_dir=p, local_files_only=True),
}  # fmt: skip
COMMANDS = {
    "inspect": ["inspect", "%"],
    "verify": ["verify", "%"],
    "plan": ["plan", "%"],
    "repair": ["repair", "%"],
    "convert from": ["convert", "%", "new"],
    "convert to": ["convert", "tiny", "%"],
    "convert with": ["convert", "tiny", "a.gguf", "--quantize", "q4_k", "--importance", "%"],
    "embed": ["embed", "--model", "%", "text"],
    "embed to": ["embed", "--output", "%.npy", "text"],
    "rerank": ["rerank", "--model", "%", "query", "document"],
    "fill-mask": ["fill-mask", "--model", "%", "a [MASK]"],
    "tag": ["tag", "--model", "%", "text"],
    "classify": ["classify", "--model", "%", "text"],
    "answer": ["answer", "--model", "%", "question", "text"],
    "generate": ["generate", "--model", "%", "text"],
    "generate of a file": ["generate", "--file", "%"],
    "chat": ["chat", "--model", "%"],
    "chat continued": ["chat", "--load", "%"],
    "eval": ["eval", "perplexity", "--text", "%"],
    "bench": ["bench", "--model", "%"],
}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("path", URLS, ids=str)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_function_refuses_what_is_no_local_path(call, path):
    with pytest.raises(UserInputError, match="not supported for paths" if str(path) else "empty"):
        call(path)


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_command_refuses_a_url(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main([one.replace("%", "gs://bucket/run") for one in arguments]))
    assert ended.value.code in (1, 2)
    assert "gs:// is not supported for paths" in capsys.readouterr().err


def test_these_are_all_functions_that_take_a_path():
    found = {name for name in _with_paths(maxjax, "maxjax", set()) if not name.endswith(SHOWN)}
    assert found == {name for name in CALLS if name.startswith("maxjax.")}


def _with_paths(module, prefix, seen):
    """The public functions, classes and methods below ``module`` with a parameter that is a path."""
    for name in module.__all__:
        value, full = getattr(module, name), f"{prefix}.{name}"
        if id(value) in seen or "errors" in full:
            continue
        seen.add(id(value))
        if isinstance(value, types.ModuleType) and value.__name__.startswith("maxjax"):
            if hasattr(value, "__all__"):
                yield from _with_paths(value, full, seen)
            continue
        if not callable(value) or issubclass(value if isinstance(value, type) else int, Exception):
            continue
        things = {full: value}
        if isinstance(value, type):
            things |= {f"{full}.{n}": getattr(value, n) for n in vars(value) if n[0] != "_"}
        for one, thing in things.items():
            if (inspect.isroutine(thing) and callable(thing)) or isinstance(thing, type):
                given = inspect.signature(thing).parameters.values()
                if any("PathLike" in str(parameter.annotation) for parameter in given):
                    yield one


def test_a_folder_with_the_name_of_a_scheme_is_reached_by_a_path(tmp_path):
    (tmp_path / "gs:" / "run").mkdir(parents=True)
    assert local_path(Path("gs:/run")) == "gs:/run"
    with pytest.raises(UserInputError, match="gs:// is not supported"):
        local_path("gs://run")
    os.removedirs("gs:/run")
    tmp_path.mkdir(exist_ok=True)


def test_drives_and_colons_are_no_schemes():
    for name in ("c:/models", "a:b", "model:latest", "./gs://b", "/gs://b"):
        assert local_path(name) == name
