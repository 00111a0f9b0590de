"""``isolated``: the functions that run a model do so where the model is, whatever mesh and guard the caller has set."""

import jax
import numpy as np
import pytest

import maxjax
from maxjax.engine.isolation import isolated
from maxjax.models import Llama, LlamaConfig
from tests.fill import filled


def test_the_caller_s_mesh_and_guard_are_not_those_of_a_text():
    caller = jax.make_mesh((4,), ("x",))  # with Explicit axes, which the caller's programs have
    model = Llama(LlamaConfig(32, 8, 16, num_hidden_layers=1, num_attention_heads=2))
    filled(model)
    expected = maxjax.stream(model, None, [1, 2], max_new_tokens=2)
    list(expected)
    with jax.set_mesh(caller), jax.transfer_guard("disallow"):
        pieces = maxjax.stream(model, None, [1, 2], max_new_tokens=2)
        next(pieces, None)
        assert jax.sharding.get_abstract_mesh() == caller.abstract_mesh  # also between two pieces
        assert jax.config.jax_transfer_guard_host_to_device == "disallow"
        list(pieces)
        found = maxjax.look(model.model.norm.weight).statistics
    assert found.mean == pytest.approx(np.mean(model.model.norm.weight.value))
    assert pieces.completion.tokens == expected.completion.tokens


def test_in_a_traced_function_the_mesh_stays():
    @isolated()
    def axes(x: jax.Array) -> jax.Array:
        assert jax.sharding.get_abstract_mesh().axis_names == ("x",)
        return x

    with jax.set_mesh(jax.make_mesh((4,), ("x",))):
        jax.eval_shape(axes, 1.0)


def test_keys_and_sums_beside_a_batch():
    """A Conversation makes its keys, and a merge its sums, where the model is."""
    model, tokenizer = maxjax.load("tiny")
    tuned = maxjax.lora.add(model, rank=2, key=jax.random.key(1))

    def said():
        chat = maxjax.Conversation(model, tokenizer, temperature=1.0, max_new_tokens=2)
        return "".join(chat.say("What is 3 + 4?"))

    expected = said()
    with jax.set_mesh(jax.make_mesh((4,), ("x",))), jax.transfer_guard("disallow"):
        assert said() == expected
        back = maxjax.lora.unmerge(maxjax.lora.merge(tuned, keep=True))
    for name, value in tuned.state_dict().items():
        np.testing.assert_allclose(np.asarray(back.state_dict()[name], np.float32),
                                   np.asarray(value, np.float32), rtol=0, atol=0.1)  # fmt: skip
