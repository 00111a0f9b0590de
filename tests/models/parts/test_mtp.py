"""Layers of multi-token prediction, against the equations of DeepSeek-V3's report in NumPy, in float64."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from maxjax.errors import UserInputError
from maxjax.models import (
    DeepseekV3,
    DeepseekV3Config,
    DeepseekV32,
    DeepseekV32Config,
    GLM4MoE,
    GLM4MoEConfig,
    Llama,
    LlamaConfig,
)
from maxjax.nn.kv_cache.pages import PagedCache
from tests.fill import filled

LENGTH, PAGE = 23, 8
EXPERTS = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "n_group": 4, "topk_group": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
}  # fmt: skip


def deepseek(kind=DeepseekV3, config=DeepseekV3Config, **more):
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, **EXPERTS, **LATENT, **more}
    return kind(config(50, 16, 24, **sizes))


def glm(**more):
    sizes = {
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **EXPERTS,
        **more,
    }
    return GLM4MoE(GLM4MoEConfig(50, 16, 24, head_dim=8, use_qk_norm=True, **sizes))


MODELS = {"deepseek": deepseek, "glm": partial(glm, attention_bias=True)}


@pytest.fixture(params=MODELS)
def model(request):
    made = MODELS[request.param]()
    made.make_mtp()
    return filled(made, 3)


# --- the equations, for one text without batches or a cache


def norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def rotated(x, width, neighbours, theta=10_000.0):
    """RoPE of heads ``[T, H, D]``, whose first ``width`` features are rotated."""
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(0, width, 2) / width)
    turn = np.exp(1j * angles)[:, None]
    part = x[..., :width]
    pairs = (part[..., ::2], part[..., 1::2]) if neighbours else np.split(part, 2, -1)
    turned = (pairs[0] + 1j * pairs[1]) * turn
    both = turned.real, turned.imag
    part = np.stack(both, -1).reshape(part.shape) if neighbours else np.concatenate(both, -1)
    return np.concatenate([part, x[..., width:]], -1)


def causal(q, k, v, scale):
    scores = np.einsum("thd,shd->hts", q, k) * scale
    scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v)


def latent_attention(w, c, x):
    H, N, R, V = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    q = norm(x @ w["q_a_proj"].T, w["q_a_layernorm"], 1e-6) @ w["q_b_proj"].T
    q = q.reshape(len(x), H, N + R)
    both = x @ w["kv_a_proj_with_mqa"].T
    kv = norm(both[:, :-R], w["kv_a_layernorm"], 1e-6) @ w["kv_b_proj"].T
    kv = kv.reshape(len(x), H, N + V)
    key = np.repeat(rotated(both[:, None, -R:], R, True), H, axis=1)
    q = np.concatenate([q[..., :N], rotated(q[..., N:], R, True)], -1)
    k = np.concatenate([kv[..., :N], key], -1)
    y = causal(q, k, kv[..., N:], (N + R) ** -0.5)
    return y.reshape(len(x), -1) @ w["o_proj"].T


def grouped_attention(w, c, x):
    heads = {"q": c.num_attention_heads, "k": c.num_key_value_heads, "v": c.num_key_value_heads}
    each = {}
    for kind, count in heads.items():
        y = x @ w[f"{kind}_proj"].T + w.get(f"{kind}_proj.bias", 0)
        y = y.reshape(len(x), count, c.head_dim)
        if kind != "v":
            y = rotated(norm(y, w[f"{kind}_norm"], c.rms_norm_eps), c.head_dim // 2, False)
        each[kind] = np.repeat(y, heads["q"] // count, axis=1)
    y = causal(each["q"], each["k"], each["v"], c.head_dim**-0.5)
    return y.reshape(len(x), -1) @ w["o_proj"].T


def mlp(w, front, x):
    inner = silu(x @ w[f"{front}gate_proj"].T) * (x @ w[f"{front}up_proj"].T)
    return inner @ w[f"{front}down_proj"].T


def mixture(w, c, x):
    scores = 1 / (1 + np.exp(-x @ w["gate"].T))
    found = np.zeros_like(x)
    for t, token in enumerate(x):
        biased = scores[t] + w["gate.e_score_correction_bias"]
        groups = biased.reshape(c.n_group, -1)
        best = np.argsort(-np.sort(groups, -1)[:, -2:].sum(-1))[: c.topk_group]
        allowed = np.isin(np.arange(c.n_routed_experts) // groups.shape[1], best)
        chosen = np.argsort(-np.where(allowed, biased, -np.inf))[: c.num_experts_per_tok]
        shares = scores[t, chosen] / scores[t, chosen].sum() * c.routed_scaling_factor
        for number, share in zip(chosen, shares, strict=True):
            found[t] += share * mlp(w, f"experts.{number}.", token)
    return found + mlp(w, "shared_experts.", x)


def predicted(model, h, following):
    """The states x after states ``h`` ``[T, E]`` and the tokens that follow them."""
    c, state = model.config, model.state_dict()
    w = {n.removesuffix(".weight"): np.asarray(a, np.float64) for n, a in state.items()}
    below = lambda front: {n[len(front) :]: a for n, a in w.items() if n.startswith(front)}
    embedded = w["model.embed_tokens"][following]
    halves = (
        norm(embedded, w["mtp.enorm"], c.rms_norm_eps),
        norm(h, w["mtp.hnorm"], c.rms_norm_eps),
    )
    x = np.concatenate(halves, -1) @ w["mtp.eh_proj"].T
    attention = latent_attention if isinstance(model, DeepseekV3) else grouped_attention
    y = norm(x, w["mtp.input_layernorm"], c.rms_norm_eps)
    x = x + attention(below("mtp.self_attn."), c, y)
    y = norm(x, w["mtp.post_attention_layernorm"], c.rms_norm_eps)
    x = x + mixture(below("mtp.mlp."), c, y)
    return norm(x, w["mtp.shared_head.norm"], c.rms_norm_eps)


@jax.jit
def states(model, ids):
    return model.states(ids)


def expected(model, ids, more):
    """The logits of guesses after all of ``ids``, where the tokens ``more`` were guessed one by one."""
    h = np.asarray(states(model, ids[None, :-1])[0], np.float64)
    head = np.asarray(model.lm_head.weight, np.float64)
    following, found = ids[1:], []
    for token in (*more, None):
        x = predicted(model, h, following)
        found.append(head @ x[-1])
        h, following = np.concatenate([h, x[-1:]]), np.append(following, token)
    return np.stack(found)


# --- calls, as the programs of the engine make them


@partial(jax.jit, static_argnames="kind")
def step(model, cache, ids, counts, kind):
    if kind == "predict":
        return model.predict(ids, cache, lengths=counts)
    return model(ids, cache, lengths=counts, last=True)


class Text:
    """A text in slot 1 of a pool, whose other pages and slots hold what must not matter."""

    def __init__(self, model, slot=1):
        self.model, self.slot, self.stored = model, slot, 0
        pool = model.page_pool(9, PAGE, 3, mtp=True)
        junk = lambda a: jax.random.normal(jax.random.key(a.size), a.shape, a.dtype)
        self.pool = jax.tree.map(junk, pool)
        self.table = np.array([5, 2, 7, 0, -1], np.int32)

    def cache(self, rows, starts, found=0, is_ragged=False):
        """The cache of ``rows`` tokens of the text; the last row is padding."""
        slots = np.array([self.slot] * rows + [0 if is_ragged else 3], np.int32)
        table = np.stack([self.table] * rows + [np.full_like(self.table, -1)])
        starts = np.append(starts, 0).astype(np.int32)
        found = np.full(rows + 1, found, np.int32)
        return PagedCache(self.pool, table, starts, slots, is_ragged=is_ragged, found=found)

    def read(self, ids, width=None):
        """Reads tokens as a row of ``width``, or as a step each."""
        if width is None:
            tokens = np.append(ids, 0)[:, None].astype(np.int32)
            starts = self.stored + np.arange(len(ids))
            counts = np.append(np.ones(len(ids), np.int32), 0)
            cache = self.cache(len(ids), starts, is_ragged=len(ids) > 1)
        else:
            tokens = np.zeros((2, width), np.int32)
            tokens[0, : len(ids)] = ids
            counts = np.array([len(ids), 0], np.int32)
            cache = self.cache(1, [self.stored])
        logits, cache = step(self.model, cache, tokens, counts, "read")
        self.pool, self.stored = cache.pool, self.stored + len(ids)
        return logits

    def guess(self, token, more):
        """The logits after the text's last token, and after each guess that was made after it."""
        found = []
        for place, one in enumerate((token, *more)):
            tokens, counts = np.array([[one], [0]], np.int32), np.array([1, 0], np.int32)
            cache = self.cache(1, [self.stored + place])
            logits, cache = step(self.model, cache, tokens, counts, "predict")
            self.pool = cache.pool
            found.append(logits[0])
        return np.stack(found)


