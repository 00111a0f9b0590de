"""Orbax checkpoints that maxjax writes: what orbax itself finds in them, and what comes back."""

import asyncio
import errno
import json
import logging
import os
import subprocess
import sys
import threading
import warnings
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import maxjax
from maxjax import nn
from maxjax.checkpoint.orbax import save as saving
from maxjax.checkpoint.orbax.arrays import unstacked
from maxjax.checkpoint.orbax.checkpoint import restore, save, save_async
from maxjax.errors import (
    CheckpointAccessError,
    CheckpointBusyError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointMissingError,
    CheckpointSaveError,
    UserInputError,
)
from maxjax.graph import DeviceRef, Weight
from maxjax.graph.quantization import QuantizationEncoding
from maxjax.nn.layer import ExpertStack
from maxjax.storage.boxes import whole
from maxjax.storage.checksums import crc32_of_boxes
from maxjax.storage.save.staging import Staging
from tests.nn import test_device_major as device_major
from tests.test_distributed import ROOT, clean, free_port

from .worker import Net, filled, values

WORKER = Path(__file__).with_name("worker.py")
SECONDS = 120  # to import JAX twice on a loaded machine
SPLIT = {"*.weight": PartitionSpec("model", None)}


def mesh_of(count: int, **options):
    return maxjax.make_mesh(model=count, devices=jax.devices()[:count], **options)


def placed(stacked: bool, count: int) -> Net:
    model = Net(stacked)
    return model if count == 1 else model.to(mesh_of(count), rules=SPLIT)


def bits(array) -> np.ndarray:
    return np.atleast_1d(np.ascontiguousarray(np.asarray(array))).view(np.uint8)


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert np.array_equal(bits(found[name]), bits(value)), name


def read_by_orbax(directory: Path) -> dict:
    """What orbax's own reader finds."""
    from orbax.checkpoint.experimental import v1 as ocp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ocp.load_checkpointables(directory)


# --- the weights


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stack"])
@pytest.mark.parametrize("count", [1, 8])
def test_orbax_itself_finds_the_state_dict(tmp_path, stacked, count):
    model = placed(stacked, count)
    expected = values(model)
    model.load_state_dict(expected)
    path = save(tmp_path / "root", model, step=100)
    assert path == tmp_path / "root" / "100"
    found = read_by_orbax(path)
    assert list(found) == ["model"]
    assert_same(dict(sorted(found["model"].items())), dict(sorted(expected.items())))


