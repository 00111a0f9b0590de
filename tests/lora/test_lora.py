"""LoRA weights in stacks, on meshes, over blocks: what they add, what is trained, what a merge gives."""

import copy
import json

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import maxjax
from maxjax import lora, nn
from maxjax.errors import CheckpointMismatchError, CheckpointMissingError, UserInputError
from maxjax.graph import DeviceRef
from maxjax.models import GPT2, GPT2Config, Llama, LlamaConfig, Mixtral, MixtralConfig
from maxjax.models.deepseek import DeepseekV3, DeepseekV3Config
from maxjax.nn.quantized import QuantizedLinear, QuantLayout, QuantTensor
from tests.fill import filled

IDS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 6)))
run = jax.jit(lambda model, ids: model(ids))
gradient_of = jax.jit(jax.grad(lambda trained, rest: jnp.var(maxjax.merge(trained, rest)(IDS))))


def llama(stacked=True):
    config = LlamaConfig(
        64, 64, 128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    )
    return filled(Llama(config, stacked=stacked))


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.fixture(scope="module")
def packed(model):
    return maxjax.quantize(model, "q8_0", activations="float")[0]


def drawn(model, seed=1):
    """The model with values in A and B, so that the updates count; float64 values of a name and a layer."""
    trained, rest = maxjax.partition(model, "*lora_*")
    flat, tree = jax.tree.flatten(trained)
    rng = np.random.default_rng(seed)
    flat = [jax.device_put(np.float32(rng.normal(0, 0.1, a.shape)), a.sharding) for a in flat]
    return maxjax.merge(jax.tree.unflatten(tree, flat), rest)


@pytest.fixture(scope="module")
def tuned(model):
    return drawn(lora.add(model, rank=4, alpha=12, key=jax.random.key(1)))


def test_new_weights_change_nothing_and_stay_a_stack(model):
    tuned = lora.add(model, "q_proj", rank=4, key=jax.random.key(1))
    shapes = {
        jax.tree_util.keystr(p, simple=True): v.shape for p, v in jax.tree.leaves_with_path(tuned)
    }
    assert shapes["model.layers.*.self_attn.q_proj.lora_A.weight"] == (3, 4, 64)
    assert shapes["model.layers.*.self_attn.q_proj.lora_B.weight"] == (3, 64, 4)
    assert len(shapes) == len(jax.tree.leaves(model)) + 2
    np.testing.assert_array_equal(run(tuned, IDS), run(model, IDS))
    a = np.asarray(tuned.model.layers[2].self_attn.q_proj.lora_A.value)
    assert 0.09 < np.abs(a).max() <= 64**-0.5  # uniform, as PEFT's
    assert not has_lora_names(model)
    base = tuned.model.layers[0].self_attn.q_proj.weight.home[0].leaf
    assert base is model.model.layers[0].self_attn.q_proj.weight.home[0].leaf


def has_lora_names(model):
    return any("lora" in name for name in model.raw_state_dict())


def test_the_update_is_that_of_the_formula(model, tuned):
    """Each weight W of a plain model is W + 3 B A, computed in float64."""
    values = {n: np.asarray(w.value, np.float64) for n, w in tuned.raw_state_dict().items()}
    merged = lora.merge(tuned)
    assert jax.tree.structure(merged) == jax.tree.structure(model)
    for name, weight in merged.raw_state_dict().items():
        layer = name.removesuffix(".weight")
        expected = values[name]
        if f"{layer}.lora_A.weight" in values:
            expected = (
                expected + 3 * values[f"{layer}.lora_B.weight"] @ values[f"{layer}.lora_A.weight"]
            )
        np.testing.assert_allclose(weight.value, expected, rtol=1e-5, atol=1e-6)
    expected = np.asarray(run(merged, IDS))
    assert np.abs(expected - np.asarray(run(model, IDS))).max() > 0.1
    np.testing.assert_allclose(run(tuned, IDS), expected, rtol=1e-4, atol=1e-4)
    kept = lora.merge(tuned, keep=True)
    np.testing.assert_array_equal(run(kept, IDS), expected)
    for name, weight in lora.unmerge(kept).raw_state_dict().items():
        np.testing.assert_allclose(weight.value, values[name], rtol=1e-5, atol=1e-6)
    plain = lora.remove(tuned)
    assert jax.tree.structure(plain) == jax.tree.structure(model)
    np.testing.assert_array_equal(run(plain, IDS), run(model, IDS))


