"""DeviceRef and DeviceKind: MAX's surface, and the way to JAX's devices and back."""

import copy
import dataclasses
import pickle
from types import SimpleNamespace

import jax
import pytest

from maxjax.driver import CPU
from maxjax.graph import TensorType
from maxjax.graph.device import DeviceKind, DeviceRef


def test_names():
    assert [str(r) for r in (DeviceRef.CPU(), DeviceRef.CPU(1), DeviceRef.GPU(id=3))] == [
        "cpu:0",
        "cpu:1",
        "gpu:3",
    ]
    assert repr(DeviceRef("gpu", 1)) == f"{DeviceRef(DeviceKind.GPU, 1)}" == "gpu:1"
    assert DeviceRef.GPU(-5) == DeviceRef.GPU(0)


def test_equality_and_hash():
    assert DeviceRef.CPU() == DeviceRef("cpu", 0)
    assert DeviceRef.CPU() != DeviceRef.CPU(1)
    assert DeviceRef.CPU() != DeviceRef.GPU()
    assert DeviceRef.CPU() != "cpu:0"
    assert {DeviceRef.CPU(): 1}[DeviceRef("cpu")] == 1


def test_kind_predicates():
    cpu, gpu = DeviceRef.CPU(2), DeviceRef.GPU(2)
    assert (cpu.is_cpu(), cpu.is_gpu(), gpu.is_cpu(), gpu.is_gpu()) == (True, False, False, True)
    assert (cpu.device_type, cpu.id) == (DeviceKind.CPU, 2)


@pytest.mark.parametrize("kind", ["tpu", "GPU", "", "gpu:1", None])
def test_unknown_kind(kind):
    with pytest.raises(ValueError, match="is not a valid DeviceKind"):
        DeviceRef(kind)


@pytest.mark.parametrize("number", ["1", 1.5, None])
def test_number_must_be_an_integer(number):
    with pytest.raises(TypeError):
        DeviceRef("gpu", number)


def test_kind():
    assert list(DeviceKind) == [DeviceKind.CPU, DeviceKind.GPU]
    assert DeviceKind.from_string("gpu") is DeviceKind("gpu") is DeviceKind.GPU
    assert DeviceKind.CPU == "cpu"
    assert (str(DeviceKind.CPU), f"{DeviceKind.GPU}") == ("cpu", "gpu")
    with pytest.raises(ValueError, match="Unknown device kind x"):
        DeviceKind.from_string("x")


def test_frozen_and_copyable():
    ref = DeviceRef.GPU(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ref.id = 3
    assert pickle.loads(pickle.dumps(ref)) == copy.deepcopy(ref) == ref


def test_driver_devices():
    assert DeviceRef.from_device(CPU(3)) == DeviceRef.CPU(3)
    assert DeviceRef.CPU(3).to_device() == CPU(3)
    assert DeviceRef.from_device(DeviceRef.GPU(1)) == DeviceRef.GPU(1)
    with pytest.raises(TypeError, match="str"):
        DeviceRef.from_device("cpu")


def test_a_type_has_a_reference_to_its_device():
    kind = TensorType("float32", (2,), CPU())
    assert kind == TensorType("float32", (2,), DeviceRef.CPU())
    assert str(kind.device) == "cpu:0"
    with pytest.raises(TypeError, match="DeviceRef"):
        TensorType("float32", (2,), "cpu")


def test_every_cpu_to_jax_and_back():
    devices = jax.local_devices(backend="cpu")
    assert len(devices) > 1
    for i, device in enumerate(devices):
        assert DeviceRef.CPU(i).to_jax() is device
        assert DeviceRef.from_jax(device) == DeviceRef.CPU(i)


def test_absent_devices():
    with pytest.raises(ValueError, match=r"no device cpu:999.*has \d+ CPU"):
        DeviceRef.CPU(999).to_jax()
    with pytest.raises(ValueError, match=r"no device gpu:999.*has \d+ accelerator"):
        DeviceRef.GPU(999).to_jax()


@pytest.fixture
def two_tpus(monkeypatch):
    chips = [SimpleNamespace(platform="tpu", process_index=0, id=i) for i in (4, 5)]
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: chips)
    return chips


def test_gpu_is_any_accelerator_counted_in_this_process(two_tpus):
    assert DeviceRef.GPU(1).to_jax() is two_tpus[1]
    assert DeviceRef.from_jax(two_tpus[1]) == DeviceRef.GPU(1)
    assert DeviceRef.GPU(1).to_device().id == 1


def test_device_of_another_process(two_tpus):
    with pytest.raises(ValueError, match="belongs to process 7"):
        DeviceRef.from_jax(SimpleNamespace(platform="tpu", process_index=7))
