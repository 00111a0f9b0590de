"""Arguments that a function gets while it is being traced: the Weights that a Graph uses.

``jax.make_jaxpr`` has to know the arguments before it starts, and a Graph meets its Weights only during the trace.
Each therefore begins as an equation without inputs, which belongs to the trace of the whole Graph however deep in
loops, branches and jitted functions the Weight is used; JAX passes it on to them as it does any outer value. When
the trace is finished, these equations become inputs of the jaxpr.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

from jax.core import ShapedArray

from .reroll import is_literal

_NAME = "maxjax_argument"
# The tracers of finished traces, by id: only functions of jax.jit that were traced there still refer to one.
_FINISHED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


@functools.cache
def _primitive() -> Any:
    from jax.extend.core import Primitive  # slow to import: it imports Pallas

    primitive = Primitive(_NAME)
    primitive.def_abstract_eval(lambda *, shape, dtype, number: ShapedArray(shape, dtype))
    return primitive


class TraceArguments:
    """The arguments that are added to the function being traced. It is made where the trace begins.

    Attributes:
        tracers: tracer of each argument; the position is its number.
    """

    def __init__(self) -> None:
        from jax.extend.core import take_current_trace

        with take_current_trace() as self._trace:
            self.tracers: list[Any] = []

    def add(self, shape: tuple[Any, ...], dtype: Any) -> int:
        """Adds an argument, whose sizes may be symbolic ones of ``jax.export``; returns its number."""
        from jax.extend.core import set_current_trace

        with set_current_trace(self._trace):
            tracer = _primitive().bind(shape=shape, dtype=dtype, number=len(self.tracers))
        self.tracers.append(tracer)
        return len(self.tracers) - 1

    def close(self) -> None:
        """Ends the trace. Its tracers are not kept alive from here on."""
        _FINISHED.update((id(tracer), tracer) for tracer in self.tracers)
        self.tracers, self._trace = [], None


def used_arguments(closed: Any) -> set[int]:
    """The numbers of the arguments that the traced jaxpr reads."""
    jaxpr = closed.jaxpr
    atoms = [*jaxpr.outvars, *(atom for equation in jaxpr.eqns for atom in equation.invars)]
    read = {atom for atom in atoms if not is_literal(atom)}
    return {n for n, variable in _variables(jaxpr).items() if variable in read}


def with_arguments(closed: Any, numbers: Sequence[int]) -> Any:
    """The traced jaxpr with the arguments of these numbers as inputs, before the others.

    Raises:
        ValueError: it uses an argument of a trace that is finished.
    """
    if any(id(const) in _FINISHED for const in closed.consts):
        raise ValueError(
            "a function of jax.jit uses a weight that it closed over when it was traced in an earlier Graph, and JAX "
            "keeps that trace: pass the weight or its layer as an argument of the function"
        )
    jaxpr, variables = closed.jaxpr, _variables(closed.jaxpr)
    inputs = [*(variables[number] for number in numbers), *jaxpr.invars]
    left = [equation for equation in jaxpr.eqns if equation.primitive.name != _NAME]
    info = jaxpr.debug_info.with_unknown_names()
    return closed.replace(jaxpr=jaxpr.replace(invars=inputs, eqns=left, debug_info=info))


def _variables(jaxpr: Any) -> dict[int, Any]:
    """The variable of each argument, by its number."""
    made = [equation for equation in jaxpr.eqns if equation.primitive.name == _NAME]
    return {equation.params["number"]: equation.outvars[0] for equation in made}
