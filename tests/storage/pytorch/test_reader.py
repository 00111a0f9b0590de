"""The PyTorch format: every case of the corpus, and what torch.save writes, equal to torch.load."""

import io
import pickle
import subprocess
import sys
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from maxjax.dtype import DType
from maxjax.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointLimitError,
)
from maxjax.storage.entry import Nibbles, Strided
from maxjax.storage.files import aligned_empty
from maxjax.storage.limits import Limits
from maxjax.storage.parts import Part, read_parts
from maxjax.storage.pytorch.reader import open_pytorch
from tests.oracles.recorded import is_live, recorded, torch
from tests.storage.corpus import Case
from tests.storage.mutate import mutations
from tests.storage.pytorch import corpus as corpus
from tests.storage.pytorch.oracle import (
    WRAPPERS,
    Arrays,
    digest,
    file_and_arrays,
    file_of,
    load_with_torch,
    loaded,
)
from tests.storage.test_corpus import assert_refused, read_all
from tests.storage.watch import watched


def assert_equal(arrays: Arrays, wanted: Arrays) -> None:
    assert list(arrays) == list(wanted)
    for name, array in arrays.items():
        assert array.dtype == wanted[name].dtype, name
        assert array.shape == wanted[name].shape, name
        assert array.tobytes() == wanted[name].tobytes(), name
        assert array.flags.c_contiguous and array.flags.writeable


