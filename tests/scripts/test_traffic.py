"""scripts/traffic.py: bytes of small programs, counted by hand, and of one that XLA compiles here."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts import hlo, traffic
from scripts.traffic import Held, Mixture


def moved(text, **options):
    return traffic.moved(hlo.parse(text), **options)


def totals(text, **options):
    return traffic.totals(moved(text, **options))


def by_name(text, **options):
    """The type of a result -> (reads, writes)."""
    return {one.type.partition("{")[0]: (one.reads, one.writes) for one in moved(text, **options)}


# --- operations -----------------------------------------------------------------------------------


def test_an_operation_reads_its_operands_and_writes_its_result():
    text = """HloModule m

ENTRY %main (w: bf16[64,32], x: f32[32]) -> f32[64] {
  %w = bf16[64,32]{1,0} parameter(0), metadata={op_name="model.w"}
  %x = f32[32]{0} parameter(1)
  %b = bf16[64,32]{1,0} bitcast(%w)
  %y = f32[64]{0} dot(%b, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %z = f32[64]{0} copy(%y)
}
"""
    (dot, copy) = moved(text)
    assert (dot.reads, dot.writes) == (64 * 32 * 2 + 32 * 4, 64 * 4)
    assert (copy.reads, copy.writes) == (256, 256)


def test_of_slices_gathers_and_updates_in_place_only_the_part_counts():
    text = """HloModule m

ENTRY %main (c: bf16[8,128], i: s32[], n: bf16[1,128], ids: s32[2]) -> bf16[8,128] {
  %c = bf16[8,128]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %n = bf16[1,128]{1,0} parameter(2)
  %ids = s32[2]{0} parameter(3)
  %one = bf16[1,128]{1,0} dynamic-slice(%c, %i, %i), dynamic_slice_sizes={1,128}
  %two = bf16[2,128]{1,0} gather(%c, %ids), slice_sizes={1,128}
  ROOT %new = bf16[8,128]{1,0} dynamic-update-slice(%c, %n, %i, %i)
}
"""
    assert by_name(text) == {
        "bf16[1,128]": (256, 256), "bf16[2,128]": (512, 512), "bf16[8,128]": (256, 256),
    }  # fmt: skip


def test_what_a_tpu_keeps_in_vmem_does_not_count():
    text = """HloModule m

ENTRY %main (w: bf16[2,64,128], x: bf16[8,128]) -> bf16[8,64] {
  %w = bf16[2,64,128]{2,1,0:T(8,128)} parameter(0)
  %x = bf16[8,128]{1,0:T(8,128)} parameter(1)
  %s = ((bf16[2,64,128]{2,1,0:T(8,128)}), bf16[1,64,128]{2,1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%w)
  %d = bf16[1,64,128]{2,1,0:T(8,128)S(1)} slice-done(%s)
  %c = (bf16[8,128]{1,0:T(8,128)S(1)}, bf16[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)
  %e = bf16[8,128]{1,0:T(8,128)S(1)} copy-done(%c)
  %y = bf16[8,64]{1,0:T(8,128)S(1)} dot(%e, %d), lhs_contracting_dims={1}, rhs_contracting_dims={2}
  %b = (bf16[8,64]{1,0:T(8,128)}, bf16[8,64]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%y)
  ROOT %z = bf16[8,64]{1,0:T(8,128)} copy-done(%b)
}
"""
    fetch, other, back = moved(text)
    assert (fetch.reads, fetch.writes) == (64 * 128 * 2, 0)
    assert (other.reads, other.writes) == (8 * 128 * 2, 0)
    assert (back.reads, back.writes) == (0, 8 * 64 * 2)


def test_a_collective_reads_what_it_sends_and_writes_what_it_gets():
    text = """HloModule m

ENTRY %main (x: f32[64]) -> f32[512] {
  %x = f32[64]{0} parameter(0)
  %s = (f32[64]{0}, f32[512]{0}) all-gather-start(%x), dimensions={0}
  %g = f32[512]{0} all-gather-done(%s)
  ROOT %r = f32[512]{0} all-reduce(%g), to_apply=%add
}
"""
    gather, reduce = moved(text)
    assert (gather.reads, gather.writes) == (256, 2048)
    assert (reduce.reads, reduce.writes) == (2048, 2048)
    text = text.replace("f32[512]{0} all-gather-done", "f32[512]{0:T(128)S(1)} all-gather-done")
    text = text.replace("%r = f32[512]{0}", "%r = f32[512]{0:T(128)S(1)}")
    assert [(one.reads, one.writes) for one in moved(text)] == [(256, 2048)]


# --- fusions --------------------------------------------------------------------------------------

FUSIONS = """HloModule m

%inner (p: bf16[4,64]) -> f32[4,64] {
  %p = bf16[4,64]{1,0} parameter(0)
  ROOT %c = f32[4,64]{1,0} convert(%p)
}

%sliced (p: bf16[4,64], i: s32[], x: f32[64]) -> f32[64] {
  %p = bf16[4,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[64]{0} parameter(2)
  %w = f32[4,64]{1,0} fusion(%p), kind=kLoop, calls=%inner
  %one = f32[1,64]{1,0} dynamic-slice(%w, %i, %i), dynamic_slice_sizes={1,64}
  %row = f32[64]{0} bitcast(%one)
  ROOT %sum = f32[64]{0} add(%row, %x)
}

%written (p: f32[4,64], i: s32[], x: f32[64]) -> (f32[4,64], f32[64]) {
  %p = f32[4,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[64]{0} parameter(2)
  %row = f32[1,64]{1,0} bitcast(%x)
  %new = f32[4,64]{1,0} dynamic-update-slice(%p, %row, %i, %i)
  %twice = f32[64]{0} add(%x, %x)
  ROOT %both = (f32[4,64]{1,0}, f32[64]{0}) tuple(%new, %twice)
}

%whole (p: f32[4,64]) -> f32[4] {
  %p = f32[4,64]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %two = f32[2,64]{1,0} slice(%p), slice={[0:2], [0:64]}
  ROOT %sum = f32[4]{0} reduce(%p, %zero), dimensions={1}, to_apply=%add
}

ENTRY %main (p: bf16[4,64], c: f32[4,64], i: s32[], x: f32[64]) -> f32[4] {
  %p = bf16[4,64]{1,0} parameter(0)
  %c = f32[4,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %x = f32[64]{0} parameter(3)
  %a = f32[64]{0} fusion(%p, %i, %x), kind=kLoop, calls=%sliced
  %b = (f32[4,64]{1,0}, f32[64]{0}) fusion(%c, %i, %a), kind=kLoop, calls=%written
  %d = f32[4,64]{1,0} get-tuple-element(%b), index=0
  ROOT %e = f32[4]{0} fusion(%d), kind=kInput, calls=%whole
}
"""


def test_a_fusion_reads_the_slices_that_it_takes_and_writes_its_updates():
    sliced, updated, whole = moved(FUSIONS)
    # One row of four in bfloat16, an index and a row in float32.
    assert (sliced.reads, sliced.writes) == (64 * 2 + 4 + 64 * 4, 64 * 4)
    # An index and a row; of the array that it updates nothing is read, and one row is written.
    assert (updated.reads, updated.writes) == (4 + 64 * 4, 64 * 4 + 64 * 4)
    assert (whole.reads, whole.writes) == (4 * 64 * 4, 4 * 4)


# --- loops ----------------------------------------------------------------------------------------

LOOPS = """HloModule m

%keep (t: (s32[], bf16[3,8,1024,4])) -> pred[] {
  %t = (s32[], bf16[3,8,1024,4]{3,2,1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

%attend (t: (s32[], bf16[3,8,1024,4])) -> (s32[], bf16[3,8,1024,4]) {
  %t = (s32[], bf16[3,8,1024,4]{3,2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %k = bf16[3,8,1024,4]{3,2,1,0} get-tuple-element(%t), index=1
  %s = bf16[1,8,256,4]{3,2,1,0} dynamic-slice(%k, %i, %i, %i, %i), dynamic_slice_sizes={1,8,256,4}
  ROOT %r = (s32[], bf16[3,8,1024,4]{3,2,1,0}) tuple(%i, %k)
}

%layer (t: (s32[], bf16[3,8,1024,4])) -> (s32[], bf16[3,8,1024,4]) {
  %t = (s32[], bf16[3,8,1024,4]{3,2,1,0}) parameter(0)
  ROOT %w = (s32[], bf16[3,8,1024,4]{3,2,1,0}) while(%t), condition=%keep, body=%attend
}

%token (t: (s32[], bf16[3,8,1024,4])) -> (s32[], bf16[3,8,1024,4]) {
  %t = (s32[], bf16[3,8,1024,4]{3,2,1,0}) parameter(0)
  ROOT %w = (s32[], bf16[3,8,1024,4]{3,2,1,0}) while(%t), condition=%keep, body=%layer, {known_trip_count":{"n":"3"}}
}

ENTRY %main (k: bf16[3,8,1024,4], i: s32[]) -> (s32[], bf16[3,8,1024,4]) {
  %k = bf16[3,8,1024,4]{3,2,1,0} parameter(0), metadata={op_name="state.cache.full.keys"}
  %i = s32[] parameter(1)
  %t = (s32[], bf16[3,8,1024,4]{3,2,1,0}) tuple(%i, %k)
  ROOT %w = (s32[], bf16[3,8,1024,4]{3,2,1,0}) while(%t), condition=%keep, body=%token
}
"""


def test_a_loop_counts_its_trips_one_token_of_decoding_and_all_slots_of_a_cache():
    part = 8 * 256 * 4 * 2
    reads, writes = totals(LOOPS, is_decode=True)
    # Three layers, each over four slices of 256 slots.
    assert (reads, writes) == (3 * 4 * part, 3 * 4 * part)


def test_a_slice_in_the_loop_over_tokens_counts_once():
    text = LOOPS.replace("body=%token", "body=%attend")
    part = 8 * 256 * 4 * 2
    assert totals(text, is_decode=True) == (part, part)
    assert totals(text) == (4 * part, 4 * part)


# --- kernels --------------------------------------------------------------------------------------

KERNELS = """HloModule m

ENTRY %main (layer: s32[1], owner: s32[6], x: bf16[8,32], …) -> bf16[8,64] {
  %layer = s32[1]{0} parameter(0)
  %owner = s32[6]{0} parameter(1)
  %x = bf16[8,32]{1,0} parameter(2)
  %y = bf16[6,4,32]{2,1,0} parameter(3)
  %w = u8[3,64,16]{2,1,0} parameter(4), metadata={op_name="model.layers.*.up_proj.weight"}
  %e = u8[3,2,64,16]{3,2,1,0} parameter(5), metadata={op_name="model.layers.0:3.mlp.experts.*.up_proj.weight"}
  %norm = bf16[32]{0} parameter(7), metadata={op_name="model.norm.weight"}
  %order = s32[32]{0} parameter(8), metadata={op_name="model.layers.0.mlp.experts.0.up_proj.g_idx"}
  %k = bf16[3,8,128]{2,1,0} parameter(6), metadata={op_name="state.cache.full.keys"}
  %flat = u8[6,64,16]{2,1,0} bitcast(%e)
  %wide = bf16[6,4,32]{2,1,0} broadcast(%norm), dimensions={2}
  %normal = bf16[6,4,32]{2,1,0} multiply(%y, %wide)
  %dense = bf16[8,64]{1,0} custom-call(%layer, %x, %w), custom_call_target="__gpu$xla.gpu.triton"
  %one = bf16[8,65]{1,0} custom-call(%layer, %x, %flat), custom_call_target="__gpu$xla.gpu.triton"
  %grouped = bf16[6,4,64]{2,1,0} custom-call(%owner, %normal, %flat, %order), custom_call_target="__gpu$xla.gpu.triton"
  %attention = bf16[8,66]{1,0} custom-call(%layer, %x, %k), custom_call_target="tpu_custom_call"
  %updated = bf16[3,8,128]{2,1,0} custom-call(%k, %x), custom_call_target="", output_to_operand_aliasing={{}: (0, {})}
  %noted = bf16[8,67]{1,0} custom-call(%x), custom_call_target="Sharding"
  ROOT %product = (bf16[8,68]{1,0}, s8[1024]{0}) custom-call(%x, %x), custom_call_target="__cublas$gemm"
}
"""


def test_a_kernel_reads_one_matrix_of_a_stack_and_of_experts_one_for_each_used_block():
    mixture = Mixture(experts=4, local=2, chosen=2, tokens=8, width=32)
    found = by_name(KERNELS, mixture=mixture)
    matrix, x, y = 64 * 16, 8 * 32 * 2, 6 * 4 * 32 * 2
    assert found["bf16[8,64]"] == (4 + x + matrix, 8 * 64 * 2)
    assert found["bf16[8,65]"] == (4 + x + matrix, 8 * 65 * 2)
    # An expert's rows are those of 8 tokens, each with a chance of 1/2, in blocks of 4.
    chances = [np.prod([(8 - i) / (i + 1) for i in range(n)]) / 256 for n in range(9)]
    used = 2 * sum(chance * -(-n // 4) for n, chance in enumerate(chances))
    assert found["bf16[6,4,64]"] == pytest.approx(
        (6 * 4 + y + used * matrix + 32 * 4, 6 * 4 * 64 * 2)
    )
    assert found["bf16[8,66]"] == (4 + x + 8 * 128 * 2, 8 * 66 * 2)
    assert found["bf16[3,8,128]"] == (x, 0)
    assert "bf16[8,67]" not in found
    assert found["(bf16[8,68]"] == (2 * x, 8 * 68 * 2)


# --- branches -------------------------------------------------------------------------------------


def branches(trips, rows):
    """A loop with a branch that reads an expert's matrix ``[16, 8]``, for ``rows`` rows."""
    state = f"(s32[], u8[2,16,8]{{2,1,0}}, bf16[{rows},8]{{1,0}})"
    return f"""HloModule m

%keep (t: {state}) -> pred[] {{
  %t = {state} parameter(0)
  ROOT %more = pred[] constant(true)
}}

%compute (t: {state}) -> f32[{rows},8] {{
  %t = {state} parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %w = u8[2,16,8]{{2,1,0}} get-tuple-element(%t), index=1
  ROOT %s = u8[1,16,8]{{2,1,0}} dynamic-slice(%w, %i, %i, %i), dynamic_slice_sizes={{1,16,8}}
}}

%nothing (t: {state}) -> f32[{rows},8] {{
  %t = {state} parameter(0)
  ROOT %zero = f32[] constant(0)
}}

%body (t: {state}) -> {state} {{
  %t = {state} parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %y = (f32[{rows},8]{{1,0}}) conditional(%i, %t, %t), branch_computations={{%nothing, %compute}}
  ROOT %next = {state} bitcast(%t)
}}

ENTRY %main (w: u8[2,16,8], x: bf16[{rows},8], i: s32[]) -> {state} {{
  %w = u8[2,16,8]{{2,1,0}} parameter(0), metadata={{op_name="model.layers.0.experts.*.up_proj.weight"}}
  %x = bf16[{rows},8]{{1,0}} parameter(1)
  %i = s32[] parameter(2)
  %t = {state} tuple(%i, %w, %x)
  ROOT %l = {state} while(%t), condition=%keep, body=%body, backend_config={{"known_trip_count":{{"n":"{trips}"}}}}
}}
"""


@pytest.mark.parametrize(
    ("trips", "rows", "tokens", "runs"),
    [
        # A branch for each of the 4 choices: half of the experts are on this device.
        (4, 1, 2, 2.0),
        # One for each of the 4 experts of the model: one that neither of the tokens chooses is not computed.
        (4, 2, 2, 4 * (1 - 0.5**2)),
        # One for each of the 2 experts of the device.
        (2, 8, 3, 2 * (1 - 0.5**3)),
        # One for each of 5 blocks of 2 rows: of an expert's 4 tokens, 0, 1 to 2, or 3 to 4 choose it.
        (5, 2, 4, 2 * (1 / 16 * 0 + (4 + 6) / 16 * 1 + (4 + 1) / 16 * 2)),
    ],
)
def test_a_branch_for_an_expert_counts_as_often_as_it_is_expected_to_run(trips, rows, tokens, runs):
    mixture = Mixture(experts=4, local=2, chosen=2, tokens=tokens, width=8)
    matrix = 16 * 8
    reads, writes = totals(branches(trips, rows), mixture=mixture)
    assert (reads, writes) == pytest.approx((runs * matrix, runs * matrix))


def test_branches_that_are_written_out_count_as_those_of_a_loop():
    one = (
        "  %y = (f32[1,8]{1,0}) conditional(%i, %t, %t), branch_computations={%nothing, %compute}\n"
    )
    text = branches(3, 1)
    assert one in text
    text = text.replace(one, "".join(one.replace("%y", f"%y{i}") for i in range(4)))
    mixture = Mixture(experts=4, local=2, chosen=2, tokens=2, width=8)
    # In each of three layers, half of the four choices are experts of this device.
    assert totals(text, mixture=mixture) == (3 * 2 * 128, 3 * 2 * 128)


def test_blocks_of_a_part_of_the_tokens_are_used_by_that_part():
    part, whole = (Mixture(16, 2, 2, tokens, 8) for tokens in (64, 6400))
    rows = 8
    blocks = (64 * 2 + 2 * (rows - 1)) // rows  # for 64 tokens in the worst case
    assert whole.share_of_blocks(blocks, rows) == pytest.approx(part.share_of_blocks(blocks, rows))
    assert part.share_of_blocks(blocks, rows) < 0.2


LOOP = """HloModule m

%keep (t: (s32[6], bf16[6,4,32], u8[2,64,16])) -> pred[] {
  %t = (s32[6]{0}, bf16[6,4,32]{2,1,0}, u8[2,64,16]{2,1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

%body (t: (s32[6], bf16[6,4,32], u8[2,64,16])) -> (s32[6], bf16[6,4,32], u8[2,64,16]) {
  %t = (s32[6]{0}, bf16[6,4,32]{2,1,0}, u8[2,64,16]{2,1,0}) parameter(0)
  %i = s32[6]{0} get-tuple-element(%t), index=0
  %x = bf16[6,4,32]{2,1,0} get-tuple-element(%t), index=1
  %w = u8[2,64,16]{2,1,0} get-tuple-element(%t), index=2
  %y = bf16[6,4,64]{2,1,0} custom-call(%i, %x, %w), custom_call_target="tpu_custom_call"
  ROOT %next = (s32[6]{0}, bf16[6,4,32]{2,1,0}, u8[2,64,16]{2,1,0}) tuple(%i, %x, %w)
}

ENTRY %main (i: s32[6], x: bf16[6,4,32], w: u8[2,64,16]) -> (s32[6], bf16[6,4,32], u8[2,64,16]) {
  %i = s32[6]{0} parameter(0)
  %x = bf16[6,4,32]{2,1,0} parameter(1)
  %w = u8[2,64,16]{2,1,0} parameter(2), metadata={op_name="model.layers.0.experts.*.up_proj.weight"}
  %t = (s32[6]{0}, bf16[6,4,32]{2,1,0}, u8[2,64,16]{2,1,0}) tuple(%i, %x, %w)
  ROOT %l = (s32[6]{0}, bf16[6,4,32]{2,1,0}, u8[2,64,16]{2,1,0}) while(%t), condition=%keep, body=%body
}
"""


def test_a_loop_until_all_rows_are_computed_runs_once_with_the_blocks_of_all_tokens():
    # 6 blocks of 4 rows are more than 64 tokens of which each has 2 of 16 experts need for 2 experts.
    mixture = Mixture(experts=16, local=2, chosen=2, tokens=64, width=32)
    chances = [math.comb(64, n) * 0.125**n * 0.875 ** (64 - n) for n in range(65)]
    used = 2 * sum(chance * -(-n // 4) for n, chance in enumerate(chances))
    assert used < 6
    found = by_name(LOOP, mixture=mixture)["bf16[6,4,64]"]
    assert found == pytest.approx((6 * 4 + 6 * 4 * 32 * 2 + used * 64 * 16, 6 * 4 * 64 * 2))


@pytest.mark.parametrize("order", ["%nothing, %compute", "%compute, %nothing"])
def test_of_other_branches_the_one_that_moves_most_counts(order):
    text = branches(3, 2).replace("%nothing, %compute", order).replace("experts.*", "mlp")
    assert totals(text, mixture=Mixture(4, 2, 2, 2, 8)) == (3 * 128, 3 * 128)
    assert totals(text) == (3 * 128, 3 * 128)


# --- what is needed -------------------------------------------------------------------------------


def test_needed_are_weights_and_cache_without_what_no_token_chooses():
    held = [
        Held("model.lm_head.weight", 100), Held("model.embed_tokens.weight", 1000, rows=24),
        Held("model.layers.*.mlp.experts.*.up_proj.weight", 800), Held("state.cache.keys", 50),
    ]  # fmt: skip
    mixture = Mixture(experts=8, local=2, chosen=2, tokens=3, width=4)
    assert traffic.needed(held, mixture) == pytest.approx(100 + 24 + 800 * (1 - 0.75**3) + 50)
    assert traffic.needed(held, None) == 100 + 24 + 800 + 50


@pytest.mark.parametrize(("tokens", "chance", "rows"), [(5, 0.3, 2), (64, 0.125, 16), (7, 1.0, 3)])
def test_expected_blocks_are_those_of_random_tokens(tokens, chance, rows):
    counts = np.random.default_rng(0).binomial(tokens, chance, 200_000)
    assert traffic.expected_blocks(tokens, chance, rows) == pytest.approx(
        np.mean(-(-counts // rows)), abs=0.01
    )


# --- a program that is compiled here --------------------------------------------------------------


def test_a_compiled_program():
    weights, x = jnp.ones((4, 256, 256)), jnp.ones(256)
    run = jax.jit(lambda w, x: jax.lax.scan(lambda h, one: (jnp.tanh(one @ h), None), x, w)[0])
    text = run.lower(weights, x).compile().as_text()
    reads, writes = totals(text)
    matrices, vectors = 4 * 256 * 256 * 4, 4 * 256 * 4
    # Each matrix is multiplied by a vector, and before that copied out of the stack or not.
    copies = round(writes / matrices)
    assert copies in (0, 1)
    assert writes == pytest.approx(copies * matrices, abs=4 * vectors)
    assert reads == pytest.approx((1 + copies) * matrices, abs=4 * vectors)
