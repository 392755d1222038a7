"""What stops a run before its end, and what it leaves behind: a value that is not finite, a signal."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from training.data import MicroBatch, OutputError, PadfreeError

SIGNALLED = 85
"""Exit status of a run that SIGTERM ended after it saved a checkpoint."""


class NonFinite(PadfreeError):
    """A loss or gradient that is NaN or infinite."""


class Signalled(PadfreeError):
    """SIGTERM came: the run saved a checkpoint and can go on with --resume."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what the system refuses within the block into one line.

    Raises:
        OutputError: names the file, or the path where the system names none, and the cause.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{error.filename or path}: the system refuses: {error.strerror or error}; make room, or choose "
            "another place"
        ) from error


class Sigterm:
    """Within the block, SIGTERM only raises a flag: schedulers send it some time before they kill."""

    def __init__(self) -> None:
        self.came = False
        self._before: Any = None

    def __enter__(self) -> Sigterm:
        self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True


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
