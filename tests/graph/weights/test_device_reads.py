"""Each device's piece goes from the disk to that device, and nowhere else."""

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
from maxjax.graph.weights.device_reads import (  # fmt: skip
    Pieces,
    assemble,
    boxes,
    is_spread,
    places,
    read_pieces,
)
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
    assert max(asked) == (piece // 2 if cast and not stacked else piece)
    for name, value in layers.state_dict().items():
        np.testing.assert_array_equal(value, values[name].astype(np.float32))


def test_what_is_converted_takes_little_room_on_its_way(tmp_path, monkeypatch):
    path, _ = file(tmp_path, 4, ml_dtypes.bfloat16)
    monkeypatch.setattr(pieces, "STAGED_BYTES", 3 * 64 * 32 * 2)
    held, most = [0], [0]
    convert = Pieces.converted

    def empty(one):
        memory = {box: np.empty(0, np.uint8) for box in boxes(one.sharding, one.shape)}
        memory = {box: files.aligned_empty(np.prod([b - a for a, b in box]) * 2) for box in memory}
        held[0] += sum(map(len, memory.values()))
        most[0] = max(most[0], held[0])
        return memory

    def converted(one, memory):
        held[0] -= sum(map(len, memory.values()))
        return convert(one, memory)

    monkeypatch.setattr(Pieces, "empty", empty)
    monkeypatch.setattr(Pieces, "converted", converted)
    layers, mesh = model(4, model=4)
    with load_weights(path) as weights:
        layers.to(mesh).load_state_dict(weights, cast=True)
    assert held == [0] and most == [3 * 64 * 32 * 2]


def test_without_memory(tmp_path, monkeypatch):
    def none(nbytes):
        raise MemoryError

    monkeypatch.setattr(pieces, "aligned_empty", none)
    path, _ = file(tmp_path, 1)
    with load_weights(path) as weights:
        data = weights["0.gate_proj.weight"].data()
        asked = Pieces(data, "w", on("model", model=2), np.dtype(np.float32), lambda a: a)
        with pytest.raises(OutOfMemoryError, match="no 4,096 bytes for weight 'w'. maxjax.plan"):
            list(read_pieces([asked]))


def test_a_device_without_room(monkeypatch):
    def refuse(array, place):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    place = on("model", model=2)
    parts = {box: ROWS[box[0][0] : box[0][1]].copy() for box in boxes(place, ROWS.shape)}
    monkeypatch.setattr(jax, "device_put", refuse)
    with pytest.raises(OutOfMemoryError, match=r"weight 'w': each device needs 4,096 bytes"):
        assemble("w", ROWS.shape, place, parts)
