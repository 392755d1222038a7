"""Where one example ends and the next begins: the only file that knows.

A buffer's one boundary truth is `seq_lengths`. Everything that a kernel wants is computed from it here:

    seq_lengths    3           2        tokens in each sequence, each at least 1
    cu_seqlens     0           3     5  int32[N + 1], for attention and the delta rule
    position_ids   0  1  2     0  1     int64[T], restart at 0
    seq_idx        0  0  0     1  1     int32[T], for the causal convolution
    max_seqlen     3                    a Python int
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Lengths = Sequence[int] | NDArray[np.integer[Any]]


def check_lengths(seq_lengths: Lengths) -> NDArray[np.int64]:
    """Returns the lengths as int64[N] after checking that each is a whole number of at least 1.

    Raises:
        ValueError: not one-dimensional, not whole numbers, or a length below 1. An empty sequence
            breaks kernels that walk `cu_seqlens` (flash-linear-attention issue 103).
    """
    lengths = np.asarray(seq_lengths)
    if lengths.ndim != 1:
        raise ValueError(f"seq_lengths must be one-dimensional, not of shape {lengths.shape}")
    if lengths.size == 0:
        return np.zeros(0, np.int64)
    if lengths.dtype.kind not in "iu":
        raise ValueError(f"seq_lengths must be whole numbers, not {lengths.dtype}")
    if (smallest := int(lengths.min())) < 1:
        raise ValueError(f"seq_lengths[{int(lengths.argmin())}] is {smallest}; each must be at least 1")
    return lengths.astype(np.int64, copy=False)


def cu_seqlens(seq_lengths: Lengths) -> NDArray[np.int32]:
    """int32[N + 1]: 0, then the running sum of the lengths. Strictly increasing.

    Raises:
        ValueError: as `check_lengths`, or a sum above 2**31 - 1, the most that kernels index.
    """
    return _cumulated(check_lengths(seq_lengths))


def _cumulated(lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    """`cu_seqlens` of lengths that were checked."""
    ends = lengths.cumsum()
    if ends.size and ends[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"the lengths sum to {ends[-1]}; int32 boundaries end at {np.iinfo(np.int32).max}")
    boundaries = np.zeros(ends.size + 1, np.int32)
    boundaries[1:] = ends
    return boundaries


def starts(seq_lengths: Lengths) -> NDArray[np.int64]:
    """int64[N]: where each sequence begins. Unlike `cu_seqlens` not for kernels, so of any sum."""
    lengths = check_lengths(seq_lengths)
    return np.cumsum(lengths) - lengths


def position_ids(seq_lengths: Lengths) -> NDArray[np.int64]:
    """int64[T]: 0, 1, 2, … within each sequence."""
    lengths = check_lengths(seq_lengths)
    return np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(starts(lengths), lengths)


def seq_idx(seq_lengths: Lengths) -> NDArray[np.int32]:
    """int32[T]: the number of the sequence that each token belongs to, from 0.

    Source: causal-conv1d's `seq_idx`; negative would mean padding and is never used here.
    """
    lengths = check_lengths(seq_lengths)
    return np.repeat(np.arange(lengths.size, dtype=np.int32), lengths)


def max_seqlen(seq_lengths: Lengths) -> int:
    """The longest sequence, 0 without any: a Python int, since a tensor costs a sync or a recompile."""
    lengths = check_lengths(seq_lengths)
    return int(lengths.max()) if lengths.size else 0


class Boundaries(NamedTuple):
    """What kernels want of a row of sequences: see the functions of these names."""

    cu_seqlens: NDArray[np.int32]
    position_ids: NDArray[np.int64]
    seq_idx: NDArray[np.int32]
    max_seqlen: int


@lru_cache(maxsize=8)
def _numbers(count: int) -> NDArray[np.int64]:
    """0 … count - 1, the same array each time: only to be read."""
    numbers = np.arange(count, dtype=np.int64)
    numbers.flags.writeable = False
    return numbers


def all_of(seq_lengths: Lengths) -> Boundaries:
    """The four at once, with one check of the lengths: less than half the time, which a loader notices.

    Raises:
        ValueError: as `cu_seqlens`.
    """
    lengths = check_lengths(seq_lengths)
    boundaries = _cumulated(lengths)
    firsts = boundaries[:-1].astype(np.int64).repeat(lengths)
    positions = np.subtract(_numbers(firsts.size), firsts, out=firsts)
    index = np.arange(lengths.size, dtype=np.int32).repeat(lengths)
    return Boundaries(boundaries, positions, index, int(lengths.max()) if lengths.size else 0)


def chunk_indices(seq_lengths: Lengths, *, chunk: int = 64) -> NDArray[np.int32]:
    """int32[NT, 2]: (sequence, chunk within it) for each chunk of at most `chunk` tokens.

    Built on the host, it saves flash-linear-attention one device sync for each new batch.
    Source: fla.ops.utils.index.prepare_chunk_indices.
    """
    chunks = -(-check_lengths(seq_lengths) // chunk)
    return np.stack([seq_idx(chunks), position_ids(chunks).astype(np.int32)], axis=1)


def lengths_from_cu_seqlens(boundaries: Lengths) -> NDArray[np.int64]:
    """The inverse of `cu_seqlens`.

    Raises:
        ValueError: not 0 at first, or not strictly increasing.
    """
    array = np.asarray(boundaries)
    if array.ndim != 1 or array.size == 0 or int(array[0]) != 0:
        raise ValueError(f"cu_seqlens must be one-dimensional and begin with 0: {array[:4]}")
    return check_lengths(array[1:].astype(np.int64) - array[:-1].astype(np.int64))


def lengths_from_position_ids(positions: Lengths) -> NDArray[np.int64]:
    """The inverse of `position_ids`: a new sequence wherever a position is 0.

    Raises:
        ValueError: the positions do not run 0, 1, 2, … within each sequence.
    """
    array = np.asarray(positions)
    zeros = np.flatnonzero(array == 0)
    lengths = np.diff(np.append(zeros, array.size))
    if array.size and (zeros.size == 0 or zeros[0] != 0 or not np.array_equal(position_ids(lengths), array)):
        raise ValueError("position_ids must run 0, 1, 2, … from the start of each sequence")
    return check_lengths(lengths)


def lengths_from_seq_idx(index: Lengths) -> NDArray[np.int64]:
    """The inverse of `seq_idx`.

    Raises:
        ValueError: the numbers are not 0, 1, 2, …, each once, in runs.
    """
    array = np.asarray(index)
    changes = np.flatnonzero(np.append(True, array[1:] != array[:-1])) if array.size else np.zeros(0, int)
    if not np.array_equal(array[changes], np.arange(changes.size)):
        raise ValueError("seq_idx must count the sequences 0, 1, 2, … without gaps")
    return check_lengths(np.diff(np.append(changes, array.size)))


def with_tail(seq_lengths: Lengths, *, capacity: int) -> NDArray[np.int64]:
    """The lengths and, where they do not fill `capacity`, exactly one more for the rest.

    Uncovered rows would give NaN gradients, and one sequence a pad token would cost the kernels
    thousands of empty steps; so the rest is one sequence.

    Raises:
        ValueError: the lengths sum to more than the capacity.
    """
    lengths = check_lengths(seq_lengths)
    rest = capacity - int(lengths.sum())
    if rest < 0:
        raise ValueError(f"{int(lengths.sum())} tokens do not fit a capacity of {capacity}")
    return np.append(lengths, rest) if rest else lengths
