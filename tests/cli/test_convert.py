"""``maxjax convert`` as a user runs it: what it prints, what it returns, what it leaves."""

import errno
import fcntl
import gc
import importlib
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from maxjax import progress
from maxjax.cli import application as cli
from maxjax.cli.terminal import stoppable
from maxjax.graph.weights import load_weights

MAXJAX = [sys.executable, "-m", "maxjax", "convert"]
ARRAYS = {
    "a.weight": np.arange(600, dtype=np.float32).reshape(20, 30),
    "b.weight": np.arange(200, dtype=np.float32).reshape(10, 20),
    "ids": np.arange(7),
}


@pytest.fixture
def source(tmp_path):
    safetensors.numpy.save_file(ARRAYS, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256,
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip


def llama(folder: Path, rows: int = 256) -> Path:
    """A directory with a random model of that many words."""
    rng = np.random.default_rng(0)
    names = {f"self_attn.{x}_proj": (256, 256) for x in "qkvo"}
    names |= {f"mlp.{x}_proj": (256, 256) for x in ("gate", "up", "down")}
    names |= {"input_layernorm": (256,), "post_attention_layernorm": (256,)}
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in names.items()}
    shapes |= {"model.embed_tokens.weight": (rows, 256), "model.norm.weight": (256,)}
    arrays = {n: rng.standard_normal(shape, dtype=np.float32) for n, shape in shapes.items()}
    folder.mkdir()
    safetensors.numpy.save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": rows}))
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def run(capsys):
    """Runs a command in this process: (exit code, stdout, stderr)."""

    def call(*arguments):
        try:
            code = cli.main(["convert", *map(str, arguments)])
        except SystemExit as error:  # argparse
            code = error.code
        return code, *capsys.readouterr()

    return call


# --- what it says --------------------------------------------------------------------------------


def test_a_file(run, source, tmp_path):
    out = tmp_path / "out.safetensors"
    nbytes = sum(array.nbytes for array in ARRAYS.values())
    assert run(source, out) == (0, f"wrote {out}: safetensors, 3 tensors, {nbytes:,} bytes\n", "")
    assert out.read_bytes() == source.read_bytes()


@pytest.mark.parametrize(
    ("target", "options", "says"),
    [
        ("out", [], "out: safetensors, 3 tensors"),
        ("out", ["--to", "orbax"], "out/0: orbax, 3 tensors"),
        ("out", ["--max-shard-size", "1KB"], "out: safetensors, 3 tensors"),
        (
            "out.safetensors",
            ["--dtype", "bf16"],
            "out.safetensors: safetensors, 3 tensors, 1,656 by",
        ),
    ],
)
def test_targets(run, source, tmp_path, target, options, says):
    code, out, err = run(source, tmp_path / target, *options)
    assert (code, err) == (0, "") and f"wrote {tmp_path}/{says}" in out and out.count("\n") == 1
    with load_weights(tmp_path / target, verify=True) as weights:
        for name, array in ARRAYS.items():
            found = np.asarray(weights[name].data().data)
            short = "--dtype" in options and array.dtype.kind == "f"
            assert found.dtype == (ml_dtypes.bfloat16 if short else array.dtype)
            np.testing.assert_array_equal(found, array.astype(found.dtype))
    if "--max-shard-size" in options:
        assert len(list((tmp_path / target).glob("*.safetensors"))) == 2


@pytest.mark.parametrize(
    ("short", "dtype"),
    [("bf16", "bfloat16"), ("F16", "float16"), ("fp32", "float32"), ("float64", "float64")],
)
def test_names_of_types(run, source, tmp_path, short, dtype):
    assert run(source, tmp_path / "o.safetensors", "--dtype", short)[0] == 0
    with load_weights(tmp_path / "o.safetensors") as weights:
        assert weights["a.weight"].data().dtype.name == dtype


def test_json(run, source, tmp_path):
    code, out, err = run(source, tmp_path / "out", "--json", "--to", "safetensors")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "path": str(tmp_path / "out"), "format": "safetensors", "tensors": 3,
        "bytes": sum(array.nbytes for array in ARRAYS.values()), "packed": 0,
    }  # fmt: skip


