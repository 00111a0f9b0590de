"""What each class says of itself, and that no class fails to."""

import importlib
import json
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import maxjax
from maxjax import nn
from maxjax.checkpoint import CheckpointManager
from maxjax.engine.plan.report import Plan
from maxjax.graph import DeviceRef, Graph, Segment, ShardingStrategy, TensorType, Weight
from maxjax.graph.weights import WeightData
from maxjax.kernels import QuantArray
from maxjax.nn.kv_cache.cache import KVCache
from maxjax.rendering.rendered import Rendered
from tests.pages import page_of

CPU = DeviceRef.CPU()


@pytest.fixture(scope="module")
def tiny():
    return maxjax.load("tiny", dtype="float32")


def every(cls):
    yield cls
    for below in cls.__subclasses__():
        yield from every(below)


def test_nothing_that_is_half_made_fails():
    for module in pkgutil.walk_packages(maxjax.__path__, "maxjax."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    classes = [cls for cls in every(Rendered) if cls.__module__.startswith("maxjax.")]
    assert len(classes) > 60
    for cls in classes:
        try:
            half = object.__new__(cls)
        except TypeError:
            continue  # an abstract class
        assert isinstance(repr(half), str) and len(half._repr_html_()) < 30_000, cls


def test_weights_say_what_they_are_and_where():
    w = Weight("w", "float32", (4, "n"), CPU)
    assert (
        repr(w) == "Weight(w, DType.float32, [Dim(4), Dim('n')], cpu:0)"
        and "lazy" in page_of(w).words
    )
    w = Weight("w", "float32", (4, 2), CPU, sharding_strategy=ShardingStrategy.rowwise(2))
    w.value = jnp.ones((4, 2))
    assert repr(w).endswith("cpu:0, loaded)") and repr(w.T) == f"{w!r}.T"
    assert "loaded" in page_of(w).words and "32 bytes" in page_of(w).words
    part = w.shard([CPU, CPU])[1]
    assert (
        repr(part).startswith("Weight(w[1], DType.float32, [Dim(2), Dim(2)]")
        and page_of(part).words
    )
    for f, word in (
        (lambda _: True, "True"),
        (lambda _: "adam", "'adam'"),
        (lambda _: None, "Dim(4)"),
    ):
        mapped = jax.tree.map(f, w)
        assert word in repr(mapped) and page_of(mapped).words
    layers = nn.LayerList(nn.Linear(2, 2, "float32", CPU) for _ in range(3)).stack()
    stack = layers._mx_stacks[0]
    assert (
        repr(stack).startswith("StackedWeight(3 x Weight(")
        and "float32[3, 2, 2]" in page_of(stack).words
    )
    assert "number 1 of 3" in page_of(layers[1].weight).words


def test_packed_weights_name_their_encoding(tiny):
    model = maxjax.quantize(maxjax.load("tiny")[0], "Q8_0").model
    assert "Q8_0 and bfloat16" in repr(model).splitlines()[0]
    page = page_of(model)
    assert "Q8_0[256, 256]" in page.words and "8.5 bits each" in page.words
    packed = QuantArray(np.zeros((3, 2 * 34), np.uint8), "Q8_0")
    assert repr(packed) == "QuantArray(Q8_0, [3, 64])" and "8.5 bits each" in page_of(packed).words
    assert "NoneType" in repr(jax.tree.map(lambda _: None, packed))


def test_checkpoints_are_trees_of_names(tmp_path):
    names = [f"layers.{i}.{part}.weight" for i in range(4) for part in ("a", "b")]
    tensors = {name: np.zeros((2, 3), np.float16) for name in [*names, "a", "a.b", "norm.weight"]}
    safetensors.numpy.save_file(tensors, tmp_path / "m.safetensors")
    with maxjax.load_weights(tmp_path / "m.safetensors") as weights:
        text, page = repr(weights), page_of(weights)
        assert "name='', 11 tensors, 132 bytes, float16)" in text.splitlines()[0]
        assert "layers.{0..3}" in text and "4 × 2 tensors" in text and "norm.weight" in text
        assert "a.weight" in page.words and "float16[2, 3]" in page.words
        assert "1 tensor, 12 bytes, float16[2, 3])" in repr(weights.norm.weight)
        assert "0 tensors" in repr(weights.nothing) and repr(weights.layers[1]).count("\n") == 2
        data = weights.norm.weight.data()
        assert repr(data) == "WeightData(DType.float16, [Dim(2), Dim(3)])"
        assert "not read yet" in page_of(data).words
        assert data.data is not None and "in memory" in page_of(data).words
    assert "closed" in repr(weights) and "closed" in page_of(weights).words
    assert (
        "placeholder"
        in page_of(WeightData(jax.ShapeDtypeStruct((2,), "float32"), "w", "float32", (2,))).words
    )


def test_caches_say_their_sizes(tiny):
    cache = tiny[0].cache(2, 16)
    assert repr(cache) == (
        "KVCache(2 layers, batch 2, capacity 16, 8 KV heads of 32, float32, 128 KiB, on cpu:0)"
    )
    assert (
        "full.keys" in page_of(cache).words and "float32[2, 2, 8, 16, 32]" in page_of(cache).words
    )
    sizes = {"batch": 1, "num_kv_heads": 1, "capacity": 8, "head_dim": 4}
    assert "4 layers, 3 of them with a window of 4" in repr(
        KVCache.empty(1, abstract=True, sliding_layers=3, window=4, **sizes)
    )
    assert "lazy" in repr(KVCache.empty(1, abstract=True, sliding_layers=3, window=4, **sizes))
    assert repr(jax.tree.map(lambda _: "x", cache)) == "KVCache(of str)"
    assert "Slots(2 layers" in repr(cache.full)
    shown = []
    jax.jit(lambda c: shown.append(repr(c)))(cache)
    assert "traced" in shown[0]


def test_strategies_are_the_calls_that_make_them():
    made = [
        ShardingStrategy.rowwise(2), ShardingStrategy.columnwise(3), ShardingStrategy.axiswise(-1, 2),
        ShardingStrategy.replicate(4), ShardingStrategy.stacked_qkv(2, 4, 8), ShardingStrategy.gate_up(2, axis=1),
        ShardingStrategy.head_aware_columnwise(2, 4, 8), ShardingStrategy.tensor_parallel(2),
        ShardingStrategy.segmented(2, 0, [Segment.even(4), Segment.head_aware(2, 3)]),
    ]  # fmt: skip
    scope = {"ShardingStrategy": ShardingStrategy, "Segment": Segment}
    for one in made:
        assert eval(repr(one), scope) == one and page_of(one).words
    assert "<function" in repr(ShardingStrategy(2, lambda w, i, n: w))


def test_programs_say_their_types():
    with Graph("g", input_types=[TensorType("float32", (2, "n"), CPU)]) as graph:
        assert "not finished" in repr(graph)
        graph.output(graph.inputs[0].tensor * 2)
    assert repr(graph) == "Graph g(float32[2, n]) -> float32[2, n], 1 equation, 0 weights"
    assert "mul" in str(graph)
    layer = nn.Linear(3, 2, "float32", CPU)
    program = layer.compile(jax.ShapeDtypeStruct((4, 3), jnp.float32))
    assert repr(program) == "Program Linear(float32[4, 3]) -> float32[4, 2], 1 weight"
    assert "weightfloat32[2, 3]" in page_of(program).words


def test_plans_are_a_line_and_a_page(tiny):
    plan = maxjax.plan(tiny[0], {"model": 4}, hbm="1MB")
    assert isinstance(plan, Plan) and "\n" not in repr(plan) and len(repr(plan)) < 500
    assert repr(plan).startswith(
        "Plan(mesh model=4 (4 devices); 1.43 MiB of weights on each device; of"
    )
    assert "does not fit" in repr(plan) and "largest" in str(plan)
    page = page_of(plan)
    assert "model.layers.*.mlp.up_proj.weight" in page.words and "weights: " in page.words


def test_chats_and_answers(tiny):
    chat = maxjax.Conversation(*tiny, [{"role": "user", "content": "<b>Be brief.</b>"}])
    assert repr(chat) == "Conversation(Llama, 1 message, last: user: '<b>Be brief.</b>')"
    assert "<b>Be brief.</b>" in page_of(chat).words
    answer = maxjax.Completion("<i>four</i>", tokens=(7, 2), finish_reason="stop", stop=2)
    assert repr(answer) == "'<i>four</i>'" and "<i>four</i>" in page_of(answer).words
    assert "2 tokens" in page_of(answer).words and json.dumps(answer) == '"<i>four</i>"'


def test_steps_of_a_run(tmp_path):
    layer = maxjax.init(nn.LayerNorm(4, devices=[None], dtype="float32"), jax.random.key(0))
    with CheckpointManager(tmp_path / "run") as manager:
        assert repr(manager) == f"CheckpointManager('{tmp_path}/run', no steps)"
        response = manager.save_async(3, layer)
        assert "saving" in repr(response) or "saved" in repr(response)
        response.result()
        assert repr(response) == f"Response('{tmp_path}/run/3', saved)"
        manager.save(4, layer)
        assert "2 steps: 3..4" in repr(manager) and "3..4" in page_of(manager).words
