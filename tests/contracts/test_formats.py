"""The contracts that hold of every format of checkpoints: each test runs over the rows of ``FORMATS``."""

import contextlib
import gc
import os
import re
import shutil
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from maxjax.errors import (
    CheckpointChangedError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointIncompleteError,
    CheckpointLimitError,
    CheckpointMissingError,
    CheckpointTruncatedError,
    CheckpointUnsafeError,
)
from maxjax.storage import open_checkpoint
from scripts.fuzz import forget_peak, resident
from scripts.save_trials import Server, strays
from tests.contracts.formats import (
    FORMATS,
    SHAPE,
    Row,
    Tensors,
    differences,
    every_kind,
    read,
    two,
)
from tests.storage.watch import snapshot, watched

pytestmark = pytest.mark.usefixtures("few_objects")

# Errors of a number that cannot be; of an array of orbax whose shape is too large, chunks are missing.
IMPOSSIBLE = (
    CheckpointCorruptError, CheckpointFormatError, CheckpointLimitError, CheckpointMissingError,
    CheckpointTruncatedError, CheckpointUnsafeError,
)  # fmt: skip
SECONDS, MEMORY = 1.0, 200_000_000
ROWS = pytest.mark.parametrize("row", FORMATS, ids=str)
SAVED = pytest.mark.parametrize("row", [row for row in FORMATS if row.save], ids=str)
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def write(row: Row, directory: Path, tensors: Tensors) -> Path:
    """The path of a checkpoint that the format's library writes into a new directory."""
    directory.mkdir()
    row.write(directory / row.path, tensors)
    return directory / row.path


def files_of(path: Path) -> list[Path]:
    """The files of a checkpoint in a directory of its own."""
    return sorted(one for one in path.parent.rglob("*") if one.is_file())


def errors_of(error: CheckpointError, path: Path) -> list[str]:
    """What is wrong with an error about a checkpoint: it is one line, and names the file."""
    text = str(error)
    named = str(path.parent) in text and error.path is not None
    return [f"{text!r} does not name the file"] * (not named) + [f"{text!r}"] * ("\n" in text)


def fail_with(wrong: list[str]) -> None:
    """Fails with the first of what is wrong: pytest takes minutes to show all of a long list."""
    if wrong:
        pytest.fail(f"{len(wrong)} are wrong, among them:\n" + "\n".join(wrong[:20]))


# --- values -------------------------------------------------------------------------------------


@ROWS
def test_maxjax_reads_what_the_library_wrote(row: Row, tmp_path: Path):
    for number, tensors in enumerate(every_kind(row)):
        path = write(row, tmp_path / str(number), tensors)
        assert not differences(row.load(path), tensors, row.is_single), "the row's own library"
        assert not differences(read(path), tensors, row.is_single)
        assert not differences(read(path, verify=True), tensors, row.is_single)


@SAVED
def test_the_library_reads_what_maxjax_wrote(row: Row, tmp_path: Path):
    assert row.save is not None
    (tensors,) = every_kind(row)
    row.save(tmp_path / row.path, tensors)
    assert not differences(row.load(tmp_path / row.path), tensors)
    assert not differences(read(tmp_path / row.path, verify=True), tensors)


# --- opening ------------------------------------------------------------------------------------


def bytes_read() -> int:
    """Bytes that this process has read from files so far, by any library."""
    text = Path("/proc/self/io").read_text()
    return int(text.split("rchar:")[1].split()[0])


