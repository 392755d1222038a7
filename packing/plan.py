"""Which examples share a bin: plan on lengths alone, move tokens later.

    >>> plan = plan_bins([5, 3, 4], capacity=8)
    >>> [sorted(plan.bin(i).tolist()) for i in range(len(plan))]   # 5 + 3 tokens, and 4
    [[0, 1], [2]]

The algorithms are compiled and lie in `packing.bins`; numba is imported with the first plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from packing.boundaries import Lengths
from packing.errors import OptionError, check_choice

Algorithm = Literal["best_fit_decreasing", "swap_search", "first_fit_decreasing", "next_fit"]

_MOST = 2**31 - 1  # positions and lengths are int32 inside, which halves the memory moved
_MOST_CAPACITY = 2**24  # the work grows with the capacity as with the examples: here 0.2 s and 0.2 GiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Bins in compressed form.

    Attributes:
        order: int64[n], positions into the lengths, bin after bin; each exactly once.
        offsets: int64[bins + 1], where each bin begins in `order`, and n.
    """

    order: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return self.offsets.size - 1

    def bin(self, i: int) -> NDArray[np.int64]:
        """The positions in bin `i`: a view."""
        return self.order[self.offsets[i] : self.offsets[i + 1]]


def lower_bound(lengths: Lengths, *, capacity: int) -> int:
    """The fewest bins that any plan could need: all tokens over the capacity, rounded up."""
    return -(-int(np.sum(lengths, dtype=np.int64)) // capacity)


def plan_bins(
    lengths: Lengths, *, capacity: int, algorithm: Algorithm = "best_fit_decreasing", seed: int = 0
) -> Plan:
    """Spreads examples over bins of at most `capacity` tokens.

    The same lengths, options and seed give the same plan on every machine. The seed decides which of the
    examples of equal length goes where, and the order of the bins.

    Args:
        lengths: Whole numbers in 1 … capacity.
        capacity: Most tokens in a bin, 1 … 2**24.
        algorithm: `best_fit_decreasing` takes milliseconds and comes within about 0.1 % of the bound on
            chat data. `swap_search` takes seconds, never more bins, and up to 10 % fewer where a bin holds
            only two to five examples. `first_fit_decreasing` and `next_fit` (which keeps the order and
            wastes about 10 %) are there to compare with.
        seed: 0 … 2**64 - 1.

    Raises:
        OptionError: a length outside 1 … capacity, no whole numbers, or an option that can't be.
    """
    check_options(capacity=capacity, algorithm=algorithm, seed=seed)
    array = _checked(lengths, capacity=capacity)
    from packing import bins  # numba: 0.3 s

    function: Any = getattr(bins, algorithm)
    order, offsets = function(array, capacity, np.uint64(seed))
    return Plan(order=order, offsets=offsets)


def check_options(*, capacity: int, algorithm: Algorithm, seed: int) -> None:
    """Checks what `plan_bins` takes beside the lengths, for those who will have lengths much later.

    Raises:
        OptionError: an option that can't be.
    """
    check_choice("algorithm", algorithm, get_args(Algorithm))
    if not 1 <= capacity <= _MOST_CAPACITY:
        raise OptionError(f"a capacity of {capacity} can't be: choose 1 to {_MOST_CAPACITY} tokens")
    if not 0 <= seed < 2**64:
        raise OptionError(f"a seed of {seed} can't be: choose 0 to 2**64 - 1")


def _checked(lengths: Lengths, *, capacity: int) -> NDArray[np.int32]:
    """The lengths as int32[n], each in 1 … capacity."""
    array = np.asarray(lengths)
    if array.ndim != 1 or array.size > _MOST or (array.size and array.dtype.kind not in "iu"):
        raise OptionError(
            f"lengths must be one row of at most {_MOST} whole numbers, not {array.dtype} of {array.shape}"
        )
    for extreme in (array.argmin, array.argmax) if array.size else ():
        at = int(extreme())
        if not 1 <= array[at] <= capacity:
            raise OptionError(f"length {at} is {array[at]} tokens; a bin takes 1 to {capacity}")
    return np.ascontiguousarray(array, dtype=np.int32)
