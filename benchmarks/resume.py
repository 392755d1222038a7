"""A run at 27B width is killed amid its steps and goes on: the same losses as one never stopped.

    python benchmarks/resume.py --lengths ../shared/data/ultrachat_like_lengths.npy      # two H200s, 4.1 B
    python benchmarks/resume.py --model-config benchmarks/configs/ladder-tiny.json --capacity 256  # CPU

Three runs of `torchrun -m training`: one whole; beside it one that saves every third step and is killed, all
ranks at once with SIGKILL, after it took the fourth; and that one resumed. Saves both runs' losses, their
largest difference, and what saving and loading took to results/resume.json, or into $OUT. On a GPU kernels
with atomic sums leave the last bits open, so the losses may differ by 1e-3 of their size at most.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ladder.data import read_lengths, write_shards
from record import save

CONFIGS = Path(__file__).with_name("configs")
SAVED, KILLED, STEPS = 3, 4, 8
LIMIT = 1e-3


def main() -> int:
    """Runs all three; 0 if the losses agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model-config", type=Path, default=CONFIGS / "ladder-27b.json")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--lengths", help="a .npy file, a text file or a shard directory; else synthetic")
    parser.add_argument("--capacity", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value")
    arguments = parser.parse_args()

    model = json.loads(arguments.model_config.read_text("utf-8")) | {"num_hidden_layers": arguments.layers}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "model.json").write_text(json.dumps(model))
        (place / "run.toml").write_text("")
        lengths = read_lengths(arguments.lengths, most=arguments.capacity)
        write_shards(
            place / "shards",
            lengths,
            capacity=arguments.capacity,
            buffers=arguments.ranks * STEPS,
            probes=1,
            vocabulary=model["vocab_size"],
        )
        whole = Trainer(place, "whole", arguments, every=0)
        cut = Trainer(place, "cut", arguments, every=SAVED)
        checkpoint = place / "cut" / "checkpoints" / f"step-{SAVED:08d}"
        cut.wait_for(lambda: SAVED in cut.losses())
        began = time.perf_counter()
        cut.wait_for(checkpoint.exists)
        save_seconds = time.perf_counter() - began
        cut.wait_for(lambda: KILLED in cut.losses())
        cut.kill()
        killed = max(cut.losses())
        whole.wait()
        began = time.perf_counter()
        resumed = Trainer(place, "cut", arguments, "--resume", every=0)
        resumed.wait()
        resume_seconds = time.perf_counter() - began
        size = sum(file.stat().st_size for file in checkpoint.iterdir())
        before, after = whole.losses(), resumed.losses()

    steps = range(1, STEPS + 1)
    difference = max(abs(after[step] - before[step]) / before[step] for step in steps)
    results = {
        "holds": difference <= LIMIT,
        "relative_difference": difference,
        "bit_for_bit": after == before,
        "layers": arguments.layers,
        "ranks": arguments.ranks,
        "set": arguments.set,
        "killed_after_step": killed,
        "resumed_from_step": SAVED,
        "checkpoint_bytes": size,
        "save_s": save_seconds,
        "resumed_run_s": resume_seconds,
        "losses": {"whole": before, "killed and resumed": after},
    }
    save("resume", results, packages=["flash-linear-attention", "causal-conv1d", "flash-qla", "liger-kernel"])
    print(json.dumps(results))
    return 0 if results["holds"] else 1


class Trainer:
    """`torchrun -m training` in a run directory of its own."""

    def __init__(self, place: Path, run: str, arguments: argparse.Namespace, *flags: str, every: int) -> None:
        self._run = place / run
        settings = [
            f"run.dir={self._run}",
            f"data.shards={place / 'shards'}",
            f"model.config={place / 'model.json'}",
            f"schedule.steps={STEPS}",
            "optim.lr=3e-4",  # so that weights or states left behind would show
            "schedule.kind=constant",
            "checkpoint.last=false",
            f"checkpoint.every={every}",
            *arguments.set,
        ]
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.ranks)]
        sets = [word for setting in settings for word in ("--set", setting)]
        command = [sys.executable, "-m", *torchrun, "-m", "training", str(place / "run.toml"), *flags, *sets]
        self._process = subprocess.Popen(command)

    def wait(self) -> None:
        """Waits for its end, which has to be a good one."""
        if self._process.wait():
            raise SystemExit(f"{self._run.name} ended with {self._process.returncode}: its words are above")

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Waits until something that the run does is done."""
        while not done():
            if self._process.poll() is not None:
                raise SystemExit(f"{self._run.name} ended too early: its words are above")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL to torchrun and all ranks at once."""
        ranks = subprocess.run(
            ["pgrep", "-P", str(self._process.pid)], capture_output=True, text=True, check=True
        )
        for number in (self._process.pid, *map(int, ranks.stdout.split())):
            os.kill(number, signal.SIGKILL)
        self._process.wait()

    def losses(self) -> dict[int, float]:
        """Of each step so far."""
        path = self._run / "metrics.jsonl"
        text = path.read_text("utf-8") if path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


if __name__ == "__main__":
    sys.exit(main())
