"""LayerStack.scan against the layers called in a loop: inputs, outputs, gradients, the program."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from maxjax.graph import TensorValue, Weight
from maxjax.nn import LayerList
from maxjax.nn.layer import PerLayer, add_layer_hook, clear_hooks
from tests.nn.layer.stack.test_layer_stack import CPU, Lin, X, fill, state

N = 3


class Block(Lin):
    """Takes all that a layer may get, and gives what it is asked for."""

    gain = 1.0

    def __call__(
        self,
        h,
        cache=None,
        rope=None,
        *,
        scale=1.0,
        shift=None,
        flip=False,
        mode="none",
        layer=None,
    ):
        y = jnp.tanh(h @ self.weight.T) * self.gain
        if rope is not None:
            y = y * rope["cos"] + y[::-1] * rope["sin"]
        y = h + scale * (-y if flip else y)
        if shift is not None:
            y = y + shift
        if layer is not None:
            y = y * (1 + layer.astype(y.dtype))
        if mode == "cache":
            return y, cache + y
        return (y, cache + y, {"norm": jnp.sum(y), "first": y[:1]}) if mode == "many" else y


class Wide(Block):
    """Another kind of layer for patterns, with a cache of another shape."""

    gain = 0.5

    def __call__(self, h, cache=None, rope=None, *, mode="none", **shared):
        y = super().__call__(h, None, rope, **shared)
        return y if mode == "none" else (y, cache + y[None])


def blocks(n=N, cls=Block, **attrs):
    return LayerList(cls(**attrs) for _ in range(n))


def pair(n=N, cls=Block, seed=0, **attrs):
    """The same layers in a list and in a stack."""
    return fill(blocks(n, cls, **attrs), seed), fill(blocks(n, cls, **attrs).stack(), seed)


def pattern(kinds="BBWBBWBB"):
    make = lambda: LayerList({"B": Block, "W": Wide}[kind]() for kind in kinds)
    return fill(make()), fill(make().stack())


def loop(layers, carry, *xs, index=None, **shared):
    """What scan does, written out. ``xs`` are lists."""
    outputs = []
    for i, layer in enumerate(layers):
        more = {} if index is None else {index: jnp.int32(i)}
        result = layer(carry, *(x[i] for x in xs), **shared, **more)
        if jax.tree.structure(result) == jax.tree.structure(carry):
            carry = result
        else:
            carry, *ys = result
            outputs.append(ys)
    if not outputs:
        return carry
    return (carry, *(jax.tree.map(lambda *a: jnp.stack(a), *y) for y in zip(*outputs, strict=True)))


def close(got, want, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jnp.shape(a) == jnp.shape(b) and jnp.result_type(a) == jnp.result_type(b)
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=rtol, atol=atol
        )


def rows(n=N, d=4, seed=5):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((n, d)), jnp.float32)


def ropes(n=N):
    return {"cos": rows(n, seed=6), "sin": rows(n, seed=7)}


def unstack(tree, n=N):
    return [jax.tree.map(lambda a, i=i: a[i], tree) for i in range(n)]


INPUTS = {
    "carry alone": ((), {}),
    "cache": ((rows(),), {"mode": "cache"}),
    "cache and rope": ((rows(), ropes()), {"mode": "cache"}),
    "many outputs": ((rows(),), {"mode": "many"}),
    "None for a cache": ((None, ropes()), {}),
    "index": ((), {"index": "layer"}),
    "keywords": ((), {"scale": 0.5, "shift": X, "flip": True}),
    "traced scale": ((), {"scale": jnp.float32(0.5), "shift": None}),
    "numpy": ((np.asarray(rows()),), {"mode": "cache", "shift": np.asarray(X)}),
    "all of it": ((rows(), ropes()), {"mode": "many", "index": "layer", "shift": X, "scale": 2}),
}


# -- what goes in and comes out


HOWS = [(how, given) for how in ("eager", "jit") for given in INPUTS]
HOWS += [("hooks", given) for given in ("carry alone", "many outputs", "numpy", "all of it")]
HOWS += [(how, "all of it") for how in ("unroll", "disable_jit")]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("how, given", HOWS)
def test_it_is_the_loop(how, given):
    xs, options = INPUTS[given]
    layers, stack = pair()
    want = loop(layers, X, *(unstack(x) for x in xs), **options)
    if how == "jit":
        static = {k: v for k, v in options.items() if not isinstance(v, (jax.Array, np.ndarray))}
        arrays = {k: v for k, v in options.items() if k not in static}
        got = jax.jit(lambda s, h, xs, a: s.scan(h, *xs, **a, **static))(stack, X, xs, arrays)
    elif how == "unroll":
        got = stack.scan(X, *xs, unroll=2, **options)
    elif how == "disable_jit":
        with jax.disable_jit():
            got = stack.scan(X, *xs, **options)
    else:
        if how == "hooks":
            add_layer_hook(lambda *a: None)
        got = stack.scan(X, *xs, **options)
    close(got, want)


@pytest.mark.parametrize("make", [list, tuple], ids=["list", "stacked tuple"])
def test_a_list_is_one_for_each_layer_and_a_tuple_is_a_tree(make):
    class Two(Lin):
        def __call__(self, h, x):
            return h + x[0] * x[1], x[0]

    layers, stack = pair(cls=Two)
    each = [(a, b) for a, b in zip(rows(), rows(seed=8), strict=True)]
    x = each if make is list else (rows(), rows(seed=8))
    close(stack.scan(X, x), loop(layers, X, each))


def test_what_is_no_number_of_layers_is_refused():
    _, stack = pair()
    with pytest.raises(
        ValueError, match=r"a leading axis of 3 layers; x\['a'\] has shape \(2, 4\)"
    ):
        stack.scan(X, {"a": rows(2)}, mode="cache")
    with pytest.raises(ValueError, match=r"x has shape \(\)"):
        stack.scan(X, 1.0, mode="cache")
    with pytest.raises(ValueError, match="2 values for 3 layers"):
        stack.scan(X, [X, X], mode="cache")
    with pytest.raises(ValueError, match="are equal, but their values are not"):
        stack.scan(X, [X, X, X[:2]], mode="cache")


@pytest.mark.parametrize("wrap", [TensorValue, lambda x: x], ids=["TensorValue", "array"])
@pytest.mark.parametrize("jit", [False, True])
def test_kinds_of_carries(wrap, jit):
    class Tree(Lin):
        def __call__(self, carry):
            h, (count, seen) = carry["h"], carry["rest"]
            h = h + jnp.tanh(h @ self.weight.T)
            return {"h": h, "rest": (count + 1, seen * 2)}

    layers, stack = pair(cls=Tree)
    carry = {"h": wrap(X), "rest": (jnp.int32(0), wrap(jnp.ones(2, jnp.bfloat16)))}
    run = jax.jit(lambda s, c: s.scan(c)) if jit else lambda s, c: s.scan(c)
    got, want = run(stack, carry), loop(layers, carry)
    assert jax.tree.structure(got) == jax.tree.structure(carry)
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert got[2].dtype == jnp.bfloat16 and int(got[1]) == N
    close(got, want)


def test_a_tuple_of_carries_and_outputs():
    class Pair(Lin):
        def __call__(self, carry, x):
            a, b = carry
            return (b, a + x), x * a

    layers, stack = pair(cls=Pair)
    want = loop(layers, (X, 2 * X), list(rows()))
    close(stack.scan((X, 2 * X), rows()), want)


class Result(NamedTuple):
    h: object
    cache: object


@pytest.mark.parametrize("kind", [Result, lambda *y: list(y)], ids=["named", "list"])
def test_a_list_or_a_named_tuple_may_be_returned(kind):
    class Gives(Lin):
        def __call__(self, h):
            return kind(h * 2, h)

    h, ys = pair(cls=Gives)[1].scan(X)
    np.testing.assert_allclose(h, X * 8)
    np.testing.assert_allclose(ys, np.stack([X, 2 * X, 4 * X]))


def test_no_output_and_none_as_one():
    class Gives(Lin):
        def __call__(self, h, what):
            return {"carry": h, "one": (h,), "none": (h, None)}[what]

    _, stack = pair(cls=Gives)
    assert isinstance(stack.scan(X, what="carry"), jax.Array)
    assert isinstance(stack.scan(X, what="one"), jax.Array)
    h, nothing = stack.scan(X, what="none")
    assert nothing is None and h.shape == (4,)


@pytest.mark.parametrize(
    "result, says",
    [
        (lambda h: h[:2], r"got a carry of float32\[4\] and returns one of float32\[2\]"),
        (lambda h: h.astype(jnp.bfloat16), r"returns one of bfloat16\[4\]"),
        (lambda h: {"h": h}, r"returns its carry, or a tuple that begins with it.*'h'"),
        (lambda h: None, "returns its carry"),
        (lambda h: (), "returns its carry"),
        (lambda h: ((h, h), h), "returns its carry"),
    ],
)
@pytest.mark.parametrize("hooked", [False, True])
def test_what_a_layer_may_not_return(result, says, hooked):
    class Wrong(Lin):
        def __call__(self, h):
            return result(h)

    _, stack = pair(cls=Wrong)
    if hooked:
        add_layer_hook(lambda *a: None)
    with pytest.raises(TypeError, match=says):
        stack.scan(X)


def test_layers_with_different_numbers_of_outputs():
    class Silent(Lin):
        pass

    class Loud(Lin):
        def __call__(self, h):
            return h, h

    stack = fill(LayerList([Silent(), Loud()] * 2).stack())
    with pytest.raises(TypeError, match=r"different numbers of outputs: \[0, 1\]"):
        stack.scan(X)


def test_bfloat16_and_its_error():
    layers, stack = pair(dtype="bfloat16")
    x = X.astype(jnp.bfloat16)
    got = stack.scan(x, rows().astype(jnp.bfloat16), mode="cache")
    assert [a.dtype for a in got] == [jnp.bfloat16] * 2
    want = loop(layers, x, list(rows().astype(jnp.bfloat16)), mode="cache")
    close(got, want, rtol=2e-2, atol=2e-2)


def test_layers_that_widen_their_carry_are_refused():
    class Widens(Lin):
        def __call__(self, h):
            return h.astype(jnp.float32) @ self.weight.T

    _, stack = pair(cls=Widens)
    with pytest.raises(TypeError, match=r"bfloat16\[4\] and returns one of float32\[4\]"):
        stack.scan(X.astype(jnp.bfloat16))


def test_integers_booleans_and_keys_as_inputs():
    class Picks(Lin):
        def __call__(self, h, at, on, key):
            drop = jax.random.bernoulli(key, 0.5, h.shape)
            h = jnp.where(on, h + self.weight[at], h)
            return jnp.where(drop, h, 0), at + 1

    layers, stack = pair(cls=Picks)
    xs = (
        jnp.array([1, 0, 3]),
        jnp.array([True, False, True]),
        jax.random.split(jax.random.key(0), 3),
    )
    want = loop(layers, X, *(list(x) for x in xs))
    close(stack.scan(X, *xs), want)
    close(stack.scan(X, *(list(x) for x in xs)), want)


def test_a_random_key_as_a_carry():
    class Noise(Lin):
        def __call__(self, carry):
            h, key = carry
            key, own = jax.random.split(key)
            return h + jax.random.normal(own, h.shape), key

    layers, stack = pair(cls=Noise)
    (h, key), (want, last) = (
        stack.scan((X, jax.random.key(1))),
        loop(layers, (X, jax.random.key(1))),
    )
    np.testing.assert_allclose(h, want, rtol=1e-6)
    assert (jax.random.key_data(key) == jax.random.key_data(last)).all()


def test_nothing_of_size_zero_is_special():
    layers, stack = pair()
    none = jnp.zeros((N, 0, 4))
    x = jnp.zeros((0, 4))
    got = stack.scan(x, none, mode="cache")
    assert [a.shape for a in got] == [(0, 4), (N, 0, 4)]
    close(got, loop(layers, x, list(none), mode="cache"))
    grads = jax.grad(lambda s: stack.scan(x).sum() + s.scan(x).sum())(stack)
    assert (jax.tree.leaves(grads)[0] == 0).all()


def test_keyword_arguments_that_cannot_be_constants():
    _, stack = pair()
    with pytest.raises(TypeError, match=r"\(mode\) must be arrays or hashable"):
        stack.scan(X, mode=Unhashable())


class Unhashable:
    __hash__ = None


@pytest.mark.parametrize(
    "one, other", [(1, True), (1, 1.0), (0, False), ("a", "b"), (None, False), ((1, 2), (1, 3))]
)
def test_constants_that_differ_are_traced_again(one, other):
    class Tells(Lin):
        def __call__(self, h, what):
            told.append(what)
            return h

    told = []
    _, stack = pair(cls=Tells)
    for what in (one, other, one):
        stack.scan(X, what=what)
    assert [(type(t), t) for t in told] == [(type(t), t) for t in (one, other)]


def test_modules_and_weights_as_keyword_arguments():
    class Uses(Lin):
        def __call__(self, h, norm, table):
            return norm(h) + table

    layers, stack = pair(cls=Uses)
    norm, table = fill(Lin()), Weight("table", "float32", (4,), CPU)
    table.value = X
    want = loop(layers, X, norm=norm, table=table)
    close(stack.scan(X, norm=norm, table=table), want)
    close(jax.jit(lambda s, n, t: s.scan(X, norm=n, table=t))(stack, norm, table), want)
    other = pair(cls=Lin, seed=9)[1]
    close(stack.scan(X, norm=other[1], table=table), loop(layers, X, norm=other[1], table=table))


@pytest.mark.parametrize("unroll", [-1, 1.5, "x", None])
def test_what_is_no_unroll(unroll):
    with pytest.raises(ValueError, match="unroll is a number of steps or a bool"):
        pair()[1].scan(X, unroll=unroll)


# -- patterns


@pytest.mark.parametrize("how", ["eager", "jit", "hooks"])
def test_a_pattern_with_a_rest(how):
    layers, stack = pattern()
    caches = [rows(1, seed=i)[0] if i % 3 < 2 else rows(1, seed=i) for i in range(8)]
    want_h, want = X, []
    for layer, cache in zip(layers, caches, strict=True):
        want_h, y = layer(want_h, cache, mode="cache")
        want.append(y)
    if how == "hooks":
        add_layer_hook(lambda *a: None)
    run = lambda s, h, c: s.scan(h, c, mode="cache")
    run = jax.jit(run) if how == "jit" else run
    for given in (caches, stack.per_layer(caches)):
        h, got = run(stack, X, given)
        assert isinstance(got, PerLayer)
        close(h, want_h)
        for a, b in zip(got, want, strict=True):
            close(a, b)
    close(run(stack, h, got)[0], run(stack, h, list(got))[0])


class Halves(Wide):
    def __call__(self, h, cache=None, rope=None, **shared):
        return Block.__call__(self, h, cache, rope, **shared)


def test_outputs_of_a_pattern_are_one_array_where_they_are_alike():
    make = lambda: LayerList(kind() for kind in (Block, Halves, Block, Halves, Block))
    layers, stack = fill(make()), fill(make().stack())
    caches = rows(5)
    want = loop(layers, X, list(caches), mode="cache")
    close(stack.scan(X, caches, mode="cache"), want)
    h, kept = stack.scan(X, stack.per_layer(list(caches)), mode="cache")
    assert isinstance(kept, PerLayer)
    close((h, kept.merged()), want)
    with pytest.raises(ValueError, match="does not fit a stack of 5 layers"):
        stack.scan(X, pattern()[1].per_layer(list(rows(8))), mode="cache")


class Says(Lin):
    def __call__(self, h, *, layer):
        return h, layer


@pytest.mark.parametrize("how", [{}, {"period": 2}, {"first": 2, "period": 3}])
def test_indices_are_those_of_the_list(how):
    stack = fill(blocks(9, Says).stack(**how))
    np.testing.assert_array_equal(stack.scan(X, index="layer")[1], np.arange(9))


# -- gradients


def loss_of(run):
    def loss(layers, h, cache, scale):
        result = run(layers, h, cache, scale)
        return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(result))

    return loss


def by_loop(layers, h, cache, scale):
    return loop(layers, h, list(cache), scale=scale, mode="cache")


def by_scan(remat=None):
    def run(stack, h, cache, scale):
        return stack.scan(h, cache, scale=scale, mode="cache", remat=remat)

    return run


OPERANDS = (X, rows(), jnp.float32(0.7))
ALL = (0, 1, 2, 3)


def by_name(grads):
    layers, *others = grads
    return {name: w.value for name, w in layers.raw_state_dict().items()}, others


GRADS = {
    "jit of grad": lambda f: jax.jit(jax.grad(f, ALL)),
    "grad of jit": lambda f: jax.grad(jax.jit(f), ALL),
    "eager": lambda f: jax.grad(f, ALL),
}
REMATS = [None, True, "dots_saveable", jax.checkpoint_policies.nothing_saveable]


@pytest.mark.sampled
@pytest.mark.parametrize("how", GRADS)
@pytest.mark.parametrize("remat", REMATS, ids=["off", "on", "name", "policy"])
def test_gradients_are_those_of_the_loop(how, remat):
    layers, stack = pair()
    want = by_name(jax.jit(jax.grad(loss_of(by_loop), ALL))(layers, *OPERANDS))
    got = by_name(GRADS[how](loss_of(by_scan(remat)))(stack, *OPERANDS))
    close(got, want, rtol=1e-5, atol=1e-6)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(got))


@pytest.mark.parametrize("remat", [None, True])
def test_gradients_through_a_pattern(remat):
    layers, stack = pattern("BWBWB")
    run = lambda s, h, scale: s.scan(h, scale=scale, remat=remat)
    loss = lambda run: lambda *a: jnp.sum(jnp.square(run(*a)))
    by_loops = jax.grad(loss(lambda m, h, s: loop(m, h, scale=s)), (0, 1, 2))
    want = jax.jit(by_loops)(layers, X, OPERANDS[2])
    got = jax.jit(jax.grad(loss(run), (0, 1, 2)))(stack, X, OPERANDS[2])
    close(by_name(got), by_name(want))


def test_gradients_of_per_layer_inputs():
    _, stack = pattern("BWBW")
    caches = [rows(1, seed=i)[0] if i % 2 == 0 else rows(1, seed=i) for i in range(4)]
    given = stack.per_layer(caches)
    total = lambda y: sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(y))
    grads = jax.grad(lambda c: total(stack.scan(X, c, mode="cache")))(given)
    assert isinstance(grads, PerLayer)

    def written_out(caches):
        h, ys = X, []
        for layer, cache in zip(stack, caches, strict=True):
            h, y = layer(h, cache, mode="cache")
            ys.append(y)
        return total((h, ys))

    close(list(grads), jax.grad(written_out)(caches))


def test_jvp_and_higher_derivatives():
    results = []
    for model, run in zip(pair(), (loop, lambda s, h: s.scan(h)), strict=True):
        ones = jax.tree.map(jnp.ones_like, model), jnp.ones_like(X)
        cubes = lambda m, h, run=run: jnp.sum(run(m, h) ** 3)
        results.append((
            jax.jit(functools.partial(jax.jvp, run))((model, X), ones),
            jax.linearize(lambda h, m=model, f=cubes: f(m, h), X)[1](X),
            jax.jit(jax.hessian(cubes, 1))(model, X),
        ))  # fmt: skip
    close(results[1], results[0], rtol=1e-4, atol=1e-4)


def test_a_hessian_vector_product_in_the_weights():
    layers, stack = pair()
    products = []
    for model, run in ((layers, loop), (stack, lambda s, h: s.scan(h))):
        grad = jax.grad(lambda m, run=run: jnp.sum(run(m, X) ** 2))
        ones = jax.tree.map(jnp.ones_like, model)
        products.append(
            by_name([jax.jit(lambda m, o, g=grad: jax.jvp(g, (m,), (o,))[1])(model, ones)])
        )
    close(products[1], products[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("remat", [None, True])
def test_vmap(remat):
    layers, stack = pair()
    batch = rows(5)
    run = lambda s, h: s.scan(h, remat=remat)
    want = jnp.stack([loop(layers, h) for h in batch])
    close(jax.vmap(run, (None, 0))(stack, batch), want)
    close(jax.jit(jax.vmap(run, (None, 0)))(stack, batch), want)
    each = jax.vmap(jax.grad(lambda s, h: jnp.sum(run(s, h) ** 2)), (None, 0))(stack, batch)
    assert jax.tree.leaves(each)[0].shape == (5, N, 4, 4)
    one = jax.jit(jax.grad(lambda s: jnp.sum(loop(s, batch[2]) ** 2)))(layers)
    close(jax.tree.leaves(each)[0][2], jnp.stack(jax.tree.leaves(one)))


def test_an_ensemble_of_stacks():
    stacks = [pair(seed=seed)[1] for seed in range(2)]
    both = jax.tree.map(lambda *a: jnp.stack(a), *stacks)
    got = jax.vmap(lambda s: s.scan(X))(both)
    close(got, jnp.stack([s.scan(X) for s in stacks]))


def test_integers_beside_what_is_differentiated():
    class Picks(Lin):
        def __call__(self, carry, at, *, step):
            h, count = carry
            return (jnp.tanh(h @ self.weight.T) + self.weight[at], count + step), at * 2

    layers, stack = pair(cls=Picks)
    at, step = jnp.array([2, 0, 1]), jnp.int32(3)

    def loss(run):
        def of(model, h, at, step):
            (h, count), doubled = run(model, (h, jnp.int32(0)), at, step=step)
            return jnp.sum(h**2), (count, doubled)

        return of

    looped = lambda m, c, at, step: loop(m, c, list(at), step=step)
    want = jax.jit(jax.grad(loss(looped), (0, 1), has_aux=True))(layers, X, at, step)
    for grad in (jax.grad, lambda *a, **k: jax.jit(jax.grad(*a, **k))):
        got = grad(loss(lambda m, c, at, step: m.scan(c, at, step=step)), (0, 1), has_aux=True)(
            stack, X, at, step
        )
        close(by_name(got[0]), by_name(want[0]))
        close(got[1], want[1])
    allowed = jax.grad(
        lambda s, at: loss(lambda m, c, at, step: m.scan(c, at, step=step))(s, X, at, step)[0],
        (0, 1), allow_int=True,
    )(stack, at)  # fmt: skip
    assert allowed[1].dtype == jax.dtypes.float0 and allowed[1].shape == (3,)


@jax.custom_vjp
def product(x, w):
    return x @ w.T


product.defvjp(
    lambda x, w: (x @ w.T, (x, w)), lambda kept, g: (g @ kept[1], g[:, None] * kept[0][None])
)


@pytest.mark.parametrize("remat", [None, True])
def test_layers_with_a_derivative_of_their_own(remat):
    class Own(Lin):
        def __call__(self, h):
            return h + jnp.tanh(product(h, self.weight.value))

    layers, stack = pair(cls=Own)
    want = jax.jit(jax.grad(lambda m: jnp.sum(loop(m, X) ** 2)))(layers)
    loss = lambda s: jnp.sum(s.scan(X, remat=remat) ** 2)
    for grad in (jax.grad(loss), jax.jit(jax.grad(loss))):
        close(by_name([grad(stack)]), by_name([want]))


def test_a_wrong_policy():
    _, stack = pair()
    with pytest.raises(ValueError, match="remat='dots' is not a policy .* dots_saveable"):
        stack.scan(X, remat="dots")


def test_remat_computes_again():
    _, stack = pair()
    text = lambda remat: str(
        jax.make_jaxpr(jax.grad(lambda s: s.scan(X, remat=remat).sum()))(stack)
    )
    assert text(None).count("tanh") < text(True).count("tanh")
    assert "remat" not in text(None)
    assert text("everything_saveable").count("tanh") == text(None).count("tanh")


def test_hooks_and_gradients():
    layers, stack = pair()
    seen = []
    add_layer_hook(lambda layer, *a: seen.append(layer))
    got = jax.grad(lambda s: jnp.sum(s.scan(X) ** 2))(stack)
    assert len(seen) == N
    clear_hooks()
    close(by_name([got]), by_name([jax.jit(jax.grad(lambda s: jnp.sum(loop(s, X) ** 2)))(layers)]))


# -- the program


def scans(jaxpr):
    """All scans in a jaxpr, at any depth."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            found.append(equation)
        for value in equation.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    found += scans(inner)
    return found


