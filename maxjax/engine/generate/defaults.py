"""The generation defaults of a checkpoint, read from its ``generation_config.json``."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from ...elsewhere import meant
from ...errors import (
    CheckpointFormatError,
    CheckpointLimitError,
    UnknownArgumentError,
    UserInputError,
    checked_integer,
    shown,
)
from ...models.config import read_object
from ...storage.files import is_there
from ...storage.save.beside import Files
from ..sampling.settings import Sampling, eos_token_ids

_LOG = logging.getLogger("maxjax")
FILE = "generation_config.json"
# The max_length that old versions of transformers wrote into every config.json: it means unset.
_UNSET_LENGTH = 20
# Limit on all stop strings together: each character is a state, of 300 bytes, of the automaton.
_MAX_STOP_CHARACTERS = 1 << 16
# Limit on the token ids of one setting of a file.
_MAX_ITEMS = 1 << 16


@dataclass(frozen=True)
class GenerationDefaults:
    """The values of ``generate``'s arguments that are used if the caller does not pass them.

    Attributes:
        sampling: how the next token is chosen.
        max_new_tokens: the largest number of tokens of an answer, or None.
        max_length: the largest number of tokens of a prompt with its answer, or None; it is used
            only if ``max_new_tokens`` is None.
        eos_ids: the token ids that end an answer.
        stop: the stop strings.
        num_beams, length_penalty, early_stopping: those of a beam search, which :func:`maxjax.generate` alone has; they
            are not read where tokens are drawn.
        file: the content of the ``generation_config.json`` that they were read from, or None.
        read: the values that were read from it, which tell :meth:`to_file` whether they were changed.
    """

    sampling: Sampling = Sampling()
    max_new_tokens: int | None = None
    max_length: int | None = None
    eos_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    file: str | None = dataclasses.field(default=None, repr=False, compare=False)
    read: tuple[Any, ...] = dataclasses.field(default=(), repr=False, compare=False)

    @property
    def _values(self) -> tuple[Any, ...]:
        beams = self.num_beams, self.length_penalty, self.early_stopping
        return self.sampling, self.max_new_tokens, self.max_length, self.eos_ids, self.stop, *beams

    def to_file(self, config: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """The content of the ``generation_config.json`` to save; None if ``config.json`` says all of it.

        Settings that were read and not changed are as they were. ``presence_penalty``, ``frequency_penalty``,
        ``logprobs``, ``top_n_sigma``, DRY, and ``bad_words`` that are texts, for which the file has no keys, are not
        in it.

        Args:
            config: the content of ``config.json``.

        Example:
            >>> GenerationDefaults(Sampling(temperature=0.5), eos_ids=(1, 2)).to_file()
            {'do_sample': True, 'temperature': 0.5, 'top_k': 0, 'eos_token_id': [1, 2]}
        """
        given = {} if self.file is None else json.loads(self.file)
        if self.read == self._values:
            ends = eos_token_ids(config or {})
            # Without any in the config they are the tokenizer's.
            known = not ends or set(self.eos_ids) <= set(ends)
            if self.file is not None:
                return given
            return None if known else {"eos_token_id": list(self.eos_ids)}
        chosen, off = self.sampling, Sampling()
        biases: Any = chosen.logit_bias
        found: dict[str, Any] = {}
        if not chosen.is_greedy:
            found = {"do_sample": True, "temperature": chosen.temperature, "top_k": chosen.top_k}
        elif "do_sample" in given:
            found = {"do_sample": False}
        found |= {
            name: getattr(chosen, name)
            for name in _SAME_KEYS
            if getattr(chosen, name) != getattr(off, name)
        }
        biases = [[[i], bias] for i, bias in biases]
        of_sequences: Any = chosen.sequence_bias
        biases += [[list(ids), bias] for ids, bias in of_sequences]
        found |= {"sequence_bias": biases} if biases else {}
        words = [list(word) for word in chosen.bad_words if not isinstance(word, str)]
        found |= {"bad_words_ids": words} if words else {}
        found |= {"suppress_tokens": list(chosen.banned)} if chosen.banned else {}
        found |= {"max_new_tokens": self.max_new_tokens} if self.max_new_tokens else {}
        found |= {"max_length": self.max_length} if self.max_length else {}
        found |= {"eos_token_id": list(self.eos_ids)} if self.eos_ids else {}
        found |= {"stop_strings": list(self.stop)} if self.stop else {}
        if self.num_beams > 1:
            found |= {name: getattr(self, name) for name in _BEAM_KEYS}
        return {name: value for name, value in given.items() if name not in _READ} | found


# The keys of the file that GenerationDefaults has fields for.
_SAME_KEYS = (
    "top_p min_p repetition_penalty min_new_tokens no_repeat_ngram_size typical_p epsilon_cutoff eta_cutoff "
    "xtc_probability xtc_threshold".split()
)
_BEAM_KEYS = ("num_beams", "length_penalty", "early_stopping")
_READ = frozenset(
    "do_sample temperature top_k sequence_bias suppress_tokens bad_words_ids max_new_tokens max_length eos_token_id "
    "stop_strings".split()
).union(_SAME_KEYS, _BEAM_KEYS)


def read_defaults(
    directory: Path | Files,
    config: Mapping[str, Any] | None = None,
    eos_ids: tuple[int, ...] = (),
    sampling: Mapping[str, Any] | None = None,
) -> GenerationDefaults:
    """Reads the defaults of a checkpoint directory.

    Args:
        directory: the directory; it may have no ``generation_config.json``.
        config: the content of ``config.json``. Its ``eos_token_id`` is used if
            ``generation_config.json`` has none; without that file, all its generation settings
            are used, because old checkpoints have them there.
        eos_ids: the tokenizer's end-of-text tokens, used if neither file has any.
        sampling: what a GGUF file has instead of a ``generation_config.json``, by the keys of that; it is
            used if there is no such file.

    Raises:
        CheckpointFormatError: a value in the file is invalid; the message names the file and the value.

    Example:
        >>> read_defaults(Path("."), {"eos_token_id": [2, 3]}).eos_ids
        (2, 3)
    """
    file = directory / FILE
    there = is_there(file)
    given = read_object(file) if there else {**(config or {}), **(sampling or {})}
    if not there and given.get("max_length") == _UNSET_LENGTH:
        del given["max_length"]
    for name, value in given.items():
        if name in _READ and isinstance(value, (list, dict)) and len(value) > _MAX_ITEMS:
            raise CheckpointLimitError(
                f"'{name}' has too many items", path=file,
                expected=f"at most {_MAX_ITEMS}", found=len(value),
            )  # fmt: skip
    try:
        ends = eos_token_ids(given) or eos_token_ids(config or {})
        chosen = Sampling.from_generation_config({**given, "eos_token_id": list(ends)})
        # What config.json does not say is saved as a file of its own.
        kept = given if there else {**sampling, "eos_token_id": list(ends)} if sampling else None
        found = GenerationDefaults(
            chosen, _count(given, "max_new_tokens"), _count(given, "max_length"),
            ends or eos_ids, _stops(given), file=None if kept is None else json.dumps(kept),
            **({} if given.get("do_sample") else _beams(given)),
        )  # fmt: skip
        return dataclasses.replace(found, read=found._values)
    except UserInputError as error:
        raise CheckpointFormatError(str(error), path=file if there else None) from None


def end_tokens(directory: Path | Files, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the token ids that end an answer, by ``generation_config.json`` or else by ``config.json``.

    Raises:
        CheckpointFormatError: they are not token ids.
    """
    file = directory / FILE
    try:
        return eos_token_ids(read_object(file) if is_there(file) else {}) or eos_token_ids(config)
    except UserInputError as error:
        raise CheckpointFormatError(str(error), path=file if is_there(file) else None) from None


