"""Runs flash-linear-attention's real kernels on a CPU, in triton's interpreter, against the references.

Prints one JSON object: kernel -> {"forward", "gradients": how far from the reference, relative;
"moved": the most that the other examples' outputs moved when one was replaced}.
"""

import builtins
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import torch.nn.functional as F
import triton.language as tl
from triton.runtime import autotuner, interpreter

LENGTHS = (1, 63, 64, 65, 7)
TOKENS = sum(LENGTHS)


def prepare() -> None:
    """One configuration an autotuner, as each is minutes here; loop counters as the kernels expect them."""
    tuned = autotuner.Autotuner.__init__

    def first_only(self: Any, fn: Any, names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        tuned(self, fn, names, configs[:1], *args, **kwargs)

    autotuner.Autotuner.__init__ = first_only
    import fla.modules.causal_conv1d
    import fla.ops.gated_delta_rule
    import fla.ops.kda
    import fla.ops.simple_gla  # noqa: F401

    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            module.range = counting  # type: ignore[attr-defined]


def counting(*bounds: Any) -> Iterator[Any]:
    """`range` whose numbers are triton scalars where its bounds are; the interpreter's gives plain ints."""
    scalar = any(isinstance(bound, tl.core.tensor) for bound in bounds)
    for number in builtins.range(*(int(bound) for bound in bounds)):
        if scalar:
            handle = interpreter.TensorHandle(np.array([number], np.int32), tl.int32)
            yield tl.core.tensor(handle, tl.int32)
        else:
            yield number


def compare(
    ours: Callable[..., Any], reference: Callable[..., Any], inputs: Sequence[torch.Tensor], *, along: int
) -> dict[str, float]:
    """How far ours is from the reference, forward and backward; and what moves when example 1 is replaced."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    results = []
    for function in (ours, reference):
        out = function(*inputs)
        draw = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        results.append((out.detach(), torch.autograd.grad((out * draw).sum(), inputs)))
    (out, gradients), (expected, expected_gradients) = results

    start, end = LENGTHS[0], LENGTHS[0] + LENGTHS[1]
    replaced = []
    for tensor in inputs:
        copy = tensor.detach().clone()
        if copy.shape[along % copy.dim()] == TOKENS and copy.dim() > 1:
            copy.narrow(along, start, end - start).mul_(0.5)
        replaced.append(copy)
    with torch.no_grad():
        again = ours(*replaced)
    moved = (again - out).abs()
    inside = moved.narrow(along, start, end - start).clone()
    moved.narrow(along, start, end - start).zero_()
    if not inside.max() > 0:
        raise AssertionError("the replaced example did not move")
    return {
        "forward": relative(out, expected),
        "gradients": max(map(relative, gradients, expected_gradients)),
        "moved": float(moved.max()),
    }


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def main() -> None:
    prepare()
    # Only now: transformers imports fla by itself, and autotuners are made when a kernel's module is.
    from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
    from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn, torch_chunk_gated_delta_rule

    from training.kernels import make_batch, with_chunk_indices
    from training.kernels.convolution import by_sequence, fla_convolution
    from training.kernels.recurrence import (
        DELTA_RULE,
        KIMI_DELTA,
        STATE_SPACE,
        fla_delta_rule,
        fla_kimi_delta,
        fla_state_space,
        rule_by_sequence,
        scan_by_sequence,
    )

    torch.manual_seed(0)
    batch = with_chunk_indices(make_batch(torch.zeros(TOKENS, dtype=torch.long), LENGTHS))
    ends = {"cu_seq_lens_q": batch["cu_seq_lens_q"], "seq_idx": batch["seq_idx"]}
    both = {**ends, "cu_seqlens": batch["cu_seq_lens_q"], "chunk_indices": batch["chunk_indices"]}
    normal = {"use_qk_l2norm_in_kernel": True}

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape)

    def delta(rule: Callable[..., Any], boundaries: dict[str, Any]) -> Callable[..., Any]:
        return lambda q, k, v, g, b: rule(q, k, v, g=g, beta=b, **normal, **boundaries)[0]

    def convolve(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, w, b: function(x, w, b, activation="silu", **ends)

    def scan(function: Callable[..., Any]) -> Callable[..., Any]:
        options = {
            "chunk_size": 16,
            "dt_softplus": True,
            "dt_limit": (0.001, float("inf")),
            "z": None,
            **ends,
        }
        return lambda x, dt, a, b, c, d, bias: function(x, dt, a, b, c, D=d, dt_bias=bias, **options)

    gates = F.logsigmoid(drawn(1, TOKENS, 2))
    rule = rule_by_sequence(DELTA_RULE, inspect.unwrap(torch_chunk_gated_delta_rule))
    kimi = rule_by_sequence(KIMI_DELTA, inspect.unwrap(chunk_kimi_delta_attention))
    space = scan_by_sequence(STATE_SPACE, inspect.unwrap(mamba2_chunk_scan))
    heads = [drawn(1, TOKENS, count, 16) for count in (1, 1, 2)]
    kimi_heads = [drawn(1, TOKENS, 1, 16) for _ in range(3)]
    states = [drawn(1, TOKENS, 4, 8), drawn(1, TOKENS, 4), -torch.rand(4) * 3]
    states += [drawn(1, TOKENS, 2, 16), drawn(1, TOKENS, 2, 16), drawn(4), drawn(4)]
    found = {
        "delta rule": compare(
            delta(fla_delta_rule, both), delta(rule, both), [*heads, gates, torch.rand(1, TOKENS, 2)], along=1
        ),
        "convolution": compare(
            convolve(fla_convolution),
            convolve(by_sequence(inspect.unwrap(causal_conv1d_fn))),
            [drawn(1, TOKENS, 24).transpose(1, 2), drawn(24, 4), drawn(24)],
            along=2,
        ),
        "state space": compare(scan(fla_state_space), scan(space), states, along=1),
        "Kimi delta attention": compare(
            delta(fla_kimi_delta, ends),
            delta(kimi, ends),
            [*kimi_heads, F.logsigmoid(drawn(1, TOKENS, 1, 16)), torch.rand(1, TOKENS, 1)],
            along=1,
        ),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
