"""`maxjax chat`: with stdin as a pipe in this process, and once in a terminal of its own."""

import functools
import json
import os
import re
import select
import subprocess
import sys
import time

import pytest

import maxjax
from maxjax.engine.batching.scheduler import Scheduler
from tests.engine.test_pictures import picture
from tests.engine.test_pictures import write_model as write_llava

from .models import in_process, write_model

N = ("--max-new-tokens", 6)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def chat(model):
    return functools.partial(in_process, "chat", "--model", model, *N)


@pytest.fixture(scope="module")
def said(model):
    """The answers of a Conversation to some turns."""
    loaded = maxjax.load(model)

    def answers(*turns, messages=()):
        conversation = maxjax.Conversation(*loaded, messages, max_new_tokens=6)
        return ["".join(conversation.say(turn)) for turn in turns]

    return answers


def test_each_line_is_a_turn(chat, said):
    first, second = said("hi", "and then?")
    assert chat(stdin="hi\n\n  \nand then?\n") == (0, f"{first}\n{second}\n", "")
    assert chat(stdin="hi\r\nand then?") == (0, f"{first}\n{second}\n", "")
    assert chat(stdin="") == (0, "", "")


def test_reset_and_quit(chat, said):
    (answer,) = said("hi")
    stdin = "hi\n/reset\nhi\n/quit\nhi\n"
    assert chat(stdin=stdin) == (0, f"{answer}\n{answer}\n", "")


def test_save_and_load(chat, said, tmp_path):
    file = tmp_path / "a chat.json"
    code, out, err = chat("--system", "be", stdin=f"hi\n/save {file}\n")
    assert (code, err) == (0, "")
    system = {"role": "system", "content": "be"}
    first, second = said("hi", "more", messages=[system])
    assert json.loads(file.read_text()) == [
        system,
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": first},
    ]
    (fresh,) = said("more", messages=[system])
    # The system message stays when it begins anew.
    assert chat("--load", file, stdin=f"more\n/reset\nmore\n/save {file}\n")[:2] == (
        0,
        f"{second}\n{fresh}\n",
    )
    assert len(json.loads(file.read_text())) == 3


def test_a_failed_turn_does_not_end_it(chat, said, tmp_path):
    first, second = said("hi", "/etc")
    other = tmp_path / "kept"
    other.write_text("{}")
    stdin = f"hi\n{'x' * 300}\n/what\n/save\n/save {other}\n/save {tmp_path}\n /etc\n/etc/passwd\n"
    code, out, err = chat(stdin=stdin)
    assert code == 1 and out.split("\n")[:2] == [first, second] and out.count("\n") == 3
    lines = err.splitlines()
    assert len(lines) == 5 and all(line.startswith("maxjax: ") for line in lines), err
    assert "the model's context is 256" in lines[0]
    assert "no command /what" in lines[1] and "needs a FILE" in lines[2]
    assert "not a saved chat" in lines[3] and other.read_text() == "{}"
    assert "unexpected" not in err


def test_a_template_that_refuses(chat, tmp_path):
    file = tmp_path / "bad.json"
    file.write_text('[{"role": "bad", "content": ""}]')
    code, out, err = chat("--load", file, stdin="hi\n/reset\nhi\n")
    assert code == 1 and "no such role" in err and out.count("\n") == 1


def test_a_full_context_leaves_the_oldest_out(chat, said, tmp_path):
    """And says so; what was said is still saved, and the system's message stays."""
    file = tmp_path / "chat.json"
    turns = [c * 100 for c in "abc"]
    code, out, err = chat("--system", "be", stdin="\n".join([*turns, f"/save {file}"]))
    assert (code, out.count("\n")) == (0, 3)
    lines = err.splitlines()
    assert lines and set(lines) == {
        "(the context is full: the oldest 2 messages are left out from here on)"
    }
    messages = json.loads(file.read_text())
    assert [m["content"] for m in messages if m["role"] == "user"] == turns
    assert messages[0] == {"role": "system", "content": "be"}


def test_the_largest_length_in_the_files(tmp_path):
    """Each byte of the prompt that the template makes is a token."""
    directory = write_model(tmp_path / "short", max_length=20)
    prompt = len("u:hi\na:")
    code, out, err = in_process("chat", "--model", directory, "--stats", stdin="hi\n")
    assert code == 0 and f"after {20 - prompt} tokens: the largest length was reached" in err


