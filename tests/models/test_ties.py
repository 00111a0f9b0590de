"""Models whose configuration ties head and table while the file names both; the values decide.

The oracle is transformers, which opens the same files; what it says is kept for what is in them.
"""

import json
import logging

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import maxjax
from maxjax import agreement
from maxjax.checkpoint import convert
from maxjax.errors import CheckpointMismatchError, UnsupportedModelError, UserInputError
from maxjax.graph.weights import GGUFWeights, WeightData, load_weights, same
from maxjax.graph.weights.cursor import CheckpointSource
from maxjax.models import build, ties
from maxjax.models.gguf import gguf_metadata, gguf_tensors
from maxjax.storage.table import TensorTable
from tests.models.decoders import EVERY, call, ids_of, like, logits_of, oracle, ours
from tests.models.decoders import same as near
from tests.oracles.models import ask_of, opened
from tests.oracles.recorded import torch
from tests.storage.pytorch import corpus

TIED = {"tie_word_embeddings": True}
KINDS = {
    "Llama": TIED, "Mistral": TIED, "Qwen2": TIED, "Qwen3": {**TIED, "head_dim": 16},
    "Mixtral": {**TIED, "num_local_experts": 4}, "Gemma": {"head_dim": 16},
    "Qwen3Moe": {**TIED, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "Gemma2": {"head_dim": 16, "sliding_window": 8}, "Gemma3": {"head_dim": 16, "sliding_window": 8},
    "GPT2": {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}  # fmt: skip
HEAD = "lm_head.weight"


def table_of(kind):
    return "transformer.wte.weight" if kind == "GPT2" else "model.embed_tokens.weight"


def checkpoint(directory, kind="Qwen3", form="safetensors", head=None, seed=0):
    """A tied model's files with a head in them: ``head(table)``, by default the same storage."""
    model = oracle(kind, directory, seed, **KINDS[kind])
    table = model.tensors[table_of(kind)]
    tensors = {**model.tensors, HEAD: table if head is None else head(table)}
    if form == "bin":
        (directory / "model.safetensors").unlink()
        (directory / "pytorch_model.bin").write_bytes(corpus.saved(tensors))
    else:
        file = directory / "model.safetensors"
        safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})
    return model.kind


def other(table):
    return np.ascontiguousarray(table[::-1]) * np.float32(1.25)


def expected_of(kind, directory, ids):
    def answer():
        with torch.no_grad():
            logits = opened(kind, directory)(torch.tensor(ids).long()).logits
        return logits.numpy()[..., ::EVERY].copy()

    return ask_of(directory, f"logits {ids.shape}", answer)


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, "maxjax")
    return caplog


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("equal", [False, True])
def test_logits_are_those_of_transformers(tmp_path, said, kind, form, equal):
    theirs, ids = checkpoint(tmp_path, kind, form, None if equal else other), ids_of(2, 12)
    expected = expected_of(theirs, tmp_path, ids)
    model, _ = maxjax.load(tmp_path)
    found = like(call(model, ids), expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)
    assert (HEAD in model.raw_state_dict()) is not equal
    assert model.config.tie_word_embeddings is equal
    assert [HEAD in record.getMessage() for record in said.records] == [True] * (not equal)


def test_the_head_alone_is_the_table(tmp_path):
    theirs, ids = checkpoint(tmp_path), ids_of(2, 12)
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    del tensors[table_of("Qwen3")]
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    near(call(ours(tmp_path), ids), expected_of(theirs, tmp_path, ids))
    convert(tmp_path, tmp_path / "x.gguf")
    near(call(ours(tmp_path / "x.gguf"), ids), expected_of(theirs, tmp_path, ids))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("equal", [True, False])
def test_on_a_mesh_and_in_a_plan(tmp_path, said, equal):
    theirs, ids = checkpoint(tmp_path, head=None if equal else other), ids_of(2, 12)
    mesh = maxjax.make_mesh(model=4)
    model, _ = maxjax.load(tmp_path, mesh=mesh)
    near(call(model, ids), expected_of(theirs, tmp_path, ids))
    said.clear()
    planned = maxjax.plan(tmp_path, mesh, dtype="bfloat16")
    assert (HEAD in [kind.name for kind in planned.kinds]) is not equal
    assert len(said.records) == (not equal)


# --- what is read ----------------------------------------------------------------------------


@pytest.fixture
def read(monkeypatch):
    """The names of what is read of tensors while a model is built."""
    found = []

    def watch(kind, method):
        before = getattr(kind, method)

        def told(self, names, *args, **options):
            names = list(names)
            found.extend(getattr(one, "name", one) for one in names)
            return before(self, names, *args, **options)

        monkeypatch.setattr(kind, method, told)

    watch(TensorTable, "read_many")
    watch(CheckpointSource, "read_parts")
    return found


