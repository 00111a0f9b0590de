"""Floor 1. Jobs that read, in threads. Below: nothing. Above: table, regions, checking."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# Below this a pool of threads costs more than it saves.
PARALLEL_BYTES = 8 << 20


def run_jobs(
    read: Callable[[Any], Any], jobs: Sequence[Any], nbytes: int, threads: int | None = None
) -> list[Any]:
    """What ``read`` gives for each job, in order; in threads for many bytes.

    ``threads`` is by default the number of cores, at most 8.

    Example:
        >>> run_jobs(len, ["a", "bc"], 100)
        [1, 2]
    """
    threads = threads or min(8, _cores())
    if threads <= 1 or nbytes < PARALLEL_BYTES or len(jobs) < 2:
        return [read(job) for job in jobs]
    with ThreadPoolExecutor(min(threads, len(jobs)), "maxjax-read") as pool:
        try:
            return list(pool.map(read, jobs))
        except BaseException:  # an interrupt too: what has not begun shall not
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run(job: Any) -> Any:
    """What a job's ``run`` gives."""
    return job.run()


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
