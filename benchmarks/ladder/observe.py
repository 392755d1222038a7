"""What a rung does, seen from inside its process without changing it.

A hook behind every optimizer's step marks the end of a step. From there on it is known which step a
compilation belongs to, and the profiler can be switched on for exactly one. Each step's line is written
at once, so a rung that is ended by its deadline leaves all that it did.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ladder.trace import summarise


class Observer:
    """Counts compilations and autotuning a step, notes memory and time, and profiles one step.

    Files in `folder`: `steps-RANK.jsonl`, a line a step; `profile-RANK.json`, the profiled step of rank 0.
    """

    def __init__(self, folder: Path, *, rank: int, profile_step: int) -> None:
        """Begins to watch.

        Args:
            folder: Where the files go.
            rank: Of this process.
            profile_step: The step that is profiled on rank 0, from 0; -1 for none.
        """
        self._folder = folder
        self._rank = rank
        self._profile_step = profile_step if rank == 0 else -1
        self._step = 0
        self._counts = {"compiled": 0, "loaded": 0, "autotuned": 0, "graphs": 0}
        self._profiler: Any = None
        self._tilelang = False
        self._cuda = torch.cuda.is_available()
        self._lines = (folder / f"steps-{rank}.jsonl").open("w", encoding="utf-8")
        self._begun = time.time()
        register_optimizer_step_post_hook(self._after_step)
        if self._cuda:
            self._watch_triton()

    def _watch_triton(self) -> None:
        from triton import knobs
        from triton.runtime.autotuner import Autotuner

        def compiled(*, cache_hit: bool, **_: Any) -> None:
            self._counts["loaded" if cache_hit else "compiled"] += 1

        benchmark = Autotuner._bench

        def counted(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            self._counts["autotuned"] += 1
            return benchmark(tuner, *args, **kwargs)

        knobs.compilation.listener = compiled
        Autotuner._bench = counted

    def _watch_tilelang(self) -> None:
        """Counts tilelang's compilations after the step that imports it; to import it costs seconds."""
        module = sys.modules.get("tilelang.jit.kernel")
        if module is None or self._tilelang:
            return
        self._tilelang = True
        made = module.JITKernel.__init__

        def counted(kernel: Any, *args: Any, **kwargs: Any) -> None:
            self._counts["loaded" if kwargs.get("from_database") else "compiled"] += 1
            made(kernel, *args, **kwargs)

        module.JITKernel.__init__ = counted

    def _graphs(self) -> int:
        """Frames that torch.compile has compiled so far; it is not imported for the question."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        return int(dynamo.counters["frames"]["ok"]) if dynamo else 0

    def _after_step(self, *_: Any) -> None:
        if self._step == self._profile_step:
            self._stop_profile()
        self._watch_tilelang()
        self._counts["graphs"] = self._graphs()
        line: dict[str, Any] = {"step": self._step, "time": time.time(), "begun": self._begun, **self._counts}
        if self._cuda:
            line["allocated"] = torch.cuda.max_memory_allocated()
            line["reserved"] = torch.cuda.max_memory_reserved()
            line["retries"] = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()
        self._step += 1
        if self._step == self._profile_step:
            self._start_profile()

    def _start_profile(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._synchronise()
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        self._profiler = profile(activities=kinds)
        self._profiler.start()

    def _stop_profile(self) -> None:
        self._synchronise()
        self._profiler.stop()
        found = summarise(self._profiler.profiler.kineto_results.events())
        self._profiler = None
        (self._folder / f"profile-{self._rank}.json").write_text(json.dumps(found), "utf-8")

    def _synchronise(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
