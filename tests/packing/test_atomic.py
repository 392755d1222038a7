"""A folder appears whole or not at all, by one writer at a time, whatever happens to the writer."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from shard_sets import fill, make_set

from packing import atomic
from packing.atomic import AtomicFolder
from packing.errors import OutputError, ShardError
from packing.shards import ShardWriter, open_shards, verify

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of the test's own, for what was verified before."""
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.mark.parametrize("mode", ["new", "force"])
def test_killed_at_every_step(tmp_path: Path, mode: str) -> None:
    """Killed (-9) before each of its steps, a writer leaves nothing, the old set, or the whole new one.

    Never anything that looks whole and is not; and the next writer to the name finds the old set in its
    place or an empty one, clears what is stale and leaves nothing beside.
    """
    done = subprocess.run(
        [sys.executable, str(HERE / "kill_worker.py"), str(tmp_path), mode],
        capture_output=True,
        text=True,
        check=True,
    )
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(outcomes) > 50
    assert [one["killed"] for one in outcomes] == [True] * (len(outcomes) - 1) + [False]
    seen = [one["left"] for one in outcomes]
    assert seen == sorted(seen, key=["old", "none", "new"].index), "each state follows the one before"
    assert set(seen) == ({"none", "new"} if mode == "new" else {"old", "none", "new"})
    for one in outcomes:
        assert one["beside"] == ["set"], one
        assert one["refused"] == (mode == "force" or one["left"] == "new"), one
        assert one["after"] == (
            "new" if mode == "new" else "old" if one["left"] == "none" else one["left"]
        ), one
        assert one["set_aside"] == (mode == "force" and one["left"] == "none"), one


def other_process(code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=HERE,
        **options,
    )


HOLD = """
import sys
from packing.shards import ShardWriter
from shard_sets import fill
with ShardWriter(sys.argv[1], capacity=64, fingerprint={}, force=True) as writer:
    print("writing", flush=True)
    sys.stdin.readline()
    fill(writer, [[1], [2]])
"""


def test_two_processes_on_one_output(tmp_path: Path) -> None:
    """The second is refused at once, with force as well, and the first is not disturbed."""
    out = tmp_path / "set"
    first = other_process(HOLD, out)
    assert first.stdout
    assert first.stdout.readline() == "writing\n"
    for force in (False, True):
        with pytest.raises(OutputError, match="another process is writing"):
            make_set(out, [[1]], force=force)
    first.communicate("go on\n")
    assert first.returncode == 0
    verify(out)
    assert len(open_shards(out)) == 2
    assert os.listdir(tmp_path) == ["set"]


def test_a_dead_writers_folder_is_taken_over(tmp_path: Path) -> None:
    """What a killed writer left beside the name is recognised by its name and gone after the next run."""
    out = tmp_path / "set"
    first = other_process(HOLD, out)
    assert first.stdout
    first.stdout.readline()
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert sorted(os.listdir(tmp_path)) == [".set.padfree-lock", ".set.padfree-partial"]
    with pytest.raises(ShardError, match="no such directory"):
        open_shards(out)
    make_set(out, [[1]])
    assert os.listdir(tmp_path) == ["set"]


RACE = """
import sys
from packing.errors import OutputError
from shard_sets import make_set
sys.stdin.readline()
try:
    make_set(sys.argv[1], [[int(sys.argv[2])]])
    print("won")
except OutputError as error:
    print(error)
"""


def test_a_race(tmp_path: Path) -> None:
    """Of four processes that start at once exactly one writes the set; the others say why they can't."""
    racers = [other_process(RACE, tmp_path / "set", number + 1) for number in range(4)]
    said: list[str] = []

    def run(racer: subprocess.Popen[str]) -> None:
        said.append(racer.communicate("go\n")[0])

    threads = [threading.Thread(target=run, args=(racer,)) for racer in racers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said.count("won\n") == 1
    assert all("exists" in line or "another process" in line for line in said if line != "won\n")
    verify(tmp_path / "set")
    assert os.listdir(tmp_path) == ["set"]


def test_a_lock_removed_while_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the owner finishes between our opening the lock file and locking it, we begin anew.

    Else we would hold a lock that nobody else can see, and two writers would own one folder.
    """
    plain, taken = fcntl.flock, []

    def late(lock: int, operation: int) -> None:
        if not taken:
            (tmp_path / ".set.padfree-lock").unlink()
        taken.append(lock)
        plain(lock, operation)

    monkeypatch.setattr(atomic.fcntl, "flock", late)
    folder = AtomicFolder(tmp_path / "set", force=False, may_replace=lambda _: False)
    assert len(taken) == 2
    with pytest.raises(OutputError, match="another process"):
        AtomicFolder(tmp_path / "set", force=False, may_replace=lambda _: False)
    folder.publish()
    assert os.listdir(tmp_path) == ["set"]


def test_a_rename_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With force: if the new set can't be put in its place, the old one comes back to it."""
    out = make_set(tmp_path / "set", [[1], [2]])
    plain = os.rename

    def failing(source: Any, target: Any) -> None:
        if str(source).endswith("partial"):
            raise OSError(5, "Input/output error", str(source))
        plain(source, target)

    monkeypatch.setattr(atomic.os, "rename", failing)
    with pytest.raises(OutputError, match="Input/output error"):
        make_set(out, [[1]], force=True)
    verify(out)
    assert len(open_shards(out)) == 2
    assert os.listdir(tmp_path) == ["set"]


def test_a_target_that_appears_meanwhile(tmp_path: Path) -> None:
    """A folder made at the name while the set was written is not overwritten."""
    with ShardWriter(tmp_path / "set", capacity=64, fingerprint={}) as writer:
        (tmp_path / "set").mkdir()
        with pytest.raises(OutputError, match="exists"):
            fill(writer, [[1]])
    assert os.listdir(tmp_path / "set") == []
    assert os.listdir(tmp_path) == ["set"]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_the_umask_is_kept(tmp_path: Path, umask: int) -> None:
    """Files and folders have the rights that the user's umask leaves, no fewer as temporary ones would."""
    before = os.umask(umask)
    try:
        with ShardWriter(tmp_path / "set", capacity=64, fingerprint={}) as writer:
            fill(writer.part("eval"), [[1]])
            fill(writer, [[1]])
    finally:
        os.umask(before)
    for path in [tmp_path / "set", *(tmp_path / "set").rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~umask


def test_discarding_twice(tmp_path: Path) -> None:
    """Discarding, and doing it again or after publishing, leaves what it should."""
    folder = AtomicFolder(tmp_path / "a", force=False, may_replace=lambda _: False)
    folder.discard()
    folder.discard()
    assert os.listdir(tmp_path) == []
    folder = AtomicFolder(tmp_path / "a", force=False, may_replace=lambda _: False)
    folder.publish()
    folder.discard()
    assert os.listdir(tmp_path) == ["a"]
    assert os.listdir(tmp_path / "a") == []
