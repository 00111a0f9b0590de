"""A machine with an accelerator that JAX does not use is told from one without."""

import pytest

from maxjax.cli import environment

CPU = [{"id": 0, "platform": "cpu", "kind": "cpu", "memory": None}]


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with nothing: no variable, no plugin, no program, no device file."""
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(environment, "PLUGINS", [])
    signs = environment.accelerator_signs
    monkeypatch.setattr(environment, "accelerator_signs", lambda: signs(dev=tmp_path))
    return tmp_path


def _nvidia_smi(folder, text, code=0):
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{text}'\nexit {code}\n")
    program.chmod(0o755)


def test_no_accelerator_no_warning(machine):
    assert environment.cpu_fallback(CPU) is None


def test_a_gpu_that_jax_does_not_use_is_reported(machine):
    _nvidia_smi(machine, "GPU 0: NVIDIA H200 (UUID: GPU-1)\\n")
    found = environment.cpu_fallback(CPU)
    assert found is not None
    assert "NVIDIA H200" in found and "maxjax[cuda]" in found


def test_nvidia_smi_without_a_gpu_is_no_sign(machine):
    _nvidia_smi(machine, "NVIDIA-SMI has failed", code=9)
    assert environment.cpu_fallback(CPU) is None


def test_a_device_file_is_a_sign(machine):
    (machine / "nvidia0").touch()
    assert str(machine / "nvidia0") in (environment.cpu_fallback(CPU) or "")


def test_a_plugin_that_did_not_start_is_reported(machine, monkeypatch):
    monkeypatch.setattr(environment, "PLUGINS", ["numpy"])  # a package that is installed
    assert "did not start" in (environment.cpu_fallback(CPU) or "")


def test_a_cpu_that_was_asked_for_is_no_fallback(machine, monkeypatch):
    (machine / "nvidia0").touch()
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert environment.cpu_fallback(CPU) is None
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    assert environment.cpu_fallback(CPU) is not None


def test_a_gpu_in_use_is_no_fallback(machine):
    (machine / "nvidia0").touch()
    assert environment.cpu_fallback([*CPU, {"platform": "gpu"}]) is None


def test_kernels_of_an_accelerator(monkeypatch):
    from maxjax.kernels.gpu import triton

    assert list(environment._kernels(CPU)) == ["CPU"]
    assert environment._kernels([{"platform": "tpu"}])["TPU"] == "jnp"
    gpu = lambda: environment._kernels([{"platform": "gpu"}])["GPU, attention"]
    assert gpu() == "jnp (no NVIDIA GPU)"  # AMD's

    class Device:
        device_kind, platform, compute_capability = "Tesla T4", "gpu", "7.5"

    monkeypatch.setattr(triton.jax, "local_devices", lambda backend: [Device])
    triton.unavailable.cache_clear()
    assert gpu() == "jnp (Triton needs compute capability 8.0, this GPU has 7.5)"
    Device.device_kind, Device.compute_capability = "NVIDIA H200", "9.0"
    assert gpu() == "Triton"
    triton.unavailable.cache_clear()


def test_versions_name_what_is_missing(monkeypatch):
    monkeypatch.setattr(environment, "PACKAGES", ["numpy", "no-such-package"])
    found = environment.versions()
    assert found["numpy"] and found["no-such-package"] is None


def test_without_any_device_jax_does_not_run_on_the_cpu(monkeypatch):
    monkeypatch.setattr(environment, "_devices", lambda: ([], ["JAX has no device: no"]))
    monkeypatch.setattr(environment, "accelerator_signs", lambda: ["/dev/nvidia0"])
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert environment.environment()["problems"] == ["JAX has no device: no"]


def test_a_backend_that_does_not_start_is_a_problem_not_an_error(monkeypatch):
    def devices():
        raise RuntimeError("Unable\nto initialize")

    monkeypatch.setattr("jax.devices", devices)
    found = environment.environment()
    assert found["problems"] == ["JAX has no device: Unable to initialize"] and found["versions"]
