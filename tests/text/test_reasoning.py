"""Answers taken apart: reasoning, content and calls of functions, in the forms that models write."""

import pytest

from maxjax.engine.generate.completion import Completion
from maxjax.text.chat import answer_message
from maxjax.text.reasoning import parts_of

CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
ARGUMENTS = '{"city": "Oslo"}'
CHANNELS = (
    "<|channel|>analysis<|message|>Add them.<|end|><|start|>assistant"
    "<|channel|>final<|message|>It is 7."
)


@pytest.mark.parametrize(
    ("text", "prompt", "reasoning", "content", "calls"),
    [
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
    ],
)  # fmt: skip
def test_parts_of_an_answer(text, prompt, reasoning, content, calls):
    assert parts_of(text, prompt) == (reasoning, content, calls)


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