def kinds(equation):
    """(shapes of constants, of carries, of what is scanned) of a scan."""
    shapes = [atom.aval.shape for atom in equation.invars]
    first, second = counts(equation)
    return shapes[:first], shapes[first : first + second], shapes[first + second :]


def counts(equation):
    """How many constants and carries a scan has, as this JAX writes it down."""
    params = equation.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carries, _ = (len(list(part.vals)) for part in params["ft_in"].unpack())
    return constants, carries


def test_the_whole_stack_goes_into_the_loop():
    _, stack = pair(7)
    (only,) = scans(jax.make_jaxpr(lambda s, h: s.scan(h))(stack, X).jaxpr)
    constants, carries, scanned = kinds(only)
    assert (7, 4, 4) in constants and (7, 4, 4) not in [*carries, *scanned]


@pytest.mark.parametrize("remat", [None, True])
@pytest.mark.parametrize("kind", [Block, Wide])
def test_no_step_back_has_a_cotangent_as_large_as_the_stack(remat, kind):
    _, stack = pair(7, kind)

    def loss(s, h, scale):
        return jnp.sum(s.scan(h, scale=scale, remat=remat) ** 2)

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(stack, X, jnp.float32(1))
    loops = scans(jaxpr.jaxpr)
    assert [equation.params["reverse"] for equation in loops] == [False, True]
    for equation in loops:
        constants, carries, _ = kinds(equation)
        assert not any(shape[:1] == (7,) for shape in carries)
        assert (7, 4, 4) not in constants
    given = loops[1].outvars[counts(loops[1])[1] :]
    assert [v.aval.shape for v in given] == [(7, 4, 4)]


