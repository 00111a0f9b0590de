"""The scenarios run under JAX's defaults: they are ordinary user code."""

import pytest


@pytest.fixture(autouse=True)
def strict_jax() -> None:
    """Takes the place of the strict settings of the library's own tests."""
