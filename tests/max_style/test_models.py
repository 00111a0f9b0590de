"""Whole models in MAX's idiom: eager, under jit, compiled, differentiated; against torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.dtype import DType
from maxjax.engine import InferenceSession
from maxjax.graph import DeviceRef, Graph, TensorType, TensorValue
from tests.max_style import llama, mlp
from tests.models.decoders import drawn, sampled
from tests.oracles.models import OracleModel
from tests.oracles.recorded import recorded, torch


def test_the_documentations_mlp():
    model = mlp.MLP()
    rng = np.random.default_rng(0)
    shapes = {n: [int(d) for d in w.shape] for n, w in model.raw_state_dict().items()}
    values = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
    model.load_state_dict(values)
    x = rng.standard_normal((2, 5)).astype(np.float32)

    def answer():
        t = {n: torch.tensor(v) for n, v in values.items()}
        hidden = (
            torch.nn.functional.silu(torch.tensor(x) @ t["gate.weight"].T)
            + torch.tensor(x) @ t["up.weight"].T
        )
        return (hidden @ t["down.weight"].T).numpy()

    want = recorded(answer)
    graph = Graph(
        "mlp", model, input_types=[TensorType(DType.float32, ["batch", 5], DeviceRef.CPU())]
    )
    compiled = InferenceSession().load(graph, weights_registry=model.state_dict())
    plain = jnp.asarray(x)
    for got in (
        model(plain),
        model(TensorValue(plain)),
        jax.jit(lambda m, x: m(x))(model, x),
        compiled(x)[0],
    ):
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def pair():
    """A random transformers Llama, and ours with its weights."""
    settings = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }  # fmt: skip
    theirs = OracleModel("LlamaForCausalLM", "LlamaConfig", settings, draw=drawn)
    ours = llama.Llama(theirs.config)
    ours.load_state_dict(theirs.tensors)
    return ours, theirs


IDS = np.random.default_rng(0).integers(0, 97, (2, 11))


def run_eager(model, ids):
    return model(TensorValue(jnp.asarray(ids, jnp.int32)))


def run_jit(model, ids):
    return jax.jit(lambda m, x: m(TensorValue(x)))(model, jnp.asarray(ids, jnp.int32))


def run_compiled(model, ids):
    graph = Graph("llama", model, input_types=llama.INPUT_TYPES)
    compiled = InferenceSession().load(graph, weights_registry=model.state_dict())
    compiled.execute(ids[:1, :3])  # another size first: the dimensions are named
    return compiled.execute(ids)[0]


@pytest.mark.parametrize("run", [run_eager, run_jit, run_compiled])
def test_llama_gives_the_logits_of_transformers(pair, run):
    ours, theirs = pair
    got = run(ours, IDS)
    assert isinstance(got, TensorValue)
    np.testing.assert_allclose(got.to_numpy()[..., ::3], theirs.logits(IDS, 3), atol=1e-4)


def test_its_gradient_is_that_of_torch(pair):
    ours, theirs = pair

    def gradients(model):
        (model(torch.tensor(IDS)).logits ** 2).mean().backward()
        return {name: sampled(one.grad.numpy()) for name, one in model.named_parameters()}

    grads = jax.grad(lambda m: (run_eager(m, IDS).value ** 2).mean())(ours)
    want = theirs.ask("gradients of the mean square", gradients)
    for name, weight in grads.raw_state_dict().items():
        np.testing.assert_allclose(sampled(weight.value), want[name], atol=2e-5, err_msg=name)
