"""Experts dealt whole over a mesh axis: logits and gradients are those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import maxjax
from maxjax.kernels import QuantArray
from maxjax.models import MixtralConfig, Qwen3MoEConfig
from maxjax.models.mixtral import Mixtral
from maxjax.models.qwen3 import Qwen3MoE
from maxjax.nn.moe import experts as module
from maxjax.nn.moe.algorithms import ExpertWeights
from maxjax.nn.moe.experts import ExpertSplit, local_mixture, mixture
from maxjax.storage.blocks import encode
from tests.nn.layers import filled

SIZES = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
}
MESHES = [
    {"expert": 4}, {"expert": 2, "model": 2}, {"expert": 4, "model": 2}, {"data": 2, "expert": 4},
    {"expert": 8}, {"fsdp": 2, "expert": 2, "model": 2}, {"expert": 3}, {"seq": 2, "expert": 2},
]  # fmt: skip


def made(experts=8, stacked=True, kind=Mixtral, **more):
    config, count = (
        (MixtralConfig, "num_local_experts") if kind is Mixtral else (Qwen3MoEConfig, "num_experts")
    )
    sizes = {**SIZES, count: experts, **more}
    model = kind(config(48, 16, 24, **sizes), "float32", stacked=stacked)
    return filled(model, scale=0.2)[0]


def mesh_of(explicit=False, **sizes):
    count = int(np.prod(list(sizes.values())))
    types = (AxisType.Explicit if explicit else AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), types, devices=jax.devices()[:count])


def experts_of(model):
    found = jax.tree_util.tree_leaves_with_path(model)
    return [leaf for path, leaf in found if ".experts." in jax.tree_util.keystr(path, simple=True)]


IDS = np.random.default_rng(0).integers(0, 48, (8, 7)).astype(np.int32)
call = jax.jit(lambda model, ids: model(ids))


@jax.jit
def first(model, ids):
    return model(ids, model.cache(len(ids), 8), last=True)


@jax.jit
def after(model, ids, cache):
    return model(ids, cache, last=True)


def generated(model, ids):
    """Logits of a prompt and of two tokens after it."""
    logits, cache = first(model, ids[:, :5])
    one, cache = after(model, ids[:, 5:6], cache)
    two, _ = after(model, ids[:, 6:7], cache)
    return np.stack([logits, one, two])


def short(sizes):
    return "-".join(f"{name}{size}" for name, size in sizes.items())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sizes", MESHES, ids=short)
@pytest.mark.parametrize("batch", [8, 1])
@pytest.mark.parametrize("explicit", [False, True])
def test_logits_of_a_prompt_and_of_tokens(explicit, batch, sizes):
    model, ids = made(), IDS[:batch]
    expected = call(model, ids)
    steps = np.moveaxis(np.asarray(expected[:, 4:7]), 1, 0)
    model.to(mesh_of(explicit, **sizes))
    np.testing.assert_allclose(call(model, ids), expected, rtol=0, atol=2e-5)
    np.testing.assert_allclose(generated(model, ids), steps, rtol=0, atol=2e-5)


@pytest.mark.extra
def test_what_lies_where():
    model = made().to(mesh_of(expert=4, model=2))
    for leaf in experts_of(model):
        assert leaf.sharding.spec[:2] == (None, "expert") and "model" in leaf.sharding.spec
        assert leaf.addressable_shards[0].data.size == leaf.size // 8
    expert = model.model.layers[1].block_sparse_moe.experts[5]
    np.testing.assert_array_equal(
        expert.w2.weight.value, made().model.layers[1].block_sparse_moe.experts[5].w2.weight.value
    )
    assert {spec[1] for spec in [model.cache(8, 4).keys.sharding.spec]} == {"expert"}
    plan = maxjax.plan(made(), {"expert": 4, "model": 2})
    held = sum(leaf.size * 4 for leaf in experts_of(model)) // 8
    others = [a for a in jax.tree.leaves(model) if not any(a is b for b in experts_of(model))]
    held += sum(a.addressable_shards[0].data.nbytes for a in others)
    assert plan.bytes_per_device == held
    # What does not divide is split inside of every expert, as before.
    for leaf in experts_of(made(experts=6).to(mesh_of(expert=4, model=2))):
        assert leaf.sharding.spec[1] is None and ("expert", "model") in tuple(leaf.sharding.spec)


@pytest.mark.extra
@pytest.mark.parametrize("sizes", [{"expert": 4, "model": 2}, {"fsdp": 2, "expert": 2}], ids=short)
def test_gradients(sizes):
    loss = lambda model, ids: jnp.sum(jnp.sin(model(ids)))
    run = jax.jit(jax.grad(loss))
    expected = run(made(), IDS).raw_state_dict()
    found = run(made().to(mesh_of(**sizes)), IDS)
    assert any("expert" in leaf.sharding.spec for leaf in experts_of(found))
    largest = max(float(jnp.max(jnp.abs(w.value))) for w in expected.values())
    for name, weight in found.raw_state_dict().items():
        np.testing.assert_allclose(
            weight.value, expected[name].value, rtol=0, atol=1e-5 * largest, err_msg=name
        )


@pytest.mark.extra
def test_separate_layers_and_saved_files(tmp_path):
    model = made(stacked=False, kind=Qwen3MoE)
    expected = call(model, IDS)
    model.to(mesh_of(expert=4, model=2))
    np.testing.assert_allclose(call(model, IDS), expected, rtol=0, atol=2e-5)
    model.stack()
    assert all(leaf.sharding.spec[1] == "expert" for leaf in experts_of(model))
    np.testing.assert_allclose(call(model, IDS), expected, rtol=0, atol=2e-5)
    model.unstack()
    values = {n: np.asarray(w.value) for n, w in model.raw_state_dict().items()}
    again = made(kind=Qwen3MoE).to(mesh_of(expert=2))
    again.load_state_dict(values)
    np.testing.assert_allclose(call(again, IDS), expected, rtol=0, atol=2e-5)
    maxjax.checkpoint.save(tmp_path / "step", model)
    restored = made(kind=Qwen3MoE).to(mesh_of(expert=8))
    maxjax.checkpoint.restore(tmp_path / "step", restored)
    assert all(leaf.sharding.spec[1] == "expert" for leaf in experts_of(restored))
    same = {n: np.asarray(w.value) for n, w in restored.raw_state_dict().items()}
    assert all(np.array_equal(same[name], value) for name, value in values.items())


def weights_of(count, e=32, f=64, seed=0):
    rng = np.random.default_rng(seed)
    make = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return ExpertWeights(make(count, f, e), make(count, f, e), make(count, e, f))


def tokens_of(n, count, k, e=32, seed=1):
    rng = np.random.default_rng(seed)
    chosen = np.stack([rng.permutation(count)[:k] for _ in range(n)]).astype(np.int32)
    return (
        rng.normal(size=(n, e)).astype(np.float32),
        chosen,
        rng.uniform(size=(n, k)).astype(np.float32),
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("n", [3, 16])
def test_packed_experts_and_numbers_that_do_not_divide(n, packed):
    given, experts = tokens_of(n, 4, 2), weights_of(4)
    if packed:
        experts = ExpertWeights(*(QuantArray(encode("Q8_0", w), "Q8_0") for w in experts.matrices))
    expected = mixture(*given, experts, "silu")
    mesh, split = mesh_of(expert=2, model=2), ExpertSplit(("model",), ("expert",))
    run = jax.jit(lambda *a: module.mixture_on_mesh(*a, "silu", mesh, split))
    np.testing.assert_allclose(run(*given, experts), expected, rtol=1e-4, atol=1e-3)


def test_biases_are_added_once():
    given, experts = tokens_of(3, 4, 2), weights_of(4)
    rng = np.random.default_rng(7)
    sizes = ((4, 64), (4, 64), (4, 32))
    biases = tuple(rng.normal(size=size).astype(np.float32) for size in sizes)
    experts = experts._replace(biases=biases)
    expected = mixture(*given, experts, "silu")
    mesh, split = mesh_of(expert=2, model=2), ExpertSplit(("model",), ("expert",))
    run = jax.jit(lambda *a: module.mixture_on_mesh(*a, "silu", mesh, split))
    np.testing.assert_allclose(run(*given, experts), expected, rtol=1e-4, atol=1e-3)


def test_many_tokens_are_taken_in_parts(monkeypatch):
    monkeypatch.setattr(module, "_MOST_ROWS", 24)
    given, experts = tokens_of(22, 4, 2), weights_of(4)
    mesh, split = mesh_of(expert=2), ExpertSplit((), ("expert",))
    run = jax.jit(lambda *a: module.mixture_on_mesh(*a, "silu", mesh, split))
    expected = mixture(*given, experts, "silu")
    np.testing.assert_allclose(run(*given, experts), expected, rtol=1e-4, atol=1e-3)
    text = run.lower(*given, experts).as_text()
    assert "while" in text and "22x2x32" not in text


def test_vmap_on_a_mesh():
    given = [np.stack([a, a[::-1]]) for a in tokens_of(4, 4, 2)]
    experts, mesh = weights_of(4), mesh_of(expert=2, model=2)
    split, place = ExpertSplit(("model",), ("expert",)), NamedSharding(mesh, P())
    run = lambda *a: module.mixture_on_mesh(*a, experts, "silu", mesh, split)
    found = jax.jit(jax.vmap(run))(*(jax.device_put(a, place) for a in given))
    for i in range(2):
        expected = mixture(*(a[i] for a in given), experts, "silu")
        np.testing.assert_allclose(found[i], expected, rtol=1e-4, atol=1e-3)


def test_a_device_alone_reads_no_experts_of_others():
    """Experts of others would give NaN, and so would rows that belong to none."""
    x, chosen, shares = tokens_of(6, 4, 2)
    whole = weights_of(4)
    mesh = mesh_of(expert=2)

    def local(x, chosen, shares, experts):
        y = local_mixture(x, chosen, shares, experts, "silu", ExpertSplit((), ("expert",)), ())
        return y

    places = (P(), P(), P(), ExpertWeights(P("expert"), P("expert"), P("expert")))
    run = jax.shard_map(local, mesh=mesh, in_specs=places, out_specs=P())
    expected = mixture(x, chosen, shares, whole, "silu")
    np.testing.assert_allclose(
        jax.jit(run)(x, chosen, shares, whole), expected, rtol=1e-4, atol=1e-3
    )
