"""The configuration of the tests: which cases run, eight CPU devices, and JAX's strictest settings.

A sum of different dtypes or a silently broadcast rank is an error in the library's own tests;
`tests/conformance` and the doctests run under JAX's defaults, as a user's program does.
"""

import gc
import itertools
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.minilm import minilm_directory
from tests.oracles import recorded

# A shell that starts pytest in the background makes it ignore interrupts, and so its children, which
# tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
DEVICES = 8
TESTS_BETWEEN_LOOKS, MAX_MAPS = 20, 25_000
_ended = itertools.count(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--all`` and ``--oracles``."""
    parser.addoption(
        "--all", action="store_true", help="run all cases, not only the default set of tests"
    )
    parser.addoption(
        "--oracles",
        choices=("read", "check", "write"),
        default="read",
        help="read the answers kept in tests/oracles/recorded, check them, or write them anew",
    )


def _on_gpu(config: pytest.Config) -> bool:
    return config.option.markexpr == "gpu"


def pytest_configure(config: pytest.Config) -> None:
    """Chooses the backend before anything starts it; child processes inherit the choice."""
    recorded.start(config.getoption("--oracles"), is_all=config.getoption("--all"))
    if _on_gpu(config):
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Tests do not write to the user's compile cache: they and their child processes have their own.
    os.environ.setdefault("MAXJAX_COMPILE_CACHE", str(ROOT / ".compile-cache"))
    import jax

    from tests import properties

    properties.register()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    from maxjax.graph import compile_cache

    compile_cache.enable()


def sample(cases: list[pytest.Function], count: int | None = None) -> list[pytest.Function]:
    """Chooses so many of a test's cases that each value of each argument occurs; of these, spread evenly, ``count``."""
    values = {c: {(name, repr(value)) for name, value in c.callspec.params.items()} for c in cases}
    unseen, chosen = set().union(*values.values()), []
    while unseen:
        chosen.append(max(values, key=lambda case: len(values[case] & unseen)))
        unseen -= values[chosen[-1]]
    count = min(count or len(chosen), len(chosen))
    return [chosen[i * len(chosen) // count] for i in range(count)]


@pytest.hookimpl(trylast=True)  # after -k and -m, so that cases are chosen of what these leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what only ``--all`` runs, and skips tests that need a GPU."""
    if not _on_gpu(config):
        skip = pytest.mark.skip(reason="needs a GPU: pytest -m gpu")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
    if config.getoption("--all") or any("[" in argument for argument in config.args):
        return  # cases that are named on the command line all run
    tests = defaultdict(list)
    for item in items:
        if not (item.get_closest_marker("extra") or item.get_closest_marker("oracle")):
            tests[item.nodeid.partition("[")[0]].append(item)
    chosen: set[pytest.Item] = set()
    for cases in tests.values():
        mark = cases[0].get_closest_marker("sampled")
        chosen.update(sample(cases, *mark.args) if mark else cases)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def pytest_collection_finish() -> None:
    """Excludes the imported modules and tests from garbage collection, as they stay."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Restarts the count of the oracles' answers at the beginning of each test."""
    recorded.begin(item)


@pytest.hookimpl(trylast=True)  # after the fixtures
def pytest_runtest_teardown() -> None:
    """Removes hooks of layers that a test left, and compiled programs if they hold too many memory maps.

    A program takes 3 to 80 maps, and Linux allows a process 65,530; without a free one XLA ends the process.
    """
    clear_hooks = getattr(sys.modules.get("maxjax.nn.layer"), "clear_hooks", None)
    if clear_hooks is not None:
        clear_hooks()
    maps = Path("/proc/self/maps")
    if next(_ended) % TESTS_BETWEEN_LOOKS == 0 and maps.exists():
        if maps.read_bytes().count(b"\n") > MAX_MAPS:
            sys.modules["jax"].clear_caches()


def pytest_sessionfinish() -> None:
    """Stores the oracles' answers that ``--oracles=write`` recorded."""
    recorded.finish()


@pytest.fixture(autouse=True)
def strict_jax() -> Iterator[None]:
    """No implicit promotion of dtypes or ranks; set for all threads, not only this one."""
    import jax

    settings = {"jax_numpy_dtype_promotion": "strict", "jax_numpy_rank_promotion": "raise"}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def few_objects() -> None:
    """Excludes what there is from garbage collection: for tests that look through all objects again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The directory of the MiniLM checkpoint. If it is missing, tests fail: a skip would hide them."""
    directory = minilm_directory()
    if directory is None:
        pytest.fail("the MiniLM checkpoint is not installed: run scripts/setup.sh")
    return directory
