"""plan: the bytes it tells are those that devices then hold, and what it suggests fits."""

import json
import math
from functools import cache

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import maxjax
from maxjax import nn
from maxjax.engine.plan.compiled import abstract_pool
from maxjax.engine.plan.report import Plan, _memory_of, plan
from maxjax.errors import CheckpointMissingError, UserInputError
from maxjax.graph import DeviceRef, ShardingStrategy
from maxjax.models import BertConfig, BertModel, Mamba2, Mamba2Config, Qwen2, Qwen2Config
from maxjax.models import name_rules as names
from maxjax.nn.attention import AttentionWithRope
from maxjax.nn.rotary_embedding import RotaryEmbedding
from maxjax.storage.safetensors.writer import size_in_bytes
from scripts.bench_plan import LLAMA_405B, shapes, write_sparse
from tests.fill import filled

CPU = DeviceRef.CPU()
BERT = {
    "architectures": ["BertModel"], "model_type": "bert", "vocab_size": 40, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 16,
}  # fmt: skip


def mlp():
    return nn.MLP("float32", None, 16, 64, [CPU], has_bias=True)


def block(kv_heads=2):
    rope = RotaryEmbedding(dim=32, n_heads=4, theta=1e4, max_seq_len=16)
    attention = AttentionWithRope(
        rope=rope, num_attention_heads=4, num_key_value_heads=kv_heads, hidden_size=32
    )
    return nn.TransformerBlock(
        attention, nn.MLP("float32", None, 32, 64, [CPU]),
        nn.RMSNorm(32, "float32"), nn.RMSNorm(32, "float32"),
    )  # fmt: skip


class Tower(nn.Module):
    """A stack of layers with one of another shape before it."""

    def __init__(self, count=5):
        super().__init__()
        self.embed = nn.Embedding(40, 32, "float32", CPU)
        self.layers = nn.LayerStack([block() for _ in range(count)])

    def __call__(self, x):
        return self.layers(self.embed(x))


def bert():
    return BertModel(BertConfig.from_dict(BERT))


MODELS = {"mlp": mlp, "block": block, "bert": bert, "tower": Tower}
MESHES = [{"model": 8}, {"data": 2, "model": 4}, {"fsdp": 2, "model": 2}, {"fsdp": 8}]


def held_by_the_first(model) -> int:
    """The bytes of all that lies on device 0."""
    first = jax.devices()[0]
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(model)
        for shard in leaf.addressable_shards
        if shard.device == first
    )


def real_mesh(sizes):
    return maxjax.make_mesh(**sizes)


@pytest.fixture
def checkpoint(tmp_path):
    """Writes tensors of some shapes as a checkpoint: checkpoint(shapes, config) -> directory."""

    def write(tensors, config=None, dtype=np.float32):
        save_file({n: np.zeros(s, dtype) for n, s in tensors.items()}, tmp_path / "m.safetensors")
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


# --- Modules ----------------------------------------------------------------------------------


@cache
def with_values(make):
    """One of each is enough: it is placed again and again."""
    return filled(make())


@pytest.mark.sampled
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_the_bytes_are_those_that_devices_hold(make, sizes):
    model = make()
    before = plan(model, sizes)
    assert model.raw_state_dict() and all(w.is_lazy for w in model.raw_state_dict().values())
    placed = with_values(make).to(real_mesh(sizes))
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(placed))
    after = plan(placed)
    for found in (before, after, plan(model, real_mesh(sizes)), plan(placed, sizes)):
        assert found.bytes_per_device == held_by_the_first(placed)
        assert (found.total_bytes, found.mesh) == (whole, sizes)
        assert found.devices == math.prod(sizes.values())
        assert sum(kind.bytes_per_device for kind in found.kinds) == found.bytes_per_device
    assert (before.basis, after.basis) == ("the model's own rules", "where Module.to placed it")
    same = [(k.name, k.count, k.spec, k.bytes_per_device, k.why) for k in before.kinds]
    assert same == [(k.name, k.count, k.spec, k.bytes_per_device, k.why) for k in after.kinds]


