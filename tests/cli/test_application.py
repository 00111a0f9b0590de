"""The command line as a user runs it: in a process of its own, by what it prints and returns."""

import json
import os
import re
import signal
import struct
import subprocess
import sys

import gguf
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from maxjax.checkpoint import save
from maxjax.cli.options import Parser
from maxjax.cli.terminal import as_options
from maxjax.errors import CheckpointMissingError
from maxjax.storage.hub import find_model

from .models import here

MAXJAX = [sys.executable, "-m", "maxjax"]
LFS_POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db\n"
    "size 90868376\n"
)


def maxjax(*arguments, stdin="", **kwargs):
    return subprocess.run(
        [*MAXJAX, *map(str, arguments)], input=stdin, capture_output=True, text=True, **kwargs
    )


def succeeds(*arguments, run=here, **kwargs):
    """stdout of a call that must succeed. ``run=maxjax`` gives it a process of its own."""
    done = (maxjax if kwargs.keys() - {"stdin"} else run)(*arguments, **kwargs)
    assert done.returncode == 0, done.stderr
    return done.stdout


def fails(*arguments, code=1, run=here, **kwargs):
    """stderr of a call that must fail properly: one line, no traceback, nothing on stdout."""
    done = (maxjax if kwargs.keys() - {"stdin"} else run)(*arguments, **kwargs)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    if code == 1:
        assert done.stderr.startswith("maxjax: ") and done.stderr.count("\n") == 1, done.stderr
        assert "unexpected" not in done.stderr, done.stderr
    return done.stderr


def write_safetensors(path, tensors):
    """`tensors`: name -> float32 array."""
    header, data = {}, b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array, np.float32).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.fixture
def checkpoint(tmp_path):
    arrays = {"a.weight": np.ones((2, 3)), "a.bias": np.zeros(2), "scale": np.ones(())}
    return write_safetensors(tmp_path / "m.safetensors", arrays)


@pytest.fixture(scope="module")
def small(minilm, tmp_path_factory):
    """A corner of MiniLM, for texts of up to 16 tokens."""
    directory = tmp_path_factory.mktemp("small")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
             "num_attention_heads": 2}  # fmt: skip
    config = json.loads((minilm / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | sizes))
    pooling = json.loads((minilm / "1_Pooling" / "config.json").read_text())
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(
        json.dumps(pooling | {"word_embedding_dimension": 32})
    )
    (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 16}')
    for name in ("modules.json", "tokenizer.json", "tokenizer_config.json"):
        (directory / name).symlink_to(minilm / name)
    with safetensors.safe_open(minilm / "model.safetensors", "numpy") as file:
        arrays = {
            name: file.get_slice(name)[
                tuple(slice({384: 32, 1536: 48}.get(n)) for n in file.get_slice(name).get_shape())
            ]
            for name in file.keys()
            if "encoder.layer." not in name or ".0." in name
        }
    safetensors.numpy.save_file(arrays, directory / "model.safetensors")
    return directory


@pytest.fixture
def bare_model(minilm, tmp_path):
    """The MiniLM directory without its tokenizer: configuration and weights only."""
    for path in minilm.iterdir():
        if path.is_dir() or path.name in {"config.json", "modules.json", "model.safetensors"}:
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


# --- the program --------------------------------------------------------------------------


def test_help_names_the_commands():
    out = succeeds("--help", run=maxjax)
    assert all(command in out for command in ("inspect", "embed", "env"))


def test_no_command_prints_the_help():
    """On stdout, as git's; scripts see by the code that nothing was done."""
    done = here()
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout == succeeds("--help")


def test_errors_name_the_options_of_the_command(tmp_path):
    target = tmp_path / "m.gguf"
    target.touch()
    message = fails("convert", find_model("tiny"), target)
    assert "pass --overwrite to replace it" in message and "overwrite=" not in message
    assert "pass --pooling lasttoken or --pooling mean" in fails("embed", "--model", "tiny", "x")
    assert "pass --batch and --length" in succeeds("plan", "tiny", "--device", "h200:2")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("context=600 is too large", "--context 600 is too large"),
        ("pass chat=False", "pass --raw"),
        ("pass chat=True, or not", "pass --chat, or not"),
        ("use maxjax.load(path, chat=False)", "use maxjax.load(path, chat=False)"),  # is Python
        ("--mesh model=4 needs 4 devices", "--mesh model=4 needs 4 devices"),  # an axis
        ("context=1/m.gguf: no such file", "context=1/m.gguf: no such file"),  # a path
        ("pass cast=True", "pass cast=True"),  # the command has no such option
    ],
)
def test_arguments_become_options(text, expected):
    parser = Parser()
    parser.add_argument("--raw", action="store_const", const=False, dest="chat")
    parser.add_argument("--chat", action="store_const", const=True)
    parser.add_argument("--context")
    parser.add_argument("--model")
    assert as_options(text, parser.option_for) == expected


