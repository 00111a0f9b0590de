"""Small embedding models and rerankers as sentence-transformers keeps them, with weights of NumPy's.

``tests/oracles/make_sentence_golden.py`` lets sentence-transformers run them and keeps its answers; the tests
make the same directories again and run them here.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from maxjax.dtype import DType
from maxjax.models import find_family

TEXTS = [
    "The cat sat on the mat.",
    "",
    "A dog, naïve and ﬁne: the cat's friend!",
    "the " * 20 + "end",
    "猫 and 🐱",
    "Is it?",
]
QUERY = "where sat the cat?"
PROMPTS = {"query": "find: ", "document": "text: "}
_LETTERS = list("abcdefghijklmnopqrstuvwxyzABCDT.,:?!' ")
_WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "mat",
    "dog",
    "and",
    "fine",
    "find",
    "text",
    "where",
    "is",
    "it",
]
SMALL = {
    "vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 40, "max_position_embeddings": 80,
}  # fmt: skip
_NOMIC = {
    "vocab_size": 320, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 40, "n_positions": 80,
    "activation_function": "swiglu",
}  # fmt: skip
_DISTIL = {
    "vocab_size": 320, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 40,
    "max_position_embeddings": 80,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 1e4}


@dataclass(frozen=True)
class Kind:
    """A model: its configuration, its tokenizer and its modules.

    Attributes:
        model_type, architecture: as in ``config.json``.
        settings: the other settings of it.
        tokenizer: "wordpiece", "unigram" or "bytes".
        modes: poolings, or none for a reranker.
        dense: activation functions of Dense modules.
        more: what else the files say: "normalize", "prompts", "without prompt".
    """

    model_type: str
    architecture: str
    settings: dict[str, Any] = field(default_factory=dict)
    tokenizer: str = "wordpiece"
    modes: tuple[str, ...] = ("mean",)
    dense: tuple[str, ...] = ()
    more: tuple[str, ...] = ()


_GEMMA = {
    "head_dim": 8, "num_key_value_heads": 1, "sliding_window": 10, "use_bidirectional_attention": True,
    "query_pre_attn_scalar": 8, "sliding_window_pattern": 2,
    "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
}  # fmt: skip
_ONE = {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
EMBEDDERS = {
    "bert": Kind("bert", "BertModel", modes=("cls",), more=("normalize", "prompts")),
    "roberta": Kind("roberta", "RobertaModel", {"type_vocab_size": 1}, "bytes", ("max", "mean")),
    "xlm-roberta": Kind("xlm-roberta", "XLMRobertaModel", {"type_vocab_size": 1}, "unigram",
                        ("cls",), more=("normalize",)),
    "mpnet": Kind("mpnet", "MPNetModel", more=("normalize",)),
    "distilbert": Kind("distilbert", "DistilBertModel", _DISTIL, dense=("Tanh",)),
    "modernbert": Kind("modernbert", "ModernBertModel",
                       {"local_attention": 12, "pad_token_id": 1}, "bytes", more=("prompts",)),
    "nomic_bert": Kind("nomic_bert", "NomicBertModel", {"hidden_act": "silu"}, modes=("weightedmean",),
                       more=("normalize", "without prompt")),
    "gte": Kind("gte", "GteModel", {"type_vocab_size": 1}, "unigram", ("cls",), more=("normalize",)),
    "jina": Kind("jina_embeddings_v3", "JinaEmbeddingsV3Model", {}, "unigram", ("mean_sqrt_len_tokens",)),
    "qwen3": Kind("qwen3", "Qwen3ForCausalLM",
                  {"tie_word_embeddings": True, "num_key_value_heads": 2, "head_dim": 16}, "bytes",
                  ("lasttoken",), more=("normalize", "prompts")),
    "e5-mistral": Kind("mistral", "MistralForCausalLM",
                       {"num_key_value_heads": 2, "tie_word_embeddings": True, "sliding_window": None},
                       "unigram", ("lasttoken",), more=("normalize",)),
    "embeddinggemma": Kind("gemma3_text", "Gemma3TextModel", _GEMMA, "unigram", dense=("Identity",) * 2,
                           more=("normalize", "prompts")),
}  # fmt: skip
RERANKERS = {
    "bert": Kind("bert", "BertForSequenceClassification", _ONE),
    "xlm-roberta": Kind("xlm-roberta", "XLMRobertaForSequenceClassification",
                        {**_ONE, "type_vocab_size": 1}, "unigram"),
    "mpnet": Kind("mpnet", "MPNetForSequenceClassification", _ONE),
    "distilbert": Kind("distilbert", "DistilBertForSequenceClassification", {**_DISTIL, **_ONE}),
    "modernbert": Kind("modernbert", "ModernBertForSequenceClassification",
                       {**_ONE, "local_attention": 12, "pad_token_id": 1, "classifier_pooling": "mean"},
                       "bytes"),
    "gte": Kind("gte", "GteForSequenceClassification", {**_ONE, "type_vocab_size": 1}, "unigram"),
    "linear": Kind("roberta", "RobertaForSequenceClassification",
                   {**_ONE, "type_vocab_size": 1,
                    "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
                   "bytes"),
}  # fmt: skip


def write(kind: Kind, directory: Path) -> Path:
    """Writes the model's directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        **({} if kind.settings.keys() & {"dim", "n_embd"} else SMALL), **kind.settings,
        "model_type": kind.model_type, "architectures": [kind.architecture], "dtype": "float32",
    }  # fmt: skip
    write_weights(config, directory)
    names = write_tokenizer(kind.tokenizer, directory)
    config = {"pad_token_id": names["pad"], "bos_token_id": names["bos"], "eos_token_id": names["eos"],
              **config}  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    if "For" not in kind.architecture or "CausalLM" in kind.architecture:
        write_modules(kind, directory)
    return directory


