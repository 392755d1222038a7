"""A trace of a few steps, read as the published case reads it: dearest operations, a diagnosis in words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

from training.errors import OptionError, writing
from training.files import replace_text


class StepProfiler:
    """Traces the steps FIRST to LAST and writes what it saw into a folder."""

    def __init__(self, steps: str, *, folder: Path, active: bool, trace: bool = True) -> None:
        """Starts nothing yet.

        Args:
            steps: "FIRST:LAST", counted from 1; "" traces nothing.
            folder: Gets `trace.json.gz`, which Perfetto opens, and `profile.json`.
            active: Whether this rank traces.
            trace: Write the trace itself; a million operations make a file of a gigabyte.

        Raises:
            OptionError: no two whole numbers in order.
        """
        self._first, self._last = _steps(steps)
        self._folder, self._active, self._trace = folder, active and bool(steps), trace
        self._profiler: Any = None
        self._compiled = 0

    def before(self, step: int) -> None:
        """Begins, if this is the first step to trace."""
        if self._active and step == self._first:
            self._compiled = _compilations()
            self._profiler = torch.profiler.profile(activities=_activities(), acc_events=True)
            self._profiler.start()

    def after(self, step: int, *, values: Mapping[str, Any]) -> str | None:
        """Ends, if this is the last step to trace.

        Args:
            step: Its number from 1.
            values: Its metrics: `fill`, and `mfu` where known.

        Returns:
            The tables and the diagnosis as text.
        """
        if not (self._active and self._profiler and step == self._last):
            return None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profiler.stop()
        summary = summarise(self._profiler, steps=self._last - self._first + 1)
        words = diagnose(
            summary,
            fill=values["fill"],
            mfu=values.get("mfu"),
            compilations=_compilations() - self._compiled,
        )
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_text(self._folder / "profile.json", json.dumps({**summary, "diagnosis": words}, indent=1))
        if self._trace:
            self._profiler.export_chrome_trace(str(self._folder / "trace.json.gz"))
        self._profiler = None
        return "\n".join([*table(summary), *words, f"written to {self._folder}"])


def _steps(text: str) -> tuple[int, int]:
    if not text:
        return (0, 0)
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise OptionError(f"run.profile = {text!r}: write FIRST:LAST, two steps counted from 1, as 5:8")
    return int(first), int(last)


def _activities() -> list[ProfilerActivity]:
    cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [ProfilerActivity.CPU, *cuda]


def _compilations() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@dataclass
class _Side:
    """Operations on one side, CPU or GPU."""

    calls: dict[str, int] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=dict)  # ns
    spans: list[tuple[int, int]] = field(default_factory=list)  # ns

    def add(self, name: str, start: int, end: int, *, inner: int = 0) -> None:
        """One call; `inner` is what calls within it took, which count for themselves."""
        self.calls[name] = self.calls.get(name, 0) + 1
        self.total[name] = self.total.get(name, 0) + end - start - inner
        self.spans.append((start, end))

    def summary(self, steps: int) -> dict[str, Any]:
        dearest = sorted(self.total, key=lambda name: -self.total[name])[:10]
        return {
            "operations": sum(self.calls.values()) / steps,
            "total_ms": sum(self.total.values()) / 1e6 / steps,
            "busy_ms": covered(self.spans) / 1e6 / steps,
            "dearest": [
                {
                    "name": name,
                    "calls": self.calls[name] / steps,
                    "mean_us": self.total[name] / self.calls[name] / 1e3,
                    "total_ms": self.total[name] / 1e6 / steps,
                }
                for name in dearest
            ],
        }


def covered(spans: Iterable[tuple[int, int]]) -> int:
    """Length of the union of intervals (start, end)."""
    length, reached = 0, -(2**63)
    for start, end in sorted(spans):
        length += max(0, end - max(start, reached))
        reached = max(reached, end)
    return length


_ELEMENTWISE = [f"aten::{name}" for name in ("add", "add_", "sub", "mul", "mul_", "div", "exp", "copy_")]


def own_time(calls: Iterable[tuple[int, int, int, str]]) -> Iterator[tuple[str, int, int, int]]:
    """What calls on the CPU took without the calls within them.

    Args:
        calls: Thread, start, end and name, times in ns; calls of a thread lie within each other or apart.

    Yields:
        Name, start, end, and the time of the calls directly within.
    """
    open_calls: list[list[Any]] = []  # thread, start, end, name, inner: each within the one before

    def close(until: tuple[int, int]) -> Iterator[tuple[str, int, int, int]]:
        while open_calls and (open_calls[-1][0], open_calls[-1][2]) <= until:
            _, start, end, name, inner = open_calls.pop()
            yield name, start, end, inner
            if open_calls:
                open_calls[-1][4] += end - start

    for thread, start, end, name in sorted(calls, key=lambda call: (call[0], call[1], -call[2])):
        if open_calls and open_calls[-1][0] != thread:
            yield from close((open_calls[-1][0], 2**63))
        yield from close((thread, start))
        open_calls.append([thread, start, end, name, 0])
    if open_calls:
        yield from close((open_calls[-1][0], 2**63))


def summarise(profiler: Any, *, steps: int) -> dict[str, Any]:
    """Reads a stopped `torch.profiler.profile` of some steps; all figures are for one step.

    Reads the raw events: torch's own `key_averages` builds a tree, minutes for a million of them.

    Returns:
        `step_ms`, and for `cpu` and `gpu` the number of operations, the sum of their own times, the time in
        which any ran, and the ten dearest with calls, mean and total of their own time, without what they
        call; for the GPU `exposed_ms` too, communication with no computation beside it, and for the CPU the
        calls of small batched products and of elementwise operations.
    """
    cpu, gpu, computing = _Side(), _Side(), list[tuple[int, int]]()
    calls: list[tuple[int, int, int, str]] = []
    first, last = 2**63, 0
    for event in profiler.profiler.kineto_results.events():
        start, duration, name = event.start_ns(), event.duration_ns(), event.name()
        on_gpu = event.device_type() != DeviceType.CPU
        if on_gpu and name.startswith(("ProfilerStep", "gpu_user_annotation", "nccl:")):
            continue  # spans that name others, not kernels
        if not on_gpu and not name.startswith(("aten::", "autograd::", "fla", "c10d", "nccl", "_", "F")):
            continue  # the runtime's own calls and annotations are no operations
        end = start + duration
        first, last = min(first, start), max(last, end)
        if not on_gpu:
            calls.append((event.start_thread_id(), start, end, name))
            continue
        gpu.add(name, start, end)
        if "nccl" not in name.lower():
            computing.append((start, end))
    for name, start, end, inner in own_time(calls):
        cpu.add(name, start, end, inner=inner)
    busy = covered(gpu.spans)
    return {
        "steps": steps,
        "step_ms": max(0, last - first) / 1e6 / steps,
        "cpu": {
            **cpu.summary(steps),
            "bmm_calls": cpu.calls.get("aten::bmm", 0) / steps,
            "elementwise_calls": sum(cpu.calls.get(name, 0) for name in _ELEMENTWISE) / steps,
        },
        "gpu": {**gpu.summary(steps), "exposed_ms": (busy - covered(computing)) / 1e6 / steps},
    }


def diagnose(summary: Mapping[str, Any], *, fill: float, mfu: float | None, compilations: int) -> list[str]:
    """What limits the step, in words; each sentence says the figure that it rests on."""
    step, cpu, gpu = summary["step_ms"], summary["cpu"], summary["gpu"]
    words = []
    if gpu["operations"]:
        share = gpu["busy_ms"] / step
        useful = "" if mfu is None else f", of its arithmetic {mfu:.0%} is used (MFU)"
        words.append(f"GPU utilisation {share:.0%}: some kernel ran in that share of the step{useful}")
        words.append(
            f"CPU time {cpu['total_ms']:,.0f} ms against GPU time {gpu['total_ms']:,.0f} ms a step: "
            f"{cpu['operations']:,.0f} operations there, {gpu['operations']:,.0f} kernels here"
        )
        if share < 0.85:
            words.append(
                f"launch-bound: the GPU waited {step - gpu['busy_ms']:.0f} of {step:.0f} ms for the CPU, "
                f"which prepares {cpu['operations']:,.0f} operations a step"
            )
        if gpu["exposed_ms"] > 0.05 * step:
            words.append(
                f"communication not hidden: {gpu['exposed_ms']:.0f} of {step:.0f} ms with nothing computing "
                "beside it; gather further ahead (parallel.prefetch), or more buffers a micro-batch"
            )
    if cpu["bmm_calls"] > 1000:
        words.append(
            f"reference kernels: {cpu['bmm_calls']:,.0f} small batched products and "
            f"{cpu['elementwise_calls']:,.0f} elementwise calls a step, as the written-out delta rule makes; "
            "the fused kernels are not bound"
        )
    if fill < 0.9:
        words.append(f"padding: {1 - fill:.0%} of the slots hold no token")
    if compilations:
        words.append(f"recompilation: {compilations} graphs were compiled within these steps")
    return words or ["nothing stands out"]


def table(summary: Mapping[str, Any]) -> list[str]:
    """The ten dearest operations of both sides, as the published case prints them."""
    lines = [f"a step of {summary['step_ms']:,.1f} ms, mean of {summary['steps']}"]
    for side in ("cpu", "gpu"):
        found = summary[side]
        if not found["operations"]:
            continue
        lines.append(
            f"{side.upper()}: {found['operations']:,.0f} operations, {found['total_ms']:,.1f} ms in all, "
            f"any running in {found['busy_ms']:,.1f} ms\n"
            f"  {'calls':>9} {'mean us':>10} {'total ms':>10}  operation"
        )
        dearest: Sequence[Mapping[str, Any]] = found["dearest"]
        lines += [
            f"  {row['calls']:>9,.0f} {row['mean_us']:>10,.1f} {row['total_ms']:>10,.1f}  {row['name'][:70]}"
            for row in dearest
        ]
    return lines
