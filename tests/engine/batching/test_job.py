"""Jobs: a file of prompts becomes a file of answers, each line once, however often they are interrupted."""

import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import maxjax
from maxjax.cli import main
from maxjax.engine.batching.job import run_job
from maxjax.errors import UserInputError


@pytest.fixture(scope="module")
def engine():
    with maxjax.Engine(*maxjax.load("tiny"), slots=4) as found:
        yield found


def asked(path, count):
    path.write_text(
        "".join(f'{{"prompt": "What is {i % 50} + 1?", "id": [{i}]}}\n' for i in range(count))
    )
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_kind_of_line(engine, tmp_path):
    given = [
        '"What is 1 + 2?"', "", '{"messages": [{"role": "user", "content": "What is 2 + 2?"}], "id": null}',
        "nothing", '{"prompt": ""}', '{"prompt": "a", "tokens": [1]}', '{"text": "a"}', "[1]", '{"tokens": [1, "x"]}',
        '{"tokens": [5, 6]}',
    ]  # fmt: skip
    (tmp_path / "in").write_text("\n".join(given))
    done = run_job(engine, tmp_path / "in", tmp_path / "out", max_new_tokens=12)
    found = {line["index"]: line for line in lines(tmp_path / "out")}
    assert sorted(found) == [0, 2, 3, 4, 5, 6, 7, 8, 9]
    assert (done.answers, done.errors, done.before) == (3, 6, 0)
    assert found[0]["text"] == "1 + 2 = 3" and found[0]["finish_reason"] == "stop"
    assert found[2]["text"] == "2 + 2 = 4" and found[2]["id"] is None
    assert found[9]["prompt_tokens"] == 2
    assert all("error" in found[i] for i in range(3, 9))
    before = (tmp_path / "out").read_bytes()
    assert run_job(engine, tmp_path / "in", tmp_path / "out").before == 9
    assert (tmp_path / "out").read_bytes() == before


def test_cut_anywhere(engine, tmp_path):
    """Whatever part of the answers is there, the rest is written, and the same as at once."""
    source, key = asked(tmp_path / "in", 9), jax.random.key(2)
    options = {"temperature": 1.0, "key": key, "max_new_tokens": 9}
    run_job(engine, source, tmp_path / "whole", **options)
    whole = (tmp_path / "whole").read_bytes()
    expected = sorted(lines(tmp_path / "whole"), key=lambda line: line["index"])
    assert len({line["text"] for line in expected}) > 1
    for end in np.random.default_rng(0).integers(0, len(whole), 8):
        (tmp_path / "part").write_bytes(whole[:end])
        run_job(engine, source, tmp_path / "part", **options)
        assert sorted(lines(tmp_path / "part"), key=lambda line: line["index"]) == expected


def test_refused(engine, tmp_path):
    source = asked(tmp_path / "in", 2)
    with pytest.raises(UserInputError, match="none"):
        run_job(engine, tmp_path / "none", tmp_path / "out")
    with pytest.raises(UserInputError, match="not the result"):
        run_job(engine, source, source)
    assert len(lines(source)) == 2
    with pytest.raises(UserInputError, match="No such file"):
        run_job(engine, source, tmp_path / "no" / "out")


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.extra)])
def test_killed(tmp_path, kills):
    source, target = asked(tmp_path / "in", 400), tmp_path / "out"
    command = [
        sys.executable, "-m", "maxjax", "generate", "--input", source, "--output", target, "--slots", "4",
    ]  # fmt: skip
    written = 0
    for _ in range(kills):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while process.poll() is None:
            if target.exists() and (size := target.stat().st_size) > written:
                written = size
                break
            time.sleep(0.01)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    found = lines(target)
    assert sorted(line["index"] for line in found) == list(range(400))
    assert all(line["text"].startswith(f"{line['index'] % 50} + 1 = ") for line in found)


@pytest.mark.parametrize(
    "given",
    [
        ["--input", "in"],
        ["--output", "out"],
        ["--slots", "2", "Hi"],
        ["--input", "in", "--output", "out", "Hi"],
        ["--input", "in", "--output", "out", "--json"],
        ["--input", "in", "--output", "out", "--cache-bytes", "many"],
    ],
)
def test_options_that_do_not_fit(given, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked(tmp_path / "in", 1)
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["generate", *given]))
    assert ended.value.code == 2 and "error" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
