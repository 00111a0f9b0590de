"""Chats as text and tokens against transformers; templates that fail, loop and grow."""

import dataclasses
import functools
import json
import sys
import time
import zlib
from datetime import datetime
from unittest import mock

import pytest

from maxjax.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointLimitError,
    UserInputError,
)
from maxjax.models.gguf import gguf_tokenizer_metadata
from maxjax.text.chat import apply_chat_template, chat_prompt, tokenize_chat
from maxjax.text.template import sandbox
from maxjax.text.template.render import render
from maxjax.text.tokenizer.tokenizer import gguf_tokenizer, load_tokenizer
from tests.models.gguf.tokenizer import tokenizer_files as files
from tests.oracles.recorded import recorded, transformers
from tests.text import chat_templates

SPECIAL = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("chat")
    (path / "tokenizer.json").write_text(json.dumps(files.byte_level("llama3")))
    settings = {
        **SPECIAL,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<user>",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="module")
def oracle(directory):
    """transformers' tokenizer, made when it is asked."""
    return functools.cache(lambda: transformers.AutoTokenizer.from_pretrained(directory))


@pytest.fixture(scope="module")
def tokenizer(directory):
    return load_tokenizer(directory)


USER = {"role": "user", "content": '  Was ist 37 + 48? 🙂 "quoted" <b> '}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n85. "}
SYSTEM = {"role": "system", "content": "Be brief.\n"}
CALL = {
    "role": "assistant", "content": "",
    "tool_calls": [{"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {"é": [1, None]}}}],
}  # fmt: skip
RESULT = {"role": "tool", "content": "42", "name": "f", "tool_call_id": "abcdefghi"}
CHATS = {
    "one": [USER],
    "two turns": [USER, ANSWER, USER],
    "system": [SYSTEM, USER, ANSWER, USER],
    "tools": [USER, CALL, RESULT, {"role": "assistant", "content": "It is 42."}, USER],
    "thought": [USER, {"role": "assistant", "content": "85", "thinking": "hm"}],
    "twice the user": [USER, USER],
    "parts": [{"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "image"}]}],
    "empty content": [{"role": "user", "content": ""}],
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "Gibt 42 <é>",
     "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}},
]  # fmt: skip
OPTIONS = [
    {},
    {"add_generation_prompt": False},
    {"tools": TOOLS, "documents": [{"title": "T", "text": "x"}]},
    {"enable_thinking": False, "date_string": "1 Jan 2026", "extra": {"a": (1, 2.5)}},
]


class Then(datetime):
    """The day on which the answers were kept: some templates write the date."""

    @classmethod
    def now(cls, tz=None):
        """That day."""
        return cls(2026, 11, 23, 12, tzinfo=tz)


@pytest.fixture(autouse=True)
def then(monkeypatch):
    monkeypatch.setattr(sandbox, "datetime", Then)


def theirs(oracle, messages, template, tokenize=False, **options):
    """[a text or tokens, None], or [None, the last line of the error]."""
    options = {"add_generation_prompt": True, "tokenize": tokenize, **options}
    try:
        with mock.patch("transformers.utils.chat_template_utils.datetime", Then):
            return [oracle().apply_chat_template(messages, chat_template=template, **options), None]
    except Exception as error:  # the template does not take such messages
        return [None, (str(error).splitlines() or [""])[-1]]


@pytest.mark.parametrize("name", chat_templates.ALL)
def test_prompts_are_those_of_transformers(name, tokenizer, oracle):
    template, compared = chat_templates.ALL[name], 0
    cases = [(messages, options) for messages in CHATS.values() for options in OPTIONS]
    answers = recorded(lambda: [theirs(oracle, m, template, **options) for m, options in cases])
    for (messages, options), (expected, last) in zip(cases, answers, strict=True):
        if last is not None:
            with pytest.raises(UserInputError) as info:
                apply_chat_template(tokenizer, messages, chat_template=template, **options)
            assert last[:40] in str(info.value)
            continue
        found = apply_chat_template(tokenizer, messages, chat_template=template, **options)
        assert found == expected
        compared += 1
    assert compared >= 12


@pytest.mark.parametrize(
    "template, expected",
    [  # as in transformers, so that what the OpenAI API returns can be passed on
        ("{{ 'tool_calls' in messages[0] }}{{ messages[0].content }}.", "False."),
        ("{% if messages[0]['content'] is none %}call{% endif %}", "call"),  # DeepSeek R1
        (  # RWKV
            "{% if messages[0]['content'] is  not none %}Assistant: {{ messages[0]['content'] }}.{% endif %}",
            "Assistant: .",
        ),
        (  # Ministral 3
            "{% if messages[0]['content'] is none %}call{% endif %}{{ messages[0]['content'] | length }}",
            "0",
        ),
    ],
)
def test_keys_that_are_none_are_left_out(tokenizer, template, expected):
    messages = [{"role": "assistant", "content": None, "tool_calls": None}]
    assert apply_chat_template(tokenizer, messages, chat_template=template) == expected


class Message:
    """As OpenAI's client returns one."""

    def model_dump(self):
        return {"role": "assistant", "content": None, "refusal": None, "tool_calls": [{"id": "x"}]}


@dataclasses.dataclass
class Turn:
    role: str
    content: str


def test_messages_may_be_objects(tokenizer):
    template = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    found = apply_chat_template(tokenizer, [Turn("user", "Hi"), Message()], chat_template=template)
    assert found == (
        '{"role": "user", "content": "Hi"}{"role": "assistant", "tool_calls": [{"id": "x"}]}'
    )
    with pytest.raises(TypeError, match="is a type, not a dict"):
        apply_chat_template(tokenizer, [Turn], chat_template=template)


WRITES_TEXT = (  # as DeepSeek R1 and Functionary: the first fails with a dict, the second writes Python's
    "{% for m in messages %}{% for call in m.tool_calls %}{{ call.function.name + call.function.arguments }}"
    "{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for call in m.tool_calls %}{{ call.function.name }}{{ call.function.arguments }}"
    "{% endfor %}{% endfor %}",
)


def called(arguments, **keys):
    function = {"name": "f", "arguments": arguments}
    return {**CALL, "tool_calls": [{**CALL["tool_calls"][0], "function": function, **keys}]}


@pytest.mark.parametrize("name", ["Llama 3", "Qwen 2.5", "Mistral"])
def test_arguments_of_calls_may_be_json_as_in_openais_api(tokenizer, name):
    def shown(call):
        return chat_prompt(tokenizer, [USER, call, RESULT], chat_template=chat_templates.ALL[name])

    assert shown(called('{"é":[1,null]}')) == shown(CALL)
    assert shown(called("{}")) == shown(called("")) == shown(called({}))
    assert shown(CALL) != shown(called("no JSON"))  # as it is


def test_a_template_that_takes_json_gets_it_as_it_is(tokenizer):
    """Qwen 3's prints a text as it is: apply_chat_template and chat_prompt agree with transformers."""
    chat = [USER, called('{"é":[1,null]}'), RESULT]
    options = {"chat_template": chat_templates.ALL["Qwen 3"]}
    shown = chat_prompt(tokenizer, chat, **options)
    assert '{"é":[1,null]}' in shown and shown == apply_chat_template(tokenizer, chat, **options)


# As those of LLaVA and Idefics, which have nothing to write where a content is a text.
IN_PARTS = (
    "{% for m in messages %}{{ m['role'] | upper }}:{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}"
    " {{ p['text'] }}{% endfor %}|{% endfor %}",
    "{% for m in messages %}{{ m['role'] | upper }}:{% for p in m['content'] %}{% if p['type'] == 'text' %}"
    " {{ p['text'] }}{% endif %}{% endfor %}|{% endfor %}",
)


@pytest.mark.parametrize("template", IN_PARTS)
def test_a_template_that_takes_texts_in_parts_alone(tokenizer, template):
    asked = lambda *messages: chat_prompt(tokenizer, messages, chat_template=template)
    system, user = {"role": "system", "content": "a"}, {"role": "user", "content": " b\n"}
    assert asked(system, user) == "SYSTEM: a|USER:  b\n|"
    in_parts = {"role": "user", "content": [{"type": "text", "text": "c"}]}
    assert asked(in_parts) == "USER: c|"
    said = {"role": "assistant", "content": "S"}  # as in the name of a role
    assert asked(in_parts, said, user) == "USER: c|ASSISTANT: S|USER:  b\n|"
    # A text that no form shows changes nothing.
    assert chat_prompt(tokenizer, [user], chat_template="{{ messages[0].role }}") == "user"


@pytest.mark.parametrize("template", WRITES_TEXT)
def test_templates_that_add_arguments_to_a_text_get_json(tokenizer, template):
    for arguments in ({"é": [1, None]}, '{"é": [1, null]}'):
        messages = [called(arguments)]
        assert chat_prompt(tokenizer, messages, chat_template=template) == 'f{"é": [1, null]}'
        assert messages == [called(arguments)]


def test_a_template_that_fails_with_calls_says_why(tokenizer):
    with pytest.raises(UserInputError, match="no calls"):
        apply_chat_template(tokenizer, [CALL], chat_template="{{ raise_exception('no calls') }}")


def test_tokens_are_those_of_transformers_and_begin_once(tokenizer, oracle):
    options = {"tokenize": True, "return_dict": False}
    templates = (chat_templates.LLAMA3, chat_templates.CHATML, chat_templates.GEMMA)
    answers = recorded(
        lambda: [theirs(oracle, CHATS["two turns"], one, **options) for one in templates]
    )
    for template, (expected, _) in zip(templates, answers, strict=True):
        text = apply_chat_template(tokenizer, CHATS["two turns"], chat_template=template)
        found = tokenizer.encode(text, special=False)
        assert found == expected
    assert found[0] == tokenizer.bos_id and found.count(tokenizer.bos_id) == 1
    assert tokenizer.encode("x")[0] == tokenizer.bos_id  # which it puts before other texts


@pytest.mark.parametrize("name", chat_templates.MARKED)
def test_tokens_of_the_assistant_are_those_of_transformers(name, tokenizer, oracle):
    template, compared = chat_templates.MARKED[name], 0
    options = [{}, {"add_generation_prompt": True}, {"tools": TOOLS, "extra": 1}]
    cases = [(chat, more) for chat in CHATS.values() for more in options]

    def answer(chat, more):
        more = {"add_generation_prompt": False, **more, "return_assistant_tokens_mask": True}
        found, error = theirs(oracle, chat, template, tokenize=True, return_dict=True, **more)
        return None if error else [found["input_ids"], found["assistant_masks"]]

    answers = recorded(lambda: [answer(*case) for case in cases])
    for (chat, more), expected in zip(cases, answers, strict=True):
        if expected is None:
            with pytest.raises(UserInputError):
                tokenize_chat(tokenizer, chat, chat_template=template, **more)
            continue
        found = tokenize_chat(tokenizer, chat, chat_template=template, **more)
        assert list(found) == expected
        if name != "none of the chat":
            assert any(found.assistant_mask) == any(m["role"] == "assistant" for m in chat)
        compared += 1
    assert compared >= 18


def test_the_mask_selects_what_the_assistant_wrote(tokenizer):
    template = chat_templates.MARKED["ChatML"]
    chat = [
        USER,
        {"role": "assistant", "content": "é 猫 85."},
        USER,
        {"role": "assistant", "content": "no"},
    ]
    found = tokenize_chat(tokenizer, chat, chat_template=template)
    kept = [i for i, is_kept in zip(*found, strict=True) if is_kept]
    assert tokenizer.decode(kept) == "é 猫 85.<|im_end|>no<|im_end|>"


def test_a_template_that_does_not_mark_answers_is_refused(tokenizer):
    for template in (chat_templates.CHATML, "{# {% generate %} #}{{ messages[0].content }}"):
        with pytest.raises(UserInputError, match=r"has no \{% generation %\} block"):
            tokenize_chat(tokenizer, [USER, ANSWER], chat_template=template)
    inside = (
        "{% macro say(m) %}[{{ m.role }}]{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ say(m) }}{% endfor %}"
    )
    with pytest.raises(UserInputError, match="in a macro"):
        tokenize_chat(tokenizer, [USER, ANSWER], chat_template=inside)
    assert "85" in apply_chat_template(tokenizer, [USER, ANSWER], chat_template=inside)
    with pytest.raises(UserInputError, match="continue_final_message"):
        tokenize_chat(tokenizer, [USER, ANSWER], continue_final_message=True)
    with pytest.raises(TypeError, match="maxjax.tokenize_chat"):
        apply_chat_template(tokenizer, [USER], return_assistant_tokens_mask=True)


# --- where templates are ------------------------------------------------------------------------


def with_template(directory, tmp_path, stored=None, jinja=None):
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    if stored is not None:
        settings["chat_template"] = stored
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if jinja is not None:
        (tmp_path / "chat_template.jinja").write_bytes(jinja)
    return load_tokenizer(tmp_path)


NAMED = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]


@pytest.mark.parametrize(
    ("stored", "jinja", "expected"),
    [
        ("s", None, {"default": "s"}),
        ("s", "jé".encode(), {"default": "jé"}),
        (NAMED, None, {"default": "d", "tool_use": "t"}),
        (NAMED, b"j", {"default": "j", "tool_use": "t"}),
        (None, b"j", {"default": "j"}),
        (None, None, {}),
    ],
)
def test_the_file_counts_more_than_the_settings(directory, tmp_path, stored, jinja, expected):
    found = with_template(directory, tmp_path, stored, jinja)
    assert found.chat_templates == expected and found.chat_template == expected.get("default")
    for name, text in found.files().items():
        (tmp_path / name).write_text(text)
    again = load_tokenizer(tmp_path)
    assert again.chat_templates == expected and again.special_tokens == found.special_tokens


def test_templates_in_files_of_their_own(directory, tmp_path):
    """As transformers 5 writes named ones, and old multimodal models those of their processor."""
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "p"}))
    assert with_template(directory, tmp_path).chat_templates == {"default": "p"}
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("t")
    found = with_template(directory, tmp_path, jinja=b"j")
    assert found.chat_templates == {"default": "j", "tool_use": "t"}
    again = tmp_path / "again"
    again.mkdir()
    for name, text in found.files().items():
        (again / name).write_text(text)
    assert load_tokenizer(again).chat_templates == found.chat_templates


def test_which_of_several(directory, tmp_path):
    found = with_template(directory, tmp_path, NAMED)
    use = lambda **options: apply_chat_template(found, [USER], **options)
    assert (use(), use(tools=TOOLS), use(chat_template="tool_use"), use(chat_template="own")) == (
        "d", "t", "t", "own"
    )  # fmt: skip
    found.chat_templates.pop("default")
    with pytest.raises(UserInputError, match="several chat templates.*tool_use"):
        use()


def test_out_of_a_gguf_file():
    data = files.byte_level("llama3")
    settings = {
        **SPECIAL,
        "chat_template": [{**NAMED[0], "template": "{{ bos_token }}hi"}, NAMED[1]],
    }
    for keep in (True, False):
        found = gguf_tokenizer(gguf_tokenizer_metadata(data, settings, keep_json=keep))
        assert found.chat_templates == {"default": "{{ bos_token }}hi", "tool_use": "t"}
        text = apply_chat_template(found, [USER])
        assert found.encode(text, special=False) == [0, *found.encode("hi", special=False)]
        assert found.special_tokens == SPECIAL and found.bos_id == 0 and found.eos_ids == (1,)


def test_special_tokens_of_a_directory(tokenizer, oracle):
    named, begin, end = recorded(
        lambda: [oracle().special_tokens_map, oracle().bos_token_id, oracle().eos_token_id]
    )
    assert tokenizer.special_tokens == named
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (begin, (end,))


def test_a_special_token_may_be_an_object(directory, tmp_path):
    with_template(directory, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"bos_token": None, "eos_token": {"content": "<|end|>", "lstrip": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"cls_token": "<|begin|>"}))
    found = load_tokenizer(tmp_path)
    assert (found.bos_id, found.eos_ids) == (None, (1,))
    assert found.special_tokens == {
        "eos_token": "<|end|>", "pad_token": "<user>", "cls_token": "<|begin|>"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("stored", "jinja", "error"),
    [
        (3, None, CheckpointFormatError),
        ([3], None, CheckpointFormatError),
        ([{"name": "a"}], None, CheckpointFormatError),
        ([{"name": 1, "template": "x"}], None, CheckpointFormatError),
        (None, b"\xff\xfe", CheckpointFormatError),
        (None, b"a" * (2 << 20), CheckpointLimitError),
    ],
)
def test_templates_that_are_none(directory, tmp_path, stored, jinja, error):
    with pytest.raises(error, match="chat_template|chat template"):
        with_template(directory, tmp_path, stored, jinja)


