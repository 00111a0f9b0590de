"""What llama.cpp reads of a GGUF file, architecture by architecture.

A file that it opens and computes otherwise is worse than none: a key that is in no list here may be
written only with the value that llama.cpp has for it anyway.

Source: ``load_hparams``, ``load_tensors`` and the graphs in ``src/llama-model.cpp`` of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ..metadata import short, unsupported

_COMMON = """
    vocab_size context_length embedding_length block_count feed_forward_length
    attention.head_count attention.head_count_kv attention.key_length attention.value_length
    rope.dimension_count rope.freq_base rope.scaling.type rope.scaling.factor
    rope.scaling.original_context_length rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow
    expert_count expert_used_count
""".split()
_RMS = "attention.layer_norm_rms_epsilon"
_MEAN = "attention.layer_norm_epsilon"
_SWA = "attention.sliding_window attention.sliding_window_pattern final_logit_softcapping"
_MOE = "expert_feed_forward_length"

# The keys of each architecture, without its name in front.
READ: Mapping[str, frozenset[str]] = {
    name: frozenset([*_COMMON, *keys.split()])
    for name, keys in {
        "llama": _RMS,
        "qwen2": f"{_RMS} pooling_type",
        "qwen2moe": f"{_RMS} {_MOE} expert_shared_feed_forward_length",
        "qwen3": f"{_RMS} pooling_type",
        "qwen3moe": f"{_RMS} {_MOE}",
        "gemma": _RMS,
        "gemma2": f"{_RMS} {_SWA} attn_logit_softcapping",
        "gemma3": f"{_RMS} {_SWA} rope.freq_base_swa",
        "gpt2": _MEAN,
        "bert": f"{_MEAN} attention.causal pooling_type",
    }.items()
}
# What a reader of ours heeds and llama.cpp does not: the files go round, and it is said what is lost.
_SAID = {
    "attention.sliding_window": "looks through no window in a model of this kind: with texts of more "
    "than {value} tokens its results are others",
    "pooling_type": "does not read how this model's embeddings are pooled: pass it --pooling",
}
# Of an architecture: the tensors with a bias; all of them where it is not listed.
_HEADS = ("attn_q", "attn_k", "attn_v")
_BIASES: Mapping[str, Collection[str]] = {
    "llama": (*_HEADS, "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
    "qwen2": _HEADS, "qwen2moe": _HEADS,
    "qwen3": (), "qwen3moe": (), "gemma": (), "gemma2": (), "gemma3": (),
}  # fmt: skip
# Their head is the table of words, whatever else is in the file.
_TIED = ("gemma", "gemma2")
# Only there frequencies have divisors.
_DIVIDED = ("llama",)
_LAYER = re.compile(r"blk\.\d+\.")


def check_read(
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Collection[str],
    *,
    path: Any = None,
) -> list[str]:
    """What llama.cpp would do otherwise with a file of these keys and tensors, that may be written.

    Args:
        keys: Metadata without the architecture in front.
        tensors: Names in the file.

    Raises:
        UnsupportedModelError: It would compute something else with any text, or not open the file.

    Example:
        >>> keys = {"context_length": 32768, "attention.sliding_window": 4096}
        >>> [line.split(":")[0] for line in check_read("llama", keys, [])]
        ['llama.cpp looks through no window in a model of this kind']
        >>> check_read("llama", {**keys, "context_length": 4096}, [])
        []
    """
    for problem in _tensors(architecture, tensors):
        what = f"{problem}, which llama.cpp has no place for in a model of kind {architecture!r},"
        raise unsupported(what, path)
    lost = []
    for key, value in keys.items():
        if key in READ[architecture] or _has_no_effect(key, value, keys):
            continue
        if key not in _SAID:
            raise unsupported(
                f"'{architecture}.{key}' {short(value)}, which llama.cpp does not read,", path
            )
        lost.append(f"llama.cpp {_SAID[key].format(value=value)}")
    return lost


def _has_no_effect(key: str, value: Any, keys: Mapping[str, Any]) -> bool:
    """Whether a model without the key is the same."""
    if key == "attention.sliding_window":
        return not value or value >= keys["context_length"]
    if key == _MOE:  # as wide as other maps: it is what the file says of these
        return value == keys.get("feed_forward_length")
    return key == "pooling_type" and not value


def _tensors(architecture: str, tensors: Collection[str]) -> Iterator[str]:
    """What is wrong with the tensors of a file."""
    if architecture in _TIED and "output.weight" in tensors:
        yield "a head of its own ('output.weight')"
    if architecture not in _DIVIDED and "rope_freqs.weight" in tensors:
        yield "rope with a divisor for each frequency"
    known = _BIASES.get(architecture)
    for name in tensors:
        stem, _, suffix = _LAYER.sub("", name).rpartition(".")
        if known is not None and suffix == "bias" and stem not in known:
            yield f"a bias of '{name.removesuffix('.bias')}'"
