"""Checks all of a shard set."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from packing.buffer import check_buffer
from packing.errors import ShardError
from packing.shards.manifest import EXAMPLES, MANIFEST, RUN, count, no_contents, unseal
from packing.shards.reader import ShardSet


def verify(directory: str | Path) -> None:
    """Checks everything, whatever was checked before: digests, structure, each buffer's laws, the counts.

    A file that the manifest does not list is a fault, but for the cache-*.arrow that `datasets` leaves in a
    folder that it maps over and reads as nobody's data. run.json, which says when and how long, is outside
    the digests by design: its own digest is checked where it is there, and it may be missing.

    Raises:
        ShardError: the first fault, with file and place.
    """
    shards = ShardSet(directory, remember=False)
    for name in shards.manifest["files"]:
        shards._checked(name)
    listed = {MANIFEST, RUN, *shards.manifest["files"], *shards.manifest["parts"]}
    for path in sorted(shards.path.iterdir()):
        if path.name not in listed and not path.match("cache-*.arrow"):
            raise ShardError(f"{path} is not listed in {MANIFEST}: it is no part of this set; take it away")
    if (shards.path / RUN).exists():
        unseal(shards.path / RUN)
    contents = no_contents()
    contents["rejects"] = len(shards.rejects())
    for i, buffer in enumerate(shards):
        try:
            check_buffer(buffer, capacity=shards.capacity)
        except ValueError as error:
            raise ShardError(f"{shards.place(i)}: {error}") from None
        count(contents, buffer)
    for name, found in contents.items():
        if found != (expected := shards.manifest["contents"][name]):
            raise ShardError(f"{shards.path} holds {found} {name}, {MANIFEST} says {expected}")
    ids = np.sort(shards.example_ids)
    if (twice := np.flatnonzero(ids[1:] == ids[:-1])).size:
        raise ShardError(f"{shards.path} holds example {ids[twice[0]]} more than once")
    if EXAMPLES in shards.manifest["files"]:
        rows = shards.examples().column("example").to_numpy()
        if not np.array_equal(ids, rows):
            raise ShardError(
                f"{shards.path / EXAMPLES} does not list the examples of the buffers, in their order"
            )
    for name in shards.manifest["parts"]:
        verify(shards.part(name).path)
