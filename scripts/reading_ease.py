"""How easy pages are to read: `python scripts/reading_ease.py` prints Flesch's figures of README and Getting started.

For comparison it prints those of equinox's README, from the package in the tests' environment. Other files may be
named. Only prose counts: no code, headings, tables or pictures; `code` in a line is one word of one syllable.
Syllables are counted by vowels, in the same way for all. Reading ease: 206.835 - 1.015 words/sentence -
84.6 syllables/word; higher is easier, 60 to 70 is plain English.
"""

import re
import sys
from importlib.metadata import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def prose(text: str) -> list[str]:
    """The paragraphs and list items of a Markdown text, as plain prose."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"^```.*?^```\s*$", "", text, flags=re.S | re.M)
    found = []
    for part in re.split(r"\n\s*\n|\n(?=\s*[*-] )", text):
        lines = [line.strip() for line in part.splitlines() if not line.startswith("    ")]
        line = " ".join(
            line for line in lines if line and line[0] not in "#|!<" and line[:2] != "[!"
        )
        line = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line)
        line = re.sub(r"https?://\S+", "", re.sub(r"`[^`]*`", "code", line))
        if re.search(r"[A-Za-z]", line):
            found.append(line.lstrip("*- "))
    return found


def syllables(word: str) -> int:
    """The number of groups of vowels in a word, without a silent e."""
    word = word.lower()
    count = len(re.findall(r"[aeiouy]+", word))
    count -= word.endswith("e") and not re.search(r"[^aeiouy]le$", word)
    count -= bool(re.search(r"[^aeioutd]ed$", word))
    return max(count, 1)


def measure(text: str) -> tuple[int, float, float]:
    """The number of words, the mean words per sentence, and the reading ease."""
    parts = [s for line in prose(text) for s in re.split(r"(?<=[.!?:])\s+", line)]
    words = [re.findall(r"[A-Za-z][A-Za-z'’]*", part) for part in parts]
    sentences = [found for found in words if found]
    every = [word for found in sentences for word in found]
    long = len(every) / len(sentences)
    return (
        len(every),
        long,
        206.835 - 1.015 * long - 84.6 * sum(map(syllables, every)) / len(every),
    )


def main() -> None:
    """Prints a line for each page."""
    names = sys.argv[1:] or ["README.md", "docs/getting-started.md"]
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in names}
    if not sys.argv[1:]:
        texts["equinox's README"] = str(metadata("equinox").json["description"])
    for name, text in texts.items():
        count, long, ease = measure(text)
        print(f"{name}: {count} words, {long:.1f} a sentence, reading ease {ease:.0f}")


if __name__ == "__main__":
    main()
