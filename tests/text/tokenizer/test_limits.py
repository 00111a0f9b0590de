"""A tokenizer.json that multiplies: refused by its size; what is published passes."""

import base64
import json
import re
import resource
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxjax.engine.generate.defaults import read_defaults
from maxjax.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointLimitError,
    UserInputError,
)
from maxjax.models.gguf.tokenizer.splits import SPLITTINGS
from maxjax.storage.limits import Limits
from maxjax.text.tokenizer import expressions, limits
from maxjax.text.tokenizer.expressions import check_expressions, matches_something
from maxjax.text.tokenizer.limits import check_tokenizer
from maxjax.text.tokenizer.tokenizer import gguf_tokenizer, load_tokenizer
from tests.models.gguf.tokenizer.tokenizer_files import BYTE_LEVEL, byte_level, sentencepiece

BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
AA = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
MARK = {"SpecialToken": {"id": "x", "type_id": 0}}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def document(**parts):
    usual = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    return {"version": "1.0", "truncation": None, "padding": None, **dict.fromkeys(usual),
            "added_tokens": [], "model": BPE, **parts}  # fmt: skip


def replace(old, new):
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def sequence(part, steps):
    inner = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders",
             "post_processor": "processors"}[part]  # fmt: skip
    return {part: {"type": "Sequence", inner: steps}}


def regex(pattern, part="pre_tokenizer"):
    if part == "pre_tokenizer":
        more = {"type": "Split", "behavior": "Isolated", "invert": False}
    else:
        more = {"type": "Replace", "content": " "}
    return {part: {"pattern": {"Regex": pattern}, **more}}


def template(pieces, ids=1, count=1):
    special = {"x": {"id": "x", "ids": [0] * ids, "tokens": ["a"] * ids}}
    step = {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": [TEXT],
        "special_tokens": special,
    }
    return sequence("post_processor", [step] * count) if count > 1 else {"post_processor": step}


def unigram(pieces):
    return {
        "model": {
            "type": "Unigram",
            "unk_id": 0,
            "vocab": [["<unk>", 0.0], *([p, -1.0] for p in pieces)],
        }
    }


def wordpiece(**more):
    return {"model": {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##",
                      "max_input_chars_per_word": 100, "vocab": {"a": 0}, **more}}  # fmt: skip


def token(i, content, special=True):
    return {"id": i, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": not special, "special": special}  # fmt: skip


def charsmap(longest):
    """A table of SentencePiece's with no way to it, and one entry."""
    blob = (4).to_bytes(4, "little") + bytes(4) + longest.encode() + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(blob).decode()}


def nested(step, depth):
    for _ in range(depth):
        step = {"type": "Sequence", "normalizers": [step, step]}
    return {"normalizer": step}


def numbered(case, count):
    """A number of tokens, in the vocabulary or in addition to it."""
    if case == "many_added":
        return {"added_tokens": [token(3 + i, f"<{i}>") for i in range(count)]}
    return {"model": {**BPE, "vocab": {f"t{i}": i for i in range(count)}, "merges": []}}