def test_one_storage_and_checksums_are_enough(tmp_path, read, said):
    checkpoint(tmp_path / "bin", form="bin")
    assert build(load_weights(tmp_path / "bin")).config.tie_word_embeddings
    for name, head in (("equal", None), ("other", other)):
        checkpoint(tmp_path / name, head=head)
        convert(tmp_path / name, tmp_path / f"{name}-with-sums")
        del read[:]
        model = build(load_weights(tmp_path / f"{name}-with-sums"))
        assert model.config.tie_word_embeddings is (head is None)
        assert read == []
        build(load_weights(tmp_path / f"{name}-with-sums", verify=False))
        if head is None:
            assert sorted(read) == [HEAD, table_of("Qwen3")]


def test_no_values_where_nothing_is_to_be_decided(tmp_path, read):
    for number, settings in enumerate([{"tie_word_embeddings": False}, TIED]):
        oracle("Llama", tmp_path / str(number), **settings)
        build(load_weights(tmp_path / str(number)))
    checkpoint(tmp_path / "dtype", head=lambda table: table.astype(ml_dtypes.bfloat16))
    assert not build(load_weights(tmp_path / "dtype")).config.tie_word_embeddings
    assert read == []


def test_a_difference_ends_the_comparison():
    taken = []

    class Rows:
        def dtype_and_shape(self, name):
            return np.dtype(np.uint8), (100, 8)

        def rows(self, name):
            for number in range(100):
                taken.append(number)
                yield np.full((1, 8), number if name == "a" or number < 3 else 200, np.uint8)

    a, b, c = (WeightData.lazy(Rows(), name, maxjax.DType.uint8, (100, 8)) for name in "abc")
    assert not same.same_values(a, b) and max(taken) == 3
    assert same.same_values(b, c)


@pytest.mark.parametrize("sizes", [((3, 5), (8,)), ((8,), (3, 5)), ((8, 0), (8,)), ((3,), (5,))])
def test_pieces_need_not_be_alike(sizes, monkeypatch):
    values = np.arange(8, dtype=np.int16)
    pieces = {"a": sizes[0], "b": sizes[1]}

    def rows(data):
        start = 0
        for size in pieces[data.name]:
            yield values[start : start + size]
            start += size

    monkeypatch.setattr(same, "data_rows", rows)
    a, b = (WeightData.from_numpy(values, name) for name in "ab")
    assert same.same_values(a, b) == (sum(sizes[0]) == sum(sizes[1]))


# --- the caller's wish -------------------------------------------------------------------------


def test_tie_is_the_callers(tmp_path, said):
    theirs, ids = checkpoint(tmp_path, head=other), ids_of(2, 12)
    tied, _ = maxjax.load(tmp_path, tie=True)
    untied, _ = maxjax.load(tmp_path, tie=False)
    assert not said.records
    near(call(untied, ids), expected_of(theirs, tmp_path, ids))
    assert HEAD not in tied.raw_state_dict() and untied.hf_config["tie_word_embeddings"] is False
    config = json.loads((tmp_path / "config.json").read_text())
    assert not np.allclose(call(tied, ids), call(untied, ids), atol=0.1)
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    again, _ = maxjax.load(tmp_path, tie=True)
    np.testing.assert_array_equal(call(again, ids), call(tied, ids))
    assert again.hf_config["tie_word_embeddings"] is True
    with pytest.raises(UserInputError, match="tie must be"):
        maxjax.load(tmp_path, tie=1)


@pytest.mark.parametrize("values", ["arrays", "cursor"])
def test_another_head_into_a_tied_model_is_refused(tmp_path, values):
    checkpoint(tmp_path, head=other)
    weights = load_weights(tmp_path)
    model = build(weights, tie=True)
    given = weights
    if values == "arrays":
        given = {name: np.asarray(place.data().data) for name, place in weights.items()}
    error = CheckpointMismatchError if values == "cursor" else ValueError
    with pytest.raises(error, match=r"'lm_head.weight' differs.*tie=False.*tie=True"):
        model.load_state_dict(given)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model))
    model.load_state_dict(given, tie=True)
    assert not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model))


def test_a_state_dict_of_torch_loads_into_a_tied_model(tmp_path):
    model = oracle("Qwen3", tmp_path, **KINDS["Qwen3"])
    mine = build(load_weights(tmp_path))
    table = model.tensors[table_of("Qwen3")]
    mine.load_state_dict({**model.tensors, HEAD: table})  # as torch's state names the head as well
    near(call(mine, ids_of(2, 12)), logits_of(model, ids_of(2, 12)))


