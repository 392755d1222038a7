"""Inputs: what a user names, found out for what it really is, and handed out in chunks of raw records.

    "data/*.jsonl.gz" -> [Source, ...] -> Chunk, Chunk, ... (`chunks.py` says how they parse)

A file is known by its content, and its name must not say otherwise. One that can't be read is an
`InputError`, which stops the run before anything is written. What is in a record is `formats.py`'s concern.
"""

from __future__ import annotations

import glob
import hashlib
import io
import logging
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from packing.chunks import (
    CHUNK_BYTES,
    Damaged,
    arrow_chunks,
    csv_chunks,
    cut_lines,
    cut_values,
    json_chunks,
)
from packing.chunks import Chunk as Chunk
from packing.errors import InputError, OptionError, RowRejected
from packing.example import Note
from packing.strict_json import BOM, loads

if TYPE_CHECKING:
    import pyarrow as pa

Identity = Mapping[str, str | None]

BLOCK = 1 << 18
"""Bytes read at a time; what a block holds before damage in it is not seen."""

BOMB_BYTES, BOMB_RATIO = 1 << 30, 1000
"""Past so many bytes, a file that grew by more than this factor is taken for a decompression bomb.

Chat text shrinks 3 to 10 times; 1,032 times is the most that gzip can.
"""

SKIPPABLE = [bytes([number]) + b"\x2a\x4d\x18" for number in range(0x50, 0x60)]
CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", **dict.fromkeys(SKIPPABLE, "zstd")}
CODEC_SUFFIXES = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd"}
LINES_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines")
DATA_SUFFIXES = (*LINES_SUFFIXES, ".json", ".csv", ".tsv", ".parquet", ".arrow")

REFUSED = {
    b"version https://git-lfs": "is a Git LFS pointer, not the data: run `git lfs pull`",
    b"/annex/objects/": "is a git-annex pointer, not the data: run `git annex get`",
    b"BZh": "is compressed by bzip2, which is not read here: compress it as .gz or .zst",
    b"\xfd7zXZ\x00": "is compressed by xz, which is not read here: compress it as .gz or .zst",
    b"\x04\x22\x4d\x18": "is compressed by lz4, which is not read here: compress it as .gz or .zst",
    b"PK\x03\x04": "is a zip archive: unpack it",
    b"7z\xbc\xaf\x27\x1c": "is a 7z archive: unpack it",
    b"\xff\xfe": "is UTF-16, not UTF-8: convert it with `iconv -f UTF-16 -t UTF-8`",
    b"\xfe\xff": "is UTF-16, not UTF-8: convert it with `iconv -f UTF-16 -t UTF-8`",
    b"SQLite format 3": "is an SQLite data base: export its table as JSON lines",
    b"FEA1": "is a Feather file of version 1: write it as Parquet",
    b"<!DOCTYPE": "is a web page, not the data: download the file itself",
    b"<html": "is a web page, not the data: download the file itself",
}
"""What else begins with these bytes, and what to do about it."""

