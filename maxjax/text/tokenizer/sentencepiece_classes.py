"""SentencePiece's models in transformers' classes with numbers, normalisers and special tokens of their own.

Each class is a function from the pieces of a file to the content of a ``tokenizer.json``, as transformers builds it
where there is none: ALBERT, CamemBERT, DeBERTa V2 and V3, mBART, mBART-50, NLLB, T5 and mT5.

Sources: ``tokenization_albert.py``, ``_camembert``, ``_deberta_v2``, ``_mbart``, ``_mbart50``, ``_nllb`` and ``_t5``
of transformers 5.24, and ``convert_from_spm`` of its converters.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CheckpointFormatError, CheckpointLimitError, UnsupportedModelError, shown
from ...models.gguf.tokenizer.bpe import cuts
from ...models.gguf.tokenizer.tokens import CONTROL, UNKNOWN, USER, added, document

_SCORED = list[tuple[str, float]]
# mBART's languages, and those that mBART-50 has after them.
_LANGUAGES = tuple(
    """
ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV
my_MM ne_NP nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN
""".split()
)
_MORE_LANGUAGES = tuple(
    """
af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX
sv_SE sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI
""".split()
)
_MASK = {"content": "<mask>", "lstrip": True}
_FAIRSEQ = {
    "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>",
    "pad_token": "<pad>", "cls_token": "<s>", "mask_token": _MASK,
}  # fmt: skip
_BERT = {"sep_token": "[SEP]", "cls_token": "[CLS]", "mask_token": "[MASK]"}


@dataclass(frozen=True)
class Pieces:
    """The pieces of a SentencePiece model.

    Attributes:
        path: path of the file.
        scored: texts and scores, by number.
        types: their types.
        unknown: number of the unknown token.
        charsmap: table that normalises text; empty: there is none.
        settings: content of ``tokenizer_config.json``.
    """

    path: Path
    scored: _SCORED
    types: list[int]
    unknown: int
    charsmap: bytes
    settings: Mapping[str, Any]

    def named(self, name: str, default: str) -> str:
        """The text of a special token in the settings, or the class's."""
        found = self.settings.get(f"{name}_token")
        found = found.get("content") if isinstance(found, Mapping) else found
        return found if isinstance(found, str) else default

    def flag(self, name: str, default: bool) -> bool:
        """A setting that is true or false."""
        found = self.settings.get(name)
        return found if isinstance(found, bool) else default

    def language(self, default: str) -> str:
        """The language of the texts."""
        found = self.settings.get("src_lang")
        return found if isinstance(found, str) else default

    def fairseq(self, *after: str) -> _SCORED:
        """The pieces behind fairseq's first four, with further tokens at the end."""
        first = [self.named(*one) for one in _FIRST]
        return [
            *((text, 0.0) for text in first), *self.scored[3:], *((text, 0.0) for text in after),
        ]  # fmt: skip


_FIRST = (("bos", "<s>"), ("pad", "<pad>"), ("eos", "</s>"), ("unk", "<unk>"))


