"""Files that are written to hang a reader, to fill its memory, to crash it or to confuse a terminal.

``scripts/fuzz.py --hostile`` opens each in a process of its own kind and measures it. A case is a good
checkpoint with one thing changed: a count, a size, a nesting, a length, or the kind of a value.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TINY = ROOT / "maxjax" / "tiny"
MILLION = 1_000_000
# A right-to-left override, a C1 control, an escape sequence, a line separator, a zero-width joiner.
MARKS = "\u202e\x9b31m\x1b[2J\u2028\u200d\u2066"


@dataclass(frozen=True)
class Hostile:
    """One case: ``build`` writes it into an empty directory and returns what ``action`` opens."""

    name: str
    action: str
    build: Callable[[Path], Path | str]


def cases() -> list[Hostile]:
    """All cases, in a fixed order."""
    groups = (
        _json_values, _json_texts, _tokenizers, _vocabularies, _templates, _sentence, _digests, _indexes,
        _safetensors, _gguf, _pickles, _arrays, _orbax, _adapters, _programs, _paths,
    )  # fmt: skip
    return [case for group in groups for case in group()]


# --- what is opened -----------------------------------------------------------------------------


def act(action: str, path: Path | str) -> None:
    """Opens a case as a user would."""
    import maxjax

    if action == "read":
        from maxjax.storage import open_checkpoint

        with open_checkpoint(path) as table:
            table.read_many()
    elif action == "load":
        _, text = maxjax.load(path)
        if text is not None:
            text.decode(text.encode("To be, or not to be."))
    elif action == "tokenizer":
        text = maxjax.load_tokenizer(path)
        if text is not None:
            text.decode(text.encode("To be, or not to be: ﬁ ½"))
    elif action == "chat":
        text = maxjax.load_tokenizer(path)
        maxjax.apply_chat_template(text, [{"role": "user", "content": "Hi"}])
    elif action == "adapter":
        maxjax.lora.load(maxjax.load(TINY)[0], path)
    elif action == "program":
        import jax.numpy as jnp

        program = maxjax.load_exported(path)
        bound = program.bind({"weight": jnp.ones((2, 3)), "bias": jnp.ones(2)})
        bound(jnp.ones((4, 3)))
    elif action in ("inspect", "verify", "plan"):
        _command(action, path)
    else:
        raise ValueError(action)


def _command(action: str, path: Path | str) -> None:
    """Runs the command line; what it prints must be safe for a terminal."""
    import contextlib
    import io

    from maxjax.cli.application import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        main([action, str(path)])
    require_printable(out.getvalue() + err.getvalue())


def warm_up_action(action: str, listed: list[Hostile]) -> None:
    """Does what an action does with good files, so that imports and compilations are done."""
    import tempfile

    goods = {"read": ["orbax: good"], "load": ["gguf: good"], "program": ["program: good"]}.get(
        action, []
    )
    for case in listed:
        if case.name in goods:
            with tempfile.TemporaryDirectory() as directory:
                act(action, case.build(Path(directory)))
    if action in ("load", "tokenizer", "chat", "inspect", "verify", "plan"):
        act(action, TINY)
    if action == "adapter":
        act("load", TINY)


def require_printable(text: str) -> None:
    """Raises ValueError for text that may move a cursor or reorder a line."""
    bad = next((c for c in text if not c.isprintable() and c not in "\n"), None)
    if bad is not None:
        raise ValueError(f"{bad!a} reaches the terminal")


# --- changed checkpoints ------------------------------------------------------------------------


def _copy(root: Path, *left_out: str) -> Path:
    for file in TINY.iterdir():
        if file.name not in (*left_out, "maxjax_digests.json"):
            shutil.copyfile(file, root / file.name)
    return root


def _tiny(name: str, action: str, files: dict[str, Any], *left_out: str) -> Hostile:
    """The model of the package with files replaced: by bytes, or by a JSON value or what makes one of its own."""

    def build(root: Path) -> Path:
        _copy(root, *left_out)
        for file, content in files.items():
            path = root / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if callable(content):
                good = TINY / file
                content = content(json.loads(good.read_text()) if good.exists() else None)
            path.write_bytes(
                content if isinstance(content, bytes) else json.dumps(content).encode()
            )
        return root

    return Hostile(name, action, build)


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


VALUES: dict[str, Any] = {
    "huge": 10**30, "negative": -1, "zero": 0, "float": 1.5, "text": MARKS, "empty": [], "object": {},
    "true": True, "long": "x" * 3 * MILLION, "list": list(range(MILLION)), "nested": _nested(60),
    "minus": -(10**18), "2^31": 1 << 31,
}  # fmt: skip


def _json_values() -> Iterator[Hostile]:
    """Every key of the configurations that is read, with values of every kind."""
    keys = {
        "config.json": "architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers"
        " num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps rope_theta rope_scaling"
        " max_position_embeddings tie_word_embeddings dtype quantization_config sliding_window layer_types"
        " rope_parameters id2label num_labels eos_token_id",
        "generation_config.json": "eos_token_id temperature top_k top_p suppress_tokens bad_words_ids sequence_bias"
        " stop_strings max_new_tokens max_length do_sample min_new_tokens num_beams",
        "tokenizer_config.json": "tokenizer_class bos_token eos_token model_max_length chat_template"
        " added_tokens_decoder extra_special_tokens truncation_side add_bos_token clean_up_tokenization_spaces",
    }
    few = {"config.json": ("huge", "text", "list", "nested", "object", "zero")}
    for file, names in keys.items():
        for place, key in enumerate(names.split()):
            chosen = few.get(file, tuple(VALUES))
            # A few values for each key, all of them over the keys: each costs some tenths of a second.
            for step in range(3):
                kind = chosen[(place + step * 5) % len(chosen)]
                value = VALUES[kind]
                change = lambda found, key=key, value=value: {**found, key: value}
                yield _tiny(f"{file}: {key} {kind}", "load", {file: change})


def _json_texts() -> Iterator[Hostile]:
    """Texts of JSON that cost much to parse."""
    texts: dict[str, Callable[[], bytes]] = {
        "numbers": lambda: b"[" + b"1," * 9 * MILLION + b"1]",
        "strings": lambda: b"[" + b",".join(b'"%d"' % i for i in range(3 * MILLION)) + b"]",
        "lists": lambda: b"[" + b"[]," * 3 * MILLION + b"1]",
        "objects": lambda: b"[" + b'{"a":1},' * 2 * MILLION + b"1]",
        "keys": lambda: b"{" + b",".join(b'"%x":1' % i for i in range(3 * MILLION)) + b"}",
        "deep": lambda: b"[" * 100_000 + b"]" * 100_000,
        "digits": lambda: b"9" * 10 * MILLION,
        "float digits": lambda: b"0." + b"9" * 30 * MILLION,
        "exponents": lambda: b"[" + b"1e9999," * 3 * MILLION + b"1]",
        "blanks": lambda: b" " * 150 * MILLION + b"1",
        "quotes": lambda: b'"' + b'\\"' * 20 * MILLION + b'"',
        "escapes": lambda: b'"' + rb"\u00e9" * 4 * MILLION + b'"',
        "wide": lambda: ("[" + "1" * 60 * MILLION + '"\U0001f642"]').encode(),
        "wide text": lambda: ('"' + "x" * 60 * MILLION + '\U0001f642"').encode(),
        "repeated": lambda: b"{" + b'"a":1,' * 2 * MILLION + b'"a":1}',
    }
    for name, text in texts.items():
        for file in (
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "special_tokens_map.json",
        ):
            make = lambda found, text=text: b'{"x":' + text() + b"}"
            yield _tiny(f"{file}: {name}", "load", {file: make})


def _tokenizer(**parts: Any) -> Callable[[Any], Any]:
    return lambda found: {**found, **parts}


def _model(**parts: Any) -> Callable[[Any], Any]:
    return lambda found: {**found, "model": {**found["model"], **parts}}


def _added(i: int, text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": text, "special": True, **flags}


def _charsmap(size: int, rest: bytes = b"\0") -> str:
    return base64.b64encode(struct.pack("<I", size) + rest).decode()


def _precompiled(text: str) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": text}


def _tokenizers() -> Iterator[Hostile]:
    """The content of tokenizer.json."""
    letters = lambda: [f"{i:x}" for i in range(MILLION * 3 // 2)]
    replace = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee" * 200}
    trie = struct.pack("<I", 4096) + b"\xff" * 4096
    parts: dict[str, Callable[[], Callable[[Any], Any]]] = {
        "1.5 M tokens": lambda: _model(vocab={t: i for i, t in enumerate(letters())}),
        "900,000 tokens": lambda: _model(vocab={t: i for i, t in enumerate(letters()[:900_000])}),
        "1.5 M pieces": lambda: _tokenizer(
            model={"type": "Unigram", "unk_id": 0, "vocab": [[t, 0.0] for t in letters()]}
        ),
        "3 M merges": lambda: _model(merges=[["a", "b"]] * 3 * MILLION),
        "3 M merges as text": lambda: _model(merges=["a b"] * 3 * MILLION),
        "200,000 added tokens": lambda: _tokenizer(
            added_tokens=[_added(1000 + i, f"<{i}>") for i in range(200_000)]
        ),
        "300,000 added tokens": lambda: _tokenizer(
            added_tokens=[_added(1000 + i, f"<{i}>") for i in range(300_000)]
        ),
        "an added token of 1.5 MB": lambda: _tokenizer(added_tokens=[_added(1000, "x" * 1_500_000)]),
        "an added token of 4 MB": lambda: _tokenizer(added_tokens=[_added(1000, "x" * 4 * MILLION)]),
        "a charsmap of 4 GiB": lambda: _tokenizer(normalizer=_precompiled(_charsmap(0xFFFFFFFC))),
        "a charsmap without bytes": lambda: _tokenizer(normalizer=_precompiled("")),
        "a charsmap of two bytes": lambda: _tokenizer(normalizer=_precompiled("AAA=")),
        "a charsmap of no base64": lambda: _tokenizer(normalizer=_precompiled("*")),
        "a charsmap of an odd size": lambda: _tokenizer(normalizer=_precompiled(_charsmap(5, b"\0" * 9))),
        "a charsmap that points outside": lambda: _tokenizer(
            normalizer=_precompiled(base64.b64encode(trie + b"a\0").decode())
        ),
        "a charsmap in a sequence": lambda: _tokenizer(
            normalizer={"type": "Sequence", "normalizers": [_precompiled(_charsmap(1 << 31))]}
        ),
        "a charsmap of 200 numbers": lambda: _tokenizer(normalizer=_precompiled([1] * 200)),
        "30 replacements": lambda: _tokenizer(
            normalizer={"type": "Sequence", "normalizers": [replace] * 30}
        ),
        "20,000 steps": lambda: _tokenizer(
            pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 20_000}
        ),
        "ids of 2^32": lambda: _model(vocab={"a": 1 << 32}),
        "an id of 2^31": lambda: _model(vocab={"a": 0, "b": (1 << 31) + 5}),
        "an added id of 2^31": lambda: _tokenizer(added_tokens=[_added(1 << 31, "<x>")]),
        "a negative id": lambda: _model(vocab={"a": -1}),
        "a truncation of 2^63": lambda: _tokenizer(
            truncation={"max_length": 1 << 63, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
        ),
        "a padding of a billion": lambda: _tokenizer(
            padding={"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None,
                     "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
        ),
        "a padding to multiples": lambda: _tokenizer(
            padding={"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": 10**9,
                     "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
        ),
        "words of a million letters": lambda: _tokenizer(
            model={"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##",
                   "max_input_chars_per_word": MILLION, "vocab": {"a": 0}}
        ),
        "a tree of pieces": lambda: _tokenizer(
            model={"type": "Unigram", "unk_id": 0, "vocab": [["ab" * 500 + str(i), 0.0] for i in range(9000)]}
        ),
        "a list as model": lambda: _tokenizer(model=[]),
        "a dropout of text": lambda: _model(dropout="x"),
        "a dropout of 2": lambda: _model(dropout=2.0),
        "a cache of 2^60": lambda: _model(cache_capacity=1 << 60),
        "special ids": lambda: _tokenizer(
            post_processor={"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "a", "type_id": 0}}] * 9,
                            "pair": [], "special_tokens": {"a": {"id": "a", "ids": [1] * MILLION,
                                                                        "tokens": ["a"] * MILLION}}}
        ),
        "types of 2^31": lambda: _tokenizer(
            post_processor={"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 1 << 31}}],
                            "pair": [], "special_tokens": {}}
        ),
        "scores of NaN": lambda: _tokenizer(
            model={"type": "Unigram", "unk_id": 0, "vocab": [["a", float("nan")], ["b", 0.0]]}
        ),
        "an unknown piece outside": lambda: _tokenizer(
            model={"type": "Unigram", "unk_id": 10**6, "vocab": [["a", 0.0]]}
        ),
        "a prefix of a digit run": lambda: _tokenizer(
            pre_tokenizer={"type": "Digits", "individual_digits": "x"}
        ),
        "a metaspace of a long text": lambda: _tokenizer(
            pre_tokenizer={"type": "Metaspace", "replacement": "x" * MILLION, "prepend_scheme": "always"}
        ),
        "a fixed length of 2^62": lambda: _tokenizer(pre_tokenizer={"type": "FixedLength", "length": 1 << 62}),
        "a fixed length of 0": lambda: _tokenizer(pre_tokenizer={"type": "FixedLength", "length": 0}),
        "a strip of 2^40": lambda: _tokenizer(
            decoder={"type": "Strip", "content": " ", "start": 1 << 40, "stop": 1 << 40}
        ),
        "marks in a type": lambda: _tokenizer(normalizer={"type": MARKS}),
    }  # fmt: skip
    for name, make in parts.items():
        change = lambda found, make=make: make()(found)
        yield _tiny(f"tokenizer.json: {name}", "tokenizer", {"tokenizer.json": change})


def _varint(value: int) -> bytes:
    found = b""
    while value > 127:
        found += bytes([value & 127 | 128])
        value >>= 7
    return found + bytes([value])


def _field(number: int, content: bytes | int) -> bytes:
    if isinstance(content, int):
        return _varint(number << 3) + _varint(content)
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _piece(text: str | bytes, score: float = 0.0, kind: int = 1) -> bytes:
    text = text.encode() if isinstance(text, str) else text
    return _field(1, _field(1, text) + b"\x15" + struct.pack("<f", score) + _field(3, kind))


PIECES = _piece("<unk>", 0, 2) + _piece("<s>", 0, 3) + _piece("</s>", 0, 3) + _piece("a")


def _vocabularies() -> Iterator[Hostile]:
    """Tokenizers of the other formats: tokenizer.model, tekken.json, vocab.json, added tokens."""
    spm = {
        "1.5 M pieces": lambda: b"".join(_piece(f"{i:x}") for i in range(MILLION * 3 // 2)),
        "5 M empty pieces": lambda: PIECES + b"\n\0" * 5 * MILLION,
        "20 M fields": lambda: PIECES + b"\x28\x01" * 20 * MILLION,
        "nested fields": lambda: PIECES + _field(2, b"\x18\x01" * 5 * MILLION),
        "fields of a piece": lambda: PIECES + _field(1, b"\x18\x01" * 5 * MILLION),
        "a length of 2^60": lambda: PIECES + b"\x0a" + _varint(1 << 60) + b"x",
        "a varint that does not end": lambda: PIECES + b"\xff" * 100,
        "a charsmap of 4 GiB": lambda: PIECES + _field(3, _field(2, struct.pack("<I", 0xFFFFFFFC) + b"\0")),
        "a charsmap of one byte": lambda: PIECES + _field(3, _field(2, b"\0")),
        "a charsmap of 60 MB": lambda: PIECES + _field(3, _field(2, bytes(60 * MILLION))),
        "a piece of 3 MB": lambda: PIECES + _piece("x" * 3 * MILLION),
        "40,000 letters": lambda: PIECES + _field(2, b"\x18\x02") + b"".join(
            _piece("a" * i + "b" * j, -i) for i in range(1, 150) for j in range(1, 150)
        ),
        "a score of NaN": lambda: PIECES + _piece("b", float("nan")),
        "marks": lambda: PIECES + _piece("b") + _piece("b") + _piece(MARKS),
        "ids of 2^40": lambda: PIECES + _field(2, _field(41, 1 << 40)),
    }  # fmt: skip
    for name, make in spm.items():
        yield _with(f"tokenizer.model: {name}", "tokenizer", "tokenizer.model", make)
    yield _with(
        "tiktoken.model: 60 MB", "tokenizer", "tokenizer.model", lambda: b"YQ== 0\n" * 9 * MILLION
    )

    def tekken(count: int, **config: Any) -> dict[str, Any]:
        vocab = [
            {
                "rank": i,
                "token_bytes": base64.b64encode(b"%x" % i if i > 255 else bytes([i])).decode(),
            }
            for i in range(count)
        ]
        return {
            "config": {"pattern": r"\w+", "default_vocab_size": count, **config},
            "vocab": vocab,
        }

    tekkens = {
        "1.3 M tokens": lambda: tekken(MILLION * 13 // 10),
        "a size of 2^60": lambda: tekken(300, default_vocab_size=1 << 60),
        "special tokens of 2^60": lambda: tekken(300, default_num_special_tokens=1 << 60),
        "a million special tokens": lambda: {
            **tekken(300), "special_tokens": [{"rank": i, "token_str": f"<{i}>"} for i in range(MILLION)]
        },
        "merges": lambda: {
            **tekken(256), "vocab": tekken(256)["vocab"] + [
                {"rank": 256 + 140 * i + j, "token_bytes": base64.b64encode(b"a" * (i + 1) + b"b" * (j + 1)).decode()}
                for i in range(140) for j in range(140)
            ], "config": {"pattern": "a", "default_vocab_size": 20_000},
        },
        "a pattern of 3 MB": lambda: tekken(300, pattern="a" * 3 * MILLION),
        "a pattern of groups": lambda: tekken(300, pattern="(" * 5000 + ")" * 5000),
        "a pattern of counts": lambda: tekken(300, pattern="(?:(?:a{1000}){1000}){1000}"),
        "ranks of text": lambda: {**tekken(300), "vocab": [{"rank": "x", "token_bytes": 3}]},
        "a list": lambda: [1],
    }  # fmt: skip
    for name, make in tekkens.items():
        yield _with(
            f"tekken.json: {name}",
            "tokenizer",
            "tekken.json",
            lambda make=make: json.dumps(make()).encode(),
        )

    def gpt2(name: str, vocab: Callable[[], bytes], merges: Callable[[], bytes]) -> Hostile:
        def build(root: Path) -> Path:
            _copy(root, "tokenizer.json")
            (root / "vocab.json").write_bytes(vocab())
            (root / "merges.txt").write_bytes(merges())
            (root / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
            return root

        return Hostile(f"vocab.json: {name}", "tokenizer", build)

    small = lambda: b'{"a": 0, "b": 1, "ab": 2}'
    yield gpt2(
        "1.5 M tokens",
        lambda: json.dumps({f"{i:x}": i for i in range(MILLION * 3 // 2)}).encode(),
        lambda: b"",
    )
    yield gpt2("3 M merges", small, lambda: b"a b\n" * 3 * MILLION)
    yield gpt2("a merge of 60 MB", small, lambda: b"a" * 60 * MILLION + b" b")
    yield gpt2("10 M empty lines", small, lambda: b"\n" * 60 * MILLION)
    yield gpt2("ids of 2^40", lambda: b'{"a": 1099511627776}', lambda: b"")
    yield gpt2("ids of text", lambda: b'{"a": "x"}', lambda: b"")
    vocab_txt = {
        "2 M words": lambda: b"".join(b"%x\n" % i for i in range(2 * MILLION)),
        "60 M empty lines": lambda: b"[UNK]\n" + b"\n" * 60 * MILLION,
        "a word of 60 MB": lambda: b"[UNK]\n" + b"x" * 60 * MILLION,
    }
    for name, make in vocab_txt.items():

        def build(root: Path, make: Any = make) -> Path:
            _copy(root, "tokenizer.json")
            (root / "vocab.txt").write_bytes(make())
            (root / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
            return root

        yield Hostile(f"vocab.txt: {name}", "tokenizer", build)
    decoder = lambda count: {
        "added_tokens_decoder": {str(i): {"content": f"<{i}>"} for i in range(count)}
    }  # fmt: skip
    beside = {
        "added_tokens.json": {
            "300,000 tokens": lambda: {f"<{i}>": 1000 + i for i in range(300_000)},
            "an id of 2^31 - 1": lambda: {"<x>": (1 << 31) - 1},
            "a token of 5 MB": lambda: {"x" * 5 * MILLION: 1000},
            "marks": lambda: {MARKS: "x"},
        },
        "special_tokens_map.json": {
            "a million tokens": lambda: {f"a{i}_token": f"<{i}>" for i in range(MILLION)},
            "300,000 extra tokens": lambda: {"additional_special_tokens": [f"<{i}>" for i in range(300_000)]},
            "extra tokens by name": lambda: {"extra_special_tokens": {f"<{i}>": f"<{i}>" for i in range(300_000)}},
            "a list": lambda: {"eos_token": [1, 2, 3]},
        },
        "tokenizer_config.json": {
            "300,000 in the decoder": lambda: decoder(300_000),
            "200,000 in the decoder": lambda: decoder(200_000),
            "a huge id": lambda: {"added_tokens_decoder": {"2147483647": {"content": "<x>"}}},
        },
    }  # fmt: skip
    for file, contents in beside.items():
        for name, content in contents.items():
            yield _tiny(f"{file}: {name}", "tokenizer", {file: lambda _, make=content: make()})


def _with(name: str, action: str, file: str, make: Callable[[], bytes]) -> Hostile:
    """The model of the package with another file in the place of its tokenizer."""

    def build(root: Path) -> Path:
        _copy(root, "tokenizer.json")
        (root / "tokenizer_config.json").write_text("{}")
        (root / file).write_bytes(make())
        return root

    return Hostile(name, action, build)


def _templates() -> Iterator[Hostile]:
    """Chat templates; scripts/template_bombs.py has the others."""
    texts = {
        "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "text": "{% for a in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
        "kept": "{% set n = namespace(l=[]) %}"
        "{% for a in range(99999) %}{% set n.l = n.l + ['x' * 1000] %}{% endfor %}",
        "powers": "{{ 9 ** 9 ** 9 }}",
        "macros": "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
        "a message": "{{ raise_exception('" + MARKS + "' * 999) }}",
        "parentheses": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "tags": "{% if 1 %}" * 5000,
        "2 MB": "x" * 2 * MILLION,
        "digits": "{{ " + "9" * 500_000 + " }}",
        "a filter of filters": "{{ 'a'" + "|upper" * 5000 + " }}",
    }
    for name, text in texts.items():
        change = lambda found, text=text: {**found, "chat_template": text}
        yield _tiny(f"chat template: {name}", "chat", {"tokenizer_config.json": change})
    many = lambda found: {
        **found, "chat_template": [{"name": f"t{i}", "template": "x"} for i in range(300_000)]
    }  # fmt: skip
    yield _tiny("chat template: 300,000 names", "chat", {"tokenizer_config.json": many})
    yield _tiny("chat_template.jinja: 5 MB", "chat", {"chat_template.jinja": b"x" * 5 * MILLION})
    yield _tiny("chat_template.jinja: no UTF-8", "chat", {"chat_template.jinja": b"\xff"})
    named = {f"additional_chat_templates/{i}.jinja": b"x" * MILLION for i in range(300)}
    yield _tiny("additional_chat_templates: 300 MB", "chat", named)


def _sentence() -> Iterator[Hostile]:
    """modules.json and the files that it names."""
    transformer = {
        "idx": 0,
        "name": "0",
        "path": "",
        "type": "sentence_transformers.models.Transformer",
    }
    pooling = {
        "idx": 1,
        "name": "1",
        "path": "1_Pooling",
        "type": "sentence_transformers.models.Pooling",
    }
    dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    modes = {
        "100,000 modes": {f"pooling_mode_{i}": True for i in range(100_000)},
        "100,000 names": {"pooling_mode": ["mean"] * 100_000},
        "100,000 kinds": {"pooling_mode": [f"a{i}" for i in range(100_000)]},
        "marks": {"pooling_mode": MARKS},
        "a nested mode": {"pooling_mode": [["mean"]]},
    }
    for name, mode in modes.items():
        files = {"modules.json": [transformer, pooling], "1_Pooling/config.json": mode}
        yield _tiny(f"1_Pooling: {name}", "load", files)
    modules = {
        "a million modules": [transformer] * MILLION,
        "99 modules": [transformer, *[dense] * 98],
        "a path outside": [{**transformer, "path": "../../x"}],
        "a long path": [{**transformer, "path": "x/" * 300_000}],
        "marks": [{**transformer, "type": MARKS}],
    }
    wide = {"in_features": 256, "out_features": 1 << 30, "bias": False}
    for name, listed in modules.items():
        files = {
            "modules.json": listed,
            "2_Dense/config.json": wide,
            "2_Dense/model.safetensors": b"",
        }
        yield _tiny(f"modules.json: {name}", "load", files)
    prompts = lambda _: {
        "prompts": {f"p{i}": "x" for i in range(MILLION)},
        "default_prompt_name": "missing",
    }
    files = {"modules.json": [transformer], "config_sentence_transformers.json": prompts}
    yield _tiny("config_sentence_transformers.json: prompts", "load", files)


def _digests() -> Iterator[Hostile]:
    """maxjax_digests.json."""
    size = (TINY / "model.safetensors").stat().st_size

    def digests(**record: Any) -> dict[str, Any]:
        files = {"model.safetensors": [{"size": size, "tensors": {}, **record}]}
        return {"version": 1, "algorithm": "crc32", "files": files}

    zeros = "00000000"
    contents = {
        "a million names beside": lambda: digests(beside={f"x{i}": zeros for i in range(MILLION)}),
        "a million names gone": lambda: digests(beside={}, gone={f"x{i}": zeros for i in range(MILLION)}),
        "10,000 names beside": lambda: digests(beside={f"x{i}": zeros for i in range(10_000)}),
        "a name outside": lambda: digests(beside={"../x": zeros}),
        "a name in a folder": lambda: digests(beside={"x/y/z": zeros}),
        "marks": lambda: digests(beside={MARKS: zeros}),
        "a million tensors": lambda: digests(tensors={f"x{i}": zeros for i in range(MILLION)}),
        "a header of 2^60": lambda: digests(header=[1 << 60, zeros]),
        "a million files": lambda: {"version": 1, "algorithm": "crc32", "files": {
            f"{i}": [{"size": 1, "tensors": {}}] for i in range(500_000)}},
        "a version of a list": lambda: {"version": [1], "algorithm": {}, "files": {}},
    }  # fmt: skip
    for name, content in contents.items():
        for action in ("load", "verify"):
            yield _tiny(
                f"maxjax_digests.json ({action}): {name}",
                action,
                {"maxjax_digests.json": lambda _, make=content: make()},
            )


def _indexes() -> Iterator[Hostile]:
    """model.safetensors.index.json."""
    shard = "model-00001-of-00001.safetensors"
    contents: dict[str, Callable[[], Any]] = {
        "3 M tensors": lambda: {"weight_map": {f"t{i}": shard for i in range(3 * MILLION)}},
        "180,000 shards": lambda: {
            "weight_map": {f"t{i}": f"model-{i}.safetensors" for i in range(180_000)}
        },
        "180,000 tensors": lambda: {"weight_map": {f"t{i}": shard for i in range(180_000)}},
        "a path outside": lambda: {"weight_map": {"a": "../x.safetensors"}},
        "marks": lambda: {"weight_map": {MARKS: shard}},
        "marks in a shard": lambda: {"weight_map": {"a": MARKS + ".safetensors"}},
        "a list": lambda: {"weight_map": [shard]},
        "a size of 10^30": lambda: {"metadata": {"total_size": 10**30}, "weight_map": {"a": shard}},
        "metadata of 1 M": lambda: {
            "metadata": {f"k{i}": i for i in range(MILLION)},
            "weight_map": {"a": shard},
        },
    }
    for name, content in contents.items():

        def build(root: Path, content: Any = content) -> Path:
            (root / "model.safetensors.index.json").write_text(json.dumps(content()))
            shutil.copyfile(TINY / "model.safetensors", root / shard)
            return root

        yield Hostile(f"index: {name}", "read", build)


def _file(name: str, action: str, file: str, make: Callable[[], bytes], size: int = 0) -> Hostile:
    """A single file; with ``size`` it is sparse from its content up to there."""

    def build(root: Path) -> Path:
        path = root / file
        path.write_bytes(make())
        if size:
            os.truncate(path, size)
        return path

    return Hostile(name, action, build)


def _safetensors() -> Iterator[Hostile]:
    def made(header: bytes | dict[str, Any], data: bytes = b"") -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data

    def tensor(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
        return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}

    files: dict[str, tuple[Callable[[], bytes], int]] = {
        "a header of 90 MB of blanks": (lambda: made(b"{}" + b" " * 90 * MILLION), 0),
        "a header of 2^60": (lambda: struct.pack("<Q", 1 << 60) + b"{}", 0),
        "a header of 4 TB in a sparse file": (lambda: struct.pack("<Q", 1 << 42) + b"{}", 1 << 43),
        "a wide name of 90 MB": (
            lambda: made(('{"__metadata__":{"a":"' + "x" * 90 * MILLION + '\U0001f642"}}').encode()), 0
        ),
        "a tensor of 1 TB in a sparse file": (
            lambda: made({"a": tensor("F32", (1 << 38,), (0, 1 << 40))}), (1 << 40) + 80
        ),
        "a shape of 2^62": (lambda: made({"a": tensor("F32", (1 << 62,), (0, 1 << 64))}), 0),
        "a shape of zeros": (lambda: made({"a": tensor("F32", (0, 1 << 62, 1 << 62), (0, 0))}), 0),
        "a shape of 60 axes": (lambda: made({"a": tensor("F32", (1,) * 60)}, b"\0" * 4), 0),
        "a shape of a million axes": (lambda: made({"a": tensor("F32", (1,) * MILLION)}, b"\0" * 4), 0),
        "190,000 empty tensors": (lambda: made({f"t{i}": tensor("F32", (0,), (0, 0)) for i in range(190_000)}), 0),
        "metadata of 1 M": (lambda: made({"__metadata__": {f"{i}": "x" for i in range(MILLION)}}), 0),
        "a name of 60 MB": (lambda: made({"x" * 60 * MILLION: tensor()}, b"\0" * 4), 0),
        "marks": (lambda: made({MARKS: tensor()}, b"\0" * 4), 0),
        "marks in metadata": (lambda: made({"__metadata__": {MARKS: MARKS}, "a": tensor()}, b"\0" * 4), 0),
        "marks in a dtype": (lambda: made({"a": tensor(MARKS)}, b"\0" * 4), 0),
    }  # fmt: skip
    for name, (make, size) in files.items():
        large = "1 TB" in name  # its values do not fit in any memory
        yield _file(
            f"safetensors: {name}", "inspect" if large else "read", "m.safetensors", make, size
        )
        if "marks" in name:
            yield _file(f"safetensors (inspect): {name}", "inspect", "m.safetensors", make, size)
            yield _file(f"safetensors (plan): {name}", "plan", "m.safetensors", make, size)


def _gguf() -> Iterator[Hostile]:
    from tests.storage.gguf import corpus as g

    def string(key: str, value: str | bytes) -> bytes:
        return g.pair(key, g.STRING, g.text(value))

    def strings(key: str, values: list[str]) -> bytes:
        return g.pair(key, g.ARRAY, g.array(g.STRING, len(values), b"".join(map(g.text, values))))

    def numbers(key: str, kind: int, count: int, content: bytes) -> bytes:
        return g.pair(key, g.ARRAY, g.array(kind, count, content))

    def u32(key: str, value: int) -> bytes:
        return g.pair(key, g.U32, g.number(g.U32, value))

    base = {
        "general.architecture": string("general.architecture", "llama"),
        **{f"llama.{key}": u32(f"llama.{key}", value) for key, value in {
            "context_length": 64, "embedding_length": 8, "block_count": 1, "feed_forward_length": 8,
            "attention.head_count": 1, "attention.head_count_kv": 1, "rope.dimension_count": 8, "vocab_size": 4,
        }.items()},
        "llama.attention.layer_norm_rms_epsilon": g.pair(
            "llama.attention.layer_norm_rms_epsilon", g.F32, g.number(g.F32, 1e-5)
        ),
        "tokenizer.ggml.model": string("tokenizer.ggml.model", "llama"),
        "tokenizer.ggml.tokens": strings("tokenizer.ggml.tokens", ["<unk>", "<s>", "</s>", "a"]),
        "tokenizer.ggml.scores": numbers("tokenizer.ggml.scores", g.F32, 4, bytes(16)),
        "tokenizer.ggml.token_type": numbers("tokenizer.ggml.token_type", g.I32, 4, struct.pack("<4i", 2, 3, 3, 1)),
    }  # fmt: skip
    shapes = {"token_embd.weight": (8, 4), "output_norm.weight": (8,), "blk.0.attn_norm.weight": (8,),
              "blk.0.ffn_norm.weight": (8,), **{f"blk.0.{n}.weight": (8, 8) for n in (
                  "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}}  # fmt: skip

    def whole(**changed: bytes | None) -> bytes:
        pairs = {**base, **changed}
        infos, offset = [], 0
        for name, shape in shapes.items():
            infos.append(g.info(name, shape, 0, offset))
            offset += 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        return g.gguf([pair for pair in pairs.values() if pair is not None], infos, bytes(offset))

    yield _file("gguf: good", "load", "m.gguf", whole)
    kinds = {
        "an array": lambda key: numbers(key, g.U32, 2, struct.pack("<2I", 1, 2)),
        "a text": lambda key: string(key, MARKS),
        "2^64 - 1": lambda key: g.pair(key, g.U64, g.number(g.U64, (1 << 64) - 1)),
        "-1": lambda key: g.pair(key, g.I64, g.number(g.I64, -1)),
        "NaN": lambda key: g.pair(key, g.F32, g.number(g.F32, float("nan"))),
        "a bool": lambda key: g.pair(key, g.BOOL, b"\1"),
        "texts": lambda key: strings(key, ["a", "b"]),
        "nothing": lambda key: None,
        "90 MB": lambda key: numbers(key, g.U8, 90 * MILLION, bytes(90 * MILLION)),
    }  # fmt: skip
    more = """tokenizer.ggml.bos_token_id tokenizer.ggml.eos_token_id tokenizer.ggml.padding_token_id
        tokenizer.ggml.unknown_token_id tokenizer.ggml.add_bos_token tokenizer.ggml.pre tokenizer.ggml.merges
        tokenizer.ggml.precompiled_charsmap tokenizer.chat_template tokenizer.huggingface.json llama.rope.freq_base
        llama.rope.scaling.type llama.rope.scaling.factor llama.expert_count general.name general.sampling.temp
        general.sampling.top_k llama.attention.key_length split.count split.no general.file_type""".split()
    for place, key in enumerate([*base, *more]):
        for step, kind in enumerate(kinds):
            if kind == "90 MB" and place % 4 != 0 and "charsmap" not in key:
                continue
            if (place + step) % 2 and kind not in ("90 MB", "an array", "nothing"):
                continue
            make = lambda key=key, kind=kind: whole(**{key: kinds[kind](key)})
            yield _file(f"gguf: {key} {kind}", "load", "m.gguf", make)
    tokens = lambda count: {
        "tokenizer.ggml.tokens": strings("tokenizer.ggml.tokens", [f"{i:x}" for i in range(count)]),
        "tokenizer.ggml.scores": numbers("tokenizer.ggml.scores", g.F32, count, bytes(4 * count)),
        "tokenizer.ggml.token_type": numbers("tokenizer.ggml.token_type", g.I32, count, b"\1\0\0\0" * count),
    }  # fmt: skip
    pattern = [
        chr(97 + i % 26) * (1 + i // 26 % 190) + chr(97 + i // 5000) * (1 + i % 5)
        for i in range(40_000)
    ]
    big: dict[str, Callable[[], bytes]] = {
        "1.9 M tokens": lambda: whole(**tokens(1_900_000)),
        "1.9 M tokens of t5": lambda: whole(
            **{**tokens(1_900_000), "tokenizer.ggml.model": string("tokenizer.ggml.model", "t5")}
        ),
        "1.9 M tokens of gpt2": lambda: whole(
            **{**tokens(1_900_000), "tokenizer.ggml.model": string("tokenizer.ggml.model", "gpt2")}
        ),
        "1.9 M tokens of bert": lambda: whole(
            **{**tokens(1_900_000), "tokenizer.ggml.model": string("tokenizer.ggml.model", "bert")}
        ),
        "600,000 added tokens": lambda: whole(**{
            **tokens(600_000),
            "tokenizer.ggml.token_type": numbers("tokenizer.ggml.token_type", g.I32, 600_000, b"\4\0\0\0" * 600_000),
        }),
        "a million types": lambda: whole(**{
            "tokenizer.ggml.token_type": numbers("tokenizer.ggml.token_type", g.I32, 20 * MILLION, bytes(80 * MILLION))
        }),
        "20 M scores": lambda: whole(**{
            "tokenizer.ggml.scores": numbers("tokenizer.ggml.scores", g.F32, 20 * MILLION, bytes(80 * MILLION))
        }),
        "1.9 M merges": lambda: whole(**{
            "tokenizer.ggml.model": string("tokenizer.ggml.model", "gpt2"),
            "tokenizer.ggml.merges": strings("tokenizer.ggml.merges", ["a b"] * 1_900_000),
        }),
        "merges of letters": lambda: whole(**{
            "tokenizer.ggml.tokens": strings("tokenizer.ggml.tokens", ["<unk>", "<s>", "</s>", *pattern]),
            "tokenizer.ggml.scores": numbers("tokenizer.ggml.scores", g.F32, 40_003, bytes(4 * 40_003)),
            "tokenizer.ggml.token_type": numbers("tokenizer.ggml.token_type", g.I32, 40_003, b"\1\0\0\0" * 40_003),
        }),
        "a charsmap of 4 GiB": lambda: whole(**{
            "tokenizer.ggml.model": string("tokenizer.ggml.model", "t5"),
            "tokenizer.ggml.precompiled_charsmap": numbers(
                "tokenizer.ggml.precompiled_charsmap", g.U8, 5, b"\xfc\xff\xff\xff\0"
            ),
        }),
        "a charsmap of 90 MB": lambda: whole(**{
            "tokenizer.ggml.model": string("tokenizer.ggml.model", "t5"),
            "tokenizer.ggml.precompiled_charsmap": numbers(
                "tokenizer.ggml.precompiled_charsmap", g.U8, 90 * MILLION, bytes(90 * MILLION)
            ),
        }),
        "a charsmap of 90 MB of I64": lambda: whole(**{
            "tokenizer.ggml.model": string("tokenizer.ggml.model", "t5"),
            "tokenizer.ggml.precompiled_charsmap": numbers(
                "tokenizer.ggml.precompiled_charsmap", g.I64, 11 * MILLION, bytes(88 * MILLION)
            ),
        }),
        "a tokenizer.json of 60 MB": lambda: whole(**{
            "tokenizer.huggingface.json": string("tokenizer.huggingface.json", "[" + "1," * 30 * MILLION + "1]")
        }),
        "a block count of 10^9": lambda: whole(**{"llama.block_count": u32("llama.block_count", 10**9)}),
        "a block count of 1000": lambda: whole(**{"llama.block_count": u32("llama.block_count", 1000)}),
        "a vocabulary of 2^31": lambda: whole(**{"llama.vocab_size": u32("llama.vocab_size", 1 << 31)}),
        "16,000 keys": lambda: whole(**{f"x.{i}": u32(f"x.{i}", i) for i in range(16_000)}),
        "lists of lists": lambda: whole(x=g.pair("x.a", g.ARRAY, g.array(
            g.ARRAY, 31_000, g.array(g.U8, 0, b"") * 31_000))),
        "an array of 2^60": lambda: whole(x=numbers("x.a", g.U8, 1 << 60, b"")),
        "strings of 2^60": lambda: whole(x=g.pair("x.a", g.ARRAY, g.array(g.STRING, 1 << 60, b""))),
        "300 templates": lambda: whole(**{
            f"t{i}": string(f"tokenizer.chat_template.{i}", "x" * 300_000) for i in range(300)
        }),
        "a key with marks": lambda: whole(x=string("x." + MARKS, MARKS)),
    }  # fmt: skip
    for name, make in big.items():
        yield _file(f"gguf: {name}", "load", "m.gguf", make)
    rows = {
        "200,000 tensors": lambda: g.gguf(g.PAIRS, [g.info(f"t{i}", [0], 0, 0) for i in range(200_000)]),
        "a tensor of 2^62": lambda: g.gguf(g.PAIRS, [g.info("a", [1 << 60], 0, 0)]),
        "marks": lambda: g.gguf(g.PAIRS, [g.info(MARKS, [8], 0, 0)], g.D32),
        "a count of 2^63": lambda: g.gguf(g.PAIRS, [], tensors=1 << 63),
    }  # fmt: skip
    for name, make in rows.items():
        yield _file(f"gguf table: {name}", "read", "m.gguf", make)
    yield _file("gguf (inspect): marks", "inspect", "m.gguf", rows["marks"])
    yield _file("gguf (inspect): a key with marks", "inspect", "m.gguf", big["a key with marks"])
    sparse = lambda: g.gguf(g.PAIRS, [g.info("a", [1 << 38], 0, 0)])
    yield _file("gguf: 1 TB in a sparse file", "inspect", "m.gguf", sparse, (1 << 40) + 4096)


def _pickles() -> Iterator[Hostile]:
    from tests.storage.pytorch import corpus as p

    def zipped(pickle: bytes) -> bytes:
        return p.zipped(p.members(b"", {}, **{"data.pkl": pickle, "data/0": bytes(16)}))

    start = b"\x80\x02"
    pickles: dict[str, Callable[[], bytes]] = {
        "a million lists": lambda: start + b"]" * MILLION + b".",
        "deep lists": lambda: start + b"]" * 200 + b"a" * 199 + b".",
        "10 M opcodes": lambda: start + b"N0" * 5 * MILLION + b"N.",
        "a text of 2^31": lambda: start + b"X" + struct.pack("<I", 1 << 31) + b"x.",
        "bytes of 2^60": lambda: b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"x.",
        "a long of 30 MB": lambda: start + b"\x8b" + struct.pack("<I", 30 * MILLION) + b"\x7f" * 30 * MILLION + b".",
        "a decimal of 1 MB": lambda: start + b"I" + b"9" * MILLION + b"\n.",
        "a long decimal": lambda: start + b"L" + b"9" * 3 * MILLION + b"L\n.",
        "a memo of 2^31": lambda: start + b"Nr" + struct.pack("<I", (1 << 31) - 1) + b".",
        "doubled lists": lambda: start + b"]q\0" + b"".join(
            b"h%c(h%ch%ce" % (i + 1, i, i) if False else b"]q%c(h%ch%ceh%c0" % (i + 1, i, i, i + 1) for i in range(60)
        ) + b".",
        "a name of 60 MB": lambda: start + b"c" + b"a" * 60 * MILLION + b"\nb\n.",
        "marks": lambda: start + b"cos\n" + MARKS.encode() + b"\n.",
        "a frame of 2^60": lambda: b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N.",
    }  # fmt: skip
    for name, make in pickles.items():
        yield _file(f"pt: {name}", "read", "m.pt", lambda make=make: zipped(make()))
    yield _file(
        "pt: a sparse file of 1 TB",
        "read",
        "m.pt",
        lambda: p.ZIP if hasattr(p, "ZIP") else b"PK\3\4",
        1 << 40,
    )
    yield _file("pt: a legacy file of zeros", "read", "m.pt", lambda: bytes(60 * MILLION))


def _arrays() -> Iterator[Hostile]:
    from tests.storage.numpy import corpus as n

    headers = {
        "a shape of 2^62": b"{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904,), }\n",
        "a shape of 60,000 axes": b"{'descr': '<f4', 'fortran_order': False, 'shape': ("
        + b"1," * 20_000
        + b"), }\n",
        "nested tuples": b"{'descr': '<f4', 'fortran_order': False, 'shape': "
        + b"(" * 5000
        + b")" * 5000
        + b", }\n",
        "a long number": b"{'descr': '<f4', 'fortran_order': False, 'shape': ("
        + b"9" * 60_000
        + b",), }\n",
        "a structured type": b"{'descr': [('a', '<f4', (1000000000,))], 'fortran_order': False, 'shape': (1,), }\n",
        "marks": b"{'descr': '" + MARKS.encode() + b"', 'fortran_order': False, 'shape': (1,), }\n",
        "operators": b"{'descr': '<f4', 'fortran_order': False, 'shape': (9**9**9,), }\n",
        "additions": b"{'descr': '<f4', 'fortran_order': False, 'shape': ("
        + b"1+" * 20_000
        + b"1,), }\n",
    }
    for name, header in headers.items():
        yield _file(f"npy: {name}", "read", "m.npy", lambda header=header: n.npy(header=header))
    yield _file(
        "npz: deflated zeros",
        "read",
        "m.npz",
        lambda: n.pack(n.Item("a.npy", n.npy(), 8, body=n.deflate(bytes(300 * MILLION)))),
    )
    many = lambda: n.pack(*(n.Item(f"a{i}.npy", b"", 0) for i in range(60_000)))
    yield _file("npz: 60,000 members", "read", "m.npz", many)
    yield _file("npz: sparse", "read", "m.npz", lambda: b"PK\3\4", 1 << 40)


def _orbax() -> Iterator[Hostile]:
    from tests.storage.orbax import corpus as o

    def case(
        name: str, change: Callable[[Path], None], action: str = "read", **options: Any
    ) -> Hostile:
        def build(root: Path) -> Path:
            import numpy as np
            import orbax.checkpoint as ocp

            path = root / "step"
            with o.quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as saver:
                saver.save(path, {"a": np.arange(4096, dtype=np.float32).reshape(64, 64)})
            change(path)
            return path

        return Hostile(f"orbax: {name}", action, build)

    def data(path: Path) -> list[Path]:
        return [
            f
            for f in o.files(path)
            if f.parent.name == "d"
            or f.parent.name.isdigit()
            or f.name.count(".") == 1
            and f.name[0].isdigit()
        ]

    def sparse(size: int) -> Callable[[Path], None]:
        return lambda path: [os.truncate(f, size) for f in data(path)] and None

    def only(name: str, size: int) -> Callable[[Path], None]:
        return lambda path: [os.truncate(f, size) for f in o.files(path) if f.name == name] and None

    def edited(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
        def edit(path: Path) -> None:
            for file in o.files(path):
                if file.name == name:
                    o.edit_json(file, change)

        return edit

    def parts(**changed: Any) -> Callable[[Any], Any]:
        return lambda value: value.update(changed)

    plain = {"use_ocdbt": False}
    v3 = {"use_ocdbt": False, "use_zarr3": True}
    yield case("good", lambda path: None)
    for size, name in ((1 << 40, "1 TB"), (1 << 33, "8 GiB"), (1 << 28, "256 MiB")):
        yield case(f"chunks of {name}", sparse(size), **plain)
        yield case(f"chunks of {name} in zarr 3", sparse(size), **v3)
        yield case(f"data files of {name}", sparse(size))
        yield case(f"a manifest of {name}", only("manifest.ocdbt", size))
        yield case(f"_METADATA of {name}", only("_METADATA", size))
        yield case(f"zarr.json of {name}", only("zarr.json", size), **v3)
        yield case(f"_sharding of {name}", only("_sharding", size))
    bytes_codec = {"name": "bytes", "configuration": {"endian": "little"}}
    transpose = lambda order: [
        {"name": "transpose", "configuration": {"order": order}},
        bytes_codec,
    ]
    codecs: dict[str, Any] = {
        "a million codecs": [bytes_codec] * 500_000,
        "17 codecs": [bytes_codec, *[{"name": "zstd", "configuration": {"level": 1}}] * 16],
        "a transpose of 0, 0": transpose([0, 0]),
        "a transpose of 5": transpose([5, 0]),
        "a transpose of 2^60": transpose([1 << 60, 0]),
        "a transpose of text": transpose("F"),
        "an unknown codec": [bytes_codec, {"name": MARKS}],
        "crc32c": [bytes_codec, *[{"name": "crc32c"}] * 15],
        "a level of 2^40": [bytes_codec, {"name": "zstd", "configuration": {"level": 1 << 40}}],
        "blosc of 2^40": [bytes_codec, {"name": "blosc", "configuration": {
            "cname": "lz4", "clevel": 5, "shuffle": "shuffle", "typesize": 4, "blocksize": 1 << 40}}],
        "nested shards": [{"name": "sharding_indexed", "configuration": {"chunk_shape": [1, 1], "codecs": [
            {"name": "sharding_indexed", "configuration": {"chunk_shape": [1, 1], "codecs": [bytes_codec],
             "index_codecs": [bytes_codec]}}], "index_codecs": [bytes_codec]}}],
        "shards of millions": [{"name": "sharding_indexed", "configuration": {
            "chunk_shape": [1, 1], "codecs": [bytes_codec], "index_codecs": [bytes_codec] * 100}}],
    }  # fmt: skip
    for name, listed in codecs.items():
        yield case(name, edited("zarr.json", parts(codecs=listed)), **v3)
    documents: dict[str, Any] = {
        "a shape of 2^60": parts(shape=[1 << 60, 64]),
        "a shape of 10^9": parts(shape=[10**9, 64]),
        "chunks of 2^40": parts(chunk_grid={"name": "regular", "configuration": {"chunk_shape": [1 << 40, 64]}}),
        "chunks of one": parts(chunk_grid={"name": "regular", "configuration": {"chunk_shape": [1, 1]}}),
        "10^18 chunks": parts(
            shape=[10**9, 10**9], chunk_grid={"name": "regular", "configuration": {"chunk_shape": [1, 1]}}
        ),
        "an odd dtype": parts(data_type=MARKS),
        "a fill value": parts(fill_value="x" * 3 * MILLION),
        "attributes": parts(attributes={"a": list(range(MILLION))}),
        "33 axes": parts(shape=[1] * 33),
    }  # fmt: skip
    for name, change in documents.items():
        yield case(name, edited("zarr.json", change), **v3)
    compressors: dict[str, Any] = {
        "a compressor of 2^40": {
            "id": "blosc",
            "cname": "lz4",
            "clevel": 5,
            "shuffle": 1,
            "blocksize": 1 << 40,
        },
        "an unknown compressor": {"id": MARKS},
        "a level of 2^40": {"id": "zstd", "level": 1 << 40},
    }
    for name, compressor in compressors.items():
        yield case(name, edited(".zarray", parts(compressor=compressor)), **plain)
    yield case("filters", edited(".zarray", parts(filters=[{"id": "delta"}] * 1000)), **plain)
    yield case("order", edited(".zarray", parts(order=[0] * 1000)), **plain)

    def leaves(count: int) -> Callable[[Any], Any]:
        def change(value: Any) -> None:
            entry = next(iter(value["tree_metadata"].values()))
            value["tree_metadata"] = {
                f"('{i}',)": {**entry, "key_metadata": [{"key": f"{i}", "key_type": 2}]}
                for i in range(count)
            }

        return change

    def levels(value: Any) -> None:
        entry = next(iter(value["tree_metadata"].values()))
        keys = [{"key": "a", "key_type": 2}] * 100_000
        value["tree_metadata"] = {str(("a",) * 100_000): {**entry, "key_metadata": keys}}

    def marked(value: Any) -> None:
        entry = next(iter(value["tree_metadata"].values()))
        value["tree_metadata"] = {
            str((MARKS,)): {**entry, "key_metadata": [{"key": MARKS, "key_type": 2}]}
        }

    yield case("250,000 leaves", edited("_METADATA", leaves(250_000)))
    yield case("190,000 leaves", edited("_METADATA", leaves(190_000)))
    yield case("100,000 levels", edited("_METADATA", levels))
    yield case("marks", edited("_METADATA", marked))
    yield case("marks (inspect)", edited("_METADATA", marked), "inspect")

    def files(path: Path) -> None:
        for i in range(3000):
            (path / f"x{i}").touch()

    yield case("3000 files", files)

    def damaged(path: Path) -> None:
        for file in o.files(path):
            if file.name == "manifest.ocdbt":
                file.write_bytes(b"\x0c\xdb\x3a\x2a" + b"\xff" * 4000)

    yield case("a damaged manifest", damaged)


def _adapters() -> Iterator[Hostile]:
    good = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
    }
    contents: dict[str, Any] = {
        "a rank of 10^9": {**good, "r": 10**9},
        "a rank of text": {**good, "r": MARKS},
        "a million targets": {**good, "target_modules": [f"m{i}" for i in range(MILLION)]},
        "a long target": {**good, "target_modules": "a" * 3 * MILLION},
        "100,000 patterns": {**good, "rank_pattern": {f"m{i}": 4 for i in range(100_000)}},
        "100,000 alphas": {**good, "alpha_pattern": {f"m{i}": 4 for i in range(100_000)}},
        "a type of marks": {**good, "peft_type": MARKS},
        "an alpha of NaN": {**good, "lora_alpha": float("nan")},
        "an alpha of 10^400": {**good, "lora_alpha": 10**400},
        "a list": [good],
        "modules to save": {**good, "modules_to_save": ["x"] * MILLION},
        "layers": {**good, "layers_to_transform": list(range(MILLION))},
        "a layers pattern": {
            **good,
            "layers_to_transform": [0],
            "layers_pattern": ["(a+)+b" * 1000],
        },
    }
    for name, content in contents.items():

        def build(root: Path, content: Any = content) -> Path:
            (root / "adapter_config.json").write_text(json.dumps(content))
            tensors, data = {}, b""
            for layer in range(2):
                for part, shape in (("lora_A", (4, 256)), ("lora_B", (256, 4))):
                    key = f"base_model.model.model.layers.{layer}.self_attn.q_proj.{part}.weight"
                    tensors[key] = {
                        "dtype": "F32",
                        "shape": shape,
                        "data_offsets": [len(data), len(data) + 4096],
                    }
                    data += bytes(4096)
            text = json.dumps(tensors).encode()
            (root / "adapter_model.safetensors").write_bytes(
                struct.pack("<Q", len(text)) + text + data
            )
            return root

        yield Hostile(f"adapter: {name}", "adapter", build)


def _programs() -> Iterator[Hostile]:
    """Exported programs: the header, and the program with right checksums."""
    import hashlib

    def exported(root: Path) -> bytes:
        import maxjax
        from maxjax import nn
        from maxjax.graph import DeviceRef, TensorType

        path = root / "m.jaxport"
        model = nn.Linear(3, 2, "float32", DeviceRef.CPU(), has_bias=True)
        maxjax.export(model, TensorType("float32", ["batch", 3], DeviceRef.CPU()), path)
        return path.read_bytes()

    def case(name: str, change: Callable[[dict[str, Any], bytes], tuple[Any, bytes]]) -> Hostile:
        def build(root: Path) -> Path:
            from maxjax.engine.export.file import MAGIC, PREFIX

            content = exported(root)
            _, length, _ = PREFIX.unpack_from(content)
            header = json.loads(content[PREFIX.size : PREFIX.size + length])
            changed, program = change(header, content[PREFIX.size + length :])
            if isinstance(changed, dict) and changed.get("nbytes") == header["nbytes"]:
                digest = hashlib.sha256(program).hexdigest()
                changed = {**changed, "nbytes": len(program), "sha256": digest}
            text = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
            prefix = PREFIX.pack(MAGIC, len(text), hashlib.sha256(text).digest())
            (root / "m.jaxport").write_bytes(prefix + text + program)
            return root / "m.jaxport"

        return Hostile(f"program: {name}", "program", build)

    def headers(**changed: Any) -> Callable[[dict[str, Any], bytes], tuple[Any, bytes]]:
        return lambda header, program: ({**header, **changed}, program)

    def serialized(**changed: Any) -> Callable[[dict[str, Any], bytes], tuple[Any, bytes]]:
        def change(header: dict[str, Any], program: bytes) -> tuple[Any, bytes]:
            import dataclasses

            from jax import export

            found = export.deserialize(bytearray(program))
            made = {k: v(found) if callable(v) else v for k, v in changed.items()}
            return header, bytes(dataclasses.replace(found, **made).serialize())

        return change

    yield case("good", lambda header, program: (header, program))
    deep: Any = "leaf"
    for _ in range(20):
        deep = {"tuple": [deep]}
    wide = {"tuple": ["leaf"] * MILLION}
    changes = {
        "a million names": headers(weights={f"w{i}": {"dtype": "float32", "aliases": []} for i in range(MILLION)}),
        "a tree of a million": headers(inputs={"tree": wide, "dtypes": ["float32"] * MILLION}),
        "a deep tree": headers(inputs={"tree": deep, "dtypes": ["float32"]}),
        "a size of 2^60": headers(nbytes=1 << 60),
        "an order of 2^60": headers(vjp_order=1 << 60),
        "marks": headers(name=MARKS, format=3, maxjax=MARKS),
        "marks in a name": headers(name=MARKS),
        "2 devices": serialized(nr_devices=2),
        "0 devices": serialized(nr_devices=0),
        "10^6 devices": serialized(nr_devices=MILLION),
        "another platform": serialized(platforms=("tpu",)),
        "no platform": serialized(platforms=()),
        "a platform of marks": serialized(platforms=(MARKS,)),
        "no module": serialized(mlir_module_serialized=b""),
        "zeros as module": serialized(mlir_module_serialized=bytes(1000)),
        "half a module": serialized(mlir_module_serialized=lambda e: e.mlir_module_serialized[:900]),
        "a module with a byte changed": serialized(
            mlir_module_serialized=lambda e: e.mlir_module_serialized[:400] + b"\xff" + e.mlir_module_serialized[401:]
        ),
        "kept variables": serialized(module_kept_var_idx=(0, 1, 2, 99)),
        "no kept variables": serialized(module_kept_var_idx=()),
        "swapped arguments": serialized(in_avals=lambda e: e.in_avals[::-1]),
        "another calling convention": serialized(calling_convention_version=9),
        "an unknown convention": serialized(calling_convention_version=60_000),
        "global constants": serialized(uses_global_constants=lambda e: not e.uses_global_constants),
        "an ordered effect": serialized(ordered_effects=()),
        "another function": serialized(fun_name=MARKS),
        "an empty program": lambda header, program: (header, b""),
        "a program of zeros": lambda header, program: (header, bytes(100_000)),
        "a program of ones": lambda header, program: (header, b"\xff" * 100_000),
        "half a program": lambda header, program: (header, program[: len(program) // 2]),
    }  # fmt: skip
    for name, change in changes.items():
        yield case(name, change)


def _paths() -> Iterator[Hostile]:
    """What is at a path: links, directories without permission, other kinds of files."""

    def case(name: str, action: str, build: Callable[[Path], Any]) -> Hostile:
        def made(root: Path) -> Path | str:
            _copy(root)
            found = build(root)
            return root if found is None else found

        return Hostile(f"path: {name}", action, made)

    def dangling(file: str) -> Callable[[Path], None]:
        def build(root: Path) -> None:
            (root / file).unlink(missing_ok=True)
            (root / file).symlink_to("../blobs/gone")

        return build

    def looping(file: str) -> Callable[[Path], None]:
        def build(root: Path) -> None:
            (root / file).unlink(missing_ok=True)
            (root / file).symlink_to(file)

        return build

    beside = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
              "chat_template.jinja", "special_tokens_map.json", "added_tokens.json", "modules.json",
              "model.safetensors", "maxjax_digests.json")  # fmt: skip
    for file in beside:
        yield case(f"{file} is a dangling link", "load", dangling(file))
        yield case(f"{file} is a looping link", "load", looping(file))

    def fifo(root: Path) -> None:
        (root / "tokenizer.json").unlink()
        os.mkfifo(root / "tokenizer.json")

    yield case("tokenizer.json is a FIFO", "load", fifo)

    def folder(root: Path) -> None:
        (root / "config.json").unlink()
        (root / "config.json").mkdir()

    yield case("config.json is a directory", "load", folder)
    yield case("no permission", "load", lambda root: (root / "x").mkdir(0) or root / "x")
    yield case(
        "a tokenizer without permission",
        "tokenizer",
        lambda root: (root / "x").mkdir(0) or root / "x",
    )
    yield case("an empty path", "load", lambda root: "")
    yield case("a name with marks", "load", lambda root: root / MARKS)
    yield case("a name of 5000 letters", "load", lambda root: root / ("x" * 5000))
    yield case("a tokenizer of a long name", "tokenizer", lambda root: root / ("x" * 5000))
