"""The training run, top to bottom."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from training import checkpoint, kernels
from training.config import Config, Precision, check_schedule, to_toml
from training.cost import itemised, most, peak_flops, recomputed, risks, work
from training.data import MicroBatch, TrainingData
from training.errors import NonFinite, Signalled, writing
from training.faults import (
    SLOW,
    Spikes,
    StopSignal,
    Watchdog,
    keep_flight_records,
    naming_failures,
    report_nonfinite,
)
from training.files import check_digests, replace_text, weights_digest
from training.fused import fuse
from training.launch import agent, mark, restarted
from training.loggers import check_loggers, open_loggers
from training.lora import add_adapters
from training.loss import SupervisedLoss, choose_loss
from training.metrics import Metrics
from training.model import (
    blocks,
    ends,
    freeze,
    materialise,
    read_config,
    skeleton,
    whole,
)
from training.optim import clip, gradient_norm, learning_rate, make_optimizer, set_learning_rate
from training.parallel import Stopwatch, World, join, on_device, reduce_whole, shard
from training.profile import StepProfiler
from training.recompute import recompute
from training.weights import load_weights, match_weights


def train(config: Config, *, resume: bool = False, accept: Sequence[str] = (), dry_run: bool = False) -> None:
    """Trains as the configuration says; every rank calls it.

    Args:
        config: The resolved configuration.
        resume: Go on from the newest checkpoint in the run directory.
        accept: Settings that may differ from the checkpoint's although they would be refused.
        dry_run: Check everything, print what would run, and stop before memory is taken.

    Raises:
        PadfreeError: anything that a user can cause, before the first step where it can be known there.
    """
    check_loggers(config.run.loggers)
    directory = Path(config.run.dir)
    keep_flight_records(directory)
    with naming_failures(), join(config.parallel) as world:
        # Shards and a model that fit each other, or one clear line.
        data, held_out = open_data(config, world)
        data.check_ranks()
        parts = [data, held_out] if held_out else [data]
        model_config = read_config(config.model, vocabulary=max(part.vocabulary for part in parts))
        for part in parts:
            part.check_model(model_config)
        accumulation = config.data.accumulation
        steps = config.schedule.steps or (
            config.schedule.epochs * data.steps_of_epoch(accumulation=accumulation)
        )
        check_schedule(config.schedule, steps=steps)
        last = min(steps, config.run.steps or steps)

        # Where to begin.
        saved = checkpoint.choose(directory, resume=resume, restarted=restarted(directory), world=world)
        done, changed, base = 0, "", weights_digest(config.model.weights)
        if saved:
            trainer = checkpoint.read_trainer(saved)
            data.load_state_dict(trainer["loader"])
            changed = checkpoint.check_resume(
                trainer,
                model=model_config.to_dict(),
                base=base,
                steps=last,
                config=config,
                ranks=world.size,
                accept=accept,
            )
            done = trainer["step"]
            if not config.lora.rank:  # nothing is read from there, and an export builds on what was
                base = trainer["base"]
            if done == last:
                if world.chief:
                    print(f"finished: {done} of {last} steps, nothing to do")
                return

        # The model: shapes first, kernels bound, then values and shards block by block.
        numbers = precision(config, world)
        root = build(config, model_config, device=world.device, precision=numbers)
        stored = None
        if config.model.weights and (config.lora.rank or not saved):  # a checkpoint may hold adapters alone
            stored = match_weights(root.model, config.model.weights)
        summary = (
            f"{type(root.model).__name__}, {root.model.num_parameters():,} parameters, "
            f"{numbers}, loss {root.kind}, {world.size} ranks on {world.device.type}, "
            f"step {done} to {last} of {steps}, {len(data.shards):,} buffers of {data.capacity:,} tokens"
        )
        operations = work(root.model)
        warnings = list(risks(config, root.model, world=world, capacity=data.capacity, precision=numbers))
        if stored and stored.left:
            left = f"{len(stored.left):,} stored tensors are left alone, among them {stored.left[0]}"
            warnings.insert(0, f"{config.model.weights}: {left}")
        if dry_run:
            if world.chief:
                bill = itemised(config, root.model, world=world, capacity=data.capacity, precision=numbers)
                flops = most(operations, capacity=data.capacity)
                feeds = f"{len(data.shards):,} buffers: at most {len(data.shards):,} ranks"
                print("\n".join([to_toml(config), summary, feeds, *bill, flops, *warnings]))
            return
        if world.chief:
            for line in warnings:
                print(f"training: {line}", file=sys.stderr, flush=True)
        spread(root, config, world, precision=numbers)
        optimizer = make_optimizer(root, optim=config.optim)
        if stored:
            load_weights(root.model, stored=stored)
        if saved:
            check_digests(saved, rank=world.rank, world_size=world.size)
            checkpoint.load(saved, model=root.model, optimizer=optimizer)

        agents = world.gather(agent())
        if world.chief:
            with writing(directory):
                directory.mkdir(parents=True, exist_ok=True)
                mark(directory, agents=agents)
                replace_text(directory / "config.toml", to_toml(config))
        loggers = open_loggers(config, directory=directory, done=done) if world.chief else []
        shown = Metrics(directory, steps=last, done=done, active=world.chief, loggers=loggers)
        watching = Watchdog(directory / "hang", rank=world.rank, hang_s=config.run.hang_s)
        with shown as metrics, StopSignal() as stop, watching as watchdog:
            metrics.say(summary)
            if changed:
                metrics.say(f"changed since the checkpoint: {changed}")
            if strange := checkpoint.passed_over(directory / checkpoint.FOLDER):
                metrics.say(f"no checkpoints by their names, so passed over: {', '.join(strange)}")
            metrics.bound([dataclasses.asdict(row) for row in kernels.describe(root.model)])
            if held_out and done == 0:
                metrics.eval(evaluate(root, held_out, step=0, world=world))
            profiler = StepProfiler(
                config.run.profile,
                folder=directory / "profile",
                active=world.chief,
                trace=config.run.trace,
            )
            saver = checkpoint.Saver(directory / checkpoint.FOLDER, options=config.checkpoint, world=world)
            peak = peak_flops(world.device)
            share_full, share_mixing = recomputed(config, layers=len(blocks(root.model)))
            spikes = Spikes(config.run.spike)
            stream = data.steps(accumulation=accumulation)
            upcoming = next(stream)
            for step in range(done, last):
                # One step: read, forward and backward, clip, update.
                taken = step + 1  # when it is done; its number, too
                profiler.before(taken)
                started, clock = time.perf_counter(), Stopwatch(world.device)
                # Dropout is a function of (seed, step, rank), so a checkpoint holds no random state.
                torch.manual_seed(step_seed(config.run.seed, step=step, rank=world.rank))
                batches = upcoming
                lengths = [length for batch in batches for length in batch.seq_lengths]
                real, supervised, buffers, model_flops, hardware_flops = world.sum(
                    sum(lengths),
                    sum(batch.supervised_tokens for batch in batches),
                    sum(batch.buffers for batch in batches),
                    operations.step(lengths) if operations else 0.0,
                    operations.hardware(lengths, recomputed=share_full, mixing_again=share_mixing)
                    if operations
                    else 0.0,
                )
                clock.mark()
                patience = max(len(batches), SLOW if step == done else 1)
                watchdog.at(taken, "forward and backward", times=patience)
                share = forward_backward(
                    root,
                    batches,
                    num_items_in_batch=int(supervised),
                    device=world.device,
                    reduce_each=config.parallel.reduce == "micro_batch",
                    handshake=step == done,
                )
                # The next step's batches, while the device computes: this step's checkpoint is before them.
                watchdog.at(taken, "reading the next step's data", times=patience)
                place, reading = data.state_dict(), time.perf_counter()
                upcoming = next(stream) if taken < last else []
                waited = time.perf_counter() - reading if clock.idle() else 0.0
                watchdog.at(taken, "waiting for the device and the other ranks", times=patience)
                norm = gradient_norm(root.parameters())  # waits for the device
                clock.mark()
                loss, signals = world.sum(float(share), bool(stop.name))
                finite = math.isfinite(loss) and math.isfinite(norm)
                if not finite:
                    line = report_nonfinite(
                        directory / "nonfinite", batches, step=taken, rank=world.rank, loss=loss, norm=norm
                    )
                    if config.run.nonfinite == "stop":
                        raise NonFinite(f"{line}; run.nonfinite=skip leaves such steps out")
                    metrics.say(line)
                elif limit := spikes.limit(loss):
                    mine = (
                        float(share) * supervised / max(1, sum(batch.supervised_tokens for batch in batches))
                    )
                    ids = [number for batch in batches for number in batch.example_ids]
                    ranks = world.gather({"rank": world.rank, "loss": mine, "example_ids": ids})
                    ranks.sort(key=lambda part: -part["loss"])
                    metrics.spike({"step": taken, "loss": loss, "limit": limit, "ranks": ranks})
                watchdog.at(taken, "updating the weights")
                lr = learning_rate(step, schedule=config.schedule, steps=steps, peak=config.optim.lr)
                set_learning_rate(optimizer, lr)
                if finite:
                    clip(root.parameters(), norm=norm, limit=config.optim.clip)
                    if config.optim.rounding == "stochastic":  # replicas have to round alike
                        shard_rank = world.mesh.get_local_rank("shard")
                        seed = step_seed(config.run.seed, step=step, rank=shard_rank, of="rounding")
                        torch.manual_seed(seed)
                    optimizer.step()
                optimizer.zero_grad()
                clock.mark()
                forward_backward_s, optimizer_s = clock.split()
                seconds = time.perf_counter() - started
                memory, reserved = world.peak_memory()
                values = {
                    "step": taken,
                    "loss": loss,
                    "grad_norm": norm,
                    "lr": lr,
                    "real_tokens": int(real),
                    "supervised_tokens": int(supervised),
                    "buffers": int(buffers),
                    "fill": real / (buffers * data.capacity),
                    "real_tokens_per_s": real / seconds,
                    "real_tokens_per_s_per_rank": real / seconds / world.size,
                    "supervised_tokens_per_s": supervised / seconds,
                    "supervised_tokens_per_s_per_rank": supervised / seconds / world.size,
                    "step_s": seconds,
                    "data_s": waited,
                    "forward_backward_s": forward_backward_s,
                    "optimizer_s": optimizer_s,
                    "memory_gib": memory,
                    "reserved_gib": reserved,
                }
                if operations:
                    values["model_flops"] = model_flops
                if operations and peak:
                    values["mfu"] = model_flops / seconds / world.size / peak
                    values["hfu"] = hardware_flops / seconds / world.size / peak
                metrics.train(values)
                if found := profiler.after(taken, values=values):
                    metrics.say(found)

                # Now and then: the held-out part, a checkpoint.
                end = taken == last
                if held_out and (end or taken % config.eval.every == 0):
                    watchdog.at(taken, "evaluating", times=SLOW)
                    metrics.eval(evaluate(root, held_out, step=taken, world=world))
                every = config.checkpoint.every
                if (end and config.checkpoint.last) or (every and taken % every == 0) or signals:
                    watchdog.at(taken, "saving a checkpoint", times=SLOW)
                    began = time.perf_counter()
                    written = saver.save(
                        taken,
                        model=root.model,
                        optimizer=optimizer,
                        trainer={
                            "loader": place,
                            "model": model_config.to_dict(),
                            "base": base,
                            "config": dataclasses.asdict(config),
                        },
                    )
                    held = time.perf_counter() - began
                    metrics.checkpoint({"step": taken, "held_s": held}, path=written)
                saver.poll()
                if signals and not end:
                    saver.finish()
                    came = stop.name or "a signal to another rank"
                    raise Signalled(f"{came} after step {taken} of {last}; saved, go on with --resume")
            watchdog.at(last, "finishing the checkpoint", times=SLOW)
            saver.finish()


def step_seed(seed: int, *, step: int, rank: int, of: str = "step") -> int:
    """Of a step's dropout or rounding, 63 bits: another for each step and rank, whatever the run's seed."""
    digest = hashlib.sha256(f"padfree {of} 1: seed {seed}, step {step}, rank {rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def open_data(config: Config, world: World) -> tuple[TrainingData, TrainingData | None]:
    """The shards to train on, and those to evaluate on where `eval.every` is set.

    Raises:
        ShardError: missing or damaged, the held-out part included.
        OptionError: the held-out part was packed with another tokenizer or template.
    """
    place: dict[str, Any] = {
        "rank": world.rank,
        "world_size": world.size,
        "pin_memory": world.device.type == "cuda",
    }
    data = TrainingData(
        config.data.shards,
        buffers=config.data.buffers,
        seed=config.run.seed,
        prefetch=config.data.prefetch,
        **place,
    )
    if not config.eval.every:
        return data, None
    shards, part = (config.eval.shards, None) if config.eval.shards else (config.data.shards, "eval")
    held_out = TrainingData(shards, part=part, shuffle=False, **place)
    data.check_alike(held_out)
    return data, held_out


def build(
    config: Config, model_config: PretrainedConfig, *, device: torch.device, precision: Precision
) -> SupervisedLoss:
    """The model on meta, its kernels bound, under the loss.

    Raises:
        KernelError: a layer that can't be isolated here.
        OptionError: a loss or a recomputation that this model can't have.
    """
    wanted = config.model
    model = skeleton(model_config, precision=precision)
    chosen = {} if wanted.delta_rule == "auto" else {"delta rule": wanted.delta_rule}
    kernels.bind(model, kernels=wanted.kernels, device=device.type, choose=chosen)
    if config.lora.rank:
        add_adapters(model, lora=config.lora)
    here = device.type == "cuda" and find_spec("liger_kernel") is not None
    if wanted.fused == "yes" or (wanted.fused == "auto" and here):
        fuse(model)
    freeze(model, patterns=wanted.freeze)
    layers = blocks(model)
    recompute(
        layers,
        every=wanted.checkpointing,
        keep_layers=wanted.keep_layers,
        whole_layers=wanted.whole_layers,
        host_layers=wanted.host_layers,
    )
    if wanted.compile == "layers":
        for layer in layers:
            layer.compile(dynamic=False)
    kind = choose_loss(wanted.loss, device=device, model=model)
    return SupervisedLoss(model, kind=kind, chunk=wanted.loss_chunk)


def spread(root: SupervisedLoss, config: Config, world: World, *, precision: Precision) -> None:
    """Gives the model random values and shards it over the ranks, block by block."""
    shard(
        root,
        blocks(root.model),
        ends=ends(root.model),
        world=world,
        parallel=config.parallel,
        precision=precision,
        materialise=partial(materialise, model=root.model, device=world.device, seed=config.run.seed),
        whole=partial(whole, model=root.model) if precision != "fp32" else lambda _: set(),
    )


def forward_backward(
    root: SupervisedLoss,
    batches: Sequence[MicroBatch],
    *,
    num_items_in_batch: int,
    device: torch.device,
    reduce_each: bool = False,
    handshake: bool = False,
) -> Tensor:
    """Gradients of one step: of the loss sum over all ranks and micro-batches, divided by their count.

    Args:
        root: The sharded root.
        batches: This rank's micro-batches; every rank has as many.
        num_items_in_batch: Supervised tokens of the step over all ranks.
        device: Where the root is.
        reduce_each: Sum over ranks after each micro-batch, not once a step: more communication, but
            no rank holds whole gradients in between.
        handshake: Check on the first micro-batch that every layer computed with its boundaries.

    Returns:
        This rank's share of the step's loss, fp32 scalar on the device, detached.

    Raises:
        KernelError: the handshake failed: a layer computed with other boundaries.
    """
    share = torch.zeros((), device=device)
    for number, batch in enumerate(batches, start=1):
        if isinstance(root, FSDPModule):
            root.set_requires_gradient_sync(reduce_each or number == len(batches))
        # A step without any supervised token has a loss of 0 and gradients of 0, not NaN.
        first = handshake and number == 1
        with kernels.handshake(root.model, batch.inputs) if first else nullcontext():
            loss = root(**on_device(batch.inputs, device)) / max(1, num_items_in_batch)
            loss.backward()
        share += loss.detach()
    reduce_whole([parameter for parameter in root.parameters() if not isinstance(parameter, DTensor)])
    return share


@torch.no_grad()
def evaluate(root: nn.Module, data: TrainingData, *, step: int, world: World) -> dict[str, float]:
    """The mean loss of a held-out supervised token: each counts alike, on any number of ranks."""
    started = time.perf_counter()
    root.eval()
    loss = torch.zeros((), dtype=torch.float64)
    supervised = 0
    for batch in data.epoch():
        loss += root(**on_device(batch.inputs, world.device)).cpu()
        supervised += batch.supervised_tokens
    root.train()
    total, count = world.sum(float(loss), supervised)
    return {
        "step": step,
        "loss": total / max(1, count),
        "supervised_tokens": int(count),
        "eval_s": time.perf_counter() - started,
    }


def precision(config: Config, world: World) -> Precision:
    """Without a wish, bf16 compute on fp32 master weights on CUDA, and fp32 on a CPU."""
    if config.model.precision == "auto":
        return "mixed" if world.device.type == "cuda" else "fp32"
    return config.model.precision
