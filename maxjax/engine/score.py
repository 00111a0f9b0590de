"""``score``: log-probabilities of the tokens of given texts, or of continuations given their prompts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserInputError, checked_integer
from ..lockstep import Lockstep
from ..models.weights import model_facts, shardings_of
from ..text.chat import is_message
from ..text.tokenizer.arguments import check_is_tokenizer, check_unicode
from .bucket import bucket
from .generate.completion import TokenLogprob, token_logprobs
from .generate.request import encoded, listed, prompt_ids
from .isolation import isolated
from .token_losses import TextTokens, TokenLosses, check_scores, row_losses

_LEAST_WIDTH = 16


@dataclass(frozen=True)
class Score:
    """The log-probabilities of the tokens of a text, as :func:`score` computes them.

    Attributes:
        total: the sum of the log-probabilities, natural logarithms.
        is_greedy: whether each token is a most probable one, so that greedy generation would write them.
        logprobs: each scored token with its log-probability, and the most probable ones if they were requested.
        prompt_tokens: the ids of the tokens before them.

    Example:
        >>> Score((TokenLogprob(5, -0.5), TokenLogprob(7, -1.0)), (1, 2), True).total
        -1.5
    """

    logprobs: tuple[TokenLogprob, ...]
    prompt_tokens: tuple[int, ...]
    is_greedy: bool

    @property
    def total(self) -> float:
        return math.fsum(one.logprob for one in self.logprobs)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ids of the scored tokens."""
        return tuple(one.token for one in self.logprobs)

    def __str__(self) -> str:
        count = len(self.logprobs)
        greedy = ", greedy" if self.is_greedy else ""
        return f"log-probability {self.total:,.4f} of {count:,} token{'s' * (count != 1)}{greedy}"


def score(
    model: Any,
    tokenizer: Any,
    prompts: Any,
    continuations: Any = None,
    *,
    logprobs: int = 0,
    batch_size: int = 8,
) -> Any:
    """Computes the log-probabilities of the tokens of given texts, in the model's own distribution.

    Without continuations, each token of a text is scored but the first, which has nothing before it; where the
    tokenizer begins a text with a special token, that is the first. With continuations, the tokens of a continuation
    are scored, given its prompt. As in lm-evaluation-harness, prompt and continuation are encoded together, spaces at
    the end of the prompt belong to the continuation, and its tokens are those after the prompt's; if a token has
    characters of both, it is scored too. An empty prompt is the tokenizer's first special token.

    No chat template is used. Each text is read as a whole: what several texts begin with is read for each of them.

    Several processes that share the model's mesh make the call together, with the same arguments, and all get the
    result.

    Args:
        model: a decoder whose weights are loaded, as returned by ``maxjax.load``.
        tokenizer: the model's tokenizer; None if everything is token ids.
        prompts: a text or token ids; or a list of these.
        continuations: for each prompt one or a list of these; None to score the prompts themselves.
        logprobs: number of most probable tokens that are reported in place of each, most probable first.
        batch_size: largest number of texts that are computed at a time.

    Returns:
        A :class:`Score` for a prompt, a list of them for several prompts. In place of it there is a list where a list
        of continuations was given.

    Raises:
        TypeError: a text is neither a str nor token ids.
        UserInputError: a text is empty, not valid Unicode, longer than the context, or has token ids outside the
            vocabulary; there is nothing to score; a number is out of range; there is no tokenizer for a text; the model
            is not a decoder, or its weights are not loaded.
        FloatingPointError: the logits of the model are NaN.
        ProgramMismatchError: the model, a text or a number is not the same in all processes.
        PeerFailedError, PeerLostError: another process raised an error in this call, or has ended.

    Example:
        >>> import maxjax
        >>> model, tokenizer = maxjax.load("tiny")
        >>> right, wrong = maxjax.score(model, tokenizer, "What is 2 + 3?\\n", ["2 + 3 = 5", "2 + 3 = 6"])
        >>> right.is_greedy, wrong.is_greedy, right.total > wrong.total
        (True, False, True)
        >>> [len(one.logprobs) for one in maxjax.score(model, tokenizer, ["2 + 3 = 5", [5, 6, 7]])]
        [6, 2]
    """
    with Lockstep("score", shardings_of(model)) as together:
        found = _score(model, tokenizer, prompts, continuations, logprobs, batch_size, together)
        together.finish()
    return found


class _Text(NamedTuple):
    """Token ids, of which those from ``first`` on are scored."""

    ids: list[int]
    first: int


@isolated()
def _score(
    model: Any, tokenizer: Any, prompts: Any, continuations: Any, tops: Any, batch_size: Any, together: Lockstep
) -> Any:  # fmt: skip
    check_scores(model, "score")
    check_is_tokenizer(tokenizer)
    tops = checked_integer("logprobs", tops, 0, model.config.vocab_size)
    batch_size = checked_integer("batch_size", batch_size)
    single, several = listed(prompts)
    given, counts = _paired(several, continuations, single)
    reader = _PromptReader(tokenizer, model.config.vocab_size, model.max_length)
    texts = [reader.read(prompt, rest, which) for prompt, rest, which in given]
    if together.is_shared:
        together.agree(
            texts=[text.ids for text in texts], firsts=[text.first for text in texts], tops=tops,
            batch_size=batch_size, **model_facts(model),
        )  # fmt: skip
    # Texts of similar length share a batch: less of it is padding.
    order = sorted(range(len(texts)), key=lambda i: len(texts[i].ids))
    rows = [
        TextTokens(np.asarray(t.ids[:-1], np.int32), np.asarray(t.ids[1:], np.int32)) for t in texts
    ]
    longest = model.max_length
    found = row_losses(
        model, rows, order, batch_size=min(batch_size, bucket(len(rows))), tops=tops, together=together,
        width_of=lambda n: max(n, min(bucket(n, _LEAST_WIDTH), longest)), name="score",
        title=f"scoring {len(rows):,} texts", unit=" texts",
    )  # fmt: skip
    by_number = dict(found)
    scores = [_result(text, by_number[i], given[i][2]) for i, text in enumerate(texts)]
    return _nested(scores, counts, single)


