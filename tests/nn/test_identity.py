"""Identity gives back the very object."""

import jax
import jax.numpy as jnp

from maxjax import nn


def test_identity():
    x = jnp.ones(3)
    assert nn.Identity()(x) is x
    assert not nn.Identity().raw_state_dict()
    assert jax.tree.structure(nn.Identity()) == jax.tree.structure(nn.Identity())
