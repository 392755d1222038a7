"""A run is killed amid its steps and goes on, on as many ranks or on fewer: the losses of one never stopped.

    python benchmarks/resume.py --ranks 1 --lengths ../shared/data/ultrachat_like_lengths.npy \
        --set model.precision=bf16                                                        # one H200, 4.1 B
    python benchmarks/resume.py --ranks 8 --resume-ranks 4 --layers 64 --steps 200 --every 50 \
        --kill-after 120 --kill one --eval-every 50 --apart --set model.precision=mixed   # eight, 26.9 B
    python benchmarks/resume.py --model-config benchmarks/configs/ladder-tiny.json --capacity 256 \
        --ranks 4 --resume-ranks 2                                                        # CPU

Three runs of `torchrun -m training`: one whole; one that saves and is killed with SIGKILL; that one resumed.
Saves to results/resume.json, or into $OUT: the losses, their largest difference, whether each step took the
same tokens, and what saving and loading took. On a GPU kernels with atomic sums leave the last bits open, and
another number of ranks adds in another order, so the losses may differ by `--limit` of their size.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ladder.data import read_lengths, write_shards
from record import save

from training.config import load
from training.cost import checkpoint_part, free_memory
from training.model import read_config, skeleton

CONFIGS = Path(__file__).with_name("configs")


def main() -> int:
    """Runs all three; 0 if losses and tokens agree."""
    arguments = parser().parse_args()
    after_ranks = arguments.ranks if arguments.resume_ranks is None else arguments.resume_ranks
    if after_ranks < 1 or arguments.ranks % after_ranks:
        raise SystemExit(f"{arguments.ranks} ranks can't go on as {after_ranks}: choose a divisor")
    model = json.loads(arguments.model_config.read_text("utf-8")) | {"num_hidden_layers": arguments.layers}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "model.json").write_text(json.dumps(model))
        (place / "run.toml").write_text("")
        settings = [f"model.config={place / 'model.json'}", *arguments.set]
        size = bill(place, settings=settings, saves=arguments.steps // arguments.every)
        write_shards(
            place / "shards",
            read_lengths(arguments.lengths, most=arguments.capacity),
            capacity=arguments.capacity,
            buffers=arguments.ranks * arguments.steps,
            probes=arguments.ranks,
            vocabulary=model["vocab_size"],
        )
        whole = Trainer(place, "whole", arguments)
        if arguments.apart:
            whole.wait()
        cut = Trainer(place, "cut", arguments, every=arguments.every)
        first = place / "cut" / "checkpoints" / f"step-{arguments.every:08d}"
        cut.wait_for(lambda: arguments.every in cut.losses())
        began = time.perf_counter()
        cut.wait_for(first.exists)
        save_seconds = time.perf_counter() - began
        cut.wait_for(lambda: arguments.kill_after in cut.losses())
        cut.kill(one=arguments.kill == "one")
        killed, lines = max(cut.losses()), cut.lines()
        newest = max(path.name for path in first.parent.glob("step-*"))
        if not arguments.apart:
            whole.wait()
        began = time.perf_counter()
        resumed = Trainer(
            place,
            "cut",
            arguments,
            "--resume",
            ranks=after_ranks,
            more=[f"data.accumulation={arguments.ranks // after_ranks}"],
        )
        resumed.wait()
        resume_seconds = time.perf_counter() - began
        written = sum(file.stat().st_size for file in (first.parent / newest).iterdir())

        before, after = whole.losses(), resumed.losses()
        difference = apart(before, after)
        evaluations = apart(whole.losses("eval"), resumed.losses("eval"))
        same_tokens = whole.tokens() == resumed.tokens()
        results: dict[str, Any] = {
            # No number is below any limit where a loss is none, so `<=` and not its contrary.
            "holds": same_tokens and difference <= arguments.limit and evaluations <= arguments.limit,
            "relative_difference": difference if math.isfinite(difference) else None,
            "relative_difference_of_evaluations": evaluations if math.isfinite(evaluations) else None,
            "limit": arguments.limit,
            "bit_for_bit": after == before,
            "same_tokens_each_step": same_tokens,
            "layers": arguments.layers,
            "ranks": arguments.ranks,
            "resumed_on": after_ranks,
            "killed": arguments.kill,
            "set": arguments.set,
            "killed_after_step": killed,
            "resumed_from_step": int(newest.removeprefix("step-")),
            "checkpoint_bytes": written,
            "expected_bytes": size,
            "save_s": save_seconds,
            "held_s": [line["held_s"] for line in lines if line["kind"] == "checkpoint"],
            "resumed_run_s": resume_seconds,
            "losses": {"whole": before, "killed and resumed": after},
            "evaluations": {
                "whole": whole.losses("eval"),
                "killed and resumed": resumed.losses("eval"),
            },
        }
        if arguments.apart:  # beside each other they would slow each other down
            results["saving_over_whole"] = seconds(lines) / seconds(whole.lines(), last=killed) - 1
    save("resume", results, packages=["flash-linear-attention", "causal-conv1d", "flash-qla", "liger-kernel"])
    print(json.dumps(results))
    return 0 if results["holds"] else 1


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    found.add_argument("--model-config", type=Path, default=CONFIGS / "ladder-27b.json")
    found.add_argument("--layers", type=int, default=4, help="of the model")
    found.add_argument("--lengths", help="a .npy file, a text file or a shard directory; else synthetic")
    found.add_argument("--capacity", type=int, default=8192)
    found.add_argument("--ranks", type=int, default=2)
    found.add_argument("--resume-ranks", type=int, help="a divisor of --ranks; as many by default")
    found.add_argument("--steps", type=int, default=8)
    found.add_argument("--every", type=int, default=3, help="steps between two checkpoints")
    found.add_argument("--kill-after", type=int, default=4, metavar="STEP")
    found.add_argument("--kill", choices=["all", "one"], default="all", help="all ranks at once, or the last")
    found.add_argument("--eval-every", type=int, default=0, help="steps between two evaluations")
    found.add_argument(
        "--apart", action="store_true", help="one run after the other, which also shows what saving costs"
    )
    found.add_argument("--limit", type=float, default=1e-3, help="relative difference of losses")
    found.add_argument("--set", action="append", default=[], metavar="section.key=value")
    return found


def apart(one: dict[int, float], other: dict[int, float]) -> float:
    """The largest relative difference of two runs' losses; infinite where a step or a number is missing."""
    if one.keys() != other.keys():
        return math.inf
    ratios = [abs(other[step] - loss) / abs(loss) if loss else abs(other[step]) for step, loss in one.items()]
    return max(ratios, default=0.0) if all(map(math.isfinite, ratios)) else math.inf


