"""What loading costs: ready batches in one process, beside two casts, `datasets` with TRL, and the disk.

    python benchmarks/load.py [--runs N] [--examples N] [--folder DIR]

The floor is the casting of each buffer's ids and labels to int64 in new arrays, nothing else. Calls of one
table are taken in turn, so that what else the machine does falls on all alike. Tokens are those of the
batches, tails included; `real` counts the examples' own. DIR is where the shards are made (by default the
system's temporary folder): it should lie on the disk that is to be measured.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plan import CAPACITY, chat_like
from record import in_turn, ratio, save, seconds, spread

from packing.boundaries import starts
from packing.buffer import PackedBuffer
from packing.loader import PackedDataLoader, check_batch
from packing.plan import plan_bins
from packing.shards import ShardWriter, open_shards, verify

STEP_SECONDS = 0.08  # of a step that eats 100,000 tokens/s, a buffer of 8,192 at a time
PEER_BUFFERS = 100


def make_set(out: Path, lengths: Any, *, buffers_per_shard: int = 512) -> Path:
    """Packs random tokens of these lengths."""
    random = np.random.default_rng(0)
    plan = plan_bins(lengths, capacity=CAPACITY)
    with ShardWriter(out, capacity=CAPACITY, fingerprint={}, buffers_per_shard=buffers_per_shard) as writer:
        for i in range(len(plan)):
            members = plan.bin(i)
            inside = np.asarray(lengths)[members].astype(np.int32)
            ids = random.integers(1, 150_000, inside.sum(), np.int32)
            labels = np.where(random.random(ids.size) < 0.5, ids, np.int32(-100))
            labels[starts(inside)] = -100
            writer.write(PackedBuffer(input_ids=ids, labels=labels, seq_lengths=inside, example_ids=members))
        writer.finish({})
    return out


def tokens_of(batches: Iterable[Any]) -> int:
    return sum(batch["input_ids"].numel() for batch in batches)


def from_page_cache(directory: Path, *, runs: int) -> dict[str, Any]:
    """Tokens/s of every way to read, the files being in memory."""
    shards = open_shards(directory)
    buffers = len(shards)

    def casts() -> int:
        for buffer in shards:
            buffer.input_ids.astype(np.int64), buffer.labels.astype(np.int64)
        return buffers * CAPACITY

    calls: dict[str, Callable[[], int]] = {
        "two_casts": casts,
        "loader": lambda: tokens_of(PackedDataLoader(shards)),
        "loader_4_buffers": lambda: tokens_of(PackedDataLoader(shards, batch_size=4)),
        "loader_prefetch": lambda: tokens_of(PackedDataLoader(shards, prefetch=2)),
        "loader_replan": lambda: tokens_of(PackedDataLoader(shards, replan=True)),
        "loader_one_worker": lambda: tokens_of(
            itertools.islice(PackedDataLoader(shards, num_workers=1), PEER_BUFFERS)
        ),
        **peers(directory),
    }
    tokens = {name: call() for name, call in calls.items()}
    result: dict[str, Any] = {}
    for unit, samples in zip(("s", "processor_s"), in_turn(calls, runs=runs, warmup=0), strict=True):
        speeds = {name: [tokens[name] / each for each in taken] for name, taken in samples.items()}
        result |= {f"{name}_tokens_per_{unit}": spread(taken) for name, taken in speeds.items()}
        for name in ("two_casts", "datasets_trl"):
            if name in speeds:
                result[f"loader_over_{name}_{unit}"] = ratio(speeds["loader"], speeds[name])
    result["real_share"] = shards.manifest["contents"]["tokens"] / (buffers * CAPACITY)
    return result


def peers(directory: Path) -> dict[str, Callable[[], int]]:
    """`datasets` in torch format with TRL's padding-free collator, on the same directory."""
    try:
        import datasets
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
    except ImportError:
        return {}
    columns = ["input_ids", "labels", "seq_lengths"]
    rows = datasets.load_from_disk(str(directory)).with_format("torch", columns=columns)
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    return {
        "datasets_trl": lambda: sum(
            collator([rows[number]])["input_ids"].numel() for number in range(PEER_BUFFERS)
        )
    }


