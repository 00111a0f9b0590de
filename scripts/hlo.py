"""Reads the text of optimised HLO: which copies, collectives and kernels a program has.

``parse`` turns the text into a Program. ``collectives`` lists the communication between devices,
``kernels`` the custom calls, and ``copies`` the copies that the program makes of its arguments, such
as weights and a KV cache. An operation counts as often as it runs: one in a loop of eight iterations
counts eight times. A loop whose number of iterations is not known (decoding token by token)
counts as one iteration, and ``Found.loops`` is the number of such loops.

A copy is an operation that writes an argument, or a slice of it, to memory again: a ``copy``, a
slice, a change of dtype or of the order of axes, a selection by a mask. A fusion writes only its
result, so a copy inside a fusion counts only if it is the result. An argument is followed through
loops, tuples, branches, fusions and updates in place.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip
# Custom calls that are not kernels: annotations for the compiler, and names for memory.
NO_KERNELS = ("AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast",
               "GatherScatterIndicesBitpacked", "Sharding", "SPMDFullToShardShape",
               "SPMDShardToFullShape", "annotate_device_placement")  # fmt: skip

_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_NAMED = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|true_computation|false_computation"
    r"|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_NAME = re.compile(r"%?([A-Za-z_][\w.\-]*)")


class Instruction(NamedTuple):
    """One line of a computation.

    Attributes:
        name: its name, without %.
        type: the type of its result, as text.
        kind: the operation, such as ``fusion``.
        operands: names of its operands; for a ``parameter`` its number, for a ``constant`` its value.
        rest: its attributes, as text.
        is_root: whether it is the result of the computation.
    """

    name: str
    type: str
    kind: str
    operands: tuple[str, ...]
    rest: str
    is_root: bool

    def attribute(self, name: str) -> str:
        """The value of an attribute ``name=value`` or ``name={values}``; "" if there is none."""
        found = re.search(rf"\b{name}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.rest)
        return found[1] if found else ""

    @property
    def source(self) -> str:
        """The name that JAX gave it: a path of functions, or for a parameter that of the argument."""
        found = re.search(r'\bop_name="([^"]*)"', self.rest)
        return found[1] if found else ""

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs."""
        return [name for text in _CALLED.findall(self.rest) for name in _NAME.findall(text)]


class Program(NamedTuple):
    """The computations of a program by name, and the name of the one that runs first."""

    computations: dict[str, list[Instruction]]
    entry: str


class Found(NamedTuple):
    """An operation of a program.

    Attributes:
        what: the kind of collective, or the argument that is copied.
        dtype: the dtype of the data that is sent or written.
        bytes: the size of this data on one device.
        times: number of runs in one iteration of each loop whose number of iterations is unknown.
        loops: number of such loops that it is in.
        source: the path of the JAX functions that it comes from.
    """

    what: str
    dtype: str
    bytes: int
    times: int
    loops: int
    source: str


# --- text ----------------------------------------------------------------------------------------


def parse(text: str) -> Program:
    """The program of an optimised module's text (``compiled.as_text()``).

    Raises:
        ValueError: the text has no ENTRY computation.
    """
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        head = None if line.startswith(" ") else _HEAD.match(line)
        if head and not line.startswith("HloModule"):
            current = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := _instruction(line)):
            current.append(found)
    if not entry:
        raise ValueError("this is not the text of an HLO module: it has no ENTRY computation")
    return Program(computations, entry)


def _instruction(line: str) -> Instruction | None:
    named = _NAMED.match(line)
    if named is None:
        return None
    type_, rest = _first(line[named.end() :])
    kind, _, rest = rest.lstrip().partition("(")
    inside, rest = _first("(" + rest)
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    if kind in ("parameter", "constant"):
        operands = (inside[1:-1],)
    return Instruction(named[2], type_, kind.strip(), operands, rest, bool(named[1]))


