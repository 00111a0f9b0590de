"""Recorded answers in every format of calls: whole, and cut at every character and at random places.

``answers/`` has 50 of each; the first line of a file says which models write them and who has read them.
"""

import json
import random
import time
from pathlib import Path

import pytest

from maxjax.text.chat import answer_format
from maxjax.text.formats import FORMATS, MARKS, format_named
from maxjax.text.reasoning import AnswerParser, parts_of
from tests.text.test_reasoning import cuts, joined

FOLDER = Path(__file__).parent / "answers"
TOOLS = json.loads((FOLDER / "tools.json").read_text())
FILES = {path.stem: path.read_text().splitlines() for path in sorted(FOLDER.glob("*.jsonl"))}
HEADS = {name: json.loads(lines[0]) for name, lines in FILES.items()}


def records(name):
    return [json.loads(line) for line in FILES[name][1:]]


@pytest.mark.parametrize("name", FILES)
def test_recorded_answers_have_their_calls_and_content(name):
    assert len(records(name)) == 50
    for record in records(name):
        found = parts_of(record["text"], "", HEADS[name]["format"], TOOLS)
        assert [[one["name"], one["arguments"]] for one in found.tool_calls] == record["calls"], (
            record
        )
        if "content" in record:  # without the whitespace around calls
            assert found.content.split() == record["content"].split()


@pytest.mark.parametrize("name", FILES)
def test_recorded_answers_in_pieces_have_the_deltas_of_the_whole(name):
    arguments = HEADS[name]["format"], "", TOOLS
    for i, record in enumerate(records(name)):
        whole = joined([record["text"]], *arguments)
        for pieces in cuts(record["text"], seed=i, two=False):
            assert joined(pieces, *arguments) == whole


@pytest.mark.parametrize("name", FILES)
def test_formats_with_marks_are_read_without_their_name(name):
    """Values without quotes get no types from schemas then: only calls whose values have them are compared."""
    if HEADS[name]["format"] in ("llama3_json", "llama4_pythonic"):
        return
    for record in records(name):
        found = parts_of(record["text"])
        assert [one["name"] for one in found.tool_calls] == [one[0] for one in record["calls"]], (
            record
        )


@pytest.mark.parametrize(
    ("name", "ids"),
    [("mistral_id", ["abcdefgh0", "abcdefgh1", "abcdefgh2"]), ("mistral_old", ["abcdefgh0", "abcdefgh1", "abcdefgh2"]),
     ("kimi_k2", ["functions.math.add:0", "functions.math.add:1", "functions.now:2"]),
     ("cohere_command3", [None] * 3), ("hermes", [None] * 3)],
)  # fmt: skip
def test_ids_that_formats_write_are_those_of_the_calls(name, ids):
    (record,) = [one for one in records(name) if len(one["calls"]) == 3]
    found = joined([record["text"]], HEADS[name]["format"], "", TOOLS)
    assert [(one.index, one.id) for one in found if one.kind == "call"] == [*enumerate(ids)]


def test_every_format_has_recorded_answers():
    names = {head["format"] for head in HEADS.values()}
    # Those without any are written as others are: the syntaxes are the same.
    tested = {syntax for one in FORMATS if names & {*one.names} for syntax in one.syntaxes}
    assert all({*one.syntaxes} <= tested for one in FORMATS)


