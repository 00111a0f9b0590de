"""The names of tensors in files, and those of a model's weights: tables of rows, read in both directions.

A model's attributes are spelled as in its files, so most tables have few rows: other models put a prefix before
every name, old files use other names, some tensors are not needed, and some hold several weights. ``Names`` is
a table; :class:`Prefix`, :class:`Headless`, :class:`Body`, :class:`Unwrap`, :class:`Rename`, :class:`SharedBias`,
:class:`Drop`, :class:`DropLayers` and ``fused_experts.FusedExperts`` are its rows.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self, TypeVar

from ..errors import CheckpointFormatError

T = TypeVar("T")


@dataclass(frozen=True)
class NameRow:
    """One row of a table of names. This one changes nothing."""

    def model_name(self, name: str) -> str | None:
        """The model's name for a name in a file; None: the tensor is dropped."""
        return name

    def file_names(self, name: str) -> list[str]:
        """The names that a file may have for a model's name; the first is written."""
        return [name]

    def split(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """The tensors of a file, by its names, with one for each weight; nothing is read."""
        return tensors

    def fuse(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inverse of :meth:`split`, for saving."""
        return tensors

    def fused_names(self, name: str) -> list[str]:
        """The names of the tensors in which :meth:`fuse` puts a weight, by its name in the model."""
        return [name]

    def as_in(self, tensors: Mapping[str, Any]) -> Self:
        """This row as a file with these tensors has it, to write a file of the same form."""
        return self

    def of_modules(self) -> Self:
        """This row for the names of the modules of transformers' models, which differ from those of its files."""
        return self

    def unloaded(self, names: Collection[str]) -> list[str]:
        """Those names of a file's tensors that are dropped together, and belong to a saved model nevertheless."""
        return []


@dataclass(frozen=True)
class Prefix(NameRow):
    """Replaces the first of these prefixes that a name in a file begins with.

    Attributes:
        prefixes: prefix in files → prefix in the model.
        written: whether names are written with these prefixes.
        in_modules: whether transformers' modules have these prefixes.

    Example:
        >>> row = Prefix({"language_model.model.": "model."})
        >>> row.model_name("language_model.model.norm.weight"), row.file_names("model.norm.weight")
        ('model.norm.weight', ['model.norm.weight', 'language_model.model.norm.weight'])
    """

    prefixes: Mapping[str, str]
    written: bool = False
    in_modules: bool = False

    def model_name(self, name: str) -> str | None:
        """See :class:`NameRow`."""
        for old, new in self.prefixes.items():
            if name.startswith(old):
                return new + name[len(old) :]
        return name

    def file_names(self, name: str) -> list[str]:
        """See :class:`NameRow`."""
        pairs = self.prefixes.items()
        old = [old + name[len(new) :] for old, new in pairs if name.startswith(new)]
        return [*old, name] if self.written else [name, *old]

    def of_modules(self) -> Self:
        """See :class:`NameRow`."""
        return replace(self, written=self.in_modules)


@dataclass(frozen=True)
class Headless(NameRow):
    """A prefix that files of the model without its head leave out, as transformers' class for it has no such part.

    Attributes:
        prefix: the prefix.
        starts: how names begin that lack it.
        written: whether names are written without it.

    Example:
        >>> Headless("model.", ("layers.", "norm.")).model_name("norm.weight")
        'model.norm.weight'
    """

    prefix: str
    starts: tuple[str, ...]
    written: bool = False

    def model_name(self, name: str) -> str | None:
        """See :class:`NameRow`."""
        return self.prefix + name if name.startswith(self.starts) else name

    def file_names(self, name: str) -> list[str]:
        """See :class:`NameRow`."""
        return [name.removeprefix(self.prefix)] if self.written else [name]


@dataclass(frozen=True, init=False)
class Body(NameRow):
    """The prefix of the names of a model's body in files of the model with a head; files of the body alone lack it.

    Args:
        prefixes: the prefix; others are read as well, but not written.

    Attributes:
        head: patterns of the names of the head's tensors, which have no prefix; none for the body alone.
        is_written: whether files are written with the prefix.

    Example:
        >>> row = Body("bert.").with_head("classifier.*")
        >>> row.model_name("bert.norm.weight"), row.file_names("norm.weight"), row.file_names("classifier.bias")
        ('norm.weight', ['bert.norm.weight', 'norm.weight'], ['classifier.bias'])
    """

    prefixes: tuple[str, ...]
    head: tuple[str, ...]
    is_written: bool

    def __init__(self, *prefixes: str, head: tuple[str, ...] = (), is_written: bool = False):
        for field, value in (("prefixes", prefixes), ("head", head), ("is_written", is_written)):
            object.__setattr__(self, field, value)

    def model_name(self, name: str) -> str | None:
        """See :class:`NameRow`."""
        for prefix in self.prefixes:
            if name.startswith(prefix):
                return name[len(prefix) :]
        return name

    def file_names(self, name: str) -> list[str]:
        """See :class:`NameRow`."""
        if matcher(self.head).fullmatch(name):
            return [name]
        found = [prefix + name for prefix in self.prefixes]
        return [*found, name] if self.is_written else [name, *found]

    def as_in(self, tensors: Mapping[str, Any]) -> Self:
        """See :class:`NameRow`."""
        used = [one for one in self.prefixes if any(name.startswith(one) for name in tensors)]
        prefixes = (*used, *(one for one in self.prefixes if one not in used))
        return type(self)(*prefixes, head=self.head, is_written=bool(used))

    def with_head(self, *patterns: str) -> Self:
        """This row for files of a model with a head, whose tensors' names match these patterns."""
        return type(self)(*self.prefixes, head=patterns, is_written=True)

    def alone(self) -> Self:
        """This row for files of the body alone."""
        return type(self)(*self.prefixes)


@dataclass(frozen=True)
class SharedBias(NameRow):
    """A bias of a layer that files have under another name, under the layer's, or under both.

    Where a file has both, the layer's is read, as in transformers. Files are written with the other name; and with
    both if the layer has a weight of its own in the file, as transformers then does not take the two for one.

    Attributes:
        layer: name of the layer.
        other: the other name of its bias.
        written: the names that are written; None: as above.

    Example:
        >>> names = Names(SharedBias("decoder", "bias"))
        >>> names.read({"decoder.bias": 1, "bias": 2}), names.read({"bias": 2}), names.write({"decoder.bias": 1})
        ({'decoder.bias': 1}, {'decoder.bias': 2}, {'bias': 1})
    """

    layer: str
    other: str
    written: tuple[str, ...] | None = None

    def model_name(self, name: str) -> str | None:
        """See :class:`NameRow`."""
        return f"{self.layer}.bias" if name == self.other else name

    def file_names(self, name: str) -> list[str]:
        """See :class:`NameRow`."""
        return [name, self.other] if name == f"{self.layer}.bias" else [name]

    def split(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """See :class:`NameRow`."""
        if f"{self.layer}.bias" not in tensors:
            return tensors
        return {name: one for name, one in tensors.items() if name != self.other}

    def fuse(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """See :class:`NameRow`."""
        bias = f"{self.layer}.bias"
        if bias not in tensors:
            return tensors
        is_free = f"{self.layer}.weight" in tensors
        written = (self.other, bias) if is_free else (self.other,)
        rest = {name: one for name, one in tensors.items() if name != bias}
        return rest | dict.fromkeys(self.written or written, tensors[bias])

    def as_in(self, tensors: Mapping[str, Any]) -> Self:
        """See :class:`NameRow`."""
        both = self.other, f"{self.layer}.bias"
        found = tuple(name for name in both if name in tensors)
        usual = both if f"{self.layer}.weight" in tensors else both[:1]
        return self if found in ((), usual) else replace(self, written=found)


@dataclass(frozen=True)
class Copy(NameRow):
    """A tensor that a file has as a copy of another: it is written as well, with the other's values.

    Attributes:
        name: name of the copy in files.
        original: the model's name of the other.

    Example:
        >>> Names(Copy("lm_head.weight", "embed.weight")).write({"embed.weight": 1})
        {'embed.weight': 1, 'lm_head.weight': 1}
    """

    name: str
    original: str

    def fuse(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """See :class:`NameRow`."""
        return {**tensors, self.name: tensors[self.original]}


@dataclass(frozen=True)
class Rename(NameRow):
    """Replaces the first of these endings that a name in a file ends with, unless it has the new one already.

    Attributes:
        endings: ending in files → ending in the model.
        written: whether files are written with these endings; if not, only old files have them, or only modules.
        in_modules: whether transformers' modules have these endings; None: as files that are written.

    Example:
        >>> Rename({"LayerNorm.gamma": "LayerNorm.weight"}).model_name("embeddings.LayerNorm.gamma")
        'embeddings.LayerNorm.weight'
    """

    endings: Mapping[str, str]
    written: bool = False
    in_modules: bool | None = None

    @classmethod
    def of_layers(cls, layers: Mapping[str, str], **settings: bool) -> Self:
        """A row for the weights and biases of layers whose names have these endings."""
        kinds = ("weight", "bias")
        return cls(
            {f"{old}.{k}": f"{new}.{k}" for old, new in layers.items() for k in kinds}, **settings
        )

    def model_name(self, name: str) -> str | None:
        """See :class:`NameRow`."""
        for old, new in self.endings.items():
            is_renamed = len(new) > len(old) and name.endswith(new)
            if name.endswith(old) and not is_renamed:
                return name[: -len(old)] + new
        return name

    def file_names(self, name: str) -> list[str]:
        """See :class:`NameRow`."""
        pairs = self.endings.items()
        old = [name[: -len(new)] + old for old, new in pairs if name.endswith(new)]
        return [*old, name] if self.written else [name, *old]

    def of_modules(self) -> Self:
        """See :class:`NameRow`."""
        return self if self.in_modules is None else replace(self, written=self.in_modules)


@dataclass(frozen=True, init=False)
class Unwrap(NameRow):
    """Removes parts of names that wrappers of a model or its layers add.

    Args:
        parts: these parts, anywhere in a name.

    Example:
        >>> Unwrap("base_layer").model_name("score.base_layer.weight")
        'score.weight'
    """

    parts: tuple[str, ...]

    def __init__(self, *parts: str):
        object.__setattr__(self, "parts", parts)

    def model_name(self, name: str) -> str:
        """See :class:`NameRow`."""
        *parts, last = name.split(".")
        return ".".join([*(part for part in parts if part not in self.parts), last])


@dataclass(frozen=True, init=False)
class Drop(NameRow):
    """Drops tensors whose names match a pattern, in which ``*`` is any text.

    Args:
        patterns: patterns of names.
        kept: whether a saved model has these tensors again, as they belong to parts that maxjax does not have.
        head: whether they are heads on top of the model, of which a warning tells; they are ``kept`` too.

    Example:
        >>> Drop("*.attn.bias").model_name("h.0.attn.bias") is None
        True
    """

    patterns: tuple[str, ...]
    kept: bool
    head: bool

    def __init__(self, *patterns: str, kept: bool = False, head: bool = False):
        for field, value in (("patterns", patterns), ("kept", kept or head), ("head", head)):
            object.__setattr__(self, field, value)

    def model_name(self, name: str) -> str | None:
        """See :class:`NameRow`."""
        return None if matcher(self.patterns).fullmatch(name) else name

    def without(self, *patterns: str) -> Drop:
        """This row without some of its patterns."""
        left = (one for one in self.patterns if one not in patterns)
        return Drop(*left, kept=self.kept, head=self.head)


@dataclass(frozen=True, init=False)
class DropLayers(NameRow):
    """Drops layers that have one of these parts, such as layers of multi-token prediction; a saved model has them.

    Args:
        parts: names of the parts in a layer.
        but: number of a layer that is not dropped.

    Example:
        >>> list(DropLayers("enorm").split({"layers.0.norm.w": 1, "layers.1.norm.w": 1, "layers.1.enorm.w": 1}))
        ['layers.0.norm.w']
    """

    parts: tuple[str, ...]
    but: int | None

    def __init__(self, *parts: str, but: int | None = None):
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "but", but)

    def _layers(self, names: Iterable[str]) -> tuple[str, ...]:
        """The beginnings of the names of these layers."""
        pattern = re.compile(rf"(.*\blayers\.\d+\.)(?:{'|'.join(map(re.escape, self.parts))})\..*")
        found = {match[1] for match in map(pattern.fullmatch, names) if match is not None}
        return tuple(one for one in found if not one.endswith(f".{self.but}."))

    def model_name(self, name: str) -> str | None:
        """See :class:`NameRow`; in a checkpoint with the names of a model that has such a layer it is ``mtp``."""
        return None if self.but is None and name.startswith("mtp.") else name

    def split(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """See :class:`NameRow`."""
        layers = self._layers(tensors)
        return {name: one for name, one in tensors.items() if not name.startswith(layers)}

    def unloaded(self, names: Collection[str]) -> list[str]:
        """See :class:`NameRow`."""
        layers = self._layers(names)
        return [name for name in names if name.startswith(layers)]


# How the names of a tower begin in older files.
_TOWER = "vision_tower.vision_model."


@dataclass(frozen=True)
class VisionRow(NameRow):
    """The tensors of the vision part of a vision-language model, which the model holds as ``vision``.

    Attributes:
        parts: how their names begin in files, after "model." or not.

    Example:
        >>> row = VisionRow(("visual",))
        >>> row.model_name("model.visual.norm.weight"), row.file_names("vision.visual.norm.weight")[0]
        ('vision.visual.norm.weight', 'model.visual.norm.weight')
    """

    parts: tuple[str, ...]

    def model_name(self, name: str) -> str | None:
        """See :class:`NameRow`."""
        rest = name.removeprefix("model.")
        if rest.partition(".")[0] not in self.parts:
            return name
        return "vision." + rest.replace(_TOWER, "vision_tower.", 1)

    def file_names(self, name: str) -> list[str]:
        """See :class:`NameRow`."""
        rest = name.removeprefix("vision.")
        if rest == name:
            return [name]
        old = rest.replace("vision_tower.", _TOWER, 1)
        return list(dict.fromkeys([f"model.{rest}", rest, f"model.{old}", old]))


# Scales of a KV cache in FP8, and of what is computed with it: without such a cache they have no effect.
CACHE_SCALES = Drop(
    *(f"*.{one}_scale" for one in ("kv", "k", "v", "q", "prob", "output")), kept=True
)
# The other parts of multimodal models.
VISION_PATTERNS = tuple(
    f"{prefix}{part}.*"
    for prefix in ("", "model.", "thinker.")
    for part in (
        *("vision_tower", "multi_modal_projector", "visual", "vision_model", "audio_tower"),
        *("embed_vision", "embed_audio", "connector", "image_tower", "video_tower", "encoder"),
        *("projector", "aligner", "mm_projector", "perceiver", "qformer", "language_projection"),
        *("vision_encoder", "vision_projection", "visual_embeddings_table", "merger", "vit_merger"),
    )
) + (
    *("image_newline", "model.image_newline", "talker.*", "token2wav.*", "code2wav.*"),
    *("mlp1.*", "query_tokens", "acoustic_tokenizer_encoder.*", "semantic_tokenizer_encoder.*"),
    *("vision_projector.*", "sound_encoder.*", "sound_projection.*"),
    *("model.high_res_vision_*", "model.generation_*", "model.vqmodel.*"),
)
# The vision part in steps of training, by maxjax's own names.
_OWN_VISION = "vision.*"


def text_prefix(front: str) -> Prefix:
    """The row for the text model of a multimodal model, in files of any age.

    Args:
        front: prefix of the text model's base model in files of its own: "model." for most.

    Example:
        >>> row = text_prefix("transformer.")
        >>> row.model_name("model.language_model.h.0.ln_1.bias"), row.model_name("language_model.lm_head.weight")
        ('transformer.h.0.ln_1.bias', 'lm_head.weight')
    """
    return Prefix(
        {
            "model.language_model.": front,
            # As transformers 5.24 saves a Qianfan-OCR.
            "language_model.model.encoder.layers.": f"{front}layers.",
            "language_model.model.": front,
            "language_model.": "",
            "model.text_model.": front,
            "thinker.model.": front,
            "thinker.lm_head.": "lm_head.",
        }
    )


def multimodal_rows(front: str) -> tuple[NameRow, ...]:
    """The rows that the table of every decoder has, so that it may be a part of a multimodal model."""
    return text_prefix(front), Drop(*VISION_PATTERNS, _OWN_VISION, kept=True)


TEXT_PREFIX = text_prefix("model.")
MULTIMODAL = multimodal_rows("model.")
# The weights of a LayerNorm, by the names of old files.
GAMMA_BETA = Rename({"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"})
# Tables of RoPE's frequencies, which old files hold and maxjax computes.
ROPE_TABLES = Drop("*rotary_emb.inv_freq")
# Decoders with the names of Llama's files.
DECODER = (ROPE_TABLES, Headless("model.", ("embed_tokens.", "layers.", "norm.")))
# Layers of multi-token prediction, which follow the model's own layers.
PREDICTION = DropLayers("eh_proj", "enorm", "hnorm", "shared_head")


@dataclass(frozen=True, init=False)
class Names:
    """A table of names, whose rows are applied in order when a file is read, and in reverse when it is written.

    Args:
        rows: the rows.

    Example:
        >>> names = Names(Prefix({"bert.": ""}), Drop("cls.*", head=True), Rename({"gamma": "weight"}))
        >>> names.read({"bert.norm.gamma": 1, "cls.weight": 2})
        {'norm.weight': 1}
        >>> names.unloaded(["bert.norm.gamma", "cls.weight"])
        ['cls.weight']
    """

    rows: tuple[NameRow, ...]

    def __init__(self, *rows: NameRow):
        object.__setattr__(self, "rows", rows)

    def model_name(self, tensor: str) -> str | None:
        """The model's name for a name in a file, or None if the tensor is dropped."""
        name: str | None = tensor
        for row in self.rows:
            if name is not None:
                name = row.model_name(name)
        return name

    def file_names(self, name: str) -> list[str]:
        """The names that files may have for a model's name; the first is the one that is written."""
        found = [name]
        for row in reversed(self.rows):
            found = list(dict.fromkeys(new for one in found for new in row.file_names(one)))
        return found

    def split(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of a file, by its names, with one for each weight; nothing is read.

        Raises:
            CheckpointFormatError: a tensor that holds several weights has another shape, or two tensors hold one.
        """
        for row in self.rows:
            tensors = row.split(tensors)
        return dict(tensors)

    def read(self, tensors: Mapping[str, Any], model_type: str = "") -> dict[str, Any]:
        """The tensors of a file by the model's names, with one for each weight; others are dropped.

        Raises:
            CheckpointFormatError: as for :meth:`split`; or two tensors have the same name in the model.
        """
        found: dict[str, Any] = {}
        origin: dict[str, str] = {}
        for tensor, value in self.split(tensors).items():
            name = self.model_name(tensor)
            if name is None:
                continue
            if name in found:
                what = f" of a {model_type} model" if model_type else ""
                raise CheckpointFormatError(
                    f"'{origin[name]}' and '{tensor}' are both the weight '{name}'{what}"
                )
            found[name], origin[name] = value, tensor
        return found

    def written_name(self, tensor: str) -> str | None:
        """The name that files of today have for a name in any file; None if the tensor is dropped.

        Example:
            >>> Names(*MULTIMODAL).written_name("language_model.model.norm.weight")
            'model.norm.weight'
        """
        name = self.model_name(tensor)
        return None if name is None else self.file_names(name)[0]

    def canonical(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of a file by the names that files of today have, with one for each weight.

        Raises:
            CheckpointFormatError: as for :meth:`read`.
        """
        return {self.file_names(name)[0]: value for name, value in self.read(tensors).items()}

    def tensors_of(self, name: str) -> list[str]:
        """The names of the tensors that :meth:`write` makes of a weight; several weights may share a tensor."""
        found = [name]
        for row in reversed(self.rows):
            found = [new for one in found for new in row.fused_names(one)]
        return [self.file_names(one)[0] for one in found]

    def fuse(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse of :meth:`split`."""
        for row in reversed(self.rows):
            tensors = row.fuse(tensors)
        return dict(tensors)

    def write(
        self, tensors: Mapping[str, Any], names: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """The inverse of :meth:`read`: a model's tensors as files hold them.

        Args:
            tensors: tensors by the model's names.
            names: names in a certain file, by the model's names; others are those of files of today.
        """
        known = {} if names is None else names
        fused = self.fuse(tensors).items()
        return {known.get(name) or self.file_names(name)[0]: value for name, value in fused}

    def as_in(self, tensors: Mapping[str, Any]) -> Names:
        """This table as a file with these tensors has it: :meth:`write` then makes a file of the same form."""
        return Names(*(row.as_in(tensors) for row in self.rows))

    def unloaded(self, names: Iterable[str]) -> list[str]:
        """Those names of a file's tensors that a model does not load and that a saved model has nevertheless."""
        names = list(names)
        found = {name for name in names if (row := self._dropped_by(name)) and row.kept}
        for row in self.rows:
            found.update(row.unloaded(names))
        return [name for name in names if name in found]

    def heads(self, names: Iterable[str]) -> list[str]:
        """Those names of a file's tensors that belong to heads that the model does not have."""
        return [name for name in names if (row := self._dropped_by(name)) and row.head]

    def is_headless(self, names: Iterable[str]) -> bool:
        """Whether a file with these tensors holds only the model without its head: all lack :attr:`headless_prefix`."""
        starts = tuple(s for row in self.rows if isinstance(row, Headless) for s in row.starts)
        kept = [name for name in names if self.model_name(name) is not None]
        return bool(starts and kept) and all(name.startswith(starts) for name in kept)

    @property
    def headless_prefix(self) -> str:
        """The prefix that the names of a file lack if the model has no head."""
        return next((row.prefix for row in self.rows if isinstance(row, Headless)), "")

    def without(self, *patterns: str) -> Names:
        """This table, with some patterns no longer dropped."""
        rows = (row.without(*patterns) if isinstance(row, Drop) else row for row in self.rows)
        return Names(*rows)

    def with_mtp(self, number: int) -> Names:
        """This table for a model with a layer of multi-token prediction, ``mtp``: that of this number in files.

        Its copies of the embedding table and of the head are still dropped.

        Example:
            >>> names = Names(PREDICTION).with_mtp(61)
            >>> names.read({"model.layers.61.enorm.weight": 1, "model.layers.61.embed_tokens.weight": 2})
            {'mtp.enorm.weight': 1}
            >>> names.write({"mtp.enorm.weight": 1})
            {'model.layers.61.enorm.weight': 1}
        """
        front, rows = f"model.layers.{number}.", []
        for row in self.rows:
            rows.append(row)
            if isinstance(row, DropLayers):
                copies = Drop(f"{front}embed_tokens.*", f"{front}shared_head.head.*", kept=True)
                layer = Prefix({front: "mtp."}, written=True, in_modules=True)
                rows[-1:] = DropLayers(*row.parts, but=number), copies, layer
        return Names(*rows)

    def with_vision(self, parts: tuple[str, ...], text: str) -> Names:
        """This table for a model with the vision part of a vision-language model.

        Args:
            parts: how the names of the vision part begin.
            text: how those of the language model begin, in place of "model.".

        Example:
            >>> names = Names(*MULTIMODAL).with_vision(("visual",), "model.language_model.")
            >>> names.read({"visual.norm": 1, "language_model.model.norm": 2})
            {'vision.visual.norm': 1, 'model.norm': 2}
            >>> list(names.write({"vision.visual.norm": 1, "model.norm": 2}))
            ['model.visual.norm', 'model.language_model.norm']
        """
        prefix = Prefix({text: "model."}, written=True, in_modules=True)
        return Names(VisionRow(parts), prefix, *self.without(_OWN_VISION).rows)

    @property
    def body(self) -> Body | None:
        """The row of the prefix of the body's names; None: the model has no such prefix."""
        return next((row for row in self.rows if isinstance(row, Body)), None)

    def with_head(self, *patterns: str) -> Names:
        """This table for models with a head, whose tensors' names match these patterns and are no longer dropped."""
        rows = (row.with_head(*patterns) if isinstance(row, Body) else row for row in self.rows)
        return Names(*rows).without(*patterns)

    def of_body(self) -> Names:
        """This table for files of the model's body alone, whose names have no prefix."""
        return Names(*(row.alone() if isinstance(row, Body) else row for row in self.rows))

    def of_modules(self) -> Names:
        """This table for the names of the modules of transformers' models, as in PEFT's files.

        Example:
            >>> names = Names(Rename({"lm_head.bias": "bias"}, in_modules=True)).of_modules()
            >>> names.tensors_of("bias")
            ['lm_head.bias']
        """
        return Names(*(row.of_modules() for row in self.rows))

    def inside(self, prefixes: Mapping[str, str]) -> Names:
        """This table for the names in a model that this one is a part of: prefix there → prefix here."""
        return Names(Prefix(prefixes, written=True), *self.rows)

    def without_head(self) -> Names:
        """This table to write the model without its head, whose names lack :attr:`headless_prefix`."""
        rows = self.rows
        return Names(
            *(replace(row, written=True) if isinstance(row, Headless) else row for row in rows)
        )

    def _dropped_by(self, tensor: str) -> Drop | None:
        """The row that drops a tensor by its name."""
        name: str | None = tensor
        for row in self.rows:
            after = row.model_name(name)
            if after is None:
                return row if isinstance(row, Drop) else None
            name = after
        return None


@cache
def matcher(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """What matches the names that one of the patterns matches, in which ``*`` is anything."""
    each = (re.escape(pattern).replace(r"\*", ".*") for pattern in patterns)
    return re.compile("|".join(each) or r"(?!)", re.DOTALL)


# What PyTorch's wrappers add to the names of the wrapped model: torch.compile, FSDP and activation
# checkpointing anywhere in a name, DataParallel and averaged models at its start.
_WRAPPERS = Unwrap("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_START = re.compile(r"\A(?:module\.)+")


def unwrapped(named: Mapping[str, T]) -> dict[str, T]:
    """Removes the parts that PyTorch's wrappers of a model or its layers add to tensor names.

    Where Lightning saved a model as its attribute ``model``, one "model." is removed from each name too.
    If two tensors would get the same name, all names stay as they are.

    Example:
        >>> unwrapped({"module._orig_mod.model.norm.weight": 1, "module._orig_mod.lm_head.weight": 2})
        {'model.norm.weight': 1, 'lm_head.weight': 2}
        >>> unwrapped({"model.model.norm.weight": 1, "model.lm_head.weight": 2})
        {'model.norm.weight': 1, 'lm_head.weight': 2}
    """
    names = [_START.sub("", _WRAPPERS.model_name(name)) for name in named]
    fronts = [name.startswith("model.") for name in names]
    if all(fronts) and any(name.startswith("model.model.") for name in names):
        names = [name.removeprefix("model.") for name in names]
    found = dict(zip(names, named.values(), strict=True))
    return found if len(found) == len(named) else dict(named)
