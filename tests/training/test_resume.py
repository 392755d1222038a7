"""Going on with a run: the same steps however they are shared out."""

from collections.abc import Callable
from pathlib import Path

import pytest
from running import launch, losses
from tiny_shards import some_shards

from training.__main__ import main
from training.metrics import read

ALWAYS = ("schedule.steps=0", "schedule.epochs=2", "checkpoint.every=1", "model.checkpointing=0")


def rates(run: Path) -> list[float]:
    return [line["lr"] for line in read(run / "metrics.jsonl") if line["kind"] == "train"]


def test_another_split_of_the_same_step_changes_nothing(
    words: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Two buffers a step, of five an epoch: two micro-batches, one of two buffers, or two ranks.

    Steps, learning rates and losses are those of a run never stopped, also where an epoch's last step has
    one buffer only.
    """
    five = f"data.shards={some_shards(tmp_path / 'five', buffers=5)}"
    assert main(words(*ALWAYS, five, "data.accumulation=2", run="whole")) == 0
    whole, rate = losses(tmp_path / "whole"), rates(tmp_path / "whole")
    assert list(whole) == [1, 2, 3, 4, 5, 6]
    assert main(words(*ALWAYS, five, "data.accumulation=2", "run.steps=2", run="cut")) == 0
    assert main(words(*ALWAYS, five, "data.buffers=2", "run.steps=4", run="cut", flags=("--resume",))) == 0
    process = launch(
        words(*ALWAYS, five, run="cut", flags=("--resume",)), "--standalone", "--nproc-per-node", "2"
    )
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert losses(tmp_path / "cut") == pytest.approx(whole, rel=1e-4)
    assert rates(tmp_path / "cut") == rate
