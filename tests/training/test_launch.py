"""How ranks meet, and runs that torchrun starts again or starts from two machines."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from running import command, launch, losses, wait_for
from torch.distributed import HashStore

from training.__main__ import main
from training.checkpoint import Saver, newest
from training.config import Checkpoint
from training.errors import Unmet
from training.faults import SIGNALLED
from training.launch import fresh, tidy

SHORT = timedelta(seconds=0.2)
LONG = timedelta(seconds=20)
TWO = ("--standalone", "--nproc-per-node", "2")
OPTIONS = ("schedule.steps=12", "checkpoint.every=2", "checkpoint.keep=0")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> dict[int, float]:
    """The losses of two ranks that are never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    process = launch(command(folder, shards, *OPTIONS), *TWO)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    found = losses(folder / "run")
    assert list(found) == list(range(1, 13))
    return found


def test_a_second_life_sees_nothing_of_the_first() -> None:
    """Three ranks, four lives, one store: what a life wrote is not there in the next, whoever comes first."""
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        for life in range(4):
            order = [(life + place) % 3 for place in range(3)]
            waiting = {rank: pool.submit(fresh, store, rank=rank, size=3, timeout=LONG) for rank in order}
            parts = [waiting[rank].result() for rank in range(3)]
            assert not any(part.check(["address"]) for part in parts)
            parts[life % 3].set("address", str(life))
            assert [part.get("address") for part in parts] == [str(life).encode()] * 3


def test_a_rank_that_never_comes_is_named() -> None:
    """Rank 0 says which ranks are missing, the others that rank 0 is, each in its own line."""
    with pytest.raises(Unmet, match=r"of 3 ranks these did not come within 0:00:00\.2.*: \[1, 2\]"):
        fresh(HashStore(), rank=0, size=3, timeout=SHORT)
    with pytest.raises(Unmet, match="rank 0 did not answer rank 2"):
        fresh(HashStore(), rank=2, size=3, timeout=SHORT)


def test_two_ranks_come_back_by_themselves_whenever_one_is_killed(
    words: Callable[..., list[str]], tmp_path: Path, whole: dict[int, float]
) -> None:
    """Killed in a write behind the training, before a rename, in a step: no whole checkpoint is lost.

    Each life goes on from the last whole checkpoint, bit for bit as never stopped.

    One rank that takes two buffers a step then goes on in the same order, to fp32 tolerance.
    """
    faults = [
        [0, 1, "training.files.write_part", 2, "kill"],  # tensors of step 4 are written
        [1, 0, "training.checkpoint.Saver._publish", 3, "kill"],  # step 8 is whole, but for its name
        [2, 1, "training.train.forward_backward", 4, "kill"],  # step 10
    ]
    here = words(*OPTIONS, "checkpoint.background=true", run="cut")
    process = launch(here, *TWO, "--max-restarts", "3", faults=json.dumps(faults))
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    begun = [int(step) for step in re.findall(r"step (\d+) to 12 of 12", output)]
    assert begun in ([0, 2, 6, 6], [0, 2, 6, 8]), output  # step 8 may still be written when step 10 begins
    assert "Traceback" not in output, output
    assert losses(tmp_path / "cut") == whole
    assert not list((tmp_path / "cut" / "checkpoints").glob(".*"))

    last = newest(tmp_path / "cut" / "checkpoints")
    assert last
    last.rename(tmp_path / "away")
    assert main(words(*OPTIONS, "data.accumulation=2", run="cut", flags=("--resume",))) == 0
    assert losses(tmp_path / "cut") == pytest.approx(whole, rel=1e-4)


