"""Meshes of a device: all are compared, the best is one that fits, and its costs are those of the program."""

from fractions import Fraction

import jax
import pytest

import maxjax
from maxjax.engine.plan.compiled import lowered, placeholder_of
from maxjax.engine.plan.footprint import Reading
from maxjax.engine.plan.report import plan
from maxjax.engine.plan.topology import KINDS
from maxjax.errors import UserInputError
from maxjax.models import Llama, LlamaConfig, Mixtral, MixtralConfig
from maxjax.models.name_rules import HEADS, layer_of
from scripts import hlo

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}


def llama(**options):
    return Llama(
        LlamaConfig(**SIZES, **({"num_attention_heads": 8, "num_key_value_heads": 8} | options)),
        "bfloat16",
    )


def mixtral():
    config = MixtralConfig(
        **SIZES,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    return Mixtral(config, "bfloat16")


def choice(found, **sizes):
    return next(one for one in found.meshes if one.mesh == sizes)


@pytest.mark.parametrize(
    ("table", "head"),
    [
        ("model.embed_tokens.weight", "lm_head.weight"),
        ("gpt_neox.embed_in.weight", "embed_out.weight"),
        ("transformer.wte.weight", "lm_head.weight"),
        ("backbone.embeddings.weight", "lm_head.weight"),
    ],
)
def test_a_step_reads_one_row_of_a_table_and_the_whole_head(table, head):
    reading = Reading(vocab_size=100, hidden_size=8)
    assert layer_of(head) in HEADS
    assert [reading.share(name, 3, tied=False) for name in (table, head)] == [Fraction(3, 100), 1]
    assert reading.share(table, 3, tied=True) == 1
    # Gemma's tables of each layer are only looked up, also where the head is tied to another.
    assert reading.share("model.embed_tokens_per_layer.weight", 3, tied=True) == Fraction(3, 100)


def test_every_mesh_of_all_devices_is_compared():
    found = plan(llama(), device="v5e:2x4")
    meshes = [one.mesh for one in found.meshes]
    assert len(meshes) == len({str(mesh) for mesh in meshes}) == 10
    assert {"data": 2, "fsdp": 2, "model": 2} in meshes and {"data": 8} in meshes
    # Three doublings over four axes.
    assert len(plan(mixtral(), device="v5e:2x4").meshes) == 20
    assert [one.mesh for one in plan(llama(), device="v5e:1x1").meshes] == [{"model": 1}]
    assert {"data": 3, "model": 2} in [one.mesh for one in plan(llama(), device="h200:6").meshes]


@pytest.mark.parametrize("make", [llama, mixtral])
def test_a_choice_is_the_plan_of_its_mesh(make):
    found = plan(make(), device="v5e:2x2", batch=4, length=32)
    for one in found.meshes:
        alone = plan(make(), one.mesh, batch=4, length=32)
        assert one.bytes_per_device == alone.bytes_per_device
        assert one.cache_bytes_per_device == alone.cache_bytes_per_device
    first = found.meshes[0]
    assert (found.mesh, found.bytes_per_device) == (first.mesh, first.bytes_per_device)
    assert found.hbm == KINDS["v5e"].memory and found.fits is True


def test_the_best_reads_least_among_those_that_fit():
    # Weights so large that a collective's latency is nothing beside them.
    big = Llama(
        LlamaConfig(
            128256, 4096, 14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8
        ),
        "bfloat16",
    )
    found = plan(big, device="v5e:2x4", batch=8, length=8192)
    assert found.mesh == {"model": 8}
    seconds = [one.seconds for one in found.meshes if one.fits]
    assert seconds == sorted(seconds)
    assert [one.fits for one in found.meshes] == sorted(
        (one.fits for one in found.meshes), reverse=True
    )
    best = found.meshes[0]
    embedding = 128256 * 4096 * 2 // 8  # of which a lookup reads eight rows
    assert (
        abs(best.bytes_read - (found.bytes_per_device - embedding + found.cache_bytes_per_device))
        < 1e5
    )
    assert best.bytes_read == min(one.bytes_read for one in found.meshes)
    # A model so small that what it reads is nothing beside a collective.
    assert plan(llama(), device="v5e:2x4", batch=8, length=64).mesh == {"data": 8}


def test_what_fsdp_splits_is_gathered_and_read_whole():
    found = plan(llama(), device="v5e:2x4", batch=8, length=64)
    gathered, whole = choice(found, fsdp=8), choice(found, data=8)
    assert gathered.bytes_per_device < whole.bytes_per_device
    # But for the two tables: a device reads its part of the head, and of a row of the embedding.
    table = 128 * 64 * 2
    assert gathered.bytes_read == whole.bytes_read - table * 7 // 8
    assert "gathered over fsdp=8 for every token" in gathered.why
    assert gathered.bytes_sent > 0 == whole.bytes_sent == whole.collectives


def test_of_experts_the_mean_number_that_is_chosen_is_read():
    one, eight = (plan(mixtral(), device="v5e:1x1", batch=n, length=1).meshes[0] for n in (1, 8))
    experts = 3 * 4 * 3 * 64 * 128 * 2  # layers, experts, projections
    rest = one.bytes_per_device - experts - 128 * 64 * 2
    assert one.bytes_read - one.cache_bytes_per_device == rest + experts // 2 + 64 * 2
    # Two of four are chosen by each of eight sequences.
    read = eight.bytes_read - eight.cache_bytes_per_device - rest - 8 * 64 * 2
    assert read == experts * (1 - 0.5**8)


def test_what_a_device_sends():
    row, layers = 64 * 2, 3  # bytes of a hidden state in bfloat16
    found = plan(mixtral(), device="v5e:2x2", batch=4, length=8)
    # The rows of the three others are gathered before the experts of each layer, and scattered after.
    assert choice(found, expert=4).bytes_sent == layers * 2 * 3 * row
    # Two all-reduces of four rows in each layer and one of the embedding; each sends 2 * 3 / 4 of them.
    assert choice(found, model=4).bytes_sent == (layers * 2 + 1) * 4 * row * 2 * 3 // 4


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("make", "sizes"),
    [(llama, {"model": 4}), (llama, {"data": 2, "model": 2}), (llama, {"data": 4}), (llama, {"fsdp": 4}),
     (mixtral, {"expert": 2, "model": 2}), (mixtral, {"expert": 4}), (mixtral, {"model": 2}),
     (lambda: llama(tie_word_embeddings=True), {"model": 2})],
)  # fmt: skip
def test_the_collectives_are_those_of_the_compiled_program(make, sizes):
    mesh = maxjax.make_mesh(**sizes)
    model = placeholder_of(make(), mesh)
    text = lowered("decode", model, mesh, batch=4, capacity=64).compile().as_text()
    # Those of activations and weights, in float32 on CPUs: token ids and their choice send a few bytes.
    found = [
        one for one in hlo.collectives(hlo.parse(text)) if one.dtype == "f32" and one.bytes >= 256
    ]
    topology = f"cpu:{mesh.size}"
    planned = choice(plan(make(), device=topology, batch=4, length=64), **sizes)
    assert sum(one.times for one in found) == planned.collectives


