"""Speculation: answers are the same with guesses and without, and guesses are made only where they pay."""

from functools import partial

import jax
import numpy as np
import pytest
import scipy.stats

import maxjax
from maxjax.engine.batching import programs, speculation
from maxjax.engine.batching.calls import compiled_count
from maxjax.engine.batching.draft import Drafts, ModelGuesses
from maxjax.engine.batching.lookup import Lookup
from maxjax.engine.batching.scheduler import Scheduler
from maxjax.engine.batching.speculation import Rates, Speculation
from maxjax.errors import UserInputError
from maxjax.models import Llama, LlamaConfig, Mamba, MambaConfig
from maxjax.models.parts.rotary import Rope
from maxjax.nn.rope_scaling import LongRoPEScalingParams
from tests.models.decoders import one_character_each

from .test_engine import PROMPTS, SETTINGS, VOCAB, page_bytes, same

KEY, LOOKUP = jax.random.key(1), {"speculation": "lookup"}


@pytest.fixture(scope="module")
def model():
    return made()


def made(**options):
    """A model that likes to go round in circles of 12 tokens."""
    config = LlamaConfig(
        VOCAB, 32, 64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, **options,
    )  # fmt: skip
    model = maxjax.init(Llama(config), jax.random.key(3))
    for layer in model.model.layers:
        scale(layer.self_attn.o_proj.weight, 0.05)
        scale(layer.mlp.down_proj.weight, 0.05)
    tokens, table = np.arange(VOCAB), np.asarray(model.model.embed_tokens.weight)
    following = tokens - tokens % 12 + (tokens + 1) % 12
    head = model.lm_head.weight
    head.value = head.value.at[following].add(
        1.2 * table / np.linalg.norm(table, axis=1, keepdims=True)
    )
    return model


@pytest.fixture(scope="module")
def draft():
    return made_draft()


def made_draft(**options):
    """A model that mostly agrees with the other one."""
    config = LlamaConfig(
        VOCAB, 32, 48, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=512,
        **options,
    )  # fmt: skip
    found, like = maxjax.init(Llama(config), jax.random.key(4)), made()
    for layer in found.model.layers:
        scale(layer.self_attn.o_proj.weight, 0.0)
        scale(layer.mlp.down_proj.weight, 0.0)
    found.model.embed_tokens.weight.value = like.model.embed_tokens.weight.value
    found.lm_head.weight.value = like.lm_head.weight.value
    return found


@pytest.fixture(params=["lookup", "draft"])
def how(request, draft):
    return {"draft": draft} if request.param == "draft" else LOOKUP


WITH_ALL = partial(pytest.param, marks=pytest.mark.extra)


def scale(weight, factor):
    weight.value = weight.value * factor


@pytest.fixture(autouse=True)
def free(monkeypatch):
    """Guesses that cost nothing, so that all are used, whatever the machine measures."""
    monkeypatch.setattr(Speculation, "_time_of", lambda self, shape, rows: 1 + 1e-3 * shape[0])
    monkeypatch.setattr(Speculation, "plain_seconds", lambda self, rows: 1.0)
    monkeypatch.setattr(ModelGuesses, "extra_time", lambda self, count, rows: 0.0)


@pytest.fixture(params=[True, False], ids=["tokens", "rows"])
def shapes(request, monkeypatch):
    """Programs for tokens of any text, and for the same number of each, as accelerators run."""
    before = Speculation.__init__

    def init(self, slots, row_counts, is_ragged, is_exact):
        before(self, slots, row_counts, request.param, is_exact)

    monkeypatch.setattr(Speculation, "__init__", init)


def answers(model, prompts, each, how, tokenizer=None, **options):
    """The answers with guesses, some of which are right."""
    with maxjax.Engine(model, tokenizer, **how, **options) as engine:
        waiting = [engine.submit(p, **o) for p, o in zip(prompts, each, strict=True)]
        found = [answer.result() for answer in waiting]
        stats = engine.stats()
        assert 0 < stats.right_tokens < stats.guessed_tokens
        assert stats.steps < stats.written_tokens
        assert stats.free_pages == stats.pages
    return found


