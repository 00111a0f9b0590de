"""What happens to every request: keys, sizes, times, clients that go, and the queue."""

import asyncio
import json
import logging

import pytest

from maxjax.errors import UserInputError
from maxjax.serving.admission import Admission
from maxjax.serving.errors import RequestError
from maxjax.serving.http import ClientGoneError, send_events
from maxjax.serving.server import RequestLimits, Server
from tests.serving.conftest import QUESTION, ask, events, server_of

BODY = json.dumps({"model": "tiny", "messages": QUESTION}).encode()
JSON = {"content-type": "application/json"}


def post(client, content, headers=JSON):
    return client.post("/v1/chat/completions", content=content, headers=headers)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"3", b'"a"', b"\xff\xfe", b'{"model": "\xff"}', b'{"model": "\\ud800"}', b"{" * 100_000,
     b"[" * 100_000, b'{"a":' * 50_000, b'{"model": NaN}', b"{'model': 1}", b'{"model": 1, "messages": 2}'],
    ids=repr,
)  # fmt: skip
def test_a_body_that_is_no_request_is_refused(given, content):
    client, engine = given()
    response = post(client, content)
    assert response.status_code == 400 and response.json()["error"]["message"]
    assert not engine.asked and "Traceback" not in response.text


def test_a_body_must_be_json_by_its_type(given):
    """A page of another site can send a form or a text without asking, but not JSON."""
    client, engine = given()
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert post(client, BODY, {"content-type": kind}).status_code == 415
    assert (
        post(client, BODY, {"content-type": "Application/JSON; charset=utf-8"}).status_code == 200
    )
    assert len(engine.asked) == 1


def test_a_body_that_is_too_large_is_refused(given):
    client, engine = given(limits=RequestLimits(body_bytes=1000))
    assert post(client, BODY + b" " * 1000).status_code == 413
    assert post(client, iter([BODY, b" " * 1000])).status_code == 413
    assert post(client, BODY, JSON | {"content-length": str(10**30)}).status_code == 413
    assert not engine.asked


def test_a_path_or_method_that_there_is_not(given):
    client, _ = given()
    for response in (client.get("/v1/nothing"), client.get("/v1/chat/completions")):
        assert response.status_code in (404, 405) and response.json()["error"]["message"]


def test_a_key_is_needed(given):
    client, engine = given(keys=["one", "two"])
    for headers in (
        {},
        {"authorization": "one"},
        {"authorization": "Bearer three"},
        {"authorization": "Bearer"},
    ):
        response = client.post("/v1/chat/completions", content=BODY, headers=JSON | headers)
        assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        assert client.get("/v1/models", headers=headers).status_code == 401
    assert not engine.asked
    for key in ("one", "two"):
        client.post(
            "/v1/chat/completions", content=BODY, headers=JSON | {"authorization": f"Bearer {key}"}
        )
    one, two = (settings["salt"] for _, settings in engine.asked)
    assert one != two and "one" not in one  # clients share no pages, and no key is kept as it is
    assert client.get("/health").status_code == client.get("/ready").status_code == 200


@pytest.mark.parametrize("keys", ["secret", [""], ["a", " "], [None]])
def test_keys_that_would_let_everybody_in_are_refused(keys):
    with pytest.raises(UserInputError, match="keys"):
        Server("tiny", keys)


def test_clients_share_prefixes_if_told(given):
    client, engine = given(keys=["one", "two"], shares_prefixes=True)
    for key in ("one", "two"):
        client.post(
            "/v1/chat/completions", content=BODY, headers=JSON | {"authorization": f"Bearer {key}"}
        )
    assert {settings["salt"] for _, settings in engine.asked} == {""}


