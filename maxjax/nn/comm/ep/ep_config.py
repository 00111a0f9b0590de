"""Settings of expert parallelism, and the sizes of MAX's communication buffers that follow from them.

maxjax has none of these buffers: XLA allocates its own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ....absent import absent as _absent
from ....dtype import DType
from ...quant_config import QuantConfig

# The dtypes of tokens that are not quantised; MAX's kernels support only bfloat16.
_PLAIN = (DType.bfloat16, DType.float16, DType.float32)
# The six-bit dtypes, packed in uint8: 32 elements take 24 bytes, and one byte for their scale.
_SIX_BITS = (DType.float6_e2m3fn, DType.float6_e3m2fn)
_PACKED = (DType.uint8, DType.float4_e2m1fn)


@dataclass
class EPConfig:
    """How the experts of a layer are spread over devices. The fields are MAX's, in MAX's order.

    Attributes:
        dispatch_dtype, combine_dtype: dtypes of tokens that are sent to experts, and of results
            that are sent back.
        hidden_size: number of features of a token.
        top_k: number of experts that are chosen for each token.
        n_experts: number of experts.
        max_tokens_per_rank: maximum number of tokens of one device.
        n_gpus_per_node, n_nodes: numbers of devices of a node, and of nodes; a device is a rank.
        node_id: index of this node; -1 before it is known.
        dispatch_quant_config: quantisation of tokens that are sent; required unless ``dispatch_dtype`` is
            bfloat16 or, in maxjax, float16 or float32.
        nvfp4_dyn_global_scales: whether each token has its own NVFP4 scale.
        use_allreduce: whether every device has all tokens, and results are summed over the devices.
        num_logical_experts: number of experts without their replicas; ``n_experts`` by default.
        fused_shared_expert: a setting of MAX's kernels or of its load balancing of experts, which is not checked; so
            are ``fuse_ffn_combine_send``, ``moe_dim``, ``fused_moe_ready``, ``max_batch_size``, ``eplb_enabled``,
            ``num_moe_layers``, ``max_replicas`` and ``eplb_phy2log_plan``.

    Raises:
        ValueError: ``dispatch_quant_config`` is missing or does not fit ``dispatch_dtype``; or there are several
            nodes, and ``use_allreduce`` is set or MPI did not start the process
            (``OMPI_COMM_WORLD_SIZE`` is not set).
        NotImplementedError: float8 tokens have scales of another granularity than blocks.

    Example:
        >>> bf16 = DType.bfloat16
        >>> config = EPConfig(bf16, bf16, 4096, 8, 128, 256, n_gpus_per_node=4, n_nodes=1)
        >>> config.get_max_recv_tokens(), config.estimate_memory_usage()
        (8192, 287309824)
    """

    dispatch_dtype: DType
    combine_dtype: DType
    hidden_size: int
    top_k: int
    n_experts: int
    max_tokens_per_rank: int
    n_gpus_per_node: int
    n_nodes: int
    node_id: int = -1
    dispatch_quant_config: QuantConfig | None = None
    nvfp4_dyn_global_scales: bool = False
    fused_shared_expert: bool = False
    fuse_ffn_combine_send: bool = False
    moe_dim: int = 0
    fused_moe_ready: bool = False
    use_allreduce: bool = False
    max_batch_size: int = 0
    eplb_enabled: bool = False
    num_moe_layers: int = 0
    max_replicas: int = 1
    eplb_phy2log_plan: Any = None
    num_logical_experts: int = 0

    def __post_init__(self) -> None:
        self.num_logical_experts = self.num_logical_experts or self.n_experts
        quant = self.dispatch_quant_config
        if self.dispatch_dtype not in _PLAIN:
            _check_quantised(self.dispatch_dtype, quant)
        if self.nvfp4_dyn_global_scales and not (quant is not None and quant.is_nvfp4):
            raise ValueError("nvfp4_dyn_global_scales needs a dispatch_quant_config of NVFP4")
        if self.n_nodes > 1 and self.use_allreduce:
            raise ValueError(f"use_allreduce is for one node, not for {self.n_nodes}")
        if self.n_nodes > 1 and "OMPI_COMM_WORLD_SIZE" not in os.environ:
            raise ValueError(
                f"{self.n_nodes} nodes are started by mpirun, and OMPI_COMM_WORLD_SIZE is not set; "
                f"on one node, ep_size is its number of devices, {self.n_gpus_per_node}"
            )

    @property
    def _ranks(self) -> int:
        return self.n_gpus_per_node * self.n_nodes

    def estimate_memory_usage(self) -> int:
        """Size in bytes of one group of MAX's buffers on a device, by :func:`estimate_ep_memory_usage`."""
        quant = self.dispatch_quant_config
        return estimate_ep_memory_usage(
            hidden_size=self.hidden_size,
            dispatch_dtype=self.dispatch_dtype,
            combine_dtype=self.combine_dtype,
            max_tokens_per_rank=self.max_tokens_per_rank,
            n_experts=self.n_experts,
            n_nodes=self.n_nodes,
            n_gpus_per_node=self.n_gpus_per_node,
            top_k=self.top_k,
            use_allreduce=self.use_allreduce,
            dispatch_element_dtype=quant.mx_element_dtype if quant and quant.is_mx else None,
        )

    def get_max_recv_tokens(self) -> int:
        """The maximum number of rows that the experts of one device receive."""
        if self.use_allreduce:
            most = min(self.n_experts // self._ranks, self.top_k)
        else:
            most = min(self.n_experts, self._ranks * self.top_k)
        return self.max_tokens_per_rank * most


def _check_quantised(dtype: DType, quant: QuantConfig | None) -> None:
    """Checks that the quantisation fits a dtype other than bfloat16, float16 and float32."""
    if quant is None:
        raise ValueError(
            f"a dispatch_dtype other than bfloat16, float16 and float32, {dtype}, needs a "
            "dispatch_quant_config"
        )
    if dtype.is_float8():
        if not quant.input_scale.is_block:
            raise NotImplementedError(f"tokens of {dtype} need scales of blocks, not of a "
                                      f"{quant.input_scale.granularity}")  # fmt: skip
    elif dtype not in _PACKED:
        raise ValueError(
            f"dispatch_dtype is a float, a float8, uint8 or float4_e2m1fn, not {dtype}"
        )
    elif not (quant.is_fp4 or quant.is_mxfp6):
        raise ValueError(f"tokens of {dtype} need a dispatch_quant_config of FP4 or MXFP6")


def estimate_ep_memory_usage(
    *,
    hidden_size: int,
    dispatch_dtype: DType,
    combine_dtype: DType,
    max_tokens_per_rank: int,
    n_experts: int,
    n_nodes: int,
    n_gpus_per_node: int,
    top_k: int,
    use_allreduce: bool = False,
    dispatch_element_dtype: DType | None = None,
) -> int:
    """Size in bytes of one group of MAX's communication buffers on a device; MAX allocates two groups.

    Args:
        hidden_size, dispatch_dtype, combine_dtype, max_tokens_per_rank, n_experts, n_nodes,
            n_gpus_per_node, top_k, use_allreduce: as in :class:`EPConfig`.
        dispatch_element_dtype: dtype of the elements that are packed in uint8 tokens; any other than a
            six-bit dtype means FP4.

    Example:
        >>> estimate_ep_memory_usage(
        ...     hidden_size=64, dispatch_dtype=DType.bfloat16, combine_dtype=DType.bfloat16,
        ...     max_tokens_per_rank=16, n_experts=8, n_nodes=1, n_gpus_per_node=2, top_k=2)
        22528
    """
    ranks = n_gpus_per_node * n_nodes
    if dispatch_dtype == DType.uint8 and dispatch_element_dtype in _SIX_BITS:
        sent = hidden_size * 3 // 4 + hidden_size // 32
    elif dispatch_dtype in _PACKED:
        sent = hidden_size // 2 * 9 // 8  # a byte of scale for 16 elements
    else:
        sent = hidden_size * dispatch_dtype.size_in_bytes
    received = n_experts // ranks if use_allreduce else n_experts
    # Within a node, results are written directly to the buffer that receives them.
    results = top_k + (min(n_experts, ranks * top_k) if n_nodes > 1 else 0)
    of_token = (1 + received) * sent + results * hidden_size * combine_dtype.size_in_bytes
    return max_tokens_per_rank * of_token


def calculate_ep_max_tokens_per_rank(
    *,
    max_batch_input_tokens: int,
    ep_size: int,
    data_parallel_degree: int,
    use_allreduce: bool = False,
) -> int:
    """The maximum number of tokens of one device, if several devices share the tokens of a batch.

    Args:
        max_batch_input_tokens: maximum number of tokens of a batch.
        ep_size: number of devices.
        data_parallel_degree: number of batches that are computed in parallel; ``ep_size /
            data_parallel_degree`` devices share the tokens of a batch.
        use_allreduce: whether every device has all tokens of its batch.

    Raises:
        ZeroDivisionError: ``data_parallel_degree`` is greater than ``ep_size``.

    Example:
        >>> calculate_ep_max_tokens_per_rank(
        ...     max_batch_input_tokens=100, ep_size=8, data_parallel_degree=1)
        13
    """
    if use_allreduce:
        return max_batch_input_tokens
    return -(-max_batch_input_tokens // (ep_size // data_parallel_degree))


def _ep_sync_counter_bytes(
    n_experts: int, n_gpus_per_node: int, use_allreduce: bool, moe_dim: int
) -> int:
    """Size in bytes of the counters by which MAX's kernels synchronise a device, for both groups of buffers.

    Example:
        >>> _ep_sync_counter_bytes(64, 8, False, 0), _ep_sync_counter_bytes(64, 8, True, 2048)
        (7680, 2100352)
    """
    experts = n_experts // n_gpus_per_node if use_allreduce else n_experts
    words = 10 * experts + 320 + (262_144 if moe_dim > 0 else 0)  # of four bytes
    return 2 * 4 * words


def _bound_fused_moe_workspace(config: EPConfig, dispatch_dtype: DType) -> tuple[int, str]:
    """The size of the fused kernel's workspace, which is 0, and the reason."""
    return 0, "there is no fused kernel: XLA compiles the dispatch, the experts and the combine"


def _ep_fused_moe_requested() -> bool:
    """Whether the environment asks for MAX's fused kernel (``MODULAR_EP_FUSED_MOE=1``), which maxjax lacks."""
    return os.environ.get("MODULAR_EP_FUSED_MOE", "0") == "1"


__getattr__ = _absent(__name__)
