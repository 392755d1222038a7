"""Inputs to records: finds what a file really is, and cuts it into chunks that processes parse.

    name -> Source -> Chunk (raw, picklable) -> records, parsed where the chunk is used

The parent process only cuts: lines, the values of a JSON array, Arrow batches. Memory stays flat for
files of any size. A file that can't be read is an `InputError`; a row that can't is a `RowRejected`
in the place of its record.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from packing.errors import InputError, Reason, RowRejected
from packing.strict_json import loads

if TYPE_CHECKING:
    import pyarrow as pa

Record = tuple[int, int, dict[str, Any] | RowRejected]
"""(line or record number as a person counts, record index from 0, the record or why there is none)."""

BLOCK = 1 << 20
"""Bytes read at a time."""

CHUNK_BYTES = 8 << 20
"""A chunk ends with the row that passes this size, so that rows of 10 MB do not add up to gigabytes."""

MAX_RECORD = 64 << 20
"""The longest record in bytes. Nobody's conversation is longer; a file without newlines is."""

BOMB_BYTES, BOMB_RATIO = 1 << 30, 1000
"""Past so many bytes, a file that grew by more than this factor is taken for a decompression bomb.

Chat text shrinks 3 to 10 times; 1,032 times is the most that gzip can do.
"""


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Which part of a hub data set or of a `save_to_disk` folder.

    Attributes:
        split: The split; needed only where there are several.
        config: The hub data set's configuration.
        revision: The hub data set's branch, tag or commit.
    """

    split: str | None = None
    config: str | None = None
    revision: str | None = None


@dataclass(frozen=True, kw_only=True)
class Chunk(ABC):
    """Consecutive records of one source, raw: cheap to hand to another process, parsed there.

    Attributes:
        source: The number of the source, from 0.
        first: The number of the first record, from 1.
        notes: What was passed over on the way to these records, for the counts in the report.
    """

    source: int
    first: int
    notes: Mapping[str, int] = field(default_factory=dict)

    @abstractmethod
    def __len__(self) -> int:
        """The number of records."""

    @abstractmethod
    def records(self) -> Iterator[Record]:
        """The parsed records; one that can't be parsed is the `RowRejected` that says why."""


@dataclass(frozen=True, kw_only=True)
class JsonChunk(Chunk):
    """JSON texts, each with the line on which it begins."""

    rows: Sequence[tuple[int, bytes]]

    def __len__(self) -> int:
        return len(self.rows)

    def records(self) -> Iterator[Record]:
        for index, (line, raw) in enumerate(self.rows, self.first - 1):
            yield line, index, _parse(raw)


def _parse(raw: bytes) -> dict[str, Any] | RowRejected:
    if len(raw) > MAX_RECORD:
        return RowRejected(Reason.BAD_JSON, f"longer than {MAX_RECORD >> 20} MiB")
    try:
        value = loads(raw)
    except RowRejected as rejected:
        return rejected
    if not isinstance(value, dict):
        return RowRejected(Reason.BAD_RECORD, f"{type(value).__name__} where a JSON object is expected")
    return value


@dataclass(frozen=True, kw_only=True)
class ArrowChunk(Chunk):
    """Rows of a table as an Arrow stream; numbered as records, since a table has no lines."""

    length: int
    stream: bytes

    def __len__(self) -> int:
        return self.length

    def records(self) -> Iterator[Record]:
        import pyarrow as pa

        with pa.ipc.open_stream(self.stream) as reader:
            for index, row in enumerate(reader.read_all().to_pylist(), self.first - 1):
                yield index + 1, index, row


class Source(ABC):
    """One input: a file, a `save_to_disk` folder, a hub data set."""

    name: str

    @abstractmethod
    def identity(self) -> Mapping[str, str | int | None]:
        """What makes it this input: name and content, never where it lies."""

    @abstractmethod
    def chunks(self, *, rows: int) -> Iterator[Chunk]:
        """All records in order, at most `rows` a chunk; the cuts depend on nothing but the input.

        Raises:
            InputError: the file is damaged or cut off; says how many records came before.
        """


