"""What a user of the trainer can cause, as types of one clear line each: packing's, and the trainer's own.

Those of the layers' kernels are in `kernels.contract`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from packing import atomic
from packing.errors import (
    InputError,
    OptionError,
    OutputError,
    PadfreeError,
    ResumeError,
    ShardError,
    one_line,
)


class NonFinite(PadfreeError):
    """A loss or gradient that is NaN or infinite."""


class Signalled(PadfreeError):
    """SIGTERM or Ctrl-C came: the run saved a checkpoint and can go on with --resume."""


class PeerLost(PadfreeError):
    """Another rank died, or took no part in a collective in time."""


class OutOfMemory(PadfreeError):
    """The GPU has too little memory for the run."""


class Unmet(PadfreeError):
    """Some rank never came."""


def writing(path: Path) -> AbstractContextManager[None]:
    """Turns what the system refuses within the block into an `OutputError`: `packing.atomic.writing`."""
    return atomic.writing(path, then="make room, or choose another place")


__all__ = [
    "InputError",
    "NonFinite",
    "OptionError",
    "OutOfMemory",
    "OutputError",
    "PadfreeError",
    "PeerLost",
    "ResumeError",
    "ShardError",
    "Signalled",
    "Unmet",
    "one_line",
    "writing",
]
