"""Settings about the order of tokens, in an Engine and in generate: each step against a plain loop."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxjax
from maxjax.engine.generate.defaults import read_defaults
from maxjax.engine.sampling.settings import Sampling
from maxjax.engine.sampling.texts import resolved
from maxjax.errors import CheckpointFormatError, UserInputError
from maxjax.models import Llama, LlamaConfig
from tests.engine.sampling.test_sequences import dry
from tests.models.decoders import one_character_each

VOCAB, LONGEST = 96, 128
PROMPTS = [[5, 6, 7, 5, 6], [1], [9, 8, 9, 8, 9, 8], [3] * 70, [40, 41, 42], [7, 7]]
SETTINGS = [
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 1, "repetition_penalty": 1.2},
    {"dry_multiplier": 2.0, "dry_base": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": [[8]]},
    {"dry_multiplier": 3.0, "dry_sequence_breakers": []},
    {"bad_words": [[1, 2]]},
    {"banned": [4]},
]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    config = LlamaConfig(
        VOCAB, 32, 64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512,
    )  # fmt: skip
    return maxjax.init(Llama(config), jax.random.key(3))


run = jax.jit(lambda model, ids: model(ids))


def plain(model, prompt, count, **settings):
    """The greedy answer, each token chosen by a loop over its definition."""
    chosen, text = Sampling(**settings), list(prompt)
    for _ in range(count):
        ids = jnp.asarray([text + [0] * (LONGEST - len(text))], jnp.int32)
        values = np.asarray(run(model, ids)[0, len(text) - 1], np.float64)
        for token, bias in chosen.logit_bias:
            values[token] += bias
        for sequence, bias in (*chosen.sequence_bias, *((w, -np.inf) for w in chosen.bad_words)):
            before = len(sequence) - 1
            if before <= len(text) and tuple(text[len(text) - before :]) == sequence[:-1]:
                values[sequence[-1]] += bias
        seen = sorted(set(text))
        penalty = chosen.repetition_penalty
        values[seen] = np.where(values[seen] < 0, values[seen] * penalty, values[seen] / penalty)
        if chosen.dry_multiplier:
            breakers = chosen.dry_sequence_breakers or ()
            numbers = chosen.dry_multiplier, chosen.dry_base, chosen.dry_allowed_length
            values = dry(values, text, *numbers, breakers)
        if n := chosen.no_repeat_ngram_size:
            last = text[len(text) - n + 1 :]
            for i in range(len(text) - n + 1):
                if text[i : i + n - 1] == last:
                    values[text[i + n - 1]] = -np.inf
        values[list(chosen.banned)] = -np.inf
        text.append(int(values.argmax()))
    return tuple(text[len(prompt) :])


def test_each_step_is_as_defined(model):
    """Side by side in an Engine, and each setting changes its text."""
    count = 40
    without = [plain(model, prompt, count) for prompt in PROMPTS]
    words = [tuple(without[4][i : i + 2]) for i in (0, 3)]
    settings = list(SETTINGS)
    settings[5] = {"banned": [without[5][0]], "logit_bias": {5: 1.0}}
    settings[4] = {
        "bad_words": [*words, [1, 2, 3]],
        "sequence_bias": {tuple(without[4][7:10]): -0.3},
    }
    expected = [plain(model, p, count, **s) for p, s in zip(PROMPTS, settings, strict=True)]
    options = {"max_new_tokens": count, "eos_ids": ()}
    with maxjax.Engine(model, slots=4, chunk=16) as engine:
        answers = [engine.submit(p, **options, **s) for p, s in zip(PROMPTS, settings, strict=True)]
        found = [answer.result().tokens for answer in answers]
    for one, wanted, other in zip(found, expected, without, strict=True):
        assert one == wanted != other
    for prompt, wanted, s in zip(PROMPTS[:3], expected, settings, strict=False):
        stream = maxjax.stream(model, None, prompt, **options, **s)
        assert (list(stream), stream.completion.tokens) == ([], wanted)
        assert maxjax.generate(model, None, prompt, **options, **s).tokens == wanted


def test_texts_that_lose_their_pages_are_the_same(model):
    """A paused text goes on with the same order of tokens."""
    settings = {"no_repeat_ngram_size": 2, "max_new_tokens": 60, "eos_ids": ()}
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.page_pool(5, 64, 4, None)))
    with maxjax.Engine(model, slots=4, chunk=16, cache_bytes=size) as engine:
        answers = [engine.submit([*PROMPTS[0], i], **settings) for i in range(4)]
        found = [answer.result().tokens for answer in answers]
    assert found == [plain(model, [*PROMPTS[0], i], 60, no_repeat_ngram_size=2) for i in range(4)]


def test_more_sequences_than_at_first(model):
    """They are larger arrays, which the texts of other slots have too."""
    prompt, options = PROMPTS[0], {"max_new_tokens": 20, "eos_ids": ()}
    first = plain(model, prompt, 20)
    many = [tuple(first[:2]), *((i, j) for i in range(90, 96) for j in range(90)), tuple(range(12))]
    with maxjax.Engine(model, slots=4, chunk=16) as engine:
        long = engine.submit([1], no_repeat_ngram_size=2, max_new_tokens=60, eos_ids=())
        found = engine.submit(prompt, bad_words=many, **options).result().tokens
        assert long.result().tokens == plain(model, [1], 60, no_repeat_ngram_size=2)
    assert found == plain(model, prompt, 20, bad_words=many) != first


def test_every_token_excluded_is_an_error_of_that_request(model):
    with maxjax.Engine(model, slots=4, chunk=16) as engine:
        excluded = engine.submit(
            list(range(90)), no_repeat_ngram_size=1, max_new_tokens=20, eos_ids=()
        )
        other = engine.submit([1, 2], max_new_tokens=20, eos_ids=())
        with pytest.raises(
            FloatingPointError, match="no_repeat_ngram_size and bad_words exclude all"
        ):
            excluded.result()
        assert len(other.result().tokens) == 20
        assert len(set(excluded.completion.tokens)) == VOCAB - 90


# --- texts ----------------------------------------------------------------------------------------


def ids(text):
    return [ord(c) - 33 for c in text]


def test_words_are_texts_too(model):
    tokenizer, options = one_character_each(), {"max_new_tokens": 20, "eos_ids": (), "chat": False}
    first = str(maxjax.generate(model, tokenizer, "&'(", **options))
    word = first[2:5]
    found = maxjax.generate(model, tokenizer, "&'(", bad_words=[word], **options)
    assert word not in found != first
    with maxjax.Engine(model, tokenizer, slots=1, chunk=32) as engine:
        assert engine.submit("&'(", bad_words=[word], **options).result() == found


def test_words_are_meant_with_and_without_a_space():
    _, tokenizer = maxjax.load("tiny")
    encode = lambda text: tuple(tokenizer.encode(text, special=False))
    found = resolved(Sampling(bad_words=["is", " 37"]), tokenizer, 10**6).bad_words
    forms = ("is", " is", "37", " 37")
    assert found == tuple(dict.fromkeys(encode(form) for form in forms))


def test_breakers_are_tokens_that_have_them_and_sequences_that_end_in_them():
    class Pieces:
        """A tokenizer whose tokens are these pieces, the longest first."""

        pieces = ("a", "b", "ab", "xa", "b\n", "\n", ":", "ba")

        def __init__(self):
            self._backend = self

        def get_vocab_size(self, with_added_tokens):
            return len(self.pieces)

        def decode_batch(self, each, skip_special_tokens):
            return [self.pieces[token] for (token,) in each]

        def encode(self, text, special):
            return [self.pieces.index(character) for character in text]

    def of(*breakers, size=99):
        settings = Sampling(dry_multiplier=1, dry_sequence_breakers=breakers or None)
        return set(resolved(settings, Pieces(), size).dry_sequence_breakers)

    assert of("\n") == {(4,), (5,)}
    assert of("ab") == {(2,), (0, 1), (3, 1), (7, 1)}
    assert of([1, 2], ":") == {(1, 2), (6,)}
    assert of() == {(4,), (5,), (6,)}  # llama.cpp's
    assert of("\n", size=5) == {(4,)}  # tokens beyond the model's are none


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bad_words": ["no"]}, "bad_words has the text 'no', and there is no tokenizer"),
        (
            {"dry_multiplier": 1, "dry_sequence_breakers": ["\n"]},
            "dry_sequence_breakers has the text",
        ),
        ({"bad_words": [[VOCAB]]}, f"bad_words names token {VOCAB}"),
        ({"sequence_bias": {(1, VOCAB): 1.0}}, f"sequence_bias names token {VOCAB}"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1"),
    ],
)
def test_refused(model, settings, message):
    with maxjax.Engine(model, slots=1) as engine:
        with pytest.raises(UserInputError, match=message):
            engine.submit([1], **settings)
    with pytest.raises(UserInputError, match=message):
        maxjax.generate(model, None, [1], **settings)


# --- files ----------------------------------------------------------------------------------------


def test_settings_are_written_as_they_are_read(tmp_path):
    given = {
        "do_sample": True, "temperature": 0.7, "top_k": 0, "no_repeat_ngram_size": 3, "typical_p": 0.5,
        "epsilon_cutoff": 2e-4, "eta_cutoff": 1e-3, "xtc_probability": 0.3, "xtc_threshold": 0.2,
        "sequence_bias": [[[7], -2.0], [[1, 2], 1.0]], "bad_words_ids": [[1, 2], [3, 3]],
    }  # fmt: skip
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    defaults = read_defaults(tmp_path)
    changed = dataclasses.replace(defaults, max_new_tokens=5)
    assert changed.to_file() == {**given, "max_new_tokens": 5}
    (tmp_path / "generation_config.json").write_text(json.dumps({**given, "typical_p": 2}))
    with pytest.raises(CheckpointFormatError, match="typical_p is 2: it must be a number above 0"):
        read_defaults(tmp_path)
