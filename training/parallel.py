"""Ranks, and how a model is spread over them: `fully_shard` and what makes its sums exact."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from training.config import Parallel, Precision
from training.errors import OptionError, Signalled
from training.kernels import with_chunk_indices
from training.launch import meet


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all: torchrun's numbers, its device and the mesh over all ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def chief(self) -> bool:
        """Whether this is rank 0, which alone prints and writes."""
        return self.rank == 0

    @property
    def local_size(self) -> int:
        """How many ranks share this machine."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all ranks, on the host: the device is not waited for."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        result: list[float] = total.tolist()
        return result

    def gather(self, value: Any) -> list[Any]:
        """The value of each rank, in their order, on the host: a message a rank, so for rare events."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def peak_memory(self) -> tuple[float, float]:
        """Most memory since the start in GiB: allocated and reserved on the GPU, or resident on a CPU."""
        if self.device.type == "cuda":
            peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            return peaks[0] / 2**30, peaks[1] / 2**30
        unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss counts bytes there, KiB elsewhere
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
        return resident, resident

    def barrier(self) -> None:
        """Waits until every rank is here, through the host."""
        self.sum(0.0)


@contextlib.contextmanager
def join(parallel: Parallel) -> Iterator[World]:
    """Joins the process group that torchrun describes, or one of a single process without it.

    Raises:
        OptionError: `parallel.device` is "cuda" and there is none, or fewer GPUs than local ranks; or
            `parallel.offload` without a GPU.
        Unmet: some rank never came.
    """
    cuda = parallel.device == "cuda" or (parallel.device == "auto" and torch.cuda.is_available())
    if parallel.offload and not cuda:
        raise OptionError("parallel.offload moves from GPUs to the host, and there is no GPU: leave it off")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if cuda and local_rank >= torch.cuda.device_count():
        raise OptionError(
            f"local rank {local_rank} has no GPU, {torch.cuda.device_count()} seen here: "
            "lower --nproc-per-node or set parallel.device=cpu"
        )
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=parallel.timeout)
    store, rank, size = meet(timeout=timeout) if "RANK" in os.environ else (dist.HashStore(), 0, 1)  # type: ignore[attr-defined]
    # Both backends: counts go over gloo on the host, so that they never wait for the device.
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        timeout=timeout,
        device_id=device if cuda else None,
        store=store,
        rank=rank,
        world_size=size,
    )
    failed = True
    try:
        mesh = make_mesh(device, size=size, replicas=parallel.replicas)
        world = World(rank=rank, size=size, device=device, mesh=mesh)
        try:
            yield world
        except Signalled:
            world.barrier()  # all ranks have it; where one ends first, rank 0 is ended amid its loggers' ends
            raise
        failed = False
    finally:
        # After an error NCCL's end would wait for ranks that may never come, and keep the error from being
        # said (seen on two H200 with a rank that slept); the end of the process does without.
        if not (cuda and failed):
            dist.destroy_process_group()


def make_mesh(device: torch.device, *, size: int, replicas: int) -> DeviceMesh:
    """The ranks in a row to shard over, or in `replicas` rows.

    Raises:
        OptionError: the rows can't be equally long.
    """
    if size % replicas:
        raise OptionError(f"parallel.replicas={replicas} does not divide {size} ranks")
    if replicas == 1:
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))


def shard(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    *,
    ends: Sequence[nn.Module],
    world: World,
    parallel: Parallel,
    precision: Precision,
    materialise: Callable[[nn.Module], None],
    whole: Callable[[nn.Module], set[nn.Parameter]],
) -> None:
    """Shards the root in place, block by block, so that no rank ever holds more than one block whole.

    Gradients become plain sums over ranks: the loss is divided by the step's count of supervised
    tokens already, and FSDP's own mean would weigh ranks alike that hold different counts.

    Args:
        root: What is in no block and no end makes the last group.
        blocks: Decoder layers, each a group that is gathered for its own forward and backward.
        ends: Embedding and head, if they share no weight: groups of their own, since each is needed for a
            moment only, and the head's gradients are then reduced when the backward pass begins.
        world: The ranks.
        parallel: How far to gather ahead, what to keep, and whether the shards lie on the host.
        precision: "mixed" gathers bf16 copies of fp32 weights; sums over ranks are fp32 in any case.
        materialise: Called on each group before it is sharded: gives meta parameters their values.
        whole: The parameters of a module that stay whole on every rank; see `reduce_whole`.
    """
    if world.size == 1 and precision != "mixed" and not parallel.offload:
        materialise(root)  # nothing to shard; FSDP would copy every weight and gradient on the way
        return
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "mixed" else None, reduce_dtype=torch.float32
    )
    offload = CPUOffloadPolicy() if parallel.offload else OffloadPolicy()
    kept = {*blocks[len(blocks) - parallel.keep_gathered :], *ends[1:]}
    for module in [*blocks, *ends, root]:
        materialise(module)
        fully_shard(
            module,
            mesh=world.mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=None if module is root else module not in kept,
            ignored_params=whole(module),
        )
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum
    for embedding in ends[:1]:
        embedding.set_unshard_in_backward(False)  # type: ignore[operator]  # its gradient needs no weight
    if parallel.prefetch > 1:  # FSDP gathers one ahead by itself
        for number, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + parallel.prefetch])  # type: ignore[operator]
            block.set_modules_to_backward_prefetch(blocks[max(0, number - parallel.prefetch) : number][::-1])  # type: ignore[operator]


def reduce_whole(parameters: Sequence[nn.Parameter]) -> None:
    """Sums over all ranks the gradients of the parameters that stay whole, in one collective.

    They are the few small ones kept in fp32, which FSDP ignores since a group of its has one dtype:
    about 0.7 million numbers in a model of 27 billion.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads or dist.get_world_size() == 1:
        return
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    for grad, total in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


class Stopwatch:
    """Seconds between marks: of the device's own clock on CUDA, so that marking does not wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Marks a moment; on CUDA, the moment when the device has done what was given to it so far."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def idle(self) -> bool:
        """Whether the device has done what was given to it so far; does not wait for it."""
        return not self._cuda or torch.cuda.current_stream().query()

    def split(self) -> list[float]:
        """Seconds from each mark to the next. Waits for the device."""
        if not self._cuda:
            return [after - before for before, after in itertools.pairwise(self._marks)]
        self._marks[-1].synchronize()
        pairs = itertools.pairwise(self._marks)
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]


def on_device(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch on the device; from pinned memory the copy does not wait.

    On CUDA with `chunk_indices`, which flash-linear-attention would otherwise fetch from the device.
    """
    if device.type == "cuda":
        inputs = with_chunk_indices(inputs)
    return {
        key: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        for key, value in inputs.items()
    }
