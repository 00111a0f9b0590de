"""Small encoders with a head, with a tokenizer and weights of NumPy's, for the calls that use heads.

The tests let transformers' pipelines read the same directories; ``tests/oracles/make_answers_golden.py`` lets that
of transformers 4 answer questions.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

import maxjax
from maxjax import models
from tests.engine.sentence_models import write_tokenizer
from tests.fill import filled

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC")
# Name → prefix of the classes, kind of tokenizer, settings.
_BERT = {
    "vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 40, "max_position_embeddings": 80,
}  # fmt: skip
_DISTIL = {
    "vocab_size": 320, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 40,
    "max_position_embeddings": 80,
}  # fmt: skip
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("Bert", "wordpiece", _BERT),
    "distilbert": ("DistilBert", "wordpiece", _DISTIL),
    "roberta": ("Roberta", "bytes", {**_BERT, "type_vocab_size": 1, "pad_token_id": 1}),
    "xlm-roberta": ("XLMRoberta", "unigram", {**_BERT, "type_vocab_size": 1, "pad_token_id": 1}),
}
MASKS = {"wordpiece": "[MASK]", "bytes": "<mask>", "unigram": "<mask>"}


def write(name: str, head: str, directory: Path, **more: Any) -> Path:
    """Writes a model of a kind with a head, such as "TokenClassification", and further settings."""
    prefix, tokenizer, settings = KINDS[name]
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(tokenizer, directory)
    _complete(directory, MASKS[tokenizer], has_types=prefix == "Bert")
    config = getattr(models, f"{prefix}Config")(**settings, **more)
    model = filled(getattr(models, f"{prefix}For{head}")(config))
    state = {name: np.asarray(value) for name, value in model.state_dict().items()}
    # So that labels differ from token to token.
    model.load_state_dict({name: 3 * one if one.ndim > 1 else one for name, one in state.items()})
    maxjax.save_pretrained(model, directory)
    return directory


def _complete(directory: Path, mask: str, has_types: bool) -> None:
    """Adds a mask token to the tokenizer, and the names of what the model takes."""
    file, other = directory / "tokenizer.json", directory / "tokenizer_config.json"
    document = json.loads(file.read_text())
    entry = {"id": len(document["model"]["vocab"]), "content": mask, "lstrip": True}
    entry |= dict.fromkeys(("single_word", "rstrip", "normalized"), False) | {"special": True}
    document["added_tokens"].append(entry)
    file.write_text(json.dumps(document))
    names = ["input_ids", "attention_mask", *["token_type_ids"] * has_types]
    settings = json.loads(other.read_text()) | {"mask_token": mask, "model_input_names": names}
    other.write_text(json.dumps(settings))


_PARTS = (
    *"the cat sat on the mat dog and fine find text where is it".split(), "The", "Cats", "Bob's", "naïve", "ﬁne",
    "猫", "🐱", "x-y", "a.b", "Is it?", "...", "\n", "  ", "\u00a0", "Mat,", "(dog)", "1234", "wherecat", "İt",
)  # fmt: skip


def drawn_texts(count: int, longest: int = 12, seed: int = 0) -> list[str]:
    """Texts of words, punctuation and odd characters."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        parts = rng.choices(_PARTS, k=rng.randint(1, longest))
        found.append("".join(part + rng.choice([" ", " ", " ", "", "  "]) for part in parts))
    return found
