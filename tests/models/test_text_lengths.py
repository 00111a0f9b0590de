"""RoPE whose frequencies depend on the length of the text: LongRoPE and dynamic NTK.

A text has the tokens of transformers, however it is read: at once, in chunks, token by token, in the turns of a
conversation, beside other texts, on a mesh. The oracle is transformers' forward without a cache, for each length.
"""

import functools

import jax
import numpy as np
import pytest

import maxjax
from maxjax.errors import UserInputError
from maxjax.nn import KVCache
from tests.models.decoders import VOCAB, call, last, one_character_each, oracle, ours
from tests.models.families.choices import Pick
from tests.oracles.models import next_logits

BORDER, NEW = 24, 12
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}<assistant>"
LONG = {
    "rope_type": "longrope", "rope_theta": 500.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 9.0],
    "original_max_position_embeddings": BORDER,
}  # fmt: skip
SHORT = {"num_hidden_layers": 2}
MODELS = {
    "Llama": {**SHORT, "rope_parameters": LONG},
    "Phi3": {**SHORT, "rope_parameters": {**LONG, "type": "longrope"},
             "original_max_position_embeddings": BORDER, "sliding_window": 20},
    "Phimoe": {**SHORT, "num_local_experts": 4, "rope_parameters": {**LONG, "short_mscale": 1.2, "long_mscale": 1.2},
               "original_max_position_embeddings": BORDER},
    "dynamic": {**SHORT, "max_position_embeddings": BORDER,
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}},
}  # fmt: skip


def prompts_of(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, VOCAB, n).tolist() for n in lengths]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """transformers' model of a name, and ours."""

    @functools.cache
    def made(name):
        place = tmp_path_factory.mktemp(name)
        kind = "Llama" if name == "dynamic" else name
        theirs = oracle(kind, place, file="models.test_text_lengths", **MODELS[name])
        return theirs, ours(place)

    return made


def expected(theirs, prompt, new, is_dynamic=False):
    return tuple(theirs.greedy(prompt, new, len(prompt) + new if is_dynamic else None))


def tokens(model, prompts, new=NEW, chunk=8):
    found = maxjax.generate(
        model, None, prompts, max_new_tokens=new, chunk=chunk, eos_ids=(), temperature=0.0
    )
    return [one.tokens for one in found]


@pytest.mark.parametrize("name", MODELS)
def test_each_row_of_a_batch_has_the_tokens_of_its_text_alone(models, name):
    """A row that grows beyond the border, one that is beyond it, one that ends just there, and a short one."""
    theirs, model = models(name)
    prompts = prompts_of(BORDER - 4, BORDER + 3, BORDER - NEW + 1, 5)
    is_dynamic = name == "dynamic"
    assert tokens(model, prompts) == [expected(theirs, p, NEW, is_dynamic) for p in prompts]


def test_a_stream_reads_its_text_again_where_it_outgrows_its_rope(models):
    theirs, model = models("Llama")
    [prompt] = prompts_of(BORDER - 4)
    pieces = maxjax.stream(model, None, prompt, max_new_tokens=NEW, eos_ids=(), temperature=0.0)
    list(pieces)
    assert pieces.completion.tokens == expected(theirs, prompt, NEW)


@pytest.mark.parametrize("name", ["Llama", "dynamic"])
def test_turns_of_a_conversation_that_outgrows_its_rope(models, name):
    """A turn has the tokens of a text that is read at once, whether the border is in its prompt or its answer."""
    model = models(name)[1]
    turns_are_right(model, ["Hi", "a", "b"], BORDER)


def turns_are_right(model, messages, border):
    tokenizer = one_character_each(chat_template=TEMPLATE)
    options = {"max_new_tokens": 10, "eos_ids": (), "temperature": 0.0, "chunk": 8}
    chat, lengths = maxjax.Conversation(model, tokenizer, **options), []
    for text in messages:
        whole = [*chat.messages, {"role": "user", "content": text}]
        stream = chat.say(text)
        list(stream)
        found = stream.completion
        assert found.tokens == maxjax.generate(model, tokenizer, whole, **options).tokens
        lengths.append(len(found.prompt_tokens))
    assert lengths[0] <= border < lengths[-1]
    # The cache goes on after an answer that was read again.
    chat.reset()
    assert list(chat.say(messages[0])) and chat.messages


def test_a_call_that_outgrows_the_rope_of_the_cache_is_refused(models):
    model = models("Llama")[1]
    rows = np.array(prompts_of(BORDER, BORDER, 4)[:2], np.int32)
    counts = np.array([BORDER, 5], np.int32)
    cache = last(model, rows, model.cache(2, 64), counts)[1]
    one = np.ones((2, 1), np.int32)
    with pytest.raises(UserInputError, match=f"row 0 to {BORDER + 1} tokens: beyond {BORDER}"):
        model(one, cache)
    logits, after = last(model, one, cache, np.ones(2, np.int32))
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()
    assert after.lengths.tolist() == [BORDER + 1, 6]
    # A row without tokens, and one whose text ended, outgrow nothing.
    cache = model.cache(2, 64).emptied([True, False])
    assert np.isfinite(model(one, cache, lengths=[0, 1])[0][1]).all()


