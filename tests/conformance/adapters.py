"""What a scenario sees of a library: its names, and adapter functions for what differs.

`namespace_maxjax` and `namespace_max` give the same object for the two libraries. No adapter
reads an expectation or repairs a result; a name that maxjax does not have yet is None.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

NAMES = {
    "nn": "Module Layer LayerList",
    "nn.layer": "add_layer_hook clear_hooks recursive_named_layers",
    "graph": "Weight ShardingStrategy DeviceRef Shape Dim Graph ops TensorType",
    "graph.weight": "Segment",
    "graph.quantization": "QuantizationEncoding",
    "graph.weights": "WeightData SafetensorWeights GGUFWeights load_weights weights_format",
    "dtype": "DType",
    "driver": "Buffer",
    "engine": "InferenceSession",
}


def _namespace(package: str) -> SimpleNamespace:
    """Every name of `NAMES` as `package` has it; `missing` lists those it lacks."""
    M = SimpleNamespace(missing=[], nn=None)
    for folder, names in NAMES.items():
        for name in names.split():
            setattr(M, name, _get(f"{package}.{folder}", name))
            if getattr(M, name) is None:
                M.missing.append(f"{package}.{folder}.{name}")
    M.nn = importlib.import_module(f"{package}.nn")
    if M.recursive_named_layers is None:
        M.recursive_named_layers = _recursive_named_layers
    return M


def _get(module: str, name: str) -> Any:
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.startswith(error.name):
            return None
        raise
    if not hasattr(found, name):
        try:  # a submodule that is not imported yet, as `graph.ops`
            return importlib.import_module(f"{module}.{name}")
        except ModuleNotFoundError:
            return None
    return getattr(found, name)


def _recursive_named_layers(parent: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The walk of older versions of MAX, restated; 26.7 does not have it."""
    queue, seen = deque([(prefix, parent)]), []
    while queue:
        name, layer = queue.popleft()
        if any(layer is s for s in seen):
            continue
        seen.append(layer)
        yield name, layer
        for local, child in layer.sublayers.items():
            queue.append((f"{name}.{local}" if name else local, child))


def _outputs(out: Any) -> list:
    if out is None:
        return []
    return list(out) if isinstance(out, list | tuple) else [out]


# --- maxjax -------------------------------------------------------------------------------


def namespace_maxjax() -> SimpleNamespace:
    """maxjax: modules are called with JAX arrays; a Graph is written only where one is asked for."""
    import jax.numpy as jnp

    M = _namespace("maxjax")

    def np_of(v: Any) -> np.ndarray:
        if hasattr(v, "to_numpy"):
            v = v.to_numpy()
        elif not hasattr(v, "__array__"):
            v = jnp.from_dlpack(v)
        a = np.asarray(v)  # jnp.asarray would narrow 64-bit values
        return a if a.dtype.kind in "biuf" else a.astype(np.float32)  # bfloat16 and float8

    def compute(fn: Any, *inputs: np.ndarray) -> list[np.ndarray]:
        return [np_of(o) for o in _outputs(fn(*map(jnp.asarray, inputs)))]

    def forward(module: Any, *inputs: np.ndarray) -> list[np.ndarray]:
        module.state_dict()  # weights that were never loaded become zeros
        return compute(module, *inputs)

    def shard_shapes(weight: Any, n: int) -> list[list[int]]:
        return [[int(d) for d in s.shape] for s in weight.shard([M.DeviceRef.CPU()] * n)]

    def shard_values_many(items: list) -> list[list[np.ndarray]]:
        out = []
        for weight, value, n in items:
            weight.value = jnp.asarray(value)
            shards = weight.shard([M.DeviceRef.CPU()] * n)
            out.append([np_of(jnp.asarray(s)) for s in shards])
        return out

    inputs: list[Any] = []

    def trace_only(fn: Any, *arrays: np.ndarray) -> None:
        kinds = [M.TensorType(M.DType.of(a.dtype), a.shape, M.DeviceRef.CPU()) for a in arrays]
        M.Graph("trace", fn, input_types=kinds)

    def in_graph(fn: Any, *shapes: tuple[int, ...]) -> Any:
        kinds = [M.TensorType(M.DType.float32, shape, M.DeviceRef.CPU()) for shape in shapes]
        with M.Graph("scratch", input_types=kinds) as graph:
            inputs[:] = graph.inputs
            return fn()

    M.np_of, M.compute, M.forward, M.trace_only = np_of, compute, forward, trace_only
    M.in_graph, M.graph_input = in_graph, lambda shape, index=0: inputs[index].tensor
    M.shard_shapes, M.shard_values_many = shard_shapes, shard_values_many
    M.shard_values = lambda weight, value, n: shard_values_many([(weight, value, n)])[0]
    M.tensor = lambda value: getattr(value, "tensor", value)
    return M


