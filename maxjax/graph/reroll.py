"""Loop rerolling: consecutive calls of one jitted layer become one ``lax.scan``.

A loop over the layers of a model is unrolled when it is traced: its jaxpr holds one call for
each layer, and compile time grows accordingly. If the calls differ only in a layer index, which selects
the layer's weights from stacked ones, :func:`reroll` restores the loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def is_jit(equation: Any) -> bool:
    """Whether the equation calls a jitted function."""
    return equation.primitive.name in ("jit", "pjit")


def is_literal(atom: Any) -> bool:
    """Whether an atom of a jaxpr is a literal, not a variable."""
    return hasattr(atom, "val")


def as_function(
    jaxpr: Any, equations: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]
) -> Callable[..., Any]:
    """Some equations of a jaxpr as a function of their free variables."""
    from jax.extend import core as jax_core  # slow to import, and only Graphs need it

    part = jaxpr.replace(
        constvars=[], invars=list(inputs), outvars=list(outputs), eqns=list(equations),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )  # fmt: skip
    return jax_core.jaxpr_as_fun(jax_core.ClosedJaxpr(part, []))


def reroll(closed: Any, name: str = "_call_at") -> Any:
    """The same program with each run of calls of the jitted function ``name`` as one loop.

    The operands of a call are the stacked weights, then the layer's index as an int32 literal, then the
    other inputs. Calls form a run if they have the same weights and consecutive indices, and if each other
    input is either independent of the run or the same output of the previous call. Equations between
    the calls are moved before or after the loop; those with effects end a run.

    Args:
        closed: a ``jax.extend.core.ClosedJaxpr``.
        name: name of the jitted function.

    Returns:
        A ClosedJaxpr with the same inputs, outputs and constants; ``closed`` itself if it has no run.
    """
    jaxpr = closed.jaxpr
    if sum(_is_call(equation, name) for equation in jaxpr.eqns) < 2:
        return closed
    deduplicated = _Writer()
    first: dict[Any, Any] = {}
    for variable, const in zip(jaxpr.constvars, closed.consts, strict=True):
        deduplicated.rename([variable], [first.setdefault(_constant_key(const), variable)])
    deduplicated.write(jaxpr.eqns)
    outputs = [deduplicated.name(atom) for atom in jaxpr.outvars]
    equations = _live(deduplicated.equations, outputs)
    runs = _runs(equations, name)
    if not runs:
        return closed
    writer = _rolled(equations, outputs, runs)
    outputs = [writer.name(atom) for atom in outputs]
    equations = _live(writer.equations, outputs)
    return closed.replace(jaxpr=jaxpr.replace(eqns=equations, outvars=outputs))


# -- finding runs


class _Run:
    """A run of calls, and the equations between them that depend on a call."""

    def __init__(self, place: int, call: Any):
        self.calls, self.places = [call], [place]
        self.carried: dict[int, int] = {}  # operand → which output of the previous call
        self.dependent: set[int] = set()  # indices of equations that depend on a call
        self._made = set(call.outvars)

    def append(self, place: int, call: Any) -> bool:
        """Adds a call if it continues the run; returns whether it does."""
        last = self.calls[-1]
        position, index = _layer(last)
        if not _same_function(last, call) or _layer(call) != (position, index + 1):
            return False
        operands = list(zip(last.invars, call.invars, strict=True))
        if any(a is not b for a, b in operands[:position]):
            return False
        outputs = {variable: q for q, variable in enumerate(last.outvars)}
        fed = {p: a for p, a in enumerate(call.invars) if not self._made.isdisjoint(_free([a]))}
        carried = {p: outputs[a] for p, a in fed.items() if a in outputs}
        if len(carried) < len(fed) or (len(self.calls) > 1 and carried != self.carried):
            return False
        if any(a.aval != b.aval for a, b in operands):
            return False
        self.calls.append(call)
        self.places.append(place)
        self.carried = carried
        self._made.update(call.outvars)
        return True

    def skip(self, place: int, equation: Any) -> None:
        """Records an equation that is not a call."""
        if not self._made.isdisjoint(_free(equation.invars)):
            self.dependent.add(place)
            self._made.update(equation.outvars)


def _runs(equations: Sequence[Any], name: str) -> list[_Run]:
    runs: list[_Run] = []
    run = None
    for place, equation in enumerate(equations):
        if equation.effects:
            run = None  # nothing may be moved past an effect
        elif _is_call(equation, name):
            if run is None or not run.append(place, equation):
                run = _Run(place, equation)
                runs.append(run)
        elif run is not None:
            run.skip(place, equation)
    return [run for run in runs if len(run.calls) > 1]


def _is_call(equation: Any, name: str) -> bool:
    return (
        is_jit(equation)
        and equation.params["name"] == name
        and not equation.effects
        and _layer(equation) is not None
    )


def _layer(call: Any) -> Any:
    """(position of the operand that is the layer's index, the index), or None if there is none."""
    for position, atom in enumerate(call.invars):
        if is_literal(atom):
            fits = atom.aval.shape == () and atom.aval.dtype == np.int32
            return (position, int(np.asarray(atom.val))) if fits else None
    return None


def _free(atoms: Iterable[Any]) -> list[Any]:
    """The variables among the atoms; literals cannot be hashed."""
    return [atom for atom in atoms if not is_literal(atom)]


# -- what is the same


def _atom_key(atom: Any) -> Any:
    if not is_literal(atom):
        return atom
    return atom.aval, np.asarray(atom.val).tobytes() if np.ndim(atom.val) == 0 else id(atom.val)


def _constant_key(const: Any) -> Any:
    """A key that is equal for constants with the same memory."""
    if isinstance(const, jax.Array):
        return id(const)
    array = np.asarray(const)
    return array.ctypes.data, array.dtype, array.shape, array.strides


def _equation_key(equation: Any) -> Any:
    """A key that is equal for equations with equal results; None if they have effects."""
    key = (
        equation.primitive,
        equation.ctx,
        frozenset(equation.params.items()),
        tuple(map(_atom_key, equation.invars)),
        tuple((type(v), v.aval) for v in equation.outvars),  # a DropVar cannot be read
    )
    return None if equation.effects else key


def _same_function(a: Any, b: Any) -> bool:
    """Whether two calls are of the same jaxpr, or of jaxprs that compute the same.

    They do if, given the same inputs, all their equations and outputs are equal.
    """
    ours, theirs = a.params["jaxpr"], b.params["jaxpr"]
    if a.ctx is not b.ctx or a.params | {"jaxpr": ours} != b.params | {"jaxpr": ours}:
        return False
    if ours is theirs:
        return True
    if list(map(_constant_key, ours.consts)) != list(map(_constant_key, theirs.consts)):
        return False
    if ours.in_avals != theirs.in_avals or ours.out_avals != theirs.out_avals:
        return False
    writer, (x, y) = _Writer(), (ours.jaxpr, theirs.jaxpr)
    writer.rename((*y.constvars, *y.invars), (*x.constvars, *x.invars))
    writer.write((*x.eqns, *y.eqns))
    results = [[_atom_key(writer.name(atom)) for atom in jaxpr.outvars] for jaxpr in (x, y)]
    return results[0] == results[1]


# -- writing equations again


class _Writer:
    """A list of equations in which equal ones are written only once."""

    def __init__(self) -> None:
        self.equations: list[Any] = []
        self.definitions: dict[Any, Any] = {}  # variable → the equation that defines it
        self._names: dict[Any, Any] = {}  # variable → the one that replaces it
        self._known: dict[Any, Any] = {}

    def name(self, atom: Any) -> Any:
        return atom if is_literal(atom) else self._names.get(atom, atom)

    def rename(self, variables: Iterable[Any], atoms: Iterable[Any]) -> None:
        self._names.update(zip(variables, map(self.name, atoms), strict=True))

    def renamed(self, equation: Any) -> Any:
        return equation.replace(invars=[self.name(atom) for atom in equation.invars])

    def write(self, equations: Iterable[Any]) -> None:
        for equation in map(self.renamed, equations):
            try:
                known = self._known.setdefault(_equation_key(equation) or id(equation), equation)
            except TypeError:  # a parameter is not hashable
                known = equation
            if known is not equation:
                self.rename(equation.outvars, known.outvars)
            else:
                self.equations.append(equation)
                self.definitions.update(dict.fromkeys(equation.outvars, equation))


def _live(equations: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """The equations that outputs and effects depend on."""
    needed = set(_free(outputs))
    kept = []
    for equation in reversed(equations):
        if equation.effects or not needed.isdisjoint(equation.outvars):
            kept.append(equation)
            needed.update(_free(equation.invars))
    return kept[::-1]


def _rolled(equations: Sequence[Any], outputs: Sequence[Any], runs: Sequence[_Run]) -> _Writer:
    """The equations, with each run replaced by a loop."""
    writer = _Writer()
    reads = Counter(a for atoms in (*(e.invars for e in equations), outputs) for a in _free(atoms))
    written = 0
    for run in runs:
        end = run.places[-1] + 1
        dependent = [i for i in range(written, end) if i in run.dependent]
        moved = {*run.places, *dependent}
        writer.write(equations[i] for i in range(written, end) if i not in moved)
        results = _results(run, equations[run.places[0] :], reads)
        run.calls = [writer.renamed(call) for call in run.calls]
        loop, operands = _loop(run, results, writer.definitions)
        if loop.consts or list(loop.out_avals) != [variable.aval for variable in results]:
            writer.write(run.calls)  # a loop would change a type; no case is known
        else:
            writer.rename(loop.jaxpr.invars, operands)
            writer.write(loop.jaxpr.eqns)
            writer.rename(results, loop.jaxpr.outvars)
        writer.write(equations[i] for i in dependent)
        written = end
    writer.write(equations[written:])
    return writer


def _results(run: _Run, after: Sequence[Any], reads: Counter) -> dict[Any, Any]:
    """The outputs of a run that are used after it: variable → (output, call; None for all calls).

    The outputs of all layers are often stacked, which is the form in which a scan returns them.
    """
    rows = [call.outvars for call in run.calls]
    columns = {column: q for q, column in enumerate(zip(*rows, strict=True))}
    own = Counter(a for call in run.calls for a in _free(call.invars))
    results: dict[Any, Any] = {}
    for equation in after:
        if equation.primitive.name == "stack" and equation.params["axis"] == 0:
            q = columns.get(tuple(map(_atom_key, equation.invars)))
            if q is not None:
                results[equation.outvars[0]] = q, None
                own.update(equation.invars)
    for j, row in enumerate(rows):
        results |= {v: (q, j) for q, v in enumerate(row) if reads[v] > own[v]}
    return results


# -- the loop


def _loop(run: _Run, results: dict[Any, Any], definitions: dict[Any, Any]) -> tuple[Any, list[Any]]:
    """(the loop as a ClosedJaxpr from its operands to its results, the operands)."""
    first, count, carried = run.calls[0], len(run.calls), run.carried
    position, start = _layer(first)
    columns = _columns(run, position, definitions)
    finals = {q: p for p, q in carried.items()}
    # Outputs that are used only of the last call are the final carry; others are stacked.
    stacked = {q for q, j in results.values() if j != count - 1 or q not in finals}
    constant = {p: [atom] for p, atom in enumerate(first.invars) if p not in columns}
    read = [*constant.values(), *(atoms for atoms, _ in columns.values())]
    operands = list(dict.fromkeys(atom for atoms in read for atom in _free(atoms)))
    inner = first.params["jaxpr"].jaxpr
    layer = as_function(inner, [first.replace(invars=inner.invars)], inner.invars, first.outvars)

    def loop(*arrays: Any) -> list[Any]:
        known = dict(zip(operands, arrays, strict=True))

        def values(atoms: list[Any]) -> list[Any]:
            return [atom.val if is_literal(atom) else known[atom] for atom in atoms]

        def body(carry: Any, x: Any) -> Any:
            inputs = shared | carry | x
            outputs = layer(*(inputs[p] for p in sorted(inputs)))
            return {p: outputs[q] for p, q in carried.items()}, {q: outputs[q] for q in stacked}

        shared = {p: values(atoms)[0] for p, atoms in constant.items()}
        xs = {p: _column(values(atoms), at, count) for p, (atoms, at) in columns.items()}
        xs[position] = jnp.arange(start, start + count, dtype=np.int32)
        last, ys = lax.scan(body, {p: shared[p] for p in carried}, xs)
        return [
            ys[q] if j is None
            else lax.index_in_dim(ys[q], j, keepdims=False) if q in stacked
            else last[finals[q]]
            for q, j in results.values()
        ]  # fmt: skip

    return jax.make_jaxpr(loop)(*(variable.aval for variable in operands)), operands


# -- operands that differ from call to call


def _columns(run: _Run, position: int, definitions: dict[Any, Any]) -> dict[int, Any]:
    """Operand → ([an atom for each call], None), or ([array], first row) if they are rows of an array."""
    columns: dict[int, Any] = {}
    for p, atoms in enumerate(zip(*(call.invars for call in run.calls), strict=True)):
        if p == position or p in run.carried or len(set(map(_atom_key, atoms))) == 1:
            continue
        rows = [None if is_literal(atom) else _row(atom, definitions) for atom in atoms]
        array, at = rows[0] or (None, 0)
        consecutive = array and rows == [(array, at + j) for j in range(len(rows))]
        columns[p] = ([array], at) if consecutive else (list(atoms), None)
    return columns


def _column(values: list[Any], at: int | None, count: int) -> Any:
    if at is None:
        return jnp.stack(values)
    (array,) = values
    return array if array.shape[0] == count else lax.slice_in_dim(array, at, at + count)


def _row(variable: Any, definitions: dict[Any, Any]) -> tuple[Any, int] | None:
    """(array, i) if the variable is ``array[i]``."""
    definition = definitions.get(variable)
    if definition is None or not definition.invars:
        return None
    kind, operand = definition.primitive.name, definition.invars[0]
    if kind == "unstack" and definition.params["axis"] == 0:
        return operand, definition.outvars.index(variable)
    if kind == "gather":
        return _gathered_row(definition, definitions)
    if kind not in ("squeeze", "reshape") or is_literal(operand):
        return None
    sliced = definitions.get(operand)
    if sliced is None or sliced.primitive.name != "slice":
        return None
    (array,) = sliced.invars
    # It must be a single row, complete along the other axes.
    fits = operand.aval.shape == (1, *array.aval.shape[1:]) == (1, *variable.aval.shape)
    return (array, sliced.params["start_indices"][0]) if fits else None


def _gathered_row(definition: Any, definitions: dict[Any, Any]) -> tuple[Any, int] | None:
    """:func:`_row` for a gather, which indexing becomes if a size is symbolic."""
    array, indices = definition.invars
    index, size = definitions.get(indices), array.aval.shape
    numbers = definition.params["dimension_numbers"]
    if index is None or index.primitive.name != "broadcast_in_dim" or indices.aval.shape != (1,):
        return None
    if not numbers.collapsed_slice_dims == numbers.start_index_map == (0,):
        return None
    if definition.params["slice_sizes"] != (1, *size[1:]) or not is_literal(index.invars[0]):
        return None
    at = int(np.asarray(index.invars[0].val))
    return (array, at) if isinstance(size[0], int) and 0 <= at < size[0] else None
