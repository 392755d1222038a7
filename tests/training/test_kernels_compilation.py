"""All of an autotuner's candidates compiled at once, with a stand-in for triton; caches counted."""

import os
import subprocess
import sys
import threading
import types
from concurrent.futures import Executor, Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from training.faults import naming_failures
from training.kernels import KernelError, compilation


class AsyncCompileMode:
    """As triton's: what is compiled inside goes to the executor, and leaving waits for it."""

    active: "AsyncCompileMode | None" = None

    def __init__(self, executor: Executor, *, ignore_errors: bool) -> None:
        self.executor, self.ignore_errors = executor, ignore_errors
        self.futures: list[Future[None]] = []

    def __enter__(self) -> None:
        AsyncCompileMode.active = self

    def __exit__(self, *_: object) -> None:
        AsyncCompileMode.active = None
        for future in self.futures:
            assert future.exception() is None or self.ignore_errors


class Candidate:
    def __init__(self, size: int) -> None:
        self.size = size

    def all_kwargs(self) -> dict[str, int]:
        return {"size": self.size}


class Kernel:
    """Compiles a size once; three compilations meet at a barrier, so none is done before all have begun."""

    def __init__(self, at_once: int) -> None:
        self.compiled: set[int] = set()
        self.launched: list[int] = []
        self.meeting = threading.Barrier(at_once)

    def compile(self, size: int) -> None:
        self.meeting.wait(timeout=10)
        if size == 4:
            raise ValueError("more shared memory than there is")
        self.compiled.add(size)

    def warmup(self, x: float, *, grid: int, size: int) -> None:
        mode = AsyncCompileMode.active
        assert mode is not None
        mode.futures.append(mode.executor.submit(self.compile, size))

    def run(self, x: float, *, grid: int, warmup: bool, size: int) -> None:
        assert not warmup
        assert size in self.compiled, "was compiled one by one"
        self.launched.append(size)


class Autotuner:
    """As triton's: prunes, measures the candidates unless an earlier choice is known, launches the best."""

    def __init__(self, kernel: Kernel, sizes: tuple[int, ...]) -> None:
        self.fn, self.configs, self.choice = kernel, [Candidate(size) for size in sizes], 0

    def prune_configs(self, call: dict[str, Any]) -> list[Candidate]:
        return [one for one in self.configs if one.size != 8]

    def _bench(self, *args: Any, config: Candidate, **call: Any) -> float:
        try:
            self.fn.run(*args, **call, **config.all_kwargs())
        except AssertionError:
            return float("inf") if config.size == 4 else pytest.fail("was compiled one by one")
        return config.size

    def run(self, *args: Any, **call: Any) -> None:
        candidates = self.prune_configs(call)
        if not self.choice:
            self.choice = min(candidates, key=lambda one: self._bench(*args, config=one, **call)).size
        self.fn.run(*args, **call, size=self.choice)


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {
        name: types.ModuleType(name) for name in ("triton", "triton.runtime", "triton.runtime.autotuner")
    }
    packages["triton"].AsyncCompileMode = AsyncCompileMode  # type: ignore[attr-defined]
    packages["triton.runtime.autotuner"].Autotuner = Autotuner  # type: ignore[attr-defined]
    for name, module in packages.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(compilation, "_cores", lambda: 3)


def test_candidates_are_compiled_at_once() -> None:
    """What is left after pruning compiles side by side, once; a candidate that can't is passed over."""
    kernel = Kernel(at_once=3)
    tuner = Autotuner(kernel, (1, 2, 4, 8))
    with compilation.in_parallel():
        tuner.run(0.5, grid=7, warmup=False)
        tuner.run(0.5, grid=7, warmup=False)
    assert kernel.compiled == {1, 2}
    assert kernel.launched == [1, 2, 1, 1]


def test_an_earlier_choice_compiles_nothing() -> None:
    """An autotuner that knows its choice, from triton's cache on disk, does not compile the others."""
    kernel = Kernel(at_once=1)
    kernel.compiled.add(2)
    tuner = Autotuner(kernel, (1, 2))
    tuner.choice = 2
    with compilation.in_parallel():
        tuner.run(0.5, grid=7, warmup=False)
    assert kernel.compiled == {2}


def test_the_autotuner_is_put_back() -> None:
    """No patch outlives the block, not even one that an error leaves."""
    before = dict(vars(Autotuner))
    with compilation.in_parallel():
        assert dict(vars(Autotuner)) != before
    assert dict(vars(Autotuner)) == before
    with suppress(ZeroDivisionError), compilation.in_parallel():
        raise ZeroDivisionError
    assert dict(vars(Autotuner)) == before


