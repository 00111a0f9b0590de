"""The engine of scripts/fuzz.py on safetensors files and indexes, and that it sees what is wrong.

The mutations of the other formats are in test_gguf.py, test_pytorch.py and test_npz.py.
"""

import importlib.util
import os
import signal
import sys
import time
import zipfile
from itertools import islice
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from maxjax.errors import CheckpointError, CheckpointFormatError
from tests.storage.pytorch.oracle import keep_reading

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "fuzz.py"
HERE = "tests.storage.test_fuzz"
# Of `.ci/full` besides: 50,000 of each format by the script itself.
MUTATIONS = [400, pytest.param(3000, marks=pytest.mark.extra)]


def _script() -> ModuleType:
    """The script as a module."""
    found = importlib.util.spec_from_file_location("maxjax_fuzz", SCRIPT)
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    sys.modules["maxjax_fuzz"] = module  # dataclasses look their module up
    path = list(sys.path)
    try:
        found.loader.exec_module(module)
    finally:
        sys.path[:] = path
    return module


fuzz = _script()


@pytest.fixture(autouse=True, scope="module")
def parts_of_the_index(tmp_path_factory):
    """What torch reads from the files that the index is of, for the child: it may have no torch."""
    for name, content in fuzz.index_seeds()[-1].beside.items():
        path = tmp_path_factory.mktemp("parts") / name
        path.write_bytes(content)
        keep_reading(path)


@pytest.mark.parametrize("format", ["safetensors", "index"])
@pytest.mark.parametrize("count", MUTATIONS)
def test_damaged_files_are_refused_cleanly_or_read_as_the_reference_does(format, count):
    result = fuzz.Fuzz(format, count).run()
    counts = result.counts
    assert not result.violations
    assert counts["mutations"] == count == counts["refused"] + counts["accepted"]
    assert 0.01 * count < counts["accepted"] < 0.5 * count
    assert counts["compared"] > 0.9 * counts["accepted"]
    assert not counts["reference failed"]


@pytest.mark.parametrize("format", sorted(fuzz.FORMATS))
def test_the_same_numbers_give_the_same_files(format):
    first, second = (
        [(good.name, good.wrap(damaged)) for good, damaged in fuzz.damaged_files(format, 60, 5)]
        for _ in range(2)
    )
    assert first == second and len(first) == 60
    others = [good.wrap(damaged) for good, damaged in fuzz.damaged_files(format, 60, 6)]
    assert [content for _, content in first] != others


# --- readers with a fault: the engine must see each, and go on behind it ------------------------

calls = 0


def _third() -> bool:
    """Whether this is the third call in this process; the first is of a file of its own."""
    global calls
    calls += 1
    return calls == 3


def _refuse(path: Path):
    raise CheckpointFormatError("refused", path=str(path))


def crashing(path: Path):
    if _third():
        os.kill(os.getpid(), signal.SIGSEGV)
    _refuse(path)


def exiting(path: Path):
    if _third():
        os._exit(7)
    _refuse(path)


def hanging(path: Path):
    if _third():
        time.sleep(60)
    _refuse(path)


def growing(path: Path):
    if _third():
        np.ones(40_000_000, np.uint8)  # gone again when the call ends
    _refuse(path)


def reserving(path: Path):
    """More than the address space that a child has; none of it is ever touched."""
    if _third():
        np.empty(1 << 33, np.uint8)
    _refuse(path)


def unclean(path: Path):
    if _third():
        raise IndexError("out of range")
    _refuse(path)


def nameless(path: Path):
    if _third():
        raise CheckpointFormatError("refused", path="elsewhere")
    _refuse(path)


class Lines(CheckpointError):
    def __str__(self) -> str:
        return f"{self.path}:\nrefused"


def two_lines(path: Path):
    if _third():
        raise Lines("refused", path=str(path))
    _refuse(path)


def changing(path: Path):
    """Reads well, and then changes a value of what has any."""
    table, arrays = fuzz.read_checkpoint(path)
    for array in arrays.values():
        array.reshape(-1).view(np.uint8)[:1] ^= 1
    return table, arrays


def forgetting(path: Path):
    table, arrays = fuzz.read_checkpoint(path)
    return table, dict(islice(arrays.items(), 1, None))


