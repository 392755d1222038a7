"""A trace of a few steps, read as the published case reads it: dearest operations, a diagnosis in words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

from training.data import OptionError
from training.faults import writing


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
            (self._folder / "profile.json").write_text(json.dumps({**summary, "diagnosis": words}, indent=1))
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

    def add(self, name: str, start: int, duration: int) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        self.total[name] = self.total.get(name, 0) + duration
        self.spans.append((start, start + duration))

    def summary(self, steps: int) -> dict[str, Any]:
        dearest = sorted(self.total, key=lambda name: -self.total[name])[:10]
        return {
            "operations": sum(self.calls.values()) / steps,
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


def summarise(profiler: Any, *, steps: int) -> dict[str, Any]:
    """Reads a stopped `torch.profiler.profile` of some steps; all figures are for one step.

    Reads the raw events: torch's own `key_averages` builds a tree, minutes for a million of them.

    Returns:
        `step_ms`, and for `cpu` and `gpu` the number of operations, the time in which any ran, and the ten
        dearest with calls, mean and total time; for the GPU `exposed_ms` too, communication with no
        computation beside it, and `bmm_calls` for the CPU.
    """
    cpu, gpu, computing = _Side(), _Side(), list[tuple[int, int]]()
    first, last = 2**63, 0
    for event in profiler.profiler.kineto_results.events():
        start, duration, name = event.start_ns(), event.duration_ns(), event.name()
        on_gpu = event.device_type() != DeviceType.CPU
        if on_gpu and name.startswith(("ProfilerStep", "gpu_user_annotation", "nccl:")):
            continue  # spans that name others, not kernels
        if not on_gpu and not name.startswith(("aten::", "autograd::", "fla", "c10d", "nccl", "_", "F")):
            continue  # the runtime's own calls and annotations are no operations
        first, last = min(first, start), max(last, start + duration)
        (gpu if on_gpu else cpu).add(name, start, duration)
        if on_gpu and "nccl" not in name.lower():
            computing.append((start, start + duration))
    busy = covered(gpu.spans)
    return {
        "steps": steps,
        "step_ms": max(0, last - first) / 1e6 / steps,
        "cpu": {**cpu.summary(steps), "bmm_calls": cpu.calls.get("aten::bmm", 0) / steps},
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
            f"reference kernels: {cpu['bmm_calls']:,.0f} small batched products a step, as the written-out "
            "delta rule makes; the fused kernels are not bound"
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
            f"{side.upper()}: {found['operations']:,.0f} operations, busy {found['busy_ms']:,.1f} ms\n"
            f"  {'calls':>9} {'mean us':>10} {'total ms':>10}  operation"
        )
        dearest: Sequence[Mapping[str, Any]] = found["dearest"]
        lines += [
            f"  {row['calls']:>9,.0f} {row['mean_us']:>10,.1f} {row['total_ms']:>10,.1f}  {row['name'][:70]}"
            for row in dearest
        ]
    return lines
