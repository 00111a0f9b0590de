"""The reader of pickles, against Python's own: plain values, the places of errors, the tables."""

import io
import pickle
import pickletools
import re
import time
import zipfile
from collections import Counter, OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxjax.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointLimitError,
    CheckpointUnsafeError,
)
from maxjax.storage.limits import Limits
from maxjax.storage.pytorch import pickles
from maxjax.storage.pytorch.names import find, persistent
from maxjax.storage.pytorch.pickle_machine import Token, described
from maxjax.storage.pytorch.pickles import read_pickle
from tests.oracles.recorded import recorded, torch
from tests.properties import examples
from tests.storage.mutate import mutations
from tests.storage.pytorch.oracle import file_of
from tests.storage.watch import watched


def read(data: bytes, tokens=find, **options):
    return read_pickle(data, path="m.pt", offset=0, limits=Limits(), tokens=tokens, **options)


KEYS = st.text(max_size=8) | st.integers(-(2**60), 2**60) | st.binary(max_size=5)
SCALARS = (
    st.none() | st.booleans() | st.text(max_size=300) | st.binary(max_size=300)
    | st.integers(-(2**80), 2**80) | st.integers(-300, 300) | st.floats(allow_nan=False)
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=5)
    ),
    max_leaves=30,
)


@given(VALUES, st.integers(1, 5))
@examples(60)
def test_plain_values_are_what_python_reads(value, protocol):
    data = pickle.dumps(value, protocol)
    found, end = read(data)
    assert end == len(data)
    assert repr(found) == repr(value)


@pytest.mark.parametrize("protocol", range(1, 6))
def test_containers_of_classes(protocol):
    value = lambda: {
        "o": OrderedDict(a=1, b=OrderedDict()), "s": {3}, "e": set(), "b": b"", "l": b"\xff" * 300,
        "z": torch.Size([2, 3]), "d": torch.device("cuda", 1), "t": torch.float16,
    }  # fmt: skip
    found, _ = read(recorded(lambda: pickle.dumps(value(), protocol), is_compared=False))
    # A device has its number beside it; what stands for a type is its token.
    assert found["t"].value.name == "float16"
    assert {key: found[key] for key in "osebzl"} == {
        "o": {"a": 1, "b": {}}, "s": [3], "e": [], "b": b"", "z": (2, 3), "l": b"\xff" * 300,
    }  # fmt: skip
    assert found["d"] == "cuda"


@pytest.mark.parametrize("protocol", range(1, 6))
def test_what_a_training_checkpoint_has_beside_tensors(protocol):
    """The milestones of a schedule of learning rates are a Counter."""
    value = {
        "c": Counter({30: 1, 80: 2}),
        "z": 1.5 - 2j,
        "b": bytearray(b"\0\xff"),
        "e": bytearray(),
    }
    found, _ = read(pickle.dumps(value, protocol))
    assert found == {"c": {30: 1, 80: 2}, "z": 1.5 - 2j, "b": b"\0\xff", "e": b""}
    assert {type(one) for one in found.values()} == {dict, complex, bytes}


def test_an_ordered_dict_with_attributes():
    value = OrderedDict(a=1)
    value._metadata = OrderedDict(version=1)
    assert read(pickle.dumps(value, 2))[0] == {"a": 1}


def test_what_python_2_wrote():
    items = b"ccollections\nOrderedDict\n]q\x01(]q\x02(U\x01aK\x01e]q\x03(U\x01bK\x02ee\x85R."
    assert read(b"\x80\x02" + items)[0] == {"a": 1, "b": 2}
    assert read(b"\x80\x02U\x02\xff\xfe.")[0] == b"\xff\xfe"
    assert read(b"\x80\x02T\x02\0\0\0ab.")[0] == "ab"
    assert read(b"I01\n.")[0] is True and read(b"L-12L\n.")[0] == -12


