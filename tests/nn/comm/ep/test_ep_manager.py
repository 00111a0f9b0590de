"""EPBatchManager and EPCommInitializer; tests/nn/moe/test_expert_parallel.py has the layers."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.dtype import DType
from maxjax.graph import TensorValue
from maxjax.nn.comm.ep import EPBatchManager, EPCommBuffers, EPCommInitializer, EPConfig
from maxjax.nn.comm.ep.ep_kernels import fused_silu
from maxjax.nn.quant_config import QuantConfig

IDS = [jnp.array([[3, 0], [0, -1]]), jnp.zeros((0, 2), jnp.int32)]  # -1 is no expert
TOKENS = [jnp.array([[1.0], [2.0]]), jnp.zeros((0, 1))]


def manager(count=2, dtype=DType.float32, **settings):
    return EPBatchManager(
        EPConfig(dtype, dtype, 1, 2, 4, 8, n_gpus_per_node=count, n_nodes=1, **settings)
    )


def test_in_the_order_of_the_phases():
    one = manager()
    for device in (0, 1):
        one.ep_dispatch_async(TensorValue(TOKENS[device]), TensorValue(IDS[device]), device)
    rows, starts, experts, stats = zip(*map(one.ep_dispatch_wait, (0, 1)), strict=True)
    assert [x.to_numpy().ravel().tolist() for x in rows] == [[1, 2, 0, 0], [1, 0, 0, 0]]
    assert [x.to_numpy().tolist() for x in starts] == [[0, 2, 2], [0, 0, 1]]
    assert [x.to_numpy().tolist() for x in experts] == [[0, 1]] * 2
    assert stats[0].to_numpy().tolist() == [16, 2]
    assert [x[0].dtype for x in (starts, experts, stats)] == [
        DType.uint32,
        DType.int32,
        DType.uint32,
    ]
    for device in (0, 1):
        full = rows[device].to_numpy().copy()
        full[starts[device].to_numpy()[-1] :] = np.nan  # rows that are nobody's
        one.ep_combine_async(full, device)
    found = [
        one.ep_combine_wait(jnp.array([[10.0, 1.0], [5.0, 7.0]])[:n], i)
        for i, n in enumerate((2, 0))
    ]
    assert [y.tolist() for y in found] == [[[11.0], [10.0]], []]
    assert not one._rounds


def test_results_of_no_rows_may_be_no_numbers():
    one = manager()
    found = one.ep_dispatch_all(TOKENS, [jnp.array([[0, 1], [1, 0]]), IDS[1]], [0, 1])
    assert found[1][1].tolist() == [0, 0, 0]
    results = [found[0][0], jnp.full_like(found[1][0], jnp.nan)]
    y, _ = one.ep_combine_all(results, [jnp.ones((2, 2)), jnp.ones((0, 2))], [0, 1])
    assert y.tolist() == [[2.0], [4.0]]


def test_tokens_and_results_have_the_dtypes_of_the_settings():
    one = manager(1, DType.bfloat16)
    rows, *_ = one.ep_dispatch(jnp.full((1, 1), 1.001), jnp.array([[0, 1]]), 0)
    assert rows.dtype == jnp.bfloat16
    y = one.ep_combine(rows.astype(jnp.float32) + 0.001, jnp.array([[1.0, 0.01]]), 0)
    assert y.dtype == jnp.bfloat16 and y.tolist() == [[1.0078125]]


def test_an_unfinished_exchange_is_forgotten():
    one = manager()
    one.ep_dispatch_async(TOKENS[0] + 5, IDS[0], 0)
    one.ep_dispatch_async(TOKENS[0], IDS[0], 0)  # begins anew
    one.ep_dispatch_async(TOKENS[1], IDS[1], 1)
    assert one.ep_dispatch_wait(1)[0].to_numpy()[0] == 1
    one.fetch_buffers([])
    with pytest.raises(RuntimeError, match=r"ep_dispatch_wait\(1\) needs .*\[0, 1\] did not send"):
        one.ep_dispatch_wait(1)


def test_there_are_no_buffers():
    config = manager().config
    start, one = EPCommInitializer(config), EPBatchManager(config)
    start.ep_init(None)
    assert config.node_id == 0 and start.model_inputs() == one.input_types() == []
    assert [*one.input_tree().values()] == [()] * 4
    comm = one.comm_buffers([])
    assert comm == EPCommBuffers()
    one.bind_comm_buffers(comm)
    with pytest.raises(ValueError, match="no inputs .* got 1"):
        one.fetch_buffers([object()])


def test_what_is_out_of_order():
    one = manager()
    with pytest.raises(
        NotImplementedError,
        match="one of 2 devices cannot know .*ep_dispatch_async.*ep_dispatch_all",
    ):
        one.ep_dispatch(TOKENS[0], IDS[0], 0)
    with pytest.raises(NotImplementedError, match="ep_combine_async .*ep_combine_all"):
        one.ep_combine(TOKENS[0], IDS[0], 0)
    one.ep_dispatch_async(TOKENS[0], IDS[0], 0)
    with pytest.raises(RuntimeError, match=r"\[1\].*ep_dispatch_async"):
        one.ep_dispatch_wait(0)
    with pytest.raises(RuntimeError, match="experts of device 0 have no rows"):
        one.ep_combine_async(TOKENS[0], 0)
    found = one.ep_dispatch_all(TOKENS, IDS, [0, 1])
    with pytest.raises(ValueError, match="one for each row of ep_dispatch_wait, 4, not 2"):
        one.ep_combine_async(TOKENS[0], 0)
    one.ep_combine_async(found[0][0], 0)
    with pytest.raises(RuntimeError, match=r"\[1\].*ep_combine_async"):
        one.ep_combine_wait(IDS[0], 0)
    one.ep_combine_async(found[1][0], 1)
    with pytest.raises(ValueError, match=r"\[2, 2\] as topk_ids is, not \[1, 2\]"):
        one.ep_combine_wait(IDS[0][:1], 0)


@pytest.mark.parametrize(
    ("tokens", "ids", "device", "says"),
    [
        (TOKENS[0], IDS[0], 2, "device_id is 2, and there are 2 devices"),
        (jnp.ones((2, 3)), IDS[0], 0, r"tokens are \[N, 1\] .*not \[2, 3\]"),
        (TOKENS[0], IDS[0][:1], 0, r"topk_ids \[N, 2\], not .*\[1, 2\]"),
    ],
)  # fmt: skip
def test_sizes_are_those_of_the_settings(tokens, ids, device, says):
    one = EPBatchManager(
        EPConfig(DType.float32, DType.float32, 1, 2, 8, 4, n_gpus_per_node=2, n_nodes=1)
    )
    with pytest.raises(ValueError, match=says):
        one.ep_dispatch_async(tokens, ids, device)


def test_what_is_refused(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    fp8 = QuantConfig.blockscaled_fp8(mlp_quantized_layers={0}, attn_quantized_layers={0})

    def config(dtype=DType.bfloat16, experts=4, nodes=1, **settings):
        return EPConfig(
            dtype, DType.bfloat16, 1, 2, experts, 8, n_gpus_per_node=2, n_nodes=nodes, **settings
        )

    for kind in (EPBatchManager, EPCommInitializer):
        for settings, says in (
            ({"nodes": 2}, "over 2 nodes: .*jax.distributed.initialize"),
            (
                {"dtype": DType.float8_e4m3fn, "dispatch_quant_config": fp8},
                "not quantised .*send bfloat16",
            ),
            ({"eplb_enabled": True}, "mesh with an expert axis"),
            ({"fused_shared_expert": True, "use_allreduce": True}, "without fused_shared_expert"),
        ):
            with pytest.raises(NotImplementedError, match=says):
                kind(config(**settings))
    with pytest.raises(ValueError, match="3 experts do not divide over 2 devices"):
        EPBatchManager(config(experts=3))
    with pytest.raises(NotImplementedError, match="input_scales are for quantised tokens"):
        manager().ep_dispatch_async(TOKENS[0], IDS[0], 0, jnp.ones(1))


def test_the_activation_is_of_received_rows_alone():
    gates, ups = np.array([[1.0, -2.0]], np.float32), np.array([[3.0, 4.0]], np.float32)
    other, starts = np.full((1, 4), np.nan, np.float32), np.array([0, 1, 1], np.uint32)
    expected = np.concatenate([gates / (1 + np.exp(-gates)) * ups, np.zeros((1, 2))])
    for rows, options in (
        (np.concatenate([gates, ups], axis=1), {}),
        (np.stack([gates, ups], axis=2).reshape(1, 4), {"interleaved": True}),
    ):
        found = fused_silu(np.concatenate([rows, other]), starts, **options)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
