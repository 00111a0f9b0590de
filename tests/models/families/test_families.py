"""Every family of ``known/`` against transformers: logits, texts, layouts of layers, meshes, files."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
import safetensors.numpy

import maxjax
from maxjax.checkpoint import convert
from maxjax.errors import UnsupportedModelError
from maxjax.models import find_family
from tests.models import decoders
from tests.models.decoders import call, greedy, ids_of, logits_of, ours, same
from tests.models.families import table
from tests.models.families.cases import every, first_of_each_family
from tests.models.gguf import llama_cpp

CASES = every()
EACH = pytest.mark.parametrize("case", first_of_each_family(CASES), scope="module")
ALL = pytest.mark.parametrize("case", [pytest.param(case, id=str(case)) for case in CASES])
FIRST = {case.family: case for case in reversed(CASES)}
# GGUF files of these have factors of RoPE, or a part of the features, in another form.
OTHER_ROPE = ("apertus", "gemma4_text")
PROMPTS = (21, 3, 9)  # tokens of each row
WRITTEN = 12  # tokens behind each
# One family of each kind of layers, among them all with a recurrence, whose long texts go another way.
KINDS = {
    "llama", "gemma4_text", "gpt_oss", "deepseek_v3", "qwen3_5_moe_text", "qwen3_next", "lfm2", "mamba",
    "kimi_linear", "jamba", "mamba2", "falcon_h1", "nemotron_h", "granitemoehybrid",
}  # fmt: skip
# Of each kind of layers, of windows, caps, sinks and biases of positions: steps of the default set.
STEPS = (
    "deepseek_v3-yarn", "gemma4_text-shared", "gpt_oss-1", "llama-1", "qwen3_next-long", "lfm2-adjusted",
    "kimi_linear-48b", "mamba-130m", "mamba2-codestral", "falcon_h1-factors", "nemotron_h-nano",
    "granitemoehybrid-tiny", "gemma2-caps", "gemma3n_text-sparse", "llama4_text-1", "falcon-40b", "phi3-mini",
    "opt-350m", "qwen2-windows",
    "bloom-heads",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(case, tmp_path_factory):
    """transformers' model, its directory, and ours, of one case: the tests of a case run one after another."""
    directory = tmp_path_factory.mktemp(str(case))
    theirs = case.model(directory)
    return theirs, directory, maxjax.load(directory)[0]


def prompts_of(model):
    return [ids_of(1, n, n)[0] % model.config.vocab_size for n in PROMPTS]


def is_in_the_table(case, model):
    """The row of docs/models.md says what is so."""
    one = next(one for one in maxjax.models.families() if one.model_type == case.family)
    rows = [row for row in table.written() if row[0] == one.family]
    assert rows, "python -m tests.models.families.table writes docs/models.md anew"
    _, architecture, gguf, has = rows[0]
    assert (architecture, gguf) == (
        f"`{one.architectures[0]}`",
        f"`{one.gguf}`" if one.gguf else "–",
    )
    assert set(table.features(model)) <= set(has.split(", ")) | {""}


@functools.partial(jax.jit, donate_argnums=2)
def piece(model, ids, cache, lengths):
    return model(ids, cache, lengths=lengths)


def in_pieces(model, ids, lengths, width, capacity=None):
    """Logits ``[B, T, V]`` of rows of their own lengths, so many tokens at a time; padding has zeros.

    Where RoPE depends on the length of a text, it is that of all T tokens.
    """
    cache = model.cache(len(ids), capacity or ids.shape[1]).for_texts([ids.shape[1]] * len(ids))
    found = np.zeros((*ids.shape, model.config.vocab_size), np.float32)
    for start in range(0, ids.shape[1], width):
        part = ids[:, start : start + width]
        part = np.pad(part, ((0, 0), (0, width - part.shape[1])))
        counts = np.clip(np.asarray(lengths) - start, 0, width).astype(np.int32)
        logits, cache = piece(model, part, cache, counts)
        for row, count in enumerate(counts):
            found[row, start : start + count] = np.asarray(logits)[row, :count]
    return found