def test_bytes_as_text_are_text_of_bytes():
    call = b"\x80\x02c_codecs\nencode\n(%bX\x06\0\0\0latin1tR."
    assert read(call % b"X\x02\0\0\0\xc3\xbf")[0] == b"\xff"
    for wrong in (b"K\1", b"X\x02\0\0\0\xc4\x80", b""):  # a number, no byte, nothing
        with pytest.raises(CheckpointFormatError, match="arguments of encode"):
            read(call % wrong)


def test_shared_values_stay_shared():
    inner = [1]
    found, _ = read(pickle.dumps({"a": inner, "b": inner}, 4))
    assert found["a"] is found["b"]


@pytest.mark.parametrize("depth", [99, 100, 101, 3000])
def test_depth_is_counted_from_the_outermost(depth):
    # Protocol 1 to 5 write a list inside a list by instructions that do not nest.
    data = b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."
    if depth <= 100:
        assert read(data)[1] == len(data)
    else:
        with pytest.raises(CheckpointError, match="pickle_depth"):
            read(data)


def test_depth_through_a_value_measured_before():
    """The second way to it is the longer one."""
    inner = b"]" * 60 + b"a" * 59 + b"q\x01"
    outer = b"](" + inner + b"]" * 50 + b"h\x01" + b"a" * 50 + b"e."
    with pytest.raises(CheckpointError, match="pickle_depth"):
        read(b"\x80\x02" + outer)
    assert read(b"\x80\x02](" + inner + b"]" * 30 + b"h\x01" + b"a" * 30 + b"e.")


def test_place_of_an_error():
    data = b"\x80\x02}X\x01\0\0\0wcposix\nsystem\n."
    for offset, place in ((0, 9), (1000, 1009)):
        with pytest.raises(CheckpointUnsafeError) as caught:
            read_pickle(data, path="m", offset=offset, limits=Limits(), tokens=find)
        assert (caught.value.offset, caught.value.tensor) == (place, "w")
    with pytest.raises(CheckpointUnsafeError) as caught:
        read_pickle(data, path="m", offset=7, is_compressed=True, limits=Limits(), tokens=find)
    assert caught.value.offset == 7


NAMED = [
    (b"}(X\1\0\0\0aK\1X\1\0\0\0b", "b"),
    (b"}(X\1\0\0\0aK\1X\1\0\0\0b}(X\1\0\0\0c", "b.c"),
    (b"}X\1\0\0\0a}X\1\0\0\0b", "a.b"),
    (b"}(X\1\0\0\0actorch\nSize\n((K\1", "a"),
    (b"](K\1", None),
    (b"", None),
]


@pytest.mark.parametrize("start, tensor", NAMED)
def test_the_tensor_of_an_error_is_the_key_being_filled(start, tensor):
    for wrong in (b"cos\nsystem\n", b"\xff"):
        with pytest.raises(CheckpointError) as caught:
            read(b"\x80\x02" + start + wrong)
        assert caught.value.tensor == tensor


def test_every_instruction_of_python_is_read_or_refused():
    """With operands that are right for it; those that build objects are refused as unsafe."""
    unsafe = {"INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"}
    known = {chr(code) for code in pickles._INSTRUCTIONS} | {"."}
    for opcode in pickletools.opcodes:
        if opcode.name in unsafe:
            assert opcode.code not in known
            with pytest.raises(CheckpointUnsafeError):
                read(b"\x80\x02](]" + opcode.code.encode("latin-1") + b"os\nsystem\n.")
        elif opcode.code not in known:
            with pytest.raises(CheckpointFormatError, match="not an instruction"):
                read(b"\x80\x02](]" + opcode.code.encode("latin-1") + b"\0" * 9)
    assert known <= {opcode.code for opcode in pickletools.opcodes}


def test_names_are_among_those_of_torch_itself():
    """What torch.load takes by default, and the modules where older versions had the same."""
    allowed = torch._weights_only_unpickler._get_allowed_globals
    theirs = set(recorded(lambda: sorted(allowed())))
    ours = {f"{module}.{name}" for module, name in pytorch_tokens()}
    more = {f"__builtin__.{name}" for name in ("bytes", "bytearray", "complex", "set")}
    more |= {"builtins.bytes"}
    assert ours - theirs == more | {"torch.half", "torch.float", "torch.double"}
    assert not {name for name in theirs - ours if "Storage" not in name and "Tensor" not in name}


