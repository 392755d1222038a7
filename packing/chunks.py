r"""Cutting and parsing: a file's blocks into raw records, by one process; raw records into dicts, by any.

    b'{"a": 1}\n{"a"' + b': 2}\n'  ->  (1, b'{"a": 1}\n'), (2, b'{"a": 2}\n')  ->  {"a": 1}, {"a": 2}

Cutting is cheap and keeps memory flat; parsing is what other processes are for.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from packing.errors import Reason, RowRejected
from packing.example import Note
from packing.strict_json import loads

if TYPE_CHECKING:
    import pyarrow as pa

Record = tuple[int, int, dict[str, Any] | RowRejected]
"""(line or record number as a person counts, record index from 0, the record or why there is none)."""

CHUNK_BYTES = 8 << 20
"""A chunk ends with the record that passes this size, lest a thousand records of 10 MB be one chunk."""

MAX_RECORD = 64 << 20
"""Bytes in the longest record. No conversation is longer; a file without line ends is."""


class Damaged(Exception):
    """What makes the rest of a file unreadable; the source adds the file's name."""


@dataclass(frozen=True, kw_only=True)
class Chunk(ABC):
    """Consecutive records of one source, raw: cheap to hand to another process, and parsed there.

    Attributes:
        source: The number of the source, from 0.
        first: The number of the first record, from 1.
        notes: What was passed over on the way to these records.
    """

    source: int
    first: int
    notes: Mapping[Note, int] = field(default_factory=dict)

    @abstractmethod
    def __len__(self) -> int:
        """The number of records."""

    @abstractmethod
    def records(self) -> Iterator[Record]:
        """The parsed records; in place of one that can't be parsed, the `RowRejected` that says why."""


# JSON: lines, or the values of arrays


@dataclass(frozen=True, kw_only=True)
class JsonChunk(Chunk):
    r"""JSON texts, each with the line on which it begins; lines still have their `\n`."""

    rows: Sequence[tuple[int, bytes]]
    lines: bool

    def __len__(self) -> int:
        return len(self.rows)

    def records(self) -> Iterator[Record]:
        for index, (line, raw) in enumerate(self.rows, self.first - 1):
            record = _json_record(raw)
            if isinstance(record, RowRejected) and self.lines and not raw.endswith(b"\n"):
                record = RowRejected(record.reason, f"the file ends within this line: {record.detail}")
            yield line, index, record


def _json_record(raw: bytes) -> dict[str, Any] | RowRejected:
    if len(raw) > MAX_RECORD:
        return RowRejected(Reason.BAD_JSON, f"longer than {MAX_RECORD >> 20} MiB")
    try:
        value = loads(raw)
    except RowRejected as rejected:
        return rejected
    if not isinstance(value, dict):
        return RowRejected(Reason.BAD_RECORD, f"{type(value).__name__} where a JSON object is expected")
    return value


def json_chunks(
    pieces: Iterable[tuple[int, bytes]], *, source: int, rows: int, lines: bool, notes: Mapping[Note, int]
) -> Iterator[JsonChunk]:
    """Chunks of (line, text); blank texts are no records, and are counted."""
    first, taken, size, counts = 1, list[tuple[int, bytes]](), 0, Counter(notes)
    for line, raw in pieces:
        if not raw.strip():
            counts[Note.BLANK_LINES] += 1
            continue
        taken.append((line, raw))
        size += len(raw)
        if raw.endswith(b"\r\n"):
            counts[Note.CRLF_LINES] += 1
        if len(taken) == rows or size >= CHUNK_BYTES:
            yield JsonChunk(source=source, first=first, notes=counts, rows=taken, lines=lines)
            first, taken, size, counts = first + len(taken), [], 0, Counter()
    if taken or counts:
        yield JsonChunk(source=source, first=first, notes=counts, rows=taken, lines=lines)


