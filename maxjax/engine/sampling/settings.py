"""Sampling: the settings by which the next token is chosen, checked and static under jit.

The names are those of transformers' ``GenerationConfig`` and, for the penalties and
log-probabilities that it lacks, of the OpenAI API and vLLM.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from ...elsewhere import meant
from ...errors import UnknownArgumentError, UserInputError
from ...rendering.row import short

_LOG = logging.getLogger("maxjax")
_LAST_TOKEN = 2**31 - 1
# The largest logit bias: twice as much is still finite in float32.
_LARGEST = 1e38


@dataclass(frozen=True)
class Sampling:
    """The settings by which the next token is chosen. Hashable, hence static under jit.

    They apply in transformers' order: biases, repetition penalty, then presence and frequency penalty, DRY, bans,
    temperature, top-n-sigma, top-k, top-p, min-p, typical, epsilon, eta, XTC.

    Attributes:
        temperature: the divisor of the logits. 0 is greedy: the most probable token (the first, if
            several are equal), without the filters from top-k to XTC.
        top_k: the number of most probable tokens that are kept, with all that equal the last; 0 is off.
        top_p: the probability that the most probable tokens, which are kept, together reach; 1 is off.
        min_p: the smallest probability of a kept token, as a fraction of that of the most probable
            one; 0 is off.
        repetition_penalty: the divisor of positive logits, and the factor of negative ones, of
            tokens in the prompt or the answer (as in transformers); 1 is off.
        presence_penalty: the number subtracted from the logits of tokens in the answer (as in the
            OpenAI API); 0 is off.
        frequency_penalty: the number subtracted from a token's logit for each time that the token
            is in the answer; 0 is off.
        logit_bias: numbers by token id, each added to the token's logit. Stored as sorted pairs.
        banned: token ids that are never chosen.
        min_new_tokens: the number of tokens that an answer must have before an end-of-text token
            may be chosen; stop strings end it even earlier. 0 is off.
        logprobs: the number of most probable tokens that are reported, with log-probabilities, in
            addition to the chosen one; 0 for the chosen one alone, None for no report.
        typical_p: the probability of the tokens that are kept, those whose information is nearest to its mean
            (locally typical sampling, as in transformers); 1 is off.
        epsilon_cutoff: the smallest probability of a kept token; 0 is off.
        eta_cutoff: the same, but smaller where the distribution is flat (eta sampling, as in transformers); 0 is off.
        top_n_sigma: logits this many standard deviations below the largest are excluded (as in llama.cpp); 0 is off.
        xtc_probability: how often XTC is applied (as in llama.cpp): of the tokens that are at least as probable as
            ``xtc_threshold``, only the least probable stays; 0 is off.
        xtc_threshold: that probability.
        no_repeat_ngram_size: the number of tokens that never come in the same order twice, in prompt and answer
            together (as in transformers); 0 is off.
        bad_words: sequences that never come in the answer or at its border with the prompt: each a text or token ids.
            A text is meant with and without a space before it, as in vLLM. The last token of a sequence is banned
            where the others precede it.
        sequence_bias: numbers by sequences of token ids, each added to the logit of the last token where the others
            precede it (as in transformers). Stored as sorted pairs.
        dry_multiplier: the strength of the DRY penalty (as in llama.cpp). A token that would continue a repetition of
            ``n`` tokens, at least ``dry_allowed_length`` of them, gets ``dry_multiplier * dry_base ** (n -
            dry_allowed_length)`` subtracted from its logit; 0 is off.
        dry_base, dry_allowed_length: the base, and that number of tokens.
        dry_sequence_breakers: texts or token ids beyond which a repetition does not reach; None for llama.cpp's:
            the end of a line, ``:``, ``"`` and ``*``.

    Raises:
        UserInputError: a value is out of range; the message has the field, the value and the range.
        TypeError: a name is unknown; the message suggests the right one if it can.

    Example:
        >>> Sampling(temperature=0.7, top_p=0.9).is_greedy
        False
        >>> Sampling(top_p=1.5)
        Traceback (most recent call last):
        maxjax.errors.UserInputError: top_p is 1.5: it must be a number from 0 to 1 (1: off)
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    banned: Iterable[int] = ()
    logprobs: int | None = None
    min_new_tokens: int = 0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    no_repeat_ngram_size: int = 0
    bad_words: Iterable[str | Iterable[int]] = ()
    sequence_bias: Mapping[tuple[int, ...], float] | tuple[tuple[tuple[int, ...], float], ...] = ()
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_sequence_breakers: Iterable[str | Iterable[int]] | None = None

    def __new__(cls, *_: Any, **values: Any) -> Sampling:
        names = [field.name for field in fields(cls)]
        for name in values.keys() - set(names):
            hint = meant(name, names, "maxjax.Sampling") or f": it has {', '.join(names)}"
            raise UnknownArgumentError(f"Sampling has no {name}={hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, (lowest, highest, text) in _RANGES.items():
            self._set(name, _number(name, getattr(self, name), lowest, highest, text))
        for name in ("repetition_penalty", "typical_p"):
            if getattr(self, name) == 0:
                raise _refused(name, 0, _RANGES[name][2])
        for name in ("top_k", "min_new_tokens", "no_repeat_ngram_size"):
            self._set(name, _count(name, getattr(self, name), "(0: off)"))
        self._set("dry_allowed_length", _count("dry_allowed_length", self.dry_allowed_length))
        if self.logprobs is not None:
            self._set("logprobs", _count("logprobs", self.logprobs, "or None (nothing reported)"))
        self._set("logit_bias", _biases(self.logit_bias))
        self._set("banned", _tokens("banned", self.banned))
        self._set("bad_words", _sequences("bad_words", self.bad_words))
        self._set("sequence_bias", _biases_of_sequences(self.sequence_bias))
        if self.dry_sequence_breakers is not None:
            breakers = _sequences("dry_sequence_breakers", self.dry_sequence_breakers)
            self._set("dry_sequence_breakers", breakers)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the way to set a field of a frozen dataclass

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is chosen, without randomness or a key."""
        return self.temperature == 0

    @property
    def has_rare_filters(self) -> bool:
        """Whether one of the filters is used that few requests use."""
        cuts = self.epsilon_cutoff, self.eta_cutoff, self.top_n_sigma, self.xtc_probability
        return not self.is_greedy and (self.typical_p < 1 or any(cuts))

    @property
    def needs_order(self) -> bool:
        """Whether the order of the tokens so far decides: bans, biases or penalties of sequences."""
        of_sequences = bool(self.bad_words) or bool(self.sequence_bias)
        return of_sequences or self.no_repeat_ngram_size > 0 or self.dry_multiplier > 0

    @property
    def needs_history(self) -> bool:
        """Whether a penalty needs to know the tokens so far."""
        changing = self.presence_penalty, self.frequency_penalty
        return self.repetition_penalty != 1 or changing != (0, 0)

    @staticmethod
    def from_generation_config(config: Mapping[str, Any]) -> Sampling:
        """The settings of a ``generation_config.json``, with transformers' defaults.

        As in transformers, sampling is greedy without ``do_sample``, and ``top_k`` is 50 with it by
        default. A warning of the logger "maxjax" names settings that would change the result and
        are not supported. Unknown settings, and those about length and stopping, are ignored.

        Raises:
            UserInputError: a value has the wrong type or is out of range.

        Example:
            >>> s = Sampling.from_generation_config({"do_sample": True, "temperature": 0.6})
            >>> s.temperature, s.top_k
            (0.6, 50)
            >>> Sampling.from_generation_config({"temperature": 0.6}).is_greedy
            True
        """
        do_sample = _given(config, "do_sample", False)
        if not isinstance(do_sample, bool):
            raise _refused("do_sample", do_sample, "it must be true or false")
        unsupported = _unsupported(config, do_sample)
        banned = list(_tokens("suppress_tokens", _given(config, "suppress_tokens", ())))
        eos = eos_token_ids(config)
        words = []
        for word in filter(None, _lists(config, "bad_words_ids")):
            ids = _ids("bad_words_ids", word)
            if len(ids) > 1:
                words.append(ids)
            else:  # transformers never bans an end-of-text token here
                banned += [token for token in ids if token not in eos]
        bias, of_sequences = _sequence_bias(config)
        if unsupported:
            names = ", ".join(dict.fromkeys(unsupported))
            _LOG.warning("the generation config has settings that are not supported: %s", names)
        top_k = _given(config, "top_k", 50)
        drawing = {
            "temperature": _given(config, "temperature", 1.0),
            "top_k": 0 if top_k == -1 else top_k,  # -1 is vLLM's "off"
            "top_p": _given(config, "top_p", 1.0),
            "min_p": _given(config, "min_p", 0.0),
            **{name: config[name] for name in _RARE_KEYS if config.get(name) is not None},
        }
        return Sampling(
            repetition_penalty=_given(config, "repetition_penalty", 1.0),
            logit_bias=bias,
            banned=banned,
            min_new_tokens=_given(config, "min_new_tokens", 0),
            no_repeat_ngram_size=_given(config, "no_repeat_ngram_size", 0),
            bad_words=words,
            sequence_bias=of_sequences,
            **(drawing if do_sample else {}),
        )


def eos_token_ids(config: Mapping[str, Any], name: str = "eos_token_id") -> tuple[int, ...]:
    """The token ids of the setting ``name``, which may be one, several or none.

    Raises:
        UserInputError: a value is not a token id.

    Example:
        >>> eos_token_ids({"eos_token_id": [128009, 128001]})
        (128001, 128009)
    """
    ids = _given(config, name, ())
    return _tokens(name, [ids] if isinstance(ids, Integral) else ids)


# --- checks ---------------------------------------------------------------------------------

# The smallest and the largest value, and the text of the error.
_RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0, math.inf, "it must be a number of at least 0 (0: greedy)"),
    "top_p": (0, 1, "it must be a number from 0 to 1 (1: off)"),
    "min_p": (0, 1, "it must be a number from 0 to 1 (0: off)"),
    "repetition_penalty": (0, math.inf, "it must be a number above 0 (1: off)"),
    "presence_penalty": (-2, 2, "it must be a number from -2 to 2 (0: off)"),
    "frequency_penalty": (-2, 2, "it must be a number from -2 to 2 (0: off)"),
    "typical_p": (0, 1, "it must be a number above 0 and at most 1 (1: off)"),
    "epsilon_cutoff": (0, 1, "it must be a number from 0 to 1 (0: off)"),
    "eta_cutoff": (0, 1, "it must be a number from 0 to 1 (0: off)"),
    "top_n_sigma": (0, _LARGEST, "it must be a number of at least 0 (0: off)"),
    "xtc_probability": (0, 1, "it must be a number from 0 to 1 (0: off)"),
    "xtc_threshold": (0, 1, "it must be a number from 0 to 1"),
    "dry_multiplier": (0, _LARGEST, "it must be a number of at least 0 (0: off)"),
    "dry_base": (1, _LARGEST, "it must be a number of at least 1"),
}


def _refused(name: str, value: Any, expected: str) -> UserInputError:
    try:
        shown = repr(value)
    except ValueError:  # an integer with more digits than Python converts to a str
        shown = "a very large integer"
    return UserInputError(f"{name} is {short(shown)}: {expected}")


def _number(name: str, value: Any, lowest: float, highest: float, text: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _refused(name, value, text)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (lowest <= number <= highest and math.isfinite(number)):
        raise _refused(name, value, text)
    return number


def _is_index(value: Any) -> bool:
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    return is_integer and 0 <= int(value) <= _LAST_TOKEN


def _count(name: str, value: Any, rest: str = "") -> int:
    if not _is_index(value):
        raise _refused(name, value, f"it must be an integer of at least 0 {rest}".rstrip())
    return int(value)


def _token(name: str, value: Any) -> int:
    if not _is_index(value):
        raise _refused(name, value, f"it must be a token id from 0 to {_LAST_TOKEN}")
    return int(value)


def _tokens(name: str, values: Any) -> tuple[int, ...]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise _refused(name, values, "it must be a list of token ids")
    return tuple(sorted({_token(name, value) for value in values}))


Sequence = str | tuple[int, ...]
"""A text or token ids."""


def _sequences(name: str, values: Any) -> tuple[Sequence, ...]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise _refused(name, values, "it must be a list of texts or of lists of token ids")
    return tuple(dict.fromkeys(_sequence(name, value) for value in values))


def _sequence(name: str, value: Any) -> Sequence:
    expected = "each must be a text or a list of token ids, and not empty"
    if isinstance(value, str):
        if not value:
            raise _refused(name, value, expected)
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _refused(name, value, "it must be valid Unicode") from None
        return value
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable):
        raise _refused(name, value, expected)
    found = _ids(name, value)
    if not found:
        raise _refused(name, value, expected)
    return found


def _ids(name: str, values: Iterable[Any]) -> tuple[int, ...]:
    """Token ids in their order."""
    return tuple(_token(name, one) for one in values)


def _biases_of_sequences(values: Any) -> tuple[tuple[tuple[int, ...], float], ...]:
    expected = "it must be a dict from tuples of token ids to numbers"
    pairs = values.items() if isinstance(values, Mapping) else values
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise _refused("sequence_bias", values, expected)
    found: dict[tuple[int, ...], float] = {}
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or isinstance(pair[0], str):
            raise _refused("sequence_bias", values, expected)
        sequence = _sequence("sequence_bias", pair[0])
        assert isinstance(sequence, tuple)
        found[sequence] = _bias("sequence_bias", pair[1], f"for {sequence}")
    return tuple(sorted(found.items()))


def _bias(name: str, bias: Any, what: str) -> float:
    if isinstance(bias, Real) and bias == -math.inf:
        return -math.inf
    text = f"{what} it must be a float32 number or minus infinity"
    return _number(name, bias, -_LARGEST, _LARGEST, text)


def _biases(values: Any) -> tuple[tuple[int, float], ...]:
    expected = "it must be a dict from token ids to numbers"
    pairs = values.items() if isinstance(values, Mapping) else values
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise _refused("logit_bias", values, expected)
    found: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise _refused("logit_bias", values, expected)
        token = _token("logit_bias", pair[0])
        found[token] = _bias("logit_bias", pair[1], f"for token {token}")
    return tuple(sorted(found.items()))


# --- generation_config.json -----------------------------------------------------------------

# Settings that are not supported, with the values that have no effect on the result.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "forced_decoder_ids": ([],),
    "begin_suppress_tokens": ([],),
    "force_words_ids": ([],),
    "constraints": ([],),
    "exponential_decay_length_penalty": (),
    "watermarking_config": (),
    "dola_layers": (),
    "token_healing": (False,),
}
_UNSUPPORTED_IN_DRAWING: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "top_h": (),
    "mirostat": (0,),  # llama.cpp's
}
# The keys of rarer filters: transformers', and llama.cpp's that a GGUF file has.
_RARE_KEYS = ("typical_p", "epsilon_cutoff", "eta_cutoff", "xtc_probability", "xtc_threshold")


def _given(config: Mapping[str, Any], name: str, default: Any) -> Any:
    """A setting of the config; null counts as absent."""
    value = config.get(name)
    return default if value is None else value


def _unsupported(config: Mapping[str, Any], do_sample: bool) -> list[str]:
    table = _UNSUPPORTED | (_UNSUPPORTED_IN_DRAWING if do_sample else {})
    return [
        name
        for name, neutral in table.items()
        if config.get(name) is not None and config[name] not in neutral
    ]


def _lists(config: Mapping[str, Any], name: str) -> list[list[Any]]:
    values = _given(config, name, [])
    if not isinstance(values, list) or not all(isinstance(v, (list, tuple)) for v in values):
        raise _refused(name, values, "it must be a list of lists")
    return values


def _sequence_bias(
    config: Mapping[str, Any],
) -> tuple[dict[int, float], dict[tuple[int, ...], float]]:
    """The biases of single tokens, and those of sequences."""
    bias: dict[int, float] = {}
    of_sequences: dict[tuple[int, ...], float] = {}
    for entry in _lists(config, "sequence_bias"):
        if len(entry) != 2 or not isinstance(entry[0], (list, tuple)):
            raise _refused("sequence_bias", entry, "it must be a list of token ids and a number")
        if len(entry[0]) == 1:
            bias[_token("sequence_bias", entry[0][0])] = entry[1]
        else:
            of_sequences[tuple(entry[0])] = entry[1]
    return bias, of_sequences


GREEDY = Sampling()
"""Greedy sampling: always the most probable token."""
