"""Accepted examples wait on disk until the plan says where they go: memory stays flat.

In the file a token is an int32: its id, or ~id (which is below 0) where it is trained.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from packing.arrow import column, texts
from packing.atomic import writing
from packing.boundaries import cu_seqlens
from packing.buffer import PackedBuffer
from packing.example import IGNORE_INDEX

if TYPE_CHECKING:
    import pyarrow as pa

EXAMPLE = np.dtype(
    [
        ("input", np.int32),  # number of the source
        ("line", np.int64),  # line or record number as a person counts
        ("record", np.int64),  # record number in its source, from 0
        ("turn", np.int32),  # the assistant turn that is trained, -1 for the whole conversation
        ("length", np.int32),  # tokens
        ("supervised", np.int32),  # trained tokens
        ("held_out", np.bool_),  # belongs to the eval part
    ]
)
"""What stays in memory of an example: 33 bytes, so ten million of them take a third of a GiB."""

_BYTES = 4  # of a token


def to_stored(input_ids: NDArray[np.int32], labels: NDArray[np.int32]) -> NDArray[np.int32]:
    """int32[T]: tokens as the store keeps them."""
    return np.where(labels == IGNORE_INDEX, input_ids, ~input_ids)


def from_stored(tokens: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(ids, labels), each int32[T]: the inverse of `to_stored`."""
    sign = tokens >> 31  # -1 where a token is trained, 0 elsewhere
    ids = tokens ^ sign
    return ids, np.where(sign, ids, np.int32(IGNORE_INDEX))


class ExampleStore:
    """A file without a name beside the output: a process that is killed leaves nothing behind."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._examples: list[NDArray[np.void]] = []
        with writing(directory):
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  (closed by __exit__)

    def __enter__(self) -> ExampleStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, examples: NDArray[np.void], *, tokens: NDArray[np.int32]) -> None:
        """Adds examples.

        Args:
            examples: EXAMPLE[n].
            tokens: int32[T], their `to_stored`, one after the other.

        Raises:
            OutputError: the disk is full.
        """
        self._examples.append(examples)
        with writing(self._directory):
            self._file.write(tokens.data)

    def part(self, *, held_out: bool) -> StoredPart:
        """The examples of the eval part, or of the main one; they are numbered from 0 in input order."""
        with writing(self._directory):
            self._file.flush()
        examples = np.concatenate([np.empty(0, EXAMPLE), *self._examples])
        lengths = examples["length"].astype(np.int64)
        chosen = np.flatnonzero(examples["held_out"] == held_out)
        return StoredPart(
            examples=examples[chosen],
            starts=(np.cumsum(lengths) - lengths)[chosen],
            descriptor=self._file.fileno(),
        )


@dataclass(frozen=True, kw_only=True)
class StoredPart:
    """Examples that form one shard set; example n is row n.

    Attributes:
        examples: EXAMPLE[n].
        starts: int64[n], the tokens before each in the store.
        descriptor: The store's open file.
    """

    examples: NDArray[np.void]
    starts: NDArray[np.int64]
    descriptor: int

    def __len__(self) -> int:
        return self.examples.size

    @property
    def lengths(self) -> NDArray[np.int32]:
        """int32[n]: tokens of each example."""
        return np.ascontiguousarray(self.examples["length"])

    def buffer(self, numbers: NDArray[np.int64]) -> PackedBuffer:
        """The examples of these numbers side by side."""
        lengths = self.examples["length"][numbers]
        ends = cu_seqlens(lengths).tolist()
        tokens = np.empty(ends[-1], np.int32)
        into = memoryview(tokens).cast("B")
        # preadv, since the pages of a mapped file would count as this process's memory.
        for start, first, last in zip(self.starts[numbers].tolist(), ends, ends[1:], strict=False):
            read = os.preadv(self.descriptor, [into[_BYTES * first : _BYTES * last]], start * _BYTES)
            assert read == (last - first) * _BYTES, "the store's file is shorter than its examples"
        ids, labels = from_stored(tokens)
        return PackedBuffer(input_ids=ids, labels=labels, seq_lengths=lengths, example_ids=numbers)

    def origins(self, inputs: Sequence[str]) -> pa.Table:
        """Where each example came from: `example`, `input`, `source`, `line`, `record`, `turn`.

        Args:
            inputs: The names of the sources; `source` is the number in this list.
        """
        import pyarrow as pa

        source = column(self.examples["input"])
        return pa.table(
            {
                "example": column(np.arange(len(self))),
                "input": pa.DictionaryArray.from_arrays(source, texts(inputs)),
                "source": source,
                **{name: column(self.examples[name]) for name in ("line", "record", "turn")},
            }
        )
