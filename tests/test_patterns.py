"""Patterns of layer names: the results of ``re``, in a number of steps that grows with the name's length only."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxjax import patterns
from maxjax.errors import CheckpointFormatError, CheckpointLimitError
from maxjax.patterns import NameTable

NAMES = [
    "model.layers.0.self_attn.q_proj", "model.layers.11.mlp.down_proj", "model.layers.1.mlp.experts.3.gate_proj",
    "lm_head", "q_proj", "Model.Visual_2", "a",
    "encoder.block.0.layer.1.DenseReluDense.wi_0", "transformer.h.10.attn",
    "layers.1.K\u212a\u017f\u00e4", "two\nlines.q_proj\n",
]  # fmt: skip
PATTERNS = [
    # Of published adapters and quantised repositories.
    "q_proj", r"^model\.layers\.0\.self_attn\.q_proj", "layers.1.mlp.experts.3.gate_proj",
    r".*\.layers\.(?:0|1|2)\..*",
    r"^(?!.*visual).*(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj).*",
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:q_proj|gate_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|ffn|dense)\.(?:(?:q_proj|k_proj|down_proj)))",
    r".*\.(18|11)\..*(gate|up|down).*", r".*mlp\.(gate|shared_expert_gate)$",
    r".*(?<!up_)proj$", "lm_head$", ".*lm_head.*",
    r"model\.layers\.(?:[1-9]|1[0-9])\.(?:self_attn|mlp)\.(?:q_proj|down_proj)$",
    ".*self_attn.*", r"encoder\.block\.\d+.*wi_\d",
    # Of every part that an expression may have.
    "", "$", "^", "(?:)*", "a*?", "(a|b)*", r"\w{2,5}?_\w+", r"(?i)MODEL.*",
    r"(?i:[L-M]\w+)\.x?", r"(?i)layers.1.\xe4?[k\u017f]*\xc4",
    r"(?i)[^m]", "(?a:\\w)+$", "(?ia)LAYERS.*K", r"(?s:.)*\B.\b", "(?m:^lines)", "(?s).*^lines", r"(?m)two$",
    r"\Atwo.*\Z",
    "[^.]+$", r"[\w.]+(?<=_)proj", "(?=(?=m)mo).*", "(?=.*(?=h)h).*d$", "(?!)|lm", "(?:m|mo|mod)*el",
    "(?<![.])q", "(?<=^)a",
    "(?:(?=.*x)a|.)*y", "((a?)*)*$", "(?x) q _ # words\n proj", "[]a-]", r"[\D\S]+",
    "(?P<name>a)", ".{0,9}(?:l.{1,3}){2}", "(?:.?){9}p",
]  # fmt: skip


def agrees(pattern, name):
    """Compares with ``re`` and with PEFT."""
    own = NameTable({pattern: 1}, "x").get(name) is not None
    assert own == (re.match(pattern, name) is not None), (pattern, name)
    if not re.match(r"\(\?[a-z]+\)", pattern):  # such flags do not stand in the middle
        ending = NameTable({pattern: 1}, "x", ending=True).get(name) is not None
        # PEFT writes ({pattern}), in which a comment would not end.
        wrapped = rf"(.*\.)?({pattern})$"
        assert ending == (re.match(wrapped, name) is not None), (pattern, name)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_names_match_as_in_re(pattern):
    for name in NAMES:
        agrees(pattern, name)


LEAVES = st.sampled_from(r"a b ab . \. [ab] [^a] \w $ ^ \b \B (?=a) (?!b) (?<=a) (?<!b.)".split())
DRAWN = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        inner.map("(?:{})?".format), inner.map("(?:{})*".format), inner.map("(?:{}){{1,2}}".format),
        inner.map("(?={})".format), inner.map("(?!{})".format), inner.map("(?i:{})".format),
    ),
    max_leaves=5,
)  # fmt: skip


@settings(deadline=None)
@given(DRAWN, st.text("abA._", min_size=1, max_size=6))
def test_drawn_patterns_match_as_in_re(pattern, name):
    agrees(pattern, name)


SLOW = [
    ".?" * 28 + "." * 28 + "~", "(?:.{0,9}){0,9}~", "(.+)+~", "((((a|b|.)*)*)*)*~", "(?:a|[a-z]|.)*~", "(x+x+)+y",
    "(?:(?=.*x)[a-z]|.)*y", "(?=(.+)+~)", "(?!(?:.|[a-z])*~)~", "(.*)*(.*)*(.*)*~", "(?:m?o?d?e?l?a?)*~",
]  # fmt: skip


@pytest.mark.parametrize("pattern", SLOW)
def test_steps_grow_with_the_length_of_the_name(pattern):
    """Each takes re a time that is exponential, or a high power."""
    table, counts = NameTable({pattern: 1}, "x"), []
    for length in (100, 200, 400):
        before = table._visits.count
        assert table.get("zone." * (length // 5)) is None
        counts.append(table._visits.count - before)
    assert counts[2] < 5 * counts[0] < 5 * 20_000


@pytest.mark.parametrize(
    ("pattern", "what"),
    [(r"(a)\1", "back references"), (r"(?P<n>a)(?P=n)", "back references"), ("(a)?(?(1)b|c)", "conditions"),
     ("(?>a+)b", "atomic groups"), ("a++b", "possessive quantifiers"), ("(", "missing"), ("x)|(y", "unbalanced"),
     ("*.q_proj", "nothing to repeat"), ("a{99999999999}", "too large")],
)  # fmt: skip
def test_what_is_not_supported_is_named(pattern, what):
    with pytest.raises(CheckpointFormatError, match=f"a.json: 'dynamic' has the pattern .*{what}"):
        NameTable({pattern: 1}, "dynamic", path="a.json", ending=True)


@pytest.mark.parametrize(
    ("pattern", "what"),
    [("(" * 60 + "a" + ")" * 60, "50 groups inside"), ("(" * 9999 + ")" * 9999, "50 groups inside"),
     ("((((a{99}){99}){99}){99}){99}", "131072 parts"), ("(?:){131073}", "131072 parts"),
     ("a" * 131_073, "131072 characters")],
    ids=range(5),
)  # fmt: skip
def test_the_size_of_patterns_is_bounded(pattern, what):
    with pytest.raises(CheckpointLimitError, match=f"a.json: 'dynamic' has .*{what}"):
        NameTable({pattern: 1}, "dynamic", path="a.json")


def test_the_steps_of_a_table_are_bounded(monkeypatch):
    monkeypatch.setattr(patterns, "_MOST_VISITS", 1000)
    table = NameTable({"(?:a|b)*~": 1}, "targets", path="a.json")
    with pytest.raises(CheckpointLimitError, match="'targets' has patterns .* at most 1000"):
        for i in range(1000):
            table.get(f"layers.{i}")


def test_a_table_has_a_pattern_for_each_of_many_layers():
    names = [
        f"model.layers.{i}.{m}_proj"
        for i in range(80)
        for m in ("q", "k", "v", "o", "gate", "up", "down")
    ]
    table = NameTable({name: i for i, name in enumerate(names)}, "rank_pattern", ending=True)
    assert [table.get(f"base.{name}") for name in names] == [*range(len(names))]


def test_a_table_without_patterns_takes_no_steps(monkeypatch):
    monkeypatch.setattr(patterns, "_MOST_VISITS", 0)
    table = NameTable({}, "targets")
    assert table.get("model.layers.0.mlp.experts.383.down_proj") is None


def test_the_first_pattern_that_fits_one_of_the_names_counts():
    table = NameTable({"b": 1, "a": 2, "b.": 3}, "x")
    assert (table.get("ab", "ba"), table.get("ac"), table.get("c")) == (1, 2, None)
