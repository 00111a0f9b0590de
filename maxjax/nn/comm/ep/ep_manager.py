"""EPBatchManager, which sends tokens to the devices of their experts and results back, and EPCommInitializer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ....driver import Buffer
from ....graph.tensor_type import BufferType, TensorType
from ....graph.value import TensorValue, unwrap, wraps
from ...kv_cache.paged import TreeNode
from .ep_config import EPConfig
from .ep_config import _bound_fused_moe_workspace as _bound_fused_moe_workspace
from .ep_config import _ep_sync_counter_bytes as _ep_sync_counter_bytes
from .exchange import Sorting, plan_of, received, weighed

_ON_A_MESH = "give a model of maxjax.models to a mesh with an expert axis (Module.to)"


def check_supported(config: EPConfig) -> None:
    """Checks that maxjax supports the settings of a configuration.

    Raises:
        NotImplementedError: there are several nodes, quantised tokens, load balancing of experts, or a fused
            shared expert with ``use_allreduce``.
        ValueError: the number of experts is not a multiple of the number of devices.
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
class EPCommBuffers(TreeNode):
    """MAX's container of communication buffers; maxjax has no such buffers, so it stays empty.

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


class EPCommInitializer:
    """Stands in for the class that prepares MAX's communication; XLA needs no preparation.

    It lets code written for MAX run unchanged: ``EPCommInitializer(config)``, ``ep_init(session)``, and
    ``model_inputs()`` appended to the inputs of a program; that list is empty.

    Args:
        config: settings of expert parallelism.

    Attributes:
        config: settings; :meth:`ep_init` sets their ``node_id`` to 0.
        atomic_counters, send_buf_ptrs, recv_buf_ptrs, recv_count_ptrs: empty lists instead of MAX's buffers.
        fused_moe_workspace: None.

    Raises:
        NotImplementedError, ValueError: as for :class:`EPBatchManager`.

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
            session: ignored; MAX allocates its buffers with it.
        """
        self.config.node_id = 0
        self.config.fused_moe_ready = False

    def set_eplb_placement(self, log2phy: Sequence[Any], logcnt: Sequence[Any]) -> None:
        """Raises ValueError, as MAX does without load balancing of experts (``eplb_enabled``)."""
        raise ValueError("an EPLB placement needs eplb_enabled, which maxjax does not support")

    def model_inputs(self) -> list[Buffer]:
        """The additional inputs of a program (``EPBatchManager.input_types``): none."""
        return []


class _Round:
    """One exchange: the tokens and results that were sent, by device, until all results are back."""

    def __init__(self) -> None:
        self.tokens: dict[int, jax.Array] = {}
        self.ids: dict[int, jax.Array] = {}
        self.plan: Sorting | None = None
        self.running: set[int] = set()  # devices that have received rows and not sent results
        self.results: dict[int, jax.Array] = {}
        self.back: set[int] = set()


@dataclass(eq=False)
class EPBatchManager:
    """Exchanges tokens and results between devices, each of which has some of the experts.

    Call for each device :meth:`ep_dispatch_async` with its tokens; after that, for each device,
    :meth:`ep_dispatch_wait`, which returns the rows for its experts; then :meth:`ep_combine_async` with the
    results of these rows; and last :meth:`ep_combine_wait`, which returns the sums for its tokens.
    :meth:`ep_dispatch_all` and :meth:`ep_combine_all` do this for all devices at once.
    ``nn.moe.forward_moe_sharded_layers`` calls them for layers.

    A manager holds arrays only between a dispatch and the last combine, so that one manager serves all
    layers, one after the other, and works under ``jax.jit``. It has no buffers, and adds no inputs to a Graph.
    Eagerly, the values for a device are on the device of its arguments. In a traced program all values are on
    one device; to spread a program over devices, move the model to a mesh with an expert axis (``Module.to``).

    Args:
        config: settings. Tokens are cast to ``dispatch_dtype``, results to ``combine_dtype``. A
            device is a rank: device i has the i-th part of the experts. With ``use_allreduce``
            every device has all tokens, receives only the rows of its own experts, and returns the sums of
            these experts, which the caller must sum over the devices.

    Raises:
        NotImplementedError: there are several nodes, tokens are quantised, experts are load-balanced, or
            a fused shared expert is used with ``use_allreduce``.
        ValueError: the number of experts is not a multiple of the number of devices.

    Example:
        >>> from maxjax.dtype import DType
        >>> config = EPConfig(DType.float32, DType.float32, 1, 1, 4, 8, 2, 1)
        >>> manager, tokens = EPBatchManager(config), [jnp.ones((1, 1)), jnp.full((2, 1), 5.0)]
        >>> ids = [jnp.array([[3]]), jnp.array([[0], [2]])]
        >>> found = manager.ep_dispatch_all(tokens, ids, [0, 1])
        >>> [(rows.ravel().tolist(), starts.tolist()) for rows, starts, *_ in found]
        [([5.0, 0.0, 0.0], [0, 1, 1]), ([5.0, 1.0, 0.0], [0, 1, 2])]
        >>> shares = [jnp.array([[1.0]]), jnp.array([[2.0], [3.0]])]
        >>> [y.tolist() for y in manager.ep_combine_all([one[0] for one in found], shares, [0, 1])]
        [[[1.0]], [[10.0], [15.0]]]
    """

    config: EPConfig
    _rounds: dict[int, _Round] = field(default_factory=dict, init=False, repr=False)
    # Between calls of a model there is no exchange.
    _mx_unread: ClassVar[frozenset[str]] = frozenset({"_rounds"})

    def __post_init__(self) -> None:
        check_supported(self.config)

    # --- inputs of a Graph: none

    def input_tree(self) -> OrderedDict[str, tuple[TensorType | BufferType, ...]]:
        """The inputs of a Graph by name: none of each kind."""
        names = ("atomic_counters", "send_buf_ptrs", "recv_buf_ptrs", "recv_count_ptrs")
        return OrderedDict((name, ()) for name in names)

    def input_types(self) -> list[TensorType | BufferType]:
        """The types of a Graph's inputs: none."""
        return []

    def fetch_buffers(self, _input_vals: Iterable[Any]) -> None:
        """Checks that there are no inputs of a Graph, and drops exchanges that were not completed.

        Raises:
            ValueError: there are inputs.
        """
        if found := list(_input_vals):
            raise ValueError(
                f"an EPBatchManager has no inputs (input_types() is empty), and got {len(found)}"
            )
        self._rounds = {}

    def comm_buffers(self, input_vals: Iterable[Any]) -> EPCommBuffers:
        """Calls :meth:`fetch_buffers`, and returns an empty EPCommBuffers."""
        self.fetch_buffers(input_vals)
        return EPCommBuffers()

    def bind_comm_buffers(self, comm: EPCommBuffers) -> None:
        """Calls :meth:`fetch_buffers` with the content of an EPCommBuffers, which must be empty."""
        self.fetch_buffers(
            [*comm.atomic_counters, *comm.send_buf_ptrs, *comm.recv_buf_ptrs, *comm.recv_count_ptrs]
        )

    # --- device by device

    def ep_dispatch_async(
        self, input_tokens: Any, topk_ids: Any, device_id: int, input_scales: Any = None
    ) -> None:
        """Sends the tokens of a device. If the device has already sent tokens, a new exchange begins for all devices.

        Args:
            input_tokens: tokens ``[N, E]``.
            topk_ids: indices of the chosen experts, ``[N, k]``; indices out of range choose no expert.
            device_id: index of the device.
            input_scales: scales of quantised tokens; must be None.

        Raises:
            NotImplementedError: ``input_scales`` are given.
            ValueError: ``device_id`` is out of range, or the sizes are not those of the configuration.
        """
        if input_scales is not None:
            raise NotImplementedError(
                "input_scales are for quantised tokens, which are not sent: send bfloat16, float16 or "
                "float32"
            )
        tokens, ids = jnp.asarray(unwrap(input_tokens)), jnp.asarray(unwrap(topk_ids))
        self._check(tokens, ids, device_id)
        key = self._key(device_id)
        found = self._rounds.get(key)
        if found is None or device_id in found.tokens:
            found = self._rounds[key] = _Round()
        found.tokens[device_id] = tokens.astype(self.config.dispatch_dtype.np)
        found.ids[device_id] = ids

    def ep_dispatch_wait(self, device_id: int) -> tuple[TensorValue, ...]:
        """The rows for the experts of a device, from the tokens of all devices.

        Returns:
            The rows ``[M, E]``, sorted by expert; the offsets of each expert's rows, uint32 ``[L + 1]``; the
            indices 0 … L - 1 of the device's experts, int32 ``[L]``; and, as uint32 ``[2]``, the maximum number
            of rows of an expert (``max_tokens_per_rank`` times the number of devices, which is not enforced) and
            L. With ``fused_shared_expert`` the device's own tokens come first, as rows of an additional
            expert.

        Raises:
            RuntimeError: a device has not sent its tokens.
        """
        found, senders = self._round(device_id), self._senders(device_id)
        if missing := [one for one in senders if one not in found.tokens]:
            raise RuntimeError(
                f"ep_dispatch_wait({device_id}) needs the tokens of all devices first, and {missing} "
                "did not send any: call ep_dispatch_async for each, or ep_dispatch_all"
            )
        if found.plan is None:
            found.plan = plan_of([found.ids[one] for one in senders], self.config.n_experts)
        tokens = [found.tokens[one] for one in senders]
        own = self._experts(device_id)
        rows, offsets = received(found.plan, tokens, senders.index(device_id), own)
        count = len(own)
        if self.config.fused_shared_expert:
            shared = found.tokens[device_id]
            rows = jnp.concatenate([shared, rows])
            offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), offsets + shared.shape[0]])
            count += 1
        found.running.add(device_id)
        most = self.config.max_tokens_per_rank * self.config.n_gpus_per_node
        return (
            TensorValue(rows),
            TensorValue(offsets.astype(jnp.uint32)),
            TensorValue(jnp.arange(count, dtype=jnp.int32)),
            TensorValue(jnp.array([most, count], jnp.uint32)),
        )

    def ep_combine_async(self, input_tokens: Any, device_id: int) -> None:
        """Sends the results of a device's experts, for each row of :meth:`ep_dispatch_wait`.

        Raises:
            RuntimeError: the device has not received rows, or has sent its results already.
            ValueError: the number of results is not the number of rows.
        """
        found, results = self._round(device_id), jnp.asarray(unwrap(input_tokens))
        if device_id not in found.running or found.plan is None:
            raise RuntimeError(
                f"the experts of device {device_id} have no rows: call ep_dispatch_wait first"
            )
        shared = found.tokens[device_id].shape[0] if self.config.fused_shared_expert else 0
        if results.shape[0] != (rows := found.plan.ids.shape[0] + shared):
            raise ValueError(
                f"results are one for each row of ep_dispatch_wait, {rows}, not {results.shape[0]}"
            )
        found.running.remove(device_id)
        found.results[device_id] = results.astype(self.config.combine_dtype.np)

    def ep_combine_wait(self, router_weight: Any, device_id: int) -> Any:
        """The sums of the experts' results for the tokens of a device.

        Args:
            router_weight: factors of the results, ``[N, k]``.
            device_id: index of the device.

        Returns:
            ``[N, E]`` in ``combine_dtype``, summed in float32; a TensorValue for a TensorValue.

        Raises:
            RuntimeError: a device has not sent its experts' results.
            ValueError: ``router_weight`` does not have the shape of ``topk_ids``.
        """
        found, senders = self._round(device_id), self._senders(device_id)
        if missing := [one for one in senders if one not in found.results]:
            raise RuntimeError(
                f"ep_combine_wait({device_id}) needs the results of all devices first, and {missing} "
                "did not send any: call ep_combine_async for each, or ep_combine_all"
            )
        shares, ids = jnp.asarray(unwrap(router_weight)), found.ids[device_id]
        if shares.shape != ids.shape:
            raise ValueError(
                f"router_weight is {list(ids.shape)} as topk_ids is, not {list(shares.shape)}"
            )
        fused = self.config.fused_shared_expert
        routed = [
            found.results[one][found.tokens[one].shape[0] :] if fused else found.results[one]
            for one in senders
        ]
        sizes = [found.ids[one].shape[0] * self.config.top_k for one in senders]
        plan: Any = found.plan
        total = weighed(
            plan, routed, [self._experts(one) for one in senders], shares,
            sum(sizes[: senders.index(device_id)]), found.tokens[device_id],
        )  # fmt: skip
        if fused:
            total = total + found.results[device_id][: shares.shape[0]].astype(jnp.float32)
        found.back.add(device_id)
        if len(found.back) == len(senders):
            del self._rounds[self._key(device_id)]
        total = total.astype(self.config.combine_dtype.np)
        return TensorValue(total) if wraps(router_weight) else total

    # --- all at once

    def ep_dispatch(
        self, input_tokens: Any, topk_ids: Any, device_id: int, input_scales: Any = None
    ) -> tuple[Any, ...]:
        """:meth:`ep_dispatch_async` and :meth:`ep_dispatch_wait` for a device that needs no tokens of others.

        Raises:
            NotImplementedError: there are several devices, without ``use_allreduce``: each needs the
                others' tokens.
        """
        self._alone("ep_dispatch", "ep_dispatch_async for each device, then ep_dispatch_wait")
        self.ep_dispatch_async(input_tokens, topk_ids, device_id, input_scales)
        return _like(input_tokens, self.ep_dispatch_wait(device_id))

    def ep_combine(
        self, input_tokens: Any, router_weight: Any, device_id: int, topk_ids: Any = None
    ) -> Any:
        """:meth:`ep_combine_async` and :meth:`ep_combine_wait` for a device that needs no results of others.

        Args:
            topk_ids: argument of MAX, ignored; those of the dispatch are used.

        Raises:
            NotImplementedError: there are several devices, without ``use_allreduce``: each needs the
                others' results.
        """
        self._alone("ep_combine", "ep_combine_async for each device, then ep_combine_wait")
        self.ep_combine_async(input_tokens, device_id)
        return _like(input_tokens, (self.ep_combine_wait(router_weight, device_id),))[0]

    def ep_dispatch_all(
        self,
        input_tokens: Sequence[Any],
        topk_ids: Sequence[Any],
        device_ids: Sequence[int],
        input_scales: Sequence[Any] | None = None,
    ) -> list[tuple[Any, ...]]:
        """:meth:`ep_dispatch_async` for all devices, then the results of :meth:`ep_dispatch_wait`."""
        for device in device_ids:
            self._rounds.pop(self._key(device), None)
        scales = [None] * len(device_ids) if input_scales is None else input_scales
        for one in zip(input_tokens, topk_ids, device_ids, scales, strict=True):
            self.ep_dispatch_async(*one)
        found = map(self.ep_dispatch_wait, device_ids)
        return [_like(x, values) for x, values in zip(input_tokens, found, strict=True)]

    def ep_combine_all(
        self, input_tokens: Sequence[Any], router_weights: Sequence[Any], device_ids: Sequence[int]
    ) -> list[Any]:
        """:meth:`ep_combine_async` for all devices, then the results of :meth:`ep_combine_wait`."""
        for results, device in zip(input_tokens, device_ids, strict=True):
            self.ep_combine_async(results, device)
        found = [self.ep_combine_wait(*one) for one in zip(router_weights, device_ids, strict=True)]
        return [_like(x, (y,))[0] for x, y in zip(input_tokens, found, strict=True)]

    # --- devices

    def _senders(self, device_id: int) -> list[int]:
        """The devices from which a device receives tokens."""
        devices = [*range(self.config.n_gpus_per_node)]
        return [device_id] if self.config.use_allreduce else devices

    def _key(self, device_id: int) -> int:
        return device_id if self.config.use_allreduce else 0

    def _round(self, device_id: int) -> _Round:
        return self._rounds.get(self._key(device_id)) or _Round()

    def _experts(self, device_id: int) -> range:
        count = self.config.n_experts // self.config.n_gpus_per_node
        return range(device_id * count, (device_id + 1) * count)

    def _alone(self, name: str, instead: str) -> None:
        if self.config.n_gpus_per_node > 1 and not self.config.use_allreduce:
            raise NotImplementedError(
                f"{name} for one of {self.config.n_gpus_per_node} devices cannot know what the others "
                f"send in the same program: call {instead}; or {name}_all; or nn.moe.forward_moe_sharded_layers"
            )

    def _check(self, tokens: jax.Array, ids: jax.Array, device_id: int) -> None:
        config = self.config
        if device_id not in range(config.n_gpus_per_node):
            raise ValueError(
                f"device_id is {device_id}, and there are {config.n_gpus_per_node} devices"
            )
        wanted = (tokens.shape[:1], (config.hidden_size,), (*tokens.shape[:1], config.top_k))
        if tokens.ndim != 2 or (tokens.shape[:1], tokens.shape[1:], ids.shape) != wanted:
            raise ValueError(
                f"tokens are [N, {config.hidden_size}] and topk_ids [N, {config.top_k}], not "
                f"{list(tokens.shape)} and {list(ids.shape)}"
            )


def _like(given: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values as TensorValues if ``given`` is a TensorValue, otherwise as arrays."""
    if wraps(given):
        return tuple(map(TensorValue, values))
    return tuple(unwrap(one) for one in values)
