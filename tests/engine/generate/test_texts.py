"""generate and stream: token for token what transformers writes, on any mesh, in any batch."""

import dataclasses
import gc
import json
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import processors

import maxjax
from maxjax.engine.batching import programs as batching
from maxjax.engine.batching.memory import TextMemory
from maxjax.engine.batching.scheduler import Scheduler
from maxjax.engine.generate import stream as streaming
from maxjax.engine.generate.completion import Completion
from maxjax.engine.generate.defaults import GenerationDefaults, read_defaults
from maxjax.engine.sampling.settings import Sampling
from maxjax.errors import UserInputError
from maxjax.lockstep import Lockstep
from maxjax.text.tokenizer.tokenizer import Tokenizer
from tests.models import decoders
from tests.models.decoders import ids_of, one_character_each, ours

PROMPTS = [ids_of(1, n, seed=n)[0].tolist() for n in (7, 1, 30, 18)]


def characters(eos=()):
    return one_character_each(eos_ids=eos)


def text_of(ids):
    return "".join(chr(33 + i) for i in ids)


@pytest.fixture(scope="module")
def expected(theirs):
    """Of each prompt, what transformers writes, greedily."""
    return [tuple(decoders.generated(theirs, [p], 64)[0].tolist()) for p in PROMPTS]


# --- as transformers -------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("batch_size", [32, 3, 1])
@pytest.mark.parametrize("chunk", [512, 16])
def test_greedy(model, expected, chunk, batch_size):
    found = maxjax.generate(
        model, None, PROMPTS, max_new_tokens=64, chunk=chunk, batch_size=batch_size
    )
    assert [text.tokens for text in found] == expected
    assert {text.finish_reason for text in found} == {"length"}
    assert [list(text.prompt_tokens) for text in found] == PROMPTS


FAMILIES = {
    "Mistral": {"sliding_window": 12},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "sliding_window": 12},
    "Gemma3Text": {"head_dim": 8, "sliding_window": 12, "num_hidden_layers": 7},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                 "head_dim": 8},
    "GPT2": {},
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family, tmp_path):
    kind = {"Gemma3Text": "Gemma3"}.get(family, family)
    theirs = decoders.oracle(kind, tmp_path, **FAMILIES[family])
    model = ours(tmp_path)
    expected = [decoders.generated(theirs, [p], 40)[0].tolist() for p in PROMPTS[:3]]
    found = maxjax.generate(model, None, PROMPTS[:3], max_new_tokens=40, chunk=16)
    assert [list(text.tokens) for text in found] == expected


def test_penalty(model, theirs, expected):
    prompt = PROMPTS[2]
    penalised = theirs.generated([prompt], 40, repetition_penalty=1.5)[0]
    found = maxjax.generate(model, None, prompt, max_new_tokens=40, repetition_penalty=1.5)
    assert list(found.tokens) == penalised.tolist()
    assert expected[2][:40] != found.tokens


def test_log_probabilities(model):
    found = maxjax.generate(model, None, PROMPTS[:2], max_new_tokens=9, logprobs=3, temperature=1.0)
    for prompt, text in zip(PROMPTS, found, strict=False):
        ids = np.array([[*prompt, *text.tokens]], np.int32)
        logits = np.asarray(decoders.call(model, ids))[0, len(prompt) - 1 : -1]
        logits = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
        assert [entry.token for entry in text.logprobs] == list(text.tokens)
        for entry, row in zip(text.logprobs, logits, strict=True):
            np.testing.assert_allclose(entry.logprob, row[entry.token], atol=1e-4)
            best = np.argsort(-row)[:3]
            assert [token for token, _ in entry.top] == best.tolist()
            np.testing.assert_allclose([value for _, value in entry.top], row[best], atol=1e-4)


# --- the same, however it is run ---------------------------------------------------------------

SAMPLED = {"temperature": 1.2, "top_k": 20, "max_new_tokens": 24}


@pytest.fixture(scope="module")
def drawn(model):
    return [text.tokens for text in maxjax.generate(model, None, PROMPTS, **SAMPLED)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("axes", "explicit"),
    [
        ({"data": 2, "model": 2}, False), ({"fsdp": 2, "model": 2}, True),
        ({"model": 4}, True), ({"data": 4}, False),
    ],
)  # fmt: skip
def test_the_same_key_on_a_mesh(directory, theirs, drawn, axes, explicit):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = maxjax.make_mesh(**axes, axis_types=kind)
    model, _ = maxjax.load(directory, mesh=mesh, tokenizer=False)
    found = maxjax.generate(model, None, PROMPTS, **SAMPLED)
    assert [text.tokens for text in found] == drawn


