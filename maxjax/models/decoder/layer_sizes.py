"""Reads ``per_layer_config`` of a ``config.json``: sizes of single layers, as transformers writes them (Gemma 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import UnsupportedModelError


def first_sizes(raw: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The renamed sizes of the first layer in ``per_layer_config``; empty if that is missing or invalid.

    Sizes that it does not have are those of all layers.

    Args:
        raw: content of the file.
        names: key in ``per_layer_config`` → the key that the result has.

    Example:
        >>> first_sizes({"per_layer_config": {"5": {"head_dim": 512}}}, {"head_dim": "wide"})
        {'wide': 512}
    """
    try:
        sizes = _first(raw.get("per_layer_config") or {})
    except ValueError:  # sizes_of_full reports it
        return {}
    found = {names[key]: value for key, value in sizes.items() if key in names}
    return _of_all(raw, names) | found


def _of_all(raw: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The sizes of all layers, which hold where ``per_layer_config`` is there and names no others."""
    if raw.get("per_layer_config") is None:
        return {}
    return {name: raw[key] for key, name in names.items() if raw.get(key) is not None}


def _first(given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping) or not all(isinstance(v, Mapping) for v in given.values()):
        raise ValueError("'per_layer_config' is not an object of objects")
    return next(iter(given.values()), {})


def sizes_of_full(
    raw: Mapping[str, Any], slides: Sequence[bool], names: Mapping[str, str]
) -> dict[str, Any]:
    """The sizes of the layers without a sliding window, for each of which ``per_layer_config`` lists the same sizes.

    Args:
        raw, names: as for :func:`first_sizes`.
        slides: whether each layer has a sliding window.

    Raises:
        ValueError: ``per_layer_config`` is not an object of objects.
        UnsupportedModelError: layers with a sliding window are listed, or the listed layers differ.

    Example:
        >>> sizes_of_full({"per_layer_config": {"1": {"head_dim": 512}}}, (True, False), {"head_dim": "wide"})
        {'wide': 512}
    """
    given = raw.get("per_layer_config")
    if not given:
        return _of_all(raw, names)
    sizes = _first(given)
    full = [i for i, near in enumerate(slides) if not near]
    known = not set(sizes) - set(names) and all(one == sizes for one in given.values())
    # transformers fills the numbers up with zeros: "05" beside "11".
    if not known or sorted(int(key) if str(key).isdecimal() else -1 for key in given) != full:
        raise UnsupportedModelError("'per_layer_config' of other layers than those that see all")
    return _of_all(raw, names) | {names[key]: value for key, value in sizes.items()}
