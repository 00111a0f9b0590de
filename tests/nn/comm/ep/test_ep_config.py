"""EPConfig and what follows from it, against figures of MAX 26.7."""

from typing import Any

import pytest

from maxjax.dtype import DType
from maxjax.nn.comm.ep import EPConfig, calculate_ep_max_tokens_per_rank
from maxjax.nn.comm.ep.ep_config import estimate_ep_memory_usage
from maxjax.nn.quant_config import QuantConfig, QuantFormat, ScaleGranularity

LAYERS: dict[str, Any] = {"mlp_quantized_layers": {0}, "attn_quantized_layers": {0}}
FP8, NVFP4, MXFP6 = (QuantConfig.blockscaled_fp8(**LAYERS), QuantConfig.nvfp4(**LAYERS),
                     QuantConfig.mxfp4(**LAYERS))  # fmt: skip
MXFP6.format = QuantFormat.MXFP6


def config(dtype="bfloat16", quant=None, nodes=1, **more):
    return EPConfig(
        getattr(DType, dtype), DType.bfloat16, 256, 2, 8, 16, 2, nodes,
        dispatch_quant_config=quant, **more,
    )  # fmt: skip


def test_sizes_are_those_of_max(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    for found, size, tokens in (
        (config(), 90112, 64),
        (config(nodes=2), 155648, 128),
        (config(use_allreduce=True), 57344, 32),
        (config("float8_e4m3fn", FP8), 53248, 64),
        (config("uint8", NVFP4, nvfp4_dyn_global_scales=True), 37120, 64),
        (config("uint8", MXFP6), 45184, 64),
    ):
        assert (found.estimate_memory_usage(), found.get_max_recv_tokens()) == (size, tokens), found
        assert (found.num_logical_experts, found.node_id) == (8, -1)
    assert 79872 == estimate_ep_memory_usage(
        hidden_size=100, dispatch_dtype=DType.float4_e2m1fn, combine_dtype=DType.bfloat16,
        max_tokens_per_rank=128, n_experts=6, n_nodes=1, n_gpus_per_node=2, top_k=2,
        use_allreduce=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": "uint8"}, "needs a dispatch_quant_config"),
        ({"dtype": "int32", "quant": FP8}, "dispatch_dtype is a float, a float8"),
        ({"dtype": "uint8", "quant": FP8}, "FP4 or MXFP6"),
        ({"nvfp4_dyn_global_scales": True}, "needs a dispatch_quant_config of NVFP4"),
        ({"nodes": 2, "use_allreduce": True}, "one node"),
        ({"nodes": 2}, "OMPI_COMM_WORLD_SIZE is not set; on one node, ep_size is .* 2"),
    ],
)
def test_what_does_not_fit_is_refused(monkeypatch, changes, says):
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=says):
        config(**changes)


def test_float8_tokens_need_scales_of_blocks():
    whole = QuantConfig.blockscaled_fp8(**LAYERS)
    whole.input_scale.granularity = ScaleGranularity.TENSOR
    with pytest.raises(NotImplementedError, match="scales of blocks, not of a tensor"):
        config("float8_e4m3fn", whole)


def test_tokens_of_a_device_are_rounded_up():
    sizes: dict[str, Any] = {"max_batch_input_tokens": 7, "ep_size": 8, "data_parallel_degree": 3}
    assert calculate_ep_max_tokens_per_rank(**sizes) == 4
    assert calculate_ep_max_tokens_per_rank(**sizes, use_allreduce=True) == 7
