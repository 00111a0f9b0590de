"""The server on a port: OpenAI's client, hostile connections, and its end."""

import base64
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import openai
import pytest
from pydantic import BaseModel

from maxjax.serving import run as running
from maxjax.serving.app import application
from maxjax.serving.server import RequestLimits, Server
from tests.serving.conftest import QUESTION, GivenEngine
from tests.serving.test_chat import ADD, CALL


class Listening:
    """A server on a free port of the loopback, in a thread."""

    def __init__(self, server, drain=5.0):
        self.server, started = server, threading.Event()

        def tell(host, port):
            self.address = (host, port)
            started.set()

        args = (application(server), server, "127.0.0.1", 0, drain, tell)
        self.thread = threading.Thread(target=running.run, args=args, daemon=True)
        self.thread.start()
        assert started.wait(20)
        self.url = "http://{}:{}".format(*self.address)

    def stop(self):
        self.server.is_ending = True
        self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def model(tiny, engine):
    server = Server("tiny", limits=RequestLimits(body_seconds=1.0, body_bytes=10_000))
    server.use(*tiny, engine)
    server.is_ready = True
    found = Listening(server)
    yield found
    found.stop()


@pytest.fixture
def given(tiny):
    found = []

    def make(text="Yes.", *, format=None, limits=None, keys=(), **options):
        server = Server("tiny", keys, format=format, limits=limits or RequestLimits())
        server.use(*tiny, GivenEngine(text, **options))
        server.is_ready = True
        found.append(Listening(server))
        return found[-1]

    yield make
    for one in found:
        one.stop()


def client_of(listening):
    return openai.OpenAI(base_url=f"{listening.url}/v1", api_key="none", max_retries=0)


# --- OpenAI's client ---------------------------------------------------------------------------


def test_openai_chats_streams_and_texts(model):
    client = client_of(model)
    assert [one.id for one in client.models.list()] == ["tiny"]
    answer = client.chat.completions.create(model="tiny", messages=QUESTION)
    assert answer.choices[0].message.content == "2 + 3 = 5"
    pieces = client.chat.completions.create(
        model="tiny", messages=QUESTION, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(pieces)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == "2 + 3 = 5" and chunks[-1].usage == answer.usage
    assert (
        client.completions.create(model="tiny", prompt="What is 2 + 3?\n", max_tokens=4)
        .choices[0]
        .text
        == "2 + 3"
    )
    response = client.responses.create(model="tiny", input="What is 2 + 3?")
    assert response.output_text == "2 + 3 = 5" and response.status == "completed"
    with client.responses.stream(model="tiny", input="What is 2 + 3?") as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == "2 + 3 = 5"
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


def test_openai_parses_a_schema(model):
    class Sum(BaseModel):
        is_right: bool

    client = client_of(model)
    found = client.chat.completions.parse(model="tiny", messages=QUESTION, response_format=Sum)
    assert isinstance(found.choices[0].message.parsed, Sum)
    parsed = client.responses.parse(model="tiny", input="What is 2 + 3?", text_format=Sum)
    assert isinstance(parsed.output_parsed, Sum)


def test_openai_calls_functions(given):
    client = client_of(given(CALL, format="hermes"))
    found = client.chat.completions.create(model="tiny", messages=QUESTION, tools=[ADD])
    (call,) = found.choices[0].message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 2, "b": 3}
    with client.chat.completions.stream(model="tiny", messages=QUESTION, tools=[ADD]) as stream:
        (again,) = stream.get_final_completion().choices[0].message.tool_calls
    assert again.function.arguments == call.function.arguments
    back = [
        *QUESTION,
        found.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "5"},
    ]
    assert client.chat.completions.create(model="tiny", messages=back).choices


def test_openai_gets_errors_as_its_own(model):
    client = client_of(model)
    with pytest.raises(openai.BadRequestError, match="audio"):
        client.chat.completions.create(
            model="tiny", messages=QUESTION, audio={"format": "wav", "voice": "a"}
        )
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=QUESTION)


