"""RotaryEmbedding and its variants against complex numbers, transformers and tables of MAX 26.7."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax import nn
from maxjax.graph import Dim, TensorValue
from maxjax.nn.rope_scaling import DynamicScalingParams, inv_freqs
from maxjax.nn.rotary_embedding import (
    DeepseekYarnRopeScalingParams,
    DeepseekYarnRotaryEmbedding,
    DynamicRotaryEmbedding,
    rotate,
)
from tests.nn.layers import call, random
from tests.oracles.recorded import recorded, torch, transformers

KW = {"dim": 16, "n_heads": 2, "theta": 10000.0, "max_seq_len": 4}


def turned(x, positions, theta=10000.0, interleaved=True):
    """As one product of complex numbers, in float64."""
    half = x.shape[-1] // 2
    angles = np.asarray(positions, np.float64)[..., None] * theta ** (-np.arange(half) / half)
    x = x.astype(np.float64)
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    z = (a + 1j * b) * np.exp(1j * angles)[..., None, :]
    if not interleaved:
        return np.concatenate([z.real, z.imag], -1)
    return np.stack([z.real, z.imag], -1).reshape(x.shape)


@pytest.mark.sampled
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", [(1, 3, 2, 8), (2, 8, 5, 8), (3, 2, 8), (2, 0, 2, 8)])
def test_rope(shape, interleaved):
    rope = nn.RotaryEmbedding(**KW, interleaved=interleaved)
    x = random(*shape)
    found = rope(jnp.asarray(x))
    expected = turned(x, np.arange(shape[-3]), interleaved=interleaved)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    wrapped = rope(TensorValue(jnp.asarray(x)))
    assert type(wrapped) is TensorValue
    np.testing.assert_array_equal(np.asarray(wrapped), found)
    np.testing.assert_allclose(jax.jit(lambda m, x: m(x))(rope, x), found, atol=1e-6)


def test_as_transformers_has_it():
    x, positions = random(2, 5, 2, 8), np.arange(7, 12)[None]

    def theirs():
        llama = transformers.models.llama.modeling_llama
        sizes = {"hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 64}
        table = llama.LlamaRotaryEmbedding(llama.LlamaConfig(**sizes))
        cos, sin = table(torch.tensor(x), torch.tensor(positions))
        q = torch.tensor(x).transpose(1, 2)
        return llama.apply_rotary_pos_emb(q, q, cos, sin)[0].transpose(1, 2).numpy()

    expected = recorded(theirs)
    rope = nn.RotaryEmbedding(16, 2, 10000.0, 32, interleaved=False)
    np.testing.assert_allclose(rope(jnp.asarray(x), start_pos=7), expected, atol=1e-5)


@pytest.mark.parametrize("start", [2, Dim(2), np.int64(2), jnp.int32(2)])
def test_start_pos(start):
    rope, x = nn.RotaryEmbedding(**KW), random(1, 3, 2, 8)
    expected = turned(x, [2, 3, 4])
    np.testing.assert_allclose(rope(jnp.asarray(x), start), expected, rtol=1e-5, atol=1e-5)


def test_a_traced_start_pos():
    rope, x = nn.RotaryEmbedding(**KW), random(1, 3, 2, 8)
    traces = []

    @jax.jit
    def compiled(x, start):
        traces.append(start)
        return rope(x, start_pos=start)

    for start in (0, 3):
        expected = turned(x, np.arange(start, start + 3))
        np.testing.assert_allclose(compiled(x, start), expected, rtol=1e-5, atol=1e-5)
    assert len(traces) == 1


@pytest.mark.parametrize("positions", [[5, 0, 2], [[5, 0, 2], [1, 1, 7]]])
def test_positions(positions):
    rope, x = nn.RotaryEmbedding(**KW), random(2, 3, 2, 8)
    found = rope(jnp.asarray(x), positions=jnp.asarray(positions))
    np.testing.assert_allclose(found, turned(x, np.asarray(positions)), rtol=1e-5, atol=1e-5)


def test_only_distance_counts():
    rope = nn.RotaryEmbedding(dim=32, n_heads=1, theta=1e4, max_seq_len=512)
    q, k = (jnp.asarray(random(1, 1, 1, 32, seed=s)) for s in (1, 2))
    near, far = (jnp.sum(rope(q, p) * rope(k, p + 3)) for p in (0, 500))
    assert float(near) == pytest.approx(float(far), abs=1e-3)


def test_bfloat16_is_rounded_once():
    rope, x = nn.RotaryEmbedding(**KW), jnp.asarray(random(1, 8, 2, 8), jnp.bfloat16)
    found = rope(x)
    assert found.dtype == jnp.bfloat16
    exact = turned(np.asarray(x, np.float32), np.arange(8)).astype(jnp.bfloat16)
    np.testing.assert_allclose(found.astype(jnp.float32), exact.astype(np.float32), rtol=2**-8)


def test_table_and_scale_as_max_has_them():
    rope = nn.RotaryEmbedding(**KW)
    assert type(rope.freqs_cis) is TensorValue and rope.freqs_cis.shape == [8, 8]
    assert rope.freqs_cis_base().shape == [8, 4, 2]
    row = [0.7539023, 0.6569866, 0.7648422, 0.6442177, 0.997551, 0.0699428, 0.9999755, 0.0069999]
    np.testing.assert_allclose(rope.freqs_cis.value[-1], row, atol=1e-6)
    assert rope.compute_scale() == pytest.approx(8**-0.5) and rope.compute_scale(0.3) == 0.3
    assert nn.RotaryEmbedding(**KW, head_dim=4).freqs_cis.shape == [8, 4]
    assert not rope.raw_state_dict()


def test_yarn_as_max_has_it():
    params = nn.YarnScalingParams(4.0, 32.0, 1.0, 16, True)
    rope = nn.YarnRotaryEmbedding(**KW, scaling_params=params)
    row = [0.6152041, 0.9581236, 1.1382736, 0.0284628, 1.1386259, 0.0028466, 1.1386293, 0.0002847]
    assert rope.freqs_cis.shape == [4, 8]
    np.testing.assert_allclose(rope.freqs_cis.value[1], row, atol=1e-6)
    assert rope.compute_scale() == pytest.approx(8**-0.5)
    assert nn.YarnRotaryEmbedding(**KW).freqs_cis.shape == [8, 8]


def test_deepseek_yarn_as_max_has_it():
    params = DeepseekYarnRopeScalingParams(4.0, 16, 32, 1, 1.0, 0.8)
    rope = DeepseekYarnRotaryEmbedding(**KW, scaling_params=params)
    assert rope.freqs_cis.shape == [4, 16]  # over dim, not head_dim
    row = [0.5537872, 0.8624724, 1.0217568, 0.0809457, 1.0246377, 0.0256213, 1.024926, 0.0081029]
    np.testing.assert_allclose(rope.freqs_cis.value[1, :8], row, atol=1e-6)
    assert rope.compute_scale() == pytest.approx(0.45837383662379005)
    assert rope.compute_scale(0.3) == pytest.approx(0.3889430978342118)
    with pytest.raises(ValueError, match="scaling_params"):
        DeepseekYarnRotaryEmbedding(**KW)


def test_longrope_as_max_has_it():
    params = nn.LongRoPEScalingParams([1.0, 1.1, 1.2, 1.3], [2.0, 3.0, 4.0, 5.0], 2, 16)
    rope = nn.LongRoPERotaryEmbedding(**KW, scaling_params=params)
    table = rope.freqs_cis.value
    assert table.shape == (8, 8)
    short = [0.5403023, 0.841471, 0.9958706, 0.0907839, 0.9999653, 0.0083332, 0.9999997, 0.0007692]
    long = [0.5403023, 0.841471, 0.9977786, 0.0666173, 0.9999875, 0.005, 0.9999999, 0.0004]
    np.testing.assert_allclose(table[1], short, atol=1e-6)
    np.testing.assert_allclose(table[2], long, atol=1e-6)
    assert rope.compute_scale() == pytest.approx(0.7071067811865476)
    assert rope.compute_scale(0.3) == 0.3
    plain = nn.LongRoPERotaryEmbedding(**KW)
    np.testing.assert_array_equal(plain.freqs_cis.value, nn.RotaryEmbedding(**KW).freqs_cis.value)


@pytest.mark.parametrize(
    "params", [nn.Llama3RopeScalingParams(8.0, 1.0, 4.0, 16), nn.LinearScalingParams(4.0), None]
)
def test_llama3_and_linear(params):
    rope = nn.Llama3RotaryEmbedding(**KW, scaling_params=params)
    angles = np.arange(8)[:, None] * inv_freqs(8, 1e4, params)
    np.testing.assert_allclose(rope.freqs_cis_base().value[..., 0], np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(rope.freqs_cis_base().value[..., 1], np.sin(angles), atol=1e-6)


@pytest.mark.parametrize("length", [3, 8, 20])
def test_dynamic(length):
    x = random(1, length, 2, 8)
    plain = DynamicRotaryEmbedding(**KW)
    plain.maybe_update_freqs(jnp.arange(length))
    np.testing.assert_allclose(call(plain, x), turned(x, np.arange(length)), rtol=1e-5, atol=1e-5)
    rope = DynamicRotaryEmbedding(**KW, scaling_params=DynamicScalingParams(2.0, 8))
    freqs = inv_freqs(8, 1e4, DynamicScalingParams(2.0, 8), length=length)
    angles = np.arange(length)[:, None] * freqs
    expected = rotate(jnp.asarray(x), np.cos(angles), np.sin(angles), interleaved=True)
    found = jax.jit(lambda x, p: rope(x, positions=p))(x, jnp.arange(length))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_frequencies_of_dynamic():
    rope = DynamicRotaryEmbedding(**KW)
    for freqs in (rope.inv_freq, rope.original_inv_freq):  # InternVL's file of MAX reads the latter
        np.testing.assert_array_equal(freqs.to_numpy(), inv_freqs(8, 1e4))


def test_equal_ropes_are_one_definition():
    params = nn.LongRoPEScalingParams([1.0, 1.1], [2.0, 3.0], 2, 16)
    make = lambda: nn.LongRoPERotaryEmbedding(8, 2, 1e4, 4, scaling_params=params)
    assert jax.tree.structure(make()) == jax.tree.structure(make())


def test_what_is_refused():
    rope = nn.RotaryEmbedding(**KW)
    with pytest.raises(ValueError, match="positions 6 to 8 are beyond the 8 rows"):
        rope(jnp.ones((1, 3, 2, 8)), start_pos=6)
    with pytest.raises(ValueError, match="takes .*8"):
        rope(jnp.ones((1, 3, 2, 6)))
    with pytest.raises(ValueError, match="heads"):
        rope(jnp.ones((3, 8)))
    with pytest.raises(ValueError, match="even"):
        nn.YarnRotaryEmbedding(6, 2, 1e4, 4)
    for kind, params in [
        (DynamicRotaryEmbedding, nn.LinearScalingParams(2.0)),
        (nn.LongRoPERotaryEmbedding, nn.LinearScalingParams(2.0)),
        (nn.Llama3RotaryEmbedding, nn.LongRoPEScalingParams([2.0] * 4, [4.0] * 4, 3, 16)),
    ]:
        with pytest.raises(
            TypeError,
            match=f"{kind.__name__} takes scaling_params of type .*, not {type(params).__name__}",
        ):
            kind(**KW, scaling_params=params)
    with pytest.raises(NotImplementedError, match="rotate"):
        nn.RotaryEmbedding(**KW, _freqs_cis=jnp.ones((8, 8)))


@pytest.mark.parametrize(
    ("kind", "params", "factors"),
    [
        (nn.RotaryEmbedding, None, 1),
        (nn.Llama3RotaryEmbedding, nn.LinearScalingParams(2.0), 1),
        (nn.LongRoPERotaryEmbedding, nn.LongRoPEScalingParams([2.0] * 4, [4.0] * 4, 3, 16), None),
    ],
)
def test_a_class_has_frequencies_of_its_own(kind, params, factors):
    class Own(kind):
        def _compute_inv_freqs(self):
            return super()._compute_inv_freqs() * 3.0

    given = {} if params is None else {"scaling_params": params}
    freqs = 3 * inv_freqs(8, 1e4, params if factors else None)
    divisor = np.ones(8) if factors else np.where(np.arange(8) < 3, 2.0, 4.0)
    wanted = np.arange(8)[:, None] * freqs / divisor[:, None]
    found = Own(**KW, **given).freqs_cis_base().value
    np.testing.assert_allclose(found[..., 1], np.sin(wanted), atol=1e-5)
