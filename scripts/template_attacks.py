# ruff: noqa: E501 (a template a line)
"""Chat templates written to hang or to fill memory (bombs), and to get out of their sandbox (escapes).

A test runs a sample of them, `template_bombs.py` runs all. There is a bomb for every filter and test that
a template may use, so that a new one gets its bomb automatically.
"""

from __future__ import annotations

from collections.abc import Iterable

# --- bombs ----------------------------------------------------------------------------------------

_BIG = "{% set v = 'ab c-1\\n' * 100000 %}"
_NUMBERS = "{% set v = range(20000)|list %}"
_DICT = "{% set v = dict(range(4000)|batch(2)) %}"
_FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"
_TWICE = "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = STEP %}{% endfor %}{{ ns.s|length }}"
_ZEROS = 2**61 - 1  # integers that are a multiple of this number have the hash 0
_COLLIDING = f"range(0, {99999 * _ZEROS}, {_ZEROS})"

# The input of each filter, and its arguments; other filters get a long text and no arguments.
_GIVEN = {
    **dict.fromkeys("abs float int filesizeformat round".split(), "{% set v = 12345 %}"),
    **dict.fromkeys(
        "batch first groupby join last list map max min random reject rejectattr select selectattr slice sort"
        " sum unique".split(),
        _NUMBERS,
    ),
    **dict.fromkeys("dictsort items tojson xmlattr pprint".split(), _DICT),
    "urlize": "{% set v = '(' * 450 ~ ')' * 449 ~ 'a)' %}",
    "wordwrap": "{% set v = 'ab-cd ' * 9000 %}",
}
_ARGUMENTS = {
    "attr": "'upper'", "batch": "3", "format": "1", "groupby": "'real'", "map": "'string'", "reject": "'odd'",
    "rejectattr": "'real', 'odd'", "replace": "'a', 'b'", "select": "'odd'", "selectattr": "'real', 'odd'",
    "slice": "3", "round": "300, 'ceil'",
}  # fmt: skip
_MADE_IN_STEPS = "batch items map reject rejectattr select selectattr slice unique".split()
_COMPARED = {"divisibleby": " 3", "filter": "", "in": " 'abc'", "sameas": " 1", "test": ""}


def _of_filters(names: Iterable[str]) -> dict[str, str]:
    made = {}
    for name in names:
        arguments = _ARGUMENTS.get(name)
        use = f"v|{name}" + (f"({arguments})" if arguments else "")
        use += "|list|length" if name in _MADE_IN_STEPS else ""
        body = _FOREVER.replace("BODY", f"{{% set x = {use} %}}")
        made[f"filter {name}, for ever"] = _GIVEN.get(name, _BIG) + body
    return made


def _of_tests(names: Iterable[str]) -> dict[str, str]:
    made = {}
    for name in names:
        if name in ("!=", "<", "<=", "==", ">", ">="):
            condition = f"v {name} v"
        else:
            two = name in ("eq", "equalto", "ge", "greaterthan", "gt", "le", "lessthan", "lt", "ne")
            condition = f"v is {name}{' v' if two else _COMPARED.get(name, '')}"
        given = "{% set v = 7 %}" if name in ("divisibleby", "even", "odd") else _BIG
        body = _FOREVER.replace("BODY", f"{{% if {condition} %}}{{% endif %}}")
        made[f"test {name}, for ever"] = given + body
    return made


