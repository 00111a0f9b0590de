"""Text token by token against the same decoded at once; stop strings against a plain search."""

import itertools
import json
import random

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from maxjax.errors import UserInputError
from maxjax.graph import TensorValue
from maxjax.text.stream import StopStrings, TextStream
from maxjax.text.stream_decoders import clean_up, cleaned, ended, steps_of, through
from maxjax.text.tokenizer.tokenizer import Tokenizer, load_tokenizer

tokenizers = pytest.importorskip("tokenizers")
files = pytest.importorskip("tests.models.gguf.tokenizer.tokenizer_files")
decoders = tokenizers.decoders

TEXTS = [
    *files.TEXTS,
    "🙂🙃👩‍👩‍👧‍👦 漢字かな 한국어 ελληνικά",
    "  two  ",
    "<|begin|> a <user> b",
    "<s> <0x41> ☃☃",
]


def sentencepiece(prefix):
    data = files.sentencepiece(prefix)
    made = tokenizers.Tokenizer.from_str(json.dumps(data))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return made


def words(decoder):
    vocab = ["a", "b</w>", "▁", "▁c", "##d", "▁▁e", ".", "'s", "do not", "<0xE2>", "<0x98>", "<0x83>", "|",
             " ", "", "<0x+F>"]  # fmt: skip
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(vocab)}, unk_token="a")
    made = tokenizers.Tokenizer(model)
    made.add_special_tokens(["<s>", "</s>"])
    made.add_tokens(["▁user", "é"])
    made.decoder = decoder
    return made


MADE = {
    "byte-level": lambda: tokenizers.Tokenizer.from_str(json.dumps(files.byte_level("llama3"))),
    "sentencepiece": lambda: sentencepiece(True),
    "sentencepiece without a space": lambda: sentencepiece(False),
    "words": lambda: words(None),
    "wordpiece": lambda: words(decoders.WordPiece()),
    "wordpiece as it is": lambda: words(decoders.WordPiece(cleanup=False)),
    "metaspace": lambda: words(decoders.Metaspace()),
    "metaspace never": lambda: words(decoders.Metaspace(prepend_scheme="never")),
    "suffix": lambda: words(decoders.BPEDecoder()),
    "bytes": lambda: words(decoders.ByteFallback()),
    "strip tokens": lambda: words(decoders.Strip("▁", 1, 1)),
    "strip all": lambda: words(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 2)])
    ),
    "strip bytes": lambda: words(
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(".", 1, 1)])
    ),
}


@pytest.fixture(scope="module", params=MADE)
def tokenizer(request):
    return Tokenizer(MADE[request.param]())


def pieces(tokenizer, ids, **options):
    stream = TextStream(tokenizer, **options)
    found = [stream.push(i) for i in ids]
    return [*found, stream.flush()]


@given(st.data())
def test_pieces_are_the_text(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=12))
    skip = data.draw(st.booleans())
    try:
        expected = tokenizer.decode(ids, skip_special=skip)
    except UserInputError:  # its Strip fails where nothing is left
        assume(False)
    assert "".join(pieces(tokenizer, ids, skip_special=skip)) == expected


@given(st.data())
def test_the_text_after_other_tokens(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    at = data.draw(st.integers(0, len(ids)))
    try:
        before, whole = tokenizer.decode(ids[:at]), tokenizer.decode(ids)
    except UserInputError:
        assume(False)
    assume(whole.startswith(before))  # a character may begin before and end after
    assert "".join(pieces(tokenizer, ids[at:], before=ids[:at])) == whole[len(before) :]


def test_the_usual_decoders_are_known(tokenizer):
    assert steps_of(tokenizer._backend) is not None


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece", "sentencepiece without a space"])
def test_texts_come_back_in_whole_characters(name):
    tokenizer = Tokenizer(MADE[name]())
    for text in TEXTS:
        ids = tokenizer.encode(text)
        found = pieces(tokenizer, ids)
        assert "".join(found) == tokenizer.decode(ids), text
        assert not any("\ufffd" in piece for piece in found), text


def test_nothing_waits_longer_than_it_must():
    tokenizer = Tokenizer(MADE["byte-level"]())
    ids = tokenizer.encode("plain words here")
    *found, last = pieces(tokenizer, ids)
    shown = ""
    for i, piece in enumerate(found, 1):
        shown += piece
        assert shown == tokenizer.decode(ids[:i])
    assert last == ""


def test_a_broken_character_comes_at_the_end_or_when_it_is_certain():
    tokenizer = Tokenizer(MADE["byte-level"]())
    emoji = tokenizer.encode("𝔘")[1:]
    assert len(emoji) > 1
    assert pieces(tokenizer, emoji[:-1])[-1] == "\ufffd"
    a = tokenizer.encode("a")[1:]
    assert pieces(tokenizer, [*emoji[:-1], *a])[-2] == "\ufffda"


def test_bert(minilm):
    tokenizer = load_tokenizer(minilm)
    draw = random.Random(1)
    for text in [*TEXTS, "It's 5 o'clock, isn't it? We do not know."]:
        ids = tokenizer.encode(text) + draw.choices(range(tokenizer.vocab_size), k=5)
        for skip in (True, False):
            whole = tokenizer.decode(ids, skip_special=skip)
            assert "".join(pieces(tokenizer, ids, skip_special=skip)) == whole


def test_a_decoder_that_is_not_known_still_gives_the_text():
    made = MADE["byte-level"]()
    made.decoder = decoders.Sequence(
        [decoders.Replace(tokenizers.Regex("ZZZ"), "x"), decoders.ByteLevel()]
    )
    assert steps_of(made) is None
    tokenizer = Tokenizer(made)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        found = pieces(tokenizer, ids)
        assert "".join(found) == tokenizer.decode(ids), text
        assert not any("\ufffd" in piece for piece in found)


def test_a_decoder_that_is_not_known_loses_no_text():
    """Also where a token changes the text before it, or a part of the text is too short to be stripped."""
    space = decoders.Replace(tokenizers.Regex("▁"), " ")
    made = Tokenizer(words(decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse()])))
    ids = [made._backend.token_to_id(word) for word in ("a", "<0x+F>", "<0xE2>", "##d", "▁c", "a")]
    assert made.decode(ids) == "a\ufffd\ufffd##d ca"
    assert "".join(pieces(made, ids)) == "a\x0f\ufffd\ufffd##d ca"  # the byte 0x0F was given before
    made = Tokenizer(words(decoders.Sequence([decoders.Fuse(), space, decoders.Strip(" ", 1, 2)])))
    assert "".join(pieces(made, ids)) == made.decode(ids) == "a<0x+F><0xE2>##d ca"


