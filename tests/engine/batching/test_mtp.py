"""Guesses of the model's own layer of multi-token prediction: answers stay the same, and right guesses save steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxjax
from maxjax.engine.batching.calls import compiled_count
from maxjax.engine.batching.speculation import Speculation
from maxjax.errors import UserInputError
from maxjax.models import DeepseekV3, DeepseekV3Config, GLM4MoE, GLM4MoEConfig, Llama, LlamaConfig
from maxjax.models.parts.rotary import Rope
from maxjax.nn.rope_scaling import LongRoPEScalingParams

from .test_engine import PROMPTS, SETTINGS, VOCAB, page_bytes, same
from .test_speculation import COMPILED, check, check_programs, expected, free, scale, shapes

__all__ = ["free", "shapes"]  # fixtures
KEY, MTP = jax.random.key(1), {"speculation": "mtp"}
SIZES = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-12,  # a norm of a norm is the norm
}  # fmt: skip


def circling(model, size=0.05):
    """The model, which likes to go round in circles of 12 tokens, and whose layer guesses that it does."""
    model.make_mtp()
    model = maxjax.init(model, jax.random.key(3))
    for layer in [*model.model.layers, model.mtp]:
        of = 0.0 if layer is model.mtp else size
        experts = getattr(layer.mlp, "experts", None)
        downs = [layer.mlp] if experts is None else [*experts, layer.mlp.shared_experts]
        for weight in (layer.self_attn.o_proj.weight, *(one.down_proj.weight for one in downs)):
            scale(weight, of)
    tokens, table = np.arange(VOCAB), np.asarray(model.model.embed_tokens.weight)
    following = tokens - tokens % 12 + (tokens + 1) % 12
    head, width = model.lm_head.weight, table.shape[1]
    head.value = head.value.at[following].add(
        1.2 * table / np.linalg.norm(table, axis=1, keepdims=True)
    )
    model.mtp.eh_proj.weight.value = jnp.eye(width, 2 * width)  # of the embedded token alone
    return model


def made(size=0.05, **options):
    """A small GLM-4.5 without experts."""
    sizes = {**SIZES, "num_key_value_heads": 2, "first_k_dense_replace": 2, **options}
    return circling(GLM4MoE(GLM4MoEConfig(VOCAB, 32, 64, **sizes)), size)


def latent(size=0.05):
    """A small DeepSeek V3 with experts."""
    config = DeepseekV3Config(
        VOCAB, 32, 64, kv_lora_rank=16, q_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1, n_group=1,
        topk_group=1, **SIZES,
    )  # fmt: skip
    return circling(DeepseekV3(config), size)


@pytest.fixture(scope="module")
def model():
    return made()


@pytest.mark.parametrize("slots", [pytest.param(1, marks=pytest.mark.extra), 3])
def test_settings_of_their_own(model, shapes, slots):
    """Greedy and drawn texts, with penalties and without, in one batch, of which some end while others go on."""
    each = [
        {"max_new_tokens": 30 + 9 * i, "eos_ids": (), "key": KEY, **one}
        for i, one in enumerate(SETTINGS)
    ]
    check(model, PROMPTS, each, MTP, slots=slots)


def test_latent_attention_and_experts(shapes):
    each = [
        {"max_new_tokens": 30 + 9 * i, "eos_ids": (), "key": KEY, **one}
        for i, one in enumerate(SETTINGS[:4])
    ]
    check(latent(), PROMPTS[:4], each, MTP, slots=3)


@pytest.mark.extra
def test_ends_limits_and_borders_of_pages(model):
    end = expected(model, PROMPTS[:1], [{"max_new_tokens": 40}], slots=1)[0].tokens[-1]
    loop = [*range(20)] * 6
    prompts = [loop[:n] for n in range(59, 71)]
    each = [{"max_new_tokens": n} for n in range(1, 7)]
    each += [{"max_new_tokens": 90, "eos_ids": [end], "min_new_tokens": n} for n in range(6)]
    check(model, prompts, each, MTP, slots=12)


@pytest.mark.parametrize("make", [made, pytest.param(latent, marks=pytest.mark.extra)])
def test_a_layer_that_predicts_the_model_is_always_right(make):
    """It draws with the model's random numbers; a step then writes as many tokens as it checks."""
    each = [{**one, "max_new_tokens": 40, "key": KEY, "eos_ids": ()} for one in SETTINGS[:3]]
    with maxjax.Engine(make(0.0), slots=3, **MTP) as engine:
        for answer in [engine.submit(p, **o) for p, o in zip(PROMPTS, each, strict=False)]:
            assert len(answer.result().tokens) == 40
        stats = engine.stats()
        assert stats.right_tokens == stats.guessed_tokens > 60
        assert stats.steps < 20