def test_a_refusal_stays_one_in_the_next_life(
    words: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only lives of the launch that began the run, or took it over, go on with it; others need --resume.

    A later life of a finished run has nothing to do, and is none that failed.
    """

    def life(number: int, *options: str, launch: str, flags: tuple[str, ...] = ()) -> int:
        file = f"logs/my-run_{launch}/attempt_{number}/0/error.json"  # torchrun's; all launches have one id
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", file)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
        return main(words(*options, "checkpoint.every=1", flags=flags))

    assert life(1, "run.steps=1", launch="begins", flags=("--resume",)) == 2
    assert "holds no run to go on with" in capsys.readouterr().err
    assert life(0, "run.steps=1", launch="begins") == 0
    for number in range(2):
        assert life(number, "run.steps=2", launch="other") == 2
        assert "holds a run already" in capsys.readouterr().err
    assert list(losses(tmp_path / "run")) == [1]
    assert life(1, "run.steps=2", launch="begins") == 0
    assert life(0, "run.steps=3", launch="takes-over", flags=("--resume",)) == 0
    assert life(1, "run.steps=4", launch="begins") == 2
    assert life(1, "run.steps=4", launch="takes-over") == 0
    capsys.readouterr()
    assert life(2, "run.steps=4", launch="takes-over") == 0
    assert "finished: 4 of 4 steps, nothing to do" in capsys.readouterr().out
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4]


def test_two_agents_train_as_one(
    words: Callable[..., list[str]], tmp_path: Path, whole: dict[int, float]
) -> None:
    """Two torchruns with an address each, as on two machines, take the steps of one with two ranks.

    A rank of one is killed on the way: both agents start theirs again, and go on from the checkpoint.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    agents = [
        launch(
            words(*OPTIONS, "run.steps=4"),
            *("--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node), "--max-restarts", "2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--local-addr", address),
            faults=json.dumps([[0, 1, "training.train.forward_backward", 3, "kill"]]),
        )
        for node, address in enumerate(("127.0.0.1", "127.0.0.2"))
    ]
    outputs = [agent.communicate(timeout=240)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert losses(tmp_path / "run") == {step: whole[step] for step in range(1, 5)}
    assert re.findall(r"2 ranks on cpu, step (\d+)", "".join(outputs)) == ["0", "2"]


@pytest.mark.parametrize("background", [False, True])
def test_no_rank_ends_before_a_checkpoint_has_its_name(tmp_path: Path, background: bool) -> None:
    """Rank 0 gives it: where another had ended before, Slurm and torchrun would end rank 0 as well."""
    together = threading.Barrier(2)
    world = [types.SimpleNamespace(chief=not rank, size=2, barrier=together.wait) for rank in range(2)]
    options = Checkpoint(background=background)
    given = threading.Event()

    def publish(partial: Path, final: Path) -> None:
        time.sleep(0.5)
        given.set()

    def finish(rank: int) -> bool:
        saver = savers[rank]
        if background:
            written: Future[None] = Future()
            written.set_result(None)
            saver._pending = written, tmp_path, tmp_path
        elif not rank:
            publish(tmp_path, tmp_path)  # where `save` has brought rank 0, while rank 1 is back from it
        saver.finish()
        return given.is_set()

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr("training.files.parts", lambda partial: 2)
        patch.setattr("torch.distributed.new_group", lambda **_: None)
        savers = [Saver(tmp_path, options=options, world=one) for one in world]  # type: ignore[arg-type]
        patch.setattr(savers[0], "_publish", publish)
        assert list(pool.map(finish, range(2), timeout=60)) == [True, True]


ENDING = """
import atexit, threading, time
import torch
from training.launch import leave

def back_and_forth():
    while True:
        (torch.ones(8, requires_grad=True) * 2).sum().backward()

threading.Thread(target=back_and_forth, daemon=True).start()
time.sleep(0.2)
atexit.register(print, "closed")
print("said", end=" ")
leave(3)
"""


def test_a_thread_amid_torch_ends_no_process_by_force() -> None:
    """A program that leaves while a thread asks for the interpreter's lock amid C++ ends with its own status.

    With `sys.exit(3)` in place of `leave(3)` it ends with signal 6, before Python 3.14. What is open is
    closed, and what was printed is written.
    """
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, "terminate" in done.stderr) == (3, "said closed\n", False)


def test_the_temporary_folder_is_left_as_it_was(
    words: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a run that Ctrl-C stops, by two ranks whose torchrun got a folder for its logs."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch wrote this process's own there
    process = launch(words(run="stopped"), TMPDIR=str(temporary))
    wait_for(2, run=tmp_path / "stopped", process=process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == SIGNALLED, output
    assert os.listdir(temporary) == []
    few = ("schedule.steps=2", "schedule.warmup=0")
    process = launch(words(*few, run="two"), *TWO, "--log-dir", str(tmp_path / "logs"), TMPDIR=str(temporary))
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert os.listdir(temporary) == []


def test_only_an_empty_folder_of_torch_s_own_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What holds compiled layers stays, and so does a folder that somebody chose elsewhere."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    empty, full, chosen = tmp_path / "torchinductor_me", tmp_path / "torchinductor_you", tmp_path / "my-own"
    for folder in (empty, full / "fxgraph", chosen):
        folder.mkdir(parents=True)
    for folder in (empty, empty, full, chosen):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        tidy()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    tidy()
    assert [folder.exists() for folder in (empty, full, chosen)] == [False, True, True]
