"""A directory of packed buffers that is also a Hugging Face dataset: write, read, digest, verify.

    DIR/
      data-00000.arrow …   Arrow streams, one row a buffer: input_ids, labels, seq_lengths, example_ids
      examples.parquet     example number -> where it came from
      rejects.jsonl        the rows that were not packed, and why
      state.json, dataset_info.json     what `datasets.load_from_disk` reads
      manifest.json        versions, capacity, fingerprint, accounts, a digest of every file and of itself
      run.json             times, paths, host: outside the manifest's digests
      eval/                a part: a shard set of its own, its manifest's digest in ours

All files but run.json are the same bytes for the same input. A file's digest is checked once before its
first use; that it was is remembered in the user's cache folder, by device, inode, size and times.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from packing.atomic import AtomicFolder, writing
from packing.boundaries import starts
from packing.buffer import PackedBuffer, check_buffer, unpack
from packing.errors import OptionError, ShardError
from packing.example import IGNORE_INDEX, Example

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT_VERSION = 1
"""Raised when an older reader could not read the directory, or would read it wrongly."""

ENCODING_VERSION = 1
"""Raised when the same input would give other tokens or labels; not with every release."""

MANIFEST, RUN, EXAMPLES, REJECTS = "manifest.json", "run.json", "examples.parquet", "rejects.jsonl"

_COLUMNS = {"input_ids": "int32", "labels": "int32", "seq_lengths": "int32", "example_ids": "int64"}
_BATCH_TOKENS = 2**20  # tokens in an Arrow record batch: 8 MiB of ids and labels held while writing
_EXAMPLES_ROWS = 2**16  # rows in a row group of examples.parquet, however they were added


def _schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema([(name, pa.list_(pa.type_for_alias(dtype))) for name, dtype in _COLUMNS.items()])


# Digests


def canonical_json(value: Mapping[str, Any]) -> bytes:
    """The one way in which a manifest is written; reading compares bytes, so no flipped bit passes."""
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def _sealed(value: Mapping[str, Any]) -> bytes:
    """Canonical bytes of a mapping with the digest of its own canonical bytes added."""
    plain = json.loads(canonical_json(value))  # as a reader will see it: no tuples, no keys but text
    return canonical_json({**plain, "digest": hashlib.sha256(canonical_json(plain)).hexdigest()})


def _unseal(path: Path) -> dict[str, Any]:
    """Reads what `_sealed` wrote.

    Raises:
        ShardError: missing, no JSON, another format version, or not the bytes that were written.
    """
    try:
        data = path.read_bytes()
        value = json.loads(data)
    except FileNotFoundError:
        raise ShardError(f"{path} is missing: not a shard set, or one that was not finished") from None
    except OSError as error:
        raise ShardError(f"{path}: can't read: {error.strerror}") from error
    except ValueError as error:
        raise ShardError(f"{path} is damaged: no JSON ({error}); pack again") from None
    if not isinstance(value, dict):
        raise ShardError(f"{path} is damaged: no JSON object; pack again")
    if path.name == MANIFEST and (version := value.get("format_version")) != FORMAT_VERSION:
        raise ShardError(
            f"{path} is of format version {version}, this padfree reads {FORMAT_VERSION}: "
            "pack again, or use the padfree that wrote it"
        )
    if _sealed({key: item for key, item in value.items() if key != "digest"}) != data:
        raise ShardError(f"{path} is damaged: its bytes do not match its digest; pack again")
    return value


class _DigestFile:
    """A file for pyarrow to write to, hashed on the way: no second read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("xb")
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, data: Any) -> int:
        self._hash.update(data)
        self._file.write(data)
        size = memoryview(data).nbytes
        self._size += size
        return size

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed

    def entry(self) -> dict[str, Any]:
        """What the manifest says of this file."""
        return {"bytes": self._size, "sha256": self._hash.hexdigest()}


# Writing


