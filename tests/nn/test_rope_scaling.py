"""Frequencies against transformers' own functions, and against what MAX 26.7 gave."""

import math

import numpy as np
import pytest

from maxjax.nn.rope_scaling import (
    DeepseekYarnRopeScalingParams,
    DynamicScalingParams,
    LinearScalingParams,
    Llama3RopeScalingParams,
    LongRoPEScalingParams,
    YarnScalingParams,
    attention_factor,
    inv_freqs,
    yarn_mscale,
)
from tests.oracles.recorded import recorded, transformers

LONG = LongRoPEScalingParams([1.0, 1.5, 2.0, 2.5], [2.0, 3.0, 4.0, 5.0], 64, 256)
# name in transformers → our parameters and its own
VARIANTS = {
    "linear": (LinearScalingParams(4.0), {"factor": 4.0}, {}),
    "dynamic": (DynamicScalingParams(4.0, 64), {"factor": 4.0}, {"max_position_embeddings": 64}),
    "llama3": (
        Llama3RopeScalingParams(8.0, 1.0, 4.0, 8192),
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192}, {},
    ),
    "yarn": (
        YarnScalingParams(4.0, 32.0, 1.0, 4096, True),
        {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
         "original_max_position_embeddings": 4096}, {},
    ),
    "yarn untruncated": (
        YarnScalingParams(32.0, 32.0, 1.0, 4096, False),
        {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}, {},
    ),
    "yarn of deepseek": (
        DeepseekYarnRopeScalingParams(40.0, 4096, 32, 1, 1.0, 0.7),
        {"factor": 40.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7,
         "original_max_position_embeddings": 4096}, {},
    ),
    "longrope": (
        LONG,
        {"short_factor": list(LONG.short_factor), "long_factor": list(LONG.long_factor),
         "original_max_position_embeddings": 64}, {"max_position_embeddings": 256},
    ),
}  # fmt: skip


@pytest.mark.parametrize("length", [1, 64, 65, 200])
@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("name", VARIANTS)
def test_as_transformers_has_it(name, theta, length):
    ours, theirs, options = VARIANTS[name]
    kind = name.split()[0]
    width = 8 if name == "longrope" else 64

    def in_transformers():
        config = transformers.LlamaConfig(
            hidden_size=2 * width, num_attention_heads=2,
            rope_parameters={"rope_type": kind, "rope_theta": theta, **theirs},
            **({"max_position_embeddings": 16384} | options),
        )  # fmt: skip
        functions = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS
        found, factor = functions[kind](config, "cpu", seq_len=length)
        return found.numpy(), factor

    expected, factor = recorded(in_transformers)
    found = inv_freqs(width, theta, ours, length=length)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    assert attention_factor(ours) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("dim", [2, 4, 64, 128])
def test_plain(dim):
    expected = [10000.0 ** (-2 * i / dim) for i in range(dim // 2)]
    np.testing.assert_allclose(inv_freqs(dim, 1e4), expected, rtol=1e-7)
    assert attention_factor(None) == 1.0


def test_as_max_has_it():
    found = inv_freqs(8, 1e4, Llama3RopeScalingParams(8.0, 1.0, 4.0, 16))
    np.testing.assert_allclose(found, [0.5760564, 0.0125, 0.00125, 0.000125], rtol=1e-6)
    short = Llama3RopeScalingParams(8.0, 2.0, 2.0, 16)
    np.testing.assert_allclose(inv_freqs(4, 1e4, short), [1.0, 0.00125], rtol=1e-6)


def test_longrope_stretched_by_nothing():
    same = LongRoPEScalingParams([1.0], [2.0], 32, 16)
    assert attention_factor(same) == 1.0
    assert attention_factor(LONG) == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))
    assert yarn_mscale(0.5) == 1.0 and yarn_mscale(math.e, 2.0) == pytest.approx(1.2)


def test_what_is_refused():
    with pytest.raises(ValueError, match="even"):
        inv_freqs(3, 1e4)
    with pytest.raises(ValueError, match="needs 3 factors, not 4"):
        inv_freqs(6, 1e4, LONG)
    with pytest.raises(
        TypeError, match="unknown rope scaling dict: it must be None, LinearScalingParams"
    ):
        inv_freqs(8, 1e4, {"factor": 2})
