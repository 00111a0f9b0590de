"""Reader of the metadata of an orbax checkpoint: names and kinds of leaves, custom metadata.

It strictly reads three JSON files of each tree, ``_METADATA`` (the leaves),
``array_metadatas/process_*`` (which arrays are random keys) and ``_strings.json`` (text leaves), and
``_CHECKPOINT_METADATA`` of the checkpoint. Format: orbax-checkpoint 0.4 to 0.12, ``_src/metadata``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...errors import CheckpointFormatError, CheckpointIncompleteError
from ..formats import ORBAX
from ..limits import Limits, check_name
from ..strict_json import invalid, load_json, require

TREE, CHECKPOINT, INDICATOR = ORBAX.marks
STRINGS = "_strings.json"
ARRAYS = "array_metadatas"

# Orbax's names for leaves without data.
_EMPTY = {"None": "none", "Dict": "dict", "List": "list", "Tuple": "tuple",
          "NamedTuple": "namedtuple"}  # fmt: skip
_KINDS = {"jax.Array": "array", "np.ndarray": "array", "scalar": "scalar", "string": "string",
          **_EMPTY}  # fmt: skip
_KEY_TYPES = {1: "sequence", 2: "dict"}


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of a tree that orbax saved.

    Attributes:
        name: keys joined by dots, which is the name of the tensor.
        keys: key path, (key, "dict" or "sequence") for each level. Orbax does not distinguish tuples
            from lists or class fields from dict keys, and stores integer keys as text.
        kind: "array", "scalar" (a Python number; its tensor has no axes), "string", "none", or for
            an empty container "dict", "list", "tuple" or "namedtuple".
        write_shape: shape of the pieces in which an array was written, if known.
        random_key: implementation of a random key ("threefry2x32"), whose data is the tensor.
    """

    name: str
    keys: tuple[tuple[str, str], ...]
    kind: str
    write_shape: tuple[int, ...] | None = None
    random_key: str | None = None

    @property
    def has_tensor(self) -> bool:
        """Whether the leaf is read as a tensor."""
        return self.kind in ("array", "scalar")


@dataclass(frozen=True, slots=True)
class Tree:
    """The leaves of one tree, its text leaves (name → text), and its custom metadata.

    ``is_dense`` says that all chunks of the arrays are stored, even those of zeros, which orbax
    before 0.6 left out; ``is_ocdbt`` that they were written to one database, which has a manifest.
    """

    directory: str
    leaves: tuple[Leaf, ...]
    strings: dict[str, str]
    metadata: dict[str, str]
    is_dense: bool
    is_ocdbt: bool


def read_tree(directory: str, limits: Limits) -> Tree:
    """Reads the tree in ``directory``, which holds a ``_METADATA``; no data.

    Raises:
        CheckpointFormatError: the metadata is not what orbax writes, or two leaves have one name.
        CheckpointMissingError: a required file is missing.
        CheckpointError: as for ``load_json``.
    """
    path = os.path.join(directory, TREE)
    document = load_json(path, limits=limits)
    require(isinstance(document, dict), path, "the document", "an object", document)
    listed = document.get("tree_metadata")
    require(isinstance(listed, dict), path, "tree_metadata", "an object", listed)
    if len(listed) > limits.tensors:
        raise limits.error("the tree has too many leaves", "tensors", len(listed), path=path)
    random_keys = dict(_random_keys(directory, limits))
    leaves: dict[str, Leaf] = {}
    for title, entry in listed.items():
        leaf = _leaf(path, title, entry, random_keys, limits)
        if leaf.name in leaves:
            raise CheckpointFormatError(
                "two leaves have this name, so orbax overwrote one with the other",
                path=path,
                tensor=leaf.name,
                expected="each name once",
                found=f"{_path(leaves[leaf.name])} and {_path(leaf)}",
                hint="Save it again with other keys.",
            )
        leaves[leaf.name] = leaf
    return Tree(
        directory,
        tuple(leaves.values()),
        _strings(directory, leaves, limits),
        texts(document.get("custom_metadata")),
        document.get("store_array_data_equal_to_fill_value") is True,
        document.get("use_ocdbt") is True,
    )