@dataclass(frozen=True)
class SentencePieceClass:
    """A class of transformers.

    Attributes:
        make: function from the pieces to the parts of a ``tokenizer.json``: ``vocab`` with ``unk_id``, or a
            ``model``; ``normalizers`` and ``pre_tokenizer``; ``around``, the templates of a text and of a pair;
            ``scheme`` of the decoder; ``codes``, special tokens of the vocabulary; and ``added``, the types of
            pieces that are added tokens.
        special: its special tokens by name.
    """

    make: Callable[[Pieces], dict[str, Any]]
    special: Mapping[str, Any]

    def document(self, pieces: Pieces) -> dict[str, Any]:
        """The content of a ``tokenizer.json`` for a file.

        Raises:
            CheckpointFormatError: the file does not have one of the class's special tokens.
            CheckpointLimitError: there are too many tokens, or too many of them begin with others.
            UnsupportedModelError: the files do not list the language of the texts.
        """
        parts = self.make(pieces)
        model = parts.get("model") or {
            "type": "Unigram", "unk_id": parts["unk_id"], "byte_fallback": False,
            "vocab": [list(pair) for pair in parts["vocab"]],
        }  # fmt: skip
        vocab = model["vocab"]
        ids = vocab if isinstance(vocab, dict) else {text: i for i, (text, _) in enumerate(vocab)}
        own = {
            text: kind != USER
            for (text, _), kind in zip(pieces.scored, pieces.types, strict=True)
            if kind in parts.get("added", (CONTROL, UNKNOWN, USER)) and text in ids
        } | dict.fromkeys(parts.get("codes", ()), True)
        single, pair = parts.get("around", ("", ""))
        marks = {name.rpartition(":")[0] for name in f"{single} {pair}".split()} - {"$A", "$B"}
        if missing := sorted(marks - ids.keys()):
            raise CheckpointFormatError(
                f"the special token {shown(missing[0])} is not in the vocabulary", path=pieces.path
            )
        steps = parts["normalizers"]
        normalizer = {"type": "Sequence", "normalizers": steps} if steps else None
        return document(
            sorted((added(ids[t], t, s) for t, s in own.items()), key=lambda one: one["id"]),
            normalizer=normalizer,
            pre_tokenizer=parts["pre_tokenizer"],
            post_processor=around(single, pair, ids) if single else None,
            decoder=_metaspace(parts.get("scheme", "always")),
            model=model,
        )


def around(single: str, pair: str, ids: Mapping[str, int]) -> dict[str, Any]:
    """The post-processor with special tokens around the texts ``$A`` and ``$B``, each with its segment.

    Example:
        >>> found = around("[CLS]:0 $A:0", "[CLS]:0 $A:0 $B:1", {"[CLS]": 2})
        >>> found["single"][1], found["special_tokens"]["[CLS]"]["ids"]
        ({'Sequence': {'id': 'A', 'type_id': 0}}, [2])
    """

    def items(text: str) -> list[dict[str, Any]]:
        found = []
        for one in text.split(" "):
            name, _, segment = one.rpartition(":")
            kind, name = ("Sequence", name[1:]) if name in ("$A", "$B") else ("SpecialToken", name)
            found.append({kind: {"id": name, "type_id": int(segment)}})
        return found

    pieces = [*items(single), *items(pair)]
    names = dict.fromkeys(one["SpecialToken"]["id"] for one in pieces if "SpecialToken" in one)
    marks = {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in names}
    return {
        "type": "TemplateProcessing", "single": items(single), "pair": items(pair),
        "special_tokens": marks,
    }  # fmt: skip


def _metaspace(scheme: str) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True}


def _words(scheme: str) -> dict[str, Any]:
    """Cuts text at spaces, each word with ▁ before it."""
    steps = [{"type": "WhitespaceSplit"}, _metaspace(scheme)]
    return {"type": "Sequence", "pretokenizers": steps}


def _replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def _table(pieces: Pieces) -> list[dict[str, Any]]:
    """The normaliser of the table in the file, if it has one."""
    text = base64.b64encode(pieces.charsmap).decode()
    return [{"type": "Precompiled", "precompiled_charsmap": text}] if text else []


_SPACES = _replace(" {2,}", " ", "Regex")


def _albert(pieces: Pieces) -> dict[str, Any]:
    steps = [_replace("``", '"'), _replace("''", '"')]
    if not pieces.flag("keep_accents", False):
        steps += [{"type": "NFKD"}, {"type": "StripAccents"}]
    if pieces.flag("do_lower_case", True):
        steps.append({"type": "Lowercase"})
    scheme = "always" if pieces.flag("add_prefix_space", True) else "never"
    return {
        "vocab": pieces.scored, "unk_id": 1, "normalizers": steps + _table(pieces), "scheme": scheme,
        "pre_tokenizer": _words(scheme), "around": _segments(pieces),
    }  # fmt: skip


def _segments(pieces: Pieces) -> tuple[str, str]:
    cls, sep = pieces.named("cls", "[CLS]"), pieces.named("sep", "[SEP]")
    return f"{cls}:0 $A:0 {sep}:0", f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1"


