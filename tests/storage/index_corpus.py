"""Sets of safetensors files with an index: good, odd, broken and hostile ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.storage.corpus import (
    D16,
    FORMAT,
    HTML,
    KIND,
    LFS,
    LIMIT,
    MISSING,
    NAMES,
    PICKLE,
    TRUNCATED,
    UNSAFE,
    A,
    Case,
    file_bytes,
    floats,
    spec,
)

S1, S2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
FIRST, SECOND = file_bytes({"a": A}, D16), file_bytes({"b": A}, floats(4, 10.0))
MAP = {"a": S1, "b": S2}
TOTAL = {"metadata": {"total_size": 32}}


def case(
    name: str,
    index: Any,
    error: type[Exception] | None = None,
    tensor: str | None = None,
    says: str | tuple[str, ...] = (),
    *,
    files: dict[str, bytes | None] | None = None,
    after: Callable[[Path], Any] = lambda directory: None,
    names: tuple[str, ...] | None = None,
) -> Case:
    """A case of the two usual shards, with some `files` changed (None: not there)."""

    def build(root: Path) -> Path:
        directory = root / "model"
        directory.mkdir()
        # What a name that leads out of the directory would find.
        (root / "outside").mkdir()
        (root / "outside" / "secret.safetensors").write_bytes(SECOND)
        for file, content in {S1: FIRST, S2: SECOND, **(files or {})}.items():
            if content is not None:
                (directory / file).parent.mkdir(exist_ok=True)
                (directory / file).write_bytes(content)
        path = directory / "model.safetensors.index.json"
        raw = index if isinstance(index, bytes) else json.dumps(index).encode()
        path.write_bytes(raw)
        after(directory)
        return path

    words = (says,) if isinstance(says, str) else says
    told = NAMES[error] if error and names is None else names or ()
    return Case(name, build, error, tensor, words, told)


def mapped(**changes: Any) -> dict[str, Any]:
    return {**TOTAL, "weight_map": {**MAP, **changes}}


def _outside(name: str, target: str, **kw) -> Case:
    """A file name that leads out of the directory; the message must hold it."""
    shown = target.replace("\0", "\\x00").replace("\\\\", "\\")
    return case(name, mapped(b=target), UNSAFE, "b", shown, **kw)


def _cache(directory: Path) -> None:
    """The layout of the Hugging Face cache: every file is a link to a blob."""
    blobs = directory.parent / "blobs-x"
    blobs.mkdir()
    for number, path in enumerate(sorted(directory.iterdir())):
        path.rename(blobs / f"{number:064x}")
        path.symlink_to(f"../blobs-x/{number:064x}")


DUPLICATE = f'{{"weight_map":{{"a":"{S1}","b":"{S2}","b":"{S1}"}}}}'.encode()

CONTROLS = [
    case("ok_basic", mapped()),
    case("ok_no_metadata", {"weight_map": MAP}),
    case("ok_total_size_wrong", {"metadata": {"total_size": 999}, "weight_map": MAP}),
    case("ok_subdir", mapped(b="sub/two.safetensors"), files={"sub/two.safetensors": SECOND}),
    case("ok_hf_cache_symlink", mapped(), after=_cache),
    case("tensor_unlisted", mapped(),
         files={S2: file_bytes({"b": A, "d": spec("F32", [1], 16, 20)}, floats(5, 10.0))}),
]  # fmt: skip

NAMES_OF_FILES = [
    _outside("trav_dotdot", "../../outside/secret.safetensors"),
    _outside("trav_inner", "sub/../../../outside/secret.safetensors"),
    _outside("trav_absolute", "/proc/self/cwd/outside/secret.safetensors"),
    _outside("trav_backslash", "..\\..\\outside\\secret.safetensors"),
    _outside("trav_drive", "C:\\secret.safetensors"),
    _outside("trav_home", "~/secret.safetensors"),
    _outside("trav_url", "http://127.0.0.1:9/x.safetensors"),
    _outside("trav_nul", "model\0.safetensors"),
    _outside("trav_device", "/dev/zero"),
    case("name_empty", mapped(b=""), TRUNCATED, "b", ("file name", "0 bytes")),
    case("name_dot", mapped(b="."), FORMAT, "b", ("weight_map", "'.'")),
    case("name_self", mapped(b="model.safetensors.index.json"), FORMAT, "b",
         "model.safetensors.index.json"),
    case("name_pickle", mapped(b="two.bin"), UNSAFE, "b", "two.bin", files={"two.bin": PICKLE}),
    case("name_4096", mapped(b="x" * 5000), FORMAT, "b", ("5000 bytes", "255 bytes")),
]  # fmt: skip

SHARDS = [
    case("shard_missing", mapped(), MISSING, None, (S2, "1 of the 2 tensors"), files={S2: None}),
    case("shard_incomplete", mapped(), MISSING, None, (S2, "1 of the 2 tensors", "download"),
         files={S2: None, f"{S2}.incomplete": SECOND[:50]}),
    case("shard_empty", mapped(), TRUNCATED, None, (S2, "8 bytes", "0 bytes"), files={S2: b""}),
    case("shard_truncated", mapped(), TRUNCATED, "b", (S2, "16 bytes", "12 bytes"),
         files={S2: SECOND[:-4]}),
    case("shard_lfs", mapped(), FORMAT, None, (S2, "git lfs pull"), files={S2: LFS}, names=KIND),
    case("tensor_missing", mapped(), FORMAT, "b", (S2, "no file"),
         files={S2: file_bytes({"c": A}, D16)}),
    case("tensor_wrong_shard", mapped(), FORMAT, "b", (S1, S2),
         files={S1: file_bytes({"a": A, "b": spec("F32", [1], 16, 20)}, floats(5)),
                S2: file_bytes({"c": A}, D16)}),
    case("tensor_extra", mapped(), FORMAT, "a", (S1, S2),
         files={S2: file_bytes({"b": A, "a": spec("F32", [4], 16, 32)}, floats(8))}),
]  # fmt: skip

MAPS = [
    case("map_missing", TOTAL, FORMAT, None, "weight_map"),
    case("map_empty", {"weight_map": {}}, TRUNCATED, None, "weight_map"),
    case("map_list", {"weight_map": [S1, S2]}, FORMAT, None, "weight_map"),
    case("map_not_object", [1], FORMAT),
    case("map_value_number", mapped(b=1), FORMAT, "b", "weight_map"),
    case("map_value_list", mapped(b=[S2]), FORMAT, "b", "weight_map"),
    case("map_dup_key", DUPLICATE, FORMAT, "b", "twice"),
    case("json_cut", json.dumps(mapped()).encode()[:60], TRUNCATED),
    case("json_cut_word", b'{"weight_map": nul', TRUNCATED),
    case("json_cut_character", b'{"weight_map": {"\xe9\x87', TRUNCATED),
    case("json_empty", b"", TRUNCATED, None, "0 bytes"),
    case("json_deep", b"[" * 100_000 + b"]" * 100_000, LIMIT, None, ("json_depth", "100000")),
    case("json_bad_utf8", b'{"weight_map": {"\xff": "x"}}', FORMAT, None, "FF"),
    case("json_huge_int", b'{"metadata":{"total_size":' + b"1" * 100_000 +
         b'},"weight_map":{"a":"x"}}', LIMIT, None, ("json_digits", "100000")),
    case("is_lfs_pointer", LFS, FORMAT, None, "git lfs pull", names=KIND),
    case("is_html", HTML, FORMAT, None, "HTML", names=KIND),
]  # fmt: skip

INDEX = [*CONTROLS, *NAMES_OF_FILES, *SHARDS, *MAPS]
