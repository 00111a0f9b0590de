"""Evaluates the jaxpr of a Graph with values for the stand-ins of its Weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .reroll import as_function, is_jit, is_literal


def _constant(const: Any, weights: Mapping[int, Any]) -> Any:
    """A constant of a jaxpr; for a stand-in its weight."""
    weight = weights.get(_address(const))
    return const if weight is None else weight.reshape((1, *weight.shape))


def _address(const: Any) -> int:
    """The address of a NumPy constant; 0 for a jax.Array, which is never a stand-in."""
    return 0 if isinstance(const, jax.Array) else np.asarray(const).ctypes.data


def evaluate(closed: Any, args: Sequence[Any], weights: Mapping[int, Any]) -> list[Any]:
    """Evaluates a closed jaxpr, with weights by the addresses of their stand-ins.

    Jitted functions that close over a Weight are inlined.
    """
    jaxpr, given = closed.jaxpr, [*(_constant(const, weights) for const in closed.consts), *args]
    variables = (*jaxpr.constvars, *jaxpr.invars)
    if not any(_holds_weight(equation, weights) for equation in jaxpr.eqns):
        return as_function(jaxpr, jaxpr.eqns, variables, jaxpr.outvars)(*given)
    values = dict(zip(variables, given, strict=True))
    for equation in jaxpr.eqns:
        if _holds_weight(equation, weights):
            operands = [_read(atom, values) for atom in equation.invars]
            results = evaluate(equation.params["jaxpr"], operands, weights)
        else:
            free = list(dict.fromkeys(atom for atom in equation.invars if not is_literal(atom)))
            part = as_function(jaxpr, [equation], free, equation.outvars)
            results = part(*(values[v] for v in free))
        values.update(zip(equation.outvars, results, strict=True))
    return [_read(atom, values) for atom in jaxpr.outvars]


def _read(atom: Any, values: dict[Any, Any]) -> Any:
    return atom.val if is_literal(atom) else values[atom]


def _holds_weight(equation: Any, weights: Mapping[int, Any]) -> bool:
    """Whether an equation calls a jitted function that closes over a Weight, at any depth."""
    if not is_jit(equation):
        return False
    closed = equation.params["jaxpr"]
    return any(_address(const) in weights for const in closed.consts) or any(
        _holds_weight(inner, weights) for inner in closed.jaxpr.eqns
    )
