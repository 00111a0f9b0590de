"""Converts Hugging Face's tensors to the names, layouts and types of a GGUF file.

It applies the tables of ``names`` in reverse. Tensors are lazy: to read a part of a tensor, only the
rows of that part are read, and stacked experts are read one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ....dtype import DType
from ....errors import CheckpointFormatError, CheckpointMismatchError, some
from ....graph.weights import WeightData
from ....graph.weights.same import same_values
from ....storage.boxes import whole
from ...find import find_family
from ...names import Names
from ..config.families import FamilyConfig, read_config
from ..layouts import Layout
from ..names import ARCHITECTURES, Entry, Source, TensorNames, check_shape
from ..sources import Relaid, Stacked, read_box
from ..table import GGUFTable
from .read import DTYPES_KEY, EXACT_KEY, NARROW
from .types import Traits, is_wide

# Learned weights of a model without a head that llama.cpp does not use.
_UNUSED = {
    "bert": re.compile(r"pooler\..*"),
    "jina-bert-v3": re.compile(r"pooler\..*"),
    "modern-bert": re.compile(r"head\..*|classifier\..*"),
}


class GGUFTensors(NamedTuple):
    """The result of :func:`gguf_tensors`.

    Attributes:
        tensors: tensors by name in the GGUF file, in the order of the file.
        metadata: maxjax's own metadata: the list of widened tensors, and exact values of tensors
            that lost bits.
        left_out: names of tensors that are not in the file.
    """

    tensors: dict[str, WeightData]
    metadata: dict[str, Any]
    left_out: tuple[str, ...]


def gguf_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, WeightData], *, path: Any = None
) -> GGUFTensors:
    """The tensors of a checkpoint by the names and in the layouts of a GGUF file.

    Values stay quantised if the layout only reorders rows; otherwise they are dequantised. Vectors,
    norms, routers and tables of positions become float32, as llama.cpp requires. The metadata lists
    those that were narrower, so that ``hf_tensors`` restores their dtype. All other tensors keep their
    dtype. For Gemma's norms GGUF holds 1 + w in float32, which loses bits of w below 2⁻²⁴. So the norms
    are read here, and a norm with such bits is stored in the metadata too (in bfloat16, only values
    under 2⁻¹⁶ have such bits). The same is done for ``A_log`` of recurrent layers, of which GGUF holds
    ``-exp(A_log)``. A head that the configuration ties is left out if its values equal the embedding table's.

    Args:
        config: content of ``config.json``.
        tensors: tensors by their names in Hugging Face's checkpoints.
        path: path of the checkpoint, for messages.

    Raises:
        UnsupportedModelError: the architecture has no table.
        CheckpointMismatchError: tensors are not in the table, or are missing; the message names
            them.
        CheckpointFormatError: a setting is missing or wrong, or a shape does not fit its layout.

    Example:
        >>> config = {"model_type": "gpt2", "vocab_size": 2, "n_embd": 4, "n_layer": 1, "n_head": 2}
        >>> data = WeightData.from_numpy(np.ones((2, 4), np.float32), "wte.weight")
        >>> gguf_tensors(config, {"wte.weight": data}).tensors
        Traceback (most recent call last):
        ...
        maxjax.errors.CheckpointMismatchError: tensors of layers 0 to 0 are missing. Check
        that the weights and the configuration belong to the same model.
    """
    model = read_config(config, path=path)
    architecture, tied = model.architecture, model.settings.get("tie_word_embeddings") is True
    family_names = _names_of(config, path)
    spelled = {family_names.written_name(name): name for name in tensors}
    left_out = [name for name in tensors if family_names.model_name(name) is None]
    tensors = family_names.canonical(tensors)
    table = model.table
    if table is not None and table.split is not None:
        tensors = table.split(model.config, tensors)
    metadata, narrow = {}, []
    if table is not None and table.numbers:
        tensors, metadata, narrow = _listed(table, model, tensors, path)
    names = TensorNames(ARCHITECTURES[architecture], model)
    places: dict[str, Entry] = {}
    unknown = []
    embedding_name = ARCHITECTURES[architecture]["token_embd"][0].name + ".weight"
    embedding = tensors.get(embedding_name)
    head = "classifier.weight"
    has_head = head in tensors and names.entry_of(head) is not None
    unused = None if has_head else _UNUSED.get(architecture)
    for name, data in tensors.items():
        is_tied = tied and name == "lm_head.weight"
        # A file may hold either of the two.
        place = names.entry_of(embedding_name if is_tied and embedding is None else name)
        is_copy = is_tied and embedding is not None and same_values(data, embedding)
        if is_copy or (unused is not None and unused.fullmatch(name)):
            left_out.append(spelled.get(name, name))
        elif place is None:
            unknown.append(spelled.get(name, name))
        else:
            places[name] = place
    if unknown:
        raise CheckpointMismatchError(
            f"tensors that a {architecture} model in a GGUF file does not have: {some(unknown)}",
            path=path,
        )
    _check_layers(places.values(), model, path)
    found, widened = _file_tensors(tensors, places, model, path)
    for name, divisors in model.divisors(path).items():
        found[name] = WeightData.from_numpy(divisors, name)
    metadata |= {DTYPES_KEY: widened + narrow} if widened + narrow else {}
    for name, place in places.items():
        exact = None if place.layout.keeps_values else _rounded(tensors[name], place.layout.back())
        if exact is not None:
            metadata[EXACT_KEY + name] = exact
    return GGUFTensors(found, metadata, tuple(left_out))


def _names_of(config: Mapping[str, Any], path: Any) -> Names:
    """The table of names by which GGUF files are made: without heads that these do not have, and without prefixes."""
    family = find_family(config, path=path)
    return (family.body or family).names.of_body()


def gguf_places(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Entry]:
    """The places in a GGUF file of those tensors of a checkpoint that have one.

    Args:
        config: content of ``config.json``.
        names: names in Hugging Face's checkpoints.

    Raises:
        UnsupportedModelError: the architecture has no table.
    """
    model = read_config(config)
    table = TensorNames(ARCHITECTURES[model.architecture], model)
    family_names = _names_of(config, None)
    places = {}
    for name in names:
        written = family_names.written_name(name)
        place = None if written is None else table.entry_of(written)
        if place is not None:
            places[name] = place
    return places


def gguf_shapes(
    config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]
) -> tuple[dict[str, str], dict[str, tuple[int, ...]], Traits]:
    """The arguments of :func:`~.types.encodings` for a checkpoint: names, shapes and traits in a GGUF file.

    Args:
        config: content of ``config.json``.
        shapes: shapes ``[..., out, in]`` of the tensors, by Hugging Face's names.

    Returns:
        GGUF's name of each tensor that has one; the shapes by GGUF's names, with a leading axis for
        stacked experts; and the traits of the model.

    Raises:
        UnsupportedModelError: the architecture has no table.

    Example:
        >>> config = {"model_type": "llama", "vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 1,
        ...           "num_attention_heads": 2, "intermediate_size": 8}
        >>> names, shapes, model = gguf_shapes(config, {"model.layers.0.mlp.down_proj.weight": (4, 8)})
        >>> names, shapes, model.layers
        ({'model.layers.0.mlp.down_proj.weight': 'blk.0.ffn_down.weight'}, {'blk.0.ffn_down.weight': (4, 8)}, 1)
    """
    model = read_config(config)
    names, found = {}, {}
    for name, place in gguf_places(config, shapes).items():
        names[name] = place.tensor
        found[place.tensor] = (*(() if place.expert < 0 else (model.experts,)), *shapes[name])
    traits = Traits.of(model.architecture, model.layers, model.experts, model.heads, model.kv_heads)
    return names, found, traits


def _rounded(data: WeightData, layout: Layout) -> np.ndarray | None:
    """The exact values, or 16-bit patterns, of a vector that loses bits in a layout; None if none are lost."""
    if data.is_packed or len(data.shape) != 1:
        return None
    values, _ = read_box(data, whole(tuple(map(int, data.shape))))
    is_narrow = data.dtype in NARROW.values()
    wide = values.astype(np.float32) if is_narrow else values
    again = layout.back().apply(layout.apply(wide)).astype(values.dtype)
    if again.tobytes() == values.tobytes():
        return None
    return values.view(np.uint16) if is_narrow else values


def _listed(
    table: GGUFTable, model: FamilyConfig, tensors: Mapping[str, WeightData], path: Any
) -> tuple[dict[str, WeightData], dict[str, Any], list[str]]:
    """Moves the tensors of a single number to metadata: (other tensors, lists by key, dtypes of narrower ones)."""
    rest, lists, narrow = dict(tensors), {}, []
    for key, (part, shape) in table.numbers.items():
        lists[key] = []
        for layer in range(model.config.num_hidden_layers):
            name = table.layer.replace("*", str(layer)) + part
            if name not in tensors:
                raise CheckpointMismatchError(f"tensor '{name}' is missing", path=path)
            data = rest.pop(name)
            if (found := tuple(map(int, data.logical_shape))) != shape:
                raise CheckpointFormatError(
                    "not one number", path=path, tensor=name, expected=shape, found=found
                )
            lists[key].append(float(read_box(data, whole(shape))[0].reshape(())))
            narrow += [f"{name}={kind}" for kind, dtype in NARROW.items() if dtype is data.dtype]
    return rest, lists, narrow


def _check_layers(places: Any, model: FamilyConfig, path: Any) -> None:
    """Checks that all layers of a kind have the same tensors, and that stacks have all experts."""
    count = model.config.num_hidden_layers
    layers: dict[int, set[tuple[str, int]]] = {i: set() for i in range(count)}
    for place in places:
        if place.layer >= 0:
            layers[place.layer].add(
                (place.tensor.replace(f"blk.{place.layer}.", "", 1), place.expert)
            )
    empty = [i for i, names in layers.items() if not names]
    if empty:
        raise CheckpointMismatchError(
            f"tensors of layers {empty[0]} to {empty[-1]} are missing", path=path
        )
    kinds = model.layer_kinds
    alike = {kind: set.union(*(layers[i] for i in layers if kinds[i] == kind)) for kind in kinds}
    for every in alike.values():
        stacks = {name for name, expert in every if expert >= 0}
        every |= {(name, i) for name in stacks for i in range(model.experts)}
    for i, names in layers.items():
        if missing := sorted(alike[kinds[i]] - names):
            absent = [
                f"blk.{i}.{name}" + (f" of expert {e}" if e >= 0 else "") for name, e in missing
            ]
            raise CheckpointMismatchError(f"layer {i} lacks {some(absent)}", path=path)


# --- values -------------------------------------------------------------------------------------


def _file_tensors(
    tensors: Mapping[str, WeightData],
    places: Mapping[str, Entry],
    model: FamilyConfig,
    path: Any,
) -> tuple[dict[str, WeightData], list[str]]:
    """(The file's tensors, "name=dtype" of each tensor that was widened)."""
    groups: dict[str, list[str]] = {}
    for name in sorted(places, key=lambda name: places[name]):
        groups.setdefault(places[name].tensor, []).append(name)
    sources: dict[str, WeightData] = {}
    moved: dict[str, Source] = {}
    stacks: dict[str, list[WeightData]] = {}
    widened = []
    for new, names in groups.items():
        each = []
        for name in names:
            data = tensors[name]
            kind = next((code for code, dtype in NARROW.items() if dtype is data.dtype), None)
            if kind and is_wide(new, tuple(map(int, data.shape))):
                # Listed under the name that hf_tensors will use.
                widened.append(f"{name}={kind}")
                data = data.astype(DType.float32)
            each.append(data)
        if places[names[0]].expert >= 0:
            stacks[new] = _checked_stack(new, names, each, path)
        elif len(each) > 1:
            raise CheckpointFormatError(f"{some(names)} are both the tensor {new!r}", path=path)
        else:
            sources[new], moved[new] = each[0], Source(new, places[names[0]].layout.back())
    return _relaid(groups, sources, moved, stacks, path), widened


def _relaid(
    order: Any,
    sources: Mapping[str, WeightData],
    moved: Mapping[str, Source],
    stacks: Mapping[str, list[WeightData]],
    path: Any,
) -> dict[str, WeightData]:
    """The tensors under their new names, in order."""
    relaid, stacked = Relaid(sources, moved), Stacked(stacks)
    found = {}
    for name in order:
        source = stacked if name in stacks else relaid
        first = stacks[name][0] if name in stacks else sources[name]
        if name in moved:
            check_shape(name, moved[name].layout, tuple(map(int, first.logical_shape)), path)
        dtype, shape = source.dtype_and_shape(name)
        packed = first.quantization_encoding if dtype == np.uint8 else None
        found[name] = WeightData.lazy(source, name, DType.of(dtype), shape, packed)
    return found


def _checked_stack(
    name: str, names: list[str], each: list[WeightData], path: Any
) -> list[WeightData]:
    """The experts of a stack, after a check that all have the same dtype and shape."""
    first = each[0]
    for other_name, other in zip(names, each, strict=True):
        same = (other.dtype, other.quantization_encoding, tuple(map(int, other.shape)))
        if same != (first.dtype, first.quantization_encoding, tuple(map(int, first.shape))):
            raise CheckpointMismatchError(
                f"the experts of {name!r} differ: '{names[0]}' is {first!r}, "
                f"'{other_name}' {other!r}",
                path=path,
            )
    return each
