"""Lengths, and a shard set of random tokens that has them: what every rung trains on.

The tokens are random since only their number is measured; the weights are too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packing import PackedBuffer, boundaries, build_buffer, open_shards, plan_bins
from packing.example import Example, make_example
from packing.shards import ShardWriter

CONVERSATIONS = 207_865
"""Rows of the published case's data set, ultrachat_200k."""
PROBED = 8
"""Supervised tokens at the start of each example in the part `eval`: what leaks over a border shows there."""
POOL = 20_000
"""Lengths to plan over: with so many, bins fill to 99.9 %."""


def read_lengths(source: str | None, *, most: int) -> NDArray[np.int64]:
    """Lengths of examples in tokens.

    Args:
        source: A .npy file, a text file with one number a line, a shard directory, or None for lengths like
            ultrachat_200k's.
        most: Longer ones are left out.
    """
    if source is None:
        lengths = chat_like(10 * POOL)
    elif (path := Path(source)).is_dir():
        lengths = open_shards(path).seq_lengths.astype(np.int64)
    elif path.suffix == ".npy":
        lengths = np.load(path).astype(np.int64)
    else:
        lengths = np.array(path.read_text("utf-8").split(), np.int64)
    fitting = lengths[(lengths >= 2) & (lengths <= most)]
    if not fitting.size:
        raise SystemExit(f"{source}: no length between 2 and {most}")
    return fitting


def chat_like(count: int) -> NDArray[np.int64]:
    """Lengths with ultrachat_200k's mean of 1,200 tokens; the spread is a guess.

    Three lognormals: most conversations near 1,000 tokens, some longer, some short.
    """
    random = np.random.default_rng(0)
    medians, sigmas = np.array([1040, 1480, 520]), np.array([0.42, 0.38, 0.60])
    kind = random.choice(3, size=count, p=[0.62, 0.28, 0.10])
    lengths = medians[kind] * np.exp(sigmas[kind] * random.standard_normal(count))
    return np.clip(lengths, 24, 4608).astype(np.int64)


def write_shards(
    out: Path, lengths: NDArray[np.int64], *, capacity: int, buffers: int, probes: int, vocabulary: int
) -> Path:
    """A shard set of `buffers` packed buffers, and in its part `eval` the first `probes` of them again.

    In `eval` only the first tokens of each example are supervised, see `PROBED`.
    """
    random = np.random.default_rng(0)
    pool = random.choice(lengths, size=min(POOL, lengths.size), replace=False)
    plan = plan_bins(pool, capacity=capacity)
    if len(plan) < buffers:
        raise SystemExit(
            f"{lengths.size} lengths fill {len(plan)} buffers, the rungs need {buffers}: fewer --steps"
        )
    bins = [pool[plan.bin(int(i))] for i in random.permutation(len(plan))[:buffers]]
    packed, first = [], 0
    for bin_lengths in bins:
        examples = [_random_example(random, int(length), vocabulary) for length in bin_lengths]
        packed.append(build_buffer(examples, example_ids=range(first, first + len(examples))))
        first += len(examples)
    with ShardWriter(out, capacity=capacity, fingerprint={"chat": {"vocabulary": vocabulary}}) as writer:
        part = writer.part("eval")
        for buffer in packed[:probes]:
            part.write(_probe(buffer))
        part.finish({})
        for buffer in packed:
            writer.write(buffer)
        writer.finish({})
    return out


def _random_example(random: np.random.Generator, length: int, vocabulary: int) -> Example:
    return make_example(random.integers(0, vocabulary, length), trained=np.ones(length, np.bool_))


def _probe(buffer: PackedBuffer) -> PackedBuffer:
    places = boundaries.position_ids(buffer.seq_lengths)
    return PackedBuffer(
        input_ids=buffer.input_ids,
        labels=np.where(places <= PROBED, buffer.labels, np.int32(-100)),
        seq_lengths=buffer.seq_lengths,
        example_ids=buffer.example_ids,
    )


def facts(lengths: NDArray[np.int64], *, work: Path, source: str | None) -> dict[str, Any]:
    """What the report says of the lengths, and the model's FLOPs for a token of them.

    Args:
        lengths: All of them.
        work: Folder with `shards` and `model.json`.
        source: Where they come from.
    """
    from training.config import Model
    from training.cost import flops
    from training.model import read_config

    used = open_shards(work / "shards").seq_lengths
    config = read_config(Model(config=str(work / "model.json")), vocabulary=0)
    return {
        "source": "like ultrachat_200k's" if source is None else Path(source).name,
        "mean": float(lengths.mean()),
        "conversations": CONVERSATIONS,
        "flops_per_token": flops(config, used) / float(used.sum()),
    }
