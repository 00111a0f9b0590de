"""What names a checkpoint in one place names it everywhere: "tiny", a name on the hub, a path, open Weights."""

import logging
import shutil

import pytest

import maxjax
from maxjax.cli.application import main
from maxjax.errors import CheckpointMissingError, UserInputError
from maxjax.storage.hub import checkpoint_path, find_model, needed

TINY = find_model("tiny")
CALLS = {
    "load": lambda given, folder: maxjax.load(given),
    "load_weights": lambda given, folder: maxjax.load_weights(given).close(),
    "load_tokenizer": lambda given, folder: maxjax.load_tokenizer(given).encode("a"),
    "plan": lambda given, folder: maxjax.plan(given),
    "convert": lambda given, folder: maxjax.checkpoint.convert(given, folder / "new"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_tiny_and_open_weights(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call("tiny", tmp_path / "a")
    with maxjax.load_weights(TINY) as weights:
        call(weights, tmp_path / "b")


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_name_on_the_hub_is_looked_for_there(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []

    def fetch(name, access):
        asked.append(name.repo)
        return TINY

    monkeypatch.setattr("maxjax.storage.hub.fetch", fetch)
    call("org/name", tmp_path)
    assert asked == ["org/name"]
    shutil.copytree(TINY, tmp_path / "org" / "name")  # a path that exists wins
    call("org/name", tmp_path / "more")
    assert asked == ["org/name"]


def test_an_adapter_on_the_hub(monkeypatch, tmp_path):
    names = ["README.md", "adapter_config.json", "adapter_model.bin", "adapter_model.safetensors"]
    assert needed("org/adapter", names) == ["adapter_config.json", "adapter_model.safetensors"]
    monkeypatch.setattr("maxjax.storage.hub.fetch", lambda name, access: tmp_path / "there")
    with pytest.raises(CheckpointMissingError, match="there: no adapter_model.safetensors"):
        maxjax.lora.load(maxjax.load("tiny")[0], "org/adapter")


@pytest.mark.parametrize("arguments", (["inspect", "tiny"], ["verify", "tiny"], ["plan", "tiny"]))
def test_commands(arguments, capsys):
    assert main(arguments) == 0 and capsys.readouterr().out


def test_a_missing_path_is_not_looked_for_on_the_hub():
    assert checkpoint_path("no/such/model.safetensors") == "no/such/model.safetensors"
    assert checkpoint_path("./org/name") == "./org/name"


def test_safetensors_with_a_config_beside_gguf_files(tmp_path, caplog):
    """As on the hub; transformers reads the same ones."""
    folder = shutil.copytree(TINY, tmp_path / "both")
    maxjax.checkpoint.convert(TINY, folder / "tiny-q8_0.gguf", quantize="q8_0")
    maxjax.checkpoint.convert(TINY, folder / "tiny-q4_0.gguf", quantize="q4_0")
    with caplog.at_level(logging.WARNING, "maxjax"):
        model, _ = maxjax.load(folder)
        maxjax.load(folder)
    assert model.config == maxjax.load(TINY)[0].config
    said = [
        one for one in caplog.messages if "reading model.safetensors; not tiny-q4_0.gguf" in one
    ]
    assert len(said) == 1 and len(caplog.messages) == 1
    assert maxjax.load(folder, filename="tiny-q8_0.gguf")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("modle", "model"), ("dtaa", "data"), ("fdsp", "fsdp"), ("expart", "expert"), ("tensr", "tensor")]
)  # fmt: skip
def test_a_misspelt_axis(name, meant):
    with pytest.raises(UserInputError, match=f"no axis '{name}': did you mean '{meant}'"):
        maxjax.make_mesh(**{name: 1})


@pytest.mark.parametrize(
    "name", ["rows", "stage", "x", "mine", "pp", "model2", "data_parallel", "replica"]
)
def test_any_other_axis(name):
    assert maxjax.make_mesh(**{name: 1}).axis_names == (name,)
