"""Accepted examples wait on disk until the plan says where they go: memory stays flat.

In the file a token is an int32: its id, or ~id (which is below 0) where it is trained.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from packing.arrow import column, texts
from packing.atomic import writing
from packing.boundaries import cu_seqlens, starts
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


class TokenFile:
    """A file without a name beside the output: a process that is killed leaves nothing behind.

    All workers write to it. What lies where depends on who came first; what is packed does not, since each
    chunk's place is kept with its examples.
    """

    def __init__(self, directory: Path, *, descriptor: int) -> None:
        self.directory = directory
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.directory, DupFd(self.descriptor))

    def write(self, tokens: NDArray[np.int32]) -> int:
        """Writes tokens and returns how many stand before them.

        Raises:
            OutputError: the disk is full.
        """
        data = memoryview(tokens).cast("B")
        with writing(self.directory):
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
            try:
                start = os.fstat(self.descriptor).st_size
                os.truncate(self.descriptor, start + len(data))
            finally:
                fcntl.lockf(self.descriptor, fcntl.LOCK_UN)
            written = 0
            while written < len(data):
                written += os.pwrite(self.descriptor, data[written:], start + written)
        return start // _BYTES


def _reopened(directory: Path, descriptor: Any) -> TokenFile:
    """In a worker that was spawned."""
    return TokenFile(directory, descriptor=descriptor.detach())


class ExampleStore:
    """The examples, and the file where their tokens lie."""

    def __init__(self, directory: Path) -> None:
        self._chunks: list[tuple[int, NDArray[np.void]]] = []
        with writing(directory):
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  (closed by __exit__)
        self.tokens = TokenFile(directory, descriptor=self._file.fileno())

    def __enter__(self) -> ExampleStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, examples: NDArray[np.void], *, start: int) -> None:
        """Adds examples.

        Args:
            examples: EXAMPLE[n].
            start: Tokens in the file before theirs, which are `to_stored`, one after the other.
        """
        self._chunks.append((start, examples))

    def part(self, *, held_out: bool) -> StoredPart:
        """The examples of the eval part, or of the main one; they are numbered from 0 in input order."""
        examples, places = [np.empty(0, EXAMPLE)], [np.empty(0, np.int64)]
        for start, chunk in self._chunks:
            chosen = chunk["held_out"] == held_out
            examples.append(chunk[chosen])
            places.append((start + starts(chunk["length"]))[chosen])
        return StoredPart(
            examples=np.concatenate(examples),
            starts=np.concatenate(places),
            descriptor=self.tokens.descriptor,
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
