"""``Family`` describes the checkpoints of a model family; ``PretrainedModel`` is the Module that loads them.

A model's attributes are spelled as in its checkpoint, so few names need a change: some tensors are
ignored, some files put a prefix before every name, and old files use other names for some tensors.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax

from ..dtype import DType
from ..errors import CheckpointMismatchError, UserInputError, some
from ..graph.weights import FileWeights, GGUFWeights, WeightData
from ..graph.weights.same import same_content
from ..nn.embedding import Embedding
from ..nn.layer import ExpertStack, Module
from ..nn.linear import ColumnParallelLinear, Linear
from ..nn.stacked_linear import StackedLinear
from .config import ModelConfig
from .names import CACHE_SCALES, Names, matcher, multimodal_rows, unwrapped
from .quantized.tables import dense_tables

if TYPE_CHECKING:
    from .gguf.table import GGUFTable

_LOG = logging.getLogger("maxjax")
# Layers that compute with quantised weights.
_TAKES_BLOCKS = (Linear, ColumnParallelLinear, Embedding, StackedLinear)


def block_weights(model: Module) -> set[int]:
    """The ``id`` of each Weight of a Module that may stay quantised: its layer computes with quantised values."""
    modules: list[Any] = [module for _, module in model.named_modules()]
    takes = [module for module in modules if type(module) in _TAKES_BLOCKS]
    return {id(module.weight) for module in takes if hasattr(module, "weight")}


@dataclass(frozen=True)
class Family:
    """A family of models: its configuration, its Module, and the tensor names of its checkpoints.

    Attributes:
        model_type: ``model_type`` in a ``config.json`` of this family.
        architectures: names that ``architectures`` of a ``config.json`` has for models of the family.
        config: dataclass of its settings.
        make: ``make(config, names, dtype, reduce_dtype)`` → a lazy Module, where ``names``
            are the checkpoint's tensors by the model's names: optional parts are built
            if their tensors are present.
        names: the names of tensors in files and in the model. In all families, scales of a KV cache in FP8
            are dropped, since they have no effect without such a cache. Every decoder may be the text model of a
            multimodal model, whose other parts (``names.VISION_PATTERNS``) are left out.
        tied: names of the head's weight and of the embedding table's weight, which are one weight
            where the configuration ties them.
        gguf: how the family's GGUF files name tensors and settings; None: there are no such files.
        only: (key, value) of settings that a ``config.json`` must have to be of this family, where
            another family has the same names.
        body: the family of the models without the head of this family's, if GGUF files have no such head; else None.
    """

    model_type: str
    architectures: tuple[str, ...]
    config: type[ModelConfig]
    make: Callable[..., PretrainedModel]
    names: Names = Names()
    tied: tuple[str, str] = ("lm_head.weight", "model.embed_tokens.weight")
    only: tuple[tuple[str, Any], ...] = ()
    gguf: GGUFTable | None = None
    body: Family | None = None

    def __post_init__(self) -> None:
        rows = self.names.rows
        if CACHE_SCALES not in rows:
            front = self.names.headless_prefix or "model."
            text = multimodal_rows(front) if self.config.in_multimodal else ()
            object.__setattr__(self, "names", Names(CACHE_SCALES, *text, *rows))

    @classmethod
    def of(
        cls,
        model: type[PretrainedModel],
        config: type[ModelConfig],
        *architectures: str,
        **settings: Any,
    ) -> Self:
        """Makes the family of a model class and its configuration class, which has the ``model_type``.

        Args:
            model: class of the model, whose :meth:`~PretrainedModel.of_checkpoint` is the family's ``make``.
            config: dataclass of its settings.
            architectures: as in :class:`Family`; by default the class's name with ``ForCausalLM`` and
                with ``Model``, as transformers names language models and their base models.
            settings: further attributes of the family.

        Raises:
            UserInputError: the configuration has no ``model_type``.

        Example:
            >>> from maxjax.models import Llama, LlamaConfig
            >>> class Mine(Llama):
            ...     pass
            >>> class MineConfig(LlamaConfig):
            ...     model_type = "mine"
            >>> family = Family.of(Mine, MineConfig, names=Llama.family.names)
            >>> family.model_type, family.architectures
            ('mine', ('MineForCausalLM', 'MineModel'))
        """
        if not config.model_type:
            raise UserInputError(
                f"{config.__name__} has no model_type: give it that of its config.json files, "
                'model_type = "…"'
            )
        name = model.__name__
        architectures = architectures or (f"{name}ForCausalLM", f"{name}Model")
        return cls(config.model_type, architectures, config, model.of_checkpoint, **settings)

    def like(
        self,
        model: type[PretrainedModel],
        config: type[ModelConfig],
        *architectures: str,
        **changes: Any,
    ) -> Self:
        """Makes the family of another model class, whose files differ from this family's by ``changes`` only.

        It has no GGUF files unless ``changes`` has their table.

        Args:
            model, config, architectures: as for :meth:`of`.
            changes: attributes of the family with other values.
        """
        one = Family.of(model, config, *architectures)
        return dataclasses.replace(
            self, model_type=one.model_type, architectures=one.architectures, config=config,
            make=one.make, **{"gguf": None, **changes},
        )  # fmt: skip

    def claims(self, config: Mapping[str, Any]) -> bool:
        """Whether a ``config.json`` has the settings that ``only`` requires; its names are not compared."""
        return all(config.get(key) == value for key, value in self.only)

    def read(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a checkpoint under the model's names, by :meth:`Names.read`."""
        return self.names.read(checkpoint, self.model_type)