def expected(model, prompts, each, tokenizer=None, **options):
    with maxjax.Engine(model, tokenizer, **options) as engine:
        waiting = [engine.submit(p, **o) for p, o in zip(prompts, each, strict=True)]
        return [answer.result() for answer in waiting]


def check(model, prompts, each, how, **options):
    found = answers(model, prompts, each, how, **options)
    for one, wanted in zip(found, expected(model, prompts, each, **options), strict=True):
        same(one, wanted)


@pytest.mark.parametrize(
    ("how", "shapes", "slots"),
    [
        ("lookup", True, 3),
        ("draft", False, 3),
        WITH_ALL("lookup", False, 3),
        WITH_ALL("draft", True, 3),
        *(WITH_ALL(how, shapes, 1) for how in ("lookup", "draft") for shapes in (True, False)),
    ],
    indirect=["how", "shapes"],
)
def test_settings_of_their_own(model, how, shapes, slots):
    """Greedy and drawn texts, with penalties and without, in one batch, of which some end while others go on."""
    each = [
        {"max_new_tokens": 30 + 9 * i, "eos_ids": (), "key": KEY, **one}
        for i, one in enumerate(SETTINGS)
    ]
    check(model, PROMPTS, each, how, slots=slots, chunk=16)


def test_ends_limits_and_borders_of_pages(model, how, shapes):
    end = expected(model, PROMPTS[:1], [{"max_new_tokens": 40}], slots=4, chunk=16)[0].tokens[-1]
    loop = [*range(20)] * 6
    prompts = [loop[:n] for n in range(59, 71)]
    each = [{"max_new_tokens": n} for n in range(1, 7)]
    each += [{"max_new_tokens": 90, "eos_ids": [end], "min_new_tokens": n} for n in range(6)]
    check(model, prompts, each, how, slots=4, chunk=16)


def test_stop_strings(model):
    tokenizer = one_character_each()
    options = {"tokenizer": tokenizer, "slots": 4, "chunk": 16}
    text = str(expected(model, ["abc"], [{"max_new_tokens": 150}], **options)[0])
    each = [{"max_new_tokens": 150, "stop": text[n : n + 3]} for n in (60, 90, 120)]
    check(model, ["abc"] * 3, each, LOOKUP, **options)


def test_too_few_pages(model, draft, how):
    each = [{"max_new_tokens": 120, "temperature": 0.3, "key": KEY}] * len(PROMPTS)
    size = 6 * (page_bytes(model) + page_bytes(draft))
    check(model, PROMPTS, each, how, slots=4, cache_bytes=size, chunk=16)


def test_cancelled(model):
    options = {"slots": 4, "chunk": 16}
    with maxjax.Engine(model, speculation="lookup", **options) as engine:
        first = engine.submit(PROMPTS[0], max_new_tokens=400, eos_ids=())
        second = engine.submit(PROMPTS[1], max_new_tokens=60, eos_ids=())
        second.result()
        first.cancel()
        found = first.result().tokens
    each = [{"max_new_tokens": 400, "eos_ids": ()}]
    wanted = expected(model, PROMPTS[:1], each, **options)[0].tokens
    assert found == wanted[: len(found)]


@pytest.mark.parametrize(
    ("how", "explicit"),
    [("lookup", True), ("draft", False), WITH_ALL("lookup", False), WITH_ALL("draft", True)],
    indirect=["how"],
)
def test_mesh(how, explicit):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2,), ("model",), axis_types=(kind,), devices=jax.devices()[:2])
    each = [{"max_new_tokens": 40}] * 4
    check(made().to(mesh), PROMPTS[:4], each, how, slots=2, chunk=16)