@pytest.mark.sampled(24)
@EACH
def test_pieces(case, made):
    """Pieces of 7 tokens in a cache that they fill; on two devices where layers are divided in a way of their own.

    ``test_stacked_separate_and_placed`` has meshes of all.
    """
    theirs, directory, placed = made
    ids = ids_of(2, case.length)
    expected = logits_of(theirs, ids)
    if str(case) in STEPS:
        placed, _ = maxjax.load(directory, mesh=maxjax.make_mesh(model=2))
    short = case.length - 9
    found = decoders.like(in_pieces(placed, ids, (case.length, short), 7), expected)
    same(found[0], expected[0])
    same(found[1, :short], expected[1, :short])
    is_in_the_table(case, placed)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=[] if str(case) in STEPS else pytest.mark.extra)
        for case in CASES
    ],
    scope="module",
)
def test_steps(case, made):
    """Single tokens on one device: one program, as the texts have a cache of the same size."""
    theirs, _, mine = made
    ids = ids_of(2, case.length)
    expected = logits_of(theirs, ids)
    prompts = prompts_of(mine)
    third = np.pad(prompts[0], (0, case.length))[None, : case.length]
    rows = np.concatenate([ids, third])
    capacity = max(case.length, max(PROMPTS) + WRITTEN)
    found = decoders.like(
        in_pieces(mine, rows, (case.length, case.length, 0), 1, capacity)[:2], expected
    )
    same(found, expected)
    is_in_the_table(case, mine)
    if case.exact:
        texts = decoders.generated(theirs, prompts, WRITTEN)
        np.testing.assert_array_equal(texts_of(mine, prompts, WRITTEN, capacity), texts)


def texts_of(model, prompts, new, capacity):
    """What is written after prompts, of which every token is a step, as those behind them are."""
    rows, lengths = decoders.padded(prompts)
    cache = model.cache(len(prompts), capacity)
    end = np.zeros((len(prompts), model.config.vocab_size), np.float32)
    for start in range(rows.shape[1]):
        counts = (lengths > start).astype(np.int32)
        logits, cache = piece(model, rows[:, start, None], cache, counts)
        end = np.where(counts[:, None] > 0, np.asarray(logits)[:, 0], end)
    written = [end.argmax(-1).astype(np.int32)]
    while len(written) < new:
        logits, cache = piece(model, written[-1][:, None], cache, np.ones_like(lengths))
        written.append(np.asarray(logits)[:, 0].argmax(-1).astype(np.int32))
    return np.stack(written, 1)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "case", first_of_each_family([c for c in CASES if c.family in KINDS]), scope="module"
)
def test_without_a_cache(case, made):
    """One family of each kind of layers; all of them below."""
    theirs, _, mine = made
    ids = ids_of(2, case.length)
    same(call(mine, ids), logits_of(theirs, ids))


def alike(one, other):
    """Whether settings are the same, where a file holds numbers as float32; those of another family that both have."""
    if dataclasses.is_dataclass(one):
        names = {field.name for field in dataclasses.fields(one)}
        if type(one) is not type(other) and dataclasses.is_dataclass(other):
            names &= {field.name for field in dataclasses.fields(other)}
        return all(alike(getattr(one, name), getattr(other, name, None)) for name in names)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other