_STATEMENTS = {
    "loops": _FOREVER.replace("BODY", ""),
    "loops after folded constants": "{% if false %}{{ 'x'|center(2000000)|batch(1)|list }}{% endif %}"
    + _FOREVER.replace("BODY", ""),
    "loops with loop": _FOREVER.replace("BODY", "{{ loop.index }}"),
    "loops with length": _FOREVER.replace("BODY", "{% set x = loop.length %}"),
    "loops, continue": _FOREVER.replace("BODY", "{% continue %}"),
    "loops with a condition": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "loops with an else": _FOREVER.replace("BODY", "{% for c in [] %}{% else %}{% endfor %}"),
    "loop.cycle": _FOREVER.replace("BODY", "{% set x = loop.cycle(1, 2, 3) %}"),
    "loop.changed": _FOREVER.replace("BODY", "{% set x = loop.changed(a) %}"),
    "loop.previtem": _FOREVER.replace("BODY", "{% set x = loop.nextitem %}"),
    "recursive loops": "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "recursive loops, wide": "{% for x in range(9) recursive %}{% if loop.depth < 90 %}{{ loop(range(9)) }}{% endif %}"
    "{% endfor %}",
    "recursive loops, long": "{% for x in range(9) recursive %}{{ loop(range(99999)) if loop.depth < 4 }}{% endfor %}",
    "macros": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macros, wide": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "macros with defaults": "{% macro f(n, m=n * 2) %}{{ f(n + 1) }}{% endmacro %}{{ f(1) }}",
    "macros, mutual": "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macros for ever": "{% macro f() %}x{% endmacro %}" + _FOREVER.replace("BODY", "{{ f() }}"),
    "macro text": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}" + _TWICE.replace("STEP", "f(ns.s)"),
    "macro that keeps literals": "{% macro f() %}" + _FOREVER.replace("BODY", "x") + "{% endmacro %}{{ f() }}",
    "macro that keeps numbers": "{% macro f() %}" + _FOREVER.replace("BODY", "{{ b }}") + "{% endmacro %}{{ f() }}",
    "varargs in varargs": "{% set ns = namespace(x=1) %}{% macro f() %}{% set ns.x = varargs %}{% endmacro %}"
    "{% for i in range(60) %}{% set _ = f(ns.x, ns.x) %}{% endfor %}{{ ns.x|string|length }}",
    "kwargs in kwargs": "{% set ns = namespace(x=1) %}{% macro f() %}{% set ns.x = kwargs %}{% endmacro %}"
    "{% for i in range(60) %}{% set _ = f(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x|string|length }}",
    "many arguments": "{% macro f() %}{{ f(*range(99999)) }}{% endmacro %}{{ f(*range(99999)) }}",
    "call blocks": "{% macro f() %}{{ caller() }}{% endmacro %}" + _FOREVER.replace("BODY", "{% call f() %}x{% endcall %}"),
    "call blocks, nested": "{% macro f() %}{% call f() %}x{% endcall %}{{ caller() }}{% endmacro %}{% call f() %}y{% endcall %}",
    "callers, wide": "{% macro g() %}{{ caller() }}{{ caller() }}{% endmacro %}{% macro f(n) %}{% if n %}{% call g() %}"
    "{{ f(n - 1) }}{% endcall %}{% endif %}{% endmacro %}{{ f(30) }}",
    "blocks": "{% block a %}{{ self.a() }}{% endblock %}",
    "blocks, wide": "{% set n = 9 %}{% block a %}{% for i in range(9) %}{{ self.a() }}{% endfor %}{% endblock %}",
    "set blocks": "{% set x %}" + _FOREVER.replace("BODY", "x") + "{% endset %}",
    "set blocks of numbers": "{% set x %}" + _FOREVER.replace("BODY", "{{ a }}{{ b }}") + "{% endset %}",
    "set blocks, doubled": "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}"
    "{% set ns.s = t %}{% endfor %}",
    "filter blocks": "{% filter upper %}" + _FOREVER.replace("BODY", "x") + "{% endfilter %}",
    "filter blocks, large": "{% filter center(10**9) %}x{% endfilter %}",
    "with": _FOREVER.replace("BODY", "{% with x = [a, b] %}{% endwith %}"),
    "if chains": _FOREVER.replace("BODY", "{% if a < 0 %}{% elif b < 0 %}{% else %}{% endif %}"),
    "generation": _FOREVER.replace("BODY", "{% generation %}x{% endgeneration %}"),
    "autoescape": "{% autoescape true %}" + _FOREVER.replace("BODY", "{{ '<' }}") + "{% endautoescape %}",
    "autoescape of a constant": "{% autoescape 'x'|center(2000000)|batch(1)|list %}{% endautoescape %}",
    "autoescape, doubled": "{% autoescape true %}" + _TWICE.replace("STEP", "(ns.s ~ '<' ~ ns.s)|forceescape") + "{% endautoescape %}",
    "includes": _FOREVER.replace("BODY", "{% include 'x' ignore missing %}"),
    "includes of many variables": "".join(f"{{% set a{i} = 1 %}}" for i in range(1500))
    + "{% if false %}" + "{% include 'x' %}" * 1500 + "{% endif %}",
    "imports of many variables": "".join(f"{{% set a{i} = 1 %}}" for i in range(1500))
    + "{% import 'x' as y with context %}" * 1500,
    "extends": "{% extends 'x' %}" + _FOREVER.replace("BODY", ""),
    "output": "{% set s = 'x' * 500000 %}" + _FOREVER.replace("BODY", "{{ s }}"),
    "namespaces in namespaces": "{% set ns = namespace(n=1) %}"
    + _FOREVER.replace("BODY", "{% set ns.n = namespace(a=ns.n) %}"),
    "a namespace written out": "{% set ns = namespace(a='x') %}{% for i in range(60) %}"
    "{% set ns.a = namespace(a=ns.a, b=ns.a) %}{% endfor %}{{ ns }}",
    "a namespace in itself": "{% set ns = namespace() %}{% set ns.a = ns %}{% set ns.b = ns %}{{ ns }}",
    "a namespace of large texts": "{% set ns = namespace(" + ", ".join(f"a{i}='{i}' * 200000" for i in range(80)) + ") %}{{ ns }}",
    "cyclers in cyclers": "{% set ns = namespace(n=1) %}" + _FOREVER.replace("BODY", "{% set ns.n = cycler(ns.n, ns.n) %}"),
    "cycler": "{% set c = cycler(1, 2) %}" + _FOREVER.replace("BODY", "{{ c.next() }}"),
    "joiner": "{% set j = joiner() %}" + _FOREVER.replace("BODY", "{{ j() }}"),
    "undefined in undefined": "{% set ns = namespace(n=1) %}" + _FOREVER.replace("BODY", "{% set ns.n = {'a': ns.n}.b %}"),
    "exceptions": _FOREVER.replace("BODY", "{{ nothing is defined and nothing.x }}"),
    "raise_exception": "{{ raise_exception('x' * 400000) }}",
}  # fmt: skip

