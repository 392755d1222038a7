"""From files to shards: seconds and where they go, beside the floors and TRL's own preparation.

    python benchmarks/prepare.py [--rows 50000] [--runs 3]

All calls take the same file and one core, in turn, in one process with the tokenizer loaded:

    ours    pack_dataset: read, normalise, render, encode, masks, checks, plan, write, digests
    trl     load_dataset of the JSON lines, then SFTTrainer._prepare_dataset with packing
    render  transformers' compiled template alone, of messages in memory
    encode  one encode_batch_fast of the rendered texts alone

then ours with one worker and with two on two cores. The rows are the real conversations of ../shared/data
without tools (TRL reads a JSON file with one schema for all rows), repeated.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from record import save, spread

from packing.chat import ChatOptions, load_tokenizer
from packing.pipeline import PackReport, pack_dataset
from packing.shards import open_shards

SHARED = Path(os.environ.get("PADFREE_SHARED", Path(__file__).resolve().parents[2] / "shared"))
TEMPLATE = "qwen3_training.jinja"  # TRL's own marks for Qwen3; ours reads the same marks, so ids are equal
CAPACITY = 8192
CHUNK = 256

Row = dict[str, Any]


def read_rows(count: int) -> list[Row]:
    """The real conversations without tools, again and again up to `count`."""
    rows = [
        {"messages": row["messages"]}
        for path in sorted((SHARED / "data").glob("*.jsonl.gz"))
        for row in map(json.loads, gzip.decompress(path.read_bytes()).splitlines())
        if "tools" not in row and all(set(message) == {"role", "content"} for message in row["messages"])
    ]
    return list(itertools.islice(itertools.cycle(rows), count))


class Ours:
    """`pack_dataset` into a folder that is removed again; keeps the last report."""

    def __init__(self, file: Path, *, tokenizer: Any, template: str, workers: int) -> None:
        self.options: dict[str, Any] = {
            "tokenizer": tokenizer,
            "chat": ChatOptions(chat_template=template),
            "capacity": CAPACITY,
            "workers": workers,
        }
        self.file, self.out = file, file.with_name("out")
        self.report: PackReport

    def __call__(self) -> None:
        self.report = pack_dataset([str(self.file)], out=self.out, force=True, **self.options)


def trl(file: Path, *, tokenizer: Any, template: str, folder: Path) -> Callable[[], Any]:
    """TRL's way from the same file, without its caches."""
    from datasets import disable_caching, disable_progress_bars, load_dataset
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()
    disable_caching()
    arguments = SFTConfig(
        output_dir=str(folder / "trl"),
        assistant_only_loss=True,
        max_length=CAPACITY,
        packing=True,
        report_to="none",
        bf16=False,
    )
    trainer = SimpleNamespace(chat_template=template, completion_only_loss=False, _tokenizer=tokenizer)

    def run() -> Any:
        cache = tempfile.mkdtemp(dir=folder)
        data = load_dataset("json", data_files=str(file), split="train", cache_dir=cache)
        prepared = SFTTrainer._prepare_dataset(trainer, data, tokenizer, arguments, True, None, "train")
        shutil.rmtree(cache, ignore_errors=True)
        return prepared

    return run


def floors(rows: Sequence[Row], *, tokenizer: Any, template: str) -> dict[str, Callable[[], object]]:
    """One render and one encoding of everything, each alone."""
    from transformers.utils import chat_template_utils

    render = chat_template_utils._compile_jinja_template(template).render
    special, backend = tokenizer.special_tokens_map, tokenizer.backend_tokenizer
    texts: list[str] = []

    def render_all() -> None:
        texts[:] = [
            render(
                messages=row["messages"], tools=None, documents=None, add_generation_prompt=False, **special
            )
            for row in rows
        ]

    def encode_all() -> None:
        for start in range(0, len(texts), CHUNK):
            backend.encode_batch_fast(texts[start : start + CHUNK], add_special_tokens=False)

    return {"render": render_all, "encode": encode_all}


