"""Destination: each device's part goes from the disk to that device, and nowhere else."""

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import maxjax
from maxjax import nn
from maxjax.errors import OutOfMemoryError
from maxjax.graph import DeviceRef
from maxjax.graph.placement.device_major import DeviceMajor
from maxjax.graph.weights import device_reads as pieces
from maxjax.graph.weights import load_weights
from maxjax.graph.weights.device_reads import (
    Destination,
    assemble,
    boxes,
    is_spread,
    places,
    read_destinations,
)
from maxjax.interop.layouts import layout
from maxjax.storage import files

CPU = DeviceRef.CPU()
ROWS = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)


def on(*spec, **sizes):
    return NamedSharding(maxjax.make_mesh(**sizes), P(*spec))


def model(layers, **sizes):
    found = nn.LayerList([nn.MLP("float32", None, 32, 64, [CPU]) for _ in range(layers)])
    return found, maxjax.make_mesh(**sizes)


def file(tmp_path, layers, dtype=np.float32):
    values, _ = model(layers, model=1)
    values = {
        k: np.asarray(v).astype(dtype)
        for k, v in maxjax.init(values, jax.random.key(0)).state_dict().items()
    }
    save_file(values, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors", values


def test_boxes():
    assert boxes(on("model", model=2), (4, 3)) == {
        ((0, 2), (0, 3)): [jax.devices()[0]], ((2, 4), (0, 3)): [jax.devices()[1]],
    }  # fmt: skip
    both = boxes(on(None, "model", data=2, model=2), (4, 6))
    assert {box: len(devices) for box, devices in both.items()} == {
        ((0, 4), (0, 3)): 2, ((0, 4), (3, 6)): 2,
    }  # fmt: skip
    assert is_spread(on(model=2)) and not is_spread(None) and not is_spread(on(model=1))


def test_places_of_rows_in_the_order_of_devices():
    memory = np.arange(2 * 4 * 3)  # devices 1 and 2: 4 rows of 3 bytes each
    layout = DeviceMajor(4, (8, 8))
    found = list(places(layout, ((1, 3), (0, 4), (0, 3)), memory))
    assert [box for box, _ in found] == [
        ((2, 4), (0, 3)), ((10, 12), (0, 3)), ((4, 6), (0, 3)), ((12, 14), (0, 3)),
    ]  # fmt: skip
    np.testing.assert_array_equal(np.concatenate([part for _, part in found]), memory)


@pytest.mark.sampled
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("cast", [False, True])
def test_no_device_gets_more_than_its_own(tmp_path, monkeypatch, stacked, cast):
    path, values = file(tmp_path, 3, ml_dtypes.bfloat16 if cast else np.float32)
    layers, mesh = model(3, model=8)
    layers = layers.stack() if stacked else layers
    layers.to(mesh)
    sent, asked = [], []
    put, empty = jax.device_put, files.aligned_empty

    def device_put(array, place=None, **options):
        sent.append((array.nbytes, len(place.device_set)))
        return put(array, place, **options)

    def aligned_empty(nbytes):
        asked.append(nbytes)
        return empty(nbytes)

    monkeypatch.setattr(jax, "device_put", device_put)
    monkeypatch.setattr(pieces, "aligned_empty", aligned_empty)
    with load_weights(path) as weights:
        layers.load_state_dict(weights, cast=cast)
    piece = 64 * 32 * 4 // 8 * (3 if stacked else 1)
    assert sent == [(piece, 1)] * (24 if stacked else 72)
    # What is cast is read into memory that is used again, and cast into that of its device.
    *others, largest = sorted(asked)
    assert (others[-1] if cast else largest) == piece and largest <= pieces.STAGED_BYTES
    assert not cast or largest == 3 * 3 * 64 * 32 * 2
    for name, value in layers.state_dict().items():
        np.testing.assert_array_equal(value, values[name].astype(np.float32))


@pytest.mark.parametrize("stacked", [False, True])
def test_what_is_converted_takes_little_room_on_its_way(tmp_path, monkeypatch, stacked):
    path, _ = file(tmp_path, 4, ml_dtypes.bfloat16)
    monkeypatch.setattr(pieces, "STAGED_BYTES", 3 * 64 * 32 * 2)
    held, most = [0], [0]
    memory, store = Destination.memory, Destination.store

    def counted(one, number, scratch):
        found = memory(one, number, scratch)
        held[0] += sum(map(len, found.values()))
        most[0] = max(most[0], held[0])
        return found

    def emptied(one, number, memory):
        held[0] -= sum(map(len, memory.values()))
        store(one, number, memory)
        assert not memory

    monkeypatch.setattr(Destination, "memory", counted)
    monkeypatch.setattr(Destination, "store", emptied)
    layers, mesh = model(4, model=4)
    layers = layers.stack() if stacked else layers
    with load_weights(path) as weights:
        layers.to(mesh).load_state_dict(weights, cast=True)
    assert held == [0] and most == [3 * 64 * 32 * 2]


def tensors(tmp_path, **arrays):
    save_file(arrays, tmp_path / "t.safetensors")
    weights = load_weights(tmp_path / "t.safetensors")
    return [weights[name].data() for name in arrays]


@pytest.mark.parametrize("spec", [None, (), ("model",), (None, "model"), (None, None, "model")])
def test_a_stack_of_what_is_on_disk_in_two_types_and_what_is_not(tmp_path, spec):
    sharding = None if spec is None else on(*spec, model=4)
    a, b, c = (ROWS + i for i in range(3))
    plain, wide = tensors(tmp_path, a=a, b=b.astype(np.float64))
    sources = [plain, wide, lambda: c, plain.astype("bfloat16").astype("float32")]
    want = Destination("w", (4, 64, 32), np.dtype(np.float32), sources, sharding, axis=0)
    (array,) = read_destinations([want])
    np.testing.assert_array_equal(array, [a, b, c, a.astype(ml_dtypes.bfloat16)])
    assert not want.pieces and (sharding is None or array.sharding == sharding)
    assert array.committed == (sharding is not None)


@pytest.mark.parametrize("by_device", [False, True])
def test_rows_in_the_order_of_devices(tmp_path, by_device):
    """Of one tensor, and of a stack, whose rows are those of two segments."""
    rows = DeviceMajor(4, (32, 32))
    (data,) = tensors(tmp_path, a=ROWS)
    sharding = on("model", model=4) if by_device else None
    for dtype in (np.float32, ml_dtypes.bfloat16):
        dtype = np.dtype(dtype)
        one = Destination("w", (4, 16, 32), dtype, [data], sharding, rows)
        many = on(None, "model", model=4) if by_device else None
        two = Destination("w", (2, 4, 16, 32), dtype, [data, data], many, rows, axis=0)
        stored = rows.arrange(ROWS).astype(dtype)
        first, second = read_destinations([one, two])
        np.testing.assert_array_equal(first, stored)
        np.testing.assert_array_equal(second, [stored, stored])


def test_layers_on_an_axis_of_another_order(tmp_path):
    """As flax has them: each tensor transposed, stacked in the middle, some layers on a device."""
    data = tensors(tmp_path, a=ROWS, b=ROWS + 1, c=ROWS + 2, d=ROWS + 3)
    order = layout("o i -> i * o").of((32, 4, 64))
    for sharding in (None, on(None, "model", model=2), on("model", None, None, model=4)):
        want = Destination(
            "w", order.shape, np.dtype(np.float32), data, sharding, axis=1, order=order
        )
        (array,) = read_destinations([want])
        np.testing.assert_array_equal(array, np.stack([(ROWS + i).T for i in range(4)], 1))


def test_values_of_the_caller_are_copied(tmp_path):
    own = files.aligned_empty(ROWS.nbytes).view(np.float32).reshape(ROWS.shape)
    own[:] = ROWS
    for sharding in (None, on("model", model=2)):
        want = Destination("w", ROWS.shape, ROWS.dtype, [lambda: own], sharding)
        (array,) = read_destinations([want])
        own[:] = 0
        np.testing.assert_array_equal(array, ROWS)
        own[:] = ROWS


def test_without_memory(tmp_path, monkeypatch):
    def none(nbytes):
        raise MemoryError

    monkeypatch.setattr(pieces, "aligned_empty", none)
    path, _ = file(tmp_path, 1)
    with load_weights(path) as weights:
        data = weights["0.gate_proj.weight"].data()
        asked = Destination("w", (64, 32), np.dtype(np.float32), [data], on("model", model=2))
        with pytest.raises(OutOfMemoryError, match="no 4,096 bytes for weight 'w'. maxjax.plan"):
            list(read_destinations([asked]))


def test_a_device_without_room(monkeypatch):
    def refuse(array, place):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    place = on("model", model=2)
    parts = {box: ROWS[box[0][0] : box[0][1]].copy() for box in boxes(place, ROWS.shape)}
    monkeypatch.setattr(jax, "device_put", refuse)
    with pytest.raises(OutOfMemoryError, match=r"weight 'w': each device needs 4,096 bytes"):
        assemble("w", ROWS.shape, place, parts)