# --- Modular MAX --------------------------------------------------------------------------


class _Max:
    """Graphs built, compiled and run by MAX, one for each call."""

    def __init__(self, M: SimpleNamespace):
        self.M, self.session, self.count, self.inputs = M, None, 0, ()

    def types(self, arrays: Any) -> list:
        M, cpu = self.M, self.M.DeviceRef.CPU()
        kind = M.DType.from_numpy
        return [M.TensorType(kind(a.dtype), list(a.shape), device=cpu) for a in arrays]

    def graph(self, tag: str, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.M.Graph(f"{tag}_{self.count}", *args, **kwargs)

    def np_of(self, v: Any) -> np.ndarray:
        if isinstance(v, np.ndarray):
            return v
        if not isinstance(v, self.M.Buffer):
            v = self.M.Buffer.from_dlpack(v)
        try:
            v.dtype.to_numpy()
            faithful = not v.dtype.is_float8()
        except ValueError:
            faithful = False
        if faithful:
            return v.to_numpy()
        if not v.shape:
            return np.asarray(v.item(), np.float32)
        out = np.empty(tuple(v.shape), np.float32)
        for i in np.ndindex(*v.shape):
            out[i] = v[i].item() if len(i) > 1 else v[i[0]].item()
        return out

    def execute(self, graph: Any, registry: dict, inputs: Any) -> list[np.ndarray]:
        self.session = self.session or self.M.InferenceSession()
        model = self.session.load(graph, weights_registry=registry)
        buffers = [self.M.Buffer.from_numpy(np.ascontiguousarray(x)) for x in inputs]
        return [self.np_of(o) for o in model.execute(*buffers)]

    def forward(self, module: Any, *inputs: np.ndarray) -> list[np.ndarray]:
        registry = module.state_dict()
        graph = self.graph("forward", module, input_types=self.types(inputs))
        return self.execute(graph, registry, inputs)

    def compute(self, fn: Any, *inputs: np.ndarray) -> list[np.ndarray]:
        def tensors(*values: Any) -> tuple:
            return tuple(_outputs(fn(*[v.tensor for v in values])))

        graph = self.graph("compute", tensors, input_types=self.types(inputs))
        return self.execute(graph, {}, inputs)

    def trace_only(self, fn: Any, *inputs: np.ndarray) -> None:
        self.graph("trace", fn, input_types=self.types(inputs))

    def in_graph(self, fn: Any, *shapes: Any) -> Any:
        types = self.types([np.zeros(s, np.float32) for s in shapes])
        with self.graph("scratch", input_types=types) as g:
            self.inputs = g.inputs
            return fn()

    def shard_shapes(self, weight: Any, n: int) -> list[list[int]]:
        devices = [self.M.DeviceRef.CPU()] * n
        return self.in_graph(lambda: [[int(d) for d in s.shape] for s in weight.shard(devices)])

    def shard_values_many(self, items: list) -> list[list[np.ndarray]]:
        with self.graph("shards", input_types=[]) as g:
            outs = []
            for weight, _, n in items:
                shards = weight.shard([self.M.DeviceRef.CPU()] * n)
                outs += [s[:] if len(s.shape) else s for s in shards]
            g.output(*outs)
        flat = iter(self.execute(g, {w.name: v for w, v, _ in items}, []))
        return [[next(flat) for _ in range(n)] for _, _, n in items]


def namespace_max() -> SimpleNamespace:
    """Modular MAX itself, where it is installed."""
    M = _namespace("max")
    x = _Max(M)
    M.np_of, M.compute, M.forward, M.trace_only = x.np_of, x.compute, x.forward, x.trace_only
    M.in_graph, M.graph_input = x.in_graph, lambda shape, index=0: x.inputs[index].tensor
    M.shard_shapes, M.shard_values_many = x.shard_shapes, x.shard_values_many
    M.shard_values = lambda weight, value, n: x.shard_values_many([(weight, value, n)])[0]
    M.tensor = lambda value: value.tensor
    return M
