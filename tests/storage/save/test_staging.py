"""Staging: files of a directory replaced together, and nothing lost or left."""

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from maxjax.errors import (
    CheckpointAccessError,
    CheckpointBusyError,
    CheckpointMissingError,
    CheckpointSaveError,
)
from maxjax.storage.files import open_regular
from maxjax.storage.save import durable, staging
from maxjax.storage.save.staging import Staging, leftovers, sweep

not_root = pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")


def content(directory):
    """Every file below a directory, temporary ones as well."""
    files = (path for path in Path(directory).rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_text() for path in files}


def saved(directory, **files):
    with Staging(directory) as one:
        for name, text in files.items():
            one.write(name, [text.encode()])
        one.commit(list(files))


def broken(call, number=errno.EIO, at=1, of=os):
    """What takes the place of a function of os: its call ``at`` fails."""
    real, count = getattr(of, call), [0]

    def function(*args, **kwargs):
        count[0] += 1
        if count[0] == at:
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    return function


# -- what it writes


@pytest.mark.parametrize("write", [saved, durable.absolute, durable.writable_path])
def test_the_shell_s_name_of_a_home_directory_is_refused(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointMissingError, match=r"^~/run: .* pass os.path.expanduser"):
        write("~/run")
    assert not os.listdir(tmp_path)


def test_files_are_made_and_replaced(tmp_path):
    saved(tmp_path, a="1", b="2")
    saved(tmp_path, b="3", c="4")
    assert content(tmp_path) == {"a": "1", "b": "3", "c": "4"}
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]


def test_nothing_is_seen_before_it_is_committed(tmp_path):
    saved(tmp_path, a="1")
    with Staging(tmp_path) as one:
        one.write("a", [b"2"])
        one.write("new/file", [b"3"])
        assert (tmp_path / "a").read_text() == "1" and not (tmp_path / "new").exists()
        one.commit(["new/file"], ["a"])
        assert (tmp_path / "a").read_text() == "2"
    assert content(tmp_path) == {"a": "2", "new/file": "3"}


def test_what_is_not_committed_is_removed(tmp_path):
    saved(tmp_path, a="1")
    with pytest.raises(KeyboardInterrupt), Staging(tmp_path) as one:
        one.write("a", [b"2"])
        raise KeyboardInterrupt
    assert content(tmp_path) == {"a": "1"} and os.listdir(tmp_path) == ["a"]


def test_groups_are_renamed_in_order_and_then_old_files_go(tmp_path, monkeypatch):
    saved(tmp_path, old="1", other="2")
    done = []
    for call in ("rename", "unlink", "fsync"):
        real = getattr(os, call)

        def spy(*args, real=real, call=call, **kwargs):
            if call != "fsync":
                done.append((call, os.path.basename(args[-1])))
            elif stat.S_ISDIR(os.fstat(args[0]).st_mode):
                done.append((call, os.path.basename(os.readlink(f"/proc/self/fd/{args[0]}"))))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, call, spy)
    with Staging(tmp_path) as one:
        for name in "abc":
            one.write(name, [name.encode()])
        done.clear()
        one.commit(["a", "b"], ["c"], retire=["old"], remove=["other", "never"])
        flush = ("fsync", tmp_path.name)
        assert done[:6] == [
            ("rename", "a"), ("rename", "b"), flush, ("rename", "c"), flush, done[5],
        ]  # fmt: skip
        assert done[5][0] == "rename" and done[5][1].startswith(".old-")
        assert done[6:] == [flush, ("unlink", "other"), ("unlink", "never"), flush]
    assert content(tmp_path) == dict(zip("abc", "abc", strict=True))


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    flushed = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (flushed.append(os.fstat(fd).st_ino), real(fd)))
    with Staging(tmp_path) as one:
        one.write("a", [b"1", b"2"])
        assert os.stat(os.path.join(one.folder, "a")).st_ino in flushed
        one.commit(["a"])
    assert content(tmp_path) == {"a": "12"}


def test_the_mode_of_a_file_is_kept(tmp_path):
    saved(tmp_path, a="1")
    os.chmod(tmp_path / "a", 0o640)
    before = os.umask(0o027)
    try:
        saved(tmp_path, a="2", b="3")
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(tmp_path / "a").st_mode) == 0o640
    assert stat.S_IMODE(os.stat(tmp_path / "b").st_mode) == 0o640


