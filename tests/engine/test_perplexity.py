"""perplexity() beside the loop of Hugging Face's page, with transformers' models on torch."""

import json
import math
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from jax.sharding import AxisType

import maxjax
from maxjax.engine import token_losses as module
from maxjax.engine.perplexity import Window, perplexity, windows
from maxjax.errors import UserInputError
from maxjax.models import Llama, LlamaConfig
from scripts.tiny_text import stories
from tests.fill import filled
from tests.models.decoders import VOCAB, ids_of, one_character_each, oracle, ours
from tests.oracles.models import ask_of, opened
from tests.oracles.recorded import torch

TINY = Path(str(files("maxjax"))) / "tiny"
KINDS = {
    "Llama": {},
    "Gemma2": {"head_dim": 16, "sliding_window": 8, "final_logit_softcapping": 2.0},
    "GPT2": {},
}


def text_of(length, seed=0):
    return "".join(chr(33 + i) for i in ids_of(1, length, seed)[0])


def losses_of(model, ids, context, stride, start=None):
    """The losses of all tokens that the loop of Hugging Face's page scores, in float64."""
    found, before = [], 0
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        row = np.array(ids[begin:end])
        if start is not None:
            row[0] = start
        with torch.no_grad():
            logits = model(torch.tensor(row[None]).long()).logits[0].double()
        scores = torch.log_softmax(logits, -1)[torch.arange(len(row) - 1), torch.tensor(row[1:])]
        scored = min(end - before, end - begin - 1)  # the first token has nothing before it
        found += [-scores[len(row) - 1 - scored :].numpy()]
        before = end
        if end == len(ids):
            break
    return np.concatenate(found)


def same(found, losses):
    n = len(losses)
    assert found.tokens == n
    np.testing.assert_allclose(math.log(found.perplexity), np.mean(losses), rtol=0, atol=2e-5)
    error = np.exp(np.mean(losses)) * np.std(losses, ddof=1) / np.sqrt(n)
    np.testing.assert_allclose(found.standard_error, error, rtol=1e-3)


# --- against transformers -------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("context", "stride"), [(32, 16), (24, 24), (17, 5)])
def test_as_the_loop_of_hugging_face(tmp_path, kind, context, stride):
    theirs, tokenizer = oracle(kind, tmp_path, **KINDS[kind]), one_character_each()
    text = text_of(101)
    ids = tokenizer.encode(text)
    asked = f"losses of 101 tokens, context {context}, stride {stride}"
    expected = theirs.ask(asked, lambda model: losses_of(model, ids, context, stride))
    found = perplexity(ours(tmp_path), tokenizer, text, context=context, stride=stride)
    same(found, expected)
    bits = np.mean(expected) / np.log(2) * 101 / len(text.encode())
    np.testing.assert_allclose(found.bits_per_byte, bits, rtol=1e-4)


def test_of_the_tiny_model_as_transformers(tiny):
    model, tokenizer = tiny
    text = stories(0, 20)
    ids = tokenizer.encode(text)
    expected = ask_of(
        TINY,
        "losses of 20 stories, context 256, stride 128",
        lambda: losses_of(opened("LlamaForCausalLM", TINY), ids, 256, 128),
    )
    assert len(ids) > 600
    found = perplexity(model, tokenizer, text)
    same(found, expected)
    assert (found.context, found.stride) == (256, 128)
    bits = np.mean(expected) / np.log(2) * len(ids) / len(text.encode())
    np.testing.assert_allclose(found.bits_per_byte, bits, rtol=1e-4)


def test_every_window_begins_with_the_special_token(tmp_path):
    theirs, tokenizer = oracle("Llama", tmp_path), one_character_each()
    begin = tokenizers.processors.TemplateProcessing(single="! $A", special_tokens=[("!", 0)])
    tokenizer._backend.post_processor = begin
    ids = tokenizer.encode(text_of(60))
    assert ids[0] == 0 and len(ids) == 61
    expected = theirs.ask(
        "losses of 61 tokens, context 16, stride 8, each window after 0",
        lambda model: losses_of(model, ids, 16, 8, start=0),
    )
    found = perplexity(ours(tmp_path), tokenizer, text_of(60), context=16)
    same(found, expected)
    # The special token is no text.
    bits = np.mean(expected) / np.log(2) * 60 / len(text_of(60).encode())
    np.testing.assert_allclose(found.bits_per_byte, bits, rtol=1e-4)


