"""A profiled step in numbers: the tables that the published case read, and where the GPU's time went.

Read from the profiler's raw events. Its own `key_averages` builds a tree in Python first: 160 µs an event,
minutes for the million events of a step with reference kernels; this takes 5 µs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.autograd import DeviceType

TOP = 10

# Kind of GPU work -> words in the kernel's name, in the order in which they are tried.
KINDS: dict[str, tuple[str, ...]] = {
    "communication": ("nccl",),
    "delta rule": ("gdr", "gated_delta", "kkt", "chunk_fwd", "chunk_bwd", "wy_", "recompute_w_u", "cumsum"),
    "convolution": ("conv1d", "conv_depthwise"),
    "attention": ("flash", "fmha", "attention"),
    "optimizer": ("fusedadam", "fused_adam", "multi_tensor_apply", "adamw"),
    "FSDP copies": ("split_with_sizes", "chunk_cat"),
    "loss": ("cross_entropy", "softmax", "nll_loss", "logsumexp"),
    "matrix products": ("gemm", "cutlass", "nvjet", "xmma", "s16816", "sm90_", "splitk"),
    "norms": ("rms", "layer_norm", "l2norm"),
    "copies and fills": ("memcpy", "memset", "copy_kernel", "fillfunctor", "direct_copy"),
}


def kind_of(kernel: str) -> str:
    """The kind of work that a GPU kernel does, by its name."""
    name = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "elementwise")


def summarise(events: Iterable[Any]) -> dict[str, Any]:
    """Tables of one step.

    Args:
        events: `profiler.profiler.kineto_results.events()`.

    Returns:
        `cpu` and `gpu`: `operations`, `total_ms`, `top` (name, calls, mean_us, total_ms); the CPU's total
        counts each moment of a thread once, the GPU's adds all kernels. On a GPU also `busy_ms` (some
        kernel ran), `span_ms` (from the first to the last), `exposed_communication_ms` (only
        communication ran) and `by_kind_ms`.
    """
    cpu: dict[str, list[int]] = {}
    gpu: dict[str, list[int]] = {}
    threads: dict[int, list[tuple[int, int]]] = {}
    work: list[tuple[int, int]] = []
    traffic: list[tuple[int, int]] = []
    kinds: dict[str, int] = {}
    for event in events:
        if event.is_user_annotation() or event.is_hidden_event():
            continue
        name, start, duration = event.name(), event.start_ns(), event.duration_ns()
        on_cpu = event.device_type() == DeviceType.CPU
        entry = (cpu if on_cpu else gpu).setdefault(name, [0, 0])
        entry[0] += 1
        entry[1] += duration
        if on_cpu:
            threads.setdefault(event.start_thread_id(), []).append((start, start + duration))
            continue
        kind = kind_of(name)
        kinds[kind] = kinds.get(kind, 0) + duration
        (traffic if kind == "communication" else work).append((start, start + duration))
    found: dict[str, Any] = {"cpu": _table(cpu, total=sum(_covered(spans) for spans in threads.values()))}
    if work:
        everything = work + traffic
        busy = _covered(everything)
        found["gpu"] = _table(gpu, total=sum(total for _, total in gpu.values())) | {
            "busy_ms": busy / 1e6,
            "span_ms": (max(end for _, end in everything) - min(start for start, _ in everything)) / 1e6,
            "exposed_communication_ms": (busy - _covered(work)) / 1e6,
            "by_kind_ms": {kind: ns / 1e6 for kind, ns in sorted(kinds.items(), key=lambda item: -item[1])},
        }
    return found


def _table(totals: dict[str, list[int]], *, total: int) -> dict[str, Any]:
    dearest = sorted(totals.items(), key=lambda item: -item[1][1])[:TOP]
    return {
        "operations": sum(calls for calls, _ in totals.values()),
        "total_ms": total / 1e6,
        "top": [
            {"name": name[:160], "calls": calls, "mean_us": ns / calls / 1e3, "total_ms": ns / 1e6}
            for name, (calls, ns) in dearest
        ],
    }


def _covered(spans: Sequence[tuple[int, int]]) -> int:
    """Nanoseconds that at least one of the spans covers."""
    covered, reached = 0, -1
    for start, end in sorted(spans):
        if end > reached:
            covered += end - max(start, reached)
            reached = end
    return covered