@pytest.mark.extra
def test_the_same_key_in_another_batch(model, drawn):
    found = maxjax.generate(model, None, PROMPTS, **SAMPLED, batch_size=1, chunk=16)
    assert [text.tokens for text in found] == drawn
    other = maxjax.generate(model, None, PROMPTS, **SAMPLED, key=jax.random.key(1))
    assert [text.tokens for text in other] != drawn


def test_several_answers(model):
    """They are those to the prompt as often in the list."""
    options = {"temperature": 1.0, "max_new_tokens": 9, "key": jax.random.key(4)}
    ids = lambda texts: [text.tokens for text in texts]
    two = maxjax.generate(model, None, PROMPTS[:2], n=3, **options)
    apart = maxjax.generate(model, None, [p for p in PROMPTS[:2] for _ in range(3)], **options)
    assert [ids(texts) for texts in two] == [ids(apart[:3]), ids(apart[3:])]
    assert len(set(ids(two[0]))) == 3
    assert ids(maxjax.generate(model, None, PROMPTS[0], n=3, **options)) == ids(apart[:3])
    assert ids(maxjax.generate(model, None, PROMPTS[0], n=1, **options)) == ids(apart[:1])
    with pytest.raises(UserInputError, match="n is 0"):
        maxjax.generate(model, None, PROMPTS[0], n=0)


def test_a_stream_gives_the_same(model, expected):
    tokenizer = characters()
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        pieces = maxjax.stream(model, tokenizer, prompt, max_new_tokens=64)
        assert list(pieces) == list(text_of(tokens))
        assert pieces.completion.tokens == tokens
        assert pieces.completion == text_of(tokens)


def test_a_cache_that_grows(model, expected, monkeypatch):
    monkeypatch.setattr(streaming, "_FIRST_NEW_TOKENS", 1)
    grown = []
    monkeypatch.setattr(TextMemory, "_grow", counted(TextMemory._grow, grown))
    found = maxjax.generate(model, None, PROMPTS, max_new_tokens=64)
    assert [text.tokens for text in found] == expected
    pieces = maxjax.stream(model, None, PROMPTS[2], max_new_tokens=64)
    assert list(pieces) == [] and pieces.completion.tokens == expected[2]
    assert len(grown) == 2


def counted(method, calls):
    """The method, which adds to ``calls`` when it is called."""

    def run(*args, **options):
        calls.append(args)
        return method(*args, **options)

    return run


def test_a_cache_of_int8(model, expected):
    found = maxjax.generate(model, None, PROMPTS, max_new_tokens=64, cache_dtype="int8")
    alike = [
        a == b
        for x, y in zip(found, expected, strict=True)
        for a, b in zip(x.tokens[:4], y[:4], strict=True)
    ]
    assert np.mean(alike) > 0.8


def test_texts_as_prompts(model, expected):
    tokenizer = characters()
    texts = [text_of(prompt) for prompt in PROMPTS]
    found = maxjax.generate(model, tokenizer, texts, max_new_tokens=64)
    assert found == [text_of(tokens) for tokens in expected]
    one = maxjax.generate(model, tokenizer, texts[2], max_new_tokens=64)
    assert isinstance(one, Completion) and one == found[2]
    arrays = maxjax.generate(model, tokenizer, np.array([PROMPTS[0]]), max_new_tokens=64)
    assert arrays == found[:1]


# --- where it ends -----------------------------------------------------------------------------


def test_tokens_that_end_it(model, expected):
    ends = (expected[0][9], expected[2][30])
    found = maxjax.generate(model, characters(), PROMPTS, max_new_tokens=64, eos_ids=ends)
    for text, tokens in zip(found, expected, strict=True):
        where = min((tokens.index(end) for end in ends if end in tokens), default=None)
        if where is None:
            assert (text.tokens, text.finish_reason, text.stop) == (tokens, "length", None)
        else:
            assert text.tokens == tokens[: where + 1]
            assert (text.finish_reason, text.stop) == ("stop", tokens[where])
            assert text == text_of(tokens[:where])


