"""Topologies: what their names mean, whose devices they are, and what is said without a compiler."""

import os

import jax
import pytest

from maxjax.engine.plan import topology as module
from maxjax.engine.plan.topology import KINDS, Topology, memory_of_kind
from maxjax.errors import MissingCompilerError, UserInputError


@pytest.mark.parametrize(
    ("name", "shape", "count"),
    [
        ("v5e:2x4", (2, 4), 8),
        ("V5P:2x2x2", (2, 2, 2), 8),
        ("h200:8", (8,), 8),
        (" cpu:3 ", (3,), 3),
    ],
)
def test_names(name, shape, count):
    found = Topology.of(name)
    assert (found.shape, found.count, found.name) == (shape, count, name.strip().lower())


@pytest.mark.parametrize(
    "name", ["", "v5e", "v5e:", "v5e:8", "v5e:2x4x1", "v5p:2x4", "h200:2x4", "h200:0", "h200:-1",
             "h200:8x", "tpu:8", "b200:8", "v5e:2xx4", "v5e:２x4"],
)  # fmt: skip
def test_what_is_no_topology(name):
    with pytest.raises(UserInputError, match=r"v5e:2x4|v5p:2x2x2|h200:8"):
        Topology.of(name)
    with pytest.raises(UserInputError, match="more than 1,000,000 devices"):
        Topology.of("v5e:1000x1001")
    with pytest.raises(TypeError, match="str"):
        Topology.of(8)  # type: ignore[arg-type]


def test_devices_of_the_cpu_are_those_of_the_process():
    assert Topology.of("cpu:3").devices() == jax.devices("cpu")[:3]
    assert Topology.of("cpu:3").memory is None
    with pytest.raises(UserInputError, match="has 8 CPU devices: set JAX_NUM_CPU_DEVICES=9"):
        Topology.of("cpu:9").devices()


def test_memory_goes_by_the_kind_that_jax_names():
    # "TPU v5 lite" is a v5e, and "TPU v5" a v5p.
    names = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "h100": "NVIDIA H100 80GB HBM3",
             "h200": "NVIDIA H200"}  # fmt: skip
    assert names.keys() == KINDS.keys()
    for kind, name in names.items():
        device = type("Device", (), {"device_kind": name})
        assert memory_of_kind(device) == KINDS[kind].memory == Topology.of(
            f"{kind}:{'x'.join('1' * KINDS[kind].axes)}"
        ).memory  # fmt: skip
    of = lambda name: memory_of_kind(type("Device", (), {"device_kind": name}))
    assert of("NVIDIA GH200 480GB") == 96 * 10**9 and of("NVIDIA T4") is None


def test_without_libtpu(monkeypatch, tmp_path):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    before = dict(os.environ)
    with pytest.raises(MissingCompilerError, match="v5e:2x4 needs .* pip install libtpu"):
        Topology.of("v5e:2x4").devices()
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "libtpu.so"))
    with pytest.raises(MissingCompilerError, match=r"TPU_LIBRARY_PATH is .*libtpu\.so, where no"):
        Topology.of("v5e:2x4").devices()
    monkeypatch.delenv("TPU_LIBRARY_PATH")
    assert dict(os.environ) == before


def test_without_the_plugins(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    version = rf"jax-cuda13-plugin=={jax.__version__} .*nvidia-cudnn-cu13\. No GPU is needed"
    with pytest.raises(MissingCompilerError, match=version):
        Topology.of("h100:8").devices()


@pytest.fixture
def compiler(monkeypatch):
    """Stands for the compilers: compiler(answer) → the calls that ask them for devices."""

    def install(answer):
        calls = []

        def get_topology_desc(*names, **options):
            calls.append((names, options))
            if isinstance(answer, Exception):
                raise answer
            return type("Description", (), {"devices": answer})

        monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
        monkeypatch.setattr(module, "_libtpu", lambda: "/libtpu.so")
        monkeypatch.setattr(module, "_has_tpus", lambda: True)
        monkeypatch.setattr(module.topologies, "get_topology_desc", get_topology_desc)
        return calls

    return install


def test_gpus_lie_in_hosts_of_eight(compiler):
    calls = compiler([1, 2])
    for name, wanted in (("h200:8", "1x1x8"), ("h100:64", "1x8x8"), ("h200:3", "1x3x1"),
                         ("h200:2", "1x1x2"), ("h200:12", "1x3x4")):  # fmt: skip
        assert Topology.of(name).devices() == [1, 2]
        options = calls[-1][1]
        assert (options["topology"], options["platform"]) == (wanted, "cuda")
    assert 'device_description_str: "NVIDIA H200"' in options["target_config"]
    assert "memory_bandwidth: 4800000000000 " in options["target_config"]


def test_what_the_compiler_says_of_a_topology_is_told(compiler):
    compiler(jax.errors.JaxRuntimeError("INVALID_ARGUMENT: Topology layout is not\n divisible"))
    with pytest.raises(UserInputError, match="v5e:3x3 is no topology .* layout is not divisible"):
        Topology.of("v5e:3x3").devices()
    for error in (jax.errors.JaxRuntimeError("INTERNAL: of another version"),
                  NotImplementedError("of another version"), OSError("of another version")):  # fmt: skip
        compiler(error)
        with pytest.raises(MissingCompilerError, match="install libtpu.*of another version"):
            Topology.of("v5e:2x2").devices()