ARROW_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Which part of a hub data set or of a `save_to_disk` folder.

    Attributes:
        split: Its split; needed only where there are several.
        config: The hub data set's configuration.
        revision: The hub data set's branch, tag or commit.
    """

    split: str | None = None
    config: str | None = None
    revision: str | None = None


class Source(ABC):
    """One input: a file, a `save_to_disk` folder, a hub data set.

    Attributes:
        name: What the user called it, without where it lies: the same in another folder.
        number: Its place among the inputs, from 0.
    """

    def __init__(self, place: str, *, name: str, number: int) -> None:
        self.place = place
        self.name = name
        self.number = number

    @abstractmethod
    def identity(self) -> Identity:
        """What makes it this input, for the fingerprint: its name and its content."""

    @property
    @abstractmethod
    def size(self) -> int:
        """About how many bytes there are to read."""

    @abstractmethod
    def chunks(self, *, rows: int) -> Iterator[Chunk]:
        """All records in order, at most `rows` a chunk; the cuts depend on the input alone.

        Raises:
            InputError: it is damaged or cut off; says how many records came before that.
        """

    def _counted(self, pieces: Iterator[T], *, records: Callable[[T], int]) -> Iterator[T]:
        """The pieces; what goes wrong in them becomes an `InputError` that counts the records so far."""
        count = 0
        with _named(self.place, suffix=lambda: f" (after reading {count:,} records)"):
            for piece in pieces:
                yield piece
                count += records(piece)


@contextmanager
def _named(place: str, *more: type[Exception], suffix: Callable[[], str] = str) -> Iterator[None]:
    """Turns what goes wrong with an input, and `more`, into an `InputError` of one line with its name."""
    import pyarrow as pa

    try:
        yield
    except (Damaged, OSError, UnicodeDecodeError, pa.ArrowException, *more) as error:
        raise InputError(f"{place}: {' '.join(str(error).split())[:300]}{suffix()}") from None


class FileSource(Source):
    """A file on disk.

    Raises:
        InputError: it is empty, of no known kind, or not what its name says.
    """

    def __init__(self, place: str, *, name: str, number: int) -> None:
        super().__init__(place, name=name, number=number)
        self._codec: str | None = None
        self._bom = False
        self._sha256: str | None = None
        with _named(place):
            self._kind = self._look()

    def identity(self) -> Identity:
        """As `Source.identity`. Text that was read to its end was hashed on the way, else the file is."""
        if self._sha256 is None:
            with _named(self.place):
                self._sha256 = _sha256(self.place)
        return {"kind": "file", "name": self.name, "sha256": self._sha256}

    @property
    def size(self) -> int:
        return os.path.getsize(self.place)

    def chunks(self, *, rows: int) -> Iterator[Chunk]:
        notes = {Note.BYTE_ORDER_MARK: 1} if self._bom else {}
        where = {"source": self.number, "rows": rows}
        if self._kind in ("parquet", "arrow"):
            batches = (
                _parquet_batches(self.place, rows) if self._kind == "parquet" else _arrow_batches(self.place)
            )
            return self._counted(arrow_chunks(batches, **where), records=len)
        if self._kind == "values":
            pieces = self._counted(cut_values(self._blocks()), records=_one_if_filled)
            return json_chunks(pieces, lines=False, notes=notes, **where)
        lines = self._counted(cut_lines(self._blocks()), records=_one_if_filled)
        if self._kind == "lines":
            return json_chunks(lines, lines=True, notes=notes, **where)
        delimiter = "\t" if self._kind == "tsv" else ","
        return self._counted(csv_chunks(lines, delimiter=delimiter, notes=notes, **where), records=len)

    def _look(self) -> str:
        """The kind of file: lines, values, csv, tsv, parquet or arrow. Notes codec and byte order mark."""
        with open(self.place, "rb") as file:
            head = file.read(512)
        if not head:
            raise Damaged("is empty (0 bytes): leave it out, or get it again")
        _refuse(head)
        self._codec = next((codec for magic, codec in CODECS.items() if head.startswith(magic)), None)
        stem, suffix = os.path.splitext(self.place.lower())
        if suffix in CODEC_SUFFIXES:
            if self._codec != CODEC_SUFFIXES[suffix]:
                raise Damaged(
                    f"is named {suffix}, but is not {CODEC_SUFFIXES[suffix]}: it begins with {head[:12]!r}"
                )
            suffix = os.path.splitext(stem)[1]
        for kind, magics in (("parquet", (b"PAR1",)), ("arrow", (b"ARROW1", b"\xff\xff\xff\xff"))):
            if head.startswith(magics):
                return kind
            if suffix == f".{kind}":
                raise Damaged(f"is named {suffix}, but begins with {head[:12]!r}: damaged, or another kind")
        return self._look_at_text(suffix)

    def _look_at_text(self, suffix: str) -> str:
        text = b""
        try:
            for block in self._blocks():
                _refuse(text := (text + block).lstrip())
                if b"\n" in text[-len(block) :] or len(text) > CHUNK_BYTES:
                    break
        except OSError as error:  # a cut archive, which `chunks` meets again and counts the records before
            if not text:
                raise Damaged(f"{error} (after reading 0 records)") from None
        first_line = text.partition(b"\n")[0]
        if suffix in (".csv", ".tsv"):
            return suffix[1:]
        if text.startswith(b"["):
            return "values"
        if suffix in LINES_SUFFIXES:
            return "lines"
        if text.startswith(b"{"):
            return "lines" if _is_json(first_line) else "values"
        raise Damaged(f"is no JSON, CSV, Parquet or Arrow: it begins with {first_line[:24]!r}")

    def _blocks(self) -> Iterator[bytes]:
        """The file's bytes, decompressed, without a byte order mark: 512 of them, then `BLOCK` at once."""
        import pyarrow as pa

        with _Hashed(self.place) as file:
            stream: Any = file
            if self._codec:
                stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), self._codec)
            size = 0
            while block := stream.read(BLOCK if size else 512):
                if size == 0 and block.startswith(BOM):
                    self._bom = True
                    block = block.removeprefix(BOM)
                size += len(block)
                if self._codec and size > BOMB_BYTES and size > BOMB_RATIO * file.tell():
                    raise Damaged(
                        f"a decompression bomb? {file.tell():,} bytes became {size:,}: "
                        "decompress it yourself, if it is meant"
                    )
                if block:
                    yield block
            while file.read(BLOCK):  # behind what is compressed
                pass
            self._sha256 = file.sha256.hexdigest()


