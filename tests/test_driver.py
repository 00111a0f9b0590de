"""Buffer and the devices: MAX's interface, shared and copied memory, and DLPack in both directions."""

import copy
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxjax.driver import CPU, Accelerator, Buffer, Device, DLPackArray, accelerator_count
from maxjax.dtype import DType
from tests.oracles.recorded import torch

ALL = list(DType.__members__.values())
EXPORTED_BY_JAX = [d for d in ALL if d.is_float8() or d is DType.bfloat16]
SUB_BYTE = [d for d in ALL if d.size_in_bits < 8]


def matrix(dtype=np.float32):
    return np.arange(6, dtype=dtype).reshape(2, 3)


@pytest.mark.parametrize("d", ALL, ids=repr)
def test_zeros_of_every_type(d):
    buffer = Buffer.zeros((2, 3), d)
    assert (buffer.dtype, buffer.shape, buffer.element_size) == (d, (2, 3), d.size_in_bytes)
    assert bytes(buffer.to_numpy().tobytes()) == bytes(6 * d.size_in_bytes)
    assert Buffer(d, [2, 3]).shape == Buffer(shape=(2, 3), dtype=d).shape == (2, 3)


def test_shapes():
    assert Buffer.zeros((), DType.int8).item() == 0
    assert Buffer.zeros((2, 0), DType.int8).num_elements == 0
    for bad in (2, "ab", (1.5,)):
        with pytest.raises(TypeError):
            Buffer.zeros(bad, DType.float32)
    with pytest.raises(ValueError, match="negative"):
        Buffer.zeros((-1,), DType.float32)


def test_properties():
    buffer = Buffer.from_numpy(matrix())
    assert (buffer.rank, buffer.num_elements, buffer.strides) == (2, 6, (3, 1))
    assert (buffer.is_host, buffer.pinned, buffer.is_contiguous) == (True, False, True)
    assert buffer.device == CPU()
    assert not buffer[:, 1].is_contiguous
    assert buffer[:, 1].strides == (3,)
    assert repr(buffer) == "maxjax.driver.Buffer(DType.float32, (2, 3), cpu[0])"
    assert str(buffer) == (
        "Buffer([[0. 1. 2.]\n        [3. 4. 5.]], dtype=DType.float32, shape=(2, 3), "
        "device=Device(type=cpu,id=0))"
    )
    with pytest.raises(AttributeError):
        buffer.shape = (3, 2)
    with pytest.raises(AttributeError):
        buffer.note = 1


# --- where the memory is ---


@pytest.mark.parametrize("make", [Buffer.from_numpy, Buffer.from_dlpack])
def test_writable_memory_is_shared(make):
    array = np.zeros(2, np.float32)
    buffer = make(array)
    array[0] = 9
    buffer[1] = 7
    assert buffer.to_numpy().tolist() == array.tolist() == [9, 7]
    buffer.to_numpy()[0] = 5
    assert array[0] == np.asarray(buffer)[0] == 5


@pytest.mark.parametrize("make", [Buffer.from_numpy, Buffer.from_dlpack])
def test_read_only_memory_is_copied(make):
    array = np.zeros(2, np.float32)
    array.setflags(write=False)
    buffer = make(array)
    buffer[0] = 3
    assert array.tolist() == [0, 0]


def test_from_dlpack_copy():
    array = np.zeros(2, np.float32)
    copied, shared = Buffer.from_dlpack(array, copy=True), Buffer.from_dlpack(array, copy=False)
    array[0] = 9
    assert (copied[0].item(), shared[0].item()) == (0, 9)
    array.setflags(write=False)
    with pytest.raises(BufferError, match="copy=True"):
        Buffer.from_dlpack(array, copy=False)
    assert Buffer.from_dlpack(shared) is shared
    assert Buffer.from_dlpack(shared, copy=True) is not shared


def test_strided_memory():
    strided = matrix().T
    buffer = Buffer.from_numpy(strided)
    assert buffer[0, 1].item() == 3
    assert buffer.copy().is_contiguous
    assert buffer.contiguous().to_numpy().tolist() == strided.tolist()
    for copy_ in (None, True, False):
        with pytest.raises(ValueError, match="contiguous"):
            Buffer.from_dlpack(strided, copy=copy_)


