"""LoRA adapters of an Engine: each text gets what the model with its adapter alone gives it."""

import jax
import numpy as np
import pytest

import maxjax
from maxjax import lora
from maxjax.engine.batching import programs
from maxjax.engine.batching.calls import compiled_count
from maxjax.engine.batching.running import running_text
from maxjax.engine.batching.scheduler import Scheduler
from maxjax.engine.generate.request import Prompt, Request
from maxjax.errors import CheckpointMismatchError, CheckpointMissingError, UserInputError
from maxjax.models import Llama, LlamaConfig
from maxjax.models.deepseek import DeepseekV3, DeepseekV3Config
from tests.fill import filled
from tests.models.decoders import ids_of

VOCAB = 96
PROMPTS = [(ids_of(1, n, seed=n)[0] % VOCAB).tolist() for n in (7, 1, 30, 18, 90, 3, 45, 2)]
# Of all layers, of some layers of a stack, of the table and the head; of different ranks and scales.
TARGETS = {
    "all": ({"rank": 4, "alpha": 12}, None),
    "some": ({"rank": 3}, ["layers.1.self_attn.q_proj", "down_proj"]),
    "ends": ({"rank": 9, "rslora": True}, ["embed_tokens", "lm_head", "o_proj"]),
}
NAMES = ["all", None, "some", "ends", None, "all", "ends", "some"]
OPTIONS = {"max_new_tokens": 20, "eos_ids": (), "logprobs": 2}


def llama(**options):
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return filled(
        Llama(LlamaConfig(VOCAB, 32, 64, max_position_embeddings=512, **sizes, **options))
    )


@pytest.fixture(scope="module")
def model():
    return llama()


def tuned(model, name, seed=1):
    """The model with an adapter whose values change the text."""
    settings, patterns = TARGETS[name]
    new = lora.add(model, patterns, **settings)
    rng = np.random.default_rng(seed)
    values = {
        name: rng.normal(0, 0.3, [int(n) for n in weight.shape]).astype(np.float32)
        for name, weight in new.raw_state_dict().items()
        if "lora_" in name
    }
    new.load_state_dict(values, strict=False)
    return new


@pytest.fixture(scope="module")
def each(model):
    return {name: tuned(model, name) for name in TARGETS}


@pytest.fixture(scope="module")
def expected(model, each):
    """What each prompt gives alone, with each prompt's adapter of NAMES."""
    models = {None: model, **each}
    found = [
        maxjax.generate(models[name], None, prompt, **OPTIONS, chunk=16)
        for prompt, name in zip(PROMPTS, NAMES, strict=True)
    ]
    plain = [maxjax.generate(model, None, prompt, **OPTIONS, chunk=16) for prompt in PROMPTS]
    others = [one.tokens != other.tokens for one, other in zip(found, plain, strict=True)]
    assert others == [name is not None for name in NAMES]
    return found


def same(answer, wanted, atol=1e-4):
    found = answer.result()
    assert found.tokens == wanted.tokens
    for one, other in zip(found.logprobs, wanted.logprobs, strict=True):
        np.testing.assert_allclose(one.logprob, other.logprob, atol=atol)


def submitted(engine, names=NAMES, **options):
    return [
        engine.submit(prompt, adapter=name, **OPTIONS, **options)
        for prompt, name in zip(PROMPTS, names, strict=True)
    ]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"slots": 1}, marks=pytest.mark.extra),
        {"slots": 4, "chunk": 16},
        {"slots": 3, "chunk": 64, "exact": True},
        {"slots": 3, "chunk": 64, "exact": True, "speculation": "lookup"},
    ],
)
def test_each_text_has_its_own_adapter(model, each, expected, options):
    with maxjax.Engine(model, adapters=each, **options) as engine:
        assert engine.adapters == tuple(TARGETS)
        for answer, wanted in zip(submitted(engine), expected, strict=True):
            same(answer, wanted)


def test_from_folders_while_texts_are_written(model, each, expected, tmp_path):
    with maxjax.Engine(model, slots=4, chunk=16) as engine:
        first = engine.submit(PROMPTS[1], **OPTIONS)
        folders = {name: lora.save(tmp_path / name, one) for name, one in each.items()}
        with jax.transfer_guard("disallow"):
            engine.add_adapter("all", each["all"])
            for name in ("some", "ends"):
                engine.add_adapter(name, folders[name])
        for answer, wanted in zip(
            [first, *submitted(engine)], [expected[1], *expected], strict=True
        ):
            same(answer, wanted)


