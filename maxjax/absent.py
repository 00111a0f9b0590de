"""Names and arguments that MAX has and maxjax does not: both can be written, and say what to do instead if used.

A model file of MAX imports many names of which only a few are used at run time. So a name without a counterpart
is a class that may appear in annotations, as a default value or as a base class. Calling it, making an instance
of it or of a derived class, or iterating over it raises NotImplementedError with the advice of ``ADVICE``.

Files of MAX also pass arguments that are None in models maxjax runs. The functions take them at MAX's position, but
``help`` does not show them (:func:`hides`), and another value than None raises (:func:`refuse_arguments`).
"""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar


class Refused(ABCMeta):
    """The metaclass of the classes that stand for names maxjax does not have.

    Example:
        >>> Signals = refused("nn.comm.Signals", "XLA inserts the communication")
        >>> class Mine(Signals): ...
        >>> Mine()
        Traceback (most recent call last):
        NotImplementedError: maxjax has no nn.comm.Signals, which MAX has: XLA inserts the communication
    """

    _mx_refused: tuple[str, str]

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        name, advice = cls._mx_refused
        raise NotImplementedError(f"maxjax has no {name}, which MAX has: {advice}")

    def __iter__(cls) -> Any:
        return cls()

    def __getitem__(cls, key: Any) -> type:
        return cls  # Generic[T] in annotations and among bases

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        if name in ("setter", "getter", "deleter"):
            return getattr(property(), name)  # @Base.attribute.setter in a class derived from it
        # An enumeration's member or a class method: it may be a default value, and calling it raises.
        owner, advice = cls._mx_refused
        member = refused(f"{owner}.{name}", advice)
        setattr(cls, name, member)
        return member

    def __repr__(cls) -> str:
        return f"<{cls._mx_refused[0]}, which maxjax does not have>"


def refused(name: str, advice: str) -> Any:
    """The class that stands for a name maxjax does not have.

    Args:
        name: path and name below ``max``.
        advice: what to do instead.
    """
    return Refused(
        name.rpartition(".")[2],
        (),
        {"_mx_refused": (name, advice), "__doc__": f"Not in maxjax: {advice}."},
    )


def is_refused(value: Any) -> bool:
    """Whether a value stands for a name that maxjax does not have."""
    return isinstance(value, Refused)