def test_a_layer_that_is_wrong_changes_no_text(monkeypatch):
    """And it is asked seldom."""
    monkeypatch.setattr(Speculation, "_time_of", lambda self, shape, rows: 2.0)
    model = made()
    scale(model.mtp.eh_proj.weight, -1.0)
    options = {"max_new_tokens": 400, "eos_ids": ()}
    with maxjax.Engine(model, slots=1, **MTP) as engine:
        found = engine.submit(PROMPTS[0], **options).result()
        stats = engine.stats()
        assert stats.right_tokens < 10
        assert 14 <= stats.guessed_tokens < 60
    same(found, expected(model, PROMPTS[:1], [options])[0])


@pytest.mark.extra
def test_too_few_pages(model):
    """Texts that lose their pages are read again."""
    each = [{"max_new_tokens": 120, "temperature": 0.3, "key": KEY}] * len(PROMPTS)
    size = 8 * page_bytes(model)
    check(model, PROMPTS, each, MTP, slots=4, cache_bytes=size, chunk=32)


def test_the_cache_has_room_for_the_layer(model):
    """Its pages are a part of ``cache_bytes``: a third more beside two layers."""
    pages = []
    for how in ({}, MTP):
        with maxjax.Engine(model, slots=1, cache_bytes=60 * page_bytes(model), **how) as engine:
            pages.append(engine.stats().pages)
    assert 37 <= pages[1] <= 40 < pages[0]


def test_shared_pages(model):
    """A text that begins with another one's tokens finds the layer's keys there too."""
    common = (np.arange(200) % 12).tolist()
    prompts, each = [[*common, n] for n in range(4)], [{"max_new_tokens": 30}] * 4
    with maxjax.Engine(made(0.0), slots=3, **MTP) as engine:
        for prompt, options in zip(prompts, each, strict=True):
            engine.submit(prompt, **options).result()
        stats = engine.stats()
        assert stats.found_tokens == 3 * 192
        assert stats.right_tokens == stats.guessed_tokens > 60
    check(model, prompts, each, MTP, slots=3)


def test_exact(model):
    """The same bits whatever else runs, and whatever is measured."""
    options = {"max_new_tokens": 60, "logprobs": 2, "temperature": 0.5, "key": KEY}
    with maxjax.Engine(model, slots=5, exact=True, chunk=64, **MTP) as engine:
        alone = [engine.submit(p, **options).result() for p in PROMPTS]
        together = [engine.submit(p, **options) for p in PROMPTS]
        for one, other in zip(alone, together, strict=True):
            assert one.logprobs == other.result().logprobs
            assert one.tokens == other.result().tokens
        assert 0 < engine.stats().right_tokens < engine.stats().guessed_tokens


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("make", [made, pytest.param(latent, marks=pytest.mark.extra)])
def test_mesh(make, explicit):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2,), ("model",), axis_types=(kind,), devices=jax.devices()[:2])
    each = [{"max_new_tokens": 40}] * 4
    check(make().to(mesh), PROMPTS[:4], each, MTP, slots=2, chunk=32)


