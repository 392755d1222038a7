"""What stops a run before its end, and what it leaves behind: bad values, signals, hangs, lost ranks."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from training.errors import OutOfMemory, PeerLost, one_line, writing

if TYPE_CHECKING:  # the command takes its exit statuses from here before it needs torch
    from training.data import MicroBatch

SIGNALLED = 85
"""Exit status of a run that SIGTERM or Ctrl-C ended after it saved a checkpoint."""
HUNG = 86
"""Exit status of a rank that took no step for `run.hang_s` seconds."""
SLOW = 10
"""So many times as long as a step's parts may take: compiling in the first step, writing a checkpoint."""
_GLOO = "gloo/transport"


@contextmanager
def naming_failures() -> Iterator[None]:
    """Turns into one line what torch raises within the block for a lost rank or for too little memory.

    Raises:
        PeerLost: with gloo's or NCCL's own words.
        OutOfMemory: with the allocator's figures.
        KernelError: tilelang has no compiler.
    """
    from torch import OutOfMemoryError  # not above: the command names these errors before it needs torch
    from torch.distributed import DistError

    from training.kernels import KernelError
    from training.kernels.compilation import no_compiler

    try:
        yield
    except OutOfMemoryError as error:
        raise OutOfMemory(
            f"{one_line(error)} --dry-run lists what takes memory; data.buffers=1, model.checkpointing=1, "
            "a smaller model.loss_chunk, optim.states=8bit, parallel.offload=true or more ranks take less"
        ) from error
    except RuntimeError as error:
        if "bin/nvcc" in str(error) and "tilelang" in sys.modules and (missing := no_compiler()):
            raise KernelError(
                f"a kernel is not in tilelang's cache and can't be compiled: {missing}"
            ) from error
        if not isinstance(error, DistError) and _GLOO not in str(error):
            raise
        raise PeerLost(
            f"another rank is gone or did not answer: {one_line(error)}; its own lines say why. "
            "Start again with --resume, or let torchrun do so (--max-restarts)"
        ) from error


class StopSignal:
    """Within the block, SIGTERM and Ctrl-C only raise a flag; a later second one ends the process at once.

    Schedulers send SIGTERM some time before they kill. Some send it to every process of a job, and torchrun
    hands it on to its ranks besides: what comes within `TOGETHER_S` seconds is one signal.
    """

    TOGETHER_S = 2.0

    def __init__(self) -> None:
        self.name = ""
        """What came, as "SIGTERM"; "" while nothing did."""
        self._came = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.name:
            self._came, self.name = time.monotonic(), signal.Signals(number).name
        elif time.monotonic() - self._came > self.TOGETHER_S:
            raise KeyboardInterrupt


class Watchdog:
    """Within the block, a thread that ends a process which makes no progress, and says where it stood.

    A hang waits for good without it, or until a collective's timeout kills the ranks that wait, and the one
    that they wait for is never named. The thread needs Python's lock: code that hangs while it holds it is
    not seen.
    """

    def __init__(self, folder: Path, *, rank: int, hang_s: float) -> None:
        """Starts nothing yet.

        Args:
            folder: Gets a file with the stacks of all threads and, on CUDA, NCCL's flight record.
            rank: Of this process.
            hang_s: Seconds without progress that are a hang; 0 watches nothing.
        """
        self._folder, self._rank, self._hang_s = folder, rank, hang_s
        self._over = Event()
        self._thread = Thread(target=self._watch, name="padfree-watchdog")
        self.at(0, "starting", times=SLOW)

    def __enter__(self) -> Watchdog:
        if self._hang_s:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._hang_s:
            self._thread.join()

    def at(self, step: int, phase: str, *, times: int = 1) -> None:
        """Progress: the step at hand, counted from 1, and what it begins to do.

        Args:
            step: The step.
            phase: As "reading data".
            times: How many times `hang_s` it may take, as `SLOW`.
        """
        allowed = self._hang_s * times
        self._mark = time.monotonic() + allowed, allowed, step, phase

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self._hang_s / 10)):
            deadline, allowed, step, phase = self._mark
            if time.monotonic() > deadline:
                self._report(allowed, step, phase)
                time.sleep(
                    min(5.0, self._hang_s)
                )  # torchrun ends the others with this one: let them report too
                os._exit(HUNG)  # the main thread hangs: nothing gentler reaches it

    def _report(self, allowed: float, step: int, phase: str) -> None:
        file = self._folder / f"step-{step:08d}-rank-{self._rank}.txt"
        line = f"rank {self._rank}: no progress for {allowed:g} s at step {step}, {phase}"
        print(f"training: {line}; stacks in {file}", file=sys.stderr, flush=True)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with file.open("w", encoding="utf-8") as out:
                print(line, file=out, flush=True)
                faulthandler.dump_traceback(out, all_threads=True)
            if record := _flight_record():
                file.with_suffix(".nccl.json").write_bytes(record)
        except OSError as error:
            print(f"training: {file}: can't be written: {error}", file=sys.stderr, flush=True)


def _flight_record() -> bytes | None:
    """What NCCL's flight recorder holds of the last collectives, JSON; None where NCCL was not used."""
    import torch
    from torch._C import _distributed_c10d as c10d

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    record: bytes = c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False)  # type: ignore[attr-defined]
    return record


def keep_flight_records(folder: Path) -> None:
    """Has NCCL's watchdog, after `parallel.timeout`, write its flight record here, not below the home folder.

    To be called before the process group is made. The names are those of torch 2.11 and of newer ones.
    """
    for name in ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"):
        os.environ.setdefault(name, str(folder / "nccl-rank-"))


class Spikes:
    """Tells losses that stand out of the last ones: above their median by `times` their median deviation."""

    WINDOW = 64
    LEAST = 8

    def __init__(self, times: float) -> None:
        """Has seen nothing.

        Args:
            times: How many median absolute deviations are a spike; 0 finds none.
        """
        self._times = times
        self._losses: deque[float] = deque(maxlen=self.WINDOW)

    def limit(self, loss: float) -> float | None:
        """Takes a step's loss in; if it is a spike, what it should have stayed below.

        A deviation counts as one percent of the median at least, so that a quiet run does not cry.
        """
        found = None
        if self._times and len(self._losses) >= self.LEAST:
            median = statistics.median(self._losses)
            deviation = statistics.median(abs(value - median) for value in self._losses)
            highest = median + self._times * max(deviation, abs(median) / 100)
            found = highest if loss > highest else None
        self._losses.append(loss)
        return found


def report_nonfinite(
    folder: Path, batches: Sequence[MicroBatch], *, step: int, rank: int, loss: float, norm: float
) -> str:
    """Saves what it takes to look into it: this rank's batches, and which examples they are made of.

    Returns:
        One line that says what was seen and where the files are.

    Raises:
        OutputError: the system refuses to write them.
    """
    import torch  # not above: the command names these errors before it needs torch

    name = folder / f"step-{step:08d}-rank-{rank}"
    found = {
        "step": step,
        "loss": repr(loss),
        "grad_norm": repr(norm),
        "example_ids": [batch.example_ids for batch in batches],
        "reproduce": f"each of torch.load('{name.name}.pt') is a micro-batch: the arguments of the forward",
    }
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        torch.save([batch.inputs for batch in batches], name.with_suffix(".pt"))
        name.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return f"step {step}: loss {loss}, gradient norm {norm}; each rank's examples and batches are in {folder}"