def absent(module: str, names: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """A module's ``__getattr__`` for the names that MAX has there and maxjax does not.

    Args:
        module: name of the module.
        names: mapping from names, separated by spaces, to advice; the module's in ``ADVICE`` by default.

    Raises:
        AttributeError: the returned function raises it for a name that is not in the mapping.
    """
    path = module.partition(".")[2]
    table = ADVICE.get(path, {}) if names is None else names
    known = {name: advice for names, advice in table.items() for name in names.split()}
    made: dict[str, Any] = {}

    def __getattr__(name: str) -> Any:
        if name not in known:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if name not in made:
            made[name] = refused(f"{path}.{name}", known[name])
        return made[name]

    return __getattr__


_Function = TypeVar("_Function", bound=Callable[..., Any])


def hides(*names: str) -> Callable[[_Function], _Function]:
    """A decorator of functions with arguments that are only for files of MAX: signatures do not show them.

    Example:
        >>> import inspect
        >>> @hides("quant_config")
        ... def linear(x, weight, quant_config=None):
        ...     refuse_arguments("linear", quant_config=quant_config)
        >>> inspect.signature(linear)
        <Signature (x, weight)>
        >>> linear(1, 2, quant_config=3)
        Traceback (most recent call last):
        NotImplementedError: linear(quant_config=…) is not supported: quantised checkpoints are read by maxjax.load,
        into the layers of maxjax.nn.quantized
    """

    def hidden(function: _Function) -> _Function:
        signature = inspect.signature(function)
        shown = [one for name, one in signature.parameters.items() if name not in names]
        vars(function).update(
            __signature__=signature.replace(parameters=shown), _mx_hidden=frozenset(names)
        )
        return function

    return hidden


def hidden_arguments(function: Callable[..., Any]) -> frozenset[str]:
    """The names of the arguments that the signature of a function does not show."""
    return getattr(function, "_mx_hidden", frozenset())


def refuse_arguments(owner: Any, **given: Any) -> None:
    """Checks that arguments that maxjax does not have are None.

    Args:
        owner: the function's name, or the object that is being made.
        given: the values of the arguments, by name; MAX's files may also pass False.

    Raises:
        NotImplementedError: one has another value.
    """
    for name, value in given.items():
        if value is not None and value is not False:
            what = owner if isinstance(owner, str) else type(owner).__name__
            raise NotImplementedError(f"{what}({name}=…) is not supported: {ARGUMENTS[name]}")


_MESH = "arrays are sharded over a jax.sharding.Mesh (Module.to), and XLA inserts the communication"
_EXPERTS = (
    "nn.MoE runs experts; on a mesh with an expert axis (Module.to), XLA sends tokens to them"
)
_KERNEL = "there are no Mojo kernels; write it with jnp, jax.experimental.pallas or jax.ffi"
_STREAM = "XLA schedules the work itself; call the function directly"
_CACHE = "use maxjax.nn.KVCache, which is an argument and a result of the model"
_STATE = "recurrent states are part of maxjax.nn.KVCache; maxjax.nn.ssm has the scans as functions"
_ATTENTION = "use AttentionWithRope; on a mesh, Module.to shards it"
_LATENT = "use a DeepSeek decoder of maxjax.models (models/deepseek.py)"
_PACKED = "quantised checkpoints are read by maxjax.load, into the layers of maxjax.nn.quantized"
_PAGED = (
    "there are no paged caches; maxjax.kernels.attention runs attention over a maxjax.nn.KVCache"
)
_SAMPLING = "maxjax.generate(…, sampling=maxjax.Sampling(…)) chooses tokens"

# Argument that MAX has → advice.
ARGUMENTS = {
    **dict.fromkeys(
        ("quant_config", "shared_experts_quant_config", "o_proj_quant_config", "mxfp8_activations"),
        _PACKED,
    ),
    "_freqs_cis": "a Module holds arrays in Weights only; rotate(x, cos, sin) takes a table of yours",
}

# Path below ``max`` → {names, separated by spaces: advice}, for the names that MAX's model files import. A name
# leaves this table when maxjax has it; tests/test_max_names.py compares the two.
ADVICE: dict[str, dict[str, str]] = {
    "graph": {"KernelLibrary": _KERNEL},
    "graph.ops": {
        "allgather_rms_norm_quant_mxfp6 allgather_rms_norm_quant_mxfp8 bundled_allreduce "
        "distributed_ep distributed_scatter": _MESH,
        "custom inplace_custom": _KERNEL,
        "parallel": _STREAM,
        "constant_external": "a constant with a name is a Weight: maxjax.graph.Weight",
        "non_maximum_suppression": "the shape of its result depends on values; use NumPy",
        "roi_align": "it is not implemented",
    },
    "graph.ops.random": {
        "set_seed normal gaussian uniform": "randomness takes a key, as in jax.random.normal(key, shape)"},
    "nn": {
        "GPTQLinear MoEQuantized": _PACKED,
        "RaggedAttention GGUFQAttentionWithRope GPTQAttentionWithRope DistributedAttentionImpl": _ATTENTION,
        "KVCacheMetrics build_max_lengths_tensors": _CACHE,
        "MinPSampler RejectionSampler RejectionSamplerWithResiduals": _SAMPLING,
        "WeightNormConvTranspose1d": "multiply the norm into the weight of a ConvTranspose1d when it is loaded",
    },
    "nn.attention": {
        "RaggedAttention GGUFQAttentionWithRope GPTQAttentionWithRope "
        "DistributedAttentionImpl DataParallelAttentionWithRope": _ATTENTION,
    },
    "nn.attention.attention_with_rope": {
        "DataParallelAttentionWithRope GGUFQAttentionWithRope "
        "GPTQAttentionWithRope": _ATTENTION},
    "nn.attention.multi_latent_attention_fp8": {
        "LatentAttentionWithRopeFp8 TensorParallelLatentAttentionWithRopeFp8 "
        "DataParallelLatentAttentionWithRopeFp8": _LATENT},
    "nn.comm": {"MulticastPool": _MESH},
    "nn.comm.ep.ep_kernels": {"fused_silu_quantized": _PACKED},
    "nn.kernels": {
        "store_k_scale_cache_ragged cross_attention_ragged "
        "latent_sparse_attention_ragged compress_windows_ragged indexer_score_ragged "
        "mla_kpool_compress mla_kpool_expand_topk mla_kpool_ring_close mla_kpool_seed_tail": _PAGED,
        "mla_decode_graph mla_prefill_decode_graph mla_fp8_index_top_k mla_fp8_index_top_k_physical "
        "mla_fp8_index_top_k_with_physical": _LATENT,
        "block_scales_interleave grouped_matmul_block_scaled "
        "grouped_quantize_nvfp4_row_scaled grouped_quantize_dynamic_block_scaled": _PACKED,
        "_moe_sigmoid_gemv_router_unsupported _moe_sigmoid_gemv_router moe_sink_gate_router": _EXPERTS,
    },
    "driver": {"CompletionFlag DeviceEvent DeviceQueue SymmetricPool batch_inplace_copy copy_pinned_to_destinations "
               "scan_available_devices": "JAX moves arrays and waits for them by itself: jax.device_put"},
    "engine": {"CompiledModel GPUProfilingMode": "InferenceSession.load gives a Model; jax.profiler takes traces"},
    "nn.kv_cache": {
        "BatchCharacteristics KVCacheGroupId KVCacheMemory KVLeafRegion compute_max_seq_len_fitting_in_cache "
        "compute_num_device_blocks estimated_memory_size KVCacheMetrics "
        "build_max_lengths_tensors": _CACHE,
    },
    "nn.kv_cache.cache_params": {
        "KVCacheAssignments KVCacheBufferInterface KVCacheMemory": _CACHE,
    },
    "nn.kv_cache.data_parallelism_utils": {"split_into_groups split_input_row_offsets": _CACHE},
    "nn.kv_cache.metrics": {"KVCacheMetrics": _CACHE},
    "nn.linear": {"GPTQLinear": _PACKED},
    "nn.moe": {
        "MoEQuantized NvMxf4f8Strategy": _PACKED,
    },
    "nn.quant_ops": {"quantized_matmul quantized_fused_qkv_matmul": _PACKED},
    "nn.sampling": {"RejectionSampler RejectionSamplerWithResiduals greedy_acceptance_sampler "
                    "stochastic_acceptance_sampler synthetic_acceptance_sampler "
                    "compute_synthetic_acceptance_base_rate": _SAMPLING},
    "nn.sampling.rejection_sampler": {"AcceptanceSampler _draft_step_seed _reshape_target_logits": _SAMPLING},
    "nn.state_space": {
        "gated_delta_conv1d_verify_fwd kda_decode short_conv_ring "
        "gated_delta_recurrence_verify_ring_fwd kda_chunk kda_chunk_supports_head_dims verify_width_operand "
        "gated_delta_state_fold": _STATE},
    "nn.state_space.kimi_delta": {"KDA_GATE_LOWER_BOUND KdaGateMode KdaStateLayout": _STATE},
}  # fmt: skip
