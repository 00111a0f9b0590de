"""Attention to chosen keys, and the indexer that chooses them, in every path under them, against NumPy in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import maxjax
from maxjax.kernels import attention as kernels
from maxjax.models import DeepseekV32, DeepseekV32Config
from maxjax.models.parts import attend, bidirectional, no_cache, sliding, top_keys
from maxjax.models.parts import indexer as module
from tests.models.parts.test_attention import SLOPES, B, D, H, K, T, operands
from tests.models.parts.test_language_model import VOCAB, close, ids_of, made

CONFIG = DeepseekV32Config(
    VOCAB, 16, 24, num_hidden_layers=3, num_attention_heads=4, kv_lora_rank=6, q_lora_rank=5,
    qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=5, n_routed_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=8, n_group=1, topk_group=1, mlp_layer_types=("dense", "sparse", "sparse"),
    index_topk=4, index_n_heads=8, index_head_dim=6,
)  # fmt: skip
run = jax.jit(
    lambda model, ids, cache=None, lengths=None: model(ids, cache, lengths=lengths),
    donate_argnums=2,
)


def reference(q, k, v, chosen, slopes=None, sinks=None):
    """``[B, T, H, D]`` in float64, a query at a time."""
    out, at = np.zeros(q.shape), np.arange(q.shape[1])
    for b, t, h in np.ndindex(*q.shape[:3]):
        sees = (at <= t) & chosen[b, t]
        scores = k[b, sees, h // (H // K)].astype(np.float64) @ q[b, t, h] / np.sqrt(D)
        scores -= 0 if slopes is None else float(slopes[h]) * (t - at[sees])
        sink = -np.inf if sinks is None else float(sinks[h])
        top = max(scores.max(), sink)
        weights = np.exp(scores - top)
        out[b, t, h] = weights / (weights.sum() + np.exp(sink - top)) @ v[b, sees, h // (H // K)]
    return out


def some():
    """Keys chosen at random, each token's own among them."""
    return (np.random.default_rng(1).random((B, T, T)) < 0.3) | np.eye(T, dtype=bool)


@pytest.mark.parametrize("most", [kernels.MOST_SCORES, 5 * B * H * T], ids=["at once", "in blocks"])
def test_only_chosen_keys_are_attended_to(most, monkeypatch):
    monkeypatch.setattr(kernels, "MOST_SCORES", most)
    q, k, v = operands()
    chosen, sinks = some(), np.array([1, -1, 0, 3], np.float32)
    for options in ({}, {"slopes": SLOPES, "sinks": sinks}):
        run = jax.jit(lambda *a, o=options: attend(*a[:3], no_cache(T), chosen=a[3], **o)[0])
        found = run(q, k, v, jnp.asarray(chosen))
        np.testing.assert_allclose(found, reference(q, k, v, chosen, **options), rtol=0, atol=3e-6)
    every, _ = attend(q, k, v, no_cache(T), chosen=jnp.ones((1, T, T), bool))
    np.testing.assert_allclose(every, attend(q, k, v, no_cache(T))[0], rtol=0, atol=3e-6)


def test_gradients_in_blocks_are_those_at_once(monkeypatch):
    q, k, v = operands()
    chosen = jnp.asarray(some())
    loss = lambda q, k, v: jnp.sum(jnp.sin(attend(q, k, v, no_cache(T), chosen=chosen)[0]))
    expected = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    monkeypatch.setattr(kernels, "MOST_SCORES", 5 * B * H * T)
    found = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    for one, other in zip(found, expected, strict=True):
        assert np.abs(other).max() > 0.1
        np.testing.assert_allclose(one, other, rtol=0, atol=3e-6)


@pytest.mark.parametrize("mask", [sliding(3), bidirectional()], ids=["window", "both ways"])
def test_chosen_keys_need_a_causal_mask_without_a_window(mask):
    q, k, v = operands()
    with pytest.raises(ValueError, match="only for a causal mask without a window"):
        attend(q, k, v, no_cache(T), mask, chosen=jnp.asarray(some()))


