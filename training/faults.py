"""What stops a run before its end, and what it leaves behind: a value that is not finite, a signal."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from training.data import MicroBatch, PadfreeError

SIGNALLED = 85
"""Exit status of a run that SIGTERM ended after it saved a checkpoint."""


class NonFinite(PadfreeError):
    """A loss or gradient that is NaN or infinite."""


class Signalled(PadfreeError):
    """SIGTERM came: the run saved a checkpoint and can go on with --resume."""


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
    """
    import torch  # not above: the command names these errors before it needs torch

    folder.mkdir(parents=True, exist_ok=True)
    name = folder / f"step-{step:08d}-rank-{rank}"
    torch.save([batch.inputs for batch in batches], name.with_suffix(".pt"))
    found = {
        "step": step,
        "loss": repr(loss),
        "grad_norm": repr(norm),
        "example_ids": [batch.example_ids for batch in batches],
        "reproduce": f"each of torch.load('{name.name}.pt') is a micro-batch: the arguments of the forward",
    }
    name.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return f"step {step}: loss {loss}, gradient norm {norm}; each rank's examples and batches are in {folder}"
