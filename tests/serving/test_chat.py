"""/v1/chat/completions: the answers are the engine's, in the form of OpenAI's API."""

import base64
import io
import json

import msgspec
import pytest
from starlette.testclient import TestClient

import maxjax
from maxjax.serving.app import app
from maxjax.serving.fields import REFUSED, WITHOUT_EFFECT, ChatRequest
from tests.engine.test_pictures import asked, picture, write_model
from tests.serving.conftest import QUESTION, ask, events, server_of

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


def test_an_answer_is_that_of_the_engine(client, engine):
    expected = engine.submit(QUESTION, max_new_tokens=5).result()
    found = ask(client, max_tokens=5).json()
    (choice,) = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": str(expected), "refusal": None}
    assert choice["finish_reason"] == "length" and choice["index"] == 0
    count = len(expected.prompt_tokens)
    assert found["usage"] == {
        "prompt_tokens": count, "completion_tokens": 5, "total_tokens": count + 5,
        "prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip


def test_pieces_of_a_stream_are_the_answer(client):
    response = ask(
        client, stream=True, stream_options={"include_usage": True}, n=2, seed=1, temperature=1.0
    )
    *chunks, last, end = events(response)
    assert end == "[DONE]" and response.headers["content-type"].startswith("text/event-stream")
    chunks, last = [json.loads(one) for one in chunks], json.loads(last)
    whole = ask(client, n=2, seed=1, temperature=1.0).json()
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    for i, choice in enumerate(whole["choices"]):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == i]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"]
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_usage_has_the_tokens_that_were_cached_and_those_of_the_reasoning(tiny):
    """A prompt counts once: what the second answer finds is what the first one has read."""
    text = [{"role": "user", "content": " ".join(f"What is {i} + 3?" for i in range(8))}]
    with maxjax.Engine(*tiny, slots=2) as engine:
        client = TestClient(app(engine, name="tiny"))
        fields = {"messages": text, "n": 2, "max_tokens": 4}
        first, again = (ask(client, **fields).json()["usage"] for _ in range(2))
        stats = engine.stats()
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    cached = again["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < again["prompt_tokens"] and stats.found_tokens == 3 * cached
    assert again["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "prompt", "count"),
    [("<think>Hm.</think>The sum of both is five.", "", 1), ("2 + 3 is 5.</think>5", "<think>", 2),
     ("<think>2 + 3 is 5. That is all.</think>5", "", 2), ("5", "", 0), ("<think></think>5", "", 0)],
)  # fmt: skip
def test_tokens_of_reasoning(given, text, prompt, count, stream):
    """The answer has two tokens, each half of it."""
    client, _ = given(text, prompt=prompt)
    found = ask(
        client, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {})
    )
    usage = json.loads(events(found)[-2])["usage"] if stream else found.json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": count}
    body = {"model": "tiny", "input": "What is 2 + 3?", "stream": stream}
    found = client.post("/v1/responses", json=body)
    whole = json.loads(events(found)[-1])["response"] if stream else found.json()
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": count}
    assert whole["usage"]["input_tokens_details"] == {"cached_tokens": 1}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_prompt_with_several_answers_is_read_once(given, path):
    client, engine = given()
    fields = {} if path.endswith("chat/completions") else {"prompt": ["a", "b"]}
    assert ask(client, path, n=3, **fields).status_code == 200
    prompts = [prompt for prompt, _ in engine.asked]
    given_as = [QUESTION] if not fields else ["a", "b"]
    assert prompts == [one for first in given_as for one in (first, *[" as it was read"] * 2)]


