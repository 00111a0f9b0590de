"""Pooling: the hidden states of a text's tokens → one embedding for the text.

The settings are read from the files that sentence-transformers puts beside a model (``modules.json``
and the files it names), or from a GGUF file's metadata.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import (
    CheckpointFormatError,
    CheckpointLimitError,
    CheckpointUnsafeError,
    UserInputError,
)
from ..storage.strict_json import load_json
from .config import ModelConfig, read_object, setting
from .gguf import pooling

# Published models have three or four modules; for each, a directory is read.
_MOST_MODULES = 100


@dataclass(frozen=True)
class Pooling:
    """The settings by which token states become an embedding.

    Attributes:
        modes: names in :data:`POOLINGS`; their results are concatenated.
        normalize: whether embeddings are scaled to length 1.
        max_length: maximum number of tokens in a text, or None.
        lower_case: whether texts are lowercased first.
        unsupported: a step of the model that maxjax does not have, or None. With such a step the
            token states are right, but no embedding can be computed from them.
        prompts: (name, text) of each prompt that may be put before a text.
        prompt: name of the default prompt, or None.
        include_prompt: whether the prompt's tokens are pooled with those of the text.
    """

    modes: tuple[str, ...] = ("mean",)
    normalize: bool = False
    max_length: int | None = None
    lower_case: bool = False
    unsupported: str | None = None
    prompts: tuple[tuple[str, str], ...] = ()
    prompt: str | None = None
    include_prompt: bool = True

    def before(self, name: str | None) -> str:
        """The text of the prompt of this name, or of the default prompt; "" without one.

        Raises:
            UserInputError: the model has no prompt of that name.

        Example:
            >>> Pooling(prompts=(("query", "Find: "),)).before("query")
            'Find: '
        """
        name = self.prompt if name is None else name
        found = dict(self.prompts)
        if name is not None and name not in found:
            known = ", ".join(map(repr, found)) or "none"
            raise UserInputError(f"the model has no prompt {str(name)[:60]!r}: it has {known}")
        return found[name] if name is not None else ""


# --- the arithmetic: states [B, T, E] and mask [B, T] of the same dtype → [B, E] ------------
# `starts` int32 [B, 1] is the index of each text's first token.


def _mean(states: jax.Array, mask: jax.Array, starts: jax.Array) -> jax.Array:
    return _sum(states, mask) / _count(mask)


def _mean_sqrt_len(states: jax.Array, mask: jax.Array, starts: jax.Array) -> jax.Array:
    return _sum(states, mask) / jnp.sqrt(_count(mask))


def _weighted_mean(states: jax.Array, mask: jax.Array, starts: jax.Array) -> jax.Array:
    """Later tokens weigh more: 1, 2, 3, …"""
    places = jnp.arange(1, mask.shape[1] + 1, dtype=jnp.int32)[None, :] - starts
    return _mean(states, mask * places.astype(mask.dtype), starts)


def _max(states: jax.Array, mask: jax.Array, starts: jax.Array) -> jax.Array:
    lowest = jnp.finfo(states.dtype).min
    return jnp.max(jnp.where(mask[..., None] > 0, states, lowest), axis=1)


def _first(states: jax.Array, mask: jax.Array, starts: jax.Array) -> jax.Array:
    return _at(states, starts)


def _last(states: jax.Array, mask: jax.Array, starts: jax.Array) -> jax.Array:
    # The mask is not summed: 16-bit floats count exactly only to 256 (bfloat16) or 2048 (float16).
    positions = jnp.arange(mask.shape[1], dtype=jnp.int32)[None, :]
    return _at(states, jnp.max(jnp.where(mask > 0, positions, 0), axis=1, keepdims=True))


def _at(states: jax.Array, places: jax.Array) -> jax.Array:
    """The state at one place ``[B, 1]`` of each row."""
    return jnp.take_along_axis(states, places[:, :, None], axis=1)[:, 0]


def _sum(states: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.einsum("bte,bt->be", states, mask)


def _count(mask: jax.Array) -> jax.Array:
    return _above(jnp.sum(mask, axis=1, keepdims=True), 1e-9)  # [B, 1]


def _above(x: jax.Array, least: float) -> jax.Array:
    """``x``, at least ``least``, to divide by; float16 has no number as small as 1e-9."""
    return jnp.maximum(x, max(least, float(jnp.finfo(x.dtype).tiny)))


# In the order in which sentence-transformers concatenates the results.
POOLINGS: dict[str, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]] = {
    "cls": _first,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt_len,
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
}
# The keys of these modes in a Pooling module's configuration.
_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def pool(
    states: Any,
    mask: Any,
    modes: tuple[str, ...] = ("mean",),
    *,
    normalize: bool = False,
    starts: Any = None,
) -> jax.Array:
    """Token states → one embedding for each text.

    Args:
        states: hidden states ``[B, T, E]``, in whose dtype everything is computed.
        mask: ``[B, T]``, nonzero for the tokens that are pooled.
        modes: names in :data:`POOLINGS`.
        normalize: whether to scale embeddings to length 1.
        starts: index of the first token of each text, integers ``[B]``; 0 by default, where padding
            is on the right.

    Returns:
        Embeddings ``[B, E · len(modes)]``.

    Example:
        >>> print(pool(jnp.array([[[1.0, 3.0], [3.0, 5.0], [9.0, 9.0]]]), jnp.array([[1, 1, 0]])))
        [[2. 4.]]
    """
    states = jnp.asarray(states)
    mask = jnp.asarray(mask).astype(bool).astype(states.dtype)
    first = jnp.zeros(mask.shape[0], jnp.int32) if starts is None else jnp.asarray(starts)
    pooled = [POOLINGS[mode](states, mask, first.astype(jnp.int32)[:, None]) for mode in modes]
    pooled = jnp.concatenate(pooled, axis=-1)
    if normalize:
        length = jnp.sqrt(jnp.sum(jnp.square(pooled), axis=-1, keepdims=True))
        pooled = pooled / _above(length, 1e-12)
    return pooled


# --- the files of sentence-transformers -----------------------------------------------------


@dataclass(frozen=True)
class _Module(ModelConfig):
    """An entry of ``modules.json``."""

    path: str
    type: str

    @property
    def kind(self) -> str:
        return self.type.rpartition(".")[2]


@dataclass(frozen=True)
class _SentenceConfig(ModelConfig):
    """``sentence_bert_config.json``."""

    max_seq_length: int | None = setting(default=None, minimum=1)
    do_lower_case: bool = setting(default=False)


@dataclass(frozen=True)
class _PoolingConfig(ModelConfig):
    """The settings of ``1_Pooling/config.json`` that apply to all modes."""

    include_prompt: bool = setting(default=True)


def read_pooling(directory: str | os.PathLike[str]) -> tuple[Pooling | None, Path]:
    """Reads ``modules.json`` and the files it names.

    Returns:
        The Pooling, and the directory of the transformer; None and ``directory`` if there is no
        ``modules.json``.

    Raises:
        CheckpointFormatError: a file is broken, or names a file that does not exist.
        CheckpointUnsafeError: a path in ``modules.json`` leads out of the directory.
    """
    root = Path(directory)
    file = root / "modules.json"
    if not file.exists():
        return None, root
    transformer, pooling, normalize, unsupported, with_prompt = root, None, False, None, True
    for module in _modules(file):
        place = _inside(root, module.path, file)
        if module.kind == "Transformer":
            transformer = place
        elif module.kind == "Pooling":
            place = _settings(place)
            pooling = _modes(place)
            with_prompt = _PoolingConfig.from_dict(read_object(place), path=place).include_prompt
        elif module.kind == "Normalize":
            normalize = True
        elif module.kind != "Dropout":  # which does nothing at inference
            unsupported = unsupported or f"the module {module.kind}"
    settings = _sentence_config(transformer)
    if pooling is None:
        unsupported = unsupported or "a model without a Pooling module"
    elif isinstance(pooling, str):
        unsupported, pooling = unsupported or pooling, None
    found = Pooling(
        pooling or ("mean",),
        normalize,
        settings.max_seq_length,
        settings.do_lower_case,
        unsupported,
        *_prompts(root / "config_sentence_transformers.json"),
        with_prompt,
    )
    return found, transformer


def _prompts(file: Path) -> tuple[tuple[tuple[str, str], ...], str | None]:
    """The (name, text) of a model's prompts, and the name of the default one."""
    settings = read_object(file) if file.exists() else {}
    prompts, name = settings.get("prompts"), settings.get("default_prompt_name")
    prompts = {} if prompts is None else prompts
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointFormatError("'prompts' is not an object of strings", path=file)
    if name is not None and (not isinstance(name, str) or name not in prompts):
        raise CheckpointFormatError(
            "'default_prompt_name' is not the name of a prompt", path=file,
            expected=", ".join(prompts) or "none", found=str(name)[:60],
        )  # fmt: skip
    return tuple(prompts.items()), name