def save(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


FORMS = {
    "zip": {},
    "legacy": {"_use_new_zipfile_serialization": False},
}  # fmt: skip


@pytest.fixture(params=FORMS, ids=str)
def form(request) -> dict:
    return FORMS[request.param]


# --- the corpus ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [c for c in corpus.PYTORCH if c.error], ids=str)
def test_bad_file_is_refused(case: Case, tmp_path):
    assert_refused(case, case.build(tmp_path), open_pytorch)
    assert not list(tmp_path.glob(f"**/{corpus.MARKER}*"))


@pytest.mark.parametrize("case", [c for c in corpus.PYTORCH if not c.error], ids=str)
def test_good_file_loads_bit_exact(case: Case, tmp_path):
    path = case.build(tmp_path)
    with watched() as acts:
        _, arrays = read_all(path, open_pytorch)
    assert not acts
    assert len(arrays) == (0 if case.name == "ok_20000_members" else len(arrays) or 1)
    assert not list(tmp_path.glob(f"**/{corpus.MARKER}*"))
    if case.name == "ok_extra_member":  # torch refuses it
        assert sorted(arrays) == ["a", "b"]
        return
    assert_equal(arrays, loaded(path))


def test_case_names_are_unique():
    names = [case.name for case in corpus.PYTORCH]
    assert len(names) == len(set(names))


RUN = "rce_builtins_open rce_os_system rce_exec rce_eval rce_inst rce_obj rce_stack_global".split()


@pytest.mark.parametrize("name", RUN)
def test_payloads_would_run(name, tmp_path):
    """Or their refusal would say nothing."""
    path = next(case for case in corpus.RCE if case.name == name).build(tmp_path)
    data = zipfile.ZipFile(path).read("m/data.pkl")

    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            if module.startswith("torch"):
                raise RuntimeError("the tensor that comes after the payload")
            return super().find_class(module, name)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            Unpickler(io.BytesIO(data)).load()
        except RuntimeError:
            pass
    assert (tmp_path / corpus.MARKER).exists()


# --- what torch.save writes ---------------------------------------------------------------------

PLAIN = [
    "float16", "float32", "float64", "bfloat16", "uint8", "int8", "int16", "int32", "int64", "bool",
]  # fmt: skip
NEW = [
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    "uint16", "uint32", "uint64",
]  # fmt: skip


def values(name: str):
    """A tensor, and another with its axes turned."""
    dtype = getattr(torch, name)
    raw = torch.arange(48, dtype=torch.uint8) * 5
    raw = raw % 2 if name == "bool" else raw
    w = raw.view(dtype).reshape(2, -1, 3) if dtype.itemsize < 8 else raw.view(dtype)
    return {"w": w, "t": w.transpose(0, -1)}


@pytest.mark.parametrize("name", PLAIN + NEW)
def test_dtypes(name, form, tmp_path):
    content, wanted = file_and_arrays(lambda: values(name), **form)
    path = save(tmp_path / "m.pt", content)
    table, arrays = read_all(path, open_pytorch)
    assert table.format == "pytorch"
    assert table.entries["w"].dtype is DType.of(name)
    assert_equal(arrays, wanted)
    # torch.load cannot read the new types back in the old format.
    if is_live() and not (name in NEW and form):
        assert_equal(arrays, load_with_torch(path))


def test_float4(tmp_path):
    def state():
        packed = torch.arange(24, dtype=torch.uint8).reshape(2, 12).view(torch.float4_e2m1fn_x2)
        return {"w": packed[1:]}

    path = save(tmp_path / "m.pt", file_of(state))
    table, arrays = read_all(path, open_pytorch)
    assert table.entries["w"].coding == Nibbles()
    nibbles = arrays["w"].view(np.uint8)
    assert nibbles.shape == (1, 24)
    assert (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).tolist() == [list(range(12, 24))]


# Of which shape they are, and what is said of them.
UNSUPPORTED = {
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
                  (3,), "quant"),
    "quantised_channels": (lambda: torch.quantize_per_channel(
        torch.ones(3, 2), torch.ones(3), torch.zeros(3), 0, torch.qint8), (3, 2), "quant"),
    "sparse": (lambda: torch.eye(3).to_sparse(), (3, 3), "sparse"),
    "sparse_csr": (lambda: torch.eye(3).to_sparse_csr(), (3, 3), "sparse"),
    "meta": (lambda: torch.empty(3, device="meta"), (3,), "meta device"),
    "negated": (lambda: torch.ones(2, dtype=torch.complex64).conj().imag, (2,), "neg"),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_tensors_are_named(kind, form, tmp_path):
    make, shape, word = UNSUPPORTED[kind]
    content = file_of(lambda: {"layers": {"w": make(), "x": torch.ones(2)}}, **form)
    with open_pytorch(save(tmp_path / "m.pt", content)) as table:
        assert table.entries["layers.w"].shape == shape
        assert table.read("layers.x").tolist() == [1, 1]
        for _ in range(2):
            with pytest.raises(CheckpointFormatError, match=word) as caught:
                table.read("layers.w")
            assert caught.value.tensor == "layers.w"


def test_a_tensor_without_a_shape_closes_the_file(tmp_path):
    def state():
        return {"w": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}

    with pytest.raises(CheckpointFormatError, match="nested") as caught:
        open_pytorch(save(tmp_path / "m.pt", file_of(state)))
    assert caught.value.tensor == "w"


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("order", ["little", "big"])
def test_complex_values(form, dtype, order, tmp_path):
    def state():
        values = torch.view_as_complex(torch.arange(24, dtype=torch.float64).reshape(3, 4, 2))
        values = values.to(getattr(torch, dtype))
        return {"w": values, "t": values.T[1:], "s": values[1, 1]}

    content, wanted = file_and_arrays(state, **form)
    path = save(tmp_path / "m.pt", content)
    if order == "big":
        if form:
            pytest.skip("the old form has no byte order")
        path = big_endian(path, wanted["w"].real.dtype)
    _, arrays = read_all(path, open_pytorch)
    assert_equal(arrays, wanted)


def model():
    layers = torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 5)
    tied = torch.nn.Sequential(*layers)
    tied[2].weight = torch.nn.Parameter(tied[0].weight.T)
    for number, parameter in enumerate(tied.parameters()):
        fill(parameter, number)
    return tied


def fill(parameter, start: float) -> None:
    with torch.no_grad():
        parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / 8 + start)


