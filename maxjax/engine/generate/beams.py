"""Beam search: of each prompt several answers are continued side by side, those that are together most probable.

It is transformers' ``_beam_search`` (``generation/utils.py``): scores are sums of log-probabilities, after biases,
penalties and bans, and the score of an answer that has ended is divided by a power of its length. The devices compute
log-probabilities and the best continuations of a step; which of them go on is decided on the host.

Beams are rows of a KV cache, which a step copies where beams change their places.

Shapes: B rows, N beams of a prompt, P prompts (B = P · N), C continuations of a prompt, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import UserInputError
from ...graph.placement.arrays import put
from ...kernels import explicit
from ...lockstep import Lockstep
from ...models.parts.rotary import reading_length, same_until
from ...models.weights import named_dtype
from ...nn.kv_cache.cache import KVCache
from ...nn.layer.observe.programs import ProgramObserver
from ...progress import compiling
from ..batching.dispatch import DispatchTokens
from ..batching.running import bias_of
from ..bucket import bucket
from ..isolation import isolated
from ..sampling.draw import Sampled, largest
from ..sampling.rows import RowSettings, Words, adjusted_rows, uses_order, uses_words
from ..sampling.sequences import sequences_of
from ..shardings import (
    Shardings,
    replicated,
    resharded,
    sharding_of_inputs,
    shardings_on_mesh,
)
from .checks import check_chunk
from .completion import Completion
from .defaults import GenerationDefaults, check_beams
from .request import Prompt, Request

# The smallest number of tokens that a program of reading is for.
_LEAST_TOKENS = 16
# What stands for "not at all" in scores, as in transformers.
_NEVER = np.float32(-1e9)


class BeamSettings(NamedTuple):
    """The settings of a beam search.

    Attributes:
        count: N, the number of beams.
        length_penalty: the power of its length by which the score of an ended answer is divided.
        early_stopping: True to end with the N-th answer that has ended; False once the best running beam, at its
            present length, is worse than all of them; "never" once no beam can become better, also a longer one.
        is_default: whether ``generation_config.json`` has said the number of beams.
    """

    count: int
    length_penalty: float
    early_stopping: bool | str
    is_default: bool = False

    @staticmethod
    def of(
        num_beams: Any,
        length_penalty: Any,
        early_stopping: Any,
        n: int,
        defaults: GenerationDefaults,
    ) -> BeamSettings | None:
        """The checked settings; None for one beam, which is no search.

        Args:
            num_beams, length_penalty, early_stopping: as for :func:`maxjax.generate`; None for the default.
            n: number of answers to a prompt.
            defaults: the defaults of the checkpoint.

        Raises:
            UserInputError: one is out of range, or ``n`` is larger than ``num_beams``.

        Example:
            >>> BeamSettings.of(1, None, None, 3, GenerationDefaults()) is None
            True
            >>> BeamSettings.of(None, None, True, 3, GenerationDefaults(num_beams=4))
            BeamSettings(count=4, length_penalty=1.0, early_stopping=True, is_default=True)
        """
        count = defaults.num_beams if num_beams is None else num_beams
        penalty = defaults.length_penalty if length_penalty is None else length_penalty
        stopping = defaults.early_stopping if early_stopping is None else early_stopping
        check_beams(count, penalty, stopping)
        if count == 1:
            if length_penalty not in (None, 1) or early_stopping:
                raise UserInputError("length_penalty and early_stopping need num_beams above 1")
            return None
        found = BeamSettings(count, float(penalty), stopping, num_beams is None)
        if n > count:
            raise found.refused(f"n is {n}: it must be at most num_beams, {count}")
        return found

    def refused(self, problem: str) -> UserInputError:
        """An error that names the file, if the number of beams is its."""
        of_file = f". num_beams={self.count} is that of generation_config.json: pass num_beams=1 for one text"
        return UserInputError(problem + of_file if self.is_default else problem)


def beam_answers(
    request: Request, read: Sequence[Prompt], beams: BeamSettings, n: int, together: Lockstep, *,
    batch_size: int, chunk: int, cache_dtype: Any,
) -> Generator[tuple[int, Completion]]:  # fmt: skip
    """The number and the text of each prompt's ``n`` best answers, best first; ``n`` numbers for each prompt.

    Raises:
        UserInputError: a setting is not supported with beams.
        FloatingPointError: logits became NaN.
    """
    _check(request, beams, together)
    check_chunk(chunk)
    order = sorted(range(len(read)), key=lambda i: len(read[i].ids))
    size = max(batch_size // beams.count, 1)
    for start in range(0, len(order), size):
        members = order[start : start + size]
        prompts = [read[i] for i in members]
        search = _Search(request, prompts, beams, chunk, cache_dtype, together)
        for i, each in zip(members, search.run(members), strict=True):
            for rank, tokens in enumerate(each[:n]):
                yield i * n + rank, _completion(request, read[i], tokens)


def _check(request: Request, beams: BeamSettings, together: Lockstep) -> None:
    sampling = request.sampling
    problem = None
    if not sampling.is_greedy:
        problem = f"temperature={sampling.temperature:g} is not supported with num_beams: pass temperature=0"
    elif sampling.logprobs is not None:
        problem = (
            "logprobs= is not supported with num_beams: maxjax.score gives those of the answers"
        )
    elif request.stops:
        problem = "stop= is not supported with num_beams (supported: eos_ids=): pass stop=()"
    elif together.is_shared:
        problem = "num_beams is not supported for a model that several processes share"
    elif ProgramObserver(request.model).is_observed:
        problem = "num_beams is not supported while the model is captured or patched"
    if problem is not None:
        raise beams.refused(problem)


def _completion(request: Request, prompt: Prompt, tokens: Sequence[int]) -> Completion:
    none, ids = np.zeros(1, bool), np.asarray([tokens], np.int32)
    sampled: Any = (ids, ~none)
    written = DispatchTokens(ids, np.asarray([len(tokens)]), none, none, Sampled(*sampled))
    text = request.partial_completion(prompt)
    text.take(written, 0)
    text.flush()
    return text.completion()


class _Search:
    """A beam search for some prompts at once."""

    @isolated()
    def __init__(
        self, request: Request, prompts: Sequence[Prompt], beams: BeamSettings, chunk: int, cache_dtype: Any,
        together: Lockstep,
    ):  # fmt: skip
        self._model, self._chunk, self._beams, self._together = (
            request.model,
            chunk,
            beams,
            together,
        )
        self._prompts = [prompt.ids for prompt in prompts]
        self._limits = [request.limit(ids) for ids in self._prompts]
        self._dtype = None if cache_dtype is None else named_dtype("cache_dtype", cache_dtype)
        self._where = sharding_of_inputs(self._model)
        self._ends = request.eos_ids
        size = self._model.config.vocab_size
        # So many that N of them can go on, whichever end tokens are among them.
        self._continuations = min(max(2, 1 + len(self._ends)) * beams.count, beams.count * size)
        ropes = self._model.config.ropes_by_length
        pairs = list(zip(self._prompts, self._limits, strict=True))
        self._lengths = [reading_length(ropes, len(ids), limit) for ids, limit in pairs]
        if (np.asarray(self._limits) - 1 > np.asarray(same_until(ropes, self._lengths))).any():
            raise UserInputError(
                "num_beams is not supported for texts that outgrow their RoPE: pass a smaller max_new_tokens"
            )
        sampling, count = request.sampling, len(prompts) * beams.count
        key, ends = np.zeros(2, np.uint32), np.asarray(self._ends, np.int32)
        settings = RowSettings.of(sampling, key, 0, ends, size)
        self._settings = jax.tree.map(lambda a: self._put(np.stack([a] * count)), settings)
        self._words: Words | None = None
        if uses_words(sampling):
            longest = bucket(max(self._limits)) if uses_order(sampling) else None
            sequences = sequences_of(sampling, size) if sampling.needs_order else None
            of = lambda ids: Words.of(ids, [], bias_of(sampling, size), sequences, longest, size)
            rows = [of(ids) for ids in self._prompts for _ in range(beams.count)]
            self._words = jax.tree.map(lambda *a: self._put(np.stack(a)), *rows)

    def _put(self, array: Any) -> jax.Array:
        return put(array, self._where)

    @isolated()
    def run(self, numbers: Sequence[int]) -> list[list[list[int]]]:
        """The tokens of each prompt's N answers, best first; ``numbers`` name the prompts in messages."""
        count, beams = self._beams.count, [
            _Beams(self._beams, len(ids), limit, self._ends)
            for ids, limit in zip(self._prompts, self._limits, strict=True)
        ]  # fmt: skip
        cache, logits = self._read()
        rows = np.repeat(np.arange(len(beams), dtype=np.int32), count)
        cache, logits = self._spread(cache, logits, rows)
        lengths = np.repeat([len(ids) for ids in self._prompts], count).astype(np.int32)
        steps = 0
        static = {"count": self._continuations, "shardings": self._shardings}
        found = choose(
            logits, self._words, self._settings, self._scores(beams), self._put(lengths),
            self._put(np.zeros_like(lengths)), **static,
        )  # fmt: skip
        while True:
            scores, continuations = jax.device_get(found)
            for beam, number, best, which in zip(
                beams, numbers, scores, continuations, strict=True
            ):
                if np.isnan(best).any():
                    raise FloatingPointError(
                        f"after {steps} tokens of the answer to prompt {number} the logits are NaN or infinite. "
                        "maxjax.first_nan(model, ids) names the layer"
                    )
                if not beam.is_done:
                    beam.update(best, which, self._model.config.vocab_size)
            if all(beam.is_done for beam in beams):
                return [beam.answers for beam in beams]
            parents = np.concatenate([i * count + b.parents for i, b in enumerate(beams)])
            tokens = np.concatenate([beam.tokens for beam in beams])
            steps += 1
            with compiling("beam search"):
                cache, self._words, found = step(
                    self._model, cache, self._words, self._settings, self._put(parents.astype(np.int32)),
                    self._put(tokens.astype(np.int32)), self._scores(beams), self._put(lengths + steps),
                    self._put(np.full_like(lengths, steps)), **static,
                )  # fmt: skip

    def _scores(self, beams: Sequence[_Beams]) -> jax.Array:
        return self._put(np.stack([beam.scores for beam in beams]))

    def _read(self) -> tuple[KVCache, jax.Array]:
        """The cache of the prompts, and the logits after them."""
        model, prompts = self._model, self._prompts
        self._capacity = min(bucket(max(self._limits)), max(model.max_length, max(self._limits)))
        cache = model.cache(len(prompts), self._capacity, self._dtype).for_texts(self._lengths)
        longest, start = max(map(len, prompts)), 0
        logits: Any = None
        while start < longest:
            width = min(self._chunk, bucket(longest - start, _LEAST_TOKENS))
            ids, counts = _slice_of(prompts, start, width)
            with compiling("beam search"):
                cache, new = read(model, cache, self._put(ids), self._put(counts))
            ends = np.asarray([start < len(prompt) <= start + width for prompt in prompts])
            logits = new if logits is None else jnp.where(self._put(ends)[:, None], new, logits)
            start += width
        return cache, logits

    def _spread(
        self, cache: KVCache, logits: jax.Array, rows: np.ndarray
    ) -> tuple[KVCache, jax.Array]:
        """The cache and logits with a row for each beam."""
        wide = self._model.cache(len(rows), self._capacity, self._dtype)
        self._shardings = shardings_on_mesh(wide)
        del wide
        return spread(cache, logits, self._put(rows), shardings=self._shardings)