@pytest.mark.extra
def test_layers_that_differ_are_unstacked_and_give_the_same(model):
    """Of a stack, some layers; of separate layers, all: the same as in a stack."""
    some = lora.add(model, "layers.1.self_attn.q_proj", rank=2, key=jax.random.key(1))
    assert type(some.model.layers) is nn.LayerList and type(model.model.layers) is nn.LayerStack
    assert [n for n in some.raw_state_dict() if "lora_A" in n] == [
        "model.layers.1.self_attn.q_proj.lora_A.weight"
    ]
    np.testing.assert_array_equal(some(IDS), lora.remove(some)(IDS))
    apart = lora.add(llama(stacked=False), rank=4, key=jax.random.key(1)).raw_state_dict()
    stacked = lora.add(model, rank=4, key=jax.random.key(1)).raw_state_dict()
    assert set(apart) == set(stacked)
    for name, weight in apart.items():
        np.testing.assert_array_equal(weight.value, stacked[name].value)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("explicit", [False, True])
def test_on_a_mesh_new_weights_are_split_as_the_base(model, tuned, explicit, tmp_path):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh(
        (2, 2), ("fsdp", "model"), axis_types=(kind,) * 2, devices=jax.devices()[:4]
    )
    lora.save(tmp_path, tuned)
    placed = jax.tree.map(lambda leaf: leaf, model).to(mesh)
    loaded = lora.load(placed, tmp_path)
    attention = loaded.model.layers[1].self_attn
    specs = [tuple(w.sharding.spec) for w in (attention.q_proj.lora_B, attention.o_proj.lora_A)]
    assert specs == [("model", None), (None, "model")]
    # The same, where a model with LoRA weights is placed.
    moved = jax.tree.map(lambda leaf: leaf, tuned).to(mesh)
    for name, weight in loaded.raw_state_dict().items():
        assert weight.sharding == moved.raw_state_dict()[name].sharding, name
    expected = run(tuned, IDS)
    np.testing.assert_allclose(run(loaded, IDS), expected, rtol=2e-4, atol=2e-4)
    trained, rest = maxjax.partition(loaded, "*.lora_*")
    gradient = gradient_of(trained, rest)
    for one, of in zip(jax.tree.leaves(gradient), jax.tree.leaves(trained), strict=True):
        assert one.sharding.is_equivalent_to(of.sharding, one.ndim)
    there = lora.merge(loaded).model.layers[0].self_attn.q_proj.weight
    assert tuple(there.sharding.spec) == ("model", "fsdp")
    np.testing.assert_allclose(
        there.value, lora.merge(tuned).model.layers[0].self_attn.q_proj.weight.value, atol=1e-6
    )


def rounded(values):
    """The values of a matrix's blocks of Q8_0."""
    if values.ndim < 2:
        return values
    kind = gguf.GGMLQuantizationType.Q8_0
    return gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)


def test_over_blocks_gradients_reach_a_and_b_only(model, packed):
    base = packed
    tuned = drawn(lora.add(base, rank=4, alpha=12, key=jax.random.key(1)))
    assert tuned.model.layers[0].self_attn.q_proj.weight.dtype == maxjax.DType.uint8
    trained, rest = maxjax.partition(tuned, "*.lora_*")
    gradient = gradient_of(trained, rest)
    # The same as over the floats that the blocks are.
    floats = jax.tree.map(lambda leaf: leaf, model)
    floats.load_state_dict(
        {n: rounded(np.asarray(w.value)) for n, w in model.raw_state_dict().items()}
    )
    values = {n: w.value for n, w in tuned.raw_state_dict().items() if "lora" in n}
    wide = lora.add(floats, rank=4, alpha=12)
    wide.load_state_dict(values, strict=False)
    expected = gradient_of(*maxjax.partition(wide, "*.lora_*"))
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=1e-6)
    with pytest.raises(
        UserInputError,
        match=r"quantised \(Q8_0\).* dtype=.float32. before tuning.*lora.save.* requantize=True",
    ):
        lora.merge(tuned)
    again = lora.merge(tuned, requantize=True)
    assert jax.tree.structure(again) == jax.tree.structure(base)
    error = lambda m: float(jnp.abs(run(m, IDS) - run(wide, IDS)).max())
    assert error(again) < error(base) / 4