def test_quantised(run, tmp_path):
    folder = llama(tmp_path / "llama")
    code, out, _ = run(folder, tmp_path / "m.gguf", "--quantize", "q4_k")
    assert code == 0 and re.search(r"m\.gguf: gguf, 11 tensors, [\d,]+ bytes\n$", out)
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert kinds.pop("output_norm.weight") == "F32"
    assert {kind for name, kind in kinds.items() if "norm" not in name} == {"Q4_K"}
    code, out, _ = run(tmp_path / "m.gguf", tmp_path / "st")
    assert code == 0 and "8 of them stay quantised blocks, which only maxjax opens" in out
    code, out, err = run(tmp_path / "m.gguf", tmp_path / "st", "--dtype", "bf16")
    assert code == 1 and "--overwrite" in err
    code, out, _ = run(tmp_path / "m.gguf", tmp_path / "st", "--dtype", "bf16", "--overwrite")
    assert code == 0 and "blocks" not in out
    code, out, _ = run(tmp_path / "m.gguf", tmp_path / "n.gguf", "--json")
    assert json.loads(out)["packed"] == 8


# --- what it refuses -----------------------------------------------------------------------------


def refuses(found, *says):
    """One line on stderr, nothing on stdout, exit code 1."""
    code, out, err = found
    assert code == 1 and out == "" and err.count("\n") == 1, (code, out, err)
    assert err.startswith("maxjax: ") and "unexpected" not in err, err
    for text in says:
        assert text in err, err


def test_sources_that_are_none(run, source, tmp_path):
    out = tmp_path / "o.safetensors"
    refuses(run(tmp_path / "absent.gguf", out), "absent.gguf", "no such file")
    (tmp_path / "empty").mkdir()
    refuses(run(tmp_path / "empty", out), "empty")
    (tmp_path / "x.safetensors").write_text("<!DOCTYPE html>")
    refuses(run(tmp_path / "x.safetensors", out), "x.safetensors", "HTML")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(source.read_bytes()[:-5])
    refuses(run(cut, out), "cut.safetensors", "5 missing")
    assert not out.exists()


@pytest.mark.parametrize(
    ("target", "options", "says"),
    [
        ("o.gguf", [], "no config.json"),
        ("o.bin", [], ".bin files are not written"),
        ("o.gguf", ["--to", "orbax"], "is the name of a gguf file"),
        ("o", ["--to", "gguf"], "name a file for GGUF"),
    ],
)
def test_arguments_that_do_not_go_together(run, source, tmp_path, target, options, says):
    before = tree(tmp_path)
    refuses(run(source, tmp_path / target, *options), says)
    assert tree(tmp_path) == before


def test_an_architecture_without_names(run, source, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "rwkv"}')
    refuses(run(source, tmp_path / "o.gguf"), "rwkv")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--to", "nosuch"], "--to"),
        (["--quantize", "q3_x"], "it must be one of mxfp4, mxfp4_moe, q2_k, "),
        (["--importance", "m.gguf"], "--importance is for --quantize"),
        (["--nosuch"], "--nosuch"),
        (["--dtype", "int8"], "int8 is not a float dtype"),
        (["--dtype", "nosuch"], "nosuch"),
        (["--quantize", "q4_k"], "for GGUF files"),
        (["--max-shard-size=-3"], "-3"),
        (["--max-shard-size", "1.5"], "1.5 has no unit: write 1.5GiB"),
    ],
)
def test_wrong_usage_is_2(run, source, options, says):
    code, out, err = run(source, source.parent / "o", *options)
    assert (code, out, err.count("\n")) == (2, "", 2)
    assert err.startswith("usage: maxjax convert") and says in err


def test_a_flipped_bit_is_not_converted(run, source, tmp_path):
    """Or the new file would have a checksum that agrees with a wrong value."""
    assert run(source, tmp_path / "first")[0] == 0
    file = tmp_path / "first" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 16
    file.write_bytes(content)
    refuses(run(tmp_path / "first", tmp_path / "second"), "b.weight", "CRC-32")
    assert not (tmp_path / "second").exists()


