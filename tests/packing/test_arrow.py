"""Arrow columns made without `pa.array`, and read without `to_numpy`."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packing.arrow import column, numbers, texts


@settings(max_examples=50)
@given(
    rows=st.lists(st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1))),
    words=st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"]))),
)
def test_they_are_those_that_arrow_makes(rows: list[tuple[int, int]], words: list[str]) -> None:
    """Numbers of a table's column, which lie apart in memory, and texts of any script, "" among them."""
    table = np.array(rows, [("a", np.int32), ("b", np.int64)])
    for name in ("a", "b"):
        assert column(table[name]).equals(pa.array(table[name]))
    made = texts(words)
    made.validate(full=True)
    assert made.equals(pa.array(words, pa.string()))


@given(
    values=st.lists(st.integers(-(2**31), 2**31 - 1)),
    kind=st.sampled_from([pa.int32(), pa.int64()]),
    cut=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_numbers_are_read_as_they_lie(values: list[int], kind: pa.DataType, cut: tuple[int, int]) -> None:
    """A part of a column too: its values and type, nothing copied, nothing to be written to."""
    array = pa.array(values, kind).slice(*cut)
    found = numbers(array)
    assert found.tolist() == array.to_pylist()
    assert found.dtype == kind.to_pandas_dtype()
    if len(array):
        assert not found.flags.writeable
        assert found.ctypes.data == array.buffers()[1].address + array.offset * found.itemsize


def test_null_is_no_number() -> None:
    """Arrow's own error, as for any other damage."""
    with pytest.raises(pa.ArrowInvalid, match="1 of 3 numbers are null"):
        numbers(pa.array([1, None, 3]))
