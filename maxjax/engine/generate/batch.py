"""Batch: the prompts that are generated together, their KV cache and state on the devices."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from ...errors import UserInputError
from ...graph.placement.arrays import put
from ...graph.placement.specs import mesh_of
from ...lockstep import Lockstep
from ...models.parts.rotary import reading_length, same_until
from ...models.weights import check_loaded, named_dtype
from ...nn.kv_cache.cache import KVCache
from ...nn.layer.observe.programs import ProgramObserver
from ...nn.layer.walk import check_module
from ...nn.random_key import checked_key
from ...progress import compiling
from ..bucket import bucket
from ..isolation import isolated
from ..sampling.draw import Sampled
from ..sampling.penalties import History
from ..sampling.settings import GREEDY, Amounts, Sampling
from .programs import MAX_STEPS, BatchState, DispatchTokens, SamplerArgs, Shardings, decode, prefill

MIN_PREFILL, _MIN_CAPACITY = 16, 64
# Slots of the first KV cache beyond the longest prompt; the cache grows when a text needs more.
_FIRST_NEW_TOKENS = 1024


class Batch:
    """A batch of texts that a model continues.

    Args:
        model: a decoder whose weights are loaded.
        prompts: the token ids of each prompt; an empty row is padding, for which nothing is generated.
        limits: the largest number of tokens of each text, its prompt included.
        sampling: how the next token is chosen.
        eos_ids: the token ids that end a text.
        key: the random key; None for ``jax.random.key(0)``. Greedy sampling uses none.
        rows: the number of each text among all texts of the call, from which its random key is
            made; 0, 1, 2, … by default.
        chunk: the largest number of prompt tokens in one prefill; a power of two.
        cache_dtype: dtype of the KV cache: None for the model's dtype, or ``"int8"``.
        together: the call that this batch belongs to, if several processes make it together.
        observer: the run that this batch belongs to, for captures and patches of the model.

    Example:
        >>> import maxjax
        >>> from maxjax.models import Llama, LlamaConfig
        >>> model = Llama(LlamaConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2))
        >>> model = maxjax.init(model, jax.random.key(0))
        >>> texts = Batch(model, [[1, 2, 3], [4]], [8, 4])
        >>> texts.prefill().counts.tolist()
        [1, 1]
        >>> texts.fetch(texts.decode(5)).counts.tolist()
        [4, 2]
    """

    @isolated()
    def __init__(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        *,
        sampling: Sampling = GREEDY,
        eos_ids: Sequence[int] = (),
        key: jax.Array | None = None,
        rows: Sequence[int] | None = None,
        chunk: int = 512,
        cache_dtype: Any = None,
        together: Lockstep | None = None,
        observer: ProgramObserver | None = None,
    ):
        check_model(model)
        if cache_dtype is not None:
            cache_dtype = named_dtype("cache_dtype", cache_dtype)
        chunk = check_chunk(chunk)
        _check_needs_no_order(sampling)
        self.model, self.sampling, self.chunk = model, sampling, chunk
        self.together = together or Lockstep("generate", ())
        self.observer = observer or ProgramObserver(model)
        self._input_sharding = sharding_of_inputs(model)
        self._prompts = [list(prompt) for prompt in prompts]
        self._limits = [int(n) for n in limits]
        self.shows = True  # whether compilation is shown as progress
        self._read = 0  # number of tokens of each row that are in the cache already
        batch = len(self._prompts)
        # Temperature etc. are arguments of the program: another value compiles nothing.
        self._kind = sampling.kind
        self._sampler = SamplerArgs(
            eos=self._put(_padded_ids(eos_ids)),
            key=None if sampling.is_greedy else self._put_key(key),
            amounts=Amounts(*map(self._put, map(np.float32, sampling.amounts))),
        )
        self._counts: dict[int, jax.Array] = {}
        longest = max(len(prompt) for prompt in self._prompts)
        capacity = self._capacity(min(max(self._limits), longest + _FIRST_NEW_TOKENS))
        numbers = np.arange(batch) if rows is None else np.asarray(rows)
        self._rows = numbers.tolist()
        lengths = np.asarray([len(prompt) for prompt in self._prompts], np.int32)
        self._used = longest  # no row has more tokens
        self._begin()
        cache = model.cache(batch, capacity, cache_dtype).for_texts(self._reading_lengths)
        self.state = BatchState(
            cache=self._committed(cache),
            last=self._put(np.zeros(batch, np.int32)),
            done=self._put(lengths == 0),
            bad=self._put(np.zeros(batch, bool)),
            prompts=self._put(lengths),
            limits=self._put(np.asarray(self._limits, np.int32)),
            rows=self._put(numbers.astype(np.int32)),
            first=self._empty_sampled(batch),
            history=self._history(),
        )
        self._shardings = self._shardings_of(self.state)

    # --- steps -------------------------------------------------------------------------------

    @isolated()
    def prefill(self) -> DispatchTokens:
        """Runs the prompt tokens that are not in the cache yet, and samples each first token.

        Returns:
            The first token of each answer, on the host.
        """
        self._read_texts(self._prompts, self._read)
        self._read = max(map(len, self._prompts))
        state = self.state
        first, done, bad = self.together.fetch((state.first, state.done, state.bad))
        first = jax.tree.map(lambda a: a[:, None], first)
        counts = np.asarray([len(prompt) > 0 for prompt in self._prompts], np.int32)
        written = DispatchTokens(first.tokens, counts, done, bad, first)
        self._written = [written] if self._outgrows.any() else []
        return written

    def _read_texts(
        self, texts: Sequence[Sequence[int]], start: int = 0, *, again: bool = False
    ) -> None:
        """Runs the tokens of each row's text from ``start`` on, ``chunk`` at a time.

        Args:
            texts: token ids of each row.
            start: number of tokens of each row that are in the cache.
            again: whether the model has read these tokens before: then nothing is sampled or recorded.
        """
        longest = max(map(len, texts))
        while start < longest:
            width = min(self.chunk, bucket(longest - start, MIN_PREFILL))
            part, counts = slice_of(texts, start, width)
            args = (self.state, part, counts, self._sampler)
            run = {"counts": lambda _, n=counts: n, "width": width, "keeps": not again}
            self.state = self._run(prefill, *args, **run)
            if self.together.is_shared:
                self.together.fetch(self.state.done)
            start += width

    @isolated()
    def decode(self, count: int = MAX_STEPS) -> DispatchTokens:
        """Dispatches the next decode steps, at most ``count``; :meth:`fetch` waits for the tokens."""
        if not 0 < count <= MAX_STEPS:
            raise UserInputError(f"count is {count}: it must be from 1 to {MAX_STEPS}")
        if self._outgrows.any():
            count = self._before_outgrown(count)
        self._used = min(self._used + count, max(self._limits))
        self._grow_cache()
        # Always a device array: a host number would compile another program.
        if count not in self._counts:
            self._counts[count] = self._put(np.int32(count))
        args = (self.state, self._counts[count], self._sampler)
        self.state, written = self._run(
            decode, *args, counts=lambda result: result[1].counts, width=None
        )
        if self._outgrows.any():
            self._written.append(written)
        self._steps += count
        return written

    def _begin(self) -> None:
        """Sets which frequencies of RoPE the texts begin with, and which texts will outgrow these."""
        self._steps = 0  # steps since the prompts: a row that has not ended has got a token in each
        ropes = self.model.config.ropes_by_length
        pairs = list(zip(self._prompts, self._limits, strict=True))
        self._reading_lengths = [reading_length(ropes, len(text), limit) for text, limit in pairs]
        self._same_until = np.asarray(same_until(ropes, self._reading_lengths))
        # The model never reads the last token.
        self._outgrows = np.asarray(self._limits) - 1 > self._same_until
        self._written: list[DispatchTokens] = []

    def _before_outgrown(self, count: int) -> int:
        """Reads the texts again that outgrow their RoPE now; returns how many of ``count`` steps no other does."""
        read = np.asarray([len(prompt) for prompt in self._prompts]) + self._steps
        now = self._outgrows & (read == self._same_until)
        if now.any():
            written = self.together.fetch(self._written)
            now &= ~self.together.fetch(self.state.done)
            texts = [
                [*prompt, *_tokens(written, row)][: read[row]] if now[row] else []
                for row, prompt in enumerate(self._prompts)
            ]
            cache = self.state.cache.emptied(now).for_texts(read + 1)
            prompts = self.state.prompts
            # No prompt ends here, so that nothing is sampled.
            none = self._put(np.full(len(texts), -1, np.int32))
            self.state = self.state._replace(cache=self._committed(cache), prompts=none)
            self._read_texts(texts, again=True)
            self.state = self.state._replace(prompts=prompts)
            self._outgrows &= read != self._same_until
        ahead = (self._same_until - read)[self._outgrows]
        return min([count, *ahead.tolist()])

    def _run(self, program: Any, *args: Any, **recorded: Any) -> Any:
        static = {"settings": self._kind, "shardings": self._shardings}
        with compiling(program.__name__, self.shows):
            return self.observer.run(
                self.together, program, *args, rows=self._rows, **recorded, **static
            )

    @isolated()
    def fetch(self, written: DispatchTokens) -> DispatchTokens:
        """Waits for the tokens of :meth:`decode` and copies them to the host."""
        return self.together.fetch(written)

    @isolated()
    def stop(self, which: Sequence[bool]) -> None:
        """Ends the texts for which ``which`` is True."""
        done = self.together.fetch(self.state.done) | np.asarray(which, bool)
        self.state = self.state._replace(done=self._put(done))

    @isolated()
    def resume(self, prompt: Sequence[int], limit: int, key: jax.Array | None = None) -> bool:
        """Replaces the only row by another prompt, and keeps the cache of their common prefix.

        Returns:
            False if the cache no longer holds that prefix; a new Batch is needed then.
        """
        cache = self.state.cache
        cached = int(self.together.fetch(cache.lengths)[0])
        before, kept = self._prompts[0], 0
        self._prompts, self._limits = [list(prompt)], [int(limit)]
        self._begin()
        if cache.text_lengths is not None:
            ropes, now = self.model.config.ropes_by_length, self.together.fetch(cache.text_lengths)
            if same_until(ropes, now)[0] != self._same_until[0]:
                cached = 0  # RoPE rotates the tokens of the new prompt otherwise
        while kept < min(cached, len(before), len(prompt) - 1) and before[kept] == prompt[kept]:
            kept += 1
        cache = cache.rewind([kept])
        if cache is None:
            return False
        cache = self._committed(cache.for_texts(self._reading_lengths))
        self._read, self._used = kept, len(prompt)
        if not self.sampling.is_greedy:
            self._sampler = self._sampler._replace(key=self._put_key(key))
        self.state = self.state._replace(
            cache=cache, done=self._put(np.zeros(1, bool)), bad=self._put(np.zeros(1, bool)),
            prompts=self._put(np.array([len(prompt)], np.int32)),
            limits=self._put(np.array([limit], np.int32)), history=self._history(),
        )  # fmt: skip
        self._grow_cache()
        return True

    def record(self, tokens: Sequence[int]) -> None:
        """Records the tokens that the only row got, so that :meth:`resume` can reuse their cache."""
        self._prompts[0] += [int(token) for token in tokens]

    def close(self) -> None:
        """Frees the cache, even while a traceback still refers to this Batch."""
        if hasattr(self, "state"):
            del self.state

    # --- arrays on the devices ---------------------------------------------------------------

    def _put(self, array: Any) -> jax.Array:
        return put(array, self._input_sharding)

    def _put_key(self, key: Any) -> jax.Array:
        checked = jax.random.key(0) if key is None else checked_key(key)
        if self._input_sharding.is_fully_addressable or checked.dtype == np.uint32:
            return self._put(checked)
        # JAX cannot assemble an array of keys from the shards of several processes.
        data = self._put(np.asarray(jax.random.key_data(checked)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(checked))

    def _committed(self, cache: KVCache) -> KVCache:
        """The cache with committed arrays, like those a program returns: both use one executable.

        Weights that ``jax.device_put`` moved to a mesh do not say how to split a cache: it is replicated.
        """

        def committed(leaf: jax.Array) -> jax.Array:
            where = leaf.sharding
            is_placed = isinstance(where, NamedSharding)
            return jax.device_put(leaf, _shortest(where) if is_placed else self._input_sharding)

        return jax.tree.map(committed, cache)

    def _shardings_of(self, state: BatchState) -> Shardings:
        if not isinstance(self._input_sharding, NamedSharding):
            return None
        return tuple(leaf.sharding for leaf in jax.tree.leaves(state))

    def _capacity(self, tokens: int) -> int:
        """The cache capacity for ``tokens``: a power of two, but no more than the model can use."""
        longest = max(self.model.max_length, tokens)
        return min(bucket(tokens, _MIN_CAPACITY), longest)

    def _grow_cache(self) -> None:
        cache = self.state.cache
        if self._used > cache.capacity:
            grown = self._committed(cache.grow(self._capacity(self._used)))
            self.state = self.state._replace(cache=grown)
            self._shardings = self._shardings_of(self.state)

    def _empty_sampled(self, batch: int) -> Sampled:
        count = self.sampling.logprobs
        make = lambda kind, *shape: self._put(np.zeros((batch, *shape), kind))
        found = [make(np.int32), make(bool)]
        if count is not None:
            found.append(make(np.float32))
        if count:
            count = min(count, self.model.config.vocab_size)
            found += make(np.int32, count), make(np.float32, count)
        return Sampled(*found)

    def _history(self) -> History | None:
        if not self.sampling.needs_history:
            return None
        size = self.model.config.vocab_size
        prompt = np.zeros((len(self._prompts), size), bool)
        for row, ids in zip(prompt, self._prompts, strict=True):
            row[ids] = True
        return History(self._put(prompt), self._put(np.zeros(prompt.shape, np.int32)))


# --- helpers ------------------------------------------------------------------------------------


def check_chunk(chunk: Any) -> int:
    """The number of prompt tokens that are read at once.

    Raises:
        UserInputError: it is not a power of two.
    """
    if not isinstance(chunk, Integral) or chunk < 1 or int(chunk) & (int(chunk) - 1):
        raise UserInputError(f"chunk is {chunk!r}: it must be a power of two")
    return int(chunk)


def _check_needs_no_order(sampling: Sampling) -> None:
    names = ("no_repeat_ngram_size", "bad_words", "sequence_bias", "dry_multiplier")
    used = next((name for name in names if getattr(sampling, name)), None)
    if used is not None:
        raise UserInputError(
            f"{used} is not supported by this function where the model is placed (supported: maxjax.Engine): leave it "
            f"out, or pass {used}={getattr(Sampling(), used)!r} if it comes from generation_config.json"
        )


def _tokens(dispatches: Sequence[DispatchTokens], row: int) -> list[int]:
    """The token ids of a row in these dispatches."""
    each = ((one.tokens[row], int(one.counts[row])) for one in dispatches)
    return [token for tokens, count in each for token in tokens[:count].tolist()]


def check_model(model: Any) -> None:
    """Raises an error unless ``model`` can generate.

    Raises:
        UserInputError: ``model`` is not a language model, its weights are not loaded, or it is an
            argument of a function that JAX transforms.
    """
    check_module(model, "generate")
    if not callable(getattr(model, "cache", None)) or not hasattr(model, "max_length"):
        raise UserInputError(
            f"{type(model).__name__} is not a language model: it cannot generate text. "
            "Load a decoder; maxjax.embed takes encoders"
        )
    check_loaded(model)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(model)):
        raise UserInputError(
            "texts are generated by programs of their own, which cannot be part of another (jax.jit, "
            "grad, vmap): inside of one, call model(ids, cache)"
        )


def sharding_of_inputs(model: Any) -> Any:
    """The sharding of inputs and state: replicated over the model's mesh, or its single device."""
    found = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(model)]
    mesh = mesh_of(found)
    if mesh is not None:
        return NamedSharding(mesh, PartitionSpec())
    devices = next((where.device_set for where in found if where is not None), jax.devices()[:1])
    return SingleDeviceSharding(min(devices, key=lambda device: device.id))


def _shortest(sharding: NamedSharding) -> NamedSharding:
    """The sharding as XLA's results have it: a spec without the trailing None of replicated axes."""
    entries = list(sharding.spec)
    while entries and entries[-1] is None:
        entries.pop()
    return NamedSharding(sharding.mesh, PartitionSpec(*entries), memory_kind=sharding.memory_kind)


def _padded_ids(ids: Sequence[int]) -> np.ndarray:
    """The ids padded with -1 to a power of two, at least 8: so few programs are compiled."""
    found = np.full(bucket(len(ids), 8), -1, np.int32)
    found[: len(ids)] = list(ids)
    return found


def slice_of(
    prompts: Sequence[Sequence[int]], start: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens ``start`` to ``start + width`` of each prompt, zero-padded, and the count of each row."""
    part = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(part, prompts, strict=True):
        piece = prompt[start : start + width]
        row[: len(piece)] = piece
    counts = [max(0, min(len(prompt) - start, width)) for prompt in prompts]
    return part, np.asarray(counts, np.int32)