def test_the_same_seed_gives_the_same_answer_and_another_one_another(client):
    texts = [
        ask(client, seed=seed, temperature=20.0, max_tokens=12).json()["choices"][0]["message"][
            "content"
        ]
        for seed in (5, 5, 6)
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_each_token(client, stream):
    response = ask(client, logprobs=True, top_logprobs=2, max_tokens=5, stream=stream)
    if stream:
        chunks = [json.loads(one)["choices"] for one in events(response)[:-1]]
        parts = [c["logprobs"]["content"] for (c,) in chunks if c["logprobs"]]
        content = [one for part in parts for one in part]
    else:
        content = response.json()["choices"][0]["logprobs"]["content"]
    assert "".join(one["token"] for one in content) == "2 + 3 ="
    for one in content:
        assert bytes(one["bytes"]).decode() == one["token"] and one["logprob"] <= 0
        assert [two["logprob"] for two in one["top_logprobs"]][0] == one["logprob"]
        assert len(one["top_logprobs"]) == 2


def test_an_answer_matches_a_schema(client):
    schema = {"enum": [{"sum": 5}]}
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema, "strict": True}}
    found = ask(client, response_format=form).json()["choices"][0]
    assert (
        json.loads(found["message"]["content"]) == {"sum": 5} and found["finish_reason"] == "stop"
    )


def test_one_of_several_texts_is_chosen(client):
    choice = ['a "quoted" text', "another"]
    found = ask(client, structured_outputs={"choice": choice}).json()["choices"][0]["message"][
        "content"
    ]
    assert found in choice


def test_a_forced_call_has_the_arguments_of_the_function(client):
    choice = {"type": "function", "function": {"name": "yes"}}
    function = {"name": "yes", "parameters": {"enum": [{"it": True}]}}
    found = ask(
        client, tools=[{"type": "function", "function": function}], tool_choice=choice
    ).json()
    (choice,) = found["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "yes" and json.loads(call["function"]["arguments"]) == {
        "it": True
    }
    assert choice["message"]["content"] is None and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("text", ["Wait. " + CALL, CALL + "\n" + CALL])
def test_calls_of_functions_whole_and_streamed(given, text, size):
    client, engine = given(f"<think>So.</think>{text}", format="hermes", size=size)
    (choice,) = ask(client, tools=[ADD]).json()["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["reasoning_content"] == "So."
    assert message["content"] == ("Wait." if text.startswith("Wait") else None)
    calls = message["tool_calls"]
    assert len(calls) == text.count("<tool_call>") == len({call["id"] for call in calls})
    for call in calls:
        assert call["function"]["name"] == "add"
        assert json.loads(call["function"]["arguments"]) == {"a": 2, "b": 3}
    assert engine.asked[0][1]["template_kwargs"]["tools"] == [ADD]

    deltas = [
        json.loads(one)["choices"][0] for one in events(ask(client, tools=[ADD], stream=True))[:-1]
    ]
    told = [call for one in deltas for call in one["delta"].get("tool_calls", ())]
    assert [call["index"] for call in told] == list(range(len(calls)))
    assert [call["function"] for call in told] == [call["function"] for call in calls]
    thought = "".join(one["delta"].get("reasoning_content", "") for one in deltas)
    assert (thought, deltas[-1]["finish_reason"]) == ("So.", "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_where_calls_are_not_parallel(given, stream):
    client, _ = given(CALL + CALL, format="hermes")
    response = ask(client, tools=[ADD], parallel_tool_calls=False, stream=stream)
    if stream:
        deltas = [json.loads(one)["choices"][0]["delta"] for one in events(response)[:-1]]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    else:
        calls = response.json()["choices"][0]["message"]["tool_calls"]
    assert len(calls) == 1


def test_answers_that_openais_client_has_parsed_are_taken_back(given):
    client, engine = given()
    function = {"name": "add", "arguments": "{}", "parsed_arguments": {}}
    call = {"id": "c", "type": "function", "index": 0, "function": function}
    messages = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call], "parsed": {"a": 1}},
                {"role": "tool", "tool_call_id": "c", "content": "5"}]  # fmt: skip
    assert ask(client, messages=messages).status_code == 200
    (sent,) = engine.asked[0][0][1]["tool_calls"]
    assert sent == {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def test_an_answer_that_must_match_a_schema_is_content_also_where_the_prompt_opens_reasoning(given):
    client, _ = given('{"sum": 5}', format="hermes", prompt="<think>\n")
    message = ask(client).json()["choices"][0]["message"]
    assert message["reasoning_content"] == '{"sum": 5}'
    message = ask(client, response_format={"type": "json_object"}).json()["choices"][0]["message"]
    assert message["content"] == '{"sum": 5}'


def test_without_tools_nothing_is_a_call(given):
    client, _ = given(CALL, format="hermes")
    for fields in ({}, {"tools": [ADD], "tool_choice": "none"}):
        (choice,) = ask(client, **fields).json()["choices"]
        assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"


def test_messages_with_parts_calls_and_results_reach_the_template(given):
    client, engine = given()
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call],
            "refusal": None,
            "annotations": [],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    assert ask(client, messages=messages).status_code == 200
    assert engine.asked[0][0] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]


