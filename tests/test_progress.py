"""Progress on stderr: what is counted, what draws it, and when nothing is drawn."""

import io
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import maxjax
from maxjax import progress
from maxjax.graph import DeviceRef


class Screen(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self):
        return True


class Drawn:
    """A stand-in for a bar, which records what it was asked to draw."""

    made: list["Drawn"] = []

    def __init__(self, stream):
        self.seen, self.is_closed = [], False
        Drawn.made.append(self)

    def draw(self, one):
        self.seen.append((one.what, one.done, one.total, one.note))

    def close(self):
        self.is_closed = True


def see(monkeypatch, stderr):
    """Makes progress use another stderr, as pytest replaces sys.stderr itself."""
    monkeypatch.setattr(progress, "sys", types.SimpleNamespace(stderr=stderr, modules=sys.modules))


@pytest.fixture
def screen(monkeypatch):
    """Makes stderr a terminal, and bars appear without a delay."""
    see(monkeypatch, screen := Screen())
    monkeypatch.setenv(progress.VARIABLE, "1")
    monkeypatch.setattr(progress, "DELAY", 0)
    monkeypatch.setattr(progress, "EVERY", 0.005)
    return screen


@pytest.fixture
def drawn(screen, monkeypatch):
    """The tasks that were drawn, as recorded by :class:`Drawn`."""
    monkeypatch.setattr(progress, "_drawer", Drawn)
    monkeypatch.setattr(Drawn, "made", [])
    return Drawn.made


def until(condition):
    """Waits until another thread has made a condition true."""
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def weights_file(path, count=3):
    """Writes a safetensors file of some float32 weights; returns the bytes of its tensors."""
    arrays = {f"layers.{i}.weight": np.ones((256, 64), np.float32) for i in range(count)}
    safetensors.numpy.save_file(arrays, path)
    return sum(array.nbytes for array in arrays.values())


def layers(count=3):
    return maxjax.nn.LayerList(
        maxjax.nn.Linear(64, 256, "float32", DeviceRef.CPU()) for _ in range(count)
    )


class Layers(maxjax.nn.Module):
    def __init__(self, stacked=False):
        super().__init__()
        self.layers = layers().stack() if stacked else layers()

    def __call__(self, x):
        return x


# --- the bar of tqdm ------------------------------------------------------------------------


def test_a_bar_reaches_its_end_and_goes_away(screen, capfd):
    with progress.task("loading a\x1b[1m", 1000) as one:
        one.add(400)
        until(lambda: " 40%" in screen.getvalue())
        one.note = "compiling f, XLA"
        until(lambda: "(compiling f, XLA)" in screen.getvalue())
        one.add(600)
        until(lambda: "100%" in screen.getvalue())
    shown = screen.getvalue()
    assert "400/1.00k" in shown and "\x1b[1m" not in shown
    assert shown.endswith("\r") and not shown.split("\r")[-2].strip()  # its line is empty again
    assert capfd.readouterr().out == ""


def test_without_a_size_it_is_a_line_with_the_seconds(screen):
    with progress.task("saving x") as one:
        one.began -= 3
        until(lambda: "saving x … 3.0 s" in screen.getvalue())


def test_an_error_leaves_no_broken_bar(screen):
    with pytest.raises(KeyError), progress.task("loading", 10) as one:
        one.add(3)
        until(lambda: "30%" in screen.getvalue())
        raise KeyError
    assert not screen.getvalue().split("\r")[-2].strip() and "100%" not in screen.getvalue()
    assert progress._shown is None
    assert not [t for t in threading.enumerate() if t.name == "maxjax-progress"]


def test_a_notebook_without_widgets_gets_an_output_that_ends_empty(screen, monkeypatch):
    display = pytest.importorskip("IPython.display")
    shown = []

    class Handle:
        def update(self, data, raw):
            shown.append(data["text/plain"])

    def show(data, raw, display_id):
        shown.append(data["text/plain"])
        return Handle()

    monkeypatch.setattr(display, "display", show)
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with progress.task("loading", 1000) as one:
        one.add(250)
        until(lambda: any(" 25%" in text for text in shown))
    with progress.task("saving") as one:
        until(lambda: "saving … 0.0 s" in shown)
    assert "loading: 100%" in "".join(shown) and shown[-1] == ""
    assert screen.getvalue() == ""


def test_a_screen_that_breaks_stops_nothing(screen):
    with progress.task("loading", 10) as one:
        screen.close()
        one.add(10)
        time.sleep(0.03)
    assert one.done == 10 and progress._shown is None


# --- when it is drawn -----------------------------------------------------------------------


def test_what_is_soon_over_is_never_drawn(drawn, monkeypatch):
    monkeypatch.setattr(progress, "DELAY", 0.5)
    with progress.task("loading", 10):
        pass
    assert not drawn


@pytest.mark.parametrize(
    ("variable", "terminal", "tested", "expected"),
    [
        (None, True, True, False),
        (None, True, False, True),
        (None, False, False, False),
        ("0", True, False, False),
        ("1", False, True, True),
    ],
)
def test_where_it_is_on(monkeypatch, variable, terminal, tested, expected):
    see(monkeypatch, Screen() if terminal else io.StringIO())
    if not tested:
        monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(progress.VARIABLE, variable)
    assert progress.is_on() is expected
    before = threading.active_count()
    with progress.task("loading", 10) as one:
        assert threading.active_count() == before + expected
        one.add(10)


