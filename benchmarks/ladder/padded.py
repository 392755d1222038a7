"""Padded 2-D batches, the way that the published case began: for comparison, never for the product."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from packing import ShardSet, open_shards, unpack
from packing.example import IGNORE_INDEX, Example
from packing.loader import OrderOptions, PackedSampler
from training.config import Config
from training.metrics import FILE
from training.model import blocks, ends, materialise, read_config
from training.optim import clip, gradient_norm, make_optimizer
from training.parallel import World, join, shard
from training.recompute import recompute
from training.train import precision


def batches(
    lengths: Sequence[int], *, slots: int, in_order_of_length: bool, seed: int = 0
) -> list[list[int]]:
    """Places of examples, batch by batch; a batch of b examples, the longest L, has b x L <= `slots`.

    Args:
        lengths: Of the examples.
        slots: Most of them in a batch, padding included.
        in_order_of_length: Neighbours in length share a batch, and the batches are shuffled: little padding,
            but each batch sees one length alone. Else examples come shuffled.
        seed: Of the shuffling.
    """
    random = np.random.default_rng(seed)
    order = np.argsort(lengths, kind="stable") if in_order_of_length else random.permutation(len(lengths))
    found: list[list[int]] = [[]]
    longest = 0
    for place in order.tolist():
        longest = max(longest, lengths[place])
        if found[-1] and (len(found[-1]) + 1) * longest > slots:
            found.append([])
            longest = lengths[place]
        found[-1].append(place)
    return [found[i] for i in random.permutation(len(found))] if in_order_of_length else found


def collate(examples: Sequence[Example]) -> dict[str, torch.Tensor]:
    """Examples padded on the right: `input_ids`, `labels`, `attention_mask`, each int64[b, L]."""
    shape = len(examples), max(map(len, examples))
    ids = np.zeros(shape, np.int64)
    labels = np.full(shape, IGNORE_INDEX, np.int64)
    mask = np.zeros(shape, np.int64)
    for row, example in enumerate(examples):
        ids[row, : len(example)] = example.input_ids
        labels[row, : len(example)] = example.labels
        mask[row, : len(example)] = 1
    named: dict[str, Any] = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    return {name: torch.from_numpy(array) for name, array in named.items()}


class Stock(nn.Module):
    """The model as transformers gives it, with the loss as transformers computes it. The FSDP root."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch, use_cache=False).loss
        return loss


def train(config: Config, *, in_order_of_length: bool) -> None:
    """The rungs of padded batches: the trainer's parts without its packed input, kernels and loss.

    Writes `metrics.jsonl` with the trainer's keys into the run directory. The first step takes the examples
    that the packed rungs take first, in several micro-batches, so that losses and gradients can be compared.

    Args:
        config: As for the trainer.
        in_order_of_length: See `batches`.
    """
    with join(config.parallel) as world:
        shards = open_shards(config.data.shards)
        model_config = read_config(config.model, vocabulary=0)
        kind = precision(config, world)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                model_config,
                dtype=torch.float32 if kind == "fp32" else torch.bfloat16,
                attn_implementation="sdpa",
            )
        layers = blocks(model)
        recompute(layers, every=1)
        root = Stock(model)
        shard(
            root,
            layers,
            ends=ends(model),
            world=world,
            parallel=config.parallel,
            precision=kind,
            materialise=partial(materialise, model=model, device=world.device, seed=config.run.seed),
            whole=lambda _: set(),
        )
        optimizer = make_optimizer(root, optim=config.optim)
        steps = _steps(shards, config, world=world, in_order_of_length=in_order_of_length)
        folder = Path(config.run.dir)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / FILE).open("w", encoding="utf-8") as lines:

            def write(**values: Any) -> None:
                if world.chief:
                    lines.write(json.dumps(values) + "\n")
                    lines.flush()
                    print({key: value for key, value in values.items() if key in SHOWN}, flush=True)

            write(kind="eval", step=0, loss=_probe(root, shards.part("eval"), world=world))
            for step in range(config.run.steps):
                started = time.perf_counter()
                batches_ = [collate(examples) for examples in steps[step]]
                read = time.perf_counter()
                lengths = [len(example) for examples in steps[step] for example in examples]
                real, slots, supervised = world.sum(
                    sum(lengths),
                    sum(batch["input_ids"].numel() for batch in batches_),
                    sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in batches_),
                )
                loss = torch.zeros((), device=world.device)
                for batch in batches_:
                    share = root(**_on_device(batch, world.device), num_items_in_batch=int(supervised))
                    share.backward()
                    loss += share.detach()
                norm = gradient_norm(root.parameters())
                clip(root.parameters(), norm=norm, limit=config.optim.clip)
                optimizer.step()
                optimizer.zero_grad()
                (total,) = world.sum(float(loss))  # waits for the device
                write(
                    kind="train",
                    step=step + 1,
                    loss=total,
                    grad_norm=norm,
                    real_tokens=int(real),
                    supervised_tokens=int(supervised),
                    fill=real / slots,
                    step_s=time.perf_counter() - started,
                    data_s=read - started,
                )


SHOWN = ("step", "loss", "step_s", "real_tokens")
Step = list[list[Example]]
"""Micro-batches of a step."""


def _steps(shards: ShardSet, config: Config, *, world: World, in_order_of_length: bool) -> list[Step]:
    """This rank's steps: at first the examples of the packed rungs' first step, then one batch a step."""
    options = OrderOptions(seed=config.run.seed)
    samplers = [
        PackedSampler(shards, options=options, rank=rank, world_size=world.size) for rank in range(world.size)
    ]
    first = [key for sampler in samplers for key in next(iter(sampler)) if isinstance(key, int)]
    opening = _dealt([unpack(shards[number]) for number in first], slots=shards.capacity)
    rest = [
        example for number in range(len(shards)) if number not in first for example in unpack(shards[number])
    ]
    lengths = [len(example) for example in rest]
    places = batches(lengths, slots=shards.capacity, in_order_of_length=in_order_of_length)
    return [opening[world.rank]] + [[[rest[i] for i in batch]] for batch in places[world.rank :: world.size]]


def _dealt(examples: Sequence[Sequence[Example]], *, slots: int) -> list[Step]:
    """Each rank's examples in micro-batches, as many on every rank: FSDP gathers on all of them at once."""
    dealt = []
    for mine in examples:
        places = batches([len(example) for example in mine], slots=slots, in_order_of_length=True)
        dealt.append([[mine[i] for i in batch] for batch in places])
    most = max(map(len, dealt))
    idle = examples[0][0]
    nothing = Example(input_ids=idle.input_ids, labels=np.full_like(idle.labels, IGNORE_INDEX))
    return [step + [[nothing]] * (most - len(step)) for step in dealt]


def _on_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A padded batch has no boundaries, so the trainer's own way to the device is not for it."""
    return {
        key: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for key, value in batch.items()
    }


@torch.no_grad()
def _probe(root: nn.Module, shards: ShardSet, *, world: World) -> float:
    """The mean loss of the supervised tokens of the part `eval`, its buffers dealt out over the ranks."""
    root.eval()
    mine = [
        [example for number in range(rank, len(shards), world.size) for example in unpack(shards[number])]
        for rank in range(world.size)
    ]
    loss, count = 0.0, 0
    for examples in _dealt(mine, slots=shards.capacity)[world.rank]:
        batch = collate(examples)
        loss += float(root(**_on_device(batch, world.device), num_items_in_batch=1))
        count += int((batch["labels"] != IGNORE_INDEX).sum())
    root.train()
    total, supervised = world.sum(loss, count)
    return total / supervised
