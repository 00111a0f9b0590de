"""export() and load_exported(): a model in a file, run without its classes."""

import dataclasses
import errno
import gc
import hashlib
import json
import os
import random
import stat
import subprocess
import sys
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export as jax_export
from safetensors.numpy import save_file

import maxjax.engine.export.arguments as arguments_module
from maxjax import nn
from maxjax.dtype import DType
from maxjax.engine.export.file import MAGIC, PREFIX, ProgramHeader
from maxjax.engine.export.program import ExportedProgram, load_exported
from maxjax.engine.export.signature import Signature, describe
from maxjax.engine.export.write import export
from maxjax.errors import (
    CheckpointAccessError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointLimitError,
    CheckpointMismatchError,
    CheckpointMissingError,
    CheckpointSaveError,
    CheckpointTruncatedError,
    UserInputError,
)
from maxjax.graph import DeviceRef, TensorType, TensorValue, Weight
from maxjax.graph.placement.mesh import make_mesh
from maxjax.graph.weights import WeightData, load_weights
from maxjax.kernels import native
from maxjax.models import BertConfig, BertModel
from maxjax.nn.layer import ExpertStack
from maxjax.storage.limits import Limits
from tests.fill import filled

CPU = DeviceRef.CPU()
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


@pytest.fixture(autouse=True)
def in_jnp(monkeypatch):
    """What was exported runs the jnp forms, so what it is compared with does, to the bit."""
    monkeypatch.setattr(native, "library", lambda: None)


