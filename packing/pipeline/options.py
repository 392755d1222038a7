"""What can be chosen of packing itself; `padfree pack` makes its flags of it."""

from __future__ import annotations

from dataclasses import dataclass

from packing.errors import OptionError, check_choices
from packing.example import Overflow
from packing.plan import Algorithm, check_options

MAX_REJECTS = 0.1
"""Dirt in a real file is a row in a hundred; a wrong column, format or template rejects nearly all.
A tenth lets the first pass, counted, and stops the second."""


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """How examples are packed, and how many may be lost.

    Attributes:
        capacity: Most tokens in a buffer.
        overflow: What becomes of longer examples: dropped and counted, cut, or an error.
        algorithm: How examples are spread over buffers.
        seed: Decides between equals in the plan, and which conversations are held out.
        eval_fraction: The part of the conversations that goes to `DIR/eval`; equal ones go together.
        max_rejects: If more than this fraction of the rows is rejected, nothing is written.

    Raises:
        OptionError: a value that can't be.
    """

    capacity: int = 8192
    overflow: Overflow = "drop"
    algorithm: Algorithm = "best_fit_decreasing"
    seed: int = 0
    eval_fraction: float = 0.0
    max_rejects: float = MAX_REJECTS

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("capacity", "seed", "eval_fraction", "max_rejects"):
            kinds = (int,) if name in ("capacity", "seed") else (int, float)
            if type(value := getattr(self, name)) not in kinds:  # True is no 1, and is hashed as another
                raise OptionError(
                    f"{name} {value!r} is of type {type(value).__name__}: give {kinds[-1].__name__}"
                )
        check_options(capacity=self.capacity, algorithm=self.algorithm, seed=self.seed)
        if not 0 <= self.eval_fraction < 1:
            raise OptionError(
                f"an eval fraction of {self.eval_fraction} can't be: choose 0 or more, and less than 1"
            )
        if not 0 <= self.max_rejects <= 1:
            raise OptionError(f"a fraction of {self.max_rejects} for rejects can't be: choose 0 to 1")


def check_workers(workers: int) -> None:
    """Checks a number of processes.

    Raises:
        OptionError: fewer than one.
    """
    if workers < 1:
        raise OptionError(f"{workers} workers can't be: choose 1 or more")