# --- windows, batches, chunks ---------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 3, 9, 16, 17, 40])
@pytest.mark.parametrize(("context", "stride"), [(2, 1), (8, 8), (8, 3), (9, 4), (40, 1)])
def test_windows_score_each_token_once(length, context, stride):
    found = windows(length, context, stride)
    scored = [i for window in found for i in range(window.first, window.end)]
    left_out = {w.begin for w in found} | {length - 1} if stride == context else {0}
    assert sorted(set(range(length)) - set(scored)) == sorted(left_out - set(scored))
    assert len(scored) == len(set(scored)) > 0
    for window in found:
        assert window.begin < window.first < window.end <= window.begin + context
        # At least as many tokens before it as the docstring says.
        assert window.begin == 0 or window.first - window.begin >= max(context - stride, 1)
    if stride < context:
        assert len(scored) == length - 1


def test_one_window_of_a_short_text():
    assert windows(5, 8, 4) == [Window(0, 1, 5)]


def test_batches_and_chunks_of_logits_change_nothing(small, monkeypatch):
    model, tokenizer = small
    text = text_of(53)
    expected = perplexity(model, tokenizer, text, context=16, stride=5, batch_size=100)
    assert expected.windows == 9
    for batch_size, size in [(1, 1), (2, 4 * 2 * VOCAB * 3)]:
        monkeypatch.setattr(module, "_LOGITS", size)
        found = perplexity(model, tokenizer, text, context=16, stride=5, batch_size=batch_size)
        np.testing.assert_allclose(found.perplexity, expected.perplexity, rtol=1e-6)
        assert found.tokens == expected.tokens == 52


def test_logits_are_never_whole(small, monkeypatch):
    model, _ = small
    monkeypatch.setattr(module, "_LOGITS", 4 * 2 * VOCAB * 4)
    assert module.chunk_of(2, 16, VOCAB) == 4
    ids, counts = jnp.zeros((2, 16), jnp.int32), jnp.full(2, 16, jnp.int32)
    program = module.losses_of.lower(model, ids, ids, counts, chunk=4, gathered=None).as_text()
    assert f"tensor<2x4x{VOCAB}xf32>" in program
    assert f"tensor<2x16x{VOCAB}xf32>" not in program


def test_one_program_for_all_windows(small):
    model, tokenizer = small
    program: Any = module.losses_of
    program.clear_cache()  # programs of earlier tests could leave JAX's cache while this one counts
    perplexity(model, tokenizer, text_of(61), context=14, stride=6, batch_size=4)
    assert program._cache_size() == 1
    perplexity(model, tokenizer, text_of(200), context=14, stride=3, batch_size=4)
    assert program._cache_size() == 1


TYPES_AND_AXES = [
    ({"model": 2}, AxisType.Auto), ({"fsdp": 4}, AxisType.Auto),
    ({"data": 2, "model": 2}, AxisType.Auto), ({"data": 2, "model": 2}, AxisType.Explicit),
]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("axes", "axis_types"), TYPES_AND_AXES)
def test_on_meshes_as_on_one_device(small, axes, axis_types):
    model, tokenizer = small
    text = text_of(90)
    expected = perplexity(model, tokenizer, text, context=16, batch_size=4)
    mesh = maxjax.make_mesh(axis_types=axis_types, **axes)
    placed = filled(Llama(model.config).to(mesh))
    found = perplexity(placed, tokenizer, text, context=16, batch_size=4)
    assert found.tokens == expected.tokens
    np.testing.assert_allclose(found.perplexity, expected.perplexity, rtol=1e-5)


def test_the_shortest_text(small):
    model, tokenizer = small
    found = perplexity(model, tokenizer, "ab")
    assert (found.tokens, found.windows) == (1, 1)
    assert math.isnan(found.standard_error) and found.perplexity > 1