SETTINGS = {
    "max_tokens": (7, "max_new_tokens", 7),
    "max_completion_tokens": (8, "max_new_tokens", 8),
    "temperature": (0.5, "temperature", 0.5),
    "top_p": (0.5, "top_p", 0.5),
    "top_k": (-1, "top_k", 0),
    "min_p": (0.5, "min_p", 0.5),
    "typical_p": (0.5, "typical_p", 0.5),
    "repetition_penalty": (1.5, "repetition_penalty", 1.5),
    "presence_penalty": (1, "presence_penalty", 1),
    "frequency_penalty": (1, "frequency_penalty", 1),
    "logit_bias": ({"5": -100}, "logit_bias", {5: -100}),
    "stop": (["a", "b"], "stop", ["a", "b"]),
    "min_tokens": (3, "min_new_tokens", 3),
    "ignore_eos": (True, "eos_ids", ()),
    "skip_special_tokens": (False, "skip_special_tokens", False),
    "cache_salt": ("s", "salt", "\0s"),
    "priority": (3, "priority", 3),
    "chat_template_kwargs": ({"enable_thinking": False}, "template_kwargs", {"enable_thinking": False}),
    "continue_final_message": (True, "template_kwargs", {"continue_final_message": True}),
    "add_generation_prompt": (False, "template_kwargs", {"add_generation_prompt": False}),
    "model": ("small", "adapter", "small"),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_a_field_becomes_an_argument_of_the_engine(given, name):
    value, argument, expected = SETTINGS[name]
    client, engine = given()
    assert ask(client, **{name: value}).status_code == 200
    assert engine.asked[0][1][argument] == expected


def test_every_field_is_tested():
    """A field that is neither an argument of the engine nor tested by name would be ignored unseen."""
    others = {
        "messages", "reasoning_effort", "n", "stream", "stream_options", "seed", "stop_token_ids",
        "structured_outputs", "logprobs", "top_logprobs", "response_format", "tools", "tool_choice",
        "parallel_tool_calls",
    }  # fmt: skip
    assert {one.name for one in msgspec.structs.fields(ChatRequest)} == {*SETTINGS, *others}


def test_reasoning_effort_is_for_templates_that_read_it(given):
    client, engine = given()
    response = ask(client, reasoning_effort="low")
    assert response.status_code == 400 and response.json()["error"]["param"] == "reasoning_effort"
    server_of(client).template_reads = lambda name: name == "reasoning_effort"
    assert ask(client, reasoning_effort="low").status_code == 200
    assert engine.asked[0][1]["template_kwargs"] == {"reasoning_effort": "low"}


@pytest.mark.parametrize("name", ["chat_template", "tools", "documents"])
def test_the_template_itself_is_not_a_variable_of_it(given, name):
    client, engine = given()
    response = ask(client, chat_template_kwargs={name: "{{ 1 }}"})
    assert response.status_code == 400 and name in response.json()["error"]["message"]
    assert not engine.asked


def test_tokens_that_stop_are_added_to_those_of_the_model(given):
    client, engine = given()
    ask(client)
    ask(client, stop_token_ids=[5])
    assert "eos_ids" not in engine.asked[0][1]
    assert engine.asked[1][1]["eos_ids"][-1] == 5 and len(engine.asked[1][1]["eos_ids"]) > 1


# --- fields that are refused ---------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_field_that_is_not_supported_is_refused_by_name(given, name):
    client, engine = given()
    response = ask(client, **{name: "x"})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (
        400,
        name,
        "unsupported_parameter",
    )
    assert name in error["message"] and not engine.asked
    for absent in (None, [], {}):
        assert ask(client, **{name: absent}).status_code == 200


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_a_field_without_effect_takes_its_default_alone(given, name):
    client, _ = given()
    accepted = WITHOUT_EFFECT[name]
    values = accepted if isinstance(accepted, tuple) else ("anything", {"a": 1})
    for value in (*values, None):
        assert ask(client, **{name: value}).status_code == 200
    if isinstance(accepted, tuple):
        response = ask(client, **{name: "another"})
        assert response.status_code == 400 and response.json()["error"]["param"] == name


INVALID = {
    "unknown field": ({"foo": 1}, "foo"),
    "field of a message": ({"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages[0].x"),
    "role": ({"messages": [{"role": "boss", "content": "a"}]}, "messages[0].role"),
    "no messages": ({"messages": []}, "messages"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "picture": ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
                "messages[0].content[0].image_url"),
    "part without text": ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    "type": ({"temperature": "hot"}, "temperature"),
    "no tokens": ({"max_tokens": 0}, "max_tokens"),
    "number of answers": ({"n": 0}, "n"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs"),
    "tool": ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    "tool_choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "tool_choice of another": ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "x"}}},
                               "tool_choice"),
    "two structures": ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    "many ends": ({"stop_token_ids": list(range(40))}, "stop_token_ids"),
    "ends and a structure": ({"stop_token_ids": [1], "structured_outputs": {"regex": "a"}}, "stop_token_ids"),
    "many stops": ({"stop": ["a"] * 17}, "stop"),
    "format and tools": ({"tools": [ADD], "response_format": {"type": "json_object"}}, "response_format"),
    "options without a stream": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format"),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_field_is_named(given, case):
    fields, param = INVALID[case]
    client, engine = given()
    response = ask(client, **fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == param
    assert not engine.asked


def test_what_the_engine_refuses_is_an_error_of_the_request(client):
    for fields in (
        {"temperature": -1},
        {"logit_bias": {"99999": 1}},
        {"structured_outputs": {"regex": "("}},
    ):
        response = ask(client, **fields)
        assert response.status_code == 400, response.text
    long = ask(client, messages=[{"role": "user", "content": "a" * 3000}])
    assert long.status_code == 400 and "256" in long.json()["error"]["message"]
    assert ask(client, model="other").json()["error"]["code"] == "model_not_found"


def test_pictures_come_with_the_request(tmp_path, client):
    """They are data: addresses; the answer is the engine's, and a model of text alone refuses them."""
    image = pytest.importorskip("PIL.Image").fromarray(picture())
    data = io.BytesIO()
    image.save(data, "png")
    url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
    text = {"type": "text", "text": "w1 w2"}
    content = [{"type": "image_url", "image_url": {"url": url}}, text]
    body = {
        "model": "llava",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 4,
        "temperature": 0,
    }
    model, tokenizer = maxjax.load(write_model(tmp_path))
    with maxjax.Engine(model, tokenizer, slots=2) as engine:
        seeing = TestClient(app(engine, name="llava"))
        found = seeing.post("/v1/chat/completions", json=body).json()
        assert "error" not in found, found
        assert found["usage"]["prompt_tokens"] == 18
        expected = engine.submit(asked(picture()), max_new_tokens=4, temperature=0).result()
        assert found["choices"][0]["message"]["content"] == str(expected)
        item = {"type": "input_image", "image_url": url}
        more = {
            "model": "llava",
            "input": [{"role": "user", "content": [item, {**text, "type": "input_text"}]}],
        }
        again = seeing.post(
            "/v1/responses", json={**more, "max_output_tokens": 4, "temperature": 0}
        ).json()
        assert again["output"][0]["content"][0]["text"] == str(expected)
        for wrong in (
            "data:image/png;base64,AAAA",
            "file:///etc/passwd",
            "https://localhost/a.png",
            "a.png",
        ):
            content[0]["image_url"]["url"] = wrong
            assert seeing.post("/v1/chat/completions", json=body).status_code == 400
        del body["max_tokens"], body["temperature"]
        content[0]["image_url"]["url"] = url
        assert seeing.post("/tokenize", json=body).status_code == 400
    body["model"] = "tiny"
    assert client.post("/v1/chat/completions", json=body).status_code == 400