def everything() -> dict:
    """A training checkpoint: dicts in dicts, lists, parameters, ties, views, plain data."""
    module = model()
    optimizer = torch.optim.Adam(module.parameters())
    for number, parameter in enumerate(module.parameters()):
        parameter.grad = torch.empty_like(parameter)
        fill(parameter.grad, number)
    optimizer.step()
    base = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)
    with_attribute = torch.ones(3)
    with_attribute.note = "kept by Python alone"
    return {
        "model": module.state_dict(),
        "parameters": list(module.parameters()),
        "optimizer": optimizer.state_dict(),
        "views": OrderedDict(
            base=base,
            transposed=base.permute(2, 0, 1),
            part=base[1:, ::2, 1:4],
            row=base[2],
            scalar=base[1, 2, 3],
            repeated=base[0, :1].expand(6, 5),
            repeated_twice=torch.ones(1).expand(2, 3),
            empty=base[:, :0],
            diagonal=base[0].diagonal(),
            windows=base.reshape(-1).unfold(0, 10, 3),
        ),
        "attribute": with_attribute,
        "epoch": 3, "loss": 0.25, "name": "run\n1", "betas": (0.9, 0.999), "best": None,
        "config": {"layers": [1, 2], "bias": True, "dtype": torch.bfloat16, "tags": ["a", "b"]},
        "size": torch.Size([2, 3]), "device": torch.device("cpu"), "blob": b"\0\xff", "set": {4},
        "big": 2**200, "deep": [[1, 2], {"x": "y"}],
    }  # fmt: skip


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_everything(protocol, form, tmp_path):
    content, wanted = file_and_arrays(everything, pickle_protocol=protocol, **form)
    table, arrays = read_all(save(tmp_path / "m.pt", content), open_pytorch)
    assert_equal(arrays, wanted)
    assert arrays["model.0.weight"].shape == (7, 5) and "optimizer.state.0.exp_avg" in arrays
    assert table.entries["views.base"].coding is None
    assert table.entries["views.transposed"].coding == Strided((1, 20, 5))
    told = {
        "epoch": "3", "loss": "0.25", "name": "run\n1", "betas": "[0.9, 0.999]", "best": "None",
        "config.layers": "[1, 2]", "config.bias": "True", "config.dtype": "torch.bfloat16",
        "config.tags": '["a", "b"]', "size": "[2, 3]", "device": "cpu", "set": "[4]",
        "deep.0": "[1, 2]", "deep.1.x": "y", "big": str(2**200),
    }  # fmt: skip
    assert told.items() <= table.metadata.items()
    assert all(type(text) is str for text in table.metadata.values())


@pytest.mark.parametrize("key", sorted(WRAPPERS))
def test_wrappers_are_left_out(key, form, tmp_path):
    content, wanted = file_and_arrays(lambda: {"epoch": 3, key: model().state_dict()}, **form)
    table, arrays = read_all(save(tmp_path / "m.pt", content), open_pytorch)
    assert_equal(arrays, {name.removeprefix(f"{key}."): one for name, one in wanted.items()})
    assert table.metadata == {"epoch": "3"}


def test_wrappers_stay_beside_other_tensors(tmp_path):
    state, others = (
        lambda: {"w": torch.ones(2)},
        {"ema": lambda: state(), "step": lambda: torch.ones(())},
    )
    for name, value in others.items():
        path = save(tmp_path / "m.pt", file_of(lambda: {"model": state(), name: value()}))  # noqa: B023
        assert "model.w" in open_pytorch(path).entries
    path = save(tmp_path / "m.pt", file_of(lambda: {"network": state()}))
    assert list(open_pytorch(path).entries) == ["network.w"]
    path = save(tmp_path / "m.pt", file_of(lambda: {"model": torch.ones(2)}))
    assert list(open_pytorch(path).entries) == ["model"]


def test_ties_share_their_bytes(form, tmp_path):
    def state():
        tensor = torch.arange(6.0)
        return {"a": tensor, "b": tensor, "c": tensor[2:]}

    content, wanted = file_and_arrays(state, **form)
    with open_pytorch(save(tmp_path / "m.pt", content)) as table:
        a, b, c = table.entries.values()
        assert (a.offset, a.nbytes) == (b.offset, b.nbytes)
        assert (c.offset, c.nbytes) == (a.offset + 8, 16)
        assert_equal(table.read_many(), wanted)


