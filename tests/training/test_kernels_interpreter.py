"""flash-linear-attention's real kernels, run on a CPU by triton's interpreter."""

import json
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version


def unfit() -> str | None:
    """Why this environment can't run the interpreter; None where it can. CI installs what it needs."""
    if find_spec("triton") is None or find_spec("fla") is None:
        return "needs triton and fla-core"
    if Version(version("numpy")) >= Version("2.4") and Version(version("triton")) < Version("3.9"):
        return "triton's interpreter before 3.9 fails with numpy 2.4"
    return None


@pytest.mark.skipif(unfit() is not None, reason=str(unfit()))
def test_real_kernels_honour_the_boundaries() -> None:
    """Delta rule, Kimi's, Mamba-2's on simple GLA, and the convolution: right, and isolated by 0.0."""
    worker = Path(__file__).with_name("interpreter_worker.py")
    done = subprocess.run([sys.executable, worker], capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == {"delta rule", "convolution", "state space", "Kimi delta attention"}
    for kernel, figures in found.items():
        assert figures["moved"] == 0.0, (kernel, figures)
        assert figures["forward"] < 1e-5, (kernel, figures)
        assert figures["gradients"] < 1e-3, (kernel, figures)
