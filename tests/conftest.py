"""The configuration of the tests: eight CPU devices, and JAX's strictest settings.

A sum of different dtypes or a silently broadcast rank is an error in the library's own tests;
`tests/conformance` and the doctests run under JAX's defaults, as a user's program does.
"""

import atexit
import gc
import hashlib
import importlib
import itertools
import os
import re
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from scripts.minilm import minilm_directory
from tests.oracles import recorded
from tests.products import ALL

# A shell that starts pytest in the background makes it ignore interrupts, and so its children, which
# tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

DEVICES = 8
PROGRAMS_OF_A_CONTEXT = 100
FILES_BETWEEN_COLLECTIONS = 5
MEMORY_FOR_FILES = 12 << 30
ROOT = Path(__file__).resolve().parent.parent


_files = itertools.count()


def _on_gpu(config: pytest.Config) -> bool:
    return "gpu" in config.option.markexpr and "not gpu" not in config.option.markexpr


def _kernels() -> str:
    """A digest of the sources that decide how a kernel's operands are sharded."""
    sources = sorted((ROOT / "maxjax" / "kernels").rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:8]


def _few_dialects() -> None:
    """Loads only a few dialects of MLIR, once for many programs: an eager operation takes 11 ms, not 17.

    Programs for CPUs need only these. Programs of the main thread share an MLIR context, which is replaced
    after some number of them, as it never frees what it has created. Programs of other threads, some of
    which are XLA's, have a context each; programs for other platforms get all dialects.
    """
    mlir: Any = importlib.import_module("jax._src.interpreters.mlir")
    make, lower = mlir.make_ir_context, mlir.lower_jaxpr_to_module
    asked = threading.local()
    numbers = itertools.count()
    shared: list[Any] = [None]

    def few() -> Any:
        made = mlir.JaxIrContext()
        made.append_dialect_registry(mlir.upstream_dialects)
        made.dialects["func"]
        made.set_thread_pool(mlir.global_thread_pool)
        of = mlir.dialects
        for one in (of.sdy, of.mpmd, of.chlo, of.hlo):
            one.register_dialect(made)
        of.mhlo.register_mhlo_dialect(made)
        return made

    def context() -> Any:
        is_cpu, asked.is_cpu = getattr(asked, "is_cpu", False), False
        if not is_cpu:
            return make()
        if threading.get_ident() != threading.main_thread().ident:
            return few()
        if next(numbers) % PROGRAMS_OF_A_CONTEXT == 0:
            shared[0] = few()
        return shared[0]

    def lowered(*args: Any, **options: Any) -> Any:
        asked.is_cpu = tuple(options["platforms"]) == ("cpu",)
        try:
            return lower(*args, **options)
        finally:
            asked.is_cpu = False

    mlir.make_ir_context, mlir.lower_jaxpr_to_module = context, lowered


def _no_lines_in_programs() -> None:
    """Leaves the lines of Python out of programs, which nobody profiles here.

    And devices of a program's results are listed without an iterator: the exception of C++ that ends it takes
    0.2 ms where thousands of programs have registered their frames.
    """
    mlir: Any = importlib.import_module("jax._src.interpreters.mlir")
    shardings: Any = importlib.import_module("jax._src.sharding_impls")
    mlir._traceback_to_location = lambda *_: mlir.ir.Location.unknown()
    shardings.GSPMDSharding._device_assignment = property(lambda self: self._devices[:])


def _in_memory() -> None:
    """Puts the tests' files in memory if there is enough, as saves wait for a disk; not in campaigns."""
    disk, memory = Path("/dev/shm"), Path("/proc/meminfo")
    if ALL or "PYTEST_DEBUG_TEMPROOT" in os.environ or not os.path.ismount(disk):
        return
    available = re.search(r"MemAvailable:\s+(\d+) kB", memory.read_text())
    room = 1024 * int(available[1]) if available else 0
    if min(room, shutil.disk_usage(disk).free) > MEMORY_FOR_FILES:
        place = disk / f"maxjax-tests-{os.getuid()}"
        place.mkdir(mode=0o700, exist_ok=True)
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(place)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--oracles``: whether torch and transformers answer, or their recorded answers are used."""
    parser.addoption(
        "--oracles",
        choices=("read", "check", "write"),
        default="read",
        help="read the answers kept in tests/oracles/recorded, check them, or write them anew",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Restarts the count of the oracles' answers at the beginning of each test."""
    recorded.begin(item)