def _deberta(pieces: Pieces) -> dict[str, Any]:
    steps = [{"type": "Lowercase"}] if pieces.flag("do_lower_case", False) else []
    steps += [
        _replace(r"\s{2,}|[\n\r\t]", " ", "Regex"), {"type": "NFC"},
        {"type": "Strip", "strip_left": False, "strip_right": True},
    ]  # fmt: skip
    scheme = "always" if pieces.flag("add_prefix_space", True) else "first"
    words = [_metaspace(scheme)]
    if pieces.flag("split_by_punct", False):
        words.insert(0, {"type": "Punctuation", "behavior": "Isolated"})
    unknown = (pieces.named("unk", "[UNK]"), 0.0)
    return {
        "vocab": pieces.scored, "scheme": scheme, "normalizers": steps,
        "unk_id": pieces.scored.index(unknown) if unknown in pieces.scored else pieces.unknown,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": words}, "around": _segments(pieces),
    }  # fmt: skip


def _camembert(pieces: Pieces) -> dict[str, Any]:
    first = [
        "<s>NOTUSED",
        pieces.named("pad", "<pad>"),
        "</s>NOTUSED",
        pieces.named("unk", "<unk>"),
    ]
    vocab = [
        *((text, 0.0) for text in first), ("<unk>NOTUSED", -100.0), *pieces.scored[1:],
        (pieces.named("mask", "<mask>"), 0.0),
    ]  # fmt: skip
    scheme = "always" if pieces.flag("add_prefix_space", True) else "never"
    bos, eos = pieces.named("bos", "<s>"), pieces.named("eos", "</s>")
    both = f"{bos}:0 $A:0 {eos}:0", f"{bos}:0 $A:0 {eos}:0 {eos}:0 $B:0 {eos}:0"
    return {
        "vocab": vocab, "unk_id": 3, "normalizers": _table(pieces), "scheme": scheme,
        "pre_tokenizer": _words(scheme), "around": both,
    }  # fmt: skip


def _mbart(pieces: Pieces) -> dict[str, Any]:
    eos, language = pieces.named("eos", "</s>"), _known(pieces, "en_XX", _LANGUAGES)
    return {
        "vocab": pieces.fairseq(*_LANGUAGES, pieces.named("mask", "<mask>")), "unk_id": 3,
        "normalizers": [], "pre_tokenizer": _words("always"), "codes": _LANGUAGES,
        "around": (f"$A:0 {eos}:0 {language}:0", f"$A:0 $B:0 {eos}:0 {language}:0"),
    }  # fmt: skip


def _mbart50(pieces: Pieces) -> dict[str, Any]:
    codes = _LANGUAGES + _MORE_LANGUAGES
    eos, language = pieces.named("eos", "</s>"), _known(pieces, "en_XX", codes)
    return {
        "vocab": pieces.fairseq(*codes, pieces.named("mask", "<mask>")), "unk_id": 3,
        "normalizers": [*_table(pieces), _SPACES], "pre_tokenizer": _metaspace("always"), "codes": codes,
        "around": (f"{language}:0 $A:0 {eos}:0", f"{language}:0 $A:0 $B:0 {eos}:0"),
    }  # fmt: skip


def _nllb(pieces: Pieces) -> dict[str, Any]:
    """NLLB's BPE; its languages are added tokens, which the other files list (:func:`around_language`)."""
    texts = dict.fromkeys(pieces.named(*one) for one in _FIRST) | dict.fromkeys(
        text for text, _ in pieces.scored
    )
    rank = {text: i for i, (text, _) in enumerate(pieces.scored)}
    merges = sorted(
        cuts(rank, pieces.path), key=lambda one: (rank[one[0]], len(one[1]), len(one[2]))
    )
    model = {
        "type": "BPE", "dropout": None, "unk_token": pieces.named("unk", "<unk>"),
        "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": True,
        "byte_fallback": False, "ignore_merges": False, "vocab": {t: i for i, t in enumerate(texts)},
        "merges": [[left, right] for _, left, right in merges],
    }  # fmt: skip
    table = _table(pieces)
    return {
        "model": model, "normalizers": [*table, _SPACES] if table else [],
        "pre_tokenizer": _metaspace("always"), "added": (CONTROL, UNKNOWN),
    }  # fmt: skip


