"""Compiling kernels: what it takes, all candidates of an autotuner at once, and what the caches hold."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_HOST_COMPILERS = ("g++", "clang++", "c++")


def tilelang_unready() -> str | None:
    """Why tilelang, which imports, will have no kernel when one is first called; None where it will.

    It compiles when a kernel is first called, those of the backward pass in the first backward pass. What its
    cache holds is not compiled. Which kernels a model needs shows in its first step only, so any of this
    version in the cache are taken for those.
    """
    cause = no_compiler()
    if cause is None or (_toolkit() and _cached_by_tilelang()):  # without a toolkit it looks into no cache
        return None
    return cause


def no_compiler() -> str | None:
    """Why tilelang, which imports, can't compile, and what to install; None where it can.

    Source: tilelang 0.1.15: the search for the toolkit in env.py, the command in contrib/nvcc.py, the host
    compiler in contrib/cc.py.
    """
    if not os.path.exists(os.path.join(_toolkit(), "bin", "nvcc")):
        place = f"in {_toolkit()}/bin" if _toolkit() else "on the PATH or in /usr/local/cuda"
        return (
            f"tilelang compiles its kernels with nvcc, and there is none {place}: install the CUDA toolkit "
            "and set CUDA_HOME to it, or pip install 'tilelang[nvcc]'"
        )
    if not (os.environ.get("CXX") or os.environ.get("CC") or any(map(shutil.which, _HOST_COMPILERS))):
        return "tilelang compiles its kernels with nvcc, which needs a C++ compiler: install g++, or set CXX"
    return None


def _toolkit() -> str:
    """Where tilelang found the CUDA toolkit when it was imported; "" where it found none."""
    from tilelang.env import CUDA_HOME

    found: str = CUDA_HOME
    return found


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
    return sum(1 for _ in Path(triton).rglob("*.cubin")) + sum(1 for _ in _tilelang_cache().rglob("*.so"))


def _tilelang_cache() -> Path:
    return Path(os.environ.get("TILELANG_CACHE_DIR", os.path.expanduser("~/.tilelang/cache")))


def _cached_by_tilelang() -> bool:
    """Whether its cache holds kernels of this version, VERSION/PLATFORM/kernels/KEY/executable.so."""
    from tilelang import __version__

    public = __version__.partition("+")[0]
    versions = (path for path in _tilelang_cache().glob("*") if path.name.partition("_")[0] == public)
    return any(any(path.glob("*/kernels/*/*.so")) for path in versions)
