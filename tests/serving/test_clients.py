"""Other clients of OpenAI's API, as people use them."""

import pytest

from tests.serving.conftest import QUESTION
from tests.serving.test_chat import ADD, CALL
from tests.serving.test_run import given, model  # noqa: F401 (fixtures)

# The clients warn of each other.
pytestmark = [pytest.mark.extra, pytest.mark.filterwarnings("ignore")]


def test_litellm(model, given, monkeypatch):  # noqa: F811
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    where = {"model": "openai/tiny", "api_key": "none", "api_base": f"{model.url}/v1"}
    answer = litellm.completion(messages=QUESTION, **where)
    assert answer.choices[0].message.content == "2 + 3 = 5" and answer.usage.completion_tokens == 8
    pieces = litellm.completion(messages=QUESTION, stream=True, **where)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == "2 + 3 = 5"
    where["api_base"] = f"{given(CALL, format='hermes').url}/v1"
    (call,) = (
        litellm.completion(messages=QUESTION, tools=[ADD], **where).choices[0].message.tool_calls
    )
    assert call.function.name == "add"


def test_langchain(model, given):  # noqa: F811
    pytest.importorskip("langchain_openai")
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    @tool
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    class Answer(BaseModel):
        is_right: bool

    chat = ChatOpenAI(model="tiny", base_url=f"{model.url}/v1", api_key="none")
    assert chat.invoke("What is 2 + 3?").content == "2 + 3 = 5"
    assert "".join(piece.content for piece in chat.stream("What is 2 + 3?")) == "2 + 3 = 5"
    found = chat.with_structured_output(Answer, method="json_schema").invoke("What is 2 + 3?")
    assert isinstance(found, Answer)
    caller = ChatOpenAI(
        model="tiny", base_url=f"{given(CALL, format='hermes').url}/v1", api_key="none"
    )
    (call,) = caller.bind_tools([add]).invoke("What is 2 + 3?").tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 2, "b": 3})
