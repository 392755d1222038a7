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

    Raises:
        ShardError: the first fault, with file and place.
    """
    shards = ShardSet(directory, remember=False)
    for name in shards.manifest["files"]:
        shards._checked(name)
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
        listed = shards.examples().column("example").to_numpy()
        if not np.array_equal(ids, listed):
            raise ShardError(
                f"{shards.path / EXAMPLES} does not list the examples of the buffers, in their order"
            )
    for name in shards.manifest["parts"]:
        verify(shards.part(name).path)
