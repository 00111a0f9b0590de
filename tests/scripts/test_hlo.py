"""Reading optimised programs: small ones of two accelerators, whose copies and collectives are known.

The programs in `programs/` were compiled for two devices of v5e:2x4 and of h200:2 by jax 0.10.2, and are
kept without the notes that are not read. `layers` is a scan over four pairs of weights
`[2048, 1024]` and `[1024, 2048]` in bfloat16, split over the devices; `steps` writes one row of a
donated cache `[2, 2048, 1024]`, split along its last axis, in each turn of a loop that ends when the
cache says so, and then returns the cache and its transpose.
"""

from pathlib import Path

import pytest

from scripts import hlo

PROGRAMS = Path(__file__).parent / "programs"
MIB = 1 << 20
KINDS = ("v5e", "h200")


def read(name):
    return hlo.parse((PROGRAMS / f"{name}.hlo").read_text())


def is_data(name):
    return name.startswith(("model", "state"))


def copies(name, least=MIB):
    return [(one.what, one.dtype, one.bytes, one.times, one.loops)
            for one in hlo.copies(read(name), is_data, least)]  # fmt: skip


def test_a_gpu_copies_each_weight_out_of_its_stack():
    half = 1024 * 1024 * 2
    assert copies("h200_layers") == [
        (r"model[\'up\']", "bf16", half, 4, 0), (r"model[\'down\']", "bf16", half, 4, 0),
    ]  # fmt: skip


def test_a_tpu_reads_it_where_it_is():
    assert copies("v5e_layers") == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_written_in_place_and_a_transpose_is_a_copy(kind):
    assert copies(f"{kind}_steps") == [(r"state[\'cache\']", "bf16", 2 * 2048 * 512 * 2, 1, 0)]
    assert copies(f"{kind}_steps", 5 * MIB) == []


def test_arguments_that_are_not_there_are_no_absence_of_copies():
    with pytest.raises(
        ValueError, match="no argument of the program is a weight or a cache: it has"
    ):
        hlo.copies(read("h200_layers"), lambda name: name.startswith("weights"))


@pytest.mark.parametrize("kind", KINDS)
def test_collectives_count_as_often_as_they_run(kind):
    (one,) = hlo.collectives(read(f"{kind}_layers"))
    assert one[:5] == ("all-reduce", "bf16", 8 * 1024 * 2, 4, 0)
    (one,) = hlo.collectives(read(f"{kind}_steps"))
    assert one[:5] == (
        "all-reduce",
        "f32",
        4,
        1,
        1,
    )  # once in each turn of a loop without a known end


def test_kernels():
    names = {"__triton_nested_gemm_fusion": 2, "dynamic_slice_fusion": 2}
    assert hlo.kernels(read("h200_layers")) == names
    assert hlo.kernels(read("v5e_layers")) == {}


# What the programs above have not: made by hand, as the compilers write it.
SMALL = """HloModule small

%tail (p: bf16[1024,1024]) -> bf16[1024,1024] {
  %p = bf16[1024,1024]{1,0} parameter(0)
  ROOT %copy.1 = bf16[1024,1024]{0,1} copy(%p)
}

%head (q: bf16[1024,1024]) -> bf16[1024,1024] {
  ROOT %q = bf16[1024,1024]{1,0} parameter(0)
}

ENTRY %main (w: bf16[1024,1024], x: bf16[8,1024], n: s32[]) -> bf16[8,1024] {
  %w = bf16[1024,1024]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="model.w"}
  %x = bf16[8,1024]{1,0} parameter(1), metadata={op_name="x"}
  %n = s32[] parameter(2), metadata={op_name="n"}
  %early = (bf16[1024,1024]{1,0:T(8,128)S(1)}, bf16[1024,1024]{1,0}, u32[]) copy-start(%w)
  %near = bf16[1024,1024]{1,0:T(8,128)S(1)} copy-done(%early)
  %chosen = bf16[1024,1024]{1,0} conditional(%n, %w, %w), branch_computations={%tail, %head}
  %wide = f32[1024,1024]{1,0} convert(%chosen)
  %small = bf16[8,1024]{1,0} slice(%w), slice={[0:8], [0:1024]}
  %gathered = bf16[2,1024]{1,0} gather(%w, %n), slice_sizes={1,1024}
  %kernel = bf16[8,1024]{1,0} custom-call(%x, %w), custom_call_target="triton", backend_config={name = "mha"}
  %noted = bf16[8,1024]{1,0} custom-call(%kernel), custom_call_target="Sharding"
  %sent = (bf16[8,1024]{1,0}, bf16[64,1024]{1,0}) all-gather-start(%noted), dimensions={0}
  %there = bf16[64,1024]{1,0} all-gather-done(%sent)
  ROOT %out = bf16[8,1024]{1,0} slice(%there), slice={[0:8], [0:1024]}
}
"""