class _Hashed(io.FileIO):
    """A file that is hashed as it is read: the fingerprint costs no second pass over the bytes."""

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.sha256 = hashlib.sha256()

    def read(self, size: int | None = -1) -> bytes:
        block = super().read(size)
        self.sha256.update(block)
        return block


def _refuse(head: bytes) -> None:
    for magic, reason in REFUSED.items():
        if head.startswith(magic):
            raise Damaged(reason)
    if head[257:262] == b"ustar":
        raise Damaged("is a tar archive: unpack it")


def _is_json(text: bytes) -> bool:
    try:
        loads(text)
    except RowRejected:
        return False
    return True


def _one_if_filled(piece: tuple[int, bytes]) -> int:
    return 1 if piece[1].strip() else 0


def _parquet_batches(place: str, rows: int) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(place) as file:
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        size = sum(group.total_byte_size for group in groups)
        yield from file.iter_batches(batch_size=_bounded(rows, size=size, of=file.metadata.num_rows))


def _bounded(rows: int, *, size: int, of: int) -> int:
    """At most `rows`, and about `CHUNK_BYTES` of them, where all `of` rows take `size` bytes."""
    return max(1, min(rows, CHUNK_BYTES * of // max(size, 1)))


def _arrow_batches(place: str) -> Iterator[pa.RecordBatch]:
    """The batches of an Arrow file, or of an Arrow stream that has its end mark."""
    import pyarrow as pa

    with pa.memory_map(place) as file:
        if file.read(6) == b"ARROW1":
            with pa.ipc.open_file(file) as reader:
                yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
            return
        _check_end(place)
        file.seek(0)
        with pa.ipc.open_stream(file) as reader:
            yield from reader


def _check_end(place: str) -> None:
    """An Arrow stream that was cut between two batches reads like a whole one, but for its end mark."""
    with open(place, "rb") as file:
        file.seek(max(0, os.path.getsize(place) - len(ARROW_END)))
        if file.read() != ARROW_END:
            raise Damaged(f"cut off: the Arrow stream {os.path.basename(place)} has no end mark")


def _sha256(place: str) -> str:
    with open(place, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class DatasetSource(Source):
    """A `datasets.Dataset`, from a `save_to_disk` folder or from the hub."""

    def __init__(self, place: str, dataset: Any, *, name: str, number: int, identity: Identity) -> None:
        super().__init__(place, name=name, number=number)
        self._dataset = dataset.with_format("arrow")
        self._identity = identity

    def identity(self) -> Identity:
        return self._identity

    @property
    def size(self) -> int:
        return int(self._dataset.data.nbytes)

    def chunks(self, *, rows: int) -> Iterator[Chunk]:
        return self._counted(arrow_chunks(self._batches(rows), source=self.number, rows=rows), records=len)

    def _batches(self, rows: int) -> Iterator[pa.RecordBatch]:
        rows = _bounded(rows, size=self._dataset.data.nbytes, of=self._dataset.data.num_rows)
        for at in range(0, len(self._dataset), rows):
            yield from self._dataset[at : at + rows].combine_chunks().to_batches()


def _open_folder(place: str, *, name: str, number: int, options: SourceOptions) -> DatasetSource:
    """What `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    from datasets import DatasetDict, load_from_disk

    if options.config or options.revision:
        raise OptionError(f"{place} is a folder; a configuration or revision is of a hub data set")
    damages = (AttributeError, KeyError, TypeError, ValueError)  # what nonsense in state.json leads to
    with _named(place, *damages):
        dataset, folder, split = load_from_disk(place), place, options.split
        if isinstance(dataset, DatasetDict):
            split = _split(list(dataset), options.split)
            dataset, folder = dataset[split], os.path.join(place, split)
        elif split not in (None, str(dataset.split)):
            raise Damaged(f"has no splits, so no {split!r}")
        digest = hashlib.sha256()
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), "*"))):
            if path.endswith(".arrow"):
                _check_end(path)
            digest.update(f"{os.path.basename(path)} {_sha256(path)}\n".encode())
    identity = {"kind": "dataset", "name": name, "split": split, "sha256": digest.hexdigest()}
    return DatasetSource(place, dataset, name=name, number=number, identity=identity)


def _open_hub(place: str, *, number: int, options: SourceOptions) -> DatasetSource:
    """A data set of the hub, downloaded by `datasets` at the commit that goes into its identity."""
    import datasets

    unreadable = (datasets.exceptions.DatasetsError, RuntimeError, ValueError)
    with _named(f"{place}: no file or folder, nor a data set on the hub that can be read", *unreadable):
        config, revision = options.config, options.revision
        commit = datasets.load_dataset_builder(place, config, revision=revision).hash
        split = options.split
        if split is None:
            split = _split(datasets.get_dataset_split_names(place, config, revision=commit), None)
        dataset = datasets.load_dataset(place, config, split=split, revision=commit)
    identity = {"kind": "hub", "name": place, "config": config, "split": split, "commit": commit}
    return DatasetSource(place, dataset, name=place, number=number, identity=identity)


def _split(splits: Sequence[str], wanted: str | None) -> str:
    if wanted is None and len(splits) == 1:
        return splits[0]
    if wanted is None or wanted not in splits:
        raise Damaged(f"has the splits {', '.join(splits)}: choose one with --split")
    return wanted


def open_sources(inputs: Sequence[str], *, options: SourceOptions) -> list[Source]:
    """The sources that files, folders, globs and hub names stand for, in the order given.

    Folders and globs are expanded in sorted order. A folder's files of other kinds are passed over, with
    a warning.

    Raises:
        InputError: nothing by that name, an input given twice, or one that can't be read.
        OptionError: a split, configuration or revision that no input has.
    """
    places = [place for given in inputs for place in _expanded(given)]
    for place, count in Counter(map(os.path.abspath, places)).items():
        if count > 1:
            raise InputError(f"{place} is given {count} times")
        if not _is_utf8(place):
            raise InputError(f"{place!r}: a name that is not UTF-8, which a manifest can't hold: rename it")
    if (options.split or options.config or options.revision) and all(map(os.path.isfile, places)):
        raise OptionError("a split, configuration or revision is of a hub data set or a save_to_disk folder")
    sources: list[Source] = []
    for number, (place, name) in enumerate(zip(places, _names(places), strict=True)):
        if os.path.isfile(place):
            sources.append(FileSource(place, name=name, number=number))
        elif os.path.isdir(place):
            sources.append(_open_folder(place, name=name, number=number, options=options))
        else:
            sources.append(_open_hub(place, number=number, options=options))
    return sources


def _expanded(given: str) -> list[str]:
    """The files, `save_to_disk` folders and hub names that one argument stands for."""
    if os.path.isfile(given):
        return [given]
    if os.path.isdir(given):
        return _in_folder(given)
    if os.path.exists(given):
        raise InputError(f"{given}: neither a file nor a folder; inputs are read twice, so save it to a file")
    if glob.has_magic(given):
        found = [place for match in sorted(glob.glob(given, recursive=True)) for place in _expanded(match)]
        if not found:
            raise InputError(f"{given}: matches no file")
        return list(dict.fromkeys(map(os.path.normpath, found)))
    typed = os.path.isdir(os.path.dirname(given)) or _has_data_suffix(given)  # a path, with a slip in it
    if HUB_NAME.fullmatch(given) and not typed:
        return [given]
    raise InputError(f"{given}: no such file or folder")


def _in_folder(folder: str) -> list[str]:
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    if {"manifest.json", "state.json"} <= set(names):
        raise InputError(f"{folder}: is packed already; `padfree unpack` gives its examples back")
    if "state.json" in names or "dataset_dict.json" in names:
        return [folder]
    found: list[str] = []
    for name in names:
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path):  # a link could lead back here
            found += _in_folder(path)
        elif os.path.isfile(path) and _has_data_suffix(path):
            found.append(path)
        else:
            log.warning("%s: passed over, its name is not that of a data file", path)
    if not found:
        raise InputError(f"{folder}: no data files in it ({', '.join(DATA_SUFFIXES)}, also .gz or .zst)")
    return found


def _has_data_suffix(path: str) -> bool:
    stem, suffix = os.path.splitext(path.lower())
    return (os.path.splitext(stem)[1] if suffix in CODEC_SUFFIXES else suffix) in DATA_SUFFIXES


def _is_utf8(name: str) -> bool:
    return os.fsencode(name).decode("utf-8", "replace") == name


def _names(places: Sequence[str]) -> list[str]:
    """What the inputs are called: relative paths as they are, others from the folder that they share."""
    folders = [os.path.dirname(os.path.normpath(place)) for place in places if os.path.isabs(place)]
    shared = os.path.commonpath(folders) if folders else ""
    return [
        os.path.relpath(place, shared) if os.path.isabs(place) else os.path.normpath(place)
        for place in places
    ]