def test_without_stderr_it_is_off(monkeypatch):
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    see(monkeypatch, None)
    assert not progress.is_on()


def test_of_several_processes_the_first_draws(screen, monkeypatch):
    from maxjax import heartbeat

    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    for process in (0, 1):
        service = heartbeat.Coordinator(None, process, 2)
        monkeypatch.setattr(heartbeat, "coordinator", lambda found=service: found)
        assert progress.is_on() is (process == 0)


def test_there_is_one_bar_at_a_time(drawn):
    with progress.task("converting", 10), progress.task("loading", 5) as inner:
        inner.add(5)
        until(lambda: drawn and drawn[0].seen)
    assert {what for one in drawn for what, *_ in one.seen} == {"converting"}
    with progress.task("saving"):
        until(lambda: len(drawn) == 2)
    assert all(one.is_closed for one in drawn)


# --- what is counted ------------------------------------------------------------------------


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("spread", [False, True])
def test_a_load_counts_the_bytes_of_its_file(drawn, tmp_path, stacked, spread):
    nbytes = weights_file(tmp_path / "model.safetensors")
    model = Layers(stacked)
    if spread:
        model.to(maxjax.make_mesh(model=8))
    counted = []
    add = progress.Task.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress.Task, "add", lambda one, n: (counted.append(n), add(one, n)))
        model.load_state_dict(maxjax.load_weights(tmp_path / "model.safetensors"))
    assert sum(counted) == nbytes  # piece by piece, not only at the end
    what, done, total, _ = drawn[-1].seen[-1]
    assert (what, done, total) == ("loading weights", nbytes, nbytes)


def test_maxjax_load_names_what_it_loads(drawn):
    maxjax.load("tiny")
    (only,) = drawn
    what, done, total, _ = only.seen[-1]
    assert what == "loading tiny" and done == total and total > 100_000


def test_threads_count_together(screen):
    with progress.task("counting", 8000) as one:

        def count():
            for _ in range(1000):
                one.add(1)

        threads = [threading.Thread(target=count) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert one.done == 8000


def test_saves_restores_and_conversions_are_counted(drawn, tmp_path, capfd):
    model = maxjax.init(Layers(), jax.random.key(0))
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    told = []
    maxjax.save_pretrained(model, tmp_path / "saved", progress=told.append)
    maxjax.checkpoint.convert(tmp_path / "saved", tmp_path / "c.safetensors")
    maxjax.checkpoint.save(tmp_path / "steps", model, state=jnp.ones(4))
    state = jax.ShapeDtypeStruct((4,), np.float32)
    maxjax.checkpoint.restore(tmp_path / "steps", model, state=state)
    ends = {one.seen[-1][0].split()[0]: one.seen[-1][1:3] for one in drawn if one.seen}
    last = {what: end for what, end in ends.items() if what != "compiling"}
    assert last["converting"] == (nbytes, nbytes)
    assert last["restoring"] == (nbytes + 16, nbytes + 16)
    assert last["saving"] in ((nbytes, nbytes), (0, None))  # of a directory, or of a step
    assert sum(told) >= nbytes
    assert capfd.readouterr().out == ""


def test_quantising_counts_what_it_has_read(drawn):
    model = maxjax.init(Layers(stacked=True), jax.random.key(0))
    maxjax.quantize(model, "q8_0")
    (end,) = [one.seen[-1] for one in drawn if "quantizing" in one.seen[-1][0]]
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    assert end[:3] == ("quantizing Layers", nbytes, nbytes)


def test_many_texts_are_counted_and_their_programs_named(drawn, capfd):
    model, tokenizer = maxjax.load("tiny")
    del drawn[:]
    # Uses shapes that no other test has compiled.
    texts = maxjax.generate(model, tokenizer, ["a", "b", "c"], max_new_tokens=3, batch_size=3)
    assert len(texts) == 3
    (only,) = drawn
    assert only.seen[-1][:3] == ("generating 3 texts", 3, 3)
    vectors = maxjax.embed(model, tokenizer, ["a", "b"], pooling="mean")
    assert vectors.shape[0] == 2
    assert drawn[-1].seen[-1][:3] == ("embedding 2 texts", 2, 2)
    assert capfd.readouterr().out == ""


# --- compilation ----------------------------------------------------------------------------


def test_a_compilation_is_a_line_with_its_stages(drawn):
    @jax.jit
    def function(x):
        time.sleep(0.05)  # while it is traced
        return jnp.sin(x) + 17.25

    with progress.compiling("function"):
        function(jnp.ones(3))
    (only,) = drawn
    assert only.seen[0][0] == "compiling function" and only.is_closed
    assert {note for *_, note in only.seen} <= {"tracing", "XLA"}
    with progress.compiling("function"):  # it is compiled
        function(jnp.ones(3))
    assert len(drawn) == 1


def test_a_compilation_inside_of_other_work_is_a_note_there(drawn):
    with progress.task("generating 2 texts", 2) as outer:
        with progress.compiling("prefill"):
            jax.jit(lambda x: jnp.cos(x) * 3.375)(jnp.ones(5))
            assert outer.note.startswith("compiling prefill, ")
        assert outer.note == ""
    assert len(drawn) <= 1


def test_a_stream_shows_no_compilation_behind_its_text(drawn):
    model, tokenizer = maxjax.load("tiny")
    del drawn[:]
    pieces = maxjax.stream(model, tokenizer, "What is 3 + 4?", max_new_tokens=4)
    next(pieces)
    before = len(drawn)
    list(pieces)
    assert len(drawn) == before