@LINUX
@ROWS
def test_opening_reads_no_data(row: Row, tmp_path: Path):
    """Of a checkpoint four times as large, opening reads as much; and reading a tensor, that tensor."""
    opened = []
    for rows in (1024, 4096):
        tensors = two(row, shape=(rows, 600))
        path = write(row, tmp_path / f"{rows}", tensors)
        nbytes = tensors["a"].array.nbytes
        read(path)  # which imports what the format needs
        start = bytes_read()
        with open_checkpoint(path) as table:
            shapes = [(one.dtype.name, one.shape) for one in table.entries.values()]
            after = bytes_read()
            opened.append(after - start)
            assert shapes == [("float32", (rows, 600))] * len(tensors)
            assert str(path.parent) not in Path("/proc/self/maps").read_text(), "the file is mapped"
            after = bytes_read()
            table.read(next(iter(table.entries)))
            assert nbytes <= bytes_read() - after < 1.2 * nbytes
    assert abs(opened[1] - opened[0]) < 10_000


@ROWS
def test_opening_and_reading_write_nothing(row: Row, tmp_path: Path):
    path = write(row, tmp_path / "c", two(row))
    before = snapshot(tmp_path)
    with watched() as acts:
        read(path)
        read(path, verify=True)
    assert not acts
    assert snapshot(tmp_path) == before


# --- damage -------------------------------------------------------------------------------------