def test_exact(model, how):
    """The same bits whatever else runs, and whatever is measured."""
    options = {"max_new_tokens": 60, "logprobs": 2, "temperature": 0.5, "key": KEY}
    settings = {"slots": 5, "exact": True, "chunk": 64}
    with maxjax.Engine(model, **how, **settings) as engine:
        alone = [engine.submit(p, **options).result() for p in PROMPTS]
        together = [engine.submit(p, **options) for p in PROMPTS]
        for one, other in zip(alone, together, strict=True):
            assert one.logprobs == other.result().logprobs
            assert one.tokens == other.result().tokens
        assert 0 < engine.stats().right_tokens < engine.stats().guessed_tokens


@pytest.mark.parametrize("how", ["draft", WITH_ALL("lookup")], indirect=True)
def test_rope_of_the_length(how):
    """A text that outgrows the RoPE of its keys is read again, and no guess goes beyond that."""
    scaling = LongRoPEScalingParams([1.0, 1.5, 2.0, 2.5], [2.0, 3.0, 4.0, 9.0], 64, 512)
    rope = Rope(500.0, scaling)
    each = [{"max_new_tokens": 80}] * len(PROMPTS)
    check(made(rope_parameters=rope), PROMPTS, each, how, slots=4, chunk=16)


def test_grammar():
    """A text with a grammar is written without guesses, beside others with them."""
    model, tokenizer = maxjax.load("tiny")
    each = [{"max_new_tokens": 60, "eos_ids": ()}, {"regex": "[a-e]{20}", "max_new_tokens": 60}]
    prompts = ["1 2 3 1 2 3 1 2 3", "What is 1 + 1?"]
    found = answers(model, prompts, each, LOOKUP, tokenizer, slots=4)
    assert len(found[1]) == 20
    for one, wanted in zip(found, expected(model, prompts, each, tokenizer, slots=4), strict=True):
        same(one, wanted)


def test_logits_processor(model):
    def processor(logits, last, positions):
        columns = jax.lax.broadcasted_iota(np.int32, logits.shape, 1)
        return jax.numpy.where(columns == (last + positions % 3)[:, None], logits + 3, logits)

    options = {"slots": 4, "chunk": 16, "logits_processor": processor}
    check(model, PROMPTS, [{"max_new_tokens": 50}] * len(PROMPTS), LOOKUP, **options)


def test_not_finite():
    """Only the text whose logits are not finite ends with an error, also where that is after a guess."""
    bad = made()
    table = bad.model.embed_tokens.weight
    table.value = table.value.at[7].set(np.nan)
    loop = [5, 6, 7, 8]
    with maxjax.Engine(bad, slots=4, chunk=16, speculation="lookup") as engine:
        good = engine.submit([5, 6, 5], max_new_tokens=40, logit_bias={7: -100.0})
        with pytest.raises(FloatingPointError, match="prompt 1"):
            engine.submit(loop * 3, max_new_tokens=9).result()
        assert len(good.result().tokens) == 40


COMPILED = (programs.read, programs.read_tokens, programs.decode, speculation.verify)


def check_programs(engine, count, before):
    """So many programs have been compiled since there were ``before``; guesses and answers compile no other."""
    assert count == compiled_count(*COMPILED) - before
    waiting = [
        engine.submit(p, max_new_tokens=40, **o) for p, o in zip(PROMPTS, SETTINGS, strict=True)
    ]
    for answer in waiting:
        answer.result()
    assert engine.stats().right_tokens > 0
    assert compiled_count(*COMPILED) - before == count


@pytest.mark.parametrize("how", ["draft", WITH_ALL("lookup")], indirect=True)
def test_nothing_is_compiled_after_compile(how):
    before = compiled_count(*COMPILED)
    if "draft" in how:
        how = {"draft": made_draft(rms_norm_eps=1e-4)}  # no other test has its programs
    with maxjax.Engine(made(rms_norm_eps=1e-4), slots=3, chunk=16, **how) as engine:
        count = engine.compile()
        # Chunks of 16 tokens, steps of 1 and 3 texts, and 4, 8 and 16 tokens with guesses; the draft has no words and
        # no grammars.
        programs_of_draft = (1 + 2) * ("draft" in how)
        assert count == 2 * (1 + 2 + 3) + programs_of_draft
        check_programs(engine, count, before)


