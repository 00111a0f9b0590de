"""Decode attention whose keys are the values too, as latent vectors are, in all its forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxjax.kernels import decode_attention, native
from maxjax.nn.kv_cache.slots import Latent
from scripts.sharding_product import collectives, mesh_of
from tests.kernels.decode_reference import check, check_int8, narrowed, operands

LENGTHS = (299, 5, -1, 0)


def latents(**options):
    """Operands with one KV head, whose values are the keys."""
    given = operands(LENGTHS, kv_heads=1, slots=300, **options)
    return given | {"v": given["k"], "values": given["keys"]}


def shared(given, **options):
    """``decode_attention`` without values."""
    given = {name: a for name, a in given.items() if name not in ("v", "values")}
    return decode_attention(v=None, values=None, **given, **options)


@pytest.mark.parametrize("cache", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "width"), [(13, 40), (2, 33)])
def test_on_every_level(cache, heads, width):
    """Many query heads are divided between threads where few parts of the cache are."""
    given = latents(heads=heads, width=width, cache=cache, q=cache, sinks=heads > 2)
    program = jax.jit(shared).lower(given).compile()
    assert 'custom_call_target="maxjax_decode_attention"' in program.as_text()
    for level in native.levels():
        with native.level(level):
            out, keys = program(given)
        check(given, (out, keys, keys))


@pytest.mark.parametrize("form", ["definition", "blocks"])
def test_without_a_kernel(form):
    given = latents(heads=6, width=24)
    if form == "definition":
        exported = jax.export.export(jax.jit(shared))(given)
        out, keys = exported.call(given)
    else:
        lowered = jax.jit(shared).trace(given).lower(lowering_platforms=("tpu",))
        assert "maxjax_decode_attention" not in lowered.as_text()
        from maxjax.kernels.decode import blocks
        from maxjax.kernels.decode.step import Options

        q, k, keys, lengths = (jnp.asarray(given[name]) for name in ("q", "k", "keys", "lengths"))
        none, nothing = jnp.zeros((len(LENGTHS), 0)), jnp.zeros(())
        out, keys, _ = blocks.in_blocks(
            Options(24**-0.5, 0, 0.0, False, False), 1 << 30, q[:, None], k, nothing, keys[None],
            nothing, jnp.int32(0), lengths, none, none, *[jnp.zeros((1, 0))] * 2,
        )  # fmt: skip
        out, keys = out[:, 0], keys[0]
    check(given, (out, keys, keys))


def test_int8():
    given, floats = narrowed(latents(heads=6, width=24))
    given["scales"] = given["scales"][:1]
    out, keys, scales = jax.jit(shared)(given)
    check_int8(
        given | {"scales": (given["scales"][0],) * 2}, floats, (out, keys, keys, scales, scales)
    )
    with pytest.raises(ValueError, match="one array of scales"):
        shared(given | {"scales": None})


def test_in_place():
    """The one cache of all layers is updated where it is."""
    given = latents(heads=6, width=24)
    cache = Latent(jnp.asarray(np.stack([given["keys"]] * 2)[:, :, :1]))
    place = cache.keys.unsafe_buffer_pointer()
    k, v, lengths = (given[name] for name in ("k", "v", "lengths"))
    run = lambda cache, q: cache.decoded(q, k, v, lengths, layer=1)
    out, after = jax.jit(run, donate_argnums=0)(cache, given["q"])
    assert after.keys.unsafe_buffer_pointer() == place
    check(given, (out, after.keys[1], after.keys[1]))
    np.testing.assert_array_equal(after.keys[0], given["keys"])


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_on_a_mesh(explicit):
    given = latents(heads=6, width=24)
    mesh = mesh_of({"data": 2, "model": 4}, explicit)
    put = lambda a: jax.device_put(a, NamedSharding(mesh, P("data")))
    there = {name: put(given[name]) for name in ("q", "k", "keys", "lengths")}
    program = jax.jit(shared).lower(there).compile()
    assert not collectives(program.as_text())
    out, keys = program(there)
    check(given, (out, keys, keys))
    assert keys.sharding.is_equivalent_to(there["keys"].sharding, 4)


def test_derivatives():
    """Those of the cache as keys and as values add up."""
    given = latents(heads=3, width=8)
    q, k, keys, lengths = (jnp.asarray(given[name]) for name in ("q", "k", "keys", "lengths"))
    one = lambda keys, k: decode_attention(q, k, None, keys, None, lengths)[0].sum()
    two = lambda keys, k: decode_attention(q, k, k, keys, keys, lengths)[0].sum()
    found, wanted = (jax.jit(jax.grad(f, (0, 1)))(keys, k) for f in (one, two))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
