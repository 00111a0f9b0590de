"""How the classes and functions of MAX's own model files are made small and called: one entry for each run.

A recipe is called with a function that imports a module by its path below ``max`` (or ``maxjax``), and gives what
is called and the arrays it is called with. It is the same for both libraries and names nothing of either that the
files do not. Weights get values by their full names, so that a name which differs is seen.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

Recipe = Callable[[Callable[[str], Any]], tuple[Any, Iterable[Any]]]
RECIPES: dict[str, Recipe] = {}
ARCHITECTURES = "pipelines.architectures."
X = 16  # the width of most layers


def weight_value(name: str, shape: Iterable[Any], dtype: str) -> np.ndarray:
    """The value of a weight, which follows from its name and shape alone."""
    sizes = tuple(map(int, shape))
    draw = np.random.default_rng(zlib.crc32(name.encode()))
    if dtype.startswith(("int", "uint")):
        return draw.integers(0, 2, sizes).astype(dtype)
    values = draw.standard_normal(sizes)
    values = 1 + values / 10 if len(sizes) < 2 else values / np.sqrt(sizes[-1])
    return values.astype(np.float32)


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Random float32 numbers."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def ids(*shape: int, below: int = 30, seed: int = 0, dtype: Any = np.int64) -> np.ndarray:
    """Random integers."""
    return np.random.default_rng(seed).integers(2, below, shape).astype(dtype)


class Sized(NamedTuple):
    """An input whose sizes have names in the graph.

    Attributes:
        array: its numbers.
        sizes: a name or a number for each axis.
        device: the kind of device that it lies on in the graph.
    """

    array: np.ndarray
    sizes: tuple[str | int, ...]
    device: str = "CPU"

    @classmethod
    def on_gpu(cls, array: np.ndarray) -> Sized:
        """An input of a file that says itself that it computes on a GPU."""
        return cls(array, array.shape, "GPU")


def typed(inputs: Iterable[Any], of: Callable[[str], Any]) -> tuple[list[np.ndarray], list[Any]]:
    """The arrays of the inputs of a recipe, and their types in a graph."""
    graph, dtype = of("graph"), of("dtype").DType
    place = graph.DeviceRef
    found = [
        one if isinstance(one, Sized) else Sized(np.asarray(one), np.shape(one)) for one in inputs
    ]
    types = [
        graph.TensorType(dtype.from_numpy(one.array.dtype), one.sizes, getattr(place, one.device)())
        for one in found
    ]
    return [one.array for one in found], types


class Kit:
    """What the recipes of one file take from a library: the file, and small settings.

    Attributes:
        file: the module of the file.
    """

    def __init__(self, of: Callable[[str], Any], path: str):
        self.of, self.file = of, of(ARCHITECTURES + path) if path else None
        self.dtype = of("dtype").DType
        self.f32 = self.dtype.float32
        self.graph = of("graph")
        self.ops = self.graph.ops
        self.cpu = self.graph.DeviceRef.CPU()
        self.two = [self.cpu, self.graph.DeviceRef.CPU(1)]
        self.nn = of("nn")

    def config(self, **given: Any) -> SimpleNamespace:
        """Settings under all the names that configurations have for them."""
        usual = {
            "dtype": self.f32, "device": self.cpu, "devices": [self.cpu], "hidden_size": X, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 2, "intermediate_size": 24, "vocab_size": 32,
            "layer_norm_eps": 1e-5, "rms_norm_eps": 1e-6, "max_position_embeddings": 32, "max_seq_len": 32,
            "hidden_act": "gelu", "hidden_activation": "gelu_tanh", "attention_bias": False, "patch_size": 2,
            "num_channels": 3, "image_size": 8, "quant_config": None, "quantization_encoding": None,
            "unquantized_dtype": self.f32, "rope_theta": 10000.0, "tie_word_embeddings": False,
            "attention_dropout": 0.0,
        }  # fmt: skip
        return SimpleNamespace(**(usual | given))

    def signals(self) -> list[Any]:
        """A signal buffer in the graph for each of ``two`` devices."""
        kinds = (self.graph.BufferType(self.dtype.uint8, (4,), device) for device in self.two)
        return [self.ops.buffer_create(kind) for kind in kinds]

    def summed(self, layer: Any, call: Callable[..., Any]) -> Any:
        """The sum of what the parts of a layer on ``two`` devices give.

        Args:
            layer: has a strategy for two devices.
            call: is called with a part and a function that moves a tensor to its device.
        """
        parts = zip(layer.shard(self.two), self.two, strict=True)
        found = [call(part, lambda x, device=device: x.to(device)) for part, device in parts]
        return found[0] + found[1].to(self.cpu)

    def apart(self, *names: str) -> Any:
        """Arguments that every layer of diffusion models takes."""
        return {"dtype": self.f32, "device": self.cpu}


def add(name: str, make: Callable[[Kit], Any]) -> None:
    """Adds a run written as `file what`."""
    file = name.split()[0]
    RECIPES[name] = lambda of: make(Kit(of, file.removesuffix(".py").replace("/", ".")))


class Extra:
    """A layer that is called in another way than by its arrays alone.

    Args:
        layer: the Module, which has the weights.
        call: what is called instead of it.
    """

    def __init__(self, layer: Any, call: Callable[..., Any]):
        self.layer, self.run = layer, call

    def __call__(self, *values: Any) -> Any:
        return self.run(*values)

    def state_dict(self) -> Any:
        return self.layer.state_dict()

    @classmethod
    def call(cls, layer: Any, function: Callable[..., Any]) -> Extra:
        """A layer that `function(layer, *values)` calls."""
        return cls(layer, lambda *values: function(layer, *values))

    @classmethod
    def of(cls, layer: Any, function: Callable[..., Any], arrays: Any) -> tuple[Extra, Any]:
        """The same with its arrays."""
        return cls.call(layer, function), arrays
