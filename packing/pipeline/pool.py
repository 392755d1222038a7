"""Chunks through worker processes, and the results back in the order of the chunks."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from packing.errors import OptionError, PadfreeError

Item = TypeVar("Item")
Result = TypeVar("Result")

CHUNKS_AHEAD = 2
"""Chunks in flight for each worker: one at work, one waiting, so memory does not grow with the input."""

OBJECTS_PER_COLLECTION = 50_000
"""Containers made, and not freed, between two collections of the youngest: about those of a chunk."""

PARENT_POLL_SECONDS = 0.2
"""How long a worker may outlive a parent that was killed, and hold the lock on the output."""


class WorkerDied(PadfreeError):
    """A worker process ended without an answer."""


def start_method() -> str:
    """How workers start: fork where it is safe, as it shares the tokenizer and needs no `__main__` guard."""
    return "fork" if sys.platform == "linux" else "spawn"


def map_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], *, workers: int
) -> Iterator[Result]:
    """Like `map`, with the calls in `workers` processes; one worker means this process.

    Args:
        function: Handed once to each worker; picklable where they are spawned.
        items: Read no further ahead than the workers need.
        workers: Number of processes, at least 1.

    Raises:
        WorkerDied: one ended without an answer; says how.
        OptionError: the system does not start so many processes.
    """
    if workers == 1:
        yield from map(function, items)
        return
    with _one_thread_in_tokenizers(), _pool(function, workers=workers) as pool:
        pending: deque[Future[Result]] = deque()
        for item in items:
            try:
                pending.append(pool.submit(_call, item))  # the first starts the workers
            except BrokenProcessPool:
                raise
            except (OSError, RuntimeError) as error:  # no process, or no thread to look after them
                raise OptionError(
                    f"the system does not start {workers} worker processes ({error}): try fewer --workers"
                ) from error
            if len(pending) > CHUNKS_AHEAD * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


@contextmanager
def _pool(function: Callable[[Any], Any], *, workers: int) -> Iterator[ProcessPoolExecutor]:
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context(start_method()),
        initializer=_start_worker,
        initargs=(function, os.getpid()),
    )
    processes = pool._processes  # kept here, since shutdown lets go of them
    try:
        yield pool
    except BrokenProcessPool as error:
        pool.shutdown()  # waits for their exit codes
        codes = [process.exitcode for process in processes.values()]
        raise WorkerDied(f"nothing was written: {_death(codes, unread=error.__cause__)}") from None
    finally:
        with suppress(RuntimeError):  # of a thread that could not be started
            pool.shutdown(cancel_futures=True)
        for process in processes.values():
            process.terminate()  # where the system started only some of them, nobody else ends those


def _death(codes: Sequence[int | None], *, unread: BaseException | None) -> str:
    """What ended one of the workers; the pool itself ends the others with SIGTERM.

    Args:
        codes: Of each worker.
        unread: The traceback where an answer could not be read.
    """
    code = next((code for code in codes if code not in (None, 0, -signal.SIGTERM)), None)
    if code is None and unread:
        last = str(unread).strip("\n'").splitlines()[-1]
        return f"what a worker process answered can't be read: {last}"
    if code is None and 0 in codes:
        return "a worker process ended without an answer, with status 0; its words, if any, are above"
    code = -signal.SIGTERM if code is None else code
    cause = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"status {code}"
    hint = ", most often for lack of memory: try fewer --workers" if code == -signal.SIGKILL else ""
    return f"one of the {len(codes)} worker processes ended with {cause}{hint}"


@contextmanager
def few_collections() -> Iterator[None]:
    """Garbage is collected seldom, and without looking at what was there before.

    Chunks leave few cycles and many objects. By the usual rule a collection walks each row's dictionaries
    twice, and at times the half million objects of the imports: a tenth of the time of a run. Workers
    inherit it.
    """
    before = gc.get_threshold()
    frozen = gc.get_freeze_count() > 0  # by who calls us, and theirs to thaw
    if not frozen:
        gc.freeze()
    gc.set_threshold(OBJECTS_PER_COLLECTION, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen:
            gc.unfreeze()


@contextmanager
def _one_thread_in_tokenizers() -> Iterator[None]:
    """Workers inherit it: their threads would fight for the same cores, and a fork after threads warns."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


_function: Callable[[Any], Any]  # in a worker, what it was started for


def _start_worker(function: Callable[[Any], Any], parent: int) -> None:
    global _function
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """Ends this worker when its parent is gone.

    A parent that is killed can't say goodbye, and the worker's read on the queue would wait for ever, since
    the other workers hold the queue's other end.
    """
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_SECONDS)
    os._exit(1)


def _call(item: Any) -> Any:
    return _function(item)
