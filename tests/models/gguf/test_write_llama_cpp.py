"""Files of ours in llama.cpp itself: logits, hidden states and tokens.

Skipped where LLAMA_CPP_PYTHON names no Python that has llama-cpp-python.
"""

import json

import numpy as np
import pytest

from maxjax.models.gguf import gguf_tokenizer_metadata
from maxjax.storage.gguf.writer import plan_gguf
from tests.models.gguf import files, llama_cpp
from tests.models.gguf.test_write import weights, written
from tests.models.gguf.tokenizer import tokenizer_files as words
from tests.oracles.recorded import torch, transformers

tokenizers = pytest.importorskip("tokenizers")

pytestmark = pytest.mark.skipif(not llama_cpp.available(), reason="there is no llama.cpp")

# llama.cpp rounds the arguments of GELU to float16.
GELU = ("gemma", "gpt2", "bert")
DECODERS = [name for name in files.CASES if name != "bert"]


@pytest.mark.parametrize("case", DECODERS)
def test_logits_are_those_of_transformers(case, tmp_path):
    model = files.model(case)
    arrays = files.checkpoint(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tokens = gguf_tokenizer_metadata(None, None, config)
    path = written(tmp_path / "m.gguf", config, weights(arrays), more=tokens)
    # llama.cpp has no window for Mistral: as many tokens as the window is wide.
    ids = np.random.default_rng(0).integers(3, 64, 5 if case == "mistral" else 12)
    expected = model.logits(ids[None])[0, -1]
    found = np.array(llama_cpp.logits(path, ids.tolist()))
    atol = 5e-3 if case.startswith(GELU) else 2e-5
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)
    assert np.abs(expected).max() > 1


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_logits_of_narrow_types(kind, tmp_path):
    from maxjax.dtype import DType

    model = files.model("qwen3")
    type_ = DType.of(kind).np
    model.tensors = {n: a.astype(type_).astype(np.float32) for n, a in model.tensors.items()}
    arrays = files.checkpoint(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    narrow = {name: array.astype(type_) for name, array in arrays.items()}
    tokens = gguf_tokenizer_metadata(None, None, config)
    path = written(tmp_path / "m.gguf", config, weights(narrow), more=tokens)
    ids = np.random.default_rng(0).integers(3, 64, 12)

    def answer(model):
        with torch.no_grad():
            return model(torch.tensor(ids[None])).logits[0, -1].numpy().copy()

    expected = model.ask(f"logits of {kind}", answer)
    found = np.array(llama_cpp.logits(path, ids.tolist()))
    # llama.cpp rounds what it multiplies by such weights to their type.
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.15 if kind == "bfloat16" else 0.02)


@pytest.mark.oracle
def test_sentences_are_those_of_minilm(minilm, tmp_path):
    """A real encoder with its tokenizer: the vectors that llama.cpp makes of texts."""
    from maxjax.graph.weights import load_weights

    data = {name: json.loads((minilm / f"{name}.json").read_text())
            for name in ("config", "tokenizer", "tokenizer_config")}  # fmt: skip
    config = data["config"]
    tokens = gguf_tokenizer_metadata(
        data["tokenizer"], data["tokenizer_config"], config, vocab_size=config["vocab_size"]
    )
    tensors = dict(load_weights(minilm / "model.safetensors")._named_data())
    path = written(tmp_path / "m.gguf", config, tensors, pooling="mean", more=tokens)
    texts = ["a photo of a cat", "The quick brown fox, 12 times!", "Ünïcödé is hard"]
    model = transformers.BertModel.from_pretrained(minilm).eval()
    oracle = tokenizers.Tokenizer.from_file(str(minilm / "tokenizer.json"))
    oracle.no_padding()
    assert llama_cpp.tokens(path, texts, special=True) == [oracle.encode(t).ids for t in texts]
    for text, found in zip(texts, llama_cpp.hidden(path, texts, pooling=1), strict=True):
        with torch.no_grad():
            ids = torch.tensor([oracle.encode(text).ids])
            expected = model(ids).last_hidden_state[0].mean(0).numpy()
        cosine = np.dot(found, expected) / np.linalg.norm(found) / np.linalg.norm(expected)
        assert cosine > 0.99999


def same(path, data, settings, special, texts=words.TEXTS):
    metadata = gguf_tokenizer_metadata(data, settings)
    path.write_bytes(
        b"".join(plan_gguf({"general.architecture": "llama", **metadata}, []).pieces())
    )
    oracle = tokenizers.Tokenizer.from_str(json.dumps(data))
    found = llama_cpp.tokens(path, texts, special)
    for text, ids in zip(texts, found, strict=True):
        assert ids == oracle.encode(text, add_special_tokens=special).ids, text


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", words.BYTE_LEVEL)
def test_tokens_of_gpt2s_kind(name, special, tmp_path):
    settings = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    same(tmp_path / "m.gguf", words.byte_level(name), settings, special)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("metaspace", [True, False])
def test_tokens_of_llamas_kind(metaspace, prefix, special, tmp_path):
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    texts = words.TEXTS
    if metaspace and prefix:  # Metaspace puts no space before one, llama.cpp does
        texts = [text for text in texts if not text.startswith(" ")]
    same(tmp_path / "m.gguf", words.sentencepiece(prefix, metaspace), settings, special, texts)
