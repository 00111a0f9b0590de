"""InferenceSession: MAX's way to compile and run a Graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..graph import Graph
from ..graph import Model as Model


class InferenceSession:
    """Compiles Graphs with their weights.

    Args:
        devices: MAX's list of devices. Programs run where their weights and inputs are;
            without placement that is JAX's default device.
        num_threads: MAX's. XLA chooses its own.

    Example:
        >>> import numpy as np
        >>> from maxjax.engine import InferenceSession
        >>> from maxjax.graph import DeviceRef, Graph, TensorType
        >>> kind = TensorType("float32", ["batch", 2], DeviceRef.CPU())
        >>> model = InferenceSession().load(Graph("double", lambda x: x * 2, [kind]))
        >>> model.execute(np.ones((3, 2), np.float32))[0].to_numpy().sum()
        np.float32(12.0)
    """

    def __init__(self, devices: Iterable[Any] = (), num_threads: int | None = None):
        self.devices = list(devices)
        del num_threads

    def load(
        self,
        model: Graph,
        *,
        weights_registry: Mapping[str, Any] | None = None,
        custom_extensions: Any = None,
    ) -> Model:
        """Compiles a Graph.

        Args:
            weights_registry: Values by name, as ``Module.state_dict()`` or
                ``Weights.allocated_weights`` gives them. Of a weight that is not in it,
                its own value counts. Other names are ignored.

        Raises:
            TypeError: ``model`` is no Graph.
            ValueError: A weight has no value, or one of another type.
            NotImplementedError: MAX's custom extensions.
        """
        if custom_extensions:
            raise NotImplementedError(
                "custom_extensions are MAX's own kernels and are not supported"
            )
        if not isinstance(model, Graph):
            raise TypeError(f"InferenceSession.load() takes a Graph, not {type(model).__name__}")
        program = Model(model, weights_registry)
        if weights_registry is None:
            program._weights.require(None, None)
        return program
