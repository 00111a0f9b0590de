"""``maxjax serve``: answers OpenAI's API on a port."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Any

from ..errors import UserInputError, printable
from .model import model_arguments, open_model
from .options import adapter, file_path, import_jax, integer, positive, size, text


def serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    model_arguments(parser, is_positional=True)
    group = parser.add_argument_group("answers")
    group.add_argument("--slots", type=positive, default=32, metavar="N",
                       help="answers that are written at once (default: 32)")  # fmt: skip
    group.add_argument("--cache", type=size, metavar="SIZE",
                       help="size of the cache on each device, as 8GiB (default: 2,048 tokens a slot)")  # fmt: skip
    group.add_argument("--adapter", action="append", type=adapter, default=[], metavar="NAME=FOLDER",
                       help="a LoRA adapter, which requests name as their model; may be repeated")  # fmt: skip
    group.add_argument("--speculation", choices=["lookup"],
                       help="guess tokens from the text itself: summaries come faster")  # fmt: skip
    group.add_argument("--tool-call-parser", metavar="FORMAT",
                       help="format of calls of functions, such as hermes (default: the chat template's)")  # fmt: skip
    group.add_argument("--exact", action="store_true",
                       help="the same bits whatever else runs; slower")  # fmt: skip
    group.add_argument("--no-compile", action="store_true",
                       help="compile programs when a request needs them, not before the server is ready")  # fmt: skip
    group = parser.add_argument_group(
        "several processes",
        "Start the same command in each, with --mesh over the devices of all. Process 0 has the port.",
    )  # fmt: skip
    group.add_argument("--coordinator", dest="coordinator_address", type=text, metavar="HOST:PORT",
                       help="where process 0 is reached by the others, on a free port; auto: what Slurm, Open MPI,"
                       " Kubernetes or a TPU pod says, the next two too")  # fmt: skip
    group.add_argument("--processes", dest="num_processes", type=positive, metavar="N",
                       help="number of processes")  # fmt: skip
    group.add_argument("--process", dest="process_id", type=integer(0), metavar="I",
                       help="number of this process, from 0 on")  # fmt: skip
    group.add_argument("--heartbeat", type=positive, metavar="SECONDS",
                       help="a process without a sign of life for so long is lost (default: 20)")  # fmt: skip
    group = parser.add_argument_group("clients")
    group.add_argument("--host", default="127.0.0.1", metavar="ADDRESS",
                       help="address to listen on; 0.0.0.0 for all (default: 127.0.0.1)")  # fmt: skip
    group.add_argument("--port", type=_port, default=8000, metavar="N",
                       help="port to listen on; 0 for a free one (default: 8000)")  # fmt: skip
    group.add_argument("--name", type=text, metavar="NAME",
                       help="name of the model in requests (default: the last part of MODEL)")  # fmt: skip
    group.add_argument("--api-key", type=file_path, metavar="FILE",
                       help="a file with a key on each line, of which a client must send one")  # fmt: skip
    group.add_argument("--shared-prefixes", action="store_true",
                       help="clients with different keys share what the cache has of equal beginnings")  # fmt: skip
    group.add_argument("--allow-origin", action="append", type=text, default=[], metavar="URL",
                       help="an origin of web pages that may ask; may be repeated")  # fmt: skip
    group.add_argument("--allow-host", action="append", type=text, default=[], metavar="NAME",
                       help="a Host header that is answered, besides localhost; may be repeated")  # fmt: skip
    group.add_argument("--allow-image-host", action="append", type=text, default=[], metavar="PATTERN",
                       help="a host from which pictures at http(s) addresses are fetched: a name, *.NAME, or *"
                       " for all; may be repeated")  # fmt: skip
    group.add_argument("--waiting", type=positive, default=1024, metavar="N",
                       help="answers that may wait; more are refused with status 429 (default: 1024)")  # fmt: skip
    group.add_argument("--timeout", type=positive, default=600, metavar="S",
                       help="longest time of an answer in seconds (default: 600)")  # fmt: skip
    group.add_argument("--drain", type=positive, default=30, metavar="S",
                       help="seconds in which answers may end after SIGTERM or Ctrl-C (default: 30)")  # fmt: skip
    group.add_argument("--log-requests", action="store_true",
                       help="print a JSON line for each request on stderr; never prompts or answers")  # fmt: skip


def serve(options: argparse.Namespace) -> Iterable[str]:
    """Answers OpenAI's API with MODEL, until SIGTERM or Ctrl-C.

    /health answers at once, /ready when the model is loaded and its programs are compiled.
    """
    if _joined(options):
        return _follow(options)
    try:
        from ..serving.app import application
        from ..serving.hosts import is_loopback
        from ..serving.run import run
        from ..serving.server import RequestLimits, Server
    except ImportError as error:
        raise UserInputError(
            f"maxjax serve needs packages that are not installed ({error.name}): pip install maxjax[serve]"
        ) from None
    keys = _keys(options)
    guards = is_loopback(options.host) or bool(options.allow_host)
    server = Server(
        options.name or PurePath(options.model).name, keys, options.shared_prefixes,
        RequestLimits(seconds=options.timeout, waiting=options.waiting), options.tool_call_parser,
        options.allow_image_host,
    )  # fmt: skip
    loading = threading.Thread(target=_load, args=(options, server), daemon=True)

    def started(host: str, port: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        print(f"listening on http://{shown}:{port}", flush=True)
        loading.start()

    with _access_log() if options.log_requests else contextlib.nullcontext():
        run(
            application(server, options.allow_origin, options.allow_host if guards else None),
            server,
            options.host,
            options.port,
            options.drain,
            started,
        )
    loading.join(1.0)
    if loading.is_alive():  # what it compiles cannot be stopped
        sys.stdout.flush()
        os._exit(0)
    if server.engine is not None:
        server.engine.close()
    if server.error is not None:
        raise server.error
    return []


def _load(options: argparse.Namespace, server: Any) -> None:
    """Loads the model, compiles its programs, and ends the server if that fails."""
    try:
        model, tokenizer, engine = _opened(options)
        server.use(model, tokenizer, engine)
        if engine is not None and not options.no_compile:
            engine.compile()
        server.is_ready = True
        print(f"{printable(server.name)} is ready", flush=True)
    except BaseException as error:
        server.fail(error)


def _opened(options: argparse.Namespace) -> tuple[Any, Any, Any]:
    from ..engine.batching.engine import Engine
    from ..models import LanguageModel

    opened = open_model(options, generates=False)
    if not isinstance(opened.model, LanguageModel):
        if _is_shared(options):
            raise UserInputError(
                "several processes serve models that write text, and this one does not"
            )
        return opened.model, opened.tokenizer, None
    engine = Engine(
        opened.model, opened.tokenizer, slots=options.slots, cache_bytes=options.cache, chunk=options.chunk,
        cache_dtype=options.cache_dtype, exact=options.exact, speculation=options.speculation,
        adapters=dict(options.adapter),
    )  # fmt: skip
    return opened.model, opened.tokenizer, engine


# --- several processes ------------------------------------------------------------------------


def _is_shared(options: argparse.Namespace) -> bool:
    """Whether this is one of several processes."""
    given = options.coordinator_address, options.num_processes, options.process_id
    return any(one is not None for one in given)


def _joined(options: argparse.Namespace) -> int:
    """Joins the other processes, if there are any; returns the number of this one."""
    if not _is_shared(options):
        if options.heartbeat is not None:
            options.error("--heartbeat is for several processes: it needs --coordinator")
        return 0
    if options.mesh is None:
        raise UserInputError(
            "several processes need --mesh, over the devices of all of them, such as --mesh model=-1"
        )
    import_jax()
    import jax

    from ..distributed import initialize

    address = options.coordinator_address
    given = {} if options.heartbeat is None else {"heartbeat_timeout": options.heartbeat}
    address = None if address == "auto" else address
    initialize(address, options.num_processes, options.process_id, **given)
    return jax.process_index()


def _follow(options: argparse.Namespace) -> Iterable[str]:
    """Runs the model together with process 0, until that ends its server."""
    _, _, engine = _opened(options)
    print("this process follows process 0", flush=True)
    with _first_ctrl_c_ignored():
        engine.close()
    return []


@contextlib.contextmanager
def _first_ctrl_c_ignored() -> Iterator[None]:
    """A terminal sends Ctrl-C to all processes, and process 0 may still end its answers."""

    def pressed(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, before)
        print("maxjax: process 0 ends the server; Ctrl-C again ends this process", file=sys.stderr)

    before = signal.signal(signal.SIGINT, pressed)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _keys(options: argparse.Namespace) -> list[str]:
    if options.api_key is None:
        return []
    try:
        lines = options.api_key.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserInputError(f"{options.api_key}: {error}") from error
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise UserInputError(f"{options.api_key} has no key: write one on each line")
    return keys


@contextlib.contextmanager
def _access_log() -> Iterator[None]:
    """Prints the lines of requests on stderr."""
    log, handler = logging.getLogger("maxjax.access"), logging.StreamHandler()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
        log.propagate = True


def _port(found: str) -> int:
    return integer(0, 65535)(found)
