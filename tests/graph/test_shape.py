"""Shape: a list of Dims, with MAX's reading of equality, and taken by NumPy and JAX."""

import copy
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.graph import DeviceRef, Weight
from maxjax.graph.shape import Dim, Shape, StaticDim


def test_of_anything_iterable():
    assert repr(Shape((1, "a", 3))) == "[Dim(1), Dim('a'), Dim(3)]"
    assert Shape() == Shape(()) == []
    assert Shape(i for i in (1, 2)) == Shape([Dim(1), np.int64(2)]) == [1, 2]
    assert Shape(Shape(("a", 2))) == ["a", 2]
    with pytest.raises(TypeError):
        Shape(3)
    for bad in (1.5, None):
        with pytest.raises(TypeError, match="Unsupported dimension type"):
            Shape((bad,))


def test_equal_to_lists_and_tuples():
    s = Shape((1, "a"))
    assert s == [1, "a"]
    assert s == Shape((1, "a"))
    assert s == (1, "a") and (1, "a") == s
    assert s != (1, "b") and (1, "b") != s and not s != (1, "a")
    assert s != (1,) and s != "1a" and s != {1, "a"}
    weight = Weight("w", "float32", (4, 8), DeviceRef.CPU())
    assert weight.shape == (4, 8) == weight.shape == [np.int64(4), 8] and weight.shape != (8, 4)
    assert s != [1, "b"]
    assert s != [1]
    assert tuple(s) == (1, "a")
    with pytest.raises(TypeError, match="unhashable"):
        hash(s)


def test_properties():
    s = Shape((1, "a", -3, Dim("b") + "a"))
    assert (s.rank, s.static_dims) == (4, [1, -3])
    assert all(type(d) is int for d in s.static_dims)
    assert [str(p) for p in s.parameters] == ["a", "a", "b"]


def test_is_static():
    assert Shape.is_static(Shape((1, 0)))
    assert Shape.is_static(Shape(()))
    assert not Shape.is_static(Shape((1, "a")))
    assert not Shape.is_static(Shape((1, -1)))
    assert Shape.is_static([Dim(1)])
    assert not Shape.is_static([1])


def test_is_a_list():
    s = Shape((1, 2, 3))
    assert isinstance(s[0], StaticDim)
    assert type(s[1:]) is type(s + [4]) is type(s.copy()) is list
    assert type(copy.copy(s)) is Shape
    assert 2 in s
    assert s.index(2) == 1
    s.append("n")
    assert s == [1, 2, 3, "n"]


def test_copies():
    s = Shape((1, "a", Dim("a") // 2))
    for other in (copy.deepcopy(s), pickle.loads(pickle.dumps(s))):
        assert type(other) is Shape
        assert other == s


def test_numpy_and_jax_take_a_static_one():
    s = Shape((2, 3))
    assert np.zeros(s).shape == jnp.zeros(s).shape == (2, 3)
    assert np.zeros(6).reshape(s).shape == jnp.zeros(6).reshape(s).shape == (2, 3)
    assert jnp.broadcast_to(jnp.zeros((1, 3)), s).shape == (2, 3)
    assert jnp.zeros((2, 6)).reshape(s[0], s[1], -1).shape == (2, 3, 2)
    assert np.prod(s) == 6
    with pytest.raises(TypeError):
        np.zeros(Shape((2, "a")))