def test_generate_stream_and_conversation(model, how, monkeypatch):
    calls, before = [], Scheduler._dispatch_guesses
    monkeypatch.setattr(
        Scheduler, "_dispatch_guesses", lambda *args: (calls.append(args), before(*args))[1]
    )
    options = {"max_new_tokens": 120, "temperature": 0.5, "key": KEY, "eos_ids": ()}
    wanted = maxjax.generate(model, None, PROMPTS, **options)
    found = maxjax.generate(model, None, PROMPTS, **options, **how)
    for one, other in zip(found, wanted, strict=True):
        same(one, other)
    assert calls
    calls.clear()
    stream = maxjax.stream(model, None, PROMPTS[0], **options, **how)
    assert not list(stream)
    same(stream.completion, wanted[0])
    assert calls
    calls.clear()
    tiny, tokenizer = maxjax.load("tiny")
    guesses = LOOKUP if "draft" not in how else {"draft": tiny}
    chats = [
        maxjax.Conversation(tiny, tokenizer, **o, eos_ids=(), max_new_tokens=50)
        for o in ({}, guesses)
    ]
    for text in ("What is 1 + 2?", "1 2 3 4 1 2 3 4", "What is 37 + 48?"):
        answers = ["".join(chat.say(text)) for chat in chats]
        assert answers[0] == answers[1]
    assert calls


def test_refused_by_generate(model):
    with pytest.raises(UserInputError, match="beam search"):
        maxjax.generate(model, None, [1, 2], num_beams=2, speculation="lookup")


def test_turned_off_where_it_does_not_pay(model, monkeypatch):
    """Guesses that take long are not made, but what they would have been is known."""
    monkeypatch.setattr(Speculation, "_time_of", lambda self, shape, rows: 100.0)
    with maxjax.Engine(model, slots=4, chunk=16, speculation="lookup") as engine:
        engine.submit(PROMPTS[0], max_new_tokens=200, eos_ids=()).result()
        assert engine.stats().guessed_tokens == 0
        assert engine._worker.scheduler.speculation.rates.of(8) > 0.6


def test_turned_off_where_guesses_are_wrong(model):
    """In drawn texts of a flat distribution, pairs of tokens repeat and what follows them does not."""
    options = {"max_new_tokens": 400, "temperature": 50.0, "key": KEY, "eos_ids": ()}
    with maxjax.Engine(model, slots=4, chunk=16, speculation="lookup") as engine:
        engine.submit(PROMPTS[0], **options).result()
        stats = engine.stats()
        assert stats.guessed_tokens < 40
        assert stats.steps > 390


def test_draft_reads_shared_pages_once(model, draft):
    """Also those of an ended text; and what was written without it."""
    common = (np.arange(200) % VOCAB).tolist()
    each = [{"max_new_tokens": 30}] * 4
    prompts = [[*common, n] for n in range(4)]
    read = []
    with maxjax.Engine(model, slots=2, draft=draft) as engine:
        drafts = engine._worker.scheduler.speculation
        before = drafts._read_pieces
        drafts._read_pieces = lambda pieces: (read.extend(n for *_, n in pieces), before(pieces))
        first = engine.submit(prompts[0], **each[0]).result()
        plan, drafts.plan = drafts.plan, lambda texts: None
        text = engine.submit(prompts[1], max_new_tokens=20)
        text.result()
        drafts.plan = plan
        turn = [*prompts[1], *text.result().tokens, 5]
        turned = engine.submit(turn, max_new_tokens=30).result()
        rest = [engine.submit(p, **o).result() for p, o in zip(prompts[2:], each[2:], strict=True)]
    assert read == [201 - 1 + 1, 222 - 192, 201 - 192, 201 - 192]
    wanted = expected(model, [prompts[0], turn, *prompts[2:]], each, slots=4, chunk=16)
    for one, other in zip([first, turned, *rest], wanted, strict=True):
        same(one, other)