def test_help_where_the_locale_has_no_such_characters():
    done = maxjax("generate", "--help", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and "AXIS=N,…" in done.stdout, done.stderr


def test_help_does_not_import_jax():
    code = (
        "import sys\nfrom maxjax.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print('jax' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "False\n"


def test_version():
    assert succeeds("--version", run=maxjax).startswith("maxjax 0.")


@pytest.mark.parametrize(
    "arguments",
    [
        ("nosuch",),
        ("inspect",),
        ("inspect", "--nosuch", "x"),
        ("embed", "text"),
        ("embed", "--model", "x", "--batch-size", "0", "text"),
        ("embed", "--model", "x", "--truncate-dim", "0", "text"),
        ("embed", "--model", "x", "--dtype", "int8", "text"),
        ("embed", "--model", "x", "--output", "o.txt", "text"),
    ],
)
def test_wrong_usage_is_2(arguments):
    assert "usage: maxjax" in fails(*arguments, code=2)


@pytest.mark.parametrize(
    "arguments", [("--debug", "inspect", "nosuch"), ("inspect", "nosuch", "--debug")]
)
def test_debug_shows_the_traceback(arguments):
    """The error leaves the program, so that Python shows it."""
    with pytest.raises(CheckpointMissingError):
        here(*arguments)


@pytest.mark.parametrize("case", ["stdout", "stderr", "usage"])
def test_closed_files(checkpoint, case):
    """A command runs without them; what is for stderr does not go to stdout if stderr is closed."""
    number = 1 if case == "stdout" else 2
    arguments = [] if case == "usage" else [checkpoint]
    command = ["sh", "-c", f'exec "$@" {number}>&-', "sh", *MAXJAX, "inspect", *arguments]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == (2 if case == "usage" else 0) and found.stderr == ""
    assert bool(found.stdout) == (case == "stderr")


def test_interrupt_is_130():
    code = (
        "import sys\nfrom maxjax.cli import application as cli, environment\n"
        "def run(options): raise KeyboardInterrupt\n"
        "environment.env = run\nsys.exit(cli.main(['env']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "maxjax: interrupted\n")


def test_a_reader_that_goes_away_is_quiet(tmp_path):
    many = {f"layers.{i}.weight": np.zeros(1) for i in range(2000)}
    path = write_safetensors(tmp_path / "many.safetensors", many)
    process = subprocess.Popen(
        [*MAXJAX, "inspect", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 128 + signal.SIGPIPE


def test_an_error_of_ours_is_named_unexpected():
    code = (
        "import sys\nfrom maxjax.cli import application as cli, environment\n"
        "def run(options): raise TypeError('two\\nlines')\n"
        "environment.env = run\nsys.exit(cli.main(['env']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "maxjax: unexpected TypeError: two lines (--debug shows where)\n"


# --- inspect ------------------------------------------------------------------------------


def test_inspect_lists_every_tensor(checkpoint):
    lines = succeeds("inspect", checkpoint, run=maxjax).splitlines()
    assert lines[0].split() == ["name", "dtype", "shape", "bytes", "file"]
    assert lines[1].split() == ["a.weight", "float32", "2x3", "24", "m.safetensors"]
    assert lines[3].split()[2] == "scalar"
    assert lines[-1].split() == ["all", "3", "9", "36"]


def test_inspect_json(checkpoint):
    found = json.loads(succeeds("inspect", checkpoint, "--json"))
    assert found["format"] == "safetensors"
    assert found["files"] == [{"path": str(checkpoint), "bytes": checkpoint.stat().st_size}]
    assert found["tensors"][0] == {
        "name": "a.weight",
        "dtype": "float32",
        "shape": [2, 3],
        "bytes": 24,
        "file": str(checkpoint),
    }
    assert found["totals"][-1] == {"dtype": "all", "tensors": 3, "values": 9, "bytes": 36}


def test_inspect_reads_headers_only(minilm):
    found = json.loads(succeeds("inspect", minilm, "--json"))
    by_name = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert by_name["embeddings.word_embeddings.weight"]["shape"] == [30522, 384]
    assert found["totals"][-1]["tensors"] == len(by_name) == 104


def test_inspect_escapes_what_would_steer_a_terminal(tmp_path):
    path = write_safetensors(tmp_path / "evil.safetensors", {"a\x1b[2Jb": np.zeros(1)})
    out = succeeds("inspect", path)
    assert "\x1b" not in out and "a\\x1b[2Jb" in out


def test_nothing_that_a_file_says_steers_a_terminal(tmp_path):
    """Names and a path, in what is printed and in errors."""
    marks = "\u202e\x9b31m\x1b[2J\u2066"
    path = write_safetensors(tmp_path / f"{marks}.safetensors", {marks: np.zeros(1)})
    for arguments in (["inspect", path], ["verify", path], ["verify", f"{path}x"], ["plan", path]):
        done = here(*arguments)
        said = (done.stdout + done.stderr).replace("\n", "")
        assert said and said.isprintable(), (arguments, said)


def test_inspect_an_empty_checkpoint(tmp_path):
    path = write_safetensors(tmp_path / "none.safetensors", {})
    assert succeeds("inspect", path).splitlines()[-1].split() == ["all", "0", "0", "0"]


def test_inspect_wrong_path(tmp_path):
    assert "absent.safetensors" in fails("inspect", tmp_path / "absent.safetensors")


def test_inspect_lfs_pointer(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text(LFS_POINTER)
    message = fails("inspect", path).lower()
    assert "lfs" in message and str(path) in message


def test_inspect_html_page(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("<!DOCTYPE html><html><body>404</body></html>")
    assert "html" in fails("inspect", path).lower()


def test_inspect_directory_without_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert str(tmp_path) in fails("inspect", tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_inspect_unreadable_file(checkpoint):
    checkpoint.chmod(0)
    assert "m.safetensors" in fails("inspect", checkpoint)


# --- embed --------------------------------------------------------------------------------


def _embeddings(out):
    rows = [json.loads(line) for line in out.splitlines()]
    return [row["text"] for row in rows], np.array([row["embedding"] for row in rows], np.float32)


def test_embed_arguments_stdin_batches_and_files_agree(small, tmp_path):
    texts = ["A cat sleeps.", "Ünïcode — 猫"]
    out = succeeds("embed", "--model", small, *texts, run=maxjax)
    named, rows = _embeddings(out)
    assert named == texts and rows.shape == (2, 32)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)

    path = tmp_path / "out.npy"
    stdin = "\r\n".join(texts) + "\n"
    assert succeeds("embed", "--model", small, "--output", path, stdin=stdin) == ""
    np.testing.assert_array_equal(np.load(path), rows)
    assert list(tmp_path.iterdir()) == [path]
    lines = tmp_path / "out.jsonl"
    single = ("--batch-size", 1, "--output", lines)
    assert succeeds("embed", "--model", small, *single, *texts) == ""
    named, found = _embeddings(lines.read_text(encoding="utf-8"))
    assert named == texts
    np.testing.assert_allclose(found, rows, atol=2e-6)


def test_embed_without_text(small):
    assert "no text" in fails("embed", "--model", small, stdin="")


def test_embed_text_that_is_not_utf8(small):
    done = subprocess.run(
        [*MAXJAX, "embed", "--model", str(small)], input=b"fine\n\xff\n", capture_output=True
    )
    assert done.returncode == 1 and done.stdout == b""
    assert b"text 2 is not valid UTF-8" in done.stderr


def test_embed_output_directory_is_checked_first(tmp_path):
    path = tmp_path / "absent" / "out.npy"
    assert str(path) in fails("embed", "--model", tmp_path, "--output", path, "text")


def test_embed_output_is_a_directory(tmp_path):
    path = tmp_path / "o.npy"
    path.mkdir()
    assert "is a directory" in fails("embed", "--model", tmp_path, "--output", path, "text")


def test_embed_text_too_long(small):
    assert "--truncate" in fails("embed", "--model", small, "word " * 15)
    given = ("word " * 14, "word " * 19)
    _, (short, long) = _embeddings(succeeds("embed", "--model", small, "--truncate", *given))
    np.testing.assert_array_equal(long, short)


def test_embed_without_tokenizer(bare_model):
    assert "tokenizer" in fails("embed", "--model", bare_model, "text")


def test_embed_unknown_architecture(bare_model):
    config = json.loads((bare_model / "config.json").read_text())
    (bare_model / "config.json").unlink()
    config |= {"architectures": ["NoSuchModel"], "model_type": "nosuch"}
    (bare_model / "config.json").write_text(json.dumps(config))
    message = fails("embed", "--model", bare_model, "text")
    assert "nosuch" in message.lower() and "maxjax.models.families()" in message


def test_embed_wrong_path(tmp_path):
    assert "absent" in fails("embed", "--model", tmp_path / "absent", "text")


def test_embed_directory_without_weights(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert str(tmp_path) in fails("embed", "--model", tmp_path, "text")


# --- env ----------------------------------------------------------------------------------


def test_env_where_a_backend_does_not_start():
    """That is a problem that it names, not an error."""
    done = maxjax("env", env=os.environ | {"JAX_PLATFORMS": "no_such_platform"})
    assert done.returncode == 0 and "jaxlib" in done.stdout
    assert done.stderr.startswith("maxjax: warning: JAX has no device: Unable"), done.stderr


def test_env():
    out = succeeds("env")
    assert "jaxlib" in out and "cpu:0" in out
    found = json.loads(succeeds("env", "--json"))
    assert found["versions"]["jax"] and found["devices"][0]["platform"] == "cpu"


# --- verify, and formats ------------------------------------------------------------------


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "w.npz"
    np.savez(path, a=np.arange(6, dtype=np.float32), b=np.ones((2, 3), np.int8))
    return path


def test_verify_says_what_it_looked_at(archive):
    said = succeeds("verify", archive, run=maxjax).strip()
    assert said == "sound: npz, 2 tensors, 30 bytes, 1 file; 2 checksums agree"
    found = json.loads(succeeds("verify", archive, "--json"))
    assert found == {
        "sound": True, "format": "npz", "tensors": 2, "nbytes": 30, "files": 1, "checksums": 2,
        "digests": 0, "blobs": 0,
    }  # fmt: skip


def test_verify_of_what_maxjax_wrote(tmp_path, archive):
    succeeds("convert", archive, tmp_path / "w.safetensors")
    found = json.loads(succeeds("verify", tmp_path / "w.safetensors", "--json"))
    assert (found["checksums"], found["digests"], found["blobs"]) == (2, 2, 0)
    said = succeeds("verify", tmp_path / "w.safetensors")
    assert said.endswith("2 checksums agree; the safetensors library lists the same tensors\n")
    with open(tmp_path / "w.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x07")
    assert "tensor 'b'" in fails("verify", tmp_path / "w.safetensors")


def test_verify_reads_all_trees_of_an_orbax_checkpoint(tmp_path):
    tree = {"a": np.ones((64, 64), np.float32)}
    step = save(tmp_path, None, left=tree, right=tree)
    said = succeeds("verify", step)
    assert "2 tensors" in said and "2 checksums agree" in said
    data = max((step / "right").rglob("d/*"), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 255
    data.write_bytes(content)
    assert "right" in fails("verify", step)


def test_verify_of_a_format_without_checksums(minilm):
    assert "it has no checksums" in succeeds("verify", minilm)


def test_repair_says_what_it_did(tmp_path):
    waits = tmp_path / ".maxjax-next-\x1b[31m"
    waits.mkdir()
    said = succeeds("repair", tmp_path)
    assert ".maxjax-next-" in said and "\x1b" not in said and not waits.exists()
    assert "nothing to repair" in succeeds("repair", tmp_path)
    assert "no such directory" in fails("repair", tmp_path / "none")


def test_verify_finds_a_flipped_bit(archive):
    content = bytearray(archive.read_bytes())
    content[content.index(np.float32(5).tobytes())] ^= 1
    archive.write_bytes(content)
    error = fails("verify", archive)
    assert "tensor 'a'" in error and "CRC-32" in error


def test_inspect_of_a_gguf_file(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("a \x1b[31mname")
    writer.add_token_list([f"t{i}" for i in range(40)])
    writer.add_tensor("w", np.zeros((2, 36), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("v", np.zeros(3, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    said = succeeds("inspect", path)
    assert "\x1b" not in said and "40 items: t0, t1, t2 …" in said
    assert re.search(r"^w +Q4_0 +2x64 +72 ", said, re.MULTILINE)
    found = json.loads(succeeds("inspect", path, "--json"))
    assert found["format"] == "gguf" and found["metadata"]["general.architecture"] == "llama"
    assert found["metadata"]["tokenizer.ggml.tokens"] == {"items": 40, "first": ["t0", "t1", "t2"]}
    assert {row["dtype"]: row["values"] for row in found["totals"]} == {
        "Q4_0": 128, "float32": 3, "all": 131,
    }  # fmt: skip


def test_what_was_meant():
    """A command, an option before any command, a mode of pooling, a file, the model of the package."""
    for name in ("genrate", "gen"):
        assert f"no command '{name}': did you mean generate?" in fails(name, "x", code=2)
    assert "unrecognized arguments: --verion: did you mean --version?" in fails("--verion", code=2)
    assert "did you mean" not in fails("convert", "a", "b", "--format", "orbax", code=2)
    assert "--pooling: last: it must be one of cls" in fails(
        "embed", "--model", "m", "--pooling", "last", "x", code=2
    )
    assert fails("generate", "--file", "none") == "maxjax: none: No such file or directory\n"
    assert "model.embed_tokens.weight" in succeeds("inspect", "tiny")


def test_a_warning_is_a_line_without_a_place_in_code():
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "3"}
    found = maxjax("generate", "hi", "--mesh", "model=3", "--max-new-tokens", 1, env=env)
    assert found.returncode == 0, found.stderr
    lines = [line for line in found.stderr.splitlines() if "replicates" in line]
    assert len(lines) == 1 and lines[0].startswith("maxjax: warning: to(mesh) replicates 8 weights")
    assert "sys.exit" not in found.stderr
