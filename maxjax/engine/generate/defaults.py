"""What a checkpoint says about generating with it: its ``generation_config.json``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CheckpointFormatError, UserInputError
from ...models.config import read_object
from ..sampling.settings import Sampling, eos_token_ids, meant

FILE = "generation_config.json"
# Each character is a state of the automaton that looks for them, of 300 bytes.
_MOST_STOPS = 1 << 16


@dataclass(frozen=True)
class GenerationDefaults:
    """What holds where the caller of ``generate`` says nothing.

    Attributes:
        sampling: How tokens are chosen.
        max_new_tokens: The most tokens of an answer, or None.
        eos_ids: The tokens that end it.
        stop: Texts that end it.
    """

    sampling: Sampling = Sampling()
    max_new_tokens: int | None = None
    eos_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


def read_defaults(
    directory: Path, config: Mapping[str, Any] | None = None, eos_ids: tuple[int, ...] = ()
) -> GenerationDefaults:
    """The defaults of a checkpoint directory.

    Args:
        directory: Where ``generation_config.json`` may be.
        config: The content of ``config.json``, which says the ends of texts where that does not.
        eos_ids: Those of the tokenizer, where neither does.

    Raises:
        CheckpointFormatError: A file says something that cannot be; names it.

    Example:
        >>> read_defaults(Path("."), {"eos_token_id": [2, 3]}).eos_ids
        (2, 3)
    """
    file = Path(directory) / FILE
    given = read_object(file) if file.exists() else {}
    try:
        ends = eos_token_ids(given) or eos_token_ids(config or {})
        sampling = Sampling.from_generation_config({**given, "eos_token_id": list(ends)})
        return GenerationDefaults(sampling, _count(given), ends or eos_ids, _stops(given))
    except UserInputError as error:
        raise CheckpointFormatError(str(error), path=file if given else None) from None


def _count(given: Mapping[str, Any]) -> int | None:
    value = given.get("max_new_tokens")
    if value is None or (type(value) is int and value > 0):
        return value
    raise UserInputError(f"max_new_tokens is {str(value)[:60]}: a positive integer is wanted")


def _stops(given: Mapping[str, Any]) -> tuple[str, ...]:
    value = given.get("stop_strings") or ()
    value = (value,) if isinstance(value, str) else value
    if not isinstance(value, (list, tuple)) or not all(isinstance(s, str) and s for s in value):
        raise UserInputError("stop_strings is no list of texts")
    if (size := sum(map(len, value))) > _MOST_STOPS:
        raise UserInputError(f"stop_strings has {size} characters, {_MOST_STOPS} at most are read")
    return tuple(value)


# What the functions that take single settings of Sampling have besides.
_ARGUMENTS = (
    "max_new_tokens",
    "stop",
    "eos_ids",
    "key",
    "sampling",
    "batch_size",
    "chunk",
    "cache_dtype",
)


def _there_are(names: list[str]) -> str:
    return f"; settings of Sampling are {', '.join(names)}"


def chosen_sampling(
    defaults: GenerationDefaults, sampling: Sampling | None, changes: Mapping[str, Any]
) -> Sampling:
    """The caller's Sampling, or the defaults with the caller's changes.

    Raises:
        UserInputError: Both are given, a name is unknown, or a value out of range.

    Example:
        >>> chosen_sampling(GenerationDefaults(), None, {"temperature": 0.5}).temperature
        0.5
    """
    names = [field.name for field in dataclasses.fields(Sampling)]
    unknown = [name for name in changes if name not in names]
    if unknown:
        hint = meant(unknown[0], [*names, *_ARGUMENTS])
        raise UserInputError(f"there is no argument {unknown[0]!r}{hint or _there_are(names)}")
    if sampling is None:
        return dataclasses.replace(defaults.sampling, **changes)
    if not isinstance(sampling, Sampling):
        raise UserInputError(f"sampling is a maxjax.Sampling, not {type(sampling).__name__}")
    if changes:
        raise UserInputError(
            f"{next(iter(changes))} belongs in sampling=Sampling(…), given beside it"
        )
    return sampling
