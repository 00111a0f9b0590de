"""PEFT's settings of LoRA (``adapter_config.json``) and its names of the tensors.

Format: Hugging Face PEFT, ``LoraConfig`` and ``get_peft_model_state_dict``.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from ..errors import (
    CheckpointFormatError,
    CheckpointMismatchError,
    UnsupportedModelError,
    UserInputError,
    shown,
    some,
)
from ..graph.weights import WeightData
from ..models.family import PretrainedModel
from ..models.multimodal import module_prefixes
from ..models.names import Names, Prefix, Unwrap
from ..models.parts.encoder import Encoder
from ..models.parts.heads import ANSWER, CLASSIFY, FILL_MASK, TAG
from ..models.parts.language_model import LanguageModel
from ..models.split_layers import SplitLayers
from ..nn.embedding import Embedding
from ..nn.layer import Module
from ..nn.layer.walk import Walk
from ..nn.low_rank import Adapter, trained_names
from ..nn.transposed_linear import TransposedLinear
from ..patterns import NameTable
from .model import BIASES
from .split import split_update
from .targets import TargetLayer, targets

T = TypeVar("T")
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# The older name of the weights, written by torch.save.
OLD_WEIGHTS = "adapter_model.bin"
_FRONT = "base_model.model."
# What PEFT adds to the names of the base model's weights.
_PEFT = Names(Prefix({_FRONT: ""}), Unwrap("base_layer", "modules_to_save"))
# In memory PEFT appends the adapter's name (lora_A.default.weight), and some files have it too.
_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(.+)\.(?:(lora_[AB])(?:\.[^.]+)?\.weight"
    r"|(lora_magnitude_vector|lora_embedding_[AB])(?:\.[^.]+){0,2})",
    re.DOTALL,
)
# The values of init_lora_weights that leave the base weights unchanged.
_HARMLESS = (True, False, None, "gaussian", "orthogonal", "eva")
# Settings that are not supported, each with the values that switch it off.
_UNSUPPORTED = {
    "lora_bias": (False, None),
    "target_parameters": (None, []), "trainable_token_indices": (None, [], {}), "layer_replication": (None, []),
    "use_qalora": (False, None), "alora_invocation_tokens": (None, []), "arrow_config": (None,),
    "use_bdlora": (None, False), "velora_config": (None,), "monteclora_config": (None,), "lora_ga_config": (None,),
}  # fmt: skip


# The value of task_type for a model's task, and the modules that PEFT then takes for trained.
_TASKS = {
    CLASSIFY: ("SEQ_CLS", ("classifier", "score")), TAG: ("TOKEN_CLS", ("classifier",)),
    ANSWER: ("QUESTION_ANS", ("qa_outputs",)),
}  # fmt: skip


class AdapterSettings(NamedTuple):
    """The settings of LoRA in an ``adapter_config.json``.

    Attributes:
        rank, alpha: r and alpha of the layers that no pattern names.
        ranks, alphas: r and alpha of other layers, by PEFT's patterns of their names.
        rslora: whether scales are ``alpha / √r``.
        dora: whether the norms of rows are trained.
        tied: whether the update of an embedding table also applies to a tied output layer (``ensure_weight_tying``).
        bias: biases that the adapter replaces: "none", "lora_only" or "all".
        trained: endings of the names of modules whose weights the adapter replaces (``modules_to_save``).
    """

    rank: int
    alpha: float
    ranks: NameTable[int]
    alphas: NameTable[float]
    rslora: bool
    dora: bool = False
    tied: bool = False
    bias: str = "none"
    trained: tuple[str, ...] = ()

    def adapter(self, name: str) -> Adapter:
        """The settings of one layer, by its name in the base model's files.

        Raises:
            CheckpointLimitError: the patterns take too many steps to match.

        Example:
            >>> config = {"peft_type": "LORA", "lora_alpha": 16, "rank_pattern": {"q_proj": 4}}
            >>> read_settings(config, "adapter_config.json").adapter("model.layers.0.self_attn.q_proj").scale
            4.0
        """
        rank, alpha = self.ranks.get(name), self.alphas.get(name)
        return Adapter(
            self.rank if rank is None else rank, float(self.alpha if alpha is None else alpha),
            self.rslora, self.dora, bias=self.bias,
        )  # fmt: skip


def read_settings(config: Any, path: str) -> AdapterSettings:
    """The settings in the content of an ``adapter_config.json``.

    Raises:
        CheckpointFormatError: the content is not PEFT's, a value has the wrong type, or a pattern is not supported.
        CheckpointLimitError: the patterns are too large.
        UnsupportedModelError: the adapter uses another method than LoRA, or a form of LoRA that is not supported;
            the message names the setting.
    """
    if not isinstance(config, Mapping) or "peft_type" not in config:
        raise CheckpointFormatError(
            "is not an adapter_config.json of PEFT: it has no 'peft_type'", path=path
        )
    if config["peft_type"] != "LORA":
        raise UnsupportedModelError(
            f"{path}: an adapter of type {config['peft_type']!r}: only LORA is supported"
        )
    for name, fine in _UNSUPPORTED.items():
        if config.get(name) not in fine:
            raise UnsupportedModelError(f"{path}: {name}={config[name]!r} is not supported")
    bias = config.get("bias") or "none"
    if bias not in BIASES:
        raise UnsupportedModelError(f"{path}: bias={bias!r} is not supported")
    start = config.get("init_lora_weights")
    if start not in _HARMLESS:
        raise UnsupportedModelError(
            f"{path}: init_lora_weights={start!r} changed the base weights before training: convert the adapter with "
            "PEFT (save_pretrained(path_initial_model_for_weight_conversion=...))"
        )
    rank, alpha = config.get("r", 8), config.get("lora_alpha", 8)
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    if not isinstance(ranks, Mapping) or not isinstance(alphas, Mapping):
        raise CheckpointFormatError("rank_pattern and alpha_pattern must be objects", path=path)
    for name, value in [("r", rank), *ranks.items()]:
        if type(value) is not int or value < 1:
            raise CheckpointFormatError(
                f"rank {name!r} must be a positive integer", path=path, found=value
            )
    for name, value in [("lora_alpha", alpha), *alphas.items()]:
        # An integer may have too many digits for a float.
        if type(value) not in (int, float) or abs(value) > sys.float_info.max:
            raise CheckpointFormatError(
                f"alpha {name!r} must be a number", path=path, found=shown(value)
            )
    rank_table = NameTable(ranks, "rank_pattern", path=path, ending=True)
    alpha_table = NameTable(alphas, "alpha_pattern", path=path, ending=True)
    trained = config.get("modules_to_save") or []
    if not isinstance(trained, list) or not all(isinstance(name, str) for name in trained):
        raise CheckpointFormatError("modules_to_save must be a list of strings", path=path)
    rslora, dora, tied = (
        _switch(config, name, path) for name in ("use_rslora", "use_dora", "ensure_weight_tying")
    )
    return AdapterSettings(
        rank, float(alpha), rank_table, alpha_table, rslora, dora, tied, bias, tuple(trained)
    )


def _switch(config: Mapping[str, Any], name: str, path: str) -> bool:
    value = config.get(name)
    if not isinstance(value, bool | None):
        raise CheckpointFormatError(f"{name} must be true or false", path=path, found=value)
    return bool(value)


class Update(NamedTuple):
    """What a LoRA tensor of an adapter is in the model.

    Attributes:
        layer: the layer's name in the model.
        part: the tensor's name in the layer: "lora_A.weight", for example.
        theirs: the layer's name in transformers' model.
        place: (index, number) of the layers in transformers' model that are this one; (0, 1) for most.
    """

    layer: str
    part: str
    theirs: str
    place: tuple[int, int]


def table_of(model: Module) -> Names:
    """The names of a model's tensors in PEFT's files: those of the modules of transformers' model.

    Where ``config.json`` names code beside the files and a type of model that transformers does not know, the modules
    are those of that code, and have the names of the files.
    """
    if not isinstance(model, PretrainedModel):
        return Names()
    names, config = model.tensor_names, model.hf_config or {}
    if "auto_map" not in config or config.get("model_type") == model.family.model_type:
        names = names.of_modules()
    names = names.inside(_prefixes(model))
    headless = getattr(model, "lm_head", model) is None and model.task is None
    return names.without_head() if headless else names


def _prefixes(model: Module) -> Mapping[str, str]:
    """The prefixes of a text model's names in transformers' multimodal model, from whose file it was loaded."""
    if getattr(model, "vision", None) is not None:
        return {}  # its own table has them
    unloaded = model.unloaded if isinstance(model, PretrainedModel) else None
    return {} if unloaded is None else module_prefixes(unloaded.config_with(None))


def is_update(tensor: str) -> bool:
    """Whether a tensor of an adapter has the name of a LoRA weight."""
    return _TENSOR.fullmatch(tensor) is not None


def updates_in(model: Module, names: Iterable[str], path: str) -> dict[str, Update]:
    """The LoRA tensors of an adapter among these, and what each is in the model.

    Raises:
        CheckpointMismatchError: a tensor is of no layer of the model, or is repeated.
    """
    found: dict[str, Update] = {}
    others, table = [], table_of(model)
    split = [row for row in table.rows if isinstance(row, SplitLayers)]
    for tensor in names:
        match = _TENSOR.fullmatch(tensor)
        if match is None:
            continue
        places = (place for row in split if (place := row.place(match[1])))
        theirs, *place = next(places, (match[1], 0, 1))
        weight = table.model_name(f"{theirs}.weight")
        if weight is None:
            others.append(tensor)
        else:
            part = match[3] or f"{match[2]}.weight"
            layer = weight.removesuffix(".weight")
            found[tensor] = Update(layer, part, match[1], (place[0], place[1]))
    check_supported(others, path)
    for (layer, part, _, _), count in Counter(
        one._replace(theirs="") for one in found.values()
    ).items():
        if count > 1:
            raise CheckpointMismatchError(f"has {count} tensors {part}", path=path, tensor=layer)
    if not found:
        raise CheckpointMismatchError("holds no LoRA weights", path=path)
    return found


def check_supported(others: Sequence[str], path: str) -> None:
    """Raises CheckpointMismatchError if there are tensors that the model has no place for."""
    if others:
        raise CheckpointMismatchError(
            f"these tensors are not supported: {some(others, 3)}", path=path
        )


def base_weights(model: Module, tensors: Mapping[str, T]) -> tuple[dict[str, T], list[str]]:
    """The weights of the base model in tensors of an adapter, by the model's names; and the names of others.

    PEFT saves a copy of an embedding table or output layer that has LoRA weights.

    Raises:
        CheckpointFormatError: a tensor that holds several weights has another shape.
    """
    weights, aliases = model._mx_names()
    full = {_PEFT.model_name(name) or name: name for name in tensors}
    table = table_of(model)
    found, others = {}, []
    for name, value in table.split({n: tensors[tensor] for n, tensor in full.items()}).items():
        weight = table.model_name(name) or ""
        weight = aliases.get(weight, weight)
        if weight not in weights and isinstance(model, PretrainedModel):
            # A tied head is in no file of a model.
            weight = dict([model.family.tied]).get(weight, "")
        if weight in weights:
            found[weight] = value
        else:
            others.append(full.get(name, name))
    return found, others


class Base(NamedTuple):
    """The weights of the base model in an adapter, by the model's names.

    Attributes:
        replaced: those in modules of ``modules_to_save``.
        biases: those that are trained because of the setting ``bias``.
        copies: others, which must be equal to the model's.
    """

    replaced: dict[str, WeightData]
    biases: dict[str, WeightData]
    copies: dict[str, WeightData]


def base_of(
    model: Module, tensors: Mapping[str, WeightData], settings: AdapterSettings, path: str
) -> Base:
    """The weights of the base model in an adapter.

    Raises:
        CheckpointMismatchError: a tensor is none of the model; or a trained one is an embedding table or output
            layer, and the model has the two tied.
        CheckpointFormatError: a tensor that holds several weights has another shape.
    """
    within = {name: one for name, one in tensors.items() if _is_within(name, settings.trained)}
    rest = {name: one for name, one in tensors.items() if name not in within}
    try:
        replaced, others = base_weights(model, within)
        found, unknown = base_weights(model, rest)
    except CheckpointFormatError as error:
        raise CheckpointFormatError(
            error.problem,
            path=path,
            tensor=error.tensor,
            expected=error.expected,
            found=error.found,
        ) from None
    check_supported([*others, *unknown], path)
    is_trained = lambda name: settings.bias != "none" and name.endswith(".bias")
    biases = {name: one for name, one in found.items() if is_trained(name)}
    if is_tied(model) and isinstance(model, PretrainedModel):
        table = model.family.tied[1]
        if table in replaced:
            raise CheckpointMismatchError(
                "modules_to_save has trained the head or the embedding table, which are one weight of "
                "this model: not supported", path=path, tensor=table,
            )  # fmt: skip
    return Base(replaced, biases, {n: one for n, one in found.items() if n not in biases})


def _is_within(tensor: str, modules: tuple[str, ...]) -> bool:
    """Whether a tensor is in a module whose name has one of these endings, or in a part of that module."""
    parts = tensor.removeprefix(_FRONT).split(".")
    return any(".".join(parts[:end]).endswith(modules) for end in range(1, len(parts)))


def is_tied(model: Module) -> bool:
    """Whether the head of a model and its embedding table are one weight."""
    config = getattr(model, "config", None)
    if not isinstance(model, PretrainedModel) or not getattr(config, "tie_word_embeddings", False):
        return False
    return model.task == FILL_MASK if isinstance(model, Encoder) else model.task is None


def layer_names(model: Module, chosen: Iterable[TargetLayer]) -> dict[str, list[str]]:
    """The names in transformers' model of each layer, keyed by the model's names; there may be several of one."""
    table = table_of(model)
    return {name: _theirs(table, name) for one in chosen for name in one.names}


def _theirs(table: Names, layer: str) -> list[str]:
    """The names in transformers' model of the layer that has this name in ours."""
    return [name.removesuffix(".weight") for name in table.tensors_of(f"{layer}.weight")]