@pytest.mark.parametrize("what", ["run", "grad"])
def test_the_program_does_not_grow_with_depth(what):
    sizes = []
    for n in (4, 16):
        stack = fill(blocks(n).stack())
        run = lambda s, h: s.scan(h).sum()
        run = jax.grad(run) if what == "grad" else run
        lowered = jax.jit(run).lower(stack, X)
        sizes.append((len(str(jax.make_jaxpr(run)(stack, X))), lowered.as_text().count("\n")))
    assert sizes[0][1] == sizes[1][1]
    assert abs(sizes[0][0] - sizes[1][0]) < 100


def test_unroll_writes_steps_out():
    _, stack = pair(6)
    texts = [
        str(jax.make_jaxpr(lambda s, u=unroll: s.scan(X, unroll=u))(stack)) for unroll in (1, 2, 3)
    ]
    assert [re.findall(r"unroll=(\d)", text) for text in texts] == [["1"], ["2"], ["3"]]
    for unroll in (2, 4, False):
        close(stack.scan(X, unroll=unroll), stack.scan(X))


def test_one_body_for_each_place_of_the_pattern():
    _, stack = pattern("BBWBBWBBWBBW")
    (only,) = scans(jax.make_jaxpr(lambda s, h: s.scan(h))(stack, X).jaxpr)
    assert only.params["length"] == 4
    assert str(only.params["jaxpr"]).count("maxjax_matmul[") == 3


def test_state_is_left_as_it_was():
    _, stack = pair()
    before, treedef = state(stack), jax.tree.structure(stack)
    stack.scan(X)
    jax.grad(lambda s: s.scan(X).sum())(stack)
    assert jax.tree.structure(stack) == treedef
    for name, value in state(stack).items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize("spec", [P("model", None), P("data", "model")])
def test_a_carry_keeps_its_sharding_on_explicit_axes(spec):
    """Whatever the rules of the weights make of the results: its type in the loop must not change."""
    kinds = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=kinds, devices=jax.devices()[:4])
    model = fill(blocks().stack())
    want = model.scan(X)
    model.to(mesh, rules={"*": spec})
    found = model.scan(jax.device_put(X, NamedSharding(mesh, P())))
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
