"""``LanguageModelConfig``: how the dataclass of an architecture is read from a ``config.json``, and written as one.

An architecture declares a frozen dataclass whose fields are the keys of the file::

    @dataclass(frozen=True)
    class LlamaConfig(LanguageModelConfig):
        model_type = "llama"

        vocab_size: int = size()
        hidden_size: int = size()
        num_hidden_layers: int = layers()
        rope_parameters: Rope = Rope(theta=10_000.0)
        ...

What a file's settings imply beyond that is plain Python in ``from_hf``, and ``to_hf`` is its inverse.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import typing
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Self

from ...errors import CheckpointFormatError, UnsupportedModelError, shown
from ...nn.activation import ACTIVATIONS
from ...nn.kv_cache.kinds import Group, KeysValues, Shared, States, groups_of
from ..config import (
    ModelConfig,
    config_field,
    default_labels,
    field_value,
    label_names,
    labels_in,
    labels_of,
    quantization_settings,
    unsupported_in,
)
from ..multimodal import text_settings
from ..unread import ReadTracker, warn_of_unread
from .aliases import Alias, spelling
from .rotary import Rope, object_of, read_rope

# The kinds of layers in "layer_types".
FULL, SLIDING = "full_attention", "sliding_attention"
# The kinds of MLPs in "mlp_layer_types": with experts if sparse.
DENSE, SPARSE = "dense", "sparse"
_MOST_LAYERS = 1000


def size(default: Any = dataclasses.MISSING, minimum: int = 1, **options: Any) -> Any:
    """Declare a field that counts the entries of a tensor's axis: no tensor of the file may be shorter.

    Args:
        default: value if the file does not have the key; without it the key is required.
        minimum: smallest value.
        options: as for :func:`~maxjax.models.config.config_field`.
    """
    return config_field(default, minimum=minimum, bounded_by="axis", **options)


def layers(default: Any = dataclasses.MISSING, **options: Any) -> Any:
    """Declare the field that counts the layers: the names of the file's tensors must have as many.

    Args:
        default, options: as for :func:`size`.
    """
    return config_field(default, minimum=1, maximum=_MOST_LAYERS, bounded_by="layers", **options)


def constant(value: Any) -> Any:
    """Declare a field that is the same in every file of the architecture: it is neither read nor written."""
    return dataclasses.field(default=value, metadata={"constant": True})


def with_defaults(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> ReadTracker:
    """Return the content of a file with values for keys that it does not have; null in the file stays null."""
    return ReadTracker.of(raw).with_defaults(defaults)


def layer_count(raw: Mapping[str, Any], key: str = "num_hidden_layers") -> int:
    """Return the number of layers that a file gives; 0 if it is missing or out of range, which is reported later."""
    count = raw.get(key)
    return count if type(count) is int and 0 < count <= _MOST_LAYERS else 0


def layer_kinds(raw: Mapping[str, Any], default: Sequence[str] | None = None) -> Any:
    """Return the list ``layer_types`` of a file, or the default for a file without it.

    Raises:
        ValueError: it is not a list of strings.
    """
    kinds = raw.get("layer_types")
    if kinds is None:
        return default
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise ValueError("'layer_types' is not a list of strings")
    return kinds


def every_nth_is_0(layers: int, n: int) -> tuple[int, ...]:
    """Return for each layer 1, and 0 for the n-th, the 2n-th and so on: ``no_rope_layers``."""
    return tuple(int((i + 1) % n != 0) for i in range(layers))


def full_every(n: int, count: int, other: str = SLIDING) -> tuple[str, ...]:
    """Return the kinds of ``count`` layers of which every n-th has full attention, and the others are ``other``.

    Example:
        >>> full_every(2, 3)
        ('sliding_attention', 'full_attention', 'sliding_attention')
    """
    return tuple(other if (i + 1) % n else FULL for i in range(count))


def positive_integer(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive integer of a file; ``default`` if the file has null or does not have the key.

    Example:
        >>> positive_integer({"expand": None}, "expand", 2)
        2
        >>> positive_integer({"expand": "2"}, "expand")
        Traceback (most recent call last):
        ...
        ValueError: 'expand' is '2', not a positive integer
    """
    value = default if raw.get(key) is None else raw.get(key)
    if type(value) is not int or value < 1:
        raise ValueError(f"'{key}' is {shown(value)}, not a positive integer")
    return value