def test_a_pickle_longer_than_what_is_read_first(tmp_path):
    """The pickles of the old format have no length: more of the file is read as they go on."""
    content, wanted = file_and_arrays(
        lambda: {"a": torch.arange(5.0), "text": "x" * (3 << 20), "b": torch.arange(3)},
        **FORMS["legacy"],
    )
    path = save(tmp_path / "m.pt", content)
    table, arrays = read_all(path, open_pytorch)
    assert len(table.metadata["text"]) == 3 << 20
    assert_equal(arrays, wanted)
    # Cut behind the pickles, it is the storage that is missing.
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="inside a storage") as caught:
        open_pytorch(path)
    assert caught.value.tensor in ("a", "b")  # whichever is last


def test_big_endian_is_swapped(tmp_path):
    def state():
        a = torch.arange(6.0).reshape(2, 3)
        return {"a": a, "b": torch.tensor([True, False]), "t": a.T}

    content, wanted = file_and_arrays(state)
    path = save(tmp_path / "m.pt", content)
    swapped = tmp_path / "swapped.pt"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(swapped, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("/byteorder"):
                data = b"big"
            elif name.endswith("/data/0"):
                data = np.frombuffer(data, ">u4").astype("<u4").tobytes()
            new.writestr(name, data)
    table, arrays = read_all(swapped, open_pytorch)
    assert_equal(arrays, wanted)
    if is_live():
        assert_equal(arrays, load_with_torch(swapped))
    assert table.entries["b"].coding is None


def big_endian(path: Path, number: np.dtype) -> Path:
    """The archive with the bytes of its storages of a type the other way round."""
    swapped = path.with_suffix(".swapped.pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(swapped, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("/byteorder"):
                data = b"big"
            elif "/data/" in name:
                data = np.frombuffer(data, number).byteswap().tobytes()
            new.writestr(name, data)
    return swapped


def recompressed(path: Path) -> Path:
    """The archive packed anew with deflate, which torch.save never does."""
    packed = path.with_suffix(".packed.pt")
    with zipfile.ZipFile(path) as old:
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
            for name in old.namelist():
                new.writestr(name, old.read(name))
    return packed


def test_compressed_archives(tmp_path):
    base = np.arange(4000, dtype=np.int32).reshape(10, 20, 20)

    def state():
        a = torch.from_numpy(base)
        return {"a": a, "p": a.permute(1, 2, 0), "r": a[3:5], "e": a[:0], "s": a[1, 2, 3]}

    path = recompressed(save(tmp_path / "m.pt", file_of(state)))
    _, arrays = read_all(path, open_pytorch)
    wanted = {"a": base, "p": base.transpose(1, 2, 0), "r": base[3:5], "e": base[:0]}
    assert_equal(arrays, {**wanted, "s": base[1, 2, 3]})
    every_other = file_of(lambda: {"w": torch.from_numpy(base)[:, ::2]})
    path = recompressed(save(tmp_path / "m.pt", every_other))
    with pytest.raises(CheckpointFormatError, match="compressed") as caught:
        open_pytorch(path)
    assert caught.value.tensor == "w"


@pytest.mark.parametrize("packed", [False, True], ids=["stored", "deflated"])
def test_parts(packed, form, tmp_path):
    if packed and form:
        pytest.skip("the old format has no compression")
    base = np.arange(3 * 40 * 50, dtype=np.float32).reshape(3, 40, 50)
    value = {"plain": base, "turned": base.transpose(2, 0, 1), "row": base[1]}
    if not packed:
        value |= {"holes": base[:, ::3, 5:20], "repeated": np.broadcast_to(base[0, :1], (30, 50))}

    def state():
        a = torch.from_numpy(base)
        found = {"plain": a, "turned": a.permute(2, 0, 1), "row": a[1]}
        views = {"holes": a[:, ::3, 5:20], "repeated": a[0, :1].expand(30, 50)}
        return found if packed else found | views

    path = save(tmp_path / "m.pt", file_of(state, **form))
    with open_pytorch(recompressed(path) if packed else path) as table:
        parts, slices = [], []
        for name, tensor in value.items():
            for cut in range(1, 4):
                region = tuple((size // (cut + 2), size - size // 5) for size in tensor.shape)
                index = tuple(slice(*span) for span in region)
                slices.append(np.ascontiguousarray(tensor[index]))
                parts.append(Part(name, region, aligned_empty(slices[-1].nbytes)))
        assert read_parts(table, parts) > 0
    for part, wanted in zip(parts, slices, strict=True):
        assert part.memory.tobytes() == wanted.tobytes(), part[:2]


def test_a_changed_byte_is_found_whichever_tensor_is_read(tmp_path):
    def state():
        a = torch.arange(100.0)
        return {"a": a, "b": torch.arange(50.0), "tail": a[90:]}

    content, value = file_and_arrays(state)
    path, data = tmp_path / "m.pt", bytearray(content)
    data[data.index(value["a"].tobytes()) + 7] ^= 1
    path.write_bytes(data)
    with open_pytorch(path) as table:
        assert table.read("b").tolist() == value["b"].tolist()
        for name in ("a", "tail"):
            with pytest.raises(CheckpointCorruptError) as caught:
                table.read(name)
            assert caught.value.tensor == name
        with pytest.raises(CheckpointCorruptError):
            read_parts(table, [Part("tail", ((0, 1),), aligned_empty(4))])


def test_without_checksums(tmp_path):
    path = save(tmp_path / "m.pt", file_of(lambda: {"a": torch.arange(4.0)}, has_crcs=False))
    table, arrays = read_all(path, open_pytorch)
    assert table.entries["a"].checksum is None
    assert_equal(arrays, loaded(path))


def test_a_module_is_refused_by_name(form, tmp_path):
    path = save(tmp_path / "m.pt", file_of(lambda: torch.nn.Linear(2, 2), **form))
    with pytest.raises(CheckpointError) as caught:
        open_pytorch(path)
    assert "torch.nn.modules.linear.Linear" in str(caught.value)


LIMITS = {
    "tensors": 10, "name_bytes": 10, "pickle_bytes": 1000, "pickle_items": 20, "pickle_depth": 1,
    "storage_bytes": 7, "json_digits": 20, "pickle_instructions": 20,
}  # fmt: skip


@pytest.mark.parametrize("option", LIMITS)
def test_limits_are_the_callers(option, form, tmp_path):
    def state():
        tensors = {f"layer{i}.weight": torch.ones(2) for i in range(20)}
        return {**tensors, "n": 10**30, "d": {"d": 1}}

    content = file_of(state, f"limits: pytorch {'legacy' if form else 'zip'}", **form)
    path = save(tmp_path / "m.pt", content)
    with pytest.raises(CheckpointLimitError, match=option) as caught:
        open_pytorch(path, limits=Limits(**{option: LIMITS[option]}))
    assert caught.value.path == str(path)
    if option == "pickle_bytes" and form:
        return  # its pickles are not measured before they are read
    assert str(LIMITS[option]) in caught.value.expected


def test_limits_can_be_raised(tmp_path):
    deep = number = 1
    for _ in range(150):
        deep = {"k": deep}
    path = save(tmp_path / "m.pt", file_of(lambda: {"a": torch.ones(1), "deep": deep}))
    with pytest.raises(CheckpointLimitError, match="pickle_depth"):
        open_pytorch(path)
    table = open_pytorch(path, limits=Limits(pickle_depth=200))
    assert table.metadata["deep" + ".k" * 150] == str(number)


def test_views_that_repeat_their_storage_have_a_limit(tmp_path):
    def state():
        base = torch.ones(1 << 20)
        return {str(i): base.expand(20, -1) for i in range(20)}

    path = save(tmp_path / "m.pt", file_of(state))
    with pytest.raises(CheckpointLimitError, match="expansion") as caught:
        open_pytorch(path)
    assert caught.value.tensor == "13"  # at 80 MiB each: over 1 GiB and 16 times 4 MiB
    with open_pytorch(path, limits=Limits(expansion=400)) as table:
        assert len(table.entries) == 20


def test_names_written_out_have_a_limit(tmp_path):
    """A long key on a path to many tensors stands in the pickle once, in the names each time."""
    inner = {str(i): 1 for i in range(3000)}
    path = save(tmp_path / "m.pt", file_of(lambda: {"x" * 30_000: inner}))
    with pytest.raises(CheckpointError, match="expansion"):
        open_pytorch(path)


# --- damage -------------------------------------------------------------------------------------


def small() -> bytes:
    """An archive with a little of everything, as torch saves it."""

    def state() -> dict:
        base = torch.arange(12.0).reshape(3, 4)
        return {
            "a": base, "t": base.T, "h": torch.arange(5).bfloat16(),
            "f": torch.ones(4).to(torch.float8_e5m2), "l": [torch.zeros(1), "y"],
            "n": OrderedDict(w=torch.nn.Parameter(torch.ones(2)), x=3),
        }  # fmt: skip

    return file_of(state, "pytorch: small")


def has_folders(path: Path) -> bool:
    """Whether the directory calls a member a folder: torch then gives memory it never filled."""
    with zipfile.ZipFile(path) as archive:
        return any(info.external_attr & 0x10 for info in archive.infolist())


def taken(path: Path, mutants: Iterable[bytes]) -> Iterator[tuple[int, bytes, Arrays]]:
    """The damaged files that are read, and what is: then the sums of an archive are right."""
    for number, data in enumerate(mutants):
        path.write_bytes(data)
        try:
            _, arrays = read_all(path, open_pytorch)
        except CheckpointError as error:
            assert "\n" not in str(error) and error.path == str(path)
            continue
        if data.startswith(b"PK"):
            with zipfile.ZipFile(path) as archive:
                for info in archive.infolist():
                    is_read = info.filename.endswith("data.pkl") or "/data/" in info.filename
                    if is_read and info.CRC:
                        archive.read(info)  # raises BadZipFile for a wrong sum
        yield number, data, arrays


def digest_by_torch(path: Path, data: bytes) -> str:
    """The digest of what torch.load reads from damaged data; nothing where it reads none."""
    path.write_bytes(data)
    if data.startswith(b"PK") and has_folders(path):
        return ""
    try:
        return digest(load_with_torch(path))
    except Exception:
        return ""


def count_taken(path: Path, mutants: Iterable[bytes]) -> int:
    """How many damaged files are taken, after each was compared with what torch makes of it."""
    found = list(taken(path, mutants))
    theirs = dict(
        recorded(
            lambda: [(number, digest_by_torch(path, data)) for number, data, _ in found],
            is_compared=False,
        )
    )
    for number, _, arrays in found:
        assert number in theirs, "no answer of torch is kept for it: pytest --oracles=write"
        assert theirs[number] in ("", digest(arrays)), number
    assert any(theirs.values())
    return len(found)


def undamaged(form: dict) -> bytes:
    """The same bytes in every run: torch.save names the storages of the old format by addresses."""
    return small() if not form else corpus.LEGACY_VIEWS


@pytest.mark.parametrize("seed", range(6))
def test_damage(seed, form, tmp_path):
    data = undamaged(form)
    assert len(list(taken(tmp_path / "whole.pt", [data]))) == 1
    # Damage to what is not read goes unseen in an archive, damage to values in the old format.
    assert 0 < count_taken(tmp_path / "m.pt", mutations(data, 250, seed)) < 200


@pytest.mark.parametrize("seed", range(2))
def test_damage_to_the_pickle_under_a_right_sum(seed, tmp_path):
    with zipfile.ZipFile(io.BytesIO(small())) as archive:
        rest = {n.removeprefix("m/"): archive.read(n) for n in archive.namelist()}
    mutants = (
        corpus.zipped(corpus.members(b"", {}, **{**rest, "data.pkl": each}))
        for each in mutations(rest["data.pkl"], 500, seed)
    )
    assert 0 < count_taken(tmp_path / "mutant.pt", mutants) < 400


@pytest.mark.oracle
def test_damage_at_length(form, tmp_path):
    path = tmp_path / "m.pt"
    mutants = mutations(undamaged(form), 25_000, 99)
    for number, data, arrays in taken(path, mutants):
        assert digest_by_torch(path, data) in ("", digest(arrays)), number


def test_the_package_alone_opens_a_file(tmp_path):
    """In a process that has no torch."""
    path = save(tmp_path / "m.pt", file_of(lambda: {"a": torch.arange(3)}))
    code = (
        "import sys; from maxjax.storage.pytorch.reader import open_pytorch;"
        f"print(open_pytorch({str(path)!r}).read('a').tolist(), sorted({{'torch', 'pickle'}} & {{*sys.modules}}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "[0, 1, 2]" in out.stdout and "torch" not in out.stdout
