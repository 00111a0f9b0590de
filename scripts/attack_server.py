"""Attacks maxjax serve: hostile requests and clients that vanish. Exits 1 if the server breaks a rule.

    python scripts/attack_server.py                      # 1,000 requests, 200 clients
    python scripts/attack_server.py --count 100 --clients 20

Each hostile request gets a status from 400 to 499 (501 for a coding that there is not) or a closed connection, within
its limit of time; no answer has a traceback; the server answers afterwards as before. The slots of clients that vanish
at random moments of an answer become free; the time is printed.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

_HEAD = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
_PATHS = [
    b"/v1/chat/completions",
    b"/v1/completions",
    b"/v1/responses",
    b"/v1/embeddings",
    b"/v1/rerank",
    b"/tokenize",
]
_CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "What is 2 + 3?"}]}
# Seconds: a body that does not come is waited for longest.
_LIMIT = 45.0


def with_length(path: bytes, body: bytes) -> bytes:
    return _HEAD % path + b"Content-Length: %d\r\n\r\n" % len(body) + body


def hostile(draw: random.Random) -> tuple[str, bytes]:
    """The kind of a hostile request, and its bytes."""
    path = draw.choice(_PATHS)
    wrong = draw.choice(
        [None, 3, -1, 1e308, "x", [], {}, [[]], {"a": {}}, True, "\ud800", 10**400, "a" * 10_000]
    )
    field = draw.choice("model messages max_tokens temperature n stop tools logit_bias stream input prompt query "
                        "documents response_format seed tool_choice structured_outputs".split())  # fmt: skip
    kinds = {
        "broken JSON": lambda: with_length(path, json.dumps(_CHAT).encode()[: draw.randrange(1, 60)]),
        "wrong type": lambda: with_length(path, json.dumps({**_CHAT, field: wrong}).encode()),
        "unknown field": lambda: with_length(path, json.dumps({**_CHAT, f"x{draw.random()}": 1}).encode()),
        "deep nesting": lambda: with_length(path, draw.choice([b"[", b'{"a":', b'{"messages":[']) * 100_000),
        "bad UTF-8": lambda: with_length(path, json.dumps(_CHAT).encode().replace(b"What", draw.randbytes(8))),
        "random bytes": lambda: draw.randbytes(draw.randrange(1, 3000)) + b"\r\n\r\n",
        "random body": lambda: with_length(path, draw.randbytes(draw.randrange(1, 3000))),
        "large body": lambda: _HEAD % path + b"Content-Length: 100000000\r\n\r\n" + b" " * 100_000,
        "endless chunks": lambda: _HEAD % path + b"Transfer-Encoding: chunked\r\n\r\n" + (b"10000\r\n" + b" " * 65536
                                                                                         + b"\r\n") * 200,
        "header bomb": lambda: b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: %s\r\n" % (i, b"a" * 500) for i in range(500)),
        "long line": lambda: b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
        "no content-type": lambda: b"POST %s HTTP/1.1\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}" % path,
        "two lengths": lambda: _HEAD % path + b"Content-Length: 1\r\nContent-Length: 9\r\n\r\n{}",
        "smuggled": lambda: (_HEAD % path + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
                             + b"0\r\n\r\nGET / HTTP/1.1"),
        "wrong method": lambda: b"%s %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % (
            draw.choice([b"PUT", b"DELETE", b"TRACE", b"PATCH", b"GET"]), path),
        "wrong path": lambda: b"GET /%s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % draw.choice(
            [b"..%2f..%2fetc/passwd", b"%00", b"v1/%ff", b"a" * 5000, b"v1/models/../../x"]),
    }  # fmt: skip
    kind = draw.choice(list(kinds))
    return kind, kinds[kind]()


def answer_to(address: tuple[str, int], data: bytes, half: bool) -> tuple[int | None, bytes, float]:
    """The status, the bytes and the seconds of the answer; None for a connection that was closed without one.

    With ``half``, the client closes its side of the connection when it has sent the bytes.
    """
    began, found = time.monotonic(), b""
    with socket.create_connection(address, timeout=_LIMIT) as connection:
        try:
            connection.sendall(data)
            if half:
                connection.shutdown(socket.SHUT_WR)
            while len(found) < 1 << 20 and (more := connection.recv(1 << 16)):
                found += more
        except ConnectionError:
            pass
        except OSError as error:
            # It is ENOTCONN where the server has closed the connection before the client closes its side.
            if error.errno != errno.ENOTCONN:
                raise
    status = re.match(rb"HTTP/1\.1 (\d+)", found)
    return int(status[1]) if status else None, found, time.monotonic() - began


def is_refused(status: int | None) -> bool:
    """Whether a hostile request was refused. What happens to be a valid request gets its answer."""
    return status is None or 400 <= status < 500 or status == 501


def vanish(address: tuple[str, int], seed: int) -> None:
    """Asks for a long answer, and goes away at a random moment."""
    draw = random.Random(seed)
    body = {**_CHAT, "stream": draw.random() < 0.7, "ignore_eos": True, "n": draw.randrange(1, 4)}
    with socket.create_connection(address, timeout=_LIMIT) as connection:
        data = with_length(b"/v1/chat/completions", json.dumps(body).encode())
        connection.sendall(
            data[: draw.choice([len(data), len(data), len(data), draw.randrange(len(data))])]
        )
        connection.settimeout(draw.random() * 2)
        try:
            while connection.recv(draw.choice([1, 4096])):
                pass
        except OSError:
            pass


def gauge(url: str, name: str) -> float:
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def usual(url: str) -> str:
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(_CHAT).encode(),
        {"content-type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request, timeout=120))["choices"][0]["message"][
        "content"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    command = [
        sys.executable,
        "-m",
        "maxjax",
        "serve",
        "tiny",
        "--port",
        "0",
        "--slots",
        "4",
        "--no-compile",
    ]
    problems: list[str] = []
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        process.stdout.readline()  # ready
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        expected = usual(url)
        statuses: Counter[tuple[str, int | None]] = Counter()

        def attack(number: int) -> None:
            kind, data = hostile(random.Random(options.seed * 1_000_003 + number))
            try:
                status, found, seconds = answer_to(address, data, half=number % 4 == 0)
            except OSError as error:
                problems.append(f"request {number} ({kind}): {error!r}")
                return
            statuses[kind, status] += 1
            may_be_valid = kind in ("wrong type", "wrong method") and status == 200
            if (
                not (is_refused(status) or may_be_valid)
                or b"Traceback" in found
                or seconds > _LIMIT
            ):
                problems.append(
                    f"request {number} ({kind}): status {status} after {seconds:.1f} s: {found[:200]!r}"
                )

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(attack, range(options.count)))
        if usual(url) != expected:
            problems.append("another answer after the hostile requests")
        with ThreadPoolExecutor(32) as pool:
            list(
                pool.map(
                    lambda i: vanish(address, options.seed * 1_000_003 + i), range(options.clients)
                )
            )
        began = time.monotonic()
        while gauge(url, "maxjax_running") + gauge(url, "maxjax_waiting") > 0:
            if time.monotonic() - began > _LIMIT:
                problems.append("answers of clients that have vanished still run")
                break
            time.sleep(0.02)
        print(f"slots of clients that vanished are free after {time.monotonic() - began:.2f} s")
        if usual(url) != expected:
            problems.append("another answer after the clients that vanished")
        process.terminate()
        if process.wait(60) != 0:
            problems.append(f"the server has ended with {process.returncode}")
    for (kind, status), count in sorted(statuses.items(), key=str):
        print(f"{count:5} {kind}: {status or 'closed'}")
    for problem in problems[:20]:
        print(problem)
    print(
        f"{options.count} hostile requests, {options.clients} clients that vanished: {len(problems)} problems"
    )
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