# Those of millions of tokens are made by the tests that need them.
HOSTILE = {
    "replaces": sequence("normalizer", [AA] * 30),
    "replaces_nested": nested(AA, 5),
    "replaces_by_regex": sequence("normalizer", [{**AA, "pattern": {"Regex": "a"}}] * 10),
    "replaces_of_nothing": sequence(
        "normalizer", [{**AA, "pattern": {"Regex": "b*"}, "content": "b"}] * 10
    ),
    "one_long_replace": {"normalizer": {**AA, "content": "a" * 1000}},
    "what_unicode_takes_apart": sequence(
        "normalizer",
        [{**AA, "pattern": {"String": "\u0644"}, "content": "\ufdfa"}, {"type": "NFKC"}] * 6,
    ),
    "prepends": sequence("normalizer", [{"type": "Prepend", "prepend": "a"}] * 20),
    "charsmap": sequence("normalizer", [charsmap("a" * 600)]),
    "bytes_of_bytes": sequence("pre_tokenizer", [BYTES] * 20),
    "normalizer_times_pre_tokenizer": sequence("normalizer", [AA] * 8)
    | sequence("pre_tokenizer", [BYTES] * 2),
    "metaspaces": sequence(
        "pre_tokenizer",
        [
            {"type": "Metaspace", "replacement": chr(i), "prepend_scheme": "always"}
            for i in range(65, 90)
        ],
    ),
    "decoder": sequence("decoder", [AA] * 30),
    "decoder_suffix": sequence("decoder", [{"type": "BPEDecoder", "suffix": ""}] * 30),
    "steps": sequence("normalizer", [{"type": "Lowercase"}] * 20_000),
    "step_texts": sequence(
        "normalizer", [{**AA, "content": "", "pattern": {"String": "b" * 200_000}}] * 6
    ),
    "template": template([MARK] * 20_000 + [TEXT], ids=1000),
    "template_text_twice": template([TEXT] * 1000),
    "template_chain": template([TEXT, TEXT], count=30),
    "template_of_one_piece": template([MARK, TEXT], ids=200_000),
    "loops": regex("(a+)+$"),
    "loops_in_a_normalizer": regex("(?:a*b?)*c", "normalizer"),
    "loops_deep": regex("((((a+))))+$"),
    "loops_after_a_comment": regex("(?#c)(a+)+$"),
    "loops_after_a_bracket_in_a_comment": regex(r"(?#\))(a+)+$"),
    "loops_of_a_name_in_quotes": regex("(?'n'a+)+$"),
    "loops_between_spaces": regex("(?x)(a+) +$"),
    "loops_after_a_comment_on_a_line": regex("(?ix: # [\n (a+) +)$"),
    "loops_under_a_condition": regex("(a)?(?(1)a+|b)+$"),
    "loops_before_a_call": regex("(a+(*SKIP))+$"),
    "loops_after_a_class": regex("[ab](c+)+$"),
    "loops_after_a_bracket_in_a_class": regex("[^](](c+)+$"),
    "loops_counted": regex("(?:a{0,5000}){0,5000}b"),
    "loops_in_a_look": regex("b(?=(a+)+c)"),
    "loops_in_a_row": regex("a*a*a*a*a*[cd]"),
    "calls_itself": regex(r"(?<x>a\g<x>?b?)"),
    "long_regex": regex("|".join(f"w{i}" for i in range(10_000))),
    "long_word": wordpiece(max_input_chars_per_word=10**9),
    "long_prefix": wordpiece(continuing_subword_prefix="#" * 1_000_000),
    "long_suffix": {"model": {**BPE, "end_of_word_suffix": "x" * 1_000_000}},
    "long_piece": unigram(["a" * 1_000_000]),
    "long_pieces": lambda: unigram([f"{i}" + "x" * 1000 for i in range(5000)]),
    "many_tokens": lambda: numbered("many_tokens", (1 << 20) + 1),
    "many_added": lambda: numbered("many_added", (1 << 17) + 1),
    "long_added": {"added_tokens": [token(i, f"<{i}>" + "x" * 5000) for i in range(1000)]},
    "long_added_normalized": sequence("normalizer", [AA] * 8)
    | {"added_tokens": [token(i, f"<{i}>" + "a" * 500, False) for i in range(100)]},
}


def hostile(case):
    parts = HOSTILE[case]
    return json.dumps(document(**(parts() if callable(parts) else parts)))


# Files of a million tokens take seconds to be written and read.
BOUNDS = {"many_tokens": ("_MAX_TOKENS", 1 << 20), "many_added": ("MAX_ADDED", 1 << 17)}


@pytest.mark.parametrize("case", BOUNDS)
def test_numbers_of_tokens_are_bounded(tmp_path, case, monkeypatch):
    """With smaller bounds: one token more than they allow, and as many."""
    name, bound = BOUNDS[case]
    assert getattr(limits, name) == bound
    monkeypatch.setattr(limits, name, 100)
    for count in (100, 101):
        (tmp_path / "tokenizer.json").write_text(json.dumps(document(**numbered(case, count))))
        if count == 100:
            assert load_tokenizer(tmp_path) is not None
        else:
            with pytest.raises(CheckpointLimitError) as caught:
                load_tokenizer(tmp_path)
            assert "tokenizer=False" in caught.value.hint


