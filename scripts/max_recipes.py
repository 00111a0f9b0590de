"""How the classes and functions of MAX's own model files are made small and called: one entry for each run.

A recipe is called with a function that imports a module by its path below ``max`` (or ``maxjax``), and gives what
is called and the arrays it is called with. It is the same for both libraries and names nothing of either that the
files do not. Weights get values by their full names, so that a name which differs is seen.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np

Recipe = Callable[[Callable[[str], Any]], tuple[Any, Iterable[Any]]]
RECIPES: dict[str, Recipe] = {}
ARCHITECTURES = "pipelines.architectures."


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
        self.nn = of("nn")

    def config(self, **given: Any) -> SimpleNamespace:
        """Settings under all the names that configurations have for them."""
        usual = {
            "dtype": self.f32, "device": self.cpu, "devices": [self.cpu], "hidden_size": 16, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 2, "intermediate_size": 24, "vocab_size": 32,
            "layer_norm_eps": 1e-5, "rms_norm_eps": 1e-6, "max_position_embeddings": 32, "hidden_act": "gelu",
            "hidden_activation": "gelu_tanh", "attention_bias": False, "patch_size": 2, "num_channels": 3, "image_size": 8,
            "quant_config": None, "quantization_encoding": None, "unquantized_dtype": self.f32, "rope_theta": 10000.0,
            "tie_word_embeddings": False, "attention_dropout": 0.0,
        }  # fmt: skip
        return SimpleNamespace(**(usual | given))

    def apart(self, *names: str) -> Any:
        """Arguments that every layer of diffusion models takes."""
        return {"dtype": self.f32, "device": self.cpu}


def recipe(file: str, *more: str) -> Callable[[Callable[[Kit], Any]], Any]:
    """Adds a run of a file below ``max/pipelines/architectures``; a file may have several."""

    def keep(function: Callable[[Kit], Any]) -> Any:
        path = file.removesuffix(".py").replace("/", ".")
        RECIPES[f"{file} {function.__name__}"] = lambda of: function(Kit(of, path))
        return function

    return keep


def add(name: str, make: Callable[[Kit], Any]) -> None:
    """Adds a run written as `file what`."""
    file = name.split()[0]
    RECIPES[name] = lambda of: make(Kit(of, file.removesuffix(".py").replace("/", ".")))


from scripts.max_recipe_list import fill  # noqa: E402

fill(add)