def pytorch_tokens():
    from maxjax.storage.pytorch import names as pytorch_names

    return pytorch_names._TOKENS


def test_storages_of_torch_are_known():
    for module, name, dtype in recorded(_storage_classes):
        token = find(module, name)
        if name == "TypedStorage":
            assert token is None
        elif name.startswith("Q"):
            assert token is not None and token.value is None
        else:
            assert token is not None and f"torch.{token.value.name}" == dtype


def _storage_classes() -> list[tuple[str, str, str]]:
    """The module, the name and the dtype of each; the untyped one has bytes, that of any type none."""
    others = {"UntypedStorage": "torch.uint8", "TypedStorage": ""}
    return sorted(
        (
            kind.__module__,
            kind.__name__,
            others[kind.__name__] if kind.__name__ in others else str(kind._dtype),
        )
        for kind in torch._storage_classes
    )


@pytest.mark.parametrize("name", [
    "os.system", "posix.system", "builtins.eval", "builtins.getattr", "torch.load", "torch.os",
    "torch.storage._load_from_bytes", "torch.serialization.load", "torch.hub.load", "torch.Storage",
    "torch.x.FloatStorage", "torch.ops.FloatStorage", "os.FloatStorage", "numpy.dtype",
    "torch._utils._rebuild_tensor_v2.__globals__", "collections.OrderedDict.fromkeys",
])  # fmt: skip
def test_no_other_name_has_a_token(name):
    module, _, last = name.rpartition(".")
    assert find(module, last) is None
    first, _, rest = name.partition(".")
    assert find(first, rest) is None or rest == "OrderedDict"


def test_a_legacy_type_of_tensors_is_a_value_and_no_function():
    found, _ = read(b"\x80\x02}(K\x01ctorch\nFloatTensor\nK\x02ctorch.cuda\nHalfTensor\nu.")
    assert list(map(str, found.values())) == ["torch.FloatTensor", "torch.cuda.HalfTensor"]
    with pytest.raises(CheckpointError):
        read(b"\x80\x02ctorch\nFloatTensor\nK\x03\x85R.")


def test_tokens_are_inert():
    with watched() as acts:
        found, _ = read(b"\x80\x02(ctorch\nFloatStorage\nctorch._utils\n_rebuild_tensor_v2\nt.")
    assert not acts
    assert [type(token) for token in found] == [Token, Token]
    assert [str(token) for token in found] == [
        "torch.FloatStorage",
        "torch._utils._rebuild_tensor_v2",
    ]


def test_a_call_outside_the_table_is_refused():
    for name in (b"ctorch\nfloat32\n", b"ctorch\nTensor\n", b"ctorch\nFloatStorage\n"):
        with pytest.raises(CheckpointUnsafeError, match=r"calls 'torch\."):
            read(b"\x80\x02" + name + b")R.")


def test_shown_does_not_look_inside():
    laughs: tuple = ()
    for _ in range(100):
        laughs = (laughs, laughs)
    assert described(laughs) == "a tuple of 2"
    assert described(10**3000) == "an integer of 9966 bits"
    assert len(described("x" * 10**6)) < 100


def without_sets(value):
    """What Python reads, with the lists that stand for sets."""
    if isinstance(value, dict):
        return {key: without_sets(item) for key, item in value.items()}
    if isinstance(value, set):
        return list(value)
    if isinstance(value, list | tuple):
        return type(value)(map(without_sets, value))
    return value


def test_damage_gives_only_our_errors():
    """What is taken after all is what Python reads, if that needs no names."""
    value = {
        "a": [1, 2.5, None, True, "text", b"bytes", (1, 2, 3, 4)], "b": {"c": -5, "d": 2**70},
        "long": "x" * 300, 7: ["again"] * 3,
    }  # fmt: skip
    taken = 0
    for protocol in range(1, 6):
        data = pickle.dumps(value, protocol)
        assert not re.search(rb"^c|\x93", data)
        for each in mutations(data, 400, protocol):
            try:
                found, _ = read(each, lambda module, name: None)
            except CheckpointError as error:
                assert "\n" not in str(error) and 0 <= error.offset <= len(each)
                continue
            taken += 1
            try:
                theirs = pickle.loads(each, encoding="utf-8")
            except Exception:
                continue
            assert repr(found) == repr(without_sets(theirs))
    assert taken