@pytest.mark.parametrize("content", [b"\n" * (1 << 20) + b"\n", b"x" * (16 << 20) + b"y"])
@pytest.mark.parametrize("file", ["vocab.txt", "merges.txt"])
def test_lists_of_words_and_merges_are_bounded(tmp_path, file, content):
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    kind = "GPT2"
    if file == "vocab.txt":
        (tmp_path / "vocab.json").unlink()
        kind = "Bert"
    (tmp_path / file).write_bytes(content)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": f"{kind}Tokenizer"})
    )
    with pytest.raises(CheckpointLimitError, match="too long|too many lines") as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value.path).endswith(file)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.extra] * (case in BOUNDS)) for case in HOSTILE]
)
def test_hostile_files_are_refused(tmp_path, case):
    (tmp_path / "tokenizer.json").write_text(hostile(case))
    with pytest.raises(CheckpointLimitError) as caught:
        load_tokenizer(tmp_path, limits=Limits(json_values=1 << 22))  # as many as all cases have
    error = caught.value
    assert error.path == str(tmp_path / "tokenizer.json") and "tokenizer=False" in error.hint
    assert "\n" not in str(error) and len(str(error)) < 600


def table(size, rest):
    blob = size.to_bytes(4, "little") + rest
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(blob).decode()}


BROKEN = {
    "a trie of 4 GiB": {"normalizer": table(0xFFFFFFFC, bytes(100))},
    "a trie of one byte too many": sequence("normalizer", [table(104, bytes(100))]),
    "an odd trie": {"normalizer": table(5, bytes(100))},
    "no trie": {"normalizer": table(0, bytes(100))},
    "three bytes": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "no base64": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "****"}},
    # The package takes these for what they look like, so that no limit would apply.
    "a replacement without a type": {"normalizer": {"pattern": {"String": "a"}, "content": "aa"}},
    "a sequence without a type": {"normalizer": {"normalizers": [{"prepend": "a"}] * 2}},
    "a type that is no text": {"pre_tokenizer": {"type": ["ByteLevel"]}},
}


@pytest.mark.parametrize("case", BROKEN)
def test_steps_that_the_package_would_trust_are_refused_before_it_sees_them(
    tmp_path, case, monkeypatch
):
    (tmp_path / "tokenizer.json").write_text(json.dumps(document(**BROKEN[case])))
    monkeypatch.setattr("tokenizers.Tokenizer", None)
    with pytest.raises(CheckpointFormatError) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.path == str(tmp_path / "tokenizer.json")


def test_lists_of_a_gguf_file_are_counted_before_anything_is_built_from_them():
    """A table of 90 MB stays an array; a list of more tokens than any model has is not looked at."""
    words = {"model": "t5", "tokens": ["<unk>", "a"], "scores": np.zeros(2, "f4")}

    def build(**changed):
        keys = {**words, **changed}
        return gguf_tokenizer({f"tokenizer.ggml.{key}": value for key, value in keys.items()})

    assert build(unknown_token_id=0).encode("a") is not None
    many = np.zeros(90_000_000, np.uint8)
    for key, value in {
        "precompiled_charsmap": many, "tokens": [""] * ((1 << 20) + 1), "merges": [""] * ((1 << 20) + 1),
        "bos_token_id": many,
    }.items():  # fmt: skip
        with pytest.raises(CheckpointLimitError, match=f"tokenizer.ggml.{key}' has too many items"):
            build(**{key: value})
    count = (1 << 17) + 1
    some = {"tokens": [f"{i}" for i in range(count)], "scores": np.zeros(count, "f4")}
    with pytest.raises(CheckpointLimitError, match="too many items"):
        build(**some, token_type=np.full(count, 4, "i4"))
    for key in ("scores", "token_type"):
        with pytest.raises(CheckpointFormatError, match="another length"):
            build(**{key: many})
    with pytest.raises(CheckpointFormatError, match="not a table"):
        build(precompiled_charsmap=np.array([252, 255, 255, 255, 0], np.uint8))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.context_length", np.arange(2)), ("llama.context_length", "long"), ("llama.context_length", -1),
        ("general.architecture", 3), ("tokenizer.ggml.model", 3), ("tokenizer.ggml.tokens", "abc"),
        ("tokenizer.chat_template", 3), ("tokenizer.ggml.bos_token_id", "a"),
    ],
)  # fmt: skip
def test_keys_of_a_gguf_file_have_their_kinds(key, value):
    good = {"general.architecture": "llama", "llama.context_length": 9, "tokenizer.ggml.model": "t5",
            "tokenizer.ggml.tokens": ["<unk>", "a"], "tokenizer.ggml.scores": np.zeros(2, "f4")}  # fmt: skip
    assert gguf_tokenizer(good).max_length == 9
    with pytest.raises(CheckpointFormatError, match=re.escape(key)):
        gguf_tokenizer({**good, key: value})