def test_draft_reads_a_turn_of_a_conversation_alone(monkeypatch):
    """It goes on with the pages of the turn before, as the model does."""
    model, tokenizer = maxjax.load("tiny")
    read, before = [], Drafts._read_pieces

    def read_pieces(self, pieces):
        read.extend(count for *_, count in pieces)
        before(self, pieces)

    monkeypatch.setattr(Drafts, "_read_pieces", read_pieces)
    chat = maxjax.Conversation(model, tokenizer, eos_ids=(), max_new_tokens=50, draft=model)
    texts, turns = ("What is 1 + 2?", "1 2 3 4 1 2 3 4", "What is 37 + 48?"), []
    for text in texts:
        turns.append((len(read), "".join(chat.say(text))))
    plain = maxjax.Conversation(model, tokenizer, eos_ids=(), max_new_tokens=50)
    assert ["".join(plain.say(text)) for text in texts] == [answer for _, answer in turns]
    for (first, _), (end, _) in zip(turns, [*turns[1:], (len(read), "")], strict=True):
        assert 0 < sum(read[first:end]) < 90  # a question and an answer have about 110 tokens


def test_draft_that_is_the_model_is_always_right(model):
    """Both draw with the same random numbers."""
    each = [{**one, "max_new_tokens": 40, "key": KEY, "eos_ids": ()} for one in SETTINGS[:4]]
    with maxjax.Engine(model, slots=4, chunk=16, draft=model) as engine:
        for answer in [engine.submit(p, **o) for p, o in zip(PROMPTS, each, strict=False)]:
            assert len(answer.result().tokens) == 40
        stats = engine.stats()
        assert stats.right_tokens == stats.guessed_tokens > 100


def test_draft_that_is_always_wrong_is_seldom_asked(model, draft, monkeypatch):
    """And tried again now and then."""
    monkeypatch.setattr(Speculation, "_time_of", lambda self, shape, rows: 2.0)
    other = jax.tree.map(lambda leaf: leaf, draft)
    scale(other.lm_head.weight, -1.0)
    with maxjax.Engine(model, slots=4, chunk=16, draft=other) as engine:
        engine.submit(PROMPTS[0], max_new_tokens=400, eos_ids=()).result()
        stats = engine.stats()
        assert stats.right_tokens < 10
        assert 14 <= stats.guessed_tokens < 60


