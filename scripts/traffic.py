"""Counts the bytes that a compiled program reads from and writes to the memory of one device.

``moved`` lists them by operation, ``needed`` is what a step cannot do without: the weights on the device, of
the experts those that are chosen, and the cache. ``scripts/aot.py`` prints both.

An array in memory counts once for each operation that reads or writes it; arrays that a TPU keeps in VMEM do
not count. A fusion reads of an operand only the slices that it takes. A Pallas kernel with an index as operand
reads one matrix of stacked weights, or one for each block of rows that has an expert, and one layer of
a cache. A loop counts as often as it runs; decoding counts one token. Where experts are chosen while
the program runs, numbers are expected values for tokens that choose independently and evenly: of blocks of
rows, those that have an expert; of branches, those that compute one; a loop that repeats until all rows are
computed runs once. Of other branches the one counts that moves most.

Nothing is known about caches: data that two operations read counts twice, also if the second finds it
in the L2 cache of a GPU.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from scripts.hlo import (
    COLLECTIVES,
    ELEMENTWISE,
    NO_KERNELS,
    Data,
    Follow,
    Instruction,
    Program,
    Value,
    arrays,
    in_vmem,
    nbytes,
    trips,
    tuple_parts,
)

# Operations that move no data: other lines have what they stand for.
_FREE = frozenset({
    "add-dependency", "after-all", "async-start", "async-update", "bitcast", "call", "conditional",
    "constant", "domain", "get-tuple-element", "optimization-barrier", "parameter", "partition-id",
    "replica-id", "tuple", "while",
})  # fmt: skip
_SLICES = ("dynamic-slice", "slice", "gather")
# The operand of an update in place that has the new data.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
# In a fusion, an operation of which a part is computed from the same part of its operands.
_BY_PART = frozenset({
    *ELEMENTWISE, "bitcast", "copy", "optimization-barrier", "reshape", "transpose",
    "all-gather", "exponential", "compare", "not", "tanh", "rsqrt", "xor",
    "shift-left", "shift-right-logical", "shift-right-arithmetic",
})  # fmt: skip
# What is gathered or broadcast from a stack is no stack: activations times the weight of a norm are not.
# How the names of arguments begin that are pages of a cache.
POOL = "memory.pool."
_NOTHING = 1 << 62
_ALIASES = re.compile(r"\{(\d*)\}: \((\d+), \{\}")


class Mixture(NamedTuple):
    """What decides how many experts a device reads.

    Attributes:
        experts: number X of experts of a layer.
        local: number of them on one device.
        chosen: number k of experts that a token chooses.
        tokens: number N of tokens that may choose experts of this device.
        width: number E of features of a token.
    """

    experts: int
    local: int
    chosen: int
    tokens: int
    width: int

    def share_used(self) -> float:
        """The expected share of experts that any token chooses.

        Example:
            >>> round(Mixture(experts=8, local=8, chosen=2, tokens=1, width=4).share_used(), 3)
            0.25
        """
        return 1 - (1 - self.chosen / self.experts) ** self.tokens

    def share_of_blocks(self, blocks: int, rows: int, is_enough: bool = False) -> float:
        """The expected share of ``blocks`` blocks of ``rows`` rows that have an expert of this device.

        A program has blocks for the worst case. It may take the tokens in several parts, each with that many
        blocks; then the share is that of one part. Or it repeats where blocks are not enough (``is_enough``: they
        are, for all tokens, as they are if tokens choose evenly).

        Example:
            >>> Mixture(experts=16, local=2, chosen=2, tokens=4, width=4).share_of_blocks(8, 1)
            0.125
        """
        # As many choices have so many blocks in the worst case; never are they fewer than blocks.
        choices = max(blocks, blocks * rows - (self.local - 1) * (rows - 1))
        tokens = 0 if is_enough else min(self.tokens, choices // self.chosen)
        tokens = tokens or self.tokens
        used = self.local * expected_blocks(tokens, self.chosen / self.experts, rows)
        return min(1.0, used / blocks)


@functools.cache
def expected_blocks(tokens: int, chance: float, rows: int) -> float:
    """The expected number of blocks of ``rows`` rows for the tokens that choose one expert.

    Example:
        >>> expected_blocks(2, 0.5, 2), expected_blocks(3, 1.0, 2), expected_blocks(6, 0.5, 1)
        (0.75, 2.0, 3.0)
    """
    if chance >= 1:
        return float(-(-tokens // rows))
    log_chance = lambda n: (
        math.lgamma(tokens + 1) - math.lgamma(n + 1) - math.lgamma(tokens - n + 1)
        + n * math.log(chance) + (tokens - n) * math.log1p(-chance)
    )  # fmt: skip
    total = sum(math.exp(log_chance(n)) * -(-n // rows) for n in range(1, tokens + 1))
    return round(total, 9)


class Moved(NamedTuple):
    """Bytes that an operation moves in one step, all its runs together.

    Attributes:
        kind: the operation, or the target of a custom call.
        type: the type of its result.
        source: the path of the JAX functions that it comes from.
        reads, writes: bytes, which are expected values where experts are chosen.
    """

    kind: str
    type: str
    source: str
    reads: float
    writes: float


def moved(
    program: Program, is_decode: bool = False, mixture: Mixture | None = None,
    seen: Mapping[str, float] = MappingProxyType({}),
) -> list[Moved]:  # fmt: skip
    """What each operation of a program moves.

    Args:
        program: the program; names of arguments that begin with ``model.`` are those of weights, and with
            ``state.cache.`` those of the cache, with ``memory.pool.`` those of pages of a cache.
        is_decode: whether the program is a loop over tokens, of which one counts.
        mixture: the mixture of experts that the model has, if any.
        seen: by the name of a group of layers, the share of the tokens of its pages that a kernel reads.
    """
    inputs = [one for one in program.computations[program.entry] if one.kind == "parameter"]
    start: list[Value] = [None] * len(inputs)
    for one in inputs:
        if one.source.startswith(("model.", "state.cache.", POOL)):
            start[int(one.operands[0])] = Data(one.source)
    ranks = {one.source: _matrix_rank(one) for one in inputs}
    traffic = _Traffic(program, is_decode, mixture, ranks, seen)
    traffic.run(program.entry, start, 1, 0)
    return traffic.found


def totals(found: Iterable[Moved]) -> tuple[float, float]:
    """(bytes read, bytes written)."""
    found = list(found)
    return sum(one.reads for one in found), sum(one.writes for one in found)


def stack_axes(name: str) -> int:
    """The number of axes along which an argument is a stack: of layers, and of experts.

    The names of weights have ``*`` or a range for each. Caches are stacks of layers.

    Example:
        >>> stack_axes("model.layers.1:3.mlp.experts.*.up_proj.weight"), stack_axes("model.norm.weight")
        (2, 0)
    """
    if name.startswith("state.cache."):
        return 1
    return len(re.findall(r"\.(?:\*|\d+:\d+)(?=\.)", name))


def _matrix_rank(parameter: Instruction) -> int:
    """The number of axes of an argument without those along which it is a stack."""
    return len(arrays(parameter.type)[0][1]) - stack_axes(parameter.source)


# --- sizes ---------------------------------------------------------------------------------------


def _bytes(type_: str) -> int:
    """The size of the arrays in a type."""
    return sum(map(nbytes, arrays(type_)))


def _parts(type_: str) -> list[str]:
    """The types of the arrays in a type, which may be a tuple of tuples."""
    type_ = type_.strip()
    if not type_.startswith("("):
        return [type_]
    return [
        part
        for one in tuple_parts(type_)
        for part in _parts(re.sub(r"^/\*.*?\*/", "", one.strip()))
    ]


def _in_memory(type_: str) -> int:
    """The size of those arrays in a type that are not in VMEM."""
    return sum(_bytes(part) for part in _parts(type_) if not in_vmem(part))


def _count(type_: str) -> int:
    return sum(math.prod(shape) for _, shape in arrays(type_))


# --- fusions -------------------------------------------------------------------------------------


class _Fusions:
    """What fusions read of their operands, and write."""

    def __init__(self, program: Program):
        self.program = program
        self._users: dict[str, dict[str, list[tuple[Instruction, int]]]] = {}
        self._shares: dict[tuple[str, str, float], float] = {}

    def shares(self, name: str, of_result: float = 1.0) -> dict[int, float]:
        """By its number, the share of each parameter that a computation reads for a share of its result."""
        return {
            int(one.operands[0]): self._share(name, one, of_result)
            for one in self.program.computations[name]
            if one.kind == "parameter"
        }

    def _share(self, name: str, one: Instruction, of_result: float) -> float:
        """The share of a value that the computation reads."""
        if one.is_root:
            return of_result
        key = name, one.name, of_result
        if key not in self._shares:
            total = 0.0
            for user, place in self._users_of(name)[one.name]:
                total += self._share_of_use(name, one, user, place, of_result)
            self._shares[key] = min(1.0, total)
        return self._shares[key]

    def _share_of_use(
        self, name: str, one: Instruction, user: Instruction, place: int, of_result: float
    ) -> float:
        if user.kind in _SLICES and place == 0:
            return min(1.0, _count(user.type) / max(_count(one.type), 1))
        if user.kind in _UPDATES and place == 0:
            return 0.0
        if user.kind == "fusion":
            needed = self._share(name, user, of_result)
            return self.shares(user.called[0], needed).get(place, 1.0)
        if user.kind in _BY_PART or user.kind == "tuple":
            return self._share(name, user, of_result)
        return 1.0

    def _users_of(self, name: str) -> dict[str, list[tuple[Instruction, int]]]:
        if name not in self._users:
            users = self._users[name] = defaultdict(list)
            for one in self.program.computations[name]:
                if one.kind not in ("parameter", "constant"):
                    for place, operand in enumerate(one.operands):
                        users[operand].append((one, place))
        return self._users[name]

    def writes(self, name: str, type_: str) -> int:
        """The bytes that a fusion of this type writes: of an array that it updates in place, only the update."""
        lines = {one.name: one for one in self.program.computations[name]}
        root = next(one for one in lines.values() if one.is_root)
        if root.kind == "tuple":
            pairs = zip(root.operands, tuple_parts(type_), strict=True)
            return sum(self._written(lines, lines[result], part) for result, part in pairs)
        return self._written(lines, root, type_)

    def _written(self, lines: dict[str, Instruction], one: Instruction, type_: str) -> int:
        if not _in_memory(type_):
            return 0
        while one.kind in _BY_PART and len(one.operands) == 1 and one.operands[0] in lines:
            one = lines[one.operands[0]]
        if one.kind in _UPDATES:
            update = lines.get(one.operands[_UPDATES[one.kind]])
            return _bytes(update.type if update else type_)
        return self.writes(one.called[0], type_) if one.kind == "fusion" else _in_memory(type_)


# --- a program -----------------------------------------------------------------------------------


class _Traffic(Follow):
    """Follows a program and notes what each operation moves."""

    def __init__(
        self, program: Program, is_decode: bool, mixture: Mixture | None, ranks: dict[str, int],
        seen: Mapping[str, float],
    ):  # fmt: skip
        super().__init__(program, least=_NOTHING)
        self.is_decode, self.mixture, self.ranks, self.seen = is_decode, mixture, ranks, seen
        self.fusions = _Fusions(program)
        self.found: list[Moved] = []
        self._turns: list[int] = []  # of the loops around an instruction, outermost first
        self._repeats = 0  # number of loops around it that repeat if blocks of rows are not enough
        self._sliced = 1  # the largest number of slices of a cache that a loop was seen to take
        self._alike = _branches_alike(program)

    def visit(
        self, one: Instruction, given: list[Value], types: list[str], value: Value,
        times: float, loops: int,
    ) -> Value:  # fmt: skip
        if times:
            reads, writes = self.bytes_of(one, given, types)
            if reads or writes:
                kind = _target(one) if one.kind == "custom-call" else one.kind
                self.found.append(Moved(kind, one.type, one.source, reads * times, writes * times))
        return value

    def bytes_of(
        self, one: Instruction, given: list[Value], types: list[str]
    ) -> tuple[float, float]:
        """The bytes that an instruction reads and writes when it runs once."""
        kind = one.kind
        if kind in _FREE or kind.endswith("-done"):
            return 0, 0
        if kind in _SLICES:
            read = 0 if in_vmem(types[0]) else _bytes(one.type)
            return read, _in_memory(one.type)
        if kind in _UPDATES:
            new = types[_UPDATES[kind]]
            return _in_memory(new), 0 if in_vmem(one.type) else _bytes(new)
        if kind in ("copy-start", "slice-start"):  # (result, operand, …), ((operand), result, …)
            result = tuple_parts(one.type)[kind == "slice-start"]
            return 0 if in_vmem(types[0]) else _bytes(result), _in_memory(result)
        if kind == "fusion":
            shares = self.fusions.shares(one.called[0])
            read = sum(_in_memory(type_) * shares.get(i, 0.0) for i, type_ in enumerate(types))
            return read, self.fusions.writes(one.called[0], one.type)
        if kind == "custom-call":
            return self.kernel(one, given, types)
        if kind.removesuffix("-start") in COLLECTIVES:
            parts = tuple_parts(one.type) if one.type.startswith("(") else [one.type]
            return sum(map(_in_memory, types)), _in_memory(max(parts, key=_bytes))
        return sum(map(_in_memory, types)), _in_memory(one.type)

    # --- kernels

    def kernel(self, one: Instruction, given: list[Value], types: list[str]) -> tuple[float, float]:
        """The bytes of a custom call."""
        target = _target(one)
        if target in NO_KERNELS:
            return 0, 0
        aliases = [(int(a or 0), int(b)) for a, b in _ALIASES.findall(one.rest)]
        updated = {operand for _, operand in aliases}
        read = sum(
            _in_memory(type_) * self.share_read(value, type_, given, types)
            for i, (value, type_) in enumerate(zip(given, types, strict=True))
            # A kernel takes a pool once for each page that it reads at a time.
            if i not in updated and not (_is_pool(value) and value in given[:i])
        )
        results = _parts(one.type)
        if target.startswith(("__cublas", "__cudnn")):
            results = results[:1]  # the others are memory for the kernel itself
        kept = {result for result, _ in aliases}
        return read, sum(_in_memory(part) for i, part in enumerate(results) if i not in kept)

    def share_read(self, value: Value, type_: str, given: list[Value], types: list[str]) -> float:
        """The share of an operand that a kernel reads: of a stack or a pool, what its indices or its table name."""
        if not isinstance(value, Data):
            return 1.0
        if _is_pool(value):
            layers, pages = arrays(type_)[0][1][:2]
            tables = [math.prod(shape) for one, type_ in zip(given, types, strict=True) if one is None
                      for dtype, shape in arrays(type_) if dtype == "s32"]  # fmt: skip
            seen = [part for name, part in self.seen.items() if f"'{name}" in value.name]
            return min(1, max(tables, default=pages) / pages) / layers * min(seen, default=1)
        own = [shape for one, type_ in zip(given, types, strict=True) if one is None
               for _, shape in arrays(type_)]  # fmt: skip
        indices = [math.prod(shape) for one, type_ in zip(given, types, strict=True) if one is None
                   for dtype, shape in arrays(type_) if dtype == "s32" and len(shape) < 2]  # fmt: skip
        if not indices:
            return 1.0
        shape = arrays(type_)[0][1]
        matrices = math.prod(shape[: len(shape) - self.ranks.get(value.name, len(shape))])
        blocks = max(indices)
        if self.mixture is None or not is_expert(value.name) or 1 in (blocks, matrices):
            return 1 / matrices
        rows = max(1, *(math.prod(shape[:-1]) // blocks for shape in own))
        share = self.mixture.share_of_blocks(blocks, rows, bool(self._repeats))
        return blocks * share / matrices

    # --- loops and branches

    def value(
        self, one: Instruction, given: list[Value], types: list[str],
        times: float, loops: int, fused: bool,
    ) -> Value:  # fmt: skip
        if one.kind == "dynamic-slice" and isinstance(given[0], Data):
            if given[0].name.startswith("state.cache."):
                self._sliced = max(self._sliced, _slices(types[0], one.type))
        return super().value(one, given, types, times, loops, fused)

    def loop(self, one: Instruction, start: Value, times: float, loops: int) -> Value:
        before, self._sliced = self._sliced, 1
        known = trips(self.program, one)
        self._turns.append(known or 1)
        is_of_tokens = self.is_decode and not loops
        repeats = known is None and not is_of_tokens and any(map(is_expert, _names(start)))
        self._repeats += repeats
        value = super().loop(one, start, times, loops)
        self._repeats -= repeats
        self._turns.pop()
        self._sliced = before
        return value

    def turns(self, one: Instruction, loops: int) -> int:
        """As often as the program says; else 1 for loops over tokens or experts, for others all slices of a cache."""
        known = trips(self.program, one)
        if known is None:
            known = 1 if self._repeats or (self.is_decode and not loops) else self._sliced
        self._turns[-1] = known
        return known

    def branches(self, one: Instruction, given: list[Value], times: float, loops: int) -> Value:
        """Counts the branch that moves most, as often as an expert is computed if it computes one."""
        if any(map(is_expert, _names(given))):
            times *= self.share_of_branch(one)
        before, most, result = self.found, [], None
        for name, argument in zip(one.called, given, strict=False):
            self.found = []
            value = self.run(name, [argument], times, loops)
            result = value if result is None else result
            if sum(totals(self.found)) >= sum(totals(most)):
                most = self.found
        self.found = before + most
        return result

    def share_of_branch(self, one: Instruction) -> float:
        """How often a branch with an expert's computation is expected to be taken.

        Either each branch is for one expert and all tokens, or for one block of rows.
        """
        mixture = self.mixture
        if mixture is None:
            return 1.0
        written_out = self._alike[one.name]
        blocks = written_out if written_out > 1 else self._turns[-1] if self._turns else 1
        rows = max(1, _count(one.type) // mixture.width)
        choices = mixture.tokens * mixture.chosen
        if blocks in (mixture.experts, mixture.local) and not (rows == 1 and blocks == choices):
            return mixture.share_used()
        return mixture.share_of_blocks(blocks, rows, bool(self._repeats))


def _is_pool(value: Value) -> bool:
    """Whether a value is an argument with pages of a cache."""
    return isinstance(value, Data) and value.name.startswith(POOL)


def _target(one: Instruction) -> str:
    found = re.search(r'custom_call_target="([^"]*)"', one.rest)
    return found[1] if found else one.kind


def is_expert(name: str) -> bool:
    """Whether an argument is a weight of a mixture's experts.

    Example:
        >>> is_expert("model.layers.*.mlp.experts.*.up_proj.weight"), is_expert("mlp.shared_experts.up_proj")
        (True, False)
    """
    return ".experts." in name


def _names(values: Any) -> Iterator[str]:
    """The names of arguments in values."""
    for value in values if type(values) in (list, tuple) else [values]:
        if isinstance(value, Data):
            yield value.name
        elif value is not None:
            yield from _names(value)


def _branches_alike(program: Program) -> dict[str, int]:
    """For each conditional, the number of those in its computation that come from the same function."""
    found = {}
    for lines in program.computations.values():
        by_source: dict[str, list[str]] = defaultdict(list)
        for one in lines:
            if one.kind == "conditional":
                by_source[one.source].append(one.name)
        found.update({name: len(names) for names in by_source.values() for name in names})
    return found


def _slices(whole: str, part: str) -> int:
    """How many such slices an array has along the last axis of which more than one is taken, but not all.

    Example:
        >>> _slices("bf16[2,8,1,2048,128]", "bf16[1,8,1,256,128]")
        8
    """
    (_, long), (_, short) = arrays(whole)[0], arrays(part)[0]
    counts = [-(-a // b) for a, b in zip(long, short, strict=False) if a > b > 1]
    return counts[-1] if counts else 1


# --- what is needed ------------------------------------------------------------------------------


class Held(NamedTuple):
    """An array that a program has as an argument.

    Attributes:
        name: its name.
        nbytes: its size on one device.
        rows: bytes of the rows that a step looks up, if it is a table; else 0.
    """

    name: str
    nbytes: int
    rows: int = 0


def needed(held: Sequence[Held], mixture: Mixture | None) -> float:
    """The bytes of weights and cache that a step has to read on one device.

    Example:
        >>> mixture = Mixture(experts=8, local=8, chosen=2, tokens=1, width=4)
        >>> needed([Held("up_proj.weight", 100), Held("embed_tokens.weight", 500, rows=8),
        ...         Held("mlp.experts.*.up_proj.weight", 800)], mixture)
        308.0
    """
    share = 1.0 if mixture is None else mixture.share_used()
    return sum(
        (min(one.rows, one.nbytes) if one.rows else one.nbytes)
        * (share if is_expert(one.name) else 1)
        for one in held
    )