def bill(place: Path, *, settings: list[str], saves: int) -> int:
    """Bytes of a checkpoint; says so, and refuses what disk or memory can't hold before anything runs."""
    config = load(place / "run.toml", overrides=[f"data.shards={place}", *settings])
    kind = "fp32" if config.model.precision == "auto" else config.model.precision  # mixed takes as much
    model = skeleton(read_config(config.model, vocabulary=0), precision=kind)
    size = checkpoint_part(config, model, ranks=1, precision=kind)
    kept = min(saves, config.checkpoint.keep + 1) if config.checkpoint.keep else saves  # and the one written
    disk, memory = shutil.disk_usage(place).free, free_memory()
    copied = size if config.checkpoint.background else 0
    print(
        f"{model.num_parameters():,} parameters; a checkpoint takes {size / 1e9:.1f} GB: {kept} of them on "
        f"{disk / 1e9:.0f} GB of disk, {copied / 1e9:.1f} GB in {(memory or 0) / 1e9:.0f} GB of memory",
        flush=True,
    )
    if kept * size > disk or (memory is not None and copied > memory):
        raise SystemExit("too much for this machine: fewer --layers")
    return size


def seconds(lines: list[dict[str, Any]], *, last: int | None = None) -> float:
    """What the steps took, and what checkpoints held them up, from the second to the last."""
    taken = {"train": "step_s", "checkpoint": "held_s"}
    return sum(
        line[taken[line["kind"]]]
        for line in lines
        if line["kind"] in taken and 2 <= line["step"] <= (last or line["step"])
    )


class Trainer:
    """`torchrun -m training` in a run directory of its own."""

    def __init__(
        self,
        place: Path,
        run: str,
        arguments: argparse.Namespace,
        *flags: str,
        ranks: int | None = None,
        every: int = 0,
        more: list[str] | None = None,
    ) -> None:
        self._run = place / run
        settings = [
            f"run.dir={self._run}",
            f"data.shards={place / 'shards'}",
            f"model.config={place / 'model.json'}",
            f"schedule.steps={arguments.steps}",
            "optim.lr=3e-4",  # so that weights or states left behind would show
            "schedule.kind=constant",
            "checkpoint.last=false",
            f"checkpoint.every={every}",
            f"eval.every={arguments.eval_every}",
            *arguments.set,
            *(more or []),
        ]
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node"]
        torchrun += [str(ranks or arguments.ranks), "--log-dir", str(place / "logs")]
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

    def kill(self, *, one: bool) -> None:
        """SIGKILL to torchrun and all ranks at once, or to one rank, after which torchrun ends the others."""
        found = subprocess.run(
            ["pgrep", "-P", str(self._process.pid)], capture_output=True, text=True, check=True
        )
        ranks = [int(number) for number in found.stdout.split()]
        for number in ranks[-1:] if one else (self._process.pid, *ranks):
            os.kill(number, signal.SIGKILL)
        self._process.wait()

    def lines(self) -> list[dict[str, Any]]:
        """The metrics so far."""
        path = self._run / "metrics.jsonl"
        text = path.read_text("utf-8") if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def losses(self, kind: str = "train") -> dict[int, float]:
        """Of each step, or evaluation, so far."""
        return {line["step"]: line["loss"] for line in self.lines() if line["kind"] == kind}

    def tokens(self) -> list[tuple[int, int]]:
        """Real and supervised ones of each step."""
        return [
            (line["real_tokens"], line["supervised_tokens"])
            for line in self.lines()
            if line["kind"] == "train"
        ]


if __name__ == "__main__":
    sys.exit(main())
