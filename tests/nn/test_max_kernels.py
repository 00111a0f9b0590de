"""MAX's kernels for norms, grids, routers and hyper-connections, against NumPy and torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxjax
from maxjax.dtype import DType
from maxjax.graph import DeviceRef, ShardingStrategy, TensorValue
from maxjax.nn import kernels
from maxjax.nn.hyper_connection import HyperConnection
from maxjax.nn.moe import SigmoidTopKRouter
from maxjax.nn.state_space import gated_group_rmsnorm

RNG = np.random.default_rng(5)
CPU = DeviceRef.CPU()


def draw(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def close(found, wanted, **how):
    np.testing.assert_allclose(np.asarray(found), wanted, **({"rtol": 2e-5, "atol": 1e-6} | how))


def rms(x, epsilon):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)


def test_norms_of_rows():
    q, k, of_q, of_k = draw(5, 8), draw(5, 4), draw(8), draw(4)
    means = kernels.row_mean_of_squares_qk(q, k)
    close(means, np.stack([(q**2).mean(-1), (k**2).mean(-1)], -1))
    found = kernels.apply_qk_rms_norm(q, k, means, of_q, of_k, 1e-3)
    close(found[0], rms(q, 1e-3) * of_q)
    close(found[1], rms(k, 1e-3) * of_k)
    close(
        kernels.mtp_eh_norm(q, 2 * q + 1, of_q, of_q + 1, 1e-3),
        np.concatenate([rms(q, 1e-3) * of_q, rms(2 * q + 1, 1e-3) * (of_q + 1)], -1),
    )
    gate = draw(5, 8)
    y = q * gate / (1 + np.exp(-gate))
    close(
        gated_group_rmsnorm(q, gate, of_q, 1e-3, 4),
        rms(y.reshape(5, 2, 4), 1e-3).reshape(5, 8) * of_q,
    )
    for call in (
        lambda: kernels.row_mean_of_squares_qk(q, k[:3]),
        lambda: kernels.apply_qk_rms_norm(q, k, means[:2], of_q, of_k, 0.1),
        lambda: kernels.apply_qk_rms_norm(q, k, means, of_k, of_k, 0.1),
        lambda: kernels.mtp_eh_norm(q, k, of_q, of_q, 0.1),
        lambda: gated_group_rmsnorm(q, gate, of_q, 0.1, 3),
    ):
        with pytest.raises(ValueError, match="takes"):
            call()


GRIDS = np.array([[1, 2, 4], [3, 4, 2]])


def in_blocks(x, h, w):
    return np.concatenate(
        [
            x.reshape(h, w, -1)[i : i + 2, j : j + 2].reshape(4, -1)
            for i in range(0, h, 2)
            for j in range(0, w, 2)
        ]
    )


def test_patches_of_grids():
    x, y = draw(16, 3), draw(32, 3)
    found = kernels.spatial_merge(x, GRIDS, 3, 2, out_rows=32)
    wanted = [in_blocks(x[:8], 2, 4)] + 3 * [in_blocks(x[8:], 4, 2)]
    close(found, np.concatenate(wanted))
    pooled = kernels.tpool_patch_merger(TensorValue(y), GRIDS, 2, 2, 4, 4)
    means = [in_blocks(y[:8], 2, 4), in_blocks(y[8:].reshape(3, 8, 3).mean(0), 4, 2)]
    close(pooled.value, np.concatenate(means))
    in_program = jax.jit(lambda y: kernels.tpool_patch_merger(y, GRIDS, 2, 2))
    close(in_program(y), np.concatenate(means))
    for call in (
        lambda: kernels.spatial_merge(x, GRIDS, 3, 2, out_rows=31),
        lambda: kernels.spatial_merge(x, GRIDS[:, :2], 3, 2, out_rows=32),
        lambda: kernels.tpool_patch_merger(x, GRIDS, 2, 2),
        lambda: kernels.tpool_patch_merger(y, GRIDS, 4, 2),
    ):
        with pytest.raises(ValueError, match=r"patches|grids"):
            call()
    with pytest.raises(NotImplementedError, match="known while a program is traced"):
        jax.jit(lambda g: kernels.tpool_patch_merger(y, g, 2, 2))(GRIDS)


def test_positions_of_grids_of_one_size():
    x, weight, time = draw(40, 3), draw(4, 2, 3), draw(4, 3)
    grids = np.array([[4, 4, 2], [1, 4, 2]])
    found = kernels.learnable_2d_interp_pos_emb(TensorValue(x), weight, grids, time).value
    flat = weight.reshape(1, 8, 3)
    close(found[:32], x[:32] + (flat + time[:, None]).reshape(-1, 3))
    close(found[32:], x[32:] + flat[0])  # one frame has no place in time
    with pytest.raises(ValueError, match="4 frames"):
        kernels.learnable_2d_interp_pos_emb(x, weight, grids, time[:3])


@pytest.mark.oracle
def test_positions_of_grids_are_resized_as_torch_does():
    import torch

    x, weight, time = draw(32, 3), draw(4, 3, 3), draw(3, 3)
    found, start = kernels.learnable_2d_interp_pos_emb(x, weight, GRIDS, time), 0
    for t, h, w in GRIDS.tolist():
        image = torch.from_numpy(weight).permute(2, 0, 1)[None]
        grid = torch.nn.functional.interpolate(image, size=(h, w), mode="bicubic")[0]
        place = grid.permute(1, 2, 0).numpy().reshape(1, h * w, 3)
        place = place + time[:t, None] if t > 1 else place
        stop = start + t * h * w
        close(found[start:stop], x[start:stop] + place.reshape(-1, 3), atol=1e-5)
        start = stop


def test_routers_choose_from_the_best_groups():
    scores, bias = 1 / (1 + np.exp(-draw(7, 12))), draw(12) / 10
    chosen, shares = kernels.moe_router_group_limited(scores, bias, 12, 3, 4, 2, True, 2.5)
    for row, one, share in zip(scores, np.asarray(chosen), np.asarray(shares), strict=True):
        biased = (row + bias).reshape(4, 3)
        best = np.argsort(-np.sort(biased)[:, 1:].sum(1))[:2]
        allowed = [e for e in range(12) if e // 3 in best]
        wanted = sorted(allowed, key=lambda e: -(row + bias)[e])[:3]
        assert one.tolist() == wanted
        close(share, row[wanted] / row[wanted].sum() * 2.5)
    for groups in (1, 4):
        chosen, shares = kernels.moe_router_group_limited(
            scores, bias, 12, 3, groups, 1, False, 2.5
        )
        best = np.take_along_axis(scores, np.asarray(chosen), -1)
        # Of one group they are always normed, as in MAX.
        close(shares, (best / best.sum(-1, keepdims=True) if groups == 1 else best) * 2.5)
    with pytest.raises(ValueError, match="12 experts"):
        kernels.moe_router_group_limited(scores[:, :8], bias, 12, 3, 4, 2, True, 1.0)


def test_a_sigmoid_router():
    gate = SigmoidTopKRouter([CPU], 4, 6, 2, DType.float32, routed_scaling_factor=2.0)
    weight, bias, x = draw(6, 4), draw(6), draw(5, 4)
    gate.load_state_dict({"gate_score.weight": weight, "e_score_correction_bias": bias})
    scores = 1 / (1 + np.exp(-x @ weight.T))
    wanted = np.argsort(-(scores + bias), axis=-1)[:, :2]
    chosen, shares = gate(x)
    best = np.take_along_axis(scores, wanted, -1)
    assert np.array_equal(chosen, wanted)
    close(shares, best / best.sum(-1, keepdims=True) * 2)
    gate.sharding_strategy = ShardingStrategy.replicate(2)
    parts = gate.shard([CPU, CPU])
    close(parts[1](TensorValue(x))[1].value, np.asarray(shares))


def test_gates_of_hyper_connections():
    x, bias, scale = draw(5, 8), draw(8), draw(3)
    pre, post, comb = kernels.hyper_connection_gates(x, bias, scale, 2, 1e-2, 3)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    close(pre, sigmoid(x[:, :2] * scale[0] + bias[:2]) + 1e-2)
    close(post, 2 * sigmoid(x[:, 2:4] * scale[1] + bias[2:4]))
    mixture = np.exp(x[:, 4:] * scale[2] + bias[4:]).reshape(5, 2, 2)
    mixture = mixture / mixture.sum(-1, keepdims=True) + 1e-2
    for axis in (1, 2, 1, 2, 1):
        mixture = mixture / (mixture.sum(axis, keepdims=True) + 1e-2)
    close(comb, mixture.reshape(5, 4))


@pytest.mark.oracle
def test_hyper_connections_are_those_of_deepseek_v4():
    import torch
    from transformers.models.deepseek_v4 import DeepseekV4Config, modeling_deepseek_v4

    config = DeepseekV4Config(hidden_size=6, hc_mult=4, hc_sinkhorn_iters=3, hc_eps=1e-3)
    theirs = modeling_deepseek_v4.DeepseekV4HyperConnection(config)
    ours = HyperConnection(6, 4, CPU, hc_sinkhorn_iters=3, hc_eps=1e-3,
                           rms_norm_eps=config.rms_norm_eps)  # fmt: skip
    values = {"hc_fn": draw(24, 24), "hc_base": draw(24), "hc_scale": draw(3)}
    ours.load_state_dict(values)
    for name, value in values.items():
        getattr(theirs, name.removeprefix("hc_")).data = torch.from_numpy(value)
    x = draw(5, 4, 6)
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(x)[None])
    for one, other in zip(ours(x), wanted, strict=True):
        close(one, other[0].numpy(), atol=1e-5)
    with pytest.raises(ValueError, match=r"takes \[N, 4, 6\]"):
        ours(x[:, :2])
    with pytest.raises(ValueError, match="power of 2"):
        kernels.hyper_connection_gates(jnp.zeros((1, 15)), jnp.zeros(15), jnp.ones(3), 3, 0.0, 1)
    assert maxjax.init(ours, jax.random.key(0))(TensorValue(x))[2].shape == [5, 6]


def test_patches_of_no_grids():
    x, none = jnp.zeros((0, 4), jnp.bfloat16), np.zeros((0, 3), np.int64)
    for found in (
        kernels.spatial_merge(x, none, 4, 2, out_rows=0),
        kernels.tpool_patch_merger(x, none, 2, 2),
        kernels.learnable_2d_interp_pos_emb(x, jnp.zeros((3, 3, 4)), none, jnp.zeros((2, 4))),
    ):
        assert found.shape == (0, 4) and found.dtype == jnp.bfloat16