def test_over_quantised_weights(model, tmp_path):
    packed = maxjax.quantize(model, "q8_0", activations="float")[0]
    each = {name: tuned(packed, name) for name in ("all", "some")}
    with maxjax.Engine(packed, slots=4, chunk=16, adapters=each) as engine:
        assert engine.model.model.layers[0].self_attn.q_proj.weight.dtype == maxjax.DType.uint8
        for name, one in each.items():
            wanted = maxjax.generate(one, None, PROMPTS[3], **OPTIONS, chunk=16)
            same(engine.submit(PROMPTS[3], adapter=name, **OPTIONS), wanted)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("explicit", [False, True])
def test_on_a_mesh(each, expected, explicit):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    devices = jax.devices()[:4]
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2, devices=devices)
    with maxjax.Engine(llama().to(mesh), slots=4, chunk=16, adapters=each) as engine:
        for answer, wanted in zip(submitted(engine), expected, strict=True):
            same(answer, wanted)
        layer = engine._worker.scheduler.adapters._together.model.model.layers[0].self_attn
        specs = [tuple(w.sharding.spec) for w in (layer.q_proj.lora_B, layer.o_proj.lora_A)]
        assert specs == [("model", None), (None, "model")]


def test_latent_attention():
    """Attention multiplies by parts of a layer's weight, so its update is in none of the layer's calls."""
    config = DeepseekV3Config(
        VOCAB, 16, 32, num_hidden_layers=2, num_attention_heads=2, kv_lora_rank=8, q_lora_rank=8,
        qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, n_routed_experts=8, num_experts_per_tok=2, n_group=2,
        topk_group=1, moe_intermediate_size=8, first_k_dense_replace=1,
    )  # fmt: skip
    model = filled(DeepseekV3(config))
    each = {str(i): tuned(model, "all", seed=i) for i in range(3)}
    assert each["0"].model.layers[1].self_attn.kv_b_proj.lora is not None
    with maxjax.Engine(model, slots=4, chunk=16, adapters=each) as engine:
        for i, prompt in enumerate(prompt[:9] for prompt in PROMPTS[:4]):
            name = str(i) if i < 3 else None
            answer = engine.submit(prompt, adapter=name, **OPTIONS)
            same(answer, maxjax.generate(each.get(name, model), None, prompt, **OPTIONS, chunk=16))


def test_pages_are_those_of_an_adapter_and_its_version(model, each):
    prompt = (ids_of(1, 200, seed=5)[0] % VOCAB).tolist()
    wanted = {
        name: maxjax.generate(one, None, prompt, **OPTIONS, chunk=16)
        for name, one in {**each, None: model}.items()
    }
    newer = tuned(model, "all", seed=9)
    with maxjax.Engine(model, slots=4, chunk=16, adapters=each) as engine:
        for name in [*TARGETS, None]:
            same(engine.submit(prompt, adapter=name, **OPTIONS), wanted[name])
        assert engine.stats().found_tokens == 0
        same(engine.submit(prompt, adapter="all", **OPTIONS), wanted["all"])
        assert engine.stats().found_tokens == 192
        engine.add_adapter("all", newer)
        same(
            engine.submit(prompt, adapter="all", **OPTIONS),
            maxjax.generate(newer, None, prompt, **OPTIONS, chunk=16),
        )
        assert engine.stats().found_tokens == 192
        # What others have is theirs still.
        same(engine.submit(prompt, adapter="ends", **OPTIONS), wanted["ends"])
        assert engine.stats().found_tokens == 2 * 192


