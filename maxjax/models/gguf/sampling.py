"""The sampling settings in a GGUF file's metadata, from and to the keys of ``generation_config.json``.

llama.cpp's converter copies them from the checkpoint that it converts, and its programs use them where
the user chooses nothing else.

Source: ``Keys.General`` in gguf-py's ``constants.py``; llama.cpp's pull request 17120.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .metadata import Settings

# Key of the metadata → key of generation_config.json.
_NUMBERS = {
    "temp": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
}
# Those that a file is written with if a token is drawn: with transformers' values of the ones that
# generation_config.json leaves out, as llama.cpp has others.
_DRAWN = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
_MAX_TOP_K = (1 << 31) - 1
_UNSUPPORTED = ("mirostat",)


def sampling_config(metadata: Mapping[str, Any], *, path: Any = None) -> dict[str, Any]:
    """The sampling settings of a file, by the keys of ``generation_config.json``; empty if it has none.

    A token is drawn if the file has a setting of how it is drawn, unless the temperature is 0.

    Raises:
        CheckpointFormatError: a value has the wrong type or is negative.

    Example:
        >>> sampling_config({"general.sampling.temp": 0.6, "general.sampling.top_k": 20})
        {'temperature': 0.6, 'top_k': 20, 'do_sample': True}
        >>> sampling_config({"general.name": "a model"})
        {}
    """
    given = Settings(metadata, "general.sampling.", path)
    found: dict[str, Any] = {
        name: _short(given.number(key, positive=False))
        for key, name in _NUMBERS.items()
        if given.has(key)
    }
    if given.has("top_k"):
        # 0 and below: all tokens.
        found["top_k"] = max(given.count("top_k", minimum=-(1 << 31), maximum=_MAX_TOP_K), 0)
    if given.has("penalty_last_n") and not given.any("penalty_last_n"):
        found.pop("repetition_penalty", None)  # of the last 0 tokens
    for key in _UNSUPPORTED:
        if given.has(key) and (value := given.number(key, positive=False)):
            found[key] = value
    if any(name in found for name in _DRAWN):
        found["do_sample"] = found.get("temperature") != 0
    return found


def sampling_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata for the sampling settings of a ``generation_config.json``; empty if tokens are not drawn.

    Example:
        >>> sorted(sampling_metadata({"do_sample": True, "temperature": 0.5}))[-2:]
        ['general.sampling.top_k', 'general.sampling.top_p']
    """
    found = {name: config.get(name) for name in ("repetition_penalty", *_DRAWN)}
    if config.get("do_sample") is True:
        found = {n: _DRAWN.get(n) if value is None else value for n, value in found.items()}
    else:
        found = {"repetition_penalty": found["repetition_penalty"]}
    top_k = found.pop("top_k", None)
    top_k = min(top_k, _MAX_TOP_K) if type(top_k) is int else None
    kept = {
        f"general.sampling.{key}": np.float32(found[name])
        for key, name in _NUMBERS.items()
        if type(found.get(name)) in (int, float)
    }
    return kept | ({} if top_k is None else {"general.sampling.top_k": np.int32(top_k)})


def _short(value: float) -> float:
    """The shortest number that float32 rounds to this one: 0.6 for what a file has as 0.60000002."""
    return float(str(np.float32(value)))
