"""QuantizedLinear: a linear layer whose weight is stored as the several tensors of a quantised format."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ...dtype import DType
from ...graph.device import DeviceRef
from ...graph.kind import on_arrays
from ...graph.placement.arrays import is_manual, on_mesh, specs_within
from ...graph.placement.specs import (
    BATCH,
    PartOf,
    batch_axes,
    mesh_of,
    names_in,
    parts_over,
    spec_of,
    used_split,
)
from ...graph.weight.weight import Weight
from ...kernels import QuantTensors, explicit, matmul
from ...kernels.formats import QuantLayout
from ...kernels.matmul import format_matmul
from ...kernels.operation import has_static_shapes
from ..low_rank import LowRank
from ..product import add_bias
from .forms import Bits


class QuantizedLinear(LowRank):
    """A linear layer over the last axis, with a quantised weight.

    The layer keeps the tensors of the file, and each call dequantises them to the dtype of the input: on NVIDIA
    GPUs a tile at a time in registers, elsewhere into one matrix, which is not kept after the call.
    Gradients flow to the input, but not to the tensors. Some formats round the input too.

    Args:
        layout: QuantLayout: format, tensors and shape of the weight.
        device: device that the weights are declared on.
        has_bias: whether to add a bias.
        dtype: dtype of the bias.

    Attributes:
        layout: QuantLayout of the weight.
        bias: Weight ``[out_dim]``, or None.

    Each tensor of the layout is a Weight under its name in the file. 8-bit floats are held as their bits
    (uint8) in memory; state dicts and files have the floats.

    Example:
        >>> from maxjax.dtype import DType
        >>> from maxjax.nn.quantized import QuantTensor
        >>> tensors = (QuantTensor("weight", DType.int8, (2, 3), (0, 1)),
        ...            QuantTensor("weight_scale", DType.float32, (2, 1), (0, None)))
        >>> layer = QuantizedLinear(QuantLayout("scaled", 2, 3, tensors), DeviceRef.CPU())
        >>> list(layer.raw_state_dict()), layer.weight.shape
        (['weight', 'weight_scale'], (2, 3))
        >>> _ = layer.load_state_dict({"weight": jnp.ones((2, 3), jnp.int8), "weight_scale": jnp.full((2, 1), 0.5)})
        >>> print(layer(jnp.ones((1, 3))))
        [[1.5 1.5]]
    """

    def __init__(
        self,
        layout: QuantLayout,
        device: DeviceRef,
        *,
        has_bias: bool = False,
        dtype: Any = "float32",
    ):
        super().__init__()
        self.layout, self.bias = layout, None
        for one in layout.tensors:
            dtype_held = DType.uint8 if one.has_bits else one.dtype
            weight = Weight(one.name, dtype_held, one.shape, device)
            form = Bits(one.dtype) if one.has_bits else one.form
            if form is not None:
                weight.declare("a form in files", form=form)
            setattr(self, one.attribute, weight)
        if has_bias:
            self.bias = Weight("bias", dtype, (layout.out_dim,), device)

    @property
    def weight(self) -> DequantisedWeight:
        """The weight ``[out_dim, in_dim]``, which is dequantised when it is converted to an array."""
        return DequantisedWeight(self)

    @on_arrays
    def __call__(self, x: Any) -> Any:
        """``[..., in_dim]`` → ``[..., out_dim]`` in the dtype of ``x``.

        Raises:
            ValueError: the last axis of ``x`` is not ``in_dim`` long.
        """
        array = jnp.asarray(x)
        y = self._product(self.layout.rounded(array))
        return add_bias(self.updated(y, array), self.bias)

    def _product(self, x: jax.Array) -> jax.Array:
        w = self.operand()
        mesh, rows, split = self._where()
        run: Any = matmul
        if split is not None and x.ndim and has_static_shapes(x):
            run = partial(_on_parts, mesh=mesh, split=split)
        wanted = [*explicit.entries(x)[:-1], rows]
        return explicit.automatic(run, explicit.mesh_of(x, *jax.tree.leaves(w)), wanted)(x, w)

    def _where(self) -> tuple[Any, tuple[str, ...], _Split | None]:
        """The mesh of the weight, if there is one, the axes that split its rows, and how its numbers are split over it.

        The last is None without a mesh, and if devices cannot dequantise their parts by themselves.
        """
        layout = self.layout
        weights = {one: getattr(self, one.attribute) for one in layout.tensors}
        mesh = mesh_of([weight.sharding for weight in weights.values()])
        if mesh is None or mesh.size == 1 or any(map(is_manual, mesh.axis_names)):
            return None, (), None
        first = layout.tensors[0]
        found = {along: used_split(weights[first], axis) for axis, along in enumerate(first.axes)}
        split = _Split(found.get(0, ()), found.get(1, ()))
        divided = (layout.divides(i, parts_over(mesh, names)) for i, names in enumerate(split))
        return mesh, split.rows, split if all(divided) else None

    def operand(self) -> QuantTensors:
        """The weight as an operand of ``kernels.matmul``: its tensors as they are."""
        layout = self.layout
        tensors = {one.name: getattr(self, one.attribute).operand() for one in layout.tensors}
        return QuantTensors(layout, tensors)

    def dequantise(self, dtype: Any = jnp.float32) -> jax.Array:
        """The weight ``[out_dim, in_dim]`` as an array."""
        tensors = self._tensors()
        run = lambda tensors: self.layout.dequantise(jax.lax.stop_gradient(tensors)).astype(dtype)
        if (mesh := explicit.mesh_of(*tensors.values())) is not None:
            wanted = [self._split(axis, tensors) for axis in (0, 1)]
            return explicit.automatic(run, mesh, wanted)(tensors)
        return run(tensors)

    def _tensors(self) -> dict[str, jax.Array]:
        """The tensors by name; 8-bit floats as uint8."""
        layout = self.layout
        return {one.name: jnp.asarray(getattr(self, one.attribute)) for one in layout.tensors}

    def _split(self, axis: int, tensors: dict[str, jax.Array]) -> explicit.Entry:
        """The mesh axes of type Explicit over which an axis of the weight is split."""
        entries = {name: explicit.entries(array) for name, array in tensors.items()}
        return self.layout.split(axis, entries)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits each tensor as the rule for ``weight`` splits the weight, where its axes allow."""
        layout = self.layout
        rules = {
            one.attribute: PartOf("weight", layout.shape, one.axes)
            for one in layout.tensors
            if not one.is_whole
        }
        return {**rules, **super().sharding_rules()}