# What it is called, what is said of it, and how many files of six show it.
PLANTED = {
    "crashing": ("crash", "SIGSEGV", 2),
    "exiting": ("crash", "exit 7", 2),
    "hanging": ("hang", "no end", 2),
    "growing": ("growth", "MB", 1),
    "reserving": ("unclean", "MemoryError", 1),
    "unclean": ("unclean", "IndexError: out of range", 1),
    "nameless": ("unclean", "elsewhere", 1),
    "two_lines": ("unclean", "in one line", 1),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("reader", PLANTED)
def test_a_faulty_reader_is_seen(reader):
    kind, says, times = PLANTED[reader]
    run = fuzz.Fuzz("safetensors", 6, 0, f"{HERE}:{reader}", 1.0, 30_000_000)
    result = run.run()
    # Every process meets the fault at its third file, and the next begins behind it.
    assert [number for number, _ in result.violations] == [2, 5][:times]
    for _, what in result.violations:
        assert what.startswith(f"{kind}: ") and says in what
    assert (result.counts["mutations"], result.counts[kind]) == (6, times)
    told = {"growing", "nameless", "two_lines"}  # refused all the same
    assert result.counts["refused"] == 6 - (0 if reader in told else times)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("format", "reader"),
    # Of damaged PyTorch files only torch itself can say what they hold.
    [
        pytest.param(format, "changing", marks=[pytest.mark.oracle] * (format == "pytorch"))
        for format in sorted(fuzz.FORMATS)
    ]
    + [("safetensors", "forgetting"), ("gguf", "forgetting"), ("npz", "forgetting")],
)
def test_other_values_than_those_of_the_reference_are_seen(format, reader):
    result = fuzz.Fuzz(format, 120, 0, f"{HERE}:{reader}").run()
    disagreements = [what for _, what in result.violations]
    assert disagreements and all(what.startswith("disagreement: ") for what in disagreements)
    assert len(disagreements) > 0.5 * result.counts["accepted"]


def test_a_wrong_sum_that_passes_is_seen(tmp_path):
    """Of both kinds of archives, also where the reference does not read the file at all."""
    from tests.storage.numpy import corpus as npz_corpus
    from tests.storage.pytorch import corpus as pytorch_corpus

    npz, torch = tmp_path / "m.npz", tmp_path / "m.pt"
    npz.write_bytes(
        npz_corpus.flipped(npz_corpus.BASIC, npz_corpus.BASIC.index(npz_corpus.A.tobytes()))
    )
    torch.write_bytes(pytorch_corpus.FLIPPED)
    with pytest.raises(AssertionError, match="wrong CRC"):
        fuzz.npz_agrees(npz, None, {})
    with pytest.raises(zipfile.BadZipFile, match="CRC"):
        fuzz.pytorch_agrees(torch, None, {})


def test_a_reader_that_cannot_start_is_an_error(capfd):
    with pytest.raises(RuntimeError, match="before it read a file"):
        fuzz.Fuzz("safetensors", 4, 0, f"{HERE}:no_such_reader").run()
    assert "no_such_reader" in capfd.readouterr().err


def test_every_refusal_has_a_time():
    """How long it took is for the script to say; here, that it looks at every case."""
    from tests.storage.index_corpus import INDEX

    found = fuzz.refusals("index")
    refused = [case.name for case in INDEX if case.error and case.name != "is_directory"]
    assert [name for _, name, _ in found] == refused
    assert all(seconds > 0 for seconds, _, _ in found)


# Of the hostile files of scripts/hostile_files.py some that cost little; `.ci/full` opens all of them.
CHEAP = (
    "safetensors (inspect): marks", "tokenizer.json: a charsmap of 4 GiB", "tekken.json: a size of 2^60",
    "tokenizer.model: a length of 2^60", "special_tokens_map.json: a list", "pt: a text of 2^31",
    "npy: operators", "index: marks", "index: a path outside", "maxjax_digests.json (verify): a header of 2^60",
    "path: a tokenizer of a long name", "gguf table: a count of 2^63",
)  # fmt: skip


def test_hostile_files_end_in_an_error_with_a_name():
    """In a process of their own: one that dies by a signal would end this one too."""
    found = {name: wrong for name, *_, wrong in fuzz.hostile(CHEAP.__contains__)}
    assert found.keys() == set(CHEAP)
    # How long they took and what they needed depends on what else runs; .ci/full looks at it.
    assert not {name: w for name, w in found.items() if w not in ("", "too long", "too large")}
