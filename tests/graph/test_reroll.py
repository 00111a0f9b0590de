"""Loop rerolling: calls of one layer become a scan that gives the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core as jax_core

from maxjax.graph.reroll import reroll

N, D = 5, 3
ROUND = np.random.default_rng(0)


def normal(*shape, dtype="float32"):
    return jnp.asarray(ROUND.normal(size=shape), dtype)


W, V, B = normal(N, D, D), normal(N, D, D), normal(N, D)
X, Y, CACHES = normal(2, D), normal(2, D), normal(N, 2, D)


def layer(function):
    """The function jitted under the name that is looked for."""
    function.__name__ = "_call_at"
    return jax.jit(function)


def at(stack, i):
    return lax.dynamic_index_in_dim(stack, i, keepdims=False)


@layer
def plain(w, i, x):
    return jnp.tanh(x @ at(w, i)) + x


@layer
def other(w, b, i, x):
    return jnp.sin(x @ at(w, i)) * at(b, i)[None]


@layer
def two(w, i, x, y):
    return jnp.tanh(y @ at(w, i)), x + y


@layer
def cached(w, i, x, cache, rope):
    x = jnp.tanh(x @ at(w, i)) * rope + cache
    return x, cache + 2 * x


def primitives(closed):
    return [
        "_call_at" if e.params.get("name") == "_call_at" else e.primitive.name
        for e in closed.jaxpr.eqns
    ]


def evaluated(result, closed, args):
    """The results of both, in one program: eagerly, each of their equations would be one."""
    both = [jax_core.jaxpr_as_fun(one) for one in (result, closed)]
    return zip(*jax.jit(lambda *args: [f(*args) for f in both])(*args), strict=True)


def close(a, b, tolerance=1e-5):
    assert a.dtype == b.dtype and a.shape == b.shape
    if jnp.issubdtype(a.dtype, jnp.floating):
        tolerance = 0.05 if a.dtype == jnp.bfloat16 else tolerance
        a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    else:
        np.testing.assert_array_equal(a, b)


def rolled(function, *args, scans=1, calls=0):
    """The rerolled jaxpr, seen to be equivalent, with so many scans and calls left."""
    closed = jax.make_jaxpr(function)(*args)
    result = reroll(closed)
    assert (result is closed) == (scans == 0)
    seen = primitives(result)
    assert (seen.count("scan"), seen.count("_call_at")) == (scans, calls), seen
    jax_core.check_jaxpr(result.jaxpr)
    assert result.in_avals == closed.in_avals and result.out_avals == closed.out_avals
    assert len(result.consts) == len(closed.consts)
    assert all(a is b for a, b in zip(result.consts, closed.consts, strict=True))
    flat = jax.tree.leaves(args)
    for a, b in evaluated(result, closed, flat):
        close(a, b)
    return result


def bodies(closed):
    return [e.params["jaxpr"] for e in closed.jaxpr.eqns if e.primitive.name == "scan"]


def chain(w, x, order=range(N)):
    for i in order:
        x = plain(w, np.int32(i), x)
    return x


# --- what is rerolled ---------------------------------------------------------------------


def test_a_chain():
    result = rolled(chain, W, X)
    (body,) = bodies(result)
    assert primitives(body) == ["_call_at"]


def test_the_size_does_not_depend_on_the_number_of_layers():
    sizes = []
    for n in (2, 20, 100):

        def run(w, x, n=n):
            for i in range(n):
                x = plain(jnp.reshape(w, (n, D, D)), np.int32(i), x)
            return x

        closed = reroll(jax.make_jaxpr(run)(jnp.ones((1, n, D, D)), X))
        sizes.append(len(closed.jaxpr.eqns))
    assert sizes[0] == sizes[1] == sizes[2] <= 4


def test_not_all_layers_and_not_from_the_first():
    assert "add" not in primitives(rolled(lambda w, x: chain(w, x, range(2)), W, X))
    rolled(lambda w, x: chain(w, x, range(2, N)), W, X)


def test_two_carries():
    def run(w, x, y):
        for i in range(N):
            x, y = two(w, np.int32(i), x, y)
        return x, y

    rolled(run, W, X, Y)


def test_crossed_and_doubled_carries():
    def crossed(w, x, y):
        for i in range(N):
            y, x = two(w, np.int32(i), x, y)
        return x, y

    def doubled(w, x, y):
        for i in range(N):
            x, _ = two(w, np.int32(i), x, x if i else y)
        return x

    rolled(crossed, W, X, Y)
    rolled(doubled, W, X, Y)


def test_no_carry():
    rolled(lambda w, x: [plain(w, np.int32(i), x) for i in range(N)], W, X)


def test_caches_one_by_one():
    def run(w, x, caches, rope):
        new = []
        for i in range(N):
            x, cache = cached(w, np.int32(i), x, caches[i], rope)
            new.append(cache)
        return x, new

    result = rolled(run, W, X, list(CACHES), Y)
    assert primitives(result).count("stack") == 1


ROWS = {
    "index": lambda caches: [caches[i] for i in range(N)],
    "iterate": list,
    "unstack": jnp.unstack,
    "slice": lambda caches: [caches[i : i + 1].reshape(2, D) for i in range(N)],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_caches_as_one_array(rows):
    def run(w, x, caches, rope):
        new, rows_ = [], rows(caches)
        for i in range(N):
            x, cache = cached(w, np.int32(i), x, rows_[i], rope)
            new.append(cache)
        return x, jnp.stack(new)

    assert sorted(primitives(rolled(run, W, X, CACHES, Y))) == ["iota", "scan"]


def test_some_rows_of_an_array():
    def run(w, x, caches, rope, first, step=1):
        for i in range(3):
            x, _ = cached(w, np.int32(i), x, caches[first + step * i], rope)
        return x

    result = rolled(lambda *a: run(*a, first=1), W, X, CACHES, Y)
    assert "stack" not in primitives(result)
    result = rolled(lambda *a: run(*a, first=4, step=-1), W, X, CACHES, Y)
    assert "stack" in primitives(result)


NO_ROWS = {
    "parts of rows": lambda square: [square[i, :2] for i in range(4)],
    "columns": lambda square: [square[:2, i] for i in range(4)],
    "columns of an unstack": lambda square: [c[:2] for c in jnp.unstack(square, axis=1)],
    "whole columns": lambda square: jnp.unstack(square[:2], axis=1),
    "repeated": lambda square: [square[:2][i // 2, :2] for i in range(4)],
}


@pytest.mark.parametrize("columns", NO_ROWS.values(), ids=NO_ROWS)
def test_what_looks_like_rows_and_is_not(columns):
    def run(w, x, square, rope):
        for i, column in enumerate(columns(square)):
            x, _ = cached(w, np.int32(i), x, column, rope)
        return x

    assert "stack" in primitives(rolled(run, W, X, normal(4, 4, D), Y))


def test_a_table_that_all_share_is_no_column():
    def run(w, x, rope):
        for i in range(N):
            x, _ = cached(w, np.int32(i), x, rope, jnp.cos(rope))
        return x

    result = rolled(run, W, X, Y)
    assert primitives(result).count("cos") == 1
    assert "stack" not in primitives(result)


def test_hidden_states():
    def run(w, x):
        states = [x]
        for i in range(N):
            states.append(plain(w, np.int32(i), states[-1]))
        return states[2], jnp.stack(states[1:]), sum(states), states[-1], states[-1] * 2

    rolled(run, W, X)


def test_states_stacked_in_another_order_or_along_another_axis():
    def run(w, x):
        states = []
        for i in range(N):
            x = plain(w, np.int32(i), x)
            states.append(x)
        return jnp.stack(states[::-1]), jnp.stack(states, 1), jnp.stack(states[1:])

    rolled(run, W, X)


def test_an_output_that_none_reads():
    def run(w, x, y):
        for i in range(N):
            x, last = cached(w, np.int32(i), x, y, y)
        return x, last

    rolled(run, W, X, Y)
    rolled(lambda *a: run(*a)[0], W, X, Y)
    rolled(lambda *a: run(*a)[1], W, X, Y)


def test_equations_between_the_calls():
    def run(w, x, y):
        seen = []
        for i in range(N):
            y = y * 2 + i  # before the loop
            x, cache = cached(w, np.int32(i), x, y, y)
            seen.append(jnp.sum(cache) + jnp.max(x))  # after it
        return x, seen

    seen = primitives(rolled(run, W, X, Y))
    assert seen.index("mul") < seen.index("scan") < seen.index("reduce_sum")


def test_equations_that_are_repeated():
    both = jax.jit(lambda x: (jnp.sin(x), jnp.cos(x)))

    def run(w, x, y):
        for i in range(N):
            x, _ = cached(w, np.int32(i), x, y * 2, both(y)[0])
        return x + both(y)[1]  # of the first of these calls this output is dropped

    seen = primitives(rolled(run, W, X, Y))
    assert (seen.count("mul"), seen.count("stack")) == (1, 0)


def test_equations_that_differ_in_their_context_alone():
    def run(w, x, y):
        one = y * 2
        with set_xla_metadata(a="1"):
            another = y * 2
        for i in range(N):
            x, _ = cached(w, np.int32(i), x, one, another)
        return x

    assert primitives(rolled(run, W, X, Y)).count("mul") == 2


def test_two_runs_of_different_layers():
    def run(w, v, b, x):
        x = chain(w, x)
        for i in range(N):
            x = other(v, b, np.int32(i), x)
        return x

    rolled(run, W, V, B, X, scans=2)


def test_a_run_feeds_another_layer_by_layer():
    def run(w, v, x, y):
        first, states = x, []
        for i in range(N):
            x = plain(w, np.int32(i), x)
            states.append(x)
        for i in range(N):
            y, _ = cached(v, np.int32(i), y, states[i], first)
        return y

    assert sorted(primitives(rolled(run, W, V, X, Y, scans=2))) == ["iota", "scan", "scan"]


def test_a_pattern_with_a_period():
    def run(w, v, b, x):
        for i in range(2):
            x = chain(w, x, [2 * i, 2 * i + 1])
            x = other(v, b, np.int32(i), x)
        return x

    rolled(run, W, V, B, X, scans=2, calls=2)


# --- what is not --------------------------------------------------------------------------


def test_a_broken_run():
    def run(w, x):
        for i in range(4):
            x = plain(w, np.int32(i), x)
            x = x * 2 if i == 1 else x
        return x

    rolled(run, W, X, scans=2)

    def all_broken(w, x):
        for i in range(4):
            x = plain(w, np.int32(i), x) * 2
        return x

    rolled(all_broken, W, X, scans=0, calls=4)


@pytest.mark.parametrize("order", [[0], [1, 0], [0, 0, 0], [4, 2, 0], []])
def test_no_run(order):
    rolled(lambda w, x: chain(w, x, order), W, X, scans=0, calls=len(order))


def test_indices_out_of_order_end_a_run():
    rolled(lambda w, x: chain(w, x, [0, 1, 3, 4, 1, 2, 3]), W, X, scans=3)
    rolled(lambda w, x: chain(w, x, [2, 0, 1, 1]), W, X, calls=2)


def test_different_stacks():
    def run(w, v, x):
        for i in range(4):
            x = plain((w, v)[i % 2], np.int32(i), x)
        return x

    rolled(run, W, V, X, scans=0, calls=4)


def test_an_output_of_an_earlier_call_or_one_worked_on():
    def skipping(w, x, y):
        old, older = x, y
        for i in range(4):
            (old, _), older = cached(w, np.int32(i), old, older, y), old
        return old

    def worked_on(w, x, y):
        cache = y
        for i in range(4):
            x, cache = cached(w, np.int32(i), x, cache + 1, y)
        return x

    rolled(skipping, W, X, Y, scans=2)  # two by two, as the first of each depends on no other
    rolled(worked_on, W, X, Y, scans=0, calls=4)


def test_an_operand_of_another_kind_ends_a_run():
    def run(w, x, y):
        first, cache = x, y
        for i in range(4):
            x, cache = cached(w, np.int32(i), first if i == 2 else x, cache, y)
        return x

    rolled(run, W, X, Y, scans=2)


def test_effects_end_a_run():
    heard = []

    @jax.jit
    def tell():
        jax.debug.callback(lambda: heard.append(1), ordered=True)

    def run(w, x):
        for i in range(4):
            x = plain(w, np.int32(i), x)
            if i == 1:
                tell()
                tell()
        return x

    rolled(run, W, X, scans=2)
    jax.effects_barrier()
    assert len(heard) == 4


def test_a_layer_with_effects():
    heard = []

    @layer
    def loud(w, i, x):
        jax.debug.callback(lambda i: heard.append(int(i)), i, ordered=True)
        return x + at(w, i)

    def run(w, x):
        for i in range(3):
            x = loud(w, np.int32(i), x)
        return x

    rolled(run, B, normal(D), scans=0, calls=3)
    jax.effects_barrier()
    assert heard == [0, 1, 2] * 2


def test_no_such_calls():
    closed = jax.make_jaxpr(lambda x: x + 1)(X)
    assert reroll(closed) is closed
    closed = jax.make_jaxpr(chain)(W, X)
    assert reroll(closed, "another") is closed


def test_a_layer_without_a_literal_index():
    @layer
    def without(w, x):
        return x @ w

    def run(w, x, i):
        for _ in range(3):
            x = plain(w, i, without(w[0], x))
        return x

    rolled(run, W, X, jnp.int32(1), scans=0, calls=6)


# --- the function called ------------------------------------------------------------------


def separate(scale, table=None):
    @layer
    def run(w, i, x):
        x = jnp.where(x > 0, x * scale, x) @ at(w, i)
        return x if table is None else x + jnp.asarray(table)

    return run


TABLE = np.arange(2.0 * D, dtype=np.float32).reshape(2, D)


@pytest.mark.parametrize(
    ("functions", "scans"),
    [
        ([separate(2.0) for _ in range(3)], 1),
        ([separate(float(i)) for i in range(3)], 0),
        ([separate(1.0, TABLE) for _ in range(3)], 1),
        ([separate(1.0, TABLE + i) for i in range(3)], 0),
        ([separate(1.0), separate(1.0, TABLE), separate(1.0)], 0),
    ],
    ids=["equal", "literals", "one constant", "constants", "equations"],
)
def test_functions_jitted_one_by_one(functions, scans):
    def run(w, x):
        for i, function in enumerate(functions):
            x = function(w, np.int32(i), x)
        return x

    rolled(run, W, X, scans=scans, calls=0 if scans else 3)


def test_other_shapes_of_one_function():
    def run(w, x):
        for i in range(4):
            x = plain(w, np.int32(i), x if i < 2 else jnp.concatenate([x, x])[: 2 + i % 2])
        return x

    rolled(run, W, X, scans=1, calls=2)


# --- constants ----------------------------------------------------------------------------


def large(*shape):
    return np.broadcast_to(np.zeros((), np.float32), (1, *shape))


def addresses(consts):
    return [np.asarray(const).ctypes.data for const in consts]


def test_weights_that_are_constants():
    w, b, stray = large(N, D, D), large(N, D), large(D)

    def run(x):
        x = x + jnp.asarray(stray).reshape(1, D)
        for i in range(N):
            x = other(jnp.asarray(w).reshape(N, D, D), jnp.asarray(b).reshape(N, D), np.int32(i), x)
        return x + jnp.asarray(w)[0, 0, 0].reshape(1, D)

    result = rolled(run, X)
    closed = jax.make_jaxpr(run)(X)
    assert set(addresses(result.consts)) == set(addresses([w, b, stray]))
    values = {w.ctypes.data: W[None], b.ctypes.data: B[None], stray.ctypes.data: normal(1, D)}
    filled = [
        jax_core.ClosedJaxpr(c.jaxpr, [values[a] for a in addresses(c.consts)])
        for c in (result, closed)
    ]
    a, b = zip(*evaluated(*filled, [X]), strict=True)
    close(a[0], b[0])


def test_one_constant_met_as_several():
    w = large(N, D, D)

    def run(x):
        for i in range(N):
            x = plain(jnp.reshape(w, (N, D, D)), np.int32(i), x)
        return x

    assert len(jax.make_jaxpr(run)(X).consts) > 1  # jnp.reshape copies the view, not the memory
    rolled(run, X)


def test_a_layer_that_closes_over_a_weight():
    weight = large(D)
    inner = jax.jit(lambda x: x + jnp.asarray(weight).reshape(1, D))

    @layer
    def closing(w, i, x):
        return inner(x) @ at(w, i)

    def run(w, x):
        for i in range(3):
            x = closing(w, np.int32(i), x)
        return x

    rolled(run, W, X)


def test_a_layer_that_closes_over_an_outer_value():
    def run(w, outer, x):
        inner = jax.jit(lambda x: x + outer)
        closing = layer(lambda w, i, x: inner(x) @ at(w, i))
        for i in range(3):
            x = closing(w, np.int32(i), x)
        return x

    rolled(run, W, Y, X)


# --- kinds of operands --------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "bfloat16", "float16"])
def test_dtypes(dtype):
    x = jnp.asarray([[1, 0, 1], [0, 1, 1]], dtype)
    columns = [jnp.roll(x, i, 1) for i in range(N)]
    w = jnp.asarray(ROUND.integers(0, 2, (N, D)), dtype)

    @layer
    def mixed(w, i, x, column, flag):
        x = jnp.where(flag, x, column)
        return (x ^ at(w, i)[None] if dtype == "bool" else x + at(w, i)[None]), ~flag, i

    def run(w, x, columns, flag):
        indices = []
        for i in range(N):
            x, flag, index = mixed(w, np.int32(i), x, columns[i], flag)
            indices.append(index)
        return x, flag, indices

    rolled(run, w, x, columns, jnp.asarray(True))


def test_zero_sizes():
    def run(w, x, caches, rope):
        new = []
        for i in range(N):
            x, cache = cached(w, np.int32(i), x, caches[i], rope)
            new.append(cache)
        return x, jnp.stack(new)

    rolled(run, W, X[:0], CACHES[:, :0], X[:0])
    rolled(run, W[:, :0, :0], X[:, :0], CACHES[..., :0], X[:, :0])


def test_literals():
    @layer
    def scaled(w, i, x, scale, shift):
        return x * scale + shift * at(w, i)[0, 0], shift

    def run(w, x, scales, shift):
        for i in range(3):
            x, shift = scaled(w, np.int32(i), x, scales[i], shift)
        return x

    one = np.float32(1.5)
    for scales in ([2.0] * 3, [2.0, 3.0, 4.0], [np.float32(i) for i in range(3)]):
        for shift in (1.0, one):
            rolled(lambda w, x, s=scales, t=shift: run(w, x, s, t), W, X)
            rolled(lambda w, s=scales, t=shift: run(w, one, s, t), W)
    rolled(lambda w, x, s: run(w, x, [s, one, s * 2], one), W, X, jnp.float32(3))


def test_numbers_of_weak_type():
    @layer
    def weak(w, i, x):
        return x * 2.0, x + at(w, i)[0, 0]

    def run(w, x):
        ys = []
        for i in range(N):
            x, y = weak(w, i, x)
            ys += [x, y]
        return x, ys

    closed = jax.make_jaxpr(run)(W, 1.0)
    assert closed.out_avals[0].weak_type
    rolled(run, W, 1.0)


def test_keys():
    @layer
    def noisy(w, i, x, key):
        return x @ at(w, i) + jax.random.normal(key, (2, D))

    def run(w, x, key):
        keys = jax.random.split(key, N)
        for i in range(N):
            x = noisy(w, np.int32(i), x, keys[i])
        return x

    assert "stack" not in primitives(rolled(run, W, X, jax.random.key(0)))

    def separate_keys(w, x, keys):
        for i in range(N):
            x = noisy(w, np.int32(i), x, keys[i])
        return x

    keys = list(jax.random.split(jax.random.key(0), N))
    rolled(separate_keys, W, X, keys)


def test_no_weights_at_all():
    @layer
    def bare(i, x):
        return x + i.astype(jnp.float32)

    def run(x):
        for i in range(3):
            x = bare(np.int32(i), x)
        return x

    rolled(run, X)


def test_named_sizes():
    b, s = jax.export.symbolic_shape("b, s")
    types = [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in [(N, D, D), (b, D), (N, b, D), (b, D), (s, D)]
    ]

    def run(w, x, caches, rope, rest):
        new = []
        for i in range(N):
            x, cache = cached(w, np.int32(i), x, caches[i], rope)
            new.append(cache)
        states = [rest]
        for i in range(N):
            states.append(plain(w, np.int32(i), states[-1]))
        return x, jnp.stack(new), jnp.concatenate(states[1:])

    closed = jax.make_jaxpr(run)(*types)
    result = reroll(closed)
    seen = primitives(result)
    assert (seen.count("scan"), seen.count("_call_at"), seen.count("gather")) == (2, 0, 0)
    assert result.out_avals == closed.out_avals
    args = [W, X, CACHES, Y, normal(4, D)]
    programs = [
        jax.export.export(jax.jit(jax_core.jaxpr_as_fun(c)))(*types).call for c in (result, closed)
    ]
    for a, b in zip(*(program(*args) for program in programs), strict=True):
        close(a, b)


# --- what one does with the result --------------------------------------------------------


def differentiated(f):
    return jax.grad(lambda *args: f(*args)[0], argnums=(0, 1, 2, 3))


def pushed_forward(f):
    return lambda *args: jax.jvp(lambda *args: f(*args)[0], args, args)


def mapped(f):
    both = lambda x: jnp.stack([x, x + 1])
    return lambda w, x, c, r: jax.vmap(f, (None, 0, None, 0))(w, both(x), c, both(r))


def test_gradients_and_vmap():
    def run(w, x, caches, rope):
        new, states = [], []
        for i in range(N):
            x, cache = cached(w, np.int32(i), x, caches[i], rope)
            new.append(cache)
            states.append(x)
        return jnp.sum(x**2) + jnp.sum(jnp.stack(new) ** 2) + jnp.sum(states[1])

    args = (W, X, CACHES, Y)
    before = jax_core.jaxpr_as_fun(jax.make_jaxpr(run)(*args))
    after = jax_core.jaxpr_as_fun(rolled(run, *args))
    for transform in (differentiated, pushed_forward, mapped):
        ours, theirs = (jax.tree.leaves(jax.jit(transform(f))(*args)) for f in (after, before))
        for a, b in zip(ours, theirs, strict=True):
            close(a, b, 1e-4)


def test_twice_is_once():
    result = reroll(jax.make_jaxpr(chain)(W, X))
    assert reroll(result) is result


# --- programs at random -------------------------------------------------------------------


def program(seed):
    """A function of (W, V, B, X, Y, CACHES): runs of calls, more or less disturbed."""

    def run(w, v, b, x, y, caches):
        dice = np.random.default_rng(seed)
        pool, odd = [x, y], seed % 3 * 0.15

        def pick():
            return pool[dice.integers(len(pool))]

        def disturb():
            if dice.random() < odd:
                one, another = pick(), pick()
                pool.append([one + another, jnp.sin(one), one * 2, jnp.flip(one)][dice.integers(4)])
            if dice.random() < odd:
                pool.append(caches[dice.integers(N)])
            if dice.random() < odd and len(pool) > 4:
                pool.append(jnp.stack(pool[-3:]).sum(0))

        for _ in range(3):
            kind, stack = dice.integers(3), (w, v)[dice.integers(2)]
            first = dice.integers(0, 3)
            h, other_, fixed = pick(), pick(), pick()
            for i in range(first, N):
                disturb()
                i = np.int32(i if dice.random() > odd / 2 else dice.integers(N))
                h = h if dice.random() > odd / 2 else pick()
                if kind == 0:
                    outputs = (plain(stack, i, h),)
                elif kind == 1:
                    outputs = two(stack, i, h, other_)
                else:
                    table = fixed if dice.random() > odd / 2 else pick()
                    outputs = cached(stack, i, h, caches[i] if seed % 2 else other_, table)
                h = outputs[0]
                other_ = outputs[-1] if kind == 1 or seed % 4 else other_
                if dice.random() < odd:
                    pool += outputs
            pool += outputs
        return [h, *(pick() for _ in range(3)), pool[-1]]

    return run


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seeds", np.arange(48).reshape(8, 6).tolist(), ids=str)
def test_programs_at_random(seeds):
    args = (W, V, B, X, Y, CACHES)
    scans = 0
    for seed in seeds:
        closed = jax.make_jaxpr(program(seed))(*args)
        result = reroll(closed)
        scans += primitives(result).count("scan")
        jax_core.check_jaxpr(result.jaxpr)
        assert result.out_avals == closed.out_avals
        for a, b in evaluated(result, closed, args):
            close(a, b, 1e-3)
    assert scans > len(seeds)
