"""What layers keep beside keys and values: latent vectors, recurrent states, and what others share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxjax
from maxjax.engine.batching.running import Stage, running_text
from maxjax.engine.generate.request import Prompt, Request
from maxjax.engine.generate.stream import scheduler_for
from maxjax.engine.plan import footprint
from maxjax.errors import UserInputError
from maxjax.lockstep import Lockstep
from maxjax.models import DeepseekV3, DeepseekV3Config, Gemma4, Gemma4Config, Qwen35, Qwen35Config
from maxjax.nn.kv_cache.cache import KVCache
from maxjax.nn.kv_cache.kinds import Place, State, States
from tests.models.decoders import call, greedy, ids_of, last, padded

VOCAB = 96
SMALL = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
RECURRENT = Qwen35Config(
    VOCAB, 16, 24, **SMALL, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=4, linear_value_head_dim=6, max_position_embeddings=128,
)  # fmt: skip
LATENT = DeepseekV3Config(
    VOCAB, 16, 24, num_hidden_layers=3, num_attention_heads=4, kv_lora_rank=12, q_lora_rank=8, qk_nope_head_dim=4,
    qk_rope_head_dim=4, v_head_dim=6, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
    first_k_dense_replace=0, n_group=1, topk_group=1, max_position_embeddings=128,
)  # fmt: skip
SHARED = Gemma4Config(
    VOCAB, 16, 24, **{**SMALL, "num_hidden_layers": 6}, global_head_dim=12, hidden_size_per_layer_input=4,
    vocab_size_per_layer_input=VOCAB, num_kv_shared_layers=3, sliding_window=5,
    layer_types=(*["sliding_attention"] * 2, "full_attention") * 2, max_position_embeddings=128,
)  # fmt: skip
KINDS = {
    "recurrent": (Qwen35, RECURRENT),
    "latent": (DeepseekV3, LATENT),
    "shared": (Gemma4, SHARED),
}


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    kind, config = KINDS[request.param]
    return maxjax.init(kind(config), jax.random.key(0))


@pytest.fixture(scope="module")
def recurrent():
    return maxjax.init(Qwen35(RECURRENT), jax.random.key(0))


def prompts_of(*lengths):
    return [ids_of(1, n, n)[0] % VOCAB for n in lengths]


def close(found, expected, atol=2e-5):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=0, atol=atol)


@pytest.mark.sampled(1)
def test_rows_in_chunks_are_as_a_whole(model):
    """Prefill in chunks of ragged rows, of which one ends early, then a decode step without it."""
    ids, lengths = padded(prompts_of(21, 3, 13))
    ids = np.pad(ids, ((0, 0), (0, 7)))
    whole, cache = call(model, ids), model.cache(3, 32)
    for start in range(0, 21, 7):
        counts = np.clip(lengths - start, 0, 7)
        logits, cache = last(model, ids[:, start : start + 7], cache, counts)
        for row in np.flatnonzero((counts > 0) & (start + counts == lengths)):
            close(logits[row], whole[row, lengths[row] - 1])
    states = jax.tree.map(jnp.copy, cache.more)
    tokens, active = np.array([5, 6, 7], np.int32), np.array([1, 0, 1], np.int32)
    logits, after = last(model, tokens[:, None], cache, active)
    assert after.lengths.tolist() == [22, 3, 14]
    ids[np.arange(3), lengths] = tokens
    whole = call(model, ids)
    for row in (0, 2):
        close(logits[row], whole[row, lengths[row]])
    for old, new in zip(jax.tree.leaves(states), jax.tree.leaves(after.more), strict=True):
        np.testing.assert_array_equal(old[:, 1], new[:, 1])  # a finished row


@pytest.mark.sampled(1)
def test_texts_of_a_batch_are_those_of_each_alone(model):
    """Rows end at different steps; those that have ended change nothing."""
    rows = [list(map(int, prompt)) for prompt in prompts_of(41, 4)]
    with maxjax.Engine(model, None, slots=2, chunk=16) as engine:
        answers = [
            engine.submit(prompt, max_new_tokens=count, eos_ids=())
            for prompt, count in zip(rows, (3, 11), strict=True)
        ]
        expected = greedy(model, rows, 11)
        for answer, count, text in zip(answers, (3, 11), expected, strict=True):
            assert list(answer.result().tokens) == text[:count].tolist()


def test_a_recurrent_state_resumes_where_it_is_or_anew(recurrent):
    request, prompt = Request(recurrent, None, 5, None, (), None, {}), [*map(int, prompts_of(9)[0])]
    of = lambda ids: Prompt(ids, None, False)
    options = {"chunk": 16, "cache_dtype": None, "together": Lockstep("stream", ())}
    scheduler = scheduler_for(request, [of(prompt)], 1, longest=64, **options)

    def answer(ids, after):
        """The text that begins with these tokens, and how many of them were read."""
        text = running_text(request, of(ids), None, 0, is_lazy=True, after=after)
        before = scheduler.read_count
        scheduler.add(text)
        while text.stage is not Stage.ENDED:
            scheduler.step()
            list(text.pieces())
        assert text.tokens == [*ids, *greedy(recurrent, [ids], 5)[0]]
        return text, scheduler.read_count - before

    first, _ = answer(prompt, None)
    second, read = answer([*first.tokens, 3, 4, 5], first)
    assert read == 4  # the last token of the answer has not been read
    _, read = answer([*prompt[:4], 1, 2, 3], second)
    assert read == 7  # tokens would have to be forgotten


def test_rewinding_a_recurrent_state(recurrent):
    """Not to tokens in the middle; to none, the state is zeros."""
    state = recurrent.cache(2, 16).more["linear"]
    state = jax.tree.map(jnp.ones_like, state)
    cache = dataclasses.replace(
        recurrent.cache(2, 16), lengths=jnp.array([6, 4]), more={"linear": state}
    )
    assert cache.rewind([5, 4]) is None
    kept = cache.rewind([0, 4])
    assert kept.lengths.tolist() == [0, 4]
    for array in jax.tree.leaves(kept.more):
        assert not array[:, 0].any() and array[:, 1].all()
    grown = cache.grow(32)
    assert grown.capacity == 32 and grown.more["linear"] is state


def test_eight_bits_are_for_what_grows(recurrent):
    cache = recurrent.cache(1, 16, "int8")
    assert (
        cache.keys.dtype == jnp.int8 and cache.more["linear"].arrays["delta"].dtype == jnp.float32
    )
    ids = ids_of(1, 8)
    found, _ = last(recurrent, ids, cache, np.array([8]))
    close(found[0], call(recurrent, ids)[0, -1], atol=0.1)
    groups = {name: (1, States((State("a", (4,)),)), Place()) for name in ("full", "state")}
    with pytest.raises(UserInputError, match="int8 is for keys and values"):
        KVCache.of(groups, batch=1, capacity=4, dtype="int8")


def test_a_cache_of_other_states_is_refused(recurrent):
    other = KVCache.empty(4, batch=1, num_kv_heads=2, capacity=8, head_dim=8)
    with pytest.raises(UserInputError, match=r"4 layers full, and this model 3 layers linear"):
        recurrent(ids_of(1, 2), other)


@pytest.mark.extra
@pytest.mark.parametrize("axes", [{"model": 4}, {"data": 2, "model": 2}, {"data": 2, "fsdp": 2}])
def test_states_are_split_on_a_mesh(model, axes):
    mesh = maxjax.make_mesh(**axes)
    there = jax.tree.map(lambda a: a, model).to(mesh)
    ids, lengths = padded(prompts_of(11, 3))
    one = last(model, ids, model.cache(2, 16), lengths)
    two = last(there, ids, there.cache(2, 16), lengths)
    close(one[0], two[0], atol=1e-4)  # sums in another order, and small norms of the delta rule
    whole = sum(a.nbytes for a in jax.tree.leaves(one[1]))
    part = sum(a.addressable_data(0).nbytes for a in jax.tree.leaves(two[1]))
    assert part < 0.7 * whole
    planned, _ = footprint.cache_bytes(footprint._kept_by(model.config), 2, 16, model.dtype, mesh)
    pool = there.page_pool(2, 16, 2)
    whole = sum(a.nbytes for a in jax.tree.leaves(pool))
    part = sum(a.addressable_data(0).nbytes for a in jax.tree.leaves(pool))
    assert part - 0.1 * whole < planned <= part
    tokens, ones = jnp.array([[5], [6]], jnp.int32), jnp.ones(2, jnp.int32)
    next_one, next_two = last(model, tokens, one[1], ones), last(there, tokens, two[1], ones)
    close(next_one[0], next_two[0], atol=1e-4)