def write_weights(config: dict[str, Any], directory: Path) -> None:
    family = find_family(config)
    has_head = "SequenceClassification" in config["architectures"][0]
    names = ["classifier.weight"] if has_head else []
    names += ["pooler.dense.weight"] if has_head and config["model_type"] in ("bert", "gte") else []
    settings = family.config.from_dict(config)
    model = family.make(settings, names, DType.float32, DType.float32)
    if getattr(model, "lm_head", None) is not None and "Model" in config["architectures"][0]:
        model.lm_head = None
    tensors = {}
    for name, weight in model.raw_state_dict().items():
        shape = tuple(int(n) for n in weight.shape)
        made = drawn(name, shape) + ("norm" in name.lower() and name.endswith("weight"))
        tensors[name] = made.astype(np.float32)
    safetensors.numpy.save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return (0.25 * rng.standard_normal(shape)).astype(np.float32)


def write_modules(kind: Kind, directory: Path) -> None:
    listed = [("", "Transformer"), ("1_Pooling", "Pooling")]
    listed += [(f"{i}_Dense", "Dense") for i in range(2, 2 + len(kind.dense))]
    listed += [(f"{len(listed)}_Normalize", "Normalize")] * ("normalize" in kind.more)
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (path, name) in enumerate(listed)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    for path, _ in listed[1:]:
        (directory / path).mkdir(exist_ok=True)
    width = 32
    pooling = {"word_embedding_dimension": width, "pooling_mode": list(kind.modes)}
    pooling["include_prompt"] = "without prompt" not in kind.more
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    width *= len(kind.modes)
    for i, activation in enumerate(kind.dense):
        place, out = directory / f"{2 + i}_Dense", (24, 16)[i]
        module = "linear" if activation == "Identity" else "activation"
        settings = {
            "in_features": width, "out_features": out, "bias": not i,
            "activation_function": f"torch.nn.modules.{module}.{activation}",
        }  # fmt: skip
        (place / "config.json").write_text(json.dumps(settings))
        tensors = {"linear.weight": drawn(f"dense {i}", (out, width))}
        tensors |= {} if i else {"linear.bias": drawn("bias", (out,))}
        safetensors.numpy.save_file(tensors, place / "model.safetensors")
        width = out
    (directory / "sentence_bert_config.json").write_text(
        '{"max_seq_length": 70, "do_lower_case": false}'
    )
    prompts = PROMPTS if {"prompts", "without prompt"} & set(kind.more) else {}
    settings = {"prompts": prompts, "default_prompt_name": "document" if prompts else None,
                "similarity_fn_name": "cosine"}  # fmt: skip
    (directory / "config_sentence_transformers.json").write_text(json.dumps(settings))


