"""Arrow columns to and from numpy: pyarrow's own ways import pandas first, 0.2 s of processor a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa


def column(values: NDArray[Any]) -> pa.Array:
    """The numbers of a 1-D array, which is not copied if it lies in one piece."""
    import pyarrow as pa

    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), values.size, [None, data])


def texts(values: Sequence[str]) -> pa.StringArray:
    """The texts, copied."""
    import pyarrow as pa

    encoded = [value.encode() for value in values]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(encoded), pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded)))


def numbers(values: pa.Array) -> NDArray[Any]:
    """The whole numbers of a column, not copied and not to be written to.

    Raises:
        pa.ArrowInvalid: some are null.
    """
    import pyarrow as pa

    if values.null_count:
        raise pa.ArrowInvalid(f"{values.null_count} of {len(values)} numbers are null")
    dtype = np.dtype(str(values.type))
    if not len(values):
        return np.empty(0, dtype)
    data = memoryview(values.buffers()[1]).toreadonly()
    return np.frombuffer(data, dtype, count=len(values), offset=values.offset * dtype.itemsize)
