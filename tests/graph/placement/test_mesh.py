"""make_mesh: axes by name and size."""

import jax
import numpy as np
import pytest

from maxjax import nn
from maxjax.graph import DeviceRef
from maxjax.graph.placement.arrays import platform_of
from maxjax.graph.placement.mesh import axis_name, make_mesh


def test_axes_in_the_order_given():
    mesh = make_mesh(data=2, model=4)
    assert dict(mesh.shape) == {"data": 2, "model": 4} and mesh.axis_names == ("data", "model")
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_fewer_devices_than_there_are():
    assert make_mesh(model=2).devices.ravel().tolist() == jax.devices()[:2]
    chosen = jax.devices()[3:5]
    assert set(make_mesh(model=2, devices=chosen).devices.ravel().tolist()) == set(chosen)


def test_all_that_are_left():
    assert dict(make_mesh(data=np.int64(2), tp=-1).shape) == {"data": 2, "model": 4}


def test_explicit_axes():
    kind = jax.sharding.AxisType
    assert make_mesh(model=2, axis_types=kind.Explicit).axis_types == (kind.Explicit,)
    assert (
        make_mesh(data=2, model=2, axis_types=(kind.Auto, kind.Explicit)).axis_types[1]
        == kind.Explicit
    )


@pytest.mark.parametrize(
    ("other", "name"),
    [("dp", "data"), ("tp", "model"), ("ep", "expert"), ("sp", "seq"), ("mine", "mine")],
)
def test_names(other, name):
    assert axis_name(other) == name


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({}, "needs the size of an axis"),
        ({"model": 16}, "needs 16 devices, but there are 8: cpu:0"),
        ({"model": 0}, "positive"),
        ({"model": 2.0}, "positive"),
        ({"model": -1, "data": -1}, "one of them"),
        ({"model": -1, "data": 3}, "not a multiple of 3"),
        ({"tp": 2, "model": 2}, "one axis twice"),
    ],
)
def test_wrong_sizes(sizes, says):
    with pytest.raises(ValueError, match=says):
        make_mesh(**sizes)


def test_a_device_occurs_once():
    """The message of JAX, when such a mesh is used, is one about zip()."""
    twice = [jax.devices()[3]] * 2
    with pytest.raises(
        ValueError, match=r"make_mesh\(model=2\) was given one device .*: cpu:3, cpu:3"
    ):
        make_mesh(model=2, devices=twice)
    with pytest.raises(ValueError, match="the mesh of to.* was given one device several times"):
        nn.Linear(2, 2, "float32", DeviceRef.CPU()).to(jax.sharding.Mesh(twice, ("model",)))


@pytest.mark.parametrize("place", [{"model": 2}, "model=2", 2, jax.devices()[:2]])
def test_what_is_no_place_is_named(place):
    """As ``maxjax.load(mesh=)`` may get it, which asks for the platform first."""
    said = rf"make_mesh\(model=2\).* not {type(place).__name__}"
    for use in (platform_of, nn.Linear(2, 2, "float32", DeviceRef.CPU()).to):
        with pytest.raises(TypeError, match=said):
            use(place)
