"""Trains small SentencePiece models and keeps them with their tokens of odd texts.

    pip install sentencepiece   # in an environment of its own
    python -m tests.oracles.make_sentencepiece_golden

Written with sentencepiece 0.2.3.
"""

import io
import json
import os
import random
import tempfile
from pathlib import Path

import numpy as np
import sentencepiece

FOLDER = Path(__file__).resolve().parent / "recorded"
GOLDEN = FOLDER / "sentencepiece.npz"
KINDS = {
    "unigram": {"model_type": "unigram", "vocab_size": 220, "normalization_rule_tsv": "RULES"},
    "bytes": {"model_type": "unigram", "vocab_size": 460, "byte_fallback": True,
              "normalization_rule_tsv": "RULES"},
    "spaces": {"model_type": "unigram", "vocab_size": 220, "remove_extra_whitespaces": False,
               "normalization_rule_name": "identity"},
    "no prefix": {"model_type": "unigram", "vocab_size": 220, "add_dummy_prefix": False,
                  "normalization_rule_tsv": "RULES"},
    "llama": {"model_type": "bpe", "vocab_size": 460, "byte_fallback": True, "split_digits": True,
              "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
              "allow_whitespace_only_pieces": True},
    "gemma": {"model_type": "bpe", "vocab_size": 460, "byte_fallback": True, "add_dummy_prefix": False,
              "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
              "allow_whitespace_only_pieces": True},
}  # fmt: skip
# Some of NFKC's rules: what a character becomes, and tabs and newlines that become spaces.
RULES = {"ﬁ": "fi", "１": "1", "①": "1", "Ａ": "A", "e\u0301": "é", "\t": " ", "\n": " ", "　": " "}
SOME = [
    "", " ", "   ", "\n", "\r\nx\r\n", " leading", "trailing  ", "  two  spaces  ", "a\tb\n\nc",
    "🐱🐶 👨‍👩‍👧", "ﬁne １ ①Ａ　b", "naïve café e\u0301", "x\u200by\ufeff", "猫が座った。", "Привет, мир!",
    "a" * 40, "▁under", "end▁", "\x01\x02", "\u2028x", "don't  stop", "1234 5",
]  # fmt: skip


def texts() -> list[str]:
    rng = random.Random(0)
    letters = " \n\taAbc.é猫🐱ﬁ１▁<>0x"
    return SOME + ["".join(rng.choices(letters, k=rng.randint(1, 24))) for _ in range(120)]


def main() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    lines = [
        line for path in sorted(docs.glob("*.md"))[:8] for line in path.read_text().split("\n")
    ]
    lines += ["猫が座った。", "naïve café", "🐱 emoji", "Привет мир"] * 20
    os.chdir(tempfile.mkdtemp())  # the models hold the name of the file of rules
    rules = Path("rules.tsv")
    code = lambda text: " ".join(f"{ord(c):X}" for c in text)
    rules.write_text("".join(f"{code(old)}\t{code(new)}\n" for old, new in RULES.items()))
    found: dict[str, np.ndarray] = {}
    for name, settings in KINDS.items():
        settings = {k: str(rules) if v == "RULES" else v for k, v in settings.items()}
        made = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=made, character_coverage=0.995,
            hard_vocab_limit=False, minloglevel=2, **settings,
        )  # fmt: skip
        model = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
        found[f"model {name}"] = np.frombuffer(made.getvalue(), np.uint8)
        rows = [model.encode(text) for text in texts()]
        found[f"ids {name}"] = np.frombuffer(json.dumps(rows).encode(), np.uint8)
        unknown = model.unk_id()
        said = [None if unknown in row else model.decode(row) for row in rows]
        found[f"said {name}"] = np.frombuffer(json.dumps(said).encode(), np.uint8)
    np.savez_compressed(GOLDEN, **found)


if __name__ == "__main__":
    main()
