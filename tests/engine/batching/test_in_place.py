"""Which models' pages are read where they lie, on devices that this machine does not have; and what follows of it."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

import maxjax
from maxjax.engine.batching import memory, reading
from maxjax.engine.batching.calls import Calls
from maxjax.engine.batching.in_place import why_copied
from maxjax.models import Bloom, BloomConfig, Llama, LlamaConfig
from tests.models.families.cases import every, first_of_each_family

TPU = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite", num_cores=1)
GPU = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", core_count=132)
ROCM = SimpleNamespace(platform="gpu", device_kind="AMD Instinct MI300X", core_count=304)
CHUNKED = ("llama4_text-1", "deepseek_v32-yarn")


@pytest.fixture(scope="module")
def model():
    config = LlamaConfig(
        96, 32, 48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    return maxjax.init(Llama(config), jax.random.key(0))


def test_a_llama_on_devices_with_kernels(model, monkeypatch):
    assert why_copied(model, 4, 64, 8, device=GPU) == ""
    assert "no kernel for a AMD" in why_copied(model, 4, 64, 8, device=ROCM)
    assert "pages are [64, 8]" in why_copied(model, 4, 64, 8, device=TPU)
    monkeypatch.setattr(memory, "_PAGE_SIZE", 128)
    assert why_copied(model, 4, 64, 8, "int8", device=TPU) == ""
    assert "131,072" in why_copied(model, 4, 512, 512, device=TPU)


def test_heads_of_a_device(monkeypatch):
    """Pages of many heads, on one device and divided between eight."""
    monkeypatch.setattr(memory, "_PAGE_SIZE", 128)
    config = LlamaConfig(
        96,
        32,
        48,
        num_hidden_layers=1,
        num_attention_heads=64,
        num_key_value_heads=64,
        head_dim=128,
    )
    model = maxjax.init(Llama(config), jax.random.key(0))
    assert why_copied(model, 4, 64, 8, device=TPU) == ""
    assert why_copied(model.to(maxjax.make_mesh(model=8)), 4, 64, 8, device=TPU) == ""


def test_what_kernels_do_not_support():
    model = maxjax.init(Bloom(BloomConfig(96, 32, n_layer=2, n_head=4)), jax.random.key(0))
    assert "bias of the distance" in why_copied(model, 4, 64, 8, device=GPU)


@pytest.mark.parametrize("name", CHUNKED)
def test_layers_that_read_all_pages(name, tmp_path):
    case = next(p.values[0] for p in first_of_each_family(every()) if str(p.values[0]) == name)
    case.model(tmp_path)
    model, _ = maxjax.load(tmp_path, tokenizer=False)
    assert why_copied(model, 4, 64, 8, device=GPU) == "layers read all pages of a text"


def test_short_prompts_are_read_together_where_it_pays(model, monkeypatch):
    """As on a GPU: a prompt alone, and a long one, is read by itself."""
    prompts = [(np.arange(n) % 95).tolist() for n in (5, 9, 3, 200)]
    options = {"max_new_tokens": 4, "eos_ids": (), "chunk": 512}
    expected = [text.tokens for text in maxjax.generate(model, None, prompts, **options)]
    monkeypatch.setattr("maxjax.engine.batching.calls.platform_of_arrays", lambda tree: "gpu")
    monkeypatch.setattr("maxjax.engine.batching.calls.why_copied", lambda *_: "")
    monkeypatch.setattr(Calls, "weight_bytes", property(lambda self: 1000 * self.token_bytes))
    joined, pieces = [], []
    read_tokens, read_pieces = reading._read_tokens, reading._read_pieces
    monkeypatch.setattr(
        reading,
        "_read_tokens",
        lambda calls, p: joined.append([n for _, n in p]) or read_tokens(calls, p),
    )
    monkeypatch.setattr(
        reading,
        "_read_pieces",
        lambda calls, p, *more: pieces.extend(n for _, n in p) or read_pieces(calls, p, *more),
    )
    found = maxjax.generate(model, None, prompts, **options)
    assert [text.tokens for text in found] == expected
    assert (joined, pieces) == ([[5, 9, 3]], [200])
    assert maxjax.generate(model, None, prompts[0], **options).tokens == expected[0]
    assert joined[1:] == [] and pieces[1:] == [5]