# --- hostile connections -----------------------------------------------------------------------

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"


def raw(listening, *parts, half=False, seconds=10.0):
    """What the server answers to these bytes until it closes the connection, or b"" if it resets it."""
    with socket.create_connection(listening.address, timeout=seconds) as connection:
        found = b""
        try:
            for part in parts:
                connection.sendall(part)
            if half:
                connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(1 << 16):
                found += data
        except ConnectionError:
            pass
        return found


def status(answer):
    return int(answer.split(b" ", 2)[1]) if answer else None


HOSTILE = {
    "no HTTP": (b"\x16\x03\x01\x02\x00 hello\r\n\r\n", 400),
    "header without end": (HEAD + b"X: " + b"a" * 200_000, 400),
    "many headers": (HEAD + b"".join(b"X%d: a\r\n" % i for i in range(20_000)) + b"\r\n", 400),
    "length that is no number": (HEAD + b"Content-Length: ten\r\n\r\n", 400),
    "negative length": (HEAD + b"Content-Length: -1\r\n\r\n", 400),
    "two lengths": (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}", 400),
    "length and chunks": (HEAD + b"Content-Length: 2\r\nTransfer-Encoding: gzip\r\n\r\n{}", (400, 501)),
    "huge body": (HEAD + b"Content-Length: 100000000\r\nConnection: close\r\n\r\n" + b"a" * 100_000, 413),
    "chunk that is no number": (HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\nzz\r\n", 400),
    "endless chunks": (HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + b"400\r\n" + b"a" * 1024
                       + b"\r\n" + (b"400\r\n" + b"a" * 1024 + b"\r\n") * 200, 413),
    "body that does not come": (HEAD + b"Content-Length: 10\r\nConnection: close\r\n\r\n{", 408),
    "path out of the world": (b"GET /../../etc/passwd HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", 404),
    "path with bytes": (b"GET /%ff%00 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", 404),
    "other method": (b"DELETE /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", 405),
    "CONNECT": (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", (400, 404)),
    "old HTTP": (b"GET /health HTTP/1.0\r\n\r\n", 200),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_bytes_get_an_error_or_a_closed_connection(model, case, capfd):
    data, expected = HOSTILE[case]
    answer = raw(model, data)
    allowed = expected if isinstance(expected, tuple) else (expected,)
    assert status(answer) in (*allowed, None) and b"Traceback" not in answer
    assert httpx.get(f"{model.url}/health").status_code == 200
    assert "Traceback" not in capfd.readouterr().err


def test_half_a_connection_is_answered_or_closed(model):
    body = json.dumps({"model": "tiny", "messages": QUESTION}).encode()
    answer = raw(
        model,
        HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body),
        body,
        half=True,
    )
    assert status(answer) in (200, None)


def test_headers_that_come_slowly_are_not_waited_for(model, monkeypatch):
    monkeypatch.setattr(running, "_HEADER_S", 0.3)
    began = time.monotonic()
    with socket.create_connection(model.address, timeout=10) as idle, \
            socket.create_connection(model.address, timeout=10) as slow:  # fmt: skip
        slow.sendall(b"POST /v1/chat")
        assert idle.recv(1) == slow.recv(1) == b""
    # The second request of a connection must come in time too; one that is answered is not cut.
    with socket.create_connection(model.address, timeout=10) as again:
        again.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"200" in again.recv(1 << 16)
        again.sendall(b"GET /hea")
        assert again.recv(1) == b""
    assert time.monotonic() - began < 10


def test_an_answer_may_take_longer_than_headers(given, monkeypatch):
    monkeypatch.setattr(running, "_HEADER_S", 0.2)
    listening = given("Yes.", waits=True, limits=RequestLimits(seconds=1.0))
    response = httpx.post(
        f"{listening.url}/v1/chat/completions",
        json={"model": "tiny", "messages": QUESTION},
        timeout=10,
    )
    assert response.status_code == 504


def test_slots_of_clients_that_vanish_are_free(given):
    listening = given("Yes.", waits=True)
    engine, body = (
        listening.server.engine,
        json.dumps({"model": "tiny", "messages": QUESTION, "stream": True}).encode(),
    )
    connections = []
    for _ in range(20):
        connections.append(socket.create_connection(listening.address, timeout=10))
        connections[-1].sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    deadline = time.monotonic() + 10
    while listening.server.admission.running < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    for one in connections:
        one.close()
    while (
        listening.server.admission.running or listening.server.admission.waiting
    ) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert listening.server.admission.running == listening.server.admission.waiting == 0
    assert all(one.is_cancelled for one in engine.answers)


# --- the commands that ask a server --------------------------------------------------------------


def run_command(monkeypatch, capsys, *arguments, lines=""):
    """The exit code, stdout and stderr of a command."""
    from maxjax.cli import main

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


def test_chat_with_a_server(given, monkeypatch, capsys, tmp_path):
    listening = given("<think>So.</think>Yes.", keys=["secret"], format="hermes")
    key, saved = tmp_path / "key", tmp_path / "chat.json"
    key.write_text("secret\n")
    arguments = (
        "chat",
        "--url",
        listening.url,
        "--api-key",
        str(key),
        "--system",
        "Be short.",
        "--top-k",
        "3",
        "--stats",
    )
    code, out, err = run_command(
        monkeypatch, capsys, *arguments, lines=f"one\ntwo\n/save {saved}\n"
    )
    assert (
        code == 0 and out == "<think>\nSo.\n</think>\nYes.\n" * 2 and "finish reason 'stop'" in err
    )
    engine = listening.server.engine
    contents = [message["content"] for message in engine.asked[1][0]]
    assert contents == ["Be short.", "one", "Yes.", "two"] and engine.asked[1][1]["top_k"] == 3
    assert [one["content"] for one in json.loads(saved.read_text())] == [*contents, "Yes."]


def test_a_chat_with_a_server_sends_pictures(given, monkeypatch, capsys, tmp_path):
    """As data: addresses, also those of a saved chat."""
    PIL = pytest.importorskip("PIL.Image")
    PIL.new("RGB", (3, 2), "red").save(tmp_path / "a.png")
    listening, saved = given(), tmp_path / "chat.json"
    part = {"type": "image", "image": str(tmp_path / "a.png")}
    saved.write_text(json.dumps([{"role": "user", "content": [part]}]))
    arguments = ("chat", "--url", listening.url, "--load", str(saved))
    lines = f"/image {tmp_path}/none.png\n/image {tmp_path}/a.png\none\n/save {saved}\n"
    code, out, err = run_command(monkeypatch, capsys, *arguments, lines=lines)
    assert code == 1 and out == "Yes.\n" and "no such file" in err
    first, second = listening.server.engine.asked[0][0]
    (picture, text) = second["content"]
    data = base64.b64encode((tmp_path / "a.png").read_bytes()).decode()
    assert picture == {"type": "image", "image": f"data:image/png;base64,{data}"}
    assert first["content"] == [picture] and text == {"type": "text", "text": "one"}
    assert len(json.loads(saved.read_text())) == 3


def test_bench_of_a_server(given, monkeypatch, capsys):
    listening = given("a few words", size=2)
    arguments = (
        "bench",
        "--url",
        listening.url,
        "--requests",
        "6",
        "--concurrency",
        "3",
        "--new",
        "5",
        "--prompt",
        "7",
    )
    code, out, _ = run_command(monkeypatch, capsys, *arguments, "--json")
    found = json.loads(out)
    assert code == 0 and (found["requests"], found["failed"], found["output_tokens"]) == (6, 0, 12)
    assert found["ttft_ms"]["median"] > 0 and found["output_tokens_s"] == pytest.approx(
        12 / found["seconds"]
    )
    assert len(listening.server.engine.asked) == 7  # one to begin with
    assert all(len(prompt.split()) == 7 for prompt, _ in listening.server.engine.asked)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench", "--url", "http://127.0.0.1:9"), "does not answer"),
        (("chat", "--url", "file:///etc/passwd"), "http://"),
        (("chat", "--url", "URL", "--mesh", "model=1"), "--mesh"),
        (("chat", "--url", "URL", "--xtc-probability", "0.5"), "--xtc-probability"),
        (("bench", "--served-name", "a"), "--url"),
        (
            ("bench", "--url", "URL", "--served-name", "other", "--requests", "1"),
            "no model 'other'",
        ),
    ],
)
def test_a_command_that_cannot_ask_says_why(given, monkeypatch, capsys, arguments, message):
    arguments = [given().url if one == "URL" else one for one in arguments]
    code, out, err = run_command(monkeypatch, capsys, *arguments)
    assert code in (1, 2) and message in err and not out and "Traceback" not in err