def test_a_module_that_was_not_placed_is_on_one_device():
    found = plan(mlp())
    assert (found.devices, found.mesh, found.fits) == (1, {}, None)
    assert found.bytes_per_device == found.total_bytes == 4 * (3 * 16 * 64 + 64 + 64 + 16)
    assert found.replicated == ()


def test_layers_of_a_stack_are_all_counted_and_named():
    found = plan(Tower(), {"model": 2})
    kinds = {kind.name: kind for kind in found.kinds}
    up = kinds["layers.*.mlp.up_proj.weight"]
    assert (up.count, up.shape, up.spec) == (5, (64, 32), "('model', None)")
    assert (up.bytes, up.bytes_per_device) == (5 * 64 * 32 * 4, 5 * 64 * 32 * 2)
    assert ("layers.1.mlp.gate_proj.weight", 64 * 32 * 4) in found.largest
    assert len(found.largest) == 10


def test_weights_tied_to_each_other_count_once():
    model = Tower()
    alone = plan(model, {"model": 2}).total_bytes
    model.head = nn.Linear(32, 40, "float32", CPU)
    model.head.set_shared_weight("weight", model.embed.weight)
    assert plan(model, {"model": 2}).total_bytes == alone


def test_dtype_is_of_floats_and_rules_go_first():
    found = plan(mlp(), {"model": 4}, dtype="bf16")
    assert found.total_bytes * 2 == plan(mlp()).total_bytes
    assert {kind.dtype for kind in found.kinds} == {"bfloat16"}
    rules = {"up_proj.weight": PartitionSpec(None, "model"), "gate*": None}
    ruled = plan(mlp(), {"model": 4}, rules=rules)
    specs = {kind.name: (kind.spec, kind.why) for kind in ruled.kinds}
    assert specs["up_proj.weight"] == ("(None, 'model')", "as given")
    assert specs["gate_proj.weight"] == ("(None, None)", "no strategy")
    model = maxjax.init(mlp(), jax.random.key(0)).to(real_mesh({"model": 4}), rules=rules)
    assert ruled.bytes_per_device == held_by_the_first(model)


def test_what_is_whole_on_every_device_is_listed_with_its_reason():
    found = plan(bert(), {"model": 8})
    assert found.replicated[0].bytes >= found.replicated[-1].bytes
    whole = {kind.name: kind.why for kind in found.replicated}
    query = whole["encoder.layer.*.attention.self.query.weight"]
    assert "4 heads" in query and "do not divide by model=8" in query
    assert "embeddings.word_embeddings.weight" not in whole


def test_weights_in_the_memory_of_the_host_take_none_of_a_device():
    model = maxjax.init(mlp(), jax.random.key(0))
    mesh = real_mesh({"model": 2})
    place = NamedSharding(mesh, PartitionSpec("model"), memory_kind="pinned_host")
    gate = model.gate_proj.weight
    gate.change(sharding=place)
    gate.value = gate.stored_value()
    found = plan(model)
    kinds = {kind.name: kind for kind in found.kinds}
    assert kinds["gate_proj.weight"].bytes_per_device == 0
    assert "pinned_host" in kinds["gate_proj.weight"].why


# --- checkpoints ------------------------------------------------------------------------------


def test_a_checkpoint_of_a_known_model_goes_by_its_own_rules(checkpoint):
    model = bert()
    tensors = {n: tuple(map(int, w.shape)) for n, w in model.raw_state_dict().items()}
    path = checkpoint(tensors, BERT)
    found = plan(path, {"model": 4})
    assert found.basis == "the model's own rules"
    assert found.kinds == plan(model, {"model": 4}).kinds
    assert plan(path / "m.safetensors", {"model": 4}) == found
    # As load(dtype=...) does: norms stay in float32.
    assert {kind.dtype for kind in plan(path, dtype="bf16").kinds} == {"bfloat16", "float32"}
    assert held_by_the_first(maxjax.load(path, dtype="bfloat16")[0]) == (
        plan(path, dtype="bf16").bytes_per_device
    )


