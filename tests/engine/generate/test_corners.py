"""Corners of generate, stream and Conversation: odd prompts, answers that are left, ends of all kinds."""

import collections
import gc
import json
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxjax
from maxjax.engine.generate import stream as streaming
from maxjax.engine.generate.defaults import GenerationDefaults, chosen_sampling
from maxjax.errors import UserInputError
from maxjax.nn.kv_cache.pages import PagePool
from maxjax.text.tokenizer.tokenizer import Tokenizer
from tests.cli.models import write_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return maxjax.load(write_model(tmp_path_factory.mktemp("m") / "m"))


def generate(loaded, prompts, **options):
    return maxjax.generate(*loaded, prompts, **{"max_new_tokens": 4, **options})


def test_a_sampling_is_taken_as_it_is():
    given = maxjax.Sampling(top_k=3)
    assert chosen_sampling(GenerationDefaults(), given, {}) is given
    assert chosen_sampling(GenerationDefaults(given), None, {}) == given
    with pytest.raises(UserInputError, match="is a maxjax.Sampling, not int"):
        chosen_sampling(GenerationDefaults(), 3, {})


# --- prompts ---------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("prompts", "meant"),
    [
        ([jnp.int32(5), jnp.int32(6)], [5, 6]),
        ((i for i in (5, 6)), [5, 6]),
        (np.array(["hi", "you"]), ["hi", "you"]),
        (np.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
    ],
    ids=["scalars", "generator", "texts", "rows"],
)
def test_prompts_of_other_types(loaded, prompts, meant):
    assert generate(loaded, prompts) == generate(loaded, meant)


BATCH = collections.UserDict(input_ids=[[5, 6]], attention_mask=[[1, 1]])


@pytest.mark.parametrize(
    ("prompts", "error", "says"),
    [
        (BATCH, TypeError, "must be a list of messages"),  # transformers' BatchEncoding is one
        ({"role": "user", "content": "hi"}, TypeError, r"\[message\]"),
        (["a", {"role": "user", "content": "hi"}], TypeError, r"prompts\[1\] must be text"),
        ([{"role": "user", "content": "hi"}, "a"], TypeError, r"messages\[1\] is a str"),
        ([[[5], [6, 7]]], TypeError, r"prompts\[0\] must be text"),
        (np.array([], np.int32), UserInputError, "empty"),
        (["a", "b\ud800"], UserInputError, r"prompts\[1\] is not valid Unicode"),
    ],
    ids=["dict", "message", "text and message", "message and text", "ragged", "empty", "surrogate"],
)
def test_what_is_no_prompt(loaded, prompts, error, says):
    with pytest.raises(error, match=says):
        generate(loaded, prompts)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"eos_ids": "ab"}, UserInputError, "a list of token ids"),
        ({"eos_ids": [1.5]}, UserInputError, "eos_ids is 1.5: it must be a token id"),
        ({"eos_ids": [2**40]}, UserInputError, "a token id"),
        ({"stop": 5}, TypeError, "a str or a list of str, not int"),
        ({"chunk": 16.0}, UserInputError, "chunk is 16.0"),
        ({"cache_dtype": "nonsense"}, UserInputError, "cache_dtype='nonsense' is not a dtype"),
        ({"cache_dtype": "float4_e2m1fn"}, UserInputError, "floats of at least 8 bits or int8, not float4_e2m1fn"),
        ({"key": np.zeros(3, np.uint32), "temperature": 1.0}, UserInputError, "one key"),
        ({"banned": range(257)}, UserInputError, "exclude every token"),
        ({"banned": range(256), "eos_ids": 256, "min_new_tokens": 2}, UserInputError, "which min_new_tokens delays"),
        ({"banned": range(9), "logit_bias": dict.fromkeys(range(9, 257), -np.inf)},
         UserInputError, "exclude every token"),
        ({"logit_bias": {3: 1e39}}, UserInputError, "token 3 it must be a float32 number"),
    ],
)  # fmt: skip
def test_what_is_no_setting(loaded, options, error, says):
    with pytest.raises(error, match=says):
        generate(loaded, "hi", **options)


def test_a_stream_refuses_before_it_begins(loaded):
    with pytest.raises(UserInputError, match="banned names token 257"):
        maxjax.stream(*loaded, "hi", banned=[3, 257])