# --- its end -----------------------------------------------------------------------------------


def test_an_answer_that_is_being_written_ends_and_new_ones_are_refused(given):
    listening = given("Yes.", waits=True)
    found = []
    body = {"model": "tiny", "messages": QUESTION}
    post = lambda: httpx.post(f"{listening.url}/v1/chat/completions", json=body, timeout=20)
    thread = threading.Thread(target=lambda: found.append(post()))
    thread.start()
    engine = listening.server.engine
    while not engine.answers:
        time.sleep(0.01)
    listening.server.is_ending = True
    time.sleep(0.3)
    engine.answers[0]._waits = False
    thread.join(20)
    assert found[0].status_code == 200
    with pytest.raises(httpx.ConnectError):
        post()


def test_an_answer_that_does_not_end_in_time_is_cut(tiny):
    server = Server("tiny")
    server.use(*tiny, GivenEngine("Yes.", waits=True))
    server.is_ready = True
    listening = Listening(server, drain=1.0)
    found = []
    body = {"model": "tiny", "messages": QUESTION}
    post = lambda: found.append(
        httpx.post(f"{listening.url}/v1/chat/completions", json=body, timeout=20)
    )
    thread = threading.Thread(target=post)
    thread.start()
    while not server.engine.answers:
        time.sleep(0.01)
    listening.stop()
    thread.join(20)
    assert found[0].status_code == 503 and server.engine.answers[0].is_cancelled


