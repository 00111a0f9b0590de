"""`maxjax generate` as a user runs it, mostly within this process: JAX starts slowly."""

import argparse
import functools
import json
import os
import signal
import subprocess
import sys

import jax
import pytest
import tokenizers

import maxjax
from maxjax.cli import application as cli
from maxjax.cli.options import file_path, text
from tests.engine.test_pictures import asked, picture
from tests.engine.test_pictures import write_model as write_llava

from .models import in_process, write_model

N = ("--max-new-tokens", "12")
MAXJAX = [sys.executable, "-m", "maxjax"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run():
    return functools.partial(in_process)


@pytest.fixture
def generate(run, model):
    """stdout of `maxjax generate` with a model, which must succeed and be silent on stderr."""

    def succeeds(*arguments, **kwargs):
        code, out, err = run("generate", "--model", model, *arguments, **kwargs)
        assert (code, err) == (0, "")
        return out

    return succeeds


@pytest.fixture
def fails(run, model):
    """The line on stderr of a call that must fail with nothing on stdout."""

    def fails(*arguments, code=1, model=model, **kwargs):
        found, out, err = run("generate", "--model", model, *arguments, **kwargs)
        assert (found, out) == (code, "")
        if code == 1:
            assert err.startswith("maxjax: ") and err.count("\n") == 1, err
            assert "unexpected" not in err, err
        return err

    return fails


@pytest.fixture(scope="module")
def ours(model):
    return functools.partial(maxjax.generate, *maxjax.load(model))


# --- the text -----------------------------------------------------------------------------


def test_the_text_and_a_newline(generate, ours, tmp_path):
    text = ours("hello", max_new_tokens=12)
    assert len(text) == 12
    n = ("--max-new-tokens", 12)
    assert generate("hello", *n) == text + "\n"
    assert generate(*n, stdin="hello\n") == text + "\n"
    assert generate("he", "llo", *n) == ours("he llo", max_new_tokens=12) + "\n"
    assert generate("-", *n, stdin="hello") == text + "\n"
    (tmp_path / "prompt").write_bytes(b"hello\r\n")
    assert generate("--file", tmp_path / "prompt", *n) == text + "\n"
    assert generate(*n, stdin="hello\n\n") == ours("hello\n", max_new_tokens=12) + "\n"


def test_a_stop_text(generate, ours):
    text = ours("hello", max_new_tokens=12)
    stops = ("--stop", "nowhere", "--stop", text[5:7])
    found = json.loads(generate("hello", *stops, "--json", "--max-new-tokens", 12))
    assert found["text"] == text[: text.index(text[5:7])]
    assert (found["finish_reason"], found["stop"]) == ("stop", text[5:7])


def test_json(generate, ours):
    text = ours("hello", max_new_tokens=4, logprobs=2)
    out = generate("hello", "--json", "--max-new-tokens", 4, "--logprobs", 2)
    found = json.loads(out)
    assert out.count("\n") == 1
    assert found == {
        "text": text, "tokens": list(text.tokens), "finish_reason": "length", "stop": None,
        "prompt": "u:hello\na:", "prompt_tokens": list(text.prompt_tokens), "seed": None,
        "logprobs": [{"token": one.token, "logprob": one.logprob, "top": [list(t) for t in one.top]}
                     for one in text.logprobs],
    }  # fmt: skip
    assert len(found["logprobs"][0]["top"]) == 2


def test_a_token_that_cannot_come_has_no_logprob_in_json(run, tmp_path):
    banned = write_model(tmp_path / "m", suppress_tokens=list(range(256)))
    code, out, _ = run("generate", "--model", banned, "x", "--json", "--logprobs", 257,
                       "--max-new-tokens", 1)  # fmt: skip
    found = json.loads(out, parse_constant=pytest.fail)
    assert code == 0 and found["tokens"] == [256]


def test_a_seed_repeats_the_text(run, generate, ours, model):
    drawn = ("hello", "--max-new-tokens", 12, "--temperature", 5, "--top-k", 200)
    key = functools.partial(ours, "hello", max_new_tokens=12, temperature=5.0, top_k=200)
    assert generate(*drawn, "--seed", 7) == key(key=jax.random.key(7)) + "\n"
    assert generate(*drawn, "--seed", 8) != generate(*drawn, "--seed", 7)
    code, out, err = run("generate", "--model", model, *drawn, "--stats")
    seed = err.split("seed ")[1].split()[0]
    assert code == 0 and "temperature 5, top-k 200" in err
    assert generate(*drawn, "--seed", seed) == out
    assert json.loads(generate(*drawn, "--json"))["seed"] != int(seed)


def test_penalties_reach_the_model(generate, ours):
    text = ours("hello", max_new_tokens=12, repetition_penalty=1.5, presence_penalty=1.0,
                frequency_penalty=1.9)  # fmt: skip
    options = ("--repetition-penalty", 1.5, "--presence-penalty", 1, "--frequency-penalty", 1.9)
    assert generate("hello", "--max-new-tokens", 12, *options) == text + "\n"
    assert text != ours("hello", max_new_tokens=12)


def test_rarer_settings_reach_the_model(generate, ours):
    text = ours("hello", max_new_tokens=12, no_repeat_ngram_size=1, dry_multiplier=2.0)
    options = ("--no-repeat-ngram-size", 1, "--dry-multiplier", 2)
    assert generate("hello", "--max-new-tokens", 12, *options) == text + "\n"
    assert text != ours("hello", max_new_tokens=12)
    key = {"temperature": 5.0, "key": jax.random.key(7)}
    text = ours("hello", max_new_tokens=12, typical_p=0.5, xtc_probability=0.5, **key)
    options = ("--temperature", 5, "--seed", 7, "--typical-p", 0.5, "--xtc-probability", 0.5)
    assert generate("hello", "--max-new-tokens", 12, *options) == text + "\n"
    assert text != ours("hello", max_new_tokens=12, **key)


def test_the_files_say_how_it_is_sampled(run, tmp_path):
    directory = write_model(tmp_path / "m", do_sample=True, temperature=0.5, max_new_tokens=3)
    code, out, err = run("generate", "--model", directory, "hello", "--stats")
    assert code == 0 and "temperature 0.5, top-k 50, seed " in err and "after 3 tokens" in err
    code, _, err = run("generate", "--model", directory, "hello", "--stats", "--temperature", 0)
    assert code == 0 and "greedy" in err


def test_filters_without_temperature_are_told_of(run, model):
    code, out, err = run("generate", "--model", model, "x", "--top-p", 0.5, "--max-new-tokens", 1)
    assert code == 0 and err.startswith("maxjax: warning: --top-p ") and len(out) == 2
    off = ("--top-p", 1, "--typical-p", 1, "--top-n-sigma", 1)
    code, _, err = run("generate", "--model", model, "x", *off, "--max-new-tokens", 1)
    assert code == 0 and err.startswith("maxjax: warning: --top-n-sigma has no effect")


def test_a_chat_of_one_turn(generate, ours):
    n = ("--max-new-tokens", 8)
    raw = functools.partial(ours, max_new_tokens=8, chat=False)
    expected = raw("u:hi\na:") + "\n"
    assert generate("hi", *n) == generate("hi", "--chat", *n) == expected
    assert generate("hi", "--raw", *n) == raw("hi") + "\n" != expected
    assert generate("hi", "--system", "be", *n) == raw("s:be\nu:hi\na:") + "\n"


def test_chat_needs_a_template_and_raw_takes_any_text(run, tmp_path):
    directory = write_model(tmp_path / "m", template=None)
    arguments = ("generate", "--model", directory, "hi", "--json", "--max-new-tokens", 1)
    assert json.loads(run(*arguments)[1])["prompt"] == "hi"
    code, _, err = run(*arguments, "--chat")
    assert code == 1 and "no chat template" in err


def test_variables_of_the_template(run, tmp_path):
    template = "{{ messages[0].content }}{{ '!' if think is true else '?' }}{{ effort }}"
    directory = write_model(tmp_path / "m", template=template)
    arguments = ("generate", "--model", directory, "hi", "--chat", "--json", "--max-new-tokens", 1)

    def prompt(*given):
        code, out, err = run(*arguments, *given)
        assert code == 0
        return bytes(i - 1 for i in json.loads(out)["prompt_tokens"]), err

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    ids = lambda text: bytes(alphabet.index(c) for c in text)
    assert prompt() == (ids("hi?"), "")
    for yes in ("true", "True"):
        assert prompt("--template-arg", f"think={yes}") == (ids("hi!"), "")
    assert prompt("--template-arg", "think=false", "--template-arg", "effort=low")[0] == ids(
        "hi?low"
    )
    found, err = prompt("--template-arg", "efort=low")
    assert found == ids("hi?") and "efort has no effect" in err and "did you mean effort?" in err
    # A word of the template's language is no variable.
    assert "did you mean" not in prompt("--template-arg", "iff=1")[1]


def test_a_mesh_of_all_devices(generate):
    assert len(generate("hello", "--max-new-tokens", 1, "--mesh", "model=2,data=-1")) == 2


def test_a_mesh_gives_the_same_text(generate, ours):
    text = ours("hello", max_new_tokens=8) + "\n"
    assert generate("hello", "--max-new-tokens", 8, "--mesh", "model=2,data=2") == text


def test_other_types_and_chunks(generate, ours):
    n = ("--max-new-tokens", 8)
    text = ours("hello" * 9, max_new_tokens=8, chunk=16, cache_dtype="int8") + "\n"
    assert generate("hello" * 9, *n, "--chunk", 16, "--cache-dtype", "int8") == text
    assert len(generate("hello", *n, "--dtype", "bfloat16")) == 9


def test_statistics_are_on_stderr(run, model):
    code, out, err = run("generate", "--model", model, "hello", "--max-new-tokens", 5, "--stats")
    assert code == 0 and len(out) == 6
    rows = dict(line.split(maxsplit=1) for line in err.splitlines())
    assert set(rows) == {"loaded", "prompt", "first", "then", "sampling", "ended"}
    assert rows["prompt"] == "a chat, by the chat template"
    *_, raw = run("generate", "--model", model, "x", "--max-new-tokens", 1, "--verbose", "--raw")
    assert "the text as it is" in raw
    assert rows["sampling"] == "greedy" and rows["ended"].startswith("after 5 tokens")


# --- pictures -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """A folder with a model that takes pictures, two pictures, and a file that is none."""
    folder = write_llava(tmp_path_factory.mktemp("llava"))
    PIL = pytest.importorskip("PIL.Image")
    for seed in range(2):
        PIL.fromarray(picture(seed)).save(folder / f"{seed}.png")
    (folder / "broken.png").write_bytes((folder / "0.png").read_bytes()[:60])
    return folder


def answer_to(folder, *messages, **options):
    return maxjax.generate(*maxjax.load(folder), list(messages), **options)


def test_a_question_about_pictures(run, llava):
    """Each is before the text, in the order of the options."""
    (message,) = asked(picture(0))
    second = {"type": "image", "image": picture(1)}
    for images, content in (
        (["0.png"], message["content"]),
        (["0.png", "1.png"], [message["content"][0], second, message["content"][1]]),
    ):
        options = [x for name in images for x in ("--image", llava / name)]
        code, out, err = run("generate", "--model", llava, "w1 w2", *options, *N, "--json")
        assert (code, err) == (0, "")
        found = json.loads(out)
        expected = answer_to(llava, {"role": "user", "content": content}, max_new_tokens=12)
        assert found["tokens"] == list(expected.tokens)
        assert found["prompt_tokens"] == list(expected.prompt_tokens)


def test_a_picture_after_a_system_message(run, llava):
    system = ("--system", "w5", "--image", llava / "0.png", "--json")
    code, out, _ = run("generate", "--model", llava, "w1 w2", *system, *N)
    message = {"role": "system", "content": "w5"}
    expected = answer_to(llava, message, *asked(picture(0)), max_new_tokens=12)
    assert code == 0 and json.loads(out)["tokens"] == list(expected.tokens)


def test_pictures_that_cannot_be(fails, llava):
    image = lambda name: ("x", "--image", llava / name)
    assert "none.png is not a picture: no such file" in fails(*image("none.png"))
    assert "broken.png cannot be decoded" in fails(*image("broken.png"))
    assert "unknown format" in fails(*image("config.json"))
    assert "Llama takes text alone" in fails(*image("0.png"))
    assert "--image cannot be given with --raw" in fails(*image("0.png"), "--raw", code=2)
    job = ("--input", "a", "--output", "b", "--image", "c")
    assert "--image cannot be given with --input" in fails(*job, code=2)


def test_a_job_with_pictures(run, llava, tmp_path, monkeypatch):
    """Relative paths begin at the folder of the job, wherever it is run; each error is that of its line."""
    monkeypatch.chdir(tmp_path)
    job = llava / "job.jsonl"
    paths = ["0.png", str(llava / "1.png"), "none.png", "broken.png", "gs://a/b", "a\0", 5]
    lines = [{"messages": asked(path)} for path in paths]
    address = {"type": "image_url", "image_url": {"url": "0.png"}}
    text = {"type": "text", "text": "w1 w2"}
    lines += [
        {"messages": [{"role": "user", "content": content}]}
        for content in ([address, text], [{"type": "image"}], [{"type": ["image"]}], [text])
    ]
    job.write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = ("--input", job, "--output", "out.jsonl", "--max-new-tokens", 4)
    code, _, err = run("generate", "--model", llava, *output, "--temperature", 0)
    assert code == 0 and "4 answers, 7 errors" in err
    written = (tmp_path / "out.jsonl").read_text().splitlines()
    found = {one["index"]: one for one in map(json.loads, written)}
    for index, seed in ((0, 0), (1, 1), (7, 0)):
        expected = answer_to(llava, *asked(picture(seed)), max_new_tokens=4, temperature=0)
        assert found[index]["text"] == str(expected)
    for index, says in {
        2: "no such file",
        3: "cannot be decoded",
        4: "gs://",
        8: "picture",
    }.items():
        assert says in found[index]["error"]


# --- what cannot be -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("x" * 256, "--raw"), "256 tokens, and the model's context is 256"),
        (("\udcff",), "not valid UTF-8"),
        (("",), "the prompt is empty"),
        (("x", "--mesh", "model=16"), "JAX_NUM_CPU_DEVICES=16"),
        (("x", "--mesh", "model=3,data=-1"), "8 devices are not a multiple of 3"),
        (("x", "--revision", "main"), "revision"),
        (("--file", "/nowhere/at/all"), "/nowhere/at/all"),
    ],
)
def test_wrong_input_is_one_line(fails, arguments, says):
    assert says in fails(*arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--temperature", -1), "--temperature: -1: it must be a number of at least 0 (0: greedy)"),
        (("--temperature", "nan"), "--temperature: nan"),
        (("--top-p", 0), "--top-p: 0: it must be a number above 0, up to 1"),
        (("--top-p", 1.5), "--top-p: 1.5: it must be a number from 0 to 1 (1: off)"),
        (("--top-p", "z"), "--top-p: z"),
        (("--top-k", -1), "--top-k: -1"),
        (("--top-k", 1.5), "--top-k: 1.5: it must be an integer"),
        (("--min-p", 2), "--min-p: 2"),
        (("--repetition-penalty", 0), "--repetition-penalty: 0: it must be a number above 0"),
        (("--typical-p", 0), "--typical-p: 0: it must be a number above 0 and at most 1"),
        (("--xtc-probability", 2), "--xtc-probability: 2: it must be a number from 0 to 1"),
        (("--no-repeat-ngram-size", 1.5), "--no-repeat-ngram-size: 1.5: it must be an integer"),
        (("--dry-multiplier", "nan"), "--dry-multiplier: nan"),
        (("--presence-penalty", 3), "--presence-penalty: 3"),
        (("--frequency-penalty", -3), "--frequency-penalty: -3"),
        (("--json", "--logprobs", -1), "--logprobs: -1"),
        (("--logprobs", 1), "--logprobs needs --json"),
        (("--stop", ""), "--stop: the text is empty"),
        (("--max-new-tokens", 0), "--max-new-tokens: 0: it must be an integer of at least 1"),
        (("--chunk", 12), "12 is not a power of two"),
        (("--seed", -1), "from 0 to 4294967295"),
        (("--seed", 2**32), "from 0 to 4294967295"),
        (("--file", "y"), "a PROMPT and --file"),
        (("--cache-dtype", "int4"), "--cache-dtype"),
        (("--mesh", "model"), "model=8,data=2"),
        (("--mesh", "rows=-1,model=1"), "no axis 'rows'"),
        (("--mesh", "model=2,model=-1"), "names one axis twice"),
        (("--dtype", "int8"), "--dtype: int8 is not a float dtype"),
        (("--template-arg", "x"), "--template-arg: x: it must have the form NAME=VALUE"),
        (("--template-arg", "messages=1"), "messages is set by maxjax itself"),
        (("--raw", "--template-arg", "x=1"), "--template-arg cannot be given with --raw"),
        (("--raw", "--system", "x"), "--system cannot be given with --raw"),
        (("--nosuch",), "unrecognized arguments: --nosuch"),
        (("--max-tokens", 5), "--max-tokens 5: did you mean --max-new-tokens?"),
        (("--temprature=1",), "did you mean --temperature?"),
        (("-m", 5), "unrecognized arguments: -m 5"),
        (("--max_new_tokens", 5), "did you mean --max-new-tokens?"),
    ],
)
def test_wrong_usage_is_two_lines_and_2(fails, arguments, says):
    first, second = fails("x", *arguments, code=2).splitlines()
    assert first == "usage: maxjax generate [OPTIONS] [PROMPT ...]   (--help lists the options)"
    assert second.startswith("maxjax generate: error: ") and says in second


