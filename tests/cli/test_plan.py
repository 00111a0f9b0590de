"""`maxjax plan` as a user runs it."""

import json

import numpy as np
import pytest

from scripts.bench_plan import LLAMA_405B, shapes, write_sparse

from .models import here, in_process
from .test_application import fails, maxjax, succeeds, write_safetensors


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    write_sparse(directory, LLAMA_405B | {"num_hidden_layers": 2}, 3)
    return directory


def test_a_table(llama):
    out = succeeds("plan", llama, "--mesh", "model=8,data=2", run=maxjax)
    assert out.startswith("mesh model=8, data=2 (16 devices); the model's own rules\n"), out[:120]
    row = next(line for line in out.splitlines() if "gate_proj" in line).split()
    assert row[:4] == ["model.layers.*.mlp.gate_proj.weight", "2", "bfloat16", "53248x16384"]
    assert row[6:8] == [f"{2 * 2 * 53248 * 16384:,}", f"{2 * 2 * 53248 * 16384 // 8:,}"]


def test_json_and_the_codes(llama):
    arguments = ("plan", llama, "--mesh", "model=8", "--dtype", "bf16", "--json",
                 "--batch", 2, "--length", 10)  # fmt: skip
    found = json.loads(succeeds(*arguments))
    assert found["fits"] is None and found["devices"] == 8
    assert found["cache_bytes_per_device"] == 2 * 2 * 2 * 10 * 128 * 2
    assert sum(kind["count"] for kind in found["kinds"]) == len(
        shapes(LLAMA_405B | {"num_hidden_layers": 2})
    )
    assert json.loads(succeeds(*arguments, "--hbm", "80GB"))["fits"] is True
    done = here(*arguments, "--hbm", "1GiB")
    assert (done.returncode, done.stderr) == (1, "")
    small = json.loads(done.stdout)
    assert small["fits"] is False and small["hbm"] == 1 << 30
    assert small["suggestion"]["devices"] > 8
    text = here("plan", llama, "--hbm", "1GiB")
    assert text.returncode == 1 and "what fits" in text.stdout


def test_a_model_that_maxjax_has(minilm):
    out = succeeds("plan", minilm, "--mesh", "model=4", "--dtype", "fp16")
    assert "the model's own rules" in out and "float16" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--mesh", "8"), "model=8,data=2"),
        (("--mesh", "model=0"), "positive"),
        (("--mesh", "rows=8,model=1"), "'rows'"),
        (("--hbm", "much"), "'5GB', '16GiB'"),
        (("--hbm", "80"), "80 has no unit: write 80GiB, or 80B for bytes"),
        (("--dtype", "bf17"), "bf17"),
        (("--batch", "1"), "length"),
        (("--batch", "-1", "--length", "1"), "argument --batch: -1"),
        (("--device", "v5e:8"), "v5e:2x4"),
        (("--compile", "b200:8"), "argument --compile: 'b200:8': the kinds are v5e"),
    ],
)
def test_wrong_usage_is_2(llama, arguments, says):
    code, out, err = in_process("plan", llama, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 2) and says in err


def test_the_meshes_of_a_device(llama):
    found = json.loads(succeeds("plan", llama, "--device", "v5p:2x2x1", "--json"))
    assert (found["device"], found["devices"], found["hbm"]) == ("v5p:2x2x1", 4, 95 << 30)
    assert len(found["meshes"]) == 6 and found["meshes"][0]["mesh"] == found["mesh"]
    out = succeeds("plan", llama, "--device", "v5p:2x2x1", "--mesh", "data=4")
    assert (
        out.startswith("mesh data=4 (4 devices) of v5p:2x2x1") and "meshes, the best first" in out
    )
    assert "2 devices" in fails("plan", llama, "--device", "h200:2", "--mesh", "data=4")


def test_programs_are_compiled(tmp_path):
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 16,
              "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    write_sparse(tmp_path, config, 1)
    found = json.loads(succeeds("plan", tmp_path, "--compile", "cpu:2", "--json"))
    assert [one["program"] for one in found["programs"]] == ["decode", "read"]
    assert all(one["temporaries"] > 0 for one in found["programs"])


def test_without_the_compiler(llama, monkeypatch):
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/nowhere/libtpu.so")
    code, out, err = in_process("plan", llama, "--compile", "v5e:16x16")
    assert (code, out) == (1, "") and err.startswith(
        "maxjax: v5e:16x16 needs XLA's compiler for TPUs"
    )
    assert "unexpected" not in err and "pip install libtpu" in err


def test_wrong_path(tmp_path):
    assert "absent" in fails("plan", tmp_path / "absent")
    assert str(tmp_path) in fails("plan", tmp_path)


def test_a_cache_of_which_nothing_is_known(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", {"w": np.zeros((2, 2))})
    assert "config.json" in fails("plan", path, "--batch", 1, "--length", 1)
    assert "no config.json" in succeeds("plan", path)


def test_help_names_the_command():
    assert "plan" in succeeds("--help") and "--hbm" in succeeds("plan", "--help")
