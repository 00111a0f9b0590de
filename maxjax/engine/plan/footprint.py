"""Footprint: the bytes that the weights and the KV cache of a model take on each device of a mesh.

Only shapes and dtypes are read, except to find out whether an output head is the embedding table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from ...dtype import DType
from ...errors import (
    CheckpointFormatError,
    CheckpointMissingError,
    UnsupportedModelError,
    UserInputError,
)
from ...graph.placement.mesh import axis_of, check_mesh
from ...graph.placement.specs import batch_axes, by_pattern, mesh_of, place
from ...graph.placement.split import Placed
from ...graph.quantization import QuantizationEncoding
from ...graph.weights import FileWeights, GGUFWeights
from ...kernels.explicit import parts_over
from ...models import LanguageModel, PretrainedModel, build, config_beside, find_family, tensors
from ...models import name_rules as names
from ...models.config import read_config
from ...models.gguf import config_of
from ...models.parts.config import LanguageModelConfig, groups_of_config
from ...nn.kv_cache.kinds import KeysValues, LatentVectors
from ...nn.kv_cache.layout import cache_layout
from ...nn.layer.place import UNKNOWN_SIZES, plan_places
from ...nn.layer.walk import Walk
from ..batching.pages import SlidingWindow

CHUNK = 512
"""The tokens of prompts that one run of ``read`` takes, as ``maxjax.generate`` has it by default."""
# The number of tokens of a page, of which that on TPUs is a multiple.
_PAGE_SIZE = 64


class TensorGroup(NamedTuple):
    """Tensors with the same shape, dtype and sharding.

    Attributes:
        names: the names of the tensors.
        shape, dtype: the stored shape and dtype of one tensor.
        spec: the PartitionSpec: for each dimension, the mesh axes that it is sharded over.
        parts: the number of shards of one tensor; 0 if it is in host memory.
        why: the reason for the sharding, as a phrase.
        encoding: the encoding of a quantised tensor, whose ``shape`` is in bytes; else None.
    """

    names: Sequence[str]
    shape: tuple[int, ...]
    dtype: DType
    spec: PartitionSpec
    parts: int
    why: str
    encoding: QuantizationEncoding | None = None

    @property
    def kind(self) -> str:
        """The name of the encoding or the dtype."""
        return self.dtype.name if self.encoding is None else self.encoding.value

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """The shape in elements, also of a quantised tensor."""
        return self.shape if self.encoding is None else self.encoding.logical_shape(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one tensor; 4-bit dtypes take half a byte per element."""
        return -(-math.prod(self.shape) * self.dtype.size_in_bits // 8)

    @property
    def nbytes_per_device(self) -> int:
        """Bytes of one tensor on one device."""
        return -(-self.nbytes // self.parts) if self.parts else 0


class Reading(NamedTuple):
    """What a configuration says about the weights that one decode step reads.

    Attributes:
        vocab_size: number of rows of the embedding table.
        hidden_size: width of the activations between layers.
        experts, chosen: number of experts of a layer, and of those that a token chooses; 0: none.
        transposed: whether linear layers have weights ``[in, out]``.
        max_length: largest number of tokens of a sequence, or None.
    """

    vocab_size: int = 0
    hidden_size: int = 0
    experts: int = 0
    chosen: int = 0
    transposed: bool = False
    max_length: int | None = None

    @classmethod
    def of(cls, config: Any) -> Reading:
        """The Reading of a configuration: the content of ``config.json``, or a dataclass.

        Example:
            >>> Reading.of({"n_embd": 8, "vocab_size": 100, "model_type": "gpt2", "n_positions": 64})
            Reading(vocab_size=100, hidden_size=8, experts=0, chosen=0, transposed=True, max_length=64)
        """
        settings = names.text_part(config)
        number = lambda *keys: names.count(settings, keys) or 0
        model_type = settings.get("model_type", getattr(config, "model_type", None))
        return cls(
            number("vocab_size"), number(*names.KEYS["hidden"]),
            number("num_experts", "num_local_experts", "n_routed_experts"),
            number("num_experts_per_tok"), model_type in names.TRANSPOSED,
            number("max_position_embeddings", "n_positions") or None,
        )  # fmt: skip

    def share(self, name: str, batch: int, tied: bool) -> Fraction | float:
        """The share of a weight that a decode step for ``batch`` sequences reads.

        An embedding table that is not the output head is read one row per sequence. Of experts it is the mean
        share that some sequence chooses, if every expert is equally likely and sequences choose independently.

        Example:
            >>> Reading(100, 8, experts=8, chosen=2).share("mlp.experts.0.up_proj.weight", 2, False)
            0.4375
        """
        if ".experts." in name and self.experts:
            return 1 - (1 - min(1.0, self.chosen / self.experts)) ** batch
        layer = names.layer_of(name)
        if layer in names.UNTIED_TABLES or (layer in names.TABLES and not tied):
            return Fraction(min(self.vocab_size, batch), max(self.vocab_size, 1))
        return Fraction(1)


@dataclass(frozen=True)
class Footprint:
    """A model or checkpoint whose size can be computed for any mesh.

    Attributes:
        basis: the origin of the sharding rules, as text.
        tensors_of: a function of (mesh or None, dtype of floats or None) that returns all tensors.
        attention: a function that returns the attention layers; it raises UserInputError if they
            are not known.
        encoder: whether the model is an encoder, which has no KV cache.
        mesh: the mesh on which the model is now, or None.
        devices: the number of devices on which the model is now.
        notes: further remarks for the user.
        reading: what the configuration says about the weights that a decode step reads.
        model: a function of (mesh, dtype of floats or None) that returns the model as it would be
            on the mesh, without values or with them; None if maxjax has no such model.
    """

    basis: str
    tensors_of: Callable[[Any, DType | None], list[TensorGroup]]
    attention: Callable[[], list[names.Heads | names.Fixed]]
    encoder: bool = False
    mesh: Any = None
    devices: int = 1
    notes: tuple[str, ...] = ()
    reading: Reading = Reading()
    model: Callable[[Any, DType | None], Any] | None = None


# --- Modules ----------------------------------------------------------------------------------


def of_module(module: Any, rules: Mapping[str, Any] | None = None) -> Footprint:
    """The footprint of a Module: sharded by its rules on a mesh; without a mesh, as it is now."""
    _, leaves, _ = Walk(module, stacked=True).owners()
    places = [_sharding_of(holder) for _, holder, _ in leaves]
    shardings = [where for where in places if where is not None]
    mesh = mesh_of(shardings)
    devices = max((len(where.device_set) for where in shardings), default=1)

    def tensors_of(on: Any, dtype: DType | None) -> list[TensorGroup]:
        if on is not None:
            return _as_planned(module, on, rules, dtype)
        return [_as_placed(name, holder, dtype) for name, holder, _ in leaves]

    def as_it_is(on: Any, dtype: DType | None) -> Any:
        if dtype is not None:
            raise UserInputError(
                "a Module is compiled as it is: leave dtype out, or plan its checkpoint"
            )
        return module

    return Footprint(
        "where Module.to placed it" if mesh is not None else "the model's own rules",
        tensors_of, lambda: _attention_of(module), _is_encoder(module), mesh, devices,
        reading=Reading.of(getattr(module, "config", None)), model=as_it_is,
    )  # fmt: skip


def _as_planned(module: Any, mesh: Any, rules: Any, dtype: DType | None) -> list[TensorGroup]:
    """The tensors with the shardings that ``module.to(mesh, rules=rules)`` would give them."""
    return [
        TensorGroup(one.holder.spec.names(one.name), one.shape, _dtype(one.holder, dtype),
             one.placed.spec, _parts((*one.placed.spec, one.placed.split), mesh), one.placed.why,
             one.holder.spec.packing)
        for one in plan_places(module, mesh, None, rules)
    ]  # fmt: skip


def _sharding_of(holder: Any) -> Any:
    """The Sharding that was chosen for a leaf, or that of its array; None if it has neither."""
    where = holder.spec.leaf_sharding if holder.spec.spans else holder.spec.sharding
    return where or getattr(holder.leaf, "sharding", None)


def _as_placed(name: str, holder: Any, dtype: DType | None) -> TensorGroup:
    """A leaf with its present sharding."""
    known = holder.spec.is_static
    shape = tuple(n if isinstance(n, int) else 0 for n in holder.spec.sizes)
    where, spec, parts = _sharding_of(holder), PartitionSpec(), 1
    why = holder.spec.why if known else UNKNOWN_SIZES
    if where is not None and math.prod(shape):
        layers = holder.spec.lead
        parts = math.prod((*layers, *shape)) // math.prod(where.shard_shape((*layers, *shape)))
        spec = PartitionSpec(*tuple(getattr(where, "spec", ()))[len(layers) :])
        if where.memory_kind not in (None, "device"):
            parts, why = 0, f"{why}; in host memory ({where.memory_kind})".lstrip("; ")
    return TensorGroup(
        holder.spec.names(name), shape, _dtype(holder, dtype), spec, parts, why, holder.spec.packing
    )


def _dtype(holder: Any, override: DType | None) -> DType:
    leaf = getattr(holder.leaf, "dtype", None)
    # JAX without x64 has no 64-bit arrays.
    found = DType.of(jax.dtypes.canonicalize_dtype(holder.spec.dtype.np) if leaf is None else leaf)
    return override if override is not None and found.is_float() else found


def _parts(spec: Iterable[Any], mesh: Any) -> int:
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry)
    return math.prod(mesh.shape[axis] for entry in entries for axis in entry)


def _is_encoder(module: Any) -> bool:
    return isinstance(module, PretrainedModel) and module.family.model_type in names.ENCODERS


def _attention_of(module: Any) -> list[names.Heads | names.Fixed]:
    found = (getattr(layer, "cached", None) for _, layer in module.named_modules())
    if kinds := [kind for kind in found if isinstance(kind, KeysValues)]:
        return [_heads_of(1, kind.query_heads or kind.heads, kind) for kind in kinds]
    config = getattr(module, "config", None)
    if isinstance(config, LanguageModelConfig):
        return _kept_by(config)
    return _attention_from_config(config, f"{type(module).__name__} has no AttentionWithRope, and")


def _heads_of(layers: int, query_heads: int, kind: KeysValues) -> names.Heads:
    value = 0 if isinstance(kind, LatentVectors) else kind.width
    return names.Heads(layers, query_heads, kind.heads, kind.width, value, kind.window)


def _kept_by(config: Any) -> list[names.Heads | names.Fixed]:
    """What the layers of a decoder cache: KV heads for each token, or a state for each sequence."""
    found: list[names.Heads | names.Fixed] = []
    groups = groups_of_config(config)
    for layers, kind in ((group.layers, group.kind) for group in groups.values()):
        if isinstance(kind, KeysValues):
            found.append(_heads_of(layers, config.num_attention_heads, kind))
        else:
            found += [
                names.Fixed(layers, one.shape, one.axis, DType.of(one.dtype)) for one in kind.each
            ]
    return found


# --- checkpoints ------------------------------------------------------------------------------


def of_checkpoint(weights: FileWeights, rules: Mapping[str, Any] | None = None) -> Footprint:
    """The footprint of a checkpoint: by its model's rules, or by tensor names for unknown models."""
    try:
        if isinstance(weights, GGUFWeights):
            return _of_gguf(weights, rules)
        with weights._beside.files() as folder:
            config = read_config(config_beside(folder), folder)
    except CheckpointMissingError:
        return _of_names(weights, None, rules)
    try:
        find_family(config)
        return _of_model(weights, config, rules)
    except UnsupportedModelError:
        pass
    except CheckpointFormatError:
        if "architectures" in config or "model_type" in config:
            raise
    return _of_names(weights, config, rules)


def _of_gguf(weights: GGUFWeights, rules: Any) -> Footprint:
    """The footprint of a GGUF file, whose metadata is the config; by names if it is unknown."""
    try:
        config = config_of(weights)
    except UnsupportedModelError:
        return _of_names(weights, None, rules)
    try:
        find_family(config)
    except UnsupportedModelError:
        return _of_names(weights, config, rules)
    return _of_model(weights, config, rules)


def _of_model(weights: FileWeights, config: Mapping[str, Any], rules: Any) -> Footprint:
    # Built as by ``load(dtype=...)``, which may keep a wider dtype for norms.
    model = build(weights, config)
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", None)
    make = cache(lambda dtype: build(weights, config, dtype, tie=tied))

    def tensors_of(mesh: Any, dtype: DType | None) -> list[TensorGroup]:
        made = model if dtype is None else make(dtype)
        return of_module(made, rules).tensors_of(mesh, None)

    def as_loaded(mesh: Any, dtype: DType | None) -> Any:
        made: Any = build(weights, config, dtype, stacked=False, tie=tied)
        return made.stack_for(mesh) if isinstance(made, LanguageModel) else made

    return Footprint(
        "the model's own rules", tensors_of, lambda: _attention_of(model), _is_encoder(model),
        reading=Reading.of(getattr(model, "config", None)), model=as_loaded,
    )  # fmt: skip


def _of_names(weights: FileWeights, config: Mapping[str, Any] | None, rules: Any) -> Footprint:
    table = names.rules(config)
    rule_by_name = cache(lambda name: by_pattern(table, name)[1])
    groups: dict[tuple[Any, ...], tuple[list[str], Any]] = {}
    known = config is not None or not isinstance(weights, GGUFWeights)
    found_tensors = tensors(weights) if known else dict(weights._named_data())
    for tensor, data in found_tensors.items():
        pattern = names.generic(tensor)
        given, rule = by_pattern(rules, tensor) if rules else (False, None)
        if not given:
            rule = rule_by_name(pattern)
        encoding = data.quantization_encoding
        shape, logical = (tuple(map(int, s)) for s in (data.shape, data.logical_shape))
        key = (pattern, shape, logical, data.dtype, encoding, given, id(rule))
        groups.setdefault(key, ([], rule))[0].append(tensor)

    def tensors_of(mesh: Any, dtype: DType | None) -> list[TensorGroup]:
        if mesh is not None and rules is None:
            check_mesh(mesh)
        found = []
        for (_, shape, logical, own, encoding, given, _), (members, rule) in groups.items():
            block, stored, packing = (encoding.elements_per_block if encoding else 1), own, encoding
            if dtype is not None and (encoding or own.is_float()):
                shape, block, stored, packing = logical, 1, dtype, None  # dequantised, or cast
            placed = _placed(members[0], logical, rule, mesh, given, block)
            parts = 1 if mesh is None else _parts(placed.spec, mesh)
            found.append(
                TensorGroup(members, shape, stored, placed.spec, parts, placed.why, packing)
            )
        return found

    note = () if config is not None else (
        "there is no config.json: the number of heads is not known, and the rows of queries, keys "
        "and values are sharded without regard to heads",)  # fmt: skip
    settings = config or {}
    encoder = (
        settings.get("model_type") in names.ENCODERS and settings.get("is_decoder") is not True
    )
    return Footprint(
        "rules by tensor names", tensors_of, lambda: _attention_from_config(config, "config.json"), encoder,
        notes=note, reading=Reading.of(config),
    )  # fmt: skip


def _placed(
    name: str, shape: tuple[int, ...], rule: Any, mesh: Any, given: bool, block: int
) -> Placed:
    if mesh is None:
        return Placed(PartitionSpec(), "")
    try:
        return place(name, shape, rule, mesh, block)
    except UserInputError as error:
        if given:
            raise
        # A rule by name is a guess: it may not fit quantised values or another kind of attention.
        placed = place(name, shape, None, mesh, block)
        return Placed(placed.spec, f"{str(error).partition(': ')[2]}; {placed.why}")


def _attention_from_config(config: Any, who: str) -> list[names.Heads | names.Fixed]:
    """The attention layers that a config describes."""
    settings = names.text_part(config)
    found = names.heads(config)
    if settings.get("kv_lora_rank") or settings.get("is_encoder_decoder"):
        what = "latent attention" if settings.get("kv_lora_rank") else "an encoder with a decoder"
        raise UserInputError(
            f"the size of the KV cache of {what} is not known: leave batch= and length= out"
        )
    if None in found[: found._fields.index("window")]:
        raise UserInputError(
            f"the size of the KV cache is not known: {who} does not give the number of layers, the "
            "number of KV heads and their width (num_hidden_layers, num_key_value_heads, head_dim). "
            "Leave batch= and length= out"
        )
    return [found]


# --- the cache --------------------------------------------------------------------------------


def cache_bytes(
    layers: Sequence[names.Heads | names.Fixed], batch: int, length: int, dtype: DType, mesh: Any,
    *, reads: bool = False,
) -> tuple[int, list[str]]:  # fmt: skip
    """Bytes of the KV cache on one device, and notes on sizes that the axes of a mesh do not divide.

    Layers with a window keep its tokens, those of a piece of a prompt and a page, or all tokens if that is less. What
    pages have room for beyond ``length`` is not counted.

    Args:
        reads: whether to count what a decode step reads of it instead: of windows these tokens alone.

    Example:
        >>> mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
        >>> cache_bytes([names.Heads(3, 8, 8, 64, 64)], 2, 10, DType.bfloat16, mesh)
        (15360, [])
        >>> heads = [names.Heads(1, 8, 8, 64, 64), names.Heads(2, 8, 8, 64, 64, window=4)]
        >>> [cache_bytes(heads, 2, 10, DType.int8, mesh, reads=reads)[0] for reads in (False, True)]
        [8160, 4896]
        >>> [cache_bytes(heads, 2, length, DType.int8, mesh)[0] // 272 for length in (640, 1280)]
        [1920, 2560]
    """
    total, notes = 0, []
    sizes = {} if mesh is None else {axis: mesh.shape[axis] for axis in batch_axes(mesh, 0)}
    parts = math.prod(sizes.values())
    if batch == 1:
        notes += [f"the KV cache: one sequence does not divide by {axis}={size}, so the cache is replicated along it"
                  for axis, size in sizes.items() if size > 1]  # fmt: skip
    elif batch % parts:
        batch += -batch % parts
        notes.append(
            f"the KV cache: {parts} groups of devices divide the sequences, so it has room for {batch:,}"
        )
    for one in layers:
        if isinstance(one, names.Fixed):
            total += _fixed_bytes(one, batch, mesh)
            continue
        count, heads, kv_heads, key, value = (size or 0 for size in one[:5])
        tokens = length
        if one.window is not None:
            most = SlidingWindow(one.window, _PAGE_SIZE).most(CHUNK) * _PAGE_SIZE
            tokens = min(length, one.window if reads else most)
        kept = count * batch * kv_heads * tokens
        if mesh is not None and kept:
            layout = cache_layout(mesh, batch, heads or kv_heads, kv_heads)
            parts, what = parts_over(mesh, layout.batch), "each device has all of them"
            if layout.group == 1 or _PAGE_SIZE % layout.group == 0:
                parts *= layout.heads
                kept = (
                    kept // tokens * -(-tokens // layout.group)
                )  # those that do not divide are rounded up
                what = f"the tokens of each page are split over {layout.group} devices as well"
            if layout.group > 1:
                notes.append(
                    f"the KV cache: {kv_heads} KV heads do not divide by {layout.sizes}, so {what}"
                )
            kept //= parts
        total += kept * (key + value) * dtype.size_in_bits // 8
        if (
            dtype == DType.int8
        ):  # one float32 scale for each row of keys and of values, if there are any
            total += kept * (2 if value else 1) * DType.float32.size_in_bits // 8
    return total, list(dict.fromkeys(notes))


def _fixed_bytes(one: names.Fixed, batch: int, mesh: Any) -> int:
    """Bytes of a recurrent state on one device: sequences are split, and one axis of the state."""
    parts = 1
    if mesh is not None:
        rows, model = batch_axes(mesh, batch), axis_of(mesh, "model")
        parts = parts_over(mesh, rows)
        size = 0 if one.axis is None else one.shape[one.axis]
        if model is not None and model not in rows and size and size % mesh.shape[model] == 0:
            parts *= mesh.shape[model]
    return one.layers * batch * math.prod(one.shape) * one.dtype.size_in_bits // 8 // parts