def test_variables_of_the_template(chat, said, tmp_path):
    model = write_model(tmp_path / "m", template="{{ messages[0].content }}{{ effort }}")
    arguments = (
        "chat",
        "--model",
        model,
        *N,
        "--template-arg",
        "effort=7",
        "--template-arg",
        "x=1",
    )
    code, out, err = in_process(*arguments, stdin="hi\n")
    assert code == 0 and "x has no effect" in err
    loaded = maxjax.load(model)
    assert out == maxjax.generate(*loaded, "hi7", max_new_tokens=6, chat=False) + "\n"


def test_bytes_that_are_no_text(chat, said):
    (answer,) = said("hi")
    code, out, err = chat(stdin="hi\n\udcff\n")
    assert (code, out) == (1, f"{answer}\n") and "valid" in err and "unexpected" not in err


def test_an_interrupt_before_the_first_word_takes_the_turn_back(chat, said, monkeypatch):
    (answer,) = said("hi")
    calls, read = [], Scheduler.read

    def interrupted(self):
        calls.append(self)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return read(self)

    monkeypatch.setattr(Scheduler, "read", interrupted)
    assert chat(stdin="never said\nhi\n") == (0, f"{answer}\n", "(interrupted)\n")


def test_help_and_statistics_are_on_stderr(chat):
    code, out, err = chat("--stats", stdin="/help\nhi\n")
    assert code == 0 and out.count("\n") == 1
    assert "/save FILE" in err and "sampling    greedy" in err


def test_nan_is_told_of(tmp_path):
    broken = write_model(tmp_path / "broken", nan=True)
    stdin = f"hi\n/save {tmp_path / 'chat'}\n"
    code, out, err = in_process("chat", "--model", broken, stdin=stdin)
    assert (code, out) == (1, "") and "--debug-nans names the layer" in err
    assert json.loads((tmp_path / "chat").read_text()) == []  # as if it had not been said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ('{"role": "user"}', "a list of objects with role and content"),
        ('["hi"]', "a list of objects with role and content"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_what_is_no_saved_chat(chat, tmp_path, text, says):
    file = tmp_path / "c.json"
    file.write_text(text)
    code, out, err = chat("--load", file)
    assert (code, out) == (1, "") and says in err and err.count("\n") == 1


def test_what_cannot_be_chatted_with(chat, tmp_path, minilm):
    file = tmp_path / "c.json"
    file.write_text('[{"role": "system", "content": "a"}]')
    assert "has a system message" in chat("--load", file, "--system", "b")[2]
    assert "c.jsonx" in chat("--load", f"{file}x")[2]
    plain = write_model(tmp_path / "plain", template=None)
    for model, says in ((plain, "no chat template"), (minilm, "not a language model")):
        found = in_process("chat", "--model", model, stdin="hi\n")
        assert found[:2] == (1, "") and says in found[2]


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


def test_pictures_come_with_the_next_message(llava, tmp_path, monkeypatch):
    """Each is encoded once in a chat; a saved chat has them, and goes on after the files are gone."""
    vision = maxjax.load(llava)
    encoded, encode = [], type(vision[0].vision).encode
    counted = lambda self, *args: encoded.append(1) or encode(self, *args)
    monkeypatch.setattr(type(vision[0].vision), "encode", counted)
    chat = functools.partial(in_process, "chat", "--model", llava, *N)
    file = tmp_path / "chat.json"
    stdin = f"/image {llava}/0.png\n/image {llava}/1.png\nw1\nw2 w3\n/save {file}\n"
    code, out, err = chat(stdin=stdin)
    assert code == 0 and len(encoded) == 2
    assert "(attached to the next message: 0.png, 1.png)" in err
    parts = [{"type": "image", "image": picture(seed)} for seed in range(2)]
    conversation = maxjax.Conversation(*vision, max_new_tokens=6)
    message = {"role": "user", "content": [*parts, {"type": "text", "text": "w1"}]}
    expected = ["".join(conversation.say(said)) for said in (message, "w2 w3")]
    assert out == "".join(f"{answer}\n" for answer in expected)
    saved = json.loads(file.read_text())
    assert [len(one["content"]) for one in saved[:1]] == [3] and saved[2]["content"] == "w2 w3"
    urls = [part["image_url"]["url"] for part in saved[0]["content"][:2]]
    assert all(url.startswith("data:image/png;base64,") for url in urls)
    third = "".join(conversation.say("w4"))
    assert chat("--load", file, stdin="w4\n")[:2] == (0, f"{third}\n")


def test_pictures_that_are_not_attached(llava, tmp_path):
    chat = functools.partial(in_process, "chat", "--model", llava, *N)
    image = lambda name: f"/image {llava / name}\n"
    code, out, err = chat(stdin=image("none.png") + image("broken.png") + image("config.json"))
    assert (code, out) == (1, "")
    for line, says in zip(err.splitlines(), ["no such file", "decoded", "format"], strict=True):
        assert says in line
    # Taken back, or with the chat.
    file = tmp_path / "chat.json"
    stdin = f"{image('0.png')}/image\nw1\n{image('0.png')}/reset\nw1\n/save {file}\n"
    code, out, err = chat(stdin=stdin)
    first, second = out.splitlines()
    assert code == 0 and first == second and "(1 taken back)" in err
    assert json.loads(file.read_text())[0]["content"] == "w1"


def test_a_picture_stays_attached_until_a_message_takes_it(llava, tmp_path):
    file = tmp_path / "chat.json"
    stdin = f"/image {llava}/0.png\n{'w1 ' * 300}\nw2\n/save {file}\n"
    code, out, err = in_process("chat", "--model", llava, *N, stdin=stdin)
    assert code == 1 and out.count("\n") == 1 and "the model's context is 256" in err
    assert [part["type"] for part in json.loads(file.read_text())[0]["content"]] == [
        "image_url",
        "text",
    ]


def test_a_model_of_text_takes_no_pictures(chat, llava):
    code, out, err = chat(stdin=f"/image {llava}/0.png\n")
    assert (code, out) == (1, "") and "Llama takes text alone" in err


# --- in a terminal ------------------------------------------------------------------------

# The first terminal that the leader of a session opens is the one whose Ctrl-C reaches it.
_LAUNCH = """
import os, sys
terminal = os.open(sys.argv[1], os.O_RDWR)
for number in range(3):
    os.dup2(terminal, number)
os.execv(sys.executable, [sys.executable, "-m", "maxjax", *sys.argv[2:]])
"""


class Terminal:
    """A program in a terminal of its own, as somebody sees it who types."""

    def __init__(self, *arguments, kind="dumb"):
        self._master, slave = os.openpty()
        command = [sys.executable, "-c", _LAUNCH, os.ttyname(slave), *map(str, arguments)]
        environment = os.environ | {"TERM": kind}
        self.process = subprocess.Popen(command, start_new_session=True, env=environment)
        self._slave = slave  # open until the end, or what the program wrote last is lost

    def until(self, pattern):
        """What is shown up to a pattern, which must come."""
        shown = ""
        while not re.search(pattern, shown):
            ready, _, _ = select.select([self._master], [], [], 120)
            assert ready, f"{pattern!r} did not come after {shown!r}"
            shown += os.read(self._master, 1 << 16).decode(errors="replace")
        return shown

    def types(self, text, after=0.3):
        # A Ctrl-C between readline's prompt and its waiting is answered with the next key only.
        time.sleep(after)
        os.write(self._master, text.encode())

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)


