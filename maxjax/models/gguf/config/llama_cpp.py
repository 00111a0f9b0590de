"""The metadata keys that llama.cpp reads, for each architecture.

A file that llama.cpp opens but computes differently is worse than no file. So a key that is not listed
here is written only if llama.cpp behaves in that way without the key, or with a warning.

Source: ``load_hparams``, ``load_tensors`` and the graphs in ``src/llama-model.cpp`` of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ....errors import shown
from ..by_architecture import ByArchitecture
from ..metadata import unsupported

_COMMON = """
    vocab_size context_length attention.causal embedding_length block_count feed_forward_length
    attention.head_count attention.head_count_kv attention.key_length attention.value_length
    rope.dimension_count rope.freq_base rope.scaling.type rope.scaling.factor
    rope.scaling.original_context_length rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow
    expert_count expert_used_count
""".split()
_MOE = "expert_feed_forward_length"

# The keys of each architecture, without the prefix of its name.
READ = ByArchitecture(lambda family: frozenset([*_COMMON, *family.gguf.keys_read]))

# Keys that maxjax reads and llama.cpp does not. They are written, with a warning about what is lost.
_SAID = {
    "attention.sliding_window": "ignores the sliding window of such a model: its results differ for "
    "texts of more than {value} tokens",
    "pooling_type": "does not read how this model's embeddings are pooled: pass it --pooling",
}
# The tensors that may have a bias; None: all may have one.
_BIASES = ByArchitecture(lambda family: family.gguf.biases)
# Whether the head is always the embedding table, whatever else is in the file.
_TIED = ByArchitecture(lambda family: family.gguf.is_tied)
# Whether RoPE's frequencies may have divisors.
_DIVIDED = ByArchitecture(lambda family: family.gguf.is_divided)
_LAYER = re.compile(r"blk\.\d+\.")


def check_read(
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Collection[str],
    *,
    path: Any = None,
) -> list[str]:
    """Warnings about what llama.cpp would do differently with a file of these keys and tensors.

    Args:
        architecture: GGUF's name of the architecture.
        keys: metadata, without the architecture's prefix.
        tensors: names of the tensors in the file.
        path: path of the checkpoint, for messages.

    Raises:
        UnsupportedModelError: llama.cpp would compute other results for every text, or not open
            the file.

    Example:
        >>> keys = {"context_length": 32768, "attention.sliding_window": 4096}
        >>> [line.split(":")[0] for line in check_read("llama", keys, [])]
        ['llama.cpp ignores the sliding window of such a model']
        >>> check_read("llama", {**keys, "context_length": 4096}, [])
        []
    """
    for problem in _tensors(architecture, tensors):
        what = f"{problem}, which llama.cpp does not read in a model of kind {architecture!r},"
        raise unsupported(what, path)
    lost = []
    for key, value in keys.items():
        if key in READ[architecture] or _has_no_effect(key, value, keys):
            continue
        if key not in _SAID:
            raise unsupported(
                f"'{architecture}.{key}' {shown(value)}, which llama.cpp does not read,", path
            )
        lost.append(f"llama.cpp {_SAID[key].format(value=value)}")
    return lost


def _has_no_effect(key: str, value: Any, keys: Mapping[str, Any]) -> bool:
    """Whether the model would be the same without the key."""
    if key == "attention.sliding_window":
        return not value or value >= keys["context_length"]
    if key == _MOE:  # the same width as the MLP's, which the file has too
        return value == keys.get("feed_forward_length")
    # Files have a per-layer embedding for every token; the key says how many the checkpoint had.
    return key == "vocab_size_per_layer_input" or (key == "pooling_type" and not value)


def _tensors(architecture: str, tensors: Collection[str]) -> Iterator[str]:
    """The problems that llama.cpp would have with the tensors of a file, as text."""
    if _TIED.get(architecture) and "output.weight" in tensors:
        yield "a separate head ('output.weight')"
    if not _DIVIDED.get(architecture) and "rope_freqs.weight" in tensors:
        yield "rope with a divisor for each frequency"
    known = _BIASES.get(architecture)
    for name in tensors:
        stem, _, suffix = _LAYER.sub("", name).rpartition(".")
        if known is not None and suffix == "bias" and stem not in known:
            yield f"a bias of '{name.removesuffix('.bias')}'"