@pytest.mark.parametrize("is_packed", [False, True])
def test_dora_trains_the_norms_of_rows(model, packed, is_packed):
    """Each row is scaled to its magnitude, in a stack and over blocks; at the start nothing changes."""
    base = packed if is_packed else model
    added = lora.add(
        base, ["q_proj", "down_proj"], rank=4, alpha=12, dora=True, key=jax.random.key(1)
    )
    np.testing.assert_allclose(run(added, IDS), run(base, IDS), rtol=1e-4, atol=1e-4)
    tuned = drawn(added)
    merged = lora.merge(tuned, requantize=is_packed)
    layer, after = (one.model.layers[1].mlp.down_proj for one in (tuned, merged))
    floats = lambda w: np.asarray(jnp.asarray(w.operand()), np.float64)
    a, b, m = (
        np.asarray(w.value, np.float64)
        for w in (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector)
    )
    rows = floats(layer.weight) + 3 * b @ a
    expected = rows * (m / np.linalg.norm(rows, axis=1))[:, None]
    close = {"atol": 1e-2} if is_packed else {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(floats(after.weight), expected, **close)
    x = np.random.default_rng(0).normal(size=(5, 128)).astype(np.float32)
    np.testing.assert_allclose(layer(x), x @ expected.T, rtol=1e-3, atol=1e-3)
    if not is_packed:
        np.testing.assert_allclose(run(tuned, IDS), run(merged, IDS), rtol=1e-4, atol=1e-4)
        assert jax.tree.structure(lora.remove(tuned)) == jax.tree.structure(model)
        with pytest.raises(NotImplementedError, match="dora=True"):
            lora.merge(tuned, keep=True)
        clipped = nn.Sequential([nn.Linear(4, 4, clip_weight=1.0)])
        with pytest.raises(
            NotImplementedError, match=r"dora=True\) of a layer with clip_weight.*'0'"
        ):
            lora.add(clipped, dora=True)
        with pytest.raises(UserInputError, match="norms of the base weights"):
            maxjax.init(lora.add(model, dora=True), jax.random.key(0))


@pytest.mark.parametrize("dora", [False, True])
def test_a_table_gets_updates_too(model, packed, dora, tmp_path):
    added = lora.add(model, "embed_tokens", rank=4, dora=dora, key=jax.random.key(1))
    np.testing.assert_allclose(run(added, IDS), run(model, IDS), rtol=1e-4, atol=1e-4)
    assert not np.any(added.model.embed_tokens.lora_A.value)
    assert 0.5 < np.std(added.model.embed_tokens.lora_B.value) < 2
    tuned, ids = drawn(added), jnp.arange(64)
    table = tuned.model.embed_tokens
    w, a, b = (np.asarray(x.value, np.float64) for x in (table.weight, table.lora_A, table.lora_B))
    rows = w + (b @ a).T
    if dora:
        rows *= np.asarray(table.lora_magnitude_vector.value) / np.linalg.norm(rows, axis=0)
    np.testing.assert_allclose(table(ids), rows, rtol=1e-4, atol=1e-5)
    assert np.isnan(table(jnp.asarray([64]))).all()
    merged = lora.merge(tuned)
    np.testing.assert_allclose(merged.model.embed_tokens.weight.value, rows, rtol=1e-4, atol=1e-5)
    assert jax.tree.structure(merged) == jax.tree.structure(model)
    if not dora:
        back = lora.unmerge(lora.merge(tuned, keep=True))
        np.testing.assert_allclose(back.model.embed_tokens.weight.value, w, rtol=1e-4, atol=1e-5)
    kind = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("fsdp", "model"), axis_types=kind, devices=jax.devices()[:4])
    lora.save(tmp_path, tuned)
    placed = lora.load(jax.tree.map(lambda leaf: leaf, model).to(mesh), tmp_path)
    spread = placed.model.embed_tokens
    assert [tuple(x.sharding.spec) for x in (spread.lora_A, spread.lora_B)] == [
        (None, "model"),
        ("fsdp", None),
    ]
    np.testing.assert_allclose(run(placed, IDS), run(tuned, IDS), rtol=1e-4, atol=1e-4)
    over = lora.load(packed, tmp_path)
    assert over.model.embed_tokens.weight.dtype == maxjax.DType.uint8
    np.testing.assert_allclose(over.model.embed_tokens(ids), rows, atol=2e-2)


