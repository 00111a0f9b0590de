"""Models with recurrent states on meshes with Auto and Explicit axes: as without one; the cache keeps its sharding."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import maxjax
from maxjax.models import (
    LFM2,
    FalconH1,
    FalconH1Config,
    KimiLinear,
    KimiLinearConfig,
    LFM2Config,
    Mamba,
    MambaConfig,
    Qwen35,
    Qwen35Config,
)
from tests.models.decoders import ids_of

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {
    "mamba": (
        FalconH1,
        FalconH1Config(
            96, 16, 24, **SIZES, head_dim=4, mamba_n_heads=8, mamba_d_head=4, mamba_n_groups=2,
            mamba_d_state=6, mamba_rms_norm=True,
        ),
    ),
    "selective": (Mamba, MambaConfig(96, 16, 2, state_size=6)),
    "linear": (
        Qwen35,
        Qwen35Config(
            96, 16, 24, **SIZES, head_dim=8, layer_types=("linear_attention", "full_attention"),
            linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=4, linear_value_head_dim=4,
        ),
    ),
    "features": (
        KimiLinear,
        KimiLinearConfig(
            96, 16, 24, num_hidden_layers=2, num_attention_heads=4, kv_lora_rank=6, qk_nope_head_dim=4,
            qk_rope_head_dim=2, v_head_dim=4, layer_types=("linear_attention", "full_attention"),
            linear_num_heads=8, linear_head_dim=4, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=8,
        ),
    ),
    "conv": (LFM2, LFM2Config(96, 16, 24, **SIZES, layer_types=("conv", "full_attention"))),
}  # fmt: skip
MESHES = {"4": {"model": 4}, "2x2": {"data": 2, "model": 2}, "fsdp": {"fsdp": 2, "model": 2}}
IDS, COUNTS = ids_of(2, 7) % 96, np.array([7, 4], np.int32)


@jax.jit
def call(model, ids, cache, counts):
    return model(ids, cache, lengths=counts)


def specs(cache, group):
    # JAX spells one sharding with and without the axes that are not split.
    found = {}
    for name, a in cache.more[group].arrays.items():
        spec = getattr(a.sharding, "spec", ())
        found[name] = [*spec, *(None,) * (a.ndim - len(spec))]
    return found


def run(model, group):
    """Logits of real tokens of a prefill of ragged rows, and of a step of which one row has no token."""
    cache = model.cache(2, 16)
    before = specs(cache, group)
    first, cache = call(model, IDS, cache, COUNTS)
    states = jax.tree.map(np.asarray, cache.more[group].arrays)
    after, cache = call(model, IDS[:, :1], cache, np.array([1, 0], np.int32))
    assert specs(cache, group) == before
    for name, old in states.items():
        new = np.asarray(cache.more[group].arrays[name])
        np.testing.assert_array_equal(new[:, 1], old[:, 1])
        assert (new[:, 0] != old[:, 0]).any()
    return np.asarray(first)[0], np.asarray(first)[1, :4], np.asarray(after)[0]


@pytest.fixture(scope="module", params=MODELS)
def made(request):
    """(Name of the group, function that makes the model, its results without a mesh)."""
    kind, config = MODELS[request.param]
    make = lambda: maxjax.init(kind(config), jax.random.key(0))
    group = {"selective": "mamba", "features": "linear"}.get(request.param, request.param)
    return group, make, run(make(), group)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("mesh", MESHES)
def test_on_a_mesh_as_without_one(made, mesh, kind):
    group, make, expected = made
    axes = MESHES[mesh]
    place = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))
    for found, wanted in zip(run(make().to(place), group), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)