@EACH
def test_files(case, made, tmp_path):
    """What is written is what was read: safetensors, and GGUF where llama.cpp has the family.

    A model has the same tensors and the same settings when it comes back, so it computes the same.
    """
    theirs, _, model = made
    maxjax.save_pretrained(model, tmp_path / "mine")
    found = safetensors.numpy.load_file(tmp_path / "mine" / "model.safetensors")
    # Where transformers writes another name than published files have, it is the published one that is written.
    read = {name: model.family.names.model_name(name) for name in theirs.tensors}
    published = {new: name for name, new in read.items() if name not in found}
    for name, array in found.items():
        assert name in {*read, *published}, "a tensor that transformers does not write"
        expected = theirs.tensors[name if name in read else published[name]]
        np.testing.assert_array_equal(array, expected, err_msg=name)
    missing = {name for name, new in read.items() if name not in found and new not in found}
    assert all(read[name] is None or "lm_head" in name for name in missing), missing
    if not case.gguf:
        with pytest.raises((UnsupportedModelError, NotImplementedError)):
            convert(tmp_path / "mine", tmp_path / "model.gguf")
        return
    convert(tmp_path / "mine", tmp_path / "model.gguf")
    again, _ = maxjax.load(tmp_path / "model.gguf")
    if case.is_folded:
        ids = ids_of(1, 12)
        np.testing.assert_allclose(call(again, ids), call(model, ids), rtol=0, atol=1e-4)
        convert(tmp_path / "model.gguf", tmp_path / "folded")
        model, _ = maxjax.load(tmp_path / "folded")
    if case is FIRST[case.family] and case.family not in OTHER_ROPE:
        assert alike(again.config, model.config)
    before, after = (one.state_dict() for one in (model, again))
    assert set(before) == set(after)
    for name, array in before.items():
        np.testing.assert_allclose(after[name], array, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.extra
@pytest.mark.oracle
@ALL
def test_stacked_separate_and_placed(case, tmp_path):
    """The cases of a family have the meshes in turn."""
    theirs = case.model(tmp_path)
    ids = ids_of(2, case.length)
    expected = logits_of(theirs, ids)
    same(call(ours(tmp_path, stacked=False), ids), expected)
    axes = ({"model": 4}, {"data": 2, "model": 2, "fsdp": 2})[CASES.index(case) % 2]
    mine, _ = maxjax.load(tmp_path, mesh=maxjax.make_mesh(**axes))
    same(call(mine, ids), expected)
    prompts = prompts_of(mine)[:2]
    texts = decoders.generated(theirs, prompts, 40)
    if case.exact:
        np.testing.assert_array_equal(greedy(mine, prompts, 40), texts)


@pytest.mark.extra
@pytest.mark.oracle
@ALL
def test_transformers_opens_what_was_saved(case, tmp_path):
    theirs = case.model(tmp_path / "theirs")
    model, _ = maxjax.load(tmp_path / "theirs")
    maxjax.save_pretrained(model, tmp_path / "mine")
    from tests.oracles.models import opened

    again = opened(case.kind, tmp_path / "mine").state_dict()
    for name, value in theirs.live().state_dict().items():
        np.testing.assert_array_equal(again[name].numpy(), value.numpy(), err_msg=name)


@pytest.mark.extra
@pytest.mark.oracle
@pytest.mark.skipif(not llama_cpp.available(), reason="there is no llama.cpp")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=str(case)) for case in CASES if case.gguf and case.like_llama_cpp],
)
def test_llama_cpp(case, tmp_path):
    theirs = case.model(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "model.gguf")
    ids = ids_of(1, 12)
    expected = np.asarray(theirs.logits(ids))[0, -1]
    text, found = texts_beside(tmp_path / "model.gguf", ids)
    np.testing.assert_allclose(found[0, : expected.size], expected, rtol=0, atol=2e-3)
    # What llama.cpp would write, or in a tie what it finds as likely.
    behind = found.max(1) - found[np.arange(len(text)), text]
    assert behind.max() <= 4e-3
    if not case.exact:
        return
    convert(tmp_path / "theirs", tmp_path / "packed.gguf", quantize="q8_0")
    text, found = texts_beside(tmp_path / "packed.gguf", ids)
    behind = found.max(1) - found[np.arange(len(text)), text]
    # Its int8 activations are not ours to the last bit: ties of tokens, and of experts, fall otherwise.
    assert (behind > 0).sum() <= 8


def texts_beside(path, ids):
    """40 tokens that we write after others, and llama.cpp's logits before each of them."""
    model, _ = maxjax.load(path)
    text = greedy(model, ids, 40)[0]
    return text, np.array(llama_cpp.following(path, ids[0].tolist(), text.tolist()))


def test_each_family_has_three_cases():
    names = [case.family for case in CASES]
    few = {name for name in names if names.count(name) < 3}
    assert not few, few


@pytest.mark.oracle
@pytest.mark.parametrize("case", {case.family: case for case in CASES}.values(), ids=str)
def test_what_a_file_does_not_name(case):
    """The base of the frequencies and the window are those of transformers' configuration."""
    transformers = pytest.importorskip("transformers")
    theirs = getattr(transformers, case.config)().get_text_config()
    ropes = getattr(theirs, "rope_parameters", None) or {}
    settings = case.settings if case.is_whole else {**decoders.SMALL, **case.settings}
    named = {
        "rope_theta", "rope_parameters", "rope_scaling", "sliding_window", "attention_chunk_size",
        "local_attention", "global_rope_theta", "local_rope_theta",
    }  # fmt: skip
    raw = {name: value for name, value in settings.items() if name not in named}
    raw |= {"model_type": case.family, "architectures": [case.kind]}
    config = find_family(raw).config.from_dict(raw)
    if full := ropes.get("full_attention", ropes):
        rope = getattr(config, "rope_parameters", None) or config.rope
        assert rope.theta == full["rope_theta"]
    if sliding := ropes.get("sliding_attention"):
        local = getattr(config, "local_rope_parameters", None) or config.local_rope
        assert local.theta == sliding["rope_theta"]
    if any(config.window(i) is not None for i in range(config.num_hidden_layers)):
        chunk = getattr(theirs, "attention_chunk_size", None)  # Llama 4
        assert config.sliding_window == (chunk or theirs.sliding_window)
