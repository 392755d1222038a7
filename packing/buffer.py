"""Examples side by side in one 1-D buffer, and back: `unpack(build_buffer(xs)) == xs`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packing.boundaries import check_lengths, cu_seqlens
from packing.example import IGNORE_INDEX, Example


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBuffer:
    """Real tokens alone; `seq_lengths` is the only boundary, all others are computed from it.

    Compared by identity.

    Attributes:
        input_ids: int32[T].
        labels: int32[T], `IGNORE_INDEX` at the first token of each example.
        seq_lengths: int32[N], each at least 1, their sum is T.
        example_ids: int64[N], the examples' numbers.
    """

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    seq_lengths: NDArray[np.int32]
    example_ids: NDArray[np.int64]

    def __len__(self) -> int:
        return int(self.input_ids.size)


def check_buffer(buffer: PackedBuffer, *, capacity: int | None = None) -> None:
    """Checks every law of a buffer.

    Raises:
        ValueError: names the law that fails and the place.
    """
    lengths = check_lengths(buffer.seq_lengths)
    total = int(lengths.sum())
    if not (total == buffer.input_ids.size == buffer.labels.size):
        raise ValueError(
            f"seq_lengths sum to {total}, but there are {buffer.input_ids.size} ids "
            f"and {buffer.labels.size} labels"
        )
    if lengths.size != buffer.example_ids.size:
        raise ValueError(f"{lengths.size} lengths, but {buffer.example_ids.size} example ids")
    if capacity is not None and total > capacity:
        raise ValueError(f"{total} tokens exceed the capacity of {capacity}")
    first = buffer.labels[cu_seqlens(lengths)[:-1]]
    if (wrong := np.flatnonzero(first != IGNORE_INDEX)).size:
        raise ValueError(
            f"the first label of example {buffer.example_ids[wrong[0]]} is {first[wrong[0]]}, not -100"
        )
    trained = buffer.labels != IGNORE_INDEX
    if (wrong := np.flatnonzero(trained & (buffer.labels != buffer.input_ids))).size:
        raise ValueError(f"label {buffer.labels[wrong[0]]} at token {wrong[0]} is neither its id nor -100")


def build_buffer(
    examples: Sequence[Example],
    *,
    example_ids: Sequence[int] | NDArray[Any] | None = None,
    capacity: int | None = None,
) -> PackedBuffer:
    """Lays the examples side by side.

    Args:
        examples: At least one.
        example_ids: Their numbers; None counts them from 0.
        capacity: Most tokens allowed; None allows any number.

    Raises:
        ValueError: no examples, or a law of `check_buffer` broken.
    """
    if not examples:
        raise ValueError("a buffer holds at least one example")
    ids = np.arange(len(examples)) if example_ids is None else example_ids
    buffer = PackedBuffer(
        input_ids=np.concatenate([example.input_ids for example in examples]),
        labels=np.concatenate([example.labels for example in examples]),
        seq_lengths=np.array([len(example) for example in examples], np.int32),
        example_ids=np.asarray(ids, np.int64),
    )
    check_buffer(buffer, capacity=capacity)
    return buffer


def unpack(buffer: PackedBuffer) -> list[Example]:
    """The examples in their order: the inverse of `build_buffer`. Their arrays are views.

    Raises:
        ValueError: a law of `check_buffer` broken.
    """
    check_buffer(buffer)
    ends = cu_seqlens(buffer.seq_lengths).tolist()
    return [
        Example(input_ids=buffer.input_ids[a:b], labels=buffer.labels[a:b])
        for a, b in itertools.pairwise(ends)
    ]