def write_tokenizer(kind: str, directory: Path) -> dict[str, int]:
    """Writes ``tokenizer.json`` and its settings; returns the ids of pad, bos and eos."""
    if kind == "wordpiece":
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
        tokens = [*special, *_LETTERS[:-1], *(f"##{c}" for c in _LETTERS[:-1]), *_WORDS]
        model: dict[str, Any] = {
            "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": {t: i for i, t in enumerate(tokens)},
        }  # fmt: skip
        parts: dict[str, Any] = {
            "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                           "strip_accents": None, "lowercase": True},
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        }  # fmt: skip
        first, last, pad = 2, 3, 0
    elif kind == "unigram":
        special = ["<s>", "<pad>", "</s>", "<unk>"]
        tokens = [*special, *(f"▁{w}" for w in _WORDS), *_LETTERS[:-1], "▁"]
        scores = [0.0] * 4 + [-3.0 - 0.1 * i for i in range(len(tokens) - 4)]
        model = {
            "type": "Unigram", "unk_id": 3, "vocab": [list(p) for p in zip(tokens, scores, strict=True)],
            "byte_fallback": False,
        }  # fmt: skip
        parts = {
            "normalizer": {"type": "NFKC"},
            "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always",
                              "split": True},
            "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always",
                        "split": True},
        }  # fmt: skip
        first, last, pad = 0, 2, 1
    else:
        special = ["<s>", "<pad>", "</s>", "<unk>"]
        letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
        table = letters + [256 + i for i in range(256 - len(letters))]
        tokens = [*special, *map(chr, table), "th", "the", "ca", "cat"]
        model = {
            "type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)},
            "merges": [["t", "h"], ["th", "e"], ["c", "a"], ["ca", "t"]],
        }  # fmt: skip
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        }
        parts = {"normalizer": None, "pre_tokenizer": byte_level, "decoder": byte_level}
        first, last, pad = 0, 2, 1
    around = lambda *pieces: [
        {"Sequence": {"id": p, "type_id": int(p == "B")}} if p in "AB"
        else {"SpecialToken": {"id": p, "type_id": int(pieces.index(p) > 2 and kind == "wordpiece")}}
        for p in pieces
    ]  # fmt: skip
    one, two = special[first], special[last]
    pair = around(one, "A", two, "B")
    pair.append({"SpecialToken": {"id": two, "type_id": 1}})
    post = {
        "type": "TemplateProcessing", "single": around(one, "A", two), "pair": pair,
        "special_tokens": {t: {"id": t, "ids": [special.index(t)], "tokens": [t]} for t in (one, two)},
    }  # fmt: skip
    added = [
        {"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for i, t in enumerate(special)
    ]  # fmt: skip
    document = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts,
                "post_processor": post, "model": model}  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(document))
    inputs = ["input_ids", "attention_mask"] + ["token_type_ids"] * (kind == "wordpiece")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": special[pad],
                "unk_token": special[1 if kind == "wordpiece" else 3], "cls_token": special[first],
                "sep_token": special[last], "model_max_length": 70,
                "model_input_names": inputs}  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return {"pad": pad, "bos": first, "eos": last}
