"""Texts to embed: of every length from nothing to 256 tokens, the same on every machine."""

import random

# Each is one token of BERT's vocabulary, so a text of n of them has n + 2 tokens.
WORDS = """time year people way day man thing woman life child world school state family student
group country problem hand part place case week company system program question work number
night point home water room mother area money story fact month lot right study book eye job
word business issue side kind head house service friend father power hour game line end member
law car city community name president team minute idea body information back parent face
others level office door health person art war history party result change morning reason
research girl guy moment air teacher force education the of and a to in is that it was for on
are with as his they at be this from have or by one had not but what all were when we there
can an your which their said if do will each about how up out them then she many some so
these would other into has more her two like him see could no make than first been its who
now my made over did down only find use may long little very after words called just where
most know get through much before go good new write our me too any same tell does set three
want air well also play small end put read large add even land here must big high such follow
act why ask men turn move need animal point""".split()

# What a list of plain words does not have.
ODD = [
    "",
    " ",
    "a",
    "Hello, world!",
    "naïve café façade Ångström Übergröße",
    "我爱北京天安门。",
    "Привет, как дела?",
    "مرحبا بالعالم",
    "emoji 🙂🚀 and a flag 🇫🇷, then a family 👩‍👩‍👧",
    "x = [i**2 for i in range(10)] if y != 3.14e-5 else {'k': None}",
    "antidisestablishmentarianism floccinaucinihilipilification pneumonoultramicroscopic",
    "https://example.org/a/b?c=d&e=f#g user@example.org 1,234,567.89 2026-11-21T00:00:00Z",
    "tabs\tand\nnew\r\nlines   and   runs of blanks",
    "[CLS] [SEP] [MASK] [PAD] are tokens of their own",
    "zero\u200bwidth and soft\u00adhyphen and \u202eright to left",
    "A" * 150,
]


def sentences(count: int = 240, longest: int = 256, seed: int = 0) -> list[str]:
    """`count` texts: the odd ones, then plain words, of 3 to `longest` tokens evenly spread."""
    rng = random.Random(seed)
    plain = count - len(ODD)
    spread = [3 + round(i * (longest - 3) / (plain - 1)) for i in range(plain)]
    rng.shuffle(spread)
    return ODD + [" ".join(rng.choices(WORDS, k=tokens - 2)) for tokens in spread]
