"""Placement: a wish and a mesh give a spec, and a reason."""

import gc
import os
import re
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxjax.errors import OutOfMemoryError, UserInputError
from maxjax.graph import DeviceRef, Segment, ShardingStrategy, Weight
from maxjax.graph.placement.arrays import as_used, out_of_memory, put
from maxjax.graph.placement.mesh import EXPERTS, check_mesh, make_mesh
from maxjax.graph.placement.specs import batch_axes, by_pattern, parts, place
from maxjax.graph.placement.split import Split
from maxjax.graph.quantization import QuantizationEncoding
from maxjax.nn import Module

S = ShardingStrategy


def mesh(**sizes):
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


HEADS = S.segmented(1, 0, [Segment.head_aware(9, 4)])


@pytest.mark.parametrize(
    ("shape", "wish", "sizes", "spec", "why"),
    [
        ((8, 6), None, {"model": 2}, (None, None), "no strategy"),
        ((8, 6), S.replicate(1), {"model": 2}, (None, None), "replicated by its strategy"),
        ((8, 6), S.rowwise(7), {"model": 2}, ("model", None), "axis 0 over model=2"),
        ((8, 6), S.columnwise(1), {"tp": 2}, (None, "tp"), "axis 1 over tp=2"),
        ((8, 6), S.rowwise(1), {"data": 2}, (None, None), "the mesh has no model axis"),
        ((8, 6), S.rowwise(1), {"model": 1}, (None, None), "the mesh has no model axis"),
        ((8, 6, 4), S.axiswise(-1, 2), {"model": 2}, (None, None, "model"), "axis 2 over model=2"),
        ((7, 6), S.rowwise(1), {"model": 2}, (None, None), "7 values of axis 0 do not divide by"),
        ((36, 6), HEADS, {"model": 2}, (None, None), "the 9 heads do not divide by model=2"),
        ((36, 6), HEADS, {"model": 3}, ("model", None), "axis 0 over model=3"),
        ((24, 6), S.stacked_qkv(1, 2, 4), {"model": 4}, (None, None), "the 2 heads"),
        ((24, 6), S.stacked_qkv(1, 2, 4), {"model": 2}, ("model", None), "axis 0"),
        ((6, 36), S.head_aware_columnwise(1, 9, 4), {"model": 2}, (None, None), "the 9 heads"),
        ((6, 12), S.gate_up(1, axis=1), {"model": 4}, (None, None), "the 6 values in each half"),
        ((6, 12), S.gate_up(1, axis=1), {"model": 3}, (None, "model"), "axis 1 over model=3"),
        ((8, 6), None, {"fsdp": 2}, ("fsdp", None), "axis 0 over fsdp=2"),
        ((6, 8), S.rowwise(1), {"fsdp": 2, "model": 3}, ("model", "fsdp"), "axis 1 over fsdp=2"),
        ((5, 7), None, {"fsdp": 2}, (None, None), "no axis left that divides by fsdp=2"),
        ((8,), None, {"fsdp": 2}, (None,), "no strategy"),
        ((8, 6), Split(0, over=EXPERTS), {"expert": 2, "model": 2},
         (("expert", "model"), None), "axis 0 over expert=2 and model=2"),
        ((8, 6), Split(0, over=EXPERTS), {"ep": 2}, ("ep", None), "axis 0 over ep=2"),
        ((7, 6), Split(0, fallback=1), {"model": 2}, (None, "model"),
         "the 7 values of axis 0 do not divide by model=2; axis 1 over model=2"),
        ((8, 6), P("tp", None), {"model": 2}, ("model", None), "as given"),
        ((8, 6), (None, ("model", "data")), {"data": 3, "model": 2}, (None, ("model", "data")), "as"),
        ((), None, {"fsdp": 2}, (), "no strategy"),
        ((0, 4), S.rowwise(1), {"model": 2}, ("model", None), "axis 0"),
    ],
)  # fmt: skip
def test_where_and_why(shape, wish, sizes, spec, why):
    placed = place("w", shape, wish, mesh(**sizes))
    assert tuple(placed.spec) == spec and why in placed.why


