"""A kernel as a JAX primitive that supports every transformation.

An FFI call by itself has no derivative and no batching rule, and XLA gathers its sharded
operands. An :class:`Operation` runs

========================  =====================================================================
where it has a kernel     the kernel of the platform that the program is compiled for: on CPUs in C++
elsewhere, in an export   the jnp form for the platform if there is one, otherwise the definition
on several devices        the kernel on each device's part (``custom_partitioning``; on TPUs
                          ``shard_map``, if the caller knows how the operands are sharded)
under ``vmap``            the kernel with more rows, if its batching rule allows; or the definition
differentiated            the derivative of the definition, in forward and in reverse mode
========================  =====================================================================
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractDevice, Mesh, NamedSharding

from . import explicit, native

try:
    # JAX passes the devices only to primitives that ask for them: custom_partitioning does, but
    # JAX does not see it inside a primitive of ours.
    from jax._src.dispatch import prim_requires_devices_during_lowering
except ImportError:  # then programs for several devices get the jnp form
    prim_requires_devices_during_lowering = set()

# XLA does not call the partitioners of JAX there (jax-ml/jax issue 38196).
_NO_PARTITIONER = ("tpu",)


class Operation:
    """One operation with several operands and several results.

    Args:
        name: name in a jaxpr.
        types: ``(static, *avals)`` → the avals of the results.
        definition: ``(static, *operands)`` → results, in jnp: what every kernel must compute.
        kernels: by platform ("cpu", "cuda", ...), ``(static, *operands)`` → results, for one device's
            part. The kernels for "cpu" use the library of ``native``.
        rule: ``(ranks of the operands)`` → the ArrayMappings of the operands and those of the results:
            axes with the same name are split alike. None: XLA never partitions it, ``division`` does.
        shardings: ``(entries of the operands)`` → consistent ``explicit.Entry`` lists of the operands
            and of the results, and the mesh axes over which results are to be summed.
        batch: ``(static, operands, dims, bind)`` → results with the batch axis first, or None to
            use the definition.
        summand: ``(static, platform)`` → the static arguments of a platform's kernel where its results
            are partial sums that devices add up.
        forms: by platform, ``(static, devices, *operands)`` → results, in jnp, for platforms without a
            kernel where another form is faster than the definition; XLA divides it between ``devices``.
        division: ``(static)`` → the ``explicit.Division`` of the first operand, or None if it is not known;
            then several devices run the definition. It is called only where XLA does not partition kernels.
        lengths: ``(static, shapes of the operands)`` → for each axis of each operand the number of units
            between which it may be split; its shape, unless only some splits are allowed.

    Static arguments must be hashable. ``product.py`` has an example.
    """

    def __init__(
        self,
        name: str,
        types: Callable[..., Sequence[Any]],
        definition: Callable[..., Any],
        kernels: Mapping[str, Callable[..., Any]],
        rule: Any,
        shardings: Any,
        batch: Callable[..., Any] = lambda *_: None,
        summand: Callable[[Any, str], Any] = lambda static, _: static,
        forms: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
        lengths: Callable[..., Any] = lambda static, shapes: shapes,
        division: Callable[[Any], explicit.Division | None] = lambda static: None,
    ):
        self.definition, self.kernels, self.forms = definition, kernels, forms
        self.rule, self.shardings, self.summand, self.batch = rule, shardings, summand, batch
        self._jitted = functools.cache(self._jit)
        self._partitioned = functools.cache(self._custom_partitioning)
        self._name, self._types, self._lengths = name, types, lengths
        self._division = division

    @functools.cached_property
    def primitive(self) -> Any:
        """The primitive that a jaxpr contains; made when it is first used."""
        from jax.extend.core import Primitive  # slow to import: it imports Pallas

        primitive = Primitive(self._name)
        primitive.multiple_results = True
        primitive.def_abstract_eval(
            lambda *avals, static, precision: list(self._types(static, *avals))
        )
        primitive.def_impl(self._eager)
        ad.primitive_jvps[primitive] = self._jvp
        ad.primitive_transposes[primitive] = self._transpose
        batching.primitive_batchers[primitive] = self._batch
        mlir.register_lowering(primitive, self._lower_definition)
        for platform in self.kernels:
            lower = functools.partial(self._lower_kernel, platform)
            mlir.register_lowering(primitive, lower, platform=platform)
        for platform in self.forms:
            lower = functools.partial(self._lower_form, platform)
            mlir.register_lowering(primitive, lower, platform=platform)
        prim_requires_devices_during_lowering.add(primitive)
        return primitive

    @functools.cached_property
    def _part(self) -> Any:
        """The primitive that runs a platform's kernel on one device's part of the operands."""
        from jax.extend.core import Primitive

        part = Primitive(f"{self._name}_part")
        part.multiple_results = True
        part.def_abstract_eval(lambda *avals, static, platform: list(self._types(static, *avals)))
        mlir.register_lowering(part, self._lower_part)
        return part

    def __call__(self, operands: Sequence[Any], static: Any) -> list[jax.Array]:
        """The results. On an Explicit mesh the call must be inside ``explicit.automatic``."""
        precision = matmul_precision()
        return self.primitive.bind(*same_varying(operands), static=static, precision=precision)

    def _defined(self, static: Any, precision: Any) -> Callable[..., list[Any]]:
        """The definition with the matmul precision of the place where the operation was called."""
        return with_precision(precision, lambda *operands: list(self.definition(static, *operands)))

    # -- eager code, derivatives, batches

    def _jit(self, static: Any, precision: Any) -> Any:
        return jax.jit(functools.partial(self.primitive.bind, static=static, precision=precision))

    def _eager(self, *operands: Any, static: Any, precision: Any) -> Any:
        flags: Any = jax.config
        if flags.jax_debug_nans or flags.jax_debug_infs:
            # Where a jitted function makes a NaN, JAX runs its operations one by one to find the one
            # that does. If this function called a jitted one here, that would never end.
            return self._defined(static, precision)(*operands)
        # It runs as one operation under jax.disable_jit() too.
        with jax.disable_jit(False):
            return self._jitted(static, precision)(*operands)

    def _jvp(self, primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

        def along(*values: Any) -> Any:
            operands = list(primals)
            for i, value in zip(moving, values, strict=True):
                operands[i] = value
            return self._defined(**params)(*operands)

        return jax.jvp(along, [primals[i] for i in moving], [tangents[i] for i in moving])

    def _transpose(self, cotangents: Sequence[Any], *operands: Any, **params: Any) -> Any:
        moving = [i for i, operand in enumerate(operands) if ad.is_undefined_primal(operand)]

        def along(*values: Any) -> Any:
            known = list(operands)
            for i, value in zip(moving, values, strict=True):
                known[i] = value
            return self._defined(**params)(*known)

        avals = [operands[i].aval for i in moving]
        results = jax.linear_transpose(along, *avals)(list(map(ad.instantiate_zeros, cotangents)))
        found = dict(zip(moving, results, strict=True))
        return [found.get(i) for i in range(len(operands))]

    def _batch(
        self, operands: Sequence[Any], dims: Sequence[Any], *, static: Any, precision: Any
    ) -> Any:
        bind = functools.partial(self.primitive.bind, static=static, precision=precision)
        outputs = self.batch(static, operands, dims, bind)
        if outputs is None:
            outputs = jax.vmap(self._defined(static, precision), tuple(dims))(*operands)
        return outputs, [0] * len(outputs)

    # -- lowering

    def _lower_definition(self, ctx: Any, *operands: Any, **params: Any) -> Any:
        return mlir.lower_fun(self._defined(**params), multiple_results=True)(ctx, *operands)

    def _lower_form(self, platform: str, ctx: Any, *operands: Any, **params: Any) -> Any:
        if any(0 in aval.shape for aval in ctx.avals_out):
            return self._lower_definition(ctx, *operands, **params)
        form = functools.partial(self.forms[platform], params["static"], _device_count(ctx))
        run = with_precision(params["precision"], form)
        return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)

    def _lower_kernel(self, platform: str, ctx: Any, *operands: Any, **params: Any) -> Any:
        # Another process that runs an exported program may not have the library.
        exported = ctx.module_context.lowering_parameters.for_export
        empty = any(0 in aval.shape for aval in ctx.avals_out)
        absent = platform == "cpu" and native.library() is None
        if exported or empty or absent or not _devices_known(ctx):
            return self._lower_definition(ctx, *operands, **params)
        if platform in _NO_PARTITIONER or self.rule is None:
            return self._lower_divided(platform, ctx, *operands, **params)
        static = params["static"]
        call = self._partitioned(platform, static, tuple(len(a.shape) for a in ctx.avals_in))
        # JAX's compilation cache compares neither the partitioner nor what it closes over: without
        # this number a program with other static arguments would have the same key.
        key = np.uint32(zlib.crc32(repr((self._name, platform, static)).encode()))
        keyed = functools.partial(call, key)
        return mlir.lower_fun(keyed, multiple_results=True)(ctx, *operands)

    def _lower_divided(self, platform: str, ctx: Any, *operands: Any, **params: Any) -> Any:
        """The kernel on each device's part, where it is known how the operands are sharded."""
        static = params["static"]
        run: Any = functools.partial(self._part.bind, platform=platform, static=static)
        if _device_count(ctx) > 1:
            division = self._division(static)
            if division is None:
                return self._lower_definition(ctx, *operands, **params)
            shapes = [aval.shape for aval in ctx.avals_in]
            rest = [[()] * len(shape) for shape in shapes[1:]]
            parts, results, summed = self.shardings([division.entries, *rest])
            if summed or not all(map(division.divides, shapes, parts)):
                return self._lower_definition(ctx, *operands, **params)
            run = division.on_parts(run, parts, results)
        return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)

    def _lower_part(self, ctx: Any, *operands: Any, static: Any, platform: str) -> Any:
        # One device's part is on no mesh: if the program's mesh stayed set, JAX would add shardings
        # to each operation inside, which XLA for GPUs does not remove at this stage.
        nowhere = jax.sharding.AbstractMesh((), (), abstract_device=_device(ctx))
        with jax.sharding.use_abstract_mesh(nowhere):
            avals = [ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]
            kernel = functools.partial(self.kernels[platform], static)
            lower = mlir.lower_fun(kernel, multiple_results=True)
            return lower(ctx.replace(avals_in=avals), *operands)

    def _custom_partitioning(self, platform: str, static: Any, ranks: tuple[int, ...]) -> Any:
        run = functools.partial(self._part.bind, platform=platform)
        call = custom_partitioning(lambda _, *operands: tuple(run(*operands, static=static)))
        operands, results = self.rule(ranks)
        call.def_partition(
            partition=functools.partial(self._partition, platform, static),
            infer_sharding_from_operands=lambda mesh, args, _: self._named_shardings(
                static, mesh, args
            )[1],
            sharding_rule=SdyShardingRule((ArrayMapping(), *operands), results),
            # Some shardings have no PartitionSpec: XLA may split a result over half of a mesh axis.
            decode_shardings=False,
        )
        return call

    def _named_shardings(self, static: Any, mesh: Any, args: Sequence[Any]) -> Any:
        args = args[1:]  # after the key
        lengths = self._lengths(static, [a.shape for a in args])
        specs = [
            explicit.entries_of(a.sharding, mesh, n) for a, n in zip(args, lengths, strict=True)
        ]
        operands, results, summed = self.shardings(specs)
        named = lambda entries: NamedSharding(mesh, explicit.spec_of(entries))
        return tuple(map(named, [[], *operands])), tuple(map(named, results)), summed

    def _partition(
        self, platform: str, static: Any, mesh: Any, args: Sequence[Any], results: Sequence[Any]
    ) -> Any:
        run = functools.partial(self._part.bind, platform=platform)
        operands, outputs, summed = self._named_shardings(static, mesh, args)
        dtypes = [r.dtype for r in results]

        def part(_: Any, *arrays: Any) -> Any:
            if not summed:
                return tuple(run(*arrays, static=static))
            # On no mesh, for a mesh with Explicit axes would be part of the arrays' types: since JAX 0.11 the
            # all-reduce then adds numbers with shardings, which XLA refuses.
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                found = run(*arrays, static=self.summand(static, platform))
                sums = jax.lax.psum(tuple(found), summed)
                return tuple(y.astype(dtype) for y, dtype in zip(sums, dtypes, strict=True))

        return mesh, part, outputs, operands


