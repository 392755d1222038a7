"""Starts a rung's processes, watches the GPUs meanwhile, and ends them at the deadline."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
QUERY = ("index", "utilization.gpu", "power.draw", "clocks.sm", "memory.used")


def query(*facts: str) -> list[str]:
    """The command that prints these facts, a line a GPU, of the GPUs that this process may use.

    nvidia-smi itself does not heed CUDA_VISIBLE_DEVICES.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = [f"--id={visible}"] if visible else []
    return ["nvidia-smi", *chosen, f"--query-gpu={','.join(facts)}", "--format=csv,noheader,nounits"]


class Watch:
    """What nvidia-smi says of the GPUs twice a second, while the block runs: `samples`, a dict each."""

    def __init__(self) -> None:
        self.samples: list[dict[str, float]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Watch:
        if shutil.which("nvidia-smi"):
            command = [*query(*QUERY), "-lms", "500"]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            values = [float(word) if word.strip()[:1].isdigit() else 0.0 for word in line.split(",")]
            if len(values) == len(QUERY):
                self.samples.append({"time": time.time(), **dict(zip(QUERY, values, strict=True))})

    def __exit__(self, *_: Any) -> None:
        if self._process:
            self._process.terminate()
            self._process.wait()


def run(
    spec: Path, *, ranks: int, environment: Mapping[str, str], seconds: float | None, log: Path
) -> str | None:
    """Runs `ladder.worker` on so many ranks, with the environment that torchrun would give them.

    torchrun puts its workers into sessions of their own and takes half a minute to end them; here they are
    this process's children, and the GPUs are free at once.

    Args:
        spec: The worker's argument.
        ranks: Processes on this machine.
        environment: On top of this process's own.
        seconds: After these all are killed; None waits for ever.
        log: What they print goes here.

    Returns:
        None if all ended well, else what happened.
    """
    paths = [str(HERE.parent), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ,
        **environment,
        "PYTHONPATH": os.pathsep.join(paths),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "ladder.worker", str(spec)],
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank in range(ranks)
        ]
        try:
            while any(process.poll() is None for process in processes):
                if any(process.returncode for process in processes):
                    time.sleep(3)  # the others may say why
                    break
                if seconds is not None and time.monotonic() - started > seconds:
                    return f"ended at the deadline, after {seconds:.0f} s"
                time.sleep(0.1)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
    return None if all(p.returncode == 0 for p in processes) else f"failed: {_last_words(log)}"


def _last_words(log: Path) -> str:
    """The line that says why: the first of an error, or the last at all."""
    lines = [line.strip() for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line or line.startswith("training: ")]
    return (errors[:1] or lines[-1:] or ["nothing printed"])[0][:300]