def test_ids_that_are_none():
    tokenizer = Tokenizer(MADE["words"]())
    for wrong in (-1, 2**32, 2**70):
        with pytest.raises(UserInputError, match="not a token id"):
            TextStream(tokenizer).push(wrong)
        with pytest.raises(UserInputError, match="not a token id"):
            tokenizer.decode([wrong])
    for wrong in ("12", [1.5], [[1, 2]], [None]):
        with pytest.raises(TypeError, match="a token id must be an integer"):
            tokenizer.decode(wrong)
    assert tokenizer.decode(np.array([1, 2])) == tokenizer.decode([1, 2]) != ""
    assert tokenizer.decode([TensorValue(np.array(1)), np.array(2)]) == tokenizer.decode([1, 2])
    stream = TextStream(tokenizer)
    assert stream.push(10**6) == "" and stream.flush() == "" and stream.flush() == ""
    with pytest.raises(UserInputError, match="has been flushed"):
        stream.push(0)


# --- stop strings -------------------------------------------------------------------------------


def first_stop(text, stops):
    """(where it begins, which): the first that is complete, the longer of two."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return end - len(stop), stop
    return None


@given(
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4),
    st.lists(st.text("ab\nc", max_size=4), max_size=8),
)
def test_the_text_before_the_first(stops, parts):
    text, watch, given_so_far = "".join(parts), StopStrings(stops), ""
    expected = first_stop(text, stops)
    seen = ""
    for part in parts:
        given_so_far += watch.push(part)
        seen += part
        if watch.stopped is None:
            held = seen[len(given_so_far) :]
            assert seen == given_so_far + held
            begins = any(stop.startswith(held) and stop != held for stop in stops)
            assert not held or begins
            # No more is held than what a stop string may begin with.
            longer = [seen[i:] for i in range(len(given_so_far)) if seen[i:]]
            assert not any(stop.startswith(tail) for stop in stops for tail in longer)
    given_so_far += watch.flush()
    if expected is None:
        assert given_so_far == text and watch.stopped is None
    else:
        assert (given_so_far, watch.stopped) == (text[: expected[0]], expected[1])
    assert watch.position == len(given_so_far)


@pytest.mark.parametrize(
    ("stops", "text", "before", "stop"),
    [
        (["abcd", "bc"], "abcx", "a", "bc"),  # the end of a longer one that does not come
        (["abcd", "bc"], "abcd", "a", "bc"),  # complete first
        (["abcde", "bcdx", "cd"], "abcd", "ab", "cd"),  # an end of an end
        (["abcd", "bx"], "abx", "a", "bx"),  # goes on from the end of a longer one
        (["aab"], "aaab", "a", "aab"),  # from its own beginning
        (["abab!", "aba?"], "ababa?", "ab", "aba?"),
        (["abc", "bc"], "xabc", "x", "abc"),  # of two that end together the longer
    ],
)
def test_stop_strings_that_share_characters(stops, text, before, stop):
    """However the text is cut, and whichever order they are given in."""
    for order in (stops, stops[::-1]):
        for cuts in itertools.product((False, True), repeat=len(text) - 1):
            watch, given = StopStrings(order), ""
            pieces = [text[0]]
            for character, cut in zip(text[1:], cuts, strict=True):
                pieces[len(pieces) - (not cut) :] = [character] if cut else [pieces[-1] + character]
            for piece in pieces:
                given += watch.push(piece)
            assert (given + watch.flush(), watch.stopped) == (before, stop), pieces


@given(st.lists(st.text(" .?!,'nmtsver", max_size=4)), st.booleans())
def test_spaces_are_cleaned_up_in_pieces_as_in_the_whole(parts, is_one):
    steps = clean_up()
    given_out = [through(steps, [part]) for part in (["".join(parts)] if is_one else parts)]
    assert "".join([*given_out, ended(steps)]) == cleaned("".join(parts))


def test_none_and_one():
    watch = StopStrings([])
    assert watch.push("abc") == "abc" and watch.stopped is None
    watch = StopStrings("stop")
    assert watch.push("a st") + watch.push("op b") == "a " and watch.stopped == "stop"
    assert watch.push("more") == "" and watch.flush() == "" and watch.position == 2


@pytest.mark.parametrize(("stops", "error"), [([""], UserInputError), ([3], TypeError)])
def test_stop_strings_that_are_none(stops, error):
    with pytest.raises(error, match="stop string"):
        StopStrings(stops)