def tensor(name: str, part: str) -> str:
    """PEFT's name of a tensor.

    Example:
        >>> tensor("model.layers.0.self_attn.q_proj", "lora_A.weight")
        'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    return f"{_FRONT}{name}.{part}"


def _biases(model: Module, chosen: Sequence[TargetLayer], kind: str) -> dict[str, None]:
    """The names of the biases that PEFT's setting ``bias`` takes for trained."""
    adapted = {f"{name}.bias" for one in chosen for name in one.names}
    names = [n for n in model.raw_state_dict() if n.endswith(".bias") and kind != "none"]
    return dict.fromkeys(n for n in names if kind == "all" or n in adapted)


class Trained(NamedTuple):
    """What is trained besides the LoRA weights, as PEFT's files say it.

    Attributes:
        task: PEFT's ``task_type`` of the model's head, if PEFT takes that for trained; None if not.
        modules: ``modules_to_save``.
        bias: the setting ``bias``.
        names: the model's names of the weights.
    """

    task: str | None
    modules: list[str]
    bias: str
    names: list[str]


def trained_parts(model: Module, chosen: Sequence[TargetLayer]) -> Trained:
    """What is trained besides the LoRA weights in the chosen layers, and what PEFT takes for trained with it.

    PEFT takes every module for trained whose name ends like one of ``modules_to_save``, and in an adapter for texts,
    tokens or answers also those whose name ends like the head's. It opens no file without one of their weights.

    Raises:
        UserInputError: a trained weight cannot be written so that :func:`maxjax.lora.load` and PEFT replace it.
    """
    layers = {name for one in chosen for name in one.names}
    updates = {f"{n}.{part}" for one in chosen for n in one.names for part in one.parts.values()}
    weights = model.raw_state_dict()
    table = table_of(model)
    theirs = {name: table.tensors_of(name) for name in weights if name not in updates}
    task, ends = _TASKS.get(getattr(model, "task", None) or "", (None, ()))
    modules = [name for name in ends if getattr(model, name, None) is not None][:1]
    is_in = lambda name, endings: any(_is_within(one, endings) for one in theirs[name])
    holds = lambda endings: [name for name in theirs if is_in(name, endings)]
    conflicts = {
        name: "its layer has LoRA weights too" for name in weights if _parent(name) in layers
    }
    conflicts |= {
        name: "its layer is quantised" for name, one in weights.items() if not one.dtype.is_float()
    }
    if not modules or not conflicts.keys().isdisjoint(holds(ends)):
        task, ends, modules = None, (), []  # without its task, PEFT leaves the head as it is
    names = [name for name in trained_names(model) if name in theirs]
    for name in names:
        if not name.endswith(".bias") and not is_in(name, (*ends, *modules)):
            modules += map(_parent, theirs[name])
            if not modules[-1]:
                raise _cannot_hold(name, "it is in no module inside of the model")
    within = holds((*ends, *modules))
    left = {*names}.difference(within)
    kinds = BIASES[BIASES.index(bias_of(chosen)) :]
    bias = next((one for one in kinds if left <= _biases(model, chosen, one).keys()), kinds[-1])
    if conflict := next((name for name in within if name in conflicts), None):
        raise _cannot_hold(conflict, conflicts[conflict])
    if is_tied(model) and isinstance(model, PretrainedModel) and model.family.tied[1] in within:
        raise _cannot_hold(model.family.tied[1], "the head and the embedding table are one weight")
    found = list(_biases(model, chosen, bias) | dict.fromkeys(within))
    if lost := [name for name in names if name not in found]:
        raise _cannot_hold(lost[0], "they have no name for it")
    return Trained(task, modules, bias, found)