class PartWriter:
    """Writes the files of one shard set into a folder; `ShardWriter` is the one to use from outside.

    What is written depends on the buffers, rows and mappings given, never on how they were grouped into
    calls.
    """

    def __init__(
        self, folder: Path, *, capacity: int, fingerprint: Mapping[str, Any], buffers_per_shard: int
    ) -> None:
        for name, value in (("capacity", capacity), ("buffers_per_shard", buffers_per_shard)):
            if value < 1:
                raise OptionError(f"{name} {value} can't be: choose 1 or more")
        self._folder = folder
        self._capacity = capacity
        self._fingerprint = dict(fingerprint)
        self._buffers_per_shard = buffers_per_shard
        self._contents = dict.fromkeys(("buffers", "examples", "tokens", "supervised_tokens", "rejects"), 0)
        self._files: dict[str, dict[str, Any]] = {}
        self._parts: dict[str, PartWriter] = {}
        self._pending: list[PackedBuffer] = []
        self._pending_tokens = 0
        self._shard: tuple[_DigestFile, Any] | None = None
        self._shard_buffers = 0
        self._examples: tuple[_DigestFile, Any] | None = None
        self._pending_examples: list[pa.Table] = []
        self._digest: str | None = None
        with writing(folder):
            self._rejects = _DigestFile(folder / REJECTS)

    def write(self, buffer: PackedBuffer) -> None:
        """Adds a buffer.

        Raises:
            ValueError: it is empty, or breaks a law of `check_buffer`.
            OutputError: the disk refuses.
        """
        if len(buffer) == 0:
            raise ValueError("a buffer holds at least one token")
        check_buffer(buffer, capacity=self._capacity)
        if self._shard_buffers == self._buffers_per_shard:
            self._close_shard()
        self._pending.append(buffer)
        self._shard_buffers += 1
        self._contents["buffers"] += 1
        self._contents["examples"] += buffer.seq_lengths.size
        self._contents["tokens"] += len(buffer)
        self._contents["supervised_tokens"] += int(np.count_nonzero(buffer.labels != IGNORE_INDEX))
        self._pending_tokens += len(buffer)
        if self._pending_tokens >= _BATCH_TOKENS:
            self._write_batch()

    def add_examples(self, table: pa.Table) -> None:
        """Adds rows that say where examples came from.

        Args:
            table: Has a column `example` (int64, ascending over all calls), maybe `turn`, and any others;
                the same columns in each call.

        Raises:
            OutputError: the disk refuses.
        """
        self._pending_examples.append(table)
        while sum(map(len, self._pending_examples)) >= _EXAMPLES_ROWS:
            self._write_examples()

    def add_rejects(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Adds lines to rejects.jsonl.

        Raises:
            OutputError: the disk refuses.
        """
        with writing(self._rejects.path):
            for row in rows:
                self._rejects.write(json.dumps(row, allow_nan=False).encode() + b"\n")
                self._contents["rejects"] += 1

    def part(self, name: str) -> PartWriter:
        """A writer for a shard set inside this one, as DIR/eval; finish it first."""
        folder = self._folder / name
        with writing(folder):
            folder.mkdir()
        self._parts[name] = PartWriter(
            folder,
            capacity=self._capacity,
            fingerprint={**self._fingerprint, "part": name},
            buffers_per_shard=self._buffers_per_shard,
        )
        return self._parts[name]

    def finish(self, accounting: Mapping[str, Any], *, run: Mapping[str, Any] | None = None) -> None:
        """Closes all files and writes the manifest.

        Args:
            accounting: What became of every row and token; goes into the manifest.
            run: Times, paths, workers, host: all that differs between equal runs; goes to run.json.

        Raises:
            OutputError: the disk refuses.
        """
        if open_parts := [name for name, part in self._parts.items() if part._digest is None]:
            raise RuntimeError(f"finish the part {open_parts[0]!r} first")
        with writing(self._folder):
            if self._shard_buffers or not self._contents["buffers"]:
                self._close_shard()
            if self._pending_examples:
                self._write_examples()
            if self._examples:
                file, writer = self._examples
                writer.close()
                self._close(file)
            self._close(self._rejects)
            self._write_hugging_face()
            manifest = _sealed(
                {
                    "format_version": FORMAT_VERSION,
                    "encoding_version": ENCODING_VERSION,
                    "capacity": self._capacity,
                    "fingerprint": self._fingerprint,
                    "contents": self._contents,
                    "accounting": dict(accounting),
                    "files": self._files,
                    "parts": {name: part._digest for name, part in self._parts.items()},
                }
            )
            if run is not None:
                (self._folder / RUN).write_bytes(_sealed(run))
            (self._folder / MANIFEST).write_bytes(manifest)
        self._digest = json.loads(manifest)["digest"]

    def _write_batch(self) -> None:
        """Writes the pending buffers as one record batch, into a new file where none is open."""
        import pyarrow as pa

        schema = _schema()
        with writing(self._folder):
            if self._shard is None:
                number = sum(name.startswith("data-") for name in self._files)
                file = _DigestFile(self._folder / f"data-{number:05d}.arrow")
                self._shard = (file, pa.ipc.new_stream(pa.PythonFile(file, mode="w"), schema))
            columns = []
            for name, dtype in _COLUMNS.items():
                rows = [getattr(buffer, name) for buffer in self._pending]
                offsets = np.zeros(len(rows) + 1, np.int32)
                np.cumsum([row.size for row in rows], out=offsets[1:])
                values = np.concatenate(rows) if rows else np.zeros(0)
                columns.append(pa.ListArray.from_arrays(offsets, pa.array(values.astype(dtype, copy=False))))
            self._shard[1].write_batch(pa.record_batch(columns, schema=schema))
        self._pending.clear()
        self._pending_tokens = 0

    def _close_shard(self) -> None:
        if self._pending or self._shard is None:
            self._write_batch()
        assert self._shard is not None
        file, writer = self._shard
        with writing(file.path):
            writer.close()
            self._close(file, buffers=self._shard_buffers)
        self._shard = None
        self._shard_buffers = 0

    def _write_examples(self) -> None:
        """Writes one row group: whole, but for the last."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.concat_tables(self._pending_examples)
        group = table.slice(0, _EXAMPLES_ROWS).combine_chunks()
        self._pending_examples = [table.slice(_EXAMPLES_ROWS)] if len(table) > _EXAMPLES_ROWS else []
        with writing(self._folder):
            if self._examples is None:
                file = _DigestFile(self._folder / EXAMPLES)
                writer = pq.ParquetWriter(pa.PythonFile(file, mode="w"), table.schema, compression="zstd")
                self._examples = (file, writer)
            self._examples[1].write_table(group, row_group_size=_EXAMPLES_ROWS)

    def _write_hugging_face(self) -> None:
        """What `datasets.load_from_disk` needs beside the Arrow streams (tried with datasets 5.2)."""
        features = {
            name: {"_type": "List", "feature": {"_type": "Value", "dtype": dtype}}
            for name, dtype in _COLUMNS.items()
        }
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in self._files if name.startswith("data-")],
            "_fingerprint": hashlib.sha256(canonical_json(self._files)).hexdigest()[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        for name, value in (("dataset_info.json", {"features": features}), ("state.json", state)):
            file = _DigestFile(self._folder / name)
            file.write(canonical_json(value))
            self._close(file)

    def _abandon(self) -> None:
        """Closes what is open, so that the folder can go."""
        for part in self._parts.values():
            part._abandon()
        for file in (self._rejects, *(opened[0] for opened in (self._shard, self._examples) if opened)):
            with suppress(OSError):  # what a full disk did not take is not wanted any more
                file.close()

    def _close(self, file: _DigestFile, **more: int) -> None:
        file.close()
        self._files[file.path.name] = {**file.entry(), **more}


class ShardWriter(PartWriter):
    """Writes a shard set beside its name and renames it when whole.

        with ShardWriter("packed", capacity=8192, fingerprint={…}) as writer:
            writer.write(buffer)
            writer.finish({"rows_in": 1, …}, run={"seconds": 0.1})

    Leaving the block without `finish` removes all of it.

    Args:
        out: The directory that is to appear.
        capacity: Most tokens in a buffer.
        fingerprint: Identity of tokenizer, template, options and inputs; goes into the manifest.
        buffers_per_shard: Buffers in a data file; 4,096 of 8,192 tokens are 0.25 GiB.
        force: Replace a shard set that is there; it is kept until the new one is whole.

    Raises:
        OutputError: the output exists, another process is writing it, or the system refuses.
        OptionError: a capacity or a shard size below 1.
    """

    def __init__(
        self,
        out: str | Path,
        *,
        capacity: int,
        fingerprint: Mapping[str, Any],
        buffers_per_shard: int = 4096,
        force: bool = False,
    ) -> None:
        self._target = AtomicFolder(
            out, force=force, may_replace=lambda folder: (folder / MANIFEST).is_file()
        )
        try:
            super().__init__(
                self._target.path,
                capacity=capacity,
                fingerprint=fingerprint,
                buffers_per_shard=buffers_per_shard,
            )
        except BaseException:
            self._target.discard()
            raise

    def finish(self, accounting: Mapping[str, Any], *, run: Mapping[str, Any] | None = None) -> None:
        """As `PartWriter.finish`, then puts the directory in its place."""
        super().finish(accounting, run=run)
        self._target.publish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abandon()
        self._target.discard()


# Reading


class _Remembered:
    """Files whose digests were checked before: in this process, and in the user's cache folder.

    Keyed by device, inode, size and both times: what a copy, an edit or a restored backup changes.
    """

    def __init__(self, manifest_digest: str) -> None:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        self._path = Path(cache) / "padfree" / "verified" / manifest_digest
        self._keys: set[bytes] = set()
        with suppress(OSError):  # none yet, or no readable home: then each process checks for itself
            self._keys.update(self._path.read_bytes().splitlines())

    @staticmethod
    def key(path: Path) -> bytes:
        stat = path.stat()
        parts = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        return f"{path.name} {' '.join(map(str, parts))}".encode()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, key: bytes) -> None:
        self._keys.add(key)
        with suppress(OSError):  # a read-only home costs other processes a second check, no more
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(key + b"\n")


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
            if stream.schema != _schema():
                raise ShardError(f"{path}: not the columns of a shard: {stream.schema}")
            for number, batch in enumerate(stream):
                batch.validate(full=True)
                ids, labels, lengths, numbers = batch.columns
                if not (ids.offsets.equals(labels.offsets) and lengths.offsets.equals(numbers.offsets)):
                    raise ShardError(f"{path}, record batch {number}: columns of different lengths")
                batches.append(
                    _Rows(
                        *(array.to_numpy() for array in (ids.offsets, ids.values, labels.values)),
                        *(array.to_numpy() for array in (lengths.offsets, lengths.values, numbers.values)),
                    )
                )
    except pa.ArrowException as error:
        raise ShardError(f"{path} is damaged: {error}") from None
    return batches


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

    Opening reads the manifest and looks at each file's size. A data file is mapped, and its digest checked
    unless it was before, when its first buffer is asked for.

    Attributes:
        path: The directory.
        manifest: What manifest.json says.
        capacity: Most tokens in a buffer.
        fingerprint: Hex digest of what decides the buffers: fingerprint, versions, capacity, data files.
    """

    def __init__(self, directory: str | Path, *, verify: bool = True, remember: bool = True) -> None:
        self.path = Path(directory)
        self._verify = verify
        if not self.path.is_dir():
            raise ShardError(f"{self.path}: no such directory")
        self.manifest = _unseal(self.path / MANIFEST)
        self.capacity: int = self.manifest["capacity"]
        self._remembered = _Remembered(self.manifest["digest"]) if remember else None
        for name, entry in self.manifest["files"].items():
            self._check_size(name, entry["bytes"])
        names = (name for name in self.manifest["files"] if name.startswith("data-"))
        self._names = sorted(names, key=lambda name: (len(name), name))  # data-100000 after data-99999
        self._first = [0]
        for name in self._names:
            self._first.append(self._first[-1] + self.manifest["files"][name]["buffers"])
        self._shards: dict[int, _Shard] = {}
        self.fingerprint = hashlib.sha256(
            canonical_json(
                {
                    **{key: self.manifest[key] for key in ("encoding_version", "capacity", "fingerprint")},
                    "data": [self.manifest["files"][name]["sha256"] for name in self._names],
                }
            )
        ).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen, (self.path, self._verify))  # maps are not pickled; a worker opens its own

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
        ends = np.cumsum(self.examples_per_buffer)
        buffer = int(np.searchsorted(ends, order[at], side="right"))
        found = unpack(self[buffer])[int(order[at] - ends[buffer])]  # counted from the buffer's end
        return replace(found, turn=self.origin(number).get("turn", -1))

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
            shard = _Shard(_views(self.path / name, self._checked(name)))
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
            key = _Remembered.key(path)
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


def verify(directory: str | Path) -> None:
    """Checks everything, whatever was checked before: digests, structure, each buffer's laws, the counts.

    Raises:
        ShardError: the first fault, with file and place.
    """
    shards = ShardSet(directory, remember=False)
    for name in shards.manifest["files"]:
        shards._checked(name)
    if (shards.path / RUN).exists():
        _unseal(shards.path / RUN)
    contents = dict.fromkeys(shards.manifest["contents"], 0)
    contents["rejects"] = len(shards.rejects())
    for i, buffer in enumerate(shards):
        try:
            check_buffer(buffer, capacity=shards.capacity)
        except ValueError as error:
            raise ShardError(f"{shards.place(i)}: {error}") from None
        contents["buffers"] += 1
        contents["examples"] += buffer.seq_lengths.size
        contents["tokens"] += len(buffer)
        contents["supervised_tokens"] += int(np.count_nonzero(buffer.labels != IGNORE_INDEX))
    for name, count in contents.items():
        if count != (expected := shards.manifest["contents"][name]):
            raise ShardError(f"{shards.path} holds {count} {name}, {MANIFEST} says {expected}")
    ids = np.sort(shards.example_ids)
    if (twice := np.flatnonzero(ids[1:] == ids[:-1])).size:
        raise ShardError(f"{shards.path} holds example {ids[twice[0]]} more than once")
    if EXAMPLES in shards.manifest["files"]:
        listed = shards.examples().column("example").to_numpy()
        if not np.array_equal(ids, listed):
            raise ShardError(
                f"{shards.path / EXAMPLES} does not list the examples of the buffers, in their order"
            )
    for name in shards.manifest["parts"]:
        verify(shards.part(name).path)
