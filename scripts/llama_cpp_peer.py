"""Runs llama.cpp for comparisons: a separate process that runs a GGUF file on the CPU.

    python scripts/llama_cpp_peer.py MODEL.gguf --threads 2 --context 1024   # the worker
    python scripts/llama_cpp_peer.py MODEL.gguf --quick                      # to see that it runs

The worker needs llama-cpp-python (https://pypi.org/project/llama-cpp-python) and otherwise only
the standard library; `Peer` starts it with the Python that LLAMA_CPP_PYTHON names, by default this
one. So llama.cpp can be installed in an environment of its own, built for this processor, and does
not share its threads with JAX. The worker answers each line of JSON on its standard input with one on
its standard output:

    {"do": "prefill", "tokens": [[...], ...]}     {"seconds": s}
    {"do": "decode", "tokens": [...], "steps": n, "position": p}     {"seconds": [s, ...]}
    {"do": "last"}     {"logits": [[...], ...]}
    {"do": "logits", "tokens": [...]}     {"logits": [...]}
    {"do": "quit"}

Times are those of `llama_decode` and `llama_synchronize`: of the computation, and of copying the logits
to where they can be read. Filling in the tokens from Python is not counted: in C it takes no time.
Defaults are those of llama.cpp: a mapped file, flash attention if possible, a float16 cache.
Flash attention reads a float32 cache as float16 too, and sums the values of one new token in
float16; for logits with more than three digits use `cache="F32", flash="off"`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MISSING = (
    "no llama_cpp in {python}: install llama-cpp-python there, or name in LLAMA_CPP_PYTHON "
    "a Python that has it"
)
CACHES = {"F32": 0, "F16": 1, "BF16": 30}  # the numbers of enum ggml_type
FLASH = {"auto": -1, "off": 0, "on": 1}  # of enum llama_flash_attn_type


# --- the side of the benchmark --------------------------------------------------------------


class PeerError(RuntimeError):
    """Raised when llama.cpp is missing, or has failed."""


def python() -> str:
    """The command of the Python that has llama_cpp."""
    return os.environ.get("LLAMA_CPP_PYTHON") or sys.executable


@functools.cache
def _imports(name: str) -> bool:
    # llama_cpp is really imported, as its shared library must fit this machine.
    try:
        done = subprocess.run([name, "-c", "import llama_cpp"], capture_output=True)
    except OSError:
        return False
    return done.returncode == 0


def available() -> bool:
    """Whether llama.cpp can be run here."""
    return _imports(python())


class Peer:
    """A llama.cpp that has loaded a GGUF file; use it in a `with`, or close it.

    `context` is the number of tokens that a sequence can have. `info` is what the worker reported when it
    was ready: version of llama-cpp-python, features of the processor in use, seconds of loading.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        threads: int = 2,
        context: int = 1024,
        cache: str = "F16",
        flash: str = "auto",
    ) -> None:
        if not available():
            raise PeerError(MISSING.format(python=python()))
        self._log = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            [python(), __file__, str(model), "--threads", str(threads),
             "--context", str(context), "--cache", cache, "--flash", flash],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        self.info: dict[str, object] = self._answer()

    def prefill(self, tokens: list[list[int]]) -> float:
        """Seconds to run prompts of one length as sequences 0, 1, ... of an empty cache."""
        return self._ask({"do": "prefill", "tokens": tokens})["seconds"]

    def decode(self, tokens: list[int], steps: int, position: int) -> list[float]:
        """Seconds of each of `steps` steps that append tokens[i] to sequence i, from `position` on.

        The cache's content from `position` on is dropped first, so that a benchmark can repeat the
        same steps.
        """
        command = {"do": "decode", "tokens": tokens, "steps": steps, "position": position}
        return self._ask(command)["seconds"]

    def last(self) -> list[list[float]]:
        """The logits of the last prefill or step, one list for each sequence."""
        return self._ask({"do": "last"})["logits"]

    def logits(self, tokens: list[int]) -> list[float]:
        """The logits after a prompt; the cache holds this prompt alone afterwards."""
        return self._ask({"do": "logits", "tokens": tokens})["logits"]

    def close(self) -> None:
        if self._process.poll() is None:
            try:
                self._send({"do": "quit"})
                self._process.wait(10)
            except (OSError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()
        with contextlib.suppress(OSError):  # a command may be unsent, the worker gone
            self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _send(self, command: dict[str, object]) -> None:
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def _ask(self, command: dict[str, object]) -> dict:
        try:
            self._send(command)
        except OSError:
            pass  # the worker has ended: reading the answer raises the error
        return self._answer()

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            tail = "".join(self._log.readlines()[-20:])
            self.close()
            raise PeerError(f"llama.cpp ended with {code}:\n{tail}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer


# --- the worker -----------------------------------------------------------------------------


class Worker:
    """A model of llama.cpp and a context for as many sequences as the last prefill had."""

    def __init__(self, options: argparse.Namespace) -> None:
        import llama_cpp

        self.api, self.options = llama_cpp, options
        self.context = options.context
        self.sequences = 0
        self.handle = self.batch = None
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(os.fsencode(options.model), params)
        if not self.model:
            sys.exit(f"llama.cpp cannot load {options.model}")
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def _start(self, sequences: int) -> None:
        """Makes an empty cache for this many sequences; another number needs a new context."""
        api = self.api
        if self.sequences != sequences:
            self.free()
            params = api.llama_context_default_params()
            params.n_ctx = params.n_batch = self.context * sequences
            params.n_ubatch = self.options.ubatch
            params.n_seq_max = sequences
            params.n_threads = params.n_threads_batch = self.options.threads
            params.type_k = params.type_v = CACHES[self.options.cache]
            params.flash_attn_type = FLASH[self.options.flash]
            self.handle = api.llama_init_from_model(self.model, params)
            if not self.handle:
                raise ValueError(f"llama.cpp makes no context for {sequences} sequences")
            self.batch = api.llama_batch_init(self.context * sequences, 0, 1)
            self.sequences = sequences
        api.llama_memory_clear(api.llama_get_memory(self.handle), True)

    def free(self) -> None:
        if self.handle:
            self.api.llama_batch_free(self.batch)
            self.api.llama_free(self.handle)
        self.handle, self.sequences = None, 0

    def _fill(self, tokens: list[list[int]], position: int) -> None:
        """Puts tokens[i] into the batch, for sequence i from `position` on; the last one gets logits."""
        batch, at = self.batch, 0
        self.outputs = []
        for sequence, row in enumerate(tokens):
            for offset, token in enumerate(row):
                batch.token[at] = token
                batch.pos[at] = position + offset
                batch.n_seq_id[at] = 1
                batch.seq_id[at][0] = sequence
                batch.logits[at] = 0
                at += 1
            batch.logits[at - 1] = 1
            self.outputs.append(at - 1)
        batch.n_tokens = at

    def _run(self) -> float:
        api = self.api
        begin = time.perf_counter()
        code = api.llama_decode(self.handle, self.batch)
        api.llama_synchronize(self.handle)
        took = time.perf_counter() - begin
        if code:
            raise ValueError(f"llama_decode gave {code}")
        return took

    def prefill(self, tokens: list[list[int]]) -> dict[str, object]:
        lengths = {len(row) for row in tokens}
        if len(lengths) != 1 or not 0 < max(lengths) <= self.context:
            raise ValueError(f"prompts must have one length, of 1 to {self.context} tokens")
        self._start(len(tokens))
        self._fill(tokens, 0)
        return {"seconds": self._run()}

    def decode(self, tokens: list[int], steps: int, position: int) -> dict[str, object]:
        if len(tokens) != self.sequences:
            raise ValueError(f"{len(tokens)} tokens for the {self.sequences} sequences of prefill")
        if position + steps > self.context:
            raise ValueError(f"the context has room for {self.context} tokens of a sequence")
        memory = self.api.llama_get_memory(self.handle)
        self.api.llama_memory_seq_rm(memory, -1, position, -1)  # of all sequences, to the end
        filled = self.api.llama_memory_seq_pos_max(memory, 0) + 1
        if filled != position:  # llama.cpp would continue with a gap
            raise ValueError(f"position {position}, but the cache ends at {filled}")
        rows = [[token] for token in tokens]
        seconds = []
        for step in range(steps):
            self._fill(rows, position + step)
            seconds.append(self._run())
        return {"seconds": seconds}

    def last(self) -> dict[str, object]:
        if not self.sequences:
            raise ValueError("nothing has been run yet")
        return {"logits": [self._row(index) for index in self.outputs]}

    def logits(self, tokens: list[int]) -> dict[str, object]:
        self.prefill([tokens])
        return {"logits": self._row(self.outputs[0])}

    def _row(self, index: int) -> list[float]:
        return self.api.llama_get_logits_ith(self.handle, index)[: self.vocabulary]


def serve(worker: Worker, first: dict[str, object]) -> None:
    """Answers commands until "quit" or the end of the input."""
    reply = lambda answer: print(json.dumps(answer), flush=True)
    reply(first)
    commands = {name: getattr(worker, name) for name in ("prefill", "decode", "last", "logits")}
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        if do == "quit":
            break
        if do not in commands:
            reply({"error": f"no command {do!r}"})
            continue
        try:
            reply(commands[do](**command))
        except (TypeError, ValueError, ctypes.ArgumentError) as error:
            reply({"error": f"{do}: {error}"})
    worker.free()


def quick(options: argparse.Namespace) -> None:
    """A few tokens through `Peer`, to see that it runs."""
    draw = random.Random(0)
    prompts = [[draw.randrange(500) for _ in range(16)] for _ in range(2)]
    with Peer(options.model, threads=options.threads, context=64) as peer:
        print(f"llama-cpp-python {peer.info['version']}: {peer.info['system']}")
        print(f"prefill of 2 x 16 tokens: {peer.prefill(prompts) * 1e3:.2f} ms")
        steps = peer.decode([1, 2], 8, 16)
        print(f"a step of 2 sequences: {statistics.median(steps) * 1e3:.2f} ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=1024, help="tokens of a sequence, at most")
    parser.add_argument("--cache", choices=CACHES, default="F16", help="type of the cache")
    parser.add_argument("--flash", choices=FLASH, default="auto", help="flash attention")
    parser.add_argument("--ubatch", type=int, default=512, help="tokens computed together")
    parser.add_argument("--quick", action="store_true", help="run a few tokens and end")
    options = parser.parse_args()
    if options.quick:
        quick(options)
        return 0
    try:
        import llama_cpp
    except ImportError as error:
        sys.exit(f"{MISSING.format(python=sys.executable)} ({error})")
    begin = time.perf_counter()
    worker = Worker(options)
    first = {
        "version": llama_cpp.__version__,
        "system": llama_cpp.llama_print_system_info().decode().strip(" |"),
        "load": time.perf_counter() - begin,
    }
    serve(worker, first)
    return 0


if __name__ == "__main__":
    sys.exit(main())
