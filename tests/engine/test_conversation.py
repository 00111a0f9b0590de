"""Conversation: what each turn writes is what generate writes for the whole chat so far."""

import json

import pytest

import maxjax
from maxjax.engine.decoding import Decoding
from maxjax.errors import UserInputError
from tests.models import decoders
from tests.models.decoders import one_character_each, ours

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}<assistant>"


def characters(template=TEMPLATE):
    return one_character_each(chat_template=template)


@pytest.fixture(scope="module", params=["Llama", "Mistral"])
def model(request, tmp_path_factory):
    place = tmp_path_factory.mktemp(request.param)
    settings = {"sliding_window": 24} if request.param == "Mistral" else {}
    decoders.oracle(request.param, place, **settings)
    return ours(place)


@pytest.fixture
def read(monkeypatch):
    """How many tokens each call of prefill reads."""
    counts = []
    prefill = Decoding.prefill

    def counted(self):
        counts.append(len(self._prompts[0]) - self._read)
        return prefill(self)

    monkeypatch.setattr(Decoding, "prefill", counted)
    return counts


@pytest.mark.parametrize("values", [{}, {"temperature": 1.0, "repetition_penalty": 1.2}])
def test_turns(model, read, values):
    tokenizer = characters()
    sampler = {"max_new_tokens": 12, "stop": "|", "chunk": 16, **values}
    chat = maxjax.Conversation(model, tokenizer, **sampler)
    for turn, text in enumerate(["Hello", "What?", "And_then?"]):
        messages = [*chat.messages, {"role": "user", "content": text}]
        found = "".join(chat.say(text))
        assert chat.messages == [*messages, {"role": "assistant", "content": found}]
        prompt = maxjax.apply_chat_template(tokenizer, messages)
        if not values:  # each turn has a key of its own
            assert maxjax.generate(model, tokenizer, prompt, **sampler) == found
            del read[-1]
        if turn:  # only what is new: the end of the answer, and what was said
            assert read[-1] < len(prompt) / 2, (read, len(prompt))


def test_an_answer_that_is_interrupted(model):
    chat = maxjax.Conversation(model, characters(), max_new_tokens=30, chunk=16)
    pieces = chat.say("Hello")
    begun = next(pieces) + next(pieces)
    pieces.close()
    assert chat.messages[-1] == {"role": "assistant", "content": begun}
    found = "".join(chat.say("Go_on"))
    messages = chat.messages[:-1]
    prompt = maxjax.apply_chat_template(characters(), messages)
    assert found == maxjax.generate(model, characters(), prompt, max_new_tokens=30, chunk=16)


def test_ctrl_c_in_a_dispatch(model, monkeypatch):
    chat = maxjax.Conversation(model, characters(), max_new_tokens=30, chunk=16)
    pieces = chat.say("Hello")
    next(pieces)
    with monkeypatch.context() as patch:
        patch.setattr(Decoding, "fetch", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            list(pieces)
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    prompt = maxjax.apply_chat_template(
        characters(), [*chat.messages, {"role": "user", "content": "x"}]
    )
    found = "".join(chat.say("x"))
    assert found == maxjax.generate(model, characters(), prompt, max_new_tokens=30, chunk=16)


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


def test_no_template(model):
    with pytest.raises(UserInputError, match="no chat template"):
        maxjax.Conversation(model, characters(None))
    refusing = "{{ raise_exception('only one message') }}"
    with pytest.raises(UserInputError, match="only one message"):
        maxjax.Conversation(model, characters(refusing))