def written(
    model: Module, chosen: Sequence[TargetLayer], data: Mapping[str, WeightData]
) -> dict[str, WeightData]:
    """The tensors of a PEFT file.

    Args:
        chosen: the layers with LoRA weights.
        data: the values of these and of other trained weights, by the model's names; nothing is read.

    Raises:
        UserInputError: a trained weight cannot be written so that :func:`maxjax.lora.load` and PEFT replace it.
    """
    table, names = table_of(model), layer_names(model, chosen)
    rest, found = dict(data), {}
    for one in chosen:
        for layer in one.names:
            theirs = names[layer]
            for part in one.parts.values():
                value = rest.pop(f"{layer}.{part}")
                parts = split_update(part, value, theirs)
                found |= {tensor(n, part): each for n, each in zip(theirs, parts, strict=True)}
    base, adapted = table.write(rest), {name for each in names.values() for name in each}
    tensors = {}
    for name, value in base.items():
        layer, _, kind = name.rpartition(".")
        tensors[tensor(layer, f"base_layer.{kind}" if layer in adapted else kind)] = value
    read, _ = base_weights(model, tensors)
    for name in rest:
        if name not in read or not base.keys() >= {*table.tensors_of(name)}:
            raise _cannot_hold(name, "they have no name for it")
    return found | tensors


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _cannot_hold(name: str, reason: str) -> UserInputError:
    return UserInputError(
        f"PEFT's files cannot hold the trained weight '{name}': {reason}. Save the whole model: "
        "maxjax.save_pretrained(maxjax.lora.merge(model), path)"
    )