def cut_lines(blocks: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    r"""(line number, line with its `\n`): cut at `\n` alone, as JSON lines are, never at U+2028 and its like.

    A line longer than `MAX_RECORD` loses its middle, so that memory stays flat; its length gives it away.
    """
    number, size = 1, 0
    begun: list[bytes] = []  # the blocks so far of a line that goes on
    for block in blocks:
        if b"\n" not in block:
            if size <= MAX_RECORD:
                begun.append(block)
                size += len(block)
            continue
        lines = io.BytesIO(b"".join((*begun, block))).readlines()
        begun = [] if lines[-1].endswith(b"\n") else [lines.pop()]
        size = sum(map(len, begun))
        for line in lines:
            yield number, line
            number += 1
    if begun:
        yield number, b"".join(begun)


_WITHIN, _BETWEEN = (
    re.compile(rb'(?:[^][{}%b"]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+([][{}%b"]?)' % (mark, mark), re.DOTALL)
    for mark in (b"", b",")
)
"""Skips whole strings and what has no structure, up to a bracket (between items: or a comma), or the
quote of a string that the buffer does not hold whole."""


def cut_values(blocks: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """(line on which it begins, text) of each item of top-level arrays and of each top-level object.

    Only strings, brackets and the commas between items are looked at, so memory holds one item, and a
    pretty-printed file cuts as well as a dense one. Whether a text is JSON shows where it is parsed.

    Raises:
        Damaged: a bracket that closes nothing, an end within a value, an item above `MAX_RECORD`.
    """
    buffer, line = b"", 1  # the buffer begins where the item at hand does, and that is on this line
    at, depth, in_array = 0, 0, False
    rest = iter(blocks)
    while more := _take(rest, len(buffer)):  # doubles what holds a long item, so that it costs linear time
        buffer, start = buffer + more, 0
        while token := (_BETWEEN if in_array and depth == 1 else _WITHIN).match(buffer, at):
            mark, at, end = token[1], token.end(), -1
            if not mark:
                break
            if mark == b'"':  # the string goes on in the next block
                at -= 1
                break
            if mark == b"[" and depth == 0:
                in_array, depth, end = True, 1, at - 1
            elif mark in (b"[", b"{"):
                depth += 1
            elif mark in (b"]", b"}"):
                depth -= 1
                if depth < 0 or (depth == 0 and in_array != (mark == b"]")):
                    here = line + buffer.count(b"\n", start, at)
                    raise Damaged(f"line {here}: {mark.decode()} closes nothing")
                if depth == 0:
                    end = at - 1 if in_array else at
                    in_array = False
            elif mark == b",":
                end = at - 1
            if end >= 0:
                text = buffer[start:end].lstrip()
                if text or mark == b",":
                    yield line + buffer.count(b"\n", start, end - len(text)), text
                line += buffer.count(b"\n", start, at)
                start = at
        buffer, at = buffer[start:], at - start
        if len(buffer) > MAX_RECORD:
            raise Damaged(f"the value that begins on line {line} is longer than {MAX_RECORD >> 20} MiB")
    text = buffer.lstrip()
    line += buffer.count(b"\n", 0, len(buffer) - len(text))
    if depth:
        raise Damaged(f"cut off: what begins on line {line} does not end")
    if text:
        yield line, text


def _take(blocks: Iterator[bytes], size: int) -> bytes:
    """The next block, and more of them up to `size` bytes."""
    taken = list(itertools.islice(blocks, 1))
    while taken and size > sum(map(len, taken)) and (block := next(blocks, b"")):
        taken.append(block)
    return b"".join(taken)


# CSV: every cell is text


@dataclass(frozen=True, kw_only=True)
class CsvChunk(Chunk):
    """Rows of cells, each with the line on which it begins."""

    columns: Sequence[str]
    rows: Sequence[tuple[int, list[str]]]

    def __len__(self) -> int:
        return len(self.rows)

    def records(self) -> Iterator[Record]:
        for index, (line, cells) in enumerate(self.rows, self.first - 1):
            yield line, index, self._record(cells)

    def _record(self, cells: list[str]) -> dict[str, Any] | RowRejected:
        if len(cells) != len(self.columns):
            return RowRejected(
                Reason.BAD_RECORD, f"{len(cells)} cells where the header has {len(self.columns)}"
            )
        if not all(cell.isascii() for cell in cells) and _UNDECODED.search("".join(cells)):
            return RowRejected(Reason.BAD_ENCODING, "not UTF-8")
        return dict(zip(self.columns, cells, strict=True))


_UNDECODED = re.compile("[\udc80-\udcff]")


def csv_chunks(
    lines: Iterable[tuple[int, bytes]], *, delimiter: str, source: int, rows: int, notes: Mapping[Note, int]
) -> Iterator[CsvChunk]:
    """Chunks of the rows below the header.

    Raises:
        Damaged: no header, two columns of one name, or quotes that are not closed.
    """
    csv.field_size_limit(MAX_RECORD)  # the default is 128 KiB, and of the whole process
    texts = (line.decode("utf-8", "surrogateescape") for _, line in lines)
    reader = csv.reader(texts, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    first, taken, size, counts = 1, list[tuple[int, list[str]]](), 0, Counter(notes)
    while True:
        begins = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise Damaged(f"line {begins}: {error}") from None
        if cells is None:
            break
        if not cells:
            counts[Note.BLANK_LINES] += 1
            continue
        if header is None:
            header = cells
            if len(set(header)) < len(header):
                raise Damaged("two columns have the same name in the header")
            continue
        taken.append((begins, cells))
        size += sum(map(len, cells))
        if len(taken) == rows or size >= CHUNK_BYTES:
            yield CsvChunk(source=source, first=first, notes=counts, columns=header, rows=taken)
            first, taken, size, counts = first + len(taken), [], 0, Counter()
    if header is None:
        raise Damaged("there is no header line")
    if taken or counts:
        yield CsvChunk(source=source, first=first, notes=counts, columns=header, rows=taken)


# Arrow: tables


@dataclass(frozen=True, kw_only=True)
class ArrowChunk(Chunk):
    """Rows of a table as an Arrow stream. A table has no lines, so its records are counted, from 1.

    A table gives every row all fields of its schema. So a null within a row's nested objects is taken
    for a field that the row never had; a map has its own keys, so its nulls stay.
    """

    length: int
    stream: bytes

    def __len__(self) -> int:
        return self.length

    def records(self) -> Iterator[Record]:
        import pyarrow as pa

        with pa.ipc.open_stream(self.stream) as reader:
            table = reader.read_all()
        restore = {column.name: _restorer(column.type) for column in table.schema}
        for index in range(len(table)):
            record: dict[str, Any] | RowRejected
            try:
                (row,) = table.slice(index, 1).to_pylist()
                record = {
                    name: None if value is None else restore[name](value) for name, value in row.items()
                }
            except RowRejected as rejected:
                record = rejected
            except (ArithmeticError, ValueError) as error:  # a date of no calendar, two fields of one name
                record = RowRejected(Reason.BAD_RECORD, " ".join(str(error).split())[:200])
            yield self.first + index, self.first - 1 + index, record


def _restorer(kind: pa.DataType) -> Callable[[Any], Any]:
    """What turns a value of this type, as `to_pylist` gives it, into what the record's author wrote."""
    import pyarrow as pa

    if isinstance(kind, pa.JsonType):  # `datasets` stores values of mixed types as JSON text
        return loads
    if isinstance(kind, pa.BaseExtensionType):
        return _restorer(kind.storage_type)
    if pa.types.is_struct(kind):
        fields = {child.name: _restorer(child.type) for child in kind}
        return lambda row: {name: fields[name](item) for name, item in row.items() if item is not None}
    if pa.types.is_map(kind):
        of_map = _restorer(kind.item_type)
        return lambda pairs: _of_pairs(
            [(name, None if item is None else of_map(item)) for name, item in pairs]
        )
    if isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType):
        of_list = _restorer(kind.value_type)
        return lambda items: [None if item is None else of_list(item) for item in items]
    return lambda value: value


def _of_pairs(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """A map, whose nulls its author wrote; of two values for one key a dict would keep the last."""
    restored = dict(pairs)
    if len(restored) < len(pairs):
        raise RowRejected(Reason.BAD_RECORD, "a map has a key twice")
    return restored


def arrow_chunks(batches: Iterable[pa.RecordBatch], *, source: int, rows: int) -> Iterator[ArrowChunk]:
    """Chunks of Arrow batches, each checked first: values that belie their offsets crash a reader.

    Raises:
        Damaged: two columns of one name.
        UnicodeDecodeError: the name of a column or field.
        pyarrow.ArrowInvalid: broken values, such as text that is not UTF-8.
    """
    import pyarrow as pa

    first = 1
    for batch in batches:
        batch.validate(full=True)
        if len({column.name: _restorer(column.type) for column in batch.schema}) < batch.num_columns:
            raise Damaged("two columns have the same name")
        step = max(1, min(rows, len(batch) * CHUNK_BYTES // max(batch.nbytes, 1)))
        for at in range(0, len(batch), step):
            part = batch.slice(at, step)
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, part.schema) as writer:
                writer.write_batch(part)
            stream = sink.getvalue().to_pybytes()
            yield ArrowChunk(source=source, first=first, length=len(part), stream=stream)
            first += len(part)