def has_static_shapes(*arrays: Any) -> bool:
    """Whether no array has a symbolic size (``jax.export``), for which there are no kernels."""
    return all(isinstance(n, int) for array in arrays for n in array.shape)


def types_of(arrays: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes alone, as FFI calls take those of their results."""
    return [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]


def matmul_precision() -> Any:
    """The current value of ``jax.default_matmul_precision``."""
    flags: Any = jax.config
    return flags.jax_default_matmul_precision


def with_precision(precision: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, traced with this matmul precision instead of the current one."""

    def run(*operands: Any) -> Any:
        with jax.default_matmul_precision(precision):
            return function(*operands)

    return run


def _devices_known(ctx: Any) -> bool:
    """Whether the program can be partitioned: it is for one device, or for a known mesh."""
    where = ctx.module_context.axis_context
    if isinstance(where, mlir.SPMDAxisContext):
        # Inside shard_map. If that is over some mesh axes only, XLA would have to partition over
        # the others, which it cannot do there.
        return len(where.manual_axes) in (0, len(where.mesh.axis_names))
    if not isinstance(where, mlir.ShardingContext):
        return True
    if where.device_assignment is None:
        return where.num_devices == 1
    return len(where.device_assignment) == 1 or where.abstract_mesh is not None


# What a program for GPUs is lowered for on a machine without one: since JAX 0.11 Triton's lowering asks for a kind.
_SOME_GPU = AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")


def _device(ctx: Any) -> Any:
    """The kind of device that a program is compiled for, as far as it is known."""
    where = ctx.module_context.axis_context
    devices: Any = getattr(where, "device_assignment", None)
    if isinstance(where, mlir.SPMDAxisContext) and isinstance(where.mesh, Mesh):
        devices = where.mesh.devices.flat
    if devices is None:
        return None
    first = next(iter(devices))
    if first.platform == "cpu" and "cuda" in ctx.module_context.platforms:
        return _SOME_GPU
    return abstract_device(first)


def abstract_device(device: Any) -> AbstractDevice:
    """The kind of a device."""
    cores = getattr(device, "core_count", getattr(device, "num_cores", None))
    return AbstractDevice(device.device_kind, cores, device.platform)


def _device_count(ctx: Any) -> int:
    """The number of devices between which XLA divides the operands of a primitive."""
    where = ctx.module_context.axis_context
    if isinstance(where, mlir.SPMDAxisContext):
        sizes = where.mesh.shape.items()
        return math.prod(size for name, size in sizes if name not in where.manual_axes)
    return where.num_devices if isinstance(where, mlir.ShardingContext) else 1


def by_rows(axes: Sequence[str], results: Sequence[int], state: int) -> tuple[Any, Any]:
    """``rule`` and ``shardings`` of an operation on a stack of states, where only the batch axis may be split.

    Args:
        axes: for each operand a string with one letter for each axis; "b" is the batch axis.
        results: for each result the index of the operand whose axes it has.
        state: index of the operand with the states. It is by far the largest: the others are split as it is.
    """

    def rule(_: Sequence[int]) -> Any:
        operands = tuple(ArrayMapping(*names) for names in axes)
        return operands, tuple(operands[i] for i in results)

    def shardings(specs: Sequence[Sequence[explicit.Entry]]) -> Any:
        rows = specs[state][axes[state].index("b")]
        operands = [[rows if name == "b" else () for name in names] for names in axes]
        return operands, [operands[i] for i in results], ()

    return rule, shardings


def same_varying(operands: Sequence[Any]) -> list[Any]:
    """The operands, cast inside ``shard_map`` to vary over the same axes, as a primitive requires."""
    varying = [_varying(jax.typeof(a)) for a in operands]
    every = frozenset().union(*varying)
    return [
        a if v == every else jax.lax.pcast(a, tuple(every - v), to="varying")
        for a, v in zip(operands, varying, strict=True)
    ]


def varying_with(start: Any, *others: Any) -> Any:
    """The initial carry of a loop, cast inside ``shard_map`` to vary over the mesh axes of ``others`` too.

    ``lax.scan`` and ``lax.fori_loop`` require that the type of the carry does not change.
    """
    leaves, structure = jax.tree.flatten(start)
    cast = same_varying([*leaves, *jax.tree.leaves(others)])
    return structure.unflatten(cast[: len(leaves)])


def _varying(aval: Any) -> frozenset[str]:
    """The mesh axes over which a value inside ``shard_map`` varies."""
    kind = getattr(aval, "manual_axis_type", None)  # `vma` in some versions of JAX
    return frozenset(getattr(kind, "varying", None) or getattr(aval, "vma", None) or ())
