"""Whether a model can train on a shard set."""

from __future__ import annotations

from collections.abc import Iterator

from packing.shards.reader import ShardSet

PADDED_VOCABULARY = 2048
"""Models round their vocabulary up, by at most this in the field (gpt-oss: 1,069; Qwen3: 267)."""


def misfits(shards: ShardSet, *, vocabulary: int, positions: int | None) -> Iterator[str]:
    """Why a model can't train on a shard set, a line each.

    A tokenizer may have more words than its model, as long as no id is beyond: Gemma 3's smallest model
    has no row for the image token, the last of 262,145.

    Args:
        shards: Their ids are read, about a second for 250 million, where the manifest does not do.
        vocabulary: The model's words.
        positions: The most that it takes; None where it does not say.
    """
    known = shards.vocabulary
    made = "" if known is None else f" was packed with a tokenizer of {known} words"
    if (known is None or vocabulary < known) and shards.largest_id >= vocabulary:
        holder = f"{shards.path}{made} and" if made else str(shards.path)
        yield (
            f"{holder} holds ids up to {shards.largest_id}, the model has {vocabulary} words: pack with the "
            "model's own tokenizer"
        )
    if known is not None and vocabulary > known + PADDED_VOCABULARY:
        yield f"{shards.path}{made}, the model has {vocabulary} words: pack with the model's own tokenizer"
    # The tail that fills a buffer is one sequence, of its capacity where the buffer is all tail.
    if positions is not None and shards.capacity > positions:
        yield (
            f"{shards.path} has a capacity of {shards.capacity} tokens, the model takes {positions} "
            f"positions: pack with --capacity {positions} or less"
        )
