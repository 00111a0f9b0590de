"""A GGUF file alone is a model: configuration, tokenizer, pooling and names come from its metadata."""

import functools
import json
import re
import shutil

import gguf
import jax
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata

import maxjax
from maxjax import embed, load
from maxjax.checkpoint import convert
from maxjax.errors import CheckpointFormatError, CheckpointMismatchError, UnsupportedModelError
from maxjax.graph.quantization import QuantizationEncoding
from maxjax.models import BertConfig, BertModel
from maxjax.models.gguf import gguf_tokenizer_metadata
from maxjax.models.gguf.sampling import sampling_config, sampling_metadata
from maxjax.storage.hub import find_model
from tests.fill import filled
from tests.models.gguf import files as gguf_files
from tests.models.gguf.files import CASES, checkpoint
from tests.models.gguf.files import model as random_model
from tests.models.gguf.files import write as write_random
from tests.models.gguf.tokenizer import tokenizer_files
from tests.models.gguf.tokenizer.test_read import stored, vocabulary

TEXTS = ["A cat sits on the mat.", "Where is the nearest station?", "ein Satz mit Ümläuten", "x"]


WIDTH = 64


@pytest.fixture(scope="module")
def small(minilm, tmp_path_factory):
    """A directory as of MiniLM, with its tokenizer and a random model of two layers."""
    place = tmp_path_factory.mktemp("small") / "model"
    shutil.copytree(
        minilm, place, ignore=shutil.ignore_patterns("model.safetensors", "onnx", "*.bin")
    )
    config = json.loads((place / "config.json").read_text()) | {
        "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }  # fmt: skip
    (place / "config.json").write_text(json.dumps(config))
    model = filled(BertModel(BertConfig.from_dict(config)))
    tensors = {name: np.asarray(value) for name, value in model.state_dict().items()}
    safetensors.numpy.save_file(tensors, place / "model.safetensors", {"format": "pt"})
    return place


@pytest.fixture(scope="module")
def written(small, tmp_path_factory):
    """written(kind): the file with matrices of a kind, in a folder of its own."""

    @functools.cache
    def made(kind="F32"):
        return write(tmp_path_factory.mktemp(kind) / "m.gguf", small, kind)

    return made


def write(path, directory, kind="F32", head=None):
    """A MiniLM as llama.cpp's converter writes it; matrices of `kind` where their rows are blocks.

    With the tensors of a head it is a reranker.
    """
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    layers = config["num_hidden_layers"]
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_block_count(layers)
    writer.add_context_length(512)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.RANK if head else gguf.PoolingType.MEAN)
    tokens, types = stored(vocabulary(tokenizer), {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"})
    writer.add_tokenizer_model("bert")
    writer.add_chat_template("{{ messages }}")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_type_count(2)
    gguf.SpecialVocab(directory, n_vocab=len(tokens)).add_to_gguf(writer, quiet=True)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, layers)
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
    for name, values in (head or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def original(small):
    model, tokenizer = load(small)
    return model, tokenizer, embed(model, tokenizer, TEXTS)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    # Kernels of Q8_0 round the inputs of each product to 8 bits too, as llama.cpp does.
    ("kind", "least"),
    [("F32", 0.999999), ("F16", 0.99999), ("Q8_0", 0.998), ("Q4_0", 0.9)],
)
def test_minilm(written, original, kind, least):
    model, tokenizer = load(written(kind))
    theirs, words, want = original
    assert tokenizer is not None and tokenizer.max_length == 512
    assert tokenizer.chat_template == "{{ messages }}" and words.chat_template is None
    assert [tokenizer.encode(t) for t in TEXTS] == [words.encode(t) for t in TEXTS]
    got = embed(model, tokenizer, TEXTS)
    cosines = (got * want).sum(-1)
    assert cosines.min() >= least
    # One with too little precision would show too: no kind equals the next better.
    assert (np.abs(got - want).max() > 1e-5) == (kind != "F32")
    weights = model.raw_state_dict()
    packed = {n for n, w in weights.items() if w.quantization_encoding is not None}
    expected = {n for n, w in weights.items() if len(w.shape) == 2 and "position" not in n}
    assert packed == (expected if kind.startswith("Q") else set())
    assert {w.quantization_encoding for n, w in weights.items() if n in packed} <= {
        QuantizationEncoding(kind) if packed else None
    }


def test_in_another_dtype_blocks_are_decoded(written):
    path = written("Q8_0")
    packed, tokenizer = load(path, activations="float")
    wide, _ = load(path, dtype="float32")
    assert {w.dtype for w in wide.raw_state_dict().values()} == {maxjax.DType.float32}
    np.testing.assert_allclose(
        embed(packed, tokenizer, TEXTS), embed(wide, tokenizer, TEXTS), atol=1e-5
    )
    narrow, _ = load(path, dtype="bfloat16")
    matrices = [w for w in narrow.raw_state_dict().values() if len(w.shape) == 2]
    assert {w.dtype for w in matrices} == {maxjax.DType.bfloat16}


MESHES = [{"model": 2}, {"data": 2, "model": 4}]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_on_a_mesh(written, kind, axes):
    path = written(kind)
    one, tokenizer = load(path, activations="float")
    many, _ = load(path, mesh=maxjax.make_mesh(**axes), activations="float")
    for name, array in one.state_dict().items():
        np.testing.assert_array_equal(jax.device_get(many.state_dict()[name]), array)
    np.testing.assert_allclose(
        embed(many, tokenizer, TEXTS), embed(one, tokenizer, TEXTS),
        atol=1e-3 if kind == "F16" else 1e-5,
    )  # fmt: skip


def test_a_directory_with_one_gguf_file(written, original, tmp_path):
    shutil.copy(written(), tmp_path)
    (tmp_path / "README.md").write_text("hello")
    model, tokenizer = load(tmp_path)
    np.testing.assert_allclose(embed(model, tokenizer, TEXTS), original[2], atol=1e-5)


def test_plan_of_a_gguf_file(written):
    packed = maxjax.plan(written("Q8_0"))
    wide = maxjax.plan(written())
    assert wide.total_bytes > 3.5 * packed.total_bytes
    decoded = maxjax.plan(written("Q8_0"), dtype="float32")
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


# --- a way of splitting text that no table has ----------------------------------------------

SPECIALS = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


@pytest.fixture
def unknown_splits(tmp_path, monkeypatch):
    """(file, tokenizer.json) of a model whose text is split in a way that is new to llama.cpp."""
    data = tokenizer_files.byte_level("gpt2")
    metadata = gguf_tokenizer_metadata(data, SPECIALS, keep_json=False)
    parameters = gguf_files.parameters

    def with_tokenizer(writer, architecture, config):
        parameters(writer, architecture, config)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("brand-new")
        writer.add_token_list(metadata["tokenizer.ggml.tokens"])
        writer.add_token_types([int(kind) for kind in metadata["tokenizer.ggml.token_type"]])
        writer.add_token_merges(metadata["tokenizer.ggml.merges"])
        writer.add_bos_token_id(metadata["tokenizer.ggml.bos_token_id"])
        writer.add_eos_token_id(metadata["tokenizer.ggml.eos_token_id"])
        writer.add_chat_template("{{ messages }}")

    monkeypatch.setattr(gguf_files, "parameters", with_tokenizer)
    made = random_model("llama")
    (tmp_path / "gguf").mkdir()
    path = tmp_path / "gguf" / "m.gguf"
    return write_random(path, "llama", made, checkpoint(made, tmp_path / "hf")), data


def test_a_reranker(small, original, tmp_path):
    """BGE's and Jina's are BERT with the tensors `cls`, whose head is the one of XLM-RoBERTa."""
    rng = np.random.default_rng(5)
    head = {
        "cls.weight": 0.1 * rng.standard_normal((WIDTH, WIDTH)), "cls.bias": rng.standard_normal(WIDTH),
        "cls.output.weight": rng.standard_normal((1, WIDTH)), "cls.output.bias": np.array([0.3]),
    }  # fmt: skip
    head = {name: values.astype(np.float32) for name, values in head.items()}
    model, tokenizer = load(write(tmp_path / "rerank.gguf", small, head=head))
    query, documents = "Where does the cat sit?", TEXTS
    found = maxjax.rerank(model, tokenizer, query, documents, activation="linear")
    encoder = jax.jit(lambda model, *rows: model(*rows)[0])
    for score, document in zip(found, documents, strict=True):
        pair = tokenizer.pairs([(query, document)])[0]
        ids, types = np.array([pair.ids], np.int32), np.array([pair.type_ids], np.int32)
        state = np.asarray(encoder(original[0], ids, np.ones_like(ids), types), np.float64)[0, 0]
        hidden = np.tanh(head["cls.weight"] @ state + head["cls.bias"])
        want = head["cls.output.weight"] @ hidden + head["cls.output.bias"]
        np.testing.assert_allclose(score, want[0], atol=1e-4)


def test_without_a_tokenizer_beside_the_error_says_what_to_do(unknown_splits):
    path, _ = unknown_splits
    with pytest.raises(UnsupportedModelError) as caught:
        load(path)
    assert re.search(r"m\.gguf: .*brand-new.* not supported\. ", str(caught.value))
    assert "tokenizer.json" in str(caught.value) and "tokenizer=False" in str(caught.value)
    model, tokenizer = load(path, tokenizer=False)
    assert tokenizer is None and model(np.array([[3, 1, 2]], np.int32)).shape == (1, 3, 64)


def test_the_tokenizer_beside_is_taken(unknown_splits):
    path, data = unknown_splits
    (path.parent / "tokenizer.json").write_text(json.dumps(data))
    oracle = tokenizers.Tokenizer.from_str(json.dumps(data))
    for place in (path, path.parent):
        _, tokenizer = load(place)
        for text in TEXTS:
            assert tokenizer.encode(text, special=False) == oracle.encode(text).ids
        # What only the GGUF file says is still there.
        assert tokenizer.special_tokens.items() >= SPECIALS.items()
        assert tokenizer.chat_template == "{{ messages }}"
        assert tokenizer.eos_ids == (oracle.token_to_id("<|end|>"),)


def test_the_tokenizer_of_another_model_beside(unknown_splits):
    path, data = unknown_splits
    more = data["model"]["vocab"] | {f"word{i}": len(data["model"]["vocab"]) + i for i in range(9)}
    moved = {token: (i + 7) % len(more) for token, i in more.items()}
    for vocab in (more, moved):
        other = data | {"model": data["model"] | {"vocab": vocab}, "added_tokens": []}
        (path.parent / "tokenizer.json").write_text(json.dumps(other))
        with pytest.raises(CheckpointMismatchError, match=r"tokenizer\.json: is the tokenizer of"):
            load(path)
        assert load(path, tokenizer=False)[1] is None


def test_all_tokens_that_end_a_turn_end_a_text(tmp_path):
    """The file's eos is one of them: Gemma and Phi-3 end a turn with another."""
    convert(find_model("tiny", None), tmp_path / "tiny.gguf")
    model, tokenizer = maxjax.load(tmp_path / "tiny.gguf")
    text = maxjax.generate(model, tokenizer, "37 + 48 =", max_new_tokens=4)
    [eos], end = model.generation.eos_ids, text.tokens[1]
    reader = gguf.GGUFReader(tmp_path / "tiny.gguf")
    writer = gguf.GGUFWriter(tmp_path / "more.gguf", arch=model.hf_config["model_type"])
    more = {"tokenizer.ggml.eot_token_id": MetadataDetails(gguf.GGUFValueType.UINT32, end)}
    copy_with_new_metadata(reader, writer, more, [])
    model, tokenizer = maxjax.load(tmp_path / "more.gguf")
    assert model.generation.eos_ids == tuple(sorted((eos, end)))
    again = maxjax.generate(model, tokenizer, "37 + 48 =", max_new_tokens=4)
    assert again.tokens == text.tokens[:2] and again.finish_reason == "stop"
    # The configuration of Hugging Face that goes with it has one; the other goes into a file of its own.
    maxjax.save_pretrained(model, tmp_path / "hf", tokenizer=tokenizer)
    assert maxjax.load(tmp_path / "hf")[0].generation.eos_ids == model.generation.eos_ids


def test_the_sampling_of_a_generation_config_goes_into_a_file_and_back(tmp_path):
    tiny = find_model("tiny", None)
    source = tmp_path / "source"
    shutil.copytree(tiny, source)
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.1}
    (source / "generation_config.json").write_text(json.dumps(config))
    expected = maxjax.load(source)[0].generation.sampling
    assert expected == maxjax.Sampling(
        temperature=0.6, top_k=50, top_p=0.95, repetition_penalty=1.1
    )
    convert(source, tmp_path / "m.gguf")
    keys = gguf.Keys.General
    written = {
        name: field.contents()
        for name, field in gguf.GGUFReader(tmp_path / "m.gguf").fields.items()
        if name.startswith("general.sampling.")
    }
    assert {name: round(value, 6) for name, value in written.items()} == {
        keys.SAMPLING_TEMP: 0.6, keys.SAMPLING_TOP_K: 50, keys.SAMPLING_TOP_P: 0.95,
        keys.SAMPLING_MIN_P: 0, keys.SAMPLING_PENALTY_REPEAT: 1.1,
    }  # fmt: skip
    model, tokenizer = maxjax.load(tmp_path / "m.gguf")
    assert model.generation.sampling == expected
    maxjax.save_pretrained(model, tmp_path / "saved", tokenizer=tokenizer)
    convert(tmp_path / "m.gguf", tmp_path / "converted")
    for place in ("saved", "converted"):
        again = maxjax.load(tmp_path / place)[0].generation
        assert (again.sampling, again.eos_ids) == (expected, model.generation.eos_ids)


