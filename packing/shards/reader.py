"""Opens a shard set: buffers by number, as views of the mapped files."""

from __future__ import annotations

import bisect
import ctypes
import hashlib
import json
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packing.arrow import numbers
from packing.atomic import interrupted
from packing.boundaries import starts
from packing.buffer import PackedBuffer
from packing.errors import OptionError, ShardError
from packing.example import Example
from packing.shards.manifest import (
    EXAMPLES,
    FOR_DATASETS,
    MANIFEST,
    REJECTS,
    Remembered,
    buffer_schema,
    canonical_json,
    unseal,
)

if TYPE_CHECKING:
    import pyarrow as pa


class _Rows(NamedTuple):
    """A record batch as numpy views: row r of a column is values[offsets[r]:offsets[r + 1]]."""

    tokens: NDArray[np.int32]  # offsets into input_ids and labels
    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    sequences: NDArray[np.int32]  # offsets into seq_lengths and example_ids
    seq_lengths: NDArray[np.int32]
    example_ids: NDArray[np.int64]


def _views(path: Path, data: Any) -> list[_Rows]:
    """The record batches of an Arrow stream, nothing copied.

    Raises:
        ShardError: not the columns of a shard, or lists that do not line up.
    """
    import pyarrow as pa

    batches = []
    try:
        with pa.ipc.open_stream(data) as stream:
            if stream.schema != buffer_schema():
                raise ShardError(f"{path}: not the columns of a shard: {stream.schema}")
            for number, batch in enumerate(stream):
                batch.validate(full=True)
                ids, labels, lengths, examples = batch.columns
                if not (ids.offsets.equals(labels.offsets) and lengths.offsets.equals(examples.offsets)):
                    raise ShardError(f"{path}, record batch {number}: columns of different lengths")
                batches.append(
                    _Rows(
                        *map(numbers, (ids.offsets, ids.values, labels.values)),
                        *map(numbers, (lengths.offsets, lengths.values, examples.values)),
                    )
                )
    except pa.ArrowException as error:
        raise ShardError(f"{path} is damaged: {error}") from None
    return batches


@contextmanager
def _page_by_page(data: pa.Buffer) -> Iterator[None]:
    """Inside, the system reads of a mapped file the page that is asked for, and nothing around it.

    Finding a shard's record batches takes a page here and there. With what the system reads around each, up
    to 8 MiB, that was the whole shard: 0.2 s for a first batch from a cold disk, 0.03 s since.
    """
    # Python's own mmap has madvise, and before 3.13 keeps a file open for each map.
    advise = partial(ctypes.CDLL(None).madvise, ctypes.c_void_p(data.address), ctypes.c_size_t(data.size))
    advise(mmap.MADV_RANDOM)
    try:
        yield
    finally:
        advise(mmap.MADV_NORMAL)


class _Shard:
    """One data file, mapped."""

    def __init__(self, batches: list[_Rows]) -> None:
        self.batches = batches
        self._first = [0]
        for batch in batches:
            self._first.append(self._first[-1] + batch.tokens.size - 1)

    def __len__(self) -> int:
        return self._first[-1]

    def __getitem__(self, i: int) -> PackedBuffer:
        number = bisect.bisect_right(self._first, i) - 1
        rows = self.batches[number]
        i -= self._first[number]
        tokens = slice(rows.tokens[i], rows.tokens[i + 1])
        sequences = slice(rows.sequences[i], rows.sequences[i + 1])
        return PackedBuffer(
            input_ids=rows.input_ids[tokens],
            labels=rows.labels[tokens],
            seq_lengths=rows.seq_lengths[sequences],
            example_ids=rows.example_ids[sequences],
        )


