"""Run by `test_atomic.py`: writes a set again and again, killed at its first step, its second, and so on.

Arguments: an empty folder; "new", or "force" to replace a set that is there. Prints a JSON line a run:
what the kill left. The modules are imported once; each run is a fork of this process.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from shard_sets import make_set

from packing.atomic import interrupted
from packing.errors import PadfreeError
from packing.shards import open_shards, verify, writer

OLD, NEW = [[3, 4]], [[5, 3], [64], [1]]
STEPS = ("rename", "unlink", "rmdir", "mkdir", "open", "close", "stat")


def kill_at(step: int) -> None:
    """From now on the process is killed, without any clean-up, before its step number `step`."""
    taken = 0

    def counted(plain: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            nonlocal taken
            taken += 1
            if taken == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*args, **options)

        return run

    for name in STEPS:
        setattr(os, name, counted(getattr(os, name)))
    writer._DigestFile.write = counted(writer._DigestFile.write)  # type: ignore[method-assign]
    Path.write_bytes = counted(Path.write_bytes)  # type: ignore[method-assign]


def state_of(out: Path) -> str:
    """What stands at the name: "none", "old" or "new", the latter two whole; anything else is a fault."""
    try:
        verify(out)
    except PadfreeError:
        return "none" if not out.exists() else "broken"
    return "new" if len(open_shards(out)) == len(NEW) else "old"


def run(folder: Path, *, force: bool, step: int) -> dict[str, Any]:
    out = folder / "set"
    if force:
        make_set(out, OLD)
    child = os.fork()
    if child == 0:
        kill_at(step)
        make_set(out, NEW, force=force, buffers_per_shard=1)
        os._exit(0)
    killed = os.waitpid(child, 0)[1] == signal.SIGKILL
    left = state_of(out)
    set_aside = interrupted(out) is not None
    try:
        make_set(out, NEW, buffers_per_shard=1)  # the next writer, without force: it tidies up
        refused = False
    except PadfreeError:
        refused = True
    after, beside = state_of(out), sorted(path.name for path in folder.iterdir())
    shutil.rmtree(folder)
    folder.mkdir()
    return {
        "step": step,
        "killed": killed,
        "left": left,
        "set_aside": set_aside,
        "refused": refused,
        "after": after,
        "beside": beside,
    }


if __name__ == "__main__":
    step, alive = 0, False
    while not alive:
        step += 1
        outcome = run(Path(sys.argv[1]), force=sys.argv[2] == "force", step=step)
        alive = not outcome["killed"]
        print(json.dumps(outcome), flush=True)
