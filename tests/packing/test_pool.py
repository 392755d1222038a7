"""Worker processes: results in order, no reading ahead, and a clear end when one of them dies."""

import errno
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import process
from functools import partial

import pytest

from packing.errors import InputError, OptionError
from packing.pipeline.pool import WorkerDied, map_in_order


def double_late(n):
    time.sleep(0.02 if n % 5 == 0 else 0)
    return 2 * n


def process_id(_):
    time.sleep(0.01)
    return os.getpid()


def die_at_seven(number, n):
    if n == 7:
        os.kill(os.getpid(), number)
    return n


def leave_at_seven(n):
    if n == 7:
        os._exit(3)
    return n


class TwoWords(Exception):
    """Is pickled by one of its two arguments, so it can't be read back."""

    def __init__(self, one, other):
        super().__init__(one)


def raise_two_words(n):
    raise TwoWords(n, n)


def leave_well_at_seven(n):
    if n == 7:
        os._exit(0)
    return n


def refuse_seven(n):
    if n == 7:
        raise InputError("seven is no number")
    return n


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_results_come_in_the_order_of_the_items(workers):
    """Items that take longer do not fall behind."""
    assert list(map_in_order(double_late, range(40), workers=workers)) == list(range(0, 80, 2))


def test_one_worker_is_this_process():
    """No process is started where one is enough."""
    assert set(map_in_order(process_id, range(3), workers=1)) == {os.getpid()}


def test_several_workers_are_other_processes():
    """The work is really spread."""
    found = set(map_in_order(process_id, range(30), workers=3))
    assert os.getpid() not in found
    assert 1 < len(found) <= 3


def test_more_workers_than_items():
    """Workers without work do no harm."""
    assert list(map_in_order(double_late, [1], workers=6)) == [2]
    assert list(map_in_order(double_late, [], workers=2)) == []


def test_items_are_read_no_further_than_needed():
    """However slow the reader of the results is, at most a few items a worker are held."""
    taken = []
    results = map_in_order(double_late, (taken.append(n) or n for n in range(1000)), workers=2)
    next(results)
    assert len(taken) <= 6
    results.close()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            partial(die_at_seven, signal.SIGKILL),
            "signal 9 (Killed), most often for lack of memory: try fewer",
        ),
        (partial(die_at_seven, signal.SIGTERM), "signal 15 (Terminated)"),
        (leave_at_seven, "status 3"),
    ],
    ids=["SIGKILL", "SIGTERM", "exit"],
)
def test_a_dead_worker_is_one_clear_error(how, said):
    """A worker's end ends the run with one error that says what ended it: only SIGKILL speaks of memory."""
    with pytest.raises(WorkerDied) as found:
        list(map_in_order(how, range(50), workers=3))
    assert f"one of the 3 worker processes ended with {said}" in str(found.value)
    assert ("memory" in str(found.value)) == ("memory" in said)


def test_too_many_workers_for_the_system_are_refused(monkeypatch):
    """Where the system starts two of four workers, one line says so, and neither of the two is left.

    They would wait for work for ever, and the interpreter, at its end, for them.
    """
    fork, started = os.fork, []

    def fork_twice():
        if len(started) == 2:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        child = fork()
        started.append(child)
        return child

    monkeypatch.setattr(os, "fork", fork_twice)
    before = set(multiprocessing.active_children())
    with pytest.raises(OptionError, match=r"4 worker processes \(.*unavailable\): try fewer --workers"):
        list(map_in_order(double_late, range(9), workers=4))
    assert len(started) == 2
    for left in set(multiprocessing.active_children()) - before:
        left.join(10)
        assert left.exitcode == -signal.SIGTERM


def test_a_thread_that_can_not_start_is_refused_too(monkeypatch):
    """The pool looks after its workers by a thread: without it one line says so, and none of them is left."""

    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(process._ExecutorManagerThread, "start", refuse)
    before = set(multiprocessing.active_children())
    with pytest.raises(OptionError, match=r"2 worker processes \(can't start new thread\): try fewer"):
        list(map_in_order(double_late, range(9), workers=2))
    for left in set(multiprocessing.active_children()) - before:
        left.join(10)
        assert left.exitcode == -signal.SIGTERM


def test_workers_that_can_not_start_are_one_clear_error(monkeypatch):
    """The others are ended by the pool, not by somebody's signal, so none is named."""
    parent, start = os.getpid(), threading.Thread.start

    def start_in_parent(thread):
        if os.getpid() != parent:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_in_parent)
    with pytest.raises(WorkerDied, match="ended without an answer, with status 0; its words, if any, are"):
        list(map_in_order(double_late, range(9), workers=2))


def test_a_broken_pool_says_why():
    """No signal is named that nobody sent: an answer that can't be read, a worker that just leaves."""
    with pytest.raises(WorkerDied, match=r"answered can't be read: TypeError: .*missing 1 required"):
        list(map_in_order(raise_two_words, range(9), workers=2))
    with pytest.raises(WorkerDied, match="ended without an answer, with status 0"):
        list(map_in_order(leave_well_at_seven, range(50), workers=2))


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_in_a_worker_arrives_as_itself(workers):
    """What a worker raises has its own type and text here."""
    with pytest.raises(InputError, match=r"^seven is no number$"):
        list(map_in_order(refuse_seven, range(50), workers=workers))


def test_the_environment_is_as_before(monkeypatch):
    """Workers run with one thread in tokenizers; this process's own setting comes back."""
    for before in (None, "true"):
        if before is None:
            monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
        else:
            monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
        assert set(map_in_order(parallelism, [1, 2], workers=2)) == {"false"}
        assert os.environ.get("TOKENIZERS_PARALLELISM") == before


def parallelism(_):
    return os.environ.get("TOKENIZERS_PARALLELISM")


def test_workers_leave_signals_to_the_parent():
    """Ctrl-C reaches every process of a terminal: only the parent answers, and it cleans up."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert set(map_in_order(handlers, [1, 2], workers=2)) == {(signal.SIG_IGN, signal.SIG_DFL)}
    finally:
        signal.signal(signal.SIGTERM, before)


def handlers(_):
    return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
