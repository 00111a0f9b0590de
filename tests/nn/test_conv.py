"""Convolutions against torch, in both layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax import init, nn
from maxjax.graph import Dim
from tests.nn.layers import CPU, call, filled, random
from tests.oracles.recorded import recorded, torch

CLASSES = {1: nn.Conv1D, 2: nn.Conv2d, 3: nn.Conv3D}
PLACES = {1: (9,), 2: (7, 6), 3: (5, 4, 6)}
KERNELS = {1: (3,), 2: (3, 2), 3: (1, 2, 3)}


def make(axes, permute, inner=4, outer=6, **options):
    kernel = KERNELS[axes] if axes == 3 else (KERNELS[axes],) if axes == 2 else KERNELS[axes]
    return CLASSES[axes](*kernel, inner, outer, "float32", permute=permute, **options)


def in_torch(x, w, axes, padding=0, stride=1, dilation=1, groups=1):
    """``x`` [N, C, *places], ``w`` as torch has it; padding (before, after) for each axis."""
    x, kernel, bias = (torch.tensor(a) if a is not None else None
                       for a in (x, w["weight"].astype(np.float32), w.get("bias")))  # fmt: skip
    if not isinstance(padding, int):
        sides = [n for pair in reversed(padding) for n in pair]
        x, padding = torch.nn.functional.pad(x, sides), 0
    function = getattr(torch.nn.functional, f"conv{axes}d")
    bias = None if bias is None else bias.float()
    return function(x, kernel, bias, stride, padding, dilation, groups).numpy()


def as_torch(w, axes):
    """A weight [*kernel, C, O] in torch's layout."""
    kernel = np.moveaxis(w["weight"], (-1, -2), (0, 1))
    return {**w, "weight": kernel}


CASES = [
    {},
    {"has_bias": True},
    {"stride": 2, "padding": 1},
    {"dilation": 2, "padding": 2},
    {"num_groups": 2, "has_bias": True},
]


@pytest.mark.sampled
@pytest.mark.parametrize("options", CASES, ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("permute", [True, False])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_conv(axes, permute, options):
    layer, w = filled(make(axes, permute, **options))
    x = random(2, 4, *PLACES[axes])
    w = w if permute else as_torch(w, axes)
    options = {n: v for n, v in options.items() if n != "has_bias"}
    groups = options.pop("num_groups", 1)
    expected = recorded(lambda: in_torch(x, w, axes, groups=groups, **options))
    if permute:
        found = layer(jnp.asarray(x))
    else:
        found = jnp.moveaxis(layer(jnp.moveaxis(jnp.asarray(x), 1, -1)), -1, 1)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("axes", "given", "pairs"),
    [
        (1, (2, 0), [(2, 0)]),
        (2, (1, 2), [(1, 1), (2, 2)]),
        (2, (1, 0, 2, 3), [(1, 0), (2, 3)]),
        (3, (1, 0, 2), [(1, 1), (0, 0), (2, 2)]),
        (3, (1, 0, 2, 0, 0, 3), [(1, 0), (2, 0), (0, 3)]),
    ],
)
def test_padding_before_and_after(axes, given, pairs):
    layer, w = filled(make(axes, True, padding=given))
    x = random(2, 4, *PLACES[axes])
    expected = recorded(lambda: in_torch(x, w, axes, pairs))
    np.testing.assert_allclose(call(layer, x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("permute", "groups", "shapes"),
    [(False, 1, [(3, 4, 6), (3, 2, 4, 6), (1, 2, 3, 4, 6)]),
     (False, 2, [(3, 2, 6), (3, 2, 2, 6), (1, 2, 3, 2, 6)]),
     (True, 2, [(6, 2, 3), (6, 2, 3, 2), (6, 2, 1, 2, 3)])],
)  # fmt: skip
def test_weights_as_max_has_them(permute, groups, shapes):
    for axes, shape in zip((1, 2, 3), shapes, strict=True):
        layer = make(axes, permute, num_groups=groups, has_bias=True, name="stem")
        weights = layer.raw_state_dict()
        assert {n: list(w.shape) for n, w in weights.items()} == {
            "stem.weight": list(shape),
            "stem.bias": [6],
        }
        assert layer.filter is weights["stem.weight"] and layer.filter.device == CPU


def test_narrow_input_and_wide_weights():
    layer, w = filled(make(1, True))
    x = random(2, 4, 9)
    found = layer(jnp.asarray(x, jnp.bfloat16))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, recorded(lambda: in_torch(x, w, 1)), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("permute", [True, False])
def test_initialised_by_fan_in(permute):
    layer = init(make(2, permute, 64, 128, has_bias=True), jax.random.key(0))
    assert float(jnp.std(layer.filter.value)) == pytest.approx((64 * 6) ** -0.5, rel=0.05)
    assert not layer.bias.value.any()


def test_what_is_refused():
    with pytest.raises(ValueError, match="num_groups, which is 3"):
        nn.Conv2d(3, 4, 6, "float32", num_groups=3)
    with pytest.raises(ValueError, match="stride is one number or 2"):
        nn.Conv2d(3, 4, 6, "float32", stride=(1, 1, 1))
    with pytest.raises(ValueError, match=r"Conv2d takes \[N, 4, H, W\], not \(1, 5, 7, 4\)"):
        nn.Conv2d(3, 4, 6, "float32", permute=True)(jnp.ones((1, 5, 7, 4)))
    with pytest.raises(ValueError, match=r"Conv1D takes \[N, W, 4\]"):
        nn.Conv1D(3, 4, 6, "float32")(jnp.ones((5, 4)))
    with pytest.raises(ValueError, match=r"larger than the input \(1, 4, 2\)"):
        init(nn.Conv1D(5, 4, 6, "float32", padding=1, permute=True), jax.random.key(0))(
            jnp.ones((1, 4, 2))
        )
    with pytest.raises(ValueError, match="2.*'same'"):
        nn.Conv2d(3, 4, 6, "float32", padding="same")
    with pytest.raises(ValueError, match=r"stride must be positive, not \(1, 0\)"):
        nn.Conv2d(3, 4, 6, "float32", stride=(1, 0))


def test_sizes_that_are_not_python_numbers():
    for two in (np.int64(2), Dim(2), np.array([2, 2]), [2, Dim(2)]):
        layer = nn.Conv2d(two, 4, 6, "float32", stride=two, padding=two)
        assert layer.filter.shape == [2, 2, 4, 6]
        assert layer.stride == (2, 2) and layer.padding == ((2, 2), (2, 2))
    layer = nn.ConvTranspose1d(3, 4, 6, "float32", stride=np.int64(2), padding=np.int64(1))
    assert layer.stride == 2 and layer.padding == (1, 1)