def test_a_link_is_replaced_and_not_what_it_leads_to(tmp_path):
    blob = tmp_path / "blob"
    blob.write_text("shared")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "a").symlink_to(blob)
    saved(folder, a="mine")
    assert blob.read_text() == "shared" and (folder / "a").read_text() == "mine"
    assert not (folder / "a").is_symlink()


def test_a_directory_that_is_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    saved(tmp_path / "link", a="1")
    assert content(tmp_path / "real") == {"a": "1"} and (tmp_path / "link").is_symlink()


def test_whole_directories_can_be_put_into_place(tmp_path):
    with Staging(tmp_path) as one:
        os.mkdir(os.path.join(one.folder, "5"))
        one.write("5/data", [b"x"])
        one.commit(["5"])
    assert content(tmp_path) == {"5/data": "x"}
    with Staging(tmp_path) as one:
        one.commit(remove=["5"])
    assert os.listdir(tmp_path) == []


# -- what goes wrong


CALLS = [("rename", n) for n in (1, 2, 3, 4)] + [("fsync", n) for n in range(1, 7)] + [
    ("write", 1), ("write", 3), ("link", 1), ("link", 2), ("mkdir", 1), ("open", 1), ("open", 3),
    ("fchmod", 1),
]  # fmt: skip


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
@pytest.mark.parametrize("call, at", CALLS)
def test_an_error_leaves_everything_as_it_was(tmp_path, monkeypatch, call, at, number):
    saved(tmp_path, a="1", b="2", single="3")
    before = content(tmp_path)
    monkeypatch.setattr(os, call, broken(call, number, at))
    with pytest.raises(CheckpointSaveError, match=errno.errorcode[number]) as caught:
        with Staging(tmp_path) as one:
            one.keeps("The old one is there.")
            one.write("a", [b"4"])
            one.write("b", [b"5"])
            one.write("new", [b"6"])
            one.commit(["a", "new"], ["b"], retire=["single"])
    assert caught.value.errno == number
    assert content(tmp_path) == before and sorted(os.listdir(tmp_path)) == sorted(before)
    saved(tmp_path, a="4")  # the call that failed is over
    assert content(tmp_path) == {**before, "a": "4"}


def test_an_interrupt_while_files_are_renamed(tmp_path, monkeypatch):
    saved(tmp_path, a="1", b="2")
    real, count = os.rename, [0]

    def rename(*args):
        real(*args)
        count[0] += 1
        if count[0] == 2:
            raise KeyboardInterrupt  # comes when it has been done

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(KeyboardInterrupt), Staging(tmp_path) as one:
        for name in ("a", "b", "c"):
            one.write(name, [b"new"])
        one.commit(["a", "b"], ["c"])
    assert content(tmp_path) == {"a": "1", "b": "2"}
    saved(tmp_path, a="3")


def test_an_interrupt_before_the_block_or_in_the_cleaning(tmp_path, monkeypatch):
    saved(tmp_path, a="1")
    one = Staging(tmp_path)
    one.write("a", [b"2"])
    del one  # as when the interrupt comes before `with` has it
    assert os.listdir(tmp_path) == ["a"]
    for times, left in ((1, 1), (2, 2)):  # of two interrupts the next save cleans up
        with monkeypatch.context() as patch:
            patch.setattr(staging.shutil, "rmtree", interrupted(staging.shutil.rmtree, times))
            with pytest.raises(KeyboardInterrupt), Staging(tmp_path):
                pass
        assert len(os.listdir(tmp_path)) == left
        saved(tmp_path, a="3")  # it is not locked
        assert content(tmp_path) == {"a": "3"} and os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupt_while_it_is_unlocked(tmp_path, monkeypatch, at):
    real, count = os.close, [0]

    def close(fd):
        real(fd)
        count[0] += 1
        if count[0] == at:
            raise KeyboardInterrupt  # a signal came meanwhile

    one = Staging(tmp_path)
    one._clear()
    with monkeypatch.context() as patch:
        patch.setattr(staging.shutil, "rmtree", lambda *args, **options: None)
        patch.setattr(os, "close", close)
        with pytest.raises(KeyboardInterrupt):
            one.close()
    saved(tmp_path, a="1")
    assert content(tmp_path) == {"a": "1"} and not staging._ACTIVE


