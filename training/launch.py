"""How the ranks of a run find each other, in each of its lives, and how a process ends."""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from training.errors import Unmet
from training.files import replace_text

MARK = "launch.txt"
"""In the run directory: the agents that began the run, or went on with it, last."""
_POLL_S = 0.01


def agent() -> str:
    """A name of the torchrun that started this process, the same in all of its lives; "" without torchrun.

    The run's id does not do, since the next launch may have it too (`--rdzv-id`). The folder of torchrun's
    logs, `ID_RANDOM/attempt_N/LOCAL_RANK/error.json`, is made anew by every launch, on every machine.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(file).parents[2].name if file else ""


def shutdown_s() -> float | None:
    """Seconds that torchrun gives its ranks after SIGTERM before it kills them; None without torchrun.

    Its flag --shutdown-timeout, which a rank does not see, would say otherwise.

    Source: torch/distributed/launcher/api.py; before torch 2.12 there was nothing to set.
    """
    if not agent():
        return None
    settable = Version(torch.__version__) >= Version("2.12")
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")) if settable else 30.0


def mark(directory: Path, *, agents: Sequence[str]) -> None:
    """Notes whose run it is, so that their later lives go on with it.

    Args:
        directory: The run's.
        agents: Of all ranks.

    Raises:
        OutputError: the system refuses.
    """
    replace_text(directory / MARK, "".join(f"{name}\n" for name in sorted({*agents} - {""})))


def restarted(directory: Path) -> bool:
    """Whether an earlier life of this very launch (`--max-restarts`) began the run there, or took it over.

    A life that was refused left no mark, so the next one is refused too. A machine may have joined since:
    ask all ranks.
    """
    file = directory / MARK
    return file.is_file() and agent() in file.read_text("utf-8", "replace").splitlines()


def meet(*, timeout: timedelta) -> tuple[Store, int, int]:
    """Finds the other ranks, as torchrun's environment says.

    Returns:
        A store that holds nothing of an earlier life of the run, this rank, and the number of ranks.

    Raises:
        Unmet: some rank never came.
    """
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    return fresh(store, rank=rank, size=size, timeout=timeout), rank, size


def fresh(store: Store, *, rank: int, size: int, timeout: timedelta) -> Store:
    """A part of the store that no earlier life of the run wrote to; every rank calls it and gets the same.

    torchrun keeps one store through all restarts, and torch puts the addresses of gloo's sockets and NCCL's
    identifiers into it under the same names in each life. A rank that reads before its peer has written
    finds the address of a process that is gone: "connectFullMesh … Connection refused" in half of the
    restarts. So rank 0 chooses a name for each life and tells it to every rank that greets it; a greeting
    of an earlier life gets an answer that nobody reads.

    Args:
        store: All ranks see it.
        rank: Of this process.
        size: Number of ranks.
        timeout: How long ranks wait for each other.

    Raises:
        Unmet: names the ranks that did not come.
    """
    if rank == 0:
        life = _receive(store, size=size, timeout=timeout)
    else:
        greeting = uuid.uuid4().hex
        answer = f"padfree/answer/{greeting}"
        store.set(f"padfree/greeting/{rank}", greeting)
        try:
            store.wait([answer], timeout)
        except dist.DistStoreError as error:
            raise Unmet(f"rank 0 did not answer rank {rank} within {timeout}: see its own error") from error
        life = store.get(answer).decode()
        store.set(f"padfree/{life}/{rank}", "here")
    return PrefixStore(f"padfree/{life}", store)


def _receive(store: Store, *, size: int, timeout: timedelta) -> str:
    """Rank 0's part: answers each greeting until every rank has said that it heard the answer."""
    life, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    missing = list(range(1, size))
    while missing := [rank for rank in missing if not store.check([f"padfree/{life}/{rank}"])]:
        for rank in missing:
            if store.check([f"padfree/greeting/{rank}"]):
                store.set(f"padfree/answer/{store.get(f'padfree/greeting/{rank}').decode()}", life)
        if time.monotonic() > deadline:
            raise Unmet(f"of {size} ranks these did not come within {timeout}: {missing}")
        time.sleep(_POLL_S)
    return life


def leave(status: int) -> NoReturn:
    """Ends the process as `sys.exit` does, less the interpreter's own end. For the last line of a program.

    gloo's threads let go of the last collective's tensors some time after it is done, and need the
    interpreter's lock for it. Before Python 3.14 a thread that asks for the lock while the interpreter ends
    is ended by force, amid C++ that cannot be unwound: "terminate called without an active exception", and a
    run that went well has ended with signal 6 (5 of 14 with gloo's threads kept waiting by others). Neither
    `destroy_process_group` nor the collector ends these threads.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter would
    atexit._run_exitfuncs()
    tidy()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def tidy() -> None:
    """Takes away the temporary folder for compiled layers, which torch makes at its import, if it is empty.

    torch says in the variable where it is. A process that still needs it makes it again.
    """
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", os.devnull))
    if folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith("torchinductor_"):
        with suppress(OSError):  # not empty, or gone by another rank's hand
            folder.rmdir()
