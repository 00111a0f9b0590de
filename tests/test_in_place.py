"""Which calls change the model that they are given: their docstrings say so in the first line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxjax
from maxjax import checkpoint, lora, nn
from maxjax.interop import trees
from maxjax.models import LanguageModel
from maxjax.models.llama import Llama, LlamaConfig

pytestmark = pytest.mark.usefixtures("few_objects")

CONFIG = LlamaConfig(32, 32, 32, num_hidden_layers=2, num_attention_heads=2)


def arrays(model):
    return {name: np.asarray(value) for name, value in model.state_dict().items()}


def saved(model):
    checkpoint.save("run", model)
    return "run"


# The function that has the docstring, and a call of it with a model.
IN_PLACE = {
    "to": (nn.Module.to, lambda m: m.to(maxjax.make_mesh(model=2))),
    "init": (maxjax.init, lambda m: maxjax.init(m, jax.random.key(1))),
    "load_state_dict": (nn.Module.load_state_dict, lambda m: m.load_state_dict(arrays(m))),
    "restore": (checkpoint.restore, lambda m: checkpoint.restore(saved(m), m)),
    "stack": (LanguageModel.stack, lambda m: m.unstack().stack()),
    "unstack": (LanguageModel.unstack, lambda m: m.unstack()),
    "free": (maxjax.free, lambda m: maxjax.free(m)),
    "from_torch": (maxjax.from_torch, lambda m: maxjax.from_torch(arrays(m), m)),
}
NEW = {
    "quantize": (maxjax.quantize, lambda m: maxjax.quantize(m, "q8_0")),
    "replace": (
        maxjax.replace,
        lambda m: maxjax.replace(m, {"model.norm.weight": jnp.zeros(32)}),
    ),
    "partition": (maxjax.partition, lambda m: maxjax.partition(m, "*norm*")),
    "merge": (maxjax.merge, lambda m: maxjax.merge(*maxjax.partition(m, "*norm*"))),
    "lora.add": (lora.add, lambda m: lora.add(m, rank=2, key=jax.random.key(1))),
    "lora.merge": (
        lora.merge,
        lambda m: lora.merge(lora.add(m, rank=2, key=jax.random.key(1))),
    ),
    "trees.load": (trees.load, lambda m: trees.load(m, trees.tensors(m))),
}


@pytest.fixture
def model():
    return maxjax.init(Llama(CONFIG, "float32"), jax.random.key(0))


@pytest.mark.parametrize("name", [*IN_PLACE, *NEW])
def test_the_first_line_says_whether_the_model_changes(name, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    function, call = (IN_PLACE | NEW)[name]
    first = (function.__doc__ or "").strip().split("\n\n")[0]
    if name == "init":  # which gives values to placeholders only
        model = Llama(CONFIG, "float32")
    before, structure = jax.tree.leaves(model), jax.tree.structure(model)
    call(model)
    after = jax.tree.leaves(model)
    changed = jax.tree.structure(model) != structure or any(
        a is not b for a, b in zip(before, after, strict=True)
    )
    assert changed == (name in IN_PLACE)
    assert ("in place" in first) == changed, first
    assert changed or " new " in first or "Returns a pytree" in first, first