def interrupted(function, times):
    count = [0]

    def call(*args, **kwargs):
        count[0] += 1
        if count[0] <= times:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    return call


def test_a_directory_in_the_place_of_a_file_is_never_touched(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine").write_text("1")
    with pytest.raises(CheckpointSaveError, match="EISDIR") as caught:
        saved(tmp_path, b="2", a="3")
    assert caught.value.errno == errno.EISDIR
    assert content(tmp_path) == {"a/mine": "1"} and os.listdir(tmp_path) == ["a"]


def test_a_directory_that_appears_at_the_last_moment_is_not_touched_either(tmp_path, monkeypatch):
    real = os.rename

    def rename(start, end):
        os.mkdir(end)
        with open(os.path.join(end, "theirs"), "w") as file:
            file.write("1")
        real(start, end)

    with pytest.raises(CheckpointSaveError), Staging(tmp_path) as one:
        os.mkdir(os.path.join(one.folder, "7"))
        one.write("7/data", [b"x"])
        monkeypatch.setattr(os, "rename", rename)
        one.commit(["7"])
    assert content(tmp_path) == {"7/theirs": "1"}


def test_what_cannot_be_taken_back_is_said(tmp_path, monkeypatch):
    saved(tmp_path, a="1", b="2")
    real, count = os.rename, [0]

    def rename(*args):
        count[0] += 1
        if count[0] > 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(*args)

    with pytest.raises(CheckpointSaveError, match="a is new and could not be removed"):
        with Staging(tmp_path) as one:
            one.keeps("All is as before.")
            one.write("a", [b"3"])
            one.write("b", [b"4"])
            monkeypatch.setattr(os, "rename", rename)
            one.commit(["a", "b"])


@pytest.mark.parametrize("deleted", ["a", "later/b", ".owner", "."])
def test_a_file_that_is_deleted_before_the_commit(tmp_path, deleted):
    """Others may have been written after the deletion; that of the directory takes the owner's file."""
    saved(tmp_path, a="1")
    with pytest.raises(
        CheckpointSaveError, match=r"/\S+ is there no longer: it was deleted"
    ) as caught:
        with Staging(tmp_path) as one:
            one.keeps("All is as before.")
            for name in ("a", "later/b", "c"):
                one.write(name, [b"2"])
            path = Path(one.folder, deleted)
            path.unlink() if path.is_file() else shutil.rmtree(path)
            if deleted != "a":
                Path(one.folder, "a").parent.mkdir(exist_ok=True)
                Path(one.folder, "a").write_text("2")
            one.commit(["a", "later"], ["c"])
    assert caught.value.errno == errno.ENOENT and "as before" not in str(caught.value)
    assert content(tmp_path) == {"a": "1"}


def test_a_file_that_is_cut_off_before_the_commit(tmp_path):
    with pytest.raises(CheckpointSaveError, match="what was written to .*/a is there no longer"):
        with Staging(tmp_path) as one:
            one.write("a", [b"22"])
            os.truncate(os.path.join(one.folder, "a"), 1)
            one.commit(["a"])
    assert content(tmp_path) == {}


def test_a_directory_that_is_deleted_is_not_made_again(tmp_path):
    root = tmp_path / "root"
    with pytest.raises(CheckpointSaveError, match="is there no longer"):
        with Staging(root) as one:
            shutil.rmtree(root)
            one.write("folder/a", [b"1"])
    assert not root.exists()


def test_old_files_that_cannot_be_deleted_are_told(tmp_path, monkeypatch, caplog):
    saved(tmp_path, a="1", b="2", c="3")
    with Staging(tmp_path) as one, monkeypatch.context() as patch:
        one.write("new", [b"4"])
        patch.setattr(os, "unlink", broken("unlink"))
        one.commit(["new"], remove=["a", "b", "c"])
    assert content(tmp_path) == {"a": "1", "new": "4"}
    assert "a could not be deleted" in caplog.text


def test_the_message_says_what_is_needed_and_what_is_kept(tmp_path):
    with pytest.raises(CheckpointSaveError) as caught, Staging(tmp_path) as one:
        one.keeps("The old one is there: here.")
        one.require_space(1 << 62)
    text = str(caught.value)
    assert caught.value.errno == errno.ENOSPC and isinstance(caught.value, OSError)
    assert f"{1 << 62:,} bytes are needed" in text and "bytes are free" in text
    assert text.endswith("The old one is there: here.") and str(tmp_path) in text


def test_inodes_used_up(tmp_path, monkeypatch):
    """There may be bytes enough: it is told what there is none of."""
    saved(tmp_path, a="1")
    full = SimpleNamespace(
        f_files=65536, f_favail=0, f_blocks=1 << 21, f_bavail=1 << 20, f_frsize=4096
    )
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(CheckpointSaveError, match="all 65,536 inodes are in use") as caught:
        with Staging(tmp_path) as one:
            one.require_space(10)
    assert caught.value.errno == errno.ENOSPC and "bytes are free" not in str(caught.value)
    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", broken("mkdir", errno.ENOSPC))
        with pytest.raises(CheckpointSaveError, match="inodes"):
            Staging(tmp_path)
    full.f_files = 0  # a file system without such a bound
    with Staging(tmp_path) as one:
        one.require_space(10)
    assert content(tmp_path) == {"a": "1"}


def test_a_file_system_that_does_not_count_bytes(tmp_path, monkeypatch):
    """FUSE without statfs reports zeros."""
    zeros = SimpleNamespace(f_files=0, f_favail=0, f_blocks=0, f_bavail=0, f_frsize=512)
    monkeypatch.setattr(os, "statvfs", lambda path: zeros)
    with Staging(tmp_path) as one:
        one.require_space(1 << 40)
        one.write("a", [b"1"])
        one.commit(["a"])
    assert content(tmp_path) == {"a": "1"}
    monkeypatch.setattr(os, "mkdir", broken("mkdir", errno.ENOSPC))
    with pytest.raises(CheckpointSaveError, match="does not say how many are free"):
        Staging(tmp_path)


def test_a_file_system_without_modes_times_and_links(tmp_path, monkeypatch):
    """Shares and FAT refuse to change what the mount says, also to those who may write."""
    saved(tmp_path, a="1", b="2")

    def refused(*args, **kwargs):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    for name in ("fchmod", "chmod", "utime", "link"):
        monkeypatch.setattr(os, name, refused)
    with Staging(tmp_path) as one:
        one.write("a", [b"3"])
        one.commit(["a"])
    assert content(tmp_path) == {"a": "3", "b": "2"}
    durable.replace_file(str(tmp_path / "b"), [b"4"])
    assert content(tmp_path) == {"a": "3", "b": "4"}


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EIO])
def test_where_nothing_can_be_made_the_message_says_what_is_kept(tmp_path, monkeypatch, number):
    saved(tmp_path, a="1")
    monkeypatch.setattr(os, "mkdir", broken("mkdir", number))
    kept = f"Nothing in {tmp_path} was changed."
    with pytest.raises((CheckpointSaveError, CheckpointAccessError), match=re.escape(kept)):
        Staging(tmp_path)
    assert content(tmp_path) == {"a": "1"}