def _paired(
    prompts: Sequence[Any], continuations: Any, single: bool
) -> tuple[list[tuple[Any, Any, str]], list[int | None]]:
    """Each prompt with each of its continuations and its name; and the number of a list of them, None for one."""
    name = "the prompt" if single else "prompts[{}]"
    if continuations is None:
        given = [(prompt, None, name.format(i)) for i, prompt in enumerate(prompts)]
        return given, [None] * len(given)
    if single:
        each = [continuations]
    elif isinstance(continuations, (str, bytes)) or not isinstance(continuations, Iterable):
        raise TypeError(f"continuations must be a list, not {type(continuations).__name__}")
    else:
        each = list(continuations)
    if len(each) != len(prompts):
        raise UserInputError(f"there are {len(prompts)} prompts and {len(each)} continuations")
    given, counts = [], []
    for i, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
        is_one, rest = listed(one)
        place = "the continuation" if single else f"continuations[{i}]"
        for j, text in enumerate(rest):
            given.append((prompt, text, place if is_one else f"{place}[{j}]"))
        counts.append(None if is_one else len(rest))
    return given, counts


def _nested(scores: list[Score], counts: Sequence[int | None], single: bool) -> Any:
    """The scores as the caller has given the texts."""
    left = iter(scores)
    each = [next(left) if n is None else [next(left) for _ in range(n)] for n in counts]
    return each[0] if single else each


class _PromptReader:
    """Encodes texts, and checks token ids."""

    def __init__(self, tokenizer: Any, vocab_size: int, longest: int):
        self._tokenizer, self._vocab_size, self._longest = tokenizer, vocab_size, longest

    def read(self, prompt: Any, rest: Any, which: str) -> _Text:
        """The tokens of a prompt and its continuation; ``which`` names the text for errors."""
        if rest is None:
            ids, first = self._ids(prompt, which), 1
        elif isinstance(prompt, str) and isinstance(rest, str):
            ids, first = self._joined(prompt, rest, which)
        else:
            before = self._ids(prompt, f"the prompt of {which}")
            after = self._ids(rest, which, special=False)
            ids, first = [*before, *after], len(before)
        if len(ids) <= first or (rest is not None and first == 0):
            raise UserInputError(_nothing(which, len(ids), first))
        if len(ids) - 1 > self._longest:
            raise UserInputError(
                f"{which} has {len(ids)} tokens with its prompt, and the model's context is {self._longest}"
                + (": maxjax.perplexity takes a long text in windows" if rest is None else "")
            )
        return _Text(ids, first)

    def _joined(self, prompt: str, rest: str, which: str) -> tuple[list[int], int]:
        if not rest:
            raise UserInputError(_nothing(which, 0, 0))
        bare = prompt.rstrip(" ") if prompt.strip(" ") else ""
        rest = prompt[len(bare) :] + rest
        before, ids = (
            self._encoded(bare, f"the prompt of {which}"),
            self._encoded(bare + rest, which),
        )
        if not before:
            begin = self._tokenizer.bos_id
            return ([begin, *ids], 1) if begin is not None else (ids, 0)
        same = (i for i, pair in enumerate(zip(before, ids, strict=False)) if pair[0] != pair[1])
        return ids, min(next(same, len(before)), len(ids) - 1)

    def _ids(self, given: Any, which: str, special: bool = True) -> list[int]:
        if isinstance(given, str):
            return self._encoded(given, which, special)
        if isinstance(given, (list, tuple)) and given and is_message(given[0]):
            raise TypeError(
                f"{which} is a chat: score takes texts and token ids. maxjax.apply_chat_template makes a text of it"
            )
        return self._checked(prompt_ids(given, which), which)

    def _encoded(self, text: str, which: str, special: bool = True) -> list[int]:
        if self._tokenizer is None:
            raise UserInputError(
                f"{which} is text, and there is no tokenizer: the model's directory has no tokenizer.json. "
                "Pass token ids instead"
            )
        check_unicode(text, which)
        ids = (
            encoded(self._tokenizer, text)
            if special
            else self._tokenizer.encode(text, special=False)
        )
        return self._checked(ids, which)

    def _checked(self, ids: list[int], which: str) -> list[int]:
        wrong = next((i for i in ids if not 0 <= i < self._vocab_size), None)
        if wrong is not None:
            raise UserInputError(
                f"{which} has the token id {wrong}, which is outside the model's vocabulary of {self._vocab_size} "
                "tokens"
            )
        return ids


def _nothing(which: str, count: int, first: int) -> str:
    if first == 0 and count:
        return f"{which} has nothing before its first token: pass token ids that begin with an end-of-text token"
    counted = f"{count} token{'s' * (count != 1)}"
    return f"{which} has {counted}: there is nothing to score, as each token is predicted from those before it"


def _result(text: _Text, found: TokenLosses, which: str) -> Score:
    part = slice(text.first - 1, len(text.ids) - 1)
    losses, best, top_tokens, top = (a[part] for a in found)
    if np.isnan(losses).any():
        raise FloatingPointError(
            f"{which}: the logits of the model are NaN: maxjax.first_nan names the layer where they begin"
        )
    logprobs = token_logprobs(text.ids[text.first :], -losses, top_tokens, top)
    return Score(logprobs, tuple(text.ids[: text.first]), bool(best.all()))