class ShardSet:
    """A shard directory for reading: buffers by number, as views of the mapped files.

    Opening reads the manifest, looks at each file's size, and checks the digests of the two small files that
    only `datasets` reads. A data file is mapped, and its digest checked unless it was before, when its first
    buffer is asked for.

    Attributes:
        path: The directory.
        manifest: What manifest.json says.
        capacity: Most tokens in a buffer.
        fingerprint: Hex SHA-256 of the manifest's capacity and fingerprint and the digests of the data files,
            in order.
    """

    def __init__(self, directory: str | Path, *, verify: bool = True, remember: bool = True) -> None:
        self.path = Path(directory)
        self._verify = verify
        if old := interrupted(self.path):
            raise ShardError(
                f"{self.path}: its writer died while it replaced it; what was there is now {old}, and the "
                "next writer to this name puts it back"
            )
        if not self.path.is_dir():
            raise ShardError(f"{self.path}: no such directory")
        self.manifest = unseal(self.path / MANIFEST)
        self.capacity: int = self.manifest["capacity"]
        self._remembered = Remembered(self.manifest["digest"]) if remember else None
        for name, entry in self.manifest["files"].items():
            self._check_size(name, entry["bytes"])
            if name in FOR_DATASETS:
                self._checked(name)
        names = (name for name in self.manifest["files"] if name.startswith("data-"))
        self._names = sorted(names, key=lambda name: (len(name), name))  # data-100000 after data-99999
        self._first = [0]
        for name in self._names:
            self._first.append(self._first[-1] + self.manifest["files"][name]["buffers"])
        self._shards: dict[int, _Shard] = {}
        self.fingerprint = hashlib.sha256(
            canonical_json(
                {
                    **{key: self.manifest[key] for key in ("capacity", "fingerprint")},
                    "data": [self.manifest["files"][name]["sha256"] for name in self._names],
                }
            )
        ).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen, (self.path, self._verify))  # maps are not pickled; a worker opens its own

    @property
    def vocabulary(self) -> int | None:
        """What the ids of the tokenizer that packed it are below; None where it came without."""
        found: int | None = self.manifest["fingerprint"].get("chat", {}).get("vocabulary")
        return found

    @cached_property
    def largest_id(self) -> int:
        """Of all tokens, found by reading them: about a second for 250 million."""
        return max(int(self[number].input_ids.max()) for number in range(len(self)))

    def __len__(self) -> int:
        return self._first[-1]

    def __getitem__(self, i: int) -> PackedBuffer:
        """Buffer `i`.

        Raises:
            IndexError: there are fewer.
            ShardError: its file is damaged.
        """
        if not -len(self) <= i < len(self):
            raise IndexError(f"buffer {i} of {len(self)}")
        i %= len(self)
        number = bisect.bisect_right(self._first, i) - 1
        return self._shard(number)[i - self._first[number]]

    def __iter__(self) -> Iterator[PackedBuffer]:
        return (self[i] for i in range(len(self)))

    @cached_property
    def seq_lengths(self) -> NDArray[np.int32]:
        """int32[examples]: the length of each example, buffer after buffer."""
        return self._column("seq_lengths", np.int32)

    @cached_property
    def example_ids(self) -> NDArray[np.int64]:
        """int64[examples]: the number of each example, buffer after buffer."""
        return self._column("example_ids", np.int64)

    @cached_property
    def examples_per_buffer(self) -> NDArray[np.int32]:
        """int32[buffers]: splits `seq_lengths` and `example_ids` into buffers."""
        batches = (batch for number in range(len(self._names)) for batch in self._shard(number).batches)
        counts = [np.diff(batch.sequences) for batch in batches]
        return np.concatenate([np.zeros(0, np.int32), *counts])

    def place(self, i: int) -> str:
        """Where buffer `i` lies, for messages: file, and number in the whole set."""
        return f"{self.path / self._names[bisect.bisect_right(self._first, i) - 1]}, buffer {i}"

    def examples(self) -> pa.Table:
        """examples.parquet: a row for each example, in ascending order of the column `example`.

        Raises:
            ShardError: missing or damaged.
        """
        if EXAMPLES not in self.manifest["files"]:
            raise ShardError(f"{self.path} was written without {EXAMPLES}")
        return self._examples

    def rejects(self) -> list[dict[str, Any]]:
        """The lines of rejects.jsonl.

        Raises:
            ShardError: missing or damaged.
        """
        data = self._checked(REJECTS).to_pybytes()
        return [json.loads(line) for line in data.splitlines()]

    def part(self, name: str) -> ShardSet:
        """The shard set inside this one, as "eval".

        Raises:
            ShardError: there is none, or it is not the one that was written with this set.
        """
        if name not in self.manifest["parts"]:
            raise ShardError(
                f"{self.path} has no part {name!r}; it has {sorted(self.manifest['parts']) or 'none'}"
            )
        part = ShardSet(self.path / name, verify=self._verify)
        if part.manifest["digest"] != self.manifest["parts"][name]:
            raise ShardError(f"{part.path / MANIFEST} is not the one that was written with {self.path}")
        return part

    def gather(self, places: NDArray[np.integer[Any]]) -> PackedBuffer:
        """A buffer of examples that are packed elsewhere, copied together.

        Args:
            places: int[N], positions in `example_ids` and `seq_lengths`; at least one.

        Raises:
            ShardError: a file is damaged.
        """
        buffers, first_tokens = self._places
        lengths = self.seq_lengths[places]
        pieces = [
            (self[buffer], slice(start, start + length))
            for buffer, start, length in zip(
                buffers[places].tolist(), first_tokens[places].tolist(), lengths.tolist(), strict=True
            )
        ]
        return PackedBuffer(
            input_ids=np.concatenate([buffer.input_ids[tokens] for buffer, tokens in pieces]),
            labels=np.concatenate([buffer.labels[tokens] for buffer, tokens in pieces]),
            seq_lengths=lengths,
            example_ids=self.example_ids[places],
        )

    @cached_property
    def _places(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """int32[examples], int32[examples]: each example's buffer, and its first token therein."""
        first = starts(self.seq_lengths)
        counts = self.examples_per_buffer
        buffers = np.repeat(np.arange(len(self), dtype=np.int32), counts)
        return buffers, (first - np.repeat(first[starts(counts)], counts)).astype(np.int32)

    def example(self, number: int) -> Example:
        """Example `number`, wherever it was packed.

        Raises:
            OptionError: there is none of that number.
            ShardError: its file is damaged.
        """
        order = self._order_of_ids
        at = int(np.searchsorted(self.example_ids, number, sorter=order))
        if at == order.size or self.example_ids[order[at]] != number:
            raise OptionError(f"{self.path} holds no example {number}")
        found = self.gather(order[at : at + 1])
        turn = self.origin(number).get("turn", -1)
        return Example(input_ids=found.input_ids, labels=found.labels, turn=turn)

    def origin(self, number: int) -> dict[str, Any]:
        """The row of examples.parquet for example `number`; empty where there is none."""
        if EXAMPLES not in self.manifest["files"]:
            return {}
        table = self._examples
        at = int(np.searchsorted(table.column("example").to_numpy(), number))
        rows: list[dict[str, Any]] = table.slice(at, 1).to_pylist()
        return rows[0] if rows and rows[0]["example"] == number else {}

    @cached_property
    def _examples(self) -> pa.Table:
        import pyarrow as pa
        import pyarrow.parquet as pq

        return pq.read_table(pa.BufferReader(self._checked(EXAMPLES)))

    @cached_property
    def _order_of_ids(self) -> NDArray[np.int64]:
        return np.argsort(self.example_ids, kind="stable")

    def _column(self, name: str, dtype: type[np.generic]) -> NDArray[Any]:
        batches = (batch for number in range(len(self._names)) for batch in self._shard(number).batches)
        return np.concatenate([np.zeros(0, dtype), *(getattr(batch, name) for batch in batches)])

    def _shard(self, number: int) -> _Shard:
        if number not in self._shards:
            name = self._names[number]
            data = self._checked(name)
            with _page_by_page(data):
                shard = _Shard(_views(self.path / name, data))
            if len(shard) != (expected := self.manifest["files"][name]["buffers"]):
                raise ShardError(
                    f"{self.path / name} holds {len(shard)} buffers, the manifest says {expected}"
                )
            self._shards[number] = shard
        return self._shards[number]

    def _check_size(self, name: str, expected: int) -> None:
        path = self.path / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ShardError(f"{path}: can't read: {error.strerror}; pack again or copy it again") from None
        if size != expected:
            raise ShardError(
                f"{path} is {size} bytes, the manifest says {expected}: cut off? pack again or copy it again"
            )

    def _checked(self, name: str) -> pa.Buffer:
        """A file's bytes, mapped; their digest was checked now or before."""
        import pyarrow as pa

        path = self.path / name
        entry = self.manifest["files"][name]
        self._check_size(name, entry["bytes"])
        if entry["bytes"] == 0:
            return pa.py_buffer(b"")  # an empty file can't be mapped
        try:
            with pa.memory_map(str(path)) as source:
                data = source.read_buffer()  # outlives the file, so 10,000 shards need no 10,000 open files
            key = Remembered.key(path)
        except OSError as error:
            raise ShardError(f"{path}: can't read: {error}") from None
        if self._verify and (self._remembered is None or key not in self._remembered):
            if hashlib.sha256(data).hexdigest() != entry["sha256"]:
                raise ShardError(
                    f"{path} is damaged: its digest is not the manifest's; pack again or copy it again"
                )
            if self._remembered is not None:
                self._remembered.add(key)
        return data


def _reopen(path: Path, verify: bool) -> ShardSet:
    return ShardSet(path, verify=verify)


def open_shards(directory: str | Path, *, verify: bool = True) -> ShardSet:
    """Opens a shard directory for reading.

    Args:
        directory: As given to `ShardWriter`.
        verify: Check each file's digest before its first use. Without, a damaged file can kill the process.

    Raises:
        ShardError: missing, unfinished, damaged, or of another format version.
    """
    return ShardSet(directory, verify=verify)
