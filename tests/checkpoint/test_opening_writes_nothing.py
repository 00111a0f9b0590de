"""Opening, planning, inspecting and verifying change nothing on the disk, whatever the directory holds."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import maxjax
from maxjax import checkpoint
from maxjax.storage.crc32 import crc32
from tests.checkpoint.reads import READS
from tests.storage.nobody import printed_by_nobody
from tests.storage.watch import snapshot

SOURCE = Path(__file__).parent / "fixtures" / "bin"
ROOT = Path(__file__).resolve().parents[2]
DIGESTS, OWN = "maxjax_digests.json", {"host": "elsewhere", "pid": 1, "exclusive": True}
# Kinds of directories, and how each is read.
KINDS = {
    "clean": "model", "set": "model", "interrupted": "model", "first interrupted": "model",
    "hostile": "model", "hostile links": "model", "clean steps": "steps", "interrupted steps": "steps",
    "clean adapter": "adapter", "interrupted adapter": "adapter",
}  # fmt: skip


def interrupt(directory, *names):
    """Makes a directory what a kill leaves just after the weights were renamed: these files wait."""
    for name in names:
        place = directory / ".maxjax-next-0123456789abcdef" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(directory / name, place)
    abandoned = directory / ".maxjax-01234567-1-0123456789abcdef.tmp"
    abandoned.mkdir()
    (abandoned / ".owner").write_text(json.dumps(OWN))
    (abandoned / "model.safetensors").write_bytes(b"half")
    os.utime(abandoned, (0, 0))


def record(directory, **parts):
    """Adds to the first record that describes the files beside weights."""
    document = json.loads((directory / DIGESTS).read_text())
    (one, *_) = (of[0] for of in document["files"].values() if "beside" in of[0])
    for key, names in parts.items():
        one.setdefault(key, {}).update(names)
    (directory / DIGESTS).write_text(json.dumps(document))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A directory of each kind, below one folder with files of somebody else."""
    top = tmp_path_factory.mktemp("reading")
    outside = top / "outside"
    outside.mkdir()
    for name in ("config.json", "tokenizer.json", "x.jinja", "y.jinja"):
        (outside / name).write_text("private")
    model, tokenizer = maxjax.load(SOURCE)
    for kind, how in KINDS.items():
        path = top / kind.replace(" ", "-")
        if how == "steps":
            for step in (1, 2):
                checkpoint.save(path, model, step=step, tokenizer=tokenizer)
        elif how == "adapter":
            maxjax.lora.save(path, maxjax.lora.add(model, rank=2, key=jax.random.key(1)))
        else:
            size = 1500 if kind == "set" else "5GB"
            maxjax.save_pretrained(model, path, tokenizer=tokenizer, max_shard_size=size)
    shutil.copytree(top / "clean", top / "base")
    interrupt(top / "interrupted", "config.json", "tokenizer.json")
    (top / "interrupted" / "config.json").write_text("{}")  # of the save before
    (top / "interrupted" / "chat_template.jinja").write_text("old")
    record(top / "interrupted", gone={"chat_template.jinja": f"{crc32(b'old'):08x}"})
    interrupt(
        top / "first-interrupted",
        *(n for n in os.listdir(top / "clean") if "max" not in n and "model." not in n),
    )
    interrupt(top / "interrupted-adapter", "adapter_config.json")
    interrupt(top / "interrupted-steps")
    hostile(top / "hostile", outside)
    hostile(top / "hostile-links", outside)
    waits = top / "hostile-links" / ".maxjax-next-00"
    shutil.rmtree(waits)
    waits.symlink_to(outside)
    (top / "hostile-links" / ".maxjax-00000000-1-00.tmp").symlink_to(outside)
    return top


def hostile(directory, outside):
    """Files that a reader would move and delete through a link, if it finished what they record."""
    (directory / "additional_chat_templates").symlink_to(outside)
    waits = directory / ".maxjax-next-00" / "additional_chat_templates"
    waits.mkdir(parents=True)
    (waits / "x.jinja").write_text("evil")
    private = f"{crc32(b'private'):08x}"
    record(
        directory,
        beside={"additional_chat_templates/x.jinja": f"{crc32(b'evil'):08x}", "sub/x": "00000000"},
        gone={"additional_chat_templates/y.jinja": private, "sub/y": private},
    )
    (directory / ".maxjax-00000000-1-01.tmp").mkdir()
    os.mkfifo(directory / ".maxjax-00000000-1-01.tmp" / ".owner")  # nobody waits for its content


def copy(made, place):
    subprocess.run(["cp", "-a", made, place], check=True)  # which copies FIFOs too


def place_of(made, kind):
    return made / kind.replace(" ", "-")


@pytest.mark.parametrize("kind", KINDS)
def test_reading_changes_nothing(made, kind, capsys):
    expected = READS[KINDS[kind]](place_of(made, f"clean {KINDS[kind]}".removesuffix(" model")))
    before = snapshot(made)
    assert READS[KINDS[kind]](place_of(made, kind)) == expected
    assert snapshot(made) == before


@pytest.mark.parametrize(
    "kind", ["interrupted", "first interrupted", "interrupted adapter", "interrupted steps"]
)
def test_repair_finishes_what_was_begun(made, tmp_path, kind):
    copy(made, tmp_path / "copy")
    path = place_of(tmp_path / "copy", kind)
    clean = place_of(made, f"clean {KINDS[kind]}".removesuffix(" model"))
    checkpoint.repair(path)
    assert sorted(os.listdir(path)) == sorted(os.listdir(clean))
    for name in os.listdir(clean):
        if (clean / name).is_file():
            assert (path / name).read_bytes() == (clean / name).read_bytes(), name
    assert checkpoint.repair(path) == []


