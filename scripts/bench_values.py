"""What TensorValues cost: a block written with them against the same block in plain jnp.

Eager calls of the two take turns, with activations of a decode step and of a small batch; printed are
the medians and their ratio (wanted: at most 1.3). Under jit both must become the same program: the
optimised HLO is compared as text, without metadata.
"""

import argparse
import os
import re
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A matmul of TensorValues would use the CPU kernels, which plain jnp does not: both must compute alike.
os.environ.setdefault("MAXJAX_KERNELS", "off")

import jax
import jax.numpy as jnp

import maxjax
from maxjax.graph import DeviceRef, TensorValue, Weight, ops
from maxjax.nn import Module

WANTED = 1.3


class Block(Module):
    """RMS norm, matmuls and a gate, as MAX model code writes them."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        device = DeviceRef.CPU()
        self.norm = Weight("norm", "float32", (dim,), device)
        self.gate = Weight("gate", "float32", (hidden, dim), device)
        self.up = Weight("up", "float32", (hidden, dim), device)
        self.down = Weight("down", "float32", (dim, hidden), device)

    def __call__(self, x):
        variance = (x * x).mean(-1)
        h = x * ops.rsqrt(variance + 1e-6) * self.norm.reshape((1, -1))
        h = ops.silu(h @ self.gate.T) * (h @ self.up.T)
        return x + h @ self.down.T


def plain(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """The same block in jnp."""
    variance = jnp.mean(x * x, -1, keepdims=True)
    h = x * jax.lax.rsqrt(variance + 1e-6) * weights["norm"].reshape((1, -1))
    product = lambda h, w: jax.lax.dot_general(h, w, (((1,), (1,)), ((), ())))
    h = jax.nn.silu(product(h, weights["gate"])) * product(h, weights["up"])
    return x + product(h, weights["down"])


def hlo(function, *args) -> str:
    """Optimised HLO without names of sources and of the module."""
    text = jax.jit(function).lower(*args).compile().as_text()
    text = re.sub(r", metadata=\{[^}]*\}", "", text)
    for i, name in enumerate(
        re.findall(r"%([\w.]+) = \S+ parameter\(\d+\)", text[text.index("ENTRY") :])
    ):
        text = re.sub(rf"\b{re.escape(name)}\b", f"argument{i}", text)
    return text[text.index("ENTRY") :]


def main() -> None:
    """Prints both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    rounds = 5 if parser.parse_args().quick else 41
    model = maxjax.init(Block(576, 1536), jax.random.key(0))
    weights = {name: jnp.asarray(value) for name, value in model.state_dict().items()}
    for rows in (1, 32):
        x = jax.random.normal(jax.random.key(1), (rows, 576))
        times: dict[str, list[float]] = {"TensorValue": [], "plain jnp": []}
        calls = {
            "TensorValue": lambda x=x: model(TensorValue(x)).value,
            "plain jnp": lambda x=x: plain(weights, x),
        }
        for call in calls.values():
            call().block_until_ready()
        for _ in range(rounds):
            for name, call in calls.items():
                start = time.perf_counter()
                for _ in range(20):
                    y = call()
                y.block_until_ready()
                times[name].append((time.perf_counter() - start) / 20 * 1e6)
        ours, floor = (statistics.median(times[name]) for name in times)
        print(f"{rows:3} rows, eager: TensorValue {ours:7.0f} us, plain jnp {floor:7.0f} us, "
              f"{ours / floor:.2f} x (wanted <= {WANTED} x)")  # fmt: skip
        ours_text = hlo(lambda m, x: m(TensorValue(x)).value, model, x)
        plain_text = hlo(lambda n, g, u, d, x: plain({"norm": n, "gate": g, "up": u, "down": d}, x),
                         *(weights[n] for n in model.raw_state_dict()), x)  # fmt: skip
        print(
            f"{rows:3} rows, jit: the optimised HLO is {'the same' if ours_text == plain_text else 'DIFFERENT'}"
        )
        assert jnp.allclose(calls["TensorValue"](), calls["plain jnp"](), atol=1e-4)


if __name__ == "__main__":
    main()
