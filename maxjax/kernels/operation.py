"""A kernel as a JAX primitive that supports every transformation.

An FFI call by itself has no derivative and no batching rule, and XLA gathers its sharded
operands. An :class:`Operation` runs

========================  =====================================================================
on a CPU                  the C++ kernel, through ``jax.ffi``
elsewhere, in an export   the jnp form, which is its definition
on several devices        the kernel on each device's part (``custom_partitioning``)
under ``vmap``            the kernel with more rows, if its batching rule allows; or the jnp form
differentiated            the derivative of the jnp form, in forward and in reverse mode
========================  =====================================================================
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding

from . import explicit, native

try:
    # JAX passes the devices only to primitives that ask for them: custom_partitioning does, but
    # JAX does not see it inside a primitive of ours.
    from jax._src.dispatch import prim_requires_devices_during_lowering
except ImportError:  # then programs for several devices get the jnp form
    prim_requires_devices_during_lowering = set()


class Operation:
    """One operation with several operands and several results.

    Args:
        name: name in a jaxpr.
        types: ``(static, *avals)`` → the avals of the results.
        definition: ``(static, *operands)`` → results, in jnp.
        kernel: ``(static, *operands)`` → results, by an FFI call on one device's part.
        rule: ``(ranks of the operands)`` → a SdyShardingRule, which axes are split alike.
        shardings: ``(entries of the operands)`` → entries of the operands and of the results,
            consistent with each other, and the mesh axes over which results are to be summed.
        batch: ``(static, operands, dims, bind)`` → results with the batch axis first, or None to
            use the definition.
        summand: ``(static)`` → the static arguments of the kernel if its results will be summed.

    Static arguments must be hashable. ``product.py`` has an example.
    """

    def __init__(
        self,
        name: str,
        types: Callable[..., Sequence[Any]],
        definition: Callable[..., Any],
        kernel: Callable[..., Any],
        rule: Callable[..., Any],
        shardings: Callable[..., Any],
        batch: Callable[..., Any],
        summand: Callable[[Any], Any] = lambda static: static,
    ):
        self.definition, self.kernel = definition, kernel
        self.rule, self.shardings, self.summand, self.batch = rule, shardings, summand, batch
        self._jitted = functools.cache(self._jit)
        self._partitioned = functools.cache(self._custom_partitioning)
        self._name, self._types = name, types

    @functools.cached_property
    def primitive(self) -> Any:
        """The primitive that a jaxpr contains; made when it is first used."""
        from jax.extend.core import Primitive  # slow to import: it imports Pallas

        primitive = Primitive(self._name)
        primitive.multiple_results = True
        primitive.def_abstract_eval(lambda *avals, static: list(self._types(static, *avals)))
        primitive.def_impl(self._eager)
        ad.primitive_jvps[primitive] = self._jvp
        batching.primitive_batchers[primitive] = self._batch
        mlir.register_lowering(primitive, self._lower_definition)
        mlir.register_lowering(primitive, self._lower_cpu, platform="cpu")
        prim_requires_devices_during_lowering.add(primitive)
        return primitive

    def __call__(self, operands: Sequence[Any], static: Any) -> list[jax.Array]:
        """The results; arrays on an Explicit mesh come through ``explicit.automatic`` only."""
        return self.primitive.bind(*_same_varying(operands), static=static)

    # -- eager code, derivatives, batches

    def _jit(self, static: Any) -> Any:
        return jax.jit(functools.partial(self.primitive.bind, static=static))

    def _eager(self, *operands: Any, static: Any) -> Any:
        # Under jax.disable_jit() too it is one operation.
        with jax.disable_jit(False):
            return self._jitted(static)(*operands)

    def _jvp(self, primals: Sequence[Any], tangents: Sequence[Any], *, static: Any) -> Any:
        moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

        def along(*values: Any) -> Any:
            operands = list(primals)
            for i, value in zip(moving, values, strict=True):
                operands[i] = value
            return list(self.definition(static, *operands))

        return jax.jvp(along, [primals[i] for i in moving], [tangents[i] for i in moving])

    def _batch(self, operands: Sequence[Any], dims: Sequence[Any], *, static: Any) -> Any:
        bind = functools.partial(self.primitive.bind, static=static)
        outputs = self.batch(static, operands, dims, bind)
        if outputs is None:
            define = functools.partial(self.definition, static)
            outputs = list(jax.vmap(define, tuple(dims))(*operands))
        return outputs, [0] * len(outputs)

    # -- lowering

    def _lower_definition(self, ctx: Any, *operands: Any, static: Any) -> Any:
        define = functools.partial(self.definition, static)
        return mlir.lower_fun(define, multiple_results=True)(ctx, *operands)

    def _lower_cpu(self, ctx: Any, *operands: Any, static: Any) -> Any:
        # Another process that runs an exported program may not have the library.
        exported = ctx.module_context.lowering_parameters.for_export
        empty = any(0 in aval.shape for aval in ctx.avals_out)
        if exported or empty or native.library() is None or not _devices_known(ctx):
            return self._lower_definition(ctx, *operands, static=static)
        call = self._partitioned(static, tuple(len(a.shape) for a in ctx.avals_in))
        return mlir.lower_fun(call, multiple_results=True)(ctx, *operands)

    def _custom_partitioning(self, static: Any, ranks: tuple[int, ...]) -> Any:
        call = custom_partitioning(lambda *operands: tuple(self.kernel(static, *operands)))
        call.def_partition(
            partition=functools.partial(self._partition, static),
            infer_sharding_from_operands=lambda mesh, args, _: self._named_shardings(mesh, args)[1],
            sharding_rule=self.rule(ranks),
            # Some have no PartitionSpec: XLA may split a result over half of a mesh axis.
            decode_shardings=False,
        )
        return call

    def _named_shardings(self, mesh: Any, args: Sequence[Any]) -> Any:
        specs = [explicit.entries_of(a.sharding, mesh, a.shape) for a in args]
        operands, results, summed = self.shardings(specs)
        named = lambda entries: NamedSharding(mesh, explicit.spec(entries))
        return tuple(map(named, operands)), tuple(map(named, results)), summed

    def _partition(
        self, static: Any, mesh: Any, args: Sequence[Any], results: Sequence[Any]
    ) -> Any:
        operands, outputs, summed = self._named_shardings(mesh, args)
        dtypes = [r.dtype for r in results]

        def part(*arrays: Any) -> Any:
            if not summed:
                return tuple(self.kernel(static, *arrays))
            sums = jax.lax.psum(tuple(self.kernel(self.summand(static), *arrays)), summed)
            return tuple(y.astype(dtype) for y, dtype in zip(sums, dtypes, strict=True))

        return mesh, part, outputs, operands


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


def _same_varying(operands: Sequence[Any]) -> list[Any]:
    """The operands, cast inside ``shard_map`` to vary over the same axes, as a primitive requires."""
    varying = [_varying(jax.typeof(a)) for a in operands]
    every = frozenset().union(*varying)
    return [
        a if v == every else jax.lax.pcast(a, tuple(every - v), to="varying")
        for a, v in zip(operands, varying, strict=True)
    ]


def _varying(aval: Any) -> frozenset[str]:
    """The mesh axes over which a value inside ``shard_map`` varies."""
    kind = getattr(aval, "manual_axis_type", None)  # `vma` in some versions of JAX
    return frozenset(getattr(kind, "varying", None) or getattr(aval, "vma", None) or ())