def test_texts_go_on_with_an_adapter_that_is_replaced_or_removed(model, each):
    newer = tuned(model, "all", seed=9)
    options = {"max_new_tokens": 200, "eos_ids": ()}
    with maxjax.Engine(
        model, slots=4, chunk=16, adapters={"all": each["all"]}, max_adapters=2
    ) as engine:
        first = engine.submit(PROMPTS[0], adapter="all", **options)
        engine.add_adapter("all", newer)
        second = engine.submit(PROMPTS[0], adapter="all", **options)
        with pytest.raises(UserInputError, match="max_adapters is 2.* 1 others.* use 1 that"):
            engine.add_adapter("some", each["some"])
        engine.remove_adapter("all")
        assert engine.adapters == ()
        with pytest.raises(UserInputError, match=r"no adapter 'all'.*has none"):
            engine.submit(PROMPTS[0], adapter="all")
        for answer, one in ((first, each["all"]), (second, newer)):
            assert (
                answer.result().tokens
                == maxjax.generate(one, None, PROMPTS[0], **options, chunk=16).tokens
            )
        # Their places are free when they have ended.
        for name in ("some", "ends"):
            engine.add_adapter(name, each[name])
        engine.remove_adapter("some")
        engine.add_adapter("all", each["all"])


def test_the_bits_are_the_same_whatever_adapters_others_use(model, each):
    def run(names, adapters):
        with maxjax.Engine(model, slots=3, chunk=64, exact=True, adapters=adapters) as engine:
            answers = submitted(engine, names)
            return [[one.logprob for one in answer.result().logprobs] for answer in answers]

    mixed = ["all", None, "some", "all", "ends", "some", None, "all"]
    first, second = run(["all"] * 8, each), run(mixed, dict(reversed(each.items())))
    for number in (0, 3, 7):
        assert first[number] == second[number]


@pytest.mark.extra
def test_places_and_ranks_grow(model, each):
    """While a text is written, more and larger adapters come than there are places and ranks."""
    options = {"max_new_tokens": 200, "eos_ids": ()}
    large = lora.add(model, "q_proj", rank=40, key=jax.random.key(0))
    with maxjax.Engine(model, slots=4, chunk=16, adapters=each) as engine:
        answer = engine.submit(PROMPTS[0], adapter="all", **options)
        for number in range(5):
            engine.add_adapter(f"other {number}", tuned(model, "some") if number else large)
        found = engine.submit(PROMPTS[0], adapter="other 4", **OPTIONS)
        same(found, maxjax.generate(tuned(model, "some"), None, PROMPTS[0], **OPTIONS, chunk=16))
        expected = maxjax.generate(each["all"], None, PROMPTS[0], **options, chunk=16).tokens
        assert answer.result().tokens == expected


def test_nothing_is_compiled_after_compile():
    """Whatever adapters come into the places that there are."""
    model = llama(rms_norm_eps=1e-4)  # no other test has its programs
    programs_of = [programs.read, programs.read_tokens, programs.decode]
    before = compiled_count(*programs_of)
    adapters = {"first": tuned(model, "all")}
    with maxjax.Engine(model, slots=3, chunk=16, adapters=adapters) as engine:
        count = engine.compile()
        # Of the model and of that with adapters, with and without counts of words: chunks of 16 tokens, steps of 1
        # and 3 texts.
        assert count == compiled_count(*programs_of) - before == 2 * 2 * (1 + 2)
        for i in range(3):
            engine.add_adapter(f"other {i}", tuned(model, "all", seed=i))
        engine.add_adapter("first", tuned(model, "some"))
        answers = submitted(
            engine, ["first", None, "other 0", "other 1", "other 2", None, "first", "first"]
        )
        assert len({tuple(answer.result().tokens) for answer in answers}) == len(PROMPTS)
        assert compiled_count(*programs_of) - before == count


def test_without_adapters_programs_are_those_of_the_model(model, each):
    with maxjax.Engine(model, slots=4, chunk=16) as engine:
        engine.submit(PROMPTS[0], **OPTIONS).result()
        engine.submit(PROMPTS[0], **OPTIONS).result()
        count = programs.decode._cache_size()
        engine.add_adapter("all", each["all"])
        engine.submit(PROMPTS[0], **OPTIONS).result()
        assert programs.decode._cache_size() == count