# Parts of the chat templates of these models that write calls.
TEMPLATES = {
    "Qwen 2.5": ("hermes", """{{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}"""),
    "Qwen3-Coder": (
        "qwen3_coder",
        """{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}""",
    ),
    "GLM-4.6": (
        "glm45",
        "\n<tool_call>' + tc.name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}",
    ),
    "Llama 3.1": (
        "llama3_json",
        """'<|start_header_id|>assistant<|end_header_id|>' '{"name": "' + tool_call.name + '", ' '"parameters": '""",
    ),
    "Llama 4": (
        "llama4_json",
        """'<|header_start|>assistant<|header_end|>' '{"name": "' + tool_call.name + '", ' '"parameters": '""",
    ),
    "Mistral": ("mistral", "'[TOOL_CALLS]' + tool_call.function.name + '[ARGS]'"),
    "DeepSeek R1": (
        "deepseek_v3",
        "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'",
    ),
    "DeepSeek V3.2": ("deepseek_v32", "set dsml_token = '｜DSML｜'"),
    "gpt-oss": (
        "openai",
        '"<|start|>assistant<|channel|>analysis<|message|>" + message.content + "<|end|>"',
    ),
    "Kimi K2": (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
    ),
    "Granite 3": (
        "granite",
        "respond only with <|tool_call|> followed by a JSON list of tools used.",
    ),
    "Command R7B": (
        "cohere_command3",
        '<|START_ACTION|>[\n{"tool_call_id": "0", "parameters": {}}]<|END_ACTION|>',
    ),
    "Gemma 4": (
        "gemma4",
        """{{- '<|tool_call>call:' + name + '{' -}} {{- '<|"|>' + argument + '<|"|>' -}}""",
    ),
    "MiniMax M2": ("minimax_m2", "set toolcall_begin_token = '<minimax:tool_call>'"),
    "Seed-OSS": ("seed_oss", '{{ "\\n<seed:tool_call>\\n<function=" + name + ">\\n" }}'),
    "Nemotron Nano 2": ("nemotron_json", "{{- '<TOOLCALL>[' -}}"),
    "Phi-4-mini": ("phi4_mini_json", "'<|tool|>' + message['tools'] + '<|/tool|>'"),
    "no calls": (None, "{{ message.content }} <think>"),
}


class Tokenizer:
    def __init__(self, template, tokens=()):
        self.chat_templates = {} if template is None else {"default": template}
        self.special_tokens, self.special_ids = {}, dict.fromkeys(tokens, 0)


@pytest.mark.parametrize("model", TEMPLATES)
def test_the_template_tells_the_format(model):
    name, template = TEMPLATES[model]
    assert answer_format(Tokenizer(template)) == name
    assert name is None or format_named(name).names[0] == name


def test_without_a_template_the_special_tokens_tell_the_format():
    tokens = ["<s>", "[INST]", "[TOOL_CALLS]", "[ARGS]"]
    assert answer_format(Tokenizer(None, tokens)) == "mistral"
    assert answer_format(Tokenizer("{{ messages[0].content }}", tokens)) == "mistral"
    assert answer_format(Tokenizer(None, ["<s>"])) is None
    assert {"<tool_call>", "<|python_tag|>", "[ARGS]", "<｜tool▁sep｜>", '<|"|>'} <= MARKS


