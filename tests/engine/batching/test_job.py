"""Jobs: a file of prompts becomes a file of answers, each line once, however often they are interrupted."""

import fcntl
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
from maxjax.engine.batching.job import _Job, run_job
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


def test_lines_name_their_adapters(tmp_path):
    model, tokenizer = maxjax.load("tiny")
    tuned = maxjax.lora.add(model, rank=2, key=jax.random.key(0))
    for name, weight in tuned.raw_state_dict().items():
        if "lora_B" in name:
            weight.value = jax.random.normal(jax.random.key(1), weight.value.shape)
    folder = maxjax.lora.save(tmp_path / "adapter", tuned)
    names = ["new", None, "old", 3]
    given = [{"prompt": "What is 1 + 2?", "adapter": name} for name in names]
    (tmp_path / "in").write_text("".join(json.dumps(line) + "\n" for line in given))
    options = ["--adapter", f"new={folder}", "--max-new-tokens", "8", "--temperature", "0"]
    files = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    assert main(["generate", *files, *options]) == 0
    found = {line["index"]: line for line in lines(tmp_path / "out")}
    expected = maxjax.generate(tuned, tokenizer, "What is 1 + 2?", max_new_tokens=8)
    assert found[0]["text"] == expected != found[1]["text"] == "1 + 2 = 3"
    assert "no adapter 'old'" in found[2]["error"] and "must be a str" in found[3]["error"]


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


@pytest.mark.parametrize(
    "content", [b"not ours", b'"What is 1 + 1?"', b"\0\1\2", b"[", b'{"x": 1}']
)
def test_other_files_are_left_as_they_are(engine, tmp_path, content):
    """Also one whose only line has no newline, as a line that was cut."""
    source, target = asked(tmp_path / "in", 2), tmp_path / "other"
    target.write_bytes(content)
    for given in (source, target):
        with pytest.raises(UserInputError, match="not the result"):
            run_job(engine, given, target)
    assert target.read_bytes() == content


def test_what_is_no_file(engine, tmp_path):
    """A directory, a pipe and a device are refused at once: none is waited for."""
    source = asked(tmp_path / "in", 2)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", "/dev/null"):
        with pytest.raises(UserInputError, match="regular file"):
            run_job(engine, source, path)
        with pytest.raises(UserInputError, match="regular file"):
            run_job(engine, path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_two_processes_with_one_output(engine, tmp_path):
    """The second one is refused: their lines would be doubled."""
    source, target = asked(tmp_path / "in", 2), tmp_path / "out"
    with target.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserInputError, match="another process is writing it"):
            run_job(engine, source, target)
    assert run_job(engine, source, target).answers == 2


def test_strange_lines(engine, tmp_path):
    """Each gets its own error, and the others their answers."""
    deep = b'{"prompt": "a", "id": ' + b"[" * 900 + b"]" * 900 + b"}"
    given = [
        b"\xff\xfe", b'"\xc3"', b'"\\ud800"', b'"What is 1 + 2?"\r', b"[" * 99999, b"9" * 9999, deep,
        b'"' + b"a" * 1_000_000 + b'"', b'{"prompt": "What is 1 + 1?", "id": NaN}', b'{"prompt": 5}',
        b'{"prompt": "What is 1 + 1?", "id": "\\ud800"}', b"\x00",
    ]  # fmt: skip
    (tmp_path / "in").write_bytes(b"\n".join(given))
    run_job(engine, tmp_path / "in", tmp_path / "out", max_new_tokens=12)
    found = {line["index"]: line for line in lines(tmp_path / "out")}
    assert sorted(found) == list(range(len(given)))
    assert [i for i in found if "error" not in found[i] and i != 6] in ([3, 8, 10], [3, 10, 8])
    assert found[3]["text"] == "1 + 2 = 3" and found[10]["id"] == "\ud800"


def test_full_disk(engine, tmp_path):
    """The job ends with the system's error, and goes on where it was."""
    source, target = asked(tmp_path / "in", 30), tmp_path / "out"
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700)); "
        "from maxjax.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    options = ["generate", "--input", source, "--output", target]
    ended = subprocess.run(
        [sys.executable, "-c", limited, *options],
        env={**os.environ, "MAXJAX_COMPILE_CACHE": "0"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode and "File too large" in ended.stderr and "Traceback" not in ended.stderr
    assert target.stat().st_size == 700
    run_job(engine, source, target)
    assert sorted(line["index"] for line in lines(target)) == list(range(30))


def test_an_interrupt_cancels_the_answers(engine, tmp_path, monkeypatch):
    """The engine does not write what nobody will read."""

    def interrupted(job, line, found):
        raise KeyboardInterrupt

    monkeypatch.setattr(_Job, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_job(engine, asked(tmp_path / "in", 30), tmp_path / "out", eos_ids=(), max_new_tokens=60)
    engine.submit("What is 1 + 1?").result()
    assert engine.stats().running == engine.stats().waiting == 0


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.extra)])
def test_killed(tmp_path, kills):
    count = 100 + 20 * kills
    source, target = asked(tmp_path / "in", count), tmp_path / "out"
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
    assert sorted(line["index"] for line in found) == list(range(count))
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