def _count(given: Mapping[str, Any], name: str) -> int | None:
    value = given.get(name)
    return None if value is None else checked_integer(name, value)


def _beams(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a beam search; none if the file has one beam."""
    if (given.get("num_beams") or 1) == 1:
        return {}
    found = {name: given[name] for name in _BEAM_KEYS if given.get(name) is not None}
    check_beams(**found)
    _LOG.warning(
        "num_beams=%d of the generation config is for maxjax.generate: everything else writes one text",
        found["num_beams"],
    )
    return found


def check_beams(num_beams: Any, length_penalty: Any = 1.0, early_stopping: Any = False) -> None:
    """Raises UserInputError unless these are settings of :func:`maxjax.generate`."""
    checked_integer("num_beams", num_beams)
    is_number = isinstance(length_penalty, Real) and not isinstance(length_penalty, bool)
    if not is_number or not math.isfinite(length_penalty):
        raise UserInputError(f"length_penalty is {shown(length_penalty)}: it must be a number")
    if not (isinstance(early_stopping, bool) or early_stopping == "never"):
        raise UserInputError(
            f"early_stopping is {shown(early_stopping)}: it must be True, False or 'never'"
        )


def _stops(given: Mapping[str, Any]) -> tuple[str, ...]:
    value = given.get("stop_strings") or ()
    value = (value,) if isinstance(value, str) else value
    if not isinstance(value, (list, tuple)) or not all(isinstance(s, str) and s for s in value):
        raise UserInputError("stop_strings must be a list of non-empty strings")
    return check_stops("stop_strings", tuple(value))


def check_stops(name: str, stops: tuple[str, ...]) -> tuple[str, ...]:
    """Refuses stop strings that are too long for the automaton that looks for all of them at once.

    Raises:
        UserInputError: together they have too many characters.

    Example:
        >>> check_stops("stop", ("a" * 70_000,))
        Traceback (most recent call last):
        maxjax.errors.UserInputError: stop has 70000 characters; the limit is 65536
    """
    size = sum(len(stop) for stop in stops if isinstance(stop, str))
    if size > _MAX_STOP_CHARACTERS:
        raise UserInputError(f"{name} has {size} characters; the limit is {_MAX_STOP_CHARACTERS}")
    return stops


# The other arguments of the functions that take settings of Sampling as keywords.
_ARGUMENTS = (
    "max_new_tokens",
    "stop",
    "eos_ids",
    "key",
    "sampling",
    "batch_size",
    "chunk",
    "cache_dtype",
    "chat",
    "template_kwargs",
    "skip_special_tokens",
)


def chosen_sampling(
    defaults: GenerationDefaults, sampling: Sampling | None, changes: Mapping[str, Any]
) -> Sampling:
    """The caller's Sampling, or the default one with the caller's changes.

    Raises:
        UserInputError: both are given, or a value is out of range.
        UnknownArgumentError: a name is unknown; it is a TypeError as well.

    Example:
        >>> chosen_sampling(GenerationDefaults(), None, {"temperature": 0.5}).temperature
        0.5
    """
    names = [field.name for field in dataclasses.fields(Sampling)]
    unknown = [name for name in changes if name not in names]
    if unknown:
        hint = meant(unknown[0], [*names, *_ARGUMENTS], "maxjax.generate")
        hint = hint or f"; settings of Sampling are {', '.join(names)}"
        raise UnknownArgumentError(f"there is no argument {unknown[0]!r}{hint}")
    if sampling is None:
        return dataclasses.replace(defaults.sampling, **changes)
    if not isinstance(sampling, Sampling):
        raise UserInputError(f"sampling is a maxjax.Sampling, not {type(sampling).__name__}")
    if changes:
        raise UserInputError(
            f"{next(iter(changes))}= and sampling= are both given: put it in sampling=Sampling(…)"
        )
    return sampling