@pytest.mark.parametrize("streamed", [False, True])
def test_texts_that_end_it(model, expected, streamed):
    whole = text_of(expected[2])
    stop = whole[11:14]  # three tokens
    where = whole.index(stop)
    options = {"max_new_tokens": 64, "stop": ["never there", stop]}
    if streamed:
        pieces = maxjax.stream(model, characters(), PROMPTS[2], **options)
        assert "".join(pieces) == whole[:where]
        found = pieces.completion
    else:
        found = maxjax.generate(model, characters(), PROMPTS, **options)[2]
    assert (found, found.finish_reason, found.stop) == (whole[:where], "stop", stop)
    assert found.tokens == expected[2][: where + 3]


def test_the_context_ends_it(model):
    prompt = ids_of(1, 250)[0].tolist()  # of 256
    found = maxjax.generate(model, None, prompt, max_new_tokens=64)
    assert len(found.tokens) == 6 and found.finish_reason == "length"


def test_the_files_of_a_checkpoint_are_heard(directory, theirs, expected, tmp_path):
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = {"eos_token_id": [expected[2][5], 95], "max_new_tokens": 20, "do_sample": True,
                "temperature": 1e-4, "top_k": 3}  # fmt: skip
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    model, _ = maxjax.load(tmp_path)
    assert model.generation.sampling.top_k == 3
    found = maxjax.generate(model, None, PROMPTS[2])
    where = expected[2].index(expected[2][5])
    assert found.tokens == expected[2][: where + 1] and found.finish_reason == "stop"
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": "hot"} | settings))
    assert len(maxjax.generate(model, None, PROMPTS[2], eos_ids=()).tokens) == 20
    (tmp_path / "generation_config.json").write_text(json.dumps(settings | {"top_p": 7}))
    with pytest.raises(maxjax.CheckpointError, match="generation_config.json.*top_p is 7"):
        maxjax.load(tmp_path)


