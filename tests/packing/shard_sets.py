"""Small shard sets for tests: every token tells its example and its place therein."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from packing.buffer import PackedBuffer, build_buffer
from packing.example import Example, make_example
from packing.shards import PartWriter, ShardWriter


def example(number: int, length: int) -> Example:
    """Example `number`: token i is 1 + 100 × number + i, so never a tail's 0; every second one is trained."""
    ids = 1 + 100 * number + np.arange(length)
    return make_example(ids, trained=np.arange(length) % 2 == 1)


def buffers(bins: Sequence[Sequence[int]]) -> list[PackedBuffer]:
    """A buffer for each bin of lengths, the examples numbered through."""
    packed, number = [], 0
    for lengths in bins:
        examples = [example(number + i, length) for i, length in enumerate(lengths)]
        packed.append(build_buffer(examples, example_ids=range(number, number + len(examples))))
        number += len(examples)
    return packed


def fill(writer: PartWriter, bins: Sequence[Sequence[int]]) -> None:
    """Writes a whole set: buffers, examples, one reject, accounts."""
    for buffer in buffers(bins):
        writer.write(buffer)
    count = sum(map(len, bins))
    writer.add_examples(
        pa.table(
            {
                "example": pa.array(range(count), pa.int64()),
                "input": ["chats.jsonl"] * count,
                "line": pa.array(range(1, count + 1), pa.int64()),
                "turn": pa.array([-1] * count, pa.int32()),
            }
        )
    )
    writer.add_rejects([{"input": "chats.jsonl", "line": count + 1, "reason": "bad_json"}])
    writer.finish({"rows": count + 1, "packed": count, "rejected": {"bad_json": 1}}, run={"seconds": 0.1})


def make_set(out: Path, bins: Sequence[Sequence[int]], *, capacity: int = 64, **options: Any) -> Path:
    """A shard set at `out` with these bins."""
    with ShardWriter(out, capacity=capacity, fingerprint={"test": 1}, **options) as writer:
        fill(writer, bins)
    return out


def bins_of(capacity: int, *, most: int = 12) -> st.SearchStrategy[list[list[int]]]:
    """Bins that fit: of one example or many, of one token or filled to the last."""

    def cut(lengths: list[int]) -> list[int]:
        ends = np.cumsum(lengths)
        return lengths[: max(1, int(np.searchsorted(ends, capacity, side="right")))]

    length = st.integers(1, capacity) | st.just(1) | st.just(capacity)
    return st.lists(st.lists(length, min_size=1, max_size=8).map(cut), min_size=1, max_size=most)
