"""What the manifest and the files say of themselves: names, columns, versions, digests, counts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from packing.atomic import cache_folder
from packing.buffer import PackedBuffer
from packing.errors import ShardError
from packing.example import IGNORE_INDEX

if TYPE_CHECKING:
    import pyarrow as pa

Name = TypeVar("Name", bound=str)

FORMAT_VERSION = 1
"""Raised when an older reader could not read the directory, or would read it wrongly.

The encoding version, raised when the same input would give other tokens, is part of the fingerprint.
"""

MANIFEST, RUN, EXAMPLES, REJECTS = "manifest.json", "run.json", "examples.parquet", "rejects.jsonl"
FOR_DATASETS = ("dataset_info.json", "state.json")

COLUMNS = {"input_ids": "int32", "labels": "int32", "seq_lengths": "int32", "example_ids": "int64"}


def buffer_schema() -> pa.Schema:
    """The columns of a data file."""
    import pyarrow as pa

    return pa.schema([(name, pa.list_(pa.type_for_alias(dtype))) for name, dtype in COLUMNS.items()])


def no_contents() -> dict[str, int]:
    """The counts of an empty set, as they stand in the manifest."""
    return dict.fromkeys(("buffers", "examples", "tokens", "supervised_tokens", "rejects"), 0)


def count(contents: dict[str, int], buffer: PackedBuffer) -> None:
    """Adds a buffer to the counts."""
    contents["buffers"] += 1
    contents["examples"] += buffer.seq_lengths.size
    contents["tokens"] += len(buffer)
    contents["supervised_tokens"] += int(np.count_nonzero(buffer.labels != IGNORE_INDEX))


def most_first(counts: Mapping[Name, int]) -> dict[Name, int]:
    """Most first, equal ones by name, for accounts: the order does not depend on which came first."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def canonical_json(value: Mapping[str, Any]) -> bytes:
    """The one way in which a manifest is written; reading compares bytes, so no flipped bit passes."""
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def sealed(value: Mapping[str, Any]) -> bytes:
    """Canonical bytes of a mapping with the digest of its own canonical bytes added."""
    plain = json.loads(canonical_json(value))  # as a reader will see it: no tuples, no keys but text
    return canonical_json({**plain, "digest": hashlib.sha256(canonical_json(plain)).hexdigest()})


def unseal(path: Path) -> dict[str, Any]:
    """Reads what `sealed` wrote.

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
    if path.name == MANIFEST:
        _check_version(path, value.get("format_version"))
    try:
        expected = sealed({key: item for key, item in value.items() if key != "digest"})
    except ValueError:
        expected = None  # NaN, which is never written
    if data != expected:
        raise ShardError(f"{path} is damaged: its bytes do not match its digest; pack again")
    return value


def _check_version(path: Path, version: Any) -> None:
    if version is None:
        raise ShardError(f"{path} is no manifest of a shard set: it has no format_version")
    if version != FORMAT_VERSION:
        raise ShardError(
            f"{path} is of format version {version}, this padfree reads {FORMAT_VERSION}: "
            "pack again, or use the padfree that wrote it"
        )


class Remembered:
    """Files whose digests were checked before: in this process, and in the user's cache folder.

    Keyed by device, inode, size and both times: what a copy, an edit or a restored backup changes.
    """

    def __init__(self, manifest_digest: str) -> None:
        self._path = cache_folder() / "verified" / manifest_digest
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
