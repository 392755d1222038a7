"""From files to shards: seconds and where they go, beside the floors, TRL's and axolotl's own preparation.

    python benchmarks/prepare.py [--rows 50000] [--many 200000] [--runs 3] [--sizes 2000 10000 50000]

All calls take the same file and one core, in turn, in one process with the tokenizer loaded:

    ours    pack_dataset: read, normalise, render, encode, masks, checks, plan, write, digests
    trl     load_dataset of the JSON lines, then SFTTrainer._prepare_dataset with packing
    render  transformers' compiled template alone, of messages in memory
    encode  one encode_batch_fast of the rendered texts alone

then ours with one process on one core and with two on two (a thread writes, so one process would gain 0.2
s by the other core), TRL's with one and two on two cores, ours also with `--many` rows, of which what is
done once is a smaller part, and last each peer once at several sizes, for the plot. The rows are the real
conversations of ../shared/data without tools (TRL reads a JSON file with one schema for all rows),
repeated: all of them ("all"), and those of 800 characters or more ("long").
axolotl is measured where it can be imported; its strategy is given the tokenizer's own template.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gzip
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from record import in_turn, ratio, save, save_plot, spread

from packing.chat import ChatEncoder, ChatOptions, load_tokenizer
from packing.pipeline import PackOptions, PackReport, pack_dataset
from packing.plan import plan_bins
from packing.shards import open_shards

SHARED = Path(os.environ.get("PADFREE_SHARED", Path(__file__).resolve().parents[2] / "shared"))
TEMPLATE = "qwen3_training.jinja"  # TRL's own marks for Qwen3; ours reads the same marks, so ids are equal
CAPACITY = 8192
CHUNK = 256
LONG = 800  # characters: those of as many have 460 tokens on average
KINDS = {"all": 0, "long": LONG}
PACKAGES = ("tiktoken", "orjson", "axolotl")

Row = dict[str, Any]


def read_rows(count: int, *, least: int = 0) -> list[Row]:
    """The real conversations without tools of at least so many characters, again and again up to `count`."""
    rows = [
        {"messages": row["messages"]}
        for path in sorted((SHARED / "data").glob("*.jsonl.gz"))
        for row in map(json.loads, gzip.decompress(path.read_bytes()).splitlines())
        if "tools" not in row
        and all(set(message) == {"role", "content"} for message in row["messages"])
        and sum(len(message["content"]) for message in row["messages"]) >= least
    ]
    return list(itertools.islice(itertools.cycle(rows), count))


class Ours:
    """`pack_dataset` into a folder that is removed again; keeps the last report."""

    def __init__(self, file: Path, *, tokenizer: Any, template: str, workers: int) -> None:
        self.arguments: dict[str, Any] = {
            "tokenizer": tokenizer,
            "chat": ChatOptions(chat_template=template),
            "options": PackOptions(capacity=CAPACITY),
            "workers": workers,
        }
        self.file, self.out = file, file.with_name("out")
        self.report: PackReport

    def __call__(self) -> None:
        self.report = pack_dataset([str(self.file)], out=self.out, force=True, **self.arguments)


def trl(
    file: Path, *, tokenizer: Any, template: str, folder: Path, processes: int | None = None
) -> Callable[[], Any]:
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
        dataset_num_proc=processes,
    )
    trainer = SimpleNamespace(chat_template=template, completion_only_loss=False, _tokenizer=tokenizer)

    def run() -> Any:
        cache = tempfile.mkdtemp(dir=folder)
        data = load_dataset("json", data_files=str(file), split="train", cache_dir=cache)
        prepared = SFTTrainer._prepare_dataset(trainer, data, tokenizer, arguments, True, None, "train")
        shutil.rmtree(cache, ignore_errors=True)
        return prepared

    return run


def axolotl(file: Path, *, tokenizer: Any, folder: Path) -> Callable[[], Any] | None:
    """The way of axolotl: its chat template strategy over the rows, then its packing of the lengths."""
    try:
        from axolotl.datasets import TokenizedPromptDataset
        from axolotl.prompt_strategies.chat_template import ChatTemplatePrompter, ChatTemplateStrategy
        from axolotl.utils.samplers.multipack import pack_parallel
    except ImportError:
        return None
    from datasets import load_dataset

    strategy = ChatTemplateStrategy(
        ChatTemplatePrompter(tokenizer, chat_template=tokenizer.chat_template, max_length=CAPACITY),
        tokenizer=tokenizer,
        train_on_inputs=False,
        sequence_len=CAPACITY,
        roles_to_train=["assistant"],
        train_on_eos="turn",
    )

    def run() -> Any:
        cache = tempfile.mkdtemp(dir=folder)
        data = load_dataset("json", data_files=str(file), split="train", cache_dir=cache)
        rows = TokenizedPromptDataset(strategy, data, process_count=1)
        lengths = np.array([len(ids) for ids in rows["input_ids"]])
        packed = pack_parallel(
            lengths[lengths <= CAPACITY], CAPACITY, group_size=100_000, bin_size=200, num_processes=1
        )
        shutil.rmtree(cache, ignore_errors=True)
        return packed

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


def on_one_core(
    file: Path, rows: Sequence[Row], *, tokenizer: Any, template: str, runs: int
) -> dict[str, Any]:
    """Ours, TRL's and the floors, in turn."""
    one = Ours(file, tokenizer=tokenizer, template=template, workers=1)
    theirs = trl(file, tokenizer=copy.copy(tokenizer), template=template, folder=file.parent)
    calls: dict[str, Callable[[], object]] = {"ours": one, "trl": theirs}
    calls |= floors(rows, tokenizer=tokenizer, template=template)
    samples, used = in_turn(calls, runs=runs, warmup=0)
    floor = [a + b for a, b in zip(used["render"], used["encode"], strict=True)]
    report, tokens = one.report, one.report.accounting["tokens"]["in"]
    return {
        "rows": report.accounting["rows"],
        "tokens": tokens,
        "tokens_per_row": tokens / len(rows),
        "encoder": report.encoder,
        "examples_with_trls_ids": same_ids(one, theirs()),
        "seconds": {name: spread(taken) for name, taken in samples.items()},
        "processor_s": {name: spread(taken) for name, taken in used.items()},
        "stages_s": {**report.seconds, **report.worker_seconds},
        "tokens_per_s": tokens / spread(samples["ours"])["median"],
        "trl_over_ours": ratio(samples["trl"], samples["ours"]),
        "trl_over_ours_processor": ratio(used["trl"], used["ours"]),
        "ours_over_floor_processor": ratio(used["ours"], floor),
    }


