"""What rendering, encoding and masking cost, beside the floor and beside TRL's own preparation.

    python benchmarks/encode.py [--rows N] [--runs N]

The floor is one jinja render with transformers' compiled template and one `encode_batch` of the same
text, in the same process, with the ids read. TRL prepares with its own training template, whose marks
our masks are measured against. Needs the folder of real data, ../shared or $PADFREE_SHARED.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from record import save, spread

from packing.chat import ChatEncoder, ChatOptions, load_tokenizer
from packing.example import Conversation, Example

SHARED = Path(os.environ.get("PADFREE_SHARED", Path(__file__).resolve().parents[2] / "shared"))
CHUNK = 256  # conversations a call, as the pipeline hands them over
CASES = [  # tokenizer, template in ../shared/templates (None: the tokenizer's own), TRL's training template
    ("qwen3", None, "qwen3_training.jinja"),
    ("qwen3_5", None, "qwen3_5_think_training.jinja"),
    ("llama3_1", "meta-llama-Llama-3.1-8B-Instruct", None),
    ("deepseek_v3", "deepseek-ai-DeepSeek-V3.1", None),
]

Row = dict[str, Any]


def read_rows(limit: int) -> dict[str, list[Row]]:
    """At most `limit` rows of each file in ../shared/data."""
    return {
        path.name.removesuffix(".jsonl.gz"): [json.loads(line) for line in gzip.open(path)][:limit]
        for path in sorted((SHARED / "data").glob("*.jsonl.gz"))
    }


def floor(tokenizer: Any, source: str, examples: Sequence[Example]) -> Callable[[], list[list[int]]]:
    """One render and one encoding a conversation, nothing else."""
    from transformers.utils import chat_template_utils

    render = chat_template_utils._compile_jinja_template(source).render
    backend, special = tokenizer.backend_tokenizer, tokenizer.special_tokens_map
    rows = [(list(example.messages or ()), example.tools) for example in examples]

    def run() -> list[list[int]]:
        ids = []
        for start in range(0, len(rows), CHUNK):
            texts = [
                render(messages=messages, tools=tools, documents=None, add_generation_prompt=False, **special)
                for messages, tools in rows[start : start + CHUNK]
            ]
            ids += [encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=False)]
        return ids

    return run


def ours(encoder: ChatEncoder, conversations: Sequence[Conversation]) -> Callable[[], list[Any]]:
    """The encoder, by the chunk."""

    def run() -> list[Any]:
        results: list[Any] = []
        for start in range(0, len(conversations), CHUNK):
            results += encoder.encode_many(conversations[start : start + CHUNK])
        return results

    return run


def trl(tokenizer: Any, template: str, rows: Sequence[Row]) -> Callable[[], Any]:
    """TRL's own preparation: its template with marks, `datasets.map` in one process, labels."""
    from datasets import Dataset, disable_progress_bars
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()
    source = resources.files("trl").joinpath("chat_templates", template).read_text("utf-8")
    folder = tempfile.mkdtemp()
    arguments = SFTConfig(
        output_dir=folder, assistant_only_loss=True, max_length=None, report_to="none", bf16=False
    )
    trainer = SimpleNamespace(chat_template=source, completion_only_loss=False, _tokenizer=tokenizer)
    data = Dataset.from_list([{"messages": row["messages"]} for row in rows])

    def run() -> Any:
        return SFTTrainer._prepare_dataset(
            trainer, data.with_format(None), tokenizer, arguments, False, None, f"train {time.time()}"
        )

    return run


def paired(calls: Sequence[Callable[[], object]], *, runs: int) -> list[list[tuple[float, float]]]:
    """(wall, processor) seconds of each call, in turn, so that what else the machine does falls on all."""
    samples: list[list[tuple[float, float]]] = [[] for _ in calls]
    for number in range(runs + 1):
        for call, taken in zip(calls, samples, strict=True):
            wall, processor = time.perf_counter(), time.process_time()
            call()
            if number:
                taken.append((time.perf_counter() - wall, time.process_time() - processor))
    return samples


def ratios(ours: Sequence[tuple[float, float]], floor: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Ours over the floor, pair by pair."""
    return {
        unit: spread([b[which] / a[which] for a, b in zip(floor, ours, strict=True)])
        for which, unit in enumerate(("wall", "processor"))
    }


def measure(
    case: tuple[str, str | None, str | None], rows: dict[str, list[Row]], runs: int
) -> dict[str, Any]:
    name, template, training = case
    tokenizer = load_tokenizer(str(SHARED / "tokenizers" / name))
    source = (SHARED / "templates" / f"{template}.jinja").read_text("utf-8") if template else None
    encoder = ChatEncoder(tokenizer, options=ChatOptions(chat_template=source))
    result: dict[str, Any] = {}
    everything: list[tuple[list[tuple[float, float]], list[tuple[float, float]]]] = []
    for file, some in rows.items():
        kept = [
            (row, conversation, done[0])
            for row, conversation in (
                (row, Conversation(messages=row["messages"], tools=row.get("tools"))) for row in some
            )
            if isinstance(done := encoder.encode_many([conversation])[0], list)
        ]
        if len(kept) < 20:
            continue
        examples = [example for *_, example in kept]
        floor_call = floor(tokenizer, source or tokenizer.chat_template, examples)
        assert floor_call() == [example.input_ids.tolist() for example in examples], (
            "the floor encodes other ids"
        )
        calls: list[Callable[[], object]] = [floor_call, ours(encoder, [c for _, c, _ in kept])]
        if training and not any(
            "tools" in row or "tool_calls" in m for row, *_ in kept for m in row["messages"]
        ):
            calls.append(trl(copy.copy(tokenizer), training, [row for row, *_ in kept]))
        samples = paired(calls, runs=runs)
        everything.append((samples[0], samples[1]))
        per_row = 1e6 / len(kept)
        result[file] = {
            "conversations": len(kept),
            "tokens": sum(map(len, examples)),
            "floor_us": spread([wall * per_row for wall, _ in samples[0]]),
            "ours_us": spread([wall * per_row for wall, _ in samples[1]]),
            "ours_over_floor": ratios(samples[1], samples[0]),
        }
        if len(samples) == 3:
            result[file]["trl_us"] = spread([wall * per_row for wall, _ in samples[2]])
            result[file]["trl_over_ours"] = ratios(samples[2], samples[1])
        shown = {unit: round(found["median"], 3) for unit, found in result[file]["ours_over_floor"].items()}
        print(name, file, "ours / floor", shown, flush=True)
    sums = [
        [
            tuple(sum(taken[n][unit] for taken in (pair[which] for pair in everything)) for unit in (0, 1))
            for n in range(runs)
        ]
        for which in (0, 1)
    ]
    return {**result, "all_files_ours_over_floor": ratios(sums[1], sums[0])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", help="one tokenizer")
    options = parser.parse_args()
    if not SHARED.exists():
        sys.exit(f"needs the folder of real data at {SHARED} (or $PADFREE_SHARED)")
    rows = read_rows(options.rows)
    results = {
        case[0]: measure(case, rows, options.runs) for case in CASES if options.only in (None, case[0])
    }
    for name, result in results.items():
        print(name, "ours / floor", result["all_files_ours_over_floor"])
    if options.only is None:
        save(
            "encode",
            {"chunk": CHUNK, "tokenizers_parallelism": os.environ.get("TOKENIZERS_PARALLELISM"), **results},
        )


if __name__ == "__main__":
    main()