@pytest.mark.parametrize("bad", [[1, 2], 3, np.float32(1), None])
def test_what_is_no_array(bad):
    for make in (Buffer.from_numpy, Buffer.from_dlpack):
        with pytest.raises(TypeError, match="expected"):
            make(bad)
    assert not isinstance([1], DLPackArray)


def test_dtypes_that_are_none_of_ours():
    with pytest.raises(BufferError, match="datetime64"):
        Buffer.from_numpy(np.zeros(2, "datetime64[s]"))
    for make in (Buffer.from_numpy, Buffer.from_dlpack):
        with pytest.raises(TypeError, match="does not hold complex64"):
            make(np.ones(2, np.complex64))
    with pytest.raises(BufferError, match="byte order"):
        Buffer.from_numpy(np.ones(2, ">f4" if np.little_endian else "<f4"))


# --- elements ---


def test_indexing_needs_one_index_per_axis():
    buffer = Buffer.from_numpy(matrix(np.int64))
    assert (buffer[0, 1].item(), buffer[-1, -1].item(), buffer[[0, 1]].item()) == (1, 5, 1)
    assert buffer[1:, ::2].to_numpy().tolist() == [[3, 5]]
    assert buffer[:, np.int64(1)].to_numpy().tolist() == [1, 4]
    assert Buffer.scalar(5, DType.int8)[()].item() == 5
    for index in (0, slice(None), (), (0, 1, 2)):
        with pytest.raises(ValueError, match=r"number of indices \(\d\) .* tensor rank \(2\)"):
            buffer[index]
    for index in (None, ..., "a", 1.5):
        with pytest.raises(TypeError):
            buffer[index]
    with pytest.raises(IndexError, match="out of bounds"):
        buffer[2, 0]


def test_an_element_is_a_view():
    buffer = Buffer.from_numpy(matrix())
    buffer[0, 1][()] = 8
    buffer[1, :] = 9
    assert buffer.to_numpy().tolist() == [[0, 8, 2], [9, 9, 9]]


def test_iteration_over_one_axis():
    assert [x.item() for x in Buffer.from_numpy(np.arange(3))] == [0, 1, 2]


@pytest.mark.parametrize("d", [d for d in ALL if d.is_float()], ids=repr)
def test_floats_are_stored_and_read_as_python_floats(d):
    buffer = Buffer.zeros((2,), d)
    buffer[1] = 2.0
    assert buffer[1].item() == Buffer.scalar(2.0, d).item() == 2.0
    assert type(buffer[1].item()) is float


def test_integers_take_no_fraction_and_no_overflow():
    buffer = Buffer.zeros((2,), DType.uint8)
    buffer[0] = 200
    assert (buffer[0].item(), type(buffer[0].item())) == (200, int)
    for value in (1.5, np.float32(2), Buffer.scalar(1, DType.float32)):
        with pytest.raises(TypeError, match="without loss"):
            buffer[0] = value
    for value in (300, -1):
        with pytest.raises(OverflowError):
            buffer[0] = value
    with pytest.raises(OverflowError, match="integers from -1 to 300 do not fit"):
        Buffer.zeros((2,), DType.uint8)[:] = np.array([300, -1])
    assert Buffer.scalar(True, DType.bool).item() is True


def test_item_wants_one():
    assert Buffer.zeros((1, 1), DType.int32).item() == 0
    for n in (0, 2):
        with pytest.raises(ValueError, match=f"{n} items but expected only 1"):
            Buffer.zeros((n,), DType.float32).item()


# --- views ---