def test_what_it_prints(small):
    model, tokenizer = small
    found = perplexity(model, tokenizer, text_of(40))
    assert str(found) == (
        f"perplexity {found.perplexity:.4f} ± {found.standard_error:.4f} over 39 tokens, "
        f"{found.bits_per_byte:.4f} bits per byte"
    )


# --- bad input ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("", {}, "the text is empty"),
        ("a", {}, "the text has 1 token: perplexity needs at least 2"),
        ("a\ud800", {}, "the text"),
        ("abc", {"context": 65}, "context=65 is larger than the model's context of 64 tokens"),
        ("abc", {"context": 1}, "context is 1: it must be an integer of at least 2"),
        ("abc", {"context": 2.0}, "context is 2.0"),
        ("abc", {"context": True}, "context is True"),
        ("abc", {"stride": 0}, "stride is 0: it must be an integer from 1 to 64"),
        ("abc", {"context": 8, "stride": 9}, "stride is 9: it must be an integer from 1 to"),
        ("abc", {"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_bad_input(small, text, options, says):
    model, tokenizer = small
    with pytest.raises(UserInputError, match=says):
        perplexity(model, tokenizer, text, **options)


def test_bad_models(small):
    model, tokenizer = small
    with pytest.raises(TypeError, match="text is a list"):
        perplexity(model, tokenizer, ["a"])  # type: ignore[arg-type]
    with pytest.raises(UserInputError, match="needs a tokenizer"):
        perplexity(model, None, "abc")
    with pytest.raises(UserInputError, match="not loaded"):
        perplexity(Llama(model.config), tokenizer, "abc")
    with pytest.raises(UserInputError, match="Linear is not a language model"):
        perplexity(maxjax.nn.Linear(2, 2, "float32", maxjax.DeviceRef.CPU()), tokenizer, "abc")
    few = LlamaConfig(VOCAB // 2, 16, 24, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(UserInputError, match="belongs to another model"):
        perplexity(filled(Llama(few)), tokenizer, "ab\x80")


def test_nan_is_an_error(small):
    _, tokenizer = small
    model = jax.tree.map(lambda leaf: leaf, small[0])
    weight = model.raw_state_dict()["model.norm.weight"]
    values = np.array(weight.value)
    values[0] = np.nan
    weight.value = jnp.asarray(values)
    with pytest.raises(FloatingPointError, match="first_nan"):
        perplexity(model, tokenizer, "abc")


# --- the command ----------------------------------------------------------------------------


def test_the_command(tmp_path, capsys):
    from maxjax.cli.application import main

    text = stories(0, 2)
    (tmp_path / "text").write_text(text)
    run = lambda *more: main(["eval", "--text", str(tmp_path / "text"), *more])
    expected = perplexity(*maxjax.load(TINY), text, context=64, stride=16, batch_size=3)
    options = ["--context", "64", "--stride", "16", "--batch", "3"]
    assert run(*options) == 0
    assert capsys.readouterr().out == f"{expected}\n"
    assert run(*options, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["perplexity"] == expected.perplexity and found["windows"] == expected.windows
    assert found["model"] == "tiny"
    maxjax.checkpoint.convert(TINY, tmp_path / "model.gguf", quantize="q8_0")
    for activations in ("int8", "float"):  # which differ in the last digits where there are kernels
        model, tokenizer = maxjax.load(tmp_path / "model.gguf", activations=activations)
        expected = perplexity(model, tokenizer, text)
        given = ("--model", str(tmp_path / "model.gguf"), "--activations", activations, "--json")
        assert run(*given) == 0
        assert json.loads(capsys.readouterr().out)["perplexity"] == expected.perplexity
    (tmp_path / "text").write_bytes(b"ab\xff")
    assert run() == 1
    assert "is not valid UTF-8, at byte 2" in capsys.readouterr().err
    (tmp_path / "text").write_text("")
    assert run() == 1
    assert capsys.readouterr().err == "maxjax: the text is empty: there is nothing to predict\n"
    with pytest.raises(SystemExit):
        run("--context", "8", "--stride", "9")
    assert "--stride 9 is more than --context 8" in capsys.readouterr().err
