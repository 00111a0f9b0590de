"""Runs expressions of tokenizers on texts that are made to be slow for them; a program of its own.

``expressions.py`` starts it as a process without other modules of maxjax, whose CPU time and memory the operating
system limits. Its arguments are the file of the compiled module of ``tokenizers`` and the limits. It reads a JSON list
of expressions, and writes for each a line before the first text and, if it is refused, a line with the reason.

For each quantifier, texts are drawn that lead to it, repeat what it repeats, and then go on with a letter that may not
follow. A search that tries all ways to divide such a text shows it by its time.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

# Other lengths, since what is repeated at most n times is slow only for texts of about n letters.
LENGTHS = (12, 24, 33, 50, 80, 400)
LONGEST = 400
# For what has many letters between two ways to go on.
VERY_LONG = 1500
# What an expression may take for one of the texts. At 400 letters, n² steps take a millisecond and n³ a second.
SECONDS = 0.03
COMPILING = 0.1
MOST_QUANTIFIERS = 64
DEEPEST = 30
LETTERS = (
    "".join(map(chr, range(32, 127))) + "\t\n\r\0éßñžЖяΩא中あ한ءา๑२²½Ⅷ\u0301\u00a0\u2003、…“€🙂"
)
WIDE = "".join(map(chr, [*range(0x80, 0xD800, 5), *range(0xE000, 0x10000, 5)]))


class UnsupportedExpression(Exception):
    """The reason why an expression is refused."""


@dataclass(eq=False)
class ExpressionPart:
    """A part of an expression.

    Attributes:
        kind: "letter" (a letter or a class), "sequence", "choice", "repeat", "look" or "nothing" (an anchor).
        text: of a letter, its expression.
        parts: of the other kinds.
        most: of a repeat, the largest number of times, None if there is no bound; ``least`` the smallest.
        negative: whether a look holds where its part does not match.
    """

    kind: str
    text: str = ""
    parts: list[ExpressionPart] = field(default_factory=list)
    least: int = 0
    most: int | None = None
    negative: bool = False

    @property
    def matches_something(self) -> bool:
        """Whether every match has at least one character."""
        if self.kind == "choice":
            return all(part.matches_something for part in self.parts)
        if self.kind in ("look", "nothing") or self.kind == "repeat" and not self.least:
            return False
        return self.kind == "letter" or any(part.matches_something for part in self.parts)


class ExpressionParser:
    """Parses the syntax of Oniguruma as far as texts need it; classes are left to Oniguruma."""

    def __init__(self, text: str):
        self.text, self.at = text, 0
        self.repeats: list[ExpressionPart] = []

    def parsed(self, depth: int = 0) -> ExpressionPart:
        """Alternatives up to the end or to a parenthesis that closes."""
        if depth > DEEPEST:
            raise UnsupportedExpression(f"more than {DEEPEST} groups inside each other")
        choices = [ExpressionPart("sequence")]
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at] == "|":
                self.at += 1
                choices.append(ExpressionPart("sequence"))
            else:
                choices[-1].parts.append(self._repeated(self._atom(depth)))
        return choices[0] if len(choices) == 1 else ExpressionPart("choice", parts=choices)

    def _takes(self, *starts: str) -> str:
        """The first of these texts that comes next, which is passed; "" if none does."""
        found = next((start for start in starts if self.text.startswith(start, self.at)), "")
        self.at += len(found)
        return found

    def _until(self, end: str) -> str:
        stop = self.text.find(end, self.at)
        stop = len(self.text) if stop < 0 else stop
        found, self.at = self.text[self.at : stop], stop + len(end)
        return found

    def _atom(self, depth: int) -> ExpressionPart:
        letter, start = self.text[self.at], self.at
        self.at += 1
        if letter == "(":
            return self._group(depth)
        if letter == "[":
            self._class()
        elif letter == "\\":
            return self._escape(start)
        elif letter in "^$":
            return ExpressionPart("nothing")
        return ExpressionPart("letter", self.text[start : self.at])

    def _group(self, depth: int) -> ExpressionPart:
        if self._takes("?#"):
            while self.at < len(self.text) and self.text[self.at] != ")":
                self.at += 2 if self.text[self.at] == "\\" else 1
            self.at += 1
            return ExpressionPart("nothing")
        look = self._takes("?=", "?!", "?<=", "?<!")
        if not look and not self._takes("?:", "?>"):
            if self._takes("?<"):
                self._until(">")
            elif self._takes("?'"):
                self._until("'")
            elif self._takes("?"):
                options = ""
                while self.at < len(self.text) and self.text[self.at] in "imsWDSPaluy{gw}-":
                    options += self.text[self.at]
                    self.at += 1
                if self._takes(")"):
                    return ExpressionPart("nothing")
                if not self._takes(":"):
                    raise UnsupportedExpression(
                        f"a group that begins with '(?{options}{self.text[self.at : self.at + 1]}'"
                    )
            elif self.text.startswith("*", self.at):
                raise UnsupportedExpression("a group that begins with '(*'")
        inner = self.parsed(depth + 1)
        self.at += 1
        return ExpressionPart("look", parts=[inner], negative=look.endswith("!")) if look else inner

    def _class(self) -> None:
        depth = 1
        self._takes("^")
        self._takes("]")
        while depth and self.at < len(self.text):
            if self._takes("\\"):
                self.at += 1
            elif self._takes("["):
                depth += 1
                self._takes("^")
                self._takes("]")
            else:
                depth -= self.text[self.at] == "]"
                self.at += 1

    def _escape(self, start: int) -> ExpressionPart:
        letter = self.text[self.at : self.at + 1]
        self.at += 1
        if letter in "123456789kg" and letter:
            raise UnsupportedExpression(f"'\\{letter}', which refers to a group")
        if letter in "bByYAzZGK":
            return ExpressionPart("nothing")
        if letter in "pPxo" and self._takes("{"):
            self._until("}")
        elif letter in "xu":
            for _ in range(2 if letter == "x" else 4):
                if self.text[self.at : self.at + 1] in tuple("0123456789abcdefABCDEF"):
                    self.at += 1
        return ExpressionPart("letter", self.text[start : self.at])

    def _repeated(self, node: ExpressionPart) -> ExpressionPart:
        while self.at < len(self.text):
            start, least, most = self.at, 0, None
            if mark := self._takes("*", "+", "?"):
                least, most = int(mark == "+"), 1 if mark == "?" else None
            elif self._takes("{"):
                low, comma, high = self._until("}").partition(",")
                if not (low + high).isdigit() or not f"0{low}{high}".isascii():
                    self.at = start  # a brace that stands for itself
                    return node
                least = int(low[:7] or 0)
                most = int(high[:7]) if high else None if comma else least
            else:
                return node
            self._takes("?", "+")
            node = ExpressionPart("repeat", parts=[node], least=least, most=most)
            self.repeats.append(node)
        return node


def _pumped(text: str, length: int) -> str:
    """A text again and again, up to a length."""
    return (text * (length // max(1, len(text)) + 1))[:length]


def _branches(node: ExpressionPart) -> Iterator[ExpressionPart]:
    """All alternatives in a part."""
    if node.kind == "choice":
        yield from node.parts
    for part in node.parts:
        yield from _branches(part)


class Texts:
    """Draws texts for an expression.

    Args:
        members: which of some letters a class or letter of the expression matches.
    """

    def __init__(self, pattern: str, members: Callable[[str, str], str]):
        self._random = random.Random(0)
        self._letters = "".join(dict.fromkeys(LETTERS + pattern))
        self._members = members
        self._known: dict[str, str] = {}
        parser = ExpressionParser(pattern)
        self.root = parser.parsed()
        if parser.at < len(pattern):
            raise UnsupportedExpression("a parenthesis that closes nothing")
        self.repeats = [r for r in parser.repeats if r.least != r.most]
        if len(self.repeats) > MOST_QUANTIFIERS:
            raise UnsupportedExpression(f"more than {MOST_QUANTIFIERS} quantifiers")

    def __iter__(self) -> Iterator[str]:
        self._classes(self.root)
        # Letters that all the same classes contain are one kind of letters.
        kinds = {tuple(c in of for of in self._known.values()): c for c in self._letters}
        common = sorted(kinds.items(), key=lambda kind: -sum(kind[0]))
        breaks = ["", "\0", *(letter for _, letter in common[:10])]
        after = self._drawn(self.root, True)
        for length in reversed(LENGTHS):
            for _, letter in common[:12]:
                for end in ("", "\0", "!", "\n", " "):
                    yield letter * length + end + after
        ends = min(len(breaks), max(4, MOST_QUANTIFIERS // max(1, len(self.repeats))))
        for repeat in self.repeats:
            before, after = self._around(self.root, repeat) or ("", "")
            inner = repeat.parts[0]
            bodies = {self._drawn(inner, few) for few in (True, False) * 6} - {""}
            for body in sorted(bodies) or [""]:
                for length in LENGTHS:
                    for end in self._random.sample(breaks, ends):
                        # Without the letters that must follow, Oniguruma does not begin.
                        yield f"{before}{_pumped(body, length)}{end}{after}"
                yield f"{before}{_pumped(body, VERY_LONG)}\0{after}"
                # A loop may begin again at each place where the whole begins.
                for whole in (f"{before}{body}{after}", f"{before}{body}{after}"[:-1]):
                    yield from (_pumped(whole, length) + "\0" for length in (50, LONGEST))
            for branch in _branches(inner):
                around = self._around(inner, branch)
                if around is not None:
                    body = around[0] + self._drawn(branch, True) + around[1]
                    yield f"{before}{_pumped(body, 50)}\0{after}"
                    yield f"{before}{_pumped(body, LONGEST)}\n{after}"

    def _classes(self, node: ExpressionPart) -> None:
        if node.kind == "letter":
            self._of(node.text)
        for part in node.parts:
            self._classes(part)

    def _of(self, text: str) -> str:
        """The letters that a letter or class matches."""
        found = self._known.get(text)
        if found is None:
            is_plain = len(text) == 1 and text != "."
            found = text if is_plain else self._members(text, self._letters)
            found = self._known[text] = found or self._members(text, WIDE)
        return found

    def _drawn(self, node: ExpressionPart, few: bool) -> str:
        """A text that a part matches, with few repetitions or with some."""
        if node.kind == "letter":
            letters = self._of(node.text)
            return self._random.choice(letters) if letters else ""
        if node.kind == "choice":
            return self._drawn(self._random.choice(node.parts), few)
        if node.kind == "repeat":
            most = node.least + 2 if node.most is None else min(node.most, node.least + 2)
            count = max(node.least, min(1, most)) if few else self._random.randint(node.least, most)
            return "".join(
                self._drawn(node.parts[0], few)[:LONGEST] for _ in range(min(count, LONGEST))
            )[:LONGEST]
        if node.kind == "look" and node.negative:
            return ""
        return "".join(self._drawn(part, few) for part in node.parts)[:LONGEST]

    def _around(self, node: ExpressionPart, target: ExpressionPart) -> tuple[str, str] | None:
        """Texts that lead to a part and that follow it; None if it is not in this node."""
        if node is target:
            return "", ""
        for i, part in enumerate(node.parts):
            if (found := self._around(part, target)) is not None:
                before, after = found
                if node.kind == "repeat":
                    before = self._drawn(part, True) * max(0, min(node.least - 1, LONGEST)) + before
                elif node.kind == "sequence":
                    before = "".join(self._drawn(one, True) for one in node.parts[:i]) + before
                    after += "".join(self._drawn(one, True) for one in node.parts[i + 1 :])
                return before[:LONGEST], after[:LONGEST]
        return None


def limit(seconds: float, memory: int) -> None:
    """Lets the operating system end this process beyond these limits."""
    import contextlib
    import resource
    import signal

    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # which macOS does not know
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    signal.setitimer(signal.ITIMER_PROF, seconds)  # which ends it, as nobody handles its signal


def try_out(pattern: str, tokenizers: Any) -> None:
    """Runs an expression on drawn texts.

    Raises:
        UnsupportedExpression: it is slow for one, or it has a part that is not known here.
    """

    def splitter(text: str) -> Any:
        return tokenizers.pre_tokenizers.Split(tokenizers.Regex(text), "removed", invert=True)

    began = time.process_time()
    try:
        split = splitter(pattern)
    except Exception:
        return  # not a valid expression, which the package reports
    if (took := time.process_time() - began) > COMPILING:
        raise UnsupportedExpression(f"to compile it takes {took:.2g} s")

    def members(text: str, letters: str) -> str:
        try:
            return "".join(piece for piece, _ in splitter(text).pre_tokenize_str(letters))
        except Exception:
            return ""

    for text in Texts(pattern, members):
        began = time.process_time()
        try:
            split.pre_tokenize_str(text)
        except BaseException as error:  # a panic is no Exception
            raise UnsupportedExpression(
                f"a text of {len(text)} characters takes too many steps"
            ) from error
        if (took := time.process_time() - began) > SECONDS:
            raise UnsupportedExpression(f"a text of {len(text)} characters takes {took:.2g} s")


def main() -> None:
    import importlib.machinery
    import importlib.util

    file, seconds, memory = sys.argv[1:]
    limit(float(seconds), int(memory))
    patterns = json.load(sys.stdin)
    loader = importlib.machinery.ExtensionFileLoader("tokenizers", file)
    spec = importlib.util.spec_from_file_location("tokenizers", file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    for number, pattern in enumerate(patterns):
        print(json.dumps([number, ""]), flush=True)
        try:
            try_out(pattern, module)
        except UnsupportedExpression as error:
            print(json.dumps([number, str(error)]), flush=True)
            return
    print(json.dumps([len(patterns), ""]), flush=True)


if __name__ == "__main__":
    main()
