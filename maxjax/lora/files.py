"""Reads and writes LoRA weights as PEFT's files: ``adapter_model.safetensors`` and ``adapter_config.json``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax

from ..checkpoint.file_set import json_bytes, write_with
from ..checkpoint.pretrained import METADATA
from ..dtype import DType
from ..errors import (
    CheckpointMismatchError,
    CheckpointMissingError,
    UnsupportedModelError,
    UserInputError,
)
from ..graph.weights import WeightData, load_weights
from ..graph.weights.gathering import Gathering
from ..graph.weights.same import same_content
from ..graph.weights.writing import outgoing_data, weight_data
from ..lockstep import Lockstep
from ..models.weights import model_facts, shardings_of
from ..nn.layer import Module
from ..nn.layer.stack.rearranged import unstack_unequal
from ..nn.layer.walk import check_module
from ..nn.low_rank import Adapter, note_trained
from ..storage.hub import checkpoint_path
from ..storage.save.beside import settled
from ..storage.save.durable import target_path
from ..storage.strict_json import load_json
from .model import adapted, attached, update_dtype
from .peft import (
    CONFIG,
    OLD_WEIGHTS,
    WEIGHTS,
    AdapterSettings,
    Base,
    Update,
    base_of,
    config_of,
    is_tied,
    is_update,
    layer_names,
    read_settings,
    trained_parts,
    updates_in,
    written,
)
from .split import join_updates

M = TypeVar("M", bound=Module)


def save(path: str | os.PathLike[str], model: Module, *, base: str | None = None) -> Path:
    """Writes a model's LoRA weights as a directory that PEFT and :func:`load` open.

    Base weights are written only if they are trained: biases (``bias`` of :func:`maxjax.lora.add`), the modules that
    :func:`load` replaced, and those with a weight that :func:`maxjax.partition` put among the trained ones; and the
    head of a model for texts, tokens or answers, trained or not, as PEFT expects it, unless it has LoRA weights or is
    quantised.

    Tensors have the names of the modules of transformers 5, where these differ from those in the base model's files: in
    the model that PEFT opens the adapter with, which is the whole one if the base model was loaded from a multimodal
    checkpoint. An update of a layer that transformers has as several layers, such as queries, keys and values, is
    written for each.

    If the directory already holds an adapter, that one stays valid until the new one is complete. If several
    processes share the model's mesh, all of them must make the call.

    Args:
        path: path of the directory, made if it does not exist.
        model: a model with LoRA weights.
        base: name or path of the base model, from which PEFT's ``AutoPeftModel`` loads it; None takes it from the
            model's configuration, if that has it.

    Returns:
        The path of the directory.

    Raises:
        UserInputError: the model has no LoRA weights, is itself a single linear layer, or has trained weights that
            PEFT's files cannot hold, such as those of layers with LoRA weights; the message names one.
        ValueError: a weight has no value.
        CheckpointSaveError, CheckpointAccessError, CheckpointBusyError: the files cannot be written; earlier ones stay.

    Example:
        >>> import tempfile, jax, maxjax
        >>> from maxjax import nn
        >>> model = maxjax.init(nn.Sequential([nn.Linear(4, 8)]), jax.random.key(0))
        >>> model = maxjax.lora.add(model, rank=2, key=jax.random.key(1))
        >>> path = maxjax.lora.save(tempfile.mkdtemp(), model)
        >>> sorted(file.name for file in path.iterdir())
        ['adapter_config.json', 'adapter_model.safetensors', 'maxjax_digests.json']
    """
    check_module(model, "lora.save")
    found = adapted(model)
    if found[0].names == ("",):
        raise UserInputError(
            "the model is a linear layer itself, and PEFT's files name layers inside of a model: save it in one"
        )
    with Lockstep("lora.save", shardings_of(model)) as together:
        directory = target_path(path)
        gathering = Gathering(together)
        names = layer_names(model, found)
        weights = model.raw_state_dict()
        trained = trained_parts(model, found)
        updates = [f"{n}.{p}" for one in found for n in one.names for p in one.parts.values()]
        saved = [*updates, *trained.names]
        data = written(model, found, {n: weight_data(n, weights[n], gathering) for n in saved})
        tensors = [outgoing_data(one, name) for name, one in data.items()]
        config = json_bytes(config_of(model, found, names, trained, base))
        if together.is_shared:
            together.agree(config=config, tensors=sorted(data), **model_facts(model))
        if together.is_leader:
            write_with(directory, WEIGHTS, tensors, {CONFIG: config}, METADATA)
            gathering.end()
        else:
            gathering.follow()
        together.finish()
    return Path(directory)


def load(model: M, path: str | os.PathLike[str], *, dtype: Any = None) -> M:
    """Returns a new model: the base model with an adapter that PEFT or :func:`save` wrote.

    Modules that were trained completely (``modules_to_save``) and trained biases replace those of the base model. The
    updates of several layers that are one layer here become one update, of the sum of their ranks.

    Args:
        model: the base model; it is not changed, and shares its arrays with the result. It may be quantised,
            stacked and on a mesh.
        path: directory with ``adapter_config.json`` and ``adapter_model.safetensors`` or ``adapter_model.bin``, or a
            name on the hub (``org/name``).
        dtype: dtype of A and B; None keeps that of the file.

    Raises:
        UserInputError: the model has LoRA weights already, or ``dtype`` is not a float of 16 bits or more.
        CheckpointError: a file is missing, corrupt or does not fit the model; the subclass says which, and the
            message where.
        UnsupportedModelError: the adapter uses another method than LoRA, or a form of LoRA that is
            not supported; the message names the setting.
    """
    check_module(model, "lora.load")
    kind = None if dtype is None else update_dtype(dtype)
    return settled(lambda: _load(model, Path(checkpoint_path(path)), kind))


class AdapterFile(NamedTuple):
    """What the files of an adapter hold, by the model's names.

    Attributes:
        path: path of the file of the weights.
        values: its LoRA weights, of all layers that it names.
        adapters: the settings of each layer's update, by the layer's name.
        base: its weights of the base model.
        dtypes: the dtypes of its LoRA weights.
        has_dora: whether the norms of rows are trained.
    """

    path: str
    values: dict[str, WeightData]
    adapters: dict[str, Adapter]
    base: Base
    dtypes: set[DType]
    has_dora: bool


@contextlib.contextmanager
def opened(model: Module, directory: Path) -> Iterator[AdapterFile]:
    """Opens an adapter for a model; the values can be read in the context.

    Raises:
        CheckpointError, UnsupportedModelError: as for :func:`load`.
    """
    file = next(
        (directory / n for n in (WEIGHTS, OLD_WEIGHTS) if os.path.isfile(directory / n)), None
    )
    if file is None:
        raise CheckpointMissingError(
            f"no {WEIGHTS}", path=directory, hint=f"An adapter is a directory with it and {CONFIG}."
        )
    with load_weights(file) as weights:
        with weights._beside.files() as folder:
            settings = read_settings(
                load_json(folder / CONFIG, option="config_bytes"), os.fspath(directory / CONFIG)
            )
        # With bias="all" PEFT also writes what a module of modules_to_save was before the training.
        data = {n: one for n, one in weights._named_data() if ".original_module." not in n}
        updates = updates_in(model, data, os.fspath(file))
        base = base_of(
            model,
            {n: one for n, one in data.items() if not is_update(n)},
            settings,
            os.fspath(file),
        )
        tables = any(one.part.startswith("lora_embedding") for one in updates.values())
        if settings.tied and tables and is_tied(model):
            raise UnsupportedModelError(
                f"{directory / CONFIG}: ensure_weight_tying=True is not supported for an update of the table that is "
                "tied to the head"
            )
        _check_base(model, base.copies, os.fspath(file))
        for name, one in updates.items():
            shape, expected = data[name].shape, settings.adapter(one.theirs).rank
            rank = int(shape[0 if "_A" in one.part else -1]) if shape else 0
            if one.part != "lora_magnitude_vector" and rank != expected:
                raise CheckpointMismatchError(
                    "has another rank than adapter_config.json says", path=file, tensor=name,
                    expected=expected, found=rank,
                )  # fmt: skip
        values, adapters = _joined(updates, data, settings, os.fspath(file))
        dtypes = {data[name].dtype for name in updates}
        yield AdapterFile(os.fspath(file), values, adapters, base, dtypes, settings.dora)


def _load(model: M, directory: Path, kind: DType | None) -> M:
    with opened(model, directory) as adapter:
        if kind is None and len(adapter.dtypes) > 1:
            hint = "Pass dtype=: the dtype of the adapter."
            raise CheckpointMismatchError("tensors of several dtypes", path=adapter.path, hint=hint)
        base = adapter.base
        new = attached(model, adapter.adapters, kind or next(iter(adapter.dtypes)))
        new = jax.tree.map(
            lambda leaf: leaf, unstack_unequal(new, dict.fromkeys(base.replaced, True))
        )
        note_trained(new, base.replaced)
        check_layers(adapter, {n: one.parts.values() for one in adapted(new) for n in one.names})
        values = {**base.replaced, **base.biases, **adapter.values}
        try:
            Module.load_state_dict(new, values, strict=False, cast=True)
        except ValueError as error:
            raise CheckpointMismatchError(str(error).removesuffix("."), path=adapter.path) from None
    return new


def check_layers(adapter: AdapterFile, layers: Mapping[str, Iterable[str]]) -> None:
    """Checks that an adapter has the LoRA weights of these layers of a model, and no others.

    Args:
        layers: the names of the LoRA weights of each layer, by the layer's name.

    Raises:
        CheckpointMismatchError: a layer is no linear layer or embedding, or a tensor is missing or unknown.
    """
    if without := adapter.adapters.keys() - layers.keys():
        raise CheckpointMismatchError(
            "LoRA weights for a layer that is not one of this model's linear layers and embeddings",
            path=adapter.path,
            tensor=min(without),
        )
    parts = {f"{name}.{part}" for name, each in layers.items() for part in each}
    if parts != adapter.values.keys():
        is_missing = bool(parts - adapter.values.keys())
        what = "a tensor is missing" if is_missing else "its layer has no such LoRA weight"
        use = ", and use_dora" if adapter.has_dora else ", and not use_dora"
        raise CheckpointMismatchError(
            f"{what} (adapter_config.json has peft_type LORA{use})",
            path=adapter.path,
            tensor=min(parts - adapter.values.keys() or adapter.values.keys() - parts),
        )


def _joined(
    updates: Mapping[str, Update],
    data: Mapping[str, WeightData],
    settings: AdapterSettings,
    path: str,
) -> tuple[dict[str, WeightData], dict[str, Adapter]]:
    """The LoRA weights by the model's names, and the settings of each layer.

    Raises:
        CheckpointMismatchError: the updates of several layers of transformers' model are none of the one layer here.
    """
    found: dict[str, WeightData] = {}
    adapters: dict[str, Adapter] = {}
    layers: dict[str, dict[str, Update]] = {}
    for name, one in updates.items():
        layers.setdefault(one.layer, {})[name] = one
    for layer, tensors in layers.items():
        counts = {one.place[1] for one in tensors.values()}
        parts: dict[int, dict[str, WeightData]] = {}
        settings_of: dict[int, Adapter] = {}
        for name, one in tensors.items():
            parts.setdefault(one.place[0], {})[one.part] = data[name]
            settings_of[one.place[0]] = settings.adapter(one.theirs)
        if len(counts) > 1:
            raise CheckpointMismatchError(
                "updates of this layer and of its parts", path=path, tensor=layer
            )
        if counts == {1}:
            values, adapters[layer] = parts[0], settings_of[0]
        else:
            values, adapters[layer] = join_updates(layer, parts, settings_of, counts.pop(), path)
        found |= {f"{layer}.{part}": one for part, one in values.items()}
    return found, adapters


def _check_base(model: Module, copies: Mapping[str, WeightData], path: str) -> None:
    """Checks that the copies of base weights in an adapter, by the model's names, are equal to the model's.

    Raises:
        CheckpointMismatchError: a copy has other values: it was trained, or the adapter is for another base model.
    """
    weights = model.raw_state_dict()
    for name, copy in copies.items():
        weight = weights[name]
        if weight.is_lazy:
            continue
        if copy.dtype.is_float() and weight.dtype.is_float():
            copy = copy.astype(weight.dtype)
        if not same_content(copy, weight_data(name, weight)):
            raise CheckpointMismatchError(
                f"has a copy of '{name}' with other values than the model's: trained base weights are not supported",
                path=path, tensor=name,
            )  # fmt: skip
