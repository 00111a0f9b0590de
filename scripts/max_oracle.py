"""Computes MAX's own model files: MAX builds their graphs, and NumPy computes the operations in them.

``max_runs.py`` starts it in a new process. MAX needs minutes to compile a graph on a CPU, while NumPy computes
a graph of a hundred operations quickly, so nothing is compiled. MAX's files and graph decide shapes, names,
promotions, casts and broadcasting, and which operation is called with which operands. What an operation
computes is written in ``max_operations.py``, in float64.

    python scripts/max_oracle.py SITE OUT FILE …
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from scripts.max_import import MaxFiles
from scripts.max_operations import CUSTOM, OPS
from scripts.max_recipes import RECIPES, typed, weight_value

# --- walking a graph ----------------------------------------------------------------------


def rounded(array: Any, dtype: Any) -> Any:
    """An array rounded to a DType; floats stay float64 arrays."""
    array = np.asarray(array)
    if dtype.name == "bfloat16":
        bits = array.astype(np.float32).view(np.uint32)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return bits.view(np.float32).astype(np.float64)
    if dtype.name == "float16":
        return array.astype(np.float16).astype(np.float64)
    if dtype.is_float():
        return array.astype(np.float64)
    if dtype.name != "bool" and array.dtype.kind == "f":
        array = np.trunc(array)
    return array.astype(dtype.to_numpy())


class _Op:
    """An operation, with the number of its results, and the sizes of the first result."""

    def __init__(self, op: Any, sizes: Any, count: int):
        self._op, self.sizes, self.count = op, sizes, count
        self.__class__ = type(type(op).__name__, (_Op,), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)


def evaluate(
    graph: Any, inputs: list[Any], weights: Callable[[str, tuple[int, ...], str], Any]
) -> list[Any]:
    """The outputs of a graph that MAX built."""
    from max import _core
    from max._core.dialects import mo, rmo
    from max.graph import Dim, TensorType, Type

    names: dict[str, int] = {}
    for value, array in zip(graph.inputs, inputs, strict=True):
        for dim, size in zip(value.type.shape, array.shape, strict=True):
            if not hasattr(dim, "dim"):
                names[str(dim)] = size
    _core.lower(graph._module, [rmo.passes.LegalizeRMOOps()])
    kinds = [value.type.dtype for value in graph.inputs]
    slots = {value._mlir_value: rounded(array, kind)
             for value, array, kind in zip(graph.inputs, inputs, kinds, strict=True)}  # fmt: skip

    def sizes_of(shape: Any) -> tuple[Any, ...]:
        """The sizes of a shape as numbers; a size that depends on values is a name until it is computed."""
        sizes = [dim if hasattr(dim, "dim") else Dim(dim).substitute(names) for dim in shape]
        return tuple(int(dim) if hasattr(dim, "dim") else dim for dim in sizes)

    block = next(top for top in graph._module.body if isinstance(top, mo.GraphOp)).regions[0].front
    for op in block:
        name = type(op).__name__.removesuffix("Op").removeprefix("MO")
        given = [slots.get(getattr(one, "value", one)) for one in op.operands]
        if isinstance(op, mo.OutputOp):
            return [np.asarray(one, np.float32) if one.dtype.kind == "f" else one for one in given]
        if name in (
            "ChainCreate",
            "BufferCreate",
            "ParamDeclare",
            "ParamFromValue",
            "ParamConstant",
        ):
            continue
        if name == "ParamToValue":
            value = Type.from_mlir(op.results[0].type) if False else op.value
            found: Any = np.array(_ape(value, names), np.int64)
            slots[op.results[0]] = found
            continue
        types = [Type.from_mlir(one.type) for one in op.results]
        count = sum(isinstance(one, TensorType) for one in types)
        first = next((one for one in types if isinstance(one, TensorType)), None)
        sizes = sizes_of(first.shape) if first is not None else ()
        if name == "Constant":
            assert first is not None
            found = _constant(op, first)
        elif name == "ConstantExternal":
            assert first is not None
            found = weights(op.name, sizes, first.dtype.name)
        elif name == "Custom":
            if op.symbol not in CUSTOM:
                raise NotImplementedError(f"MAX's kernel {op.symbol}")
            found = CUSTOM[op.symbol](_parameters(op), *[one for one in given if one is not None])
        elif name in OPS:
            found = OPS[name](_Op(op, sizes, count), *[one for one in given if one is not None])
        else:
            raise NotImplementedError(f"MAX's operation {name}")
        results = found if isinstance(found, tuple) else (found,)
        tensors = [
            (r, t) for r, t in zip(op.results, types, strict=True) if isinstance(t, TensorType)
        ]
        for (result, kind), array in zip(tensors, results, strict=True):
            array = rounded(array, kind.dtype)
            for dim, size in zip(kind.shape, array.shape, strict=True):
                names.setdefault(str(dim), size)  # sizes that depend on values
            slots[result] = array
    raise ValueError("the graph has no output")


def _ape(value: Any, names: dict[str, int]) -> list[int]:
    """The sizes in a shape attribute such as `#mosh<ape[b, 3]>`."""
    from max.graph import Shape

    return [
        int(dim.substitute(names)) if not hasattr(dim, "dim") else int(dim)
        for dim in Shape.from_mlir(value)
    ]


def _constant(op: Any, kind: Any) -> Any:
    from max import _core
    from max.driver import CPU
    from max.dtype import DType
    from max.graph import Shape

    buffer = _core.graph._buffer_from_constant_attr(
        op.value, kind.dtype, Shape(kind.shape).static_dims, CPU()
    )
    if kind.dtype.name == "bfloat16":
        bits = buffer.view(DType.uint16).to_numpy().astype(np.uint32) << 16
        return bits.view(np.float32)
    return buffer.to_numpy()


def _parameters(op: Any) -> dict[str, Any]:
    return {one.name: getattr(one.value, "value", one.value) for one in op.parameters.value}


class Server(MaxFiles):
    """Imports ``max.pipelines…`` without the packages that MAX's server needs: none of its ``__init__`` runs."""

    package = "max"

    def owns(self, part: str) -> bool:
        return part not in ("pipelines", "serve")

    def renamed(self, tree: Any) -> Any:
        return tree


def run(name: str) -> list[Any]:
    """The results of a recipe on MAX."""
    from max.graph import Graph

    def of(path: str) -> Any:
        return importlib.import_module(f"max.{path}")

    module, inputs = RECIPES[name](of)
    arrays, types = typed(inputs, of)
    if hasattr(module, "state_dict"):
        module.state_dict()  # gives the weights their full names
    with Graph("run", input_types=types) as graph:
        out = module(*(value.tensor for value in graph.inputs))
        graph.output(*(out if isinstance(out, list | tuple) else (out,)))
    return evaluate(graph, arrays, weight_value)


def main() -> int:
    site, out, *names = sys.argv[1:]
    sys.path.append(site)
    sys.meta_path.insert(0, Server(Path(site) / "max"))
    # A layer over devices opens accelerators when it is made; a graph that only NumPy computes needs none.
    devices: Any = importlib.import_module("max.nn.comm.allreduce")
    devices.Accelerator = importlib.import_module("max.driver").CPU
    found: dict[str, Any] = {}
    for name in names or list(RECIPES):
        try:
            for i, array in enumerate(run(name)):
                found[f"{name}|{i}"] = array
        except Exception:
            found[f"{name}|error"] = np.array(traceback.format_exc()[-3000:])
    np.savez(out, **found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