@pytest.mark.extra
def test_the_layers_of_other_families():
    gpt2 = maxjax.init(GPT2(GPT2Config(64, 32, n_layer=2, n_head=4)), jax.random.key(0))
    tuned = drawn(lora.add(gpt2, ["c_attn", "mlp.c_proj"], rank=2, key=jax.random.key(1)))
    layer = tuned.transformer.h[1].attn.c_attn
    assert (tuple(layer.lora_A.shape), tuple(layer.lora_B.shape)) == ((2, 32), (96, 2))
    np.testing.assert_allclose(run(tuned, IDS), run(lora.merge(tuned), IDS), rtol=1e-4, atol=1e-4)
    fused = nn.StackedLinear(4, [6, 2], ["q", "k"], "float32", DeviceRef.CPU(), stacked=True)
    fused = drawn(lora.add(maxjax.init(fused, jax.random.key(0)), rank=2, key=jax.random.key(1)))
    x = jnp.ones((3, 4))
    np.testing.assert_allclose(fused(x), lora.merge(fused)(x), rtol=1e-5)
    assert [y.shape for y in fused.split_projections(x)] == [(3, 6), (3, 2)]


def test_16_bits_are_added_in_the_wider_type():
    layer = maxjax.init(nn.Linear(64, 8, "bfloat16"), jax.random.key(0))
    tuned = drawn(lora.add(nn.Sequential([layer]), rank=2, key=jax.random.key(1)))
    x = jnp.asarray(np.random.default_rng(2).normal(size=(5, 64)), jnp.bfloat16)
    one = tuned[0]
    wide = lambda v: np.asarray(v, np.float64)
    expected = wide(layer(x)) + wide(x) @ wide(one.lora_A.value).T @ wide(one.lora_B.value).T
    assert tuned(x).dtype == jnp.bfloat16
    np.testing.assert_allclose(wide(tuned(x)), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda m: lora.add(m, "q_prj"), UserInputError, "did you mean 'q_proj'"),
        (lambda m: lora.add(m, "*.input_layernorm"), NotImplementedError, "a RMSNorm"),
        (lambda m: lora.add(m, 3), UserInputError, "names or glob patterns of layers, not 3"),
        (lambda m: lora.add(m, rank=0), UserInputError, "rank is 0: it must be"),
        (lambda m: lora.add(m, alpha="1"), UserInputError, "alpha must be"),
        (lambda m: lora.add(m, alpha=10**400), UserInputError, "alpha must be"),
        (lambda m: lora.add(m, bias="some"), UserInputError, "bias must be one of 'none', 'lora_only', 'all'"),
        (lambda m: lora.add(m, dtype="int8"), UserInputError, "dtype must be"),
        (lambda m: lora.add(lora.add(m)), UserInputError, "LoRA weights already"),
        (lambda m: lora.add(Llama(m.config), key=jax.random.key(0)), UserInputError, "not loaded"),
        (lora.merge, UserInputError, "has no LoRA weights"),
        (lora.remove, UserInputError, "has no LoRA weights"),
        (lambda m: lora.unmerge(lora.add(m)), UserInputError, "not merged"),
        (lambda m: lora.unmerge((m, None)), UserInputError, "lora.unmerge takes a maxjax Module"),
        (lambda m: lora.merge(lora.add(m)), UserInputError, "not loaded"),
        (lambda m: maxjax.partition(m, "*.lora_*"), UserInputError, "no weight has a name like"),
        (lambda m: maxjax.save_pretrained(drawn(lora.add(m, key=jax.random.key(0))), "/nowhere/x"),
         UserInputError, "has LoRA weights"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(model, change, error, says):
    with pytest.raises(error, match=says):
        change(model)


def test_experts_are_refused_and_tied_weights_not_merged():
    sizes = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    }
    mixtral = Mixtral(MixtralConfig(64, 8, 16, **sizes))
    with pytest.raises(NotImplementedError, match=r"experts.*'model\.layers\.0\.block_sparse_moe"):
        lora.add(
            mixtral, "w1" if any(".w1." in n for n in mixtral.raw_state_dict()) else "gate_proj"
        )
    names = {n for n in lora.add(mixtral, rank=2).raw_state_dict() if "lora_A" in n}
    assert {n.split(".")[-3] for n in names} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    config = LlamaConfig(
        64, 8, 16, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=True
    )
    tied = filled(Llama(config))
    with pytest.raises(UserInputError, match="one tied weight"):
        lora.merge(lora.add(tied, "lm_head", key=jax.random.key(0)))