def _settings(place: Path) -> Path:
    """The path of a module's configuration: in its directory, or in a JSON file of the same name.

    The latter is used in Orbax steps, where every directory is taken for a tree of arrays.
    """
    flat = place.with_name(f"{place.name}.json")
    is_flat = os.path.isfile(flat) and not os.path.isdir(place)
    return flat if is_flat else place / "config.json"


def pooling_files(pooling: Pooling) -> dict[str, Any]:
    """The files that :func:`read_pooling` reads as ``pooling``: name → content as JSON values.

    Example:
        >>> sorted(pooling_files(Pooling(normalize=True)))
        ['1_Pooling/config.json', 'modules.json', 'sentence_bert_config.json']
    """
    if pooling.unsupported is not None:
        return {}
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds[: 3 if pooling.normalize else 2])
    ]
    modes = {key: mode in pooling.modes for key, mode in _KEYS.items()}
    modes["include_prompt"] = pooling.include_prompt
    prompts = {"prompts": dict(pooling.prompts), "default_prompt_name": pooling.prompt}
    sentence = {"max_seq_length": pooling.max_length, "do_lower_case": pooling.lower_case}
    return {
        "modules.json": modules,
        "1_Pooling/config.json": modes,
        "sentence_bert_config.json": sentence,
    } | ({"config_sentence_transformers.json": prompts} if pooling.prompts else {})


