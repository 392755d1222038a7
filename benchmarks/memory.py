"""Memory of `padfree pack` over the number of rows: flat, whatever the input's size.

    python benchmarks/memory.py [--rows 10000 100000 1000000] [--workers 1 2] [--tokenizer DIR]

Each run is the command in a process of its own on synthetic chats. `tree` is the largest sum over the
process and its workers of private memory plus their part of what they share (PSS), sampled twice a
second; `peak` is the largest resident size of the packing process, as the kernel counts it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import save

from packing.sample import TOKENIZER

MIB = 2**20
WORDS = (
    *("the", "a", "of", "to", "in", "is", "that", "for", "it", "with", "as", "was", "on", "be", "at", "by"),
    *("this", "have", "from", "or", "one", "had", "not", "but", "what", "all", "were", "when", "we", "there"),
)
COMMAND = [sys.executable, "-c", "import sys; from packing.cli import main; sys.exit(main())"]


def write_chats(file: Path, *, rows: int) -> None:
    """Two or four turns of three to 25 words each, the same on every run."""
    rng = random.Random(7)
    with file.open("w", encoding="utf-8") as lines:
        for _ in range(rows):
            texts = [" ".join(rng.choices(WORDS, k=rng.randint(3, 25))) for _ in range(rng.choice((2, 4)))]
            roles = ("user", "assistant") * 2
            messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
            lines.write(json.dumps({"messages": messages}) + "\n")


def family(process: int) -> list[int]:
    """The process and its children."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [process, *map(int, children)]


def kernel_mib(process: int, *, file: str, field: str) -> float:
    """A field of /proc/PROCESS/FILE that is given in kB, in MiB."""
    lines = Path(f"/proc/{process}/{file}").read_text().splitlines()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:")), 0.0)


def run(file: Path, *, tokenizer: str, workers: int) -> dict[str, Any]:
    """Packs the file, and watches."""
    out = file.with_name("out")
    words = ["pack", str(file), "--tokenizer", tokenizer, "--out", str(out), "--workers", str(workers)]
    start = time.perf_counter()
    process = subprocess.Popen([*COMMAND, *words, "--force", "--json"], stdout=subprocess.PIPE, text=True)
    tree = peak = 0.0
    while process.poll() is None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            tree = max(
                tree, sum(kernel_mib(one, file="smaps_rollup", field="Pss") for one in family(process.pid))
            )
            peak = max(peak, kernel_mib(process.pid, file="status", field="VmHWM"))
        time.sleep(0.5)
    assert process.stdout
    report = json.load(process.stdout)
    return {
        "seconds": time.perf_counter() - start,
        "tokens": report["accounting"]["tokens"]["in"],
        "examples": report["main"]["examples"],
        "tree_mib": tree,
        "peak_mib": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokenizer", default=str(TOKENIZER))
    options = parser.parse_args()
    results: dict[str, Any] = {"tokenizer": os.path.basename(options.tokenizer)}
    with tempfile.TemporaryDirectory() as folder:
        for rows in options.rows:
            file = Path(folder, "chats.jsonl")
            write_chats(file, rows=rows)
            for workers in options.workers:
                found = run(file, tokenizer=options.tokenizer, workers=workers)
                results[f"{rows} rows, {workers} workers"] = {"input_mib": file.stat().st_size / MIB, **found}
                print(rows, workers, json.dumps(found), flush=True)
    save("memory", results)


if __name__ == "__main__":
    main()