def on_two_cores(file: Path, *, tokenizer: Any, template: str, runs: int) -> dict[str, Any]:
    """One process on one core, and two on two."""
    one, two = (Ours(file, tokenizer=tokenizer, template=template, workers=n) for n in (1, 2))

    def alone() -> None:
        with cores(1):
            one()

    samples, used = in_turn({"1": alone, "2": two}, runs=runs, warmup=0)
    return {
        "seconds": {name: spread(taken) for name, taken in samples.items()},
        "processor_s": {name: spread(taken) for name, taken in used.items()},
        "1_over_2": ratio(samples["1"], samples["2"]),
        "stages_of_two_s": {**two.report.seconds, **two.report.worker_seconds},
    }


def trl_on_two_cores(file: Path, *, tokenizer: Any, template: str, runs: int) -> dict[str, Any]:
    """TRL's, with one process and with two."""
    calls = {
        str(n): trl(
            file,
            tokenizer=copy.copy(tokenizer),
            template=template,
            folder=file.parent,
            processes=n if n > 1 else None,  # its pool of one costs a third more than none
        )
        for n in (1, 2)
    }
    samples, _ = in_turn(calls, runs=runs, warmup=0)
    return {
        "seconds": {name: spread(taken) for name, taken in samples.items()},
        "1_over_2": ratio(samples["1"], samples["2"]),
    }