LLAMA = {
    "model_type": "llama", "architectures": ["NoSuchForCausalLM"], "num_hidden_layers": 2,
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip


def test_another_goes_by_the_names_of_its_tensors(checkpoint):
    found = plan(checkpoint(shapes(LLAMA), LLAMA), {"model": 4})
    assert found.basis == "rules by tensor names"
    specs = {kind.name: kind.spec for kind in found.kinds}
    layer = "model.layers.*."
    assert specs[f"{layer}self_attn.q_proj.weight"] == "('model', None)"
    assert specs[f"{layer}self_attn.k_proj.weight"] == "(None, None)"  # 2 heads over 4 devices
    assert specs[f"{layer}self_attn.o_proj.weight"] == "(None, 'model')"
    assert specs[f"{layer}mlp.down_proj.weight"] == "(None, 'model')"
    assert specs[f"{layer}input_layernorm.weight"] == "(None,)"
    assert specs["model.embed_tokens.weight"] == specs["lm_head.weight"] == "('model', None)"
    assert sum(kind.count for kind in found.kinds) == len(shapes(LLAMA))


def test_without_a_configuration_it_says_so(checkpoint):
    found = plan(checkpoint(shapes(LLAMA)), {"model": 4})
    assert "no config.json" in found.notes[0]
    specs = {kind.name: kind.spec for kind in found.kinds}
    assert specs["model.layers.*.self_attn.k_proj.weight"] == "('model', None)"
    with pytest.raises(UserInputError, match="num_hidden_layers"):
        plan(checkpoint(shapes(LLAMA)), batch=1, length=1)


def test_a_name_that_does_not_hold_is_whole_and_says_why(checkpoint):
    path = checkpoint(
        {"layers.0.q_proj.weight": (24, 8), "layers.0.down_proj.weight": (64,)}, LLAMA
    )
    kinds = plan(path, {"model": 2}).kinds
    assert {kind.spec for kind in kinds} == {"(None, None)", "(None,)"}
    assert any("axis 0 must have 32 values, got 24" in kind.why for kind in kinds)


def test_rules_of_the_caller_go_before_names(checkpoint):
    path = checkpoint({"layers.0.up_proj.weight": (8, 6), "layers.1.up_proj.weight": (8, 6)}, LLAMA)
    rules = {"layers.1.*": PartitionSpec(None, "tp")}
    kinds = plan(path, {"tp": 2}, rules=rules).kinds
    assert [(k.name, k.spec) for k in kinds] == [
        ("layers.*.up_proj.weight", "('model', None)"),
        ("layers.*.up_proj.weight", "(None, 'model')"),
    ]
    with pytest.raises(UserInputError, match="does not divide"):
        plan(path, {"model": 4}, rules=rules)


@pytest.mark.parametrize(
    ("name", "shape", "config", "spec"),
    [
        ("model.layers.0.mlp.experts.3.up_proj.weight", (8, 4), {}, "(('expert', 'model'), None)"),
        ("layers.0.block_sparse_moe.experts.3.w2.weight", (4, 8), {}, "(None, ('expert', 'model'))"),
        ("layers.0.feed_forward.experts.down_proj", (8, 4, 2), {}, "(('expert', 'model'), None, None)"),
        ("layers.0.mlp.shared_experts.up_proj.weight", (8, 4), {}, "('model', None)"),
        ("layers.0.mlp.gate.weight", (8, 4), {}, "(None, None)"),
        ("embed_tokens.weight", (7, 4), {}, "(None, 'model')"),
        ("lm_head.bias", (8,), {}, "('model',)"),
        ("layers.0.fc1.bias", (8,), {}, "('model',)"),
        ("layers.0.fc2.bias", (8,), {}, "(None,)"),
        ("encoder.layer.0.attention.self.value.bias", (8,), {}, "('model',)"),
        ("encoder.layer.0.attention.output.dense.weight", (8, 8), {}, "(None, 'model')"),
        ("encoder.layer.0.output.dense.weight", (8, 8), {}, "(None, 'model')"),
        ("h.0.mlp.c_fc.weight", (4, 8), {"model_type": "openai-gpt"}, "(None, 'model')"),
        ("h.0.mlp.c_proj.weight", (8, 4), {"model_type": "openai-gpt"}, "('model', None)"),
        ("h.0.mlp.c_fc.weight", (8, 4), {"model_type": "imagegpt"}, "('model', None)"),
        ("h.0.attn.c_attn.weight", (4, 12), {"model_type": "openai-gpt", "n_head": 2, "n_embd": 4},
         "(None, 'model')"),
        ("layers.0.qkv_proj.weight", (16, 4), {"num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 2}, "('model', None)"),
        ("layers.0.gate_up_proj.weight", (8, 4), {}, "('model', None)"),
        ("vision_tower.layers.0.q_proj.weight", (6, 4), {"num_attention_heads": 3, "hidden_size": 9,
         "vision_config": {"num_attention_heads": 2, "hidden_size": 6}}, "('model', None)"),
        ("model.layers.0.q_proj.weight", (8, 4), {"text_config": {"num_attention_heads": 4,
         "hidden_size": 8}}, "('model', None)"),
    ],
)  # fmt: skip
def test_names(checkpoint, name, shape, config, spec):
    found = plan(checkpoint({name: shape}, config), {"expert": 2, "model": 2})
    assert [kind.spec for kind in found.kinds] == [spec], found.kinds[0].why


def test_names_are_rules_for_a_module_too():
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    mesh = real_mesh({"model": 2})
    own, named = block().to(mesh), block().to(mesh, rules=names.rules(config))
    for name, weight in own.raw_state_dict().items():
        assert named.raw_state_dict()[name].sharding == weight.sharding, name


def test_layers_with_a_window_have_pages_of_their_own_in_long_texts():
    config = Qwen2Config(
        64,
        16,
        16,
        num_hidden_layers=6,
        num_attention_heads=2,
        layer_types=("sliding_attention",) * 5 + ("full_attention",),
        sliding_window=8,
    )
    model = Qwen2(config)
    for dtype in ("float32", "int8"):
        found = plan(model, batch=2, length=32, cache_dtype=dtype).cache_bytes_per_device
        held = jax.tree.leaves(model.page_pool(2, 32, 2, dtype, abstract=True))
        assert found == sum(leaf.size * leaf.dtype.itemsize for leaf in held)
        found = plan(model, batch=2, length=2048, cache_dtype=dtype).cache_bytes_per_device
        held = jax.tree.leaves(abstract_pool(model, 2, 2048, dtype))
        assert found == sum(leaf.size * leaf.dtype.itemsize for leaf in held)
        # The window, a piece of a prompt and a page; all layers would have 64 pages.
        assert {leaf.shape[1] for leaf in held} == {64, 2 * 10}


@pytest.mark.parametrize("sizes", [{"model": 4}, {"data": 2, "model": 2}, {"data": 2, "fsdp": 2}])
def test_states_of_a_recurrence_are_split_over_both_axes(sizes):
    model = Mamba2(Mamba2Config(32, 64, num_hidden_layers=3, num_heads=8, head_dim=8, n_groups=2))
    found = plan(model, sizes, batch=4, length=16)
    states = model.to(real_mesh(sizes)).cache(4, 16).states
    assert found.cache_bytes_per_device == held_by_the_first(states)


def test_latent_attention_has_widths_of_its_own():
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "qk_nope_head_dim": 8,
              "qk_rope_head_dim": 4, "v_head_dim": 6, "kv_lora_rank": 16}  # fmt: skip
    assert names.heads(config) == (2, 4, 4, 12, 6, None)
    assert names.rules(config)["*.o_proj.weight"].segments[0].size == 24


@pytest.mark.parametrize("value", [True, -4, 2.0, "4", None, [4]])
def test_a_count_that_is_none_is_not_used(value):
    found = names.heads({"num_attention_heads": value, "hidden_size": 8, "num_hidden_layers": 1})
    assert found.heads is None and found.head_dim is None
    assert names.rules({"num_attention_heads": value, "model_type": []})


# --- the cache --------------------------------------------------------------------------------


def test_the_cache_of_a_module():
    # 5 layers x 2 heads x 8 wide, keys and values, float32
    whole = 5 * 2 * 8 * 2 * 4 * 6 * 7
    assert plan(Tower(), batch=6, length=7).cache_bytes_per_device == whole
    split = plan(Tower(), {"data": 2, "fsdp": 3, "model": 2}, batch=6, length=7)
    assert split.cache_bytes_per_device == whole // 12 and split.notes == ()
    narrow = plan(Tower(), {"model": 2}, batch=6, length=7, cache_dtype="bf16")
    assert narrow.cache_bytes_per_device == whole // 4
    assert plan(Tower(), dtype="bf16", batch=6, length=7).cache_bytes_per_device == whole // 2


@pytest.mark.parametrize("dtype", ["bool", "int64", "float4_e2m1fn"])
def test_what_a_cache_does_not_hold(dtype):
    with pytest.raises(UserInputError, match=f"floats of at least 8 bits or int8, not {dtype}"):
        plan(Tower(), batch=6, length=7, cache_dtype=dtype)


def test_what_of_a_cache_does_not_divide_is_said():
    found = plan(Tower(), {"data": 4, "model": 4}, batch=6, length=7)
    # Two sequences of each group, one of two heads, and 4 of 7 tokens.
    assert found.cache_bytes_per_device == 5 * 2 * 1 * 4 * 8 * 2 * 4
    assert len(found.notes) == 2
    assert "4 groups of devices divide the sequences, so it has room for 8" in found.notes[0]
    assert "2 KV heads do not divide by model=4, so the tokens of each page" in found.notes[1]
    found = plan(Tower(), {"data": 4}, batch=1, length=7)
    assert "one sequence does not divide by data=4" in found.notes[0]
    found = plan(Tower(), {"model": 4}, batch=1, length=7)
    assert found.cache_bytes_per_device == 5 * 8 * 2 * 4 * 4
    assert "2 KV heads do not divide by model=4, so the tokens of each page" in found.notes[0]


def test_an_encoder_has_none():
    found = plan(bert(), batch=6, length=7)
    assert found.cache_bytes_per_device == 0 and "encoder" in found.notes[0]


def test_the_cache_of_a_checkpoint(checkpoint):
    path = checkpoint(shapes(LLAMA), LLAMA, np.float16)
    found = plan(path, {"model": 2}, batch=3, length=5)
    assert found.cache_bytes_per_device == 2 * 2 * 3 * 5 * (2 // 2) * 8 * 2
    checkpoint(shapes(LLAMA), {"model_type": "esm"})
    assert plan(path, batch=3, length=5).cache_bytes_per_device == 0
    checkpoint(shapes(LLAMA), LLAMA | {"kv_lora_rank": 4})
    with pytest.raises(UserInputError, match="latent attention"):
        plan(path, batch=3, length=5)


def test_a_module_without_attention_has_no_known_cache():
    with pytest.raises(UserInputError, match="MLP has no AttentionWithRope"):
        plan(mlp(), batch=1, length=1)


# --- does it fit ------------------------------------------------------------------------------


def test_it_fits_or_not():
    size = plan(mlp()).total_bytes
    assert plan(mlp(), hbm=size).fits is True
    assert plan(mlp(), hbm=size).suggestion is None
    found = plan(mlp(), hbm=size - 1)
    assert found.fits is False and found.suggestion is not None
    assert (found.suggestion.mesh, found.suggestion.dtype) == ({}, "bfloat16")
    assert found.suggestion.bytes_per_device == size // 2


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("share", [0.8, 0.4, 0.2, 0.1])
def test_a_suggestion_fits_and_nothing_smaller_does(make, share):
    hbm = int(plan(make()).total_bytes * share)
    found = plan(make(), {"data": 2}, hbm=hbm).suggestion
    if found is None:
        pytest.skip("nothing fits")
    there = plan(make(), found.mesh, dtype=found.dtype, hbm=hbm)
    assert there.fits and there.bytes_per_device == found.bytes_per_device <= hbm
    assert there.devices == found.devices
    for dtype in (None, "bfloat16"):
        for axis in ("model", "fsdp"):
            smaller = {"data": 2, axis: found.devices // 4}
            if smaller[axis]:
                assert not plan(make(), smaller, dtype=dtype, hbm=hbm).fits


def test_a_suggestion_uses_the_axes_there_are():
    found = plan(mlp().to(jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))),
                 dtype="bf16", hbm=2000)  # fmt: skip
    assert found.suggestion is not None and set(found.suggestion.mesh) <= {"tp", "fsdp"}
    assert found.suggestion.mesh["tp"] == 4


def test_sizes_that_are_not_known_yet():
    model = nn.Sequential([nn.Linear(8, 4, "float32", CPU), nn.Linear("wide", 4, "float32", CPU)])
    for mesh in (None, {"model": 2}):
        found = plan(model, mesh, hbm="1GB")
        assert found.fits is None and found.notes[0].endswith("0 bytes: 1.weight")
        assert found.total_bytes == 8 * 4 * 4


def test_nothing_fits():
    found = plan(nn.RMSNorm(1000, "float32"), hbm=100)
    assert found.fits is False and found.suggestion is None
    assert "no mesh or dtype" in str(found)


def test_a_suggestion_counts_the_cache():
    weights = plan(Tower(), dtype="bf16").total_bytes
    found = plan(Tower(), dtype="bf16", hbm=weights, batch=8, length=100).suggestion
    assert found is not None and found.cache_bytes_per_device > 0
    assert found.bytes_per_device + found.cache_bytes_per_device <= weights


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80 * 10**9), ("16GiB", 16 << 30), ("1.5 tib", 3 << 39), ("7", 7), (" 2 kB ", 2000)],
)
def test_sizes_of_memory(text, size):
    assert size_in_bytes(text) == size


