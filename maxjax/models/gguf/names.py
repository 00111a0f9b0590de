"""Maps GGUF's tensor names to Hugging Face's, for each architecture of llama.cpp.

There is one table per architecture, which :class:`TensorNames` reads in both directions. An entry has GGUF's name
without ``.weight`` or ``.bias``, with ``*`` for the layer and ``#`` for the expert; Hugging Face's name; and the change
of the values. The entries are no rows of ``models.names.Names``, which change parts of names and keep all others: here
a name that no entry has is an error, and changes need numbers of the metadata. Names from here are then read by the
family's ``Names``, as those of other files.

Source: ``gguf-py/gguf/tensor_mapping.py`` and ``convert_hf_to_gguf.py`` of llama.cpp.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ...errors import CheckpointFormatError, CheckpointMismatchError, some
from .by_architecture import ByArchitecture
from .layouts import Expert, Grouped, Layout, Permuted, Plus, Same, Transposed
from .metadata import MAX_EXPERTS, MAX_LAYERS, Settings, settings, unknown_architecture
from .state_layouts import Flat, Taps

# ``Rule.only`` of a GGUF tensor without a suffix. Then: names of layouts that need the number of heads, groups
# or experts, which is in the metadata.
NO_SUFFIX = "-"
QUERIES, KEYS, GROUPS = "queries", "keys", "groups"
NORM_GROUPS = "norm groups"
STACK, GATES, UPS = "stack", "gates", "ups"


class Rule(NamedTuple):
    """Hugging Face's tensor for a GGUF tensor, or with ``#`` one for each expert.

    Attributes:
        name: Hugging Face's name.
        layout: change of the values.
        only: suffix of the GGUF tensor, if Hugging Face's name has no suffix; NO_SUFFIX: the GGUF tensor
            has no suffix either.
    """

    name: str
    layout: Layout | str = Same()
    only: str = ""


@dataclass(frozen=True)
class Source:
    """The GGUF tensor that a tensor of Hugging Face's comes from.

    Attributes:
        tensor: name of the tensor in the GGUF file.
        layout: change from the GGUF tensor's values to those of Hugging Face's tensor.
    """

    tensor: str
    layout: Layout


Table = Mapping[str, Sequence[Rule]]


Names = Mapping[str, str | Rule | Sequence[Rule] | None]


def plain_table(rules: Names, layer: str) -> Table:
    """Makes a Table, in which ``blk.*`` and ``layer`` precede the names that begin with a dot."""
    found = {}
    for key, value in rules.items():
        if value is None:
            continue
        several = [Rule(value)] if isinstance(value, str) else value
        several = [several] if isinstance(several, Rule) else several
        if key.startswith("."):
            several = [rule._replace(name=layer + rule.name) for rule in several]
            key = "blk.*" + key
        found[key] = tuple(several)
    return found


def decoder_table(rules: Names, layer: str = "model.layers.*.") -> Table:
    """The table of a decoder: the names that all Llama-like decoders share, changed by ``rules``.

    Args:
        rules: names to add or replace; None removes a name.
        layer: prefix of Hugging Face's names of a layer's tensors.
    """
    shared = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        ".attn_norm": "input_layernorm",
        ".attn_q": "self_attn.q_proj",
        ".attn_k": "self_attn.k_proj",
        ".attn_v": "self_attn.v_proj",
        ".attn_output": "self_attn.o_proj",
        ".ffn_norm": "post_attention_layernorm",
        ".ffn_gate": "mlp.gate_proj",
        ".ffn_up": "mlp.up_proj",
        ".ffn_down": "mlp.down_proj",
    }
    return plain_table({**shared, **rules}, layer)


def expert_names(
    layer: str = "mlp",
    router: str = "gate",
    maps: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    shared: str = "",
) -> dict[str, Any]:
    """The names of a layer's experts: stacked, or as separate tensors as in files before April 2024.

    Args:
        layer: the checkpoint's name of the mixture of experts in a layer.
        router: name of the router in the mixture.
        maps: names of an expert's gate, up and down projections.
        shared: name of the MLP that every token goes through; "": there is none.
    """
    gate, up, down = maps
    each = f"{layer}.experts.#."
    return {
        ".ffn_gate_inp": f"{layer}.{router}",
        ".ffn_gate_exps": Rule(each + gate, STACK),
        ".ffn_up_exps": Rule(each + up, STACK),
        ".ffn_down_exps": Rule(each + down, STACK),
        ".ffn_gate_up_exps": (Rule(each + gate, GATES), Rule(each + up, UPS)),
        ".ffn_gate.#": each + gate,
        ".ffn_up.#": each + up,
        ".ffn_down.#": each + down,
        **{
            f".ffn_{kind}_shexp": f"{layer}.{shared}.{name}"
            for kind, name in zip(("gate", "up", "down"), maps, strict=True)
            if shared
        },
    }


# Metadata keys → settings of models with a shared expert and experts after dense layers (DeepSeek, GLM-4.5).
ROUTED_KEYS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
}
# llama.cpp's values of those that a file leaves out.
ROUTED_DEFAULTS = {
    "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "norm_topk_prob": False,
}  # fmt: skip
# Tensors of layers of multi-token prediction, which follow the model's own layers.
NEXT = {
    f".nextn.{name}": name.replace("shared_head_", "shared_head.")
    for name in "eh_proj embed_tokens enorm hnorm shared_head_head shared_head_norm".split()
}
# Norms after attention and after the MLP, and no norms before them.
AFTER_NORMS = {
    ".attn_norm": None,
    ".ffn_norm": None,
    ".post_attention_norm": "post_attention_layernorm",
    ".post_ffw_norm": "post_feedforward_layernorm",
}
HEAD_NORMS = {".attn_q_norm": "self_attn.q_norm", ".attn_k_norm": "self_attn.k_norm"}
# The last layer of a reranker's head.
CLASSIFIER = "cls.output"

ARCHITECTURES = ByArchitecture(lambda family: family.gguf.names)
"""Name of an architecture in a GGUF file → the table of its tensors' names."""