def test_a_part_of_a_text_has_the_rope_of_the_whole(models):
    model = models("Llama")[1]
    rows = np.array(prompts_of(BORDER + 6), np.int32)
    whole = np.asarray(call(model, rows))
    cache = model.cache(1, 32).for_texts([BORDER + 6])
    first, cache = model(rows[:, :10], cache)
    traced = jax.jit(lambda model, ids: model(ids, model.cache(1, 32).for_texts([BORDER + 6]))[0])
    np.testing.assert_allclose(traced(model, rows[:, :10]), first, atol=1e-5)
    rest, cache = model(rows[:, 10:], cache)
    np.testing.assert_allclose(np.concatenate([first, rest], 1), whole, atol=1e-5)
    assert cache.text_lengths.tolist() == [BORDER + 6]
    assert cache.rewind([10]).text_lengths.tolist() == [BORDER + 6]
    assert cache.rewind([0]).text_lengths.tolist() == [0]
    assert cache.emptied([True]).for_texts([7]).text_lengths.tolist() == [7]


def test_a_cache_without_text_lengths_is_refused(models):
    model = models("Llama")[1]
    cache = KVCache.empty(2, batch=1, num_kv_heads=2, capacity=8, head_dim=8)
    assert cache.for_texts([3]) is cache
    with pytest.raises(UserInputError, match="one for each row"):
        cache.for_texts([3, 4])
    with pytest.raises(UserInputError, match="text_lengths"):
        model(np.ones((1, 2), np.int32), cache)


# --- drawn configurations --------------------------------------------------------------------------


def drawn(kind, pick):
    """Settings of a model with LongRoPE."""
    kv, width = pick(1, 2, 4), pick(8, 12, 16)
    heads, border = kv * pick(1, 2), pick(24, 32, 40)
    share = 0.5 if kind == "Phi4" and width == 12 else 0.75 if kind == "Phi4" else 1.0
    pairs = int(width * share) // 2
    rng = pick.rng
    given = {
        "rope_type": "longrope", "rope_theta": pick(100.0, 10000.0),
        "short_factor": np.sort(rng.uniform(1, 2, pairs)).round(3).tolist(),
        "long_factor": np.sort(rng.uniform(1.5, 9, pairs)).round(3).tolist(),
        "original_max_position_embeddings": border,
    }  # fmt: skip
    settings = {
        "hidden_size": heads * width, "num_attention_heads": heads, "num_key_value_heads": kv,
        "num_hidden_layers": pick(1, 2, 3), "tie_word_embeddings": kind == "Phi4",
    }  # fmt: skip
    if kind == "Llama":
        given |= pick({}, {"factor": 4.0}, {"attention_factor": 1.3})
    else:
        settings["original_max_position_embeddings"] = border
    if kind == "Phimoe":
        scale = pick(1.0, 1.243)
        given |= {"short_mscale": scale, "long_mscale": scale}
        settings |= {"num_local_experts": pick(4, 6)}
    if kind in ("Phi3", "Phi4"):
        given |= {"type": "longrope"}
        settings |= {"sliding_window": pick(None, 9, 30)}
    if share < 1:
        given["partial_rotary_factor"] = share
    return {**settings, "rope_parameters": given}


def assert_same(theirs, prompt, found, new):
    """Asserts that the tokens are the oracle's, up to a token whose logit is as high as the best."""
    other = theirs.greedy(prompt, new)
    at = next((i for i, (a, b) in enumerate(zip(found, other, strict=True)) if a != b), None)
    if at is not None:
        logits = next_logits(theirs.live(), [*prompt, *other[:at]])
        apart = logits.max() - logits[[found[at], other[at]]].min()
        assert apart < 1e-4, f"token {at} is {found[at]}, not {other[at]}: logits {apart:.1e} apart"


@pytest.mark.extra
@pytest.mark.oracle
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", ["Phi3", "Phi4", "Phimoe", "Llama"])
def test_drawn_configurations(tmp_path, kind, seed):
    """Texts from 20 tokens before the border to 64 beyond it, read in chunks, by single tokens, in turns, on a mesh."""
    pick = Pick(np.random.default_rng([seed, *map(ord, kind)]))
    settings = drawn(kind, pick)
    border = settings["rope_parameters"]["original_max_position_embeddings"]
    theirs = oracle({"Phi4": "Phi3"}.get(kind, kind), tmp_path, seed, **settings)
    model, new = ours(tmp_path, stacked=pick(True, False)), 24
    prompts = prompts_of(border - 20, border - 3, border + 1, border + 40, seed=seed)
    whole = tokens(model, prompts, new, 512)
    for prompt, found in zip(prompts, whole, strict=True):
        assert_same(theirs, prompt, found, new)
    if kind in ("Phi3", "Phi4"):  # whose generate reads a text again at the border
        for prompt in prompts:
            assert_same(theirs, prompt, theirs.generated([prompt], new)[0].tolist(), new)
    for chunk in (8, 16, 1):
        assert tokens(model, prompts, new, chunk) == whole
    assert [tokens(model, [prompt], new, 16)[0] for prompt in prompts] == whole
    turns_are_right(model, ["x" * (border - 24), "a", "b"], border)
    jax.clear_caches()
    shape = pick({"model": 8}, {"data": 4, "model": 2}, {"data": 2, "model": 2})
    model.to(maxjax.make_mesh(**shape))
    assert tokens(model, prompts, new, 8) == whole
    jax.clear_caches()