def test_view_resizes_the_last_axis():
    array = np.arange(8, dtype=np.uint8)
    buffer = Buffer.from_numpy(array)
    assert buffer.view(DType.uint16).to_numpy().tolist() == array.view(np.uint16).tolist()
    assert Buffer.from_numpy(array.reshape(2, 4)).view(DType.uint32).shape == (2, 1)
    assert Buffer.from_numpy(matrix()).view("uint8").shape == (2, 12)
    assert buffer.view(DType.float8_e4m3fn)[7].item() == 0.013671875
    bits = Buffer.from_numpy(np.array([0x3FC0, 0xC000], np.uint16))
    assert bits.view(DType.bfloat16).to_numpy().tolist() == [1.5, -2.0]
    assert Buffer.scalar(1.0, DType.float32).view(DType.int32).item() == 0x3F800000


def test_view_with_a_shape():
    buffer = Buffer.from_numpy(np.arange(8, dtype=np.uint8))
    assert buffer.view(DType.uint32, (2, 1)).to_numpy().tolist() == [[50462976], [117835012]]
    assert Buffer.scalar(1.0, DType.float32).view(DType.uint8, (4,)).shape == (4,)
    assert Buffer.zeros((0, 4), DType.uint8).view(DType.uint32, (0,)).shape == (0,)


def test_view_shares_the_memory():
    buffer = Buffer.zeros((2,), DType.float32)
    buffer.view(DType.int32)[0] = 0x3F800000
    buffer.view(DType.int32, (2, 1))[1, 0] = 0x40000000
    assert buffer.to_numpy().tolist() == [1, 2]


@pytest.mark.parametrize(
    ("array", "dtype", "shape"),
    [
        (np.zeros(6, np.uint8), DType.uint32, None),
        (np.zeros((4, 2), np.uint8), DType.uint32, None),
        (np.zeros(8, np.uint8), DType.uint32, (3,)),
        (np.zeros(8, np.uint8), DType.uint8, (-2, -4)),
        (np.zeros(8, np.uint8), DType.uint8, (-1, 4)),
        (np.zeros((), np.float32), DType.uint8, None),
        (np.zeros((2, 3), np.float32)[:, 1], DType.uint8, None),
        (np.zeros((2, 3), np.float32)[:, :2], DType.float32, (4,)),
        (np.zeros(8, np.uint8), DType.float4_e2m1fn, (16,)),
        (np.zeros(8, np.uint8), DType.int4, None),
    ],
)
def test_views_that_cannot_be(array, dtype, shape):
    with pytest.raises(ValueError):
        Buffer.from_numpy(array).view(dtype, shape)


# --- other libraries ---


@pytest.mark.parametrize("d", [d for d in ALL if not d.is_complex()], ids=repr)
def test_numpy_reads_every_type(d):
    array = np.array([1, 2, 4]).astype(d.np)
    buffer = Buffer.from_numpy(array)
    for read in (buffer.to_numpy(), np.asarray(buffer), Buffer.from_dlpack(array).to_numpy()):
        assert read.dtype == d.np
        assert read.tolist() == array.tolist()
        assert np.shares_memory(read, array)
    assert not np.shares_memory(np.array(buffer), array)


@pytest.mark.parametrize(
    "d", [d for d in ALL if not d.name.startswith(("float6", "complex"))], ids=repr
)
def test_jax_gets_a_copy(d):
    buffer = Buffer.from_numpy(np.ones(64, d.np))
    with jax.enable_x64(True):
        array = jnp.asarray(buffer)
    buffer[0] = 0 if d is not DType.float8_e8m0fnu else 2
    assert array.dtype == d.np
    assert array[0].item() == 1


def test_numpy_dlpack():
    buffer = Buffer.from_numpy(matrix())
    assert isinstance(buffer, DLPackArray)
    assert buffer.__dlpack_device__() == (1, 0)
    assert np.shares_memory(np.from_dlpack(buffer), buffer.to_numpy())


@pytest.mark.parametrize("d", EXPORTED_BY_JAX, ids=repr)
def test_jax_dlpack_of_what_numpy_cannot_export(d):
    array = jax.dlpack.from_dlpack(Buffer.from_numpy(np.ones(3, d.np)))
    assert array.dtype == d.np
    assert array.astype(jnp.float32).tolist() == [1, 1, 1]
    buffer = Buffer.from_dlpack(array)
    assert (buffer.dtype, buffer[2].item()) == (d, 1.0)
    buffer[2] = 2
    assert float(array[2]) == 1