@pytest.mark.parametrize("missing", ["triton", "triton.runtime.autotuner"])
def test_without_triton_nothing_happens(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without triton, or with one that can't compile in parallel, the block does nothing."""
    monkeypatch.setitem(sys.modules, missing, None)
    before = dict(vars(Autotuner))
    with compilation.in_parallel():
        assert dict(vars(Autotuner)) == before


def test_kernels_in_the_caches_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each of triton's cubins and tilelang's libraries; a folder that is not there holds none."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "tilelang"))
    assert compilation.count_cached() == 0
    for file in ("triton/A/k.cubin", "triton/A/k.json", "triton/B/k.cubin", "tilelang/0.1/C/executable.so"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert compilation.count_cached() == 3


def test_caches_are_looked_for_where_triton_puts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under $TRITON_HOME or the user's home; a user without one, as in a container, has none cached."""
    for name in ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for file in ("home/.triton/cache/A/k.cubin", "home/.tilelang/cache/C/k.so"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    assert compilation.count_cached() == 2
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert compilation.count_cached() == 1
    monkeypatch.delenv("TRITON_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # raises KeyError
    assert compilation.count_cached() == 0


def test_ranks_of_a_host_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks do not start eight times as many compilers as there are cores."""
    monkeypatch.undo()
    monkeypatch.setattr(compilation.os, "sched_getaffinity", lambda _: range(16))
    assert compilation._cores() == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert compilation._cores() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert compilation._cores() == 1


# --- what it takes to compile ------------------------------------------------------------------------------


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with nvcc and g++, both empty, an empty cache, and a tilelang that found the toolkit."""
    for name in ("cuda/bin/nvcc", "bin/g++"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch(0o755)
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "cache"))
    tilelang, env = types.ModuleType("tilelang"), types.ModuleType("tilelang.env")
    vars(tilelang)["__version__"] = "0.1.15+cu130"
    vars(env)["CUDA_HOME"] = str(tmp_path / "cuda")
    vars(tilelang)["env"] = env
    monkeypatch.setitem(sys.modules, "tilelang", tilelang)
    monkeypatch.setitem(sys.modules, "tilelang.env", env)
    return tmp_path


def test_a_compiler_is_there_or_named(toolkit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvcc in the toolkit that tilelang found, and a C++ compiler on the PATH or in $CXX."""
    assert compilation.no_compiler() is None
    (toolkit / "bin" / "g++").unlink()
    assert "install g++" in str(compilation.no_compiler())
    monkeypatch.setenv("CXX", "/opt/gcc/bin/g++")
    assert compilation.no_compiler() is None
    (toolkit / "cuda" / "bin" / "nvcc").unlink()
    cause = str(compilation.no_compiler())
    assert f"none in {toolkit / 'cuda'}/bin" in cause
    assert "CUDA_HOME" in cause
    assert "pip install 'tilelang[nvcc]'" in cause
    monkeypatch.setattr("tilelang.env.CUDA_HOME", "")
    assert "none on the PATH" in str(compilation.no_compiler())


@pytest.mark.parametrize(
    ("version", "serves"), [("0.1.15", True), ("0.1.15_cu130", True), ("0.1.1", False), ("0.1.150", False)]
)
def test_kernels_in_the_cache_need_no_compiler(
    toolkit: Path, monkeypatch: pytest.MonkeyPatch, version: str, serves: bool
) -> None:
    """Those of the installed tilelang do; without any toolkit it does not even look for them."""
    assert compilation.tilelang_unready() is None
    (toolkit / "cuda" / "bin" / "nvcc").unlink()
    assert compilation.tilelang_unready() == compilation.no_compiler() is not None
    kernel = toolkit / "cache" / version / "linux-x86_64" / "kernels" / "K" / "executable.so"
    kernel.parent.mkdir(parents=True)
    kernel.touch()
    assert (compilation.tilelang_unready() is None) is serves
    monkeypatch.setattr("tilelang.env.CUDA_HOME", "")
    assert compilation.tilelang_unready() == compilation.no_compiler() is not None


@pytest.mark.parametrize(
    "said", ["[Errno 2] No such file or directory: '/cuda/bin/nvcc'", "Command: /cuda/bin/nvcc -ccbin=None"]
)
def test_a_kernel_that_was_not_cached_ends_the_step_in_one_line(toolkit: Path, said: str) -> None:
    """As tilelang raises it, it says what to install; with a compiler it is an error of another kind."""
    with pytest.raises(RuntimeError, match="bin/nvcc") as other, naming_failures():
        raise RuntimeError(said)
    assert not isinstance(other.value, KernelError)
    (toolkit / "bin" / "g++").unlink()
    with pytest.raises(KernelError, match=r"not in tilelang's cache .*: install g\+\+"), naming_failures():
        raise RuntimeError(said)


REAL = """
import os, sys, tilelang, tilelang.language as T
from training.kernels import compilation

@T.prim_func
def add(a: T.Tensor((128,), "float32"), b: T.Tensor((128,), "float32")):
    with T.Kernel(1, threads=128):
        for i in T.Parallel(128):
            b[i] = a[i] + 1.0

before = compilation.tilelang_unready()
try:
    tilelang.compile(add, target={"kind": "cuda", "arch": "sm_90"})
    print("compiled", before, file=sys.stderr)
except RuntimeError as error:
    print("raised", "bin/nvcc" in str(error), before, file=sys.stderr)
"""


def test_the_real_tilelang_does_as_is_said_here(tmp_path: Path) -> None:
    """Where it is installed with a toolkit: with nvcc, without nvcc, without a host compiler, cached."""
    pytest.importorskip("tilelang")
    home = subprocess.run(
        [sys.executable, "-c", "from tilelang.env import CUDA_HOME; print(CUDA_HOME)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    if not home:
        pytest.skip("needs a CUDA toolkit")
    (tmp_path / "add.py").write_text(REAL)

    def last(*, cache: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, tmp_path / "add.py"],
            env=os.environ | {"TILELANG_CACHE_DIR": str(tmp_path / cache)} | environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stderr.splitlines()[-1]

    assert last(cache="one") == "compiled None"
    no_nvcc, no_host = {"CUDA_HOME": str(tmp_path)}, {"CUDA_HOME": home[0], "PATH": "", "CXX": "", "CC": ""}
    for environment, word in ((no_nvcc, "CUDA_HOME"), (no_host, "g++")):
        assert last(cache="one", **environment) == "compiled None"
        assert last(cache="none", **environment).startswith("raised True tilelang compiles")
        assert word in last(cache="none", **environment)