def _first(text: str) -> tuple[str, str]:
    """The first word of a text, which may be in parentheses, and what follows it."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter in "({[") - (letter in ")}]")
        if depth == 0 and (letter == ")" or letter == " "):
            end = i + (letter == ")")
            # In a type such as bf16[8]{0:T(8,128)} the inner parentheses are within braces.
            return text[:end], text[end:]
    return text, ""


def arrays(type_: str) -> list[tuple[str, tuple[int, ...]]]:
    """The dtype and shape of each array in an HLO type.

    Example:
        >>> arrays("(bf16[2,3]{1,0:T(8,128)}, /*index=1*/s32[])")
        [('bf16', (2, 3)), ('s32', ())]
    """
    found = _ARRAY.findall(type_)
    return [
        (kind, tuple(int(n) for n in dims.split(",") if n)) for kind, dims in found if kind != "T"
    ]


def nbytes(array: tuple[str, tuple[int, ...]]) -> int:
    """The size in bytes of an array with this dtype and shape.

    Example:
        >>> nbytes(("bf16", (2, 3))), nbytes(("f8e4m3fn", (5,))), nbytes(("s4", (8,)))
        (12, 5, 4)
    """
    dtype, shape = array
    width = re.search(r"\d+", dtype)
    bits = int(width[0]) if width else 8 if dtype == "pred" else 0
    return -(-math.prod(shape) * bits // 8)


def trips(program: Program, loop: Instruction) -> int | None:
    """The number of iterations of a ``while``, or None if it is decided while the program runs.

    GPU programs contain the number. In TPU programs it follows from the condition, ``counter < constant``,
    with a counter that starts at 0, as that of ``jax.lax.scan`` does.
    """
    known = re.search(r'known_trip_count":?\{"n":"(\d+)"', loop.rest)
    if known:
        return int(known[1])
    condition = program.computations[loop.attribute("condition").lstrip("%")]
    lines = {one.name: one for one in condition}
    root = next(one for one in condition if one.is_root)
    if root.kind != "compare" or root.attribute("direction") != "LT":
        return None
    counter, end = (lines[name] for name in root.operands)
    if counter.kind != "get-tuple-element" or end.kind != "constant":
        return None
    body = {one.name: one for one in program.computations[loop.attribute("body").lstrip("%")]}
    after = next(one for one in body.values() if one.is_root).operands
    step = body[after[int(counter.attribute("index"))]]
    while step.kind == "copy":
        step = body[step.operands[0]]
    added = [body[name] for name in step.operands if body[name].kind == "constant"]
    if step.kind != "add" or not added:
        return None
    return -(-int(end.operands[0]) // int(added[0].operands[0]))


# --- what runs -----------------------------------------------------------------------------------


def instructions(program: Program) -> Iterator[tuple[Instruction, int, int]]:
    """(instruction, number of runs, number of loops of unknown length it is in), for each that runs."""

    def walk(name: str, times: int, loops: int) -> Iterator[tuple[Instruction, int, int]]:
        for one in program.computations.get(name, ()):
            yield one, times, loops
            if one.kind in ("async-update", "async-done"):
                continue  # they have the same computation as the async-start
            inner, unknown = times, loops
            if one.kind == "while":
                turns = trips(program, one)
                inner, unknown = times * (turns or 1), loops + (turns is None)
            for called in one.called:
                yield from walk(called, inner, unknown)

    yield from walk(program.entry, 1, 0)


def collectives(program: Program) -> list[Found]:
    """The collectives of a program. The size is that of the result on one device."""
    found = []
    for one, times, loops in instructions(program):
        kind = one.kind.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        parts = arrays(one.type)
        if one.kind.endswith("-start") and kind != "all-reduce":
            parts = [max(parts, key=nbytes)]  # the type contains the operand too
        size = sum(map(nbytes, parts))
        found.append(Found(kind, max(parts, key=nbytes)[0], size, times, loops, one.source))
    return found


def kernels(program: Program) -> Counter[str]:
    """Names of the kernels that are called, and the number of places in the program that call each.

    A custom call is named by its target and, after a colon, its kernel. A fusion counts if the
    compiler generates it in another way than as a loop.
    """
    found: Counter[str] = Counter()
    places = {id(one): one for one, _, _ in instructions(program)}
    for one in places.values():
        if one.kind == "custom-call":
            target = re.search(r'custom_call_target="([^"]*)"', one.rest)
            if target and target[1] not in NO_KERNELS:
                name = re.search(r'\b(?:kernel_name|name)\\?"?\s*[:=]\s*\\?"([^"\\]+)', one.rest)
                # For Mosaic, the path of functions has the kernel's name.
                name = name or re.search(r"\b(\w+)/pallas_call$", one.source)
                found[target[1] + (f":{name[1]}" if name else "")] += 1
        elif one.kind == "fusion":
            kind = re.search(r'"fusion_backend_config":\{"kind":"([^"]+)"', one.rest)
            name = re.search(r'"custom_fusion_config":\{"name":"([^"]+)"', one.rest)
            if kind and kind[1] != "__triton":
                found[name[1] if name else kind[1]] += 1
    return found


# --- copies --------------------------------------------------------------------------------------


class Data(NamedTuple):
    """A value that is an argument or data from it: the argument's name, and whether it is a copy."""

    name: str
    is_new: bool = False


