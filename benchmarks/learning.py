"""Packing changes the speed, not the learning: the same examples a step, packed and one by one.

    (cd ../shared/data && padfree pack codealpaca_2k.jsonl.gz gsm8k_test.jsonl.gz lf_alpaca_en.jsonl.gz \
        lf_glaive_en.jsonl.gz lf_reason_tool.jsonl.gz mtbench_gpt4.jsonl.gz --tokenizer ../tokenizers/qwen3 \
        --capacity 2048 --eval-fraction 0.05 --max-rejects 0.2 --out "$OLDPWD/shards")
    python benchmarks/learning.py --shards shards

On a CPU a smaller model learns from one of these with the sample's tokenizer:

    padfree pack ../shared/data/gsm8k_test.jsonl.gz --tokenizer packing/sample/tokenizer --capacity 1024 \
        --eval-fraction 0.02 --max-rejects 0.3 --out shards
    python benchmarks/learning.py --shards shards --model-config benchmarks/configs/learning-cpu.json \
        --steps 80 --lr 3e-3 --at-once 1 --name learning-cpu

From the same random weights of a small Qwen3.5 shape, each seed trains twice: on packed buffers, and with
each example in a forward pass of its own, where nothing could leak. After as many steps on the same examples
both are evaluated on the held-out part. It holds, by what is fixed below before any run, if each seed's two
losses differ by at most TOLERANCE, and if every loss is below the unigram baseline: the entropy that the
training part's word counts, plus one each, leave of the held-out labels. Saves results/learning.json, or into
$OUT; ends with 1 where it does not hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import save

from packing import ShardSet, open_shards
from packing.loader import OrderOptions, PackedDataset, PackedSampler, collate
from training import kernels
from training.config import Config, Data, Eval, Model, Optim, Run, Schedule
from training.data import IGNORE_INDEX, MicroBatch, micro_batch
from training.launch import leave
from training.model import read_config
from training.optim import clip, gradient_norm, learning_rate, make_optimizer, set_learning_rate
from training.parallel import World, join
from training.train import build, evaluate, forward_backward, open_data, precision
from training.train import spread as spread_over_ranks

CONFIGS = Path(__file__).with_name("configs")
TOLERANCE = 0.03
"""Nats a supervised token: half a percent of a loss near 6; bf16 rounds at 2**-9, and steps amplify it."""
SHORT = 4
"""An example alone is filled to a capacity's quarter where it fits, else to all of it: two shapes compile."""


def main() -> int:
    """Runs all seeds, each in a process of its own; 0 if it holds."""
    arguments = parser().parse_args()
    if arguments.worker is not None:
        Path(arguments.out).write_text(json.dumps(compare(arguments, seed=arguments.worker)), "utf-8")
        return 0
    shards = open_shards(arguments.shards)
    words = json.loads(arguments.model_config.read_text("utf-8"))["vocab_size"]
    baseline = unigram(shards, shards.part("eval"), words=words)
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"{seed}.json" for seed in range(arguments.seeds)]
        gpus = torch.cuda.device_count()
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = given.split(",") if given else [str(number) for number in range(gpus)]

        def run(seed: int) -> int:
            """The seed's process, on one of the GPUs in turn."""
            one = {"CUDA_VISIBLE_DEVICES": names[seed % gpus]} if gpus > 1 else {}
            command = [sys.executable, *sys.argv, "--worker", str(seed), "--out", str(outs[seed])]
            return subprocess.call(command, env={**os.environ, **one})

        with ThreadPoolExecutor(arguments.at_once or arguments.seeds) as threads:
            ended = list(threads.map(run, range(arguments.seeds)))
        if any(ended):
            raise SystemExit("a seed's process failed: its own words are above")
        seeds = [json.loads(out.read_text("utf-8")) for out in outs]
    results = judge(seeds, baseline=baseline)
    results["shards"] = {
        "fingerprint": shards.fingerprint,
        "buffers": len(shards),
        "capacity": shards.capacity,
        "examples": int(shards.seq_lengths.size),
        "held_out_examples": int(shards.part("eval").seq_lengths.size),
    }
    results |= {"steps": arguments.steps, "buffers_a_step": arguments.buffers, "lr": arguments.lr}
    packages = ["flash-linear-attention", "causal-conv1d", "flash-qla", "liger-kernel"]
    save(arguments.name, results, packages=packages)
    print(json.dumps({key: results[key] for key in ("holds", "unigram_loss", "losses", "difference")}))
    return 0 if results["holds"] else 1


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    found.add_argument("--shards", required=True, help="packed, with a held-out part")
    found.add_argument("--model-config", type=Path, default=CONFIGS / "learning.json")
    found.add_argument("--seeds", type=int, default=3)
    found.add_argument("--at-once", type=int, help="seeds side by side; all by default")
    found.add_argument("--name", default="learning", help="of the result")
    found.add_argument("--steps", type=int, default=100)
    found.add_argument("--buffers", type=int, default=1, help="packed buffers a step")
    found.add_argument("--lr", type=float, default=1e-3)
    found.add_argument("--worker", type=int, metavar="SEED", help=argparse.SUPPRESS)
    found.add_argument("--out", help=argparse.SUPPRESS)
    return found