def places(size: int, count: int) -> list[int]:
    """Sizes that a file is cut to: its ends, and others spread evenly."""
    ends = {0, 1, 7, 8, size - 1, size // 2}
    return sorted(at for at in ends | set(range(0, size, -(-size // count))) if 0 <= at < size)


def open_files(place: Path) -> list[str]:
    """The files below a directory that this process has open, where the system tells."""
    gc.collect()
    numbers = Path("/proc/self/fd")
    found = []
    for number in numbers.iterdir() if numbers.is_dir() else ():
        with contextlib.suppress(OSError):  # closed meanwhile, as that of the listing is
            found.append(os.readlink(number))
    return [file for file in found if file.startswith(f"{place}/")]


@ROWS
def test_a_cut_file_is_one_error(row: Row, tmp_path: Path):
    tensors = two(row)
    path = write(row, tmp_path / "c", tensors)
    read(path)
    files, wrong = files_of(path), []
    for file in files:
        content, name = file.read_bytes(), str(file.relative_to(tmp_path / "c"))
        for size in places(len(content), 20 if len(files) < 4 else 4):
            os.truncate(file, size)
            try:
                found = read(path)
            except CheckpointError as error:
                right = isinstance(error, row.cut) and error.path == str(file)
                if not right or errors_of(error, path):
                    wrong.append(f"{name} cut to {size}: {type(error).__name__}: {error}")
            except Exception as error:
                wrong.append(f"{name} cut to {size}: {type(error).__name__}: {error}")
            else:
                if not re.search(row.unneeded, name) or differences(found, tensors, row.is_single):
                    wrong.append(f"{name} cut to {size}: it was read")
            file.write_bytes(content)
    fail_with(wrong)
    assert not open_files(tmp_path)
    assert not differences(read(path), tensors, row.is_single)


@ROWS
def test_a_missing_file_is_one_error(row: Row, tmp_path: Path):
    tensors, wrong = two(row), []
    path = write(row, tmp_path / "c", tensors)
    read(path)
    for file in files_of(path):
        content, name = file.read_bytes(), str(file.relative_to(tmp_path / "c"))
        file.unlink()
        try:
            found = read(path)
        except (CheckpointMissingError, CheckpointIncompleteError) as error:
            if file.name not in str(error) or errors_of(error, path):
                wrong.append(f"{name}: {error}")
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
        else:
            if not re.search(row.optional, name) or differences(found, tensors, row.is_single):
                wrong.append(f"{name}: it was read")
        file.write_bytes(content)
    fail_with(wrong)


@ROWS
def test_an_impossible_number_is_one_error_at_once(row: Row, tmp_path: Path):
    tensors = two(row)
    path = write(row, tmp_path / "c", tensors)
    read(path)
    wrong, count = [], 0
    tracemalloc.start()
    try:
        for what, file, content in list(row.damage(path)):
            good, count = file.read_bytes(), count + 1
            file.write_bytes(content)
            wrong += [f"{what}: {one}" for one in trial(row, path, tensors, what)]
            file.write_bytes(good)
    finally:
        tracemalloc.stop()
    fail_with(wrong)
    assert count > 15, "nothing was damaged"
    assert not open_files(tmp_path)
    assert not differences(read(path), tensors, row.is_single)


def trial(row: Row, path: Path, tensors: Tensors, what: str) -> Iterator[str]:
    """What is wrong with reading a damaged file: no error, or one that costs time or memory."""
    forget_peak()
    tracemalloc.reset_peak()
    seconds, resting = time.process_time(), resident("VmRSS")
    asked, _ = tracemalloc.get_traced_memory()
    try:
        found = read(path)
    except IMPOSSIBLE as error:
        yield from errors_of(error, path)
    except Exception as error:
        yield f"{type(error).__name__}: {error}"
    else:
        if not re.search(row.harmless, what) or differences(found, tensors, row.is_single):
            yield "it was read"
    seconds = time.process_time() - seconds
    grown = max(resident("VmHWM") - resting, tracemalloc.get_traced_memory()[1] - asked)
    if seconds > SECONDS:
        yield f"{seconds:.1f} s"
    if grown > MEMORY:
        yield f"{grown / 1e6:.0f} MB"


# --- changed while it is open -------------------------------------------------------------------


def replace_files(path: Path, other: Path) -> None:
    """Puts the files of another checkpoint in the place of one's, one by one."""
    for file in files_of(other):
        place = path.parent / file.relative_to(other.parent)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, place)


def replace_directory(path: Path, other: Path) -> None:
    """Puts the directory of another checkpoint in the place of one's."""
    os.rename(path.parent, path.parent.with_name("old"))
    os.rename(other.parent, path.parent)


def cut(path: Path, other: Path) -> None:
    for file in files_of(path):
        os.truncate(file, file.stat().st_size // 3)


def write_over(path: Path, other: Path) -> None:
    """Changes a byte in the last third of each file, where a tensor is."""
    for file in files_of(path):
        content = bytearray(file.read_bytes())
        content[len(content) * 5 // 6] ^= 16
        with open(file, "r+b") as opened:
            opened.write(content)


def delete(path: Path, other: Path) -> None:
    shutil.rmtree(path.parent)


# Of the same shape, so that the header is the same; and of another, so that it is not.
OTHERS = {"values": SHAPE, "header": (16, 33), "directory": (16, 33)}
REPLACES = {"values": replace_files, "header": replace_files, "directory": replace_directory}
CHANGES = {**REPLACES, "cut": cut, "write_over": write_over, "delete": delete}
CHANGED = (
    CheckpointChangedError, CheckpointMissingError, CheckpointTruncatedError, CheckpointCorruptError,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@ROWS
def test_changed_while_open(row: Row, change: str, tmp_path: Path):
    """What is read is what was there when it was opened, or there is an error."""
    tensors = two(row)
    path = write(row, tmp_path / "c", tensors)
    other = write(row, tmp_path / "other", two(row, 7, OTHERS.get(change, SHAPE)))
    for file in files_of(path):  # so that a change shows in its time
        os.utime(file, ns=(10**18, 10**18))
    with open_checkpoint(path) as table:
        first, *_ = table.entries
        table.read(first)
        CHANGES[change](path, other)
        outcomes = set()
        for names in ([first], list(table.entries)):
            try:
                arrays = table.read_many(names)
            except CHANGED as error:
                assert not errors_of(error, path)
                outcomes.add("error")
                continue
            outcomes.add("read")
            for name, array in arrays.items():
                wanted = tensors[name if len(table.entries) > 1 else "a"].array
                assert array.tobytes() == wanted.tobytes()
    assert "error" in outcomes or change not in ("cut", "write_over")


_act: Callable[[str], None] | None = None
_hooked = False


def _hook(event: str, arguments: tuple) -> None:
    if event == "open" and _act is not None:
        _act(str(arguments[0]))


class Openings:
    """Counts the files below a directory that are opened, and acts just before number ``at`` (from 1 on)."""

    def __init__(self, directory: Path, at: int, act: Callable[[], None]):
        self.count, self.at, self.act = 0, at, act
        # A file of a set is opened by its name, from its open directory.
        self.directory, self.names = str(directory), {one.name for one in directory.rglob("*")}

    def __enter__(self) -> "Openings":
        global _act, _hooked
        if not _hooked:  # an audit hook stays for the life of the process
            sys.addaudithook(_hook)
            _hooked = True
        _act = self.see
        return self

    def __exit__(self, *exception: object) -> None:
        global _act
        _act = None

    def see(self, path: str) -> None:
        if path.startswith(self.directory) or path in self.names:
            self.count += 1
            if self.count == self.at:
                self.act()


@pytest.mark.parametrize("change", REPLACES)
@ROWS
def test_replaced_while_it_is_opened(row: Row, change: str, tmp_path: Path):
    """Just before each file that is opened: all of the result is of one checkpoint."""
    old, new = two(row), two(row, 7, OTHERS[change])
    sources = write(row, tmp_path / "a", old), write(row, tmp_path / "b", new)
    for number in range(1, 100):
        place = tmp_path / str(number)
        for source, name in zip(sources, "cd", strict=True):
            shutil.copytree(source.parent, place / name)
        path, other = place / "c" / row.path, place / "d" / row.path
        with Openings(place / "c", number, partial(REPLACES[change], path, other)) as seen:
            try:
                found = read(path)
            except (CheckpointChangedError, CheckpointMissingError) as error:
                assert not errors_of(error, path)
                continue
        assert [] in (differences(found, one, row.is_single) for one in (old, new))
        if seen.count < number:
            break
    assert 1 < number < 99, "nothing was ever opened, or it never ended"


# --- killed -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("tests.contracts.formats") as found:
        yield found


def killed_save(server: Server, row: Row, path: Path, seed: int, at: int) -> int:
    """Saves in another process that is killed in place of a call; the number of calls, 0 if it was."""
    server.start(job="save", row=row.name, path=str(path), seed=seed, n=at)
    return max(message.get("calls", 0) for message in server.end())


@pytest.mark.skipif(
    sys.platform != "linux" or not (shutil.which("cc") or shutil.which("gcc")),
    reason="needs Linux and a C compiler",
)
@SAVED
def test_a_killed_save_leaves_the_old_file_or_the_new(row: Row, server: Server, tmp_path: Path):
    assert row.save is not None
    path = tmp_path / "c" / row.path
    path.parent.mkdir()
    row.save(path, two(row, 1))
    calls = killed_save(server, row, path, 2, 0)
    assert not differences(read(path), two(row, 2)) and calls > 5
    here = path if path.is_dir() else path.parent
    seed, seen = 2, set()
    for at in places_of_kills(calls, 5 if row.name.startswith("orbax") else 12):
        killed = not killed_save(server, row, path, seed + 1, at)
        before = snapshot(here)
        found = read(path, verify=True)
        assert snapshot(here) == before, "reading wrote"
        is_old, is_new = (not differences(found, two(row, k)) for k in (seed, seed + 1))
        assert is_old != is_new, f"killed at call {at} of {calls}: mixed"
        assert killed or is_new
        seen.add((killed, is_new, bool(strays(str(here)))))
        row.save(path, two(row, seed + 2))
        assert not differences(read(path, verify=True), two(row, seed + 2)), f"after call {at}"
        assert not strays(str(here)), f"call {at}: the next save left over"
        seed += 2
    assert {killed for killed, *_ in seen} >= {True}
    assert {is_new for _, is_new, _ in seen} == {True, False}, "all kills were on one side"
    assert any(left for *_, left in seen), "no kill left anything to clean up"


def places_of_kills(calls: int, count: int) -> list[int]:
    return sorted({1 + (calls - 1) * i // (count - 1) for i in range(count)})