def drop_from_cache(directory: Path) -> None:
    """Asks the system to forget the data files' pages."""
    os.sync()
    for path in directory.glob("data-*.arrow"):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def from_disk(directory: Path, *, runs: int) -> dict[str, Any]:
    """The files out of memory: bytes/s of plain reads, of ours as they lie and shuffled; to a first batch."""
    size = sum(path.stat().st_size for path in directory.glob("data-*.arrow"))

    def plain() -> None:
        for path in sorted(directory.glob("data-*.arrow")):
            with path.open("rb", buffering=0) as file:
                while file.read(2**20):
                    pass

    calls: dict[str, Callable[[], Any]] = {
        "plain_read": plain,
        "loader_as_it_lies": lambda: tokens_of(PackedDataLoader(directory, shuffle=False)),
        "loader_shuffled": lambda: tokens_of(PackedDataLoader(directory)),
    }
    first = {"first_batch": lambda: next(iter(PackedDataLoader(directory)))}
    samples, _ = in_turn(calls | first, runs=runs, warmup=0, before=lambda: drop_from_cache(directory))
    result = {"first_batch_s": spread(samples.pop("first_batch"))}
    result |= {f"{name}_bytes_per_s": spread(size / s for s in taken) for name, taken in samples.items()}
    for name in ("loader_as_it_lies", "loader_shuffled"):
        result[f"{name}_over_plain_read"] = ratio(samples["plain_read"], samples[name])
    return result


def beside_training(directory: Path, *, prefetch: int, steps: int = 60) -> dict[str, Any]:
    """The share of a step of `STEP_SECONDS` that is spent waiting for its batch; the step is a sleep."""
    batches = iter(PackedDataLoader(directory, prefetch=prefetch))
    next(batches)
    waits = []
    for _ in range(steps):
        time.sleep(STEP_SECONDS)
        start = time.perf_counter()
        next(batches)
        waits.append((time.perf_counter() - start) / STEP_SECONDS)
    return spread(waits)


def many_shards(folder: Path, *, count: int, runs: int) -> dict[str, Any]:
    """Opening a set of many files, without and with a first batch."""
    directory = make_set(folder / "many", np.full(count, CAPACITY), buffers_per_shard=1)
    return {
        "shards": count,
        "open_s": seconds(lambda: open_shards(directory), runs=runs),
        "open_and_first_batch_s": seconds(lambda: next(iter(PackedDataLoader(directory))), runs=runs),
    }


def start_up(*, runs: int) -> dict[str, Any]:
    """Seconds of an import beyond an empty start of Python, and of two helps, each in a new process."""
    command = "import sys; from packing.cli import main; sys.exit(main({}))".format
    codes = {
        "python": "pass",
        "import_packing": "import packing",
        "help": command(["--help"]),
        "pack_help": command(["pack", "--help"]),
    }
    calls = {
        name: functools.partial(
            subprocess.run, [sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL
        )
        for name, code in codes.items()
    }
    samples, _ = in_turn(calls, runs=runs, warmup=0)
    empty = samples.pop("python")
    samples["import_packing"] = [a - b for a, b in zip(samples["import_packing"], empty, strict=True)]
    return {f"{name}_s": spread(taken) for name, taken in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--examples", type=int, default=40_000)
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        os.environ["PADFREE_CACHE"] = f"{name}/cache"
        folder = Path(name)
        directory = make_set(folder / "set", chat_like(200_000)[: options.examples])
        verify(directory)
        check_batch(next(iter(PackedDataLoader(directory))))
        sizes = {"buffers": len(open_shards(directory)), "capacity": CAPACITY}
        results: dict[str, Any] = {
            **sizes,
            "page_cache": from_page_cache(directory, runs=options.runs),
            "disk": from_disk(directory, runs=max(3, options.runs // 2)),
            "wait_share": {f"prefetch_{n}": beside_training(directory, prefetch=n) for n in (0, 2)},
            "many_shards": many_shards(folder, count=options.shards, runs=options.runs),
            "start_up": start_up(runs=options.runs),
            "load_average": os.getloadavg(),
        }
    for part, found in results.items():
        print(part, found)
    save("load", results)


if __name__ == "__main__":
    main()