def test_a_directory_instead_of_the_template(directory, tmp_path):
    (tmp_path / "chat_template.jinja").mkdir()
    with pytest.raises(CheckpointError, match="chat_template.jinja"):
        with_template(directory, tmp_path)


# --- what a user may do wrong -------------------------------------------------------------------


def test_a_model_without_a_template(tokenizer):
    with pytest.raises(UserInputError, match="no chat template"):
        apply_chat_template(tokenizer, [USER])


@pytest.mark.parametrize("messages", ["hello", {"role": "user"}, ["hello"], [3], 3])
def test_messages_that_are_none(tokenizer, messages):
    with pytest.raises(TypeError):
        apply_chat_template(tokenizer, messages, chat_template="x")


def test_a_chat_without_a_tokenizer():
    with pytest.raises(UserInputError, match="a chat needs a tokenizer"):
        apply_chat_template(None, [USER])


def test_a_chat_without_messages(tokenizer):
    with pytest.raises(UserInputError, match="at least one message"):
        apply_chat_template(tokenizer, [], chat_template="x")


def test_tools_that_are_none(tokenizer):
    with pytest.raises(TypeError, match=r"tools\[0\] is a str"):
        apply_chat_template(tokenizer, [USER], tools=["f"], chat_template="x")
    with pytest.raises(UserInputError, match="no docstring"):
        apply_chat_template(tokenizer, [USER], tools=[lambda: 0], chat_template="x")
    for name in ("tools", "documents"):
        for wrong, kind in ((5, "int"), ("f", "str")):
            with pytest.raises(TypeError, match=f"{name} must be a list of .*, not {kind}"):
                apply_chat_template(tokenizer, [USER], **{name: wrong}, chat_template="x")
    with pytest.raises(TypeError, match="chat_template must be a str, not int"):
        apply_chat_template(tokenizer, [USER], chat_template=5)