@pytest.mark.extra
def test_rope_of_the_length():
    """A text that outgrows the RoPE of its keys is read again, and no guess goes beyond that."""
    scaling = LongRoPEScalingParams([1.0, 1.5], [2.0, 3.0], 64, 512)
    each = [{"max_new_tokens": 80}] * len(PROMPTS)
    check(made(rope_parameters=Rope(500.0, scaling, part=0.5)), PROMPTS, each, MTP, slots=3)


@pytest.mark.extra
def test_cache_in_int8(model):
    check(model, PROMPTS, [{"max_new_tokens": 40}] * 8, MTP, slots=3, cache_dtype="int8")


def test_adapters_change_the_model_and_not_the_layer(model):
    with maxjax.Engine(model, slots=3, adapters={"more": tuned(model)}, **MTP) as engine:
        names = ("more", None, "more")
        found = [
            engine.submit(p, adapter=name, max_new_tokens=40, eos_ids=())
            for p, name in zip(PROMPTS, names, strict=False)
        ]
        found = [answer.result() for answer in found]
        assert engine.stats().right_tokens > 0
    for prompt, name, one in zip(PROMPTS, names, found, strict=False):
        wanted = tuned(model) if name else model
        same(one, expected(wanted, [prompt], [{"max_new_tokens": 40, "eos_ids": ()}])[0])


def tuned(model):
    """The model with LoRA weights of all its linear layers; the layer of multi-token prediction gets none."""
    new, rng = maxjax.lora.add(model, rank=2), np.random.default_rng(0)
    names = [name for name in new.raw_state_dict() if ".lora_" in name]
    assert names and not any("mtp" in name for name in names)
    shapes = {name: new.raw_state_dict()[name].shape for name in names}
    values = {n: rng.normal(0, 0.2, [*map(int, s)]).astype(np.float32) for n, s in shapes.items()}
    new.load_state_dict(values, strict=False)
    return new


def test_captures_see_the_model(model):
    """While a model is observed, no guesses are made, and the layer follows the texts as before."""
    options = {"max_new_tokens": 6, "eos_ids": ()}
    found = []
    for how in ({}, MTP):
        with maxjax.capture(model, "model.layers.1") as captured:
            maxjax.generate(model, None, [1, 2, 3], **options, **how)
        found.append(captured["model.layers.1"])
    assert found[0].shape == (1, 8, 32)
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)


def test_nothing_is_compiled_after_compile():
    before = compiled_count(*COMPILED)
    model = made(rms_norm_eps=1e-7)  # a model of its own
    with maxjax.Engine(model, slots=3, chunk=16, **MTP) as engine:
        count = engine.compile()
        # Those of the model (test_speculation.py), and steps of the layer for 1 and 3 texts.
        assert count == 2 * (1 + 2 + 3) + 2
        check_programs(engine, count, before)


def test_generate_and_stream(model):
    options = {"max_new_tokens": 120, "temperature": 0.5, "key": KEY, "eos_ids": ()}
    wanted = maxjax.generate(model, None, PROMPTS, **options)
    for one, other in zip(
        maxjax.generate(model, None, PROMPTS, **options, **MTP), wanted, strict=True
    ):
        same(one, other)
    stream = maxjax.stream(model, None, PROMPTS[0], **options, **MTP)
    assert not list(stream)
    same(stream.completion, wanted[0])


def test_refused(model):
    llama = LlamaConfig(VOCAB, 16, 32, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(UserInputError, match="not supported for Llama"):
        maxjax.Engine(maxjax.init(Llama(llama), jax.random.key(0)), **MTP)
    with pytest.raises(UserInputError, match="two ways"):
        maxjax.Engine(model, draft=model, **MTP)
    plain = GLM4MoE(model.config)
    with pytest.raises(UserInputError, match=r"maxjax\.load\(path, mtp=True\)"):
        maxjax.Engine(maxjax.init(plain, jax.random.key(0)), **MTP)
