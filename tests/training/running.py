"""Runs of the trainer's command for tests: their configuration, their processes, what they wrote."""

import os
import subprocess
import sys
import time
from pathlib import Path

from training.metrics import read

RUN = """
[data]
shards = "shards"
[model]
config = "tiny-qwen3_5"
[schedule]
steps = 30
warmup = 1
[optim]
lr = 5e-3
weight_decay = 0.1
[checkpoint]
every = 4
"""


def command(
    folder: Path, shards: Path, *overrides: str, flags: tuple[str, ...] = (), run: str = "run"
) -> list[str]:
    """The command's words for a run on the shards, with overrides; it is written into the folder."""
    (folder / "run.toml").write_text(RUN)
    sets = (f"data.shards={shards}", f"run.dir={folder / run}", *overrides)
    return [str(folder / "run.toml"), *flags, *(part for item in sets for part in ("--set", item))]


def losses(run: Path, kind: str = "train") -> dict[int, float]:
    """The losses by step that the metrics of a run hold."""
    return {line["step"]: line["loss"] for line in read(run / "metrics.jsonl") if line["kind"] == kind}


def launch(words: list[str], *torchrun: str, faults: str = "", **variables: str) -> "subprocess.Popen[str]":
    """The command in a process of its own, under torchrun where it gets options.

    Args:
        words: Of the command.
        torchrun: Options.
        faults: What is to break in which life, see `faulty_worker.py`.
        variables: Of its environment.
    """
    what = [str(Path(__file__).with_name("faulty_worker.py"))] if faults else ["-m", "training"]
    before = ["-m", "torch.distributed.run", *torchrun] if torchrun else []
    return subprocess.Popen(
        [sys.executable, *before, *what, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"FAULTS": faults, "PYTHONUNBUFFERED": "1"} | variables,
    )


def wait_for(step: int, *, run: Path, process: "subprocess.Popen[str]") -> None:
    """Waits until the metrics hold the step."""
    deadline = time.monotonic() + 240
    while not ((run / "metrics.jsonl").exists() and step in losses(run)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