def test_a_python_function_as_a_tool(tokenizer):
    template = (
        "{% for tool in tools %}{{ tool.function.parameters.properties | tojson }}{% endfor %}"
    )
    found = apply_chat_template(tokenizer, [USER], tools=[weather], chat_template=template)
    assert json.loads(found)["days"] == {"type": "integer", "description": "how many days"}


def weather(city: str, days: int = 1):
    """Tells the weather.

    Args:
        city: name of the city
        days: how many days
    """


EVERY = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.mark.parametrize(
    "content, template, wanted",
    [
        ("It is", EVERY, "<assistant>It is"),
        ("It is ", EVERY, "<assistant>It is "),
        ("It is ", EVERY.replace("m.content", "m.content | trim"), "<assistant>It is"),
        ("", EVERY, "<assistant>"),
        (
            [{"type": "text", "text": "It is"}],
            EVERY.replace("m.content", "m.content[0].text"),
            "<assistant>It is",
        ),
    ],
)
def test_the_last_message_is_continued(tokenizer, content, template, wanted):
    user = {"role": "user", "content": [{"type": "text", "text": "It is"}]}
    user = USER if isinstance(content, str) else user
    messages = [user, {"role": "assistant", "content": content}]
    found = apply_chat_template(
        tokenizer, messages, continue_final_message=True, chat_template=template
    )
    assert found.endswith(f"</>{wanted}") and found.startswith("<user>")
    again = apply_chat_template(
        tokenizer, messages, continue_final_message=1, chat_template=template
    )
    assert again == found


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_the_last_reasoning_is_continued(tokenizer, key):
    template = "{{ messages[0].thinking }}</think>{{ messages[0].content }}"
    messages = [{"role": "assistant", key: "So it", "content": "It is"}]
    use = functools.partial(apply_chat_template, tokenizer, messages, chat_template=template)
    assert use(continue_final_message=key) == "So it"
    with pytest.raises(UserInputError, match="no text to continue"):
        use(continue_final_message="text")


