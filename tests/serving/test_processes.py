"""A server of two processes: answers, its end, and the loss of one of them."""

import json
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import pytest

from maxjax.cli.application import main
from tests.serving.conftest import QUESTION
from tests.test_distributed import COMPILED_ALIKE, ROOT, START_SECONDS, clean, free_port

HEARTBEAT = 10  # seconds without a sign of life
LATE = 15  # seconds that a loaded machine may add


class Serving:
    """Two running `maxjax serve`, of which the first has the port."""

    def __init__(self, folder, *options):
        address, self.logs = f"127.0.0.1:{free_port()}", [folder / f"{i}.log" for i in range(2)]
        environment = clean() | {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "1",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        }
        command = [
            sys.executable, "-m", "maxjax", "serve", "tiny", "--mesh", "model=-1", "--port", "0", "--slots", "1",
            "--no-compile", "--coordinator", address, "--processes", "2", "--heartbeat", str(HEARTBEAT), *options,
            "--process",
        ]  # fmt: skip
        self.processes = []
        for number, log in enumerate(self.logs):
            with log.open("w") as file:
                self.processes.append(
                    subprocess.Popen(
                        [*command, str(number)], env=environment | COMPILED_ALIKE, cwd=folder, stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip

    def wait_for(self, number, pattern):
        deadline = time.monotonic() + 2 * START_SECONDS
        while not (found := re.search(pattern, self.logs[number].read_text())):
            assert self.processes[number].poll() is None, self.logs[number].read_text()
            assert time.monotonic() < deadline, self.logs[number].read_text()
            time.sleep(0.05)
        return found

    def wait_until_ready(self):
        self.url = self.wait_for(0, r"listening on (http://\S+)")[1]
        self.wait_for(0, "tiny is ready")
        self.wait_for(1, "follows process 0")

    def ask(self, **fields):
        body = {"model": "tiny", "messages": QUESTION, **fields}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=4 * START_SECONDS)


@contextmanager
def serving(folder, *options):
    found = Serving(folder, *options)
    try:
        yield found
    finally:
        for process in found.processes:
            process.kill()
            process.wait()


def test_two_processes_serve(tmp_path):
    with serving(tmp_path) as server:
        server.wait_until_ready()
        answer = server.ask().json()
        assert answer["choices"][0]["message"]["content"] == "2 + 3 = 5"
        assert server.ask(temperature=-1).status_code == 400
        embedded = httpx.post(f"{server.url}/v1/embeddings", json={"model": "tiny", "input": "x"})
        assert embedded.status_code == 400 and "several processes" in embedded.text
        server.processes[1].send_signal(signal.SIGTERM)  # as all get it when a job ends
        server.processes[1].send_signal(signal.SIGINT)
        assert httpx.get(f"{server.url}/health").status_code == 200
        server.processes[0].send_signal(signal.SIGTERM)
        for process, log in zip(server.processes, server.logs, strict=True):
            assert process.wait(START_SECONDS) == 0, log.read_text()


@pytest.mark.extra
@pytest.mark.parametrize("is_busy", [False, True])
def test_a_follower_is_killed(tmp_path, is_busy):
    """Running answers end, requests and /health get 503, and then the first process ends too."""
    with serving(tmp_path) as server:
        server.wait_until_ready()
        assert server.ask().status_code == 200
        if is_busy:
            fields = {"stream": True, "ignore_eos": True, "messages": QUESTION, "model": "tiny"}
            stream = httpx.stream(
                "POST", f"{server.url}/v1/chat/completions", json=fields, timeout=60
            )
            with stream as response:
                lines = response.iter_lines()
                next(lines)
                server.processes[1].kill()
                *_, last = (line for line in lines if line)
            assert "error" in json.loads(last.removeprefix("data: "))
        else:
            server.processes[1].kill()
        deadline = time.monotonic() + HEARTBEAT + LATE
        while (status := httpx.get(f"{server.url}/health").status_code) == 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert status == server.ask().status_code == 503
        assert server.processes[0].wait(HEARTBEAT + LATE) == 1
        told = f"PeerLostError: process 1 gave no sign of life for {HEARTBEAT} s"
        assert told in server.logs[0].read_text()


@pytest.mark.extra
def test_the_first_process_is_killed(tmp_path):
    with serving(tmp_path) as server:
        server.wait_until_ready()
        assert server.ask().status_code == 200
        server.processes[0].kill()
        assert server.processes[1].wait(HEARTBEAT + LATE) == 1
        log = server.logs[1].read_text()
        assert (
            len(re.findall(f"process 0 gave no sign of life for {HEARTBEAT} s", log)) == 1
            and "Traceback" not in log
        )


def test_a_mesh_is_needed(capsys):
    assert main(["serve", "tiny", "--processes", "2", "--process", "0"]) == 1
    assert "--mesh" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "tiny", "--processes", "0"])
    assert "--processes" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "tiny", "--heartbeat", "5"])
    assert "--heartbeat is for several processes" in capsys.readouterr().err