CITY = {"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}
XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("name", "prompt", "text", "parts"),
    [
        # reasoning before calls, and ended by one
        ("qwen3_coder", "", f"<think>\nhm\n</think>\n\nLook.\n\n{XML}", ("hm", "Look.", (CITY,))),
        ("qwen3_coder", "<think>\n", f"hm\n{XML}", ("hm", "", (CITY,))),
        ("qwen3_coder", "<think>\n", "a <tool_call> is XML</think>7", ("a <tool_call> is XML", "7", ())),
        ("qwen3_coder", "<think>\n", f"hm {XML.replace('get_weather', 'f')}</think>7",
         (f"hm {XML.replace('get_weather', 'f')}", "7", ())),  # a call that it only thinks of
        ("kimi_k2", "<think>", "hm<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0"
         "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
         ("hm", "", ({"name": "now", "arguments": {}},))),
        ("kimi_k2", "<think>", "hm<|tool_calls_section_begin|> no", ("hm<|tool_calls_section_begin|> no", "", ())),
        ("granite", "", "Here's my thought process:\nhm\nHere's my response:\n7", ("hm", "7", ())),
        ("granite", "", "<think>hm</think>\n<response>7</response>", ("hm", "7", ())),
        ("granite", "", "<response>7</response>", (None, "<response>7</response>", ())),
        ("cohere_command3", "<|START_THINKING|>", "hm<|END_THINKING|><|START_TEXT|>7<|END_TEXT|>", ("hm", "7", ())),
        ("hunyuan_a13b", "", "<think>\nhm\n</think>\n<answer>\n7\n</answer>", ("hm", "7", ())),
        ("openai", "<|start|>assistant<|channel|>analysis<|message|>", "hm<|end|><|start|>assistant<|channel|>final"
         "<|message|>7", ("hm", "7", ())),
        ("openai", "<|start|>assistant<|channel|>commentary to=functions.now", "<|message|>{}<|call|>",
         (None, "", ({"name": "now", "arguments": {}},))),
        ("openai", "", "to=functions.now is how it calls", (None, "to=functions.now is how it calls", ())),
        ("llama3_json", "", '<|python_tag|>brave_search.call(query="(a")',
         (None, "", ({"name": "brave_search", "arguments": {"query": "(a"}},))),
        ("llama3_json", "", '<|python_tag|>print(1)', (None, "<|python_tag|>print(1)", ())),
        ("llama3_json", "", '<|python_tag|>{"name": "now", "parameters": {}}',
         (None, "", ({"name": "now", "arguments": {}},))),
        ("functionary", "", '<function=now>{"a": 1}</function>', (None, "", ({"name": "now", "arguments": {"a": 1}},))),
        # without the marks around it, without the end of a value, with blanks that are not there in templates
        ("qwen3_coder", "", XML.removeprefix("<tool_call>\n"), (None, "", (CITY,))),
        ("qwen3_coder", "", XML.replace("</parameter>\n</function>", "</function>"), (None, "", (CITY,))),
        ("qwen3_coder", "", XML.replace("\n</parameter>\n<", "\n<", 1), (None, "", (CITY,))),
        ("hermes", "", '<tool_call>{"name": "now"}', (None, "", ({"name": "now", "arguments": {}},))),
        ("hermes", "", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>',
         (None, "", ({"name": "now", "arguments": {}},))),
        # no calls
        ("hermes", "", "The <tool_call> mark.", (None, "The <tool_call> mark.", ())),
        ("hermes", "", '<tool_call>{"a": 1}</tool_call> no', (None, '<tool_call>{"a": 1}</tool_call> no', ())),
        ("hermes", "", '<tool_call>{"name": "now", "arguments": {"a": 1e999}}</tool_call>',
         (None, '<tool_call>{"name": "now", "arguments": {"a": 1e999}}</tool_call>', ())),
        ("hermes", "", '<tool_call>{"name": "now", "arguments": {"a": 1}</tool_call>\n'
         '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
         (None, '<tool_call>{"name": "now", "arguments": {"a": 1}</tool_call>', ({"name": "now", "arguments": {}},))),
        ("llama4_pythonic", "", "[a](b) and [now()]", (None, "[a](b) and", ({"name": "now", "arguments": {}},))),
        ("llama4_pythonic", "", "[now(1)]", (None, "[now(1)]", ())),
        ("llama4_pythonic", "", "[now(**{})]", (None, "[now(**{})]", ())),
        ("lfm2", "", "<|tool_call_start|>[open('a')]<|tool_call_end|>",
         (None, "<|tool_call_start|>[open('a')]<|tool_call_end|>", ())),
    ],
)  # fmt: skip
def test_parts_of_answers_as_models_also_write_them(name, prompt, text, parts):
    whole = joined([text], name, prompt, TOOLS)
    assert parts_of(text, prompt, name, TOOLS) == parts
    assert all(joined(pieces, name, prompt, TOOLS) == whole for pieces in cuts(text, 0))


QUOTED = {
    "hermes": '<tool_call>\n{"name": "write_file", "arguments": {"content": %s}}\n</tool_call>',
    "mistral": '[TOOL_CALLS]write_file[ARGS]{"content": %s}',
    "kimi_k2": "<|tool_call_begin|>functions.write_file:0<|tool_call_argument_begin|>"
    '{"content": %s}<|tool_call_end|>',
    "deepseek_v31": '<｜tool▁call▁begin｜>write_file<｜tool▁sep｜>{"content": %s}<｜tool▁call▁end｜>',
    "llama3_json": '{"name": "write_file", "parameters": {"content": %s}}',
    "qwen3_coder": "<tool_call>\n<function=write_file>\n<parameter=content>\n%s\n</parameter>\n</function>\n"
    "</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="write_file">\n<parameter name="content">%s</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    "glm45": "<tool_call>write_file\n<arg_key>content</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
    "gemma4": '<|tool_call>call:write_file{content:<|"|>%s<|"|>}<tool_call|>',
    "lfm2": "<|tool_call_start|>[write_file(content=%s)]<|tool_call_end|>",
}