def test_bounded_weights_are_not_merged_and_parts_on_devices_not_called():
    bounded = filled(nn.Sequential([nn.Linear(4, 2, clip_weight=0.1)]))
    with pytest.raises(NotImplementedError, match="merge of a layer with clip_weight .* '0'"):
        lora.merge(lora.add(bounded, rank=2, key=jax.random.key(0)))
    head = filled(nn.Sequential([nn.ColumnParallelLinear(4, 2, devices=[DeviceRef.CPU()] * 2)]))
    head, x = lora.add(head, rank=2, key=jax.random.key(0)), jnp.ones((1, 4))
    with pytest.raises(NotImplementedError, match="a call with one tensor for each device"):
        head([x, x])


def test_a_tied_head_as_peft_saves_it(tmp_path):
    """PEFT puts a copy of the head beside its LoRA weights; in a tied model that is the table."""
    config = LlamaConfig(
        64, 8, 16, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=True
    )
    tied = filled(Llama(config))
    path = lora.save(tmp_path / "a", lora.add(tied, "lm_head", rank=2, key=jax.random.key(0)))
    tensors = load_file(path / "adapter_model.safetensors")
    copied = "base_model.model.lm_head.base_layer.weight"
    for added, says in ((0, None), (1, "copy of 'model.embed_tokens.weight'")):
        tensors[copied] = (
            np.asarray(tied.raw_state_dict()["model.embed_tokens.weight"].value) + added
        )
        save_file(tensors, path / "adapter_model.safetensors")
        if says is None:
            assert {n for n in lora.load(tied, path).raw_state_dict() if "lora_A" in n}
        else:
            with pytest.raises(CheckpointMismatchError, match=says):
                lora.load(tied, path)


def test_labels_are_a_module_for_optax(model):
    optax = pytest.importorskip("optax")
    tuned = lora.add(model, "q_proj", rank=2, key=jax.random.key(1))
    labels = maxjax.labels({"*.lora_A.*": "a", "*.lora_*": "b"}, default="frozen")
    kinds = {"a": optax.sgd(1.0), "b": optax.sgd(2.0), "frozen": optax.set_to_zero()}
    optimizer = optax.multi_transform(kinds, labels)
    ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), tuned)
    steps, _ = jax.jit(optimizer.update)(ones, optimizer.init(tuned))
    found = {
        jax.tree_util.keystr(p, simple=True): float(np.min(v))
        for p, v in jax.tree.leaves_with_path(steps)
    }
    assert {v for n, v in found.items() if "lora" not in n} == {0.0}
    assert {n.split(".")[-2]: v for n, v in found.items() if "lora" in n} == {
        "lora_A": -1,
        "lora_B": -2,
    }
    mask = maxjax.labels({"*.lora_*": True}, default=False)
    masked = optax.masked(optax.sgd(1.0), mask)
    steps, _ = jax.jit(masked.update)(ones, masked.init(tuned))
    assert float(steps.model.norm.weight.value[0]) == 1.0