def over_rows(sizes: Sequence[int], *, tokenizer: Any, template: str, folder: Path) -> dict[str, Any]:
    """Seconds of each at each size, once: for the plot."""
    found: dict[str, Any] = {}
    for size in sizes:
        file = write(folder / "rows.jsonl", read_rows(size))
        calls: dict[str, Callable[[], object] | None] = {
            "padfree, 1 worker": Ours(file, tokenizer=tokenizer, template=template, workers=1),
            "padfree, 2 workers": Ours(file, tokenizer=tokenizer, template=template, workers=2),
            "TRL": trl(file, tokenizer=copy.copy(tokenizer), template=template, folder=folder),
            "axolotl": axolotl(file, tokenizer=copy.copy(tokenizer), folder=folder),
        }
        known = {name: call for name, call in calls.items() if call is not None}
        samples, _ = in_turn(known, runs=1, warmup=0)
        found[str(size)] = {name: taken[0] for name, taken in samples.items()}
    return found


def plot(over: Mapping[str, Mapping[str, float]], *, to: Path) -> None:
    """Time against rows, both axes by factors of ten."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), dpi=90)
    for name in next(iter(over.values())):
        axes.plot([int(size) for size in over], [taken[name] for taken in over.values()], "o-", label=name)
    axes.set(xlabel="conversations", ylabel="seconds, files to packed buffers")
    save_plot(figure, axes, to)


@contextlib.contextmanager
def cores(count: int) -> Iterator[None]:
    """Leaves this process, and those that it starts, so many cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def write(file: Path, rows: Sequence[Row]) -> Path:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--many", type=int, default=200_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2_000, 10_000, 50_000])
    options = parser.parse_args()
    if not SHARED.exists():
        sys.exit(f"needs the folder of real data at {SHARED} (or $PADFREE_SHARED)")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    template = resources.files("trl").joinpath("chat_templates", TEMPLATE).read_text("utf-8")
    tokenizer = load_tokenizer(str(SHARED / "tokenizers" / "qwen3"))
    known = {"tokenizer": tokenizer, "template": template}
    ChatEncoder(tokenizer).prepare()  # the proof is once for a tokenizer; what it takes stands in encode.json
    plan_bins([1], capacity=CAPACITY)  # and numba's import is once for a process
    result: dict[str, Any] = {"capacity": CAPACITY, "template": TEMPLATE, "load_before": os.getloadavg()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {}
        for kind, least in KINDS.items():
            rows = read_rows(options.rows, least=least)
            files[kind] = write(folder / f"{kind}.jsonl", rows)
            with cores(1):
                result[kind] = on_one_core(files[kind], rows, **known, runs=options.runs)
            save("prepare", result, packages=PACKAGES)  # what comes takes long, and is less
        with cores(2):
            result["two_cores"] = {
                kind: on_two_cores(file, **known, runs=options.runs) for kind, file in files.items()
            }
            result["two_cores"]["trl"] = trl_on_two_cores(files["all"], **known, runs=options.runs)
            result["two_cores_many_rows"] = {"rows": options.many}
            for kind, least in KINDS.items():
                file = write(folder / "many.jsonl", read_rows(options.many, least=least))
                result["two_cores_many_rows"][kind] = on_two_cores(file, **known, runs=options.runs)
        save("prepare", result, packages=PACKAGES)
        with cores(2):
            result["seconds_over_rows"] = over_rows(options.sizes, **known, folder=folder)
    result["load_after"] = os.getloadavg()
    saved = save("prepare", result, packages=PACKAGES)
    plot(result["seconds_over_rows"], to=saved.with_suffix(".png"))


if __name__ == "__main__":
    main()
