"""ConvTranspose1d against torch, in both layouts."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxjax import nn
from tests.nn.layers import filled, random, same_everywhere
from tests.oracles.recorded import recorded, torch

CASES = [
    {},
    {"has_bias": True},
    {"stride": 2},
    {"stride": 3, "padding": 1, "output_padding": 2},
    {"dilation": 2, "padding": 3},
]


@pytest.mark.sampled
@pytest.mark.parametrize("options", CASES, ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("permute", [True, False])
def test_conv_transpose(permute, options):
    layer, w = filled(nn.ConvTranspose1d(4, 3, 5, "float32", permute=permute, **options))
    x = random(2, 3, 7)
    kernel = w["weight"] if permute else np.transpose(w["weight"], (2, 1, 0))
    sizes = {n: v for n, v in options.items() if n != "has_bias"}
    expected = recorded(
        lambda: torch.nn.functional.conv_transpose1d(
            torch.tensor(x), torch.tensor(kernel).float(),
            torch.tensor(w["bias"]).float() if "bias" in w else None, **sizes,
        ).numpy()
    )  # fmt: skip
    given = x if permute else np.swapaxes(x, 1, 2)
    found = same_everywhere(layer, given, rtol=1e-4)
    found = found if permute else np.swapaxes(found, 1, 2)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_sizes_as_of_an_image_of_height_1():
    pairs = {
        "stride": (1, 3),
        "padding": (0, 0, 1, 1),
        "dilation": (1, 2),
        "output_padding": (0, 1),
    }
    alone = {"stride": 3, "padding": 1, "dilation": 2, "output_padding": 1}
    layers = [nn.ConvTranspose1d(4, 3, 5, "float32", **sizes) for sizes in (pairs, alone)]
    x = jnp.asarray(random(2, 7, 3))
    np.testing.assert_array_equal(*(filled(layer)[0](x) for layer in layers))


def test_uneven_padding_cuts_off_each_side():
    whole, cut = (
        filled(nn.ConvTranspose1d(4, 3, 5, "float32", 2, padding))[0]
        for padding in (0, (0, 0, 1, 3))
    )
    x = jnp.asarray(random(2, 7, 3))
    np.testing.assert_allclose(cut(x), whole(x)[:, 1:-3], rtol=1e-5, atol=1e-6)


def test_weights_as_max_has_them():
    for permute, shape in ((False, [3, 6, 4]), (True, [4, 6, 3])):
        weights = nn.ConvTranspose1d(
            3, 4, 6, "float32", has_bias=True, permute=permute
        ).raw_state_dict()
        assert {n: list(w.shape) for n, w in weights.items()} == {"weight": shape, "bias": [6]}


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"\(1, number\), not \(2, 2\)"):
        nn.ConvTranspose1d(3, 4, 6, "float32", stride=(2, 2))
    with pytest.raises(ValueError, match="padding"):
        nn.ConvTranspose1d(3, 4, 6, "float32", padding=(1, 1, 0, 0))
    with pytest.raises(ValueError, match=r"takes \[N, 4, L\], not \(2, 7, 4\)"):
        nn.ConvTranspose1d(3, 4, 6, "float32", permute=True)(jnp.ones((2, 7, 4)))
    with pytest.raises(ValueError, match="dilation must be positive"):
        nn.ConvTranspose1d(3, 4, 6, "float32", dilation=0)
