"""What calling a jitted function costs for each way of passing the same weights.

The function does nothing, so what is timed is flattening, checking and dispatch. The arrays are
tiny and the same for all; the floor is a flat tuple of them. Rounds are interleaved and each
starts with a different way, so that a disturbance hits all alike. Printed are medians and their
ratio to the floor. Wanted: maxjax at most 1.25 times the floor, with 290 leaves (32 layers) and
with 11 (one layer).
"""

import argparse
import gc
import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import nnx

from maxjax.graph import DeviceRef, Weight
from maxjax.nn import LayerList, Module

NAMES = ("q", "k", "v", "o", "gate", "up", "down", "norm1", "norm2")  # of one layer
WANTED = 1.25


def arrays(layers: int) -> list[jax.Array]:
    """Nine arrays for each layer and two more."""
    return [jnp.full((2, 2), float(i)) for i in range(layers * len(NAMES) + 2)]


class _Layer(Module):
    def __init__(self, values):
        super().__init__()
        for name, value in zip(NAMES, values, strict=True):
            setattr(self, name, _weight(name, value))

    def __call__(self, x):
        return x


class _Model(Module):
    def __init__(self, values):
        super().__init__()
        self.embed, self.norm = _weight("embed", values[0]), _weight("norm", values[1])
        self.layers = LayerList([_Layer(group) for group in _groups(values)])

    def __call__(self, x):
        return x


def _weight(name, value):
    weight = Weight(name, str(value.dtype), value.shape, DeviceRef.CPU())
    weight.value = value
    return weight


def _groups(values):
    return [values[i : i + len(NAMES)] for i in range(2, len(values), len(NAMES))]


class _EqxLayer(eqx.Module):
    q: jax.Array
    k: jax.Array
    v: jax.Array
    o: jax.Array
    gate: jax.Array
    up: jax.Array
    down: jax.Array
    norm1: jax.Array
    norm2: jax.Array


class _EqxModel(eqx.Module):
    embed: jax.Array
    norm: jax.Array
    layers: list[_EqxLayer]


class _NnxLayer(nnx.Module):
    def __init__(self, values):
        for name, value in zip(NAMES, values, strict=True):
            setattr(self, name, nnx.Param(value))


class _NnxModel(nnx.Module):
    def __init__(self, values):
        self.embed, self.norm = nnx.Param(values[0]), nnx.Param(values[1])
        self.layers = nnx.List([_NnxLayer(group) for group in _groups(values)])


def contestants(layers: int) -> dict:
    """Name → (jitted function, its first argument); the floor comes first."""
    values = arrays(layers)
    equinox = _EqxModel(*values[:2], [_EqxLayer(*group) for group in _groups(values)])
    flax = _NnxModel(values)

    def nothing(model, x):
        return x

    found = {
        "flat tuple": (jax.jit(nothing), tuple(values)),
        "maxjax Module": (jax.jit(nothing), _Model(values)),
        "equinox, jax.jit": (jax.jit(nothing), equinox),
        "equinox, filter_jit": (eqx.filter_jit(nothing), equinox),
        "flax nnx, jax.jit": (jax.jit(nothing), flax),
        "flax nnx, nnx.jit": (nnx.jit(nothing), flax),
    }
    for name, (_, model) in found.items():
        assert len(jax.tree.leaves(model)) == len(values), name
    return found


def measure(layers: int, rounds: int, seconds: float) -> dict[str, float]:
    """Name → median microseconds for one call."""
    x = jnp.zeros(())
    found = contestants(layers)
    calls, times = {}, {name: [] for name in found}
    for name, (function, model) in found.items():
        jax.block_until_ready(function(model, x))
        start = time.perf_counter()
        for _ in range(3):
            jax.block_until_ready(function(model, x))
        calls[name] = max(1, int(seconds / ((time.perf_counter() - start) / 3)))
    gc.disable()
    names = list(found)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            function, model = found[name]
            start = time.perf_counter()
            for _ in range(calls[name]):
                y = function(model, x)
            jax.block_until_ready(y)
            times[name].append((time.perf_counter() - start) / calls[name] * 1e6)
        gc.collect()
    gc.enable()
    return {name: statistics.median(samples) for name, samples in times.items()}


def main() -> None:
    """Prints one table for each number of leaves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run?")
    quick = parser.parse_args().quick
    rounds, seconds = (6, 0.002) if quick else (42, 0.01)
    for layers in (32, 1):
        medians = measure(layers, rounds, seconds)
        floor = medians["flat tuple"]
        print(f"{layers * len(NAMES) + 2} leaves: microseconds for a call, ratio to a flat tuple")
        for name, median in medians.items():
            print(f"  {name:20} {median:9.1f} {median / floor:8.2f} x")
        print(f"  wanted: maxjax <= {WANTED} x; median of {rounds} interleaved rounds\n")


if __name__ == "__main__":
    main()
