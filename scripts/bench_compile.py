"""How long it takes until a stack of layers runs, by depth, and compared with other ways to write it.

compile   trace + lower + compile of n attention blocks: maxjax (``LayerStack.scan`` under
          ``jax.jit``, and ``Module.compile``), ``lax.scan`` written by hand, flax nnx, equinox,
          and plain unrolled JAX. Wanted: maxjax at 128 layers at most 1.1 times its time at 2, and
          1.1 times the scan by hand; the optimised HLO as long at 128 layers as at 2.
again     the same program in a second process, with the compile cache. Wanted: 20 % of the first.
dispatch  calling a compiled Model with 290 weights, against the raw executable. Wanted: 1.1.
load      1 GB of weights from a safetensors file into a stack, against separate layers.
          Wanted: 1.1 times the time, and at most the largest tensor + 64 MB of memory more.
calls     32 and 126 layers called by ops.call one after the other, as in MAX: one loop inside
          ``Module.compile``, n calls of one trace under ``jax.jit``; compared with ``layers.scan``
          and with a plain Python loop.
gradient  a step over 32 layers: activations kept against recomputed, stacked against unrolled.

Rounds are interleaved and each starts with a different way; printed are medians and ratios.
"""

import argparse
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MAXJAX_COMPILE_CACHE", "0")

import jax
import jax.numpy as jnp
import numpy as np
from bench_load import memory, start

from maxjax import init, nn
from maxjax.columns import columns
from maxjax.graph import DeviceRef, compile_cache, ops

CPU = DeviceRef.CPU()
HEADS, WIDTH, INNER, TOKENS = 4, 128, 256, 32
# Names and shapes of the weights of a block, as in a checkpoint.
WEIGHTS = {
    "input_layernorm.weight": (WIDTH,), "post_attention_layernorm.weight": (WIDTH,),
    "self_attn.q_proj.weight": (WIDTH, WIDTH), "self_attn.k_proj.weight": (WIDTH, WIDTH),
    "self_attn.v_proj.weight": (WIDTH, WIDTH), "self_attn.o_proj.weight": (WIDTH, WIDTH),
    "mlp.gate_proj.weight": (INNER, WIDTH), "mlp.up_proj.weight": (INNER, WIDTH),
    "mlp.down_proj.weight": (WIDTH, INNER),
}  # fmt: skip
X = jnp.asarray(np.random.default_rng(0).normal(size=(1, TOKENS, WIDTH)).astype(np.float32))


# --- the same model in each way -------------------------------------------------------------


class Net(nn.Module):
    """n blocks of maxjax's own layers."""

    def __init__(self, layers: int, stacked: bool = True):
        super().__init__()
        rope = nn.RotaryEmbedding(WIDTH, HEADS, 10000.0, TOKENS, interleaved=False)
        blocks = nn.LayerList(_block(rope) for _ in range(layers))
        self.layers = blocks.stack() if stacked else blocks

    def __call__(self, h, remat=None):
        if isinstance(self.layers, nn.LayerStack):
            return self.layers.scan(h, remat=remat)
        for layer in self.layers:
            h = layer(h)
        return h


def _block(rope):
    attention = nn.AttentionWithRope(
        rope=rope, num_attention_heads=HEADS, num_key_value_heads=HEADS, hidden_size=WIDTH,
        devices=[CPU], dtype="float32",
    )  # fmt: skip
    mlp = nn.MLP("float32", None, WIDTH, INNER, [CPU])
    norms = (nn.RMSNorm(WIDTH, "float32", 1e-5, multiply_before_cast=False) for _ in range(2))
    return nn.TransformerBlock(attention, mlp, *norms)


def block(w, x):
    """The hand-written block; ``w`` returns a weight by its name."""
    h = x + _attention(w, _norm(x, w("input_layernorm.weight")))
    y = _norm(h, w("post_attention_layernorm.weight"))
    gate = jax.nn.silu(_product(y, w("mlp.gate_proj.weight")))
    return h + _product(gate * _product(y, w("mlp.up_proj.weight")), w("mlp.down_proj.weight"))