def _leaf(path: str, title: str, entry: Any, random_keys: dict[str, str], limits: Limits) -> Leaf:
    is_entry = isinstance(entry, dict)
    require(is_entry, path, "a leaf", "an object", entry, title)
    keys = tuple(_keys(path, title, entry.get("key_metadata")))
    name = ".".join(key for key, _ in keys)
    check_name(name, limits, path=path, tensor=name)
    # The title repeats the keys. Python's repr of non-ASCII text differs between versions.
    written = str(tuple(key for key, _ in keys))
    if written.isascii() and "\\" not in written:
        require(title == written, path, "the title of a leaf", written, title, name)
    value = entry.get("value_metadata")
    require(isinstance(value, dict), path, "value_metadata", "an object", value, name)
    kind, skipped = value.get("value_type"), value.get("skip_deserialize", False)
    require(isinstance(kind, str), path, "value_type", "text", kind, name)
    require(isinstance(skipped, bool), path, "skip_deserialize", "true or false", skipped, name)
    require(
        not skipped or kind in _EMPTY,
        path,
        "value_type of a leaf without data",
        f"one of {', '.join(_EMPTY)}",
        kind,
        name,
    )
    shape = value.get("write_shape")
    if shape is not None:
        is_shape = isinstance(shape, list) and all(
            type(size) is int and size >= 0 for size in shape
        )
        require(is_shape, path, "write_shape", "a list of sizes", shape, name)
        shape = tuple(shape)
    # The handler of a user's class has another kind, but stores arrays all the same.
    return Leaf(name, keys, _KINDS.get(kind, "array"), shape, random_keys.get(name))


def _keys(path: str, title: str, entries: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise invalid(path, "key_metadata", "a list of objects", entries, title)
    for one in entries:
        key, kind = one.get("key"), one.get("key_type")
        require(isinstance(key, str), path, "key", "text", key, title)
        is_kind = not isinstance(kind, bool) and isinstance(kind, int) and kind in _KEY_TYPES
        require(is_kind, path, "key_type", "1 or 2", kind, title)
        if _KEY_TYPES[kind] == "sequence":
            is_index = key.isascii() and key.isdecimal()
            require(is_index, path, "the key of a sequence", "a number", key, title)
        yield key, _KEY_TYPES[kind]


def _path(leaf: Leaf) -> str:
    return "/".join(key for key, _ in leaf.keys)


def _random_keys(directory: str, limits: Limits) -> Iterator[tuple[str, str]]:
    """(name, implementation) of each array that is a random key."""
    folder = os.path.join(directory, ARRAYS)
    try:
        files = sorted(os.listdir(folder))
    except OSError:
        return  # older versions did not write it and had no random keys
    for file in files:
        path = os.path.join(folder, file)
        document = load_json(path, limits=limits)
        listed = document.get("array_metadatas") if isinstance(document, dict) else None
        if not isinstance(listed, list):
            raise invalid(path, "array_metadatas", "a list", listed)
        for one in listed:
            array = one.get("array_metadata") if isinstance(one, dict) else None
            if not isinstance(array, dict):
                raise invalid(path, "array_metadata", "an object", array)
            name, more = array.get("param_name"), array.get("ext_metadata")
            if not isinstance(name, str):
                raise invalid(path, "param_name", "text", name)
            kind = more.get("random_key_impl") if isinstance(more, dict) else None
            if isinstance(kind, str):
                yield name, kind


def _strings(directory: str, leaves: dict[str, Leaf], limits: Limits) -> dict[str, str]:
    names = [leaf.name for leaf in leaves.values() if leaf.kind == "string"]
    if not names:
        return {}
    path = os.path.join(directory, STRINGS)
    document = load_json(path, limits=limits)
    require(isinstance(document, dict), path, "the document", "an object", document)
    for name in names:
        text = document.get(name)
        require(isinstance(text, str), path, "the text of a leaf", "text", text, name)
    return {name: document[name] for name in names}


def read_checkpoint_metadata(directory: str, limits: Limits) -> dict[str, str]:
    """The user's ``custom_metadata`` of a checkpoint, as text.

    Raises:
        CheckpointIncompleteError: the save was begun and never committed.
        CheckpointFormatError: the metadata is not what orbax writes.
        CheckpointError: as for ``load_json``.
    """
    path = os.path.join(directory, CHECKPOINT)
    if not os.path.lexists(path):
        return {}
    document = load_json(path, limits=limits)
    require(isinstance(document, dict), path, "the document", "an object", document)
    if document.get("init_timestamp_nsecs") and not document.get("commit_timestamp_nsecs"):
        raise CheckpointIncompleteError(
            "the checkpoint was never committed",
            path=path,
            expected="a commit_timestamp_nsecs",
            found=document.get("commit_timestamp_nsecs"),
        )
    return texts(document.get("custom_metadata"))


def texts(metadata: Any) -> dict[str, str]:
    """Metadata of any form as a dict of str → str.

    Example:
        >>> texts({"a": "b", "c": [1]}), texts(3), texts(None)
        ({'a': 'b', 'c': '[1]'}, {'custom_metadata': '3'}, {})
    """
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        metadata = {"custom_metadata": metadata}
    return {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in metadata.items()
    }