# The value of an instruction: a Data, None for other data, or a tuple of these.
Value = Any

_SAME = ("bitcast", "reshape", "optimization-barrier", "add-dependency", "copy-done", "slice-done",
         "async-done", "async-update", "all-gather-done", "all-reduce-done",
         "collective-permute-done", "domain", *COLLECTIVES)  # fmt: skip
_MOVED = (
    "copy",
    "transpose",
    "slice",
    "dynamic-slice",
    "reverse",
    "pad",
    "concatenate",
    "slice-start",
)
_UPDATES = ("dynamic-update-slice", "scatter")


def copies(program: Program, is_data: Callable[[str], bool], least: int = 1 << 20) -> list[Found]:
    """Copies of arguments, or of slices of them.

    Args:
        program: the program.
        is_data: function of an argument's name: whether its copies count, as of a weight or a cache.
        least: the smallest size of a copy that counts, in bytes.

    Raises:
        ValueError: ``is_data`` is false for all arguments, so that no copy could be found.
    """
    inputs = [one for one in program.computations[program.entry] if one.kind == "parameter"]
    start: list[Value] = [None] * len(inputs)
    for one in inputs:
        if is_data(one.source):
            start[int(one.operands[0])] = Data(one.source)
    if not any(start):
        names = ", ".join(one.source or one.name for one in inputs[:5])
        raise ValueError(f"no argument of the program is a weight or a cache: it has {names}")
    follow = _Copies(program, least)
    follow.run(program.entry, start, 1, 0)
    return follow.found


class Follow:
    """Interprets a program with names of arguments instead of values.

    A subclass overrides ``visit`` to look at each instruction.

    Args:
        program: the program.
        least: the smallest size, in bytes, of what is gathered or broadcast from an argument and still counts
            as its data.
    """

    def __init__(self, program: Program, least: int):
        self.program, self.least = program, least

    def visit(
        self,
        one: Instruction,
        given: list[Value],
        types: list[str],
        value: Value,
        times: float,
        loops: int,
    ) -> Value:
        """The value to go on with, after an instruction that no fusion contains.

        Args:
            one: the instruction.
            given, types: the values and types of its operands.
            value: its value.
            times: number of its runs; 0 for a run that is not counted.
            loops: number of loops of unknown length that it is in.
        """
        return value

    def run(
        self, name: str, arguments: list[Value], times: float, loops: int, fused: bool = False
    ) -> Value:
        """The value of a computation; times 0 stands for a run that is not counted."""
        values: dict[str, Value] = {}
        types: dict[str, str] = {}
        result = None
        for one in self.program.computations.get(name, ()):
            types[one.name] = one.type
            if one.kind == "parameter":
                value = arguments[int(one.operands[0])] if arguments else None
            else:
                given = [values.get(operand) for operand in one.operands]
                sizes = [types.get(operand, "") for operand in one.operands]
                value = self.value(one, given, sizes, times, loops, fused)
                if not fused:
                    value = self.visit(one, given, sizes, value, times, loops)
            values[one.name] = value
            if one.is_root:
                result = value
        return result

    def value(
        self,
        one: Instruction,
        given: list[Value],
        types: list[str],
        times: float,
        loops: int,
        fused: bool,
    ) -> Value:
        """The value of an instruction, from the values and types of its operands."""
        kind = one.kind
        if kind == "tuple":
            return tuple(given)
        if kind == "get-tuple-element":
            whole, index = given[0], int(one.attribute("index"))
            return whole[index] if type(whole) is tuple and index < len(whole) else None
        if kind == "fusion":
            if fused and (value := _aliased(one, given)) is not None:
                return value  # an array in place, which a TPU sees in other tiles
            return self.run(one.called[0], given, times, loops, fused=True)
        if kind == "while":
            return self.loop(one, given[0], times, loops)
        if kind == "conditional":
            return self.branches(one, given[1:], times, loops)
        if kind in ("call", "async-start"):
            return self.run(one.called[0], given, times, loops, fused)
        if kind == "custom-call":
            return _aliased(one, given)
        if kind == "copy-start":  # the type is (written, read, context)
            return (_new(given[0]), given[0], None)
        if kind in _SAME:
            value = given[0] if given else None
            return value[0] if kind == "copy-done" and type(value) is tuple else value
        if kind in _UPDATES:  # in place, but data written into a new buffer is a copy
            return given[0] or _new(given[1] if kind == "dynamic-update-slice" else None)
        first = next(((v, t) for v, t in zip(given, types, strict=True) if _is(v)), None)
        if first is None:
            return None
        value, type_ = first
        if kind == "gather":  # of complete matrices of experts, not of rows of an embedding table
            rows = [int(n) for n in one.attribute("slice_sizes").strip("{}").split(",") if n]
            return _new(value) if nbytes((arrays(type_)[0][0], tuple(rows))) >= self.least else None
        if kind == "broadcast":
            return _new(value) if nbytes(arrays(type_)[0]) >= self.least else None
        if kind in _MOVED or kind in ELEMENTWISE:
            return self.same_size(one, given, types)
        return None

    def same_size(self, one: Instruction, given: list[Value], types: list[str]) -> Value:
        """A copy of the first operand that is data; elementwise operations need one of the same size."""
        count = math.prod(arrays(one.type)[0][1]) if arrays(one.type) else 0
        for value, type_ in zip(given, types, strict=True):
            fits = one.kind in _MOVED or math.prod(arrays(type_)[0][1]) == count
            if _is(value) and fits:
                return _new(value)
        return None

    def branches(self, one: Instruction, given: list[Value], times: float, loops: int) -> Value:
        """The value of a conditional: data that any of its branches returns."""
        result = None
        for name, argument in zip(one.called, given, strict=False):
            result = _either(result, self.run(name, [argument], times, loops))
        return result

    def loop(self, one: Instruction, start: Value, times: float, loops: int) -> Value:
        """The value after a loop: data before it or after an iteration is data in each iteration."""
        body = one.attribute("body").lstrip("%")
        unknown = loops + (trips(self.program, one) is None)
        after = self.run(body, [start], 0, unknown)
        state = _either(start, after)
        self.run(body, [state], times * self.turns(one, loops), unknown)
        return state

    def turns(self, one: Instruction, loops: int) -> int:
        """The number of iterations of a loop that is in so many loops of unknown length."""
        return trips(self.program, one) or 1