def _attention(w, x):
    def heads(name):
        y = _product(x, w(f"self_attn.{name}_proj.weight"))
        return y.reshape(*y.shape[:-1], HEADS, WIDTH // HEADS)

    rate = 10000.0 ** (-np.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS))
    angles = jnp.asarray((np.arange(x.shape[1])[:, None] * rate).astype(np.float32))[:, None]
    q, k, v = _turned(heads("q"), angles), _turned(heads("k"), angles), heads("v")
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.float32((WIDTH // HEADS) ** 0.5)
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
    y = jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape)
    return _product(y, w("self_attn.o_proj.weight"))


def _turned(x, angles):
    one, two = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1)


def _norm(x, w):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * w


def _product(x, w):
    return jax.lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())))


def by_hand(layers):
    stacked = {n: jax.ShapeDtypeStruct((layers, *s), np.float32) for n, s in WEIGHTS.items()}

    def run(weights, x):
        return jax.lax.scan(lambda h, w: (block(w.__getitem__, h), None), x, weights)[0]

    return run, stacked


def unrolled(layers):
    each = [
        {n: jax.ShapeDtypeStruct(s, np.float32) for n, s in WEIGHTS.items()} for _ in range(layers)
    ]

    def run(weights, x):
        for w in weights:
            x = block(w.__getitem__, x)
        return x

    return run, each


def maxjax_stack(layers):
    return (lambda model, x: model(x)), Net(layers)


def with_equinox(layers):
    import equinox as eqx

    class Block(eqx.Module):
        weights: dict

        def __call__(self, x):
            return block(self.weights.__getitem__, x)

    def make(_):
        return Block({n: jnp.zeros(s) for n, s in WEIGHTS.items()})

    blocks = jax.eval_shape(eqx.filter_vmap(make), jnp.arange(layers))

    def run(blocks, x):
        dynamic, static = eqx.partition(blocks, eqx.is_array)
        return jax.lax.scan(lambda h, d: (eqx.combine(d, static)(h), None), x, dynamic)[0]

    return run, blocks


def with_nnx(layers):
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self):
            for name, shape in WEIGHTS.items():
                setattr(self, name.replace(".", "_"), nnx.Param(jnp.zeros(shape)))

        def __call__(self, x):
            return block(lambda name: getattr(self, name.replace(".", "_"))[...], x)

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(_):
        return Block()

    graph, state = nnx.split(make(jnp.arange(layers)))

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(layer, h):
        return layer(h)

    return (lambda state, x: forward(nnx.merge(graph, state), x)), state


def maxjax_compile(layers):
    return None, Net(layers)


WAYS = {
    "maxjax": maxjax_stack, "maxjax Module.compile": maxjax_compile, "lax.scan by hand": by_hand,
    "equinox": with_equinox, "flax nnx": with_nnx, "unrolled": unrolled,
}  # fmt: skip


# --- compile ----------------------------------------------------------------------------------


def seconds(way: str, layers: int) -> tuple[float, int]:
    """Seconds of trace + lower + compile of a new model, and the length of the optimised HLO."""
    run, weights = WAYS[way](layers)
    jax.clear_caches()
    gc.collect()
    start = time.perf_counter()
    if run is None:
        program = weights.compile(X)._run
    else:
        program = jax.jit(run).lower(weights, X).compile()
    took = time.perf_counter() - start
    return took, len(program.as_text())


