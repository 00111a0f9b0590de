"""`maxjax bench`: what it counts, and that it runs; its times are nobody's to assert."""

import functools
import json

import jax
import jax.numpy as jnp
import pytest

import maxjax
from maxjax.cli import bench as cli_bench

from .models import in_process, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), text=False)


@pytest.fixture
def bench(monkeypatch, model):
    monkeypatch.setattr(cli_bench, "_PROBE_BYTES", 1 << 16)
    return functools.partial(in_process, "bench", "--model", model)


def test_json(bench):
    code, out, err = bench("--batch", "1,2", "--prompt", 20, "--new", 8, "--repeats", 2, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["class"], found["dtype"], found["devices"]) == ("Llama", "float32", 1)
    assert [(row["batch"], row["prompt"], row["new"]) for row in found["rows"]] == [
        (1, 20, 8),
        (2, 20, 8),
    ]
    for row in found["rows"]:
        assert all(row[name] > 0 for name in row if not name.startswith("compile"))
        assert row["decode_tokens_s"] == pytest.approx(row["batch"] / row["decode_s"])
        # Keys and values of two layers, two heads, width 8, of the 24 tokens half way.
        assert row["cache_bytes_read"] == row["batch"] * 24 * 2 * 2 * 2 * 8 * 4


def test_a_table(bench):
    code, out, _ = bench("--prompt", 4, "--new", 2, "--repeats", 1, "--mesh", "model=2")
    assert code == 0 and "2 x cpu, mesh model=2" in out
    row = next(line for line in out.splitlines() if line.split()[:3] == ["1", "4", "2"])
    assert row.endswith("%")


def test_bytes_that_a_step_reads(model):
    found, _ = maxjax.load(model)
    every = sum(leaf.nbytes for leaf in jax.tree.leaves(found))
    assert cli_bench.weight_bytes(found) == every
    row = 32 * 4
    assert cli_bench.weight_bytes(found, 3) == every - (257 - 3) * row
    found, _ = maxjax.load(model, mesh=maxjax.make_mesh(data=2))
    assert cli_bench.weight_bytes(found) == 2 * every  # each device reads its own copy


def test_bytes_of_experts():
    from maxjax.models import Mixtral, MixtralConfig

    config = MixtralConfig(
        64,
        16,
        24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    model = Mixtral(config)
    for weight in model.raw_state_dict().values():
        weight.value = jnp.zeros(tuple(map(int, weight.shape)), jnp.float32)
    every, expert = cli_bench.weight_bytes(model), 3 * 16 * 24 * 4
    table = 64 * 16 * 4
    rest = every - 8 * expert
    read = cli_bench.weight_bytes(model, 1)
    assert rest - table < read - 2 * expert <= rest
    more = cli_bench.weight_bytes(model, 2) - read
    assert 0 <= more - (8 * (1 - 0.75**2) - 2) * expert <= table


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--prompt", 250), 1, "--prompt 250 and --new 64 are 314 tokens, and the model's context is 256"),
        (("--batch", "1,x"), 2, "usage: maxjax bench"),
        (("--batch", "0"), 2, "0: it must be an integer of at least 1"),
        (("--new", "1"), 2, "at least 2"),
        (("--dtype", "int8"), 2, "int8"),
    ],
)  # fmt: skip
def test_wrong_input(bench, arguments, code, says):
    found, out, err = bench(*arguments)
    assert (found, out) == (code, "") and says in err


def test_help_says_what_is_measured():
    assert "bandwidth" in in_process("bench", "--help")[1]