@pytest.mark.parametrize("name", QUOTED)
def test_marks_in_arguments_end_no_call(name):
    """A file about tool calls is written: its text has every mark that may be in it."""
    marks = "</tool_call> </function> <tool_call> [TOOL_CALLS] <tool_call|> </arg_value> </parameter> }] <think>"
    marks += " <|tool_call_end|> <｜tool▁call▁end｜> </invoke> {"
    write = {"qwen3_coder": str, "minimax_m2": str, "glm45": str, "gemma4": str, "lfm2": repr}
    written = QUOTED[name] % write.get(name, json.dumps)(marks)
    expected = ({"name": "write_file", "arguments": {"content": marks}},)
    whole = joined([written], name, "", TOOLS)
    assert parts_of(written, "", name, TOOLS) == (None, "", expected)
    assert all(joined(pieces, name, "", TOOLS) == whole for pieces in cuts(written, 0))


REPEATED = [
    "<tool_call>", '<tool_call>{"', '<tool_call>"', "</tool_call>", "[", "{", "[now(", "\n", '\\"', "<|channel|>",
    '{"name": "now", "parameters": {', "<function=", "<function=now><parameter=a></function>",
    "<function=now><parameter=a>", "<function=write_file><parameter=path><parameter=content></parameter></function>",
    "<|tool_call>call:", '<|tool_call>call:f{<|"|><tool_call|>', "<|tool_call_start|>['<|tool_call_end|>",
    "<tool_call>a<arg_key>", "<tool_call>a<arg_key>b</arg_key><arg_value></tool_call>",
]  # fmt: skip


@pytest.mark.parametrize("text", REPEATED)
def test_long_answers_that_are_no_calls_cost_little(text):
    long = text * (20_000 // len(text))
    for name in (
        "hermes",
        "qwen3_coder",
        "glm45",
        "gemma4",
        "lfm2",
        "llama3_json",
        "llama4_pythonic",
        "openai",
        None,
    ):
        began = time.process_time()
        parser = AnswerParser(name, "", TOOLS)
        found = [one for i in range(0, len(long), 100) for one in parser.push(long[i : i + 100])]
        found += parser.flush()
        assert time.process_time() - began < 2
        if all(one.kind == "content" for one in found) and text != "<|channel|>":
            assert "".join(one.text for one in found) == long


FRAGMENTS = """now get_weather now() [now()] call:now call: function functions.now:0 to=functions.now true 1
a { } [ ] ( ) " ' \\ : , = ; {} < > <| |> </ "> é commentary analysis final assistant <think> </think>
<parameter=path> </parameter>
<parameter=content> </invoke> ``` ```json ◁think▷""".split()
FRAGMENTS += [
    " ",
    "\n",
    '{"name": "now", "arguments": {}}',
    '{"name": "now"',
    '"parameters": {}',
    " to=functions.",
]


@pytest.mark.parametrize("name", [*(one.names[0] for one in FORMATS), None])
def test_pieces_of_random_texts_have_the_deltas_of_the_whole_and_nothing_is_lost(name):
    draw, marks = random.Random(str(name)), sorted(MARKS)
    own = [mark for mark in (*marks_of(format_named(name)), *draw.sample(marks, 4)) if mark] + [
        "<think>"
    ]
    for i in range(40):
        text = "".join(
            draw.choice(own if draw.random() < 0.5 else FRAGMENTS)
            for _ in range(draw.randint(1, 25))
        )
        arguments = name, draw.choice(["", "<think>"]), draw.choice([TOOLS, None, ()])
        whole = joined([text], *arguments)
        assert all(joined(pieces, *arguments) == whole for pieces in cuts(text, i, two=False)), text
        is_plain = all(one.kind == "content" for one in whole) and not name == "openai"
        if is_plain and not any(
            mark in text
            for mark in ("<|channel|>", "<|start|>", "<|message|>", "_RESPONSE|>", "_TEXT|>")
        ):
            assert "".join(one.text for one in whole) == text


def marks_of(one):
    yield from (
        mark for syntax in one.syntaxes for mark in (syntax.opening, getattr(syntax, "closing", ""))
    )
    yield from (mark for pair in one.around for mark in pair)
    yield from one.inside
    yield from ("<|channel|>", "<|message|>", "<|end|>", "<|start|>") if one.is_channels else ()
