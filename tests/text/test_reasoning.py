"""Answers taken apart: reasoning, content and calls of functions, in the forms that models write."""

import random

import pytest

from maxjax.engine.generate.completion import Completion
from maxjax.errors import UserInputError
from maxjax.text.chat import answer_message
from maxjax.text.reasoning import AnswerParser, parts_of

CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
ARGUMENTS = '{"city": "Oslo"}'
CHANNELS = (
    "<|channel|>analysis<|message|>Add them.<|end|><|start|>assistant"
    "<|channel|>final<|message|>It is 7."
)


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {
    "properties": {"city": {"type": "string"}}}}}]  # fmt: skip
ANSWERS = [
        ("It is 7.\n", "", None, "It is 7.\n", ()),
        ("<think>\nAdd them.\n</think>\n\nIt is 7.", "", "Add them.", "It is 7.", ()),
        ("\nAdd them.</think>It is 7.", "<|assistant|><think>\n", "Add them.", "It is 7.", ()),
        ("<think>Add", "", "Add", "", ()),  # its length was reached
        ("Add", "<think>", "Add", "", ()),
        ("The mark <think> opens it.", "", None, "The mark <think> opens it.", ()),
        ("A </think> closes it.", "", None, "A </think> closes it.", ()),
        ("Well.[THINK]Add them.[/THINK]It is 7.", "", "Add them.", "Well.It is 7.", ()),
        ("<seed:think>Add them.</seed:think>It is 7.", "", "Add them.", "It is 7.", ()),
        ("<|START_THINKING|>Add.<|END_THINKING|><|START_RESPONSE|>7<|END_RESPONSE|>", "", "Add.", "7", ()),
        (CHANNELS, "", "Add them.", "It is 7.", ()),
        ("<|channel|>analysis<|message|>Add", "", "Add", "", ()),
        ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
         f"to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>", "", None, "I look.", (CALL,)),
        (f"<|channel|>commentary to=functions.weather<|message|>{ARGUMENTS[:-1]}", "", None, ARGUMENTS[:-1], ()),
        (f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}]', "", None, "", (CALL,)),
        (f"Look.[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]weather[CALL_ID]abc[ARGS]{ARGUMENTS}", "",
         None, "Look.", (CALL, CALL)),
        (f"[THINK]Look.[/THINK][TOOL_CALLS]weather[ARGS]{ARGUMENTS}", "", "Look.", "", (CALL,)),
        ("[TOOL_CALLS]weather[ARGS]{", "", None, "[TOOL_CALLS]weather[ARGS]{", ()),
        ("[TOOL_CALLS]" + "[" * 100_000, "", None, "[TOOL_CALLS]" + "[" * 100_000, ()),
]  # fmt: skip


@pytest.mark.parametrize(("text", "prompt", "reasoning", "content", "calls"), ANSWERS)
def test_parts_of_an_answer(text, prompt, reasoning, content, calls):
    assert parts_of(text, prompt) == (reasoning, content, calls)


def joined(pieces, *arguments):
    """The deltas of an answer in pieces, each kind joined to its neighbours."""
    parser, found = AnswerParser(*arguments), []
    for delta in [one for piece in pieces for one in parser.push(piece)] + parser.flush():
        if found and delta.kind != "call" and found[-1].kind == delta.kind:
            delta = delta._replace(text=found.pop().text + delta.text)
        found.append(delta)
    return found


def cuts(text, seed, two=True):
    """Ways to cut a text: at every character, in two at every place, and at random places."""
    yield list(text)
    yield from ([text[:i], text[i:]] for i in range(len(text) if two else 0))
    draw = random.Random(seed)
    for _ in range(8):
        places = sorted(draw.choices(range(len(text) + 1), k=1 + len(text) // 8))
        yield [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize(("text", "prompt"), [one[:2] for one in ANSWERS if len(one[0]) < 1000])
def test_pieces_have_the_deltas_of_the_whole(text, prompt):
    whole = joined([text], None, prompt)
    assert all(joined(pieces, None, prompt) == whole for pieces in cuts(text, 0))


@pytest.mark.parametrize("prefix", ["", "<|python_tag|>", "I call it: "])
def test_bare_json_is_a_call_only_of_a_function_of_the_request(prefix):
    text = f'{prefix}{{"name": "weather", "parameters": {ARGUMENTS}}}'
    other = text.replace("weather", "stock")
    found = parts_of(text, format="llama3_json", tools=TOOLS)
    assert (
        found.tool_calls == (CALL,)
        and found.content == prefix.replace("<|python_tag|>", "").strip()
    )
    for given, tools in [(text, None), (text, ()), (other, TOOLS)]:
        assert parts_of(given, format="llama3_json", tools=tools) == (None, given, ())


def test_unknown_formats_are_refused_with_the_list():
    with pytest.raises(UserInputError, match=r"'herms' .* hermes, .*mistral"):
        AnswerParser("herms")


# As gpt-oss's: content with channels is refused, and "thinking" is what it calls the reasoning.
HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if '<|channel|>' in m.content %}{{ raise_exception('channels in the content') }}{% endif %}"
    "{% if 'thinking' in m and loop.last and not add_generation_prompt %}{{ m.thinking }}{% endif %}"
    "{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    "{% endfor %}"
)


class Tokenizer:
    special_tokens = {}

    def __init__(self, template):
        self.chat_templates = {"default": template}


def test_the_message_of_an_answer():
    answer = Completion("analysisAdd them.assistantfinalIt is 7.", marked=CHANNELS)
    parts = {"role": "assistant", "content": "It is 7.", "reasoning_content": "Add them."}
    assert answer_message(answer, Tokenizer(HARMONY)) == parts
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    marked = {"role": "assistant", "content": CHANNELS}
    assert answer_message(answer, Tokenizer(plain)) == marked
    assert answer_message(answer, Tokenizer(plain), chat_template=HARMONY) == parts
    assert answer_message(Completion("7"), Tokenizer(plain)) == {
        "role": "assistant",
        "content": "7",
    }
    call = f"<|channel|>commentary to=functions.weather<|message|>{ARGUMENTS}<|call|>"
    found = answer_message(Completion("", marked=call), Tokenizer(HARMONY))
    assert (found["content"], found["tool_calls"][0]["function"]) == ("", CALL)
