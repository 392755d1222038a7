"""The trainer's command with faults: `FAULTS`, a JSON list of [life, rank, function, call, kill or sleep].

    [[0, 1, "training.files.write_part", 2, "kill"]]

In the run's first life rank 1 kills itself as it is about to call that function for the second time.
"""

import itertools
import json
import os
import pkgutil
import signal
import time
from collections.abc import Callable
from typing import Any

from training.__main__ import main
from training.launch import leave


def strike(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def breaking(function: Callable[..., Any], *, call: int, fault: str) -> Callable[..., Any]:
    calls = itertools.count(1)

    def broken(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            strike(fault)
        return function(*arguments, **options)

    return broken


if __name__ == "__main__":
    here = [int(os.environ.get(name, "0")) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK")]
    for life, rank, name, call, fault in json.loads(os.environ["FAULTS"]):
        if [life, rank] == here:
            place, _, function = name.rpartition(".")
            owner = pkgutil.resolve_name(place)
            setattr(owner, function, breaking(getattr(owner, function), call=call, fault=fault))
    leave(main())
