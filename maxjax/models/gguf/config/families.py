"""Reads a ``config.json`` for writing a GGUF file: by its model family, with defaults filled in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....errors import CheckpointFormatError, shown
from ...find import text_of
from ...multimodal import deepstack_layers, rope_sections
from ...registry import gguf_model_types, gguf_of, of_model_type
from ..metadata import MAX_EXPERTS, unsupported
from ..table import GGUF_TABLES, GGUFTable
from .read import DEEPSTACK, SECTIONS
from .rope import rope_divisors

_TANH = "gelu_pytorch_tanh"
# Names of the tanh approximation of GELU.
_TANHS = frozenset({_TANH, "gelu_new", "gelu_fast"})


@dataclass(frozen=True)
class FamilyConfig:
    """A configuration that its model family has read.

    Attributes:
        architecture: GGUF's name of the architecture.
        settings: content of the file, with defaults filled in and one spelling of each setting.
        config: the family's configuration object.
        table: the family's own GGUF table, if it has one; also where the model is written as another
            architecture.
        multimodal: metadata of the text half of a multimodal model.
    """

    architecture: str
    settings: dict[str, Any]
    config: Any
    table: GGUFTable | None = None
    multimodal: Mapping[str, Any] | None = None

    @property
    def rope(self) -> Any:
        """The rotary position embedding of layers with full attention; None: the model has none."""
        return self._first("rope_parameters", "rope")

    @property
    def local_rope(self) -> Any:
        """The rotary position embedding of layers with a sliding window, if they have their own; else None."""
        return self._first("local_rope_parameters", "local_rope")

    @property
    def has_rope(self) -> bool:
        """Whether the model uses RoPE."""
        return self.rope is not None

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return self._first("head_dim", "width")

    @property
    def rotated(self) -> int:
        """The number of rotated features of a head; where layers differ, of a layer with full attention."""
        widths = getattr(self.config, "rope_widths", None)
        width = self._first("rope_width", "head_dim", "width") if widths is None else widths[0]
        return self.rope.rotated(width)

    @property
    def experts(self) -> int:
        """The number of experts in a layer that has experts; 0 if no layer has."""
        count, is_sparse = self.config.num_hidden_layers, getattr(self.config, "is_sparse", None)
        if is_sparse is not None and not any(map(is_sparse, range(count))):
            return 0
        return self._first("num_experts", "num_local_experts", "n_routed_experts") or 0

    @property
    def layer_kinds(self) -> Sequence[Any]:
        """A value for each layer; layers with equal ones have the same tensors."""
        config, count = self.config, self.config.num_hidden_layers
        if hasattr(config, "layer_kinds"):
            return config.layer_kinds
        if hasattr(config, "sparse"):
            return config.sparse
        return [hasattr(config, "is_sparse") and config.is_sparse(i) for i in range(count)]

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.config.num_hidden_layers

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return self.config.num_attention_heads

    @property
    def kv_heads(self) -> int:
        """The number of KV heads."""
        return self._first("num_key_value_heads", "num_attention_heads")

    @property
    def norm_groups(self) -> int:
        """The number of groups of features that Mamba 2 normalises separately."""
        return self._first("n_groups", "mamba_n_groups")

    @property
    def slides(self) -> list[bool]:
        """Whether each layer has a sliding window; empty for an encoder."""
        if not hasattr(self.config, "window"):
            return list(getattr(self.config, "slides", ()))
        count = self.config.num_hidden_layers
        return [self.config.window(i) is not None for i in range(count)]

    def _first(self, *names: str) -> Any:
        """The first of these attributes of the configuration that it has and that is not None."""
        found = (getattr(self.config, name, None) for name in names)
        return next((value for value in found if value is not None), None)

    def divisors(self, path: Any = None) -> dict[str, np.ndarray]:
        """The tensors with divisors of RoPE's frequencies that a GGUF file of the model has, by name."""
        if not self.has_rope:
            return {}
        is_long = self.table is not None and self.table.is_long
        return rope_divisors(self.rope, self.rotated, is_long=is_long, path=path)


def has_architecture(config: Mapping[str, Any]) -> bool:
    """Whether maxjax can write a GGUF file for the model of a ``config.json``.

    Example:
        >>> has_architecture({"model_type": "qwen3"}), has_architecture({"model_type": "opt"})
        (True, False)
    """
    kind = config.get("model_type")
    return isinstance(kind, str) and gguf_of(kind) is not None


def read_config(config: Mapping[str, Any], *, path: Any = None) -> FamilyConfig:
    """Reads a configuration by its model family, and fills in defaults.

    Raises:
        UnsupportedModelError: GGUF or maxjax's tables do not have the architecture, or the family
            does not support a setting.
        CheckpointFormatError: a setting is missing or wrong; the message names it.

    Example:
        >>> model = read_config({"model_type": "gpt2", "vocab_size": 64, "n_layer": 2})
        >>> model.architecture, model.config.num_hidden_layers, model.config.max_position_embeddings
        ('gpt2', 2, 1024)
    """
    whole, config = config, text_of(config, path)
    kind = config.get("model_type")
    if not isinstance(kind, str) or (architecture := gguf_of(kind)) is None:
        known = ", ".join(gguf_model_types())
        what = f"model_type {shown(kind)} in a GGUF file (maxjax supports {known})"
        raise unsupported(what, path)
    family = next(of_model_type(kind)).config
    values = {**family.defaults(), **config}
    for field in dataclasses.fields(family):
        key, others = field.metadata.get("key") or field.name, field.metadata.get("aliases", ())
        said = [config[name] for name in (key, *others) if config.get(name) is not None]
        if others and said:
            values[key] = said[0]
    table = GGUF_TABLES[architecture]
    read: Any = family.from_dict(config, path=path)
    if table is not None and table.instead is not None and (other := table.instead(read)):
        architecture, changed = other
        read = dataclasses.replace(read, **changed)
        values |= changed
    halves = [one.architecture for one in table.variants if one.has_sections] if table else []
    multimodal: dict[str, Any] = {}
    if halves and (sections := rope_sections(whole)):
        architecture = halves[0]
        multimodal[SECTIONS] = [*sections, 0, 0, 0, 0][:4]
        if (deep := deepstack_layers(whole)) is not None:
            multimodal[DEEPSTACK] = deep
    model = FamilyConfig(architecture, values, read, table, multimodal)
    if model.has_rope:
        values["rope_theta"] = model.rope.theta
    if model.experts > MAX_EXPERTS:
        raise CheckpointFormatError(
            "'num_experts' is out of range", path=path,
            expected=f"1 to {MAX_EXPERTS}", found=model.experts,
        )  # fmt: skip
    if (local := model.local_rope) is not None:
        values["rope_local_base_freq"] = local.theta
    if architecture.startswith("gemma"):
        act = model._first("hidden_activation", "hidden_act")
        values["hidden_act"] = values["hidden_activation"] = _TANH if act in _TANHS else act
    return model
