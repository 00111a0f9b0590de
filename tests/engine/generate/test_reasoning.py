"""Answers whose parts are marked by special tokens; and the first space of an answer."""

import jax.numpy as jnp
import pytest
import tokenizers

import maxjax
from maxjax.engine.generate.defaults import GenerationDefaults
from maxjax.models import Llama, LlamaConfig
from maxjax.text.tokenizer.tokenizer import Tokenizer

ANSWER = "{% if m.role == 'assistant' %}{{ m.content }}</s>{% else %}[INST]{{ m.content }}[/INST]{% endif %}"
PLAIN = "{% for m in messages %}" + ANSWER + "{% endfor %}"
APART = PLAIN.replace("{{ m.content }}</s>", "{{ m.reasoning_content }}|{{ m.content }}</s>")
CALLS = APART.replace("{{ m.content }}</s>", "{{ m.content }}{{ m.tool_calls|tojson }}</s>")
SPECIAL = ["</s>", "[INST]", "[/INST]", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", "<|x|>"]
WORDS = ["▁the", "▁quick", "▁brown", "▁fox", "▁seven", "▁so", "|", '▁{"a":', "▁1}", "▁add"]
WORDS += ['▁{"name":', '▁"add",', '▁"parameters":', "▁{}}"]


def pair(answer, template=None, *, after="[/INST]"):
    """A model that says the tokens of ``answer``, each of which is in it once, after the token ``after``."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *WORDS])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="|"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Metaspace()
    backend.add_special_tokens(SPECIAL)
    size = len(vocab)
    model = Llama(LlamaConfig(size, size, size, num_hidden_layers=1, num_attention_heads=1))
    head = jnp.zeros((size, size))
    for this, following in zip([after, *answer], [*answer, "</s>"], strict=True):
        head = head.at[vocab[following], vocab[this]].set(1)
    one = lambda name: jnp.ones(size) if "norm" in name else jnp.zeros((size, size))
    values = {name: one(name) for name in model.raw_state_dict()}
    values |= {"model.embed_tokens.weight": jnp.eye(size), "lm_head.weight": head}
    model.load_state_dict(values)
    return model, Tokenizer(
        backend, chat_template=template, special_tokens={"eos_token": "</s>"}, eos_ids=[0]
    )


THOUGHT = ["[THINK]", "▁so", "▁seven", "[/THINK]", "▁the", "▁fox"]


@pytest.mark.parametrize("skip", [True, False])
def test_reasoning_and_content_are_apart(skip):
    model, tokenizer = pair(THOUGHT, APART)
    chat = maxjax.Conversation(model, tokenizer, skip_special_tokens=skip)
    text = "".join(chat.say("the"))
    assert text == ("so seven the fox" if skip else "[THINK] so seven[/THINK] the fox")
    assert (chat.reasoning, chat.content) == ("so seven", "the fox")
    assert chat.messages[-1] == {
        "role": "assistant", "content": "the fox", "reasoning_content": "so seven",
    }  # fmt: skip
    chat.reset()
    assert chat.reasoning is None and chat.completion is None


# Mistral's read reasoning in blocks of the content alone.
BLOCKS = PLAIN.replace(
    "{{ m.content }}</s>",
    "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0]['thinking'] }}{% endif %}</s>",
)


@pytest.mark.parametrize("template", [PLAIN, BLOCKS])
def test_content_keeps_its_marks_if_the_template_reads_no_reasoning(template):
    """So the next prompt begins with the tokens that were generated."""
    model, tokenizer = pair(THOUGHT, template)
    chat = maxjax.Conversation(model, tokenizer)
    first = chat.say("the")
    list(first)
    assert chat.messages[-1]["content"] == "[THINK] so seven[/THINK] the fox"
    second = chat.say("fox").completion.prompt_tokens
    read = [*first.completion.prompt_tokens, *first.completion.tokens]
    assert list(second[: len(read)]) == read


@pytest.mark.parametrize("template", [PLAIN, APART, CALLS])
def test_calls_of_functions(template):
    model, tokenizer = pair(["▁so", "[TOOL_CALLS]", "▁add", "[ARGS]", '▁{"a":', "▁1}"], template)
    chat = maxjax.Conversation(model, tokenizer)
    list(chat.say("the"))
    call = {"name": "add", "arguments": {"a": 1}}
    assert chat.completion.tool_calls == (call,) and chat.content == "so"
    answer = {"role": "assistant", "content": 'so[TOOL_CALLS] add[ARGS] {"a": 1}'}
    if template is CALLS:
        listed = [{"id": "call00000", "type": "function", "function": call}]
        answer = {"role": "assistant", "content": "so", "tool_calls": listed}
    assert chat.messages[-1] == answer
    list(chat.say({"role": "tool", "content": "seven"}))
    assert [m["role"] for m in chat.messages] == ["user", "assistant", "tool", "assistant"]


# Its signs are those of Llama 3, whose calls have no marks around them.
BARE = PLAIN + """{% if tools %}"parameters": <|start_header_id|>{% endif %}"""


def test_calls_without_marks_are_found_by_the_format_of_the_template():
    words = ['▁{"name":', '▁"add",', '▁"parameters":', "▁{}}"]
    model, tokenizer = pair(words, BARE, after="|")  # the unknown token, which ends the template
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    options = {"template_kwargs": {"tools": tools}}
    found = maxjax.generate(model, tokenizer, "the", **options)
    assert found == '{"name": "add", "parameters": {}}' and found.format == "llama3_json"
    assert found.tool_calls == ({"name": "add", "arguments": {}},) and found.content == ""
    chat = maxjax.Conversation(model, tokenizer, **options)
    list(chat.say("the"))
    assert chat.completion.tool_calls == found.tool_calls
    with maxjax.Engine(model, tokenizer, slots=1) as engine:
        first = engine.submit("the", **options)
        again = engine.submit(first.prompt, **options)
        assert first.prompt.text == found.prompt and first.prompt.ids == [*found.prompt_tokens]
        assert [one.result().tool_calls for one in (first, again)] == [found.tool_calls] * 2
    plain = maxjax.generate(model, tokenizer, found.prompt_tokens)
    assert (
        plain.strip() == found and plain.tool_calls == ()
    )  # nobody has said that there are functions


@pytest.mark.parametrize("skip", [True, False])
def test_tokens_of_reasoning_are_counted_with_its_marks(skip):
    model, tokenizer = pair(THOUGHT, APART)
    options = {"skip_special_tokens": skip}
    found = maxjax.generate(model, tokenizer, "the", **options)
    assert "".join(found.token_texts) == found.marked and len(found.token_texts) == 7
    assert found.reasoning_tokens == 4
    cut = maxjax.generate(model, tokenizer, "the", max_new_tokens=2, **options)
    assert (cut.reasoning, cut.reasoning_tokens) == ("so", 2)
    without = maxjax.generate(*pair(["▁the", "▁fox"], APART), "the", **options)
    assert without.reasoning_tokens == 0


@pytest.mark.parametrize("skip", [True, False])
def test_a_stop_string_ends_the_content_too(skip):
    model, tokenizer = pair(THOUGHT, APART)
    options = {"stop": " fox", "skip_special_tokens": skip}
    found = maxjax.generate(model, tokenizer, "the", **options)
    assert (found.reasoning, found.content) == ("so seven", "the")
    found = maxjax.generate(model, tokenizer, "the", **options | {"stop": "seven"})
    assert (found.reasoning, found.content) == ("so", "")


def test_special_tokens_have_text_if_asked_for():
    model, tokenizer = pair(["▁the", "<|x|>", "▁fox"], PLAIN)
    assert maxjax.generate(model, tokenizer, "the") == "the fox"
    shown = maxjax.stream(model, tokenizer, "the", skip_special_tokens=False)
    assert "".join(shown) == "the<|x|> fox"
    assert shown.completion.marked == "the fox"  # no mark of a part


def test_the_end_token_of_the_tokenizer_ends_a_chat():
    """A model tuned for chats whose generation_config.json is that of its base model."""
    model, tokenizer = pair(["▁the", "|", "▁fox"], PLAIN)
    model.generation = GenerationDefaults(eos_ids=(0,))
    tokenizer.eos_ids = (tokenizer.encode("|")[0],)
    assert maxjax.generate(model, tokenizer, "the").tokens[1:] == tokenizer.eos_ids
    chat = maxjax.Conversation(model, tokenizer)
    assert "".join(chat.say("the")) == "the"
    raw = maxjax.generate(model, tokenizer, "[INST]the[/INST]", chat=False)
    assert raw.stop == 0 and len(raw.tokens) == 4
    assert len(maxjax.generate(model, tokenizer, "the", eos_ids=0).tokens) == 4


# --- the first space ----------------------------------------------------------------------


def test_the_first_space_of_a_continued_text():
    model, tokenizer = pair(["▁fox"], PLAIN, after="▁brown")
    raw = maxjax.generate(model, tokenizer, "the quick brown", chat=False)
    assert raw == " fox" and raw.prompt + raw == tokenizer.decode([*raw.prompt_tokens, *raw.tokens])
    ids = maxjax.generate(model, tokenizer, tokenizer.encode("the quick brown"))
    assert ids == " fox"
    answers = pair(["▁fox"], PLAIN)
    assert maxjax.generate(*answers, "the quick brown") == "fox"


def test_the_first_space_of_a_continued_message():
    model, tokenizer = pair(["▁fox"], PLAIN, after="▁brown")
    messages = [{"role": "user", "content": "so"}, {"role": "assistant", "content": "the brown"}]
    options = {"template_kwargs": {"continue_final_message": True}}
    assert maxjax.generate(model, tokenizer, messages, **options) == " fox"
