"""How long MAX takes to build and compile n attention blocks; run by a Python that has MAX.

    /path/to/python/with/max scripts/max_compile.py 2 8

The blocks are those of bench_compile.py, one subgraph called with each layer's weights. Prints
a line of JSON for each n. MAX's own compile cache must be empty, or the times mean nothing: set
MODULAR_MAX_CACHE_DIR to a new directory.
"""

import json
import sys
import time

import numpy as np
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, Weight, ops
from max.nn.layer import LayerList, Module

HEADS, WIDTH, INNER, TOKENS = 4, 128, 256, 32
CPU = DeviceRef.CPU()


def weight(name, *shape):
    return Weight(name, DType.float32, shape, CPU)


class Block(Module):
    """The block of bench_compile.py in MAX's ops."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = weight("norm1", WIDTH), weight("norm2", WIDTH)
        self.q, self.k = weight("q", WIDTH, WIDTH), weight("k", WIDTH, WIDTH)
        self.v, self.o = weight("v", WIDTH, WIDTH), weight("o", WIDTH, WIDTH)
        self.gate, self.up = weight("gate", INNER, WIDTH), weight("up", INNER, WIDTH)
        self.down = weight("down", WIDTH, INNER)

    def __call__(self, x, cos, sin, mask):
        y = ops.rms_norm(x, self.norm1, 1e-5)
        q, k, v = (self.heads(y @ w.T) for w in (self.q, self.k, self.v))
        q, k = self.turned(q, cos, sin), self.turned(k, cos, sin)
        scores = ops.softmax(q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5 + mask)
        y = (scores @ v).permute([0, 2, 1, 3]).reshape((1, TOKENS, WIDTH))
        h = x + y @ self.o.T
        y = ops.rms_norm(h, self.norm2, 1e-5)
        return h + (ops.silu(y @ self.gate.T) * (y @ self.up.T)) @ self.down.T

    def heads(self, x):
        return x.reshape((1, TOKENS, HEADS, WIDTH // HEADS)).permute([0, 2, 1, 3])

    def turned(self, x, cos, sin):
        one, two = ops.chunk(x, 2, -1)
        return ops.concat([one * cos - two * sin, two * cos + one * sin], -1)


class Net(Module):
    """n blocks as calls of a subgraph, which is that of the first block."""

    def __init__(self, layers):
        super().__init__()
        self.layers = LayerList([Block() for _ in range(layers)])

    def __call__(self, x, cos, sin, mask):
        block = self.layers[0].build_subgraph(
            "block", [x, cos, sin, mask], weight_prefix="layers.0."
        )
        for i in range(len(self.layers)):
            x = ops.call(block, x, cos, sin, mask, prefix=f"layers.{i}.")[0].tensor
        return x


def seconds(layers):
    model = Net(layers)
    rng = np.random.default_rng(0)
    state = {
        name: rng.normal(size=[int(d) for d in w.shape]).astype(np.float32)
        for name, w in model.raw_state_dict().items()
    }
    model.load_state_dict(state)
    half = WIDTH // HEADS // 2
    shapes = [(1, TOKENS, WIDTH), (TOKENS, half), (TOKENS, half), (TOKENS, TOKENS)]
    kinds = [TensorType(DType.float32, shape, CPU) for shape in shapes]
    session = InferenceSession()
    start = time.perf_counter()
    graph = Graph("net", model, input_types=kinds)
    built = time.perf_counter()
    program = session.load(graph, weights_registry=model.state_dict())
    end = time.perf_counter()
    program.execute(*[np.zeros(shape, np.float32) for shape in shapes])
    return {"layers": layers, "build": built - start, "compile": end - built}


if __name__ == "__main__":
    for n in map(int, sys.argv[1:]):
        print(json.dumps(seconds(n)), flush=True)