@pytest.mark.parametrize(
    ("shape", "wish", "error", "says"),
    [
        ((8,), S.columnwise(1), UserInputError, "'w' of shape .8,. has no axis 1"),
        ((8, 6), S.tensor_parallel(2), UserInputError, "tensor_parallel is for whole layers"),
        ((8, 6), S(2, lambda w, i, n: w), NotImplementedError, "'w' has a strategy made of a func"),
        ((8, 6), S(2, lambda w, i, n: w[i::n]), NotImplementedError, "'w' .*for model=2 its parts"),
        (
            (8, 6),
            S(2, lambda w, i, n: w[(n - 1 - i) * 4 :][:4]),
            NotImplementedError,
            "'w' .*blocks",
        ),
        ((8, 6), S(2, lambda w, i, n: w[i * 4 :][:4] * 2), NotImplementedError, "'w' .*blocks"),
        ((8, 6), S(2, lambda w, i, n: w[i * 4 :][:4, ::-1]), NotImplementedError, "'w' .*blocks"),
        ((7, 6), S(2, lambda w, i, n: w[i * 4 : i * 4 + 4]), NotImplementedError, "'w' .*blocks"),
        ((8, 6), S(2, lambda w, i, n: w.nothing), NotImplementedError, "'w' .*nothing"),
        ((8, 6), 7, UserInputError, "'w': a rule must be a PartitionSpec"),
        ((10, 6), S.stacked_qkv(1, 2, 4), UserInputError, "'w': stacked_qkv: .*24 values, got 10"),
        (
            (10, 6),
            S.segmented(1, 0, [Segment.even(4)]),
            UserInputError,
            "'w': segmented: axis 0 must have 4 values, got 10",
        ),
        ((8, 6), P("data"), UserInputError, "'data', but the mesh has the axes model"),
        ((7, 6), P("model"), UserInputError, "axis 0 of 7 does not divide by 2"),
        ((8, 6), P(None, None, "model"), UserInputError, "fewer axes than its spec"),
        ((8, 6), P("model", "tp"), UserInputError, "uses an axis of the mesh twice"),
    ],
)
def test_what_does_not_go(shape, wish, error, says):
    with pytest.raises(error, match=says):
        place("w", shape, wish, mesh(model=2))


