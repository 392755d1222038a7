"""What rendering, encoding and masking cost, beside the floors and beside TRL's own preparation.

    python benchmarks/encode.py [--rows N] [--runs N]

All in turn in one process on one core, each run pair by pair with the others:

    tiktoken    ours, as `pack` encodes where tiktoken is shown to be equal, its sample encoded by both
    tokenizers  ours by the tokenizer's own library
    floor       one render by transformers' compiled template and one `encode_batch` of the texts, ids read
    bare        one such render and one call of tiktoken a text
    trl         TRL's own preparation with its training template, from rows in memory

Needs the folder of real data, ../shared or $PADFREE_SHARED.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import tiktoken
from record import Seconds, in_turn, ratio, save, spread

from packing.chat import ChatEncoder, ChatOptions, load_tokenizer
from packing.chat.recipe import read_recipe
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


def floors(
    tokenizer: Any, source: str, examples: Sequence[Example]
) -> dict[str, Callable[[], list[list[int]]]]:
    """One render and one encoding a conversation, nothing else: by `tokenizers`, and by tiktoken."""
    from transformers.utils import chat_template_utils

    render = chat_template_utils._compile_jinja_template(source).render
    backend, special = tokenizer.backend_tokenizer, tokenizer.special_tokens_map
    recipe = read_recipe(json.loads(backend.to_str()))
    encoding = tiktoken.Encoding(
        "bare", pat_str=recipe.pattern, mergeable_ranks=dict(recipe.ranks), special_tokens=dict(recipe.added)
    )
    rows = [(list(example.messages or ()), example.tools) for example in examples]

    def texts() -> Iterator[list[str]]:
        for start in range(0, len(rows), CHUNK):
            yield [
                render(messages=messages, tools=tools, documents=None, add_generation_prompt=False, **special)
                for messages, tools in rows[start : start + CHUNK]
            ]

    def floor() -> list[list[int]]:
        return [
            encoding.ids
            for some in texts()
            for encoding in backend.encode_batch(some, add_special_tokens=False)
        ]

    def bare() -> list[Any]:
        return [encoding.encode_to_numpy(text, allowed_special="all") for some in texts() for text in some]

    return {"floor": floor, "bare": bare}


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
    arguments = SFTConfig(
        output_dir="unwritten", assistant_only_loss=True, max_length=None, report_to="none", bf16=False
    )
    trainer = SimpleNamespace(chat_template=source, completion_only_loss=False, _tokenizer=tokenizer)
    data = Dataset.from_list([{"messages": row["messages"]} for row in rows])

    def run() -> Any:
        return SFTTrainer._prepare_dataset(
            trainer, data.with_format(None), tokenizer, arguments, False, None, f"train {time.time()}"
        )

    return run


def ratios(wall: Seconds, processor: Seconds) -> dict[str, Any]:
    """Each ratio that says something, run by run."""
    pairs = [
        ("tokenizers", "floor"),
        ("tiktoken", "bare"),
        ("tokenizers", "tiktoken"),
        ("trl", "tiktoken"),
        ("trl", "tokenizers"),
    ]
    return {
        f"{above}_over_{below}": {
            "wall": ratio(wall[above], wall[below]),
            "processor": ratio(processor[above], processor[below]),
        }
        for above, below in pairs
        if above in wall
    }


def measure(
    case: tuple[str, str | None, str | None], rows: dict[str, list[Row]], runs: int
) -> dict[str, Any]:
    name, template, training = case
    tokenizer = load_tokenizer(str(SHARED / "tokenizers" / name))
    source = (SHARED / "templates" / f"{template}.jinja").read_text("utf-8") if template else None
    slow, fast = (
        ChatEncoder(tokenizer, options=ChatOptions(chat_template=source, encoder=which))
        for which in ("tokenizers", "auto")
    )
    start = time.process_time()
    fast.prepare()
    result: dict[str, Any] = {"prepare_s": time.process_time() - start, **fast.encoder_report()}
    total: tuple[Seconds, Seconds] = ({}, {})
    for file, some in rows.items():
        kept = [
            (row, conversation, done[0])
            for row, conversation in (
                (row, Conversation(messages=row["messages"], tools=row.get("tools"))) for row in some
            )
            if isinstance(done := slow.encode_many([conversation])[0], list)
        ]
        if len(kept) < 20:
            continue
        examples, conversations = [done for *_, done in kept], [talk for _, talk, _ in kept]
        calls: dict[str, Callable[[], object]] = {
            "tiktoken": ours(fast, conversations),
            "tokenizers": ours(slow, conversations),
            **floors(tokenizer, source or tokenizer.chat_template, examples),
        }
        known = [example.input_ids.tolist() for example in examples]
        assert calls["floor"]() == known, "the floor encodes other ids"
        assert [ids.tolist() for ids in calls["bare"]()] == known, "tiktoken encodes other ids"  # type: ignore[attr-defined]
        assert [found for (found,) in calls["tiktoken"]()] == examples, "the encoders differ"  # type: ignore[attr-defined]
        if training and not any(
            "tools" in row or "tool_calls" in m for row, *_ in kept for m in row["messages"]
        ):
            calls["trl"] = trl(copy.copy(tokenizer), training, [row for row, *_ in kept])
        wall, processor = in_turn(calls, runs=runs)
        result[file] = {
            "conversations": len(kept),
            "tokens": sum(map(len, examples)),
            "us_a_conversation": {
                which: spread([1e6 * each / len(kept) for each in taken]) for which, taken in wall.items()
            },
            **(found := ratios(wall, processor)),
        }
        for sums, seconds in zip(total, (wall, processor), strict=True):
            for which in seconds.keys() - {"trl"}:
                sums[which] = np.add(sums.get(which, 0.0), seconds[which]).tolist()
        shown = {which: round(spreads["processor"]["median"], 2) for which, spreads in found.items()}
        print(name, file, shown, flush=True)
    return {**result, "all_files": ratios(*total)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", help="one tokenizer")
    options = parser.parse_args()
    if not SHARED.exists():
        sys.exit(f"needs the folder of real data at {SHARED} (or $PADFREE_SHARED)")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    rows = read_rows(options.rows)
    results = {
        case[0]: measure(case, rows, options.runs) for case in CASES if options.only in (None, case[0])
    }
    for name, result in results.items():
        medians = {
            which: round(found["processor"]["median"], 2) for which, found in result["all_files"].items()
        }
        print(name, "all files", medians)
    if options.only is None:
        save(
            "encode",
            {"chunk": CHUNK, "rows_a_file_at_most": options.rows, **results},
            packages=["tiktoken"],
        )


if __name__ == "__main__":
    main()
