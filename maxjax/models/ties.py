"""Decides whether a model's head is tied to its embedding table.

If the configuration ties them, the file may still hold both: as a copy (Qwen 3, and every tied model
that ``torch.save`` wrote), or because the head was trained separately. They are tied if their values
are equal, as in transformers 5.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..agreement import as_first
from ..errors import UnsupportedModelError, UserInputError
from ..graph.weights import WeightData
from ..graph.weights.same import same_kind, same_values
from .multimodal import text_settings

if TYPE_CHECKING:
    from .family import Family

_LOG = logging.getLogger("maxjax")


def is_tied(
    family: Family,
    found: Mapping[str, WeightData],
    configured: bool,
    *,
    tie: bool | None = None,
    path: str | os.PathLike[str] | None = None,
) -> bool:
    """Whether the head of a checkpoint's model is its embedding table.

    Values are read only if the configuration ties the two and the file holds both, with the same
    dtype and shape; with several processes, the first one reads them. A head that differs is logged
    as a warning.

    Args:
        family: family of the model.
        found: the checkpoint's tensors by the names of the model's weights.
        configured: whether the configuration ties the two.
        tie: the caller's choice, which overrides everything else; None: no choice.
        path: path of the checkpoint, for messages.

    Raises:
        UserInputError: ``tie`` is neither None nor a bool.
        CheckpointError: a file cannot be read.
    """
    if tie is not None:
        if not isinstance(tie, bool):
            raise UserInputError(f"tie must be True, False or None, not {tie!r}")
        return tie
    head, table = (found.get(name) for name in family.tied)
    if not configured or head is None or table is None:
        return configured
    if same_kind(head, table):
        question = _question(head, table, path)
        if as_first(question, lambda: str(same_values(head, table))) == str(True):
            return True
        why = "has other values"
    else:
        why = f"is {head!r}, not {table!r}"
    where = f"{os.fspath(path)}: " if path is not None else ""
    _LOG.warning(
        "%sthe configuration says that '%s' is '%s', but it %s: the two are not tied. "
        "Write tie_word_embeddings: false into config.json, or pass tie=False; tie=True ignores "
        "the head in the file", where, *family.tied, why,
    )  # fmt: skip
    return False


def says_tied(family: Family | None, config: Mapping[str, Any]) -> bool:
    """Whether a configuration ties the head; if it does not say, whether the family does by default.

    Example:
        >>> said = {"model_type": "llava", "text_config": {"tie_word_embeddings": True}}
        >>> says_tied(None, {}), says_tied(None, said)
        (False, True)
    """
    key = "tie_word_embeddings"
    try:
        text = text_settings(config)
    except (ValueError, UnsupportedModelError):
        text = config
    inner = text.get("text_config")  # of a multimodal model that maxjax does not have
    for part in (text, inner if isinstance(inner, Mapping) else {}):
        if part.get(key) is not None:
            return part[key] is True
    return family is not None and getattr(family.config, key, False) is True


def with_tie(config: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    """A copy of a configuration with ``tie_word_embeddings`` set, also in its ``text_config``.

    Example:
        >>> with_tie({"text_config": {"tie_word_embeddings": True}}, False)
        {'text_config': {'tie_word_embeddings': False}, 'tie_word_embeddings': False}
    """
    key, found = "tie_word_embeddings", dict(config)
    text = config.get("text_config")
    if isinstance(text, Mapping) and key in text:
        found["text_config"] = {**text, key: tied}
    return {**found, key: tied}


def tied_as(config: Mapping[str, Any], tied: bool | None) -> dict[str, Any]:
    """A copy of a configuration that says whether the model's head is tied; None: as it says."""
    return (
        dict(config) if tied is None or says_tied(None, config) is tied else with_tie(config, tied)
    )


def _question(head: WeightData, table: WeightData, path: Any) -> str:
    """A name for the comparison that is the same in every process that opens the same checkpoint."""
    name = os.path.basename(os.path.normpath(os.fspath(path))) if path is not None else ""
    about = (name, head.name, table.name, str(head.dtype), [int(n) for n in head.shape])
    return f"tied/{hashlib.sha256(repr(about).encode()).hexdigest()[:32]}"
