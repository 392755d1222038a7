"""What all tests share: Hypothesis profiles and the way to the shared real data."""

import os
import shutil
import signal
import tempfile

# Before torch comes in, and for the processes that tests start: several torch processes on two cores, each
# with two spinning threads, made tiny models 20 to 50 times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# A run started in the background inherits an ignored Ctrl-C, and hands it to processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED = Path(os.environ.get("PADFREE_SHARED", Path(__file__).resolve().parents[2] / "shared"))


def pytest_configure(config: pytest.Config) -> None:
    """Gives what libraries and processes of the tests leave behind a folder that goes away at the end.

    torchrun keeps its logs, torch makes a folder for compiled layers when it is imported, and what is killed
    with a temporary folder leaves it. pytest's own stay where they were. A short path: sockets lie there.
    """
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="padfree-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["TMPDIR"] = tempfile.tempdir = folder


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a run remembers of tokenizers goes into no home, and no home decides what a test does."""
    os.environ.setdefault("PADFREE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data, tokenizers and templates; the test is skipped where it is missing."""
    if not (SHARED / "design.md").exists():
        pytest.skip(f"needs the shared data folder at {SHARED} (or $PADFREE_SHARED)")
    return SHARED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips GPU tests where there is no CUDA device."""
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
