"""The MLP of MAX's documentation, with the weight's axes put right; only the imports say maxjax."""

from maxjax import nn
from maxjax.dtype import DType
from maxjax.graph import DeviceRef, Weight, ops


class Linear(nn.Module):
    def __init__(self, in_dims, out_dims):
        super().__init__()
        self.weight = Weight("weight", DType.float32, (out_dims, in_dims), DeviceRef.CPU())

    def __call__(self, x):
        return x @ self.weight.T


class MLP(nn.Module):
    def __init__(self):
        self.up = Linear(5, 10)
        self.gate = Linear(5, 10)
        self.down = Linear(10, 5)

    def __call__(self, x):
        return self.down(ops.silu(self.gate(x)) + self.up(x))