def test_refused(model, draft):
    with pytest.raises(UserInputError, match="two ways"):
        maxjax.Engine(model, speculation="lookup", draft=draft)
    small = LlamaConfig(VOCAB - 1, 16, 32, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(UserInputError, match="expected 96 tokens, got 95"):
        maxjax.Engine(model, draft=maxjax.init(Llama(small), jax.random.key(0)))
    rope = Rope(500.0, LongRoPEScalingParams([1.0] * 4, [2.0] * 4, 64, 512))
    with pytest.raises(UserInputError, match="RoPE"):
        maxjax.Engine(model, draft=made(rope_parameters=rope))
    with pytest.raises(UserInputError, match="speculation must be"):
        maxjax.Engine(model, speculation="ngram")
    recurrent = maxjax.init(Mamba(MambaConfig(VOCAB, 16, num_hidden_layers=1)), jax.random.key(0))
    with pytest.raises(UserInputError, match="Mamba"):
        maxjax.Engine(recurrent, speculation="lookup")
    with pytest.raises(UserInputError, match="Mamba"):
        maxjax.Engine(model, draft=recurrent)


def test_refused_on_a_mesh_that_divides_texts(how):
    """One text alone is of all devices; where several are divided, no guess is silently left out."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    there = made().to(mesh)
    for call in (
        lambda: maxjax.Engine(there, slots=4, **how),
        lambda: maxjax.generate(there, None, PROMPTS[:2], max_new_tokens=4, **how),
    ):
        with pytest.raises(UserInputError, match="not supported on a mesh whose devices divide"):
            call()
    check(there, PROMPTS[:1], [{"max_new_tokens": 40}], how, slots=1, chunk=32)


def test_lookup_finds_the_longest_place():
    """Against a search of all places, of which the last ones of a pair are looked at."""
    rng = np.random.default_rng(0)
    for size in (2, 3, 9):
        tokens = rng.integers(0, size, 30).tolist()
        lookup, right = Lookup(tokens), 0
        for new in rng.integers(0, size, 120).tolist():
            guess = lookup.guesses(1)
            if lookup.equal:
                place = lookup._place
                assert guess == [tokens[place]]
                equal = lookup.equal
                assert tokens[place - equal : place] == tokens[-equal:]
            else:
                pairs = list(zip(tokens, tokens[1:], strict=False))
                assert pairs[-1] not in pairs[:-1]
            tokens.append(new)
            [(equal, is_right)] = lookup.advance()
            assert is_right == (guess == [new])
            right += is_right
        assert right


def test_rates_follow_what_happens():
    rates = Rates(Rates(0.5))
    for _ in range(60):
        rates.add(2, False)
    assert rates.of(2) < 0.1 < 0.4 < rates.of(3)
    for _ in range(60):
        rates.add(2, True)
    assert rates.of(2) > 0.9


@pytest.mark.parametrize(
    "draws", [10_000, pytest.param(200_000, marks=pytest.mark.extra, id="200000")]
)
@pytest.mark.parametrize("kind", ["lookup", "draft"])
def test_drawn_tokens_have_the_distribution_of_the_model(draws, kind):
    """Chi-square of each token given the one before it, for a model that sees nothing else."""
    size = 64
    config = LlamaConfig(size, 16, 32, num_hidden_layers=1, num_attention_heads=2)
    model = maxjax.init(Llama(config), jax.random.key(5))
    output = model.model.layers[0].self_attn.o_proj.weight
    output.value = np.zeros_like(output.value)
    logits = np.asarray(model(np.arange(size)[:, None])[:, 0], np.float64)
    wanted = np.exp(4 * (logits - logits.max(1, keepdims=True)))
    wanted /= wanted.sum(1, keepdims=True)
    texts, counts = draws // 500, np.zeros((size, size))
    options = {"max_new_tokens": 500, "temperature": 0.25, "eos_ids": ()}
    how = LOOKUP
    if kind == "draft":
        other = maxjax.init(Llama(config), jax.random.key(5))
        scale(other.model.layers[0].self_attn.o_proj.weight, 0)
        scale(other.lm_head.weight, 0.8)
        how = {"draft": other}
    with maxjax.Engine(model, slots=16, **how) as engine:
        each = [engine.submit([i % size], key=jax.random.key(i), **options) for i in range(texts)]
        for i, answer in enumerate(each):
            tokens = [i % size, *answer.result().tokens]
            np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
        stats = engine.stats()
        assert stats.right_tokens > draws / 10
        assert stats.guessed_tokens - stats.right_tokens > draws / 10
    assert counts.sum() == draws
    statistic = freedom = 0
    for found, chances in zip(counts, wanted, strict=True):
        if found.sum() < 50:
            continue
        order = np.argsort(-chances)
        means, found = (chances * found.sum())[order], found[order]
        often = max(int((means >= 5).sum()) - 1, 1)  # the others are counted together
        means, found = (np.append(a[:often], a[often:].sum()) for a in (means, found))
        statistic += ((found - means) ** 2 / means).sum()
        freedom += often
    assert freedom > 100
    assert scipy.stats.chi2.sf(statistic, freedom) >= 0.001
