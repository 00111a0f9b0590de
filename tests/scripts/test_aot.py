"""scripts/aot.py: what it prints of a small model on fake devices, its tables, and its exit codes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from maxjax.engine.plan.topology import Topology
from maxjax.errors import MissingCompilerError
from scripts import aot
from scripts.aot_programs import MODELS, PACKED, TABLE, Case
from scripts.packed_checkpoints import FORMATS

SMALL = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 16384, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "config.json"
    path.write_text(json.dumps(SMALL))
    return path


def run(capsys, *arguments):
    code = aot.main([str(one) for one in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def sections(out):
    """Program -> what -> value."""
    found = {}
    for line in out.replace(aot._INDENT, "; ").splitlines():
        if not line.startswith(" "):
            found[line] = current = {}
        else:
            what, value = line.strip().split(maxsplit=1)
            current[what] = value.strip()
    return found


def test_a_small_model_on_fake_devices(small, capsys, tmp_path):
    code, out, _ = run(capsys, "cpu:8", "--model", small, "--mesh", "data=2,model=2", "--batch", 2,
                       "--capacity", 64, "--tokens", 16, "--dtype", "float32",
                       "--save", tmp_path)  # fmt: skip
    found = sections(out)
    assert code == 0
    assert list(found) == [
        f"cpu:8 {name} config data=2,model=2 B=2 {sizes} float32"
        for name, sizes in (
            ("decode", "S=64"), ("read", "T=16 S=64"), ("read_tokens", "T=16 S=64"), ("call", "T=16")
        )
    ]  # fmt: skip
    assert len(list(tmp_path.glob("*.hlo"))) == 4
    # Half of each weight but the norms, and half of the heads of one of the rows.
    width, layer = 64, 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128
    weights = 4 * ((5 * layer + 2 * 16384 * width) // 2 + 11 * width)
    cache = 2 * 5 * 1 * 1 * 64 * 16 * 4
    table = 4 * 16384 * width // 2
    for name, values in found.items():
        # Of the table 32 rows; the two of a step are less than what is compared.
        rows = 0 if " engine " in name or "decode" in name else 2 * 16 * width * 4
        held = cache if "S=64" in name else 0
        need = weights - table + rows + held
        assert abs(float(values["need"].split()[0]) * aot.MIB - need) < 0.01 * aot.MIB
        for what in ("reads", "writes"):
            size, _, ratio, *_ = values[what].split()
            assert abs(float(size) * aot.MIB / need - float(ratio)) < 0.02
        assert float(values["reads"].split()[0]) * aot.MIB >= 0.99 * need
        arguments = float(values["arguments"].split()[0]) * aot.MIB
        assert abs(arguments - weights - held) < 0.01 * aot.MIB
        reduces = re.findall(r"(\d) a layer x all-reduce f32", values["collectives"])
        assert reduces == ["2"], values  # at the end of attention and at the end of the MLP


@pytest.mark.extra
def test_as_a_command(small):
    """As the step `accelerators` of `.ci/full` runs it; the tests above call the same function here."""
    path = Path(aot.__file__)
    command = [sys.executable, path, "cpu:2", "--model", small, "--mesh", "model=2",
               "--layers", "1", "--program", "call", "--tokens", "8"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cpu:2 call configx1 model=2 B=8 T=8\n")


def test_a_mesh_of_more_devices_than_there_are(small, capsys):
    code, out, err = run(capsys, "cpu:8", "--model", small, "--mesh", "model=16")
    assert (code, out) == (2, "") and "16 devices" in err


@pytest.mark.parametrize("name", ["v5e", "v5e:2", "h200:2x4", "h200:0", "b200:8", "v5p:8", ""])
def test_no_topology(name, capsys):
    code, out, err = run(capsys, name)
    assert (code, out) == (2, "") and "topology" in err


def test_without_the_compilers(monkeypatch, capsys):
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/nowhere/libtpu.so")
    code, _, err = run(capsys, "v5e:2x4")
    assert code == 2 and "pip install libtpu" in err and "/nowhere" in err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = run(capsys, "h200:8", "--program", "decode")
    assert code == 2 and "jax-cuda13-plugin==" in err and "nvidia-cudnn-cu13" in err
    with pytest.raises(MissingCompilerError):
        Topology.of("h100:8").devices()


class Split:
    """An array whose first axis is split over eight devices."""

    def __init__(self, *shape, whole=False):
        self.shape, self.sharding, self.whole = shape, self, whole

    def shard_shape(self, shape):
        return shape if self.whole else (shape[0] // 8, *shape[1:])


def test_the_experts_of_a_device_are_those_of_its_part_of_the_weights():
    config = {"num_experts": 64, "num_experts_per_tok": 4, "hidden_size": 32}
    weights = {
        "model.layers.0.mlp.experts.*.up_proj.qweight": Split(64, 16, 32),
        "model.layers.0.mlp.experts.*.up_proj.g_idx": Split(64, 32, whole=True),
        "model.layers.0.mlp.gate.weight": Split(8, 32),
    }
    assert aot.mixture_of(config, weights, 5) == (64, 8, 4, 5, 32)
    assert aot.mixture_of({"hidden_size": 32}, weights, 5) is None


# --- the table ------------------------------------------------------------------------------------

LINES = {
    "v5e:2x4 decode a | arguments": "100.00 MiB",
    "v5e:2x4 decode a | temporaries": "30.00 MiB",
    "v5e:2x4 decode a | copies": "3; 1 x 2.0 MiB (bf16 model.w); 2 x 1.0 MiB (once, f32 state.cache.k)",
    "v5e:2x4 decode a | kernels": "none",
    "h200:8 decode a | copies": "0",
}


def test_a_table_is_read_as_it_was_written():
    assert aot.read_table(aot.written(LINES)) == LINES


@pytest.mark.parametrize(
    ("changes", "differ"),
    [
        ({}, []),
        ({"v5e:2x4 decode a | arguments": "104.90 MiB"}, []),
        ({"v5e:2x4 decode a | arguments": "106.00 MiB"}, ["arguments"]),
        ({"v5e:2x4 decode a | temporaries": "30.99 MiB"}, []),
        ({"v5e:2x4 decode a | temporaries": "33.00 MiB"}, ["temporaries"]),
        ({"v5e:2x4 decode a | copies": "0"}, ["copies"]),
        ({"v5e:2x4 decode b | copies": "0"}, ["b"]),
        ({"h200:8 decode a | copies": None}, []),  # the other kind was not compiled
        ({"v5e:2x4 decode a | kernels": None}, ["kernels"]),
    ],
    ids=str,
)
def test_what_differs(changes, differ):
    found = {name: value for name, value in (LINES | changes).items() if value is not None}
    lines = aot.differing(LINES, found)
    assert len(lines) == 2 * len(differ)
    assert all(word in line for word, line in zip(differ, lines[::2], strict=True))


@pytest.fixture
def one_case(small, monkeypatch):
    """The fixed set as one small program of CPU devices."""
    case = Case("call", str(small), 1, {"model": 2}, 1, 0, 8, "float32")
    monkeypatch.setattr(aot, "TABLE", (case,))
    monkeypatch.setattr(aot, "TOPOLOGIES", {"cpu": {8: "cpu:8"}})
    monkeypatch.setattr(aot, "PACKED", ())


def test_a_table_is_written_and_compared(one_case, capsys, tmp_path):
    path = tmp_path / "table.txt"
    assert run(capsys, "--table", path)[0] == 0
    text = path.read_text()
    assert "scripts/accelerators.sh --table scripts/aot.txt" in text.splitlines()[1]
    code, out, _ = run(capsys, "--check", path)
    assert code == 0 and out.startswith("8 lines as in")
    path.write_text(re.sub(r"(arguments +)\S+", r"\g<1>1.00", text))
    code, out, _ = run(capsys, "--check", path)
    assert code == 1 and out.count("\n") == 2 and "| arguments | expected 1.00 MiB" in out
    assert run(capsys, "v5e", "--check", path)[0] == 2
    assert run(capsys, "--check", tmp_path / "absent")[0] == 2


def test_a_table_keeps_the_lines_of_other_programs(monkeypatch):
    cases = [("v5e:2x4", Case("decode", name, 1, {}, 1, 1)) for name in "abc"]
    monkeypatch.setattr(aot, "PACKED", cases)
    line = lambda name: f"v5e:2x4 {Case('decode', name, 1, {}, 1, 1)} | copies"
    before = {line("c"): "1", line("gone"): "2", line("b"): "3"}
    after = aot.merged(before, {line("b"): "4", line("a"): "5"})
    assert list(after.items()) == [(line("a"), "5"), (line("b"), "4"), (line("c"), "1")]


def test_programs_of_the_fixed_set_are_chosen_by_set_kind_and_name(
    one_case, monkeypatch, capsys, tmp_path
):
    packed = [("h200:8", Case("decode", name, 1, {}, 1, 1, packed="FP8")) for name in ("a", "b")]
    monkeypatch.setattr(aot, "PACKED", packed)
    assert [t for t, _ in aot.fixed_set()] == ["cpu:8", "h200:8", "h200:8"]
    assert aot.fixed_set(["h200"]) == packed == aot.fixed_set(sets=["packed"])
    assert aot.fixed_set(["h200"], ["floats"]) == []
    code, _, err = run(capsys, "--table", tmp_path / "t", "--only", "no such")
    assert code == 2 and "no such" in err


def test_the_fixed_set_has_what_it_is_for():
    names = {case.model for case in TABLE}
    assert {"llama8", "llama70", "gemma3", "mixtral22", "gpt2"} <= names <= set(MODELS)
    assert {case.program for case in TABLE} == set(aot.PROGRAMS)
    assert {1, 8, 64} <= {case.devices for case in TABLE}
    assert len(set(map(str, TABLE))) == len(TABLE)
    assert {case.packed for _, case in PACKED} >= {*FORMATS, "Q4_K", "Q8_0", "IQ4_XS"}
    for topology, case in aot.fixed_set():
        assert Topology.of(topology).count >= case.devices


def test_the_committed_table_is_of_the_fixed_set():
    found = aot.read_table((Path(aot.__file__).parent / "aot.txt").read_text())
    wanted = [f"{topology} {case}" for topology, case in aot.fixed_set()]
    assert list(dict.fromkeys(name.rpartition(" | ")[0] for name in found)) == wanted
    assert not any(name.endswith("| failed") for name in found)


def test_no_program_of_the_committed_table_reads_less_than_it_needs():
    found = aot.read_table((Path(aot.__file__).parent / "aot.txt").read_text())
    ratios = {
        name: float(value.split()[2]) for name, value in found.items() if name.endswith("| reads")
    }
    # Of GPT-2's table of positions only some rows are read, but all are counted as needed.
    assert len(ratios) > 100 and min(ratios.values()) >= 0.97
