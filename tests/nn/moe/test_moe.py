"""MoE against a loop in float64, against transformers' Mixtral, and sorted against one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax import nn
from maxjax.graph import TensorValue
from tests.contracts.references import below, mlp
from tests.nn.layers import CPU, call, filled, random
from tests.oracles.recorded import recorded, torch, transformers

MIXTRAL = functools.partial(nn.MoEGate, shares="softmax of chosen")


def make(num_experts=4, k=2, seed=0, **options):
    options = {"dtype": "float32", "gate_cls": MIXTRAL} | options
    return filled(nn.MoE([CPU], 6, num_experts, k, 8, **options), seed)


def in_float64(x, w, num_experts, k, shared=False):
    out = np.zeros(x.shape)
    for i, token in enumerate(x.astype(np.float64)):
        scores = w["gate.gate_score.weight"] @ token
        chosen = np.argsort(-scores, kind="stable")[:k]
        shares = np.exp(scores[chosen] - scores[chosen].max())
        for expert, share in zip(chosen, shares / shares.sum(), strict=True):
            out[i] += share * mlp(below(w, f"experts.{expert}."), token)
        if shared:
            out[i] += mlp(below(w, "shared_experts."), token)
    return out


@pytest.mark.sampled
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("num_experts", "k"), [(4, 2), (4, 1), (3, 3), (8, 2), (1, 1)])
def test_moe(num_experts, k, shared):
    layer, w = make(num_experts, k, has_shared_experts=shared, shared_experts_dim=5)
    x = random(7, 6)
    y = call(layer, x)
    np.testing.assert_allclose(y, in_float64(x, w, num_experts, k, shared), rtol=1e-5, atol=1e-5)


def test_names_in_max_order():
    layer, w = make(2, 1, has_shared_experts=True, shared_experts_dim=5)
    maps = [f"{n}.weight" for n in ("gate_proj", "down_proj", "up_proj")]
    assert list(w) == [
        "gate.gate_score.weight",
        *(f"{where}.{n}" for where in ("shared_experts", "experts.0", "experts.1") for n in maps),
    ]
    assert layer.gate_up_proj.shape == [2, 16, 6] and layer.down_proj.shape == [2, 6, 8]


class Doubled(nn.MLP):
    """An expert the sorted product knows nothing of."""

    def __call__(self, x):
        return 2.0 * super().__call__(x)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("k", [1, 3])
def test_any_expert_will_do(k):
    layer, w = make(4, k)
    other, _ = make(4, k, mlp_cls=Doubled)
    x = random(9, 6)
    np.testing.assert_allclose(call(other, x), 2 * in_float64(x, w, 4, k), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(call(other, x), 2 * call(layer, x), atol=1e-5)


def test_sorted_and_one_by_one_have_the_same_gradients():
    layer, _ = make(4, 2)
    other, _ = make(4, 2, mlp_cls=type("Other", (nn.MLP,), {}))
    x = jnp.asarray(random(9, 6))
    loss = lambda m, x: jnp.sum(jnp.sin(m(x)))
    ours, theirs = (jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1)))(m, x)) for m in (layer, other))
    assert len(ours) == len(theirs) == 14
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_all_tokens_to_one_expert():
    layer, w = make(4, 1)
    gate = np.zeros((4, 6), np.float32)
    gate[2] = 1.0
    layer.load_state_dict({"gate.gate_score.weight": gate}, strict=False)
    x = np.abs(random(9, 6))
    expected = np.stack([mlp(below(w, "experts.2."), t) for t in x.astype(np.float64)])
    np.testing.assert_allclose(call(layer, x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_token(dtype):
    layer, _ = make(dtype=dtype)
    assert call(layer, jnp.zeros((0, 6), dtype)).shape == (0, 6)


def test_bfloat16():
    layer, w = make(dtype="bfloat16")
    x = jnp.asarray(random(7, 6), jnp.bfloat16)
    found = layer(x)
    assert found.dtype == jnp.bfloat16
    wide = in_float64(np.asarray(x, np.float32), w, 4, 2)
    np.testing.assert_allclose(found.astype(jnp.float32), wide, rtol=0.05, atol=0.05)


def test_the_gate_gives_scores_as_max_does():
    gate, w = filled(nn.MoEGate([CPU], 6, 4, 2, "float32"))
    x = random(5, 6)
    chosen, shares = gate(TensorValue(jnp.asarray(x)))
    assert type(chosen) is TensorValue and type(shares) is TensorValue
    scores = x @ w["gate_score.weight"].T
    np.testing.assert_array_equal(np.asarray(chosen), np.argsort(-scores)[:, :2])
    np.testing.assert_allclose(np.asarray(shares), -np.sort(-scores)[:, :2], rtol=1e-5, atol=1e-5)
    with jax.enable_x64(True):
        assert gate(TensorValue(jnp.asarray(x)))[0].dtype == np.int64


@pytest.mark.parametrize("shares", ["softmax", "softmax of chosen", "sigmoid"])
def test_shares(shares):
    gate, w = filled(nn.MoEGate([CPU], 6, 4, 2, "float32", shares=shares), scale=2.0)
    x = random(5, 6)
    found = np.asarray(gate(jnp.asarray(x))[1])
    scores = x @ w["gate_score.weight"].T
    best = -np.sort(-scores)[:, :2]
    total = {"softmax": scores, "softmax of chosen": best}.get(shares)
    expected = (
        1 / (1 + np.exp(-best))
        if total is None
        else np.exp(best) / np.exp(total).sum(-1, keepdims=True)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_what_is_refused():
    with pytest.raises(ValueError, match="num_experts_per_token is 5.* 4"):
        nn.MoEGate([CPU], 6, 4, 5, "float32")
    with pytest.raises(ValueError, match="softmax of chosen"):
        nn.MoEGate([CPU], 6, 4, 2, "float32", shares="softmaks")
    with pytest.raises(
        ValueError, match="ep_size is 2: it must be the number of devices of ep_batch_manager"
    ):
        nn.MoE([CPU], 6, 4, 2, 8, ep_size=2)
    with pytest.raises(ValueError, match="shared_experts_dim is 0"):
        nn.MoE([CPU], 6, 4, 2, 8, has_shared_experts=True)
    with pytest.raises(NotImplementedError, match="copies of 3"):
        nn.MoE([CPU], 6, 4, 2, 8, num_logical_experts=3)
    with pytest.raises(NotImplementedError, match=r"MoE\(quant_config=….*maxjax\.load"):
        nn.MoE([CPU], 6, 4, 2, 8, quant_config=object())


def test_as_mixtral_has_it():
    layer, w = make(4, 2)
    gate_up = np.stack(
        [np.concatenate([w[f"experts.{i}.{n}_proj.weight"] for n in ("gate", "up")]) for i in range(4)]
    )  # fmt: skip
    down = np.stack([w[f"experts.{i}.down_proj.weight"] for i in range(4)])
    values = {"gate.weight": w["gate.gate_score.weight"], "experts.gate_up_proj": gate_up,
              "experts.down_proj": down}  # fmt: skip
    x = random(2, 5, 6)

    def in_transformers():
        mixtral = transformers.models.mixtral.modeling_mixtral
        config = mixtral.MixtralConfig(
            hidden_size=6, intermediate_size=8, num_local_experts=4, num_experts_per_tok=2
        )
        block = mixtral.MixtralSparseMoeBlock(config).eval()
        block.load_state_dict({n: torch.tensor(v, dtype=torch.float32) for n, v in values.items()})
        with torch.no_grad():
            found = block(torch.tensor(x))
        return (found[0] if isinstance(found, tuple) else found).numpy()

    expected = recorded(in_transformers)
    np.testing.assert_allclose(call(layer, x), expected, rtol=1e-5, atol=1e-5)
