"""Tab completion in IPython with its default settings, under which it runs no unknown code."""

import jax.numpy as jnp
import pytest

import maxjax
from maxjax import completion, nn
from maxjax.graph import DeviceRef
from maxjax.storage.hub import find_model

completer = pytest.importorskip("IPython.core.completer")
interactiveshell = pytest.importorskip("IPython.core.interactiveshell")


def mlp():
    return nn.MLP("float32", None, 4, 8, [DeviceRef.CPU()])


@pytest.fixture(scope="module")
def shell():
    model, tokenizer = maxjax.load("tiny")
    with maxjax.capture(model, "layers.*") as seen:
        model(jnp.ones((1, 2), jnp.int32))
    assert completion.register()
    one = interactiveshell.InteractiveShell()
    assert one.Completer.evaluation == "limited"
    one.Completer.use_jedi = False
    one.user_ns.update(
        maxjax=maxjax, nn=nn, model=model, cache=model.cache(1, 64),
        weights=maxjax.load_weights(find_model("tiny")),
        layers=nn.LayerList(mlp() for _ in range(3)), stack=nn.LayerList(mlp() for _ in range(3)).stack(),
        pair=nn.layer.layer_list.LayerTuple([mlp(), mlp()]), chain=nn.Sequential([mlp()]),
        saved=model.raw_state_dict(), seen=seen,
    )  # fmt: skip
    yield one
    one.history_manager.end_session()


def completed(shell, text):
    """IPython's completions of a text, without the part before the last dot or bracket."""
    with completer.provisionalcompleter():
        found = [one.text for one in shell.Completer.completions(text, len(text))]
    return {one.removeprefix(text).rpartition(".")[2] if text[-1] == "." else one for one in found}


@pytest.mark.parametrize(
    ("text", "offered"),
    [
        ("model.", {"model", "lm_head", "to", "load_state_dict"}),
        ("model.model.", {"layers", "embed_tokens", "norm"}),
        ("model.model.layers.", {"append", "stack", "unstack", "scan"}),
        ("model.model.layers[0].", {"mlp", "self_attn", "input_layernorm"}),
        ("model.model.layers[1].self_attn.", {"q_proj"}),
        ("model.model.layers[0].mlp.up_proj.weight.", {"shape", "sharding", "value"}),
        ("layers[0].", {"gate_proj", "down_proj"}),
        ("layers[-1].up_proj.", {"weight"}),
        ("stack[2].", {"gate_proj", "down_proj"}),
        ("pair[1].", {"gate_proj"}),
        ("chain[0].", {"gate_proj"}),
        ("weights.", {"model", "exists"}),
        ("weights.model.", {"layers", "embed_tokens"}),
        ("weights.model.layers[0].", {"mlp", "self_attn", "data"}),
        ("weights.model.layers[0].mlp.up_proj.", {"weight"}),
        ('weights["model"].', {"layers"}),
        ("cache.", {"full", "lengths", "capacity"}),
        ("cache.full.", {"keys"}),
        ("maxjax.", {"memory", "free", "load"}),
    ],
)
def test_what_is_offered(shell, text, offered):
    found = completed(shell, text)
    assert offered <= found
    assert not [name for name in found if name.startswith("_mx_") or name.isdecimal()]


def test_values_are_asked_before_jedi(shell, monkeypatch):
    """Jedi would take a layer for a list, as it reads code and not values."""
    pytest.importorskip("jedi")
    monkeypatch.setattr(shell.Completer, "use_jedi", True)
    monkeypatch.setattr(shell.Completer, "custom_matchers", [])
    completion._ask_values(shell)
    found = completed(shell, "model.model.layers[0].inp")
    assert {name.lstrip(".") for name in found} == {"input_layernorm"}
    assert "up_proj" in completed(shell, "weights.model.layers[0].mlp.")
    assert "append" in completed(shell, "model.model.layers.")


@pytest.mark.parametrize(
    ("text", "offered"),
    [
        ('weights["', {"model.embed_tokens.weight", "model"}),
        ('weights.model["', {"embed_tokens", "layers.1.mlp.up_proj.weight"}),
        ("weights.model.layers[", {"0", "1"}),
        ("model.model.layers[", {"0", "1"}),
        ("layers[", {"0", "1", "2"}),
        ('saved["', {"model.embed_tokens.weight"}),
        ('seen["', {"model.layers.0", "model.layers.1"}),
    ],
)
def test_keys(shell, text, offered):
    assert offered <= completed(shell, text)


def test_nothing_is_read_and_nothing_runs(shell, monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("it was called")

    weights = shell.user_ns["weights"]
    monkeypatch.setattr(type(weights), "data", refuse)
    monkeypatch.setattr(type(weights), "__jax_array__", refuse)
    monkeypatch.setattr(type(weights._family), "read", refuse)
    monkeypatch.setattr(maxjax, "load", refuse)
    for text in ("weights.model.layers[0].", 'weights.model["', "maxjax.load('x')."):
        completed(shell, text)


def test_a_list_of_layers_says_what_it_holds_to_type_checkers_only():
    assert nn.LayerList[nn.MLP] is nn.LayerList
    layers = nn.LayerList[nn.MLP]([mlp()])
    assert type(layers) is nn.LayerList and layers == [layers[0]]
    assert "0" not in dir(layers) and not [n for n in dir(layers) if n.startswith("_mx_")]