@pytest.mark.parametrize(
    "size", ["", "GB", "80 apples", "-1GB", "nan", "0", 0, -1, True, 1.5, "1e3", "9" * 400]
)
def test_what_is_no_size_of_memory(size):
    with pytest.raises(UserInputError, match="hbm=.* is not a size: write"):
        plan(mlp(), hbm=size)


def test_memory_that_devices_report(monkeypatch):
    class Device:
        process_index = 0

        def __init__(self, limit):
            self.limit = limit

        def memory_stats(self):
            return {"bytes_limit": self.limit} if self.limit else None

    assert plan(mlp(), real_mesh({"model": 2})).fits is None  # the CPU does not say
    mesh = type("Mesh", (), {"devices": np.array([Device(70), Device(50), Device(None)])})
    monkeypatch.setattr("maxjax.engine.plan.report.Mesh", mesh)
    assert _memory_of(mesh()) == 50


@pytest.mark.parametrize(
    ("kind", "hbm"),
    [("TPU v5 lite", 63 << 28), ("TPU v5", 95 << 30), ("TPU v5p", 95 << 30), ("NVIDIA H200", 141 * 10**9),
     ("NVIDIA H100 80GB HBM3", 80 * 10**9), ("TPU v99", None)],
)  # fmt: skip
def test_a_mesh_of_a_topology(kind, hbm):
    class Device:
        """As of jax.experimental.topologies: programs are compiled for it, and it is nowhere."""

        process_index, platform, device_kind = 0, "tpu", kind

        def memory_stats(self):
            raise jax.errors.JaxRuntimeError(
                "UNIMPLEMENTED: MemoryStats is only supported for addressable PjRt devices"
            )

    mesh = jax.sharding.Mesh(np.array([Device() for _ in range(2)]), ("model",))
    found = plan(mlp(), mesh)
    assert (found.devices, found.hbm, found.fits) == (2, hbm, None if hbm is None else True)
    assert found.bytes_per_device == plan(mlp(), {"model": 2}).bytes_per_device


