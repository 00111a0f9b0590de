"""A GGUF file alone is a model: configuration, tokenizer, pooling and names come from its metadata."""

import re

import gguf
import jax
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

import maxjax
from maxjax import embed, load
from maxjax.errors import UnsupportedModelError
from maxjax.graph.quantization import QuantizationEncoding
from tests.models.gguf_files import CASES, checkpoint
from tests.models.gguf_files import model as random_model
from tests.models.gguf_files import write as write_random
from tests.models.test_gguf_tokenizer import stored, vocabulary

TEXTS = ["A cat sits on the mat.", "Where is the nearest station?", "ein Satz mit Ümläuten", "x"]


def write(path, directory, kind="F32"):
    """MiniLM as llama.cpp's converter writes it; matrices of `kind` where their rows are blocks."""
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_block_count(6)
    writer.add_context_length(512)
    writer.add_embedding_length(384)
    writer.add_feed_forward_length(1536)
    writer.add_head_count(12)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    tokens, types = stored(vocabulary(tokenizer), {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"})
    writer.add_tokenizer_model("bert")
    writer.add_chat_template("{{ messages }}")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_type_count(2)
    gguf.SpecialVocab(directory, n_vocab=len(tokens)).add_to_gguf(writer, quiet=True)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, 6)
    for name, values in tensors.items():
        if re.search(r"pooler|position_ids", name):
            continue
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        quantised = gguf.GGMLQuantizationType[kind]
        if values.ndim == 2 and kind != "F32" and "embd" not in str(new).replace("token_embd", ""):
            packed = gguf.quants.quantize(values.astype(np.float32), quantised)
            writer.add_tensor(new, packed, raw_dtype=quantised)
        else:
            writer.add_tensor(new, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def original(minilm):
    model, tokenizer = load(minilm)
    return model, tokenizer, embed(model, tokenizer, TEXTS)


@pytest.mark.parametrize(
    ("kind", "least"), [("F32", 0.9999999), ("F16", 0.99999), ("Q8_0", 0.999), ("Q4_0", 0.9)]
)
def test_minilm(minilm, original, tmp_path, kind, least):
    path = write(tmp_path / "m.gguf", minilm, kind)
    model, tokenizer = load(path)
    theirs, words, want = original
    assert tokenizer is not None and tokenizer.max_length == 512
    assert tokenizer.chat_template == "{{ messages }}" and words.chat_template is None
    assert [tokenizer.encode(t) for t in TEXTS] == [words.encode(t) for t in TEXTS]
    got = embed(model, tokenizer, TEXTS)
    cosines = (got * want).sum(-1)
    assert cosines.min() >= least
    # One with too little precision would show too: no kind equals the next better.
    assert (cosines.max() < 1 - 1e-7) == (kind != "F32")
    weights = model.raw_state_dict()
    packed = {n for n, w in weights.items() if w.quantization_encoding is not None}
    expected = {n for n, w in weights.items() if len(w.shape) == 2 and "position" not in n}
    assert packed == (expected if kind.startswith("Q") else set())
    assert {w.quantization_encoding for n, w in weights.items() if n in packed} <= {
        QuantizationEncoding(kind) if packed else None
    }


def test_in_another_dtype_blocks_are_decoded(minilm, original, tmp_path):
    path = write(tmp_path / "m.gguf", minilm, "Q8_0")
    packed, tokenizer = load(path)
    wide, _ = load(path, dtype="float32")
    assert {w.dtype for w in wide.raw_state_dict().values()} == {maxjax.DType.float32}
    np.testing.assert_allclose(
        embed(packed, tokenizer, TEXTS), embed(wide, tokenizer, TEXTS), atol=1e-5
    )
    narrow, _ = load(path, dtype="bfloat16")
    matrices = [w for w in narrow.raw_state_dict().values() if len(w.shape) == 2]
    assert {w.dtype for w in matrices} == {maxjax.DType.bfloat16}


@pytest.mark.parametrize("axes", [{"model": 2}, {"data": 2, "model": 4}])
@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_on_a_mesh(minilm, tmp_path, kind, axes):
    path = write(tmp_path / "m.gguf", minilm, kind)
    one, tokenizer = load(path)
    many, _ = load(path, mesh=maxjax.make_mesh(**axes))
    for name, array in one.state_dict().items():
        np.testing.assert_array_equal(jax.device_get(many.state_dict()[name]), array)
    np.testing.assert_allclose(
        embed(many, tokenizer, TEXTS), embed(one, tokenizer, TEXTS),
        atol=1e-3 if kind == "F16" else 1e-5,
    )  # fmt: skip


def test_a_directory_with_one_gguf_file(minilm, original, tmp_path):
    write(tmp_path / "m.gguf", minilm)
    (tmp_path / "README.md").write_text("hello")
    model, tokenizer = load(tmp_path)
    np.testing.assert_allclose(embed(model, tokenizer, TEXTS), original[2], atol=1e-5)


def test_plan_of_a_gguf_file(minilm, tmp_path):
    packed = maxjax.plan(write(tmp_path / "q.gguf", minilm, "Q8_0"))
    wide = maxjax.plan(write(tmp_path / "f.gguf", minilm))
    assert wide.total_bytes > 3.5 * packed.total_bytes
    decoded = maxjax.plan(tmp_path / "q.gguf", dtype="float32")
    assert decoded.total_bytes == wide.total_bytes


@pytest.mark.parametrize("case", [case for case in CASES if case != "bert"])
def test_plans_of_decoders(case, tmp_path):
    """By the names of Hugging Face, also where the model is not there yet."""
    made = random_model(case)
    tensors = checkpoint(made, tmp_path / "hf")
    path = write_random(tmp_path / "m.gguf", case, made, tensors)
    found = maxjax.plan(path, maxjax.make_mesh(model=2))
    # Most of it is split: names are understood.
    assert found.bytes_per_device < 0.75 * found.total_bytes
    try:
        model, _ = load(path)
    except UnsupportedModelError as error:
        assert not case.startswith(("llama", "mistral", "qwen2", "qwen3")) or "moe" in case, error
        assert "supported" in str(error)
    else:
        assert set(model.state_dict()) <= set(tensors)
