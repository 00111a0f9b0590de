"""Tables of names: every row has an inverse, and a table reads what it writes."""

import numpy as np
import pytest

from maxjax.errors import CheckpointFormatError
from maxjax.graph.weights import WeightData
from maxjax.models import all_families
from maxjax.models.fused_experts import FusedExperts
from maxjax.models.names import (
    DECODER,
    GAMMA_BETA,
    MULTIMODAL,
    PREDICTION,
    Drop,
    Headless,
    Names,
    Prefix,
    Rename,
    unwrapped,
)


def names_of(family):
    """Names of the weights of a model, with numbers for its layers and experts."""
    tables = [family.gguf] if family.gguf is not None else []
    rules = [rule for table in tables for rules in table.names.values() for rule in rules]
    found = [rule.name.replace("*", "1").replace("#", "2") + ".weight" for rule in rules]
    return [*found, *family.tied, "norm.weight", "layers.0.mlp.up_proj.bias"]


@pytest.mark.parametrize("family", all_families(), ids=lambda one: one.architectures[:1] or "-")
def test_each_name_that_files_may_have_is_read_as_the_same_weight(family):
    table = family.names
    for own in {table.model_name(name) for name in names_of(family)} - {None}:
        written = table.written_name(own)
        for name in (written, *table.file_names(own)):
            assert table.model_name(name) == own
            assert table.written_name(name) == written
        (saved,) = table.write({own: 1})
        assert saved == written


def test_rows_are_applied_in_order():
    table = Names(
        Prefix({"bert.": ""}), Drop("cls.*", head=True), Drop("*.ids"), Drop("mtp.*", kept=True),
        Headless("model.", ("layers.",)), GAMMA_BETA,
    )  # fmt: skip
    given = ["bert.layers.0.LayerNorm.gamma", "bert.cls.x", "a.ids", "mtp.x", "x.k_scale"]
    assert [table.model_name(name) for name in given[:4]] == [
        "model.layers.0.LayerNorm.weight", None, None, None
    ]  # fmt: skip
    assert table.heads(given) == ["bert.cls.x"]
    assert table.unloaded(given) == ["bert.cls.x", "mtp.x"]
    assert table.without("cls.*").model_name("bert.cls.x") == "cls.x"
    assert table.is_headless(["layers.0.x"]) and not table.is_headless(["layers.0.x", "head"])
    assert table.headless_prefix == "model."


def test_two_tensors_of_one_weight_are_refused():
    with pytest.raises(CheckpointFormatError, match=r"'gamma' and 'weight' are both the .* a bert"):
        Names(Rename({"gamma": "weight"})).read({"gamma": 1, "weight": 2}, "bert")


def test_a_file_is_written_with_the_names_that_it_had():
    table = Names(*MULTIMODAL, *DECODER)
    old = {"model.norm.weight": "language_model.model.norm.weight"}
    found = table.write({"model.norm.weight": 1, "lm_head.weight": 2}, old)
    assert found == {"language_model.model.norm.weight": 1, "lm_head.weight": 2}


def test_layers_of_prediction_are_dropped_whole():
    names = ["model.layers.1.mlp.w", "model.layers.2.enorm.weight", "model.layers.2.mlp.w"]
    assert list(Names(PREDICTION).read(dict.fromkeys(names))) == names[:1]
    assert Names(PREDICTION).unloaded(names) == names[1:]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_experts_are_split_and_fused_again(transposed, interleaved):
    row = FusedExperts(transposed=transposed, interleaved=interleaved, written=True)
    values = np.arange(3 * 8 * 5, dtype=np.float32).reshape(3, 8, 5)
    down = np.arange(3 * 5 * 4, dtype=np.float32).reshape(3, 5, 4)
    turned = (lambda a: np.ascontiguousarray(a.transpose(0, 2, 1))) if transposed else np.asarray
    front = "layers.0.mlp.experts."
    given = {front + "gate_up_proj": turned(values), front + "down_proj": turned(down)}
    lazy = {name: WeightData.from_numpy(value, name) for name, value in given.items()}
    split = row.split(lazy)
    assert len(split) == 9
    gate = np.asarray(split[front + "1.gate_proj.weight"].data)
    np.testing.assert_array_equal(gate, values[1, ::2] if interleaved else values[1, :4])
    fused = row.fuse(split)
    assert fused.keys() == given.keys()
    for name, value in given.items():
        np.testing.assert_array_equal(np.asarray(fused[name].data), value)


def test_wrappers_of_pytorch_are_removed():
    given = [
        "module._orig_mod.a.weight",
        "_fsdp_wrapped_module.module.b._checkpoint_wrapped_module.c",
    ]
    assert list(unwrapped(dict.fromkeys(given))) == ["a.weight", "b.c"]
    same = {"module.a": 1, "a": 2}
    assert unwrapped(same) == same