# --- options and the result -------------------------------------------------------------------


@pytest.mark.parametrize(
    "mesh",
    ["model", "model=", "model=x", "model=0", "model=-1", "model=2,model=4", "model=2;data=2", "",
     "modle=2", "model=2,tp=2", {}, {"model": 0}, {"model": True}, {"model": 2.0}, {"row": 2, "column": 2},
     "model=99999999999"],
)  # fmt: skip
def test_a_mesh_that_is_none(mesh):
    with pytest.raises(UserInputError, match="mesh"):
        plan(mlp(), mesh)


def test_a_mesh_may_be_text_sizes_or_abstract():
    one = plan(mlp(), "tp=2, dp=2")
    assert one == plan(mlp(), {"model": 2, "data": 2})
    assert one == plan(mlp(), AbstractMesh((2, 2), ("model", "data")))
    assert plan(mlp(), {"model": 4096, "data": 1024}).devices == 1 << 22


def test_the_only_axis_of_a_mesh_may_have_any_name():
    one, other = plan(mlp(), {"x": 4}), plan(mlp(), {"model": 4})
    assert one == plan(mlp(), "x=4") == plan(mlp(), AbstractMesh((4,), ("x",)))
    assert one.bytes_per_device == other.bytes_per_device < plan(mlp()).bytes_per_device
    says = (
        r"no axis 'x': axes are data \(dp, batch\), .*model \(tp, tensor, mp\); a single axis may"
    )
    with pytest.raises(UserInputError, match=says):
        plan(mlp(), {"x": 4, "model": 2})


