"""The names that MAX's 789 model files use: which are supported, which are refused, and what a refused one does.

A line of ``max_names.txt`` is "path below max: name=uses …"; `python scripts/max_files.py --names` writes it.
"""

import dataclasses
import importlib
from collections import Counter
from pathlib import Path

import pytest

from maxjax.absent import ADVICE, absent, is_refused
from maxjax.graph import ops
from maxjax.nn import Module
from scripts.max_files import HOW, installation, read, surveyed, table

ROOT = Path(__file__).parent.parent

# Names that are neither supported nor refused, with the reason.
MISSING = {("graph", "AlgebraicDim.apply"): "the name of an operator of MAX's compiler"}
REFUSED = [
    (path, name) for path, table in ADVICE.items() for names in table for name in names.split()
]


def test_what_there_is_of_the_surveyed_names():
    found = surveyed()
    assert {(one["path"], one["name"]) for one in found if one["status"] == "missing"} == set(
        MISSING
    )
    names, uses = Counter(one["status"] for one in found), Counter()
    for one in found:
        uses[one["status"]] += one["uses"]
    # This fails if a name is no longer supported; raise the numbers when there are more.
    assert names["there"] >= 420 and uses["there"] / uses.total() >= 0.994
    assert (ROOT / "docs" / "coming-from-max.md").read_text().count(table(found)) == 1, (
        "run `python scripts/max_files.py --table` for the page's table"
    )


def test_every_refused_name_is_refused_and_has_advice():
    for path, name in REFUSED:
        assert is_refused(getattr(importlib.import_module(f"maxjax.{path}"), name)), (path, name)
    assert all(
        text and not text.endswith(".") for table in ADVICE.values() for text in table.values()
    )


@pytest.mark.parametrize(
    ("path", "name", "says"),
    [
        ("nn.kv_cache", "KVCacheMemory", "maxjax.nn.KVCache"),
        ("nn.comm.ep.ep_kernels", "fused_silu_quantized", "maxjax.load"),
        ("nn.kernels", "mla_decode_graph", "DeepSeek"), ("graph.ops", "custom", "jax.ffi"),
        ("graph.ops", "parallel", "XLA schedules"), ("graph.ops.random", "normal", "jax.random.normal"),
    ],
)  # fmt: skip
def test_a_refused_name_can_be_imported_and_says_what_to_do_when_it_is_used(path, name, says):
    scope: dict = {}
    exec(f"from maxjax.{path} import {name} as one", scope)
    with pytest.raises(
        NotImplementedError, match=rf"maxjax has no {path}\.{name}, which MAX has: .*{says}"
    ):
        scope["one"]()
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        exec(f"from maxjax.{path} import nonsense")


def test_a_refused_name_stands_where_a_file_needs_a_class():
    one = absent("maxjax.nn", {"Params Other": "use a KVCache"})("Params")

    @dataclasses.dataclass
    class Config(one[int]):
        params: one | None = one.LAST
        layers: list[one] = dataclasses.field(default_factory=list)

        @one.strategy.setter
        def strategy(self, value): ...

    class Layer(Module, one):
        def __call__(self, x): ...

    for use in (Config, Layer, one.from_params, lambda: list(one)):
        with pytest.raises(NotImplementedError, match="maxjax has no nn.Params.*: use a KVCache"):
            use()
    assert one.LAST is one.LAST and not isinstance(3, one)
    assert not hasattr(one, "_private") and "does not have" in repr(one)


def test_ops_name_what_they_do_not_do():
    with pytest.raises(NotImplementedError, match="Mojo"):
        ops.custom("kernel", device=None, values=[], out_types=[])


FILE = """
from max import nn
from max.graph import ops, DeviceRef as D
from max.nn.layer import Module
import max.driver as d

class A(Module):
    def f(self, x: D.CPU):
        return ops.cast(ops.nothing(x), 1), nn.kernels.rope(x), d.Buffer.zeros
"""


def test_names_are_counted_as_they_are_used(tmp_path):
    (tmp_path / "nn" / "layer").mkdir(parents=True)
    (tmp_path / "graph" / "ops").mkdir(parents=True)
    (tmp_path / "driver").mkdir()
    (tmp_path / "nn" / "kernels.py").touch()
    (tmp_path / "file.py").write_text(FILE)
    found = read(tmp_path / "file.py", tmp_path)
    assert found is not None and found.defines_module
    assert {key: n for key, n in found.uses.items() if n} == {
        ("graph", "DeviceRef"): 1, ("graph", "DeviceRef.CPU"): 1, ("nn.layer", "Module"): 1,
        ("graph.ops", "cast"): 1, ("graph.ops", "nothing"): 1, ("nn.kernels", "rope"): 1,
        ("driver", "Buffer"): 1, ("driver", "Buffer.zeros"): 1,
    }  # fmt: skip


def test_without_max_there_is_one_clear_line(tmp_path):
    assert installation(str(tmp_path)) is None
    assert "pip install max==26.7.0" in HOW and "\n" not in HOW
