"""The names of the files that a checkpoint has beside its weights: configuration, tokenizer, documents.

Every part of maxjax that copies, records or moves such files takes them from this list. Code, training
data and all other files of a directory are none of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

# Names of vocabularies, which are read if there is no tokenizer.json; some are of unsupported formats.
_VOCABULARIES = (
    r"vocab\.(json|txt|bpe)|merges\.txt|tekken\.json|(tokenizer|spiece|sentencepiece(\.bpe)?|spm|tiktoken)\.model|"
    r"qwen\.tiktoken"
)
# Folders of sentence-transformers' modules; a step of orbax holds their files flat, as 1_Pooling.json.
_MODULE = r"\d+_(Pooling|Normalize|Dense\w*)"
KINDS = {
    "model": r"(generation_)?config\.json",
    "tokenizer": r"tokenizer(_config)?\.json|special_tokens_map\.json|added_tokens\.json|"
                 r"chat_template\.(jinja|json)|additional_chat_templates/[^/]+\.jinja",
    "vocabulary": _VOCABULARIES,
    "embedding": r"modules\.json|config_sentence_transformers\.json|sentence_[\w-]+_config\.json|"
                 rf"{_MODULE}(/config)?\.json",
    "embedding weights": rf"{_MODULE}(/(model|pytorch_model))?\.(safetensors|bin)",
    "processor": r"(\w+_)?(pre)?processor_config\.json",
    "adapter": r"adapter_config\.json",
    "document": r"README\.md|(LICEN[CS]E|NOTICE)(\.md|\.txt)?",
}  # fmt: skip
"""Kind → pattern of the names; at most one "/" is in a name."""

DENSE = ("model.safetensors", "pytorch_model.bin")
"""Names of the weights of a Dense module of sentence-transformers; the first that exists is read."""

_MATCHERS = {kind: re.compile(pattern, re.ASCII).fullmatch for kind, pattern in KINDS.items()}


def is_sidecar_folder(name: str) -> bool:
    """Whether files that belong to a checkpoint may lie in a subdirectory of this name."""
    return any(sidecar_kind(f"{name}/{file}") for file in ("config.json", "x.jinja"))


def sidecar_kind(name: str) -> str | None:
    """The kind of a file that belongs to a checkpoint, a key of :data:`KINDS`; None for any other file.

    Example:
        >>> sidecar_kind("tokenizer.json"), sidecar_kind("1_Pooling/config.json"), sidecar_kind("train.json")
        ('tokenizer', 'embedding', None)
    """
    return next((kind for kind, found in _MATCHERS.items() if found(name)), None)


def dense_weights(names: Sequence[str]) -> list[str]:
    """The files with the weights of a repository's Dense modules, of each in one format.

    Example:
        >>> dense_weights(["2_Dense/config.json", "2_Dense/model.safetensors", "2_Dense/pytorch_model.bin"])
        ['2_Dense/model.safetensors']
    """
    folders = [
        name.rpartition("/")[0] for name in names if fnmatchcase(name, "[0-9]_Dense*/config.json")
    ]
    there = [
        [f"{folder}/{file}" for file in DENSE if f"{folder}/{file}" in names] for folder in folders
    ]
    return [files[0] for files in there if files]
