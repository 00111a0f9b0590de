"""``build``: a lazy Module from the headers of a checkpoint."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..dtype import DType
from ..errors import (
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointMissingError,
    UserInputError,
    shown,
    some,
)
from ..graph.weights import FileWeights, GGUFWeights, WeightData
from ..graph.weights.given import data_of
from ..paths import local_path
from ..storage.files import is_there
from ..storage.limits import allowing
from ..storage.open import orbax_checkpoint
from ..storage.save.beside import Files
from .bounds import check_bounds
from .config import check_labels, labels_of, read_config
from .family import Family, PretrainedModel, one_head, tensors
from .find import find_family, text_of
from .multimodal import vision_class, with_sections
from .names import matcher, unwrapped
from .parts.encoder import Encoder
from .parts.heads import CLASSIFY, TAG
from .parts.language_model import LanguageModel
from .parts.score import has_score
from .parts.vision import VisionModel
from .quantized import KEY as _QUANTIZATION
from .quantized import Quantization, check_has_settings, unquantised
from .ties import is_tied, with_tie
from .unloaded import Unloaded
from .vision.part import VisionPart
from .weights import main_dtype

_LOG = logging.getLogger("maxjax")


def build(
    weights: FileWeights | Mapping[str, Any],
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    dtype: Any = None,
    *,
    reduce_dtype: Any = DType.float32,
    stacked: bool = True,
    tie: bool | None = None,
    mtp: bool = False,
    vision: bool | type[VisionPart] = True,
) -> PretrainedModel:
    """Builds a lazy Module for a checkpoint: names, shapes and dtypes without memory for values.

    ``model.load_state_dict(weights)`` then loads the values. ``build`` reads values in one case
    only: if the configuration ties the head to the embedding table and the file holds both, with
    the same dtype and shape. Then they are compared, up to the first value that differs.

    Args:
        weights: checkpoint, of which only headers are read; or arrays by a checkpoint's tensor names,
            which need a ``config``.
        config: content of a ``config.json``, or its path; by default the one in the directory of
            the weights, or the metadata of a GGUF file.
        dtype: dtype of all weights; None keeps each tensor's dtype in the checkpoint, and keeps
            tensors quantised in layers that compute with quantised weights. To load a dtype that
            differs from the file's, pass ``load_state_dict(..., cast=True)``.
        reduce_dtype: dtype in which norms, softmax and pooling are computed; decoders always use
            float32.
        stacked: whether the layers of a decoder are a LayerStack, compiled once, or each has
            its own weights.
        tie: whether the head is the embedding table. None follows the configuration unless the
            file holds a different head: then the head gets a weight of its own, and a warning is
            logged.
        mtp: whether the model has its layer of multi-token prediction.
        vision: whether a vision-language model has its vision part, if maxjax has its architecture; or the class of
            a vision part, in place of maxjax's.

    Raises:
        UnsupportedModelError: the configuration names an architecture that maxjax does not support.
        CheckpointError: the configuration is missing or invalid, or does not fit the tensors; or ``mtp`` is True, and
            the file has no such layer.
        UserInputError: arrays are passed without a ``config``, ``tie`` is not a bool, or ``vision`` is neither a bool
            nor a class of vision parts; or ``mtp`` is True for a family without such layers.
    """
    given = not isinstance(weights, FileWeights)
    with allowing(None if given else weights._family.limits):
        raw, path = _config(weights, config)
    family, whole = find_family(raw, path=path), raw
    raw = text_of(raw, path)
    if given:
        named = unwrapped({n: data_of(n, v) for n, v in weights.items()})
    else:
        named = tensors(weights)
    family = _held_family(family, named, None if given else weights._path)
    own = _own_vision(vision)
    kind = own or (vision_class(whole) if vision else None)
    names = family.names if kind is None else kind.names_with(family.names)
    read = names.read(named, family.model_type)
    seen = {name: data for name, data in read.items() if name.startswith("vision.")}
    found = {name: data for name, data in read.items() if name not in seen}
    if own is not None and not seen:
        raise CheckpointMismatchError(
            f"the file has no tensors of the vision part {own.__name__}: {some(own.names)}",
            path=path,
        )
    shapes = {name: tuple(map(int, data.logical_shape)) for name, data in found.items()}
    check_bounds(family.config, raw, shapes, path=path)
    quantization = Quantization.of(raw, path=path)
    plain = raw
    if quantization is not None and not isinstance(weights, GGUFWeights):
        plain = {k: v for k, v in raw.items() if k not in (_QUANTIZATION, "quantization")}
    settings = family.config.from_dict(plain, path=path)
    tie_setting, headless = getattr(settings, "tie_word_embeddings", None), False
    if tie_setting is not None:
        tied = is_tied(family, found, tie_setting, tie=tie, path=None if given else weights._path)
        if tied is not tie_setting:
            settings, raw = replace(settings, tie_word_embeddings=tied), with_tie(raw, tied)  # type: ignore[call-arg]
        found = one_head(found, family.tied) if tied else found
        headless = not tied and family.tied[0] not in found and family.names.is_headless(named)
    main = _main(found) if dtype is None else DType.of(dtype)
    if dtype is None and quantization is not None:
        main = main_dtype(unquantised(found)) or DType.float32
    if seen:
        settings = with_sections(settings, whole)
    model = family.make(settings, found.keys(), main, DType.of(reduce_dtype))
    packed: set[str] = set()
    if mtp:
        found |= _make_mtp(model, named, None if given else weights._path)
    if seen:
        assert isinstance(model, LanguageModel) and kind is not None
        of_part = main_dtype(seen) if dtype is None else None
        model.vision = _vision(kind, whole, model, of_part or main, path)
        model._whole_text = json.dumps(whole)
        found |= seen
    bias = family.tied[0].removesuffix("weight") + "bias"
    if raw is not whole and bias in model.raw_state_dict() and bias not in found:
        model.lm_head.bias = None  # the head of a multimodal model has none
    if quantization is None:
        check_has_settings(model, found, raw, path=path)
    else:
        if isinstance(model, LanguageModel):
            model.unstack()  # a family of the user's may have stacked its layers
        packed = quantization.apply(model, found, main)
    if isinstance(model, LanguageModel) and has_score(raw):
        model.make_score(labels_of(raw), main)
    elif isinstance(model, LanguageModel) and headless:
        model.lm_head = None
    if model.task in (TAG, CLASSIFY):
        check_labels(raw, shapes, path=path)
    model.hf_config = raw
    if isinstance(weights, FileWeights):
        model.unloaded = Unloaded.of(weights, whole, model)
    if dtype is None:
        model._take_dtypes({name: data for name, data in found.items() if name not in packed})
    if stacked and isinstance(model, (LanguageModel, VisionModel)):
        model.stack()
    return model


def _make_mtp(model: Any, named: Mapping[str, Any], path: str | None) -> dict[str, Any]:
    """Makes the layer of multi-token prediction, and returns its tensors."""
    if not isinstance(model, LanguageModel):
        raise UserInputError(f"multi-token prediction is not supported for {type(model).__name__}")
    model.make_mtp()
    read = model.tensor_names.read(named, model.family.model_type)
    found = {name: data for name, data in read.items() if name.startswith("mtp.")}
    if not found:
        raise CheckpointMismatchError(
            "the file has no layer of multi-token prediction",
            path=path,
            hint="Load it without mtp=True.",
        )
    return found


def _own_vision(vision: Any) -> type[VisionPart] | None:
    """The class of a vision part that the caller gave."""
    if isinstance(vision, type) and issubclass(vision, VisionPart):
        return vision
    if isinstance(vision, bool):
        return None
    raise UserInputError(f"vision must be a bool or a subclass of VisionPart, not {shown(vision)}")


def _vision(
    kind: Any, raw: Mapping[str, Any], model: LanguageModel, dtype: DType, path: Path | None
) -> Any:
    """The vision part of a model with this ``config.json``."""
    try:
        return kind(raw, model.config, dtype)
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointFormatError(
            f"the settings of the vision part: {error}", path=path
        ) from None


def _held_family(family: Family, named: Mapping[str, Any], path: str | None) -> Family:
    """The family, or that of the model without the head if the file has no tensors of any head.

    Embedding models often name the class that they were trained from, and hold the body alone.
    """
    body, kind = family.names.body, getattr(family.make, "__self__", None)
    if body is None or not body.head or not isinstance(kind, type) or not issubclass(kind, Encoder):
        return family
    names = map(family.names.model_name, named)
    is_of_head = matcher(body.head).fullmatch
    if any(name is not None and is_of_head(name) for name in names) or family.names.heads(named):
        return family  # what is missing of the head is an error when the values are loaded
    found = next(one for one in kind.__mro__ if issubclass(one, Encoder) and one.task is None)
    _LOG.warning(
        "%sthe file has no tensors of the head of %s (%s): opened as %s, without a head",
        "" if path is None else f"{path}: ", kind.__name__, some(body.head), found.__name__,
    )  # fmt: skip
    return found.family


def _main(found: Mapping[str, WeightData]) -> DType:
    """The dtype of activations: the dtype of most values, or float32 if any are quantised."""
    if any(data.is_packed for data in found.values()):
        return DType.float32  # its few float tensors do not show the range of the quantised ones
    return main_dtype(found) or DType.float32


def _config(
    weights: FileWeights | Mapping[str, Any], config: Any
) -> tuple[Mapping[str, Any], Path | None]:
    if isinstance(config, Mapping):
        return config, None
    if config is not None:
        path = Path(local_path(config))
        return read_config(path, path.parent), path
    if isinstance(weights, GGUFWeights):
        from .gguf import config_of

        return config_of(weights, weights._mmproj), Path(weights._path)
    if not isinstance(weights, FileWeights):
        raise UserInputError("arrays alone do not say which model they are of: pass its config")
    with weights._beside.files() as folder:
        path = config_beside(folder)
        return read_config(path, folder), path


def config_beside(path: str | os.PathLike[str]) -> Path:
    """Finds a checkpoint's ``config.json``: in its directory, or for Orbax in the directory of the step.

    Raises:
        CheckpointMissingError: there is no such file.
    """
    if isinstance(path, Files):
        directory: Path | Files = path
    else:
        path = Path(local_path(path))
        directory = Path(orbax_checkpoint(path) or path) if path.is_dir() else path.parent
    config = directory / "config.json"
    if not is_there(config):
        if is_there(directory / "adapter_config.json"):
            raise CheckpointMissingError(
                "there is no config.json: this is a LoRA adapter", path=directory,
                hint="Load its base model, and then maxjax.lora.load(model, path).",
            )  # fmt: skip
        raise CheckpointMissingError(
            "there is no config.json, which says what model this is", path=directory,
            hint="Put it there, or in Python pass its content or its path as config=.",
        )  # fmt: skip
    return config