def test_a_last_message_that_cannot_be_continued(tokenizer):
    use = functools.partial(apply_chat_template, tokenizer, continue_final_message=True)
    with pytest.raises(UserInputError, match="does not show the last message"):
        use([USER], chat_template="x")
    for content in (None, [{"type": "image"}], [{"type": "text", "text": None}]):
        with pytest.raises(UserInputError, match="no text to continue"):
            use([{"role": "assistant", "content": content}], chat_template="x")


def test_a_message_in_itself(tokenizer):
    message = {"role": "user"}
    message["content"] = [message]
    with pytest.raises(UserInputError, match="in itself"):
        apply_chat_template(tokenizer, [message], chat_template="{{ messages }}")


def test_objects_reach_no_template_and_messages_are_not_changed(tokenizer):
    class Text(str):
        def secret(self):
            raise AssertionError

    messages = [{"role": "user", "content": Text("hi"), "image": object(), "thinking": "x"}]
    before = dict(messages[0])
    look = "{{ messages[0].content.secret is defined }} {{ messages[0].image }} {{ messages[0].reasoning_content }}"
    assert apply_chat_template(tokenizer, messages, chat_template=look) == "False <object> x"
    assert messages[0] == before


# --- templates that fail ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('only two\nroles') }}", "the chat template says: only two roles"),
        ("{% if %}", "mistake in line 1"),
        ("\n\n{% for x in %}", "mistake in line 3"),
        ("{{ a.b.c }}", "uses an undefined value"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ [].append(1) }}", "unsafe|not safe"),
        ("{{ ''.__class__ }}{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ namespace(_x=1) }}", "_x"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "_x"),
        ("{% include 'x' %}", "TypeError|not"),
        ("{{ x|nosuch }}", "mistake in line 1"),
        ("{{ (" * 3000 + "1" + ") }}" * 3000, "mistake|too deeply|failed"),
        ("x" * (2 << 20), "at most"),
    ],
)
def test_a_template_that_fails_says_why(template, says):
    with pytest.raises(UserInputError, match=says) as info:
        render(template, {})
    assert "\n" not in str(info.value) and len(str(info.value)) < 600


