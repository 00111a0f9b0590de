"""The training text of the tiny model: small sums, numbers in words, short stories, a little talk.

A turn is a question and an answer. The tokenizer writes turns one after the other as
``question, newline, answer, <|endoftext|>``: a bare question and a chat are the same text. A turn
without a question is plain text to be continued.

A tenth of the pairs of numbers is held out: no sum or difference of the two, in either order, in
digits or in words, is ever in a turn.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

LARGEST = 99  # the largest number that is added or subtracted
_ONE_IN = 10

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    " sixteen seventeen eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


class Turn(NamedTuple):
    """A question and its answer; the question is "" for plain text."""

    question: str
    answer: str


class Sum(NamedTuple):
    """``a + b`` or ``a - b``."""

    a: int
    sign: str
    b: int

    @property
    def value(self) -> int:
        return self.a + self.b if self.sign == "+" else self.a - self.b


# --- sums -----------------------------------------------------------------------------------

# Phrases for both "+" and "-"; {s} is the sign, {w} the word for it.
_BOTH = (
    "What is {a} {s} {b}?",
    "What is {a} {w} {b}?",
    "what is {a} {s} {b}",
    "{a} {s} {b}",
    "{a} {s} {b} =",
    "{a} {s} {b} = ?",
    "{a}{s}{b}",
    "{a}{s}{b}=",
    "{a} {w} {b}",
    "What's {a} {s} {b}?",
    "How much is {a} {s} {b}?",
    "How much is {a} {w} {b}?",
    "Calculate {a} {s} {b}.",
    "Compute {a} {s} {b}",
    "Can you tell me what {a} {s} {b} is?",
    "Please tell me: what is {a} {w} {b}?",
)
PHRASES = {
    "+": (*_BOTH, "Add {a} and {b}.", "What is the sum of {a} and {b}?", "Please add {a} to {b}."),
    "-": (*_BOTH, "Subtract {b} from {a}.", "Take {b} away from {a}."),
}
_SPOKEN = (
    "What is {a} {w} {b}?",
    "what is {a} {w} {b}",
    "What's {a} {w} {b}?",
    "How much is {a} {w} {b}?",
    "{a} {w} {b}",
)
_WORDS = {"+": "plus", "-": "minus"}


def held_out(a: int, b: int) -> bool:
    """Whether sums and differences of these two are kept for the test.

    Example:
        >>> held_out(37, 48), held_out(48, 37), held_out(37, 47)
        (True, True, False)
    """
    low, high = sorted((a, b))
    return zlib.crc32(f"maxjax {low} {high}".encode()) % _ONE_IN == 9


def number_words(n: int) -> str:
    """A number from -999 to 999 in English.

    Example:
        >>> number_words(0), number_words(48), number_words(-118)
        ('zero', 'forty-eight', 'minus one hundred and eighteen')
    """
    if n < 0:
        return f"minus {number_words(-n)}"
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10 - 2] + (f"-{ONES[n % 10]}" if n % 10 else "")
    return f"{ONES[n // 100]} hundred" + (f" and {number_words(n % 100)}" if n % 100 else "")


def digits_turn(task: Sum, phrase: str) -> Turn:
    """A sum in digits, asked in the words of one of ``PHRASES``.

    Example:
        >>> digits_turn(Sum(3, "-", 4), "What is {a} {w} {b}?")
        Turn(question='What is 3 minus 4?', answer='3 - 4 = -1')
    """
    a, sign, b = task
    question = phrase.format(a=a, b=b, s=sign, w=_WORDS[sign])
    return Turn(question, f"{a} {sign} {b} = {task.value}")


def words_turn(task: Sum, phrase: str) -> Turn:
    """A sum in words."""
    a, word, b = number_words(task.a), _WORDS[task.sign], number_words(task.b)
    return Turn(phrase.format(a=a, b=b, w=word), f"{a} {word} {b} is {number_words(task.value)}")


def unseen(sign: str) -> list[Sum]:
    """All held-out sums, or differences."""
    numbers = range(LARGEST + 1)
    return [Sum(a, sign, b) for a in numbers for b in numbers if held_out(a, b)]


def _draw(rng: random.Random) -> Sum:
    """A sum that is not held out."""
    while True:
        # Pairs of small numbers are rare and learned last, so they are drawn more often.
        a, b = (rng.randint(0, 19 if rng.random() < 0.2 else LARGEST) for _ in range(2))
        sign = rng.choice("++-")
        if sign == "-" and a < b and rng.random() < 0.5:
            a, b = b, a
        if not held_out(a, b):
            return Sum(a, sign, b)


def _digits(rng: random.Random) -> Turn:
    task = _draw(rng)
    return digits_turn(task, rng.choice(PHRASES[task.sign]))


def _spoken(rng: random.Random) -> Turn:
    return words_turn(_draw(rng), rng.choice(_SPOKEN))


def _naming(rng: random.Random) -> Turn:
    n = rng.randint(0, 2 * LARGEST)
    if rng.random() < 0.5:
        return Turn(f"Write {n} in words.", number_words(n))
    return Turn(f"Write {number_words(n)} in digits.", str(n))


# --- talk -----------------------------------------------------------------------------------

_TALK = (
    (("Hello!", "Hello", "hello", "Hi", "Hi!", "Hi there!"), "Hello! Ask me for a sum or a story."),
    (("Good morning!", "Good evening!"), "Good day! Ask me for a sum or a story."),
    (("How are you?", "How do you do?"), "I am well, thank you."),
    (
        ("Who are you?", "What are you?", "Tell me about yourself.", "What is your name?"),
        "I am the tiny model of maxjax. I add and subtract small numbers and tell short stories.",
    ),
    (
        ("What can you do?", "Help", "Help me.", "help", "What do you know?"),
        "I add and subtract numbers below one hundred, and I tell short stories.",
    ),
    (("Thank you.", "Thanks!", "Thank you!", "thanks"), "You are welcome."),
    (("Goodbye!", "Bye", "Bye!", "See you."), "Goodbye!"),
)
_OTHER = (
    "What is the capital of {x}?", "Who is {x}?", "Where is {x}?", "Why is {x} so big?",
    "Write a poem about {x}.", "What do you think of {x}?", "How do I get to {x}?",
)  # fmt: skip
_THINGS = (
    "France Italy Japan London Paris Rome Mars music water time love money food the_moon the_sea"
    " the_world the_sky the_king my_mother a_computer history art the_weather school"
).split()
_UNKNOWN = "I do not know. I can only do small sums and tell short stories."


def _talk(rng: random.Random) -> Turn:
    if rng.random() < 0.3:
        thing = rng.choice(_THINGS).replace("_", " ")
        return Turn(rng.choice(_OTHER).format(x=thing), _UNKNOWN)
    questions, answer = rng.choice(_TALK)
    return Turn(rng.choice(questions), answer)


# --- stories --------------------------------------------------------------------------------

_ANIMALS = "cat dog fox bird mouse bear rabbit frog horse duck".split()
_KINDS = "little brave clever small happy".split()
_NAMES = "Tom Mia Max Lily Ben Anna Sam Zoe".split()
_PLACES = ("in the forest", "by the river", "in a small house", "on a hill", "near the sea")
_FOUND = "ball hat book red_apple key flower".split()
_GIFTS = "friend mother sister brother".split()
_ASKING = (
    "Tell me a story about a {animal}.", "Tell me a story about a {kind} {animal}.",
    "A story about a {animal}, please.",
)  # fmt: skip
_STORY = (
    "Once upon a time there was a {kind} {animal} called {name}. {name} lived {place}. One day"
    " {name} found a {thing}. {name} gave the {thing} to a {other}. They were happy."
)
_PLAIN = (
    "The {kind} {animal} lived {place}.",
    "The {animal} found a {thing} {place}.",
    "{name} is a {kind} {animal}.",
    "{name} and the {animal} went home.",
)


def _slots(rng: random.Random) -> dict[str, str]:
    return {
        "animal": rng.choice(_ANIMALS),
        "kind": rng.choice(_KINDS),
        "name": rng.choice(_NAMES),
        "place": rng.choice(_PLACES),
        "thing": rng.choice(_FOUND).replace("_", " "),
        "other": rng.choice(_GIFTS),
    }


def _story(rng: random.Random) -> Turn:
    slots = _slots(rng)
    known = rng.random() < 0.8
    question = rng.choice(_ASKING) if known else rng.choice(("Tell me a story.", "tell me a story"))
    text = _STORY if "{kind}" in question or not known else _STORY.replace("{kind}", "little")
    return Turn(question.format(**slots), text.format(**slots))


def _plain(rng: random.Random) -> Turn:
    return Turn("", rng.choice((*_PLAIN, _STORY)).format(**_slots(rng)))


# The kinds of turns, with their shares.
KINDS: dict[Callable[[random.Random], Turn], float] = {
    _digits: 0.62,
    _spoken: 0.2,
    _naming: 0.06,
    _talk: 0.07,
    _story: 0.03,
    _plain: 0.02,
}


def turns(seed: int) -> Iterator[Turn]:
    """An endless sequence of turns; the same for the same seed."""
    rng = random.Random(seed)
    kinds, often = list(KINDS), list(KINDS.values())
    while True:
        yield from (kind(rng) for kind in rng.choices(kinds, often, k=256))


def stories(seed: int, count: int, end: str = "<|endoftext|>") -> str:
    """Stories as the model reads them; training draws from the seeds 1, 2 and 3.

    Example:
        >>> stories(0, 1)[:59]
        'Once upon a time there was a small rabbit called Tom. Tom l'
    """
    rng = random.Random(seed)
    return "".join(_STORY.format(**_slots(rng)) + end for _ in range(count))
