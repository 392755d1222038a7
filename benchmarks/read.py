"""What reading costs beside encoding: cut, parse, normalise, and their share of encoding the same rows.

    python benchmarks/read.py [--runs N]

For each file of real data as people have it, in CPU seconds of one process: cutting is the parent's
alone, parsing and normalising happen where the rows are encoded. The goal is under 10 % in all. Then
250,000 rows of each kind of file, for memory: the most resident bytes over those at the start.
Needs the folder of real data, ../shared or $PADFREE_SHARED.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["RAYON_NUM_THREADS"] = "1"  # so that CPU seconds compare

from record import save, spread

from packing.chat import ChatEncoder, load_tokenizer
from packing.errors import RowRejected
from packing.example import Conversation
from packing.formats import FormatOptions, normalise
from packing.sources import SourceOptions, open_sources

SHARED = Path(os.environ.get("PADFREE_SHARED", Path(__file__).resolve().parents[2] / "shared"))
ROWS = 256  # a chunk
LEAST = 50  # files of fewer rows say nothing about time


def cpu(call: Callable[[], Any]) -> tuple[float, Any]:
    """(CPU seconds, result) of a call."""
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def convert(record: dict[str, Any] | RowRejected, options: FormatOptions) -> Conversation | None:
    """The conversation, or None where the row is rejected."""
    if isinstance(record, RowRejected):
        return None
    try:
        return normalise(record, options=options)
    except RowRejected:
        return None


def stages(path: Path, encoder: ChatEncoder) -> tuple[int, dict[str, float]]:
    """(rows, CPU microseconds a row of each stage) of one file, read once."""
    options = FormatOptions()
    (source,) = open_sources([str(path)], options=SourceOptions())
    cut, chunks = cpu(lambda: list(source.chunks(rows=ROWS)))
    parse, records = cpu(lambda: [record for chunk in chunks for _, _, record in chunk.records()])
    change, found = cpu(lambda: [convert(record, options) for record in records])
    conversations = [conversation for conversation in found if conversation is not None]
    encode, _ = cpu(
        lambda: [
            encoder.encode_many(conversations[at : at + ROWS]) for at in range(0, len(conversations), ROWS)
        ]
    )
    seconds = {"cut": cut, "parse": parse, "normalise": change, "encode": encode}
    return len(records), {stage: 1e6 * taken / len(records) for stage, taken in seconds.items()}


def measure(runs: int) -> dict[str, Any]:
    """Each file's stages, and the share of all but encoding over all files."""
    encoder = ChatEncoder(load_tokenizer(str(SHARED / "tokenizers" / "qwen3")))
    data = SHARED / "data"
    paths = sorted(path for path in (*data.glob("raw/*/*"), *data.glob("*.jsonl.gz")))
    found: dict[str, Any] = {}
    totals = [[0.0, 0.0] for _ in range(runs)]
    for path in paths:
        rows, first = stages(path, encoder)  # warms up, and does not count
        if rows < LEAST:
            continue
        samples = [stages(path, encoder)[1] for _ in range(runs)]
        for total, sample in zip(totals, samples, strict=True):
            total[0] += rows * (sample["cut"] + sample["parse"] + sample["normalise"])
            total[1] += rows * sample["encode"]
        shares = [(s["cut"] + s["parse"] + s["normalise"]) / s["encode"] for s in samples]
        name = str(path.relative_to(data))
        found[name] = {
            "rows": rows,
            **{f"{stage}_us": spread(sample[stage] for sample in samples) for stage in first},
            "share_of_encoding": spread(shares),
        }
        print(
            name, json.dumps({k: v if k == "rows" else round(v["median"], 3) for k, v in found[name].items()})
        )
    return {**found, "all_files_share_of_encoding": spread(read / encode for read, encode in totals)}


def write_many(folder: Path, kind: str) -> Path:
    """250,000 conversations of about 500 bytes as lines, an array, gzip, zstd, CSV, Parquet or Arrow."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / f"many.{kind}"
    question = "What is the sum of the first numbers, and why? " * 5
    rows = ({"prompt": f"{n}: {question}", "completion": f"{n * 7}. {question}"} for n in range(250_000))
    if kind in ("parquet", "arrow"):
        table = pa.Table.from_pylist(list(rows))
        if kind == "parquet":
            pq.write_table(table, path)
        else:
            with pa.ipc.new_stream(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=10_000)
        return path
    codec = {"gz": "gzip", "zst": "zstd"}.get(kind.rpartition(".")[2])
    with pa.output_stream(path, compression=codec) as out:
        if kind == "csv":
            out.write(b"prompt,completion\n")
            for row in rows:
                out.write(f'"{row["prompt"]}","{row["completion"]}"\n'.encode())
        else:
            begin, between, end = (b"[\n", b",\n", b"\n]") if kind == "json" else (b"", b"\n", b"\n")
            out.write(begin)
            for n, row in enumerate(rows):
                out.write((between if n else b"") + json.dumps(row).encode())
            out.write(end)
    return path


def peak() -> int:
    """The most resident KiB of this process so far; ru_maxrss would count its parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def read_all(path: str) -> None:
    """Reads and normalises a file chunk by chunk; prints rows, CPU seconds and the growth in memory."""
    import pyarrow.parquet  # noqa: F401  # what is loaded anyway is no growth

    options = FormatOptions()
    before = peak()
    (source,) = open_sources([path], options=SourceOptions())
    start, rows = time.process_time(), 0
    for chunk in source.chunks(rows=ROWS):
        rows += sum(convert(record, options) is not None for _, _, record in chunk.records())
    taken = time.process_time() - start
    grown = (peak() - before) // 1024
    print(json.dumps({"rows": rows, "cpu_s": round(taken, 1), "grown_mib": grown}))


def memory() -> dict[str, Any]:
    """`read_all` of each kind of file, each in a process of its own."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("jsonl", "json", "jsonl.gz", "jsonl.zst", "csv", "parquet", "arrow"):
            path = write_many(Path(folder), kind)
            command = [sys.executable, __file__, "--read", str(path)]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[kind] = json.loads(out) | {"file_mib": path.stat().st_size >> 20}
            print(kind, json.dumps(found[kind]))
            path.unlink()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--read", help="a file to read and do nothing else")
    arguments = parser.parse_args()
    if arguments.read:
        read_all(arguments.read)
        return
    if not SHARED.exists():
        sys.exit(f"needs the folder of real data at {SHARED} (or $PADFREE_SHARED)")
    result = {"tokenizer": "qwen3", "chunk": ROWS, **measure(arguments.runs), "many_rows": memory()}
    print("share of encoding", result["all_files_share_of_encoding"])
    save("read", result)


if __name__ == "__main__":
    main()