def test_the_command_serves_and_ends(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    command = [sys.executable, "-m", "maxjax", "serve", "tiny", "--port", "0", "--slots", "1", "--no-compile",
               "--api-key", str(keys), "--log-requests", "--allow-host", "b.example"]  # fmt: skip
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
    )
    try:
        url = re.search(r"http://127.0.0.1:\d+", process.stdout.readline())[0]
        assert httpx.get(f"{url}/health").status_code == 200
        assert "ready" in process.stdout.readline()
        assert httpx.get(f"{url}/health", headers={"host": "a.example"}).status_code == 403
        assert httpx.get(f"{url}/health", headers={"host": "b.example:80"}).status_code == 200
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret")
        assert (
            client.chat.completions.create(model="tiny", messages=QUESTION)
            .choices[0]
            .message.content
            == "2 + 3 = 5"
        )
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    lines = [json.loads(line) for line in errors.splitlines()]
    assert [line["status"] for line in lines] == [200] and "secret" not in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--port", "99999"], "65535"), (["--api-key", "/dev/null"], "has no key"), (["nowhere"], "nowhere"),
     (["--tool-call-parser", "x"], "not supported"), (["--host", "203.0.113.1"], "cannot listen"),
     (["--allow-host", "a:80"], "without a port")],
)  # fmt: skip
def test_wrong_arguments_are_one_line(arguments, message, capsys):
    from maxjax.cli import main

    if "--port" not in arguments:
        arguments = [*arguments, "--port", "0"]
    try:
        code = main(["serve", *arguments])
    except SystemExit as end:
        code = end.code
    found = capsys.readouterr().err.strip()
    assert code in (1, 2) and message in found.splitlines()[-1] and "Traceback" not in found