@pytest.mark.parametrize(
    "options",
    [{"batch": 1}, {"length": 1}, {"batch": 0, "length": 1}, {"batch": True, "length": 1},
     {"dtype": "float23"}, {"dtype": "int8"}, {"cache_dtype": "f"}, {"rules": {}}],
)  # fmt: skip
def test_options_that_cannot_be_used(options):
    with pytest.raises(UserInputError):
        plan(mlp(), **options)


def test_what_is_neither_a_module_nor_a_path(tmp_path):
    with pytest.raises(TypeError, match="a Module or the path"):
        plan(3)
    with pytest.raises(TypeError, match="mesh must be"):
        plan(mlp(), 3)
    with pytest.raises(CheckpointMissingError):
        plan(tmp_path / "absent")


def test_strategies_of_a_mesh_without_known_axes():
    mesh = AbstractMesh((2, 1), ("rows", "columns"))
    with pytest.raises(UserInputError, match="rows"):
        plan(mlp(), mesh)
    model = mlp()
    model.sharding_strategy = ShardingStrategy.replicate(2)
    assert plan(model, mesh, rules={"*": None}).replicated


def test_a_plan_is_plain_data_and_a_table():
    found = plan(Tower(), {"model": 2, "data": 2}, hbm="1MB", batch=2, length=4)
    assert isinstance(found, Plan) and maxjax.plan is plan
    data = json.loads(json.dumps(found.as_dict()))
    assert data["mesh"] == {"model": 2, "data": 2} and data["kinds"][0]["count"] == 1
    text = str(found)
    assert "mesh model=2, data=2 (4 devices)" in text and "fits" in text
    assert f"{found.bytes_per_device:,} bytes" in text
    with pytest.raises(AttributeError):
        found.devices = 3  # type: ignore[misc]