def test_every_option_with_a_type_refuses_what_is_none():
    """Whichever command it is of, and before anything is opened."""
    seen = set()
    for name in cli.COMMANDS:
        parser = cli._parser([name])
        (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        command = commands.choices[name]
        required = [
            x for a in command._actions if a.required and not a.option_strings
            for x in ["x"] * (2 if a.nargs == 2 else 1)
        ]  # fmt: skip
        for action in command._actions:
            if not action.option_strings or action.type is None:
                continue
            option = action.option_strings[-1]
            with pytest.raises(SystemExit, match="2"):
                wrong = "" if action.type in (text, file_path) else "?"
                parser.parse_args([name, *required, f"{option}={wrong}"])
            seen.add(option)
    assert seen >= {"--temperature", "--mesh", "--hbm", "--dtype", "--max-shard-size", "--batch"}


def test_stdin_that_is_no_prompt(fails, monkeypatch, capsys, model):
    assert "the prompt is empty" in fails(stdin="\n")
    master, slave = os.openpty()
    with os.fdopen(slave) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        with pytest.raises(SystemExit, match="2"):
            maxjax.cli.main(["generate", "--model", str(model)])
    os.close(master)
    assert "no PROMPT given" in capsys.readouterr().err


def test_bytes_that_are_no_text(fails, tmp_path):
    (tmp_path / "p").write_bytes(b"ab\xff")
    assert "not valid UTF-8, at byte 2" in fails("--file", tmp_path / "p")


def test_models_that_cannot(fails, tmp_path, minilm):
    assert "Bert" in (err := fails("x", model=minilm)) and "not a language model" in err
    bare = write_model(tmp_path / "bare", text=False)
    assert "no tokenizer.json" in fails("x", model=bare)
    plain = write_model(tmp_path / "plain", template=None)
    assert "no chat template" in fails("x", "--chat", model=plain)
    assert "no such file" in fails("x", model=tmp_path / "absent")


def test_nan_is_told_of_with_its_layer(fails, tmp_path):
    broken = write_model(tmp_path / "broken", nan=True)
    assert "--debug-nans names the layer" in fails("x", *N, model=broken)
    assert "layers.1.mlp.down_proj" in fails("x", "--debug-nans", *N, model=broken)


# --- while it writes ----------------------------------------------------------------------


def test_a_reader_that_goes_away_is_quiet(monkeypatch, capsys, model):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert maxjax.cli.main(["generate", "--model", str(model), "hello", *N]) == 141
    assert capsys.readouterr().err == ""


# What is to run when Python ends does not run: the devices may still compute.
_AND_LATE = """
import atexit, sys
from maxjax.cli import application as cli
atexit.register(print, "late")
sys.exit(cli.main())
"""


def test_interrupt_ends_the_line(tmp_path):
    directory = write_model(tmp_path / "m", context=1 << 17)
    process = subprocess.Popen(
        [sys.executable, "-c", _AND_LATE, "generate", "--model", directory, "--max-new-tokens",
         "100000", "hello"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 1)  # it comes while the rest is written
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, err.decode()) == (130, "maxjax: interrupted\n")
    assert first and out.endswith(b"\n") and len(out) < 90_000 and b"late" not in out


def test_help_names_the_command(run):
    assert "generate" in run("--help")[1]
    assert "--temperature" in run("generate", "--help")[1]


# --- how the process ends -------------------------------------------------------------------


@pytest.mark.extra
@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_closed_files(model, closed):
    """What is for stderr does not go to stdout if stderr is closed, as with `maxjax inspect`."""
    number = {"stdout": 1, "stderr": 2}[closed]
    script = f"import os; os.close({number}); os.execv({MAXJAX[0]!r}, {MAXJAX!r} + {ARGUMENTS!r})"
    found = subprocess.run(
        [sys.executable, "-c", script.replace("MODEL", str(model))], capture_output=True, text=True
    )
    assert found.returncode == 0
    if closed == "stdout":
        assert found.stdout == "" and "sampling" in found.stderr
    else:
        assert found.stdout.count("\n") == 1 and "sampling" not in found.stdout


ARGUMENTS = [
    "generate", "--model", "MODEL", "--stats", "--stop", "\n", "--max-new-tokens", "2", "hello",
]  # fmt: skip

_PRESSED_WHILE_IMPORTING = """
import os, signal, sys
from maxjax.cli import model as cli_model

class Press:
    def find_spec(self, name, *_):
        if name == "jax":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Press())
try:
    cli_model.import_jax()
except KeyboardInterrupt:
    print("maxjax.engine.generate" in sys.modules)
"""
_PRESSED = """
import atexit, sys
import jax
from maxjax.cli import application as cli, generate

def interrupted(options):
    raise KeyboardInterrupt

atexit.register(print, "late")
generate.generate = interrupted
sys.argv = ["maxjax", "generate", "hi"]
sys.exit(cli.main())
"""


@pytest.mark.extra
@pytest.mark.parametrize(
    ("script", "result"),
    [(_PRESSED_WHILE_IMPORTING, (0, "True\n")), (_PRESSED, (130, ""))],
    ids=["while importing", "at work"],
)
def test_ctrl_c_does_not_crash_what_is_not_python(script, result):
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == result, found.stderr
