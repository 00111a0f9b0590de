"""maxjax.quantize: against the encoders, against files of the same blocks, on meshes, in stacks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxjax
from maxjax import nn
from maxjax.checkpoint import convert
from maxjax.engine.quantize import shards
from maxjax.errors import UserInputError
from maxjax.graph import DeviceRef
from maxjax.models import Gemma4, Gemma4Config, Llama, LlamaConfig, Mixtral, MixtralConfig
from maxjax.storage.blocks import ENCODERS, KEPT, decode, encode
from tests.fill import filled
from tests.models.decoders import call

KINDS = [kind.lower() for kind in KEPT if kind in ENCODERS]


@pytest.fixture(scope="module")
def tiny():
    return maxjax.load("tiny")


def random_model(kind=Llama, config=LlamaConfig, **settings):
    """A stacked model whose rows are complete blocks of every kind."""
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = kind(config(64, **(sizes | settings)))
    model.model.layers = model.model.layers.stack()
    return filled(model)


def values(model) -> dict[str, np.ndarray]:
    return {name: np.asarray(w.value) for name, w in model.raw_state_dict().items()}


def wide(array) -> np.ndarray:
    return np.asarray(array).astype(np.float32)


def is_linear(name: str) -> bool:
    return "norm" not in name and not name.endswith("bias")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_every_linear_weight_has_the_blocks_of_the_encoder(kind):
    model = random_model()
    before = values(model)
    quantised, report = maxjax.quantize(model, kind)
    after = quantised.raw_state_dict()
    assert list(after) == list(before)
    for name, weight in after.items():
        if not is_linear(name):
            np.testing.assert_array_equal(np.asarray(weight.value), before[name])
            continue
        blocks = encode(kind.upper(), wide(before[name]))
        np.testing.assert_array_equal(np.asarray(weight.value), blocks, err_msg=name)
        row = report[name]
        assert (row.type, row.bytes_after) == (kind.upper(), blocks.nbytes)
        assert row.bytes_before == before[name].nbytes
        exact = before[name].astype(np.float64)
        wrong = decode(kind.upper(), blocks) - exact
        assert row.error == pytest.approx(np.linalg.norm(wrong) / np.linalg.norm(exact), rel=1e-4)
        rows = np.linalg.norm(wrong, axis=1) / np.linalg.norm(exact, axis=1)
        assert row.worst_rows[0][0] == rows.argmax()
        assert row.worst_rows[0][1] == pytest.approx(rows.max(), rel=1e-4)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(quantised))
    assert report.bytes_after + report.bytes_kept == total
    # The given model is as it was.
    for name, value in values(model).items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("choice", ["q8_0", "q4_k", "q6_k", "q4_k_m", "q4_k_s", "q5_k_m"])
def test_it_is_the_model_of_a_file_of_the_same_blocks(tiny, choice, tmp_path):
    """A model of 2 layers, whose mixtures differ from layer to layer only in q4_k_s and beyond 8."""
    model, tokenizer = tiny
    maxjax.save_pretrained(model, tmp_path / "hf", tokenizer=tokenizer)
    convert(tmp_path / "hf", tmp_path / "m.gguf", quantize=choice)
    loaded, _ = maxjax.load(tmp_path / "m.gguf")
    quantised, report = maxjax.quantize(model, choice)
    theirs = loaded.raw_state_dict()
    for name, weight in quantised.raw_state_dict().items():
        assert weight.quantization_encoding is theirs[name].quantization_encoding, name
        if name in {row.name for row in report.rows}:
            np.testing.assert_array_equal(np.asarray(weight.value), np.asarray(theirs[name].value))
    texts = [
        maxjax.generate(m, tokenizer, ["What is 2 + 5?"], max_new_tokens=8)
        for m in (quantised, loaded)
    ]
    assert texts[0][0].tokens == texts[1][0].tokens


@pytest.mark.sampled(1)
@pytest.mark.parametrize("axes", [{"model": 4}, {"data": 2, "model": 2}, {"fsdp": 2}])
def test_shards_stay_where_they_are(axes):
    model = random_model()
    before = values(model)
    model.to(maxjax.make_mesh(**axes))
    quantised, report = maxjax.quantize(model, "q8_0")
    for name, weight in quantised.raw_state_dict().items():
        where = model.raw_state_dict()[name]
        assert weight.sharding == where.sharding
        if is_linear(name):
            np.testing.assert_array_equal(
                np.asarray(weight.value), encode("Q8_0", wide(before[name])), err_msg=name
            )
    for leaf, old in zip(jax.tree.leaves(quantised), jax.tree.leaves(model), strict=True):
        assert leaf.sharding == old.sharding
    alone = maxjax.quantize(random_model(), "q8_0").report
    for one, other in zip(report.rows, alone.rows, strict=True):
        assert (one.name, one.bytes_after) == (other.name, other.bytes_after)
        assert one.error == pytest.approx(other.error, rel=1e-5)
        assert one.worst_rows[0][0] == other.worst_rows[0][0]


@pytest.mark.parametrize("place", [None, 1])
def test_blocks_are_committed_to_a_device_only_if_the_weight_was(place):
    model = maxjax.init(nn.Linear(64, 2, maxjax.DType.float32), jax.random.key(0))
    if place is not None:
        model = model.to(jax.devices()[place])
    quantised, _ = maxjax.quantize(model, "q8_0")
    (blocks,) = jax.tree.leaves(quantised)
    assert (blocks.committed, blocks.devices()) == (place is not None, {jax.devices()[place or 0]})


def test_a_part_of_a_row_that_is_no_whole_blocks():
    model = random_model()
    model.to(maxjax.make_mesh(model=4))
    with pytest.raises(UserInputError, match="is split into rows of 64 .* Q4_K .* before model.to"):
        maxjax.quantize(model, "q4_k")


def test_experts_in_a_stack_of_layers():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4}
    model = random_model(Mixtral, MixtralConfig, num_experts_per_tok=2, **sizes)
    before = values(model)
    quantised, report = maxjax.quantize(model, "q8_0", activations="float")
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    np.testing.assert_array_equal(
        np.asarray(quantised.raw_state_dict()[name].value), encode("Q8_0", wide(before[name]))
    )
    assert report.kept["model.layers.0.block_sparse_moe.gate.weight"] == "a router or a small table"
    assert report[name].type == "Q8_0" and len(jax.tree.leaves(quantised)) == len(
        jax.tree.leaves(model)
    )
    ids = jnp.arange(8)[None]
    found, exact = (np.asarray(call(one, ids)) for one in (quantised, model))
    assert np.abs(found - exact).mean() < 0.02 * exact.std()


def test_a_router_with_weights_of_its_own():
    settings = {"num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 64}
    model = random_model(
        Gemma4, Gemma4Config, num_hidden_layers=1, enable_moe_block=True, head_dim=64, global_head_dim=64,
        hidden_size_per_layer_input=0, **settings,
    )  # fmt: skip
    _, report = maxjax.quantize(model, "q8_0")
    assert report.kept["model.layers.0.moe.router.proj.weight"] == "a router or a small table"
    assert report["model.layers.0.moe.experts.1.down_proj.weight"].type == "Q8_0"


@pytest.mark.extra
def test_layers_of_different_types_are_unstacked():
    model = random_model(num_hidden_layers=3)
    quantised, report = maxjax.quantize(
        model, "q8_0", patterns={"model.layers.1.mlp.*": "q4_0", "*.self_attn.*": None}
    )
    assert {row.type for row in report.rows if ".1.mlp" in row.name} == {"Q4_0"}
    assert {row.type for row in report.rows if ".2.mlp" in row.name} == {"Q8_0"}
    assert report.kept["model.layers.0.self_attn.q_proj.weight"] == "not asked for"
    assert type(quantised.model.layers) is nn.LayerList
    assert type(model.model.layers) is nn.LayerStack
    ids = jnp.arange(8)[None]
    exact = np.asarray(model(ids))
    assert np.abs(np.asarray(quantised(ids)) - exact).max() < 0.5 * exact.std()


def test_activations_are_those_of_a_loaded_model(tiny):
    model, _ = tiny
    for given, kind in ((None, "int8"), ("float", "float"), ("int8", "int8")):
        quantised, _ = maxjax.quantize(model, "q8_0", activations=given)
        found = {
            w.activations for w in quantised.raw_state_dict().values() if w.quantization_encoding
        }
        assert found == {kind}
    with pytest.raises(UserInputError, match="activations must be 'int8' or 'float', not 'int4'"):
        maxjax.quantize(model, "q8_0", activations="int4")


def test_a_tied_head_is_quantised_once(tiny):
    model, _ = tiny
    quantised, report = maxjax.quantize(model, "q6_k")
    assert quantised.hf_config["tie_word_embeddings"]
    assert [row.name for row in report.rows].count("model.embed_tokens.weight") == 1
    assert "lm_head.weight" not in quantised.raw_state_dict()


def test_patterns_alone_and_rows_of_other_lengths():
    model = nn.Sequential(
        [nn.Linear(96, 64, "float32", DeviceRef.CPU()), nn.Linear(64, 40, "float32", DeviceRef.CPU()),
         nn.Linear(40, 8, "float32", DeviceRef.CPU(), has_bias=True)]
    )  # fmt: skip
    model = maxjax.init(model, jax.random.key(0))
    quantised, report = maxjax.quantize(model, None, patterns=[("0.*", "q4_0")])
    assert [(row.name, row.type) for row in report.rows] == [("0.weight", "Q4_0")]
    quantised, report = maxjax.quantize(model, "q4_k")
    assert [(row.name, row.type) for row in report.rows] == [
        ("0.weight", "Q8_0"),
        ("1.weight", "Q8_0"),
    ]
    assert report.kept == {"2.weight": "rows of 40 values are not complete blocks"}
    assert quantised(jnp.ones((2, 96))).shape == (2, 8)


def test_importance_weighs_the_errors():
    model = maxjax.init(nn.Linear(256, 64, "float32", DeviceRef.CPU()), jax.random.key(0))
    importance = np.where(np.arange(256) % 2, 100.0, 1.0).astype(np.float32)
    quantised, _ = maxjax.quantize(model, "q4_k", importance={"weight": importance})
    expected = encode("Q4_K", np.asarray(model.weight.value), importance=importance)
    np.testing.assert_array_equal(np.asarray(quantised.weight.value), expected)
    for wrong in (np.ones(255), -importance, np.full(256, np.nan), "text"):
        with pytest.raises(UserInputError, match="'weight'.*256"):
            maxjax.quantize(model, "q4_k", importance={"weight": wrong})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighted", [False, True])
def test_on_an_accelerator_the_encoder_in_jnp_runs(kind, weighted, monkeypatch):
    """The form for devices that are no CPU, here on CPU devices: nearly all blocks are the same."""
    model = random_model(num_hidden_layers=1, hidden_size=512, intermediate_size=512)
    model.to(maxjax.make_mesh(model=2))
    importance = {name: np.linspace(0.1, 2, w.shape[-1]) for name, w in values(model).items()}
    given = importance if weighted else None
    expected, first = maxjax.quantize(model, kind, importance=given)

    def there(part, kind, weights):
        given = None if weights is None else jnp.asarray(weights)[..., None, :]
        return tuple(np.asarray(a) for a in shards._encode_there(part, given, kind))

    monkeypatch.setattr(shards, "_encode_part", there)
    found, report = maxjax.quantize(model, kind, importance=given)
    for name, weight in found.raw_state_dict().items():
        if not is_linear(name):
            continue
        ours, theirs = np.asarray(weight.value), np.asarray(expected.raw_state_dict()[name].value)
        assert (ours != theirs).mean() < 0.02, name
        assert report[name].error == pytest.approx(first[name].error, rel=2e-3)


def test_what_cannot_be_quantised(tiny):
    model, _ = tiny
    for to in ("int8", "fp8", "q2_k", "q3_k_m", "iq4_nl"):
        with pytest.raises(
            NotImplementedError, match=f"as '{to}'.*q4_0, q8_0, q4_k, .* convert --quantize"
        ):
            maxjax.quantize(model, to)
    for options in ({"to": 5}, {"to": None, "patterns": {"*": 5}}):
        with pytest.raises(TypeError, match="is a str such as 'q4_k', or None, not int"):
            maxjax.quantize(model, **options)
    with pytest.raises(
        UserInputError, match="no weight .* has a name like \\*.q.weight; there are"
    ):
        maxjax.quantize(model, "q8_0", patterns={"*.q.weight": "q4_0"})
    quantised, _ = maxjax.quantize(model, "q8_0")
    assert "Q8_0 already" in maxjax.quantize(quantised, "q8_0").report.kept.values()
    with pytest.raises(
        UserInputError, match="is Q8_0 already: quantise a model that was loaded with"
    ):
        maxjax.quantize(quantised, "q4_0")
    with pytest.raises(UserInputError, match="Linear has none: name a type"):
        maxjax.quantize(
            maxjax.init(nn.Linear(256, 2, "float32", DeviceRef.CPU()), jax.random.key(0)), "q4_k_m"
        )
    with pytest.raises(UserInputError, match="not loaded"):
        maxjax.quantize(nn.Linear(256, 2, "float32", DeviceRef.CPU()), "q8_0")


def test_a_value_that_is_not_finite_is_named_by_its_layer(tiny):
    model = maxjax.load("tiny", tokenizer=False)[0]
    name = "model.layers.1.mlp.up_proj.weight"
    state = dict(model.state_dict())
    value = np.array(state[name])
    value[2, 3] = np.nan
    model.load_state_dict({**state, name: value})
    with pytest.raises(UserInputError, match=rf"'{name}' has values that are not finite"):
        maxjax.quantize(model, "q8_0")


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_values_that_no_block_holds(bad):
    model = maxjax.init(nn.Linear(256, 8, "float32", DeviceRef.CPU()), jax.random.key(0))
    model.weight.value = model.weight.value.at[3, 7].set(bad)
    with pytest.raises(UserInputError, match="'weight' has values .*not finite.* Q4_K: in row \\["):
        maxjax.quantize(model, "q4_k")


def test_what_is_saved_and_opened_again(tiny, tmp_path, caplog):
    model, _ = tiny
    quantised, _ = maxjax.quantize(model, "q4_0")
    maxjax.save_pretrained(quantised, tmp_path / "wide", dtype="bfloat16")
    assert not caplog.records
    maxjax.save_pretrained(quantised, tmp_path)
    (said,) = caplog.messages
    assert "only maxjax opens" in said and "pass dtype='bfloat16'" in said
    again, _ = maxjax.load(tmp_path, tokenizer=False)
    for (name, one), two in zip(
        quantised.raw_state_dict().items(), again.raw_state_dict().values(), strict=True
    ):
        assert one.quantization_encoding is two.quantization_encoding, name
        np.testing.assert_array_equal(np.asarray(one.value), np.asarray(two.value))


def test_the_report_in_a_notebook(tiny):
    _, report = maxjax.quantize(tiny[0], "q8_0", patterns={"*.0.mlp.*": None})
    text, page = str(report), report._repr_html_()
    assert text.splitlines()[1].startswith("model.embed_tokens.weight ") and " → " in text
    assert "<td>model.embed_tokens.weight</td><td>Q8_0</td>" in page and page.count(
        "<tr>"
    ) == 1 + len(report.rows)
    assert "not quantised: model.layers.0.mlp.up_proj.weight: not asked for" in page