TWICE = "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = STEP %}{% endfor %}{{ ns.s|length }}"
MACRO = "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}"
ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a range": "{% for a in range(10**9) %}{% endfor %}",
    "macros": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macros, wide": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loops": "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "times": "{{ 'a' * 10**10 }}",
    "times, other way": "{{ 10**10 * [1] }}",
    "powers": "{{ 9 ** (9 ** 9) }}",
    "products": "{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "plus": TWICE.replace("STEP", "ns.s + ns.s"),
    "tilde": TWICE.replace("STEP", "ns.s ~ ns.s"),
    "join": TWICE.replace("STEP", "[ns.s, ns.s]|join(ns.s)"),
    "method join": TWICE.replace("STEP", "ns.s.join([ns.s, ns.s])"),
    "replace": TWICE.replace("STEP", "ns.s|replace('a', ns.s)"),
    "method replace": TWICE.replace("STEP", "ns.s.replace('a', ns.s)"),
    "format": TWICE.replace("STEP", "'%s%s'|format(ns.s, ns.s)"),
    "percent": TWICE.replace("STEP", "'%s%s' % (ns.s, ns.s)"),
    "method format": TWICE.replace("STEP", "'{0}{0}'.format(ns.s)"),
    "lists in lists": TWICE.replace("STEP", "[ns.s, ns.s]"),
    "tuples in tuples": TWICE.replace("STEP", "(ns.s, ns.s)"),
    "dicts in dicts": TWICE.replace("STEP", "{1: ns.s, 2: ns.s}"),
    "dict calls": TWICE.replace("STEP", "dict(a=ns.s, b=ns.s)"),
    "deep": "{% set ns = namespace(s=[]) %}{% for i in range(9999) %}{% set ns.s = [ns.s] %}{% endfor %}{{ ns.s }}",
    "macro text": MACRO + TWICE.replace("STEP", "f(ns.s)"),
    "block text": "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}"
    "{% set ns.s = t %}{% endfor %}",
    "output": "{% set s = 'x' * 1000000 %}{% for i in range(99999) %}{{ s }}{% endfor %}",
    "slices": "{% set s = 'x' * 4000000 %}" + "{% set a = s[1:] %}" * 900,
    "center": "{{ 'a'|center(10**10) }}",
    "method center": "{{ 'a'.center(10**10) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "expandtabs": "{{ ('\t' * 1000).expandtabs(10**7) }}",
    "indent": "{{ ('a\n' * 100000)|indent(10**6) }}",
    "format width": "{{ '%09999999999d' % 1 }}",
    "format star": "{{ '%*d' % (10**10, 1) }}",
    "method format width": "{{ '{:9999999999}'.format(1) }}",
    "method format width by argument": "{{ '{:{}}'.format(1, 10**10) }}",
    "filter format width": "{{ '%9999999999d'|format(1) }}",
    "to_bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "json indent": "{{ [[1]]|tojson(indent=10**10) }}",
    "batch": "{{ [1]|batch(10**10, 'x')|list }}",
    "map": "{{ range(99999)|map('center', 1000000)|list }}",
    "sum": "{{ [[1]]|sum(start=[]) }}",
    "translate": "{{ 'aaa'.translate({97: 'b' * 1000000}) }}",
    "wordwrap": "{{ ('a ' * 100000)|wordwrap(1, wrapstring='x' * 100000) }}",
}  # fmt: skip


# Two of these take seconds: `test_loops_are_ended_and_leave_nothing` in template/test_bounds.py stands for both.
@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end_is_ended(name):
    trace, start = sys.gettrace(), time.monotonic()
    with pytest.raises(UserInputError, match="too much|too deeply|OverflowError|failed"):
        render(ENDLESS[name], {})
    # Not how fast it is, but that it ends: what these ask for would take days.
    assert time.monotonic() - start < 60 and sys.gettrace() is trace


def test_after_one_that_was_ended_others_run():
    with pytest.raises(UserInputError):
        render(ENDLESS["output"], {})
    assert render("{{ 'a' * 1000 }}", {}) == "a" * 1000


def checksums(text):
    """Of a text that is too long to keep."""
    return [len(text), zlib.crc32(text.encode())]


def test_long_chats_are_no_endless_ones(tokenizer, oracle):
    messages = [USER, ANSWER] * 200 + [{"role": "user", "content": "long " * 1_000_000}]
    for template in (chat_templates.QWEN3, chat_templates.LLAMA3):
        found = apply_chat_template(tokenizer, messages, chat_template=template)
        sums = recorded(lambda: checksums(theirs(oracle, messages, template)[0]))  # noqa: B023
        assert checksums(found) == sums
