"""Floor 3. What is asked of jaxprs in more than one place. Above: reroll, program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def is_jit(equation: Any) -> bool:
    """Whether the equation calls a jitted function."""
    return equation.primitive.name in ("jit", "pjit")


def is_literal(atom: Any) -> bool:
    """Whether it is a number written down, and no variable."""
    return hasattr(atom, "val")


def as_function(
    jaxpr: Any, equations: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]
) -> Callable[..., Any]:
    """Some equations of a jaxpr as a function of their free variables."""
    from jax.extend import core as jax_core  # takes a while to import, and only Graphs need it

    part = jaxpr.replace(
        constvars=[], invars=list(inputs), outvars=list(outputs), eqns=list(equations),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )  # fmt: skip
    return jax_core.jaxpr_as_fun(jax_core.ClosedJaxpr(part, []))
