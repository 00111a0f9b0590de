# ruff: noqa: E501 (a template a line)
"""What bounds a chat template: its table, its thread, its text against jinja's own, attacks."""

import contextvars
import ctypes
import gc
import resource
import signal
import sys
import threading
import time

import jinja2
import markupsafe
import pytest
from jinja2 import defaults
from jinja2.sandbox import ImmutableSandboxedEnvironment

from maxjax.errors import UserInputError
from maxjax.text.template import budget as template_budget
from maxjax.text.template import caps as template_caps
from maxjax.text.template import render as template
from maxjax.text.template import thread as template_thread
from maxjax.text.template.render import render
from maxjax.text.template.sandbox import Sandbox
from maxjax.text.template.thread import Stopped, run_until
from scripts.template_attacks import bombs, escapes
from scripts.template_bombs import bomb, escape

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
FOLDED = "{% if false %}{{ 'x'|center(4000000)|batch(1)|list }}{% endif %}"


@pytest.fixture
def soon(monkeypatch):
    """Templates have few steps, so that a test need not wait for long."""
    monkeypatch.setattr(template_budget, "_STEPS", 1 << 16)


# --- the table ----------------------------------------------------------------------------------


def test_all_that_jinja_has_is_in_the_table():
    assert set(defaults.DEFAULT_FILTERS) == set(template_caps.FILTERS)
    assert set(defaults.DEFAULT_TESTS) == set(template_caps.TESTS)
    assert set(defaults.DEFAULT_NAMESPACE) - {"lipsum"} == template_caps.GLOBALS
    assert template_caps.LISTED <= set(template_caps.FILTERS)
    for kind, table in template_caps.METHODS.items():
        methods = {name for name in dir(kind) if name[0] != "_" and callable(getattr(kind, name))}
        assert methods <= set(table), kind


@pytest.mark.parametrize(
    "value",
    ["a", b"a", 1, 1.5, 1j, [], (), {}, range(2), {}.keys(), {}.values(), {}.items(), markupsafe.Markup()],
)  # fmt: skip
def test_each_kind_of_value_has_its_methods_in_the_table(value):
    assert type(value) in template_caps.METHODS


def test_what_is_not_in_the_table_cannot_be_used(monkeypatch):
    monkeypatch.setitem(defaults.DEFAULT_FILTERS, "added", str)
    monkeypatch.setitem(defaults.DEFAULT_TESTS, "added", bool)
    monkeypatch.setitem(defaults.DEFAULT_NAMESPACE, "added", str)
    made = Sandbox()
    assert "added" not in {**made.filters, **made.tests, **made.globals}
    monkeypatch.delitem(template_caps.METHODS[str], "upper")
    with pytest.raises(UserInputError, match="cannot call 'upper'"):
        render("{{ 'a'.upper() }}", {})


# --- the same text as without bounds ------------------------------------------------------------

