"""The command: `torchrun --standalone --nproc-per-node N -m training run.toml [--set key=value]`.

python -m training check RUN --eval-ratio R     compares evaluation losses at start and end
python -m training export CHECKPOINT OUT        writes a directory that from_pretrained opens
python -m training plot RUN                     draws the metrics
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from training.errors import PadfreeError, Signalled
from training.faults import HUNG, SIGNALLED

COMMANDS = ("run", "check", "export", "plot")
STATUSES = (
    "Exit status: 0 success; 1 a check that fails; 2 what a line on stderr says; "
    f"{SIGNALLED} SIGTERM or Ctrl-C, after the step at hand was saved: go on with --resume; "
    f"{HUNG} no progress for run.hang_s seconds; 130 another Ctrl-C more than two seconds later, or one "
    "before the first step. "
    "torchrun reports a rank's status and itself ends with 1."
)


class Exact(argparse.ArgumentParser):
    """A parser that takes no beginning of a flag for the flag."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)


def parser() -> argparse.ArgumentParser:
    """The command's arguments; `run` is understood where no command is named."""
    main = Exact(
        prog="python -m training",
        description="Trains on the shards that `padfree pack` wrote.",
        epilog=STATUSES,
    )
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Exact)
    run = commands.add_parser("run", help="train; the default, its name can be left out", epilog=STATUSES)
    run.add_argument("config", metavar="run.toml")
    run.add_argument(
        "--set", action="append", default=[], metavar="section.key=value", help="overrides the file"
    )
    run.add_argument("--resume", action="store_true", help="go on from the run directory's newest checkpoint")
    run.add_argument(
        "--accept",
        action="append",
        default=[],
        metavar="section.key",
        help="with --resume: a setting that may differ from the checkpoint's although it would be refused",
    )
    run.add_argument("--profile", metavar="FIRST:LAST", help="trace these steps; short for --set run.profile")
    run.add_argument("--dry-run", action="store_true", help="check and print what would run, then stop")
    check = commands.add_parser("check", help="compare a run's evaluation losses at its start and end")
    check.add_argument("run", metavar="RUN", help="run directory")
    check.add_argument("--eval-ratio", type=float, required=True, metavar="R")
    export = commands.add_parser("export", help="write a checkpoint as a Hugging Face directory")
    export.add_argument("checkpoint", metavar="CHECKPOINT", help="or a run directory: its newest")
    export.add_argument("out", metavar="OUT")
    export.add_argument("--tokenizer", metavar="DIR", help="directory whose tokenizer is copied")
    export.add_argument("--weights", metavar="DIR", help="where the weights are now that the run began from")
    export.add_argument(
        "--dtype", metavar="DTYPE", help="bfloat16, float16 or float32; else the checkpoint's"
    )
    plot = commands.add_parser("plot", help="draw a run's loss, speed and learning rate")
    plot.add_argument("run", metavar="RUN", help="run directory")
    plot.add_argument("--out", metavar="FILE", help="default: RUN/metrics.svg")
    return main


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
        What `STATUSES` says.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] not in (*COMMANDS, "-h", "--help"):
        words.insert(0, "run")
    arguments = parser().parse_args(words)
    try:
        if arguments.command == "check":
            from training.metrics import compare_evals

            text, holds = compare_evals(arguments.run, limit=arguments.eval_ratio)
            print(text)
            return 0 if holds else 1
        if arguments.command == "export":
            from training.export import export

            print(
                export(
                    arguments.checkpoint,
                    arguments.out,
                    tokenizer=arguments.tokenizer,
                    weights=arguments.weights,
                    dtype=arguments.dtype,
                )
            )
            return 0
        if arguments.command == "plot":
            from training.metrics import plot

            print(plot(arguments.run, out=arguments.out))
            return 0
        from training.config import load

        profile = [f'run.profile="{arguments.profile}"'] if arguments.profile else []
        config = load(arguments.config, overrides=[*arguments.set, *profile])
        from training.train import train  # torch and transformers: seconds, and needless for a typo

        train(config, resume=arguments.resume, accept=arguments.accept, dry_run=arguments.dry_run)
    except Signalled as error:
        if not _local_rank():  # all ranks leave at once, with the same to say
            _say(error)
        return SIGNALLED
    except PadfreeError as error:
        _say(error)
        return 2
    except KeyboardInterrupt:
        print("training: interrupted, nothing saved since the last checkpoint", file=sys.stderr, flush=True)
        return 130
    return 0


def _say(error: PadfreeError) -> None:
    """One line from one rank of a machine: the others wait, and torchrun ends them meanwhile."""
    rank = _local_rank()
    if rank:
        time.sleep(5)
    print(f"training: {'' if not rank else f'rank {rank}: '}{error}", file=sys.stderr, flush=True)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


if __name__ == "__main__":
    status = main()
    if "torch" in sys.modules:
        from training.launch import leave

        leave(status)
    sys.exit(status)