def paired(
    calls: Mapping[str, Callable[[], object]], *, runs: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Wall and processor seconds of each call, children included, taken in turn.

    So what else the machine does falls on all alike; processor seconds hardly see it.
    """
    wall: dict[str, list[float]] = {name: [] for name in calls}
    processor: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(runs):
        for name, call in calls.items():
            start, used = time.perf_counter(), sum(os.times()[:4])
            call()
            wall[name].append(time.perf_counter() - start)
            processor[name].append(sum(os.times()[:4]) - used)
            print(f"{name}: {wall[name][-1]:.2f} s, {processor[name][-1]:.2f} s of processor", flush=True)
    return wall, processor


def ratios(above: Sequence[float], below: Sequence[float]) -> dict[str, Any]:
    return spread([a / b for a, b in zip(above, below, strict=True)])


def same_ids(ours: Ours, packed_by_trl: Any) -> float:
    """The part of our examples that TRL has with the same ids; it packs, so they are looked up by content."""
    theirs = set()
    for row in packed_by_trl:
        end = 0
        for length in row["seq_lengths"]:
            theirs.add(tuple(row["input_ids"][end : end + length]))
            end += length
    shards = open_shards(ours.out)
    own = {tuple(shards.example(n).input_ids.tolist()) for n in range(min(2000, len(shards.seq_lengths)))}
    return len(own & theirs) / len(own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    if not SHARED.exists():
        sys.exit(f"needs the folder of real data at {SHARED} (or $PADFREE_SHARED)")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    cores = sorted(os.sched_getaffinity(0))
    rows = read_rows(options.rows)
    template = resources.files("trl").joinpath("chat_templates", TEMPLATE).read_text("utf-8")
    tokenizer = load_tokenizer(str(SHARED / "tokenizers" / "qwen3"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "rows.jsonl"
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
        one = Ours(file, tokenizer=tokenizer, template=template, workers=1)
        their_call = trl(file, tokenizer=copy.copy(tokenizer), template=template, folder=folder)

        os.sched_setaffinity(0, cores[:1])
        calls: dict[str, Callable[[], object]] = {"ours": one, "trl": their_call}
        samples, used = paired(
            {**calls, **floors(rows, tokenizer=tokenizer, template=template)}, runs=options.runs
        )
        report = one.report
        equal = same_ids(one, their_call())
        floor = [a + b for a, b in zip(samples["render"], samples["encode"], strict=True)]
        result: dict[str, Any] = {
            "rows": report.accounting["rows"],
            "tokens": report.accounting["tokens"]["in"],
            "examples_with_trls_ids": equal,
            "one_core_s": {name: spread(taken) for name, taken in samples.items()},
            "one_core_processor_s": {name: spread(taken) for name, taken in used.items()},
            "one_core_stages_s": {**report.seconds, **report.worker_seconds},
            "one_core_tokens_per_s": report.accounting["tokens"]["in"] / spread(samples["ours"])["median"],
            "trl_over_ours": ratios(samples["trl"], samples["ours"]),
            "ours_over_floor": ratios(samples["ours"], floor),
        }
        if len(cores) > 1:
            os.sched_setaffinity(0, cores[:2])
            two = Ours(file, tokenizer=tokenizer, template=template, workers=2)
            samples, used = paired({"one worker": one, "two workers": two}, runs=options.runs)
            result["two_cores_s"] = {name: spread(taken) for name, taken in samples.items()}
            result["two_cores_processor_s"] = {name: spread(taken) for name, taken in used.items()}
            result["one_worker_over_two"] = ratios(samples["one worker"], samples["two workers"])
            result["two_workers_stages_s"] = {**two.report.seconds, **two.report.worker_seconds}
    print(json.dumps(result, indent=1))
    save("prepare", {"capacity": CAPACITY, "template": TEMPLATE, **result})


if __name__ == "__main__":
    main()