VALUES = {
    "s": 'Ab <é> "q"  c-d\n e🙂', "n": 3, "f": 2.75, "l": [3, 1, 2, 1], "d": {"b": 1, "a": "x"}, "e": [],
    "m": [{"role": "user", "content": "Hi", "k": 2}, {"role": "tool", "content": "42", "k": 1}],
}  # fmt: skip
SNIPPETS = [
    "{% for x in m %}{{ x.content.strip() }}{{ ','.join([x.role, 'y']) }}{{ '{a}'.format_map({'a': x.k}) }}{% endfor %}",
    "{{ m|map(attribute='role')|join(', ') }}|{{ m|join(',', attribute='role') }}|{{ m|join(d='-', attribute='k') }}",
    "{{ l|sort|list }}{{ l|sort(reverse=true) }}{{ l|unique|list }}{{ l|max }}{{ l|min }}{{ l|sum }}{{ l|first }}",
    "{{ m|sort(attribute='k')|map(attribute='role')|list }}{{ m|sum(attribute='k') }}{{ m|sort(attribute='role,k') }}",
    "{% for g in m|groupby('role') %}{{ g.grouper }}={{ g.list|length }};{% endfor %}{{ m|groupby('z', default='') }}",
    "{{ l|batch(3, 0)|list }}{{ l|slice(3)|list }}{{ l|reverse|list }}{{ s|reverse }}{{ l|last }}{{ l|length }}",
    "{{ m|selectattr('role', 'equalto', 'tool')|list }}{{ m|rejectattr('k', 'odd')|list }}{{ l|select('even')|list }}",
    "{% if e|selectattr('x') %}always{% endif %}{{ (l|map('string')) is iterable }}{{ (l|map('string')) is sequence }}",
    "{{ s|upper }}{{ s|lower }}{{ s|title }}{{ s|capitalize }}{{ s|trim }}{{ s|trim('Ae') }}{{ s|replace('c', 'zz') }}",
    "{{ s|e }}{{ s|escape|upper }}{{ s|forceescape }}{{ s|safe }}{{ s|urlencode }}{{ d|urlencode }}{{ d|xmlattr }}",
    "{{ s|indent }}{{ s|indent(2, true) }}{{ s|wordwrap(5) }}{{ s|wordcount }}{{ s|center(30) }}{{ s|truncate(6) }}",
    "{{ s|striptags }}{{ 'go to a.com'|urlize }}{{ d|pprint }}{{ s|string }}{{ s|length }}{{ s|list }}{{ s|first }}",
    "{{ f|round }}{{ f|round(1, 'floor') }}{{ f|int }}{{ '7'|int }}{{ 'x'|int(5) }}{{ '2.5'|float }}{{ -3|abs }}",
    "{{ 12345|filesizeformat }}{{ '%s-%03d'|format('a', 7) }}{{ '%s %s' % (n, f) }}{{ '{0[a]}{1:>5}'.format(d, n) }}",
    "{{ d|dictsort }}{{ d|items|list }}{{ d.items()|list }}{{ d|list }}{{ d.get('z', 4) }}{{ d.keys()|list }}{{ d }}",
    "{{ nothing|default('x') }}{{ ''|d('y', true) }}{{ nothing }}{{ nothing is defined }}{{ d|attr('keys') is callable }}",
    "{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ 7 / 2 }}{{ 7 - 9 }}{{ -n }}{{ 'a' * 3 }}{{ [1] * 2 + [2] }}{{ (1, 2) + (3,) }}",
    "{{ 1 ~ 'a' ~ none ~ [1] }}{{ l[1:] }}{{ s[::-1] }}{{ l[-1] }}{{ s[2:4] }}{{ (1, n) }}{{ {'a': n} }}{{ 'a' in s }}",
    "{% for x in l %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ loop.cycle('a', 'b') }}{{ loop.changed(x) }}{% endfor %}",
    "{% for x in l if x > 1 %}{{ loop.revindex }}{{ loop.previtem }}{% else %}none{% endfor %}{% for x in e %}{% else %}-{% endfor %}",
    "{% for x in [[1, [2]], [3]] recursive %}{{ loop.depth }}{{ loop(x) if x is sequence else x }}{% endfor %}",
    "{% for x in l %}{% if x == 1 %}{% continue %}{% endif %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% macro f(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{{ caller() if caller }}{% endmacro %}{{ f(1, 2, 3, z=4) }}"
    "{% call f(1) %}in{% endcall %}{{ f(*l) }}{{ f(**{'a': 1}) }}",
    "{% set ns = namespace(a=1) %}{% for x in l %}{% set ns.a = ns.a + x %}{% endfor %}{{ ns.a }}",
    "{% set x %} a {{ n }} {% endset %}{{ x|trim }}{% filter upper %}b{{ n }}{% endfilter %}{% with y = 2 %}{{ y }}{% endwith %}",
    "{% autoescape true %}{{ s }}{{ '<' ~ s }}{{ '<b>'|safe ~ s }}{{ [s, '<']|join('<') }}<i>{% endautoescape %}{{ s }}",
    "{% autoescape true %}{% macro f() %}<b>{{ s }}{% endmacro %}{{ f() }}{% set x %}<i>{{ s }}{% endset %}{{ x }}{% endautoescape %}",
    "{% block a %}{{ s }}{% endblock %}{{ self.a() }}{% raw %}{{ x }}{% endraw %}{# c #}",
    "{{ s.split() }}{{ s.partition('<') }}{{ s.find('é') }}{{ s.rsplit('-', 1) }}{{ s.startswith('Ab') }}{{ s.encode()|length }}",
    "{{ s.replace('c', 'd', 1) }}{{ s.lstrip('A') }}{{ s.splitlines() }}{{ s.title() }}{{ s.zfill(30) }}{{ s.count('c') }}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.current }}{% set j = joiner() %}{{ j() }}{{ j() }}{{ dict(c=1, **d) }}",
    "{{ s is string }}{{ n is divisibleby 3 }}{{ n is odd }}{{ d is mapping }}{{ none is none }}{{ s is sameas s }}{{ s is lower }}",
    "{{ s is in s }}{{ 1 in l }}{{ n is number }}{{ f is float }}{{ 'upper' is filter }}{{ 'odd' is test }}{{ n gt 2 }}",
    "{{ n if n > 5 }}{{ 'a' if n else 'b' }}{{ not n }}{{ n and f }}{{ n == 3 and l != e }}{{ range(3)|list }}{{ range(9)[2:4] }}",
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_the_text_is_that_of_jinja_without_bounds(number):
    """Also what fails there fails here, with the same words."""
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    try:
        expected = plain.from_string(SNIPPETS[number]).render(VALUES)
    except jinja2.TemplateError as error:
        with pytest.raises(UserInputError) as info:
            render(SNIPPETS[number], VALUES)
        assert str(error) in str(info.value)
    else:
        assert render(SNIPPETS[number], VALUES) == expected


def test_nothing_is_evaluated_before_it_is_reached():
    assert render(FOLDED + "{% if false %}{{ 9 ** 9 ** 9 }}{% endif %}ok", {}) == "ok"


def test_long_chats_may_be_cut_in_every_turn():
    cut = "{% for m in ms %}{% set rest = ms[loop.index0:]|selectattr('n')|list %}{{ rest|length }},{% endfor %}"
    messages = [{"n": i + 1, "content": "x" * 200} for i in range(300)]
    assert render(cut, {"ms": messages}) == "".join(f"{300 - i}," for i in range(300))


# --- the thread ---------------------------------------------------------------------------------


def forever():
    while True:
        pass


def no_template_runs():
    return not [t for t in threading.enumerate() if t.name == "maxjax template"]


@pytest.mark.parametrize("text", [LOOPS, FOLDED + LOOPS])
def test_loops_are_ended_and_leave_nothing(text, soon):
    start = time.monotonic()
    with pytest.raises(UserInputError, match="takes too many steps"):
        render(text, {})
    assert time.monotonic() - start < 30 and no_template_runs()
    assert render("{{ 1 }}", {}) == "1"


def test_one_that_swallows_what_stops_it_is_stopped():
    """As callbacks of the garbage collector do, which run in any thread."""
    swallowed = []

    def work():
        while len(swallowed) < 3:
            try:
                forever()
            except BaseException as error:
                swallowed.append(error)
        forever()

    with pytest.raises(Stopped):
        run_until(work, 0.05)
    assert len(swallowed) == 3 and no_template_runs()


def test_garbage_is_collected_while_a_template_is_stopped(monkeypatch):
    monkeypatch.setattr(template_budget, "_STEPS", 1 << 60)
    monkeypatch.setattr(template, "_SECONDS", 0.2)
    monkeypatch.setattr(template, "_LATE", "it ran for more than 0.2 seconds")

    def callback(phase, info):
        try:
            for _ in range(1000):
                pass
        except BaseException:
            pass

    gc.callbacks.append(callback)
    try:
        with pytest.raises(UserInputError, match="ran for more than"):
            render("{% for a in range(99999) %}{% for b in range(99999) %}{% set x = [[a], [b]] %}"
                   "{% set y = namespace(x=x) %}{% endfor %}{% endfor %}" + LOOPS, {})  # fmt: skip
    except AssertionError as error:  # it may have made too much before
        assert "too much text" in str(error)
    finally:
        gc.callbacks.remove(callback)
    assert no_template_runs()


def test_debuggers_go_on(soon):
    """Their function stays, and is called for what the caller runs, after one was stopped as well."""
    called = []
    before = sys.gettrace()

    def trace(frame, event, argument):
        called.append(frame.f_code.co_name)

    sys.settrace(trace)
    try:
        for text in ("{{ 1 }}", LOOPS):
            try:
                render(text, {})
            except UserInputError:
                pass
            assert sys.gettrace() is trace
            called.clear()
            no_template_runs()
            assert "no_template_runs" in called
    finally:
        sys.settrace(before)


def test_the_caller_is_interrupted(monkeypatch):
    """Ctrl-C while a template runs ends it, and comes out of the call."""
    monkeypatch.setattr(template_budget, "_STEPS", 1 << 60)
    timer = threading.Timer(0.1, signal.raise_signal, [signal.SIGINT])
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        render(LOOPS, {})
    timer.join()
    assert time.monotonic() - start < 30 and no_template_runs()
    assert render("{{ 1 }}", {}) == "1"


def test_a_caller_in_another_thread_is_interrupted():
    begun, ended = threading.Event(), []

    def work():
        begun.set()
        forever()

    def call():
        try:
            run_until(work, 60.0)
        except KeyboardInterrupt:
            ended.append("interrupted")

    thread = threading.Thread(target=call)
    thread.start()
    assert begun.wait(30) and thread.ident is not None
    raised = ctypes.py_object(KeyboardInterrupt)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), raised)
    thread.join(30)
    assert ended == ["interrupted"] and no_template_runs()


