"""QuantizedLinear: a linear layer whose weight is stored as the several tensors of a quantised format."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ...graph.device import DeviceRef
from ...graph.placement.specs import PartOf, names_in, spec_of
from ...graph.value import TensorValue, unwrap, wraps
from ...graph.weight.weight import Weight
from ...kernels import explicit, matmul
from ..layer import Module
from ..linear import add_bias
from .layout import Layout


class QuantizedLinear(Module):
    """A linear layer over the last axis, with a quantised weight.

    Its tensors are those of the file; a product dequantises them into one matrix, in the dtype of
    the input, which is dropped after it. Gradients reach the input, and not the tensors.

    Args:
        layout: tensors of the weight, and its shape.
        device: device that the weights are declared on.
        has_bias: whether to add a bias.
        dtype: dtype of the bias.

    Attributes:
        layout: the Layout.
        bias: Weight ``[out_dim]``, or None.

    Each tensor of the layout is a Weight under its name in the file.

    Example:
        >>> from maxjax.dtype import DType
        >>> from maxjax.nn.quantized import Tensor
        >>> tensors = (Tensor("weight", DType.int8, (2, 3), (0, 1)),
        ...            Tensor("weight_scale", DType.float32, (2, 1), (0, None)))
        >>> layer = QuantizedLinear(Layout("scaled", 2, 3, tensors), DeviceRef.CPU())
        >>> list(layer.raw_state_dict()), layer.weight.shape
        (['weight', 'weight_scale'], (2, 3))
        >>> _ = layer.load_state_dict({"weight": jnp.ones((2, 3), jnp.int8), "weight_scale": jnp.full((2, 1), 0.5)})
        >>> print(layer(jnp.ones((1, 3))))
        [[1.5 1.5]]
    """

    def __init__(
        self, layout: Layout, device: DeviceRef, *, has_bias: bool = False, dtype: Any = "float32"
    ):
        super().__init__()
        self.layout, self.bias = layout, None
        for one in layout.tensors:
            weight = Weight(one.name, one.dtype, one.shape, device)
            if one.form is not None:
                weight.stored.form = one.form
            setattr(self, one.attribute, weight)
        if has_bias:
            self.bias = Weight("bias", dtype, (layout.out_dim,), device)

    @property
    def weight(self) -> DequantisedWeight:
        """The weight ``[out_dim, in_dim]``, dequantised when it is used as an array."""
        return DequantisedWeight(self)

    def __call__(self, x: Any) -> Any:
        """``[..., in_dim]`` → ``[..., out_dim]`` in the dtype of ``x``, a TensorValue for a TensorValue.

        Raises:
            ValueError: the last axis of ``x`` is not ``in_dim`` long.
        """
        array = jnp.asarray(unwrap(x))
        dtype = array.dtype if jnp.issubdtype(array.dtype, jnp.floating) else jnp.dtype(jnp.float32)

        def product(x: jax.Array, tensors: dict[str, jax.Array]) -> jax.Array:
            return matmul(x, self._dequantised(tensors, dtype)).astype(dtype)

        # Derivatives dequantise again, and do not keep the floats of all layers.
        product = jax.checkpoint(product)
        tensors = self._tensors()
        mesh = explicit.mesh_of(array, *tensors.values())
        if mesh is not None:
            wanted = [*explicit.entries(array)[:-1], self._split(0, tensors)]
            product = explicit.automatic(product, mesh, wanted)
        y = product(array, tensors)
        if self.bias is not None:
            y = add_bias(y, self.bias)
        return TensorValue(y) if wraps(x) else y

    def dequantise(self, dtype: Any = jnp.float32) -> jax.Array:
        """The weight ``[out_dim, in_dim]`` as an array."""
        tensors = self._tensors()
        run = self._dequantised
        if (mesh := explicit.mesh_of(*tensors.values())) is not None:
            wanted = [self._split(axis, tensors) for axis in (0, 1)]
            return explicit.automatic(lambda t: run(t, dtype), mesh, wanted)(tensors)
        return run(tensors, dtype)

    def _tensors(self) -> dict[str, jax.Array]:
        layout = self.layout
        return {one.name: jnp.asarray(getattr(self, one.attribute)) for one in layout.tensors}

    def _split(self, axis: int, tensors: dict[str, jax.Array]) -> explicit.Entry:
        """The explicit mesh axes that an axis of the weight is split over."""
        entries = {name: explicit.entries(array) for name, array in tensors.items()}
        return self.layout.split(axis, entries)

    def _dequantised(self, tensors: dict[str, jax.Array], dtype: Any) -> jax.Array:
        return self.layout.dequantise(jax.lax.stop_gradient(tensors)).astype(dtype)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits each tensor as the rule for ``weight`` splits the weight, where its axes allow."""
        return dict[str, PartOf](self.layout.rules())


class DequantisedWeight:
    """The weight of a QuantizedLinear: its shape and sharding, and its values as a float32 array.

    Attributes:
        layer: the layer.
    """

    def __init__(self, layer: QuantizedLinear):
        self.layer = layer

    @property
    def shape(self) -> tuple[int, int]:
        """``(out_dim, in_dim)``."""
        return self.layer.layout.shape

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
        """The Sharding that the weight would have; None lets JAX choose."""
        found = getattr(self.layer, self.layer.layout.tensors[0].attribute).sharding
        if not isinstance(found, NamedSharding):
            return found
        spec: PartitionSpec = spec_of([self.split_over(0), self.split_over(1)])
        return NamedSharding(found.mesh, spec, memory_kind=found.memory_kind)

    def __jax_array__(self) -> jax.Array:
        return self.layer.dequantise()

    def __repr__(self) -> str:
        return f"DequantisedWeight({self.layer.layout.format}, {list(self.shape)})"