# --- where it cannot write -----------------------------------------------------------------------


def test_a_directory_that_is_not_there_is_made(run, source, tmp_path):
    for target, *options in (("a/b/o.safetensors",), ("c/d",), ("e/f", "--to", "orbax")):
        assert run(source, tmp_path / target, *options)[0] == 0
        with load_weights(tmp_path / target) as weights:
            assert weights["ids"].exists()


@pytest.mark.parametrize("options", [[], ["--to", "orbax"]], ids=["safetensors", "orbax"])
def test_a_file_in_the_place_of_a_directory(run, source, tmp_path, options):
    (tmp_path / "file").write_text("mine")
    refuses(run(source, tmp_path / "file" / "o", *options), "file")
    refuses(run(source, tmp_path / "file", *options), "file")
    if not options:
        refuses(run(source, tmp_path / "file" / "o.safetensors"), "file")
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "m.safetensors"]


def test_a_place_where_nothing_can_be_made(run, source):
    """Which holds for root too."""
    for target in ("/proc/maxjax/o.safetensors", "/proc/maxjax/o", "/proc/o.safetensors"):
        refuses(run(source, target), "/proc")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written(run, source, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    refuses(run(source, tmp_path / "closed" / "o.safetensors"), "closed")
    refuses(run(source, tmp_path / "closed"), "closed")


def test_a_full_disk(run, source, tmp_path, monkeypatch):
    from maxjax.storage.save import staging

    assert run(source, tmp_path / "o.safetensors")[0] == 0
    before = tree(tmp_path)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(staging, "write_new", full)
    again = ("--dtype", "f16", "--overwrite")
    refuses(run(source, tmp_path / "o.safetensors", *again), "No space left on device")
    monkeypatch.undo()
    assert tree(tmp_path) == before


# --- the bar -------------------------------------------------------------------------------------


@pytest.mark.extra
def test_no_bar_without_a_terminal(source, tmp_path):
    done = subprocess.run(
        [*MAXJAX, source, tmp_path / "o.safetensors"], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("wrote ")


def test_a_bar_on_a_terminal(source, tmp_path, monkeypatch, capsys):
    """stderr is one, stdout a file: the bar is nowhere but there, and gone at the end."""
    # What is over before half a second has passed is not shown otherwise.
    monkeypatch.setattr(progress, "DELAY", 0)
    monkeypatch.setattr(progress, "_drawer", progress._drawer)
    monkeypatch.setenv(progress.VARIABLE, "1")
    monkeypatch.setenv("TERM", "xterm")
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    try:
        with os.fdopen(inner, "w") as terminal:
            monkeypatch.setattr(sys, "stderr", terminal)
            code = cli.main(["convert", str(source), str(tmp_path / "o.safetensors")])
            terminal.flush()
            os.set_blocking(outer, False)
            shown = os.read(outer, 1 << 16).decode()
    finally:
        os.close(outer)
    out = capsys.readouterr().out
    assert code == 0 and out.startswith("wrote ") and out.count("\n") == 1 and "convert" not in out
    assert "converting" in shown and "3.26 kB/3.26 kB" in shown  # of 3,256 bytes
    assert shown.endswith("\x1b[2K")  # its line is empty again


# --- in the middle -------------------------------------------------------------------------------

# Each flush takes its time, so that a signal comes while it goes on.
SLOWLY = """
import os, sys, time
flush = os.fsync
os.fsync = lambda fd: (time.sleep(0.4), flush(fd))
from maxjax.cli import application as cli
sys.exit(cli.main(sys.argv[1:]))
"""


def is_writing(folder: Path) -> bool:
    """Whether a temporary directory of ours has more than its owner's name in it."""
    try:
        inside = [path for one in folder.glob(".maxjax-*.tmp") for path in one.iterdir()]
    except FileNotFoundError:
        return False
    return any(not path.name.startswith(".") for path in inside)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("set", signal.SIGTERM), ("gguf", signal.SIGTERM), ("orbax", signal.SIGINT),
        ("file", signal.SIGINT), ("orbax", signal.SIGTERM),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else value,
)  # fmt: skip
def test_stopped_in_the_middle(run, tmp_path, kind, sent):
    """What was there is as it was, and nothing else is; the exit code says what happened."""
    folder = llama(tmp_path / "llama")
    room = tmp_path / "room"
    target, options = {
        "file": (room / "o.safetensors", []), "gguf": (room / "o.gguf", []),
        "set": (room, ["--max-shard-size", "300KB"]), "orbax": (room, ["--to", "orbax"]),
    }[kind]  # fmt: skip
    assert run(folder, target, *options)[0] == 0
    before = tree(room)
    process = subprocess.Popen(
        [sys.executable, "-c", SLOWLY, "convert", folder, target, *options, "--dtype", "bf16",
         "--overwrite"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not is_writing(room):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.005)
    process.send_signal(sent)
    out, err = process.communicate(timeout=120)
    expected = (130, "maxjax: interrupted\n") if sent == signal.SIGINT else (143, "")
    assert (process.returncode, err) == expected and out == ""
    assert tree(room) == before
    assert not list(room.glob(".maxjax-*"))


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_not_lost_in_the_collector_of_garbage(run, source, tmp_path, sent, monkeypatch):
    """It comes while the collector calls a function: what that raises is ignored."""
    target = tmp_path / "room" / "o.safetensors"
    assert run(source, target)[0] == 0
    before = tree(tmp_path)
    flush = os.fsync

    def strike(phase, about):
        gc.callbacks.remove(strike)
        signal.raise_signal(sent)
        for _ in range(1000):
            pass

    def slowly(file):
        if strike not in gc.callbacks:
            gc.callbacks.append(strike)
            gc.collect(0)
        time.sleep(0.1)  # several times what it takes to raise it again
        flush(file)

    monkeypatch.setattr(os, "fsync", slowly)
    code, out, err = run(source, target, "--dtype", "f16", "--overwrite")
    monkeypatch.undo()
    expected = (130, "maxjax: interrupted\n") if sent == signal.SIGINT else (143, "")
    assert (code, err) == expected and out == ""
    # It may come when the last rename is done: then the new file is there, as whole as the old one.
    if tree(tmp_path) != before:
        with load_weights(target, verify=True) as weights:
            found = np.asarray(weights["a.weight"].data().data)
        np.testing.assert_array_equal(found, ARRAYS["a.weight"].astype(np.float16))
    assert not list(target.parent.glob(".maxjax-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGALRM])
def test_a_signal_that_comes_while_python_ignores_an_exception(monkeypatch, number):
    """What is raised in the hook is ignored too: it is raised after it."""
    seen = []

    def hook(found):
        seen.append(found.exc_value)
        signal.raise_signal(number)
        seen.append("the end of the hook")

    class Fails:
        def __del__(self):
            raise ValueError("in a destructor")

    class Ended:
        def __del__(self):
            raise SystemExit(143)

    monkeypatch.setattr(sys, "unraisablehook", hook)
    expected = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    with stoppable():
        with pytest.raises(expected):
            if number == signal.SIGALRM:
                Ended()  # is to be raised again
            Fails()
            time.sleep(10)
    assert list(map(str, seen)) == ["in a destructor", "the end of the hook"]


def test_an_interrupt_during_an_import_waits_for_its_end(tmp_path, monkeypatch):
    """Of it NumPy would make an ImportError."""
    (tmp_path / "interrupted_import.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\ndone = sum(range(100))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with stoppable(), pytest.raises(KeyboardInterrupt):
        found = importlib.import_module("interrupted_import")
        time.sleep(10)
    assert found.done == 4950


def test_handlers_are_put_back(run, source, tmp_path):
    def handlers():
        return [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT)]

    before = [*handlers(), sys.unraisablehook]
    assert run(source, tmp_path / "o.safetensors")[0] == 0
    refuses(run(tmp_path / "absent", tmp_path / "o.safetensors"), "absent")
    assert [*handlers(), sys.unraisablehook] == before