def test_functions_whose_parts_are_blocks_of_one_axis_work_on_a_mesh():
    calls = []

    def rows(weight, i, n):
        calls.append((i, n))
        return weight[i * int(weight.shape[0]) // n : (i + 1) * int(weight.shape[0]) // n]

    def columns(weight, i, n):
        return weight.reshape((weight.shape[0], n, -1))[:, i]

    both = mesh(fsdp=2, model=4)
    assert place("w", (8, 6), S(2, rows), both).spec == P("model", "fsdp")
    assert set(calls) == {(i, 4) for i in range(4)}
    assert place("w", (6, 8), S(2, columns), both).spec == P("fsdp", "model")
    assert place("w", (8, 6), S(2, rows), mesh(tp=2)).why == "axis 0 over tp=2"
    assert place("w", (8, 6), S(2, rows), mesh(data=2)).spec == P(None, None)
    assert place("w", (8, 64), S(2, rows), both, block=32).spec == P("model", "fsdp")


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux")
def test_a_large_weight_is_not_made_for_a_function():
    def peak():
        return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10

    rows = S(8, lambda w, i, n: w[i * (w.shape[0] // n) : (i + 1) * (w.shape[0] // n)])
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    shape = (1 << 15, 1 << 12)  # 512 MiB of indices for each axis, and as much for their parts
    assert place("w", shape, rows, mesh(model=8)).spec == P("model", None)
    assert peak() - before < 256 << 20


def test_a_function_is_compared_once_and_not_kept_alive():
    calls = []
    rows = lambda w, i, n: calls.append(i) or w[i * 4 : i * 4 + 4]
    for _ in range(2):
        place("w", (8, 3), S(2, rows), mesh(model=2))
        found, calls = calls, []
    assert found == []
    alive = weakref.ref(rows)
    del rows
    gc.collect()
    assert alive() is None


class NoHash:
    """A rule that cannot be a key of a cache."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, weight, i, n):
        return weight[:, i * 3 : i * 3 + 3]


def test_a_rule_without_a_hash_is_compared_too():
    assert place("w", (8, 6), S(2, NoHash()), mesh(model=2)).spec == P(None, "model")


def test_a_function_is_compared_inside_a_trace_too():
    rows = S(2, lambda w, i, n: w[i * 4 : i * 4 + 4])
    found = []
    jax.jit(lambda x: found.append(place("w", (8, 5), rows, mesh(model=2)).spec) or x)(1.0)
    assert found == [P("model", None)]


def test_a_mesh_of_unknown_axes():
    check_mesh(mesh(mine=2, tp=2))
    says = (
        r"has the axes mine, yours, and strategies know data \(dp, batch\), fsdp, expert \(ep\), "
        r"seq \(sp, cp, context\), model \(tp, tensor, mp\)"
    )
    with pytest.raises(UserInputError, match=says):
        check_mesh(mesh(mine=2, yours=2))


def test_the_only_axis_of_a_mesh_splits_tensors_whatever_its_name():
    check_mesh(mesh(gpus=2))
    assert place("w", (8, 6), ShardingStrategy.rowwise(1), mesh(gpus=2)).spec == P("gpus", None)
    assert place("w", (8, 6), ShardingStrategy.rowwise(1), mesh(dp=2)).spec == P(None, None)


def test_the_error_for_unknown_axes_says_where_rules_are_taken():
    with pytest.raises(UserInputError, match=r"model\.to\(mesh, rules="):
        check_mesh(mesh(mine=2, yours=2))


def test_patterns():
    rules = {"*.q_proj.*": 1, "layers.[0-9].*": 2, "*": 3}
    names = ("a.q_proj.weight", "layers.3.x", "layers.33.x")
    assert [by_pattern(rules, name)[1] for name in names] == [1, 2, 3]
    assert by_pattern({}, "a") == (False, None)


def test_rows_of_a_batch():
    both = mesh(data=2, fsdp=2, model=2)
    assert [batch_axes(both, n) for n in (8, 4, 2, 1)] == [
        ("data", "fsdp"), ("data", "fsdp"), ("data",), (),
    ]  # fmt: skip


def test_parts_of_a_placed_weight():
    w = Weight("w", "float32", (8, 6), DeviceRef.CPU())
    w.change(sharding=NamedSharding(make_mesh(data=2, model=4), P(("data", "model"))))
    assert (parts(w, 0), parts(w, 1)) == (8, 1)


def test_values_keep_the_place_of_their_weight():
    w = Weight("w", "float32", (8, 6), DeviceRef.CPU())
    place = NamedSharding(make_mesh(model=4), P("model"))
    w.change(sharding=place)
    w.value = np.ones((8, 6), np.float32)
    assert w.value.sharding == place and w.sharding == place
    w.value = jax.numpy.zeros((8, 6))
    assert w.value.sharding == place


class Full:
    """An array of which no device has room for its part."""

    shape, dtype = (4, 2), np.dtype(np.float32)


def test_without_room(monkeypatch):
    place = NamedSharding(make_mesh(model=4), P("model"))

    def refuse(array, sharding):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.")

    monkeypatch.setattr(jax, "device_put", refuse)
    with pytest.raises(OutOfMemoryError, match=r"'w': each device needs 8 bytes .* \[4, 2\]"):
        put(Full(), place, "w")
    other = jax.errors.JaxRuntimeError("INTERNAL: something else")
    assert out_of_memory(other, "w", (4,), np.float32, place) is other


def test_a_weight_in_the_hosts_memory_comes_when_it_is_used():
    place = NamedSharding(make_mesh(model=2), P("model"), memory_kind="pinned_host")
    array = jax.device_put(np.ones((4, 2), np.float32), place)
    assert as_used(array, (4, 2), place).sharding.memory_kind == "device"
    twice = jax.jit(lambda a: as_used(a, (4, 2), place) * 2)(array)
    np.testing.assert_array_equal(twice, 2 * np.ones((4, 2)))


def test_fsdp_splits_no_block_of_packed_weights():
    # 96 weights divide by 4, and the 3 blocks that they are do not; nor do the 6 rows.
    mesh = AbstractMesh((4,), ("fsdp",))
    found = place("w", (6, 96), None, mesh, block=32)
    assert tuple(found.spec) == (None, None) and found.why == "no axis left that divides by fsdp=4"
    assert tuple(place("w", (6, 96), None, mesh).spec) == (None, "fsdp")
    assert tuple(place("w", (6, 128), None, mesh, block=32).spec) == (None, "fsdp")


def test_packed_weights_keep_their_values_where_fsdp_does_not_divide_their_blocks():
    class Holder(Module):
        def __init__(self):
            super().__init__()
            self.w = Weight("w", "uint8", (6, 54), DeviceRef.CPU(), QuantizationEncoding.Q4_0)

        def __call__(self, x):
            return x @ self.w.T

    blocks = np.random.default_rng(0).integers(0, 255, (6, 54), np.uint8)
    blocks[:, 1::18] = 0  # scales of moderate size
    model, x = Holder(), np.ones((4, 96), np.float32)
    model.load_state_dict({"w": blocks})
    want = np.asarray(model(x))
    model.to(make_mesh(fsdp=4))
    assert tuple(model.w.sharding.spec) == (None, None)
    np.testing.assert_allclose(np.asarray(model(x)), want, rtol=1e-6)