def test_in_a_terminal(tmp_path):
    directory = write_model(tmp_path / "m", context=1 << 17)
    file = tmp_path / "chat.json"
    terminal = Terminal("chat", "--model", directory, "--max-new-tokens", 100_000)
    try:
        assert "context 131,072 tokens. /help" in terminal.until("> $")
        terminal.types("/one\r two\r\rthree\r")  # what is pasted is one turn
        # The answer has begun, and what was shown before it is gone.
        terminal.until(r"three\r\n(\rreading the prompt[^\r]*\r +\r)?[^\s]")
        terminal.types("\x03", after=0)  # ends it alone
        assert "Traceback" not in terminal.until("\n> $")
        terminal.types("\x03")
        assert "once more" in terminal.until("\n> $")
        terminal.types(f"/save {file}\n")  # it is still there, and forgets the Ctrl-C
        terminal.until("\n> $")
        terminal.types("\x03")
        terminal.until("once more.*\n> $")
        terminal.types("\x03")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.close()
    user, assistant = json.loads(file.read_text())
    assert user == {"role": "user", "content": "/one\n two\n\nthree"}
    assert assistant["role"] == "assistant" and 0 < len(assistant["content"]) < 90_000


@pytest.mark.extra
@pytest.mark.parametrize(
    ("kind", "paste"),
    [
        # As terminals say it that readline has asked to, and as others do.
        ("xterm", "\x1b[200~/one\r two\r\rthree\x1b[201~"),
        ("dumb", "/one\r two\r\rthree"),
    ],
)
def test_what_is_pasted_is_one_turn(model, tmp_path, kind, paste):
    file = tmp_path / "chat.json"
    terminal = Terminal("chat", "--model", model, *N, kind=kind)
    try:
        terminal.until("> $")
        for text in (paste, "one", f"/save {file}"):
            terminal.types(f"{text}\r")
            terminal.until("> $")
        terminal.types("/quit\r")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.close()
    said = [m["content"] for m in json.loads(file.read_text()) if m["role"] == "user"]
    assert said == ["/one\n two\n\nthree", "one"]