def test_a_tokenizer_in_a_gguf_file_is_bounded_as_well():
    text = hostile("replaces")
    with pytest.raises(CheckpointLimitError):
        gguf_tokenizer({"tokenizer.ggml.model": "gpt2", "tokenizer.huggingface.json": text})


MEASURE = """
import os, resource, sys, time
import tokenizers
from maxjax.text.tokenizer.tokenizer import load_tokenizer
from maxjax.errors import CheckpointLimitError
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
for path in sys.argv[1:]:
    if not os.fork():
        before, began = peak(), time.process_time()
        try:
            load_tokenizer(path)
        except CheckpointLimitError:
            print(path, time.process_time() - began, peak() - before, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.extra
def test_refusal_takes_a_second_and_200_megabytes(tmp_path):
    """Each in a process of its own, whose time and memory are its alone; 20 MB of JSON take longer."""
    sizes = {}
    for case in HOSTILE:
        (tmp_path / case).mkdir()
        text = hostile(case)
        (tmp_path / case / "tokenizer.json").write_text(text)
        sizes[str(tmp_path / case)] = len(text)
    run = [sys.executable, "-c", MEASURE, *sizes]
    found = subprocess.run(run, capture_output=True, text=True, timeout=300)
    lines = [line.split() for line in found.stdout.splitlines()]
    assert len(lines) == len(HOSTILE), found.stderr[-500:]
    for path, seconds, megabytes in lines:
        assert float(seconds) < (1 if sizes[path] < 10 << 20 else 5), (path, seconds)
        assert float(megabytes) < max(200, 20 * sizes[path] / 1e6), (path, megabytes)


# --- beside it ------------------------------------------------------------------------------------

MANY = {
    "tokenizer_config.json": lambda: {"additional_special_tokens": list(tokens())},
    "special_tokens_map.json": lambda: {"additional_special_tokens": list(tokens())},
    "added_tokens.json": lambda: {content: i for i, content in enumerate(tokens())},
}
LONG = {
    "tokenizer_config.json": lambda: {"extra_special_tokens": ["x" * 5_000_000]},
    "special_tokens_map.json": lambda: {"eos_token": "x" * 5_000_000},
    "added_tokens.json": lambda: {"x" * 5_000_000: 3},
}


def tokens():
    return (f"<{i}>" for i in range(300_000))


@pytest.mark.sampled
@pytest.mark.parametrize("content", [MANY, LONG], ids=["many", "long"])
@pytest.mark.parametrize("name", MANY)
def test_hostile_files_beside_it(tmp_path, name, content):
    (tmp_path / "tokenizer.json").write_text(json.dumps(document()))
    (tmp_path / name).write_text(json.dumps(content[name]()))
    with pytest.raises(CheckpointLimitError):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "stops", [["x" * (1 << 17)], [f"{i}" for i in range(100_000)]], ids=["long", "many"]
)
def test_hostile_stop_strings(tmp_path, stops):
    (tmp_path / "generation_config.json").write_text(json.dumps({"stop_strings": stops}))
    with pytest.raises(CheckpointError, match="stop_strings"):
        read_defaults(tmp_path)


# --- what is published ----------------------------------------------------------------------------

NFKC_LONGEST = (
    "\u0635\u0644\u0649 \u0627\u0644\u0644\u0647 \u0639\u0644\u064a\u0647 \u0648\u0633\u0644\u0645"
)
SPACES = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
WORD = {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}
QUOTES = [{"type": "Replace", "pattern": {"String": s}, "content": '"'} for s in ("``", "''")]
SIGNS = {
    "½": " 1/2",
    "…": "...",
    "©": "(c)",
    "®": "(r)",
    "€": " euro ",
    "£": " pound ",
    "™": "(tm)",
    "\u0622": "\u0627",
}
PUBLISHED = {
    "xlm-roberta": sequence("normalizer", [charsmap(NFKC_LONGEST), SPACES])
    | sequence("pre_tokenizer", [{"type": "WhitespaceSplit"}, WORD]),
    "albert": sequence(
        "normalizer",
        [
            *QUOTES,
            {"type": "NFKD"},
            {"type": "StripAccents"},
            {"type": "Lowercase"},
            charsmap(NFKC_LONGEST),
            SPACES,
        ],
    )
    | {"pre_tokenizer": WORD},
    "t5": {"normalizer": charsmap(NFKC_LONGEST), "pre_tokenizer": WORD},
    "gemma": {"normalizer": replace(" ", "▁")},
    "llama": sequence("normalizer", [{"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")]),
    "clip": sequence(
        "normalizer",
        [
            {"type": "NFC"},
            {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
            {"type": "Lowercase"},
        ],
    )
    | sequence(
        "pre_tokenizer",
        [
            {
                "type": "Split",
                "pattern": {"Regex": r"'s|'t|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"},
                "behavior": "Removed",
                "invert": True,
            },
            {**BYTES, "add_prefix_space": True},
        ],
    ),
    "letters": sequence(
        "normalizer", [replace(chr(i), f"({chr(i - 0x500)})") for i in range(0x600, 0x700)]
    ),
    "signs": sequence("normalizer", [replace(*pair) for pair in SIGNS.items()]),
    "whisper": template([*[MARK] * 4, TEXT, MARK]),
    "speech": {"added_tokens": [token(3 + i, f"<|speech_{i}|>") for i in range(65_536)]},
    "words": wordpiece(max_input_chars_per_word=200),
}
PATTERNS = [
    *sorted({pattern for kind in SPLITTINGS.values() for pattern in kind.patterns}),
    r"(?=(\d{3})+(?!\d))", r"^(\d|\d\d)(?=(\d{3})*\b)", r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))", r"(?<=\d)(?=(?:\d{3})+\b)",
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{M}&&[^\p{Han}]]+(?i:'s|'t)?",
    r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>|\*|\$|\%[0-9]{2}|[0-9])",
    r"(?:\p{L}\p{M}*)+", r"[A-Z][a-z]*", r"(?>a+)+", "(?#comment(a+)+)a", "[](a+)+]x", r"\(a+\)+",
    "(?i)ex (?-x:x)+ (?#(?x)a+)+", "(?<x>x+)",
]  # fmt: skip


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_ones_pass(case):
    check_tokenizer(document(**PUBLISHED[case]))


def test_those_that_are_trained_here_pass():
    for name in BYTE_LEVEL:
        check_tokenizer(byte_level(name))
    check_tokenizer(sentencepiece())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_published_patterns_pass(pattern):
    check_expressions([("pre_tokenizer", pattern)])


@pytest.mark.parametrize(
    "pattern", ["(", ")", "a)", "[", "[a", "\\", "a{", "a{,}", "(?", "(?<", "*", "", "{5}"]
)
def test_what_is_no_pattern_is_left_to_others(pattern):
    check_expressions([("pre_tokenizer", pattern)])


SLOW = {
    "letters_that_may_be_absent": ".?" * 28 + "." * 28 + "~",
    "a_bounded_loop_in_a_bounded_loop": "(?:.{0,64}){0,64}~",
    "alternatives_that_overlap": "(?:a|[ab])*[cd]",
    "one_alternative_is_others": "(?:q|w|e|r|t|y|qwerty)+Z",
    "an_alternative_deep_inside": "(?:a|(?:b|(?:c|(?:d|(?:e|ab)))))+Z",
    "after_much_that_must_match": "secretprefix[0-9]{3}(?:a|aa)+Z",
    "in_a_look_behind": "(?<=xyz)(?:b|bb)+!",
    "in_a_look_ahead": "(?=(?:a|aa)+b)a",
    "letters_of_one_script": r"(?:\p{Ethiopic}|[ሀ-ᎀ])+!",
    "loops_in_a_row": "a.*b.*c.*d.*e.*f",
    "long_pieces": "(?:a{50}|a{51})+b",
    "refers_to_a_group": r"(a*)+\1b",
    "refers_to_a_name": r"(?<n>a|aa)+\k<n>b",
    "too_large": "((((a{1000}){1000}){1000}){1000})",
    "too_deep": "(" * 40 + "a" + ")*" * 40,
    "too_many_quantifiers": "".join(f"x{i}?" for i in range(100)),
}


@pytest.mark.parametrize("case", SLOW)
def test_expressions_that_are_slow_for_a_text_are_refused(case):
    for _ in range(2):  # the second time by what is remembered
        with pytest.raises(
            CheckpointLimitError, match="'decoder' has an expression that is refused.*at most"
        ):
            check_expressions([("pre_tokenizer", r"\s+"), ("decoder", SLOW[case])])


def test_published_and_known_expressions_start_no_process(monkeypatch):
    own = r"[a-z]+(?=\d{1,3})|\p{N}"
    check_expressions([("decoder", own)])
    monkeypatch.setattr(expressions.subprocess, "run", lambda *_, **__: pytest.fail("a process"))
    check_expressions([("decoder", p) for p in [own, " {2,}", *SPLITTINGS["tekken"].patterns]])


@given(st.text(r"()[]{}?*+|\^$.,-:=!<>'#&abkgpx019²\n", max_size=30))
def test_whatever_an_expression_is_it_is_parsed_or_refused(pattern):
    assert matches_something(pattern) in (True, False)


def test_the_number_of_expressions_is_bounded():
    with pytest.raises(
        CheckpointLimitError, match="'decoder' and others have too many .*at most 16"
    ):
        check_expressions([("decoder", f"unknown{i}") for i in range(17)])


def test_patterns_with_and_without_empty_matches():
    some = [r"\s+", " {2,}", "[^x]", "(ab|c)+", r"\p{L}+", "(?i:a)b*", "a(?=b)"]
    none = ["a?", "(?=a)", "(a|)", "^", r"\b", "a*", "a|b?", r"(a?)\1", "a{0,3}", ""]
    assert all(map(matches_something, some)) and not any(map(matches_something, none))


@pytest.mark.parametrize(
    "value", [None, 3, "x", [], [3], {"type": 3}, {"type": "Sequence", "normalizers": 3}]
)
@pytest.mark.parametrize(
    "part", ["normalizer", "pre_tokenizer", "post_processor", "decoder", "model", "added_tokens"]
)
def test_what_is_broken_is_left_to_the_package(tmp_path, part, value):
    (tmp_path / "tokenizer.json").write_text(json.dumps(document(**{part: value})))
    try:
        load_tokenizer(tmp_path)
    except CheckpointError as error:
        assert not isinstance(error, CheckpointLimitError)


def test_a_text_grows_no_further_than_its_file_says(tmp_path):
    """Just under the bound: it loads, and a text takes what was counted."""
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(document(**sequence("normalizer", [AA] * 9)))
    )
    began = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert len(load_tokenizer(tmp_path).encode("a" * 100)) == 100 * 512
    assert time.perf_counter() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def test_oniguruma_gives_up_by_itself(tmp_path, monkeypatch):
    """What passes unseen: an error, and not a night."""
    monkeypatch.setitem(expressions._TRIED, "(?:a|[ab])*[cd]", "")
    (tmp_path / "tokenizer.json").write_text(json.dumps(document(**regex("(?:a|[ab])*[cd]"))))
    with pytest.raises(UserInputError, match="retry-limit"):
        load_tokenizer(tmp_path).encode("a" * 40 + "bec")
