"""Reads tokenizers without a ``tokenizer.json``: ``vocab.json`` with ``merges.txt``, ``vocab.txt``, and others.

``sentencepiece`` reads SentencePiece's models, ``tekken`` Mistral's ``tekken.json`` and ``tiktoken`` Kimi's
``tiktoken.model``. The other files have only the tokens. How text is split, and which special tokens surround it,
depends on the class of transformers that ``tokenizer_config.json`` or ``config.json`` names. Here each of these
classes is expressed as the content of a ``tokenizer.json``.

Sources: ``tokenization_gpt2.py``, ``_qwen2``, ``_gpt_neox``, ``_codegen``,
``_roberta``, ``_bert`` and ``TOKENIZER_MAPPING_NAMES`` in transformers 5.23; ``read_file`` of the
``tokenizers`` package's models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import (
    CheckpointFormatError,
    CheckpointMissingError,
    UnsupportedModelError,
    shown,
    some,
)
from ...models.config import read_object
from ...models.gguf.tokenizer.splits import BYTE_LEVEL_DECODER, SPLITTINGS
from ...storage.files import is_there, read_whole
from ...storage.save.beside import Files
from .limits import check_list
from .sentencepiece import FILES as SENTENCEPIECE
from .sentencepiece import read_sentencepiece
from .sentencepiece_classes import CLASSES
from .tekken import FILE as TEKKEN
from .tekken import read_tekken
from .tiktoken import FILE as TIKTOKEN
from .tiktoken import is_tiktoken, read_tiktoken

VOCAB, MERGES, WORDS = "vocab.json", "merges.txt", "vocab.txt"
# Files of tokenizers that are not supported, with their formats.
_OTHERS = {
    "qwen.tiktoken": "tiktoken",
    "vocab.bpe": "GPT-2's first format",
}
VOCABULARIES = (VOCAB, MERGES, WORDS, *SENTENCEPIECE, TEKKEN, TIKTOKEN, *_OTHERS)
"""The files that have a vocabulary if there is no ``tokenizer.json``."""

_END = "<|endoftext|>"


@dataclass(frozen=True)
class TokenizerClass:
    """A tokenizer class of transformers.

    Attributes:
        parts: a function from settings to its normalizer, pre_tokenizer and decoder.
        special: its default special tokens: texts, or objects as in a ``tokenizer_config.json``.
        post_processor: the special tokens around a text: those of "bert" or "roberta", "flags" for those
            that the settings ``add_bos_token`` and ``add_eos_token`` ask for, "own" for those of the document, or
            "language" for NLLB's.
        words: whether its vocabulary is a list of words (WordPiece).
    """

    parts: Callable[[Mapping[str, Any]], dict[str, Any]]
    special: Mapping[str, Any]
    post_processor: str = "flags"
    words: bool = False


def _byte_level(normalizer: Any = None, name: str = "gpt-2") -> Callable[..., dict[str, Any]]:
    """Byte-level BPE as in GPT-2, with the pre-tokenizer that llama.cpp calls ``name``."""

    def parts(settings: Mapping[str, Any]) -> dict[str, Any]:
        split = SPLITTINGS[name].pre_tokenizer
        if settings.get("add_prefix_space") is True:
            steps = split["pretokenizers"] if split["type"] == "Sequence" else [split]
            steps[-1]["add_prefix_space"] = True
        return {"normalizer": normalizer, "pre_tokenizer": split, "decoder": BYTE_LEVEL_DECODER}

    return parts


def _bert(settings: Mapping[str, Any]) -> dict[str, Any]:
    normalizer = {
        "type": "BertNormalizer", "clean_text": True,
        "handle_chinese_chars": settings.get("tokenize_chinese_chars", True) is not False,
        "strip_accents": settings.get("strip_accents"),
        "lowercase": settings.get("do_lower_case", True) is not False,
    }  # fmt: skip
    return {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    }


def _named(text: str) -> dict[str, str]:
    return {f"{name}_token": token for name, token in (item.split("=") for item in text.split())}


_NFC = {"type": "NFC"}
_GPT2 = TokenizerClass(_byte_level(), _named(f"unk={_END} bos={_END} eos={_END}"))
_ROBERTA = TokenizerClass(
    _byte_level(),
    _named("bos=<s> eos=</s> unk=<unk> sep=</s> pad=<pad> cls=<s> mask=<mask>"),
    "roberta",
)
_BERT = TokenizerClass(
    _bert, _named("unk=[UNK] sep=[SEP] pad=[PAD] cls=[CLS] mask=[MASK]"), "bert", True
)
_KINDS: dict[str, TokenizerClass] = {
    "GPT2": _GPT2,
    "CodeGen": _GPT2,
    "GPTNeoX": TokenizerClass(
        _byte_level(_NFC), _named(f"unk={_END} bos={_END} eos={_END} pad=<|padding|>")
    ),
    "Qwen2": TokenizerClass(
        _byte_level(_NFC, "qwen2"), _named(f"unk={_END} eos={_END} pad={_END}")
    ),
    **dict.fromkeys("Roberta Bart Longformer LED".split(), _ROBERTA),
    **dict.fromkeys(
        "Bert DistilBert Electra MobileBert ConvBert SqueezeBert LayoutLM".split(), _BERT
    ),
}
_OF_MODELS: dict[str, str] = {
    **dict.fromkeys("gpt2 gpt_neo gptj codegen".split(), "GPT2"),
    **dict.fromkeys("gpt_neox mamba mamba2".split(), "GPTNeoX"),
    **dict.fromkeys("qwen2 qwen2_moe qwen2_vl qwen2_5_vl qwen3 qwen3_moe".split(), "Qwen2"),
    **dict.fromkeys("roberta bart longformer led".split(), "Roberta"),
    **dict.fromkeys("bert distilbert electra mobilebert convbert".split(), "Bert"),
}


# Classes with Unigram models whose token ids are known.
_UNIGRAMS = ("", "XLMRoberta", *CLASSES, "PreTrained", "TokenizersBackend")
_UNIGRAMS_OF_MODELS = {
    **dict.fromkeys("xlm-roberta jina_embeddings_v3 gte new".split(), "XLMRoberta"),
    **dict.fromkeys("t5 mt5 switch_transformers".split(), "T5"),
    "albert": "Albert", "camembert": "Camembert", "deberta-v2": "DebertaV2", "mbart": "MBart",
    "nllb": "Nllb", "nllb-moe": "Nllb",
}  # fmt: skip


@dataclass
class Read:
    """A tokenizer read without a ``tokenizer.json``: the content that this file would have, and the class."""

    document: dict[str, Any]
    kind: TokenizerClass
    file: Path


def read_vocabulary(directory: Path | Files, settings: Mapping[str, Any]) -> Read | None:
    """Reads the tokenizer of a directory without a ``tokenizer.json``; None if there is no vocabulary.

    Args:
        directory: the directory of the files.
        settings: the content of ``tokenizer_config.json``.

    Raises:
        UnsupportedModelError: the vocabulary has an unsupported format, or an unknown class; the
            message names it.
        CheckpointMissingError: ``vocab.json`` or ``merges.txt`` is missing.
        CheckpointFormatError: a file is corrupt; the message names it.
    """
    words, pairs = directory / WORDS, directory / VOCAB
    merges = directory / MERGES
    if is_there(pairs) or is_there(merges):
        kind = _kind(directory, settings, f"{VOCAB} and {MERGES}", words=False)
        for file, other in ((pairs, MERGES), (merges, VOCAB)):
            if not is_there(file):
                raise CheckpointMissingError(
                    f"the file is missing, and {other} in the directory needs it", path=file,
                    hint=f"Download it as well, or write tokenizer.json. {_ALONE}",
                )  # fmt: skip
        model = _bpe(pairs, merges)
        return Read(_document(model, kind.parts(settings)), kind, pairs)
    if is_there(words):
        kind = _kind(directory, settings, WORDS, words=True)
        model = _wordpiece(words, settings, kind)
        return Read(_document(model, kind.parts(settings)), kind, words)
    for name in SENTENCEPIECE:
        if is_there(file := directory / name):
            read = _tiktoken if is_tiktoken(file) else _sentencepiece
            return read(directory, file, settings)
    if is_there(file := directory / TEKKEN):
        document = read_tekken(file, settings)
        texts = [item["content"] for item in document["added_tokens"]]
        names = {f"{n}_token": text for n, text in zip(("unk", "bos", "eos"), texts, strict=False)}
        return Read(document, TokenizerClass(_own, names, "own"), file)
    if is_there(file := directory / TIKTOKEN):
        return _tiktoken(directory, file, settings)
    for name, what in _OTHERS.items():
        if is_there(directory / name):
            raise UnsupportedModelError(
                f"{directory / name}: the tokenizer is in the format {what}, which maxjax does not"
                f" support: put the model's tokenizer.json into the same directory ({_WRITE}). {_ALONE}"
            )
    return None


def _sentencepiece(directory: Path | Files, file: Path, settings: Mapping[str, Any]) -> Read:
    """The tokenizer of a SentencePiece model."""
    named, model_type = _class_of(directory, settings)
    name = named or _UNIGRAMS_OF_MODELS.get(model_type, "")
    name = "T5" if name == "MT5" else name
    document, special = read_sentencepiece(file, settings, name)
    is_unigram = document["model"]["type"] == "Unigram"
    if is_unigram and name not in _UNIGRAMS:
        raise UnsupportedModelError(
            f"{file}: the tokenizer is SentencePiece's Unigram, of the class {name[:60] + 'Tokenizer'!r}, which "
            f"may number its tokens in another way; maxjax supports {', '.join(filter(None, _UNIGRAMS))}. Put the "
            f"model's tokenizer.json beside it ({_WRITE}). {_ALONE}"
        )
    if is_unigram and name == "XLMRoberta":
        special = {**_ROBERTA.special, **special}
    marks = "language" if name == "Nllb" else "own"
    return Read(document, TokenizerClass(_own, special, marks), file)


def _tiktoken(directory: Path | Files, file: Path, settings: Mapping[str, Any]) -> Read:
    """The tokenizer of a file of tiktoken."""
    named, model_type = _class_of(directory, settings)
    is_kimi = named == "TikToken" or model_type.startswith("kimi")
    return Read(read_tiktoken(file, settings, is_kimi), TokenizerClass(_own, {}, "own"), file)


def _own(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {}


_WRITE = "transformers' AutoTokenizer.from_pretrained(…).save_pretrained(…) writes it"
_ALONE = "To load the model without it: maxjax.load(…, tokenizer=False)."


def _kind(
    directory: Path | Files, settings: Mapping[str, Any], files: str, *, words: bool
) -> TokenizerClass:
    """The tokenizer class that the files of a directory name."""
    named, model_type = _class_of(directory, settings)
    name = named or _OF_MODELS.get(model_type)
    found = _KINDS.get(name or "")
    if found is None or found.words != words:
        known = [f"{n}Tokenizer" for n, kind in _KINDS.items() if kind.words == words]
        what = (
            f"of the class {(named + 'Tokenizer')[:80]!r}"
            if named
            else "and tokenizer_config.json does not name its class"
        )
        raise UnsupportedModelError(
            f"{directory}: the tokenizer is in {files}, {what}; maxjax supports such files of"
            f" {some(known, 12)}. Put the model's tokenizer.json into the same directory ({_WRITE}). {_ALONE}"
        )
    return found


def _class_of(directory: Path | Files, settings: Mapping[str, Any]) -> tuple[str | None, str]:
    """The tokenizer's class without "Tokenizer" or None, and the model's type, as the files name them."""
    config = directory / "config.json"
    model = read_object(config) if is_there(config) else {}
    named = settings.get("tokenizer_class") or model.get("tokenizer_class")
    if not isinstance(named, str):
        return None, str(model.get("model_type"))
    return named.removesuffix("Fast").removesuffix("Tokenizer"), str(model.get("model_type"))


def _document(model: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], **parts,
        "post_processor": None, "model": model,
    }  # fmt: skip


# --- the files ----------------------------------------------------------------------------------


def _bpe(pairs: Path, merges: Path) -> dict[str, Any]:
    vocab = read_object(pairs, "json_bytes")
    for token, number in vocab.items():
        if type(number) is not int or not 0 <= number < 1 << 31:
            raise CheckpointFormatError(
                f"the id of the token {shown(token)} is not a valid number",
                path=pairs,
                found=shown(number),
            )
    found = []
    for number, line in enumerate(_lines(merges), 1):
        if line.startswith("#version"):
            continue
        parts = line.split(" ")
        if len(parts) != 2:
            raise CheckpointFormatError(
                f"line {number} is not a merge",
                path=merges,
                expected="two tokens",
                found=shown(line),
            )
        missing = [text for text in (*parts, "".join(parts)) if text not in vocab]
        if missing:
            raise CheckpointFormatError(
                f"line {number} has a token that is not in {VOCAB}", path=merges,
                found=shown(missing[0]),
                hint="The two files are of different tokenizers: use files of the same one.",
            )  # fmt: skip
        found.append(parts)
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
        "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False,
        "ignore_merges": False, "vocab": vocab, "merges": found,
    }  # fmt: skip


def _wordpiece(file: Path, settings: Mapping[str, Any], kind: TokenizerClass) -> dict[str, Any]:
    # If a word occurs twice, the package uses the later line.
    vocab = {line.rstrip(): number for number, line in enumerate(_lines(file))}
    unknown = settings.get("unk_token", kind.special["unk_token"])
    unknown = unknown.get("content") if isinstance(unknown, Mapping) else unknown
    return {
        "type": "WordPiece", "unk_token": str(unknown), "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100, "vocab": vocab,
    }  # fmt: skip


def _lines(path: Path) -> list[str]:
    r"""The lines of a text file, which end with ``\n`` or ``\r\n``."""
    data = read_whole(path)
    check_list(data, path)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise CheckpointFormatError(
            "the text is not UTF-8", path=path, offset=error.start
        ) from None
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


# --- special tokens around a text ---------------------------------------------------------------


def post_processor(
    kind: TokenizerClass, settings: Mapping[str, Any], special: Mapping[str, str], id_of: Any
) -> Any:
    """The post-processor of a class, an object of the ``tokenizers`` package; None if it has none.

    Args:
        kind: the class.
        settings: the content of ``tokenizer_config.json``.
        special: the special tokens by name.
        id_of: a function from a token to its id.
    """
    from tokenizers import processors

    if kind.post_processor == "own":
        return None

    def marked(name: str) -> tuple[str, int]:
        text = special[f"{name}_token"]
        return text, id_of(text)

    if kind.post_processor == "roberta":
        trim = settings.get("trim_offsets", True) is not False
        prefix = settings.get("add_prefix_space") is True
        return processors.RobertaProcessing(marked("sep"), marked("cls"), trim, prefix)
    if kind.post_processor == "bert":
        cls, sep = marked("cls"), marked("sep")
        pieces = _template([cls[0]], [sep[0]], [])
        return processors.TemplateProcessing(*pieces, [cls, sep])
    names = [n for n in ("bos", "eos") if settings.get(f"add_{n}_token") is True]
    marks = {n: marked(n) for n in names if f"{n}_token" in special}
    if not marks:
        return None
    before = [marks["bos"][0]] if "bos" in marks else []
    after = [marks["eos"][0]] if "eos" in marks else []
    return processors.TemplateProcessing(
        *_template(before, after, before), list(dict.fromkeys(marks.values()))
    )


def _template(
    before: list[str], after: list[str], second: list[str]
) -> tuple[list[str], list[str]]:
    """The templates of a single text and of a text pair, with the special tokens around each text."""

    def one(sequence: str, segment: int, start: list[str]) -> list[str]:
        return [f"{piece}:{segment}" for piece in (*start, f"${sequence}", *after)]

    single = one("A", 0, before)
    return single, [*single, *one("B", 1, second)]