# --- what does not fit ----------------------------------------------------------------------------


def test_a_mesh_that_cannot_hold_the_model_names_the_part_and_a_mesh_that_can():
    model, weights = llama(), plan(llama()).total_bytes
    found = plan(model, {"data": 8}, device="cpu:8", hbm=weights // 2, batch=1, length=8)
    assert found.fits is False and found.why.startswith("the weights alone take")
    assert found.suggestion.devices == 8 and found.suggestion.mesh != {"data": 8}
    there = plan(model, found.suggestion.mesh, hbm=weights // 2, batch=1, length=8)
    assert there.fits is True
    assert found.why in str(found) and str(found.suggestion) in str(found)
    cache = plan(model, {"model": 8}, batch=64, length=512).cache_bytes_per_device
    assert cache > weights
    long = plan(model, {"model": 8}, hbm=cache - 1, batch=64, length=512)
    assert long.why.startswith("the cache alone takes")
    both = plan(model, {"model": 8}, hbm=cache + 1, batch=64, length=512)
    assert both.why.startswith("weights of") and "and a cache of" in both.why
    assert plan(model, {"model": 8}, hbm="1GB").why == ""


def test_where_none_fits_the_smallest_comes_first_and_more_devices_are_named():
    weights = plan(llama()).total_bytes
    found = plan(llama(), device="cpu:2", hbm=weights // 5, batch=1, length=8)
    assert found.fits is False and {one.fits for one in found.meshes} == {False}
    taken = [one.bytes_per_device + one.cache_bytes_per_device for one in found.meshes]
    assert taken == sorted(taken)
    assert all("of a device" in one.why for one in found.meshes)
    assert found.suggestion.devices > 2


def test_why_a_mesh_is_worse():
    found = plan(llama(num_key_value_heads=2), device="v5e:2x4", batch=4, length=64)
    assert (
        "8 groups of devices divide the sequences, so it has room for 8"
        in choice(found, data=8).why
    )
    assert "is replicated" in choice(found, data=8).why
    assert "KV heads" in choice(found, model=8).why


def test_rules_of_the_caller_hold_for_every_mesh():
    rules = {"*.up_proj.weight": jax.sharding.PartitionSpec("model", None)}
    found = plan(llama(), device="v5e:2x4", rules=rules)
    assert all("model" in one.mesh for one in found.meshes) and found.meshes
    with pytest.raises(UserInputError, match="no mesh of .* divides"):
        plan(llama(), device="v5e:2x4", rules={"*": jax.sharding.PartitionSpec("nonesuch")})


def test_sizes_are_assumed_only_where_none_are_given():
    found = plan(llama(), device="v5e:2x4")
    assert "one sequence of 2,048 tokens is assumed" in found.notes[-1]
    assert found.cache_bytes_per_device == plan(
        llama(), found.mesh, batch=1, length=2048
    ).cache_bytes_per_device  # fmt: skip
    given = plan(llama(), device="v5e:2x4", batch=8, length=8)
    assert not given.notes and given.cache_bytes_per_device < found.cache_bytes_per_device


def test_a_gpu_whose_memory_jax_would_not_take_whole():
    weights = plan(llama(), {"model": 1}).total_bytes
    full = plan(llama(), device="h200:1", hbm=weights * 5 // 4, batch=1, length=1)
    assert full.fits and "XLA_PYTHON_CLIENT_MEM_FRACTION" in full.notes[-1]
    assert not plan(llama(), device="h200:1", hbm=2 * weights, batch=1, length=1).notes
    assert not plan(llama(), device="v5e:1x1", hbm=weights * 5 // 4, batch=1, length=1).notes


def test_the_table_shows_the_best():
    text = str(plan(llama(), device="v5e:2x4", batch=8, length=64))
    assert text.startswith("mesh data=8 (8 devices) of v5e:2x4; the model's own rules\n")
    lines = text[text.index("meshes, the best first") :].splitlines()
    assert lines[2].split()[:2] == ["data=8", "yes"] and lines[-1] == "  and 5 more"
