"""Byte-pair encoding from GGUF metadata: tokenizers of GPT-2's and of Llama's kind.

For GPT-2's kind, the file holds the merges and names the way of splitting text. Llama's kind is
SentencePiece's: the file holds a score for each token, from which this module computes the merges.

Sources: ``llm_tokenizer_spm_session`` and ``llama_vocab::impl::load`` in llama.cpp's
llama-vocab.cpp; ``generate_merges`` of transformers for the order of merges with equal scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from ....errors import CheckpointLimitError, shown, some
from ..metadata import Settings
from .splits import BYTE_LEVEL_DECODER, SPLITTINGS, Splitting
from .tokens import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    WORD,
    added_tokens,
    document,
    spaces_decoder,
    special_id,
    template,
    token_scores,
    token_types,
    vocabulary,
)

# Published tokens have up to 128 bytes.
_LONGEST_PIECE = 512
# The largest number of pairs for each token, besides those of runs of one letter, and in all. Vocabularies have two
# to three; Gemma's 262,144 tokens have 580 thousand.
_PAIRS_OF_A_TOKEN, _PAIRS_OF_RUNS, _MAX_PAIRS = 12, 1 << 16, 1 << 20
Token = TypeVar("Token", str, bytes)
# llama.cpp's list of tokens that end generation, whatever type a file gives them.
ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <end_of_turn> <|endoftext|> <|eom_id|> <EOT>"
    " _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response>".split()
)
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}


def byte_level(given: Settings) -> dict[str, Any]:
    """The content of a ``tokenizer.json`` for GPT-2's kind of tokenizer.

    Raises:
        UnsupportedModelError: text is split in an unknown way; the message names it.
        CheckpointFormatError: a key is missing or wrong, or two tokens are the same.
    """
    tokens = given.items("tokens", str)
    types = _types(given, tokens)
    splitting = _splitting(given)
    vocab = _filled(tokens, types, given)
    return _document(
        given, tokens, types, splitting.adds_bos,
        normalizer=splitting.normalizer,
        pre_tokenizer=splitting.pre_tokenizer,
        decoder=BYTE_LEVEL_DECODER,
        model=_model(
            vocab, _stored_merges(given, vocab), ignore_merges=splitting.ignore_merges
        ),
    )  # fmt: skip


def sentencepiece(given: Settings) -> dict[str, Any]:
    """The content of a ``tokenizer.json`` for Llama's kind of tokenizer.

    As in llama.cpp, a space is put before a text, even if the text begins with one, and before each
    part of the text after a special token.

    Raises:
        CheckpointFormatError: a key is missing or wrong, or two tokens are the same.
        CheckpointLimitError: a token is longer than 512, or too many tokens begin with other tokens.
    """
    return _pieces(given, _SENTENCEPIECE_IDS, prefix=True)


def merged_pieces(given: Settings) -> dict[str, Any]:
    """The content of a ``tokenizer.json`` for Gemma 4's tokenizer: Llama's kind, with the merges in the file.

    Raises:
        CheckpointFormatError: a key is missing or wrong, or two tokens are the same.
    """
    given.items("merges", str)
    return _pieces(given, {}, prefix=False)


def _pieces(given: Settings, usual: dict[str, int], prefix: bool) -> dict[str, Any]:
    tokens = [
        # An added token that is a run of spaces is also found by merges.
        token.replace(" ", WORD) if token.strip(" ") == "" else token
        for token in given.items("tokens", str)
    ]
    types = _types(given, tokens)
    vocab = _filled(tokens, types, given)
    prefix = given.flag("add_space_prefix", prefix)
    unknown = _id(given, tokens, "unknown", usual)
    space = {"type": "Replace", "pattern": {"String": " "}, "content": WORD}
    steps = [{"type": "Prepend", "prepend": WORD}, space] if prefix else [space]
    has_merges = given.has("merges")
    merges = _stored_merges(given, vocab) if has_merges else _scored(given, tokens, types, vocab)
    return _document(
        given, tokens, types, True, usual,
        normalizer={"type": "Sequence", "normalizers": steps},
        pre_tokenizer=None,
        decoder=spaces_decoder(prefix),
        model=_model(
            vocab, merges, byte_fallback=True, fuse_unk=True,
            unk_token=None if unknown is None else tokens[unknown],
        ),
    )  # fmt: skip


def _splitting(given: Settings) -> Splitting:
    """The way of splitting text that the file names; files from 2023 name none."""
    name = given.text("pre", None)
    if name is None:
        is_gpt2 = str(given.metadata.get("general.architecture")) == "gpt2"
        name = "gpt-2" if is_gpt2 else "default"
    found = SPLITTINGS.get(name)
    if found is None:
        raise given.unsupported(
            f"the pre-tokenizer {shown(name)} (tokenizer.ggml.pre; maxjax supports "
            f"{some(sorted(SPLITTINGS), 100)})"
        )
    return found


_WITHOUT_RSTRIP = {"<unk>", "<s>", "<|endoftext|>"}


def _document(
    given: Settings,
    tokens: list[str],
    types: list[int],
    adds_bos: bool,
    usual: dict[str, int] | None = None,
    **parts: Any,
) -> dict[str, Any]:
    # GGUF files do not say it: llama.cpp takes it from the name of the model too (``llama_vocab::impl::load``).
    name = str(given.metadata.get("general.name", "")).lower()
    stripping = set(tokens) - _WITHOUT_RSTRIP if "phi-3" in name or "phi3" in name else ()
    around = _around(given, tokens, adds_bos, usual or {})
    return document(added_tokens(tokens, types, stripping), post_processor=around, **parts)


def _model(vocab: dict[str, int], merges: list[tuple[str, str]], **more: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **more,
        "vocab": vocab,
        "merges": [list(pair) for pair in merges],
    }


# --- tokens -------------------------------------------------------------------------------------


def _types(given: Settings, tokens: list[str]) -> list[int]:
    """The type of each token. In a file without types, bos and eos are control tokens, as are all of ``ENDS``."""
    types = token_types(given, len(tokens))
    if types is None:
        named = {given.count(f"{key}_token_id", None, minimum=0) for key in ("bos", "eos")}
        types = [CONTROL if i in named else NORMAL for i in range(len(tokens))]
    return [
        CONTROL if kind == NORMAL and token in ENDS else kind
        for token, kind in zip(tokens, types, strict=True)
    ]


def _filled(tokens: list[str], types: list[int], given: Settings) -> dict[str, int]:
    """The vocabulary, without the tokens that the converter adds for unused rows of the embedding table."""
    if not tokens:
        raise given.wrong("tokens", "a token", "none", "is empty", is_text=True)
    vocab = vocabulary(tokens, given.path)
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == UNUSED and token == f"[PAD{index}]":
            del vocab[token]
    return vocab


def _id(given: Settings, tokens: list[str], key: str, usual: dict[str, int]) -> int | None:
    """The id of a special token, from the file or else the usual one; None if there is none."""
    found = special_id(given, tokens, key)
    if found is None and usual.get(key, len(tokens)) < len(tokens):
        return usual[key]
    return found


def _around(
    given: Settings, tokens: list[str], adds_bos: bool, usual: dict[str, int]
) -> dict[str, Any] | None:
    """The post-processor that adds special tokens before and after a text; None if it adds none."""
    bos = given.flag("add_bos_token", adds_bos)
    eos = given.flag("add_eos_token", False)
    before = _id(given, tokens, "bos", usual) if bos else None
    after = _id(given, tokens, "eos", usual) if eos else None
    if before is None and after is None:
        return None
    return template(tokens, before, after, second=before)


# --- merges -------------------------------------------------------------------------------------


def _stored_merges(given: Settings, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """The merges in the file, as pairs of tokens."""
    found = []
    for merge in given.items("merges", str):
        # The first token of a pair may begin with a space, and has at least one character.
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 0 or left not in vocab or right not in vocab or left + right not in vocab:
            raise given.wrong("merges", "two tokens that make a third", merge, "has a wrong merge")
        found.append((left, right))
    return found


def _scored(
    given: Settings, tokens: list[str], types: list[int], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """All pairs of tokens that form a token, in the order in which SentencePiece would join them."""
    scores = _scores(given, tokens)
    joined = {
        token: index
        for token, index in vocab.items()
        if types[index] not in (CONTROL, UNKNOWN, BYTE) and token
    }
    found: list[tuple[float, int, int, int, str, str]] = []
    for token, left, right in cuts(joined, given.path):
        index = joined[token]
        found.append((-scores[index], -len(left), -len(right), index, left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def cuts(tokens: Iterable[Token], path: Any) -> Iterator[tuple[Token, Token, Token]]:
    """The tokens that are two other tokens, one after another: (token, left, right), sorted by token.

    Raises:
        CheckpointLimitError: a token is longer than 512, or too many tokens begin with other tokens.

    Example:
        >>> list(cuts(["a", "b", "ab", "abc", "bc", "c"], None))
        [('ab', 'a', 'b'), ('abc', 'a', 'bc'), ('abc', 'ab', 'c'), ('bc', 'b', 'c')]
    """
    known = {token: token for token in tokens}
    most = min(_PAIRS_OF_A_TOKEN * len(known) + _PAIRS_OF_RUNS, _MAX_PAIRS)
    count = 0
    # In sorted order, those that a token begins with are the last ones that have not ended.
    starts: list[Token] = []
    for token in sorted(known):
        if len(token) > _LONGEST_PIECE:
            raise CheckpointLimitError(
                f"the token {token[:40]!r}… is too long",
                path=path, expected=f"at most {_LONGEST_PIECE}", found=len(token),
            )  # fmt: skip
        while starts and not token.startswith(starts[-1]):
            starts.pop()
        count += len(starts)
        if count > most:
            raise CheckpointLimitError(
                "there are too many tokens that begin with other tokens, from which merges are made",
                path=path, expected=f"at most {most} pairs of {len(known)} tokens", found="more",
            )  # fmt: skip
        for left in starts:
            right = known.get(token[len(left) :])
            if right is not None:
                yield token, left, right
        starts.append(token)


def _scores(given: Settings, tokens: list[str]) -> list[float]:
    """The score of each token."""
    scores = token_scores(given, len(tokens))
    if str(given.metadata.get("general.architecture")).startswith("gemma"):
        # The converter gives special scores to added tokens, including runs of spaces. Gemma's
        # merges have the order of its tokens.
        return [-float(index) for index in range(len(tokens))]
    return scores