def around_language(
    settings: Mapping[str, Any], eos: str, id_of: Callable[[str], int | None], path: Any
) -> tuple[str, str, list[tuple[str, int]]]:
    """NLLB's templates of one text and of a pair, and the numbers of their special tokens.

    The language is before the text, or after it with ``legacy_behaviour``.

    Args:
        settings: content of ``tokenizer_config.json``.
        eos: text of the token that ends a text.
        id_of: function from a token to its number.
        path: path of the file, for messages.

    Raises:
        UnsupportedModelError: no file lists the language.
    """
    language = settings.get("src_lang")
    language = language if isinstance(language, str) else "eng_Latn"
    ids = {text: number for text in (language, eos) if (number := id_of(text)) is not None}
    if language not in ids:
        raise _unknown_language(path, language)
    before, after = f"{language}:0 ", f"{eos}:0"
    if settings.get("legacy_behaviour") is True:
        before, after = "", f"{eos}:0 {language}:0"
    return f"{before}$A:0 {after}", f"{before}$A:0 $B:0 {after}", list(ids.items())


def _known(pieces: Pieces, default: str, codes: tuple[str, ...]) -> str:
    language = pieces.language(default)
    if language not in codes:
        raise _unknown_language(pieces.path, language)
    return language


def _unknown_language(path: Any, language: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{path}: the files of the tokenizer do not list the language {shown(language)} (src_lang): put the "
        "model's tokenizer.json beside it. To load the model without it: maxjax.load(…, tokenizer=False)."
    )


# Number of T5's sentinel tokens, if ``tokenizer_config.json`` does not say it.
_EXTRA_IDS = 100


def _t5(pieces: Pieces) -> dict[str, Any]:
    """T5's sentinel tokens ``<extra_id_0>``, ``<extra_id_1>`` … follow the pieces: the first has the highest id."""
    count = pieces.settings.get("extra_ids")
    count = count if type(count) is int else _EXTRA_IDS
    check_count(len(pieces.scored) + count, pieces.path)
    there = {text for text, _ in pieces.scored}
    names = [f"<extra_id_{i}>" for i in range(count - 1, -1, -1)]
    eos = pieces.named("eos", "</s>")
    return {
        "vocab": [*pieces.scored, *((name, 0.0) for name in names if name not in there)],
        "unk_id": pieces.unknown, "normalizers": _table(pieces), "codes": names,
        "pre_tokenizer": _words("always"), "around": (f"$A:0 {eos}:0", f"$A:0 {eos}:0 $B:0 {eos}:0"),
    }  # fmt: skip


_MAX_PIECES = 1 << 20


def check_count(count: int, path: Path) -> None:
    """Checks the number of tokens.

    Raises:
        CheckpointLimitError: there are too many.
    """
    if count > _MAX_PIECES:
        expected, found = f"at most {_MAX_PIECES}", f"more than {_MAX_PIECES}"
        raise CheckpointLimitError(
            "there are too many tokens", path=path, expected=expected, found=found
        )


CLASSES: dict[str, SentencePieceClass] = {
    "Albert": SentencePieceClass(
        _albert,
        {
            "bos_token": "[CLS]",
            "eos_token": "[SEP]",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
            **_BERT,
        },
    ),
    "DebertaV2": SentencePieceClass(
        _deberta,
        {
            "bos_token": "[CLS]",
            "eos_token": "[SEP]",
            "unk_token": "[UNK]",
            "pad_token": "[PAD]",
            **_BERT,
        },
    ),
    "Camembert": SentencePieceClass(_camembert, _FAIRSEQ),
    "MBart": SentencePieceClass(_mbart, _FAIRSEQ),
    "MBart50": SentencePieceClass(
        _mbart50, {key: one for key, one in _FAIRSEQ.items() if key != "bos_token"}
    ),
    "Nllb": SentencePieceClass(_nllb, {**_FAIRSEQ, "mask_token": {**_MASK, "normalized": True}}),
    "T5": SentencePieceClass(
        _t5, {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    ),
}
"""The classes by name, without "Tokenizer"."""
