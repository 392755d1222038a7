"""AdamW, its learning rate as a function of the step, and clipping of the whole gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from training.config import Optim, Schedule


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


def make_optimizer(model: nn.Module, *, optim: Optim) -> torch.optim.AdamW:
    """AdamW in up to four groups: decayed or not, sharded or whole.

    Decay pulls matrices; norms, biases and per-head scalars are one-dimensional and stay free.
    torch's fused and foreach loops refuse sharded and whole parameters in one group.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups.setdefault((parameter.ndim > 1, isinstance(parameter, DTensor)), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": optim.weight_decay if decayed else 0.0}
            for (decayed, _), parameters in groups.items()
        ],
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        fused=True,
    )


def clip(parameters: Iterable[nn.Parameter], *, limit: float) -> Tensor:
    """Scales the gradients down to the limit where their common norm is above it; 0 leaves them.

    Returns:
        The norm before, over all ranks and parameters, a scalar on the device.
    """
    sharded: list[nn.Parameter] = []
    whole: list[nn.Parameter] = []
    for parameter in parameters:
        if parameter.grad is not None:
            (sharded if isinstance(parameter.grad, DTensor) else whole).append(parameter)
    norms = [
        torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None], foreach=True)
        for group in (sharded, whole)
        if group
    ]
    total: Tensor = torch.stack(
        [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    ).norm()
    if limit:
        for group in (sharded, whole):
            if group:
                torch.nn.utils.clip_grads_with_norm_(group, limit, total, foreach=True)
    return total