def test_pages_of_other_sites_may_not_ask_unless_told(given):
    asking = {"origin": "https://a.example", "access-control-request-method": "POST"}
    client, _ = given()
    assert (
        "access-control-allow-origin"
        not in client.options("/v1/chat/completions", headers=asking).headers
    )
    client, _ = given(origins=["https://a.example"])
    found = client.options("/v1/chat/completions", headers=asking)
    assert found.headers["access-control-allow-origin"] == "https://a.example"
    other = client.options("/v1/chat/completions", headers=asking | {"origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("host", "is_answered"),
    [("localhost", True), ("LOCALHOST:8000", True), ("127.0.0.1:8000", True), ("127.3.2.1", True),
     ("[::1]:8000", True), ("[::1]", True), ("llm.example", True), ("llm.example:443", True),
     ("a.example", False), ("localhost.a.example", False), ("127.0.0.1.a.example", False), ("10.0.0.1:8000", False),
     ("0.0.0.0", False), ("", False), ("[::1", False), ("a.llm.example", False), ("localhost:8000/a.example", False)],
)  # fmt: skip
def test_a_host_that_is_not_allowed_is_refused(given, host, is_answered):
    """A page of a.example whose name has come to mean 127.0.0.1 sends the name a.example."""
    client, engine = given(hosts=["llm.example"])
    found = ask(client, headers={"host": host})
    assert (found.status_code == 200) == is_answered == (len(engine.asked) == 1)
    if not is_answered:
        error = found.json()["error"]
        assert found.status_code == 403
        assert (error["type"], error["code"]) == ("permission_error", "host_not_allowed")


def test_every_host_is_answered_unless_hosts_are_given(given):
    client, _ = given()
    assert ask(client, headers={"host": "a.example"}).status_code == 200
    client, _ = given(hosts=())
    found = [client.get("/health", headers={"host": one}).status_code for one in ("::1", "[::1]")]
    assert found == [403, 200]


@pytest.mark.parametrize(
    "host", ["a.example:80", "http://a.example", "a.example/v1", "", "[::1]:80"]
)
def test_what_is_no_name_of_a_host_is_refused(given, host):
    with pytest.raises(UserInputError, match="name or an address without a port"):
        given(hosts=[host])


def test_an_answer_that_takes_too_long_is_cancelled(given):
    client, engine = given("Yes.", waits=True, limits=RequestLimits(seconds=0.2))
    response = ask(client)
    assert response.status_code == 504 and engine.answers[0].is_cancelled
    *_, last = events(ask(client, stream=True))
    assert json.loads(last)["error"]["type"] == "timeout_error"


def test_no_request_is_taken_before_the_server_is_ready_or_when_it_ends(given):
    client, _ = given()
    server = server_of(client)
    for name, value in {"is_ready": False, "is_ending": True}.items():
        before = getattr(server, name)
        setattr(server, name, value)
        response = ask(client)
        assert response.status_code == 503 and "retry-after" in response.headers
        assert client.get("/ready").status_code == 503 and client.get("/health").status_code == 200
        setattr(server, name, before)
    assert ask(client).status_code == 200


def test_an_engine_that_has_failed_is_told_by_health_and_ready(given):
    client, engine = given()
    engine.is_closed = True
    assert ask(client).status_code == 503
    assert client.get("/health").status_code == client.get("/ready").status_code == 503


def test_an_unexpected_error_is_told_to_nobody(given, caplog):
    client, engine = given()
    engine.submit = lambda *_, **__: 1 // 0
    with caplog.at_level(logging.ERROR, "maxjax.serving"):
        response = ask(client)
    assert response.status_code == 500 and "division" not in response.text
    assert "division" in caplog.text and "What is" not in caplog.text.split("Traceback")[0]


def test_the_log_has_no_prompt_and_no_answer(given, caplog):
    client, _ = given("a secret answer")
    with caplog.at_level(logging.INFO, "maxjax.access"):
        ask(client)
    (line,) = [
        json.loads(record.message) for record in caplog.records if record.name == "maxjax.access"
    ]
    assert (
        line["status"] == 200
        and line["path"] == "/v1/chat/completions"
        and line["completion_tokens"] == 2
    )
    assert "secret" not in caplog.text and "What is" not in caplog.text


def test_metrics(client):
    ask(client, max_tokens=2)
    found = client.get("/metrics").text
    assert 'maxjax_requests_total{route="/v1/chat/completions",status="200"}' in found
    assert "maxjax_written_tokens_total" in found and "maxjax_pages " in found


# --- clients that go, or read slowly ---------------------------------------------------------


def ask_and_go(app, engine, stream):
    """Sends a request, and closes the connection when the engine has it."""
    body = json.dumps({"model": "tiny", "messages": QUESTION, "stream": stream}).encode()

    async def run():
        coming = iter([{"type": "http.request", "body": body}])

        async def receive():
            if (message := next(coming, None)) is not None:
                return message
            while not engine.answers:
                await asyncio.sleep(0.01)
            return {"type": "http.disconnect"}

        async def send(message):
            pass

        scope = {
            "type": "http", "method": "POST", "path": "/v1/chat/completions", "raw_path": b"", "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "client": ("a", 1), "server": ("b", 2),
            "root_path": "", "scheme": "http", "http_version": "1.1", "asgi": {"version": "3.0"},
        }  # fmt: skip
        await asyncio.wait_for(app(scope, receive, send), 20)

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_the_answers_of_a_client_that_goes_are_cancelled(given, stream):
    client, engine = given("Yes.", waits=True)
    ask_and_go(client.app, engine, stream)
    assert [one.is_cancelled for one in engine.answers] == [True]
    server = server_of(client)
    assert (server.admission.running, server.admission.waiting) == (0, 0)


def test_a_client_that_reads_nothing_is_left():
    async def pieces():
        yield b"a"

    async def send(message):
        await asyncio.Event().wait()

    with pytest.raises(ClientGoneError):
        asyncio.run(send_events(send, pieces(), 0.05))


# --- the queue ---------------------------------------------------------------------------------


def order_of(arrivals, running=1, waiting=100):
    """The order in which requests (client, priority, count) enter, and the largest number that was in at once."""

    async def run():
        admission, order, most = Admission(running, waiting), [], 0

        async def request(name, client, priority=0, count=1):
            nonlocal most
            async with admission.place(client, count, priority):
                order.append(name)
                most = max(most, admission.running)
                await asyncio.sleep(0)

        tasks = [asyncio.ensure_future(request(*one)) for one in arrivals]
        await asyncio.gather(*tasks)
        assert (admission.running, admission.waiting) == (0, 0)
        return order, most

    return asyncio.run(run())


def test_clients_take_turns():
    order, most = order_of(
        [("a1", "a"), ("a2", "a"), ("a3", "a"), ("a4", "a"), ("b1", "b"), ("c1", "c")]
    )
    assert order == ["a1", "a2", "b1", "c1", "a3", "a4"] and most == 1


def test_smaller_priorities_enter_first():
    assert order_of([("a1", "a"), ("a2", "a", 5), ("b1", "b", 1), ("a3", "a", 1)])[0] == [
        "a1",
        "b1",
        "a3",
        "a2",
    ]


def test_requests_with_several_answers_take_several_places():
    order, most = order_of([("a", "a", 0, 2), ("b", "b", 0, 3), ("c", "c", 0, 1)], running=3)
    assert order == ["a", "b", "c"] and most == 3
    order, most = order_of([("a", "a", 0, 9), ("b", "b", 0, 1)], running=3)
    assert order == ["a", "b"] and most == 3


def test_a_full_queue_refuses():
    with pytest.raises(RequestError) as caught:
        order_of([("a", "a"), ("b", "b"), ("c", "c"), ("d", "d")], waiting=2)
    assert caught.value.status == 429 and caught.value.headers["retry-after"]


def test_requests_that_are_cancelled_together_leave_the_queue():
    async def run():
        admission = Admission(2, 100)

        async def request(i):
            async with admission.place(str(i % 3)):
                await asyncio.sleep(10)

        tasks = [asyncio.ensure_future(request(i)) for i in range(20)]
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(one) for one in ended} == {asyncio.CancelledError}
        assert (admission.running, admission.waiting, admission._queues) == (0, 0, {})

    asyncio.run(run())


def test_a_request_that_is_cancelled_while_it_waits_leaves_the_queue():
    async def run():
        admission, entered = Admission(1, 10), []

        async def request(name, seconds):
            async with admission.place(name):
                entered.append(name)
                await asyncio.sleep(seconds)

        first, second, third = (asyncio.ensure_future(request(n, 0.05)) for n in "abc")
        await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.gather(first, third)
        assert entered == ["a", "c"] and (admission.running, admission.waiting) == (0, 0)

    asyncio.run(run())