def _slice_of(
    prompts: Sequence[Sequence[int]], start: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens ``start`` to ``start + width`` of each prompt, zero-padded, and the count of each row."""
    part = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(part, prompts, strict=True):
        piece = prompt[start : start + width]
        row[: len(piece)] = piece
    counts = [max(0, min(len(prompt) - start, width)) for prompt in prompts]
    return part, np.asarray(counts, np.int32)


# --- on the devices -------------------------------------------------------------------------------


@partial(jax.jit, donate_argnums=1)
def read(model: Any, cache: KVCache, ids: jax.Array, counts: jax.Array) -> Any:
    """Reads ``counts`` ``[P]`` of the tokens ``[P, T]`` of each prompt; returns the cache and the logits ``[P, V]``."""
    logits, cache = model(ids, cache, lengths=counts, last=True)
    return cache, logits


@partial(jax.jit, static_argnames="shardings")
def spread(cache: KVCache, logits: jax.Array, rows: jax.Array, *, shardings: Shardings) -> Any:
    """The cache and the logits with these rows, int32 ``[B]``."""
    logits = jnp.take(replicated(logits, shardings), rows, axis=0)
    return resharded(_of_rows(cache, rows), shardings), logits


@partial(jax.jit, static_argnames=("count", "shardings"), donate_argnums=(1, 2))
def step(
    model: Any, cache: KVCache, words: Words | None, settings: RowSettings, parents: jax.Array, tokens: jax.Array,
    scores: jax.Array, lengths: jax.Array, written: jax.Array, *, count: int, shardings: Shardings,
) -> Any:  # fmt: skip
    """Adds a token to each beam, and finds the best continuations.

    Args:
        parents: the row of the beam that each continues, int32 ``[B]``.
        tokens: the token that it is continued with, int32 ``[B]``.
        scores: the score of each beam with it, float32 ``[P, N]``.
        lengths: number of tokens of each beam with it, int32 ``[B]``.
        written: number of these that are of its answer, int32 ``[B]``.
        count: C.

    Returns:
        The cache, the words, and what :func:`choose` returns.
    """
    cache = _of_rows(cache, parents)
    logits, cache = model(tokens[:, None], cache, last=True)
    if words is not None:
        words = Words(*jax.tree.map(lambda a: jnp.take(a, parents, axis=0), tuple(words)))
        rows = jnp.arange(len(tokens), dtype=jnp.int32)
        words = words.added(rows, tokens, lengths - 1, jnp.ones(tokens.shape, bool))
    logits = replicated(logits, shardings)
    found = _best(logits, words, settings, scores, lengths, written, count)
    return resharded(cache, shardings), words, found


@partial(jax.jit, static_argnames=("count", "shardings"))
def choose(
    logits: jax.Array, words: Words | None, settings: RowSettings, scores: jax.Array, lengths: jax.Array,
    written: jax.Array, *, count: int, shardings: Shardings,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The best continuations of each prompt's beams.

    Returns:
        Their scores, float32 ``[P, C]``, best first; and for each the number of its beam times V, plus its token.
    """
    return _best(replicated(logits, shardings), words, settings, scores, lengths, written, count)


def _best(
    logits: jax.Array, words: Words | None, settings: RowSettings, scores: jax.Array, lengths: jax.Array,
    written: jax.Array, count: int,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    values = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    rows = jnp.arange(values.shape[0], dtype=jnp.int32)
    values = adjusted_rows(values, settings, lengths, written, words, rows)
    values = values.reshape(*scores.shape, -1) + scores[:, :, None]
    return largest(values.reshape(scores.shape[0], -1), count)


def _of_rows(cache: KVCache, rows: jax.Array) -> KVCache:
    """The cache with these rows, in this order."""
    states = jax.tree.map(lambda a: _take(a, rows, 1), cache.states)
    rest = {name: state for name, state in states.items() if name not in ("full", "sliding")}
    take = lambda a: None if a is None else _take(a, rows, 0)
    return KVCache(
        states["full"], states.get("sliding"), _take(cache.lengths, rows, 0), rest, take(cache.text_lengths),
        take(cache.offsets),
    )  # fmt: skip


def _take(array: jax.Array, rows: jax.Array, axis: int) -> jax.Array:
    """The array with these rows along an axis, sharded as it was."""
    take = lambda array, rows: jnp.take(array, rows, axis=axis)
    return explicit.automatic(take, explicit.mesh_of(array), explicit.entries(array))(array, rows)


# --- on the host ----------------------------------------------------------------------------------


class _Beams:
    """The beams of one prompt, and the best answers that have ended.

    Attributes:
        is_done: whether the search has ended.
        scores: scores of the beams, float32 ``[N]``.
        parents, tokens: the beam that each continues, and its last token, integers ``[N]``.
    """

    def __init__(self, settings: BeamSettings, prompt: int, limit: int, ends: Sequence[int]):
        self._settings, self._most, self._ends = settings, limit - prompt, list(ends)
        count = settings.count
        self._running: list[list[int]] = [[] for _ in range(count)]
        # All beams are the prompt: only the first may be continued, or all would be the same.
        self.scores = np.full(count, _NEVER, np.float32)
        self.scores[0] = 0
        self._ended: list[list[int]] = [[] for _ in range(count)]
        self._ended_scores = np.full(count, _NEVER, np.float32)
        self._has_ended = np.zeros(count, bool)
        self._may_improve, self.is_done = True, False
        self.parents = self.tokens = np.zeros(count, np.int64)

    @property
    def answers(self) -> list[list[int]]:
        """The tokens of the answers, best first."""
        return self._ended

    def update(self, scores: np.ndarray, continuations: np.ndarray, vocab_size: int) -> None:
        """Takes the best continuations of all beams, best first."""
        how, count = self._settings, self._settings.count
        parents, tokens = np.divmod(continuations.astype(np.int64), vocab_size)
        texts = [[*self._running[b], int(t)] for b, t in zip(parents, tokens, strict=True)]
        length = len(texts[0])
        ends = np.isin(tokens, self._ends) | (length >= self._most)
        running = _top(scores + ends * _NEVER, count)

        power = np.float32(length**how.length_penalty)
        ended = scores / power
        ended = ended + np.float32(self._has_ended.all() and how.early_stopping is True) * _NEVER
        ended = ended + np.float32(not self._may_improve) * _NEVER
        has_ended = ends & (np.arange(len(ends)) < count)
        ended = ended + ~has_ended * _NEVER
        all_scores = np.concatenate([self._ended_scores, ended])
        best = _top(all_scores, count)
        all_texts = [*self._ended, *texts]
        self._ended = [all_texts[i] for i in best]
        self._ended_scores = all_scores[best]
        self._has_ended = np.concatenate([self._has_ended, has_ended])[best]

        self.scores = (scores + ends * _NEVER)[running]
        self._running = [texts[i] for i in running]
        self.parents, self.tokens = parents[running], tokens[running]
        self._may_improve &= self._can_improve(length)
        is_full = how.early_stopping is True and self._has_ended.all()
        self.is_done = not self._may_improve or bool(is_full) or bool(ends.all())

    def _can_improve(self, length: int) -> bool:
        """Whether the best running beam may become better than the worst answer that has ended."""
        how = self._settings
        grows = how.early_stopping == "never" and how.length_penalty > 0
        power = np.float32((self._most if grows else length) ** how.length_penalty)
        worst = np.where(self._has_ended, self._ended_scores.min(), _NEVER)
        return bool((self.scores[0] / power > worst).any())


def _top(values: np.ndarray, count: int) -> np.ndarray:
    """The numbers of the largest values, largest first; of equal ones the first."""
    return np.argsort(-values, kind="stable")[:count]
