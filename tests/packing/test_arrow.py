"""Arrow columns made without `pa.array`."""

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from packing.arrow import column, texts


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