_VALUES = {
    "times": "{{ 'a' * 10**10 }}",
    "times, other way": "{{ 10**10 * [1] }}",
    "times, tuples": "{{ ((1, 2) * 10**9)|length }}",
    "times, again": _TWICE.replace("STEP", "ns.s * 2"),
    "powers": "{{ 9 ** (9 ** 9) }}",
    "powers of powers": "{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n ** 9 %}{% endfor %}",
    "products": "{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "quotients": "{% set n = 'f' * 16000 %}{% set a = n|int(base=16) %}" + _FOREVER.replace("BODY", "{% set x = a // 3 %}"),
    "a literal": "{% set a = 0x" + "f" * 900_000 + " %}{{ a // (a // 7) }}",
    "a literal of digits": "{% set a = " + "9" * 900_000 + " %}{{ a }}",
    "plus": _TWICE.replace("STEP", "ns.s + ns.s"),
    "tilde": _TWICE.replace("STEP", "ns.s ~ ns.s"),
    "lists added": _TWICE.replace("'ab'", "[1]").replace("STEP", "ns.s + ns.s"),
    "join": _TWICE.replace("STEP", "[ns.s, ns.s]|join(ns.s)"),
    "join, attribute": "{{ range(500)|join('y' * 400000, attribute='real')|length }}",
    "join, attribute that is not there": "{{ range(500)|join('y' * 400000, attribute='nope')|length }}",
    "join of what map makes": "{% set s = 's' * 400000 %}{{ range(9999)|map(attribute='x', default=s)|join|length }}",
    "method join": _TWICE.replace("STEP", "ns.s.join([ns.s, ns.s])"),
    "method join of what map makes": "{% set s = 's' * 400000 %}{{ ''.join(range(9999)|map(attribute='x', default=s)) }}",
    "replace": _TWICE.replace("STEP", "ns.s|replace('a', ns.s)"),
    "replace nothing": _TWICE.replace("STEP", "ns.s|replace('', ns.s)"),
    "method replace": _TWICE.replace("STEP", "ns.s.replace('a', ns.s)"),
    "format": _TWICE.replace("STEP", "'%s%s'|format(ns.s, ns.s)"),
    "percent": _TWICE.replace("STEP", "'%s%s' % (ns.s, ns.s)"),
    "method format": _TWICE.replace("STEP", "'{0}{0}'.format(ns.s)"),
    "method format_map": _TWICE.replace("STEP", "'{a}{a}'.format_map({'a': ns.s})"),
    "format of attributes": "{% set ns = namespace(s='x' * 400000) %}{{ ('{0.s}' * 100000).format(ns)|length }}",
    "format of attributes in a list": "{% set ns = namespace(s='x' * 400000) %}{{ ('{0[0].s}' * 100000).format([ns]) }}",
    "format of colons": "{{ ('{' ~ ':' * 400000)|format }}{{ ('{' ~ ':' * 400000).format(1) }}",
    "format width": "{{ '%09999999999d' % 1 }}",
    "format precision": "{{ '%.999999999f' % 1.5 }}",
    "format star": "{{ '%*d' % (10**10, 1) }}",
    "format star, precision": "{{ '%.*f' % (10**10, 1.5) }}",
    "method format width": "{{ '{:9999999999}'.format(1) }}",
    "method format fill": "{{ '{0:x>9999999999}'.format(1) }}",
    "method format width by argument": "{{ '{:{}}'.format(1, 10**10) }}",
    "method format width by name": "{{ '{0:{w}}'.format(1, w=10**10) }}",
    "filter format width": "{{ '%9999999999d'|format(1) }}",
    "markup format width": "{{ ('{:9999999999}'|safe).format(1) }}",
    "even of a format": "{{ '%0999999999d' is even }}",
    "odd of a format": "{{ ['%0999999999d']|select('odd')|list }}",
    "divisibleby of a format": "{{ '%0999999999d' is divisibleby(7) }}",
    "lists in lists": _TWICE.replace("STEP", "[ns.s, ns.s]"),
    "tuples in tuples": _TWICE.replace("STEP", "(ns.s, ns.s)"),
    "dicts in dicts": _TWICE.replace("STEP", "{1: ns.s, 2: ns.s}"),
    "dict calls": _TWICE.replace("STEP", "dict(a=ns.s, b=ns.s)"),
    "views in lists": _TWICE.replace("STEP", "[{1: ns.s}.values(), {1: ns.s}.items()]"),
    "deep": "{% set ns = namespace(s=[]) %}{% for i in range(9999) %}{% set ns.s = [ns.s] %}{% endfor %}{{ ns.s }}",
    "slices": "{% set s = 'x' * 400000 %}" + "{% set a = s[1:] %}" * 900,
    "slices of lists, kept": "{% set s = range(9999)|list %}{% set ns = namespace(l=[]) %}"
    + _FOREVER.replace("BODY", "{% set ns.l = ns.l + [s[1:]] %}"),
    "lists, kept": "{% set ns = namespace(l=()) %}" + _FOREVER.replace("BODY", "{% set ns.l = (ns.l, []) %}"),
    "a range": "{% for a in range(10**9) %}{% endfor %}",
    "ranges of lists": "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = ns.l + range(9999)|list %}{% endfor %}",
    "center": "{{ 'a'|center(10**10) }}",
    "method center": "{{ 'a'.center(10**10) }}",
    "ljust": "{{ 'a'.ljust(10**10, 'b') }}",
    "rjust": "{{ 'a'.rjust(10**10) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "method by attr": "{{ ('a'|attr('center'))(10**10) }}",
    "expandtabs": "{{ ('\t' * 1000).expandtabs(10**7) }}",
    "indent": "{{ ('a\n' * 100000)|indent(10**6) }}",
    "indent, other ends of lines": "{{ ('a\r' * 100000)|indent(10**5, blank=true) }}",
    "indent by a text": "{{ ('a\x0b' * 100000)|indent('x' * 100000) }}",
    "to_bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "from_bytes": "{% set n = (1).from_bytes(('x' * 400000).encode(), 'big') %}{{ n // 3 }}",
    "json indent": "{{ [[1]]|tojson(indent=10**10) }}",
    "json indent by a text": "{{ range(9999)|list|tojson(indent='x' * 400000) }}",
    "json separators": "{{ range(9999)|list|tojson(separators=['x' * 400000, ':']) }}",
    "batch": "{{ [1]|batch(10**10, 'x')|list }}",
    "slice": "{{ [1]|slice(10**10)|list }}",
    "slice of lists": "{{ range(9999)|slice(400000, 'x')|list }}",
    "batch of a text": "{{ ('é€' * 200000)|batch(1)|list|length }}",
    "characters": "{{ ('é€' * 200000)|list|length }}",
    "split": "{{ ('é€ ' * 300000).split()|length }}",
    "map center": "{{ range(99999)|map('center', 400000)|list }}",
    "map of map": "{{ range(99999)|map('string')|map('center', 9000)|map('upper')|list|length }}",
    "filters waiting for filters": "{% set ns = namespace(g=range(9)) %}{% for i in range(50000) %}"
    "{% set ns.g = ns.g|map('string') %}{% endfor %}{{ ns.g|list }}",
    "filters in lists": "{% set ns = namespace(g=[1]) %}{% for i in range(50000) %}"
    "{% set ns.g = [ns.g]|map('list') %}{% endfor %}{{ ns.g|list }}",
    "sum": "{{ [[1]]|sum(start=[]) }}",
    "sum of large numbers": "{{ range(99999)|map('int')|sum(start=2 ** 65000) }}",
    "round": "{{ 1|round(2000000, 'ceil') }}",
    "round, negative": "{{ 1|round(-2000000) }}",
    "round of a list": "{{ [1, 2]|round(9, 'floor') }}",
    "round of a text": "{{ 'xxxxxxxxxx'|round(9, 'ceil') }}",
    "sort by many attributes": "{{ range(20000)|sort(attribute='real,' * 5000)|length }}",
    "sort of equal lists": "{% set l = range(9999)|list %}{{ range(99999)|map(attribute='x', default=l)|sort|length }}",
    "sort of namespaces": "{% set ns = namespace(l=range(20000)|list) %}{{ ([ns] * 2000)|sort(attribute='l')|length }}",
    "groupby a large default": "{% set l = range(9999)|list %}{{ range(9999)|groupby('x', default=l)|list|length }}",
    "unique of one hash": "{{ " + _COLLIDING + "|unique|list|length }}",
    "fromkeys of one hash": "{{ dict.fromkeys(" + _COLLIDING + ")|length }}",
    "method fromkeys of one hash": "{{ {}.fromkeys(" + _COLLIDING + ") }}",
    "dict of one hash": "{{ dict(" + _COLLIDING + "|batch(2))|length }}",
    "namespace of one hash": "{% set x = namespace(" + _COLLIDING + "|batch(2)) %}",
    "set of one hash": "{% set d = dict.fromkeys(range(0, 999 * " + str(_ZEROS) + ", " + str(_ZEROS) + ")) %}"
    "{{ d.keys().isdisjoint(range(" + str(_ZEROS) + ", 99999 * " + str(_ZEROS) + ", " + str(_ZEROS) + ")) }}",
    "views less a range": "{% set d = dict.fromkeys(range(999)) %}{{ d.keys() - range(0, 99999 * "
    + str(_ZEROS) + ", " + str(_ZEROS) + ") }}",
    "translate": "{{ 'aaa'.translate({97: 'b' * 400000}) }}",
    "maketrans": "{{ ''.maketrans('a' * 400000, 'b' * 400000) }}",
    "encode punycode": "{{ ('ü€' * 200000).encode('punycode')|length }}",
    "encode idna": "{{ ('ü€' * 200000).encode('idna')|length }}",
    "strip": "{{ ('b' * 400000).strip('c' * 400000 ~ 'b') }}",
    "trim": "{{ ('b' * 400000)|trim('c' * 400000 ~ 'b') }}",
    "rfind": "{{ ('a' * 400000).rfind('ab' ~ 'a' * 200000) }}",
    "rsplit": "{{ ('a' * 400000).rsplit('ab' ~ 'a' * 200000)|length }}",
    "rpartition": "{{ ('a' * 400000).rpartition('ab' ~ 'a' * 200000)|length }}",
    "find": "{{ ('a' * 400000).find('a' * 200000 ~ 'b' ~ 'a' * 200000) }}",
    "wordwrap": "{{ ('a ' * 100000)|wordwrap(1, wrapstring='x' * 100000) }}",
    "wordwrap of hyphens": "{{ ('a-' * 200000)|wordwrap(1) }}",
    "urlize of brackets": "{{ ('(' * 200000 ~ ')' * 399999 ~ 'a)')|urlize }}",
    "urlize with a target": "{{ ('a.com ' * 150)|urlize(target='x' * 400000)|length }}",
    "urlize with schemes": "{{ 'a.com'|urlize(extra_schemes=['ab:'] * 10000) }}",
    "striptags": "{{ ('<!-- --><a>' * 90000)|striptags }}",
    "striptags, open": "{{ ('<!--' * 200000)|striptags }}",
    "pprint of long keys": "{{ {'k' * 90000: range(9999)|list}|pprint|length }}",
    "urlencode of what map makes": "{% set l = ['é' * 200000, 'b'] %}{{ range(9999)|map(attribute='x', default=l)|urlencode|length }}",
    "xmlattr": "{{ {'a': '<' * 400000}|xmlattr|length }}",
    "escape again": _TWICE.replace("'ab'", "'<'").replace("STEP", "(ns.s ~ ns.s)|forceescape|string"),
    "tojson again": _TWICE.replace("'ab'", "'\"'").replace("STEP", "ns.s|tojson"),
    "string of lists again": _TWICE.replace("'ab'", "'\"\\\\'").replace("STEP", "[ns.s]|string"),
    "an attribute of dots": "{{ range(9999)|map(attribute='real.' * 90000 ~ 'real')|list|length }}",
    "strftime": "{{ strftime_now('%c' * 500) }}{{ strftime_now('%0999999999d') }}",
    "names": "{% macro " + "a" * 400_000 + "() %}{% endmacro %}{{ ([" + "a" * 400_000 + "] * 9999)|string|length }}",
}  # fmt: skip

_SOURCES = {
    "parentheses": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "brackets": "{{ " + "[" * 9000 + "]" * 9000 + " }}",
    "minus": "{{ " + "-" * 500_000 + "1 }}",
    "not": "{{ " + "not " * 200_000 + "1 }}",
    "additions": "{{ 1" + " + 1" * 200_000 + " }}",
    "concatenations": "{{ 1" + " ~ 1" * 200_000 + " }}",
    "filters": "{{ 1" + "|string" * 100_000 + " }}",
    "attributes": "{{ a" + ".a" * 300_000 + " }}",
    "outputs": "{{a}}" * 200_000,
    "outputs, almost too many": "{{a}}" * 6000,
    "attributes, almost too many": "{{a.b.c|trim}}" * 2000,
    "calls, almost too many": "{{a(b)(c)}}" * 2000,
    "sums, almost too many": "{{a+b*c~d}}" * 2000,
    "dicts, almost too many": "{{ {a:b}[c] }}" * 1700,
    "sets, almost too many": "".join(f"{{% set a{i}=b %}}" for i in range(3200)),
    "loops, almost too many": "{% for a in b %}{{loop.index}}{% endfor %}" * 1400,
    "macros, almost too many": "".join(f"{{% macro f{i}(x) %}}{{% endmacro %}}" for i in range(1600)),
    "ifs, almost too many": "{% if a is b %}{% set c = 1 %}{% endif %}" * 1300,
    "sets": "{% set a = 1 %}" * 60_000,
    "ifs": "{% if a %}" * 90_000,
    "ifs, nested": "{% if a %}" * 900 + "{% endif %}" * 900,
    "elifs": "{% if a %}" + "{% elif a %}" * 80_000 + "{% endif %}",
    "fors, nested": "{% for a in b %}" * 900 + "{% endfor %}" * 900,
    "macros in macros": "".join(f"{{% macro f{i}() %}}" for i in range(90)) + "{% endmacro %}" * 90,
    "many macros": "".join(f"{{% macro f{i}() %}}{{% endmacro %}}" for i in range(15_000)),
    "many blocks": "".join(f"{{% block f{i} %}}{{% endblock %}}" for i in range(15_000)),
    "many variables and ifs": "".join(f"{{% if b %}}{{% set a{i} = 1 %}}{{% endif %}}" for i in range(1800)),
    "comments": "{#" * 500_000,
    "comments, closed": "{# #}" * 200_000,
    "raw": "{% raw %}" + "{% " * 300_000,
    "quotes": "{{ '" * 200_000,
    "quotes with escapes": "{{ '" + "\\n" * 450_000 + "'|length }}",
    "a list": "{{ [" + "1," * 400_000 + "] }}",
    "a dict": "{{ {" + ",".join(f"{i * _ZEROS}: 1" for i in range(3000)) + "}|length }}",
    "underscores": "{{ 1" + "_1" * 300_000 + " }}",
    "spaces": "{{" + " " * 900_000 + "}}",
    "newlines": "\n" * 900_000 + "{{ a }}",
}  # fmt: skip


def bombs() -> dict[str, str]:
    """All bombs, by name."""
    from maxjax.text.template import caps as template_caps

    return {
        **_of_filters(template_caps.FILTERS),
        **_of_tests(template_caps.TESTS),
        **{f"statements: {name}": text for name, text in _STATEMENTS.items()},
        **{f"values: {name}": text for name, text in _VALUES.items()},
        **{f"sources: {name}": text for name, text in _SOURCES.items()},
    }


# --- escapes --------------------------------------------------------------------------------------

# Objects of each kind that a template can have, from which an escape could reach Python's internals.
_OBJECTS = {
    "text": "''", "list": "[]", "dict": "{}", "tuple": "()", "number": "(1)", "range": "range", "cycler": "cycler",
    "a cycler": "cycler(1)", "joiner": "joiner", "a joiner": "joiner()", "namespace": "namespace",
    "a namespace": "namespace()", "dict()": "dict", "raise_exception": "raise_exception",
    "strftime_now": "strftime_now", "undefined": "nothing", "method": "''.join", "format": "''.format",
    "a message": "messages[0]", "its image": "messages[0].image", "markup": "('a'|safe)",
}  # fmt: skip
_WAYS = {
    "class": "{{ OBJECT.__class__ }}",
    "class by item": "{{ OBJECT['__class__'] }}",
    "class by attr": "{{ OBJECT|attr('__class__') }}",
    "class by map": "{{ [OBJECT]|map(attribute='__class__')|list }}",
    "globals": "{{ OBJECT.__init__.__globals__ }}",
    "init": "{{ OBJECT.__init__.__func__.__globals__['os'].system('touch CANARY') }}",
}
_ESCAPES = {
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "subclasses by base": "{{ ().__class__.__base__.__subclasses__() }}",
    "mro": "{{ namespace.mro() }}{{ cycler.mro() }}",
    "format class": "{{ '{0.__class__}'.format(1) }}",
    "format class by name": "{{ '{a.__class__.__mro__}'.format(a=1) }}",
    "format item": "{{ '{0[__class__]}'.format(messages) }}",
    "format_map class": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "format by attr": "{{ ('{0.__class__}'|attr('format'))(1) }}",
    "format by item": "{{ '{0.__class__}'['format'](1) }}",
    "format by map": "{{ ['{0.__class__}']|map('attr', 'format')|first }}{{ (['{0.__class__}']|map('attr', 'format')|first)(1) }}",
    "markup format": "{{ ('{0.__class__}'|safe).format(1) }}",
    "format of a format": "{{ '{0.format}'.format('{0.__class__}') }}",
    "percent": "{{ '%(__class__)s' % {'__class__': 1}.__class__ }}",
    "sort by class": "{{ [1]|sort(attribute='__class__') }}",
    "groupby class": "{{ [1]|groupby('__class__')|list }}",
    "sum of class": "{{ [1]|sum(attribute='__class__') }}",
    "max by class": "{{ [1]|max(attribute='__class__.__mro__') }}",
    "join by class": "{{ [1]|join(attribute='__class__') }}",
    "unique by class": "{{ [1]|unique(attribute='__class__.__name__')|list }}",
    "selectattr": "{{ [1]|selectattr('__class__')|list }}",
    "rejectattr": "{{ [1]|rejectattr('__class__', 'none')|map(attribute='__class__')|list }}",
    "import os": "{% import 'os' as os %}{{ os.system('touch CANARY') }}",
    "import by name": "{{ __import__('os').system('touch CANARY') }}",
    "open": "{{ open('/etc/passwd').read() }}",
    "eval": "{{ eval('1') }}{{ exec('1') }}",
    "include": "{% include '/etc/passwd' %}",
    "extends": "{% extends '/etc/passwd' %}",
    "from": "{% from '/etc/passwd' import x %}",
    "self": "{{ self._TemplateReference__context }}",
    "self by item": "{{ self['_TemplateReference__context'].environment }}",
    "block context": "{% block a %}{{ self.a._context }}{% endblock %}",
    "super": "{% block a %}{{ super._context }}{{ super() }}{% endblock %}",
    "context": "{{ context }}{{ environment }}{{ resolve }}",
    "context in a macro": "{% macro f() %}{{ context.environment.globals }}{% endmacro %}{{ f() }}",
    "macro function": "{% macro f() %}{% endmacro %}{{ f._func.__globals__ }}",
    "macro environment": "{% macro f() %}{% endmacro %}{{ f._environment }}",
    "caller": "{% macro f() %}{{ caller._func }}{% endmacro %}{% call f() %}{% endcall %}",
    "loop iterable": "{% for a in [1] %}{{ loop._iterable }}{{ loop._undefined }}{% endfor %}",
    "loop recursion": "{% for a in [1] recursive %}{{ loop._recurse.__globals__ }}{% endfor %}",
    "generator frame": "{% set g = [1]|map('string') %}{{ g.gi_frame.f_globals }}",
    "generator frame by attr": "{{ ([1]|select)|attr('gi_frame')|attr('f_back') }}",
    "generator code": "{{ ([1]|batch(1)).gi_code.co_consts }}",
    "lazy items": "{{ ([1]|map('string'))._items.gi_frame }}",
    "generator throw": "{{ ([1]|map('string')).throw(1) }}{{ ([1]|map('string')).close() }}",
    "append": "{{ messages.append(1) }}",
    "update": "{{ messages[0].update(a=1) }}",
    "pop": "{{ messages.pop() }}",
    "sort in place": "{{ messages.sort() }}",
    "clear by attr": "{{ (messages|attr('clear'))() }}",
    "clear by item": "{{ messages['clear']() }}",
    "clear by map": "{{ ([messages]|map(attribute='clear')|first)() }}",
    "setdefault": "{{ messages[0].setdefault('x', 1) }}",
    "reset of a class": "{{ cycler.reset(cycler) }}",
    "reset of a joiner": "{{ cycler.reset(joiner) }}",
    "next of a namespace": "{{ cycler.next(namespace(items=[1], pos=0, current=7)) }}",
    "namespace names": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "namespace by dict": "{{ namespace({'__class__': 1}) }}",
    "namespace update": "{{ namespace().__setitem__('a', 1) }}",
    "namespace attributes": "{{ namespace()._Namespace__attrs }}",
    "wrapped": "{{ ''.format.__wrapped__ }}",
    "wrapped of a filter": "{{ ''.format.__wrapped__.__self__ }}",
    "bound self": "{{ [].copy.__self__.append(1) }}",
    "method of a method": "{{ ''.join.__call__ }}{{ ''.join.__reduce__() }}",
    "dict builtins": "{{ dict.__call__.__globals__ }}",
    "range globals": "{{ range.__globals__ }}{{ range.__builtins__ }}",
    "now globals": "{{ strftime_now.__globals__ }}{{ strftime_now.__module__ }}",
    "raise globals": "{{ raise_exception.func_globals }}{{ raise_exception.__code__ }}",
    "type": "{{ type(1) }}{{ object }}{{ getattr(1, '__class__') }}",
    "undefined object": "{{ nothing._undefined_obj }}{{ nothing._undefined_exception }}",
    "undefined method": "{{ nothing._fail_with_undefined_error.__globals__ }}",
    "undefined of an object": "{{ (messages[0].nope)._undefined_obj }}",
    "hex class": "{{ ''['\\x5f\\x5fclass\\x5f\\x5f'] }}",
    "joined class": "{{ ''['__cla' ~ 'ss__'] }}{{ ''|attr(['__cla', 'ss__']|join) }}",
    "class by format": "{{ ''|attr('%sclass%s'|format('__', '__')) }}",
    "reversed class": "{{ ''|attr('__ssalc__'|reverse) }}",
    "replaced class": "{{ ''|attr('xxclassxx'|replace('xx', '__')) }}",
    "class in a set": "{% set c = ''.__class__ %}{{ c }}{{ c.__base__ }}",
    "class in a loop": "{% for x in ''.__class__.__mro__ %}{{ x }}{% endfor %}",
    "class in a call": "{{ (''.__class__)(1) }}",
    "class in a test": "{{ 'x' if ''.__class__ is callable else 'y' }}{{ ''.__class__() }}",
    "generation": "{% generation %}{{ caller._func }}{% endgeneration %}",
    "extension": "{{ _said }}{{ extensions }}",
    "made filter": "{{ 1|map('=made') }}{{ [1]|map('=joined')|list }}{{ ''.__class__|map('=made') }}",
    "maketrans": "{{ ''.maketrans.__self__ }}",
    "from_bytes": "{{ (1).from_bytes.__self__ }}",
    "mapping": "{{ messages[0].keys().mapping.__class__ }}",
    "real": "{{ (1).real.__class__ }}{{ (1).numerator.__class__ }}",
    "environment by tojson": "{{ self|tojson }}",
    "environment by pprint": "{{ self|pprint }}{{ namespace()|pprint }}",
    "urlize": "{{ 'x'|urlize(rel=''.__class__) }}",
    "exception": "{{ raise_exception(''.__class__) }}{{ raise_exception(raise_exception.__globals__) }}",
    "debug": "{% debug %}",
    "do": "{% do messages.append(1) %}",
    "line": "# for x in ''.__class__.__mro__\n{{ ''.__class__ }}",
    "injection by a name": "{% set __builtins__ = 1 %}{{ __builtins__ }}{{ __name__ }}{{ __file__ }}",
    "injection by a string": "{{ 'a\\'\\n\" + str(().__class__) + \"' }}{{ \"\"\"'''().__class__ }}",
    "injection by a filter": "{{ [1]|map('__class__')|list }}",
    "injection by a block": "{% block __init__ %}{{ self.__init__ }}{% endblock %}",
    "injection by an argument": "{% macro f(__class__) %}{{ __class__ }}{% endmacro %}{{ f(''.__class__) }}",
    "secret": "{{ environ }}{{ os }}{{ sys }}{{ env }}{{ config }}{{ request }}{{ get_flashed_messages }}",
}  # fmt: skip


def escapes() -> dict[str, str]:
    ways = {
        f"{way} of {name}": text.replace("OBJECT", of)
        for name, of in _OBJECTS.items()
        for way, text in _WAYS.items()
    }
    return {**ways, **_ESCAPES}