def test_a_tokenizer_of_another_kind(loaded):
    class Other:
        def encode(self, text):
            return [5]

    with pytest.raises(TypeError, match="tokenizer is a Other"):
        maxjax.generate(loaded[0], Other(), "hi")


def test_integers_of_numpy(loaded):
    options = {"max_new_tokens": np.int64(3), "batch_size": np.int32(2), "chunk": np.int16(16)}
    assert generate(loaded, ["hi"], **options) == generate(loaded, ["hi"], max_new_tokens=3)


@pytest.mark.parametrize("penalty", [1e-40, 1e39])
def test_penalties_that_float32_has_not(loaded, penalty):
    assert len(generate(loaded, "hi", repetition_penalty=penalty, eos_ids=()).tokens) == 4


# --- ends --------------------------------------------------------------------------------------


def test_texts_that_end_it_from_a_generator(loaded):
    text = generate(loaded, "hello", max_new_tokens=20)
    stop = text[3]
    found = generate(loaded, "hello", max_new_tokens=20, stop=(s for s in [stop]))
    assert found == text[: text.index(stop)] and found.stop == stop


def test_a_token_that_ends_it_by_itself(loaded):
    text = generate(loaded, "hello", eos_ids=())
    assert generate(loaded, "hello", eos_ids=text.tokens[0]).tokens == text.tokens[:1]


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """A model, a prompt, and its text before the token after which there are only NaN."""
    model, tokenizer = maxjax.load(write_model(tmp_path_factory.mktemp("poisoned") / "m"))
    for prompt in ("hello", "you", "When", "zebra", "Q: 17?"):
        ids = tokenizer.encode(prompt)
        tokens = generate((model, tokenizer), ids, eos_ids=()).tokens
        if tokens[2] not in (*ids, *tokens[:2]):
            break
    else:
        pytest.fail("no prompt with a new third token")
    table = model.raw_state_dict()["model.embed_tokens.weight"]
    table.value = table.value.at[tokens[2]].set(jnp.nan)
    return model, tokenizer, prompt, tokens[:3]


@pytest.mark.parametrize("streamed", [False, True])
def test_numbers_after_the_end_do_not_matter(poisoned, streamed):
    """They are in the dispatch that the stop text is in."""
    model, tokenizer, prompt, tokens = poisoned
    stop = tokenizer.decode(tokens[2:])
    if streamed:
        pieces = maxjax.stream(model, tokenizer, prompt, stop=stop, chat=False)
        assert "".join(pieces) == pieces.completion
        found = pieces.completion
    else:
        found = maxjax.generate(model, tokenizer, prompt, stop=stop, chat=False)
    assert (found.tokens, found.stop) == (tokens, stop)


def test_what_is_no_number_is_no_end(poisoned):
    """The token in the place of what could not be chosen is 0, which ends texts here."""
    model, tokenizer, prompt, _ = poisoned
    with pytest.raises(FloatingPointError, match="after 3 tokens of the answer to prompt 0"):
        maxjax.generate(model, tokenizer, prompt, chat=False)


# --- chats and raw texts -----------------------------------------------------------------------


USER = {"role": "user", "content": "hi"}
FORMATTED = "user<end>hi"


def test_a_text_is_a_user_message_where_there_is_a_template(loaded):
    model, tokenizer = loaded
    wanted = "u:hi\na:"
    one = generate(loaded, "hi")
    assert one.prompt == wanted and list(one.prompt_tokens) == tokenizer.encode(wanted)
    assert generate(loaded, [USER]) == one and generate(loaded, ["hi", [USER]]) == [one, one]
    pieces = maxjax.stream(model, tokenizer, "hi", max_new_tokens=4)
    assert "".join(pieces) == one and pieces.completion.prompt == wanted
    raw = generate(loaded, wanted, chat=False)
    assert (raw, raw.tokens, raw.prompt) == (one, one.tokens, wanted)
    ids = generate(loaded, tokenizer.encode("hi"))
    assert ids.prompt is None and list(ids.prompt_tokens) == tokenizer.encode("hi")
    assert generate(loaded, "hi", chat=False).prompt_tokens == ids.prompt_tokens


def test_objects_with_a_role_are_messages(loaded):
    message = types.SimpleNamespace(role="user", content="hi", model_dump=lambda **_: USER)
    assert generate(loaded, [message]).prompt == generate(loaded, [USER]).prompt