@pytest.mark.parametrize("before", [1, 2, 4, 8])
def test_any_devices_to_any_devices(tmp_path, before):
    save(tmp_path, filled(placed(before > 2, before)))
    for after in (1, 2, 4, 8):
        model = placed(after % 4 == 2, after)
        assert restore(tmp_path, model, verify=True) == {}
        assert_same(model.state_dict(), values(model))
        if after > 1:
            shards = model.head.weight.value.addressable_shards
            assert {shard.data.shape for shard in shards} == {(32 // after, 16)}


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_axis_types(tmp_path, explicit):
    kind = (AxisType.Auto, AxisType.Explicit)[explicit]
    mesh = jax.make_mesh((4,), ("model",), axis_types=(kind,), devices=jax.devices()[:4])
    save(tmp_path, filled(Net(True).to(mesh, rules=SPLIT)))
    other = jax.make_mesh((2,), ("model",), axis_types=((AxisType.Auto, AxisType.Explicit)[not explicit],),
                          devices=jax.devices()[:2])  # fmt: skip
    model = Net(True).to(other, rules=SPLIT)
    restore(tmp_path, model)
    assert_same(model.state_dict(), values(model))


class Typed(nn.Module):
    """Weights of every kind that models have."""

    def __init__(self, encoding: QuantizationEncoding | None = QuantizationEncoding.Q4_K):
        super().__init__()
        cpu = DeviceRef.CPU()
        for name, dtype in {
            "a": "float32", "b": "bfloat16", "c": "float8_e4m3fn", "d": "float8_e5m2", "e": "float16",
            "f": "int8", "g": "bool", "h": "uint16", "i": "int64", "j": "int4",
            "k": "complex64",
        }.items():  # fmt: skip
            setattr(self, name, Weight(name, dtype, (16, 8), cpu))
        self.scalar = Weight("scalar", "float32", (), cpu)
        self.packed = Weight("packed", "uint8", (16, 144), cpu, quantization_encoding=encoding)

    def __call__(self, x):
        return x


def typed_values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    found = {}
    for name, weight in Typed().raw_state_dict().items():
        shape, dtype = [int(d) for d in weight.shape], weight.spec.dtype.np
        data = rng.integers(0, 2 if dtype == np.bool_ else 8, shape).astype(dtype)
        found[name] = data
    found["a"][0, :4] = [np.nan, -np.inf, -0.0, 1e-42]
    return found


@pytest.mark.parametrize("count", [1, 4])
def test_dtypes_come_back_bit_by_bit(tmp_path, count):
    def build() -> Typed:
        rules = {"scalar": PartitionSpec(), "*": PartitionSpec("model", None)}
        return Typed() if count == 1 else Typed().to(mesh_of(count), rules=rules)

    model, expected = build(), typed_values()
    model.load_state_dict(expected)
    path = save(tmp_path, model)
    again = build()
    restore(tmp_path, again, verify=True)
    assert_same(again.state_dict(), model.state_dict())
    found = read_by_orbax(path)["model"]
    assert found["i"].dtype == np.int64 or not isinstance(found["i"], np.ndarray)
    with maxjax.storage.orbax.reader.open_orbax(
        path
    ) as table:  # the types of the checkpoint it came from
        assert_same(table.read_many(expected), expected)
        assert table.entries["packed"].encoding == "Q4_K"


def test_another_encoding_is_refused(tmp_path):
    model = Typed()
    model.load_state_dict(typed_values())
    save(tmp_path, model)
    with pytest.raises(CheckpointMismatchError, match="'packed' is quantised as Q5_K .* as Q4_K"):
        restore(tmp_path, Typed(QuantizationEncoding.Q5_K))


def test_bytes_without_an_encoding_are_refused_for_a_quantised_weight(tmp_path):
    model = Typed(None)
    model.load_state_dict(typed_values())
    save(tmp_path, model)
    said = "'packed' is quantised as Q4_K in the model and not quantised in the checkpoint"
    with pytest.raises(CheckpointMismatchError, match=said):
        restore(tmp_path, Typed())


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stack"])
def test_arrays_of_a_stack_that_orbax_itself_wrote(tmp_path, stacked):
    import orbax.checkpoint as ocp

    class Experts(nn.Module):
        def __init__(self, stacked):
            group = [nn.Linear(3, 2, "bfloat16", has_bias=True) for _ in range(3)]
            self.experts = ExpertStack(group[0], 3) if stacked else nn.LayerList(group)

    class Several(nn.Module):
        def __init__(self, stacked):
            group = [Experts(stacked) for _ in range(2)]
            self.layers = nn.LayerStack(group) if stacked else nn.LayerList(group)
            self.out = nn.Linear(2, 2)

    model = maxjax.init(Several(True), jax.random.key(0))
    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "model", model)
    weights = maxjax.load_weights(tmp_path / "model")
    assert "layers.*.experts.*.weight" in weights
    again = Several(stacked)
    again.load_state_dict(weights)
    assert_same(again.state_dict(), model.state_dict())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stack"])
def test_the_order_of_the_devices_does_not_show(tmp_path, stacked):
    model = device_major.placed(stacked, model=4)
    assert any(weight.spec.layout is not None for weight in model.raw_state_dict().values())
    found = read_by_orbax(save(tmp_path, model, same=model))
    expected = device_major.values()
    assert_same(found["model"], {name: expected[name] for name in found["model"]})
    assert found["model"].keys() == found["same"].keys() == expected.keys()
    again = device_major.placed(not stacked, model=2)
    again.load_state_dict({name: np.zeros_like(value) for name, value in expected.items()})
    tree = restore(tmp_path, again, same=again, verify=True)["same"]
    assert_same(again.state_dict(), expected)
    assert_same(tree.state_dict(), expected)


def test_layers_of_a_stack_are_not_copied():
    model = filled(Net(True).to(mesh_of(4), rules=SPLIT))
    (stack,) = {
        id(w.home[0]): w.home[0] for w in model.raw_state_dict().values() if w.home
    }.values()
    for i, layer in enumerate(unstacked(stack)):
        for shard, part in zip(
            stack.leaf.addressable_shards, layer.addressable_shards, strict=True
        ):
            start = np.asarray(shard.data)[i].ctypes.data
            assert part.data.unsafe_buffer_pointer() == start


# --- other trees


def test_an_optimiser_goes_to_a_model_held_otherwise(tmp_path):
    tx = optax.chain(optax.scale(0.5), optax.adamw(1e-3))
    model = filled(placed(True, 4))
    grads = jax.tree.map(lambda x: x + x, model)
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        _, state = tx.update(grads, tx.init(model), model)
    save(tmp_path, model, opt_state=state)
    for stacked, count in ((False, 1), (True, 2), (True, 8)):
        again = placed(stacked, count)
        found = restore(tmp_path, again, opt_state=jax.eval_shape(tx.init, again))["opt_state"]
        adam, before = found[1][0], state[1][0]
        assert int(adam.count) == 1
        assert_same(adam.mu.state_dict(), before.mu.state_dict())
        assert_same(adam.nu.state_dict(), before.nu.state_dict())
        assert jax.tree.structure(adam.mu) == jax.tree.structure(again)
        spread = adam.mu.head.weight.value.sharding
        assert len(spread.device_set) == count
        assert jax.tree.structure(found) == jax.tree.structure(jax.eval_shape(tx.init, again))


def test_leaves_of_all_kinds(tmp_path):
    tree = {
        "list": [np.arange(3, dtype=np.int64), (jnp.ones(2), None)],
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "scalar": np.float32(2.5),
        "big": 2**70,
        "numbers": [True, -3, float("nan"), -0.0, 1e-310, 2j],
        "text": "é\n\0",
        "bytes": b"\0\xff",
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4, impl="rbg"), 3),
        "empty": {"a": {}, "b": ()},
        "bf16": np.ones(3, ml_dtypes.bfloat16),
        "nothing": [np.zeros((0, 3), np.int16), jnp.zeros((2, 0), jnp.bfloat16)],
    }
    save(tmp_path, None, tree=tree, epoch=7, void=np.zeros(0))
    blank = jax.tree.map(
        lambda leaf: leaf if isinstance(leaf, (jax.Array, np.ndarray)) else type(leaf)(), tree
    )
    found = restore(tmp_path, None, tree=blank, epoch=0, void=np.ones(0))
    assert (found["epoch"], found["void"].shape) == (7, (0,))
    assert jax.tree.structure(found["tree"]) == jax.tree.structure(tree)
    for one, other in zip(jax.tree.leaves(found["tree"]), jax.tree.leaves(tree), strict=True):
        assert type(one) is type(other)
        if not isinstance(other, jax.Array) or not jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            assert repr(one) == repr(other)
            continue
        assert jax.random.key_impl(one) == jax.random.key_impl(other)
        assert np.array_equal(jax.random.key_data(one), jax.random.key_data(other))