class _Split(NamedTuple):
    """The mesh axes over which the rows and the columns of a weight ``[out, in]`` are split."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]


def _on_parts(x: jax.Array, w: QuantTensors, *, mesh: Any, split: _Split) -> jax.Array:
    """``x @ w.T``, of which each device computes the part of its tensors."""
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else w.dtype
    used = {*split.rows, *split.columns}
    tokens: list[Any] = [None] * (x.ndim - 1)
    for axis, kinds in enumerate([BATCH, ("seq",)][: x.ndim - 1]):
        names = [name for name in batch_axes(mesh, x.shape[axis], kinds) if name not in used]
        tokens[axis] = tuple(names) or None

    layout = w.layout
    for along, names in enumerate(split):
        w = w.undivided(along, parts_over(mesh, names))
    w = jax.tree.map(jnp.asarray, w)  # indices of layers too

    def local(x: jax.Array, w: Any) -> jax.Array:
        w = QuantTensors(layout, w.tensors)
        for along, names in enumerate(split):
            if names:
                w = w.part(along, parts_over(mesh, names), jax.lax.axis_index(names))
        if not split.columns:
            return format_matmul(x, w, dtype)
        # Accelerators exchange numbers in the dtype of the activations, CPUs in float32.
        wide, narrow = (
            partial(_summed, over=split.columns, dtype=one) for one in (jnp.float32, dtype)
        )
        return jax.lax.platform_dependent(
            x, w, cpu=lambda *a: wide(*a).astype(dtype), default=narrow
        )

    columns, rows = (names or None for names in (split.columns, split.rows))
    places = specs_within(w, PartitionSpec(rows, columns))
    specs = PartitionSpec(*tokens, columns), places
    return on_mesh(local, mesh, specs, PartitionSpec(*tokens, rows))(x, w)


def _summed(x: jax.Array, w: QuantTensors, over: tuple[str, ...], dtype: Any) -> jax.Array:
    return jax.lax.psum(format_matmul(x, w, dtype), over)


class DequantisedWeight:
    """The weight of a QuantizedLinear: its shape and sharding, and its values as a float32 array.

    Attributes:
        layer: layer that has the weight.
    """

    def __init__(self, layer: QuantizedLinear):
        self.layer = layer

    @property
    def shape(self) -> tuple[int, int]:
        """``(out_dim, in_dim)``."""
        return self.layer.layout.shape

    logical_shape = shape
    ndim = 2

    def split_over(self, axis: int) -> tuple[str, ...]:
        """The mesh axes that an axis of the weight is split over."""
        entries = {}
        for one in self.layer.layout.tensors:
            sharding = getattr(self.layer, one.attribute).sharding
            spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
            entries[one.name] = [names_in(entry) for entry in spec]
        return self.layer.layout.split(axis, entries)

    @property
    def sharding(self) -> Any:
        """The Sharding that the dequantised weight would have; None lets JAX choose."""
        found = getattr(self.layer, self.layer.layout.tensors[0].attribute).sharding
        if not isinstance(found, NamedSharding):
            return found
        spec: PartitionSpec = spec_of([self.split_over(0), self.split_over(1)])
        return NamedSharding(found.mesh, spec, memory_kind=found.memory_kind)

    @property
    def T(self) -> jax.Array:
        """The transposed weight ``[in_dim, out_dim]`` as an array."""
        return self.layer.dequantise().T

    def __jax_array__(self) -> jax.Array:
        return self.layer.dequantise()

    def __kernel_operand__(self) -> QuantTensors:
        return self.layer.operand()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.layer.dequantise(), dtype=dtype)

    def __repr__(self) -> str:
        return f"DequantisedWeight({self.layer.layout.format}, {list(self.shape)})"