# --- conversion --------------------------------------------------------------------------------

PLACES = ["x.gguf", "x", "x.safetensors", "steps"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("equal", [True, False])
def test_a_conversion_keeps_the_head(tmp_path, said, place, equal):
    theirs, ids = checkpoint(tmp_path / "hf", head=None if equal else other), ids_of(2, 12)
    expected, target = expected_of(theirs, tmp_path / "hf", ids), tmp_path / place
    convert(tmp_path / "hf", target, to="orbax" if place == "steps" else None)
    assert len([r for r in said.records if "not tied" in r.getMessage()]) == (not equal)
    said.clear()
    options = {}
    if place == "x.safetensors":  # a file alone has no configuration
        options["config"] = json.loads((tmp_path / "hf" / "config.json").read_text())
    model, _ = maxjax.load(target, **options)
    near(call(model, ids), expected)
    assert (HEAD in model.raw_state_dict()) is not equal
    if place != "x.safetensors":
        assert not said.records and model.hf_config["tie_word_embeddings"] is equal
        maxjax.save_pretrained(model, tmp_path / "again")
        near(expected_of(theirs, tmp_path / "again", ids), expected)


def test_a_head_of_its_own_in_a_file_that_is_written_by_hand(tmp_path):
    checkpoint(tmp_path, head=other)
    config = json.loads((tmp_path / "config.json").read_text())
    found = {name: place.data() for name, place in load_weights(tmp_path).items()}
    made = gguf_tensors(config, found).tensors
    assert "output.weight" in made
    with pytest.raises(CheckpointMismatchError, match="tie_word_embeddings"):
        gguf_metadata(config, made)


@pytest.mark.parametrize("kind", ["Gemma", "Gemma2"])
def test_llama_cpp_has_no_head_of_their_own(tmp_path, kind):
    checkpoint(tmp_path, kind, head=other)
    with pytest.raises(UnsupportedModelError, match="separate head"):
        convert(tmp_path, tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


def test_a_model_that_only_converts(tmp_path, said):
    config = {"model_type": "other", "tie_word_embeddings": True}
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal((4, 3)) for name in (HEAD, table_of(""))}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    convert(tmp_path, tmp_path / "x")
    assert json.loads((tmp_path / "x" / "config.json").read_text())["tie_word_embeddings"] is False
    assert len(said.records) == 1


@pytest.mark.parametrize("packed", [None, "q8_0"])
def test_gguf_with_a_head_that_is_the_table(tmp_path, packed):
    """A GGUF file says by its tensors whether there is a head; only a configuration can tie it."""
    checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    convert(tmp_path, tmp_path / "x.gguf", quantize=packed)
    weights = load_weights(tmp_path / "x.gguf")
    assert isinstance(weights, GGUFWeights) and weights["output.weight"].exists()
    ids = ids_of(2, 12)
    untied, _ = maxjax.load(tmp_path / "x.gguf")
    tied, _ = maxjax.load(tmp_path / "x.gguf", config=config)
    assert HEAD in untied.raw_state_dict() and HEAD not in tied.raw_state_dict()
    np.testing.assert_array_equal(call(tied, ids), call(untied, ids))


# --- several processes -------------------------------------------------------------------------


class Coordinator:
    """What the processes of a cluster share, as JAX's client of it has it."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value):
        assert key not in self.values
        self.values[key] = value

    def key_value_dir_get(self, key):
        return [item for item in self.values.items() if item[0].startswith(key)]

    def blocking_key_value_get(self, key, milliseconds):
        if key not in self.values:
            raise RuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
        return self.values[key]


@pytest.fixture
def process(monkeypatch):
    shared = Coordinator()
    patience = agreement.as_first
    monkeypatch.setattr(ties, "as_first", lambda *a: patience(*a, timeout=0))

    def be(number):
        seen = agreement.Coordinator(shared, number, 2)
        monkeypatch.setattr(agreement, "coordinator", lambda: seen)
        monkeypatch.setattr(agreement, "_answers", {})

    return be


def test_the_first_process_decides(tmp_path, process, said):
    (tmp_path / "0").mkdir()
    paths = [tmp_path / "0" / "model", tmp_path / "1" / "model"]
    for path, head in zip(paths, (other, None), strict=True):
        path.mkdir(parents=True)
        checkpoint(path, head=head)
    found = []
    for number, path in enumerate(paths):
        process(number)
        found.append(build(load_weights(path)).config.tie_word_embeddings)
    assert found == [False, False]  # the second one's file says otherwise, and was not asked
    build(load_weights(paths[1]))  # nobody answers for the first process: its own answer
    assert len(said.records) == 2