class _Copies(Follow):
    """Finds the copies of arguments."""

    def __init__(self, program: Program, least: int):
        super().__init__(program, least)
        self.found: list[Found] = []

    def visit(
        self,
        one: Instruction,
        given: list[Value],
        types: list[str],
        value: Value,
        times: float,
        loops: int,
    ) -> Value:
        return self.written(one, value, one.type, int(times), loops)

    def written(self, one: Instruction, value: Value, type_: str, times: int, loops: int) -> Value:
        """Counts the copies in a value that is written to memory; the value then counts as their source."""
        if isinstance(value, tuple) and not isinstance(value, Data):
            parts = tuple_parts(type_)
            if len(parts) != len(value):
                return value
            pairs = zip(value, parts, strict=True)
            return tuple(self.written(one, v, part, times, loops) for v, part in pairs)
        if value is None or not value.is_new:
            return value
        array = max(arrays(type_), key=nbytes)
        if times and nbytes(array) >= self.least and not in_vmem(type_):
            self.found.append(Found(value.name, array[0], nbytes(array), times, loops, one.source))
        return value._replace(is_new=False)


ELEMENTWISE = ("convert", "bitcast-convert", "select", "add", "subtract", "multiply", "divide",
                "maximum", "minimum", "negate", "and", "or", "clamp", "reduce-precision")  # fmt: skip


def _is(value: Value) -> bool:
    return isinstance(value, Data)


def _new(value: Value) -> Value:
    return value._replace(is_new=True) if isinstance(value, Data) else None


def _either(one: Value, other: Value) -> Value:
    if type(one) is tuple and type(other) is tuple and len(one) == len(other):
        return tuple(_either(a, b) for a, b in zip(one, other, strict=True))
    return other if one is None else one


def _aliased(one: Instruction, given: list[Value]) -> Value:
    """The values of the operands that a custom call updates in place."""
    pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}", one.rest)
    if not pairs:
        return None
    if pairs[0][0] == "":
        return given[int(pairs[0][1])]
    result: list[Value] = [None] * len(tuple_parts(one.type))
    for place, operand in pairs:
        result[int(place)] = given[int(operand)]
    return tuple(result)


def tuple_parts(type_: str) -> list[str]:
    """The types in a tuple's type."""
    text, parts, depth, begin = type_.strip()[1:-1], [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "({[") - (letter in ")}]")
        if letter == "," and depth == 0:
            parts.append(text[begin:i])
            begin = i + 1
    return [*parts, text[begin:]] if text else []


def in_vmem(type_: str) -> bool:
    """Whether a TPU keeps the array in VMEM: then it was prefetched, not copied."""
    return bool(re.search(r"T\([^{}]*S\(1\)", type_))