def test_an_empty_key_and_the_other_byte_order(tmp_path):
    other = np.arange(3, dtype=np.dtype(np.float32).newbyteorder("S"))
    save(tmp_path, None, tree={"": other}, nested={"a": {"": jnp.ones(2)}})
    found = restore(tmp_path, None, tree={"": other}, nested={"a": {"": jnp.zeros(2)}})
    np.testing.assert_array_equal(found["tree"][""], other)
    np.testing.assert_array_equal(found["nested"]["a"][""], np.ones(2))


def test_names_that_end_with_a_slash(tmp_path):
    tree = {"a/": jnp.ones(2), "a//b": jnp.zeros(3), "b": jnp.ones(1), "b//": jnp.full(2, 3)}
    save(tmp_path, None, tree=tree)
    found = restore(tmp_path, None, tree=jax.tree.map(jnp.zeros_like, tree))["tree"]
    assert all((found[name] == tree[name]).all() for name in tree)


def test_a_step_that_is_a_time_in_nanoseconds(tmp_path):
    for step in (5, 1_790_000_000_000_000_000):
        save(tmp_path, None, step=step, tree={"step": step})
    assert restore(tmp_path, None, tree={"step": 0})["tree"]["step"] == step
    assert save(tmp_path, None, tree={"step": 0}).name == str(step + 1)


