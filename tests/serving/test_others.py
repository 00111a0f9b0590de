"""The other paths: texts, responses, vectors, documents, models, tokens."""

import base64
import json

import numpy as np
import pytest
from starlette.testclient import TestClient

import maxjax
from maxjax.serving.app import application
from maxjax.serving.server import Server
from tests.serving.conftest import QUESTION, ask, events
from tests.serving.test_chat import ADD, CALL


def test_texts_are_continued_as_they_are(client, engine):
    ids = engine.tokenizer.encode("What is 2 + 3?\n")
    found = ask(
        client, "/v1/completions", prompt=["What is 2 + 3?\n", "What is 4 + 4?\n"], max_tokens=5
    ).json()
    assert [choice["text"] for choice in found["choices"]] == ["2 + 3 =", "4 + 4 ="]
    assert found["usage"]["completion_tokens"] == 10
    of_ids = ask(client, "/v1/completions", prompt=ids, max_tokens=5, logprobs=2).json()["choices"][
        0
    ]
    assert of_ids["text"] == "2 + 3 =" == "".join(of_ids["logprobs"]["tokens"])
    assert of_ids["logprobs"]["text_offset"] == [0, 1, 3, 4, 5]
    *chunks, end = events(ask(client, "/v1/completions", prompt=[ids], max_tokens=5, stream=True))
    pieces = [json.loads(one)["choices"][0] for one in chunks]
    assert "".join(one["text"] for one in pieces) == "2 + 3 =" and end == "[DONE]"
    assert pieces[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("prompt", [[1, "a"], [[1], "a", 2.5], {"a": 1}, 3, [None]])
def test_a_prompt_of_another_type_is_refused(client, prompt):
    response = ask(client, "/v1/completions", prompt=prompt)
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"


def test_a_response_whole_and_streamed_is_the_same(given):
    client, engine = given(f"<think>So.</think>Wait. {CALL}", format="hermes")
    function = {"type": "function", **ADD["function"]}
    fields = {"input": "What is 2 + 3?", "instructions": "Be short.", "tools": [function]}
    whole = ask(client, "/v1/responses", **fields).json()
    assert engine.asked[0][0] == [{"role": "system", "content": "Be short."}, QUESTION[0]]
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    assert whole["status"] == "completed" and whole["output"][1]["content"][0]["text"] == "Wait."
    assert json.loads(whole["output"][2]["arguments"]) == {"a": 2, "b": 3}

    found = [json.loads(one) for one in events(ask(client, "/v1/responses", stream=True, **fields))]
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    assert found[0]["type"] == "response.created" and found[-1]["type"] == "response.completed"
    unnamed = lambda items: [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in items
    ]
    assert unnamed(found[-1]["response"]["output"]) == unnamed(whole["output"])
    texts = {"output_text": "Wait.", "reasoning_text": "So."}
    for kind, text in texts.items():
        deltas = [one["delta"] for one in found if one["type"] == f"response.{kind}.delta"]
        assert "".join(deltas) == text
    done = [one["item"] for one in found if one["type"] == "response.output_item.done"]
    assert unnamed(done) == unnamed(whole["output"])


def test_items_of_earlier_responses_are_messages(given):
    client, engine = given()
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "2 + 3"}]},
        {
            "type": "reasoning",
            "id": "r",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "So."}],
        },
        {
            "type": "function_call",
            "id": "f",
            "call_id": "c",
            "name": "add",
            "arguments": "{}",
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "c", "output": "5"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "5", "annotations": []}],
        },
    ]
    assert ask(client, "/v1/responses", input=items).status_code == 200
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    assert engine.asked[0][0] == [
        {"role": "user", "content": "2 + 3"},
        {"role": "assistant", "content": None, "reasoning_content": "So.", "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "c"},
        {"role": "assistant", "content": "5"},
    ]
    for fields in ({"input": [{"type": "web_search_call"}]}, {"previous_response_id": "x"}, {"background": True},
                   {"input": [{"type": "function_call"}]}, {"tools": [{"type": "web_search"}]}):  # fmt: skip
        assert ask(client, "/v1/responses", **{"input": "a", **fields}).status_code == 400


def test_models_and_adapters_are_listed(given):
    client, _ = given()
    found = client.get("/v1/models").json()["data"]
    assert [(one["id"], one["parent"]) for one in found] == [("tiny", None), ("small", "tiny")]
    assert found[0]["max_model_len"] == 256
    assert client.get("/v1/models/small").json() == found[1]
    assert client.get("/v1/models/other").status_code == 404


def test_tokens_of_a_text_and_of_a_chat(client, engine):
    tokenizer = engine.tokenizer
    found = client.post("/tokenize", json={"prompt": "What is 2?"}).json()
    assert found["tokens"] == tokenizer.encode("What is 2?") and found["count"] == len(
        found["tokens"]
    )
    back = client.post("/detokenize", json={"tokens": found["tokens"]}).json()
    assert back == {"prompt": "What is 2?"}
    chat = client.post("/tokenize", json={"messages": QUESTION}).json()
    assert chat["tokens"] == list(engine.submit(QUESTION, max_new_tokens=1).result().prompt_tokens)
    assert client.post("/tokenize", json={}).status_code == 400


@pytest.fixture(scope="module")
def encoder(minilm):
    server = Server("mini")
    server.use(*maxjax.load(minilm))
    server.is_ready = True
    return TestClient(application(server)), server


def test_vectors_of_texts(encoder):
    client, server = encoder
    texts = ["a cat", "a much longer text about a dog", ""]
    found = client.post("/v1/embeddings", json={"model": "mini", "input": texts}).json()
    expected = maxjax.embed(server.model, server.tokenizer, texts)
    np.testing.assert_array_equal(
        np.array([one["embedding"] for one in found["data"]], np.float32), expected
    )
    coded = client.post(
        "/v1/embeddings", json={"model": "mini", "input": texts[1], "encoding_format": "base64"}
    )
    data = base64.b64decode(coded.json()["data"][0]["embedding"])
    np.testing.assert_allclose(np.frombuffer(data, "<f4"), expected[1], atol=1e-6)
    short = client.post(
        "/v1/embeddings", json={"model": "mini", "input": "a cat", "dimensions": 4}
    ).json()
    vector = np.array(short["data"][0]["embedding"])
    assert vector.shape == (4,) and abs(np.linalg.norm(vector) - 1) < 1e-5
    for wrong in (
        {"input": [1, 2]},
        {"input": []},
        {"input": "a", "dimensions": 10**6},
        {"input": "a", "x": 1},
    ):
        assert client.post("/v1/embeddings", json={"model": "mini", **wrong}).status_code == 400


def test_an_encoder_writes_no_text(encoder):
    client, _ = encoder
    response = client.post("/v1/chat/completions", json={"model": "mini", "messages": QUESTION})
    assert response.status_code == 400 and "writes no text" in response.json()["error"]["message"]
    response = client.post("/v1/rerank", json={"model": "mini", "query": "a", "documents": ["b"]})
    assert response.status_code == 400