def check() -> None:
    """Checks that all ways compute the same."""
    model = init(Net(3), jax.random.key(0))
    values = model.state_dict()
    stacked = {n: jnp.stack([values[f"layers.{i}.{n}"] for i in range(3)]) for n in WEIGHTS}
    want = by_hand(3)[0](stacked, X)
    np.testing.assert_allclose(model(X), want, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(model.compile(X)(X), want, rtol=2e-4, atol=2e-5)


def compile_times(depths, rounds, most_unrolled):
    check()
    cases = [(way, n) for way in WAYS for n in depths if way != "unrolled" or n <= most_unrolled]
    times = {case: [] for case in cases}
    sizes = {}
    for way in WAYS:  # imports, and what JAX creates once per process
        seconds(way, 2)
    for number in range(rounds):
        for case in [*cases[number % len(cases) :], *cases[: number % len(cases)]]:
            if case[0] == "unrolled" and number:
                continue
            took, sizes[case] = seconds(*case)
            times[case].append(took)
    middle = {case: statistics.median(v) for case, v in times.items()}
    rows = [["trace + lower + compile, s", *(f"{n} layers" for n in depths)]]
    for way in WAYS:
        cells = (f"{middle[way, n]:.3f}" if (way, n) in middle else "-" for n in depths)
        rows.append([way, *cells])
    print(*columns(rows, right=range(1, 1 + len(depths))), sep="\n")
    least, most = depths[0], depths[-1]
    pairs = zip(times["maxjax", most], times["maxjax", least], strict=True)
    growth = statistics.median(a / b for a, b in pairs)
    print(f"maxjax, {most} layers / {least}: {growth:.2f} x (wanted: 1.1)")
    for way in ("lax.scan by hand", "equinox", "flax nnx"):
        pairs = zip(times["maxjax", most], times[way, most], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        print(
            f"maxjax / {way}, {most} layers: {ratio:.2f} x"
            + " (wanted: 1.1)" * (way == "lax.scan by hand")
        )
    print(
        f"optimised HLO, {most} layers / {least}: {sizes['maxjax', most] / sizes['maxjax', least]:.3f} x"
    )


def max_times(python, depths):
    """Times of MAX, run by a Python that has it, with an empty compile cache for each depth."""
    for layers in depths:
        with tempfile.TemporaryDirectory() as directory:
            result = subprocess.run(
                [python, str(Path(__file__).with_name("max_compile.py")), str(layers)],
                env={**os.environ, "MODULAR_MAX_CACHE_DIR": directory},
                check=True, capture_output=True, text=True,
            )  # fmt: skip
        found = json.loads(result.stdout.splitlines()[-1])
        print(
            f"MAX, {layers} layers: build {found['build']:.2f} s, compile {found['compile']:.1f} s"
        )


# --- calls ----------------------------------------------------------------------------------


class Calls(Net):
    """The blocks of Net as calls of a subgraph, which is that of the first block."""

    def __call__(self, h):
        sub = self.layers[0].build_subgraph("block", [h], weight_prefix="layers.0.")
        for i in range(len(self.layers)):
            h = ops.call(sub, h, prefix=f"layers.{i}.")[0]
        return h


def calls(layers, rounds):
    values = init(Net(layers), jax.random.key(0)).state_dict()
    ways = {
        "layers.scan, jax.jit: one loop": (Net, True, False),
        "layers.scan, Module.compile: one loop": (Net, True, True),
        "ops.call, Module.compile, LayerStack: one loop": (Calls, True, True),
        "ops.call, Module.compile, LayerList: n calls": (Calls, False, True),
        "ops.call, jax.jit, LayerStack: n calls": (Calls, True, False),
        "ops.call, jax.jit, LayerList: n calls": (Calls, False, False),
        "a Python loop, jax.jit: n traces": (Net, False, False),
    }
    times = {name: ([], [], []) for name in ways}
    for _ in range(rounds):
        for name, (make, stacked, in_graph) in ways.items():
            model = make(layers, stacked)
            model.load_state_dict(values)
            jax.clear_caches()
            begin = time.perf_counter()
            if in_graph:
                program = model.compile(X)
            else:
                lowered = jax.jit(lambda m, x: m(x)).lower(model, X)
                times[name][2].append(time.perf_counter() - begin)
                program = functools.partial(lowered.compile(), model)
            times[name][0].append(time.perf_counter() - begin)
            program(X)
            begin = time.perf_counter()
            for _ in range(20):
                y = program(X)
            jax.block_until_ready(y)
            times[name][1].append((time.perf_counter() - begin) / 20)
    for name, (compiled, run, lowered) in times.items():
        part = f" (trace + lower {statistics.median(lowered):6.3f} s)" if lowered else ""
        print(f"{layers:3} layers, {name:46}: {statistics.median(compiled):6.3f} s until compiled{part}, "
              f"a run {statistics.median(run) * 1e3:6.2f} ms")  # fmt: skip


# --- again ------------------------------------------------------------------------------------


def again(layers, rounds):
    """The time XLA takes in a first and a second process, with an empty and a filled cache."""
    ratios = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as directory:
            first, second = (
                _child("again-child", layers, MAXJAX_COMPILE_CACHE=directory) for _ in range(2)
            )
        ratios.append((second["compile"] / first["compile"], first, second))
    ratio, first, second = sorted(ratios, key=lambda r: r[0])[len(ratios) // 2]
    print(f"compile, {layers} layers: first process {first['compile']:.3f} s, second {second['compile']:.3f} s, "
          f"{ratio:.2f} x (wanted: 0.2); with trace and lower {second['all'] / first['all']:.2f} x")  # fmt: skip


def again_child(layers):
    compile_cache.enable()
    model = Net(layers)
    start = time.perf_counter()
    lowered = jax.jit(lambda m, x: m(x)).lower(model, X)
    middle = time.perf_counter()
    lowered.compile()
    end = time.perf_counter()
    print(json.dumps({"compile": end - middle, "all": end - start}))


def _child(name, *args, **environment):
    command = [sys.executable, __file__, name, *map(str, args)]
    result = subprocess.run(
        command, env={**os.environ, **environment}, check=True, capture_output=True, text=True
    )
    return json.loads(result.stdout.splitlines()[-1])


# --- dispatch ---------------------------------------------------------------------------------


def dispatch(rounds, calls=300):
    layers = 32
    model = init(Net(layers, stacked=False), jax.random.key(0))

    class Nothing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model
            self.first = nn.Linear(2, 2, "float32", CPU)
            self.last = nn.Linear(2, 2, "float32", CPU)

        def __call__(self, x):
            return x + sum(w.value.reshape(-1)[0] * 0 for w in self.raw_state_dict().values())

    whole = init(Nothing(), jax.random.key(0))
    x = jnp.ones(2)
    program = whole.compile(x)
    program(x)
    weights = program._weights.values()
    raw = program._run
    times = {"raw": [], "maxjax": []}
    for number in range(rounds):
        for name in ("raw", "maxjax") if number % 2 else ("maxjax", "raw"):
            start = time.perf_counter()
            if name == "raw":
                for _ in range(calls):
                    y = raw(weights, x)
            else:
                for _ in range(calls):
                    y = program(x)
            jax.block_until_ready(y)
            times[name].append((time.perf_counter() - start) / calls)
    ratio = statistics.median(a / b for a, b in zip(times["maxjax"], times["raw"], strict=True))
    print(f"dispatch of a Model with {len(weights)} weights: {statistics.median(times['maxjax']) * 1e6:.0f} us, "
          f"{ratio:.2f} x the raw executable (wanted: 1.1)")  # fmt: skip


# --- load -------------------------------------------------------------------------------------


class _Wide(nn.Module):
    def __init__(self, layers, width, stacked):
        super().__init__()
        blocks = nn.LayerList(nn.Linear(width, width, "float32", CPU) for _ in range(layers))
        self.layers = blocks.stack() if stacked else blocks

    def __call__(self, x):
        return x


def load(megabytes, rounds):
    from safetensors.numpy import save_file

    width = 2048 if megabytes >= 256 else 512
    layers = max(2, megabytes * 2**20 // (4 * width * width))
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "model.safetensors")
        one = np.random.default_rng(0).normal(size=(width, width)).astype(np.float32)
        save_file({f"layers.{i}.weight": one + i for i in range(layers)}, path)
        results = {0: [], 1: []}
        for number in range(rounds):
            for stacked in (0, 1) if number % 2 else (1, 0):
                results[stacked].append(_child("load-child", path, layers, width, stacked))
    ratio = statistics.median(
        b["seconds"] / a["seconds"] for a, b in zip(results[0], results[1], strict=True)
    )
    extra = statistics.median(r["extra"] for r in results[1])
    total = layers * width * width * 4
    print(f"loading {total / 1e9:.2f} GB into a stack: {ratio:.2f} x the time without one (wanted: 1.1), "
          f"{extra:.0f} MiB of memory beside them (wanted: {width * width * 4 / 2**20 + 64:.0f})")  # fmt: skip


def load_child(path, layers, width, stacked):
    from maxjax.graph.weights import load_weights

    layers, width = int(layers), int(width)
    model = _Wide(layers, width, bool(int(stacked)))
    jnp.zeros(()).block_until_ready()
    begin, resident = start()
    with load_weights(path) as weights:
        model.load_state_dict(weights)
    jax.block_until_ready(model)
    took, peak = time.perf_counter() - begin, memory("VmHWM")
    total = layers * width * width * 4 / 2**20
    assert model.layers[layers - 1].weight.shape == [width, width]
    print(json.dumps({"seconds": took, "extra": peak - resident - total}))


# --- gradient ---------------------------------------------------------------------------------


def gradient(layers):
    """Temporary memory of a gradient step, and the distance to the unrolled gradient."""
    stacked = init(Net(layers), jax.random.key(0))
    plain = init(Net(layers, stacked=False), jax.random.key(0))

    def step(remat):
        return jax.jit(jax.grad(lambda m, x: jnp.mean(m(x, remat=remat) ** 2)))

    programs = {
        "unrolled": step(None).lower(plain, X).compile(),
        "stacked": step(None).lower(stacked, X).compile(),
        "stacked, remat": step(True).lower(stacked, X).compile(),
        "stacked, dots_saveable": step("dots_saveable").lower(stacked, X).compile(),
    }
    want = programs["unrolled"](plain, X).state_dict()
    scale = max(float(jnp.abs(v).max()) for v in want.values())
    for name, program in programs.items():
        found = program(plain if name == "unrolled" else stacked, X).state_dict()
        worst = max(float(jnp.abs(found[n] - want[n]).max()) for n in want) / scale
        memory = program.memory_analysis().temp_size_in_bytes
        print(f"gradient, {layers} layers, {name:23}: {memory / 2**20:7.1f} MiB temporary, "
              f"off by {worst:.1e} of the largest (wanted: 1e-6)")  # fmt: skip


PARTS = ("compile", "calls", "again", "dispatch", "load", "gradient")


def main() -> None:
    if sys.argv[1:2] == ["again-child"]:
        return again_child(int(sys.argv[2]))
    if sys.argv[1:2] == ["load-child"]:
        return load_child(*sys.argv[2:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="which; default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--max", metavar="PYTHON", help="a Python that has MAX, to compare with")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    quick = options.quick
    rounds = 1 if quick else options.rounds
    for part in options.parts or PARTS:
        if part == "compile":
            compile_times([2, 8] if quick else [2, 8, 32, 128], rounds, 8 if quick else 128)
            if options.max:
                max_times(options.max, [2] if quick else [2, 32])
        elif part == "calls":
            for layers in (4,) if quick else (32, 126):
                calls(layers, 1 if quick else min(rounds, 5))
        elif part == "again":
            again(4 if quick else 32, 1 if quick else min(rounds, 3))
        elif part == "dispatch":
            dispatch(3 if quick else 3 * rounds)
        elif part == "load":
            load(32 if quick else 1024, 1 if quick else rounds)
        else:
            gradient(4 if quick else 32)


if __name__ == "__main__":
    main()
