"""One comparison for all ops: against torch or NumPy, in every way an op can be called."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from maxjax.graph import TensorValue
from tests.oracles.recorded import recorded


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def listed(result):
    return list(result) if isinstance(result, (list, tuple)) else [result]


def check(op, oracle, *arrays, rtol=1e-5, atol=1e-6, grad=True):
    """`op` gives what `oracle` gives of torch tensors, and has its gradients.

    Eagerly and under jit, of plain arrays (giving plain arrays) and of TensorValues (giving
    TensorValues). The gradients are those of a fixed weighted sum of the results.
    """
    found = recorded(lambda: _of_torch(oracle, arrays, grad))
    want = found["outputs"]
    _check(op, want, arrays, Slopes(**found["slopes"], like=want) if grad else None, rtol, atol)


def _check(op, want, arrays, slopes, rtol=1e-5, atol=1e-6):
    near = functools.partial(_near, want=want, rtol=rtol, atol=atol)

    plain = [jnp.asarray(a) for a in arrays]
    results = listed(op(*plain))
    assert not any(isinstance(r, TensorValue) for r in results)
    near(results)
    results = listed(op(*map(TensorValue, plain)))
    assert all(isinstance(r, TensorValue) for r in results)
    near(results)
    # One program for the results and the gradients: compiling is what these tests take time for.
    results, got = jax.jit(lambda *xs: (listed(op(*xs)), slopes.ours(op, xs) if slopes else ()))(
        *plain
    )
    near(results)
    if slopes:
        slopes.check(got, rtol, atol)


def _near(results, want, rtol, atol):
    assert len(results) == len(want)
    for got, expected in zip(results, want, strict=True):
        got = np.asarray(got)
        assert got.shape == expected.shape
        assert got.dtype == jax.dtypes.canonicalize_dtype(expected.dtype)
        np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol)


class Slopes:
    """Gradients of a weighted sum of an op's results: what torch has, and how JAX gets them."""

    def __init__(self, expected, floats, like):
        self.expected, self.floats, self.factors = expected, floats, factors_of(like)

    def ours(self, op, args):
        def loss(values):
            given = list(args)
            for i, value in zip(self.floats, values, strict=True):
                given[i] = value
            return sum(
                jnp.sum(o * f)
                for o, f in zip(listed(op(*given)), self.factors, strict=True)
                if jnp.issubdtype(o.dtype, jnp.floating)
            )

        return jax.grad(loss)([args[i] for i in self.floats])

    def check(self, got, rtol, atol):
        for g, e in zip(got, self.expected, strict=True):
            zero = np.zeros(g.shape, np.float32)
            np.testing.assert_allclose(g, zero if e is None else e, rtol=10 * rtol, atol=10 * atol)


def factors_of(outputs):
    """The weights of the sum whose gradient is taken."""
    return [normal(*o.shape, seed=7 + i) for i, o in enumerate(outputs)]


def _of_torch(oracle, arrays, grad):
    """torch's results, and with ``grad`` its gradients of their weighted sum."""
    import torch

    tensors = [torch.tensor(a) for a in arrays]
    if grad:
        for t in tensors:
            t.requires_grad_(t.is_floating_point())
    outputs = listed(oracle(*tensors))
    want = [np.asarray(o.detach() if isinstance(o, torch.Tensor) else o) for o in outputs]
    if not grad:
        return {"outputs": want}
    floats = [i for i, t in enumerate(tensors) if t.requires_grad]
    factors = factors_of(want)
    pairs = [
        (o, torch.tensor(f)) for o, f in zip(outputs, factors, strict=True) if o.is_floating_point()
    ]
    assert floats and pairs, "nothing to differentiate: grad=False"
    loss = sum((o * f).sum() for o, f in pairs)
    found = torch.autograd.grad(loss, [tensors[i] for i in floats], allow_unused=True)
    expected = [None if slope is None else slope.numpy() for slope in found]
    return {"outputs": want, "slopes": {"expected": expected, "floats": floats}}


def check_numpy(op, oracle, *arrays, grad=True, **options):
    """As `check`, against a NumPy function.

    The gradient is compared with a central difference of the oracle in float64 along a random
    direction; `grad=False` where the op has none, or the values lie on a jump.
    """
    want = [np.asarray(found) for found in listed(oracle(*arrays))]
    _check(op, want, arrays, Differences.of(oracle, arrays, want) if grad else None, **options)


class Differences(Slopes):
    """The gradient along a random direction: a central difference of the oracle in float64."""

    @classmethod
    def of(cls, oracle, arrays, outputs, step=1e-6):
        """None for integers and truth values, which have no slope."""
        arrays = [np.asarray(a) for a in arrays]
        floats = [i for i, a in enumerate(arrays) if a.dtype == np.float32]
        pairs = [i for i, o in enumerate(outputs) if np.issubdtype(o.dtype, np.floating)]
        if not floats or not pairs:
            return None
        directions = {i: normal(*arrays[i].shape, seed=70 + i) for i in floats}
        factors = factors_of(outputs)

        def moved(by):
            wide = [
                a.astype(np.float64) + by * directions[i] if i in directions else a
                for i, a in enumerate(arrays)
            ]
            results = listed(oracle(*wide))
            return sum(np.sum(np.float64(results[i]) * factors[i]) for i in pairs)

        found = cls((moved(step) - moved(-step)) / (2 * step), floats, outputs)
        found.directions = [directions[i] for i in floats]
        return found

    def check(self, got, rtol, atol):
        slopes = zip(got, self.directions, strict=True)
        along = sum(np.sum(np.float64(slope) * way) for slope, way in slopes)
        np.testing.assert_allclose(along, self.expected, rtol=1e-3, atol=1e-3)