# --- bounds ----------------------------------------------------------------------------------

CALL = (
    b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x01tQq\x05"
    b"ctorch._utils\n_rebuild_tensor_v2\nq\x06(h\x05K\0K\x01\x85K\x01\x85\x89}tq\x07"
)
# What one byte string says again and again, behind another.
BOMBS = {
    "values": (b"](", b"N"),
    "duplicates": (b"N", b"2"),
    "slots": (b"N", b"\x94"),
    "filled again": (b"N", b"q\1"),
    "recalled": (b"Nq\1", b"h\1"),
    "tuples": (b"N", b"\x85"),
    "marks": (b"N", b"(t"),
    "dicts": (b"", b"}"),
    "keys": (b"}", b"J%cNs"),
    "appended": (b"]", b"Na"),
    "numbers": (b"](", b"K\5"),
    "long numbers": (b"](", b"\x8a\1\5"),
    "lines": (b"](", b"I7\n"),
    "texts": (b"](", b"U\1a"),
    "protocols": (b"", b"\x80\2"),
    "calls": (b"ctorch\nSize\nq\6)\x85q\7](", b"h\6h\7R"),
    "storages": (CALL.replace(b"tQ", b"tq\x08Q") + b"](", b"h\x08Q"),
    "tensors": (CALL + b"](", b"h\6h\7R"),
}


def bomb(name: str, nbytes: int) -> bytes:
    start, again = BOMBS[name]
    if name == "keys":
        keys = (i.to_bytes(4, "little") for i in range(nbytes // 7))
        return b"\x80\2" + start + b"".join(b"J" + key + b"Ns" for key in keys)
    return b"\x80\2" + start + again * (nbytes // len(again))


def assert_bomb_is_refused(name: str, nbytes: int, limits: Limits) -> float:
    """The seconds of CPU that it takes."""
    data = bomb(name, nbytes)
    began = time.process_time()
    with pytest.raises(CheckpointLimitError) as caught:
        read_pickle(data, path="m.pt", offset=0, limits=limits, tokens=find, persistent=persistent)
    seconds = time.process_time() - began
    option = "tensors=" if name == "tensors" else "pickle_instructions="
    assert option in str(caught.value)
    assert caught.value.offset < len(data) - 1
    return seconds


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_before_it_is_all_read(name):
    """So many instructions where no tensor is made of them, and as many tensors as may be."""
    assert_bomb_is_refused(name, 30_000, Limits(pickle_instructions=8_000, tensors=2_000))


@pytest.mark.parametrize(
    "name",
    # The slowest.
    [pytest.param(name, marks=[] if name == "keys" else pytest.mark.extra) for name in BOMBS],
)
def test_a_larger_bomb_takes_no_longer_to_refuse(name):
    """The limit decides, not the file: compared in one process, as other work slows both."""
    small, large = (assert_bomb_is_refused(name, n * 1_000_000, Limits()) for n in (3, 24))
    assert large < 4 * small + 0.2


def test_tensors_bring_the_instructions_they_take():
    """Whatever a checkpoint's size: 8 million for 200,000 tensors."""
    content = file_of(
        lambda: {f"layers.{i}.weight": torch.nn.Parameter(torch.ones(1)) for i in range(100)}
    )
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        found = archive.read(next(n for n in archive.namelist() if n.endswith("data.pkl")))
    few = Limits(pickle_instructions=50)
    options = {"path": "m.pt", "offset": 0, "tokens": find, "persistent": persistent}
    assert len(read_pickle(found, limits=few, **options)[0]) == 100
    with pytest.raises(CheckpointLimitError, match="too many tensors"):
        read_pickle(found, limits=Limits(tensors=99), **options)
