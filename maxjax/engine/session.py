"""Written for files of Modular MAX: InferenceSession, the interface to compile and run a Graph.

maxjax itself does not import it: ``Module.compile`` makes programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..graph import Graph
from ..graph import Model as Model
from ..graph import Module as GraphModule


class InferenceSession:
    """Compiles Graphs with their weights.

    Args:
        devices: MAX's list of devices, which is only stored. A program runs where its weights and
            inputs are, by default on JAX's default device.
        num_threads: MAX's option, which is ignored: XLA chooses its threads.

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
            model: the Graph.
            weights_registry: values by name, as returned by ``Module.state_dict()`` or
                ``Weights.allocated_weights``. A weight that is not in it keeps its own value.
                Unknown names are ignored.
            custom_extensions: MAX's custom kernels, which are not supported.

        Raises:
            TypeError: ``model`` is not a Graph.
            ValueError: a weight has no value, or a value of another type.
            NotImplementedError: ``custom_extensions`` are given.
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

    def load_all(
        self,
        model: Graph | GraphModule,
        *,
        weights_registry: Mapping[str, Any] | None = None,
        custom_extensions: Any = None,
    ) -> dict[str, Model]:
        """Compiles each Graph of a ``maxjax.graph.Module``, or one Graph; the arguments are those of :meth:`load`.

        Returns:
            The programs by the names of their Graphs.
        """
        graphs = model.graphs.values() if isinstance(model, GraphModule) else [model]
        options: Any = {
            "weights_registry": weights_registry,
            "custom_extensions": custom_extensions,
        }
        return {graph.name: self.load(graph, **options) for graph in graphs}