def tensors(weights: FileWeights) -> dict[str, WeightData]:
    """The tensors below a ``Weights`` cursor, by their names relative to it; nothing is read.

    At the root of a GGUF file, names and layouts are those of Hugging Face's checkpoints. In other
    files, the parts of names that PyTorch's wrappers add are removed (:func:`unwrapped`).
    """
    if isinstance(weights, GGUFWeights) and not weights.name:
        from .gguf import hf_tensors

        return hf_tensors(weights)
    return unwrapped(dict(weights._named_data()))


def one_head(found: Mapping[str, Any], tied: tuple[str, str]) -> dict[str, Any]:
    """The tensors of a tied model: the embedding table without the head, by the table's name.

    A file may hold either of the two; if it holds both, the table is used.

    Example:
        >>> one_head({"head": 1, "norm": 2}, ("head", "table"))
        {'norm': 2, 'table': 1}
    """
    head, table = tied
    rest = {name: value for name, value in found.items() if name != head}
    if head in found and table not in found:
        rest[table] = found[head]
    return rest


def _head_advice(family: Family, heads: Collection[str]) -> str:
    """What to write in a ``config.json`` without ``architectures`` to load heads with tensors of these names."""
    from .registry import of_model_type

    found = []
    for one in of_model_type(family.model_type):
        body = one.names.body
        names = map(one.names.model_name, heads)
        if body is not None and any(name and matcher(body.head).fullmatch(name) for name in names):
            found.append(f'"architectures": ["{one.architectures[0]}"]')
    found = list(dict.fromkeys(found))
    return f". To load it, write {' or '.join(found)} in config.json" if found else ""


