"""How the ranks of a run find each other, in each of its lives."""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from training.errors import Unmet

_POLL_S = 0.01


def restarted() -> bool:
    """Whether torchrun started this process again after a failure (`--max-restarts`).

    The agents of several machines count for themselves, so ranks may differ: ask all of them.
    """
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


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