def test_who_has_the_directory_for_a_moment_is_waited_for(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    timer = threading.Timer(0.1, os.close, [fd])
    timer.start()
    saved(tmp_path, a="1")
    timer.join()
    assert content(tmp_path) == {"a": "1"}


def test_directories_are_made_and_removed_again(tmp_path):
    deep = tmp_path / "x" / "y" / "z"
    with pytest.raises(CheckpointSaveError), Staging(deep) as one:
        one.require_space(1 << 62)
    assert os.listdir(tmp_path) == []
    saved(deep, a="1")
    assert content(tmp_path) == {"x/y/z/a": "1"}


def test_a_directory_that_another_made_meanwhile_stays(tmp_path):
    with pytest.raises(CheckpointSaveError), Staging(tmp_path / "x") as one:
        (tmp_path / "x" / "theirs").write_text("1")
        one.require_space(1 << 62)
    assert content(tmp_path) == {"x/theirs": "1"}


def test_a_file_in_the_place_of_the_directory(tmp_path):
    (tmp_path / "x").write_text("1")
    for path in (tmp_path / "x", tmp_path / "x" / "y"):
        with pytest.raises((CheckpointSaveError, CheckpointAccessError), match="x"):
            Staging(path)
    assert content(tmp_path) == {"x": "1"}


@not_root
def test_a_directory_that_may_not_be_written(tmp_path):
    os.chmod(tmp_path, 0o555)
    with pytest.raises(CheckpointAccessError, match=str(os.geteuid())):
        Staging(tmp_path)
    os.chmod(tmp_path, 0o755)


def test_a_directory_of_the_system(tmp_path):
    with pytest.raises((CheckpointSaveError, CheckpointAccessError), match="/proc/self"):
        Staging("/proc/self/maxjax")


# -- other writers


WRITER = """
import sys
from maxjax.storage.save.staging import Staging
with Staging(sys.argv[1], exclusive=sys.argv[2] == "True") as one:
    one.write("a", [b"other"])
    print(one.folder, flush=True)
    sys.stdin.readline()
    one.commit(["a"])
"""


@pytest.fixture
def writer():
    """Starts a process that has a directory until it is told to go on."""
    started = []

    def start(directory, exclusive=True):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(directory), str(exclusive)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_another_process_is_writing(tmp_path, writer):
    process, folder = writer(tmp_path)
    with pytest.raises(
        CheckpointBusyError, match=f"process {process.pid} on {socket.gethostname()}"
    ):
        Staging(tmp_path)
    assert os.path.isdir(folder) and leftovers(tmp_path) == []  # that of one that lives
    assert sweep(str(tmp_path)) == []
    process.communicate("\n")
    assert content(tmp_path) == {"a": "other"}
    saved(tmp_path, a="mine")
    assert content(tmp_path) == {"a": "mine"}


FORKING = """
import os, subprocess, sys, time
from maxjax.storage.save.staging import Staging
one = Staging(sys.argv[1])
one.write("a", [b"half"])
if sys.argv[2] == "fork":
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        one.close()  # which is not its own
        os.close(1)
        os.write(writer, b"1")
        time.sleep(600)
    os.read(reader, 1)  # until the child has closed the locks that it was born with
else:  # a program that takes over every open file
    for fd in one._locks:
        os.set_inheritable(fd, True)
    child = subprocess.Popen(["sleep", "600"], close_fds=False, stdout=subprocess.DEVNULL).pid
print(child, one.folder, flush=True)
sys.stdin.readline()
one.commit(["a"])
one.close()
print("saved", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def forking():
    """Starts a process that saves, and a child of it that outlives the save."""
    started, children = [], []

    def start(directory, how):
        process = subprocess.Popen(
            [sys.executable, "-c", FORKING, str(directory), how],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        child, folder = process.stdout.readline().split()
        children.append(int(child))
        return process, int(child), folder

    yield start
    for process in started:
        process.kill()
        process.communicate()
    for child in children:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("how", ["fork", "exec"])
def test_a_child_of_a_save_does_not_keep_its_lock(tmp_path, forking, how):
    process, child, folder = forking(tmp_path, how)
    assert os.path.exists(os.path.join(folder, "a"))  # the child has not removed it
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "saved\n"
    os.kill(child, 0)  # it is there
    saved(tmp_path, a="mine")
    assert content(tmp_path) == {"a": "mine"}


def test_after_a_kill_a_forked_child_does_not_keep_the_lock(tmp_path, forking):
    process, child, _ = forking(tmp_path, "fork")
    process.kill()
    process.wait()
    os.kill(child, 0)
    saved(tmp_path, a="mine")
    assert content(tmp_path) == {"a": "mine"}


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_the_process_that_holds_the_lock_is_named_and_none_that_has_ended(tmp_path, forking):
    process, child, _ = forking(tmp_path, "exec")
    process.kill()
    process.wait()
    with pytest.raises(CheckpointBusyError, match=f"process {child} on") as caught:
        Staging(tmp_path)
    assert str(process.pid) not in str(caught.value).replace(str(child), "")


def test_a_writer_of_a_single_file_says_that_it_waits(tmp_path, writer, caplog):
    process, _ = writer(tmp_path)
    with Staging(tmp_path, exclusive=False) as one:
        one.write("b", [b"mine"])
        released = threading.Timer(0.3, lambda: process.communicate("\n"))
        released.start()
        one.hold()
        one.commit(["b"])
        released.join()
    assert content(tmp_path) == {"a": "other", "b": "mine"}
    assert f"waiting until process {process.pid} on" in caplog.text


def test_writers_of_single_files_only_wait_for_the_renaming(tmp_path, writer):
    process, _ = writer(tmp_path, exclusive=False)
    with Staging(tmp_path, exclusive=False) as one:
        one.write("b", [b"mine"])
        one.hold()
        one.commit(["b"])
    process.communicate("\n")
    assert content(tmp_path) == {"a": "other", "b": "mine"}


def test_what_a_killed_process_left_is_removed(tmp_path, writer, caplog):
    saved(tmp_path, a="1")
    process, folder = writer(tmp_path)
    process.kill()
    process.wait()
    assert leftovers(tmp_path) == [os.path.basename(folder)]
    saved(tmp_path, a="2")
    assert content(tmp_path) == {"a": "2"} and os.listdir(tmp_path) == ["a"]
    assert "1 interrupted save" in caplog.text


def test_two_threads_of_one_process(tmp_path):
    with Staging(tmp_path) as one:
        with pytest.raises(CheckpointBusyError, match="another save of this process") as caught:
            Staging(tmp_path)
        assert str(os.getpid()) not in str(caught.value)
        one.write("a", [b"1"])
        one.commit(["a"])
    assert content(tmp_path) == {"a": "1"}


RACER = """
import sys
from maxjax.errors import CheckpointBusyError
from maxjax.storage.save.staging import Staging
done = 0
while done < 8:
    try:
        with Staging(sys.argv[1]) as one:
            for name in "abc":
                one.write(name, [sys.argv[2].encode() * 1000])
            one.commit(["a", "b"], ["c"])
            done += 1
    except CheckpointBusyError:
        pass
"""


def test_two_that_race_never_mix(tmp_path):
    racers = [subprocess.Popen([sys.executable, "-c", RACER, str(tmp_path), who]) for who in "12"]
    assert [racer.wait() for racer in racers] == [0, 0]
    found = content(tmp_path)
    assert set(found) == {"a", "b", "c"} and len(set(found.values())) == 1


def old(path, hours):
    then = time.time() - hours * 3600
    os.utime(path, (then, then))


def abandoned(directory, name, owner=None, hours=0.0):
    folder = directory / name
    folder.mkdir()
    (folder / "model.safetensors").write_text("half")
    if owner is not None:
        (folder / ".owner").write_text(owner if isinstance(owner, str) else json.dumps(owner))
    old(folder, hours)
    return folder


def dead():
    """The id of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


HERE, THERE = socket.gethostname(), "another-host"


@pytest.mark.parametrize(
    "owner, hours, goes",
    [
        ({"host": HERE, "pid": 1}, 0, True),  # it had the lock, and has it no more
        ({"host": THERE, "pid": 1}, 1, False),
        ({"host": THERE, "pid": 1}, 25, True),
        ("not json", 1, False),
        (None, 1, False),  # of an unknown host
        (None, 25, True),
        ([1], 25, True),
    ],
)
def test_what_is_swept(tmp_path, owner, hours, goes):
    folder = abandoned(tmp_path, ".maxjax-0.tmp", owner, hours)
    assert leftovers(tmp_path) == [folder.name] * goes
    assert sweep(str(tmp_path)) == [folder.name] * goes
    assert folder.exists() != goes


def test_one_that_was_killed_before_it_said_whose_it_is(tmp_path):
    host = staging._host()
    gone = abandoned(tmp_path, f".maxjax-{host}-{dead()}-0123.tmp")
    mine = abandoned(tmp_path, f".maxjax-{host}-{os.getpid()}-0123.tmp")  # but not in use
    young = abandoned(tmp_path, f".maxjax-{host}-{os.getppid()}-0123.tmp")
    other = abandoned(tmp_path, f".maxjax-00000000-{dead()}-0123.tmp")
    assert sweep(str(tmp_path)) == sorted([gone.name, mine.name])
    old(young, 0.1)
    old(other, 25)
    assert sweep(str(tmp_path)) == sorted([young.name, other.name])


def test_one_just_made_by_a_thread_of_this_process_stays(tmp_path, monkeypatch):
    seen = []
    real = os.mkdir

    def mkdir(path, *args):
        real(path, *args)
        if path.endswith(".tmp"):
            seen.append(sweep(os.path.dirname(path)))

    monkeypatch.setattr(os, "mkdir", mkdir)
    saved(tmp_path, a="1")
    assert seen == [[]] and content(tmp_path) == {"a": "1"}


def test_without_locks_the_process_decides(tmp_path, monkeypatch):
    def flock(fd, how):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    gone = abandoned(tmp_path, ".maxjax-1.tmp", {"host": HERE, "pid": dead()})
    alive = abandoned(tmp_path, ".maxjax-2.tmp", {"host": HERE, "pid": os.getppid()})
    assert sweep(str(tmp_path)) == [gone.name] and alive.exists()
    saved(tmp_path, a="1")


def test_what_is_not_ours_is_not_swept(tmp_path):
    kept = [tmp_path / ".maxjax-notes", tmp_path / "x.tmp", tmp_path / ".maxjax-file.tmp"]
    for path in kept:
        path.write_text("1")
        old(path, 100)
    target = tmp_path / "target"
    target.mkdir()
    (target / "a").write_text("1")
    (tmp_path / ".maxjax-link.tmp").symlink_to(target)
    assert sweep(str(tmp_path)) == []
    assert all(path.exists() for path in kept) and (target / "a").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_another_user_left_is_not_swept(tmp_path):
    folder = abandoned(tmp_path, ".maxjax-1.tmp", {"host": HERE, "pid": dead()}, 100)
    os.chown(folder, 12345, -1)
    assert sweep(str(tmp_path)) == []


# -- one file


def test_replace_file(tmp_path):
    path = tmp_path / "a"
    durable.replace_file(str(path), [b"one", memoryview(b"two")])
    assert content(tmp_path) == {"a": "onetwo"}
    (tmp_path / "link").symlink_to("a")
    os.chmod(path, 0o600)
    durable.replace_file(str(tmp_path / "link"), [b"three"])
    assert path.read_text() == "three" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
def test_replace_file_that_fails(tmp_path, monkeypatch, call):
    path = tmp_path / "a"
    path.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, broken(call, errno.ENOSPC))
        with pytest.raises(CheckpointSaveError, match="untouched") as caught:
            durable.replace_file(str(path), [b"new"])
    assert caught.value.errno == errno.ENOSPC
    assert content(tmp_path) == {"a": "old"}