def test_without_a_template_a_text_is_continued(loaded):
    base = Tokenizer(loaded[1]._backend)
    assert generate((loaded[0], base), "hi").prompt == "hi"
    for options in ({"chat": True}, {"template_kwargs": {"enable_thinking": False}}):
        with pytest.raises(UserInputError, match="no chat template"):
            generate((loaded[0], base), "hi", **options)
    source = {"chat_template": "<{{ messages[0].content }}>"}
    assert generate((loaded[0], base), "hi", template_kwargs=source).prompt == "<hi>"


def test_the_template_gets_its_variables(loaded):
    source = "{{ messages[-1].content }}{{ tools[0].function.name }}{{ effort }}"
    tokenizer = Tokenizer(loaded[1]._backend, chat_template=source)

    def weather(city: str):
        """Tells the weather.

        Args:
            city: a city.
        """

    variables = {"tools": [weather], "effort": "low"}
    found = generate((loaded[0], tokenizer), "hi", template_kwargs=variables)
    assert found.prompt == "hiweatherlow"


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"chat": False, "template_kwargs": {"x": 1}}, UserInputError, "template_kwargs= needs"),
        ({"chat": "no"}, TypeError, "chat must be True, False or None"),
        ({"template_kwargs": "x"}, TypeError, "template_kwargs must be a dict"),
        ({"enable_thinking": False}, TypeError, "use template_kwargs="),
    ],
)
def test_invalid_options_of_chats_are_refused(loaded, options, error, says):
    with pytest.raises(error, match=says):
        generate(loaded, "hi", **options)
    with pytest.raises(UserInputError, match="chat=False takes text"):
        generate(loaded, [USER], chat=False)


def test_a_text_that_is_formatted_already_is_told_of(loaded, caplog):
    generate(loaded, FORMATTED)
    assert "pass chat=False" in caplog.text and "'<end>'" in caplog.text
    caplog.clear()
    generate(loaded, FORMATTED, chat=False)
    assert not caplog.text


# --- answers that are left ---------------------------------------------------------------------


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.sampled
@pytest.mark.parametrize("read", [0, 1])
@pytest.mark.parametrize("closed", [False, True])
def test_a_stream_that_is_left_lets_go_at_once(loaded, no_collector, monkeypatch, read, closed):
    refs, make = [], PagePool.of

    def noted(*args, **options):
        pool = make(*args, **options)
        refs.extend(weakref.ref(leaf) for leaf in jax.tree.leaves(pool))
        return pool

    monkeypatch.setattr(PagePool, "of", noted)
    pieces = maxjax.stream(*loaded, "hello", max_new_tokens=20, eos_ids=())
    for _ in range(read):
        next(pieces)
    scheduler = pieces._pieces.gi_frame.f_locals["scheduler"]
    refs += [weakref.ref(leaf) for leaf in jax.tree.leaves(scheduler.memory.arrays)]
    del scheduler
    if closed:
        pieces.close()
    else:
        del pieces
    assert refs and not any(ref() is not None for ref in refs)


def test_a_cache_that_grows_is_compiled_once(loaded, monkeypatch, caplog):
    monkeypatch.setattr(streaming, "_FIRST_NEW_TOKENS", 16)
    options = {"max_new_tokens": 90, "eos_ids": ()}
    first = generate(loaded, "hello", **options)
    with jax.log_compiles():
        caplog.clear()
        assert generate(loaded, "hello", **options) == first
    assert not [r.getMessage() for r in caplog.records if "Compiling" in r.getMessage()]


# --- conversations -----------------------------------------------------------------------------


@pytest.fixture
def chat(loaded):
    return maxjax.Conversation(*loaded, max_new_tokens=20, eos_ids=())


def said(*texts):
    roles = ("user", "assistant") * len(texts)
    return [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]


def test_reset_within_an_answer(chat):
    pieces = chat.say("hello")
    next(pieces)
    chat.reset()
    assert list(pieces) == [] and chat.messages == []


def test_the_next_turn_ends_the_one_before(chat, loaded):
    begun = chat.say("hello")
    first = next(begun) + next(begun)
    second = "".join(chat.say("you"))
    assert list(begun) == []
    assert chat.messages == said("hello", first, "you", second)
    assert second == generate(loaded, chat.messages[:3], max_new_tokens=20, eos_ids=())


def test_an_answer_that_is_dropped(chat, no_collector):
    for piece in chat.say("hello"):  # noqa: B007 (looked at below)
        break
    assert chat.messages == said("hello", piece)


