"""Ranks, and how a model is spread over them: `fully_shard` and what makes its sums exact."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from training.config import Parallel, Precision
from training.data import OptionError


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

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all ranks, on the host: the device is not waited for."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        result: list[float] = total.tolist()
        return result

    def peak_memory(self) -> float:
        """Most memory since the start in GiB: allocated on the GPU, or resident on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**30
        unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss counts bytes there, KiB elsewhere
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30

    def barrier(self) -> None:
        """Waits until every rank is here, through the host."""
        self.sum(0.0)


@contextlib.contextmanager
def join(parallel: Parallel) -> Iterator[World]:
    """Joins the process group that torchrun describes, or one of a single process without it.

    Raises:
        OptionError: `parallel.device` is "cuda" and there is none, or fewer GPUs than local ranks.
    """
    cuda = parallel.device == "cuda" or (parallel.device == "auto" and torch.cuda.is_available())
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if cuda and local_rank >= torch.cuda.device_count():
        raise OptionError(
            f"local rank {local_rank} has no GPU, {torch.cuda.device_count()} seen here: "
            "lower --nproc-per-node or set parallel.device=cpu"
        )
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    alone: dict[str, Any] = {}
    if "RANK" not in os.environ:
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    # Both backends: counts go over gloo on the host, so that they never wait for the device.
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        timeout=timedelta(seconds=parallel.timeout),
        device_id=device if cuda else None,
        **alone,
    )
    try:
        size = dist.get_world_size()
        mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
        yield World(rank=dist.get_rank(), size=size, device=device, mesh=mesh)
    finally:
        dist.destroy_process_group()


def shard(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    *,
    world: World,
    precision: Precision,
    materialise: Callable[[nn.Module], None],
    whole: Callable[[nn.Module], set[nn.Parameter]],
) -> None:
    """Shards the root in place, block by block, so that no rank ever holds more than one block whole.

    Gradients become plain sums over ranks: the loss is divided by the step's count of supervised
    tokens already, and FSDP's own mean would weigh ranks alike that hold different counts.

    Args:
        root: Its parameters outside the blocks make the last group.
        blocks: Decoder layers, each a group that is gathered for its own forward and backward.
        world: The ranks.
        precision: "mixed" gathers bf16 copies of fp32 weights; sums over ranks are fp32 in any case.
        materialise: Called on each block, and at last on the root, before it is sharded: gives meta
            parameters their values.
        whole: The parameters of a module that stay whole on every rank; see `reduce_whole`.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "mixed" else None, reduce_dtype=torch.float32
    )
    for module in [*blocks, root]:
        materialise(module)
        fully_shard(module, mesh=world.mesh, mp_policy=policy, ignored_params=whole(module))
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum


def reduce_whole(parameters: Sequence[nn.Parameter]) -> None:
    """Sums over all ranks the gradients of the parameters that stay whole, in one collective.

    They are the few small ones kept in fp32, which FSDP ignores since a group of its has one dtype:
    about 0.7 million numbers in a model of 27 billion.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    for grad, total in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def on_device(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch on the device; from pinned memory the copy does not wait."""
    return {
        key: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        for key, value in inputs.items()
    }
