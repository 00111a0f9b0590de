"""One token of Mamba 2's recurrence on every level, against its definition, and where the kernel runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.kernels import native
from maxjax.nn.ssm import ssd


def operands(batch, heads, rows, groups, size, layers=2):
    """Those of the operation, of the last of some layers; of several rows the last but one is not used."""
    rng = np.random.default_rng(0)
    shapes = [(batch, heads, rows), (batch, heads), *[(batch, groups, size)] * 2,
              (layers, batch, heads, rows, size)]  # fmt: skip
    found = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    found[1] = -jnp.abs(found[1])
    used = np.ones(batch, np.int32)
    used[:-1][-1:] = 0
    return [*found, jnp.int32(layers - 1), jnp.asarray(used)]


def run(*operands):
    return list(ssd.ssd_step_in_place(*operands))


def define(*operands):
    return ssd.step_in_stack(None, *operands)


def close(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-5)


@pytest.mark.parametrize("sizes", [(1, 4, 64, 1, 128), (3, 6, 5, 2, 37), (1, 1, 1, 1, 1)])
def test_on_every_level(sizes):
    given = operands(*sizes)
    expected = jax.jit(define)(*given)
    program = jax.jit(run).lower(*given).compile()
    assert 'custom_call_target="maxjax_ssd"' in str(program.as_text())
    for level in native.levels():
        with native.level(level):
            close(program(*given), expected)


def test_other_layers_and_rows_without_a_token_keep_their_state():
    given = operands(3, 2, 4, 1, 8, layers=3)
    given[5] = jnp.int32(1)
    given[0] = given[0].at[1].set(jnp.nan)  # of the row that is not used
    y, after = jax.jit(run)(*given)
    assert not np.asarray(y[1]).any() and np.asarray(y[0]).all()
    changed = np.asarray(after != given[4]).any(axis=(2, 3, 4))
    np.testing.assert_array_equal(changed, [[False] * 3, [True, False, True], [False] * 3])


def test_exports_and_derivatives_are_those_of_the_definition():
    given = operands(2, 2, 3, 1, 6)
    exported = jax.export.export(jax.jit(run))(*given)
    assert "custom_call @maxjax_ssd" not in str(exported.mlir_module())
    close(exported.call(*given), define(*given))
    total = lambda f: lambda *moving: jnp.sum(jnp.sin(f(*moving, *given[5:])[0]))
    found, wanted = (jax.jit(jax.grad(total(f), range(5)))(*given[:5]) for f in (run, define))
    close(found, wanted)


def test_a_divided_batch_is_not_gathered():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    given = operands(4, 2, 3, 1, 8)
    spec = jax.sharding.PartitionSpec
    axes = [("data",)] * 4 + [(None, "data"), (), ("data",)]
    there = [
        jax.device_put(a, jax.sharding.NamedSharding(mesh, spec(*one)))
        for a, one in zip(given, axes, strict=True)
    ]
    text = str(jax.jit(run).lower(*there).compile().as_text())
    assert "maxjax_ssd" in text and "all-gather" not in text
    close(jax.jit(run)(*there), run(*given))
