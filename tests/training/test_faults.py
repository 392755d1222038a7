"""Hangs, signals and loss spikes: named, and what they leave behind."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from running import launch
from torch import OutOfMemoryError
from torch.distributed import DistBackendError

from training import faults
from training.__main__ import main
from training.data import TrainingData
from training.errors import OutOfMemory, PeerLost
from training.faults import Spikes, StopSignal, Watchdog, naming_failures
from training.metrics import read


def test_a_rank_that_sleeps_is_named(words: Callable[..., list[str]], tmp_path: Path) -> None:
    """One of two ranks sleeps in its third step: both say where they stand, its stacks show the sleep."""
    sleep = [[0, 1, "training.train.forward_backward", 3, "sleep"]]
    process = launch(
        words("run.hang_s=8", "checkpoint.every=0"),
        *("--standalone", "--nproc-per-node", "2"),
        faults=json.dumps(sleep),
    )
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1
    assert re.search(r"exitcode +: 86", output), output
    assert "rank 1: no progress for 8 s at step 3, forward and backward; stacks in" in output
    texts = {file.name: file.read_text() for file in (tmp_path / "run" / "hang").iterdir()}
    assert set(texts) == {"step-00000003-rank-0.txt", "step-00000003-rank-1.txt"}
    assert "in strike" in texts["step-00000003-rank-1.txt"]
    assert "in strike" not in texts["step-00000003-rank-0.txt"]


def test_progress_keeps_the_watchdog_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a phase without an end is a hang; a slow one has ten times as long, and 0 watches nothing."""
    ended = faults.Event()
    monkeypatch.setattr(faults.os, "_exit", lambda status: ended.set())
    with Watchdog(tmp_path, rank=0, hang_s=0) as off:
        assert not off._thread.is_alive()
    with Watchdog(tmp_path, rank=0, hang_s=0.5) as watchdog:
        for step in range(1, 6):
            watchdog.at(step, "reading data")
            assert not ended.wait(0.2)
        watchdog.at(6, "saving a checkpoint", times=faults.SLOW)
        assert not ended.wait(1.5)
        watchdog.at(7, "reading data")
        assert ended.wait(10)
    assert "at step 7, reading data" in (tmp_path / "step-00000007-rank-0.txt").read_text()


def test_a_signal_raises_a_flag_and_a_second_one_ends(
    monkeypatch: pytest.MonkeyPatch, words: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM and Ctrl-C let the step at hand end; a second one, or one at the start, leaves with 130.

    One that comes at once is the same: a scheduler's and torchrun's.
    """
    for number, name in ((signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT")):
        before = signal.getsignal(number)
        with StopSignal() as stop:
            assert stop.name == ""
            os.kill(os.getpid(), number)
            assert stop.name == name
            os.kill(os.getpid(), number)
            monkeypatch.setattr(StopSignal, "TOGETHER_S", 0.0)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
        assert signal.getsignal(number) == before
        monkeypatch.setattr(StopSignal, "TOGETHER_S", 60.0)

    def interrupted(*arguments: object, **options: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("training.train.train", interrupted)
    assert main(words()) == 130
    assert capsys.readouterr().err == "training: interrupted, nothing saved since the last checkpoint\n"


def test_lost_ranks_and_lack_of_memory_are_one_line() -> None:
    """What gloo, NCCL and the allocator raise becomes one line; any other error stays what it is."""
    gloo = RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer\nx"
    )
    for error in (gloo, DistBackendError("NCCL error: remote process exited")):
        with (
            pytest.raises(PeerLost, match=r"another rank is gone.*(closed by peer|remote process)"),
            naming_failures(),
        ):
            raise error
    with pytest.raises(OutOfMemory, match=r"allocate 2 GiB.*--dry-run"), naming_failures():
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    with pytest.raises(RuntimeError, match="shape") as other, naming_failures():
        raise RuntimeError("shape")
    assert not isinstance(other.value, PeerLost)


def test_what_a_spike_is() -> None:
    """Nothing before eight losses; then what lies above the median by so many deviations; 0 finds none."""
    losses = [2.0, 2.2, 1.9, 2.1, 2.0, 2.3, 1.8, 2.05]
    assert Spikes(10).limit(1e9) is None
    spikes = Spikes(10)
    assert [spikes.limit(loss) for loss in losses] == [None] * 8
    assert spikes.limit(2.9) is None
    assert spikes.limit(6.0) == pytest.approx(2.05 + 10 * 0.15)  # median and deviation of the nine
    assert spikes.limit(2.0) is None
    quiet, off = Spikes(10), Spikes(0)
    for _ in range(20):
        quiet.limit(1.0)
        off.limit(1.0)
    assert quiet.limit(1.05) is None
    assert quiet.limit(1.2) == pytest.approx(1.1)
    assert off.limit(99.0) is None


def test_a_spike_names_its_examples(
    words: Callable[..., list[str]], tmp_path: Path, shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line of the metrics holds the step, the loss, what was expected, and the step's examples."""
    assert main(words("run.spike=0.01", "optim.lr=0", "schedule.steps=12", "checkpoint.last=false")) == 0
    lines = read(tmp_path / "run" / "metrics.jsonl")
    losses = {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}
    found = [line for line in lines if line["kind"] == "spike"]
    assert found
    assert all(line["step"] > Spikes.LEAST for line in found)
    order = list(TrainingData(str(shards), rank=0, world_size=1).epoch())
    for line in found:
        assert line["loss"] == losses[line["step"]] > line["limit"]
        (rank,) = line["ranks"]
        assert rank["loss"] == pytest.approx(line["loss"])
        assert rank["example_ids"] == list(order[line["step"] - 1].example_ids)
    assert f"step {found[0]['step']}/12  loss spike" in capsys.readouterr().out
