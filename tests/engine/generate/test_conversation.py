"""Conversation: what each turn writes is what generate writes for the whole chat so far."""

import functools
import json
import threading

import pytest

import maxjax
from maxjax.engine.batching import reading
from maxjax.errors import UserInputError
from maxjax.lockstep import Lockstep
from tests.models import decoders
from tests.models.decoders import one_character_each, ours

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}<assistant>"


def characters(template=TEMPLATE):
    return one_character_each(chat_template=template)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    @functools.cache
    def made(kind):
        place = tmp_path_factory.mktemp(kind)
        decoders.oracle(kind, place, **({"sliding_window": 24} if kind == "Mistral" else {}))
        return ours(place)

    return made


@pytest.fixture(scope="module")
def model(models):
    return models("Llama")


@pytest.fixture
def read(monkeypatch):
    """How many tokens of each text are read, in the order in which texts begin."""
    texts, counts = [], []
    mark = reading._mark_read

    def counted(calls, text, count):
        if text not in texts:
            texts.append(text)
            counts.append(0)
        counts[-1] += count
        return mark(calls, text, count)

    monkeypatch.setattr(reading, "_mark_read", counted)
    return counts


def test_threads_of_one_chat_take_turns(model):
    """The second message ends the answer to the first, between two tokens."""
    chat = maxjax.Conversation(model, characters(), max_new_tokens=40, chunk=16)
    errors = []

    def talk(text):
        try:
            for _ in chat.say(text):
                pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=talk, args=(f"Hi{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * (len(chat.messages) // 2)


def test_arguments_that_no_text_can_have(model):
    chat = characters()
    size = model.config.vocab_size
    with pytest.raises(UserInputError, match=f"eos_ids has the token id {size}, which is outside"):
        maxjax.generate(model, chat, "a", eos_ids=[1, size])
    with pytest.raises(UserInputError, match="5000000.*65536"):
        maxjax.generate(model, chat, "a", stop="x" * 5_000_000)


def test_settings_are_those_of_the_whole_chat(model):
    chat = maxjax.Conversation(model, characters(), max_new_tokens=2)
    with pytest.raises(TypeError, match=r"Conversation\(model, tokenizer, max_new_tokens=…\)"):
        chat.say("a", max_new_tokens=2)
    assert not chat.messages
    with pytest.raises(TypeError, match='messages=.."role": "system"'):
        maxjax.Conversation(model, characters(), system="b")


SAMPLED = {"temperature": 1.0, "repetition_penalty": 1.2}
# A cache of every token is cut to any length; one that goes round may have to be filled anew.
KINDS = pytest.mark.parametrize("kind", ["Llama", "Mistral"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["Llama", "Mistral"])
@pytest.mark.parametrize("values", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_turns(models, read, kind, values):
    model = models(kind)
    tokenizer = characters()
    sampler = {"max_new_tokens": 12, "stop": "|", "chunk": 16, **values}
    chat, known = maxjax.Conversation(model, tokenizer, **sampler), []
    for turn, text in enumerate(["Hello", "What?", "And_then?"]):
        messages = [*chat.messages, {"role": "user", "content": text}]
        found = "".join(chat.say(text))
        assert chat.messages == [*messages, {"role": "assistant", "content": found}]
        prompt = tokenizer.encode(maxjax.apply_chat_template(tokenizer, messages), special=False)
        if not values:  # each turn has a key of its own
            assert maxjax.generate(model, tokenizer, messages, **sampler) == found
            del read[-1]
        # A turn reads what is new: the last token of the answer before it, and what was said.
        same = next(
            (i for i, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b), len(known)
        )
        assert read[turn] in (len(prompt) - same, len(prompt) - same + 1)
        known = [*prompt, *chat.completion.tokens]


@KINDS
def test_an_answer_that_is_interrupted(models, kind):
    model = models(kind)
    chat = maxjax.Conversation(model, characters(), max_new_tokens=30, chunk=16)
    pieces = chat.say("Hello")
    begun = next(pieces) + next(pieces)
    pieces.close()
    assert chat.messages[-1] == {"role": "assistant", "content": begun}
    found = "".join(chat.say("Go_on"))
    messages = chat.messages[:-1]
    assert found == maxjax.generate(model, characters(), messages, max_new_tokens=30, chunk=16)


def test_ctrl_c_in_a_dispatch(model, monkeypatch):
    chat = maxjax.Conversation(model, characters(), max_new_tokens=30, chunk=16)
    pieces = chat.say("Hello")
    next(pieces)
    with monkeypatch.context() as patch:
        patch.setattr(Lockstep, "fetch", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            list(pieces)
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    asked = [*chat.messages, {"role": "user", "content": "x"}]
    found = "".join(chat.say("x"))
    assert found == maxjax.generate(model, characters(), asked, max_new_tokens=30, chunk=16)


def test_reset_and_save(model, tmp_path):
    opening = [{"role": "system", "content": "Be_brief."}]
    chat = maxjax.Conversation(model, characters(), opening, max_new_tokens=5, chunk=16)
    first = "".join(chat.say("Hello"))
    chat.save(tmp_path / "chat.json")
    assert json.loads((tmp_path / "chat.json").read_text()) == chat.messages
    chat.reset()
    assert chat.messages == opening
    assert "".join(chat.say("Hello")) == first


def test_a_chat_that_becomes_too_long(model):
    chat = maxjax.Conversation(model, characters(), max_new_tokens=5, chunk=16)
    "".join(chat.say("Hello"))
    before = list(chat.messages)
    with pytest.raises(UserInputError, match="context is 256"):
        chat.say("x" * 250)
    assert chat.messages == before  # and it goes on
    assert len("".join(chat.say("Hi"))) == 5


@KINDS
def test_room_is_made_by_the_oldest_turns(models, read, kind):
    """What is left out is gone from the prompt alone; the opening stays, and reset brings all back."""
    model = models(kind)
    opening = [{"role": "system", "content": "Be_brief."}]
    chat = maxjax.Conversation(model, characters(), opening, max_new_tokens=5, chunk=16)
    turns = [c * 40 for c in "abc"]
    for text in turns:
        assert chat.make_room(text) == 0 and "left out" not in repr(chat)
        "".join(chat.say(text))
    left_out = chat.make_room("e" * 40)
    assert f", {left_out} messages left out" in repr(chat)
    assert left_out > 0 and left_out % 2 == 0
    assert chat.make_room("e" * 40) == 0  # done
    found = "".join(chat.say("e" * 40))
    asked = [*opening, *chat.messages[1 + left_out : -1]]
    assert [m["content"] for m in asked if m["role"] == "user"] == [
        *turns[left_out // 2 :],
        "e" * 40,
    ]
    assert found == maxjax.generate(model, characters(), asked, max_new_tokens=5, chunk=16)
    assert len(chat.messages) == 9
    assert chat.make_room("f" * 300) == 0  # it does not fit by itself
    with pytest.raises(UserInputError, match="context is 256"):
        chat.say("f" * 300)
    chat.reset()
    assert chat.make_room("g") == 0 and chat.messages == opening


def test_no_room_for_more_than_what_is_said(model):
    """All turns go where an answer of the wanted length never fits."""
    chat = maxjax.Conversation(model, characters(), max_new_tokens=200, chunk=16)
    "".join(chat.say("a"))
    assert chat.make_room("x" * 200, 100) == 2
    assert len("".join(chat.say("x" * 200))) > 0
    empty = maxjax.apply_chat_template(characters(), [{"role": "user", "content": ""}])
    assert chat.make_room("x" * (256 - len(empty)), 100) == 0  # no token of an answer would fit
    assert chat.make_room("x" * (255 - len(empty)), 100) == 2


def test_the_caller_removes_messages_after_room_was_made(model):
    """What is left out is known by its messages and not by their number, so that new ones are not left out."""
    chat = maxjax.Conversation(model, characters(), max_new_tokens=5, chunk=16)
    for c in "abc":
        "".join(chat.say(c * 40))
    left_out = chat.make_room("e" * 60)
    assert left_out == 2
    del chat.messages[:1]
    for seen in (chat.messages[1:], []):
        asked = maxjax.apply_chat_template(characters(), [*seen, {"role": "user", "content": "f"}])
        stream = chat.say("f")
        assert stream.completion.prompt_tokens == tuple(characters().encode(asked))
        stream.close()
        chat.messages = []


def test_variables_of_the_template(model):
    template = "{{ effort }}{{ messages[0].content }}"
    chat = maxjax.Conversation(
        model, characters(template), max_new_tokens=5, chunk=16, template_kwargs={"effort": "low"}
    )
    found = "".join(chat.say("Hi"))
    options = {"max_new_tokens": 5, "chunk": 16, "chat": False}
    assert found == maxjax.generate(model, characters(), "lowHi", **options)


def test_no_template(model):
    with pytest.raises(UserInputError, match="no chat template"):
        maxjax.Conversation(model, characters(None))
    refusing = "{{ raise_exception('only one message') }}"
    with pytest.raises(UserInputError, match="only one message"):
        maxjax.Conversation(model, characters(refusing))
