"""Whether a model can train on a shard set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from packing.shards.reader import ShardSet

PADDED_VOCABULARY = 2048
"""Models round their vocabulary up, by at most this in the field (gpt-oss: 1,069; Qwen3: 267)."""


def misfits(shards: ShardSet, *, vocabulary: int, config: Any, tail: int | None = None) -> Iterator[str]:
    """Why a model can't train on a shard set, a line each.

    A tokenizer may have more words than its model, as long as no id is beyond: Gemma 3's smallest model
    has no row for the image token, the last of 262,145.

    Args:
        shards: Ids and lengths are read, about a second for 250 million, where the manifest does not do.
        vocabulary: The model's words.
        config: Of the model's text part, a transformers `PretrainedConfig`.
        tail: Most tokens of the tail that fills a buffer: its capacity, where the buffer is all tail. None
            takes the shard set's.
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
    tail = shards.capacity if tail is None else tail
    if any(too_long(config, holder="", longest=shards.capacity, tail=tail)):  # else no length is read
        longest = int(shards.seq_lengths.max())
        yield from too_long(config, holder=str(shards.path), longest=longest, tail=tail)


def too_long(config: Any, *, holder: str, longest: int, tail: int) -> Iterator[str]:
    """Why examples, or the tail behind them, have more tokens than a model takes, a line each.

    Positions restart with each example and with the tail, in which nothing is trained: it may have more of
    them than the model takes, as no model that can be bound looks its positions up in a table. But two kinds
    of rotary embedding choose the frequencies of all tokens by the largest position of the batch.

    Args:
        config: Of the model's text part.
        holder: What has the examples, for the line.
        longest: Tokens of the longest example.
        tail: Most tokens of a tail; 0 where there is none.
    """
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and longest > most:
        yield (
            f"{holder} has examples of {longest} tokens, the model takes {most} positions: pack with "
            f"--capacity {most} or less"
        )
    for alike, kind in turning(config):
        if max(longest, tail) > alike:
            has = f"examples of {longest} tokens" if longest > alike else f"room for a tail of {tail} tokens"
            yield (
                f"{holder} has {has}, and beyond {alike} the model's rotary embedding ({kind}) turns the "
                f"other examples of a batch otherwise: pack with --capacity {alike} or less"
            )


def turning(config: Any) -> Iterator[tuple[int, str]]:
    """Rotary embeddings that choose the frequencies of all tokens by the largest position of the batch.

    Args:
        config: Of the model's text part.

    Returns:
        The most tokens of a sequence that leave the others alone, and the kind.

    Source: `dynamic_rope_update` of transformers, 5.17 to 5.24.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):  # one for all layers, or one for each type of layer
        kind = (part.get("rope_type") if isinstance(part, Mapping) else None) or ""
        if "dynamic" in kind:
            yield config.max_position_embeddings, kind
        elif kind == "longrope":
            yield part["original_max_position_embeddings"], kind