# A page of a cache of int8 is read and written, in other tiles.
TILES = """HloModule tiles

%again (i: s8[64,1024,128]) -> s8[64,1024,128] {
  %i = s8[64,1024,128]{2,1,0:T(32,128)(4,1)} parameter(0)
  ROOT %copy.1 = s8[64,1024,128]{2,1,0:T(8,128)(4,1)} copy(%i)
}

%page (p: s8[64,1024,128], q: s8[1,1024,128], m: s32[]) -> s8[64,1024,128] {
  %p = s8[64,1024,128]{2,1,0:T(32,128)(4,1)} parameter(0)
  %q = s8[1,1024,128]{2,1,0:T(8,128)(4,1)} parameter(1)
  %m = s32[] parameter(2)
  %seen = s8[64,1024,128]{2,1,0:T(8,128)(4,1)} fusion(%p), kind=kLoop, ALIAS calls=%again
  ROOT %update = s8[64,1024,128]{2,1,0:T(32,128)(4,1)} dynamic-update-slice(%seen, %q, %m, %m, %m)
}

ENTRY %main (k: s8[64,1024,128], x: s8[1,1024,128], n: s32[]) -> s8[64,1024,128] {
  %k = s8[64,1024,128]{2,1,0:T(32,128)(4,1)} parameter(0), metadata={op_name="state.k"}
  %x = s8[1,1024,128]{2,1,0:T(8,128)(4,1)} parameter(1), metadata={op_name="x"}
  %n = s32[] parameter(2), metadata={op_name="n"}
  ROOT %out = s8[64,1024,128]{2,1,0:T(32,128)(4,1)} fusion(%k, %x, %n), kind=kLoop, calls=%page
}
"""


@pytest.mark.parametrize("is_in_place", [True, False])
def test_other_tiles_of_an_array_in_place_are_no_copy(is_in_place):
    alias = "output_to_operand_aliasing={{}: (0, {})}," if is_in_place else ""
    found = hlo.copies(hlo.parse(TILES.replace("ALIAS", alias)), is_data)
    assert len(found) == (0 if is_in_place else 1)


def test_fetches_into_fast_memory_are_no_copies_and_branches_are_followed():
    found = [(one.dtype, one.bytes, one.source) for one in hlo.copies(hlo.parse(SMALL), is_data)]
    # The copy of the one branch, and the wider one of either; not the fetch, slice and gather of rows.
    assert found == [("bf16", 2 * MIB, ""), ("f32", 4 * MIB, "")]


def test_an_asynchronous_collective_has_the_size_of_its_result():
    (one,) = hlo.collectives(hlo.parse(SMALL))
    assert one[:5] == ("all-gather", "bf16", 64 * 1024 * 2, 1, 0)


def test_a_custom_call_is_a_kernel_by_its_name_and_notes_are_none():
    assert hlo.kernels(hlo.parse(SMALL)) == {"triton:mha": 1}


def test_what_is_no_program():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.parse("HloModule x\n")


@pytest.mark.parametrize("found", KINDS)
def test_every_line_of_a_computation_is_read(found):
    text = (PROGRAMS / f"{found}_layers.hlo").read_text()
    program = hlo.parse(text)
    assert sum(map(len, program.computations.values())) == text.count(" = ")
    assert program.entry.startswith("main")


@pytest.mark.parametrize("copied", ["%next", "%again"])
def test_the_iterations_of_a_loop_follow_from_its_counter(copied):
    text = f"""HloModule loop

%more (t: (s32[], f32[8])) -> pred[] {{
  %t = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %n = s32[] constant(7)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}}

%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %t = (s32[], f32[8]) parameter(0)
  %j = s32[] get-tuple-element(%t), index=0
  %x = f32[8] get-tuple-element(%t), index=1
  %two = s32[] constant(2)
  %next = s32[] add(%j, %two)
  %again = s32[] copy(%next)
  ROOT %out = (s32[], f32[8]) tuple({copied}, %x)
}}

ENTRY %main (t: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %t = (s32[], f32[8]) parameter(0)
  ROOT %loop = (s32[], f32[8]) while(%t), condition=%more, body=%body
}}
"""
    program = hlo.parse(text)
    (loop,) = (one for one in program.computations["main"] if one.kind == "while")
    assert hlo.trips(program, loop) == 4
