"""What an editor shows for common calls: checked by pyright, never run."""

from typing import Any, assert_type

import jax

import maxjax
from maxjax.models import Llama, PretrainedModel


def loaded() -> None:
    model, tokenizer = maxjax.load("tiny")
    assert_type(model, PretrainedModel)
    assert_type(maxjax.generate(model, tokenizer, "text"), maxjax.Completion)
    assert_type(maxjax.generate(model, tokenizer, ["text"]), list[maxjax.Completion])


def own(model: Llama, mesh: jax.sharding.Mesh, ids: Any, cache: maxjax.nn.KVCache) -> None:
    assert_type(model.to(mesh), Llama)
    assert_type(model.unstack(), Llama)
    assert_type(maxjax.init(model, jax.random.key(0)), Llama)
    assert_type(maxjax.lora.add(model), Llama)
    assert_type(model(ids), jax.Array)
    assert_type(model(ids, cache), tuple[jax.Array, maxjax.nn.KVCache])


def layers() -> None:
    assert_type(maxjax.nn.Linear(3, 2, bias=True), maxjax.nn.Linear)
    assert_type(maxjax.nn.MLP(hidden_dim=3, feed_forward_length=8, bias=True), maxjax.nn.MLP)
    assert_type(maxjax.nn.LayerNorm(3, bias=False), maxjax.nn.LayerNorm)