def test_work_has_the_callers_context_and_its_errors_come_out():
    variable = contextvars.ContextVar("variable", default=1)
    variable.set(2)
    assert run_until(variable.get, 5.0) == 2
    with pytest.raises(ZeroDivisionError):
        run_until(lambda: 1 / 0, 5.0)
    with pytest.raises(SystemExit):
        run_until(lambda: sys.exit(3), 5.0)


def test_work_that_ends_as_its_time_does(monkeypatch):
    """What is posted lands in the work or nowhere: never in what its thread does afterwards."""
    monkeypatch.setattr(template_thread, "_GRACE", 0.0002)
    hooked, outcomes = [], set()
    monkeypatch.setattr(threading, "excepthook", hooked.append)

    def work():
        end = time.monotonic() + 0.002
        while time.monotonic() < end:
            pass
        return "made"

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for number in range(150):
            try:
                outcomes.add(run_until(work, number % 30 * 1e-4))
            except Stopped:
                outcomes.add("stopped")
    finally:
        sys.setswitchinterval(interval)
    assert outcomes == {"made", "stopped"} and not hooked and no_template_runs()


def test_a_thread_that_cannot_start(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_until(forever, 1.0)
    with pytest.raises(UserInputError, match="ZeroDivisionError"):
        render("{{ 1 }}", {})


# --- long chats ---------------------------------------------------------------------------------

# Text that a variable gathers, and all messages looked through for each of them.
GATHERS = """{% set n = namespace(text='') %}{% for m in messages %}{% set n.text = n.text ~ m.content %}
{%- for other in messages[loop.index0:] %}{% if other.role == 'none' %}x{% endif %}{% endfor %}{% endfor %}
{%- for t in tools %}{{ t|tojson }}{% endfor %}{{ n.text }}"""


def test_a_long_chat_with_many_tools_is_rendered_whatever_text_is_made_on_the_way():
    """They make eight million characters of text on the way, of which 40,000 are held at a time."""
    messages = [{"role": "user", "content": "x" * 100}] * 400
    tools = [{"name": f"tool{i}", "parameters": {"a": {"type": "string"}}} for i in range(500)]
    text = render(GATHERS, {"messages": messages, "tools": tools})
    assert text.endswith("x" * 40_000) and text.count("tool") == 500


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (LOOPS, "too many steps"),
        ("{% for a in range(99999) %}{{ range(99999)|sum }}{% endfor %}", "too many steps"),
        ("{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}", "nested"),
        ("{% for a in range(999) %}{{ 'x' * 20000 * 20 }}{% endfor %}", "holds too much|makes something of more"),
        ("{{ [" + "'x' * 20000 * 20, " * 99 + "]|length }}", "holds too much text|makes something"),
        ("".join(f"{{% set v{i} = 'x' * 20000 * 20 %}}" for i in range(99)), "holds too much|makes something of more"),
        ("{% set n = namespace() %}" + "".join(f"{{% set n.v{i} = 'x' * 20000 * 20 %}}" for i in range(99)), "holds too much"),
        ("{% set n = namespace(l=[]) %}{% for a in range(999) %}{% set n.l = [namespace(a='x' * 20000 * 20)] + n.l %}{% endfor %}",
         "holds too much"),
    ],
)  # fmt: skip
def test_steps_and_what_is_held_are_bounded(text, says, monkeypatch):
    if "holds" in says:
        monkeypatch.setattr(template_budget, "_STEPS", 1 << 40)
    with pytest.raises(UserInputError, match=says):
        render(text, {})