@pytest.mark.parametrize("d", SUB_BYTE, ids=repr)
def test_no_dlpack_below_a_byte(d):
    with pytest.raises(BufferError, match=d.name):
        Buffer.zeros((2,), d).__dlpack__()


def test_jax_arrays_are_fetched_and_copied():
    array = jnp.arange(4.0)
    buffer = Buffer.from_dlpack(array)
    buffer[0] = 9
    assert array[0] == 0
    on_last = jax.device_put(array, jax.devices()[-1])
    assert Buffer.from_dlpack(on_last).to_numpy().tolist() == [0, 1, 2, 3]


@pytest.mark.oracle
def test_torch_both_ways():
    tensor = torch.arange(4, dtype=torch.float32)
    buffer = Buffer.from_dlpack(tensor)
    buffer[0] = 9
    assert tensor[0] == 9
    assert torch.from_dlpack(buffer).data_ptr() == tensor.data_ptr()
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        small = torch.tensor([0.5, 2.0]).to(dtype)
        buffer = Buffer.from_dlpack(small)
        assert DType.of(dtype) is buffer.dtype
        assert buffer.to_numpy().tolist() == [0.5, 2.0]
        assert torch.from_dlpack(buffer).to(torch.float32).tolist() == [0.5, 2.0]
    with pytest.raises(BufferError):
        Buffer.from_dlpack(torch.ones(2, requires_grad=True))


def test_float64_is_not_narrowed():
    array = np.array([1 / 3])
    assert Buffer.from_dlpack(array).dtype is DType.float64
    assert Buffer.from_numpy(array)[0].item() == 1 / 3


# --- copies and devices ---


def test_copies_are_independent():
    buffer = Buffer.from_numpy(np.zeros(2, ml_dtypes.bfloat16))
    others = [buffer.copy(), buffer.copy(CPU()), copy.deepcopy(buffer)]
    others.append(pickle.loads(pickle.dumps(buffer)))
    buffer[0] = 3
    assert [other[0].item() for other in others] == [0.0] * 4
    assert {other.dtype for other in others} == {DType.bfloat16}


def test_inplace_copy():
    buffer, array = Buffer.zeros((2,), DType.float32), np.ones(2, np.float32)
    buffer.inplace_copy_from(Buffer.from_numpy(array))
    assert buffer.to_numpy().tolist() == [1, 1]
    with pytest.raises(ValueError, match="dtypes"):
        buffer.inplace_copy_from(Buffer.zeros((2,), DType.float64))
    with pytest.raises(ValueError, match="sizes"):
        buffer.inplace_copy_from(Buffer.zeros((1,), DType.float32))


def test_a_buffer_stays_on_the_host():
    buffer = Buffer.zeros((2,), DType.float32)
    assert buffer.to(CPU()) is buffer
    assert buffer.to([CPU(), CPU()]) == [buffer, buffer]
    with pytest.raises(TypeError, match="expected a maxjax.driver.Device"):
        buffer.to("cpu")
    for attempt in (buffer.to, buffer.copy, lambda d: Buffer.zeros((2,), DType.float32, d)):
        with pytest.raises(ValueError, match=r"not on Device\(type=gpu,id=0\)"):
            attempt(Device("gpu", 0))


def test_equality_is_identity():
    buffer = Buffer.zeros((2,), DType.float32)
    assert buffer == buffer
    assert buffer != Buffer.zeros((2,), DType.float32)
    assert buffer in {buffer}


def test_devices():
    assert CPU() == CPU(0) != CPU(1)
    assert hash(CPU()) == hash(CPU())
    assert (CPU(1).label, CPU(1).id, CPU().is_host, CPU().api) == ("cpu", 1, True, "cpu")
    assert str(CPU(1)) == "Device(type=cpu,id=1)"
    assert CPU(1).to_jax() is jax.local_devices(backend="cpu")[1]
    assert accelerator_count() == len([d for d in jax.local_devices() if d.platform != "cpu"])
    with pytest.raises(ValueError, match="no device gpu:99"):
        Accelerator(99)
