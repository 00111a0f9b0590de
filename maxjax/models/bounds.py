"""Checks the numbers of a configuration against the tensors of its checkpoint.

A number that is too large would cost memory and time (RoPE tables, a Module for each layer and
expert) before anything shows that it does not fit, so it is compared with the tensors first.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import CheckpointMismatchError
from .config import ModelConfig

# The first number in a tensor's name is that of its layer.
_LAYER = re.compile(r"(?<![^.])(\d{1,6})(?![^.])")


def check_bounds(
    config: type[ModelConfig],
    raw: Mapping[str, Any],
    tensors: Mapping[str, Sequence[int]],
    *,
    path: str | os.PathLike[str] | None = None,
) -> None:
    """Compares the numbers of a configuration with the lengths and layers of the tensors that they count.

    Values that are not integers are left to :meth:`ModelConfig.from_dict`, which reports them.

    Args:
        config: class of the configuration, whose fields say what they count (``config_field(bounded_by=...)``).
        raw: content of the file.
        tensors: logical shape of each tensor (in weights, not bytes), by name.
        path: path of the file, for messages.

    Raises:
        CheckpointMismatchError: a number is larger than the tensors allow; the message has both.

    Example:
        >>> from maxjax.models import LlamaConfig
        >>> check_bounds(LlamaConfig, {"head_dim": 10**9}, {"model.layers.0.q.weight": (32, 8)})
        Traceback (most recent call last):
        ...
        maxjax.errors.CheckpointMismatchError: 'head_dim' is larger than the tensors of the file
        allow (expected at most 32, the longest axis of 'model.layers.0.q.weight', found 1000000000).
        Check that ...
    """
    if not tensors:
        return
    longest = max(tensors, key=lambda name: max(tensors[name], default=0))
    layers = [int(m[1]) for m in map(_LAYER.search, tensors) if m is not None]
    limits = {"axis": (max(tensors[longest], default=0), f"the longest axis of '{longest}'")}
    if layers:
        limits["layers"] = (max(layers) + 1, "the number of layers in the tensors' names")
    raw = config.bounded_sizes(raw)
    for field in dataclasses.fields(config):
        key = field.metadata.get("key") or field.name
        if isinstance(field.default, ModelConfig) and isinstance(raw.get(key), Mapping):
            # The settings of a part: "text_config" of the tensors "text_model.*", if the file has this part.
            part = key.removesuffix("_config")
            held = {name: shape for name, shape in tensors.items() if name.startswith(part)}
            check_bounds(type(field.default), raw[key], held, path=path)
        limit = limits.get(field.metadata.get("bounded_by") or "")
        if limit is None:
            continue
        most, what = limit
        for name in (key, *field.metadata.get("aliases", ())):
            value = raw.get(name)
            if type(value) is int and value > most:
                raise CheckpointMismatchError(
                    f"'{name}' is larger than the tensors of the file allow", path=path,
                    expected=f"at most {most}, {what}", found=value if value < 10**30 else "more",
                )  # fmt: skip