def judge(seeds: list[dict[str, Any]], *, baseline: float) -> dict[str, Any]:
    """Whether it holds, with every figure that this rests on."""
    losses = {mode: [seed[mode]["loss"] for seed in seeds] for mode in ("packed", "alone")}
    difference = [packed - alone for packed, alone in zip(losses["packed"], losses["alone"], strict=True)]
    return {
        "holds": max(map(abs, difference)) <= TOLERANCE and max(itertools.chain(*losses.values())) < baseline,
        "tolerance": TOLERANCE,
        "unigram_loss": baseline,
        "losses": losses,
        "difference": difference,
        "spread_of_seeds": max(losses["packed"]) - min(losses["packed"]),
        "speedup": statistics.median(seed["alone"]["seconds"] / seed["packed"]["seconds"] for seed in seeds),
        "seeds": seeds,
    }


def unigram(train: ShardSet, held_out: ShardSet, *, words: int) -> float:
    """Nats a held-out supervised token under the training part's counts of them, plus one for each word."""
    counts = np.ones(words)
    for buffer in train:
        np.add.at(counts, buffer.labels[buffer.labels != IGNORE_INDEX], 1)
    labels = np.concatenate([buffer.labels[buffer.labels != IGNORE_INDEX] for buffer in held_out])
    return float(-np.log(counts[labels] / counts.sum()).mean())


def compare(arguments: argparse.Namespace, *, seed: int) -> dict[str, Any]:
    """Trains twice from the seed's weights, in the seed's order."""
    config = Config(
        run=Run(seed=seed),
        data=Data(shards=arguments.shards),
        model=Model(config=str(arguments.model_config), checkpointing=0, loss_chunk=256),
        optim=Optim(lr=arguments.lr, weight_decay=0.1),
        schedule=Schedule(kind="cosine", steps=arguments.steps, warmup=arguments.steps // 10, floor=0.1),
        eval=Eval(every=1),
    )
    shards = open_shards(arguments.shards)
    order = PackedSampler(shards, options=OrderOptions(seed=seed), batch_size=arguments.buffers)
    steps = list(itertools.islice(itertools.cycle(order), arguments.steps))
    with join(config.parallel) as world:
        return {
            "packed": train(config, world=world, steps=steps, micro_batches=in_buffers(shards)),
            "alone": train(config, world=world, steps=steps, micro_batches=one_by_one(shards)),
        }


Cut = Callable[[list[Any]], Iterator[MicroBatch]]


def in_buffers(shards: ShardSet) -> Cut:
    """Each buffer a micro-batch."""
    dataset = PackedDataset(shards)

    def cut(numbers: list[Any]) -> Iterator[MicroBatch]:
        for number in numbers:
            buffer = dataset[number]
            yield micro_batch(collate([buffer]), [buffer])

    return cut


def one_by_one(shards: ShardSet) -> Cut:
    """Each example of the same buffers a micro-batch."""
    long, short = PackedDataset(shards), PackedDataset(shards, capacity=shards.capacity // SHORT)
    ends = np.cumsum(shards.examples_per_buffer)

    def cut(numbers: list[Any]) -> Iterator[MicroBatch]:
        for number in numbers:
            for place in range(ends[number] - shards.examples_per_buffer[number], ends[number]):
                fits = shards.seq_lengths[place] <= short.capacity
                buffer = (short if fits else long)[np.array([place])]
                yield micro_batch(collate([buffer]), [buffer])

    return cut


def train(config: Config, *, world: World, steps: list[list[Any]], micro_batches: Cut) -> dict[str, Any]:
    """The trainer's own step, on micro-batches cut as told.

    Returns:
        Held-out `loss` at the end and `first_loss` before, the training losses, tokens and `seconds` of all
        steps but the first, which compiles.
    """
    data, held_out = open_data(config, world)
    assert held_out is not None
    model_config, precise = read_config(config.model, vocabulary=data.vocabulary), precision(config, world)
    root = build(config, model_config, device=world.device, precision=precise)
    spread_over_ranks(root, config, world, precision=precise)
    optimizer = make_optimizer(root, optim=config.optim)
    before = evaluate(root, held_out, step=0, world=world)
    losses, norms, real, micro = [], [], 0, 0
    for step, numbers in enumerate(steps):
        batches = list(micro_batches(numbers))
        supervised = sum(batch.supervised_tokens for batch in batches)
        loss = forward_backward(root, batches, num_items_in_batch=supervised, device=world.device)
        norms.append(gradient_norm(root.parameters()))
        clip(root.parameters(), norm=norms[-1], limit=config.optim.clip)
        set_learning_rate(
            optimizer, learning_rate(step, schedule=config.schedule, steps=len(steps), peak=config.optim.lr)
        )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        if step == 0:
            started = time.perf_counter()
        else:
            real += sum(batch.real_tokens for batch in batches)
        micro += len(batches)
    seconds = time.perf_counter() - started
    after = evaluate(root, held_out, step=len(steps), world=world)
    return {
        "loss": after["loss"],
        "first_loss": before["loss"],
        "held_out_tokens": after["supervised_tokens"],
        "seconds": seconds,
        "real_tokens_per_s": real / seconds,
        "micro_batches": micro,
        "parameters": root.model.num_parameters(),
        "bound": [asdict(row) for row in kernels.describe(root.model)],
        "train_losses": losses,
        "grad_norms": norms,
    }


if __name__ == "__main__":
    leave(main())