def pytest_sessionfinish() -> None:
    """Stores the oracles' answers that ``--oracles=write`` recorded."""
    recorded.finish()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Lets a process of xdist end without first freeing its programs one by one, which takes seconds."""
    if hasattr(config, "workerinput") and "jax" in sys.modules:
        atexit.unregister(importlib.import_module("jax._src.api").clean_up)


def pytest_configure(config: pytest.Config) -> None:
    """Chooses the backend before anything starts it; child processes inherit the choice."""
    absent = "not oracle" in config.option.markexpr
    recorded.start(config.getoption("oracles"), absent=absent)
    _in_memory()
    if _on_gpu(config):
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Otherwise each process would compile the package and the tests again. Bytecode stays out of the sources.
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        kept = str(ROOT / ".compile-cache" / "bytecode")
        sys.pycache_prefix = os.environ.setdefault("PYTHONPYCACHEPREFIX", kept)
        sys.dont_write_bytecode = False
    # Tests do not write to the user's compile cache: they and their child processes have their own.
    os.environ.setdefault("MAXJAX_COMPILE_CACHE", str(ROOT / ".compile-cache" / _kernels()))
    # Lets programs of several devices be found in the cache: without this the key contains the address of
    # the Python function that partitions a kernel. The digest in the directory's name stands for its source.
    os.environ.setdefault("JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY", "true")
    if not ALL:
        # Most of the time goes into compiling programs that run once: most of that into LLVM's
        # passes, and into emitting loops through MLIR. Without these flags, as for users, run the
        # doctests, the notebooks, `python -m tests.conformance.run`, the benchmarks, and these tests
        # with MAXJAX_ALL_PRODUCTS=1.
        flags = ["--xla_backend_optimization_level=0"]
        if version("jaxlib").startswith("0.10."):  # XLA ends a process with a flag it does not know
            flags.append("--xla_cpu_use_fusion_emitters=false")
            flags.append("--xla_cpu_parallel_codegen_split_count=1")
            flags.append("--xla_llvm_disable_expensive_passes=true")
        # Each flag once, also in the processes of xdist: flags are a part of the compile cache's keys.
        given = os.environ.get("XLA_FLAGS", "").split()
        os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys([*given, *flags]))
    # Nobody reads the lines of Python in these programs.
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
    import jax

    from tests import properties

    properties.register()
    jax.monitoring.register_event_duration_secs_listener(_count_programs)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    from maxjax.graph import compile_cache

    compile_cache.enable()
    if not ALL and version("jax").startswith("0.10."):
        _few_dialects()
        _no_lines_in_programs()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """When all cases run, divides a file's tests between processes, as some files take an hour."""
    if not ALL or config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFunction(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.partition("[")[0]

    return ByFunction(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m gpu``, collects only files with GPU tests, so that only their imports must be installed."""
    if config.option.markexpr != "gpu" or collection_path.suffix != ".py":
        return None
    return True if "mark.gpu" not in collection_path.read_text() else None


@pytest.hookimpl(tryfirst=True)  # before those that are slow are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks cases of tests as slow or as a campaign, and skips tests that need a GPU.

    ``@pytest.mark.fast("a-1", "b-2")`` names cases by the text in brackets after the test's name; the
    test's other cases are slow. ``@pytest.mark.default("a-1", "c-1")`` names those of the default set,
    which has the fast ones as well; the other cases are a campaign. The named cases together must reach
    every line that the others reach, and have every value of an axis that changes the computation. If
    none of the named cases exists on this machine, the mark has no effect.
    """
    for mark, others in (("fast", pytest.mark.slow), ("default", pytest.mark.campaign)):
        tests: dict[str, list[tuple[pytest.Item, bool]]] = {}
        for item in items:
            if (found := item.get_closest_marker(mark)) is not None:
                fast = item.get_closest_marker("fast")
                named = {*found.args, *(fast.args if fast else ())}
                test, _, case = item.nodeid.partition("[")
                tests.setdefault(test, []).append((item, case[:-1] in named))
        for cases in tests.values():
            if any(is_named for _, is_named in cases):
                for item in (item for item, is_named in cases if not is_named):
                    item.add_marker(others)
    if _on_gpu(config):
        return
    skip = pytest.mark.skip(reason="needs a GPU: pytest -m gpu")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Excludes all objects so far from garbage collection, as imported modules and tests stay alive."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(autouse=True, scope="module")
def what_a_file_leaves() -> Iterator[None]:
    """Excludes what the tests of some files leave in caches from later garbage collections."""
    yield
    if next(_files) % FILES_BETWEEN_COLLECTIONS == 0:
        gc.collect()
        gc.freeze()


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


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Prints a last line that says how many tests were left out, and why."""
    reasons = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ")
        for report in terminalreporter.getreports("skipped")
    )
    left = len(terminalreporter.getreports("deselected"))
    parts = [f"{count} skipped ({reason})" for reason, count in reasons.most_common()]
    if left:
        parts.insert(0, f"{left} not chosen by -m '{config.option.markexpr}' (.ci/full runs all)")
    terminalreporter.write_line("left out: " + ("; ".join(parts) or "nothing"))


# Programs that are compiled without the flags above are larger: one of a model on a mesh has up to 80 memory
# maps, and 25,000 maps take about 7 GB.
PROGRAMS_BETWEEN_LOOKS, MAX_MAPS = (100, 25_000) if ALL else (500, 50_000)
_programs = 0  # since the maps of memory were counted


def _count_programs(event: str, _seconds: float, **_: Any) -> None:
    """A listener of JAX's events that counts programs that were compiled or found in the compile cache."""
    global _programs
    _programs += event == "/jax/core/compile/backend_compile_duration"


@pytest.hookimpl(
    trylast=True
)  # after the fixtures; a fixture for it would take longer than it does
def pytest_runtest_teardown() -> None:
    """Removes hooks of layers that a test left, and compiled programs if there are too many."""
    clear_hooks = getattr(sys.modules.get("maxjax.nn.layer"), "clear_hooks", None)
    if clear_hooks is not None:
        clear_hooks()
    _let_programs_go()


def _let_programs_go() -> None:
    """Clears JAX's caches if compiled programs hold too many memory maps.

    A program takes 3 to 6 maps, and Linux allows a process 65,530; without a free one XLA ends the process.
    Counting takes up to 50 ms, and cleared programs are traced and lowered again, so both are done rarely.
    """
    global _programs
    maps = Path("/proc/self/maps")
    if _programs < PROGRAMS_BETWEEN_LOOKS or not maps.exists():
        return
    _programs = 0
    if maps.read_bytes().count(b"\n") > MAX_MAPS:
        sys.modules["jax"].clear_caches()


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The directory of the MiniLM checkpoint. If it is missing, tests fail: a skip would hide them."""
    directory = minilm_directory()
    if directory is None:
        pytest.fail("the MiniLM checkpoint is not installed: run scripts/setup.sh")
    return directory
