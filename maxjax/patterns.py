"""Matches the regular expressions with which a checkpoint's files choose layers by name.

Python's ``re`` tries one way through an expression after another, and the number of ways may be exponential in
the length of the name. Here a part of an expression maps the set of all positions at which it may begin to the
set of those at which it may then end, so that each part sees each position of a name once: the time is linear
in the size of the expression times the length of the name. A set of positions is an int, with a bit for each.

The syntax is that of ``re``, whose parser is used. Expressions that no set of positions decides (back
references, atomic groups, possessive quantifiers and conditions) are refused.

Source: Thompson, "Regular Expression Search Algorithm" (CACM 1968), with sets of positions in place of states.
"""

from __future__ import annotations

import itertools
import re
import re._casefix as casefix  # type: ignore[import-not-found]
import re._constants as op  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

from .errors import CheckpointFormatError, CheckpointLimitError, shown

V = TypeVar("V")

# Of all patterns of a table. A pattern for each of 560 layers is 25 thousand characters.
_MOST_TEXT = 1 << 17
# Letters, classes, anchors and loops, where what is repeated {n} times counts n times.
_MOST_PARTS = 1 << 17
_DEEPEST = 50
# The parts that are visited while names are looked up, eight texts being one, which take up to 3 µs each. A
# pattern for each of the 560 linear layers of a model of 70 billion parameters takes 160 thousand.
_MOST_VISITS = 200_000
_TYPES = re.ASCII | re.UNICODE | re.LOCALE
_REFUSED = {
    op.GROUPREF: "back references", op.GROUPREF_EXISTS: "conditions",
    op.ATOMIC_GROUP: "atomic groups", op.POSSESSIVE_REPEAT: "possessive quantifiers",
}  # fmt: skip
_ANCHORS = {
    op.AT_BEGINNING: "^", op.AT_BEGINNING_STRING: r"\A", op.AT_BOUNDARY: r"\b",
    op.AT_NON_BOUNDARY: r"\B", op.AT_END: "$", op.AT_END_STRING: r"\Z",
}  # fmt: skip
_CATEGORIES = {
    op.CATEGORY_DIGIT: r"\d", op.CATEGORY_NOT_DIGIT: r"\D", op.CATEGORY_SPACE: r"\s",
    op.CATEGORY_NOT_SPACE: r"\S", op.CATEGORY_WORD: r"\w", op.CATEGORY_NOT_WORD: r"\W",
}  # fmt: skip


class NameTable(Generic[V]):
    """Looks up names among patterns: each name has the value of the first pattern that matches its beginning.

    Args:
        patterns: values by pattern, in the order in which they are tried.
        key: the setting that holds the patterns, for messages.
        path: the file that holds the setting, for messages.
        ending: whether a pattern need only match what follows a dot, up to the end of the name, as in PEFT.

    Raises:
        CheckpointFormatError: a pattern is not a regular expression, or one of a kind that is not supported.
        CheckpointLimitError: a pattern, or all of them together, are too large.

    Example:
        >>> table = NameTable({"q_proj": 4, r"layers\\.\\d+\\.mlp\\.(?!up)": 8}, "rank_pattern", ending=True)
        >>> table.get("model.layers.0.self_attn.q_proj"), table.get("q_proj_2")
        (4, None)
    """

    def __init__(
        self, patterns: Mapping[str, V], key: str, *, path: Any = None, ending: bool = False
    ):
        self._key, self._path = key, path
        self._visits = _Visits()
        self._found: dict[tuple[str, ...], V | None] = {}
        if (size := sum(map(len, patterns))) > _MOST_TEXT:
            raise self._limit("has too long patterns", f"{_MOST_TEXT} characters", size)
        reader = _Reader()
        self._front = reader.read(r"(?:.*\.)?" if ending else "")
        self._end = reader.read("$" if ending else "")
        # Each expression is complete by itself: in PEFT, "x)|(y" becomes "(.*\.)?(x)|(y)$".
        self._rows = [(self._compiled(reader, text), value) for text, value in patterns.items()]

    def get(self, *names: str) -> V | None:
        """The value of the first pattern that matches one of a layer's names; None if there is none.

        Raises:
            CheckpointLimitError: all lookups in this table together took too many steps.
        """
        if not self._rows:  # a mixture of experts may have 100 thousand layers
            return None
        if names not in self._found:
            try:
                self._found[names] = self._first([_LayerName(name, self._visits) for name in names])
            except _TooMany:
                problem = "has patterns that take too many steps to match the names of the layers"
                raise self._limit(problem, str(_MOST_VISITS), None) from None
        return self._found[names]

    def _first(self, names: list[_LayerName]) -> V | None:
        texts = [
            (name, self._front.ends(name, 1), self._end.ends(name, name.everywhere))
            for name in names
        ]
        for part, value in self._rows:
            self._visits.add(1)
            for name, begin, end in texts:
                if part._ends(name, begin, False) & end:  # begins nowhere else
                    return value
        return None

    def _limit(self, problem: str, most: str, found: Any) -> CheckpointLimitError:
        return CheckpointLimitError(
            f"'{self._key}' {problem}", path=self._path, expected=f"at most {most}", found=found
        )

    def _compiled(self, reader: _Reader, text: str) -> _Part:
        try:
            return reader.read(text)
        except (_TooMany, RecursionError) as error:
            found = error if isinstance(error, _TooMany) else "more groups inside each other"
            most = f"{_MOST_PARTS} parts in all patterns, and {_DEEPEST} groups inside each other"
            problem = f"has the pattern {shown(text, 60)}, which has too many parts"
            raise self._limit(problem, most, found) from None
        except (re.error, OverflowError) as error:
            raise CheckpointFormatError(
                f"'{self._key}' has the pattern {shown(text, 60)}: {error}", path=self._path
            ) from None