def test_names_of_trees_that_orbax_uses_itself(tmp_path):
    with pytest.raises(UserInputError, match="'metrics' cannot be the name of a tree: orbax uses"):
        save(tmp_path, None, metrics={"loss": 1.0})


def test_arrays_go_where_the_example_says(tmp_path):
    array = jnp.arange(64.0).reshape(8, 8)
    save(tmp_path, None, x=array)
    sharding = NamedSharding(mesh_of(4), PartitionSpec(None, "model"))
    example = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=sharding)
    found = restore(tmp_path, None, x=example, verify=True)["x"]
    assert found.sharding == sharding
    assert np.array_equal(found, array)
    assert restore(tmp_path, None, x=array)["x"].committed is array.committed is False


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"a.b": jnp.ones(2), "a": {"b": jnp.ones(2)}}, "two leaves would both be called 'a.b'"),
        ({"a": [object()]}, r"'a\.0' cannot be saved \(object\)"),
        ({"a": jax.ShapeDtypeStruct((2,), np.float32)}, "'a' cannot be saved .it has no value"),
        ({"a": np.array(["x"])}, "'a' is str.*, which cannot be stored"),
        ({"a": jnp.ones(2, jnp.uint4)}, "'a' is uint4, which cannot be stored"),
        ({}, "nothing to save"),
        ({"x": jnp.ones(2), "x/": jnp.ones(3)}, "'x' and 'x/' in the same place"),
        ({"\ud800": jnp.ones(2)}, r"'\\ud800' cannot be stored, since it is not Unicode"),
        (b"abc", "no tree without an array that has elements"),
    ],
)
def test_what_cannot_be_saved(tmp_path, tree, says):
    with pytest.raises(UserInputError, match=says):
        save(tmp_path / "root", None, tree=tree)
    assert not (tmp_path / "root").exists()


def test_a_leaf_may_be_called_by_a_slash(tmp_path):
    tree = {"/": jnp.arange(3.0), "a": jnp.ones(2)}
    save(tmp_path, None, tree=tree)
    assert np.array_equal(restore(tmp_path, None, tree=tree)["tree"]["/"], tree["/"])


def test_a_path_that_is_not_utf_8_is_named(tmp_path):
    save(tmp_path / "there", None, x=jnp.ones(2))
    other = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    try:
        os.rename(tmp_path / "there", other)
    except OSError:
        pytest.skip("this file system takes UTF-8 names alone")
    for call in (save, restore):
        with pytest.raises(CheckpointError, match="path is not UTF-8"):
            call(other, None, x=jnp.ones(2))


def test_a_model_without_values(tmp_path):
    with pytest.raises(UserInputError, match=r"weight '\S+' has no value"):
        save(tmp_path, Net())
    for step in (-1, True, "7", 1.0):
        with pytest.raises(UserInputError, match="step is"):
            save(tmp_path, filled(Net()), step=step)


# --- what does not fit


def test_all_that_differs_is_named_before_anything_is_read(tmp_path):
    save(
        tmp_path,
        None,
        x={
            "a": jnp.ones(2),
            "b": jnp.ones((2, 3)),
            "c": jnp.ones(3),
            "d": 1,
            "e": jax.random.key(0),
        },
    )
    example = {
        "a": jnp.ones(2, jnp.int8), "b": jnp.ones((3, 2)), "z": jnp.ones(3), "d": 1.0,
        "e": jax.random.key(0, impl="rbg"),
    }  # fmt: skip
    with pytest.raises(CheckpointMismatchError) as caught:
        restore(tmp_path, None, x=example, y=3)
    for part in (
        "x: 'a' is DType.int8, in the checkpoint DType.float32",
        "x: 'b' has shape [3, 2], in the checkpoint [2, 3]",
        "x: 'z' is not in the checkpoint",
        "x: nothing in the example is called c",
        "x: 'd' is of type float, in the checkpoint int",
        "x: 'e' is a random key of rbg, in the checkpoint threefry2x32",
        "the checkpoint has no tree called 'y'",
    ):
        assert part in str(caught.value), part
    assert caught.value.path == str(tmp_path / "0")