def sds(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def linear(n=4, m=4, dtype="float32", bias=False):
    return nn.Linear(n, m, dtype, CPU, has_bias=bias)


def bits(tree):
    return [(a.dtype, a.shape, np.asarray(a).tobytes()) for a in jax.tree.leaves(tree)]


def header_of(path):
    data = path.read_bytes()
    return data[PREFIX.size : PREFIX.size + PREFIX.unpack_from(data)[1]]


def run(model, *args):
    return jax.jit(lambda m, *a: m(*a))(model, *args)


class Block(nn.Module):
    def __init__(self, dtype="float32"):
        super().__init__()
        self.mlp = nn.Sequential([linear(dtype=dtype), linear(dtype=dtype, bias=True)])

    def __call__(self, h, cache):
        return h + jnp.tanh(self.mlp(h)), cache + h


class Net(nn.Module):
    """A stack, or the same layers one by one, between an embedding and the head tied to it."""

    def __init__(self, depth=3, stack=True, dtype="float32"):
        super().__init__()
        self.embed = linear(dtype=dtype)
        self.layers = nn.LayerList(Block(dtype) for _ in range(depth))
        if stack:
            self.layers = self.layers.stack()
        self.head = linear(dtype=dtype)
        self.head.weight = self.embed.weight

    def __call__(self, h, caches):
        h = self.embed(h)
        if isinstance(self.layers, nn.LayerStack):
            h, caches = self.layers.scan(h, caches)
        else:
            out = []
            for i, layer in enumerate(self.layers):
                h, cache = layer(h, caches[i])
                out.append(cache)
            caches = jnp.stack(out)
        return self.head(h), caches


NET = (sds(3, 4), sds(3, 3, 4))
NET_ARGS = (X, np.ones((3, 3, 4), np.float32))


@pytest.fixture(scope="module")
def net():
    return filled(Net())


@pytest.fixture(scope="module")
def net_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("net") / "net.jaxport"
    export(Net(), NET, path)
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.jaxport"


class Call(nn.Module):
    """Anything that needs no weights, as a Module."""

    def __init__(self):
        super().__init__()

    def __call__(self, *args: Any) -> Any:
        return type(self).function(*args)


def calling(function):
    return type("Call", (Call,), {"function": staticmethod(function)})()


# --- what it computes -----------------------------------------------------------------------


def test_a_layer(path):
    model = linear(4, 2, bias=True)
    export(model, sds(3, 4), path)
    filled(model)
    program = load_exported(path)
    assert (
        repr(program) == "ExportedProgram(Linear(float32[3, 4]) -> float32[3, 2], 2 weights, cpu)"
    )
    assert program.names == ["weight", "bias"] and program.platforms == ("cpu",)
    assert program.weights == {"weight": sds(2, 4), "bias": sds(2)}
    assert program.inputs == (sds(3, 4),) and program.outputs == sds(3, 2)
    state = model.state_dict()
    for x in (X, jnp.asarray(X), TensorValue(X)):
        assert bits(program(state, x)) == bits(run(model, X))
    assert isinstance(program(state, TensorValue(X)), jax.Array)
    bound = program.bind({name: np.asarray(value) for name, value in state.items()})
    assert bits(bound(X)) == bits(run(model, X)) and bound.program is program
    assert repr(bound) == f"BoundProgram({program!r})"


def test_a_loaded_model_makes_the_same_file(net, net_file, path):
    export(net, NET, path)
    assert path.read_bytes() == net_file.read_bytes()
    assert not any(weight.is_lazy for weight in net.raw_state_dict().values())


def test_a_stack_is_known_by_its_layers_names(net, net_file, tmp_path):
    program = load_exported(net_file)
    assert program.names == list(net.raw_state_dict())
    assert "layers.2.mlp.1.bias" in program.names
    assert b"*" not in header_of(net_file)
    assert os.getcwd().encode() not in net_file.read_bytes()
    want = bits(run(net, *NET_ARGS))
    state = net.state_dict()
    assert bits(program(state, *NET_ARGS)) == want
    host = {name: np.asarray(value) for name, value in state.items()}
    assert bits(program(host, *NET_ARGS)) == want
    assert (
        bits(program({**host, "layers.1.mlp.0.weight": state["layers.1.mlp.0.weight"]}, *NET_ARGS))
        == want
    )
    assert bits(program(net.raw_state_dict(), *NET_ARGS)) == want
    data = {name: WeightData.from_numpy(value, name) for name, value in host.items()}
    assert bits(program(data, *NET_ARGS)) == want
    save_file({**host, "something.else": np.ones(3, np.int8)}, tmp_path / "m.safetensors")
    with load_weights(tmp_path / "m.safetensors") as weights:
        assert bits(program(weights, *NET_ARGS)) == want
    save_file({f"model.{name}": value for name, value in host.items()}, tmp_path / "p.safetensors")
    with load_weights(tmp_path / "p.safetensors") as weights:
        assert bits(program(weights.model, *NET_ARGS)) == want


def test_a_program_of_single_layers_takes_a_stacks_state(net, path):
    export(Net(stack=False), NET, path)
    found = load_exported(path)(net.state_dict(), *NET_ARGS)
    for one, other in zip(found, run(net, *NET_ARGS), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_a_pattern_with_layers_of_its_own(path):
    class Pattern(nn.Module):
        def __init__(self):
            super().__init__()
            kinds = [linear(bias=i % 2 == 0) for i in range(6)]
            self.layers = nn.LayerList([linear(bias=True), *kinds, linear(bias=True)]).stack(
                period=2, first=1
            )

        def __call__(self, h):
            return self.layers.scan(h)

    model = filled(Pattern())
    export(model, sds(3, 4), path)
    program = load_exported(path)
    assert program.names == list(model.raw_state_dict())
    assert bits(program(model.state_dict(), X)) == bits(run(model, X))


def test_tied_weights_go_by_any_of_their_names(net, net_file):
    program = load_exported(net_file)
    state = net.state_dict()
    assert "head.weight" not in program.names
    want = bits(program(state, *NET_ARGS))
    other = {**state, "head.weight": state["embed.weight"]}
    assert bits(program(other, *NET_ARGS)) == want
    other["head.weight"] = jnp.array(other["head.weight"])
    assert bits(program(other, *NET_ARGS)) == want
    del other["embed.weight"]
    assert bits(program(other, *NET_ARGS)) == want
    with pytest.raises(ValueError, match="'embed.weight' and 'head.weight' are one tied weight"):
        program({**state, "head.weight": state["embed.weight"] + 1}, *NET_ARGS)


def test_a_tie_to_a_slice_and_a_weight_all_layers_share(path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            layers = [linear(bias=True) for _ in range(3)]
            for layer in layers[1:]:
                layer.bias = layers[0].bias
            self.out = linear()
            self.layers = nn.LayerList(layers).stack()
            self.out.weight = layers[0].weight

        def __call__(self, h):
            return self.out(self.layers.scan(h))

    model = filled(Tied())
    export(model, sds(3, 4), path)
    program, state = load_exported(path), model.state_dict()
    assert program.names == list(state) == list(model.raw_state_dict())
    assert bits(program(state, X)) == bits(run(model, X))


def test_a_layer_whose_weight_is_anothers(path):
    model, owner = linear(), filled(linear())
    model.set_shared_weight("weight", owner.weight)
    assert not model.raw_state_dict()
    export(model, sds(3, 4), path)
    program = load_exported(path)
    assert program.names == ["weight"]
    assert bits(program(owner.state_dict(), X)) == bits(run(owner, X))


def test_bfloat16(path):
    model = filled(Net(dtype="bfloat16"))
    args = X.astype(jnp.bfloat16), jnp.zeros((3, 3, 4), jnp.bfloat16)
    export(model, args, path)
    program = load_exported(path)
    assert bits(program(model.state_dict(), *args)) == bits(run(model, *args))


def test_a_small_bert(path):
    config = BertConfig.from_dict({
        "architectures": ["BertModel"], "model_type": "bert", "vocab_size": 50, "hidden_size": 8,
        "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "max_position_embeddings": 16,
    })  # fmt: skip
    model = filled(BertModel(config))
    # BERT compares the length with what it has positions for, so it has to know.
    with pytest.raises(ValueError, match=r"BertModel has to know .* constraints="):
        export(
            BertModel(config), (sds(*jax_export.symbolic_shape("b, n"), dtype=np.int32),) * 2, path
        )
    sizes = jax_export.symbolic_shape("batch, tokens", constraints=["tokens <= 16"])
    kind = sds(*sizes, dtype=np.int32)
    export(BertModel(config), (kind, kind), path, platforms=("cpu", "cuda", "tpu"))
    program, state = load_exported(path), model.state_dict()
    for shape in ((1, 3), (2, 16)):
        ids = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
        mask = (ids % 3 != 1).astype(np.int32)
        states, pooled, *logits = program(state, ids, mask)
        assert logits == [None] * 3  # it has no head
        want = run(model, ids, mask)
        np.testing.assert_allclose(states, want.last_hidden_state, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(pooled, want.pooler_output, rtol=1e-5, atol=1e-6)
    with pytest.raises(
        ValueError, match=r"argument 1 must be int32\[batch, tokens\] with batch=2, "
    ):
        program(state, ids, mask[:1])
    with pytest.raises(ValueError, match="constraints it was exported with"):
        program(state, np.ones((1, 17), np.int32), np.ones((1, 17), np.int32))


class Cache(NamedTuple):
    keys: Any
    length: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    zeta: Any
    alpha: Any


@jax.tree_util.register_pytree_node_class
class Pair:
    def __init__(self, *both):
        self.both = both

    def tree_flatten(self):
        return self.both, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_a_process_without_the_classes(net, net_file, path, tmp_path):
    class Private(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net(dtype="float32")

        def __call__(self, state, mask):
            h, caches = self.net(state.alpha, state.zeta.keys)
            return {"h": h, "state": State(caches, mask), "pair": Pair(h, mask)}

    model = filled(Private())
    batch = jax_export.symbolic_shape("batch")
    spec = State(Cache(sds(3, *batch, 4), None), sds(*batch, 4)), sds(*batch, dtype=np.bool_)
    export(Private(), spec, path)
    arrays = {name: np.asarray(value) for name, value in model.state_dict().items()}
    save_file(arrays, tmp_path / "model.safetensors")
    caches, mask = np.full((3, 3, 4), 0.5, np.float32), np.array([True, False, True])
    code = f"""
import sys, numpy as np
import maxjax
from maxjax.engine.export.program import load_exported
program = load_exported({str(path)!r})
weights = maxjax.load_weights({str(tmp_path / "model.safetensors")!r})
x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
state = {{"alpha": x, "zeta": (np.full((3, 3, 4), 0.5, np.float32), None)}}
out = program(weights, state, np.array([True, False, True]))
assert type(out["pair"]) is tuple and list(out["state"]) == ["zeta", "alpha"], out
arrays = out["h"], out["state"]["zeta"], out["state"]["alpha"], *out["pair"]
np.savez({str(tmp_path / "out.npz")!r}, *map(np.asarray, arrays))
assert not any(module.startswith("tests") or "test_export" in module for module in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=os.getcwd()
    )
    assert done.returncode == 0, done.stderr
    found = list(np.load(tmp_path / "out.npz").values())
    want = run(model, State(Cache(caches, None), X), mask)
    want = [want["h"], want["state"].zeta, want["state"].alpha, *want["pair"].both]
    here = load_exported(path)(arrays, State(Cache(caches, None), X), mask)
    here = [here["h"], here["state"]["zeta"], here["state"]["alpha"], *here["pair"]]
    assert bits(found) == bits(here) == bits(want)


# --- sizes with names -----------------------------------------------------------------------


def test_named_sizes(path):
    class Flat(nn.Module):
        def __call__(self, x, y):
            assert isinstance(x, TensorValue)
            n = x.shape[0] * 2
            return x.reshape((n, 2)).cast("bfloat16"), y.max(axis=0)

    kinds = TensorType("float32", ["batch", 4], CPU), TensorType("float32", ["batch", "width"], CPU)
    export(Flat(), kinds, path)
    program = load_exported(path)
    assert str(program.inputs[1].shape) == "(batch, width)"
    assert str(program.outputs[0].shape) == "(2*batch, 2)"
    for n in (1, 3):
        flat, summed = program({}, X[:n], X[:n])
        assert (flat.shape, flat.dtype, summed.shape) == ((2 * n, 2), jnp.bfloat16, (1, 4))
    said = r"argument 1 must be float32\[batch, width\] with batch=3, not float32\[2, 4\]"
    with pytest.raises(ValueError, match=said):
        program({}, X, X[:2])
    with pytest.raises(ValueError, match=r"not float32\[0, 4\]; named sizes are 1 or more"):
        program({}, X[:0], X[:0])
    with pytest.raises(
        ValueError, match=r"argument 0 must be float32\[batch, 4\] with batch=4, not"
    ):
        program({}, X.T, X)


def test_sizes_of_jax_export_and_names_together(path):
    n, m = jax_export.symbolic_shape("n, 2*n + k")
    model = calling(lambda x, y, z: (y[: x.shape[0]] + x, z))
    export(model, (sds(n), sds(m), TensorType("int32", ["n", "own"], CPU)), path)
    program = load_exported(path)
    x, y, z = np.ones(2, np.float32), np.ones(7, np.float32), np.ones((2, 5), np.int32)
    assert program({}, x, y, z)[0].shape == (2,)
    with pytest.raises(ValueError, match="(?i)argument|polymorphic"):
        program({}, x, y[:3], z)
    export(calling(lambda x, y: (x, y)), (sds(n), sds(n * 2)), path)
    with pytest.raises(ValueError, match=r"1.*float32\[2\*n\].*n=2.*float32\[7\]"):
        load_exported(path)({}, x, y)


# --- arguments and results ------------------------------------------------------------------


def test_structures_come_and_go(path):
    def function(cache, state, pairs):
        return [cache, state, {"b": pairs["b"], "a": None, "n": (TensorValue(pairs["b"]), 2.0)}]

    spec = (Cache(sds(2), [sds(3)]), State(sds(4), None), {"b": sds(5), "a": ()})
    export(calling(function), spec, path)
    program = load_exported(path)
    arrays = [np.arange(n, dtype=np.float32) for n in (2, 3, 4, 5)]
    a, b, c, d = arrays
    own = (Cache(a, [b]), State(c, None), {"b": d, "a": ()})
    plain = ((a, [b]), {"alpha": None, "zeta": c}, {"a": (), "b": d})
    for args in (own, plain):
        cache, state, rest = program({}, *args)
        assert type(cache) is tuple and type(cache[1]) is list and bits(cache) == bits([a, b])
        assert list(state) == ["zeta", "alpha"] and state["alpha"] is None
        assert list(rest) == ["a", "b", "n"] and rest["n"][1] == 2 and bits(rest["n"][0]) == bits(d)
    assert jax.tree.map(lambda kind: kind.shape, program.inputs) == (
        ((2,), [(3,)]), {"zeta": (4,), "alpha": None}, {"a": (), "b": (5,)})  # fmt: skip


@pytest.mark.parametrize(
    "args, says",
    [
        ((), "not (): there are more or fewer"),
        ((X, X), "not (float32[3, 4], float32[3, 4]): there are more or fewer"),
        (((X, X),), "argument 0[1] differs"),
        (((X,),), "argument 0 differs"),
        (([X, {"k": X}],), "argument 0 differs"),
        (((X, {"q": X}),), "argument 0[1] differs"),
        (((X, {"k": None}),), "argument 0[1]['k'] differs"),
        (
            ((X, {"k": X, "q": X}),),
            "{'k': float32[3, 4], 'q': float32[3, 4]}),): argument 0[1] diff",
        ),
        (((X, {"k": X[:2]}),), "argument 0[1]['k'] must be float32[3, 4], not float32[2, 4]"),
        (((X, {"k": X.astype(np.float64)}),), "must be float32[3, 4], not float64[3, 4]"),
        (((X[0], {"k": X}),), "argument 0[0] must be float32[3, 4], not float32[4]"),
        (((3.0, {"k": X}),), "argument 0[0] must be float32[3, 4], not float"),
        ((("text", {"k": X}),), "argument 0[0] must be float32[3, 4], not str"),
        (
            ((X, {(1, 2): X}),),
            "must be a string or an integer here, not (1, 2): argument 0[1] differs",
        ),
        (((jax.random.key(0), {"k": X}),), "argument 0[0] must be float32[3, 4], not key<fry>[]"),
    ],
)
def test_other_arguments_are_refused(tree_file, args, says):
    with pytest.raises(ValueError) as caught:
        load_exported(tree_file)({}, *args)
    assert says in str(caught.value) and "float32[3, 4]" in str(caught.value)


@pytest.fixture(scope="module")
def tree_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tree") / "tree.jaxport"
    export(calling(lambda t: t[0] + t[1]["k"]), (((sds(3, 4), {"k": sds(3, 4)})),), path)
    return path


def test_one_spec_need_not_be_in_a_tuple(path):
    export(calling(lambda x: x), sds(2), path)
    assert load_exported(path).inputs == (sds(2),)
    export(calling(lambda x: x), [sds(2), None], path)
    assert load_exported(path).inputs == ([sds(2), None],)
    export(calling(lambda x: x[0]), Cache(X, None), path)
    assert load_exported(path).inputs == ((sds(3, 4), None),)
    export(calling(lambda: jnp.ones(2)), (), path)
    assert load_exported(path)({}).shape == (2,)
    export(calling(lambda x: None), sds(2), path)
    assert load_exported(path)({}, np.ones(2, np.float32)) is None


# --- models as arguments and results --------------------------------------------------------


def test_a_module_as_an_argument(path):
    export(calling(lambda model, x: (model(x), model)), (linear(), sds(3, 4)), path)
    model = filled(linear())
    program = load_exported(path)
    assert program.inputs == ({"weight": sds(4, 4)}, sds(3, 4))
    types = "Call(model(1 weight), float32[3, 4]) -> (float32[3, 4], model(1 weight)), 0 weights"
    assert repr(program) == f"ExportedProgram({types}, cpu)"
    found, back = program({}, {"weight": model.weight.value}, X)
    assert bits(found) == bits(run(model, X)) and bits(back) == bits(model.state_dict())
    assert bits(program({}, model, X)[0]) == bits(found)


def applied(model, h, caches):
    """Something of a model's results, and a model of the same structure."""
    h, caches = model(h, caches)
    return h, caches, jax.tree.map(lambda leaf: 2 * leaf, model)


@pytest.mark.parametrize("stack", [True, False])
def test_a_model_is_given_by_the_names_of_a_checkpoint(net, path, tmp_path, stack):
    """Stacked or not: from all that ``bind`` takes, and from a model of either kind."""
    export(calling(applied), (Net(stack=stack), *NET), path)
    program, state = load_exported(path), net.state_dict()
    assert list(program.inputs[0]) == list(program.outputs[2]) == list(net.raw_state_dict())
    assert program.inputs[0]["layers.1.mlp.1.bias"] == sds(4)
    assert b"*" not in header_of(path)
    model = Net(stack=stack)
    model.load_state_dict(state)
    want = run(model, *NET_ARGS)
    host = {name: np.asarray(value) for name, value in state.items()}
    other = Net(stack=not stack)
    other.load_state_dict(state)
    save_file({**host, "something.else": np.ones(3, np.int8)}, tmp_path / "m.safetensors")
    tied = {**host, "head.weight": host["embed.weight"]}
    del tied["embed.weight"]
    data = {name: WeightData.from_numpy(value, name) for name, value in host.items()}
    with load_weights(tmp_path / "m.safetensors") as weights:
        for given in (state, host, tied, data, weights, model, other, net.raw_state_dict()):
            *found, twice = program({}, given, *NET_ARGS)
            assert bits(found) == bits(want)
            assert list(twice) == list(state)
            for name, value in twice.items():
                np.testing.assert_array_equal(value, 2 * host[name])
    again = program({}, twice, *NET_ARGS)[2]
    np.testing.assert_array_equal(again["layers.2.mlp.0.weight"], 4 * host["layers.2.mlp.0.weight"])
    bound = program.bind({})
    assert bits(bound(host, *NET_ARGS)[:2]) == bits(want)


def test_a_model_itself_binds_its_weights(net, net_file):
    program, want = load_exported(net_file), bits(run(net, *NET_ARGS))
    single = Net(stack=False)
    single.load_state_dict(net.state_dict())
    for model in (net, single):
        assert bits(program(model, *NET_ARGS)) == bits(program.bind(model)(*NET_ARGS)) == want
    with pytest.raises(ValueError, match="Missing required weights: embed.weight, layers.0.mlp"):
        program(Net(), *NET_ARGS)


def test_what_is_wrong_with_a_model_among_the_arguments(net, path, tmp_path):
    export(calling(applied), (Net(), *NET), path)
    program, state = load_exported(path), net.state_dict()
    bad = {**state, "embed.weight": np.ones((4, 5), np.float32)}
    del bad["layers.0.mlp.0.weight"]
    with pytest.raises(ValueError) as caught:
        program({}, bad, *NET_ARGS)
    for text in (
        "the weights do not fit argument 0 of the exported Call",
        "'embed.weight' had different shape (expected=(4, 4), actual=(4, 5))",
        "Missing required weights: layers.0.mlp.0.weight",
    ):
        assert text in str(caught.value)
    save_file({"embed.weight": np.ones((4, 4), np.float32)}, tmp_path / "bad.safetensors")
    with load_weights(tmp_path / "bad.safetensors") as weights:
        with pytest.raises(CheckpointMismatchError, match="bad.safetensors: .* fit argument 0"):
            program({}, weights, *NET_ARGS)
    with pytest.raises(ValueError, match="argument 0 differs"):
        program({}, X, *NET_ARGS)
    with pytest.raises(ValueError, match="there are more or fewer"):
        program({}, state, X)
    with pytest.raises(
        ValueError, match=r"argument 1 must be float32\[3, 4\], not float32\[2, 4\]"
    ):
        program({}, state, X[:2], NET_ARGS[1])


def test_a_step_of_training_with_a_state_of_models(net, path):
    """A state that holds models: the program of one step is called with its own results."""

    def step(model, state, h, caches):
        loss = lambda model: jnp.sum(model(h, caches)[0] ** 2)
        value, gradient = jax.value_and_grad(loss)(model)
        momentum = jax.tree.map(lambda m, g: 0.5 * m + g, state["momentum"], gradient)
        model = jax.tree.map(lambda w, m: w - 0.01 * m, model, momentum)
        return value, model, {"momentum": momentum, "count": state["count"] + 1}

    state = {"momentum": jax.tree.map(jnp.zeros_like, net), "count": jnp.zeros((), jnp.int32)}
    export(calling(step), (Net(), state, *NET), path)
    program = load_exported(path)
    want, held, found = (net, state), state, (net.state_dict(), state)
    found = found[0], {"momentum": state["momentum"].state_dict(), "count": state["count"]}
    for _ in range(3):
        value, *want = jax.jit(step)(*want, *NET_ARGS)
        got, *found = program({}, *found, *NET_ARGS)
        np.testing.assert_allclose(got, value, rtol=1e-5)
    assert held is state and int(found[1]["count"]) == 3
    for name, weight in want[0].raw_state_dict().items():
        np.testing.assert_allclose(found[0][name], weight.value, rtol=1e-5, atol=1e-6)
    for name, weight in want[1]["momentum"].raw_state_dict().items():
        np.testing.assert_allclose(found[1]["momentum"][name], weight.value, rtol=1e-4, atol=1e-4)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = ExpertStack(linear(), 2)
        self.out = linear(bias=True)

    def __call__(self, h):
        every = jnp.einsum("hi,eoi->ho", h, self.experts.holder("weight").operand())
        return self.out(every)


class Experts(nn.Module):
    """Stacks in the layers of a stack."""

    def __init__(self):
        super().__init__()
        self.layers = nn.LayerList(Expert() for _ in range(3)).stack()

    def __call__(self, h):
        return self.layers.scan(h)


def test_stacks_of_stacks(path):
    model = filled(Experts())
    want, state = bits(run(model, X)), model.state_dict()
    assert "layers.2.experts.1.weight" in state
    export(Experts(), sds(3, 4), path)
    assert bits(load_exported(path)(state, X)) == bits(load_exported(path)(model, X)) == want
    export(calling(lambda model, h: (model(h), model)), (Experts(), sds(3, 4)), path)
    for given in (state, model):
        found, back = load_exported(path)({}, given, X)
        assert bits(found) == want and list(back) == list(state) and bits(back) == bits(state)


def test_a_model_on_a_mesh_as_an_argument(net, path):
    placed = filled(Net())
    placed.to(make_mesh(model=2))
    export(calling(applied), (placed, *NET), path)
    found = load_exported(path)({}, placed.state_dict(), *NET_ARGS)
    for one, other in zip(found[:2], run(filled(Net()), *NET_ARGS), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_a_cache_of_a_named_size_as_a_module(path):
    class Cache(nn.Module):
        def __init__(self, rows):
            super().__init__()
            self.keys = Weight("keys", "float32", (1, 4), CPU)
            self.ids = Weight("ids", "int64", (3,), CPU)
            self.keys.value = rows

    (n,) = jax_export.symbolic_shape("n")
    cache = Cache(jnp.zeros((1, 4)))
    leaves = [sds(n, 4), sds(3, dtype=np.int32)]
    spec = jax.tree.unflatten(jax.tree.structure(cache), leaves)
    export(calling(lambda cache, x: (x + cache.keys, cache.ids.value)), (spec, sds(n, 4)), path)
    program, ids = load_exported(path), jnp.arange(3, dtype=jnp.int32)
    for rows in (2, 3):
        found, _ = program({}, {"keys": X[:rows], "ids": ids}, X[:rows])
        assert bits(found) == bits(X[:rows] + X[:rows])
    with pytest.raises(ValueError, match="with n=2, not float32"):
        program({}, {"keys": X[:2], "ids": ids}, X)


def test_models_as_arguments_under_jit_and_grad(net, path):
    export(calling(lambda model, h, caches: model(h, caches)[0]), (Net(), *NET), path, vjp_order=1)
    program, state = load_exported(path), net.state_dict()
    loss = lambda state, h: jnp.sum(program({}, state, h, NET_ARGS[1]) ** 2)
    plain = lambda model, h: jnp.sum(model(h, NET_ARGS[1])[0] ** 2)
    want = jax.jit(jax.grad(plain))(net, jnp.asarray(X)).raw_state_dict()
    for transform in (lambda f: f, jax.jit):
        found = transform(jax.grad(loss))(state, jnp.asarray(X))
        assert set(found) == set(state)
        for name, weight in want.items():
            np.testing.assert_allclose(found[name], weight.value, rtol=1e-5, atol=1e-5)
        of_model = transform(jax.grad(loss))(net, jnp.asarray(X))
        for name, weight in of_model.raw_state_dict().items():
            np.testing.assert_allclose(weight.value, found[name], rtol=1e-6, atol=1e-6)


def test_files_of_the_format_before_models_are_read(net, net_file, path):
    path.write_bytes(net_file.read_bytes())
    rewritten(path, lambda header: {**header, "format": 2})
    assert bits(load_exported(path)(net.state_dict(), *NET_ARGS)) == bits(run(net, *NET_ARGS))


def test_a_random_key_and_other_dtypes(path):
    def function(key, flag, small, tokens):
        return jax.random.normal(key, (2,)), flag, small, tokens

    key = jax.random.key(3)
    small = np.ones(2, jnp.float8_e4m3fn)
    spec = sds(dtype=key.dtype), np.bool_(True), small, TensorType("int64", [2], CPU)
    export(calling(function), spec, path)
    tokens = np.array([1, 2])
    found = load_exported(path)({}, key, np.bool_(False), small, tokens)
    assert bits(found) == bits(
        [jax.random.normal(key, (2,)), np.bool_(False), small, tokens.astype(np.int32)]
    )
    assert bits(
        load_exported(path)({}, key, np.bool_(False), small, tokens.astype(np.int32))
    ) == bits(found)


@pytest.mark.parametrize(
    "spec, error, says",
    [
        (
            3,
            TypeError,
            "leaf 0 of spec must be a ShapeDtypeStruct, an array or a TensorType, not int",
        ),
        ((sds(2), "x"), TypeError, "leaf 1 of spec"),
        ({(1, 2): sds(2)}, TypeError, "a key of a dict must be a string or an integer"),
    ],
)
def test_what_is_no_spec(path, spec, error, says):
    with pytest.raises(error, match=says):
        export(calling(lambda *args: args), spec, path)
    assert not path.exists()


def test_what_cannot_be_exported(path):
    with pytest.raises(TypeError, match=r"export\(\) takes a Module, not function"):
        export(lambda x: x, sds(2), path)
    with pytest.raises(ValueError, match="vjp_order.*-1.*0"):
        export(linear(), sds(2, 4), path, vjp_order=-1)
    for wrong in ("gpu", ("cpu", "metal"), ()):
        with pytest.raises(ValueError, match="platforms must be among cpu, cuda, rocm, tpu, not"):
            export(linear(), sds(2, 4), path, platforms=wrong)
    model = linear()
    model.weight = Weight("weight", "float32", ("n", 4), CPU)
    with pytest.raises(ValueError, match="weight 'weight' has no shape"):
        export(model, sds(2, 4), path)
    with pytest.raises(ValueError, match="weight 'weight' has no shape"):
        export(calling(lambda model, x: model(x)), (model, sds(2, 4)), path)
    deep: Any = sds(2)
    for _ in range(40):
        deep = [deep]
    with pytest.raises(CheckpointLimitError, match="nested too deep"):
        export(calling(lambda x: jax.tree.leaves(x)[0]), deep, path)
    assert os.listdir(path.parent) == []


# --- weights --------------------------------------------------------------------------------


def test_all_that_is_wrong_with_the_weights_is_said_at_once(net, net_file, tmp_path):
    program, state = load_exported(net_file), net.state_dict()
    bad = {**state, "embed.weight": np.ones((4, 5), np.float32), "spare": np.ones(1),
           "layers.1.mlp.1.bias": np.ones(4, np.float64), "layers.0.mlp.0.wieght": np.ones(4)}  # fmt: skip
    del bad["layers.0.mlp.0.weight"], bad["layers.2.mlp.0.weight"]
    with pytest.raises(ValueError) as caught:
        program.bind(bad)
    for text in (
        "the weights do not fit the exported Net",
        "'embed.weight' had different shape (expected=(4, 4), actual=(4, 5))",
        "'layers.1.mlp.1.bias' had different dtype",
        "Missing required weights: layers.0.mlp.0.weight, layers.2.mlp.0.weight",
        "did you mean 'layers.0.mlp.0.wieght'?",
    ):
        assert text in str(caught.value)
    assert "spare" not in str(caught.value)
    save_file({"embed.weight": np.ones((4, 5), np.float32)}, tmp_path / "bad.safetensors")
    with load_weights(tmp_path / "bad.safetensors") as weights:
        with pytest.raises(
            CheckpointMismatchError, match="bad.safetensors: the weights do not fit"
        ):
            program(weights, *NET_ARGS)
    with pytest.raises(TypeError, match=r"as model.state_dict\(\), .* not list"):
        program.bind([net])
    with pytest.raises(ValueError, match="must be an array that supports DLPack"):
        program.bind({**state, "embed.weight": "text"})
    with pytest.raises(ValueError, match="embed.weight' had different dtype .*complex64"):
        program.bind({**state, "embed.weight": np.ones((4, 4), np.complex64)})


def test_an_unfilled_weight_is_missing(net_file):
    with pytest.raises(ValueError, match="Missing required weights: embed.weight, layers.0.mlp"):
        load_exported(net_file)(Net().raw_state_dict(), *NET_ARGS)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.ids = Weight("ids", "int64", (3,), CPU)
        self.scale = Weight("scale", "float32", (), CPU)

    def __call__(self, x):
        return x[self.ids.value] * self.scale


def test_wide_integers_and_scalars(path):
    export(Table(), sds(3, 4), path)
    program = load_exported(path)
    want = bits(X[[2, 0, 1]] * np.float32(2))
    for ids in (np.array([2, 0, 1]), jnp.array([2, 0, 1])):
        for scale in (np.float32(2), np.array([2], np.float32), jnp.full(1, 2, jnp.float32)):
            assert bits(program({"ids": ids, "scale": scale}, X)) == want
    with pytest.raises(ValueError, match="weight 'ids' holds integers from 1 to 1099511627776"):
        program({"ids": np.array([1, 2, 1 << 40]), "scale": scale}, X)
    with pytest.raises(ValueError, match="'ids' had different dtype"):
        program({"ids": np.ones(3, np.int8), "scale": scale}, X)


def test_arrays_of_another_layout(net, net_file):
    """Of the other byte order, not contiguous, not aligned, read-only."""
    state = {name: np.asarray(value) for name, value in net.state_dict().items()}
    odd = {name: np.asfortranarray(value) for name, value in state.items()}
    odd["embed.weight"] = state["embed.weight"].astype(">f4")
    odd["layers.0.mlp.0.weight"] = state["layers.0.mlp.0.weight"].astype(">f4")
    memory = np.zeros(65, np.uint8)
    memory[1:] = state["layers.1.mlp.0.weight"].reshape(-1).view(np.uint8)
    odd["layers.1.mlp.0.weight"] = memory[1:].view(np.float32).reshape(4, 4)
    program = load_exported(net_file)
    bound = program.bind(odd)
    memory[:] = 0  # what was bound is a copy
    odd["layers.2.mlp.0.weight"][:] = 0
    assert bits(bound(*NET_ARGS)) == bits(program(state, *NET_ARGS))


def test_a_program_of_64_bits(path):
    with jax.enable_x64(True):
        model = linear(4, 4, "float64")
        export(model, sds(3, 4, dtype=np.float64), path)
        state = {"weight": np.eye(4)}
        program = load_exported(path)
        assert bits(program(state, X.astype(np.float64))) == bits(X.astype(np.float64))
    with pytest.raises(ValueError, match="jax_enable_x64.*float64.*jax_enable_x64"):
        load_exported(path)(state, X.astype(np.float64))


def test_the_last_binding_is_used_again(net, net_file, monkeypatch):
    made = []
    place = arguments_module._place
    monkeypatch.setattr(arguments_module, "_place", lambda *args: made.append(1) or place(*args))
    program, state = load_exported(net_file), net.state_dict()
    want = bits(program(state, *NET_ARGS))
    assert bits(program(state, *NET_ARGS)) == want and bits(program(dict(state), *NET_ARGS)) == want
    assert len(made) == 1
    state["embed.weight"] = state["embed.weight"] * 2
    assert bits(program(state, *NET_ARGS)) != want and len(made) == 2
    old = state.pop("embed.weight")
    with pytest.raises(ValueError, match="Missing required weights: embed.weight"):
        program(state, *NET_ARGS)
    del old
    gc.collect()
    with pytest.raises(ValueError, match="Missing required weights: embed.weight"):
        program(state, *NET_ARGS)
    host = {name: np.array(value) for name, value in net.state_dict().items()}
    assert bits(program(host, *NET_ARGS)) == want
    host["embed.weight"] *= 2
    assert bits(program(host, *NET_ARGS)) == want  # as said
    assert bits(program.bind(host)(*NET_ARGS)) != want


def test_a_checkpoint_is_read_once(net, net_file, tmp_path, monkeypatch):
    made = []
    place = arguments_module._place
    monkeypatch.setattr(arguments_module, "_place", lambda *args: made.append(1) or place(*args))
    save_file({n: np.asarray(v) for n, v in net.state_dict().items()}, tmp_path / "a.safetensors")
    program = load_exported(net_file)
    with load_weights(tmp_path / "a.safetensors") as weights:
        want = bits(program(weights, *NET_ARGS))
    assert bits(program(weights, *NET_ARGS)) == want and len(made) == 1
    with load_weights(tmp_path / "a.safetensors") as weights:
        assert bits(program(weights, *NET_ARGS)) == want and len(made) == 2


def test_nothing_is_kept_alive(net, net_file):
    program, state = load_exported(net_file), net.state_dict()
    host = {name: np.array(value) for name, value in state.items()}
    program(host, *NET_ARGS)
    bound = program.bind(host)
    refs = [weakref.ref(value) for value in host.values()]
    held = [weakref.ref(value) for value in (*program._last[2], *bound._values)]
    gc.collect()
    gc.disable()
    try:
        del host
        assert not any(ref() is not None for ref in refs)
        del program, bound
        assert not any(ref() is not None for ref in held)
    finally:
        gc.enable()


# --- under JAX's transformations ------------------------------------------------------------


def test_under_jit_and_grad(net, path):
    export(Net(), NET, path, vjp_order=1)
    program, state = load_exported(path), net.state_dict()
    assert program.vjp_order == 1
    x, caches = map(jnp.asarray, NET_ARGS)

    def loss(arrays, x):
        return jnp.sum(program(arrays, x, caches)[0] ** 2)

    def plain(model, x):
        return jnp.sum(model(x, caches)[0] ** 2)

    want, want_x = jax.jit(jax.grad(plain, argnums=(0, 1)))(net, x)
    for transform in (lambda f: f, jax.jit):
        found, found_x = transform(jax.grad(loss, argnums=(0, 1)))(state, x)
        assert set(found) == set(state)
        for name, weight in want.raw_state_dict().items():
            np.testing.assert_allclose(found[name], weight.value, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found_x, want_x, rtol=1e-5, atol=1e-5)
    some = {**{n: np.asarray(v) for n, v in state.items()}}
    name = "layers.1.mlp.0.weight"
    one = jax.grad(lambda w: loss({**some, name: w}, x))(state[name])
    np.testing.assert_allclose(one, found[name], rtol=1e-6, atol=1e-6)
    # Nothing traced is left in what the program keeps.
    out = jax.jit(lambda x: program(state, x, caches))(x)
    assert bits(program(state, x, caches)) == bits(out)
    export(Net(), NET, path)
    with pytest.raises(ValueError, match="No VJP is available"):
        jax.grad(lambda x: jnp.sum(load_exported(path)(state, x, caches)[0]))(x)


def test_exported_once_more(path, net, net_file, tmp_path):
    inner, state = load_exported(net_file), net.state_dict()
    bound = inner.bind(state)
    export(calling(lambda x, caches: bound(x, caches)[0]), NET, path)
    # Another program, with the weights as its constants: XLA computes some of it while it compiles.
    np.testing.assert_allclose(
        load_exported(path)({}, *NET_ARGS), inner(state, *NET_ARGS)[0], rtol=1e-5, atol=1e-6
    )
    n, twice = jax_export.symbolic_shape("n, 2*n")
    export(calling(lambda x, y: y[: x.shape[0]] + x), (sds(n), sds(twice)), path)
    first = load_exported(path)
    m, both = jax_export.symbolic_shape("m + 1, 2*m + 2")
    export(calling(lambda x, y: first({}, x, y)), (sds(m), sds(both)), tmp_path / "second")
    ones = np.ones(6, np.float32)
    assert load_exported(tmp_path / "second")({}, ones[:3], ones).shape == (3,)
    with pytest.raises(ValueError):
        load_exported(tmp_path / "second")({}, ones[:4], ones)


# --- platforms and versions -----------------------------------------------------------------


def test_platforms(net, path):
    export(Net(), NET, path, platforms=["cpu", "tpu", "cuda", "cpu"])
    program = load_exported(path)
    assert program.platforms == ("cpu", "tpu", "cuda")
    assert bits(program(net.state_dict(), *NET_ARGS)) == bits(run(net, *NET_ARGS))
    export(Net(), NET, path, platforms="tpu")
    program = load_exported(path)  # what it holds can be looked at anywhere
    assert program.names and "tpu" in repr(program)
    with pytest.raises(CheckpointMismatchError) as caught:
        program(net.state_dict(), *NET_ARGS)
    assert (caught.value.expected, caught.value.found) == ("tpu", "cpu")
    assert "platforms=('tpu', 'cpu')" in str(caught.value) and str(path) in str(caught.value)
    export(calling(lambda x: x), sds(2), path, platforms="cuda")
    with pytest.raises(CheckpointMismatchError, match="expected cuda, found cpu"):
        load_exported(path)({}, np.ones(2, np.float32))


def rewritten(path, change, program=None):
    """The file with another header, and digests that are right."""
    data = path.read_bytes()
    length = PREFIX.unpack_from(data)[1]
    header = json.loads(data[PREFIX.size : PREFIX.size + length])
    program = data[PREFIX.size + length :] if program is None else program
    header.update(nbytes=len(program), sha256=hashlib.sha256(program).hexdigest())
    header = change(header)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(PREFIX.pack(MAGIC, len(text), hashlib.sha256(text).digest()) + text + program)


def test_a_jax_that_cannot_read_it(net, net_file, path, capfd):
    newer = dataclasses.replace(
        jax_export.export(jax.jit(lambda w, x: x))([], [sds(2)]), calling_convention_version=99
    )
    for program in (bytes(newer.serialize()), b"", b"\xff" * 400):
        path.write_bytes(net_file.read_bytes())
        rewritten(path, lambda header: {**header, "jax": "0.99"}, program)
        with pytest.raises(CheckpointMismatchError) as caught:
            load_exported(path)
        assert "cannot read the program" in str(caught.value) and "JAX 0.99" in caught.value.found
        assert jax.__version__ in caught.value.expected
    exported = jax_export.export(jax.jit(lambda w, x: x))([], [sds(2)])
    broken = dataclasses.replace(exported, mlir_module_serialized=b"ML\xefR nothing")
    export(calling(lambda x: x), sds(2), path)
    rewritten(path, lambda header: header, bytes(broken.serialize()))
    with pytest.raises(CheckpointMismatchError, match="cannot read the program"):
        load_exported(path)({}, np.ones(2, np.float32))


# --- damaged files --------------------------------------------------------------------------


def refused(path, data, *classes):
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        load_exported(path)
    assert isinstance(caught.value, classes), caught.value
    assert caught.value.path == str(path) and str(path) in str(caught.value)
    return caught.value


def test_a_changed_byte_anywhere(net_file, path):
    data = net_file.read_bytes()
    end = PREFIX.size + PREFIX.unpack_from(data)[1]
    rng = random.Random(0)
    places = [
        *range(PREFIX.size),
        *range(PREFIX.size, end, 7),
        *range(end, len(data), 61),
        len(data) - 1,
    ]
    for place in places:
        changed = bytearray(data)
        changed[place] ^= 1 << rng.randrange(8)
        if place < len(MAGIC):
            refused(path, changed, CheckpointFormatError)
        elif place < len(MAGIC) + 8:
            refused(
                path,
                changed,
                CheckpointTruncatedError,
                CheckpointCorruptError,
                CheckpointFormatError,
            )
        else:
            error = refused(path, changed, CheckpointCorruptError)
            assert ("header" if place < end else "program") in str(
                error
            ) and error.expected != error.found


def test_a_file_cut_off_anywhere(net_file, path):
    data = net_file.read_bytes()
    end = PREFIX.size + PREFIX.unpack_from(data)[1]
    for length in (0, 1, 7, 8, 47, 48, 60, end - 1, end, end + 1, len(data) - 1):
        error = refused(path, data[:length], CheckpointTruncatedError)
        assert error.found and error.hint
    error = refused(path, data + b"x", CheckpointFormatError)
    assert (error.offset, error.expected) == (len(data), f"{len(data)} bytes")


def test_other_files(path):
    assert refused(path, b"PK\x03\x04" + bytes(100), CheckpointFormatError).found == "zip archive"
    assert "pickle" in str(refused(path, b"\x80\x04cos\nsystem\n.", CheckpointError))
    assert refused(path, b"version https://git-lfs.github.com/spec/v1\n", CheckpointFormatError)
    assert "not a file of maxjax.export" in str(refused(path, bytes(100), CheckpointFormatError))
    with pytest.raises(CheckpointMissingError):
        load_exported(path.parent / "nothing")
    with pytest.raises(CheckpointFormatError, match="a directory"):
        load_exported(path.parent)
    huge = PREFIX.pack(MAGIC, 1 << 62, bytes(32)) + bytes(100)
    assert refused(path, huge, CheckpointTruncatedError).found == "100 bytes"


HEADERS = {
    "a later version": (lambda h: {**h, "format": 4}, "later version"),
    "an earlier version": (lambda h: {**h, "format": 1}, "an earlier version"),
    "no version": (lambda h: {k: v for k, v in h.items() if k != "format"}, "'format' is None"),
    "a list": (lambda h: [], "'format' is None"),
    "not JSON": (lambda h: b"{]", "not valid JSON"),
    "a key twice": (lambda h: b'{"format": 1, "format": 1}', "twice"),
    "a deep tree": (lambda h: b"[" * 100 + b"]" * 100, "nested too deep"),
    "a wrong type": (lambda h: {**h, "vjp_order": True}, "'vjp_order' is True"),
    "a negative size": (lambda h: {**h, "nbytes": -1}, "'nbytes' is -1"),
    "no weights": (lambda h: {**h, "weights": {}}, "other names"),
    "weights of another kind": (lambda h: {**h, "weights": {"a": 3}}, "'dtype' is None"),
    "aliases": (lambda h: {**h, "weights": {**h["weights"], "embed.weight": {
        **h["weights"]["embed.weight"], "aliases": 3}}}, "not a list of strings"),
    "an empty stack": (lambda h: {**h, "leaves": [*h["leaves"], []]}, "other names"),
    "a leaf twice": (lambda h: {**h, "leaves": [*h["leaves"], h["leaves"][0]]}, "other names"),
    "another order": (lambda h: {**h, "leaves": h["leaves"][::-1]}, "is listed as"),
    "another type": (lambda h: {**h, "inputs": {**h["inputs"], "dtypes": ["float32", "int64"]}},
                     "float32[3, 3, 4] is listed as int64"),
    "a type of a weight": (lambda h: {**h, "weights": {**h["weights"], "embed.weight": {
        "dtype": "float16", "aliases": []}}}, "float32[4, 4] is listed as float16"),
    "a type of a result": (lambda h: {**h, "outputs": {**h["outputs"], "dtypes": ["int8"] * 2}},
                           "float32[3, 4] is listed as int8"),
    "a type that is none": (lambda h: {**h, "inputs": {**h["inputs"], "dtypes": [-9] * 2}}, "not a list of strings"),
    "fewer inputs": (lambda h: {**h, "inputs": {"tree": {"tuple": ["leaf"]}, "dtypes": ["float32"]}},
                     "numbers of arrays"),
    "inputs and leaves": (lambda h: {**h, "inputs": {**h["inputs"], "dtypes": []}}, "the wrong number of leaves"),
    "inputs that are no tuple": (lambda h: {**h, "inputs": {**h["inputs"], "tree": {"list": ["leaf"] * 2}}},
                                 "not a tuple"),
    "a model without fields": (lambda h: {**h, "inputs": {**h["inputs"], "tree": {"tuple": [{"model": 3}, "leaf"]}}},
                               "'weights' is None"),
    "a model of other layers": (lambda h: {**h, "inputs": {**h["inputs"], "tree": {"tuple": [
        {"model": {"weights": {n: {"dtype": "float32", "aliases": []} for n in "ab"}, "leaves": [["a", "b"]]}},
        "leaf"]}}}, "float32[3, 4] is listed as 2 layers"),
    "a model with too many leaves": (lambda h: {**h, "inputs": {**h["inputs"], "tree": {"tuple": [
        {"model": {"weights": {n: {"dtype": "float32", "aliases": []} for n in "abc"}, "leaves": ["a", "b", "c"]}},
        ]}}}, "the wrong number of leaves"),
    "a model and more": (lambda h: {**h, "inputs": {**h["inputs"], "tree": {
        "model": {"weights": {}, "leaves": []}, "tuple": ["leaf"]}}}, "is not a valid tree"),
    "no tree": (lambda h: {**h, "outputs": {**h["outputs"], "tree": {"set": []}}}, "is not a valid tree"),
    "keys of two kinds": (lambda h: {**h, "outputs": {**h["outputs"], "tree": {
        "dict": [["a", "leaf"], [1, "leaf"]]}}}, "is not a valid tree"),
    "a key of a tree twice": (lambda h: {**h, "outputs": {**h["outputs"], "tree": {
        "dict": [["a", "leaf"], ["a", "leaf"]]}}}, "a key twice"),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_nobody_wrote(net_file, path, case):
    change, says = HEADERS[case]
    path.write_bytes(net_file.read_bytes())
    rewritten(path, change)
    with pytest.raises((CheckpointFormatError, CheckpointLimitError)) as caught:
        load_exported(path)
    assert says in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("with_models", [False, True])
def test_random_headers(net_file, path, tmp_path, with_models):
    """A value anywhere in the header replaced by another: refused, or as good as before."""
    rng = random.Random(1)
    values = [
        None,
        -1,
        1.5,
        10**30,
        True,
        "",
        "leaf",
        [],
        {},
        [[]],
        {"tuple": []},
        {"dict": [["a", 1]]},
    ]

    def change(header):
        here, key = header, rng.choice(list(header))
        while isinstance(here[key], (dict, list)) and here[key] and rng.random() < 0.8:
            here = here[key]
            key = rng.choice(list(here)) if isinstance(here, dict) else rng.randrange(len(here))
        here[key] = rng.choice(values)
        return header

    if with_models:
        net_file = tmp_path / "models"
        export(calling(applied), (Net(), *NET), net_file)
    for _ in range(150):
        path.write_bytes(net_file.read_bytes())
        rewritten(path, change)
        try:
            assert isinstance(load_exported(path), ExportedProgram)
        except CheckpointError as error:
            assert str(path) in str(error)


def test_limits(net_file):
    with pytest.raises(CheckpointLimitError, match="header_bytes"):
        load_exported(net_file, limits=Limits(header_bytes=100))


def test_trees_of_signatures():
    leaves: list[Any] = []
    tree = describe(
        {"b": [1, None], "a": State((), Pair(2, 3)), "c": {}, "d": Cache(4, {7: 5})}, leaves
    )
    assert tree == {"dict": [
        ["a", {"dict": [["zeta", {"tuple": []}], ["alpha", {"tuple": ["leaf", "leaf"]}]]}],
        ["b", {"list": ["leaf", None]}], ["c", {"dict": []}],
        ["d", {"tuple": ["leaf", {"dict": [[7, "leaf"]]}]}]]}  # fmt: skip
    assert leaves == [2, 3, 1, 4, 5]
    assert Signature(tree, ()).restore(leaves) == {
        "a": {"zeta": (), "alpha": (2, 3)}, "b": [1, None], "c": {}, "d": (4, {7: 5})}  # fmt: skip


# --- writing --------------------------------------------------------------------------------


def failing(number):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("function", ["write", "fsync", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_save_that_fails_leaves_the_old_file(path, monkeypatch, function, number):
    path.write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, function, failing(number))
        with pytest.raises(CheckpointSaveError) as caught:
            export(linear(), sds(3, 4), path)
    assert caught.value.errno == number and caught.value.path == str(path)
    assert "The previous file is untouched" in str(caught.value)
    assert path.read_bytes() == b"old" and os.listdir(path.parent) == [path.name]
    export(linear(), sds(3, 4), path)
    assert load_exported(path).names == ["weight"]


def test_an_interrupt_leaves_the_old_file(path, monkeypatch):
    path.write_bytes(b"old")

    def interrupt(fd):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            export(linear(), sds(3, 4), path)
    assert path.read_bytes() == b"old" and os.listdir(path.parent) == [path.name]


def test_what_is_on_disk_before_the_rename_is_whole(path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace

    def note(what, call, *args):
        done.append(what)
        call(*args)

    def kind(fd):
        return "folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else os.fstat(fd).st_size

    monkeypatch.setattr(os, "fsync", lambda fd: note(kind(fd), fsync, fd))
    monkeypatch.setattr(os, "replace", lambda *names: note("rename", replace, *names))
    export(linear(), sds(3, 4), path)
    assert done == [path.stat().st_size, "rename", "folder"]


def test_a_directory_that_cannot_be_flushed(path, monkeypatch):
    real = os.fsync

    def fsync(fd, number):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(number, os.strerror(number))
        real(fd)

    monkeypatch.setattr(os, "fsync", lambda fd: fsync(fd, errno.EINVAL))
    export(linear(), sds(3, 4), path)
    monkeypatch.setattr(os, "fsync", lambda fd: fsync(fd, errno.EIO))
    with pytest.raises(CheckpointSaveError, match="the file was written"):
        export(linear(), sds(3, 4), path)
    assert load_exported(path).names == ["weight"]


def test_paths_that_cannot_be_written(tmp_path, monkeypatch):
    def traced(*args):
        raise AssertionError("traced in vain")

    model = calling(traced)
    with pytest.raises(CheckpointMissingError, match="no such directory"):
        export(model, sds(2), tmp_path / "no" / "m.jaxport")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointMissingError):
        export(model, sds(2), tmp_path / "file" / "m.jaxport")
    with pytest.raises(CheckpointMissingError, match="NUL"):
        export(model, sds(2), "a\0b")
    with pytest.raises(CheckpointSaveError, match="it is a directory") as caught:
        export(model, sds(2), tmp_path)
    assert caught.value.errno == errno.EISDIR
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(CheckpointSaveError, match="not a regular file"):
        export(model, sds(2), tmp_path / "fifo")
    with pytest.raises(UserInputError, match="must not be empty"):
        export(model, sds(2), "")
    with pytest.raises(TypeError):
        export(model, sds(2), 3)
    monkeypatch.setattr(os, "open", failing(errno.EACCES))
    with pytest.raises(CheckpointAccessError, match="permission denied"):
        export(linear(), sds(3, 4), tmp_path / "m.jaxport")


def test_links_and_modes_are_kept(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    target.chmod(0o640)
    link.symlink_to(target)
    export(linear(), sds(3, 4), link)
    assert link.is_symlink() and load_exported(target).names == ["weight"]
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    umask = os.umask(0o027)
    try:
        export(linear(), sds(3, 4), tmp_path / "new")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_a_header_reads_back(net_file):
    header = ProgramHeader.read(json.loads(header_of(net_file)))
    assert json.loads(json.dumps(header.json())) == json.loads(header_of(net_file))
    assert header.weights.weights["embed.weight"].aliases == ("head.weight",)
    assert DType.of(header.weights.weights["embed.weight"].dtype) is DType.float32


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sizes", [{"model": 4}, {"fsdp": 2, "model": 2}], ids=str)
@pytest.mark.parametrize("stacked", [False, True])
def test_a_model_on_a_mesh_is_exported_for_one_device(tmp_path, stacked, sizes):
    config = BertConfig(101, 32, 64, num_hidden_layers=2, num_attention_heads=4)
    model = filled(BertModel(config))
    ids = np.ones((2, 3), np.int32)
    want, values = jax.jit(lambda m, ids: m(ids))(model, ids), model.state_dict()
    if stacked:
        model.encoder.layer = model.encoder.layer.stack()
    model.to(make_mesh(**sizes))
    placed = [leaf.sharding for leaf in jax.tree.leaves(model)]
    export(model, jax.ShapeDtypeStruct(ids.shape, np.int32), tmp_path / "p")
    got = load_exported(tmp_path / "p")(values, ids)[0]
    np.testing.assert_allclose(got, want.last_hidden_state, atol=1e-5)
    assert [leaf.sharding for leaf in jax.tree.leaves(model)] == placed