# llama.cpp's pooling types, and their names here.
_GGUF_MODES = {"mean": "mean", "cls": "cls", "last": "lasttoken"}


def gguf_pooling(
    metadata: Mapping[str, Any], *, path: str | os.PathLike[str] | None = None
) -> Pooling | None:
    """The Pooling in a GGUF file's metadata; None if the metadata has none.

    Embeddings are scaled to length 1, which is llama.cpp's default.

    Raises:
        CheckpointFormatError: the pooling type is unknown.
    """
    mode = pooling(metadata, path=path)
    if mode is None:
        return None
    if mode not in _GGUF_MODES:
        return Pooling(unsupported=f"the pooling {mode!r} of the GGUF file")
    return Pooling((_GGUF_MODES[mode],), normalize=True)


def gguf_mode(pooling: Pooling) -> str | None:
    """llama.cpp's name of the pooling type; None if it has no such type."""
    names = {mode: name for name, mode in _GGUF_MODES.items()}
    return names.get(pooling.modes[0]) if len(pooling.modes) == 1 else None


def _modules(file: Path) -> list[_Module]:
    entries = load_json(file)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise CheckpointFormatError("not a list of modules", path=file)
    if len(entries) > _MOST_MODULES:
        raise CheckpointLimitError(
            "there are too many modules", path=file, expected=f"at most {_MOST_MODULES}",
            found=len(entries),
        )  # fmt: skip
    return [_Module.from_dict(entry, path=file) for entry in entries]


def _inside(root: Path, path: str, file: Path) -> Path:
    parts = PurePosixPath(path).parts
    if path.startswith("/") or ".." in parts or "\\" in path or ":" in path or "\0" in path:
        raise CheckpointUnsafeError(
            "the path of a module leads out of the directory", path=file, found=path
        )
    return root.joinpath(*parts)


def _modes(file: Path) -> tuple[str, ...] | str:
    """The modes of a Pooling module, or a text that names a mode that maxjax does not have."""
    settings = read_object(file)
    named = settings.get("pooling_mode")
    if named is not None:  # newer files: a name, or several
        names = [named] if isinstance(named, str) else named
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointFormatError("'pooling_mode' is not a name", path=file)
    else:
        names = []
        for key, value in settings.items():
            if key.startswith("pooling_mode_"):
                if not isinstance(value, bool):
                    raise CheckpointFormatError(f"'{key}' is not true or false", path=file)
                if value:
                    names.append(_KEYS.get(key, key))
    unknown = [name for name in names if name not in POOLINGS]
    if unknown:
        return f"the pooling {unknown[0][:80]!r}"
    if not names:
        raise CheckpointFormatError("no pooling mode is set", path=file)
    return tuple(mode for mode in POOLINGS if mode in names)


def _sentence_config(directory: Path) -> _SentenceConfig:
    for name in ("sentence_bert_config.json", "sentence_roberta_config.json"):
        file = directory / name
        if file.exists():
            return _SentenceConfig.from_dict(read_object(file), path=file)
    return _SentenceConfig()