@pytest.mark.extra
def test_hooks_copies_steps_and_exports_see_the_updates(tuned, model, tmp_path):
    expected = np.asarray(run(tuned, IDS))
    calls = []
    with maxjax.layer_hook(lambda layer, *_: calls.append(type(layer).__name__)):
        hooked = tuned(IDS)
    assert calls.count("Linear") == 3 * 7
    np.testing.assert_allclose(hooked, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(run(copy.deepcopy(tuned), IDS), expected)
    apart = jax.tree.map(lambda leaf: leaf, tuned).unstack()
    np.testing.assert_allclose(apart(IDS), expected, rtol=1e-4, atol=1e-4)
    maxjax.checkpoint.save(tmp_path / "step", tuned)
    restored = lora.add(model, rank=4, alpha=12)
    maxjax.checkpoint.restore(tmp_path / "step", restored)
    np.testing.assert_array_equal(run(restored, IDS), expected)
    maxjax.export(tuned, IDS, tmp_path / "program")
    np.testing.assert_allclose(
        maxjax.load_exported(tmp_path / "program")(tuned.state_dict(), IDS),
        expected,
        rtol=1e-4,
        atol=1e-4,
    )


def test_another_adapter_replaces_the_files(model, tuned, tmp_path):
    lora.save(tmp_path, tuned)
    small = lora.add(model, "q_proj", rank=2, key=jax.random.key(2))
    lora.save(tmp_path, small)
    found = lora.load(model, tmp_path, dtype="bfloat16")
    assert found.model.layers[0].self_attn.q_proj.lora.rank == 2
    assert found.model.layers[0].self_attn.k_proj.lora is None
    b = found.model.layers[0].self_attn.q_proj.lora_A
    assert b.dtype == maxjax.DType.bfloat16
    with pytest.raises(CheckpointMissingError, match="a LoRA adapter"):
        maxjax.load(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors", "maxjax_digests.json"]


@pytest.mark.parametrize(
    ("bias", "saved"),
    [("none", []), ("lora_only", ["0.base_layer"]), ("all", ["0.base_layer", "1"])],
)
def test_trained_biases_are_saved_and_loaded(bias, saved, tmp_path):
    layers = nn.Sequential([nn.Linear(4, 4, has_bias=True), nn.Linear(4, 4, has_bias=True)])
    base = maxjax.init(layers, jax.random.key(0))
    tuned = lora.add(base, "0", rank=2, bias=bias, key=jax.random.key(1))
    tuned.load_state_dict(
        {f"{i}.bias": np.full(4, 2 + i, np.float32) for i in (0, 1)}, strict=False
    )
    files = load_file(lora.save(tmp_path, tuned) / "adapter_model.safetensors")
    assert sorted(n for n in files if "lora_" not in n) == [
        f"base_model.model.{name}.bias" for name in saved
    ]
    found = lora.load(base, tmp_path)
    values = [float(found.raw_state_dict()[f"{i}.bias"].value[0]) for i in (0, 1)]
    assert values == [2.0 * bool(saved), 3.0 * (bias == "all")]
    assert not np.any(base[0].bias.value)


def test_what_partition_trains_is_saved_after_a_step_and_in_a_wrapper(model, tmp_path):
    """A compiled step keeps the record, whether it has seen the model without one or not."""

    class Wrapper(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.inner = model

    tuned = lora.add(model, "layers.*.q_proj", rank=2, key=jax.random.key(1))
    step = jax.jit(lambda trained: jax.tree.map(lambda x: x + 1, trained))
    for patterns in (["*.lora_*"], ["*.lora_*", "*.norm.weight", "*.input_layernorm.weight"]):
        trained, rest = maxjax.partition(Wrapper(tuned), patterns)
        found = maxjax.merge(step(trained), rest).inner
        lora.save(tmp_path, found)
        values = lora.load(model, tmp_path).raw_state_dict()
        for name, weight in found.raw_state_dict().items():
            np.testing.assert_array_equal(values[name].value, weight.value, err_msg=name)
    # A later training of the LoRA weights alone does not lose the norms.
    found = maxjax.merge(*maxjax.partition(found, "*.lora_*"))
    names = load_file(lora.save(tmp_path, found) / "adapter_model.safetensors")
    assert "base_model.model.model.norm.weight" in names
    assert "base_model.model.model.layers.2.input_layernorm.weight" in names
    # Without LoRA weights nothing is recorded.
    assert jax.tree.structure(maxjax.merge(*maxjax.partition(model))) == jax.tree.structure(model)


def test_over_the_tensors_of_a_quantised_format():
    """Of GPTQ, FP8 and others: the layer keeps its tensors, and the update is beside them."""
    tensors = (
        QuantTensor("weight", maxjax.DType.int8, (6, 4), (0, 1)),
        QuantTensor("weight_scale", maxjax.DType.float32, (6, 1), (0, None)),
    )
    layers = nn.LayerList(
        QuantizedLinear(QuantLayout("scaled", 6, 4, tensors), DeviceRef.CPU()) for _ in range(2)
    )
    rng = np.random.default_rng(0)
    for layer in layers:
        layer.load_state_dict(
            {
                "weight": rng.integers(-9, 9, (6, 4)).astype(np.int8),
                "weight_scale": np.full((6, 1), 0.5, np.float32),
            }
        )
    stack = layers.stack()
    tuned = drawn(lora.add(stack, rank=2, key=jax.random.key(0)))
    assert sorted(n for n in tuned.raw_state_dict() if "lora" in n)[0] == "0.lora_A.weight"
    x, one = np.ones((3, 4), np.float32), tuned[1]
    update = x @ np.asarray(one.lora_A.value).T @ np.asarray(one.lora_B.value).T
    plain = run(stack[1], x)
    np.testing.assert_allclose(run(one, x), plain + update, rtol=1e-5, atol=1e-6)
    rows = np.asarray(stack[1].weight.__jax_array__())
    dora = lora.add(stack, rank=2, dora=True, key=jax.random.key(0))[1]
    np.testing.assert_allclose(
        dora.lora_magnitude_vector.value, np.linalg.norm(rows, axis=1), rtol=1e-5
    )
    np.testing.assert_allclose(run(dora, x), plain, rtol=1e-5)
    with pytest.raises(
        NotImplementedError, match="several tensors of a quantised format.*lora.save"
    ):
        lora.merge(tuned)


def test_latent_attention_multiplies_by_the_updated_weight():
    model, ids = filled(DeepseekV3(DeepseekV3Config.from_dict(LATENT))), jnp.arange(6)[None]
    add = lambda *patterns, **more: lora.add(
        model, *patterns, rank=2, alpha=6, key=jax.random.key(1), **more
    )
    with pytest.raises(NotImplementedError, match="DoRA"):
        add("kv_b_proj", dora=True)(ids)
    new = jax.tree.map_with_path(
        lambda path, x: jnp.full_like(x, 0.1) if "lora_B" in jax.tree_util.keystr(path) else x,
        add("kv_b_proj"),
    )
    found = run(new, ids)
    assert float(jnp.abs(found - run(model, ids)).max()) > 1e-3
    np.testing.assert_allclose(found, run(lora.merge(new), ids), atol=2e-5)
    np.testing.assert_allclose(run(lora.merge(new, keep=True), ids), found, atol=2e-5)
    # Without patterns, all linear layers get weights.
    assert run.eval_shape(add(), ids).shape == found.shape


LATENT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 4, "n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip


def test_adapters_of_experts_are_refused_where_they_are_loaded(tmp_path):
    """PEFT's "all-linear" has them; they were ignored where layers were not stacked."""
    sizes = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    }
    model = filled(Mixtral(MixtralConfig(64, 32, 48, **sizes)))
    model = model.unstack()
    name = "base_model.model.model.layers.0.block_sparse_moe.experts.0.w1"
    tensors = {
        f"{name}.lora_A.weight": np.ones((2, 32), np.float32),
        f"{name}.lora_B.weight": np.ones((48, 2), np.float32),
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 2,
        "target_modules": ["w1"],
        "task_type": "CAUSAL_LM",
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(NotImplementedError, match="experts are not supported.*experts.0.w1"):
        maxjax.lora.load(model, tmp_path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("target_modules", "did you mean patterns="),
        ("r", "did you mean rank="),
        ("lora_alpha", "did you mean alpha="),
        ("lora_dropout", "no dropout"),
        ("wholly_unknown", "it takes patterns, rank, "),
    ],
)
def test_arguments_of_add_that_peft_calls_otherwise(model, name, says):
    with pytest.raises(TypeError, match=f"lora.add.. got an unexpected.*'{name}'.*{says}"):
        lora.add(model, **{name: 1})
