"""Compiling kernels: all candidates of an autotuner at once, and a count of what the caches hold."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def in_parallel() -> Iterator[None]:
    """Inside, triton compiles the configurations that an autotuner will measure on all cores at once.

    By itself it compiles each when its turn comes: about a hundred of one to two seconds for a first step.
    Compiling leaves Python's lock, so threads do. What is measured and chosen, and triton's cache of it, stay
    as they are; leaving the block puts the autotuner back. Without triton nothing happens.
    """
    try:
        from triton import AsyncCompileMode
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        yield
        return
    prune, measure = Autotuner.prune_configs, Autotuner._bench

    @functools.wraps(prune)
    def remember(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        tuner.not_compiled = prune(tuner, *args, **kwargs)
        return tuner.not_compiled

    @functools.wraps(measure)
    def compile_first(tuner: Any, *args: Any, config: Any, **call: Any) -> Any:
        # Only an autotuner that finds no earlier choice measures at all; the first time, all are compiled.
        candidates = vars(tuner).pop("not_compiled", ())
        options = {name: value for name, value in call.items() if name != "warmup"}
        # A candidate that does not compile raises again when its turn comes, where triton passes over it.
        with ThreadPoolExecutor(_cores()) as pool, AsyncCompileMode(pool, ignore_errors=True):
            for candidate in candidates:
                tuner.fn.warmup(*args, **options, **candidate.all_kwargs())
        return measure(tuner, *args, config=config, **call)

    Autotuner.prune_configs, Autotuner._bench = remember, compile_first
    try:
        yield
    finally:
        Autotuner.prune_configs, Autotuner._bench = prune, measure


def _cores() -> int:
    """This rank's share of the cores."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def count_cached() -> int:
    """How many compiled kernels the caches of triton and tilelang hold on disk, where the two put them."""
    home = os.environ.get("TRITON_HOME", os.path.expanduser("~"))  # "~" itself for a user without a home
    triton = os.environ.get("TRITON_CACHE_DIR", f"{home}/.triton/cache")
    tilelang = os.environ.get("TILELANG_CACHE_DIR", os.path.expanduser("~/.tilelang/cache"))
    return sum(1 for _ in Path(triton).rglob("*.cubin")) + sum(1 for _ in Path(tilelang).rglob("*.so"))