def bias_of(chosen: Iterable[TargetLayer]) -> str:
    """PEFT's setting ``bias`` of the chosen layers: which biases are trained."""
    return next((one.layer.lora.bias for one in chosen), "none")


def config_of(
    model: Module,
    chosen: list[TargetLayer],
    names: Mapping[str, Sequence[str]],
    trained: Trained,
    base: str | None,
) -> dict[str, Any]:
    """The content of ``adapter_config.json`` for a model with LoRA weights in the chosen layers.

    Args:
        names: the layers' names in transformers' model, keyed by the model's names.
        trained: what is trained besides the LoRA weights.
        base: name or path of the base model.
    """
    adapters = {
        their: one.layer.lora for one in chosen for name in one.names for their in names[name]
    }
    linear = [one.layer for one in chosen if not isinstance(one.layer, Embedding)]
    rank = Counter(a.rank for a in adapters.values()).most_common(1)[0][0]
    alpha = Counter(a.alpha for a in adapters.values()).most_common(1)[0][0]
    number = lambda value: int(value) if float(value).is_integer() else value
    config = getattr(model, "hf_config", None) or {}
    task = trained.task
    if task is None and isinstance(model, LanguageModel) and model.lm_head is not None:
        task = "CAUSAL_LM"
    elif task is None and isinstance(model, PretrainedModel) and model.task is None:
        task = "FEATURE_EXTRACTION"
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base or config.get("_name_or_path"),
        "inference_mode": True,
        "r": rank,
        "lora_alpha": number(alpha),
        "lora_dropout": 0.0,
        "target_modules": _target_modules(model, list(adapters)),
        "rank_pattern": {_only(n): a.rank for n, a in adapters.items() if a.rank != rank},
        "alpha_pattern": {
            _only(n): number(a.alpha) for n, a in adapters.items() if a.alpha != alpha
        },
        "use_rslora": any(a.rslora for a in adapters.values()),
        "use_dora": any(a.dora for a in adapters.values()),
        "bias": trained.bias,
        "fan_in_fan_out": bool(linear) and all(isinstance(one, TransposedLinear) for one in linear),
        "init_lora_weights": True,
        "modules_to_save": trained.modules or None,
    }


