"""The laws of the boundaries, each checked against a loop that a person can follow."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packing import boundaries

lengths_lists = st.lists(st.integers(1, 70), min_size=1, max_size=12)


def test_the_picture_in_the_docstring():
    """Lengths 3 and 2 give exactly the arrays that the module's docstring draws."""
    assert boundaries.cu_seqlens([3, 2]).tolist() == [0, 3, 5]
    assert boundaries.position_ids([3, 2]).tolist() == [0, 1, 2, 0, 1]
    assert boundaries.seq_idx([3, 2]).tolist() == [0, 0, 0, 1, 1]
    assert boundaries.max_seqlen([3, 2]) == 3


@given(lengths_lists)
def test_arrays_equal_a_plain_loop(lengths):
    """Every derived array equals what a loop over the sequences writes, in the kernels' dtypes."""
    cu, positions, index = [0], [], []
    for number, length in enumerate(lengths):
        for position in range(length):
            positions.append(position)
            index.append(number)
        cu.append(cu[-1] + length)
    for derived, expected, dtype in [
        (boundaries.cu_seqlens(lengths), cu, np.int32),
        (boundaries.position_ids(lengths), positions, np.int64),
        (boundaries.seq_idx(lengths), index, np.int32),
    ]:
        assert derived.tolist() == expected
        assert derived.dtype == dtype
    assert type(boundaries.max_seqlen(lengths)) is int
    assert boundaries.max_seqlen(lengths) == max(lengths)


@given(lengths_lists)
def test_lengths_come_back(lengths):
    """The lengths can be read back from each of the three arrays."""
    assert boundaries.lengths_from_cu_seqlens(boundaries.cu_seqlens(lengths)).tolist() == lengths
    assert boundaries.lengths_from_position_ids(boundaries.position_ids(lengths)).tolist() == lengths
    assert boundaries.lengths_from_seq_idx(boundaries.seq_idx(lengths)).tolist() == lengths


@given(lengths_lists, st.sampled_from([1, 16, 64]))
def test_chunk_indices_equal_a_plain_loop(lengths, chunk):
    """One row (sequence, chunk) for each started chunk of each sequence, in order."""
    expected = [[n, c] for n, length in enumerate(lengths) for c in range((length + chunk - 1) // chunk)]
    derived = boundaries.chunk_indices(lengths, chunk=chunk)
    assert derived.tolist() == expected
    assert derived.dtype == np.int32


@given(lengths_lists, st.integers(0, 100))
def test_the_tail_is_one_sequence_or_none(lengths, rest):
    """A rest becomes exactly one more sequence; a full buffer gets none."""
    tailed = boundaries.with_tail(lengths, capacity=sum(lengths) + rest).tolist()
    assert tailed == ([*lengths, rest] if rest else lengths)


def test_no_lengths_at_all():
    """Nothing in, nothing out: the arrays of an empty buffer are empty, cu_seqlens is [0]."""
    assert boundaries.cu_seqlens([]).tolist() == [0]
    assert boundaries.position_ids([]).size == 0
    assert boundaries.max_seqlen([]) == 0
    assert boundaries.with_tail([], capacity=8).tolist() == [8]


@pytest.mark.parametrize("lengths", [[3, 0, 2], [-1], [[1, 2]], [1.5], ["3"]])
def test_impossible_lengths_are_refused(lengths):
    """An empty sequence breaks kernels, and anything but whole numbers is a caller's mistake."""
    with pytest.raises(ValueError, match="seq_lengths"):
        boundaries.cu_seqlens(lengths)


def test_more_tokens_than_int32_are_refused():
    """Boundaries that would overflow int32 are an error, not a negative number."""
    with pytest.raises(ValueError, match="int32"):
        boundaries.cu_seqlens([2**31 - 1, 1])


@pytest.mark.parametrize(
    ("inverse", "array"),
    [
        (boundaries.lengths_from_cu_seqlens, [1, 3]),
        (boundaries.lengths_from_cu_seqlens, [0, 3, 3]),
        (boundaries.lengths_from_cu_seqlens, []),
        (boundaries.lengths_from_position_ids, [1, 2]),
        (boundaries.lengths_from_position_ids, [0, 2]),
        (boundaries.lengths_from_seq_idx, [0, 2]),
        (boundaries.lengths_from_seq_idx, [0, 1, 0]),
        (boundaries.lengths_from_seq_idx, [1, 1]),
    ],
)
def test_arrays_that_break_a_law_are_refused(inverse, array):
    """No lengths are read from arrays that are not boundaries."""
    with pytest.raises(ValueError):
        inverse(array)


def test_too_many_tokens_for_the_capacity():
    """A tail can't be negative: more tokens than the capacity are refused with both numbers."""
    with pytest.raises(ValueError, match="9 tokens do not fit a capacity of 8"):
        boundaries.with_tail([4, 5], capacity=8)