class FileSource(Source):
    """A file on disk."""

    def __init__(self, path: str, *, name: str, number: int) -> None:
        self.path = path
        self.name = name
        self.number = number

    def identity(self) -> Mapping[str, str | int | None]:
        with open(self.path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        return {"kind": "file", "name": self.name, "sha256": digest.hexdigest()}

    def chunks(self, *, rows: int) -> Iterator[Chunk]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self.path
        if path.endswith(".parquet"):
            with pq.ParquetFile(path) as file:
                yield from _arrow_chunks(file.iter_batches(batch_size=rows), source=self.number)
            return
        with pa.input_stream(path) as stream:
            blocks = iter(lambda: stream.read(BLOCK), b"")
            if path.endswith(".json"):
                value = loads(b"".join(blocks))
                import orjson

                pieces = [(1, orjson.dumps(v)) for v in (value if isinstance(value, list) else [value])]
                yield from _json_chunks(iter(pieces), source=self.number, rows=rows)
            else:
                yield from _json_chunks(_lines(blocks), source=self.number, rows=rows)


class DatasetSource(Source):
    """A `datasets.Dataset`, from a folder or the hub."""

    def __init__(
        self, dataset: Any, *, name: str, number: int, identity: Mapping[str, str | int | None]
    ) -> None:
        self.dataset = dataset.with_format("arrow")
        self.name = name
        self.number = number
        self._identity = identity

    def identity(self) -> Mapping[str, str | int | None]:
        return self._identity

    def chunks(self, *, rows: int) -> Iterator[Chunk]:
        tables = (self.dataset[at : at + rows] for at in range(0, len(self.dataset), rows))
        batches = (table.combine_chunks().to_batches()[0] for table in tables)
        yield from _arrow_chunks(batches, source=self.number)


def open_sources(inputs: Sequence[str], *, options: SourceOptions) -> list[Source]:
    """The sources that `inputs` name.

    Raises:
        InputError: nothing there.
    """
    sources: list[Source] = []
    for given in inputs:
        number = len(sources)
        if os.path.isfile(given):
            name = os.path.basename(given) if os.path.isabs(given) else given
            sources.append(FileSource(given, name=name, number=number))
        elif os.path.isdir(given):
            from datasets import load_from_disk

            dataset = load_from_disk(given)
            sources.append(
                DatasetSource(
                    dataset, name=os.path.basename(given), number=number, identity={"kind": "dataset"}
                )
            )
        else:
            raise InputError(f"{given}: no such file or folder")
    return sources


def _lines(blocks: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    r"""(line number, line): split at `\n` alone, as an editor counts, never at U+2028 and its like."""
    number, rest = 1, b""
    for block in blocks:
        if len(rest) > MAX_RECORD and b"\n" not in block:
            continue  # far too long already; its end alone matters
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield number, line
            number += 1
    if rest:
        yield number, rest


def _json_chunks(pieces: Iterator[tuple[int, bytes]], *, source: int, rows: int) -> Iterator[Chunk]:
    first, taken, size, blank = 1, [], 0, 0
    for line, raw in pieces:
        if not raw.strip():
            blank += 1
            continue
        taken.append((line, raw))
        size += len(raw)
        if len(taken) == rows or size >= CHUNK_BYTES:
            yield JsonChunk(
                source=source, first=first, rows=taken, notes={"blank_line": blank} if blank else {}
            )
            first, taken, size, blank = first + len(taken), [], 0, 0
    if taken or blank:
        yield JsonChunk(source=source, first=first, rows=taken, notes={"blank_line": blank} if blank else {})


def _arrow_chunks(batches: Iterator[pa.RecordBatch], *, source: int) -> Iterator[Chunk]:
    import pyarrow as pa

    first = 1
    for batch in batches:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        yield ArrowChunk(source=source, first=first, length=len(batch), stream=sink.getvalue().to_pybytes())
        first += len(batch)