def test_in_16_bits(model):
    half, model = (filled(Llama(model.config, dtype)) for dtype in ("float16", "bfloat16"))
    huge = tuned(half, "some")
    weight = huge.model.layers[1].self_attn.q_proj.lora_B
    weight.value = weight.value.at[0, 0].set(1e5)
    with maxjax.Engine(half, slots=1) as engine:
        with pytest.raises(UserInputError, match="not finite in float16"):
            engine.add_adapter("huge", huge)
    one = tuned(model, "all")
    with maxjax.Engine(model, slots=4, chunk=16, adapters={"all": one}) as engine:
        found = engine.submit(PROMPTS[3], adapter="all", **OPTIONS).result()
    wanted = maxjax.generate(one, None, PROMPTS[3], **OPTIONS, chunk=16)
    plain = maxjax.generate(model, None, PROMPTS[3], **OPTIONS, chunk=16)
    first, expected, other = (one.logprobs[0].logprob for one in (found, wanted, plain))
    assert abs(first - expected) < 0.05 < abs(other - expected)


def test_an_adapter_that_is_removed_before_its_text_is_in_the_queue(model):
    """Only that text ends, with an error; submit cannot know it."""
    scheduler, ended = Scheduler(model, 1, 8), []
    request = Request(model, None, 3, None, (), None, {})
    gone, other = (
        running_text(
            request, Prompt([1, 2], None, False), None, 0, adapter=name, on_end=ended.append
        )
        for name in ("gone", None)
    )
    for text in (gone, other):
        scheduler.add(text)
    while scheduler.is_busy:
        scheduler.step()
    assert ended == [gone, other] and other.error is None and other.written == 3
    assert isinstance(gone.error, UserInputError) and "no adapter 'gone'" in str(gone.error)


def test_refused(model, each, tmp_path):
    other = filled(Llama(LlamaConfig(VOCAB, 48, 64, num_hidden_layers=2, num_attention_heads=4)))
    deeper = filled(Llama(LlamaConfig(VOCAB, 32, 64, num_hidden_layers=3, num_attention_heads=4)))
    broken = tuned(model, "all")
    weight = broken.model.layers[0].mlp.up_proj.lora_A
    weight.value = weight.value.at[0, 0].set(np.nan)
    more = maxjax.merge(*maxjax.partition(each["all"], ["*.lora_*", "model.norm.weight"]))
    cases = [
        (tuned(other, "all"), UserInputError, r"lora_A of '.*' has shape \[4, 48\], expected \[4, 32\]"),
        (tuned(deeper, "all"), UserInputError, r"'model\.layers\.2\..*' is no linear layer"),
        (broken, UserInputError, r"layers\.0\.mlp\.up_proj' have values that are not finite"),
        (lora.add(model, rank=80, key=jax.random.key(0)), UserInputError, "has rank 80 .*max_adapter_rank is 64"),
        (lora.add(model, dora=True, key=jax.random.key(0)), UserInputError, "DoRA"),
        (more, UserInputError, r"also has trained weights .*'?model\.norm\.weight"),
        (lora.save(tmp_path / "more", more), UserInputError, r"also has trained weights .*model\.norm\.weight"),
        (lora.merge(each["all"], keep=True), UserInputError, "is merged into its weights"),
        (model, UserInputError, "has no LoRA weights"),
        (lora.add(model), UserInputError, "not loaded"),
        (3, UserInputError, "an adapter is the path .*not int"),
        (tmp_path / "none", CheckpointMissingError, "none"),
        (lora.save(tmp_path / "other", tuned(other, "all")), CheckpointMismatchError, "expected"),
        (lora.save(tmp_path / "deeper", tuned(deeper, "all")), CheckpointMismatchError, "layers.2"),
    ]  # fmt: skip
    with maxjax.Engine(model, slots=4, chunk=16, adapters={"all": each["all"]}) as engine:
        running = engine.submit(PROMPTS[0], adapter="all", **OPTIONS)
        for adapter, error, says in cases:
            with pytest.raises(error, match=says):
                engine.add_adapter("bad", adapter)
        with pytest.raises(UserInputError, match="name of an adapter"):
            engine.add_adapter("", each["all"])
        with pytest.raises(UserInputError, match=r"no adapter 'al': did you mean 'all'.*has 'all'"):
            engine.submit(PROMPTS[0], adapter="al")
        with pytest.raises(UserInputError, match="no adapter"):
            engine.remove_adapter("bad")
        assert engine.adapters == ("all",)
        assert (
            running.result().tokens
            == maxjax.generate(each["all"], None, PROMPTS[0], **OPTIONS, chunk=16).tokens
        )
