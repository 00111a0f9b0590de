"""The model that several processes load together, in tests/test_distributed.py."""

from typing import Any

from maxjax import nn
from maxjax.graph import DeviceRef

WIDTH, INNER, LAYERS = 64, 512, 3


class Block(nn.Module):
    """A feed-forward network with a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.MLP("float32", None, WIDTH, INNER, [DeviceRef.CPU()])

    def __call__(self, x: Any) -> Any:
        return x + self.mlp(x)


class Network(nn.Module):
    """Blocks in turn, as a list or as a stack."""

    def __init__(self, stacked: bool = False, scale: float = 1.0):
        super().__init__()
        self.scale = scale
        layers = nn.LayerList([Block() for _ in range(LAYERS)])
        self.layers = layers.stack() if stacked else layers

    def __call__(self, x: Any) -> Any:
        return self.layers(x) * self.scale