# --- names --------------------------------------------------------------------------------------


class _Visits:
    """Counts the parts that are visited."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, count: int) -> None:
        self.count += count
        if self.count > _MOST_VISITS:
            raise _TooMany


class _LayerName:
    """A name, and the sets of positions in it that are known: one before each letter, and the end."""

    def __init__(self, text: str, visits: _Visits):
        self.text, self.visits = text, visits
        self.everywhere = (2 << len(text)) - 1
        # The positions at which each part was begun, and those at which an anchor or a look holds.
        self.begun: dict[_Part, int] = {}
        self.holds: dict[Any, int] = {}
        self.known: dict[str | _Letters, int] = {}

    def before(self, item: str | _Letters) -> int:
        """The positions before this text, or before one of these letters."""
        found = self.known.get(item)
        if found is None:
            found = 0
            if isinstance(item, str):
                at = self.text.find(item)
                while at >= 0:
                    found |= 1 << at
                    at = self.text.find(item, at + 1)
            else:
                for letter in set(self.text):
                    if item.has(letter, self.visits):
                        found |= self.before(letter)
            self.known[item] = found
        return found


class _Letters:
    """The letters that a class, a category or a letter in either case stands for."""

    def __init__(self, items: Iterable[tuple[Any, Any]], flags: int):
        self._items, self._flags = list(items), flags
        self._negated = self._items[:1] == [(op.NEGATE, None)]
        self._known: dict[str, bool] = {}

    def has(self, letter: str, visits: _Visits) -> bool:
        found = self._known.get(letter)
        if found is None:
            visits.add(len(self._items))
            cases = _cases(letter, self._flags) if self._flags & re.IGNORECASE else {letter}
            found = any(map(self._is, self._items[self._negated :], [cases] * len(self._items)))
            found = self._known[letter] = found != self._negated
        return found

    def _is(self, item: tuple[Any, Any], cases: set[str]) -> bool:
        kind, value = item
        if kind is op.LITERAL:
            return chr(value) in cases
        if kind is op.RANGE:
            return any(value[0] <= ord(letter) <= value[1] for letter in cases)
        if kind is op.CATEGORY:
            category = re.compile(_CATEGORIES[value], self._flags & re.ASCII)
            return any(map(category.match, cases))
        assert kind is op.ANY, kind
        return bool(self._flags & re.DOTALL) or "\n" not in cases


def _cases(letter: str, flags: int) -> set[str]:
    """The letters that are the same where case is ignored."""
    if flags & re.ASCII:
        return {letter, letter.swapcase()} if letter.isascii() else {letter}
    lower = letter.lower() if len(letter.lower()) == 1 else letter
    found = {lower, *map(chr, casefix._EXTRA_CASES.get(ord(lower), ()))}
    return {letter, *found, *(other.upper() for other in found if len(other.upper()) == 1)}


# --- parts of expressions -----------------------------------------------------------------------


class _Part:
    """A part of an expression. It stands at one place in it: what it found once is part of the same result."""

    def ends(self, name: _LayerName, starts: int, back: bool = False) -> int:
        """Where it may end if it begins at one of these positions, but for those at which it began before.

        Args:
            back: whether it is read from its end to its beginning.
        """
        begun = name.begun.get(self, 0)
        starts &= ~begun
        if not starts:
            return 0
        name.begun[self] = begun | starts
        name.visits.count += 1
        if name.visits.count > _MOST_VISITS:
            raise _TooMany
        return self._ends(name, starts, back)

    def _ends(self, name: _LayerName, starts: int, back: bool) -> int:
        raise NotImplementedError


class _Word(_Part):
    """Texts and letters one after another."""

    def __init__(self, letters: list[str | _Letters]):
        self.items: list[tuple[str | _Letters, int]] = []
        for is_text, group in itertools.groupby(letters, lambda one: isinstance(one, str)):
            if is_text:
                text = "".join(map(str, group))
                self.items.append((text, len(text)))
            else:
                self.items.extend((one, 1) for one in group)

    def _ends(self, name: _LayerName, starts: int, back: bool) -> int:
        count, known = 0, name.known
        for item, size in reversed(self.items) if back else self.items:
            count += 1
            before = known[item] if item in known else name.before(item)
            starts = starts >> size & before if back else (starts & before) << size
            if not starts:
                break
        if count > 8:
            name.visits.add(count // 8)
        return starts


class _Concatenation(_Part):
    """Parts one after another."""

    def __init__(self, parts: list[_Part]):
        self.parts = parts

    def _ends(self, name: _LayerName, starts: int, back: bool) -> int:
        for part in reversed(self.parts) if back else self.parts:
            starts = part.ends(name, starts, back)
            if not starts:
                break
        return starts


class _Choice(_Part):
    """Alternatives; without any, nothing matches."""

    def __init__(self, parts: list[_Part]):
        self.parts = parts

    def _ends(self, name: _LayerName, starts: int, back: bool) -> int:
        found = 0
        for part in self.parts:
            found |= part.ends(name, starts, back)
        return found


class _Optional(_Part):
    """Any number of these parts, from the first on."""

    def __init__(self, parts: list[_Part]):
        self.parts = parts

    def _ends(self, name: _LayerName, starts: int, back: bool) -> int:
        found = starts
        for part in self.parts:
            starts = part.ends(name, starts, back)
            if not starts:
                break
            found |= starts
        return found


class _Loop(_Part):
    """A part any number of times."""

    def __init__(self, part: _Part):
        self.part = part

    def _ends(self, name: _LayerName, starts: int, back: bool) -> int:
        found = starts
        while starts := self.part.ends(name, starts, back):
            starts &= ~found
            found |= starts
        return found


class _Repeat(_Part):
    """One of some letters any number of times."""

    def __init__(self, letters: str | _Letters):
        self.letters = letters

    def _ends(self, name: _LayerName, starts: int, back: bool) -> int:
        before = name.before(self.letters)
        if not back:
            # A carry runs through all letters that follow one another.
            return ((starts & before) + before) ^ before | starts
        while new := starts >> 1 & before & ~starts:
            name.visits.add(1)
            starts |= new
        return starts


class _Anchor(_Part):
    """The beginning or end of the name or of a line, or the border of a word."""

    def __init__(self, kind: Any, flags: int):
        self.pattern = re.compile(_ANCHORS[kind], flags & (re.ASCII | re.MULTILINE))

    def _ends(self, name: _LayerName, starts: int, back: bool) -> int:
        holds = name.holds.get(self.pattern)
        if holds is None:
            name.visits.add(len(name.text))
            each = (at for at in range(len(name.text) + 1) if self.pattern.match(name.text, at))
            holds = name.holds[self.pattern] = sum(1 << at for at in each)
        return starts & holds


class _Look(_Part):
    """Look-ahead or look-behind. All positions at which it holds are found at once."""

    def __init__(self, part: _Part, behind: bool, negative: bool):
        self.part, self.behind, self.negative = part, behind, negative

    def _ends(self, name: _LayerName, starts: int, back: bool) -> int:
        holds = name.holds.get(self)
        if holds is None:
            # Where it may begin if it ends anywhere, or the other way round.
            holds = self.part.ends(name, name.everywhere, back=not self.behind)
            name.holds[self] = holds
        return starts & ~holds if self.negative else starts & holds


# --- from the parser's tree ---------------------------------------------------------------------


class _TooMany(Exception):
    """The number of parts, or of groups inside each other."""


class _Reader:
    """Makes parts of expressions, and counts them before they are made."""

    def __init__(self) -> None:
        self._count = 0
        self._any: dict[int, _Letters] = {}  # which most patterns have many times

    def read(self, text: str) -> _Part:
        with warnings.catch_warnings():  # of what may have another meaning some day
            warnings.simplefilter("ignore")
            tree = parser.parse(text)
        self._count += self._size(tree, 0)
        if self._count > _MOST_PARTS:
            raise _TooMany(self._count)
        return self._part(tree, tree.state.flags)

    def _size(self, tree: Any, depth: int) -> int:
        """The number of parts that a tree becomes."""
        if depth > _DEEPEST:
            raise _TooMany(f"{depth} groups inside each other")
        count = 1
        for kind, value in tree:
            if kind in _REFUSED:
                raise re.error(f"{_REFUSED[kind]} are not supported")
            if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
                least, most, inner = value
                times = least + 1 if most is op.MAXREPEAT else max(most, 1)
                count += times * self._size(inner, depth + 1)
            elif kind is op.BRANCH:
                count += sum(self._size(inner, depth + 1) for inner in value[1])
            elif kind in (op.SUBPATTERN, op.ASSERT, op.ASSERT_NOT):
                count += self._size(value[-1], depth + 1)
            else:
                count += 1
        return count

    def _part(self, tree: Any, flags: int) -> _Part:
        parts: list[_Part] = []
        word: list[str | _Letters] = []
        for kind, value in [*tree, (None, None)]:
            letters = self._letters(kind, value, flags)
            if letters is not None:
                word.append(letters)
                continue
            if word:
                parts.append(_Word(word))
                word = []
            if kind is not None:
                parts.append(self._other(kind, value, flags))
        return parts[0] if len(parts) == 1 else _Concatenation(parts)

    def _letters(self, kind: Any, value: Any, flags: int) -> str | _Letters | None:
        """The letters that a leaf of the tree stands for; None for another kind of leaf."""
        if kind is op.LITERAL:
            return _Letters([(kind, value)], flags) if flags & re.IGNORECASE else chr(value)
        if kind is op.NOT_LITERAL:
            return _Letters([(op.NEGATE, None), (op.LITERAL, value)], flags)
        if kind is op.ANY:
            return self._any.setdefault(flags, _Letters([(kind, None)], flags))
        return _Letters(value, flags) if kind is op.IN else None

    def _other(self, kind: Any, value: Any, flags: int) -> _Part:
        if kind is op.AT:
            return _Anchor(value, flags)
        if kind is op.SUBPATTERN:
            _, added, removed, inner = value
            flags = flags & ~_TYPES if added & _TYPES else flags
            return self._part(inner, (flags | added) & ~removed)
        if kind is op.BRANCH:
            return _Choice([self._part(inner, flags) for inner in value[1]])
        if kind in (op.ASSERT, op.ASSERT_NOT):
            direction, inner = value
            return _Look(self._part(inner, flags), direction < 0, kind is op.ASSERT_NOT)
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            least, most, inner = value
            needed = [self._part(inner, flags) for _ in range(least)]
            if most is op.MAXREPEAT:
                single = self._letters(inner[0][0], inner[0][1], flags) if len(inner) == 1 else None
                loop = _Loop(self._part(inner, flags)) if single is None else _Repeat(single)
                return _Concatenation([*needed, loop]) if needed else loop
            return _Concatenation(
                [*needed, _Optional([self._part(inner, flags) for _ in range(most - least)])]
            )
        assert kind is op.FAILURE, kind
        return _Choice([])