@pytest.mark.parametrize("most", [module.MOST_SCORES, 5 * B * H * T], ids=["at once", "in blocks"])
def test_the_keys_with_the_highest_scores_are_chosen(most, monkeypatch):
    monkeypatch.setattr(module, "MOST_SCORES", most)
    q, k, v = operands()
    weights, k = np.abs(v[..., 0].repeat(H // K, -1)), k[:, :, 0]
    found = np.asarray(top_keys(q, k, weights, 5, no_cache(T)))
    scores = np.einsum("bthd,bsd->bths", q.astype(np.float64), k)
    scores = np.einsum("bths,bth->bts", np.maximum(scores, 0), weights)
    for b, t in np.ndindex(B, T):
        best = np.argsort(-scores[b, t, : t + 1], kind="stable")[:5]
        assert set(np.flatnonzero(found[b, t, : t + 1])) == set(best)
        assert found[b, t].sum() == 5
    assert top_keys(q, k, weights, T, no_cache(T)) is None


# --- the model -----------------------------------------------------------------------------------


def in_pieces(model, ids, cache, lengths):
    found, start = [], 0
    for length in lengths:
        logits, cache = run(model, ids[:, start : start + length], cache)
        found.append(np.asarray(logits))
        start += length
    return np.concatenate(found, 1), cache


def of(config=CONFIG, mesh=None, **options):
    return made(config, mesh=mesh, model=DeepseekV32, **options)


def test_chunks_and_steps_are_the_text_and_the_indexer_matters():
    model, ids = of(), ids_of(2, 30)
    whole = run(model, ids)
    found, cache = in_pieces(model, ids, model.cache(2, 32), (9, 1, 1, 9, 9, 1))
    close(found, whole)
    every = run(of(dataclasses.replace(CONFIG, index_topk=30)), ids)
    close(every[:, :4], whole[:, :4])  # which have no more keys
    assert np.abs(every - whole)[:, 4:].max() > 0.1
    # Of a cache with room for no more tokens than are chosen, all are attended to.
    small, _ = in_pieces(model, ids[:, :4], model.cache(2, 4), (3, 1))
    close(small, whole[:, :4])
    again, _ = run(model, ids[:, 20:25], cache.rewind([20, 20]).grow(64))
    close(again, whole[:, 20:25])


def test_rows_of_their_own_length():
    model = of()
    ids, lengths = ids_of(3, 7), np.array([7, 3, 0], np.int32)
    more, counts = ids_of(3, 9, seed=1), np.array([2, 9, 3], np.int32)
    cache = run(model, ids, model.cache(3, 24), lengths=lengths)[1]
    again, cache = run(model, more, cache, lengths=counts)
    one, _ = run(model, ids[:, :1], cache, lengths=np.array([1, 0, 1], np.int32))
    for row, (n, m) in enumerate(zip(lengths, counts, strict=True)):
        text = np.concatenate([ids[row, :n], more[row, :m], ids[row, :1]])
        alone = run(model, np.pad(text, (0, 13 - len(text)))[None])[0]
        close(again[row, :m], alone[n : n + m])
        if row != 1:  # which had no token in the last call
            close(one[row, 0], alone[n + m])


MESHES = {
    "sequences": ({"model": 2}, 2),
    "data and sequences": ({"data": 2, "model": 2}, 8),
    "slots": ({"model": 4}, 3),
    "data and slots": ({"data": 2, "model": 2}, 2),
    "query heads that are not split": ({"model": 3}, 3),
    "experts": ({"expert": 2, "model": 2}, 2),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
@pytest.mark.parametrize("where", MESHES)
def test_the_indexer_on_meshes(where, types):
    """In chunks and steps, where each device has some sequences or some slots of both caches."""
    sizes, batch = MESHES[where]
    ids = ids_of(batch, 20)
    whole = run(of(), ids)
    model = of(mesh=maxjax.make_mesh(axis_types=types, **sizes))
    close(run(model, ids), whole)
    # 25 slots are rounded up to 26 or 28.
    found, cache = in_pieces(model, ids, model.cache(batch, 25), (7, 1, 7, 1, 1, 1, 1, 1))
    close(found, whole)
    assert cache.more["index"].keys.sharding == cache.full.keys.sharding


def test_an_int8_cache():
    model, ids = of(), ids_of(2, 20)
    found, cache = in_pieces(model, ids, model.cache(2, 32, "int8"), (9, 1, 9, 1))
    assert cache.more["index"].keys.dtype == jnp.int8 and np.isfinite(found).all()
    # Rounded keys may make the last places of a choice fall otherwise.
    whole = np.asarray(run(model, ids))
    assert np.median(np.abs(found - whole)) < 0.1 * whole.std()


def test_weights_of_keys_that_are_not_chosen_are_0():
    model, ids = of(), ids_of(2, 12)
    found = []
    for cache in ((), (model.cache(2, 12),)):
        with maxjax.capture(model, "layers.*.self_attn:weights") as seen:
            output = model(ids, *cache)
        close(output[0] if cache else output, run(model, ids))
        found.append([np.asarray(seen[f"layers.{i}.self_attn:weights"]) for i in range(3)])
    for without, with_cache in zip(*found, strict=True):
        close(with_cache, without)
        assert ((without > 0).sum(-1) == np.minimum(np.arange(1, 13), 4)).all()


def test_settings_that_are_refused():
    raw = {**CONFIG.to_hf(), "architectures": ["DeepseekV32ForCausalLM"]}
    assert DeepseekV32Config.from_dict(raw) == CONFIG
    assert DeepseekV32Config.from_dict({**raw, "layer_types": ["indexed_attention"] * 3}) == CONFIG
    with pytest.raises(maxjax.errors.UnsupportedModelError, match="full_attention"):
        DeepseekV32Config.from_dict({**raw, "layer_types": ["full_attention"] * 3})
    for key, value in (("q_lora_rank", None), ("index_head_dim", 1), ("index_topk", 0)):
        with pytest.raises(maxjax.errors.CheckpointFormatError, match=f"'{key}'"):
            DeepseekV32Config.from_dict({**raw, key: value})