class PretrainedModel(Module):
    """Base class of complete models, which load the checkpoints of their family unchanged."""

    family: ClassVar[Family]
    # What the model's head is for: "fill-mask", "tag", "classify", "answer"; None: it has no such head.
    task: ClassVar[str | None] = None
    # JSON text, because a Module's definition is compared often and text compares quickly.
    _config_text: str | None = None
    # The same of the whole vision-language model, if the model has its vision part too.
    _whole_text: str | None = None
    # What else the checkpoint holds that the model was loaded from: saved with it; None: nothing.
    unloaded: Any = None
    # Patterns of tensors that a checkpoint may hold and that this model has no use for; ``*`` matches anything.
    unused_tensors: tuple[str, ...] = ()
    # Settings of load, generate, embed and save_pretrained: compiled programs stay valid when they change.
    _mx_unread = frozenset(
        {"_config_text", "_whole_text", "generation", "pooling", "unloaded", "unused_tensors"}
    )

    @classmethod
    def of_checkpoint(
        cls, config: Any, names: Collection[str], dtype: DType, reduce_dtype: DType
    ) -> Self:
        """A lazy model for a checkpoint with tensors of these names: ``Family.make`` of most families."""
        raise NotImplementedError

    @property
    def tensor_names(self) -> Names:
        """The names of tensors in files and in this model: its family's, unless it has optional parts."""
        return self.family.names

    @property
    def id2label(self) -> dict[int, str]:
        """The names of the labels of the model's head, by number; none if it has no such head."""
        return {}

    @property
    def problem_type(self) -> str | None:
        """What the labels of a text are, as ``config.json`` says; None if it does not say."""
        return None

    @property
    def hf_config(self) -> dict[str, Any] | None:
        """The content of the ``config.json`` that the model was built with, or None; a new dict each time.

        ``architectures`` names what the model holds: the base model's class if it has no head.
        """
        return None if self._config_text is None else json.loads(self._config_text)

    @hf_config.setter
    def hf_config(self, config: Mapping[str, Any] | None) -> None:
        has_score = getattr(self, "score", None) is not None
        if config is not None and "architectures" in config and not has_score:
            named, given = self.family.architectures, (config["architectures"] or [None])[0]
            has_head = getattr(self, "lm_head", self) is not None
            name = named[0 if has_head else -1]
            # An encoder's head may have several names, such as "…ForPreTraining".
            name = given if self.task is not None and given in named else name
            config = {**config, "architectures": [name]}
        self._config_text = None if config is None else json.dumps(config)

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any] | FileWeights,
        *,
        tie: bool | None = None,
        **options: Any,
    ) -> Any:
        """:meth:`Module.load_state_dict` for tensors named as in the family's checkpoints.

        Ignored tensors are left out, prefixes removed and old names replaced. Quantised values
        are dequantised for a weight that is not quantised.

        Args:
            state_dict: a Weights cursor, or arrays by the checkpoint's names.
            tie: what to do with a tied model's head if ``state_dict`` holds both it and the
                embedding table: None refuses a head that differs, True ignores the head.
            options: as for :meth:`Module.load_state_dict`.

        Raises:
            CheckpointMismatchError: names, shapes or dtypes do not fit, or the head differs from the
                embedding table that it is tied to. For arrays it is a plain ValueError.
            CheckpointError: the checkpoint cannot be read.
        """
        path = state_dict._path if isinstance(state_dict, FileWeights) else None
        found = (
            tensors(state_dict)
            if isinstance(state_dict, FileWeights)
            else unwrapped({**state_dict})
        )
        if path is not None and (heads := self.family.names.heads(found)):
            what = "%s: not loaded, as maxjax's %s has no such head: %s%s"
            unnamed = not (self.hf_config or {}).get("architectures")
            advice = _head_advice(self.family, heads) if unnamed else ""
            _LOG.warning(what, path, type(self).__name__, some(heads, 3), advice)
        try:
            found = self._tied(self.tensor_names.read(found, self.family.model_type), tie)
            unused = matcher(self.unused_tensors)
            found = {name: value for name, value in found.items() if not unused.fullmatch(name)}
            found = dense_tables(self, found)
            return super().load_state_dict(self._decoded(found), **options)
        except ValueError as error:
            if path is None or getattr(error, "path", None) is not None:
                raise
            problem = str(error).removesuffix(".")
            raise CheckpointMismatchError(problem, path=path) from None

    def _tied(self, found: Mapping[str, Any], tie: bool | None) -> Mapping[str, Any]:
        """The values that a tied model loads, without those of its head."""
        (head, table), weights = self.family.tied, self.raw_state_dict()
        if head not in found or head in weights or table not in weights:
            return found
        if table in found and not tie and not same_content(found[head], found[table]):
            raise ValueError(
                f"'{head}' differs from '{table}', but this model's head is tied to that table. "
                "maxjax.load and maxjax.models.build(weights) make a model with a separate head from "
                "such a checkpoint, build(weights, tie=False) from any; "
                "load_state_dict(..., tie=True) ignores the head of the checkpoint"
            )
        return one_head(found, self.family.tied)

    def _decoded(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """The values, dequantised where the model's weight is a float without an encoding."""
        weights = self.raw_state_dict()
        changed = dict(found)
        for name, data in found.items():
            weight = weights.get(name)
            if weight is None or weight.quantization_encoding is not None:
                continue
            if isinstance(data, WeightData) and data.is_packed and weight.dtype.is_float():
                changed[name] = data.astype(weight.dtype)
        return changed

    def _take_dtypes(self, found: Mapping[str, WeightData]) -> None:
        """Gives each placeholder the float dtype, or the quantisation, of its tensor in the checkpoint.

        Weights stay quantised only in layers that compute with quantised weights.
        """
        packs = block_weights(self)
        stacks: dict[int, tuple[Any, set[Any]]] = {}
        kinds = {}
        for name, weight in self.raw_state_dict().items():
            data, home = found.get(name), weight.home
            kind = None
            if data is not None and data.is_packed and id(weight) in packs:
                kind = data.dtype, tuple(map(int, data.shape)), data.quantization_encoding
            elif data is not None and data.dtype.is_float() and data.dtype is not weight.dtype:
                kind = data.dtype, tuple(map(int, weight.shape)), None
            kinds[id(weight)] = kind
            if home is not None:
                stacks.setdefault(id(home[0]), (home[0], set()))[1].add(kind)
        self._unstack_unequal({key for key, (_, found) in stacks.items() if len(found) > 1})
        for stack, (kind, *others) in stacks.values():
            if kind is not None and not others:
                stack.redeclare(*kind)
        for weight in self.raw_state_dict().values():
            kind = kinds[id(weight)]
            if kind is not None and weight.home is None:
                dtype, shape, encoding = kind
                weight.value = jax.ShapeDtypeStruct(shape, dtype.np)
                if encoding is not None:
                    weight.quantization_encoding = encoding

    def _unstack_unequal(self, unequal: set[int]) -> None:
        """Unstacks the experts of layers whose files hold them in different dtypes or encodings."""
        for _, module in list(self.named_modules()):
            is_unequal = any(id(stack) in unequal for stack in module._mx_stacks)
            if isinstance(module, ExpertStack) and is_unequal:
                module.unstack()
