"""What is installed and what it runs on: every kernel package with its version, or why it does not import."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import platform
import subprocess
import sys
from dataclasses import dataclass

import torch
from packaging.version import Version

from training.kernels.contract import KernelError

# Import name -> distribution name, in the order in which doctor shows them.
PACKAGES = {
    "triton": "triton",
    "fla": "flash-linear-attention",
    "tilelang": "tilelang",
    "flash_qla": "flash-qla",
    "causal_conv1d": "causal-conv1d",
    "liger_kernel": "liger-kernel",
    "flash_attn": "flash-attn",
    "flash_attn_interface": "flash-attn-3",
    "kernels": "kernels",
}

# Packages of compiled kernels fail to import in many ways: a missing sub-package, a shared library of another
# torch, an architecture that they do not know. Each of these is a cause to show, never to pass over.
IMPORT_FAILURES = (
    ImportError, OSError, RuntimeError, AttributeError, AssertionError, ValueError, TypeError, KeyError,
)  # fmt: skip


def failures() -> tuple[type[BaseException], ...]:
    """What a kernel may raise when it is compiled or run: for reports, which go on with the next kernel."""
    triton = sys.modules.get("triton.errors")
    compiler = (triton.TritonError,) if triton is not None else ()
    return (*IMPORT_FAILURES, ArithmeticError, subprocess.SubprocessError, KernelError, *compiler)


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One kernel package on this machine.

    Attributes:
        module: The name to import.
        distribution: The name to install.
        version: None where it is not installed.
        cause: Why it can't be imported, None where it can.
    """

    module: str
    distribution: str
    version: str | None
    cause: str | None


def probe(module: str) -> Package:
    """Imports a package and says what came of it: the real cause, where "not installed" would be a guess."""
    distribution = PACKAGES.get(module, module)
    cause = None
    try:
        if getattr(importlib.import_module(module), "__file__", None) is None:
            cause = "a folder of that name is on the path, but no package"
    except IMPORT_FAILURES as error:
        missing = importlib.util.find_spec(module.partition(".")[0]) is None
        cause = "not installed" if missing else f"{type(error).__name__}: {error}".splitlines()[0]
    return Package(module=module, distribution=distribution, version=_version(distribution), cause=cause)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where a model runs.

    Attributes:
        device: "cuda" or "cpu".
        name: The device's name.
        capability: CUDA's (major, minor); (0, 0) on a CPU.
        triton: Its version, None where it is not installed.
    """

    device: str
    name: str
    capability: tuple[int, int]
    triton: str | None

    @property
    def triton_fault(self) -> bool:
        """Whether triton miscompiles gated backward kernels here: Hopper with 3.4.0 <= triton < 3.7.1.

        Source: flash-linear-attention issue 640 and `fla/ops/common/chunk_o.py`.
        """
        hopper = self.capability[0] == 9
        return (
            hopper and self.triton is not None and Version("3.4") <= Version(self.triton) < Version("3.7.1")
        )


@functools.cache
def machine(device: str) -> Machine:
    """The machine behind a device type, "cuda" or "cpu"."""
    triton = _version("triton")
    if device == "cuda":
        return Machine(
            device=device,
            name=torch.cuda.get_device_name(),
            capability=torch.cuda.get_device_capability(),
            triton=triton,
        )
    return Machine(
        device=device, name=platform.processor() or platform.machine(), capability=(0, 0), triton=triton
    )