def test_a_name_that_does_not_say_that_it_is_a_gguf_file(tmp_path):
    """As Ollama names its files."""
    convert(find_model("tiny", None), tmp_path / "tiny.gguf")
    blob = (tmp_path / "tiny.gguf").rename(tmp_path / "sha256-0123")
    assert load(blob)[0].hf_config["model_type"] == "llama"
    assert maxjax.plan(blob).total_bytes > 0


def test_the_sampling_that_llama_cpp_s_converter_writes(caplog):
    found = sampling_config({
        "general.sampling.temp": float(np.float32(0.7)), "general.sampling.top_k": -1,
        "general.sampling.penalty_repeat": 1.1, "general.sampling.penalty_last_n": 0,
        "general.sampling.xtc_probability": 0.5, "general.sampling.mirostat": 2,
    })  # fmt: skip
    expected = maxjax.Sampling(temperature=0.7, xtc_probability=0.5)
    assert maxjax.Sampling.from_generation_config(found) == expected
    assert "mirostat" in caplog.text
    assert sampling_config({"general.sampling.temp": 0.0})["do_sample"] is False
    assert sampling_metadata({"temperature": 0.7}) == {}
    every = sampling_metadata({"do_sample": True, "top_k": 10**12})  # what the file cannot hold
    assert every["general.sampling.top_k"] == 2**31 - 1
    with pytest.raises(CheckpointFormatError, match=r"general\.sampling\.temp.*a number"):
        sampling_config({"general.sampling.temp": "hot"})