def test_casts_only_when_asked(tmp_path):
    save(tmp_path, None, x=jnp.arange(4, dtype=jnp.float32))
    example = jax.ShapeDtypeStruct((4,), jnp.bfloat16)
    with pytest.raises(CheckpointMismatchError, match=r"bfloat16, .*float32 \(cast=True converts"):
        restore(tmp_path, None, x=example)
    found = restore(tmp_path, None, x=example, cast=True)["x"]
    assert np.array_equal(found, jnp.arange(4, dtype=jnp.bfloat16))
    with pytest.raises(CheckpointMismatchError, match="int8"):
        restore(tmp_path, None, x=jax.ShapeDtypeStruct((4,), np.int8), cast=True)


def test_a_part_of_a_checkpoint(tmp_path):
    model = filled(Net())
    save(tmp_path, model, x={"a": jnp.ones(2), "b": jnp.ones(2)})
    smaller = Net(layers=2)
    with pytest.raises(CheckpointMismatchError, match=r"layers\.2\.weight"):
        restore(tmp_path, smaller)
    found = restore(tmp_path, smaller, strict=False, x={"a": jnp.zeros(2), "c": jnp.full(2, 3.0)})
    assert_same(
        smaller.state_dict(), {k: v for k, v in values(model).items() if "layers.2" not in k}
    )
    assert (found["x"]["a"][0], found["x"]["c"][0]) == (1, 3)