@pytest.mark.parametrize("has_file", [True, False])
def test_settings_of_generation_are_saved(directory, theirs, tmp_path, has_file):
    model, _ = maxjax.load(directory)
    config = {"eos_token_id": 5}
    settings = {"do_sample": True, "temperature": 0.7, "top_k": -1, "eos_token_id": [7, 9], "max_new_tokens": 7,
                "transformers_version": "5", "suppress_tokens": [3]}  # fmt: skip
    if has_file:
        (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    model.generation = read_defaults(tmp_path, config)
    maxjax.save_pretrained(model, tmp_path / "a", config=model.hf_config | config)
    assert (tmp_path / "a" / "generation_config.json").exists() == has_file
    if has_file:
        assert json.loads((tmp_path / "a" / "generation_config.json").read_text()) == settings
    again, _ = maxjax.load(tmp_path / "a")
    assert again.generation == model.generation
    changed = dataclasses.replace(
        again.generation,
        sampling=Sampling(0.5, top_p=0.9, logit_bias={4: -1.0}, banned=[2]),
        stop=("x",),
    )
    again.generation = changed
    maxjax.save_pretrained(again, tmp_path / "b")
    found = json.loads((tmp_path / "b" / "generation_config.json").read_text())
    assert has_file == ("transformers_version" in found)
    found, _ = maxjax.load(tmp_path / "b")
    assert (found.generation.sampling, found.generation.stop) == (changed.sampling, ("x",))
    assert found.generation.eos_ids == changed.eos_ids


def test_settings_that_say_nothing_are_saved(directory, theirs, tmp_path):
    """They replace those in config.json, which would be read again without a file."""
    model, _ = maxjax.load(directory)
    config = model.hf_config | {"eos_token_id": None, "do_sample": True, "temperature": 0.5}
    read = read_defaults(tmp_path, config)
    for name, found in (("a", read), ("b", dataclasses.replace(read, sampling=Sampling()))):
        model.generation = found
        maxjax.save_pretrained(model, tmp_path / name, config=config)
        again, _ = maxjax.load(tmp_path / name)
        assert again.generation.sampling == found.sampling
    assert read.sampling.temperature == 0.5 and not (tmp_path / "a/generation_config.json").exists()


def test_a_stop_string_that_is_a_special_token(model, expected):
    """It has no text, and ends the answer all the same, as in transformers."""
    tokens = expected[2]
    at = next(i for i in range(3, 20) if tokens[i] not in tokens[:i])
    tokenizer = characters()
    tokenizer._backend.add_special_tokens([chr(33 + tokens[at])])
    options = {"max_new_tokens": 20, "stop": ["zzz", chr(33 + tokens[at])]}
    found = maxjax.generate(model, tokenizer, PROMPTS[2], **options)
    assert found.tokens == tuple(tokens[: at + 1]) and found == text_of(tokens[:at])
    assert (found.finish_reason, found.stop) == ("stop", chr(33 + tokens[at]))
    stream = maxjax.stream(model, tokenizer, PROMPTS[2], **options)
    assert "".join(stream) == found and stream.completion.tokens == found.tokens


def test_a_stop_string_with_a_special_token_in_it(model, expected):
    """The token is found with the text around it, and is no text of the answer."""
    tokens = expected[2]
    at = next(i for i in range(3, 18) if tokens[i] not in tokens[:i])
    special, after = chr(33 + tokens[at]), chr(33 + tokens[at + 1])
    tokenizer = characters()
    tokenizer._backend.add_special_tokens([special])
    before = text_of(tokens[:at])
    for stop, kept in [
        (special + after, before),
        (before[-1] + special + after, before[:-1]),
        (special + "é", None),
    ]:
        options = {"max_new_tokens": 20, "stop": ["zzz", stop]}
        found = maxjax.generate(model, tokenizer, PROMPTS[2], **options)
        if kept is None:
            assert found.stop is None and found == text_of(tokens[:20]).replace(special, "")
        else:
            assert found.tokens == tuple(tokens[: at + 2])
            assert (found, found.stop) == (kept, stop)
        assert "".join(maxjax.stream(model, tokenizer, PROMPTS[2], **options)) == found


def test_the_longest_text_of_a_checkpoint(model, monkeypatch):
    """``max_length`` counts the prompt."""
    monkeypatch.setattr(model, "generation", GenerationDefaults(max_length=12), raising=False)
    assert len(maxjax.generate(model, None, PROMPTS[0]).tokens) == 5
    with pytest.raises(UserInputError, match="18 tokens, and max_length.* is 12.*max_new_tokens="):
        maxjax.generate(model, None, PROMPTS[3])
    assert len(maxjax.generate(model, None, PROMPTS[3], max_new_tokens=2).tokens) == 2


def test_old_files_have_settings_of_generation_in_config_json(tmp_path):
    config = {"max_length": 20, "eos_token_id": 5, "suppress_tokens": [7]}
    found = read_defaults(tmp_path, config)
    assert (found.max_length, found.sampling.banned, found.eos_ids) == (None, (7,), (5,))
    assert read_defaults(tmp_path, config | {"max_length": 30}).max_length == 30
    (tmp_path / "generation_config.json").write_text('{"max_length": 20}')
    found = read_defaults(tmp_path, config)
    assert (found.max_length, found.sampling.banned, found.eos_ids) == (20, (), (5,))


def test_no_end_before_so_many_tokens(model, expected):
    ends = {expected[2][5]}
    found = maxjax.generate(
        model, None, PROMPTS[2], max_new_tokens=12, eos_ids=ends, min_new_tokens=8, logprobs=0
    )
    assert found.tokens[:5] == expected[2][:5] and not ends & {*found.tokens[:8]}
    short = maxjax.generate(
        model, None, PROMPTS[2], max_new_tokens=12, eos_ids=ends, min_new_tokens=5, logprobs=0
    )
    assert short.tokens == expected[2][:6] and short.logprobs[:5] == found.logprobs[:5]


def test_another_default_device(model):
    """The cache lies where the model does."""
    with jax.default_device(jax.devices()[1]):
        assert model.cache(1, 64).keys.devices() == {jax.devices()[0]}
        assert len(maxjax.generate(model, None, PROMPTS[0], max_new_tokens=2).tokens) == 2


def test_a_text_that_begins_with_the_token_of_a_beginning(model):
    """It gets no second one, as chat templates write theirs."""
    tokenizer = one_character_each()
    first = tokenizer.encode("x")[0]
    backend = tokenizer._backend
    backend.post_processor = processors.TemplateProcessing(
        single="x $A", special_tokens=[("x", first)]
    )
    tokenizer = Tokenizer(backend, special_tokens={"bos_token": "x"})
    for prompt in ("xab", "ab"):
        found = maxjax.generate(model, tokenizer, prompt, max_new_tokens=1)
        assert found.prompt_tokens == tuple(tokenizer.encode("ab"))


def test_a_text_that_begins_with_two_of_them(model):
    """A tokenizer that adds none of its own takes none away."""
    tokenizer = Tokenizer(one_character_each()._backend, special_tokens={"bos_token": "x"})
    found = maxjax.generate(model, tokenizer, "xxab", max_new_tokens=1)
    assert found.prompt_tokens == tuple(tokenizer.encode("xxab"))


# --- how it runs -------------------------------------------------------------------------------


def test_cache_is_used_in_place(model, monkeypatch):
    places = set()
    fetch = Lockstep.fetch

    def noted(self, tree):
        pool = schedulers[0].memory.arrays.pool
        places.update(leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pool))
        return fetch(self, tree)

    schedulers = made(monkeypatch)
    monkeypatch.setattr(Lockstep, "fetch", noted)
    maxjax.generate(model, None, PROMPTS[0], max_new_tokens=60)
    assert len(places) == 2  # keys and values