# --- attacks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "{{ range(500)|join('y' * 400000, attribute='real')|length }}",
        "{{ 1|round(4000000, 'ceil') }}",
        "{{ '%0999999999d' is even }}",
        "{{ ('{0.s}' * 100000).format(namespace(s='x' * 20000 * 20)) }}",
    ],
)
def test_what_is_made_in_one_step_is_weighed_before(text):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserInputError, match="makes something of more than"):
        render(text, {})
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * (1 if sys.platform == "darwin" else 1024) < 200e6


BOMBS = dict(list(bombs().items())[::24])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name, soon):
    """A sample, with few steps; all: `python scripts/template_bombs.py`."""
    result = bomb(BOMBS[name])
    assert not result["wrong"] and result["seconds"] < 30 and result["mb"] < 300


def test_escapes():
    assert len(escapes()) > 200
    escape("{{ 1 / 0 }}{{ strftime_now('%d') }}")
    for text in ("{{ strftime_now('%d') }}", *escapes().values()):
        result = escape(text)
        assert not result["wrong"], (text, result)


def test_templates_of_several_threads_have_a_budget_each(soon):
    """While one is ended the others give their texts."""
    found, refused = {}, []

    def work(number):
        for turn in range(20):
            found[number, turn] = render("{{ 'a' * n }}{{ [n]|tojson }}", {"n": number})

    def end():
        try:
            render(LOOPS, {})
        except UserInputError as error:
            refused.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    threads.append(threading.Thread(target=end))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 1 and len(found) == 120
    assert all(text == "a" * number + f"[{number}]" for (number, _), text in found.items())