def test_steps(tmp_path):
    model = filled(Net())
    with pytest.raises(CheckpointMissingError):
        restore(tmp_path / "nothing", model)
    names = [save(tmp_path, model, step=step).name for step in (None, 7, None, 2, None)]
    assert names == ["0", "7", "8", "2", "9"]
    with pytest.raises(CheckpointSaveError, match="the step exists already") as caught:
        save(tmp_path, model, step=7)
    assert caught.value.errno == errno.EEXIST
    with pytest.raises(
        CheckpointMissingError, match=r"no such step \(expected 3, found 0, 2, 7, 8, 9"
    ):
        restore(tmp_path, model, step=3)
    save(tmp_path, model, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["10", "9"]


def test_arguments_of_other_types(tmp_path):
    path = save(tmp_path, model := filled(Net()))
    for verify in ("always", 1):
        with pytest.raises(UserInputError, match='verify must be "auto", True or False, not'):
            restore(tmp_path, model, verify=verify)
    with pytest.raises(UserInputError, match=r"checkpoint.restore takes a maxjax Module, not str"):
        restore(tmp_path, "model")
    (path / "maxjax_digests.json").write_text("{")
    with pytest.raises(CheckpointError, match="verify=False"):
        restore(tmp_path, model)
    assert restore(tmp_path, model, verify=False) == {}


# --- integrity


def test_the_sums_are_those_of_the_arrays(tmp_path):
    model = filled(placed(True, 8))
    path = save(tmp_path, model, x={"n": np.arange(7)})
    (record,) = json.loads((path / "maxjax_digests.json").read_text())["files"]["."]
    arrays = {f"model/{name}": value for name, value in values(model).items()} | {
        "x/n": np.arange(7)
    }
    expected = {
        n: f"{crc32_of_boxes(a.shape, [(whole(a.shape), a)]):08x}" for n, a in arrays.items()
    }
    assert record == {"size": 0, "tensors": expected}


@pytest.mark.parametrize("count", range(1, 5))
def test_the_sums_of_several_processes_are_those_of_the_whole(tmp_path, monkeypatch, count):
    whole_array, each = np.arange(1, 13, dtype=np.uint8), []
    monkeypatch.setattr(jax, "process_count", lambda: count)
    for process in range(count):
        own = np.where(np.arange(12) % count == process, whole_array, 0).astype(np.uint8)
        each.append(saving.ArraySums({}))
        each[-1]._sums, each[-1]._shapes = {"a": zlib.crc32(own)}, {"a": 12}
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        each[-1].share(str(tmp_path))
    assert each[0].all(str(tmp_path)) == {"a": zlib.crc32(whole_array)}


def test_a_flipped_bit_is_found(tmp_path):
    model = filled(Net(width=64))
    path = save(tmp_path, model)
    target = values(model)["layers.1.weight"].tobytes()
    (file,) = [f for f in path.rglob("*") if f.is_file() and target in f.read_bytes()]
    content = bytearray(file.read_bytes())
    content[content.index(target) + 4321] ^= 1
    file.write_bytes(content)
    before = filled(Net(width=64), seed=1)
    with pytest.raises(CheckpointCorruptError) as caught:
        restore(tmp_path, before)
    assert caught.value.tensor == "layers.1.weight"
    assert_same(before.state_dict(), values(before, seed=1))  # all or nothing
    restore(tmp_path, before, verify=False)


def test_a_changed_number_beside_the_arrays_is_found(tmp_path):
    path = save(tmp_path, None, x={"n": 12345, "a": jnp.ones(2)})
    file = path / "_CHECKPOINT_METADATA"
    file.write_text(file.read_text().replace("12345", "12346"))
    with pytest.raises(CheckpointCorruptError):
        restore(tmp_path, None, x={"n": 0, "a": jnp.ones(2)})


# --- in the background


def test_values_may_change_and_go_while_they_are_saved(tmp_path):
    model = filled(Net(True, width=256))
    expected = {name: np.array(value) for name, value in model.state_dict().items()}
    owned, donated, deleted = np.ones(1 << 20), jnp.arange(1 << 20), jnp.ones(1 << 20)
    response = save_async(tmp_path, model, x=[owned, donated, deleted])
    owned[:] = 5
    jax.jit(lambda a: a * 0, donate_argnums=0)(donated).block_until_ready()
    deleted.delete()
    for leaf in jax.tree.leaves(
        jax.jit(lambda m: jax.tree.map(lambda a: a * 0, m), donate_argnums=0)(model)
    ):
        leaf.block_until_ready()
    assert response.result() == tmp_path / "0"
    assert response.done()
    again = Net(width=256)
    like = [
        np.zeros(1 << 20),
        jax.ShapeDtypeStruct((1 << 20,), np.int32),
        jax.ShapeDtypeStruct((1 << 20,), np.float32),
    ]
    found = restore(tmp_path, again, x=like, verify=True)["x"]
    assert (found[0].max(), found[2].min()) == (1, 1)
    assert np.array_equal(found[1], np.arange(1 << 20))
    assert_same(again.state_dict(), expected)


def test_saves_of_one_process_wait_for_one_another(tmp_path):
    model = filled(Net())
    responses = [save_async(tmp_path, model) for _ in range(4)]
    assert [response.result().name for response in responses] == ["0", "1", "2", "3"]
    assert not [t for t in threading.enumerate() if t.name == "maxjax-save"]


def test_in_an_event_loop(tmp_path):
    async def cell():
        model = filled(Net())
        save(tmp_path, model)
        save_async(tmp_path, model).result()
        return restore(tmp_path, model, step=1)

    assert asyncio.run(cell()) == {}


def test_nothing_is_printed(tmp_path, capfd, caplog):
    model = filled(placed(True, 2))
    save(tmp_path, model, x={"key": jax.random.key(0), "n": 1})
    restore(tmp_path, model)
    with pytest.raises(CheckpointError):
        save(tmp_path / "0" / "_CHECKPOINT_METADATA", model)
    assert (capfd.readouterr(), caplog.records) == (("", ""), [])
    logging.getLogger("absl").warning("what others log is left alone")
    assert len(caplog.records) == 1


# --- what goes wrong


def test_another_writer_is_not_disturbed(tmp_path):
    model = filled(Net())
    with Staging(tmp_path), pytest.raises(CheckpointBusyError, match="save of this process"):
        save(tmp_path, model)
    save(tmp_path, model)


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "root", "/proc/nothing"):
        with pytest.raises((CheckpointSaveError, CheckpointAccessError, CheckpointMissingError)):
            save(path, filled(Net()))
    assert os.listdir(tmp_path) == ["file"]