def test_short_writes_are_gone_on_with(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, memoryview(data)[:7]))
    durable.write_new(str(tmp_path / "a"), [b"0123456789" * 10, b""])
    assert content(tmp_path) == {"a": "0123456789" * 10}


def test_a_folder_that_cannot_be_flushed(tmp_path, monkeypatch):
    for number in (errno.EINVAL, errno.ENOTSUP):  # a file system that does not know it
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", broken("fsync", number))
            durable.flush_folder(str(tmp_path))
    monkeypatch.setattr(os, "fsync", broken("fsync", errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        durable.flush_folder(str(tmp_path))


def test_the_log_is_of_maxjax(tmp_path, caplog):
    abandoned(tmp_path, ".maxjax-0.tmp", {"host": HERE, "pid": 1})
    with caplog.at_level(logging.WARNING, logger="maxjax"):
        sweep(str(tmp_path))
    assert [record.name for record in caplog.records] == ["maxjax"]


def test_a_path_without_bytes_and_a_directory_called_like_the_shell_s(tmp_path, monkeypatch):
    for call in (open_regular, lambda path: Staging(path)):
        with pytest.raises(CheckpointMissingError, match="a path cannot hold it: .*surrogates"):
            call(str(tmp_path / "\ud800"))
    monkeypatch.chdir(tmp_path)
    Path("~").mkdir()  # as versions before made it
    Staging("~/run").close()  # no error
    durable.writable_path("~/file")


KILLED = """
import os, sys, time
from maxjax.storage.save.durable import replace_file

def pieces():
    yield b"half"
    print("begun", flush=True)
    sys.stdin.readline()

replace_file(sys.argv[1], pieces())
"""


def test_an_unfinished_file_of_a_killed_process_is_deleted_by_the_next(tmp_path):
    path = tmp_path / "file"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    (part,) = os.listdir(tmp_path)
    os.utime(tmp_path / part, (0, 0))
    (tmp_path / ".maxjax-0123456789abcdef.part").symlink_to(path)
    durable.replace_file(str(path), [b"another"])  # the process lives
    assert (tmp_path / part).exists()
    process.kill()
    process.communicate()
    durable.replace_file(str(path), [b"mine"])
    assert sorted(os.listdir(tmp_path)) == [".maxjax-0123456789abcdef.part", "file"]
    assert path.read_bytes() == b"mine"