def dense_then_sparse(raw: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the kind of each layer's MLP: dense in the first ``first_k_dense_replace`` layers, then with experts.

    It is None if the file has ``mlp_layer_types``, or no number of dense layers.
    """
    dense = raw.get("first_k_dense_replace")
    if raw.get("mlp_layer_types") is not None or dense is None:
        return None
    if type(dense) is not int or dense < 0:
        raise ValueError(f"'first_k_dense_replace' is {shown(dense)}, not a number of layers")
    return tuple(DENSE if i < dense else SPARSE for i in range(layer_count(raw)))


def rope_layers(raw: Mapping[str, Any], interval: int = 4) -> tuple[int, ...]:
    """Return for each layer whether it has RoPE (1) or not (0): as ``no_rope_layers`` lists, or all but every n-th.

    Args:
        raw: content of a file.
        interval: n, if the file has no ``no_rope_layer_interval``.

    Raises:
        ValueError: a value is of the wrong type.
    """
    raw.get("no_rope_layer_interval")  # read in any case, so that no warning names it
    listed, count = raw.get("no_rope_layers"), layer_count(raw)
    if listed is not None and listed != []:
        if not isinstance(listed, list) or not all(type(one) in (int, bool) for one in listed):
            raise ValueError("'no_rope_layers' is not a list of numbers")
        return tuple(int(bool(one)) for one in listed[:count])
    return every_nth_is_0(count, positive_integer(raw, "no_rope_layer_interval", interval))


def refuse(raw: Mapping[str, Any], supported: Mapping[str, Any], what: str) -> None:
    """Raise UnsupportedModelError for a setting that changes results and whose value is not supported.

    Args:
        raw: content of ``config.json``.
        supported: key → the only supported value, or a tuple of such values. null counts as absent.
        what: name of the model, for the message.

    Example:
        >>> refuse({"prenorm": True}, {"prenorm": False}, "Nomic")
        Traceback (most recent call last):
        ...
        maxjax.errors.UnsupportedModelError: Nomic with 'prenorm' True: only False is supported
    """
    for key, value in supported.items():
        allowed = value if isinstance(value, tuple) else (value,)
        if raw.get(key) is not None and raw[key] not in allowed:
            known = " or ".join(map(repr, allowed))
            raise UnsupportedModelError(
                f"{what} with '{key}' {shown(raw[key])}: only {known} is supported"
            )


def check_not_empty(raw: Mapping[str, Any], key: str) -> None:
    """Raise ValueError for an empty list of values for the layers, which is no way to leave the key out.

    Example:
        >>> check_not_empty({"no_rope_layers": []}, "no_rope_layers")
        Traceback (most recent call last):
        ...
        ValueError: 'no_rope_layers' must have an entry for each layer, and is an empty list
    """
    if raw.get(key) == []:
        raise ValueError(f"'{key}' must have an entry for each layer, and is an empty list")


class ArchitectureConfig(ModelConfig):
    """Base class of the configurations of decoders and encoders: it reads and writes the fields of a ``config.json``.

    It declares no fields; its methods use those that there are. An architecture whose files have other keys for
    these declares an alias of each: ``hidden_size = alias("n_embd")``.
    """

    # Keys that the architecture's files may have and that transformers does not use either.
    unused: ClassVar[Sequence[str]] = ()

    def __post_init__(self) -> None:
        self._fill_in()
        self._check()

    def _fill_in(self) -> None:
        """Replace None by what follows from other fields."""

    def _check(self) -> None:
        """Raise ValueError if fields contradict each other."""
        self._check_activation()
        self._check_layer_types()
        self._check_layer_numbers()
        self._check_ropes()

    def _check_activation(self) -> None:
        """Raise ValueError if an activation function is not known."""
        names = ("hidden_act", "hidden_activation", "activation_function", "activation", "mlp_hidden_act",
                 "mamba_hidden_act", "pooler_hidden_act", "classifier_activation")  # fmt: skip
        for name in names:
            act = getattr(self, name, None)
            if act is not None and act not in ACTIVATIONS:
                known = ", ".join(ACTIVATIONS)
                raise ValueError(
                    f"'{self.key_of(name)}' is {shown(act)}: it must be one of {known}"
                )

    def _check_layer_types(self) -> None:
        """Raise ValueError if a list of the kinds of layers does not have one entry for each."""
        for name in ("layer_types", "mlp_layer_types"):
            kinds, count = getattr(self, name, None), getattr(self, "num_hidden_layers", 0)
            if kinds is not None and len(kinds) != count:
                raise ValueError(f"'{name}' has {len(kinds)} entries for {count} layers")

    def _check_layer_numbers(self) -> None:
        """Raise ValueError if a list of layers has a number that no layer has."""
        for name in ("mlp_only_layers", "moe_layers"):
            count = getattr(self, "num_hidden_layers", 0)
            wrong = [i for i in getattr(self, name, None) or () if not 0 <= i < count]
            if wrong:
                raise ValueError(
                    f"'{name}' has the layer {shown(wrong[0])}: there are {count}, counted from 0"
                )

    def _check_ropes(self) -> None:
        """Raise ValueError if heads cannot be rotated so."""
        for name, rope in _ropes_of(self).items():
            rope.check(self.rope_width_of(name))

    def _set(self, name: str, value: Any) -> None:
        """Set a field, while the instance is made."""
        object.__setattr__(self, spelling(self, name), value)

    @property
    def rope_width(self) -> int:
        """The width of the heads that RoPE rotates; where layers differ, in layers with full attention."""
        return self.head_dim  # type: ignore[attr-defined]

    def rope_width_of(self, name: str) -> int:
        """Return the width of the heads that the Rope of a field rotates."""
        return self.rope_width

    # --- config.json

    @classmethod
    def key_of(cls, name: str) -> str:
        """:meth:`ModelConfig.key_of`, also for the alias of a field."""
        found = getattr(cls, name, None)
        return super().key_of(found.name if isinstance(found, Alias) else name)

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], *, path: str | os.PathLike[str] | None = None
    ) -> Self:
        """Read the content of a ``config.json``; for a multimodal model, the settings of its text model.

        A key that changes results in some models and that this one does not read is logged.

        Args:
            raw: content of the file.
            path: path of the file, for messages.

        Raises:
            CheckpointFormatError: a key is missing, of the wrong type or out of range, or values
                contradict each other; the message names the key.
            UnsupportedModelError: a setting changes results and is not supported; the message
                names it.
        """
        try:
            raw = text_settings(raw)
            _refuse_quantized(raw)
            tracker = ReadTracker(raw, path)
            found = cls.from_hf(tracker)
            name = cls.model_type or cls.__name__
            _refuse_unread(name, raw, {*cls.unused, *tracker.keys_seen})
        except UnsupportedModelError as error:
            raise unsupported_in(path, error) from None
        except (ValueError, OverflowError) as error:
            if isinstance(error, CheckpointFormatError):
                raise
            raise CheckpointFormatError(str(error), path=path) from None
        warn_of_unread(name, raw, {*cls.unused, *tracker.keys_seen})
        return found

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read each field from its key; null counts as absent.

        An architecture whose files imply more overrides it, and passes what it computes as ``values``.

        Args:
            raw: content of the file.
            values: values of fields, by name, in place of the file's.

        Raises:
            CheckpointFormatError: a key is missing, of the wrong type or out of range.
            ValueError: values contradict each other.
        """
        raw = ReadTracker.of(raw)
        kinds, fields = typing.get_type_hints(cls), dataclasses.fields(cls)  # type: ignore[arg-type]
        # RoPE's settings refer to the context length, which is therefore read first.
        for field in sorted(fields, key=lambda one: kinds[one.name] is Rope):
            if field.name in values or field.metadata.get("constant"):
                continue
            if kinds[field.name] is Rope:
                default: Rope = field.default  # type: ignore[assignment]
                part = default.part if default.part < 1 else None
                context = values.get("max_position_embeddings", cls.max_position_embeddings)  # type: ignore[attr-defined]
                values[field.name] = read_rope(
                    raw, context, default.theta, part=part, interleaved=default.interleaved
                )
                continue
            if isinstance(field.default, ArchitectureConfig):  # an object of its own
                given = object_of(raw, cls.key_of(field.name))
                values[field.name] = kinds[field.name].from_dict(given, path=raw.path)
                continue
            found = field_value(field, kinds[field.name], raw)
            if found is not dataclasses.MISSING:
                values[field.name] = found
        return cls(**values)

    @classmethod
    def read_field(cls, raw: Mapping[str, Any], name: str) -> Any:
        """Return the value of one field in a file, checked; its default if the file does not have it.

        Raises:
            CheckpointFormatError: the value has the wrong type or is out of range, or a required key is missing.
        """
        field = cls.__dataclass_fields__[name]
        found = field_value(field, typing.get_type_hints(cls)[name], ReadTracker.of(raw))
        return field.default if found is dataclasses.MISSING else found

    def to_hf(self) -> dict[str, Any]:
        """Return the content of a ``config.json`` with these settings, without ``architectures``.

        Of several Ropes only ``rope_parameters`` is written; the architecture writes the others.
        """
        found: dict[str, Any] = {"model_type": self.model_type}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.metadata.get("constant") or (field.name == "is_causal" and value):
                continue
            if isinstance(value, Rope):
                found |= value.to_hf(field.default) if field.name == "rope_parameters" else {}
            elif isinstance(value, ArchitectureConfig):
                found[self.key_of(field.name)] = value.to_hf()
            # null counts as absent, so None is written only where it differs from the default.
            elif value is not None or field.default is not None:
                key = field.metadata.get("key") or field.name
                found[key] = list(value) if isinstance(value, tuple) else value
        return found


@dataclasses.dataclass(frozen=True)
class LabelledConfig(ArchitectureConfig):
    """Base class of the configurations of encoders, of texts or images, whose head may have labels.

    Attributes:
        num_labels: number of labels of the head.
        labels: their names; () for labels without names, which are LABEL_0, LABEL_1 and so on.
        problem_type: "regression", "single_label_classification" or "multi_label_classification".
    """

    # No call reads them: the head's weights have the number of labels.
    _mx_unread: ClassVar[frozenset[str]] = frozenset({"num_labels", "labels", "problem_type"})

    num_labels: int = dataclasses.field(default=2, kw_only=True, metadata={"constant": True})
    labels: tuple[str, ...] = dataclasses.field(
        default=(), kw_only=True, metadata={"constant": True}
    )
    problem_type: str | None = dataclasses.field(default=None, kw_only=True)

    def _fill_in(self) -> None:
        """Replace None by what follows from other fields."""
        super()._fill_in()
        if self.labels:
            self._set("num_labels", len(self.labels))
        if self.labels == default_labels(len(self.labels)):
            self._set("labels", ())

    def _check(self) -> None:
        """Raise ValueError if fields contradict each other."""
        size, heads = getattr(self, "hidden_size", 0), getattr(self, "num_attention_heads", 1)
        if size % heads:
            raise ValueError(
                f"'{self.key_of('hidden_size')}' {size} is not a multiple of "
                f"'{self.key_of('num_attention_heads')}' {heads}"
            )
        super()._check()

    @property
    def head_dim(self) -> int:
        """D, the width of a head."""
        return self.hidden_size // self.num_attention_heads  # type: ignore[attr-defined]

    @property
    def id2label(self) -> dict[int, str]:
        """The names of the labels, by number."""
        return dict(enumerate(self.labels or default_labels(self.num_labels)))

    @property
    def label2id(self) -> dict[str, int]:
        """The numbers of the labels, by name."""
        return {name: number for number, name in self.id2label.items()}

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, with the labels of its head."""
        return super().from_hf(
            raw, **{"num_labels": labels_of(raw), "labels": labels_in(raw), **values}
        )

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with the names of labels."""
        return {**super().to_hf(), **label_names([*self.id2label.values()])}


class LanguageModelConfig(ArchitectureConfig):
    """Base class of the configurations of decoders."""

    special = MappingProxyType(dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")))
    in_multimodal = True
    # Fields that no call reads: models from checkpoints that differ in them are one kind of tree.
    _mx_unread: ClassVar[frozenset[str]] = frozenset(
        {"max_position_embeddings", "tie_word_embeddings"}
    )

    def _fill_in(self) -> None:
        """Replace None by what follows from other fields."""
        size, heads = getattr(self, "hidden_size", 0), getattr(self, "num_attention_heads", 1)
        if "head_dim" in self.__dataclass_fields__ and self.head_dim is None:  # type: ignore[attr-defined]
            if size % heads:
                raise ValueError(
                    f"'{self.key_of('hidden_size')}' {size} is not a multiple of "
                    f"'{self.key_of('num_attention_heads')}' {heads}"
                )
            self._set("head_dim", size // heads)
        if getattr(self, "num_key_value_heads", 0) is None:
            self._set("num_key_value_heads", heads)
        if getattr(self, "intermediate_size", 0) is None:
            self._set("intermediate_size", 4 * size)
        if getattr(self, "layer_types", None) == ():
            kind = FULL if getattr(self, "sliding_window", None) is None else SLIDING
            self._set("layer_types", (kind,) * self.num_hidden_layers)  # type: ignore[attr-defined]

    def _check(self) -> None:
        """Raise ValueError if fields contradict each other."""
        heads = getattr(self, "num_attention_heads", 1)
        kv_heads = getattr(self, "num_key_value_heads", 1)
        if heads % kv_heads:
            raise ValueError(
                f"'num_attention_heads' {heads} is not a multiple of 'num_key_value_heads' {kv_heads}"
            )
        super()._check()
        self._check_experts()

    def _check_layer_types(self) -> None:
        """Raise ValueError if ``layer_types`` does not fit the number of layers or lacks the size of the window."""
        super()._check_layer_types()
        kinds = getattr(self, "layer_types", None)
        if SLIDING in (kinds or ()) and getattr(self, "sliding_window", None) is None:
            raise ValueError("layers have a sliding window, but 'sliding_window' is missing")

    def _check_experts(self) -> None:
        """Raise ValueError if a token chooses more experts than a layer has."""
        name = self._experts_name
        if name is None or not any(map(self.is_sparse, range(self.num_hidden_layers))):  # type: ignore[attr-defined]
            return
        count, chosen = getattr(self, name), self.num_experts_per_tok  # type: ignore[attr-defined]
        if chosen > count:
            raise ValueError(
                f"'num_experts_per_tok' {chosen} is more than '{self.key_of(name)}' {count}"
            )

    # --- what the cache and the engine need

    @property
    def ropes_by_length(self) -> list[Rope]:
        """The Ropes whose frequencies depend on the length of the text (LongRoPE, dynamic NTK)."""
        return [rope for rope in _ropes_of(self).values() if rope.depends_on_length]

    @property
    def has_axes(self) -> bool:
        """Whether RoPE turns some pairs by the row and the column of a token, which differ in pictures."""
        return any(rope.sections for rope in _ropes_of(self).values())

    def window(self, layer: int) -> int | None:
        """The number of tokens that a token attends to in a layer, itself included; None: all before it."""
        kinds = getattr(self, "layer_types", None)
        window = getattr(self, "sliding_window", None)
        return window if kinds is None or kinds[layer] == SLIDING else None

    @property
    def _experts_name(self) -> str | None:
        """The name of the attribute that counts the experts; None: there is none."""
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        return next((name for name in names if hasattr(self, name)), None)

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts in place of its MLP: by ``mlp_layer_types``, or each if there are experts."""
        kinds = getattr(self, "mlp_layer_types", None)
        return self._experts_name is not None if kinds is None else kinds[layer] == SPARSE

    def states(self, layer: int) -> Mapping[str, KeysValues | States | Shared]:
        """What the cache holds for a layer, by the name of the layer's group in the cache."""
        window, heads = self.window(layer), self.num_attention_heads  # type: ignore[attr-defined]
        kept = KeysValues(self.num_key_value_heads, self.head_dim, window, heads)  # type: ignore[attr-defined]
        return {"full" if window is None else "sliding": kept}


class StepwiseExpertsConfig(LanguageModelConfig):
    """Base class of settings: each ``decoder_sparse_step``-th layer has experts, but none of ``mlp_only_layers``."""

    num_experts: int
    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...]

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts in place of its MLP."""
        is_step = (layer + 1) % self.decoder_sparse_step == 0
        return is_step and self.num_experts > 0 and layer not in self.mlp_only_layers

    @classmethod
    def bounded_sizes(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings to compare with the tensors: the size of MLPs only if a layer may have one."""
        raw = super().bounded_sizes(raw)
        steps, listed = raw.get("decoder_sparse_step"), raw.get("mlp_only_layers")
        if steps in (None, 1) and not listed and raw.get("num_experts") != 0:
            return {key: raw[key] for key in raw if key != "intermediate_size"}
        return raw


def _refuse_quantized(raw: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for a file with settings of quantised weights, which only a load applies."""
    method = quantization_settings(raw)
    if method is None:
        return
    method = method.get("quant_method") if isinstance(method, Mapping) else None
    raise UnsupportedModelError(
        f"'quantization_config' (quant_method {shown(method)}): weights that are quantised so cannot be "
        "written as GGUF, calibrated, or quantised again"
    )


def _refuse_unread(name: str, raw: Mapping[str, Any], keys_seen: Collection[str]) -> None:
    """Raise UnsupportedModelError for settings that change the results of every model and that were not read."""
    if raw.get("per_layer_config") and "per_layer_config" not in keys_seen:
        raise UnsupportedModelError(
            f"'per_layer_config', settings of single layers, is not supported for {name}"
        )
    if raw.get("is_causal") is False and "is_causal" not in keys_seen:
        raise UnsupportedModelError(f"'is_causal' false is not supported for {name}")


def _ropes_of(config: Any) -> dict[str, Rope]:
    """Return the Ropes of a configuration by the names of their fields."""
    found = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: one for name, one in found.items() if isinstance(one, Rope)}


@functools.lru_cache(maxsize=128)
def groups_of_config(config: Any) -> dict[str, Group]:
    """Return the groups of layers with the same kind of state in the cache, by name."""
    return groups_of([config.states(i) for i in range(config.num_hidden_layers)])


@functools.lru_cache(maxsize=128)
def shares(config: Any) -> bool:
    """Return whether a layer reads the keys and values of another layer."""
    kept = (config.states(i).values() for i in range(config.num_hidden_layers))
    return any(isinstance(kind, Shared) for kinds in kept for kind in kinds)
