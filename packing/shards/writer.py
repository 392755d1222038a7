"""Writes a shard set: whole or not at all, hashed on the way."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from packing.arrow import column
from packing.atomic import AtomicFolder, check_target, writing
from packing.buffer import PackedBuffer, check_buffer
from packing.errors import OptionError, OutputError
from packing.shards.manifest import (
    COLUMNS,
    EXAMPLES,
    FORMAT_VERSION,
    MANIFEST,
    REJECTS,
    RUN,
    buffer_schema,
    canonical_json,
    count,
    no_contents,
    sealed,
)

if TYPE_CHECKING:
    import pyarrow as pa

Fingerprint = Mapping[str, Any] | Callable[[], Mapping[str, Any]]

_BATCH_TOKENS = 2**20  # tokens in an Arrow record batch: 8 MiB of ids and labels, held twice while writing
_EXAMPLES_ROWS = 2**16  # rows in a row group of examples.parquet, however they were added


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


class PartWriter:
    """Writes the files of one shard set into a folder; `ShardWriter` is the one to use from outside.

    What is written depends on the buffers, rows and mappings given, never on how they were grouped into
    calls.
    """

    def __init__(
        self, folder: Path, *, capacity: int, fingerprint: Fingerprint, buffers_per_shard: int
    ) -> None:
        for name, value in (("capacity", capacity), ("buffers_per_shard", buffers_per_shard)):
            if value < 1:
                raise OptionError(f"{name} {value} can't be: choose 1 or more")
        self._folder = folder
        self._capacity = capacity
        self._fingerprint = fingerprint
        self._buffers_per_shard = buffers_per_shard
        self._contents = no_contents()
        self._files: dict[str, dict[str, Any]] = {}
        self._parts: dict[str, PartWriter] = {}
        self._pending: list[PackedBuffer] = []
        self._pending_tokens = 0
        self._shard: tuple[_DigestFile, Any] | None = None
        self._shard_buffers = 0
        self._thread = ThreadPoolExecutor(1)  # starts with the first batch
        self._on_its_way: Future[None] | None = None
        self._examples: tuple[_DigestFile, Any] | None = None
        self._pending_examples: list[pa.Table] = []
        self._digest: str | None = None
        self._over = ""  # why nothing can be added any more
        with writing(folder):
            self._rejects = _DigestFile(folder / REJECTS)

    def write(self, buffer: PackedBuffer) -> None:
        """Adds a buffer.

        Raises:
            ValueError: it is empty, or breaks a law of `check_buffer`.
            RuntimeError: the set was finished before, or its block left; so say all that add to it.
            OutputError: the disk refuses.
        """
        self._check_open()
        if len(buffer) == 0:
            raise ValueError("a buffer holds at least one token")
        check_buffer(buffer, capacity=self._capacity)
        if self._shard_buffers == self._buffers_per_shard:
            self._close_shard()
        self._pending.append(buffer)
        self._shard_buffers += 1
        count(self._contents, buffer)
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
        self._check_open()
        self._pending_examples.append(table)
        while sum(map(len, self._pending_examples)) >= _EXAMPLES_ROWS:
            self._write_examples()

    def add_rejects(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Adds lines to rejects.jsonl.

        Raises:
            OutputError: the disk refuses.
        """
        self._check_open()
        with writing(self._rejects.path):
            for row in rows:
                self._rejects.write(json.dumps(row, allow_nan=False).encode() + b"\n")
                self._contents["rejects"] += 1

    def part(self, name: str) -> PartWriter:
        """A writer for a shard set inside this one, as DIR/eval; finish it first."""
        self._check_open()
        folder = self._folder / name
        with writing(folder):
            folder.mkdir()
        self._parts[name] = PartWriter(
            folder,
            capacity=self._capacity,
            fingerprint={**self._known_fingerprint(), "part": name},
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
        self._check_open()
        if open_parts := [name for name, part in self._parts.items() if part._digest is None]:
            raise RuntimeError(f"finish the part {open_parts[0]!r} first")
        self._over = "failed to finish"
        with writing(self._folder):
            if self._shard_buffers or not self._contents["buffers"]:
                self._close_shard()
            self._thread.shutdown()
            if self._pending_examples:
                self._write_examples()
            if self._examples:
                file, writer = self._examples
                writer.close()
                self._close(file)
            self._close(self._rejects)
            self._write_hugging_face()
            manifest = sealed(
                {
                    "format_version": FORMAT_VERSION,
                    "capacity": self._capacity,
                    "fingerprint": self._known_fingerprint(),
                    "contents": self._contents,
                    "accounting": dict(accounting),
                    "files": self._files,
                    "parts": {name: part._digest for name, part in self._parts.items()},
                }
            )
            if run is not None:
                (self._folder / RUN).write_bytes(sealed(run))
            (self._folder / MANIFEST).write_bytes(manifest)
        self._digest = json.loads(manifest)["digest"]
        self._over = "was finished"

    def _check_open(self) -> None:
        if self._over:
            raise RuntimeError(
                f"this shard set {self._over}, so nothing can be added: write all of it before `finish`, in "
                "the block of its ShardWriter"
            )

    def _known_fingerprint(self) -> dict[str, Any]:
        return dict(self._fingerprint() if callable(self._fingerprint) else self._fingerprint)

    def _write_batch(self) -> None:
        """Writes the pending buffers as one record batch, into a new file where none is open.

        A thread hashes and writes it, two thirds of all the work here, while the next buffers are gathered.
        """
        import pyarrow as pa

        schema = buffer_schema()
        with writing(self._folder):
            if self._shard is None:
                number = sum(name.startswith("data-") for name in self._files)
                file = _DigestFile(self._folder / f"data-{number:05d}.arrow")
                self._shard = (file, pa.ipc.new_stream(pa.PythonFile(file, mode="w"), schema))
            columns = []
            for name, dtype in COLUMNS.items():
                rows = [getattr(buffer, name) for buffer in self._pending]
                offsets = np.zeros(len(rows) + 1, np.int32)
                np.cumsum([row.size for row in rows], out=offsets[1:])
                values = np.concatenate(rows) if rows else np.zeros(0)
                values = column(values.astype(dtype, copy=False))
                columns.append(pa.ListArray.from_arrays(column(offsets), values))
            self._wait()
            batch = pa.record_batch(columns, schema=schema)
            try:
                self._on_its_way = self._thread.submit(self._shard[1].write_batch, batch)
            except RuntimeError as error:  # the batch is queued all the same
                self._thread.shutdown(wait=False, cancel_futures=True)
                raise OutputError(
                    f"{self._folder}: the thread that writes does not start ({error}): allow more of them"
                ) from error
        self._pending.clear()
        self._pending_tokens = 0

    def _wait(self) -> None:
        """Until the batch on its way is written; what went wrong with it is raised here."""
        if self._on_its_way:
            self._on_its_way.result()

    def _close_shard(self) -> None:
        if self._pending or self._shard is None:
            self._write_batch()
        assert self._shard is not None
        file, writer = self._shard
        with writing(file.path):
            self._wait()
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
            for name, dtype in COLUMNS.items()
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
        self._over = self._over or "was left"
        for part in self._parts.values():
            part._abandon()
        self._thread.shutdown()
        for file in (self._rejects, *(opened[0] for opened in (self._shard, self._examples) if opened)):
            with suppress(OSError):  # what a full disk did not take is not wanted any more
                file.close()

    def _close(self, file: _DigestFile, **more: int) -> None:
        file.close()
        self._files[file.path.name] = {**file.entry(), **more}


def _is_shard_set(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def check_out(out: str | Path, *, force: bool) -> None:
    """Refuses, before there is anything to write, what `ShardWriter` would refuse to replace.

    Raises:
        OutputError: the output exists.
    """
    check_target(Path(os.path.realpath(out)), force=force, may_replace=_is_shard_set)


class ShardWriter(PartWriter):
    """Writes a shard set beside its name and renames it when whole.

        with ShardWriter("packed", capacity=8192, fingerprint={…}) as writer:
            writer.write(buffer)
            writer.finish({"rows_in": 1, …}, run={"seconds": 0.1})

    Leaving the block without `finish` removes all of it.

    Args:
        out: The directory that is to appear.
        capacity: Most tokens in a buffer.
        fingerprint: Identity of tokenizer, template, options and inputs; goes into the manifest. A function
            is asked for it when it is needed, by `part` and `finish`: by then the inputs were read.
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
        fingerprint: Fingerprint,
        buffers_per_shard: int = 4096,
        force: bool = False,
    ) -> None:
        self._target = AtomicFolder(out, force=force, may_replace=_is_shard_set)
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
        try:
            self._abandon()
        finally:  # also where a second Ctrl-C comes while the thread still writes
            self._target.discard()