def tokens():
    return np.random.default_rng(0).integers(0, 50, LENGTH)


PIECES = {
    "at once": [(22, 22)],
    "in rows": [(5, 8), (1, 8), (8, 8), (8, 8)],
    "joined": [(20, None), (2, None)],
    "mixed": [(3, 8), (1, None), (1, None), (2, None), (15, 16)],
}


@pytest.mark.parametrize("pieces", PIECES)
def test_guesses_are_those_of_the_report(model, pieces):
    text, ids, more = Text(model), tokens(), (7, 11, 3)
    for count, width in PIECES[pieces]:
        text.read(ids[text.stored : text.stored + count], width)
    assert text.stored == LENGTH - 1
    wanted = expected(model, ids, more)
    np.testing.assert_allclose(text.guess(ids[-1], more), wanted, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("width", [None, 8])
def test_wrong_guesses_are_taken_back(model, width):
    """Tokens that are read after guesses, of which some are right, and again."""
    text, ids = Text(model), tokens()
    text.read(ids[:9], 16)
    for right in (0, 2, 3, 0, 1):
        at = text.stored
        text.guess(ids[at], (1, 2, 3))
        guesses = [*ids[at + 1 : at + 1 + right], *[49 - n for n in ids[at + 1 + right : at + 4]]]
        text.read(np.array([ids[at], *guesses]), width)
        text.stored = at + 1 + right
    wanted = expected(model, ids[: text.stored + 1], (5, 6))
    found = text.guess(ids[text.stored], (5, 6))
    np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("width", [None, 16])
def test_pages_of_another_text_keep_what_they_hold(model, width):
    """The states before the first own token are not known: the entry there is that of the other text."""
    first, ids = Text(model), tokens()
    first.read(ids[:10], 16)
    second = Text(model, slot=2)
    second.pool, second.stored = first.pool, 8
    count = LENGTH - 1 - 8
    rows = np.append(ids[8:-1], 0)[:, None] if width is None else np.append(ids[8:-1], [0, 0])[None]
    if width is None:
        cache = second.cache(count, 8 + np.arange(count), found=8, is_ragged=True)
        counts = np.append(np.ones(count, np.int32), 0)
    else:
        rows = np.concatenate([rows, np.zeros_like(rows)])
        cache, counts = second.cache(1, [8], found=8), np.array([count, 0], np.int32)
    _, cache = step(model, cache, rows.astype(np.int32), counts, "read")
    second.pool, second.stored = cache.pool, LENGTH - 1
    wanted = expected(model, ids, (4,))
    np.testing.assert_allclose(
        second.guess(ids[-1], (4,)), wanted, atol=2e-5 * np.abs(wanted).max()
    )


def test_logits_of_the_model_are_those_without_it(model):
    text, ids = Text(model), tokens()
    text.read(ids[:6], 8)
    wanted = np.asarray(model(ids[None, :9])[0])
    np.testing.assert_allclose(text.read(ids[6:9], None)[:3], wanted[6:9], atol=1e-5)


def test_layers_with_an_indexer():
    """Chosen keys are all keys while there are few of them."""
    sizes = {"index_topk": 64, "index_n_heads": 4, "index_head_dim": 6}
    model = deepseek(DeepseekV32, DeepseekV32Config, **sizes)
    model.make_mtp()
    model = filled(model, 3)
    text, ids = Text(model), tokens()
    text.read(ids[:20], 32)
    text.read(ids[20:-1], None)
    wanted = expected(model, ids, (7,))
    np.testing.assert_allclose(text.guess(ids[-1], (7,)), wanted, atol=2e-5 * np.abs(wanted).max())
    few = DeepseekV32(dataclasses.replace(model.config, index_topk=5))
    few.make_mtp()
    few = filled(few, 3)
    chosen = Text(few)
    chosen.read(ids[:-1], 32)
    assert np.abs(chosen.guess(ids[-1], ()) - wanted[:1]).max() > 0.01


def test_a_model_without_such_layers_says_so():
    llama = Llama(LlamaConfig(50, 16, 24, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(UserInputError, match="not supported for Llama"):
        llama.make_mtp()