def made(monkeypatch):
    """The schedulers that are made from now on."""
    found = []
    begin = Scheduler.__init__

    def noted(self, *args, **options):
        begin(self, *args, **options)
        found.append(self)

    monkeypatch.setattr(Scheduler, "__init__", noted)
    return found


class Interrupting:
    """A tokenizer during whose work Ctrl-C is pressed."""

    eos_ids = ()

    def __init__(self, after):
        self._backend, self.after = characters()._backend, after
        self.decoder = self._backend.decoder

    def encode(self, text):
        return [3, 4, 5]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("streamed", [False, True])
def test_interrupted(model, expected, monkeypatch, streamed):
    """The cache is let go, and all goes on."""
    held = []
    schedulers = made(monkeypatch)
    fetch = Lockstep.fetch

    def interrupted(self, tree):
        held.extend(weakref.ref(leaf) for leaf in jax.tree.leaves(schedulers[0].memory.arrays))
        raise KeyboardInterrupt

    monkeypatch.setattr(Lockstep, "fetch", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        if streamed:
            list(maxjax.stream(model, None, PROMPTS[0], max_new_tokens=64))
        else:
            maxjax.generate(model, None, PROMPTS[0], max_new_tokens=64)
    assert caught.value.__traceback__ is not None  # which holds the frames
    gc.collect()
    assert held and not any(ref() is not None for ref in held)
    monkeypatch.setattr(Lockstep, "fetch", fetch)
    assert maxjax.generate(model, None, PROMPTS[0], max_new_tokens=64).tokens == expected[0]


def test_a_stream_that_is_left(model, monkeypatch):
    schedulers = made(monkeypatch)
    pieces = maxjax.stream(model, characters(), PROMPTS[0], max_new_tokens=64)
    first = [next(pieces) for _ in range(20)]  # several come of a dispatch by then
    refs = [weakref.ref(leaf) for leaf in jax.tree.leaves(schedulers[0].memory.arrays)]
    pieces.close()
    gc.collect()
    assert not any(ref() is not None for ref in refs)
    assert pieces.completion == "".join(first)
    with pytest.raises(StopIteration):
        next(pieces)


# --- what cannot be ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        ("", {}, "the prompt is empty"),
        ([], {"max_new_tokens": 3}, None),
        ([[]], {}, r"prompts\[0\] is empty"),
        ([[1], [2, 96]], {}, r"prompts\[1\] has the token id 96, which is outside the model.s vocabulary of 96"),
        ([-1], {}, "token id -1"),
        ([1] * 256, {}, "256 tokens, and the model's context is 256"),
        ([1], {"temperature": -1}, "temperature is -1"),
        ([1], {"temprature": 1}, "no argument 'temprature': did you mean temperature="),
        ([1], {"sampling": maxjax.Sampling(), "top_k": 3}, "top_k= and sampling= are both given"),
        ([1], {"sampling": "hot"}, "maxjax.Sampling, not str"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([1], {"batch_size": True}, "batch_size is True"),
        ([1], {"chunk": 100}, "a power of two"),
        ([1], {"stop": ""}, "a stop string is empty"),
        ([1], {"temperature": 1.0, "key": 3}, "key is one key of jax.random"),
        ([1], {"temperature": 1.0, "key": jax.random.split(jax.random.key(0))}, "one key"),
        ([1], {"logit_bias": {500: 1.0}}, "token 500"),
    ],
)  # fmt: skip
def test_refused(model, prompt, options, says):
    if says is None:
        assert maxjax.generate(model, characters(), prompt, **options) == []
        return
    with pytest.raises(UserInputError, match=says):
        maxjax.generate(model, characters(), prompt, **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("prompt", [b"abc", {"a": 1}, 3, [1.5], [["a", "b"]], [None]])
def test_no_prompt(model, prompt):
    with pytest.raises(TypeError, match="text"):
        maxjax.generate(model, characters(), prompt)


def test_no_tokenizer_no_weights_no_language_model(directory, theirs, model):
    with pytest.raises(UserInputError, match="no tokenizer"):
        maxjax.generate(model, None, "Hi")
    with pytest.raises(UserInputError, match="needs a tokenizer"):
        maxjax.generate(model, None, [1], stop="x")
    with pytest.raises(UserInputError, match="not loaded"):
        maxjax.generate(maxjax.build(maxjax.load_weights(directory)), None, [1])
    with pytest.raises(UserInputError, match="not a language model"):
        maxjax.generate(maxjax.nn.Identity(), None, [1])


def test_not_a_number(directory, theirs):
    model = ours(directory)
    stack = model.raw_state_dict()
    name = next(n for n in stack if n.endswith("1.mlp.up_proj.weight"))
    stack[name].value = jnp.asarray(stack[name].value).at[3, 4].set(jnp.nan)
    with pytest.raises(FloatingPointError, match="after 0 tokens of the answer to prompt 0"):
        maxjax.generate(model, None, PROMPTS, max_new_tokens=64)
    with pytest.raises(FloatingPointError, match="after 0 tokens"):
        list(maxjax.stream(model, None, PROMPTS[0], max_new_tokens=64))
    found = maxjax.first_nan(model, PROMPTS[0])
    assert maxjax.first_nan(model, jnp.asarray([PROMPTS[0]])) == found  # a batch [B, T]
    assert found is not None and found.startswith("model.layers.1.mlp.up_proj, whose weight has 1")


# --- how much is compiled; these tests clear the programs of those before --------------------------


@pytest.fixture
def no_programs():
    """JAX keeps a limited number of programs: those of earlier tests could leave while a test counts."""
    for program in PROGRAMS:
        program.clear_cache()


PROGRAMS = (batching.read, batching.read_tokens, batching.decode)


@pytest.mark.usefixtures("no_programs")
def test_how_much_is_compiled(theirs, directory):
    """One program for each bucket of prompts, and one that decodes, however it is called."""
    model = ours(directory)

    def compiled():
        return [program._cache_size() for program in PROGRAMS]

    values = {"max_new_tokens": 20, "logprobs": 7, "chunk": 32}
    for length in (3, 9, 16, 12):
        maxjax.generate(model, None, ids_of(1, length)[0], **values)
        list(maxjax.stream(model, None, ids_of(1, length)[0], **values))
    assert compiled() == [0, 1, 1]
    maxjax.generate(model, None, ids_of(1, 20)[0], **values)
    assert compiled() == [0, 2, 1]
    maxjax.generate(model, None, ids_of(1, 43)[0], **values)  # 32 and 11: both are there
    assert compiled() == [0, 2, 1]
    for length in (9, 11, 14):
        maxjax.generate(model, None, ids_of(2, length), **values)
    assert compiled() == [0, 3, 2]


@pytest.mark.usefixtures("no_programs")
def test_another_temperature_is_no_other_program(theirs, directory):
    """The settings are arguments of the program."""
    model = ours(directory)
    prompt = ids_of(1, 9)[0]
    values = {"max_new_tokens": 20, "logprobs": 6, "key": jax.random.key(1)}

    def write(**more):
        before = batching.decode._cache_size()
        text = maxjax.generate(model, None, prompt, **values, **more)
        return text.tokens, batching.decode._cache_size() - before

    hot = {"temperature": 1.5, "top_p": 0.99, "min_p": 0.001, "presence_penalty": 0.2}
    cold = {"temperature": 0.01, "top_p": 0.3, "min_p": 0.5, "presence_penalty": -0.1}
    first, compiled = write(**hot)
    assert compiled == 1
    second, compiled = write(**cold)
    assert compiled == 0 and second != first
    assert write(**hot) == (first, 0)
    assert write(temperature=1.5)[1] == 1  # without penalties, tokens need not be counted
