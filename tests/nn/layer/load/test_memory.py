"""A load that cannot fit is refused before anything is read."""

import jax
import numpy as np
import pytest

from maxjax import nn
from maxjax.engine.plan.report import plan
from maxjax.errors import OutOfMemoryError
from maxjax.graph import DeviceRef
from maxjax.graph.placement.mesh import make_mesh
from maxjax.models import Mixtral, MixtralConfig
from maxjax.nn.layer.load import memory as room


class Gpu:
    platform, id = "gpu", 3

    def __init__(self, **stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats


def mlp(**sizes):
    model = nn.MLP("float32", None, 32, 64, [DeviceRef.CPU()])  # 3 x 8192 bytes
    return model.to(make_mesh(**sizes)) if sizes else model


def state(model):
    return {
        k: np.ones(tuple(map(int, w.shape)), np.float32) for k, w in model.raw_state_dict().items()
    }


@pytest.fixture
def free(monkeypatch):
    """Sets what a device has left; every load is asked about."""
    monkeypatch.setattr(room, "SMALL_BYTES", 0)

    def set_free(nbytes, device=None):
        if device is not None:
            monkeypatch.setattr(room, "_devices", lambda fits: [device])
        monkeypatch.setattr(room, "free_bytes", lambda device: nbytes)

    return set_free


def test_the_host(free):
    model = mlp()
    free(3 * 8192)
    model.load_state_dict(state(model))
    before = model.gate_proj.weight.value
    free(3 * 8192 - 1)
    with pytest.raises(OutOfMemoryError, match=(
        r"the host has 24,575 bytes free, and the weights need 24,576; the largest is 'gate_proj.weight' "
        r"float32 \[64, 32\], of which each device holds \[64, 32\]: 8,192 bytes. "
        r"It would fit with dtype='bfloat16' \(12,288 bytes\)."
    )):  # fmt: skip
        model.load_state_dict(state(model))
    assert model.gate_proj.weight.value is before
    free(100_000)
    model.load_state_dict(state(model))


def test_fake_devices_share_the_hosts_memory(free):
    model = mlp(model=8)
    free(3 * 8192)
    model.load_state_dict(state(model))


def test_a_device_says_what_would_do(free):
    model = mlp(data=2, model=2)
    free(12_287, Gpu())
    with pytest.raises(OutOfMemoryError, match=(
        r"gpu:3 has 12,287 bytes free, and the weights need 12,288; .* each device holds \[32, 32\]: 4,096 bytes. "
        r"It would fit on a mesh of data=2, model=4 \(6,144 bytes for each device\) or with dtype='bfloat16'"
    )):  # fmt: skip
        model.load_state_dict(state(model))
    free(10, Gpu())
    with pytest.raises(
        OutOfMemoryError, match="would not fit on a larger mesh or in a narrower dtype"
    ):
        model.load_state_dict(state(model))
    free(10_000, Gpu())
    with pytest.raises(OutOfMemoryError, match=r"on a mesh of model=4 \(6,144"):
        mlp().load_state_dict(state(model))


def test_a_stack_counts_all_layers(free):
    layers = nn.LayerList([nn.MLP("float32", None, 32, 64, [DeviceRef.CPU()]) for _ in range(2)])
    model = layers.stack().to(make_mesh(model=2))
    free(24_575, Gpu())
    with pytest.raises(OutOfMemoryError, match=r"need 24,576; .* mesh of model=4 \(12,288"):
        model.load_state_dict(state(model))


def test_a_device_holds_some_of_the_experts(free):
    sizes = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    model = Mixtral(MixtralConfig(32, 16, 32, **sizes)).to(make_mesh(expert=2))
    larger = plan(model, {"expert": 2, "model": 2}).bytes_per_device
    free(larger, Gpu())
    with pytest.raises(
        OutOfMemoryError, match=rf"mesh of expert=2, model=2 \({larger:,} bytes for each device"
    ):
        model.load_state_dict(state(model))


def test_what_is_free():
    assert room.free_bytes(Gpu()) is None
    assert room.free_bytes(Gpu(bytes_limit=10, bytes_in_use=4)) == 6
    assert room.free_bytes(jax.devices()[0]) > 1 << 20
