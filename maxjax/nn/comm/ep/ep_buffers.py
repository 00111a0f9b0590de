"""EPCommBuffers and EPCommInitializer: MAX's communication buffers, of which there are none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ....driver import Buffer
from .ep_config import EPConfig

_ON_A_MESH = "give a model of maxjax.models to a mesh with an expert axis (Module.to)"


def check_supported(config: EPConfig) -> None:
    """Checks that a configuration asks for nothing that only MAX's kernels do.

    Raises:
        NotImplementedError: it has several nodes, quantised tokens, balanced experts, or a fused
            shared expert with ``use_allreduce``.
        ValueError: the experts do not divide over the devices.
    """
    if config.n_nodes > 1:
        raise NotImplementedError(
            f"expert parallelism over {config.n_nodes} nodes: an EPBatchManager has the devices of one "
            "process; "
            f"over several, call jax.distributed.initialize and {_ON_A_MESH}"
        )
    if config.dispatch_dtype.is_float8() or config.dispatch_quant_config is not None:
        raise NotImplementedError(
            "tokens are not quantised when they are sent to experts (dispatch_quant_config): send "
            "bfloat16, float16 or float32; maxjax.load reads quantised experts"
        )
    if config.eplb_enabled:
        raise NotImplementedError(
            "experts are not copied to balance them over devices (eplb_enabled): nn.MoE on a mesh with "
            "an expert axis (Module.to) gives each device its part of every expert"
        )
    if config.fused_shared_expert and config.use_allreduce:
        raise NotImplementedError(
            "fused_shared_expert with use_allreduce: without fused_shared_expert, "
            "forward_moe_sharded_layers runs the shared expert on the first device"
        )
    if config.n_experts % config.n_gpus_per_node:
        raise ValueError(
            f"{config.n_experts} experts do not divide over {config.n_gpus_per_node} devices"
        )


@dataclass
class EPCommBuffers:
    """What MAX passes its communication buffers in; here there are none, and it stays empty.

    Attributes:
        atomic_counters, send_buf_ptrs, recv_buf_ptrs, recv_count_ptrs: empty lists.
        eplb_log2phy, eplb_logcnt: None.
    """

    atomic_counters: list[list[Any]] = field(default_factory=list)
    send_buf_ptrs: list[Any] = field(default_factory=list)
    recv_buf_ptrs: list[Any] = field(default_factory=list)
    recv_count_ptrs: list[Any] = field(default_factory=list)
    eplb_log2phy: dict[int, Any] | None = None
    eplb_logcnt: dict[int, Any] | None = None

    # How ``max.tree`` takes a node apart and puts it together.
    def __tree_flatten__(self) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        names = tuple(one.name for one in fields(self))
        return tuple(getattr(self, name) for name in names), names

    @classmethod
    def __tree_unflatten__(cls, names: tuple[str, ...], children: Sequence[Any]) -> EPCommBuffers:
        return cls(**dict(zip(names, children, strict=True)))


class EPCommInitializer:
    """Prepares MAX's communication. Here nothing is prepared: XLA allocates what it sends.

    It is there so that MAX's order of calls works: ``EPCommInitializer(config)``,
    ``ep_init(session)``, and ``model_inputs()`` behind the other inputs of a program, of which it
    has none.

    Args:
        config: the settings.

    Attributes:
        config: the settings; :meth:`ep_init` sets its ``node_id`` to 0.
        atomic_counters, send_buf_ptrs, recv_buf_ptrs, recv_count_ptrs: MAX's buffers; empty.
        fused_moe_workspace: None.

    Raises:
        NotImplementedError, ValueError: as of :class:`EPBatchManager`.

    Example:
        >>> from maxjax.dtype import DType
        >>> config = EPConfig(DType.bfloat16, DType.bfloat16, 4096, 8, 128, 256, 4, 1)
        >>> start = EPCommInitializer(config)
        >>> start.ep_init(None)
        >>> config.node_id, start.model_inputs()
        (0, [])
    """

    def __init__(self, config: EPConfig):
        check_supported(config)
        self.config = config
        self.atomic_counters: list[Buffer] = []
        self.send_buf_ptrs: list[Buffer] = []
        self.recv_buf_ptrs: list[Buffer] = []
        self.recv_count_ptrs: list[Buffer] = []
        self.fused_moe_workspace: tuple[int, int] | None = None

    def ep_init(self, session: Any) -> None:
        """Sets ``config.node_id`` to 0, the only node.

        Args:
            session: ignored; MAX runs a program in it that allocates its buffers.
        """
        self.config.node_id = 0
        self.config.fused_moe_ready = False

    def set_eplb_placement(self, log2phy: Sequence[Any], logcnt: Sequence[Any]) -> None:
        """Raises ValueError, as MAX does where experts are not balanced."""
        raise ValueError("an EPLB placement needs eplb_enabled, which maxjax does not support")

    def model_inputs(self) -> list[Buffer]:
        """The inputs of a program behind its others (``EPBatchManager.input_types``): none."""
        return []