# The tensors with a divisor for each of RoPE's frequencies: for all lengths; for lengths up to the original
# context length; and for longer ones.
DIVISORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
# Known tensors that are not weights: RoPE's divisors become part of the configuration (config/), and the
# program that runs the model computes the table of frequencies.
IGNORED = frozenset({*DIVISORS, "blk.*.attn_rot_embd.weight"})
_NO_ROPE = frozenset({"gpt2", "bert"})

# The number of a layer or of an expert in a name.
_NUMBER = re.compile(r"(?<![^.])(0|[1-9][0-9]{0,5})(?![^.])")
# Layouts of matrices: biases, which are vectors, stay as they are.
_OF_MATRICES = (Transposed, Plus, Taps)


class Sizes(Protocol):
    """The numbers of a model that the layouts of its tensors need."""

    @property
    def layers(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def norm_groups(self) -> int: ...


class FileSizes:
    """The sizes of the model in a GGUF file, read from the metadata on demand."""

    norm_groups = 0  # the tensor's shape tells them

    def __init__(self, given: Settings):
        self._given = given
        self.layers: int = given.count("block_count", maximum=MAX_LAYERS)

    @property
    def experts(self) -> int:
        """The number of experts in a layer."""
        return self._given.count("expert_count", maximum=MAX_EXPERTS)

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return self._given.count("attention.head_count")

    @property
    def kv_heads(self) -> int:
        """The number of KV heads."""
        found = self._given.some("attention.head_count_kv", None)
        return self.heads if found is None else found


class Entry(NamedTuple):
    """A tensor of Hugging Face's in a GGUF file. Entries are in the order of the file.

    Attributes:
        layer: index of its layer; -1: none.
        order: number of the GGUF tensor in the architecture's table.
        tensor: name of the GGUF tensor.
        expert: index of its expert; -1: none.
        name: Hugging Face's name.
        layout: change from the GGUF tensor's values to those of Hugging Face's tensor.
    """

    layer: int
    order: int
    tensor: str
    expert: int
    name: str
    layout: Layout


class TensorNames:
    """The table of an architecture's tensors, for a model of these sizes: it is read in both directions."""

    def __init__(self, table: Table, sizes: Sizes):
        self._sizes = sizes
        self._in_file = {key: (order, rules) for order, (key, rules) in enumerate(table.items())}
        # maxjax does not write experts one by one, or gate and up as one tensor, as some writers do.
        self._in_checkpoint = {
            rule.name: (order, key, rule)
            for key, (order, rules) in self._in_file.items()
            for rule in rules
            if "#" not in key and rule.layout not in (GATES, UPS)
        }

    def entries_of(self, tensor: str) -> Iterator[Entry]:
        """Hugging Face's tensors in a GGUF tensor; none if it is unknown."""
        generic, layer, expert = _generic(tensor)
        key, _, suffix = generic.rpartition(".")
        if suffix not in ("weight", "bias", "scale"):
            key, suffix = generic, NO_SUFFIX
        order, rules = self._in_file.get(key, (0, ()))
        if not rules or not self._has(layer, expert):
            return
        for rule in rules:
            # Scales, and tensors without a suffix, are only in rules that name them.
            if suffix != rule.only and (rule.only or suffix not in ("weight", "bias")):
                continue
            name = rule.name.replace("*", str(layer), 1) + ("" if rule.only else f".{suffix}")
            is_stack = isinstance(rule.layout, str) and "#" in name
            for i in range(self._sizes.experts) if is_stack else (expert,):
                full, layout = name.replace("#", str(i)), self._layout(rule, suffix, i)
                yield Entry(layer, order, tensor, i, full, layout)

    def entry_of(self, name: str) -> Entry | None:
        """The place in the file of a tensor of Hugging Face's; None if it is unknown."""
        generic, layer, expert = _generic(name)
        stem, _, suffix = generic.rpartition(".")
        found = self._in_checkpoint.get(generic)  # for tensors without a suffix in the checkpoint
        is_whole = found is not None
        if not is_whole and suffix in ("weight", "bias"):
            found = self._in_checkpoint.get(stem)
        if found is None or is_whole != bool(found[2].only) or not self._has(layer, expert):
            return None
        order, key, rule = found
        suffix = rule.only or suffix
        tensor = key.replace("*", str(layer)) + ("" if suffix == NO_SUFFIX else f".{suffix}")
        return Entry(layer, order, tensor, expert, name, self._layout(rule, suffix, expert))

    def _has(self, layer: int, expert: int) -> bool:
        return layer < self._sizes.layers and (expert < 0 or expert < self._sizes.experts)

    def _layout(self, rule: Rule, suffix: str, expert: int) -> Layout:
        what, sizes = rule.layout, self._sizes
        if isinstance(what, Layout):
            return Same() if suffix == "bias" and isinstance(what, _OF_MATRICES) else what
        if what == QUERIES:
            return Permuted(sizes.heads)
        if what == KEYS:
            return Permuted(sizes.kv_heads)
        if what == NORM_GROUPS:
            return Flat(sizes.norm_groups)
        if what == GROUPS:
            return Grouped(sizes.heads, sizes.kv_heads)
        return Expert(expert, sizes.experts, *{STACK: (0, 1), GATES: (0, 2), UPS: (1, 2)}[what])


def _generic(name: str) -> tuple[str, int, int]:
    """(A name with ``*`` for the number of the layer and ``#`` for that of the expert, these numbers or -1)."""
    if "*" in name or "#" in name:
        return "", -1, -1
    marks, numbers = iter("*#"), [int(number) for number in _NUMBER.findall(name)]
    layer, expert, *_ = *numbers, -1, -1
    return _NUMBER.sub(lambda _: next(marks, "?"), name), layer, expert


def hf_names(
    architecture: str,
    tensors: Collection[str] | Mapping[str, Sequence[int]],
    metadata: Mapping[str, Any],
    *,
    path: str | os.PathLike[str] | None = None,
) -> dict[str, Source]:
    """The tensors of a GGUF file by their names in Hugging Face's checkpoints.

    Args:
        architecture: ``general.architecture`` of the file.
        tensors: names of its tensors, or a mapping from names to shapes (``[out, in]``, the reverse
            of GGUF's order), which are then checked against the layouts.
        metadata: metadata of the file, for the numbers of layers, heads and experts.
        path: path of the file, for messages.

    Returns:
        Name → Source, in the order of ``tensors``. Each expert of a stack has an entry of its own.

    Raises:
        UnsupportedModelError: the architecture has no table; the message lists those that do.
        CheckpointMismatchError: tensors are not in the table; the message names them.
        CheckpointFormatError: a number is missing or wrong, two tensors have the same name in
            Hugging Face's checkpoints, or a shape does not fit its layout.

    Example:
        >>> metadata = {"llama.block_count": 1, "llama.attention.head_count": 4}
        >>> found = hf_names("llama", ["blk.0.attn_q.weight"], metadata)
        >>> found["model.layers.0.self_attn.q_proj.weight"]
        Source(tensor='blk.0.attn_q.weight', layout=Permuted(heads=4))
    """
    table = ARCHITECTURES.get(architecture)
    if table is None:
        raise unknown_architecture(architecture, ARCHITECTURES, path)
    names = TensorNames(table, FileSizes(settings(metadata, architecture, path)))
    ignored = frozenset() if architecture in _NO_ROPE else IGNORED
    return sources_of(names, tensors, f"a {architecture} model", path, ignored)


def sources_of(
    names: TensorNames,
    tensors: Collection[str] | Mapping[str, Sequence[int]],
    what: str,
    path: str | os.PathLike[str] | None,
    ignored: Collection[str] = (),
) -> dict[str, Source]:
    """As :func:`hf_names`, by a table for a model of these sizes.

    Args:
        names: the table.
        tensors, path: as for :func:`hf_names`.
        what: what does not have other tensors, for messages.
        ignored: names of tensors that are left out.
    """
    found: dict[str, Source] = {}
    unknown = []
    for tensor in tensors:
        if _generic(tensor)[0] in ignored:
            continue
        entries = list(names.entries_of(tensor))
        if not entries:
            unknown.append(tensor)
        elif isinstance(tensors, Mapping):
            check_shape(tensor, entries[0].layout, tensors[tensor], path)
        for name, layout in ((entry.name, entry.layout) for entry in entries):
            if name in found:
                raise CheckpointFormatError(
                    f"'{found[name].tensor}' and '{tensor}' are both the weight '{name}'", path=path
                )
            found[name] = Source(tensor, layout)
    if unknown:
        raise CheckpointMismatchError(
            f"tensors that {what} does not have: {some(unknown)}", path=path
        )
    return found


def check_shape(tensor: str, layout: Layout, shape: Sequence[int], path: Any) -> None:
    """Checks that a tensor of this shape can have the layout.

    Raises:
        CheckpointFormatError: it cannot; the message names the file and the tensor.
    """
    try:
        layout.shape(tuple(shape))
    except CheckpointFormatError as error:
        raise CheckpointFormatError(
            error.problem, path=path, tensor=tensor, expected=error.expected, found=error.found
        ) from None