def test_a_turn_of_which_nothing_came(chat):
    first = "".join(chat.say("hello"))
    chat.say("you").close()
    chat.say("you")
    assert chat.messages == said("hello", first)
    assert len("".join(chat.say("you"))) > 0


@pytest.mark.parametrize("text", [None, 5, b"hi", ["hi"]])
def test_what_cannot_be_said(chat, text):
    with pytest.raises(TypeError, match="the message must be a str"):
        chat.say(text)


@pytest.mark.parametrize("messages", ["hi", {"role": "user"}, [5]])
def test_what_are_no_messages(loaded, messages):
    with pytest.raises(TypeError, match="messages are dicts"):
        maxjax.Conversation(*loaded, messages)


def test_half_a_character_does_not_cost_a_saved_chat(loaded, tmp_path):
    messages = [{"role": "system", "content": "x", "name": "\ud800é"}]
    file = tmp_path / "chat.json"
    maxjax.Conversation(*loaded, messages).save(file)
    assert json.loads(file.read_text()) == messages
    with pytest.raises(maxjax.errors.CheckpointError):
        maxjax.Conversation(*loaded, messages).save(tmp_path)  # a directory


# --- names of other libraries ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("max_tokens", "did you mean max_new_tokens="),
        ("max_length", "did you mean max_new_tokens="),
        ("do_sample", "use temperature=: 0 is greedy"),
        ("device_map", "mesh=maxjax.make_mesh"),
        ("torch_dtype", "dtype= of maxjax.load"),
        ("eos_token_id", "did you mean eos_ids="),
        ("seed", "use key=jax.random.key"),
        ("temprature", "did you mean temperature="),
        ("batchsize", "did you mean batch_size="),
        ("nothing_like_it", "settings of Sampling are temperature"),
    ],
)
def test_an_argument_that_is_called_otherwise(loaded, name, says):
    for function in (maxjax.generate, maxjax.stream):
        with pytest.raises(UserInputError, match=f"no argument '{name}'.*{says}") as caught:
            function(*loaded, "x", **{name: 1})
        assert isinstance(caught.value, TypeError)
    if name != "batchsize" and not says.startswith("settings"):
        # Of what is no setting of Sampling it says where it belongs.
        says = says.removeprefix("did you mean ")
        with pytest.raises(TypeError, match=f"Sampling has no {name}=: .*{says}"):
            maxjax.Sampling(**{name: 1})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("beam_size", "num_beams= of maxjax.generate"),
        ("repeat_penalty", "did you mean repetition_penalty="),
        ("dtype", "it is an argument of maxjax.load"),
        ("streamer", r"use maxjax.stream\(…\)"),
        ("use_tqdm", "MAXJAX_PROGRESS"),
    ],
)
def test_more_of_what_others_have(loaded, name, says):
    with pytest.raises(TypeError, match=f"no argument '{name}'.*{says}"):
        maxjax.generate(*loaded, "x", **{name: 1})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("normalize_embeddings", "did you mean normalize="),
        ("show_progress_bar", "MAXJAX_PROGRESS"),
        ("convert_to_numpy", "leave it out"),
        ("batchsize", "did you mean batch_size="),
        ("wholly_unknown", "it takes batch_size, truncate"),
    ],
)
def test_an_argument_of_embed_that_is_called_otherwise(loaded, name, says):
    with pytest.raises(TypeError, match=f"embed.. got an unexpected.*'{name}'.*{says}"):
        maxjax.embed(*loaded, ["x"], **{name: 1})


def test_an_argument_of_load_that_is_called_otherwise(tmp_path):
    for name, says in {
        "torch_dtype": "did you mean dtype=", "device_map": "use mesh=maxjax.make_mesh",
        "dtyp": "did you mean dtype=", "load_in_8bit": "quantised",
        "download_dir": "did you mean cache_dir=", "use_auth_token": "did you mean token=",
        "gguf_file": "did you mean filename=", "trust_remote_code": ": leave it out",
        "temperature": "it is an argument of maxjax.generate", "wholly_unknown": "it takes dtype, ",
    }.items():  # fmt: skip
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'.*{says}"):
            maxjax.load(tmp_path, **{name: 1})


def test_a_model_that_device_put_moved_to_a_mesh(loaded):
    model, tokenizer = loaded
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("any",))
    moved = jax.device_put(model, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    assert generate((moved, tokenizer), "hi") == generate(loaded, "hi")