def _only(name: str) -> str:
    """PEFT's pattern of exactly this name: the name itself would also fit names that end in it."""
    return f"^{re.escape(name)}"


def _target_modules(model: Module, adapted: list[str]) -> list[str] | str:
    """PEFT's ``target_modules`` for exactly these layers: the last part of a name if all layers with it are adapted.

    If one of these also fits the name of another module, a regular expression of the full names.
    """
    every = [name for each in layer_names(model, targets(model)).values() for name in each]
    taken = Counter(name.rsplit(".", 1)[-1] for name in adapted)
    there = Counter(name.rsplit(".", 1)[-1] for name in every)
    short = [end for end, count in taken.items() if there[end] == count]
    found = sorted(short) + [name for name in adapted if name.rsplit(".", 1)[-1] not in short]
    table = table_of(model)
    paths = [prefix.removesuffix(".") for prefix in Walk(model).prefixes]
    modules = {name for path in paths for name in _theirs(table, path)}
    ends = (
        parts[k:]
        for name in modules - {*adapted}
        if (parts := name.split("."))
        for k in range(len(parts))
    )
    is_part = bool(_prefixes(model))  # beside modules whose names are not known here
    if not is_part and {*found}.isdisjoint(map(".".join, ends)):
        return found
    return "|".join(map(re.escape, adapted))