@pytest.mark.parametrize("kind", ["hostile", "hostile links"])
def test_a_save_and_a_repair_follow_no_link_out_of_the_directory(made, tmp_path, kind):
    copy(made, tmp_path / "copy")
    top, path = tmp_path / "copy", place_of(tmp_path / "copy", kind)
    for name in ("additional_chat_templates", ".maxjax-next-00", ".maxjax-00000000-1-00.tmp"):
        if (path / name).is_symlink():  # to the copy
            (path / name).unlink()
            (path / name).symlink_to(top / "outside")
    before = snapshot(top / "outside")
    checkpoint.repair(path)
    assert snapshot(top / "outside") == before
    model, tokenizer = maxjax.load(path)
    maxjax.save_pretrained(model, path, tokenizer=tokenizer)
    assert snapshot(top / "outside") == before
    assert np.isfinite(READS["model"](path))


def test_a_save_through_a_linked_folder_is_refused(made, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    copy(place_of(made, "clean"), tmp_path / "source")
    (tmp_path / "source" / "additional_chat_templates").mkdir()
    (tmp_path / "source" / "additional_chat_templates" / "x.jinja").write_text("{{ 1 }}")
    with pytest.raises(maxjax.errors.CheckpointSaveError, match="additional_chat_templates.*link"):
        checkpoint.convert(tmp_path / "source", tmp_path / "run")
    assert os.listdir(tmp_path / "run") == ["additional_chat_templates"]
    assert not os.listdir(tmp_path / "elsewhere")


def test_too_many_recorded_files_are_refused_at_once(made, tmp_path):
    copy(place_of(made, "clean"), tmp_path / "many")
    record(tmp_path / "many", beside={f"{n}.json": "00000000" for n in range(1000)})
    with pytest.raises(maxjax.errors.CheckpointLimitError, match="too many files.*at most 256"):
        maxjax.load(tmp_path / "many")


# --- as the kernel sees it -------------------------------------------------------------------------

# System calls that change a file, by their arguments.
_CHANGES = re.compile(
    r"^\d+ +(open(at)?2?\(.*(O_WRONLY|O_RDWR|O_CREAT|O_TRUNC)|creat\(|rename|unlink|mkdir|rmdir|link|symlink|"
    r"chmod|fchmod|chown|fchown|lchown|utime|futime|truncate|ftruncate|mknod|setxattr|fsetxattr|fallocate)"
)
_DEVICES = re.compile(r'"(/dev/(null|tty|shm/sem\.[^"]*)|/proc/self/[^"]*)"')


def environment(folder):
    """The variables that put each allowed write into a folder of the test's own."""
    for name in ("programs", "tmp", "home", "cache"):
        (folder / name).mkdir(parents=True)
    own = {
        "MAXJAX_COMPILE_CACHE": "programs", "TMPDIR": "tmp", "HOME": "home", "XDG_CACHE_HOME": "cache",
        "HF_HOME": "cache", "PYTHONPYCACHEPREFIX": "cache",
    }  # fmt: skip
    places = {name: str(folder / place) for name, place in own.items()}
    return {**os.environ, **places, "PYTHONPATH": str(ROOT), "MAXJAX_KERNELS": "off"}


@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
def test_the_kernel_sees_no_change(made, tmp_path):
    """Python's audit hook is blind to what tensorstore, tokenizers and safetensors do."""
    arguments = [word for kind, how in KINDS.items() for word in (how, str(place_of(made, kind)))]
    log = tmp_path / "calls"
    trace = [
        "strace",
        "-f",
        "-s",
        "300",
        "-e",
        "trace=file,desc",
        "-e",
        "signal=none",
        "-o",
        str(log),
    ]
    before = snapshot(made)
    done = subprocess.run(
        [*trace, sys.executable, "-m", "tests.checkpoint.reads", *arguments],
        env=environment(tmp_path / "own"), cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if "Operation not permitted" in done.stderr:
        pytest.skip("strace may not trace here")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines() if line.startswith("read:")] == [
        "read:"
    ] * len(KINDS)
    assert "Error" not in done.stdout
    assert snapshot(made) == before
    calls = log.read_text(errors="replace").splitlines()
    assert any(str(made) in line for line in calls)
    allowed = (str(tmp_path / "own"), "EEXIST (File exists)")  # the latter: folders above a cache
    changes = [line for line in calls if _CHANGES.match(line) and not _DEVICES.search(line)]
    assert [line for line in changes if not any(one in line for one in allowed)] == []
    assert not list((tmp_path / "own" / "tmp").iterdir())


def test_nobody_reads_a_directory_that_only_its_owner_may_write_to(made, tmp_path):
    copy(made, tmp_path / "copy")
    for place in (tmp_path / "copy", *(tmp_path / "copy").rglob("*")):
        if place.is_dir() and not place.is_symlink():
            place.chmod(0o555)
    arguments = [(how, str(place_of(tmp_path / "copy", kind))) for kind, how in KINDS.items()]
    before = snapshot(tmp_path / "copy")
    lines = printed_by_nobody(
        tmp_path,
        "import maxjax, maxjax.lora, jax\nfrom pathlib import Path\n"
        "from tests.checkpoint.reads import READS\nmaxjax.load('tiny')\nmaxjax.plan('tiny')",
        f"for how, place in {arguments!r}: print('read:', READS[how](Path(place)))",
    )
    assert len([line for line in lines if line.startswith("read:")]) == len(KINDS)
    assert snapshot(tmp_path / "copy") == before
