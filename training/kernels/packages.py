"""What is installed and what it runs on: every kernel package with its version, or why it does not import."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import platform
import subprocess
import sys
from dataclasses import dataclass

import torch
from packaging.version import Version

from training.errors import PadfreeError

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
    "flash_attn.cute": "flash-attn-4",
    "kernels": "kernels",
}

# What the import of a package of compiled kernels raises where it is installed and does not fit: a cause to
# show, never to pass over. Anything else is no misfit that is known, and is raised.
IMPORT_FAILURES = (
    ImportError,  # a sub-package that is missing, a symbol of another version
    OSError,  # a shared library that is not there
    RuntimeError,  # a driver or an architecture that it does not serve
    AttributeError,  # another torch: a function that has gone
    AssertionError,  # a torch without CUDA, asked for the device's name
    ValueError,  # another numpy: "dtype size changed"
)


def failures() -> tuple[type[Exception], ...]:
    """What a kernel raises when it is compiled or run: a report shows it and goes on with the next kernel."""
    triton = sys.modules.get("triton.errors")
    compiler = (triton.TritonError,) if triton is not None else ()
    return (
        PadfreeError,
        *IMPORT_FAILURES,  # kernels import what they need when they are first called
        TypeError,  # called with an argument that its version does not have
        LookupError,  # tilelang's compiler hands on what its C++ raises
        subprocess.SubprocessError,  # nvcc or ptxas
        *compiler,
    )


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
    version = _version(distribution)
    cause = None
    if version is None and "." in module:  # an older distribution may have such a part, unfinished
        return Package(module=module, distribution=distribution, version=None, cause="not installed")
    try:
        if getattr(importlib.import_module(module), "__file__", None) is None:
            # A namespace of that name: any folder on the path, or another distribution's.
            cause = "not installed" if version is None else "a folder of that name on the path hides it"
    except IMPORT_FAILURES as error:
        cause = (
            "not installed" if _absent(error, module) else f"{type(error).__name__}: {error}".splitlines()[0]
        )
    return Package(module=module, distribution=distribution, version=version, cause=cause)


def _absent(error: Exception, module: str) -> bool:
    """Whether the module itself was not found, and not one that it imports."""
    named = error.name if isinstance(error, ModuleNotFoundError) else None
    return named is not None and (module == named or module.startswith(f"{named}."))


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
