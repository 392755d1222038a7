"""The README's blocks that are marked `<!-- run: NAME -->` run as they stand, one after the other."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from packing.sample import CHATS

README = Path(__file__).resolve().parents[2] / "README.md"
USES = ("offline", "drop-in", "trl", "torchrun")
"""In the order in which they run: the first makes `shards` of `chats.jsonl` with the tokenizer in `model`."""
MARKED = re.compile(r"^<!-- run: (?P<name>[\w-]+) -->\n+```(?P<kind>\w+)\n(?P<code>.*?)^```$", re.M | re.S)


def blocks() -> dict[str, tuple[str, str]]:
    """Name -> kind and code."""
    found = MARKED.findall(README.read_text("utf-8"))
    names = [name for name, _, _ in found]
    assert len(names) == len(set(names)), f"a block is marked twice: {names}"
    return {name: (kind, code) for name, kind, code in found}


@pytest.fixture(scope="module")
def place(trainers: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a reader has: chats and a model with its tokenizer."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "chats.jsonl").write_bytes(CHATS.read_bytes())
    trainers.make_model(folder / "model", family="qwen3_5_text")
    return folder


def test_each_use_has_its_block() -> None:
    """Every use is there and marked, and no mark is left that is not run."""
    assert sorted(blocks()) == sorted(USES)


@pytest.mark.parametrize("name", USES)
def test_the_block_runs_as_it_stands(name: str, place: Path) -> None:
    """A reader who copies the block gets what it says."""
    kind, code = blocks()[name]
    commands = {"sh": ["bash", "-euo", "pipefail", "-c", code], "python": [sys.executable, "-c", code]}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        commands[kind],
        cwd=place,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
