"""PerLayer and StackPattern: as a plain list of trees, however the layers are grouped."""

import copy
import pickle
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxjax.nn.layer import PerLayer
from maxjax.nn.layer.stack.per_layer import StackPattern


@st.composite
def layouts(draw):
    first, period = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    repeats, rest = draw(st.integers(1, 4)), draw(st.integers(0, period - 1))
    return StackPattern(first + period * repeats + rest, first, period, repeats)


def trees(layout, seed=0, alike=True):
    """A tree for each layer; of another shape at each place of the pattern unless alike."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(layout.count):
        slot = layout.slot_of(i)
        width = 2 if alike else 2 + (10 + i if slot is None else slot)
        made.append({
            "a": rng.standard_normal((width, 2)).astype(np.float32),
            "b": (np.full((), i, np.int32), None),
        })  # fmt: skip
    return made


def assert_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@given(layouts())
def test_every_layer_has_one_place(layout):
    alone = [i for i in range(layout.count) if layout.slot_of(i) is None]
    members = [i for slot in range(layout.slots) for i in layout.members(slot)]
    assert sorted(alone + members) == list(range(layout.count))
    assert alone == [*range(layout.first), *range(layout.end, layout.count)]
    for slot in range(layout.slots):
        span = layout.span(slot)
        assert [layout.slot_of(i) for i in layout.members(slot)] == [slot] * layout.repeats
        assert [span.start + k * span.step for k in range(span.count)] == list(layout.members(slot))
        if span.pattern != "*":
            places = slice(*map(int, span.pattern.split(":")))
            assert list(range(layout.count))[places] == list(layout.members(slot))
        for k, i in enumerate(layout.members(slot)):
            assert span.name(f"x.{span.pattern}.weight", k) == f"x.{i}.weight"
    standing = list(layout.order())
    assert standing == sorted(standing) and len(standing) == layout.slots + len(alone)
    patterns = [layout.span(slot).pattern for slot in range(layout.slots)]
    assert len(set(patterns)) == len(patterns)
    assert layout.is_plain == (patterns == ["*"])


@settings(max_examples=10)  # each compiles programs, in a campaign as well
@given(layouts(), st.booleans())
def test_of_gives_back_each_tree(layout, alike):
    values = trees(layout, alike=alike)
    held = PerLayer.of(values, layout)
    assert len(held) == layout.count and len(held.slots) == layout.slots
    for i, value in enumerate(values):
        assert_equal(held[i], value)
        assert_equal(held[i - layout.count], value)
    assert_equal(list(held), values)
    with pytest.raises(IndexError):
        held[layout.count]


@settings(max_examples=5)
@given(layouts())
def test_split_and_merged_are_inverse(layout):
    values = trees(layout)
    whole = jax.tree.map(lambda *leaves: np.stack(leaves), *values)
    held = PerLayer.split(whole, layout)
    assert_equal(list(held), values)
    assert_equal(held.merged(), whole)
    assert_equal(PerLayer.of(values, layout).merged(), whole)
    assert_equal(PerLayer.of(list(held), layout), held)


@settings(max_examples=25)
@given(layouts())
def test_it_is_a_tree_of_what_is_stacked(layout):
    values = trees(layout)
    held = PerLayer.of(values, layout)
    doubled = jax.tree.map(lambda a: a * 2, held)
    assert isinstance(doubled, PerLayer) and doubled.layout == layout
    assert_equal(list(doubled), jax.tree.map(lambda a: a * 2, values))
    leaves = jax.tree.leaves(held)
    assert len(leaves) == 2 * (layout.slots + layout.count - layout.slots * layout.repeats)
    for other in (pickle.loads(pickle.dumps(held)), copy.deepcopy(held), copy.copy(held)):
        assert_equal(other, held)


def test_different_shapes_are_kept_apart():
    layout = StackPattern(6, 1, 2, 2)
    values = trees(layout, alike=False)
    held = PerLayer.of(values, layout)
    assert held.merged() is held
    assert [leaf.shape for leaf in jax.tree.leaves(held.slots)][::2] == [(2, 2, 2), (2, 3, 2)]
    assert repr(held) == "PerLayer(6 layers: 2 times 2 after 1 and 1 more)"


@pytest.mark.parametrize(
    "other",
    [
        lambda a: a.astype(np.int32),
        lambda a: a[:1],
        lambda a: {"a": a},
        lambda a: None,
    ],
    ids=["dtype", "shape", "structure", "none"],
)
@pytest.mark.parametrize(
    "layout", [StackPattern(4, 0, 1, 4), StackPattern(5, 0, 2, 2), StackPattern(4, 1, 1, 3)]
)
def test_values_of_equal_layers_are_equal(layout, other):
    values = [np.ones((2, 2), np.float32) for _ in range(layout.count)]
    values[3] = other(values[3])
    with pytest.raises(ValueError, match="are equal, but their values are not"):
        PerLayer.of(values, layout)


def test_another_number_of_values():
    with pytest.raises(ValueError, match="3 values for 4 layers"):
        PerLayer.of([1, 2, 3], StackPattern(4, 0, 1, 4))


def test_trees_of_every_kind():
    class Cache(NamedTuple):
        k: object
        v: object

    layout = StackPattern(3, 0, 1, 3)
    values = [Cache(jnp.full((2,), i), [jnp.full((), i)]) for i in range(3)]
    held = PerLayer.of(values, layout)
    assert isinstance(held[1], Cache) and int(held[1].v[0]) == 1
    assert isinstance(held.merged(), Cache) and held.merged().k.shape == (3, 2)
    assert PerLayer.of([None] * 3, layout)[1] is None
    zero = PerLayer.of([jnp.zeros((0, 2))] * 3, layout)
    assert zero.merged().shape == (3, 0, 2) and zero[2].shape == (0, 2)


def test_it_goes_through_transformations():
    layout = StackPattern(5, 0, 2, 2)
    values = [jnp.arange(2.0) + i if i % 2 else jnp.arange(3.0) + i for i in range(5)]
    held = PerLayer.of(values, layout)
    total = lambda held: sum(jnp.sum(value**2) for value in held)
    grads = jax.jit(jax.grad(total))(held)
    assert isinstance(grads, PerLayer)
    for got, value in zip(grads, values, strict=True):
        np.testing.assert_allclose(got, 2 * value)
    shapes = jax.eval_shape(lambda held: held, held)
    assert shapes.layout == layout and shapes.rest[0].shape == (3,)
    assert jax.tree.structure(held) != jax.tree.structure(
        PerLayer.of([jnp.arange(3.0)] * 5, StackPattern(5, 1, 2, 2))
    )
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(held)]
    assert names == [".slots[0]", ".slots[1]", ".rest[0]"]
