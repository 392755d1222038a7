"""What the trainer's tests share; and the way to the modules beside them, which workers run as scripts."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from running import command
from tiny_shards import some_shards


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return some_shards(tmp_path_factory.mktemp("data") / "shards")


@pytest.fixture
def words(tmp_path: Path, shards: Path) -> Callable[..., list[str]]:
    """The command's words for a run on the shards, with overrides."""
    return partial(command, tmp_path, shards)