def test_too_little_room_is_told_before_writing(tmp_path, monkeypatch):
    save(tmp_path, None, x=jnp.ones(3))
    status = os.statvfs(tmp_path)
    full = os.statvfs_result((*status[:3], 5, 5, *status[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(CheckpointSaveError, match="bytes are needed, .* is intact: .*/0") as caught:
        save(tmp_path, filled(Net()))
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == ["0"]


@pytest.mark.parametrize("step", ["write", "flush", "commit"])
def test_a_failure_at_the_end_leaves_what_was_there(tmp_path, monkeypatch, step):
    save(tmp_path, None, x=jnp.ones(3))

    def fail(*arguments, **options):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    place = {
        "write": (saving.Writing, "wait"),
        "flush": (saving, "flush_tree"),
        "commit": (os, "rename"),
    }[step]
    if step == "commit":
        rename = os.rename
        fail = lambda a, b: rename(a, b) if str(b) != str(tmp_path / "1") else _eio()
    monkeypatch.setattr(*place, fail)
    with pytest.raises(CheckpointSaveError, match="is intact: .*/0") as caught:
        save(tmp_path, filled(Net()))
    assert caught.value.errno == errno.EIO
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["0"]
    assert save(tmp_path, filled(Net())).name == "1"


def _eio():
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_step_that_is_deleted_while_it_is_read(tmp_path, monkeypatch):
    from maxjax.checkpoint.orbax import checkpoint as orbax

    model = filled(Net())
    first = save(tmp_path, model)
    open_saved = orbax.open_saved

    def deleted(directory, *rest):
        if directory == str(first) and first.exists():
            save(tmp_path, filled(Net(), seed=2), keep=1)
        return open_saved(directory, *rest)

    monkeypatch.setattr(orbax, "open_saved", deleted)
    restore(tmp_path, model)
    assert_same(model.state_dict(), values(model, seed=2))


# --- other programs


def test_orbax_own_managers_open_the_directory(tmp_path):
    import orbax.checkpoint as v0
    from orbax.checkpoint.experimental import v1

    model = filled(Net())
    for step in (100, 200):
        save(tmp_path, model, step=step)
    expected = {name: jax.ShapeDtypeStruct(v.shape, v.dtype) for name, v in values(model).items()}
    with v1.training.Checkpointer(tmp_path) as checkpointer:
        assert [one.step for one in checkpointer.checkpoints] == [100, 200]
    with v0.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [100, 200]
        target = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=jnp.ones(1).sharding),
            expected,
        )
        found = manager.restore(200, args=v0.args.Composite(model=v0.args.StandardRestore(target)))
    assert_same(dict(sorted(found["model"].items())), dict(sorted(values(model).items())))


def test_what_orbax_itself_saved_is_restored(tmp_path):
    from orbax.checkpoint.experimental import v1

    model = Net()
    tree = {name: jnp.asarray(value) for name, value in values(model).items()}
    v1.save_checkpointables(tmp_path / "own", {"model": tree, "rest": {"n": 3, "a": jnp.ones(2)}})
    v1.save(tmp_path / "single", tree)
    restore(tmp_path / "single", model)
    assert_same(model.state_dict(), values(model))
    found = restore(tmp_path / "own", Net(True), rest={"n": 0, "a": np.zeros(2, np.float32)})[
        "rest"
    ]
    assert (found["n"], found["a"].tolist()) == (3, [1, 1])


# --- processes of their own


def run(scenario: str, directory: Path, *cluster: int) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(WORKER), scenario, str(directory), *map(str, cluster)],
        env=clean() | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def outcome(scenario: str, directory: Path) -> dict:
    process = run(scenario, directory)
    try:
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert (process.returncode, output) == (0, "")
    return json.loads((directory / "0.json").read_text())


@pytest.mark.extra
def test_the_process_ends_after_a_save_that_failed(tmp_path):
    found = outcome("no_room", tmp_path)
    assert [number for number, _ in found["errors"]] == [errno.EFBIG] * 2
    assert all(f"is intact: {tmp_path}/root/0" in text for _, text in found["errors"])
    assert (found["left"], found["threads"]) == (["0"], [])


def test_an_interrupt_leaves_what_was_there_and_an_end_waits_for_the_checkpoint(tmp_path):
    found = outcome("leave", tmp_path)
    assert found == {"caught": True, "left": ["0"], "next": "1", "done": False}
    model = Net(width=1024)
    restore(tmp_path / "root", model, verify=True)
    assert_same(model.state_dict(), values(model))
    assert os.listdir(tmp_path / "root") == ["0"]


def test_two_processes(tmp_path):
    port = free_port()
    processes = [run("save_together", tmp_path, port, 2, number) for number in (1, 0)]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
    for number in range(2):
        found = json.loads((tmp_path / f"{number}.json").read_text())
        assert found == {"paths": ["5", "6"], "steps": ["6"], "right": [True] * 7, "count": 3}
    model = Net()
    restore(tmp_path / "root", model, verify=True)
    assert_same(model.state_dict(), values(model))