def test_names_cannot_steer_a_terminal(checkpoint):
    assert "\x1b" not in str(plan(checkpoint({"a\x1b[2J.weight": (2, 2)})))


# --- a large one ------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layers", "shards", "hbm"), [(16, 9, "10GB"), (126, 191, "80GB")], ids=str
)
def test_llama_405b(tmp_path, layers, shards, hbm):
    hidden, wide, keys, words = 16384, 53248, 1024, 128256
    total = write_sparse(tmp_path, LLAMA_405B | {"num_hidden_layers": layers}, shards)
    found = plan(tmp_path, "model=8", batch=4, length=1000, hbm=hbm)
    split = (
        layers * (2 * hidden * hidden + 2 * keys * hidden + 3 * hidden * wide) + 2 * words * hidden
    )
    whole = layers * 2 * hidden + hidden
    assert found.total_bytes == total == 2 * (split + whole)
    assert found.bytes_per_device == 2 * (split // 8 + whole)
    assert found.cache_bytes_per_device == 2 * layers * 4 * 1000 * 1 * 128 * 2
    assert sum(kind.bytes for kind in found.replicated) == 2 * whole
    assert sum(kind.count for kind in found.kinds) == 9 * layers + 3 and len(found.kinds) == 12
    assert found.fits is False and found.suggestion is not None
    assert found.suggestion.devices == 16
