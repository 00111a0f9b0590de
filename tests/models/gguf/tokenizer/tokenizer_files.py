"""Small tokenizers of every kind, trained on made-up text by the ``tokenizers`` package."""

import json
import random

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = (
    SHORT
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
_UP, _LOW = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UP}*{_LOW}+|[^\r\n\p{{L}}\p{{N}}]?{_UP}+{_LOW}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UP}*{_LOW}+{SHORT}?|[^\r\n\p{{L}}\p{{N}}]?{_UP}+{_LOW}*{SHORT}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# As in Kimi K2's tokenization_kimi.py.
KIMI = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}"
    r"&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Name of ours → (how text is split, ignore_merges, llama.cpp's name).
BYTE_LEVEL = {
    "gpt2": (None, False, "gpt-2"),
    "llama3": (LLAMA3, True, "llama-bpe"),
    "dbrx": (LLAMA3, False, "dbrx"),
    "qwen2": (QWEN2, False, "qwen2"),
    "smollm": ("digits", False, "smollm"),
    "tekken": (TEKKEN, True, "tekken"),
    "gpt4o": (GPT4O, False, "gpt-4o"),
    "kimi": (KIMI, False, "kimi-k2"),
}

WORDS = (
    "the of and a to in is you that it he was for on are as with his they I at be this have from "
    "or one had by word but not what all were we when your can said there use an each which she "
    "do how their if will up other about out many then them these so some her would make like him "
    "Paris PARIS iPhone McDonald naïve café über 2024 1999 12345 3.14 don't it's we'll I'm they'd "
    "x/y // http://a.b/c <tag> {json} [list] a_b --flag ... ?! $5 50% Ünïcödé ελληνικά русский "
    "漢字かな 한국어 🙂 🙂🙃 \t \n \n\n"
).split(" ")


def corpus(count: int = 400) -> list[str]:
    draw = random.Random(7)
    lines = []
    for _ in range(count):
        gaps = draw.choices([" ", "  ", "\n", "\t", ", "], [20, 1, 1, 1, 2], k=12)
        words = draw.choices(WORDS, k=12)
        lines.append("".join(word + gap for word, gap in zip(words, gaps, strict=True)))
    return lines


# NFC, as some tokenizers make them so and llama.cpp does not.
TEXTS = [
    *corpus(60), "", " ", "   leading", "trailing   ", "a\r\n\r\nb", "\n\n\n", "1234567 12 1 ٣٤", "don'T I'LL",
    "ÀÉÎ àéî", "fooBarBAZ fooBAR", "unseen: ツ ☃ ﷽ 𝔘𝔫𝔦", "a" * 300, "tab\t\ttab", "(x)[y]{z}<w>",
]  # fmt: skip


def byte_level(name: str) -> dict:
    """A tokenizer of GPT-2's kind, as its file."""
    pattern, ignores, _ = BYTE_LEVEL[name]
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=ignores))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern in (None, "digits"))
    if pattern is None:
        made.pre_tokenizer = last
    else:
        split = (
            pre_tokenizers.Digits(individual_digits=True)
            if pattern == "digits"
            else pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        )
        made.pre_tokenizer = pre_tokenizers.Sequence([split, last])
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, show_progress=False, special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(corpus(), trainer)
    made.add_tokens([tokenizers.AddedToken("<user>", special=False, normalized=False)])
    if name in ("llama3", "tekken"):
        made.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
        )
    return json.loads(made.to_str())


def sentencepiece(prefix: bool = True, metaspace: bool = False) -> dict:
    """A tokenizer of Llama's kind, with all merges that its pieces have, in their order."""
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, special_tokens=special)
    made.train_from_iterator([line for line in corpus() if line.isascii()], trainer)
    data = json.loads(made.to_str())
    model = data["model"]
    pieces = [text for text, index in model["vocab"].items() if index >= len(special)]
    ranked = sorted(pieces, key=lambda text: model["vocab"][text])
    model["merges"] = [
        [piece[:i], piece[i:]]
        for piece in ranked
        for i in range(1, len(piece))
        if piece[:i] in model["vocab"] and piece[i:] in model["vocab"]
    ]
    data["added_tokens"] = [token for token in data["added_tokens"] if token["id"] < 3]
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    start = {"type": "Prepend", "prepend": "▁"}
    if metaspace:
        scheme = "always" if prefix else "never"
        data["normalizer"] = None
        data["pre_tokenizer"] = {
            "type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False,
        }  # fmt: skip
    else:
        steps = [start, space] if prefix else [space]
        data["normalizer"] = {"type": "Sequence", "normalizers": steps}
        data["pre_tokenizer"] = None
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }  # fmt: skip
    return data
