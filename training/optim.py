"""AdamW, its learning rate as a function of the step, and clipping of the whole gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from training.config import Optim, Schedule
from training.errors import OptionError


def learning_rate(step: int, *, schedule: Schedule, steps: int, peak: float) -> float:
    """The learning rate of a step, counted from 0: a function, so a resumed run has nothing to restore.

    warm-up         ↗ to the peak in `warmup` steps, the first of which is not 0
    cosine, linear  ↘ from there to `floor` x peak after the last step, which is not wasted at 0
    wsd             → until the last `decay` steps, then ↘ linearly
    constant        →
    """
    if step < schedule.warmup:
        return peak * (step + 1) / schedule.warmup
    start = schedule.warmup if schedule.kind != "wsd" else max(schedule.warmup, steps - schedule.decay)
    done = min(1.0, max(0.0, (step - start) / max(1, steps - start)))
    if schedule.kind == "constant":
        share = 1.0
    elif schedule.kind == "cosine":
        share = (1 + math.cos(math.pi * done)) / 2
    else:
        share = 1 - done
    return peak * (schedule.floor + (1 - schedule.floor) * share)


def make_optimizer(model: nn.Module, *, optim: Optim) -> torch.optim.Optimizer:
    """AdamW in up to four groups: decayed or not, sharded or whole.

    Decay pulls matrices; norms, biases and per-head scalars are one-dimensional and stay free.
    torch's fused loop refuses sharded and whole parameters in one group.

    Raises:
        OptionError: torchao is missing, or stochastic rounding is asked for without bf16 weights.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups.setdefault((parameter.ndim > 1, isinstance(parameter, DTensor)), []).append(parameter)
    parameters = [
        {"params": group, "weight_decay": optim.weight_decay if decayed else 0.0}
        for (decayed, _), group in groups.items()
    ]
    options: dict[str, Any] = {"lr": optim.lr, "betas": (optim.beta1, optim.beta2), "eps": optim.eps}
    stochastic = optim.rounding == "stochastic"
    if stochastic and not any(p.dtype is torch.bfloat16 for p in model.parameters()):
        raise OptionError("optim.rounding=stochastic is for bf16 weights: set model.precision=bf16")
    if optim.states == "weights" and not stochastic:
        return torch.optim.AdamW(parameters, **options, fused=True)
    try:
        from torchao import optim as torchao
    except ImportError as error:
        raise OptionError(
            f"8-bit states and stochastic rounding need torchao ({error}): pip install torchao"
        ) from error
    kind = torchao.AdamW8bit if optim.states == "8bit" else torchao._AdamW
    on_shards: Any = type(f"{kind.__name__}OnShards", (kind,), {"step": _step_on_shards})
    optimizer: torch.optim.Optimizer = on_shards(parameters, **options, bf16_stochastic_round=stochastic)
    return optimizer


@torch.no_grad()
def _step_on_shards(self: Any, closure: None = None) -> None:
    """Torchao's step on each rank's own part: its 8-bit tensors don't work inside of sharded ones.

    AdamW is elementwise, so a part needs no other. torchao compiles the update of each shape at its first.
    """
    from torchao.optim.adam import single_param_adam

    update = torch.compile(single_param_adam, fullgraph=True, dynamic=False)
    with torch._dynamo.utils.disable_cache_limit():
        for group in self.param_groups:
            # A compiled update of each shape: dynamo looks through all of them, the one last used first.
            for parameter in sorted(group["params"], key=lambda parameter: parameter.shape):
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = self._new_buffer(parameter, True)
                    state["exp_avg_sq"] = self._new_buffer(parameter, False)
                state["step"] += 1
                update(  # type: ignore[no-untyped-call]
                    _local(parameter.detach()),
                    _local(parameter.grad),
                    state["step"],
                    _local(state["exp_avg"]),
                    _local(state["exp_avg_sq"]),
                    None,
                    group["lr"],
                    *group["betas"],
                    group["weight_decay"],
                    group["eps"],
                    self.is_adamw,
                    self.bf16_stochastic_round and parameter.dtype is torch.bfloat16,
                )


def _local(tensor: Tensor) -> Tensor:
    """This rank's part, in the same memory."""
    local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if is_traceable_wrapper_subclass(local):
        # A sharded tensor holds a view of its part: torch.compile retraces it, and 8-bit tensors have none.
        local = transform_subclass(local, lambda _, inner: inner)  # type: ignore[no-untyped-call]
    part: Tensor = local
    return part


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """For the next step; torchao keeps it in a tensor, so that its compiled step stays valid."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """The norm of the whole gradient, over all ranks and parameters. Waits for the device."""
    shards, whole = _gradients(parameters)
    squares = _sum_of_squares([grad.to_local() for grad in shards], device=(shards or whole)[0].device)
    for mesh in {grad.device_mesh for grad in shards}:
        dist.all_reduce(squares, group=mesh.get_group("shard"))
    return float((squares + _sum_of_squares(whole, device=squares.device).to(squares.device)).sqrt())


def clip(parameters: Iterable[nn.Parameter], *, norm: float, limit: float) -> None:
    """Scales the gradients down to the limit where their norm is above it; a limit of 0 leaves them.

    A norm known on the host costs one vectorised pass over the gradients, and none below the limit. A factor
    in an fp32 tensor takes torch's slow path for bf16: 24 ms a step for 4.4 billion gradients on an H200.
    """
    if limit and norm > limit:
        shards, whole = _gradients(parameters)
        for tensors in ([grad.to_local() for grad in shards], whole):
            if tensors:
                torch._foreach_mul_(tensors, limit / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_


def _gradients(parameters: Iterable[nn.Parameter]) -> tuple[list[DTensor], list[Tensor]]:
    """Those in shards, with parallel.offload on the host, and those that every rank has whole."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shards = [grad for grad in grads if isinstance(grad, DTensor)]
    return shards, [grad for grad in grads if not isinstance(grad, DTensor)]


def _sum_of_squares(tensors: list[Tensor], *, device: torch.device) -> Tensor:
    """fp32 scalar; bf16 gradients are squared and added in fp32, which torch's own total norm does not."""
    if not tensors:
        return torch.zeros((), device=device)
    return torch.stack(torch._foreach_norm(tensors, dtype=torch.float32)).square().sum()
