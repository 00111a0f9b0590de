"""Qwen 2 and 3 against transformers: small random models in its files, read by us."""

import jax
import numpy as np
import pytest

from maxjax.errors import CheckpointFormatError, UnsupportedModelError, UserInputError
from maxjax.models import MixtralConfig, Qwen2Config, Qwen3Config
from tests.models import decoders
from tests.models.decoders import HEADS, call, greedy, ids_of, logits_of, oracle, ours, same
from tests.oracles.models import settings_of

LENGTH = 24
KINDS = pytest.mark.parametrize("kind", ["Qwen2", "Qwen3"])
# transformers' Qwen 3 has heads of 128 unless it is told otherwise.
WIDTH = {"Qwen2": {}, "Qwen3": {"head_dim": 16}}
WINDOWS = {
    "last layers": {"max_window_layers": 1},
    "no layer": {"max_window_layers": 3},
    "listed": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}


@pytest.mark.parametrize("kind, heads, tied", [("Qwen2", "gqa", False), ("Qwen3", "mqa", True)])
def test_logits(tmp_path, kind, heads, tied):
    settings = {"num_key_value_heads": HEADS[heads], "tie_word_embeddings": tied, **WIDTH[kind]}
    model, ids = oracle(kind, tmp_path, **settings), ids_of(2, LENGTH)
    same(call(ours(tmp_path), ids), logits_of(model, ids))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["Qwen3", "Qwen2"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("devices", [4, 1])
def test_logits_stacked_and_placed(tmp_path, kind, heads, tied, stacked, devices):
    settings = {"num_key_value_heads": HEADS[heads], "tie_word_embeddings": tied, **WIDTH[kind]}
    model, ids = oracle(kind, tmp_path, **settings), ids_of(2, LENGTH)
    mine = ours(tmp_path, stacked=stacked, devices=devices)
    same(call(mine, ids), logits_of(model, ids))
    prompts = [ids[0], ids[1, :9]]
    np.testing.assert_array_equal(greedy(mine, prompts, 12), decoders.generated(model, prompts, 12))


@pytest.mark.sampled(1)
@KINDS
@pytest.mark.parametrize("windows", WINDOWS)
def test_windows_of_some_layers(tmp_path, kind, windows):
    settings = {"use_sliding_window": True, "sliding_window": 5, **WINDOWS[windows], **WIDTH[kind]}
    model, ids = oracle(kind, tmp_path, **settings), ids_of(2, LENGTH)
    mine = ours(tmp_path)
    same(call(mine, ids), logits_of(model, ids))
    found = [mine.config.window(i) is not None for i in range(3)]
    assert found == [kind[0] == "s" for kind in model.config.layer_types]
    if windows == "listed":
        prompts = [ids[0, :11], ids[1, :3]]
        found = greedy(mine, prompts, 16, 4)
        np.testing.assert_array_equal(found, decoders.generated(model, prompts, 16))


@pytest.mark.extra
@pytest.mark.sampled(1)
@KINDS
def test_64_tokens_of_rows_of_different_length(tmp_path, kind):
    model, ids = oracle(kind, tmp_path, **WIDTH[kind]), ids_of(3, 13)
    prompts = [ids[0], ids[1, :4], ids[2, :1]]
    found = greedy(ours(tmp_path), prompts, 64, 5)
    np.testing.assert_array_equal(found, decoders.generated(model, prompts, 64))


@pytest.mark.extra
@KINDS
def test_gguf_of_the_same_weights(tmp_path, kind):
    from maxjax.checkpoint import convert

    oracle(kind, tmp_path / "hf", **WIDTH[kind])
    convert(tmp_path / "hf", tmp_path / "x.gguf")
    ids = ids_of(2, LENGTH)
    found, expected = (call(ours(tmp_path / path), ids) for path in ("x.gguf", "hf"))
    np.testing.assert_array_equal(found, expected)


@KINDS
def test_names_are_those_of_the_checkpoint(tmp_path, kind):
    model = oracle(kind, tmp_path, **WIDTH[kind])
    assert {name: a.shape for name, a in ours(tmp_path).state_dict().items()} == model.shapes


RAW = {
    "vocab_size": 9, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 32,
}  # fmt: skip


def test_defaults_are_those_of_transformers():
    for kind, more in [
        ("Qwen2", {}),
        ("Qwen3", {}),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
        ("Qwen3", {"use_sliding_window": True, "max_window_layers": 0}),
    ]:
        mine = {"Qwen2": Qwen2Config, "Qwen3": Qwen3Config}[kind].from_dict({**RAW, **more})
        other = settings_of(f"{kind}Config", {**RAW, **more})
        assert mine.num_key_value_heads == other.num_key_value_heads
        assert mine.max_position_embeddings == other.max_position_embeddings
        assert mine.sliding_window == other.sliding_window
        assert mine.head_dim == getattr(other, "head_dim", 2)
        windows = [mine.window(i) is not None for i in range(mine.num_hidden_layers)]
        assert windows == [name == "sliding_attention" for name in other.layer_types]


def test_what_the_code_of_a_family_has_a_file_cannot_change():
    found = Qwen2Config.from_dict({**RAW, "attention_bias": False, "mlp_bias": True})
    biases = found.attention_bias, found.attention_out_bias, found.mlp_bias
    assert biases == (True, False, False)
    assert not Qwen3Config.from_dict(RAW).attention_bias


@pytest.mark.parametrize(
    ("settings", "error", "name"),
    [
        ({"layer_types": ["linear_attention"] * 2}, UnsupportedModelError, "linear_attention"),
        ({"layer_types": "full"}, CheckpointFormatError, "layer_types"),
        ({"layer_types": ["full_attention"]}, CheckpointFormatError, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 2}, CheckpointFormatError, "sliding_window"),
        (
            {"use_sliding_window": True, "sliding_window": "4", "max_window_layers": 0},
            CheckpointFormatError,
            "sliding_window",
        ),
        ({"num_hidden_layers": "2"}, CheckpointFormatError, "num_hidden_layers"),
        (
            {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": "1"},
            CheckpointFormatError,
            "max_window_layers",
        ),
    ],
)
def test_what_is_refused_is_named(settings, error, name):
    with pytest.raises(error, match=name):
        Qwen2Config.from_dict({**RAW, **settings})


def test_attention_both_ways_for_embeddings(tmp_path):
    """``is_causal: false``, as in gte-Qwen2."""
    oracle("Qwen2", tmp_path)
    decoders.change_config(tmp_path, is_causal=False)
    model = ours(tmp_path)
    ids = np.repeat(ids_of(1, 9), 3, 0)
    ids[1, 5] = ids[0, 5] % 90 + 1  # the last token
    ids[2, 6:] = 7  # behind the end
    found = np.asarray(jax.jit(lambda m, ids: m.states(ids, lengths=np.array([6] * 3)))(model, ids))
    assert (np.abs(found[0] - found[1])[:6].max(-1) > 1e-3).all()
    np.testing.assert_allclose(found[2, :6], found[0, :6], atol=1e-5)
    with pytest.raises(UserInputError, match="'is_causal' is false.*maxjax.embed"):
        model(ids, model.cache(3, 16))
    settings = MixtralConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
    ).to_hf()
    with pytest.raises(
        UnsupportedModelError, match="'is_causal' false is not supported for mixtral"
    ):
        MixtralConfig.from_dict(settings | {"is_causal": False})
