"""Values of NumPy for the weights of a model: ``maxjax.init`` traces and compiles a program for each model."""

from typing import Any

import numpy as np


def filled(model: Any, seed: int = 0) -> Any:
    """The model, whose matrices keep the size of what they multiply, and whose norms are near 1."""
    rng, state = np.random.default_rng(seed), dict[str, Any]()
    for name, weight in model.raw_state_dict().items():
        shape = [int(n) for n in weight.shape]
        values = rng.standard_normal(shape, np.float32) * (
            shape[-1] ** -0.5 if len(shape) > 1 else 0.1
        )
        is_norm = len(shape) == 1 and name.endswith("weight")
        state[name] = (values + is_norm).astype(weight.dtype.np)
    model.load_state_dict(state)
    return model
